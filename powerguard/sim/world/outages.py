"""When is utility gone? The lengths that outages have, the second strike, flapping and sags.

Lengths: bins of the EPRI survey as it is quoted for data centres (ASPLOS'14, "Underprovisioning backup power
infrastructure"), log-uniform inside each. A quarter of them strikes again after about two minutes.
"""

from random import Random
from typing import NamedTuple

from powerguard.sim.world.site import OutageSite
from powerguard.sim.world.streams import log_uniform, stream, uniform

_SHORTEST_GAP_S = 10.0
_MOST_DIPS = 6


class Cut(NamedTuple):
    """Utility is gone from begin_s to end_s, in seconds since the first cut of this outage."""

    begin_s: float
    end_s: float


def sample(seed: int, site: OutageSite, *, faults: bool) -> tuple[Cut, ...]:
    """Return the cuts of one outage, ascending; the first begins at 0. faults: utility may also flap."""
    lengths = stream(seed, "outage length")
    cuts = [Cut(0.0, _length_s(lengths, site))]
    again = stream(seed, "second strike")
    while len(cuts) <= site.most_restrikes and again.random() < site.restrike_share:
        gap_s = max(_SHORTEST_GAP_S, site.restrike_after_s * again.lognormvariate(0.0, site.restrike_spread))
        begin_s = cuts[-1].end_s + gap_s
        cuts.append(Cut(begin_s, begin_s + _length_s(again, site)))
    flaps = stream(seed, "flapping")
    if faults and flaps.random() < site.flapping_share:
        cuts = _flapping(flaps, site, cuts)
    return tuple(cuts)


def _length_s(chance: Random, site: OutageSite) -> float:
    if chance.random() < site.sag_share:
        return log_uniform(chance, *site.sag_s)
    at = chance.random() * sum(site_bin.share for site_bin in site.bins)
    for site_bin in site.bins:
        at -= site_bin.share
        if at <= 0.0:
            break
    return log_uniform(chance, site_bin.from_s, site_bin.to_s)


def _flapping(chance: Random, site: OutageSite, cuts: list[Cut]) -> list[Cut]:
    """Put some dips before the outage: utility comes and goes before it is gone."""
    at_s, dips = 0.0, []
    for _ in range(chance.randint(2, _MOST_DIPS)):
        end_s = at_s + uniform(chance, site.dip_s)
        dips.append(Cut(at_s, end_s))
        at_s = end_s + uniform(chance, site.between_dips_s)
    return dips + [Cut(at_s + cut.begin_s, at_s + cut.end_s) for cut in cuts]
