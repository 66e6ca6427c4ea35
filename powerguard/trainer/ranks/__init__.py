"""The ranks of a job and the store that they share: see `base`; `detect` finds out which."""

from powerguard.trainer.ranks.base import Alone, Memory, MemoryRanks, Ranks, RanksError
from powerguard.trainer.ranks.detect import detect
from powerguard.trainer.ranks.socket_store import SocketRanks
from powerguard.trainer.ranks.torch_store import TorchRanks

__all__ = ["Alone", "Memory", "MemoryRanks", "Ranks", "RanksError", "SocketRanks", "TorchRanks", "detect"]
