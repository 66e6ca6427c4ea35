"""What is made of each feed, and what all of them together are said to be: figures behind the rules of test_feeds."""

from dataclasses import replace
from typing import Any

import pytest

from powerguard.core.energy import account, budget
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Battery, Feed, State, Supplied, Supply
from powerguard.core.supply import feeds
from powerguard.core.supply.feeds import ENDLESS_S, FACTORS, stepped
from tests.core.test_feeds import A_OUT, ALL_OUT, BOTH, CALM, ONE_OF_TWO, after, both, lost, policy, says

THREE = policy("feed=a", "feed=b", "feed=c")
UTILITY, BATTERY, UNKNOWN = Supply.UTILITY, Supply.BATTERY, Supply.UNKNOWN


def each(name: str, supply: Supply, left: float | None = None, load: float | None = None, **fields: Any) -> Supplied:  # noqa: ANN401 - any field of a reading
    word = "unknown" if supply is UNKNOWN else supply.value
    battery = Battery(used=0.0, left=left, load=load, health=1.0)
    return Supplied(
        ups=name, feed=Feed(supply=supply, since_s=0.0, reading=says(0.0, name, word, **fields)), battery=battery
    )


def test_one_that_is_first_heard_of_by_its_silence() -> None:
    worn = replace(ONE_OF_TWO, feeds=tuple(replace(f, policy=replace(f.policy, health=0.6)) for f in ONE_OF_TWO.feeds))
    b = feeds.of(after(worn, lost(5.0, "b")), "b")
    assert b is not None
    assert (b.battery.at_s, b.battery.health, b.feed.since_s, b.feed.lost_since_s) == (5.0, 0.6, 5.0, 5.0)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"testing": True}, BATTERY),
        ({"calibrating": True}, BATTERY),
        ({"testing": True, "input_present": False}, BATTERY),
        ({"testing": True, "input_present": True}, UTILITY),
        ({}, UTILITY),
    ],
)
def test_a_battery_that_is_tested_while_another_one_carries(fields: dict[str, Any], word: Supply) -> None:
    """It counts as battery, unless its input is seen to be there: nobody knows whether it could stop."""
    tested = each("b", UTILITY, 1.0, 0.5)
    tested = replace(tested, feed=replace(tested.feed, reading=says(0.0, "b", "battery", **fields)))
    assert feeds.supply_of((each("a", BATTERY), tested), tested) is word
    unread = replace(tested, feed=replace(tested.feed, reading=None))
    assert feeds.supply_of((each("a", BATTERY), unread), unread) is UTILITY


def test_who_takes_over_how_much_of_a_load() -> None:
    """A ends with 0.6: of the three power supplies that stay B has two and takes 0.4 of it, C has one and takes 0.2."""
    made = policy("feed=a", "feed=b:2", "feed=c")

    def overloaded(load_b: float, load_a: float | None = 0.6) -> bool:
        b = each("b", UTILITY, 1.0, load_b)
        upses = (each("a", BATTERY, 1.0, load_a), b, each("c", UTILITY, 1.0, 0.1))
        return feeds._overloaded(made, upses, b, feeds._ups_supply(made, upses), 1.0).overloaded

    assert not overloaded(0.599)
    assert overloaded(0.601)
    assert not overloaded(0.9, None), "an unknown load says nothing"


def test_those_that_are_missing_are_named_with_why() -> None:
    readings = (says(0.0, "a", "utility"), says(0.1, "b", "utility"), says(0.2, "c", "utility"))
    out = (says(2.0, "a", "battery"), says(2.1, "b", "bypass"), says(3.0, "a", "battery"))
    assert feeds.redundancy_lost(after(THREE, *readings, *out)) == "a (on battery), b (bypass)"
    assert feeds.redundancy_lost(
        after(THREE, *readings, lost(2.0, "c"), says(2.1, "a", "off"), says(3.1, "a", "off"))
    ) == ("a (off)"), "one that is silent while nothing else is out keeps its last word"


def test_the_whole_says_what_the_newest_reading_says() -> None:
    """Two readings in a row are of one UPS: those of two are no falling countdown."""
    state = after(ONE_OF_TWO, *CALM)
    assert (state.feed.reading, state.feed.previous) != (None, None)
    assert (state.feed.previous or says(9.0, "a", "off")).at_s == 0.25
    assert (state.feed.previous or says(9.0, "a", "off")).ups == "b"
    silent = after(ONE_OF_TWO, lost(5.0, "b"), state=state)
    assert (silent.feed.reading, silent.feed.previous) == (state.feed.reading, state.feed.previous)


