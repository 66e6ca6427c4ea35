"""Several feeds of one host: which of them count, when the host runs out of power supplies, and what is told of it."""

import math
from dataclasses import replace
from typing import Any

import pytest

from powerguard.core.comeback.recovery import Stored, reloaded, restore
from powerguard.core.decide import conditions
from powerguard.core.decide.machine import step
from powerguard.core.energy import account, budget
from powerguard.core.model.events import OutputSource, Reading, SourceFailed, Tick
from powerguard.core.model.policy import FeedPolicy, Policy
from powerguard.core.model.state import Battery, Feed, State, Supplied, Supply, phase_name
from powerguard.core.supply import feeds
from tests.core.play import make_policy

TABLE = "table=50:540,75:360,100:240"
UTILITY, BATTERY, UNKNOWN = Supply.UTILITY, Supply.BATTERY, Supply.UNKNOWN


def policy(*words: str) -> Policy:
    """Return a policy of the words; minimum_supplies as a whole number."""
    made = make_policy([TABLE, *words])
    return replace(made, minimum_supplies=int(made.minimum_supplies))


ONE_OF_TWO = policy("feed=a", "feed=b")
BOTH = policy("feed=a", "feed=b", "minimum_supplies=2")
ALONE = policy()


def says(at_s: float, ups: str, word: str, **more: Any) -> Reading:  # noqa: ANN401 - any field of a reading
    fields = {"charge_pct": 100.0, "load_pct": 50.0, "runtime_s": 540.0, **more}
    return Reading(at_s=at_s, ups=ups, source="snmp", output_source=OutputSource(word), **fields)


def after(made: Policy, *events: Reading | SourceFailed | Tick, state: State | None = None) -> State:
    """Return the state after these events, through the whole machine."""
    state = restore(made, None, 0.0).state if state is None else state
    for each in events:
        state = step(made, state, each).state
    return state


def lost(at_s: float, ups: str) -> SourceFailed:
    return SourceFailed(at_s=at_s, ups=ups, source="snmp", reason="no answer", lost=True)


def both(at_s: float, a: str, b: str) -> tuple[Reading, Reading]:
    return says(at_s, "a", a), says(at_s + 0.25, "b", b)


CALM = (*both(0.0, "utility", "utility"), *both(1.0, "utility", "utility"))
A_OUT = (*both(2.0, "battery", "utility"), *both(3.0, "battery", "utility"))
ALL_OUT = (*both(2.0, "battery", "battery"), *both(3.0, "battery", "battery"))


# --- Who counts -----------------------------------------------------------------------------------------------------


def test_one_of_two_on_battery_is_no_outage_where_one_is_enough() -> None:
    state = after(ONE_OF_TWO, *CALM, *A_OUT)
    assert (state.feed.supply, state.feed.since_s, state.alarms) == (UTILITY, 0.0, ("redundancy_lost",))
    assert [each.feed.supply for each in state.upses] == [BATTERY, UTILITY]
    assert feeds.redundancy_lost(state) == "a (on battery)"


def test_one_of_two_on_battery_is_an_outage_where_both_are_needed() -> None:
    state = after(BOTH, *CALM, *A_OUT)
    assert (state.feed.supply, state.feed.since_s, feeds.redundancy_lost(state)) == (BATTERY, 2.0, "")


def test_an_outage_counts_from_the_transfer_that_left_too_few() -> None:
    state = after(ONE_OF_TWO, *CALM, *A_OUT, *both(30.0, "battery", "battery"), *both(31.0, "battery", "battery"))
    assert (state.feed.supply, state.feed.since_s) == (BATTERY, 30.25)
    assert state.feed.proven_by == "second_reading"


def test_the_host_is_back_when_enough_of_them_are() -> None:
    state = after(ONE_OF_TWO, *CALM, *ALL_OUT, *both(4.0, "battery", "utility"))
    assert (state.feed.supply, state.feed.since_s) == (UTILITY, 4.25)


def test_two_power_supplies_on_one_of_them_count_twice() -> None:
    made = policy("feed=a:2", "feed=b:1", "minimum_supplies=2")
    assert after(made, *CALM, *A_OUT).feed.supply is BATTERY
    other = (*both(2.0, "utility", "battery"), *both(3.0, "utility", "battery"))
    assert after(made, *CALM, *other).feed.supply is UTILITY


