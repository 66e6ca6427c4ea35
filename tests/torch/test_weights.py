"""The weights alone: out of checkpoints that a real Guard wrote, into a model, and as safetensors."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from powerguard.trainer import Guard
from powerguard.trainer.torch import TorchState, load_weights
from powerguard.trainer.weights import export, read_weights


class Model(nn.Module):
    """Tied weights, several dtypes, buffers that are kept and one that is not, an empty tensor, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.wide = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16).t())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return found

    def get_extra_state(self) -> dict[str, object]:
        return {"calls": self.calls, "scale": torch.tensor([1.5, -0.0])}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def trained(root: Path, steps: int) -> Model:
    torch.manual_seed(1)
    model = Model()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer, ema=ema)
    with Guard(state, root, job="llm", socket=None, every_s=None) as guard:
        guard.restore()
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(torch.randint(50, (16,))).square().mean().backward()
            optimizer.step()
            guard.step(step)
            guard.save(step, keep_as="best" if step == 1 else None)
    return model


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_weights_of_a_real_training(tmp_path: Path) -> None:
    """Equal to the last bit, by the newest, by the kept one, and of the average; they load strictly."""
    model = trained(tmp_path / "llm", 4)
    again = Model()
    weights = load_weights(tmp_path / "llm")
    again.load_state_dict(weights)
    assert again.calls == model.calls == 4
    for (name, one), two in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, two), name
            assert one.dtype == two.dtype
    first = load_weights(tmp_path / "llm" / "best")
    assert not torch.equal(first["embed.weight"], weights["embed.weight"])
    average = load_weights(tmp_path / "llm", part="ema")
    assert average.keys() == weights.keys()
    with pytest.raises(Exception, match="no complete checkpoint of step 1"):
        load_weights(tmp_path / "llm", step=1)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_safetensors_reads_floats_of_eight_bits(tmp_path: Path, dtype: str) -> None:
    """AMD's MI300 has those that end in "fnuz"."""
    model = nn.Module()
    model.register_buffer("scaled", torch.randn(5).to(getattr(torch, dtype)))
    with Guard(TorchState(model=model), tmp_path / "llm", job="llm", socket=None) as guard:
        guard.save(1)
    export(read_weights(tmp_path / "llm"), tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")["scaled"]
    assert found.dtype == model.scaled.dtype
    assert torch.equal(found.view(torch.uint8), model.scaled.view(torch.uint8))


def test_safetensors_reads_it(tmp_path: Path) -> None:
    model = trained(tmp_path / "llm", 2)
    target = tmp_path / "model.safetensors"
    export(read_weights(tmp_path / "llm"), target)
    found = load_file(target)
    mine = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    assert found.keys() == mine.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in mine.items())
