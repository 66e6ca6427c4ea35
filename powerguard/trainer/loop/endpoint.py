"""The HTTP endpoint of a process: `powerguard.trainer/v1` on a unix socket, and on a loopback port if asked.

It runs in threads of its own and is polite to the training: no busy waiting, at most 16 requests at a time, each with
an end, each of bounded size, and none able to hold another up. Standard library only.
"""

import contextlib
import hmac
import io
import json
import os
import re
import secrets
import socket
import socketserver
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from powerguard.trainer.loop.requests import RequestQueue
from powerguard.wire import (
    CHECKPOINTS_PATH,
    ENDED,
    HEALTH_PATH,
    HOLD_UPLOADS_PATH,
    LEAVE_PATH,
    MAX_BODY_BYTES,
    METRICS_PATH,
    PAUSE_PATH,
    RESUME_PATH,
    STATUS_PATH,
    TRIGGER_PATH,
    CheckpointStatus,
    LeaseRequest,
    LeaveRequest,
    TriggerRequest,
    WireError,
    error_json,
)


def metrics(requests: RequestQueue) -> bytes:
    """Return every figure with its help and type; one that is not known is left out."""
    job = json.dumps(requests.job, ensure_ascii=False)  # Prometheus knows no other escapes than these
    lines: list[str] = []
    described: set[str] = set()
    for name, kind, text, labels, value in _figures(requests):
        full = f"powerguard_trainer_{name}"
        if full not in described:
            described.add(full)
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines.append(f"{full}{{job={job}{labels}}} {value}")
    return ("\n".join(lines) + "\n").encode()


def _figures(requests: RequestQueue) -> Iterator[tuple[str, str, str, str, float]]:
    """Yield (name, type, help, further labels, value)."""
    status = requests.status()
    totals = requests.pace.totals
    yield "paused", "gauge", "Training stands still on request (1) or not (0).", "", int(status.paused)
    for phase, count in requests.results.items():
        text = "Checkpoints that were asked for, by how they ended."
        yield "checkpoints_total", "counter", text, f',result="{phase.value}"', count
    gauges: list[tuple[str, str, float | None]] = [
        ("step", "Last training step that ended.", status.step),
        ("step_seconds", "Median duration of a training step.", status.step_time_p50_s),
        ("step_age_seconds", "Time since the last step ended.", status.last_step_age_s),
        (
            "uploads_held",
            "Copies to slower storage wait until an outage is over (1) or not (0).",
            int(status.uploads_held),
        ),
        ("snapshot_step", "Step of the newest whole state in host memory.", status.snapshot_step),
    ]
    if status.last_committed is not None:
        gauges.append(("durable_step", "Step of the newest durable checkpoint.", status.last_committed.step))
        gauges.append(("durable_age_seconds", "Age of the newest durable checkpoint.", status.last_committed.age_s))
    if status.estimate is not None:
        gauges.append(("checkpoint_bytes", "Size of a checkpoint.", status.estimate.bytes))
        gauges.append(("checkpoint_seconds", "What a checkpoint is expected to take.", status.estimate.seconds))
        gauges.append(("checkpoint_stall_seconds", "How long one holds training up.", status.estimate.stall_s))
        gauges.append(("write_bytes_per_second", "Rate that 9 of 10 writes reached.", status.estimate.write_bw_p10))
    yield from ((name, "gauge", text, "", value) for name, text, value in gauges if value is not None)
    counters: list[tuple[str, str, float]] = [
        ("writes_total", "Checkpoints that became durable, asked for or not.", totals.writes),
        ("written_bytes_total", "Bytes of checkpoints that became durable.", totals.bytes),
        ("write_seconds_total", "Time that was spent writing them.", totals.write_s),
        ("stalls_total", "Times that training stood still to be copied or saved.", totals.stalls),
        ("stall_seconds_total", "Time that training stood still to be copied or saved.", totals.stall_s),
        ("periodic_failed_total", "Periodic checkpoints that failed.", totals.failed),
        ("periodic_late_total", "Periodic checkpoints that had to wait for an older one's write.", totals.late),
        ("corrupt_total", "Checkpoints that did not verify, at restore or in idle time.", totals.corrupt),
    ]
    yield from ((name, "counter", text, "", value) for name, text, value in counters)
    if requests.uploads is not None:
        for name, (kind, text, number) in requests.uploads.figures().items():
            yield f"upload_{name}", kind, text, "", number


