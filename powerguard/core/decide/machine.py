"""step(policy, state, event) -> (state, actions, notes): the one place where powerguard decides.

Theory. First `step` enters the event into what is known (`supply/`, `energy/`, `trainers/`; an outcome by
`_handle_outcome`). Then it asks the rules below in their order, which use `conditions`, until none of them moves the
phase any more. Then the phase does its standing duties (`transitions.duties`). A rule names a *cause*; `TABLE` says
where that cause leads; `transitions.move` gives the orders. No other code changes the phase. The picture in
docs/ARCHITECTURE.md is drawn from `TABLE`.

- Before the commit, the return of utility undoes everything; after it, the power-off is final in this boot.
- Every phase of an outage carries the same `Outage`; every action of an outage carries its id.
- Total: every event has an answer in every phase, and `step` never raises.
"""

from dataclasses import replace

from powerguard.core import obligations
from powerguard.core.comeback import gate, methods, unseen
from powerguard.core.decide import alarms, conditions
from powerguard.core.decide.transitions import RETRY_S, Cause, Decision, duties, move
from powerguard.core.decide.turn import Turn
from powerguard.core.drill import rehearsal
from powerguard.core.energy import account, budget, needs, own
from powerguard.core.model import events
from powerguard.core.model.actions import (
    ArmPowerOn,
    CheckHost,
    CheckPowerOn,
    DisarmPowerOn,
    DrainNode,
    EnsurePolicy,
    LeaveNode,
    Level,
    PauseTrainer,
    PollNow,
    PowerOff,
    ReturnNode,
    SignalJobs,
    TriggerCheckpoint,
)
from powerguard.core.model.events import (
    Abort,
    BatteryReplaced,
    CheckpointNow,
    CheckpointProgress,
    Done,
    Event,
    Failed,
    ForeignStop,
    Measured,
    NetworkSeen,
    OwnLoad,
    PoweredOn,
    Reading,
    RecoverNow,
    SetMaintenance,
    SourceFailed,
    StartDrill,
    StopDrill,
    Tick,
    TrainerSeen,
)
from powerguard.core.model.policy import BatteryModel, Policy
from powerguard.core.model.state import (
    Battery,
    EmergencyCheckpoint,
    Holding,
    Maintenance,
    OnBattery,
    Online,
    Recovery,
    Shutdown,
    State,
    Step,
    Supply,
    phase_name,
)
from powerguard.core.supply import feeds, fusion, silence
from powerguard.core.trainers import lifecycle

FLAPPING_FACTOR = 3.0
"""A flapping utility must be stable this many times as long."""
WRONG = 0.05
"""What is left rises by more than this on battery only where readings before were wrong (share of a new battery)."""
LATEST_S = 1e10
"""Upper bound of the monotonic clock: three hundred years after the boot."""
LONGEST_MAINTENANCE_S = 30 * 86400.0
_BeforeCommit = EmergencyCheckpoint | Holding | Recovery
_REPORTED_ELSEWHERE = (
    PollNow | CheckPowerOn | ArmPowerOn | DisarmPowerOn | CheckHost | DrainNode | SignalJobs | LeaveNode | ReturnNode
)
"""Actions whose failure is reported by another line: of the source, of the power-on method, of the gate ..."""
_MOVES = 6
_LAST_WORD = "the UPS reported utility last, and has been silent or unclear for long"


def step(policy: Policy, state: State, event: Event) -> Step:
    """Answer one event. Same state and event, same answer. Never raises."""
    if not -LATEST_S <= event.at_s <= LATEST_S:
        return Step(state)  # Not a time (NaN compares false), so the event cannot be placed.
    if isinstance(event, Reading):
        event = fusion.plausible(event)
    turn = Turn(policy, state, event.at_s)
    _handle(turn, event)
    for _ in range(_MOVES):
        decision = _decide(turn, event)
        if decision is None:
            break
        move(turn, decision)
        if isinstance(turn.state.phase, Online):
            break  # If the next outage is here already, it begins in a step of its own: each has its own story.
    duties(turn)
    return turn.step()


# --- Handling an event ------------------------------------------------------------------------------------------


