"""Is the host on battery? Two witnesses decide.

Some inverters report "battery" permanently, gauges glitch, SNMP v1 and v2c answers can be forged. So a reading that
reports battery must be supported: by another object of the same answer (seconds on battery, input voltage gone, an
alarm) or by a second reading. A "battery" that was there at first contact and has no other support is not believed: its
repetition is not evidence.

Where a UPS has several sources, `agreement` makes one stream of readings of theirs first.
"""

from dataclasses import replace
from typing import TypeVar

from powerguard.core.model.events import ON_UTILITY, OutputSource, Reading, SourceFailed
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Feed, Heard, Supply
from powerguard.core.supply import several_sources
from powerguard.core.supply.several_sources import (
    SECOND_READING_S,
    Together,
    corrected,
    measured,
    shown,
    supports_battery,
)

SELF_TEST_S = 60.0
"""A self-test that runs longer than this counts as an outage."""
_BATTERY, _UTILITY = Supply.BATTERY, Supply.UTILITY
_SAYS_BATTERY, _SAYS_UTILITY = OutputSource.BATTERY, OutputSource.UTILITY
"""By names of their own: Python 3.11 takes twenty times as long to find a member of an enum."""
_CHARGE_FALL_PCT = 2.0
_LONG_S = 1e7
"""Four months: no runtime, no outage and no countdown is longer."""
SPENT_S = 300.0
"""How long an announcement of a lost source outlives its moment: by then the output should be off."""
_Teller = TypeVar("_Teller", Feed, Heard)


def _within(value: float | None, least: float, most: float) -> float | None:
    """Return the value, or None if it is not a number between the two (NaN is not)."""
    return value if value is not None and least <= value <= most else None


def plausible(reading: Reading) -> Reading:
    """Return the reading without the numbers that cannot be true: they must not reach the account, nor the journal."""
    runtime_s, charge_pct, load_pct = reading.runtime_s, reading.charge_pct, reading.load_pct
    on_battery_s, off_in_s, watts = reading.on_battery_s, reading.output_off_in_s, reading.watts
    input_v, temp_c = reading.input_v, reading.battery_temp_c
    # Written out, because it runs for every reading; a loop over the names takes five times as long.
    if (
        (runtime_s is None or 0.0 <= runtime_s <= _LONG_S)
        and (charge_pct is None or 0.0 <= charge_pct <= 100.0)
        and (load_pct is None or 0.0 <= load_pct <= 1000.0)
        and (on_battery_s is None or 0.0 <= on_battery_s <= _LONG_S)
        and (off_in_s is None or 0.0 <= off_in_s <= _LONG_S)
        and (watts is None or 0.0 <= watts <= 1e9)
        and (input_v is None or -1e6 <= input_v <= 1e6)
        and (temp_c is None or -300.0 <= temp_c <= 1000.0)
    ):
        return reading
    return replace(
        reading,
        runtime_s=_within(runtime_s, 0.0, _LONG_S),
        charge_pct=_within(charge_pct, 0.0, 100.0),
        load_pct=_within(load_pct, 0.0, 1000.0),
        on_battery_s=_within(on_battery_s, 0.0, _LONG_S),
        output_off_in_s=_within(off_in_s, 0.0, _LONG_S),
        watts=_within(watts, 0.0, 1e9),
        input_v=_within(input_v, -1e6, 1e6),
        battery_temp_c=_within(temp_c, -300.0, 1000.0),
    )


def observe(policy: Policy, feed: Feed, reading: Reading) -> Feed:
    """Enter one reading. One of another UPS, or older than the newest, is ignored."""
    last = feed.reading
    if policy.sources > 1:
        return _observe_together(policy, feed, reading)
    if reading.ups != policy.ups or (last is not None and reading.at_s <= last.at_s):
        return feed
    measures = shown(feed.measures, reading)
    utility_seen = feed.utility_seen or feed.supply is _UTILITY
    reading = measured(reading, feed.measures, utility_seen=utility_seen)
    reading = corrected(feed.reading, reading)
    if measures is not feed.measures:
        feed = replace(feed, measures=measures)
    return _orders(policy, _supply(feed, reading), reading)


def _observe_together(policy: Policy, feed: Feed, reading: Reading) -> Feed:
    together = several_sources.enter(policy, feed, reading) if reading.ups == policy.ups else None
    if together is None:
        return feed
    return _orders(policy, _supply(together.feed, together.reading, together), together.reading)


