"""What profiles can say of devices that say it badly, on a made family: each means has its case, and its limit."""

from pathlib import Path
from typing import Any

import pytest

from powerguard.core.model.events import OutputSource
from powerguard.ups.profiles.decode import Decoded, decode
from powerguard.ups.profiles.load import load_profiles, parse_profile
from powerguard.ups.profiles.probe import choose, identity, partly, unmet
from powerguard.ups.profiles.schema import Profile
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid
from powerguard.ups.profiles.walk import parse_walk

B = "1.3.6.1.4.1.99999.1"
U = "1.3.6.1.2.1.33.1"
HEAD = """\
name: mini
title: A made family
base: 1.3.6.1.4.1.99999.1
probe: {all_of: [output_source]}
output_source:
  - {object: mode, oid: .1.0, values: {0: utility, 1: battery, 2: null}, texts: {on line: utility, backup: battery}}
  - {object: bypassed, column: .9, values: {1: bypass, 2: null}}
"""


def mini(rest: str = "") -> Profile:
    return parse_profile(HEAD + rest, "mini.yaml")


def decode_values(profile: Profile, values: dict[str, Any]) -> Decoded:
    return decode([profile], {Oid(f"{B}{oid}"): value for oid, value in {".1.0": 0, **values}.items()})


def why(decoded: Decoded, field: str) -> list[str]:
    return [rejected.why for rejected in decoded.rejected if rejected.field == field]


# --- Enumerations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "bypassed", "source"),
    [
        (0, {}, OutputSource.UTILITY),
        (b" On Line ", {}, OutputSource.UTILITY),
        (b"BACKUP", {}, OutputSource.BATTERY),
        (b"?", {}, OutputSource.UNKNOWN),
        (2, {}, None),
        (2, {".9.1": 2}, None),
        (2, {".9.1": 2, ".9.2": 1}, OutputSource.BYPASS),
        (7, {".9.7.0": 1}, OutputSource.BYPASS),
        (1, {".9.1": 1}, OutputSource.BATTERY),
        (Oid("1.3.6"), {}, OutputSource.UNKNOWN),
    ],
)
def test_output_source_by_number_text_row_or_not_at_all(
    mode: Answer, bypassed: dict[str, int], source: OutputSource | None
) -> None:
    assert decode_values(mini(), {".1.0": mode, **bypassed}).output_source is source


def test_the_graver_word_on_the_battery_counts() -> None:
    """What a vendor calls normal and another object calls low is low; what nobody tells is None."""
    words = "{0: normal, 1: low, 2: charging, 3: missing, 4: null}"
    status = f"battery_status:\n  - {{object: cell, oid: .2.0, values: {words}}}\n"
    alarm = "states:\n  battery_depleted:\n    - {object: flat, oid: .3.0, is: [1]}\n"
    profile = mini(status + alarm)
    assert decode_values(profile, {}).battery_status is None
    assert decode_values(profile, {".2.0": 4}).battery_status is None
    assert decode_values(profile, {".2.0": 2}).battery_status == "charging"
    assert decode_values(profile, {".2.0": 9}).battery_status == "unknown"
    low = decode_values(profile, {".2.0": 1})
    assert (low.battery_status, low.low_battery, low.alarms) == ("low", True, ("low_battery",))
    flat = decode_values(profile, {".2.0": 0, ".3.0": 1})
    assert (flat.battery_status, flat.low_battery, dict(flat.provenance)["battery_status"]) == (
        "depleted",
        True,
        "flat",
    )
    both = decode_values(profile, {".2.0": 1, ".3.0": 1})
    assert (both.battery_status, both.alarms) == ("depleted", ("battery_depleted", "low_battery"))
    missing = decode_values(profile, {".2.0": 3})
    assert (missing.battery_status, missing.replace_battery) == ("missing", True)


