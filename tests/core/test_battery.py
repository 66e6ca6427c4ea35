"""A battery's worth, learned from what it has given: low figures always, high ones as far as they were shown."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.energy import learning
from powerguard.core.energy.account import tau_s
from powerguard.core.energy.learning import YEAR_S
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.policy import BatteryModel, Discharge, Health, Policy, Recharge, TauPoint

POLICY = Policy(boot_id="b", ups="u")


def reading(at_s: float, charge_pct: float | None = 100.0, runtime_s: float | None = 600.0) -> Reading:
    return Reading(
        at_s=at_s,
        ups="u",
        source="snmp",
        output_source=OutputSource.UTILITY,
        charge_pct=charge_pct,
        runtime_s=runtime_s,
    )


def measured(share: float = 0.8, at_s: float = 0.0) -> BatteryModel:
    return BatteryModel(health=Health(share=share, error=0.05, depth=0.3, at_s=at_s, how="a discharge"))


def discharged(
    *steps: tuple[float, float | None, float],
    low_at: float | None = None,
    model: BatteryModel | None = None,
    runtime_s: float | None = None,
    gap_s: float = 1.0,
) -> BatteryModel:
    """Play a discharge: (at_s, charge in percent, our account) for each reading, and the end of it on utility."""
    model = BatteryModel() if model is None else model
    for at_s, charge_pct, used in steps:
        model = learning.learn_on_battery(
            POLICY,
            model,
            reading(at_s, charge_pct, runtime_s),
            used=used,
            gap_s=gap_s,
            steady=True,
            low=low_at is not None and at_s >= low_at,
        )
    at_s, charge_pct, used = steps[-1]
    return learning.learn_on_utility(
        POLICY, model, reading(at_s + 1.0, charge_pct, None), load=0.5, settled=True, used=used
    )


def share_of(model: BatteryModel) -> float | None:
    return None if model.health is None else model.health.share


# --- What counts ------------------------------------------------------------------------------------------------


def test_without_a_measurement_the_default_counts() -> None:
    """And the lower one, once the UPS asks for a new battery: replace it."""
    assert learning.health(POLICY, BatteryModel(), 0.0, replace_battery=False) == 0.75
    assert learning.health(POLICY, BatteryModel(), 0.0, replace_battery=True) == 0.6
    worse = replace(POLICY, health=0.5)
    assert learning.health(worse, BatteryModel(), 0.0, replace_battery=True) == 0.5


def test_a_measured_health_ages_and_expires() -> None:
    """Ten points a year; after twelve months it is no measurement any more."""
    assert learning.health(POLICY, measured(0.9), 0.0, replace_battery=False) == 0.9
    assert learning.health(POLICY, measured(0.9), YEAR_S / 2, replace_battery=False) == pytest.approx(0.85)
    assert learning.aged(measured(0.9), YEAR_S) == pytest.approx(0.8)
    assert learning.aged(measured(0.9), YEAR_S + 1.0) is None
    assert learning.health(POLICY, measured(0.9), YEAR_S + 1.0, replace_battery=False) == 0.75
    assert learning.aged(measured(0.9, at_s=100.0), 50.0) == 0.9, "a clock that ran back makes no battery younger"
    assert learning.aged(measured(0.05), 0.9 * YEAR_S) == 0.0
    assert learning.aged(BatteryModel(), 0.0) is None


def test_a_battery_that_asks_for_its_end_is_worth_the_lower_figure() -> None:
    """A measurement does not overrule the flag upward, the flag does not overrule it upward either."""
    assert learning.health(POLICY, measured(0.9), 0.0, replace_battery=True) == 0.6
    assert learning.health(POLICY, measured(0.4), 0.0, replace_battery=True) == 0.4


# --- Health from a discharge --------------------------------------------------------------------------------------


def test_a_charge_that_falls_faster_than_the_account_shows_a_worn_battery() -> None:
    """30 % of a new battery's energy cost 50 % of the charge: it holds 60 %."""
    found = discharged((10.0, 100.0, 0.0), (60.0, 75.0, 0.15), (110.0, 50.0, 0.30))
    assert found.health is not None
    assert found.health.share == pytest.approx(0.6)
    assert found.health.error == pytest.approx(0.02 + 0.015 / 0.5)
    assert found.health.depth == pytest.approx(0.3)
    assert found.health.at_s == 111.0
    assert found.health.how == "fall of the charge"
    assert found.discharge is None
    assert found.recharge == Recharge(since_s=111.0, charge=0.5)


