"""What the machine knows of trainers, and what it orders them to do. One that hangs delays no other."""

import math
from dataclasses import replace
from typing import Final, TypeGuard

from powerguard.core.decide.turn import Turn
from powerguard.core.energy import account, budget, needs, own
from powerguard.core.energy.budget import Budget
from powerguard.core.model import events
from powerguard.core.model.actions import (
    Action,
    Conduct,
    LeaveJob,
    Level,
    PauseTrainer,
    ResumeTrainer,
    ResumeTraining,
    TriggerCheckpoint,
)
from powerguard.core.model.events import CheckpointProgress, Done, Failed, Outcome, TrainerSeen
from powerguard.core.model.policy import Drop, Learned, Mode, Policy, TrainerPolicy
from powerguard.core.model.state import (
    Activity,
    CheckpointInFlight,
    Durable,
    Emergency,
    GivenUp,
    Holding,
    JobEnded,
    NotDurable,
    Obligation,
    OnBattery,
    Online,
    Recovery,
    Resume,
    Shutdown,
    Start,
    State,
    Supply,
    Trainer,
)
from powerguard.core.trainers import escalation

MAX_TRIES = 3
COPIED = ("writing", "committing")
"""Stages of a checkpoint whose state has been copied: training can go on (docs/reference/trainer-endpoint.md)."""
AGAIN_IN_HOLD_S = 30.0
TRY_AGAIN_S = 1.0
RESUME_AGAIN_S = 5.0
ON_BATTERY: Final = "on_battery"
"""Reason of the orders of an outage, as trainers hear it and report it (`wire.Reason`)."""
START_TRIES = 3
START_AGAIN_S = 30.0
ENDS_S = 180.0
"""How long a trainer that was to end may take for it, once its training is to run again."""
COMES_S = 600.0
"""How long after its start the first trainer may take to appear: images are loaded, and modules imported."""
CHEAP_STALL = 0.05
"""A checkpoint during training is taken if it delays training for less than this share of the work at risk."""
_PAUSE_LIMIT_S = 10.0
_RESUME_LIMIT_S = 10.0
_START_LIMIT_S = 30.0
_LEAST_LIMIT_S = 2.0
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 60.0


def at_start(policy: Policy, learned: Learned) -> tuple[Trainer, ...]:
    """Return the configured trainers, presumed alive until one is found gone: its effector will find out."""
    return tuple(
        Trainer(
            name=t.name,
            conduct=t.conduct,
            checkpoint_s=needs.checkpoint_s(learned, t.name, t.checkpoint_s),
            disk=t.disk,
            priority=t.priority,
        )
        for t in policy.trainers
    )


def after_reload(old: Policy, new: Policy, known: tuple[Trainer, ...], learned: Learned) -> tuple[Trainer, ...]:
    """Return the trainers after a reload: what was taken out goes, what is new comes, what was found stays."""
    removed = {t.name for t in old.trainers} - {t.name for t in new.trainers}
    kept = tuple(replace(t, priority=_policy_of(new, t.name).priority) for t in known if t.name not in removed)
    names = {t.name for t in kept}
    return (*kept, *(t for t in at_start(new, learned) if t.name not in names))


def _policy_of(policy: Policy, name: str) -> TrainerPolicy:
    return next((t for t in policy.trainers if t.name == name), TrainerPolicy(name=name, conduct=Conduct.PAUSE))


def _put(turn: Turn, trainer: Trainer) -> None:
    others = turn.state.trainers
    if any(t.name == trainer.name for t in others):
        turn.update(trainers=tuple(trainer if t.name == trainer.name else t for t in others))
    else:
        turn.update(trainers=(*others, trainer))


def resume_owed(state: State, name: str) -> Resume | None:
    """Return the resume that is owed to a trainer; None if it has confirmed one, or is not to be resumed."""
    return next((each for each in state.owing(Resume) if each.trainer == name), None)


def owe_resume(turn: Turn, name: str, retry_at_s: float) -> None:
    """Enter that a trainer is owed a resume (again), unless it has confirmed one by then."""
    turn.owe(Resume(trainer=name, at_s=turn.now_s, retry_at_s=retry_at_s))


def _settle_resume(turn: Turn, name: str) -> None:
    if (owed := resume_owed(turn.state, name)) is not None:
        turn.settle(owed)


def without_strangers(owed: tuple[Obligation, ...], known: tuple[Trainer, ...]) -> tuple[Obligation, ...]:
    """Return what is still owed, without the resumes of trainers that are no longer known."""
    names = {trainer.name for trainer in known}
    return tuple(each for each in owed if not isinstance(each, Resume) or each.trainer in names)


