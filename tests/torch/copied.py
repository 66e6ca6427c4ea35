"""A training whose state is copied from a device, for the tests of that: with one that copies late, and with a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from powerguard.trainer.store.shards import Snapshot, laid_out
from powerguard.trainer.torch import TorchState
from powerguard.trainer.torch.device import Device
from tests.torch.late_device import LateDevice

Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True),
}


class Training:
    """A model with buffers, an average of its weights beside it, and gradients over several batches."""

    def __init__(
        self,
        device: Device,
        overlap: str = "optimizer",
        *,
        make: Optimizers = OPTIMIZERS["adamw"],
        batches: int = 1,
        width: int = 40,
        where: str = "cpu",
    ) -> None:
        self.device = device
        layers = [nn.Linear(24, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, 24)]
        self.model = nn.Sequential(*layers).to(where)
        self.optimizer = make(self.model.parameters())
        self.average = [param.detach().clone() for param in self.model.parameters()]
        self.state = TorchState(
            model=self.model, optimizer=self.optimizer, extra={"average": self.average}, overlap=overlap, device=device
        )
        self.snapshot = Snapshot(copier=self.state.copier)
        self._batches, self._at = batches, where
        for _ in range(2):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self._batches):
            self.model(torch.randn(5, 24, device=self._at)).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for mine, param in zip(self.average, self.model.parameters(), strict=True):
                mine.lerp_(param, 0.1)

    def register(self) -> None:
        self.snapshot.reserve(laid_out(self.state.items()).size_bytes)
        while self.snapshot.register():
            pass

    def expected(self) -> dict[str, bytes]:
        """What the snapshot must hold of this moment."""
        found = {}
        for item in self.state.items():
            target = bytearray(item.size_bytes)
            item.copy_to(memoryview(target))
            found[item.name] = bytes(target)
        return found

    def taken(self, *, late: bool = True) -> Callable[[], dict[str, bytes]]:
        """Take the state; what it returns waits for the rest and gives what the snapshot holds."""
        layout = self.snapshot.take(self.state.items(), late=late)

        def found() -> dict[str, bytes]:
            self.snapshot.wait_arrived(layout.size_bytes)
            content = self.snapshot.buffer
            return {
                entry.name: bytes(content[entry.offset : entry.offset + entry.size_bytes]) for entry in layout.items
            }

        return found

    def end(self) -> None:
        self.snapshot.close()
        if isinstance(self.device, LateDevice):
            assert not self.device.registered
            assert not self.device.faults


@contextlib.contextmanager
def training(device: Device, *words: str, **options: Any) -> Iterator[Training]:
    rig = Training(device, *words, **options)
    rig.register()
    yield rig
    rig.end()
