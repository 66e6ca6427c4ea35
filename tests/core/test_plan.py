"""Every condition of the rule at its edge, one below it and one above it; and the forecast that people read."""

from dataclasses import replace
from typing import Any

import pytest

from powerguard.core.decide import conditions
from powerguard.core.decide.turn import Turn
from powerguard.core.energy import account, budget
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.policy import Mode, Policy
from powerguard.core.model.state import (
    Activity,
    Battery,
    CheckpointInFlight,
    Durable,
    EmergencyCheckpoint,
    Feed,
    Holding,
    Maintenance,
    OnBattery,
    Online,
    Outage,
    Phase,
    Recovery,
    Shutdown,
    State,
    Supply,
    Trainer,
)
from tests.core.play import make_policy

# Load 100 % and no trainer: tau is 1000 s at every moment, so a share of the battery is as many thousandths in seconds.
POLICY = make_policy(["table=50:2000,100:1000"])
BLIND = make_policy([])
OUTAGE = Outage(id="o", since_s=0.0, grade=Grade.FULL)
NOW_S = 100.0


def reading(at_s: float = NOW_S, source: str = "battery", **fields: object) -> Reading:
    return Reading(at_s=at_s, ups="ups", source="snmp", output_source=OutputSource(source), **fields)  # type: ignore[arg-type]


def state(
    left: float | None,
    phase: Phase | None = None,
    *,
    waited_s: float = 60.0,
    now: Reading | None = None,
    last: Reading | None = None,
    low_at_s: float | None = None,
    cut_at_s: float | None = None,
    used: float = 0.0,
) -> State:
    """Return a state on battery in which `left` of the battery is left."""
    feed = Feed(
        supply=Supply.BATTERY,
        since_s=NOW_S - waited_s,
        reading=reading() if now is None else now,
        previous=reading(NOW_S - 1.0) if last is None else last,
        low_battery_at_s=low_at_s,
        countdown_at_s=cut_at_s,
    )
    battery = Battery(at_s=NOW_S, used=used, left=left, load=1.0)
    return State(phase=OnBattery(outage=OUTAGE) if phase is None else phase, feed=feed, battery=battery)


def seconds(reff_s: float) -> float:
    """Return the energy left at which the effective runtime is so many seconds."""
    return budget.energy_for(POLICY, reff_s / 1000.0)


def checkpoint(at: State, policy: object = POLICY) -> str:
    return conditions.checkpoint_due(policy, at, conditions.outage_budget(policy, at, NOW_S), NOW_S)  # type: ignore[arg-type]


def commit(at: State, policy: object = POLICY, now_s: float = NOW_S) -> str:
    return conditions.commit_due(policy, at, conditions.outage_budget(policy, at, now_s), now_s)  # type: ignore[arg-type]


# --- The checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reff_s", "because"), [(226.7, ""), (226.6, "budget")])
def test_three_quarters_of_the_effective_runtime_against_the_needs(reff_s: float, because: str) -> None:
    """n_stop is 170 s here: 170 / 0.75 = 226.67."""
    assert checkpoint(state(seconds(reff_s))) == because


@pytest.mark.parametrize(("reff_s", "because"), [(45.1, ""), (44.9, "runtime_short")])
def test_runtime_short_at_45_s(reff_s: float, because: str) -> None:
    small = replace(POLICY, stop_q95_s=1.0, reserve_s=0.0)
    assert checkpoint(state(seconds(reff_s)), small) == because


@pytest.mark.parametrize(("reff_s", "because"), [(18.8, ""), (18.7, "runtime_short")])
def test_runtime_short_at_a_quarter_of_a_small_battery(reff_s: float, because: str) -> None:
    """0.25 * 0.75 * 100 s = 18.75 s."""
    small = replace(POLICY, runtime_table=((1.0, 100.0),), stop_q95_s=1.0, reserve_s=0.0)
    assert checkpoint(state(budget.energy_for(small, reff_s / 100.0)), small) == because


@pytest.mark.parametrize(
    ("waited_s", "left", "because"),
    [
        (3.99, 0.28, ""),  # 180 s against 170, and 176 after the dwell: it still fits
        (4.0, 0.28, "budget"),
        (0.0, 0.2739, "budget"),  # 173.9 s now, 169.9 after the dwell: waiting would turn fits into does not fit
        (0.0, 0.2741, ""),
        (2.0, 0.2721, ""),  # only the two seconds that are left of the dwell still cost
        (2.0, 0.2719, "budget"),
    ],
)
def test_the_dwell_of_a_pause(waited_s: float, left: float, because: str) -> None:
    assert checkpoint(state(left, waited_s=waited_s)) == because