def _keep(turn: Turn, known: tuple[Trainer, ...]) -> None:
    turn.update(trainers=known, owed=without_strangers(turn.state.owed, known))


def handle(turn: Turn, event: TrainerSeen | CheckpointProgress | Done | Failed) -> None:
    """Enter a trainer's status, or how an order to it ended."""
    match event:
        case TrainerSeen():
            _handle_seen(turn, event)
        case CheckpointProgress():
            trainer = turn.state.trainer(event.trainer)
            if trainer is not None and trainer.order == event.action_id:
                # An infinite or missing number must not delay a return or hurry a commit.
                most_s = _policy_of(turn.policy, event.trainer).max_checkpoint_s
                has_eta = event.eta_s is not None and event.eta_s >= 0
                eta_at_s = turn.now_s + min(event.eta_s or 0.0, most_s) if has_eta else None
                step = trainer.step if event.step is None else event.step
                flight = CheckpointInFlight(order=event.action_id, eta_at_s=eta_at_s, copied=event.stage in COPIED)
                seen = trainer.found(paused=event.paused or trainer.paused)
                _put(turn, replace(seen, in_flight=flight, step=step))
        case Done() | Failed() if isinstance(event.action, PauseTrainer):
            trainer = turn.state.trainer(event.action.trainer)
            if trainer is not None and isinstance(event, Done):
                _put(turn, trainer.found(paused=True))
        case Done():
            _handle_done(turn, event)
        case Failed():
            _handle_failed(turn, event)


def _handle_seen(turn: Turn, seen: TrainerSeen) -> None:
    known = turn.state.trainer(seen.trainer)
    limits = _policy_of(turn.policy, seen.trainer)
    if known is None:
        if not seen.alive:
            return
        known = Trainer(
            name=seen.trainer, conduct=seen.conduct, checkpoint_s=limits.checkpoint_s, priority=limits.priority
        )
        turn.note("trainer_appeared", "first contact", trainer=seen.trainer, conduct=seen.conduct)
    if known.alive and not seen.alive:
        because, level = "no longer reachable", Level.WARNING
        if escalation.is_terminated(turn.state, seen.trainer):
            because, level = "ended by powerguard's signal", Level.INFO
        elif (left := ended_job(turn.state, seen.trainer)) is not None:
            because = left.because
        turn.note("trainer_gone", because, level, trainer=seen.trainer)
        was_found = all(t.name != seen.trainer for t in turn.policy.trainers)
        if isinstance(turn.state.phase, Online) and was_found and ended_job(turn.state, seen.trainer) is None:
            _keep(turn, tuple(t for t in turn.state.trainers if t.name != seen.trainer))
            return
    if seen.alive and not known.alive:
        # Another process: it trains, and checkpoints and orders of the one before do not apply to it.
        known = replace(known.without_outage(), in_flight=None)
        escalation.forget(turn, seen.trainer)
    _handle_job(turn, known, seen)
    is_persons = _is_unexplained_pause(turn, known, seen)
    if is_persons and seen.paused_for == ON_BATTERY:
        # Only a daemon asks with this reason: the journal that knew of it is lost, or the resume was only recorded.
        is_persons = False
        _end_forgotten_pause(turn, seen.trainer)
    activity = Activity.GONE
    if seen.alive:
        activity = Activity.PAUSED if seen.paused else Activity.TRAINING
    reported_s = known.reported_s
    if seen.checkpoint_s is not None and seen.checkpoint_s > 0:
        reported_s = min(seen.checkpoint_s, limits.max_checkpoint_s)
    seed_s = limits.checkpoint_s if reported_s is None else reported_s
    stall_s = known.stall_s if seen.stall_s is None else max(0.0, seen.stall_s)
    durable_at_s = known.durable_at_s
    if seen.durable_age_s is not None and 0 <= seen.durable_age_s < math.inf:
        reported_at_s = turn.now_s - seen.durable_age_s  # before this boot, perhaps
        durable_at_s = reported_at_s if durable_at_s is None else max(reported_at_s, durable_at_s)
    _put(
        turn,
        replace(
            known,
            activity=activity,
            stood=activity is Activity.PAUSED and (known.stood or is_persons),
            conduct=seen.conduct if seen.alive else known.conduct,
            checkpoint_s=min(needs.checkpoint_s(turn.state.learned, seen.trainer, seed_s), limits.max_checkpoint_s),
            reported_s=reported_s,
            stall_s=stall_s,
            disk=seen.disk or limits.disk,
            step=known.step if seen.step is None else seen.step,
            # The load may lag a pause by two steps, and the commit believes it: so this claim is bounded as well.
            step_s=min(max(0.0, seen.step_s), limits.max_checkpoint_s),
            durable_at_s=durable_at_s,
            durable_step=known.durable_step if seen.durable_step is None else seen.durable_step,
            hosts=max(1, seen.hosts) if seen.alive else known.hosts,
            held_by=seen.held_by if seen.alive else "",
        ),
    )


