"""An event loop that does not wait for what nobody is to do meanwhile: for tests whose peers are in this process.

Where nothing is ready, the next timer is. On the loopback what was sent has come by then. Time stands while the
processor is busy with the test, or with another: no patience of the product ends because the machine is slow. While a
thread or a child is at work, time is that of the machine.
"""

import asyncio
import math
import selectors
from collections.abc import Callable
from typing import Any, Final

from powerguard.clock import boottime_s

_GLANCE_S: Final = 0.01
_SHARE: Final = 0.02
"""So much of a wait is waited for, at least _GLANCE_S: a kernel that is very busy may be late with a packet."""
_LOOK_S: Final = 0.001
"""The most that one look without a wait may count: if it takes longer, other processes had the processor."""


class _Hurried(selectors.DefaultSelector):
    def __init__(self, loop: "HurriedLoop") -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop, began_s = self._loop, boottime_s()
        if timeout is None or timeout <= 0 or loop.waits_for_others:
            ready = super().select(timeout)
            took_s = boottime_s() - began_s
            is_look = timeout is not None and timeout <= 0 and not loop.waits_for_others
            loop.jump(min(took_s, _LOOK_S) if is_look else took_s)
            return ready
        ready = super().select(min(timeout, max(_GLANCE_S, timeout * _SHARE)))
        if not ready:
            loop.jump(timeout)
        return ready


class HurriedLoop(asyncio.SelectorEventLoop):
    """See above; `now_s` is the clock for everything that runs in it."""

    def __init__(self) -> None:
        self._now_s = boottime_s()
        self._threads = 0
        self._children: list[asyncio.SubprocessTransport] = []
        super().__init__(_Hurried(self))

    def time(self) -> float:
        """Seconds since this boot, those included that nobody waited for."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Let time pass; a hair more, so that the timer which is due then is past (see sim.virtual)."""
        self._now_s = math.nextafter(self._now_s + seconds, math.inf)

    @property
    def waits_for_others(self) -> bool:
        """A thread or a child is at work, whose time cannot be skipped."""
        self._children = [child for child in self._children if child.get_returncode() is None]
        return bool(self._threads or self._children)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        """Run it in a thread, and wait for it in the machine's time."""
        self._threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: object) -> None:
        self._threads -= 1

    async def _make_subprocess_transport(self, *args: Any, **more: Any) -> asyncio.SubprocessTransport:  # noqa: ANN401
        child = await super()._make_subprocess_transport(*args, **more)  # type: ignore[misc]
        self._children.append(child)
        return child


def now_s() -> float:
    """The clock of the running loop, hurried or not."""
    return asyncio.get_running_loop().time()