SOCKETS = Path("/run/powerguard-trainers")
MAX_WAIT_S = 30.0
MAX_STRANGERS = 8
"""Connections to the TCP port that have not shown the token yet."""
_REQUEST_S = 5.0
_CONNECTIONS = 16
_HELLO_S = 0.5
_BACKLOG = 128  # a full one refuses new connections
_MAX_DISCARD = 1 << 20
_LINGER_S = 1.0
_POLL_S = 0.2  # how soon the server's thread notices that it is to end
_MAX_SOCKET_PATH = 107  # sun_path, less its final zero byte
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_MAX_STEM = 40  # of a job's name, with room for a user id and eight digits in the daemon's 64 characters
_MAX_PORT = 65535
_MAX_TOKEN = 512
_TOKEN = re.compile(rb"[\x21-\x7e]{16,512}")
_PEER = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_WAIT = re.compile(r"\d{1,6}(\.\d{1,6})?")
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class EndpointError(Exception):
    """The endpoint cannot be opened: what, where, what would be right."""


class TakenError(EndpointError):
    """The name of the socket is another user's."""


class Endpoint:
    """Serves one process's requests until it is closed.

    path: the unix socket, mode 0660: users that may write to it may send requests. The group comes from the folder
        (set-group-ID).
    port: also listen on 127.0.0.1 (0: any free port, see `self.port`); that needs a token, which is never shown.
    """

    def __init__(
        self, requests: RequestQueue, path: Path | str, *, port: int | None = None, token: bytes | None = None
    ) -> None:
        path = Path(path)
        if port is not None and not token:
            msg = f"port {port}: every local user can reach a TCP port, so it needs a token (the unix socket does not)"
            raise EndpointError(msg)
        if port is not None and (type(port) is not int or not 0 <= port <= _MAX_PORT):
            msg = f"port {port!r}: must be 0 (any that is free) to {_MAX_PORT}"
            raise EndpointError(msg)
        self._path = path.absolute()  # to be removed, wherever training has gone by then
        self._servers: list[_UnixServer | _TcpServer] = []
        self.port: int | None = None
        try:
            unix = _open_unix(path)
            self._identity = path.stat().st_ino
            self._servers.append(unix)
            if port is not None:
                tcp = _TcpServer(("127.0.0.1", port), _Handler)
                self.port = int(tcp.server_address[1])
                self._servers.append(tcp)
        except OSError as error:
            self.close()
            reason = error.strerror or error
            msg = f"{path}: the endpoint cannot listen: {reason if path.parent.is_dir() else no_folder(path.parent)}"
            raise EndpointError(msg) from error
        for server in self._servers:
            server.requests = requests
            server.token = token if server is not unix else None
            threading.Thread(
                target=server.serve_forever, args=[_POLL_S], name="powerguard-endpoint", daemon=True
            ).start()
            server.serving = True

    def close(self) -> None:
        """Stop listening and remove the socket, if it is still ours."""
        for server in self._servers:
            if server.serving:
                server.shutdown()
        if self._servers:
            with contextlib.suppress(OSError):  # while it is open its inode cannot be reused
                if self._path.stat().st_ino == self._identity:
                    self._path.unlink()
        for server in self._servers:
            server.server_close()
        self._servers.clear()

    def forsake(self) -> None:
        """In a child of fork: close the sockets and leave the name, which is the parent's."""
        for server in self._servers:
            server.socket.close()
        self._servers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def socket_for(job: str, folder: Path = SOCKETS) -> Path | None:
    """Return where the daemon looks for a job's endpoint; None where no daemon has made the folder, or not for us."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    name = job if _JOB.fullmatch(job) else "x" + sha256(job.encode("utf-8", "replace")).hexdigest()[:32]
    return folder / f"{name}.sock"


def own_names(path: Path) -> tuple[Path, ...]:
    """Return the names that the daemon accepts if `path` is another user's; the last one cannot be foreseen."""
    own = f"{path.stem[:_MAX_STEM]}.{os.geteuid()}"
    return path.with_name(f"{own}.sock"), path.with_name(f"{own}.{secrets.token_hex(4)}.sock")


def no_folder(folder: Path) -> str:
    """Say that the folder for sockets is missing, and how it comes into being."""
    if folder == SOCKETS:
        return f"no folder {folder} (`systemd-tmpfiles --create powerguard.conf` on the host, as its installation does)"
    return f"no folder {folder} (make it, or name a socket in one that is there)"


