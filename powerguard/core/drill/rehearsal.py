r"""A drill rehearses an outage on the real host, measures it, and always ends with everything as it was.

    baseline -> checkpoint -> pause -> resume -> cap -> restore -> policy -> sync -> record      (what is in scope)
         \__________\__________\________\________\_______\_________\________\_______\____ undo -> report

It runs on utility, in the phase online, as part of the core's state: it is journalled with it, so a daemon that starts
after a kill -9 or a restart puts everything back. A real outage ends it at once and comes first, by its own
rule: trainers that the drill has paused continue until that rule pauses them. A daemon that dies and does not come back
leaves no trainer paused: the drill asks for a lease, which ends when the trainer no longer hears the daemon.

With a pulled plug (`plug`) or a test of the UPS itself (`self_test`) as witness the drill gives no orders: it waits,
and measures what happens.
"""

from dataclasses import replace
from typing import Any, Final

from powerguard.core.decide import conditions
from powerguard.core.decide.turn import Turn
from powerguard.core.drill import checks
from powerguard.core.drill.measures import (
    change,
    change_stage,
    figure,
    is_recorded,
    look_at_baseline,
    look_at_load,
    look_at_resume,
    look_at_self_test,
    mark,
    order,
    report_health,
    rounded,
    watch_reading,
    watch_trainer,
)
from powerguard.core.energy import budget, own
from powerguard.core.model import events
from powerguard.core.model.actions import (
    Action,
    CapPower,
    Conduct,
    EnsurePolicy,
    Level,
    PauseTrainer,
    RestorePower,
    ResumeTrainer,
    Scalar,
    SyncFilesystems,
    TriggerCheckpoint,
)
from powerguard.core.model.events import (
    Done,
    Event,
    Failed,
    ForeignStop,
    Outcome,
    Reading,
    StartDrill,
    StopDrill,
    TrainerSeen,
)
from powerguard.core.model.policy import DrillReport, Mode
from powerguard.core.model.state import (
    CheckpointInFlight,
    Drill,
    DrillOrder,
    DrillStage,
    GpuCap,
    HandedOver,
    OnBattery,
    Online,
    PlugPulled,
    Recovery,
    Shutdown,
    State,
    Supply,
    Trainer,
    Undoing,
)
from powerguard.core.supply import fusion
from powerguard.core.trainers import escalation, lifecycle
from powerguard.core.trainers.escalation import CAP_LIMIT_S

STAGES: Final = (
    "baseline",
    "checkpoint",
    "pause",
    "resume",
    "cap",
    "restore",
    "policy",
    "sync",
    "record",
    "plug",
    "self_test",
    "outage",
    "handed_over",
    "undo",
)
"""outage: the plug has been pulled and the real rules run. handed_over: a real outage owes trainers a resume."""
LEASE_S: Final = 60.0
"""Lease of a drill's pause, counted from the daemon's last request; the daemon polls each trainer every 5 s."""
RESULTS: Final = ("passed", "failed", "interrupted", "recorded")
"""recorded: in dry-run no trainer is asked, so there is no measurement."""
UNDO_S = 60.0
"""How long the drill waits for confirmed resumes after the last order that may still be on its way."""
GRACE_S = 5.0
"""An order without an outcome this long after its deadline is taken for lost."""
PAUSING = ("pause", "checkpoint")
_RESUME_S = 10.0
_PLAIN: Final[dict[str, type[Action]]] = {"policy": EnsurePolicy, "sync": SyncFilesystems}


# --- Handling an event ------------------------------------------------------------------------------------------


def handle(turn: Turn, event: Event) -> None:
    """Enter what concerns the drill; the rest is passed over."""
    drill = turn.state.drill
    if isinstance(event, StartDrill):
        _start(turn, event)
    elif isinstance(event, Outcome):
        _handle_outcome(turn, event)
    elif drill is None:
        return
    elif isinstance(event, Reading) and (merged := turn.state.feed.reading) is not None and merged.at_s >= event.at_s:
        if isinstance(drill.part, DrillStage):
            # What all sources and feeds say together.
            change(turn, part=watch_reading(turn.policy, turn.state, drill.part, merged))
    elif isinstance(event, TrainerSeen):
        if isinstance(drill.part, DrillStage):
            change(turn, part=watch_trainer(drill.part, event))
    elif isinstance(turn.state.phase, Online) and isinstance(event, StopDrill):
        undo(turn, "interrupted", f"stopped by {event.who}" + (f": {event.reason}" if event.reason else ""))
    elif isinstance(turn.state.phase, Online) and isinstance(event, ForeignStop):
        undo(turn, "interrupted", "the daemon is being stopped")


