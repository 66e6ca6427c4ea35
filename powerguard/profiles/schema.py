"""What a profile file may say. Data only: no expressions, no code; every word is from a closed list."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from powerguard.core.events import OutputSource
from powerguard.options import Options
from powerguard.profiles.values import Oid
from powerguard.profiles.vocabulary import NUMBERS, UNITS, WITNESSES, State, Witness

_ABSOLUTE = r"(0|1|2)(\.(0|[1-9][0-9]*))+"
_RELATIVE = r"(\.(0|[1-9][0-9]*))+"
OidText = Annotated[
    str,
    Field(
        pattern=rf"^({_ABSOLUTE}|{_RELATIVE})$",
        max_length=512,  # not counted in the pattern: that costs 4 MB in pydantic's regex engine
        examples=[".4.1.0", "1.3.6.1.2.1.33.1.4.1.0"],
    ),
]
"""A dotted OID; with a leading dot it continues the profile's `base`."""

Number = int | float
Range = tuple[Number | None, Number | None]


def _misplaced(path: tuple[str | int, ...], what: str) -> PydanticCustomError:
    """Return an error that a check of the whole file finds, with the place in the file that it is about."""
    return PydanticCustomError("profile", "{what}", {"what": what, "path": path})


def _known_unit(unit: str) -> str:
    if unit not in UNITS:
        msg = f"unknown unit {unit!r} (one of: {', '.join(UNITS)})"
        raise ValueError(msg)
    return unit


def _ordered(span: Range) -> Range:
    low, high = span
    if low is not None and high is not None and low > high:
        msg = f"range [{low}, {high}] runs backwards"
        raise ValueError(msg)
    return span


Span = Annotated[Range, AfterValidator(_ordered)]


class Condition(Options):
    """Another object must have one of these values (numbers or OIDs), else the source it stands on is not asked."""

    object: str
    oid: OidText
    is_: list[int | OidText] = Field(alias="is", min_length=1)


class NumberSource(Options):
    """One place where a number can be read. The first of a field's list that gives a believable number wins.

    none: raw values, or [low, high] ranges of raw values, that mean "not measured".
    valid: what is believable after conversion to our unit; narrows the field's own window.
    text: the device sends the number as a string.
    lines: the column has one row per line; only the first so many rows count, as that number of lines says.
    """

    object: str
    oid: OidText | None = None
    column: OidText | None = None
    unit: Annotated[str, AfterValidator(_known_unit)]
    none: list[Number | Span] = Field(default_factory=list)
    valid: Span | None = None
    text: bool = False
    lines: Literal["input", "output"] | None = None
    when: Condition | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.oid is None) == (self.column is None):
            msg = "must name exactly one of oid and column"
            raise ValueError(msg)
        if self.lines is not None and self.column is None:
            msg = "lines belongs to a column"
            raise ValueError(msg)
        return self


class OutputSourceSource(Options):
    """An enumeration that says where the output comes from. A value that is not listed is `unknown`, with a note."""

    object: str
    oid: OidText
    values: dict[int, OutputSource] = Field(min_length=1)
    when: Condition | None = None


class StateSource(Options):
    """An object that says yes when its value is in `is`."""

    object: str
    oid: OidText
    is_: list[int | OidText] = Field(alias="is", min_length=1)
    when: Condition | None = None


class FlagString(Options):
    """A string of 0 and 1; flags: position (the first is 1) and what a 1 there means."""

    object: str
    oid: OidText
    flags: dict[Annotated[int, Field(ge=1, le=4096)], State] = Field(min_length=1)


class Scalar(Options):
    """One object, by name and place."""

    object: str
    oid: OidText


class AlarmTable(Options):
    """A table whose rows are OIDs of alarms; walked only while `count` is above 0."""

    object: str
    count: Scalar
    column: OidText
    values: dict[OidText, State] = Field(min_length=1)


class Lines(Options):
    """Objects that say how many lines the UPS really has; cards answer three rows for one-phase units."""

    input: Scalar | None = None
    output: Scalar | None = None


class Match(Options):
    """Hints to who made the card. Only hints: probing decides."""

    sys_object_ids: list[OidText] = Field(default_factory=list)
    sys_descr: list[str] = Field(default_factory=list)


class Probe(Options):
    """What a device must answer believably for the profile to be its own: all of all_of and one of any_of."""

    all_of: list[str] = Field(min_length=1)
    any_of: list[str] = Field(default_factory=list)