def _handle(turn: Turn, event: Event) -> None:
    match event:
        case Reading():
            _handle_reading(turn, event)
        case SourceFailed():
            _handle_failure(turn, event)
        case NetworkSeen() | OwnLoad():
            _handle_seen(turn, event)
        case TrainerSeen() | CheckpointProgress():
            lifecycle.handle(turn, event)
        case Done() | Failed():
            _handle_outcome(turn, event)
        case Measured():
            turn.update(learned=needs.add(turn.state.learned, event.need, event.seconds))
        case PoweredOn(cause=cause, ac_failed=ac_failed, firmware_s=firmware_s):
            turn.note("host_powered_on", event.because, cause=cause, ac_failed=ac_failed, firmware_s=firmware_s)
            unseen.handle(turn, event)
        case ForeignStop():
            _handle_foreign_stop(turn, event)
        case Tick() | StartDrill() | StopDrill():
            pass
        case _:
            _handle_command(turn, event)
    rehearsal.handle(turn, event)
    maintenance = turn.state.maintenance
    if maintenance is not None and turn.now_s >= maintenance.until_s:
        turn.update(maintenance=None)
        turn.note("maintenance_ended", "expired", who=maintenance.who)
    if not isinstance(event, Reading) and turn.state.feed.supply is Supply.BATTERY:
        turn.state = feeds.advance(turn.policy, turn.state, turn.now_s)


def _handle_command(turn: Turn, event: Abort | SetMaintenance | CheckpointNow | BatteryReplaced | RecoverNow) -> None:
    """Enter a command of the operator."""
    match event:
        case Abort():
            _handle_abort(turn, event)
        case SetMaintenance():
            active = event.until_s > event.at_s
            until_s = min(event.until_s, event.at_s + LONGEST_MAINTENANCE_S)
            turn.update(
                maintenance=Maintenance(until_s=until_s, reason=event.reason, who=event.who) if active else None
            )
            turn.note("maintenance_set" if active else "maintenance_ended", event.reason or "operator", who=event.who)
        case CheckpointNow():
            turn.note("checkpoint_requested", "operator", who=event.who)
            lifecycle.order_all(turn, reason="operator", by_s=turn.now_s + 600.0)
        case BatteryReplaced():
            _handle_battery(turn, event)
        case RecoverNow():
            _handle_recover(turn, event)


def _handle_reading(turn: Turn, reading: Reading) -> None:
    before = turn.state
    entered = feeds.enter(turn.policy, before, reading)
    if entered is None:
        return
    turn.state = entered
    old, feed = before.feed, entered.feed
    came_back = feeds.lost_since_s(before, reading)
    merged = feed.reading or reading  # What all sources say together, where there are several.
    if old.supply is not feed.supply and feed.supply is Supply.BATTERY:
        turn.count_transfer()
    if came_back is not None:
        lost_s = turn.now_s - came_back
        turn.note(
            "source_recovered",
            f"{reading.source} answers",
            source=reading.source,
            lost_s=lost_s,
            **_which(turn, reading.ups),
        )
    was_left, is_left = before.battery.left, entered.battery.left
    on_battery = old.supply is Supply.BATTERY and feed.supply is Supply.BATTERY
    if on_battery and was_left is not None and is_left is not None and is_left > was_left + WRONG:
        turn.raise_grade()
    if before.battery.contradicted and not entered.battery.contradicted and feed.supply is Supply.BATTERY:
        _end_abort(turn)
    elif isinstance(turn.state.phase, Recovery) and turn.state.phase.outage.aborted_by and _is_stable(turn):
        # A recovery may wait for long, for the host's storage perhaps: the power may fail again in it.
        turn.set_outage(aborted_by="")
        turn.note("abort_ended", "utility is stable, so the power-off comes if it fails again")
    if feed.suspect:
        # One unconfirmed reading may only cause a poll.
        turn.order(PollNow, limit_s=2.0, ups=reading.ups)
    if feed.low_battery_at_s is not None and old.low_battery_at_s is None:
        turn.note("battery_low", "two readings", Level.WARNING, runtime_s=merged.runtime_s)
        turn.regrade()
    if budget.power_off_at_s(feed) is not None and budget.power_off_at_s(old) is None:
        turn.regrade()
    elif budget.power_off_at_s(feed) is None and budget.power_off_at_s(old) is not None:
        is_spent = feed.fsd_at_first and not old.fsd_at_first
        because = "no cut has come" if is_spent else "the countdown was read back as cancelled"
        turn.note("power_off_cancelled", because)
    alarms.update(turn, merged)
    alarms.update_own_load(turn)


def _end_abort(turn: Turn) -> None:
    """An outage that was aborted while all evidence contradicted battery is real now."""
    if turn.outage is not None and turn.outage.aborted_by:
        turn.set_outage(aborted_by="")
        lifecycle.forget_outage(turn, resumed=True)
        turn.note(
            "abort_ended", "the UPS no longer contradicts its report of battery, so the outage counts", Level.WARNING
        )


