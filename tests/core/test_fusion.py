"""Every witness for and against battery, one by one; countdowns, FSD and tests, each confirmed and taken back."""

import math
from dataclasses import replace
from typing import Any

import pytest

from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.core.model.state import Feed, Supply
from powerguard.core.supply import fusion
from tests.core.play import make_policy

POLICY = make_policy([])
UNKNOWN, UTILITY, BATTERY = Supply.UNKNOWN, Supply.UTILITY, Supply.BATTERY


def seen(*answer: tuple[float, str] | tuple[float, str, dict[str, Any]], feed: Feed | None = None) -> Feed:
    """Return the feed after readings: (when, output source, other fields)."""
    feed = Feed() if feed is None else feed
    for at_s, source, *fields in answer:
        extra = fields[0] if fields else {}
        readings = Reading(at_s=at_s, ups="ups", source="snmp", output_source=OutputSource(source), **extra)
        feed = fusion.observe(POLICY, feed, readings)
    return feed


# --- Witnesses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("witness", "believed"),
    [
        ({}, False),
        ({"on_battery_s": 0.0}, False),
        ({"input_present": False}, True),
        ({"input_present": True}, False),
        ({"alarms": ("on_battery",)}, True),
        ({"alarms": ("overload",)}, False),
        ({"low_battery": True}, False),
        ({"charge_pct": 50.0}, False),
    ],
)
def test_a_second_object_of_the_same_answer(witness: dict[str, Any], *, believed: bool) -> None:
    """At first contact and after utility alike."""
    first = seen((1.0, "battery", witness))
    assert (first.supply is BATTERY, first.unproven_battery, first.suspect) == (believed, not believed, False)
    later = seen((1.0, "utility"), (2.0, "battery", witness))
    assert (later.supply, later.suspect) == ((BATTERY, False) if believed else (UTILITY, True))
    assert not later.unproven_battery


@pytest.mark.parametrize(("apart_s", "believed"), [(0.19, False), (0.2, True), (0.21, True), (1.0, True)])
def test_a_second_reading(apart_s: float, *, believed: bool) -> None:
    """Two readings closer than 0.2 s are one observation."""
    feed = seen((-1.0, "utility"), (0.0, "battery"), (apart_s, "battery"))
    assert (feed.supply is BATTERY, feed.suspect) == (believed, not believed)
    if believed:
        assert feed.since_s == 0.0, "since the first of the two"


def test_a_battery_that_was_there_first_is_not_proven_by_repeating_itself() -> None:
    feed = seen(*((float(at_s), "battery", {"charge_pct": 90.0}) for at_s in range(1, 60)))
    assert (feed.supply, feed.unproven_battery, feed.suspect) == (UNKNOWN, True, False)
    assert seen((60.0, "battery", {"charge_pct": 88.1}), feed=feed).supply is UNKNOWN
    assert seen((60.0, "battery", {"charge_pct": 88.0}), feed=feed).supply is BATTERY, "a charge that falls is proof"
    back = seen((60.0, "utility"), (61.0, "battery"), (62.0, "battery"), feed=feed)
    assert (back.supply, back.unproven_battery) == (BATTERY, False)
    late = seen((1.0, "battery"), (2.0, "battery", {"charge_pct": 80.0}), (3.0, "battery", {"charge_pct": 78.0}))
    assert late.supply is BATTERY, "counted from the first charge that was told"


@pytest.mark.parametrize("between", ["unknown", "off"])
def test_what_comes_between_does_not_make_battery_unbelievable(between: str) -> None:
    feed = seen((1.0, "utility"), (2.0, between))
    assert (feed.supply, feed.since_s) == (UNKNOWN, 2.0)
    feed = seen((3.0, "battery"), feed=feed)
    assert (feed.supply, feed.suspect, feed.unproven_battery) == (UNKNOWN, True, False)
    assert seen((4.0, "battery"), feed=feed).supply is BATTERY
    never = seen((1.0, between), (2.0, "battery"), (3.0, "battery"))
    assert (never.supply, never.unproven_battery) == (UNKNOWN, True), "utility was never seen"
    outage = seen((1.0, "utility"), (2.0, "battery", {"input_present": False}), (3.0, between))
    assert (outage.supply, outage.since_s) == (BATTERY, 2.0), "on battery it changes nothing"


@pytest.mark.parametrize("source", ["utility", "boost", "trim", "eco", "bypass"])
def test_utility_of_every_kind_is_believed_at_once(source: str) -> None:
    feed = seen((1.0, "utility"), (2.0, "battery", {"input_present": False}), (3.0, source))
    assert (feed.supply, feed.since_s, feed.suspect) == (UTILITY, 3.0, False)
    assert seen((4.0, source), (5.0, source), feed=feed).since_s == 3.0


