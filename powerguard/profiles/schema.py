"""What a profile file may say. Data only: no expressions, no code; every word is from a closed list."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from powerguard.core.readings import OutputSource
from powerguard.options import Options
from powerguard.profiles.controls import CANCELS, COUNT_DOWN, OF_OUTLETS, Control, Verb
from powerguard.profiles.places import Condition, Number, OidText, Part, Rows, Scalar, Span
from powerguard.profiles.values import Oid
from powerguard.profiles.vocabulary import (
    NUMBERS,
    UNITS,
    WITNESSES,
    BatteryStatus,
    Combine,
    OutletState,
    State,
    TrapEvent,
    Witness,
)

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
    def place(self) -> str:
        return self.oid or self.column or next(iter(self.scalars), "")

    @property
    def scalars(self) -> Sequence[str]:
        """What a GET asks for by itself; nothing of a column."""
        return () if self.oid is None else (self.oid,)


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
    def scalars(self) -> Sequence[str]:
        """As of any place; of oids, all of them."""
        return self.oids or super().scalars


class OutputSourceSource(_Place):
    """An enumeration that says where the output comes from. A value that is not listed is `unknown`, with a note.

    null: this value says nothing about it; the next source is asked. texts: the same for strings, in small letters.
    """

    values: dict[int, OutputSource | None] = Field(default_factory=dict)
    texts: dict[str, OutputSource | None] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        _check_values(self)
        return self


class BatteryStatusSource(_Place):
    """An enumeration that says how the battery is. As for the output source."""

    values: dict[int, BatteryStatus | None] = Field(default_factory=dict)
    texts: dict[str, BatteryStatus | None] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        _check_values(self)
        return self


def _check_values(source: OutputSourceSource | BatteryStatusSource) -> None:
    if not source.values and not source.texts:
        msg = "must have values or texts"
        raise ValueError(msg)
    for text in source.texts:
        if text != text.strip().lower():
            msg = f"texts are written in small letters, got {text!r}"
            raise ValueError(msg)


class StateSource(_Place):
    """An object that says yes when its value is in `is`: numbers, [low, high] ranges or OIDs. Of a table: any row.

    of: every value that the MIB defines. Another one is rejected and answers nothing, neither yes nor no.
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

    output_volts: a line that has some at the output is there; most cards tell them, and few the number of lines.
    """

    input: Scalar | None = None
    output: Scalar | None = None
    output_volts: LineVolts | None = None


class Match(Part):
    """Hints to who made the card. Only hints: probing decides."""

    sys_object_ids: list[OidText] = Field(default_factory=list)
    sys_descr: list[str] = Field(default_factory=list)


class Probe(Part):
    """What a device must answer believably for the profile to be its own.

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


class OnBattery(Part):
    """Which parts of the same answer may support a bare "battery"; leave out one that this family gets wrong."""

    confirm_by: list[Witness] = Field(default_factory=lambda: list(WITNESSES))


