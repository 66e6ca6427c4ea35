"""What upsd's variables say, as a reading: pure, with the oddities that drivers are known for.

Names and tokens are those of NUT's docs/nut-names.txt and docs/new-drivers.txt ("Status data").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from powerguard.core.model.events import OutputSource, Reading
from powerguard.ups.profiles.decode import Draft
from powerguard.ups.profiles.text_values import enter, is_input_there, reading
from powerguard.ups.profiles.vocabulary import SATURATED, State

STATUS: Final = "ups.status"
_INPUT_VOLTS: Final = ("input.voltage", "input.L1-N.voltage", "input.L2-N.voltage", "input.L3-N.voltage")
_LOADS: Final = ("ups.load", *(f"output.L{line}.power.percent" for line in (1, 2, 3)))
_WATTS: Final = ("ups.realpower", "output.realpower")
_WATTS_OF_LINES: Final = tuple(f"output.L{line}.realpower" for line in (1, 2, 3))
_TIMERS: Final = ("ups.timer.shutdown", "ups.timer.reboot")
_SATURATED: Final = frozenset(str(each) for each in SATURATED)
_TEST: Final = "ups.test.result"
_ALARM: Final = "ups.alarm"
_BAD_PACKS: Final = "battery.packs.bad"
WANTED: Final = (
    *(STATUS, "battery.runtime", "battery.charge", *_LOADS, *_WATTS, *_WATTS_OF_LINES, *_INPUT_VOLTS, *_TIMERS),
    *("battery.temperature", _TEST, _BAD_PACKS, _ALARM),
)
"""What is asked for with every whole poll, as far as the UPS has it."""

_STATES: Final = {
    "LB": State.LOW_BATTERY,
    "RB": State.REPLACE_BATTERY,
    "OVER": State.OVERLOAD,
    "BYPASS": State.ON_BYPASS,
    "CAL": State.CALIBRATION,
    "TEST": State.SELF_TEST,
    "ALARM": State.GENERAL_FAULT,
}
_KNOWN: Final = frozenset(_STATES) | {
    *("OL", "!OL", "OB", "HB", "CHRG", "DISCHRG", "OFF", "TRIM", "BOOST", "ECO", "FSD", "WAIT"),
}
_MOST_TOKENS: Final = 32
STATUS_UNREPORTED: Final = "status_unreported"
"""Alarm: upsd answers, and ups.status is empty, WAIT, or without a word that says where the output comes from."""

# Drivers that read the UPS over a network, where its answers can be forged however well upsd's own are protected.
_NETWORK_DRIVERS: Final = frozenset(("snmp-ups", "netxml-ups", "apcupsd-ups"))
_SLOWEST_POLL_S: Final = 5.0
_SNMP_POLLFREQ_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedVariables:
    """What one set of variables says.

    alarms: beyond the states of the draft. oddities: what is strange and was understood all the same. unknown: tokens
    of ups.status that we do not know. alarm: what the UPS itself says in words (ups.alarm), shortened.
    """

    draft: Draft
    forced_shutdown: bool = False
    alarms: tuple[str, ...] = ()
    oddities: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    alarm: str = ""

    def reading(self, *, at_s: float, ups: str, source: str, authenticated: bool) -> Reading:
        """Return it as the core wants it."""
        return reading(
            self.draft,
            at_s=at_s,
            ups=ups,
            source=source,
            forced_shutdown=self.forced_shutdown,
            authenticated=authenticated,
            further_alarms=self.alarms,
        )


def interpret(variables: Mapping[str, str]) -> DecodedVariables:
    """Say what the variables mean. Total: every text has a meaning, and what is not understood is `unknown`."""
    draft = Draft()
    oddities: list[str] = []
    words = variables.get(STATUS, "").split()[:_MOST_TOKENS]
    tokens = frozenset(words)
    _numbers(variables, draft)
    volts = _largest("input_v", _INPUT_VOLTS, variables, draft)
    input_gone = is_input_there(volts) is False
    draft.output_source = _output_source(tokens, draft, input_gone=input_gone, oddities=oddities)
    draft.provenance["output_source"] = STATUS
    _states(tokens, variables, draft)
    _input(volts, draft, oddities)
    alarms = (STATUS_UNREPORTED,) if draft.output_source is OutputSource.UNKNOWN else ()
    return DecodedVariables(
        draft=draft,
        forced_shutdown="FSD" in tokens,
        alarms=alarms,
        oddities=tuple(oddities),
        alarm=" ".join(variables.get(_ALARM, "").split())[:200] if "ALARM" in tokens else "",
        unknown=tuple(dict.fromkeys(word[:32] for word in words if word not in _KNOWN)),
    )


def _numbers(variables: Mapping[str, str], draft: Draft) -> None:
    for field_name, name in (
        ("runtime_s", "battery.runtime"),
        ("charge_pct", "battery.charge"),
        ("battery_temp_c", "battery.temperature"),
    ):
        if name in variables:
            enter(draft, field_name, variables[name], name)
    _largest("load_pct", _LOADS, variables, draft)
    for name in _WATTS:
        if name in variables and "watts" not in draft.numbers:
            enter(draft, "watts", variables[name], name)
    if "watts" not in draft.numbers:
        lines = Draft()
        watts = [enter(lines, "watts", variables[name], name) for name in _WATTS_OF_LINES if name in variables]
        reported = [value for value in watts if value is not None]
        if reported and len(reported) == len(watts):
            enter(draft, "watts", f"{sum(reported):.3f}", "output.L*.realpower")
    running = [name for name in _TIMERS if is_running(variables.get(name, ""))]
    for name in running:
        before_s = draft.numbers.get("output_off_in_s")
        value = enter(draft, "output_off_in_s", variables[name], name)
        if value is not None and before_s is not None and value < before_s:
            draft.numbers["output_off_in_s"], draft.provenance["output_off_in_s"] = value, name


def is_running(text: str) -> bool:
    """Whether a timer counts down: drivers write -1, -60, 0 or (Tripp Lite) 65535 where none does."""
    return bool(text.strip("0. ")) and not text.lstrip().startswith("-") and text.strip() not in _SATURATED


def _largest(field_name: str, names: tuple[str, ...], variables: Mapping[str, str], draft: Draft) -> list[float]:
    """Take the largest of several variables, for of three lines the worst counts; return all that are believed."""
    found: list[float] = []
    for name in names:
        value = enter(draft, field_name, variables[name], name) if name in variables else None
        if value is None:
            continue
        if found and value > max(found):
            draft.numbers[field_name], draft.provenance[field_name] = value, name
        found.append(value)
    return found


def _output_source(tokens: frozenset[str], draft: Draft, *, input_gone: bool, oddities: list[str]) -> OutputSource:
    """Of contradicting tokens the one that costs more if it is missed counts: battery before off before bypass."""
    if "OB" in tokens:
        if "OL" in tokens:
            oddities.append("ups.status says OL and OB at once: battery counts")
        if "OFF" in tokens:
            oddities.append("ups.status says OFF on battery: battery counts, for this host is running")
        return OutputSource.BATTERY
    discharges = "DISCHRG" in tokens
    if discharges and input_gone:
        oddities.append("ups.status says DISCHRG and not OB, and the input has no voltage: that is battery")
        return OutputSource.BATTERY
    if "!OL" in tokens:
        oddities.append("ups.status is !OL: not on line, without another source")
        return OutputSource.BATTERY if discharges else OutputSource.UNKNOWN
    if discharges and "OL" in tokens:
        oddities.append("ups.status says OL DISCHRG: many drivers do at a full battery; the voltage and OB decide")
    if "OFF" in tokens:
        if "OL" not in tokens or not draft.numbers.get("load_pct"):
            return OutputSource.OFF
        oddities.append("ups.status is OL OFF, but with a load, so OFF does not count")
    for token, source in (
        ("BYPASS", OutputSource.BYPASS),
        ("ECO", OutputSource.ECO),
        ("BOOST", OutputSource.BOOST),
        ("TRIM", OutputSource.TRIM),
        ("OL", OutputSource.UTILITY),
    ):
        if token in tokens:
            return source
    return OutputSource.UNKNOWN


def _states(tokens: frozenset[str], variables: Mapping[str, str], draft: Draft) -> None:
    for token, state in _STATES.items():
        if token in tokens:
            draft.states[state] = f"{STATUS} {token}"
    if draft.output_source is OutputSource.OFF:
        draft.states[State.OUTPUT_OFF] = f"{STATUS} OFF"
    # "In progress" (usbhid-ups), "TestInProgress" (snmp-ups): no token stands for a self-test in these.
    if "inprogress" in "".join(filter(str.isalpha, variables.get(_TEST, "")[:64].lower())):
        draft.states.setdefault(State.SELF_TEST, _TEST)
    bad = variables.get(_BAD_PACKS, "").partition(".")[0].strip()
    if bad.isdecimal() and bad.isascii() and bad.strip("0"):
        draft.states.setdefault(State.REPLACE_BATTERY, _BAD_PACKS)


def _input(volts: list[float], draft: Draft, oddities: list[str]) -> None:
    """Say whether utility is at the input.

    Drivers renew the status every 2 s and the voltage every 30 (pollfreq), so on battery volts are not evidence, and
    off battery a missing voltage is from the last outage.
    """
    is_present = is_input_there(volts)
    if draft.output_source is OutputSource.BATTERY:
        draft.input_present = False if is_present is False else None
    elif is_present is False:
        oddities.append("no voltage at the input, and not on battery: that voltage does not count")
    else:
        draft.input_present = True if is_present or any(volt >= 80.0 for volt in volts) else None
    if draft.input_present is not None:
        draft.provenance["input_present"] = draft.provenance["input_v"]


# --- The driver behind upsd -----------------------------------------------------------------------------------------


def forgeable_behind(variables: Mapping[str, str]) -> str:
    """Say how the driver's own answers could be forged, "" when it has a cable to its UPS, or SNMP v3."""
    driver = variables.get("driver.name", "")
    if driver == "dummy-ups" and "@" in variables.get("driver.parameter.port", ""):
        return "dummy-ups repeats another upsd"
    if driver not in _NETWORK_DRIVERS:
        return "" if driver else "upsd does not name the driver"
    version = variables.get("driver.parameter.snmp_version", "v1")
    if driver == "snmp-ups" and version == "v3":
        level = variables.get("driver.parameter.secLevel", "noAuthNoPriv")
        return "" if level.startswith("auth") else "snmp-ups reads the card without authentication"
    return f"{driver} reads the UPS over the network" + (f" by SNMP {version}" if driver == "snmp-ups" else "")


def slow_behind(variables: Mapping[str, str]) -> str:
    """Say why upsd itself hears of an outage late, "" when it does not: we can be no faster than its driver."""
    driver = variables.get("driver.name", "")
    interval_s = _seconds(variables, "driver.parameter.pollinterval", 2.0)
    if driver == "snmp-ups":
        freq_s = _seconds(variables, "driver.parameter.pollfreq", _SNMP_POLLFREQ_S)
        if freq_s > _SLOWEST_POLL_S:
            return f"snmp-ups asks the card every {freq_s:g} s only (set pollfreq = 1 for it in ups.conf)"
    if interval_s <= _SLOWEST_POLL_S:
        return ""
    if driver == "apcupsd-ups":  # It sets its own interval, whatever ups.conf says.
        return f"apcupsd-ups asks apcupsd every {interval_s:g} s only (use a source of kind apcupsd in its place)"
    return f"its driver asks the UPS every {interval_s:g} s only (set pollinterval = 1 in ups.conf)"


def _seconds(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name, "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 7 else default
