"""The battery's account: what a reading enters, what time takes, and what one odd reading must not do."""

import math
from dataclasses import replace
from typing import Any

import pytest

from powerguard.core.energy import account
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.state import Battery, Feed, Supply
from tests.core.play import make_policy

TABLE = ((0.50, 540.0), (0.75, 360.0), (1.00, 240.0))
POLICY = make_policy(["table=50:540,75:360,100:240"])
BLIND = make_policy([])


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def reading(at_s: float, *, on_battery: bool = True, **fields: Any) -> Reading:  # noqa: ANN401 - fields of a Reading
    source = OutputSource.BATTERY if on_battery else OutputSource.UTILITY
    return Reading(at_s=at_s, ups="ups", source="snmp", **{"output_source": source, **fields})


def entered(battery: Battery, now: Reading, last: Reading | None = None, **how: Any) -> Battery:  # noqa: ANN401 - of account()
    """Enter one reading, on battery unless it says otherwise."""
    draining = now.output_source is OutputSource.BATTERY
    feed = Feed(supply=Supply.BATTERY if draining else Supply.UTILITY, reading=now, previous=last)
    low_at_s = how.pop("low_at_s", None)
    policy = how.pop("policy", POLICY)
    return account.enter(policy, battery, replace(feed, low_battery_at_s=low_at_s), now, draining=draining, **how)


# --- tau ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        (0.50, 540.0),
        (0.75, 360.0),
        (1.00, 240.0),
        # Half way in logs: the geometric means of both load and seconds.
        (math.sqrt(0.50 * 0.75), math.sqrt(540.0 * 360.0)),
        (math.sqrt(0.75 * 1.00), math.sqrt(360.0 * 240.0)),
        # 540 -> 360 over 0.5 -> 0.75 is a straight hyperbola: 270 / load.
        (0.60, 450.0),
        # Above the table by the last slope: ln(240/360) / ln(1/0.75) = -1.40942; 1.2 ** -1.40942 = 0.773390.
        (1.20, 240.0 * 1.2 ** (math.log(240.0 / 360.0) / math.log(1.00 / 0.75))),
        (1.20, pytest.approx(185.6137, abs=1e-3)),
        # Below it by a constant loss of 4 %: 540 * 0.54 / 0.24 and / 0.14.
        (0.20, 1215.0),
        (0.10, 540.0 * 0.54 / 0.14),
        # The floor of 5 %: 540 * 0.54 / 0.09 = 3240, also for nothing at all and for nonsense.
        (0.05, 3240.0),
        (0.0, 3240.0),
        (-1.0, 3240.0),
    ],
)
def test_tau(load: float, seconds: float) -> None:
    result = account.tau_s(TABLE, load)
    assert result == (near(seconds) if isinstance(seconds, float) else seconds)


@pytest.mark.parametrize(
    ("load", "seconds"),
    [(0.75, 360.0), (0.35, 360.0 * 0.79 / 0.39), (1.50, 360.0 * 0.5**1.46), (1.00, 360 * 0.75**1.46)],
)
def test_tau_of_a_table_with_one_point(load: float, seconds: float) -> None:
    """Above the point the steepest exponent of makers' tables counts: 1.46."""
    assert account.tau_s(((0.75, 360.0),), load) == near(seconds)


def test_the_table_is_the_settings_one_else_the_one_point_seen() -> None:
    seen = Battery(tau_point=(0.75, 300.0))
    assert account.table(POLICY, seen) == TABLE
    blind = make_policy([])
    assert account.table(blind, seen) == ((0.75, 300.0),)
    assert account.table(blind, Battery()) == ()


# --- load ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load_pct", "watts", "rating_w", "share"),
    [
        (75.0, None, None, 0.75),
        (0.0, None, None, None),
        (None, None, 5400.0, None),
        (200.0, None, None, 2.0),
        (200.1, None, None, None),
        (None, 2700.0, 5400.0, 0.5),
        (0.0, 2700.0, 5400.0, 0.5),
        (50.0, 5400.0, 5400.0, 0.5),
        (None, 2700.0, None, None),
        (None, 0.0, 5400.0, None),
        (None, 10800.0, 5400.0, 2.0),
        (None, 10801.0, 5400.0, None),
    ],
)
def test_reported_load(
    load_pct: float | None, watts: float | None, rating_w: float | None, share: float | None
) -> None:
    """Zero is a silent gauge, not a dark host; watts count where the percentage is silent and the rating is known."""
    reading = Reading(
        at_s=1.0, ups="ups", source="snmp", output_source=OutputSource.UTILITY, load_pct=load_pct, watts=watts
    )
    assert account.reported_load(replace(POLICY, rating_w=rating_w), reading) == share


