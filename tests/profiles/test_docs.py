"""The reference page of profile files: its example loads, and no word of the closed lists is missing from it."""

import re
from pathlib import Path

from powerguard.core.events import OutputSource
from powerguard.profiles.controls import Verb
from powerguard.profiles.load import parse_profile
from powerguard.profiles.vocabulary import NUMBERS, UNITS, BatteryStatus, OutletState, State, TrapEvent

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "profiles.md"


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
