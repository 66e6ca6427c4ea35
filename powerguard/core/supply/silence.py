"""A UPS that fell silent: lost with the power, or only lost?

Its card hangs on a switch, and a switch without a UPS of its own goes dark with utility. So a UPS that reported utility
and fell silent is presumed to be on battery, since then, if another part went down within the same 30 s: another feed,
or this host's own link or gateway. That presumption ends when it answers again, with any answer; a network that is back
does not show that utility is. A UPS that has not answered since the daemon started is not presumed to be in any state:
links come up late at boot.

A UPS that fell silent on battery, watched through the loads of the others: does it live?

Where one UPS is enough, another one with utility carries the host, and training may not go on as long as it would be
overloaded when the silent one ends (`Supplied.overloaded`). If the silent one never answers again, that would never
end. But the others show it: its load moves to them when it ends. So it lives while their loads have not risen since it
was last heard; and one that lives for longer than a new, full battery lasts at its load has utility. Neither is enough
alone: a battery may end at any time, and a load does not show its source (docs/decisions/0055). Of one that the host
cannot do without, the host that runs shows that it lives.
"""

from dataclasses import replace

from powerguard.core.energy import account
from powerguard.core.energy.budget import usable
from powerguard.core.model.events import NetworkSeen, Reading
from powerguard.core.model.policy import FeedPolicy, Policy
from powerguard.core.model.state import Feed, NetworkLoss, State, Supplied, Supply, Watch, Witness

PRESUMED_S = 30.0
"""A UPS that falls silent within this time of another failure failed with it."""
OVERLOADED = 1.0
"""A UPS that takes over another's load and then has more than this share of its rating switches off."""
NETWORK = "network"
"""The second witness of a battery that is presumed because this host's own network went."""
_MOST_GONE = 16


def seen(state: State, event: NetworkSeen) -> State | None:
    """Enter a report on this host's own network; None if it is not new."""
    rest = tuple(each for each in state.gone if each.part != event.part)
    if event.up:
        return None if rest == state.gone else replace(state, gone=rest)
    if rest != state.gone:
        return None
    heard_s = event.at_s if event.heard_s is None else min(event.heard_s, event.at_s)
    return replace(state, gone=(*rest, NetworkLoss(part=event.part, heard_s=heard_s, at_s=event.at_s))[-_MOST_GONE:])


def gone_with(gone: tuple[NetworkLoss, ...], feed: Feed) -> tuple[NetworkLoss, ...]:
    """Return the parts of this host's network that went with a UPS that said utility; () while it answers."""
    lost_s = feed.lost_since_s
    if lost_s is None or feed.supply is not Supply.UTILITY:
        return ()
    return tuple(each for each in gone if each.heard_s - PRESUMED_S <= lost_s <= each.at_s + PRESUMED_S)


def presumed(gone: tuple[NetworkLoss, ...], upses: tuple[Supplied, ...], each: Supplied) -> Supplied:
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


def on_battery(gone: tuple[NetworkLoss, ...], feed: Feed) -> Feed:
    """Presume battery of the only UPS, where it fell silent with this host's network; else the same feed."""
    went, lost_s = gone_with(gone, feed), feed.lost_since_s
    if not went or lost_s is None:
        return feed
    since_s = min(lost_s, *(each.at_s for each in went))
    if feed.reading is not None:
        since_s = max(since_s, feed.reading.at_s)  # It said utility then.
    return replace(feed, supply=Supply.BATTERY, since_s=since_s, proven_by=NETWORK)


def parts(gone: tuple[NetworkLoss, ...]) -> str:
    """Name them, for people."""
    return " and ".join(each.part for each in gone)


OUTLIVED = 1.25
"""Energy, in full new batteries, that a silent one must have outlived: data sheets are cautious by less than that."""
_RISE, _LEAST_RISE = 0.25, 0.02
"""A load has risen when it is higher by so much of what would be taken over, and by so much of the rating."""
_VISIBLE = 0.08
"""What would be taken over must be as much of the rating as this: less would be overlooked."""
_MOVED = (0.75, 1.35)
"""A load has moved to another UPS when that one's load rises by so much of what it would take over."""
_MOVED_S = 15.0
"""A rise that comes later than this after the last word of the silent one needs a battery that is used up."""
_STEP_S = 5.0
"""How long after a step of one load another report may be older than it: shares are taken before and after."""
_GAP_S = 30.0
"""A load that falls between two readings further apart may have risen in between."""


