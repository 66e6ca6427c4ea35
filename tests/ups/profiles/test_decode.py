"""The decoder on made walks and their overlays: every lie that a real card has told must end as None, never as 0."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.model.events import OutputSource
from powerguard.ups.profiles.decode import Decoded, decode, redundant
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.schema import OnBatteryWitnesses
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid
from powerguard.ups.profiles.walk import parse_walk

A = "1.3.6.1.4.1.318.1.1.1"
U = "1.3.6.1.2.1.33.1"
XUPS = "1.3.6.1.4.1.534.1"
PROFILES = load_profiles(None).ranked()
MINUS_ONE_UNSIGNED = 4294967295


def walk(name: str, overlay: dict[str, Any] | None = None) -> dict[str, Answer]:
    """Return a made walk with some objects replaced (None: taken away)."""
    path = Path(__file__).parent / "walks" / f"{name}.walk"
    answers = parse_walk(path.read_text(encoding="utf-8"), path.name)
    answers.update(overlay or {})
    return {oid: answer for oid, answer in answers.items() if answer is not None}


def decode_case(name: str, overlay: dict[str, Any] | None = None) -> Decoded:
    return decode(PROFILES, walk(name, overlay))


def why(decoded: Decoded, field: str) -> str:
    return "; ".join(rejected.why for rejected in decoded.rejected if rejected.field == field)


def test_an_apc_on_utility() -> None:
    """Golden numbers: tenths, TimeTicks and the high-precision objects first."""
    decoded = decode_case("apc")
    assert decoded.output_source is OutputSource.UTILITY
    assert (decoded.runtime_s, decoded.charge_pct, decoded.load_pct, decoded.watts) == (1740, 99.5, 42.1, 1134)
    assert (decoded.input_v, decoded.input_present, decoded.battery_temp_c) == (230.8, True, 25.4)
    assert (decoded.on_battery_s, decoded.low_battery, decoded.testing, decoded.stale) == (0, False, False, None)
    assert (decoded.alarms, decoded.witnesses, decoded.rejected, decoded.warnings) == ((), (), (), ())
    assert dict(decoded.provenance)["runtime_s"] == "upsAdvBatteryRunTimeRemaining"


def test_an_apc_on_battery_brings_three_witnesses() -> None:
    """High precision says 0 V on battery and 0 where it is not supported: the whole-number object decides."""
    flags = b"01000100000000000010" + b"0" * 44
    on_battery = {f"{A}.4.1.1.0": 3, f"{A}.2.1.2.0": 1250, f"{A}.3.3.1.0": 0, f"{A}.3.2.1.0": 0, f"{A}.11.1.1.0": flags}
    decoded = decode_case("apc", on_battery)
    assert decoded.output_source is OutputSource.BATTERY
    assert (decoded.on_battery_s, decoded.input_present, decoded.alarms) == (12.5, False, ("on_battery",))
    assert decoded.witnesses == ("on_battery_s", "input_present", "alarms")


def test_an_apc_at_the_end() -> None:
    """On battery a small runtime, and 0 beside a low battery, are real."""
    end = {f"{A}.4.1.1.0": 3, f"{A}.2.1.1.0": 3, f"{A}.2.2.3.0": 0, f"{A}.2.3.1.0": 31}
    decoded = decode_case("apc", end)
    assert (decoded.runtime_s, decoded.charge_pct, decoded.low_battery) == (0, 3.1, True)
    assert decode_case("apc", {f"{A}.4.1.1.0": 3, f"{A}.2.2.3.0": 900}).runtime_s == 9


@pytest.mark.parametrize(
    ("status", "source", "testing", "calibrating"),
    [
        (4, OutputSource.BOOST, False, False),
        (6, OutputSource.BYPASS, False, False),
        (7, OutputSource.OFF, False, False),
        (11, OutputSource.OFF, False, False),
        (12, OutputSource.TRIM, False, False),
        (13, OutputSource.ECO, False, False),
        (15, OutputSource.BATTERY, True, False),
        (17, OutputSource.OFF, False, False),
        (19, OutputSource.BYPASS, False, False),
        (20, OutputSource.ECO, False, False),
        (21, OutputSource.BYPASS, False, False),
        (22, OutputSource.BYPASS, False, False),
        (24, OutputSource.BATTERY, False, True),
        (25, OutputSource.OFF, False, False),
        (28, OutputSource.UTILITY, True, False),
        (1, OutputSource.UNKNOWN, False, False),
        (77, OutputSource.UNKNOWN, False, False),
    ],
)
def test_apc_statuses(status: int, source: OutputSource, testing: bool, calibrating: bool) -> None:
    decoded = decode_case("apc", {f"{A}.4.1.1.0": status})
    assert (decoded.output_source, decoded.testing, decoded.calibrating) == (source, testing, calibrating)


def test_a_card_that_lost_its_ups_serves_frozen_values() -> None:
    """The numbers all look good; the reading must not be used."""
    decoded = decode_case("apc", {f"{A}.8.1.0": 2})
    assert decoded.stale == "the card has lost the UPS behind it (upsCommStatus): its values are frozen"
    alarm = {f"{U}.6.1.0": 1, f"{U}.6.2.1.2.1": Oid(f"{U}.6.3.20")}
    assert "upsAlarmDescr" in (decode_case("rfc1628", alarm).stale or "")


def test_apc_battery_fault_or_none_counts_as_low() -> None:
    """Both may end at any moment."""
    fault, none = decode_case("apc", {f"{A}.2.1.1.0": 4}), decode_case("apc", {f"{A}.2.1.1.0": 5})
    assert (fault.low_battery, fault.replace_battery, fault.alarms) == (True, True, ("battery_fault",))
    assert (none.low_battery, none.replace_battery, none.alarms) == (True, True, ("battery_missing",))


def test_unsupported_high_precision_falls_back() -> None:
    decoded = decode_case("apc", {f"{A}.2.3.1.0": 0, f"{A}.2.3.2.0": 0, f"{A}.4.3.3.0": None})
    assert (decoded.charge_pct, decoded.battery_temp_c, decoded.load_pct) == (100, 25, 42)
    assert dict(decoded.provenance)["charge_pct"] == "upsAdvBatteryCapacity"


@pytest.mark.parametrize(
    ("overlay", "field"),
    [
        ({f"{A}.2.2.3.0": MINUS_ONE_UNSIGNED}, "runtime_s"),
        ({f"{A}.2.2.3.0": 0}, "runtime_s"),
        ({f"{A}.2.2.3.0": 2900}, "runtime_s"),
        ({f"{A}.2.2.3.0": Missing.NULL}, "runtime_s"),
        ({f"{A}.2.3.1.0": 1001, f"{A}.2.2.1.0": 255}, "charge_pct"),
        ({f"{A}.4.2.8.0": -1}, "watts"),
        ({f"{A}.4.2.8.0": 0}, "watts"),
        ({f"{A}.2.3.2.0": 0, f"{A}.2.2.2.0": 255}, "battery_temp_c"),
        ({f"{A}.2.2.3.0": b"1740"}, "runtime_s"),
        ({f"{A}.4.3.3.0": 2**70, f"{A}.4.2.3.0": -1}, "load_pct"),
    ],
)
def test_apc_sentinels_are_none_and_say_why(overlay: dict[str, Any], field: str) -> None:
    decoded = decode_case("apc", overlay)
    assert getattr(decoded, field) is None
    assert why(decoded, field)


@pytest.mark.parametrize("minutes", [-1, 0, 546, 1092, 4095, 5999, 9999, 15300, 65532, 65535, MINUS_ONE_UNSIGNED])
def test_rfc1628_runtime_sentinels(minutes: int) -> None:
    """Huawei says 2^32-1 minutes, Marathon 0 at 100 %, Socomec and Vertiv 65535, XPPC 9999: none of it is a time.

    1092 minutes are the 65,535 seconds of a full 16-bit counter, 15300 the 255 hours of a full byte.
    """
    assert decode_case("rfc1628", {f"{U}.2.3.0": minutes}).runtime_s is None


@pytest.mark.parametrize(("seconds", "runtime_s"), [(65535, None), (65532, None), (-1, 7200.0), (None, 7200.0)])
def test_a_full_counter_in_seconds_rejects_the_minutes_too(seconds: int | None, runtime_s: float | None) -> None:
    """xupsBatTimeRemaining at its ceiling: RFC 1628's minutes repeat it. Where it says nothing, the minutes count."""
    answers = walk("rfc1628", {f"{U}.2.3.0": 120, f"{XUPS}.4.5.0": 3, f"{XUPS}.2.4.0": 100, f"{XUPS}.2.1.0": seconds})
    assert decode(PROFILES, answers).runtime_s == runtime_s


