"""Profiles made ready for decoding: whole OIDs, factors and sets instead of text, worked out once and not every second.

A poll is decoded once a second on a host that has better things to do: no string is put together there, no table is
searched, and to which column an OID belongs is known from the first poll.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from powerguard.core.readings import OutputSource
from powerguard.profiles.lines import (
    CEILINGS,
    CEILINGS_MIN,
    MOST_LINES,
    SATURATED,
    Beside,
    Line,
    lacking,
    line_of,
    said,
)
from powerguard.profiles.places import Condition, Number, OidText, Span
from powerguard.profiles.schema import BatteryStatusSource, NumberSource, OutputSourceSource, Profile
from powerguard.profiles.values import Answer, Missing, Oid, parts
from powerguard.profiles.vocabulary import NUMBERS, OF_ALL_LINES, UNITS, BatteryStatus, Combine, OutletState, State

Answers = Mapping[str, Answer]
Rows = Mapping[str, Sequence[str]]
"""Column to the OIDs of its rows, in order."""
Word = TypeVar("Word", OutputSource, BatteryStatus)

_DECIMAL = re.compile(rb"[+-]?[0-9]{1,18}(\.[0-9]{1,9})?")
_THOUSANDS = re.compile(rb"[+-]?[0-9]{1,3}(,[0-9]{3})+")
"""1,234 is a thousand to some makers and little more than 1 to others: neither is believed."""
_LEAST_VOLTS = 25
"""Volts, or tenths of them, at an output that is there: less is the ghost of one."""
_PADDING = b" \t\r\n\0"
"""What devices fill their strings up with."""
_BIGGEST_RAW = 2**64
_MOST_KNOWN = 4096
"""OIDs whose column is remembered. Polls have some dozens; only a hostile device has more."""


@dataclass(frozen=True, slots=True)
class Test:
    """Whether an object has one of some values."""

    oid: str
    exact: frozenset[int | str]
    spans: tuple[Span, ...]

    def holds(self, answers: Answers) -> bool:
        return self.fits(answers.get(self.oid))

    def fits(self, raw: Answer | None) -> bool:
        if isinstance(raw, int):
            return raw in self.exact or any(_within(raw, span) for span in self.spans)
        return isinstance(raw, Oid) and raw in self.exact


@dataclass(frozen=True, slots=True)
class Enumeration(Generic[Word]):
    """An object, or the rows of a column, whose values are words of a closed list."""

    object: str
    profile: str
    oid: str
    is_column: bool
    values: Mapping[int, Word | None]
    texts: Mapping[str, Word | None]
    when: Test | None

    def read(self, answers: Answers, rows: Rows) -> Iterator[tuple[str, Answer]]:
        """What was answered, with its OID; nothing where the condition does not hold."""
        if self.when is not None and not self.when.holds(answers):
            return
        if self.is_column:
            for oid in rows.get(self.oid, ())[:MOST_LINES]:
                yield oid, answers[oid]
        elif self.oid in answers:
            yield self.oid, answers[self.oid]

    def word(self, raw: Answer) -> Word | None:
        """Return what a value means, None when it says nothing. Raises KeyError for one that is not listed."""
        if isinstance(raw, bytes):
            return self.texts[raw.strip(_PADDING).decode("utf-8", "replace").lower()]
        return self.values[raw]  # type: ignore[index]  # an OID is no key of it, and is told as any unlisted value


@dataclass(frozen=True, slots=True)
class NumberAt:
    """One place of one number."""

    field: str
    object: str
    oid: str
    is_column: bool
    scalars: tuple[str, ...]
    factor: float
    or_factor: float | None
    lowest: float
    highest: float
    none: frozenset[Number]
    none_spans: tuple[Span, ...]
    text: bool
    combine: Combine
    count_oid: str | None
    rows_column: str | None
    rows_are: frozenset[Answer | None]
    beside: tuple[Beside, ...]
    when: Test | None

    def convert(self, raw: Answer) -> tuple[float | None, str]:
        """Return the value in our unit, or None and why; "" when there is simply nothing."""
        if isinstance(raw, int):
            number: Number = raw
        elif isinstance(raw, Missing):
            return None, raw.value if raw is Missing.NULL else ""
        elif self.text and isinstance(raw, bytes):
            text = raw.strip(_PADDING)
            if _THOUSANDS.fullmatch(text):
                return None, "thousands, or a decimal comma: it cannot be told which"
            text = text.replace(b",", b".")
            if not _DECIMAL.fullmatch(text):
                return None, "no decimal number"
            number = float(text)
        else:
            return None, "text where a number belongs"
        if number in self.none or number in SATURATED:
            # "No countdown runs", RFC 1628's own -1, is an answer and no value to reject.
            return None, "" if self.field == "output_off_in_s" and number in (-1, 0) else "means: not measured"
        if self.none_spans and any(_within(number, span) for span in self.none_spans):
            return None, "means: not measured"
        if abs(number) > _BIGGEST_RAW:
            return None, "larger than any SNMP number"
        value = round(number * self.factor, 6)
        if self.lowest <= value <= self.highest:
            return value, ""
        if self.or_factor is not None:
            other = round(number * self.or_factor, 6)
            if self.lowest <= other <= self.highest:
                return other, ""
        return None, f"{value:g} is outside of what is believable ({self.lowest:g} to {self.highest:g})"

    def applies(self, answers: Answers) -> bool:
        return self.when is None or self.when.holds(answers)

    def places(self, rows: Rows) -> Sequence[str]:
        """Return where it is read: the answered rows of a column, or the scalar, or the scalars of the lines."""
        return rows.get(self.oid, ()) if self.is_column else self.scalars

    def rows_of(self, answers: Answers, rows: Rows) -> list[str]:
        """Return the rows that count: of lines that the device says it has, and none that another one contains.

        By their number, not by their place: where line 1 is left out, line 2 of a one-phase UPS is still no line.
        """
        found = [oid for oid in self.places(rows) if oid in answers]
        if self.rows_column is not None:
            found = [oid for oid in found if answers.get(self.rows_column + oid[len(self.oid) :]) in self.rows_are]
        count = self.count(answers)
        if count is None:
            return found[:MOST_LINES]
        first = self._first(found)
        return [oid for oid in found if self._line(oid, first)[1] <= count]

    def count(self, answers: Answers) -> int | None:
        """Return how many lines the device says it has; None where it does not, or nothing believable."""
        count = None if self.count_oid is None else answers.get(self.count_oid)
        return count if isinstance(count, int) and 1 <= count <= MOST_LINES else None

    def lacks(self, answers: Answers, rows: Rows, told: Sequence[str]) -> str:
        """Say which line is there and not among those that were believed (`lines.lacking`); "" where none is known."""
        if self.rows_column is not None:
            ends = [oid[len(self.rows_column) :] for oid in rows.get(self.rows_column, ())]
            gone = [
                end for end in ends if answers[self.rows_column + end] in self.rows_are and self.oid + end not in told
            ]
            return f"row {gone[0][1:]} is not told" if gone else ""
        first = self._first(told)
        what = said(
            answers,
            ((self._line(oid, first), oid) for oid in self.places(rows)),
            (
                (_numbered(oid, one, first), oid, one.least)
                for one in self.beside
                for oid in (one.scalars or rows.get(one.column, ())[:MOST_LINES])
            ),
        )
        return lacking({self._line(oid, first) for oid in told}, self.count(answers), what)

    def line_1(self, counted: Sequence[str]) -> str | None:
        """Return the object of line 1; None where the rows that were answered lack it."""
        first = self._first(counted)
        return next((oid for oid in counted[:1] if self._line(oid, first)[1] == 1), None)

    def _line(self, oid: str, first: int) -> Line:
        if not self.is_column:
            return (), self.scalars.index(oid) + 1
        group, number = line_of(oid[len(self.oid) :])
        return group, number - first + 1

    def _first(self, found: Sequence[str]) -> int:
        """Return the number of line 1: some tables count from 0."""
        return 0 if self.is_column and any(line_of(oid[len(self.oid) :])[1] == 0 for oid in found) else 1


def _numbered(oid: str, one: Beside, first: int) -> Line:
    if one.scalars:
        return (), one.scalars.index(oid) + 1
    group, number = line_of(oid[len(one.column) :])
    return group, number - first + 1


@dataclass(frozen=True, slots=True)
class StateAt:
    """One object that says yes to one state."""

    state: State
    object: str
    oid: str
    is_column: bool
    test: Test
    defined: Test | None
    when: Test | None


@dataclass(frozen=True, slots=True)
class Flags:
    """A string of 0 and 1. flags: position from 0, the state, and how provenance calls it."""

    oid: str
    flags: tuple[tuple[int, State, str], ...]


@dataclass(frozen=True, slots=True)
class Alarms:
    """A table of alarm OIDs."""

    object: str
    count_oid: str
    column: str
    meanings: Mapping[str, State]


@dataclass(frozen=True, slots=True)
class Outlets:
    """A table of outlets."""

    object: str
    column: str
    values: Mapping[int, OutletState]


class Compiled:
    """All that a device's profiles can tell, the most trusted first."""

    def __init__(self, profiles: Sequence[Profile]) -> None:
        """Work everything out. The profiles do not change later."""
        self.profiles = tuple(profiles)
        self.output_source = [_enumeration(one, source) for one in profiles for source in one.output_source]
        self.battery_status = [_enumeration(one, source) for one in profiles for source in one.battery_status]
        self.numbers: dict[str, list[list[NumberAt]]] = {name: [] for name in NUMBERS}
        for profile in profiles:
            besides = _besides(profile)
            for name, sources in profile.numbers.items():
                self.numbers[name].append([_number(profile, name, source, besides) for source in sources])
        self.states = [state for profile in profiles for state in _states(profile)]
        self.flags = [flags for profile in profiles for flags in _flags(profile)]
        self.alarms = [alarms for profile in profiles for alarms in _alarms(profile)]
        self.outlets = [
            Outlets(table.object, profile.absolute(table.column), table.values)
            for profile in profiles
            for table in profile.outlets
        ]
        self._columns = frozenset(
            [*(column for profile in profiles for column in profile.columns()), *(one.column for one in self.alarms)]
        )
        self._stems = tuple(f"{column}." for column in self._columns)
        self._known: dict[str, tuple[str, tuple[int, ...]] | None] = {}

    def rows(self, answers: Answers) -> dict[str, list[str]]:
        """Return the rows of every column that were answered, in the order of their indices."""
        if not self._columns:
            return {}
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        found: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        known = self._known
        for oid in answers:
            try:
                place = known[oid]
            except KeyError:
                place = known[oid] = self._place(oid)
            if place is not None:
                found.setdefault(place[0], []).append((place[1], oid))
        return {column: [oid for _, oid in sorted(rows)] for column, rows in found.items()}

    def _place(self, oid: str) -> tuple[str, tuple[int, ...]] | None:
        if not oid.startswith(self._stems):
            return None
        column = oid
        while column:
            column = column.rpartition(".")[0]
            if column in self._columns:
                return column, parts(oid[len(column) + 1 :])
        return None


