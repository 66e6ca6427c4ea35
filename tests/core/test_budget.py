"""The sums, against numbers worked out by hand: interpolation, margins, stop terms, needs."""

from dataclasses import replace
from typing import Any

import pytest

from powerguard.core.energy import budget, needs
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.policy import BatteryModel, Discharge, Drop, Learned, Policy
from powerguard.core.model.state import (
    Activity,
    Battery,
    CheckpointInFlight,
    Durable,
    Feed,
    GivenUp,
    Supply,
    Trainer,
)
from tests.core.play import make_policy

POLICY = make_policy(["table=50:540,75:360,100:240"])


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


# --- margin -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "dared"),
    # Above one half 20 % is the larger margin, below it 10 points are; the two meet at 0.5.
    [(1.0, 0.8), (0.75, 0.6), (0.5, 0.4), (0.4, 0.3), (0.1, 0.0), (0.05, 0.0), (0.0, 0.0)],
)
def test_usable(left: float, dared: float) -> None:
    assert budget.usable(POLICY, left) == pytest.approx(dared, abs=1e-12)


@pytest.mark.parametrize("needed", [0.001, 0.1, 0.3, 0.4, 0.5, 0.8])
def test_energy_for_is_the_inverse_of_usable(needed: float) -> None:
    assert budget.usable(POLICY, budget.energy_for(POLICY, needed)) == near(needed)
    assert budget.energy_for(POLICY, 0.4) == near(0.5)
    assert budget.energy_for(POLICY, 0.1) == near(0.2)
    assert budget.energy_for(POLICY, 0.8) == near(1.0)


# --- against a source that can be forged ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("battery", "denial", "on_battery_s", "lasts_s"),
    [
        # 80 % less 5 % by our account: 0.8 of that is dared, for 540 s at half load.
        ({"used": 0.05}, {"charge_pct": 80.0, "load_pct": 50.0}, 60.0, 0.6 * 540.0),
        # 3 % of it were used before this time on battery.
        ({"used": 0.05, "began": 0.03}, {"charge_pct": 80.0, "load_pct": 50.0}, 60.0, 0.624 * 540.0),
        ({"used": 0.05, "began": 0.2}, {"charge_pct": 80.0, "load_pct": 50.0}, 60.0, 0.64 * 540.0),
        ({"used": None}, {"charge_pct": 80.0, "load_pct": 50.0}, 60.0, 0.64 * 540.0),
        # Our account may be driven by forged readings: a tenth of the time at full load took no more than a tenth.
        ({"used": 0.5}, {"charge_pct": 80.0, "load_pct": 50.0}, 24.0, 0.56 * 540.0),
        # No charge is reported: our own account.
        ({"used": 0.05}, {"load_pct": 50.0}, 60.0, 0.76 * 540.0),
        ({"used": 0.25, "began": 0.2}, {"load_pct": 50.0}, 60.0, 0.6 * 540.0),
        # No load is reported: the last one that was, and never more than full load.
        ({"used": 0.05, "load": 0.75}, {"charge_pct": 80.0}, 60.0, 0.6 * 360.0),
        ({"used": 0.05, "load": None}, {"charge_pct": 80.0}, 60.0, 0.6 * 240.0),
        ({"used": 0.05, "load": 0.5}, {"charge_pct": 80.0, "load_pct": 150.0}, 60.0, 0.6 * 240.0),
        ({"used": 0.05, "health": 0.5}, {"charge_pct": 80.0, "load_pct": 50.0}, 60.0, 0.25 * 540.0),
    ],
)
def test_how_long_the_battery_lasts_by_what_cannot_be_forged(
    battery: dict[str, Any], denial: dict[str, float], on_battery_s: float, lasts_s: float
) -> None:
    began = battery.pop("began", None)
    if began is not None:
        battery["model"] = BatteryModel(discharge=Discharge(since_s=0.0, used=began, charge=1.0))
    mine = Battery(at_s=100.0, **{"health": 1.0, **battery})
    reading = Reading(at_s=100.0, ups="ups", source="nut", output_source=OutputSource.UTILITY, **denial)
    assert budget.outlasts(POLICY, mine, reading, on_battery_s, lasts_s - 1e-6)
    assert not budget.outlasts(POLICY, mine, reading, on_battery_s, lasts_s + 1e-6)


