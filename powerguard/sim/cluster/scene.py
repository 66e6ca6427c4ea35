"""What chance decides of one outage of a cluster: its hosts and their feeds, and what is wrong with Slurm."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from powerguard.sim.cluster.slurmctld import Deed, Fault
from powerguard.sim.world.back import ReturnFacts
from powerguard.sim.world.chance import BesideFacts, Cut, stream, uniform
from powerguard.sim.world.scene import Scene, TrainerFacts, draw
from powerguard.sim.world.site import ClusterSite, Site

_KINDS: Final = ("hangs", "late", "refuses", "lies", "garbles")
_APART: Final = ("stays", "back_earlier", "goes_later")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One outage. scenes: one for each host. width: nodes of the job; the others are spare.

    requeues: the job may be requeued. hold: requeued in hold. disk_full: its disk takes no new checkpoint.
    """

    seed: int
    scenes: tuple[Scene, ...]
    width: int
    faults: tuple[Fault, ...] = ()
    deeds: tuple[Deed, ...] = ()
    requeues: bool = True
    hold: bool = False
    disk_full: bool = False


def draw_plan(seed: int, site: Site, *, faults: bool) -> Plan:
    """Draw one outage. The hosts stand behind one feed, or behind two of which one fares better."""
    chance, cluster = stream(seed, "cluster"), site.cluster
    hosts = chance.randint(*cluster.hosts)
    first = _shortened(draw(seed, site, faults=faults).cuts, cluster.longest_s)
    apart, how = chance.random() < cluster.apart_share, chance.choice(_APART)
    delay_s, on_other = uniform(chance, (5.0, 600.0)), [chance.random() < 0.5 for _ in range(hosts)]
    other = _other_cuts(first, how, delay_s) if apart else first
    scenes = tuple(
        _scene(seed * 1000 + at, site, other if on_other[at] and at else first, faults=faults) for at in range(hosts)
    )
    spare = hosts > 2 and chance.random() < cluster.spare_share
    width, requeues, hold = (
        hosts - spare,
        chance.random() >= cluster.no_requeue_share,
        chance.random() < cluster.hold_share,
    )
    end_s = max(scene.end_s for scene in scenes)
    return Plan(
        seed=seed,
        scenes=scenes,
        width=width,
        faults=_faults(seed, cluster, end_s) if faults else (),
        deeds=_deeds(seed, cluster, end_s, hosts) if faults else (),
        requeues=requeues,
        hold=hold,
        disk_full=faults and any(scene.trainer.disk_full for scene in scenes),
    )


def _shortened(cuts: Sequence[Cut], longest_s: float) -> tuple[Cut, ...]:
    """Return the cuts, none of which lasts longer: hosts that are off for hours have nothing to show."""
    found, earlier_s = [], 0.0
    for cut in cuts:
        lasts_s = min(cut.end_s - cut.begin_s, longest_s)
        found.append(Cut(cut.begin_s - earlier_s, cut.begin_s - earlier_s + lasts_s))
        earlier_s += cut.end_s - cut.begin_s - lasts_s
    return tuple(found)


def _other_cuts(first: Sequence[Cut], how: str, by_s: float) -> tuple[Cut, ...]:
    """Return what the second feed goes through."""
    if how == "stays":
        return ()
    if how == "goes_later":
        return tuple(Cut(cut.begin_s + by_s, cut.end_s + by_s) for cut in first)
    last = first[-1]
    end_s = max(last.begin_s + 1.0, last.end_s - by_s)
    return (*first[:-1], Cut(last.begin_s, end_s))


def _scene(seed: int, site: Site, cuts: tuple[Cut, ...], *, faults: bool) -> Scene:
    """Draw one host. What its trainer does in outages of one host, and other programs, are left out here."""
    drawn = draw(seed, site, faults=faults)
    trainer = TrainerFacts(estimate_s=drawn.trainer.estimate_s, disk_full=drawn.trainer.disk_full)
    gauge = replace(drawn.gauge, glitch_rate=0.0)
    return replace(
        drawn, cuts=cuts, trainer=trainer, gauge=gauge, order=None, always_on=True, second=None, beside=BesideFacts(),
        returns=ReturnFacts(), silences=(), dies_at=0.0,
    )  # fmt: skip


def _faults(seed: int, cluster: ClusterSite, end_s: float) -> tuple[Fault, ...]:
    """Draw when Slurm does not do what it is asked: before the cut, in the outage, or after it."""
    chance = stream(seed, "slurmctld")
    found = []
    for kind in _KINDS:
        there, begin_s = chance.random() < cluster.fault_share, _moment(chance, end_s)
        lasts_s = uniform(chance, cluster.fault_s)
        by_s = uniform(chance, (0.5, 3.0)) if kind == "late" else uniform(chance, (10.0, 120.0))
        if there:
            found.append(Fault(kind, begin_s, begin_s + lasts_s, by_s))
    return tuple(found)


def _deeds(seed: int, cluster: ClusterSite, end_s: float, hosts: int) -> tuple[Deed, ...]:
    """Draw what persons, and Slurm itself, do in between."""
    chance = stream(seed, "persons")
    found = []
    for kind in ("drain", "resume", "words", "requeue", "forget"):
        there, at_s, node = chance.random() < cluster.deed_share, _moment(chance, end_s), chance.randrange(hosts)
        if there:
            found.append(Deed(at_s, kind, node))
    return tuple(sorted(found))


def _moment(chance: Random, end_s: float) -> float:
    """Return a moment just before or after the cut, in the first ten minutes, or until long after the return."""
    first_s, last_s = chance.choice(((-10.0, 8.0), (0.0, 600.0), (0.0, end_s + 900.0)))
    return chance.uniform(first_s, last_s)
