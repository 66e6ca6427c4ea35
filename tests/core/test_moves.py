"""What a move remembers and what lasts in a phase: the load that is awaited, who goes on, who is gone, who is told."""

import math
from dataclasses import replace

import pytest

from powerguard.core.decide.machine import step
from powerguard.core.decide.transitions import Cause, Decision, move
from powerguard.core.decide.turn import Turn
from powerguard.core.energy import needs
from powerguard.core.model.actions import Conduct, Grade, PowerOff, ResumeTrainer, TriggerCheckpoint
from powerguard.core.model.events import Done, Failed, OutputSource, Reading, Tick, TrainerSeen
from powerguard.core.model.policy import Drop, Learned
from powerguard.core.model.state import (
    Activity,
    Battery,
    CheckpointInFlight,
    Durable,
    EmergencyCheckpoint,
    Feed,
    GpuCap,
    Holding,
    NotDurable,
    OnBattery,
    Online,
    Outage,
    Phase,
    Recovery,
    Resume,
    Shutdown,
    State,
    Step,
    Supply,
    Trainer,
)
from powerguard.core.trainers import lifecycle
from tests.core.play import make_policy

POLICY = make_policy(["table=50:2000,100:1000", "trainer=a:pause:10", "boot_id=0123456789"])
OUTAGE = Outage(id="o", since_s=0.0, grade=Grade.FULL, policy_asked=True, load_at_start=1.0)
PAUSES = Trainer(name="a", conduct=Conduct.PAUSE, checkpoint_s=10.0)
GOES_ON = Trainer(name="a", conduct=Conduct.CONTINUE, checkpoint_s=10.0)
ON_BATTERY = OnBattery(outage=OUTAGE)
HOLD = Holding(outage=OUTAGE, began_s=50.0)


def says(at_s: float, source: str = "battery", **fields: object) -> Reading:
    return Reading(at_s=at_s, ups="ups", source="snmp", output_source=OutputSource(source), load_pct=100.0, **fields)  # type: ignore[arg-type]


def at_100(phase: Phase, *known: Trainer, left: float = 0.75, supply: Supply = Supply.BATTERY) -> State:
    """Return a state of second 100, two readings into its supply, at full load."""
    source = "battery" if supply is Supply.BATTERY else "utility"
    return State(
        phase=phase,
        feed=Feed(supply=supply, since_s=60.0, reading=says(100.0, source), previous=says(99.0, source)),
        battery=Battery(at_s=100.0, used=0.0, left=left, load=1.0),
        trainers=known,
    )


def notes(answer: Step) -> list[str]:
    return [note.event for note in answer.notes]


def checkpoints(answer: Step) -> list[str]:
    return [action.trainer for action in answer.actions if isinstance(action, TriggerCheckpoint)]


# --- Into the emergency -------------------------------------------------------------------------------------------


def emergency(*known: Trainer) -> EmergencyCheckpoint:
    phase = step(POLICY, at_100(ON_BATTERY, *known, left=0.25), says(101.0)).state.phase
    assert isinstance(phase, EmergencyCheckpoint)
    return phase


@pytest.mark.parametrize(("step_s", "settles_s"), [(0.0, 45.0), (15.0, 45.0), (16.0, 47.0), (40.0, 95.0)])
def test_a_load_may_follow_the_pause_by_two_of_the_slowest_steps(step_s: float, settles_s: float) -> None:
    """A trainer pauses between two steps: two of them and 15 s, and 45 s at least, before the load is asked again."""
    quick = replace(PAUSES, name="quick", step_s=1.0)
    assert emergency(quick, replace(PAUSES, step_s=step_s)).settle_by_s == 101.0 + settles_s
    gone = replace(PAUSES, name="gone", activity=Activity.GONE, step_s=500.0)
    assert emergency(quick, replace(PAUSES, step_s=step_s), gone).settle_by_s == 101.0 + settles_s


