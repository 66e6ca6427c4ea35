"""Several feeds of one host: UPSes that each carry some of its power supplies.

Each UPS is known by itself, with the same fusion and the same account as a lone one; what they are together,
`composed` says. Here is what enters them, and what is asked of them one by one.
"""

from collections.abc import Callable

from powerguard.core import account, agreement, fusion, silence, watch
from powerguard.core.budget import outlasts
from powerguard.core.composed import compose, word_of
from powerguard.core.frozen import replace
from powerguard.core.model import Battery, Feed, State, Supplied, Supply
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.readings import Reading, SourceFailed
from powerguard.core.watch import policy_of


def take(policy: Policy, feed: Feed, battery: Battery, reading: Reading) -> tuple[Feed, Battery]:
    """Enter a reading of one UPS into its feed and its account; the same feed where it changes nothing."""
    new = fusion.observe(policy, feed, reading)
    if new is feed:
        return feed, battery
    told = new.reading or reading  # What all its sources say together, where there are several.
    draining, drained = fusion.is_draining(new), fusion.is_draining(feed)
    if not drained:
        # The short way leaves the account behind by some seconds; those were seconds on utility.
        until_s = reading.at_s if feed.reading is None else feed.reading.at_s
        battery = account.advance(policy, battery, until_s, draining=False)
    return new, account.enter(policy, battery, new, told, draining=draining, drained=draining or drained)


def enter(policy: Policy, state: State, reading: Reading) -> State | None:
    """Enter a reading of the UPS, or of one of several; None where it changes nothing."""
    if not policy.feeds:
        feed, battery = take(policy, state.feed, state.battery, reading)
        return None if feed is state.feed else replace(state, feed=feed, battery=battery)
    mine = policy_of(policy, reading.ups)
    if mine is None:
        return None
    known = of(state, reading.ups) or _unheard(mine, reading.at_s)
    feed, battery = take(mine.policy, known.feed, known.battery, reading)
    if feed is known.feed:
        return None
    upses = _with(state.upses, replace(known, feed=feed, battery=battery))
    return compose(policy, state, upses, reading.at_s, feed)


def lose(policy: Policy, state: State, failure: SourceFailed) -> State | None:
    """Enter that a source is lost; None where this is no news."""
    if not policy.feeds:
        feed = fusion.lose(policy, state.feed, failure)
        return None if feed is state.feed else replace(state, feed=feed)
    mine = policy_of(policy, failure.ups)
    if mine is None:
        return None
    known = of(state, failure.ups) or _unheard(mine, failure.at_s)
    feed = fusion.lose(mine.policy, known.feed, failure)
    if feed is known.feed:
        return None
    upses = _with(state.upses, replace(known, feed=feed))
    return compose(policy, state, upses, failure.at_s, None)


def presume(policy: Policy, state: State, now_s: float) -> State:
    """Presume battery of what fell silent with this host's own network; the same state where nothing did."""
    if policy.feeds:
        return compose(policy, state, state.upses, now_s, None) if state.upses else state
    feed = silence.on_battery(state.gone, state.feed)
    if feed is state.feed:
        return state
    return replace(state, feed=feed, battery=account.advance(policy, state.battery, feed.since_s, draining=False))


def lost_since_s(state: State, reading: Reading) -> float | None:
    """Since when the source of this reading had been lost before it; None where it answered."""
    known = of(state, reading.ups) if state.upses else None
    return agreement.lost_since_s(state.feed if known is None else known.feed, reading.source)


def advance(policy: Policy, state: State, now_s: float) -> State:
    """Bring the account up to `now_s` without a reading, on battery."""
    if not policy.feeds:
        return replace(state, battery=account.advance(policy, state.battery, now_s, draining=True))
    return compose(policy, state, state.upses, now_s, None)


def adopt(policy: Policy, state: State, now_s: float) -> State:
    """Fit a stored state to the feeds of the settings: one may have become several, or several one."""
    if not policy.feeds:
        if not state.upses:
            return state
        mine = of(state, policy.ups)
        kept = (Feed(since_s=now_s), Battery(at_s=now_s, health=policy.health))
        feed, battery = kept if mine is None else (mine.feed, mine.battery)
        return replace(state, upses=(), feed=feed, battery=battery)
    upses = tuple(each for each in state.upses if policy_of(policy, each.ups) is not None)
    heard = None if state.feed.reading is None else policy_of(policy, state.feed.reading.ups)
    if not state.upses and heard is not None:
        upses = (Supplied(ups=heard.policy.ups, feed=state.feed, battery=state.battery),)
    return compose(policy, state, upses, now_s, None)


def with_battery(
    policy: Policy, state: State, ups: str, change: Callable[[Policy, Battery], Battery], now_s: float
) -> State:
    """Change what is known of the battery of one UPS, or with ups "" of every one."""
    if not policy.feeds:
        return replace(state, battery=change(policy, state.battery))
    changed = []
    for each in state.upses:
        mine = policy_of(policy, each.ups)
        named = mine is not None and ups in ("", each.ups)
        changed.append(replace(each, battery=change(mine.policy, each.battery)) if mine and named else each)
    return compose(policy, state, tuple(changed), now_s, None)


