"""Decodes SNMP answers into one reading: pure, total, and slow to believe.

`decode` takes the profiles that fit a device, most trusted first, and whatever the device answered. Every number goes
through the same gates: a type, the profile's sentinels, a window of what is believable; then `cross_check` compares
the fields with each other, the same for every family. Whatever falls is listed with its reason in `Decoded.rejected`.

Lines: which of a UPS's lines are there, and which are reported; a sum, or the worst of all, needs every one of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from powerguard.core.model.events import OutputSource, Reading
from powerguard.ups.profiles.schema import (
    MOST_LINES,
    Answers,
    BatteryStatusSource,
    Kind,
    NumberSource,
    OutputSourceSource,
    Profile,
    Tables,
    is_one_of,
)
from powerguard.ups.profiles.vocabulary import (
    CEILINGS,
    INPUT_GONE_V,
    INPUT_THERE_V,
    LOW,
    NUMBERS,
    OF_ALL_LINES,
    REPLACE,
    SATURATED,
    STATE_OF_BATTERY,
    WITNESSES,
    Answer,
    BatteryStatus,
    Combine,
    Missing,
    Oid,
    OutletState,
    State,
    parts,
)


class Rejected(NamedTuple):
    """A value that was answered and not believed."""

    field: str
    oid: str
    raw: Answer | str
    why: str


@dataclass(slots=True)
class Draft:
    """The reading as decoded so far.

    candidates: for each number, what each profile gives, most trusted first: (value, object).
    lines: the rows behind a number that was read from a table. replace_reported: something was said of replacing.
    """

    output_source: OutputSource | None = None
    input_present: bool | None = None
    battery_status: BatteryStatus | None = None
    replace_reported: bool = False
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


_FED_BY_INPUT = frozenset((OutputSource.UTILITY, OutputSource.BOOST, OutputSource.TRIM, OutputSource.ECO))
"""Not bypass: its line may be another one than the rectifier's, whose volts are reported."""
_SHORTEST_ON_UTILITY_S = 30.0
_RUNTIME_ZERO_CHARGE_PCT = 20.0
_APART_SHARE = 0.25
_APART_S = 60.0
_LEAST_RATING_W = 200.0
_LEAST_THREE_PHASE_W = 2000.0
"""The smallest UPS with a network card has some 300 W, the smallest three-phase one some 6 kW."""
_MOST_RATING_W = 5e6
_REAL_LOAD_PCT = 5.0
_SOME_LOAD_PCT = 2.0
"""Less than this on one line may be 0 W of a card that counts in tenths of kilowatts."""
_LEAST_ALONE_W = 50.0
"""Without a load, watts cannot be compared: 0 (not measured) and 1 (kilowatts) must be refused."""


def cross_check(draft: Draft) -> None:
    """Drop what contradicts the rest, and of two runtimes keep the cautious one."""
    _check_input(draft)
    _check_charge(draft)
    _check_runtime(draft)
    _check_lines(draft)
    _check_watts(draft)


def _check_input(draft: Draft) -> None:
    """Zero volts at the input of a UPS that runs on it are not a measurement, unless another object shows battery.

    Cards answer 0 for an input that they do not measure (upsAdvInputLineVoltage of a three-phase APC). Believed, a
    self-test would be an outage: "battery" with the input gone.
    """
    if draft.input_present is not False or draft.output_source not in _FED_BY_INPUT:
        return
    if {State.INPUT_BAD, State.ON_BATTERY} & draft.states.keys() or draft.numbers.get("on_battery_s", 0) > 0:
        return
    draft.input_present = None
    draft.provenance.pop("input_present", None)
    if "input_v" in draft.numbers:
        volts = draft.numbers["input_v"]
        tenths = f" (or {10 * volts:g} V, sent as a whole number by an object of tenths)" if volts else ""
        draft.drop("input_v", f"{volts:g} V at an input that feeds the output: not measured{tenths}")


