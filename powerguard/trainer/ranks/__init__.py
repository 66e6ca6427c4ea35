"""The ranks of a job and the store that they share: see `base`. `detect` finds out which."""

from powerguard.trainer.ranks.base import Alone, Ranks, RanksError

__all__ = ["Alone", "Ranks", "RanksError"]
