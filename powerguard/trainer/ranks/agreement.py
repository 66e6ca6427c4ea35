"""All ranks save, pause and go on at the same step, without one collective: a watcher thread per rank and a shared log.

What is agreed, and by which rules, is in `powerguard.trainer.ranks.machine`; this module is one rank's part in it. Two
threads of every rank matter:

- the *watcher* alone reads the log, bids for this rank and gives up on others. It never waits for training;
- the *training thread* looks at one attribute per step (`due`), and stands in `wait` only where that says so.

Why nothing deadlocks with training's own collectives: when a generation opens, the watcher bids the first boundary that
this rank can still do: the one after the last that has ended, or the one where it stands. Until the highest bid is
known the training thread passes every boundary below its own bid, and stands at the bid itself. The bids come from
watchers, so they all come, even from a rank that sits in an all-reduce whose partner stands; then the step is the
highest bid T, no rank has passed T (each stood at its own bid, and that is T at most), and every rank goes on to T with
all others, so that the collectives of the steps up to T have all their partners.

Why the bid is right without a lock in the training loop: the watcher first writes `due = 0` and then reads `step`; the
loop first writes `step` and then reads `due`. Either the loop sees that it is due, or the watcher sees the step that
has ended (CPython runs both in one order for all threads).

Why there are no two answers: every decision is an entry of the log, written once. A rank that gives up on another
writes that as an entry too, and it counts only if no other end came before it.

Durations are relative, and measured on each rank's own CLOCK_BOOTTIME: no step of a wall clock matters.
"""

import atexit
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from powerguard.fields import clean_text
from powerguard.trainer.log import log
from powerguard.trainer.loop.checkpointer import attempted
from powerguard.trainer.ranks.base import Ranks, RanksError, boottime_s
from powerguard.trainer.ranks.machine import NEVER, Ended, Generation, Move, RankState, State, due, first_boundary, move
from powerguard.trainer.ranks.replica import Entry, Neighbour, Replica, SharedParts, over
from powerguard.wire import After, TriggerRequest, escalated

_T = TypeVar("_T")
_FINER_S: Final = 0.05  # a deadline that is tighter by less is no news
_NAMED: Final = 64  # among so many ranks, those that are missing are looked for and named
_CLOSE_S: Final = 5.0
_DEPART_S: Final = 1.0
"""How long a host that leaves waits until every rank has read that: it has little time, and they will notice anyway."""
_IDS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """After how long the others give up on a rank, in seconds.

    dead_s: nothing heard from its watcher while a generation is in flight (a killed process on the same host is noticed
    at once). reach_s: from the opening until all stand at the step, where no deadline is tighter. write_s: from there
    to the end, where there is no deadline; with one it is late_s after it: what is nearly written is worth finishing.
    lost_s: without an answer from the store, after which this rank is on its own.
    words_s: after which a rank whose part is written names those that it waits for.
    beat_s: how often the watchers look after each other in the meantime. held_s, idle_s: how long one waits in one go
    for an entry while training stands, and while nothing is asked (a request is passed on at once).
    """

    dead_s: float = 10.0
    reach_s: float = 600.0
    write_s: float = 1800.0
    late_s: float = 60.0
    lost_s: float = 15.0
    words_s: float = 60.0
    beat_s: float = 0.25
    held_s: float = 30.0
    idle_s: float = 3600.0


class GenerationOverError(Exception):
    """The generation ended before this rank's part was done; `generation.ended` says how. Abandon what was written."""

    def __init__(self, generation: Generation) -> None:
        super().__init__("" if generation.ended is None else generation.ended.error)
        self.generation = generation


