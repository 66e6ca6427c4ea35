"""GPU power is capped where a drill has shown that it pays, and put back whatever happens."""

from dataclasses import replace

import pytest

from powerguard.core import obligations
from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import CapPower, RestorePower
from powerguard.core.model.events import Done, Failed, OutputSource, Reading
from powerguard.core.model.policy import Drop, Learned
from powerguard.core.model.state import (
    Battery,
    EmergencyCheckpoint,
    Feed,
    GpuCap,
    Grade,
    Holding,
    OnBattery,
    Online,
    Outage,
    Phase,
    Shutdown,
    State,
    Supply,
)
from powerguard.core.trainers import escalation
from tests.core.play import make_policy

POLICY = make_policy(["table=50:540,75:360,100:240", "cap_share=0.6"])
OUTAGE = Outage(id="o", since_s=100.0, grade=Grade.FULL)
PAYS = Drop(before=0.75, after=0.5, at_s=0.0, speed=0.8)
STANDING = GpuCap(outage="o", at_s=110.0)


def reading(at_s: float, source: OutputSource) -> Reading:
    return Reading(at_s=at_s, ups="ups", source="snmp", output_source=source)


def turn(
    phase: Phase,
    *,
    now_s: float = 110.0,
    since_s: float = 100.0,
    supply: Supply = Supply.BATTERY,
    drop: Drop | None = PAYS,
    standing: GpuCap | None = None,
    alarms: tuple[str, ...] = (),
    load: float = 0.75,
    **feed: float,
) -> Turn:
    source = OutputSource.BATTERY if supply is Supply.BATTERY else OutputSource.UTILITY
    state = State(
        phase=phase,
        feed=Feed(supply=supply, since_s=since_s, reading=reading(now_s, source), utility_seen=True, **feed),
        battery=Battery(at_s=now_s, used=0.0, left=0.7, load=load),
        learned=Learned(cap=drop),
        owed=() if standing is None else (standing,),
        alarms=alarms,
    )
    return Turn(POLICY, state, now_s)


def ordered(at: Turn) -> list[str]:
    return [type(action).__name__ for action in at.actions]


def test_what_pays_is_work_done_with_one_charge() -> None:
    """From 75 % to 50 % of the load the battery lasts half as long again; at 80 % speed that is 1.2 times the work."""
    state = turn(OnBattery(outage=OUTAGE)).state
    assert escalation.cap_gain(POLICY, state) == pytest.approx(540 / 360 * 0.8)
    steep = replace(state, learned=Learned(cap=Drop(before=1.0, after=0.5, at_s=0.0, speed=0.5)))
    assert escalation.cap_gain(POLICY, steep) == pytest.approx(540 / 240 * 0.5), "the table's word, not the proportion"
    blind = make_policy(["cap_share=0.6"])
    assert escalation.cap_gain(blind, state) == pytest.approx(0.75 / 0.5 * 0.8)
    for nonsense in (None, replace(PAYS, after=0.75), replace(PAYS, after=0.0), replace(PAYS, before=0.4)):
        assert escalation.cap_gain(POLICY, replace(state, learned=Learned(cap=nonsense))) is None


def test_ten_seconds_on_battery_and_a_gain_of_five_percent() -> None:
    """The order carries the settings' share, is bounded, and what it was before is remembered."""
    at = turn(OnBattery(outage=OUTAGE))
    escalation.reconcile_cap(at)
    (order,) = at.actions
    assert isinstance(order, CapPower)
    assert (order.share, order.outage, order.by_s) == (0.6, "o", 115.0)
    assert at.state.cap == GpuCap(outage="o", at_s=110.0, order=order.id)
    assert [note.event for note in at.notes] == ["gpu_cap_ordered"]
    assert at.notes[0].numbers == (("share", 0.6),)
    assert at.notes[0].because == "1.20 times the work with the energy that is left"
    escalation.reconcile_cap(at)
    assert len(at.actions) == 1, "once"


@pytest.mark.parametrize(
    "at",
    [
        turn(OnBattery(outage=OUTAGE), now_s=109.9),
        turn(OnBattery(outage=OUTAGE), drop=None),
        turn(OnBattery(outage=OUTAGE), drop=replace(PAYS, speed=0.6999)),
        turn(OnBattery(outage=OUTAGE), supply=Supply.UTILITY),
        turn(OnBattery(outage=OUTAGE), alarms=("gpu_cap_failed",)),
        turn(OnBattery(outage=OUTAGE), countdown_at_s=500.0),
        turn(Online()),
        turn(Holding(outage=OUTAGE, began_s=100.0)),
        turn(Holding(outage=OUTAGE, began_s=100.0, paused_at_s=100.1, paused_load=0.45)),
        turn(Holding(outage=OUTAGE, began_s=100.0, paused_at_s=100.0, paused_load=0.45), load=0.53),
        turn(Holding(outage=OUTAGE, began_s=100.0, paused_at_s=100.0, paused_load=0.45), lost_since_s=105.0),
        turn(Shutdown(outage=OUTAGE, boot_id="b", latched_s=100.0, because="budget")),
    ],
    ids=[
        "too early",
        "never drilled",
        "does not pay",
        "utility",
        "failed already",
        "the output is cut anyway",
        "online",
        "no trainer was asked to pause",
        "the pause is young",
        "the load has fallen",
        "no load is reported",
        "latched",
    ],
)
def test_it_is_left_alone(at: Turn) -> None:
    """A GPU that is slowed down for nothing loses training time."""
    escalation.reconcile_cap(at)
    assert at.actions == []
    assert at.state.cap is None


