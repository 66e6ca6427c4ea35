"""A training that uses all that must come back: DDP, AdamW, a schedule, dropout, every random number, shuffled data.

job.py ROOT OUT STEPS [divide]    on one rank, or under torchrun; each tells its losses in OUT/loss-RANK, to the bit
"""

import os
import random
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powerguard.trainer import Guard
from powerguard.trainer.torch.data import ResumableLoader
from powerguard.trainer.torch.state import TorchState
from tests.torch.kept import bytes_of

EVERY_S = 0.15


def model() -> nn.Module:
    first = [nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(*first, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def noise(x: torch.Tensor) -> torch.Tensor:
    """Draw from every generator there is."""
    return x + 0.1 * torch.randn_like(x) + 0.01 * float(np.random.rand()) + 0.01 * random.random()


def digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = list(net.state_dict().values())
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sha256(b"".join(bytes(bytes_of(tensor.detach().contiguous())) for tensor in tensors)).hexdigest()


def main(root: Path, out: Path, steps: int) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1000 + rank)
    torch.use_deterministic_algorithms(mode=True)
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(501, 16, generator=generator)
    loader = ResumableLoader(data, batch_size=8, seed=5, rank=rank, ranks=ranks)
    net = model()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.004) if ranks > 1 else net  # three buckets
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    divide = ranks > 1 and "divide" in sys.argv
    state = TorchState(model=wrapped, optimizer=optimizer, scheduler=scheduler, dataloader=loader, divide=divide)
    # Closed by hand at the end alone: a rank that fails goes down at once, and takes the others with it.
    snapshots = 1 if "one snapshot" in sys.argv else None
    socket = out / "job.sock" if rank == 0 else None
    guard = Guard(state, root, job="job", every_s=EVERY_S, snapshots=snapshots, socket=socket)
    step = guard.restore()
    with (out / f"loss-{rank}").open("a", buffering=1) as losses:
        print("start", step, file=losses)
        while step < steps:
            for batch in loader:
                x = noise(batch)
                loss = (wrapped(x).squeeze(1) - x.square().mean(1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                print(step, loss.item().hex(), file=losses)
                guard.step(step)
                if step == steps:
                    break
    guard.close()
    (out / f"final-{rank}").write_text(digest(net, optimizer))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