def _check_runtime(draft: Draft) -> None:
    """Keep the first credible runtime; beyond rounding, the smallest of the credible ones.

    Two MIBs of one card may disagree by rounding (9PX: 1132 s and 18 min); more than a quarter and a minute apart,
    one of them is wrong, and the cautious one counts.
    """
    found: list[tuple[float, str]] = []
    for value, reported_by in draft.candidates.get("runtime_s", []):
        why = _why_no_runtime(draft, value)
        if why:
            draft.reject("runtime_s", reported_by, round(value), why)
        else:
            found.append((value, reported_by))
    draft.numbers.pop("runtime_s", None)
    draft.provenance.pop("runtime_s", None)
    if not found:
        return
    value, reported_by = found[0]
    least, by_least = min(found)
    if value - least > _APART_SHARE * value + _APART_S:
        draft.warnings.append(
            f"{reported_by} says {value:g} s of runtime, {by_least} says {least:g} s: the smaller counts"
        )
        value, reported_by = least, by_least
    draft.numbers["runtime_s"], draft.provenance["runtime_s"] = value, reported_by


def _why_no_runtime(draft: Draft, runtime_s: float) -> str:
    """Say why a runtime is not one, "" when it is. On battery a small value, and 0 at the end, are real.

    Marathon cards say 0 min at 100 % on utility, others at any charge: 0 counts only with a low battery, or a charge of
    20 % and less.
    """
    if not draft.on_battery:
        return "" if runtime_s >= _SHORTEST_ON_UTILITY_S else "too short for a UPS that is not on battery"
    if runtime_s > 0 or draft.low_battery:
        return ""
    charge_pct = draft.numbers.get("charge_pct")
    at_the_end = charge_pct is not None and charge_pct <= _RUNTIME_ZERO_CHARGE_PCT
    return "" if at_the_end else "0 with neither low battery nor a low charge"


def _check_charge(draft: Draft) -> None:
    """A charge of 0 with a good runtime and without a low battery means that there is no gauge.

    On battery, too: believed there, it would power the host off in the first seconds of every outage. Where a gauge has
    fallen to 0, the energy account goes on from its last value. Of two runtimes the cautious one counts there: a
    runtime that is short confirms the charge.
    """
    if draft.low_battery:
        return
    runtimes_s = [value for value, _ in draft.candidates.get("runtime_s", ())]
    least_s = (min if draft.on_battery else max)(runtimes_s, default=0.0)
    lasts = least_s >= _SHORTEST_ON_UTILITY_S
    while draft.numbers.get("charge_pct") == 0 and lasts:
        draft.next("charge_pct", "0 with a runtime and without a low battery: not measured")


def _check_lines(draft: Draft) -> None:
    """A line with 0 percent, but with watts that are a load on the other lines: the worst line is unknown."""
    loads, watts = draft.lines.get("load_pct", ()), draft.lines.get("watts", ())
    if len(loads) != len(watts) or "load_pct" not in draft.numbers:
        return
    a_watt_pct = max((load / power for load, power in zip(loads, watts, strict=True) if power > 0), default=0.0)
    for line, (load, power) in enumerate(zip(loads, watts, strict=True), 1):
        if load == 0 and power * a_watt_pct >= _SOME_LOAD_PCT:
            draft.drop("load_pct", f"line {line} at {power:g} W and 0 %: not measured")
            del draft.lines["load_pct"]
            return


def _check_watts(draft: Draft) -> None:
    """Watts that make the rating absurd: 0 at a real load (not measured), or 1 at 27 % (kilowatts, Huawei)."""
    load_pct = draft.numbers.get("load_pct")
    alone = load_pct is None and draft.output_source is not None  # A rack PDU's 0 W may be true.
    while alone and draft.numbers.get("watts", math.inf) < _LEAST_ALONE_W:
        draft.next("watts", "too few to be believed without a load")
    while load_pct is not None and "watts" in draft.numbers:
        why = _why_no_watts(draft, draft.numbers["watts"], load_pct)
        if not why:
            return
        draft.next("watts", why)
        draft.lines.pop("watts", None)


