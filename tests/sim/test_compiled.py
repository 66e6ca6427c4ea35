"""The compiled copy of the simulator (scripts/compiled): other code in the classes, and the same outages."""

import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from powerguard.sim.world.many import play_many
from powerguard.sim.world.report import Options, report
from powerguard.sim.world.site import Site

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "compiled"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("compiled_script", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look there for the module of a class
    loader.exec_module(module)
    return module


_CLASSES = '''
"""Classes as the core has them."""

from dataclasses import dataclass, field
from enum import StrEnum


class Word(StrEnum):
    A = "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """One that others derive from."""

    at_s: float
    word: Word = Word.A


@swift
@dataclass(
    frozen=True,
    slots=True,
    kw_only=True,
)
class Derived(Base):
    inner: Base = field(default_factory=lambda: Base(at_s=1.0))
    pair: tuple[
        float | None, float | None
    ] = (None, None)  # over three lines

    @property
    def twice_s(self) -> float:
        return 2.0 * self.at_s


@dataclass(slots=True)
class Open:
    value: float
    more: list[int] = field(default_factory=list, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Empty:
    """Nothing in it."""


class Plain:
    value: int = 1
'''


def made(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__, "swift": lambda cls: cls}
    exec(compile(text, "classes", "exec"), names)
    return names


@pytest.mark.parametrize(
    "expression",
    [
        "Base(at_s=2.0)",
        "Base(at_s=2.0, word=Word('a'))",
        "Derived(at_s=3.0)",
        "Derived(at_s=3.0, inner=Base(at_s=4.0), pair=(1.0, None)).twice_s",
        "Derived(at_s=3.0) == Derived(at_s=3.0)",
        "hash(Derived(at_s=3.0)) == hash(Derived(at_s=3.0))",
        "Derived(at_s=3.0) == Derived(at_s=3.5)",
        "Open(1.0, [2])",
        "Open(1.0).more is Open(1.0).more",
        "Open(1.0, [2]) == Open(1.0)",
        "Empty()",
        "Plain().value",
    ],
)
def test_rewritten_classes_are_what_they_were(script: ModuleType, expression: str) -> None:
    new = made(script.rewritten(_CLASSES))
    assert repr(eval(expression, new)) == repr(eval(expression, made(_CLASSES)))


@pytest.mark.parametrize("expression", ["Base()", "Base(1.0)", "Derived(at_s=1.0, other=2)", "Empty(1)", "Open()"])
def test_what_they_refuse_they_refuse(script: ModuleType, expression: str) -> None:
    for text in (_CLASSES, script.rewritten(_CLASSES)):
        with pytest.raises(TypeError):
            eval(expression, made(text))


def test_a_copy_is_another_object_with_the_same_in_it(script: ModuleType) -> None:
    names = made(script.rewritten(_CLASSES))
    one = names["Derived"](at_s=3.0, pair=(1.0, 2.0))
    other = one.copied_()
    assert other == one
    assert other is not one
    assert other.inner is one.inner


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("    late: int = field(init=False)", r"One\.late: only a field with a default_factory"),
        ("    late: int = field(default_factory=int, init=False)", r"One\.late"),
        ("    late: int = dataclasses.field(default_factory=int)", r"One\.late"),
        ("    late: list[int] | None = field(default_factory=list)", r"One\.late"),
        ("    late: ClassVar[int] = 3", r"One\.late: ClassVar\[int\] is not known"),
        ("    late: int\n    def __post_init__(self) -> None: ...", "One: a dataclass of this form"),
    ],
)
def test_a_form_that_is_not_known_is_an_error(script: ModuleType, line: str, says: str) -> None:
    text = f"@dataclass(frozen=True)\nclass One:\n{line}\n"
    with pytest.raises(script.CompileError, match=says):
        script.rewritten(text)


@pytest.mark.parametrize(
    "head",
    [
        "@dataclass\nclass One:",
        "@dataclass(order=True)\nclass One:",
        "@dataclasses.dataclass(frozen=True)\nclass One:",
        "@other\n@dataclass(frozen=True)\nclass One:",
        "class Two:\n @dataclass(frozen=True)\n class One:",
        "@dataclass(frozen=True)\nclass One:\n    x: int\n@dataclass(frozen=True)\nclass One:",
    ],
)
def test_a_dataclass_of_another_form_is_an_error(script: ModuleType, head: str) -> None:
    with pytest.raises(script.CompileError, match=r"One: .* known"):
        script.rewritten(f"{head}\n    value: int = 1\n")


def test_what_is_no_python_is_told_with_its_place(script: ModuleType) -> None:
    with pytest.raises(SyntaxError, match=r"\(some\.py, line 2\)"):
        script.rewritten("x = 1\ndef x(:\n", "some.py")


def test_a_base_of_another_module_is_an_error(script: ModuleType) -> None:
    with pytest.raises(script.CompileError, match="its base Other is no dataclass of the same module"):
        script.rewritten("@dataclass(frozen=True)\nclass One(Other):\n    value: int\n")


