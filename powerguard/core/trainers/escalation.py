"""Escalation: what is done about a trainer that was asked to pause while the load does not fall (docs/decisions/0090).

    GPU cap (`reconcile_cap`)  ->  SIGSTOP  ->  SIGTERM, all before the commit; SIGCONT before a trainer is resumed

Only a trainer whose checkpoint is durable or out of time is signalled. Trainers that have not confirmed the pause are
signalled first, and each rung has time to show in the load. A stopped trainer is in the state until it is confirmed to
run again; in other phases no trainer stays stopped.
"""

from dataclasses import replace
from typing import Final

from powerguard.core.decide import conditions
from powerguard.core.decide.conditions import SETTLE_S
from powerguard.core.decide.turn import Turn
from powerguard.core.energy import account, budget, own
from powerguard.core.model import events
from powerguard.core.model.actions import (
    CapPower,
    Conduct,
    ContinueTrainer,
    Level,
    RestorePower,
    StopTrainer,
    TerminateTrainer,
)
from powerguard.core.model.events import Done, Failed, OutputSource
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import (
    Emergency,
    EmergencyCheckpoint,
    GpuCap,
    Holding,
    OnBattery,
    Online,
    Shutdown,
    Signalled,
    State,
    Supply,
    Trainer,
)
from powerguard.core.supply import feeds, fusion

STOP, TERMINATE, CONTINUE = "stop", "terminate", "continue"
LIMIT_S: Final = 5.0
AGAIN_S: Final = 10.0
CAP_SETTLE_S: Final = 10.0

LEAST_CAP_GAIN = 1.05
CAP_LIMIT_S = 5.0
RESTORE_AGAIN_S, RESTORE_LATER_S = 10.0, 300.0
"""Time to the second restore and longest time to a further one; it doubles. The helper also tries again by itself."""
CAP_FAILED = "gpu_cap_failed"
"""Alarm: GPU power could not be capped in this outage; what comes after a cap waits for none."""
_CAP_STUCK = "gpu_power_stuck"

_FAILED: Final = "signal_failed"
_STUCK: Final = "trainer_left_stopped"
_RUNGS: Final = (STOP, TERMINATE)
_KINDS: Final = {STOP: StopTrainer, TERMINATE: TerminateTrainer, CONTINUE: ContinueTrainer}
_DONE: Final = {STOP: "trainer_stopped", TERMINATE: "trainer_terminated", CONTINUE: "trainer_continued"}


def of(state: State, name: str) -> Signalled | None:
    """Return what was done to this trainer; None if it was never signalled, or all of it is undone."""
    return next((each for each in state.signalled if each.trainer == name), None)


def is_stopped(state: State, name: str) -> bool:
    """Say whether a trainer cannot hear us: stopped, or about to be, and not let go on yet.

    Once SIGCONT has failed this no longer counts: the watch or a person may have continued it.
    """
    each = of(state, name)
    return each is not None and each.carried_out != TERMINATE and not (each.word == CONTINUE and each.failed)


def is_terminated(state: State, name: str) -> bool:
    """Say whether powerguard has ended it: its end is expected, and its training has to be started again."""
    each = of(state, name)
    return each is not None and TERMINATE in (each.word, each.carried_out)


def is_to_be_stopped(turn: Turn) -> bool:
    """Say whether a trainer that does not pause is stopped rather than asked once more."""
    phase = turn.state.phase
    if not turn.policy.signals or not isinstance(phase, Emergency):
        return False
    return turn.load_stays_high(phase) and conditions.must_show(turn.state, phase, turn.now_s)


def reconcile(turn: Turn) -> None:
    """Continue trainers that may run; escalate if a pause does not show."""
    phase = turn.state.phase
    for each in turn.state.signalled:
        if each.order is not None or not _may_go_on(turn, each):
            continue
        if each.carried_out == TERMINATE:
            forget(turn, each.trainer)  # SIGCONT went with it.
        else:
            _send(turn, each, CONTINUE)
    if isinstance(phase, Emergency):
        _climb(turn, phase)
    elif isinstance(phase, Online):
        turn.set_alarm(_FAILED, "the next outage tries again", holds=False)


def _may_go_on(turn: Turn, each: Signalled) -> bool:
    """Training may go on, or was to before something else happened; after the commit systemd sees to it."""
    state = turn.state
    if each.word == CONTINUE:
        return turn.now_s - each.at_s >= AGAIN_S and not state.feed.awaits_witness
    return not isinstance(state.phase, EmergencyCheckpoint | Holding | Shutdown) and not state.feed.awaits_witness


