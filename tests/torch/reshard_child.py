"""One launch of a job of FSDP2 that changes its number of ranks: save on all, or load what others saved, and train on.

    reshard_child.py FOLDER save|load

Weights, moments and their losses are the same whatever the number of ranks is: all train on the same numbers.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from powerguard.trainer.dcp import load_newest_sealed, save_sealed

Whole = dict[str, torch.Tensor]


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 3))  # 10 and 3 rows: uneven over 4 ranks
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int, steps: int = 3) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def whole(node: Any, name: str = "") -> Whole:
    """All tensors, put together from the ranks. A collective."""
    if isinstance(node, dict):
        return {key: value for part in node for key, value in whole(node[part], f"{name}/{part}").items()}
    if isinstance(node, torch.Tensor):
        return {name: node.full_tensor() if hasattr(node, "full_tensor") else node.clone()}
    return {}


def main(folder: Path, what: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = made(1 if what == "save" else 2)
    train(model, optimizer, seed=5)
    state = state_of(model, optimizer)
    if what == "save":
        save_sealed(state, folder / "dcp", 7)
    else:
        assert load_newest_sealed(state, folder / "dcp") == 7
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = whole(state_of(model, optimizer))
    train(model, optimizer, seed=6)
    trained = whole(model.state_dict())
    if dist.get_rank() == 0:
        torch.save((loaded, trained), folder / f"{what}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # PyTorch's own threads may still be winding down


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