def test_a_high_figure_counts_only_as_far_as_the_discharge_has_gone() -> None:
    """A gauge that counts against the nameplate always says 1; a discharge of 40 % has shown no more than 50 %."""
    nameplate = discharged((10.0, 100.0, 0.0), (110.0, 60.0, 0.40))
    assert share_of(nameplate) == pytest.approx(0.5)
    assert learning.health(POLICY, nameplate, 111.0, replace_battery=False) == POLICY.health
    deep = discharged((10.0, 100.0, 0.0), (110.0, 15.0, 0.80))
    assert share_of(deep) == pytest.approx(0.9), "80 % shown, and the floor of 10 % on top"
    half_full = discharged((10.0, 50.0, 0.4), (110.0, 10.0, 0.8))
    assert share_of(half_full) == pytest.approx(0.9), "0.4 out of half a charge shows 0.8"


def test_no_battery_is_better_than_new() -> None:
    """40 % of the energy for 30 % of the charge, confirmed by the flag: the table is too low."""
    found = discharged((10.0, 60.0, 0.0), (100.0, 30.0, 0.4), low_at=100.0, runtime_s=100.0)
    assert share_of(found) == 1.0


def test_a_charge_beyond_all_bounds_is_not_reported() -> None:
    """0 and 100 are charges, 100.5 and -1 are not."""
    assert share_of(discharged((10.0, 100.0, 0.0), (110.0, 0.0, 0.8))) == pytest.approx(0.8)
    assert share_of(discharged((10.0, 100.5, 0.0), (110.0, 50.0, 0.3))) is None
    assert discharged((10.0, 100.0, 0.0), (110.0, -1.0, 0.3)).recharge is None


def test_a_shallow_discharge_does_not_lower_what_a_deep_one_has_shown() -> None:
    """It could not have shown more; what it does show fits."""
    found = discharged((10.0, 100.0, 0.0), (110.0, 60.0, 0.40), model=measured(0.95))
    assert share_of(found) == pytest.approx(0.95, abs=1e-6)
    worse = discharged((10.0, 100.0, 0.0), (110.0, 50.0, 0.30), model=measured(0.95))
    assert share_of(worse) == pytest.approx(0.6)


def test_low_battery_where_the_gauge_said_so_confirms_the_gauge() -> None:
    """Then its charge was honest, and a high figure is believed."""
    found = discharged((10.0, 100.0, 0.0), (60.0, 75.0, 0.2), (100.0, 50.0, 0.45), low_at=100.0, runtime_s=100.0)
    assert share_of(found) == pytest.approx(0.9)
    assert found.health is not None
    assert found.health.how == "fall of the charge to low battery"


def test_low_battery_that_the_gauge_did_not_see_coming_is_the_end_of_the_battery() -> None:
    """Half the charge left, minutes promised, and the voltage breaks down: what it gave is what it holds."""
    steps = ((10.0, 100.0, 0.0), (60.0, 75.0, 0.3), (100.0, 55.0, 0.45), (110.0, 50.0, 0.50))
    found = discharged(*steps, low_at=100.0, runtime_s=300.0)
    assert found.health is not None
    assert found.health.share == pytest.approx(0.5)
    assert found.health.how == "discharge to low battery"
    assert found.health.error == 0.05
    half_full = ((10.0, 80.0, 0.2), (60.0, 60.0, 0.4), (100.0, 45.0, 0.50), (110.0, 40.0, 0.55))
    again = discharged(*half_full, low_at=100.0, runtime_s=300.0)
    assert share_of(again) == pytest.approx(0.35 / 0.8), "counted from where it began"
    shallow = ((10.0, 80.0, 0.2), (60.0, 75.0, 0.25), (70.0, 70.0, 0.3), (110.0, 40.0, 0.55))
    early = discharged(*shallow, low_at=60.0, runtime_s=300.0)
    assert share_of(early) == pytest.approx(0.35 / 0.4), "a flag before a quarter was out is a threshold"
    just_enough = discharged((10.0, 100.0, 0.0), (100.0, 60.0, 0.25), low_at=100.0, runtime_s=300.0)
    assert share_of(just_enough) == 0.25, "a quarter is deep enough"
    at_the_limit = discharged(*steps, low_at=100.0, runtime_s=240.0)
    assert share_of(at_the_limit) == pytest.approx(1.0), "twice low_battery_s is not more than it"


