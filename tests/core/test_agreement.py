"""Several sources of one UPS: whose word counts, for how long, and what they say together field by field."""

from dataclasses import replace
from typing import Any

import pytest

from powerguard.core.comeback.recovery import Stored, reloaded, restore
from powerguard.core.decide.conditions import may_latch, outage_budget
from powerguard.core.decide.machine import step
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Feed, Measures, Online, SourceReport, State, Supply
from powerguard.core.supply import fusion
from tests.core.play import make_policy

POLICY = make_policy(["sources=2", "table=50:540,75:360,100:240"])
UTILITY, BATTERY = Supply.UTILITY, Supply.BATTERY
ReportedLine = tuple[float, str, str] | tuple[float, str, str, dict[str, Any]]


def says(at_s: float, name: str, word: str, fields: dict[str, Any] | None = None) -> Reading:
    return Reading(at_s=at_s, ups="ups", source=name, output_source=OutputSource(word), **(fields or {}))


def after(*readings: ReportedLine, feed: Feed | None = None) -> Feed:
    """Return the feed after readings: (when, source, output source, other fields)."""
    feed = Feed() if feed is None else feed
    for each in readings:
        feed = fusion.observe(POLICY, feed, says(*each))
    return feed


def word(feed: Feed) -> str:
    assert feed.reading is not None
    return feed.reading.output_source.value


CALM = after((1.0, "snmp", "utility"), (1.1, "nut", "utility"))


# --- Witnesses ------------------------------------------------------------------------------------------------------


def test_a_second_source_is_a_witness_at_once() -> None:
    one = after((2.0, "snmp", "battery"), feed=CALM)
    assert (one.supply, one.suspect, word(one)) == (UTILITY, True, "battery")
    two = after((2.01, "nut", "battery"), feed=one)
    assert (two.supply, two.proven_by, two.since_s) == (BATTERY, "second_source", 2.0)


@pytest.mark.parametrize(("apart_s", "supply"), [(0.19, UTILITY), (0.2, BATTERY), (1.0, BATTERY)])
def test_a_second_reading_of_the_same_source_is_one_as_well(apart_s: float, supply: Supply) -> None:
    """Whatever the other one says meanwhile."""
    feed = after((2.0, "snmp", "battery"), (2.05, "nut", "utility"), (2.0 + apart_s, "snmp", "battery"), feed=CALM)
    assert feed.supply is supply
    if supply is BATTERY:
        assert (feed.proven_by, feed.since_s) == ("second_reading", 2.0)


def test_the_arrival_of_another_source_repeats_nothing() -> None:
    feed = after((2.0, "snmp", "battery"), *((2.1 + 0.25 * n, "nut", "utility") for n in range(4)), feed=CALM)
    assert (feed.supply, feed.suspect, word(feed)) == (UTILITY, False, "utility")


def test_an_answer_that_proves_itself_needs_no_second() -> None:
    feed = after((2.0, "snmp", "battery", {"on_battery_s": 1.0}), feed=CALM)
    assert (feed.supply, feed.proven_by) == (BATTERY, "on_battery_s")
    assert after((2.25, "nut", "utility"), feed=feed).supply is BATTERY, "and counts beside the other one's utility"


def test_who_has_never_said_anything_else_is_nobodys_witness() -> None:
    feed = after((1.0, "snmp", "battery"), (1.1, "nut", "utility"), (2.0, "snmp", "battery"), (2.1, "nut", "utility"))
    assert (feed.supply, word(feed), feed.disagree_since_s) == (UTILITY, "utility", None)
    both = after((1.0, "snmp", "battery"), (1.1, "nut", "battery"), (2.0, "snmp", "battery"), (2.1, "nut", "battery"))
    assert (both.supply, both.unproven_battery) == (Supply.UNKNOWN, True)
    news = after((3.0, "nut", "battery"), feed=feed)
    assert (news.supply, news.proven_by) == (BATTERY, "second_source"), "of one that had said utility, it supports"


def test_who_has_said_utility_in_an_earlier_boot_is_still_a_witness() -> None:
    """The power fails again while the host boots: both sources say battery from first contact, and nothing else."""
    policy = replace(POLICY, boot_id="the next")
    doubted = tuple(replace(each, doubted=each.source == "nut") for each in CALM.heard)
    for feed, supply in ((CALM, BATTERY), (replace(CALM, heard=doubted), BATTERY), (Feed(), Supply.UNKNOWN)):
        old = replace(restore(POLICY, None, 0.0).state, feed=feed)
        state = restore(policy, Stored(state=old, boot_id=POLICY.boot_id, at_s=2.0), 5.0).state
        assert (state.feed.reading, state.feed.supply) == (None, Supply.UNKNOWN)
        for at_s in (6.0, 7.0):
            for name in ("snmp", "nut"):
                state = step(policy, state, says(at_s + 0.1 * (name == "nut"), name, "battery")).state
        assert state.feed.supply is supply
        assert isinstance(state.phase, Online) is (supply is not BATTERY)
    stuck = tuple(replace(each, doubted=True) for each in CALM.heard)
    assert (
        after(
            (6.0, "nut", "battery"), (7.0, "nut", "battery"), feed=fusion.rebooted(replace(CALM, heard=stuck), 5.0)
        ).supply
        is not BATTERY
    )


