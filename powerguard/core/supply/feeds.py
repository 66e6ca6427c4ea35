"""The feeds of one host: a UPS, or several that each carry some of its power supplies.

A lone UPS is entered as it is (`enter`). Of several, each is known by itself, with the same fusion and the same
account; together they become one feed and one battery again (`compose`), so that no rule notices.

The host is on battery when fewer of its power supplies than it needs have utility, and its battery lasts until fewer
than that live. That moment is played forward (`last_until_s`): the first battery dies, its load moves to the rest, a
rest above 100 % dies as well. A feed that is unknown, off or on bypass is never counted as endless; one that fell
silent with the power (`silence`) is presumed to be on battery, too.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from powerguard.core.energy import account, budget
from powerguard.core.energy.budget import outlasts
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.core.model.policy import FeedPolicy, Policy
from powerguard.core.model.state import Battery, Feed, Online, State, Supplied, Supply
from powerguard.core.supply import fusion, silence
from powerguard.core.supply.silence import OVERLOADED, policy_of

_UpsSupply = Mapping[str, Supply]  # The supply to assume for each feed, by its UPS: see `supply_of`.
_LEAST_S = 0.1
_ALARMING_FIRST = (
    OutputSource.UNKNOWN,
    OutputSource.OFF,
    OutputSource.BYPASS,
    OutputSource.ECO,
    OutputSource.BOOST,
    OutputSource.TRIM,
    OutputSource.UTILITY,
)


# --- What comes in, and what is asked -----------------------------------------------------------------------------


def take(policy: Policy, feed: Feed, battery: Battery, reading: Reading) -> tuple[Feed, Battery]:
    """Enter a reading of one UPS into its feed and its account; the same feed if it makes no change."""
    new = fusion.observe(policy, feed, reading)
    if new is feed:
        return feed, battery
    merged = new.reading or reading  # Merged, if the UPS has several sources.
    draining, drained = fusion.is_draining(new), fusion.is_draining(feed)
    if not drained:
        # The short way leaves the account behind by some seconds; those were seconds on utility.
        until_s = reading.at_s if feed.reading is None else feed.reading.at_s
        battery = account.advance(policy, battery, until_s, draining=False)
    return new, account.enter(policy, battery, new, merged, draining=draining, drained=draining or drained)


def enter(policy: Policy, state: State, reading: Reading) -> State | None:
    """Enter a reading of the UPS, or of one of several; None if it makes no change."""
    if not policy.feeds:
        feed, battery = take(policy, state.feed, state.battery, reading)
        return None if feed is state.feed else replace(state, feed=feed, battery=battery)
    feed_policy = policy_of(policy, reading.ups)
    if feed_policy is None:
        return None
    known = of(state, reading.ups) or _unheard(feed_policy, reading.at_s)
    feed, battery = take(feed_policy.policy, known.feed, known.battery, reading)
    if feed is known.feed:
        return None
    upses = _with(state.upses, replace(known, feed=feed, battery=battery))
    return compose(policy, state, upses, reading.at_s, feed)


def lose(policy: Policy, state: State, failure: SourceFailed) -> State | None:
    """Enter that a source is lost; None if this is not new."""
    if not policy.feeds:
        feed = fusion.lose(policy, state.feed, failure)
        return None if feed is state.feed else replace(state, feed=feed)
    feed_policy = policy_of(policy, failure.ups)
    if feed_policy is None:
        return None
    known = of(state, failure.ups) or _unheard(feed_policy, failure.at_s)
    feed = fusion.lose(feed_policy.policy, known.feed, failure)
    if feed is known.feed:
        return None
    upses = _with(state.upses, replace(known, feed=feed))
    return compose(policy, state, upses, failure.at_s, None)


def presume(policy: Policy, state: State, now_s: float) -> State:
    """Presume battery of what fell silent with this host's own network; the same state if none did."""
    if policy.feeds:
        return compose(policy, state, state.upses, now_s, None) if state.upses else state
    feed = silence.on_battery(state.gone, state.feed)
    if feed is state.feed:
        return state
    return replace(state, feed=feed, battery=account.advance(policy, state.battery, feed.since_s, draining=False))


