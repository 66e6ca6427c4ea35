"""The decision against what people use today: the same simulated outages for every policy, and no other faults.

The world is that of `powerguard simulate --no-faults`; each row changes what it names. The goals compare the first
three rows with the best of fixed, nut and apcupsd in the same row. Excess is what was lost beyond the oracle; the bound
is what nobody can beat, since it knows everything and keeps no margin.
"""

from collections.abc import Mapping
from typing import Final

from bench.figure import Figure
from powerguard.sim.world.many import play_many
from powerguard.sim.world.report import Sample, SimulationOptions, report
from powerguard.sim.world.site import DrillSite, FaultSite, HostSite, ReturnSite, Site, TrainerSite, UpsSite

SEED: Final = 7
OUTAGES: Final = 2000
QUICK: Final = 200
OTHERS: Final = ("fixed", "nut", "apcupsd")
_CAP: Final = DrillSite(done=True, cap=True)
_DRILL: Final = DrillSite(done=True)
ROWS: Final[Mapping[str, Site]] = {
    "with drill and GPU cap": Site(drill=_CAP),
    "with drill": Site(drill=_DRILL),
    "out of the box": Site(),
    "pause 15 s late": Site(drill=_CAP, trainer=TrainerSite(pause_late_s=15.0)),
    "pause 60 s late": Site(drill=_CAP, trainer=TrainerSite(pause_late_s=60.0)),
    "5 % of trainers never pause": Site(drill=_CAP, trainer=TrainerSite(never_pauses_share=0.05)),
    "the same, signals: none": Site(
        drill=_CAP, host=HostSite(signals=False), trainer=TrainerSite(never_pauses_share=0.05)
    ),
    "and a sentinel": Site(drill=_CAP, returns=ReturnSite(sentinel_share=1.0)),
    "and a clock that wakes": Site(drill=_CAP, returns=ReturnSite(rtc_share=1.0)),
    "and an output that cycles": Site(drill=_CAP, returns=ReturnSite(output_share=1.0, rtc_share=1.0)),
    "and every power-on method": Site(
        drill=_CAP, returns=ReturnSite(output_share=1.0, rtc_share=1.0, sentinel_share=1.0, late_share=1.0)
    ),
    "50 % charge at start": Site(drill=_CAP, ups=UpsSite(charge=(0.5, 0.5))),
    "health 20 % too high (falsified)": Site(drill=DrillSite(done=True, cap=True, health_factor=1.2)),
    "runtime glitches": Site(drill=_CAP, faults=FaultSite(glitches_always=True, glitch_rate=0.03)),
    "50 % load": Site(drill=_CAP, host=HostSite(load=0.5)),
    "100 % load": Site(drill=_CAP, host=HostSite(load=1.0)),
    "90 s checkpoint": Site(drill=_CAP, trainer=TrainerSite(checkpoint_median_s=90.0)),
    "180 s checkpoint, saved every 300 s": Site(
        drill=_CAP, trainer=TrainerSite(checkpoint_median_s=180.0, local_every_s=300.0)
    ),
    "300 s checkpoint, saved every 300 s": Site(
        drill=_DRILL, trainer=TrainerSite(checkpoint_median_s=300.0, local_every_s=300.0)
    ),
    "600 s checkpoint, saved every 300 s": Site(
        drill=_DRILL, trainer=TrainerSite(checkpoint_median_s=600.0, local_every_s=300.0)
    ),
    "180 s checkpoint, saved every 1,800 s": Site(
        drill=_DRILL, trainer=TrainerSite(checkpoint_median_s=180.0, local_every_s=1800.0)
    ),
    "300 s checkpoint, saved every 1,800 s": Site(
        drill=_DRILL, trainer=TrainerSite(checkpoint_median_s=300.0, local_every_s=1800.0)
    ),
    "600 s checkpoint, saved every 1,800 s": Site(
        drill=_DRILL, trainer=TrainerSite(checkpoint_median_s=600.0, local_every_s=1800.0)
    ),
    "weak load drop (80 %, 60 %)": Site(drill=_CAP, host=HostSite(capped_load=0.8, paused_load=0.6)),
}
GOALS: Final = {"with drill and GPU cap": 5.0, "with drill": 2.5, "out of the box": 1.0}
_HEAD: Final = (
    "row",
    "policy",
    "excess s",
    "p95 s",
    "beyond the bound s",
    "rollback s",
    "planning-dirty %",
    "physics-dirty %",
    "shutdown %",
    "needless %",
    "stranded %",
)

_SECONDS: Final = (
    ("excess", "mean"),
    ("excess", "p95"),
    ("beyond_bound", "mean"),
    ("rollback", "mean"),
)


def run(*, quick: bool) -> list[Figure]:
    """Play every row."""
    return table(QUICK if quick else OUTAGES)


def table(outages: int) -> list[Figure]:
    """Play so many outages in every row, print the table, return the means."""
    figures: list[Figure] = []
    print(f"| {' | '.join(_HEAD)} |\n|{' --- |' * len(_HEAD)}")
    for name, site in ROWS.items():
        played = {policy: _play(site, policy, outages) for policy in (*OTHERS, "powerguard")}
        means: dict[str, float] = {}
        for policy, samples in played.items():
            result = report(samples, _options(policy, outages))
            means[policy] = result["excess_s_mean"]
            shares = [
                100.0 * result[key] / outages
                for key in ("planning_dirty", "physics_dirty", "shutdowns", "needless", "stranded")
            ]
            seconds = [result[f"{key}_s_{how}"] for key, how in _SECONDS]
            numbers = [*seconds, *shares]
            print(f"| {name} | {policy} | {' | '.join(f'{number:.1f}' for number in numbers)} |", flush=True)
            figures.append(Figure(name=f"excess, {name}, {policy}", unit="s/outage", values=(means[policy],)))
            if policy == "powerguard":
                dirty = Figure(
                    name=f"planning-dirty, {name}", unit="%", values=(shares[0],), bar="0.0, but for a falsified health"
                )
                figures.append(dirty)
        if name in GOALS:
            times = min(means[policy] for policy in OTHERS) / max(means["powerguard"], 1e-9)
            label = f"best of the others / powerguard, {name}"
            figures.append(Figure(name=label, unit="times", values=(times,), bar=f">= {GOALS[name]:g}"))
    return figures


def _options(policy: str, outages: int) -> SimulationOptions:
    return SimulationOptions(seed=SEED, outages=outages, policy=policy, faults=False)


def _play(site: Site, policy: str, outages: int) -> list[Sample]:
    return play_many(site, _options(policy, outages))
