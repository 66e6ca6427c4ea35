"""What upsd's variables mean: every token, every oddity that the field is known for, and numbers that are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.model.events import OutputSource, Reading
from powerguard.ups.nut.variables import (
    STATUS,
    STATUS_UNREPORTED,
    WANTED,
    DecodedVariables,
    forgeable_behind,
    interpret,
    slow_behind,
)
from powerguard.ups.profiles.vocabulary import NUMBERS

U, B = OutputSource.UTILITY, OutputSource.BATTERY


def decode_status(status: str, **more: str) -> DecodedVariables:
    """Interpret a status and other variables; `input__voltage` stands for input.voltage."""
    return interpret({STATUS: status} | {name.replace("__", "."): text for name, text in more.items()})


def read(status: str, **more: str) -> Reading:
    return decode_status(status, **more).reading(at_s=1.0, ups="a", source="s", authenticated=False)


@pytest.mark.parametrize(
    ("status", "source"),
    [
        ("OL", U),
        ("OL CHRG", U),
        ("ALARM OL", U),
        ("FSD OL", U),
        ("OL HB", U),
        ("OB", B),
        ("OB DISCHRG", B),
        ("FSD OB DISCHRG LB", B),
        ("OB OFF OB", B),
        ("OL OB", B),
        ("CAL OB DISCHRG", B),
        ("OL BYPASS", OutputSource.BYPASS),
        ("BYPASS", OutputSource.BYPASS),
        ("OL TRIM", OutputSource.TRIM),
        ("OL BOOST", OutputSource.BOOST),
        ("OL ECO", OutputSource.ECO),
        ("OFF", OutputSource.OFF),
        ("OL OFF", OutputSource.OFF),
        ("!OL", OutputSource.UNKNOWN),
        ("!OL DISCHRG", B),
        ("OL DISCHRG", U),
        ("", OutputSource.UNKNOWN),
        ("WAIT", OutputSource.UNKNOWN),
        ("ALARM", OutputSource.UNKNOWN),
        ("OLD", OutputSource.UNKNOWN),
        ("OBSOLETE", OutputSource.UNKNOWN),
        ("LB", OutputSource.UNKNOWN),
    ],
)
def test_where_the_output_comes_from(status: str, source: OutputSource) -> None:
    """Whole tokens in any order; battery outweighs what stands beside it, and nothing at all is never utility."""
    reading = read(status)
    assert reading.output_source is source
    assert (STATUS_UNREPORTED in reading.alarms) == (source is OutputSource.UNKNOWN)
    assert dict(reading.provenance)["output_source"] == STATUS


def test_tokens_become_fields() -> None:
    reading = read("ALARM FSD OB LB RB OVER CAL TEST")
    assert (reading.low_battery, reading.replace_battery, reading.overload) == (True, True, True)
    assert (reading.calibrating, reading.testing, reading.forced_shutdown) == (True, True, True)
    assert {"low_battery", "replace_battery", "overload", "general_fault"} <= set(reading.alarms)
    calm = read("OL")
    flags = {calm.low_battery, calm.replace_battery, calm.overload, calm.testing, calm.forced_shutdown}
    assert (flags, calm.alarms) == ({False}, ())


def test_story_6_bogus_off_and_bypass_flags() -> None:
    """Cards say OFF while the load runs: on battery it is battery, and beside a load it is utility."""
    assert read("OB OFF", ups__load="40").output_source is B
    assert read("OL OFF", ups__load="40").output_source is U
    assert read("OL OFF", ups__load="0").output_source is OutputSource.OFF
    assert read("OFF", ups__load="40").output_source is OutputSource.OFF
    assert "output_off" in read("OL OFF").alarms
    assert read("OB BYPASS").output_source is B
    assert any("OFF" in oddity for oddity in decode_status("OL OFF", ups__load="40").oddities)


def test_story_5_a_self_test_is_reported_as_one() -> None:
    """No token tells it with most drivers; ups.test.result does, in the words of each driver."""
    for result in ("In progress", "TestInProgress", "test in progress"):
        assert read("OB DISCHRG", ups__test__result=result).testing
    for result in ("Done and passed", "No test initiated", "", "Aborted"):
        assert not read("OB DISCHRG", ups__test__result=result).testing


def test_story_8_a_runtime_that_is_a_lie_is_none() -> None:
    """Full counters, 0 on utility, text: none of them is a runtime; on battery a small one is real."""
    for text in ("65535", "257698037760", "-1", "", "CPS", "0", "1e9", "nan", "12"):
        assert read("OL", battery__runtime=text, battery__charge="100").runtime_s is None
    assert read("OL", battery__runtime="1800.5").runtime_s == 1800.5
    assert read("OB", battery__runtime="12", battery__charge="4").runtime_s == 12
    assert read("OB", battery__runtime="0", battery__charge="100").runtime_s is None
    assert read("OB LB", battery__runtime="0", battery__charge="100").runtime_s == 0


def test_story_7_low_battery_at_a_high_charge_is_passed_on() -> None:
    """It may be a worn battery: the core weighs it, the source hides nothing."""
    reading = read("OB LB", battery__charge="90")
    assert (reading.low_battery, reading.charge_pct) == (True, 90)


@pytest.mark.parametrize(
    ("name", "field", "good", "bad"),
    [
        ("battery.charge", "charge_pct", "99.5", "101"),
        ("ups.load", "load_pct", "37", "999"),
        ("ups.realpower", "watts", "1080", "-5"),
        ("input.voltage", "input_v", "230.1", "6553.5"),
        ("battery.temperature", "battery_temp_c", "25.4", "-273"),
    ],
)
def test_numbers_pass_the_same_windows_as_a_card(name: str, field: str, good: str, bad: str) -> None:
    whole = interpret({STATUS: "OL", name: good})
    reading = whole.reading(at_s=1.0, ups="a", source="s", authenticated=False)
    assert (getattr(reading, field), whole.draft.rejected) == (float(good), [])
    assert dict(reading.provenance)[field] == name
    refused = interpret({STATUS: "OL", name: bad})
    assert getattr(refused.reading(at_s=1.0, ups="a", source="s", authenticated=False), field) is None
    assert [(one.field, one.oid) for one in refused.draft.rejected] == [(field, name)]


def test_of_three_lines_the_worst_counts() -> None:
    more = {f"output__L{line}__power__percent": str(30 + line) for line in (1, 2, 3)}
    watts = {f"output__L{line}__realpower": "1000" for line in (1, 2, 3)}
    volts = {f"input__L{line}-N__voltage": "230" for line in (1, 2, 3)}
    reading = read("OL", **more, **watts, **volts)
    assert (reading.load_pct, reading.watts, reading.input_present) == (33, 3000, True)
    gone = dict.fromkeys(volts, "3")
    assert read("OB", **gone).input_present is False
    assert read("OB", **{**gone, "input__L2-N__voltage": "230"}).input_present is None
    assert read("OL", **{**gone, "input__L2-N__voltage": "230"}).input_present is True
    del watts["output__L2__realpower"]
    assert read("OL", **watts, output__L2__realpower="x").watts is None


def test_whether_utility_is_at_the_input() -> None:
    """The voltage is renewed every 30 s: 230 V beside OB prove nothing, 0 V beside OL are the last outage's."""
    assert read("OB", input__voltage="0").input_present is False
    assert read("OB", input__voltage="230").input_present is None
    assert read("OB", input__voltage="50").input_present is None
    assert read("OL", input__voltage="230").input_present is True
    assert read("OL", input__voltage="0").input_present is None
    assert read("OL").input_present is None


