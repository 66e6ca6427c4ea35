"""Every file in tests/scenarios is an outage as text, and below it what powerguard did. See play.py for the words.

`pytest tests/core/test_scenarios.py --rewrite-scenarios` writes the answers anew; read the diff before you commit it.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from play import Player

FOLDER = Path(__file__).parent.parent / "scenarios"
RULE = "----"


def _tell(text: str) -> str:
    told = Player().play(text)
    return "\n".join([*told.lines, f"= {told.phase}"])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    story, _, expected = path.read_text(encoding="utf-8").partition(f"\n{RULE}\n")
    told = _tell(story)
    if request.config.getoption("--rewrite-scenarios"):
        path.write_text(f"{story}\n{RULE}\n{told}\n", encoding="utf-8")
        return
    assert told == expected.strip()


def test_there_are_scenarios() -> None:
    """An empty folder would pass every test above."""
    assert len(list(FOLDER.glob("*.txt"))) >= 20