def lost_since_s(state: State, reading: Reading) -> float | None:
    """Since when the source of this reading had been lost before it; None where it answered."""
    known = of(state, reading.ups) if state.upses else None
    return fusion.lost_since_s(state.feed if known is None else known.feed, reading.source)


def advance(policy: Policy, state: State, now_s: float) -> State:
    """Bring the account up to `now_s` without a reading, on battery."""
    if not policy.feeds:
        return replace(state, battery=account.advance(policy, state.battery, now_s, draining=True))
    return compose(policy, state, state.upses, now_s, None)


def adopt(policy: Policy, state: State, now_s: float) -> State:
    """Fit a stored state to the settings: one feed may have become several, several one, and sources others."""
    if not policy.feeds:
        if not state.upses:
            return replace(state, feed=fusion.without_former(policy, state.feed))
        known = of(state, policy.ups)
        kept = (Feed(since_s=now_s), Battery(at_s=now_s, health=policy.health))
        feed, battery = kept if known is None else (known.feed, known.battery)
        return replace(state, upses=(), feed=fusion.without_former(policy, feed), battery=battery)
    upses = tuple(each for each in state.upses if policy_of(policy, each.ups) is not None)
    feed_policy = None if state.feed.reading is None else policy_of(policy, state.feed.reading.ups)
    if not state.upses and feed_policy is not None:
        upses = (Supplied(ups=feed_policy.policy.ups, feed=state.feed, battery=state.battery),)
    upses = tuple(replace(each, feed=fusion.without_former(_own(policy, each.ups), each.feed)) for each in upses)
    return compose(policy, state, upses, now_s, None)


def with_battery(
    policy: Policy, state: State, ups: str, change: Callable[[Policy, Battery], Battery], now_s: float
) -> State:
    """Change what is known of the battery of one UPS, or with ups "" of every one."""
    if not policy.feeds:
        return replace(state, battery=change(policy, state.battery))
    changed = []
    for each in state.upses:
        feed_policy = policy_of(policy, each.ups)
        named = feed_policy is not None and ups in ("", each.ups)
        changed.append(
            replace(each, battery=change(feed_policy.policy, each.battery)) if feed_policy and named else each
        )
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
    feed_policy = policy_of(policy, ups)
    return policy if feed_policy is None else feed_policy.policy


def _again(each: Supplied, at_s: float, battery: Battery) -> Supplied:
    return Supplied(ups=each.ups, feed=fusion.rebooted(each.feed, at_s), battery=battery)


def of(state: State, ups: str) -> Supplied | None:
    """What is known of one UPS; None where it has not been heard of, or is the only one."""
    return next((each for each in state.upses if each.ups == ups), None)


def each_alone(policy: Policy, state: State) -> list[tuple[Policy, State]]:
    """Return every UPS as if it were the only one, with its own policy; one pair where it is."""
    if not policy.feeds:
        return [(policy, state)]
    known = [(feed_policy, of(state, feed_policy.policy.ups)) for feed_policy in policy.feeds]
    return [
        (feed_policy.policy, replace(state, feed=each.feed, battery=each.battery, upses=()))
        for feed_policy, each in known
        if each is not None
    ]


def reported_load(policy: Policy, state: State, reading: Reading) -> float | None:
    """Load by the newest reading, a share of the rating; of several UPSes the mean of those that carry the host."""
    return _load(policy, state.upses) if policy.feeds else account.reported_load(policy, reading)


def contradicts_commit(policy: Policy, state: State, now_s: float, stop_s: float) -> bool:
    """Say whether the host would have the power supplies that it needs, by news of utility or authenticated reports.

    A lone source that can be forged is denied by any other one that says utility, for as long as the battery lasts by
    what it cannot forge: it alone must not power the host off. stop_s: what the stop needs.
    """
    if not policy.feeds:
        return _contradicts(policy, state.feed, state.battery, now_s, stop_s)

    def carries(own_policy: Policy, each: Supplied) -> bool:
        if supply_of(state.upses, each) is Supply.UTILITY or _may_carry(state.upses, each):
            return True
        return _contradicts(own_policy, each.feed, each.battery, now_s, stop_s)

    return are_fed(policy, state, carries)


