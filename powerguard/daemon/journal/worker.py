"""Where the journal's blocking calls run: a thread that may hang in a dead disk without holding up anybody."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol


class Executor(Protocol):
    """Runs calls one after the other, in order. The calls raise nothing."""

    def submit(self, call: Callable[[], None]) -> None:
        """Have call run; returns at once."""
        ...

    def close(self, limit_s: float) -> None:
        """Wait for what was submitted, for at most limit_s; nothing may be submitted afterwards."""
        ...


class WorkerThread:
    """A daemon thread, started at once: threads may fail to start when memory is short, which is when it matters.

    Not a ThreadPoolExecutor: the interpreter waits at its exit for the threads of one, and so for a hung disk.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def close(self, limit_s: float) -> None:
        self._calls.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            # Only a loop that was closed meanwhile ends up here: nobody is left to be told.
            with contextlib.suppress(RuntimeError):
                call()


class Inline:
    """Runs each call where it is submitted: for virtual time, where a thread would live in another time."""

    def submit(self, call: Callable[[], None]) -> None:
        call()

    def close(self, limit_s: float) -> None:
        del limit_s  # nothing is ever left to wait for
