"""The examples for PyTorch: started, asked, killed and started again as their texts tell people to."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.peers import require
from tests.torch.processes import ROOT, Launched
from tests.trainer.toy import ask

CHAR = ROOT / "examples" / "train_char.py"


def char(folder: Path, ranks: int, steps: int, every_s: float = 0.2) -> Launched:
    folder.mkdir(exist_ok=True)
    argv = ["--dir", folder, "--steps", str(steps), "--every", str(every_s), "--text", ROOT / "LICENSE"]
    return Launched(ranks, CHAR, *argv, log=folder / "log")


def end(folder: Path) -> str:
    """The last loss, to the bit."""
    return re.findall(r"step \d+: done, loss (\S+)", (folder / "log").read_text())[-1]


@pytest.mark.timeout(230)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_started_again_it_ends_with_the_same_loss(ranks: int, folder: Path) -> None:
    pieces = folder / "pieces"
    first = char(pieces, ranks, 40)
    try:
        first.until(lambda: any((pieces / "checkpoints").glob("step-*/MANIFEST.json")))
    finally:
        first.kill()
    char(pieces, ranks, 40).end()
    starts = re.findall(r"step (\d+): (?:begin|go on)", (pieces / "log").read_text())
    assert starts[0] == "0"
    assert int(starts[-1]) > 0
    last = end(pieces)
    if ranks == 1:  # of two ranks test_resume.py compares every loss
        char(folder / "whole", ranks, 40).end()
        assert last == end(folder / "whole")


@pytest.mark.timeout(230)
def test_slurm_asks_for_a_checkpoint_and_requeues(folder: Path) -> None:
    """The batch script as Slurm runs it, with its warning signal; torchrun and scontrol are found on the PATH."""
    with slurm_job(folder, f'shift 3; exec "{sys.executable}" "$@" --text LICENSE --quiet') as job:
        for _ in range(1800):
            if (folder / "char.sock").exists() and status(folder).get("step"):
                break
            assert job.poll() is None
            signal.sigtimedwait([], 0.05)
        os.kill(job.pid, signal.SIGUSR1)
        assert job.wait(timeout=100) == 0
    assert (folder / "requeued").read_text() == "requeue 7\n"
    assert any((folder / "char" / "checkpoints").glob("step-*/MANIFEST.json"))


def test_slurm_requeues_a_job_that_cannot_be_asked(folder: Path) -> None:
    """It still loads its data, say: else Slurm would end it at the time limit, and for good."""
    with slurm_job(folder, 'kill -USR1 "$PPID"; exec sleep 1000') as job:
        assert job.wait(timeout=60) == 0
    assert (folder / "requeued").read_text() == "requeue 7\n"


@contextmanager
def slurm_job(folder: Path, torchrun: str) -> Iterator[subprocess.Popen[bytes]]:
    """The batch script, with this shell command in the place of torchrun."""
    require("curl")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "torchrun").write_text(f"#!/bin/sh\n{torchrun}\n")
    (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >"{folder}/requeued"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    env = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": "7",
        "RANKS": "1",
        "CHECKPOINTS": str(folder / "char"),
        "SOCKET": str(folder / "char.sock"),
    }
    bash = shutil.which("bash")
    assert bash is not None
    with subprocess.Popen(
        [bash, ROOT / "examples" / "slurm-one.sbatch"], cwd=ROOT, env=env, start_new_session=True
    ) as job:
        try:
            yield job
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def status(folder: Path) -> dict[str, object]:
    try:
        found: dict[str, object] = json.loads(ask(folder / "char.sock", "GET", "/api/v1/status")[2])
    except OSError:
        return {}
    return found
