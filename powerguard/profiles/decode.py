"""From SNMP answers to one reading: pure, total, and slow to believe.

`decode` takes the profiles that fit a device, most trusted first, and whatever the device answered. Every number goes
through the same gates: a type, the profile's sentinels, a window of what is believable; then `checks` compares the
fields with each other. Whatever falls is listed with its reason in `Decoded.rejected`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from powerguard.core.readings import OutputSource, Reading
from powerguard.profiles.checks import cross_check
from powerguard.profiles.compiled import Answers, Compiled, NumberAt, Rows, compiled
from powerguard.profiles.draft import Draft, Rejected
from powerguard.profiles.lines import CEILINGS
from powerguard.profiles.schema import Kind, Profile
from powerguard.profiles.values import Missing, Oid
from powerguard.profiles.vocabulary import (
    INPUT_GONE_V,
    INPUT_THERE_V,
    NUMBERS,
    OF_ALL_LINES,
    REPLACE,
    STATE_OF_BATTERY,
    WITNESSES,
    BatteryStatus,
    Combine,
    OutletState,
    State,
)

__all__ = ["Answers", "Decoded", "Rejected", "decode", "redundant"]

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
"""From where on a line is alive. Cards answer 0 for a single object of these where their lines stand in a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What one set of answers says, with where each field came from and what was not believed.

    Fields as in `core.model.Reading`. output_source is None when no profile's object was answered at all: then there
    is no reading. stale: why the values are frozen (the card has lost its UPS); None when they are live.
    witnesses: which parts of the same answer support "on battery" by themselves.
    battery_status: None when no object tells. replace_told: whether the device has anything to say of replacing at all.
    load_lines: the live lines behind load_pct, () for a single number. amps, outlets: of PDUs; () and None: not told.
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
    replace_told: bool = False
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
        """Every number by its field; None: not told."""
        return {name: getattr(self, name) for name in NUMBERS}

    @property
    def on_battery(self) -> bool | None:
        """Whether this answer alone shows it: "battery" with a witness. None: it does not tell."""
        if self.output_source in (None, OutputSource.UNKNOWN, OutputSource.OFF):
            return None
        if self.output_source is not OutputSource.BATTERY:
            return False
        return True if self.witnesses else None

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
    device = compiled(profiles)
    rows = device.rows(answers)
    draft = Draft()
    _decode_output_source(device, answers, rows, draft)
    _decode_battery_status(device, answers, rows, draft)
    for name, families in device.numbers.items():
        if families:
            _decode_number(name, families, answers, rows, draft)
    _decode_states(device, answers, rows, draft)
    _decode_outlets(device, answers, rows, draft)
    _decode_input(draft)
    if profiles:
        _silence(frozenset(WITNESSES) - frozenset(profiles[0].on_battery.confirm_by), draft)
    cross_check(draft)
    return _finish(draft, profiles[0].kind if profiles else "ups")


def redundant(profiles: Sequence[Profile], answers: Answers) -> frozenset[str]:
    """Return the OIDs of numbers that a more trusted object of this device tells already.

    On utility they need not be asked every second: a card's CPU is slow, and so is taking answers apart.
    """
    device = compiled(profiles)
    rows = device.rows(answers)
    needed: set[str] = set()
    spare: set[str] = set()
    for families in device.numbers.values():
        told = False
        for sources in families:
            for source in sources:
                places = source.places(rows)
                (spare if told else needed).update(places)
                if not told:
                    value = _number(source, answers, rows, Draft())
                    told = value is not None and not _is_doubtful(source, value)
    return frozenset(spare - needed)