def _end_forgotten_pause(turn: Turn, name: str) -> None:
    if turn.policy.mode is not Mode.DRY_RUN:
        owe_resume(turn, name, turn.now_s)
        because = "powerguard has paused it for an outage that it no longer knows of, and utility is back"
        turn.note("pause_forgotten", because, Level.WARNING, trainer=name)


def _is_unexplained_pause(turn: Turn, known: Trainer, seen: TrainerSeen) -> bool:
    """Say whether a trainer stands on utility by two reports, by no order that is known here: by a person's, say.

    Not before the supply is known: a daemon without history may have paused it itself, in an outage that goes on.
    """
    calm = isinstance(turn.state.phase, Online) and turn.state.feed.supply is Supply.UTILITY and not turn.state.drill
    is_ordered = known.pause_ordered or resume_owed(turn.state, known.name) is not None
    return calm and known.paused and seen.paused and not known.stood and not is_ordered and not seen.held_by


def _handle_done(turn: Turn, done: Done) -> None:
    action = done.action
    if not isinstance(action, TriggerCheckpoint) or (trainer := turn.state.trainer(action.trainer)) is None:
        return
    found = events.checkpoint_done(done)
    step = trainer.step if found.step is None else found.step
    fresh = replace(trainer, step=step)
    if found.confirmed and not found.recorded:
        fresh = replace(fresh, durable_at_s=turn.now_s, durable_step=step)
        if not found.older:
            fresh = _measured(turn, fresh, done.took_s, found.tier)
    if trainer.order == action.id:
        fresh = replace(fresh, in_flight=None).found(paused=trainer.paused or found.paused)
        if _in_emergency(turn) and _is_of_the_pause(fresh, trainer.step, action, found.step):
            # One that joined an older checkpoint is not at the paused step: a second one, if there is time.
            older = found.older and action.after is not Conduct.CONTINUE
            # One that trains on is stopped: asked again, it would empty the battery for as long once more.
            stopped = older and escalation.is_to_be_stopped(turn)
            again = older and not stopped and _may_try_again(turn, trainer)
            if not again:
                fresh = replace(fresh, checkpoint=Durable())
            if older and fresh.durable:
                lost = None if trainer.step is None or found.step is None else trainer.step - found.step
                because = "it does not pause, so it is stopped" if stopped else "a second one does not fit"
                turn.note("older_checkpoint_stands", because, Level.WARNING, steps_lost=lost)
    _put(turn, fresh)
    facts = {name: value for name, value in done.detail if name in ("bytes", "verified", "confirmed", "paused", "path")}
    because = "reported by the trainer" if found.verified else "reported by the trainer, unverified"
    if not found.confirmed:
        because = "started, not confirmed"
    if found.recorded:
        because = "dry-run: no trainer was asked, it is only recorded"
    turn.note(
        "checkpoint_durable",
        because,
        Level.INFO,
        **{"trainer": trainer.name, "step": step, "took_s": round(done.took_s, 3), **facts},
    )


def _is_of_the_pause(fresh: Trainer, stands_at: int | None, action: TriggerCheckpoint, saved: int | None) -> bool:
    """Whether a checkpoint can be what is owed before the power-off.

    One that was ordered during training (a precaution, or by the operator) is none for a trainer that is to pause,
    unless it has saved the very step at which training stands.
    """
    if action.after is not Conduct.CONTINUE or fresh.conduct is Conduct.CONTINUE:
        return True
    return fresh.paused and saved is not None and saved == stands_at


def _measured(turn: Turn, trainer: Trainer, took_s: float, tier: str) -> Trainer:
    """Learn how long this checkpoint took. Another tier than the local one is kept apart: it is not waited for."""
    name = trainer.name if tier in ("", "local") else f"{trainer.name}/{tier}"
    turn.update(learned=needs.add(turn.state.learned, "checkpoint", took_s, name))
    limits = _policy_of(turn.policy, trainer.name)
    seed_s = limits.checkpoint_s if trainer.reported_s is None else trainer.reported_s
    learned_s = needs.checkpoint_s(turn.state.learned, trainer.name, seed_s)
    return replace(trainer, checkpoint_s=min(learned_s, limits.max_checkpoint_s))


