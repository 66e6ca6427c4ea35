"""`python -m powerguard.trainer.bench`: a user's own machine is measured with the library, and left as it was."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from powerguard.trainer import bench
from tests.trainer.tiers.rig import small_disk


def test_a_save_and_a_restore_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([str(tmp_path), "--gb", "0.02"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["state", "copy", "write", "durable", "restore", "GPU"]
    assert re.match(r"state +0\.02 GB in 64 tensors; the median of 3 saves$", lines[0])
    copied, written, durable = (float(re.findall(r"([\d.]+) s", line)[0]) for line in lines[1:4])
    assert durable == pytest.approx(copied + written, abs=0.02)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_nothing_can_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read_only = 32 | 1  # MS_REMOUNT, MS_RDONLY
    with small_disk(tmp_path, 8):
        assert not ctypes.CDLL(None).mount(b"tmpfs", str(tmp_path).encode(), b"tmpfs", read_only, b"size=8m")
        assert bench.main([str(tmp_path), "--gb", "0.001"]) == 2
    assert "this user may not write there, or it is mounted read-only" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        ([str(tmp_path / "none")], "no such folder"),
        ([str(tmp_path), "--gb", "1e6"], "GB are needed"),
        ([str(tmp_path), "--gb", "-1"], "at least 0.001"),
    ):
        assert bench.main(words) == 2
        assert says in capsys.readouterr().err
    assert bench.main([str(tmp_path), "--gb", "0.02"], available=lambda: 79_000_000) == 2
    assert "0.1 GB of memory are available, and 0.1 GB are needed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_is_ended_leaves_no_state_on_the_disk(tmp_path: Path, number: int) -> None:
    """By a time limit, or a connection that breaks: four times the state would lie there for good."""
    running = subprocess.Popen([sys.executable, "-m", "powerguard.trainer.bench", str(tmp_path), "--gb", "0.5"])
    while not list(tmp_path.glob("*/*/shard-*")):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(number)
    assert running.wait() == 128 + number
    assert list(tmp_path.iterdir()) == []


TORCH = """
class cuda:
    is_available = staticmethod(lambda: True)
uint8 = None
def empty(*_, **__):
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\\nCompile with")
"""


def test_a_gpu_that_another_process_has_costs_no_other_figure(tmp_path: Path) -> None:
    """A PyTorch whose GPU is in use: what was measured before is printed all the same."""
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "disk").mkdir()
    paths = os.pathsep.join([str(tmp_path), str(Path(bench.__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-m", "powerguard.trainer.bench", str(tmp_path / "disk"), "--gb", "0.01"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["state", "copy", "write", "durable", "restore", "GPU"]
    assert lines[-1].endswith("not measured: CUDA error: all CUDA-capable devices are busy or unavailable")


def test_a_machine_whose_torch_has_no_xxhash_measures_nothing(tmp_path: Path) -> None:
    """Each save of `python -m bench gpu` would fail there, and be waited for over five minutes."""
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "xxhash.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gpu", "--quick"],
        cwd=Path(bench.__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no xxhash, which powerguard needs (pip install xxhash): nothing measured" in done.stdout
