"""Escalation: what is done about a trainer that was asked to pause while the load does not fall (docs/decisions/0090).

    GPU cap (`cap`)  ->  SIGSTOP  ->  SIGTERM, all before the commit; SIGCONT before a trainer is resumed

Only a trainer whose checkpoint is durable or out of time is signalled. Trainers that have not confirmed the pause are
signalled first, and each rung has time to show in the load. A stopped trainer is in the state until it is confirmed to
run again; in other phases no trainer stays stopped.
"""

from dataclasses import replace
from typing import Final

from powerguard.core.decide import conditions
from powerguard.core.decide.conditions import SETTLE_S
from powerguard.core.decide.turn import Turn
from powerguard.core.energy import account, own
from powerguard.core.energy import budget as sums
from powerguard.core.model import outcomes
from powerguard.core.model.actions import Conduct, ContinueTrainer, Level, StopTrainer, TerminateTrainer
from powerguard.core.model.events import Done, Failed, OutputSource
from powerguard.core.model.state import (
    Emergency,
    EmergencyCheckpoint,
    Holding,
    Online,
    Shutdown,
    Signalled,
    State,
    Supply,
    Trainer,
)
from powerguard.core.supply import fusion
from powerguard.core.trainers import gpu_cap

STOP, TERMINATE, CONTINUE = "stop", "terminate", "continue"
LIMIT_S: Final = 5.0
AGAIN_S: Final = 10.0
CAP_SETTLE_S: Final = 10.0

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


def tend(turn: Turn) -> None:
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
        turn.tell_once(_FAILED, "the next outage tries again", holds=False)


def _may_go_on(turn: Turn, each: Signalled) -> bool:
    """Training may go on, or was to before something else happened; after the commit systemd sees to it."""
    state = turn.state
    if each.word == CONTINUE:
        return turn.now_s - each.at_s >= AGAIN_S and not state.feed.suspect
    return not isinstance(state.phase, EmergencyCheckpoint | Holding | Shutdown) and not state.feed.suspect


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
    if feed.supply is not Supply.BATTERY or not on_battery or sums.power_off_at_s(feed) is not None:
        return False
    if not conditions.must_show(state, phase, turn.now_s) or not _is_capped_in_vain(turn):
        return False
    return all(each.order is None and turn.now_s - each.at_s >= SETTLE_S for each in state.signalled)


def _is_capped_in_vain(turn: Turn) -> bool:
    """GPU power is capped and the load has had time to show it; or it cannot be."""
    if turn.policy.cap_share is None or gpu_cap.FAILED in turn.state.told:
        return True
    capped = turn.state.cap
    return capped is not None and capped.order is None and turn.now_s - capped.at_s >= CAP_SETTLE_S


def _next_rung(turn: Turn, trainer: Trainer) -> str:
    """Return the next rung for a trainer, or "": its checkpoint is in flight, or no rung is left."""
    if not trainer.alive or not trainer.told_pause or trainer.conduct is Conduct.CONTINUE:
        return ""
    if trainer.order is not None or not (trainer.durable or trainer.failed):
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


def take_in(turn: Turn, outcome: Done | Failed) -> None:
    """Enter how a signal went; one that is no longer known is ignored."""
    each = next((each for each in turn.state.signalled if each.order == outcome.action.id), None)
    if each is None:
        return
    if isinstance(outcome, Failed):
        _put(turn, replace(each, order=None, failed=True))
        if each.word == CONTINUE:
            turn.tell_once(_STUCK, f"{each.trainer}: {outcome.reason}", holds=True, level=Level.ERROR)
        else:
            turn.tell_once(_FAILED, f"{each.trainer}: {outcome.reason}", holds=True)
        return
    recorded = outcomes.is_recorded(outcome)
    because = "dry-run: no signal was sent, it is only recorded" if recorded else "confirmed by the helper"
    turn.note(_DONE[each.word], because, Level.INFO, **{"trainer": each.trainer, **dict(outcome.detail)})
    if each.word == CONTINUE:
        forget(turn, each.trainer)
        turn.tell_once(_STUCK, "it runs again", holds=any(left.failed for left in turn.state.signalled))
    else:
        _put(turn, replace(each, order=None, carried_out=each.word, at_s=turn.now_s))