def _handle_failed(turn: Turn, failed: Failed) -> None:
    action = failed.action
    if not isinstance(action, TriggerCheckpoint) or (trainer := turn.state.trainer(action.trainer)) is None:
        return
    if trainer.order != action.id:
        return
    fresh, owed = replace(trainer, in_flight=None), trainer.checkpoint
    give_up = failed.timed_out or not _may_try_again(turn, trainer)
    if isinstance(owed, NotDurable) and _in_emergency(turn) and give_up:
        cut_short = failed.timed_out and action.by_s - trainer.ordered_at_s < trainer.checkpoint_s
        given_up = GivenUp(because=failed.reason, tries=owed.tries, cut_short=cut_short)
        fresh = replace(fresh, checkpoint=given_up)
    _put(turn, fresh)


def _in_emergency(turn: Turn) -> bool:
    return isinstance(turn.state.phase, Emergency)


def _may_try_again(turn: Turn, trainer: Trainer) -> bool:
    """Say whether one more checkpoint is worth ordering in this outage."""
    tries = 0 if isinstance(trainer.checkpoint, Durable) else trainer.checkpoint.tries
    return tries < MAX_TRIES and _fits_again(turn, trainer)


def _fits_again(turn: Turn, trainer: Trainer) -> bool:
    """Say whether one more checkpoint of this trainer ends before the host must stop."""
    now = turn.budget()
    if now.reff_s is None:
        return True
    return trainer.checkpoint_s + budget.stop_s(turn.policy, now.grade, reserve_s=20.0) <= now.reff_s


def order_limit_s(turn: Turn) -> float:
    """Seconds that an emergency checkpoint may take: until the host must stop, and never without end.

    Where the stop of this outage's grade leaves too little for it, the grade is lowered first: the limit is that of the
    stop that will be.
    """
    now = turn.budget()
    if now.reff_paused_s is not None and now.checkpoint_s + _stop_s(turn, now) > now.reff_paused_s:
        turn.regrade()
        now = turn.budget()
    slowest_s = max((t.checkpoint_s for t in turn.state.trainers if t.alive), default=0.0)
    patience_s = max(_PATIENCE * slowest_s, _LEAST_PATIENCE_S)
    if now.reff_paused_s is None:
        return min(patience_s, turn.policy.blind_s)
    return max(_LEAST_LIMIT_S, min(now.reff_paused_s - _stop_s(turn, now), patience_s))


def _stop_s(turn: Turn, now: Budget) -> float:
    """Seconds of the stop, with the reserve that is kept while a checkpoint is on its way."""
    return budget.stop_s(turn.policy, now.grade, reserve_s=20.0)


def order_all(turn: Turn, *, reason: str, by_s: float) -> None:
    """Order a checkpoint of every living trainer that has none in flight; training continues meanwhile.

    In the emergency and in a hold, one that is owed or given up is owed again, with all its tries: `reconcile` orders
    it at once, with the pause that belongs to it.
    """
    for trainer in turn.state.trainers:
        if not trainer.alive or trainer.order is not None or escalation.is_stopped(turn.state, trainer.name):
            continue
        if _in_emergency(turn) and not trainer.durable:
            _put(turn, replace(trainer, checkpoint=NotDurable()))
        else:
            _order(turn, trainer, reason=reason, after=Conduct.CONTINUE, by_s=by_s, counts=False)


def order_emergency(turn: Turn, *, by_s: float) -> None:
    """Order the checkpoints that are owed, each by its trainer's own conduct: at once if there is time for all.

    Where those that share a disk do not all fit, one after the other, the highest priority first; trainers that must
    wait are paused meanwhile, since together they empty the battery.
    """
    now = turn.budget()
    for trainer in turn.state.trainers:
        if not trainer.owes:
            continue
        if _comes_now(turn, trainer, now):
            _order(turn, trainer, reason=ON_BATTERY, after=trainer.conduct, by_s=by_s)
        else:
            _wait(turn, trainer)


def _comes_now(turn: Turn, trainer: Trainer, now: Budget) -> bool:
    others = [t for t in turn.state.trainers if t.owes and t.disk == trainer.disk and t.name != trainer.name]
    if now.reff_paused_s is None or not others:
        return True
    left_s = now.reff_paused_s - budget.stop_s(turn.policy, now.grade, reserve_s=20.0)
    if sum(t.checkpoint_s for t in (trainer, *others)) <= left_s:
        return True
    return all(_rank(trainer) < _rank(t) for t in others)


def _rank(trainer: Trainer) -> tuple[int, float, str]:
    return -trainer.priority, trainer.checkpoint_s, trainer.name


def would_pause(action: Action) -> TypeGuard[PauseTrainer | TriggerCheckpoint]:
    """Say whether training stands still, or ends, for an order."""
    return isinstance(action, PauseTrainer) or (
        isinstance(action, TriggerCheckpoint) and action.after is not Conduct.CONTINUE
    )


