"""scripts/tests: who fails is asked again, alone, to tell what is broken from what is unsteady; both have failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "tests"

UNSTEADY = """
import pathlib

def test_unsteady():
    seen = pathlib.Path("seen")
    was = seen.exists()
    seen.touch()
    assert was

def test_steady():
    pathlib.Path("steady").open("a").write("once ")
"""
BROKEN = "\ndef test_broken():\n    assert 1 == 2\n"
NAMED = ["UNSTEADY: failed beside others, passed alone: test_it.py::test_unsteady"]


def run(folder: Path, tests: str, *arguments: str) -> tuple[int, str, list[str]]:
    """Return status, what was told, and of that the lines that name a test as unsteady."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    settings["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Of all that are installed it needs one.
    done = subprocess.run(
        [SCRIPT, sys.executable, "-p", "xdist", *arguments],
        cwd=folder, env=settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, [line for line in done.stdout.splitlines() if line.startswith("UNSTEADY")]


@pytest.mark.parametrize("beside", [[], ["-n", "2"]])
def test_one_that_passes_alone_is_named_and_has_failed(tmp_path: Path, beside: list[str]) -> None:
    assert run(tmp_path, UNSTEADY, *beside)[::2] == (1, NAMED)
    assert (tmp_path / "steady").read_text() == "once ", "only those that failed are asked again"


def test_one_that_is_broken_is_not_called_unsteady(tmp_path: Path) -> None:
    assert run(tmp_path, UNSTEADY + BROKEN)[::2] == (1, NAMED)


@pytest.mark.parametrize(("test", "named"), [(BROKEN, []), (UNSTEADY, NAMED)], ids=["broken", "unsteady"])
def test_one_of_a_group_is_found_again(tmp_path: Path, test: str, named: list[str]) -> None:
    """One worker runs a group, and adds its name to those of the tests."""
    grouped = f"import pytest\n\npytestmark = pytest.mark.xdist_group('two words')\n{test}"
    assert run(tmp_path, grouped, "-n", "2", "--dist", "loadgroup")[::2] == (1, named)


def test_many_are_not_asked_again(tmp_path: Path) -> None:
    status, result, named = run(tmp_path, "".join(f"def test_{which}():\n    assert 0\n" for which in range(21)))
    assert (status, "once more" in result, named) == (1, False, [])


def test_what_cannot_be_collected_is_not_asked_again(tmp_path: Path) -> None:
    status, result, _ = run(tmp_path, "import nothing_of_this_name\n")
    assert (status, "once more" in result) == (2, False)


def test_what_passes_is_asked_once(tmp_path: Path) -> None:
    status, result, _ = run(tmp_path, "def test_fine():\n    pass\n")
    assert (status, "once more" in result) == (0, False)
