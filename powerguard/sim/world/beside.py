"""What the daemon hears beside the UPS: this host's own network, and another UPS that feeds the same host.

The network may go with the power, and every source with it: then only the kernel tells that the link went. The other
UPS is of the same make and as full, and carries the same share of the host: both end together, so that the truth is
that of one battery, and what the core makes of two can be held against it. It may fall silent for a while. Where the
host needs both, the other UPS may hang on another circuit, which keeps its utility: the host ends with the first then.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from powerguard.core.events import Event
from powerguard.core.frozen import replace
from powerguard.core.readings import NetworkSeen, OutputSource, Reading, SourceFailed
from powerguard.sim.world.outages import Cut
from powerguard.sim.world.site import FaultSite
from powerguard.sim.world.streams import stream, uniform

TWIN = "twin"
LINK = "link sim0"
_MISSES_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideFacts:
    """The facts of one outage.

    network: (from, to) in which this host's link is down; None: it stays. twin: there is another UPS; needed: power
    supplies that the host needs of its two. apart: its utility stays. silent: (from, to) in which it tells nothing.
    """

    network: tuple[float, float] | None = None
    twin: bool = False
    needed: int = 1
    apart: bool = False
    silent: tuple[float, float] = (0.0, 0.0)

    def is_cut_off(self, now_s: float) -> bool:
        """Say whether this host's network is down now."""
        return self.network is not None and self.network[0] <= now_s < self.network[1]


def draw_beside(seed: int, faults: FaultSite, cuts: tuple[Cut, ...]) -> BesideFacts:
    """Draw the network and the other UPS. A switch takes a while to be there again after the power."""
    network, twin = stream(seed, "network"), stream(seed, "twin")
    goes, back_s = network.random() < faults.network_lost_share, uniform(network, faults.network_back_s)
    there, needed = twin.random() < faults.twin_share, twin.choice((1, 2))
    is_apart = stream(seed, "twin apart").random() < faults.twin_apart_share
    is_silent, at_s, lasts_s = twin.random() < 0.5, twin.uniform(-2.0, 300.0), uniform(twin, faults.source_lost_s)
    return BesideFacts(
        network=(cuts[0].begin_s, cuts[0].end_s + back_s) if goes else None,
        twin=there,
        needed=needed,
        apart=is_apart and needed > 1,
        silent=(at_s, at_s + lasts_s) if is_silent else (0.0, 0.0),
    )


class Beside:
    """It at work, for one life of the daemon."""

    def __init__(self, facts: BesideFacts, now_s: float) -> None:
        """Begin at now_s: a link that is down by then was never seen there."""
        self._facts = facts
        self._link: bool | None = None if facts.is_cut_off(now_s) else True

    def tell(self, reading: Reading, now_s: float) -> Iterator[Event]:
        """Yield what is told now. reading: what the UPS says, in the daemon's clock; now_s: the world's time."""
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
    """Return what a UPS at the same load says whose utility has stayed, and to which nobody has said anything."""
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
