"""How many outages the simulator plays in a minute, on all cores."""

import subprocess
import sys
import time
from pathlib import Path

from bench.figure import Figure
from powerguard.sim.world.many import cores

_ROOT = Path(__file__).parent.parent


def _a_minute(seed: int, outages: int) -> float:
    command = [sys.executable, "-m", "powerguard", "simulate", "--seed", str(seed), "--outages", str(outages), "--json"]
    began_s = time.perf_counter()
    ended = subprocess.run(command, cwd=_ROOT, stdout=subprocess.DEVNULL, check=False)
    if ended.returncode:
        message = f"{' '.join(command)}: status {ended.returncode}; no figure"
        raise RuntimeError(message)
    return 60.0 * outages / (time.perf_counter() - began_s)


def run(*, quick: bool) -> list[Figure]:
    rounds, outages = (1, 200) if quick else (5, 3000)
    played = tuple(_a_minute(1 + i * outages, outages) for i in range(rounds))
    return [Figure(name=f"outages with faults, {cores()} cores", unit="a minute", values=played)]