def test_low_battery_and_a_cut_need_no_sums() -> None:
    assert checkpoint(state(0.75, low_at_s=99.0)) == "low_battery"
    assert checkpoint(state(0.75, low_at_s=99.0, waited_s=3.9)) == ""
    assert checkpoint(state(0.75, cut_at_s=900.0, waited_s=0.0)) == "power_off_at"
    assert checkpoint(state(0.75, cut_at_s=900.0, low_at_s=99.0)) == "power_off_at"


@pytest.mark.parametrize(
    ("waited_s", "low", "because"),
    [(7.9, False, ""), (8.0, False, "blind"), (3.9, True, ""), (4.0, True, "low_battery"), (9.0, True, "low_battery")],
)
def test_the_blind_pause_at_8_s(waited_s: float, because: str, *, low: bool) -> None:
    assert checkpoint(state(None, waited_s=waited_s, low_at_s=99.0 if low else None), BLIND) == because


def test_on_utility_the_dwell_has_not_begun_but_a_calibration_has_one() -> None:
    calibrating = replace(state(0.2).feed, supply=Supply.UTILITY, since_s=0.0)
    assert checkpoint(replace(state(0.2801), feed=calibrating)) == ""
    assert checkpoint(replace(state(0.2735), feed=calibrating)) == "budget", "173.5 s, and 169.5 after a whole dwell"
    assert checkpoint(replace(state(0.2801), feed=replace(calibrating, test_since_s=96.1))) == ""
    assert checkpoint(replace(state(0.2801), feed=replace(calibrating, test_since_s=96.0))) == "budget"


# --- The settling load --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "settle_by_s", "counts"),
    [
        (1.0, 101.0, 0.5),
        (1.0, 100.0, 1.0),  # out of time: the measured one
        (0.546, 101.0, 0.5),
        (0.545, 101.0, 0.545),  # it has got there: 1.05 * 0.5 + 0.02
    ],
)
def test_the_predicted_load_counts_until_the_measured_one_is_there(
    load: float, settle_by_s: float, counts: float
) -> None:
    for kind in (EmergencyCheckpoint, Holding):
        fields = {"outage": OUTAGE, "began_s": 90.0, "paused_load": 0.5, "settle_by_s": settle_by_s}
        phase = kind(**fields, **({"because": "budget"} if kind is EmergencyCheckpoint else {}))  # type: ignore[arg-type]
        at = state(0.5, phase)
        at = replace(at, battery=replace(at.battery, load=load))
        assert conditions.outage_budget(POLICY, at, NOW_S).load == pytest.approx(counts)


# --- The commit ---------------------------------------------------------------------------------------------------

HOLD = Holding(outage=OUTAGE, began_s=50.0)
FLYING = Trainer(
    name="a",
    conduct=Conduct.PAUSE,
    checkpoint_s=30.0,
    in_flight=CheckpointInFlight(order="o-1", eta_at_s=NOW_S + 20.0),
    ordered_at_s=99.0,
    pause_ordered=True,
)


@pytest.mark.parametrize(("reff_s", "because"), [(170.001, ""), (169.999, "budget")])
def test_commit_at_n_stop(reff_s: float, because: str) -> None:
    assert commit(state(seconds(reff_s), HOLD)) == because


