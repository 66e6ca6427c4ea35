"""Words for people: durations, moments, and text that no terminal stumbles over."""

import contextlib
import io
import os
import pty

import pytest

from powerguard.cli.render import Paint, clean, clock_of, duration, fold, moment, number, parse_seconds, table, waiting


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.99, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 m 00 s"),
        (192.0, "3 m 12 s"),
        (3599.7, "1 h 00 m"),
        (7500.0, "2 h 05 m"),
        (90000.0, "1 d 1 h"),
        (-5.0, "-5.0 s"),
        (-192.0, "-3 m 12 s"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("15m", 900.0), ("2h", 7200.0), ("1.5h", 5400.0), ("1d", 86400.0), ("2H", 7200.0)],
)
def test_reported_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "1w", "1h30m", "nan", "1e3", "٣h", "1..5h", ".", ".h"])
def test_reported_seconds_that_are_none(text: str) -> None:
    """Not a number of ours: refused, never guessed."""
    assert parse_seconds(text) is None


def test_moments() -> None:
    """What no calendar holds is "?", not an exception."""
    assert moment(None) == moment(1e30) == moment(float("nan")) == "?"
    assert clock_of(None) == "?"
    assert len(clock_of(1_795_000_000.0)) == 8


def test_clean() -> None:
    assert clean("a\x1b[2J\nb\u202ec") == "a?[2J?b?c"
    assert clean(None) == "None"


def test_numbers() -> None:
    """Unknown is "?", never 0."""
    assert (number(None, "%"), number(True, "%"), number(62.4, "%"), number(0, "V")) == ("?", "?", "62 %", "0 V")


def test_table_is_aligned() -> None:
    assert table([("a", "x"), ("long", "y")]) == ["  a     x", "  long  y"]
    assert table([]) == []


def test_a_table_fits_its_width() -> None:
    """Cells are broken between words, and of a number only its head; a table that cannot fit is left to `fold`."""
    rows = [("what it is", "lasts at this load"), ("one two three", "9 m 12 s")]
    narrow = ["  what it  lasts at", "  is       this load", "  one two  9 m 12 s", "  three"]
    assert table(rows, width=25, whole=(1,)) == narrow
    assert table(rows, width=12, whole=(1,)) == table(rows)
    assert table(rows, width=80, whole=(1,)) == table(rows)


def test_paint_stays_off_what_is_no_terminal() -> None:
    assert Paint(io.StringIO())("text", "red") == "text"


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        ("short", ["short"]),
        (
            "12:03:41  +9 m 14 s  training was asked to pause and checkpoint, because",
            ["12:03:41  +9 m 14 s  training was asked to pause", " " * 21 + "and checkpoint, because"],
        ),
        (
            "  ! mode is dry-run: nothing would be powered off -> set mode: armed",
            ["  ! mode is dry-run: nothing would be powered off", "    -> set mode: armed"],
        ),
        ("  path  /" + "x" * 60 + " is full", ["  path", "        /" + "x" * 60, "        is full"]),
        (
            "  \x1b[31m!\x1b[0m the fifty columns of this terminal end here: now! -> go on",
            ["  \x1b[31m!\x1b[0m the fifty columns of this terminal end here:", "    now! -> go on"],
        ),
        (
            "  \x1b[33m- a line that is yellow to its very end goes on below\x1b[0m",
            ["  \x1b[33m- a line that is yellow to its very end goes on", "    below\x1b[0m"],
        ),
        ("\x1b[33mwarn\x1b[0m  " + "y" * 44, ["\x1b[33mwarn\x1b[0m  " + "y" * 44]),
    ],
)
def test_fold(line: str, folded: list[str]) -> None:
    """Between words, under where the last column begins; a path stays whole, and colours take no room."""
    assert fold([line, "after"], 50) == [*folded, "after"]


def test_only_a_terminal_folds() -> None:
    """What goes into a file or a program has its lines whole, and so has a terminal in which nothing fits."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert fold(["x " * 200]) == ["x " * 200]
    assert fold(["x " * 200], 20) == ["x " * 200]


def test_what_takes_seconds_says_so_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """It is gone when it is over, also by an error."""
    with waiting("asking"):
        pass
    assert capsys.readouterr().err == ""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, contextlib.redirect_stderr(terminal):
        with waiting("asking", quiet=True):
            pass
        with pytest.raises(ValueError, match="broken"), waiting("asking"):
            int("broken")
        shown = b""
        while len(shown) < len(b"asking ...\r\x1b[K"):  # a terminal hands over each write by itself
            shown += os.read(ours, 100)
        assert shown == b"asking ...\r\x1b[K"
    os.close(ours)