class Profile(Options):
    """One family of UPSes or rack PDUs.

    rank: several profiles may fit one device; the higher rank is believed first, field by field.
    restart_charge: the setting that says at which charge (%) the UPS switches its output on again; doctor asks it.
    traps: trap OIDs and what they tell; version 1 is ENTERPRISE.0.SPECIFIC (RFC 3584 section 3.1).
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    title: str
    kind: Kind = "ups"
    rank: int = Field(default=10, ge=0, le=100)
    base: OidText | None = None
    match: Match = Match()
    probe: Probe
    lines: Lines = Lines()
    output_source: list[OutputSourceSource] = Field(default_factory=list)
    battery_status: list[BatteryStatusSource] = Field(default_factory=list)
    numbers: dict[str, list[NumberSource]] = Field(default_factory=dict)
    outlets: list[OutletTable] = Field(default_factory=list)
    states: dict[State, list[StateSource]] = Field(default_factory=dict)
    flag_strings: list[FlagString] = Field(default_factory=list)
    alarm_table: AlarmTable | None = None
    on_battery: OnBattery = OnBattery()
    restart_charge: Scalar | None = None
    controls: dict[Verb, Control] = Field(default_factory=dict)
    traps: dict[OidText, State | TrapEvent] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes = [*_wrong_numbers(self), *_wrong_probe(self), *_wrong_kind(self), *_wrong_controls(self)]
        mistakes += [(path, "an OID with a leading dot needs a base") for path in _rootless(self)]
        if mistakes:
            told = {"count": len(mistakes), "mistakes": mistakes}
            raise PydanticCustomError("profile", "{count} mistakes", told)  # noqa: EM101 - its type, no message
        return self

    def absolute(self, place: str) -> Oid:
        """Return the whole OID of a place in this file."""
        return Oid(f"{self.base}{place}" if place.startswith(".") else place)

    def number_sources(self) -> Iterator[NumberSource]:
        """Every place of every number."""
        for sources in self.numbers.values():
            yield from sources

    def _readable(self) -> Iterator[Readable]:
        yield from self.output_source
        yield from self.battery_status
        yield from self.number_sources()
        for sources in self.states.values():
            yield from sources

    def _scalars(self) -> Iterator[str]:
        for source in self._readable():
            yield from source.scalars
            if source.when is not None:
                yield source.when.oid
        yield from (source.oid for source in self.flag_strings)
        yield from (scalar.oid for scalar in (self.lines.input, self.lines.output) if scalar is not None)
        if self.lines.output_volts is not None:
            yield from self.lines.output_volts.oids
        if self.alarm_table is not None:
            yield self.alarm_table.count.oid

    def _columns(self) -> Iterator[str]:
        for source in self._readable():
            if source.column is not None:
                yield source.column
            if isinstance(source, NumberSource) and source.rows is not None:
                yield source.rows.column
        yield from (table.column for table in self.outlets)
        if self.lines.output_volts is not None and self.lines.output_volts.column is not None:
            yield self.lines.output_volts.column

    def scalars(self) -> tuple[Oid, ...]:
        """Every object to GET, the output source first, each once."""
        return tuple(dict.fromkeys(self.absolute(place) for place in self._scalars()))

    def columns(self) -> tuple[Oid, ...]:
        """Every table column to walk once; its rows are then polled by GET (indices vary: .1, .1.0, .0.1)."""
        return tuple(dict.fromkeys(self.absolute(column) for column in self._columns()))

    def mandatory(self) -> tuple[Oid, ...]:
        """What to GET to find out whether a device speaks this family; of tables, where a first row may be."""
        return self._asked((*self.probe.all_of, *self.probe.any_of), [scalar.oid for scalar in self.probe.present])

    def first_asked(self) -> tuple[Oid, ...]:
        """The part of `mandatory` without which there is no need to ask for the rest."""
        if self.probe.all_of:
            return self._asked(self.probe.all_of[:1], [])
        return self._asked(self.probe.any_of, [])

    def _asked(self, names: Sequence[str], places: list[str]) -> tuple[Oid, ...]:
        for name in dict.fromkeys(names):
            for source in self.sources_of(name):
                if isinstance(source, OutletTable) or source.column is not None:
                    places += [f"{source.column}{row}" for row in FIRST_ROWS]
                else:
                    places += source.scalars
        return tuple(dict.fromkeys(self.absolute(place) for place in places))

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
            for place in map(profile.absolute, source.oids or [source.place]):
                if read_as.setdefault(place, field) != field:
                    yield path, f"this object is already read as {read_as[place]}"
            here.append(source)


def _wrong_probe(profile: Profile) -> Iterator[Mistake]:
    for word, names in (("all_of", profile.probe.all_of), ("any_of", profile.probe.any_of)):
        for index, name in enumerate(names):
            if not profile.sources_of(name):
                yield ("probe", word, index), f"{name!r} is no field of this profile"


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
        yield (), "a PDU tells outlets, watts or amps, and none of them is here"


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
            yield (*path, "undo"), f"{control.undo.value} is no cancel command of this profile"


def _rootless(profile: Profile) -> Iterator[tuple[str | int, ...]]:
    if profile.base is not None:
        return
    places = [*profile._scalars(), *profile._columns(), *profile.traps]  # noqa: SLF001 - the same file
    places += [scalar.oid for scalar in profile.probe.present]
    if profile.alarm_table is not None:
        places += [profile.alarm_table.column, *profile.alarm_table.values]
    for control in profile.controls.values():
        places += [need.oid for need in control.needs]
        places += [step.oid or step.column or "" for step in control.sets]
    if any(place.startswith(".") for place in places):
        yield ()
