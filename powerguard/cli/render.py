"""Tables, durations, colours and progress bars on a terminal. Stdlib only."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Self, TextIO

_CODES: Final = {
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
    "bold": "1",
    "dim": "2",
}

OUTCOMES: Final = {
    "ridden_through": "ridden through: training never stopped",
    "resumed_in_place": "held and resumed in place: no reboot",
    "clean_shutdown": "powered off in order, and back",
    "dirty": "the host went down before it was powered off in order",
    "rehearsed": "rehearsed only: the host was not powered off",
    "lost": "the journal does not have its end",
    "": "still running",
}
"""How an outage ended, in words."""


def clean(value: object) -> str:
    """Return text that is safe for a terminal: names of trainers and UPSes are foreign text."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


NOT_ARMED: Final = frozenset({"dry_run", "rehearse"})
"""Reasons for not being ready that are a choice of the operator."""


def mode_note(mode: object, so: str = "") -> str:
    """Return the note after a text that does not apply in this mode: "" in mode armed, and if it is unknown."""
    if mode in {None, "armed"}:
        return ""
    return f" ({clean(mode)}: {so})" if so else f" ({clean(mode)})"


def has_colour(stream: TextIO) -> bool:
    """Say whether to colour: on a terminal, and never where NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    """Print on stderr. If that is closed, only the text is lost: not the exit status, nor the next steps."""
    try:
        print("\n".join(fold(text.split("\n"), stream=sys.stderr)), file=sys.stderr, flush=True)
    except OSError:
        forget(sys.stderr)


def forget(stream: TextIO) -> None:
    """Drop the unwritten output: at exit, Python would print an error or exit with 120."""
    with contextlib.suppress(OSError, ValueError):  # not a file: a test's
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_utf8() -> bool:
    """Say whether stdout takes more than ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf8")


class Paint:
    """Colours, or none."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Find out whether this stream takes colours. None: the present standard output."""
        self._on = has_colour(sys.stdout if stream is None else stream)

    def __call__(self, text: str, colour: str) -> str:
        """Return text in that colour, or as it is."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._on and colour else text


def duration(seconds: float | None) -> str:
    """Return seconds for display: 0.4 s, 45 s, 3 m 12 s, 2 h 05 m, 4 d 3 h. "?" if unknown."""
    if seconds is None:
        return "?"
    sign, left = ("-", -seconds) if seconds < 0 else ("", seconds)
    if left < 9.95:  # else it would read "10.0 s", and "10 s" for a little more
        return f"{sign}{left:.1f} s"
    whole = round(left)
    if whole < 60:
        return f"{sign}{whole} s"
    if whole < 3600:
        return f"{sign}{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{sign}{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{sign}{whole // 86400} d {whole % 86400 // 3600} h"


def after_start(seconds: float) -> str:
    """Return a time from an outage's start, for display: +45 s."""
    text = duration(seconds)
    return text if text.startswith("-") else f"+{text}"


def is_endless(seconds: float | None) -> bool:
    """Say whether this runtime is endless: a feed with utility carries the host (1e7 s in `supply.feeds`)."""
    return seconds is not None and seconds >= 1e6


def moment(unix_s: float | None) -> str:
    """Return a moment in local time with its offset; "?" when not known."""
    if unix_s is None:
        return "?"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return "?"


def clock_of(unix_s: float | None) -> str:
    """Return the time of day of a moment; "?" when not known."""
    return "?" if unix_s is None else moment(unix_s)[11:19]