def _start(turn: Turn, event: StartDrill) -> None:
    scopes = tuple(dict.fromkeys(event.scopes))
    why = checks.refusal(turn.policy, turn.state, turn.now_s, scopes, event.witness)
    if why:
        turn.note("drill_refused", why, Level.WARNING, who=event.who, scopes=",".join(event.scopes))
        return
    stages, skipped = checks.stages(turn.policy, turn.state, scopes, event.witness)
    drill = Drill(
        id=f"{turn.policy.boot_id[:8]}-drill-{max(0, int(turn.now_s * 10))}",
        began_s=turn.now_s,
        who=event.who,
        scopes=scopes,
        witness=event.witness,
        part=DrillStage(name="", at_s=turn.now_s, coming=stages),
        figures=tuple((f"skipped_{name}", reason) for name, reason in skipped),
    )
    turn.update(drill=drill)
    if turn.policy.mode is Mode.DRY_RUN:
        figure(turn, dry_run=True)
    turn.note("drill_began", event.who, drill=drill.id, scopes=",".join(scopes), witness=event.witness)


def _handle_outcome(turn: Turn, outcome: Done | Failed) -> None:
    action = outcome.action
    if isinstance(action, ResumeTrainer) and isinstance(outcome, Done):
        heard(turn, action.trainer, action.id, resumed=events.is_resumed(outcome))
    drill = turn.state.drill
    waited = None if drill is None else next((each for each in drill.waiting if each.id == action.id), None)
    if drill is None or waited is None:
        _handle_stranger(turn, action)
        if drill is not None and isinstance(drill.part, PlugPulled) and isinstance(action, TriggerCheckpoint):
            _enter_checkpoint(turn, drill, action.trainer, outcome)
        return
    change(turn, waiting=tuple(each for each in drill.waiting if each is not waited))
    if isinstance(outcome, Done):
        _handle_done(turn, waited, outcome)
    elif waited.what not in ("resume", "restore"):  # those are repeated
        _fail(turn, f"{waited.what}: {f'{waited.trainer}: ' if waited.trainer else ''}{outcome.reason}")
    going_on = isinstance(drill.part, Undoing) or (isinstance(drill.part, HandedOver) and lets_go_on(turn, drill))
    if going_on and waited.what in PAUSING and waited.trainer in drill.ordered_to_pause:
        # It may have reached the trainer after its resume, whatever the outcome.
        change(turn, paused=tuple(dict.fromkeys((*drill.paused, waited.trainer))))
        resume(turn, waited.trainer)


def _enter_checkpoint(turn: Turn, drill: Drill, name: str, outcome: Outcome) -> None:
    """Enter how a checkpoint behind a pulled plug ended; one that has failed for good may still be tried again."""
    if isinstance(outcome, Done) and not events.is_recorded(outcome):
        figure(turn, **{f"checkpoint_s.{name}": round(outcome.took_s, 3)})
    what, trainer = f"checkpoint: {name}: ", turn.state.trainer(name)
    given_up = None if trainer is None else trainer.given_up
    failed = () if given_up is None else (f"{what}{given_up.because}",)
    change(turn, failures=(*(each for each in drill.failures if not each.startswith(what)), *failed))


def _handle_stranger(turn: Turn, action: Action) -> None:
    """Enter a late outcome, while training goes on: no trainer may stay paused because of it."""
    drill = turn.state.drill
    goes_on = isinstance(turn.state.phase, Online | OnBattery)
    if not goes_on or (drill is not None and not isinstance(drill.part, Undoing)):
        return
    is_of_outage = isinstance(action, TriggerCheckpoint) and action.reason != "drill"
    if lifecycle.would_pause(action) and not is_of_outage:
        owe_resume(turn, action.trainer)