def _decode_output_source(device: Compiled, answers: Answers, rows: Rows, draft: Draft) -> None:
    """The most trusted profile speaks; another one that says "battery" overrules a calm one, and that is told."""
    for source in device.output_source:
        for oid, raw in source.read(answers, rows):
            if isinstance(raw, Missing):
                if raw is Missing.NULL:
                    draft.reject("output_source", oid, raw, raw.value)
                continue
            try:
                said = source.word(raw)
            except KeyError:
                why = f"{source.object} has no such value in profile {source.profile}"
                draft.reject("output_source", oid, raw, why)
                said = OutputSource.UNKNOWN
            if said is None:
                continue
            known = draft.output_source
            if known is None or known is OutputSource.UNKNOWN:
                draft.output_source = said
                draft.provenance["output_source"] = source.object
            elif said is OutputSource.BATTERY and known is not OutputSource.BATTERY:
                draft.warnings.append(f"{draft.provenance['output_source']} says {known}, {source.object} says battery")
                draft.output_source = said
                draft.provenance["output_source"] = source.object


def _decode_battery_status(device: Compiled, answers: Answers, rows: Rows, draft: Draft) -> None:
    """The most trusted profile speaks; what any of them says of a low or broken battery is a state as well."""
    for source in device.battery_status:
        for oid, raw in source.read(answers, rows):
            if isinstance(raw, Missing):
                continue
            try:
                said = source.word(raw)
            except KeyError:
                why = f"{source.object} has no such value in profile {source.profile}"
                draft.reject("battery_status", oid, raw, why)
                said = BatteryStatus.UNKNOWN
            if said is None:
                continue
            if said in STATE_OF_BATTERY:
                draft.states.setdefault(STATE_OF_BATTERY[said], source.object)
            if draft.battery_status is None or draft.battery_status is BatteryStatus.UNKNOWN:
                draft.battery_status = said
                draft.provenance["battery_status"] = source.object


def _decode_number(
    name: str, families: Sequence[Sequence[NumberAt]], answers: Answers, rows: Rows, draft: Draft
) -> None:
    found = draft.candidates.setdefault(name, [])
    for sources in families:
        told = _first_told(sources, answers, rows, draft)
        if told is not None:
            found.append(told)  # One answer for each profile; the next profile may contradict it.
        if found and name not in _CONTESTED:
            break
        if told is None and name == "runtime_s" and _is_at_its_ceiling(sources, answers):
            break  # A coarser object repeats the ceiling in its own unit, as 1092 minutes for 65535 seconds.
    if found:
        draft.numbers[name], draft.provenance[name] = found[0]


def _is_at_its_ceiling(sources: Sequence[NumberAt], answers: Answers) -> bool:
    return any(answers.get(source.oid) in CEILINGS for source in sources)


def _first_told(sources: Sequence[NumberAt], answers: Answers, rows: Rows, draft: Draft) -> tuple[float, str] | None:
    """Return what the first object says that says something; a 0 of a single one counts less than lines that live."""
    doubtful: NumberAt | None = None
    for source in sources:
        value = _number(source, answers, rows, draft)
        if value is None:
            continue
        if doubtful is None:
            if not _is_doubtful(source, value):
                return value, source.object
            doubtful = source
        elif max(draft.lines.get(source.field, (value,))) >= _ALIVE[source.field]:
            why = f"0 beside what {source.object} says: not measured"
            draft.reject(source.field, doubtful.oid, answers[doubtful.oid], why)
            return value, source.object
        else:
            draft.lines.pop(source.field, None)
    return None if doubtful is None else (0.0, doubtful.object)


def _is_doubtful(source: NumberAt, value: float) -> bool:
    return value == 0 and len(source.scalars) == 1 and source.field in _ALIVE


def _number(source: NumberAt, answers: Answers, rows: Rows, draft: Draft) -> float | None:
    if len(source.scalars) == 1:
        return _scalar(source, answers, draft)
    if (source.is_column and source.oid not in rows) or not source.applies(answers):
        return None
    lines: list[float] = []
    told: list[str] = []
    whole = True
    counted = source.rows_of(answers, rows)
    if source.combine is Combine.FIRST and not _tells_line_1(source, answers, counted):
        return None
    for oid in counted:
        value, why = source.convert(answers[oid])
        if value is not None:
            lines.append(value)
            told.append(oid)
        elif why:
            draft.reject(source.field, oid, answers[oid], why)
            whole = whole and (isinstance(answers[oid], Missing) or why.startswith("means"))
    if not lines:
        return None
    if source.field in OF_ALL_LINES:
        why = "one line is not believed, so all of them together are not"
        why = source.lacks(answers, rows, told) if whole else why
        if why:
            draft.reject(source.field, source.oid, f"{len(lines)} rows", why)
            return None
    if source.field not in draft.lines and not draft.candidates.get(source.field):
        draft.lines[source.field] = tuple(lines)
    return _COMBINED[source.combine](lines)


