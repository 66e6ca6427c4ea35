"""ResumableSampler: every sample once an epoch, and after a resume the very batches that would have come."""

import pytest
import torch
from torch.utils.data import DataLoader

from powerguard.trainer.torch_data import ResumableSampler
from powerguard.trainer.torch_state import TorchState
from tests.torch.kept import carried


def batches(sampler: ResumableSampler, most: int, *, workers: int = 0) -> list[list[int]]:
    """The next batches, over the ends of epochs."""
    loader = DataLoader(torch.arange(100), sampler=sampler, batch_size=8, num_workers=workers)
    found: list[list[int]] = []
    while len(found) < most:
        for batch in sampler.batches(loader):
            found.append(batch.tolist())
            if len(found) == most:
                return found
    return found


def test_ranks_share_an_epoch_without_overlap() -> None:
    parts = [list(ResumableSampler(100, rank=rank, ranks=3)) for rank in range(3)]
    assert [len(part) for part in parts] == [33, 33, 33]
    assert len(set().union(*parts)) == 99


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    seen = set()
    for seed in range(3):
        sampler = ResumableSampler(100, seed=seed)
        for sampler.epoch in range(3):
            seen.add(tuple(sampler))
    assert len(seen) == 9
    assert list(ResumableSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("done", "workers"), [(0, 0), (1, 0), (5, 1), (12, 0), (13, 1), (14, 0), (30, 0)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_rest_is_what_would_have_come(done: int, workers: int) -> None:
    """13 batches make an epoch; workers have read further than training had got, and that must not count."""
    model = torch.nn.Linear(1, 1)
    torch.manual_seed(3)
    expected = batches(ResumableSampler(100, seed=5), 40)[done:]
    drawn = torch.rand(1)
    torch.manual_seed(3)
    first, second = ResumableSampler(100, seed=5), ResumableSampler(100, seed=5)
    batches(first, done, workers=workers)
    carried(TorchState(model=model, sampler=first), TorchState(model=model, sampler=second))
    assert batches(second, 40 - done, workers=workers) == expected
    assert torch.rand(1) == drawn


def test_other_data_is_refused() -> None:
    other = ResumableSampler(101)
    with pytest.raises(ValueError, match="had size=100, this one has 101"):
        other.load_state_dict(ResumableSampler(100).state_dict())
    with pytest.raises(ValueError, match="each rank from 0 needs at least one"):
        ResumableSampler(2, rank=0, ranks=3)