def _handle_done(turn: Turn, waited: DrillOrder, done: Done) -> None:
    recorded = events.is_recorded(done)
    if recorded:
        mark(turn, waited.trainer, lambda t: t.found(paused=False))  # It was not asked.
    match waited.what:
        case "checkpoint" if not recorded:
            verified = events.checkpoint_done(done).verified
            figure(turn, **{f"checkpoint_s.{waited.trainer}": round(done.took_s, 3)})
            figure(turn, **{f"checkpoint_verified.{waited.trainer}": verified})
        case "policy":
            found = events.policy_ensured(done)
            figure(turn, policy=found.policy, policy_verified=found.verified)
            if not found.verified and not recorded:
                _fail(turn, f"policy: read back as {found.policy or 'unknown'}: the host may stay off")
        case "sync" if not recorded:
            figure(turn, sync_s=round(done.took_s, 3))
        case _:
            pass
    drill = turn.state.drill
    if drill is not None and drill.stage == waited.what:
        change_stage(turn, samples=(), seen=())  # Readings from before it took effect do not count.


def _fail(turn: Turn, why: str) -> None:
    if turn.state.drill is not None:
        change(turn, failures=(*turn.state.drill.failures, why))


# --- The stages -----------------------------------------------------------------------------------------------------


def reconcile(turn: Turn) -> None:
    """Go on with the drill, on utility: asked at every event."""
    drill = turn.state.drill
    if drill is None or turn.state.feed.awaits_witness:
        return  # A single reading of battery is not an outage yet, but orders wait.
    forget_lost_orders(turn, drill)
    if because := _unsafe(turn, drill):
        undo(turn, "interrupted", because)
    for _ in STAGES:
        drill = turn.state.drill
        if drill is None:
            return
        if isinstance(drill.part, Undoing):
            finish(turn, drill, drill.part)
            return
        failure = _look(turn, drill)
        if failure is None:
            return
        if failure:
            undo(turn, "failed", failure)
        else:
            _next_stage(turn)


def _unsafe(turn: Turn, drill: Drill) -> str:
    """Say why the drill must not go on, or ""."""
    feed = turn.state.feed
    if feed.supply is not Supply.UTILITY:
        return "it is unknown whether utility is there"
    if feed.lost_since_s is not None:
        return "the UPS no longer answers"
    if fusion.is_draining(feed) and drill.witness != "self_test":
        return "the UPS began to test its battery"
    return ""


def _look(turn: Turn, drill: Drill) -> str | None:
    """Return the state of the stage: None = it continues; "" = it is over; else why the drill has failed."""
    if drill.failures and drill.stage not in ("policy", "sync", "record"):
        return "; ".join(drill.failures)
    dead = [
        name for name in drill.ordered_to_pause if (trainer := turn.state.trainer(name)) is None or not trainer.alive
    ]
    if dead and drill.stage in ("checkpoint", "pause", "resume"):
        return f"{', '.join(dead)}: died while the drill held it"
    stage = drill.part
    if not isinstance(stage, DrillStage):
        return None if drill.waiting else ""
    late = turn.now_s >= stage.by_s
    match stage.name:
        case "baseline":
            return look_at_baseline(turn, stage)
        case "checkpoint" if not drill.waiting:
            if not is_recorded(drill):
                figure(turn, checkpoint_s=round(turn.now_s - stage.at_s, 3))
            return ""
        case "pause" | "cap" if not drill.waiting:
            return look_at_load(turn, drill, stage)
        case "resume":
            return look_at_resume(turn, drill, stage)
        case "restore" if turn.state.cap is not None:
            return "the GPU power limits could not be restored" if late else None
        case "plug":
            return "the plug was not pulled in time" if late else None
        case "self_test":
            return look_at_self_test(turn, drill, stage)
        case _:
            return None if drill.waiting else ""


