"""Commands, traps, PDUs and conditions in profile files: each slip is told at its place, with what would be right."""

from pathlib import Path

import pytest
import yaml

import powerguard.ups.profiles
from powerguard.ups.profiles.load import ProfileError, load_profiles, parse_profile
from powerguard.ups.profiles.schema import COUNT_DOWN, Profile, Verb
from powerguard.ups.profiles.vocabulary import State, TrapEvent

GOOD = """\
name: mini
title: A made family
base: 1.3.6.1.4.1.99999.1
probe:
  all_of: [output_source]
  present: [{object: miniModel, oid: .9.0}]
output_source:
  - {object: miniSource, column: .1, values: {0: utility, 1: null}, texts: {inverter: utility}}
battery_status:
  - {object: miniBattery, oid: .2.0, values: {1: normal, 2: low}}
numbers:
  watts:
    - {object: miniWatts, column: .3, unit: W, or_unit: kW, rows: {object: miniRow, column: .4, is: [0]}}
states:
  overload:
    - {object: miniLoad, oid: .5.0, is: [[101, null]]}
controls:
  off_with_return:
    needs: [{object: miniAuto, oid: .6.0, is: [1]}]
    sets:
      - {object: miniAuto, oid: .6.0, type: integer, value: 1, read_back: exact}
      - {object: miniOff, oid: .7.0, type: timeticks, delay: off_s, unit: timeticks, range: [0, 9], read_back: rounded}
    undo: cancel
    utility_returns_during_countdown: aborts
  cancel:
    sets: [{object: miniOff, oid: .7.0, type: integer, value: -1, read_back: exact}]
  outlet_off:
    sets: [{object: miniOutlet, column: .8, type: integer, value: 2, read_back: none}]
traps:
  1.3.6.1.4.1.99999.0.5: on_battery
  .0.9: utility_restored
"""


def mistakes_in(text: str) -> list[str]:
    with pytest.raises(ProfileError) as caught:
        parse_profile(text, "mini.yaml")
    return str(caught.value).splitlines()


def test_the_good_one_loads() -> None:
    mini = parse_profile(GOOD, "mini.yaml")
    assert mini.traps == {
        "1.3.6.1.4.1.99999.0.5": State.ON_BATTERY,
        "1.3.6.1.4.1.99999.1.0.9": TrapEvent.UTILITY_RESTORED,
    }
    control = mini.controls[Verb.OFF_WITH_RETURN]
    assert [step.delay for step in control.sets] == [None, "off_s"]
    assert control.needs[0].is_ == [1]


OFF = "type: timeticks, delay: off_s, unit: timeticks, range: [0, 9], read_back: rounded"


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("off_with_return:", "power_off:", 19, "controls.power_off"),
        ("type: integer, value: 1,", "type: int, value: 1,", 21, "controls.off_with_return.sets.0.type"),
        ("value: 1, read_back", "value: 1, delay: off_s, read_back", 21, "must have exactly one of value and delay"),
        ("value: 1, read_back", "value: one, read_back", 21, "is a whole number"),
        ("value: 1, read_back", "value: 3000000000, read_back", 21, "does not fit in type integer"),
        ("value: 1, read_back", "value: 1, unit: s, read_back", 21, "unit, range and allowed belong to a delay"),
        (OFF, OFF.replace("unit: timeticks, ", ""), 22, "a delay needs its unit"),
        (OFF, OFF.replace("unit: timeticks", "unit: V"), 22, "unit 'V' is not a time (one of: s, min"),
        (OFF, OFF.replace("range: [0, 9], ", ""), 22, "exactly one of range and allowed"),
        (OFF, OFF.replace("[0, 9]", "[-1, 600]"), 22, "two ends of 0 s or more"),
        (OFF, OFF.replace("[0, 9]", "[0, null]"), 22, "two ends of 0 s or more"),
        (OFF, OFF.replace("[0, 9]", "[0, 99999999]"), 22, "does not fit in type timeticks"),
        (OFF, OFF.replace("type: timeticks", "type: octets"), 22, "a delay is a number"),
        (OFF, OFF.replace("rounded", "later"), 22, "read_back"),
        ("    undo: cancel\n", "    undo: outlet_off\n", 23, "outlet_off is not a cancel command of this profile"),
        ("    utility_returns_during_countdown: aborts\n", "", 18, "utility_returns_during_countdown is missing"),
        ("countdown: aborts", "countdown: perhaps", 24, "utility_returns_during_countdown"),
        ("column: .8, type", "oid: .8.0, type", 27, "no step has a column"),
        ("miniAuto, oid: .6.0, type", "miniAuto, column: .6, type", 18, "a step has a column (use oid)"),
        (".0.9: utility_restored", ".0.9: utility_back", 31, "traps"),
        ("99999.0.5: on_battery", "99999..5: on_battery", 30, "traps"),
        ("values: {1: normal, 2: low}", "values: {1: fine}", 10, "battery_status.0.values.1"),
        ("values: {1: normal, 2: low}", "texts: {LOW: low}", 10, "texts are written in small letters, got 'LOW'"),
        (", values: {1: normal, 2: low}", "", 10, "must have values or texts"),
        ("or_unit: kW", "or_unit: kV", 13, "unknown unit 'kV'"),
        ("or_unit: kW", "or_unit: V", 13, "or_unit 'V' is no power"),
        ("column: .3, unit", "oid: .3.0, unit", 13, "rows belongs to a column"),
        ("[[101, null]]", "[[101, 7]]", 16, "range [101, 7] runs backwards"),
        ("all_of: [output_source]", "all_of: []", 5, "must name a field in all_of or any_of"),
        ("title: A made family", "title: A made family\nkind: pdu", 8, "a PDU has no output_source (kind: pdu)"),
        ("title: A made family", "title: A made family\nkind: ats", 3, "kind: "),
        ("base: 1.3.6.1.4.1.99999.1\n", "", 1, "an OID with a leading dot needs a base"),
    ],
)
def test_a_slip_is_reported_at_its_place(old: str, new: str, line: int, what: str) -> None:
    assert old in GOOD, old
    lines = mistakes_in(GOOD.replace(old, new, 1))
    assert any(one.startswith(f"mini.yaml:{line}:") and what in one for one in lines), lines