def _handle_battery(turn: Turn, event: BatteryReplaced) -> None:
    """A new battery: measurements of the old one do not apply to it, nor does the energy taken from the old one.

    The account begins again with the next charge that is reported. On battery, what was left counts until then: without
    any figure, training would be paused at once.
    """
    drains = fusion.is_draining(turn.state.feed)

    def renewed(policy: Policy, battery: Battery) -> Battery:
        model = BatteryModel(recharge_s=battery.model.recharge_s, replaced_at_s=turn.now_s)
        return replace(
            battery,
            model=model,
            health=policy.health,
            tau_point=battery.tau_point if drains else None,
            used=account.PRESUMED * policy.health if drains else None,
            presumed=drains,
            left=battery.left if drains else None,
            unflagged=None,
            away_s=0.0,
            away_charge=None,
        )

    turn.state = feeds.with_battery(turn.policy, turn.state, event.ups, renewed, turn.now_s)
    which = {"ups": event.ups} if event.ups else {}
    turn.note("battery_replaced", "entered by the operator", who=event.who, **which)


def _handle_failure(turn: Turn, failure: SourceFailed) -> None:
    entered = feeds.lose(turn.policy, turn.state, failure)
    if entered is None:
        return
    supply_before = turn.state.feed.supply
    turn.state = feeds.presume(turn.policy, entered, turn.now_s)
    feed = turn.state.feed
    conduct = "alarm; no action on utility"
    if feed.lost_since_s is None:
        conduct = "alarm; the other sources continue"
    elif feed.supply is Supply.BATTERY:
        conduct = "dead reckoning from the last reading"
    which = _which(turn, failure.ups)
    turn.note("source_lost", failure.reason, Level.ERROR, source=failure.source, conduct=conduct, **which)
    _note_presumed(turn, supply_before)


def _handle_seen(turn: Turn, event: NetworkSeen | OwnLoad) -> None:
    """Enter what this host sees of itself."""
    if isinstance(event, OwnLoad):
        turn.state = own.with_gpu_share(turn.policy, own.enter(turn.policy, turn.state, event), turn.now_s)
        alarms.update_own_load(turn)
    else:
        _handle_network(turn, event)


def _handle_network(turn: Turn, event: NetworkSeen) -> None:
    entered = silence.seen(turn.state, event)
    if entered is None:
        return
    supply_before = turn.state.feed.supply
    turn.state = feeds.presume(turn.policy, entered, turn.now_s)
    if event.up:
        turn.note("network_back", f"{event.part} is back", part=event.part)
    else:
        why = f"{event.part} went down, and no program on this host took it down"
        turn.note("network_lost", why, Level.WARNING, part=event.part)
    _note_presumed(turn, supply_before)


def _note_presumed(turn: Turn, supply_before: Supply) -> None:
    """Say that battery is presumed because something else went with a UPS that is silent."""
    feed = turn.state.feed
    if feed.supply is not Supply.BATTERY or supply_before is Supply.BATTERY:
        return
    turn.count_transfer()
    if feed.proven_by == silence.NETWORK:
        turn.note(
            "battery_presumed",
            f"the UPS fell silent with {silence.parts(turn.state.gone)} of this host: power may be lost at both",
            Level.ERROR,
            silent_s=round(turn.now_s - feed.since_s, 3),
        )


def _which(turn: Turn, ups: str) -> dict[str, str]:
    """Name the UPS in a note where there are several."""
    return {"ups": ups} if turn.policy.feeds else {}


def _handle_outcome(turn: Turn, outcome: Done | Failed) -> None:
    action, phase = outcome.action, turn.state.phase
    if isinstance(outcome, Failed):
        if not isinstance(action, _REPORTED_ELSEWHERE):
            kind = type(action).__name__
            turn.note("action_failed", outcome.reason, Level.ERROR, action=kind, took_s=outcome.took_s)
    elif isinstance(action, EnsurePolicy) and not isinstance(phase, Online):
        turn.set_outage(policy_verified=events.policy_ensured(outcome).verified)
        turn.note("policy_verified", "read back from the BMC", Level.INFO, **dict(outcome.detail))
    if isinstance(action, TriggerCheckpoint | PauseTrainer):
        lifecycle.handle(turn, outcome)
    obligations.handle(turn, outcome)
    phase = turn.state.phase
    if isinstance(phase, Shutdown):
        waiting = tuple(id_ for id_ in phase.waiting if id_ != action.id)
        changes: dict[str, object] = {"waiting": waiting}
        if isinstance(action, PowerOff):
            changes["ordered"] = phase.ordered or isinstance(outcome, Done)
            if isinstance(outcome, Done):
                reason = "the program that powers the host off took the order"
                because = reason if turn.policy.powers_off else "only recorded"
                turn.note("power_off_accepted", because, Level.WARNING, **dict(outcome.detail))
            if isinstance(outcome, Failed):
                changes["again_at_s"] = turn.now_s + RETRY_S
        turn.set_phase(replace(phase, **changes))  # type: ignore[arg-type]
    elif isinstance(phase, Recovery) and action.id == phase.asked:
        gate.handle(turn, phase, outcome)


