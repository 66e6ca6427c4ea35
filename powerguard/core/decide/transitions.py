"""All moves: which cause ends which phase, what is undone then, and what is ordered when the next phase begins.

`TABLE` has every move; docs/ARCHITECTURE.md has its picture. `move` carries one out, and `duties` does what each phase
has to do at every event. The orders of the commit are in `_latch`, the power-off itself is in `_finish`.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from powerguard.core import obligations, scheduler
from powerguard.core.comeback import gate, methods, unseen
from powerguard.core.decide import conditions
from powerguard.core.decide.turn import Turn
from powerguard.core.drill import rehearsal
from powerguard.core.energy import account, budget, needs, own
from powerguard.core.energy.budget import Budget
from powerguard.core.model.actions import Conduct, Grade, Level, PowerOff, Scalar, SyncFilesystems
from powerguard.core.model.state import (
    Emergency,
    EmergencyCheckpoint,
    Holding,
    OnBattery,
    Online,
    Outage,
    Phase,
    Recovery,
    Shutdown,
    Supply,
    phase_name,
)
from powerguard.core.supply import fusion
from powerguard.core.trainers import lifecycle


class Cause(StrEnum):
    """Why a phase ends."""

    BATTERY = "battery confirmed"
    POWER_OFF_ORDERED = "output-off countdown or FSD"
    CALIBRATION_LOW = "calibration ran low"
    UTILITY_BACK = "utility back"
    CHECKPOINT_NEEDED = "checkpoint needed"
    CHECKPOINT_DURABLE = "checkpoint durable"
    UTILITY_STABLE = "utility stable"
    COMMIT = "commit point"
    ABORTED = "operator aborts"
    NEXT_BOOT = "next boot"
    RESUMED = "training resumed"
    REHEARSED = "utility back after a recorded power-off"
    POWER_LOST = "power lost unseen"


TABLE: dict[tuple[type[Phase], Cause], type[Phase]] = {
    (Online, Cause.BATTERY): OnBattery,
    (Online, Cause.POWER_OFF_ORDERED): EmergencyCheckpoint,
    (Online, Cause.CALIBRATION_LOW): EmergencyCheckpoint,
    (Online, Cause.POWER_LOST): Recovery,
    (OnBattery, Cause.UTILITY_BACK): Online,
    (OnBattery, Cause.CHECKPOINT_NEEDED): EmergencyCheckpoint,
    (OnBattery, Cause.NEXT_BOOT): Recovery,
    (EmergencyCheckpoint, Cause.CHECKPOINT_DURABLE): Holding,
    (EmergencyCheckpoint, Cause.UTILITY_STABLE): Online,
    (EmergencyCheckpoint, Cause.ABORTED): OnBattery,
    (EmergencyCheckpoint, Cause.COMMIT): Shutdown,
    (EmergencyCheckpoint, Cause.NEXT_BOOT): Recovery,
    (Holding, Cause.UTILITY_STABLE): Online,
    (Holding, Cause.ABORTED): OnBattery,
    (Holding, Cause.COMMIT): Shutdown,
    (Holding, Cause.NEXT_BOOT): Recovery,
    (Shutdown, Cause.NEXT_BOOT): Recovery,
    (Shutdown, Cause.REHEARSED): Online,
    (Recovery, Cause.RESUMED): Online,
    (Recovery, Cause.COMMIT): Shutdown,
}
"""Every move. NEXT_BOOT is made by `recovery.restore`, when the daemon starts; all others by `step`."""
_RESUMES = (Cause.UTILITY_STABLE, Cause.ABORTED, Cause.REHEARSED)
"""Causes with which every trainer is ordered to resume."""

OVERDUE_S = 5.0
"""powerguard-off promises 2 s: a host that lives this long after its deadline is not being powered off."""
AGAIN_S = 30.0
"""Interval of the orders to a host that is overdue, each to take effect at once."""
RETRY_S = 5.0
GUARD_CHECKPOINT_S = 60.0
"""Interval of checkpoints for a trainer that continues through a hold."""
GUARD_LEAST_S = 60.0
CALIBRATION_CHECKPOINT_S = 600.0
"""Seconds that a checkpoint during training may take in a calibration, as one that the operator asks for."""
DEADTIME_S = 15.0
"""A UPS that reported utility and is silent for this long might be on battery (upsmon's DEADTIME)."""
SILENCE_S = 3600.0
"""A UPS that is silent for longer is not on battery: no battery of a GPU host lasts this long."""
PAUSED_LOAD_GUARD = 1.25
"""With the source lost, a measured paused load counts as this much of it (docs/decisions/0034)."""
_WORTH_ORDERING_S = 1.0
_CUT_SOONER = "the UPS cuts its output sooner"
_EMPTY_SOONER = "the battery ends sooner"


@dataclass(frozen=True, slots=True)
class Decision:
    """Which cause ends the phase now, why it holds, and the sums on which this was decided.

    The journal, `explain` and `report` show these sums, and no others (docs/decisions/0235).
    """

    cause: Cause
    because: str
    sums: Budget

    def logged(self) -> dict[str, Scalar]:
        """Return the sums for a line of the journal, rounded to a thousandth."""

        def rounded(value: float | None) -> float | None:
            return None if value is None else round(value, 3)

        sums = self.sums
        return {
            "reff_now_s": rounded(sums.reff_now_s),
            "reff_s": rounded(sums.reff_s),
            "reff_paused_s": rounded(sums.reff_paused_s),
            "checkpoint_s": rounded(sums.checkpoint_s),
            "stop_s": rounded(sums.stop_s),
            "slack_s": rounded(sums.slack_s),
            "left": rounded(sums.left),
            "load": rounded(sums.load_now),
            "grade": sums.grade,
            "cut_in_s": rounded(sums.cut_in_s),
            **({"shed_s": rounded(sums.shed_s)} if sums.shed_s else {}),
            **({} if sums.own is None else {"own_w": rounded(sums.own.watts), "own_from": sums.own.source.value}),
        }


def move(turn: Turn, decision: Decision) -> None:
    """Change the phase, and log the decision with it."""
    old, cause, because = turn.state.phase, decision.cause, decision.because
    target = TABLE[type(old), cause]
    notes_before = len(turn.notes)
    _leave(turn, cause, because)
    turn.set_phase(_enter(turn, old, target, decision))
    # The notes keep their order: the move first, then what followed from it.
    consequences, turn.notes[notes_before:] = turn.notes[notes_before:], []
    if cause is Cause.POWER_LOST:
        unseen.note_return(turn)
    elif isinstance(old, Online):
        turn.open_outage(because)
        if not _is_by_sums(decision):  # A witness or a flag decided: logged are the first sums of the outage.
            decision = replace(decision, sums=turn.budget())
    turn.note(
        "phase_changed",
        because,
        Level.INFO if target is Online else Level.WARNING,
        **{"old": phase_name(old), "new": phase_name(target), "cause": cause.value, **decision.logged()},
    )
    turn.notes.extend(consequences)
    if target is Online:
        turn.close_outage(old, because)
        rehearsal.end_of_outage(turn, because)
        least_load = 0.0 if isinstance(old, Online) else old.outage.load_at_start or 0.0
        if not conditions.gate_open(turn.policy, turn.state, turn.now_s, least_load=least_load):
            turn.update(guarded_since_s=turn.now_s)
            turn.note("guard_started", "a second outage now would leave no time for a full stop", Level.WARNING)


def _is_by_sums(decision: Decision) -> bool:
    """Say whether an outage begins because of sums: a calibration has left too little. Its stop is that of the sums."""
    return decision.cause is Cause.CALIBRATION_LOW and decision.because != "low_battery"


def _leave(turn: Turn, cause: Cause, because: str) -> None:
    """What is undone on the way out."""
    if cause is Cause.COMMIT:
        gate.clear(turn, "the host powers off again and is checked again when it is back")
    if cause in _RESUMES:
        lifecycle.resume_all(turn)
    if cause is Cause.ABORTED:
        turn.set_outage(aborted_by=because)


def _enter(turn: Turn, old: Phase, target: type[Phase], decision: Decision) -> Phase:
    """Return the new phase and order what it begins with."""
    because = decision.because
    if target is Online or isinstance(old, Online):
        lifecycle.forget_outage(turn, resumed=decision.cause in _RESUMES)
    if decision.cause is Cause.RESUMED and isinstance(old, Recovery) and old.started_at_s is not None:
        lifecycle.owe_first_trainer(turn, old.outage.id)
    if isinstance(old, Online):
        rehearsal.interrupt(turn, because)
    if target is Online:
        return Online()
    outage = _new_outage(turn, decision) if isinstance(old, Online) else old.outage
    if decision.cause is Cause.POWER_LOST:
        scheduler.rebooted(turn)
        return unseen.returned(turn, outage)
    if target is OnBattery:
        return OnBattery(outage=replace(outage, aborted_by=turn.aborted_by(outage)))
    if target is Shutdown:
        return _latch(turn, outage, decision)
    began_s = turn.now_s
    if target is Holding and isinstance(old, EmergencyCheckpoint):
        return Holding(
            outage=outage,
            began_s=began_s,
            paused_load=old.paused_load,
            settle_by_s=old.settle_by_s,
            paused_at_s=old.paused_at_s,
            due_at_s=old.due_at_s,
            own_drop=old.own_drop,
            own=old.own,
        )
    turn.set_phase(EmergencyCheckpoint(outage=outage, began_s=began_s, because=because))
    if budget.power_off_at_s(turn.state.feed) is not None:
        turn.regrade()
    load = account.load_of(turn.state.battery)
    host_load = own.own_load(turn.policy, turn.state, turn.now_s)
    predicted = budget.paused_load(turn.policy, turn.state.trainers, load, turn.state.learned, own=host_load)
    share = 0.0 if host_load is None or host_load.load <= 0.0 else (load - predicted) / host_load.load
    before = () if host_load is None else own.before_pause(turn.policy, turn.state, turn.now_s, share)
    slowest_s = max((t.step_s for t in turn.state.trainers if t.alive), default=0.0)
    lifecycle.order_emergency(turn, by_s=turn.now_s + lifecycle.order_limit_s(turn))
    return EmergencyCheckpoint(
        outage=turn.outage or outage,
        began_s=began_s,
        because=because,
        paused_load=predicted if predicted < load else None,
        settle_by_s=began_s + max(2 * slowest_s + 15.0, 45.0),
        own_drop=None if host_load is None else load - predicted,
        own=before,
    )


def _new_outage(turn: Turn, decision: Decision) -> Outage:
    feed, sums = turn.state.feed, decision.sums
    if not _is_by_sums(decision):
        sums = conditions.budget_now(turn.policy, turn.state, turn.now_s)
    since_s = feed.since_s if feed.supply is Supply.BATTERY else turn.now_s
    return Outage(
        id=f"{turn.policy.boot_id[:8]}-{max(0, int(turn.now_s * 10))}",
        since_s=since_s,
        grade=sums.grade,
        mode=turn.policy.mode,
        load_at_start=rehearsal.load_at_start(turn),
    )


def _latch(turn: Turn, outage: Outage, decision: Decision) -> Shutdown:
    """The commit point. The return is armed and the disks are synced first, both bounded; then the power-off."""
    policy = turn.policy
    # A load that never fell, a gauge that jumped: what was chosen when there was more time may not fit any more.
    reff_s, low_at_s = decision.sums.reff_s, turn.state.feed.low_battery_at_s
    if reff_s is not None and any(t.alive and t.pause_ordered and not t.paused for t in turn.state.trainers):
        # A pause that is not confirmed may never come: the stop is chosen for the present load.
        reff_s = min(reff_s, decision.sums.reff_now_s or 0.0)
    if reff_s is None and low_at_s is not None:
        reff_s = max(0.0, policy.low_battery_s - (turn.now_s - low_at_s))  # Blind, but this much is known.
    grade = budget.grade_within(policy, reff_s, at_most=outage.grade)
    outage = methods.backed_off(turn, replace(outage, grade=grade))
    bare = grade is Grade.BARE
    prepare_s = min(policy.bmc_limit_s, 2.0) if bare else policy.bmc_limit_s
    turn.set_outage(grade=grade)  # The guard before a cut depends on it.
    stops_s = budget.stops_within_s(policy, turn.budget(), grade)
    ids = (
        *methods.ensure_policy(turn, outage.id, limit_s=prepare_s),
        turn.order(SyncFilesystems, limit_s=prepare_s, outage=outage.id),
        *lifecycle.leave_jobs(turn, outage.id, limit_s=prepare_s),
        *methods.arm(turn, outage, policy.methods, off_in_s=prepare_s + stops_s, limit_s=prepare_s),
    )
    return Shutdown(
        outage=outage,
        boot_id=policy.boot_id,
        latched_s=turn.now_s,
        stops_within_s=stops_s,
        because=decision.because,
        waiting=ids,
        prepare_by_s=turn.now_s + prepare_s + 0.25,
        again_at_s=turn.now_s + budget.stop_s(policy, grade) + OVERDUE_S,
    )


# --- Standing duties --------------------------------------------------------------------------------------------


def duties(turn: Turn) -> None:
    """What a phase does while it lasts."""
    obligations.reconcile(turn, saved_first=False)
    if turn.state.feed.lost_since_s is not None or turn.state.alarms:
        _report_silence(turn)
    phase = turn.state.phase
    if isinstance(phase, Online):
        _guard_calibration(turn)
        _guard(turn)
        _save_in_silence(turn)
    obligations.reconcile(turn, saved_first=True)
    match phase:
        case Online():
            turn.set_alarm("load_not_fallen", "the outage is over", holds=False)
            unseen.reconcile(turn)
            rehearsal.reconcile(turn)
        case OnBattery() | EmergencyCheckpoint() | Holding():
            if isinstance(phase, OnBattery):
                rehearsal.reconcile_in_outage(turn)
            waited_s = turn.now_s - phase.outage.since_s
            if not phase.outage.policy_asked and waited_s >= turn.policy.commit_dwell_s:
                turn.set_outage(policy_asked=True)
                methods.ensure_policy(turn, phase.outage.id, limit_s=turn.policy.bmc_limit_s)
                methods.check(turn)
            if isinstance(phase, OnBattery) and waited_s >= turn.policy.commit_dwell_s:
                lifecycle.take_precautions(turn, since_s=phase.outage.since_s)
            _reckon_lost(turn, phase)
            if isinstance(phase, Emergency):
                lifecycle.reconcile(turn, hold=isinstance(phase, Holding), repeat_s=GUARD_CHECKPOINT_S)
                turn.watch_load(phase)
            if isinstance(phase, Holding):
                lifecycle.learn_drop(turn, phase)
                turn.restore_grade()
        case Shutdown():
            _finish(turn, phase)
        case Recovery():
            gate.reconcile(turn, phase)
    _report_overdue(turn)


def _reckon_lost(turn: Turn, phase: OnBattery | Emergency) -> None:
    """The source is lost: the load to count with is the known power draw, not the last reading."""
    feed, battery = turn.state.feed, turn.state.battery
    if feed.lost_since_s is None or feed.supply is not Supply.BATTERY or battery.load is None:
        return
    load = _load_without_source(turn, phase, battery.load)
    if load != battery.load:
        turn.update(battery=replace(battery, load=load))


def _load_without_source(turn: Turn, phase: OnBattery | Emergency, reported: float) -> float:
    """Load to count with while the source is lost, as a share of the rating; reported: the last reported one.

    While training continues, at least its load when the outage began. Once every trainer has paused, the measured
    drop counts, with a quarter on top.
    """
    alive = [t for t in turn.state.trainers if t.alive]
    if alive and not any(t.paused or t.pause_ordered for t in alive):
        return reported if turn.state.cap is not None else max(reported, phase.outage.load_at_start or 0.0)
    pausing = [t for t in alive if t.conduct is not Conduct.CONTINUE]
    if isinstance(phase, OnBattery) or phase.paused_load is None or not pausing:
        return reported
    if all(t.paused and needs.drop_of(turn.state.learned, t.name) is not None for t in pausing):
        return min(reported, PAUSED_LOAD_GUARD * phase.paused_load)
    return reported


def _silent_since_s(turn: Turn) -> float | None:
    """Since when no source answers, if that is an alarm: the last report was utility and there is no other evidence."""
    feed = turn.state.feed
    lost_s = feed.lost_since_s
    if lost_s is None or feed.supply is not Supply.UTILITY:
        return None
    return lost_s if turn.now_s - lost_s >= DEADTIME_S else None


def _report_silence(turn: Turn) -> None:
    """Raise the alarm while online; an outage that begins in the silence ends it as well."""
    silent = _silent_since_s(turn) is not None
    if not silent and "ups_silent" not in turn.state.alarms:
        return
    over = (
        "a source answers again"
        if turn.state.feed.lost_since_s is None
        else "an outage has begun while no source answered"
    )
    turn.set_alarm(
        "ups_silent",
        f"no source has answered for {DEADTIME_S:.0f} s: an outage that begins now would not be seen; "
        "for an hour trainers save during training, if it costs little"
        if silent
        else over,
        holds=silent and (isinstance(turn.state.phase, Online) or "ups_silent" in turn.state.alarms),
        level=Level.ERROR,
    )


def _save_in_silence(turn: Turn) -> None:
    """No source answers: order a checkpoint whenever it costs little."""
    since_s = _silent_since_s(turn)
    busy = turn.state.drill is not None or turn.state.guarded_since_s is not None
    if since_s is not None and turn.now_s - since_s <= SILENCE_S and not busy:
        lifecycle.take_precautions(turn, since_s=since_s)


def _guard_calibration(turn: Turn) -> None:
    """A calibration has emptied the battery, with the input there: save, and go on training under guard.

    A pause would cost the rest of the calibration, often half an hour. An outage in it is rare, and pauses training.
    """
    state = turn.state
    if state.guarded_since_s is not None or not conditions.is_calibrating(state.feed):
        return
    if conditions.calibration_low(turn.policy, state, turn.budget(), turn.now_s):
        turn.update(guarded_since_s=turn.now_s)
        turn.note("guard_started", "a calibration has left too little for an outage", Level.WARNING)
        lifecycle.order_all(turn, reason=lifecycle.ON_BATTERY, by_s=turn.now_s + CALIBRATION_CHECKPOINT_S)


def _guard(turn: Turn) -> None:
    """After a return or a calibration, below the charge gate: train on, with a checkpoint whenever it is cheap."""
    since_s = turn.state.guarded_since_s
    if since_s is None:
        return
    # Only when training draws its power again does the load show what a second outage would be like.
    is_over = turn.now_s - since_s >= GUARD_LEAST_S and not fusion.is_draining(turn.state.feed)
    if is_over and conditions.gate_open(turn.policy, turn.state, turn.now_s):
        turn.update(guarded_since_s=None)
        turn.note("guard_ended", "a second outage would leave time for a full stop again")
    else:
        lifecycle.take_precautions(turn, since_s=since_s, stood_until_s=since_s)


def _finish(turn: Turn, phase: Shutdown) -> None:
    """Order the power-off once its preparations are done or out of time, and again if the host survives it."""
    policy, grade = turn.policy, phase.outage.grade
    first = not phase.force_at_s and (not phase.waiting or turn.now_s >= phase.prepare_by_s)
    is_rehearsed = phase.ordered and not policy.powers_off
    again = bool(phase.force_at_s) and turn.now_s >= phase.again_at_s and not is_rehearsed
    latest_s, ends = _latest_off(turn, grade, phase.force_at_s)
    sooner = not is_rehearsed and turn.now_s < phase.force_at_s and latest_s < phase.force_at_s - _WORTH_ORDERING_S
    if not (first or again or sooner) or phase.boot_id != policy.boot_id:
        return
    deadline_s = phase.latched_s + budget.stop_s(policy, grade, reserve_s=0.0)
    least_s = budget.force_after_s(policy, Grade.BARE)
    stops_s = phase.stops_within_s or budget.force_after_s(policy, grade)
    if first:
        force_s = max(least_s, min(phase.latched_s + stops_s, latest_s) - turn.now_s)
    else:
        force_s = max(0.0, min(phase.force_at_s, latest_s) - turn.now_s)
    if sooner and not again:
        turn.note("power_off_hastened", ends, Level.WARNING, force_after_s=force_s)
    elif again:
        level = Level.ERROR if turn.now_s > deadline_s else Level.WARNING
        turn.note("power_off_repeated", "the host is still alive", level, force_after_s=force_s)
    else:
        because = (
            "all preparations are done"
            if not phase.waiting
            else "continuing without the preparations that did not finish"
        )
        turn.note("power_off_ordered", because, Level.WARNING, force_after_s=force_s, grade=grade)
    turn.order(PowerOff, limit_s=RETRY_S, outage=phase.outage.id, grade=grade, force_after_s=force_s)
    turn.set_phase(
        replace(
            phase,
            waiting=(),
            force_at_s=min(phase.force_at_s or math.inf, turn.now_s + force_s),
            again_at_s=turn.now_s + (AGAIN_S if again else force_s + OVERDUE_S),
        )
    )


def _report_overdue(turn: Turn) -> None:
    """Raise an alarm if the host still runs after its forced power-off was due."""
    phase, because = turn.state.phase, ""
    if isinstance(phase, Shutdown) and phase.force_at_s and (turn.policy.powers_off or not phase.ordered):
        late_s = turn.now_s - phase.force_at_s
        if late_s >= OVERDUE_S:
            who = "the power-off was accepted" if phase.ordered else "no power-off was accepted"
            because = f"{who}, and the host still runs {late_s:.0f} s after its forced power-off was due; ordered again"
    over = because or "the host is not to be powered off any more"
    turn.set_alarm("power_off_overdue", over, holds=bool(because), level=Level.ERROR)


def _latest_off(turn: Turn, grade: Grade, force_at_s: float) -> tuple[float, str]:
    """When the host must be off at the latest, and why; infinity without new information. force_at_s: as ordered.

    After the latch, too, a countdown may begin, or a gauge fall off its cliff: an orderly stop that the power does not
    outlive is worth less than a hard one in time. A bare stop has what the power left when it began, and keeps what it
    kept then; its last seconds cannot be hastened.
    """
    guard_s, after_s = budget.CUT_GUARD_S, turn.policy.bare_stop_s
    if grade is Grade.BARE:
        guard_s = after_s = budget.after_force_s(turn.policy)
        if force_at_s - turn.now_s <= budget.force_after_s(turn.policy, grade):
            return math.inf, ""
    cut_at_s = budget.power_off_at_s(turn.state.feed)
    latest_s, ends = (math.inf, "") if cut_at_s is None else (cut_at_s - guard_s, _CUT_SOONER)
    now = turn.budget()
    if turn.state.feed.supply is Supply.BATTERY and now.left is not None and now.tau_now_s is not None:
        # Without margins: they were for the stop that is under way.
        empty_at_s = turn.now_s + now.left * now.tau_now_s - after_s
        if empty_at_s < latest_s:
            return empty_at_s, _EMPTY_SOONER
    return latest_s, ends
