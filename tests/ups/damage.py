"""Datagrams as no honest peer sends them: good ones with bytes changed or cut off, and plain rubbish."""

import random
import time
from collections.abc import Callable, Sequence

SLOWEST_S = 1.0
"""Of processor time: longer than any datagram may take, whatever else the machine does."""


def changed(data: bytes, changes: Sequence[tuple[int, int]]) -> bytes:
    """Return the data with (place, value) changes of single bytes."""
    new = bytearray(data)
    for place, value in changes:
        new[place % len(new)] = value
    return bytes(new)


def million(good: Sequence[bytes], survives: Callable[[bytes], None], seed: int, *, times: int = 1_000_000) -> None:
    """Hand a million of them, or so many, to survives, which raises on what must not be; none may be slow."""
    dice = random.Random(seed)
    slowest_s = 0.0
    for turn in range(times):
        data = bytearray(dice.choice(good))
        for _ in range(dice.randrange(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        if turn % 7 == 0:
            data = data[: dice.randrange(len(data) + 1)]
        began_s = time.thread_time()
        survives(bytes(data) if turn % 11 else dice.randbytes(dice.randrange(200)))
        slowest_s = max(slowest_s, time.thread_time() - began_s)
    assert slowest_s < SLOWEST_S
