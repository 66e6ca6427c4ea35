"""The runtime table of a battery of which only the nameplate is known, held against makers' figures."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.energy import account
from powerguard.core.energy.nameplate import nameplate_table

MAKERS = (
    # Wh of the nameplate, W of the rating, and (VA, minutes): APC Smart-UPS 420, 650, 1000 and 1400, user's manual,
    # section 13 "How to determine on-battery run time", which counts 1.4 VA for a watt.
    (84.0, 260.0, ((100, 21.0), (200, 10.0), (300, 6.2), (400, 4.3))),
    (144.0, 410.0, ((200, 22.0), (400, 9.3), (600, 5.8))),
    (288.0, 670.0, ((200, 47.0), (500, 14.0), (1000, 5.8))),
    (408.0, 950.0, ((200, 99.0), (500, 29.0), (1000, 11.0))),
)


@pytest.mark.parametrize(("battery_wh", "rating_w", "points"), MAKERS)
def test_a_nameplate_never_promises_more_than_the_maker(
    battery_wh: float, rating_w: float, points: tuple[tuple[int, float], ...]
) -> None:
    """Cautious at every load in the maker's table, and within 55 % of it."""
    table = nameplate_table(battery_wh, rating_w)
    for load_va, minutes in points:
        lasts_s = account.tau_s(table, load_va / 1.4 / rating_w)
        print(f"{rating_w:g} W, {load_va} VA: {lasts_s / 60:.1f} of {minutes:g} min")
        assert 0.45 * 60.0 * minutes <= lasts_s <= 60.0 * minutes


def test_at_the_rate_of_its_nameplate_a_battery_lasts_twenty_hours() -> None:
    """1000 Wh at 45 W behind an inverter of 90 %, with its own 4 % in the load: by definition of the capacity."""
    assert dict(nameplate_table(1000.0, 45.0 / 1.04))[1.0] == pytest.approx(72000.0, rel=1e-9)


def test_the_shape_of_the_nameplate_is_that_of_a_known_table() -> None:
    """With the energy that meets 240 s at full load, an SRT 6000VA's other two points are met within 8 %."""
    table = dict(nameplate_table(2027.0, 6000.0))
    assert table[1.0] == pytest.approx(240.0, rel=0.01)
    assert table[0.75] == pytest.approx(360.0, rel=0.08)
    assert table[0.5] == pytest.approx(540.0, rel=0.08)


@given(st.floats(10.0, 2e7), st.floats(100.0, 2e6))
def test_any_nameplate_gives_a_table_that_the_sums_can_use(battery_wh: float, rating_w: float) -> None:
    """Ascending loads, no more seconds at more load, none negative, none beyond two days."""
    table = nameplate_table(battery_wh, rating_w)
    assert [load for load, _ in table] == sorted({load for load, _ in table})
    for (_, longer_s), (_, shorter_s) in itertools.pairwise(table):
        assert 0.0 < shorter_s <= longer_s <= 172800.0
    assert math.isfinite(account.tau_s(table, 0.05))
