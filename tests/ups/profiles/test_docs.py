"""The reference page of profile files: its example loads, and no word of the closed lists is missing from it."""

import json
import re
from pathlib import Path

from powerguard.cli.snmp.probe import shape
from powerguard.cli.snmp.verb import compare
from powerguard.core.model.events import OutputSource
from powerguard.ups.profiles.decode import decode
from powerguard.ups.profiles.load import load_profiles, parse_profile
from powerguard.ups.profiles.probe import choose
from powerguard.ups.profiles.schema import Verb
from powerguard.ups.profiles.vocabulary import NUMBERS, UNITS, BatteryStatus, OutletState, State, TrapEvent
from powerguard.ups.profiles.walk import read_walk

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "ups.md"
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "profiles.md"


def test_the_example_is_a_profile() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    profile = parse_profile(example, "profiles.md")
    assert (profile.name, profile.rank) == ("acme-ups", 10)


def test_every_word_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    words = [*NUMBERS, *UNITS, *State, *OutputSource, *BatteryStatus, *OutletState, *TrapEvent, *Verb]
    assert [word for word in words if f"`{word}`" not in text] == []


def test_the_windows_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, window in NUMBERS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"{window.lowest:.0f} to {window.highest:.0f}" in row, name


def test_every_family_is_listed() -> None:
    """An operator looks there for his UPS, and for how far its family was tested."""
    page = PAGE.parent / "hardware.md"
    rows = "\n".join(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("- "))
    missing = [name for name in load_profiles(None).by_name if f"`{name}`" not in rows]
    assert missing == [], f"add to {page} a line for each: its makers and models, and what its test rests on"


def test_the_guides_family_is_one_file_and_one_walk() -> None:
    """What the guide shows works as it stands there, on utility and on battery, and its words name files that are."""
    guide = GUIDE.read_text(encoding="utf-8")
    acme = GUIDE.parent / "acme"
    for file in ("acme.yaml", "acme.walk", "acme.expected.json"):
        assert f"(acme/{file})" in guide, file
    profile = parse_profile((acme / "acme.yaml").read_text(encoding="utf-8"), "acme.yaml")
    answers = read_walk(acme / "acme.walk")
    assert choose([profile, *load_profiles(None).ranked()], answers, sys_object_id="", sys_descr="") == (profile,)
    decoded = shape("snmp-test-profile", [profile], decode([profile], answers), answers, from_={})
    assert compare(decoded, json.loads((acme / "acme.expected.json").read_text(encoding="utf-8"))) == []
    base = "1.3.6.1.4.1.99999.1"
    outage = decode([profile], {**answers, f"{base}.1.1.0": 1, f"{base}.1.2.0": 9, f"{base}.3.1.0": 0})
    assert (outage.on_battery, outage.witnesses) == (True, ("on_battery_s", "input_present"))