def test_the_ups_knows_since_when() -> None:
    """Its seconds on battery count, but never back to before a reading that said utility."""
    first = seen((100.0, "battery", {"on_battery_s": 40.0}))
    assert first.supply is UNKNOWN, "a clock is one once it has moved"
    assert seen((101.0, "battery", {"on_battery_s": 41.0}), feed=first).since_s == 60.0
    assert seen((90.0, "utility"), (100.0, "battery", {"on_battery_s": 40.0})).since_s == 90.0
    assert seen((90.0, "utility"), (100.0, "battery", {"on_battery_s": 4.0})).since_s == 96.0
    result = seen((90.0, "utility"), (91.0, "battery", {"on_battery_s": 0.0}), (95.0, "battery", {"on_battery_s": 1.0}))
    assert result.since_s == 91.0, "and never later than our own first reading"


# --- What does not count ------------------------------------------------------------------------------------------


def test_readings_of_others_and_of_the_past_change_nothing() -> None:
    feed = seen((5.0, "utility"))
    assert seen((5.0, "battery"), (4.0, "battery"), feed=feed) is feed
    other = Reading(at_s=9.0, ups="other", source="snmp", output_source=OutputSource.BATTERY)
    assert fusion.observe(POLICY, feed, other) is feed


def test_the_short_way_for_plain_utility_says_the_same() -> None:
    """Once a second for years; every field must be as the long way has it."""
    feed = seen((1.0, "utility", {"charge_pct": 77.0}), (2.0, "utility"), (3.0, "utility"))
    last = Reading(at_s=3.0, ups="ups", source="snmp", output_source=OutputSource.UTILITY)
    assert feed == Feed(
        supply=UTILITY,
        since_s=1.0,
        reading=last,
        previous=replace(last, at_s=2.0),
        utility_seen=True,
        first_charge_pct=77.0,
    )


# --- Lost and stable ----------------------------------------------------------------------------------------------


def test_only_a_lost_source_is_news_and_a_reading_ends_it() -> None:
    feed = seen((1.0, "utility"))
    failed = SourceFailed(at_s=4.0, ups="ups", source="snmp", reason="no answer", lost=True)
    assert fusion.lose(POLICY, feed, replace(failed, lost=False)) is feed
    assert fusion.lose(POLICY, feed, replace(failed, ups="other")) is feed
    lost = fusion.lose(POLICY, feed, failed)
    assert (lost.lost_since_s, lost.supply) == (4.0, UTILITY)
    assert fusion.lose(POLICY, lost, replace(failed, at_s=5.0)) is lost, "since the first time"
    assert seen((6.0, "utility"), feed=lost).lost_since_s is None


@pytest.mark.parametrize(("now_s", "fresh"), [(1.0, True), (4.0, True), (4.001, False)])
def test_fresh(now_s: float, *, fresh: bool) -> None:
    feed = seen((1.0, "utility"))
    assert fusion.is_fresh(POLICY, feed, now_s) is fresh
    assert not fusion.is_fresh(POLICY, replace(feed, lost_since_s=1.0), now_s)
    assert not fusion.is_fresh(POLICY, Feed(), now_s)


def test_stable() -> None:
    """So many seconds of utility, without a break, and the newest reading fresh."""
    outage = seen((1.0, "utility"), (2.0, "battery", {"input_present": False}))
    feed = seen(*((float(at_s), "utility") for at_s in range(3, 13)), feed=outage)
    assert not fusion.is_stable(POLICY, feed, 12.9, stable_s=10.0)
    assert fusion.is_stable(POLICY, feed, 13.0, stable_s=10.0)
    assert not fusion.is_stable(POLICY, feed, 15.1, stable_s=10.0), "not fresh"
    assert not fusion.is_stable(POLICY, outage, 13.0, stable_s=0.0)
    doubt = seen((13.0, "battery"), feed=feed)
    assert not fusion.is_stable(POLICY, doubt, 13.0, stable_s=10.0), "the newest reading says battery"
    again = seen((14.0, "utility"), feed=doubt)
    assert again.since_s == 14.0
    assert not fusion.is_stable(POLICY, again, 14.0, stable_s=10.0)


