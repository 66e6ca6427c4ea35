"""When does which rule come true? One function for each condition of a phase (docs/ARCHITECTURE.md), and a forecast.

Each condition returns *why* it holds, or "": the answer is logged as `because=`. The machine calls them and adds no
rule of its own. `forecast` runs the same sums forward, so `powerguard plan` shows what the machine will do.

How long does an outage last that has already lasted for some time? These odds help to weigh a pause of training.

The lengths are those of the EPRI survey as it is quoted for data centres (ASPLOS'14, "Underprovisioning backup power
infrastructure"), log-uniform inside each bin. A site's own outages differ, so these odds never decide alone: they are
asked only whether to pause early for a checkpoint that costs much, and never at the end of the battery.
"""

import math
from dataclasses import dataclass, replace

from powerguard.core.energy import account, budget, own
from powerguard.core.energy.budget import Budget
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.events import OutputSource, Reading
from powerguard.core.model.policy import Mode, Policy
from powerguard.core.model.state import Battery, Emergency, Feed, Holding, Online, Recovery, Shutdown, State, Supply
from powerguard.core.supply.feeds import battery_reported_twice, contradicts_commit, each_alone, has_supplies
from powerguard.core.supply.fusion import follows, is_fresh

_BINS = (
    (1.0, 60.0, 0.31),
    (60.0, 300.0, 0.27),
    (300.0, 1800.0, 0.14),
    (1800.0, 7200.0, 0.17),
    (7200.0, 14400.0, 0.06),
    (14400.0, 43200.0, 0.05),
)
"""Shortest and longest in seconds, and the share of all outages."""
_PARTS = 16


def _lasts(at_least_s: float) -> float:
    """Share of all outages that last at least this long."""
    share = 0.0
    for from_s, to_s, part in _BINS:
        if at_least_s <= from_s:
            share += part
        elif at_least_s < to_s:
            share += part * math.log(to_s / at_least_s) / math.log(to_s / from_s)
    return share


def goes_on(lasted_s: float, more_s: float) -> float:
    """Odds that an outage that has lasted for lasted_s goes on for more_s at least."""
    now = _lasts(lasted_s)
    return _lasts(lasted_s + more_s) / now if now > 0.0 else 1.0


def expected_s(lasted_s: float, at_most_s: float) -> float:
    """Mean of the seconds that such an outage still lasts, each counted as at_most_s at the most."""
    if at_most_s <= 0.0:
        return 0.0
    part_s = at_most_s / _PARTS
    return part_s * sum(goes_on(lasted_s, (at + 0.5) * part_s) for at in range(_PARTS))


SETTLE_S = 15.0
"""From a pause or a signal until the load must show it: a UPS reports its load some seconds late."""
_SHORT_RUNTIME_S = 45.0
_SHORT_RUNTIME_SHARE = 0.25
_PROGRESS_RESERVE_S = 20.0
_FRESH_S = 2.0
_ANSWER_SHARE = 0.25
"""Of a stop's reserve, what a UPS has to answer in that is not lost: a daemon that has just started discovers it."""
_BLIND_CHARGE_PCT = 40.0
_CHARGED_PCT = 90.0
COMEBACK_S = 180.0
"""From the return of power to running training, if the host was powered off: three minutes."""
FLAPPING_S = 300.0
FLAPPING_TRANSFERS = 3
_NO_HOLD = "power_off_at permits no hold"
_BLIND_FOR_LONG = "blind: blind_s"
_FORECAST_PARTS = 48
"""How finely the moment is looked for at which a pause begins to pay."""
_ALONE_S = 5.0
"""Delay of a commit after a fall of the reported runtime alone: gauges were wrong for three readings."""
_CLEARLY = 2.0
_LATE = 1.5
"""A checkpoint that takes longer than this many times its estimate no longer delays the stop."""
_NoCommit = Online | Shutdown  # Written into isinstance, a union is built each time.