def test_replacing_is_yes_no_or_not_reported() -> None:
    profile = mini("states:\n  replace_battery:\n    - {object: replace, oid: .4.0, is: [[2, 5]]}\n")
    assert (decode_values(profile, {}).replace_battery, decode_values(profile, {}).replace_reported) == (False, False)
    assert (
        decode_values(profile, {".4.0": 1}).replace_battery,
        decode_values(profile, {".4.0": 1}).replace_reported,
    ) == (False, True)
    assert decode_values(profile, {".4.0": 3}).replace_battery
    assert not decode_values(profile, {".4.0": Missing.NULL}).replace_reported


def test_on_battery_takes_a_witness() -> None:
    profile = mini("numbers:\n  on_battery_s:\n    - {object: since, oid: .5.0, unit: s}\n")
    assert decode_values(profile, {".1.0": 1}).on_battery is None
    assert decode_values(profile, {".1.0": 1, ".5.0": 0}).on_battery is None
    assert decode_values(profile, {".1.0": 1, ".5.0": 4}).on_battery is True
    assert decode_values(profile, {".5.0": 4}).on_battery is False
    assert decode_values(profile, {".1.0": 9}).on_battery is None


# --- Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "volts"), [(230, 230), (2313, 231.3), (1222, 122.2), (0, 0), (600, 600), (601, 60.1), (60_000, None)]
)
def test_another_unit_where_the_first_is_beyond_belief(raw: int, volts: float | None) -> None:
    """2313 V is 231.3 V of a card that counts tenths against its MIB; 230 stays what it says, and 0 on battery is 0."""
    profile = mini("numbers:\n  input_v:\n    - {object: volts, oid: .6.0, unit: V, or_unit: V/10}\n")
    assert decode_values(profile, {".1.0": 1, ".6.0": raw}).input_v == volts


@pytest.mark.parametrize("raw", [-1, 32767, 65534, 65535, 2147483647, 4294967295, -2147483648, -32768])
def test_counters_at_their_end_are_no_measurement_anywhere(raw: int) -> None:
    profile = mini("numbers:\n  watts:\n    - {object: power, oid: .7.0, unit: W}\n")
    assert (decode_values(profile, {".7.0": raw}).watts, why(decode_values(profile, {".7.0": raw}), "watts")) == (
        None,
        ["means: not measured"],
    )


@pytest.mark.parametrize(
    ("raw", "minutes"),
    [
        (b"74", 74),
        (b" 74.5\0\0", 74.5),
        (b"74,5", 74.5),
        (b"7,4,5", None),
        (b"12,34", 12.34),
        (b"1234,5", 1234.5),
        (b"1,234", None),
        (b" -1,234\0", None),
        (b"1,234,567", None),
        (b"74 min", None),
        (b"1e3", None),
        (b"", None),
    ],
)
def test_numbers_as_text(raw: bytes, minutes: float | None) -> None:
    profile = mini("numbers:\n  runtime_s:\n    - {object: left, oid: .6.0, unit: min, text: true}\n")
    assert decode_values(profile, {".6.0": raw}).runtime_s == (None if minutes is None else minutes * 60)


def test_a_string_of_flags_may_end_in_a_nul_and_holds_nothing_else() -> None:
    profile = mini("flag_strings:\n  - {object: flags, oid: .6.0, flags: {2: overload}}\n")
    assert decode_values(profile, {".6.0": b"0100\0"}).overload
    assert not decode_values(profile, {".6.0": b"01x0"}).overload
    assert not decode_values(profile, {".6.0": b"0"}).overload


@pytest.mark.parametrize(
    ("raw", "celsius"),
    [(24, 24), (253, 25.3), (-4, -4), (0, None), (-1, None), (-273, None), (-2731, None), (950, None)],
)
def test_degrees_of_the_standard_object_may_be_tenths(raw: int, celsius: float | None) -> None:
    """Some cards count upsBatteryTemperature in tenths; -273 is a sensor that is not there, in either unit."""
    answers: dict[str, Answer] = {Oid(f"{U}.4.1.0"): 3, Oid(f"{U}.2.4.0"): 90, Oid(f"{U}.2.7.0"): raw}
    profiles = choose(load_profiles(None).every(), answers, sys_object_id="", sys_descr="")
    assert decode(profiles, answers).battery_temp_c == celsius