def test_the_word_is_that_of_the_host_and_not_of_one_feed() -> None:
    one = after(ONE_OF_TWO, *CALM, *A_OUT).feed
    assert (one.reading is not None and one.reading.output_source, one.proven_by) == ("utility", "second_reading")
    back = after(ONE_OF_TWO, *CALM, *ALL_OUT, *both(4.0, "utility", "utility"), *both(5.0, "utility", "utility")).feed
    assert (back.supply, back.proven_by, back.utility_seen) == (UTILITY, "second_reading", True)
    first = after(ONE_OF_TWO, says(0.0, "a", "battery")).feed
    assert (first.supply, first.unproven_battery, first.utility_seen) == (UNKNOWN, True, False)
    assert after(ONE_OF_TWO, says(0.0, "a", "utility", forced_shutdown=True)).feed.fsd_at_first


def test_the_runtime_is_that_of_the_batteries_that_carry() -> None:
    """One that charges on utility may say less; what it says counts only where none is on battery."""
    low = {"runtime_s": 200.0}
    readings = (says(2.0, "a", "battery"), says(2.5, "b", "utility", **low), says(3.0, "a", "battery"))
    out = after(BOTH, *CALM, *readings).feed.reading
    assert out is not None
    assert (out.output_source, out.runtime_s) == ("battery", 540.0)
    calm = after(BOTH, *CALM, says(2.5, "b", "utility", **low)).feed.reading
    assert calm is not None
    assert calm.runtime_s == 200.0


def test_a_test_of_the_one_that_is_needed_began_when_it_began() -> None:
    testing = tuple(says(2.0 + n, "a", "battery", testing=True, input_present=True) for n in range(4))
    feed = after(BOTH, *CALM, *testing).feed
    assert (feed.supply, feed.test_since_s, feed.since_s) == (UTILITY, 2.0, 5.0)
    assert after(ONE_OF_TWO, *CALM, *testing).feed.test_since_s is None, "the other one carries the host"


# --- How long -------------------------------------------------------------------------------------------------------


def lasts_s(made: Policy, *upses: Supplied) -> float:
    """Return how long they last at the load of now."""
    words = feeds._ups_supply(made, upses)
    return feeds._lasts_s(made, upses, Feed(supply=BATTERY), 0.0, ups_supply=words, full=False)[FACTORS.index(1.0)]


def test_what_blind_ones_carry_goes_to_the_others_by_their_power_supplies() -> None:
    """Blind by the energy or by the table, first or last, one or two of them: they carry, and count for nothing."""
    made = policy("feed=a:2", "feed=b", "feed=c", "feed=d")
    a, b = each("a", BATTERY, 0.8, 0.3), each("b", BATTERY, 0.8, 0.3)
    dark = tuple(each(name, UNKNOWN, 0.5, 0.15) for name in ("c", "d"))
    carried = lasts_s(made, replace(a, battery=replace(a.battery, load=0.5)), b)
    assert carried < lasts_s(made, a, b)
    # Of 0.3 that two carry A takes two thirds: 0.2 more; B 0.1 more.
    moved = (replace(a, battery=replace(a.battery, load=0.5)), replace(b, battery=replace(b.battery, load=0.4)))
    assert lasts_s(made, a, b, *dark) == pytest.approx(lasts_s(made, *moved))
    assert lasts_s(made, *dark, a, b) == pytest.approx(lasts_s(made, *moved))
    unknown = tuple(replace(each, battery=replace(each.battery, load=None)) for each in dark)
    assert lasts_s(made, a, b, *unknown) == lasts_s(made, a, b), "what nobody knows is not moved"
    blind = each("c", BATTERY, None, 0.3)
    assert lasts_s(made, a, b, blind) == pytest.approx(lasts_s(made, *moved))


def test_one_without_a_table_is_blind_and_one_on_utility_needs_none() -> None:
    bare = replace(ONE_OF_TWO.feeds[1], policy=replace(ONE_OF_TWO.feeds[1].policy, runtime_table=()))
    made = replace(ONE_OF_TWO, feeds=(ONE_OF_TWO.feeds[0], bare))
    a = each("a", BATTERY, 0.8, 0.3)
    twice = replace(a, battery=replace(a.battery, load=0.6))
    assert lasts_s(made, a, each("b", BATTERY, 0.8, 0.3)) == pytest.approx(lasts_s(made, twice))
    assert lasts_s(made, a, each("b", UTILITY, None, 0.3)) >= ENDLESS_S


def test_an_empty_one_is_over_at_once_and_leaves_its_load() -> None:
    a = each("a", BATTERY, 0.8, 0.3)
    twice = replace(a, battery=replace(a.battery, load=0.6))
    assert lasts_s(ONE_OF_TWO, a, each("b", BATTERY, 0.0, 0.3)) == pytest.approx(lasts_s(ONE_OF_TWO, twice))


