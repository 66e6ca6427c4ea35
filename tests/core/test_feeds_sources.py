"""Several feeds with several sources each, and what people say of one of them."""

from dataclasses import replace
from typing import Any

from powerguard.core.decide.machine import step
from powerguard.core.model.events import BatteryReplaced, Reading
from powerguard.core.model.policy import Policy
from powerguard.core.supply import feeds
from tests.core.test_feeds import BATTERY, BOTH, CALM, ONE_OF_TWO, after, both, says


def test_a_source_that_cannot_be_forged_holds_up_the_commit_of_its_feed() -> None:
    """And of the host, where its feed would be enough."""

    def sourced(made: Policy) -> Policy:
        return replace(made, feeds=tuple(replace(each, policy=replace(each.policy, sources=2)) for each in made.feeds))

    def word(at_s: float, ups: str, source: str, text: str, **fields: Any) -> Reading:  # noqa: ANN401 - as in says
        return replace(says(at_s, ups, text, **fields), source=source)

    found = []
    for at_s in (2.0, 3.0, 4.0):
        found += [
            word(at_s, "a", "snmp", "battery", on_battery_s=at_s),
            word(at_s + 0.1, "a", "nut", "utility", authenticated=True),
        ]
        found += [word(at_s + 0.2, "b", "snmp", "battery", on_battery_s=at_s)]
    first = [word(1.0, ups, source, "utility") for ups in "ab" for source in ("snmp", "nut")]
    one = after(sourced(ONE_OF_TWO), *first, *found)
    assert one.feed.supply is BATTERY
    assert feeds.battery_reported_twice(sourced(ONE_OF_TWO), one, 4.5), "by one source of a feed, twice"
    assert not feeds.battery_reported_twice(sourced(ONE_OF_TWO), one, 60.0), "long ago"
    assert feeds.contradicts_commit(sourced(ONE_OF_TWO), one, 4.5, 10.0)
    both_needed = after(sourced(BOTH), *first, *found)
    assert not feeds.contradicts_commit(sourced(BOTH), both_needed, 4.5, 10.0), (
        "the other feed is dark whatever is said of this one"
    )


def test_sources_of_each_feed_have_their_alarms() -> None:
    """One of rack-b's two lags for half a minute; the alarm names it."""
    made = replace(BOTH, feeds=tuple(replace(each, policy=replace(each.policy, sources=2)) for each in BOTH.feeds))
    found = [replace(says(1.0, ups, "utility"), source=source) for ups in "ab" for source in ("snmp", "nut")]
    for at_s in range(2, 40):
        found.append(replace(says(float(at_s), "b", "battery", on_battery_s=float(at_s)), source="snmp"))
        found += [replace(says(at_s + 0.2, ups, "utility"), source="nut") for ups in "ab"]
    assert "sources_disagree" in after(made, *found).alarms


def test_a_new_battery_of_one_ups_leaves_the_other_its_own() -> None:
    state = after(ONE_OF_TWO, *CALM)
    state = replace(
        state, upses=tuple(replace(each, battery=replace(each.battery, tau_point=(0.5, 99.0))) for each in state.upses)
    )
    for named, expected in (("b", [(0.5, 99.0), None]), ("", [None, None])):
        answer = step(ONE_OF_TWO, state, BatteryReplaced(at_s=5.0, who="alice", ups=named))
        assert [each.battery.tau_point for each in answer.state.upses] == expected
        assert [each.battery.model.replaced_at_s for each in answer.state.upses][1] == 5.0
        later = after(ONE_OF_TWO, *both(6.0, "utility", "utility"), state=answer.state)
        assert [each.battery.model.replaced_at_s for each in later.upses][1] == 5.0


def test_the_second_witness_of_a_commit_is_of_one_ups() -> None:
    """Readings of two UPSes follow each other closely; each is its own second."""
    state = after(ONE_OF_TWO, *CALM, *both(2.0, "battery", "battery"))
    assert not feeds.battery_reported_twice(ONE_OF_TWO, state, 2.25)
    state = after(ONE_OF_TWO, *both(3.0, "battery", "battery"), state=state)
    assert feeds.battery_reported_twice(ONE_OF_TWO, state, 3.25)
    assert not feeds.battery_reported_twice(ONE_OF_TWO, after(ONE_OF_TWO, *CALM), 3.25)


def test_a_source_of_one_feed_that_was_taken_out_is_forgotten() -> None:
    def named(*names: str) -> Policy:
        each = tuple(
            replace(feed, policy=replace(feed.policy, sources=len(names), source_names=names))
            for feed in ONE_OF_TWO.feeds
        )
        return replace(ONE_OF_TWO, feeds=each)

    found = [replace(says(1.0, ups, "utility"), source=source) for ups in "ab" for source in ("snmp", "nut")]
    state = feeds.adopt(named("nut"), after(named("snmp", "nut"), *found), 2.0)
    assert [each.feed.heard for each in state.upses] == [(), ()]
