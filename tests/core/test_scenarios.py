"""Every file in tests/scenarios is an outage as text, and below it what powerguard did. See play.py for the words.

`pytest tests/core/test_scenarios.py --rewrite-scenarios` writes the answers anew; read the diff before you commit it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.decide.transitions import Cause
from tests.cli.test_words import check_words
from tests.core.play import Player

FOLDER = Path(__file__).parent.parent / "scenarios"
RULE = "----"


_GRAIN = 0.01
"""The logged numbers are rounded to a thousandth."""


_WITNESSED = (
    Cause.BATTERY,
    Cause.UTILITY_BACK,
    Cause.UTILITY_STABLE,
    Cause.ABORTED,
    Cause.RESUMED,
    Cause.REHEARSED,
    Cause.POWER_LOST,
)
"""Causes for which a reading, a person or a trainer stands, and no sum."""
_HOLDS: dict[tuple[Cause, str], Callable[[dict[str, Any]], bool]] = {
    (Cause.POWER_OFF_ORDERED, "countdown"): lambda n: n["cut_in_s"] >= 0.0,
    (Cause.POWER_OFF_ORDERED, "fsd"): lambda n: n["cut_in_s"] >= 0.0,
    (Cause.CHECKPOINT_NEEDED, "power_off_at"): lambda n: n["cut_in_s"] >= 0.0,
    (Cause.CHECKPOINT_NEEDED, "budget"): lambda n: 0.75 * n["reff_paused_s"] <= n["checkpoint_s"] + _commit_s(n),
    (Cause.CHECKPOINT_NEEDED, "runtime_short"): lambda n: n["reff_now_s"] <= 45.0 + _GRAIN,
    (Cause.CHECKPOINT_NEEDED, "low_battery"): lambda n: n["flagged"],
    (Cause.CHECKPOINT_NEEDED, "blind"): lambda n: n["reff_paused_s"] is None or n["reff_now_s"] is None,
    (Cause.CALIBRATION_LOW, "low_battery"): lambda n: n["flagged"],
    (Cause.CALIBRATION_LOW, "budget"): lambda n: 0.75 * n["reff_paused_s"] <= n["checkpoint_s"] + _commit_s(n),
    (Cause.COMMIT, "budget"): lambda n: n["reff_s"] <= _commit_s(n),
    (Cause.COMMIT, "power_off_at"): lambda n: n["cut_in_s"] <= n["stop_s"] + _GRAIN,
    (Cause.COMMIT, "power_off_at permits no hold"): lambda n: n["old"] == "holding" and n["cut_in_s"] >= 0.0,
    (Cause.COMMIT, "blind: low_battery"): lambda n: n["reff_s"] is None,
    (Cause.COMMIT, "blind: charge_pct"): lambda n: n["reff_s"] is None,
    (Cause.COMMIT, "blind: blind_s"): lambda n: n["reff_s"] is None,
}
"""What the logged numbers satisfy where this cause and reason are named. A reason that is not here fails.

A low battery is a flag and no sum: `flagged` says that the story has told it before."""


def _commit_s(numbers: dict[str, Any]) -> float:
    """Seconds at which the host powers off, and a little for the rounding."""
    return float(numbers["stop_s"] + numbers.get("shed_s", 0.0) + _GRAIN)


def _holds(because: str, numbers: dict[str, Any]) -> bool:
    """Say whether the logged numbers satisfy the condition that is named as the reason."""
    cause = Cause(numbers["cause"])
    if cause is Cause.CHECKPOINT_DURABLE:
        return bool(numbers["checkpoint_s"] == 0.0)
    return cause in _WITNESSED or _HOLDS[cause, because](numbers)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    """The answers are those of the file, and the logged numbers those of the decision: explain and report show them.

    Each note has a sentence there, with its own numbers.
    """
    story, _, expected = path.read_text(encoding="utf-8").partition(f"\n{RULE}\n")
    result = Player().play(story)
    answers = "\n".join([*result.lines, f"= {result.phase}"])
    if request.config.getoption("--rewrite-scenarios"):
        path.write_text(f"{story}\n{RULE}\n{answers}\n", encoding="utf-8")
        return
    assert answers == expected.strip()
    flagged, grade = False, None
    for note in result.notes:
        check_words(note)
        flagged = flagged or note.event == "battery_low"
        if note.event == "outage_began":
            grade = dict(note.numbers)["grade"]
        elif grade is not None and note.event == "phase_changed":
            assert dict(note.numbers)["grade"] == grade, "an outage begins with one grade"
            grade = None
        if note.event == "phase_changed":
            assert _holds(note.because, {**dict(note.numbers), "flagged": flagged}), note


def test_there_are_scenarios() -> None:
    """An empty folder would pass every test above."""
    assert len(list(FOLDER.glob("*.txt"))) >= 20