def _handle_abort(turn: Turn, event: Abort) -> None:
    """Enter an abort in the outage; if an order has to be undone, the move to on_battery does it."""
    if isinstance(turn.state.phase, OnBattery | Recovery):
        turn.set_outage(aborted_by=_aborted_by(event))
        turn.note("shutdown_aborted", _aborted_by(event), Level.WARNING, who=event.who)


def _aborted_by(event: Abort) -> str:
    return f"{event.who}: {event.reason}" if event.reason else event.who


def _handle_recover(turn: Turn, event: RecoverNow) -> None:
    """Training starts as soon as there is utility, whatever the gate and the check of the host wait for."""
    unseen.overrule(turn, event.who)
    if isinstance(turn.state.phase, Recovery):
        turn.set_phase(replace(turn.state.phase, forced_by=event.who, retry_at_s=0.0))
        turn.note("gate_overruled", "the operator wants training started", Level.WARNING, who=event.who)


def _handle_foreign_stop(turn: Turn, event: ForeignStop) -> None:
    phase = turn.state.phase
    turn.update(up=False)
    if isinstance(phase, Shutdown):
        methods.decide_late(turn, phase, stable=_is_stable(turn))
    if isinstance(phase, Online | Shutdown) or (isinstance(phase, Recovery) and _is_back(turn)):
        return  # On utility a person stops the host, to repair it perhaps: it must stay off.
    what = "another program shuts the host down" if event.host_stopping else "the daemon is being stopped"
    turn.note("foreign_stop_seen", what, Level.WARNING, phase=phase_name(turn.state.phase))
    # The host must come back in either case. Only if it stops now are the power-on methods armed.
    methods.ensure_policy(turn, turn.outage_id, limit_s=turn.policy.bmc_limit_s)
    if event.host_stopping:
        methods.foreign_stop(turn)


# --- Deciding ---------------------------------------------------------------------------------------------------


def _decide(turn: Turn, event: Event) -> Decision | None:
    """Return the first cause that ends this phase now, or None while none does."""
    match turn.state.phase:
        case Online():
            return _decide_online(turn)
        case OnBattery():
            return _decide_on_battery(turn)
        case EmergencyCheckpoint() | Holding():
            return _decide_emergency(turn, event)
        case Recovery():
            because = gate.resumed_because(turn, turn.state.phase)
            return Decision(Cause.RESUMED, because, turn.budget()) if because else _decide_commit(turn)
        case Shutdown():
            if not turn.policy.powers_off and turn.state.phase.ordered and _may_return(turn):
                because = f"{turn.policy.mode}: the host was not powered off"
                return Decision(Cause.REHEARSED, because, turn.budget())
            return None


def _decide_online(turn: Turn) -> Decision | None:
    feed = turn.state.feed
    if feed.supply is Supply.BATTERY:
        return Decision(Cause.BATTERY, feed.proven_by, turn.budget())
    if budget.power_off_at_s(feed) is not None:
        because = "countdown" if feed.countdown_at_s is not None else "fsd"
        return Decision(Cause.POWER_OFF_ORDERED, because, turn.budget())
    if because := unseen.power_lost_because(turn.policy, turn.state, turn.now_s):
        return Decision(Cause.POWER_LOST, because, turn.budget())
    seen = [each.input_present for each in (feed.reading, feed.previous) if each is not None]
    if conditions.is_calibrating(feed) and True not in seen:
        # With the input seen, training continues, and saves (`transitions`). Without, twice, this may be an outage.
        sums = turn.budget()
        because = conditions.calibration_low(turn.policy, turn.state, sums, turn.now_s)
        return Decision(Cause.CALIBRATION_LOW, because, sums) if because else None
    return None