def test_a_flag_that_is_set_early_by_configuration_is_no_end() -> None:
    """Low battery at once, with all of the charge left: that is a threshold, not a battery."""
    found = discharged((10.0, 100.0, 0.0), (11.0, 100.0, 0.01), (110.0, 50.0, 0.30), low_at=11.0, runtime_s=300.0)
    assert share_of(found) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "steps",
    [
        ((10.0, 100.0, 0.0), (110.0, 60.0, 0.24)),
        ((10.0, 100.0, 0.0), (110.0, 81.0, 0.30)),
        ((10.0, None, 0.0), (110.0, 60.0, 0.30)),
        ((10.0, 0.0, 0.0), (110.0, 60.0, 0.30)),
        ((10.0, 100.0, 0.5), (60.0, 70.0, 0.7), (110.0, 50.0, 1.0)),
    ],
    ids=["not deep enough", "charge hardly fell", "charge not reported", "empty at first", "more than a battery holds"],
)
def test_a_discharge_that_says_too_little_changes_nothing(steps: tuple[tuple[float, float | None, float], ...]) -> None:
    """What was known stays; nothing is made of noise."""
    assert discharged(*steps).health is None
    known = measured(0.8)
    assert discharged(*steps, model=known).health == known.health


def test_a_discharge_that_went_unwatched_says_nothing() -> None:
    """Half a minute without a reading: the account of it is a guess."""
    steps = ((10.0, 100.0, 0.0), (110.0, 50.0, 0.30))
    assert discharged(*steps, gap_s=30.1).health is None
    assert discharged(*steps, gap_s=30.0).health is not None


def test_the_bounds_of_depth_and_fall() -> None:
    """A quarter of the energy and a fifth of the charge are just enough."""
    assert share_of(discharged((10.0, 100.0, 0.0), (110.0, 50.0, 0.25))) == pytest.approx(0.5)
    exact = discharged((10.0, 66.0, 0.0), (110.0, 46.0, 0.30))
    assert exact.health is not None
    assert exact.health.how == "fall of the charge"
    known = discharged((10.0, 60.0, 0.0), (110.0, 39.0, 0.26))
    assert known.health is not None
    assert known.health.how == "fall of the charge"
    assert known.health.error < 0.1


@given(
    st.lists(st.tuples(st.floats(0.0, 100.0) | st.none(), st.floats(0.0, 0.2), st.booleans()), min_size=1, max_size=30)
)
def test_nothing_makes_a_battery_better_than_new_or_worse_than_none(
    steps: list[tuple[float | None, float, bool]],
) -> None:
    """Whatever charge and account do, a health is a share."""
    model, used = BatteryModel(), 0.0
    for at, (charge_pct, more, low) in enumerate(steps):
        used = min(1.0, used + more)
        model = learning.learn_on_battery(
            POLICY, model, reading(float(at), charge_pct, 100.0), used=used, gap_s=1.0, steady=True, low=low
        )
    model = learning.learn_on_utility(POLICY, model, reading(99.0, 50.0), load=0.5, settled=True, used=used)
    assert model.health is None or 0.0 <= model.health.share <= 1.0
    assert model.discharge is None


def test_what_says_the_same_as_before_is_not_written_again() -> None:
    """The state is journalled: a reading each second that brings nothing new leaves the very same model."""
    values = {"used": 0.1, "gap_s": 1.0, "steady": True, "low": False}
    first = learning.learn_on_battery(POLICY, BatteryModel(), reading(0.0, 90.0), **values)  # type: ignore[arg-type]
    assert learning.learn_on_battery(POLICY, first, reading(1.0, 90.0), **values) is first  # type: ignore[arg-type]
    assert learning.learn_on_battery(POLICY, first, reading(1.0, 89.0), **values) is not first  # type: ignore[arg-type]


# --- Slope ------------------------------------------------------------------------------------------------------


def slope_after(*samples: tuple[float, float | None, bool]) -> float | None:
    model = BatteryModel()
    for at_s, runtime_s, steady in samples:
        model = learning.learn_on_battery(
            POLICY, model, reading(at_s, 90.0, runtime_s), used=0.0, gap_s=1.0, steady=steady, low=False
        )
    assert model.discharge is not None
    return model.discharge.slope


