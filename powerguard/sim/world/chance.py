"""What is drawn by chance for one outage: its cuts, the host's network, another UPS, a second source.

Each question of chance has a generator of its own (`stream`). So switching one fault off does not move the others, and
what happens at a moment does not depend on how often a policy has asked before.

Cuts: bins of the EPRI survey as it is quoted for data centres (ASPLOS'14, "Underprovisioning backup power
infrastructure"), log-uniform inside each. A quarter of them strikes again after about two minutes.

The network may go with the power, and every source with it: then only the kernel reports that the link went. The other
UPS is of the same make and as full, and carries the same share of the host, so that the truth is that of one battery.
It may fall silent for a while. If the host needs both, the other one may hang on another circuit, which keeps utility.

The second one reports what the UPS says `lag_s` later, as upsd does with what its driver read last. From `at_s` on it
may be frozen, stuck, silent or forged.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import NamedTuple

from powerguard.core.model.events import Event, NetworkSeen, OutputSource, Reading, SourceFailed
from powerguard.sim.world.site import FaultSite, OutageSite


def stream(seed: int, concern: str) -> Random:
    """Return the generator of one concern of one outage; the same two always give the same numbers."""
    return Random(f"{concern}/{seed}")  # A text is hashed whole: neighbouring seeds have nothing in common.


def log_uniform(chance: Random, low: float, high: float) -> float:
    """Return a number between low and high, every factor equally likely."""
    return float(low * (high / low) ** chance.random())


def uniform(chance: Random, bounds: tuple[float, float]) -> float:
    """Return a number between the two bounds."""
    low, high = bounds
    return low + (high - low) * chance.random()


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


TWIN = "twin"
LINK = "link sim0"
_MISSES_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SurroundingFacts:
    """The facts of one outage.

    network: (from, to) in which this host's link is down; None: it stays. twin: there is another UPS; needed: power
    supplies that the host needs of its two. apart: its utility stays. silent: (from, to) in which it is silent.
    """

    network: tuple[float, float] | None = None
    twin: bool = False
    needed: int = 1
    apart: bool = False
    silent: tuple[float, float] = (0.0, 0.0)

    def is_cut_off(self, now_s: float) -> bool:
        """Say whether this host's network is down now."""
        return self.network is not None and self.network[0] <= now_s < self.network[1]


def draw_surroundings(seed: int, faults: FaultSite, cuts: tuple[Cut, ...]) -> SurroundingFacts:
    """Draw the network and the other UPS. A switch takes a while to be there again after the power."""
    network, twin = stream(seed, "network"), stream(seed, "twin")
    goes, back_s = network.random() < faults.network_lost_share, uniform(network, faults.network_back_s)
    has_twin, needed = twin.random() < faults.twin_share, twin.choice((1, 2))
    is_apart = stream(seed, "twin apart").random() < faults.twin_apart_share
    is_silent, at_s, lasts_s = twin.random() < 0.5, twin.uniform(-2.0, 300.0), uniform(twin, faults.source_lost_s)
    return SurroundingFacts(
        network=(cuts[0].begin_s, cuts[0].end_s + back_s) if goes else None,
        twin=has_twin,
        needed=needed,
        apart=is_apart and needed > 1,
        silent=(at_s, at_s + lasts_s) if is_silent else (0.0, 0.0),
    )


class OtherUpses:
    """It at work, for one life of the daemon."""

    def __init__(self, facts: SurroundingFacts, now_s: float) -> None:
        """Begin at now_s: a link that is down by then was never seen there."""
        self._facts = facts
        self._link: bool | None = None if facts.is_cut_off(now_s) else True

    def report(self, reading: Reading, now_s: float) -> Iterator[Event]:
        """Yield what is reported now. reading: what the UPS says, in the daemon's clock; now_s: the world's time."""
        facts = self._facts
        up = not facts.is_cut_off(now_s)
        if facts.network is not None and up is not self._link and (self._link is not None or up):
            self._link = up
            yield NetworkSeen(at_s=reading.at_s, part=LINK, up=up)
        if not facts.twin:
            return
        since_s = facts.silent[0] if facts.silent[0] <= now_s < facts.silent[1] else None
        if facts.network is not None and not up:
            since_s = facts.network[0]
        if since_s is None:
            yield _on_utility(replace(reading, ups=TWIN)) if facts.apart else replace(reading, ups=TWIN)
        else:
            lost = now_s - since_s >= _MISSES_S
            yield SourceFailed(at_s=reading.at_s, ups=TWIN, source=reading.source, reason="no answer", lost=lost)


def _on_utility(reading: Reading) -> Reading:
    """Return what a UPS at the same load says whose utility has stayed, and which has no order."""
    return replace(
        reading,
        output_source=OutputSource.UTILITY,
        runtime_s=None,
        charge_pct=None if reading.charge_pct is None else 100.0,
        on_battery_s=None if reading.on_battery_s is None else 0.0,
        input_present=None if reading.input_present is None else True,
        low_battery=False,
        output_off_in_s=None,
        forced_shutdown=False,
    )


