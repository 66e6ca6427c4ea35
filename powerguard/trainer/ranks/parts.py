"""What each rank hands in for a generation (its bid, its shard), how one sees that all have, and how it is deleted.

A value may be larger than what a store takes at once: it goes in pieces, the first one last, and tells their number.
"""

import threading
from typing import Final

from powerguard.trainer.ranks.base import MAX_VALUE_BYTES, Ranks

_HEADER: Final = 8  # digits that tell how many pieces a value has
_PIECE: Final = MAX_VALUE_BYTES - _HEADER


class Parts:
    """A rank's own parts, and the way to those of the others. Any thread may use it, each with its connection."""

    def __init__(self) -> None:
        self._kept: dict[int, set[str]] = {}
        self._lock = threading.Lock()

    def hand_in(self, ranks: Ranks, number: int, what: str, value: bytes) -> bool:
        """Write this rank's part. Returns whether all others may have: then `complete` is worth a look."""
        pieces = [value[at : at + _PIECE] for at in range(0, len(value), _PIECE)] or [b""]
        counter = f"g/{number}/{what}#"
        names = [_name(number, what, ranks.rank, index) for index in range(len(pieces))]
        with self._lock:
            self._kept.setdefault(number, set()).update(names, {counter} if ranks.rank == 0 else ())
        for name, piece in reversed(list(zip(names, pieces, strict=True))):
            ranks.set(name, b"%0*d" % (_HEADER, len(pieces)) + piece)
        return ranks.add(counter, 1) >= ranks.size

    def complete(self, ranks: Ranks, number: int, what: str) -> bool:
        """Are all parts there? The counter is only a hint: where an answer was lost, it has counted twice."""
        return not self.missing(ranks, number, what)

    def missing(self, ranks: Ranks, number: int, what: str) -> list[int]:
        """Return the ranks whose part is not there."""
        return [rank for rank in range(ranks.size) if not ranks.check(_name(number, what, rank, 0))]

    def fetch(self, ranks: Ranks, number: int, what: str) -> list[bytes]:
        """Return all parts, by rank. Raises TimeoutError where one has been deleted already."""
        return [self._fetch(ranks, number, what, rank) for rank in range(ranks.size)]

    def _fetch(self, ranks: Ranks, number: int, what: str, rank: int) -> bytes:
        first = ranks.get(_name(number, what, rank, 0), 0.0)
        rest = range(1, int(first[:_HEADER]))
        return first[_HEADER:] + b"".join(ranks.get(_name(number, what, rank, i), 0.0)[_HEADER:] for i in rest)

    def forget(self, ranks: Ranks, keep: set[int], before: int) -> None:
        """Delete this rank's parts of generations before that number, less those to keep; rank 0 the counters too."""
        with self._lock:
            old = [number for number in self._kept if number < before and number not in keep]
            names = [name for number in old for name in self._kept.pop(number)]
        for name in names:
            ranks.delete(name)


def _name(number: int, what: str, rank: int, index: int) -> str:
    return f"g/{number}/{what}/{rank}/{index}"