@pytest.mark.parametrize(
    ("checkpoint_s", "eta_s", "reff_s", "because"),
    [
        (30.0, 20.0, 151.0, ""),  # 130 with the small reserve, and the rest of 20: it fits
        (30.0, 20.0, 149.0, "budget"),
        (30.0, 0.0, 130.5, ""),
        (30.0, 0.0, 129.5, "budget"),
    ],
)
def test_a_checkpoint_that_progresses_and_fits_has_a_reserve_of_20_s(
    checkpoint_s: float, eta_s: float, reff_s: float, because: str
) -> None:
    phase = EmergencyCheckpoint(outage=OUTAGE, began_s=90.0, because="budget")
    flying = replace(
        FLYING, checkpoint_s=checkpoint_s, in_flight=CheckpointInFlight(order="o-1", eta_at_s=NOW_S + eta_s)
    )
    at = state(seconds(reff_s), phase)
    assert commit(replace(at, trainers=(flying,))) == because
    for stopped in ({"in_flight": None}, {"activity": Activity.GONE}, {"checkpoint": Durable()}):
        assert commit(replace(at, trainers=(replace(flying, **stopped),))) == "budget"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("waited_s", "reff_s", "because"),
    [
        (8.0, 60.0, "budget"),
        (7.9, 60.0, ""),
        (4.0, 14.1, ""),
        (4.0, 13.9, "budget"),
        (0.0, 17.9, "budget"),
        (4.0, 0.0, "budget"),
        (4.0, 48.9, "budget"),
        (4.0, 49.1, ""),
        (4.0, 113.9, "budget"),
        (4.0, 114.1, ""),
    ],
)
def test_the_dwell_of_a_commit(waited_s: float, reff_s: float, because: str) -> None:
    """Eight seconds, unless the stop that fits now (full 110, short 45, bare 10 s) would not fit after them."""
    assert commit(state(seconds(reff_s) if reff_s else 0.05, HOLD, waited_s=waited_s)) == because


def test_a_commit_just_at_its_edges() -> None:
    """Without a margin the sums are exact: n_stop itself is due, the small reserve too, a stop that just fits waits."""

    def bold(full_s: float) -> Policy:
        return replace(POLICY, margin=0.0, floor=0.0, runtime_table=((0.5, 2 * full_s), (1.0, full_s)))

    assert commit(state(0.25, HOLD), bold(680.0)) == "budget", "170 s"
    flying = Trainer(
        name="a",
        conduct=Conduct.PAUSE,
        in_flight=CheckpointInFlight(order="o-1", eta_at_s=NOW_S),
        ordered_at_s=99.0,
        pause_ordered=True,
    )
    assert commit(replace(state(0.25, HOLD), trainers=(flying,)), bold(520.0)) == "budget", "130 s"
    assert commit(state(0.28125, HOLD, waited_s=0.0), bold(64.0)) == "", "18 s now, the 10 s of a bare stop then"


def test_no_commit_where_none_may_be() -> None:
    spent = state(0.15, HOLD)
    assert commit(spent) == "budget"
    assert commit(replace(spent, phase=Online())) == ""
    latched = Shutdown(outage=OUTAGE, boot_id="b", latched_s=1.0, because="budget")
    assert commit(replace(spent, phase=latched)) == ""
    assert commit(replace(spent, maintenance=Maintenance(until_s=200.0, reason="r", who="w"))) == ""
    assert commit(replace(spent, phase=replace(HOLD, outage=replace(OUTAGE, aborted_by="w")))) == ""
    for supply in (Supply.UTILITY, Supply.UNKNOWN):
        assert commit(replace(spent, feed=replace(spent.feed, supply=supply))) == ""
    for present, because in ((True, ""), (False, "budget"), (None, "budget")):
        assert commit(state(0.15, HOLD, now=reading(calibrating=True, input_present=present))) == because


@pytest.mark.parametrize(
    ("cut_in_s", "hold", "because"),
    [
        (500.0, True, "power_off_at permits no hold"),
        (500.0, False, ""),
        (140.1, False, ""),  # 110 s to stop, and the guard of 30
        (140.0, False, "power_off_at"),
    ],
)
def test_commit_before_a_cut(cut_in_s: float, because: str, *, hold: bool) -> None:
    phase = HOLD if hold else EmergencyCheckpoint(outage=OUTAGE, began_s=90.0, because="power_off_at")
    at = state(0.75, phase, cut_at_s=NOW_S + cut_in_s)
    for supply in (Supply.BATTERY, Supply.UTILITY):
        result = commit(replace(at, feed=replace(at.feed, supply=supply)))
        assert result == ("budget" if supply is Supply.BATTERY and not because and cut_in_s < 200.0 else because)


@pytest.mark.parametrize(
    ("waited_s", "charge_pct", "low", "because"),
    [
        (7.9, 10.0, True, ""),
        (8.0, 100.0, True, "blind: low_battery"),
        (8.0, 40.0, False, "blind: charge_pct"),
        (8.0, 40.1, False, ""),
        (119.9, None, False, ""),
        (120.0, None, False, "blind: blind_s"),
    ],
)
def test_the_blind_commit(waited_s: float, charge_pct: float | None, because: str, *, low: bool) -> None:
    at = state(None, HOLD, waited_s=waited_s, now=reading(charge_pct=charge_pct), low_at_s=99.0 if low else None)
    assert commit(at, BLIND) == because


