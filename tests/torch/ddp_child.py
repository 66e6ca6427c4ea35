"""Three or more ranks of DDP on CPUs: ddp_child.py FOLDER. A state goes from one model into a fresh one; both go on."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powerguard.trainer.torch.state import TorchState
from tests.torch.kept import bytes_of, kept

Made = tuple[nn.Module, torch.optim.Optimizer, TorchState]


class Heard(logging.Handler):
    """What the library has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("powerguard.trainer").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def taken(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(40, 120), nn.BatchNorm1d(120), nn.GELU(), nn.Linear(120, 40)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Dropout(0.1))


def made(seed: int, **how: Any) -> Made:
    wrapped = DistributedDataParallel(layers(seed), bucket_cap_mb=0.02, **how)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.003)
    return wrapped, optimizer, TorchState(model=wrapped, optimizer=optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(8, 40)
        optimizer.zero_grad()
        (model(x) - x.sin()).square().mean().backward()
        optimizer.step()


def bits(model: nn.Module) -> list[bytes]:
    return [bytes(bytes_of(tensor.detach().contiguous())) for tensor in model.state_dict().values()]


def goes_on(**how: Any) -> Made:
    """Ten steps at once, and five, a new process (as far as DDP knows), and five."""
    model, optimizer, state = made(1, **how)
    train(model, optimizer, range(5))
    items = kept(state.items())
    train(model, optimizer, range(5, 10))
    again, other, restored = made(2, **how)
    restored.load(items)
    train(again, other, range(5, 10))
    assert bits(again) == bits(model), f"with {how} another end"
    return model, optimizer, state


def buckets(model: nn.Module) -> list[set[str]]:
    """Number of the parameters of each bucket, in the order in which they are reduced."""
    result = str(model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])
    return [set(bucket.split()) for bucket in result.split(",")]


def settled() -> None:
    """The buckets are those that DDP would have chosen by itself, and making the state leaves no other trace."""
    model, _, _ = goes_on()
    plain = DistributedDataParallel(layers(1), bucket_cap_mb=0.02)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.003), range(3))
    assert buckets(model) == buckets(plain)
    assert len(buckets(plain)) == 4

    wrapped = DistributedDataParallel(layers(3))
    before, drawn = bits(wrapped), torch.get_rng_state()
    TorchState(model=wrapped)
    assert bits(wrapped) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(param.grad is None for param in wrapped.parameters())
    goes_on(gradient_as_bucket_view=True)
    goes_on(find_unused_parameters=True)


def in_training() -> None:
    """A state that is made when gradients are there changes none of them."""
    wrapped = DistributedDataParallel(layers(4), gradient_as_bucket_view=True)
    wrapped(torch.randn(8, 40)).sum().backward()
    before = [param.grad.clone() for param in wrapped.parameters() if param.grad is not None]
    TorchState(model=wrapped)
    after = [param.grad for param in wrapped.parameters() if param.grad is not None]
    assert len(before) == len(after) == len(list(wrapped.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def sparse() -> nn.Module:
    return DistributedDataParallel(nn.Embedding(10, 4, sparse=True))


def hooked() -> nn.Module:
    net = layers(5)
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda param: param.data.zero_())
    return DistributedDataParallel(net)


def warned(heard: Heard) -> None:
    """What cannot be settled is left alone, and said."""
    assert heard.taken() == []
    cases: dict[str, Callable[[], nn.Module]] = {
        "static_graph=True": lambda: DistributedDataParallel(layers(5), static_graph=True),
        "sparse gradients": sparse,
        "a hook after each gradient": hooked,
        "the model is not a DistributedDataParallel": lambda: layers(5),
    }
    for words, make in cases.items():
        model = make()
        before = bits(model)
        TorchState(model=model)
        (line,) = heard.taken()
        assert words in line, line
        assert bits(model) == before, words


def main(folder: Path) -> None:
    heard = Heard()
    dist.init_process_group("gloo")
    settled()
    in_training()
    warned(heard)
    (folder / f"good-{dist.get_rank()}").touch()
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # PyTorch's own threads may still be winding down: see fsdp_child.py


if __name__ == "__main__":
    main(Path(sys.argv[1]))