@pytest.mark.parametrize(("raw", "reported", "replace"), [(1, True, False), (2, True, True), (0, False, False)])
def test_a_value_that_the_mib_does_not_define_answers_nothing(raw: int, reported: bool, replace: bool) -> None:
    """upsAdvBatteryReplaceIndicator knows 1 and 2. XPPC cards answer 0 in its twin: that is no "battery is good"."""
    decoded = decode_case("apc", {f"{A}.2.2.4.0": raw})
    assert (decoded.replace_reported, decoded.replace_battery) == (reported, replace)


@pytest.mark.parametrize("seconds", [-1, 0])
def test_rfc1628_without_a_countdown(seconds: int) -> None:
    """upsShutdownAfterDelay is -1 while no countdown runs: nothing is rejected."""
    decoded = decode_case("rfc1628", {f"{U}.8.2.0": seconds})
    assert (decoded.output_off_in_s, why(decoded, "output_off_in_s")) == (None, "")
    assert decode_case("rfc1628", {f"{U}.8.2.0": 40}).output_off_in_s == 40
    assert why(decode_case("rfc1628", {f"{U}.8.2.0": -7}), "output_off_in_s")


def test_rfc1628_zero_minutes_on_battery() -> None:
    """0 is real only at the end: beside a low battery, or a charge of 20 % and less."""
    battery = {f"{U}.4.1.0": 5, f"{U}.2.3.0": 0}
    assert decode_case("rfc1628", battery).runtime_s is None
    assert decode_case("rfc1628", {**battery, f"{U}.2.4.0": 20}).runtime_s == 0
    assert decode_case("rfc1628", {**battery, f"{U}.2.4.0": 21}).runtime_s is None
    assert decode_case("rfc1628", {**battery, f"{U}.2.1.0": 3}).runtime_s == 0


