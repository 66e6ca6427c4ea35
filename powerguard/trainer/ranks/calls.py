"""Calls to a store that may never answer: no thread of ours waits for one longer than it chose to."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from powerguard.trainer.flag import Flag
from powerguard.trainer.ranks.base import Ranks, RanksError

_T = TypeVar("_T")
CALL_S: Final = 10.0


class _Call(Generic[_T]):
    """One question, and what came of it."""

    def __init__(self, ask: Callable[[Ranks], _T]) -> None:
        self.ask = ask
        self.answered = Flag()
        self.dropped = False
        self.value: list[_T] = []
        self.error: Exception | None = None


class Calls:
    """Any thread asks a store by one connection, one at a time.

    Where the store bounds its own calls they are made in the asker's thread. Where a call may hang for ever (torch's
    client waits without end for a server that was stopped, or whose host has lost its power; so does a file system that
    is mounted hard) a thread of its own makes them, and may be left hanging.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._lock = threading.RLock()  # which lets nobody release it but its owner
        self._asked: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, ask: Callable[[Ranks], _T]) -> _T:
        """Ask. Raises RanksError, after 10 s without an answer too, and whatever `ask` raises."""
        if not self._ranks.may_hang:
            try:  # around its taking, too: an interrupt between the two would keep it
                if not self._lock.acquire(timeout=CALL_S):
                    raise RanksError(_SILENT)
                return ask(self._ranks)
            finally:
                with contextlib.suppress(RuntimeError):  # not ours: it was not had in time
                    self._lock.release()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="powerguard-ranks-calls", daemon=True)
                self._thread.start()
        call = _Call(ask)
        self._asked.put(call)  # type: ignore[arg-type] # its value goes back to nobody but us
        if not call.answered.wait(CALL_S):
            call.dropped = True
            raise RanksError(_SILENT)
        if call.error is not None:
            raise call.error
        return call.value[0]

    def close(self) -> None:
        """End the thread, if it can."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._asked.put(None)
            thread.join(1.0)

    def _run(self) -> None:
        while (call := self._asked.get()) is not None:
            if call.dropped:
                continue
            try:
                call.value.append(call.ask(self._ranks))
            except (RanksError, TimeoutError, ValueError, OSError) as error:
                call.error = error
            call.answered.set()


_SILENT: Final = f"the store of the ranks has not answered for {CALL_S:g} s"