def has_supplies(policy: Policy, state: State) -> bool:
    """Say whether UPSes that report utility feed as many power supplies as the host needs."""
    return bool(policy.feeds) and are_fed(policy, state, lambda _, each: supply_of(state.upses, each) is Supply.UTILITY)


def are_fed(policy: Policy, state: State, carries: Callable[[Policy, Supplied], bool]) -> bool:
    """Say whether the UPSes for which `carries` holds feed as many power supplies as the host needs."""
    known = ((feed_policy, of(state, feed_policy.policy.ups)) for feed_policy in policy.feeds)
    fed = (
        feed_policy.supplies for feed_policy, each in known if each is not None and carries(feed_policy.policy, each)
    )
    return sum(fed) >= policy.minimum_supplies


def _may_carry(upses: tuple[Supplied, ...], each: Supplied) -> bool:
    """Say whether its battery is only presumed, and all others report utility: powered off, the host would stay off."""
    others = [other.feed for other in upses if other is not each]
    return each.presumed and all(feed.supply is Supply.UTILITY and feed.lost_since_s is None for feed in others)


def _contradicts(policy: Policy, feed: Feed, battery: Battery, now_s: float, stop_s: float) -> bool:
    if fusion.contradicts_commit(policy, feed, now_s):
        return True
    denial = fusion.denied_by(policy, feed, now_s)
    return denial is not None and outlasts(policy, battery, denial, now_s - feed.since_s, stop_s)


def battery_reported_twice(policy: Policy, state: State, now_s: float) -> bool:
    """Say whether a second reading of the same UPS says battery as well as the newest."""
    if not policy.feeds:
        return fusion.battery_reported_twice(policy, state.feed, now_s)
    pairs = [(feed_policy, of(state, feed_policy.policy.ups)) for feed_policy in policy.feeds]
    return any(
        each is not None
        and each.feed.supply is Supply.BATTERY
        and fusion.battery_reported_twice(feed_policy.policy, each.feed, now_s)
        for feed_policy, each in pairs
    )


def redundancy_lost(state: State) -> str:
    """Name the feeds without which the host still has what it needs, and that do not carry it; "" where none."""
    if state.feed.supply is not Supply.UTILITY:
        return ""
    lost = [
        each
        for each in state.upses
        if silence.lives(each) or (supply_of(state.upses, each) is not Supply.UTILITY and _is_known(each))
    ]
    return ", ".join(f"{each.ups} ({_why(state.upses, each)})" for each in lost)


def _is_known(each: Supplied) -> bool:
    """Say whether it has reported, or is known not to answer: before that, it is not missing."""
    return each.feed.reading is not None or each.feed.lost_since_s is not None


def _unheard(feed_policy: FeedPolicy, at_s: float) -> Supplied:
    battery = Battery(at_s=at_s, health=feed_policy.policy.health)
    return Supplied(ups=feed_policy.policy.ups, feed=Feed(since_s=at_s), battery=battery)


def _with(upses: tuple[Supplied, ...], new: Supplied) -> tuple[Supplied, ...]:
    if all(each.ups != new.ups for each in upses):
        return (*upses, new)
    return tuple(new if each.ups == new.ups else each for each in upses)


def _why(upses: tuple[Supplied, ...], each: Supplied) -> str:
    if silence.lives(each):
        return "silent; it has carried its part for longer than a battery lasts"
    if supply_of(upses, each) is Supply.BATTERY:
        return "silent since the power or the network failed" if each.presumed else "on battery"
    reading = each.feed.reading
    return "silent" if reading is None or each.feed.lost_since_s is not None else str(reading.output_source)


def unreported_since_s(state: State) -> float | None:
    """Say since when it is not known whether utility is there, where the last that was known was utility; else None.

    No source answers, or one does and reports "off", or "unknown" and nothing that shows battery.
    """
    feed = state.feed
    if feed.supply is Supply.UTILITY:
        return feed.lost_since_s
    if feed.supply is Supply.BATTERY or feed.reading is None or not feed.utility_seen:
        return None
    if fusion.is_unknown_on_battery(feed.reading) or feed.awaits_witness:
        return None
    # One of several that went to battery and reports "off" now: its battery may have ended, and another one's carries.
    return None if any(each.feed.supply is Supply.BATTERY for each in state.upses) else feed.since_s


