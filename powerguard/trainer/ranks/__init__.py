"""The ranks of a job and the store that they share: see `base`; `detect` finds out which."""

from powerguard.trainer.ranks.base import Alone, Memory, MemoryRanks, Ranks, RanksError
from powerguard.trainer.ranks.detect import detect
from powerguard.trainer.ranks.files import FileRanks
from powerguard.trainer.ranks.sockets import SocketRanks

__all__ = ["Alone", "FileRanks", "Memory", "MemoryRanks", "Ranks", "RanksError", "SocketRanks", "detect"]
