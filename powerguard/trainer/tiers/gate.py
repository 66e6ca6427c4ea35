"""How fast an upload may go, and how it slows down: one gate through which all its connections pass.

A store that refuses is asked less by all of them together, not by each on its own: after an error everybody waits, for
a random time up to a limit that doubles ("full jitter"), so that a thousand hosts do not come back at the same instant.
"""

import random
from collections.abc import Callable
from threading import Condition
from typing import Final, TypeVar

from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.tiers.base import TRANSIENT, Kind, TierError

_T = TypeVar("_T")

FIRST_S: Final = 0.5
MOST_S: Final = 60.0
PATIENCE_S: Final = 600.0


def backoff_s(errors: int, *, first_s: float, most_s: float, rng: random.Random) -> float:
    """How long to wait after so many errors in a row: between half of, and all of, a limit that doubles."""
    limit_s = min(most_s, first_s * 2.0 ** min(errors - 1, 30))
    return rng.uniform(limit_s / 2, limit_s)


class Gate:
    """The gate. bytes_per_s: None: no limit.

    patience_s: how long transient errors may go on without one success in between; then the upload is given up for now.
    """

    def __init__(
        self,
        *,
        bytes_per_s: float | None = None,
        first_s: float = FIRST_S,
        most_s: float = MOST_S,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = boottime_s,
        rng: random.Random | None = None,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._first_s = first_s
        self._most_s = most_s
        self._patience_s = patience_s
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - spreads retries, hides nothing
        self._changed = Condition()
        self._errors = 0
        self._failing_since_s: float | None = None
        self._closed_until_s = 0.0
        self._budget_at_s = 0.0
        self.trouble: TierError | None = None
        """The last transient error; None once something has succeeded since."""
        self.retries: dict[Kind, int] = {}
        """How often what was met, for status and metrics."""

    @property
    def backing_off(self) -> bool:
        """Everybody waits because of an error."""
        return self._clock() < self._closed_until_s

    @property
    def resting(self) -> bool:
        """Everybody waits, because of an error or for the bandwidth: that nothing moves is nothing wrong."""
        return self._clock() < max(self._closed_until_s, self._budget_at_s)

    def call(self, what: Callable[[], _T], size_bytes: int = 0) -> _T:
        """Do it when the gate is open, as often as it takes. Raises TierError: not transient, or out of patience."""
        while True:
            self._enter(size_bytes)
            began_s = self._clock()
            try:
                result = what()
            except TierError as error:
                if error.kind not in TRANSIENT:
                    raise
                self._failed(error, began_s)
                continue
            with self._changed:
                self._errors = 0
                self.trouble = None
                self._failing_since_s = None
            return result

    def _enter(self, size_bytes: int) -> None:
        with self._changed:
            while (rest_s := self._closed_until_s - self._clock()) > 0:
                self._changed.wait(rest_s)
            if self._bytes_per_s is None or not size_bytes:
                return
            now_s = self._clock()
            mine_s = max(self._budget_at_s, now_s)
            self._budget_at_s = mine_s + size_bytes / self._bytes_per_s
            while (rest_s := mine_s - self._clock()) > 0:
                self._changed.wait(rest_s)

    def _failed(self, error: TierError, began_s: float) -> None:
        """Count an error of a call that began at began_s: what hung before it failed has used up patience, too."""
        with self._changed:
            now_s = self._clock()
            self.trouble = error
            self.retries[error.kind] = self.retries.get(error.kind, 0) + 1
            if self._failing_since_s is None:
                self._failing_since_s = began_s
            if now_s - self._failing_since_s >= self._patience_s:
                raise error
            if now_s >= self._closed_until_s:  # what was in flight when the gate closed is the same storm
                self._errors += 1
                rest_s = backoff_s(self._errors, first_s=self._first_s, most_s=self._most_s, rng=self._rng)
                self._closed_until_s = now_s + rest_s