def read_token(path: Path) -> bytes:
    """Return the bearer token of a file that only its owner can read. Raises EndpointError, which does not show it."""
    try:
        with path.open("rb") as file:
            mode, token = os.fstat(file.fileno()).st_mode, file.read(_MAX_TOKEN + 1).strip()
    except OSError as error:
        msg = f"{path}: the token cannot be read: {error.strerror}"
        raise EndpointError(msg) from error
    if mode & 0o077:
        msg = f"{path}: mode {stat.S_IMODE(mode):04o}, others can read the token (chmod 600)"
        raise EndpointError(msg)
    if not _TOKEN.fullmatch(token):
        msg = f"{path}: holds no token (16 to {_MAX_TOKEN} printable characters, no spaces)"
        raise EndpointError(msg)
    return token


def _open_unix(path: Path) -> "_UnixServer":
    """Listen under another name, set the mode, and only then take the name: no caller sees a half-open endpoint."""
    unborn = path.with_name(f".{secrets.token_hex(4)}")
    longest = max(len(os.fsencode(path)), len(os.fsencode(unborn)))
    if longest > _MAX_SOCKET_PATH:
        msg = f"{path}: a unix socket's path has at most {_MAX_SOCKET_PATH} bytes, not {longest} (use a shorter folder)"
        raise EndpointError(msg)
    with contextlib.suppress(FileNotFoundError):  # the trainer before us may just be removing it
        found = path.lstat()
        error = EndpointError if found.st_uid == os.geteuid() else TakenError
        if not stat.S_ISSOCK(found.st_mode):
            msg = f"{path}: exists and is not a socket (choose another name)"
            raise error(msg)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(str(path)) == 0:
                msg = f"{path}: another trainer answers here (give each training its own socket)"
                raise error(msg)
    server = _UnixServer(str(unborn), _Handler)
    try:
        unborn.chmod(0o660)
        unborn.rename(path)
    except OSError as error:
        server.server_close()
        unborn.unlink(missing_ok=True)
        if isinstance(error, PermissionError) and os.path.lexists(path):  # in a sticky folder: not ours to replace
            msg = f"{path}: belongs to another user (have it removed, or choose another name)"
            raise TakenError(msg) from error
        raise
    return server


class _Bounded(socketserver.ThreadingMixIn, socketserver.BaseServer):
    """At most so many requests at a time; one more gets 503.

    is_alone: a request is being served in the server's own thread, because no other can be had. It waits for no news.
    """

    is_alone = False
    daemon_threads = True
    block_on_close = False
    requests: RequestQueue
    token: bytes | None = None
    serving = False

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - passes on whatever its sibling takes
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        self._turned_away: deque[tuple[float, socket.socket]] = deque()
        super().__init__(*args)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_POLL_S)  # without a free descriptor the socket stays readable: not again at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's signature
        if self._slots.acquire(blocking=False):
            self.begin(request, client_address)
            return
        # Answered without being read, and closed a little later: one that is still sending must find the answer.
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(_BUSY, socket.MSG_NOSIGNAL)
        self._turned_away.append((time.perf_counter(), request))
        self._let_go(keep=_CONNECTIONS)

    def begin(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as above
        """Serve a request in a thread of its own, if there can be one."""
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # this user's threads are at their limit, or the main thread of Python 3.12.1 has ended
            self.is_alone = True
            try:
                self.process_request_thread(request, client_address)
            finally:
                self.is_alone = False

    def service_actions(self) -> None:
        """Between two requests, and every now and then without any."""
        self._let_go(keep=_CONNECTIONS)

    def server_close(self) -> None:
        super().server_close()
        self._let_go(keep=0)

    def _let_go(self, keep: int) -> None:
        while self._turned_away and (
            len(self._turned_away) > keep or time.perf_counter() - self._turned_away[0][0] > _LINGER_S
        ):
            self._turned_away.popleft()[1].close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as above
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as above
        """Say nothing: a peer that hangs up or trickles is its own problem."""


class _UnixServer(_Bounded, socketserver.UnixStreamServer):
    request_queue_size = _BACKLOG


class _TcpServer(_Bounded, socketserver.TCPServer):
    """A port that every local user can connect to, so a request takes a slot only when it has shown the token.

    Of the connections that have not, the oldest is closed for the newest.
    """

    request_queue_size = _BACKLOG
    allow_reuse_address = True

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - as above
        self._strangers: dict[socket.socket, None] = {}
        self._admitted: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as above
        with self._lock:
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RD)  # its thread wakes up, and closes it, unless the token has come
            self._strangers[request] = None
        self.begin(request, client_address)

    def admit(self, request: socket.socket) -> bool:
        """Give a slot to a request that has shown the token; False: all are taken."""
        with self._lock:
            self._strangers.pop(request, None)
            if self._slots.acquire(blocking=False):
                self._admitted.add(request)
            return request in self._admitted

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as above
        try:
            socketserver.ThreadingMixIn.process_request_thread(self, request, client_address)
        finally:
            with self._lock:
                self._strangers.pop(request, None)
                if request in self._admitted:
                    self._admitted.remove(request)
                    self._slots.release()


