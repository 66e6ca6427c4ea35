"""From a status of apcupsd to what it says in our words: pure, and as slow to believe as the decoder of cards."""

from typing import Final

from powerguard.core.readings import OutputSource
from powerguard.profiles import told
from powerguard.profiles.draft import Draft
from powerguard.profiles.vocabulary import State
from powerguard.protocols.nis import Flag, Status

_NUMBERS: Final = (
    ("BCHARGE", "charge_pct", 1.0),
    ("TIMELEFT", "runtime_s", 60.0),
    ("LOADPCT", "load_pct", 1.0),
    ("LINEV", "input_v", 1.0),
    ("ITEMP", "battery_temp_c", 1.0),
)
"""TONBATT is left out: it is apcupsd's own clock since it saw ONBATT, so it is no second witness, and it starts again
at 0 with apcupsd. NOMPOWER times LOADPCT would be nobody's measurement."""
_STATES: Final = (
    (Flag.BATTLOW, State.LOW_BATTERY),
    (Flag.REPLACEBATT, State.REPLACE_BATTERY),
    (Flag.OVERLOAD, State.OVERLOAD),
    (Flag.CALIBRATION, State.CALIBRATION),
)
_SELF_TEST: Final = "Automatic or explicit self test"
_IN_PROGRESS: Final = "IP"


def draft_of(status: Status) -> Draft:
    """Return what a status says, not yet checked field against field (`told.reading` does that). Never raises."""
    draft = Draft(output_source=_output_source(status.flags))
    draft.provenance["output_source"] = "STATFLAG"
    for key, field, times in _NUMBERS:
        text = status.values.get(key, "N/A").partition(" ")[0]
        if text != "N/A":
            told.enter(draft, field, text, key, times=times)
    for flag, state in _STATES:
        if status.flags & flag:
            draft.states[state] = "STATFLAG"
    if not status.flags & Flag.BATTPRESENT:
        draft.states[State.BATTERY_MISSING] = "STATFLAG"
    tested_by = _self_test(status)
    if tested_by:
        draft.states[State.SELF_TEST] = tested_by
    if status.flags & Flag.ONLINE and status.flags & Flag.ONBATT:
        draft.warnings.append("STATFLAG says both ONLINE and ONBATT: battery counts")
    draft.input_present = told.is_input_there([draft.numbers["input_v"]] if "input_v" in draft.numbers else [])
    if draft.input_present is not None:
        draft.provenance["input_present"] = "LINEV"
    return draft


def _output_source(flags: int) -> OutputSource:
    """In bypass, off and before the first contact apcupsd sets neither bit, and then takes it for mains. We do not."""
    if flags & Flag.ONBATT:
        return OutputSource.BATTERY
    if not flags & Flag.ONLINE:
        return OutputSource.UNKNOWN
    if flags & Flag.BOOST:
        return OutputSource.BOOST
    return OutputSource.TRIM if flags & Flag.TRIM else OutputSource.UTILITY


def _self_test(status: Status) -> str:
    """Say which record tells of a self-test that runs now, or "".

    LASTXFER stays after the test until the next transfer, so on utility it is history.
    """
    if status.values.get("SELFTEST") == _IN_PROGRESS:
        return "SELFTEST"
    on_battery = bool(status.flags & Flag.ONBATT)
    return "LASTXFER" if on_battery and status.values.get("LASTXFER") == _SELF_TEST else ""