def watched(
    policy: Policy, upses: tuple[Supplied, ...], each: Supplied, now_s: float, arrived: Feed | None
) -> Supplied:
    """Enter the others' reports into what is known of one of several feeds. arrived: the feed with the new report."""
    old = each.watch
    if each.feed is arrived:
        return replace(each, watch=_begun(policy, upses, each))
    if old is None or not old.others:
        # Its load was never known: the host itself is what shows that it lives.
        lives = _host_outlived(policy, upses, each, now_s)
        return each if lives is (old is not None) else replace(each, watch=_SHOWN_BY_THE_HOST if lives else None)
    watch = _gone_on(policy, upses, each, old, now_s)
    load = each.battery.load if _is_heard(each) else _load(policy, upses, each, watch)
    if load != each.battery.load:
        each = replace(each, battery=replace(each.battery, load=load))
    return each if watch is old else replace(each, watch=watch)


_SHOWN_BY_THE_HOST = Watch(load=0.0, others=(), lives=True)


def _host_outlived(policy: Policy, upses: tuple[Supplied, ...], each: Supplied, now_s: float) -> bool:
    """Say whether the host needs this silent one, and has run for longer than any battery lasts at the least load."""
    feed_policy, reading = policy_of(policy, each.ups), each.feed.reading
    if feed_policy is None or reading is None or _is_heard(each) or not _is_needed(policy, upses, each):
        return False
    if any(_is_heard(other) and other.feed.supply is Supply.BATTERY for other in upses):
        return False
    points = account.table(feed_policy.policy, each.battery)
    return bool(points) and now_s - reading.at_s >= OUTLIVED * account.tau_s(points, _VISIBLE)


def _is_needed(policy: Policy, upses: tuple[Supplied, ...], each: Supplied) -> bool:
    """Say whether the host would have too few power supplies without it: while the host runs, it has not ended."""
    return sum(_supplies(policy, other.ups) for other in upses if other is not each) < policy.minimum_supplies


def lives(each: Supplied) -> bool:
    """Say whether it is silent, and must have utility all the same."""
    return each.watch is not None and each.watch.lives


def has_ended(upses: tuple[Supplied, ...], each: Supplied) -> bool:
    """Say whether it is silent and others have taken over its load: it no longer carries any.

    While another UPS could not carry the training load alone, it counts as before: a pause that cures the overload
    must not bring training back.
    """
    return has_moved(each) and not any(other.overloaded for other in upses)


def has_moved(each: Supplied) -> bool:
    """Say whether it is silent and others carry its load already."""
    if each.watch is None or _is_heard(each) or lives(each):
        return False
    return any(one.took for one in each.watch.others)


def has_taken(other: Supplied, each: Supplied) -> bool:
    """Say whether `other` carries already what `each`, which is on battery, carried when it was last heard."""
    return each.watch is not None and any(one.took and one.ups == other.ups for one in each.watch.others)


def _begun(policy: Policy, upses: tuple[Supplied, ...], each: Supplied) -> Watch | None:
    """Begin at the newest word of this one: what do the others carry as it speaks?"""
    load, old = each.battery.load, each.watch
    if not load:
        return None
    known = {} if old is None else {one.ups: one.share for one in old.others}
    others = []
    for other in upses:
        if other.ups == each.ups:
            continue
        newest = _reported_load(policy, other) if _is_heard(other) else 0.0
        share = known.get(other.ups)
        if newest > 0.0 and (share is None or not (_steps(each, other) or _steps(other, each))):
            share = load / newest
        if share is not None:
            # A UPS that is silent at this moment carries its proportional part.
            others.append(Witness(ups=other.ups, share=share, least=newest if newest > 0.0 else load / share))
    return Watch(load=load, others=tuple(others)) if others else None


def _steps(each: Supplied, other: Supplied) -> bool:
    """Say whether its load has made a step so lately that the other one may not have reported it."""
    step_at_s, reading = each.battery.step_at_s, other.feed.reading
    return step_at_s is not None and reading is not None and reading.at_s - step_at_s < _STEP_S


def _gone_on(policy: Policy, upses: tuple[Supplied, ...], each: Supplied, watch: Watch, now_s: float) -> Watch:
    """Continue while it is silent: have the others' loads risen, and what would it have spent on battery by now?"""
    known = {other.ups: other for other in upses if _is_heard(other)}
    again = any(other.feed.supply is Supply.BATTERY for other in known.values())
    may_end = again or each.feed.supply is Supply.BATTERY
    takers = {one.ups: _taken(policy, upses, each, one) for one in watch.others if one.ups in known}
    others = tuple(
        _looked(policy, each, known[one.ups], one, takers[one.ups], may_end=may_end) if one.ups in known else one
        for one in watch.others
    )
    if others != watch.others:
        watch = replace(watch, others=others)
    feed_policy, reading = policy_of(policy, each.ups), each.feed.reading
    points = () if feed_policy is None else account.table(feed_policy.policy, each.battery)
    counts = each.feed.supply is Supply.BATTERY or each.presumed
    if _is_heard(each) or not counts or reading is None or not points:
        return watch
    load = min(one.share * one.least for one in others)
    since_s = reading.at_s if watch.counted_s is None else watch.counted_s
    spent = watch.spent + max(0.0, now_s - since_s) / account.tau_s(points, load)
    would_show = max(takers.values(), default=0.0) >= _VISIBLE
    shown = would_show and not any(one.risen for one in others if one.ups in known)
    seen = shown or _is_needed(policy, upses, each)
    if again or not (watch.lives or (seen and spent >= OUTLIVED)):
        return replace(watch, spent=spent, counted_s=now_s, lives=False)
    # Until another one goes to battery again, the others' loads are those next to a UPS that lives.
    others = tuple(replace(one, least=_newest(policy, known, one), risen=False) for one in others)
    return Watch(load=watch.load, others=others, counted_s=now_s, lives=True)