LINES = """\
lines:
  output: {object: count, oid: .8.0}
numbers:
  load_pct:
    - {object: loads, column: .8.1, unit: "%/10", none: [-1], lines: output}
  watts:
    - {object: powers, column: .8.2, unit: W, lines: output}
"""


def test_lines_of_three_phases() -> None:
    """The worst load and the sum of the watts; a missing line is no line, an unbelievable one spoils the sum."""
    profile = mini(LINES)
    rows = {f".8.1.{line}": 100 * line for line in (1, 2, 3)} | {f".8.2.{line}": 1000 for line in (1, 2, 3)}
    assert (decode_values(profile, rows).load_pct, decode_values(profile, rows).load_lines) == (30, (10, 20, 30))
    assert decode_values(profile, rows).watts == 3000
    assert decode_values(profile, {**rows, ".8.0": 2}).load_lines == (10, 20)
    assert decode_values(profile, {**rows, ".8.0": 0}).load_lines == (10, 20, 30), "0 lines is no number of lines"
    two = {**rows, ".8.1.3": -1, ".8.2.3": Missing.NULL}
    assert (decode_values(profile, two).load_lines, decode_values(profile, two).watts) == ((10, 20), 2000), (
        "line 3 is not reported"
    )
    assert decode_values(profile, {**two, ".8.2.3": 1000}).load_pct is None, "its watts do"
    assert decode_values(profile, {**rows, ".8.1.2": -1}).load_pct is None, "there is a line 3, so there is a line 2"
    negative = decode_values(profile, {**rows, ".8.2.2": -13})
    assert (negative.watts, negative.load_pct) == (None, 30)


def test_lines_that_count_from_0() -> None:
    """The first line of some tables is row 0; the number of lines means as many."""
    profile = mini(LINES)
    rows = {f".8.1.{line}": 100 + line for line in (0, 1, 2)}
    assert decode_values(profile, {**rows, ".8.0": 2}).load_lines == (10.0, 10.1)
    without_the_first = {oid: raw for oid, raw in rows.items() if oid != ".8.1.0"}
    assert decode_values(profile, {**without_the_first, ".8.0": 1}).load_lines == (10.1,)


def test_two_objects_of_one_family_do_not_contradict_each_other() -> None:
    """A profile's list is an order of preference; only another family's word can be the cautious one."""
    text = (
        "numbers:\n  runtime_s:\n    - {object: fine, oid: .6.0, unit: s}\n    - {object: coarse, oid: .6.1, unit: s}\n"
    )
    decoded = decode_values(mini(text), {".6.0": 4000, ".6.1": 400})
    assert (decoded.runtime_s, decoded.warnings) == (4000, ())
    assert decode_values(mini(text), {".6.1": 400}).runtime_s == 400


def test_watts_that_no_three_phase_ups_could_have() -> None:
    """20 at 22 % of three lines: kilowatts. One line of a small UPS may well have 100 W at 22 %."""
    profile = mini(LINES)
    three = {f".8.1.{line}": 220 for line in (1, 2, 3)} | {f".8.2.{line}": 7 for line in (1, 2, 3)}
    assert why(decode_values(profile, three), "watts") == ["21 W at 22 % would be a UPS of 95 W"]
    assert decode_values(profile, {".8.1.1": 220, ".8.2.1": 100}).watts == 100
    assert decode_values(profile, {**three, ".8.2.1": 160}).watts is None


def test_what_the_first_family_gets_wrong_the_next_one_reports() -> None:
    """CyberPower: its own object has the watts, RFC 1628 beside it says 0; the other way round it must work too."""
    watts = "  watts:\n    - {object: own, oid: .7.0, unit: W}\n"
    profile = mini(f'numbers:\n{watts}  charge_pct:\n    - {{object: full, oid: .7.1.0, unit: "%"}}\n')
    standard = load_profiles(None).by_name["rfc1628"]
    answers: dict[str, Answer] = {
        Oid(f"{B}.1.0"): 0,
        Oid(f"{B}.7.0"): 0,
        Oid(f"{B}.7.1.0"): 0,
        **{
            Oid(f"{U}.{place}"): value
            for place, value in (("4.4.1.5.1", 10), ("4.4.1.4.1", 69), ("2.3.0", 40), ("2.4.0", 99))
        },
    }
    decoded = decode([profile, standard], answers)
    assert (decoded.watts, decoded.charge_pct) == (69, 99)
    assert dict(decoded.provenance)["watts"] == "upsOutputPower"
    assert [(rejected.field, rejected.oid) for rejected in decoded.rejected] == [
        ("charge_pct", "full"),
        ("watts", "own"),
    ]