def budget_now(policy: Policy, state: State, now_s: float) -> Budget:
    """Return the sums of this moment; on utility, with the grade that an outage which began now would have.

    An outage is graded by what is left. `outage_budget` on utility has the grade of a full battery, for callers that
    ask whether a full stop fits. Before training has started after a return, no checkpoint and no pause counts; once
    it is started, a failure of utility ends the recovery and begins an outage.
    """
    phase = state.phase
    if awaits_training(state):
        state = replace(state, trainers=())
        now = outage_budget(policy, state, now_s)
        if state.feed.supply is Supply.BATTERY:
            return now  # Graded when utility failed.
        grade = budget.grade_left(policy, replace(now, grade=Grade.FULL))
    else:
        if isinstance(phase, Recovery):
            state = replace(state, phase=Online())
        now = outage_budget(policy, state, now_s)
        if not isinstance(state.phase, Online):
            return now
        grade = budget.grade_left(policy, now)
    return now if grade is now.grade else outage_budget(policy, state, now_s, grade=grade)


def awaits_training(state: State) -> bool:
    """Say whether the host is back and training is not started yet: if utility fails then, no pause is ordered."""
    return isinstance(state.phase, Recovery) and state.phase.started_at_s is None


def outage_budget(policy: Policy, state: State, now_s: float, *, grade: Grade | None = None) -> Budget:
    """Return the sums of this moment, with the outage's grade and the settling load of its phase.

    grade: in place of the outage's; on utility, of the one that a full battery allows.
    """
    phase = state.phase
    if grade is None and not isinstance(phase, Online):
        grade = phase.outage.grade
    settled_load = None
    if isinstance(phase, Emergency) and phase.paused_load is not None:
        load = account.load_of(state.battery)
        arrived = load <= 1.05 * phase.paused_load + 0.02
        if now_s < phase.settle_by_s and not arrived:
            settled_load = phase.paused_load
            if phase.own_drop is not None:
                settled_load = _settling_load(policy, state, phase, load, now_s)
    return budget.compute(
        policy,
        state.battery,
        state.feed,
        state.trainers,
        now_s,
        grade=grade,
        settled_load=settled_load,
        learned=state.learned,
        own=own.own_load(policy, state, now_s),
    )


def _settling_load(policy: Policy, state: State, phase: Emergency, load: float, now_s: float) -> float | None:
    """Return the load to count with until our pause shows in that of a shared UPS; None: what is measured counts.

    The load of now less what our pause still takes off it, and never less than was predicted: others may draw more.
    """
    fall = own.fall(policy, state, now_s)
    if fall is not None and not fall.stays_high and must_show(state, phase, now_s):
        return None  # We have paused, and the UPS has had its time to say so: the rest is the others' load.
    return max(phase.paused_load or 0.0, load - (phase.own_drop or 0.0))


def must_show(state: State, phase: Emergency, now_s: float) -> bool:
    """Say whether a load that has not fallen is a pause that did not come: two steps and a slow UPS have gone by."""
    slowest_s = max((trainer.step_s for trainer in state.trainers if trainer.alive), default=0.0)
    return now_s - phase.paused_at_s >= 2 * slowest_s + SETTLE_S


def is_flapping(state: State, now_s: float) -> bool:
    """Say whether utility comes and goes: three transfers to battery in five minutes."""
    transfers = state.transfers
    return len(transfers) >= FLAPPING_TRANSFERS and now_s - transfers[-FLAPPING_TRANSFERS] <= FLAPPING_S


def _on_battery_s(state: State, now_s: float) -> float:
    """Seconds on battery as a dwell counts them: while utility comes and goes, from the beginning of the outage."""
    feed, phase = state.feed, state.phase
    if feed.supply is Supply.BATTERY:
        since_s = feed.since_s
        if not isinstance(phase, Online) and is_flapping(state, now_s):
            since_s = min(since_s, phase.outage.since_s)
        return now_s - since_s
    # A calibration is not an outage, but it empties the battery in the same way.
    return 0.0 if feed.test_since_s is None else now_s - feed.test_since_s


