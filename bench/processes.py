"""From start to exit: the hook and the status line, beside a bare Python and beside what NUT and apcupsd offer."""

import shutil
import socket
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
        # No timeout: with one, subprocess polls, and every answer would be 64 ms.
        subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        took.append(1000.0 * (time.perf_counter() - began))
    return tuple(took)


def _waits_for(path: Path, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)


def run(*, quick: bool) -> list[Figure]:
    runs = 5 if quick else 30
    powerguard = str(Path(sys.executable).with_name("powerguard"))
    figures = [Figure(name="python -c pass", unit="ms", values=_times_ms([sys.executable, "-c", "pass"], runs))]
    with world.folder() as at:
        config = world.settings(at, snmp_port=world.free_port(socket.SOCK_DGRAM), table={50: 540, 100: 240})
        with (at / "daemon.log").open("wb") as log:
            daemon = subprocess.Popen([powerguard, "run", "--config", str(config)], stdout=log, stderr=log)
        try:
            _waits_for(at / "powerguard.sock", 20.0)
            figures += _verbs(powerguard, at / "powerguard.sock", runs, "daemon up")
        finally:
            daemon.terminate()
            daemon.wait(20)
        figures += _verbs(powerguard, at / "nobody.sock", runs, "daemon down")
    for name, argv in _RIVALS.items():
        if shutil.which(argv[0]):
            figures.append(Figure(name=name, unit="ms", values=_times_ms(argv, runs)))
    return figures


def _verbs(powerguard: str, path: Path, runs: int, how: str) -> list[Figure]:
    figures = []
    for verb in (["event", "onbattery"], ["status"]):
        argv = [powerguard, verb[0], "--socket", str(path), *verb[1:]]
        name = f"powerguard {verb[0]}, start to exit ({how})"
        figures.append(Figure(name=name, unit="ms", values=_times_ms(argv, runs), bar="<= 100"))
    return figures