# --- What they are together ---------------------------------------------------------------------------------------


def compose(policy: Policy, state: State, upses: tuple[Supplied, ...], now_s: float, arrived: Feed | None) -> State:
    """Return the state with what all feeds are together. arrived: the feed whose reading has just come."""
    upses = tuple(silence.presumed(state.gone, upses, each) for each in upses)
    upses = tuple(silence.watched(policy, upses, each, now_s, arrived) for each in upses)
    ups_supply = _ups_supply(policy, upses)
    if Supply.BATTERY not in ups_supply.values():
        upses = tuple(_advanced(policy, each, now_s, draining=False) if _is_silent(each) else each for each in upses)
    growth = _growth(state)
    upses = tuple(_overloaded(policy, upses, each, ups_supply, growth) for each in upses)
    upses = tuple(_advanced(policy, each, now_s) if ups_supply[each.ups] is Supply.BATTERY else each for each in upses)
    feed = _feed(policy, state.feed, upses, now_s, arrived, ups_supply=ups_supply)
    battery = _battery(policy, state.battery, upses, feed, now_s, ups_supply=ups_supply)
    return replace(state, upses=upses, feed=feed, battery=battery)


# --- One feed among several ---------------------------------------------------------------------------------------


def supply_of(upses: tuple[Supplied, ...], each: Supplied) -> Supply:
    """Supply to assume for this feed; in an outage, unverified utility counts as absent."""
    feed = each.feed
    if silence.lives(each):
        return Supply.UTILITY
    if _carries_nothing(upses, each):
        return Supply.UNKNOWN
    if feed.supply is Supply.BATTERY or each.presumed:
        return Supply.BATTERY
    if feed.supply is not Supply.UTILITY:
        return Supply.UNKNOWN
    if not any(other.feed.supply is Supply.BATTERY for other in upses):
        return Supply.UTILITY
    if _tests_blindly(feed):
        return Supply.BATTERY
    bypassed = feed.reading is not None and feed.reading.output_source is OutputSource.BYPASS
    return Supply.UNKNOWN if bypassed or feed.lost_since_s is not None else Supply.UTILITY


def _ups_supply(policy: Policy, upses: tuple[Supplied, ...]) -> _UpsSupply:
    """Return the supply of each. At the worst, a silent one has been on battery since its last report.

    That holds if it reported utility in this outage. It also holds if the host needs it: the host runs.
    """
    ups_supply = {each.ups: supply_of(upses, each) for each in upses}
    if Supply.BATTERY not in ups_supply.values():
        return ups_supply
    for each in upses:
        if not _is_silent(each) or ups_supply[each.ups] is not Supply.UNKNOWN:
            continue
        rest = sum(_supplies(policy, other) for other in upses if other is not each and _may_live(policy, other))
        if rest < policy.minimum_supplies or _was_heard_in_outage(upses, each):
            ups_supply[each.ups] = Supply.BATTERY
    return ups_supply


def _was_heard_in_outage(upses: tuple[Supplied, ...], each: Supplied) -> bool:
    """Say whether this silent one reported utility after another one had gone to battery, and has not ended since."""
    lost_s = each.feed.lost_since_s
    if lost_s is None or silence.has_ended(upses, each):
        return False
    return any(other.feed.supply is Supply.BATTERY and other.feed.since_s < lost_s for other in upses)


def _may_live(policy: Policy, each: Supplied) -> bool:
    """Say whether it has not fallen silent on battery with its energy used up."""
    left = each.battery.left
    return each.feed.lost_since_s is None or left is None or budget.usable(policy, left) > 0.0


def _is_silent(each: Supplied) -> bool:
    return each.feed.lost_since_s is not None and each.feed.supply is Supply.UTILITY


def _is_off(each: Supplied) -> bool:
    """Say whether its output is off, reported twice: it carries no load, whatever its charge."""
    reading, before = each.feed.reading, each.feed.previous
    if reading is None or before is None or reading.output_source is not OutputSource.OFF:
        return False
    return before.output_source is OutputSource.OFF


