"""The gate at boot: no training on battery, before a cut, or with too little charge to survive a second outage.

Then the host is checked (GPUs, checkpoint storage, newest checkpoint), training is started, and the outage is over when
training reports a step again. Only the check of the host has no time limit; an alarm reports it, and the operator can
overrule it.
"""

from dataclasses import replace
from typing import Final

from powerguard.core.comeback import methods, unseen
from powerguard.core.decide import conditions
from powerguard.core.decide.turn import Turn
from powerguard.core.energy import budget
from powerguard.core.model.actions import CheckHost, Level, ResumeTraining
from powerguard.core.model.events import Done, Failed
from powerguard.core.model.state import Feed, Recovery, Supply
from powerguard.core.supply import fusion
from powerguard.core.trainers import lifecycle

CHECK_LIMIT_S: Final = 30.0
CHECK_AGAIN_S: Final = 5.0
CHECK_LATER_S: Final = 30.0
"""Interval of the checks after LONG_S of failures, so that a storage outage of a night does not fill the log."""
LONG_S: Final = 180.0
"""A NAS boots slower than its hosts; after this long a person must look."""
CHECK_HOLDS_S: Final = 60.0
"""How long a result of the check stays valid; the gate may wait for hours."""
START_LIMIT_S: Final = 30.0
SILENT_S: Final = 60.0
"""A trainer that is alive this long after the start without a step is taken for one that reports no steps."""
UNCONFIRMED_S: Final = 300.0
"""Longest wait for a first step. After it the outage is over, and an error asks a person to look."""
FAILED_AGAIN: Final = "the power failed again before training reported a step"
INCOMPLETE: Final = "host_incomplete"
LATE: Final = "host_incomplete_long"


def reconcile(turn: Turn, phase: Recovery) -> None:
    """Open the gate when it is time; check the host, then start training."""
    if phase.asked is not None or phase.started_at_s is not None or turn.now_s < phase.retry_at_s:
        return
    if unseen.hold_back(turn, phase):
        return
    because, forced = _because(turn, phase)
    if _asks_for_check(turn, phase, because):
        id_ = turn.order(CheckHost, limit_s=CHECK_LIMIT_S, outage=phase.outage.id)
        turn.set_phase(replace(phase, asked=id_))
        return
    if not because:
        return
    clear(turn, "the operator wants training started")
    if forced is not None:
        turn.note("gate_forced", because, forced)
    id_ = turn.order(ResumeTraining, limit_s=START_LIMIT_S, outage=phase.outage.id)
    turn.set_phase(replace(phase, asked=id_, tries=phase.tries + 1))
    turn.note("gate_opened", because)


def _asks_for_check(turn: Turn, phase: Recovery, because: str) -> bool:
    """Say whether the host is to be checked now: while utility has to hold, and again if the last result is old."""
    if not turn.policy.checks_host or phase.forced_by:
        return False
    feed, at_s = turn.state.feed, phase.checked_at_s
    if at_s is None:
        return bool(because) or feed.supply is Supply.UTILITY
    return bool(because) and (at_s < feed.since_s or turn.now_s - at_s > CHECK_HOLDS_S)


def clear(turn: Turn, because: str) -> None:
    """End the alarms about a host that is not complete."""
    for alarm in (INCOMPLETE, LATE):
        turn.set_alarm(alarm, because, holds=False)


def _because(turn: Turn, phase: Recovery) -> tuple[str, Level | None]:
    """Say why training may start, or "" while it must wait; and how severe it is that it starts before it is safe."""
    state, policy = turn.state, turn.policy
    if budget.power_off_at_s(state.feed) is not None or state.feed.supply is Supply.BATTERY:
        return "", None
    if methods.cut_at_s(state, turn.now_s) is not None:
        return "", None  # Training would be cut off.
    if phase.forced_by:
        return f"{phase.forced_by} wants training started", None
    if fusion.is_stable(policy, state.feed, turn.now_s, stable_s=policy.utility_stable_s):
        if because := conditions.may_start(policy, state, turn.now_s):
            return because, None
        if turn.now_s - max(phase.began_s, state.feed.since_s) < policy.charge_hold_s:
            return "", None
        because = "utility has been back for long; to wait for more charge would cost more than a second outage"
        return because, Level.WARNING
    fresh = fusion.is_fresh(policy, state.feed, turn.now_s)
    if fresh and (state.feed.supply is not Supply.UNKNOWN or fusion.is_unknown_on_battery(state.feed.reading)):
        return "", None
    if turn.now_s - max(phase.began_s, _unknown_since_s(state.feed, fresh=fresh)) < policy.unknown_hold_s:
        return "", None
    what = "has not reported for long whether utility is there" if fresh else "has not answered for long"
    return f"the UPS {what}; training starts without its answer", Level.ERROR


