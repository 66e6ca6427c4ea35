"""Ranks of FSDP2 on CPUs: save in the middle, go on; load into a fresh model, go on; both must be the same."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from powerguard.trainer.dcp import SealedFileSystemWriter, _from_coordinator, load_newest_sealed, save_sealed
from powerguard.trainer.seal.manifest import SealError
from powerguard.trainer.torch.state import StateError, TorchState
from tests.torch.kept import bytes_of, kept


def made(seed: int, *, width: int = 10) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, width), nn.ReLU(), nn.Linear(width, 3))  # 10 and 3 do not divide by 2 alike
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 7)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def bits(model: nn.Module) -> list[bytes]:
    return [bytes(bytes_of(param.detach().to_local().contiguous())) for param in model.parameters() if param.numel()]


def ddp(seed: int, *, width: int = 100) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 50))
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)


def divided(rank: int) -> None:
    """DDP: what is alike is kept once among the ranks, what is not by each; it goes on bit for bit."""
    model, optimizer = ddp(1)
    torch.manual_seed(rank)
    train(model, optimizer, 3)
    notes: dict[str, torch.Tensor] = {}
    state = TorchState(model=model, optimizer=optimizer, extra={"notes": notes}, divide=True)
    items = kept(state.items())
    mine: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(
        mine, {name for name in items if name.startswith(("model", "opt")) and len(items[name].data) >= 4096}
    )
    large = sorted(name for names in mine for name in names)
    assert "model/state/3.weight" in large
    assert len(large) == len(set(large)) == 3, "the weight and its two moments, none of them twice"
    assert "model/state/1.running_mean" in items
    for size in (0, 10, 10, 3000):  # the division of the state before is right, or is not
        if size:
            notes["own"] = torch.full((size,), float(rank))
        items = kept(state.items())
        expected = train(model, optimizer, 4)
        again, other = ddp(2)
        found: dict[str, torch.Tensor] = {}
        TorchState(model=again, optimizer=other, extra={"notes": found}, divide=True).load(items)
        assert train(again, other, 4) == expected
        for one, two in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
            assert torch.equal(one, two)
        assert not size or torch.equal(found["own"], notes["own"])
    with pytest.raises(StateError, match="written with divide=True"):
        TorchState(model=again, optimizer=other).load(items)
    torch.manual_seed(rank)
    with pytest.raises(StateError, match="the ranks hold different parameters"):
        TorchState(model=nn.Linear(3, 3), divide=True)


class Average:
    """An EMA of its own kind, with what FSDP2 has spread."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def state_dict(self) -> dict[str, object]:
        return {"shadow": self.shadow, "decay": 0.5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def spread_elsewhere() -> None:
    """DTensors in what is not a parameter come back as such: in an object's state and in lists and dicts."""
    (model, _), (again, _) = made(1), made(2)
    mine, theirs = Average(model), Average(again)
    extra, own = ({"deep": [(each.shadow["0.weight"].clone(),)]} for each in (mine, theirs))
    items = kept(TorchState(model=model, ema=mine, extra={"own": extra}).items())
    held = own["deep"][0][0]
    TorchState(model=again, ema=theirs, extra={"own": own}).load(items)
    for name, value in mine.shadow.items():
        assert torch.equal(theirs.shadow[name].full_tensor(), value.full_tensor())
    assert torch.equal(held.full_tensor(), extra["deep"][0][0].full_tensor())
    assert own["deep"][0][0] is held
    own["deep"].clear()
    with pytest.raises(StateError, match=r"extra.own: was not put back .*what has its place here is spread as None"):
        TorchState(model=again, ema=theirs, extra={"own": own}).load(items)


def resharded(folder: Path, model: nn.Module) -> None:
    """DCP, sealed, of both ranks: the test loads it on one. A failure of the coordinator is one of every rank."""
    state = {"model": model.state_dict()}
    saved = save_sealed(state, folder / "dcp", 7, thread_count=2)
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, saved)
    assert found == [saved] * dist.get_world_size()
    with pytest.raises(CheckpointException, match="holds a sealed checkpoint"):
        dcp.save(state, storage_writer=SealedFileSystemWriter(saved.path))
    whole = {name: value.full_tensor() for name, value in state["model"].items()}
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    for value in state["model"].values():
        value.to_local().zero_()
    assert load_newest_sealed(state, folder / "dcp") == 7

    def fails() -> None:
        msg = "xxhash is not installed"
        raise SealError(msg)

    with pytest.raises(SealError, match="xxhash is not installed"):  # on both: one that waited would wait for ever
        _from_coordinator(fails)
    assert all(torch.equal(value.full_tensor(), whole[name]) for name, value in state["model"].items())


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = made(1)
    torch.manual_seed(rank)
    train(model, optimizer, 3)
    items = kept(TorchState(model=model, optimizer=optimizer).items())
    whole = sum(param.numel() * 4 for param in model.parameters())
    mine = sum(len(items[name].data) for name in items if name.startswith("model/"))
    assert mine < whole * 0.7, "a rank keeps its own shards only"
    expected = train(model, optimizer, 4)
    again, other = made(2)
    TorchState(model=again, optimizer=other).load(items)
    assert train(again, other, 4) == expected
    assert bits(again) == bits(model)
    wider, third = made(3, width=12)
    with pytest.raises(StateError, match="in the checkpoint"):
        TorchState(model=wider, optimizer=third).load(items)
    spread_elsewhere()
    divided(rank)
    resharded(folder, model)
    (folder / f"good-{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()
    # PyTorch's own threads may still be winding down, and then the end of its libraries aborts the process (seen once).
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
