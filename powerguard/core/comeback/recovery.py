"""What to do when the daemon starts: continue an outage, handle the return from one, or stay online.

A latch holds in the boot that made it and in no other: a stored "shutdown" of another boot is a *return*, never a
reason to power off.
"""

import math
from dataclasses import dataclass, replace

from powerguard.core import obligations, scheduler
from powerguard.core.comeback import methods, unseen
from powerguard.core.comeback.validation import BOOTS_KEPT, validated
from powerguard.core.decide.transitions import TABLE, Cause
from powerguard.core.decide.turn import Turn
from powerguard.core.drill import rehearsal
from powerguard.core.energy import learning, needs
from powerguard.core.model.actions import (
    Action,
    EnsurePolicy,
    Grade,
    Level,
    Note,
    PowerOff,
    StopTrainer,
    TerminateTrainer,
)
from powerguard.core.model.policy import Learned, Mode, Policy
from powerguard.core.model.state import (
    Battery,
    Feed,
    GpuCap,
    OnBattery,
    Online,
    Phase,
    Recovery,
    Shutdown,
    State,
    Step,
    Trainer,
    phase_name,
)
from powerguard.core.supply import feeds, fusion
from powerguard.core.trainers import lifecycle

LONGEST_GAP_S = 30 * 86400.0
"""Longest believable gap between two boots by the wall clock; a negative one is not believed either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the journal kept. at_s: the old boot's clock at the last entry; gap_s: wall seconds since then, if known.

    in_flight: actions that were ordered and have no outcome. whole: False where newer steps than these are lost.
    """

    state: State
    boot_id: str
    at_s: float
    gap_s: float | None = None
    in_flight: tuple[Action, ...] = ()
    whole: bool = True


def restore(policy: Policy, stored: Stored | None, now_s: float) -> Step:
    """Return the state to start with, and what has to be ordered (again) at once. Never raises."""
    step = _restored(policy, stored, now_s)
    return replace(step, state=replace(step.state, up=True))


def _restored(policy: Policy, stored: Stored | None, now_s: float) -> Step:
    if stored is None:
        return _no_history(policy, now_s)
    state, dropped = validated(stored.state, stored.at_s)
    stored = replace(stored, state=state)
    same = stored.boot_id == policy.boot_id and stored.at_s <= now_s
    step = _same_boot(policy, stored, now_s) if same else _next_boot(policy, stored, now_s)
    if not dropped:
        return step
    because = f"the journal held impossible values, which are dropped: {', '.join(dropped)}"
    note = Note(event="history_dropped", because=because, level=Level.ERROR)
    return Step(step.state, step.actions, (note, *step.notes))


def _no_history(policy: Policy, now_s: float) -> Step:
    """Begin without history: the first start, or the journal is lost. A method that is still armed may act."""
    armed = methods.unknown(policy, now_s)
    state = State(
        trainers=lifecycle.at_start(policy, Learned()),
        battery=Battery(at_s=now_s, health=policy.health),
        owed=(*armed, *scheduler.unknown(policy, now_s)),
    )
    because = "no history: every power-on method that the daemon may have armed before is disarmed"
    return Step(state, (), (Note(event="power_on_unknown", because=because),) if armed else ())


def reloaded(old: Policy, policy: Policy, state: State, now_s: float) -> State:
    """Return the state under settings that have changed in the running daemon."""
    state = feeds.adopt(policy, state, now_s)
    trainers = lifecycle.after_reload(old, policy, state.trainers, state.learned)
    # What measures this host's own load is other now, perhaps; what still does will report soon.
    return replace(state, trainers=trainers, owed=lifecycle.without_strangers(state.owed, trainers), own=())