_BUILT: dict[tuple[int, ...], Compiled] = {}
_MOST_BUILT = 16


def compiled(profiles: Sequence[Profile]) -> Compiled:
    """Return the profiles made ready, from memory when they are the same ones as before."""
    key = tuple(map(id, profiles))  # Each entry keeps its profiles, so that no other object can get their ids.
    ready = _BUILT.get(key)
    if ready is None:
        if len(_BUILT) >= _MOST_BUILT:
            del _BUILT[next(iter(_BUILT))]
        ready = _BUILT[key] = Compiled(profiles)
    return ready


# --- Making ---------------------------------------------------------------------------------------------------------


def _within(number: Number, span: Span) -> bool:
    low, high = span
    return (low is None or number >= low) and (high is None or number <= high)


def _test(profile: Profile, place: str, wanted: Sequence[int | OidText | Span]) -> Test:
    exact = frozenset(
        profile.absolute(value) if isinstance(value, str) else value for value in wanted if not isinstance(value, tuple)
    )
    return Test(profile.absolute(place), exact, tuple(value for value in wanted if isinstance(value, tuple)))


def _condition(profile: Profile, when: Condition | None) -> Test | None:
    return None if when is None else _test(profile, when.oid, when.is_)


def _enumeration(profile: Profile, source: OutputSourceSource | BatteryStatusSource) -> "Enumeration[Any]":
    return Enumeration(
        object=source.object,
        profile=profile.name,
        oid=profile.absolute(source.place),
        is_column=source.column is not None,
        values=source.values,
        texts=source.texts,
        when=_condition(profile, source.when),
    )


