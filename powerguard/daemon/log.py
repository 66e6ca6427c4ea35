"""The daemon's log: one event a line, to journald when it listens, else as logfmt or JSON to stderr.

structlog gathers the values; everything after that is ours, because three things must hold that no ready-made renderer
promises together. No locals in tracebacks (they hold passwords; structlog's own dict renderer shows them). No value of
a hostile peer that breaks out of its line or drives a terminal. No sink, be it a full pipe, a hung disk or a journald
that has stopped reading, that holds up the caller or raises.
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
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import PurePath
from types import TracebackType
from typing import Any, Protocol, cast

import structlog

from powerguard.protocols import journald, logfmt

EXCEPTION_CHARS = 8192
"""Longest traceback."""
STRING_CHARS = 512
"""Longest string value, alone or inside another value."""
CONTAINER_CHARS = 4096
"""Longest list or object, as JSON."""
REDACTED = "[redacted]"
_SECRET_KEY = re.compile(
    r"(^|[_\-. ])(pass|passwd|password|passphrase|pwd|secret|token|community|authorization|cookie|credentials?_value"
    r"|(api|auth|priv|private|session)[_\-. ]?(key|pass|password))($|[_\-. ])",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]*@")
_PRIORITY = {"critical": 2, "error": 3, "exception": 3, "warning": 4, "info": 6, "debug": 7}
_ITEMS = 20
_DEPTH = 4

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class Style(enum.StrEnum):
    """How a line looks. AUTO is journald where stderr is journald's stream, else logfmt."""

    AUTO = "auto"
    JOURNALD = "journald"
    LOGFMT = "logfmt"
    JSON = "json"


# --- What may be shown --------------------------------------------------------------------------------------------