def test_a_load_never_reported_counts_as_full() -> None:
    assert account.load_of(Battery()) == 1.0
    assert account.load_of(Battery(load=0.3)) == 0.3


# --- First contact ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "used", "left"),
    [
        ({"charge_pct": 100.0}, 0.0, 0.75),
        ({"charge_pct": 80.0}, 0.2, 0.55),
        ({"charge_pct": 0.0}, 0.75, 0.0),
        ({}, 0.375, 0.375),
        ({"replace_battery": True, "charge_pct": 100.0}, 0.0, 0.6),
        ({"replace_battery": True}, 0.3, 0.3),
        ({"charge_pct": 100.0, "load_pct": 75.0, "runtime_s": 180.0}, 0.0, 0.5),
    ],
)
def test_first_contact(fields: dict[str, Any], used: float, left: float) -> None:
    """1 - charge but at most H, or half of H where the charge is not told; e is the smallest of the three terms."""
    for on_battery in (True, False):
        battery = entered(Battery(at_s=0.0), reading(10.0, on_battery=on_battery, **fields))
        assert (battery.used, battery.left) == (near(used), near(left))
        assert battery.at_s == 10.0


# --- Time ---------------------------------------------------------------------------------------------------------

KNOWN = Battery(at_s=100.0, used=0.1, gauge=0.5, charged=0.6, left=0.5, load=0.75)


def test_time_on_battery_takes_from_every_term() -> None:
    """36 s at 75 % are a tenth of a new battery; nothing goes below empty, or above full."""
    after = account.advance(POLICY, KNOWN, 136.0, draining=True)
    assert (after.used, after.gauge, after.charged, after.left) == (near(0.2), near(0.4), near(0.5), near(0.4))
    assert after.at_s == 136.0
    heavier = account.advance(POLICY, KNOWN, 136.0, draining=True, load=1.0)
    assert (heavier.used, heavier.left) == (near(0.25), near(0.35))
    spent = account.advance(POLICY, KNOWN, 10_000.0, draining=True)
    assert (spent.used, spent.gauge, spent.charged, spent.left) == (1.0, 0.0, 0.0, 0.0)
    assert account.advance(POLICY, KNOWN, 500.0, draining=True).used == 1.0, "not more than there was: 1.21 of it"
    silent = account.advance(POLICY, Battery(at_s=100.0, used=0.1), 136.0, draining=True)
    assert (silent.gauge, silent.charged, silent.left) == (None, None, None)
    assert silent.used == near(0.1 + 36.0 / 240.0)  # a load never told counts as full


def test_time_on_utility_recharges_over_eight_hours() -> None:
    assert account.advance(POLICY, KNOWN, 100.0 + 960.0, draining=False).used == near(0.1 - 0.75 / 30.0)
    assert account.advance(POLICY, KNOWN, 100.0 + 40_000.0, draining=False).used == 0.0
    assert account.advance(POLICY, KNOWN, 1060.0, draining=False).gauge == 0.5


def test_time_that_has_not_passed_changes_nothing() -> None:
    assert account.advance(POLICY, KNOWN, 100.0, draining=True) is KNOWN
    assert account.advance(POLICY, KNOWN, 50.0, draining=True) is KNOWN
    assert account.advance(POLICY, Battery(at_s=1.0), 5.0, draining=True) == Battery(at_s=5.0)
    assert account.advance(BLIND, KNOWN, 136.0, draining=True) == replace(KNOWN, at_s=136.0)


def test_the_account_never_runs_backwards() -> None:
    """A reading that ended before the last tick must not be counted twice."""
    assert entered(KNOWN, reading(99.5, load_pct=75.0)).at_s == 100.0


# --- Gaps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap_s", "load_pct", "tick_s", "used"),
    [
        (36.0, 100.0, 0.0, 0.1 + 36.0 / 240.0),  # the larger load of the two ends
        (36.0, 75.0, 0.0, 0.1 + 36.0 / 360.0),
        (36.0, 50.0, 0.0, 0.1 + 36.0 / 360.0),
        (36.0, None, 0.0, 0.1 + 36.0 / 360.0),
        (36.0, 100.0, 18.0, 0.1 + 36.0 / 240.0),  # ticks have counted half of it at the smaller load
        (5.0, 100.0, 0.0, 0.1 + 5.0 / 360.0),  # no gap: the load of then
        (5.001, 100.0, 0.0, 0.1 + 5.001 / 240.0),
    ],
)
def test_a_gap_counts_at_the_larger_load(gap_s: float, load_pct: float | None, tick_s: float, used: float) -> None:
    last = reading(100.0, load_pct=75.0)
    ticked = account.advance(POLICY, KNOWN, 100.0 + tick_s, draining=True)
    assert entered(ticked, reading(100.0 + gap_s, load_pct=load_pct), last).used == near(used)
    if not tick_s:
        assert entered(KNOWN, reading(100.0 + gap_s, load_pct=load_pct)).used == near(used), "also without a last one"


