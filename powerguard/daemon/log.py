r"""The daemon's log: one event a line, to journald when it listens, else as logfmt or JSON to stderr.

structlog gathers the values and renders the line. What is added here holds for every style:

- Tracebacks carry no locals: they hold passwords.
- Values are bounded and redacted, and text is escaped: a UPS that names itself `x\n... level=error` stays one value of
  one line.
- No sink (a full pipe, a hung disk, a journald that has stopped reading) delays the caller or raises.

logfmt (https://brandur.org/logfmt): `key=value key="two words"`; None and an empty text are both `key=`.
"""

import atexit
import contextlib
import contextvars
import dataclasses
import enum
import json
import logging
import math
import os
import queue
import re
import select
import socket
import threading
import traceback
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

import structlog
from structlog.processors import ExceptionRenderer, JSONRenderer, LogfmtRenderer, TimeStamper
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

SOCKET = "/run/systemd/journal/socket"
FIELD_CHARS = 64
"""Longest field name that journald takes."""
EXCEPTION_CHARS = 8192
"""Longest traceback."""
STRING_CHARS = 512
"""Longest string value, alone or inside another value. How much was cut off is added."""
CONTAINER_CHARS = 4096
"""Longest list or object, as JSON."""
REDACTED = "[redacted]"
_SECRET_KEY = re.compile(
    r"(^|[_\-. ])(pass|passwd|password|passphrase|pwd|secret|token|community|authorization|cookie|credentials?_value"
    r"|(api|auth|priv|private|session)[_\-. ]?(key|pass|password))($|[_\-. ])",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/\s]*@")
_NOT_IN_A_FIELD = re.compile(r"[^A-Z0-9_]")
_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9_.]")
_PRIORITY = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
_ITEMS = 20
_DEPTH = 4


class Style(enum.StrEnum):
    """How a line looks. AUTO is journald where stderr is journald's stream, else logfmt."""

    AUTO = "auto"
    JOURNALD = "journald"
    LOGFMT = "logfmt"
    JSON = "json"


# --- What may be shown --------------------------------------------------------------------------------------------


def printable(text: str, keep: str = "") -> str:
    """Return text with everything escaped that a terminal or a log reader could act on, but for characters in keep.

    Escaped are controls, line and paragraph separators, surrogates, and the format characters that turn text around.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def safe_key(key: str) -> str:
    """Return key without characters that could end it early."""
    return _NOT_IN_A_KEY.sub("_", key)[:64] or "_"


def describe(error: BaseException, limit: int = 300) -> str:
    """Return an error in one line: its type, its text, and for a group those of its members."""
    if isinstance(error, BaseExceptionGroup):
        members = "; ".join(describe(member, limit // 2) for member in error.exceptions[:3])
        more = "; ..." if len(error.exceptions) > 3 else ""
        return printable(_bounded(f"{type(error).__name__} of {len(error.exceptions)}: {members}{more}", limit))
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception's own __str__ may raise anything, and this is where errors end up
        text = "(cannot be printed)"
    name = type(error).__name__
    return printable(_bounded(_USERINFO.sub("", f"{name}: {text}" if text else name), limit))


def is_secret(key: str) -> bool:
    """Say whether a value under this key must not be shown: a second net, since secrets are never logged."""
    return _SECRET_KEY.search(key) is not None


def clean(value: object, depth: int = _DEPTH) -> object:
    """Return value as JSON-able data that may be shown: bounded, redacted, and without its `repr`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return clean(value.value, depth)
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return _bounded(_USERINFO.sub("", str(value)))
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"  # Secrets travel as bytes.
    if isinstance(value, BaseException):
        return describe(value)
    if isinstance(value, PurePath):
        return _bounded(str(value))
    return _clean_container(value, depth)


def _bounded(text: str, limit: int = STRING_CHARS) -> str:
    left_out = len(text) - limit
    return f"{text[:limit]}...(+{left_out} chars)" if left_out > 0 else text


def _clean_container(value: object, depth: int) -> object:
    if depth == 0:
        return "..."
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
        return {"kind": type(value).__name__} | _clean_mapping(pairs, depth)
    if isinstance(value, Mapping):
        return _clean_mapping(value, depth)
    if isinstance(value, list | tuple | set | frozenset):
        items = list(value)
        more = [f"... {len(items) - _ITEMS} more"] if len(items) > _ITEMS else []
        return [clean(item, depth - 1) for item in items[:_ITEMS]] + more
    return f"<{type(value).__name__}>"


def _clean_mapping(value: Mapping[Any, object], depth: int) -> dict[str, object]:
    shown: dict[str, object] = {}
    for key, item in list(value.items())[:_ITEMS]:
        name = str(clean(key, 1))
        shown[name] = REDACTED if is_secret(name) else clean(item, depth - 1)
    return shown


