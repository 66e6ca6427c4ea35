"""How many outages the simulator plays in a minute, on all cores: the core compiled, and as it is installed."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.figure import Figure
from powerguard.sim.world.many import cores

_ROOT = Path(__file__).parent.parent
_COMPILED = (str(_ROOT / "scripts" / "compiled"),)
_INSTALLED = (sys.executable, "-m", "powerguard")


def _a_minute(command: Sequence[str], seed: int, outages: int) -> float:
    words = ["simulate", "--seed", str(seed), "--outages", str(outages), "--json"]
    began_s = time.perf_counter()
    ended = subprocess.run([*command, *words], cwd=_ROOT, stdout=subprocess.DEVNULL, check=False)
    if ended.returncode:
        message = f"{' '.join([*command, *words])}: status {ended.returncode}; no figure"
        raise RuntimeError(message)
    return 60.0 * outages / (time.perf_counter() - began_s)


def run(*, quick: bool) -> list[Figure]:
    rounds, outages = (1, 200) if quick else (5, 3000)
    _a_minute(_COMPILED, 1, 1)  # makes the compiled copy where there is none
    compiled, installed = [], []
    for i in range(rounds):  # in turn: the speed of a machine changes within minutes
        compiled.append(_a_minute(_COMPILED, 1 + i * outages, 2 * outages))
        installed.append(_a_minute(_INSTALLED, 1 + i * outages, outages))
    where = f"outages with faults, {cores()} cores"
    return [
        Figure(name=f"{where}, core compiled", unit="a minute", values=tuple(compiled), bar=">= 10,000"),
        Figure(name=f"{where}, as installed", unit="a minute", values=tuple(installed)),
    ]
