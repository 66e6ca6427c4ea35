"""The odds that an outage goes on, as a survey of outages has them."""

import pytest

from powerguard.core.decide import conditions


def test_half_of_all_outages_end_within_minutes() -> None:
    assert conditions.goes_on(0.0, 1.0) == 1.0
    assert conditions.goes_on(0.0, 60.0) == pytest.approx(0.69)
    assert conditions.goes_on(0.0, 300.0) == pytest.approx(0.42)
    assert conditions.goes_on(0.0, 43200.0) == 0.0


def test_what_has_lasted_goes_on() -> None:
    """The longer it has lasted, the likelier are five minutes more."""
    story = [conditions.goes_on(lasted_s, 300.0) for lasted_s in (1.0, 30.0, 120.0, 600.0, 3600.0)]
    assert story == sorted(story)
    assert story[-1] > 0.9


def test_the_mean_is_within_its_bounds() -> None:
    assert conditions.expected_s(10.0, 0.0) == 0.0
    assert conditions.expected_s(10.0, -5.0) == 0.0
    assert 0.0 < conditions.expected_s(10.0, 60.0) < 60.0
    assert conditions.expected_s(1e6, 60.0) == 60.0, "longer than any that is known: it goes on"


def test_within_a_bin_the_odds_fall_by_the_logarithm() -> None:
    """Half of the 14 % that last for 300 to 1800 s last longer than the geometric mean of the two."""
    middle_s = (300.0 * 1800.0) ** 0.5
    assert conditions.goes_on(0.0, middle_s) == pytest.approx(0.07 + 0.17 + 0.06 + 0.05)
    assert conditions.goes_on(60.0, middle_s - 60.0) == pytest.approx(0.35 / 0.69)
    assert conditions.goes_on(14400.0, 28800.0) == 0.0
    assert conditions.goes_on(43200.0, 1.0) == 1.0, "longer than any that is known"


@pytest.mark.parametrize(("lasted_s", "at_most_s"), [(10.0, 60.0), (100.0, 900.0), (3600.0, 3600.0)])
def test_the_mean_is_the_area_under_the_odds(lasted_s: float, at_most_s: float) -> None:
    parts = 10_000
    part_s = at_most_s / parts
    area_s = part_s * sum(conditions.goes_on(lasted_s, (at + 0.5) * part_s) for at in range(parts))
    assert conditions.expected_s(lasted_s, at_most_s) == pytest.approx(area_s, rel=1e-3)