def test_up_to_the_first_utility_reading_it_was_battery() -> None:
    last = reading(100.0, load_pct=75.0)
    back = entered(KNOWN, reading(136.0, on_battery=False, load_pct=75.0), last, drained=True)
    assert back.used == near(0.2)
    still = entered(KNOWN, reading(136.0, on_battery=False, load_pct=100.0), last, drained=False)
    assert still.used == near(0.1 - 0.75 * 36.0 / 28800.0)


@pytest.mark.parametrize(
    ("before", "now", "used"),
    [
        ({"charge_pct": 100.0}, {"charge_pct": 100.0}, 0.15),
        ({"charge_pct": 100.0}, {"charge_pct": 70.0}, 0.45),
        ({"runtime_s": 360.0}, {"runtime_s": 270.0}, 0.40),
        ({"charge_pct": 100.0, "runtime_s": 360.0}, {"charge_pct": 90.0, "runtime_s": 270.0}, 0.40),
        ({"charge_pct": 90.0}, {"charge_pct": 100.0}, 0.15),
        ({"charge_pct": 100.0}, {"charge_pct": 10.0}, 0.85),
        ({}, {"charge_pct": 100.0}, 0.85),
    ],
)
def test_a_silence_between_utility_and_battery_takes_what_the_gauges_show(
    before: dict[str, float], now: dict[str, float], used: float
) -> None:
    """270 s of silence would take 0.75 of a battery, and 0.1 was used. Without a gauge, all of it counts as taken."""
    heard = replace(KNOWN, used_heard=KNOWN.used)
    last = reading(100.0, on_battery=False, load_pct=75.0, **before)
    assert entered(heard, reading(370.0, load_pct=75.0, **now), last).used == near(used)
    short = entered(heard, reading(118.0, load_pct=75.0, **now), last)
    assert short.used == near(0.15), "as much as whole percents and minutes hide"
    on = reading(100.0, load_pct=75.0, **before)
    assert entered(heard, reading(370.0, load_pct=75.0, **now), on).used == near(0.85), "it was on battery before"
    for other in (replace(on, testing=True), replace(on, output_source=OutputSource.UNKNOWN)):
        assert entered(heard, reading(370.0, load_pct=75.0, **now), other).used == near(used), "a test, or WAIT of NUT"
    ticked = account.advance(POLICY, heard, 370.0, draining=True)
    back = entered(ticked, reading(371.0, on_battery=False, load_pct=75.0, **now), last)
    assert back.used == pytest.approx(used, abs=0.01), "battery was presumed, and it had utility"


@pytest.mark.parametrize("source", [OutputSource.OFF, OutputSource.UNKNOWN])
def test_nothing_recharges_while_nobody_says_so(source: OutputSource) -> None:
    assert entered(KNOWN, reading(400.0, output_source=source)).used == 0.1
    assert entered(KNOWN, reading(400.0, output_source=OutputSource.BYPASS)).used == near(0.1 - 0.75 * 300 / 28800)


# --- Utility ------------------------------------------------------------------------------------------------------


def test_used_is_never_below_what_the_charge_says_twice() -> None:
    first = entered(KNOWN, reading(101.0, on_battery=False, charge_pct=40.0), reading(100.0, charge_pct=100.0))
    assert first.used == near(0.1 - 0.75 / 28800.0), "one odd charge is a glitch"
    assert first.charged == near(0.3)
    second = entered(first, reading(102.0, on_battery=False, charge_pct=40.0), reading(101.0, charge_pct=40.0))
    assert second.used == near(0.45)
    alone = entered(KNOWN, reading(101.0, on_battery=False, charge_pct=40.0), reading(100.0))
    assert alone.used == near(0.45), "where the last one told none, there is nothing to doubt it with"


def test_time_away_recharges_only_as_far_as_the_charge_says() -> None:
    away = replace(KNOWN, used=0.6, away_s=9600.0)
    seen = entered(away, reading(101.0, on_battery=False, charge_pct=90.0), reading(100.5, charge_pct=90.0))
    assert seen.used == near(0.6 - 0.75 / 28800.0 - 0.25)
    assert seen.away_s == 0.0
    low = entered(away, reading(101.0, on_battery=False, charge_pct=30.0), reading(100.5, charge_pct=30.0))
    assert low.used == near(0.525)
    untold = entered(away, reading(101.0, on_battery=False))
    assert (untold.used, untold.away_s) == (near(0.6 - 0.75 / 28800.0), 0.0)
    on_battery = entered(away, reading(101.0, charge_pct=90.0))
    assert on_battery.used == near(0.6 + 1.0 / 360.0)


