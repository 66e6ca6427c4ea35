"""The client of the daemon: one HTTP/1.0 request over the admin socket or the read-only port. Stdlib, and little of it.

http.client would import the whole e-mail package, which takes longer than the rest of `powerguard event`.

`settle` finds socket, port and journal of the daemon that `--config FILE` names. A command that asked at the default
socket instead would report that daemon as down.
"""

import argparse
import errno
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from powerguard.cli.shared import CONFIG, SOCKET, MissingKeyError

URL: Final = "http://127.0.0.1:13493"
LIMIT_S: Final = 3.0
UNIT_FOLDERS: Final = ("etc", "run", "usr/local/lib", "usr/lib", "lib")
"""Where systemd/system lies with unit files, below the root."""
MAX_TEXT: Final = 200
"""Longest text of a request; the daemon keeps no more of it, and refuses a request of more than 4096 bytes."""
MAX_ANSWER_BYTES: Final = 4 << 20


class DownError(Exception):
    """The daemon cannot be reached: why, and the fix."""


class RefusedError(Exception):
    """The daemon refused: its own reason."""


class Answer(dict[str, Any]):
    """An object of the daemon's, and each in it. Keys are only ever added: one that lacks one is an older daemon's."""

    def __missing__(self, key: str) -> NoReturn:
        raise MissingKeyError(key)


def add_options(parser: argparse.ArgumentParser, *, reads: bool = False) -> None:
    """Add the options of the daemon's address."""
    parser.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help=f"admin socket ({SOCKET})")
    if reads:
        parser.add_argument("--url", metavar="URL", help=f"read-only port, such as that of another host ({URL})")


def get(args: argparse.Namespace, path: str) -> dict[str, Any]:
    """Read one object: over the socket, or over the port if the socket is not permitted. Raises DownError."""
    answer = _object(_answer(args, path), path)
    if (answer["schema_version"], answer.get("object")) != (1, path.rpartition("/")[2]):
        msg = f"{path}: the answer is not a powerguard object of this version: check the address"
        raise DownError(msg)
    return answer


def _answer(args: argparse.Namespace, path: str) -> tuple[int, bytes]:
    url = getattr(args, "url", None)
    if url is not None:
        return _ask_tcp(url, path)
    try:
        return _ask_daemon(args, "GET", path)
    except DownError as down:
        port = getattr(args, "daemon_url", None)
        if port is not None:
            # With named settings: a daemon that answers at their port while their socket is gone may be another one.
            is_closed = isinstance(down.__cause__, PermissionError)
        else:
            port, is_closed = URL, args.socket is None and not isinstance(down.__cause__, TimeoutError)
        if not is_closed:
            raise
        try:
            return _ask_tcp(port, path)
        except DownError:
            raise down from None


