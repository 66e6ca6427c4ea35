"""step(policy, state, event) -> (state, actions, notes): the one place where powerguard decides.

Theory. An event is entered into what we know (`fusion`, `budget`, `trainers`); then the conditions of `plan` are asked,
in the order of the rules below, until none of them moves the phase any more; then the phase does its standing duties.
A condition names a *cause*; `TABLE` says where that cause leads; `_enter` says what is ordered on the way in. Nothing
else changes the phase. The picture in docs/ARCHITECTURE.md is drawn from `TABLE`.

- Before the commit everything can be undone by utility; after it, nothing can, in this boot.
- Every phase of an outage carries the same `Outage`; every action carries its id.
- Total: every event has an answer in every phase, and `step` never raises.
"""

import math
from dataclasses import replace
from enum import StrEnum

from powerguard.core import budget as sums
from powerguard.core import fusion, plan, trainers
from powerguard.core.model import (
    Abort,
    CheckpointNow,
    CheckpointProgress,
    Conduct,
    Done,
    EmergencyCheckpoint,
    EnsurePolicy,
    Event,
    Failed,
    ForeignStop,
    Grade,
    Holding,
    Level,
    Maintenance,
    OnBattery,
    Online,
    Outage,
    OutputSource,
    Phase,
    Policy,
    PollNow,
    PowerOff,
    Reading,
    Recovery,
    ResumeTraining,
    SetMaintenance,
    Shutdown,
    SourceFailed,
    State,
    Step,
    Supply,
    SyncFilesystems,
    Tick,
    TrainerSeen,
    TriggerCheckpoint,
)
from powerguard.core.turn import Turn

FLAPPING_S = 300.0
FLAPPING_TRANSFERS = 3
"""Three transfers to battery in five minutes: utility must be stable three times as long."""
AGAIN_S = 300.0
"""Still alive this long after the host should have been off: order the power-off again, at once this time."""
RETRY_S = 5.0
GUARD_CHECKPOINT_S = 60.0
"""Below the charge gate, and while a trainer trains on through a hold: a checkpoint this often."""
RESUME_TRIES = 3
LATEST_S = 1e10
"""No clock of ours says more: three hundred years after the boot."""
LONGEST_MAINTENANCE_S = 30 * 86400.0
_WORTH_TELLING_S = 1.0
_MOVES = 6


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
    REHEARSED = "utility back after a power-off that was only recorded"