def test_where_nobody_pauses_no_lower_load_is_awaited() -> None:
    """An expected load would count in the commit test, and its failing to come would be an alarm that means nothing."""
    assert emergency(GOES_ON).paused_load is None
    assert emergency(GOES_ON, replace(PAUSES, name="b")).paused_load == pytest.approx(0.6)


@pytest.mark.parametrize(("at_s", "id_"), [(0.0, "01234567-0"), (7.25, "01234567-72")])
def test_an_outage_is_named_after_its_boot_and_its_tenth_of_a_second(at_s: float, id_: str) -> None:
    phase = step(POLICY, State(), says(at_s, input_present=False)).state.phase
    assert not isinstance(phase, Online)
    assert phase.outage.id == id_


def test_the_story_says_how_long_until_a_cut() -> None:
    """The cut is in 200 s, and everything but a bare stop keeps 30 s before it clear."""
    first = step(POLICY, at_100(ON_BATTERY, PAUSES), says(101.0, output_off_in_s=201.0))
    result = step(POLICY, first.state, says(102.0, output_off_in_s=200.0))
    (moved,) = (note for note in result.notes if note.event == "phase_changed")
    assert dict(moved.numbers)["cut_in_s"] == 170.0


def test_a_load_that_has_not_fallen_is_shown_with_the_one_that_was_expected() -> None:
    phase = replace(HOLD, paused_load=0.6, settle_by_s=101.0)
    durable = replace(PAUSES, activity=Activity.PAUSED, checkpoint=Durable(), pause_ordered=True)
    answer = step(POLICY, at_100(phase, durable), says(101.0))
    (note,) = (note for note in answer.notes if note.event == "load_not_fallen_raised")
    assert note.because == "training was paused, the load is still 100 % (expected 60 %)"


# --- While it lasts -----------------------------------------------------------------------------------------------


def test_in_a_hold_who_goes_on_gets_a_checkpoint_every_minute() -> None:
    """Its work at risk grows while everybody else stands still."""
    spent = replace(GOES_ON, checkpoint=Durable(), ordered_at_s=30.0, durable_at_s=41.0)
    assert checkpoints(step(POLICY, at_100(HOLD, spent), Tick(at_s=100.9))) == []
    assert checkpoints(step(POLICY, at_100(HOLD, spent), Tick(at_s=101.0))) == ["a"]
    stands = replace(spent, conduct=Conduct.PAUSE, pause_ordered=True, activity=Activity.PAUSED)
    assert checkpoints(step(POLICY, at_100(HOLD, stands), Tick(at_s=101.0))) == []


@pytest.mark.parametrize(
    ("silent_s", "saves"), [(14.9, False), (15.0, True), (3000.0, True), (3600.0, True), (3600.1, False)]
)
def test_who_can_save_cheaply_does_so_for_an_hour_of_silence(silent_s: float, *, saves: bool) -> None:
    """Nobody sees an outage that begins now. After an hour it is none: no UPS of a GPU host lasts so long."""
    calm = at_100(Online(), replace(GOES_ON, stall_s=0.0, ordered_at_s=-5000.0), supply=Supply.UTILITY)
    silent = replace(calm, feed=replace(calm.feed, lost_since_s=5000.0))
    answer = step(
        POLICY, replace(silent, trainers=(replace(silent.trainers[0], durable_at_s=0.0),)), Tick(at_s=5000.0 + silent_s)
    )
    assert checkpoints(answer) == (["a"] if saves else [])
    assert ("ups_silent_raised" in notes(answer)) is (silent_s >= 15.0)


WRITING = replace(GOES_ON, checkpoint_s=500.0, in_flight=CheckpointInFlight(order="o-1"), ordered_at_s=99.0)