def test_rows_of_lines_that_are_not_there_do_not_count() -> None:
    decoded = decode_case("rfc1628")
    assert (decoded.load_pct, decoded.watts, decoded.input_v, decoded.input_present) == (38, 410, 230, True)
    nulls = {f"{U}.{column}.{line}": Missing.NULL for column in ("4.4.1.5", "4.4.1.4", "3.3.1.3") for line in (2, 3)}
    assert decode_case("rfc1628", {**nulls, f"{U}.3.2.0": None, f"{U}.4.3.0": None}).load_pct == 38


def test_three_phases_the_worst_line_and_the_sum() -> None:
    decoded = decode_case("rfc1628-three-phase")
    assert (decoded.load_pct, decoded.watts, decoded.input_v, decoded.input_present) == (34, 3700, 231, True)


def test_one_of_three_phases_lost() -> None:
    """On utility the rest may carry; on battery nobody can say whether utility is there."""
    lost = {f"{U}.3.3.1.3.2.0": 0}
    assert decode_case("rfc1628-three-phase", lost).input_present is True
    assert decode_case("rfc1628-three-phase", {**lost, f"{U}.4.1.0": 5}).input_present is None
    gone = {f"{U}.3.3.1.3.{line}.0": 3 for line in (1, 2, 3)}
    assert decode_case("rfc1628-three-phase", {**gone, f"{U}.4.1.0": 5}).input_present is False


