"""The report on many outages: one object, the same whatever played them.

Counts are of outages, not of events: an outage with two shutdowns is one that had to shut down.

Which power-on methods an outage had, and which of them brought the host back: `stranded` is counted for each set.

The letters are those of docs/guides/return.md.

Writes the site file with the defaults: python -m powerguard.sim.world.report > examples/site.yaml.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from powerguard.core.model.actions import PowerOnMethod
from powerguard.sim.world.back import Waker
from powerguard.sim.world.run import Result
from powerguard.sim.world.scene import Scene
from powerguard.sim.world.site import Site

LETTERS: Final = {
    Waker.REBOOT: "A",
    Waker.OUTPUT: "B",
    Waker.SENTINEL: "C",
    Waker.WATCHDOG: "D",
    Waker.RTC: "E",
    Waker.POLICY: "P",
}
"""Every power-on method, in the order in which they are printed."""
ALWAYS_ON: Final = "always-on"
LIES: Final = "lies"
OFF: Final = "off"


class Layers(NamedTuple):
    """A set of power-on methods, as the operator of this host would name it.

    output: what its UPS is said to do when utility returns in the countdown: cycles, aborts, stays_off or unknown; "":
    this host switches none. policy: the BMC's in the outage: ALWAYS_ON; LIES: taken, and not kept; OFF.
    """

    reboot: bool
    output: str
    sentinel: bool
    watchdog: bool
    rtc: bool
    policy: str

    @property
    def methods(self) -> list[str]:
        """The names of those that are there, but for the policy."""
        return [waker.value for waker in LETTERS if waker is not Waker.POLICY and getattr(self, waker.value)]

    def __str__(self) -> str:
        letters = [
            LETTERS[Waker(method)] + (f" {self.output}" if method == Waker.OUTPUT else "") for method in self.methods
        ]
        policy = {ALWAYS_ON: ["P"], LIES: ["P lies"], OFF: []}[self.policy]
        return ", ".join(letters + policy) or "nothing"


class Return(NamedTuple):
    """How the host of one outage came back.

    broken: a clock, sentinel or watchdog of it does not do what it promises. by: who switched it on, each once; empty:
    it was never off, or only a person did. wait_s: from utility's return, or the power-off if that was later, until it
    was on, in all, without the time of a person.
    """

    layers: Layers
    broken: bool
    by: tuple[str, ...]
    wait_s: float


def returned(scene: Scene, wakers: Collection[Waker], wait_s: float, *, arms: bool, brackets: bool = False) -> Return:
    """Add an outage that is over.

    wakers: who switched the host on. arms: the policy there arms what there is, and ensures the BMC's policy;
    brackets: the policy is another but for that.
    """
    facts = scene.returns
    is_on = (scene.always_on and not brackets) or (arms and not scene.bmc_refuses)
    methods = facts.methods if arms else ()
    layers = Layers(
        reboot=arms and facts.late,
        output=facts.declared if PowerOnMethod.OUTPUT in methods else "",
        sentinel=PowerOnMethod.SENTINEL in methods,
        watchdog=PowerOnMethod.WATCHDOG in methods,
        rtc=PowerOnMethod.RTC in methods,
        policy=LIES if facts.lies else ALWAYS_ON if is_on else OFF,
    )
    by = tuple(waker.value for waker in LETTERS if waker in wakers)
    return Return(layers=layers, broken=arms and facts.broken, by=by, wait_s=wait_s)


MOST_SHOWN: Final = 100
"""Seeds of planning failures that are listed; their number is always reported in full."""
MOST_SEEDS: Final = 5
"""The same for those that stay off, for each set of power-on methods."""


class Sample(NamedTuple):
    """The result of one outage: seconds, and what happened in it at least once."""

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
    """None: no host comes back at this level."""


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
class SimulationOptions:
    """The options of a run. site: the file as it was named; None: the defaults. level: core or loop."""

    seed: int
    outages: int
    policy: str = "powerguard"
    faults: bool = True
    site: str | None = None
    level: str = "core"

    def reproduce(self, seed: int) -> str:
        """Return the command that plays just this outage again."""
        command = ["powerguard simulate", f"--seed {seed}", "--outages 1"]
        if self.policy != "powerguard":
            command.append(f"--policy {self.policy}")
        if not self.faults:
            command.append("--no-faults")
        if self.site is not None:
            command.append(f"--site {self.site}")
        if self.level != "core":
            command.append(f"--level {self.level}")
        return " ".join(command)


def report(samples: Iterable[Sample], options: SimulationOptions) -> dict[str, Any]:
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
        "stranded_by_methods": _by_methods(ordered),
        "planning_dirty_outages": [{"seed": seed, "reproduce": options.reproduce(seed)} for seed in dirty[:MOST_SHOWN]],
        "invariant_violations": [
            {"seed": one.seed, "violation": violation, "reproduce": options.reproduce(one.seed)}
            for one in ordered
            for violation in one.violations
        ],
    }


def _by_methods(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Count which hosts came back by what, and which did not, for each set of power-on methods that occurred."""
    sets: dict[Layers, list[tuple[Sample, Return]]] = {}
    for one in samples:
        if one.back is not None:
            sets.setdefault(one.back.layers, []).append((one, one.back))
    return [
        {
            "set": str(layers),
            "methods": layers.methods,
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


def site_file() -> str:
    """Return a site file with every number, its meaning and its default."""
    lines = [
        "# Every number of the simulated world, with its default: powerguard simulate --site FILE. A file needs only",
        "# those that differ. A share is 0 to 1; a pair is [least, most].",
    ]
    for name, section in Site.model_fields.items():
        default: Any = section.default
        lines += ["", f"{name}:  # {section.description}"]
        for key, field in type(default).model_fields.items():
            lines += [f"  # {field.description}", f"  {key}: {_shown(getattr(default, key))}"]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_shown(key)}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(site_file(), end="")
