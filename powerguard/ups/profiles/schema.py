"""The schema of a profile file. Data only: no expressions, no code; every word is from a closed list.

A profile is checked and resolved when it is read: OIDs are whole, and each number knows its field, the object that
counts its lines and the objects that show which lines are there. Decoder, probe and commands work on the same objects.

A command that leaves the output off must differ from one that switches it on again, so the verbs are a closed list, and
each says what happens when utility returns while its countdown runs: only `cycles` brings a host back by itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, GetPydanticSchema, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError, core_schema

from powerguard.core.model.events import OutputSource
from powerguard.options import Options
from powerguard.ups.profiles.vocabulary import (
    CEILINGS,
    CEILINGS_MIN,
    NUMBERS,
    OF_ALL_LINES,
    SATURATED,
    UNITS,
    WITNESSES,
    Answer,
    BatteryStatus,
    Combine,
    Missing,
    Oid,
    OutletState,
    State,
    TrapEvent,
    Witness,
    parts,
)

Answers = Mapping[str, Answer]
Tables = Mapping[str, Sequence[str]]
"""Column to the OIDs of its answered rows, in order."""
MOST_LINES = 12
"""Rows of a column that are believed: three phases, or the banks and groups of a large unit."""
PADDING = b" \t\r\n\0"
"""Characters that devices pad their strings with."""
_LEAST_VOLTS = 25
"""Volts, or tenths of them, at an output that is there: less is the ghost of one."""
_DECIMAL = re.compile(rb"[+-]?[0-9]{1,18}(\.[0-9]{1,9})?")
_THOUSANDS = re.compile(rb"[+-]?[0-9]{1,3}(,[0-9]{3})+")
"""1,234 is a thousand to some makers and little more than 1 to others: neither is believed."""
_BIGGEST_RAW = 2**64
_OID = re.compile(r"((0|1|2)|(?=\.))(\.(0|[1-9][0-9]{0,9})){1,127}")


@dataclass(slots=True)
class Root:
    """The profile's `base`, which pydantic is given as context. missed: an OID needed it, and there is none."""

    base: str | None
    missed: bool = False


def _whole(text: str, info: ValidationInfo) -> Oid:
    if not _OID.fullmatch(text):
        msg = "must be an OID (.4.1.0, or 1.3.6.1.2.1.33.1.4.1.0)"
        raise ValueError(msg)
    if not text.startswith("."):
        return Oid(text)
    root: Any = info.context
    root.missed = root.missed or root.base is None
    return Oid(f"{root.base}{text}")


OidText = Annotated[
    Oid,
    GetPydanticSchema(
        lambda _type, _handler: core_schema.with_info_after_validator_function(_whole, core_schema.str_schema())
    ),
]
"""A dotted OID; with a leading dot it continues the profile's `base`.

Not a `pattern`: pydantic compiles one for each place where it is named, which costs a daemon MBs.
"""

Number = int | float
Range = tuple[Number | None, Number | None]


def _ordered(span: Range) -> Range:
    low, high = span
    if low is not None and high is not None and low > high:
        msg = f"range [{low}, {high}] runs backwards"
        raise ValueError(msg)
    return span


Span = Annotated[Range, AfterValidator(_ordered)]


def within(number: Number, span: Span) -> bool:
    """Whether a number lies in a range; None is an open end."""
    low, high = span
    return (low is None or number >= low) and (high is None or number <= high)


def is_one_of(raw: object, wanted: Sequence[Number | Oid | Span]) -> bool:
    """Whether an answer is one of some numbers, [low, high] ranges or OIDs. Other answers never are."""
    if isinstance(raw, Oid):
        return raw in wanted
    return isinstance(raw, int | float) and any(
        within(raw, each) if isinstance(each, tuple) else raw == each for each in wanted
    )


class Part(Options):
    """A part of a profile. Only whole profiles are read, so no validator of its own is built: that saves 1 MB."""

    model_config = ConfigDict(defer_build=True)


class Scalar(Part):
    """One object, by name and place."""

    object: str
    oid: OidText


class Condition(Part):
    """Another object must have one of these values (numbers, [low, high] ranges or OIDs).

    On a source: else it is not asked. On a command: else it is refused.
    """

    object: str
    oid: OidText
    is_: list[int | OidText | Span] = Field(alias="is", min_length=1)

    def holds(self, answers: Answers) -> bool:
        """Whether the object was answered with one of the values."""
        return is_one_of(answers.get(self.oid), self.is_)


