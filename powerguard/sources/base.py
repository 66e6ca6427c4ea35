"""What the daemon asks of a source, and what sources share."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from powerguard.clock import Clock
from powerguard.core.readings import Reading, SourceFailed

Publish = Callable[[Reading | SourceFailed], None]


class Bell:
    """Wakes a poller before its turn: whoever rings gets the poll after it."""

    def __init__(self, clock: Clock) -> None:
        """Nobody has rung yet."""
        self._clock = clock
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Poll at once; during a poll: once more after it, for the one in flight may have been asked too early."""
        self._rung.set()

    async def rest(self, *, until_s: float, earliest_s: float) -> None:
        """Wait until then, or until somebody rings, but in no case less than to earliest_s (times of the clock)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - self._clock())):
                await self._rung.wait()
        too_early_s = earliest_s - self._clock()
        if too_early_s > 0:
            await asyncio.sleep(too_early_s)  # noqa: TID251 - the gap itself; whoever rings now gets the poll after it
        self._rung.clear()


class Source(Protocol):
    """Yields readings of one UPS for as long as it runs.

    `run` never returns and raises only when cancelled: every fault of the peer is published as `SourceFailed`.
    """

    async def run(self, publish: Publish) -> None:
        """Poll until cancelled; hand every reading or failure to `publish`, which never blocks."""
        ...

    def poll_now(self) -> None:
        """Poll at once instead of at the next turn. Safe to call at any time, from the loop's own thread."""
        ...


class NamedSource(Source, Protocol):
    """A source of the settings. name: in readings, metrics and logs, such as "nut:rack-a@10.0.0.9"."""

    name: str


@runtime_checkable
class Troubled(Protocol):
    """A source that may bring readings while something is wrong all the same."""

    @property
    def trouble(self) -> str:
        """What a person must put right, in one line; "" while nothing."""
        ...


def why_not_found(error: Exception) -> str:
    """Say why a name could not be looked up. Python refuses some before it asks anybody (UnicodeError)."""
    if isinstance(error, UnicodeError):
        return "that is no name: between two dots stand 1 to 63 characters"
    return getattr(error, "strerror", None) or "no answer from the name service"
