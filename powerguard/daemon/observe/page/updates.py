"""The page, its live updates (server-sent events), and reports of the last outages for its readers.

An update is rendered once for all readers, and never queued for a slow one. A report is made by `powerguard report` in
a child, one at a time.
"""

import asyncio
import contextlib
import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web

from powerguard.core.model.state import Online
from powerguard.daemon.attempt import rest
from powerguard.daemon.observe.page.view import MOST_OUTAGES, Curves, context, render
from powerguard.daemon.observe.page.words import language_of
from powerguard.daemon.observe.port import Daemon
from powerguard.effectors.child import MAX_OUTPUT_BYTES, Ended, Spawn

log = structlog.get_logger()

READERS: Final = 16
"""Streams that are open at a time. One more is refused, and its page asks every few seconds instead."""
EVERY_S: Final = 1.0
LOOK_S: Final = 0.1
"""How often a change of the phase is looked for while a page is open."""
SEND_BUFFER_BYTES: Final = 65536
"""Kernel's buffer of one stream: a reader who does not take its updates is dropped when it is full."""
SLOW_S: Final = 5.0
"""An update larger than the buffers may take this long; then the reader is dropped, too."""
EVENTS_TYPE: Final = "text/event-stream"

_FIXED = re.compile(r"<(style|script)>.*?</\1>", re.DOTALL)

REPORT_LIMIT_S: Final = 8.0
REPORT_KEPT_S: Final = 600.0
"""How long a report is given again: readers cause at most eight children in that time."""
REPORT_FAILED_S: Final = 30.0
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
            raise ReportError(503, f"the report could not be made here (see the log: report_failed); {command}")
        return html

    def _is_fresh(self, at_s: float, html: str) -> bool:
        return 0.0 <= self._daemon.clock() - at_s < (REPORT_KEPT_S if html else REPORT_FAILED_S)

    async def _make(self, outage: str) -> str:
        """Return the page; "" if it cannot be made, and the log has the reason."""
        argv = (sys.executable, "-P", "-c", _PROGRAM, "report", "--html", "-", "--journal", str(self._journal))
        try:
            ended = await self._spawn([*argv, "--", outage], limit_s=REPORT_LIMIT_S)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            why = _failure(ended)
        if why:
            log.warning("report_failed", outage=outage, because=why)
            return ""
        return ended.stdout.decode("utf-8", "replace")


def _failure(ended: Ended) -> str:
    """Return why this child has made no page; "" if it has made one."""
    if ended.timed_out:
        return f"not made within {REPORT_LIMIT_S:g} s"
    if ended.returncode != 0:
        lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"ended with status {ended.returncode}: {lines[-1][:200] if lines else 'it wrote nothing'}"
    return f"longer than {MAX_OUTPUT_BYTES} bytes" if len(ended.stdout) >= MAX_OUTPUT_BYTES else ""


class Page:
    """The page of one server. status, recovery: make the objects of `/api/v1/status` and `/api/v1/recovery`.

    reports: of the outages that it lists; None: it names the command.
    """

    def __init__(
        self,
        daemon: Daemon,
        status: Callable[[Daemon], dict[str, Any]],
        recovery: Callable[[Daemon], dict[str, Any]],
        reports: Reports | None = None,
    ) -> None:
        """Show this daemon."""
        self.curves = Curves()
        self.reports = reports
        self._daemon = daemon
        self._status = status
        self._recovery = recovery
        self._readers: set[asyncio.Transport] = set()
        self._frames: dict[str, bytes] = {}
        self._news = asyncio.Event()
        self._over = False

    def html(self, language: str) -> str:
        """Return the whole page as it is now."""
        daemon = self._daemon
        status, returning = self._status(daemon), self._recovery(daemon)
        shown = context(status, returning, daemon.outages, self.curves, language)
        return render(shown | {"has_reports": self.reports is not None})

    def has_room(self) -> bool:
        """Say whether one more stream is admitted."""
        self._readers = {each for each in self._readers if not each.is_closing()}
        return len(self._readers) < READERS

    async def watch(self) -> None:
        """Gather the curves; while streams are open, publish once a second and when the phase changes."""
        phase, due_s = type(self._daemon.state.phase), 0.0
        loop = asyncio.get_running_loop()
        while True:
            self.curves.take(self._daemon)
            now_s, old_phase, phase = loop.time(), phase, type(self._daemon.state.phase)
            if self._readers and (now_s >= due_s or phase is not old_phase):
                due_s = now_s + EVERY_S
                self._publish()
            await rest(LOOK_S if self._readers else EVERY_S)

    def end(self) -> None:
        """End every stream."""
        self._over = True
        self._publish()

    def _publish(self) -> None:
        self._frames.clear()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _frame(self, language: str) -> bytes:
        """Return the newest snapshot as one event: the page without its style and script, which do not change."""
        if language not in self._frames:
            body = json.dumps(_FIXED.sub("", self.html(language)), ensure_ascii=False)
            self._frames[language] = f"data: {body}\n\n".encode()
        return self._frames[language]

    async def stream(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        """Send updates until the reader leaves, is too slow, or the server ends. Call `has_room` first."""
        language = language_of(request.headers.get("Accept-Language", ""))
        response = web.StreamResponse(headers={**headers, "Content-Type": f"{EVENTS_TYPE}; charset=utf-8"})
        response.force_close()
        transport = request.transport
        if transport is None:
            return response
        if not self._readers:
            self._frames.clear()  # of the last reader, long ago
        self._readers.add(transport)
        try:
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            with contextlib.suppress(ConnectionError):
                await response.prepare(request)
                await response.write(b"retry: 2000\n\n")
                await self._follow(response, transport, language)
        finally:
            self._readers.discard(transport)
        return response

    async def _follow(self, response: web.StreamResponse, transport: asyncio.Transport, language: str) -> None:
        while not self._over:
            # What is left of the last update means that the kernel's buffer has been full for a second.
            if transport.get_write_buffer_size() > 0:
                transport.abort()
                return
            news = self._news
            try:
                async with asyncio.timeout(SLOW_S):
                    await response.write(self._frame(language))
            except TimeoutError:
                transport.abort()
                return
            await news.wait()