def _climb(turn: Turn, phase: Emergency) -> None:
    """Take the lowest rung that is left, if the load still has not fallen once the last one has had its time."""
    if not _is_time(turn, phase):
        return
    rungs = [(rung, trainer.paused, trainer) for trainer in turn.state.trainers if (rung := _next_rung(turn, trainer))]
    lowest = min(((_RUNGS.index(rung), paused) for rung, paused, _ in rungs), default=None)
    for rung, paused, trainer in rungs:
        if (_RUNGS.index(rung), paused) == lowest:
            known = of(turn.state, trainer.name)
            blank = Signalled(trainer=trainer.name, outage=turn.outage_id, word=rung, at_s=turn.now_s)
            _send(turn, known or blank, rung)
            load = round(100 * account.load_of(turn.state.battery))
            because = (
                "it was asked to pause, and the load has not fallen"
                if rung == STOP
                else "it was stopped, and the load has not fallen"
            )
            fall = own.fall(turn.policy, turn.state, turn.now_s)
            watts = {} if fall is None else {"own_w": round(fall.now_w), "expected_w": round(fall.expected_w)}
            turn.note(
                "trainer_signalled", because, Level.WARNING, trainer=trainer.name, word=rung, load_pct=load, **watts
            )


def _is_time(turn: Turn, phase: Emergency) -> bool:
    policy, state, feed = turn.policy, turn.state, turn.state.feed
    if not policy.signals or state.maintenance is not None or not turn.load_stays_high(phase):
        return False
    if not fusion.is_fresh(policy, feed, turn.now_s):
        return False  # The daemon did not run for a while: its state may be old, and a signal cannot be undone.
    # A cut of the output comes when it comes, whatever is drawn until then.
    on_battery = feed.reading is not None and feed.reading.output_source is OutputSource.BATTERY
    if feed.supply is not Supply.BATTERY or not on_battery or budget.power_off_at_s(feed) is not None:
        return False
    if not conditions.must_show(state, phase, turn.now_s) or not _is_capped_in_vain(turn):
        return False
    return all(each.order is None and turn.now_s - each.at_s >= SETTLE_S for each in state.signalled)


def _is_capped_in_vain(turn: Turn) -> bool:
    """GPU power is capped and the load has had time to show it; or it cannot be."""
    if turn.policy.cap_share is None or CAP_FAILED in turn.state.alarms:
        return True
    capped = turn.state.cap
    return capped is not None and capped.order is None and turn.now_s - capped.at_s >= CAP_SETTLE_S


def _next_rung(turn: Turn, trainer: Trainer) -> str:
    """Return the next rung for a trainer, or "": its checkpoint is in flight, or no rung is left."""
    if not trainer.alive or not trainer.pause_ordered or trainer.conduct is Conduct.CONTINUE:
        return ""
    if trainer.order is not None or trainer.owes:
        return ""
    if turn.policy.shared is not None and trainer.paused:
        fall = own.fall(turn.policy, turn.state, turn.now_s)
        if fall is None or not fall.contradicts_pause:
            return ""  # It has obeyed, for all that this host's own draw shows.
    known = of(turn.state, trainer.name)
    if known is None or (known.carried_out == "" and not known.failed):
        return STOP
    return TERMINATE if known.carried_out == STOP and not known.failed else ""


def _send(turn: Turn, each: Signalled, word: str) -> None:
    order = turn.order(_KINDS[word], limit_s=LIMIT_S, trainer=each.trainer, outage=each.outage)
    _put(turn, replace(each, word=word, order=order, at_s=turn.now_s, failed=False))


def _put(turn: Turn, each: Signalled) -> None:
    """Enter it as the newest."""
    turn.settle(each)
    turn.owe(each)


def forget(turn: Turn, name: str) -> None:
    """Forget the signals: a new process has this name, and it was not signalled."""
    known = of(turn.state, name)
    if known is not None:
        turn.settle(known)


def handle(turn: Turn, outcome: Done | Failed) -> None:
    """Enter how a signal went; one that is no longer known is ignored."""
    each = next((each for each in turn.state.signalled if each.order == outcome.action.id), None)
    if each is None:
        return
    if isinstance(outcome, Failed):
        _put(turn, replace(each, order=None, failed=True))
        if each.word == CONTINUE:
            turn.set_alarm(_STUCK, f"{each.trainer}: {outcome.reason}", holds=True, level=Level.ERROR)
        else:
            turn.set_alarm(_FAILED, f"{each.trainer}: {outcome.reason}", holds=True)
        return
    recorded = events.is_recorded(outcome)
    because = "dry-run: no signal was sent, it is only recorded" if recorded else "confirmed by the helper"
    turn.note(_DONE[each.word], because, Level.INFO, **{"trainer": each.trainer, **dict(outcome.detail)})
    if each.word == CONTINUE:
        forget(turn, each.trainer)
        turn.set_alarm(_STUCK, "it runs again", holds=any(left.failed for left in turn.state.signalled))
    else:
        _put(turn, replace(each, order=None, carried_out=each.word, at_s=turn.now_s))


# --- GPU cap ----------------------------------------------------------------------------------------------------
#
# A cap also stretches the battery while training goes on, where a drill has measured that it pays: how much longer the
# battery lasts at the capped load, times the speed that is left. If GPUs are a small part of the load it does not pay
# (measured: a weak drop is worse than no cap). Powers are always restored.