def test_an_older_reading_of_a_source_changes_nothing() -> None:
    assert after((0.5, "nut", "battery"), feed=CALM) is CALM
    assert after((1.1, "nut", "battery"), feed=CALM) is CALM
    foreign = replace(says(9.0, "snmp", "battery"), ups="other")
    assert fusion.observe(POLICY, CALM, foreign) is CALM


def test_two_that_arrive_at_the_same_moment_both_count() -> None:
    feed = after((2.0, "snmp", "battery"), (2.0, "nut", "battery"), feed=CALM)
    assert (feed.supply, feed.proven_by) == (BATTERY, "second_source")
    assert feed.reading is not None
    assert feed.reading.at_s == 2.001, "readings follow each other, by a thousandth if need be"


# --- The way back, and silence --------------------------------------------------------------------------------------

DARK = after(
    (2.0, "snmp", "battery"), (2.1, "nut", "battery"), (3.0, "snmp", "battery"), (3.1, "nut", "battery"), feed=CALM
)


def test_utility_counts_when_all_say_so() -> None:
    one = after((4.0, "snmp", "utility"), (4.1, "nut", "battery"), (5.0, "snmp", "utility"), feed=DARK)
    assert (one.supply, one.disagree_since_s) == (BATTERY, 4.0)
    two = after((5.1, "nut", "utility"), feed=one)
    assert (two.supply, two.since_s, two.disagree_since_s) == (UTILITY, 5.1, None)


@pytest.mark.parametrize(("back_s", "counts"), [(59.9, True), (60.0, False)])
def test_news_of_utility_holds_up_a_commit_while_the_others_may_lag(back_s: float, *, counts: bool) -> None:
    feed = after((4.0, "snmp", "utility"), feed=DARK)
    feed = after((4.0 + back_s, "snmp", "utility"), (4.0 + back_s, "nut", "battery"), feed=feed)
    assert fusion.contradicts_commit(POLICY, feed, 4.0 + back_s) is counts


def frozen(until_s: float, *, moves_at_s: float = 0.0, **fields: Any) -> Feed:  # noqa: ANN401 - fields of a reading
    """Return the feed after both saw a battery that ended at second 4: `nut` goes on to repeat what it said before."""
    feed, at_s = DARK, 4.0
    while at_s <= until_s:
        gauge = {"charge_pct": 90.0, "runtime_s": 500.0 - (at_s >= moves_at_s > 0.0), "input_present": False, **fields}
        feed = after((at_s, "nut", "battery", gauge), (at_s + 0.5, "snmp", "utility"), feed=feed)
        at_s += 1.0
    return feed


def test_figures_that_stand_still_after_the_end_hold_up_the_commit_until_they_are_doubted() -> None:
    """A card that has lost its UPS serves its last values, the input gone; powered off, the host would stay off."""
    for until_s in (61.0, 120.0, 182.0):
        feed = frozen(until_s)
        assert feed.supply is BATTERY
        assert fusion.contradicts_commit(POLICY, feed, until_s + 0.5)
    found = frozen(185.0)
    assert (found.supply, [each.doubted for each in found.heard]) == (UTILITY, [False, True])
    again = after((190.0, "nut", "battery", {"charge_pct": 89.0, "input_present": False}), feed=found)
    assert not any(each.doubted for each in again.heard)


def test_one_that_still_reads_the_ups_is_believed_on() -> None:
    """It has not followed in a minute, and a figure of it moves; or it has none that could."""
    moves = frozen(80.0, moves_at_s=65.0)
    assert not fusion.contradicts_commit(POLICY, moves, 80.5)
    assert frozen(200.0, moves_at_s=65.0).supply is BATTERY
    assert frozen(250.0, moves_at_s=65.0).supply is UTILITY, "three minutes after its last move"
    blind = frozen(200.0, charge_pct=None, runtime_s=None)
    assert blind.supply is BATTERY
    assert not fusion.contradicts_commit(POLICY, blind, 200.5)


def test_one_odd_battery_does_not_take_the_news_of_utility_back() -> None:
    """The one that saw the end glitches once, and the other one lags still: no moment to power off for good."""
    feed = after((4.0, "snmp", "utility"), (5.0, "snmp", "battery"), (6.0, "snmp", "utility"), feed=DARK)
    assert fusion.contradicts_commit(POLICY, after((6.1, "nut", "battery"), feed=feed), 6.1)


def test_a_lagging_source_that_never_knew_of_the_battery_holds_up_nothing() -> None:
    feed = after(
        (2.0, "snmp", "battery"), (2.1, "nut", "utility"), (3.0, "snmp", "battery"), (3.1, "nut", "utility"), feed=CALM
    )
    assert feed.supply is BATTERY
    assert not fusion.contradicts_commit(POLICY, feed, 3.2)
    odd = after((2.0, "snmp", "battery"), (3.0, "snmp", "utility"), feed=CALM)
    assert not fusion.contradicts_commit(POLICY, odd, 3.0), "one odd reading is no battery that could be over"


