"""The store behind SocketRanks: one thread of rank 0 that answers all ranks, none of which can hold another up."""

import contextlib
import logging
import math
import secrets
import selectors
import socket
import struct
import threading
from typing import Final

from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.ranks.frames import (
    ADD,
    CHECK,
    CLAIM,
    DELETE,
    GET,
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    NOTHING,
    REFUSED,
    SET,
    VALUE,
    FrameError,
    Sealer,
    unpacked,
)

_log = logging.getLogger("powerguard.trainer")
MILLIS: Final = struct.Struct(">Q")
AMOUNT: Final = struct.Struct(">q")
_READ_BYTES: Final = 256 * 1024
_MAX_UNSENT: Final = 8 * MAX_FRAME_BYTES  # a client that reads no answers is let go
_GREETING_S: Final = 2.0
_STRANGERS: Final = 64  # connections that have not proved anything yet
_MAX_STORE_BYTES: Final = 1 << 30


class Server:
    """Serves a listening socket until `close`. secret: 16 bytes or more, which all clients know."""

    def __init__(self, listening: socket.socket, secret: bytes) -> None:
        self._secret = secret
        self._listening = listening
        listening.setblocking(False)
        self._values: dict[str, bytes] = {}
        self._size_bytes = 0
        self._clients: dict[socket.socket, _Client] = {}
        self._waiting: dict[str, list[tuple[_Client, float]]] = {}
        self._wake, wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        self._woken = wake
        self._closing = False
        self._look_at_s = math.inf  # not before then has anybody waited long enough
        self._thread = threading.Thread(target=self._serve, name="powerguard-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; all connections end."""
        if not self._closing:
            self._closing = True
            with contextlib.suppress(OSError):  # it may have seen that already, and closed this, too
                self._wake.send(b"x")
            self._thread.join(5.0)

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, mask in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listening:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._clients:
                        self._attend(self._clients[key.fileobj], mask)
                self._expire()
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            for end in (self._listening, self._wake, self._woken):
                end.close()
            self._selector.close()

    # --- Connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:  # out of file descriptors, or the peer has gone again
            _log.debug("accepting: %s", error)
            return
        strangers = [client for client in self._clients.values() if client.sealer is None]
        if len(strangers) >= _STRANGERS:
            self._drop(strangers[0])  # the oldest, so that idle connections cannot keep a rank out
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
        client = _Client(connection)
        self._clients[connection] = client
        self._look_at_s = min(self._look_at_s, client.until_s)
        self._selector.register(connection, selectors.EVENT_READ)
        client.unsent += client.nonce
        self._flush(client)

    def _attend(self, client: "_Client", mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                data = client.connection.recv(_READ_BYTES)
                if not data:
                    self._drop(client)
                    return
                for body in client.bodies(data, self._secret):
                    self._answer(client, body)
            self._flush(client)
        except (FrameError, OSError, struct.error) as error:
            _log.debug("a connection of the rank store ends: %s", error)
            self._drop(client)

    def _flush(self, client: "_Client") -> None:
        """Send what there is to send, as far as it goes."""
        if client.connection not in self._clients:
            return
        try:
            while client.unsent:
                del client.unsent[: client.connection.send(client.unsent)]
        except BlockingIOError:
            if len(client.unsent) > _MAX_UNSENT:
                self._drop(client)
                return
        except OSError:
            self._drop(client)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.connection, wanted)

    def _drop(self, client: "_Client") -> None:
        if self._clients.pop(client.connection, None) is not None:
            self._selector.unregister(client.connection)
            client.connection.close()

    # --- The store ---------------------------------------------------------------------------------------------------

    def _answer(self, client: "_Client", body: bytes) -> None:
        kind, key, rest = unpacked(body)
        value = self._values.get(key)
        if kind == GET:
            if value is not None:
                self._tell(client, VALUE + value)
            else:
                (millis,) = MILLIS.unpack(rest)
                until_s = boottime_s() + millis / 1000.0
                self._waiting.setdefault(key, []).append((client, until_s))
                self._look_at_s = min(self._look_at_s, until_s)
        elif kind == CHECK:
            self._tell(client, NOTHING if value is None else VALUE)
        elif kind == DELETE:
            self._size_bytes -= len(self._values.pop(key, b""))
            self._tell(client, VALUE)
        elif kind == CLAIM and value is not None:
            self._tell(client, VALUE + value)
        elif kind in {SET, CLAIM}:
            self._tell(client, VALUE + (rest if kind == CLAIM else b"") if self._store(key, rest) else REFUSED)
        elif kind == ADD:
            total = b"%d" % (int(value or b"0") + AMOUNT.unpack(rest)[0])
            self._tell(client, VALUE + total if self._store(key, total) else REFUSED)
        else:
            msg = f"a request of kind {kind!r}"
            raise FrameError(msg)

    def _store(self, key: str, value: bytes) -> bool:
        growth = len(value) - len(self._values.get(key, b""))
        if self._size_bytes + growth > _MAX_STORE_BYTES:
            return False
        self._values[key] = value
        self._size_bytes += growth
        for client, _ in self._waiting.pop(key, ()):
            self._tell(client, VALUE + value)
            self._flush(client)
        return True

    def _tell(self, client: "_Client", body: bytes) -> None:
        if client.sealer is not None:
            client.unsent += client.sealer.frame(body)

    def _patience_s(self) -> float | None:
        return None if self._look_at_s == math.inf else max(0.0, self._look_at_s - boottime_s())

    def _expire(self) -> None:
        """Tell those who have waited long enough, and let strangers go who do not greet; when one may have, not before.

        A thousand ranks wait here: looking at each of them for each frame would be what the others wait for.
        """
        now_s = boottime_s()
        if now_s < self._look_at_s:
            return
        for key, waiting in list(self._waiting.items()):
            over = [client for client, until_s in waiting if until_s <= now_s]
            left = [(client, until_s) for client, until_s in waiting if until_s > now_s]
            self._waiting[key] = [pair for pair in left if pair[0].connection in self._clients]
            if not self._waiting[key]:
                del self._waiting[key]
            for client in over:
                self._tell(client, NOTHING)
                self._flush(client)
        strangers = [client for client in self._clients.values() if client.sealer is None]
        for client in strangers:
            if client.until_s <= now_s:
                self._drop(client)
        ends = [until_s for waiting in self._waiting.values() for _, until_s in waiting]
        self._look_at_s = min([*ends, *(one.until_s for one in strangers if one.until_s > now_s)], default=math.inf)


class _Client:
    """One connection, as the server sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.sealer: Sealer | None = None
        self.until_s = boottime_s() + _GREETING_S
        self.unsent = bytearray()
        self._greeting = b""

    def bodies(self, data: bytes, secret: bytes) -> list[bytes]:
        """Return the requests that have come in whole; the first of them proves that the client knows the secret."""
        if self.sealer is None:
            self._greeting += data
            if len(self._greeting) > NONCE_BYTES + MAX_FRAME_BYTES:
                msg = "a greeting without end"
                raise FrameError(msg)
            if len(self._greeting) < NONCE_BYTES:
                return []
            sealer = Sealer(secret, self.nonce, self._greeting[:NONCE_BYTES], server=True)
            bodies = list(sealer.bodies(self._greeting[NONCE_BYTES:]))
            if bodies:
                self.sealer, self._greeting = sealer, b""
            return bodies
        return list(self.sealer.bodies(data))


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice, within half a minute, a peer whose host has lost its power."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)
