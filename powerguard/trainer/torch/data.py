"""The position in the data: a loader that goes on at the sample where training stood."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

_FIX: Final = " (go on with the old value; for another one, begin a new run from the weights: load_weights())"


class ResumableSampler(Sampler):
    """The indices of one rank, in an order that depends on seed and epoch alone.

    size: samples in the data set. shuffle: a new order each epoch. rank, ranks: which part is ours; what does not
    divide evenly is left out at the end of an epoch, so that all ranks take the same number of steps.
    epoch: epochs that training was given to the end. position: samples that it was given of the next one, on this rank.
    The code that hands samples to the training calls `advance`; iterating counts nothing, since loaders read ahead.
    """

    def __init__(self, size: int, *, seed: int = 0, shuffle: bool = True, rank: int = 0, ranks: int = 1) -> None:
        if not 0 <= rank < ranks or size < ranks:
            msg = f"rank {rank} of {ranks} with {size} samples: each rank from 0 needs at least one"
            raise ValueError(msg)
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._rank = rank
        self._ranks = ranks
        self.epoch = 0
        self.position = 0
        self.loads = 0
        """How often a place was loaded: who iterates since before that is elsewhere."""

    @property
    def epoch_seed(self) -> int:
        """A seed for this epoch. Not seed + epoch: seed 1 would have the orders of seed 0, one epoch later."""
        return (self._seed * 0x9E3779B97F4A7C15 + self.epoch * 0xBF58476D1CE4E5B9 + 1) % 2**63

    def __len__(self) -> int:
        """Samples of a whole epoch, on this rank."""
        return self._size // self._ranks

    def __iter__(self) -> Iterator[int]:
        """The rest of this epoch."""
        order = torch.arange(self._size, device="cpu")
        if self._shuffle:
            drawn = torch.Generator("cpu").manual_seed(self.epoch_seed)
            order = torch.randperm(self._size, generator=drawn, device="cpu")
        indices = order[self._rank : len(self) * self._ranks : self._ranks]
        return iter(indices[self.position :].tolist())

    def advance(self, samples: int, *, drop_last: int = 0) -> None:
        """Count what training was given. drop_last: samples at the end of an epoch that are not used."""
        self.position += samples
        if self.position >= len(self) - drop_last:
            self.epoch += 1
            self.position = 0

    def state_dict(self) -> dict[str, int | bool]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rank": self._rank,
            "ranks": self._ranks,
        }

    def check(self, state: Mapping[str, int | bool]) -> None:
        """Raise ValueError if this is a place in another order, or in other data."""
        for key, current in self.state_dict().items():
            if key not in ("epoch", "position") and state.get(key) != current:
                was = state.get(key)
                msg = f"the checkpoint's sampler had {key}={was}, this one has {current}: not the same data{_FIX}"
                raise ValueError(msg)

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Go on from there. Raises what `check` does."""
        self.check(state)
        self.loads += 1
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


class ResumableLoader(DataLoader):
    """A DataLoader over a ResumableSampler that counts what training was given, and not what its workers have read.

        loader = ResumableLoader(data, batch_size=32, seed=7, rank=rank, ranks=ranks)
        state = TorchState(..., dataloader=loader)
        while loader.epoch < epochs:
            for batch in loader: ...

    Iterating gives the rest of the epoch. After its last batch `epoch` is already the next one. A roll-back ends the
    iteration that runs. What reads ahead of training (a prefetcher) would be counted as training: do not wrap it.
    is_used: training has begun to iterate.
    options: DataLoader's own. It draws from no global random numbers; its workers are seeded for each epoch (persistent
    ones for the first), and begin again with that seed after a resume: where every bit matters, seed a random transform
    from epoch and sample.
    """

    def __init__(
        self,
        data: Any,  # noqa: ANN401 - a data set with a length
        *,
        batch_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        ranks: int = 1,
        **options: Any,  # noqa: ANN401 - as DataLoader has them
    ) -> None:
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, IterableDataset):
            msg = (
                f"{type(data).__name__} has no length and no numbered samples: give TorchState a loader that keeps its"
                " place in a stream (torchdata's StatefulDataLoader, over a data set with a state_dict)"
            )
            raise TypeError(msg)
        if not isinstance(batch_size, int):
            msg = f"batch_size={batch_size!r}: must be how many samples a batch has (it counts the place in the data)"
            raise TypeError(msg)
        if not options.get("in_order", True):
            msg = "in_order=False: the place in the data is a number of samples, so batches must come in order"
            raise ValueError(msg)
        sampler = ResumableSampler(len(data), seed=seed, shuffle=shuffle, rank=rank, ranks=ranks)
        super().__init__(data, batch_size=batch_size, sampler=sampler, generator=torch.Generator("cpu"), **options)
        self.is_used = False
        self._dropped = len(sampler) % batch_size if self.drop_last else 0
        if self._dropped == len(sampler):
            msg = f"batch_size={batch_size}: drop_last leaves none of this rank's {len(sampler)} samples"
            raise ValueError(msg)

    @property
    def epoch(self) -> int:
        """Epochs that training was given to the end."""
        return int(self.sampler.epoch)

    def __iter__(self) -> Any:  # noqa: ANN401 - batches as they were collated
        self.is_used = True
        self.generator.manual_seed(self.sampler.epoch_seed)
        batches, loads = super().__iter__(), self.sampler.loads

        def counted() -> Iterator[Any]:
            for batch in batches:
                if self.sampler.loads != loads:
                    return
                self.sampler.advance(self.batch_size, drop_last=self._dropped)
                yield batch

        return counted()

    def state_dict(self) -> dict[str, int | bool]:
        return {**self.sampler.state_dict(), "batch_size": self.batch_size}

    def check(self, state: Mapping[str, int | bool]) -> None:
        """Raise ValueError if this is a place in another order, or in other data."""
        if (was := state.get("batch_size")) != self.batch_size:
            msg = f"the checkpoint's loader had batch_size={was}, this one has {self.batch_size}{_FIX}"
            raise ValueError(msg)
        self.sampler.check(state)

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Go on from there, before the next `iter`. Raises what `check` does."""
        self.check(state)
        self.sampler.load_state_dict(state)
        self.sampler.advance(0, drop_last=self._dropped)  # it may not have dropped the last samples before
