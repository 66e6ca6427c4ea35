"""What the ranks have agreed on, as pure data: entries of a shared log, and the state that they make of it.

Ranks agree by a log: entry 0, 1, 2 ..., each written once, by the first rank (`Ranks.claim`). Every rank reads the
same entries in the same order and applies them with the same function, `apply`: so at the same place in the log
all ranks hold the same state, say the same, and cannot come to two answers. No clock and no input is read here.

A *generation* is one checkpoint (or one pause) of the whole job:

    ask ........ opens it; more askers join: the tighter deadline wins, `after` and `save` only escalate
    step ....... all ranks have bid the first boundary that they can still do; the highest bid is the step
    begin ...... the first rank stands there: from here on it is finished, not called off
    gathered ... every rank has handed in its part (its shard) under this key
    end ........ committed with a manifest that all ranks name alike; or failed; or aborted before it began

One generation is in front: training is on its way to its step, or stands there. One that leaves training running
(`after: continue`) goes to the back when it begins: training continues during the write, and another may come to the
front.

Each host has a UPS, and so a word of its own: a caller that asks for a pause (or the end) *holds* training for its
host, and training stands until the last host that holds it has said resume. A host's word never takes back another's.

A host that *departs* ends the job on all hosts: what is being written at the step where all stand is finished, else all
ranks stop at the highest step that was bid. No host lets training go on after that. Before ranks of several hosts go on
from a hold, all of them bid once more (a *roll*): where one does not, its host has left without a word.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, auto
from typing import Any, Final

from powerguard.fields import clean_text
from powerguard.wire import MAX_STEP, After, escalated

_KEPT: Final = 16  # generations that are remembered after their end
_MAX_IDS: Final = 64  # ids that one generation remembers: a storm of askers must not grow the state
_MAX_HOSTS: Final = 1024
_MAX_HOLDS: Final = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a generation ended: the same for every rank.

    ok: every rank's part is durable, and `digest` names the manifest ("" for a pause, which has none).
    aborted: called off before it began. lost: this rank has lost the others and does not know how it ended.
    """

    ok: bool
    aborted: bool = False
    lost: bool = False
    digest: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One checkpoint or pause of the whole job, as every rank knows it.

    number: 1, 2 ... ids: of all who asked; the first one opened it. save: False for a pause without a checkpoint.
    step: what all ranks save, or stand at; None until agreed. token: 8 hex digits that no other generation has.
    on_battery: hosts (their index) whose asker said on_battery. beside: written while training goes on.
    already: digest of the checkpoint of this very step that is durable already; "" for none. follows: number of the one
    that was still writing this very step as this one began, whose checkpoint counts for both; 0: none. gathered: keys.
    is_outdated: training was rolled back since it began, so that its step comes again with another state.
    """

    number: int
    ids: tuple[str, ...]
    reason: str = ""
    event: str = ""
    after: After = After.CONTINUE
    save: bool = True
    on_battery: tuple[int, ...] = ()
    step: int | None = None
    token: str = ""
    begun: bool = False
    beside: bool = False
    already: str = ""
    follows: int = 0
    is_outdated: bool = False
    gathered: tuple[str, ...] = ()
    ended: Ended | None = None

    @property
    def rolls(self) -> bool:
        """Whether all ranks bid only to show that they are there, before training goes on from a hold."""
        return not self.save and self.after is After.CONTINUE


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What all ranks know at one place of the log.

    front: the generation that training goes to or stands at. back: one that is written while training continues.
    held_at: the step at which training stands still; None: it does not. holds: the hosts (their index) that want it to
    stand, there or at the end of the generation in front, and whether each of them wants a pause or the end.
    leaving: number of the generation after whose durable end every rank ends. left: a rank has ended its training.
    departed: which host has left the job, and why, so that every rank ends; "" while none has. departing: that host.
    committed_step, committed_digest: of the newest durable checkpoint of this run, since training was rolled back.
    rotten: digest of the one that a host has found rotten last; "" where training was rolled back since.
    past: ended ones, newest last.
    """

    number: int = 0
    front: Generation | None = None
    back: Generation | None = None
    held_at: int | None = None
    holds: tuple[tuple[int, After], ...] = ()
    leaving: int | None = None
    left: bool = False
    departed: str = ""
    departing: int | None = None
    committed_step: int | None = None
    committed_digest: str = ""
    rotten: str = ""
    past: tuple[Generation, ...] = field(default=())

    def generation(self, number: int) -> Generation | None:
        """Return one of those in flight, or ended not long ago."""
        known = (self.front, self.back, *reversed(self.past))
        return next((one for one in known if one is not None and one.number == number), None)

    def held_by(self, host: int) -> After:
        """Return what this host wants training to do: go on, stand or end."""
        return dict(self.holds).get(host, After.CONTINUE)

    def asked_as(self, name: str) -> Generation | None:
        """Return the generation that was requested under this id."""
        known = (self.front, self.back, *reversed(self.past))
        return next((one for one in known if one is not None and name in one.ids), None)

    def joined(self, save: bool, after: After) -> Generation | None:  # noqa: FBT001 - a pair that travels together
        """Return the generation that such an ask joins; None: it opens one.

        One that is written while training continues cannot pause it: only another that goes on joins it.
        """
        if self.front is not None:
            return self.front
        return self.back if save and after is After.CONTINUE else None

    def to_json(self) -> str:
        """Return it for a rank that slept through part of the log."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> "State":
        """Read what `to_json` wrote."""
        value = json.loads(text)
        one, several = ("front", "back"), value.pop("past")
        flight = {key: None if value[key] is None else _generation(value.pop(key)) for key in one}
        holds = tuple((host, After(after)) for host, after in value.pop("holds"))
        return cls(**{**value, **flight, "holds": holds, "past": tuple(_generation(item) for item in several)})


def _generation(value: dict[str, Any]) -> Generation:
    ended = value.pop("ended")
    lists: dict[str, Any] = {key: tuple(value.pop(key)) for key in ("ids", "on_battery", "gathered")}
    after = After(value.pop("after"))
    return Generation(**value, **lists, after=after, ended=None if ended is None else Ended(**ended))


# --- The log -------------------------------------------------------------------------------------------------------


def apply(state: State, entry: Mapping[str, Any]) -> State:
    """Return the state after one entry. Total: what makes no sense at this place changes nothing, for anyone."""
    kind = entry.get("kind")
    rule = _RULES.get(kind) if isinstance(kind, str) else None
    try:
        state = state if rule is None else rule(state, entry)
    except (KeyError, TypeError, ValueError, OverflowError):
        return state
    if state.holds and state.held_at is None and (state.front is None or state.front.after is After.CONTINUE):
        return replace(state, holds=())  # what was to stand came to nothing: there is no pause to take back
    if state.held_at is not None and not state.holds and state.front is None and state.leaving is None:
        return replace(state, held_at=None)  # a checkpoint joined the roll, which ended as a checkpoint: all go on
    return state


def _ask(state: State, entry: Mapping[str, Any]) -> State:
    name, after, save, host = str(entry["id"])[:128], After(entry["after"]), bool(entry["save"]), int(entry["host"])
    if state.asked_as(name) is not None or state.leaving is not None or state.departed:
        return state
    if not save and after is After.CONTINUE:
        return state  # nothing is wanted: all would wait, and no caller could release them
    hosts = (host,) if entry["reason"] == "on_battery" else ()
    held_by = escalated(state.held_by(host), after)
    if held_by is not After.CONTINUE and len(state.holds) < _MAX_HOLDS:
        state = replace(state, holds=tuple(sorted({**dict(state.holds), host: held_by}.items())))
    known = state.joined(save, after)
    if known is not None:
        merged = replace(
            known,
            ids=known.ids if len(known.ids) >= _MAX_IDS else (*known.ids, name),
            after=escalated(known.after, after),
            save=known.save or (save and not known.begun),
            on_battery=tuple(dict.fromkeys((*known.on_battery, *hosts)))[:_MAX_HOSTS],
        )
        return replace(state, front=merged) if known is state.front else replace(state, back=merged)
    opened = Generation(
        number=state.number + 1,
        ids=(name,),
        reason=clean_text(str(entry["reason"]), 32),
        event=clean_text(str(entry["event"]), 128),
        after=after,
        save=save,
        on_battery=hosts,
    )
    state = replace(state, number=opened.number)
    if state.left:
        return _over(state, opened, Ended(ok=False, aborted=True, error="training has ended"))
    return replace(state, front=opened)


def _step(state: State, entry: Mapping[str, Any]) -> State:
    front, step = state.front, int(entry["step"])
    if front is None or front.number != entry["g"] or front.step is not None or not 0 <= step <= MAX_STEP:
        return state
    agreed = replace(front, step=step, token=str(entry["token"])[:8])
    if step == state.committed_step:
        agreed = replace(agreed, already=state.committed_digest)
    if not agreed.save:  # a pause: there is nothing to write, and each rank that gets there waits; or a roll: all go on
        return _over(replace(state, held_at=None if agreed.rolls else step), agreed, Ended(ok=True))
    # A hold at another step is over: all ranks are on their way to this one, and what comes after is decided there.
    held_at = state.held_at if state.held_at is None else step
    return replace(state, front=agreed, held_at=held_at)


def _begin(state: State, entry: Mapping[str, Any]) -> State:
    front = state.front
    if front is None or front.number != entry["g"] or front.step is None or front.begun:
        return state
    back = state.back
    beside = front.after is After.CONTINUE and back is None
    begun = replace(front, begun=True, beside=beside)
    # By the log, and not by what each rank has saved: one may have heard of the end of the other, and the next one not.
    if front.step == state.committed_step:
        begun = replace(begun, already=state.committed_digest)
    elif back is not None and back.step == front.step and not back.is_outdated:
        begun = replace(begun, follows=back.number)
    return replace(state, front=None, back=begun) if beside else replace(state, front=begun)


def _gathered(state: State, entry: Mapping[str, Any]) -> State:
    known, key = _in_flight(state, entry), str(entry["key"])
    if known is None or key in known.gathered:
        return state
    return _put(state, replace(known, gathered=(*known.gathered, key)))


def _end(state: State, entry: Mapping[str, Any]) -> State:
    known = _in_flight(state, entry)
    if known is None:
        return state
    ok = entry["ok"] is True
    if ok and not known.begun:
        return state
    aborted = not ok and not known.begun and entry.get("aborted") is True
    ended = Ended(
        ok=ok,
        aborted=aborted,
        digest=clean_text(str(entry.get("digest", "")), 160) if ok else "",
        error="" if ok else clean_text(str(entry.get("error", ""))),
    )
    return _over(state, known, ended)


def _cancel(state: State, entry: Mapping[str, Any]) -> State:
    known = _in_flight(state, entry)
    if known is None or (state.departed and known is state.front):
        return state
    if known is state.front and known.after is not After.CONTINUE and (held := _released(state, entry)).holds:
        return held
    if not known.begun:
        return _over(state, known, Ended(ok=False, aborted=True, error="called off before it began"))
    return _put(state, replace(known, after=After.CONTINUE))


def _resume(state: State, entry: Mapping[str, Any]) -> State:
    if state.departed:
        return state
    state = _released(state, entry)
    if state.holds:
        return state
    front = state.front
    rolls = entry.get("roll") is True and state.held_at is not None and not state.left
    if rolls and (front is None or not front.save):
        if front is not None:
            return replace(state, front=replace(front, after=After.CONTINUE), leaving=None)
        number = state.number + 1
        called = Generation(number=number, ids=(f"roll/{number}",), reason="roll", save=False)
        return replace(state, number=number, front=called, leaving=None)
    if front is not None and not front.save:
        state = _over(state, front, Ended(ok=False, aborted=True, error="called off before it began"))
    elif front is not None:
        state = replace(state, front=replace(front, after=After.CONTINUE))
    return replace(state, held_at=None, leaving=None)


def _released(state: State, entry: Mapping[str, Any]) -> State:
    """Take back what this host wanted (None: what all of them did); what the others want stands, and no more."""
    host = entry["host"]
    holds = tuple(hold for hold in state.holds if host is not None and hold[0] != host)
    wanted = {after for _, after in holds}
    front, leaving = state.front, state.leaving
    if front is not None and front.after is After.EXIT and After.EXIT not in wanted and After.PAUSE in wanted:
        front = replace(front, after=After.PAUSE)
    return replace(state, holds=holds, front=front, leaving=leaving if After.EXIT in wanted else None)


def _depart(state: State, entry: Mapping[str, Any]) -> State:
    if state.departed:
        return state
    because = clean_text(str(entry["because"])) or "a host has left the job"
    state = replace(state, departed=because, departing=int(entry["host"]))
    front = state.front
    if front is not None and front.begun:  # the newest state that there is: it is finished first
        return replace(state, front=replace(front, after=After.EXIT))
    if front is not None:
        state = _over(state, front, Ended(ok=False, aborted=True, error=state.departed))
    if state.leaving is not None:
        return state
    number = state.number + 1
    opened = Generation(number=number, ids=(f"depart/{number}",), reason="left", after=After.EXIT, save=False)
    return replace(state, number=number, front=opened)


def _back(state: State, entry: Mapping[str, Any]) -> State:
    for known in (state.front, state.back):
        if known is not None:
            changed = replace(known, is_outdated=True) if known.begun else replace(known, already="")
            state = _put(state, changed)
    rotten = clean_text(str(entry.get("digest", "")), 160)
    return replace(state, committed_step=None, committed_digest="", rotten=rotten)


def _leave(state: State, entry: Mapping[str, Any]) -> State:
    if state.leaving is None:
        state = _resume(state, entry)  # a host that has gone says nothing any more, and must not hold the others
    state = replace(state, left=True)
    for known in (state.front, state.back):
        if known is not None:
            state = _over(state, known, Ended(ok=False, aborted=not known.begun, error="training has ended"))
    return state


def _in_flight(state: State, entry: Mapping[str, Any]) -> Generation | None:
    known = (state.front, state.back)
    return next((one for one in known if one is not None and one.number == entry["g"]), None)


def _put(state: State, known: Generation) -> State:
    front = state.front
    if front is not None and front.number == known.number:
        return replace(state, front=known)
    return replace(state, back=known)


def _over(state: State, known: Generation, ended: Ended) -> State:
    """End a generation and decide what comes after it."""
    if state.front is not None and state.front.number == known.number:
        state = replace(state, front=None)
    elif state.back is not None and state.back.number == known.number:
        state = replace(state, back=None)
    state = replace(state, past=(*state.past, replace(known, ended=ended))[-_KEPT:])
    if ended.ok and known.save and not known.is_outdated:
        state = replace(state, committed_step=known.step, committed_digest=ended.digest)
    if known.rolls and not ended.ok and not ended.aborted:
        return replace(state, departed=ended.error or "a host has left the job", leaving=known.number)
    if state.departed and known.after is After.EXIT:
        return replace(state, leaving=known.number, held_at=known.step or 0)
    if known.after is After.CONTINUE or known.beside or not known.save or ended.aborted or known.step is None:
        return state
    if known.after is After.EXIT and ended.ok:
        return replace(state, leaving=known.number, held_at=known.step)
    return replace(state, held_at=known.step)  # also after a failure: standing still, a second try would lose nothing


_RULES: Final[Mapping[str, Callable[[State, Mapping[str, Any]], State]]] = {
    "ask": _ask,
    "step": _step,
    "begin": _begin,
    "gathered": _gathered,
    "end": _end,
    "cancel": _cancel,
    "resume": _resume,
    "depart": _depart,
    "back": _back,
    "leave": _leave,
}


# --- One rank at a step boundary -----------------------------------------------------------------------------------

NEVER: Final = 2**63
"""A step that no training reaches."""


class Move(Enum):
    """What a training thread does at a boundary."""

    GO = auto()
    """Nothing is asked of it here."""
    WAIT = auto()
    """Stand, until the state changes, or this rank's watcher has bid."""
    BEGIN = auto()
    """The agreed step is here, and no rank has said so yet: say it."""
    TAKE = auto()
    """Take part: hand in this rank's state of this step."""
    PASSED = auto()
    """The agreed step lies behind: the script set the loop to another step. The generation must fail."""
    LEAVE = auto()
    """The checkpoint is durable, and its request said exit; or a host has left the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank alone knows. bid: its bid, and of which generation. taken: the last one it took part in."""

    bid: int | None = None
    bid_for: int = 0
    taken: int = 0


