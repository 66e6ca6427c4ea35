"""Is the host on battery? Two witnesses decide.

Some inverters report "battery" permanently, gauges glitch, SNMP v1 and v2c answers can be forged. So a reading that
reports battery must be supported: by another object of the same answer (seconds on battery, input voltage gone, an
alarm) or by a second reading. A "battery" that was there at first contact and has no other support is not believed: its
repetition is not evidence.

Where a UPS has several sources, they become one stream of readings first (`_together`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from powerguard.core.model.events import ON_UTILITY, OutputSource, Reading, SourceFailed
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Feed, Measures, SourceReport, Supply
from powerguard.core.supply import silence

SELF_TEST_S = 60.0
"""A self-test that runs longer than this counts as an outage."""
_CHARGE_FALL_PCT = 2.0
_LONG_S = 1e7
"""Four months: no runtime, no outage and no countdown is longer."""
_BELIEVABLE = {
    "runtime_s": (0.0, _LONG_S),
    "charge_pct": (0.0, 100.0),
    "load_pct": (0.0, 1000.0),
    "on_battery_s": (0.0, _LONG_S),
    "output_off_in_s": (0.0, _LONG_S),
    "watts": (0.0, 1e9),
    "input_v": (-1e6, 1e6),
    "battery_temp_c": (-300.0, 1000.0),
}
"""Least and most of each number of a reading."""
SPENT_S = 300.0
"""How long an announcement outlives its moment, of a lost source or on a UPS that only shows its delay by now."""
_COARSE_S = 30.0
"""What a countdown may fall at once, beyond the time between two readings: some drivers of NUT read it that rarely."""
LAG_S = 30.0
"""How long two sources may disagree and both be right: one lags (NUT snmp-ups 12 to 30 s, apcupsd 32 to 48 s)."""
COMMIT_LAG_S = 60.0
"""Delay of a commit after the first source has seen utility again: the slowest needs 48 s to follow."""
LAST_WORD_S = 60.0
"""How long a silent source's "on battery" outweighs others that report utility."""
DOUBT_S = 180.0
"""How long a source's "on battery" is believed while the charge does not fall and another source contradicts it."""
SECOND_READING_S = 0.2
"""Two readings closer together than this are one observation."""
_APART_S = 0.5
_UNSEEN_S = 15.0
"""A longer gap between two readings is time of which nothing is known."""
CONTRADICTED = "supply_contradicted"
"""Alarm: the UPS reports utility, and two objects of the same answer show battery."""
_LEAST_FALL_PCT = 1.0
_LEAST_FALL_S = 60.0
_NEXT_S = 0.001

_LESS_PROTECTED_FIRST = (
    OutputSource.BATTERY,
    OutputSource.BYPASS,
    OutputSource.ECO,
    OutputSource.BOOST,
    OutputSource.TRIM,
    OutputSource.UTILITY,
    OutputSource.OFF,
    OutputSource.UNKNOWN,
)