def _same_boot(policy: Policy, stored: Stored, now_s: float) -> Step:
    """Go on in the same phase with the same deadline; repeat what may not have happened (twice is as good as once)."""
    state = feeds.adopt(policy, stored.state, now_s)
    if isinstance(state.phase, Online):
        state = replace(state, own=())  # As after a reload.
    stop = unseen.after_restart(state.unseen, now_s)
    turn = Turn(policy, replace(state, trainers=_known(policy, state), unseen=stop), now_s)
    because = "the daemon restarted within the same boot"
    if _is_only_recorded(policy, state.phase):
        _begin_again(turn)
        because += f" in mode {policy.mode}: what was only recorded before is decided again"
        stored = replace(stored, in_flight=())
    elif not isinstance(state.phase, Shutdown):  # A latch keeps the mode of its power-off.
        turn.set_outage(mode=policy.mode)
    again = [action for action in rehearsal.after_restart(turn, stored.in_flight) if _is_given_again(turn, action)]
    # Only these orders are answered from now on; a drill has repeated some. The journal may not know the others.
    given = {action.id for action in (*again, *turn.actions)}
    turn.update(
        trainers=tuple(t if t.order in given else replace(t, in_flight=None) for t in turn.state.trainers),
        feed=replace(turn.state.feed, suspect=False),
        upses=tuple(replace(each, feed=replace(each.feed, suspect=False)) for each in turn.state.upses),
    )
    obligations.after_restart(turn, given)
    # Set or not: the BMC's answer says what it found. A drill's order does not belong to an outage.
    outages = {each.outage for each in stored.in_flight if isinstance(each, EnsurePolicy) and each.id not in given}
    for outage in sorted(outages - {""}):
        methods.ensure_policy(turn, outage, limit_s=policy.bmc_limit_s)
    phase = turn.state.phase
    if isinstance(phase, Shutdown):
        # The order may or may not have been written: it is given again, with what is left of its deadline.
        again = [action for action in again if not isinstance(action, PowerOff)]
        ids = {action.id for action in again}
        waiting = tuple(id_ for id_ in phase.waiting if id_ in ids)
        again_at_s = phase.again_at_s if phase.ordered else now_s
        turn.set_phase(replace(phase, waiting=waiting, again_at_s=again_at_s))
    elif isinstance(phase, Recovery) and phase.asked not in given:
        turn.set_phase(replace(phase, asked=None))
    if not isinstance(phase, Online):
        turn.note(
            "outage_continued",
            because,
            Level.WARNING,
            phase=phase_name(phase),
            outage=phase.outage.id,
            away_s=round(now_s - stored.at_s, 3),
            repeated=len(again),
        )
    step = turn.step()
    return Step(step.state, (*again, *step.actions), step.notes)


def _is_given_again(turn: Turn, action: Action) -> bool:
    """Say whether an order of before the restart that has no outcome is given again.

    Signals are not repeated blindly: the next reading shows whether the load still requires them. Nor is what would
    pause training that was ordered to go on meanwhile.
    """
    goes_on = isinstance(turn.state.phase, Online | OnBattery)
    if isinstance(action, StopTrainer | TerminateTrainer) or (goes_on and lifecycle.would_pause(action)):
        return False
    return action.by_s > turn.now_s


def _is_only_recorded(policy: Policy, phase: Phase) -> bool:
    """Say whether the orders of this outage were recorded in a mode that carries out less than the present one."""
    if isinstance(phase, Recovery):  # In rehearse, too, training is started.
        return phase.outage.mode is Mode.DRY_RUN and policy.mode is not Mode.DRY_RUN
    return not isinstance(phase, Online) and _MODES.index(policy.mode) < _MODES.index(phase.outage.mode)


_MODES = tuple(Mode)
"""The mode that carries out the most is the first."""


def _begin_again(turn: Turn) -> None:
    """Take the outage back to its beginning: no checkpoint of it is durable, training runs, no stop is latched.

    A return goes back to the moment before training is started. What dry-run has capped or marked is not so.
    """
    phase, outage = turn.state.phase, turn.outage
    if outage is None:
        return
    if outage.mode is Mode.DRY_RUN:
        turn.update(owed=tuple(each for each in turn.state.owed if not isinstance(each, GpuCap)))
    scheduler.begin_again(turn, old_mode=outage.mode)
    outage = replace(outage, mode=turn.policy.mode)
    if isinstance(phase, Recovery):
        turn.set_phase(replace(phase, outage=outage, asked=None, tries=0, retry_at_s=0.0, started_at_s=None))
        return
    turn.set_phase(OnBattery(outage=outage))
    lifecycle.resume_all(turn)  # A rehearsal has paused trainers.
    lifecycle.forget_outage(turn, resumed=True)


