"""YAML without its traps: the program gets exactly what the file shows, or an error with line and column.

    document = load(text, "powerguard.yaml")        # or load_file(Path("/etc/powerguard/powerguard.yaml"))
    document.data                                   # dict, list, str, int, float, bool or None
    document.where(("budget", "margin"))            # "powerguard.yaml:12:11", where the value stands
    document.where_key(("budget", "margni"))        # where the key stands
    document.written(("ups", "a", "oid"))           # "1.10": the scalar as it was written

The language is a small part of YAML 1.2, the same whichever library reads the file elsewhere:

- `true` and `false` are booleans; `null` and an empty value are None; decimal integers (`-12`) and decimal
  fractions (`0.5`, `2e3`) are numbers. Everything else is text: `off`, `yes`, `1:30`, `010`, `0x1f`, `1_000`, `1.2.3`,
  `2026-11-21`. PyYAML's own reading of these is False, True, 90, 8, 31, 1000, text and a date.
- A key is text or a number, and stands once in its map. PyYAML keeps the last of two equal keys silently.
- Refused: anchors, aliases and merge keys (not needed here, and nested ones explode), tags, several
  documents, tabs as indentation, control characters and line separators that editors do not show, numbers that no
  computer holds, more than MAX_BYTES, MAX_DEPTH or MAX_NODES.

Every problem is found in one go, as far as the syntax can be followed: `YamlFileError.problems`. No value is quoted
in a message, for it may be a misplaced secret. The events of the parser are read, not its node graph: they cannot
recurse, and an alias is refused before it is expanded.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
TOO_DEEP: Final = f"more than {MAX_DEPTH} levels deep; flatten it"
MAX_NODES: Final = 100_000
_MAX_PROBLEMS: Final = 50

Key = str | int | float
KeyPath = tuple[Key, ...]
"""From the root to a value: map keys and list positions (from 0)."""
Position = tuple[int, int]
"""Line and column, both from 1."""

Loader = type[yaml.SafeLoader] | type[yaml.CSafeLoader]
LOADER: Final[Loader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser where PyYAML was built with it, which is 10 times faster; else the one in Python."""

_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
FRACTION: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
"""Pattern of a number, also for writers of such files (fullmatch)."""
# Control characters, lone surrogates, and the line ends that YAML 1.1 counts and editors do not.
_UNSEEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
_MAX_DIGITS: Final = 15
"""Digits that survive in the float of a reader of the JSON."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong: where (line and column from 1; 0: the whole file), what, and the fix."""

    name: str
    line: int
    column: int
    what: str

    def __str__(self) -> str:
        place = f":{self.line}:{self.column}" if self.line else ""
        return f"{self.name}{place}: {self.what}"


class YamlFileError(Exception):
    """A file that cannot be used; its text has one line for each problem."""

    def __init__(self, problems: list[Problem]) -> None:
        """Keep the problems in the order of the file."""
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data, and where each piece of it stands. `name` is the file's, as errors shall show it."""

    name: str
    data: Any
    values: dict[KeyPath, Position] = field(default_factory=dict, repr=False)
    keys: dict[KeyPath, Position] = field(default_factory=dict, repr=False)
    texts: dict[KeyPath, str] = field(default_factory=dict, repr=False)

    def position(self, path: KeyPath) -> Position:
        """Return where the value of `path` stands; for one that is not there, where the map around it begins."""
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, (1, 1))

    def key_position(self, path: KeyPath) -> Position:
        """Return where the key of `path` stands; for a list item or what is not there, as `position`."""
        return self.keys.get(path) or self.position(path)

    def where(self, path: KeyPath) -> str:
        """Return "file:line:column" of a value."""
        line, column = self.position(path)
        return f"{self.name}:{line}:{column}"

    def where_key(self, path: KeyPath) -> str:
        """Return "file:line:column" of a key."""
        line, column = self.key_position(path)
        return f"{self.name}:{line}:{column}"

    def written(self, path: KeyPath) -> str | None:
        """Return a scalar as the file has it, without quotes; None where there is no scalar."""
        return self.texts.get(path)


def load(text: str, name: str, *, loader: Loader = LOADER) -> Document:
    """Read one document. Raises YamlFileError with every problem found. A file with comments only gives None.

    loader: which of PyYAML's parsers reads it.
    """
    if len(text) > MAX_BYTES:
        raise YamlFileError([_too_large(name)])
    unseen = _UNSEEN.search(text)
    if unseen is not None:
        line, column = _position_in(text, unseen.start())
        what = f"character U+{ord(unseen[0]):04X} is invisible in an editor; remove it"
        raise YamlFileError([Problem(name, line, column, what)])
    builder = _Builder(name)
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except _TooMuchError:
        pass
    except yaml.MarkedYAMLError as error:
        builder.problems.append(_syntax(name, text, error))
    except yaml.YAMLError as error:
        builder.problems.append(Problem(name, 1, 1, f"is not YAML: {error}"))
    if builder.problems:
        raise YamlFileError(builder.problems)
    return Document(name, builder.root, builder.values, builder.keys, builder.texts)


