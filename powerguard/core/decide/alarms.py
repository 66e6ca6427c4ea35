"""Alarms: conditions that reduce protection. Each is logged once when it begins and once when it ends."""

from collections.abc import Iterator

from powerguard.core.decide.turn import Turn
from powerguard.core.energy import own
from powerguard.core.energy.learning import STEEP
from powerguard.core.model.actions import Level
from powerguard.core.model.events import UNPROTECTED, UNREPORTED, OutputSource, OwnSource, Reading
from powerguard.core.model.state import Feed, Online, Shutdown, State, Supply
from powerguard.core.supply import feeds
from powerguard.core.supply.fusion import CONTRADICTED, LAG_S

_OVER = {
    "unproven_battery": "the UPS reports another output source, or a second witness confirms battery",
    "unprotected": "the UPS no longer reports bypass or eco",
    "output_unknown": "the UPS reports again where its output comes from",
    "battery_contradicted": "the input is gone, the charge falls, or the UPS no longer reports battery",
    "low_on_utility": "the UPS no longer reports a low battery, or an outage has begun",
    "battery_worn": "the UPS no longer asks for a new battery",
    "runtime_steep": "the reported runtime falls no faster than time passes, or the discharge is over",
    CONTRADICTED: "the UPS's output source, input and seconds on battery agree again",
    "overload": "the UPS is no longer overloaded",
    "fsd_at_first": "the UPS no longer reports FSD",
}
"""Every alarm of a single UPS, in the order in which they are logged, with the text for its end."""


def update(turn: Turn, reading: Reading) -> None:
    """Log each alarm that begins or ends with this reading. reading: the merged reading of all sources."""
    state = turn.state
    if state.feed.heard or state.upses or state.alarms:
        _update_several(turn)
    standing = {name: (because, level) for name, because, level in _standing(state, reading)}
    if not standing and not state.alarms:
        return
    for name, over in _OVER.items():
        because, level = standing.get(name, (over, Level.INFO))
        turn.set_alarm(name, because, holds=name in standing, level=level)


def update_own_load(turn: Turn) -> None:
    """Say that a measurement of this host's own load is passed over, what counts in its place, and when it is over."""
    if turn.policy.shared is None or isinstance(turn.state.phase, Shutdown):
        return
    host_load = own.own_load(turn.policy, turn.state, turn.now_s)
    passed_over = () if host_load is None else host_load.passed_over
    because = "what measures this host's own load can be believed again"
    if host_load is not None and passed_over:
        reasons = "; ".join(f"{source}: {why}" for source, why in passed_over)
        because = f"{reasons}; what counts is {_OWN_FROM[host_load.source]}"
    turn.set_alarm("own_load_doubted", because, holds=bool(passed_over))
    if isinstance(turn.state.phase, Online):
        turn.set_alarm("own_load_unmeasured", "the outage is over", holds=False)


_OWN_FROM = {
    OwnSource.BMC: "the BMC's reading",
    OwnSource.PDU: "the PDU's outlets",
    OwnSource.GPU: "the GPUs' power",
    OwnSource.SETTINGS: "own_w of the settings",
    OwnSource.HOSTS: "the UPS's load divided by its hosts",
    OwnSource.UNKNOWN: "nothing: no drop of the load is counted on",
}


def _standing(state: State, reading: Reading) -> Iterator[tuple[str, str, Level]]:
    """Yield the alarms of a single UPS that hold now, and why."""
    feed, source = state.feed, reading.output_source
    if feed.unproven_battery and feed.previous is not None:  # A clock needs two readings to be seen moving.
        because = (
            "the UPS has reported battery since first contact and no second witness confirms it: ignored; check the UPS"
        )
        yield "unproven_battery", because, Level.ERROR
    if source in UNPROTECTED:
        yield "unprotected", f"output_source={source}", Level.WARNING
    elif source in UNREPORTED:
        because = f"output_source={source}: the UPS does not report where its output comes from"
        yield "output_unknown", because, Level.ERROR
    if state.battery.contradicted or any(each.battery.contradicted for each in state.upses):
        because = (
            "the UPS reports battery, but its input is there and its charge is full although a third should be used"
        )
        yield (
            "battery_contradicted",
            f"{because}: the energy account alone does not power the host off; check the UPS",
            Level.ERROR,
        )
    if _is_low_on_utility(state):
        because = "the UPS reports a low battery with utility there: charge it, or check for a loose or worn battery"
        yield "low_on_utility", because, Level.WARNING
    if reading.replace_battery:
        yield "battery_worn", "the UPS asks for a new battery: replace it", Level.WARNING
    discharge = state.battery.model.discharge
    if discharge is not None and discharge.slope is not None and discharge.slope >= STEEP:
        falls = f"the reported runtime falls by {discharge.slope:.1f} s a second"
        yield "runtime_steep", f"{falls}: the battery holds less than the UPS reports", Level.WARNING
    if CONTRADICTED in reading.alarms:
        because = "the UPS does not report battery, but its input is gone and its seconds on battery are counting"
        yield CONTRADICTED, f"{because}: treated as on battery", Level.ERROR
    if reading.overload:
        yield "overload", "the UPS is overloaded", Level.ERROR
    if feed.fsd_at_first:
        because = "FSD stood at first contact, or has cut nothing: ignored on utility; clear it at the UPS's primary"
        yield "fsd_at_first", because, Level.WARNING


def _is_low_on_utility(state: State) -> bool:
    """Say whether two readings of one UPS in a row do. After an outage and in a calibration the guard reports it."""
    if state.guarded_since_s is not None or not isinstance(state.phase, Online):
        return False
    for feed in [each.feed for each in state.upses] or [state.feed]:
        low = [reading for reading in (feed.reading, feed.previous) if reading is not None and reading.low_battery]
        if len(low) == 2 and feed.supply is Supply.UTILITY and not low[0].calibrating:
            return True
    return False


def _update_several(turn: Turn) -> None:
    """Log where several sources or feeds disagree."""
    state = turn.state
    known = [each.feed for each in state.upses] or [state.feed]
    doubted = ", ".join([each.source for feed in known for each in feed.heard if each.doubted])
    disagreeing = [feed for feed in known if _disagrees(feed, turn.now_s)]
    lost = feeds.redundancy_lost(state)
    if not (doubted or disagreeing or lost or state.alarms):
        return
    turn.set_alarm(
        "source_doubted",
        f"{doubted} reports battery, but its charge does not fall and another source sees utility: ignored"
        if doubted
        else "it reports another output source, or a second witness confirms battery",
        holds=bool(doubted),
        level=Level.ERROR,
    )
    turn.set_alarm(
        "sources_disagree",
        "; ".join(_disagreement(feed) for feed in disagreeing) or "the sources agree again",
        holds=bool(disagreeing),
    )
    back = state.feed.supply is Supply.UTILITY
    ended = "every feed is on utility again" if back else "too few power supplies are left, so this is an outage"
    turn.set_alarm(
        "redundancy_lost",
        f"not on utility: {lost}; the host still has the power supplies that it needs" if lost else ended,
        holds=bool(lost),
    )


def _disagrees(feed: Feed, now_s: float) -> bool:
    return feed.disagree_since_s is not None and now_s - feed.disagree_since_s >= LAG_S


def _disagreement(feed: Feed) -> str:
    """What each source of one UPS reports, and which report counts."""
    reports = ", ".join(f"{each.source} reports {each.reading.output_source}" for each in feed.heard if each.reading)
    cautious = feed.reading is not None and feed.reading.output_source is OutputSource.BATTERY
    return f"{reports}: " + ("the more cautious report counts" if cautious else "the authenticated sources count")