def first_boundary(step: int | None, standing: int | None) -> int | None:
    """Return the first boundary that a rank can still do: its bid. None: not known, because it has not begun to train.

    step: the last one that has ended. standing: the boundary at which its training thread is with us.
    """
    if standing is not None:
        return standing
    return None if step is None else step + 1


def move(state: State, stance: RankState, step: int) -> tuple[Move, Generation | None]:
    """Decide at the boundary after `step`, and for which generation."""
    back, front = state.back, state.front
    if back is not None and back.number > stance.taken and back.step is not None and step >= back.step:
        return (Move.TAKE if step == back.step else Move.PASSED), back
    if front is not None:
        if front.step is None:
            bid = stance.bid if stance.bid_for == front.number else None
            return (Move.GO if bid is not None and step < bid else Move.WAIT), front
        if step < front.step:
            return Move.GO, front
        if front.number <= stance.taken:
            return Move.WAIT, front
        if step > front.step:
            return Move.PASSED, front
        return (Move.TAKE if front.begun else Move.BEGIN), front
    if state.held_at is None or step < state.held_at:
        return Move.GO, None
    leaving = None if state.leaving is None else state.generation(state.leaving)
    return (Move.WAIT if leaving is None else Move.LEAVE), leaving


def due(state: State, stance: RankState) -> int:
    """Return the first boundary at which `move` is anything but GO: below it, a training thread need not look."""
    back, front = state.back, state.front
    bounds = [NEVER]
    if back is not None and back.number > stance.taken and back.step is not None:
        bounds.append(back.step)
    if front is not None:
        if front.step is not None:
            bounds.append(front.step)
        else:
            bounds.append(stance.bid if stance.bid_for == front.number and stance.bid is not None else 0)
    elif state.held_at is not None:
        bounds.append(state.held_at)
    return min(bounds)