def test_a_host_that_the_other_one_feeds_is_spared_though_it_would_be_overloaded() -> None:
    """Training pauses while the first battery lasts; no power-off comes, and none may be forecast."""

    def spared(*readings: Reading) -> bool:
        state = after(ONE_OF_TWO, *(replace(each, load_pct=60.0) for each in (*CALM, *readings)))
        assert state.feed.supply is BATTERY
        now_s = readings[-1].at_s
        return conditions.is_spared(ONE_OF_TWO, state, conditions.outage_budget(ONE_OF_TWO, state, now_s))

    assert spared(*A_OUT)
    assert not spared(*ALL_OUT)


def test_before_all_of_them_are_heard_nothing_is_missing() -> None:
    state = after(ONE_OF_TWO, says(0.0, "a", "utility"))
    assert (state.feed.supply, state.alarms) == (UTILITY, ())
    assert after(BOTH, says(0.0, "a", "utility")).feed.supply is UNKNOWN
    silent = after(ONE_OF_TWO, says(0.0, "a", "utility"), lost(3.0, "b"), says(4.0, "a", "utility"))
    assert feeds.redundancy_lost(silent) == "b (silent)"


@pytest.mark.parametrize(("apart_s", "supply"), [(29.0, BATTERY), (30.0, BATTERY), (-25.0, BATTERY)])
def test_one_that_falls_silent_with_the_others_transfer_is_presumed_on_battery(apart_s: float, supply: Supply) -> None:
    """Its switch had no battery; sooner or later it is lost, within half a minute of the transfer."""
    found: list[Reading | SourceFailed] = [
        says(100.0, "a", "battery"),
        says(101.0, "a", "battery"),
        lost(100.0 + apart_s, "b"),
    ]
    found.sort(key=lambda event: event.at_s)
    state = after(ONE_OF_TWO, *CALM, *found, says(140.0, "a", "battery"))
    assert state.feed.supply is supply
    b = feeds.of(state, "b")
    assert b is not None
    assert (b.battery.used or 0.0) > 0.0, "its battery is counted as emptying"


def test_one_that_has_been_silent_for_long_is_not_endless() -> None:
    state = after(ONE_OF_TWO, *CALM, lost(5.0, "b"), says(100.0, "a", "utility"))
    assert state.feed.supply is UTILITY, "its last word, while nothing else happens"
    state = after(ONE_OF_TWO, says(101.0, "a", "battery"), says(102.0, "a", "battery"), state=state)
    assert state.feed.supply is BATTERY
    b = feeds.of(state, "b")
    assert b is not None
    assert b.battery.used == 0.0, "nobody knows that it is on battery, either"


def test_a_silent_one_that_the_host_needs_is_on_battery_as_the_other_one_is() -> None:
    """Its card died long ago. The host runs, so its UPS does; from the transfer on its battery counts as emptying."""
    state = after(BOTH, *CALM, lost(5.0, "b"), *(says(10.0 * n, "a", "utility") for n in range(1, 400)))
    assert state.feed.supply is UTILITY
    state = after(BOTH, says(4000.0, "a", "battery"), says(4001.0, "a", "battery"), Tick(at_s=4027.0), state=state)
    b = feeds.of(state, "b")
    assert b is not None
    assert b.battery.used == pytest.approx(26.0 / 540.0, abs=2.0 / 540.0)
    assert lasts_s(BOTH, state, 4027.0) > 200.0
    state = after(BOTH, says(4028.0, "a", "utility"), state=state)
    assert state.feed.supply is UTILITY


def test_a_blip_of_the_last_one_powers_nothing_off_after_the_other_one_has_ended() -> None:
    """Two UPSes at 60 % each: one ended long ago, and training is paused. Three polls of the other card are missed."""
    found: list[Reading | SourceFailed] = [says(1.0, ups, "utility", load_pct=60.0) for ups in "ab"]
    for at_s in range(2, 900, 5):
        load = 60.0 if at_s < 200 else 27.0
        found.append(says(float(at_s), "a", "utility", load_pct=load))
        left = max(0.0, 100.0 - at_s / 9.0)
        found.append(says(at_s + 0.5, "b", "battery", load_pct=load, charge_pct=left, runtime_s=9.0 * left))
    found += [lost(900.0, "b"), *(says(float(at_s), "a", "utility", load_pct=54.0) for at_s in range(901, 1200, 5))]
    state = after(ONE_OF_TWO, *found, lost(1200.0, "a"), *(Tick(at_s=1200.0 + n) for n in range(10)))
    assert phase_name(state.phase) == "holding"
    a = feeds.of(state, "a")
    assert a is not None
    assert a.battery.left is not None
    assert lasts_s(ONE_OF_TWO, state, 1209.0) == pytest.approx(alone(a.battery.left, 0.54), rel=0.02), (
        "what B carried is on A already, and counts once"
    )