def test_without_a_table_nothing_says_that_the_battery_lasts() -> None:
    reading = Reading(at_s=100.0, ups="ups", source="nut", output_source=OutputSource.UTILITY, charge_pct=100.0)
    assert not budget.outlasts(make_policy([]), Battery(at_s=100.0), reading, 1.0, 1.0)


# --- needs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "full", "short", "bare"),
    [
        ({}, 170.0, 65.0, 10.0),  # 110 + 60; 45 + 20; 10
        ({"ups_off_s": 30.0}, 200.0, 95.0, 10.0),
        ({"stop_q95_s": 200.0}, 170.0, 65.0, 10.0),  # never more than force_after_s
        ({"stop_q95_s": 80.0}, 140.0, 65.0, 10.0),
        ({"force_after_s": 30.0}, 90.0, 50.0, 10.0),
        ({"reserve_s": 5.0}, 115.0, 50.0, 10.0),
        ({"stop_q95_s": 1.0, "stop_median_s": 45.0}, 61.0, 61.0, 10.0),  # short is never longer than full
        ({"bare_stop_s": 500.0}, 170.0, 65.0, 65.0),
        ({"bare_stop_s": 500.0, "stop_q95_s": 1.0}, 61.0, 61.0, 61.0),  # nor is bare
    ],
)
def test_stop_s(changes: dict[str, float], full: float, short: float, bare: float) -> None:
    policy = replace(POLICY, **changes)
    assert [budget.stop_s(policy, grade) for grade in Grade] == [full, short, bare]


def test_stop_s_with_less_reserve() -> None:
    """A reserve that is asked for is never more than the settings', and short never takes more than its 20 s."""
    assert budget.stop_s(POLICY, Grade.FULL, reserve_s=20.0) == 130.0
    assert budget.stop_s(POLICY, Grade.FULL, reserve_s=0.0) == 110.0
    assert budget.stop_s(POLICY, Grade.FULL, reserve_s=500.0) == 170.0
    assert budget.stop_s(POLICY, Grade.SHORT, reserve_s=20.0) == 65.0
    assert budget.stop_s(POLICY, Grade.SHORT, reserve_s=5.0) == 50.0
    assert budget.stop_s(POLICY, Grade.BARE, reserve_s=0.0) == 10.0


@pytest.mark.parametrize(
    ("changes", "full", "short", "bare"),
    [
        ({}, 110.0, 45.0, 3.0),
        ({"stop_q95_s": 80.0}, 80.0, 45.0, 3.0),
        ({"force_after_s": 40.0}, 40.0, 40.0, 3.0),
        ({"force_after_s": 2.0}, 2.0, 2.0, 2.0),
    ],
)
def test_force_after_s_is_the_stop_term(changes: dict[str, float], full: float, short: float, bare: float) -> None:
    policy = replace(POLICY, **changes)
    assert [budget.force_after_s(policy, grade) for grade in Grade] == [full, short, bare]


def _trainer(name: str, need_s: float, disk: str, **changes: object) -> Trainer:
    return replace(Trainer(name=name, conduct=Conduct.PAUSE, checkpoint_s=need_s, disk=disk), **changes)  # type: ignore[arg-type]


def test_checkpoints_add_up_on_a_disk_and_run_side_by_side_on_several() -> None:
    a, b, c = _trainer("a", 20.0, "x"), _trainer("b", 30.0, "x"), _trainer("c", 45.0, "y")
    assert budget.checkpoint_s((), 0.0) == 0.0
    assert budget.checkpoint_s((a, b), 0.0) == 50.0
    assert budget.checkpoint_s((a, b, c), 0.0) == 50.0
    assert budget.checkpoint_s((a, c), 0.0) == 45.0
    for done in (
        {"activity": Activity.GONE},
        {"checkpoint": Durable()},
        {"checkpoint": GivenUp(because="disk full", tries=1)},
    ):
        assert budget.checkpoint_s((a, replace(b, **done), c), 0.0) == 45.0  # type: ignore[arg-type]