def _known(policy: Policy, state: State) -> tuple[Trainer, ...]:
    """Trainers as stored, plus those that the settings have gained meanwhile."""
    return lifecycle.after_reload(policy, policy, state.trainers, state.learned)


def _next_boot(policy: Policy, stored: Stored, now_s: float) -> Step:
    """Another boot: every time of the old one is moved into the new one's clock, as far as the gap is known."""
    known_s = stored.gap_s if stored.gap_s is not None and 0.0 <= stored.gap_s <= LONGEST_GAP_S else None
    gap_s = known_s or 0.0
    shift_s = now_s - gap_s - stored.at_s
    old = feeds.adopt(policy, stored.state, stored.at_s)
    # If the gap is unknown, the time of a cut has passed: it is what brings most hosts back.
    old = replace(old, owed=methods.in_the_clock_of(old.owed, -math.inf if known_s is None else shift_s))
    maintenance = old.maintenance
    if maintenance is not None:
        until_s = maintenance.until_s + shift_s
        maintenance = replace(maintenance, until_s=until_s) if until_s > now_s else None

    def carried(policy: Policy, feed: Feed, battery: Battery) -> Battery:
        charge, seen_at_s = None, None if feed.reading is None else feed.reading.at_s
        if battery.charged is not None and battery.health > 0.0:  # A worn-out battery has no charge to compare.
            charge = min(1.0, battery.charged / battery.health)
        return Battery(
            away_s=gap_s,
            away_charge=charge,
            at_s=now_s,
            used=battery.used,
            presumed=battery.presumed,
            health=battery.health,
            tau_point=battery.tau_point,
            model=learning.shifted(
                learning.ended_by_power_off(policy, battery.model, battery.used, stored.at_s, seen_at_s), shift_s
            ),
        )

    state = State(
        phase=Online(),
        feed=fusion.rebooted(old.feed, now_s),
        battery=carried(policy, old.feed, old.battery),
        trainers=lifecycle.at_start(policy, old.learned),
        maintenance=maintenance,
        serial=old.serial,
        learned=needs.shifted(old.learned, shift_s),
        owed=obligations.after_boot(policy, old, now_s, whole=stored.whole),
        unseen=unseen.after_boot(policy, old, stored.at_s, now_s, known_s),
    )
    state = feeds.rebooted(policy, state, old.upses, carried)
    turn = Turn(policy, state, now_s)
    rehearsal.after_reboot(turn, old, shift_s)
    phase = old.phase
    if isinstance(phase, Online):
        unseen.note_stop(turn, old, known_s)
        return turn.step()
    turn.set_phase(_back(policy, phase, now_s, shift_s))
    turn.note(
        "host_returned",
        _why_gone(phase),
        Level.INFO if isinstance(phase, Shutdown) else Level.ERROR,
        outage=phase.outage.id,
        phase=phase_name(phase),
        away_s=None if known_s is None else round(known_s, 3),
    )
    methods.ensure_policy(turn, phase.outage.id, limit_s=policy.bmc_limit_s)
    return turn.step()


def _why_gone(phase: Phase) -> str:
    if not isinstance(phase, Shutdown):
        return "the host went down before the commit point"
    if phase.outage.mode is not Mode.ARMED:
        return "the host went down after a power-off that was only recorded"
    return "powered off by us" if phase.force_at_s else "the host went down between the commit and its power-off"


def _back(policy: Policy, phase: Phase, now_s: float, shift_s: float) -> Phase:
    if isinstance(phase, Online):
        return phase
    outage = replace(phase.outage, since_s=min(now_s, phase.outage.since_s + shift_s), aborted_by="")
    # The grade of the last stop is not that of the next one (`Turn.grade_again`).
    outage = replace(outage, grade=Grade.FULL, lowered=False, mode=policy.mode)
    boots = (*(at_s + shift_s for at_s in outage.boots[1 - BOOTS_KEPT :]), now_s)
    outage = replace(outage, boots=boots)
    if isinstance(phase, Recovery):
        return Recovery(outage=outage, began_s=now_s, clean=phase.clean)
    if TABLE[type(phase), Cause.NEXT_BOOT] is not Recovery:  # pragma: no cover - the table is checked by a test
        return phase
    clean = isinstance(phase, Shutdown) and phase.powers_off
    return Recovery(outage=outage, began_s=now_s, clean=clean)
