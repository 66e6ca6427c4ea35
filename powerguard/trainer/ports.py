"""What a desk needs of others: slower storage, and the other ranks of the job."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from powerguard.trainer.store import SavedCheckpoint
from powerguard.wire import TriggerRequest


class UploadsSeen(NamedTuple):
    """How copying goes. step: of the newest checkpoint that is whole in slower storage; None: none yet.

    error, failing_s: what went wrong last, for a person, and for how long; "" and None since the last success.
    """

    step: int | None = None
    error: str = ""
    failing_s: float | None = None


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

    def seen(self) -> UploadsSeen:
        """Return how they go, for people. Never called with the desk's lock held."""
        ...

    def figures(self) -> Mapping[str, tuple[str, str, float]]:
        """Return metrics: name -> (type, help, value)."""
        ...


class Elsewhere(Protocol):
    """The other ranks of the job, where there are any. Never called with the lock held; may raise RanksError."""

    @property
    def holds(self) -> bool:
        """Training is to stand for this host, as all ranks know."""
        ...

    @property
    def hosts_holding(self) -> int | None:
        """How many hosts want that; None where there is one."""
        ...

    @property
    def trouble(self) -> str:
        """What is wrong between the ranks, for a person; "" while nothing is."""
        ...

    def news(self) -> None:
        """Bring the desk up to date with what they have agreed on."""
        ...

    def opened(self, request: TriggerRequest) -> int:
        """Have all ranks save; return the number of the generation that this wish is part of."""
        ...

    def cancelled(self, number: int) -> None:
        """Call a generation off, for all ranks."""
        ...

    def paused(self) -> None:
        """Have all ranks stand still, for this host."""
        ...

    def resumed(self, *, all_hosts: bool = False) -> None:
        """Take back what this host wanted, or what all of them did; all ranks go on, if no host holds them any more."""
        ...

    def tick(self) -> None:
        """Now and then, in the writer's thread: ask what the training thread cannot wait for."""
        ...