def _decide_on_battery(turn: Turn) -> Decision | None:
    policy, state, now_s = turn.policy, turn.state, turn.now_s
    feed, sums = state.feed, turn.budget()
    # A calibration drains the battery with utility there: what the operator has called off in it is not over yet.
    back = feed.supply is not Supply.BATTERY and not fusion.is_draining(feed) and budget.power_off_at_s(feed) is None
    is_utility = feed.supply is Supply.UTILITY and fusion.is_fresh(policy, feed, now_s)
    if back and is_utility and (not conditions.is_flapping(state, now_s) or _is_stable(turn)):
        is_aborted = turn.outage is not None and turn.outage.aborted_by
        because = "after the shutdown was aborted" if is_aborted else "before any action was needed"
        return Decision(Cause.UTILITY_BACK, f"utility returned {because}", sums)
    if back and _is_blind_for_long(turn):
        return Decision(Cause.UTILITY_BACK, _LAST_WORD, sums)
    if turn.outage is not None and turn.outage.aborted_by:
        return None
    because = conditions.checkpoint_due(policy, state, sums, now_s)
    return Decision(Cause.CHECKPOINT_NEEDED, because, sums) if because else None


def _decide_emergency(turn: Turn, event: Event) -> Decision | None:
    state = turn.state
    if isinstance(event, Abort):
        return Decision(Cause.ABORTED, _aborted_by(event), turn.budget())
    if _may_return(turn):
        stable = f"utility stable for {turn.now_s - state.feed.since_s:.0f} s"
        because = stable if _is_stable(turn) else _LAST_WORD
        return Decision(Cause.UTILITY_STABLE, because, turn.budget())
    if isinstance(state.phase, EmergencyCheckpoint) and lifecycle.all_settled(state.trainers):
        return Decision(Cause.CHECKPOINT_DURABLE, lifecycle.settled_because(state.trainers), turn.budget())
    return _decide_commit(turn)


def _decide_commit(turn: Turn) -> Decision | None:
    """Two looks at the commit: the test comes true, one more poll is ordered, and only its answer latches."""
    phase = turn.state.phase
    if not isinstance(phase, _BeforeCommit):
        return None
    if phase.due_at_s is None and not conditions.may_commit(turn.state):
        return None
    sums = turn.budget()
    because = conditions.commit_due(turn.policy, turn.state, sums, turn.now_s)
    if because and conditions.is_saving(turn.state, turn.now_s):
        # A stop that is less orderly leaves a checkpoint that is on its way the time that it still needs.
        turn.regrade()
        sums = turn.budget()
        because = conditions.commit_due(turn.policy, turn.state, sums, turn.now_s)
        phase = turn.state.phase
        if not isinstance(phase, _BeforeCommit):
            return None
    if not because:
        if phase.due_at_s is not None:
            turn.set_phase(replace(phase, due_at_s=None))
            turn.note("commit_withdrawn", "the test no longer holds", reff_s=sums.reff_s, stop_s=sums.stop_s)
        return None
    if phase.due_at_s is None:
        turn.set_phase(replace(phase, due_at_s=turn.now_s))
        for ups in [feed_policy.policy.ups for feed_policy in turn.policy.feeds] or [turn.policy.ups]:
            turn.order(PollNow, limit_s=2.0, ups=ups)
        return None
    if conditions.may_latch(turn.policy, turn.state, sums, phase.due_at_s, turn.now_s):
        return Decision(Cause.COMMIT, because, sums)
    return None


def _is_blind_for_long(turn: Turn) -> bool:
    """Open the gate if the last report was utility, and since then the UPS is silent, or reports neither, for long."""
    since_s = feeds.unreported_since_s(turn.state)
    if since_s is None or turn.now_s - since_s < turn.policy.unknown_hold_s:
        return False
    turn.note("gate_forced", _LAST_WORD, Level.ERROR)
    return True


def _is_stable(turn: Turn) -> bool:
    """Utility is stable; if it flaps, it must last longer."""
    factor = FLAPPING_FACTOR if conditions.is_flapping(turn.state, turn.now_s) else 1.0
    stable_s = factor * turn.policy.utility_stable_s
    return fusion.is_stable(turn.policy, turn.state.feed, turn.now_s, stable_s=stable_s)


def _is_back(turn: Turn) -> bool:
    """Utility is stable, and no countdown runs."""
    return _is_stable(turn) and budget.power_off_at_s(turn.state.feed) is None


def _may_return(turn: Turn) -> bool:
    """Utility has been stable long enough, no countdown runs, and no checkpoint that is worth it is torn."""
    state = turn.state
    if state.feed.supply is Supply.BATTERY or budget.power_off_at_s(state.feed) is not None:
        return False
    if not _is_stable(turn):
        return _is_blind_for_long(turn)
    return not lifecycle.holds_return(state.trainers, turn.now_s)
