"""What is owed until an outcome confirms it: the one table of all obligations and the functions that keep them.

An order may fail, and its outcome may be lost with the daemon. So everything that was changed and must be undone, or
was promised and must be kept, is in the state (`State.owed`, entered by `Turn.owe`) until an outcome confirms it
(`Turn.settle`). Until then the function `reconcile` of its row orders it again. A new kind is one class in
`model.state` and one row here.

Three kinds of orders are not obligations, because another part of the state says what is owed and ends it: the orders
of the phases Shutdown and Recovery (the phase says it, and another phase must not inherit them), a trainer's checkpoint
(owed while the trainer is neither durable nor failed in this outage), and a drill's orders (the drill waits for each
until its deadline, then gives it up, and undoes everything at its end).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, Protocol

from powerguard.core import scheduler
from powerguard.core.comeback import methods
from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import (
    Action,
    ArmPowerOn,
    CapPower,
    CheckPowerOn,
    ContinueTrainer,
    DisarmPowerOn,
    DrainNode,
    EnsurePolicy,
    LeaveJob,
    LeaveNode,
    RestorePolicy,
    RestorePower,
    ResumeTrainer,
    ResumeTraining,
    ReturnNode,
    SignalJobs,
    StopTrainer,
    TerminateTrainer,
)
from powerguard.core.model.events import Outcome
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import (
    Armed,
    GpuCap,
    JobEnded,
    NodeMarked,
    Obligation,
    Resume,
    Signalled,
    Start,
    State,
    TemporaryPolicy,
)
from powerguard.core.trainers import escalation, lifecycle


class _AfterBoot(Protocol):
    def __call__(self, policy: Policy, old: State, now_s: float, /, *, whole: bool) -> tuple[Obligation, ...]: ...


def _ends(_policy: Policy, _old: State, _now_s: float, /, *, whole: bool) -> tuple[Obligation, ...]:  # noqa: ARG001
    """End all of this kind at a boot: processes, GPU limits and their orders ended with the old boot."""
    return ()


def _stands(_turn: Turn, _lost: tuple[Obligation, ...]) -> None:
    """Keep all of this kind: an order may or may not have been carried out, and `reconcile` gives it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """How one kind of obligation is kept.

    answers: actions whose outcomes `handle` enters. reconcile: orders what is due; called at every event, in every
    phase.
    saved_first: checkpoints that are due at the same event are ordered before this kind.
    after_restart: called when the daemon restarts in the same boot; outcomes of the orders in `lost` will not come.
    after_boot: returns what is still owed in another boot.
    """

    kind: type[Obligation]
    answers: tuple[type[Action], ...]
    handle: Callable[[Turn, Outcome], None]
    reconcile: Callable[[Turn], None]
    saved_first: bool = False
    after_restart: Callable[[Turn, tuple[Obligation, ...]], None] = _stands
    after_boot: _AfterBoot = _ends


DUTIES: Final = (
    Duty(
        kind=GpuCap, answers=(CapPower, RestorePower), handle=escalation.handle_cap, reconcile=escalation.reconcile_cap
    ),
    Duty(
        kind=Signalled,
        answers=(StopTrainer, TerminateTrainer, ContinueTrainer),
        handle=escalation.handle,
        reconcile=escalation.reconcile,
    ),
    Duty(
        kind=TemporaryPolicy,
        answers=(RestorePolicy, EnsurePolicy),
        handle=methods.handle_policy,
        reconcile=methods.reconcile_policy,
        after_boot=methods.policy_after_boot,
    ),
    Duty(
        kind=Armed,
        answers=(ArmPowerOn, DisarmPowerOn, CheckPowerOn),
        handle=methods.handle,
        reconcile=methods.reconcile,
        after_restart=methods.after_restart,
        after_boot=methods.after_boot,
    ),
    Duty(
        kind=NodeMarked,
        answers=(DrainNode, SignalJobs, LeaveNode, ReturnNode),
        handle=scheduler.handle,
        reconcile=scheduler.reconcile,
        after_boot=scheduler.after_boot,
    ),
    Duty(kind=JobEnded, answers=(LeaveJob,), handle=lifecycle.handle_job_left, reconcile=lifecycle.restart_jobs),
    Duty(
        kind=Resume,
        answers=(ResumeTrainer,),
        handle=lifecycle.handle_resumed,
        reconcile=lifecycle.resume_again,
        saved_first=True,
    ),
    Duty(
        kind=Start,
        answers=(ResumeTraining,),
        handle=lifecycle.handle_start,
        reconcile=lifecycle.start_again,
        saved_first=True,
    ),
)
"""In the order in which they are reconciled."""


def handle(turn: Turn, outcome: Outcome) -> None:
    """Hand an outcome to the owner of what it answers."""
    for duty in DUTIES:
        if isinstance(outcome.action, duty.answers):
            duty.handle(turn, outcome)


def reconcile(turn: Turn, *, saved_first: bool) -> None:
    """Order what is due. saved_first: of those before which checkpoints are ordered; else of the others."""
    for duty in DUTIES:
        if duty.saved_first is saved_first:
            duty.reconcile(turn)


def after_restart(turn: Turn, given: Collection[str]) -> None:
    """The daemon was away, in the same boot. given: ids of the orders that are given now; no other is answered."""
    lost = tuple(each for each in turn.state.owed if each.order is not None and each.order not in given)
    turn.update(owed=tuple(replace(each, order=None) if each in lost else each for each in turn.state.owed))
    for duty in DUTIES:
        duty.after_restart(turn, tuple(each for each in lost if isinstance(each, duty.kind)))


def after_boot(policy: Policy, old: State, now_s: float, *, whole: bool) -> tuple[Obligation, ...]:
    """Return what is still owed in another boot. whole: as in `recovery.Stored`."""
    return tuple(each for duty in DUTIES for each in duty.after_boot(policy, old, now_s, whole=whole))
