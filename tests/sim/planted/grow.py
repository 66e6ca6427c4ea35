"""Plays the simulator with a fault planted into the code, each time in a process of its own; started by the tests.

A request is a line of JSON on stdin, an answer one on stdout. What is imported here is what all of them need of others;
nothing of powerguard is, because it is loaded with the fault in it. With --whole nobody plants
anything, and what is played is loaded once, beforehand.
"""

import importlib
import importlib.machinery
import json
import os
import signal
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Sequence
from types import CodeType
from typing import Any

import aiohttp.web
import prometheus_client
import pydantic
import structlog
import yaml

WANTED = (aiohttp.web, prometheus_client, pydantic, structlog, yaml, sqlite3, tempfile)

PLAYED = (
    "powerguard.sim.world.site",
    "powerguard.sim.world.report",
    "powerguard.sim.world.many",
    "powerguard.sim.looped.outage",
    "powerguard.sim.cluster.play",
)


class PlantError(Exception):
    """The text that a fault replaces is not there, or not just once: the fault must be written anew."""


class Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with some of its text replaced."""

    def __init__(self, name: str, path: str, swaps: Sequence[Sequence[str]]) -> None:
        super().__init__(name, path)
        self.swaps = swaps

    def text(self) -> str:
        """Return the module with the fault in it. Raises PlantError."""
        text = self.get_data(self.path).decode()
        for old, new in self.swaps:
            if text.count(old) != 1:
                msg = f"{self.name} holds this {text.count(old)} times, and should once: {old!r}"
                raise PlantError(msg)
            text = text.replace(old, new)
        return text

    def get_code(self, fullname: str) -> CodeType:
        """Compile it again: what is cached is without the fault."""
        return compile(self.text(), self.path, "exec", dont_inherit=True)


class Finder:
    """Finds that module before anybody else does."""

    def __init__(self, module: str, swaps: Sequence[Sequence[str]]) -> None:
        self.module, self.swaps = module, swaps

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where it is, and that we load it."""
        if fullname != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            msg = f"no module {fullname}"
            raise PlantError(msg)
        spec.loader = Loader(fullname, spec.origin, self.swaps)
        return spec


def play(level: str, seed: int, site: Any) -> str:  # noqa: ANN401 - a Site, which must not be imported yet
    """Play one outage; return what was found, or ""."""
    try:
        if level == "core":
            options = importlib.import_module("powerguard.sim.world.report").SimulationOptions(seed=seed, outages=1)
            (result,) = importlib.import_module("powerguard.sim.world.many").play_many(site, options, jobs=1)
            found = list(result.violations)
        elif level == "job":
            result = importlib.import_module("powerguard.sim.cluster.play").play(seed, site, faults=True)
            return "; ".join(result.violations)
        else:
            result = importlib.import_module("powerguard.sim.looped.outage").play(seed, site, faults=True)
            found = [f"{each.name}: {each.what}" for each in result.violations]
        found += ["planning_dirty"] if result.planning_dirty else []
    except PlantError:
        raise
    except Exception as error:  # noqa: BLE001 - a world that breaks is found out, too
        traceback.print_exc()
        return f"it broke: {error!r}"
    return "; ".join(found)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Plant what was asked for, and play its seeds until it is caught."""
    if asked["module"]:
        sys.meta_path.insert(0, Finder(asked["module"], asked["swaps"]))
    site = importlib.import_module("powerguard.sim.world.site").Site.model_validate_json(json.dumps(asked["site"]))
    for seed in asked["seeds"]:
        found = play(asked["level"], seed, site)
        if asked["module"] and asked["module"] not in sys.modules:
            msg = f"nobody has imported {asked['module']}"
            raise PlantError(msg)
        if found:
            return {"seed": seed, "found": found}
    return {"seed": None, "found": ""}


def main() -> None:
    """Answer until stdin ends."""
    for module in PLAYED if "--whole" in sys.argv else ():
        importlib.import_module(module)
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                asked = json.loads(line)
                signal.alarm(asked["limit_s"])  # Nobody but the kernel ends a child that a fault sends in circles.
                said = answer(asked)
            except PlantError as error:
                said = {"seed": None, "found": "", "error": str(error)}
            except BaseException as error:  # noqa: BLE001 - told to whoever asked
                said = {"seed": None, "found": "", "error": f"{error!r}\n{traceback.format_exc()}"}
            with os.fdopen(write, "w") as pipe:
                json.dump(said, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        print(
            text or json.dumps({"seed": None, "found": "", "error": "the child died, or was not done within limit_s"}),
            flush=True,
        )


if __name__ == "__main__":
    main()
