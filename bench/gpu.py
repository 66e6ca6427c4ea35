"""What a checkpoint costs a training on a GPU, next to torch's own ways, in turn; without a GPU the same on the CPU.

Each way trains in a process of its own: a transformer with AdamW, of 12.9 GB on a GPU and a disk that have room for it.
Rows: what bus and disk can do; how long training stands for a periodic save, what that costs it in all, until when it
is durable; an emergency from the order to durable, alone and during a periodic write; the host memory next to the
state's own; and a cold load in a new process. The folder is build/bench.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.dcp import torch_python
from bench.figure import Figure
from bench.restore import forget_files

NAMES: Final = {
    "limits": "the machine",
    "powerguard": "powerguard",
    "one": "powerguard, snapshots=1",
    "stager": "DCP async_save, 8 threads, a stager that keeps its memory",
    "dcp": "DCP async_save, 8 threads",
    "torch": "torch.save and fsync",
    "load-powerguard": "powerguard",
    "load-torch": "torch.load",
    "load-dcp": "DCP load",
}
_SAVES: Final = {
    "stood": "training stands",
    "lost": "training loses in all",
    "durable": "until durable",
}
_ROWS: Final = {
    "bus": ("GPU into pinned memory", "GB/s"),
    "write new": ("disk, O_DIRECT, into a new file", "GB/s"),
    "write": ("disk, O_DIRECT, over old blocks", "GB/s"),
    "read": ("disk, O_DIRECT, read", "GB/s"),
    **{row: (text, "s") for row, text in _SAVES.items()},
    "copied": ("copied into host memory", "GB/s"),
    "written": ("written", "GB/s"),
    **{f"optimizer {row}": (f"overlap=optimizer: {text}", "s") for row, text in _SAVES.items()},
    **{f"clone {row}": (f"overlap=clone: {text}", "s") for row, text in _SAVES.items()},
    **{f"thread {row}": (f"one torch thread: {text}", "s") for row, text in _SAVES.items()},
    "emergency": ("emergency, until durable", "s"),
    "during": ("emergency during a periodic write, until durable", "s"),
    "ready": ("until memory and files are ready for the first save", "s"),
    "loaded": ("load in a new process", "s"),
    "memory": ("host memory for it", "x state"),
}
_SHAPES: Final = {
    "large": ("limits", "powerguard", "load-powerguard", "one", "stager", "dcp", "load-dcp", "torch", "load-torch"),
    "small": ("powerguard", "load-powerguard", "stager", "dcp", "torch"),
}
_LARGE: Final = 12_900_000_000
_SMALL: Final = 2_000_000_000
_COPIES: Final = 4.5
"""What the disk holds of the state: two emergency files, two checkpoints, and what the measurement needs."""


def run(*, quick: bool) -> Iterator[Figure]:
    """Both shapes: few large tensors, and 40,000 small ones."""
    python = torch_python()
    if python is None:
        print("  no torch here (scripts/test-torch --env gets it): nothing measured")
        return
    if subprocess.run([python, "-c", "import xxhash"], capture_output=True, check=False).returncode:
        print(f"  {python} has torch and no xxhash, which powerguard needs (pip install xxhash): nothing measured")
        return
    folder = Path("build/bench/gpu").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    has_gpu = _has_gpu(python)
    room = shutil.disk_usage(folder).free / _COPIES
    large = int(min(_LARGE if has_gpu else _LARGE // 10, room)) // (20 if quick else 1)
    rounds = 1 if quick else 2 if has_gpu else 3
    yield from _measured(python, folder, "large", large, rounds)
    yield from _measured(python, folder, "small", _SMALL // (20 if quick else 1), rounds)


def _has_gpu(python: str) -> bool:
    """Whether there is one with room for the large state, its gradients, and a copy."""
    code = "import torch; print(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 70e9)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def _measured(python: str, folder: Path, shape: str, size_bytes: int, rounds: int) -> Iterator[Figure]:
    bars: dict[str, str] = {}
    for method in _SHAPES[shape]:
        if method.startswith("load-"):
            forget_files()
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        command = [python, "-m", "bench.gpu_child", str(folder), method, shape, str(size_bytes), str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        if done.returncode:
            print(f"  {NAMES[method]}: failed: {done.stderr.strip()}")
            continue
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        what = f"{figures['gb']:.1f} GB in {figures['tensors']:,} tensors, " if "tensors" in figures else ""
        what += f"{figures['device']}: {NAMES[method]}"
        if method == "limits":
            bars = _bars(figures)
        for how in figures.get("how", ()):
            print(f"  with overlap, the copy was made {how}")
        for row, (text, unit) in _ROWS.items():
            if row in figures:
                bar = bars.get(row, "") if "powerguard" in method else ""
                yield Figure(name=f"{what}: {text}", unit=unit, values=tuple(figures[row]), bar=bar)
    shutil.rmtree(folder, ignore_errors=True)


def _bars(figures: dict[str, Any]) -> dict[str, str]:
    """What the machine itself allows."""
    written_s = 1.1 * figures["gb"] / max(figures["write"])
    read_s = 1.15 * figures["gb"] / min(max(figures["read"]), max(figures.get("bus", [float("inf")])))
    return {
        "emergency": f"<= {written_s:.2f} s, 1.1 x the disk",
        "during": f"<= {written_s:.2f} s, 1.1 x the disk",
        "loaded": f"<= {read_s:.2f} s, 1.15 x the disk or the bus",
    }