@pytest.mark.parametrize(
    ("charges", "fell"),
    [
        ((40.0, 40.0), 0.4),
        ((50.0, 40.0), 0.3),  # one odd charge is a glitch: the better one of two counts
        ((40.0, 50.0), 0.3),
        ((90.0, 90.0), 0.0),
    ],
)
def test_what_the_ups_used_while_the_host_was_off_counts_by_the_fall(charges: tuple[float, float], fell: float) -> None:
    """80 % was told when the host went off. A gauge that shows too much shows by how much it fell all the same."""
    away = replace(KNOWN, used=0.5, away_charge=0.8)
    first, second = (reading(100.0 + 0.5 * place, charge_pct=charge) for place, charge in enumerate(charges))
    one = entered(away, first)
    assert (one.used, one.away_charge) == (near(0.5), 0.8), "one reading alone proves nothing"
    two = entered(one, second, first)
    drawn = 0.5 / 360.0
    assert (two.used, two.away_charge) == (near(0.5 + drawn + fell), None)
    assert entered(replace(away, used=0.9), second, first).used == near(min(1.0, 0.9 + drawn + fell))


def test_what_was_used_while_off_is_not_known_until_a_charge_is_reported() -> None:
    away = replace(KNOWN, used=0.5, away_charge=0.8)
    silent = entered(away, reading(100.0), reading(99.5, charge_pct=40.0))
    assert (silent.used, silent.away_charge) == (near(0.5), 0.8)
    nothing = entered(replace(away, away_charge=None), reading(100.0, charge_pct=40.0), reading(99.5, charge_pct=40.0))
    assert (nothing.used, nothing.away_charge) == (near(0.5), None)


def test_on_utility_a_silent_term_is_not_known() -> None:
    battery = entered(KNOWN, reading(101.0, on_battery=False))
    assert (battery.gauge, battery.charged) == (None, None)
    assert battery.left == near(0.75 - battery.used)  # type: ignore[operator]


# --- Battery ------------------------------------------------------------------------------------------------------


def test_on_battery_a_silent_term_is_dead_reckoned_and_e_never_rises() -> None:
    battery = entered(KNOWN, reading(101.0, load_pct=75.0))
    drain = 1.0 / 360.0
    assert (battery.gauge, battery.charged, battery.left) == (near(0.5 - drain), near(0.6 - drain), near(0.5 - drain))
    better = entered(KNOWN, reading(101.0, load_pct=75.0, charge_pct=100.0, runtime_s=360.0))
    assert (better.gauge, better.charged, better.left) == (1.0, 0.75, near(0.5 - drain))
    worse = entered(KNOWN, reading(101.0, load_pct=75.0, runtime_s=178.0))
    assert worse.left == near(178.0 / 360.0)


def test_a_fall_faster_than_physics_counts_when_it_is_repeated() -> None:
    """Three times what the load explains, and half a point of grain; the second reading decides."""
    drain = 1.0 / 360.0
    edge = 0.5 - 3 * drain - 0.005
    inside = entered(KNOWN, reading(101.0, load_pct=75.0, runtime_s=360.0 * (edge + 1e-6)))
    assert (inside.left, inside.suspect) == (near(edge + 1e-6), None)
    outside = entered(KNOWN, reading(101.0, load_pct=75.0, runtime_s=360.0 * (edge - 1e-6)))
    assert (outside.left, outside.suspect) == (near(0.5 - drain), near(edge - 1e-6))
    low = entered(KNOWN, reading(101.0, load_pct=75.0, runtime_s=36.0))
    assert low.suspect == near(0.1)
    again = entered(low, reading(102.0, load_pct=75.0, runtime_s=36.0))
    assert (again.left, again.suspect) == (near(0.1), None)
    grain = entered(low, reading(102.0, load_pct=75.0, runtime_s=36.0 + 0.0049 * 360.0))
    assert grain.left == near(0.1049)
    other = entered(low, reading(102.0, load_pct=75.0, runtime_s=36.0 + 0.0051 * 360.0))
    assert (other.left, other.suspect) == (near(0.5 - 2 * drain), near(0.1051))
    well = entered(low, reading(102.0, load_pct=75.0, runtime_s=178.0))
    assert (well.left, well.suspect) == (near(178.0 / 360.0), None)
    just = entered(replace(KNOWN, left=0.505), reading(100.0, load_pct=75.0, runtime_s=180.0))
    assert (just.left, just.suspect) == (0.5, None), "by the grain and no more"
    repeated = entered(replace(KNOWN, suspect=0.1), reading(101.0, load_pct=75.0, runtime_s=0.105 * 360.0))
    assert (repeated.left, repeated.suspect) == (near(0.105), None), "within the grain"