def _scalar(source: NumberAt, answers: Answers, draft: Draft) -> float | None:
    if source.oid not in answers or not source.applies(answers):
        return None
    raw = answers[source.oid]
    value, why = source.convert(raw)
    if why:
        draft.reject(source.field, source.oid, raw, why)
    return value


def _tells_line_1(source: NumberAt, answers: Answers, counted: Sequence[str]) -> bool:
    """Whether line 1 is believed. Every UPS has one: zeros of the others say nothing of it."""
    place = source.line_1(counted)
    return place is not None and source.convert(answers.get(place, Missing.NO_ANSWER))[0] is not None


def _decode_states(device: Compiled, answers: Answers, rows: Rows, draft: Draft) -> None:
    _decode_yes_or_no(device, answers, rows, draft)
    for string in device.flags:
        raw = answers.get(string.oid)
        # Some agents end the string with a NUL; anything else in it is no string of flags.
        if isinstance(raw, bytes) and not raw.strip(b"01\0"):
            for at, state, told_by in string.flags:
                if raw[at : at + 1] == b"1":
                    draft.states.setdefault(state, told_by)
    for table in device.alarms:
        if answers.get(table.count_oid) == 0:  # Some cards keep rows of old alarms.
            continue
        for oid in rows.get(table.column, ()):
            raw = answers[oid]
            if isinstance(raw, Oid) and raw in table.meanings:
                draft.states.setdefault(table.meanings[raw], table.object)


def _decode_yes_or_no(device: Compiled, answers: Answers, rows: Rows, draft: Draft) -> None:
    for source in device.states:
        oids = rows.get(source.oid, ()) if source.is_column else (source.oid,)
        for oid in oids:
            raw = answers.get(oid)
            if raw is None or isinstance(raw, Missing):
                continue
            if source.defined is not None and not source.defined.fits(raw):
                draft.reject(source.state.value, oid, raw, f"{source.object} has no such value")
                continue
            if source.state is State.REPLACE_BATTERY:
                draft.replace_told = True
            if source.test.fits(raw) and (source.when is None or source.when.holds(answers)):
                draft.states.setdefault(source.state, source.object)


def _decode_outlets(device: Compiled, answers: Answers, rows: Rows, draft: Draft) -> None:
    """The first table that has rows.

    An outlet's number is the last part of its index; the whole of it, where several units in a chain share numbers.
    """
    for table in device.outlets:
        found = [oid for oid in rows.get(table.column, ()) if isinstance(answers[oid], int)][:_MOST_OUTLETS]
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
    """Whether utility is at the input: every live line there, or every line gone; else not told.

    A card may answer rows of zeros for lines that the UPS does not have, so on utility one live line is enough.
    """
    if State.INPUT_BAD in draft.states:
        draft.input_present = False
        draft.provenance["input_present"] = draft.states[State.INPUT_BAD]
        return
    if "input_v" not in draft.numbers:
        return
    volts = draft.lines.get("input_v", (draft.numbers["input_v"],))
    there = [volt >= INPUT_THERE_V for volt in volts]
    if all(there) or (any(there) and draft.output_source is not OutputSource.BATTERY):
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


def _finish(draft: Draft, kind: Kind) -> Decoded:
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
        battery_status=_graver(draft),
        low_battery=draft.low_battery,
        replace_battery=bool(REPLACE & states.keys()),
        replace_told=draft.replace_told,
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
