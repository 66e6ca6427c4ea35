"""What the daemon asks of a source."""

from collections.abc import Callable
from typing import Protocol

from powerguard.core.events import Reading, SourceFailed

Publish = Callable[[Reading | SourceFailed], None]


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