def test_an_inverter_that_says_battery_for_ever_has_no_witness() -> None:
    """CE+T TSI: fed from a DC plant, output source battery, 0 s on battery, 238 V at the input."""
    decoded = decode_case("rfc1628", {f"{U}.4.1.0": 5, f"{U}.2.3.0": 6000, f"{U}.3.3.1.3.1": 238})
    assert decoded.output_source is OutputSource.BATTERY
    assert (decoded.witnesses, decoded.input_present, decoded.runtime_s) == ((), True, 360_000)


def test_the_alarm_table_names_what_it_lists() -> None:
    rows = {f"{U}.6.2.1.2.{row}": Oid(f"{U}.6.3.{alarm}") for row, alarm in ((3, 2), (9, 3), (11, 8), (12, 99))}
    assert decode_case("rfc1628", rows).alarms == (), "rows with a count of 0 are old ones"
    decoded = decode_case("rfc1628", {**rows, f"{U}.6.1.0": 4, f"{U}.4.1.0": 5})
    assert decoded.alarms == ("low_battery", "on_battery", "overload")
    assert (decoded.low_battery, decoded.overload, decoded.witnesses) == (True, True, ("alarms",))


def test_input_bad_beats_ghost_volts() -> None:
    """A brownout leaves volts at the input that nothing can run on."""
    decoded = decode_case(
        "rfc1628", {f"{U}.6.1.0": 1, f"{U}.6.2.1.2.1": Oid(f"{U}.6.3.6"), f"{U}.4.1.0": 5, f"{U}.3.3.1.3.1": 95}
    )
    assert (decoded.input_present, decoded.input_v) == (False, 95)


def test_a_shutdown_countdown_reads_back() -> None:
    assert decode_case("rfc1628", {f"{U}.8.2.0": 120}).output_off_in_s == 120
    assert decode_case("rfc1628", {f"{U}.8.2.0": 0}).output_off_in_s is None
    assert decode_case("rfc1628").output_off_in_s is None


def test_a_calibration_is_distinguished_from_a_self_test() -> None:
    running = {f"{U}.7.3.0": 5}
    assert decode_case("rfc1628", running).testing
    assert not decode_case("rfc1628", running).calibrating
    deep = decode_case("rfc1628", {**running, f"{U}.7.1.0": Oid(f"{U}.7.7.5")})
    assert (deep.testing, deep.calibrating) == (True, True)


def test_two_families_of_one_card_merge_field_by_field() -> None:
    """Vendor first, RFC 1628 for what the vendor lacks; rounding is no disagreement."""
    answers = {**walk("rfc1628", {f"{U}.2.3.0": 29, f"{U}.8.2.0": 240}), **walk("apc", {f"{A}.4.2.8.0": None})}
    decoded = decode(PROFILES, answers)
    assert (decoded.runtime_s, decoded.watts, decoded.output_off_in_s) == (1740, 410, 240)
    assert dict(decoded.provenance)["watts"] == "upsOutputPower"
    assert decoded.warnings == ()


def test_two_runtimes_far_apart_the_smaller_counts() -> None:
    decoded = decode(PROFILES, {**walk("rfc1628", {f"{U}.2.3.0": 10}), **walk("apc")})
    assert decoded.runtime_s == 600
    (warning,) = decoded.warnings
    assert warning.startswith("upsAdvBatteryRunTimeRemaining says 1740 s of runtime, upsEstimatedMinutesRemaining says")


def test_a_vendor_runtime_of_nothing_leaves_the_other() -> None:
    """A useless vendor object must not hide the standard one, on battery either."""
    for status, source in ((2, 3), (3, 5)):
        overlay = {f"{A}.4.1.1.0": status, f"{A}.2.2.3.0": 0, f"{U}.4.1.0": source}
        assert decode(PROFILES, {**walk("rfc1628"), **walk("apc"), **overlay}).runtime_s == 2100


