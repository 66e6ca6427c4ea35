"""The golden files hold what tests give them, and nothing else."""

import re
from pathlib import Path

import pytest

from tests.golden import Golden, read

TESTS = Path(__file__).parent
FILES = sorted(TESTS.glob("*/golden/*.txt"))


def test_a_text_that_differs_or_is_missing_fails(tmp_path: Path) -> None:
    Golden(tmp_path, "test_a", rewrites=True)("verb", "one\n\n  two \n")
    Golden(tmp_path, "test_b[x]", rewrites=True)(
        "verb", f"{tmp_path}/s.sock: powerguard 0.1.0 at 12 s", varies={"at 12 s": "at N s"}
    )
    assert read(tmp_path / "verb.txt") == {
        "test_a": "one\n\n  two",
        "test_b[x]": "/TMP/s.sock: powerguard VERSION at N s",
    }
    golden = Golden(tmp_path, "test_a", rewrites=False)
    golden("verb", "one\n\n  two")
    with pytest.raises(AssertionError, match="case of its own"):
        golden("verb", "one\n\n  two")
    with pytest.raises(AssertionError):
        Golden(tmp_path, "test_a", rewrites=False)("verb", "one\n\n two")
    with pytest.raises(AssertionError, match="has no text"):
        golden("verb", "one", "other")


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_every_text_has_its_test(path: Path) -> None:
    """One whose test is gone would be read, and believed, for years."""
    sources = "\n".join(each.read_text(encoding="utf-8") for each in path.parents[1].glob("test_*.py"))
    names = set(re.findall(r"^(?:async )?def (test_\w+)", sources, re.MULTILINE))
    assert {name for name in read(path) if re.split(r"[ \[]", name)[0] not in names} == set()