def test_a_discharge_without_input_is_battery() -> None:
    """Some CyberPower units say OL DISCHRG in an outage; APC ones say it for months at a full battery."""
    assert read("OL DISCHRG", input__voltage="0").output_source is B
    assert read("OL DISCHRG", input__voltage="230").output_source is U
    assert read("OL CHRG", input__voltage="0").output_source is U


@pytest.mark.parametrize(
    ("shutdown", "reboot", "off_in_s"),
    [
        ("-1", "-1", None),
        ("-60", "0", None),
        ("65535", "65535", None),
        ("20", "65535", 20),
        ("0", "0", None),
        ("", "", None),
        ("20", "-1", 20),
        ("-1", "15", 15),
        ("20", "15", 15),
        ("15", "20", 15),
        ("120.5", "", 120.5),
        ("x", "", None),
        ("999999", "", None),
    ],
)
def test_a_countdown_to_output_off(shutdown: str, reboot: str, off_in_s: float | None) -> None:
    reading = read("OL", ups__timer__shutdown=shutdown, ups__timer__reboot=reboot)
    assert reading.output_off_in_s == off_in_s


def test_unknown_tokens_are_named_and_cost_nothing() -> None:
    whole = decode_status("OL FLUX:9 OLIVE OLIVE")
    assert whole.unknown == ("FLUX:9", "OLIVE")
    assert whole.draft.output_source is U
    assert decode_status("OB " + "X " * 5000).unknown == ("X",)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"driver.name": "usbhid-ups"}, ""),
        ({"driver.name": "snmp-ups"}, "SNMP v1"),
        ({"driver.name": "snmp-ups", "driver.parameter.snmp_version": "v2c"}, "SNMP v2c"),
        ({"driver.name": "snmp-ups", "driver.parameter.snmp_version": "v3"}, "without authentication"),
        (
            {
                "driver.name": "snmp-ups",
                "driver.parameter.snmp_version": "v3",
                "driver.parameter.secLevel": "authPriv",
            },
            "",
        ),
        ({"driver.name": "netxml-ups"}, "over the network"),
        ({"driver.name": "dummy-ups", "driver.parameter.port": "su@10.0.0.1"}, "repeats"),
        ({"driver.name": "dummy-ups", "driver.parameter.port": "su.dev"}, ""),
        ({}, "does not name"),
    ],
)
def test_tls_to_upsd_does_not_vouch_for_what_its_driver_reads(variables: dict[str, str], why: str) -> None:
    found = forgeable_behind(variables)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"driver.name": "snmp-ups"}, "every 30 s"),
        ({"driver.name": "snmp-ups", "driver.parameter.pollfreq": "1"}, ""),
        ({"driver.name": "usbhid-ups", "driver.parameter.pollfreq": "30"}, ""),
        ({"driver.name": "usbhid-ups", "driver.parameter.pollinterval": "15"}, "every 15 s"),
        ({"driver.name": "usbhid-ups", "driver.parameter.pollinterval": "x" * 9}, ""),
        ({"driver.name": "apcupsd-ups", "driver.parameter.pollinterval": "60"}, "(use a source of kind apcupsd"),
    ],
)
def test_story_10_a_driver_that_polls_too_slowly_is_named(variables: dict[str, str], why: str) -> None:
    """Users tune POLLFREQ of upsmon, and the 30 s are in the driver."""
    found = slow_behind(variables)
    assert why in found
    assert bool(found) == bool(why)


VALUES = st.text(max_size=20) | st.sampled_from(["0", "-1", "230", "1e5", "9" * 18, "inf", "nan", "OL", "OB LB", "٣"])


@given(st.dictionaries(st.sampled_from(WANTED), VALUES))
def test_every_text_has_a_meaning(variables: dict[str, str]) -> None:
    """Nothing raises, every number lies within its window, and without OL nothing is utility."""
    reading = interpret(variables).reading(at_s=1.0, ups="a", source="s", authenticated=False)
    for name, window in NUMBERS.items():
        value = getattr(reading, name, None)
        assert value is None or window.lowest <= value <= window.highest
    if "OL" not in variables.get(STATUS, "").split():
        assert reading.output_source is not U
