"""What was ordered of a UPS, kept in a file beside the journal: an order to cut power is given once for each outage.

The core orders the same again after a restart of the daemon if it never heard how it went. Most UPSes show the
countdown, and so whether it stands; the note tells whose it is, and stands alone for those that show none.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from powerguard.durable import replace_file

log = structlog.get_logger(__name__)

_LIMIT_S: Final = 0.5
"""A disk that hangs must not take the seconds in which the UPS can still be told."""
_MAX_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One order. at_s: CLOCK_BOOTTIME of that boot when it went out; in_s: from then until the output is off."""

    outage: str
    boot: str
    at_s: float
    in_s: float

    def left_s(self, now_s: float) -> float:
        """Return seconds until the output is off; below 0 once it ought to have been."""
        return self.at_s + self.in_s - now_s


class Notes:
    """One note for each UPS, in memory and in a file each. A file that cannot be had costs a line in the log."""

    def __init__(self, folder: Path, *, run: Callable[..., Awaitable[Any]] = asyncio.to_thread) -> None:
        """Read nothing yet. run: calls what may hang on a disk, so that nobody else waits for it."""
        self._folder, self._run = folder, run
        self._known: dict[str, Sent | None] = {}

    async def read(self, ups: str) -> Sent | None:
        """Return what was ordered of this UPS last and not taken back; None: nothing that is known."""
        if ups not in self._known:
            try:
                async with asyncio.timeout(_LIMIT_S):
                    self._known[ups] = await self._run(_read, self._path(ups))
            except (OSError, ValueError, TypeError, TimeoutError, RecursionError) as error:
                self._doubt(ups, "note_unreadable", error)
                return None
        return self._known[ups]

    async def write(self, ups: str, sent: Sent | None) -> None:
        """Keep the note, or (None) drop it. Durable when this returns, or told that it is not."""
        self._known[ups] = sent
        try:
            async with asyncio.timeout(_LIMIT_S):
                await self._run(_write, self._path(ups), sent)
        except (OSError, TimeoutError) as error:
            self._doubt(ups, "note_unwritten", error)

    def _path(self, ups: str) -> Path:
        return self._folder / f"output-{ups}.json"

    def _doubt(self, ups: str, event: str, error: Exception) -> None:
        because = f"no answer in {_LIMIT_S:g} s" if isinstance(error, TimeoutError) else str(error)[:200]
        log.warning(event, ups=ups, path=str(self._path(ups)), because=because)


def _read(path: Path) -> Sent | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)  # a pipe never waits
    except FileNotFoundError:
        return None
    try:
        told = json.loads(os.read(descriptor, _MAX_BYTES))
    finally:
        os.close(descriptor)
    sent = Sent(**told)
    if not (isinstance(sent.outage, str) and isinstance(sent.boot, str)):
        msg = "outage and boot must be text"
        raise TypeError(msg)
    return Sent(outage=sent.outage, boot=sent.boot, at_s=float(sent.at_s), in_s=float(sent.in_s))


def _write(path: Path, sent: Sent | None) -> None:
    if sent is None:
        path.unlink(missing_ok=True)
        return
    replace_file(path, json.dumps(asdict(sent)).encode())