def post(args: argparse.Namespace, verb: str, body: dict[str, object], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Ask for a change. Raises DownError, RefusedError: also if this user may not ask, whether or not it is down."""
    try:
        return _object(_ask_daemon(args, "POST", f"/api/v1/{verb}", body, limit_s), verb)
    except DownError as error:
        if isinstance(error.__cause__, PermissionError):
            raise RefusedError(str(error)) from error
        raise


def encoded(body: Mapping[str, object]) -> bytes:
    """Return the JSON of a request, with each text cut to the length that the daemon keeps.

    As UTF-8: escaped, a letter that is not ASCII would have up to 12 bytes, and the daemon reads 4096 in all.
    """
    cut = {key: value[:MAX_TEXT] if isinstance(value, str) else value for key, value in body.items()}
    return json.dumps(cut, ensure_ascii=False).encode("utf-8", "replace")


def _ask_daemon(
    args: argparse.Namespace, method: str, target: str, body: dict[str, object] | None = None, limit_s: float = LIMIT_S
) -> tuple[int, bytes]:
    """Ask at the socket that is named, else at the default one, and if no daemon listens there, where the settings say.

    In this order, because to read the settings takes longer, and they seldom name another socket.
    """
    try:
        return _ask_unix(args.socket or SOCKET, method, target, body, limit_s)
    except DownError as down:
        is_absent = isinstance(down.__cause__, FileNotFoundError | ConnectionRefusedError)
        if args.socket is not None or not is_absent or getattr(args, "verb", "") == "event":  # a hook must be fast
            raise
        if settle(args):
            raise
        if args.socket != SOCKET:
            return _ask_unix(str(args.socket), method, target, body, limit_s)
        args.socket = args.daemon_url = None
        raise


def _ask_unix(
    path: str, method: str, target: str, body: dict[str, object] | None = None, limit_s: float = LIMIT_S
) -> tuple[int, bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            return _exchange(sock, path, f"{method} {target}", "localhost", body=body, limit_s=limit_s)
        except OSError as error:
            raise DownError(_why(error, path, _missing() if path == SOCKET else "", limit_s)) from error


def _ask_tcp(url: str, target: str) -> tuple[int, bytes]:
    host, port = _split(url)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            return _exchange(sock, (host, port), f"GET {target}", host)
        except OSError as error:
            raise DownError(_why_elsewhere(error, url, host)) from error


def _split(url: str) -> tuple[str, int]:
    text = url.removeprefix("http://").partition("/")[0]
    host, _, port = text.rpartition(":")
    if not host.isascii():
        try:
            host = host.encode("idna").decode()
        except UnicodeError:  # an empty or a long label, which the socket would refuse with a TypeError
            host = ""
    if "://" in text or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        msg = f"{url}: not a powerguard URL (write http://HOST:PORT, for example {URL})"
        raise DownError(msg)
    return host.strip("[]"), int(port)


def _missing(root: Path = Path("/")) -> str:
    """Return what is missing before a daemon can run, with the fix; "" if all of it is there."""
    try:
        if not any((root / folder / "systemd/system/powerguard.service").exists() for folder in UNIT_FOLDERS):
            return "powerguard is not installed on this host (powerguard install)"
        if not (root / CONFIG[1:]).exists():
            return f"no settings yet: write {CONFIG} (`powerguard discover` and `powerguard import` print some)"
    except OSError:  # closed to this user
        pass
    return ""


def _why_elsewhere(error: OSError, url: str, host: str) -> str:
    """As `_why`, for a port. Of another host it is only known that it does not answer."""
    if host in {"127.0.0.1", "::1", "localhost"}:
        return _why(error, url, _missing() if url == URL else "")
    if isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT):
        return f"{url}: the host does not answer: check that it is up, and the firewalls on the way"
    if error.errno == errno.ECONNREFUSED:
        return f"{url}: connection refused: no daemon listens there (http.listen in its settings defaults to 127.0.0.1)"
    return _why(error, url)


def _why(error: OSError, where: str, missing: str = "", limit_s: float = LIMIT_S) -> str:
    """Return the error with the operator's fix. missing: of `_missing`."""
    if missing and error.errno in (errno.ENOENT, errno.ECONNREFUSED):
        return f"{where}: {missing}"
    if isinstance(error, TimeoutError):
        return f"{where}: no answer within {limit_s:g} s: the daemon hangs (systemctl status powerguard)"
    if error.errno == errno.ENOENT:
        return f"{where}: not there: the daemon is not running (systemctl start powerguard)"
    if error.errno == errno.ECONNREFUSED:
        return f"{where}: connection refused: the daemon is not running (systemctl start powerguard)"
    if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.EAGAIN):
        return f"{where}: connection closed: the daemon is stopping, or has too many clients (try again in 10 s)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{where}: permission denied (be root, or join group powerguard-admin)"
    return f"{where}: {error.strerror or error}"


def _exchange(
    sock: socket.socket,
    where: str | tuple[str, int],
    line: str,
    host: str,
    *,
    body: dict[str, object] | None = None,
    limit_s: float = LIMIT_S,
) -> tuple[int, bytes]:
    """Send one request and read to the end, all of it within limit_s. Raises OSError, TimeoutError among them."""
    end = time.perf_counter() + limit_s
    data = b"" if body is None else encoded(body)
    sock.settimeout(limit_s)
    sock.connect(where)
    head = f"{line} HTTP/1.0\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode("ascii") + data)
    answer = bytearray()
    while True:
        left_s = end - time.perf_counter()
        if left_s <= 0.0:
            raise TimeoutError
        sock.settimeout(left_s)
        chunk = sock.recv(65536)
        if not chunk:
            break
        answer += chunk
        if len(answer) > MAX_ANSWER_BYTES:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    top, _, rest = bytes(answer).partition(b"\r\n\r\n")
    parts = top.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise OSError(errno.EPROTO, "the answer is not from powerguard")
    return int(parts[1]), rest


def _object(answer: tuple[int, bytes], what: str) -> dict[str, Any]:
    code, raw = answer
    try:
        body = json.loads(raw, object_hook=Answer)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or "schema_version" not in body:
        msg = f"{what}: answered {code} without a powerguard object: check the address"
        raise DownError(msg)
    if body.get("object") == "error":
        raise RefusedError(str(body.get("error")))
    return body


_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - a daemon that listens everywhere is asked on this host


def settle(args: argparse.Namespace) -> str:
    """Fill in what the command line left open of socket, port and journal. Return the error in the settings."""
    try:
        from powerguard.settings.load import SettingsError, load
    except ImportError as error:
        return f"the settings cannot be read: {error} (a part of the installation is missing: install powerguard again)"
    try:
        settings = load(Path(args.config))
    except SettingsError as error:
        return "; ".join(error.problems)
    if args.socket is None:
        args.socket = str(settings.control.socket)
        listen = settings.http.listen
        args.daemon_url = f"http://{_ANY.get(listen, f'[{listen}]' if ':' in listen else listen)}:{settings.http.port}"
    if getattr(args, "journal", "") is None:
        args.journal = str(settings.journal.path)
    return ""
