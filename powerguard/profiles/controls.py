"""What a device can be told: its commands as ordered SETs. Data that is checked when it is read; nothing here sends.

A command that ends in darkness must be told from one that comes back, so the verbs are a closed list, and each says
what happens when utility returns while its countdown runs: only `cycles` brings a host back by itself.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from powerguard.profiles.places import Condition, OidText, Part, Span
from powerguard.profiles.vocabulary import UNITS


class Verb(StrEnum):
    """What a command is for. `outlet_*` act on one outlet or outlet group, the others on the whole output."""

    OFF_WITH_RETURN = "off_with_return"
    """Output off after a delay; on again with utility."""
    OFF_STAYS = "off_stays"
    """Output off after a delay, until somebody switches it on."""
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
        msg = f"unit {unit!r} is no time (one of: {', '.join(name for name, one in UNITS.items() if one[0] == 'time')})"
        raise ValueError(msg)
    return unit


class SetStep(Part):
    """One object to SET. Exactly one of `value`, a constant, and `delay`, which the caller chooses.

    oid: a scalar. column: a table column, to which the index of the outlet is added.
    delay: `off_s` until the output goes off, `on_s` until it comes back (from off, or from utility's return),
        `off_and_on_s` both: a countdown to the return that begins with the order.
    unit: of the object, for a delay. range, allowed: which delays the device takes, in seconds; others it refuses.
    read_back: what a GET of the same object answers afterwards: `exact` the value; `countdown` it runs down from the
        value; `rounded` the device took the next larger one it knows; `none` the object does not tell.
    standing: the device ought to have this value on any day; that it has not is told before an outage, and not in one.
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
    undo: the command that calls it off while it counts down; None: nothing can.
    utility_returns_during_countdown: what the device then does. `cycles`: the output goes off and comes back all the
        same, so hosts boot. `aborts`: the output stays on. `stays_off`: off, and nothing switches it on. `unknown`:
        not told by the MIB and not tried.
    """

    needs: list[Condition] = Field(default_factory=list)
    sets: list[SetStep] = Field(min_length=1, max_length=8)
    undo: Verb | None = None
    utility_returns_during_countdown: Literal["cycles", "aborts", "stays_off", "unknown"] | None = None