def _carries_nothing(upses: tuple[Supplied, ...], each: Supplied) -> bool:
    return _is_off(each) or silence.has_ended(upses, each)


def _tests_blindly(feed: Feed) -> bool:
    """Say whether it tests its battery, and it is unknown whether it could stop."""
    reading = feed.reading
    is_test = reading is not None and (reading.testing or reading.calibrating) and reading.input_present is not True
    return is_test and fusion.is_draining(feed)


def _growth(state: State) -> float:
    """Return by which factor the load grows when training goes on as it did before the outage."""
    before = None if isinstance(state.phase, Online) else state.phase.outage.load_at_start
    load = state.battery.load
    return max(1.0, before / load) if before and load else 1.0


def _overloaded(
    policy: Policy, upses: tuple[Supplied, ...], each: Supplied, ups_supply: _UpsSupply, growth: float
) -> Supplied:
    """Find out whether it takes over more than it can carry when those on battery end; unknown loads are ignored.

    What has moved to it already is in its own load, and counts once. growth: of the load once training goes on.
    """
    going = [other for other in upses if ups_supply[other.ups] is Supply.BATTERY]
    load = each.battery.load
    overloaded = bool(going) and each.overloaded
    if going and not overloaded and load is not None and ups_supply[each.ups] is Supply.UTILITY:
        rest = sum(_supplies(policy, other) for other in upses if ups_supply[other.ups] is Supply.UTILITY)
        to_come = sum(other.battery.load or 0.0 for other in going if not silence.has_taken(each, other))
        taken = to_come * _supplies(policy, each) / max(1, rest)
        overloaded = (load + taken) * growth > OVERLOADED
    return each if overloaded is each.overloaded else replace(each, overloaded=overloaded)


def _advanced(policy: Policy, each: Supplied, now_s: float, *, draining: bool = True) -> Supplied:
    feed_policy = policy_of(policy, each.ups)
    if feed_policy is None:
        return each
    return replace(each, battery=account.advance(feed_policy.policy, each.battery, now_s, draining=draining))


# --- All together -------------------------------------------------------------------------------------------------


def _supplies(policy: Policy, each: Supplied) -> int:
    feed_policy = policy_of(policy, each.ups)
    return 0 if feed_policy is None else feed_policy.supplies


def _falls_short_s(policy: Policy, upses: Iterable[Supplied], at_s: Callable[[Supplied], float | None]) -> float | None:
    """When too few power supplies are left, if each feed goes at its own time; None: enough of them stay."""
    upses = tuple(upses)
    going = [(when, _supplies(policy, each)) for each in upses if (when := at_s(each)) is not None]
    alive = sum(_supplies(policy, each) for each in upses) if going else 0
    for when, supplies in sorted(going):
        alive -= supplies
        if alive < policy.minimum_supplies:
            return when
    return None


