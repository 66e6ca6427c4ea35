"""ResumableLoader: every sample once an epoch, and after a resume the very batches that would have come."""

from collections.abc import Iterator

import pytest
import torch

from powerguard.trainer.torch.data import ResumableLoader, ResumableSampler
from powerguard.trainer.torch.state import StateError, TorchState
from tests.torch.kept import carried


def loader(*, workers: int = 0, size: int = 100, batch_size: int = 8, drop_last: bool = False) -> ResumableLoader:
    data = torch.arange(size)
    return ResumableLoader(data, batch_size=batch_size, seed=5, num_workers=workers, drop_last=drop_last)


def batches(source: ResumableLoader, most: int) -> list[list[int]]:
    """The next batches, over the ends of epochs."""
    found: list[list[int]] = []
    while len(found) < most:
        for batch in source:
            found.append(batch.tolist())
            if len(found) == most:
                break
    return found


def test_ranks_share_an_epoch_without_overlap() -> None:
    parts = [list(ResumableSampler(100, rank=rank, ranks=3)) for rank in range(3)]
    assert [len(part) for part in parts] == [33, 33, 33]
    assert len(set().union(*parts)) == 99


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    seen = set()
    for seed in range(3):
        sampler = ResumableSampler(100, seed=seed)
        for epoch in range(3):
            sampler.epoch = epoch
            seen.add(tuple(sampler))
    assert len(seen) == 9
    assert list(ResumableSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_has_every_sample_once(drop_last: bool) -> None:
    source = loader(drop_last=drop_last)
    for epoch in range(3):
        assert source.epoch == epoch
        given = [index for batch in source for index in batch.tolist()]
        assert len(set(given)) == len(given) == (96 if drop_last else 100)
        assert len(source) == -(-len(given) // 8)


@pytest.mark.parametrize(("done", "workers"), [(0, 0), (1, 0), (5, 1), (12, 0), (13, 1), (14, 0), (30, 0)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_rest_is_what_would_have_come(done: int, workers: int) -> None:
    """13 batches make an epoch; workers have read further than training had got, and that must not count."""
    model = torch.nn.Linear(1, 1)
    before = torch.get_rng_state()
    expected = batches(loader(), 40)[done:]
    first, second = loader(workers=workers), loader(workers=workers)
    batches(first, done)
    assert first.epoch == done // 13
    carried(TorchState(model=model, dataloader=first), TorchState(model=model, dataloader=second))
    assert batches(second, 40 - done) == expected
    assert torch.equal(torch.get_rng_state(), before)


class Stream(torch.utils.data.IterableDataset):
    """Data without a length or a number for each sample."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_stream_is_refused_with_what_to_use() -> None:
    with pytest.raises(TypeError, match=r"^Stream has no length and no numbered samples: .*StatefulDataLoader"):
        ResumableLoader(Stream(), batch_size=2)


def test_other_data_is_refused_before_the_model_is_touched() -> None:
    model = torch.nn.Linear(1, 1)
    before = model.weight.clone()
    state = TorchState(model=model, dataloader=loader(size=101))
    with pytest.raises(StateError, match="dataloader: the checkpoint's sampler had size=100, this one has 101"):
        carried(TorchState(model=torch.nn.Linear(1, 1), dataloader=loader()), state)
    assert torch.equal(model.weight, before)
    with pytest.raises(StateError, match="dataloader: the checkpoint's loader had batch_size=None, this one has 8"):
        carried(
            TorchState(
                model=model,
                dataloader=torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters()), lambda _: 1.0),
            ),
            TorchState(model=model, dataloader=loader()),
        )


def test_batches_of_no_size_are_refused() -> None:
    with pytest.raises(TypeError, match=r"batch_size=None: must be how many samples a batch has"):
        ResumableLoader(torch.arange(3), batch_size=None)  # type: ignore[arg-type]


def test_batches_in_any_order_are_refused() -> None:
    """A slow batch that comes later than the next one: a resume would leave it out, and give that one twice."""
    with pytest.raises(ValueError, match="in_order=False: the place in the data is a number of samples"):
        ResumableLoader(torch.arange(8), batch_size=2, in_order=False)


def test_a_loader_that_would_drop_all_samples_is_refused() -> None:
    """An epoch without a batch never ends: a loop until `epoch` would take no step, and save nothing."""
    with pytest.raises(ValueError, match=r"batch_size=32: drop_last leaves none of this rank's 10 samples"):
        ResumableLoader(torch.arange(20), batch_size=32, ranks=2, drop_last=True)


def test_a_place_before_samples_that_are_dropped_now_is_the_end_of_the_epoch() -> None:
    """A run that kept the last samples was stopped before them."""
    before = ResumableLoader(torch.arange(10), batch_size=4)
    batches = iter(before)
    next(batches)
    next(batches)
    now = ResumableLoader(torch.arange(10), batch_size=4, drop_last=True)
    now.load_state_dict(before.state_dict())
    assert now.epoch == 1
    assert len(list(now)) == 2


def test_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="had size=100, this one has 101"):
        loader(size=101).load_state_dict(loader().state_dict())
    with pytest.raises(ValueError, match=r"had batch_size=8, this one has 4 \(go on with the old value; for another"):
        loader(batch_size=4).load_state_dict(loader().state_dict())
    with pytest.raises(ValueError, match="each rank from 0 needs at least one"):
        ResumableSampler(2, rank=0, ranks=3)


def test_a_roll_back_ends_the_iteration_that_runs() -> None:
    """Its samples would be counted from the old place, which training has left."""
    source = loader(workers=0)
    seen = []
    kept = None
    while source.epoch == 0:
        for batch in source:
            seen.append(batch.tolist())
            if len(seen) == 2:
                kept = source.state_dict()
            if len(seen) == 5 and kept is not None:
                source.load_state_dict(kept)
    expected = batches(loader(), 13)
    assert seen == expected[:5] + expected[2:]


def test_a_loader_that_nobody_draws_from_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    state = TorchState(model=torch.nn.Linear(1, 1), dataloader=loader())
    for _ in range(4):
        list(state.items())
    assert [each.message.partition(":")[0] for each in caplog.records] == ["dataloader"]
    caplog.clear()
    used = loader()
    state = TorchState(model=torch.nn.Linear(1, 1), dataloader=used)
    for _ in used:
        list(state.items())
    assert not caplog.records


def test_accelerates_own_loader_is_refused_and_a_bare_one_goes_on() -> None:
    accelerate = pytest.importorskip("accelerate")
    prepared = accelerate.Accelerator(cpu=True).prepare(loader())
    with pytest.raises(StateError, match="a loader that Accelerate has prepared does not keep its position"):
        TorchState(model=torch.nn.Linear(1, 1), dataloader=prepared)