# --- The latch ----------------------------------------------------------------------------------------------------


def latch(at: State, due_at_s: float, now_s: float = NOW_S, policy: object = POLICY) -> bool:
    return conditions.may_latch(policy, at, conditions.outage_budget(policy, at, now_s), due_at_s, now_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("at_s", "due_at_s", "now_s", "may"),
    [
        (100.0, 99.0, 100.0, True),
        (100.0, 100.0, 100.0, False),  # the reading that made the test true is not the poll that was asked for
        (100.0, 99.9, 102.0, True),
        (100.0, 99.9, 102.1, False),  # more than 2 s old
        (100.0, 101.5, 103.4, False),  # silent, but the test came true less than 2 s ago
        (100.0, 101.0, 115.9, False),  # silent for a while, but not lost: it may be asked for the first time
        (100.0, 101.0, 116.0, True),  # silent for a quarter of the stop's reserve: dead reckoning decides alone
    ],
)
def test_the_commit_needs_a_fresh_reading_asked_for(at_s: float, due_at_s: float, now_s: float, *, may: bool) -> None:
    assert latch(state(0.2, HOLD, now=reading(at_s), last=reading(at_s - 1.0)), due_at_s, now_s) is may


@pytest.mark.parametrize(
    ("last_at_s", "last_source", "used", "may"),
    [
        (99.0, "battery", 0.0, True),
        (99.5, "battery", 0.0, True),
        (99.6, "battery", 0.0, False),  # not apart enough
        (99.0, "utility", 0.0, False),
        (99.0, "utility", 0.48, True),  # our own account agrees: 0.27 left is 170 s
        (99.0, "utility", 0.479, False),
    ],
)
def test_the_commit_needs_a_second_witness(last_at_s: float, last_source: str, used: float, *, may: bool) -> None:
    at = state(0.2, HOLD, last=reading(last_at_s, last_source), used=used)
    assert latch(at, 99.7 if last_at_s > 99.0 else 98.5) is may


@pytest.mark.parametrize(("first_s", "may"), [(80.0, True), (-200.1, False)])
def test_utility_that_comes_and_goes_is_a_witness_too(first_s: float, *, may: bool) -> None:
    """Two readings of a battery in a row may never come."""
    at = replace(state(0.2, HOLD, last=reading(99.0, "utility")), transfers=(first_s, 90.0, 99.0))
    assert latch(at, 98.5) is may


@pytest.mark.parametrize(
    ("source", "used", "may"),
    [
        ("utility", 0.6, False),
        ("bypass", 0.6, False),
        ("off", 0.6, True),
        ("unknown", 0.6, True),
        ("unknown", 0.0, False),
    ],
)
def test_never_while_the_newest_reading_says_utility(source: str, used: float, *, may: bool) -> None:
    """Off and unknown prove nothing, and do not hold up what our own account demands."""
    assert latch(state(0.2, HOLD, now=reading(source=source), used=used), 99.0) is may


def test_a_cut_and_blindness_have_other_witnesses() -> None:
    cut = state(0.75, HOLD, now=reading(source="utility"), cut_at_s=150.0)
    assert latch(cut, 99.0)
    assert not latch(cut, 100.0)
    assert latch(state(None, HOLD, last=reading(99.0, "utility")), 98.5, policy=BLIND)
    nothing = state(0.2, HOLD)
    nothing = replace(nothing, feed=replace(nothing.feed, reading=None))
    assert (latch(nothing, 85.0), latch(nothing, 85.1)) == (True, False)
    lost = replace(nothing, feed=replace(nothing.feed, lost_since_s=97.0))
    assert (latch(lost, 98.0), latch(lost, 98.1)) == (True, False)
    alone = state(0.2, HOLD)
    assert not latch(replace(alone, feed=replace(alone.feed, previous=None)), 99.0)


