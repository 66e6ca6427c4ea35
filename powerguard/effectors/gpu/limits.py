"""What powerguard-gpu found before it changed anything: one small file, written before the first limit is lowered.

It lies in /run and names the boot: power limits do not survive a reboot, and neither does the file. Each entry holds
the limit found, which is never overwritten, and every limit that we may have set since: with a kill between any two
lines of ours, one of these is what the GPU reads, unless somebody else has set another.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from powerguard.effectors.gpu.nvml import SAME_MW
from powerguard.effectors.root_folder import KeptFolder, past_s

LEASE_S: Final = 180.0
"""A cap holds this long after the daemon last said so: longer than its restart (20 s to stop, 60 s to start)."""

RETRY_S: Final = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""From an order to restore that was not carried out to the first attempt of our own, and to each further one."""

REMEMBERED: Final = 8
"""Limits of ours that are remembered for each GPU, the newest: one for each share that was asked for."""

LIMITS: Final = "limits.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One GPU whose limit we may have changed. gone: it was not there when its limit was to be put back."""

    uuid: str
    index: int
    name: str
    found_mw: int
    set_mw: tuple[int, ...]
    gone: bool = False

    def is_ours(self, limit_mw: int) -> bool:
        """Say whether a limit is one that we have set."""
        return any(abs(limit_mw - ours_mw) < SAME_MW for ours_mw in self.set_mw)

    def is_found(self, limit_mw: int) -> bool:
        """Say whether a limit is the one found."""
        return abs(limit_mw - self.found_mw) < SAME_MW


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is kept. Times are seconds of CLOCK_BOOTTIME, 0 for never.

    capped_s: when GPUs were last capped. ordered_s: when they were to be restored: from then on no cap is wanted.
    tries: restores that the watch began, unasked; tried_s: the last of them.
    """

    capped_s: float
    ordered_s: float = 0.0
    tries: int = 0
    tried_s: float = 0.0
    gpus: tuple[Kept, ...] = ()

    def due_s(self, held_s: float, lease_s: float) -> float:
        """When the watch is to put the limits back: the daemon is gone, or what it ordered has failed."""
        if self.ordered_s:
            return max(self.ordered_s, self.tried_s) + RETRY_S[min(self.tries, len(RETRY_S) - 1)]
        return max(self.capped_s, held_s) + lease_s


class Folder(KeptFolder):
    """The helper's own folder: /run/powerguard-gpu, or a test's."""

    def __init__(self, path: Path) -> None:
        by_hand = "set the limits by hand (nvidia-smi --power-limit)"
        super().__init__(path, helper="powerguard-gpu", file=LIMITS, by_hand=by_hand)

    def read(self) -> Limits | None:
        """What is kept; None where nothing is. Raises KeptError."""
        told = self.load()
        try:
            return None if told is None else _limits(told)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self.nonsense() from None

    def write(self, limits: Limits) -> None:
        """Keep it, durably and whole: a kill at any instruction leaves the old file or the new one."""
        self.keep(asdict(limits))


def _limits(told: dict[str, Any]) -> Limits:
    """Read what was written, and believe nothing else. Raises ValueError, KeyError, TypeError or AttributeError."""
    times = {name: past_s(told[name]) for name in ("capped_s", "ordered_s", "tried_s")}
    gpus = tuple(
        Kept(
            uuid=str(gpu["uuid"]),
            index=int(gpu["index"]),
            name=str(gpu["name"]),
            found_mw=int(gpu["found_mw"]),
            set_mw=tuple(int(limit) for limit in gpu["set_mw"]),
            gone=gpu["gone"] is True,
        )
        for gpu in told["gpus"]
    )
    if any(gpu.found_mw <= 0 for gpu in gpus):
        raise ValueError(gpus)
    return Limits(**times, tries=int(told["tries"]), gpus=gpus)