@pytest.mark.parametrize(
    ("source", "unproven", "draining"),
    [("battery", False, True), ("battery", True, False), ("utility", False, False), ("off", False, False)],
)
def test_draining(source: str, *, unproven: bool, draining: bool) -> None:
    reading = Reading(at_s=1.0, ups="ups", source="snmp", output_source=OutputSource(source))
    assert fusion.is_draining(Feed(reading=reading, unproven_battery=unproven)) is draining
    assert fusion.is_draining(Feed(reading=reading, supply=BATTERY))
    assert not fusion.is_draining(Feed())


# --- Tests and calibrations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["testing", "calibrating"])
def test_a_test_is_no_outage_unless_the_input_is_absent(flag: str) -> None:
    for present in (None, True):
        feed = seen((1.0, "utility"), (2.0, "battery", {flag: True, "input_present": present, "on_battery_s": 5.0}))
        assert (feed.supply, feed.suspect, feed.test_since_s) == (UTILITY, False, 2.0)
    gone = seen((1.0, "utility"), (2.0, "battery", {flag: True, "input_present": False}))
    assert (gone.supply, gone.since_s) == (BATTERY, 2.0)
    over = seen((3.0, "utility"), feed=feed)
    assert (over.test_since_s, over.since_s) == (None, 2.0), "stable utility counts from the end of the test"


def test_a_self_test_longer_than_a_minute_is_an_outage_and_a_calibration_is_not() -> None:
    feed = seen((1.0, "utility"), (2.0, "battery", {"testing": True}))
    assert seen((62.0, "battery", {"testing": True}), feed=feed).supply is UTILITY
    late = seen((62.1, "battery", {"testing": True}), feed=feed)
    assert (late.supply, late.suspect) == (UTILITY, True)
    assert seen((63.1, "battery", {"testing": True}), feed=late).supply is BATTERY
    deep = seen((1.0, "utility"), (2.0, "battery", {"calibrating": True}), (900.0, "battery", {"calibrating": True}))
    assert (deep.supply, deep.suspect) == (UTILITY, False)


@pytest.mark.parametrize(
    ("calm_s", "fields", "supply"),
    [(61.0, {}, UTILITY), (61.1, {}, BATTERY), (900.0, {}, BATTERY), (900.0, {"input_present": True}, UTILITY)],
)
def test_a_calibration_that_stood_on_utility_for_a_minute_is_a_stuck_flag(
    calm_s: float, fields: dict[str, Any], supply: Supply
) -> None:
    """CAL that was never cleared, of a UPS on a cable that measures no input: its outages are outages."""
    flag = {"calibrating": True}
    calm = seen((0.0, "utility"), (1.0, "utility", flag), (calm_s - 1.0, "utility", flag), (calm_s, "utility", flag))
    battery = [(calm_s + at_s, "battery", flag | fields) for at_s in (1.0, 2.0, 3.0, 200.0)]
    for count in (2, 3, 4):
        assert seen(*battery[:count], feed=calm).supply is supply


def test_no_test_begins_on_battery() -> None:
    outage = seen((1.0, "utility"), (2.0, "battery", {"input_present": False}))
    assert seen((3.0, "battery", {"testing": True}), feed=outage).supply is BATTERY
    assert seen((3.0, "battery", {"testing": True, "input_present": True}), feed=outage).supply is UTILITY


# --- Low battery --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [{"low_battery": True}, {"runtime_s": 0.0}])
def test_low_battery_is_reported_by_two_readings_on_battery(low: dict[str, Any]) -> None:
    outage = seen((1.0, "utility"), (2.0, "battery", {"input_present": False}), (3.0, "battery", low))
    assert outage.low_battery_at_s is None
    result = seen((4.0, "battery", low), feed=outage)
    assert result.low_battery_at_s == 4.0
    assert seen((5.0, "battery"), (6.0, "battery", low), feed=result).low_battery_at_s == 4.0, "it stays"
    assert seen((5.0, "utility", low), feed=result).low_battery_at_s is None
    glitch = seen((4.0, "battery"), (5.0, "battery", low), feed=outage)
    assert glitch.low_battery_at_s is None
    on_utility = seen((1.0, "utility", low), (2.0, "utility", low))
    assert on_utility.low_battery_at_s is None
    calibrating = seen((1.0, "battery", {"calibrating": True, **low}), (2.0, "battery", {"calibrating": True, **low}))
    assert calibrating.low_battery_at_s == 2.0
    assert (
        seen(
            (1.0, "battery", {"input_present": False, "runtime_s": 1.0}),
        ).low_battery_at_s
        is None
    )


# --- Countdown and FSD --------------------------------------------------------------------------------------------


