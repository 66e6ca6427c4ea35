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

Why there are no two answers: every decision is an entry of the log, written once. Whoever gives up on another writes
that as an entry too, and it counts only if no other end came before it.

Durations are relative, and measured on each rank's own CLOCK_BOOTTIME: no step of a wall clock matters.
"""

import json
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

from powerguard.trainer.ranks.base import MAX_VALUE_BYTES, Ranks, RanksError, boottime_s
from powerguard.trainer.ranks.machine import (
    NEVER,
    Ended,
    Generation,
    Move,
    Stance,
    State,
    apply,
    due,
    move,
)
from powerguard.wire import After, TriggerRequest, clean_text, escalated

_log = logging.getLogger("powerguard.trainer")
_T = TypeVar("_T")
_PRUNE: Final = 64  # entries of the log between two cleanings; twice as many are kept
_FINER_S: Final = 0.05  # a deadline that is tighter by less is no news
_NAMED: Final = 64  # up to so many ranks, one that is missing is named
_HEADER: Final = 8  # digits that tell how many pieces a value has
_CALL_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """After how long the others give up on a rank, in seconds.

    dead_s: nothing heard from its watcher while a generation is in flight (a killed process on the same host is noticed
    at once). reach_s: from the opening until all stand at the step, where no deadline is tighter. write_s: from there
    to the end, where there is no deadline; with one it is late_s after it: what is nearly written is worth finishing.
    lost_s: without an answer from the store, after which this rank is on its own.
    beat_s: how often the watchers look after each other in the meantime. idle_s: and when nothing is in flight.
    """

    dead_s: float = 10.0
    reach_s: float = 600.0
    write_s: float = 1800.0
    late_s: float = 60.0
    lost_s: float = 15.0
    beat_s: float = 0.25
    idle_s: float = 1.0


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
    something is news; it must not block.
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
        self._changed = changed
        self._state = State()
        self._stance = Stance()
        self._next = 0
        self._standing: int | None = None
        self._deadlines: dict[int, float] = {}
        self._seen_at: dict[tuple[int, bool], float] = {}
        self._posted: dict[int, list[str]] = {}
        self._serial = count()
        self._lost = ""
        self._closing = threading.Event()
        self._lock = threading.Condition()
        self._calls = threading.Lock()
        self._peer = _Successor(ranks, limits, clock)
        self._peer.introduce()
        self._own = ranks.clone()
        self._thread = threading.Thread(target=self._watch, name="powerguard-agreement", daemon=True)
        self._thread.start()

    # --- Those who ask -------------------------------------------------------------------------------------------

    def open(self, request: TriggerRequest, *, save: bool = True) -> Generation:
        """Ask all ranks for a checkpoint (save=False: for a pause); return the generation, opened or joined.

        The same id is the same generation. Raises RanksError when the store cannot be asked.
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
        joined: list[Generation] = []

        def moot(state: State) -> bool:
            known = state.asked_as(request.id)
            if known is None:
                front = state.joined(save, after)
                known = front if front is not None and not self._news(front, entry, asked_at_s) else None
            joined[:] = [] if known is None else [known]
            return known is not None

        self._append(entry, moot)
        with self._lock:
            if not moot(self._state):
                msg = "every rank ends after the checkpoint that was just made (exit): nothing more is saved"
                raise RanksError(msg)
        return joined[0]

    def cancel(self, number: int) -> Generation | None:
        """Call a generation off: one not begun is aborted everywhere, one begun is finished and training goes on."""
        self._append(
            {"kind": "cancel", "g": number},
            lambda state: (
                (known := state.generation(number)) is None
                or known.ended is not None
                or (known.begun and known.after is After.CONTINUE)
            ),
        )
        return self.generation(number)

    def resume(self) -> None:
        """Release all ranks; a checkpoint that has begun is finished first."""
        self._append(
            {"kind": "resume"},
            lambda state: state.held_at is None and (state.front is None or state.front.after is After.CONTINUE),
        )

    def generation(self, number: int) -> Generation | None:
        """Return what is known of a generation: in flight, or one of the last 32 that have ended."""
        with self._lock:
            known = self._state.generation(number)
            return known if known is None else self._as_lost(known)

    @property
    def state(self) -> State:
        """What all ranks have agreed on, as far as this one has read."""
        return self._state

    @property
    def standing(self) -> int | None:
        """The step at which this rank's training thread stands or saves now; None while it runs."""
        return self._standing

    @property
    def lost(self) -> str:
        """Why this rank has lost the others; "" while it has not."""
        return self._lost

    def deadline_at_s(self, number: int) -> float | None:
        """Return the tightest deadline of a generation, on this rank's clock."""
        return self._deadlines.get(number)

    # --- The training thread ---------------------------------------------------------------------------------------

    def wait(self, step: int) -> Generation | None:
        """Stand at this boundary as long as must be; return the generation to save for, or None to train on.

        Call it again after each generation until it says None. A generation that comes with `ended` set is to be saved
        no more: every rank is to exit, its checkpoint being durable.
        """
        while True:
            with self._lock:
                self._standing = step
                next_move = Move.GO if self._lost else move(self._state, self._stance, step)
                if next_move is Move.WAIT:
                    self._lock.wait()
                    continue
                if next_move is Move.GO:
                    self._standing = None
                    self._look()
                    return None
                state, known = self._state, self._state.front
                if next_move is Move.LEAVE:
                    return None if state.leaving is None else state.generation(state.leaving)
                if next_move is Move.TAKE_BACK or (next_move is Move.PASSED and state.back is not None):
                    known = state.back if state.back.number > self._stance.taken else known  # type: ignore[union-attr]
                if known is None:
                    continue
                if next_move in {Move.TAKE_FRONT, Move.TAKE_BACK}:
                    self._stance = replace(self._stance, taken=known.number)
                    self._look()
                    return known
            self._answer(next_move, known, step)

    def gather(self, number: int, key: str, value: bytes, *, read: bool = True) -> list[bytes]:
        """Hand in this rank's value under a key; return those of all ranks, by rank, once all have handed in theirs.

        read=False: wait for all, but do not fetch them: returns []. Any thread may call it.
        Raises GenerationOverError when the generation ends first.
        """
        known = self._post(number, f"k-{key}", value)
        if known is not None:
            self._append(
                {"kind": "gathered", "g": number, "key": key}, lambda state: _over_or(state, number, _has(key))
            )
        with self._lock:
            while not self._lost and not _over_or(self._state, number, _has(key)):
                self._lock.wait()
        found = self.generation(number)
        if found is None or found.ended is not None:
            raise GenerationOverError(found or self._forgotten(number))
        if not read:
            return []
        return self._surely(
            number, lambda ranks: [self._fetch(ranks, number, f"k-{key}", r) for r in range(ranks.size)]
        )

    def conclude(self, number: int, *, ok: bool, digest: str = "", error: str = "") -> Generation:
        """Say how this rank's part went, and return the generation once it has ended for all: `ended` is set.

        Every rank concludes. ok=False ends it as failed at once. digest: of the manifest, from each rank that committed
        one, else "". It ends well when all ranks say ok, at least one names a digest, and all of them the same.
        """
        end = {"kind": "end", "g": number, "ok": ok, "digest": digest, "error": clean_text(error)}
        try:
            if not ok:
                told = f"rank {self.ranks.rank}: {error}" if self.ranks.size > 1 else error
                self._append({**end, "error": clean_text(told)}, lambda state: _over_or(state, number))
            elif (values := self._post(number, "done", digest.encode() or b"-")) is not None:
                named = sorted({value.decode() for value in values} - {"-"})
                if len(named) == 1:
                    end["digest"] = named[0]
                else:
                    end |= {"ok": False, "error": f"{len(named)} manifests where there must be one: {named[:4]}"}
                self._append(end, lambda state: _over_or(state, number))
        except GenerationOverError as over:
            return over.generation
        with self._lock:
            while not self._lost and not _over_or(self._state, number):
                self._lock.wait()
        return self.generation(number) or self._forgotten(number)

    def close(self) -> None:
        """Say that this rank's training has ended, and with it what is in flight; then let go of the store."""
        try:
            if not self._lost and not self._closing.is_set():
                self._append({"kind": "leave"}, lambda state: state.left)
        except RanksError as error:
            _log.debug("closing: %s", error)
        self._closing.set()
        with self._lock:
            self._lost = self._lost or "closed"
            self._lock.notify_all()
        self._thread.join(self._limits.idle_s + _CALL_S)
        self._own.close()

    # --- Entries -----------------------------------------------------------------------------------------------------

    def _append(self, entry: dict[str, Any], moot: Callable[[State], bool]) -> None:
        """Write an entry at the end of the log, unless what others wrote before it makes it moot. Not the watcher."""
        raw = self._sealed(entry)
        while True:
            with self._lock:
                if self._lost:
                    raise RanksError(self._lost)
                if moot(self._state):
                    return
                at = self._next
            got = self._call(lambda ranks, at=at: ranks.claim(f"log/{at}", raw))  # type: ignore[misc]
            with self._lock:
                if not self._lock.wait_for(lambda at=at: self._next > at or self._lost, _CALL_S):  # type: ignore[misc]
                    msg = "the watcher of this rank does not come forward (is the process starved, or the store?)"
                    raise RanksError(msg)
            if got == raw:
                return

    def _sealed(self, entry: dict[str, Any]) -> bytes:
        """Entries differ even where they say the same: so that each rank knows its own again."""
        return json.dumps({**entry, "by": self.ranks.rank, "serial": next(self._serial)}).encode("ascii")

    def _call(self, ask: Callable[[Ranks], _T]) -> _T:
        """Use the connection that all threads but the watcher share."""
        if not self._calls.acquire(timeout=_CALL_S):
            msg = f"the store of the ranks has not answered for {_CALL_S:g} s"
            raise RanksError(msg)
        try:
            return ask(self.ranks)
        finally:
            self._calls.release()

    def _surely(self, number: int, ask: Callable[[Ranks], _T]) -> _T:
        """Ask until there is an answer, or the generation is over: nobody is there to try again for this rank."""
        while True:
            try:
                return self._call(ask)
            except (RanksError, TimeoutError) as error:
                _log.warning("generation %d: %s", number, error)
            with self._lock:
                self._lock.wait_for(lambda: self._lost or _over_or(self._state, number), self._limits.beat_s)
            known = self.generation(number)
            if known is None or known.ended is not None:
                raise GenerationOverError(known or self._forgotten(number))

    def _post(self, number: int, what: str, value: bytes) -> list[bytes] | None:
        """Hand in a value; return all values if this may be the last one, else None."""
        pieces = [value[at : at + MAX_VALUE_BYTES // 2] for at in range(0, len(value), MAX_VALUE_BYTES // 2)] or [b""]

        def hand_in(ranks: Ranks) -> list[bytes] | None:
            for index, piece in reversed(list(enumerate(pieces))):
                self._keep(ranks, number, f"{what}/{ranks.rank}/{index}", b"%0*d" % (_HEADER, len(pieces)) + piece)
            if ranks.add(self._key(number, f"{what}#"), 1) < ranks.size:
                return None
            # An answer may have been lost and the sum be too high: only what is there counts.
            if not all(ranks.check(self._key(number, f"{what}/{rank}/0")) for rank in range(ranks.size)):
                return None
            return [self._fetch(ranks, number, what, rank) for rank in range(ranks.size)] if what == "done" else []

        return self._surely(number, hand_in)

    def _keep(self, ranks: Ranks, number: int, name: str, value: bytes) -> None:
        key = self._key(number, name)
        ranks.set(key, value)
        self._posted.setdefault(number, []).append(key)

    def _fetch(self, ranks: Ranks, number: int, what: str, rank: int) -> bytes:
        first = ranks.get(self._key(number, f"{what}/{rank}/0"), 0.0)
        rest = range(1, int(first[:_HEADER]))
        more = (ranks.get(self._key(number, f"{what}/{rank}/{index}"), 0.0)[_HEADER:] for index in rest)
        return first[_HEADER:] + b"".join(more)

    def _key(self, number: int, name: str) -> str:
        return f"g/{number}/{name}"

    def _answer(self, next_move: Move, known: Generation, step: int) -> None:
        """Do what a boundary asks for besides standing: with the store, so without the lock."""
        try:
            if next_move is Move.BID:
                self._surely(known.number, self._bid)
            elif next_move is Move.BEGIN:
                self._append(
                    {"kind": "begin", "g": known.number},
                    lambda state: (now := state.generation(known.number)) is None or now.begun or now.ended is not None,
                )
            else:
                error = f"this rank is at step {step}, past the agreed step {known.step} (was the step set anew?)"
                self.conclude(known.number, ok=False, error=error)
                with self._lock:
                    self._stance = replace(self._stance, taken=max(self._stance.taken, known.number))
        except (RanksError, GenerationOverError) as error:
            _log.warning("generation %d: %s", known.number, error)
            self._closing.wait(self._limits.beat_s)

    # --- The watcher -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        trouble_since_s: float | None = None
        while not self._closing.is_set():
            try:
                self._read()
                self._duties()
                trouble_since_s = None
            except TimeoutError as error:
                _log.debug("a key of a generation has gone: %s", error)
            except RanksError as error:
                now_s = self._clock()
                trouble_since_s = now_s if trouble_since_s is None else trouble_since_s
                if now_s - trouble_since_s >= self._limits.lost_s and not self._closing.is_set():
                    self._lose(str(error))
                    return
                self._closing.wait(self._limits.beat_s)

    def _read(self) -> None:
        """Wait for the next entry of the log, and apply it."""
        busy = self._state.front is not None or self._state.back is not None
        limit_s = self._limits.beat_s if busy else self._limits.idle_s
        try:
            raw = self._own.get(f"log/{self._next}", limit_s)
        except TimeoutError:
            self._catch_up()
        else:
            self._applied(raw)

    def _applied(self, raw: bytes) -> None:
        try:
            entry = json.loads(raw)
        except ValueError:
            entry = {}
        entry = entry if isinstance(entry, dict) else {}
        with self._lock:
            before, self._state = self._state, apply(self._state, entry)
            self._next += 1
            self._time(before, entry)
            self._look()
            self._lock.notify_all()
        self._changed()
        if self._state.number > before.number:
            self._forget(self._state.number)
        if self._next % _PRUNE == 0 and entry.get("by") == self.ranks.rank:
            self._prune()

    def _time(self, before: State, entry: dict[str, Any]) -> None:
        """Note, on this rank's own clock, until when each generation in flight has time."""
        now_s = self._clock()
        limit_s = entry.get("deadline_s")
        known = self._state.asked_as(str(entry.get("id"))) if entry.get("kind") == "ask" else None
        if known is None and entry.get("kind") == "ask" and before.number == self._state.number:
            known = self._state.front  # joined by more askers than it remembers the names of
        if known is not None and known.ended is None and isinstance(limit_s, int | float):
            self._deadlines[known.number] = min(self._deadlines.get(known.number, now_s + limit_s), now_s + limit_s)
        flight = [one for one in (self._state.front, self._state.back) if one is not None]
        self._seen_at = {(one.number, one.begun): self._seen_at.get((one.number, one.begun), now_s) for one in flight}
        for number in [old for old in self._deadlines if self._state.generation(old) is None]:
            del self._deadlines[number]

    def _look(self) -> None:
        """Set what the training loop looks at. Under the lock."""
        self.due = NEVER if self._lost else due(self._state, self._stance)

    def _duties(self) -> None:
        """Bid; look after the next rank; give up where it has taken too long."""
        front = self._state.front
        if front is not None and front.step is None:
            self._bid(self._own)
        flight = [one for one in (self._state.front, self._state.back) if one is not None]
        gone = self._peer.gone(busy=bool(flight), ranks=self._own)
        for known in flight:
            reason = gone or self._too_late(known)
            if reason:
                error = clean_text(f"{reason}{self._missing(known)}")
                self._write(
                    {"kind": "end", "g": known.number, "ok": False, "error": error},
                    lambda state, number=known.number: _over_or(state, number),  # type: ignore[misc]
                )

    def _write(self, entry: dict[str, Any], moot: Callable[[State], bool]) -> None:
        """Append, as the watcher: it is the one who applies."""
        raw = self._sealed(entry)
        while not moot(self._state):
            got = self._own.claim(f"log/{self._next}", raw)
            self._applied(got)
            if got == raw:
                return

    def _bid(self, ranks: Ranks) -> None:
        """Bid the first boundary that this rank can still do; whoever bids last says the step."""
        with self._lock:
            front = self._state.front
            if front is None or front.step is not None:
                return
            number = front.number
            if self._stance.bid_for != number:
                self.due = 0  # before `step` is read: see the module
                if self._standing is None and self.step is None:
                    return
                bid = self._standing if self._standing is not None else (self.step or 0) + 1
                self._stance = replace(self._stance, bid=bid, bid_for=number)
                self._look()
                self._lock.notify_all()
            elif self._key(number, f"bid/{ranks.rank}") in self._posted.get(number, ()):
                return
            bid = self._stance.bid or 0
        self._keep(ranks, number, f"bid/{ranks.rank}", b"%d" % bid)
        if ranks.add(self._key(number, "bid#"), 1) < ranks.size:
            return
        bids = [self._key(number, f"bid/{rank}") for rank in range(ranks.size)]
        if not all(ranks.check(key) for key in bids):
            return
        step = max(int(ranks.get(key, 0.0)) for key in bids)
        entry = {"kind": "step", "g": number, "step": step, "token": secrets.token_hex(4)}

        def moot(state: State) -> bool:
            return state.front is None or state.front.number != number or state.front.step is not None

        if ranks is self._own:
            self._write(entry, moot)
        else:
            raw = self._sealed(entry)
            while not moot(self._state):
                at = self._next
                got = ranks.claim(f"log/{at}", raw)
                with self._lock:
                    self._lock.wait_for(lambda at=at: self._next > at or self._lost, _CALL_S)  # type: ignore[misc]
                if got == raw or self._lost:
                    return

    def _news(self, known: Generation, entry: dict[str, Any], asked_at_s: float) -> bool:
        """Would joining change anything for the others?"""
        limit_s, deadline_at_s = entry["deadline_s"], self._deadlines.get(known.number)
        return (
            escalated(known.after, After(entry["after"])) is not known.after
            or (entry["save"] and not known.save)
            or (entry["reason"] == "on_battery" and entry["host"] not in known.on_battery)
            or (limit_s is not None and (deadline_at_s is None or asked_at_s + limit_s < deadline_at_s - _FINER_S))
        )

    def _too_late(self, known: Generation) -> str:
        """Say why this generation has had its time; "" while it has some left."""
        now_s, limits = self._clock(), self._limits
        since_s = self._seen_at.get((known.number, known.begun), now_s)
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

    def _missing(self, known: Generation) -> str:
        """Name the ranks for which the others wait, where they are few enough to be asked for one by one."""
        size = self.ranks.size
        if size == 1 or size > _NAMED:
            return ""
        stage = next((f"k-{key}" for key in known.gathered[-1:]), "") if known.begun else "bid"
        names = ["done"] if stage and known.begun else ["bid"] if stage else []
        missing = [
            str(rank)
            for rank in range(size)
            for name in names
            if not self._own.check(self._key(known.number, f"{name}/{rank}" + ("/0" if name == "done" else "")))
        ]
        return f" (waited for rank {', '.join(missing)})" if missing else ""

    # --- Cleaning ----------------------------------------------------------------------------------------------------

    def _forget(self, number: int) -> None:
        """Delete this rank's keys of generations that ended at least one opening ago."""
        flight = {one.number for one in (self._state.front, self._state.back) if one is not None}
        for old in [old for old in self._posted if old <= number - 2 and old not in flight]:
            for key in self._posted.pop(old):
                self._own.delete(key)
                if self.ranks.rank == 0:
                    self._own.delete(key.replace("/0", "#", 1) if key.endswith("/0") else key)

    def _prune(self) -> None:
        """Keep the state for those who sleep, and delete what is older than the last entries."""
        base = json.dumps({"next": self._next, "state": self._state.to_json()}).encode("ascii")
        self._own.set("base", base)
        for old in range(max(0, self._next - 3 * _PRUNE), self._next - _PRUNE):
            self._own.delete(f"log/{old}")

    def _catch_up(self) -> None:
        """Whoever slept so long that the next entry has been deleted goes on from the kept state."""
        if not self._own.check("base"):
            return
        try:
            base = json.loads(self._own.get("base", 0.0))
            at, state = int(base["next"]), State.parse(base["state"])
        except (TimeoutError, ValueError, KeyError, TypeError):
            return
        with self._lock:
            if at <= self._next or self._own.check(f"log/{self._next}"):
                return
            self._state, self._next = state, at
            self._look()
            self._lock.notify_all()
        self._changed()

    def _lose(self, reason: str) -> None:
        _log.error("this rank has lost the others: %s", reason)
        with self._lock:
            self._lost = f"this rank has lost the others: {reason}"
            self._look()
            self._lock.notify_all()
        self._changed()

    def _as_lost(self, known: Generation) -> Generation:
        if known.ended is None and self._lost:
            return replace(known, ended=Ended(ok=False, lost=True, error=clean_text(self._lost)))
        return known

    def _forgotten(self, number: int) -> Generation:
        error = "ended long ago, while this rank slept"
        return Generation(number=number, ids=(), ended=Ended(ok=False, lost=True, error=error))


def _over_or(state: State, number: int, also: Callable[[Generation], bool] = lambda _known: False) -> bool:
    known = state.generation(number)
    return known is None or known.ended is not None or also(known)


def _has(key: str) -> Callable[[Generation], bool]:
    return lambda known: key in known.gathered


class _Successor:
    """Every rank looks after the next one: of any that die, one has a living rank before it, and that one tells."""

    def __init__(self, ranks: Ranks, limits: Limits, clock: Callable[[], float]) -> None:
        self._ranks = ranks
        self._limits = limits
        self._clock = clock
        self._rank = (ranks.rank + 1) % ranks.size
        self._beat = 0
        self._heard = b""
        self._heard_at_s: float | None = None
        self._looked_at_s = 0.0
        self._process: tuple[str, str] | None = None

    def introduce(self) -> None:
        """Tell which process this is, so that a neighbour on the same host can see that it lives."""
        if self._ranks.size > 1:
            self._ranks.set(f"process/{self._ranks.rank}", " ".join(_process("self")).encode("ascii", "replace"))

    def gone(self, *, busy: bool, ranks: Ranks) -> str:
        """Say why the next rank is taken for dead; "" while it is not, or while nobody cares."""
        if ranks.size == 1 or not busy:
            self._heard_at_s = None
            return ""
        now_s = self._clock()
        if self._heard_at_s is not None and now_s - self._looked_at_s < self._limits.beat_s:
            return ""
        self._beat += 1
        ranks.set(f"beat/{ranks.rank}", b"%d" % self._beat)
        if self._killed(ranks):
            return f"rank {self._rank} has died"
        heard = ranks.get(f"beat/{self._rank}", 0.0) if ranks.check(f"beat/{self._rank}") else b""
        slept = now_s - self._looked_at_s > self._limits.dead_s / 2
        if heard != self._heard or self._heard_at_s is None or slept:
            self._heard, self._heard_at_s = heard, now_s  # one that has slept itself has no right to complain
        self._looked_at_s = now_s
        silent_s = now_s - self._heard_at_s
        return f"nothing heard of rank {self._rank} for {silent_s:.1f} s" if silent_s >= self._limits.dead_s else ""

    def _killed(self, ranks: Ranks) -> bool:
        if self._process is None and ranks.check(f"process/{self._rank}"):
            space, pid, began = ranks.get(f"process/{self._rank}", 0.0).decode().split(" ")
            here = space == _process("self")[0] and space != "-"
            self._process = (pid, began) if here else ("", "")
        if self._process is None or not self._process[0]:
            return False
        return _process(self._process[0])[1:] != self._process


def _process(pid: str) -> tuple[str, str, str]:
    """Return where this process counts (boot, pid namespace), its pid and when it began; dashes where not to be had."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        space = f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "-", "-", "-"
    number, (state, *rest) = fields.partition(" ")[0], fields.rpartition(") ")[2].split(" ")
    if state in {"Z", "X"}:
        return space, "-", "-"
    return space, number, rest[18]