class _Raised(NamedTuple):
    """An exception: in one line, and as a traceback of code lines without the values of variables."""

    summary: str
    trace: str


def _raised(exc_info: ExcInfo) -> _Raised:
    error = exc_info[1]
    shown = traceback.TracebackException(type(error), error, error.__traceback__, capture_locals=False, compact=True)
    return _Raised(describe(error), _USERINFO.sub("", "".join(shown.format()))[-EXCEPTION_CHARS:])


def _shown(_logger: WrappedLogger, method: str, values: EventDict) -> EventDict:
    """Return what may be shown of an event, in the order of a line."""
    shown: EventDict = {"time": values.pop("time")} if "time" in values else {}
    shown["level"] = "error" if method == "exception" else method
    shown["event"] = clean(values.pop("event", ""))
    if outage := values.pop("outage", None) or (_SCOPE.get() or {}).get("outage"):
        shown["outage"] = clean(outage)
    error = values.pop("exception") if isinstance(values.get("exception"), _Raised) else None
    for key, value in values.items():
        shown.setdefault(safe_key(key), REDACTED if is_secret(key) else _small(clean(value)))
    if error is not None:
        shown.setdefault("error", error.summary)
        shown["exception"] = error.trace
    return shown


def _small(value: object) -> object:
    """Return value, or as much of its JSON as may be shown."""
    if not isinstance(value, dict | list):
        return value
    text = _flat(value)
    return value if len(text) <= CONTAINER_CHARS else _bounded(text, CONTAINER_CHARS)