def checkpoint_due(policy: Policy, state: State, plan: Budget, now_s: float) -> str:
    """Say why training must pause and checkpoint now, or "" while it may go on."""
    feed = state.feed
    if budget.power_off_at_s(feed) is not None:
        return "power_off_at"
    waited_s = _on_battery_s(state, now_s)
    if plan.reff_paused_s is None or plan.reff_now_s is None:
        if feed.low_battery_at_s is not None and waited_s >= policy.pause_dwell_s:
            return "low_battery"
        return "blind" if waited_s >= policy.commit_dwell_s else ""
    shortest_s = min(_SHORT_RUNTIME_S, _SHORT_RUNTIME_SHARE * plan.health * (plan.tau_now_s or 0.0))
    if feed.low_battery_at_s is not None:
        because = "low_battery"
    elif 0.75 * plan.reff_paused_s <= plan.pause_need_s:
        because = "budget"
    elif plan.reff_now_s <= shortest_s:
        because = "runtime_short"
    else:
        return ""
    if because == "budget" and not pays_to_pause(policy, state, plan, now_s):
        return ""
    if waited_s >= policy.pause_dwell_s:
        return because
    after_s = _reff_after(policy, plan, policy.pause_dwell_s - waited_s, plan.tau_paused_s)
    return because if after_s < plan.need_s else ""


def is_calibrating(feed: Feed) -> bool:
    """Say whether the UPS empties its battery for a calibration."""
    reading = feed.reading
    return reading is not None and reading.calibrating and reading.output_source is OutputSource.BATTERY


def calibration_low(policy: Policy, state: State, plan: Budget, now_s: float) -> str:
    """Say why an outage would leave no time for a checkpoint, where a calibration empties the battery; else ""."""
    because = checkpoint_due(policy, state, plan, now_s)
    return "" if because == "blind" else because


def pays_to_pause(policy: Policy, state: State, plan: Budget, now_s: float, *, in_s: float = 0.0) -> bool:
    """Say whether continued training would lose more than a pause, both to the end of the battery, on average.

    A pause costs the time until utility is back. To go on costs the work since the last checkpoint, and what is trained
    from now on, where the outage outlasts the battery. So a checkpoint that takes minutes does not stop training for an
    outage of seconds, unless much would be lost with it. What is not known is taken for worth it. in_s: how far ahead
    of now_s the sums of `plan` are.
    """
    on_s = (plan.reff_now_s or 0.0) - plan.commit_s
    saved_s = [t.durable_at_s for t in state.trainers if t.alive]
    if on_s <= 0.0 or plan.reff_paused_s is None or not pauses(state) or not saved_s or None in saved_s:
        return True
    at_risk_s = now_s + in_s - min(at_s for at_s in saved_s if at_s is not None)
    lasted_s = _on_battery_s(state, now_s) + in_s if state.feed.supply is Supply.BATTERY else in_s
    grade = budget.grade_within(policy, plan.reff_paused_s - plan.checkpoint_s, at_most=plan.grade)
    stop = budget.stop_s(policy, grade)
    paused_s = max(0.0, plan.reff_paused_s - stop)
    lost_s = 0.0 if plan.checkpoint_s + stop <= plan.reff_paused_s else at_risk_s
    ends = goes_on(lasted_s, paused_s)
    pause_s = expected_s(lasted_s, paused_s) + (1.0 - ends) * policy.utility_stable_s
    pause_s += ends * (COMEBACK_S + lost_s)
    return pause_s <= goes_on(lasted_s, on_s) * (at_risk_s + on_s + COMEBACK_S)


def _reff_after(policy: Policy, plan: Budget, wait_s: float, tau_s: float | None) -> float:
    """Effective runtime at the load of `tau_s` after `wait_s` more at the load of now."""
    if plan.left is None or plan.tau_now_s is None or tau_s is None:
        return 0.0
    return budget.usable(policy, plan.left - wait_s / plan.tau_now_s) * tau_s


def may_commit(state: State) -> bool:
    """Say whether a commit can be due at all; until then its sums are not computed."""
    return state.feed.supply is Supply.BATTERY or budget.power_off_at_s(state.feed) is not None