class Rows(Part):
    """Only rows of a table whose other column has one of these values count.

    For tables that mix phases with banks, or a whole device with its parts: adding them up would count twice. Where
    the device does not answer the other column, no row counts, and the next source is asked.
    """

    object: str
    column: OidText
    is_: list[int] = Field(alias="is", min_length=1)


class Verb(StrEnum):
    """The purpose of a command. `outlet_*` act on one outlet or outlet group, the others on the whole output."""

    OFF_WITH_RETURN = "off_with_return"
    """Output off after a delay; on again with utility."""
    OFF_STAYS = "off_stays"
    """Output off after a delay, until it is switched on by hand."""
    REBOOT = "reboot"
    """Output off and on again, on utility as well."""
    CANCEL = "cancel"
    SELF_TEST = "self_test"
    OUTLET_ON = "outlet_on"
    OUTLET_OFF = "outlet_off"
    OUTLET_REBOOT = "outlet_reboot"
    OUTLET_OFF_WITH_RETURN = "outlet_off_with_return"
    OUTLET_CANCEL = "outlet_cancel"


OF_OUTLETS = frozenset(verb for verb in Verb if verb.startswith("outlet_"))
CANCELS = frozenset({Verb.CANCEL, Verb.OUTLET_CANCEL})
COUNT_DOWN = frozenset(
    {Verb.OFF_WITH_RETURN, Verb.OFF_STAYS, Verb.REBOOT, Verb.OUTLET_REBOOT, Verb.OUTLET_OFF_WITH_RETURN}
)
"""Verbs that must say what happens when utility returns before the output is off."""

SetType = Literal["integer", "gauge", "timeticks", "octets", "oid"]
"""As in `sources.snmp_port.Typed`."""

_SMALLEST = {"integer": -(2**31), "gauge": 0, "timeticks": 0}
_LARGEST = {"integer": 2**31 - 1, "gauge": 2**32 - 1, "timeticks": 2**32 - 1}


def _is_time(unit: str) -> str:
    if UNITS.get(unit, ("",))[0] != "time":
        msg = (
            f"unit {unit!r} is not a time (one of: "
            f"{', '.join(name for name, one in UNITS.items() if one[0] == 'time')})"
        )
        raise ValueError(msg)
    return unit


class SetStep(Part):
    """One object to SET. Exactly one of `value`, a constant, and `delay`, which the caller chooses.

    oid: a scalar. column: a table column, to which the index of the outlet is added.
    delay: `off_s` until the output goes off, `on_s` until it comes back (from off, or from utility's return),
        `off_and_on_s` both: a countdown to the return that begins with the order.
    unit: of the object, for a delay. range, allowed: which delays the device takes, in seconds; others it refuses.
    read_back: what a GET of the same object answers afterwards: `exact` the value; `countdown` it runs down from the
        value; `rounded` the device took the next larger one it knows; `none` the object does not report it.
    standing: the device ought to have this value on any day; a wrong value is reported before an outage, and not in
        one.
    """

    object: str
    oid: OidText | None = None
    column: OidText | None = None
    type: SetType
    value: int | str | None = None
    delay: Literal["off_s", "on_s", "off_and_on_s"] | None = None
    unit: Annotated[str, AfterValidator(_is_time)] | None = None
    range: Span | None = None
    allowed: list[int] | None = Field(default=None, min_length=1)
    read_back: Literal["exact", "countdown", "rounded", "none"]
    standing: bool = False

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.oid is None) == (self.column is None):
            msg = "must name exactly one of oid and column"
            raise ValueError(msg)
        if (self.value is None) == (self.delay is None):
            msg = "must have exactly one of value and delay"
            raise ValueError(msg)
        if self.standing and (self.value is None or self.read_back != "exact"):
            msg = "standing belongs to a value that is read back exact"
            raise ValueError(msg)
        if self.delay is None:
            self._fits_constant()
        else:
            self._fits_delay()
        return self

    def _fits_constant(self) -> None:
        if self.unit is not None or self.range is not None or self.allowed is not None:
            msg = "unit, range and allowed belong to a delay"
            raise ValueError(msg)
        if self.type in _LARGEST:
            if not isinstance(self.value, int):
                msg = f"a value of type {self.type} is a whole number"
                raise ValueError(msg)
            if not _SMALLEST[self.type] <= self.value <= _LARGEST[self.type]:
                msg = f"{self.value} does not fit in type {self.type}"
                raise ValueError(msg)
        elif not isinstance(self.value, str):
            msg = f"a value of type {self.type} is text: write it in quotes"
            raise ValueError(msg)

    def _fits_delay(self) -> None:
        if self.unit is None:
            msg = "a delay needs its unit"
            raise ValueError(msg)
        if (self.range is None) == (self.allowed is None):
            msg = "a delay needs exactly one of range and allowed (seconds)"
            raise ValueError(msg)
        if self.type not in _LARGEST:
            msg = f"a delay is a number, and type is {self.type}"
            raise ValueError(msg)
        if self.range is not None and (self.range[0] is None or self.range[1] is None or self.range[0] < 0):
            msg = "the range of a delay has two ends of 0 s or more"
            raise ValueError(msg)
        largest = max(self.allowed) if self.allowed is not None else (self.range or (0, 0))[1] or 0
        if largest / UNITS[self.unit][1] > _LARGEST[self.type]:
            msg = f"{largest} s does not fit in type {self.type}"
            raise ValueError(msg)


