"""The report on many outages: one object, the same whatever played them.

Counts are of outages, not of events: an outage with two shutdowns is one that had to shut down.

Which ways back there were in an outage, and which of them brought the host back: `stranded` is counted for each set.

The letters are those of docs/guides/return.md.

Writes docs/reference/simulate.md: python -m powerguard.sim.world.report > docs/reference/simulate.md, and the site file
with the defaults: python -m powerguard.sim.world.report site > examples/site.yaml.
"""

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from powerguard.core.model.actions import Way
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
"""Every way back, in the order in which they are printed."""
ALWAYS_ON: Final = "always-on"
LIES: Final = "lies"
OFF: Final = "off"


class Layers(NamedTuple):
    """A set of ways back, as the operator of this host would name it.

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
    def ways(self) -> list[str]:
        """The names of those that are there, but for the policy."""
        return [waker.value for waker in LETTERS if waker is not Waker.POLICY and getattr(self, waker.value)]

    def __str__(self) -> str:
        letters = [LETTERS[Waker(way)] + (f" {self.output}" if way == Waker.OUTPUT else "") for way in self.ways]
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
    ways = facts.ways if arms else ()
    layers = Layers(
        reboot=arms and facts.late,
        output=facts.told if Way.OUTPUT in ways else "",
        sentinel=Way.SENTINEL in ways,
        watchdog=Way.WATCHDOG in ways,
        rtc=Way.RTC in ways,
        policy=LIES if facts.lies else ALWAYS_ON if is_on else OFF,
    )
    by = tuple(waker.value for waker in LETTERS if waker in wakers)
    return Return(layers=layers, broken=arms and facts.broken, by=by, wait_s=wait_s)


MOST_TOLD: Final = 100
"""Seeds of planning failures that are listed; their number is always reported in full."""
MOST_SEEDS: Final = 5
"""The same for those that stay off, for each set of ways back."""


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


_KEYS: Final = (
    ("policy, level, seed, faults, site, outages", "what was asked for"),
    (
        "excess_s_mean, excess_s_p95",
        "seconds of training lost beyond the oracle, per outage",
    ),
    ("beyond_bound_s_mean", "the same beyond the bound"),
    ("loss_s_mean", "seconds of training lost in all, per outage"),
    ("rollback_s_mean", "of these, work that had to be done again"),
    ("planning_dirty, physics_dirty", "outages in which power was lost under the host, and why"),
    (
        "shutdowns, needless, stranded",
        "outages with a power-off, with a needless one, with a host that did not come back",
    ),
    ("stranded_by_ways", "for each set of power-on methods: which hosts came back, and by what (below)"),
    ("planning_dirty_outages", "the first hundred of those: {seed, reproduce}"),
    ("invariant_violations", "every one: {seed, violation, reproduce}"),
    ("warnings", "what in the site file makes the comparison doubtful, in words"),
)
_HEAD: Final = """# The simulator: powerguard simulate

Made from the code: `python -m powerguard.sim.world.report > docs/reference/simulate.md`.

`powerguard simulate` plays outages by the thousand in a simulated world: worn batteries, wrong gauges, trainers that
hang, BMCs that refuse, other programs that switch the UPS off, a daemon that is killed. It shows whether powerguard
keeps its promises, and what it costs compared with simple rules. It needs neither settings nor root.

    powerguard simulate                                  # 1,000 outages with faults
    powerguard simulate --outages 100000 --json          # also finds rare cases; up to an hour on two cores
    powerguard simulate --policy nut --no-faults         # what upsmon's default rule would have done
    powerguard simulate --seed 4711 --outages 1          # one outage again, with the same result
    powerguard simulate --hosts 4,6,6                    # 16 hosts of three shed tiers on one UPS, 100 outages
    powerguard simulate --job                            # one job over several hosts under Slurm, 100 outages

A problem is printed with the command that plays it again. Exit 0: no invariant was violated; 1: one was. Power lost by
planning is a figure, not a violation: `powerguard simulate --json | jq -e '.planning_dirty == 0'`.

`--hosts` plays several hosts on one UPS, without faults; the first number is the lowest tier. Each host decides by what
it measures. The invariants are those of one host, and: no training that obeyed is stopped, a higher tier powers off no
earlier than a lower one, and no host waits for another. A tier weighs three times as much as the one below it.

`--job` plays two to four hosts, each behind its own UPS and with its own daemon, that run one job under Slurm. Half of
the clusters have a second feed. The ranks agree by the real log of the trainer's library, and the real root helper
reads and changes a simulated slurmctld. With faults that one hangs, is late, refuses, shows an old state and garbles
its answers; it requeues the job by itself and forgets a reason; persons drain a node, resume one, and add words to
powerguard's reason; daemons are killed. Longer outages are cut to 20 minutes. The invariants are those of one host,
and:

- the first power-off comes in the same second as without the scheduler: each outage is played twice up to it
- no other mark than powerguard's is undone, and no node is given back on battery
- only the host of its batch script requeues a job, and once for one outage and boot
- a node that powerguard has marked is in service within 3 minutes, or is reported
- no host trains while another one holds the job, and the ranks elsewhere end within 2 s after a host has left
- the newest checkpoint that all ranks have is never lost, and the job trains again

