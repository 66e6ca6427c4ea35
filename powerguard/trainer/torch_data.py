"""The position in the data, for loaders that cannot tell it: a sampler that goes on where training stood."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Sampler


class ResumableSampler(Sampler):
    """The indices of one rank, in an order that depends on seed and epoch alone.

        sampler = ResumableSampler(len(data), seed=7, rank=rank, ranks=ranks)
        loader = DataLoader(data, sampler=sampler, batch_size=32)
        state = TorchState(..., sampler=sampler)
        while sampler.epoch < epochs:
            for batch in sampler.batches(loader): ...

    size: samples in the data set. shuffle: a new order each epoch. rank, ranks: which part is ours; what does not
    divide evenly is left out at the end of an epoch, so that all ranks take the same number of steps.
    Workers read ahead; what counts is what `batches` has handed to the training. What workers draw at random they draw
    anew after a resume: seed such a transform from the sample's index and the epoch where every bit matters.
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
        """Samples of this epoch that training has been given, on this rank."""

    def __len__(self) -> int:
        """Samples of a whole epoch, on this rank."""
        return self._size // self._ranks

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self._size)
        if self._shuffle:
            generator = torch.Generator().manual_seed(_mixed(self._seed, self.epoch))
            order = torch.randperm(self._size, generator=generator)
        mine = order[self._rank : len(self) * self._ranks : self._ranks]
        return iter(mine[self.position :].tolist())

    def batches(self, loader: Any) -> Iterator[Any]:  # noqa: ANN401 - a DataLoader and whatever it collates
        """Hand out the rest of this epoch, counting; at its end the next epoch begins.

        loader: a DataLoader over this sampler, with automatic batching. A new iterator draws one random number for its
        workers; in the middle of an epoch it has been drawn before, so the generator is put back.
        """
        if self.position:
            before = torch.get_rng_state()
            batches = iter(loader)
            torch.set_rng_state(before)
        else:
            batches = iter(loader)
        for batch in batches:
            self.position = min(self.position + loader.batch_size, len(self))
            yield batch
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

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Go on from there. Raises ValueError when it was another order of other data."""
        mine = self.state_dict()
        for key, value in state.items():
            if key not in ("epoch", "position") and value != mine.get(key):
                msg = f"the checkpoint's sampler had {key}={value}, this one has {mine.get(key)}: not the same data"
                raise ValueError(msg)
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


def _mixed(seed: int, epoch: int) -> int:
    """A seed for one epoch; seed + epoch would give seed 1 the orders of seed 0, one epoch later."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % 2**63
