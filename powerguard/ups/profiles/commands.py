"""A command of a family made ready for one device: what is read first, what is SET, and whether the device did it.

Pure: bytes and sockets are elsewhere. A delay is rounded up wherever it does not fit an object's unit or its allowed
values: an output that goes off later than asked costs battery, one that goes off sooner costs a host.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

from powerguard.ups.profiles.schema import OF_OUTLETS, Control, Profile, SetStep, SetType, Verb
from powerguard.ups.profiles.vocabulary import SATURATED, UNITS, Answer, Missing, Oid

_SLACK_S: Final = 5.0
"""By so much a countdown that is read back may lag: cards look at their UPS every few seconds."""
_NO_COUNTDOWN: Final = 2**31 - 1
"""Raw values from here on are no countdown: -1 of cards without signs, and full objects. Nor is a shorter full one."""


class DelayError(Exception):
    """A delay that the device cannot be given: which, and what it takes."""


@dataclass(frozen=True, slots=True)
class SetOrder:
    """One SET. seconds: what a delay comes to in this object, after rounding; None of a constant."""

    object: str
    oid: Oid
    kind: SetType
    raw: int | str
    read_back: str
    unit_s: float
    seconds: float | None = None

    def unheeded(self, answer: Answer, *, since_s: float) -> str:
        """Return how a GET after it differs from the expected value, "" if it does not. since_s: since the SET."""
        if self.read_back == "none":
            return ""
        if isinstance(answer, Missing):
            return f"{self.object} cannot be read back: {answer.value}"
        reading = answer.decode("utf-8", "replace")[:40] if isinstance(answer, bytes) else answer
        if self.read_back == "exact" or self.seconds is None or not isinstance(answer, int):
            return "" if reading == self.raw else f"{self.object} was set to {self.raw} and reads {reading}"
        reading_s = answer * self.unit_s
        if self.read_back == "rounded":
            return (
                ""
                if reading_s >= self.seconds
                else f"{self.object} was set to {self.seconds:g} s and reads {reading_s:g} s"
            )
        if reading_s <= 0:
            return f"{self.object} was set to {self.seconds:g} s, and no countdown runs"
        if self.seconds - since_s - _SLACK_S <= reading_s <= self.seconds + self.unit_s:
            return ""
        return f"{self.object} was set to {self.seconds:g} s and reads {reading_s:g} s after {since_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Switch:
    """One command of one family. outlet: index of an outlet or outlet group, for the commands that act on one."""

    profile: Profile
    verb: Verb
    outlet: str = ""

    @property
    def control(self) -> Control:
        """Return what the family's file says of it."""
        return self.profile.controls[self.verb]

    @property
    def name(self) -> str:
        """Return what it is called in reports: "xups off_with_return"."""
        return f"{self.profile.name} {self.verb.value}" + (f" of {self.outlet}" if self.outlet else "")

    @property
    def returns(self) -> str:
        """Return what happens when utility returns while it counts down."""
        return self.control.utility_returns_during_countdown or "unknown"

    @property
    def undo(self) -> "Switch | None":
        """Return the command that cancels it; None: there is none."""
        undo = self.control.undo
        return None if undo is None else Switch(self.profile, undo, self.outlet)

    @property
    def shows(self) -> bool:
        """Whether the device reports its countdown."""
        return self._acts.delay == "off_s" and self._acts.read_back == "countdown"

    @property
    def _acts(self) -> SetStep:
        return self.control.sets[-1]

    @property
    def longest_s(self) -> float | None:
        """Return the longest time until off that it takes; None: it acts at once, or says no time at all."""
        for step in self.control.sets:
            if step.delay == "off_s":
                return float(max(step.allowed)) if step.allowed else (step.range or (0, None))[1]
        return None

    def reads(self) -> tuple[Oid, ...]:
        """Return what to GET before anything is set: every object of it, and those that it needs."""
        needs = (need.oid for need in self.control.needs)
        return tuple(dict.fromkeys((*needs, *(self.place(step) for step in self.control.sets))))

    def lacks(self, answers: Mapping[str, Answer]) -> list[str]:
        """Return the objects that the device would have to answer, and does not."""
        return [
            step.object
            for step in self.control.sets
            if step.read_back != "none" and isinstance(answers.get(self.place(step), Missing.NO_ANSWER), Missing)
        ]

    def unfit(self, answers: Mapping[str, Answer], *, today: bool) -> list[str]:
        """Return what speaks against it, each in words. today: also what it would mend itself, but ought to stand."""
        found = []
        for need in self.control.needs:
            if not need.holds(answers):
                answer = answers.get(need.oid)
                found.append(f"{need.object} is {_shown(answer)} and must be {' or '.join(map(str, need.is_))}")
        for step in self.control.sets if today else ():
            answer = answers.get(self.place(step))
            if step.standing and answer != step.value:
                found.append(
                    f"{step.object} is {_shown(answer)} and must be {step.value}: set it on the card, for good"
                )
        return found

    def orders(self, *, off_s: float = 0.0, on_s: float = 0.0) -> tuple[SetOrder, ...]:
        """Return the SETs in order; the last one acts. Raises DelayError for a delay that it does not take.

        off_s: until the output goes off, never sooner. on_s: from then, or from utility's return, until it is back.
        """
        delays = {"off_s": off_s, "on_s": on_s, "off_and_on_s": off_s + on_s}
        orders = []
        for step in self.control.sets:
            place = self.place(step)
            if step.delay is None:
                raw = step.value if step.value is not None else 0
                orders.append(SetOrder(step.object, place, step.type, raw, step.read_back, 1.0))
                continue
            unit_s = UNITS[step.unit or "s"][1]
            seconds = _fitted(step, delays[step.delay], unit_s)
            raw = round(seconds / unit_s)
            orders.append(SetOrder(step.object, place, step.type, raw, step.read_back, unit_s, seconds))
        return tuple(orders)

    def countdowns(self) -> dict[Oid, float]:
        """Return the objects of the family that report a countdown to off, with the seconds of their unit.

        Those of every command, of any origin: of the whole output, and of the outlet that is meant.
        """
        found: dict[Oid, float] = {}
        for verb, control in self.profile.controls.items():
            step = control.sets[-1]
            applies = verb not in OF_OUTLETS or bool(self.outlet)
            if applies and step.read_back == "countdown" and step.delay in {"off_s", "on_s"} and step.unit is not None:
                found[self.place(step)] = UNITS[step.unit][1]
        return found

    def standing_s(self, answers: Mapping[str, Answer]) -> float | None:
        """Return the seconds of the countdown that runs out first; None: none runs, or the device reports none."""
        countdowns = [(answers.get(oid), unit_s) for oid, unit_s in self.countdowns().items()]
        running = [
            raw * unit_s
            for raw, unit_s in countdowns
            if isinstance(raw, int) and 0 < raw < _NO_COUNTDOWN and raw not in SATURATED
        ]
        return min(running, default=None)

    def place(self, step: SetStep) -> Oid:
        """Return the object that a step sets."""
        if step.column is not None:
            return Oid(f"{step.column}.{self.outlet}")
        return step.oid or Oid("")


def offered(profiles: tuple[Profile, ...], verb: Verb, outlet: str = "") -> Iterator[Switch]:
    """Return the command of each family that has it, the most trusted first."""
    return (Switch(profile, verb, outlet) for profile in profiles if verb in profile.controls)


def _fitted(step: SetStep, wanted_s: float, unit_s: float) -> float:
    """Return the delay that the object takes and that is not shorter than the wanted one."""
    if step.allowed is not None:
        longer = [seconds for seconds in step.allowed if seconds >= wanted_s]
        if not longer:
            msg = f"{step.object} takes at most {max(step.allowed)} s, and {wanted_s:g} s are needed"
            raise DelayError(msg)
        return float(min(longer))
    low, high = step.range or (0, None)
    seconds = ceil(round(max(float(low or 0), wanted_s) / unit_s, 6)) * unit_s
    if high is not None and seconds > high:
        msg = f"{step.object} takes at most {high:g} s, and {wanted_s:g} s are needed"
        raise DelayError(msg)
    return seconds


def _shown(answer: Answer | None) -> str:
    if answer is None or isinstance(answer, Missing):
        return "not reported"
    return answer.decode("utf-8", "replace")[:40] if isinstance(answer, bytes) else str(answer)
