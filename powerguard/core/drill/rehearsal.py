r"""A drill rehearses an outage on the real host, measures it, and always ends with everything as it was.

    baseline -> checkpoint -> pause -> resume -> cap -> restore -> policy -> sync -> record      (what is in scope)
         \__________\__________\________\________\_______\_________\________\_______\____ undo -> report

It runs on utility, in the phase online, as part of the core's state: it is journalled with it, so a daemon that starts
after a kill -9 or a restart puts everything back (`end`). A real outage ends it at once and comes first, by its own
rule: trainers that the drill has paused continue until that rule pauses them. A daemon that dies and does not come back
leaves no trainer paused: the drill asks for a lease, which ends when the trainer no longer hears the daemon.

With a pulled plug (`plug`) or a test of the UPS itself (`self_test`) as witness the drill gives no orders: it waits,
and measures what happens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from powerguard.core.decide import conditions
from powerguard.core.decide.turn import Turn
from powerguard.core.drill import checks
from powerguard.core.drill.end import (
    PAUSING,
    after_reboot,
    after_restart,
    end_of_outage,
    finish,
    forget_lost_orders,
    heard,
    interrupt,
    lets_go_on,
    load_at_start,
    owe_resume,
    restore,
    resume,
    tend_in_outage,
    undo,
)
from powerguard.core.drill.measures import (
    change,
    change_stage,
    figure,
    find,
    is_recorded,
    look_at_baseline,
    look_at_load,
    look_at_resume,
    look_at_self_test,
    mark,
    order,
    rounded,
    watch_reading,
    watch_trainer,
)
from powerguard.core.energy import budget as sums
from powerguard.core.model import outcomes
from powerguard.core.model.actions import (
    Action,
    CapPower,
    Conduct,
    EnsurePolicy,
    Level,
    PauseTrainer,
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
from powerguard.core.model.policy import Mode
from powerguard.core.model.state import (
    CheckpointInFlight,
    Drill,
    DrillOrder,
    DrillStage,
    GpuCap,
    HandedOver,
    Online,
    PlugPulled,
    Supply,
    Trainer,
    Undoing,
)
from powerguard.core.supply import fusion
from powerguard.core.trainers.escalation import CAP_LIMIT_S

__all__ = [
    "after_reboot",
    "after_restart",
    "end_of_outage",
    "interrupt",
    "load_at_start",
    "take_in",
    "tend",
    "tend_in_outage",
    "undo",
]

SCOPES: Final = checks.SCOPES
WITNESSES: Final = checks.WITNESSES
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
ORDERS: Final = ("checkpoint", "pause", "resume", "cap", "restore", "policy", "sync")
_PLAIN: Final[dict[str, type[Action]]] = {"policy": EnsurePolicy, "sync": SyncFilesystems}


# --- Taking in ------------------------------------------------------------------------------------------------------


def take_in(turn: Turn, event: Event) -> None:
    """Enter what concerns the drill; the rest is passed over."""
    drill = turn.state.drill
    if isinstance(event, StartDrill):
        _start(turn, event)
    elif isinstance(event, Outcome):
        _take_in_outcome(turn, event)
    elif drill is None:
        return
    elif isinstance(event, Reading) and (told := turn.state.feed.reading) is not None and told.at_s >= event.at_s:
        if isinstance(drill.part, DrillStage):
            # What all sources and feeds say together.
            change(turn, part=watch_reading(turn.policy, turn.state, drill.part, told))
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


def _take_in_outcome(turn: Turn, outcome: Done | Failed) -> None:
    action = outcome.action
    if isinstance(action, ResumeTrainer) and isinstance(outcome, Done):
        heard(turn, action.trainer, action.id, resumed=outcomes.is_resumed(outcome))
    drill = turn.state.drill
    waited = None if drill is None else next((each for each in drill.waiting if each.id == action.id), None)
    if drill is None or waited is None:
        _take_in_stranger(turn, action)
        if drill is not None and isinstance(drill.part, PlugPulled) and isinstance(action, TriggerCheckpoint):
            figure(turn, **{f"checkpoint_s.{action.trainer}": round(outcome.took_s, 3)})
        return
    change(turn, waiting=tuple(each for each in drill.waiting if each is not waited))
    if isinstance(outcome, Done):
        _take_in_done(turn, waited, outcome)
    elif waited.what not in ("resume", "restore"):  # those are repeated
        _fail(turn, f"{waited.what}: {f'{waited.trainer}: ' if waited.trainer else ''}{outcome.reason}")
    going_on = isinstance(drill.part, Undoing) or (isinstance(drill.part, HandedOver) and lets_go_on(turn, drill))
    if going_on and waited.what in PAUSING and waited.trainer in drill.told:
        # It may have reached the trainer after its resume, whatever the outcome.
        change(turn, paused=tuple(dict.fromkeys((*drill.paused, waited.trainer))))
        resume(turn, waited.trainer)


def _take_in_stranger(turn: Turn, action: Action) -> None:
    """Enter a late outcome, on utility: no trainer may stay paused because of it."""
    drill = turn.state.drill
    if not isinstance(turn.state.phase, Online) or (drill is not None and not isinstance(drill.part, Undoing)):
        return
    if isinstance(action, PauseTrainer) or (
        isinstance(action, TriggerCheckpoint) and action.reason == "drill" and action.after is not Conduct.CONTINUE
    ):
        owe_resume(turn, action.trainer)


def _take_in_done(turn: Turn, waited: DrillOrder, done: Done) -> None:
    recorded = outcomes.is_recorded(done)
    if recorded:
        mark(turn, waited.trainer, paused=False)  # It was not asked.
    match waited.what:
        case "checkpoint" if not recorded:
            verified = outcomes.checkpoint_done(done).verified
            figure(turn, **{f"checkpoint_s.{waited.trainer}": round(done.took_s, 3)})
            figure(turn, **{f"checkpoint_verified.{waited.trainer}": verified})
        case "policy":
            found = outcomes.policy_ensured(done)
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


def tend(turn: Turn) -> None:
    """Go on with the drill, on utility: asked at every event."""
    drill = turn.state.drill
    if drill is None or turn.state.feed.suspect:
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
    gone = [name for name in drill.told if (trainer := find(turn, name)) is None or not trainer.alive]
    if gone and drill.stage in ("checkpoint", "pause", "resume"):
        return f"{', '.join(gone)}: died while the drill held it"
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
        alive = [trainer for trainer in turn.state.trainers if trainer.alive]
        for trainer in alive:
            _order_checkpoint(turn, trainer, pausing="pause" in begun.coming)
        if not alive:
            _fail(turn, "every trainer is gone, so the drill measured none")
    elif stage == "pause":
        pausing = checks.pausing(turn.state)
        for trainer in pausing:
            if trainer.name not in drill.told:
                _will_pause(turn, trainer)
                order(turn, PauseTrainer, "pause", limit_s=limit_s, trainer=trainer.name, lease_s=LEASE_S)
        if not pausing and not drill.told:
            _fail(turn, "every trainer that pauses is gone, so the drill measured none")
    elif stage == "resume":
        for name in drill.paused:
            resume(turn, name)
    elif stage in _PLAIN:
        order(turn, _PLAIN[stage], stage, limit_s=limit_s)
    else:
        _BEGIN.get(stage, _only_look)(turn)


def _only_look(_: Turn) -> None:
    """A stage without orders: baseline, plug, self_test."""


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
    mark(turn, trainer.name, in_flight=CheckpointInFlight(order=id_), ordered_at_s=turn.now_s)


def _will_pause(turn: Turn, trainer: Trainer) -> None:
    """From before the order on, this trainer counts as paused by the drill."""
    drill = turn.state.drill
    if drill is not None and find(turn, trainer.name) is not None:
        change(turn, paused=(*drill.paused, trainer.name), told=(*drill.told, trainer.name))
        mark(turn, trainer.name, told_pause=True)


def _record_power_off(turn: Turn) -> None:
    """Record the power-off that an outage would order; a drill never orders it."""
    state, drill = turn.state, turn.state.drill
    if drill is not None and drill.load is not None:
        # Training continues, but the newest load reading may still be a paused one.
        state = replace(state, battery=replace(state.battery, load=drill.load))
    now = conditions.outage_budget(turn.policy, state, turn.now_s)
    figures: dict[str, Scalar] = {
        "power_off_grade": now.grade.value,
        "power_off_force_after_s": round(sums.force_after_s(turn.policy, now.grade), 3),
        "stop_s": round(now.stop_s, 3),
        "runtime_paused_s": rounded(now.reff_paused_s),
        "fits": now.fits,
    }
    turn.note("power_off_rehearsed", "a drill does not order a power-off", Level.INFO, **figures)
    figure(turn, **figures)


_BEGIN: Final[dict[str, Callable[[Turn], None]]] = {"cap": _cap, "restore": restore, "record": _record_power_off}