@pytest.mark.parametrize("odd", [{"runtime_s": 3.0}, {"charge_pct": 1.0}])
def test_silence_does_not_repeat_a_glitch(odd: dict[str, Any]) -> None:
    low = entered(KNOWN, reading(101.0, load_pct=75.0, **odd))
    assert low.suspect is not None
    silent = entered(low, reading(102.0, load_pct=75.0))
    assert (silent.left, silent.suspect) == (near(0.5 - 2.0 / 360.0), None)


# --- Load ---------------------------------------------------------------------------------------------------------


def test_the_load_is_averaged_and_a_step_is_taken_at_once() -> None:
    assert entered(KNOWN, reading(101.0, load_pct=79.0)).load == near(0.758)
    assert entered(KNOWN, reading(101.0, load_pct=79.0)).step_at_s is None
    assert entered(KNOWN, reading(101.0, load_pct=71.0)).load == near(0.742)
    fallen = entered(KNOWN, reading(101.0, load_pct=45.0))
    assert (fallen.load, fallen.step_at_s) == (0.45, 101.0)
    risen = entered(KNOWN, reading(101.0, load_pct=81.0))
    assert (risen.load, risen.step_at_s) == (0.81, 101.0)
    assert entered(KNOWN, reading(101.0)).load == 0.75
    assert entered(replace(KNOWN, load=None), reading(101.0, load_pct=30.0)).load == 0.3
    edge = entered(replace(KNOWN, load=0.05), reading(101.0, load_pct=10.0))
    assert (edge.load, edge.step_at_s) == (near(0.06), None), "five points are no step yet"


def test_after_a_step_the_gauge_is_dead_reckoned_for_20_s() -> None:
    """Measured: UPSes take 10 to 20 s to follow a load step in the runtime that they report."""
    stepped = replace(KNOWN, step_at_s=90.0)
    drain = 1.0 / 360.0
    assert entered(stepped, reading(101.0, load_pct=75.0, runtime_s=100.0)).gauge == near(0.5 - drain)
    stepped = replace(KNOWN, step_at_s=81.5)
    assert entered(stepped, reading(101.0, load_pct=75.0, runtime_s=100.0)).gauge == near(0.5 - drain)
    stepped = replace(KNOWN, step_at_s=81.0)
    assert entered(stepped, reading(101.0, load_pct=75.0, runtime_s=179.0)).gauge == near(179.0 / 360.0)
    on_utility = entered(
        replace(KNOWN, step_at_s=90.0), reading(101.0, on_battery=False, load_pct=75.0, runtime_s=90.0)
    )
    assert on_utility.gauge == 0.25
    silent = replace(KNOWN, gauge=None, step_at_s=90.0)
    assert entered(silent, reading(101.0, load_pct=75.0, runtime_s=180.0)).gauge == 0.5, "nothing to reckon from"


# --- What it teaches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step_at_s", "learned"), [(None, True), (81.0, True), (81.001, False)])
def test_on_utility_the_runtime_at_this_load_is_learned_once_it_has_stood(
    step_at_s: float | None, *, learned: bool
) -> None:
    """20 s after a step the UPS has followed it."""
    now = reading(101.0, on_battery=False, charge_pct=100.0, load_pct=79.0, runtime_s=360.0)
    model = entered(replace(KNOWN, step_at_s=step_at_s), now, policy=BLIND).model
    points = [(point.load, point.tau_s, point.at_s) for point in model.points]
    assert points == ([(near(0.758), 360.0, 101.0)] if learned else [])


@pytest.mark.parametrize(("gap_s", "whole"), [(30.0, True), (30.1, False)])
def test_on_battery_the_discharge_is_followed(gap_s: float, *, whole: bool) -> None:
    """What it gives, how fast the runtime falls, and whether all of it was seen."""
    began = entered(KNOWN, reading(101.0, load_pct=75.0, runtime_s=290.0), reading(100.0, load_pct=75.0))
    now = reading(101.0 + gap_s, load_pct=75.0, runtime_s=290.0 - 2.0 * gap_s)
    found = entered(began, now, reading(101.0, load_pct=75.0)).model.discharge
    assert found is not None
    assert (found.since_s, found.used, found.slope, found.whole) == (101.0, began.used, near(2.0), whole)


# --- Low battery --------------------------------------------------------------------------------------------------