def test_battery_in_one_family_overrules_calm_in_the_other() -> None:
    """The core still wants its second witness; here nothing may be swallowed."""
    decoded = decode(PROFILES, {**walk("apc"), **walk("rfc1628", {f"{U}.4.1.0": 5})})
    assert decoded.output_source is OutputSource.BATTERY
    assert decoded.warnings == ("upsBasicOutputStatus says utility, upsOutputSource says battery",)


def test_kilowatts_where_watts_belong() -> None:
    """Huawei: 1 at 27 % of 6 kVA."""
    decoded = decode_case("rfc1628", {f"{U}.4.4.1.4.1": 1, f"{U}.4.4.1.5.1": 27})
    assert decoded.watts is None
    assert why(decoded, "watts") == "1 W at 27 % would be a UPS of 4 W"


def test_a_charge_of_nothing_beside_a_good_runtime() -> None:
    assert decode_case("rfc1628", {f"{U}.2.4.0": 0}).charge_pct is None
    assert decode_case("rfc1628", {f"{U}.2.4.0": 0, f"{U}.4.1.0": 5}).charge_pct is None, (
        "nor at the beginning of an outage"
    )
    assert decode_case("rfc1628", {f"{U}.2.4.0": 0, f"{U}.4.1.0": 5, f"{U}.2.3.0": 0}).charge_pct == 0
    assert decode_case("rfc1628", {f"{U}.2.4.0": 0, f"{U}.2.1.0": 3}).charge_pct == 0


def test_a_short_runtime_confirms_a_charge_of_nothing_on_battery() -> None:
    """Of two families the cautious one counts: 0 s and 0 % of one of them are believed, and not 2100 s of the other."""
    empty = {f"{U}.4.1.0": 5, f"{U}.2.4.0": 0, f"{A}.4.1.1.0": 3, f"{A}.2.2.1.0": 0, f"{A}.2.3.1.0": 0}
    decoded = decode(PROFILES, {**walk("rfc1628"), **walk("apc"), **empty, f"{A}.2.2.3.0": 0})
    assert (decoded.charge_pct, decoded.runtime_s) == (0, 0)
    assert decode(PROFILES, {**walk("rfc1628"), **walk("apc"), **empty}).charge_pct is None


def test_witnesses_that_a_family_gets_wrong_are_silenced() -> None:
    rfc1628 = load_profiles(None).by_name["rfc1628"]
    lying = rfc1628.model_copy(update={"rank": 20, "on_battery": OnBatteryWitnesses(confirm_by=[])})
    overlay = {f"{U}.4.1.0": 5, f"{U}.2.2.0": 9, f"{U}.6.1.0": 1, f"{U}.6.2.1.2.1": Oid(f"{U}.6.3.2")}
    answers = walk("rfc1628", {**overlay, f"{U}.3.3.1.3.1": 0})
    assert decode([rfc1628], answers).witnesses == ("on_battery_s", "input_present", "alarms")
    decoded = decode([lying], answers)
    assert (decoded.witnesses, decoded.on_battery_s, decoded.input_present, decoded.alarms) == ((), None, None, ())


def test_nothing_answered_is_no_reading() -> None:
    decoded = decode(PROFILES, {})
    assert decoded.output_source is None
    assert decoded.reading(at_s=1, ups="a", source="snmp", authenticated=False).output_source == "unknown"


# --- A 0 for what is not measured -----------------------------------------------------------------------------------

THREE = {f"{A}.9.2.3.1.3.1.1.{line}": 232 - line for line in (1, 2, 3)} | {
    f"{A}.9.3.3.1.10.1.1.{line}": load for line, load in ((1, 40), (2, 55), (3, 70))
}
UNSUPPORTED = {f"{A}.3.3.1.0": None, f"{A}.3.2.1.0": 0, f"{A}.4.3.3.0": 0, f"{A}.4.2.3.0": 0}
"""What a three-phase APC answers for the objects of one phase."""