def _feed(
    policy: Policy,
    before: Feed,
    upses: tuple[Supplied, ...],
    now_s: float,
    arrived: Feed | None,
    *,
    ups_supply: _UpsSupply,
) -> Feed:
    lasting = [each for each in upses if ups_supply[each.ups] is Supply.UTILITY and not each.overloaded]
    on_utility = sum(_supplies(policy, each) for each in lasting)
    on_battery = [each for each in upses if ups_supply[each.ups] is Supply.BATTERY]
    supply = Supply.UNKNOWN
    if on_utility >= policy.minimum_supplies:
        supply = Supply.UTILITY
    elif on_battery:
        supply = Supply.BATTERY
    since_s = before.since_s if supply is before.supply else _since_s(supply, on_battery, now_s)
    feeds = [each.feed for each in upses]
    short = [each for each in upses if ups_supply[each.ups] is not Supply.UNKNOWN]
    lost = [feed.lost_since_s for feed in feeds if feed.lost_since_s is not None]
    tested = [feed for feed in feeds if feed.test_since_s is not None]
    tested_supplies = sum(_supplies(policy, each) for each in lasting if fusion.is_draining(_standing(each)))
    is_short = on_utility - tested_supplies < policy.minimum_supplies
    if supply is Supply.UTILITY and is_short:
        since_s = now_s  # Utility is there, but a battery carries the host: a test, a calibration, a bare suspicion.
    is_tested = bool(tested) and is_short
    return Feed(
        supply=supply,
        since_s=since_s,
        proven_by=_proven_by(before, on_battery),
        reading=_reading(policy, before.reading, upses, supply, now_s, arrived=arrived, is_tested=is_tested),
        previous=before.previous if arrived is None else arrived.previous,
        suspect=any(feed.suspect and feed.lost_since_s is None for feed in feeds),
        unproven_battery=any(feed.unproven_battery for feed in feeds),
        utility_seen=before.utility_seen or supply is Supply.UTILITY,
        first_charge_pct=None,
        test_since_s=min((feed.test_since_s or now_s for feed in tested), default=None) if is_tested else None,
        lost_since_s=max(lost) if lost and len(lost) == len(policy.feeds) else None,
        low_battery_at_s=_falls_short_s(policy, short, lambda each: _standing(each).low_battery_at_s),
        countdown_at_s=_falls_short_s(policy, short, lambda each: budget.power_off_at_s(_standing(each))),
        fsd_at_first=any(feed.fsd_at_first for feed in feeds),
    )


def _standing(each: Supplied) -> Feed:
    """Return its feed without outdated reports: a UPS that outlived its battery has outlived its reports about it."""
    return Feed() if silence.lives(each) else each.feed


def _proven_by(before: Feed, on_battery: list[Supplied]) -> str:
    proven = [each.feed.proven_by for each in on_battery if each.feed.supply is Supply.BATTERY]
    return next((witness for witness in proven if witness), silence.NETWORK if on_battery else before.proven_by)


def _since_s(supply: Supply, on_battery: list[Supplied], now_s: float) -> float:
    """Since when: of a battery, since the last of those went to it that carry the host now."""
    if supply is not Supply.BATTERY:
        return now_s
    return max(
        each.feed.since_s if each.feed.supply is Supply.BATTERY else each.feed.lost_since_s or now_s
        for each in on_battery
    )


def _reading(
    policy: Policy,
    before: Reading | None,
    upses: tuple[Supplied, ...],
    supply: Supply,
    now_s: float,
    *,
    arrived: Feed | None,
    is_tested: bool,
) -> Reading | None:
    """Return one reading for all of them: what is left of the least full, the load of all, and every alarm."""
    base = before if arrived is None else arrived.reading
    readings = [each.feed.reading for each in upses if each.feed.reading is not None]
    if base is None or not readings:
        return before
    on_battery = [each.reading for each in (u.feed for u in upses) if each.supply is Supply.BATTERY and each.reading]
    output_sources = {each.output_source for each in readings}
    if supply is Supply.BATTERY or (is_tested and OutputSource.BATTERY in output_sources):
        output_source = OutputSource.BATTERY
    else:
        output_source = next((each for each in _ALARMING_FIRST if each in output_sources), OutputSource.UTILITY)
    charges = [each.charge_pct for each in readings if each.charge_pct is not None]
    runtimes = [each.runtime_s for each in on_battery or readings if each.runtime_s is not None]
    watts = [each.watts for each in readings if each.watts is not None]
    load = _load(policy, upses)
    return replace(
        base,
        at_s=base.at_s if arrived is None else max(base.at_s, now_s),
        output_source=output_source,
        charge_pct=min(charges, default=None),
        runtime_s=min(runtimes, default=None),
        load_pct=None if load is None else round(100.0 * load, 3),
        watts=sum(watts) if len(watts) == len(readings) else None,
        input_present=_input(on_battery, readings if is_tested else (), base),
        low_battery=any(each.low_battery for each in readings),
        replace_battery=any(each.replace_battery for each in readings),
        overload=any(each.overload for each in readings),
        testing=is_tested and any(each.testing for each in readings),
        calibrating=is_tested and any(each.calibrating for each in readings),
        forced_shutdown=any(each.forced_shutdown for each in readings),
        output_off_in_s=None,
        alarms=tuple(sorted({alarm for each in readings for alarm in each.alarms})),
    )