def test_what_cannot_be_forged_holds_up_a_commit_as_long_as_it_is_fresh() -> None:
    feed = after((2.0, "snmp", "battery"), (2.1, "nut", "utility", {"authenticated": True}), feed=CALM)
    assert fusion.contradicts_commit(POLICY, feed, 5.1)
    assert not fusion.contradicts_commit(POLICY, feed, 5.2)
    lost = fusion.lose(POLICY, feed, SourceFailed(at_s=3.0, ups="ups", source="nut", reason="gone", lost=True))
    assert not fusion.contradicts_commit(POLICY, lost, 3.1)
    assert not fusion.contradicts_commit(POLICY, Feed(heard=(SourceReport(source="x"),)), 3.1)


@pytest.mark.parametrize(
    ("card", "cable", "counts"),
    [
        ({}, {}, False),
        ({"authenticated": False}, {}, True),
        ({"input_present": None}, {}, True),
        ({}, {"charge_pct": lambda at_s: 100.0 - at_s}, True),
        ({}, {"charge_pct": None}, True),
    ],
)
def test_one_that_stands_still_does_not_hold_up_the_commit_of_one_as_sure(
    card: dict[str, Any], cable: dict[str, Any], *, counts: bool
) -> None:
    """A card on v3 that lost its UPS days ago says utility on; upsd with TLS on the cable sees the battery empty."""
    feed = after(*((float(at_s), "nut", "utility", {"charge_pct": 100.0}) for at_s in (1, 2)))
    feed = after((2.0, "snmp", "utility"), feed=feed)
    for at_s in (3.0, 4.0, 5.0):
        given = {"charge_pct": 100.0, "authenticated": True} | cable
        given = {name: value(at_s) if callable(value) else value for name, value in given.items()}
        feed = after(
            (at_s, "snmp", "battery", {"authenticated": True, "input_present": False} | card),
            (at_s + 0.1, "nut", "utility", given),
            feed=feed,
        )
    assert feed.supply is BATTERY
    assert fusion.contradicts_commit(POLICY, feed, 5.2) is counts


def test_the_latch_asks() -> None:
    """The same moment, with and without a source that has news of utility."""
    state = replace(
        restore(POLICY, None, 0.0).state, feed=after((3.9, "nut", "battery"), (4.0, "snmp", "battery"), feed=DARK)
    )
    now = outage_budget(POLICY, state, 4.0)
    assert may_latch(POLICY, state, now, 3.5, 4.0)
    back = replace(state, feed=after((3.8, "snmp", "utility"), (4.0, "nut", "battery"), feed=DARK))
    assert not may_latch(POLICY, back, now, 3.5, 4.0)


def test_the_second_witness_of_a_commit_is_an_older_reading_of_the_same_source() -> None:
    """Two sources that arrive 0.4 s apart: the one before the newest is never half a second old."""
    feed = after((2.0, "snmp", "battery"), (2.4, "nut", "battery"), feed=CALM)
    assert not fusion.battery_reported_twice(POLICY, feed, 2.4)
    feed = after((2.8, "snmp", "battery"), (3.2, "nut", "battery"), feed=feed)
    assert fusion.battery_reported_twice(POLICY, feed, 3.2)
    assert not fusion.battery_reported_twice(POLICY, feed, 60.0), "of a source that is silent by now, no longer"
    back = after((3.6, "snmp", "utility"), (4.0, "nut", "utility"), feed=feed)
    assert not fusion.battery_reported_twice(POLICY, back, 4.0)


@pytest.mark.parametrize(("apart_s", "again"), [(0.4, False), (0.5, True)])
def test_of_a_lone_source_the_one_before_counts(apart_s: float, *, again: bool) -> None:
    alone = replace(POLICY, sources=1)
    feed = Feed()
    for at_s, word_ in ((1.0, "utility"), (2.0, "battery"), (2.0 + apart_s, "battery")):
        feed = fusion.observe(alone, feed, says(at_s, "snmp", word_))
    assert fusion.battery_reported_twice(alone, feed, 2.5) is again
    assert not fusion.battery_reported_twice(alone, Feed(), 2.5)


@pytest.mark.parametrize(("silent_s", "supply"), [(59.0, BATTERY), (61.0, UTILITY)])
def test_the_last_word_of_a_silent_source_counts_for_a_minute(silent_s: float, supply: Supply) -> None:
    """The card dies with its switch; upsd says utility, for its driver hangs."""
    feed = after((2.0, "snmp", "battery"), (3.0, "snmp", "battery"), feed=CALM)
    feed = after((3.0 + silent_s, "nut", "utility"), feed=feed)
    assert feed.supply is supply


def test_the_last_word_ends_when_one_that_knew_has_seen_the_end() -> None:
    feed = fusion.lose(POLICY, DARK, SourceFailed(at_s=6.0, ups="ups", source="snmp", reason="x", lost=True))
    assert after((7.0, "nut", "utility"), feed=feed).supply is UTILITY


def test_a_silent_utility_says_nothing() -> None:
    feed = after((10.0, "nut", "unknown"), feed=CALM)
    assert word(feed) == "unknown", "the utility of nine seconds ago is not the word of now"
    assert word(after((2.0, "nut", "unknown"), feed=CALM)) == "utility", "that of a second ago is"