def rebooted(
    policy: Policy, state: State, upses: tuple[Supplied, ...], carried: Callable[[Policy, Feed, Battery], Battery]
) -> State:
    """Return the state of the next boot with every UPS in it: no feed yet, and its battery as `carried` over."""
    if not policy.feeds:
        return state
    at_s = state.feed.since_s
    again = tuple(_again(each, at_s, carried(_own(policy, each.ups), each.feed, each.battery)) for each in upses)
    return compose(policy, state, again, at_s, None)


def _own(policy: Policy, ups: str) -> Policy:
    mine = policy_of(policy, ups)
    return policy if mine is None else mine.policy


def _again(each: Supplied, at_s: float, battery: Battery) -> Supplied:
    return Supplied(ups=each.ups, feed=Feed(since_s=at_s, utility_seen=each.feed.utility_seen), battery=battery)


def of(state: State, ups: str) -> Supplied | None:
    """What is known of one UPS; None where it has not been heard of, or is the only one."""
    return next((each for each in state.upses if each.ups == ups), None)


def each_alone(policy: Policy, state: State) -> list[tuple[Policy, State]]:
    """Return every UPS as if it were the only one, with its own policy; one pair where it is."""
    if not policy.feeds:
        return [(policy, state)]
    known = [(mine, of(state, mine.policy.ups)) for mine in policy.feeds]
    return [
        (mine.policy, replace(state, feed=each.feed, battery=each.battery, upses=()))
        for mine, each in known
        if each is not None
    ]


def contradicts_commit(policy: Policy, state: State, now_s: float, stop_s: float) -> bool:
    """Say whether the host would have the power supplies that it needs, by news of utility or a word beyond forgery.

    A lone source that can be forged is denied by any other one that says utility, for as long as the battery lasts by
    what it cannot forge: it alone must not power the host off. stop_s: what the stop needs.
    """
    if not policy.feeds:
        return _contradicts(policy, state.feed, state.battery, now_s, stop_s)
    supplies = 0
    for mine in policy.feeds:
        each = of(state, mine.policy.ups)
        if each is None:
            continue
        carries = word_of(state.upses, each) is Supply.UTILITY
        if carries or _contradicts(mine.policy, each.feed, each.battery, now_s, stop_s):
            supplies += mine.supplies
    return supplies >= policy.minimum_supplies


def _contradicts(policy: Policy, feed: Feed, battery: Battery, now_s: float, stop_s: float) -> bool:
    if agreement.contradicts_commit(policy, feed, now_s):
        return True
    denial = agreement.denied_by(policy, feed, now_s)
    return denial is not None and outlasts(policy, battery, denial, now_s - feed.since_s, stop_s)


def told_again(policy: Policy, state: State, now_s: float) -> bool:
    """Say whether a second reading of the same UPS says battery as well as the newest."""
    if not policy.feeds:
        return agreement.told_again(policy, state.feed, now_s)
    pairs = [(mine, of(state, mine.policy.ups)) for mine in policy.feeds]
    return any(
        each is not None and each.feed.supply is Supply.BATTERY and agreement.told_again(mine.policy, each.feed, now_s)
        for mine, each in pairs
    )


def redundancy_lost(state: State) -> str:
    """Name the feeds without which the host still has what it needs, and that do not carry it; "" where none."""
    if state.feed.supply is not Supply.UTILITY:
        return ""
    gone = [
        each
        for each in state.upses
        if watch.lives(each) or (word_of(state.upses, each) is not Supply.UTILITY and _is_known(each))
    ]
    return ", ".join(f"{each.ups} ({_why(state.upses, each)})" for each in gone)


# --- One feed -----------------------------------------------------------------------------------------------------


def _is_known(each: Supplied) -> bool:
    """Say whether it has told anything, or is known not to answer: before that, nothing is missing."""
    return each.feed.reading is not None or each.feed.lost_since_s is not None


def _unheard(mine: FeedPolicy, at_s: float) -> Supplied:
    battery = Battery(at_s=at_s, health=mine.policy.health)
    return Supplied(ups=mine.policy.ups, feed=Feed(since_s=at_s), battery=battery)


def _with(upses: tuple[Supplied, ...], new: Supplied) -> tuple[Supplied, ...]:
    if all(each.ups != new.ups for each in upses):
        return (*upses, new)
    return tuple(new if each.ups == new.ups else each for each in upses)


def _why(upses: tuple[Supplied, ...], each: Supplied) -> str:
    if watch.lives(each):
        return "silent; it carries its part for longer than a battery lasts"
    if word_of(upses, each) is Supply.BATTERY:
        return "silent since the power or the network went" if each.presumed else "on battery"
    reading = each.feed.reading
    return "silent" if reading is None or each.feed.lost_since_s is not None else str(reading.output_source)
