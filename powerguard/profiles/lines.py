"""Which lines of a UPS are there, and which of them are told: a sum, or the worst of all, needs every one of them.

A line is named by the end of its row's index. What comes before (the unit in a chain, the input of a PDU) names the
group that the line belongs to, and a 0 at the end nothing: .1, .1.0, .0.1 and .7.1 are all line 1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from powerguard.profiles.values import Answer, Missing, parts

MOST_LINES = 12
"""Rows of a column that are believed: three phases, or the banks and groups of a large unit."""
CEILINGS = frozenset(range(65532, 65536)) | {2**31 - 1, 2**32 - 1}
"""Runtimes, as raw numbers, of counters that are full: the battery lasts for longer than they can count."""
CEILINGS_MIN = frozenset({546, 1092, 4095, 5999, 9999, 15300})
"""The same in minutes, as cards derive them: 32,767 s, 65,535 s, 12 bits, 100 hours less one, four nines, 255 hours."""
SATURATED = frozenset({-1, 32767, 65534, 65535, 2**31 - 1, 2**32 - 1, -(2**31), -32768})
"""-1, signed or not, or a counter at its end, whatever the quantity: no measurement."""
_LEFT_OUT = frozenset(Missing) - {Missing.NULL}
"""A card that knows the object and has no value for it says something of that line; one that leaves it out does not."""

Line = tuple[tuple[int, ...], int]
"""The group, and the number of the line in it, from 1."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Another object of the same lines. least: from which raw value on it shows that the line is there."""

    column: str
    scalars: tuple[str, ...]
    least: int


@lru_cache(maxsize=4096)
def line_of(end: str) -> Line:
    """Return the line that the end of a row's OID names (".1.0"), its number as it stands there."""
    numbers = parts(end[1:])
    while len(numbers) > 1 and not numbers[-1]:
        numbers = numbers[:-1]
    return numbers[:-1], numbers[-1]


def is_told(raw: Answer | None) -> bool:
    """Say whether a card has answered it, be it that there is no value."""
    return raw is not None and raw not in _LEFT_OUT


def is_live(raw: Answer | None, least: int) -> bool:
    """Say whether a value shows that its line is there."""
    if isinstance(raw, bytes):
        text = raw.strip().partition(b".")[0]
        raw = int(text) if text.isdigit() and len(text) < MOST_LINES else None
    return isinstance(raw, int) and raw >= least and raw not in SATURATED


@dataclass(slots=True)
class Said:
    """What is answered of each line. own: the rows of the object itself; others: of objects beside it."""

    own: set[Line]
    quiet: set[Line]
    live: set[Line]


def said(
    answers: Mapping[str, Answer], own: Iterable[tuple[Line, str]], others: Iterable[tuple[Line, str, int]]
) -> Said:
    """Sort what was answered; a line that another object tells nothing alive of is quiet."""
    found = Said({line for line, oid in own if is_told(answers.get(oid))}, set(), set())
    for line, oid, least in others:
        raw = answers.get(oid)
        if is_told(raw):
            (found.live if is_live(raw, least) else found.quiet).add(line)
    return found


def lacking(told: set[Line], count: int | None, what: Said) -> str:
    """Say which line is not told though it is there; "" where none is known to be.

    There is line 1, every line before one that is told, as many as the device counts, and each that another object
    shows alive. One that is counted, and of which all that is answered says nothing, is none: cards of one-phase UPSes
    fill three rows with zeros and NULL.
    """
    for group in sorted({group for group, _ in told}):
        numbers = {number for each, number in told if each == group}
        for number in range(1, max(*numbers, count or 1) + 1):
            line = (group, number)
            is_dead = line in what.own and line in what.quiet and line not in what.live
            if number not in numbers and not (is_dead and number > max(numbers)):
                return f"line {number} is not told" if count is None else f"line {number} of {count} is not told"
    alive = sorted(line for line in what.live - told if count is None or line[1] <= count)
    return f"line {alive[0][1]} is told by another object only" if alive else ""