@pytest.mark.parametrize(("eta_at_s", "opens"), [(110.0, True), (590.0, False)])
def test_every_gate_asks_for_the_rest_of_a_checkpoint_that_is_still_written(eta_at_s: float, *, opens: bool) -> None:
    """After a return in place, while a guard stands, and at boot alike: one in flight is nearly done or it is not."""
    writing = replace(WRITING, in_flight=CheckpointInFlight(order="o-1", eta_at_s=eta_at_s))
    on_battery = at_100(ON_BATTERY, writing, left=0.4)
    returned = step(POLICY, on_battery, says(101.0, "utility"))
    assert isinstance(returned.state.phase, Online)
    assert ("guard_started" in notes(returned)) is not opens
    guarded = replace(at_100(Online(), writing, left=0.4, supply=Supply.UTILITY), guarded_since_s=41.0)
    assert ("guard_ended" in notes(step(POLICY, guarded, Tick(at_s=101.0)))) is opens
    boot = at_100(Recovery(outage=OUTAGE, began_s=50.0, clean=True), writing, left=0.4, supply=Supply.UTILITY)
    assert ("gate_opened" in notes(step(POLICY, boot, Tick(at_s=101.0)))) is opens


def test_a_host_that_goes_down_again_is_not_reported_as_incomplete_any_more() -> None:
    """A rehearsal ends online, in the same boot, where nobody would ever clear it."""
    back = Recovery(outage=OUTAGE, began_s=50.0, clean=True)
    at = Turn(POLICY, replace(at_100(back), alarms=("host_incomplete", "host_incomplete_long", "overload")), 100.0)
    move(at, Decision(Cause.COMMIT, "budget", at.budget()))
    assert at.state.alarms == ("overload",)


def test_a_power_off_that_has_been_ordered_waits_for_nothing_more() -> None:
    """What was not done when its time was over is left; status must not go on saying that it is waited for."""
    latched = Shutdown(
        outage=OUTAGE, boot_id=POLICY.boot_id, latched_s=95.0, because="budget", waiting=("w",), prepare_by_s=100.25
    )
    answer = step(POLICY, at_100(latched), Tick(at_s=101.0))
    assert [type(action) for action in answer.actions] == [PowerOff]
    assert isinstance(answer.state.phase, Shutdown)
    assert answer.state.phase.waiting == ()


@pytest.mark.parametrize("supply", [Supply.BATTERY, Supply.UTILITY])
def test_with_utility_back_no_battery_hastens_the_power_off(supply: Supply) -> None:
    """What is left would not outlive the stop; but nothing is taken from it any more, so the stop may be orderly."""
    latched = Shutdown(
        outage=OUTAGE,
        boot_id=POLICY.boot_id,
        latched_s=95.0,
        because="budget",
        prepare_by_s=96.0,
        ordered=True,
        force_at_s=200.0,
        again_at_s=500.0,
    )
    source = "battery" if supply is Supply.BATTERY else "utility"
    state = at_100(latched, left=0.02, supply=supply)
    spent = replace(state, battery=replace(state.battery, used=0.73))
    answer = step(POLICY, spent, says(101.0, source))
    assert ("power_off_hastened" in notes(answer)) is (supply is Supply.BATTERY)


@pytest.mark.parametrize(
    ("at_s", "because"),
    [
        (101.0, "the UPS has not reported for long whether utility is there"),
        (700.0, "the UPS has not answered for long"),
    ],
)
def test_a_gate_that_is_forced_says_whether_the_ups_is_silent_or_does_not_say(at_s: float, because: str) -> None:
    """A person looks for a cable in the one case, and at the UPS itself in the other."""
    waits = Recovery(outage=OUTAGE, began_s=-90000.0, clean=True)
    feed = Feed(supply=Supply.UNKNOWN, since_s=-90000.0, reading=says(100.0, "unknown"))
    unknown = replace(at_100(waits, supply=Supply.UNKNOWN), feed=feed)
    (forced,) = [note for note in step(POLICY, unknown, Tick(at_s=at_s)).notes if note.event == "gate_forced"]
    assert forced.because.startswith(f"{because};")