class Agreement:
    """One rank's part in what all ranks of a job agree on. Begins at once; `close` it when training has ended.

    The training loop, once per step, in this order:

        agreement.step = step
        if step >= agreement.due:
            while (generation := agreement.wait(step)) is not None:
                ...  # save this rank's shard of this step: `gather`, commit where one is to, `conclude`

    step: the last one that has ended here, or that was restored; None before: then this rank bids nothing, and a
    generation waits for it. due: see above. changed: called, from any thread and without a lock held, whenever
    something is news; it must not block. What it raises is logged and shown (`trouble`), and has no other effect.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        limits: Limits = Limits(),
        clock: Callable[[], float] = boottime_s,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.step: int | None = None
        self.due = NEVER
        self.ranks = ranks
        self._limits = limits
        self._clock = clock
        self._stance = RankState()
        self._standing: int | None = None
        self._bid_in = 0  # the generation whose bid has been handed in
        self._changed = changed
        self._news_trouble = ""
        self._joined: dict[str, int] = {}  # ids whose join was no news for the others
        self._deadlines: dict[int, float] = {}
        self._since: dict[tuple[int, bool], float] = {}
        self._parts = SharedParts()
        self._closing = threading.Event()
        self._neighbour = Neighbour(ranks, dead_s=limits.dead_s, beat_s=limits.beat_s, clock=clock)
        self._replica = Replica(
            ranks, applied=self._applied, changed=self._report_news, clock=clock, lost_s=limits.lost_s
        )
        self._thread = threading.Thread(target=self._run, name="powerguard-agreement", daemon=True)
        self._thread.start()
        # A daemon thread that wakes within a library when the interpreter is gone aborts the process (seen with torch).
        self._process = os.getpid()
        atexit.register(self._at_exit)

    # --- Those who ask -------------------------------------------------------------------------------------------

    def open(self, request: TriggerRequest, *, save: bool = True) -> Generation:
        """Ask all ranks for a checkpoint (save=False: for a pause); return the generation, opened or joined.

        The same id is the same generation. What training is willing to do after it is for the caller to see to.
        Raises RanksError when the store cannot be asked, or when all ranks are about to exit.
        """
        asked_at_s = self._clock()
        after = request.after if save else escalated(request.after, After.PAUSE)
        entry = {
            "kind": "ask",
            "id": request.id,
            "reason": request.reason.value,
            "event": request.event,
            "after": after.value,
            "save": save,
            "deadline_s": request.deadline_s,
            "host": self.ranks.host,
        }

        def answered(state: State) -> Generation | None:
            known = state.asked_as(request.id) or state.generation(self._joined.get(request.id, 0))
            if known is None and (joined := state.joined(save, after)) is not None:
                known = None if self._news(state, joined, entry, asked_at_s) else joined
            return known

        joined: list[Generation] = []

        def moot(state: State) -> bool:
            joined[:] = filter(None, [answered(state)])
            return bool(joined) or state.leaving is not None or bool(state.departed)

        known: Generation | None = None
        while known is None:  # else what it had joined came to nothing before it was looked at: asked once more
            self._replica.append(entry, moot)
            with self._replica.lock:
                state = self._replica.state
                last = state.generation(joined[0].number) if joined else None
                known = answered(state) or (last if last is not None and last.ended and last.ended.ok else None)
            if known is None and (state.leaving is not None or state.departed):
                why = state.departed or "every rank exits after the one that was just made"
                msg = f"no further checkpoint: {why}"
                raise RanksError(msg)
        with self._replica.lock:
            self._joined = {**dict(list(self._joined.items())[-_IDS:]), request.id: known.number}
        return known

    def cancel(self, number: int) -> Generation | None:
        """Call a generation off: one not begun is aborted everywhere, one begun is finished and training goes on.

        Where another host wants training to stand for it, it is this host's word alone that is taken back.
        """
        self._replica.append(
            {"kind": "cancel", "g": number, "host": self.ranks.host},
            lambda state: over(state, number, lambda known: known.begun and known.after is After.CONTINUE),
        )
        return self.generation(number)

    def resume(self, *, all_hosts: bool = False, may_leave: bool = False) -> None:
        """Take back that this host wants training to stand; it goes on, in all ranks, once no host wants that any more.

        A checkpoint that has begun is finished first. all_hosts: take it back for all of them. may_leave: not once all
        ranks are to end, when some have ended and the others would wait for them.
        """
        host = None if all_hosts else self.ranks.host

        def moot(state: State) -> bool:
            if may_leave and state.leaving is not None:
                return True
            return not state.holds or (host is not None and state.held_by(host) is After.CONTINUE)

        self._replica.append({"kind": "resume", "host": host, "roll": self.ranks.hosts > 1}, moot)

    def depart(self, because: str) -> None:
        """Say that this host leaves the job: every rank stops at one step and ends.

        Returns once every rank has read it and this one stands there, or after 1 s: taken away before, it would be
        missing in the collectives up to that step. Raises RanksError.
        """
        entry = {"kind": "depart", "host": self.ranks.host, "because": because}
        self._replica.append(entry, lambda state: bool(state.departed))
        self._replica.until(lambda: self._replica.state.leaving is not None and self._standing is not None, _DEPART_S)

    def go_back(self, rotten: str = "") -> None:
        """Say that what was committed last answers no request any more. Raises RanksError.

        Training is rolled back, and has another state after that step; or the checkpoint of this digest has rotted.
        """
        entry = {"kind": "back", "digest": rotten}
        self._replica.append(entry, lambda state: state.committed_step is None and state.rotten == rotten)

    @property
    def departed(self) -> str:
        """Which host has left the job, and why, so that every rank ends; "" while none has.

        A rank that stands, and loses the store that another host holds, may never learn whether all hosts go on. So it
        is where it stands on the way to a pause whose step it has not read yet: the others may stand at that step.
        """
        state, lost = self._replica.state, self._replica.lost
        if state.departed or not lost or self._closing.is_set():
            return state.departed
        pauses = state.front is not None and state.front.after is not After.CONTINUE
        stands = state.held_at is not None or (pauses and self._standing is not None)
        return lost if stands and self.ranks.hosts > 1 else ""

    def generation(self, number: int) -> Generation | None:
        """Return what is known of a generation: in flight, or one of the last 16 that have ended."""
        with self._replica.lock:
            known, lost = self._replica.state.generation(number), self._replica.lost
        if known is not None and known.ended is None and lost:
            return replace(known, ended=Ended(ok=False, lost=True, error=clean_text(lost)))
        return known

    @property
    def state(self) -> State:
        """What all ranks have agreed on, as far as this one has read."""
        return self._replica.state

    @property
    def standing(self) -> int | None:
        """The step at which this rank's training thread stands or saves now; None while it runs."""
        return self._standing

    def stand_at(self, step: int) -> None:
        """Bid this boundary until `wait` is called there: this rank and all others are in a save of this very step.

        Not before all others are: a rank that stands at the boundary where the step ended would wait for this one's
        part in a generation, and this one for that rank to come to the save.
        """
        with self._replica.lock:
            self.step = step if self.step is None else max(self.step, step)
            self._standing = step

    def leave(self) -> Generation | None:
        """Stand at no boundary any more (an interrupt); return what this rank was last sent to save for, if known."""
        self._standing = None
        return self.generation(self._stance.taken)

    @property
    def lost(self) -> str:
        """Why this rank has lost the others; "" while it has not."""
        return self._replica.lost

    @property
    def trouble(self) -> str:
        """What is wrong between the ranks, as far as this one sees, for a person; "" while nothing is."""
        return self._replica.lost or self._news_trouble

    def deadline_at_s(self, number: int) -> float | None:
        """Return the tightest deadline of a generation, on this rank's clock; None: none was set."""
        return self._deadlines.get(number)

    # --- The training thread ---------------------------------------------------------------------------------------

    def wait(self, step: int) -> Generation | None:
        """Stand at this boundary as long as must be; return the generation to save for, or None to train on.

        Call it again after each generation until it says None. A generation that comes with `ended` set is not to be
        saved: its checkpoint is durable, and every rank is to exit.
        """
        try:
            return self._stand(step)
        except BaseException:  # an interrupt (Ctrl-C) that training may survive: it is not here any more
            self._standing = None
            raise

    def _stand(self, step: int) -> Generation | None:
        while True:
            with self._replica.lock:
                self._standing = step
                action, known = self._move(step)
                if action is Move.WAIT:
                    self._replica.stand()
                    continue
                if action is Move.TAKE and known is not None:
                    self._stance = replace(self._stance, taken=known.number)
                elif action is Move.GO:
                    self._standing = None
                elif action is Move.LEAVE:
                    self._replica.notify_waiters()
                self._look()
            if action is Move.GO or known is None:
                return None
            if action in {Move.TAKE, Move.LEAVE}:
                return known
            self._answer(action, known, step)

    def _move(self, step: int) -> tuple[Move, Generation | None]:
        state = self._replica.state
        if not self._replica.lost:
            return move(state, self._stance, step)
        if not (because := self.departed):
            return Move.GO, None
        ended = Ended(ok=False, lost=True, error=clean_text(because))
        return Move.LEAVE, Generation(number=state.number, ids=("lost",), ended=ended)

    def _answer(self, action: Move, known: Generation, step: int) -> None:
        """Do what a boundary asks for besides standing: with the store, so without the lock."""
        number = known.number
        try:
            if action is Move.BEGIN:
                self._append_surely(number, {"kind": "begin"}, lambda now: now.begun)
            else:
                error = (
                    f"this rank is at step {step}, past the agreed step {known.step} (check whether the step was reset)"
                )
                self.conclude(number, ok=False, error=error)
                with self._replica.lock:
                    self._stance = replace(self._stance, taken=max(self._stance.taken, number))
        except GenerationOverError as ended:
            log.debug("generation %d: %s", number, ended)

    def settled(self, known: Generation) -> Generation:
        """Wait for the generation that this one follows; return this one, with the checkpoint of that if there is one.

        Every rank comes to the same answer, so that none writes the state again where another one names a checkpoint.
        """
        if not known.follows:
            return known
        state = self._replica
        state.until(lambda: over(state.state, known.follows) or over(state.state, known.number))
        ended = self._known(known.follows).ended
        return replace(known, already=ended.digest) if ended is not None and ended.ok else known

    def is_handed_in(self, number: int, key: str) -> bool:
        """Say whether any rank has handed in its part under a key; True too if the generation is over."""
        try:
            return self._surely(number, lambda ranks: self._parts.begun(ranks, number, f"k-{key}"))
        except GenerationOverError:
            return True

    def gather(self, number: int, key: str, value: bytes, *, read: bool = True) -> list[bytes]:
        """Hand in this rank's value under a key; return those of all ranks, by rank, once all have handed in theirs.

        read=False: wait for all, but do not fetch them: returns []. Any thread may call it, for each key once.
        Raises GenerationOverError when the generation ends first.
        """
        what = f"k-{key}"
        if self._all_in(number, what, value):
            self._append_surely(number, {"kind": "gathered", "key": key}, lambda now: key in now.gathered)
        self._await_all(number, key, what)
        known = self._known(number)
        if known.ended is not None:
            raise GenerationOverError(known)
        return self._surely(number, lambda ranks: self._parts.fetch(ranks, number, what)) if read else []

    def _await_all(self, number: int, key: str, what: str) -> None:
        """Wait until all ranks have handed in their part, or the generation is over; log which ranks take long."""

        def gathered() -> bool:
            return over(self._replica.state, number, lambda now: key in now.gathered)

        self._replica.until(gathered, self._limits.words_s)
        if not gathered() and not self._replica.lost and self.ranks.size <= _NAMED:
            late = ", ".join(map(str, self._surely(number, lambda ranks: self._parts.missing(ranks, number, what))))
            text = "checkpoint of step %s: has waited %.0f s for rank %s (does it call guard.step for the same step?)"
            log.warning(text, self._known(number).step, self._limits.words_s, late or "?")
        self._replica.until(gathered)

    def conclude(self, number: int, *, ok: bool, digest: str = "", error: str = "") -> Generation:
        """Say how this rank's part went, and return the generation once it has ended for all: `ended` is set.

        Every rank concludes. ok=False ends it as failed at once. digest: of the manifest, from each rank that committed
        one, else "". It ends well when all ranks say ok, at least one names a digest, and all of them the same.
        """
        try:
            if not ok:
                failure = f"rank {self.ranks.rank}: {error}" if self.ranks.size > 1 else error
                self._append_surely(number, {"kind": "end", "ok": False, "error": clean_text(failure)})
            elif self._all_in(number, "done", digest.encode("ascii", "replace")):
                values = self._surely(number, lambda ranks: self._parts.fetch(ranks, number, "done"))
                named = sorted({value.decode() for value in values if value})
                end: Entry = {"kind": "end", "ok": True, "digest": named[0]} if len(named) == 1 else {}
                wrong = {"kind": "end", "ok": False, "error": f"{len(named)} manifests, not one: {named[:4]}"}
                self._append_surely(number, end or wrong)
        except GenerationOverError as ended:
            return ended.generation
        self._replica.until(lambda: over(self._replica.state, number))
        return self._known(number)

    def close(self) -> None:
        """Say that this rank's training has ended, and with it what is in flight; then let go of the store."""
        is_last = bool(self.departed)  # every rank ends by itself, and the store may have gone already
        if not self._closing.is_set() and not is_last:
            try:
                host = self.ranks.host
                self._replica.append(
                    {"kind": "leave", "host": host},
                    lambda state: state.left and (state.leaving is not None or state.held_by(host) is After.CONTINUE),
                )
            except RanksError as error:
                log.debug("closing: %s", error)
        self._closing.set()
        self._replica.end("closed")
        self._thread.join(_DEPART_S if is_last else _CLOSE_S)
        self._replica.call.close()
        self._replica.own.close()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # a child of fork shares the connection, and must not speak on it
            self.close()

    def _all_in(self, number: int, what: str, value: bytes) -> bool:
        """Hand in a part; True for the rank (or, after a lost answer, the ranks) that sees all parts there."""
        if not self._surely(number, lambda ranks: self._parts.hand_in(ranks, number, what, value)):
            return False
        while not self._surely(number, lambda ranks: self._parts.complete(ranks, number, what)):
            self._replica.until(lambda: over(self._replica.state, number), self._limits.beat_s)
            known = self._known(number)
            if known.ended is not None:
                raise GenerationOverError(known)
        return True

    def _append_surely(
        self, number: int, entry: Entry, moot: Callable[[Generation], bool] = lambda _known: False
    ) -> None:
        self._surely(
            number,
            lambda _ranks: self._replica.append({**entry, "g": number}, lambda state: over(state, number, moot)),
            own=True,
        )

    def _surely(self, number: int, ask: Callable[[Ranks], _T], *, own: bool = False) -> _T:
        """Ask until there is an answer, or the generation is over: no other rank tries again for this one."""
        while True:
            try:
                return ask(self.ranks) if own else self._replica.call(ask)
            except (RanksError, TimeoutError) as error:
                log.warning("generation %d: %s", number, error)
            self._replica.until(lambda: over(self._replica.state, number), self._limits.beat_s)
            known = self._known(number)
            if known.ended is not None:
                raise GenerationOverError(known)

    def _known(self, number: int) -> Generation:
        ended = Ended(ok=False, lost=True, error="ended long ago, while this rank slept")
        return self.generation(number) or Generation(number=number, ids=(), ended=ended)

    # --- The watcher -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Watch; and if that ends by a bug, or by a lie in the store, report it and stop standing in for others."""
        if isinstance(ended := attempted(self._watch, "watching the other ranks"), Exception):
            self._replica.lose(f"{type(ended).__name__}: {ended}")

    def _watch(self) -> None:
        trouble_since_s: float | None = None
        while not self._closing.is_set():
            try:
                self._replica.read(self._patience_s())
                self._duties()
                trouble_since_s = None
            except TimeoutError as error:
                log.debug("a key of a generation has gone: %s", error)
            except RanksError as error:
                now_s = self._clock()
                trouble_since_s = now_s if trouble_since_s is None else trouble_since_s
                if now_s - trouble_since_s >= self._limits.lost_s and not self._closing.is_set():
                    self._replica.lose(str(error))
                    return
                self._closing.wait(self._limits.beat_s)

    def _report_news(self) -> None:
        """Report news. The watcher outlives the callback's errors: without it all ranks would lose this one."""
        ended = attempted(self._changed, "passing the agreement of the ranks to the endpoint")
        self._news_trouble = (
            f"news is not heard: {type(ended).__name__}: {ended}" if isinstance(ended, Exception) else ""
        )

    def _patience_s(self) -> float:
        state = self._replica.state
        if state.left or state.departed or self._flight():
            return self._limits.beat_s
        return self._limits.idle_s if state.held_at is None else self._limits.held_s

    def _flight(self) -> list[Generation]:
        state = self._replica.state
        return [one for one in (state.front, state.back) if one is not None]

    def _applied(self, before: State, entry: Mapping[str, Any]) -> None:
        """Note on this rank's own clock until when each generation in flight has time. Under the lock."""
        now_s, state, limit_s = self._clock(), self._replica.state, entry.get("deadline_s")
        if entry.get("kind") == "ask" and isinstance(limit_s, int | float):
            known = state.asked_as(str(entry.get("id")))
            known = known or state.front  # joined by more askers than it remembers the names of
            if known is not None and known.ended is None:
                at_s = now_s + limit_s
                self._deadlines[known.number] = min(self._deadlines.get(known.number, at_s), at_s)
        self._since = {key: self._since.get(key, now_s) for key in ((one.number, one.begun) for one in self._flight())}
        if state.number > before.number:
            self._deadlines = {number: at_s for number, at_s in self._deadlines.items() if state.generation(number)}
        self._look()

    def _look(self) -> None:
        """Set what the training loop looks at. Under the lock."""
        if self._replica.lost:
            self.due = 0 if self.departed else NEVER
        else:
            self.due = due(self._replica.state, self._stance)

    def _duties(self) -> None:
        """Bid; look after the next rank; give up where it has taken too long; tidy up."""
        state, own = self._replica.state, self._replica.own
        if state.front is not None and state.front.step is None:
            self._bid(state.front.number)
        flight = self._flight()
        lost = self._neighbour.gone(own, oldest=min((one.number for one in flight), default=None))
        for known in flight:
            reason = lost or self._too_late(known)
            if reason:
                self._end_failed(known, reason)
        self._parts.forget(own, keep={one.number for one in flight}, before=state.number - 1)

    def _bid(self, number: int) -> None:
        """Bid the first boundary that this rank can still do; the last bid decides the step."""
        if self._bid_in == number:
            return
        own = self._replica.own
        with self._replica.lock:
            if self._stance.bid_for != number:
                # `due` is 0 since the generation opened (`_applied`), so that what is read here is not outrun.
                bid = first_boundary(self.step, self._standing)
                if bid is None:
                    return
                self._stance = replace(self._stance, bid=bid, bid_for=number)
                self._look()
                self._replica.notify_waiters()
            value = b"%d" % (self._stance.bid or 0)
        if self._parts.hand_in(own, number, "bid", value):
            if not self._parts.complete(own, number, "bid"):
                return  # a lost answer was counted twice: looked at again at the next beat
            step = max(int(bid) for bid in self._parts.fetch(own, number, "bid"))
            entry = {"kind": "step", "g": number, "step": step, "token": secrets.token_hex(4)}
            self._replica.write(entry, lambda state: over(state, number, lambda now: now.step is not None))
        self._bid_in = number

    def _news(self, state: State, known: Generation, entry: Entry, asked_at_s: float) -> bool:
        """Would joining change anything for the others?"""
        limit_s, deadline_at_s = entry["deadline_s"], self._deadlines.get(known.number)
        after, held_by = After(entry["after"]), state.held_by(entry["host"])
        return (
            escalated(known.after, after) is not known.after
            or escalated(held_by, after) is not held_by
            or (entry["save"] and not known.save)
            or (entry["reason"] == "on_battery" and entry["host"] not in known.on_battery)
            or (limit_s is not None and (deadline_at_s is None or asked_at_s + limit_s < deadline_at_s - _FINER_S))
        )

    def _too_late(self, known: Generation) -> str:
        """Say why this generation has had its time; "" while it has some left."""
        now_s, limits = self._clock(), self._limits
        since_s = self._since.get((known.number, known.begun), now_s)
        deadline_at_s = self._deadlines.get(known.number)
        if known.begun:
            until_s = since_s + limits.write_s
            if deadline_at_s is not None:
                until_s = max(deadline_at_s, since_s) + limits.late_s
            return f"not durable on all ranks after {now_s - since_s:.1f} s" if now_s >= until_s else ""
        until_s = since_s + limits.reach_s
        if deadline_at_s is not None:
            until_s = min(until_s, deadline_at_s)
        return f"not all ranks have come to the step within {now_s - since_s:.1f} s" if now_s >= until_s else ""

    def _end_failed(self, known: Generation, reason: str) -> None:
        number, own = known.number, self._replica.own
        what = "bid" if known.step is None else "done" if "shard" in known.gathered else "k-shard"
        is_known = (known.step is None or known.begun) and 1 < self.ranks.size <= _NAMED
        if is_known and (late := self._parts.missing(own, number, what)):
            reason += f" (no word from {', '.join(f'rank {rank}' for rank in late)})"
        entry = {"kind": "end", "g": number, "ok": False, "error": clean_text(reason)}
        self._replica.write(entry, lambda state: over(state, number))