def _wait(turn: Turn, trainer: Trainer) -> None:
    if trainer.conduct is Conduct.CONTINUE or trainer.pause_ordered:
        return
    turn.order(PauseTrainer, limit_s=_PAUSE_LIMIT_S, trainer=trainer.name, outage=turn.outage_id)
    _put(turn, replace(trainer, pause_ordered=True))
    turn.note(
        "checkpoint_deferred",
        "there is no time for all at once, and others come first",
        Level.WARNING,
        trainer=trainer.name,
    )


def take_precautions(turn: Turn, *, since_s: float, stood_until_s: float = 0.0) -> None:
    """While power is at risk: order checkpoints during training if they cost little; repeat as work at risk grows.

    since_s: since when work is at risk at the latest, if a trainer does not report when it last saved. stood_until_s:
    until then training stood still, at a step that was saved.

    On average it saves little (3 s an outage); it matters when a battery dies at once.
    """
    every_s = turn.policy.precaution_every_s
    for trainer in turn.state.trainers:
        if not trainer.alive or trainer.order is not None or turn.now_s - trainer.ordered_at_s < every_s:
            continue
        if escalation.is_stopped(turn.state, trainer.name):
            continue
        saved_s = since_s if trainer.durable_at_s is None else trainer.durable_at_s
        at_risk_s = turn.now_s - max(saved_s, stood_until_s)
        # A trainer that does not report the delay may be paused for the whole checkpoint.
        stall_s = trainer.checkpoint_s if trainer.stall_s is None else trainer.stall_s
        if at_risk_s > every_s and stall_s < CHEAP_STALL * at_risk_s:
            by_s = turn.now_s + max(2.0 * trainer.checkpoint_s, every_s)
            _order(turn, trainer, reason=ON_BATTERY, after=Conduct.CONTINUE, by_s=by_s, counts=False)


def learn_drop(turn: Turn, phase: Holding) -> None:
    """A hold shows what a pause brings: learned if only one trainer paused, without another cause of a lower load."""
    before = phase.outage.load_at_start
    if turn.policy.shared is not None:
        _learn_own_drop(turn, phase)
        return
    pausing = [t for t in turn.state.trainers if t.alive and t.pause_ordered]
    has_source = turn.state.feed.lost_since_s is None
    if (
        not has_source
        or before is None
        or len(pausing) != 1
        or turn.state.cap is not None
        or turn.now_s < phase.settle_by_s
    ):
        return
    if turn.state.signalled or (turn.policy.signals and turn.load_stays_high(phase)):
        return  # A pause that did not come has no load drop, and that of a signal is not of a pause.
    after = account.load_of(turn.state.battery)
    known = needs.drop_of(turn.state.learned, pausing[0].name)
    if 0.0 < after < before and pausing[0].paused and (known is None or known.at_s < phase.outage.since_s):
        drop = Drop(before=before, after=after, at_s=turn.now_s)
        turn.update(learned=needs.with_drop(turn.state.learned, pausing[0].name, drop))


def _learn_own_drop(turn: Turn, phase: Holding) -> None:
    """Learn the same on a UPS that is shared, in watts, by what measured this host before the pause and does now."""
    pausing = [t for t in turn.state.trainers if t.alive and t.pause_ordered]
    fall, rated = own.fall(turn.policy, turn.state, turn.now_s), own.rating_w(turn.policy, turn.state)
    if fall is None or rated is None or turn.state.cap is not None or turn.state.signalled:
        return
    if len(pausing) != 1 or not pausing[0].paused or fall.stays_high or turn.now_s < phase.settle_by_s:
        return
    known = needs.drop_of(turn.state.learned, pausing[0].name)
    if 0.0 < fall.now_w < fall.before_w and (known is None or known.at_s < phase.outage.since_s):
        fell_w = fall.before_w - fall.now_w
        before, after = fall.before_w / rated, fall.now_w / rated
        drop = Drop(before=before, after=after, at_s=turn.now_s, watts=fell_w)
        turn.update(learned=needs.with_drop(turn.state.learned, pausing[0].name, drop))


def _order(turn: Turn, trainer: Trainer, *, reason: str, after: Conduct, by_s: float, counts: bool = True) -> None:
    id_ = turn.order(
        TriggerCheckpoint,
        limit_s=max(_LEAST_LIMIT_S, by_s - turn.now_s),
        trainer=trainer.name,
        reason=reason,
        after=after,
        outage=turn.outage_id,
    )
    ordered = replace(
        trainer,
        in_flight=CheckpointInFlight(order=id_),
        ordered_at_s=turn.now_s,
        pause_ordered=trainer.pause_ordered or after is not Conduct.CONTINUE,
    )
    if counts and isinstance(ordered.checkpoint, NotDurable):
        ordered = replace(ordered, checkpoint=NotDurable(tries=ordered.checkpoint.tries + 1))
    _put(turn, ordered)
    turn.note("checkpoint_ordered", reason, trainer=trainer.name, after=after, limit_s=round(by_s - turn.now_s, 3))


