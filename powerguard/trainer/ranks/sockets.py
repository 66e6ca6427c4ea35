"""Ranks over a socket to rank 0: a unix socket where the job has one host, TCP where it has several.

Who may speak: over a unix socket, whoever can reach it (it lies in a folder that only this user enters) and knows the
run's secret; over TCP, whoever knows the secret, which lies in a file that only this user reads. Every frame is sealed
with it (`frames`), so that nobody else on the cluster's network can speak for a rank; who listens there can read
steps and digests, and who can cut lines can end the agreement, not bend it.
"""

import contextlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from powerguard.trainer.ranks.base import MAX_VALUE_BYTES, Place, RanksError, boottime_s, farewell, meet
from powerguard.trainer.ranks.frames import (
    ADD,
    CHECK,
    CLAIM,
    DELETE,
    GET,
    NONCE_BYTES,
    NOTHING,
    SET,
    VALUE,
    FrameError,
    Sealer,
    packed,
)
from powerguard.trainer.ranks.socket_server import AMOUNT, MILLIS, Server, keep_alive

_CALL_S: Final = 10.0
_CONNECT_S: Final = 3.0
_AGAIN_S: Final = 0.05
_MIN_SECRET: Final = 16
_MAX_SECRET: Final = 64


class SocketRanks(Place):
    """One rank's connection to the store in rank 0, which rank 0 serves by itself.

    address: "unix:/path" or "host:port" (rank 0 listens there; give it the address of an inner network, never
    0.0.0.0). secret_file: a file of this user alone (mode 0600) with 16 bytes or more, the same on all hosts; rank 0
    makes it where it is missing, which is enough where all hosts see the same file. join_s: how long to wait for all.
    """

    def __init__(self, address: str, rank: int, size: int, *, secret_file: Path | str, join_s: float = 300.0) -> None:
        super().__init__(rank, size)
        self._target = _target(address)
        self._connection: socket.socket | None = None
        self._sealer: Sealer | None = None
        self._server: Server | None = None
        self._identity = 0
        self._met = False  # and not a clone
        until_s = boottime_s() + join_s
        secret_file = Path(secret_file)
        if rank == 0:
            _make_secret(secret_file)
        self._secret = _secret(secret_file, until_s)
        if rank == 0:
            self._server = Server(_listening(self._target, address), self._secret)
            self._identity = _inode(self._target) if isinstance(self._target, str) else 0
        try:
            self._reach(until_s)
            super().__init__(rank, size, meet(self, rank, size, join_s))
            self._met = True
        except BaseException:
            self.close()
            raise

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
        twin._connection = twin._sealer = twin._server = None
        twin._met = False
        return twin

    def close(self) -> None:
        """Let go; rank 0's first connection ends the store, once all others have let go of theirs, or after 5 s."""
        if self._met:
            farewell(self)
            self._met = False
        self._hang_up()
        if self._server is not None:
            # While it is open its inode is nobody else's: a run that began meanwhile has put its own socket there.
            if isinstance(self._target, str) and _inode(self._target) == self._identity:
                Path(self._target).unlink(missing_ok=True)
            self._server.close()
            self._server = None

    # --- One request, one answer -------------------------------------------------------------------------------------

    def _ask(self, body: bytes, timeout_s: float = 0.0) -> bytes | None:
        """Return the value of the answer; None where there is nothing. A broken connection is made anew at the next."""
        try:
            if self._connection is None or self._sealer is None:
                self._connect(_CONNECT_S)
            answer = self._exchange(body, boottime_s() + timeout_s + _CALL_S)
        except (OSError, FrameError) as error:
            self._hang_up()
            msg = f"{self._where()}: the store of the ranks, in rank 0, does not answer: {_words(error)}"
            raise RanksError(msg) from error
        except BaseException:
            self._hang_up()  # an answer that is still to come must not be taken for the next one's
            raise
        if answer[:1] == VALUE:
            return answer[1:]
        if answer[:1] == NOTHING:
            return None
        msg = f"{self._where()}: the store of the ranks is full"
        raise RanksError(msg)

    def _exchange(self, body: bytes, until_s: float) -> bytes:
        connection, sealer = self._connection, self._sealer
        if connection is None or sealer is None:
            msg = "closed"
            raise ConnectionError(msg)
        connection.settimeout(max(0.001, until_s - boottime_s()))
        connection.sendall(sealer.frame(body))
        while True:
            connection.settimeout(max(0.001, until_s - boottime_s()))
            data = connection.recv(1 << 18)
            if not data:
                msg = "it has hung up (another secret, or its process has ended)"
                raise ConnectionError(msg)
            for answer in sealer.bodies(data):
                return answer

    def _connect(self, timeout_s: float) -> None:
        self._hang_up()
        if isinstance(self._target, str):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout_s)
            with _closed_on_error(connection):
                connection.connect(self._target)
        else:
            connection = socket.create_connection(self._target, timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
        with _closed_on_error(connection):
            theirs = b""
            while len(theirs) < NONCE_BYTES:
                piece = connection.recv(NONCE_BYTES - len(theirs))
                if not piece:
                    msg = "it hangs up before it greets"
                    raise ConnectionError(msg)
                theirs += piece
            ours = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(ours)
        self._connection, self._sealer = connection, Sealer(self._secret, theirs, ours, server=False)

    def _reach(self, until_s: float) -> None:
        """Connect as soon as rank 0 listens: that of this run, where nobody has come as this rank before."""
        word = secrets.token_hex(8).encode()
        while True:
            try:
                if self.claim(f"in/{self.rank}", word) == word:
                    return
                refusal = f"a rank {self.rank} has come already (another job, or an earlier run, lives here)"
            except RanksError as error:
                refusal = str(error)
            if boottime_s() >= until_s:
                raise RanksError(refusal)
            self._hang_up()
            time.sleep(_AGAIN_S)

    def _hang_up(self) -> None:
        connection, self._connection, self._sealer = self._connection, None, None
        if connection is not None:
            connection.close()

    def _where(self) -> str:
        return self._target if isinstance(self._target, str) else f"{self._target[0]}:{self._target[1]}"


def _target(address: str) -> str | tuple[str, int]:
    if address.startswith("unix:/"):
        return address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        msg = f"{address}: must be unix:/PATH or HOST:PORT"
        raise RanksError(msg)
    return host.strip("[]"), int(port)


def _listening(target: str | tuple[str, int], address: str) -> socket.socket:
    try:
        if isinstance(target, tuple):
            family = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server(target, family=family, backlog=256)
        # Bound under another name and renamed: it replaces the socket of a killed run, and nobody sees it half open.
        unborn = f"{target}.{secrets.token_hex(2)}"
        listening = socket.socket(socket.AF_UNIX)
        with _closed_on_error(listening):
            listening.bind(unborn)
            Path(unborn).chmod(0o600)
            listening.listen(256)
            Path(unborn).rename(target)
    except OSError as error:
        msg = f"{address}: rank 0 cannot listen here: {error.strerror or error}"
        raise RanksError(msg) from error
    return listening


def _inode(path: str) -> int:
    try:
        return Path(path).stat(follow_symlinks=False).st_ino
    except OSError:
        return 0


def _make_secret(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        unborn = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(unborn, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(descriptor, secrets.token_hex(_MIN_SECRET).encode())
            finally:
                os.close(descriptor)
            path.hardlink_to(unborn)
        except FileExistsError:
            raise
        except OSError as error:
            msg = f"{path}: the secret of this run cannot be written: {error.strerror or error}"
            raise RanksError(msg) from error
        finally:
            unborn.unlink(missing_ok=True)


def _secret(path: Path, until_s: float) -> bytes:
    """Read the secret once it is there; refuse one that others could read."""
    while True:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                secret = file.read(_MAX_SECRET + 1).strip()
        except FileNotFoundError:
            if boottime_s() < until_s:
                time.sleep(_AGAIN_S)
                continue
            msg = f"{path}: rank 0 has not written the secret of this run (is this file on a shared file system?)"
            raise RanksError(msg) from None
        except OSError as error:
            msg = f"{path}: the secret of this run cannot be read: {error.strerror or error}"
            raise RanksError(msg) from error
        if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
            msg = f"{path}: others can read or change this secret (chmod 600, and owned by the user who trains)"
            raise RanksError(msg)
        if not _MIN_SECRET <= len(secret) <= _MAX_SECRET:
            msg = f"{path}: a secret has {_MIN_SECRET} to {_MAX_SECRET} bytes"
            raise RanksError(msg)
        return secret


def _bounded(key: str, value: bytes) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        msg = f"{key}: a value of {len(value)} bytes (at most {MAX_VALUE_BYTES})"
        raise RanksError(msg)
    return value


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
