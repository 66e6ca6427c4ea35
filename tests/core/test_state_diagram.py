"""The picture in the docs is the machine's own table: whoever changes one must draw the other."""

import subprocess
import sys
from pathlib import Path

from powerguard.core.machine import TABLE, phase_name

ROOT = Path(__file__).parent.parent.parent


def test_the_diagram_in_the_docs_is_drawn_from_the_table() -> None:
    drawn = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "state-diagram")],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- state-diagram -->\n")[2].partition("<!-- /state-diagram -->")[0]
    assert shown == drawn, "run scripts/state-diagram --write"


def test_every_move_is_in_the_picture() -> None:
    """The script may join causes of one arrow, but must not lose any."""
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    arrows = [line.strip() for line in page.splitlines() if "-->" in line and ": " in line]
    for (source, cause), target in TABLE.items():
        start = f"{phase_name(source)} --> {phase_name(target)}: "
        assert any(arrow.startswith(start) and cause.value in arrow for arrow in arrows), (source, cause)