def _load(policy: Policy, upses: tuple[Supplied, ...]) -> float | None:
    """Return the mean load of the UPSes that carry the host, by their newest readings; None if none reports it.

    Of a silent one it is the load that the others show.
    """

    def reported(each: Supplied) -> float | None:
        if each.feed.lost_since_s is not None:
            return each.battery.load
        feed_policy = policy_of(policy, each.ups)
        return (
            None
            if feed_policy is None or each.feed.reading is None
            else account.reported_load(feed_policy.policy, each.feed.reading)
        )

    return _mean(policy, _carrying(upses), reported)


def _input(on_battery: list[Reading], tested: Iterable[Reading], base: Reading) -> bool | None:
    """Say whether the input is there: for a UPS in a test its own report counts, whichever source answered last."""
    if any(each.input_present is False for each in on_battery):
        return False
    inputs = {each.input_present for each in tested if each.testing or each.calibrating}
    if not inputs:
        return base.input_present
    return inputs.pop() if len(inputs) == 1 else None


def _battery(
    policy: Policy, before: Battery, upses: tuple[Supplied, ...], feed: Feed, now_s: float, *, ups_supply: _UpsSupply
) -> Battery:
    """Return one battery for all: its energy is their mean, its table what they last together."""
    going = [each for each in upses if ups_supply[each.ups] is Supply.BATTERY]
    staying = [each for each in upses if ups_supply[each.ups] is Supply.UTILITY]
    counted = going if feed.supply is Supply.BATTERY else going + staying
    left = _mean(policy, counted, lambda each: each.battery.left)
    if left is not None and budget.usable(policy, left) <= 0.0:
        # Those that end are left out: with no energy left, the runtime of the others could not be computed.
        counted = going + staying
        left = _mean(policy, counted, lambda each: each.battery.left)
    load = _mean(policy, _carrying(upses), lambda each: each.battery.load)
    composed: tuple[tuple[float, float], ...] = ()
    if left is not None:
        usable = budget.usable(policy, left)
        full = usable <= 0.0  # No energy is left to play, but the table is still needed: that of full batteries.
        lasts = stepped(_lasts_s(policy, upses, feed, now_s, ups_supply=ups_supply, full=full))
        share = budget.usable(policy, 1.0) if full else usable
        carried = load or 1.0  # As for a single UPS: an unreported load counts as full.
        composed = tuple((factor * carried, lasts_s / share) for factor, lasts_s in zip(FACTORS, lasts, strict=True))
    steps = [each.battery.step_at_s for each in upses if each.battery.step_at_s is not None]
    return Battery(
        at_s=max(before.at_s, now_s),
        used=_mean(policy, counted or upses, lambda each: each.battery.used),
        left=left,
        load=load,
        step_at_s=max(steps, default=None),
        health=_mean(policy, counted or upses, lambda each: each.battery.health) or policy.health,
        composed=composed,
        contradicted=bool(going) and all(each.battery.contradicted for each in going),
    )


def _carrying(upses: tuple[Supplied, ...]) -> list[Supplied]:
    """Leave out a UPS whose output is off: what it carried is on the others."""
    return [each for each in upses if not _carries_nothing(upses, each)]


def _mean(policy: Policy, upses: Iterable[Supplied], of: Callable[[Supplied], float | None]) -> float | None:
    """Mean of what is known of them, by power supplies; None if none is known."""
    known = [(_supplies(policy, each), value) for each in upses if (value := of(each)) is not None]
    weight = sum([supplies for supplies, _ in known])
    return sum(supplies * value for supplies, value in known) / weight if weight else None