def commit_due(policy: Policy, state: State, plan: Budget, now_s: float) -> str:
    """Say why the host must power off now, or "". The machine still polls once more before it believes it."""
    phase, feed = state.phase, state.feed
    if isinstance(phase, _NoCommit) or phase.outage.aborted_by or state.maintenance is not None:
        return ""
    if plan.cut_in_s is not None:
        if isinstance(phase, Holding):
            return _NO_HOLD
        if plan.cut_in_s <= budget.stop_s(policy, plan.grade, reserve_s=0.0):
            return "power_off_at"
    if feed.supply is not Supply.BATTERY or _has_input(state):
        return ""
    waited_s = _on_battery_s(state, now_s)
    if plan.reff_s is None:
        return _blind_commit(policy, state, waited_s) if waited_s >= policy.commit_dwell_s else ""
    if plan.reff_s > plan.commit_s:
        return ""
    least_s = budget.stop_s(policy, plan.grade, reserve_s=_PROGRESS_RESERVE_S)
    if plan.reff_s > least_s and _progresses(state, plan, least_s):
        return ""
    if waited_s < policy.commit_dwell_s:
        tau_s = None if plan.reff_s <= 0 or not plan.usable else plan.reff_s / plan.usable
        # A wait may cost the reserve, but not the grade of stop that would fit now.
        wait_s = policy.commit_dwell_s - waited_s
        grade = budget.grade_within(policy, plan.reff_s, at_most=plan.grade)
        if _reff_after(policy, plan, wait_s, tau_s) >= budget.stop_s(policy, grade, reserve_s=0.0):
            return ""
    return "budget"


def _has_input(state: State) -> bool:
    """Say whether the input is there although the battery carries: in a calibration, or by all but the UPS's word."""
    reading = state.feed.reading
    calibrates = reading is not None and reading.calibrating and reading.input_present is True
    return calibrates or state.battery.contradicted


def is_saving(state: State, now_s: float) -> bool:
    """Say whether a checkpoint that is owed is on its way, and not much later than it should be."""
    return any(
        t.owes and t.order is not None and now_s - t.ordered_at_s <= _LATE * t.checkpoint_s for t in state.trainers
    )


def _progresses(state: State, plan: Budget, stop_s: float) -> bool:
    """A checkpoint that is owed is on its way, and what is left of it fits before the stop."""
    owed = any(t.owes and t.order is not None for t in state.trainers)
    return owed and plan.reff_s is not None and plan.checkpoint_s + stop_s <= plan.reff_s


def _blind_commit(policy: Policy, state: State, waited_s: float) -> str:
    """Neither runtime nor a table: low battery, charge, or the operator's own number decide."""
    reading = state.feed.reading
    if state.feed.low_battery_at_s is not None:
        return "blind: low_battery"
    if reading is not None and reading.charge_pct is not None and reading.charge_pct <= _BLIND_CHARGE_PCT:
        return "blind: charge_pct"
    return _BLIND_FOR_LONG if waited_s >= policy.blind_s else ""


def may_latch(policy: Policy, state: State, plan: Budget, due_at_s: float, now_s: float) -> bool:
    """Say whether the commit has both its witnesses: it is never one number.

    It needs a fresh reading that says battery, asked for after the test came true, and a second witness. With the
    source lost, or one that does not answer in time, dead reckoning alone decides.
    """
    feed = state.feed
    reading = feed.reading
    cut = plan.cut_in_s is not None
    if reading is None or not is_fresh(policy, feed, now_s):
        is_known = cut or feed.lost_since_s is not None
        return now_s - due_at_s >= (_FRESH_S if is_known else max(_FRESH_S, _ANSWER_SHARE * policy.reserve_s))
    if reading.at_s <= due_at_s or now_s - reading.at_s > _FRESH_S:
        return False
    if cut:
        return True
    if contradicts_commit(policy, state, now_s, plan.commit_s):
        return False
    alone = each_alone(policy, state)
    if feed.low_battery_at_s is None and any(_may_take_back(*each, due_at_s, now_s, plan.commit_s) for each in alone):
        return False
    if reading.output_source is not OutputSource.BATTERY:
        # Off or unknown on battery is no proof of either; it may not hold up a commit that our own account demands.
        return reading.output_source in (OutputSource.OFF, OutputSource.UNKNOWN) and _own_account_agrees(policy, plan)
    if battery_reported_twice(policy, state, now_s) or is_flapping(state, now_s):
        return True  # A flapping utility has reported battery often enough; two readings in a row may never come.
    # What was counted while no reading came, such as before a restart, rests on the report that this one is to prove.
    return follows(policy, reading, feed.previous) and _own_account_agrees(policy, plan)


