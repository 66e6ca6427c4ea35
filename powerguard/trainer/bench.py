"""python -m powerguard.trainer.bench FOLDER: what a checkpoint costs on this machine, and what limits it. A minute.

Saves and restores a made-up state with the library itself, in a folder of its own that is removed again. Where PyTorch
sees a GPU, its bus is measured, too: a state on a GPU comes over it first.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from powerguard.trainer.guard import Guard
from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.store.items import Parts
from powerguard.trainer.store.memory import available_bytes
from powerguard.wire import LastSave

_GB: Final = 1e9
_ROUNDS: Final = 3
_TENSORS: Final = 64
_ROOM: Final = 5
"""Two emergency slots, two checkpoints, and what else the disk holds, as multiples of the state."""
_MEMORY: Final = 4
"""The state, its two copies, and what it is restored into."""
_PREPARED_S: Final = 60.0


def main(argv: list[str] | None = None, *, available: Callable[[], int | None] = available_bytes) -> int:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m powerguard.trainer.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints will lie: the disk that is measured")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the state in 10^9 bytes (default: %(default)g)")
    args = parser.parse_args(argv)
    size_bytes = int(args.gb * _GB)
    wrong = _unfit(args.folder, size_bytes, available())
    if wrong:
        print(f"powerguard.trainer.bench: error: {wrong}", file=sys.stderr)  # noqa: T201
        return 2
    own = Path(tempfile.mkdtemp(prefix="powerguard-bench-", dir=args.folder))
    try:
        saves, restore_s = _measured(own, size_bytes)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    for line in (*_lines(saves, restore_s), *_bus(size_bytes)):
        print(line)  # noqa: T201 - what it is for
    return 0


def _unfit(folder: Path, size_bytes: int, memory: int | None) -> str:
    """Return why so much cannot be measured there; "" if it can."""
    if not folder.is_dir():
        return f"{folder}: no such folder (is its disk mounted?)"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder}: this user may not write there, or it is mounted read-only (give the user a folder there)"
    if size_bytes < 1_000_000:
        return "--gb: at least 0.001"
    free = shutil.disk_usage(folder).free
    if free < _ROOM * size_bytes:
        return f"{folder}: {free / _GB:.1f} GB are free, and {_ROOM * size_bytes / _GB:.1f} GB are needed (--gb)"
    if memory is not None and memory < _MEMORY * size_bytes:
        needed = f"{_MEMORY * size_bytes / _GB:.1f} GB are needed (--gb)"
        return f"{memory / _GB:.1f} GB of memory are available, and {needed}"
    return ""


def _measured(folder: Path, size_bytes: int) -> tuple[list[LastSave], float]:
    """Return what each save cost, the first one (into new memory and new files) left out, and a restore's seconds."""
    state = {f"tensor-{number}": bytearray(b"\xa5") * (size_bytes // _TENSORS) for number in range(_TENSORS)}

    def load(saved: Mapping[str, Any]) -> None:
        for name, content in saved.items():
            state[name][:] = content

    saves = []
    guard = Guard(Parts(lambda: state, load), folder, job="bench", socket=None, every_s=None)
    for step in range(_ROUNDS + 1):
        guard.step(step)
        guard.save(step)
        until_s = boottime_s() + _PREPARED_S
        while guard.requests.pace.limit is None and boottime_s() < until_s:
            time.sleep(0.1)  # room is being made for an emergency, which shows what the disk can do
        if step and (save := guard.stats()) is not None:
            saves.append(save)
    guard.close()
    again = Guard(Parts(lambda: state, load), folder, job="bench", socket=None, every_s=None)
    began_s = boottime_s()
    again.restore()
    restore_s = boottime_s() - began_s
    again.close()
    return saves, restore_s


def _lines(saves: list[LastSave], restore_s: float) -> list[str]:
    middle = sorted(saves, key=lambda each: each.stall_s + each.write_s)[len(saves) // 2]
    share = "" if middle.write_share is None else f", {100 * middle.write_share:.0f} % of what the disk took before"
    slower = "the disk" if middle.write_s > middle.stall_s else "the copy into host memory"
    total_s = middle.stall_s + middle.write_s
    return [
        f"state     {middle.bytes / _GB:.2f} GB in {_TENSORS} tensors; the median of {len(saves)} saves",
        f"copy      {middle.stall_s:.2f} s, {(middle.copy_bw or 0) / _GB:.1f} GB/s: training waits for this",
        f"write     {middle.write_s:.2f} s, {(middle.write_bw or 0) / _GB:.2f} GB/s{share}",
        f"durable   {total_s:.2f} s after an emergency checkpoint begins; limited by {slower}",
        f"restore   {restore_s:.2f} s, {middle.bytes / max(restore_s, 1e-6) / _GB:.2f} GB/s",
    ]


def _bus(size_bytes: int) -> list[str]:
    """Return the rate of the GPU's bus into host memory, as it comes and registered; or that there is none."""
    if find_spec("torch") is None:
        return ["GPU bus   not measured: PyTorch is not installed here"]
    import torch  # large, and not needed without a GPU

    if not torch.cuda.is_available():
        return ["GPU bus   not measured: PyTorch sees no GPU"]
    rates = []
    try:
        on_gpu = torch.empty(min(size_bytes, 2**31), dtype=torch.uint8, device="cuda")
        for pinned in (False, True):
            on_host = torch.empty(on_gpu.shape, dtype=torch.uint8, pin_memory=pinned)
            on_host.copy_(on_gpu)
            torch.cuda.synchronize()
            began_s = boottime_s()
            on_host.copy_(on_gpu)
            torch.cuda.synchronize()
            rates.append(on_gpu.numel() / (boottime_s() - began_s) / _GB)
    except RuntimeError as error:  # another process has the GPU, or its memory
        return [f"GPU bus   not measured: {str(error).partition(chr(10))[0]}"]
    return [f"GPU bus   {rates[0]:.1f} GB/s into ordinary memory, {rates[1]:.1f} GB/s into registered memory"]


if __name__ == "__main__":
    for _each in (signal.SIGTERM, signal.SIGHUP):  # a connection that breaks must not leave the state on the disk
        signal.signal(_each, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
