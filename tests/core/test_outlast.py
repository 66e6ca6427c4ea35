"""How long several batteries last together, played with numbers that can be done by hand."""

import math

import pytest

from powerguard.core.supply.feeds import ENDLESS_S, FACTORS, FeedCourse, last_until_s, stepped


def leg(
    load: float, left: float = 1.0, *, supplies: int = 1, full_s: float = 100.0, cut_at_s: float = math.inf
) -> FeedCourse:
    """A feed whose full battery lasts full_s at a load of 1, and twice as long at half of that."""
    return FeedCourse(supplies=supplies, left=left, load=load, tau_s=lambda load: full_s / load, cut_at_s=cut_at_s)


def test_one_battery_lasts_as_long_as_it_lasts() -> None:
    assert last_until_s([leg(0.5)], 1, 0.0) == 200.0
    assert last_until_s([leg(0.5, 0.5)], 1, 1000.0) == 1100.0
    assert last_until_s([leg(0.5, cut_at_s=30.0)], 1, 0.0) == 30.0


def test_the_second_takes_over_what_the_first_carried() -> None:
    """A: 0.25 of a battery at 0.5, gone after 50 s. B has used a quarter by then; at twice the load 0.75 last 75 s."""
    assert last_until_s([leg(0.5, 0.25), leg(0.5)], 1, 0.0) == pytest.approx(125.0)
    assert last_until_s([leg(0.5, 0.25), leg(0.5)], 2, 0.0) == pytest.approx(50.0), (
        "where both are needed, the first one ends it"
    )


def test_a_load_goes_to_the_others_by_their_power_supplies() -> None:
    """A (0.3, 0.15 of a battery) ends after 50 s; B has two supplies and takes 0.2 of it, C has one and takes 0.1."""
    legs = [leg(0.3, 0.15), leg(0.2, 0.5, supplies=2), leg(0.2, 5.0)]
    # B: 0.5 - 50/500 = 0.4 left, at a load of 0.4: 100 s more. C lives on with two supplies too few.
    assert last_until_s(legs, 2, 0.0) == pytest.approx(150.0)


@pytest.mark.parametrize(("load", "lasts_s"), [(0.5, 100.0), (0.51, 50.0)])
def test_who_is_overloaded_by_it_switches_off(load: float, lasts_s: float) -> None:
    """At 100 % of its rating it holds, at 101 % it does not."""
    first = leg(0.5, 0.25)
    second = FeedCourse(
        supplies=1, left=0.75, load=load, tau_s=lambda load: 200.0 if load <= 0.51 else 100.0, cut_at_s=math.inf
    )
    assert last_until_s([first, second], 1, 0.0) == pytest.approx(lasts_s)


def test_utility_lasts_for_ever_and_so_does_what_hangs_on_it() -> None:
    assert last_until_s([leg(0.5, math.inf), leg(0.5, 0.25)], 1, 7.0) == pytest.approx(57.0 + ENDLESS_S)
    assert last_until_s([leg(0.5, math.inf), leg(0.6, 0.25)], 1, 7.0) < 100.0, (
        "unless it is overloaded by what it takes over"
    )


def test_too_few_from_the_first_is_over_at_once() -> None:
    assert last_until_s([leg(0.5)], 2, 7.0) == 7.0
    assert last_until_s([], 1, 7.0) == 7.0


def test_between_for_ever_and_an_end_nobody_knows_where_the_rest_is_overloaded() -> None:
    """The last endless one is lowered to what the next one would last at its load; all others stay."""
    ends = [80.0, 60.0, 50.0]
    lasts = [ENDLESS_S, ENDLESS_S, ENDLESS_S, *ends]
    out = stepped(lasts)
    assert out[:2] == [ENDLESS_S, ENDLESS_S]
    assert out[2] == pytest.approx(80.0 * FACTORS[3] / FACTORS[2])
    assert out[3:] == ends
    assert stepped([ENDLESS_S] * 6) == [ENDLESS_S] * 6
    assert stepped([90.0, 80.0, 70.0, 60.0, 50.0, 40.0]) == [90.0, 80.0, 70.0, 60.0, 50.0, 40.0]
    assert stepped([ENDLESS_S, 80.0, 70.0, 60.0, 50.0, 40.0])[0] == pytest.approx(80.0 * FACTORS[1] / FACTORS[0])
