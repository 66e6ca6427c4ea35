"""Which lines of a UPS are there, and which of them are reported: a sum, or the worst of all, needs every one of them.

A line is named by the end of its row's index. What comes before (the unit in a chain, the input of a PDU) names the
group that the line belongs to, and a 0 at the end has no meaning: .1, .1.0, .0.1 and .7.1 are all line 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from powerguard.ups.profiles.schema import MOST_LINES, Answers, NumberSource, Tables
from powerguard.ups.profiles.vocabulary import SATURATED, Answer, Missing, Oid, parts

_LEFT_OUT = frozenset(Missing) - {Missing.NULL}
"""A card that knows the object and has no value for it says something of that line; one that leaves it out does not."""

Line = tuple[tuple[int, ...], int]
"""The group, and the number of the line in it, from 1."""


def counted(source: NumberSource, answers: Answers, tables: Tables) -> list[str]:
    """Return the rows that count: of lines that the device says it has, and none that another one contains.

    By their number, not by their place: where line 1 is left out, line 2 of a one-phase UPS is still no line.
    """
    found = [oid for oid in source.places(tables) if oid in answers]
    if source.rows is not None and source.column is not None:
        other, start = source.rows.column, len(source.column)
        found = [oid for oid in found if answers.get(other + oid[start:]) in source.rows.is_]
    count = source.count(answers)
    if count is None:
        return found[:MOST_LINES]
    lines = _Lines(source, found)
    return [oid for oid in found if lines.of(oid)[1] <= count]


def line_1(source: NumberSource, rows: Sequence[str]) -> str | None:
    """Return the object of line 1; None where the rows that were answered lack it."""
    lines = _Lines(source, rows)
    return next((oid for oid in rows[:1] if lines.of(oid)[1] == 1), None)


def lacks(source: NumberSource, answers: Answers, tables: Tables, told: Sequence[str]) -> str:
    """Say which line is there and not among those that were believed; "" where none is known."""
    if source.rows is not None:
        rows = source.rows
        ends = [oid[len(rows.column) :] for oid in tables.get(rows.column, ())]
        gone = [end for end in ends if answers[rows.column + end] in rows.is_ and f"{source.column}{end}" not in told]
        return f"row {gone[0][1:]} is not reported" if gone else ""
    lines = _Lines(source, told)
    own = {lines.of(oid) for oid in source.places(tables) if _is_told(answers.get(oid))}
    quiet: set[Line] = set()
    live: set[Line] = set()
    for one in source.beside:
        for oid in one.scalars or tables.get(one.column or "", ())[:MOST_LINES]:
            raw = answers.get(oid)
            if _is_told(raw):
                (live if _is_live(raw, one.least) else quiet).add(lines.named(oid, one.column, one.scalars))
    return _lacking({lines.of(oid) for oid in told}, source.count(answers), dead=own & quiet - live, live=live)


def _lacking(told: set[Line], count: int | None, *, dead: set[Line], live: set[Line]) -> str:
    """Return the line that is there but not reported; "" if none is known.

    There is line 1, every line before a reported one, as many as the device counts, and each that another object
    shows alive. One that is counted, but without any value, does not exist: cards of one-phase UPSes
    fill three rows with zeros and NULL.
    """
    for group in sorted({group for group, _ in told}):
        numbers = {number for each, number in told if each == group}
        for number in range(1, max(*numbers, count or 1) + 1):
            if number not in numbers and not ((group, number) in dead and number > max(numbers)):
                return (
                    f"line {number} is not reported" if count is None else f"line {number} of {count} is not reported"
                )
    alive = sorted(line for line in live - told if count is None or line[1] <= count)
    return f"line {alive[0][1]} is reported by another object only" if alive else ""


@dataclass(frozen=True, slots=True)
class _Lines:
    """Numbers the lines of a source. rows: those that were answered; with a row 0, the table counts from 0."""

    source: NumberSource
    rows: Iterable[str]

    def of(self, oid: str) -> Line:
        return self.named(oid, self.source.column, self.source.scalars)

    def named(self, oid: str, column: Oid | None, scalars: Sequence[str]) -> Line:
        if column is None:
            return (), scalars.index(oid) + 1
        group, number = _end_of(oid, column)
        own = self.source.column
        first = 0 if own is not None and any(_end_of(row, own)[1] == 0 for row in self.rows) else 1
        return group, number - first + 1


def _end_of(oid: str, column: str) -> Line:
    """Return the line that the end of a row's OID names, its number as it stands there."""
    numbers = parts(oid[len(column) + 1 :])
    while len(numbers) > 1 and not numbers[-1]:
        numbers = numbers[:-1]
    return numbers[:-1], numbers[-1]


def _is_told(raw: Answer | None) -> bool:
    """Whether a card has answered it, be it that there is no value."""
    return raw is not None and raw not in _LEFT_OUT


def _is_live(raw: Answer | None, least: int) -> bool:
    """Whether a value shows that its line is there."""
    if isinstance(raw, bytes):
        text = raw.strip().partition(b".")[0]
        raw = int(text) if text.isdigit() and len(text) < MOST_LINES else None
    return isinstance(raw, int) and raw >= least and raw not in SATURATED
