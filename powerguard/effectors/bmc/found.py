"""The power restore policy as last read without an outage: what `bmc.policy: bracket` puts back after one.

In a file, as the daemon that puts it back may be another one than the one that has set always-on: killed in between, it
could not tell what it had found. A file that is absent, or makes no sense, is nothing that is known.
"""

import asyncio
import json
from pathlib import Path
from typing import Final

import structlog

from powerguard.durable import replace_file
from powerguard.effectors.bmc.ipmi import PowerRestorePolicy

log = structlog.get_logger(__name__)

FILE: Final = "bmc-policy.json"
_LIMIT_S: Final = 0.5
"""A disk that hangs must not take the seconds in which the BMC can still be told."""
_MAX_BYTES: Final = 4096


class FoundPolicy:
    """Remembers it. folder: the daemon's own; None: only for as long as this object lives."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / FILE
        self._known: PowerRestorePolicy | None = None

    async def read(self) -> PowerRestorePolicy | None:
        """Return it; None where nobody knows. Never raises."""
        if self._known is None and self._path is not None:
            try:
                async with asyncio.timeout(_LIMIT_S):
                    self._known = await asyncio.to_thread(_read, self._path)
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                self._doubt("bmc_policy_unreadable", error)
        return self._known

    async def write(self, found: PowerRestorePolicy) -> None:
        """Keep it, on disk where it is another one. Never raises."""
        if found is self._known:
            return
        self._known = found
        if self._path is None:
            return
        told = json.dumps({"schema_version": 1, "policy": found.value}).encode() + b"\n"
        try:
            async with asyncio.timeout(_LIMIT_S):
                await asyncio.to_thread(replace_file, self._path, told)
        except OSError as error:  # of which TimeoutError is one
            self._doubt("bmc_policy_unwritten", error)

    def _doubt(self, event: str, error: Exception) -> None:
        because = f"no answer in {_LIMIT_S:g} s" if isinstance(error, TimeoutError) else str(error)[:200]
        log.warning(event, path=str(self._path), because=because)


def _read(path: Path) -> PowerRestorePolicy | None:
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    return PowerRestorePolicy(told["policy"])
