"""What outlives every process of the daemon, and is not in the world's physics: the UPS's and the BMC's own memory."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from powerguard.sim.world.world import World

ALWAYS_ON: Final = "always-on"


@dataclass(slots=True)
class Hardware:
    """What outlives every daemon.

    policy: as the BMC tells it; found: before the first outage; seen: by the effector, when it was calm. cut_at_s: when
    the output goes off by our order, in the world's time; inf: it was not ordered. sent: so often it was. crashed: the
    host died of itself. foreign: somebody else has stopped it already.
    """

    folder: Path
    policy: str
    found: str
    seen: str = ""
    cut_at_s: float = math.inf
    sent: int = 0
    crashed: bool = False
    foreign: bool = False

    @classmethod
    def of(cls, world: World, folder: Path) -> "Hardware":
        """Return it as it is before anything happens. folder: of the daemon's notes."""
        if world.scene.returns.bracket:
            world.always_on = False
        policy = ALWAYS_ON if world.always_on or world.scene.returns.lies else "always-off"
        return cls(folder=folder, policy=policy, found=policy)

    def is_ours(self, world: World) -> bool:
        """Say whether the countdown that runs, if any does, was ordered by this host."""
        return world.is_counting and self.cut_at_s < math.inf
