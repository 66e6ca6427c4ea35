"""One rank's copy of what all have agreed on: reads the shared log, applies it, writes to it, and keeps it short."""

import contextlib
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final

from powerguard.trainer.ranks.base import Ranks, RanksError
from powerguard.trainer.ranks.calls import CALL_S, Calls
from powerguard.trainer.ranks.machine import Generation, State, apply

_log = logging.getLogger("powerguard.trainer")
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
        self.lock = threading.Condition()
        self.state = State()
        self.lost = ""
        """Why this rank has lost the others; "" while it has not."""
        self._applied = applied
        self._changed = changed
        self._next = 0
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
                if not self.lock.wait_for(lambda at=at: self._next > at or self.lost, CALL_S):  # type: ignore[misc]
                    msg = "the watcher of this rank does not come forward (is the process starved, or the store?)"
                    raise RanksError(msg)
            if got == raw:
                return

    def until(self, done: Callable[[], object], timeout_s: float = math.inf) -> None:
        """Wait until done() is true, or this rank is lost, or timeout_s have passed."""
        until_s = self._clock() + timeout_s
        with self.lock:
            while not self.lost and not done() and (left_s := until_s - self._clock()) > 0:
                self.stand(left_s)

    def stand(self, timeout_s: float = _LOOK_S) -> None:
        """Wait for news, with the lock held; lose the others where the watcher itself never comes back from the store.

        Whoever waits must look after the watcher: a store whose host has lost its power may hold it for ever.
        """
        began_s = self._clock()
        self.lock.wait(min(timeout_s, _LOOK_S))
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
            self._catch_up()
            if limit_s <= _GLANCE_S or name != f"log/{self._next}":
                return
            with contextlib.suppress(TimeoutError):
                self._apply(self.own.get(name, limit_s))
        else:
            self._apply(raw)

    def write(self, entry: Entry, moot: Moot) -> None:
        """Append, as the watcher: it is the one who applies."""
        raw = self._sealed(entry)
        while not moot(self.state):
            got = self.own.claim(f"log/{self._next}", raw)
            self._apply(got)
            if got == raw:
                return

    def lose(self, reason: str) -> None:
        """Go on without the others, whose store does not answer: whoever waits for them is let go."""
        _log.error("this rank has lost the others: %s", reason)
        self.end(f"this rank has lost the others: {reason}")

    def end(self, reason: str) -> None:
        """Let everybody go who waits here."""
        with self.lock:
            self.lost = self.lost or reason
            self._applied(self.state, {})
            self.lock.notify_all()
        self._changed()

    def _sealed(self, entry: Entry) -> bytes:
        """Entries differ even where they say the same, so that each rank knows its own again."""
        return json.dumps({**entry, "by": self.ranks.rank, "serial": next(self._serial)}).encode("ascii")

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
            self.lock.notify_all()
        self._changed()
        if self._next % _PRUNE == 0 and entry.get("by") == self.ranks.rank:
            self._prune()

    def _prune(self) -> None:
        """Keep the state for those who sleep, and delete all but the newest entries: each author in its turn."""
        base = json.dumps({"next": self._next, "state": self.state.to_json()}).encode("ascii")
        self.own.set("base", base)
        for old in range(max(0, self._next - 2 * _PRUNE), self._next - _PRUNE):
            self.own.delete(f"log/{old}")

    def _catch_up(self) -> None:
        """Whoever slept so long that the next entry has been deleted goes on from the kept state."""
        if not self.own.check("base"):
            return
        try:
            base = json.loads(self.own.get("base", 0.0))
            at, state = int(base["next"]), State.parse(base["state"])
        except (TimeoutError, ValueError, KeyError, TypeError) as error:
            _log.warning("the kept state of the ranks cannot be read: %s", error)
            return
        if at <= self._next or self.own.check(f"log/{self._next}"):
            return
        with self.lock:
            before, self.state, self._next = self.state, state, at
            self._applied(before, {})
            self.lock.notify_all()
        self._changed()


def over(state: State, number: int, also: Callable[[Generation], bool] = lambda _known: False) -> bool:
    """Has this generation ended (or been forgotten), or is `also` true of it? One not heard of yet is not over."""
    known = state.generation(number)
    if known is None:
        return number <= state.number
    return known.ended is not None or also(known)
