"""A training whose state lies on a device that copies late, killed over and over.

late_job.py FOLDER STEPS KILLS SEED WHERE

The process loads torch once and makes a child for each run. Every run tells its losses in FOLDER/loss, to the bit; the
last one ends by itself after STEPS, or, if one that was killed was beyond that already, a little later, and tells a
digest of all there is in FOLDER/final. Without kills no guard saves: that is what
others are compared with. WHERE: "cpu", or "cuda" for a real one.
"""

import ctypes
import os
import random
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

from powerguard.trainer import Guard
from powerguard.trainer.store.items import Item
from powerguard.trainer.torch import TorchState
from powerguard.trainer.torch.device import CudaDevice
from powerguard.trainer.torch.tree import TensorItem
from powerguard.wire import After, TriggerRequest
from tests.torch.late_device import SIZES, LateDevice

EVERY_S = 0.01
BATCHES = 2


class SmallSizes(CudaDevice):
    """A GPU, with pieces so small that a small model has many."""

    sizes = SIZES


def train(folder: Path, steps: int, where: str, *, saves: bool, seed: int) -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    layers = [nn.Linear(24, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Dropout(0.1), nn.Linear(40, 24)]
    model = nn.Sequential(*layers).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, foreach=True)
    average = [param.detach().clone() for param in model.parameters()]
    state = TorchState(
        model=model,
        optimizer=optimizer,
        extra={"average": average},
        overlap="optimizer",
        device=LateDevice(seed=seed, slowest_s=0.01) if where == "cpu" else SmallSizes(),
    )
    every_s = EVERY_S if saves else None
    guard = Guard(state, folder / "ck", job="late", every_s=every_s, snapshots=1 + seed % 2, socket=None)
    step = guard.restore()
    with (folder / "loss").open("a", buffering=1) as losses:
        print("start", step, file=losses)
        while step < steps:
            optimizer.zero_grad()
            for _ in range(BATCHES):
                x = torch.randn(8, 24, device=where)
                loss = (model(x) - x.roll(1, 1)).square().mean()
                loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mine, param in zip(average, model.parameters(), strict=True):
                    mine.lerp_(param, 0.01)
            step += 1
            print(step, loss.item().hex(), file=losses)
            if saves and step % 37 == 0:  # an emergency, as a rule in the midst of a late copy or of its write
                guard.requests.trigger(TriggerRequest(id=f"e{step}", after=After.CONTINUE))
            guard.step(step)
            result = guard.stats()
            if result is not None and result.copy.startswith("while training went on"):
                (folder / "late").touch()
    (folder / "final").write_text(digest(state.items()))
    guard.close(finish=False)


def digest(items: list[Item]) -> str:
    """Of all tensors, torch's random numbers among them; Python's own were not seeded."""
    seen = sha256()
    for item in (each for each in items if isinstance(each, TensorItem)):
        content = bytearray(item.size_bytes)
        item.copy_to(memoryview(content))
        seen.update(content)
    return seen.hexdigest()


def run(folder: Path, steps: int, where: str, *, seed: int, kill_after_s: float | None, saves: bool = True) -> None:
    """Make a child that trains, and kill it so long after its restore; None: not before it ends.

    Below 0: kill it so long after it was made, as a rule in the restore.
    """
    losses = folder / "loss"
    before = losses.stat().st_size if losses.exists() else 0
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it may never end by itself
        try:
            train(folder, steps, where, saves=saves, seed=seed)
        except BaseException as error:  # noqa: BLE001 - the parent knows by the status
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if kill_after_s is not None:
        while kill_after_s >= 0 and (not losses.exists() or losses.stat().st_size == before):
            time.sleep(0.005)
        time.sleep(abs(kill_after_s))
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status > 0:
        sys.exit(status)


def main(folder: Path, where: str, steps: int, kills: int, seed: int) -> None:
    torch.use_deterministic_algorithms(mode=True)  # here, because it loads half of torch
    chance = random.Random(seed)
    for number in range(kills):
        run(folder, sys.maxsize, where, seed=number, kill_after_s=chance.random() * (0.6 if (number + 1) % 3 else -0.1))
        found = [line.split()[0] for line in (folder / "loss").read_text().splitlines()]
        steps = max([steps, *(int(word) + 100 for word in found if word.isdecimal())])
    run(folder, steps, where, saves=kills > 0, seed=kills, kill_after_s=None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[5], *map(int, sys.argv[2:5]))