def drained(from_s: int, until_s: int, load: float, charge: float, *, with_b: bool) -> list[Reading | SourceFailed]:
    """Return readings of A on battery at this load, from this charge on, and of B on utility at a quarter."""
    found: list[Reading | SourceFailed] = []
    full_s = account.tau_s(ONE_OF_TWO.runtime_table, load / 100.0)
    for at_s in range(from_s, until_s):
        left = charge - 100.0 * (at_s - from_s) / full_s
        found.append(says(float(at_s), "a", "battery", load_pct=load, charge_pct=left, runtime_s=left / 100.0 * full_s))
        if with_b:
            found.append(says(at_s + 0.25, "b", "utility", load_pct=25.0, runtime_s=1000.0))
    return found


def test_a_blip_of_the_one_with_utility_powers_nothing_off_as_the_others_battery_ends() -> None:
    """A's input is switched off for an hour. B's card misses three polls: its UPS has a full battery at the worst."""
    found = [*drained(2, 880, 25.0, 100.0, with_b=True), lost(880.0, "b"), *drained(880, 910, 25.0, 12.0, with_b=False)]
    state = after(ONE_OF_TWO, *CALM, *found)
    assert (state.feed.supply, phase_name(state.phase)) == (BATTERY, "on_battery")
    assert lasts_s(ONE_OF_TWO, state, 909.0) > 300.0
    assert after(ONE_OF_TWO, says(910.0, "b", "utility"), state=state).feed.supply is UTILITY


def test_one_whose_load_moves_as_it_falls_silent_has_ended() -> None:
    """A is on battery. B's input goes as well, and its battery is dead: what it carried is on A, and counts once."""
    found = [*drained(2, 300, 25.0, 100.0, with_b=True), *drained(300, 303, 50.0, 70.0, with_b=False), lost(303.0, "b")]
    state = after(ONE_OF_TWO, *CALM, *found, *drained(304, 320, 50.0, 69.3, with_b=False))
    a = feeds.of(state, "a")
    assert a is not None
    assert a.battery.left is not None
    assert lasts_s(ONE_OF_TWO, state, 319.0) == pytest.approx(alone(a.battery.left, 0.5), rel=0.02)


@pytest.mark.parametrize("word", ["bypass", "unknown", ""])
def test_what_is_unknown_supplies_a_host_that_needs_it_and_runs(word: str) -> None:
    """In bypass for maintenance, a driver that says WAIT, or a card that has not answered since the start."""
    readings = (says(1.5, "b", word),) if word else (lost(1.5, "b"),)
    state = after(BOTH, says(1.0, "a", "utility"), *readings, says(2.0, "a", "battery"), says(3.0, "a", "battery"))
    assert state.feed.supply is BATTERY
    assert lasts_s(BOTH, state, 3.0) == pytest.approx(alone(0.75, 0.5), rel=0.02)


def lasts_s(made: Policy, state: State, now_s: float) -> float:
    """Return the effective runtime at the load of now."""
    return budget.compute(made, state.battery, state.feed, state.trainers, now_s).reff_now_s or 0.0


@pytest.mark.parametrize(
    ("word", "supply"), [("bypass", BATTERY), ("off", BATTERY), ("unknown", BATTERY), ("eco", UTILITY)]
)
def test_bypass_off_and_unknown_are_not_endless_either(word: str, supply: Supply) -> None:
    state = after(ONE_OF_TWO, *CALM, says(1.5, "b", word), says(2.0, "a", "battery"), says(3.0, "a", "battery"))
    assert state.feed.supply is supply


def test_a_bypass_alone_is_an_alarm() -> None:
    state = after(ONE_OF_TWO, *CALM, says(2.0, "b", "bypass"))
    assert (state.feed.supply, state.alarms) == (UTILITY, ("unprotected",))


