"""What a desk needs of others: slower storage, and the other ranks of the job."""

from collections.abc import Mapping
from typing import Protocol

from powerguard.trainer.store import SavedCheckpoint
from powerguard.wire import TriggerRequest


class Uploads(Protocol):
    """What copies checkpoints to slower storage, in the background."""

    def offer(self, saved: SavedCheckpoint, *, asked: bool) -> None:
        """A checkpoint is durable on this host. asked: somebody wanted it; else the schedule did."""
        ...

    def hold(self) -> None:
        """Stop at once, and begin nothing. Never called with the desk's lock held."""
        ...

    def release(self) -> None:
        """Go on."""
        ...

    def figures(self) -> Mapping[str, tuple[str, str, float]]:
        """Return metrics: name -> (type, help, value)."""
        ...


class Elsewhere(Protocol):
    """The other ranks of the job, where there are any. Never called with the lock held; may raise RanksError."""

    def opened(self, request: TriggerRequest) -> int:
        """Have all ranks save; return the number of the generation that this wish is part of."""
        ...

    def cancelled(self, number: int) -> None:
        """Call a generation off, for all ranks."""
        ...

    def paused(self) -> None:
        """Have all ranks stand still."""
        ...

    def resumed(self) -> None:
        """Have all ranks go on."""
        ...

    def tick(self) -> None:
        """Now and then, in the writer's thread: ask what the training thread cannot wait for."""
        ...
