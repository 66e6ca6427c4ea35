"""One trainer's HTTP endpoint, as the daemon may safely talk to it: every wait and every size has an end.

Connecting takes at most 1 s, the headers 2 s, the body 2 s and 64 KiB. No redirect is followed, no cookie kept, no
proxy of the environment used, no decompression. On a unix socket the other end's user is checked before the first byte
(and so the token) is sent.

What a trainer's first answer means: the whole table in one pure function.

| answer | meaning |
| --- | --- |
| 2xx with our Location | native: follow the checkpoint there |
| 202 without | dumb and asynchronous: started, no further report |
| other 2xx | dumb and synchronous: done, without proof |
| 409, 423 | one is running: adopt it |
| 404, 405, 501 | no such route: try the alias, once |
| 401, 403 | the token is refused: not repeated |
| 429; 503 with Retry-After | busy: retried when it says, but soon |
| other 5xx | failed: three more tries with the same id |
| other answers | it refuses or redirects: not repeated |
"""

import asyncio
import contextlib
import errno
import itertools
import os
import re
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace

from powerguard.effectors.http import KnownNames
from powerguard.effectors.trainer.options import TrainerOptions
from powerguard.fields import clean_text
from powerguard.options import Secret, SecretError
from powerguard.wire import CHECKPOINTS_PATH, MAX_BODY_BYTES

BACKOFF_S = (0.2, 0.5, 1.0)
"""Pauses before the second, third and fourth try of a failing trainer."""

_NAME = re.compile(re.escape(CHECKPOINTS_PATH) + r"/[A-Za-z0-9._:@+%-]{1,400}")
_SECONDS = re.compile(r"\d{1,9}")


class Meaning(StrEnum):
    NATIVE = "native"
    DUMB_ASYNC = "dumb_async"
    DUMB_SYNC = "dumb_sync"
    ADOPT = "adopt"
    NO_ROUTE = "no_route"
    BAD_TOKEN = "bad_token"  # noqa: S105 - a meaning, not a password
    BUSY = "busy"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerAnswer:
    """location: path of the checkpoint to follow, never another host. retry_after_s: as sent, 1 s if unreadable."""

    meaning: Meaning
    location: str | None = None
    retry_after_s: float = 1.0


def classify(status: int, *, location: str | None, retry_after: str | None) -> TriggerAnswer:
    """Say what a trainer's answer to a trigger means. Total: every status has a meaning."""
    path = _path(location)
    seconds = float(retry_after) if retry_after is not None and _SECONDS.fullmatch(retry_after) else 1.0
    match status:
        case _ if 200 <= status < 300 and path is not None:
            return TriggerAnswer(meaning=Meaning.NATIVE, location=path)
        case 202:
            return TriggerAnswer(meaning=Meaning.DUMB_ASYNC)
        case _ if 200 <= status < 300:
            return TriggerAnswer(meaning=Meaning.DUMB_SYNC)
        case 409 | 423:
            return TriggerAnswer(meaning=Meaning.ADOPT, location=path)
        case 404 | 405 | 501:
            return TriggerAnswer(meaning=Meaning.NO_ROUTE)
        case 401 | 403:
            return TriggerAnswer(meaning=Meaning.BAD_TOKEN)
        case 429:
            return TriggerAnswer(meaning=Meaning.BUSY, retry_after_s=seconds)
        case 503 if retry_after is not None:
            return TriggerAnswer(meaning=Meaning.BUSY, retry_after_s=seconds)
        case _ if status >= 500:
            return TriggerAnswer(meaning=Meaning.FAILED)
        case _:
            return TriggerAnswer(meaning=Meaning.REFUSED)


def _path(location: str | None) -> str | None:
    """Return the path of a Location that is one of ours. Its host, if it names one, is never followed."""
    if location is None or len(location) > 2000:
        return None
    try:
        path = urlsplit(location).path
    except ValueError:
        return None
    return path if _NAME.fullmatch(path) else None


MAX_STEM = 40
"""Number of characters of a job's name in its user's own socket name (trainer/loop/endpoint.py)."""
CONNECT_S = 1.0
HEADERS_S = 2.0
BODY_S = 2.0
_GONE = frozenset({errno.ECONNREFUSED, errno.ENOENT, errno.ENOTSOCK, errno.ENOTDIR})


class PeerError(Exception):
    """A call that brought no answer. The text says what and where."""


class GoneError(PeerError):
    """The trainer does not listen: no such socket, or the connection is refused."""


class HungError(PeerError):
    """The listener does not answer in time."""