def test_the_feed_is_lost_when_all_are() -> None:
    state = after(ONE_OF_TWO, *CALM, lost(5.0, "a"))
    assert state.feed.lost_since_s is None
    state = after(ONE_OF_TWO, lost(6.0, "b"), state=state)
    assert state.feed.lost_since_s == 6.0
    assert after(ONE_OF_TWO, lost(7.0, "b"), state=state) == state
    back = step(ONE_OF_TWO, state, says(8.0, "a", "utility"))
    assert back.state.feed.lost_since_s is None
    assert next((note.event, dict(note.numbers)) for note in back.notes) == (
        "source_recovered",
        {"source": "snmp", "lost_s": 3.0, "ups": "a"},
    )


def test_a_ups_that_does_not_feed_this_host_changes_nothing() -> None:
    state = after(ONE_OF_TWO, *CALM)
    assert after(ONE_OF_TWO, says(5.0, "c", "battery"), lost(6.0, "c"), state=state) == state


def test_a_test_of_one_of_two_is_none_of_the_host() -> None:
    testing = says(2.0, "a", "battery", testing=True, input_present=True)
    state = after(ONE_OF_TWO, *CALM, testing)
    assert (state.feed.supply, state.feed.test_since_s) == (UTILITY, None)
    assert state.feed.reading is not None
    assert not state.feed.reading.testing
    needed = after(BOTH, *CALM, testing)
    assert needed.feed.test_since_s == 2.0
    assert needed.feed.reading is not None
    assert (needed.feed.reading.testing, needed.feed.reading.output_source) == (True, OutputSource.BATTERY)


def test_every_alarm_of_every_feed_is_reported() -> None:
    worn = says(2.0, "a", "utility", replace_battery=True, overload=True, alarms=("fan_fault",))
    state = after(ONE_OF_TWO, *CALM, worn, says(2.25, "b", "utility", alarms=("ups_fault",)))
    assert set(state.alarms) == {"battery_worn", "overload"}
    assert state.feed.reading is not None
    assert state.feed.reading.alarms == ("fan_fault", "ups_fault")


def test_the_least_full_battery_is_reported() -> None:
    low = says(2.0, "a", "utility", charge_pct=40.0, runtime_s=200.0)
    state = after(ONE_OF_TWO, *CALM, low, says(2.25, "b", "utility", charge_pct=90.0, runtime_s=500.0))
    assert state.feed.reading is not None
    assert (state.feed.reading.charge_pct, state.feed.reading.runtime_s) == (40.0, 200.0)


def heavy(at_s: float, ups: str, word: str) -> Reading:
    return says(at_s, ups, word, load_pct=60.0)


def test_the_load_is_that_of_all_of_them_whichever_was_read_last() -> None:
    """As the budget counts it; watts only where every UPS reports them."""
    a = says(0.0, "a", "utility", load_pct=50.0, watts=2500.0)
    b = says(0.25, "b", "utility", load_pct=20.0, watts=600.0)
    for other, watts in ((b, 3100.0), (replace(b, watts=None), None)):
        state = after(ONE_OF_TWO, a, other, replace(a, at_s=1.0))
        reading = state.feed.reading
        assert reading is not None
        assert reading.load_pct == pytest.approx(100.0 * (state.battery.load or 0.0))
        assert reading.watts == watts


def test_one_that_would_be_overloaded_carries_nobody() -> None:
    """60 % and 60 %: when the first battery ends, the other UPS switches off under 120 %."""
    calm = (heavy(0.0, "a", "utility"), heavy(0.25, "b", "utility"))
    state = after(
        ONE_OF_TWO, *calm, *(heavy(2.0 + n / 2, "ab"[n % 2], ("battery", "utility")[n % 2]) for n in range(6))
    )
    assert (state.feed.supply, feeds.redundancy_lost(state)) == (BATTERY, "")
    now = budget.compute(ONE_OF_TWO, state.battery, state.feed, (), state.battery.at_s)
    a = feeds.of(state, "a")
    assert a is not None
    assert now.reff_now_s == pytest.approx(alone(a.battery.left or 0.0, 0.6), rel=0.01)


