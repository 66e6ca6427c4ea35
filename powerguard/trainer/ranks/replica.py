"""One rank's copy of what all have agreed on: reads the shared log, applies it, writes to it, and keeps it short.

`SharedParts` is what each rank hands in for a generation (its bid, its shard), how one sees that all have, and how it
is deleted. A value that is larger than what a store takes at once goes in pieces, the first one last, with their
number. `Neighbour`: each rank looks after the next one. Of any that die, one has a living rank before it, which reports
the others.
"""

import json
import math
import threading
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

from powerguard.trainer.log import log
from powerguard.trainer.ranks.base import CALL_S, MAX_VALUE_BYTES, Calls, Ranks, RanksError
from powerguard.trainer.ranks.machine import Generation, State, apply

_HEADER: Final = 8  # digits: the number of pieces of a value
_PIECE: Final = MAX_VALUE_BYTES - _HEADER


class SharedParts:
    """A rank's own parts, and the way to those of the others. Any thread may use it, each with its connection."""

    def __init__(self) -> None:
        self._kept: dict[int, set[str]] = {}
        self._lock = threading.Lock()

    def hand_in(self, ranks: Ranks, number: int, what: str, value: bytes) -> bool:
        """Write this rank's part. Returns whether all others may have: then `complete` is worth a look."""
        pieces = [value[at : at + _PIECE] for at in range(0, len(value), _PIECE)] or [b""]
        counter = f"g/{number}/{what}#"
        names = [_name(number, what, ranks.rank, index) for index in range(len(pieces))]
        with self._lock:
            self._kept.setdefault(number, set()).update(names, {counter} if ranks.rank == 0 else ())
        for name, piece in reversed(list(zip(names, pieces, strict=True))):
            ranks.set(name, b"%0*d" % (_HEADER, len(pieces)) + piece)
        return ranks.add(counter, 1) >= ranks.size

    def complete(self, ranks: Ranks, number: int, what: str) -> bool:
        """Are all parts there? The counter is only a hint: where an answer was lost, it has counted twice."""
        return all(self.has(ranks, number, what, rank) for rank in range(ranks.size))

    def missing(self, ranks: Ranks, number: int, what: str) -> list[int]:
        """Return the ranks whose part is not there."""
        return [rank for rank in range(ranks.size) if not self.has(ranks, number, what, rank)]

    def begun(self, ranks: Ranks, number: int, what: str) -> bool:
        """Is the part of any rank there?"""
        return ranks.check(f"g/{number}/{what}#")

    def has(self, ranks: Ranks, number: int, what: str, rank: int) -> bool:
        """Is this rank's part there?"""
        return ranks.check(_name(number, what, rank, 0))

    def fetch(self, ranks: Ranks, number: int, what: str) -> list[bytes]:
        """Return all parts, by rank. Raises TimeoutError where one has been deleted already."""
        return [self._fetch(ranks, number, what, rank) for rank in range(ranks.size)]

    def _fetch(self, ranks: Ranks, number: int, what: str, rank: int) -> bytes:
        first = ranks.get(_name(number, what, rank, 0), 0.0)
        rest = range(1, int(first[:_HEADER]))
        return first[_HEADER:] + b"".join(ranks.get(_name(number, what, rank, i), 0.0)[_HEADER:] for i in rest)

    def forget(self, ranks: Ranks, keep: set[int], before: int) -> None:
        """Delete this rank's parts of generations before that number, less those to keep; rank 0 the counters too."""
        with self._lock:
            old = [number for number in self._kept if number < before and number not in keep]
            names = [name for number in old for name in self._kept.pop(number)]
        for name in names:
            ranks.delete(name)


def _name(number: int, what: str, rank: int, index: int) -> str:
    return f"g/{number}/{what}/{rank}/{index}"


class Processes:
    """The processes of the ranks, as far as they run on this host."""

    def __init__(self) -> None:
        self.own = process("self")
        self._known: dict[int, tuple[str, str]] = {}

    def has_ended(self, ranks: Ranks, rank: int) -> bool:
        """Whether the process of a rank has ended; False where it cannot be seen from here."""
        if rank not in self._known and ranks.check(f"process/{rank}"):
            space, pid, began = ranks.get(f"process/{rank}", 0.0).decode().split(" ")
            seen = space == self.own[0] != "-" and pid != self.own[1]
            self._known[rank] = (pid, began) if seen else ("", "")
        known = self._known.get(rank, ("", ""))
        return bool(known[0]) and process(known[0])[1:] != known


