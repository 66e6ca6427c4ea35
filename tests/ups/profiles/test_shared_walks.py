"""Walks of real devices, where they lie beside the checkout: every field right, or one of the other careful answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.snmp.probe import shape
from powerguard.cli.snmp.verb import choose_for, compare
from powerguard.ups.profiles.commands import offered
from powerguard.ups.profiles.decode import decode, redundant
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.schema import Profile, Verb
from powerguard.ups.profiles.vocabulary import Answer, Oid, below
from powerguard.ups.profiles.walk import read_walk

FOLDER = Path(__file__).parents[4] / "shared" / "ups-walks"
PROFILES = load_profiles(None)
OF_PDUS = ("kind", "profile", "watts", "amps", "outlets")
OF_UPSES = (
    *("kind", "profile", "output_source", "on_battery", "battery_status", "runtime_s", "charge_pct", "load_pct"),
    *("watts", "replace_battery", "input_voltage", "battery_temp_c"),
)


def expected() -> dict[str, Any]:
    path = FOLDER / "expected.json"
    return json.loads(path.read_text(encoding="utf-8"))["walks"] if path.is_file() else {}


WALKS = expected()
needs_walks = pytest.mark.skipif(not WALKS, reason="no recorded walks of real devices beside the checkout")
each_walk = pytest.mark.parametrize("name", sorted(WALKS) or ["none"])


def device(name: str) -> tuple[dict[str, Answer], tuple[Profile, ...]]:
    answers = read_walk(FOLDER / f"{name}.snmprec")
    chosen, notes = choose_for(PROFILES, answers, None)
    assert notes == []
    return answers, chosen


@needs_walks
@each_walk
def test_a_real_walk(name: str) -> None:
    want = WALKS[name]
    answers, chosen = device(name)
    decoded = shape("snmp-decode", chosen, decode(chosen, answers), answers, from_={})
    keys = OF_PDUS if want["kind"] == "pdu" else OF_UPSES
    assert compare(decoded, {**{key: want[key] for key in keys}, "accept": want.get("accept", {})}) == []
    assert decoded["stale"] is None
    if name == "cetpower":
        assert decoded["witnesses"] == []


FIT = {
    "cetpower": ("rfc1628", "upsAutoRestart is -1 and must be 1"),
    "cyberpower_pr2200rt2uc": ("rfc1628", "upsAutoRestart is 2 and must be 1"),
    "eaton-mgeups_9pxle": ("xups", ""),
    "eatonupsm2_9px+empg2": ("xups", ""),
}
"""Of those whose walks have all objects of a command that cycles: the family, and what doctor would say."""


@needs_walks
@each_walk
def test_what_a_real_card_says_of_its_off_command(name: str) -> None:
    """No countdown is seen where none runs, or way B would be blocked for ever; and a real rack stands at "off"."""
    if WALKS[name]["kind"] == "pdu":
        return
    answers, chosen = device(name)
    found = list(offered(chosen, Verb.OFF_WITH_RETURN))
    assert [one.standing_s(answers) for one in found] == [None] * len(found)
    whole = [one for one in found if not one.lacks(answers) and one.returns == "cycles"]
    assert bool(whole) == (name in FIT)
    if whole:
        family, problem = FIT[name]
        said = "; ".join(whole[0].unfit(answers, today=True))
        assert (whole[0].profile.name, said[: len(problem) or None]) == (family, problem)


@needs_walks
@each_walk
def test_what_the_daemon_asks_of_it_reports_the_same(name: str) -> None:
    """The live path sees only the objects that it asks for, and on most polls not those that others make redundant."""
    answers, chosen = device(name)
    whole = decode(chosen, answers)
    columns = [column for profile in chosen for column in profile.columns()]
    asked = {oid for profile in chosen for oid in profile.scalars()}
    polled = {oid: raw for oid, raw in answers.items() if oid in asked or any(below(oid, one) for one in columns)}
    live = decode(chosen, polled)
    assert (live.numbers, live.output_source, live.alarms) == (whole.numbers, whole.output_source, whole.alarms)
    spare = redundant(chosen, polled, live)
    brief = decode(chosen, {oid: raw for oid, raw in polled.items() if oid not in spare})
    assert (brief.numbers, brief.output_source) == (whole.numbers, whole.output_source)


@needs_walks
@each_walk
def test_a_real_ups_whose_card_says_battery_is_believed_only_with_a_witness(name: str) -> None:
    """Each device's own object is made to say battery, and nothing else of the walk is changed."""
    if WALKS[name]["kind"] != "ups":
        pytest.skip("a rack PDU has no battery")
    answers, chosen = device(name)
    overlay = dict(answers)
    for profile in chosen:
        for source in profile.output_source:
            word = next((raw for raw, said in source.values.items() if said == "battery"), None)
            place = source.place
            for oid in [one for one in answers if one == place or below(one, place)]:
                if word is not None:
                    overlay[Oid(oid)] = word
    decoded = decode(chosen, overlay)
    if decoded.output_source != "battery":
        assert name == "socomec-ups", "a family that tells its battery in another way"
        return
    assert decoded.on_battery in (None, True)
    assert (decoded.on_battery is True) == bool(decoded.witnesses)
    assert not decoded.low_battery


def test_a_shared_walk_folder_has_walks() -> None:
    """Where the folder is there at all, it must not silently test nothing."""
    if not FOLDER.is_dir():
        pytest.skip("no recorded walks of real devices beside the checkout")
    assert len(WALKS) >= 30