def reconcile(turn: Turn, *, hold: bool, repeat_s: float) -> None:
    """In the emergency and in a hold: order what is owed, pause newcomers, repeat for trainers that continue."""
    for each in turn.state.trainers:
        trainer = _given_another_chance(turn, each) if hold else each
        state = trainer.checkpoint
        if not trainer.alive or trainer.order is not None or isinstance(state, GivenUp):
            continue
        # Three tries within a moment would count as one: the cause of a refusal gets a second or two to clear.
        waited_s = turn.now_s - trainer.ordered_at_s
        owes = isinstance(state, NotDurable) and waited_s >= state.tries * TRY_AGAIN_S
        at_risk = (
            hold
            and trainer.conduct is Conduct.CONTINUE
            and trainer.durable_at_s is not None
            and turn.now_s - max(trainer.durable_at_s, trainer.ordered_at_s) >= repeat_s
        )
        if owes or at_risk:
            now = turn.budget()
            if owes and not _comes_now(turn, trainer, now):
                _wait(turn, trainer)
                continue
            by_s = turn.now_s + order_limit_s(turn)
            _order(turn, trainer, reason=ON_BATTERY, after=trainer.conduct, by_s=by_s)


def _given_another_chance(turn: Turn, trainer: Trainer) -> Trainer:
    """Ask again in a hold if the time was too short and now suffices: a gauge may have been wrong."""
    given_up = trainer.checkpoint
    waited = turn.now_s - trainer.ordered_at_s >= AGAIN_IN_HOLD_S
    if not (isinstance(given_up, GivenUp) and given_up.cut_short and trainer.alive and waited):
        return trainer
    if _may_try_again(turn, trainer):
        trainer = replace(trainer, checkpoint=NotDurable(tries=given_up.tries))
        _put(turn, trainer)
    return trainer


def all_settled(known: tuple[Trainer, ...]) -> bool:
    """Every living trainer has its checkpoint, or has failed for good."""
    return not any(t.owes for t in known)


def settled_because(known: tuple[Trainer, ...]) -> str:
    """Return a sentence: which checkpoints are durable and which are not."""
    failed = [t.name for t in known if t.given_up is not None]
    if failed:
        return f"no checkpoint from {', '.join(failed)} is confirmed"
    return "every checkpoint is durable" if any(t.durable for t in known) else "no trainer is alive"


def holds_return(known: tuple[Trainer, ...], now_s: float) -> bool:
    """Say whether training must wait for a checkpoint although utility is back: it would tear the state being saved.

    A state that has been copied is written during training, as a periodic save is. One that has not is waited for as
    long as it may still end, unless the rest of it takes longer than all the work that it saves.
    """
    return any(_holds_return(t, now_s) for t in known)


def _holds_return(t: Trainer, now_s: float) -> bool:
    flight = t.in_flight
    if not t.alive or flight is None or flight.copied or not t.pause_ordered:
        return False
    if now_s >= max(flight.eta_at_s or 0.0, t.ordered_at_s + max(2 * t.checkpoint_s, 30.0)):
        return False
    rest_s = max(flight.eta_at_s or 0.0, t.ordered_at_s + t.checkpoint_s) - now_s
    return t.durable_at_s is None or rest_s <= t.ordered_at_s - t.durable_at_s


def resume_all(turn: Turn) -> None:
    """Utility is back, or the operator ordered it: resume every trainer; start one that exited or died."""
    restart, ending = False, []
    for trainer in turn.state.trainers:
        if trainer.stood:
            turn.note("trainer_left_paused", "it was paused before the outage", trainer=trainer.name)
        elif trainer.alive and (trainer.paused or trainer.pause_ordered):
            if escalation.is_stopped(turn.state, trainer.name):  # once it can hear: see `resume_again`
                owe_resume(turn, trainer.name, turn.now_s)
            else:
                _resume(turn, trainer)
        ended = (
            not trainer.alive or trainer.conduct is Conduct.EXIT or escalation.is_terminated(turn.state, trainer.name)
        )
        if trainer.pause_ordered and ended:
            # One that exits may be gone unnoticed; starting a running trainer has no effect.
            restart = True
            ending += [trainer.name] * trainer.alive
    if restart:
        until_s = turn.now_s + ENDS_S if ending else 0.0
        _start(turn, Start(outage=turn.outage_id, tries=0, ending=tuple(ending), until_s=until_s))