@pytest.mark.parametrize(
    ("battery", "fields", "due_at_s", "may"),
    [
        ({}, {}, 99.0, False),
        ({"charged": seconds(339.0)}, {}, 99.0, True),  # twice the 170 s of the stop must clearly be left
        ({"used": 0.75 - seconds(339.0)}, {}, 99.0, True),
        ({"used": 0.75 - seconds(341.0)}, {}, 99.0, False),
        ({"charged": None}, {}, 99.0, True),
        ({}, {"runtime_s": None}, 99.0, True),
        ({}, {"charge_pct": None}, 99.0, True),
        ({}, {}, 95.1, False),
        ({}, {}, 95.0, True),  # the runtime has had its 5 s to come back
        ({"fell_at_s": 95.0}, {}, 99.0, True),
        ({"fell_at_s": None}, {}, 99.0, True),
    ],
)
def test_a_runtime_that_fell_alone_has_five_seconds_to_take_it_back(
    battery: dict[str, Any], fields: dict[str, Any], due_at_s: float, *, may: bool
) -> None:
    """The charge and our own account both say that the stop clearly fits; only the reported runtime says otherwise."""
    at = state(0.2, HOLD, now=reading(**{"runtime_s": 100.0, "charge_pct": 60.0, **fields}))
    at = replace(at, battery=replace(at.battery, **{"charged": seconds(341.0), "fell_at_s": 95.1, **battery}))
    assert latch(at, due_at_s) is may


# --- The gate -----------------------------------------------------------------------------------------------------


def gate(at: State, policy: object = POLICY) -> str:
    return conditions.gate_open(policy, at, NOW_S)  # type: ignore[arg-type]


def test_the_gate_counts_in_energy() -> None:
    """n_stop 170 s must fit three quarters: 226.67 s, at the load that training had."""
    assert gate(state(seconds(226.7), Online())) == "budget"
    assert gate(state(seconds(226.6), Online())) == ""
    assert gate(state(0.0, Online(), now=reading(charge_pct=90.0))) == "charge_pct"
    assert gate(state(0.0, Online(), now=reading(charge_pct=89.9))) == ""


@pytest.mark.parametrize(("load_at_start", "opens"), [(0.5, True), (1.0, False), (None, False)])
def test_the_gate_at_boot_counts_with_the_load_that_training_had(load_at_start: float | None, *, opens: bool) -> None:
    """An idle host draws little; None: nobody knows, so full."""
    at = state(seconds(200.0), Recovery(outage=replace(OUTAGE, load_at_start=load_at_start), began_s=1.0, clean=True))
    assert bool(gate(replace(at, battery=replace(at.battery, load=0.1)))) is opens


def test_a_load_that_nobody_knows_is_full_and_not_more() -> None:
    """230 s open the gate at full load; twice that load would leave less than half of them."""
    at = state(seconds(230.0), Recovery(outage=OUTAGE, began_s=1.0, clean=True))
    assert gate(replace(at, battery=replace(at.battery, load=0.1))) == "budget"


@pytest.mark.parametrize(("eta_s", "because"), [(29.0, "budget"), (31.0, "")])
def test_at_the_gate_too_only_the_rest_of_a_checkpoint_in_flight_counts(eta_s: float, because: str) -> None:
    """30 s and 170 s are three quarters of 266.67 s; the trainer's estimate alone, 100 s, would keep it shut."""
    writing = Trainer(
        name="t",
        conduct=Conduct.CONTINUE,
        checkpoint_s=100.0,
        in_flight=CheckpointInFlight(order="o-1", eta_at_s=NOW_S + eta_s),
    )
    at = replace(state(seconds(266.7), Online()), trainers=(writing,))
    assert gate(at) == because
    assert gate(replace(at, trainers=(replace(writing, in_flight=None),))) == ""


@pytest.mark.parametrize(
    ("charge_pct", "because"), [(None, "charge not reported"), (39.9, ""), (40.0, "charge_pct"), (95.0, "charge_pct")]
)
def test_the_gate_of_the_blind(charge_pct: float | None, because: str) -> None:
    assert gate(state(None, Online(), now=reading(charge_pct=charge_pct)), BLIND) == because


# --- The forecast -------------------------------------------------------------------------------------------------


def forecast(at: State, policy: object = POLICY) -> list[tuple[str, float | None, str]]:
    result = conditions.forecast(policy, at, conditions.outage_budget(policy, at, NOW_S))  # type: ignore[arg-type]
    return [(f.action, None if f.at_s is None else round(f.at_s, 3), f.because) for f in result]