def _unknown_since_s(feed: Feed, *, fresh: bool) -> float:
    """Say since when it is not known whether utility is there. A poll that is late is no silence yet."""
    if feed.lost_since_s is not None:
        return feed.lost_since_s
    return feed.since_s if fresh or feed.reading is None else feed.reading.at_s


def handle(turn: Turn, phase: Recovery, outcome: Done | Failed) -> None:
    """Enter how the order ended that this phase waits for."""
    if isinstance(outcome.action, CheckHost):
        _handle_check(turn, phase, outcome)
    elif isinstance(outcome, Done):
        turn.set_phase(replace(phase, asked=None, started_at_s=turn.now_s))
    else:
        turn.set_phase(replace(phase, asked=None, retry_at_s=turn.now_s + lifecycle.START_AGAIN_S))


def _handle_check(turn: Turn, phase: Recovery, outcome: Done | Failed) -> None:
    if isinstance(outcome, Done):
        turn.set_phase(replace(phase, asked=None, checked_at_s=turn.now_s))
        clear(turn, "the host is complete again")
        turn.note("host_checked", "GPUs, checkpoint storage and the newest checkpoint", **dict(outcome.detail))
    elif phase.forced_by:
        turn.set_phase(replace(phase, asked=None))  # Overruled while the check ran: training does not wait.
    else:
        is_long = turn.now_s - phase.began_s >= LONG_S
        again_s = CHECK_LATER_S if is_long else CHECK_AGAIN_S
        turn.set_phase(replace(phase, asked=None, retry_at_s=turn.now_s + again_s))
        if turn.now_s - phase.began_s < turn.policy.utility_stable_s:
            return  # Training still waits for utility, and a host that boots may be complete at any moment.
        turn.set_alarm(INCOMPLETE, f"{outcome.reason}; training waits until the host is complete", holds=True)
        if is_long:
            waited_s = turn.now_s - phase.began_s
            because = (
                f"{outcome.reason}; training has waited for {waited_s:.0f} s: repair the host, or overrule the check"
            )
            turn.set_alarm(LATE, because, holds=True, level=Level.ERROR)


def resumed_because(turn: Turn, phase: Recovery) -> str:
    """Say why the outage is over: training runs, or no further report is to be expected; "" while it is not."""
    if phase.started_at_s is None:
        if phase.asked is not None or phase.tries < lifecycle.START_TRIES or turn.now_s < phase.retry_at_s:
            return ""
        turn.note("resume_failed", "training could not be started", Level.ERROR, tries=phase.tries)
        return "powerguard gave up: start training by hand"
    feed, waited_s = turn.state.feed, turn.now_s - phase.started_at_s
    if feed.supply is Supply.BATTERY or budget.power_off_at_s(feed) is not None:
        return FAILED_AGAIN
    configured = {each.name for each in turn.policy.trainers}
    expected = [each for each in turn.state.trainers if each.name in configured or not configured]
    late = [each.name for each in expected if not each.alive or each.step is None or each.paused]
    if expected and not late:
        return f"training runs, at step {min(each.step or 0 for each in expected)}"
    if waited_s >= SILENT_S and all(each.alive for each in expected):
        return "training was started; no trainer reports a step"
    if waited_s < UNCONFIRMED_S:
        return ""
    because = f"training was started; {', '.join(late)} reported no step for {UNCONFIRMED_S:.0f} s"
    turn.note("resume_unconfirmed", f"{because}; read its log", Level.ERROR)
    return because
