"""The read-only HTTP port, and what it shares with the admin socket: bounded connections, and small, cached answers.

No request here can make a change. A hostile client costs at most `MAX_CONNECTIONS` short-lived connections: each has
`CONNECTION_LIMIT_S` for everything, one request and no more, and the answers are made at most a few times a second.
The live page's streams alone last longer: they are few, and a reader that does not read is dropped.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from powerguard.daemon.attempt import keep_running
from powerguard.daemon.observe.learned import battery_view
from powerguard.daemon.observe.metrics import DaemonCollector, scrape
from powerguard.daemon.observe.page.updates import EVENTS_TYPE, READERS, Page, ReportError, Reports
from powerguard.daemon.observe.page.view import policy
from powerguard.daemon.observe.page.words import language_of
from powerguard.daemon.observe.port import Daemon
from powerguard.daemon.observe.readiness import HUNG_AFTER_S, is_ready, readiness
from powerguard.daemon.observe.status import (
    SCHEMA_VERSION,
    VERSION,
    Json,
    Times,
    drill_view,
    messages_view,
    plan_view,
    returning,
    status,
)

log = structlog.get_logger()

LISTEN: Final = "127.0.0.1"
PORT: Final = 13493
MAX_CONNECTIONS: Final = 32
CONNECTION_LIMIT_S: Final = 10.0
"""Timeout of a connection from accept to close, so that a client that sends one byte a second does not hold it."""
MAX_LINE_BYTES: Final = 2048
MAX_BODY_BYTES: Final = 4096
FRESH_S: Final = 0.25
"""An answer made this recently is given again: a flood of scrapes costs four of them a second."""
BACKLOG: Final = 64

HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = tuple[int, bytes, str]
"""HTTP status, body and content type."""
JSON_TYPE: Final = "application/json; charset=utf-8"
TEXT_TYPE: Final = "text/plain; charset=utf-8"
HTML_TYPE: Final = "text/html; charset=utf-8"


def _is_ours(record: logging.LogRecord) -> bool:
    """Keep what is our fault.

    A client without HTTP, or one that leaves, could otherwise fill the log with tracebacks.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))


_library_log = logging.getLogger("powerguard.http")
_library_log.addFilter(_is_ours)


class ConnectionGuard(asyncio.Protocol):
    """Stands between the socket and aiohttp's protocol: counts connections, and ends each of them at its limit."""

    def __init__(self, inner: asyncio.Protocol, crowd: "OpenConnections", limit_s: float) -> None:
        """Guard one connection for at most limit_s. crowd: all that are open on this server."""
        self._inner = inner
        self._limit_s = limit_s
        self._crowd = crowd
        self._transport: asyncio.Transport | None = None
        self._end: asyncio.TimerHandle | None = None
        self.peer: tuple[object, ...] = ()
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.peer = peer if isinstance(peer, tuple) else ()
        self.address = str(peer[0]) if self.peer else ""
        if not self._crowd.admit(self):
            self._transport.abort()
            return
        self._end = asyncio.get_running_loop().call_later(self._limit_s, self._transport.abort)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
            self._crowd.leave(self)
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._end is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._end is not None else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def stay(self) -> None:
        """Lift the limit, for a stream that watches its reader itself."""
        if self._end is not None:
            self._end.cancel()

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()


class OpenConnections:
    """The connections of one server. most: of all; most_each: of one address.

    When there are too many, the oldest makes room for the newest: of the same address first, else of the one that has
    most. So idle connections do not block other clients.
    """

    def __init__(self, most: int = MAX_CONNECTIONS, most_each: int | None = None) -> None:
        """Begin empty and open."""
        self.members: dict[ConnectionGuard, str] = {}
        """With the address of each, in the order of their coming."""
        self.closed = False
        self._most = most
        self._most_each = most if most_each is None else most_each
        self._empty = asyncio.Event()

    def admit(self, member: ConnectionGuard) -> bool:
        """Take a connection in; False once the server ends."""
        if self.closed:
            return False
        of_each = Counter(self.members.values())
        neighbourhood = neighbours(member.address)
        if of_each[neighbourhood] >= self._most_each:
            self._send_away(neighbourhood)
        elif len(self.members) >= self._most:
            self._send_away(of_each.most_common(1)[0][0])
        self.members[member] = neighbourhood
        return True

    def _send_away(self, neighbourhood: str) -> None:
        oldest = next(each for each, address in self.members.items() if address == neighbourhood)
        del self.members[oldest]
        oldest.abort()

    def leave(self, member: ConnectionGuard) -> None:
        """A connection has ended."""
        self.members.pop(member, None)
        if self.closed and not self.members:
            self._empty.set()

    async def disperse(self) -> None:
        """Accept no more connections, give the open ones a moment for their answer, and end them."""
        self.closed = True
        for _ in range(3):
            await asyncio.sleep(0)  # noqa: TID251 - connections that are just being accepted reach their Guard
        if self.members:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._empty.wait()
        for member in tuple(self.members):
            member.abort()


