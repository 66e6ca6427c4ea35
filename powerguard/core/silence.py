"""A UPS that fell silent: lost with the power, or only lost?

Its card hangs on a switch, and a switch without a UPS of its own goes dark with utility. So a UPS that said utility and
fell silent is presumed to be on battery, since then, where something else went within the same 30 s: another feed, or
this host's own link or gateway. That presumption ends when it answers again, with whatever it says; that the network
is back proves nothing of utility.

One that has told nothing since the daemon began is not presumed to be anything: links come up late at boot.
"""

from powerguard.core.frozen import replace
from powerguard.core.heard import Gone
from powerguard.core.model import Feed, State, Supplied, Supply
from powerguard.core.readings import NetworkSeen

PRESUMED_S = 30.0
"""What falls silent this close to something else that goes, went with it."""
NETWORK = "network"
"""The second witness of a battery that is presumed because this host's own network went."""
_MOST_GONE = 16


def seen(state: State, event: NetworkSeen) -> State | None:
    """Enter what is seen of this host's own network; None where it is no news."""
    rest = tuple(each for each in state.gone if each.part != event.part)
    if event.up:
        return None if rest == state.gone else replace(state, gone=rest)
    if rest != state.gone:
        return None
    heard_s = event.at_s if event.heard_s is None else min(event.heard_s, event.at_s)
    return replace(state, gone=(*rest, Gone(part=event.part, heard_s=heard_s, at_s=event.at_s))[-_MOST_GONE:])


def gone_with(gone: tuple[Gone, ...], feed: Feed) -> tuple[Gone, ...]:
    """Return the parts of this host's network that went with a UPS that said utility; () while it answers."""
    lost_s = feed.lost_since_s
    if lost_s is None or feed.supply is not Supply.UTILITY:
        return ()
    return tuple(each for each in gone if each.heard_s - PRESUMED_S <= lost_s <= each.at_s + PRESUMED_S)


def presumed(gone: tuple[Gone, ...], upses: tuple[Supplied, ...], each: Supplied) -> Supplied:
    """Presume battery of one of several feeds that fell silent with the power, until it answers again."""
    lost_s = each.feed.lost_since_s
    is_presumed = lost_s is not None and (
        each.presumed
        or bool(gone_with(gone, each.feed))
        or any(
            other.feed.supply is Supply.BATTERY and abs(other.feed.since_s - lost_s) <= PRESUMED_S for other in upses
        )
    )
    return each if is_presumed is each.presumed else replace(each, presumed=is_presumed)


def on_battery(gone: tuple[Gone, ...], feed: Feed) -> Feed:
    """Presume battery of the only UPS, where it fell silent with this host's network; else the same feed."""
    went, lost_s = gone_with(gone, feed), feed.lost_since_s
    if not went or lost_s is None:
        return feed
    since_s = min(lost_s, *(each.at_s for each in went))
    if feed.reading is not None:
        since_s = max(since_s, feed.reading.at_s)  # It said utility then.
    return replace(feed, supply=Supply.BATTERY, since_s=since_s, proven_by=NETWORK)


def parts(gone: tuple[Gone, ...]) -> str:
    """Name them, for people."""
    return " and ".join(each.part for each in gone)