def test_a_pause_that_cures_an_overload_does_not_bring_training_back() -> None:
    """Else it would train, be overloaded, pause, be cured, train again, for as long as the first battery lasts."""
    calm = (heavy(0.0, "a", "utility"), heavy(0.25, "b", "utility"))
    cut = [heavy(2.0 + n / 2, "ab"[n % 2], ("battery", "utility")[n % 2]) for n in range(6)]
    paused = [says(6.0 + n / 2, "ab"[n % 2], ("battery", "utility")[n % 2], load_pct=20.0) for n in range(40)]
    state = after(ONE_OF_TWO, *calm, *cut, *paused)
    assert state.feed.supply is BATTERY
    assert after(ONE_OF_TWO, says(30.0, "a", "utility"), state=state).feed.supply is UTILITY


def test_a_pause_that_keeps_the_rest_from_overload_is_not_counted_on_before_it_is_seen() -> None:
    """At 60 % of the load the other UPS would carry all of it; at all of it not. In between nobody knows."""
    calm = (heavy(0.0, "a", "utility"), heavy(0.25, "b", "utility"))
    cut = [heavy(2.0 + n / 2, "ab"[n % 2], ("battery", "utility")[n % 2]) for n in range(6)]
    state = after(ONE_OF_TWO, *calm, *cut)
    ends_s = [lasts_s for _, lasts_s in account.table(ONE_OF_TWO, state.battery)][2:5]
    assert ends_s[0] > 1e6
    assert ends_s[1] == pytest.approx(ends_s[2] * 1.0 / 0.8)


def test_one_whose_output_is_off_is_not_there() -> None:
    """It may hold 85 %: nobody is fed by it, and its load is on the other one already."""
    off = [says(4.0 + n, "a", "off", load_pct=0.0) for n in range(3)]
    loaded = [says(4.25 + n, "b", "battery", load_pct=90.0) for n in range(3)]
    state = after(ONE_OF_TWO, *CALM, *ALL_OUT, *off, *loaded[2:])
    b = feeds.of(state, "b")
    assert b is not None
    now = budget.compute(ONE_OF_TWO, state.battery, state.feed, (), state.battery.at_s)
    assert state.battery.load == b.battery.load == 0.9
    assert now.reff_now_s == pytest.approx(alone(b.battery.left or 0.0, 0.9), rel=0.01)


def test_a_battery_that_is_only_presumed_powers_nothing_off_beside_utility() -> None:
    """A dip took the switch of one card with it. Utility is back, so AC would not drop, and the host would stay off."""
    dark = (says(2.0, "a", "battery"), says(3.0, "a", "battery"), lost(5.0, "b"))
    state = after(BOTH, *CALM, *dark)
    assert not feeds.contradicts_commit(BOTH, state, 5.0, 10.0)
    back = after(BOTH, says(6.0, "a", "utility"), state=state)
    assert (back.feed.supply, feeds.contradicts_commit(BOTH, back, 6.0, 10.0)) == (BATTERY, True)
    gone = after(BOTH, lost(10.0, "a"), state=back)
    assert not feeds.contradicts_commit(BOTH, gone, 10.0, 10.0)
    result = after(BOTH, says(7.0, "b", "battery"), says(8.0, "b", "battery"), says(8.5, "a", "utility"), state=back)
    assert not feeds.contradicts_commit(BOTH, result, 8.5, 10.0), "it says so itself"


def test_one_that_was_presumed_on_battery_is_so_until_it_answers() -> None:
    """The other one's return says nothing of it."""
    dark = (says(2.0, "a", "battery"), says(3.0, "a", "battery"), lost(5.0, "b"))
    state = after(BOTH, *CALM, *dark, *(says(10.0 + n, "a", "utility") for n in range(5)))
    assert state.feed.supply is BATTERY
    state = after(BOTH, says(20.0, "b", "utility"), state=state)
    assert state.feed.supply is UTILITY


def test_a_calibration_of_the_one_that_is_needed_interrupts_utility() -> None:
    """Else utility is stable for minutes the moment that training pauses, and it goes on, and pauses, and goes on."""
    calibrating = [says(2.0 + n, "a", "battery", calibrating=True, input_present=True) for n in range(30)]
    assert after(BOTH, *CALM, *calibrating).feed.since_s == 31.0
    assert after(ONE_OF_TWO, *CALM, *calibrating).feed.since_s == 0.0, "the other one carries the host"


