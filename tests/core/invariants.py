"""What must hold at every step, whatever happens: asked by the random world and by the exhaustive walk alike."""

import json

from powerguard.core.decide import conditions
from powerguard.core.decide.transitions import TABLE
from powerguard.core.energy import budget
from powerguard.core.model.actions import (
    ArmPowerOn,
    Conduct,
    DisarmPowerOn,
    Grade,
    PollNow,
    PowerOff,
    PowerOnMethod,
    Reboot,
    ResumeTrainer,
    StopTrainer,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import Abort, Done, Event, Failed, OutputSource, Reading
from powerguard.core.model.policy import Policy
from powerguard.core.model.serialisation import from_plain, to_plain
from powerguard.core.model.state import (
    EmergencyCheckpoint,
    Holding,
    OnBattery,
    Online,
    Recovery,
    Shutdown,
    State,
    Step,
    Supply,
    phase_name,
)
from powerguard.core.trainers import escalation
from powerguard.sim.world.invariants import is_begun_again, may_raise_grade, may_rise

_ON_UTILITY = (OutputSource.UTILITY, OutputSource.BYPASS, OutputSource.ECO, OutputSource.BOOST, OutputSource.TRIM)

_MOVES = {(phase_name(old), cause.value, phase_name(new)) for (old, cause), new in TABLE.items()}


def check_step(policy: Policy, before: State, event: Event, answer: Step) -> None:
    """Ask every invariant of one step."""
    old, new = before.phase, answer.state.phase
    ordered_off = budget.power_off_at_s(answer.state.feed) is not None
    if isinstance(event, Reading) and answer.state.feed.suspect and isinstance(old, Online) and not ordered_off:
        kinds = {type(action) for action in answer.actions}
        guarded = before.guarded_since_s is not None
        assert kinds <= ({PollNow, TriggerCheckpoint} if guarded else {PollNow}), (
            "one unconfirmed reading causes a poll and nothing else"
        )
        assert isinstance(new, Online)
    _check_actions(policy, before, event, answer)
    if isinstance(old, Shutdown):
        assert isinstance(new, Shutdown) or not policy.powers_off, "nothing undoes a latch in its boot"
        if isinstance(new, Shutdown) and old.force_at_s:
            assert new.force_at_s <= old.force_at_s + 1e-6, "a deadline is never moved back"
    elif isinstance(new, Shutdown):
        _check_latch(policy, before, answer.state, new)
    if isinstance(new, Online) and isinstance(old, EmergencyCheckpoint | Holding):
        assert answer.state.feed.supply is Supply.UTILITY, "training resumes on utility only"
        assert not answer.state.feed.suspect
    through_online = any(dict(note.numbers).get("new") == "online" for note in answer.notes)
    if not isinstance(old, Online) and not isinstance(new, Online) and not through_online:
        assert old.outage.id == new.outage.id, "an outage keeps its id"
        grades = tuple(Grade)
        lowered = grades.index(new.outage.grade) >= grades.index(old.outage.grade)
        assert lowered or may_raise_grade(before, answer.state), "a grade is raised only for a reason"
    if isinstance(event, Abort) and not isinstance(old, Online | Shutdown):
        assert isinstance(new, Online) or new.outage.aborted_by, "an abort before the latch is never forgotten"
    if isinstance(new, Online | OnBattery) and not answer.state.feed.suspect:
        standing = [each for each in answer.state.signalled if each.word != escalation.CONTINUE and each.order is None]
        assert not standing, "nobody stays stopped while training may go on"
    if isinstance(new, Online) and answer.state.drill is None:
        found = [trainer.name for trainer in answer.state.trainers if trainer.pause_ordered]
        assert not found, "after an outage, or a drill, no trainer counts as asked to pause"
    if answer.state.drill is not None:
        assert isinstance(new, Online) == (answer.state.drill.stage not in ("outage", "handed_over")), (
            "an outage comes before a drill"
        )
    _check_moves(before, answer)
    _check_account(before, answer.state)


def _check_actions(policy: Policy, before: State, event: Event, answer: Step) -> None:
    new = answer.state.phase
    for action in answer.actions:
        assert action.by_s >= event.at_s, "no order is late when it is given"
        if isinstance(action, PowerOff):
            assert isinstance(new, Shutdown), "only a latched shutdown powers off"
            assert new.boot_id == policy.boot_id
            assert action.force_after_s >= 0.0
        elif isinstance(action, ArmPowerOn | DisarmPowerOn):
            ended = event.action.id if isinstance(event, Done | Failed) else None
            _check_method(before, answer.state, action, ended=ended)
        elif isinstance(action, Reboot):
            cut = [
                each for each in answer.state.armed if each.method is PowerOnMethod.OUTPUT and each.returns != "aborts"
            ]
            assert isinstance(new, Shutdown), "only a power-off becomes a reboot"
            assert not cut, "no reboot races a cut"
        elif isinstance(action, StopTrainer | TerminateTrainer):
            _check_signal(policy, before, answer.state, action)
        elif isinstance(action, ResumeTrainer):
            assert not escalation.is_stopped(answer.state, action.trainer), "nobody is told to go on who cannot hear it"


def _check_method(before: State, state: State, action: ArmPowerOn | DisarmPowerOn, *, ended: str | None) -> None:
    """What is ordered is remembered until it has ended; an output goes off for a latched power-off alone, and once.

    ended: the order whose outcome this step took in.
    """
    key = (action.method, action.ups)
    keys = [(each.method, each.ups) for each in state.armed]
    assert keys.count(key) == 1
    was = [each for each in before.armed if (each.method, each.ups) == key]
    if isinstance(action, DisarmPowerOn):
        assert not isinstance(state.phase, Shutdown), "past the commit nothing is taken back"
        assert not state.feed.suspect
        assert all(each.order in (None, ended) for each in was), "one order at a time"
    elif action.method is PowerOnMethod.OUTPUT:
        assert isinstance(state.phase, Shutdown)
        # An order that takes an earlier boot's cut back may be under way: a UPS gets its orders one after the other.
        found = [each for each in was if each.outage and (each.confirmed or (each.order and not each.leaving))]
        assert not found, "an output is never reported twice"


def _check_signal(policy: Policy, before: State, state: State, action: StopTrainer | TerminateTrainer) -> None:
    """Nobody is signalled but one that was told to pause, whose checkpoint is not on its way, on battery."""
    assert policy.signals
    assert isinstance(state.phase, EmergencyCheckpoint | Holding), "after the pause and before the commit"
    assert state.feed.supply is Supply.BATTERY
    assert state.maintenance is None
    (trainer,) = [each for each in state.trainers if each.name == action.trainer]
    assert trainer.alive
    assert trainer.pause_ordered
    assert trainer.conduct is not Conduct.CONTINUE
    assert trainer.order is None, "nobody is signalled with his checkpoint on its way"
    assert trainer.durable or trainer.given_up
    if isinstance(action, TerminateTrainer):
        known = escalation.of(before, action.trainer)
        assert known is not None
        assert known.carried_out == escalation.STOP, "nobody is ended who was not stopped before"


def _check_moves(before: State, answer: Step) -> None:
    """Every move is in the table, and every move is told."""
    found = [dict(note.numbers) for note in answer.notes if note.event == "phase_changed"]
    at = phase_name(before.phase)
    for move in found:
        assert move["old"] == at, "no move without a note"
        assert (move["old"], move["cause"], move["new"]) in _MOVES
        at = str(move["new"])
    assert at == phase_name(answer.state.phase), "no move without a note"


def _check_latch(policy: Policy, before: State, state: State, phase: Shutdown) -> None:
    """Every commit has its reasons: battery or a countdown, and a budget that is really used up."""
    reading = state.feed.reading
    assert not isinstance(before.phase, Online), "training is told to pause before a commit"
    assert isinstance(before.phase, Recovery | EmergencyCheckpoint | Holding), "a commit is looked at twice"
    assert before.phase.due_at_s is not None, "a commit is looked at twice"
    assert state.maintenance is None, "maintenance suspends commits"
    assert not phase.outage.aborted_by, "an aborted outage does not power off"
    assert phase.boot_id == policy.boot_id
    assert reading is not None
    if budget.power_off_at_s(state.feed) is not None:
        return
    if state.feed.lost_since_s is None:  # Of one that fell silent with the network, the last word was utility.
        assert reading.output_source not in _ON_UTILITY, "never shut down while the newest reading says utility"
    assert state.feed.supply is Supply.BATTERY
    if state.battery.left is not None:
        now = conditions.outage_budget(policy, state, phase.latched_s)
        assert now.reff_s is not None
        full_s = budget.stop_s(policy, Grade.FULL) + budget.shed_s(policy)
        assert now.reff_s <= full_s + 1e-6, "a host whose battery still lasts is not powered off"


def _check_account(before: State, state: State) -> None:
    battery = state.battery
    for share in (battery.used, battery.left, battery.gauge, battery.charged):
        assert share is None or share >= 0.0
    assert battery.used is None or battery.used <= 1.0
    assert battery.at_s >= before.battery.at_s, "the account never runs backwards"
    on_battery = before.feed.supply is Supply.BATTERY and state.feed.supply is Supply.BATTERY
    if on_battery:
        if before.battery.left is not None and battery.left is not None:
            if not may_rise(before.battery, battery):
                assert battery.left <= before.battery.left + 1e-9, "on battery the energy left never rises"
            if not battery.composed and battery.suspect is None:
                own = max(0.0, battery.health - (battery.used or 0.0))
                assert battery.left <= own + 1e-9, "our own account bounds it always"
        if before.battery.used is not None and not is_begun_again(before.battery, battery):
            assert battery.used is not None
            assert battery.used >= before.battery.used - 1e-9, "what is used is never given back on battery"


def kept(state: State) -> State:
    """Send a state through the journal's plain form, which must keep it whole."""
    again = from_plain(json.loads(json.dumps(to_plain(state))), State)
    assert again == state, "the journal keeps every state whole"
    return again


def check_spent_battery(state: State, now_s: float) -> None:
    """Never stay on past the deadline: with nothing left and two fresh readings on battery, the host is latched."""
    if not isinstance(state.phase, Holding) or state.maintenance is not None or state.phase.due_at_s is None:
        return
    reading, second = state.feed.reading, state.feed.previous
    if reading is None or second is None or state.feed.lost_since_s is not None or state.phase.outage.aborted_by:
        return
    if reading.at_s <= state.phase.due_at_s + 5.0 or state.feed.supply is not Supply.BATTERY:
        return
    batteries = (state.battery, *(each.battery for each in state.upses))
    if any(each.higher_since_s is not None for each in batteries) and state.feed.low_battery_at_s is None:
        return  # Readings that all say more than is held: after 20 s of them it is held no longer.
    fresh = now_s - reading.at_s < 0.01
    said = reading.output_source is OutputSource.BATTERY and not reading.calibrating
    again = second.output_source is OutputSource.BATTERY and 0.5 <= reading.at_s - second.at_s <= 15.0
    assert not (fresh and said and again), "two readings after the test came true must latch"
