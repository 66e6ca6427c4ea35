"""The oracle: the best, in hindsight, of all who decide, with powerguard's rule told the truth among them.

Each is played in the same world and keeps the margins that it keeps. What could be had without any is the `bound`.
"""

import math
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


def best(scene: Scene, site: Site, *, but: str = "", at_most_s: float = math.inf) -> Result:
    """Return the result of whoever of the listed lost least. but: one who need not be asked again.

    at_most_s: nobody who loses that much is played to the end; who is returned may be one of them, if all did.
    """
    results: list[Result] = []
    for name, make in _LISTED.items():
        if name != but:
            results.append(play(scene, site, make, at_most_s=at_most_s))
            at_most_s = min(at_most_s, results[-1].loss_s)
    return min(results, key=lambda result: result.loss_s)