def test_the_slope_of_whole_minutes_is_taken_over_two_of_them() -> None:
    """A step of the load or a silent gauge begins the two minutes anew."""
    assert slope_after((0.0, 600.0, True), (60.0, 480.0, True), (119.0, 420.0, True)) is None
    assert slope_after((0.0, 600.0, True), (60.0, 480.0, True), (120.0, 420.0, True)) == pytest.approx(1.5)
    assert slope_after((0.0, 600.0, True), (60.0, 480.0, False), (120.0, 420.0, True)) is None
    assert slope_after((0.0, 600.0, True), (60.0, None, True), (120.0, 420.0, True), (200.0, 420.0, True)) is None
    assert slope_after((0.0, 600.0, True), (60.0, 480.0, False), (180.0, 420.0, True)) == pytest.approx(0.5)


def test_the_slope_of_a_finer_gauge_is_taken_over_half_a_minute() -> None:
    """A battery of six minutes would be half empty before two of them are over."""
    assert slope_after((0.0, 601.0, True), (29.9, 541.0, True)) is None
    assert slope_after((0.0, 601.0, True), (30.0, 541.0, True)) == pytest.approx(2.0)
    assert slope_after((0.0, 600.0, True), (30.0, 541.0, True)) == pytest.approx(59.0 / 30.0), (
        "one of them is no minute"
    )


# --- Runtime by load ----------------------------------------------------------------------------------------------


def on_utility(
    model: BatteryModel, at_s: float, load: float | None, runtime_s: float | None, **changes: object
) -> BatteryModel:
    given_now = {"charge_pct": 100.0, "settled": True} | changes
    charge_pct, settled = given_now["charge_pct"], given_now["settled"]
    assert charge_pct is None or isinstance(charge_pct, float)
    return learning.learn_on_utility(
        POLICY, model, reading(at_s, charge_pct, runtime_s), load=load, settled=bool(settled), used=0.0
    )


def test_one_point_for_each_five_percent_of_load_while_full_and_settled() -> None:
    """What the UPS says a full battery would last; never from a charging one, a moving load or a silent gauge."""
    found = on_utility(BatteryModel(), 0.0, 0.75, 360.0)
    found = on_utility(found, 10.0, 0.5, 513.0, charge_pct=95.0)
    assert [(point.load, round(point.tau_s)) for point in found.points] == [(0.5, 540), (0.75, 360)]
    for changes in ({"charge_pct": 89.9}, {"charge_pct": None}, {"settled": False}):
        assert on_utility(found, 20.0, 0.3, 900.0, **changes) == found
    assert on_utility(found, 20.0, None, 900.0) == found
    assert on_utility(found, 20.0, 0.3, None) == found
    assert on_utility(found, 20.0, 0.3, 0.0) == found
    nearly = on_utility(BatteryModel(), 0.0, 0.75, 324.0, charge_pct=90.0)
    assert [point.tau_s for point in nearly.points] == [360.0], "nine tenths are full enough to tell a full battery"


def test_a_point_is_renewed_when_it_changes_or_is_a_day_old() -> None:
    """The state is journalled: what says the same as before is not written again each second."""
    found = on_utility(BatteryModel(), 0.0, 0.75, 360.0)
    assert on_utility(found, 100.0, 0.76, 366.0) is found
    assert on_utility(found, 100.0, 0.76, 368.0).points == (TauPoint(load=0.76, tau_s=368.0, at_s=100.0),)
    round_one = on_utility(BatteryModel(), 0.0, 0.75, 400.0)
    assert on_utility(round_one, 100.0, 0.75, 408.0) is round_one, "two percent are still the same"
    assert on_utility(found, 86399.0, 0.75, 361.0) is found
    assert on_utility(found, 86400.0, 0.75, 361.0).points == (TauPoint(load=0.75, tau_s=361.0, at_s=86400.0),)
    third = on_utility(on_utility(BatteryModel(), 50000.0, 0.75, 360.0), 100000.0, 0.75, 361.0)
    assert third.points[0].at_s == 50000.0
    kept = on_utility(on_utility(BatteryModel(), YEAR_S, 0.75, 360.0), 1.5 * YEAR_S, 0.5, 540.0)
    assert [point.load for point in kept.points] == [0.5, 0.75]
    late = on_utility(found, YEAR_S, 0.5, 540.0)
    assert [point.load for point in late.points] == [0.5], "a year old is too old"


