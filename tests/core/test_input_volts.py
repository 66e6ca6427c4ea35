"""Volts at the input as a witness: only of a source that measures them, which it shows by telling some."""

from typing import Any

import pytest

from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Feed, Measures, Supply
from powerguard.core.supply import fusion
from powerguard.core.supply.fusion import measured
from tests.core.play import make_policy

ONE, TWO = make_policy(["table=50:540,100:240"]), make_policy(["table=50:540,100:240", "sources=2"])
THERE: dict[str, Any] = {"input_v": 230.0, "input_present": True}
GONE: dict[str, Any] = {"input_v": 0.0, "input_present": False}
TEST: dict[str, Any] = {"testing": True}


def says(at_s: float, word: str, fields: dict[str, Any] | None = None, source: str = "snmp") -> Reading:
    return Reading(at_s=at_s, ups="ups", source=source, output_source=OutputSource(word), **(fields or {}))


def after(policy: Policy, *readings: Reading) -> Feed:
    feed = Feed()
    for reading in readings:
        feed = fusion.observe(policy, feed, reading)
    return feed


@pytest.mark.parametrize(
    ("fields", "utility_seen", "input_seen", "counts"),
    [
        (GONE, True, False, False),
        (GONE, True, True, True),
        (GONE, False, False, True),
        ({**GONE, "alarms": ("input_bad",)}, True, False, True),
        ({"input_present": False}, True, False, True),
        (THERE, True, False, True),
    ],
)
def test_volts_that_are_gone_count_of_whom_they_may(
    fields: dict[str, Any], utility_seen: bool, input_seen: bool, counts: bool
) -> None:
    """Not of a card that has never told any. What an alarm tells, or a first contact on battery, counts in any case."""
    result = measured(says(1.0, "battery", fields), Measures(volts=input_seen), utility_seen=utility_seen)
    assert (result.input_present is fields["input_present"]) is counts
    assert (result.input_v == fields.get("input_v")) is counts


@pytest.mark.parametrize("policy", [ONE, TWO], ids=["one source", "two"])
def test_a_self_test_of_a_card_without_volts_is_no_outage(policy: Policy) -> None:
    blind = after(
        policy, says(1.0, "utility"), says(2.0, "battery", {**TEST, **GONE}), says(3.0, "battery", GONE | TEST)
    )
    assert blind.supply is Supply.UTILITY
    seeing = after(policy, says(1.0, "utility", THERE), says(2.0, "battery", {**TEST, **GONE}))
    assert (seeing.supply, seeing.proven_by) == (Supply.BATTERY, "input_present")


@pytest.mark.parametrize("policy", [ONE, TWO], ids=["one source", "two"])
def test_what_was_seen_once_is_remembered(policy: Policy) -> None:
    """Also where the reading went the short way of every second; volts may be left out of most polls."""
    feed = after(policy, *(says(float(at_s), "utility", THERE if at_s == 3 else None) for at_s in range(1, 9)))
    again = fusion.observe(policy, feed, says(9.0, "battery", {**TEST, **GONE}))
    assert again.supply is Supply.BATTERY


def test_seconds_that_stand_still_and_volts_that_are_none_are_no_two_witnesses() -> None:
    """A card that answers 0 V, and whose seconds on battery were never reset, does not contradict its own "utility"."""
    stuck = {**GONE, "on_battery_s": 42.0}
    feed = after(ONE, says(1.0, "utility"), says(2.0, "utility", stuck), says(3.0, "utility", stuck))
    assert feed.supply is Supply.UTILITY
    there = {**THERE, "on_battery_s": 42.0}
    feed = after(ONE, says(1.0, "utility", there), says(2.0, "utility", stuck), says(3.0, "utility", stuck))
    assert feed.supply is Supply.UTILITY, "nor with volts that are measured: the clock is not"
    moving = [says(float(at_s), "utility", {**GONE, "on_battery_s": 50.0 + at_s}) for at_s in (2, 3)]
    assert after(ONE, says(1.0, "utility", there), *moving).supply is Supply.BATTERY


def test_the_volts_of_one_source_say_nothing_of_the_others() -> None:
    feed = after(TWO, says(1.0, "utility"), says(1.1, "utility", THERE, "nut"), says(2.0, "battery", {**TEST, **GONE}))
    assert feed.supply is Supply.UTILITY
    nut = {heard.source: heard.measures.volts for heard in feed.heard}
    assert nut == {"snmp": False, "nut": True}


# --- Seconds on battery -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ONE, TWO], ids=["one source", "two"])
def test_a_clock_that_stands_still_is_no_witness(policy: Policy) -> None:
    """A card that says battery from the first, with 9999 s for ever: not believed, however often it says so."""
    stuck = {"on_battery_s": 9999.0, "charge_pct": 100.0}
    feed = after(policy, *(says(float(at_s), "battery", stuck) for at_s in range(1, 60)))
    assert feed.supply is Supply.UNKNOWN
    feed = fusion.observe(policy, feed, says(60.0, "battery", {"on_battery_s": 10_000.0, "charge_pct": 100.0}))
    assert (feed.supply, feed.proven_by) == (Supply.BATTERY, "on_battery_s")


@pytest.mark.parametrize("policy", [ONE, TWO], ids=["one source", "two"])
def test_a_clock_that_stood_still_on_utility_is_no_witness_of_a_battery(policy: Policy) -> None:
    """Nobody reset it after the last outage; it proves nothing of this one, but a second reading does."""
    stuck = {"on_battery_s": 42.0}
    feed = after(policy, says(1.0, "utility", stuck), says(2.0, "utility", stuck), says(3.0, "battery", stuck))
    assert (feed.supply, feed.suspect) == (Supply.UTILITY, True)
    feed = fusion.observe(policy, feed, says(4.0, "battery", stuck))
    assert (feed.supply, feed.proven_by) == (Supply.BATTERY, "second_reading")


@pytest.mark.parametrize("policy", [ONE, TWO], ids=["one source", "two"])
@pytest.mark.parametrize("before", [{"on_battery_s": 0.0}, {}], ids=["0 before", "nothing before"])
def test_a_clock_that_begins_with_the_battery_is_one(policy: Policy, before: dict[str, Any]) -> None:
    """From 0, or from an object that is only there on battery."""
    feed = after(policy, says(1.0, "utility", before), says(2.0, "battery", {"on_battery_s": 1.0}))
    assert (feed.supply, feed.proven_by) == (Supply.BATTERY, "on_battery_s")