class Neighbour:
    """The next rank, as this one's watcher sees it while something is in flight.

    dead_s: without a beat of its watcher it is taken for dead. A process of the same host that has ended is known at
    once. beat_s: how often to look.
    """

    def __init__(self, ranks: Ranks, *, dead_s: float, beat_s: float, clock: Callable[[], float]) -> None:
        self._alone = ranks.size == 1
        self._rank = (ranks.rank + 1) % ranks.size
        self._dead_s, self._beat_s, self._clock = dead_s, beat_s, clock
        self._beat = 0
        self._heard = b""
        self._heard_at_s: float | None = None
        self._oldest: int | None = None
        self._looked_at_s = 0.0
        self._processes = Processes()
        if not self._alone:
            ranks.set(f"process/{ranks.rank}", " ".join(self._processes.own).encode("ascii", "replace"))

    def gone(self, ranks: Ranks, *, oldest: int | None) -> str:
        """Say why the next rank is taken for dead; "" while it is not, or while nothing is in flight.

        oldest: of the generations in flight. While there is none no rank sends a heartbeat: a watcher that was late may
        not have seen that, and must not hold the silence of one generation against the next.
        """
        if oldest != self._oldest:
            self._oldest, self._heard_at_s = oldest, None
        if self._alone or oldest is None:
            return ""
        now_s = self._clock()
        if self._heard_at_s is not None and now_s - self._looked_at_s < self._beat_s:
            return ""
        self._beat += 1
        ranks.set(f"beat/{ranks.rank}", b"%d" % self._beat)
        if self._processes.has_ended(ranks, self._rank):
            return f"rank {self._rank} has died"
        beat = ranks.get(f"beat/{self._rank}", 0.0) if ranks.check(f"beat/{self._rank}") else b""
        slept = now_s - self._looked_at_s > self._dead_s / 2
        if beat != self._heard or self._heard_at_s is None or slept:
            self._heard, self._heard_at_s = beat, now_s  # one that has slept itself has no right to complain
        self._looked_at_s = now_s
        silent_s = now_s - self._heard_at_s
        return f"no message from rank {self._rank} for {silent_s:.1f} s" if silent_s >= self._dead_s else ""


