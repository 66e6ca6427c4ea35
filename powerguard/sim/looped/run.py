"""Many outages at the loop and at the socket level, as the core level plays them: `powerguard simulate --level`."""

from typing import Final

from powerguard.sim.looped import outage, wired
from powerguard.sim.world.bound import bound
from powerguard.sim.world.layers import returned
from powerguard.sim.world.many import Tell, cores, spread
from powerguard.sim.world.oracle import best
from powerguard.sim.world.report import Options, Sample
from powerguard.sim.world.scene import draw
from powerguard.sim.world.site import Site

_CHUNK: Final = 10
_MOST_CHUNK: Final = 50


def play_many(site: Site, options: Options, *, jobs: int | None = None, tell: Tell = lambda _: None) -> list[Sample]:
    """Play all outages of a run at options.level ("loop" or "sockets"). The samples come in no order.

    jobs: processes, or at the socket level outages at a time; None: as many as there are cores.
    """
    if options.level == "sockets":
        return wired.play_many(options, at_once=jobs, tell=tell, returns=site.returns)
    jobs = min(jobs or cores(), max(1, options.outages // _CHUNK))
    size = min(_MOST_CHUNK, max(1, options.outages // (4 * jobs)))
    return spread(_played, site, options, jobs=jobs, size=size, tell=tell)


def _played(site: Site, options: Options, seed: int) -> Sample:
    return one(seed, site, faults=options.faults)


def one(seed: int, site: Site, *, faults: bool) -> Sample:
    """Play one outage at the loop level, and set it against what would have been best."""
    told = outage.play(seed, site, faults=faults)
    quick = outage.quick(site)
    scene = draw(seed, quick, faults=faults)
    loss_s, facts = told.lost_s, scene.returns
    return Sample(
        seed=seed,
        excess_s=max(0.0, loss_s - best(scene, quick).loss_s),
        beyond_bound_s=max(0.0, loss_s - bound(scene, quick).loss_s),
        loss_s=loss_s,
        rollback_s=told.rollback_s,
        planning_dirty=told.planning_dirty,
        physics_dirty=told.dirty > 0 and not told.planning_dirty,
        shutdown=told.latches > 0,
        needless=told.needless,
        stranded=told.stranded,
        violations=tuple(f"{violation.name}: {violation.what}" for violation in told.violations),
        back=returned(scene, told.wakers, told.waited_s, arms=not facts.dry_run, brackets=facts.bracket),
    )