def test_forecast_by_hand() -> None:
    """0.75 left. The pause at 226.67 s: 0.32667 left, 423.33 s from now; the commit at 170 s: 0.27, 56.67 s later."""
    assert forecast(state(0.75)) == [
        ("emergency_checkpoint", 523.333, "budget"),
        ("holding", 523.333, "checkpoint durable"),
        ("shutdown", 580.0, "budget"),
    ]
    assert forecast(state(0.75, HOLD)) == [("shutdown", 580.0, "budget")]
    emergency = EmergencyCheckpoint(outage=OUTAGE, began_s=90.0, because="budget")
    assert forecast(state(0.75, emergency)) == [
        ("holding", 100.0, "checkpoint durable"),
        ("shutdown", 580.0, "budget"),
    ]
    assert forecast(state(0.2, HOLD)) == [("shutdown", 100.0, "budget")]


def test_forecast_with_a_trainer_that_pauses() -> None:
    """The stretch to the pause is at the load of now, the one after it at 60 % of that."""
    at = replace(state(0.75), trainers=(Trainer(name="a", conduct=Conduct.PAUSE, checkpoint_s=30.0),))
    tau_s = account.tau_s(POLICY.runtime_table, 0.6)
    floor = 200.0 / 0.75 / tau_s + 0.1
    pause_s = NOW_S + (0.75 - floor) * 1000.0
    commit_s = pause_s + (floor - (170.0 / tau_s + 0.1)) * tau_s
    assert forecast(at) == [
        ("emergency_checkpoint", round(pause_s, 3), "budget"),
        ("holding", round(pause_s + 30.0, 3), "checkpoint durable"),
        ("shutdown", round(commit_s, 3), "budget"),
    ]


def test_forecast_of_a_short_runtime_of_a_cut_and_of_the_latched() -> None:
    small = replace(POLICY, stop_q95_s=1.0, reserve_s=0.0)
    assert forecast(state(0.75), small)[0] == ("emergency_checkpoint", 705.0, "runtime_short")
    cut = forecast(state(0.75, cut_at_s=400.0))
    assert cut[-1] == ("shutdown", 200.0, "power_off_at"), "170 s before the guard of 30 s before the cut"
    late = forecast(state(0.75, cut_at_s=200.0))
    assert late[-1] == ("shutdown", 100.0, "power_off_at"), "where it no longer fits: now"
    assert forecast(state(0.2, HOLD, cut_at_s=400.0)) == [("shutdown", 100.0, "budget")]
    latched = Shutdown(outage=OUTAGE, boot_id="b", latched_s=1.0, because="why")
    assert forecast(state(0.1, latched)) == [("forced power-off", None, "why")]
    assert forecast(state(0.1, replace(latched, force_at_s=140.0))) == [("forced power-off", 140.0, "why")]
    for mode in (Mode.DRY_RUN, Mode.REHEARSE):
        recorded = replace(latched, force_at_s=140.0, outage=replace(OUTAGE, mode=mode))
        assert forecast(state(0.1, recorded)) == [], "the host stays on"


@pytest.mark.parametrize("left", [0.75, None], ids=["known", "blind"])
def test_a_cut_permits_no_hold_and_the_forecast_knows(left: float | None) -> None:
    """The power-off comes as soon as the checkpoint is durable, long before the cut."""
    policy = BLIND if left is None else POLICY
    saving = state(left, EmergencyCheckpoint(outage=OUTAGE, began_s=90.0, because="power_off_at"), cut_at_s=400.0)
    saving = replace(saving, trainers=(FLYING,))
    assert commit(saving, policy) == ""
    assert forecast(saving, policy) == [("shutdown", 120.0, "power_off_at permits no hold")]
    soon = replace(saving, feed=replace(saving.feed, countdown_at_s=310.0))
    assert forecast(soon, policy) == [("shutdown", 110.0, "power_off_at")], "it is not waited for"
    held = state(left, HOLD, cut_at_s=400.0)
    assert forecast(held, policy) == [("shutdown", 100.0, commit(held, policy))]
    assert commit(held, policy) == "power_off_at permits no hold"