def _resume(turn: Turn, trainer: Trainer) -> None:
    """Resume it; the resume is owed until confirmed, even if order and outcome are lost with a kill."""
    turn.order(ResumeTrainer, limit_s=_RESUME_LIMIT_S, trainer=trainer.name, outage=turn.outage_id)
    owe_resume(turn, trainer.name, turn.now_s + _RESUME_LIMIT_S + TRY_AGAIN_S)


def _start(turn: Turn, start: Start) -> None:
    """Order that training is started; it is owed until that is confirmed or has failed too often."""
    turn.order(ResumeTraining, limit_s=_START_LIMIT_S, outage=start.outage)
    again_at_s = turn.now_s + _START_LIMIT_S + TRY_AGAIN_S
    turn.owe(replace(start, at_s=turn.now_s, retry_at_s=again_at_s, confirmed=False))


def handle_start(turn: Turn, outcome: Done | Failed) -> None:
    """Training was to be started again after a return in place; after a return from power-off the gate does it."""
    if isinstance(turn.state.phase, Shutdown | Recovery):
        return
    start = turn.state.start
    if isinstance(outcome, Done):
        _settle_start(turn)
        if start is not None and start.ending and not events.is_recorded(outcome):
            again_s = START_AGAIN_S if _has_ended(turn, start) else 0.0
            turn.owe(replace(start, confirmed=True, retry_at_s=turn.now_s + again_s))
        elif not events.is_recorded(outcome):
            owe_first_trainer(turn, "" if start is None else start.outage)
        return
    outage = outcome.action.outage if isinstance(outcome.action, ResumeTraining) else ""
    start = start or Start(outage=outage, tries=0)
    tries = start.tries + 1
    if tries < START_TRIES:
        turn.owe(replace(start, at_s=turn.now_s, retry_at_s=turn.now_s + START_AGAIN_S, tries=tries))
    else:
        _settle_start(turn)
        because = "training could not be started"
        turn.note("resume_failed", because, Level.ERROR, tries=tries)


def _settle_start(turn: Turn) -> None:
    if turn.state.start is not None:
        turn.settle(turn.state.start)


def owe_first_trainer(turn: Turn, outage: str) -> None:
    """Training was started, and no trainer is there yet: should the host lose power unseen now, it is still owed.

    A scheduler starts its jobs again by itself, and its node may be idle.
    """
    if not turn.policy.scheduler and not any(trainer.alive for trainer in turn.state.trainers):
        until_s = turn.now_s + COMES_S
        turn.owe(Start(outage=outage, at_s=turn.now_s, tries=0, until_s=until_s, confirmed=True))


def start_again(turn: Turn) -> None:
    """Start again what could not be started, while training is to run."""
    phase, start = turn.state.phase, turn.state.start
    if not isinstance(phase, Online) and not (isinstance(phase, OnBattery) and phase.outage.aborted_by):
        return
    if start is None or turn.state.feed.awaits_witness:
        return
    came = not start.ending and any(trainer.alive for trainer in turn.state.trainers)
    if start.confirmed and (came or turn.now_s >= start.until_s):
        turn.settle(start)
        unseen = any(_policy_of(turn.policy, name).unseen for name in start.ending)
        if unseen or _has_ended(turn, start):  # the last order, or the first one if an outage came between
            _start(turn, replace(start, ending=()))
    elif turn.now_s >= start.retry_at_s and (not start.confirmed or _has_ended(turn, start)):
        _start(turn, start)


def _has_ended(turn: Turn, start: Start) -> bool:
    """Say whether a trainer is gone now that was still there when its training was to be started again."""
    alive = {trainer.name for trainer in turn.state.trainers if trainer.alive}
    return any(name not in alive for name in start.ending)


def handle_resumed(turn: Turn, outcome: Done | Failed) -> None:
    """Enter a resume's outcome: without a retry, a trainer whose resume failed would stay paused, unnoticed."""
    if not isinstance(outcome.action, ResumeTrainer):
        return
    name, is_resumed = outcome.action.trainer, isinstance(outcome, Done)
    trainer = turn.state.trainer(name)
    if trainer is not None:
        if is_resumed or not trainer.alive:
            _settle_resume(turn, name)
        else:
            owe_resume(turn, name, turn.now_s + RESUME_AGAIN_S)
        if is_resumed and _in_emergency(turn) and trainer.alive and trainer.pause_ordered:
            # The resume was in flight when the rule paused training, and arrived after that.
            turn.order(PauseTrainer, limit_s=_PAUSE_LIMIT_S, trainer=name, outage=turn.outage_id)