def _claim(feed: Feed, reading: Reading, test_since_s: float | None) -> Supply:
    """The supply by this reading alone, before any witness counts."""
    if reading.output_source in ON_UTILITY:
        return _UTILITY
    if reading.output_source is not _SAYS_BATTERY:
        # Off or unknown while the host runs: the load has an unseen supply. On battery this has no effect.
        return _BATTERY if feed.supply is _BATTERY else Supply.UNKNOWN
    is_test = (reading.testing or reading.calibrating) and reading.input_present is not False
    if feed.supply is _BATTERY and reading.input_present is None:
        is_test = False  # No test begins on battery: a flag that comes up in an outage does not end it.
    if not is_test:
        return _BATTERY
    too_long = test_since_s is not None and reading.at_s - test_since_s > SELF_TEST_S and not reading.calibrating
    return _BATTERY if too_long else _UTILITY


def _supply(feed: Feed, reading: Reading, together: Together | None = None) -> Feed:
    """Enter what the reading says of the supply. together: of several sources, which are each other's witnesses."""
    last = feed.reading
    test_since_s = feed.test_since_s
    if not (reading.testing or reading.calibrating):
        test_since_s = None
    elif test_since_s is None:
        test_since_s = reading.at_s
    first_charge_pct = reading.charge_pct if feed.first_charge_pct is None else feed.first_charge_pct
    claim = _claim(feed, reading, test_since_s)
    supply, since_s, suspect, unproven = claim, feed.since_s, False, False
    proven_by = feed.proven_by
    utility_seen = feed.utility_seen or feed.supply is _UTILITY
    if claim is _BATTERY and feed.supply is not _BATTERY:
        witness = supports_battery(reading)
        if not witness and together is not None:
            witness = together.witness
        elif not witness and utility_seen:
            witness = _repeats(feed, reading)
        if not witness and not utility_seen and first_charge_pct is not None and reading.charge_pct is not None:
            witness = "charge_pct" if first_charge_pct - reading.charge_pct >= _CHARGE_FALL_PCT else ""
        if witness:
            seen_s = None if together is None else together.battery_since_s
            since_s, proven_by = _battery_since_s(feed, reading, seen_s), witness
        else:
            supply = feed.supply
            suspect = utility_seen
            unproven = not suspect
    elif supply is not feed.supply or (supply is _UTILITY and _interrupts(feed, reading)):
        since_s = reading.at_s
    low_at_s = None
    if supply is _BATTERY or reading.calibrating:
        # Two readings raise it, and two that do not say it withdraw it: a load that has fallen clears an early flag.
        both = (_is_low(reading), _is_low(reading if last is None else last))
        low_at_s = None if both == (False, False) else feed.low_battery_at_s
        if low_at_s is None and last is not None and both == (True, True):
            low_at_s = reading.at_s
    return replace(
        feed,
        supply=supply,
        since_s=since_s,
        proven_by=proven_by,
        reading=reading,
        previous=last,
        suspect=suspect,
        unproven_battery=unproven,
        utility_seen=utility_seen,
        first_charge_pct=first_charge_pct,
        test_since_s=test_since_s,
        lost_since_s=None,
        low_battery_at_s=low_at_s,
    )


def _interrupts(feed: Feed, reading: Reading) -> bool:
    """Utility is there, but not without a break: a reading that said battery, or a test."""
    return feed.suspect or reading.output_source is _SAYS_BATTERY


def _repeats(feed: Feed, reading: Reading) -> str:
    """A second reading in a row that says battery, after one that did not."""
    if not feed.suspect or feed.reading is None:
        return ""
    return "second_reading" if reading.at_s - feed.reading.at_s >= SECOND_READING_S else ""


def _battery_since_s(feed: Feed, reading: Reading, seen_s: float | None) -> float:
    """Since when the host is on battery: the UPS counts the seconds, also while the daemon did not run."""
    first_s = reading.at_s if seen_s is None else min(seen_s, reading.at_s)
    if feed.suspect and feed.reading is not None:
        first_s = feed.reading.at_s
    if reading.on_battery_s is None:
        return first_s
    told_s = reading.at_s - reading.on_battery_s
    known_utility_s = feed.reading.at_s if feed.supply is _UTILITY and feed.reading is not None else told_s
    return min(first_s, max(told_s, known_utility_s))


def _is_low(reading: Reading) -> bool:
    """Low battery as reported, or a reported runtime of 0 (the decoder passes 0 only if it is real)."""
    return reading.low_battery or (reading.runtime_s is not None and reading.runtime_s <= 0.0)