class Control(Part):
    """One command of a family.

    needs: objects that are read first; any other value and the command is refused without a SET.
    sets: in this order, one request each, and each read back before the next.
    undo: the command that cancels it while it counts down; None: there is none.
    utility_returns_during_countdown: what the device then does. `cycles`: the output goes off and comes back all the
        same, so hosts boot. `aborts`: the output stays on. `stays_off`: off, and it stays so. `unknown`: not in the MIB
        and not tried.
    """

    needs: list[Condition] = Field(default_factory=list)
    sets: list[SetStep] = Field(min_length=1, max_length=8)
    undo: Verb | None = None
    utility_returns_during_countdown: Literal["cycles", "aborts", "stays_off", "unknown"] | None = None


Kind = Literal["ups", "pdu"]
FIRST_ROWS = (".1", ".1.0", ".0.1")
"""Where the first row of a table is looked for when a device is only being recognised."""


def _known_unit(unit: str) -> str:
    if unit not in UNITS:
        msg = f"unknown unit {unit!r} (one of: {', '.join(UNITS)})"
        raise ValueError(msg)
    return unit


class _Place(Part):
    """One object: a scalar by its whole `oid`, or the rows of a table by its `column`."""

    object: str
    oid: OidText | None = None
    column: OidText | None = None
    when: Condition | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        many = getattr(self, "oids", None)
        if (self.oid is not None) + (self.column is not None) + bool(many) != 1:
            msg = "must name exactly one of oid and column" + ("" if many is None else ", or oids")
            raise ValueError(msg)
        return self

    @property
    def place(self) -> Oid:
        """The column, or the object, or the first of the objects."""
        return self.column or self.scalars[0]

    @property
    def scalars(self) -> Sequence[Oid]:
        """The objects of a GET; none for a column."""
        return () if self.oid is None else (self.oid,)

    def places(self, tables: Tables) -> Sequence[str]:
        """Return where it is read: the answered rows of a column, or the scalars."""
        return self.scalars if self.column is None else tables.get(self.column, ())

    def applies(self, answers: Answers) -> bool:
        """Whether the condition holds, if there is one."""
        return self.when is None or self.when.holds(answers)

    def read(self, answers: Answers, tables: Tables) -> Iterator[tuple[str, Answer]]:
        """The answers, each with its OID; none if the condition does not hold."""
        if self.applies(answers):
            yield from ((oid, answers[oid]) for oid in self.places(tables)[:MOST_LINES] if oid in answers)


@dataclass(frozen=True, slots=True)
class LineObject:
    """Another object of the same lines. least: from which raw value on it shows that the line is there."""

    column: Oid | None
    scalars: tuple[Oid, ...]
    least: int


