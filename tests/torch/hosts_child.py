"""One rank of a job on several hosts, with an all-reduce a step: hosts_child.py STEP_S; run under Hosts, or torchrun.

HOST_FOLDER: this host's own disk: ck, the socket s, and what this rank says (log-RANK). A file `hang` there stops its
training thread in the middle of a step.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from powerguard.trainer import Guard, Parts

FOLDER = Path(os.environ["HOST_FOLDER"])


def main(step_s: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (FOLDER / f"log-{rank}").open("a", buffering=1) as log:
        train(rank, step_s, lambda word, step: print(word, step, f"{time.monotonic():.6f}", file=log))


def train(rank: int, step_s: float, say: Any) -> None:
    weights = torch.zeros(50_000)
    kept = {"weights": weights.numpy()}

    def load(saved: Any) -> None:
        weights.copy_(torch.frombuffer(saved["weights"], dtype=torch.float32))

    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    with Guard(
        Parts(lambda: kept, load), FOLDER / "ck", job="many", every_s=None, socket=FOLDER / "s" if first else None
    ) as guard:
        step = guard.restore()
        say("start", step)
        while True:
            time.sleep(step_s)
            while (FOLDER / "hang").exists():
                time.sleep(0.05)
            gradient = torch.full((50_000,), float(rank))
            dist.all_reduce(gradient)
            weights.add_(gradient)
            step += 1
            assert weights[0].item() == step * sum(range(dist.get_world_size())), "the same bits as without a stop"
            say("step", step)
            guard.step(step)


if __name__ == "__main__":
    main(float(sys.argv[1]))
