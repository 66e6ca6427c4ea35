"""docs/guides/return.md says of each family what its file says: the operator chooses a UPS, and a control, by it."""

from pathlib import Path

from powerguard.core.model.actions import PowerOnMethod
from powerguard.ups.profiles.commands import Switch
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.schema import COUNT_DOWN, Verb
from tests.golden import Golden

HEAD = (
    "| family | `control` | waits at most | countdown shown | can be called off | utility returns meanwhile |",
    "| --- | --- | --- | --- | --- | --- |",
)
ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guides" / "return.md"
UPSES = load_profiles(None).ranked()
WORDS = {"cycles": "**cycles**", "aborts": "aborts", "stays_off": "stays off", "unknown": "unknown"}


def row(switch: Switch) -> str:
    """Return the line of one command that can wait for a host."""
    longest = f"{switch.longest_s:g} s"
    shown, undo = ("yes" if each else "no" for each in (switch.shows, switch.undo is not None))
    return (
        f"| `{switch.profile.name}` | `{switch.verb.value}` | {longest} | {shown} | {undo} | {WORDS[switch.returns]} |"
    )


def test_the_table_is_that_of_the_files(golden: Golden) -> None:
    """Every command that switches off after a delay and on again; and which families have none."""
    switches = [
        Switch(profile, verb, "1" if verb.startswith("outlet_") else "")
        for profile in sorted(UPSES, key=lambda each: each.name)
        for verb in profile.controls
        if verb in COUNT_DOWN and verb is not Verb.OFF_STAYS
    ]
    waiting = [switch for switch in switches if switch.longest_s is not None]
    able = {switch.profile.name for switch in waiting}
    without = ", ".join(f"`{name}`" for name in sorted(one.name for one in UPSES if one.name not in able))
    golden.between(GUIDE, "outputs", "\n".join([*HEAD, *map(row, waiting), "", f"No such command: {without}."]))


def test_every_way_is_named() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert [method for method in PowerOnMethod if f"`{method}`" not in text] == []