def flight(eta_at_s: float | None = None, *, copied: bool = False) -> CheckpointInFlight:
    return CheckpointInFlight(order="o-1", eta_at_s=eta_at_s, copied=copied)


@pytest.mark.parametrize(
    ("changes", "rest"),
    [
        ({"in_flight": flight(107.0)}, 7.0),
        ({"in_flight": flight(90.0)}, 0.0),
        ({}, 16.0),  # 20 s estimated, 4 s ago
        ({"ordered_at_s": 50.0}, 2.0),  # overdue: a tenth stays
        ({"pause_ordered": False}, 20.0),  # beside training: the one at the paused step is still to come
        ({"pause_ordered": False, "in_flight": flight(101.0)}, 20.0),
        ({"pause_ordered": False, "conduct": Conduct.CONTINUE, "in_flight": flight(107.0)}, 7.0),
    ],
)
def test_of_a_checkpoint_in_flight_only_the_rest_counts(changes: dict[str, object], rest: float) -> None:
    flying = _trainer("a", 20.0, "x", in_flight=flight(), ordered_at_s=96.0, pause_ordered=True)
    assert budget.checkpoint_s((replace(flying, **changes),), 100.0) == rest  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "load"),
    [
        ({}, 0.45),
        ({"conduct": Conduct.EXIT}, 0.45),
        ({"conduct": Conduct.CONTINUE}, 0.75),
        ({"activity": Activity.GONE}, 0.75),
        ({"activity": Activity.PAUSED}, 0.75),
        ({"pause_ordered": True}, 0.75),
    ],
)
def test_paused_load(changes: dict[str, object], load: float) -> None:
    """60 % of now where somebody alive still has to pause or exit; now itself where nobody does."""
    trainer = _trainer("a", 20.0, "", **changes)
    assert budget.paused_load(POLICY, (trainer,), 0.75) == near(load)
    assert budget.paused_load(POLICY, (), 0.75) == 0.75
    assert budget.paused_load(POLICY, (_trainer("b", 1.0, "", conduct=Conduct.CONTINUE), trainer), 0.75) == near(load)


@pytest.mark.parametrize(
    ("drops", "load"),
    [
        ([(0.50, 0.30)], 0.55),  # by what it drew less: 0.2; in proportion it would be 0.45
        ([(0.90, 0.54)], 0.45),  # in proportion: 60 %; by what it drew less it would be 0.39
        ([(0.50, 0.40), (1.00, 0.90)], 0.55),  # both together: 0.2 less, or 30 %
        ([(0.50, 0.60)], 0.75),  # never more than now
        ([(0.80, 0.00)], 0.05),  # never less than what is measured
        ([(0.50, 0.30), None], 0.45),  # one was never seen to pause: the settings' 60 % for all
        ([(0.00, 0.00)], 0.45),
    ],
)
def test_paused_load_by_what_pauses_have_shown(drops: list[tuple[float, float] | None], load: float) -> None:
    """Whichever promises less, in watts or in proportion."""
    learned, trainers = Learned(), []
    for place, drop in enumerate(drops):
        trainers.append(_trainer(f"t{place}", 20.0, ""))
        if drop is not None:
            learned = needs.with_drop(learned, f"t{place}", Drop(before=drop[0], after=drop[1], at_s=0.0))
    assert budget.paused_load(POLICY, tuple(trainers), 0.75, learned) == near(load)


