"""What must hold of several feeds, worked out anew from what each of them has told: no sum of the core is used.

A feed carries the host when it answers, says utility, and needs no bypass for it. One that falls silent within 30 s of
another's transfer, or of this host's own network, went with the power: until it answers it counts as on battery, or
until it has outlived every battery, with the others at no more than they carried.
"""

import math

from powerguard.core.model import State, Step, Supplied, Supply
from powerguard.core.policy import Policy
from powerguard.core.readings import OutputSource
from powerguard.sim.world.violation import hold

_TOGETHER_S = 30.0
_ENDLESS_S = 30 * 86400.0
_CARRIES_NOBODY = (OutputSource.BYPASS, OutputSource.OFF, OutputSource.UNKNOWN)


def check_feeds(policy: Policy, before: State, answer: Step) -> None:
    """Ask every invariant of several feeds. Raises Violation."""
    state = answer.state
    known = {each.ups: each for each in before.upses}
    hold({each.ups for each in state.upses} >= known.keys(), "no feed is forgotten")
    for each in state.upses:
        _check_silent(state, each, known.get(each.ups))
        if _outlived(each):
            _check_outlived(policy, state, each, known.get(each.ups))
    _check_word(policy, before, state)
    lost = [each.feed.lost_since_s is not None for each in state.upses]
    hold(state.feed.lost_since_s is None or all(lost), "the host hears nothing only when no feed answers")
    if state.battery is not before.battery:
        _check_accounts(state)
    if state.feed.reading is not None and state.feed.reading is not before.feed.reading:
        told = [each.feed.reading.charge_pct for each in state.upses if each.feed.reading is not None]
        least = min((charge for charge in told if charge is not None), default=None)
        hold(state.feed.reading.charge_pct == least, "the charge that is told is that of the least full")


def check_restored(stored: State, state: State) -> None:
    """Ask of a state that was restored whether every feed is in it, with what was used of its battery."""
    for was in stored.upses:
        each = next((each for each in state.upses if each.ups == was.ups), None)
        hold(each is not None, "no feed is forgotten")
        if each is not None:
            hold(was.battery.used is None or each.battery.used is not None, "nobody forgets what was used of a battery")


def _check_word(policy: Policy, before: State, state: State) -> None:
    """An outage of the host is what its feeds make of it, and begins when the last of those went that it needs."""
    supplies = {mine.policy.ups: mine.supplies for mine in policy.feeds}
    on_battery = [each for each in state.upses if each.feed.supply is Supply.BATTERY and not _outlived(each)]
    carrying = sum(supplies[each.ups] for each in state.upses if _carries(each))
    if on_battery and state.feed.supply is Supply.UTILITY:
        hold(carrying >= policy.minimum_supplies, "in an outage of one feed only those that are seen to carry count")
    if state.feed.supply is Supply.BATTERY and not any(each.overloaded for each in state.upses):
        hold(carrying < policy.minimum_supplies, "enough feeds on utility are no outage")
    if state.feed.supply is Supply.BATTERY and before.feed.supply is not Supply.BATTERY and on_battery:
        last_s = max(each.feed.since_s for each in on_battery)
        hold(state.feed.since_s >= last_s, "an outage begins with the last transfer that it took")


def _carries(each: Supplied) -> bool:
    """Say whether it is seen to carry its part. A test of a battery is none of this: its input may be there or not."""
    feed = each.feed
    if _outlived(each):
        return True
    if feed.reading is None or feed.lost_since_s is not None or feed.reading.output_source in _CARRIES_NOBODY:
        return False
    return feed.supply is Supply.UTILITY


def _check_silent(state: State, each: Supplied, was: Supplied | None) -> None:
    lost_s = each.feed.lost_since_s
    if lost_s is None:
        hold(not each.presumed, "who answers is believed, and nothing is presumed of him")
        return
    stays = was is not None and was.presumed and was.feed.lost_since_s is not None
    others = [other for other in state.upses if other.ups != each.ups and other.feed.supply is Supply.BATTERY]
    with_others = any(abs(other.feed.since_s - lost_s) <= _TOGETHER_S for other in others)
    with_network = each.feed.supply is Supply.UTILITY and any(
        part.heard_s - _TOGETHER_S <= lost_s <= part.at_s + _TOGETHER_S for part in state.gone
    )
    if stays or with_others or with_network:
        hold(each.presumed, "what fell silent with the power is presumed to be on battery until it answers")


def _outlived(each: Supplied) -> bool:
    return each.watch is not None and each.watch.lives


def _check_outlived(policy: Policy, state: State, each: Supplied, was: Supplied | None) -> None:
    """A silent one has utility only where its battery must have ended, and nothing else says that utility is gone."""
    hold(each.feed.lost_since_s is not None, "who answers is believed, and nothing is presumed of him")
    others = [other for other in state.upses if other.ups != each.ups and other.feed.lost_since_s is None]
    hold(all(other.feed.supply is not Supply.BATTERY for other in others), "who is silent goes with who is heard to go")
    if was is not None and _outlived(was):
        return
    hold(
        any(other.feed.supply is Supply.UTILITY for other in others),
        "somebody must be seen to carry no more than before",
    )
    shortest_s = min((seconds for mine in policy.feeds for _, seconds in mine.policy.runtime_table), default=0.0)
    told_s = math.inf if each.feed.reading is None else each.feed.reading.at_s
    hold(state.battery.at_s - told_s > shortest_s, "a silent one must have outlived a new battery")


def _check_accounts(state: State) -> None:
    """Energy is counted of every feed on battery, heard or not."""
    now_s = state.battery.at_s
    for each in state.upses:
        if (each.feed.supply is Supply.BATTERY or each.presumed) and not _outlived(each):
            hold(each.battery.at_s >= now_s - 1e-6, "the energy of every feed on battery is counted")
    lefts = [each.battery.left for each in state.upses if each.battery.left is not None]
    if state.battery.left is not None and lefts:
        hold(min(lefts) - 1e-6 <= state.battery.left <= max(lefts) + 1e-6, "what is left together is between them")
    if state.feed.supply is not Supply.BATTERY:
        endless = any(tau_s >= _ENDLESS_S for _, tau_s in state.battery.composed)
        hold(not endless, "before an outage the sums are those of one that takes every feed")
