"""The HTTP server: a request must be signed, and each signature counts once.

A client without a key only learns that: an unknown host, a wrong key and an old challenge get the same answer, at the
same cost. A flood costs neither memory nor disk.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import ssl
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Protocol

import structlog
from aiohttp import web

from powerguard.clock import Clock
from powerguard.daemon.observe.http import (
    BACKLOG,
    JSON_TYPE,
    ConnectionGuard,
    Handler,
    OpenConnections,
    application,
    as_json,
    error_json,
    guarded,
    respond,
)
from powerguard.effectors.sentinel import protocol as wire

log = structlog.get_logger()

MAX_CONNECTIONS: Final = 256
MAX_CONNECTIONS_EACH: Final = 32
MAX_STRANGERS: Final = 256
MAX_STRANGERS_EACH: Final = 64
"""Connections whose TLS handshake is not over, of all and of one address. asyncio shows a connection only after it."""
HANDSHAKE_S: Final = 3.0
ADDRESS_RATE: Final = (10.0, 60.0)
"""Requests a second, and at once, of one address. Of a host only the question for a challenge counts: many hosts may
share one address, and none that has a challenge must come back for another."""
HOST_RATE: Final = (1.0, 20.0)
"""The same of one host, whose requests may each cost a write to the disk."""
MAX_ADDRESSES: Final = 1024
LOG_REFUSALS_S: Final = 10.0

Answer = tuple[int, Mapping[str, Any]]
"""HTTP status and JSON object."""


class RequestHandler(Protocol):
    """Answers requests whose origin was proven."""

    async def answer(self, kind: str, request: wire.Request) -> Answer:
        """Carry it out within a few seconds; kind: of `protocol.PATHS`."""
        ...


class Buckets:
    """Lets each name through so often: rate a second, and burst at once. The names seen longest ago are forgotten.

    What is turned away costs nothing, so that a name that asks too often passes at its rate.
    """

    def __init__(self, rate: float, burst: float, most: int = MAX_ADDRESSES) -> None:
        self._rate = rate
        self._burst = burst
        self._most = most
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str, now_s: float) -> bool:
        """Say whether this name may pass now."""
        left, at_s = self._left.pop(name, (self._burst, now_s))
        left = min(self._burst, left + max(now_s - at_s, 0.0) * self._rate)
        self._left[name] = (left - 1.0 if left >= 1.0 else left, now_s)
        if len(self._left) > self._most:
            self._left.popitem(last=False)
        return left >= 1.0


class HostRequests:
    """The requests of hosts. keys: by host. counts: how each was answered, by a word of `ANSWERS`."""

    def __init__(self, keys: Mapping[str, bytes], desk: RequestHandler, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        self._keys = keys
        self._desk = desk
        self._clock = clock
        self._challenges = wire.Challenges(secrets.token_bytes(32))
        self._nobody = secrets.token_bytes(32)
        self._addresses = Buckets(*ADDRESS_RATE)
        self._hosts = Buckets(*HOST_RATE)
        self._logged_s = -LOG_REFUSALS_S
        self._unlogged = 0

    def add(self, app: web.Application) -> None:
        """Add what hosts may ask."""

        async def challenge(request: web.Request) -> web.Response:
            if not self.admits(request):
                return self.turn_away()
            token = self._challenges.make(self._clock(), secrets.token_bytes(8))
            body = {"schema_version": wire.SCHEMA_VERSION, "object": "challenge", "challenge": token}
            return respond(as_json({**body, "valid_s": wire.CHALLENGE_S}))

        app.router.add_get(wire.CHALLENGE_PATH, challenge)
        for kind, path in wire.PATHS.items():
            app.router.add_post(path, self._handler(kind, path))

    def _handler(self, kind: str, path: str) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            return await self._answer(kind, path, request)

        return handle

    async def _answer(self, kind: str, path: str, request: web.Request) -> web.Response:
        now_s = self._clock()
        body = await request.read()
        try:
            wire_request = wire.decode(kind, body)
        except wire.SentinelWireError as error:
            if not self.admits(request):
                return self.turn_away()
            return self._refuse("not_understood", 400, f"the request {error}")
        key = self._keys.get(wire_request.host)
        signature = wire.sign_request(key or self._nobody, path, body)
        signed = wire.is_signed(signature, request.headers.get(wire.SIGNATURE))
        fresh = self._challenges.is_good(wire_request.challenge, now_s)
        if key is None or not signed or not fresh:
            if not self.admits(request):
                return self.turn_away()
            self._log_refusal(request.remote, now_s)
            return self._refuse("refused", 401, "not accepted")
        self._challenges.use(wire_request.challenge, now_s)
        if self._hosts.take(wire_request.host, now_s):
            status, answer = await self._desk.answer(kind, wire_request)
        else:
            status, answer = 429, refusal("too many requests of this host")
        self.counts[kind if status == 200 else "limited" if status == 429 else "failed"] += 1
        return _signed(key, signature, status, answer)

    def admits(self, request: web.Request) -> bool:
        """Say whether this address may ask now."""
        return self._addresses.take(request.remote or "", self._clock())

    def turn_away(self) -> web.Response:
        """Answer an address that may not."""
        return self._refuse("limited", 429, "too many requests from this address")

    def _refuse(self, word: str, status: int, reason: str) -> web.Response:
        self.counts[word] += 1
        return respond(error_json(reason, status))

    def _log_refusal(self, address: str | None, now_s: float) -> None:
        """Log a client without a key, at most every few seconds, so that it cannot fill the log."""
        self._unlogged += 1
        if now_s - self._logged_s >= LOG_REFUSALS_S:
            because = "a wrong key, or an old challenge"
            log.warning("request_refused", address=address, requests=self._unlogged, because=because)
            self._logged_s, self._unlogged = now_s, 0


ANSWERS: Final = (*wire.PATHS, "refused", "not_understood", "limited", "failed")


def refusal(reason: str) -> dict[str, Any]:
    """Return the object that says no to a host that has proven who it is."""
    return {"object": "refused", "reason": reason}


def _signed(key: bytes, signature: str, status: int, answer: Mapping[str, Any]) -> web.Response:
    body = json.dumps({"schema_version": wire.SCHEMA_VERSION, **answer}, allow_nan=False).encode()
    response = respond((status, body, JSON_TYPE))
    response.headers[wire.SIGNATURE] = wire.sign_answer(key, signature, status, body)
    return response


class BoundedListener(socket.socket):
    """A listening socket that bounds the connections before their handshake, so that a flood leaves descriptors free.

    When there are too many, the oldest one makes room for the newest: of the same address first.
    """

    def __init__(self, listening: socket.socket) -> None:
        """Take over a socket that listens."""
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self._strangers: dict[tuple[object, ...], socket.socket] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection."""
        connection, address = super().accept()
        self._strangers = {each: sock for each, sock in self._strangers.items() if sock.fileno() >= 0}
        neighbours = [each for each in self._strangers if each[0] == address[0]]
        if len(neighbours) >= MAX_STRANGERS_EACH:
            self._send_away(neighbours[0])
        elif len(self._strangers) >= MAX_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        self._strangers[address] = connection
        return connection, address

    def enter(self, address: tuple[object, ...]) -> None:
        """The handshake of this one is over: from here on the server counts it."""
        self._strangers.pop(address, None)

    def _send_away(self, address: tuple[object, ...]) -> None:
        with contextlib.suppress(OSError):
            self._strangers.pop(address).shutdown(socket.SHUT_RDWR)


class _Crowd(OpenConnections):
    """The connections whose handshake is over."""

    def __init__(self, porch: BoundedListener) -> None:
        super().__init__(MAX_CONNECTIONS, MAX_CONNECTIONS_EACH)
        self._porch = porch

    def admit(self, member: ConnectionGuard) -> bool:
        self._porch.enter(member.peer)
        return super().admit(member)


@contextlib.asynccontextmanager
async def server(
    door: HostRequests, reads: Mapping[str, Handler], *, listen: str, port: int, tls: ssl.SSLContext | None
) -> AsyncIterator[int]:
    """Serve; yields the port in use (0 asks for a free one). reads: public objects. Raises OSError."""
    app = application()
    door.add(app)
    for path, handler in reads.items():
        app.router.add_get(path, handler)
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    porch = BoundedListener(socket.create_server((listen, port), family=family, backlog=BACKLOG))
    async with guarded(app, crowd=_Crowd(porch)) as make:
        listening = await asyncio.get_running_loop().create_server(
            make, sock=porch, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=None if tls is None else HANDSHAKE_S
        )
        try:
            yield int(listening.sockets[0].getsockname()[1])
        finally:
            listening.close()