class NumberSource(_Place):
    """One place where a number can be read. The first of a field's list that gives a believable number wins.

    none: raw values, or [low, high] ranges of raw values, that mean "not measured".
    valid: what is believable after conversion to our unit; narrows the field's own window.
    or_unit: some firmware sends this unit instead; taken where the value is not believable in `unit` and is in this.
    text: the device sends the number as a string.
    lines: the column has one row per line; only the first so many rows count, as that number of lines says.
    rows: which rows of the table count. combine: how they become one number; None: as the field's own.
    oids: in place of a column, for MIBs that name the lines one by one: a scalar for each line, in order.
    """

    oids: list[OidText] = Field(default_factory=list, max_length=12)
    unit: Annotated[str, AfterValidator(_known_unit)]
    or_unit: Annotated[str, AfterValidator(_known_unit)] | None = None
    none: list[Number | Span] = Field(default_factory=list)
    valid: Span | None = None
    text: bool = False
    lines: Literal["input", "output"] | None = None
    rows: Rows | None = None
    combine: Combine | None = None
    _field: str = PrivateAttr("")
    _counter: Oid | None = PrivateAttr(None)
    _line_objects: tuple[LineObject, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _of_tables(self) -> Self:
        for name in ("lines", "rows", "combine"):
            if getattr(self, name) is not None and self.column is None and (name == "rows" or not self.oids):
                msg = f"{name} belongs to a column"
                raise ValueError(msg)
        if self.or_unit is not None and UNITS[self.or_unit][0] != UNITS[self.unit][0]:
            msg = f"or_unit {self.or_unit!r} is no {UNITS[self.unit][0]}"
            raise ValueError(msg)
        return self

    @property
    def scalars(self) -> Sequence[Oid]:
        """As of any place; of oids, all of them."""
        return self.oids or super().scalars

    def resolve(self, field: str, lines: "Lines", line_objects: Sequence[LineObject]) -> None:
        """Take in what the rest of the profile adds.

        Of other objects, those of the same table or in similar scalars.
        """
        self._field = field
        counter: Scalar | None = None if self.lines is None else getattr(lines, self.lines)
        self._counter = None if counter is None else counter.oid
        self._line_objects = tuple(one for one in line_objects if self._shares_lines_with(one))

    def _shares_lines_with(self, one: LineObject) -> bool:
        if self.column is None:
            return bool(one.scalars) and self.place not in one.scalars and len(self.oids) > 1
        table = self.column.rpartition(".")[0]
        return one.column not in {None, self.column} and str(one.column).rpartition(".")[0] == table

    @property
    def field(self) -> str:
        """The number of a reading that it provides."""
        return self._field

    @property
    def line_objects(self) -> tuple[LineObject, ...]:
        """Objects that show which lines are there."""
        return self._line_objects

    @property
    def combines(self) -> Combine:
        """How rows become one number."""
        return self.combine or NUMBERS[self._field].combine

    def count(self, answers: Answers) -> int | None:
        """Return how many lines the device says it has; None if it does not, or if the number is implausible."""
        count = None if self._counter is None else answers.get(self._counter)
        return count if isinstance(count, int) and 1 <= count <= MOST_LINES else None

    def convert(self, raw: Answer) -> tuple[float | None, str]:
        """Return the value in our unit, or None and why; "" when there is no value."""
        if isinstance(raw, Missing):
            return None, raw.value if raw is Missing.NULL else ""
        if isinstance(raw, int):
            number: Number = raw
        elif self.text and isinstance(raw, bytes):
            text = raw.strip(PADDING)
            if _THOUSANDS.fullmatch(text):
                return None, "ambiguous: thousands, or a decimal comma"
            text = text.replace(b",", b".")
            if not _DECIMAL.fullmatch(text):
                return None, "no decimal number"
            number = float(text)
        else:
            return None, "text where a number belongs"
        if self._means_nothing(number):
            # "No countdown runs", RFC 1628's own -1, is an answer and no value to reject.
            return None, "" if self._field == "output_off_in_s" and number in (-1, 0) else "means: not measured"
        if abs(number) > _BIGGEST_RAW:
            return None, "larger than any SNMP number"
        window = NUMBERS[self._field]
        low, high = self.valid or (None, None)
        lowest = window.lowest if low is None else max(window.lowest, low)
        highest = window.highest if high is None else min(window.highest, high)
        values = [round(number * UNITS[unit][1], 6) for unit in (self.unit, self.or_unit) if unit is not None]
        for value in values:
            if lowest <= value <= highest:
                return value, ""
        return None, f"{values[0]:g} is outside of what is believable ({lowest:g} to {highest:g})"

    def _means_nothing(self, number: Number) -> bool:
        """Whether a raw number is the profile's own "not measured", a full counter, or -1."""
        if number in SATURATED or is_one_of(number, self.none):
            return True
        return self._field == "runtime_s" and (number in CEILINGS or (self.unit == "min" and number in CEILINGS_MIN))


class _Enumeration(_Place):
    """An enumeration. null: this value has no meaning, and the next source is asked. texts: in small letters."""

    values: Mapping[int, Any]
    texts: Mapping[str, Any]

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.values and not self.texts:
            msg = "must have values or texts"
            raise ValueError(msg)
        for text in self.texts:
            if text != text.strip().lower():
                msg = f"texts are written in small letters, got {text!r}"
                raise ValueError(msg)
        return self

    def word(self, raw: Answer) -> Any:  # noqa: ANN401 - the word of the enumeration, as its fields have it
        """Return what a value means, None when it has no meaning. Raises KeyError for one that is not listed."""
        if isinstance(raw, bytes):
            return self.texts[raw.strip(PADDING).decode("utf-8", "replace").lower()]
        return self.values[raw]  # type: ignore[index]  # an OID is not a key, and counts as unlisted


class OutputSourceSource(_Enumeration):
    """Where the output comes from. A value that is not listed is `unknown`, with a note."""

    values: dict[int, OutputSource | None] = Field(default_factory=dict)
    texts: dict[str, OutputSource | None] = Field(default_factory=dict)


class BatteryStatusSource(_Enumeration):
    """How the battery is. As for the output source."""

    values: dict[int, BatteryStatus | None] = Field(default_factory=dict)
    texts: dict[str, BatteryStatus | None] = Field(default_factory=dict)


class StateSource(_Place):
    """An object that says yes when its value is in `is`: numbers, [low, high] ranges or OIDs. Of a table: any row.

    of: every value that the MIB defines. Another one is rejected and counts neither as yes nor as no.
    """

    is_: list[int | OidText | Span] = Field(alias="is", min_length=1)
    of: list[int | OidText | Span] = Field(default_factory=list)


class OutletTable(Part):
    """A table with one row per outlet. The outlet's number is the end of the row's index."""

    object: str
    column: OidText
    values: dict[int, OutletState] = Field(min_length=1)


Readable = NumberSource | OutputSourceSource | BatteryStatusSource | StateSource


class FlagString(Part):
    """A string of 0 and 1; flags: position (the first is 1) and what a 1 there means."""

    object: str
    oid: OidText
    flags: dict[Annotated[int, Field(ge=1, le=4096)], State] = Field(min_length=1)


class AlarmTable(Part):
    """A table whose rows are OIDs of alarms; walked only while `count` is above 0."""

    object: str
    count: Scalar
    column: OidText
    values: dict[OidText, State] = Field(min_length=1)


class LineVolts(Part):
    """The volts of each line: rows of a `column`, or `oids`, one for each line, in order."""

    object: str
    column: OidText | None = None
    oids: list[OidText] = Field(default_factory=list, max_length=12)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.column is not None) + bool(self.oids) != 1:
            msg = "must name exactly one of column and oids"
            raise ValueError(msg)
        return self