def _besides(profile: Profile) -> list[Beside]:
    """Return what tells of lines: columns of numbers, scalars in a row, and the volts at the output."""
    found = [
        Beside("" if source.column is None else profile.absolute(source.column), _places(profile, source.oids), 1)
        for name, sources in profile.numbers.items()
        for source in sources
        if source.column is not None or (source.oids and name in OF_ALL_LINES)
    ]
    volts = profile.lines.output_volts
    if volts is not None:
        column = "" if volts.column is None else profile.absolute(volts.column)
        found.append(Beside(column, _places(profile, volts.oids), _LEAST_VOLTS))
    return found


def _places(profile: Profile, oids: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(profile.absolute, oids))


def _beside(place: str, source: NumberSource, besides: Sequence[Beside]) -> tuple[Beside, ...]:
    """Return those of the same table, or with a scalar for each line as it has; input and output are not mixed."""
    if source.column is None:
        return tuple(one for one in besides if one.scalars and place not in one.scalars and len(source.oids) > 1)
    table = place.rpartition(".")[0]
    return tuple(one for one in besides if one.column != place and one.column.rpartition(".")[0] == table)


def _none(name: str, source: NumberSource) -> frozenset[Number]:
    """Return the raw numbers that mean "not measured": the profile's own, and for a runtime every full counter."""
    none: frozenset[Number] = frozenset(value for value in source.none if not isinstance(value, tuple))
    if name != "runtime_s":
        return none
    return none | CEILINGS | (CEILINGS_MIN if source.unit == "min" else frozenset())