def load_file(path: Path, name: str | None = None) -> Document:
    """Read a file. Raises YamlFileError as well when it cannot be read, is too large or is not UTF-8.

    name: how messages call it; None: its path.
    """
    name = str(path) if name is None else name
    try:
        if not path.is_file():
            path.stat()
            raise YamlFileError([Problem(name, 0, 0, "is not a file; name a YAML file")])
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise YamlFileError([Problem(name, 0, 0, f"cannot be read: {reason}")]) from error
    if len(raw) > MAX_BYTES:
        raise YamlFileError([_too_large(name)])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _position_in(raw[: error.start].decode("utf-8-sig", "replace"), None)
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise YamlFileError([Problem(name, line, column, what)]) from error
    return load(text, name)


def _too_large(name: str) -> Problem:
    return Problem(name, 0, 0, f"is larger than {MAX_BYTES} bytes; a settings file has a few thousand")


def _position_in(text: str, at: int | None) -> Position:
    before = text if at is None else text[:at]
    lines = before.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return len(lines), len(lines[-1]) + 1


def _position(event: yaml.Event) -> Position:
    mark = event.start_mark
    return (1, 1) if mark is None else (mark.line + 1, mark.column + 1)


def _syntax(name: str, text: str, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    lines = text.splitlines()
    indent = re.match(r"[ ]*\t", lines[line - 1]) if line <= len(lines) else None
    if indent is not None:
        return Problem(name, line, indent.end(), "a tab in the indentation; use spaces")
    if "nesting depth" in (error.problem or ""):  # libyaml's own limit of 1000, since PyYAML 6.0.4
        return Problem(name, line, column, TOO_DEEP)
    parts = [part for part in (error.context, error.problem) if part]
    what = "not YAML: " + ": ".join(parts)
    began = error.context_mark
    if began is not None and began.line + 1 != line:
        what += f", started in line {began.line + 1}"
    if "mapping values are not allowed" in what:
        what += " (quote a text with a colon and a space, or correct the indentation)"
    elif "could not find expected ':'" in what:
        what += " (write a colon and a space after a key)"
    elif "cannot start any token" in what:
        what += " (quote a text that begins with @, ` or %)"
    return Problem(name, line, column, what)


class _TooMuchError(Exception):
    """Stop reading: a bound is crossed, and that is already among the problems."""


_DROPPED: Final = object()
"""Stands for a key that was refused: its value is read over and forgotten."""


@dataclass(slots=True)
class _Open:
    """A map or a list that is being read. key: the map's key that waits for its value."""

    data: dict[Key, Any] | list[Any]
    path: KeyPath
    kept: bool
    is_key: bool = False
    key: object = None
    has_key: bool = False
    seen: set[str] = field(default_factory=set)


class _Builder:
    """Turns parser events into plain data and positions, and gathers what is wrong."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.root: Any = None
        self.problems: list[Problem] = []
        self.values: dict[KeyPath, Position] = {}
        self.keys: dict[KeyPath, Position] = {}
        self.texts: dict[KeyPath, str] = {}
        self._open: list[_Open] = []
        self._documents = 0
        self._nodes = 0

    def take(self, event: yaml.Event) -> None:
        """Take in the next event."""
        match event:
            case yaml.ScalarEvent():
                self._scalar(event)
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._begin(event)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._end()
            case yaml.AliasEvent():
                self._alias(event)
            case yaml.DocumentStartEvent():
                self._document(event)
            case _:
                pass

    def _problem(self, event: yaml.Event, what: str, *, fatal: bool = False) -> None:
        self.problems.append(Problem(self.name, *_position(event), what))
        if fatal or len(self.problems) >= _MAX_PROBLEMS:
            raise _TooMuchError

    def _document(self, event: yaml.Event) -> None:
        self._documents += 1
        if self._documents > 1:
            self._problem(event, "a second document begins here (---); a file holds one", fatal=True)

    def _alias(self, event: yaml.AliasEvent) -> None:
        self._problem(event, f"alias *{_short(str(event.anchor))}: aliases are not supported; write the value out")
        if self._wants_key():
            self._open[-1].key, self._open[-1].has_key = _DROPPED, True
        else:
            self._place(event, None, kept=False)

    def _wants_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].data, dict) and not self._open[-1].has_key

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        self._node(event)
        text = event.value
        value: Any = text
        if _UNSEEN.search(text) is not None:
            self._problem(event, "a control character in the text; remove it")
        if event.implicit[0] and not event.style:
            value = self._plain(event, text)
        if self._wants_key():
            self._key(event, text, value)
        else:
            path = self._path()
            if self._place(event, value):
                self.texts[path] = text

    def _begin(self, event: yaml.MappingStartEvent | yaml.SequenceStartEvent) -> None:
        self._node(event)
        if len(self._open) >= MAX_DEPTH:
            self._problem(event, TOO_DEEP, fatal=True)
        data: dict[Key, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        if self._wants_key():
            if not any(outer.is_key for outer in self._open):
                self._problem(event, "a map or a list as a key; a key is text or a number (quote text in braces)")
            self._open.append(_Open(data, (), kept=False, is_key=True))
            return
        path = self._path()
        kept = self._place(event, data)
        self._open.append(_Open(data, path, kept=kept))

    def _end(self) -> None:
        closed = self._open.pop()
        if closed.is_key:
            parent = self._open[-1]
            parent.key, parent.has_key = _DROPPED, True

    def _node(self, event: yaml.ScalarEvent | yaml.MappingStartEvent | yaml.SequenceStartEvent) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._problem(event, f"more than {MAX_NODES} values; a settings file has a few hundred", fatal=True)
        if event.anchor is not None:
            self._problem(event, f"anchor &{_short(event.anchor)}: anchors are not supported; write the value out")
        if event.tag is not None:
            self._problem(event, f"tag {_short(event.tag)}: tags are not supported; remove it, and quote text")

    def _plain(self, event: yaml.Event, text: str) -> Any:  # noqa: ANN401 - any scalar
        """Return what an unquoted scalar means."""
        if text in {"true", "false"}:
            return text == "true"
        if text in {"", "null"}:
            return None
        if text == "~":
            self._problem(event, "~ is not read as null here; write null, or quote it")
        if _INTEGER.fullmatch(text):
            if len(text.lstrip("-")) <= _MAX_DIGITS:
                return int(text)
            self._problem(event, f"a number of more than {_MAX_DIGITS} digits; quote it when it is text")
        elif FRACTION.fullmatch(text):
            value = float(text)
            if math.isfinite(value):
                return value
            self._problem(event, "a number too large for any computer; quote it when it is text")
        return text

    def _key(self, event: yaml.ScalarEvent, text: str, value: object) -> None:
        parent = self._open[-1]
        parent.key, parent.has_key = _DROPPED, True
        if value is None or isinstance(value, bool):
            self._problem(event, f"{text or 'an empty value'} as a key; quote it when it is meant as text")
            return
        if text == "<<" and not event.style:
            self._problem(event, "merge keys (<<) are not supported; write the values out")
            return
        if text in parent.seen or value in parent.data:
            first = self.keys.get((*parent.path, value if isinstance(value, str | int | float) else text))
            place = f" (first in line {first[0]})" if first else ""
            self._problem(event, f"key {_short(text)!r} occurs twice in this map{place}; keep one")
            return
        parent.seen.add(text)
        if isinstance(value, float) and str(value) != text:
            value = text  # a name such as 1e3, which JSON would make 1000.0; a reader of numbers reads it as well
        parent.key = value
        if parent.kept and isinstance(value, str | int | float):
            self.keys[*parent.path, value] = _position(event)

    def _path(self) -> KeyPath:
        """Return the path of the value that comes now."""
        if not self._open:
            return ()
        parent = self._open[-1]
        if isinstance(parent.data, list):
            return (*parent.path, len(parent.data))
        return (*parent.path, parent.key) if isinstance(parent.key, str | int | float) else ()

    def _place(self, event: yaml.Event, value: Any, *, kept: bool = True) -> bool:  # noqa: ANN401 - any value
        """Put a value where it belongs and return whether it was kept."""
        path = self._path()
        if not self._open:
            self.root = value
        else:
            parent = self._open[-1]
            kept = kept and parent.kept
            if isinstance(parent.data, list):
                parent.data.append(value)
            else:
                key, parent.key, parent.has_key = parent.key, None, False
                if isinstance(key, str | int | float):
                    parent.data[key] = value
                else:
                    kept = False
        if kept:
            self.values[path] = _position(event)
        return kept


def _short(text: str) -> str:
    """Return a name, cut to what fits a line of a terminal."""
    return text if len(text) <= 40 else f"{text[:40]}..."
