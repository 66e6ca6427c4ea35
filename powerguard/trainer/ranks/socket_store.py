"""Ranks of one host over a unix socket that rank 0 serves.

Only processes of this user can connect: the socket has mode 0600, and a rank checks that the process that listens
belongs to this user or to root.

    frame    length (4 bytes, big-endian) of the body | body
    request  kind (1 byte) | length of the key (1 byte) | key | the rest
    answer   kind (1 byte) | the value

One thread of rank 0 answers all ranks; none of them can hold another up.
"""

import contextlib
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from powerguard.trainer.log import log
from powerguard.trainer.ranks.base import MAX_KEY, MAX_VALUE_BYTES, Place, RanksError, boottime_s, farewell, meet

SET, GET, CHECK, CLAIM, ADD, DELETE = b"S", b"G", b"C", b"K", b"A", b"D"
VALUE, NOTHING, REFUSED = b"V", b"N", b"R"

MAX_FRAME_BYTES: Final = MAX_VALUE_BYTES + MAX_KEY + 64
_LENGTH: Final = struct.Struct(">I")
MILLIS: Final = struct.Struct(">Q")
AMOUNT: Final = struct.Struct(">q")
_CREDENTIALS: Final = struct.Struct("3i")
_READ_BYTES: Final = 256 * 1024
_MAX_UNSENT: Final = 8 * MAX_FRAME_BYTES
"""Most bytes of answers that a client may leave unread; then its connection ends."""
_MAX_STORE_BYTES: Final = 1 << 30

_CALL_S: Final = 10.0
_CONNECT_S: Final = 3.0
_AGAIN_S: Final = 0.05


_open: Final["weakref.WeakSet[socket.socket]"] = weakref.WeakSet()


def _let_go() -> None:
    for each in list(_open):
        each.close()


# A data loader's worker must not keep the connections of a rank open that has been killed.
os.register_at_fork(after_in_child=_let_go)


class FrameError(Exception):
    """The peer does not speak this protocol; its connection ends."""


class Frames:
    """The bytes that have come in on one connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def bodies(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that are complete after these bytes. Raises FrameError."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not 0 < length <= MAX_FRAME_BYTES:
                msg = f"a frame of {length} bytes"
                raise FrameError(msg)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def framed(body: bytes) -> bytes:
    """Return a body as it is sent."""
    return _LENGTH.pack(len(body)) + body


def packed(kind: bytes, key: str, rest: bytes = b"") -> bytes:
    """Return a request's body."""
    name = key.encode("ascii")
    return kind + bytes([len(name)]) + name + rest


def unpacked(body: bytes) -> tuple[bytes, str, bytes]:
    """Return kind, key and the rest of a request's body. Raises FrameError."""
    end = 2 + (body[1] if len(body) > 1 else MAX_FRAME_BYTES)
    if len(body) < end or end > 2 + MAX_KEY:
        msg = "a request that is cut short"
        raise FrameError(msg)
    try:
        return body[:1], body[2:end].decode("ascii"), body[end:]
    except UnicodeDecodeError as error:
        msg = "a key that is not ASCII"
        raise FrameError(msg) from error


# --- The store, in rank 0 ------------------------------------------------------------------------------------------


