"""Time that passes only when no task has anything left to do: an hour of outage in a blink.

For worlds without sockets, threads and children: those live in real time, and this loop would run past them.
"""

import asyncio
import math
import selectors
from collections.abc import Mapping
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """A selector that does not wait: it moves the loop's clock on to the next timer."""

    def __init__(self, loop: "VirtualLoop") -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.check()
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0:
            self._loop.jump(timeout)
        elif not ready and timeout is None:
            msg = "virtual time: every task waits and no timer is set, so time would stop"
            raise RuntimeError(msg)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is its own; `time` is the clock of everything that runs in it."""

    def __init__(self, began_s: float = 1000.0) -> None:
        self._virtual_s = began_s
        self._fault: dict[str, Any] | None = None
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        # A hair more: asyncio asks whether a timer is past, give or take a nanosecond, which far from zero is less than
        # the last digit of the clock, and a timer that is due right now would be waited for without an end.
        self._virtual_s = math.nextafter(self._virtual_s + seconds, math.inf)

    def call_exception_handler(self, context: Mapping[str, Any]) -> None:
        """Keep it: an exception that no task awaits is a fault of this world, and ends it at the next turn."""
        super().call_exception_handler(dict(context))
        self._fault = self._fault or dict(context)

    def check(self) -> None:
        """Raise RuntimeError when something went wrong where no task awaits it."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            msg = f"virtual time: {fault.get('message')}"
            raise RuntimeError(msg) from fault.get("exception")