class OnBattery(Options):
    """Which parts of the same answer may support a bare "battery"; leave out one that this family gets wrong."""

    confirm_by: list[Witness] = Field(default_factory=lambda: list(WITNESSES))


class Profile(Options):
    """One UPS family.

    rank: several profiles may fit one device; the higher rank is believed first, field by field.
    controls: reserved for the commands of the family (SET); nothing may stand there yet.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    title: str
    rank: int = Field(default=10, ge=0, le=100)
    base: OidText | None = None
    match: Match = Match()
    probe: Probe
    lines: Lines = Lines()
    output_source: list[OutputSourceSource] = Field(min_length=1)
    numbers: dict[str, list[NumberSource]] = Field(default_factory=dict)
    states: dict[State, list[StateSource]] = Field(default_factory=dict)
    flag_strings: list[FlagString] = Field(default_factory=list)
    alarm_table: AlarmTable | None = None
    on_battery: OnBattery = OnBattery()
    controls: dict[str, None] = Field(default_factory=dict, max_length=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field, sources in self.numbers.items():
            if field not in NUMBERS:
                raise _misplaced(("numbers", field), f"unknown field (one of: {', '.join(NUMBERS)})")
            for index, source in enumerate(sources):
                if UNITS[source.unit][0] != NUMBERS[field].dimension:
                    what = f"unit {source.unit!r} is no {NUMBERS[field].dimension}"
                    raise _misplaced(("numbers", field, index, "unit"), what)
                if source.lines is not None and getattr(self.lines, source.lines) is None:
                    raise _misplaced(("numbers", field, index, "lines"), f"lines.{source.lines} is not given")
            places = [self.absolute(source.oid or source.column or "") for source in sources]
            if len(set(places)) != len(places):
                raise _misplaced(("numbers", field), "the same object twice")
        known = {"output_source", *self.numbers}
        for word, names in (("all_of", self.probe.all_of), ("any_of", self.probe.any_of)):
            for index, name in enumerate(names):
                if name not in known:
                    raise _misplaced(("probe", word, index), f"{name!r} is no field of this profile")
        return self

    @model_validator(mode="after")
    def _rooted(self) -> Self:
        columns = [
            source.column for sources in self.numbers.values() for source in sources if source.column is not None
        ]
        if self.alarm_table is not None:
            columns.append(self.alarm_table.column)
        if self.base is None and any(place.startswith(".") for place in (*self._places(), *columns)):
            msg = "an OID with a leading dot needs a base"
            raise ValueError(msg)
        return self

    def absolute(self, place: str) -> Oid:
        """Return the whole OID of a place in this file."""
        return Oid(f"{self.base}{place}" if place.startswith(".") else place)

    def _conditions(self) -> list[Condition]:
        found = [source.when for sources in self.numbers.values() for source in sources]
        found += [source.when for source in self.output_source]
        found += [source.when for sources in self.states.values() for source in sources]
        return [condition for condition in found if condition is not None]

    def _places(self) -> list[str]:
        places = [source.oid for source in self.output_source]
        places += [source.oid for sources in self.numbers.values() for source in sources if source.oid is not None]
        places += [source.oid for sources in self.states.values() for source in sources]
        places += [source.oid for source in self.flag_strings]
        places += [scalar.oid for scalar in (self.lines.input, self.lines.output) if scalar is not None]
        places += [condition.oid for condition in self._conditions()]
        if self.alarm_table is not None:
            places.append(self.alarm_table.count.oid)
        return places

    def scalars(self) -> tuple[Oid, ...]:
        """Every object to GET, the output source first, each once."""
        return tuple(dict.fromkeys(self.absolute(place) for place in self._places()))

    def columns(self) -> tuple[Oid, ...]:
        """Every table column to walk once; its rows are then polled by GET (indices vary: .1, .1.0, .0.1)."""
        found = (source.column for sources in self.numbers.values() for source in sources)
        return tuple(dict.fromkeys(self.absolute(column) for column in found if column is not None))

    def mandatory(self) -> tuple[Oid, ...]:
        """The scalars that tell whether a device speaks this family."""
        names = {*self.probe.all_of, *self.probe.any_of}
        places = [source.oid for source in self.output_source] if "output_source" in names else []
        places += [
            source.oid
            for name in self.numbers
            if name in names
            for source in self.numbers[name]
            if source.oid is not None
        ]
        return tuple(dict.fromkeys(self.absolute(place) for place in places))