def _lasts_s(
    policy: Policy, upses: tuple[Supplied, ...], feed: Feed, now_s: float, *, ups_supply: _UpsSupply, full: bool
) -> list[float]:
    """Seconds until too few power supplies live, at each of FACTORS times the load of now: played to the end.

    full: as if each battery were new and full, and no UPS about to cut its output.
    """
    legs: list[FeedCourse] = []
    orphaned = 0.0
    for each in upses:
        feed_policy, supply = policy_of(policy, each.ups), ups_supply[each.ups]
        if feed_policy is None or _is_off(each) or silence.has_moved(each):
            continue
        points = account.table(feed_policy.policy, each.battery)
        endless = supply is Supply.UTILITY and feed.supply is Supply.BATTERY
        blind = not endless and (not points or each.battery.left is None)
        if supply is Supply.UNKNOWN or blind:
            # Its runtime is unknown and counts as zero, but its load is there.
            orphaned += each.battery.load or 0.0
            continue
        energy = 1.0 if full else each.battery.left or 0.0
        left = math.inf if endless else budget.usable(policy, energy)
        cut_at_s = None if full else budget.power_off_at_s(each.feed)
        legs.append(
            FeedCourse(
                supplies=feed_policy.supplies,
                left=left,
                load=account.load_of(each.battery),
                tau_s=_reader(points),
                cut_at_s=math.inf if cut_at_s is None else cut_at_s,
            )
        )
    supplies = sum(leg.supplies for leg in legs)
    needed = max(1, min(policy.minimum_supplies, supplies))  # The host runs, so those that are unknown supply the rest.
    for leg in legs if supplies >= policy.minimum_supplies else ():
        leg.load += orphaned * leg.supplies / supplies
    return [max(_LEAST_S, last_until_s([leg.at(factor) for leg in legs], needed, now_s) - now_s) for factor in FACTORS]


def _reader(points: tuple[tuple[float, float], ...]) -> Callable[[float], float]:
    return lambda load: account.tau_s(points, load) if points else math.inf


# --- How long several batteries last together (docs/decisions/0055) --------------------------------------------

ENDLESS_S = 1e7
"""Enough of them have utility: it lasts as long as that."""
FACTORS = (0.3, 0.45, 0.6, 0.8, 1.0, 1.25)
"""Loads, as shares of the one of now, at which the runtime of all together is played."""


@dataclass(slots=True)
class FeedCourse:
    """One feed while its end is played. left: usable energy; inf: utility. cut_at_s: its UPS cuts its output then."""

    supplies: int
    left: float
    load: float
    tau_s: Callable[[float], float]
    cut_at_s: float

    def at(self, factor: float) -> "FeedCourse":
        """Return it at so many times its load."""
        return FeedCourse(self.supplies, self.left, factor * self.load, self.tau_s, self.cut_at_s)


def stepped(lasts: list[float]) -> list[float]:
    """Lower the last endless one to the first that ends: between the two it is unknown if the rest is overloaded."""
    out = list(lasts)
    for place in range(len(out) - 1):
        if lasts[place] >= ENDLESS_S > lasts[place + 1]:
            out[place] = lasts[place + 1] * FACTORS[place + 1] / FACTORS[place]
    return out


def last_until_s(legs: list[FeedCourse], minimum: int, now_s: float) -> float:
    """Let the legs end one after the other; return when fewer than `minimum` power supplies are left."""
    at_s = now_s
    while sum([leg.supplies for leg in legs]) >= minimum:
        # A look at a table costs more than all else here, and this runs at every reading on battery: one look a leg.
        taus_s = [leg.tau_s(leg.load) for leg in legs]
        ends = [min(at_s + leg.left * tau_s, leg.cut_at_s) for leg, tau_s in zip(legs, taus_s, strict=True)]
        ends_s = min(ends)
        if math.isinf(ends_s):
            return at_s + ENDLESS_S
        if len(legs) > 1:  # The energy of the last one is not needed.
            for leg, tau_s in zip(legs, taus_s, strict=True):
                leg.left = max(0.0, leg.left - (ends_s - at_s) / tau_s)
        at_s = max(at_s, ends_s)
        legs = _without(legs, legs[ends.index(ends_s)])
        while overloaded := [leg for leg in legs if leg.load > OVERLOADED]:
            legs = _without(legs, overloaded[0])
    return at_s


def _without(legs: list[FeedCourse], dead: FeedCourse) -> list[FeedCourse]:
    """Move the load of a dead leg to the others, by their power supplies."""
    rest = [leg for leg in legs if leg is not dead]
    supplies = sum(leg.supplies for leg in rest)
    for leg in rest:
        leg.load += dead.load * leg.supplies / supplies
    return rest
