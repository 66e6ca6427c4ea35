"""Is a UPS good to power a host on from? What the core's own fusion makes of its sources, and nothing less."""

from typing import Final

from powerguard.core.fusion import is_fresh, is_stable, lose, observe, plausible
from powerguard.core.model import Feed, Supply
from powerguard.core.policy import Policy
from powerguard.core.readings import Reading, SourceFailed
from powerguard.sentinel import decide
from powerguard.settings.schema import SourceOptions

_MISSES: Final = 3


def policy_of(ups: str, sources: list[SourceOptions]) -> Policy:
    """Return as much of a policy as fusion needs."""
    stale_s = _MISSES * max(1.0, *(source.poll_s + source.timeout_s for source in sources))
    return Policy(boot_id="", ups=ups, sources=len(sources), stale_s=stale_s)


def enter(policy: Policy, feed: Feed, event: Reading | SourceFailed) -> Feed:
    """Enter a reading or a failed poll. After a silence nothing of before counts: utility has to hold anew."""
    if isinstance(event, SourceFailed):
        feed = lose(policy, feed, event)
        return feed if feed.lost_since_s is None else Feed(lost_since_s=feed.lost_since_s)
    last = feed.reading
    if last is not None and event.at_s - last.at_s > policy.stale_s:
        feed = Feed()
    return observe(policy, feed, plausible(event))


def unread(policy: Policy, feed: Feed, now_s: float) -> str:
    """Return why nobody knows how the UPS is; empty where it is read."""
    if feed.reading is None:
        return "not read" if feed.lost_since_s is None else f"not read for {now_s - feed.lost_since_s:.0f} s"
    return "" if is_fresh(policy, feed, now_s) else f"not read for {now_s - feed.reading.at_s:.0f} s"


def supply(policy: Policy, feed: Feed, now_s: float, *, stable_s: float, charge_pct: float) -> decide.Supply:
    """Say what the UPS is good for. stable_s: how long utility must hold; charge_pct: what the battery must hold."""
    why = _absent(policy, feed, now_s)
    if why:
        return decide.Supply(good=False, why=why)
    why = _wanting(policy, feed, now_s, stable_s, charge_pct)
    return decide.Supply(good=not why, why=why, utility_since_s=feed.since_s)


def _absent(policy: Policy, feed: Feed, now_s: float) -> str:
    """Why what hangs on it may have no power, now or in a moment; empty where utility is there."""
    reading = feed.reading
    if (why := unread(policy, feed, now_s)) or reading is None:
        return why
    if feed.countdown_at_s is not None or _counts_down(feed, reading):
        return "a countdown to output off runs"
    if feed.fsd_at_s is not None or reading.forced_shutdown:
        return "a forced shutdown stands (NUT: FSD)"
    if feed.supply is not Supply.UTILITY or feed.suspect:
        return f"on {reading.output_source}"
    return ""


def _wanting(policy: Policy, feed: Feed, now_s: float, stable_s: float, charge_pct: float) -> str:
    """Why it is not good though utility is there."""
    charge = None if feed.reading is None else feed.reading.charge_pct
    if not is_stable(policy, feed, now_s, stable_s=stable_s):
        return f"on utility for {max(now_s - feed.since_s, 0.0):.0f} of {stable_s:g} s"
    if charge_pct > 0.0 and charge is None:
        return "does not tell its charge (charge_pct: 0 asks for none)"
    if charge is not None and charge < charge_pct:
        return f"charge {charge:.0f} of {charge_pct:g} %"
    return ""


def _counts_down(feed: Feed, reading: Reading) -> bool:
    """A delay that is only set stands still; until that is seen it may as well run."""
    if reading.output_off_in_s is None:
        return False
    last = feed.previous
    return last is None or last.output_off_in_s is None or reading.output_off_in_s < last.output_off_in_s