def test_a_countdown_is_reported_by_two_readings_and_taken_back_by_two() -> None:
    feed = seen((1.0, "utility"), (2.0, "utility", {"output_off_in_s": 100.0}))
    assert feed.countdown_at_s is None
    assert seen((3.0, "utility"), (4.0, "utility", {"output_off_in_s": 98.0}), feed=feed).countdown_at_s is None
    feed = seen((3.0, "utility", {"output_off_in_s": 98.5}), feed=feed)
    assert feed.countdown_at_s == 101.5
    assert seen((4.0, "utility", {"output_off_in_s": 60.0}), feed=feed).countdown_at_s == 64.0, "an earlier one counts"
    assert seen((4.0, "utility", {"output_off_in_s": 500.0}), feed=feed).countdown_at_s == 101.5, "a later one does not"
    assert seen((4.0, "utility", {"output_off_in_s": 98.0}), feed=feed).countdown_at_s == 101.5, "nor one that is slow"
    once = seen((4.0, "utility"), feed=feed)
    assert once.countdown_at_s == 101.5, "one reading without it is not its end"
    assert seen((5.0, "utility"), feed=once).countdown_at_s is None
    assert seen((5.0, "utility", {"output_off_in_s": 96.0}), feed=once).countdown_at_s == 101.5
    zero = seen((1.0, "battery", {"output_off_in_s": 1.0}), (2.0, "battery", {"output_off_in_s": 0.0}))
    assert zero.countdown_at_s == 2.0
    stands = seen((1.0, "utility", {"output_off_in_s": 180.0}), (2.0, "utility", {"output_off_in_s": 180.0}))
    assert stands.countdown_at_s is None, "the delay that is set, not a countdown that runs"


def test_a_shorter_delay_is_no_countdown() -> None:
    """A person sets 60 s where the card shows 180: the host stays on. What falls from there on is a countdown."""
    delay = seen(*((float(n), "utility", {"output_off_in_s": 180.0 if n < 5 else 60.0}) for n in range(1, 20)))
    assert delay.countdown_at_s is None
    assert seen((20.0, "utility", {"output_off_in_s": 59.0}), feed=delay).countdown_at_s == 79.0
    rare = seen((1.0, "utility", {"output_off_in_s": 90.0}), (2.0, "utility", {"output_off_in_s": 60.0}))
    assert rare.countdown_at_s == 62.0, "a driver that reads it every 30 s"


def test_a_countdown_that_has_long_passed_is_none() -> None:
    """The output is still on, and the card shows its delay: nothing is going to be cut."""
    runs = seen((1.0, "utility", {"output_off_in_s": 21.0}), (2.0, "utility", {"output_off_in_s": 20.0}))
    later = {"output_off_in_s": 20.0}
    assert seen((322.0, "utility", later), feed=runs).countdown_at_s == 22.0
    assert seen((322.0, "utility", later), (323.0, "utility", later), feed=runs).countdown_at_s is None


FSD = {"forced_shutdown": True}


def test_fsd_that_rises_counts_from_its_rise() -> None:
    """25 s: HOSTSYNC + FINALDELAY + the UPS's own delay, as the settings have them."""
    feed = seen((1.0, "utility"), (2.0, "battery", FSD))
    assert feed.fsd_at_s is None
    feed = seen((3.0, "battery", FSD), feed=feed)
    assert (feed.fsd_at_s, feed.fsd_at_first) == (27.0, False)
    assert seen((4.0, "battery", FSD), feed=feed).fsd_at_s == 27.0
    once = seen((4.0, "utility"), feed=feed)
    assert once.fsd_at_s == 27.0
    assert seen((5.0, "utility"), feed=once).fsd_at_s is None
    glitch = seen((1.0, "utility"), (2.0, "utility", FSD), (3.0, "utility"), (4.0, "utility", FSD))
    assert glitch.fsd_at_s is None


def test_fsd_at_first_contact_is_history_on_utility_and_an_order_on_battery() -> None:
    feed = seen((1.0, "utility", FSD), (2.0, "utility", FSD), (3.0, "utility", FSD))
    assert (feed.fsd_at_first, feed.fsd_at_s) == (True, None)
    outage = seen((4.0, "battery", {**FSD, "input_present": False}), feed=feed)
    assert outage.fsd_at_s == 29.0
    cleared = seen((4.0, "utility"), (5.0, "utility"), feed=feed)
    assert (cleared.fsd_at_first, cleared.fsd_at_s) == (False, None)
    risen = seen((6.0, "utility", FSD), (7.0, "utility", FSD), feed=cleared)
    assert risen.fsd_at_s == 31.0, "it has gone and come again: that is news"
    at_once = seen((1.0, "battery", {**FSD, "input_present": False}), (2.0, "battery", {**FSD, "input_present": False}))
    assert at_once.fsd_at_s == 27.0