def test_two_loads_close_together_make_no_slope() -> None:
    """A load of 27 to 28 % and runtimes in whole minutes: no more load may look as if the battery were empty."""
    model = BatteryModel()
    for at_s, load, runtime_s in ((0.0, 0.274, 1200.0), (10.0, 0.276, 1140.0)):
        model = on_utility(model, at_s, load, runtime_s)
    table = learning.table(POLICY, model, (0.12, 3100.0))
    assert tau_s(table, 0.35) > 600.0, "the UPS itself reports 14 minutes there"
    worn = on_utility(BatteryModel(), 0.0, 0.2749, 1200.0)
    worn = on_utility(worn, YEAR_S / 2, 0.2751, 600.0)
    assert tau_s(learning.table(POLICY, worn, (0.12, 1560.0)), 0.6) > 100.0
    assert on_utility(model, 20.0, 0.274, 1150.0) is model, "and what says the same is not written again"


def test_the_settings_table_comes_first_then_what_was_learned() -> None:
    """The one point of now replaces its neighbours; more load never lasts longer, whatever the UPS has said."""
    points = (TauPoint(load=0.3, tau_s=900.0, at_s=0.0), TauPoint(load=0.5, tau_s=540.0, at_s=0.0))
    model = BatteryModel(points=points)
    by_hand = replace(POLICY, runtime_table=((0.5, 1.0),))
    assert learning.table(by_hand, model, (0.5, 2.0)) == ((0.5, 1.0),)
    assert learning.table(POLICY, model, None) == ((0.3, 900.0), (0.5, 540.0))
    assert learning.table(POLICY, model, (0.52, 500.0)) == ((0.3, 900.0), (0.52, 500.0))
    assert learning.table(POLICY, model, (0.75, 600.0)) == ((0.3, 900.0), (0.5, 540.0), (0.75, 540.0))
    idle = BatteryModel(points=(TauPoint(load=0.05, tau_s=5000.0, at_s=0.0),))
    assert learning.table(POLICY, idle, (0.1, 3000.0)) == ((0.05, 5000.0), (0.1, 3000.0)), "five percent off is another"
    assert learning.table(POLICY, BatteryModel(), (0.75, 360.0)) == ((0.75, 360.0),)
    assert learning.table(POLICY, BatteryModel(), None) == ()


# --- Recharge -----------------------------------------------------------------------------------------------------


def test_how_long_a_recharge_takes_is_learned() -> None:
    """From 50 to 90 % in two hours makes five from empty to full; the settings hold until then."""
    model = discharged((10.0, 100.0, 0.0), (110.0, 50.0, 0.30))
    assert learning.recharge_s(POLICY, model) == POLICY.recharge_s
    later = on_utility(model, 111.0 + 3600.0, None, None, charge_pct=75.0)
    assert later.recharge == model.recharge
    full = on_utility(later, 111.0 + 7200.0, None, None, charge_pct=90.0)
    assert full.recharge is None
    assert learning.recharge_s(POLICY, full) == pytest.approx(5 * 3600.0)


@pytest.mark.parametrize(
    ("since_s", "charge", "wanted_s"),
    [(0.0, 0.5, 3600.0), (-72 * 3600.0, 0.5, 72 * 3600.0), (0.0, 0.75, None), (-3600.0, 0.7, 3600.0 * 5 + 500.0)],
)
def test_a_recharge_that_is_too_short_or_absurd_is_bounded(
    since_s: float, charge: float, wanted_s: float | None
) -> None:
    """Between an hour and three days; less than a fifth of the charge says nothing."""
    model = BatteryModel(recharge=Recharge(since_s=since_s, charge=charge))
    full = on_utility(model, 100.0, None, None, charge_pct=90.0)
    assert full.recharge is None
    assert full.recharge_s == (None if wanted_s is None else pytest.approx(wanted_s))


def test_a_new_discharge_ends_a_recharge_unmeasured() -> None:
    """What was put back by then is not known any more."""
    model = BatteryModel(recharge=Recharge(since_s=0.0, charge=0.5))
    model = learning.learn_on_battery(
        POLICY, model, reading(50.0, 60.0, 300.0), used=0.2, gap_s=1.0, steady=True, low=False
    )
    assert model.recharge is None
    assert model.discharge == Discharge(
        since_s=50.0, used=0.2, charge=0.6, charge_now=0.6, mark_at_s=50.0, mark_runtime_s=300.0
    )


def test_a_discharge_ends_without_a_charge() -> None:
    """Nothing to recharge from is known then."""
    model = discharged((10.0, 100.0, 0.0), (110.0, None, 0.30))
    assert model.recharge is None
    assert model.discharge is None