def test_low_battery_counts_as_energy_at_the_load_at_which_it_rose() -> None:
    """120 s at 75 % of the rating are a third of this battery; a pause makes what is left of it last longer."""
    last = reading(100.0)
    low = entered(KNOWN, reading(101.0, load_pct=75.0, runtime_s=178.0), last, low_at_s=101.0)
    assert (low.left, low.low_left, low.suspect) == (near(120.0 / 360.0), near(120.0 / 360.0), None)
    later = entered(low, reading(111.0, load_pct=50.0, runtime_s=400.0), reading(110.0), low_at_s=101.0)
    assert later.left == near(110.0 / 360.0)
    paused = entered(later, reading(114.0, load_pct=50.0, runtime_s=397.0), reading(111.0), low_at_s=101.0)
    assert paused.left == near(110.0 / 360.0 - 3.0 / 540.0)
    spent = entered(low, reading(300.0, load_pct=75.0, runtime_s=100.0), reading(299.0), low_at_s=101.0)
    assert spent.left == 0.0
    late = entered(KNOWN, reading(161.0, load_pct=75.0, runtime_s=178.0), reading(160.0), low_at_s=101.0)
    assert late.low_left == near(60.0 / 360.0), "seen for the first time a minute after it rose"


def test_low_battery_that_is_withdrawn_bounds_nothing() -> None:
    """Raised at a high load, cleared by two readings: our account, the charge and the runtime count again."""
    low = entered(KNOWN, reading(101.0, load_pct=75.0, runtime_s=178.0), reading(100.0), low_at_s=101.0)
    assert low.unflagged is not None
    assert low.unflagged > 0.4
    over = entered(low, reading(102.0, load_pct=75.0, runtime_s=177.0), reading(101.0), low_at_s=None)
    assert over.low_left is None
    assert over.left == near(over.unflagged or 0.0)
    assert over.left == pytest.approx(low.unflagged, abs=0.01)


@pytest.mark.parametrize(
    ("charge_pct", "runtime_s", "used", "doubted"),
    [
        (50.0, 241.0, 0.05, True),  # 0.7 * 360 = 252 s of our own
        (49.9, 241.0, 0.05, False),
        (50.0, 240.0, 0.05, False),
        (50.0, None, 0.05, False),
        (None, 241.0, 0.05, False),
        (50.0, 241.0, 0.09, False),  # 0.66 * 360 = 237.6 s of our own
    ],
)
def test_low_battery_is_doubted_only_by_all_three(
    charge_pct: float | None, runtime_s: float | None, used: float, *, doubted: bool
) -> None:
    """Charge at least half, and both the gauge and our own account more than twice what low battery allows."""
    battery = Battery(at_s=101.0, used=used, gauge=0.7, left=0.7, load=0.75)
    now = reading(101.0, load_pct=75.0, charge_pct=charge_pct, runtime_s=runtime_s)
    after = entered(battery, now, reading(100.0), low_at_s=101.0)
    assert after.left == near(0.7 if doubted else 120.0 / 360.0)


# --- No table -----------------------------------------------------------------------------------------------------


def test_without_a_table_tau_comes_from_what_utility_readings_say() -> None:
    """runtime / charge at the load of then; on battery only where nothing better was seen."""
    seen = entered(
        Battery(at_s=0.0), reading(1.0, on_battery=False, charge_pct=50.0, load_pct=60.0, runtime_s=200.0), policy=BLIND
    )
    assert (seen.tau_point, seen.left) == ((0.6, 400.0), near(0.25))
    later = entered(seen, reading(2.0, charge_pct=50.0, load_pct=60.0, runtime_s=148.0), policy=BLIND)
    assert later.tau_point == (0.6, 400.0), "what is told on battery is no measure of a full one"
    assert later.gauge == near(0.37)
    first = entered(Battery(at_s=0.0), reading(1.0, charge_pct=50.0, runtime_s=200.0), policy=BLIND)
    assert first.tau_point == (1.0, 400.0)
    uncharged = entered(Battery(at_s=0.0), reading(1.0, on_battery=False, load_pct=2.0, runtime_s=200.0), policy=BLIND)
    assert uncharged.tau_point == (0.05, 200.0)
    nothing = entered(Battery(at_s=0.0), reading(1.0, charge_pct=50.0, load_pct=60.0), policy=BLIND)
    assert (nothing.tau_point, nothing.left, nothing.gauge) == (None, None, None)
    assert entered(KNOWN, reading(101.0, on_battery=False, runtime_s=200.0)).tau_point is None, (
        "the settings' table wins"
    )


# --- Small print --------------------------------------------------------------------------------------------------


def test_after_a_step_a_better_gauge_waits_as_well() -> None:
    """A load that falls makes the gauge jump up: for 20 s it is reckoned, whatever it says; then it counts again."""
    drain = 1.0 / 360.0
    for step_at_s, gauge in ((90.0, 0.5 - drain), (81.001, 0.5 - drain), (81.0, 1.0), (None, 1.0)):
        stepped = replace(KNOWN, step_at_s=step_at_s)
        assert entered(stepped, reading(101.0, load_pct=75.0, runtime_s=360.0)).gauge == near(gauge)


