"""From SNMP answers to one reading: pure, total, and slow to believe.

`decode` takes the profiles that fit a device, most trusted first, and whatever the device answered. Every number goes
through the same gates: a type, the profile's sentinels, a window of what is believable; then `checks` compares the
fields with each other. Whatever falls is listed with its reason in `Decoded.rejected`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from powerguard.core.events import OutputSource, Reading
from powerguard.profiles.checks import cross_check
from powerguard.profiles.draft import Draft, Rejected
from powerguard.profiles.schema import Condition, NumberSource, Profile, Scalar
from powerguard.profiles.values import Answer, Missing, Oid, below, parts
from powerguard.profiles.vocabulary import NUMBERS, REPLACE, UNITS, WITNESSES, Combine, State

Answers = Mapping[str, Answer]

_DECIMAL = re.compile(rb"-?[0-9]{1,18}(\.[0-9]{1,9})?")
_BIGGEST_RAW = 2**64
_MOST_LINES = 12
"""Rows of a column that are believed: three phases, or the receptacle groups of a large unit."""
_INPUT_THERE_V = 80.0
_INPUT_GONE_V = 25.0
"""A UPS on battery shows some volts of ghost at its input; 100 V grids sag to 80 V before it transfers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What one set of answers says, with where each field came from and what was not believed.

    Fields as in `core.model.Reading`. output_source is None when no profile's object was answered at all: then there
    is no reading. stale: why the values are frozen (the card has lost its UPS); None when they are live.
    witnesses: which parts of the same answer support "on battery" by themselves.
    """

    output_source: OutputSource | None
    runtime_s: float | None = None
    charge_pct: float | None = None
    load_pct: float | None = None
    watts: float | None = None
    on_battery_s: float | None = None
    input_present: bool | None = None
    input_v: float | None = None
    battery_temp_c: float | None = None
    output_off_in_s: float | None = None
    low_battery: bool = False
    replace_battery: bool = False
    overload: bool = False
    testing: bool = False
    calibrating: bool = False
    alarms: tuple[str, ...] = ()
    stale: str | None = None
    witnesses: tuple[str, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()
    rejected: tuple[Rejected, ...] = ()
    warnings: tuple[str, ...] = ()

    def reading(self, *, at_s: float, ups: str, source: str, feed: str, authenticated: bool) -> Reading:
        """Return it as the core wants it. An output source that was not answered becomes `unknown`."""
        return Reading(
            at_s=at_s,
            ups=ups,
            source=source,
            feed=feed,
            authenticated=authenticated,
            output_source=self.output_source or OutputSource.UNKNOWN,
            runtime_s=self.runtime_s,
            charge_pct=self.charge_pct,
            load_pct=self.load_pct,
            watts=self.watts,
            on_battery_s=self.on_battery_s,
            input_present=self.input_present,
            input_v=self.input_v,
            battery_temp_c=self.battery_temp_c,
            low_battery=self.low_battery,
            replace_battery=self.replace_battery,
            overload=self.overload,
            testing=self.testing,
            calibrating=self.calibrating,
            output_off_in_s=self.output_off_in_s,
            alarms=self.alarms,
            provenance=self.provenance,
        )


def decode(profiles: Sequence[Profile], answers: Answers) -> Decoded:
    """Decode what a device answered, the first profile believed first. Pure; never raises on any answer."""
    draft = Draft()
    _decode_output_source(profiles, answers, draft)
    for name in NUMBERS:
        _decode_number(name, profiles, answers, draft)
    for profile in profiles:
        _decode_states(profile, answers, draft)
    _decode_input(profiles, answers, draft)
    cross_check(draft)
    if profiles:
        _silence(frozenset(WITNESSES) - frozenset(profiles[0].on_battery.confirm_by), draft)
    return _finish(draft)


def redundant(profiles: Sequence[Profile], answers: Answers) -> frozenset[str]:
    """Return the OIDs of numbers that a more trusted object of this device tells already.

    On utility they need not be asked every second: a card's CPU is slow, and so is taking answers apart.
    """
    needed: set[str] = set()
    spare: set[str] = set()
    for name in NUMBERS:
        told = False
        for profile in profiles:
            for source in profile.numbers.get(name, []):
                if source.oid is not None:
                    places = [profile.absolute(source.oid)]
                else:
                    column = profile.absolute(source.column or "")
                    places = [Oid(oid) for oid in answers if below(oid, column)]
                (spare if told else needed).update(places)
                told = told or _number(name, profile, source, answers, Draft()) is not None
    return frozenset(spare - needed)


def _decode_output_source(profiles: Sequence[Profile], answers: Answers, draft: Draft) -> None:
    """The most trusted profile speaks; another one that says "battery" overrules a calm one, and that is told."""
    for profile in profiles:
        for source in profile.output_source:
            oid = profile.absolute(source.oid)
            raw = answers.get(oid, Missing.NO_ANSWER)
            if isinstance(raw, Missing) or not _applies(profile, source.when, answers):
                if raw is Missing.NULL:
                    draft.reject("output_source", oid, raw, raw.value)
                continue
            said = source.values.get(raw) if isinstance(raw, int) else None
            if said is None:
                draft.reject("output_source", oid, raw, f"{source.object} has no such value in profile {profile.name}")
                said = OutputSource.UNKNOWN
            known = draft.output_source
            if known is None or known is OutputSource.UNKNOWN:
                draft.output_source = said
                draft.provenance["output_source"] = source.object
            elif said is OutputSource.BATTERY and known is not OutputSource.BATTERY:
                draft.warnings.append(f"{draft.provenance['output_source']} says {known}, {source.object} says battery")
                draft.output_source = said
                draft.provenance["output_source"] = source.object


def _decode_number(name: str, profiles: Sequence[Profile], answers: Answers, draft: Draft) -> None:
    for profile in profiles:
        for source in profile.numbers.get(name, []):
            if not _applies(profile, source.when, answers):
                continue
            value = _number(name, profile, source, answers, draft)
            if value is not None:
                draft.candidates.setdefault(name, []).append((value, source.object))
                break  # One answer for each profile; the next profile may contradict it.
    found = draft.candidates.get(name)
    if found:
        draft.numbers[name], draft.provenance[name] = found[0]


def _number(name: str, profile: Profile, source: NumberSource, answers: Answers, draft: Draft) -> float | None:
    def believe(oid: str, raw: Answer) -> float | None:
        value, why = _convert(name, source, raw)
        if value is None and why:
            draft.reject(name, oid, raw, why)
        return value

    if source.oid is not None:
        oid = profile.absolute(source.oid)
        return believe(oid, answers.get(oid, Missing.NO_ANSWER))
    lines = _lines(profile, source, answers, believe)
    if not lines:
        return None
    return sum(lines) if NUMBERS[name].combine is Combine.SUM else max(lines)


def _lines(
    profile: Profile, source: NumberSource, answers: Answers, believe: Callable[[str, Answer], float | None]
) -> list[float]:
    """Return the believable rows of a column, in order, no more of them than the UPS says it has lines."""
    column = profile.absolute(source.column or "")
    rows = sorted((oid for oid in answers if below(oid, column)), key=parts)
    limit = _MOST_LINES
    told: Scalar | None = profile.lines.input if source.lines == "input" else profile.lines.output
    if source.lines is not None and told is not None:
        count = answers.get(profile.absolute(told.oid))
        if isinstance(count, int) and 1 <= count <= _MOST_LINES:
            limit = count
    values = (believe(oid, answers[oid]) for oid in rows[:limit])
    return [value for value in values if value is not None]


def _quietly(name: str, source: NumberSource, _oid: str, raw: Answer) -> float | None:
    """Convert once more, without telling a second time what was not believed."""
    return _convert(name, source, raw)[0]


def _convert(name: str, source: NumberSource, raw: Answer) -> tuple[float | None, str]:
    """Return the value in our unit, or None and why; "" when there is simply nothing."""
    if isinstance(raw, Missing):
        return None, raw.value if raw is Missing.NULL else ""
    number: float | int
    if isinstance(raw, int):
        number = raw
    elif isinstance(raw, bytes) and source.text:
        text = raw.strip()
        if not _DECIMAL.fullmatch(text):
            return None, "no decimal number"
        number = float(text)
    else:
        return None, "text where a number belongs"
    if abs(number) > _BIGGEST_RAW:
        return None, "larger than any SNMP number"
    for none in source.none:
        low, high = none if isinstance(none, tuple) else (none, none)
        if (low is None or number >= low) and (high is None or number <= high):
            return None, "means: not measured"
    value = round(number * UNITS[source.unit][1], 6)
    window = NUMBERS[name]
    lowest, highest = window.lowest, window.highest
    if source.valid is not None:
        low, high = source.valid
        lowest = lowest if low is None else max(lowest, low)
        highest = highest if high is None else min(highest, high)
    if not lowest <= value <= highest:
        return None, f"{value:g} is outside of what is believable ({lowest:g} to {highest:g})"
    return value, ""


def _applies(profile: Profile, when: Condition | None, answers: Answers) -> bool:
    return when is None or _is_one_of(profile, answers.get(profile.absolute(when.oid), Missing.NO_ANSWER), when.is_)


def _is_one_of(profile: Profile, raw: Answer, wanted: Sequence[int | str]) -> bool:
    if isinstance(raw, Oid):
        return any(isinstance(value, str) and profile.absolute(value) == raw for value in wanted)
    return isinstance(raw, int) and raw in wanted


def _decode_states(profile: Profile, answers: Answers, draft: Draft) -> None:
    for state, told_by in _told_states(profile, answers):
        draft.states.setdefault(state, told_by)


def _told_states(profile: Profile, answers: Answers) -> Iterator[tuple[State, str]]:
    for state, sources in profile.states.items():
        for source in sources:
            raw = answers.get(profile.absolute(source.oid), Missing.NO_ANSWER)
            if _is_one_of(profile, raw, source.is_) and _applies(profile, source.when, answers):
                yield state, source.object
    for string in profile.flag_strings:
        raw = answers.get(profile.absolute(string.oid), Missing.NO_ANSWER)
        if isinstance(raw, bytes) and not raw.strip(b"01"):
            for position, state in string.flags.items():
                if raw[position - 1 : position] == b"1":
                    yield state, f"{string.object}[{position}]"
    table = profile.alarm_table
    if table is not None and answers.get(profile.absolute(table.count.oid)) != 0:  # Some cards keep rows of old alarms.
        meanings = {profile.absolute(alarm): state for alarm, state in table.values.items()}
        column = profile.absolute(table.column)
        for oid, raw in answers.items():
            if isinstance(raw, Oid) and below(oid, column) and raw in meanings:
                yield meanings[raw], table.object


def _decode_input(profiles: Sequence[Profile], answers: Answers, draft: Draft) -> None:
    """Whether utility is at the input: every live line there, or every line gone; else not told.

    A card may answer rows of zeros for lines that the UPS does not have, so on utility one live line is enough.
    """
    if State.INPUT_BAD in draft.states:
        draft.input_present = False
        draft.provenance["input_present"] = draft.states[State.INPUT_BAD]
        return
    if "input_v" not in draft.numbers:
        return
    told_by = draft.provenance["input_v"]
    volts = [draft.numbers["input_v"]]
    for profile in profiles:
        for source in profile.numbers.get("input_v", []):
            if source.object == told_by and source.column is not None:
                volts = _lines(profile, source, answers, partial(_quietly, "input_v", source))
    there = [volt >= _INPUT_THERE_V for volt in volts]
    if all(there) or (any(there) and draft.output_source is not OutputSource.BATTERY):
        draft.input_present = True
    elif all(volt < _INPUT_GONE_V for volt in volts):
        draft.input_present = False
    if draft.input_present is not None:
        draft.provenance["input_present"] = told_by


def _silence(untrusted: frozenset[str], draft: Draft) -> None:
    """Take away the witnesses that the most trusted profile says this family gets wrong."""
    if "on_battery_s" in untrusted and "on_battery_s" in draft.numbers:
        draft.drop("on_battery_s", "no witness in this family")
    if "input_present" in untrusted and draft.input_present is not None:
        draft.input_present = None
        del draft.provenance["input_present"]
    if "alarms" in untrusted:
        draft.states.pop(State.ON_BATTERY, None)


def _finish(draft: Draft) -> Decoded:
    states = draft.states
    numbers = draft.numbers
    stale = None
    if State.COMM_LOST in states:
        stale = f"the card has lost the UPS behind it ({states[State.COMM_LOST]}): its values are frozen"
    supports = {
        "on_battery_s": numbers.get("on_battery_s", 0) > 0,
        "input_present": draft.input_present is False,
        "alarms": State.ON_BATTERY in states,
    }
    for state, told_by in states.items():
        draft.provenance.setdefault(f"alarm:{state.value}", told_by)
    return Decoded(
        output_source=draft.output_source,
        runtime_s=numbers.get("runtime_s"),
        charge_pct=numbers.get("charge_pct"),
        load_pct=numbers.get("load_pct"),
        watts=numbers.get("watts"),
        on_battery_s=numbers.get("on_battery_s"),
        input_present=draft.input_present,
        input_v=numbers.get("input_v"),
        battery_temp_c=numbers.get("battery_temp_c"),
        output_off_in_s=numbers.get("output_off_in_s"),
        low_battery=draft.low_battery,
        replace_battery=bool(REPLACE & states.keys()),
        overload=State.OVERLOAD in states,
        testing=State.SELF_TEST in states,
        calibrating=State.CALIBRATION in states,
        alarms=tuple(sorted(state.value for state in states)),
        stale=stale,
        witnesses=tuple(name for name, yes in supports.items() if yes),
        provenance=tuple(sorted(draft.provenance.items())),
        rejected=tuple(draft.rejected),
        warnings=tuple(draft.warnings),
    )