def _next_stage(turn: Turn) -> None:
    """Begin the next stage, or put everything back when there is none."""
    drill = turn.state.drill
    if drill is None:
        return
    if isinstance(drill.part, DrillStage) and drill.part.coming:
        stage, *rest = drill.part.coming
        limit_s = checks.stage_s(turn.policy, turn.state, stage, drill.part.coming)
        part = DrillStage(name=stage, at_s=turn.now_s, by_s=turn.now_s + limit_s, coming=tuple(rest))
        change(turn, part=part)
        turn.note("drill_stage", stage, drill=drill.id, limit_s=round(limit_s, 3))
        _begin(turn, part, limit_s)
    elif is_recorded(drill):
        seen = f"; seen: {'; '.join(drill.failures)}" if drill.failures else ""
        undo(turn, "recorded", f"dry-run: no trainer was asked, so there is no measurement{seen}")
    elif drill.failures:
        undo(turn, "failed", "; ".join(drill.failures))
    else:
        undo(turn, "passed", "every stage was carried out")


def _begin(turn: Turn, begun: DrillStage, limit_s: float) -> None:
    """Order what a stage begins with; baseline, plug and self_test only look."""
    drill, stage = turn.state.drill, begun.name
    if drill is None:
        return
    if stage == "checkpoint":
        _order_checkpoints(turn, pausing="pause" in begun.coming)
    elif stage == "pause":
        _order_pauses(turn, drill, limit_s)
    elif stage == "resume":
        for name in drill.paused:
            resume(turn, name)
    elif stage in _PLAIN:
        order(turn, _PLAIN[stage], stage, limit_s=limit_s)
    elif stage == "cap":
        _cap(turn)
    elif stage == "restore":
        restore(turn)
    elif stage == "record":
        _record_power_off(turn)


def _order_checkpoints(turn: Turn, *, pausing: bool) -> None:
    alive = [trainer for trainer in turn.state.trainers if trainer.alive]
    figure(turn, checkpoint_expected_s=rounded(turn.budget().checkpoint_s))
    for trainer in alive:
        _order_checkpoint(turn, trainer, pausing=pausing)
    if not alive:
        _fail(turn, "every trainer is gone, so the drill measured none")


def _order_pauses(turn: Turn, drill: Drill, limit_s: float) -> None:
    pausing = checks.pausing(turn.state)
    for trainer in pausing:
        if trainer.name not in drill.ordered_to_pause:
            _will_pause(turn, trainer)
            order(turn, PauseTrainer, "pause", limit_s=limit_s, trainer=trainer.name, lease_s=LEASE_S)
    if not pausing and not drill.ordered_to_pause:
        _fail(turn, "every trainer that pauses is gone, so the drill measured none")


def _cap(turn: Turn) -> None:
    drill = turn.state.drill
    if drill is None:
        return
    id_ = order(turn, CapPower, "cap", limit_s=CAP_LIMIT_S, share=turn.policy.cap_share or 1.0)
    turn.owe(GpuCap(outage=drill.id, at_s=turn.now_s, order=id_))


def _order_checkpoint(turn: Turn, trainer: Trainer, *, pausing: bool) -> None:
    """As in an outage: checkpoint and pause are one order, where both are rehearsed. A drill ends no training."""
    after = Conduct.PAUSE if pausing and trainer.conduct is not Conduct.CONTINUE else Conduct.CONTINUE
    if after is Conduct.PAUSE:
        _will_pause(turn, trainer)
    limit_s = checks.checkpoint_limit_s(trainer)
    lease_s = LEASE_S if after is Conduct.PAUSE else None
    fields: dict[str, Any] = {"trainer": trainer.name, "reason": "drill", "after": after, "lease_s": lease_s}
    id_ = order(turn, TriggerCheckpoint, "checkpoint", limit_s=limit_s, **fields)
    flight = CheckpointInFlight(order=id_)
    mark(turn, trainer.name, lambda t: replace(t, in_flight=flight, ordered_at_s=turn.now_s))


def _will_pause(turn: Turn, trainer: Trainer) -> None:
    """From before the order on, this trainer counts as paused by the drill."""
    drill = turn.state.drill
    if drill is not None and turn.state.trainer(trainer.name) is not None:
        change(turn, paused=(*drill.paused, trainer.name), ordered_to_pause=(*drill.ordered_to_pause, trainer.name))
        mark(turn, trainer.name, lambda t: replace(t, pause_ordered=True))


