"""Child process with torch: python -m bench.restore_child FOLDER STATE WAY SIZE saves a state, or loads it one way.

It prints seconds, and checks the bits of the first and the last parameter: a load that was not done is not measured.
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from powerguard.trainer import Guard
from powerguard.trainer.torch import TorchState


def made(state: str, size: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    share = 8 if size == "quick" else 1
    if state == "large":
        width = 4096 // share
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(width, width)) for _ in range(20)])
    else:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(16, 32)) for _ in range(33_333 // share)])
    return model, torch.optim.AdamW(model.parameters(), foreach=True)


def ends(model: torch.nn.Module) -> list[float]:
    params = list(model.parameters())
    return [float(param.detach().double().sum()) for param in (params[0], params[-1])]


def save(folder: Path, state: str, size: str) -> dict[str, float]:
    model, optimizer = made(state, size, seed=1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    with_guard(folder, model, optimizer).save(1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "torch.pt")
    parts = get_state_dict(model, optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder / "dcp", no_dist=True)
    (folder / "ends").write_text(json.dumps(ends(model)))
    return {"gb": 3 * sum(param.numel() * 4 for param in model.parameters()) / 1e9}


def with_guard(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Guard:
    return Guard(TorchState(model=model, optimizer=optimizer), folder / "powerguard", job="bench", socket=None)


def load(folder: Path, method: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if method == "powerguard":
        with_guard(folder, model, optimizer).restore()
    elif method == "torch":
        kept = torch.load(folder / "torch.pt")
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    else:
        parts = get_state_dict(model, optimizer)
        kept = {"model": parts[0], "optimizer": parts[1]}
        dcp.load(kept, checkpoint_id=folder / "dcp", no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])


def main(folder: Path, state: str, method: str, size: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if method == "save":
        print(json.dumps(save(folder, state, size)))
        return
    model, optimizer = made(state, size, seed=2)
    began_s = time.perf_counter()
    load(folder, method, model, optimizer)
    taken_s = time.perf_counter() - began_s
    if ends(model) != json.loads((folder / "ends").read_text()):
        message = f"{method} did not load what was saved"
        raise RuntimeError(message)
    print(json.dumps({"s": taken_s}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
