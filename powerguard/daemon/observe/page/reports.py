"""Reports of the last outages for readers of the page: by `powerguard report` in a child, one at a time."""

import asyncio
import sys
from pathlib import Path
from typing import Final

from powerguard.core.model.state import Online
from powerguard.daemon.observe.page.view import MOST_OUTAGES
from powerguard.daemon.observe.port import Daemon
from powerguard.effectors.child import MAX_OUTPUT_BYTES, Spawn

LIMIT_S: Final = 8.0
KEPT_S: Final = 600.0
"""How long a report is given again: readers cause at most eight children in that time."""
FAILED_S: Final = 30.0
"""The same of one that could not be made."""


_PROGRAM: Final = """import os, sys
os.nice(max(0, -os.nice(0)))
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("500")
from powerguard.cli.main import main
sys.exit(main())
"""
"""The verb as a program of ordinary priority: a child begins with the daemon's own."""


class ReportError(Exception):
    """There is no report, and why. status: of HTTP."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Reports:
    """The reports of a daemon's last outages, from its journal."""

    def __init__(self, daemon: Daemon, journal: Path, spawn: Spawn) -> None:
        """Read this journal. spawn: runs a program to its end or to its limit."""
        self._daemon = daemon
        self._journal = journal
        self._spawn = spawn
        self._made: dict[str, tuple[float, str]] = {}
        self._one = asyncio.Lock()

    async def html(self, outage: str) -> str:
        """Return the report of an outage as a page. Raises ReportError."""
        known = [each.id for each in self._daemon.outages[:MOST_OUTAGES] if each.ended_wall is not None]
        if outage not in known:
            raise ReportError(404, "not one of the last outages that have ended")
        command = f"on the host: powerguard report {outage} --html FILE"
        if not isinstance(self._daemon.state.phase, Online):
            raise ReportError(503, f"reports are not made during an outage; {command}")
        if self._one.locked():
            raise ReportError(503, "another report is being made: ask again in some seconds")
        async with self._one:
            self._made = {name: it for name, it in self._made.items() if self._is_fresh(*it) and name in known}
            if outage not in self._made:
                self._made[outage] = self._daemon.clock(), await self._make(outage)
        html = self._made[outage][1]
        if not html:
            raise ReportError(503, f"the report could not be made here; {command}")
        return html

    def _is_fresh(self, at_s: float, html: str) -> bool:
        return 0.0 <= self._daemon.clock() - at_s < (KEPT_S if html else FAILED_S)

    async def _make(self, outage: str) -> str:
        """Return the page; "" if it cannot be made."""
        argv = (sys.executable, "-P", "-c", _PROGRAM, "report", "--html", "-", "--journal", str(self._journal))
        try:
            ended = await self._spawn([*argv, "--", outage], limit_s=LIMIT_S)
        except OSError:
            return ""
        failed = ended.timed_out or ended.returncode != 0 or len(ended.stdout) >= MAX_OUTPUT_BYTES
        return "" if failed else ended.stdout.decode("utf-8", "replace")
