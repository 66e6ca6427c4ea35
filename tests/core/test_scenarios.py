"""Every file in tests/scenarios is an outage as text, and below it what powerguard did. See play.py for the words.

`pytest tests/core/test_scenarios.py --rewrite-scenarios` writes the answers anew; read the diff before you commit it.
"""

from pathlib import Path

import pytest

from tests.core.play import Player

FOLDER = Path(__file__).parent.parent / "scenarios"
RULE = "----"


_GRAIN = 0.01
"""The logged numbers are rounded to a thousandth."""


def _holds(because: str, numbers: dict[str, object]) -> bool:
    """Say whether the logged numbers satisfy the condition that is named as the reason."""

    def of(name: str) -> float:
        value = numbers[name]
        assert isinstance(value, int | float), f"{name} is not logged with {because!r}"
        return float(value)

    new = numbers["new"]
    shed_s = of("shed_s") if "shed_s" in numbers else 0.0
    match because, new:
        case "budget", "emergency_checkpoint":
            return 0.75 * of("reff_paused_s") <= of("checkpoint_s") + of("stop_s") + shed_s + _GRAIN
        case "budget", "shutdown":
            return of("reff_s") <= of("stop_s") + shed_s + _GRAIN
        case "runtime_short", _:
            return of("reff_now_s") <= 45.0 + _GRAIN
        case (("power_off_at" | "power_off_at permits no hold"), _):
            return of("cut_in_s") >= 0.0
    return True


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    """The answers are those of the file, and the logged numbers those of the decision: explain and report show them."""
    story, _, expected = path.read_text(encoding="utf-8").partition(f"\n{RULE}\n")
    told = Player().play(story)
    answers = "\n".join([*told.lines, f"= {told.phase}"])
    if request.config.getoption("--rewrite-scenarios"):
        path.write_text(f"{story}\n{RULE}\n{answers}\n", encoding="utf-8")
        return
    assert answers == expected.strip()
    for note in told.notes:
        if note.event == "phase_changed":
            assert _holds(note.because, dict(note.numbers)), note


def test_there_are_scenarios() -> None:
    """An empty folder would pass every test above."""
    assert len(list(FOLDER.glob("*.txt"))) >= 20
