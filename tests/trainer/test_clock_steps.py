"""Somebody, or NTP, sets the wall clock while a job trains: no deadline moves, and the latest step is the newest."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from powerguard.trainer.store.store import Store
from tests.peers.faketime import faked
from tests.trainer.toy import ask, short_folder

ROOT = Path(__file__).parents[2]
HOUR_S = 3600.0
TRAIN = """
import runpy, select, sys, time
time.sleep = lambda s: select.select([], [], [], s)  # libfaketime breaks clock_nanosleep
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def until(true: Callable[[], bool]) -> None:
    by_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < by_s, "it never came true"
        time.sleep(0.02)


def kept(folder: Path) -> list[tuple[int, float]]:
    """Step and wall time of what can be restored, in the order in which it would be tried."""
    with Store(folder / "checkpoints", job="line", leader=False) as store:
        return [(each.step, datetime.fromisoformat(each.manifest.created).timestamp()) for each in store.found()]


@pytest.mark.peer("faketime")
@pytest.mark.parametrize("step", ["-1h", "+1h"])
def test_a_step_of_the_wall_clock_costs_no_checkpoint_and_no_deadline(folder: Path, step: str) -> None:
    """The periodic saves go on, an emergency keeps its time, and a restart goes on at the last step."""
    clock = folder / "clock"
    clock.write_text("+0", encoding="ascii")
    argv = ["--dir", str(folder), "--steps", "100000", "--every", "0.3", "--step-s", "0.002"]

    def start() -> subprocess.Popen[str]:
        train = f"import sys; sys.argv[0] = {str(ROOT / 'examples/plain_numpy_free.py')!r}{TRAIN}"
        command = [sys.executable, "-c", train, *argv]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **faked(clock)}
        )

    training = start()
    try:
        until(lambda: (folder / "checkpoints").is_dir() and len(kept(folder)) >= 2)
        before = kept(folder)[0]
        clock.write_text(step, encoding="ascii")
        # Until the oldest kept was committed by the new clock, which may take 2 s to be read: 12 saves last 3.3 s.
        for _ in range(12):
            newest = kept(folder)[0][0]
            until(lambda newest=newest: kept(folder)[0][0] > newest)  # type: ignore[misc]
        now = kept(folder)  # once: training goes on and deletes the oldest
        assert now == sorted(now, key=lambda each: each[1], reverse=True), "by step and by commit"
        forward_s = kept(folder)[0][1] - before[1]
        assert (forward_s > HOUR_S / 2) if step == "+1h" else (0.0 < forward_s < HOUR_S / 2)
        wish = {"id": "e-1", "reason": "on_battery", "after": "pause", "deadline_s": 20.0}
        status, _, _ = ask(folder / "line.sock", "POST", "/api/v1/checkpoints", json.dumps(wish).encode())
        assert status in {200, 202}
        given = {"phase": "accepted"}
        while given["phase"] not in {"committed", "failed", "aborted"}:
            given = json.loads(
                ask(folder / "line.sock", "GET", f"/api/v1/checkpoints/e-1?wait=5&seen={given['phase']}")[2]
            )
        assert (given["phase"], given["paused_step"]) == ("committed", given["step"])
        assert kept(folder)[0][0] == given["step"]
    finally:
        training.kill()
        training.communicate()
    again = start()
    try:
        assert again.stdout is not None
        assert again.stdout.readline() == f"step {given['step']}: go on\n"
    finally:
        again.kill()
        again.communicate()