def test_without_the_setting_gpus_are_never_touched() -> None:
    """cap_share None: there is no helper."""
    at = turn(OnBattery(outage=OUTAGE))
    at.policy = make_policy(["table=50:540,75:360,100:240"])
    escalation.reconcile_cap(at)
    assert at.actions == []


def test_a_gain_of_five_percent_is_just_enough() -> None:
    """The limit itself, by the table and, to the last digit, without one."""
    at = turn(OnBattery(outage=OUTAGE), drop=replace(PAYS, speed=0.7001))
    escalation.reconcile_cap(at)
    assert ordered(at) == ["CapPower"]
    at = turn(OnBattery(outage=OUTAGE), drop=Drop(before=1.0, after=0.5, at_s=0.0, speed=0.525))
    at.policy = make_policy(["cap_share=0.6"])
    assert escalation.cap_gain(at.policy, at.state) == escalation.LEAST_CAP_GAIN
    escalation.reconcile_cap(at)
    assert ordered(at) == ["CapPower"]


@pytest.mark.parametrize("kind", [EmergencyCheckpoint, Holding])
def test_a_load_that_does_not_fall_is_capped_without_a_drill(kind: type) -> None:
    """Training was told to pause, so there is nothing left that a cap could slow down."""
    fields = (
        {"because": "budget", "began_s": 100.0}
        if kind is EmergencyCheckpoint
        else {"began_s": 109.0, "paused_at_s": 100.0}
    )
    at = turn(kind(outage=OUTAGE, paused_load=0.45, **fields), drop=None, load=0.54)
    escalation.reconcile_cap(at)
    assert ordered(at) == ["CapPower"]
    assert at.notes[0].because == "the load has not fallen although training was asked to pause"


def test_a_cap_stands_until_utility_is_there_to_stay() -> None:
    """Thirty seconds of it; before that, and on battery, nothing is lifted."""
    for at in (
        turn(OnBattery(outage=OUTAGE), now_s=500.0, standing=STANDING),
        turn(Online(), now_s=129.9, supply=Supply.UTILITY, standing=STANDING),
        turn(Online(), now_s=500.0, supply=Supply.UTILITY, standing=STANDING, countdown_at_s=900.0),
        turn(Online(), now_s=500.0, supply=Supply.UTILITY, standing=replace(STANDING, order="x")),
        turn(
            Shutdown(outage=OUTAGE, boot_id="b", latched_s=100.0, because="budget"),
            now_s=500.0,
            supply=Supply.UTILITY,
            standing=STANDING,
        ),
    ):
        before = at.state.cap
        escalation.reconcile_cap(at)
        assert at.actions == []
        assert at.state.cap == before
    at = turn(Online(), now_s=130.0, supply=Supply.UTILITY, standing=STANDING)
    escalation.reconcile_cap(at)
    (order,) = at.actions
    assert isinstance(order, RestorePower)
    assert (order.outage, order.by_s) == ("o", 135.0)
    assert at.state.cap == replace(STANDING, order=order.id, lifting=True, at_s=130.0, retry_at_s=140.0)


def test_a_blind_ups_does_not_slow_training_down_for_ever() -> None:
    """Online, and silent for ten minutes: the limits are put back; in an outage they are not."""
    silent = {"lost_since_s": 400.0}
    for phase, now_s, lifted in (
        (Online(), 1000.0, True),
        (Online(), 999.0, False),
        (OnBattery(outage=OUTAGE), 1000.0, False),
    ):
        at = turn(phase, now_s=now_s, standing=STANDING, **silent)
        escalation.reconcile_cap(at)
        assert ordered(at) == (["RestorePower"] if lifted else [])