def neighbours(address: str) -> str:
    """Return whose connections count together: an address, or the /64 of IPv6 that one machine may have to itself."""
    if ":" not in address:
        return address
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    return address


class Views:
    """The daemon's answers, each made at most every FRESH_S."""

    def __init__(self, daemon: Daemon) -> None:
        """Watch this daemon."""
        self._daemon = daemon
        self._collector = DaemonCollector(daemon)
        self._made: dict[str, tuple[float, Answer]] = {}

    def answer(self, name: str, make: Callable[[], Answer]) -> Answer:
        """Return the answer of that name, made just now or a moment ago."""
        now_s = self._daemon.clock()
        known = self._made.get(name)
        if known is not None and 0.0 <= now_s - known[0] < FRESH_S:
            return known[1]
        made = make()
        self._made[name] = (now_s, made)
        return made

    def metrics(self, accept: str) -> Answer:
        """All metrics, in the text format that the client asks for."""
        wanted = "application/openmetrics-text" if "application/openmetrics-text" in accept else ""

        def make() -> Answer:
            body, kind = scrape(self._collector, wanted)
            return 200, body, kind

        return self.answer(f"metrics {wanted}", make)

    def healthz(self) -> Answer:
        """Alive: the loop makes progress. 503 when it hangs, so that a supervisor restarts the daemon."""
        times = Times(self._daemon)
        age_s = times.ago_s(self._daemon.progressed_at_s) or 0.0
        alive = age_s <= HUNG_AFTER_S
        body: Json = {"schema_version": SCHEMA_VERSION, "object": "healthz", "alive": alive, "progress_age_s": age_s}
        return as_json(body, 200 if alive else 503)

    def readyz(self) -> Answer:
        """Protected: the host would be saved if utility failed now. 503 with the reasons and their numbers if not."""

        def make() -> Answer:
            reasons = readiness(self._daemon)
            body = status(self._daemon)
            ready = is_ready(reasons)
            kept = ("schema_version", "at", "phase", "mode", "ready", "degraded", "reasons")
            return as_json({"object": "readyz", **{key: body[key] for key in kept}}, 200 if ready else 503)

        return self.answer("readyz", make)

    def status(self) -> Answer:
        """Everything that an operator asks about."""
        return self.answer("status", lambda: as_json(status(self._daemon)))

    def drill(self) -> Answer:
        """The drill that runs, and the report of the last one."""
        return self.answer("drill", lambda: as_json(drill_view(self._daemon)))

    def plan(self) -> Answer:
        """The budget term by term, and what happens next."""
        return self.answer("plan", lambda: as_json(plan_view(self._daemon)))

    def battery(self) -> Answer:
        """Learned figures of battery, loads and needs."""
        return self.answer("battery", lambda: as_json(battery_view(self._daemon)))


def as_json(body: Json, code: int = 200) -> Answer:
    """Return a JSON object as an answer."""
    return code, json.dumps(body, allow_nan=False, indent=2).encode() + b"\n", JSON_TYPE


def error_json(reason: str, code: int) -> Answer:
    """Return a refusal: what, and the fix."""
    return as_json({"schema_version": SCHEMA_VERSION, "object": "error", "error": reason}, code)


def respond(answer: Answer, **headers: str) -> web.Response:
    """Make the response; the connection ends with it."""
    code, body, kind = answer
    response = web.Response(status=code, body=body, headers={**HEADERS, "Content-Type": kind, **headers})
    response.force_close()
    return response


