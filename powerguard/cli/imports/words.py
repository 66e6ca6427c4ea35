"""Reads the configuration files of NUT and apcupsd exactly as those programs do.

NUT (common/parseconf.c): words are divided by white space; `"..."` is one word, even over the end of a line; a
backslash takes the next character as it is, and a line goes on where that is a newline; `=` is a word of its own; `#`
outside quotes begins a comment, even within a word; characters beyond ASCII are dropped; 32 words of 512 characters a
line. apcupsd (apcconfig.c): a key, white space, and the rest of the line; `#` begins a comment where text is wanted;
lines are cut at 255 characters, and the rest is another line. Neither knows includes; NUT has sections in
ups.conf and upsd.users only.

No content is ever part of a message: any word may be a password in the wrong place.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 1 << 20
MAX_WORDS: Final = 32
MAX_LETTERS: Final = 512
"""PCONF_DEFAULT_ARG_LIMIT and PCONF_DEFAULT_WORDLEN_LIMIT."""
APCUPSD_LINE: Final = 255
"""MAXSTRING less its zero."""
_SPACE: Final = " \t\v\f\r"


class ReadError(Exception):
    """A file that cannot be read: which, why, and the fix."""


@dataclass(frozen=True, slots=True)
class Line:
    """Words of one line. number: of the line in which the first of them begins, from 1."""

    file: str
    number: int
    words: tuple[str, ...]

    @property
    def where(self) -> str:
        """Say "file:line"."""
        return f"{self.file}:{self.number}"


@dataclass(frozen=True, slots=True)
class Oddity:
    """Text that the program reads in an unexpected way."""

    where: str
    what: str
    right: str


@dataclass(frozen=True, slots=True)
class Words:
    """A file as its program reads it. mode: permission bits."""

    file: str
    lines: tuple[Line, ...]
    oddities: tuple[Oddity, ...] = ()
    mode: int = 0


@dataclass(slots=True)
class Section:
    """A section of ups.conf or upsd.users. values: each key's values with their lines, in order; a flag has ""."""

    name: str
    where: str
    values: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def last(self, key: str) -> tuple[str, str] | None:
        """Return value and place of the last line with this key; None if there is none."""
        found = self.values.get(key)
        return found[-1] if found else None

    def text(self, key: str, default: str = "") -> str:
        """Return the last value of a key."""
        found = self.last(key)
        return default if found is None else found[0]

    def place(self, key: str) -> str:
        """Return the place of the last line with this key, or of the section."""
        found = self.last(key)
        return self.where if found is None else found[1]


def read(path: Path) -> tuple[str, int]:
    """Return a file's text, one character a byte, and its permission bits. Raises ReadError."""
    try:
        # NONBLOCK: a pipe or a device that was named by mistake does not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                msg = f"{path}: is not a file"
                raise ReadError(msg)
            raw = b""
            while len(raw) <= MAX_BYTES and (chunk := os.read(descriptor, MAX_BYTES + 1 - len(raw))):
                raw += chunk
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = " (it holds passwords: run this as root)" if isinstance(error, PermissionError) else ""
        msg = f"{path}: cannot be read: {reason}{hint}"
        raise ReadError(msg) from error
    if len(raw) > MAX_BYTES:
        msg = f"{path}: is larger than {MAX_BYTES} bytes, so it is not a file of NUT or apcupsd"
        raise ReadError(msg)
    return raw.decode("latin-1"), stat.S_IMODE(status.st_mode)


# --- NUT --------------------------------------------------------------------------------------------------------------


