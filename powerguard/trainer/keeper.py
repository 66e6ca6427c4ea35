"""What takes the state of one process and makes it durable, as the guard sees it."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event
from typing import Protocol, TypeVar

from powerguard.trainer.store import SavedCheckpoint
from powerguard.wire import Phase

Save = Callable[[int], SavedCheckpoint]
"""Makes the state after this step durable and only then returns. Called in the training thread; may raise anything."""

Tell = Callable[[Phase, int | None, int | None], None]
"""Told (WRITING or COMMITTING, bytes done, bytes in all), from any thread."""

CLOSED = "the guard is closed (step and save before close(), and before the end of its `with`)"

_Value = TypeVar("_Value")
_log = logging.getLogger("powerguard.trainer")


class GivenUp(Exception):  # noqa: N818 - not an error: somebody else's bytes come first
    """A write is not wanted any more: a newer state goes first, or training has ended."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A state that was copied at a step boundary and can be written beside training.

    slot: which of the two snapshots holds it, 0 or 1. size_bytes: what this process will write.
    """

    step: int
    slot: int
    size_bytes: int


class Others(Protocol):
    """The other ranks' part in one checkpoint."""

    @property
    def number(self) -> int | None:
        """The generation's; None where nobody else gives it one."""
        ...

    @property
    def token(self) -> str:
        """8 hex digits that all ranks know and no other checkpoint has."""
        ...

    @property
    def created(self) -> str:
        """Time of the commit for the manifest, RFC 3339: the same for all ranks, known once the shards are gathered."""
        ...

    def gather(self, shard: bytes, *, read: bool, after_ms: int = 0) -> list[bytes]:
        """Hand in this rank's shard, durable; return those of all ranks once all have (read=False: []). May raise.

        after_ms: the newest commit that this rank has seen; see `manifest.committed_ms`.
        """
        ...

    def failed(self, error: Exception) -> None:
        """Say that this rank's part came to nothing, and so the checkpoint."""
        ...

    def conclude(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Say that this rank's part is done; return the checkpoint once everybody's is. Raises when it is not."""
        ...


def commit_time(after_ms: int) -> str:
    """Return the time of day, RFC 3339, and later than after_ms in any case: a clock may have been set back."""
    now = datetime.now(UTC)
    if now.timestamp() * 1000 < after_ms + 1:
        now = datetime.fromtimestamp((after_ms + 1) / 1000, UTC)
    return now.isoformat(timespec="milliseconds")


class Nobody:
    """A job of one process: no others."""

    number: int | None = None

    def __init__(self) -> None:
        self.token = secrets.token_hex(4)
        self.created = ""

    def gather(self, shard: bytes, *, read: bool, after_ms: int = 0) -> list[bytes]:
        """There is this shard."""
        self.created = commit_time(after_ms)
        return [shard] if read else []

    def failed(self, error: Exception) -> None:
        """Nobody waits."""

    def conclude(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Nobody else has to be done."""
        return saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a state is to be written.

    reason: why, for people. urgent: it may use the last of what is kept for emergencies. cancel: set when it is not
    wanted any more. others: what the other ranks have to do with it.
    """

    reason: str
    urgent: bool
    cancel: Event
    others: Others


class Keeper(Protocol):
    """Takes states and writes them. Two slots, so that one is written while the next is taken.

    beside: training goes on while it writes.
    """

    @property
    def beside(self) -> bool: ...

    def size_bytes(self) -> int | None:
        """What this process would write; None when that is not known before the first save. Training thread."""
        ...

    def take(self, step: int, slot: int) -> Taken | SavedCheckpoint:
        """Copy the state, in the training thread at a step boundary; or save it here and now. May raise anything."""
        ...

    def write(self, taken: Taken, tell: Tell, order: Order) -> SavedCheckpoint:
        """Make it durable and only then return, in the writer's thread. May raise anything; GivenUp when cancelled."""
        ...

    def prepare(self, size_bytes: int, stop: Event) -> float | None:
        """Tidy up and make room for an emergency, until told to stop.

        Returns bytes a second that the disk took, if that was seen.
        """
        ...

    def idle(self, stop: Event) -> None:
        """Do what can wait (scrub), until told to stop."""
        ...

    def corrupt(self) -> int:
        """How many checkpoints turned out to be corrupt since this was last asked."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...

    def forsake(self) -> None:
        """In a child of fork: close what the parent holds, and touch nothing else."""
        ...


class Saving:
    """A keeper around a function that saves by itself: training stands still meanwhile."""

    beside = False

    def __init__(self, save: Save) -> None:
        self._save = save

    def size_bytes(self) -> int | None:
        """Nobody knows what the function will write."""
        return None

    def take(self, step: int, slot: int) -> Taken | SavedCheckpoint:  # noqa: ARG002 - it has no snapshots
        """Save here and now. Raises what the function raises, and TypeError when it does not say what it saved."""
        saved: object = self._save(step)
        if not isinstance(saved, SavedCheckpoint):
            msg = f"the function that saves returned {saved!r:.80}, not a SavedCheckpoint: nobody knows what is durable"
            raise TypeError(msg)
        return saved

    def write(self, taken: Taken, tell: Tell, order: Order) -> SavedCheckpoint:  # noqa: ARG002
        """Never called: `take` leaves nothing to write."""
        raise GivenUp(taken.step)

    def prepare(self, size_bytes: int, stop: Event) -> float | None:  # noqa: ARG002
        """Nothing to prepare."""
        return None

    def idle(self, stop: Event) -> None:
        """Nothing to do."""

    def corrupt(self) -> int:
        """Nothing is verified here."""
        return 0

    def close(self) -> None:
        """Nothing to let go of."""

    def forsake(self) -> None:
        """Nothing is held."""


def attempted(call: Callable[[], _Value], what: str) -> _Value | Exception:
    """Return what a call returned, or how it failed: nothing that saving does may end the training."""
    try:
        return call()
    except GivenUp as end:
        return end
    except Exception as error:  # noqa: BLE001 - a failing disk must not end the training; the asker is told
        _log.warning("%s failed: %s: %s", what, type(error).__name__, error)
        _log.debug("%s failed", what, exc_info=True)
        return error
