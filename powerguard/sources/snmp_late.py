"""Answers that come when their question was given up: never a reading, but what the operator has to know.

A card that answers too late looks like one that does not answer: community and address are right then, and the wait is
too short.
"""

import asyncio
import math
from collections import deque
from typing import Final

_GOOD_S: Final = 30.0
"""So long a late answer says why others are missing: a lost card is asked every 5 s."""
_REMEMBERED: Final = 16
_LONGEST_TIMEOUT_S: Final = 5.0
"""Of the settings."""


class LateAnswers:
    """What one card has answered too late. count: so many, since the start."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.count = 0
        self._heard: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._came = asyncio.Event()

    def heard(self, *, now_s: float, asked_s: float) -> None:
        """Count one, to a question that was first sent at asked_s."""
        self.count += 1
        self._heard.append((now_s, now_s - asked_s))
        self._came.set()

    async def wait(self) -> None:
        """Wait for one, if none has come yet."""
        await self._came.wait()

    def words(self, now_s: float, timeout_s: float) -> str:
        """Return what to say of those that came lately, and what would be right; "" where none did.

        The slowest one counts: words that change with every poll would be told with every poll.
        """
        slowest_s = max((after_s for heard_s, after_s in self._heard if now_s - heard_s <= _GOOD_S), default=0.0)
        if slowest_s <= timeout_s:
            return ""
        shown_s = math.ceil(slowest_s * 10) / 10
        if shown_s >= _LONGEST_TIMEOUT_S:
            return f"answers come after {shown_s:.1f} s: look for what slows the card, or the network to it"
        return f"answers come after {shown_s:.1f} s: raise timeout_s above it"