def test_the_last_endless_one_may_be_the_last_but_one() -> None:
    assert stepped([ENDLESS_S] * 5 + [40.0])[4:] == [40.0 * FACTORS[5] / FACTORS[4], 40.0]


def test_an_unreported_load_is_a_full_one_as_for_a_lone_battery() -> None:
    """Blind, a host whose batteries are nearly empty would be stopped as if there were time for an orderly stop."""
    full_s = budget.usable(ONE_OF_TWO, 0.8) * 240.0
    for load in (None, 0.5):
        upses = (each("a", BATTERY, 0.8, load), each("b", BATTERY, 0.8))
        state = feeds.advance(ONE_OF_TWO, State(upses=upses), 0.0)
        now = budget.compute(ONE_OF_TWO, state.battery, state.feed, (), 0.0)
        assert now.reff_now_s == pytest.approx(full_s)


def test_the_table_of_an_empty_one_is_that_of_a_full_one_and_not_what_stood_there() -> None:
    """One reading without any runtime as utility comes back: the endless table of the moment before is not kept."""
    state = feeds.advance(ONE_OF_TWO, State(upses=(each("a", BATTERY, 0.8, 0.6), each("b", UTILITY, 0.8, 0.6))), 0.0)
    assert state.battery.composed[0][1] >= ENDLESS_S, "a third of this load would last"
    upses = (each("a", UTILITY, 0.0, 0.6), each("b", UTILITY, 0.0, 0.6))
    state = feeds.advance(ONE_OF_TWO, replace(state, upses=upses), 1.0)
    assert (state.feed.supply, state.battery.left) == (UTILITY, 0.0)
    alone = [account.tau_s(ONE_OF_TWO.runtime_table, load) for load, _ in state.battery.composed]
    assert [tau_s for _, tau_s in state.battery.composed] == pytest.approx(alone)
    cut = tuple(replace(each, feed=replace(each.feed, countdown_at_s=30.0)) for each in upses)
    state = feeds.advance(ONE_OF_TWO, replace(state, upses=cut), 1.0)
    assert [tau_s for _, tau_s in state.battery.composed] == pytest.approx(alone), (
        "no cut shortens what a full one lasts"
    )


def test_an_empty_one_does_not_end_the_one_that_has_utility() -> None:
    """Overloaded in training, it carries the paused host for ever: that is no battery to power off for."""
    upses = (each("a", BATTERY, 0.0, 0.3), replace(each("b", UTILITY, 0.8, 0.3), overloaded=True))
    state = feeds.advance(ONE_OF_TWO, State(upses=upses), 0.0)
    now = budget.compute(ONE_OF_TWO, state.battery, state.feed, (), 0.0)
    assert (state.feed.supply, state.battery.left) == (BATTERY, 0.4)
    assert now.reff_now_s is not None
    assert now.reff_now_s >= ENDLESS_S
    both = feeds.advance(BOTH, State(upses=upses), 0.0)
    now = budget.compute(BOTH, both.battery, both.feed, (), 0.0)
    assert now.reff_now_s == pytest.approx(0.1), "where both are needed it is over"


# --- Each as if it were alone ----------------------------------------------------------------------------------------


def test_each_of_them_alone() -> None:
    """Its own policy, feed and battery, and nothing of the others; one that was never heard of is not there."""
    lone = policy()
    assert feeds.each_alone(lone, State()) == [(lone, State())]
    state = after(ONE_OF_TWO, *CALM, *A_OUT)
    alone = feeds.each_alone(ONE_OF_TWO, state)
    assert [made.ups for made, _ in alone] == ["a", "b"]
    assert [one.feed.supply for _, one in alone] == [BATTERY, UTILITY]
    assert [one.battery for _, one in alone] == [each.battery for each in state.upses]
    assert all(one.upses == () and one.alarms == state.alarms and not made.feeds for made, one in alone)
    heard_of = after(ONE_OF_TWO, says(0.0, "b", "utility"))
    assert [made.ups for made, _ in feeds.each_alone(ONE_OF_TWO, heard_of)] == ["b"]


# --- Commit, change of settings, and who went last --------------------------------------------------------------------


def test_a_commit_is_contradicted_by_as_many_as_are_needed() -> None:
    two = policy("feed=a", "feed=b", "feed=c", "minimum_supplies=2")

    def contradicted(*words: Supply) -> bool:
        upses = tuple(each(name, word, 1.0, 0.3) for name, word in zip("abc", words, strict=True))
        return feeds.contradicts_commit(two, State(upses=upses), 1.0, 10.0)

    assert contradicted(BATTERY, UTILITY, UTILITY)
    assert not contradicted(BATTERY, BATTERY, UTILITY)
    assert not contradicted(UNKNOWN, UNKNOWN, UTILITY)
    unheard = State(upses=(each("b", UTILITY, 1.0, 0.3), each("c", UTILITY, 1.0, 0.3)))
    assert feeds.contradicts_commit(two, unheard, 1.0, 10.0), "one that was never heard of stands in nobody's way"


