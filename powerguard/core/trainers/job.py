"""A job whose ranks train on several hosts: one host holds it for all of them, and one that leaves ends it on all.

The trainer's library agrees on both with the ranks of the other hosts, and each daemon asks only its own trainer
(docs/decisions/0232). Here it is logged. Training that has ended because another host left is started again as soon as
it has gone: its launcher, or the scheduler, waits for all hosts.
"""

from dataclasses import replace
from typing import Final

from powerguard.core.decide.turn import Turn
from powerguard.core.model import outcomes
from powerguard.core.model.actions import LeaveJob, Level
from powerguard.core.model.events import Done, Outcome, TrainerSeen
from powerguard.core.model.state import JobEnded, Online, Shutdown, Start, State, Supply, Trainer
from powerguard.core.trainers import escalation

LIMIT_S: Final = 1.5
"""Limit of the message at the commit. The ranks of the other hosts would notice anyway, but later."""
INCOMPLETE: Final = "job_incomplete"


def leave(turn: Turn, outage: str, *, limit_s: float) -> tuple[str, ...]:
    """Order, at the commit, that each job on several hosts learns that this host leaves; return the orders' ids."""
    return tuple(
        turn.order(LeaveJob, limit_s=min(limit_s, LIMIT_S), trainer=trainer.name, outage=outage)
        for trainer in turn.state.trainers
        if trainer.alive and trainer.hosts > 1 and not escalation.is_stopped(turn.state, trainer.name)
    )


def take_in(turn: Turn, outcome: Outcome) -> None:
    """Enter that a job has learned it. A failure has a line of its own."""
    if isinstance(outcome, Done) and isinstance(outcome.action, LeaveJob) and not outcomes.is_recorded(outcome):
        turn.note("job_left", "every rank stops at one step and ends", trainer=outcome.action.trainer)


def ended(state: State, name: str) -> JobEnded | None:
    """Return what is known of a trainer whose job has ended because another host left it."""
    return next((each for each in state.owing(JobEnded) if each.trainer == name), None)


def take_in_seen(turn: Turn, known: Trainer, seen: TrainerSeen) -> None:
    """Enter what a trainer reports of the other hosts of its job. This host's own departure is not one of theirs."""
    if not seen.alive or isinstance(turn.state.phase, Shutdown):
        return
    name = seen.trainer
    if seen.held_by and seen.held_by != known.held_by:
        turn.note("training_held", "on battery there", Level.WARNING, trainer=name, hosts=seen.held_by, step=seen.step)
    elif known.held_by and not seen.held_by and not seen.ended_by:
        turn.note("training_released", "no other host holds it any more", trainer=name, step=seen.step)
    waits = ended(turn.state, name)
    if seen.ended_by and waits is None:
        turn.owe(JobEnded(trainer=name, because=seen.ended_by, at_s=turn.now_s))
        turn.note("job_ended", seen.ended_by, Level.WARNING, trainer=name, step=seen.step)
    elif waits is not None and not seen.ended_by and seen.step is not None:
        turn.settle(waits)
        turn.note(
            "job_restarted",
            "training runs again",
            trainer=name,
            step=seen.step,
            waited_s=round(turn.now_s - waits.at_s, 3),
        )


def tend(turn: Turn) -> None:
    """Start again what has ended with another host's departure, and raise an alarm if it does not train for long."""
    waiting = turn.state.owing(JobEnded)
    if not waiting and INCOMPLETE not in turn.state.told:
        return
    feed = turn.state.feed
    if isinstance(turn.state.phase, Online) and feed.supply is Supply.UTILITY:
        alive = {trainer.name for trainer in turn.state.trainers if trainer.alive}
        gone = [each for each in waiting if not each.started and each.trainer not in alive]
        for each in gone:
            turn.owe(replace(each, started=True))
        if gone and turn.state.start is None:  # else it is started already, at the end of an outage of this host
            turn.owe(Start(at_s=turn.now_s, retry_at_s=turn.now_s, tries=0))
    late = [each for each in waiting if turn.now_s - each.at_s >= turn.policy.job_wait_s]
    why = "; ".join(f"{each.trainer}: {each.because}, and training has not run since" for each in late)
    turn.tell_once(INCOMPLETE, why or "training runs again", holds=bool(late), level=Level.ERROR)