def _load(policy: Policy, upses: tuple[Supplied, ...], each: Supplied, watch: Watch) -> float:
    """Return its load if it lives: its part of the same host, more and less with the others.

    Where theirs falls, training has paused: its own falls by as much for each power supply, and not in proportion, for
    other hosts may hang on it.
    """
    known = {other.ups: other for other in upses if _is_heard(other)}
    loads = []
    for one in watch.others if watch.load else ():
        if one.ups not in known:
            continue
        newest, before = _newest(policy, known, one), watch.load / one.share
        fallen = (before - newest) * _supplies(policy, each.ups) / max(1, _supplies(policy, one.ups))
        load = one.share * newest
        loads.append(max(load, watch.load - fallen) if newest < before else max(watch.load, min(OVERLOADED, load)))
    return max(loads, default=watch.load)


def _looked(policy: Policy, each: Supplied, other: Supplied, one: Witness, taken: float, *, may_end: bool) -> Witness:
    """Look at the newest load of a witness: has it risen, or may it have done so before it fell, while unheard?

    taken: what it takes over when `each`, the silent one, ends. may_end: one of them is on battery.
    """
    reading, previous, newest = other.feed.reading, other.feed.previous, _reported_load(policy, other)
    if reading is None or newest <= 0.0:
        return one
    rise = max(_RISE * taken, _LEAST_RISE)
    unseen = previous is not None and reading.at_s - previous.at_s > _GAP_S
    risen = newest > one.least + rise or (unseen and newest < one.least - rise)
    took = one.took or (may_end and _moved(policy, each, reading, newest - one.least, taken))
    if newest >= one.least and not risen and took is one.took:
        return one
    return replace(one, least=min(one.least, newest), risen=one.risen or risen, took=took)


def _moved(policy: Policy, each: Supplied, reading: Reading, rise: float, taken: float) -> bool:
    """Say whether a rise of a witness's load is what the silent one carried. A host that draws more rises otherwise.

    Its size must fit, and its time: at the last word of the silent one, or when its battery is used up.
    """
    last = each.feed.reading
    if last is None or taken < _LEAST_RISE or not _MOVED[0] * taken <= rise <= _MOVED[1] * taken:
        return False
    left = each.battery.left
    return reading.at_s - last.at_s <= _MOVED_S or (left is not None and usable(policy, left) <= 0.0)


def _taken(policy: Policy, upses: tuple[Supplied, ...], each: Supplied, one: Witness) -> float:
    """Return what this one would take over: by power supplies, of what the silent one carries at the least."""
    rest = sum(_supplies(policy, other.ups) for other in upses if other.ups != each.ups)
    return one.share * one.least * _supplies(policy, one.ups) / max(1, rest)


def _newest(policy: Policy, known: dict[str, Supplied], one: Witness) -> float:
    newest = _reported_load(policy, known[one.ups]) if one.ups in known else 0.0
    return newest if newest > 0.0 else one.least


def _reported_load(policy: Policy, other: Supplied) -> float:
    """Return the newest load of a UPS; 0 if its newest reading has none."""
    feed_policy, reading = policy_of(policy, other.ups), other.feed.reading
    newest = None if feed_policy is None or reading is None else account.reported_load(feed_policy.policy, reading)
    return 0.0 if newest is None else newest


def _is_heard(each: Supplied) -> bool:
    return each.feed.lost_since_s is None


def _supplies(policy: Policy, ups: str) -> int:
    feed_policy = policy_of(policy, ups)
    return 0 if feed_policy is None else feed_policy.supplies


def policy_of(policy: Policy, ups: str) -> FeedPolicy | None:
    """Return what the settings say of one of several feeds; None where they do not name it."""
    return next((feed_policy for feed_policy in policy.feeds if feed_policy.policy.ups == ups), None)