TABLE: dict[tuple[type[Phase], Cause], type[Phase]] = {
    (Online, Cause.BATTERY): OnBattery,
    (Online, Cause.POWER_OFF_ORDERED): EmergencyCheckpoint,
    (Online, Cause.CALIBRATION_LOW): EmergencyCheckpoint,
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
"""Every move there is. NEXT_BOOT is made by `recovery.restore`, when the daemon starts; all others by `step`."""

_NAMES: dict[type[Phase], str] = {
    Online: "online",
    OnBattery: "on_battery",
    EmergencyCheckpoint: "emergency_checkpoint",
    Holding: "holding",
    Shutdown: "shutdown",
    Recovery: "recovery",
}


def phase_name(phase: Phase | type[Phase]) -> str:
    """Return the phase's word in status, metric and log."""
    return _NAMES[phase if isinstance(phase, type) else type(phase)]


def step(policy: Policy, state: State, event: Event) -> Step:
    """Answer one event. Same state and event, same answer. Never raises."""
    if not -LATEST_S <= event.at_s <= LATEST_S:
        return Step(state)  # Not a time (NaN compares false): whatever it says, nobody knows of when.
    if isinstance(event, Reading):
        event = fusion.plausible(event)
    if isinstance(event, Reading):
        if isinstance(state.phase, Online) and (quick := _quick(policy, state, event)) is not None:
            return quick
    elif isinstance(event, Tick) and isinstance(state.phase, Online) and _is_idle(state):
        return Step(state)
    turn = Turn(policy, state, event.at_s)
    _take_in(turn, event)
    for _ in range(_MOVES):
        cause, because = _cause(turn, event)
        if cause is None:
            break
        _move(turn, cause, because)
    _duties(turn)
    return turn.step()


def _is_idle(state: State) -> bool:
    return state.maintenance is None and state.rearm_checkpoint_at_s is None and state.feed.countdown_at_s is None


def _quick(policy: Policy, state: State, reading: Reading) -> Step | None:
    """Utility as ever, nothing pending: once a second for years, so it is worth a short way."""
    battery, last = state.battery, state.feed.reading
    if (
        reading.at_s - battery.at_s >= sums.UTILITY_ACCOUNT_S
        or last is None
        or reading.charge_pct != last.charge_pct
        or state.rearm_checkpoint_at_s is not None
        or state.maintenance is not None
        or state.told
        or battery.used is None
        or reading.output_source is not last.output_source
        or reading.replace_battery
        or reading.overload
        or reading.low_battery
    ):
        return None
    feed = fusion.observe(policy, state.feed, reading)
    if feed.supply is not Supply.UTILITY or feed.suspect or feed.test_since_s is not None:
        return None
    if feed.countdown_at_s is not None or feed.fsd_at_s is not None or feed.fsd_at_first:
        return None
    return Step(
        State(
            phase=state.phase,
            feed=feed,
            battery=battery,
            trainers=state.trainers,
            transfers=state.transfers,
            serial=state.serial,
        )
    )


# --- Taking in --------------------------------------------------------------------------------------------------


def _take_in(turn: Turn, event: Event) -> None:
    match event:
        case Reading():
            _take_in_reading(turn, event)
        case SourceFailed():
            _take_in_failure(turn, event)
        case TrainerSeen() | CheckpointProgress():
            trainers.take_in(turn, event)
        case Done() | Failed():
            _take_in_outcome(turn, event)
        case SetMaintenance():
            active = event.until_s > event.at_s
            until_s = min(event.until_s, event.at_s + LONGEST_MAINTENANCE_S)
            turn.update(
                maintenance=Maintenance(until_s=until_s, reason=event.reason, who=event.who) if active else None
            )
            turn.note("maintenance_set" if active else "maintenance_ended", event.reason or "operator", who=event.who)
        case CheckpointNow():
            turn.note("checkpoint_requested", "operator", who=event.who)
            trainers.order_all(turn, reason="operator", after=Conduct.CONTINUE, by_s=turn.now_s + 600.0)
        case ForeignStop():
            _take_in_foreign_stop(turn, event)
        case Abort():
            _take_in_abort(turn, event)
        case Tick():
            pass
    maintenance = turn.state.maintenance
    if maintenance is not None and turn.now_s >= maintenance.until_s:
        turn.update(maintenance=None)
        turn.note("maintenance_ended", "expired", who=maintenance.who)
    if not isinstance(event, Reading) and turn.state.feed.supply is Supply.BATTERY:
        turn.update(battery=sums.advance(turn.policy, turn.state.battery, turn.now_s, draining=True))


def _take_in_reading(turn: Turn, reading: Reading) -> None:
    old = turn.state.feed
    feed = fusion.observe(turn.policy, old, reading)
    if feed is old:
        return
    draining = fusion.is_draining(feed)
    drained = draining or fusion.is_draining(old)
    battery = sums.account(turn.policy, turn.state.battery, feed, reading, draining=draining, drained=drained)
    turn.update(feed=feed, battery=battery)
    if feed.supply is Supply.BATTERY and old.supply is not Supply.BATTERY:
        turn.count_transfer()
    if old.lost_since_s is not None:
        turn.note("source_recovered", f"{reading.source} answers", lost_s=turn.now_s - old.lost_since_s)
    if feed.suspect:
        # The only thing that one unconfirmed reading may cause.
        turn.order(PollNow, limit_s=2.0, ups=reading.ups)
    if feed.low_battery_at_s is not None and old.low_battery_at_s is None:
        turn.note("battery_low", "two readings", Level.WARNING, runtime_s=reading.runtime_s)
        turn.regrade()
    if sums.power_off_at_s(feed) is not None and sums.power_off_at_s(old) is None:
        turn.regrade()
    elif sums.power_off_at_s(feed) is None and sums.power_off_at_s(old) is not None:
        turn.note("power_off_cancelled", "the countdown was read back as cancelled")
    turn.standing_alarms(reading)


def _take_in_failure(turn: Turn, failure: SourceFailed) -> None:
    old = turn.state.feed
    feed = fusion.lose(turn.policy, old, failure)
    if feed is old:
        return
    turn.update(feed=feed)
    on_battery = feed.supply is Supply.BATTERY
    turn.note(
        "source_lost",
        failure.reason,
        Level.ERROR,
        source=failure.source,
        conduct="dead reckoning from the last reading" if on_battery else "alarm; no action on utility",
    )


def _take_in_outcome(turn: Turn, outcome: Done | Failed) -> None:
    action, phase = outcome.action, turn.state.phase
    if isinstance(outcome, Failed):
        # A poll that brings nothing is told by the source itself.
        if not isinstance(action, PollNow):
            kind = type(action).__name__
            turn.note("action_failed", outcome.reason, Level.ERROR, action=kind, took_s=outcome.took_s)
    elif isinstance(action, EnsurePolicy) and not isinstance(phase, Online):
        verified = dict(outcome.detail).get("verified") is True
        turn.set_outage(policy_verified=verified)
        turn.note("policy_verified", "read back from the BMC", Level.INFO, **dict(outcome.detail))
    if isinstance(action, TriggerCheckpoint):
        trainers.take_in(turn, outcome)
    phase = turn.state.phase
    if isinstance(phase, Shutdown):
        waiting = tuple(id_ for id_ in phase.waiting if id_ != action.id)
        changes: dict[str, object] = {"waiting": waiting}
        if isinstance(action, PowerOff):
            changes["ordered"] = isinstance(outcome, Done)
            if isinstance(outcome, Done):
                turn.note("power_off_accepted", "told by the host effector", Level.WARNING, **dict(outcome.detail))
            if isinstance(outcome, Failed):
                changes["again_at_s"] = turn.now_s + RETRY_S
        turn.set_phase(replace(phase, **changes))  # type: ignore[arg-type]
    elif isinstance(phase, Recovery) and isinstance(action, ResumeTraining) and action.id == phase.asked:
        if isinstance(outcome, Done):
            turn.resumed = True
        else:
            turn.set_phase(replace(phase, asked=None, retry_at_s=turn.now_s + 6 * RETRY_S))


def _take_in_abort(turn: Turn, event: Abort) -> None:
    """Where nothing has to be undone, the outage only remembers it; else the move to on_battery does."""
    if isinstance(turn.state.phase, OnBattery | Recovery):
        turn.set_outage(aborted_by=_told_by(event))
        turn.note("shutdown_aborted", _told_by(event), Level.WARNING, who=event.who)


def _told_by(event: Abort) -> str:
    return f"{event.who}: {event.reason}" if event.reason else event.who


def _take_in_foreign_stop(turn: Turn, event: ForeignStop) -> None:
    if isinstance(turn.state.phase, Online | Shutdown):
        return
    what = "the host is being shut down by somebody else" if event.host_stopping else "the daemon is being stopped"
    turn.note("foreign_stop_seen", what, Level.WARNING, phase=phase_name(turn.state.phase))
    # Whoever ordered it, the host must come back: the return is armed while there still is time.
    turn.order(EnsurePolicy, limit_s=turn.policy.bmc_limit_s, outage=turn.outage_id)


# --- Deciding ---------------------------------------------------------------------------------------------------


def _cause(turn: Turn, event: Event) -> tuple[Cause | None, str]:
    """Return the first cause that ends this phase now, and why it holds."""
    match turn.state.phase:
        case Online():
            return _cause_online(turn)
        case OnBattery():
            return _cause_on_battery(turn)
        case EmergencyCheckpoint() | Holding():
            return _cause_emergency(turn, event)
        case Recovery():
            return (Cause.RESUMED, "training was started") if turn.resumed else _cause_commit(turn)
        case Shutdown():
            if not turn.policy.powers_off and turn.state.phase.ordered and _may_return(turn):
                return Cause.REHEARSED, "dry-run: nothing was powered off"
            return None, ""


def _cause_on_battery(turn: Turn) -> tuple[Cause | None, str]:
    policy, state, now_s = turn.policy, turn.state, turn.now_s
    feed = state.feed
    if sums.power_off_at_s(feed) is None and feed.supply is Supply.UTILITY and fusion.is_fresh(policy, feed, now_s):
        return Cause.UTILITY_BACK, "utility back before anything had to be done"
    if turn.outage is not None and turn.outage.aborted_by:
        return None, ""
    because = plan.checkpoint_due(policy, state, plan.outage_budget(policy, state, now_s), now_s)
    return (Cause.CHECKPOINT_NEEDED, because) if because else (None, "")


def _cause_emergency(turn: Turn, event: Event) -> tuple[Cause | None, str]:
    state = turn.state
    if isinstance(event, Abort):
        return Cause.ABORTED, _told_by(event)
    if _may_return(turn):
        return Cause.UTILITY_STABLE, f"utility stable for {turn.now_s - state.feed.since_s:.0f} s"
    if isinstance(state.phase, EmergencyCheckpoint) and trainers.all_settled(state.trainers):
        return Cause.CHECKPOINT_DURABLE, trainers.settled_because(state.trainers)
    return _cause_commit(turn)


def _cause_online(turn: Turn) -> tuple[Cause | None, str]:
    policy, state, now_s = turn.policy, turn.state, turn.now_s
    feed = state.feed
    if feed.supply is Supply.BATTERY:
        return Cause.BATTERY, fusion.supports_battery(feed.reading) or "second_reading" if feed.reading else "battery"
    if sums.power_off_at_s(feed) is not None:
        return Cause.POWER_OFF_ORDERED, "countdown" if feed.countdown_at_s is not None else "fsd"
    if feed.reading is not None and feed.reading.calibrating and feed.reading.output_source is OutputSource.BATTERY:
        because = plan.checkpoint_due(policy, state, plan.outage_budget(policy, state, now_s), now_s)
        if because and because != "blind":
            return Cause.CALIBRATION_LOW, because
    return None, ""


def _may_return(turn: Turn) -> bool:
    """Utility has been stable long enough, no countdown stands, and no write is torn off."""
    state = turn.state
    if sums.power_off_at_s(state.feed) is not None:
        return False
    stable_s = turn.policy.utility_stable_s * (3 if turn.is_flapping(FLAPPING_S, FLAPPING_TRANSFERS) else 1)
    if not fusion.is_stable(turn.policy, state.feed, turn.now_s, stable_s=stable_s):
        return False
    return not trainers.is_writing(state.trainers, turn.now_s)


def _cause_commit(turn: Turn) -> tuple[Cause | None, str]:
    """Two looks at the commit: the test comes true, one more poll is ordered, and only its answer latches."""
    phase = turn.state.phase
    sums_now = plan.outage_budget(turn.policy, turn.state, turn.now_s)
    if not isinstance(phase, EmergencyCheckpoint | Holding | Recovery):
        return None, ""
    because = plan.commit_due(turn.policy, turn.state, sums_now, turn.now_s)
    if not because:
        if phase.due_at_s is not None:
            turn.set_phase(replace(phase, due_at_s=None))
            turn.note("commit_withdrawn", "the test no longer holds", reff_s=sums_now.reff_s, stop_s=sums_now.stop_s)
        return None, ""
    if phase.due_at_s is None:
        turn.set_phase(replace(phase, due_at_s=turn.now_s))
        turn.order(PollNow, limit_s=2.0, ups=turn.policy.ups)
        return None, ""
    if plan.may_latch(turn.policy, turn.state, sums_now, phase.due_at_s, turn.now_s):
        return Cause.COMMIT, because
    return None, ""


# --- Moving -----------------------------------------------------------------------------------------------------


def _move(turn: Turn, cause: Cause, because: str) -> None:
    old = turn.state.phase
    target = TABLE[type(old), cause]
    told = len(turn.notes)
    _leave(turn, cause, because)
    turn.set_phase(_enter(turn, old, target, because))
    # The story is told in its own order: the move first, then what it brought about.
    consequences, turn.notes[told:] = turn.notes[told:], []
    if isinstance(old, Online):
        turn.open_outage(because)
    turn.note(
        "phase_changed",
        because,
        Level.INFO if target is Online else Level.WARNING,
        **{"old": phase_name(old), "new": phase_name(target), "cause": cause.value, **turn.numbers()},
    )
    turn.notes.extend(consequences)
    if target is Online:
        turn.close_outage(old, because)
        if not plan.gate_open(turn.policy, turn.state, turn.now_s):
            turn.update(rearm_checkpoint_at_s=turn.now_s + GUARD_CHECKPOINT_S)
            turn.note("guard_started", "the charge would not survive a second outage", Level.WARNING)


def _leave(turn: Turn, cause: Cause, because: str) -> None:
    """What is undone on the way out."""
    if cause in (Cause.UTILITY_STABLE, Cause.ABORTED, Cause.REHEARSED):
        trainers.resume_all(turn)
    if cause is Cause.ABORTED:
        turn.set_outage(aborted_by=because)


def _enter(turn: Turn, old: Phase, target: type[Phase], because: str) -> Phase:
    """Return the new phase and order what it begins with."""
    if target is Online or isinstance(old, Online):
        trainers.forget_outage(turn)
    if target is Online:
        return Online()
    outage = _new_outage(turn) if isinstance(old, Online) else old.outage
    if target is OnBattery:
        return OnBattery(outage=replace(outage, aborted_by=turn.aborted_by(outage)))
    if target is Shutdown:
        return _latch(turn, outage, because)
    began_s = turn.now_s
    if target is Holding and isinstance(old, EmergencyCheckpoint):
        return Holding(
            outage=outage,
            began_s=began_s,
            paused_load=old.paused_load,
            settle_by_s=old.settle_by_s,
            due_at_s=old.due_at_s,
        )
    turn.set_phase(EmergencyCheckpoint(outage=outage, began_s=began_s, because=because))
    if sums.power_off_at_s(turn.state.feed) is not None:
        turn.regrade()
    load = sums.load_of(turn.state.battery)
    predicted = sums.paused_load(turn.policy, turn.state.trainers, load)
    slowest_s = max((t.step_s for t in turn.state.trainers if t.alive), default=0.0)
    limit_s = trainers.order_limit_s(turn, plan.outage_budget(turn.policy, turn.state, turn.now_s))
    trainers.order_all(turn, reason="on_battery", after=None, by_s=turn.now_s + limit_s)
    return EmergencyCheckpoint(
        outage=turn.outage or outage,
        began_s=began_s,
        because=because,
        paused_load=predicted if predicted < load else None,
        settle_by_s=began_s + max(2 * slowest_s + 15.0, 45.0),
    )


def _new_outage(turn: Turn) -> Outage:
    feed = turn.state.feed
    since_s = feed.since_s if feed.supply is Supply.BATTERY else turn.now_s
    sums_now = plan.outage_budget(turn.policy, turn.state, turn.now_s)
    full = sums_now.grade
    if sums_now.left is not None and sums_now.tau_paused_s is not None:
        full = sums.choose_grade(
            turn.policy,
            left=sums_now.left,
            tau_paused_s=sums_now.tau_paused_s,
            checkpoint=sums_now.checkpoint_s,
            at_most=full,
        )
    return Outage(
        id=f"{turn.policy.boot_id[:8]}-{max(0, int(turn.now_s * 10))}",
        since_s=since_s,
        grade=full,
        load_at_start=turn.state.battery.load,
        charge_at_start_pct=None if feed.reading is None else feed.reading.charge_pct,
    )


def _latch(turn: Turn, outage: Outage, because: str) -> Shutdown:
    """The commit point. The return is armed and the disks are synced first, both bounded; then the power-off."""
    policy = turn.policy
    # A load that never fell, a gauge that jumped: what was chosen when there was more time may not fit any more.
    sums_now = plan.outage_budget(policy, turn.state, turn.now_s)
    reff_s, low_at_s = sums_now.reff_s, turn.state.feed.low_battery_at_s
    if reff_s is None and low_at_s is not None:
        reff_s = max(0.0, policy.low_battery_s - (turn.now_s - low_at_s))  # Blind, but this much is known.
    grade = sums.grade_within(policy, reff_s, at_most=outage.grade)
    outage = replace(outage, grade=grade)
    bare = grade is Grade.BARE
    prepare_s = min(policy.bmc_limit_s, 2.0) if bare else policy.bmc_limit_s
    ids = (
        turn.order(EnsurePolicy, limit_s=prepare_s, outage=outage.id),
        turn.order(SyncFilesystems, limit_s=prepare_s, outage=outage.id),
    )
    return Shutdown(
        outage=outage,
        boot_id=policy.boot_id,
        latched_s=turn.now_s,
        because=because,
        waiting=ids,
        prepare_by_s=turn.now_s + prepare_s + 0.25,
        again_at_s=turn.now_s + sums.stop_s(policy, grade) + AGAIN_S,
    )


# --- Standing duties --------------------------------------------------------------------------------------------


def _duties(turn: Turn) -> None:
    """What a phase does while it lasts."""
    phase = turn.state.phase
    match phase:
        case Online():
            _guard(turn)
        case OnBattery() | EmergencyCheckpoint() | Holding():
            waited_s = turn.now_s - phase.outage.since_s
            if not phase.outage.policy_asked and waited_s >= turn.policy.commit_dwell_s:
                turn.set_outage(policy_asked=True)
                turn.order(EnsurePolicy, limit_s=turn.policy.bmc_limit_s, outage=phase.outage.id)
            phase = turn.state.phase
            if isinstance(phase, EmergencyCheckpoint | Holding):
                trainers.tend(turn, hold=isinstance(phase, Holding), repeat_s=GUARD_CHECKPOINT_S)
                turn.watch_load(phase)
        case Shutdown():
            _finish(turn, phase)
        case Recovery():
            _resume(turn, phase)


def _guard(turn: Turn) -> None:
    """After a return in place below the charge gate: train on, with a checkpoint every minute."""
    due_s = turn.state.rearm_checkpoint_at_s
    if due_s is None:
        return
    if plan.gate_open(turn.policy, turn.state, turn.now_s):
        turn.update(rearm_checkpoint_at_s=None)
        turn.note("guard_ended", "the charge survives a second outage")
    elif turn.now_s >= due_s:
        turn.update(rearm_checkpoint_at_s=turn.now_s + GUARD_CHECKPOINT_S)
        trainers.order_all(turn, reason="on_battery", after=Conduct.CONTINUE, by_s=turn.now_s + GUARD_CHECKPOINT_S)


def _finish(turn: Turn, phase: Shutdown) -> None:
    """Order the power-off once everything before it is done or out of time, and again should the host survive it."""
    policy, grade = turn.policy, phase.outage.grade
    first = not phase.force_at_s and (not phase.waiting or turn.now_s >= phase.prepare_by_s)
    is_rehearsed = phase.ordered and not policy.powers_off
    again = bool(phase.force_at_s) and turn.now_s >= phase.again_at_s and not is_rehearsed
    # A countdown is as hard as an empty battery, also one that begins after the latch.
    cut_at_s = sums.power_off_at_s(turn.state.feed)
    latest_s = math.inf if cut_at_s is None or grade is Grade.BARE else cut_at_s - sums.CUT_GUARD_S
    sooner = not is_rehearsed and turn.now_s < phase.force_at_s and latest_s < phase.force_at_s - _WORTH_TELLING_S
    if not (first or again or sooner) or phase.boot_id != policy.boot_id:
        return
    deadline_s = phase.latched_s + sums.stop_s(policy, grade, reserve_s=0.0)
    least_s = sums.force_after_s(policy, Grade.BARE)
    if first:
        force_s = max(least_s, min(phase.latched_s + sums.force_after_s(policy, grade), latest_s) - turn.now_s)
    else:
        force_s = max(0.0, min(phase.force_at_s, latest_s) - turn.now_s)
    if sooner and not again:
        turn.note("power_off_hastened", "the UPS cuts its output sooner", Level.WARNING, force_after_s=force_s)
    elif again:
        level = Level.ERROR if turn.now_s > deadline_s else Level.WARNING
        turn.note("power_off_repeated", "the host is still alive", level, force_after_s=force_s)
    else:
        because = "everything before it is done" if not phase.waiting else "what is not done by now is left"
        turn.note("power_off_ordered", because, Level.WARNING, force_after_s=force_s, grade=grade)
    turn.order(PowerOff, limit_s=RETRY_S, outage=phase.outage.id, grade=grade, force_after_s=force_s)
    turn.set_phase(
        replace(
            phase,
            waiting=(),
            force_at_s=min(phase.force_at_s or math.inf, turn.now_s + force_s),
            again_at_s=max(phase.latched_s + sums.stop_s(policy, grade), turn.now_s) + AGAIN_S,
        )
    )


def _resume(turn: Turn, phase: Recovery) -> None:
    """At boot: train again when utility is stable and the charge survives a second outage."""
    if phase.asked is not None or turn.now_s < phase.retry_at_s:
        return
    state, policy = turn.state, turn.policy
    stable = fusion.is_stable(policy, state.feed, turn.now_s, stable_s=policy.utility_stable_s)
    because = ""
    if stable and sums.power_off_at_s(state.feed) is None:
        because = plan.gate_open(policy, state, turn.now_s)
    elif state.feed.supply is Supply.UNKNOWN or not fusion.is_fresh(policy, state.feed, turn.now_s):
        held_s = turn.now_s - max(phase.began_s, state.feed.lost_since_s or phase.began_s)
        if state.feed.supply is not Supply.BATTERY and held_s >= policy.unknown_hold_s:
            because = "the UPS has not answered for long; a blind gate must not stop training for ever"
            turn.note("gate_forced", because, Level.ERROR)
    if not because:
        return
    if phase.tries >= RESUME_TRIES:
        turn.note("resume_failed", "training could not be started", Level.ERROR, tries=phase.tries)
        _move(turn, Cause.RESUMED, "gave up; a person must start training")
        return
    id_ = turn.order(ResumeTraining, limit_s=30.0, outage=phase.outage.id)
    turn.set_phase(replace(phase, asked=id_, tries=phase.tries + 1))
    turn.note("gate_opened", because)