def test_a_suspect_reading_leaves_the_terms_reckoned() -> None:
    drain = 1.0 / 360.0
    low = entered(KNOWN, reading(101.0, load_pct=75.0, runtime_s=3.0, charge_pct=1.0))
    assert (low.gauge, low.charged) == (near(0.5 - drain), near(0.6 - drain))


def test_watts_and_small_loads_count_in_the_account_too() -> None:
    rated = replace(POLICY, rating_w=5400.0)
    now = entered(replace(KNOWN, load=0.5), reading(136.0, watts=5400.0), reading(100.0), policy=rated)
    assert (now.load, now.used) == (1.0, near(0.1 + 36.0 / 240.0))
    assert entered(replace(KNOWN, load=None), reading(101.0, load_pct=0.5)).load == 0.005
    assert entered(replace(KNOWN, load=None), reading(101.0, watts=0.5), policy=rated).load == near(0.5 / 5400.0)


def test_a_charge_beyond_full_is_not_reported() -> None:
    assert entered(Battery(at_s=0.0), reading(1.0, charge_pct=100.5)).used == 0.375


def test_an_empty_gauge_on_battery_is_real() -> None:
    """0 s at the end of a plausible fall; the decoder passes no other."""
    near_empty = replace(KNOWN, gauge=0.004, left=0.004)
    assert entered(near_empty, reading(101.0, load_pct=75.0, runtime_s=0.0)).gauge == 0.0
    assert entered(near_empty, reading(101.0, load_pct=75.0, runtime_s=0.5)).gauge == near(0.5 / 360.0)


def test_low_battery_that_is_over_leaves_nothing() -> None:
    """After its 120 s the cap is nothing at all, also where the runtime is silent; a flag alone is not doubted then."""
    given = {"load_pct": 75.0, "charge_pct": 60.0}
    spent = entered(KNOWN, reading(300.0, **given), reading(299.0), low_at_s=100.0)
    assert spent.left == 0.0
    fresh = entered(Battery(at_s=299.0, used=0.0, load=0.75), reading(300.0, **given), reading(299.0), low_at_s=300.0)
    assert (fresh.left, fresh.suspect) == (near(1 / 3), None)
    long_low = entered(
        Battery(at_s=299.0, used=0.0, load=0.75), reading(300.0, **given), reading(299.0), low_at_s=100.0
    )
    assert long_low.left == 0.0, "not even with an account that has used nothing"
    unused = Battery(at_s=300.0, used=0.0, gauge=0.7, left=0.7, load=0.75)
    doubted = entered(unused, reading(300.0, runtime_s=260.0, **given), reading(299.0), low_at_s=300.0)
    assert doubted.left == near(0.7), "an account that has used nothing doubts it"


def test_the_blind_have_no_share_at_all() -> None:
    assert entered(KNOWN, reading(101.0), policy=BLIND).left is None
    assert entered(KNOWN, reading(101.0), policy=BLIND).gauge is None
    assert entered(replace(KNOWN, left=None), reading(101.0, load_pct=75.0)).left == near(0.5 - 1 / 360.0)


def test_back_on_utility_nothing_is_suspect_any_more() -> None:
    low = entered(KNOWN, reading(101.0, load_pct=75.0, runtime_s=36.0))
    assert low.suspect is not None
    assert entered(low, reading(102.0, on_battery=False, load_pct=75.0), reading(101.0)).suspect is None


def test_on_utility_time_is_accounted_for_once() -> None:
    once = account.advance(POLICY, KNOWN, 1060.0, draining=False)
    assert once.at_s == 1060.0
    assert account.advance(POLICY, once, 1060.0, draining=False) is once


def test_off_takes_nothing_either() -> None:
    full = replace(KNOWN, used=0.0)
    assert entered(full, reading(400.0, output_source=OutputSource.OFF)).used == 0.0
    drained = entered(
        KNOWN, reading(136.0, output_source=OutputSource.OFF, load_pct=75.0), reading(100.0), drained=True
    )
    assert drained.used == near(0.2), "what was drained before it stays drained"


# --- What was presumed, and glitches --------------------------------------------------------------------------------


def first_readings(*readings: dict[str, Any], on_battery: bool = False) -> Battery:
    """Enter these readings, one a second, at a daemon that knows nothing."""
    battery, last = Battery(at_s=100.0), None
    for at_s, fields in enumerate(readings, start=101):
        now = reading(float(at_s), on_battery=on_battery, **fields)
        battery, last = entered(battery, now, last), now
    return battery


