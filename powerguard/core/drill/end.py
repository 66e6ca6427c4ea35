"""How a drill ends: everything is put back, until its outcome confirms it; then the drill is reported.

An order that may still be on its way to a trainer keeps the drill in `undo` until it has ended. Then the trainer gets
its resume once more, so that a late pause cannot follow the resume.
"""

from dataclasses import replace

from powerguard.core.decide.turn import Turn
from powerguard.core.drill.measures import change, figure, find, mark, order, report_health, rounded
from powerguard.core.model.actions import Action, EnsurePolicy, Level, RestorePower, ResumeTrainer
from powerguard.core.model.policy import DrillReport
from powerguard.core.model.state import Drill, DrillStage, HandedOver, OnBattery, PlugPulled, Shutdown, State, Undoing
from powerguard.core.trainers import escalation, lifecycle
from powerguard.core.trainers.escalation import CAP_LIMIT_S

UNDO_S = 60.0
"""How long the drill waits for confirmed resumes after the last order that may still be on its way."""
GRACE_S = 5.0
"""An order without an outcome this long after its deadline is taken for lost."""
PAUSING = ("pause", "checkpoint")
_RESUME_S = 10.0


def undo(turn: Turn, result: str, because: str) -> None:
    """Begin to put everything back; the drill ends when all of it is. Asked twice, the first reason stands."""
    drill = turn.state.drill
    if drill is not None and not isinstance(drill.part, Undoing):
        _begin_to_undo(turn, drill, result, because)


def _begin_to_undo(turn: Turn, drill: Drill, result: str, because: str) -> None:
    change(turn, part=Undoing(at_s=turn.now_s, result=result, because=because))
    if drill.paused or drill.waiting or turn.state.cap is not None:
        turn.note("drill_undoing", because, drill=drill.id, paused=len(drill.paused), open=len(drill.waiting))
    for name in drill.paused:
        resume(turn, name)
    restore(turn)


def resume(turn: Turn, name: str) -> None:
    """Resume a trainer. One that is gone is not paused."""
    drill, trainer = turn.state.drill, find(turn, name)
    if drill is None:
        return
    if trainer is None or not trainer.alive:
        _forget(turn, name)
    else:
        order(turn, ResumeTrainer, "resume", limit_s=_RESUME_S, trainer=name)


def heard(turn: Turn, name: str, order_id: str, *, resumed: bool) -> None:
    """Enter that a trainer was resumed. It counts once no opposite order is on its way."""
    drill = turn.state.drill
    if drill is None or name not in drill.paused or not lets_go_on(turn, drill):
        return
    if any(each.trainer == name and each.id != order_id for each in drill.waiting):
        return
    _forget(turn, name)
    if resumed:
        mark(turn, name, paused=False)


def owe_resume(turn: Turn, name: str, after_s: float = 0.0) -> None:
    """Owe it a resume from after_s on, for as long as it is alive."""
    if find(turn, name) is not None:
        lifecycle.owe_resume(turn, name, turn.now_s + after_s)


def _forget(turn: Turn, name: str) -> None:
    """Enter that this trainer is no longer owed a resume."""
    if turn.state.drill is not None:
        change(turn, paused=tuple(other for other in turn.state.drill.paused if other != name))
    mark(turn, name, told_pause=False)


def restore(turn: Turn) -> None:
    """Restore GPU power if it was this drill that capped it, and no order about it is on its way: else after that."""
    drill, cap = turn.state.drill, turn.state.cap
    if drill is not None and cap is not None and cap.outage == drill.id and cap.order is None:
        id_ = order(turn, RestorePower, "restore", limit_s=CAP_LIMIT_S)
        turn.owe(replace(cap, at_s=turn.now_s, order=id_, lifting=True))


def finish(turn: Turn, drill: Drill, undoing: Undoing) -> None:
    """End the drill once no trainer is paused by it and none of its orders is on its way."""
    for name in drill.paused:
        trainer = find(turn, name)
        if trainer is None or not trainer.alive:
            _forget(turn, name)
    drill = turn.state.drill or drill
    cap = turn.state.cap
    capped = cap is not None and cap.outage == drill.id
    if not drill.waiting and not drill.paused and not capped:
        report(turn, drill, undoing.result, undoing.because)
        turn.update(drill=None)
        return
    if cap is not None and not cap.lifting:
        restore(turn)  # One that failed is tried again by `escalation.tend_cap`.
    for name in drill.paused:
        trainer = find(turn, name)
        # A failed resume is repeated: `lifecycle.resume_again`.
        owed = lifecycle.resume_owed(turn.state, name)
        if trainer is not None and owed is None and not _is_on_its_way(drill, name):
            resume(turn, name)
    by_s = max((each.by_s for each in drill.waiting if each.what not in ("resume", "restore")), default=0.0)
    if turn.now_s < max(by_s, undoing.at_s) + UNDO_S:
        return
    left = [*drill.paused, *(("GPU power limits",) if capped else ())]
    for name in drill.paused:
        # From here on the obligation repeats the resume, for as long as the trainer is alive.
        owe_resume(turn, name)
        mark(turn, name, told_pause=False)
    turn.note("drill_left_behind", "not put back yet; powerguard keeps trying", Level.ERROR, what=", ".join(left))
    report(
        turn, drill, "failed", f"{', '.join(left)} could not be put back; powerguard keeps trying ({undoing.because})"
    )
    turn.update(drill=None)