NAME = "second"
_FORGED_RUNTIME_S = 12.0


class SourceFault(StrEnum):
    """What is wrong with it, from its moment on."""

    NOTHING = "nothing"
    FROZEN = "frozen"
    """It repeats its last answer: a hung driver."""
    STUCK_BATTERY = "stuck_battery"
    """It says battery, with the gauges of before: a flag that is never cleared."""
    STUCK_UTILITY = "stuck_utility"
    SILENT = "silent"
    FORGED = "forged"
    """A forger answers in its place that everything is over; the first source cannot be forged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondSourceFacts:
    """lag_s: it is late by so much. ill, at_s, lasts_s: what is wrong with it, since when, for how long.

    reordered: of each two readings it reports the newer one first.
    """

    lag_s: float
    ill: SourceFault = SourceFault.NOTHING
    at_s: float = 0.0
    lasts_s: float = 0.0
    reordered: bool = False

    def hides_the_dark(self, at_s: float) -> bool:
        """Say whether it reports utility that is not there: to a host without another source, that is the truth."""
        return self.ill in (SourceFault.STUCK_UTILITY, SourceFault.FROZEN) and 0.0 <= at_s - self.at_s < self.lasts_s


def draw_second(seed: int, faults: FaultSite) -> SecondSourceFacts | None:
    """Draw whether there is one, and how it is."""
    chance = stream(seed, "second source")
    presence, is_ill = chance.random(), chance.random()
    lag_s, ill = (
        uniform(chance, faults.second_lag_s),
        chance.choice([each for each in SourceFault if each is not SourceFault.NOTHING]),
    )
    at_s, lasts_s = chance.uniform(-10.0, 400.0), uniform(chance, faults.second_ill_s)
    if presence >= faults.second_share:
        return None
    reordered = stream(seed, "second order").random() < faults.second_reordered_share
    if is_ill >= faults.second_ill_share:
        return SecondSourceFacts(lag_s=lag_s, reordered=reordered)
    return SecondSourceFacts(lag_s=lag_s, ill=ill, at_s=at_s, lasts_s=lasts_s, reordered=reordered)


class SecondSource:
    """It at work, for one boot of the host."""

    def __init__(self, facts: SecondSourceFacts) -> None:
        """Nothing seen yet."""
        self._facts = facts
        self._seen: deque[Reading] = deque()
        self._newest: Reading | None = None
        self._kept: Reading | None = None
        self._turn = 0

    def report(self, reading: Reading, now_s: float) -> Reading | SourceFailed | None:
        """Return what this source makes of what the UPS says now. None: it has nothing to report now.

        reading: the UPS's answer, in the daemon's clock. now_s: the world's time.
        """
        reported = self._report(reading, now_s)
        if not self._facts.reordered or not isinstance(reported, Reading):
            return reported
        # Kept, reported, then the kept one after it: of three readings one is reported in vain.
        self._turn = (self._turn + 1) % 3
        if self._turn == 1:
            self._kept = reported
            return None
        return reported if self._turn == 2 else self._kept

    def _report(self, reading: Reading, now_s: float) -> Reading | SourceFailed | None:
        facts = self._facts
        is_ill = facts.ill is not SourceFault.NOTHING and 0.0 <= now_s - facts.at_s < facts.lasts_s
        self._seen.append(reading)
        if is_ill and facts.ill is SourceFault.SILENT:
            lost = now_s - facts.at_s >= _MISSES_S
            return SourceFailed(at_s=reading.at_s, ups=reading.ups, source=NAME, reason="no answer", lost=lost)
        if not is_ill or facts.ill is SourceFault.FORGED:
            while self._seen and self._seen[0].at_s <= reading.at_s - facts.lag_s:
                self._newest = self._seen.popleft()
        reported = self._newest
        if reported is None:
            return None
        reported = replace(reported, at_s=reading.at_s, source=NAME, authenticated=False)
        match facts.ill if is_ill else SourceFault.NOTHING:
            case SourceFault.STUCK_BATTERY:
                return replace(reported, output_source=OutputSource.BATTERY, on_battery_s=None, input_present=None)
            case SourceFault.STUCK_UTILITY:
                return replace(reported, output_source=OutputSource.UTILITY, on_battery_s=None, input_present=None)
            case SourceFault.FORGED:
                return replace(
                    reported,
                    output_source=OutputSource.BATTERY,
                    on_battery_s=now_s - facts.at_s,
                    runtime_s=_FORGED_RUNTIME_S,
                    charge_pct=3.0,
                    low_battery=True,
                )
            case _:
                return reported