def test_a_test_that_may_not_be_able_to_end_counts_as_battery_in_an_outage() -> None:
    testing = says(2.0, "a", "battery", calibrating=True)
    state = after(
        BOTH,
        *CALM,
        testing,
        says(2.5, "b", "battery"),
        says(3.0, "a", "battery", calibrating=True),
        says(3.5, "b", "battery"),
    )
    assert state.feed.supply is BATTERY
    a = feeds.of(state, "a")
    assert a is not None
    assert (a.battery.used or 0.0) > 0.0


# --- Orders ---------------------------------------------------------------------------------------------------------


def test_low_battery_counts_when_too_few_are_left_without_it() -> None:
    low = {"low_battery": True}
    one = after(ONE_OF_TWO, *CALM, *ALL_OUT, *(says(4.0 + n, "a", "battery", **low) for n in range(3)))
    assert one.feed.low_battery_at_s is None
    two = after(ONE_OF_TWO, *(says(7.25 + n, "b", "battery", **low) for n in range(2)), state=one)
    assert two.feed.low_battery_at_s == 8.25


def test_a_countdown_counts_when_too_few_are_left_after_it() -> None:
    def counting(ups: str, at_s: float, off_in_s: float) -> Reading:
        return says(at_s, ups, "utility", output_off_in_s=off_in_s)

    one = after(ONE_OF_TWO, *CALM, counting("a", 2.0, 100.0), counting("a", 3.0, 99.0))
    assert one.feed.countdown_at_s is None
    two = after(ONE_OF_TWO, counting("b", 4.0, 50.0), counting("b", 5.0, 49.0), counting("a", 6.0, 96.0), state=one)
    assert two.feed.countdown_at_s == 102.0
    assert after(BOTH, *CALM, counting("a", 2.0, 100.0), counting("a", 3.0, 99.0)).feed.countdown_at_s == 102.0


# --- How long -------------------------------------------------------------------------------------------------------


def lasting(made: Policy, *each: tuple[str, float, float, Supply]) -> float:
    """Return the effective runtime at the load of now; each: name, energy left, load, supply."""
    upses = tuple(
        Supplied(
            ups=name,
            feed=Feed(supply=supply, since_s=0.0, reading=says(0.0, name, supply.value)),
            battery=Battery(used=0.0, left=left, load=load, health=1.0),
        )
        for name, left, load, supply in each
    )
    state = feeds.advance(made, State(upses=upses), 0.0)
    now = budget.compute(made, state.battery, state.feed, (), 0.0)
    assert now.reff_now_s is not None
    return now.reff_now_s


def alone(left: float, load: float) -> float:
    """Return the effective runtime of one battery."""
    return budget.usable(ALONE, left) * account.tau_s(ALONE.runtime_table, load)


def test_a_lone_battery_lasts_as_long_among_feeds() -> None:
    """The same sums: with the other feed dark from the beginning, and both needed or not."""
    made = policy("feed=a", "feed=b", "minimum_supplies=2")
    assert lasting(made, ("a", 0.8, 0.5, BATTERY), ("b", 1.0, 0.5, UTILITY)) == pytest.approx(alone(0.8, 0.5))


def test_two_equal_batteries_end_together() -> None:
    """Nothing is left to take over when the first one ends."""
    equal = (("a", 0.8, 0.5, BATTERY), ("b", 0.8, 0.5, BATTERY))
    assert lasting(ONE_OF_TWO, *equal) == pytest.approx(alone(0.8, 0.5))
    assert lasting(BOTH, *equal) == pytest.approx(alone(0.8, 0.5))


def test_the_load_of_the_first_that_ends_moves_to_the_rest() -> None:
    first_s = alone(0.5, 0.4)
    rest = budget.usable(ALONE, 0.8) - first_s / account.tau_s(ALONE.runtime_table, 0.4)
    expected_s = first_s + rest * account.tau_s(ALONE.runtime_table, 0.8)
    batteries = (("a", 0.5, 0.4, BATTERY), ("b", 0.8, 0.4, BATTERY))
    assert lasting(ONE_OF_TWO, *batteries) == pytest.approx(expected_s)
    assert lasting(BOTH, *batteries) == pytest.approx(first_s)