class Lines(Part):
    """Objects that say how many lines the UPS really has; cards answer three rows for one-phase units.

    output_volts: a line that has some at the output is there; most cards report them, and few the number of lines.
    """

    input: Scalar | None = None
    output: Scalar | None = None
    output_volts: LineVolts | None = None


class Match(Part):
    """Hints to who made the card. Only hints: probing decides."""

    sys_object_ids: list[OidText] = Field(default_factory=list)
    sys_descr: list[str] = Field(default_factory=list)


class ProbeFields(Part):
    """The objects that a device must answer believably for the profile to fit.

    All of all_of, one of any_of, and a value, whatever it is, for each object of present.
    """

    all_of: list[str] = Field(default_factory=list)
    any_of: list[str] = Field(default_factory=list)
    present: list[Scalar] = Field(default_factory=list)

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if not self.all_of and not self.any_of:
            msg = "must name a field in all_of or any_of"
            raise ValueError(msg)
        return self


class OnBatteryWitnesses(Part):
    """Which parts of the same answer may support a bare "battery"; leave out one that this family gets wrong."""

    confirm_by: list[Witness] = Field(default_factory=lambda: list(WITNESSES))


class Profile(Options):
    """One family of UPSes or rack PDUs.

    rank: several profiles may fit one device; the higher rank is believed first, field by field.
    restart_charge: the setting that says at which charge (%) the UPS switches its output on again; doctor asks it.
    traps: trap OIDs and their meaning; version 1 is ENTERPRISE.0.SPECIFIC (RFC 3584 section 3.1).
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    title: str
    kind: Kind = "ups"
    rank: int = Field(default=10, ge=0, le=100)
    base: OidText | None = None
    match: Match = Match()
    probe: ProbeFields
    lines: Lines = Lines()
    output_source: list[OutputSourceSource] = Field(default_factory=list)
    battery_status: list[BatteryStatusSource] = Field(default_factory=list)
    numbers: dict[str, list[NumberSource]] = Field(default_factory=dict)
    outlets: list[OutletTable] = Field(default_factory=list)
    states: dict[State, list[StateSource]] = Field(default_factory=dict)
    flag_strings: list[FlagString] = Field(default_factory=list)
    alarm_table: AlarmTable | None = None
    on_battery: OnBatteryWitnesses = OnBatteryWitnesses()
    restart_charge: Scalar | None = None
    controls: dict[Verb, Control] = Field(default_factory=dict)
    traps: dict[OidText, State | TrapEvent] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        mistakes = [*_wrong_numbers(self), *_wrong_probe(self), *_wrong_kind(self), *_wrong_controls(self)]
        if isinstance(info.context, Root) and info.context.missed:
            mistakes.append(((), "an OID with a leading dot needs a base"))
        if mistakes:
            context = {"count": len(mistakes), "mistakes": mistakes}
            raise PydanticCustomError("profile", "{count} mistakes", context)  # noqa: EM101 - its type, no message
        line_objects = _line_objects_of(self)
        for field, sources in self.numbers.items():
            for source in sources:
                source.resolve(field, self.lines, line_objects)
        return self

    def _readable(self) -> Iterator[Readable]:
        yield from self.output_source
        yield from self.battery_status
        for numbers in self.numbers.values():
            yield from numbers
        for states in self.states.values():
            yield from states

    def scalars(self) -> tuple[Oid, ...]:
        """Every object to GET, the output source first, each once."""
        found: list[Oid] = []
        for source in self._readable():
            found += [*source.scalars, *([] if source.when is None else [source.when.oid])]
        found += [source.oid for source in self.flag_strings]
        found += [scalar.oid for scalar in (self.lines.input, self.lines.output) if scalar is not None]
        found += [] if self.lines.output_volts is None else self.lines.output_volts.oids
        found += [] if self.alarm_table is None else [self.alarm_table.count.oid]
        return tuple(dict.fromkeys(found))

    def columns(self) -> tuple[Oid, ...]:
        """Every table column to walk once; its rows are then polled by GET (indices vary: .1, .1.0, .0.1)."""
        found: list[Oid | None] = []
        for source in self._readable():
            found.append(source.column)
            if isinstance(source, NumberSource) and source.rows is not None:
                found.append(source.rows.column)
        found += [table.column for table in self.outlets]
        found += [] if self.lines.output_volts is None else [self.lines.output_volts.column]
        return tuple(column for column in dict.fromkeys(found) if column is not None)

    @cached_property
    def _tables(self) -> tuple[frozenset[str], tuple[str, ...]]:
        columns = [*self.columns(), *([] if self.alarm_table is None else [self.alarm_table.column])]
        return frozenset(columns), tuple(f"{column}." for column in columns)

    def tables(self, answers: Answers) -> Tables:
        """Return the rows of every column that were answered, in the order of their indices."""
        columns, stems = self._tables
        found: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        for oid in answers:
            column = oid if oid.startswith(stems) else ""
            while column and column not in columns:
                column = column.rpartition(".")[0]
            if column:
                found.setdefault(column, []).append((parts(oid[len(column) + 1 :]), oid))
        return {column: [oid for _, oid in sorted(rows)] for column, rows in found.items()}

    def mandatory(self) -> tuple[Oid, ...]:
        """The objects to GET to recognise this family; of tables, where a first row may be."""
        return self._asked((*self.probe.all_of, *self.probe.any_of), [scalar.oid for scalar in self.probe.present])

    def first_asked(self) -> tuple[Oid, ...]:
        """The part of `mandatory` without which there is no need to ask for the rest."""
        if self.probe.all_of:
            return self._asked(self.probe.all_of[:1], [])
        return self._asked(self.probe.any_of, [])

    def _asked(self, names: Sequence[str], places: list[Oid]) -> tuple[Oid, ...]:
        for name in dict.fromkeys(names):
            for source in self.sources_of(name):
                if isinstance(source, OutletTable) or source.column is not None:
                    places += [Oid(f"{source.column}{row}") for row in FIRST_ROWS]
                else:
                    places += source.scalars
        return tuple(dict.fromkeys(places))

    def sources_of(self, name: str) -> Sequence[Readable | OutletTable]:
        """Return where a field of `probe` is read."""
        named: dict[str, Sequence[Readable | OutletTable]] = {
            "output_source": self.output_source,
            "battery_status": self.battery_status,
            "outlets": self.outlets,
        }
        return named[name] if name in named else self.numbers.get(name, [])


# --- What must hold in the whole of a file -----------------------------------------------------------------------

Mistake = tuple[tuple[str | int, ...], str]
"""Where in the file, and what is wrong there."""


def _line_objects_of(profile: Profile) -> list[LineObject]:
    """Return the objects of lines: columns of numbers, scalars in a row, and the volts at the output."""
    found = [
        LineObject(source.column, tuple(source.oids), 1)
        for field, sources in profile.numbers.items()
        for source in sources
        if source.column is not None or (source.oids and field in OF_ALL_LINES)
    ]
    volts = profile.lines.output_volts
    if volts is not None:
        found.append(LineObject(volts.column, tuple(volts.oids), _LEAST_VOLTS))
    return found


def _wrong_numbers(profile: Profile) -> Iterator[Mistake]:
    read_as: dict[str, str] = {}
    for field, sources in profile.numbers.items():
        if field not in NUMBERS:
            yield ("numbers", field), f"unknown field (one of: {', '.join(NUMBERS)})"
            continue
        here: list[NumberSource] = []
        for index, source in enumerate(sources):
            path = ("numbers", field, index)
            if UNITS[source.unit][0] != NUMBERS[field].dimension:
                yield (*path, "unit"), f"unit {source.unit!r} is no {NUMBERS[field].dimension}"
            if source.lines is not None and getattr(profile.lines, source.lines) is None:
                yield (*path, "lines"), f"lines.{source.lines} is not given"
            if any((source.place, source.rows, source.when) == (one.place, one.rows, one.when) for one in here):
                yield path, f"the same object twice in {field}"
            for place in source.oids or [source.place]:
                if read_as.setdefault(place, field) != field:
                    yield path, f"this object is already read as {read_as[place]}"
            here.append(source)


def _wrong_probe(profile: Profile) -> Iterator[Mistake]:
    for word, names in (("all_of", profile.probe.all_of), ("any_of", profile.probe.any_of)):
        for index, name in enumerate(names):
            if not profile.sources_of(name):
                yield ("probe", word, index), f"{name!r} is not a field of this profile"


def _wrong_kind(profile: Profile) -> Iterator[Mistake]:
    if profile.kind == "ups":
        if not profile.output_source:
            yield (), "output_source is missing: a UPS must say where its output comes from"
        if profile.outlets:
            yield ("outlets",), "outlets belong to kind: pdu"
        return
    for name in ("output_source", "battery_status"):
        if profile.sources_of(name):
            yield (name,), f"a PDU has no {name} (kind: pdu)"
    if not profile.outlets and not {"watts", "amps"} & profile.numbers.keys():
        yield (), "a PDU needs outlets, watts or amps, but the profile has none of them"


def _wrong_controls(profile: Profile) -> Iterator[Mistake]:
    for verb, control in profile.controls.items():
        path = ("controls", verb.value)
        has_column = any(step.column is not None for step in control.sets)
        if verb in OF_OUTLETS and not has_column:
            yield path, "acts on an outlet, and no step has a column to which its number could be added"
        if verb not in OF_OUTLETS and has_column:
            yield path, "acts on the whole output, and a step has a column (use oid)"
        if (verb in COUNT_DOWN) != (control.utility_returns_during_countdown is not None):
            wanted = "is missing" if verb in COUNT_DOWN else "belongs to commands that count down"
            yield path, f"utility_returns_during_countdown {wanted}"
        if control.undo is not None and (control.undo not in profile.controls or control.undo not in CANCELS):
            yield (*path, "undo"), f"{control.undo.value} is not a cancel command of this profile"
