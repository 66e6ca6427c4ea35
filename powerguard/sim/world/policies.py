"""Who decides: powerguard, what people use today, and the oracle. The same seed gives each of them the same world."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from powerguard.sim.world.bound import bound
from powerguard.sim.world.guarded import Guarded
from powerguard.sim.world.layers import Return, returned
from powerguard.sim.world.oracle import best
from powerguard.sim.world.others import Apcupsd, Fixed, Nut
from powerguard.sim.world.run import Decider, Result, play
from powerguard.sim.world.scene import draw
from powerguard.sim.world.site import Site
from powerguard.sim.world.world import World

MAKERS: Final[Mapping[str, Callable[[World], Decider]]] = {
    "powerguard": Guarded,
    "fixed": Fixed,
    "nut": Nut,
    "apcupsd": Apcupsd,
}
ORACLE: Final = "oracle"
POLICIES: Final = (*MAKERS, ORACLE)


class Judged(NamedTuple):
    """A result, and the training time lost beyond the oracle's, and beyond what nobody can beat; and the way back."""

    result: Result
    excess_s: float
    beyond_bound_s: float
    back: Return


def one(seed: int, site: Site, policy: str, *, faults: bool) -> Judged:
    """Play one outage."""
    scene = draw(seed, site, faults=faults)
    least_s = bound(scene, site).loss_s
    result = best(scene, site) if policy == ORACLE else play(scene, site, MAKERS[policy])
    excess_s = 0.0
    if policy != ORACLE and result.loss_s > least_s:
        excess_s = max(0.0, result.loss_s - best(scene, site, but=policy, at_most_s=result.loss_s).loss_s)
    back = returned(scene, result.wakers, result.waited_s, arms=policy == "powerguard")
    return Judged(result, excess_s, max(0.0, result.loss_s - least_s), back)