class _Reader:
    """NUT's state machine, one character at a time."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: list[Line] = []
        self.oddities: list[Oddity] = []
        self._words: list[str] = []
        self._word: list[str] = []
        self._state = self._between
        self._number = 1
        self._began = 0
        self._quoted_at = 0
        self._broken = False

    def feed(self, text: str) -> None:
        for letter in text:
            self._state(letter)
            if letter == "\n":
                self._number += 1
        if self._quoted_at:
            self._odd(
                self._quoted_at,
                "a quote that is never closed: NUT reads the rest of the file as one word",
                'close it with "',
            )
        if self._words:  # NUT drops a last line of one word that no newline ends
            if self._word:
                self._end_word()
            self._end_line()

    def _odd(self, number: int, what: str, right: str) -> None:
        if not self.oddities or self.oddities[-1].what != what:
            self.oddities.append(Oddity(f"{self.file}:{number}", what, right))

    def _add(self, letter: str) -> None:
        if not self._began:
            self._began = self._number
        if not " " <= letter <= "\x7f":
            if letter != "\n":
                self._odd(self._number, "a character that NUT drops: it reads ASCII only", "write it in ASCII")
        elif len(self._word) < MAX_LETTERS:
            self._word.append(letter)
        elif len(self._word) == MAX_LETTERS:
            self._odd(self._number, f"a word of more than {MAX_LETTERS} characters: NUT cuts it", "shorten it")

    def _end_word(self) -> None:
        if not self._began:
            self._began = self._number
        if len(self._words) < MAX_WORDS:
            self._words.append("".join(self._word))
        else:
            self._odd(self._number, f"more than {MAX_WORDS} words in a line: NUT drops the rest", "shorten it")
        self._word.clear()

    def _end_line(self) -> None:
        if self._words:
            self.lines.append(Line(self.file, self._began, tuple(self._words)))
        self._words.clear()
        self._began = 0
        self._state = self._between

    def _between(self, letter: str) -> None:
        if letter == "\n":
            self._end_line()
        elif letter == "#":
            self._state = self._comment
        elif letter == "\\":
            self._state = self._literal
        elif letter == '"':
            self._quoted_at, self._broken = self._number, False
            self._state = self._quote
        elif letter == "=":
            self._add(letter)
            self._end_word()
        elif letter not in _SPACE:
            self._add(letter)
            self._state = self._within

    def _comment(self, letter: str) -> None:
        if letter == "\n":
            self._end_line()

    def _within(self, letter: str) -> None:
        if letter == "\n":
            self._end_word()
            self._end_line()
        elif letter == "#":
            self._end_word()
            self._state = self._comment
        elif letter == "=":
            self._end_word()
            self._add(letter)
            self._end_word()
            self._state = self._between
        elif letter == "\\":
            self._state = self._literal
        elif letter in _SPACE:
            self._end_word()
            self._state = self._between
        else:
            self._add(letter)

    def _literal(self, letter: str) -> None:
        self._state = self._within
        if letter != "\n":
            self._add(letter)

    def _quote(self, letter: str) -> None:
        if letter == '"':
            if self._broken:
                self._odd(
                    self._quoted_at,
                    "a quote that is closed in a later line: what is between is one word to NUT",
                    'close it with " where the text ends',
                )
            self._quoted_at = 0
            self._end_word()
            self._state = self._between
        elif letter == "\\":
            self._state = self._quoted_literal
        else:
            if letter == "#":
                what = "a # within quotes: NUT 2.8.0 refuses the line (tried), other versions read it"
                self._odd(self._number, what, "a backslash before it")
            self._broken |= letter == "\n"
            self._add(letter)

    def _quoted_literal(self, letter: str) -> None:
        self._state = self._quote
        if letter != "\n":
            self._add(letter)


def nut_words(text: str, file: str) -> Words:
    """Divide a file of NUT's into lines and words. Total: every text has an answer."""
    reader = _Reader(file)
    reader.feed(text)
    return Words(file, tuple(reader.lines), tuple(reader.oddities))


def nut_sections(
    lines: Iterable[Line], pairs: frozenset[str] = frozenset()
) -> tuple[Section, dict[str, Section], list[Oddity]]:
    """Return the values before any section, the sections by name, and the lines that do not fit.

    pairs: keys that take their value without a =, as `upsmon` of upsd.users does.
    """
    before = Section("", "")
    sections: dict[str, Section] = {}
    oddities: list[Oddity] = []
    current = before
    for line in lines:
        first = line.words[0]
        if first.startswith("[") and first.endswith("]") and len(first) > 1:
            name = first[1:-1]
            if name in sections:
                oddities.append(Oddity(line.where, "this section occurs twice", "keep one"))
            current = sections.setdefault(name, Section(name, line.where))
        elif len(line.words) == 1:
            current.values.setdefault(first, []).append(("", line.where))
        elif first in pairs:
            current.values.setdefault(first, []).append((line.words[1], line.where))
        elif first.startswith("["):
            what = "a section whose name is not closed: NUT ignores it, and its lines belong to the section before"
            oddities.append(Oddity(line.where, what, "a name without spaces, in [ and ]"))
        elif line.words[1] != "=":
            oddities.append(Oddity(line.where, "no = after the key: NUT ignores the line", "write KEY = VALUE"))
        elif len(line.words) == 2:
            oddities.append(Oddity(line.where, "a key, = and no value: NUT ignores it", "write the value"))
        else:
            current.values.setdefault(first, []).append((line.words[2], line.where))
    return before, sections, oddities


# --- nut.conf and apcupsd.conf ----------------------------------------------------------------------------------------


def shell_words(text: str, file: str) -> Words:
    """Return the assignments (name, value) of nut.conf, which a shell and systemd read. Quotes are removed."""
    lines: list[Line] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        name, equals, rest = raw.strip().removeprefix("export ").partition("=")
        name = name.strip()
        if not equals or not name.isidentifier() or not name.isascii():
            continue
        value = rest.strip()
        quote = value[:1]
        value = value[1:].partition(quote)[0] if quote and quote in "'\"" else value.partition(" #")[0].strip()
        lines.append(Line(file, number, (name, value)))
    return Words(file, tuple(lines))


def _cut(text: str) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(text.split("\n"), start=1):
        for at in range(0, max(1, len(raw)), APCUPSD_LINE):
            yield number, raw[at : at + APCUPSD_LINE]


def apcupsd_words(text: str, file: str) -> Words:
    """Return the pairs (KEY, the rest of the line without a comment) of an apcupsd.conf."""
    lines: list[Line] = []
    oddities: list[Oddity] = []
    last = 0
    for number, raw in _cut(text):
        if number == last:
            what = f"a line of more than {APCUPSD_LINE} characters: apcupsd reads the rest as another line"
            oddities.append(Oddity(f"{file}:{number}", what, "shorten it"))
        last = number
        bare = raw.strip(f"{_SPACE}\0")
        if not bare or bare.startswith("#"):
            continue
        key, *rest = re.split(f"[{_SPACE}]+", bare, maxsplit=1)
        value = (rest[0] if rest else "").partition("#")[0].rstrip()
        lines.append(Line(file, number, (key.upper(), value)))
    return Words(file, tuple(lines), tuple(oddities[:20]))