# --- grades -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "grade"),
    # usable(0.75) = 0.6; 0.6 * 500 s = 300 s; three quarters of that are 225 s.
    [(55.0, Grade.FULL), (55.001, Grade.SHORT), (160.0, Grade.SHORT), (160.001, Grade.BARE), (5000.0, Grade.BARE)],
)
def test_choose_grade_at_its_edges(checkpoint: float, grade: Grade) -> None:
    chosen = budget.choose_grade(POLICY, left=0.75, tau_paused_s=500.0, checkpoint=checkpoint)
    assert chosen is grade
    fit = budget.fits(POLICY, left=0.75, tau_paused_s=500.0, checkpoint=checkpoint, grade=chosen)
    assert fit is (checkpoint < 5000.0)


def test_what_needs_exactly_three_quarters_fits() -> None:
    """Without a margin the sums are exact: 10 s and 170 s are three quarters of half of 480 s."""
    bold = replace(POLICY, margin=0.0, floor=0.0)
    for left, fit in ((0.5, True), (0.4999, False)):
        assert budget.fits(bold, left=left, tau_paused_s=480.0, checkpoint=10.0, grade=Grade.FULL) is fit
    bold = replace(bold, runtime_table=((0.5, 960.0), (1.0, 480.0)))
    goes_on = (_trainer("t", 10.0, "", conduct=Conduct.CONTINUE),)
    for left, fit in ((0.5, True), (0.4999, False)):
        battery = Battery(at_s=100.0, used=0.0, left=left, load=1.0)
        assert budget.compute(bold, battery, ON, goes_on, 100.0, grade=Grade.FULL).fits is fit


def test_a_grade_is_never_better_than_allowed() -> None:
    for at_most, chosen in ((Grade.FULL, Grade.FULL), (Grade.SHORT, Grade.SHORT), (Grade.BARE, Grade.BARE)):
        assert budget.choose_grade(POLICY, left=1.0, tau_paused_s=9000.0, checkpoint=0.0, at_most=at_most) is chosen
        assert budget.grade_within(POLICY, 9000.0, at_most=at_most) is chosen
        assert budget.grade_within(POLICY, None, at_most=at_most) is at_most


@pytest.mark.parametrize(
    ("reff_s", "grade"),
    [(110.0, Grade.FULL), (109.9, Grade.SHORT), (45.0, Grade.SHORT), (44.9, Grade.BARE), (0.0, Grade.BARE)],
)
def test_grade_within(reff_s: float, grade: Grade) -> None:
    """At the latch no reserve is asked for any more: the stop itself must end in time."""
    assert budget.grade_within(POLICY, reff_s, at_most=Grade.FULL) is grade


# --- the whole ----------------------------------------------------------------------------------------------------

FULL = Battery(at_s=100.0, used=0.0, left=0.75, load=0.75)
ON = Feed(supply=Supply.BATTERY, since_s=90.0)
LLM = (_trainer("llm", 20.0, ""),)


def test_budget_by_hand() -> None:
    """0.75 left, 0.6 dared; 360 s at 75 %, 270/0.45 = 540*0.54/0.49 s at the paused 45 %."""
    now = budget.compute(POLICY, FULL, ON, LLM, 100.0)
    tau_paused_s = 540.0 * 0.54 / 0.49
    assert (now.now_s, now.load, now.load_now, now.load_paused) == (100.0, 0.75, 0.75, near(0.45))
    assert (now.tau_now_s, now.tau_paused_s) == (360.0, near(tau_paused_s))
    assert (now.health, now.used, now.left, now.usable) == (0.75, 0.0, 0.75, near(0.6))
    assert (now.reff_now_s, now.reff_s, now.reff_paused_s) == (near(216.0), near(216.0), near(0.6 * tau_paused_s))
    assert (now.checkpoint_s, now.stop_s, now.need_s, now.grade) == (20.0, 170.0, 190.0, Grade.FULL)
    assert now.slack_s == near(0.6 * tau_paused_s - 190.0)
    assert now.cut_in_s is None
    assert now.fits