def _is_on_its_way(drill: Drill, name: str) -> bool:
    return any(each.trainer == name for each in drill.waiting)


def forget_lost_orders(turn: Turn, drill: Drill) -> None:
    """Give up on orders that will have no outcome any more."""
    lost = tuple(each for each in drill.waiting if turn.now_s > each.by_s + GRACE_S)
    if lost:
        failures = tuple(f"{each.what}: no outcome" for each in lost if each.what not in ("resume", "restore"))
        waiting = tuple(each for each in drill.waiting if each not in lost)
        change(turn, waiting=waiting, failures=(*drill.failures, *failures))


def report(turn: Turn, drill: Drill, result: str, because: str) -> None:
    """Report how the drill went, and keep the report; once."""
    known = turn.state.learned.drill
    if known is not None and known.id == drill.id:
        return
    lasted_s = round(turn.now_s - drill.began_s, 3)
    told = DrillReport(
        id=drill.id,
        at_s=turn.now_s,
        scopes=drill.scopes,
        result=result,
        because=because,
        figures=drill.figures,
        who=drill.who,
        witness=drill.witness,
        lasted_s=lasted_s,
    )
    turn.update(learned=replace(turn.state.learned, drill=told))
    level = Level.INFO if result in ("passed", "recorded") else Level.WARNING
    figures = {name: value for name, value in drill.figures if "." not in name and not name.startswith("skipped_")}
    turn.note("drill_ended", because, level, **{"drill": drill.id, "result": result, "lasted_s": lasted_s, **figures})


# --- When something else comes first --------------------------------------------------------------------------------


def lets_go_on(turn: Turn, drill: Drill) -> bool:
    """Say whether the trainers that the drill has paused are to continue: not while an outage pauses training."""
    return not isinstance(drill.part, HandedOver) or isinstance(turn.state.phase, OnBattery)


def interrupt(turn: Turn, because: str) -> None:
    """A real outage begins and comes first, by its own rule. Until that rule pauses training, it continues."""
    drill = turn.state.drill
    if drill is None or isinstance(drill.part, PlugPulled | HandedOver):
        return
    if drill.stage == "plug":
        battery, reading = turn.state.battery, turn.state.feed.reading
        change(turn, part=PlugPulled(at_s=turn.now_s))
        figure(turn, load_before=rounded(battery.load), health_before=rounded(battery.health))
        figure(turn, charge_before_pct=None if reading is None else reading.charge_pct)
        turn.note("drill_stage", "outage", drill=drill.id, pulled_by=drill.who)
        return
    for name in drill.paused:
        mark(turn, name, told_pause=True)  # Until the resume is confirmed, the load is that of a pause.
    report(turn, drill, "interrupted", f"a real outage: {because}")
    # The drill waits at its end for an order that may still reach a trainer after the outage.
    waiting = tuple(each for each in drill.waiting if each.what in PAUSING)
    owed = replace(drill, part=HandedOver(at_s=turn.now_s), waiting=waiting)
    capped = turn.state.cap is not None and turn.state.cap.outage == drill.id
    turn.update(drill=owed if drill.paused or capped else None)


def tend_in_outage(turn: Turn) -> None:
    """Repeat the resume of each trainer that the drill has paused, until the outage's own rule pauses training.

    An order of the drill may still reach it later, so the resume is sent once more when that order has ended.
    """
    drill = turn.state.drill
    if drill is None or not isinstance(drill.part, HandedOver):
        return
    forget_lost_orders(turn, drill)
    first = turn.now_s <= drill.part.at_s
    for name in drill.paused:
        drill, trainer = turn.state.drill or drill, find(turn, name)
        told = any(each.what == "resume" and each.trainer == name for each in drill.waiting)
        if trainer is None or not trainer.alive:
            _forget(turn, name)
        elif (
            lifecycle.resume_owed(turn.state, name) is None and not told and (first or not _is_on_its_way(drill, name))
        ):
            resume(turn, name)
    drill = turn.state.drill or drill
    capped = turn.state.cap is not None and turn.state.cap.outage == drill.id
    if not drill.paused and not drill.waiting and not capped:
        turn.update(drill=None)


