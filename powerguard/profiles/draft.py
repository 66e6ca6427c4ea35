"""A reading in the making, shared by the decoder and the cross-checks."""

from dataclasses import dataclass, field
from typing import NamedTuple

from powerguard.core.readings import OutputSource
from powerguard.profiles.values import Answer
from powerguard.profiles.vocabulary import LOW, BatteryStatus, OutletState, State


class Rejected(NamedTuple):
    """A value that was answered and not believed."""

    field: str
    oid: str
    raw: Answer | str
    why: str


@dataclass(slots=True)
class Draft:
    """What has been decoded so far.

    candidates: for each number, what each profile gives, most trusted first: (value, object).
    lines: the rows behind a number that was read from a table. replace_told: something was said of replacing.
    """

    output_source: OutputSource | None = None
    input_present: bool | None = None
    battery_status: BatteryStatus | None = None
    replace_told: bool = False
    outlets: list[tuple[str, OutletState]] = field(default_factory=list)
    lines: dict[str, tuple[float, ...]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    candidates: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    states: dict[State, str] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def on_battery(self) -> bool:
        return self.output_source is OutputSource.BATTERY

    @property
    def low_battery(self) -> bool:
        return bool(LOW & self.states.keys())

    def reject(self, name: str, oid: str, raw: Answer | str, why: str) -> None:
        self.rejected.append(Rejected(name, oid, raw, why))

    def drop(self, name: str, why: str) -> None:
        """Take a number back that does not go with the others."""
        value = self.numbers.pop(name)
        self.reject(name, self.provenance.pop(name), round(value), why)

    def next(self, name: str, why: str) -> None:
        """Take a number back, and believe the next most trusted profile instead, where there is one."""
        self.drop(name, why)
        self.candidates[name] = self.candidates[name][1:]
        if self.candidates[name]:
            self.numbers[name], self.provenance[name] = self.candidates[name][0]