class Server:
    """Serves a listening socket until `close`."""

    def __init__(self, listening: socket.socket) -> None:
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
        _open.update((listening, self._wake, wake))
        self._closing = False
        self._look_at_s = math.inf  # no request has waited long enough before then
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

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:  # out of file descriptors, or the peer has gone again
            log.debug("accepting: %s", error)
            time.sleep(_AGAIN_S)  # it stays readable: not again at once
            return
        _open.add(connection)
        connection.setblocking(False)
        self._clients[connection] = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _attend(self, client: "_Client", mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                data = client.connection.recv(_READ_BYTES)
                if not data:
                    self._drop(client)
                    return
                for body in client.frames.bodies(data):
                    self._answer(client, body)
            self._flush(client)
        except (FrameError, OSError, struct.error) as error:
            log.debug("a connection of the rank store ends: %s", error)
            self._drop(client)

    def _flush(self, client: "_Client") -> None:
        """Send what there is to send, as far as it goes."""
        if client.connection not in self._clients:
            return
        try:
            while client.unsent:
                del client.unsent[: client.connection.send(client.unsent, socket.MSG_NOSIGNAL)]
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

    def _answer(self, client: "_Client", body: bytes) -> None:
        kind, key, rest = unpacked(body)
        value = self._values.get(key)
        if kind == GET:
            if value is not None:
                client.answer(VALUE + value)
            else:
                (millis,) = MILLIS.unpack(rest)
                until_s = boottime_s() + millis / 1000.0
                self._waiting.setdefault(key, []).append((client, until_s))
                self._look_at_s = min(self._look_at_s, until_s)
        elif kind == CHECK:
            client.answer(NOTHING if value is None else VALUE)
        elif kind == DELETE:
            self._size_bytes -= len(self._values.pop(key, b""))
            client.answer(VALUE)
        elif kind == CLAIM and value is not None:
            client.answer(VALUE + value)
        elif kind in {SET, CLAIM}:
            client.answer(VALUE + (rest if kind == CLAIM else b"") if self._store(key, rest) else REFUSED)
        elif kind == ADD:
            total = b"%d" % (int(value or b"0") + AMOUNT.unpack(rest)[0])
            client.answer(VALUE + total if self._store(key, total) else REFUSED)
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
            client.answer(VALUE + value)
            self._flush(client)
        return True

    def _patience_s(self) -> float | None:
        return None if self._look_at_s == math.inf else max(0.0, self._look_at_s - boottime_s())

    def _expire(self) -> None:
        """Answer the clients that have waited long enough; look at them when one may have, not before.

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
                client.answer(NOTHING)
                self._flush(client)
        ends = [until_s for waiting in self._waiting.values() for _, until_s in waiting]
        self._look_at_s = min(ends, default=math.inf)


class _Client:
    """One connection, as the server sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = Frames()
        self.unsent = bytearray()

    def answer(self, body: bytes) -> None:
        self.unsent += framed(body)


# --- A rank's connection -------------------------------------------------------------------------------------------


class SocketRanks(Place):
    """One rank's connection to the store in rank 0, which rank 0 serves by itself.

    path: of the socket, in a folder where only this user can make files. join_s: how long to wait for all ranks.
    Raises RanksError.
    """

    def __init__(self, path: Path | str, rank: int, size: int, *, join_s: float = 300.0) -> None:
        super().__init__(rank, size)
        self._path = Path(path)
        self._connection: socket.socket | None = None
        self._frames = Frames()
        self._server: Server | None = None
        self._identity = 0
        self._peer = self._served_by = 0
        """Process at the other end of this connection, and of the one by which this rank has come; 0: none yet."""
        self._met = False  # and not a clone
        until_s = boottime_s() + join_s
        if rank == 0:
            self._serve()
        try:
            self._reach(until_s)
            super().__init__(rank, size, meet(self, rank, size, join_s))
            self._met = True
        except BaseException:
            self.close()
            raise

    def _serve(self) -> None:
        self._server = Server(listening(self._path))
        self._identity = _inode(self._path)

    def set(self, key: str, value: bytes) -> None:
        self._ask(packed(SET, key, _bounded(key, value)))

    def get(self, key: str, timeout_s: float) -> bytes:
        answer = self._ask(packed(GET, key, MILLIS.pack(round(1000 * timeout_s))), timeout_s)
        if answer is None:
            raise TimeoutError(key)
        return answer

    def check(self, key: str) -> bool:
        return self._ask(packed(CHECK, key)) is not None

    def claim(self, key: str, value: bytes) -> bytes:
        return self._ask(packed(CLAIM, key, _bounded(key, value))) or b""

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(packed(ADD, key, AMOUNT.pack(amount))) or b"0")

    def delete(self, key: str) -> None:
        self._ask(packed(DELETE, key))

    def clone(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._connection = twin._server = None
        twin._met = False
        return twin

    def close(self) -> None:
        """Let go; rank 0's first connection ends the store, once all others have let go of theirs, or after 5 s."""
        if self._met:
            farewell(self)
            self._met = False
        self._hang_up()
        if self._server is not None:
            # While it is open its inode cannot be reused: a run that began meanwhile has put its own socket there.
            if _inode(self._path) == self._identity:
                self._path.unlink(missing_ok=True)
            self._server.close()
            self._server = None

    def _ask(self, body: bytes, timeout_s: float = 0.0) -> bytes | None:
        """Return the value of the answer; None where there is nothing. A broken connection is renewed by the next."""
        try:
            answer = self._exchange(body, timeout_s + _CALL_S)
        except (OSError, FrameError) as error:
            self._hang_up()
            msg = f"{self._path}: the store of the ranks, in rank 0, does not answer: {_words(error)}"
            raise RanksError(msg) from error
        except BaseException:
            self._hang_up()  # an answer that is still to come must not be taken for the next one's
            raise
        if answer[:1] == VALUE:
            return answer[1:]
        if answer[:1] == NOTHING:
            return None
        msg = f"{self._path}: the store of the ranks is full"
        raise RanksError(msg)

    def _exchange(self, body: bytes, timeout_s: float) -> bytes:
        connection = self._connection or self._connect()
        until_s = boottime_s() + timeout_s
        connection.settimeout(max(0.001, until_s - boottime_s()))
        # A training may have given SIGPIPE its default, which would end it.
        connection.sendall(framed(body), socket.MSG_NOSIGNAL)
        while True:
            connection.settimeout(max(0.001, until_s - boottime_s()))
            data = connection.recv(_READ_BYTES)
            if not data:
                msg = "it has hung up (has its process ended?)"
                raise ConnectionError(msg)
            for answer in self._frames.bodies(data):
                return answer

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        _open.add(connection)
        try:
            connection.settimeout(_CONNECT_S)
            connection.connect(str(self._path))
            self._peer = _checked_peer(connection, self._served_by)
        except BaseException:
            connection.close()
            raise
        self._connection, self._frames = connection, Frames()
        return connection

    def _reach(self, until_s: float) -> None:
        """Connect as soon as rank 0 listens: that of this run, if this rank was not taken before."""
        word = secrets.token_hex(8).encode()
        while True:
            try:
                if self.claim(f"in/{self.rank}", word) == word:
                    self._served_by = self._peer
                    return
                refusal = f"a rank {self.rank} has come already (another job, or an earlier run, lives here)"
            except RanksError as error:
                refusal = str(error)
            if boottime_s() >= until_s:
                raise RanksError(refusal)
            self._hang_up()
            time.sleep(_AGAIN_S)

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def listening(path: Path) -> socket.socket:
    """Listen at that path. Bound under another name and renamed: it replaces the socket of a killed run."""
    unborn = path.with_name(f"{path.name}.{secrets.token_hex(2)}")
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(str(unborn))
        unborn.chmod(0o600)
        server.listen(256)
        unborn.rename(path)
    except OSError as error:
        server.close()
        msg = f"{path}: rank 0 cannot listen here: {error.strerror or error}"
        raise RanksError(msg) from error
    return server


def _checked_peer(connection: socket.socket, known: int) -> int:
    """Return the process that listens. Raises ConnectionError if it is another user's, or not the known one."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid not in {0, os.geteuid()}:
        msg = f"user {uid} listens there"
        raise ConnectionError(msg)
    if known not in {0, pid}:
        msg = "another job of this user has taken its place (give each job its own MASTER_PORT)"
        raise ConnectionError(msg)
    return int(pid)


def _inode(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_ino
    except OSError:
        return 0


def _bounded(key: str, value: bytes) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        msg = f"{key}: a value of {len(value)} bytes (at most {MAX_VALUE_BYTES})"
        raise RanksError(msg)
    return value


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
