"""Rack PDUs on made walks: totals count nothing twice; outlet numbers differ by one between neighbours."""

import json
from pathlib import Path

import pytest

from powerguard.cli.snmp.probe import shape
from powerguard.cli.snmp.verb import compare
from powerguard.ups.profiles.decode import Decoded, decode
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.vocabulary import Answer, Oid
from powerguard.ups.profiles.walk import parse_walk, read_walk

PROFILES = load_profiles(None)
EVERY = PROFILES.every()


def answers(text: str) -> dict[str, Answer]:
    """Return numbers written as `BASE.REST=NUMBER` words, all under the enterprises."""
    found: dict[str, Answer] = {}
    for word in text.split():
        oid, _, number = word.partition("=")
        found[Oid(f"1.3.6.1.4.1.{oid}")] = int(number)
    return found


def read_and_decode(text: str) -> tuple[str, Decoded]:
    device = answers(text)
    chosen = choose(EVERY, device, sys_object_id="", sys_descr="")
    return chosen[0].name, decode(chosen, device)


def outlets(decoded: Decoded) -> dict[str, str]:
    return {number: str(state) for number, state in decoded.outlets}


R = "318.1.1.12.2.3.1.1"


def test_phases_and_their_banks_are_not_added_up() -> None:
    """Three rows of one phase: itself and its two banks. Three phases with banks: their sum."""
    name, decoded = read_and_decode(
        f"{R}.2.1=49 {R}.2.2=2 {R}.2.3=47 {R}.5.1=0 {R}.5.2=1 {R}.5.3=2 318.1.1.12.1.16.0=1140"
    )
    assert (name, decoded.amps, decoded.watts, decoded.kind) == ("apc-rpdu", 4.9, 1140, "pdu")
    three = " ".join(f"{R}.2.{row}={10 * row} {R}.5.{row}={0 if row < 4 else row}" for row in range(1, 10))
    assert read_and_decode(three)[1].amps == 6.0


def test_without_bank_numbers_the_largest_row_is_the_whole() -> None:
    assert read_and_decode(f"{R}.2.1=49 {R}.2.2=2 {R}.2.3=47")[1].amps == 4.9
    c = "3808.1.1.3.2.3.1.1"
    name, decoded = read_and_decode(f"{c}.2.1=11 {c}.2.2=11 {c}.7.1=216 {c}.7.2=216")
    assert (name, decoded.amps, decoded.watts) == ("cps-epdu2", 1.1, 216)


def test_outlet_numbers_of_each_family() -> None:
    """On is 1 or 2, off is 2, 1 or 0, by the family."""
    assert outlets(read_and_decode("318.1.1.4.4.2.1.3.1=1 318.1.1.4.4.2.1.3.2=2")[1]) == {"1": "on", "2": "off"}
    assert outlets(read_and_decode("318.1.1.12.3.5.1.1.4.1=1 318.1.1.12.3.5.1.1.4.2=2")[1]) == {"1": "on", "2": "off"}
    second = "318.1.1.26.4.3.1.5.1=27 318.1.1.26.9.2.3.1.5.1=1 318.1.1.26.9.2.3.1.5.2=2"
    assert outlets(read_and_decode(second)[1]) == {"1": "off", "2": "on"}
    eaton = " ".join(f"534.6.6.7.6.6.1.2.0.{outlet}={outlet - 1}" for outlet in range(1, 5))
    assert outlets(read_and_decode(eaton)[1]) == {"1": "off", "2": "on", "3": "on", "4": "off"}
    assert outlets(read_and_decode("3808.1.1.6.6.1.4.1.5.1=1 3808.1.1.6.6.1.4.1.5.2=2")[1]) == {"1": "on", "2": "off"}


def test_units_in_a_chain_keep_their_number() -> None:
    """Two units with an outlet 1 each: the whole index tells them apart."""
    chain = "534.6.6.7.6.6.1.2.0.1=1 534.6.6.7.6.6.1.2.0.2=0 534.6.6.7.6.6.1.2.1.1=0"
    assert outlets(read_and_decode(chain)[1]) == {"0.1": "on", "0.2": "off", "1.1": "off"}


def test_an_outlet_state_that_nobody_knows_is_unknown() -> None:
    _, decoded = read_and_decode("318.1.1.4.4.2.1.3.1=1 318.1.1.4.4.2.1.3.2=9")
    assert outlets(decoded) == {"1": "on", "2": "unknown"}
    assert [(rejected.field, rejected.raw) for rejected in decoded.rejected] == [("outlets", 9)]


def test_hundredths_of_a_kilowatt_and_thousandths_of_an_ampere() -> None:
    assert read_and_decode("318.1.1.26.4.3.1.5.1=114 318.1.1.26.6.3.1.5.1=49")[1].watts == 1140
    _, decoded = read_and_decode(
        "534.6.6.7.3.5.1.4.0.1=716 534.6.6.7.3.3.1.4.0.1.1=3120 534.6.6.7.3.2.1.3.0.1.1=229900"
    )
    assert (decoded.watts, decoded.amps, decoded.input_v) == (716, 3.12, 229.9)