def process(pid: str) -> tuple[str, str, str]:
    """Return where this process counts (boot, pid namespace), its pid and when it began: proc(5), /proc/PID/stat.

    Dashes where it has ended, or where there is no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "-", "-", "-"
    # The name in brackets may hold anything, brackets too; the state is the third field, the beginning the 22nd.
    state, *rest = stat.rpartition(") ")[2].split(" ")
    if state in {"Z", "X"}:
        return space, "-", "-"
    return space, stat.partition(" ")[0], rest[18]


_PRUNE: Final = 64  # entries of the log between two cleanings; between one and two of these are kept
_LOOK_S: Final = 1.0
_GLANCE_S: Final = 0.25  # before a long wait: was the entry deleted while this rank slept?

Moot = Callable[[State], bool]
"""Is an entry that one is about to write needed no more?"""
Entry = dict[str, Any]


class Replica:
    """The state at this rank's place in the log.

    One thread, the watcher, reads (`read`) and may write (`write`), with a connection of its own. All others write by
    `append`, with the connection that they share. `lock` guards what they see; nothing waits for the store under it.

    lost_s: for how long the store may leave the watcher without an answer. applied: called under the lock after each
    entry, with the state before it. changed: called after that, without.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        applied: Callable[[State, Mapping[str, Any]], None],
        changed: Callable[[], None],
        clock: Callable[[], float],
        lost_s: float,
    ) -> None:
        self.ranks = ranks
        self.own = ranks.clone()
        self.lock = threading.RLock()  # entered by the training thread: see `requests.RequestQueue.lock`
        self._news = threading.Condition(self.lock)
        self.state = State()
        self.lost = ""
        """Why this rank has lost the others; "" while it has not."""
        self._applied = applied
        self._changed = changed
        self._next = 0
        self._jumped_to = 0  # up to here, what this rank believes to have written may be none of the log
        self._serial = count()
        self.call = Calls(ranks)
        self._clock = clock
        self._lost_s = lost_s
        self._back_by_s = math.inf

    # --- Any thread but the watcher ----------------------------------------------------------------------------------

    def append(self, entry: Entry, moot: Moot) -> None:
        """Write an entry at the end of the log, unless what others wrote before it makes it moot.

        Returns when this rank has read it, too. Raises RanksError.
        """
        raw = self._sealed(entry)
        while True:
            with self.lock:
                if self.lost:
                    raise RanksError(self.lost)
                if moot(self.state):
                    return
                at = self._next
            got = self.call(lambda ranks, at=at: ranks.claim(f"log/{at}", raw))  # type: ignore[misc]
            with self.lock:
                if not self._news.wait_for(lambda at=at: self._next > at or self.lost, CALL_S):  # type: ignore[misc]
                    msg = "the watcher of this rank does not come forward (is the process starved, or the store?)"
                    raise RanksError(msg)
            if got == raw and at >= self._jumped_to:
                return
            if got == raw:  # its place had been cut off the log while this rank slept: no rank will ever read it
                self.call(lambda ranks, at=at: ranks.delete(f"log/{at}"))  # type: ignore[misc]

    def until(self, done: Callable[[], object], timeout_s: float = math.inf) -> None:
        """Wait until done() is true, or this rank is lost, or timeout_s have passed."""
        until_s = self._clock() + timeout_s
        with self.lock:
            while not self.lost and not done() and (left_s := until_s - self._clock()) > 0:
                self.stand(left_s)

    def stand(self, timeout_s: float = _LOOK_S) -> None:
        """Wait for news, with the lock held; lose the others where the watcher itself never comes back from the store.

        A waiting thread must check the watcher: a store whose host has lost its power may hold it for ever.
        """
        began_s = self._clock()
        self._news.wait(min(timeout_s, _LOOK_S))
        now_s = self._clock()
        if now_s - began_s > 2 * _LOOK_S:  # this process was stopped: its watcher had no chance either
            self._back_by_s = max(self._back_by_s, now_s + self._lost_s)
        elif now_s > self._back_by_s and not self.lost:
            self.lose("the store of the ranks does not answer, not even with an error")

    # --- The watcher -------------------------------------------------------------------------------------------------

    def read(self, limit_s: float) -> None:
        """Apply the next entry of the log, if there is one within limit_s."""
        self._back_by_s = self._clock() + limit_s + self._lost_s
        name = f"log/{self._next}"
        try:
            raw = self.own.get(name, min(limit_s, _GLANCE_S))
        except TimeoutError:
            if limit_s <= _GLANCE_S or self._caught_up():
                return
            try:
                raw = self.own.get(name, limit_s)
            except TimeoutError:
                return
        self._take(raw)

    def write(self, entry: Entry, moot: Moot) -> None:
        """Append, as the watcher: it is the one who applies."""
        raw = self._sealed(entry)
        while not moot(self.state):
            name = f"log/{self._next}"
            got = self.own.claim(name, raw)
            taken = self._take(got)
            if taken and got == raw:
                return
            if got == raw:
                self.own.delete(name)

    def notify_waiters(self) -> None:
        """Have everybody who waits look again. With the lock held."""
        self._news.notify_all()

    def lose(self, reason: str) -> None:
        """Go on without the others, whose store does not answer: threads that wait for them are released."""
        log.error("this rank has lost the others: %s", reason)
        self.end(f"this rank has lost the others: {reason}")

    def end(self, reason: str) -> None:
        """Let everybody go who waits here."""
        with self.lock:
            self.lost = self.lost or reason
            self._applied(self.state, {})
            self._news.notify_all()
        self._changed()

    def _sealed(self, entry: Entry) -> bytes:
        """Entries differ even where they say the same, so that each rank knows its own again."""
        return json.dumps({**entry, "by": self.ranks.rank, "serial": next(self._serial)}).encode("ascii")

    def _take(self, raw: bytes) -> bool:
        """Apply the entry at this rank's place; False where that place has been cut off the log, and it went on.

        Looked at after the entry was read: what lies at a place that was cut before is none of the log, but was put
        there by a rank that slept.
        """
        if self._is_cut() and self._caught_up():
            return False
        self._apply(raw)
        return True

    def _is_cut(self) -> bool:
        try:
            return int(self.own.get("cut", 0.0)) > self._next
        except TimeoutError:
            return False

    def _apply(self, raw: bytes) -> None:
        try:
            entry = json.loads(raw)
        except ValueError:
            entry = None
        entry = entry if isinstance(entry, dict) else {}
        with self.lock:
            before, self.state = self.state, apply(self.state, entry)
            self._next += 1
            self._applied(before, entry)
            self._news.notify_all()
        self._changed()
        if self._next % _PRUNE == 0 and entry.get("by") == self.ranks.rank:
            self._prune()

    def _prune(self) -> None:
        """Keep the state for those who sleep, and delete all but the newest entries: each author in its turn."""
        cut = self._next - _PRUNE
        if cut <= 0:
            return
        if not self.own.check("cut") or int(self.own.get("cut", 0.0)) < cut:
            base = json.dumps({"next": self._next, "state": self.state.to_json()}).encode("ascii")
            self.own.set("base", base)
            self.own.set("cut", b"%d" % cut)  # in this order, and before anything is deleted
        for old in range(cut - _PRUNE, cut):
            self.own.delete(f"log/{old}")

    def _caught_up(self) -> bool:
        """Go on from the kept state, where this rank's next entry has been cut off the log."""
        if not self._is_cut():
            return False
        try:
            base = json.loads(self.own.get("base", 0.0))
            at, state = int(base["next"]), State.parse(base["state"])
        except (TimeoutError, ValueError, KeyError, TypeError) as error:
            log.warning("the kept state of the ranks cannot be read: %s", error)
            return False
        if at <= self._next:
            return False
        with self.lock:
            before, self.state, self._next, self._jumped_to = self.state, state, at, at
            self._applied(before, {})
            self._news.notify_all()
        self._changed()
        return True


def over(state: State, number: int, also: Callable[[Generation], bool] = lambda _known: False) -> bool:
    """Has this generation ended (or been forgotten), or is `also` true of it? One not heard of yet is not over."""
    known = state.generation(number)
    if known is None:
        return number <= state.number
    return known.ended is not None or also(known)