def test_a_rest_that_is_overloaded_ends_with_the_first() -> None:
    """60 % and 60 % is more than one of them carries."""
    batteries = (("a", 0.5, 0.6, BATTERY), ("b", 0.8, 0.6, BATTERY))
    assert lasting(ONE_OF_TWO, *batteries) == pytest.approx(alone(0.5, 0.6))


def test_three_feeds_end_one_after_the_other() -> None:
    made = policy("feed=a", "feed=b", "feed=c")
    tau = ALONE.runtime_table
    one_s = alone(0.3, 0.3)
    b, c = (budget.usable(ALONE, left) - one_s / account.tau_s(tau, 0.3) for left in (0.5, 0.9))
    two_s = b * account.tau_s(tau, 0.45)
    c -= two_s / account.tau_s(tau, 0.45)
    expected_s = one_s + two_s + c * account.tau_s(tau, 0.9)
    batteries = (("a", 0.3, 0.3, BATTERY), ("b", 0.5, 0.3, BATTERY), ("c", 0.9, 0.3, BATTERY))
    assert lasting(made, *batteries) == pytest.approx(expected_s)


def test_on_utility_the_sums_are_those_of_an_outage_that_begins_now() -> None:
    batteries = (("a", 0.8, 0.5, UTILITY), ("b", 0.8, 0.5, UTILITY))
    assert lasting(ONE_OF_TWO, *batteries) == pytest.approx(alone(0.8, 0.5))


def test_a_pause_lengthens_it_for_all() -> None:
    """At 60 % of the load each battery lasts as its own table says."""
    upses = tuple(
        Supplied(
            ups=name,
            feed=Feed(supply=BATTERY, reading=says(0.0, name, "battery")),
            battery=Battery(used=0.0, left=0.8, load=0.8, health=1.0),
        )
        for name in ("a", "b")
    )
    state = feeds.advance(ONE_OF_TWO, State(upses=upses), 0.0)
    points = account.table(ONE_OF_TWO, state.battery)
    assert [round(load / 0.8, 3) for load, _ in points] == [0.3, 0.45, 0.6, 0.8, 1.0, 1.25]
    assert budget.usable(ONE_OF_TWO, 0.8) * account.tau_s(points, 0.48) == pytest.approx(alone(0.8, 0.48))


def test_a_blind_one_counts_for_nothing_and_all_blind_is_blind() -> None:
    blind = Supplied(ups="b", feed=Feed(supply=BATTERY, reading=says(0.0, "b", "battery")), battery=Battery(load=0.4))
    seen = Supplied(
        ups="a",
        feed=Feed(supply=BATTERY, reading=says(0.0, "a", "battery")),
        battery=Battery(used=0.0, left=0.8, load=0.4, health=1.0),
    )
    one = feeds.advance(ONE_OF_TWO, State(upses=(seen, blind)), 0.0)
    now = budget.compute(ONE_OF_TWO, one.battery, one.feed, (), 0.0)
    assert now.reff_now_s == pytest.approx(alone(0.8, 0.8)), "what it carries is there all the same"
    none = feeds.advance(ONE_OF_TWO, State(upses=(blind,)), 0.0)
    assert none.battery.left is None


def test_an_empty_battery_leaves_nothing() -> None:
    state = after(ONE_OF_TWO, *CALM, *ALL_OUT, Tick(at_s=5000.0))
    now = budget.compute(ONE_OF_TWO, state.battery, state.feed, (), 5000.0)
    assert (now.reff_now_s, state.battery.left) == (0.0, 0.0)


def test_a_cut_of_one_ups_ends_it_before_its_battery() -> None:
    """And what it carried is on the other one from then on."""
    made = ONE_OF_TWO
    upses = tuple(
        Supplied(
            ups=name,
            feed=Feed(supply=BATTERY, reading=says(0.0, name, "battery"), countdown_at_s=cut_at_s),
            battery=Battery(used=0.0, left=0.8, load=0.4, health=1.0),
        )
        for name, cut_at_s in (("a", 50.0), ("b", None))
    )
    state = feeds.advance(made, State(upses=upses), 0.0)
    tau = ALONE.runtime_table
    rest = budget.usable(ALONE, 0.8) - 50.0 / account.tau_s(tau, 0.4)
    now = budget.compute(made, state.battery, state.feed, (), 0.0)
    assert now.reff_now_s == pytest.approx(50.0 + rest * account.tau_s(tau, 0.8))


