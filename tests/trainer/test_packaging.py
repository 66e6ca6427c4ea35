"""The trainer library as a distribution of its own: alone with xxhash, and next to the daemon's."""

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OWN = ROOT / "packaging/trainer"
SHARED = {"powerguard/__init__.py", "powerguard/fields.py", "powerguard/py.typed", "powerguard/wire.py"}
DAEMONS = ("aiohttp", "cryptography", "jinja2", "prometheus_client", "pydantic", "pyghmi", "shtab", "structlog", "yaml")


def project(folder: Path) -> dict[str, Any]:
    declared: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return declared


def test_it_declares_what_the_daemons_distribution_declares() -> None:
    """One version, one range for each dependency, the same license."""
    daemon, trainer = project(ROOT), project(OWN)
    for key in ("version", "license", "requires-python"):
        assert trainer[key] == daemon[key], key
    assert trainer["dependencies"] == [word for word in daemon["dependencies"] if word.startswith("xxhash")]
    extras = json.loads(json.dumps(trainer["optional-dependencies"]).replace("powerguard-trainer[", "powerguard["))
    assert extras == {name: daemon["optional-dependencies"][name] for name in ("torch", "lightning", "s3", "hf")}
    assert (OWN / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_it_takes_the_files_of_this_tree() -> None:
    """Each is there; a link to the package would be no more than a line of text in some checkouts."""
    built = tomllib.loads((OWN / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    taken = built["targets"]["wheel"]["force-include"]
    assert set(taken.values()) == {*SHARED, "powerguard/trainer"}
    for source, place in taken.items():
        assert (OWN / source).resolve() == ROOT / place
        assert (OWN / source).exists()


# --- Built and installed (downloads hatchling and xxhash) ------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of both distributions, by name."""
    made = tmp_path_factory.mktemp("wheels")
    for folder in (OWN, ROOT):
        pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(made), str(folder))
    return {path.name.partition("-")[0].replace("_", "-"): path for path in made.iterdir()}


def pip(python: Path, *words: str) -> None:
    argv = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def installed(python: Path) -> set[str]:
    """The names of all distributions there."""
    found = "from importlib.metadata import distributions; print(*(one.name for one in distributions()))"
    return set(ran(python, "-c", found).stdout.split())


def environment(folder: Path) -> Path:
    """Make an empty environment; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin/python"


def ran(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it outside the checkout, without anybody's PYTHONPATH."""
    return subprocess.run([python, "-E", *words], cwd="/", capture_output=True, text=True, check=False, timeout=120)


IMPORTED = """
import sys, time
began_s = time.process_time()
import powerguard.trainer
took_s = time.process_time() - began_s
from powerguard.trainer import Guard
print(took_s, *{name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.slow
def test_it_installs_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Small, with xxhash and nothing else; a training saves, is started again, and goes on where it was."""
    wheel = wheels["powerguard-trainer"]
    assert wheel.stat().st_size <= 300_000
    python = environment(tmp_path / "venv")
    before = installed(python)
    pip(python, "install", str(wheel))
    assert installed(python) - before == {"powerguard-trainer", "xxhash"}

    result = ran(python, "-c", IMPORTED)
    assert result.returncode == 0, result.stderr
    took_s, *modules = result.stdout.split()
    assert float(took_s) <= 0.080
    assert set(modules).isdisjoint({*DAEMONS, "numpy", "torch"})
    assert ran(python, "-c", "import powerguard.cli").returncode != 0

    began = []
    for _ in range(2):
        trained = ran(python, str(ROOT / "examples/minimal.py"), str(tmp_path / "checkpoints"))
        assert trained.returncode == 0, trained.stderr
        began.append(trained.stdout.splitlines())
    assert [lines[0] for lines in began] == ["begin at step 1", "begin at step 2001"]
    assert began[0][1] == began[1][1]


@pytest.mark.slow
def test_both_in_one_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Their common files are equal; uninstalling one takes them from the other, and a reinstall puts them back."""
    packed = [zipfile.ZipFile(wheels[name]) for name in ("powerguard-trainer", "powerguard")]
    own, all_of_it = ({name: one.read(name) for name in one.namelist() if ".dist-info/" not in name} for one in packed)
    assert {name for name in own if not name.startswith("powerguard/trainer/")} == SHARED
    assert own == {name: all_of_it.get(name) for name in own}
    assert {name for name in all_of_it if name.startswith("powerguard/trainer/")} <= set(own)
    here = (path.relative_to(ROOT) for path in (ROOT / "powerguard").rglob("*") if path.is_file())
    assert {str(path) for path in here if "__pycache__" not in path.parts} <= set(all_of_it), "templates among them"

    python = environment(tmp_path / "venv")
    pip(python, "install", str(wheels["powerguard-trainer"]))
    pip(python, "install", "--no-deps", str(wheels["powerguard"]))
    for gone, left in (("powerguard-trainer", "powerguard"), ("powerguard", "powerguard-trainer")):
        assert ran(python, "-c", "from powerguard.trainer import Guard").returncode == 0
        pip(python, "uninstall", "--yes", gone)
        assert "ModuleNotFoundError" in ran(python, "-c", "from powerguard.trainer import Guard").stderr
        pip(python, "install", "--force-reinstall", "--no-deps", str(wheels[left]))
        assert ran(python, "-c", "from powerguard.trainer import Guard").returncode == 0
        if left == "powerguard":
            assert ran(python, "-m", "powerguard.cli.main", "version").returncode == 0
        pip(python, "install", "--no-deps", str(wheels[gone]))