@pytest.mark.parametrize(("reff_s", "waits"), [(180.0, False), (169.9, True), (155.0, True), (149.0, False)])
def test_a_checkpoint_on_its_way_makes_no_forecast_late(reff_s: float, *, waits: bool) -> None:
    """It may put the power-off off by the reserve, and by less: as soon as it is durable there is no wait."""
    at = state(seconds(reff_s), EmergencyCheckpoint(outage=OUTAGE, began_s=90.0, because="budget"))
    at = replace(at, trainers=(FLYING,))
    durable = replace(at, trainers=(replace(FLYING, checkpoint=Durable()),))
    at_s = forecast(at)[-1][1]
    assert at_s == forecast(durable)[-1][1] == pytest.approx(NOW_S + max(0.0, reff_s - 170.0))
    is_due = at_s == NOW_S
    assert (commit(durable) == "budget") == is_due
    assert (commit(at) == "") == (waits or not is_due)


def test_the_forecast_of_a_small_battery_is_what_the_rule_says_then() -> None:
    """A quarter of 75 s, 18.75 s, is short for it: so many seconds of what is dared with, and no 45."""
    small = replace(POLICY, runtime_table=((1.0, 100.0),), stop_q95_s=1.0, reserve_s=0.0)
    floor = budget.energy_for(small, 0.1875)
    at_s = NOW_S + (0.75 - floor) * 100.0
    assert forecast(state(0.75), small)[0] == ("emergency_checkpoint", round(at_s, 3), "runtime_short")
    assert checkpoint(state(floor + 1e-6), small) == ""
    assert checkpoint(state(floor - 1e-6), small) == "runtime_short"


def test_forecast_of_a_recovery_is_the_commit_alone() -> None:
    """Power that fails again before training has taken a step: no pause is ordered, and the load does not fall."""
    at = state(0.75, Recovery(outage=OUTAGE, began_s=90.0, clean=True))
    at = replace(at, trainers=(Trainer(name="a", conduct=Conduct.PAUSE, checkpoint_s=30.0),))
    assert forecast(at) == [("shutdown", 580.0, "budget")]
    assert forecast(at, BLIND) == [("shutdown", 160.0, "blind: blind_s")]
    left = budget.energy_for(POLICY, 0.17)
    for more, because in ((1e-6, ""), (-1e-6, "budget")):
        due = replace(at, battery=replace(at.battery, left=left + more))
        assert commit(due) == because


def test_forecast_of_a_recovery_in_which_training_was_started_is_that_of_an_outage() -> None:
    """The first reading of battery ends the recovery, and a new outage asks for a checkpoint."""
    was_started = Recovery(outage=replace(OUTAGE, grade=Grade.BARE), began_s=90.0, clean=True, started_at_s=95.0)
    at = replace(state(0.75, was_started), trainers=(Trainer(name="a", conduct=Conduct.PAUSE, checkpoint_s=30.0),))
    at = replace(at, feed=replace(at.feed, supply=Supply.UTILITY))
    online = replace(at, phase=Online())
    now = conditions.budget_now(POLICY, at, NOW_S)
    assert now == conditions.budget_now(POLICY, online, NOW_S)
    found = conditions.forecast(POLICY, at, now)
    assert found == conditions.forecast(POLICY, online, now)
    assert [step.action for step in found] == ["emergency_checkpoint", "holding", "shutdown"]


@pytest.mark.parametrize(("left", "grade"), [(0.75, Grade.FULL), (0.3, Grade.SHORT), (0.12, Grade.BARE)])
def test_a_recovery_on_utility_shows_the_stop_of_a_second_outage(left: float, grade: Grade) -> None:
    """The grade is chosen again when utility fails, and neither checkpoint nor pause counts."""
    at = state(left, Recovery(outage=OUTAGE, began_s=90.0, clean=True))
    at = replace(at, trainers=(Trainer(name="a", conduct=Conduct.PAUSE, checkpoint_s=30.0),))
    on_utility = replace(at, feed=replace(at.feed, supply=Supply.UTILITY))
    now = conditions.budget_now(POLICY, on_utility, NOW_S)
    assert (now.grade, now.checkpoint_s, now.load_paused) == (grade, 0.0, now.load_now)
    turn = Turn(POLICY, at, NOW_S)
    turn.grade_again()
    assert turn.outage is not None
    assert turn.outage.grade is grade
    assert conditions.budget_now(POLICY, turn.state, NOW_S).grade is grade


