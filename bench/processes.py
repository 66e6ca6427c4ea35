"""From start to exit: the hook and the status line, beside a bare Python and beside what NUT and apcupsd offer."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench import world
from bench.figure import Figure

_RIVALS = {"NUT upsc (no server: asks and is refused)": ["upsc", "x@127.0.0.1:1"]}


def _times_ms(argv: list[str], runs: int) -> tuple[float, ...]:
    took = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=20)
        took.append(1000.0 * (time.perf_counter() - began))
    return tuple(took)


def run(*, quick: bool) -> list[Figure]:
    runs = 5 if quick else 30
    powerguard = str(Path(sys.executable).with_name("powerguard"))
    figures = [Figure(name="python -c pass", unit="ms", values=_times_ms([sys.executable, "-c", "pass"], runs))]
    with world.folder() as at:
        nobody = ["--socket", str(at / "nobody.sock")]
        for verb in (["event", "onbattery"], ["status"]):
            name = f"powerguard {verb[0]}, start to exit (daemon down)"
            argv = [powerguard, verb[0], *nobody, *verb[1:]]
            figures.append(Figure(name=name, unit="ms", values=_times_ms(argv, runs), bar="<= 100"))
    for name, argv in _RIVALS.items():
        if shutil.which(argv[0]):
            figures.append(Figure(name=name, unit="ms", values=_times_ms(argv, runs)))
    return figures
