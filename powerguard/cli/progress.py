"""How far something long has come: a bar on a terminal, nothing anywhere else. Stdlib only."""

import shutil
import sys
import threading
import time
from typing import Final, Self, TextIO

from powerguard.cli.render import duration

_EVERY_S: Final = 0.1
_UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def amount(size_bytes: float | None) -> str:
    """Return bytes as people say them: 8.50 GB, 312 kB. "?" when not known."""
    if size_bytes is None:
        return "?"
    for factor, unit in _UNITS:
        if size_bytes >= factor:
            scaled = size_bytes / factor
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return f"{size_bytes:.0f} B"


class Bar:
    """One line on a terminal that is drawn over, ten times a second at most, and gone at the end.

    what: a word or two in front. quiet: draw nothing, as where the stream is no terminal. May be told from any thread.
    """

    def __init__(self, what: str, *, quiet: bool = False, stream: TextIO | None = None) -> None:
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
        """Tell how far it is: bytes done, and bytes in all where that is known."""
        now_s = time.perf_counter()
        if not self._live or now_s - self._drawn_s < _EVERY_S:
            return
        with self._lock:
            self._drawn_s = now_s
            self._is_drawn = True
            self._stream.write(f"\r{self.line(done, total, now_s - self._began_s, _width())}\x1b[K")
            self._stream.flush()

    def renamed(self, what: str) -> Self:
        """Go on with the next thing, from its beginning."""
        self._what = what
        self._began_s = time.perf_counter()
        return self

    def line(self, done: int, total: int | None, took_s: float, width: int) -> str:
        """Return the line, at most `width` letters long."""
        rate = done / took_s if took_s > 0 else 0.0
        if not total:
            return f"{self._what}  {amount(done)}  {amount(rate)}/s"[:width]
        share = min(1.0, done / total)
        left = f"  {duration((total - done) / rate)} left" if rate > 0 and done < total else ""
        told = f" {100 * share:3.0f} %  {amount(done)} of {amount(total)}  {amount(rate)}/s{left}"
        room = min(40, width - len(self._what) - len(told) - 3)
        if room < 5:
            return f"{self._what} {told}"[:width]
        full = round(room * share)
        return f"{self._what}  {self._full * full}{self._empty * (room - full)}{told}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _width() -> int:
    return shutil.get_terminal_size().columns - 1