def test_three_phases_of_an_eaton_are_added_and_its_total_row_is_not() -> None:
    p = "534.6.6.7.3.4.1"
    rows = " ".join(
        f"{p}.4.0.1.{row}={watts} {p}.2.0.1.{row}={row}" for row, watts in enumerate((100, 200, 300, 600), 1)
    )
    assert read_and_decode(rows)[1].watts == 600


def test_a_first_generation_with_new_firmware_stays_one() -> None:
    """It answers the tables of the second generation as well, filled with -1."""
    name, decoded = read_and_decode(
        f"318.1.1.26.4.3.1.5.1=-1 318.1.1.12.1.16.0=312 {R}.2.1=28 {R}.5.1=0 318.1.1.4.4.2.1.3.1=1"
    )
    assert (name, decoded.watts, decoded.amps, outlets(decoded)) == ("apc-rpdu", 312, 2.8, {"1": "on"})


def test_one_unbelievable_phase_makes_the_sum_unknown() -> None:
    """A sum that leaves a line out is too small, and would be believed."""
    rows = "534.6.6.7.3.3.1.4.0.1.1=3000 534.6.6.7.3.3.1.4.0.1.2=-7 534.6.6.7.3.3.1.4.0.1.3=2000"
    _, decoded = read_and_decode(rows)
    assert decoded.amps is None
    assert [rejected.why for rejected in decoded.rejected][
        -1
    ] == "one line is not believed, so all of them together are not"
    assert read_and_decode(rows.replace("=-7", "=-1"))[1].amps is None, "a phase before one that is reported is there"
    assert read_and_decode(rows.replace(".3=2000", ".3=-1").replace("=-7", "=1500"))[1].amps == 4.5, "two phases"


@pytest.mark.parametrize(("status", "is_pdu"), [(2, False), (3, False), (1, True)])
def test_an_output_source_is_no_rack_pdus(status: int, is_pdu: bool) -> None:
    """A UPS's card whose battery is not answered has outlets and watts as well; "unknown" is told by anything."""
    answers: dict[str, Answer] = {
        Oid(f"1.3.6.1.4.1.3808.1.1.{end}"): raw
        for end, raw in (("1.4.1.1.0", status), ("3.2.3.1.1.7.1", 450), ("6.6.1.4.1.5.1", 1))
    }
    chosen = choose(EVERY, answers, sys_object_id="1.3.6.1.4.1.3808.1.1.3", sys_descr="")
    assert [profile.kind for profile in chosen] == (["pdu"] if is_pdu else [])


def test_a_ups_whose_card_has_outlets_is_a_ups() -> None:
    walk = Path(__file__).parent / "walks" / "apc.walk"
    device = {**parse_walk(walk.read_text(encoding="utf-8"), "apc"), **answers("318.1.1.4.4.2.1.3.1=1")}
    chosen = choose(EVERY, device, sys_object_id="", sys_descr="")
    assert {profile.kind for profile in chosen} == {"ups"}


def test_no_pdu_is_a_candidate_for_the_daemon() -> None:
    """It asks for UPSes; a PDU could never tell whether utility is there."""
    assert {profile.kind for profile in PROFILES.ranked()} == {"ups"}
    assert len(PROFILES.ranked("pdu")) == 5


@pytest.mark.parametrize("profile", PROFILES.ranked("pdu"), ids=lambda profile: profile.name)
def test_every_switched_pdu_can_be_switched_by_data(profile: object) -> None:
    """On, off and reboot for each, and each writes to a table of outlets."""
    from powerguard.ups.profiles.schema import Profile

    assert isinstance(profile, Profile)
    assert {"outlet_on", "outlet_off", "outlet_reboot"} <= {verb.value for verb in profile.controls}
    values = {verb: [step.value for step in control.sets] for verb, control in profile.controls.items()}
    assert len({str(value) for value in values.values()}) >= (1 if profile.name == "eaton-epdu" else 3), values


PDU_NAMES = sorted(profile.name for profile in PROFILES.ranked("pdu"))


@pytest.mark.parametrize("name", PDU_NAMES)
def test_a_made_walk_of_each_family(name: str) -> None:
    """Whole devices, with the tables that mix wholes and parts."""
    folder = Path(__file__).parent / "walks" / "pdus"
    device = read_walk(folder / f"{name}.walk")
    chosen = choose(EVERY, device, sys_object_id="", sys_descr="")
    decoded = shape("snmp-decode", chosen, decode(chosen, device), device, from_={})
    assert compare(decoded, json.loads((folder / f"{name}.expected.json").read_text(encoding="utf-8"))) == []
    assert decoded["output_source"] is None