def _why_no_watts(draft: Draft, watts: float, load_pct: float) -> str:
    if load_pct > 0 and watts == 0:
        return f"0 at a load of {load_pct:g} %: not measured"
    loads, lines = draft.lines.get("load_pct", ()), draft.lines.get("watts", ())
    for line, (load, power) in enumerate(zip(loads, lines, strict=False), 1):
        if len(loads) == len(lines) and power == 0 and load >= _SOME_LOAD_PCT:
            return f"line {line} at 0 W and {load:g} %: not measured"
    if load_pct < _REAL_LOAD_PCT:
        return ""
    rating_w = watts * 100 / load_pct
    live = sum(line > 0 for line in draft.lines.get("load_pct", ()))
    least_w = _LEAST_THREE_PHASE_W if live > 1 else _LEAST_RATING_W
    if least_w <= rating_w <= _MOST_RATING_W:
        return ""
    return f"{watts:g} W at {load_pct:g} % would be a UPS of {rating_w:.0f} W"


_CONTESTED = frozenset({"runtime_s", "charge_pct", "watts"})
"""Numbers that the cross-checks may refuse: every profile is heard, so that another one can take the place."""
_COMBINED: Mapping[Combine, Callable[[list[float]], float]] = {
    Combine.SUM: sum,
    Combine.MAX: max,
    Combine.MIN: min,
    Combine.FIRST: lambda lines: lines[0],
}
_MOST_OUTLETS = 256
_ALIVE = {"input_v": INPUT_THERE_V, "load_pct": 0.1}
"""Smallest value of a live line. Cards answer 0 for a single object of these where their lines stand in a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The reading in one set of answers, with the origin of each field and the rejected values.

    Fields as in `core.model.Reading`. output_source is None when no profile's object was answered: then there
    is no reading. stale: why the values are frozen (the card has lost its UPS); None when they are live.
    witnesses: which parts of the same answer support "on battery" by themselves.
    battery_status: None when no object reports it. replace_reported: whether the device reports replacement at all.
    load_lines: the live lines behind load_pct, () for a single number. amps, outlets: of PDUs; () and None: not
        reported.
    """

    kind: Kind = "ups"
    output_source: OutputSource | None
    battery_status: BatteryStatus | None = None
    runtime_s: float | None = None
    charge_pct: float | None = None
    load_pct: float | None = None
    watts: float | None = None
    on_battery_s: float | None = None
    input_present: bool | None = None
    input_v: float | None = None
    battery_temp_c: float | None = None
    output_off_in_s: float | None = None
    amps: float | None = None
    outlets: tuple[tuple[str, OutletState], ...] = ()
    load_lines: tuple[float, ...] = ()
    low_battery: bool = False
    replace_battery: bool = False
    replace_reported: bool = False
    overload: bool = False
    testing: bool = False
    calibrating: bool = False
    alarms: tuple[str, ...] = ()
    stale: str | None = None
    witnesses: tuple[str, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()
    rejected: tuple[Rejected, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def numbers(self) -> dict[str, float | None]:
        """Every number by its field; None: not reported."""
        return {name: getattr(self, name) for name in NUMBERS}

    @property
    def on_battery(self) -> bool | None:
        """Whether this answer alone shows it: "battery" with a witness. None: unknown."""
        if self.output_source in (None, OutputSource.UNKNOWN, OutputSource.OFF):
            return None
        if self.output_source is not OutputSource.BATTERY:
            return False
        return True if self.witnesses else None

    def reading(self, *, at_s: float, ups: str, source: str, authenticated: bool) -> Reading:
        """Return it as the core wants it. An output source that was not answered becomes `unknown`."""
        return Reading(
            at_s=at_s,
            ups=ups,
            source=source,
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
    tables = _tables(profiles, answers)
    draft = Draft()
    _decode_output_source(profiles, answers, tables, draft)
    _decode_battery_status(profiles, answers, tables, draft)
    for name in NUMBERS:
        _decode_number(name, _sources(profiles, name), answers, tables, draft)
    _decode_states(profiles, answers, tables, draft)
    _decode_outlets(profiles, answers, tables, draft)
    _decode_input(draft)
    if profiles:
        _silence(frozenset(WITNESSES) - frozenset(profiles[0].on_battery.confirm_by), draft)
    cross_check(draft)
    draft.battery_status = _graver(draft)
    return finish(draft, profiles[0].kind if profiles else "ups")


def redundant(profiles: Sequence[Profile], answers: Answers, decoded: Decoded) -> frozenset[str]:
    """Return the OIDs of numbers that a more trusted object of this device already reports.

    On utility they need not be asked every second: a card's CPU is slow, and so is taking answers apart. decoded: of
    these answers; the object that a field is from is needed, also where another one is more trusted.
    """
    tables, counts = _tables(profiles, answers), dict(decoded.provenance)
    needed: set[str] = set()
    spare: set[str] = set()
    for name in NUMBERS:
        is_reported = False
        for source in (source for sources in _sources(profiles, name) for source in sources):
            (spare if is_reported and source.object != counts.get(name) else needed).update(source.places(tables))
            if not is_reported:
                value = _number(source, answers, tables, Draft())
                is_reported = value is not None and not _is_doubtful(source, value)
    return frozenset(spare - needed)


def _tables(profiles: Sequence[Profile], answers: Answers) -> Tables:
    return {column: rows for profile in profiles for column, rows in profile.tables(answers).items()}


def _sources(profiles: Sequence[Profile], name: str) -> list[list[NumberSource]]:
    return [profile.numbers[name] for profile in profiles if name in profile.numbers]


_UNKNOWN = {"output_source": OutputSource.UNKNOWN, "battery_status": BatteryStatus.UNKNOWN}


def _words(
    name: str, profiles: Sequence[Profile], answers: Answers, tables: Tables, draft: Draft
) -> Iterator[tuple[str, Any]]:
    """The words of a field's enumerations, as (object, word). A value that is not listed is the word `unknown`."""
    for profile in profiles:
        sources: Sequence[OutputSourceSource | BatteryStatusSource] = getattr(profile, name)
        for source in sources:
            for oid, raw in source.read(answers, tables):
                if isinstance(raw, Missing):
                    if raw is Missing.NULL and name == "output_source":
                        draft.reject(name, oid, raw, raw.value)
                    continue
                try:
                    word = source.word(raw)
                except KeyError:
                    draft.reject(name, oid, raw, f"{source.object} has no such value in profile {profile.name}")
                    word = _UNKNOWN[name]
                if word is not None:
                    yield source.object, word


def _decode_output_source(profiles: Sequence[Profile], answers: Answers, tables: Tables, draft: Draft) -> None:
    """The most trusted profile speaks; another one that reports battery overrules a calm one, and that is logged."""
    for reported_by, word in _words("output_source", profiles, answers, tables, draft):
        known = draft.output_source
        if known is None or known is OutputSource.UNKNOWN:
            draft.output_source = word
            draft.provenance["output_source"] = reported_by
        elif word is OutputSource.BATTERY and known is not OutputSource.BATTERY:
            draft.warnings.append(f"{draft.provenance['output_source']} says {known}, {reported_by} says battery")
            draft.output_source = word
            draft.provenance["output_source"] = reported_by


def _decode_battery_status(profiles: Sequence[Profile], answers: Answers, tables: Tables, draft: Draft) -> None:
    """The most trusted profile speaks; what any of them says of a low or broken battery is a state as well."""
    for reported_by, word in _words("battery_status", profiles, answers, tables, draft):
        if word in STATE_OF_BATTERY:
            draft.states.setdefault(STATE_OF_BATTERY[word], reported_by)
        if draft.battery_status is None or draft.battery_status is BatteryStatus.UNKNOWN:
            draft.battery_status = word
            draft.provenance["battery_status"] = reported_by


def _decode_number(
    name: str, families: Sequence[Sequence[NumberSource]], answers: Answers, tables: Tables, draft: Draft
) -> None:
    if not families:
        return
    found = draft.candidates.setdefault(name, [])
    for sources in families:
        first = _first_reported(sources, answers, tables, draft)
        if first is not None:
            found.append(first)  # One answer for each profile; the next profile may contradict it.
        if found and name not in _CONTESTED:
            break
        if first is None and name == "runtime_s" and _is_at_its_ceiling(sources, answers):
            break  # A coarser object repeats the ceiling in its own unit, as 1092 minutes for 65535 seconds.
    if found:
        draft.numbers[name], draft.provenance[name] = found[0]


def _is_at_its_ceiling(sources: Sequence[NumberSource], answers: Answers) -> bool:
    return any(answers.get(source.place) in CEILINGS for source in sources)


def _first_reported(
    sources: Sequence[NumberSource], answers: Answers, tables: Tables, draft: Draft
) -> tuple[float, str] | None:
    """Return what the first object says that says something; a 0 of a single one counts less than lines that live."""
    doubtful: NumberSource | None = None
    for source in sources:
        value = _number(source, answers, tables, draft)
        if value is None:
            continue
        if doubtful is None:
            if not _is_doubtful(source, value):
                return value, source.object
            doubtful = source
        elif max(draft.lines.get(source.field, (value,))) >= _ALIVE[source.field]:
            why = f"0, but {source.object} has a value: not measured"
            draft.reject(source.field, doubtful.place, answers[doubtful.place], why)
            return value, source.object
        else:
            draft.lines.pop(source.field, None)
    return None if doubtful is None else (0.0, doubtful.object)


def _is_doubtful(source: NumberSource, value: float) -> bool:
    return value == 0 and len(source.scalars) == 1 and source.field in _ALIVE


def _number(source: NumberSource, answers: Answers, tables: Tables, draft: Draft) -> float | None:
    if not source.applies(answers):
        return None
    if len(source.scalars) == 1:
        return _scalar(source, answers, draft)
    lines: list[float] = []
    reported: list[str] = []
    whole = True
    rows = counted(source, answers, tables)
    if source.combines is Combine.FIRST and not _reports_line_1(source, answers, rows):
        return None
    for oid in rows:
        value, why = source.convert(answers[oid])
        if value is not None:
            lines.append(value)
            reported.append(oid)
        elif why:
            draft.reject(source.field, oid, answers[oid], why)
            whole = whole and (isinstance(answers[oid], Missing) or why.startswith("means"))
    if not lines:
        return None
    if source.field in OF_ALL_LINES:
        why = "one line is not believed, so all of them together are not"
        why = lacks(source, answers, tables, reported) if whole else why
        if why:
            draft.reject(source.field, source.place, f"{len(lines)} rows", why)
            return None
    if source.field not in draft.lines and not draft.candidates.get(source.field):
        draft.lines[source.field] = tuple(lines)
    return _COMBINED[source.combines](lines)


def _scalar(source: NumberSource, answers: Answers, draft: Draft) -> float | None:
    if source.place not in answers:
        return None
    raw = answers[source.place]
    value, why = source.convert(raw)
    if why:
        draft.reject(source.field, source.place, raw, why)
    return value


def _reports_line_1(source: NumberSource, answers: Answers, rows: Sequence[str]) -> bool:
    """Whether line 1 is believed. Every UPS has one: zeros of the others do not concern it."""
    place = line_1(source, rows)
    return place is not None and source.convert(answers.get(place, Missing.NO_ANSWER))[0] is not None


def _decode_states(profiles: Sequence[Profile], answers: Answers, tables: Tables, draft: Draft) -> None:
    _decode_yes_or_no(profiles, answers, tables, draft)
    for string in (string for profile in profiles for string in profile.flag_strings):
        raw = answers.get(string.oid)
        # Some agents end the string with a NUL; with anything else in it, it is not a string of flags.
        if isinstance(raw, bytes) and not raw.strip(b"01\0"):
            for at, state in string.flags.items():
                if raw[at - 1 : at] == b"1":
                    draft.states.setdefault(state, f"{string.object}[{at}]")
    for table in (profile.alarm_table for profile in profiles if profile.alarm_table is not None):
        if answers.get(table.count.oid) == 0:  # Some cards keep rows of old alarms.
            continue
        for oid in tables.get(table.column, ()):
            raw = answers[oid]
            if isinstance(raw, Oid) and raw in table.values:
                draft.states.setdefault(table.values[raw], table.object)


def _decode_yes_or_no(profiles: Sequence[Profile], answers: Answers, tables: Tables, draft: Draft) -> None:
    every = (profile.states.items() for profile in profiles)
    for state, source in ((state, source) for states in every for state, sources in states for source in sources):
        for oid in source.places(tables):
            raw = answers.get(oid)
            if raw is None or isinstance(raw, Missing):
                continue
            if source.of and not is_one_of(raw, source.of):
                draft.reject(state.value, oid, raw, f"{source.object} has no such value")
                continue
            if state is State.REPLACE_BATTERY:
                draft.replace_reported = True
            if is_one_of(raw, source.is_) and source.applies(answers):
                draft.states.setdefault(state, source.object)


def _decode_outlets(profiles: Sequence[Profile], answers: Answers, tables: Tables, draft: Draft) -> None:
    """The first table that has rows.

    An outlet's number is the last part of its index; the whole of it, where several units in a chain share numbers.
    """
    for table in (table for profile in profiles for table in profile.outlets):
        found = [oid for oid in tables.get(table.column, ()) if isinstance(answers[oid], int)][:_MOST_OUTLETS]
        if not found:
            continue
        ends = [oid[len(table.column) + 1 :] for oid in found]
        while all(end.endswith(".0") for end in ends):
            ends = [end.removesuffix(".0") for end in ends]
        last = [end.rpartition(".")[2] for end in ends]
        for name, oid in zip(last if len(set(last)) == len(last) else ends, found, strict=True):
            raw = answers[oid]
            state = table.values.get(raw) if isinstance(raw, int) else None
            if state is None:
                draft.reject("outlets", oid, raw, f"{table.object} has no such value")
            draft.outlets.append((name, state or OutletState.UNKNOWN))
        draft.provenance["outlets"] = table.object
        return


def _decode_input(draft: Draft) -> None:
    """Whether utility is at the input: every live line there, or every line gone; else unknown.

    A card may answer rows of zeros for lines that the UPS does not have, so on utility one live line is enough.
    """
    if State.INPUT_BAD in draft.states:
        draft.input_present = False
        draft.provenance["input_present"] = draft.states[State.INPUT_BAD]
        return
    if "input_v" not in draft.numbers:
        return
    volts = draft.lines.get("input_v", (draft.numbers["input_v"],))
    live = [volt >= INPUT_THERE_V for volt in volts]
    if all(live) or (any(live) and draft.output_source is not OutputSource.BATTERY):
        draft.input_present = True
    elif all(volt < INPUT_GONE_V for volt in volts):
        draft.input_present = False
    if draft.input_present is not None:
        draft.provenance["input_present"] = draft.provenance["input_v"]


def _silence(untrusted: frozenset[str], draft: Draft) -> None:
    """Take away the witnesses that the most trusted profile says this family gets wrong."""
    if "on_battery_s" in untrusted and "on_battery_s" in draft.numbers:
        draft.drop("on_battery_s", "no witness in this family")
    if "input_present" in untrusted and draft.input_present is not None:
        draft.input_present = None
        del draft.provenance["input_present"]
    if "alarms" in untrusted:
        draft.states.pop(State.ON_BATTERY, None)


def _graver(draft: Draft) -> BatteryStatus | None:
    """The gravest of what is said of the battery, by its status or by an alarm."""
    for status, state in reversed(STATE_OF_BATTERY.items()):
        if state in draft.states:
            draft.provenance["battery_status"] = draft.states[state]
            return status
    return draft.battery_status


def finish(draft: Draft, kind: Kind = "ups") -> Decoded:
    """Return what a draft comes to, once its fields have been checked."""
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
    for state, reported_by in states.items():
        draft.provenance.setdefault(f"alarm:{state.value}", reported_by)
    return Decoded(
        kind=kind,
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
        amps=numbers.get("amps"),
        outlets=tuple(draft.outlets),
        load_lines=draft.lines.get("load_pct", ()),
        battery_status=draft.battery_status,
        low_battery=draft.low_battery,
        replace_battery=bool(REPLACE & states.keys()),
        replace_reported=draft.replace_reported,
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


# --- Lines ----------------------------------------------------------------------------------------------------------
#
# A line is named by the end of its row's index. What comes before (the unit in a chain, the input of a PDU) names the
# group that the line belongs to, and a 0 at the end has no meaning: .1, .1.0, .0.1 and .7.1 are all line 1.

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


def lacks(source: NumberSource, answers: Answers, tables: Tables, reported: Sequence[str]) -> str:
    """Say which line is there and not among those that were believed; "" where none is known."""
    if source.rows is not None:
        rows = source.rows
        ends = [oid[len(rows.column) :] for oid in tables.get(rows.column, ())]
        unreported = [
            end for end in ends if answers[rows.column + end] in rows.is_ and f"{source.column}{end}" not in reported
        ]
        return f"row {unreported[0][1:]} is not reported" if unreported else ""
    lines = _Lines(source, reported)
    own = {lines.of(oid) for oid in source.places(tables) if _is_answered(answers.get(oid))}
    quiet: set[Line] = set()
    live: set[Line] = set()
    for one in source.line_objects:
        for oid in one.scalars or tables.get(one.column or "", ())[:MOST_LINES]:
            raw = answers.get(oid)
            if _is_answered(raw):
                (live if _is_live(raw, one.least) else quiet).add(lines.named(oid, one.column, one.scalars))
    return _lacking({lines.of(oid) for oid in reported}, source.count(answers), dead=own & quiet - live, live=live)


def _lacking(reported: set[Line], count: int | None, *, dead: set[Line], live: set[Line]) -> str:
    """Return the line that is there but not reported; "" if none is known.

    There is line 1, every line before a reported one, as many as the device counts, and each that another object
    shows alive. One that is counted, but without any value, does not exist: cards of one-phase UPSes
    fill three rows with zeros and NULL.
    """
    for group in sorted({group for group, _ in reported}):
        numbers = {number for each, number in reported if each == group}
        for number in range(1, max(*numbers, count or 1) + 1):
            if number not in numbers and not ((group, number) in dead and number > max(numbers)):
                return (
                    f"line {number} is not reported" if count is None else f"line {number} of {count} is not reported"
                )
    alive = sorted(line for line in live - reported if count is None or line[1] <= count)
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


def _is_answered(raw: Answer | None) -> bool:
    """Whether a card has answered it, be it that there is no value."""
    return raw is not None and raw not in _LEFT_OUT


def _is_live(raw: Answer | None, least: int) -> bool:
    """Whether a value shows that its line is there."""
    if isinstance(raw, bytes):
        text = raw.strip().partition(b".")[0]
        raw = int(text) if text.isdigit() and len(text) < MOST_LINES else None
    return isinstance(raw, int) and raw >= least and raw not in SATURATED