def test_lost_is_the_feed_when_all_its_sources_are() -> None:
    def lose(feed: Feed, source: str, at_s: float) -> Feed:
        failure = SourceFailed(at_s=at_s, ups="ups", source=source, reason="x", lost=True)
        return fusion.lose(POLICY, feed, failure)

    one = lose(CALM, "snmp", 5.0)
    assert (one.lost_since_s, fusion.lost_since_s(one, "snmp"), fusion.lost_since_s(one, "nut")) == (
        None,
        5.0,
        None,
    )
    assert lose(one, "snmp", 6.0) is one
    assert lose(one, "nut", 7.0).lost_since_s == 7.0
    assert after((8.0, "nut", "utility"), feed=lose(one, "nut", 7.0)).lost_since_s is None
    never = lose(Feed(), "snmp", 5.0)
    assert never.lost_since_s is None, "the other one has not been heard yet"
    assert lose(never, "nut", 6.0).lost_since_s == 6.0
    assert fusion.lost_since_s(Feed(lost_since_s=3.0), "snmp") == 3.0, "a lone source is the feed"
    missed = SourceFailed(at_s=5.0, ups="ups", source="snmp", reason="one miss")
    assert fusion.lose(POLICY, CALM, missed) is CALM


THREE = make_policy(["sources=3", "table=50:540,75:360,100:240"])


def of_three(*readings: ReportedLine) -> Feed:
    """Return the feed of three sources after readings; the first one named is asked first in every vote."""
    feed = Feed()
    for each in readings:
        feed = fusion.observe(THREE, feed, says(*each))
    return feed


@pytest.mark.parametrize(
    "first",
    [
        ((0.0, "first", "battery"),),
        ((0.0, "first", "utility"),),
        ((0.0, "first", "utility"), (1.0, "first", "battery"), (2.0, "first", "battery")),
    ],
    ids=["has never said anything else", "has long been silent on utility", "fell silent on battery long ago"],
)
def test_whose_word_does_not_count_silences_nobody_after_it(first: tuple[ReportedLine, ...]) -> None:
    calm = (*first, (100.0, "snmp", "utility"), (100.5, "nut", "utility"))
    assert word(of_three(*calm)) == "utility"
    feed = of_three(*calm, (101.0, "snmp", "battery"), (101.5, "nut", "battery"))
    assert (feed.supply, word(feed)) == (BATTERY, "battery")
    against = of_three(*calm, (101.0, "snmp", "battery"), (101.5, "snmp", "battery"), (101.6, "nut", "utility"))
    assert (against.supply, word(against)) == (BATTERY, "battery")


def test_who_was_lost_before_it_reported_anything_has_no_vote() -> None:
    lost = fusion.lose(POLICY, Feed(), SourceFailed(at_s=1.0, ups="ups", source="snmp", reason="x", lost=True))
    assert after((2.0, "nut", "utility"), feed=lost).supply is UTILITY


def test_beside_one_that_has_no_vote_readings_follow_each_other_too() -> None:
    feed = after((1.0, "snmp", "battery"), (1.0, "nut", "utility"))
    assert feed.reading is not None
    assert (feed.supply, feed.reading.at_s) == (UTILITY, 1.001)


def test_a_doubted_source_silences_nobody_after_it() -> None:
    feed = stuck(feed=after((1.0, "nut", "utility"), (1.1, "snmp", "utility")))
    assert [(each.source, each.doubted) for each in feed.heard] == [("nut", True), ("snmp", False)]
    assert after((190.0, "snmp", "battery"), (191.0, "snmp", "battery"), feed=feed).supply is BATTERY
    assert after((190.0, "snmp", "utility"), feed=feed).disagree_since_s is None, "nor does it disagree with anybody"


def test_one_odd_battery_of_another_source_counts_as_what_it_said_before() -> None:
    feed = after((2.0, "nut", "bypass"), (3.0, "nut", "battery"), (3.5, "snmp", "utility"), feed=CALM)
    assert word(feed) == "bypass"


def test_the_edges_of_a_word() -> None:
    """Seconds that a float holds exactly: what is just old enough, and what is just too old."""
    calm = after((-2.0, "snmp", "utility"), (-1.0, "nut", "utility"))
    assert after((0.0, "snmp", "battery"), (0.2, "snmp", "battery"), feed=calm).supply is BATTERY
    twice = after((0.0, "snmp", "battery"), (0.5, "snmp", "battery"), feed=calm)
    assert fusion.battery_reported_twice(POLICY, twice, 0.5)
    assert fusion.battery_reported_twice(POLICY, twice, 0.5 + POLICY.stale_s)
    assert not fusion.battery_reported_twice(POLICY, twice, 0.501 + POLICY.stale_s)
    assert after((60.5, "nut", "utility"), feed=twice).supply is BATTERY
    assert after((60.501, "nut", "utility"), feed=twice).supply is UTILITY


def test_news_of_the_end_that_came_with_the_last_word_does_not_end_it() -> None:
    feed = after((2.0, "nut", "battery"), (2.25, "nut", "battery"), (2.5, "snmp", "battery"), feed=CALM)
    feed = after((3.0, "snmp", "battery"), (3.0, "nut", "utility"), feed=feed)
    assert after((9.0, "nut", "utility"), feed=feed).supply is BATTERY
    later = after((2.0, "nut", "battery"), (2.25, "nut", "battery"), (2.5, "snmp", "battery"), feed=CALM)
    later = after((3.0, "snmp", "battery"), (3.25, "nut", "utility"), feed=later)
    assert after((9.0, "nut", "utility"), feed=later).supply is UTILITY