def test_a_restore_is_tried_until_it_is_heard() -> None:
    """Ten seconds later, with an alarm that stands until it has worked."""
    lifting = replace(STANDING, order="r", lifting=True, at_s=130.0, retry_at_s=140.0)
    at = turn(Online(), now_s=132.0, supply=Supply.UTILITY, standing=lifting)
    restore = RestorePower(id="r", by_s=135.0, outage="o")
    escalation.handle_cap(at, Failed(at_s=132.0, action=restore, took_s=2.0, reason="no helper"))
    assert at.state.cap == replace(lifting, order=None)
    assert at.state.alarms == ("gpu_power_stuck",)
    assert at.notes[-1].because == "no helper: training runs at lower power"
    at.now_s = 139.9
    escalation.reconcile_cap(at)
    assert at.actions == []
    at.now_s = 140.0
    escalation.reconcile_cap(at)
    assert ordered(at) == ["RestorePower"]
    assert at.state.cap is not None
    again = RestorePower(id=at.state.cap.order or "", by_s=145.0, outage="o")
    escalation.handle_cap(at, Done(at_s=141.0, action=again, took_s=0.1, detail=(("gpus", 8),)))
    assert at.state.cap is None
    assert at.state.alarms == ()
    assert at.notes[-1].event == "gpu_power_restored"
    assert at.notes[-1].numbers == (("gpus", 8),)


def test_a_gpu_that_never_takes_its_limit_back_is_asked_ever_less_often() -> None:
    """Each try is an error in the log: one every ten seconds would hide all others."""
    at = turn(Online(), now_s=200.0, supply=Supply.UTILITY, standing=STANDING)
    tries: list[float] = []
    while at.now_s < 2000.0:
        escalation.reconcile_cap(at)
        if at.actions:
            tries.append(at.now_s - 200.0)
            escalation.handle_cap(at, Failed(at_s=at.now_s, action=at.actions.pop(), took_s=0.0, reason="GPU 3: hangs"))
        at.now_s += 1.0
    assert tries == [0.0, 10.0, 30.0, 70.0, 150.0, *range(310, 1801, 300)]
    assert [note.event for note in at.notes] == ["gpu_power_stuck_raised"]


def test_a_cap_that_failed_is_put_back_at_once_and_not_tried_again() -> None:
    """Some may have been capped; the next outage may try again."""
    at = turn(OnBattery(outage=OUTAGE), standing=replace(STANDING, order="c"))
    order = CapPower(id="c", by_s=115.0, outage="o", share=0.6)
    escalation.handle_cap(at, Failed(at_s=110.0, action=order, took_s=1.0, reason="GPU 3 fell off the bus"))
    assert ordered(at) == ["RestorePower"]
    assert at.state.alarms == ("gpu_cap_failed",)
    assert at.state.cap is not None
    assert at.state.cap.lifting
    restore = at.actions[0]
    escalation.handle_cap(at, Done(at_s=111.0, action=restore, took_s=0.1))
    escalation.reconcile_cap(at)
    assert len(at.actions) == 1
    at.set_phase(Online())
    escalation.reconcile_cap(at)
    assert at.state.alarms == ()
    assert (at.notes[-1].event, at.notes[-1].because) == ("gpu_cap_failed_cleared", "the next outage tries again")


def test_a_cap_that_worked_is_reported() -> None:
    """With what the helper said."""
    at = turn(OnBattery(outage=OUTAGE), standing=replace(STANDING, order="c"))
    order = CapPower(id="c", by_s=115.0, outage="o", share=0.6)
    escalation.handle_cap(at, Done(at_s=110.0, action=order, took_s=1.0, detail=(("gpus", 8),)))
    assert at.state.cap == STANDING
    assert at.notes[-1].event == "gpu_power_capped"
    assert at.notes[-1].numbers == (("gpus", 8),)


def test_an_order_that_is_not_ours_is_passed_over() -> None:
    """A drill caps and restores as well; an old order's outcome may come late."""
    at = turn(OnBattery(outage=OUTAGE), standing=replace(STANDING, order="c"))
    other = CapPower(id="other", by_s=115.0, outage="o", share=0.6)
    escalation.handle_cap(at, Failed(at_s=110.0, action=other, took_s=1.0, reason="no"))
    assert at.state.cap == replace(STANDING, order="c")
    without = turn(OnBattery(outage=OUTAGE))
    escalation.handle_cap(without, Done(at_s=110.0, action=other, took_s=1.0))
    assert without.state.cap is None
    assert without.notes == []


def test_after_a_restart_an_order_without_outcome_may_have_been_carried_out() -> None:
    """So a cap counts as on, and a restore as still to be made."""
    at = turn(OnBattery(outage=OUTAGE), standing=replace(STANDING, order="c"))
    obligations.after_restart(at, {"x", "c"})
    assert at.state.cap == replace(STANDING, order="c"), "given again: its answer is still to come"
    obligations.after_restart(at, {"x"})
    assert at.state.cap == STANDING
    lifting = turn(Online(), standing=replace(STANDING, order="r", lifting=True))
    obligations.after_restart(lifting, ())
    assert lifting.state.cap == replace(STANDING, order=None, lifting=True)
    nothing = turn(Online())
    obligations.after_restart(nothing, ())
    assert nothing.state.cap is None