# --- Trainers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "phase", "stays"),
    [("found", Online(), False), ("found", ON_BATTERY, True), ("a", Online(), True), ("a", ON_BATTERY, True)],
)
def test_one_that_was_only_found_is_forgotten_when_it_goes(name: str, phase: Phase, *, stays: bool) -> None:
    """Else every job of a year would be kept; in an outage it may come again, and the settings' ones always may."""
    others = (replace(PAUSES, name="b"), replace(PAUSES, name="c"))
    at = Turn(POLICY, at_100(phase, others[0], replace(PAUSES, name=name), others[1]), 100.0)
    lifecycle.handle(at, TrainerSeen(at_s=100.0, trainer=name, alive=False, conduct=Conduct.PAUSE))
    assert [t.name for t in at.state.trainers] == (["b", name, "c"] if stays else ["b", "c"])
    assert [note.event for note in at.notes] == ["trainer_gone"]


@pytest.mark.parametrize(("age_s", "durable_at_s"), [(40.0, 60.0), (150.0, -50.0), (math.inf, None), (math.nan, None)])
def test_a_checkpoint_is_as_old_as_it_says_also_before_the_boot(age_s: float, durable_at_s: float | None) -> None:
    """Work at risk is counted from it; an age that is no number says nothing."""
    at = Turn(POLICY, at_100(ON_BATTERY, PAUSES), 100.0)
    seen = TrainerSeen(at_s=100.0, trainer="a", alive=True, conduct=Conduct.PAUSE, durable_age_s=age_s)
    lifecycle.handle(at, seen)
    assert at.state.trainers[0].durable_at_s == durable_at_s


@pytest.mark.parametrize(("known", "step", "lost"), [(40, 30, 10), (None, 30, None), (None, None, None)])
def test_steps_are_lost_only_between_two_that_are_known(known: int | None, step: int | None, lost: int | None) -> None:
    """An older checkpoint that stands has to name its step, and the trainer the one where it stood."""
    flying = replace(
        PAUSES,
        in_flight=CheckpointInFlight(order="o-1"),
        checkpoint=NotDurable(tries=3),
        pause_ordered=True,
        step=known,
    )
    order = TriggerCheckpoint(id="o-1", by_s=200.0, trainer="a", reason="on_battery", after=Conduct.PAUSE, outage="o")
    at = Turn(POLICY, at_100(HOLD, flying), 100.0)
    lifecycle.handle(at, Done(at_s=100.0, action=order, took_s=3.0, detail=(("step", step), ("at_paused_step", False))))
    (note,) = (note for note in at.notes if note.event == "older_checkpoint_stands")
    assert dict(note.numbers) == {"steps_lost": lost}


def test_who_did_not_answer_is_asked_again_once_and_then_waited_for() -> None:
    """An order a second would pile up in front of a trainer that only needs a moment."""
    order = ResumeTrainer(id="o-1", by_s=110.0, trainer="a", outage="o")
    online = at_100(Online(), PAUSES, supply=Supply.UTILITY)
    failed = step(POLICY, online, Failed(at_s=101.0, action=order, took_s=1.0, reason="refused"))
    assert step(POLICY, failed.state, Tick(at_s=105.9)).actions == ()
    again = step(POLICY, failed.state, Tick(at_s=106.0))
    (result,) = again.actions
    assert isinstance(result, ResumeTrainer)
    assert (result.trainer, result.outage, result.by_s) == ("a", "", 116.0)
    assert step(POLICY, again.state, Tick(at_s=107.0)).actions == ()
    heard = step(POLICY, again.state, Done(at_s=108.0, action=result, took_s=1.0))
    assert not heard.state.owing(Resume)


def test_an_outage_begins_with_those_who_are_there_and_those_of_the_settings() -> None:
    """One that was only found and died in the last outage would be waited for; one of the settings may come again."""
    known = tuple(
        replace(PAUSES, name=name, activity=Activity.TRAINING if alive else Activity.GONE)
        for name, alive in (("a", False), ("b", True), ("c", False))
    )
    at = Turn(POLICY, at_100(Online(), *known), 100.0)
    lifecycle.forget_outage(at, resumed=False)
    assert [t.name for t in at.state.trainers] == ["a", "b"]