def _flat(value: dict[str, object] | list[object]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# --- Which outage --------------------------------------------------------------------------------------------------

_SCOPE: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("powerguard_log_scope", default=None)


def open_scope() -> None:
    """Begin a scope of its own for the tasks that are started from here on, as each daemon does once.

    Context variables alone would not do: a task copies them when it is made, and the sources are made long before the
    outage. So the variable holds one dictionary that all tasks of a daemon share.
    """
    _SCOPE.set({})


def bind_outage(outage: str | None) -> None:
    """Put the outage's id on every line of this scope from now on; None ends it."""
    scope = _SCOPE.get()
    if scope is None:
        scope = {}
        _SCOPE.set(scope)
    if outage is None:
        scope.pop("outage", None)
    else:
        scope["outage"] = outage


# --- How it looks --------------------------------------------------------------------------------------------------


def _on_one_line(_logger: WrappedLogger, _method: str, values: EventDict) -> EventDict:
    flat = {key: _flat(value) if isinstance(value, dict | list) else value for key, value in values.items()}
    return {key: printable(value) if isinstance(value, str) else value for key, value in flat.items()}


_logfmt = LogfmtRenderer(bool_as_flag=False)


def _for_journald(logger: WrappedLogger, method: str, values: EventDict) -> bytes:
    """Return the datagram of one entry: the line as its message, and each value in a field of its own."""
    trace = values.pop("exception", None)
    line = _on_one_line(logger, method, values)
    level, event = line.pop("level"), line.pop("event")
    fields = {
        "MESSAGE": f"{event} {_logfmt(logger, method, line)}".rstrip(),
        "PRIORITY": str(_PRIORITY.get(level, 6)),
        "SYSLOG_IDENTIFIER": "powerguard",
        "PG_EVENT": event,
    }
    fields |= {f"PG_{key}": "" if value is None else str(value) for key, value in line.items()}
    if trace is not None:
        fields["PG_EXCEPTION"] = printable(trace, keep="\n")
    return encode_entry(fields)


def encode_entry(fields: Mapping[str, str]) -> bytes:
    """Return the datagram of one entry; a value with a newline is sent with its length in front.

    systemd, "Native Journal Protocol".
    """
    parts: list[bytes] = []
    for name, value in fields.items():
        key = field_name(name).encode("ascii")
        data = value.encode("utf-8", "backslashreplace")
        if b"\n" in data:
            parts += (key, b"\n", len(data).to_bytes(8, "little"), data, b"\n")
        else:
            parts += (key, b"=", data, b"\n")
    return b"".join(parts)


def field_name(name: str) -> str:
    """Return name as journald takes it: capitals, digits and underscores, no digit or underscore in front."""
    upper = _NOT_IN_A_FIELD.sub("_", name.upper()).lstrip("_0123456789")
    return upper[:FIELD_CHARS] or "UNNAMED"


def _as_bytes(_logger: WrappedLogger, _method: str, line: object) -> bytes:
    return f"{line}\n".encode("utf-8", "backslashreplace")


_STAMP = TimeStamper(fmt="iso", key="time")
PROCESSORS: Mapping[str, tuple[Processor, ...]] = {
    "journald": (_shown, _for_journald),  # which has a clock of its own
    "logfmt": (_STAMP, _shown, _on_one_line, _logfmt, _as_bytes),
    "json": (_STAMP, _shown, JSONRenderer(), _as_bytes),
}


# --- Sinks ---------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Destination of finished lines. Returns at once, never raises; `lost` counts the lost lines."""

    lost: int

    def write(self, line: bytes) -> None:
        """Take one line (with its newline) or one datagram."""
        ...

    def close(self, limit_s: float = 0.5) -> None:
        """Write the lines that still wait, for at most limit_s."""
        ...


class StreamSink:
    """Writes lines to a file descriptor from its own thread, which may hang in it.

    The descriptor is duplicated: if fd 2 is closed, its number may next belong to the journal's database.
    """

    def __init__(self, fd: int = 2, held: int = 2000) -> None:
        """Start the thread. held: how many lines wait at most; later ones are lost, and counted."""
        self.lost = 0
        self._lines: queue.Queue[bytes | None] = queue.Queue(held)
        try:
            self._fd = os.dup(fd)
        except OSError:
            self._fd = -1
        self._closing = False
        self._thread = threading.Thread(target=self._drain, name="powerguard-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1

    def close(self, limit_s: float = 0.5) -> None:
        self._closing = True
        with contextlib.suppress(queue.Full):  # then there are lines to write, after the last of which it ends
            self._lines.put_nowait(None)
        self._thread.join(limit_s)

    def _drain(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write_all(line)
            except OSError:
                self.lost += 1
            if self._closing and self._lines.empty():
                break
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_all(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:
                # The stream was made non-blocking; this thread has the time to wait for it.
                select.select((), (self._fd,), ())


class JournalSink:
    """Sends datagrams to journald; a full or missing socket loses the line, and counts it."""

    def __init__(self, path: str = SOCKET) -> None:
        """Open the socket now, so that no new resource is needed later."""
        self.lost = 0
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._lock = threading.Lock()

    def write(self, line: bytes) -> None:
        try:
            self._socket.sendto(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._path)
        except OSError:
            with self._lock:
                self.lost += 1

    def close(self, limit_s: float = 0.5) -> None:
        del limit_s  # no line waits
        self._socket.close()


# --- Configuring ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Log:
    """The configured log."""

    style: Style
    sink: Sink

    @property
    def lost(self) -> int:
        """Lines that no sink would take."""
        return self.sink.lost

    def close(self) -> None:
        """Write the lines that still wait, for a moment at most."""
        self.sink.close()


class _LibraryLines(logging.Handler):
    """Passes the libraries' stdlib logging (asyncio, aiohttp, pysnmp) into the same lines."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - the library's own format mistake, with any object's __str__ in it
            message = f"{record.msg!s:.200} (its arguments do not fit)" if isinstance(record.msg, str) else "(not text)"
        level = record.levelname.lower()
        write = getattr(structlog.get_logger(), level if level in _PRIORITY else "info")
        write("library_logged", library=record.name, message=message, exc_info=record.exc_info and record.exc_info[1])


class _Writer:
    """The logger that structlog calls with the rendered bytes; one method for every level."""

    def __init__(self, sink: Sink) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = sink.write


def configure(
    *,
    style: Style | str = Style.AUTO,
    level: str = "info",
    sink: Sink | None = None,
    environ: Mapping[str, str] | None = None,
    fd: int = 2,
) -> Log:
    """Make structlog and stdlib logging write our lines; call it once, before any thread or task is started.

    level: the lowest that is shown: debug, info, warning or error. sink: where lines go; None finds out from style.
    """
    style = Style(style)
    if style is Style.AUTO:
        style = Style.JOURNALD if _on_journald(os.environ if environ is None else environ, fd) else Style.LOGFMT
    if sink is None:
        sink = JournalSink() if style is Style.JOURNALD else StreamSink(fd)
        atexit.register(sink.close)
    number = logging.getLevelNamesMapping()[level.upper()]
    writer = _Writer(sink)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, ExceptionRenderer(_raised), *PROCESSORS[style]],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _LibraryLines)]:
        root.removeHandler(handler)
    root.addHandler(_LibraryLines())
    root.setLevel(max(number, logging.WARNING))
    return Log(style, sink)


def _on_journald(environ: Mapping[str, str], fd: int) -> bool:
    """Say whether $JOURNAL_STREAM names the file of fd: it is inherited, and fd may have been redirected."""
    try:
        stream = os.fstat(fd)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"
