"""Cross-checks: the same for every family, between the fields of one answer."""

import math

from powerguard.core.readings import OutputSource
from powerguard.profiles.draft import Draft
from powerguard.profiles.vocabulary import State

_FED_BY_INPUT = frozenset((OutputSource.UTILITY, OutputSource.BOOST, OutputSource.TRIM, OutputSource.ECO))
"""Not bypass: its line may be another one than the rectifier's, whose volts are told."""
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
"""Where no load is told there is nothing to hold watts against: 0 (not measured) and 1 (kilowatts) must be refused."""


def cross_check(draft: Draft) -> None:
    """Drop what contradicts the rest, and of two runtimes keep the cautious one."""
    _check_input(draft)
    _check_charge(draft)
    _check_runtime(draft)
    _check_lines(draft)
    _check_watts(draft)


def _check_input(draft: Draft) -> None:
    """No volts at the input of a UPS that runs on it are no volts measured, unless something else says "battery".

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
        tenths = f" (or {10 * volts:g} V, told whole by an object of tenths)" if volts else ""
        draft.drop("input_v", f"{volts:g} V at an input that feeds the output: not measured{tenths}")


def _check_runtime(draft: Draft) -> None:
    """Keep the first credible runtime; beyond rounding, the smallest of the credible ones.

    Two MIBs of one card may disagree by rounding (9PX: 1132 s and 18 min); more than a quarter and a minute apart,
    one of them is wrong, and the cautious one counts.
    """
    found: list[tuple[float, str]] = []
    for value, told_by in draft.candidates.get("runtime_s", []):
        why = _why_no_runtime(draft, value)
        if why:
            draft.reject("runtime_s", told_by, round(value), why)
        else:
            found.append((value, told_by))
    draft.numbers.pop("runtime_s", None)
    draft.provenance.pop("runtime_s", None)
    if not found:
        return
    value, told_by = found[0]
    least, by_least = min(found)
    if value - least > _APART_SHARE * value + _APART_S:
        draft.warnings.append(f"{told_by} says {value:g} s of runtime, {by_least} says {least:g} s: the smaller counts")
        value, told_by = least, by_least
    draft.numbers["runtime_s"], draft.provenance["runtime_s"] = value, told_by


def _why_no_runtime(draft: Draft, runtime_s: float) -> str:
    """Say why a runtime is not one, "" when it is. On battery a small value, and 0 at the end, are real.

    Marathon cards say 0 min at 100 % on utility, others at any charge: 0 counts only beside a low battery, or a
    charge of 20 % and less.
    """
    if not draft.on_battery:
        return "" if runtime_s >= _SHORTEST_ON_UTILITY_S else "too short for a UPS that is not on battery"
    if runtime_s > 0 or draft.low_battery:
        return ""
    charge_pct = draft.numbers.get("charge_pct")
    at_the_end = charge_pct is not None and charge_pct <= _RUNTIME_ZERO_CHARGE_PCT
    return "" if at_the_end else "0 with neither low battery nor a low charge"


def _check_charge(draft: Draft) -> None:
    """A charge of 0 beside a good runtime, off battery and with no low battery, is a gauge that is not there."""
    if draft.on_battery or draft.low_battery:
        return
    lasts = any(value >= _SHORTEST_ON_UTILITY_S for value, _ in draft.candidates.get("runtime_s", ()))
    while draft.numbers.get("charge_pct") == 0 and lasts:
        draft.next("charge_pct", "0 beside a runtime and no low battery: not measured")


def _check_lines(draft: Draft) -> None:
    """A line that carries nothing in percent, and watts that the others would call a load: their worst is not known."""
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
        draft.next("watts", "too few to be believed where no load is told")
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