def test_all_mistakes_of_the_whole_are_reported_at_once() -> None:
    text = GOOD.replace("    undo: cancel\n", "    undo: outlet_off\n").replace(
        "all_of: [output_source]", "all_of: [charge_pct]"
    )
    assert len(mistakes_in(text)) == 2


def test_one_object_is_not_two_quantities() -> None:
    """A number copied to the wrong line is the likeliest slip of all."""
    text = GOOD.replace("states:", '  load_pct:\n    - {object: miniLoad, column: .3, unit: "%"}\nstates:')
    assert mistakes_in(text) == ["mini.yaml:15:7: numbers.load_pct.0: this object is already read as watts"]


def test_a_ups_says_where_its_output_comes_from_and_a_pdu_something() -> None:
    text = "name: mini\ntitle: t\nprobe: {any_of: [load_pct]}\n"
    text += 'numbers: {load_pct: [{object: a, oid: 1.3.6, unit: "%"}]}\n'
    assert "output_source is missing" in mistakes_in(text)[0]
    assert "a PDU needs outlets, watts or amps" in mistakes_in(text + "kind: pdu\n")[0]


PACKAGED = load_profiles(None).every()


@pytest.mark.parametrize("profile", PACKAGED, ids=[profile.name for profile in PACKAGED])
def test_what_every_packaged_command_must_have(profile: Profile) -> None:
    """A command that can be called off names a cancel, and one that never comes back does not claim to."""
    for verb, control in profile.controls.items():
        countdown = control.utility_returns_during_countdown
        assert (countdown is not None) == (verb in COUNT_DOWN)
        if verb is Verb.OFF_STAYS:
            assert countdown != "cycles"
        for step in control.sets:
            assert step.delay is None or step.read_back != "exact" or step.range or step.allowed


@pytest.mark.parametrize("profile", PACKAGED, ids=[profile.name for profile in PACKAGED])
def test_a_packaged_file_says_what_it_is(profile: Profile) -> None:
    path = Path(powerguard.ups.profiles.__file__).parent / f"{profile.name}.yaml"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "which devices, which MIB, which quirks"
    written = yaml.load(text, yaml.BaseLoader).get("traps", {})
    assert len(profile.traps) == len(written), "one trap, by a short and by a whole OID"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (
            "is: [1]}]",
            "is: [one]}]",
            "is.0: must be a whole number, an OID (.4.1.0, or 1.3.6.1.2.1.33.1.4.1.0) or a range",
        ),
        ("or_unit: kW,", "none: [[1]],", "none.0: must be a number or a range [low, high]"),
        ("or_unit: kW,", "none: [x],", "none.0: must be a number or a range [low, high]"),
        ("or_unit: kW,", "text: 1,", "text: must be true or false"),
        ("values: {1: normal, 2: low}", "values: {1: fine}", "must be one of: normal, charging, discharging, low"),
    ],
)
def test_one_slip_is_one_line_in_plain_words(old: str, new: str, what: str) -> None:
    """A place where several things may stand is told once, not once for each of them."""
    (line,) = mistakes_in(GOOD.replace(old, new, 1))
    assert what in line