def test_after_exactly_half_a_minute_those_decide_that_cannot_be_forged() -> None:
    sure: dict[str, Any] = {"authenticated": True}
    feed = CALM
    for at_s in range(2, 33):
        feed = after((float(at_s), "snmp", "battery"), (at_s + 0.5, "nut", "utility", sure), feed=feed)
    assert (feed.disagree_since_s, feed.supply) == (3.0, BATTERY)
    assert after((32.999, "nut", "utility", sure), feed=feed).supply is BATTERY
    assert after((33.0, "nut", "utility", sure), feed=feed).supply is UTILITY


# --- Found out ------------------------------------------------------------------------------------------------------


def stuck(
    *,
    until_s: float = 184.0,
    nut: dict[str, Any] | None = None,
    snmp: dict[str, Any] | None = None,
    feed: Feed = CALM,
) -> Feed:
    """Return the feed after `nut` has said battery from second 2, and `snmp` utility, with nothing emptying."""
    at_s = 2.0
    while at_s <= until_s:
        given = {"charge_pct": 100.0, "runtime_s": 600.0, **(nut or {})}
        given = {name: value(at_s) if callable(value) else value for name, value in given.items()}
        feed = after(
            (at_s, "nut", "battery", given),
            (at_s + 0.5, "snmp", "utility", {"input_present": True, **(snmp or {})}),
            feed=feed,
        )
        at_s += 1.0
    return feed


def test_a_battery_for_ever_is_found_out() -> None:
    before = stuck(until_s=181.0)
    assert (before.supply, before.disagree_since_s) == (BATTERY, 3.0)
    found = stuck()
    assert (found.supply, [each.doubted for each in found.heard]) == (UTILITY, [False, True])
    again = after((190.0, "nut", "utility"), feed=found)
    assert not any(each.doubted for each in again.heard)
    assert after((191.0, "nut", "battery"), (192.0, "nut", "battery"), feed=again).supply is BATTERY


@pytest.mark.parametrize(
    ("nut", "snmp"),
    [
        ({"charge_pct": lambda at_s: 100.0 - 0.01 * at_s}, {}),
        ({"runtime_s": lambda at_s: 600.0 - 0.4 * at_s}, {}),
        ({"charge_pct": None, "runtime_s": None}, {}),
        ({"low_battery": True}, {}),
        ({"on_battery_s": lambda at_s: at_s}, {}),
        ({"input_present": False}, {}),
        ({}, {"input_present": None}),
        ({}, {"input_present": False}),
    ],
)
def test_one_that_may_be_right_is_believed_on(nut: dict[str, Any], snmp: dict[str, Any]) -> None:
    """It empties; it cannot be held against a gauge; it proves itself; or the other one does not see the input."""
    assert stuck(nut=nut, snmp=snmp, until_s=250.0).supply is BATTERY


def test_a_doubted_source_says_nothing_else_either() -> None:
    feed = after((184.8, "nut", "battery", {"overload": True, "runtime_s": 590.0, "load_pct": 99.0}), feed=stuck())
    assert feed.reading is not None
    assert (feed.reading.overload, feed.reading.runtime_s, feed.reading.load_pct) == (False, None, None)
    assert (feed.reading.at_s, feed.reading.ups, feed.reading.source) == (184.8, "ups", "nut")


# --- Who cannot be forged -------------------------------------------------------------------------------------------


def test_after_half_a_minute_those_decide_that_cannot_be_forged() -> None:
    """Before that the more cautious report counts: they may lag."""
    feed, at_s = CALM, 2.0
    while at_s < 32.0:
        feed = after(
            (at_s, "snmp", "battery"),
            (at_s + 0.5, "nut", "utility", {"authenticated": True}),
            feed=feed,
        )
        at_s += 1.0
    assert (feed.supply, feed.disagree_since_s) == (BATTERY, 3.0)
    feed = after((33.5, "nut", "utility", {"authenticated": True}), feed=feed)
    assert feed.supply is UTILITY


def test_a_battery_with_its_own_witness_counts_on_beside_them_and_they_hold_up_the_commit() -> None:
    """They may be frozen; saving costs seconds, and they are asked before anything is powered off."""
    feed = CALM
    for at_s in range(2, 100):
        feed = after(
            (float(at_s), "snmp", "battery", {"on_battery_s": float(at_s)}),
            (at_s + 0.5, "nut", "utility", {"authenticated": True}),
            feed=feed,
        )
    assert feed.supply is BATTERY
    assert fusion.contradicts_commit(POLICY, feed, 100.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"on_battery_s": 5.0},
        {"input_present": False},
        {"low_battery": True},
        {"charge_pct": 98.9},
        {"runtime_s": 540.0},
    ],
)
def test_a_doubt_ends_with_the_first_thing_that_speaks_for_the_source(fields: dict[str, Any]) -> None:
    """A gauge that rests at 100 % for minutes made it doubted; what empties proves it right."""
    feed = after((184.8, "nut", "battery", {"charge_pct": 100.0, "runtime_s": 600.0} | fields), feed=stuck())
    assert not any(each.doubted for each in feed.heard)