def load_at_start(turn: Turn) -> float | None:
    """Return the load with which an outage begins: of training as it ran, not as a drill had paused or capped it."""
    drill = turn.state.drill
    if drill is not None and isinstance(drill.part, HandedOver) and drill.load is not None:
        return drill.load
    return turn.state.battery.load


def end_of_outage(turn: Turn, because: str) -> None:
    """The outage is over: trainers that the drill had paused continue, however it ended; a pulled plug is back."""
    drill = turn.state.drill
    if drill is None or not isinstance(drill.part, PlugPulled | HandedOver):
        return
    told = {action.trainer for action in turn.actions if isinstance(action, ResumeTrainer)}
    for name in drill.paused:
        trainer = find(turn, name)
        stopped = escalation.is_stopped(turn.state, name)  # it cannot answer yet, and is owed a resume: `resume_again`
        if trainer is not None and trainer.alive and name not in told and not stopped:
            order(turn, ResumeTrainer, "resume", limit_s=_RESUME_S, trainer=name)
            owe_resume(turn, name, _RESUME_S + GRACE_S)  # The drill may end before that.
    if isinstance(drill.part, PlugPulled):
        reading = turn.state.feed.reading
        figure(turn, outage_s=round(turn.now_s - drill.part.at_s, 3))
        figure(turn, charge_after_pct=None if reading is None else reading.charge_pct)
        report_health(turn, drill.began_s)
        drill = turn.state.drill or drill
        if dict(drill.figures).get("powered_off_clean") is False:
            report(turn, drill, "failed", "the plug was pulled, and the host lost power before it was off")
        else:
            report(turn, drill, "passed", f"the plug was pulled, and the outage ended: {because}")
    if drill.waiting and isinstance(drill.part, HandedOver):
        change(turn, part=Undoing(at_s=turn.now_s, result="interrupted", because="a real outage"))
    else:
        turn.update(drill=None)


def after_restart(turn: Turn, in_flight: tuple[Action, ...]) -> tuple[Action, ...]:
    """The daemon was restarted in this boot: return what is to be repeated of in_flight, and put everything back.

    An order that may have paused a trainer or capped GPUs is not repeated, and counts as carried out.
    """
    drill = turn.state.drill
    if drill is None:
        return in_flight
    own = {action.id for action in in_flight if getattr(action, "outage", None) == drill.id}
    own |= {action.id for action in in_flight if isinstance(action, EnsurePolicy) and not action.outage}
    own |= {each.id for each in drill.waiting}
    for trainer in turn.state.trainers:
        if trainer.order in own:
            mark(turn, trainer.name, in_flight=None)
    cap = turn.state.cap
    if cap is not None and cap.order in own:
        turn.owe(replace(cap, order=None))
    # A trainer that was given up as gone is back, and the order to pause may have reached it.
    reached = [each.trainer for each in drill.waiting if each.what in PAUSING and each.trainer in drill.told]
    standing = [name for name in reached if (found := find(turn, name)) is not None and found.alive]
    change(turn, waiting=(), paused=tuple(dict.fromkeys((*drill.paused, *standing))))
    if isinstance(drill.part, DrillStage):
        _begin_to_undo(turn, turn.state.drill or drill, "interrupted", "the daemon was restarted in the middle of it")
    elif isinstance(drill.part, Undoing):
        _begin_to_undo(turn, turn.state.drill or drill, drill.part.result, drill.part.because)
    return tuple(action for action in in_flight if action.id not in own)


def after_reboot(turn: Turn, old: State, shift_s: float) -> None:
    """Another boot ended every pause and limit of the old one, so the drill is only reported.

    With a pulled plug the power-off was a part of it, and so is the return: it ends when training runs again.
    """
    drill = old.drill
    if drill is None or isinstance(drill.part, HandedOver):
        return
    drill = replace(drill, began_s=drill.began_s + shift_s, part=replace(drill.part, at_s=drill.part.at_s + shift_s))
    if isinstance(drill.part, PlugPulled):
        turn.update(drill=drill)
        figure(turn, powered_off_clean=isinstance(old.phase, Shutdown) and bool(old.phase.force_at_s))
    else:
        report(turn, drill, "interrupted", "the host was restarted in the middle of it")
