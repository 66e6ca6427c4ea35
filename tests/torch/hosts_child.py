"""One rank of a job on several hosts, with an all-reduce a step: hosts_child.py STEP_S [dcp]; under Hosts, or torchrun.

dcp: weights that are divided among the ranks, and sealed DCP checkpoints in a folder that all hosts share.
HOST_FOLDER: this host's own disk: ck, the socket s, and what this rank says (log-RANK). A file `hang` there stops its
training thread in the middle of a step; `die-committing` and `die-committed` kill the process before and after the
manifest gets its name. HOST_ROOT: where checkpoints lie, if not there.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from powerguard.trainer import Guard, Parts
from powerguard.trainer.dcp import load_newest_sealed, save_sealed
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.manifest import MANIFEST

FOLDER = Path(os.environ["HOST_FOLDER"])
ROOT = Path(os.environ.get("HOST_ROOT", FOLDER / "ck"))


class DyingDisk(Disk):
    """A disk of a host that loses its power when a checkpoint is committed there."""

    def rename(self, old: Path, new: Path) -> None:
        self._die(new, "die-committing")
        super().rename(old, new)
        self._die(new, "die-committed")

    def _die(self, new: Path, word: str) -> None:
        if new.name == MANIFEST and (FOLDER / word).exists():
            os.kill(os.getpid(), signal.SIGKILL)


def main(step_s: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (FOLDER / f"log-{rank}").open("a", buffering=1) as log:
        train = replicated if len(sys.argv) == 2 else divided
        train(rank, step_s, lambda word, step: print(word, step, f"{time.monotonic():.6f}", file=log))


def divided(rank: int, step_s: float, say: Any) -> None:
    """Train weights of which each rank has a part, of whatever size: they are loaded with fewer ranks, too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = distribute_tensor(torch.zeros(50_000), mesh, [Shard(0)])
    state = {"weights": weights}
    shared = FOLDER.parent / "dcp"
    step = load_newest_sealed(state, shared) or 0
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    with Guard(
        lambda step: save_sealed(state, shared, step), job="many", every_s=None, socket=FOLDER / "s" if first else None
    ) as guard:
        guard.start_from(step)
        say("start", step)
        while True:
            time.sleep(step_s)
            dist.all_reduce(torch.ones(1))
            weights.to_local().add_(1.0)
            step += 1
            assert weights.full_tensor().sum().item() == 50_000 * step
            say("step", step)
            guard.step(step)


def replicated(rank: int, step_s: float, say: Any) -> None:
    weights = torch.zeros(50_000)
    kept = {"weights": weights.numpy()}

    def load(saved: Any) -> None:
        weights.copy_(torch.frombuffer(saved["weights"], dtype=torch.float32))

    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    with Guard(
        Parts(lambda: kept, load),
        ROOT,
        job="many",
        every_s=None,
        socket=FOLDER / "s" if first else None,
        disk=DyingDisk(),
    ) as guard:
        step = guard.restore()
        say("start", step)
        while True:
            time.sleep(step_s)
            if (FOLDER / "hang").exists():
                say("hangs", step)
            while (FOLDER / "hang").exists():
                time.sleep(0.05)
            gradient = torch.full((50_000,), float(rank))
            dist.all_reduce(gradient)
            weights.add_(gradient)
            step += 1
            assert (weights == step * sum(range(dist.get_world_size()))).all(), "the same bits as without a stop"
            say("step", step)
            guard.step(step)


if __name__ == "__main__":
    main(float(sys.argv[1]))
