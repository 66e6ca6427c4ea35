"""Many outages of clusters, and the report on them."""

from collections.abc import Sequence
from typing import Any

from powerguard.sim.cluster.play import Played, play
from powerguard.sim.world.many import Tell, spread
from powerguard.sim.world.report import SimulationOptions
from powerguard.sim.world.site import Site

_CHUNK = 10


def play_clusters(site: Site, options: SimulationOptions, *, jobs: int | None, tell: Tell) -> list[Played]:
    """Play all outages of a run of `powerguard simulate --job`."""
    return spread(_played, site, options, jobs=jobs, chunk=_CHUNK, tell=tell)


def _played(site: Site, options: SimulationOptions, seed: int) -> Played:
    return play(seed, site, faults=options.faults)


def report(samples: Sequence[Played], options: SimulationOptions) -> dict[str, Any]:
    """Return the object that `powerguard simulate --job --json` prints."""
    ordered = sorted(samples, key=lambda one: one.seed)
    count = max(1, len(ordered))
    return {
        "schema_version": 1,
        "object": "simulate_job",
        "seed": options.seed,
        "faults": options.faults,
        "site": options.site,
        "outages": len(ordered),
        "hosts": sum(one.hosts for one in ordered),
        "lost_s_mean": round(sum(one.lost_s for one in ordered) / count, 3),
        "rollback_s_mean": round(sum(one.rolled_back_s for one in ordered) / count, 3),
        "idle_s_mean": round(sum(one.idle_s for one in ordered) / count, 3),
        "power_offs": sum(one.offs for one in ordered),
        "requeues": sum(one.restarts for one in ordered),
        "reported": sum(one.reported for one in ordered),
        "submitted_again": sum(one.failed for one in ordered),
        "invariant_violations": [
            {"seed": one.seed, "violation": violation, "reproduce": f"{options.reproduce(one.seed)} --job"}
            for one in ordered
            for violation in one.violations
        ],
    }
