"""What nobody can beat: a plan that knows everything and keeps no margin, down to the battery's last second.

Training on battery is bought with energy; pausing is cheap, off is free. So each family of plans is a small linear
programme, solved at its corners: ride through (train, capped or not), pause and hold, or checkpoint and shut down at
the best moment. What is recharged between two cuts is counted from the start, and a host that is off stays off until
utility is back for good, so the bound is never too strict. It is a bound, not a policy: nobody would run a host so.
"""

from dataclasses import dataclass
from itertools import combinations

from powerguard.sim.world.scene import Scene
from powerguard.sim.world.site import Site
from powerguard.sim.world.streams import stream, uniform


@dataclass(frozen=True, slots=True)
class Bound:
    """The least training time that could be lost, and how: "ride", "hold", "shutdown", or "dark" (power lost)."""

    loss_s: float
    how: str


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to spend a second on battery: the energy it takes and the training it yields."""

    energy: float
    yields: float


def bound(scene: Scene, site: Site) -> Bound:
    """Return the bound of one scene."""
    host, curve = site.host, scene.curve
    per_s = 1.0 / curve.tau_s(host.load)
    train = _Way(per_s, 1.0)
    cap = _Way(1.0 / curve.tau_s(host.load * host.capped_load), host.capped_speed)
    idle_energy = 1.0 / curve.tau_s(host.load * host.paused_load)
    pause = train if scene.trainer.never_pauses else _Way(idle_energy, 0.0)
    off = _Way(0.0, 0.0)
    energy = max(0.0, scene.health * scene.charge - scene.dies_at)
    checkpoint_s, stop_s = _durations(scene, site)
    plans: list[Bound] = []
    lasted_s, gained = 0.0, 0.0
    for at, cut in enumerate(scene.cuts):
        if at:
            gap_s = cut.begin_s - scene.cuts[at - 1].end_s
            gained += scene.health * gap_s / (site.ups.recharge_h * 3600.0)
        length_s, cut_off = cut.end_s - cut.begin_s, False
        order = scene.order
        if order is not None and cut.begin_s <= order.at_s < cut.end_s:
            length_s, cut_off = min(length_s, max(0.0, order.at_s + order.delay_s - cut.begin_s)), True
        whole_s = lasted_s + length_s
        # From the end of this plan's training on battery to the end of the last cut nothing is done any more.
        missed_s = scene.end_s - cut.begin_s - length_s
        stopping = (checkpoint_s + stop_s) * idle_energy
        if (spare := energy + gained - stopping) >= 0.0:
            trained_s = _most(whole_s, spare, (train, cap, off))
            plans.append(Bound(missed_s + whole_s - trained_s + host.resumed_s, "shutdown"))
        trained_s = _most(whole_s, energy + gained, (train, cap, off))
        plans.append(Bound(missed_s + whole_s - trained_s + host.dirty_s, "dark"))
        if cut_off:
            return min(plans, key=lambda plan: plan.loss_s)
        lasted_s = whole_s
    held_s = _most(lasted_s, energy + gained, (train, cap, pause))
    if held_s >= 0.0:
        plans.append(Bound(lasted_s - held_s, "ride" if held_s >= lasted_s else "hold"))
    return min(plans, key=lambda plan: plan.loss_s)


def _durations(scene: Scene, site: Site) -> tuple[float, float]:
    """What the first checkpoint and the first stop of this host take."""
    checkpoints, stops = stream(scene.seed, "checkpoints"), stream(scene.seed, "stops")
    trainer, host = site.trainer, site.host
    checkpoint_s = trainer.checkpoint_median_s * checkpoints.lognormvariate(0.0, trainer.checkpoint_spread)
    takes_s = host.stop_median_s * stops.lognormvariate(0.0, host.stop_spread)
    stuck = stops.random() < host.stop_stuck_share
    stop_s = uniform(stops, host.stop_stuck_s) if stuck else min(takes_s, host.stop_stuck_s[0])
    return checkpoint_s, stop_s


def _most(seconds: float, energy: float, ways: tuple[_Way, ...]) -> float:
    """Return the most training that so many seconds can yield with so much energy; -1 where nothing lasts so long."""
    found = -1.0
    for way in ways:
        if way.energy * seconds <= energy:
            found = max(found, way.yields * seconds)
    for one, other in combinations(ways, 2):
        if one.energy == other.energy:
            continue
        # Both bounds are tight at a corner: all the seconds, and all the energy.
        of_one = (energy - other.energy * seconds) / (one.energy - other.energy)
        if 0.0 <= of_one <= seconds:
            found = max(found, one.yields * of_one + other.yields * (seconds - of_one))
    return found