# --- Recognising ----------------------------------------------------------------------------------------------------


def test_what_must_be_present_and_what_is_missing() -> None:
    profile = mini().model_copy(update={"probe": mini().probe.model_copy(update={"any_of": ["output_source"]})})
    text = HEAD.replace(
        "{all_of: [output_source]}", "{all_of: [output_source], present: [{object: model, oid: .99.0}]}"
    )
    present = parse_profile(text, "mini.yaml")
    answers: dict[str, Answer] = {Oid(f"{B}.1.0"): 0}
    assert unmet(profile, answers) == []
    assert unmet(present, answers) == ["model is not answered"]
    assert unmet(present, {}) == ["model is not answered", "mode or bypassed do not report output_source"]
    assert unmet(present, {**answers, Oid(f"{B}.99.0"): b"Acme"}) == []
    assert f"{B}.99.0" in present.mandatory()
    assert present.first_asked() == (f"{B}.1.0", f"{B}.9.1", f"{B}.9.1.0", f"{B}.9.0.1")


def test_a_walk_without_an_output_source_is_only_partly_a_family() -> None:
    profiles = load_profiles(None).every()
    answers: dict[str, Answer] = {Oid(f"{U}.2.4.0"): 88}
    assert choose(profiles, answers, sys_object_id="", sys_descr="") == ()
    assert [profile.name for profile in partly(profiles, answers, sys_object_id="", sys_descr="")] == ["rfc1628"]
    assert partly(profiles, {}, sys_object_id="", sys_descr="") == ()


def test_identity_is_made_fit_to_be_shown() -> None:
    answers: dict[str, Answer] = {
        "1.3.6.1.2.1.1.1.0": b"Card\x1b[2J\r\n" + b"x" * 500,
        "1.3.6.1.2.1.1.2.0": Oid("1.3.6.1.4.1.99999"),
    }
    object_id, descr = identity(answers)
    assert (object_id, descr[:8], len(descr)) == ("1.3.6.1.4.1.99999", "Card[2Jx", 200)
    assert identity({}) == ("", "")


PROFILES = load_profiles(None)
APC, CPS = "1.3.6.1.4.1.318.1.1.1", "1.3.6.1.4.1.3808.1.1.1"
CARDS: dict[str, tuple[str, str, dict[str, Answer]]] = {
    "apc-powernet": ("1.3.6.1.4.1.318.1.3.27", f"{APC}.4.1.1.0", {f"{APC}.2.2.1.0": 100, f"{APC}.2.2.3.0": 120_000}),
    "cps": ("1.3.6.1.4.1.3808.1.1.1", f"{CPS}.4.1.1.0", {f"{CPS}.2.2.1.0": 100, f"{CPS}.2.2.4.0": 234_000}),
}


def families(answers: dict[str, Answer], sys_object_id: str) -> list[str]:
    found = choose(PROFILES.every(), answers, sys_object_id=sys_object_id, sys_descr="")
    return [profile.name for profile in found]


@pytest.mark.parametrize(("family", "state"), [("apc-powernet", 29), ("apc-powernet", 40), ("cps", 12)])
def test_a_state_of_a_later_firmware_is_unknown_and_no_reason_to_lose_the_device(family: str, state: int) -> None:
    """At the daemon's start it would be no UPS, for as long as the state lasts."""
    object_id, place, numbers = CARDS[family]
    answers: dict[str, Answer] = {place: state, **numbers}
    assert families(answers, object_id) == [family]
    decoded = decode([PROFILES.by_name[family]], answers)
    assert (decoded.output_source, decoded.charge_pct) == (OutputSource.UNKNOWN, 100)
    assert [f"has no such value in profile {family}" in each for each in why(decoded, "output_source")] == [True]