def test_times_move_into_the_clock_of_the_next_boot() -> None:
    """Ages stay; a discharge that nobody saw the end of is forgotten."""
    model = BatteryModel(
        health=measured(0.8, at_s=100.0).health,
        points=(TauPoint(load=0.5, tau_s=540.0, at_s=20.0),),
        recharge_s=5.0,
        discharge=Discharge(since_s=1.0, used=0.1, charge=1.0),
        recharge=Recharge(since_s=30.0, charge=0.5),
        replaced_at_s=40.0,
    )
    moved = learning.shifted(model, -1000.0)
    assert moved.health is not None
    assert moved.health.at_s == -900.0
    assert moved.points == (TauPoint(load=0.5, tau_s=540.0, at_s=-980.0),)
    assert moved.recharge_s == 5.0
    assert moved.discharge is None
    assert moved.recharge == Recharge(since_s=-970.0, charge=0.5)
    assert moved.replaced_at_s == -960.0
    assert learning.shifted(BatteryModel(), 5.0) == BatteryModel()


# --- Lower bounds, and discharges that end in a power-off -------------------------------------------------------------


def test_what_a_discharge_does_not_reach_is_a_lower_bound() -> None:
    """The charge says 90 %, and 30 % were discharged: the battery holds 40 % at least, and 75 % is still presumed."""
    shallow = discharged((0.0, 100.0, 0.0), (60.0, 67.0, 0.30)).health
    assert shallow is not None
    assert (shallow.share, shallow.least) == (pytest.approx(0.4), True)
    worn = discharged((0.0, 100.0, 0.0), (60.0, 50.0, 0.30)).health
    assert worn is not None
    assert (worn.share, worn.least) == (pytest.approx(0.6), False)


def test_a_bound_below_what_counts_changes_nothing_that_counts() -> None:
    """Neither the default, nor a lower default of a worn battery, nor an older measurement that it does not reach."""
    bound = discharged((0.0, 100.0, 0.0), (60.0, 67.0, 0.30))
    for presumed in (0.5, 0.6, 0.75):
        policy = replace(POLICY, health=presumed)
        assert learning.health(policy, bound, 61.0, replace_battery=False) == presumed
    assert learning.health(replace(POLICY, health=0.3), bound, 61.0, replace_battery=False) == pytest.approx(0.4)
    known = measured(0.8)
    assert discharged((0.0, 100.0, 0.0), (60.0, 67.0, 0.30), model=known).health == known.health


def test_a_bound_does_not_bring_the_default_back_over_a_lower_measurement() -> None:
    """Measured at 50 %, then 45 % are discharged while the gauge promises more: 75 % were never shown."""
    worn = discharged((0.0, 100.0, 0.0), (60.0, 55.0, 0.45), model=measured(0.5))
    assert learning.health(POLICY, worn, 61.0, replace_battery=False) == pytest.approx(0.5, abs=0.01)
    deep = discharged((0.0, 100.0, 0.0), (60.0, 15.0, 0.70), model=measured(0.5))
    assert learning.health(POLICY, deep, 61.0, replace_battery=False) == pytest.approx(0.8)


def test_a_battery_without_a_gauge_holds_what_it_has_given() -> None:
    """81 % of a new battery were used: it holds at least that, whatever was presumed."""
    deep = discharged((0.0, 100.0, 0.0), (300.0, 95.0, 0.81)).health
    assert deep is not None
    assert (deep.share, deep.least) == (pytest.approx(0.81), True)
    assert discharged((0.0, 100.0, 0.0), (300.0, 95.0, 0.40)).health is None, "less than was presumed: it says nothing"


def test_the_discharge_of_a_power_off_teaches_at_the_next_boot() -> None:
    """The deepest discharges end in a power-off, and no reading on utility ends them under the same daemon."""
    going = BatteryModel(discharge=Discharge(since_s=0.0, used=0.0, charge=1.0, charge_now=0.1))
    judged = learning.ended_by_power_off(POLICY, going, 0.81, 500.0, 495.0)
    assert judged.discharge is None
    assert judged.health is not None
    assert (judged.health.share, judged.health.depth, judged.health.at_s) == (pytest.approx(0.9), 0.81, 500.0)
    unseen = BatteryModel(discharge=replace(going.discharge, whole=False) if going.discharge else None)
    assert learning.ended_by_power_off(POLICY, unseen, 0.81, 500.0, 495.0).health is None
    for seen_at_s in (None, 469.9):
        guessed = learning.ended_by_power_off(POLICY, going, 0.81, 500.0, seen_at_s)
        assert (guessed.health, guessed.discharge) == (None, None), "the source was lost: the depth is a guess"
    assert learning.ended_by_power_off(POLICY, going, 0.81, 500.0, 470.0).health is not None
