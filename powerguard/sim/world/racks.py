"""Many outages of a rack: several hosts on one UPS (`rack`), and the report on them.

A tier weighs three times as much as the one below it (WORTH). `excess` is the weighted training lost beyond what a plan
loses that knows the outage beforehand (`rack.least_loss_s`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from powerguard.sim.world.rack import CAUSES, Kind, Rack, RackPlan, Tenant, least_loss_s
from powerguard.sim.world.report import MOST_TOLD, SimulationOptions
from powerguard.sim.world.site import RackSite, Site

WORTH: Final = 3.0
KINDS: Final = {"powerguard": Kind.POWERGUARD, "nut": Kind.NUT}
"""Policies that can run on every host of a rack."""


class TierSample(NamedTuple):
    """How the hosts of one tier fared on average. loss_s: training lost; by_cause: of that, by `CAUSES`."""

    tier: int
    loss_s: float
    by_cause: tuple[float, ...]


class RackSample(NamedTuple):
    """The result of one outage. Seconds of one host's training; loss and excess as the weighted mean over the hosts.

    lost: hosts with powerguard (or all, if it is on none) that lost power by planning, of so many.
    """

    seed: int
    excess_s: float
    loss_s: float
    tiers: tuple[TierSample, ...]
    lost: int
    hosts: int
    violations: tuple[str, ...]


def plan_of(rack: RackSite, policy: str) -> RackPlan:
    """Return the hosts of a site file's rack."""
    tiers = tuple(tier for tier, hosts in enumerate(rack.hosts) for _ in range(hosts))
    return RackPlan(
        tiers=tiers,
        kind=KINDS[policy],
        ordered=len(set(tiers)) > 1,
        others_share=rack.others_share,
        stagger_s=rack.stagger_s,
    )


def weight(tenant: Tenant) -> float:
    """Return what a second of this host's training is worth."""
    return WORTH**tenant.tier


def sample(seed: int, site: Site, plan: RackPlan) -> RackSample:
    """Play one outage."""
    rack = Rack(seed, site, plan)
    least_s = least_loss_s(rack, weight)
    result = rack.play()
    busy = [
        (tenant, told.loss_s, (*seat.lost_s.values(), told.rollback_s))
        for seat, (tenant, told) in zip(rack.seats, result.hosts, strict=True)
        if not tenant.idle
    ]
    whole = sum(weight(tenant) for tenant, _, _ in busy) or 1.0
    loss_s = sum(weight(tenant) * lost_s for tenant, lost_s, _ in busy)
    tiers = []
    for tier in sorted(set(plan.tiers)):
        mine = [(lost_s, by_cause) for tenant, lost_s, by_cause in busy if tenant.tier == tier]
        count = max(1, len(mine))
        by_cause = tuple(sum(each[at] for _, each in mine) / count for at in range(len(CAUSES)))
        tiers.append(TierSample(tier, sum(lost_s for lost_s, _ in mine) / count, by_cause))
    return RackSample(
        seed=seed,
        excess_s=(loss_s - least_s) / whole,
        loss_s=loss_s / whole,
        tiers=tuple(tiers),
        lost=sum(told.dirty_by("planning") for told in result.judged),
        hosts=len(result.judged),
        violations=tuple(result.violations),
    )


def played(site: Site, options: SimulationOptions, seed: int) -> RackSample:
    """Play one outage of a run of `powerguard simulate --hosts`."""
    return sample(seed, site, plan_of(site.rack, options.policy))


def with_hosts(site: Site, hosts: Sequence[int]) -> Site:
    """Return the site with so many hosts of each tier."""
    return site.model_copy(update={"rack": RackSite.model_validate({**site.rack.model_dump(), "hosts": hosts})})


def report(samples: Sequence[RackSample], site: Site, options: SimulationOptions) -> dict[str, Any]:
    """Return the object that `powerguard simulate --hosts --json` prints."""
    ordered, count = sorted(samples), max(1, len(samples))
    excess = sorted(one.excess_s for one in ordered)
    hosts = ",".join(map(str, site.rack.hosts))

    def again(seed: int) -> str:
        return f"{replace(options, faults=True).reproduce(seed)} --hosts {hosts}"

    def of_tier(at: int) -> dict[str, Any]:
        mine = [one.tiers[at] for one in ordered]
        causes = {cause: round(sum(each.by_cause[of] for each in mine) / count, 3) for of, cause in enumerate(CAUSES)}
        tier = mine[0].tier
        mean_s = round(sum(each.loss_s for each in mine) / count, 3)
        return {"tier": tier, "hosts": site.rack.hosts[tier], "loss_s_mean": mean_s, **causes}

    return {
        "schema_version": 1,
        "object": "simulate_rack",
        "policy": options.policy,
        "seed": options.seed,
        "site": options.site,
        "hosts": list(site.rack.hosts),
        "outages": len(ordered),
        "excess_s_mean": round(sum(excess) / count, 3),
        "excess_s_p95": round(excess[min(len(excess) - 1, int(0.95 * count))], 3) if excess else 0.0,
        "loss_s_mean": round(sum(one.loss_s for one in ordered) / count, 3),
        "tiers": [of_tier(at) for at in range(len(ordered[0].tiers))] if ordered else [],
        "hosts_judged": sum(one.hosts for one in ordered),
        "planning_dirty_hosts": sum(one.lost for one in ordered),
        "planning_dirty_outages": [{"seed": one.seed, "reproduce": again(one.seed)} for one in ordered if one.lost][
            :MOST_TOLD
        ],
        "invariant_violations": [
            {"seed": one.seed, "violation": violation, "reproduce": again(one.seed)}
            for one in ordered
            for violation in one.violations
        ],
    }