def number(value: Any, unit: str = "", digits: int = 0, times: int = 1) -> str:  # noqa: ANN401 - any value of JSON
    """Return a number with its unit; "?" when not known."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "?"
    return f"{times * value:.{digits}f}{' ' + unit if unit else ''}"


def table(
    rows: Sequence[Sequence[str]], indent: str = "  ", *, width: int | None = None, whole: Collection[int] = ()
) -> list[str]:
    """Return rows as aligned lines; the last column is not padded.

    width: of the lines, by breaking cells between words, where that is enough. whole: columns of which only the head,
    the first row, is broken.
    """
    if not rows:
        return []
    if width is not None:
        rows = _narrowed(rows, width - len(indent), whole)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        (
            indent + "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]])
        ).rstrip()
        for row in rows
    ]


def _narrowed(rows: Sequence[Sequence[str]], width: int, whole: Collection[int]) -> Sequence[Sequence[str]]:
    """Take width from the columns that can give most, and return a row for each line; the rows if it is not enough."""
    from itertools import zip_longest
    from textwrap import wrap

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = [
        max(
            len(cell) if n in whole and at else max(map(len, cell.split()), default=0) for at, cell in enumerate(column)
        )
        for n, column in enumerate(zip(*rows, strict=True))
    ]
    over = sum(widths) + 2 * (len(widths) - 1) - width
    if over > sum(widths) - sum(least):
        return rows
    for _ in range(over):
        widths[max(range(len(widths)), key=lambda n: widths[n] - least[n])] -= 1
    cells = [
        [wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths, strict=True)] for row in rows
    ]
    return [line for row in cells for line in zip_longest(*row, fillvalue="")]


def columns(stream: TextIO | None = None) -> int | None:
    """Return how many columns the terminal has that a stream goes to (None: stdout); None if it is not a terminal."""
    try:
        return os.get_terminal_size((sys.stdout if stream is None else stream).fileno()).columns
    except (OSError, ValueError):
        return None


def fold(
    lines: Sequence[str], width: int | None = None, stream: TextIO | None = None, *, breaks_words: bool = False
) -> list[str]:
    """Break long lines between words, and continue below the start of their last column.

    width: None: that of the terminal, which is the stream (None: stdout). Without a terminal, lines are not broken.
    breaks_words: no line is longer than width, however narrow that is; else a word that is longer stays whole.
    """
    width = columns(stream) if width is None else width
    if width is None or (width < _NARROW and not breaks_words) or all(len(line) <= width for line in lines):
        return list(lines)
    folded: list[str] = []
    for line in lines:
        folded += _folded(line, width, breaks_words=breaks_words)
    return folded


def _folded(line: str, width: int, *, breaks_words: bool) -> list[str]:
    """Break one line; its colours have no width, and stay on their letters."""
    import re
    from textwrap import wrap

    colour = re.compile("\x1b\\[[0-9;]*m")
    plain = colour.sub("", line)
    if len(plain) <= width:
        return [line]
    gaps = [gap.end() for gap in re.finditer("(?:^ *[-!] | {2,})(?=[^ ])", plain) if gap.end() <= width // 2]
    hang = min(max(gaps, default=2), width - 1)
    folded = wrap(
        plain,
        width,
        subsequent_indent=" " * hang,
        break_long_words=breaks_words,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    ) or [""]
    colours, before = [], 0
    for found in colour.finditer(line):
        colours.append((found.start() - before, found[0]))
        before += len(found[0])
    end = len(plain)
    for number in reversed(range(len(folded))):  # from the last: each part is found before the next one
        indent = hang if number else 0
        part = folded[number][indent:]
        begin = plain.rindex(part, 0, end)
        while colours and (colours[-1][0] > begin or number == 0):
            at, code = colours.pop()
            cut = indent + min(max(at - begin, 0), len(part))
            folded[number] = folded[number][:cut] + code + folded[number][cut:]
        end = begin
    return folded


_NARROW: Final = 40
"""Columns of a terminal that is too narrow for a layout."""


def parse_seconds(text: str) -> float | None:
    """Read a duration: 90, 90s, 15m, 2h, 1d. None if it is not one."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    factor = units.get(text[-1:].lower())
    digits = text[:-1] if factor is not None else text
    if not digits.replace(".", "", 1).isdecimal() or not digits.isascii():
        return None
    return float(digits) * (1.0 if factor is None else factor)


def agreed(question: str) -> bool:
    """Ask on the terminal; only y and yes agree."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextlib.contextmanager
def waiting(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Show on a terminal's stderr what takes some seconds, until it is over."""
    live = not quiet and sys.stderr.isatty()
    if live:
        print(f"{text} ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if live:
            print("\x1b[K", end="", file=sys.stderr, flush=True)


_EVERY_S: Final = 0.1
_UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def amount(size_bytes: float | None) -> str:
    """Return bytes for display: 8.50 GB, 312 kB. "?" if unknown."""
    if size_bytes is None:
        return "?"
    for factor, unit in _UNITS:
        if size_bytes >= factor:
            scaled = size_bytes / factor
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return f"{size_bytes:.0f} B"


class Bar:
    """One progress line on a terminal, redrawn at most ten times a second, and removed at the end.

    what: a word or two in front. quiet: draw nothing, as if the stream is not a terminal.
    format_count: how counts are written; bytes unless other items are counted. Any thread may report progress.
    """

    def __init__(
        self,
        what: str,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        format_count: Callable[[float], str] = amount,
    ) -> None:
        self._format = format_count
        self._stream = sys.stderr if stream is None else stream
        self._live = not quiet and self._stream.isatty()
        self._what = what
        self._began_s = time.perf_counter()
        self._drawn_s = self._began_s
        self._lock = threading.Lock()
        self._is_drawn = False
        encoding = (self._stream.encoding or "ascii").lower().replace("-", "")
        self._full, self._empty = ("█", "░") if encoding == "utf8" else ("#", ".")

    def __call__(self, done: int, total: int | None) -> None:
        """Show the progress: how much is done, and how much in all if known."""
        now_s = time.perf_counter()
        if not self._live or now_s - self._drawn_s < _EVERY_S:
            return
        with self._lock:
            self._drawn_s = now_s
            self._is_drawn = True
            self._stream.write(f"\r{self.line(done, total, now_s - self._began_s, _width())}\x1b[K")
            self._stream.flush()

    def renamed(self, what: str) -> Self:
        """Start the progress of the next item."""
        self._what = what
        self._began_s = time.perf_counter()
        return self

    def line(self, done: int, total: int | None, took_s: float, width: int) -> str:
        """Return the line, at most `width` letters long."""
        rate = done / took_s if took_s > 0 else 0.0
        if not total:
            return f"{self._what}  {self._format(done)}  {self._format(rate)}/s"[:width]
        share = min(1.0, done / total)
        left = f"  {duration((total - done) / rate)} left" if rate > 0 and done < total else ""
        figures = f" {100 * share:3.0f} %  {self._format(done)} of {self._format(total)}  {self._format(rate)}/s{left}"
        room = min(40, width - len(self._what) - len(figures) - 3)
        if room < 5:
            return f"{self._what} {figures}"[:width]
        full = round(room * share)
        return f"{self._what}  {self._full * full}{self._empty * (room - full)}{figures}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _width() -> int:
    return shutil.get_terminal_size().columns - 1
