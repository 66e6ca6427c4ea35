"""upsd's network protocol, version 1.3 (NUT developer guide, chapter "Network protocol information"): bytes to answers.

One line is one answer, but for a list, whose lines are gathered into one. Words are separated by spaces; a word in
double quotes may hold spaces, and a backslash in it takes the next character as it is. What upsd 2.8.0 sends was
looked at on the wire. The caller must match them: the protocol has no request numbers, answers come in order.
"""

from dataclasses import dataclass
from typing import Final

MAX_LINE_BYTES: Final = 4096
"""upsd's own lines are at most 512 bytes (NUT_NET_ANSWER_MAX); a quoted ups.alarm of later versions is longer."""
MAX_ROWS: Final = 4096
"""Lines of one list. The largest known is a daisy chain of rack PDUs, some 1500 variables."""
MAX_LIST_BYTES: Final = 512 * 1024
MAX_ANSWERS: Final = 256
"""Most answers in one piece of the stream: no client asks for more at once, and a flood must not become objects."""
_MAX_CODE: Final = 64
_SPACES: Final = " \t"
_FORBIDDEN: Final = ("\n", "\r", "\0")


class NutError(Exception):
    """An invalid answer of upsd: a line or list too long, broken quotes, a list in a list. The stream is lost."""


@dataclass(frozen=True, slots=True)
class Ok:
    """OK and what follows: `OK Goodbye`, `OK TRACKING <id>`, `OK PRIMARY-GRANTED`."""

    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Err:
    """ERR, a code such as DATA-STALE, and what follows it."""

    code: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """Any other line, as words: `VAR su ups.status "OL"` is ("VAR", "su", "ups.status", "OL")."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A list. words: what it is of ("VAR", "su"); rows: what each line says after these words."""

    words: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Answer = Ok | Err | Line | Table


def encode(*words: str) -> bytes:
    """Return one request. Raises NutError for a word that cannot be sent: a line break, a NUL, a line too long."""
    quoted = []
    for word in words:
        if any(char in word for char in _FORBIDDEN):
            msg = "a line break or NUL cannot be sent to upsd"
            raise NutError(msg)
        escaped = word.replace("\\", "\\\\").replace('"', '\\"')
        plain = escaped == word and word and not any(char in word for char in " \t#=")
        quoted.append(word if plain else f'"{escaped}"')
    line = " ".join(quoted).encode("utf-8", "surrogateescape") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        msg = f"a request of {len(line)} bytes is too long for upsd"
        raise NutError(msg)
    return line


def split(line: str) -> tuple[str, ...]:
    """Return the words of a line. Raises NutError for quotes that do not close."""
    if '"' not in line and "\\" not in line:
        return tuple(filter(None, line.replace("\t", " ").split(" ")))
    words: list[str] = []
    word: list[str] | None = None
    quoted = escaped = False
    for char in line:
        if char in _SPACES and not quoted and not escaped:
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        word = [] if word is None else word
        if escaped:
            word.append(char)
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        else:
            word.append(char)
    if quoted or escaped:
        msg = "upsd sent a line with quotes that do not close"
        raise NutError(msg)
    if word is not None:
        words.append("".join(word))
    return tuple(words)


class Decoder:
    """Takes bytes as they come and hands out whole answers. After a NutError it takes no more."""

    def __init__(self) -> None:
        """Begin at the beginning of a stream."""
        self._rest = b""
        self._list: tuple[str, ...] | None = None
        self._rows: list[tuple[str, ...]] = []
        self._list_bytes = 0
        self._broken = ""

    @property
    def is_between(self) -> bool:
        """Whether the stream stands between two answers: no half line, no half list."""
        return not self._rest and self._list is None and not self._broken

    def feed(self, data: bytes) -> list[Answer]:
        """Return the answers that are whole by now. Raises NutError, at once and from then on."""
        if self._broken:
            raise NutError(self._broken)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        answers: list[Answer] = []
        try:
            for line in lines:
                self._line(line, answers)
            if len(self._rest) > MAX_LINE_BYTES:
                _too_long()
        except NutError as error:
            self._broken, self._rest, self._rows = str(error), b"", []
            raise
        return answers

    def _line(self, raw: bytes, answers: list[Answer]) -> None:
        self._check_size(raw, answers)
        words = split(raw.decode("utf-8", "replace").rstrip("\r"))
        match words:
            case ("BEGIN", "LIST", *what):
                if self._list is not None:
                    msg = "upsd began a list inside a list"
                    raise NutError(msg)
                self._list, self._rows, self._list_bytes = tuple(what), [], 0
            case ("END", "LIST", *what):
                if self._list is None or tuple(what) != self._list:
                    msg = "upsd ended a list that it had not begun"
                    raise NutError(msg)
                answers.append(Table(self._list, tuple(self._rows)))
                self._list, self._rows = None, []
            case _ if self._list is not None:
                if words[: len(self._list)] != self._list:
                    msg = "upsd sent a line that does not belong to its list"
                    raise NutError(msg)
                self._rows.append(words[len(self._list) :])
            case ("OK", *rest):
                answers.append(Ok(tuple(rest)))
            case ("ERR", code, *rest):
                answers.append(Err(code[:_MAX_CODE], tuple(rest)))
            case _:
                answers.append(Line(words))

    def _check_size(self, raw: bytes, answers: list[Answer]) -> None:
        if len(raw) > MAX_LINE_BYTES:
            _too_long()
        if len(answers) >= MAX_ANSWERS:
            msg = "upsd sent more answers than any client asks for"
            raise NutError(msg)
        if self._list is not None:
            self._list_bytes += len(raw)
            if self._list_bytes > MAX_LIST_BYTES or len(self._rows) > MAX_ROWS:
                msg = f"upsd sent a list of more than {MAX_ROWS} lines or {MAX_LIST_BYTES} bytes"
                raise NutError(msg)


def _too_long() -> None:
    msg = f"upsd sent a line of more than {MAX_LINE_BYTES} bytes"
    raise NutError(msg)
