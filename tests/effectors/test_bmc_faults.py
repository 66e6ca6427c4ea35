"""docs/reference/bmc-faults.md: each test that it names exists, so that the table is true of this version."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "bmc-faults.md"


def test_every_fault_of_the_page_has_its_test() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([a-z0-9_/]+\.py)::(test_\w+)`", row)
        assert named, f"no test is named: {row[:80]}"
        for file, name in named:
            text = (TESTS / file).read_text(encoding="utf-8")
            assert f"def {name}(" in text, f"{file} has no {name}"
