"""FSDP2, DDP and DCP on two ranks and four: see fsdp_child.py, which is what runs on them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from powerguard.trainer.dcp import load_newest_sealed
from powerguard.trainer.seal.folder import verify
from tests.torch.processes import Launched

CHILD = Path(__file__).with_name("fsdp_child.py")
RESHARDED = Path(__file__).with_name("reshard_child.py")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_go_on_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    """Shards as they are, uneven ones too; what is alike divided; what DCP wrote on all ranks is loaded on this one."""
    Launched(ranks, CHILD, tmp_path, log=tmp_path / "log").end()
    assert sorted(path.name for path in tmp_path.glob("good-*")) == [f"good-{rank}" for rank in range(ranks)]
    lock, folder = sorted((tmp_path / "dcp").iterdir())
    assert (lock.name, folder.name.startswith("dcp-step-7-")) == (".lock-dcp", True)
    assert verify(folder).is_whole
    assert len(list(folder.glob("*.distcp"))) >= 2
    model = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 3))
    assert load_newest_sealed({"model": model.state_dict()}, tmp_path / "dcp") == 7
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("before", "after"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    """FSDP2 through a sealed checkpoint of DCP: weights and moments come out whole to the bit, and it goes on."""
    Launched(before, RESHARDED, tmp_path, "save", log=tmp_path / "log").end()
    Launched(after, RESHARDED, tmp_path, "load", log=tmp_path / "log").end()
    (saved, went_on), (loaded, goes_on) = (torch.load(tmp_path / f"{what}.pt") for what in ("save", "load"))
    assert saved.keys() == loaded.keys()
    assert len(saved) == 16, "four parameters, each with two moments and a count of steps"
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    for name, value in went_on.items():  # sums over another number of ranks are rounded in another order
        torch.testing.assert_close(goes_on[name], value)