def _as_it_trained(turn: Turn, drill: Drill) -> State:
    """Return the state with the load that training had before the drill: the newest readings may be those of a pause.

    On a shared UPS whose drill measured this host alone, its part is put back, and the others' load counts as it is.
    """
    state, load = turn.state, turn.state.battery.load
    if drill.load is None:
        return state
    if dict(drill.figures).get("load_of", "ups") == "ups":
        return replace(state, battery=replace(state.battery, load=drill.load))
    host_load = own.own_load(turn.policy, state, turn.now_s)
    if load is None or host_load is None or not host_load.measured:
        return state
    fell = max(0.0, drill.load - host_load.load)
    fell_w = fell * (host_load.rating_w or 0.0)
    reports = (
        replace(each, watts=each.watts + fell_w) if each.source is host_load.source else each for each in state.own
    )
    return replace(state, battery=replace(state.battery, load=load + fell), own=tuple(reports))


def _record_power_off(turn: Turn) -> None:
    """Record the power-off that an outage would order; a drill never orders it."""
    drill = turn.state.drill
    state = turn.state if drill is None else _as_it_trained(turn, drill)
    now = conditions.outage_budget(turn.policy, state, turn.now_s)
    figures: dict[str, Scalar] = {
        "power_off_grade": now.grade.value,
        "power_off_force_after_s": round(budget.force_after_s(turn.policy, now.grade), 3),
        "stop_s": round(now.stop_s, 3),
        "runtime_paused_s": rounded(now.reff_paused_s),
        "fits": now.fits,
    }
    turn.note("power_off_rehearsed", "a drill does not order a power-off", Level.INFO, **figures)
    figure(turn, **figures)


# --- The end --------------------------------------------------------------------------------------------------------
#
# Everything is put back, until its outcome confirms it; then the drill is reported. An order that may still be on its
# way to a trainer keeps the drill in `undo` until it has ended. Then the trainer gets its resume once more, so that a
# late pause cannot follow the resume.


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
    drill, trainer = turn.state.drill, turn.state.trainer(name)
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
        mark(turn, name, lambda t: t.found(paused=False))


def owe_resume(turn: Turn, name: str, after_s: float = 0.0) -> None:
    """Owe it a resume from after_s on, for as long as it is alive."""
    if turn.state.trainer(name) is not None:
        lifecycle.owe_resume(turn, name, turn.now_s + after_s)


def _forget(turn: Turn, name: str) -> None:
    """Enter that this trainer is no longer owed a resume."""
    if turn.state.drill is not None:
        change(turn, paused=tuple(other for other in turn.state.drill.paused if other != name))
    mark(turn, name, lambda t: replace(t, pause_ordered=False))


def restore(turn: Turn) -> None:
    """Restore GPU power if it was this drill that capped it, and no order about it is on its way: else after that."""
    drill, cap = turn.state.drill, turn.state.cap
    if drill is not None and cap is not None and cap.outage == drill.id and cap.order is None:
        id_ = order(turn, RestorePower, "restore", limit_s=CAP_LIMIT_S)
        turn.owe(replace(cap, at_s=turn.now_s, order=id_, lifting=True))