def test_who_did_not_answer_is_asked_again_also_when_the_power_fails_meanwhile() -> None:
    """Three seconds of battery between the word that failed and the next one must not leave training standing."""
    waits = replace(PAUSES, activity=Activity.PAUSED)
    state = replace(at_100(Online(), waits, supply=Supply.UTILITY), owed=(Resume(trainer="a", retry_at_s=105.0),))
    again: list[float] = []
    for at_s in range(101, 118):
        now = says(float(at_s), input_present=False) if at_s < 104 else says(float(at_s), "utility")
        for event in (now, Tick(at_s=at_s + 0.5)):
            answer = step(POLICY, state, event)
            state = answer.state
            again += [event.at_s for action in answer.actions if isinstance(action, ResumeTrainer)]
    assert isinstance(state.phase, Online)
    assert again == [105.0, 116.0], "and once more where nobody tells what came of it"


# --- The load that nobody tells ------------------------------------------------------------------------------------


def load_after(state: State) -> float | None:
    """Load that counts a second later, without a word from the UPS."""
    return step(POLICY, state, Tick(at_s=101.0)).state.battery.load


def unheard(phase: Phase, *known: Trainer, load: float, lost: bool = True, **changes: object) -> State:
    state = at_100(phase, *known)
    feed = replace(state.feed, lost_since_s=90.0 if lost else None)
    return replace(state, feed=feed, battery=replace(state.battery, load=load), **changes)


@pytest.mark.parametrize(("load", "counts"), [(0.25, 1.0), (1.0, 1.0), (1.25, 1.25)])
def test_training_that_may_have_come_back_unseen_counts_with_what_it_drew(load: float, counts: float) -> None:
    assert load_after(unheard(ON_BATTERY, PAUSES, load=load)) == counts


def test_a_load_that_is_heard_counts_as_reported() -> None:
    assert load_after(unheard(ON_BATTERY, PAUSES, load=0.25, lost=False)) == 0.25


def test_where_nobody_trains_the_last_load_counts() -> None:
    dead = replace(PAUSES, activity=Activity.GONE)
    assert load_after(unheard(ON_BATTERY, dead, load=0.25)) == 0.25


def test_what_it_drew_without_a_cap_says_nothing_of_a_capped_one() -> None:
    capped = GpuCap(outage="o", at_s=80.0)
    assert load_after(unheard(ON_BATTERY, PAUSES, load=0.5, owed=(capped,))) == 0.5


def test_an_outage_that_began_without_a_load_has_nothing_to_add() -> None:
    blind = OnBattery(outage=replace(OUTAGE, load_at_start=None))
    assert load_after(unheard(blind, PAUSES, load=0.25)) == 0.25


PAUSED = replace(PAUSES, pause_ordered=True, activity=Activity.PAUSED, checkpoint=Durable())
SAVES = needs.with_drop(Learned(), "a", Drop(before=1.0, after=0.25, at_s=0.0))


@pytest.mark.parametrize(
    ("trainer", "learned", "counts"),
    [
        (PAUSED, SAVES, 0.625),
        (PAUSED, Learned(), 1.0),
        (replace(PAUSED, activity=Activity.TRAINING), SAVES, 1.0),
        (replace(PAUSED, conduct=Conduct.CONTINUE), SAVES, 1.0),
    ],
)
def test_a_pause_that_was_measured_lowers_it_with_a_quarter_on_top(
    trainer: Trainer, learned: Learned, counts: float
) -> None:
    phase = replace(HOLD, paused_load=0.5, settle_by_s=60.0)
    assert load_after(unheard(phase, trainer, load=1.0, learned=learned)) == counts


def test_a_drop_is_not_learned_from_an_unreported_load() -> None:
    """It would be its own guess, and lower with each outage."""
    phase = replace(HOLD, paused_load=0.5, settle_by_s=60.0)
    heard = unheard(phase, PAUSED, load=0.25, lost=False)
    assert needs.drop_of(step(POLICY, heard, Tick(at_s=101.0)).state.learned, "a") == Drop(
        before=1.0, after=0.25, at_s=101.0
    )
    silent = unheard(phase, PAUSED, load=0.25)
    assert needs.drop_of(step(POLICY, silent, Tick(at_s=101.0)).state.learned, "a") is None
