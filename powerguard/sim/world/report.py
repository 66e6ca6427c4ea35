"""What many outages came to: one object, the same whatever played them.

Counts are of outages, not of events: an outage with two shutdowns is one that had to shut down.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from powerguard.sim.world.layers import LETTERS, Layers, Return
from powerguard.sim.world.run import Result

MOST_TOLD: Final = 100
"""Seeds of planning failures that are listed; their number is always told in full."""
MOST_SEEDS: Final = 5
"""The same for those that stay off, for each set of ways back."""


class Sample(NamedTuple):
    """What one outage came to: seconds, and what happened in it at least once."""

    seed: int
    excess_s: float
    loss_s: float
    rollback_s: float
    planning_dirty: bool
    physics_dirty: bool
    shutdown: bool
    needless: bool
    stranded: bool
    violations: tuple[str, ...]
    beyond_bound_s: float = 0.0
    back: Return | None = None
    """None: nobody comes back at this level."""


def sample(result: Result, excess_s: float, beyond_bound_s: float, back: Return) -> Sample:
    """Return what counts of one result. The rest is as in `policies.Judged`."""
    return Sample(
        seed=result.seed,
        excess_s=excess_s,
        beyond_bound_s=beyond_bound_s,
        loss_s=result.loss_s,
        rollback_s=result.rollback_s,
        planning_dirty=result.dirty_by("planning"),
        physics_dirty=result.dirty_by("physics"),
        shutdown=result.shutdowns > 0,
        needless=result.needless > 0,
        stranded=result.stranded,
        violations=tuple(result.violations),
        back=back,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for. site: the file as it was named; None: the defaults. level: core, loop or sockets."""

    seed: int
    outages: int
    policy: str = "powerguard"
    faults: bool = True
    site: str | None = None
    level: str = "core"

    def reproduce(self, seed: int) -> str:
        """Return the command that plays just this outage again."""
        words = ["powerguard simulate", f"--seed {seed}", "--outages 1"]
        if self.policy != "powerguard":
            words.append(f"--policy {self.policy}")
        if not self.faults:
            words.append("--no-faults")
        if self.site is not None:
            words.append(f"--site {self.site}")
        if self.level != "core":
            words.append(f"--level {self.level}")
        return " ".join(words)


def report(samples: Iterable[Sample], options: Options) -> dict[str, Any]:
    """Return the object that `powerguard simulate --json` prints; docs/reference/simulate.md explains each key."""
    ordered = sorted(samples)
    count = len(ordered)
    excess = sorted(one.excess_s for one in ordered)
    dirty = [one.seed for one in ordered if one.planning_dirty]
    return {
        "schema_version": 1,
        "object": "simulate",
        "policy": options.policy,
        "level": options.level,
        "seed": options.seed,
        "faults": options.faults,
        "site": options.site,
        "outages": count,
        "excess_s_mean": _mean(excess),
        "excess_s_p95": round(excess[min(count - 1, int(0.95 * count))], 3) if count else 0.0,
        "beyond_bound_s_mean": _mean(one.beyond_bound_s for one in ordered),
        "loss_s_mean": _mean(one.loss_s for one in ordered),
        "rollback_s_mean": _mean(one.rollback_s for one in ordered),
        "planning_dirty": len(dirty),
        "physics_dirty": sum(one.physics_dirty for one in ordered),
        "shutdowns": sum(one.shutdown for one in ordered),
        "needless": sum(one.needless for one in ordered),
        "stranded": sum(one.stranded for one in ordered),
        "stranded_by_ways": _by_ways(ordered),
        "planning_dirty_outages": [{"seed": seed, "reproduce": options.reproduce(seed)} for seed in dirty[:MOST_TOLD]],
        "invariant_violations": [
            {"seed": one.seed, "violation": violation, "reproduce": options.reproduce(one.seed)}
            for one in ordered
            for violation in one.violations
        ],
    }


def _by_ways(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Count who came back by what, and who did not, for each set of ways that there was."""
    sets: dict[Layers, list[tuple[Sample, Return]]] = {}
    for one in samples:
        if one.back is not None:
            sets.setdefault(one.back.layers, []).append((one, one.back))
    return [
        {
            "set": str(layers),
            "ways": layers.ways,
            "output": layers.output or None,
            "policy": layers.policy,
            "outages": len(found),
            "went_off": sum(one.stranded or bool(back.by) for one, back in found),
            "stranded": sum(one.stranded for one, _ in found),
            "stranded_broken": sum(one.stranded and back.broken for one, back in found),
            "stranded_seeds": [one.seed for one, _ in found if one.stranded][:MOST_SEEDS],
            "back_by": {waker.value: sum(waker.value in back.by for _, back in found) for waker in LETTERS},
            "wait_s_mean": _mean(back.wait_s for _, back in found if back.by),
            "excess_s_mean": _mean(one.excess_s for one, _ in found),
        }
        for layers, found in sorted(sets.items())
    ]


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return round(sum(known) / len(known), 3) if known else 0.0