def is_spared(policy: Policy, state: State, plan: Budget) -> bool:
    """Say whether this outage has no commit as long as the other UPSes report utility as they do now."""
    feed = state.feed
    fresh = feed.reading is not None and is_fresh(policy, feed, plan.now_s)
    return fresh and feed.supply is Supply.BATTERY and plan.cut_in_s is None and has_supplies(policy, state)


def _may_take_back(policy: Policy, state: State, due_at_s: float, now_s: float, stop_s: float) -> bool:
    """Say whether one UPS on battery reports more now than wrong readings before, or had no time to report it.

    That is 2 s to answer, and 5 s where its reported runtime alone has fallen faster than any load explains.
    """
    feed = state.feed
    if feed.reading is None or feed.supply is not Supply.BATTERY or not is_fresh(policy, feed, now_s):
        return False
    if state.battery.higher_since_s is not None:
        return True
    fell_at_s = state.battery.fell_at_s
    just_fell = fell_at_s is not None and now_s - fell_at_s < _ALONE_S
    if just_fell and now_s - due_at_s < _ALONE_S and _runtime_is_alone(policy, state.battery, feed.reading, stop_s):
        return True
    return feed.reading.at_s <= due_at_s and now_s - due_at_s < _FRESH_S


def _runtime_is_alone(policy: Policy, battery: Battery, reading: Reading, stop_s: float) -> bool:
    """Say whether the charge and our own account say clearly that the stop fits, and the reported runtime does not."""
    points = account.table(policy, battery)
    if not points or battery.charged is None or reading.runtime_s is None or reading.charge_pct is None:
        return False
    least = min(battery.charged, battery.health - (battery.used or 0.0))
    return budget.usable(policy, least) * account.tau_s(points, account.load_of(battery)) > _CLEARLY * stop_s


def _own_account_agrees(policy: Policy, plan: Budget) -> bool:
    if plan.tau_now_s is None:
        return True
    return budget.usable(policy, plan.health - plan.used) * plan.tau_now_s <= plan.commit_s


def gate_open(policy: Policy, state: State, now_s: float, *, least_load: float = 0.0) -> str:
    """After an outage: say why a second one would be survived as well as the first, or "".

    Counted in energy: checkpoint and stop must fit, at the grade that a full battery allows. least_load: what training
    draws, while it is only about to run again.
    """
    reading = state.feed.reading
    charge_pct = None if reading is None else reading.charge_pct
    if charge_pct is not None and charge_pct >= _CHARGED_PCT:
        return "charge_pct"
    known = _after_return(policy, state, now_s, least_load)
    if known is None:
        if charge_pct is None:
            return "charge not reported"
        return "charge_pct" if charge_pct >= 100.0 * policy.resume_charge_share else ""
    left, tau_paused_s, need_s = known
    grade = budget.choose_grade(policy, left=state.battery.health, tau_paused_s=tau_paused_s, checkpoint=need_s)
    return "budget" if budget.fits(policy, left=left, tau_paused_s=tau_paused_s, checkpoint=need_s, grade=grade) else ""


def may_start(policy: Policy, state: State, now_s: float) -> str:
    """After a power-off: say why training may start again, or "" while a second outage would cost the checkpoint.

    A bare stop is enough: hours of waiting for a charge that makes it more orderly cost more training than any outage
    (docs/decisions/0053). Until the gate is open, training is guarded.
    """
    if because := gate_open(policy, state, now_s):
        return because
    known = _after_return(policy, state, now_s, 0.0)
    if known is None:
        return ""
    left, tau_paused_s, need_s = known
    bare = budget.fits(policy, left=left, tau_paused_s=tau_paused_s, checkpoint=need_s, grade=Grade.BARE)
    return "bare stop fits" if bare else ""