def add_reads(app: web.Application, daemon: Daemon, page: Page | None = None) -> None:
    """Add everything that only reads. page: for those who ask `/` for HTML."""
    views = Views(daemon)

    async def metrics(request: web.Request) -> web.Response:
        return respond(views.metrics(request.headers.get("Accept", "")))

    def handler(make: Callable[[], Answer]) -> Handler:
        async def handle(_: web.Request) -> web.Response:
            return respond(make())

        return handle

    reads: list[tuple[str, str, Handler]] = [
        ("/metrics", "metrics for Prometheus", metrics),
        ("/healthz", "200 while the daemon makes progress", handler(views.healthz)),
        (
            "/readyz",
            "200 if the host would be saved if utility failed now; else 503, with the reasons",
            handler(views.readyz),
        ),
        ("/api/v1/status", "phase, battery, budget, trainers, power-on methods", handler(views.status)),
        ("/api/v1/plan", "what happens if utility fails now, with every term", handler(views.plan)),
        ("/api/v1/drill", "the drill that runs, and the last report", handler(views.drill)),
        ("/api/v1/battery", "what was learned of the battery", handler(views.battery)),
        (
            "/api/v1/notify",
            "targets of messages, and messages that wait",
            handler(lambda: as_json(messages_view(daemon))),
        ),
        ("/api/v1/recovery", "what training waits for after a return", handler(lambda: as_json(returning(daemon)))),
    ]
    for path, _, handle in reads:
        app.router.add_get(path, handle)
    lines = [f"powerguard {VERSION}: available paths", "", *(f"{path:<18}{what}" for path, what, _ in reads)]
    index = 200, "\n".join([*lines, ""]).encode(), TEXT_TYPE

    async def root(request: web.Request) -> web.Response:
        if page is None or "text/html" not in request.headers.get("Accept", ""):
            return respond(index, Vary="Accept")
        language = language_of(request.headers.get("Accept-Language", ""))
        answer = views.answer(f"page {language}", lambda: (200, page.html(language).encode(), HTML_TYPE))
        allowed = policy(answer[1].decode())
        return respond(answer, **{"Content-Security-Policy": allowed, "Vary": "Accept, Accept-Language"})

    app.router.add_get("/", root)
    if page is not None:
        add_events(app, page)
    if page is not None and page.reports is not None:
        add_reports(app, page.reports)


def add_reports(app: web.Application, reports: Reports) -> None:
    """Add the reports of the last outages, by the outage's id."""

    async def report(request: web.Request) -> web.Response:
        try:
            html = await reports.html(request.match_info["outage"])
        except ReportError as error:
            return respond((error.status, f"{error}\n".encode(), TEXT_TYPE))
        return respond((200, html.encode(), HTML_TYPE), **{"Content-Security-Policy": policy(html)})

    app.router.add_get("/outages/{outage}", report, allow_head=False)


def add_events(app: web.Application, page: Page) -> None:
    """Add the live updates of the page."""

    async def events(request: web.Request) -> web.StreamResponse:
        if request.method == "HEAD":
            return respond((200, b"", EVENTS_TYPE))
        if not page.has_room():
            return respond(error_json(f"{READERS} streams are open already: ask / again instead", 503))
        guard = None if request.transport is None else request.transport.get_protocol()
        if isinstance(guard, ConnectionGuard):
            guard.stay()
        return await page.stream(request, HEADERS)

    app.router.add_get("/events", events)


def application() -> web.Application:
    """Return an empty application whose every refusal is JSON."""

    @web.middleware
    async def refuse_in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            reason = f"{request.method} {request.path[:100]}: {error.reason}"
            refused = respond(error_json(reason, error.status))
            if "Allow" in error.headers:
                refused.headers["Allow"] = error.headers["Allow"]
            return refused

    return web.Application(middlewares=[refuse_in_json], client_max_size=MAX_BODY_BYTES)


@contextlib.asynccontextmanager
async def guarded(
    app: web.Application, connection_limit_s: float = CONNECTION_LIMIT_S, crowd: OpenConnections | None = None
) -> AsyncIterator[Callable[[], asyncio.Protocol]]:
    """Run an application; yields the factory of guarded connections for a server to use."""
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        logger=_library_log,
        shutdown_timeout=0.5,
        keepalive_timeout=connection_limit_s,
        lingering_time=1.0,
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
        auto_decompress=False,
    )
    await runner.setup()
    make = cast("Callable[[], asyncio.Protocol]", runner.server)
    members = OpenConnections() if crowd is None else crowd
    try:
        yield lambda: ConnectionGuard(make(), members, connection_limit_s)
    finally:
        await members.disperse()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def http_server(
    daemon: Daemon,
    *,
    listen: str = LISTEN,
    port: int = PORT,
    connection_limit_s: float = CONNECTION_LIMIT_S,
    reports: Reports | None = None,
) -> AsyncIterator[int]:
    """Serve the read-only port; yields the port in use (0 asks for a free one). Raises OSError when it is taken."""
    app = application()
    page = Page(daemon, status, returning, reports)
    add_reads(app, daemon, page)
    async with guarded(app, connection_limit_s) as make:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(make, listen, port, backlog=BACKLOG)
        # Not in a TaskGroup, which would wrap the caller's own exceptions; nothing but its cancellation ends it.
        watching = loop.create_task(keep_running("page", page.watch))
        try:
            used = int(server.sockets[0].getsockname()[1])
            log.info("http_listening", listen=listen, port=used)
            yield used
        finally:
            server.close()
            watching.cancel()
            page.end()