def test_budget_is_dead_reckoned_on_battery_only() -> None:
    """36 s at 75 % are a tenth of the battery; on utility, and for an older moment, nothing goes."""
    assert budget.compute(POLICY, FULL, ON, LLM, 136.0).left == near(0.65)
    assert budget.compute(POLICY, FULL, ON, LLM, 136.0).used == near(0.1)
    assert budget.compute(POLICY, FULL, replace(ON, supply=Supply.UTILITY), LLM, 136.0).left == 0.75
    assert budget.compute(POLICY, FULL, ON, LLM, 50.0).left == 0.75


def test_budget_while_the_load_settles() -> None:
    """In the commit test the predicted load counts; the load of now is told beside it."""
    now = budget.compute(POLICY, FULL, ON, LLM, 100.0, settled_load=0.5)
    assert (now.load, now.load_now, now.load_paused) == (0.5, 0.75, 0.5)
    assert (now.reff_s, now.reff_now_s, now.reff_paused_s) == (near(324.0), near(216.0), near(324.0))


def test_budget_before_a_cut() -> None:
    """A cut in 100 s leaves 70 s to everything but a bare stop, which needs no guard."""
    feed = replace(ON, countdown_at_s=200.0, fsd_at_s=230.0)
    assert budget.power_off_at_s(feed) == 200.0
    assert budget.power_off_at_s(replace(feed, countdown_at_s=None)) == 230.0
    assert budget.power_off_at_s(ON) is None
    now = budget.compute(POLICY, FULL, feed, LLM, 100.0, grade=Grade.SHORT)
    assert (now.cut_in_s, now.reff_now_s, now.reff_s, now.reff_paused_s) == (70.0, 70.0, 70.0, 70.0)
    assert (now.need_s, now.fits, now.slack_s) == (85.0, False, -15.0)
    bare = budget.compute(POLICY, FULL, feed, LLM, 100.0, grade=Grade.BARE)
    assert (bare.cut_in_s, bare.reff_s, bare.fits) == (100.0, 100.0, True)
    assert budget.compute(POLICY, FULL, feed, LLM, 190.0, grade=Grade.SHORT).cut_in_s == 0.0
    far = budget.compute(POLICY, FULL, replace(ON, countdown_at_s=9000.0), LLM, 100.0)
    assert (far.reff_now_s, far.reff_s, far.cut_in_s) == (near(216.0), near(216.0), 8870.0)
    assert far.reff_paused_s == near(0.6 * 540.0 * 0.54 / 0.49)


def test_budget_of_the_blind() -> None:
    """Neither runtime nor a table: nothing is told, nothing fits, and only a countdown is known."""
    blind = make_policy([])
    now = budget.compute(blind, FULL, ON, LLM, 100.0)
    assert (now.tau_now_s, now.usable, now.reff_now_s, now.reff_s, now.reff_paused_s) == (None,) * 5
    assert (now.slack_s, now.fits, now.grade) == (None, False, Grade.FULL)
    cut = budget.compute(blind, FULL, replace(ON, countdown_at_s=300.0), LLM, 100.0)
    assert (cut.reff_now_s, cut.reff_s, cut.reff_paused_s, cut.fits) == (170.0, 170.0, 170.0, False)
    assert budget.grade_left(blind, replace(now, grade=Grade.SHORT)) is Grade.SHORT, "nothing is known that lowers it"
    assert budget.grade_left(blind, replace(now, left=None)) is Grade.FULL


def test_the_grade_is_that_of_a_full_battery_unless_it_is_given() -> None:
    """An emptier battery does not change what doctor says; the outage's own grade is taken as it is."""
    half = replace(FULL, left=0.3)
    assert budget.compute(POLICY, half, ON, LLM, 100.0).grade is Grade.FULL
    assert budget.compute(POLICY, half, ON, LLM, 100.0, grade=Grade.SHORT).grade is Grade.SHORT
    small: Policy = make_policy(["table=50:54,75:36,100:24"])
    assert budget.compute(small, FULL, ON, LLM, 100.0).grade is Grade.BARE
