"""The picture in the docs is the machine's own table: whoever changes one must draw the other."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from powerguard.core.decide.transitions import TABLE
from powerguard.core.model.state import phase_name

ROOT = Path(__file__).parent.parent.parent


def _script() -> ModuleType:
    loader = SourceFileLoader("state_diagram", str(ROOT / "scripts" / "state-diagram"))
    spec = spec_from_loader("state_diagram", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_diagram_in_the_docs_is_drawn_from_the_table() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    script = _script()
    assert script.put(page, script.diagram()) == page, "run scripts/state-diagram --write"


def test_a_page_without_the_marks_is_an_error() -> None:
    """Else a lost mark would silently end the comparison above."""
    script = _script()
    with pytest.raises(SystemExit, match="the marks"):
        script.put("# Architecture\n", script.diagram())


def test_every_move_is_in_the_picture() -> None:
    """The script may join causes of one arrow, but must not lose any."""
    arrows = [line.strip() for line in _script().diagram().splitlines()]
    for (source, cause), target in TABLE.items():
        start = f"{phase_name(source)} --> {phase_name(target)}: "
        assert any(arrow.startswith(start) and cause.value in arrow for arrow in arrows), (source, cause)
