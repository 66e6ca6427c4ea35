"""What a checkpoint costs a training on a GPU, beside torch's own ways, in turn; without a GPU the same on the CPU.

Each way trains in a process of its own: a model with AdamW, of 12.9 GB on a GPU that has room for it. Rows: how long
training stands for a periodic save, until that is durable, an emergency from the order to durable, alone and just after
a periodic write has begun, and the host memory beside the state's own. The folder is build/bench.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.dcp import torch_python
from bench.figure import Figure

WAYS: Final = {
    "powerguard": "powerguard",
    "stager": "DCP async_save, 8 threads, a stager that keeps its memory",
    "dcp": "DCP async_save, 8 threads",
    "torch": "torch.save and fsync",
}
_LARGE: Final = 12_900_000_000
_SMALL: Final = 2_000_000_000
_ROWS: Final = {
    "stood": ("training stands", "s"),
    "durable": ("until durable", "s"),
    "emergency": ("emergency, until durable", "s"),
    "beside": ("emergency while a periodic write runs", "s"),
    "memory": ("host memory for it", "x state"),
}


def run(*, quick: bool) -> list[Figure]:
    """Both shapes: few large tensors, and 40,000 small ones."""
    python = torch_python()
    if python is None:
        print("  no torch here (scripts/test-torch --env gets it): nothing measured")
        return []
    share = 20 if quick else _share(python)
    return [
        *_measured(python, "large", _LARGE // share, 1 if quick else 3),
        *_measured(python, "small", _SMALL // (20 if quick else 1), 1 if quick else 3),
    ]


def _share(python: str) -> int:
    """By how much the state is smaller than on an H100: a tenth where there is no GPU."""
    code = "import torch; print(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 40e9)"
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return 1 if told.stdout.strip() == "True" else 10


def _measured(python: str, shape: str, size_bytes: int, rounds: int) -> Iterator[Figure]:
    folder = Path("build/bench/gpu").absolute()
    for way, name in WAYS.items():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [python, "-m", "bench.gpu_child", str(folder), way, shape, str(size_bytes), str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        shutil.rmtree(folder, ignore_errors=True)
        if done.returncode:
            print(f"  {name}: failed: {done.stderr.strip().splitlines()[-1:]}")
            continue
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        tensors = "few large tensors" if shape == "large" else "40,000 tensors"
        what = f"{told['gb']:.1f} GB in {tensors}, {told['device']}: {name}"
        for row, (text, unit) in _ROWS.items():
            if row in told:
                yield Figure(name=f"{what}: {text}", unit=unit, values=tuple(told[row]))