_Source = TypeVar("_Source", Feed, SourceReport)
_Vote = tuple[SourceReport, Reading, OutputSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedAnswer:
    """The merged answer of all sources at one moment.

    feed: with the new reading entered in `heard`. reading: the merged one, at the new reading's time.
    witness: the second witness for a battery that they themselves are; "" where there is none.
    battery_since_s: the earliest reading in a row that says battery; None where none counts.
    """

    feed: Feed
    reading: Reading
    witness: str
    battery_since_s: float | None


def plausible(reading: Reading) -> Reading:
    """Return the reading without the numbers that cannot be true: they must not reach the account, nor the journal."""
    wrong: dict[str, Any] = {
        name: None
        for name, (least, most) in _BELIEVABLE.items()
        if (value := getattr(reading, name)) is not None and not least <= value <= most  # NaN is not, either
    }
    return replace(reading, **wrong) if wrong else reading


def supports_battery(reading: Reading) -> str:
    """Return the second witness in this same answer, or "": the other object that shows battery."""
    if reading.on_battery_s is not None and reading.on_battery_s > 0.0:
        return "on_battery_s"
    if reading.input_present is False:
        return "input_present"
    if "on_battery" in reading.alarms:
        return "alarms"
    return ""


def measured(reading: Reading, measures: Measures, *, utility_seen: bool) -> Reading:
    """Return the reading without an input and without seconds on battery that its source does not measure.

    Some cards answer 0 V whatever is there. Believed, a self-test of theirs would be an outage: "battery", with the
    input gone. So volts that are gone count only of a source that has reported an input before, or has never reported
    utility. A clock that has not moved since first contact does not count: it must move, also from its value on
    utility.
    """
    clock_s = reading.on_battery_s
    if clock_s is not None and clock_s > 0.0 and not (measures.clock or shown(measures, reading).clock):
        is_first_clock = measures.clock_s is None and utility_seen  # There was no battery time to count before.
        reading = reading if is_first_clock else replace(reading, on_battery_s=None)
    if reading.input_present is not False or measures.volts or not utility_seen:
        return reading
    if reading.input_v is None or "input_bad" in reading.alarms:
        return reading
    return replace(reading, input_present=None, input_v=None)


def shown(measures: Measures, reading: Reading) -> Measures:
    """Return what a source has shown that it measures, with this reading of it; the same object if there is no news."""
    clock_s = reading.on_battery_s
    first_s = clock_s if measures.clock_s is None else measures.clock_s
    clock = measures.clock or clock_s != first_s  # A missing value counts as a move: some report it on battery only.
    volts = measures.volts or reading.input_present is True
    if (volts, clock, first_s) == (measures.volts, measures.clock, measures.clock_s):
        return measures
    return Measures(volts=volts, clock_s=first_s, clock=clock)


def contradicts_itself(reading: Reading) -> bool:
    """Say whether the output is called utility, or unknown, with the input gone and the seconds on battery counted."""
    counts = reading.on_battery_s is not None and reading.on_battery_s > 0.0
    if not counts or reading.input_present is not False:
        return False
    return reading.output_source in ON_UTILITY or reading.output_source is OutputSource.UNKNOWN


def corrected(before: Reading | None, reading: Reading) -> Reading:
    """Return the reading as battery where it contradicts itself as the one before: two witnesses against one word."""
    if before is None or not contradicts_itself(reading):
        return reading
    if CONTRADICTED not in before.alarms and not contradicts_itself(before):
        return reading
    return replace(reading, output_source=OutputSource.BATTERY, alarms=(*reading.alarms, CONTRADICTED))


def observe(policy: Policy, feed: Feed, reading: Reading) -> Feed:
    """Enter one reading. One of another UPS, or older than the newest, is ignored."""
    last = feed.reading
    if policy.sources > 1:
        together = _together(policy, feed, reading) if reading.ups == policy.ups else None
        return (
            feed
            if together is None
            else _orders(policy, _supply(together.feed, together.reading, together), together.reading)
        )
    if reading.ups != policy.ups or (last is not None and reading.at_s <= last.at_s):
        return feed
    measures = shown(feed.measures, reading)
    utility_seen = feed.utility_seen or feed.supply is Supply.UTILITY
    reading = measured(reading, feed.measures, utility_seen=utility_seen)
    reading = corrected(feed.reading, reading)
    if measures is not feed.measures:
        feed = replace(feed, measures=measures)
    return _orders(policy, _supply(feed, reading), reading)


def _claim(feed: Feed, reading: Reading, test_since_s: float | None) -> Supply:
    """The supply by this reading alone, before any witness counts."""
    if reading.output_source in ON_UTILITY:
        return Supply.UTILITY
    if reading.output_source is not OutputSource.BATTERY:
        # Off or unknown while the host runs: the load has an unseen supply. On battery this has no effect, unless
        # battery was only presumed: the UPS itself reported utility last.
        heard_last = None if feed.reading is None else feed.reading.output_source
        was_presumed = feed.proven_by == silence.NETWORK and heard_last in ON_UTILITY
        stays = feed.supply is Supply.BATTERY and (not was_presumed or is_unknown_on_battery(reading))
        return Supply.BATTERY if stays else Supply.UNKNOWN
    is_test = (reading.testing or reading.calibrating) and reading.input_present is not False
    if feed.supply is Supply.BATTERY and reading.input_present is None:
        is_test = False  # No test begins on battery: a flag that comes up in an outage does not end it.
    if not is_test:
        return Supply.BATTERY
    until_s = _calibrated_on_utility_until_s(feed, reading) if reading.calibrating else reading.at_s
    too_long = test_since_s is not None and until_s - test_since_s > SELF_TEST_S
    return Supply.BATTERY if too_long else Supply.UTILITY


def _calibrated_on_utility_until_s(feed: Feed, reading: Reading) -> float:
    """When the flag was last seen on utility, just before this battery: a stuck flag has been there for a minute."""
    last = [each for each in (feed.reading, feed.previous) if each is not None and reading.input_present is None]
    return max((each.at_s for each in last if each.calibrating and each.output_source in ON_UTILITY), default=-_LONG_S)


def _supply(feed: Feed, reading: Reading, together: MergedAnswer | None = None) -> Feed:
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
    utility_seen = feed.utility_seen or feed.supply is Supply.UTILITY
    if claim is Supply.BATTERY and feed.supply is not Supply.BATTERY:
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
    elif supply is not feed.supply or (supply is Supply.UTILITY and _interrupts(feed, reading)):
        since_s = reading.at_s
    low_at_s = None
    if supply is Supply.BATTERY or reading.calibrating:
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
    return feed.suspect or reading.output_source is OutputSource.BATTERY


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
    reported_s = reading.at_s - reading.on_battery_s
    known_utility_s = feed.reading.at_s if feed.supply is Supply.UTILITY and feed.reading is not None else reported_s
    return min(first_s, max(reported_s, known_utility_s))


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


def _is_spent(each: SourceReport, now_s: float) -> bool:
    """Say whether an announced cut did not come and the source is lost: the host must not stay off for it."""
    ends_s = [at_s for at_s in (each.countdown_at_s, each.fsd_at_s) if at_s is not None]
    return each.lost_since_s is not None and bool(ends_s) and now_s - max(ends_s) > SPENT_S


def _announced(policy: Policy, source: _Source, last: Reading | None, reading: Reading, supply: Supply) -> _Source:
    """Enter what a source announces: a countdown to output off, a forced shutdown. Two readings make it true."""
    countdown_at_s = source.countdown_at_s
    if countdown_at_s is not None and reading.at_s - countdown_at_s > SPENT_S:
        countdown_at_s = None  # No cut came: the UPS shows its delay. If it was prolonged, it falls again.
    if reading.output_off_in_s is not None and reading.output_off_in_s >= 0.0:
        if _runs(last, reading, is_known=countdown_at_s is not None):
            ends_s = reading.at_s + reading.output_off_in_s
            countdown_at_s = ends_s if countdown_at_s is None else min(countdown_at_s, ends_s)
    elif last is None or last.output_off_in_s is None:
        countdown_at_s = None
    since_s, fsd_at_s, at_first = source.fsd_since_s, source.fsd_at_s, source.fsd_at_first
    if not reading.forced_shutdown:
        if last is None or not last.forced_shutdown:
            since_s, fsd_at_s, at_first = None, None, False
        elif fsd_at_s is None:
            since_s = None
    elif last is None or _is_history(policy, fsd_at_s, last, reading, supply):
        since_s, fsd_at_s, at_first = None, None, True
    else:
        if since_s is None and not at_first:
            # After a silence the start is unknown: assume it came right after the last reading before.
            since_s = last.at_s if reading.at_s - last.at_s > policy.stale_s else reading.at_s
        if last.forced_shutdown and fsd_at_s is None and (since_s is not None or supply is Supply.BATTERY):
            # One that stood before us has no known beginning.
            fsd_at_s = (reading.at_s if since_s is None else since_s) + policy.fsd_delay_s
    old = (source.countdown_at_s, source.fsd_since_s, source.fsd_at_s, source.fsd_at_first)
    if (countdown_at_s, since_s, fsd_at_s, at_first) == old:
        return source
    return replace(source, countdown_at_s=countdown_at_s, fsd_since_s=since_s, fsd_at_s=fsd_at_s, fsd_at_first=at_first)


def _is_history(policy: Policy, fsd_at_s: float | None, last: Reading, reading: Reading, supply: Supply) -> bool:
    """Say whether an FSD on utility is as one at first contact: its cut was due long ago, and has not come.

    upsd keeps FSD until it is restarted. fsd_at_s: when the cut is due; None: not known, as where it rose unseen.
    """
    if supply is not Supply.UTILITY:
        return False
    if fsd_at_s is not None:
        return reading.at_s - fsd_at_s > SPENT_S
    return not last.forced_shutdown and reading.at_s - last.at_s > policy.fsd_delay_s + SPENT_S


def _runs(last: Reading | None, reading: Reading, *, is_known: bool) -> bool:
    """Say whether a countdown falls: some devices show the delay that is set, and a person may set a shorter one.

    is_known: one runs already, so any fall counts.
    """
    if last is None or last.output_off_in_s is None or reading.output_off_in_s is None:
        return False
    fell_s = last.output_off_in_s - reading.output_off_in_s
    return fell_s > 0.0 and (is_known or fell_s <= reading.at_s - last.at_s + _COARSE_S)


def lose(policy: Policy, feed: Feed, failure: SourceFailed) -> Feed:
    """Enter a failed poll. Only a lost source changes anything; the feed is lost when all its sources are."""
    if failure.ups != policy.ups or not failure.lost:
        return feed
    if policy.sources <= 1:
        return feed if feed.lost_since_s is not None else replace(feed, lost_since_s=failure.at_s)
    old = _of(feed, failure.source)
    if old.lost_since_s is not None:
        return feed
    heard = _with(feed, replace(old, lost_since_s=failure.at_s))
    all_lost = len(heard) >= policy.sources and all(each.lost_since_s is not None for each in heard)
    return replace(feed, heard=heard, lost_since_s=failure.at_s if all_lost else feed.lost_since_s)


def without_former(policy: Policy, feed: Feed) -> Feed:
    """Return the feed without sources that the settings no longer name: they are not polled, and so are never lost.

    If none is left, this is the first contact again: what the former source has shown is no evidence for a battery that
    the new one reports. A battery that is confirmed stays so.
    """
    kept = tuple(each for each in feed.heard if each.source in policy.source_names)
    is_other = feed.reading is not None and feed.reading.source not in policy.source_names and not kept
    if policy.source_names and is_other and feed.supply is not Supply.BATTERY:
        return Feed(since_s=feed.since_s)
    if not policy.source_names or (kept == feed.heard and (policy.sources > 1 or not kept)):
        return feed
    lost = [each.lost_since_s for each in kept if each.lost_since_s is not None]
    return replace(
        feed,
        heard=kept if policy.sources > 1 else (),
        disagree_since_s=None,
        lost_since_s=max(lost) if len(lost) >= policy.sources else feed.lost_since_s,
    )


def rebooted(feed: Feed, at_s: float) -> Feed:
    """Return the feed of the next boot, in which nothing has been read yet.

    A source that has reported utility is not stuck at battery: its reports count as in any boot.
    """
    sane = (each for each in feed.heard if each.utility_seen and not each.doubted)
    seen = tuple(SourceReport(source=each.source, utility_seen=True) for each in sane)
    return Feed(since_s=at_s, utility_seen=feed.utility_seen, heard=seen)


def is_draining(feed: Feed) -> bool:
    """Say whether the battery carries the load, whatever the cause; one that is not believed does not."""
    on_battery = feed.reading is not None and feed.reading.output_source is OutputSource.BATTERY
    return feed.supply is Supply.BATTERY or (on_battery and not feed.unproven_battery)


def is_fresh(policy: Policy, feed: Feed, now_s: float) -> bool:
    """Say whether the newest reading is young enough to decide on."""
    return feed.lost_since_s is None and feed.reading is not None and now_s - feed.reading.at_s <= policy.stale_s


def is_stable(policy: Policy, feed: Feed, now_s: float, *, stable_s: float) -> bool:
    """Say whether utility has been back for `stable_s`, by fresh readings."""
    if feed.supply is not Supply.UTILITY or feed.suspect:
        return False
    return now_s - feed.since_s >= stable_s and is_fresh(policy, feed, now_s)


def is_unknown_on_battery(reading: Reading | None) -> bool:
    """Say whether the output source is unknown, and another object shows that the battery carries the load.

    An output that is off carries nothing: a host that runs has another supply.
    """
    return reading is not None and reading.output_source is OutputSource.UNKNOWN and bool(supports_battery(reading))


# --- Several sources of one UPS --------------------------------------------------------------------------------
#
# Each has its own age, its own lag (NUT's snmp-ups follows its card by up to 30 s, measured) and its own ways to be
# wrong. They become one stream of readings in which the more cautious value counts, field by field: battery before
# utility, the shorter runtime, the larger load. A cautious value must be repeated by its own source before it counts
# with the others: a reading of another source is not a repetition.
#
# A silent source keeps its last value only if it was "battery", for a limited time. A source that reports battery for
# minutes while the charge does not fall, and another source sees the input, is marked doubtful. So is one whose figures
# all stand still for minutes after another source has seen the battery and its end: a card that has lost its UPS serves
# the last values from then on.


def _together(policy: Policy, feed: Feed, reading: Reading) -> MergedAnswer | None:
    """Enter the reading of one of several sources; None if it is older than the newest of its source."""
    old = _of(feed, reading.source)
    if old.reading is not None and reading.at_s <= old.reading.at_s:
        return None
    measures = shown(old.measures, reading)
    reading = measured(reading, old.measures, utility_seen=old.utility_seen)
    reading = corrected(old.reading, reading)
    new = _listened(old, reading, measures)
    heard = _with(feed, new)
    votes = _votes(policy, heard, new, reading.at_s)
    disagree_since_s = _disagree_since_s(feed, votes, reading.at_s)
    if disagree_since_s is not None:
        heard = tuple(_judged(each, votes, reading.at_s, disagree_since_s) for each in heard)
        doubted = [each.source for each in heard if each.doubted]
        votes = [vote for vote in votes if vote[0].source not in doubted]
    source = _output_source(votes, reading, disagree_since_s)
    last_s = reading.at_s if feed.reading is None else feed.reading.at_s + _NEXT_S
    claims = [each for each, _, vote in votes if vote is OutputSource.BATTERY]
    return MergedAnswer(
        feed=replace(feed, heard=heard, disagree_since_s=disagree_since_s),
        reading=_merged(votes, new, reading, source, max(reading.at_s, last_s)),
        witness=_witness(heard, claims, reading.at_s),
        battery_since_s=min((each.battery_at_s for each in claims if each.battery_at_s is not None), default=None),
    )


def lost_since_s(feed: Feed, source: str) -> float | None:
    """Since when this source is lost; None while it answers."""
    return _of(feed, source).lost_since_s if feed.heard else feed.lost_since_s


def contradicts_commit(policy: Policy, feed: Feed, now_s: float) -> bool:
    """Say whether a source has news of utility, or an authenticated one reports utility: a commit must wait.

    One that reported battery and now reports utility is ahead of the others, not wrong: they have COMMIT_LAG_S to
    follow, or to show by any figure that they still read the UPS.
    """
    claims = [each for each in feed.heard if each.battery_at_s is not None and not each.doubted]
    moved_at_s = max((each.moved_at_s for each in claims if each.moved_at_s is not None), default=now_s)
    for each in feed.heard:
        if each.reading is None or not _is_heard(policy, each, now_s) or each.reading.output_source not in ON_UTILITY:
            continue
        if each.back_at_s is not None and min(now_s, moved_at_s) - each.back_at_s < COMMIT_LAG_S:
            return True
        if each.reading.authenticated and not any(_outweighs(claim, each) for claim in claims):
            return True
    return False


def _outweighs(claim: SourceReport, denial: SourceReport) -> bool:
    """Say whether a battery counts more than an authenticated utility: it is authenticated and supported as well.

    And no figure of the other source has changed since it began: that one does not read the UPS any more.
    """
    if claim.reading is None or claim.battery_at_s is None or denial.moved_at_s is None:
        return False
    sure = claim.reading.authenticated and _is_supported(claim.reading, claim.gauges)
    return sure and denial.moved_at_s <= claim.battery_at_s


def denied_by(policy: Policy, feed: Feed, now_s: float) -> Reading | None:
    """Return a reading of utility that contradicts a single, forgeable source that reports battery; else None.

    Both witnesses of such a battery may be its own: the commit then needs one that it cannot make. Of several that say
    utility, the one with the least charge.
    """
    heard = [each for each in feed.heard if _is_heard(policy, each, now_s) and not each.doubted]
    readings = [each.reading for each in heard if each.reading is not None]
    claims = [reading for reading in readings if reading.output_source is OutputSource.BATTERY]
    denials = [reading for reading in readings if reading.output_source in ON_UTILITY]
    if len(claims) != 1 or claims[0].authenticated or not denials:
        return None
    return min(denials, key=lambda reading: 100.0 if reading.charge_pct is None else reading.charge_pct)


def battery_reported_twice(policy: Policy, feed: Feed, now_s: float) -> bool:
    """Say whether two readings, half a second or more apart, say battery: of one source, whatever came in between.

    One of before a long silence, or of before a restart of the daemon, proves nothing about now.
    """
    if not feed.heard:
        newest, second = feed.reading, feed.previous
        if newest is None or second is None or second.output_source is not OutputSource.BATTERY:
            return False
        return newest.at_s - second.at_s >= _APART_S and follows(policy, newest, second)
    return any(
        each.reading is not None
        and each.battery_at_s is not None
        and each.reading.at_s - each.battery_at_s >= _APART_S
        and follows(policy, each.reading, each.previous)
        and _is_heard(policy, each, now_s)
        for each in feed.heard
    )


def follows(policy: Policy, reading: Reading, previous: Reading | None) -> bool:
    """Say whether a reading came soon after the one before, so that the time between them is known."""
    return previous is not None and reading.at_s - previous.at_s <= max(_UNSEEN_S, 2 * policy.stale_s)


# --- One source -------------------------------------------------------------------------------------------------


def _of(feed: Feed, source: str) -> SourceReport:
    for each in feed.heard:
        if each.source == source:
            return each
    return SourceReport(source=source)


def _with(feed: Feed, new: SourceReport) -> tuple[SourceReport, ...]:
    for place, each in enumerate(feed.heard):
        if each.source == new.source:
            return (*feed.heard[:place], new, *feed.heard[place + 1 :])
    return (*feed.heard, new)


def _listened(old: SourceReport, reading: Reading, measures: Measures) -> SourceReport:
    """Enter a reading into what is known of its source."""
    says_battery = reading.output_source is OutputSource.BATTERY
    says_utility = reading.output_source in ON_UTILITY
    goes_on = says_battery and old.battery_at_s is not None
    back_at_s = old.back_at_s
    if says_utility and old.battery_at_s is not None and _has_reported_battery(old):
        back_at_s = reading.at_s
    gauges = old.gauges if goes_on else (reading.charge_pct, reading.runtime_s)
    stands = old.reading is not None and _figures(old.reading) == _figures(reading) and _has_gauge(reading)
    return SourceReport(
        source=old.source,
        reading=reading,
        previous=old.reading,
        utility_seen=old.utility_seen or says_utility,
        battery_at_s=(old.battery_at_s if goes_on else reading.at_s) if says_battery else None,
        gauges=gauges,
        measures=measures,
        moved_at_s=old.moved_at_s if stands else reading.at_s,
        back_at_s=back_at_s,
        doubted=old.doubted and says_battery and (stands or not _is_supported(reading, gauges)),
        countdown_at_s=old.countdown_at_s,
        fsd_since_s=old.fsd_since_s,
        fsd_at_s=old.fsd_at_s,
        fsd_at_first=old.fsd_at_first,
    )


def _is_supported(reading: Reading, gauges: tuple[float | None, float | None]) -> bool:
    """Say whether there is other evidence that the battery carries the load: another object, or a falling charge."""
    charge_pct, runtime_s = gauges
    return (
        bool(supports_battery(reading))
        or reading.low_battery
        or _has_fallen(charge_pct, reading.charge_pct, _LEAST_FALL_PCT)
        or _has_fallen(runtime_s, reading.runtime_s, _LEAST_FALL_S)
    )


def _figures(reading: Reading) -> tuple[object, ...]:
    return tuple(getattr(reading, name) for name in (*_BELIEVABLE, "low_battery", "input_present"))


def _has_gauge(reading: Reading) -> bool:
    return reading.charge_pct is not None or reading.runtime_s is not None


def _has_reported_battery(each: SourceReport) -> bool:
    """Say whether its battery was more than one odd reading."""
    if each.reading is None or each.reading.output_source is not OutputSource.BATTERY:
        return False
    twice = each.previous is not None and each.previous.output_source is OutputSource.BATTERY
    return twice or bool(supports_battery(each.reading))


def _is_heard(policy: Policy, each: SourceReport, now_s: float) -> bool:
    return each.lost_since_s is None and each.reading is not None and now_s - each.reading.at_s <= policy.stale_s


# --- All of them ------------------------------------------------------------------------------------------------


def _votes(policy: Policy, heard: tuple[SourceReport, ...], new: SourceReport, now_s: float) -> list[_Vote]:
    """Return the sources that count now, with their readings."""
    votes = []
    for each in heard:
        if each.reading is None or each.doubted:
            continue
        word = each.reading.output_source
        fresh = _is_heard(policy, each, now_s)
        if word is OutputSource.BATTERY:
            if not each.utility_seen and not supports_battery(each.reading):
                continue  # It has never reported anything else, so this is not evidence.
            if each is not new and not _has_reported_battery(each):
                word = OutputSource.UNKNOWN if each.previous is None else each.previous.output_source
            elif not fresh and not _last_word_counts(heard, each, now_s):
                continue
        elif not fresh:
            continue
        votes.append((each, each.reading, word))
    return votes


def _last_word_counts(heard: tuple[SourceReport, ...], silent: SourceReport, now_s: float) -> bool:
    """It fell silent on battery: its value counts until another source that saw the battery has seen its end."""
    last_s = -1.0 if silent.reading is None else silent.reading.at_s
    if now_s - last_s > LAST_WORD_S:
        return False
    return not any(each.back_at_s is not None and each.back_at_s > last_s for each in heard)


def _disagree_since_s(feed: Feed, votes: list[_Vote], now_s: float) -> float | None:
    output_sources = {word for _, _, word in votes}
    if OutputSource.BATTERY in output_sources and output_sources & ON_UTILITY:
        return now_s if feed.disagree_since_s is None else feed.disagree_since_s
    return None


def _judged(each: SourceReport, votes: list[_Vote], now_s: float, disagree_since_s: float) -> SourceReport:
    """Find a source that reports battery permanently: the charge does not fall, and another source sees the input.

    Or no figure changes any more, and another source has seen this battery and its end.
    """
    reading = each.reading
    if reading is None or each.battery_at_s is None or each.doubted:
        return each
    backs_s = [at_s for other, _, _ in votes if (at_s := other.back_at_s) is not None and at_s > each.battery_at_s]
    if backs_s and each.moved_at_s is not None and now_s - max(each.moved_at_s, min(backs_s)) >= DOUBT_S:
        return replace(each, doubted=True)
    if now_s - max(each.battery_at_s, disagree_since_s) < DOUBT_S or _is_supported(reading, each.gauges):
        return each
    charge_pct, runtime_s = each.gauges
    if (charge_pct is None or reading.charge_pct is None) and (runtime_s is None or reading.runtime_s is None):
        return each
    seen = any(word in ON_UTILITY and other.input_present is True for _, other, word in votes)
    return replace(each, doubted=True) if seen else each


def _has_fallen(then: float | None, now: float | None, least: float) -> bool:
    return then is not None and now is not None and then - now >= least


def _output_source(votes: list[_Vote], reading: Reading, disagree_since_s: float | None) -> OutputSource:
    """Return the more cautious output source. After LAG_S of disagreement the authenticated sources decide.

    But a battery that carries its own witness counts on, for they may be frozen: it pauses training, and `commit` asks
    them (`contradicts_commit`).
    """
    output_sources = {word for _, _, word in votes}
    proven = any(word is OutputSource.BATTERY and supports_battery(claim) for _, claim, word in votes)
    if disagree_since_s is not None and reading.at_s - disagree_since_s >= LAG_S and not proven:
        output_sources = {word for _, claim, word in votes if claim.authenticated} or output_sources
    if not output_sources:
        return reading.output_source
    return next(word for word in _LESS_PROTECTED_FIRST if word in output_sources)


def _witness(heard: tuple[SourceReport, ...], claims: list[SourceReport], now_s: float) -> str:
    for each in claims:
        if each.utility_seen and each.battery_at_s is not None and now_s - each.battery_at_s >= SECOND_READING_S:
            return "second_reading"
    together = [
        each
        for each in heard
        if each.reading is not None
        and each.reading.output_source is OutputSource.BATTERY
        and each.lost_since_s is None
        and not each.doubted
    ]
    return "second_source" if len(together) > 1 and any(each.utility_seen for each in together) else ""


# --- Field by field ---------------------------------------------------------------------------------------------


def _merged(votes: list[_Vote], new: SourceReport, reading: Reading, source: OutputSource, at_s: float) -> Reading:
    """Return one reading: the arriving one as it is, of the others the milder of their newest two."""
    others = [each for each, _, _ in votes if each.source != new.source]
    if others and not any(each.source == new.source for each, _, _ in votes):
        reading = _silenced(reading)  # A source that is not believed does not count in any other field either.
    if not others:
        return replace(reading, at_s=at_s, output_source=source)
    merged = reading
    for each in others:
        merged = _merged_with(merged, each)
    claims = [claim for _, claim, word in votes if word is OutputSource.BATTERY]
    # A stuck flag of one source does not hide what another one proves.
    proven = any(supports_battery(claim) and not (claim.testing or claim.calibrating) for claim in claims)
    inputs = {claim.input_present for claim in claims} or {claim.input_present for _, claim, _ in votes}
    return replace(
        merged,
        at_s=at_s,
        output_source=source,
        on_battery_s=max((claim.on_battery_s for claim in claims if claim.on_battery_s is not None), default=None),
        input_present=False if False in inputs else True if True in inputs else None,
        testing=merged.testing and not proven,
        calibrating=merged.calibrating and not proven,
    )


def _silenced(reading: Reading) -> Reading:
    return Reading(at_s=reading.at_s, ups=reading.ups, source=reading.source, output_source=reading.output_source)


def _merged_with(reading: Reading, other: SourceReport) -> Reading:
    """Return the reading merged with another source: with the milder of that source's newest two."""
    now, before = other.reading, other.previous
    if now is None:
        return reading
    then = before or now
    twice = before is not None  # A flag counts when it is repeated.
    return replace(
        reading,
        runtime_s=_least(reading.runtime_s, _milder(now.runtime_s, then.runtime_s, max)),
        charge_pct=_least(reading.charge_pct, _milder(now.charge_pct, then.charge_pct, max)),
        load_pct=_most(reading.load_pct, _milder(now.load_pct, then.load_pct, min)),
        watts=_most(reading.watts, _milder(now.watts, then.watts, min)),
        input_v=now.input_v if reading.input_v is None else reading.input_v,
        battery_temp_c=now.battery_temp_c if reading.battery_temp_c is None else reading.battery_temp_c,
        low_battery=reading.low_battery or (twice and now.low_battery and then.low_battery),
        replace_battery=reading.replace_battery or (twice and now.replace_battery and then.replace_battery),
        overload=reading.overload or (twice and now.overload and then.overload),
        testing=reading.testing or (twice and now.testing and then.testing),
        calibrating=reading.calibrating or (twice and now.calibrating and then.calibrating),
        forced_shutdown=reading.forced_shutdown or (twice and now.forced_shutdown and then.forced_shutdown),
        output_off_in_s=_least(reading.output_off_in_s, now.output_off_in_s),
        alarms=tuple(sorted({*reading.alarms, *now.alarms})),
    )


def _milder(newest: float | None, before: float | None, choose: Callable[[float, float], float]) -> float | None:
    return newest if newest is None or before is None else choose(newest, before)


def _least(one: float | None, other: float | None) -> float | None:
    """Return the smaller of the reported values."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _most(one: float | None, other: float | None) -> float | None:
    """Return the larger of the reported values."""
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