@pytest.mark.parametrize("silent", [1, 3, 100])
def test_the_account_begins_with_the_first_charge(silent: int) -> None:
    """An upsd whose driver starts has no charge for a second: that is no half battery for hours."""
    battery = first_readings(*[{"load_pct": 75.0}] * silent)
    assert (battery.presumed, battery.used) == (True, pytest.approx(0.375, abs=0.01))
    battery = first_readings(*[{"load_pct": 75.0}] * silent, {"load_pct": 75.0, "charge_pct": 100.0})
    assert (battery.presumed, battery.used, battery.left) == (False, 0.0, 0.75)


def test_on_battery_what_was_drained_counts_beside_the_first_charge() -> None:
    """A gauge that says 100 % does not give back what ten seconds on battery have taken."""
    battery = first_readings(*[{"load_pct": 75.0}] * 11, {"load_pct": 75.0, "charge_pct": 100.0}, on_battery=True)
    assert battery.used == pytest.approx(11.0 / 360.0, abs=1e-6)
    assert battery.left == pytest.approx(0.75 - 11.0 / 360.0, abs=1e-6)


def outage(*runtimes_s: float, charge_pct: float = 90.0) -> list[Battery]:
    """Play a battery with these reported runtimes, one a second, after some minutes in which all was well."""
    battery, last, out = KNOWN, reading(100.0, runtime_s=600.0, charge_pct=charge_pct, load_pct=75.0), []
    for at_s, runtime_s in enumerate(runtimes_s, start=101):
        now = reading(float(at_s), runtime_s=runtime_s, charge_pct=charge_pct, load_pct=75.0)
        battery, last = entered(battery, now, last), now
        out.append(battery)
    return out


def test_a_glitch_of_several_readings_is_forgiven_when_all_three_terms_agree_again() -> None:
    """600, 60, 60, 60, 600: believed while it lasts, and 20 s after charge, runtime and account say more again."""
    story = outage(600.0, 60.0, 60.0, 60.0, *[600.0] * 30)
    assert story[3].left == pytest.approx(60.0 / 360.0, abs=0.01)
    assert story[3 + 19].left == pytest.approx(60.0 / 360.0, abs=0.07)
    assert story[-1].left == near(story[-1].health - (story[-1].used or 0.0))


def test_a_fall_that_the_charge_repeats_is_no_glitch() -> None:
    """Without a charge, or with one that has fallen too, a runtime that rises again gives nothing back."""
    battery, last = outage(600.0, 60.0, 60.0, 60.0)[-1], reading(104.0, runtime_s=60.0, charge_pct=90.0)
    silent, low = battery, battery
    for at_s in range(105, 150):
        silent = entered(silent, reading(float(at_s), runtime_s=600.0), last)
        low = entered(low, reading(float(at_s), runtime_s=600.0, charge_pct=20.0), last)
    assert (silent.left or 0.0) < 60.0 / 360.0
    assert (low.left or 0.0) < 60.0 / 360.0


def gauged(on_utility_s: float, on_battery_s: float, charge_pct: float = 99.0, **how: Any) -> Battery:  # noqa: ANN401
    """Play five minutes on utility and ten seconds on battery, without a table, with these reported runtimes."""
    policy = how.pop("policy", BLIND)
    battery, last = Battery(), None
    for at_s in range(300):
        now = reading(float(at_s), on_battery=False, runtime_s=on_utility_s, charge_pct=100.0, load_pct=40.0)
        battery, last = entered(battery, now, last, policy=policy), now
    for at_s in range(300, 310):
        now = reading(float(at_s), runtime_s=on_battery_s - (at_s - 300), charge_pct=charge_pct, load_pct=40.0)
        battery, last = entered(battery, now, last, policy=policy), now
    return battery


def test_a_runtime_that_the_first_readings_on_battery_contradict_was_never_true() -> None:
    """18 hours on utility, one on battery at 99 %: an hour is left, and not five hundredths of a battery."""
    battery = gauged(65520.0, 3600.0)
    assert battery.left == pytest.approx(0.74, abs=0.02)
    assert account.tau_s(account.table(BLIND, battery), 0.4) == pytest.approx(3600.0 / 0.99, rel=0.02)
    back = entered(battery, reading(400.0, on_battery=False, runtime_s=65520.0, charge_pct=99.0, load_pct=40.0))
    assert account.tau_s(account.table(BLIND, back), 0.4) == pytest.approx(3600.0 / 0.99, rel=0.02), "not learned again"


def test_a_runtime_that_falls_with_the_charge_is_believed() -> None:
    assert gauged(3600.0, 300.0, charge_pct=60.0).left == pytest.approx(291.0 / 3600.0, abs=0.01)
    assert gauged(3600.0, 1800.0).left == pytest.approx(0.5, abs=0.01)