def test_time_without_readings_empties_those_on_battery_only() -> None:
    state = after(ONE_OF_TWO, *CALM, *A_OUT, says(60.0, "a", "battery"))
    used = {each.ups: each.battery.used or 0.0 for each in state.upses}
    assert used == {"a": pytest.approx(58.0 / 540.0, rel=0.05), "b": 0.0}, "also where the host is not on battery"
    state = after(BOTH, *CALM, *A_OUT, Tick(at_s=60.0))
    used = {each.ups: each.battery.used or 0.0 for each in state.upses}
    assert used["b"] == 0.0
    assert used["a"] == pytest.approx(58.0 / 540.0, rel=0.05)


# --- Over restarts and settings -------------------------------------------------------------------------------------


def test_a_restart_goes_on_with_every_feed() -> None:
    state = after(ONE_OF_TWO, *CALM, *ALL_OUT)
    again = restore(ONE_OF_TWO, Stored(state=state, boot_id="boot-one", at_s=3.25), 8.0).state
    assert [each.feed.supply for each in again.upses] == [BATTERY, BATTERY]
    assert again.feed.supply is BATTERY


def test_the_next_boot_knows_every_battery_and_no_feed() -> None:
    state = after(ONE_OF_TWO, *CALM, *ALL_OUT, Tick(at_s=100.0))
    next_boot = replace(ONE_OF_TWO, boot_id="boot-two")
    again = restore(next_boot, Stored(state=state, boot_id="boot-one", at_s=100.0, gap_s=60.0), 5.0).state
    assert [(each.ups, each.feed.supply, each.battery.away_s) for each in again.upses] == [
        ("a", UNKNOWN, 60.0),
        ("b", UNKNOWN, 60.0),
    ]
    assert all((each.battery.used or 0.0) > 0.1 for each in again.upses)
    assert again.feed.supply is UNKNOWN


def test_one_feed_becomes_two_and_two_become_one() -> None:
    lone = policy("feed=a")
    lone = replace(lone, ups="a", feeds=())
    state = after(lone, says(0.0, "a", "utility"), says(1.0, "a", "utility"))
    two = reloaded(lone, ONE_OF_TWO, state, 2.0)
    assert [(each.ups, each.feed.supply) for each in two.upses] == [("a", UTILITY)]
    assert two.feed.supply is UTILITY
    back = reloaded(ONE_OF_TWO, lone, two, 3.0)
    assert (back.upses, back.feed, back.battery.used) == ((), state.feed, state.battery.used)
    other = replace(lone, ups="c")
    strange = reloaded(ONE_OF_TWO, other, two, 3.0)
    assert (strange.feed, strange.battery.used) == (Feed(since_s=3.0), None)
    assert reloaded(lone, lone, state, 3.0) == state


def test_a_feed_that_the_settings_lose_is_forgotten() -> None:
    state = after(ONE_OF_TWO, *CALM)
    kept = replace(ONE_OF_TWO, feeds=(*ONE_OF_TWO.feeds[:1], FeedPolicy(policy=replace(ALONE, ups="c"))))
    assert [each.ups for each in feeds.adopt(kept, state, 5.0).upses] == ["a"]


def test_the_whole_is_finite_whatever_it_is_fed() -> None:
    """A load of zero, a battery without a load, no table."""
    bare = replace(
        ONE_OF_TWO, feeds=tuple(FeedPolicy(policy=replace(each.policy, runtime_table=())) for each in ONE_OF_TWO.feeds)
    )
    for made in (ONE_OF_TWO, bare, BOTH):
        state = after(
            made,
            says(0.0, "a", "utility", load_pct=0.0, runtime_s=None, charge_pct=None),
            says(0.25, "b", "utility", load_pct=None, runtime_s=0.0),
            says(1.0, "a", "battery", load_pct=0.0, runtime_s=None, charge_pct=None, on_battery_s=1.0),
            says(1.25, "b", "battery", load_pct=None, runtime_s=0.0, on_battery_s=1.0),
            Tick(at_s=50.0),
        )
        now = budget.compute(made, state.battery, state.feed, (), 51.0)
        assert now.reff_now_s is None or math.isfinite(now.reff_now_s)