def _after_return(policy: Policy, state: State, now_s: float, least_load: float) -> tuple[float, float, float] | None:
    """Energy left, runtime of a full battery when paused, seconds of checkpoint; with the load that training had."""
    points, left = account.table(policy, state.battery), state.battery.left
    if not points or left is None:
        return None
    load = max(account.load_of(state.battery), least_load)
    if isinstance(state.phase, Recovery):
        load = max(load, state.phase.outage.load_at_start or 1.0)
    host_load = own.own_load(policy, state, now_s)
    paused = budget.paused_load(policy, state.trainers, load, state.learned, own=host_load)
    return left, account.tau_s(points, paused), budget.checkpoint_s(state.trainers, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What happens next if conditions stay as they are. at_s is None if no time is known."""

    action: str
    at_s: float | None
    because: str


def forecast(policy: Policy, state: State, plan: Budget) -> tuple[Forecast, ...]:
    """Return the next actions with their times, at the load of now, as if utility failed now where it is present.

    A checkpoint in flight may delay the power-off beyond this forecast, by the reserve or to a less orderly stop. But
    it may be durable at any moment, and then the wait is over: the forecast is the earliest time, never a late one.
    After a power-off that was only recorded there is none: the host stays on, and utility ends the outage.
    """
    phase = state.phase
    if isinstance(phase, Shutdown):
        if phase.outage.mode is not Mode.ARMED:
            return ()
        return (Forecast(action="forced power-off", at_s=phase.force_at_s or None, because=phase.because),)
    *steps, commit = _by_energy(policy, state, plan)
    at_s, because = _before_cut(state, plan)
    if commit.at_s is None or at_s < commit.at_s:
        commit = Forecast(action="shutdown", at_s=at_s, because=because)
    return (*steps, commit)


def _by_energy(policy: Policy, state: State, plan: Budget) -> list[Forecast]:
    """Return the next actions by the battery alone, the commit last."""
    phase, now_s = state.phase, plan.now_s
    out: list[Forecast] = []
    if plan.left is None or plan.tau_now_s is None or plan.tau_paused_s is None:
        return _by_blindness(policy, state, now_s)
    left, at_s = plan.left, now_s
    if awaits_training(state):
        ends_s = _commit_s(policy, state, replace(plan, tau_paused_s=plan.tau_now_s), now_s, left)
        return [Forecast(action="shutdown", at_s=ends_s, because="budget")]
    if not isinstance(phase, Emergency):
        at_s, because = _pause(policy, state, plan)
        out.append(Forecast(action="emergency_checkpoint", at_s=at_s, because=because))
        left -= (at_s - now_s) / plan.tau_now_s
    if not isinstance(phase, Holding) and plan.cut_in_s is None:
        out.append(Forecast(action="holding", at_s=at_s + plan.checkpoint_s, because="checkpoint durable"))
    return [*out, Forecast(action="shutdown", at_s=_commit_s(policy, state, plan, at_s, left), because="budget")]


def _by_blindness(policy: Policy, state: State, now_s: float) -> list[Forecast]:
    """Return the same where no runtime is known: a low battery, or a low charge, does not wait for blind_s."""
    out: list[Forecast] = []
    since_s, is_low = now_s - _dwelt_s(state, now_s), state.feed.low_battery_at_s is not None
    if not isinstance(state.phase, Emergency) and not awaits_training(state):
        because, dwell_s = ("low_battery", policy.pause_dwell_s) if is_low else ("blind", policy.commit_dwell_s)
        out.append(Forecast(action="emergency_checkpoint", at_s=since_s + dwell_s, because=because))
    because = _blind_commit(policy, state, policy.blind_s)
    wait_s = policy.blind_s if because == _BLIND_FOR_LONG else policy.commit_dwell_s
    return [*out, Forecast(action="shutdown", at_s=since_s + wait_s, because=because)]


def _dwelt_s(state: State, now_s: float) -> float:
    """Seconds on battery as a dwell counts them; on utility 0, as if it failed now."""
    return _on_battery_s(state, now_s) if state.feed.supply is Supply.BATTERY else 0.0


def _pause(policy: Policy, state: State, plan: Budget) -> tuple[float, str]:
    """Return when training pauses by the energy, and why: not before the dwell, unless the wait would cost the stop."""
    now_s, left, tau_now_s, tau_paused_s = plan.now_s, plan.left or 0.0, plan.tau_now_s or 0.0, plan.tau_paused_s or 0.0
    need = budget.energy_for(policy, plan.pause_need_s / 0.75 / tau_paused_s)
    short_s = min(_SHORT_RUNTIME_S, _SHORT_RUNTIME_SHARE * plan.health * tau_now_s)
    short = budget.energy_for(policy, short_s / tau_now_s)
    at_s = now_s + max(0.0, left - _pause_at_left(policy, state, plan, max(need, short))) * tau_now_s
    because = "budget" if need >= short else "runtime_short"
    if state.feed.low_battery_at_s is not None:
        at_s, because = now_s, "low_battery"
    dwelt_s = now_s + policy.pause_dwell_s - _dwelt_s(state, now_s)
    if at_s >= dwelt_s or plan.cut_in_s is not None:
        return at_s, because
    usable = budget.usable(policy, left - (dwelt_s - now_s) / tau_now_s)
    return (at_s if usable * tau_paused_s < plan.need_s else dwelt_s), because


def _commit_s(policy: Policy, state: State, plan: Budget, at_s: float, left: float) -> float:
    """Return when the commit is by the energy: not before the dwell where the stop without its reserve waits for it.

    left: of the energy at at_s, from which on the load is the paused one. A checkpoint that is still being written
    never moves it: where one is not durable by then, no grade has fitted, and a bare stop has no reserve to spend.
    """
    tau_paused_s = plan.tau_paused_s or 0.0
    ends_s = at_s + max(0.0, left - budget.energy_for(policy, plan.commit_s / tau_paused_s)) * tau_paused_s
    dwelt_s = plan.now_s + policy.commit_dwell_s - _dwelt_s(state, plan.now_s)
    if ends_s >= dwelt_s:
        return ends_s

    def reff_s(then_s: float) -> float:
        return budget.usable(policy, left - (then_s - at_s) / tau_paused_s) * tau_paused_s

    grade = budget.grade_within(policy, reff_s(ends_s), at_most=plan.grade)
    return dwelt_s if reff_s(dwelt_s) >= budget.stop_s(policy, grade, reserve_s=0.0) else ends_s


def _pause_at_left(policy: Policy, state: State, plan: Budget, floor: float) -> float:
    """Return the energy at which training is paused: floor, or less where a pause does not pay by then."""
    if plan.left is None or plan.tau_now_s is None or plan.tau_paused_s is None:
        return floor
    last = budget.energy_for(policy, plan.commit_s / plan.tau_now_s)
    begin = min(plan.left, floor)
    for part in range(_FORECAST_PARTS):
        left = begin - (begin - last) * part / _FORECAST_PARTS
        usable = budget.usable(policy, left)
        then = replace(plan, reff_now_s=usable * plan.tau_now_s, reff_paused_s=usable * plan.tau_paused_s)
        in_s = (plan.left - left) * plan.tau_now_s
        if last >= begin or pays_to_pause(policy, state, then, plan.now_s, in_s=in_s):
            return left
    return last


def _before_cut(state: State, plan: Budget) -> tuple[float, str]:
    """Return when the commit is and why, where the UPS is going to cut its output; infinity where it is not.

    It permits no hold: once every checkpoint is durable, the wait is over.
    """
    if plan.cut_in_s is None:
        return math.inf, ""
    at_s = plan.now_s + max(0.0, plan.cut_in_s - plan.stop_s)
    if isinstance(state.phase, Emergency):
        durable_at_s = plan.now_s + (0.0 if isinstance(state.phase, Holding) else plan.checkpoint_s)
        if durable_at_s < at_s:
            return durable_at_s, _NO_HOLD
    return at_s, "power_off_at"


def pauses(state: State) -> bool:
    """Say whether any living trainer stops drawing power when asked to."""
    return any(t.alive and t.conduct is not Conduct.CONTINUE for t in state.trainers)
