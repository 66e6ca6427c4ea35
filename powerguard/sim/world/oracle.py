"""The oracle: the best, in hindsight, of all who decide, with powerguard's rule told the truth among them.

Each is played in the same world and keeps the margins that it keeps. What could be had without any is the `bound`.
"""

from collections.abc import Callable, Mapping
from typing import Final

from powerguard.sim.world import informed
from powerguard.sim.world.others import Apcupsd, Fixed, Nut
from powerguard.sim.world.run import Decider, Result, play
from powerguard.sim.world.scene import Scene
from powerguard.sim.world.site import Site
from powerguard.sim.world.world import World

_LISTED: Final[Mapping[str, Callable[[World], Decider]]] = {
    "informed, capped": informed.capped,
    "informed": informed.uncapped,
    "nut": Nut,
    "apcupsd": Apcupsd,
    "fixed": Fixed,
}
"""Whom the oracle compares; whoever is judged is always one of them, too."""


def best(scene: Scene, site: Site, *, but: str = "") -> Result:
    """Return the result of whoever of the listed lost least. but: one who need not be asked again."""
    results = (play(scene, site, make) for name, make in _LISTED.items() if name != but)
    return min(results, key=lambda result: result.loss_s)