def test_settings_that_come_to_name_another_ups_start_over() -> None:
    lone = replace(policy(), health=0.6)
    state = feeds.adopt(lone, State(upses=(each("a", BATTERY, 0.5, 0.5),)), 7.0)
    assert (state.upses, state.feed.since_s, state.battery.at_s, state.battery.health) == ((), 7.0, 7.0, 0.6)
    assert feeds.adopt(ONE_OF_TWO, State(), 7.0).upses == (), "nothing was heard yet"


def test_an_outage_begins_when_the_last_of_them_fell_silent() -> None:
    readings = (says(2.0, "a", "battery"), says(3.0, "a", "battery"), lost(5.0, "b"))
    feed = after(ONE_OF_TWO, *CALM, *readings).feed
    assert (feed.supply, feed.since_s) == (BATTERY, 5.0)


def test_every_warning_of_any_feed_is_in_the_reading_of_all() -> None:
    bad = {"input_present": False, "low_battery": True, "forced_shutdown": True}
    good = {"input_present": True, "output_off_in_s": 50.0}
    readings = (says(2.0, "a", "battery", **bad), says(2.5, "b", "utility", **good), says(3.0, "a", "battery", **bad))
    state = after(BOTH, *CALM, *readings, says(3.5, "b", "utility", **good))
    whole = state.feed.reading
    assert whole is not None
    assert (whole.at_s, whole.ups, whole.output_source) == (3.5, "b", "battery")
    assert (whole.input_present, whole.low_battery, whole.forced_shutdown) == (False, True, True)
    assert (whole.testing, whole.calibrating, whole.output_off_in_s) == (False, False, None)
    plain = after(BOTH, *CALM, says(2.0, "a", "battery", input_present=True), says(3.5, "b", "utility", **good))
    assert plain.feed.reading is not None
    assert (plain.feed.reading.input_present, plain.feed.reading.low_battery) == (True, False)
    measured = tuple(says(2.0 + n, "a", "battery", calibrating=True, input_present=True) for n in range(2))
    for made, calibrating in ((BOTH, True), (ONE_OF_TWO, False)):
        whole = after(made, *CALM, *measured).feed.reading
        assert whole is not None
        assert whole.calibrating is calibrating


def test_the_battery_of_all_is_the_mean_of_those_that_count() -> None:
    """In an outage those on battery; with none that counts, what is known of any."""
    a, b = each("a", BATTERY, 0.6, 0.5), each("b", UNKNOWN, 0.2, 0.5)
    a = replace(a, battery=replace(a.battery, used=0.2, health=0.6, step_at_s=4.0))
    b = replace(b, battery=replace(b.battery, used=0.5, health=0.9, step_at_s=6.0))

    def battery(before: Battery, upses: tuple[Supplied, ...], supply: Supply, now_s: float) -> Battery:
        words = feeds._ups_supply(ONE_OF_TWO, upses)
        return feeds._battery(ONE_OF_TWO, before, upses, Feed(supply=supply), now_s, ups_supply=words)

    whole = battery(Battery(at_s=5.0), (a, b), BATTERY, 7.0)
    assert (whole.at_s, whole.used, whole.left, whole.health, whole.load) == (7.0, 0.2, 0.6, 0.6, 0.5)
    assert whole.step_at_s == 6.0
    for supply, left in ((BATTERY, 0.6), (UTILITY, 0.75)):
        assert battery(Battery(), (a, each("b", UTILITY, 0.9, 0.5)), supply, 7.0).left == pytest.approx(left)
    dark = battery(Battery(at_s=9.0), (b,), UNKNOWN, 7.0)
    assert (dark.at_s, dark.used, dark.left, dark.health, dark.composed) == (9.0, 0.5, None, 0.9, ())
    new = each("a", BATTERY, None, None)
    none = battery(Battery(), (new,), BATTERY, 1.0)
    assert (none.left, none.load, none.composed) == (None, None, ())


def test_what_is_changed_of_a_lone_battery() -> None:
    lone = policy()
    state = State(alarms=("unprotected",), battery=Battery(at_s=5.0))
    changed = feeds.with_battery(lone, state, "", lambda made, old: replace(old, used=made.health + 2 * old.at_s), 1.0)
    assert changed == replace(state, battery=Battery(at_s=5.0, used=lone.health + 10.0))