class BrokenError(PeerError):
    """The answer is not HTTP, or the connection was cut."""


class WrongUserError(PeerError):
    """The socket is served by a user that the settings do not allow, or the token cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """An answer. fault: why the body is not whole ("" if it is); the status counts all the same."""

    status: int
    location: str | None
    retry_after: str | None
    body: bytes
    fault: str = ""


def busy_for_s(answer: HttpAnswer | PeerError) -> float | None:
    """Return how long a trainer is busy (429, 503), 1 s if it does not say; None: it is not."""
    if not isinstance(answer, HttpAnswer) or answer.status not in (429, 503):
        return None
    return classify(429, location=None, retry_after=answer.retry_after).retry_after_s


class TrainerPeer:
    """One trainer. native: it has spoken `powerguard.trainer/v1`; None until we know.

    found: by this very socket, so that another name is another trainer.
    """

    def __init__(self, options: TrainerOptions, *, uids: frozenset[int] | None, found: bool = False) -> None:
        self.options = options
        self.native: bool | None = None
        self.calls = 0
        self._closing = False
        self._uids = uids
        self._found = found
        self._session: aiohttp.ClientSession | None = None
        self._names = KnownNames()
        self._token: bytes | None = None
        self._reading: asyncio.Future[bytes] | None = None
        self._base = "http://trainer" if options.socket_path is not None else options.url

    async def call(
        self, method: str, path: str, *, body: bytes | None = None, headers_s: float = HEADERS_S
    ) -> HttpAnswer | PeerError:
        """Send one request. Faults of the peer come back as values, so that callers may wait for several at once."""
        self.calls += 1
        try:
            async with asyncio.timeout(CONNECT_S + headers_s) as patience:
                headers = await self._headers()
                async with self._open().request(
                    method, f"{self._base}{path}", data=body, headers=headers, allow_redirects=False
                ) as response:
                    patience.reschedule(None)
                    content, fault = await _read(response)
                    return HttpAnswer(
                        status=response.status,
                        location=response.headers.get("Location"),
                        retry_after=response.headers.get("Retry-After"),
                        body=content,
                        fault=fault,
                    )
        except PeerError as error:
            return error
        except TimeoutError:
            what = f"no answer to {method} {path}"
            if self._reading is not None:
                what = "`token` cannot be read, its disk hangs: no answer"
            return HungError(f"{self.options.url}: {what} within {CONNECT_S + headers_s:.1f} s")
        except SecretError as error:
            return WrongUserError(f"{self.options.url}: `token` cannot be read: {error}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return self._translated(error, method, path)
        finally:
            self.calls -= 1
            if self._closing:
                await self.close()

    def places(self) -> Iterator[str]:
        """Yield where it may listen, of its sockets."""
        path = self.options.socket_path
        return iter(()) if path is None else places_of(path, None if self._found else self._uids)

    @property
    def refused(self) -> str:
        """Why the socket of the settings is not believed, even if the trainer answers under its user's own name."""
        connector = None if self._session is None else self._session.connector
        return connector.refused if isinstance(connector, _CheckedUnixConnector) else ""

    async def close(self) -> None:
        """Close the session, once no call is under way: a trainer whose first request is cut is asked to save again."""
        self._closing = True
        if self.calls:
            return
        await self._names.close()
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def forget_token(self) -> None:
        """Read the token again next time: it was refused, and may have been changed since."""
        self._token = None

    async def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.options.token is not None:
            if self._token is None:
                self._token = await self._read_token(self.options.token)
            headers["Authorization"] = f"Bearer {self._token.decode('ascii', 'replace')}"
        return headers

    async def _read_token(self, secret: Secret) -> bytes:
        """Read it in a thread, because its disk may hang; in one thread, however many calls wait for it."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().run_in_executor(None, _checked_token, secret)
            self._reading.add_done_callback(self._read)
        return await asyncio.shield(self._reading)

    def _read(self, reading: "asyncio.Future[bytes]") -> None:
        self._reading = None
        if not reading.cancelled():
            reading.exception()  # a call may have ended before

    def _open(self) -> aiohttp.ClientSession:
        """Return the session; made late, because it belongs to the running loop."""
        if self._session is None:
            path = self.options.socket_path
            connector: aiohttp.BaseConnector = (
                aiohttp.TCPConnector(force_close=True, limit=8, use_dns_cache=False, resolver=self._names)
                if path is None
                else _CheckedUnixConnector(path, self._uids, self.places)
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
            )
        return self._session

    def _translated(self, error: Exception, method: str, path: str) -> PeerError:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        number = cause.errno if isinstance(cause, OSError) else None
        if number in _GONE:
            return GoneError(f"{self.options.url}: no trainer listens there ({errno.errorcode[number or 0]})")
        if number in (errno.EACCES, errno.EPERM):
            return WrongUserError(
                f"{self.options.url}: not permitted to connect (let group powerguard write to the socket)"
            )
        # Only the kind of the error is reported: its text may hold the peer's data, and headers that we sent.
        kind = f"{type(error).__name__}" + (f" {errno.errorcode.get(number, number)}" if number else "")
        return BrokenError(f"{self.options.url}: {method} {path} got an incomplete answer ({clean_text(kind, 80)})")


def _checked_token(secret: Secret) -> bytes:
    """Read a token. Raises SecretError, also for one that HTTP cannot carry in a header."""
    token = secret.read()
    if not re.fullmatch(rb"[ -~]+", token):
        msg = f"{secret.file or secret.credential}: a token must be one line of ASCII characters"
        raise SecretError(msg)
    return token


def places_of(path: str, uids: Collection[int] | None) -> Iterator[str]:
    """Yield where a trainer may listen: at its socket, and under its user's own names if another user has that one.

    `JOB.UID.sock` and `JOB.UID.8 hex digits.sock` count only if that user has made them; the newest comes first.
    """
    yield path
    folder, name = os.path.split(path)
    stem = re.escape(name.removesuffix(".sock")[:MAX_STEM])
    found: list[tuple[int, str]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder) if uids else ():
            match = re.fullmatch(rf"{stem}\.(\d{{1,10}})(?:\.[0-9a-f]{{8}})?\.sock", entry.name)
            if match and int(match[1]) in (uids or ()):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == int(match[1]):
                    found.append((-status.st_ctime_ns, entry.path))
    yield from (each for _, each in sorted(found))


class _CheckedUnixConnector(aiohttp.UnixConnector):
    """Checks the listener before any data is sent. aiohttp has no public hook between connecting and sending."""

    def __init__(self, path: str, uids: frozenset[int] | None, places: Callable[[], Iterator[str]]) -> None:
        super().__init__(path, force_close=True, limit=8)
        self.refused = ""
        self._place = path
        self._uids = uids
        self._places = places

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's signature
    ) -> ResponseHandler:
        self.refused = ""
        try:
            return await self._connected(self._place, req, traces, timeout)
        except (aiohttp.ClientConnectorError, PeerError) as error:
            self.refused = str(error) if isinstance(error, WrongUserError) else ""
            for place in itertools.islice(self._places(), 1, None):
                with contextlib.suppress(aiohttp.ClientConnectorError, PeerError):
                    return await self._connected(place, req, traces, timeout)
            raise

    async def _connected(
        self,
        path: str,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's signature
    ) -> ResponseHandler:
        self._path = path
        connection = await super()._create_connection(req, traces, timeout)
        uid = _peer_uid(connection.transport)
        if uid is None:
            connection.close()
            msg = f"unix:{path}: does not accept connections (its queue is full: check whether the trainer is stopped)"
            raise HungError(msg)
        if self._uids is not None and uid not in self._uids:
            connection.close()
            allowed = ", ".join(map(str, sorted(self._uids)))
            right = f"allowed: {allowed}; see uids and trainer_uids in the settings"
            msg = f"unix:{path}: served by uid {uid}, which is not allowed ({right})"
            raise WrongUserError(msg)
        return connection


def _peer_uid(transport: asyncio.Transport | None) -> int | None:
    """Return the user id of the process that called listen(); None without a connection.

    unix(7), SO_PEERCRED: pid, uid, gid; uid -1 on a socket that is not connected. asyncio takes such a one for
    connected when the listen queue is full: connect(2) then says EAGAIN, which it mistakes for "in progress".
    """
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None:
        return None
    layout = struct.Struct("3i")
    uid: int = layout.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))[1]
    return uid if uid >= 0 else None


async def _read(response: aiohttp.ClientResponse) -> tuple[bytes, str]:
    """Read the body within its bounds; the second value says why it is not whole."""
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > MAX_BODY_BYTES:
                    response.close()
                    return b"", f"its answer is longer than {MAX_BODY_BYTES} bytes"
    except TimeoutError:
        response.close()
        return b"", f"its answer did not end within {BODY_S:.0f} s"
    except (aiohttp.ClientError, OSError):
        return b"", "its answer was cut short"
    return bytes(content), ""