def _orders(policy: Policy, feed: Feed, reading: Reading) -> Feed:
    """Enter what the UPS announces. With several sources, each withdraws only its own announcement."""
    if policy.sources <= 1:
        return _announced(policy, feed, feed.previous, reading, feed.supply)
    heard = tuple(
        _announced(policy, each, each.previous, each.reading, feed.supply)
        if each.source == reading.source and each.reading is not None
        else each
        for each in feed.heard
    )
    believed = [each for each in heard if not each.doubted and not _is_spent(each, reading.at_s)]
    return replace(
        feed,
        heard=heard,
        countdown_at_s=min((t for each in believed if (t := each.countdown_at_s) is not None), default=None),
        fsd_at_s=min((t for each in believed if (t := each.fsd_at_s) is not None), default=None),
        fsd_at_first=any(each.fsd_at_first for each in believed),
    )


def _is_spent(each: Heard, now_s: float) -> bool:
    """Say whether an announced cut did not come and the source is lost: the host must not stay off for it."""
    ends_s = [at_s for at_s in (each.countdown_at_s, each.fsd_at_s) if at_s is not None]
    return each.lost_since_s is not None and bool(ends_s) and now_s - max(ends_s) > SPENT_S


def _announced(policy: Policy, told: _Teller, last: Reading | None, reading: Reading, supply: Supply) -> _Teller:
    """Enter what a source announces: a countdown to output off, a forced shutdown. Two readings make it true."""
    countdown_at_s = told.countdown_at_s
    if reading.output_off_in_s is not None and reading.output_off_in_s >= 0.0:
        # It must be seen to fall: some devices show the delay that is set, not a countdown that runs.
        if last is not None and last.output_off_in_s is not None and reading.output_off_in_s < last.output_off_in_s:
            told_at_s = reading.at_s + reading.output_off_in_s
            countdown_at_s = told_at_s if countdown_at_s is None else min(countdown_at_s, told_at_s)
    elif last is None or last.output_off_in_s is None:
        countdown_at_s = None
    since_s, fsd_at_s, at_first = told.fsd_since_s, told.fsd_at_s, told.fsd_at_first
    if not reading.forced_shutdown:
        if last is None or not last.forced_shutdown:
            since_s, fsd_at_s, at_first = None, None, False
        elif fsd_at_s is None:
            since_s = None
    elif last is None:
        at_first = True
    else:
        if since_s is None and not at_first:
            # After a silence the start is unknown: assume it came right after the last reading before.
            since_s = last.at_s if reading.at_s - last.at_s > policy.stale_s else reading.at_s
        if last.forced_shutdown and fsd_at_s is None and (since_s is not None or supply is _BATTERY):
            # One that stood before us has no known beginning.
            fsd_at_s = (reading.at_s if since_s is None else since_s) + policy.fsd_delay_s
    old = (told.countdown_at_s, told.fsd_since_s, told.fsd_at_s, told.fsd_at_first)
    if (countdown_at_s, since_s, fsd_at_s, at_first) == old:
        return told
    return replace(told, countdown_at_s=countdown_at_s, fsd_since_s=since_s, fsd_at_s=fsd_at_s, fsd_at_first=at_first)


def lose(policy: Policy, feed: Feed, failure: SourceFailed) -> Feed:
    """Enter a failed poll. Only a source that counts as lost changes anything, and it never resets a battery."""
    if failure.ups != policy.ups or not failure.lost:
        return feed
    if policy.sources > 1:
        return several_sources.lose(policy, feed, failure)
    if feed.lost_since_s is not None:
        return feed
    return replace(feed, lost_since_s=failure.at_s)


def is_draining(feed: Feed) -> bool:
    """Say whether the battery carries the load, whatever the cause; one that is not believed does not."""
    on_battery = feed.reading is not None and feed.reading.output_source is _SAYS_BATTERY
    return feed.supply is _BATTERY or (on_battery and not feed.unproven_battery)


def is_fresh(policy: Policy, feed: Feed, now_s: float) -> bool:
    """Say whether the newest reading is young enough to decide on."""
    return feed.lost_since_s is None and feed.reading is not None and now_s - feed.reading.at_s <= policy.stale_s


def is_stable(policy: Policy, feed: Feed, now_s: float, *, stable_s: float) -> bool:
    """Say whether utility has been back for `stable_s`, by fresh readings."""
    if feed.supply is not _UTILITY or feed.suspect:
        return False
    return now_s - feed.since_s >= stable_s and is_fresh(policy, feed, now_s)