def test_a_fall_of_the_charge_proves_two_sources_that_have_only_ever_said_battery() -> None:
    """A boot into the next outage: nobody has seen utility, and both of them say what is true."""
    feed = Feed()
    for at_s in range(20):
        given = {"charge_pct": 90.0 - 0.2 * at_s}
        feed = after((float(at_s), "snmp", "battery", given), (at_s + 0.5, "nut", "battery", given), feed=feed)
    assert (feed.supply, feed.proven_by) == (BATTERY, "charge_pct")


# --- Field by field -------------------------------------------------------------------------------------------------


def merged(first: dict[str, Any], second: dict[str, Any], *, twice: bool = True, word: str = "utility") -> Reading:
    """Return what is said together when `second` of snmp arrives after `first` of nut."""
    feed = after((2.0, "nut", word), feed=CALM) if not twice else after((2.0, "nut", word, first), feed=CALM)
    feed = after((2.5, "nut", word, first), (3.0, "snmp", word, second), feed=feed)
    assert feed.reading is not None
    return feed.reading


@pytest.mark.parametrize(
    ("field", "first", "second", "together"),
    [
        ("runtime_s", 300.0, 400.0, 300.0),
        ("runtime_s", 400.0, 300.0, 300.0),
        ("runtime_s", None, 300.0, 300.0),
        ("runtime_s", 300.0, None, 300.0),
        ("charge_pct", 80.0, 90.0, 80.0),
        ("charge_pct", 90.0, 80.0, 80.0),
        ("load_pct", 40.0, 50.0, 50.0),
        ("load_pct", 50.0, 40.0, 50.0),
        ("load_pct", 50.0, None, 50.0),
        ("load_pct", None, 40.0, 40.0),
        ("watts", 900.0, 800.0, 900.0),
        ("watts", 800.0, 900.0, 900.0),
        ("input_v", 230.0, None, 230.0),
        ("input_v", 230.0, 229.0, 229.0),
        ("battery_temp_c", 25.0, None, 25.0),
        ("low_battery", True, False, True),
        ("replace_battery", True, False, True),
        ("overload", True, False, True),
        ("forced_shutdown", True, False, True),
        ("testing", True, False, True),
        ("calibrating", True, False, True),
        ("output_off_in_s", 50.0, None, 50.0),
        ("output_off_in_s", 50.0, 40.0, 40.0),
        ("alarms", ("a",), ("b",), ("a", "b")),
        ("input_present", True, None, True),
        ("input_present", True, False, False),
        ("input_present", None, None, None),
    ],
)
def test_the_cautious_word_of_each_field(field: str, first: object, second: object, together: object) -> None:
    assert getattr(merged({field: first}, {field: second}), field) == together


@pytest.mark.parametrize(
    "field", ["low_battery", "replace_battery", "overload", "forced_shutdown", "testing", "calibrating"]
)
def test_a_flag_counts_beside_the_others_once_its_source_has_repeated_it(field: str) -> None:
    assert getattr(merged({field: True}, {}, twice=False), field) is False
    assert getattr(merged({}, {field: True}), field) is True, "the arriving one says it itself"


def test_a_number_counts_beside_the_others_as_the_milder_of_two() -> None:
    feed = after((2.0, "nut", "utility", {"runtime_s": 300.0, "load_pct": 40.0}), feed=CALM)
    feed = after((2.5, "nut", "utility", {"runtime_s": 20.0, "load_pct": 90.0}), feed=feed)
    assert feed.reading is not None
    assert (feed.reading.runtime_s, feed.reading.load_pct) == (20.0, 90.0)
    feed = after((3.0, "snmp", "utility", {"runtime_s": 310.0, "load_pct": 41.0}), feed=feed)
    assert feed.reading is not None
    assert (feed.reading.runtime_s, feed.reading.load_pct) == (300.0, 41.0)


def test_seconds_on_battery_and_the_input_are_the_word_of_those_on_battery() -> None:
    feed = after((4.0, "nut", "battery", {"on_battery_s": 30.0, "input_present": False}), feed=DARK)
    feed = after((4.5, "snmp", "utility", {"on_battery_s": 0.0, "input_present": True}), feed=feed)
    assert feed.reading is not None
    assert (feed.reading.on_battery_s, feed.reading.input_present) == (30.0, False)


