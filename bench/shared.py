"""Sixteen hosts of three tiers on one UPS: what tiers are worth, and that no host is lost by planning.

The same simulated outages are played with powerguard on every host, with and without tiers, with the nut model's
defaults, and with powerguard on half of the hosts. A tier weighs three times as much as the one below it. Excess is the
weighted training lost beyond what a plan would lose that knows the outage beforehand.
"""

import multiprocessing
import statistics
from functools import partial
from typing import Final

from bench.figure import Figure, quantile
from powerguard.sim.world.many import cores
from powerguard.sim.world.rack import Kind, RackPlan, RackSample, sample
from powerguard.sim.world.site import DrillSite, Site

SEED: Final = 7
OUTAGES: Final = 2000
QUICK: Final = 50
SITE: Final = Site(drill=DrillSite(done=True))
FLEETS: Final = {
    "tiers": RackPlan(),
    "no tiers": RackPlan(ordered=False),
    "nut": RackPlan(kind=Kind.NUT),
    "half without powerguard": RackPlan(others_share=0.5),
}
GOALS: Final = {"no tiers": 2.0, "nut": 4.0}
TIERS: Final = (0, 1, 2)


def play(seed: int, fleet: str) -> RackSample:
    """Play one outage."""
    return sample(seed, SITE, FLEETS[fleet])


def run(*, quick: bool) -> list[Figure]:
    """Play every fleet."""
    return table(QUICK if quick else OUTAGES)


def table(outages: int) -> list[Figure]:
    """Play so many outages with every fleet, print the table, return the figures."""
    head = ("fleet", "excess s mean", "median", "worst", "loss s mean", *(f"tier {tier} s" for tier in TIERS))
    head = (*head, "lost by planning %", "violations")
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    figures: list[Figure] = []
    means: dict[str, float] = {}
    with multiprocessing.get_context("spawn").Pool(cores()) as pool:
        for fleet in FLEETS:
            seeds = range(SEED, SEED + outages)
            played = pool.map(partial(play, fleet=fleet), seeds, chunksize=5)
            excess = [each.excess_s for each in played]
            means[fleet] = statistics.fmean(excess)
            lost = 100.0 * sum(each.lost for each in played) / sum(each.hosts for each in played)
            tiers = (statistics.fmean(each.tiers[tier].loss_s for each in played) for tier in TIERS)
            numbers = [
                means[fleet],
                quantile(excess, 0.5),
                max(excess),
                statistics.fmean(each.loss_s for each in played),
            ]
            violations = [violation for each in played for violation in each.violations]
            cells = [f"{number:.1f}" for number in (*numbers, *tiers)]
            print(f"| {fleet} | {' | '.join(cells)} | {lost:.2f} | {len(violations)} |", flush=True)
            for violation in violations[:5]:
                print(violation)
            figures.append(Figure(name=f"weighted excess, {fleet}", unit="s/outage", values=tuple(excess)))
            bar = "0.0" if FLEETS[fleet].kind is Kind.POWERGUARD else ""
            figures.append(Figure(name=f"lost by planning, {fleet}", unit="% of hosts", values=(lost,), bar=bar))
    for fleet, goal in GOALS.items():
        times = means[fleet] / max(means["tiers"], 1e-9)
        figures.append(Figure(name=f"{fleet} / tiers", unit="times", values=(times,), bar=f">= {goal:g}"))
    return figures
