"""scripts/tests: who fails beside others is asked again alone; who fails then, has failed (docs/decisions/0172)."""

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


def run(folder: Path, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    settings["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Of all that are installed it needs one.
    return subprocess.run(
        [SCRIPT, sys.executable, "-p", "xdist", *arguments],
        cwd=folder, env=settings, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("beside", [[], ["-n", "2"]])
def test_one_that_passes_alone_is_named(tmp_path: Path, beside: list[str]) -> None:
    done = run(tmp_path, UNSTEADY, *beside)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == ("UNSTEADY: failed beside others, passed alone: test_it.py::test_unsteady")
    assert (tmp_path / "steady").read_text() == "once ", "only those that failed are asked again"


def test_one_that_is_broken_fails(tmp_path: Path) -> None:
    done = run(tmp_path, UNSTEADY + "\ndef test_broken():\n    assert 1 == 2\n")
    assert done.returncode == 1
    assert "UNSTEADY" not in done.stdout


def test_many_are_not_asked_again(tmp_path: Path) -> None:
    many = "".join(f"def test_{which}():\n    assert 0\n" for which in range(6))
    done = run(tmp_path, many)
    assert done.returncode == 1
    assert "6 failed: more than" in done.stdout


def test_what_cannot_be_collected_is_not_asked_again(tmp_path: Path) -> None:
    done = run(tmp_path, "import nothing_of_this_name\n")
    assert done.returncode == 2
    assert "asked again" not in done.stdout


def test_what_passes_is_asked_once(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_fine():\n    pass\n")
    assert (done.returncode, "again" in done.stdout) == (0, False)