`--level loop` also runs the daemon's loop, the journal on disk and the power-on methods, and kills the daemon between
any two turns. Time, sources and effectors are simulated; `powerguard demo` uses real network connections.

## Words

- **Oracle**: the best result, outage by outage, of `fixed`, `nut`, `apcupsd` and powerguard's rule with the true
  state of the battery, in seconds of training. **Excess**: training time lost beyond the oracle. **Bound**: a plan
  that knows everything and keeps no margin.
- **Lost by planning**: the host lost power although a plan could have saved it with what was known. **By physics**: a
  bad cell, or less than 15 s between the first sign and the end.
- **Needless**: utility returned while the battery would still have carried the paused host.
- **Stranded**: the host was off and AC had never dropped, so a person must press the button. That wait is not counted
  as loss: the button is pressed at once if no outage follows within 10 minutes, otherwise after the last one.

## Assumptions

- Outage lengths: under 1 minute 31 %, 1 to 5 minutes 27 %, 5 to 30 minutes 14 %, 30 to 120 minutes 17 %, 2 to 4 hours
  6 %, longer 5 %. A quarter is followed by another one after about two minutes.
- Batteries hold 60 to 100 % of a new one. Half of the gauges report too much in proportion, half count against the
  nameplate and drop suddenly. 2 % have a bad cell.
- A stop takes 45 s, and 15 % of them 105 s or more. A paused host draws 35 %, a capped one 67 % at 80 % of the speed.
  Trainers save every 300 s, and 2 % of checkpoints hang. From power-on to training: 180 s, and 480 s if power was
  lost.
- `fixed` triggers a checkpoint, sleeps 50 s and halts, without a UPS cycle. `nut` waits for low battery; `apcupsd`
  for 5 %, 3 minutes or low battery. For both, killpower works, and neither asks for a checkpoint.

## Your site

`--site FILE` replaces these numbers. [examples/site.yaml](../../examples/site.yaml) has every number with its meaning
and default; a file needs only those that differ. A share is 0 to 1; a pair is [least, most].

```yaml
# A 10 kVA unit at half load, batteries of unknown age, a big model on a slow disk.
ups:
  runtime_table: {50: 900, 100: 330}
  health: [0.5, 0.9]
host:
  load: 0.5
  stop_median_s: 70
trainer:
  checkpoint_median_s: 90
drill: {done: true, cap: false}   # what powerguard has measured beforehand on this site
outage:
  bins:
    - {from_s: 1, to_s: 60, share: 0.7}
    - {from_s: 60, to_s: 3600, share: 0.3}
```

`returns` adds power-on methods besides the BMC's policy, and how often they fail:

```yaml
returns: {output_share: 0.5, hidden_share: 0.5, sentinel_share: 1.0, late_share: 1.0,
          bracket_share: 0.3, fails_share: 0.1}
```

## The object

[An example](simulate.json). Counts are of outages; seconds are rounded to a thousandth.
"""
_JOB_KEYS: Final = (
    ("seed, faults, site, outages, hosts", "what was asked for; hosts of all outages"),
    ("lost_s_mean, rollback_s_mean", "seconds of the job's training lost per outage; of these, work done again"),
    ("idle_s_mean", "seconds for which hosts with utility were idle because of another host, added up, per outage"),
    (
        "power_offs, requeues, submitted_again",
        "hosts powered off; how often Slurm requeued the job, and how often it failed",
    ),
    ("reported", "nodes that were reported and not in service at the end"),
    ("invariant_violations, warnings", "as above"),
)
_WAYS: Final = (
    ("set, ways", "the set, by the letters and by the names of [the guide](../guides/return.md)"),
    (
        "output",
        "what its UPS is said to do when utility returns in the countdown: cycles, aborts, stays_off, unknown; or null",
    ),
    ("policy", "of the BMC (P), in the outage: `always-on`; `lies`: said to be, and is not; `off`"),
    ("outages, went_off, stranded", "outages with this set; in which the host was off or dark; in which it stayed off"),
    ("stranded_broken, stranded_seeds", "of these, those with a method that breaks its promise; the first five seeds"),
    (
        "back_by",
        "outages in which that switched it on; output: AC's return, after a cut that it had ordered; policy: any other",
    ),
    (
        "wait_s_mean",
        "seconds from utility's return (or off, if later) until it was on; mean of those that something brought back",
    ),
    ("excess_s_mean", "as above, of this set alone"),
)
_SETS: Final = """
`stranded_by_ways` has a row for each set of power-on methods that occurred:
"""


def page() -> str:
    """Return the page."""
    keys, ways, job = (
        [f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {meaning}" for names, meaning in table]
        for table in (_KEYS, _WAYS, _JOB_KEYS)
    )
    return "\n".join([_HEAD, *keys, _SETS, *ways, "\nWith `--job` the object is `simulate_job`:\n", *job]) + "\n"


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
    print(site_file() if sys.argv[1:] == ["site"] else page(), end="")
