"""Which hosts stay off with which power-on methods: the same outages for every set of them.

A late reboot, B output, C sentinel, D watchdog, E clock: each is there or not. P: the BMC keeps the policy always-on,
or says so and does not (lies). Then what else a UPS may do with B when utility returns in its countdown, and what is
known of that. All are played without faults, which shows what the methods leave uncovered, and with faults elsewhere:
the daemon is killed, sources fall silent, others order the output off or stop the host, BMCs refuse; but no method
breaks its word. The world is that of `powerguard simulate` after a drill, with a GPU cap.

Wait: seconds from utility's return until the host was on, a mean of the outages in which it was off. Excess: as in
`python -m bench simulated`. Back by: outages in which that switched it on at least once. All three: no faults, P kept.
"""

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import combinations
from typing import Any, Final

from bench.figure import Figure
from powerguard.sim.world.back import Waker
from powerguard.sim.world.many import cores
from powerguard.sim.world.policies import one
from powerguard.sim.world.report import LETTERS, Sample, SimulationOptions, report, sample
from powerguard.sim.world.site import DrillSite, ReturnSite, Site

SEED: Final = 7
OUTAGES: Final = {False: 250, True: 150}
"""So many without faults, and with."""
QUICK: Final = {False: 10, True: 10}
_SHARES: Final = {
    "A": "late_share",
    "B": "output_share",
    "C": "sentinel_share",
    "D": "watchdog_share",
    "E": "rtc_share",
}
_ELSE: Final[Mapping[str, Mapping[str, float]]] = {
    "B aborts": {"aborts_share": 1.0},
    "B aborts, A": {"aborts_share": 1.0, "late_share": 1.0},
    "B stays off": {"stays_off_share": 1.0},
    "B unknown, cycles": {"unknown_share": 1.0},
    "B unknown, aborts, A": {"unknown_share": 1.0, "aborts_share": 1.0, "late_share": 1.0},
    "B unknown, stays off": {"unknown_share": 1.0, "stays_off_share": 1.0},
    "B unknown, stays off, C": {"unknown_share": 1.0, "stays_off_share": 1.0, "sentinel_share": 1.0},
    "B cycles unseen, A": {"hidden_share": 1.0, "late_share": 1.0},
}
"""What is known of the UPS, then what it does, where that is another; unseen: it shows no countdown."""
_HEAD: Final = (
    "power-on methods",
    "stranded %: P",
    "P lies",
    "with faults: P",
    "P lies",
    "wait s",
    "excess s",
    "back by",
)
_AT_ACS_RETURN: Final = frozenset((Waker.POLICY, Waker.OUTPUT))
_COVER: Final = frozenset("CDE")
"""Each of them covers the race for itself, whatever utility does."""


def _sets() -> Iterator[tuple[str, dict[str, float]]]:
    """Every set of the methods, by their letters, and the shares that make it."""
    for count in range(len(_SHARES) + 1):
        for letters in combinations(_SHARES, count):
            yield ", ".join(letters) or "none", {_SHARES[letter]: 1.0 for letter in letters}
    yield from ((name, {"output_share": 1.0, **shares}) for name, shares in _ELSE.items())


SETS: Final[Mapping[str, Mapping[str, float]]] = dict(_sets())


def run(*, quick: bool) -> list[Figure]:
    """Play every set, print the table, return who stayed off."""
    counts, figures = (QUICK if quick else OUTAGES), []
    print(f"| {' | '.join(_HEAD)} (of {counts[False]}) |\n|{' --- |' * len(_HEAD)}")
    # Fresh interpreters, as for any run: nothing of this process is copied into them.
    with ProcessPoolExecutor(cores(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, shares in SETS.items():
            reports = _reports(pool, shares, faults=False, count=counts[False])
            reports += _reports(pool, shares, faults=True, count=counts[True])
            print(_line(name, reports), flush=True)
            bar = "0.0" if _COVER & set(name) and name not in _ELSE else ""
            figures.append(Figure(name=f"stranded, {name}", unit="%", values=(_stranded_pct(reports[0]),), bar=bar))
    return figures


def _reports(
    pool: ProcessPoolExecutor, shares: Mapping[str, float], *, faults: bool, count: int
) -> list[dict[str, Any]]:
    """Return the report with a policy that is kept, and with one that lies."""
    seeds, size = range(SEED, SEED + count), max(1, count // (8 * cores()))
    pairs = pool.map(partial(_played, dict(shares), faults=faults), seeds, chunksize=size)
    options = SimulationOptions(seed=SEED, outages=count, faults=faults)
    return [report(samples, options) for samples in zip(*pairs, strict=True)]


def _played(shares: dict[str, float], seed: int, *, faults: bool) -> tuple[Sample, Sample]:
    """Play one outage with a policy that is kept, and with one that lies, which shows only when AC returns."""
    kept = sample(*one(seed, _site(shares, lies=False), "powerguard", faults=faults))
    if kept.back is not None and not _AT_ACS_RETURN & set(kept.back.by):
        return kept, kept
    return kept, sample(*one(seed, _site(shares, lies=True), "powerguard", faults=faults))


def _site(shares: Mapping[str, float], *, lies: bool) -> Site:
    returns = {"fails_share": 0.0, "lies_share": float(lies), **shares}
    return Site(drill=DrillSite(done=True, cap=True), returns=ReturnSite.model_validate(returns))


def _stranded_pct(result: Mapping[str, Any]) -> float:
    return float(100.0 * result["stranded"] / result["outages"])


def _line(name: str, reports: Sequence[Mapping[str, Any]]) -> str:
    kept = reports[0]
    (whole,) = kept["stranded_by_methods"]
    by = ", ".join(
        f"{letter} {whole['back_by'][method]}" for method, letter in LETTERS.items() if whole["back_by"][method]
    )
    stranded = " | ".join(f"{_stranded_pct(each):.1f}" for each in reports)
    return f"| {name} | {stranded} | {whole['wait_s_mean']:.0f} | {kept['excess_s_mean']:.0f} | {by} |"