def test_forecast_of_the_blind() -> None:
    found = [("emergency_checkpoint", 48.0, "blind"), ("shutdown", 160.0, "blind: blind_s")]
    assert forecast(state(None), BLIND) == found
    assert forecast(state(None, HOLD), BLIND) == found[1:]
    on_utility = state(None, Online())
    on_utility = replace(on_utility, feed=replace(on_utility.feed, supply=Supply.UTILITY))
    assert forecast(on_utility, BLIND) == [(action, at_s + 60.0, why) for action, at_s, why in found]


@pytest.mark.parametrize(
    ("charge_pct", "low", "expected"),
    [
        (40.1, False, [("emergency_checkpoint", 8.0, "blind"), ("shutdown", 120.0, "blind: blind_s")]),
        (40.0, False, [("emergency_checkpoint", 8.0, "blind"), ("shutdown", 8.0, "blind: charge_pct")]),
        (90.0, True, [("emergency_checkpoint", 4.0, "low_battery"), ("shutdown", 8.0, "blind: low_battery")]),
    ],
)
def test_forecast_of_the_blind_with_little_charge(
    charge_pct: float, expected: list[tuple[str, float, str]], *, low: bool
) -> None:
    """On utility after an outage: the next one ends with the dwell, and not when the time that is set is over."""
    at = state(None, Online(), now=reading(source="utility", charge_pct=charge_pct), low_at_s=99.0 if low else None)
    at = replace(at, feed=replace(at.feed, supply=Supply.UTILITY))
    assert forecast(at, BLIND) == [(action, NOW_S + in_s, why) for action, in_s, why in expected]
    held = state(None, HOLD, waited_s=8.0, now=reading(charge_pct=charge_pct), low_at_s=99.0 if low else None)
    assert (commit(held, BLIND) == expected[-1][2]) is (expected[-1][1] == 8.0)
    assert forecast(held, BLIND)[-1][1] == NOW_S - 8.0 + expected[-1][1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"conduct": Conduct.EXIT}, True),
        ({"activity": Activity.GONE}, False),
        ({"conduct": Conduct.CONTINUE}, False),
    ],
)
def test_pauses(changes: dict[str, object], *, expected: bool) -> None:
    trainer = replace(Trainer(name="a", conduct=Conduct.PAUSE), **changes)  # type: ignore[arg-type]
    assert conditions.pauses(State(trainers=(trainer,))) is expected
    assert not conditions.pauses(State())


# --- Utility that comes and goes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transfers", "flapping"),
    [((), False), ((90.0, 99.0), False), ((-200.0, 90.0, 99.0), True), ((-200.1, 90.0, 99.0), False)],
)
def test_three_transfers_in_five_minutes_are_flapping(transfers: tuple[float, ...], *, flapping: bool) -> None:
    assert conditions.is_flapping(State(transfers=transfers), NOW_S) is flapping


@pytest.mark.parametrize(("transfers", "due"), [((90.0, 99.0), ""), ((80.0, 90.0, 99.0), "blind")])
def test_a_dwell_goes_on_while_utility_comes_and_goes(transfers: tuple[float, ...], due: str) -> None:
    """A second of battery, a second of utility: each second alone would be too short for anything, for ever."""
    feed = Feed(supply=Supply.BATTERY, since_s=99.0, reading=reading(), previous=reading(99.5))
    state = State(phase=OnBattery(outage=OUTAGE), feed=feed, transfers=transfers)
    assert conditions.checkpoint_due(BLIND, state, conditions.outage_budget(BLIND, state, NOW_S), NOW_S) == due


@pytest.mark.parametrize(("after_s", "checkpoint_s", "saving"), [(15.0, 10.0, True), (15.1, 10.0, False)])
def test_a_checkpoint_on_its_way_has_a_say_in_the_stop_until_it_is_late(
    after_s: float, checkpoint_s: float, *, saving: bool
) -> None:
    trainer = Trainer(
        name="a", in_flight=CheckpointInFlight(order="o-1"), ordered_at_s=NOW_S - after_s, checkpoint_s=checkpoint_s
    )
    assert conditions.is_saving(State(trainers=(trainer,)), NOW_S) is saving
    for other in (
        replace(trainer, in_flight=None),
        replace(trainer, checkpoint=Durable()),
        replace(trainer, activity=Activity.GONE),
    ):
        assert not conditions.is_saving(State(trainers=(other,)), NOW_S)