def finish(turn: Turn, drill: Drill, undoing: Undoing) -> None:
    """End the drill once no trainer is paused by it and none of its orders is on its way."""
    for name in drill.paused:
        trainer = turn.state.trainer(name)
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
        restore(turn)  # One that failed is tried again by `escalation.reconcile_cap`.
    for name in drill.paused:
        trainer = turn.state.trainer(name)
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
        mark(turn, name, lambda t: replace(t, pause_ordered=False))
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
    drill_report = DrillReport(
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
    turn.update(learned=replace(turn.state.learned, drill=drill_report))
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
        # Until the resume is confirmed, the load is that of a pause.
        mark(turn, name, lambda t: replace(t, pause_ordered=True))
    report(turn, drill, "interrupted", f"a real outage: {because}")
    # The drill waits at its end for an order that may still reach a trainer after the outage.
    waiting = tuple(each for each in drill.waiting if each.what in PAUSING)
    owed = replace(drill, part=HandedOver(at_s=turn.now_s), waiting=waiting)
    capped = turn.state.cap is not None and turn.state.cap.outage == drill.id
    turn.update(drill=owed if drill.paused or capped else None)


def reconcile_in_outage(turn: Turn) -> None:
    """Repeat the resume of each trainer that the drill has paused, until the outage's own rule pauses training.

    An order of the drill may still reach it later, so the resume is sent once more when that order has ended.
    """
    drill = turn.state.drill
    if drill is None or not isinstance(drill.part, HandedOver):
        return
    forget_lost_orders(turn, drill)
    first = turn.now_s <= drill.part.at_s
    for name in drill.paused:
        drill, trainer = turn.state.drill or drill, turn.state.trainer(name)
        is_ordered = any(each.what == "resume" and each.trainer == name for each in drill.waiting)
        if trainer is None or not trainer.alive:
            _forget(turn, name)
        elif (
            lifecycle.resume_owed(turn.state, name) is None
            and not is_ordered
            and (first or not _is_on_its_way(drill, name))
        ):
            resume(turn, name)
    drill = turn.state.drill or drill
    capped = turn.state.cap is not None and turn.state.cap.outage == drill.id
    if not drill.paused and not drill.waiting and not capped:
        turn.update(drill=None)


def load_at_start(turn: Turn) -> float | None:
    """Return the load with which an outage begins: of training as it ran, not as a drill had paused or capped it."""
    drill = turn.state.drill
    if drill is not None and isinstance(drill.part, HandedOver):
        return _as_it_trained(turn, drill).battery.load
    return turn.state.battery.load


def end_of_outage(turn: Turn, because: str) -> None:
    """The outage is over: trainers that the drill had paused continue, however it ended; a pulled plug is back."""
    drill = turn.state.drill
    if drill is None or not isinstance(drill.part, PlugPulled | HandedOver):
        return
    resumed = {action.trainer for action in turn.actions if isinstance(action, ResumeTrainer)}
    for name in drill.paused:
        trainer = turn.state.trainer(name)
        stopped = escalation.is_stopped(turn.state, name)  # it cannot answer yet, and is owed a resume: `resume_again`
        if trainer is not None and trainer.alive and name not in resumed and not stopped:
            order(turn, ResumeTrainer, "resume", limit_s=_RESUME_S, trainer=name)
            owe_resume(turn, name, _RESUME_S + GRACE_S)  # The drill may end before that.
    if isinstance(drill.part, PlugPulled):
        reading = turn.state.feed.reading
        figure(turn, outage_s=round(turn.now_s - drill.part.at_s, 3))
        figure(turn, charge_after_pct=None if reading is None else reading.charge_pct)
        report_health(turn, drill.began_s)
        drill = turn.state.drill or drill
        report(turn, drill, *_how_it_ended(turn, drill, because))
    if drill.waiting and isinstance(drill.part, HandedOver):
        change(turn, part=Undoing(at_s=turn.now_s, result="interrupted", because="a real outage"))
    else:
        turn.update(drill=None)


def _how_it_ended(turn: Turn, drill: Drill, because: str) -> tuple[str, str]:
    """Return the result of a drill whose plug was pulled, and why."""
    if dict(drill.figures).get("powered_off_clean") is False:
        return "failed", "the plug was pulled, and the host lost power before it was off"
    unseen = [because for note in turn.notes if note.event in ("resume_failed", "resume_unconfirmed")]
    if failures := (*drill.failures, *unseen):
        return "failed", f"the plug was pulled, and the outage ended; {'; '.join(failures)}"
    result = "recorded" if is_recorded(drill) else "passed"
    return result, f"the plug was pulled, and the outage ended: {because}"


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
            mark(turn, trainer.name, lambda t: replace(t, in_flight=None))
    cap = turn.state.cap
    if cap is not None and cap.order in own:
        turn.owe(replace(cap, order=None))
    # A trainer that was given up as gone is back, and the order to pause may have reached it.
    reached = [
        each.trainer for each in drill.waiting if each.what in PAUSING and each.trainer in drill.ordered_to_pause
    ]
    standing = [name for name in reached if (found := turn.state.trainer(name)) is not None and found.alive]
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
        if not isinstance(old.phase, Recovery):  # A further boot says nothing of the power-off.
            figure(turn, powered_off_clean=isinstance(old.phase, Shutdown) and old.phase.powers_off)
        for trainer in old.trainers:
            if trainer.owes and isinstance(old.phase, Shutdown):
                _fail(turn, f"checkpoint: {trainer.name}: it was not durable at the power-off")
    else:
        report(turn, drill, "interrupted", "the host was restarted in the middle of it")