def cap_gain(policy: Policy, state: State) -> float | None:
    """Work done with one charge when capped, as a share of that without; None where no drill has measured it."""
    drop = state.learned.cap
    if drop is None or not 0.0 < drop.after < drop.before:
        return None
    points = account.table(policy, state.battery)
    longer = drop.before / drop.after
    if points and policy.shared is not None:
        # The others draw on: the battery lasts longer only by what this host takes off the load of all.
        load = account.load_of(state.battery)
        capped = max(load - (drop.before - drop.after), account.LOAD_FLOOR)
        longer = account.tau_s(points, capped) / account.tau_s(points, load)
    elif points:
        longer = account.tau_s(points, drop.after) / account.tau_s(points, drop.before)
    return longer * drop.speed


def reconcile_cap(turn: Turn) -> None:
    """Cap when it is time, restore when it is over; a failed restore is repeated without limit, and logged."""
    cap = turn.state.cap
    if cap is None:
        _begin_cap(turn)
    elif cap.order is None and not isinstance(turn.state.phase, Shutdown) and _cap_is_over(turn):
        _lift_cap(turn, cap)


def _begin_cap(turn: Turn) -> None:
    policy, state = turn.policy, turn.state
    if policy.cap_share is None:
        return
    if isinstance(state.phase, Online):
        turn.set_alarm(CAP_FAILED, "the next outage tries again", holds=False)
        return
    if CAP_FAILED in state.alarms or state.feed.supply is not Supply.BATTERY:
        return
    because = ""
    if isinstance(state.phase, OnBattery):
        waited_s = turn.now_s - state.feed.since_s
        worth = cap_gain(policy, state)
        if waited_s >= policy.cap_dwell_s and worth is not None and worth >= LEAST_CAP_GAIN:
            because = f"{worth:.2f} times the work with the energy that is left"
    elif isinstance(state.phase, Emergency):
        paused_s = turn.now_s - state.phase.paused_at_s
        if paused_s >= policy.cap_dwell_s and turn.load_stays_high(state.phase):
            # It no longer costs anything: paused trainers cannot be slowed down.
            because = "the load has not fallen although training was asked to pause"
    if because and budget.power_off_at_s(state.feed) is None:
        order = turn.order(CapPower, limit_s=CAP_LIMIT_S, outage=turn.outage_id, share=policy.cap_share)
        turn.owe(GpuCap(outage=turn.outage_id, at_s=turn.now_s, order=order))
        turn.note("gpu_cap_ordered", because, share=policy.cap_share)


def _cap_is_over(turn: Turn) -> bool:
    """Utility is stable; or the cap was lost half-way; or it has long been unknown whether there is utility."""
    cap, feed, drill = turn.state.cap, turn.state.feed, turn.state.drill
    if cap is not None and drill is not None and drill.stage == "cap" and cap.outage == drill.id:
        return False  # It measures what the cap brings, and ends in time.
    if cap is not None and cap.lifting:
        return turn.now_s >= cap.retry_at_s
    if budget.power_off_at_s(feed) is None and fusion.is_stable(
        turn.policy, feed, turn.now_s, stable_s=turn.policy.cap_lift_s
    ):
        return True
    since_s = (feed.lost_since_s, feeds.unreported_since_s(turn.state))
    unknown_s = max((turn.now_s - at_s for at_s in since_s if at_s is not None), default=0.0)
    return isinstance(turn.state.phase, Online) and unknown_s >= turn.policy.unknown_hold_s


def _lift_cap(turn: Turn, cap: GpuCap) -> None:
    order = turn.order(RestorePower, limit_s=CAP_LIMIT_S, outage=cap.outage)
    again_s = min(max(2 * (cap.retry_at_s - cap.at_s), RESTORE_AGAIN_S), RESTORE_LATER_S)
    turn.owe(replace(cap, order=order, lifting=True, at_s=turn.now_s, retry_at_s=turn.now_s + again_s))


def handle_cap(turn: Turn, outcome: Done | Failed) -> None:
    """Enter how an order to cap or to restore ended; an order that is not ours, such as a drill's, is passed over."""
    cap, action = turn.state.cap, outcome.action
    if cap is None or cap.order != action.id:
        return
    cap = replace(cap, order=None)
    if isinstance(action, RestorePower):
        if isinstance(outcome, Done):
            turn.settle(cap)
            turn.set_alarm(_CAP_STUCK, "restored", holds=False)
            turn.note("gpu_power_restored", _because(outcome), **dict(outcome.detail))
        else:
            turn.owe(cap)
            turn.set_alarm(_CAP_STUCK, f"{outcome.reason}: training runs at lower power", holds=True, level=Level.ERROR)
    elif isinstance(outcome, Done):
        turn.owe(cap)
        turn.note("gpu_power_capped", _because(outcome), **dict(outcome.detail))
    else:
        # An error of the helper may have left some of them capped: what was found is put back, then it is over.
        turn.set_alarm(CAP_FAILED, outcome.reason, holds=True)
        _lift_cap(turn, cap)


def _because(outcome: Done) -> str:
    recorded = "dry-run: no power limit was changed, it is only recorded"
    return recorded if events.is_recorded(outcome) else "confirmed by the helper"