def test_a_three_phase_apc_is_read_by_its_phases() -> None:
    """Its single objects answer 0: believed, the input would be gone and the load nothing."""
    decoded = decode_case("apc", {**UNSUPPORTED, **THREE})
    assert (decoded.input_v, decoded.input_present) == (231, True)
    assert (decoded.load_pct, decoded.load_lines) == (70, (40, 55, 70))
    assert dict(decoded.provenance)["input_v"] == "upsPhaseInputVoltage"
    assert "not measured" in why(decoded, "input_v")
    assert "not measured" in why(decoded, "load_pct")


@pytest.mark.parametrize("status", [15, 24])
def test_a_test_of_a_three_phase_apc_is_no_outage(status: int) -> None:
    """The battery carries the load with utility there: with the input gone it would be one."""
    decoded = decode_case("apc", {**UNSUPPORTED, **THREE, f"{A}.4.1.1.0": status, f"{A}.2.1.2.0": 500})
    assert (decoded.output_source, decoded.input_present) == (OutputSource.BATTERY, True)


def test_an_outage_of_a_three_phase_apc_has_its_input_gone() -> None:
    """All lines at 0, or at the volts of a ghost, agree with the single object."""
    for volts in (0, 4):
        dead = {f"{A}.9.2.3.1.3.1.1.{line}": volts for line in (1, 2, 3)}
        decoded = decode_case("apc", {**UNSUPPORTED, **THREE, **dead, f"{A}.4.1.1.0": 3, f"{A}.2.1.2.0": 500})
        assert (decoded.input_v, decoded.input_present, decoded.load_pct) == (0, False, 70)
    single = decode_case("apc", {**UNSUPPORTED, f"{A}.4.1.1.0": 3, f"{A}.2.1.2.0": 500})
    assert (single.input_v, single.input_present, single.load_pct) == (0, False, 0)


def test_the_phases_are_asked_every_time_where_the_single_object_says_0() -> None:
    """On utility what a more trusted object tells is asked for more rarely; a doubtful 0 tells nothing."""
    answers = walk("apc", {**UNSUPPORTED, **THREE})
    assert spare(answers).isdisjoint({*THREE, f"{A}.3.2.1.0", f"{A}.4.2.3.0"})
    assert set(THREE) <= spare(walk("apc", THREE))


def spare(answers: Mapping[str, Answer]) -> frozenset[str]:
    return redundant(PROFILES, answers, decode(PROFILES, answers))


@pytest.mark.parametrize(
    ("family", "volts", "read"),
    [
        ("apc", {f"{A}.3.3.1.0": None, f"{A}.3.2.1.0": 0}, 0),
        ("rfc1628", {f"{U}.3.3.1.3.1": 0}, 0),
        ("apc", {f"{A}.3.3.1.0": 231, f"{A}.3.2.1.0": None}, 23.1),
        ("apc", {f"{A}.3.3.1.0": 120, f"{A}.3.2.1.0": None}, 12),
    ],
)
def test_no_volts_on_utility_say_nothing_of_the_input(family: str, volts: dict[str, int | None], read: float) -> None:
    """A card that does not measure its input, or tells whole volts where tenths belong.

    With one more witness, a status that lags behind an outage.
    """
    since, seconds = {"apc": (f"{A}.2.1.2.0", 500), "rfc1628": (f"{U}.2.2.0", 5)}[family]
    quiet = decode_case(family, volts)
    assert (quiet.output_source, quiet.input_v, quiet.input_present) == (OutputSource.UTILITY, None, None)
    assert f"{read:g} V at an input that feeds the output: not measured" in why(quiet, "input_v")
    lagging = decode_case(family, {**volts, since: seconds})
    assert (lagging.output_source, lagging.input_v, lagging.input_present) == (OutputSource.UTILITY, read, False)


def test_an_alarm_is_a_second_witness_of_no_volts() -> None:
    alarm = {f"{U}.6.1.0": 1, f"{U}.6.2.1.2.1": Oid(f"{U}.6.3.2"), f"{U}.3.3.1.3.1": 0}
    assert decode_case("rfc1628", alarm).input_present is False
    bad = {**alarm, f"{U}.6.2.1.2.1": Oid(f"{U}.6.3.6")}
    assert decode_case("rfc1628", bad).input_present is False
