"""Every UPS family on walks made from its MIB: on utility, on battery, at the end, sentinels, comm lost, three phases.

`walks/families/NAME.walk` is the device on utility. `NAME.json` has its cases: `base` is the OID that the others
continue, `set` the objects that answer differently in this case, `expected` the fields of `Decoded` with their values.
The first case is on utility.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from powerguard.ups.profiles.decode import Decoded, decode
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.schema import COUNT_DOWN, Profile
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid
from powerguard.ups.profiles.walk import parse_walk

FOLDER = Path(__file__).parent / "walks" / "families"
PROFILES = load_profiles(None)
UPSES = PROFILES.ranked()
NAMES = sorted(profile.name for profile in UPSES)


@dataclass(frozen=True)
class Case:
    """One state of one device: changed objects (a number, "null", "absent", "oid:..." or text) and what is right."""

    family: str
    name: str
    base: str
    changed: dict[str, Any]
    expected: dict[str, Any]


def cases(family: str) -> list[Case]:
    path = FOLDER / f"{family}.json"
    assert path.is_file(), f"family {family} has no cases: add {path.name} and {family}.walk to {FOLDER}"
    data = json.loads(path.read_text(encoding="utf-8"))
    return [Case(family, one["case"], data["base"], one["set"], one["expected"]) for one in data["cases"]]


def whole(base: str, oid: str) -> Oid:
    return Oid(base + oid if oid.startswith(".") else oid)


def device(case: Case) -> dict[str, Answer]:
    path = FOLDER / f"{case.family}.walk"
    assert path.is_file(), f"family {case.family} has no walk: add {path}"
    answers = parse_walk(path.read_text(encoding="utf-8"), path.name)
    for place, value in case.changed.items():
        oid = whole(case.base, place)
        if value == "absent":
            del answers[oid]
        elif value == "null":
            answers[oid] = Missing.NULL
        elif isinstance(value, str):
            answers[oid] = whole(case.base, value[4:]) if value.startswith("oid:") else value.encode()
        else:
            answers[oid] = value
    return answers


def look(answers: dict[str, Answer]) -> tuple[tuple[Profile, ...], Decoded]:
    chosen = choose(UPSES, answers, sys_object_id=str(answers["1.3.6.1.2.1.1.2.0"]), sys_descr="")
    return chosen, decode(chosen, answers)


ALL = [case for name in NAMES for case in cases(name)]


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.family}: {case.name}")
def test_a_family_reports_what_its_mib_means(case: Case) -> None:
    chosen, decoded = look(device(case))
    assert chosen[0].name == case.family
    decoded_values = {name: getattr(decoded, name) for name in case.expected}
    for name, value in decoded_values.items():
        decoded_values[name] = (
            value is not None if name == "stale" else list(value) if isinstance(value, tuple) else value
        )
    assert decoded_values == case.expected


@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_shown_on_utility_on_battery_at_the_end_and_lying(name: str) -> None:
    """A family without such a case would pass by saying nothing."""
    result = cases(name)
    missing = []
    if result[0].expected.get("output_source") != "utility":
        missing.append("the first case is on utility")
    if not any(case.expected.get("on_battery") is True for case in result):
        missing.append("a case expects on_battery true")
    if not any(case.expected.get("runtime_s", 0) is None for case in result):
        missing.append("a case expects runtime_s null (a sentinel value)")
    if PROFILES.by_name[name].battery_status and not any(case.expected.get("low_battery") is True for case in result):
        missing.append("a case expects low_battery true")
    assert missing == [], f"{name}.json does not meet: {'; '.join(missing)}"


@pytest.mark.parametrize("name", NAMES)
def test_on_utility_nothing_of_the_device_is_disbelieved_but_its_sentinels(name: str) -> None:
    """What a healthy device answers must not look like a mistake: operators stop reading such lines."""
    _, decoded = look(device(cases(name)[0]))
    assert decoded.warnings == ()
    why = {rejected.why for rejected in decoded.rejected}
    assert why <= {"means: not measured", Missing.NULL.value}


@pytest.mark.parametrize("name", NAMES)
def test_no_family_shadows_another(name: str) -> None:
    """One device, one family, and the UPS-MIB where the card speaks it: makers share enterprises, not objects."""
    chosen, _ = look(device(cases(name)[0]))
    assert {one.name for one in chosen} <= {name, "rfc1628"}


NONSENSE: list[Answer | None] = [None, Missing.NULL, -1, 2**31 - 1, 2**32 - 1, 65535, b"", b"n/a", Oid("1.3")]


@pytest.mark.parametrize("name", NAMES)
def test_one_object_that_answers_nonsense_invents_no_outage_and_no_runtime(name: str) -> None:
    """Each object in turn: absent, NULL, the usual marks of "not measured", and the wrong type."""
    device_on_utility = device(cases(name)[0])
    chosen, healthy = look(device_on_utility)
    runtimes = {None} | {each.runtime_s for each in (healthy, decode(chosen[-1:], device_on_utility))}
    for oid in device_on_utility:
        for nonsense in NONSENSE:
            lying = {**device_on_utility, oid: nonsense} if nonsense is not None else dict(device_on_utility)
            if nonsense is None:
                del lying[oid]
            decoded = decode(chosen, {place: raw for place, raw in lying.items() if raw is not None})
            what = (oid, nonsense)
            assert decoded.output_source != "battery", what
            assert decoded.runtime_s in runtimes, what
            assert not decoded.low_battery, what
            assert decoded.stale is None, what
            # A row that is not there at all is a card with fewer rows; a line that says nothing is another thing.
            assert decoded.input_present is not False or nonsense is None, what


# --- Commands: numbers that differ by one between neighbours --------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_set_that_acts(name: str) -> None:
    """A command that is one off switches something else, and `cycles` lets a host go off in the faith that it returns.

    `commands` of NAME.json writes each command a second time, from the MIB: the object of the last SET, its value (a
    delay: its unit), and "cycles" if the MIB promises that.
    """
    profile = PROFILES.by_name[name]
    base = str(profile.base)
    found = {}
    for verb, control in profile.controls.items():
        last = control.sets[-1]
        place = str(last.oid or last.column).removeprefix(base)
        cycles = verb in COUNT_DOWN and control.utility_returns_during_countdown == "cycles"
        found[verb.value] = [place, last.unit if last.value is None else last.value, *(["cycles"] if cycles else [])]
    written = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")).get("commands", {})
    assert found == written, f"{FOLDER}/{name}.json: look up each command in the MIB and write it into `commands`"


@pytest.mark.parametrize(("name", "restart"), [("rfc1628", ".8.5.0"), ("delta", ".2.2.0"), ("riello", ".8.5.0")])
def test_the_way_back_is_opened_before_anything_goes_off(name: str, restart: str) -> None:
    """A real card came with auto restart off: its rack would never have come back."""
    profile = PROFILES.by_name[name]
    restart = whole(str(profile.base), restart)
    controls = {verb.value: control for verb, control in profile.controls.items()}
    assert [(one.oid, one.value) for one in controls["off_with_return"].sets if one.oid == restart] == [(restart, 1)]
    assert controls["off_with_return"].sets[0].read_back == "exact"
    assert [(one.oid, one.value) for one in controls["off_stays"].sets if one.oid == restart] == [(restart, 2)]


# --- Traps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trap", "meaning"),
    [
        ("1.3.6.1.2.1.33.2.1", "on_battery"),
        ("1.3.6.1.2.1.33.2.0.1", "on_battery"),
        ("1.3.6.1.2.1.33.2.0.4", "alarm_removed"),
        ("1.3.6.1.4.1.318.0.5", "on_battery"),
        ("1.3.6.1.4.1.318.0.9", "utility_restored"),
        ("1.3.6.1.4.1.318.0.7", "low_battery"),
        ("1.3.6.1.4.1.318.0.11", "low_battery_cleared"),
        ("1.3.6.1.4.1.534.1.11.4.1.0.3", "on_battery"),
        ("1.3.6.1.4.1.534.1.11.4.1.0.5", "utility_restored"),
        ("1.3.6.1.4.1.534.1.11.4.1.0.44", "heartbeat"),
        ("1.3.6.1.4.1.705.1.11.0.11", "on_battery"),
        ("1.3.6.1.4.1.705.1.11.0.12", "utility_restored"),
        ("1.3.6.1.4.1.3808.0.5", "on_battery"),
        ("1.3.6.1.4.1.3808.0.21", "shutdown_pending"),
        ("1.3.6.1.4.1.2254.2.4.20.0.3", "on_battery"),
        ("1.3.6.1.4.1.2254.2.4.20.0.5", "low_battery"),
        ("1.3.6.1.4.1.935.0.5", "on_battery"),
        ("1.3.6.1.4.1.4555.1.1.7.2.0.1", "on_battery"),
        ("1.3.6.1.4.1.5491.10.2.0.1", "on_battery"),
    ],
)
def test_a_trap(trap: str, meaning: str) -> None:
    meanings = {profile.traps[trap] for profile in UPSES if trap in profile.traps}
    assert {str(one) for one in meanings} == {meaning}


def test_no_two_families_read_one_trap_differently() -> None:
    """A trap comes without a family: its OID alone must tell."""
    seen: dict[str, str] = {}
    for profile in UPSES:
        for place, meaning in profile.traps.items():
            assert seen.setdefault(place, str(meaning)) == str(meaning)