def _number(profile: Profile, name: str, source: NumberSource, besides: Sequence[Beside]) -> NumberAt:
    place = profile.absolute(source.place)
    window = NUMBERS[name]
    low, high = (None, None) if source.valid is None else source.valid
    counter = None if source.lines is None else getattr(profile.lines, source.lines)
    rows = source.rows
    return NumberAt(
        field=name,
        object=source.object,
        oid=place,
        is_column=source.column is not None,
        scalars=tuple(map(profile.absolute, source.scalars)),
        factor=UNITS[source.unit][1],
        or_factor=None if source.or_unit is None else UNITS[source.or_unit][1],
        lowest=window.lowest if low is None else max(window.lowest, low),
        highest=window.highest if high is None else min(window.highest, high),
        none=_none(name, source),
        none_spans=tuple(value for value in source.none if isinstance(value, tuple)),
        text=source.text,
        combine=source.combine or window.combine,
        count_oid=None if counter is None else profile.absolute(counter.oid),
        rows_column=None if rows is None else profile.absolute(rows.column),
        rows_are=frozenset(() if rows is None else rows.is_),
        beside=_beside(place, source, besides),
        when=_condition(profile, source.when),
    )


def _states(profile: Profile) -> Iterator[StateAt]:
    for state, sources in profile.states.items():
        for source in sources:
            test = _test(profile, source.place, source.is_)
            when = _condition(profile, source.when)
            defined = _test(profile, source.place, source.of) if source.of else None
            yield StateAt(state, source.object, test.oid, source.column is not None, test, defined, when)


def _flags(profile: Profile) -> Iterator[Flags]:
    for string in profile.flag_strings:
        meanings = [(at - 1, state, f"{string.object}[{at}]") for at, state in string.flags.items()]
        yield Flags(profile.absolute(string.oid), tuple(meanings))


def _alarms(profile: Profile) -> Iterator[Alarms]:
    table = profile.alarm_table
    if table is not None:
        meanings = {str(profile.absolute(alarm)): state for alarm, state in table.values.items()}
        yield Alarms(table.object, profile.absolute(table.count.oid), profile.absolute(table.column), meanings)