def from_package(package: Path, *words: str) -> str:
    """Run Python with the package of this folder: what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    return subprocess.run(
        [sys.executable, "-P", *words], env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def played(package: Path, *words: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(from_package(package, "-m", "powerguard", "simulate", *words, "--json"))
    return told


def test_the_rewritten_package_plays_the_same_outages(script: ModuleType, tmp_path: Path) -> None:
    """Not compiled, which takes minutes: what is compiled is this text. Every module of the two folders is in it."""
    names = script.copy(ROOT, tmp_path)
    modules = {path.relative_to(ROOT).as_posix() for folder in script.COMPILED for path in (ROOT / folder).glob("*.py")}
    assert set(names) | script.INTERPRETED | {f"{folder}/__init__.py" for folder in script.COMPILED} == modules
    asked = "from powerguard.core.model import State; print(State().copied_() == State())"
    assert from_package(tmp_path, "-c", asked) == "True\n", "else it is the checkout's package that plays"
    options = Options(seed=300, outages=40)
    told = report(play_many(Site(), options, jobs=1), options) | {"warnings": []}
    assert played(tmp_path, "--seed", "300", "--outages", "40") == told


# --- What counts as made, and what is kept ---------------------------------------------------------------------------


def package(at: Path, *, says: str = "1", status: int = 0, more: str = "") -> Path:
    """Make a package of that name which says something and ends."""
    folder = at / "powerguard"
    (folder / "core").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "core" / "one.py").write_text("x = 1\n")
    (folder / "data.yaml").write_text("x: 1\n")
    (folder / "__main__.py").write_text(f"import sys\n{more}\nprint({says!r}, end='')\nsys.exit({status})\n")
    return at


@pytest.mark.parametrize("change", ["edited", "removed", "moved", "data", "added"])
def test_other_sources_have_another_fingerprint(script: ModuleType, tmp_path: Path, change: str) -> None:
    one = package(tmp_path) / "powerguard" / "core" / "one.py"
    before = script.fingerprint(tmp_path)
    assert script.fingerprint(tmp_path) == before
    (one.parent / "__pycache__").mkdir()
    (one.parent / "__pycache__" / "one.pyc").write_bytes(b"")
    assert script.fingerprint(tmp_path) == before
    match change:
        case "edited":
            one.write_text("x = 2\n")
        case "removed":
            one.unlink()
        case "moved":
            one.rename(tmp_path / "powerguard" / "one.py")
        case "data":
            (tmp_path / "powerguard" / "data.yaml").write_text("x: 2\n")
        case "added":
            (one.parent / "two.py").write_text("")
    assert script.fingerprint(tmp_path) != before


def test_both_that_say_the_same_are_the_same(script: ModuleType, tmp_path: Path) -> None:
    """Also where an outage violates something, which is status 1. Each is played from its own folder."""
    where = "import os; open(os.path.join(os.path.dirname(os.path.dirname(__file__)), 'played'), 'w')"
    one, other = package(tmp_path / "a", status=1, more=where), package(tmp_path / "b", status=1, more=where)
    script.compare(one, other)
    assert (one / "played").exists()
    assert (other / "played").exists()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"says": "2"}, "tells something else"),
        ({"status": 1}, "tells something else"),
        ({"more": "raise ValueError"}, "tells something else"),
    ],
)
def test_one_that_differs_is_not_kept(script: ModuleType, tmp_path: Path, other: dict[str, Any], says: str) -> None:
    with pytest.raises(script.CompileError, match=says):
        script.compare(package(tmp_path / "a"), package(tmp_path / "b", **other))


def test_two_that_both_fail_are_not_the_same(script: ModuleType, tmp_path: Path) -> None:
    one, other = (package(tmp_path / name, more="raise ValueError") for name in "ab")
    with pytest.raises(script.CompileError, match="fails in the checkout itself"):
        script.compare(one, other)


@pytest.mark.parametrize("words", [[], ["run"], ["--version"]])
def test_nothing_but_simulations_runs_from_the_copy(words: list[str]) -> None:
    ended = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (64, "")
    assert ended.stderr == "scripts/compiled: only for simulations: scripts/compiled simulate [OPTION...]\n"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_outages_with_faults() -> None:
    """No invariant violated, and no power lost that planning could have avoided."""
    ended = subprocess.run(
        [SCRIPT, "simulate", "--seed", "10000", "--outages", "100000", "--json"], stdout=subprocess.PIPE, check=False
    )
    assert ended.stdout, f"status {ended.returncode}, and why is above"
    told = json.loads(ended.stdout)
    assert told["outages"] == 100_000
    assert told["invariant_violations"] == []
    assert told["planning_dirty_outages"] == []
    assert told["shutdowns"] > 0, "a world in which nothing happens proves nothing"
    assert ended.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_is_as_interpreted(script: ModuleType) -> None:
    """2,000 outages to the last digit; the oracle plays those that are not named here. And it is compiled."""
    for policy in ("powerguard", "nut", "oracle"):
        words = ["--seed", "90000", "--outages", "2000", "--policy", policy]
        compiled = subprocess.run([SCRIPT, "simulate", *words, "--json"], stdout=subprocess.PIPE, check=True)
        assert json.loads(compiled.stdout) == played(ROOT, *words)
    for module in ("powerguard.core.machine", "powerguard.sim.world.run"):
        place = from_package(script.COPY, "-c", f"import {module} as module; print(module.__file__)")
        assert Path(place.strip()).suffix == ".so"