@pytest.mark.parametrize(
    ("family", "place", "field"),
    [
        ("delta", "1.3.6.1.4.1.2254.2.4.9.3.0", "low_battery"),
        ("delta", "1.3.6.1.4.1.2254.2.4.7.3.0", "on_battery"),
        ("xups", "1.3.6.1.4.1.534.1.2.7.0", "battery_fault"),
        ("xups", "1.3.6.1.4.1.534.1.2.10.0", "low_battery"),
    ],
)
def test_a_value_that_the_mib_does_not_have_is_rejected_by_name(family: str, place: str, field: str) -> None:
    """`snmp probe` shows it; before, it read as if the device had denied the state."""
    decoded = decode([PROFILES.by_name[family]], {Oid(place): 9})
    assert [each.endswith("has no such value") for each in why(decoded, field)] == [True]
    assert not why(decode([PROFILES.by_name[family]], {Oid(place): 1}), field)


@pytest.mark.parametrize(
    ("changed", "object_id"),
    [
        ({}, "1.3.6.1.4.1.9.1.1208"),
        ({}, ""),
        ({}, "1.3.6.1.4.1.3180.1"),
        ({f"{APC}.4.1.1.0": 0}, "1.3.6.1.4.1.318.1.3.32"),
        ({f"{APC}.4.1.1.0": -1}, "1.3.6.1.4.1.318.1.3.32"),
        ({f"{APC}.4.1.1.0": 2**31 - 1}, "1.3.6.1.4.1.318.1.3.32"),
        ({f"{APC}.4.1.1.0": b"29"}, "1.3.6.1.4.1.318.1.3.32"),
        ({f"{APC}.2.2.1.0": 0, f"{APC}.2.2.3.0": 0}, "1.3.6.1.4.1.318.1.3.32"),
        ({f"{APC}.2.2.1.0": 255, f"{APC}.2.2.3.0": Missing.NULL}, "1.3.6.1.4.1.318.1.3.32"),
    ],
)
def test_what_is_no_ups_does_not_become_one_by_a_state_that_is_not_listed(
    changed: dict[str, Answer], object_id: str
) -> None:
    """Another maker's device, and a maker's switch that fills the UPS's objects with zeros."""
    _, place, numbers = CARDS["apc-powernet"]
    assert families({place: 29, **numbers, **changed}, object_id) == []


def test_a_pdu_stays_one_beside_a_state_that_is_not_listed() -> None:
    """A rack PDU's card may answer its maker's UPS objects, with zeros; one that tells of a battery is a UPS's."""
    path = Path(__file__).parent / "walks" / "pdus" / "apc-rpdu2.walk"
    _, place, numbers = CARDS["apc-powernet"]
    outlets = parse_walk(path.read_text(encoding="utf-8"), path.name)
    idle = {**outlets, Oid(place): 29, **dict.fromkeys(numbers, 0)}
    assert families(idle, "1.3.6.1.4.1.318.1.3.4.6") == ["apc-rpdu2", "apc-rpdu"]
    charged = {**outlets, Oid(place): 29, **numbers}
    assert families(charged, "1.3.6.1.4.1.318.1.3.4.6") == []


def test_the_standard_does_not_hide_the_family_whose_state_is_not_listed() -> None:
    """A card that speaks both is of both: `profile: apc-powernet` in the settings must hold."""
    object_id, place, numbers = CARDS["apc-powernet"]
    standard = {f"{U}.4.1.0": 5, f"{U}.2.4.0": 90, f"{U}.2.2.0": 7}
    answers: dict[str, Answer] = {place: 29, **numbers, **standard}
    assert families(answers, object_id) == ["apc-powernet", "rfc1628"]
    decoded = decode(choose(PROFILES.every(), answers, sys_object_id=object_id, sys_descr=""), answers)
    assert (decoded.output_source, decoded.on_battery) == (OutputSource.BATTERY, True)