def test_the_witness_is_named() -> None:
    """The word stands in the log as the reason of an outage."""
    plain = Reading(at_s=1.0, ups="ups", source="snmp", output_source=OutputSource.BATTERY)
    assert fusion.supports_battery(plain) == ""
    assert fusion.supports_battery(replace(plain, on_battery_s=0.5)) == "on_battery_s"
    assert fusion.supports_battery(replace(plain, input_present=False)) == "input_present"
    assert fusion.supports_battery(replace(plain, alarms=("overload", "on_battery"))) == "alarms"


def test_one_plain_reading_takes_no_order_back_on_utility_either() -> None:
    """The short way must not forget what only two readings may end."""
    fsd = seen((1.0, "utility"), (2.0, "utility", FSD), (3.0, "utility", FSD), (4.0, "utility"))
    assert fsd.fsd_at_s == 27.0
    stood = seen((1.0, "utility", FSD), (2.0, "utility"))
    assert stood.fsd_at_first
    off = seen(
        (1.0, "utility", {"output_off_in_s": 99.0}), (2.0, "utility", {"output_off_in_s": 98.0}), (3.0, "utility")
    )
    assert off.countdown_at_s == 100.0


def test_a_battery_after_an_unknown_output_began_when_it_was_seen() -> None:
    feed = seen((1.0, "utility"), (2.0, "unknown"), (9.0, "battery", {"on_battery_s": 5.0}))
    assert (feed.supply, feed.since_s) == (BATTERY, 4.0)
    early = seen((1.0, "utility"), (2.0, "unknown"), (9.0, "battery", {"on_battery_s": 8.0}))
    assert early.since_s == 1.0, "an unknown output is no proof of utility: the UPS's own count goes back beyond it"


@pytest.mark.parametrize("flag", ["testing", "calibrating"])
def test_a_test_that_is_announced_on_utility_has_begun(flag: str) -> None:
    """The minute of a self-test runs from its flag, not from the transfer: the flag alone must not go the short way."""
    assert seen((1.0, "utility"), (2.0, "utility"), (3.0, "utility", {flag: True})).test_since_s == 3.0


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("runtime_s", 0.0, 1e7),
        ("charge_pct", 0.0, 100.0),
        ("load_pct", 0.0, 1000.0),
        ("on_battery_s", 0.0, 1e7),
        ("output_off_in_s", 0.0, 1e7),
        ("watts", 0.0, 1e9),
        ("input_v", -1e6, 1e6),
        ("battery_temp_c", -300.0, 1000.0),
    ],
)
def test_numbers_that_cannot_be_true_are_dropped_one_by_one(field: str, least: float, most: float) -> None:
    """At either edge a number stays, beyond it it is not known, and beside it everything else stays as it was."""
    given: dict[str, Any] = {"runtime_s": 90.0, "charge_pct": 50.0, "load_pct": 60.0, "watts": 700.0, "input_v": 230.0}
    for value, kept in ((least, True), (most, True), (least - 0.5, False), (most + 0.5, False), (math.nan, False)):
        reading = Reading(
            at_s=1.0, ups="ups", source="snmp", output_source=OutputSource.UTILITY, **given | {field: value}
        )
        assert fusion.plausible(reading) == (reading if kept else replace(reading, **{field: None}))  # type: ignore[arg-type]


def test_a_self_test_is_one_for_just_as_long() -> None:
    """60 s to the moment, from its own beginning; then it is an outage, with a second reading."""
    test = {"testing": True}
    feed = seen((30.0, "utility"), (31.0, "battery", test), (60.0, "battery", test), (91.0, "battery", test))
    assert (feed.supply, feed.suspect) == (UTILITY, False)
    feed = seen((91.1, "battery", test), (92.0, "battery", test), feed=feed)
    assert feed.supply is BATTERY


@pytest.mark.parametrize(("runtime_s", "low_at_s"), [(1.0, None), (0.0, 4.0)])
def test_a_runtime_of_0_is_low_battery_and_a_second_is_not(runtime_s: float, low_at_s: float | None) -> None:
    given = {"runtime_s": runtime_s}
    feed = seen((1.0, "utility"), (2.0, "battery"), (3.0, "battery", given), (4.0, "battery", given))
    assert (feed.supply, feed.low_battery_at_s) == (BATTERY, low_at_s)