@pytest.mark.parametrize("flag", ["calibrating", "testing"])
def test_a_stuck_flag_of_one_does_not_hide_an_outage_that_another_proves(flag: str) -> None:
    """CAL that was never cleared, and a card that counts its seconds on battery."""
    cal = {flag: True}
    calm = after((1.5, "nut", "utility", cal), (1.8, "nut", "utility", cal), feed=CALM)
    given = {"on_battery_s": 3.0, "input_present": False}
    feed = after((2.0, "nut", "battery", cal), (2.5, "nut", "battery", cal), (3.0, "snmp", "battery", given), feed=calm)
    assert feed.reading is not None
    assert (feed.supply, getattr(feed.reading, flag)) == (BATTERY, False)
    test_only = after((2.0, "nut", "battery", cal), (2.5, "nut", "battery", cal), feed=calm)
    assert test_only.supply is UTILITY, "one that nobody contradicts is one"


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("utility", "bypass", "bypass"),
        ("eco", "utility", "eco"),
        ("utility", "trim", "trim"),
        ("off", "utility", "utility"),
        ("unknown", "utility", "utility"),
        ("unknown", "off", "off"),
        ("eco", "bypass", "bypass"),
        ("boost", "eco", "eco"),
    ],
)
def test_the_least_protected_word_counts_and_an_idle_off_does_not(first: str, second: str, together: str) -> None:
    """The host computes: an OFF that another source contradicts is a bogus flag."""
    feed = after((2.0, "nut", first), (2.5, "nut", first), (3.0, "snmp", second), feed=CALM)
    assert word(feed) == together


def test_one_source_alone_is_reported_as_it_is() -> None:
    """The other one has never answered."""
    reading = says(1.0, "nut", "utility", {"runtime_s": 5.0, "low_battery": True})
    feed = fusion.observe(POLICY, Feed(), reading)
    assert feed.reading == reading
    unproven = after((1.0, "nut", "battery"))
    assert (word(unproven), unproven.unproven_battery) == ("battery", True)


# --- An answer that contradicts itself ----------------------------------------------------------------------------


def gone(on_battery_s: float) -> dict[str, Any]:
    return {"on_battery_s": on_battery_s, "input_present": False}


@pytest.mark.parametrize(("on_battery_s", "contradicts"), [(0.0, False), (0.5, True)])
def test_any_second_on_battery_is_one(on_battery_s: float, *, contradicts: bool) -> None:
    assert fusion.contradicts_itself(says(1.0, "snmp", "utility", gone(on_battery_s))) is contradicts


@pytest.mark.parametrize("sources", [1, 2])
def test_two_witnesses_against_one_word_are_battery_when_a_second_reading_says_so_too(sources: int) -> None:
    """A card whose output source is frozen, or mapped wrongly, while it counts its seconds and misses its input."""
    policy = replace(POLICY, sources=sources)
    feed = fusion.observe(policy, Feed(), says(1.0, "snmp", "utility"))
    feed = fusion.observe(policy, feed, says(2.0, "snmp", "utility", gone(4.0)))
    assert feed.supply is UTILITY
    feed = fusion.observe(policy, feed, says(3.0, "snmp", "utility", gone(5.0)))
    assert (feed.supply, word(feed)) == (BATTERY, "battery")
    assert feed.reading is not None
    assert feed.reading.alarms == (fusion.CONTRADICTED,)
    feed = fusion.observe(policy, feed, says(4.0, "snmp", "boost", gone(6.0)))
    assert feed.supply is BATTERY, "and goes on to be"
    feed = fusion.observe(policy, feed, says(5.0, "snmp", "utility", {"on_battery_s": 0.0, "input_present": True}))
    assert (feed.supply, word(feed)) == (UTILITY, "utility")


def test_unknown_with_the_same_two_witnesses_is_battery_too() -> None:
    """CyberPower on overload, a card with "other": the word is unknown, the rest is not."""
    policy = replace(POLICY, sources=1)
    feed = fusion.observe(policy, Feed(), says(1.0, "snmp", "utility"))
    for at_s in (2.0, 3.0):
        feed = fusion.observe(policy, feed, says(at_s, "snmp", "unknown", gone(at_s)))
    assert (feed.supply, word(feed)) == (BATTERY, "battery")


@pytest.mark.parametrize(
    "fields", [{"on_battery_s": 0.0, "input_present": False}, {"input_present": False}, {"on_battery_s": 5.0}]
)
def test_one_witness_against_the_word_is_not_enough(fields: dict[str, Any]) -> None:
    policy = replace(POLICY, sources=1)
    feed = Feed()
    for at_s in (1.0, 2.0, 3.0):
        feed = fusion.observe(policy, feed, says(at_s, "snmp", "utility", fields))
    assert feed.supply is UTILITY


# --- Found by changing the code ---------------------------------------------------------------------------------------


def test_seconds_on_battery_of_nought_are_none() -> None:
    """0 is what a UPS on utility says: no witness, and nothing that stands still."""
    assert fusion.supports_battery(says(1.0, "snmp", "battery", {"on_battery_s": 0.0})) == ""
    assert fusion.supports_battery(says(1.0, "snmp", "battery", {"on_battery_s": 0.1})) == "on_battery_s"
    result = fusion.measured(says(1.0, "snmp", "utility", {"on_battery_s": 0.0}), Measures(), utility_seen=True)
    assert result.on_battery_s == 0.0