def resume_again(turn: Turn) -> None:
    """Repeat the resumes that were not confirmed, while the trainers are alive and training is not to pause."""
    if turn.state.feed.awaits_witness or not isinstance(turn.state.phase, Online | OnBattery):
        return  # One unconfirmed reading only causes a poll. An abort, too, lets training continue.
    for trainer in turn.state.trainers:
        owed = resume_owed(turn.state, trainer.name)
        due = owed is not None and turn.now_s >= owed.retry_at_s
        if due and not trainer.alive:
            _settle_resume(turn, trainer.name)
        elif due and not escalation.is_stopped(turn.state, trainer.name):
            _resume(turn, trainer)


def forget_outage(turn: Turn, *, resumed: bool) -> None:
    """A new outage begins, or one ends: reset its facts, and forget found trainers that are gone.

    resumed: every trainer was ordered to resume. Else one that a person has paused still stands.
    """
    configured = {t.name for t in turn.policy.trainers}
    known = tuple(t.without_outage() for t in turn.state.trainers if t.alive or t.name in configured)
    _keep(turn, tuple(t.found(paused=t.stood) for t in known) if resumed else known)


# --- A job on several hosts --------------------------------------------------------------------------------------
#
# One host holds the job for all of them, and one that leaves ends it on all. The trainer's library agrees on both with
# the ranks of the other hosts, and each daemon asks only its own trainer (docs/decisions/0232). Here it is logged.
# Training that has ended because another host left is started again as soon as it has gone: its launcher, or the
# scheduler, waits for all hosts.

_LEAVE_LIMIT_S: Final = 1.5
"""Limit of the message at the commit. The ranks of the other hosts would notice anyway, but later."""
JOB_INCOMPLETE: Final = "job_incomplete"


def leave_jobs(turn: Turn, outage: str, *, limit_s: float) -> tuple[str, ...]:
    """Order, at the commit, that each job on several hosts learns that this host leaves; return the orders' ids."""
    return tuple(
        turn.order(LeaveJob, limit_s=min(limit_s, _LEAVE_LIMIT_S), trainer=trainer.name, outage=outage)
        for trainer in turn.state.trainers
        if trainer.alive and trainer.hosts > 1 and not escalation.is_stopped(turn.state, trainer.name)
    )


def handle_job_left(turn: Turn, outcome: Outcome) -> None:
    """Enter that a job has learned it. A failure has a line of its own."""
    if isinstance(outcome, Done) and isinstance(outcome.action, LeaveJob) and not events.is_recorded(outcome):
        turn.note("job_left", "every rank stops at one step and ends", trainer=outcome.action.trainer)


def ended_job(state: State, name: str) -> JobEnded | None:
    """Return what is known of a trainer whose job has ended because another host left it."""
    return next((each for each in state.owing(JobEnded) if each.trainer == name), None)


def _handle_job(turn: Turn, known: Trainer, seen: TrainerSeen) -> None:
    """Enter what a trainer reports of the other hosts of its job. This host's own departure is not one of theirs."""
    if not seen.alive or isinstance(turn.state.phase, Shutdown):
        return
    name = seen.trainer
    if seen.held_by and seen.held_by != known.held_by:
        turn.note("training_held", "on battery there", Level.WARNING, trainer=name, hosts=seen.held_by, step=seen.step)
    elif known.held_by and not seen.held_by and not seen.ended_by:
        turn.note("training_released", "no other host holds it any more", trainer=name, step=seen.step)
    waits = ended_job(turn.state, name)
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


def restart_jobs(turn: Turn) -> None:
    """Start again what has ended with another host's departure, and raise an alarm if it does not train for long."""
    waiting = turn.state.owing(JobEnded)
    if not waiting and JOB_INCOMPLETE not in turn.state.alarms:
        return
    feed = turn.state.feed
    if isinstance(turn.state.phase, Online) and feed.supply is Supply.UTILITY:
        alive = {trainer.name for trainer in turn.state.trainers if trainer.alive}
        ended = [each for each in waiting if not each.started and each.trainer not in alive]
        for each in ended:
            turn.owe(replace(each, started=True))
        start = turn.state.start
        if ended and (start is None or start.confirmed):  # else it is started already, at the end of an outage here
            start = start or Start(tries=0)
            turn.owe(replace(start, at_s=turn.now_s, retry_at_s=turn.now_s, tries=0, confirmed=False))
    late = [each for each in waiting if turn.now_s - each.at_s >= turn.policy.job_wait_s]
    why = "; ".join(f"{each.trainer}: {each.because}, and training has not run since" for each in late)
    turn.set_alarm(JOB_INCOMPLETE, why or "training runs again", holds=bool(late), level=Level.ERROR)