class _Deadlined(io.RawIOBase):
    """Reads a socket until a moment, however slowly the bytes trickle in.

    What has come before the first read counts, even if a busy training let this thread run too late to wait for it.
    """

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        self._connection = connection
        self._is_first = True
        self.extend(limit_s)

    def extend(self, limit_s: float) -> None:
        """Read for so many seconds from now on."""
        self._until_s = time.perf_counter() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        left_s = self._until_s - time.perf_counter()
        if left_s <= 0 and not self._is_first:
            raise TimeoutError
        self._is_first = False
        self._connection.settimeout(max(0.0, left_s))
        return self._connection.recv_into(buffer)


class _Answer(io.BufferedIOBase):
    """Writes to a socket, whose peer may have hung up: SIGPIPE would end a training that has given it its default."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:  # noqa: ANN401 - any bytes
        self._connection.sendall(content, socket.MSG_NOSIGNAL)
        return len(content)


class _Handler(BaseHTTPRequestHandler):
    """One request, one answer, connection closed."""

    server: _UnixServer | _TcpServer
    protocol_version = "HTTP/1.1"
    server_version = "powerguard-trainer"
    sys_version = ""
    timeout = _REQUEST_S

    def setup(self) -> None:
        super().setup()
        self._deadlined = _Deadlined(self.connection, _REQUEST_S if self.server.token is None else _HELLO_S)
        self.rfile = io.BufferedReader(self._deadlined)
        self.wfile = _Answer(self.connection)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's signature
        """Log nothing: the training's output is its own."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Refuse what http.server refuses by itself (an unknown method, a line too long) as all else is refused."""
        self._refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == HEALTH_PATH:
            self._send(HTTPStatus.OK, b'{"status": "ok"}')
        elif not self._allowed():
            pass
        elif parts.path == METRICS_PATH:
            self._send(HTTPStatus.OK, metrics(self.server.requests), kind="text/plain; version=0.0.4; charset=utf-8")
        elif parts.path == STATUS_PATH:
            self._heard()
            self._send_status(self._wait_s(parse_qs(parts.query)))
        elif (name := _checkpoint_name(parts.path)) is not None:
            self._heard()
            query = parse_qs(parts.query)
            status = self.server.requests.checkpoint(name, wait_s=self._wait_s(query), seen=query.get("seen", [""])[0])
            self._send_checkpoint(name, status)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"no such route: {parts.path}")

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        path = parts.path
        body = self._body() if self._allowed() else None
        if body is None:
            return
        asker, requests = self._heard(), self.server.requests
        if path in (TRIGGER_PATH, CHECKPOINTS_PATH):
            # Any POST is a wish for a checkpoint: `curl -X POST` without a body is one by an operator.
            request = TriggerRequest.parse(body) if body.strip() else TriggerRequest(id=f"op-{secrets.token_hex(8)}")
            if isinstance(request, WireError):
                self._refuse(HTTPStatus.BAD_REQUEST, request.reason)
                return
            status = requests.trigger(request, asker=asker)
            code = HTTPStatus.OK if status.phase in ENDED else HTTPStatus.ACCEPTED
            self._send(code, status.to_json(), location=f"{CHECKPOINTS_PATH}/{request.id}")
        elif path in (PAUSE_PATH, HOLD_UPLOADS_PATH):
            wish = LeaseRequest.parse(body)
            if isinstance(wish, WireError):
                self._refuse(HTTPStatus.BAD_REQUEST, wish.reason)
                return
            do = requests.pause if path == PAUSE_PATH else requests.hold_uploads
            self._send(HTTPStatus.OK, do(lease_s=wish.lease_s, asker=asker).to_json())
        elif path == LEAVE_PATH:
            leave = LeaveRequest.parse(body)
            if isinstance(leave, WireError):
                self._refuse(HTTPStatus.BAD_REQUEST, leave.reason)
                return
            self._send(HTTPStatus.OK, requests.leave(leave.because).to_json())
        elif path == RESUME_PATH:
            self._send(HTTPStatus.OK, requests.resume(all_hosts="all_hosts" in parse_qs(parts.query)).to_json())
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"no such route: {path}")

    def do_DELETE(self) -> None:
        name = _checkpoint_name(urlsplit(self.path).path)
        if not self._allowed():
            return
        if name is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"no such route: {self.path}")
        else:
            self._send_checkpoint(name, self.server.requests.cancel(name))

    def _heard(self) -> str:
        """Return the caller, and renew its leases: a process at the unix socket, or a holder of the token."""
        asker = "token"
        if self.connection.family == socket.AF_UNIX:
            peer = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            pid, uid, _ = _PEER.unpack(peer)
            asker = f"process {pid} of user {uid}"
        self.server.requests.heard(asker)
        return asker

    def _allowed(self) -> bool:
        """Compare the bearer token in constant time, where one is needed, and take a slot then."""
        server = self.server
        if not isinstance(server, _TcpServer):
            return True
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if server.token is not None and hmac.compare_digest(given, b"Bearer " + server.token):
            if server.admit(self.connection):
                self._deadlined.extend(_REQUEST_S)
                return True
            self.close_connection = True
            self.wfile.write(_BUSY)
            return False
        self._discard(self._length() or 0)
        self._refuse(
            HTTPStatus.UNAUTHORIZED, "needs the header `Authorization: Bearer TOKEN` with this trainer's token"
        )
        return False

    def _body(self) -> bytes | None:
        """Read the body; None when it was refused."""
        length = self._length()
        if length is None:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "needs a Content-Length in digits")
        elif length > MAX_BODY_BYTES:
            self._discard(length)
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body of {length} bytes (at most {MAX_BODY_BYTES})")
        elif len(body := self.rfile.read(length)) < length:  # without its lease, a pause would have no end
            self._refuse(HTTPStatus.BAD_REQUEST, f"a body of {length} bytes was announced, and {len(body)} came")
        else:
            return body
        return None

    def _length(self) -> int | None:
        """Return the length of the body; None when it is not given in digits."""
        length = self.headers.get("Content-Length", "0")
        chunked = self.headers.get("Transfer-Encoding") is not None
        return None if chunked or not re.fullmatch(r"\d{1,18}", length) else int(length)

    def _discard(self, length: int) -> None:
        """Read past a body that is refused: closed with bytes unread, the connection would lose our answer."""
        left = min(length, _MAX_DISCARD)
        while left > 0 and (piece := self.rfile.read(min(left, MAX_BODY_BYTES))):
            left -= len(piece)

    def _wait_s(self, query: dict[str, list[str]]) -> float:
        wait = query.get("wait", ["0"])[0]
        return min(float(wait), MAX_WAIT_S) if _WAIT.fullmatch(wait) and not self.server.is_alone else 0.0

    def _send_status(self, wait_s: float) -> None:
        """Answer at once, or within wait_s as soon as a host has left the job."""
        requests = self.server.requests
        if wait_s:
            requests.departure(wait_s)
        status = requests.status()
        self._send(HTTPStatus.OK, status.to_json())
        if status.ended_by:
            requests.mark_departure_sent()

    def _send_checkpoint(self, name: str, status: CheckpointStatus | None) -> None:
        if status is None:
            self._refuse(HTTPStatus.NOT_FOUND, "no such checkpoint (a trainer that was restarted knows no old ones)")
            return
        self._send(HTTPStatus.OK, status.to_json())
        if status.phase in ENDED:
            self.server.requests.mark_end_sent(name)

    def _refuse(self, code: HTTPStatus, reason: str) -> None:
        self._send(code, error_json(reason))

    def _send(
        self, code: HTTPStatus, body: bytes, *, location: str | None = None, kind: str = "application/json"
    ) -> None:
        self.close_connection = True
        self.connection.settimeout(_REQUEST_S)
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if location is not None:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(body)


def _checkpoint_name(path: str) -> str | None:
    prefix, _, name = path.rpartition("/")
    return unquote(name) if prefix == CHECKPOINTS_PATH and name else None