@pytest.mark.parametrize("gauge", ["charge_pct", "runtime_s"])
def test_one_gauge_that_is_not_reported_any_more_does_not_find_it_out_by_itself(gauge: str) -> None:
    """Doubt needs a gauge that was told when the battery began and is told now: of neither, nothing is known."""
    fields = {"charge_pct": 90.0} if gauge == "charge_pct" else {"runtime_s": 900.0}
    lying: ReportedLine = (2.0, "snmp", "battery", fields)
    there = {"input_present": True}
    feed = after(lying, (2.1, "nut", "utility", there), feed=CALM)
    for at_s in range(3, 400):
        feed = after((float(at_s), "snmp", "battery", {}), (at_s + 0.1, "nut", "utility", there), feed=feed)
    assert not any(heard.doubted for heard in feed.heard)
    for at_s in range(400, 405):
        feed = after((float(at_s), "snmp", "battery", fields), (at_s + 0.1, "nut", "utility", there), feed=feed)
    assert [heard.source for heard in feed.heard if heard.doubted] == ["snmp"]


def test_a_test_flag_of_who_is_proven_counts() -> None:
    """Seconds that run in a calibration are its own: they prove no outage, and the flag stays."""
    clock = {"on_battery_s": 4.0, "calibrating": True}
    calm = after((1.0, "snmp", "utility", {"on_battery_s": 0.0}), (1.1, "nut", "utility"))
    feed = after((2.0, "snmp", "battery", clock), (2.1, "nut", "utility"), (3.0, "snmp", "battery", clock), feed=calm)
    assert feed.reading is not None
    assert feed.reading.calibrating


# --- Sources that the settings no longer name -------------------------------------------------------------------------


def named(*names: str) -> Policy:
    return replace(POLICY, sources=len(names), source_names=names)


def lost(at_s: float, name: str) -> SourceFailed:
    return SourceFailed(at_s=at_s, ups="ups", source=name, reason="no answer", lost=True)


def test_a_source_that_was_taken_out_does_not_hide_that_the_others_are_lost() -> None:
    """Its poller has ended, so no report says that it is lost, too."""
    before, now = named("snmp", "nut", "apcupsd"), named("snmp", "nut")
    state = State(feed=CALM)
    for event in (says(1.2, "apcupsd", "utility"), says(2.0, "snmp", "utility"), says(2.1, "nut", "utility")):
        state = step(before, state, event).state
    state = reloaded(before, now, state, 3.0)
    assert [each.source for each in state.feed.heard] == ["snmp", "nut"]
    for event in (lost(6.0, "snmp"), lost(6.1, "nut")):
        state = step(now, state, event).state
    assert state.feed.lost_since_s == 6.1


@pytest.mark.parametrize(("down", "lost_since_s"), [(("snmp", "nut"), 5.1), (("nut",), None)])
def test_those_that_stay_may_be_lost_already(down: tuple[str, ...], lost_since_s: float | None) -> None:
    """Their further failures would be no news."""
    before = named("snmp", "nut", "apcupsd")
    state = step(before, State(feed=CALM), says(4.0, "apcupsd", "utility")).state
    for place, name in enumerate(down):
        state = step(before, state, lost(5.0 + 0.1 * place, name)).state
    assert reloaded(before, named("snmp", "nut"), state, 6.0).feed.lost_since_s == lost_since_s


def test_the_only_source_that_is_left_disagrees_with_none_and_recovers_once() -> None:
    before, now = named("snmp", "nut"), named("snmp")
    state = step(before, State(feed=CALM), lost(2.0, "snmp")).state
    state = reloaded(before, now, replace(state, feed=replace(state.feed, disagree_since_s=1.0)), 3.0)
    assert (state.feed.heard, state.feed.disagree_since_s, state.feed.lost_since_s) == ((), None, 2.0)
    notes = []
    for at_s in (4.0, 5.0):
        answer = step(now, state, says(at_s, "snmp", "utility"))
        state, notes = answer.state, [*notes, *answer.notes]
    assert [note.event for note in notes] == ["source_recovered"]


@pytest.mark.parametrize("former", [("snmp",), ("snmp", "nut")])
def test_what_a_former_source_has_shown_is_no_evidence_for_a_new_one(former: tuple[str, ...]) -> None:
    """Some inverters report battery permanently, and the host must not be powered off for that after a reload."""
    before, now = named(*former), named("apcupsd")
    state = State()
    for at_s in (1.0, 2.0):
        for name in former:
            state = step(before, state, says(at_s, name, "utility", {"output_off_in_s": 60.0})).state
    state = reloaded(before, now, state, 3.0)
    for at_s in range(4, 400):
        state = step(now, state, says(float(at_s), "apcupsd", "battery", {"output_off_in_s": 30.0})).state
    assert isinstance(state.phase, Online)
    assert state.alarms == ("unproven_battery",)


def test_a_confirmed_battery_counts_on_with_another_source() -> None:
    """A daemon that is restarted in an outage, with other settings, continues the outage."""
    state = State()
    for at_s, word in ((1.0, "utility"), (2.0, "battery"), (3.0, "battery"), (4.0, "battery")):
        state = step(named("snmp"), state, says(at_s, "snmp", word)).state
    state = reloaded(named("snmp"), named("nut"), state, 5.0)
    state = step(named("nut"), state, says(6.0, "nut", "battery")).state
    assert state.feed.supply is Supply.BATTERY


@pytest.mark.parametrize("policy", [named("snmp", "nut"), POLICY])
def test_sources_that_stay_keep_what_is_known_of_them(policy: Policy) -> None:
    """A replay polls none and names none."""
    assert reloaded(policy, policy, State(feed=CALM), 3.0).feed == CALM