def describe(error: BaseException, limit: int = 300) -> str:
    """Return an error in one line: its type, what it says, and of a group what its members say."""
    if isinstance(error, BaseExceptionGroup):
        members = "; ".join(describe(member, limit // 2) for member in error.exceptions[:3])
        more = "; ..." if len(error.exceptions) > 3 else ""
        return logfmt.printable(f"{type(error).__name__} of {len(error.exceptions)}: {members}{more}", limit)
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception's own __str__ may raise anything, and this is where errors end up
        text = "(cannot be printed)"
    name = type(error).__name__
    return logfmt.printable(_USERINFO.sub("", f"{name}: {text}" if text else name), limit)


def is_secret(key: str) -> bool:
    """Tell whether a value under this key must not be shown: a second net, since secrets are not logged at all."""
    return _SECRET_KEY.search(key) is not None


def clean(value: object, depth: int = _DEPTH) -> object:
    """Return value as JSON-able data that may be shown: bounded, redacted, and without what its `repr` might tell."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return clean(value.value, depth)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
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


def _bounded(text: str) -> str:
    left_out = len(text) - STRING_CHARS
    return f"{text[:STRING_CHARS]}...(+{left_out} chars)" if left_out > 0 else text


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


def format_exception(error: BaseException) -> str:
    """Return the traceback as text: code lines, never the values of variables."""
    told = traceback.TracebackException(type(error), error, error.__traceback__, capture_locals=False, compact=True)
    return _USERINFO.sub("", "".join(told.format()))[-EXCEPTION_CHARS:]


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


# --- Sinks ---------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Where finished lines go. Returns at once, raises nothing; `lost` counts what could not be kept."""

    lost: int

    def write(self, line: bytes) -> None:
        """Take one line (with its newline) or one datagram."""
        ...

    def close(self, limit_s: float = 0.5) -> None:
        """Bring out what is still held, for at most limit_s."""
        ...


class StreamSink:
    """Writes lines to a file descriptor from a thread of its own, which may hang in it for as long as it likes.

    The descriptor is duplicated: when somebody closes fd 2, its number may next belong to the journal's database.
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
                # Somebody made the stream non-blocking; this thread has the time to wait for it.
                select.select((), (self._fd,), ())


class JournalSink:
    """Sends datagrams to journald; a full or missing socket loses the line, and counts it."""

    def __init__(self, path: str = journald.SOCKET) -> None:
        """Open the socket now, so that nothing new is needed later."""
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
        del limit_s  # nothing is held
        self._socket.close()


# --- The pipeline --------------------------------------------------------------------------------------------------


class Log:
    """The configured log: renders what structlog and stdlib logging hand it, and writes it to its sink."""

    def __init__(self, style: Style, sink: Sink, wall: Callable[[], float]) -> None:
        """Keep the style (not AUTO), the sink and the wall clock."""
        self.style = style
        self.sink = sink
        self._wall = wall

    @property
    def lost(self) -> int:
        """Lines that no sink would take."""
        return self.sink.lost

    def close(self) -> None:
        """Bring out what is still held, for a moment at most."""
        self.sink.close()

    def __call__(self, logger: object, method: str, event_dict: MutableMapping[str, object]) -> bytes:
        """Render one event, as structlog's last processor."""
        del logger
        return self.render(method, dict(event_dict))

    def render(self, method: str, values: dict[str, object]) -> bytes:
        """Return the bytes for one event."""
        level = "error" if method == "exception" else method
        error = _error_of(values.pop("exc_info", None))
        values.pop("stack_info", None)
        event = logfmt.printable(str(clean(values.pop("event", ""))))
        scope = _SCOPE.get()
        outage = values.pop("outage", None) or (scope or {}).get("outage")
        shown: dict[str, object] = {"outage": clean(outage)} if outage else {}
        for key, value in values.items():
            shown[logfmt.safe_key(key)] = REDACTED if is_secret(key) else _small(clean(value))
        if error is not None:
            shown.setdefault("error", describe(error))
        trace = "" if error is None else format_exception(error)
        if self.style is Style.JSON:
            return self._json(level, event, shown, trace)
        if self.style is Style.JOURNALD:
            return _journal(level, event, shown, trace)
        return self._logfmt(level, event, shown, trace)

    def _json(self, level: str, event: str, shown: dict[str, object], trace: str) -> bytes:
        when = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": when, "level": level, "event": event} | shown | ({"exception": trace} if trace else {})
        return json.dumps(line).encode("ascii") + b"\n"

    def _logfmt(self, level: str, event: str, shown: dict[str, object], trace: str) -> bytes:
        when = datetime.fromtimestamp(self._wall(), UTC).astimezone().isoformat(timespec="milliseconds")[11:23]
        pairs = logfmt.encode((key, _flat(value)) for key, value in shown.items())
        tail = f' exception="{logfmt.printable(trace, EXCEPTION_CHARS)}"' if trace else ""
        return f"{when} {level:<7} {event} {pairs}{tail}".rstrip().encode("utf-8", "backslashreplace") + b"\n"


def _journal(level: str, event: str, shown: dict[str, object], trace: str) -> bytes:
    pairs = logfmt.encode((key, _flat(value)) for key, value in shown.items())
    fields = {
        "MESSAGE": f"{event} {pairs}".rstrip(),
        "PRIORITY": str(_PRIORITY.get(level, 6)),
        "SYSLOG_IDENTIFIER": "powerguard",
        "PG_EVENT": event,
    }
    for key, value in shown.items():
        text = logfmt.number(value) if isinstance(value, float) else _flat(value)
        fields[f"PG_{key}"] = logfmt.printable(str(text), CONTAINER_CHARS)
    if trace:
        fields["PG_EXCEPTION"] = logfmt.printable(trace, EXCEPTION_CHARS, keep="\n")
    return journald.encode(fields)


def _small(value: object) -> object:
    """Return value, or as much of its JSON as may be shown."""
    if not isinstance(value, dict | list):
        return value
    text = str(_flat(value))
    return (
        value if len(text) <= CONTAINER_CHARS else f"{text[:CONTAINER_CHARS]}...(+{len(text) - CONTAINER_CHARS} chars)"
    )


def _flat(value: object) -> object:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if isinstance(value, dict | list) else value


def _error_of(exc_info: object) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return cast("ExcInfo", exc_info)[1]
    return sys.exc_info()[1] if exc_info else None


class _Bridge(logging.Handler):
    """Brings what libraries log through stdlib logging (asyncio, aiohttp, pysnmp) into the same lines."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - the library's own format mistake, with any object's __str__ in it
            message = f"{record.msg!s:.200} (its arguments do not fit)" if isinstance(record.msg, str) else "(not text)"
        values: dict[str, object] = {"event": "library_logged", "library": record.name, "message": message}
        if record.exc_info:
            values["exc_info"] = record.exc_info
        level = record.levelname.lower()
        self._log.sink.write(self._log.render(level if level in _PRIORITY else "info", values))


class _Writer:
    """What structlog calls with the rendered bytes; one method for every level."""

    def __init__(self, sink: Sink) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = sink.write


def configure(
    *,
    style: Style | str = Style.AUTO,
    level: str = "info",
    sink: Sink | None = None,
    environ: Mapping[str, str] | None = None,
    wall: Callable[[], float] = time.time,  # noqa: TID251 - the time that people read
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
    log = Log(style, sink, wall)
    number = logging.getLevelNamesMapping()[level.upper()]
    writer = _Writer(sink)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, log],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _Bridge)]:
        root.removeHandler(handler)
    root.addHandler(_Bridge(log))
    root.setLevel(max(number, logging.WARNING))
    return log


def _on_journald(environ: Mapping[str, str], fd: int) -> bool:
    try:
        stream = os.fstat(fd)
    except OSError:
        return False
    return journald.is_stream(environ.get("JOURNAL_STREAM"), stream.st_dev, stream.st_ino)
