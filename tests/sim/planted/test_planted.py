"""The proof of the proof: a simulator that finds nothing shows something only if it finds what is there."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sim.planted.grow import Loader
from tests.sim.planted.plants import FIRST, PLANTS, Plant

ROOT = Path(__file__).parents[3]
Ask = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def garden_of(*options: str) -> Iterator[Ask]:
    """Plays seeds in a process of their own, with a fault or without."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "POWERGUARD_UNDER_TEST": "1"}
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests/sim/planted/grow.py"), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as garden:
        assert garden.stdin is not None
        assert garden.stdout is not None
        come_in, go_out = garden.stdin, garden.stdout

        def asked(
            level: str, site: dict[str, Any], seeds: list[int], plant: Plant | None = None, limit_s: int = 110
        ) -> dict[str, Any]:
            what = {
                "limit_s": limit_s,
                "module": "" if plant is None else plant.module,
                "swaps": () if plant is None else plant.swaps,
                "level": level,
                "site": site,
                "seeds": seeds,
            }
            come_in.write(json.dumps(what) + "\n")
            come_in.flush()
            answer: dict[str, Any] = json.loads(go_out.readline())
            assert answer.get("error", "") == ""
            return answer

        yield asked
        come_in.close()


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with garden_of() as garden:
        yield garden


@pytest.fixture(scope="module")
def ask_without() -> Iterator[Ask]:
    """For seeds without a fault: the product is loaded once for all of them."""
    with garden_of("--whole") as garden:
        yield garden


def seeds_of(plant: Plant) -> list[int]:
    """All that a fault is looked for in; the one that found it once is the first."""
    return sorted(range(FIRST, FIRST + plant.within), key=lambda seed: (seed < plant.hint, seed))


def part_of(plant: Plant) -> str:
    """Name the package that a fault lies in, as in core.energy."""
    return ".".join(plant.module.split(".")[1:3])


def played(plant: Plant) -> object:
    """One fault of each part of the product is played at each commit, the others in `make test-long`."""
    is_first = next(each for each in PLANTS if part_of(each) == part_of(plant)) is plant
    return pytest.param(plant, id=plant.name, marks=() if is_first else pytest.mark.slow)


@pytest.mark.xdist_group("planted")  # one worker has two processes that play; each would have two of its own
@pytest.mark.parametrize("plant", [played(plant) for plant in PLANTS])
def test_planted_fault_is_found(ask: Ask, ask_without: Ask, plant: Plant) -> None:
    """It is found within the stated number of seeds, and without it the seed that found it has nothing to say."""
    found = ask(plant.level, plant.site, seeds_of(plant), plant)
    assert found["seed"] is not None, f"{plant.name} stays hidden for {plant.within} seeds"
    without = ask_without(plant.level, plant.site, [found["seed"]])
    assert without["found"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("site", sorted({(plant.level, json.dumps(plant.site)) for plant in PLANTS}), ids=str)
def test_without_a_fault_all_those_seeds_pass(ask_without: Ask, site: tuple[str, str]) -> None:
    """Not just the seed that found it: none of those in which a fault is looked for cries wolf."""
    level, text = site
    most = max(plant.within for plant in PLANTS if (plant.level, json.dumps(plant.site)) == site)
    assert ask_without(level, json.loads(text), list(range(FIRST, FIRST + most)), limit_s=800)["found"] == ""


def test_faults_are_many_and_everywhere() -> None:
    """In the core, in the loop, in the bulkhead of all effectors and in the journal; each of them once."""
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 20
    places = Counter(part_of(plant) for plant in PLANTS)
    assert places.keys() >= {"core.energy", "core.comeback", "daemon.loop", "daemon.attempt", "daemon.journal"}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_fault_can_be_planted(plant: Plant) -> None:
    """Each text that a fault replaces is there, once; with the fault it is still Python, and no name is unknown.

    A module that breaks with a NameError would be found, whatever the simulator looks at.
    """
    place = importlib.util.find_spec(plant.module)
    assert place is not None
    assert place.origin is not None
    loader = Loader(plant.module, place.origin, plant.swaps)
    assert loader.get_code(plant.module)
    looked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"],
        input=loader.text(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert looked.returncode == 0, looked.stdout + looked.stderr


def test_fault_that_cannot_be_planted_is_reported() -> None:
    """The text that a fault replaces has changed: that must not pass for a fault that was not found."""
    what = {
        "module": "powerguard.core.energy.budget",
        "swaps": [["no such text", ""]],
        "level": "core",
        "site": {},
        "seeds": [0],
        "limit_s": 60,
    }
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests/sim/planted/grow.py")],
        input=json.dumps(what) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "holds this 0 times" in json.loads(ended.stdout)["error"]
