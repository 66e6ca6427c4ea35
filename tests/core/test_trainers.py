"""Trainers: what they say, what they are ordered, who settles a phase, who is resumed and who is started again."""

from dataclasses import replace

import pytest

from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import (
    Conduct,
    Detail,
    Grade,
    Level,
    PauseTrainer,
    ResumeTrainer,
    ResumeTraining,
    TriggerCheckpoint,
)
from powerguard.core.model.events import CheckpointProgress, Done, Failed, TrainerSeen
from powerguard.core.model.policy import Learned, Mode
from powerguard.core.model.state import (
    Activity,
    Battery,
    CheckpointInFlight,
    Durable,
    EmergencyCheckpoint,
    Feed,
    GivenUp,
    Holding,
    NotDurable,
    OnBattery,
    Online,
    Outage,
    Signalled,
    State,
    Supply,
    Trainer,
)
from powerguard.core.trainers import lifecycle
from tests.core.play import Player, make_policy, play

POLICY = make_policy(["table=50:2000,100:1000", "trainer=a:pause:20:x", "trainer=b:continue:10:y"])
OUTAGE = Outage(id="o", since_s=0.0, grade=Grade.FULL)
EMERGENCY = EmergencyCheckpoint(outage=OUTAGE, began_s=90.0, because="budget")
HOLD = Holding(outage=OUTAGE, began_s=95.0)
A, B = lifecycle.at_start(POLICY, Learned())


def turn(*known: Trainer, phase: object = EMERGENCY, left: float | None = 0.75, cut_at_s: float | None = None) -> Turn:
    state = State(
        phase=phase,  # type: ignore[arg-type]
        feed=Feed(supply=Supply.BATTERY, countdown_at_s=cut_at_s),
        battery=Battery(at_s=100.0, used=0.0, left=left, load=1.0),
        trainers=known,
    )
    return Turn(POLICY, state, 100.0)


def only(at: Turn) -> Trainer:
    (trainer,) = at.state.trainers
    return trainer


def notes(at: Turn) -> list[str]:
    return [note.event for note in at.notes]


def order(trainer: str = "a", id_: str = "o-1", after: Conduct = Conduct.PAUSE) -> TriggerCheckpoint:
    return TriggerCheckpoint(id=id_, by_s=200.0, trainer=trainer, reason="on_battery", after=after, outage="o")


def done(detail: Detail, action: TriggerCheckpoint | None = None) -> Done:
    return Done(at_s=100.0, action=order() if action is None else action, took_s=3.0004, detail=detail)


def test_at_start_the_configured_ones_are_presumed_alive() -> None:
    assert Trainer(name="a", conduct=Conduct.PAUSE, checkpoint_s=20.0, disk="x") == A
    assert Trainer(name="b", conduct=Conduct.CONTINUE, checkpoint_s=10.0, disk="y") == B


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_checkpoint_that_has_only_begun_settles_the_order_and_is_no_durable_step(*, confirmed: bool) -> None:
    """Its trainer has had its time, so the order ends; but the core must not count on such a checkpoint."""
    flight = CheckpointInFlight(order="o-1")
    at = turn(replace(A, conduct=Conduct.CONTINUE, step=40, in_flight=flight, durable_step=7, durable_at_s=5.0))
    detail = (("step", None), ("at_paused_step", False), ("verified", False), ("confirmed", confirmed))
    lifecycle.handle(at, done(detail, order(after=Conduct.CONTINUE)))
    assert (only(at).order, only(at).durable) == (None, True)
    assert (only(at).durable_step, only(at).durable_at_s) == ((40, 100.0) if confirmed else (7, 5.0))
    (note,) = [note for note in at.notes if note.event == "checkpoint_durable"]
    assert dict(note.numbers)["confirmed"] is confirmed


@pytest.mark.parametrize(
    ("conduct", "paused", "saved", "counts"),
    [
        (Conduct.PAUSE, False, 40, False),  # it trains on
        (Conduct.PAUSE, True, 39, False),  # it stands behind it
        (Conduct.PAUSE, True, 40, True),
        (Conduct.EXIT, True, None, False),
        (Conduct.CONTINUE, False, 39, True),
    ],
)
def test_a_checkpoint_during_training_is_none_of_a_pause(
    *, conduct: Conduct, paused: bool, saved: int | None, counts: bool
) -> None:
    """A precaution that ends in the emergency, or one that the operator asked for: what is owed is ordered again."""
    standing = replace(A, conduct=conduct, step=40, in_flight=CheckpointInFlight(order="o-1")).found(paused=paused)
    at = turn(standing)
    lifecycle.handle(at, done((("step", saved), ("verified", True)), order(after=Conduct.CONTINUE)))
    assert (only(at).order, only(at).durable) == (None, counts)
    assert only(at).owes is not counts


# --- What they say ------------------------------------------------------------------------------------------------


def seen(**fields: object) -> TrainerSeen:
    return TrainerSeen(**{"at_s": 100.0, "trainer": "a", "alive": True, "conduct": Conduct.PAUSE, **fields})  # type: ignore[arg-type]


def test_a_stranger_is_taken_in_when_it_is_alive() -> None:
    at = turn(A)
    lifecycle.handle(at, seen(trainer="new", alive=False))
    assert at.state.trainers == (A,)
    lifecycle.handle(at, seen(trainer="new", conduct=Conduct.EXIT, checkpoint_s=7.0, disk="z", step=5, step_s=2.0))
    new = Trainer(name="new", conduct=Conduct.EXIT, checkpoint_s=7.0, reported_s=7.0, disk="z", step=5, step_s=2.0)
    assert at.state.trainers == (A, new)
    assert notes(at) == ["trainer_appeared"]
    assert dict(at.notes[0].numbers) == {"trainer": "new", "conduct": Conduct.EXIT}
    lifecycle.handle(at, seen(trainer="quiet"))
    assert at.state.trainers[2].checkpoint_s == 60.0, "a default until it tells"


@pytest.mark.parametrize(
    ("checkpoint_s", "counts"), [(5.0, 5.0), (None, 20.0), (0.0, 20.0), (-1.0, 20.0), (600.0, 600.0), (1e9, 600.0)]
)
def test_an_estimate_is_bounded_by_the_settings(checkpoint_s: float | None, counts: float) -> None:
    at = turn(A)
    lifecycle.handle(at, seen(checkpoint_s=checkpoint_s))
    assert only(at).checkpoint_s == counts


@pytest.mark.parametrize(("step_s", "counts"), [(3.0, 3.0), (-1.0, 0.0), (1e9, 600.0), (float("nan"), 0.0)])
def test_a_step_time_is_bounded_too(step_s: float, counts: float) -> None:
    at = turn(A)
    lifecycle.handle(at, seen(step_s=step_s))
    assert only(at).step_s == counts


def test_what_is_not_reported_stays() -> None:
    known = replace(A, step=4, durable_step=3, durable_at_s=90.0, disk="x", conduct=Conduct.PAUSE)
    at = turn(known)
    lifecycle.handle(at, seen(paused=True))
    assert only(at) == replace(known, activity=Activity.PAUSED)
    lifecycle.handle(at, seen(step=6, durable_step=5, durable_age_s=2.0, disk="w", conduct=Conduct.EXIT))
    assert only(at) == replace(
        known, step=6, durable_step=5, durable_at_s=98.0, disk="w", conduct=Conduct.EXIT, activity=Activity.TRAINING
    )
    lifecycle.handle(at, seen(durable_age_s=50.0))
    assert only(at).durable_at_s == 98.0, "the newest one counts"
    fresh = turn(A)
    lifecycle.handle(fresh, seen(durable_age_s=0.0))
    assert only(fresh).durable_at_s == 100.0
    lifecycle.handle(fresh, seen(durable_age_s=-1.0))
    assert only(fresh).durable_at_s == 100.0


def test_one_that_goes_is_reported_once_and_one_that_comes_again_is_new() -> None:
    known = replace(
        A,
        activity=Activity.PAUSED,
        checkpoint=GivenUp(because="f", tries=2),
        pause_ordered=True,
        in_flight=CheckpointInFlight(order="o-1"),
    )
    at = turn(known)
    lifecycle.handle(at, seen(alive=False, paused=True, conduct=Conduct.EXIT))
    assert only(at) == replace(known, activity=Activity.GONE), "its conduct is remembered"
    lifecycle.handle(at, seen(alive=False))
    assert notes(at) == ["trainer_gone"]
    lifecycle.handle(at, seen())
    assert only(at) == replace(A, activity=Activity.TRAINING)


@pytest.mark.parametrize(
    ("eta_s", "eta_at_s"), [(5.0, 105.0), (0.0, 100.0), (None, None), (-1.0, None), (1e9, 700.0), (float("nan"), None)]
)
def test_progress(eta_s: float | None, eta_at_s: float | None) -> None:
    """A claim is bounded by the settings as well; one of another order says nothing of ours."""
    flying = replace(A, in_flight=CheckpointInFlight(order="o-1"))
    progress = CheckpointProgress(
        at_s=100.0, trainer="a", action_id="o-1", stage="writing", eta_s=eta_s, paused=True, step=9
    )
    at = turn(flying)
    lifecycle.handle(at, progress)
    assert only(at) == replace(flying, in_flight=flight(eta_at_s, copied=True), activity=Activity.PAUSED, step=9)
    lifecycle.handle(at, replace(progress, paused=False, step=None, eta_s=None))
    assert only(at) == replace(flying, in_flight=flight(copied=True), activity=Activity.PAUSED, step=9)
    lifecycle.handle(at, replace(progress, stage="snapshot"))
    assert only(at).in_flight == flight(eta_at_s), "its state is being copied: training must not go on"
    for other in (replace(progress, action_id="o-0"), replace(progress, trainer="who")):
        at = turn(flying)
        lifecycle.handle(at, other)
        assert only(at) == flying


# --- How orders end -----------------------------------------------------------------------------------------------


def flight(eta_at_s: float | None = None, *, copied: bool = False) -> CheckpointInFlight:
    return CheckpointInFlight(order="o-1", eta_at_s=eta_at_s, copied=copied)


FLYING = replace(
    A,
    in_flight=CheckpointInFlight(order="o-1", eta_at_s=105.0),
    checkpoint=NotDurable(tries=1),
    pause_ordered=True,
    step=40,
)


def test_a_checkpoint_at_the_paused_step_is_durable() -> None:
    at = turn(FLYING)
    lifecycle.handle(
        at, done((("step", 42), ("at_paused_step", True), ("paused", True), ("verified", True), ("bytes", 7)))
    )
    assert only(at) == replace(
        FLYING,
        in_flight=None,
        activity=Activity.PAUSED,
        checkpoint=Durable(),
        durable_at_s=100.0,
        durable_step=42,
        step=42,
    )
    (note,) = at.notes
    assert note.because == "reported by the trainer"
    assert dict(note.numbers) == {
        "trainer": "a",
        "step": 42,
        "took_s": 3.0,
        "paused": True,
        "verified": True,
        "bytes": 7,
    }


def test_a_dumb_answer_is_durable_as_well_but_unverified() -> None:
    at = turn(FLYING)
    lifecycle.handle(at, done(()))
    assert only(at) == replace(FLYING, in_flight=None, checkpoint=Durable(), durable_at_s=100.0, durable_step=40)
    assert at.notes[0].because == "reported by the trainer, unverified"


def test_outside_the_emergency_it_is_only_the_newest_one() -> None:
    at = turn(FLYING, phase=OnBattery(outage=OUTAGE))
    lifecycle.handle(at, done((("step", 42),)))
    assert (only(at).durable, only(at).durable_at_s, only(at).order) == (False, 100.0, None)


def test_the_outcome_of_an_older_order_is_not_the_newest_ones() -> None:
    at = turn(replace(FLYING, in_flight=CheckpointInFlight(order="o-2")))
    lifecycle.handle(at, done((("step", 39),)))
    assert (only(at).durable, only(at).order, only(at).durable_step) == (False, "o-2", 39)
    lifecycle.handle(at, Failed(at_s=100.0, action=order(), took_s=1.0, reason="r"))
    assert (only(at).given_up, only(at).order) == (None, "o-2")
    lifecycle.handle(at, done((), order("who")))
    lifecycle.handle(at, Failed(at_s=100.0, action=order("who"), took_s=1.0, reason="r"))
    assert only(at).order == "o-2"


OLDER: Detail = (("step", 30), ("at_paused_step", False))


@pytest.mark.parametrize(
    ("tries", "left", "cut_at_s", "durable"),
    [
        (1, 0.75, None, False),  # a second one fits
        (3, 0.75, None, True),
        # 20 s and 130 s at full load: 0.15 of 1000 s above the floor of 0.1.
        (1, 0.2501, None, False),
        (1, 0.2499, None, True),
        (1, None, None, False),
        (1, 0.75, 280.1, False),  # 30 s of guard before the cut
        (1, 0.75, 279.9, True),
    ],
)
def test_an_older_checkpoint_stands_only_where_no_second_one_fits(
    tries: int, left: float | None, cut_at_s: float | None, *, durable: bool
) -> None:
    at = turn(replace(FLYING, checkpoint=NotDurable(tries=tries)), left=left, cut_at_s=cut_at_s)
    lifecycle.handle(at, done(OLDER))
    assert only(at).durable is durable
    assert ("older_checkpoint_stands" in notes(at)) is durable
    if durable:
        assert dict(at.notes[0].numbers) == {"steps_lost": 10}


def test_one_that_goes_on_has_no_paused_step() -> None:
    at = turn(replace(FLYING, conduct=Conduct.CONTINUE, checkpoint=NotDurable(tries=1)))
    lifecycle.handle(at, done(OLDER, order(after=Conduct.CONTINUE)))
    assert only(at).durable


@pytest.mark.parametrize(
    ("tries", "timed_out", "phase", "failed"),
    [
        (1, False, EMERGENCY, False),
        (1, True, EMERGENCY, True),
        (2, False, HOLD, False),
        (3, False, HOLD, True),
        (3, True, Online(), False),
    ],
)
def test_a_failure_is_final_at_its_limit_or_after_three(
    tries: int, phase: object, *, failed: bool, timed_out: bool
) -> None:
    at = turn(replace(FLYING, checkpoint=NotDurable(tries=tries)), phase=phase)
    lifecycle.handle(at, Failed(at_s=100.0, action=order(), took_s=1.0, reason="refused", timed_out=timed_out))
    given_up = GivenUp(because="refused", tries=tries) if failed else None
    assert (only(at).given_up, only(at).in_flight) == (given_up, None)


# --- Orders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "checkpoint_s", "limit_s"),
    [
        (0.75, 20.0, 80.0),  # four times what it takes
        (0.75, 5.0, 60.0),  # never less than a minute of patience
        (0.29, 20.0, 60.0),
        (0.101, 20.0, 2.0),
        (None, 20.0, 80.0),
        (None, 200.0, 120.0),  # blind_s
    ],
)
def test_the_limit_of_an_order(left: float | None, checkpoint_s: float, limit_s: float) -> None:
    """Until the host must stop (130 s with the small reserve), four times the estimate, and never without end."""
    known = replace(A, checkpoint_s=checkpoint_s, pause_ordered=True)
    at = turn(known, left=left)
    if left is None:
        at.policy = replace(POLICY, runtime_table=())
    assert lifecycle.order_limit_s(at) == pytest.approx(limit_s)


def test_the_limit_is_that_of_the_stop_that_will_be() -> None:
    """After a cliff a full stop would leave 2 s for a checkpoint of 20 s: the stop is lowered first."""
    at = turn(replace(A, checkpoint_s=20.0, pause_ordered=True), left=0.2)
    assert lifecycle.order_limit_s(at) >= 20.0
    assert at.outage is not None
    assert at.outage.grade is not Grade.FULL
    assert notes(at) == ["grade_lowered"]


@pytest.mark.parametrize(("limit_s", "again"), [(2.0, True), (60.0, False)])
def test_a_checkpoint_that_had_too_little_time_is_asked_for_again_in_a_hold(limit_s: float, *, again: bool) -> None:
    """The gauge was wrong, and there is time after all. One that had its time and hung is not asked again."""
    at = turn(replace(FLYING, checkpoint_s=20.0, ordered_at_s=98.0))
    late = replace(order(), by_s=98.0 + limit_s)
    lifecycle.handle(at, Failed(at_s=100.0, action=late, took_s=limit_s, reason="no answer", timed_out=True))
    assert only(at).given_up is not None
    assert only(at).given_up.because == "no answer"
    at.now_s = 131.0
    lifecycle.reconcile(at, hold=True, repeat_s=60.0)
    assert (only(at).order is not None, only(at).given_up is None) == (again, again)


def test_all_are_ordered_by_their_own_conduct() -> None:
    at = turn(A, B, replace(A, name="dead", activity=Activity.GONE))
    lifecycle.order_emergency(at, by_s=150.0)
    found = [(o.trainer, o.after, o.by_s, o.reason, o.outage) for o in at.actions if isinstance(o, TriggerCheckpoint)]
    assert found == [("a", Conduct.PAUSE, 150.0, "on_battery", "o"), ("b", Conduct.CONTINUE, 150.0, "on_battery", "o")]
    a, b, dead = at.state.trainers
    assert (a.order, a.pause_ordered, a.checkpoint, a.ordered_at_s) == (
        at.actions[0].id,
        True,
        NotDurable(tries=1),
        100.0,
    )
    assert (b.order, b.pause_ordered, b.checkpoint) == (at.actions[1].id, False, NotDurable(tries=1))
    assert (dead.order, dead.checkpoint) == (None, NotDurable())
    assert notes(at) == ["checkpoint_ordered", "checkpoint_ordered"]


def test_beside_training_one_in_flight_is_enough() -> None:
    at = turn(replace(A, in_flight=CheckpointInFlight(order="o-1")), B)
    at.set_phase(OnBattery(outage=OUTAGE))
    lifecycle.order_all(at, reason="operator", by_s=100.5)
    assert [o.trainer for o in at.actions if isinstance(o, TriggerCheckpoint)] == ["b"]
    assert at.state.trainers[1].checkpoint == NotDurable(), "it is no try of the one at the paused step"
    assert at.actions[0].by_s == 102.0, "no order has less than two seconds"
    assert not at.state.trainers[0].pause_ordered
    at = turn(replace(A, in_flight=CheckpointInFlight(order="o-1")))
    lifecycle.order_emergency(at, by_s=150.0)
    assert len(at.actions) == 1, "the one at the paused step is ordered all the same"


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ({"checkpoint": GivenUp(because="no space", tries=3)}, Conduct.PAUSE),
        ({"checkpoint": NotDurable(tries=2), "ordered_at_s": 99.5}, Conduct.PAUSE),
        ({"checkpoint": Durable()}, Conduct.CONTINUE),
    ],
)
@pytest.mark.parametrize("phase", [EMERGENCY, HOLD])
def test_an_operator_who_asks_in_a_hold_gives_all_tries_again(
    changes: dict[str, object], after: Conduct, phase: object
) -> None:
    """The disk has space again: the trainer is asked to pause and save, and a refusal is not the end of it."""
    at = turn(replace(A, pause_ordered=True, **changes), phase=phase)  # type: ignore[arg-type]
    lifecycle.order_all(at, reason="operator", by_s=700.0)
    lifecycle.reconcile(at, hold=phase is HOLD, repeat_s=60.0)
    assert [o.after for o in at.actions if isinstance(o, TriggerCheckpoint)] == [after]
    assert only(at).checkpoint == (NotDurable(tries=1) if after is Conduct.PAUSE else Durable())


@pytest.mark.parametrize(
    ("changes", "hold", "ordered"),
    [
        ({}, False, True),
        ({"checkpoint": Durable()}, False, False),
        ({"in_flight": flight()}, False, False),
        ({"checkpoint": GivenUp(because="f", tries=1)}, False, False),
        ({"activity": Activity.GONE}, False, False),
        ({"checkpoint": Durable(), "conduct": Conduct.CONTINUE, "durable_at_s": 40.0}, True, True),
        ({"checkpoint": Durable(), "conduct": Conduct.CONTINUE, "durable_at_s": 40.1}, True, False),
        (
            {"checkpoint": Durable(), "conduct": Conduct.CONTINUE, "durable_at_s": 1.0, "ordered_at_s": 60.0},
            True,
            False,
        ),
        ({"checkpoint": Durable(), "conduct": Conduct.CONTINUE, "durable_at_s": 1.0}, False, False),
        ({"checkpoint": Durable(), "conduct": Conduct.CONTINUE}, True, False),
        ({"checkpoint": Durable(), "durable_at_s": 1.0}, True, False),
    ],
)
def test_what_is_owed_is_tended(changes: dict[str, object], *, hold: bool, ordered: bool) -> None:
    at = turn(replace(A, **changes), phase=HOLD if hold else EMERGENCY)  # type: ignore[arg-type]
    lifecycle.reconcile(at, hold=hold, repeat_s=60.0)
    assert bool(at.actions) is ordered


@pytest.mark.parametrize("timed_out", [False, True])
def test_a_repeated_checkpoint_that_fails_in_a_hold_takes_nothing_back_and_is_repeated(*, timed_out: bool) -> None:
    """It trains on through a long hold: the checkpoint of the outage stays durable, however often another one fails."""
    at = turn(replace(A, conduct=Conduct.CONTINUE, checkpoint=Durable(), durable_at_s=1.0), phase=HOLD)
    for ordered in range(1, 6):
        lifecycle.reconcile(at, hold=True, repeat_s=60.0)
        assert [type(action) for action in at.actions] == [TriggerCheckpoint] * ordered
        failed = Failed(at_s=at.now_s, action=at.actions[-1], took_s=1.0, reason="refused", timed_out=timed_out)
        lifecycle.handle(at, failed)
        assert (only(at).checkpoint, only(at).in_flight) == (Durable(), None)
        at.now_s += 60.0


def test_one_that_must_wait_is_asked_to_pause_and_holds_nobody_up() -> None:
    """Both write to one disk, and there is no time for both: the one of higher priority comes first, also when late."""
    first = replace(A, name="c", priority=5, checkpoint_s=900.0)
    at = turn(replace(A, checkpoint_s=900.0), first)
    lifecycle.reconcile(at, hold=False, repeat_s=60.0)
    assert [(type(o), o.trainer) for o in at.actions if isinstance(o, PauseTrainer | TriggerCheckpoint)] == [
        (PauseTrainer, "a"),
        (TriggerCheckpoint, "c"),
    ]


STOPPED = Signalled(trainer="a", outage="o", word="stop", at_s=50.0, carried_out="stop")


def test_one_that_is_stopped_is_passed_over_and_the_next_is_not() -> None:
    """It cannot hear us: a precaution is for those who can, and so is a checkpoint that a person asks for."""
    at = turn(A, B, phase=OnBattery(outage=OUTAGE))
    at.update(
        owed=(STOPPED,),
        trainers=tuple(replace(each, durable_at_s=-9000.0, stall_s=0.0, ordered_at_s=-9000.0) for each in (A, B)),
    )
    lifecycle.take_precautions(at, since_s=0.0)
    assert [o.trainer for o in at.actions if isinstance(o, TriggerCheckpoint)] == ["b"]
    at = turn(A, B, phase=OnBattery(outage=OUTAGE))
    at.update(owed=(STOPPED,))
    lifecycle.order_all(at, reason="operator", by_s=150.0)
    assert [o.trainer for o in at.actions if isinstance(o, TriggerCheckpoint)] == ["b"]


@pytest.mark.parametrize("signalled", [(), (STOPPED,)])
def test_what_a_signal_brought_is_no_pause(signalled: tuple[Signalled, ...]) -> None:
    """The load fell since it was stopped: its own pause may bring nothing at all."""
    hold = replace(HOLD, outage=replace(OUTAGE, load_at_start=2.0), paused_load=1.0, settle_by_s=99.0)
    at = turn(replace(A, pause_ordered=True, activity=Activity.PAUSED), phase=hold)
    at.update(owed=signalled)
    lifecycle.learn_drop(at, hold)
    assert [name for name, _ in at.state.learned.pauses] == ([] if signalled else ["a"])


def test_a_pause_counts_when_it_was_heard() -> None:
    """One that failed leaves the trainer as it was: it trains on, and draws."""
    pause = PauseTrainer(id="p-1", by_s=110.0, trainer="a", outage="o")
    for outcome, paused in (
        (Done(at_s=100.0, action=pause, took_s=0.1), True),
        (Failed(at_s=100.0, action=pause, took_s=0.1, reason="no answer"), False),
    ):
        at = turn(replace(A, pause_ordered=True))
        lifecycle.handle(at, outcome)
        assert only(at).paused is paused
    lifecycle.handle(turn(B), Done(at_s=100.0, action=pause, took_s=0.1))


def test_one_that_learns_late_that_it_may_go_on_is_asked_to_pause_again() -> None:
    """The word was on its way when the next outage said pause: to this one, in this outage, and to nobody else."""
    word = ResumeTrainer(id="r-1", by_s=110.0, trainer="a", outage="earlier")
    at = turn(replace(A, pause_ordered=True), replace(B, pause_ordered=True))
    lifecycle.handle_resumed(at, Done(at_s=100.0, action=word, took_s=0.1))
    assert [(o.trainer, o.outage) for o in at.actions if isinstance(o, PauseTrainer)] == [("a", "o")]
    for changes in ({"pause_ordered": False}, {"pause_ordered": True, "activity": Activity.GONE}):
        at = turn(replace(A, **changes))  # type: ignore[arg-type]
        lifecycle.handle_resumed(at, Done(at_s=100.0, action=word, took_s=0.1))
        assert at.actions == []


# --- Settled, writing, resumed ------------------------------------------------------------------------------------


def test_who_settles_the_emergency() -> None:
    durable, failed, dead = (
        replace(A, checkpoint=Durable()),
        replace(B, checkpoint=GivenUp(because="", tries=1)),
        replace(A, activity=Activity.GONE),
    )
    assert lifecycle.all_settled((durable, failed, dead))
    assert lifecycle.all_settled(())
    assert not lifecycle.all_settled((durable, B))
    assert lifecycle.settled_because((durable, dead)) == "every checkpoint is durable"
    assert lifecycle.settled_because((durable, failed)) == "no checkpoint from b is confirmed"
    assert (
        lifecycle.settled_because((replace(A, checkpoint=GivenUp(because="f", tries=1)), failed))
        == "no checkpoint from a, b is confirmed"
    )
    assert lifecycle.settled_because((dead,)) == "no trainer is alive"


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"in_flight": flight(copied=True)}, False),  # the write goes on beside training
        ({"pause_ordered": False}, False),  # it trains on anyway
        ({"durable_at_s": 74.9}, True),
        ({"durable_at_s": 80.1}, False),  # 15 s more, for less than 15 s of work
        ({"durable_at_s": 10.0, "checkpoint_s": 120.0}, False),
        ({"in_flight": None}, False),
        ({"activity": Activity.GONE}, False),
        ({"ordered_at_s": 60.1}, True),
        ({"ordered_at_s": 60.0}, False),  # twice its 20 s are over
        ({"ordered_at_s": 50.0, "in_flight": flight(100.1)}, True),
        ({"ordered_at_s": 50.0, "in_flight": flight(100.0)}, False),
        ({"ordered_at_s": 70.1, "checkpoint_s": 1.0}, True),
        ({"ordered_at_s": 70.0, "checkpoint_s": 1.0}, False),  # thirty seconds at least
    ],
)
def test_a_write_holds_a_return_where_it_saves_more_than_it_takes(changes: dict[str, object], *, holds: bool) -> None:
    """And never for ever: what takes twice its time is not waited for."""
    flying = replace(A, **{"in_flight": flight(), "ordered_at_s": 95.0, "pause_ordered": True, **changes})  # type: ignore[arg-type]
    assert lifecycle.holds_return((flying,), 100.0) is holds
    assert not lifecycle.holds_return((), 100.0)


@pytest.mark.parametrize(
    ("changes", "resumed", "started"),
    [
        ({}, False, False),
        ({"activity": Activity.PAUSED}, True, False),
        ({"pause_ordered": True}, True, False),
        ({"pause_ordered": True, "activity": Activity.GONE}, False, True),
        ({"activity": Activity.GONE}, False, False),
        ({"pause_ordered": True, "conduct": Conduct.EXIT}, True, True),
        ({"conduct": Conduct.EXIT}, False, False),
    ],
)
def test_who_is_resumed_and_who_is_started_again(changes: dict[str, object], *, resumed: bool, started: bool) -> None:
    at = turn(replace(A, **changes), phase=HOLD)  # type: ignore[arg-type]
    lifecycle.resume_all(at)
    kinds = [ResumeTrainer] * resumed + [ResumeTraining] * started
    assert [type(action) for action in at.actions] == kinds
    for action in at.actions:
        assert action.outage == "o"  # type: ignore[attr-defined]
        assert action.by_s == (110.0 if isinstance(action, ResumeTrainer) else 130.0)


def test_what_was_true_in_an_outage_is_forgotten_with_it() -> None:
    spent = replace(FLYING, activity=Activity.PAUSED, checkpoint=GivenUp(because="f", tries=1))
    at = turn(spent, phase=HOLD)
    lifecycle.forget_outage(at, resumed=True)
    assert only(at) == replace(spent, activity=Activity.TRAINING, checkpoint=NotDurable(), pause_ordered=False)


def test_a_living_one_that_is_seen_again_keeps_its_orders() -> None:
    """Only another process begins anew; its status comes every second while a checkpoint is written."""
    at = turn(replace(FLYING, checkpoint=Durable()))
    lifecycle.handle(at, seen(paused=True, step=41))
    assert only(at) == replace(FLYING, activity=Activity.PAUSED, checkpoint=Durable(), step=41)


def test_each_is_bounded_by_its_own_settings() -> None:
    at = turn(A)
    at.policy = replace(POLICY, trainers=(replace(POLICY.trainers[0], max_checkpoint_s=90.0), *POLICY.trainers[1:]))
    lifecycle.handle(at, seen(checkpoint_s=500.0, step_s=500.0))
    assert (only(at).checkpoint_s, only(at).step_s) == (90.0, 90.0)
    lifecycle.handle(at, seen(checkpoint_s=0.5))
    assert only(at).checkpoint_s == 0.5
    first = turn()
    lifecycle.handle(first, seen(trainer="b"))
    assert only(first).checkpoint_s == 10.0, "one that the settings know has their estimate"


def test_one_that_has_gone_is_a_warning() -> None:
    at = turn(A)
    lifecycle.handle(at, seen(alive=False))
    assert (at.notes[0].level, dict(at.notes[0].numbers)) == (Level.WARNING, {"trainer": "a"})


def test_a_reload_takes_out_and_brings_in_and_keeps_what_was_found() -> None:
    """A trainer that the settings no longer name would else be waited for in every outage."""
    old = make_policy(["trainer=a:pause:20", "trainer=b:pause:30"])
    new = make_policy(["trainer=b:pause:40", "trainer=c:exit:5"])
    found = Trainer(name="found", conduct=Conduct.PAUSE)
    known = (*lifecycle.at_start(old, Learned()), found)
    after = lifecycle.after_reload(old, new, known, Learned())
    assert [t.name for t in after] == ["b", "found", "c"]
    assert after[0].checkpoint_s == 30, "what is known of it stays until it says otherwise"


def test_an_order_says_its_limit_and_expects_no_end_yet() -> None:
    at = turn(A)
    lifecycle.order_emergency(at, by_s=150.0625)
    assert dict(at.notes[0].numbers) == {"trainer": "a", "after": Conduct.PAUSE, "limit_s": 50.062}
    assert only(at).in_flight is not None
    assert only(at).in_flight.eta_at_s is None


def test_one_that_owes_nothing_does_not_hide_the_next() -> None:
    at = turn(replace(A, activity=Activity.GONE), B)
    lifecycle.reconcile(at, hold=False, repeat_s=60.0)
    assert [o.trainer for o in at.actions if isinstance(o, TriggerCheckpoint)] == ["b"]


def test_a_rehearsed_checkpoint_says_so() -> None:
    at = turn(FLYING)
    lifecycle.handle(at, done((("dry_run", True), ("path", "/data/7"))))
    (note,) = at.notes
    assert (note.because, note.level) == ("dry-run: no trainer was asked, it is only recorded", Level.INFO)
    assert dict(note.numbers) == {"trainer": "a", "step": 40, "took_s": 3.0, "path": "/data/7"}
    precise = turn(FLYING)
    lifecycle.handle(precise, replace(done(()), took_s=3.0625))
    assert dict(precise.notes[0].numbers)["took_s"] == 3.062


def test_where_no_step_is_known_none_is_said_to_be_lost() -> None:
    at = turn(replace(FLYING, step=None, checkpoint=NotDurable(tries=3)))
    lifecycle.handle(at, done((("at_paused_step", False),)))
    assert dict(at.notes[0].numbers) == {"steps_lost": None}


def test_online_too_what_was_true_is_forgotten() -> None:
    at = turn(replace(FLYING, checkpoint=Durable()), phase=Online())
    lifecycle.forget_outage(at, resumed=False)
    assert (only(at).checkpoint, only(at).pause_ordered) == (NotDurable(), False)


@pytest.mark.parametrize("outage", ["battery", "utility"])
def test_one_that_a_person_has_paused_stands_from_the_first_moment_of_an_outage(outage: str) -> None:
    """Counted as running, its pause would promise a drop of the load that never comes, and it would be signalled."""
    result = play(
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20 signals=1",
        "auto checkpoint=5",
        "0..3 utility load=75 charge=100 runtime=360",
        "3.5 trainer llm paused=true step=7",
        f"4 {outage} load=75 charge=100 off_in=300",
        f"5 {outage} load=75 charge=100 off_in=299",
    )
    assert isinstance(result.state.phase, EmergencyCheckpoint)
    assert result.state.phase.paused_load is None


PERSON = (
    "policy table=50:540,75:360,100:240 trainer=llm:pause:20 trainer=other:pause:20",
    "auto policy checkpoint=5 trainer_resume",
    "0..3 utility load=75 charge=100 runtime=360",
)
OUTAGE_OF_A_MINUTE = (
    "10..70 battery load=75 charge=100-0.7 runtime=360-3",
    "71..90 utility load=75 charge=60 runtime=200",
)


def test_one_that_a_person_had_paused_before_the_outage_stays_paused_after_it() -> None:
    result = play(
        *PERSON,
        "4 trainer llm paused=true conduct=pause step=7",
        "9 trainer llm paused=true conduct=pause step=7",
        *OUTAGE_OF_A_MINUTE,
    )
    assert result.phase == "online"
    assert "llm" in [each.trainer for each in result.ordered(TriggerCheckpoint)], "it saves what it stands at"
    assert [each.trainer for each in result.ordered(ResumeTrainer)] == ["other"]
    (left,) = [note for note in result.notes if note.event == "trainer_left_paused"]
    assert dict(left.numbers) == {"trainer": "llm"}


@pytest.mark.parametrize(
    "before",
    [
        ("4 trainer llm paused=true conduct=pause step=7",),  # one report may be older than the last resume
        (
            "4 trainer llm paused=true conduct=pause",
            "9 trainer llm paused=true conduct=pause",
            "9.5 trainer llm step=8",
        ),
        ("4 trainer llm paused=true held_by=gpu2", "9 trainer llm paused=true held_by=gpu2"),
    ],
    ids=["once", "resumed by hand", "for another host"],
)
def test_a_pause_that_is_no_person_s_ends_with_the_outage(before: tuple[str, ...]) -> None:
    result = play(*PERSON, *before, *OUTAGE_OF_A_MINUTE)
    assert "llm" in [each.trainer for each in result.ordered(ResumeTrainer)]


def test_without_history_in_an_outage_a_paused_trainer_is_resumed_after_it() -> None:
    """The daemon's own pause, of before its journal was lost, is not taken for a person's."""
    result = play(
        *PERSON,
        "10..40 battery load=75 charge=100-0.7 runtime=360-3",
        "41 amnesia",
        "41.3 trainer llm paused=true conduct=pause step=7",
        "41.6 trainer llm paused=true conduct=pause step=7",
        "42..90 battery load=75 charge=78-0.7 runtime=260-3 on_battery=32+1",
        "91..110 utility load=75 charge=45 runtime=150",
    )
    assert "llm" in [each.trainer for each in result.ordered(ResumeTrainer)]


LOST_IN_THE_HOLD = (
    *PERSON,
    "10..40 battery load=75 charge=100-0.7 runtime=360-3",
    "41 amnesia",
    "42..60 utility load=40 charge=70 runtime=200",
)


def test_without_history_after_an_outage_its_own_pause_is_ended() -> None:
    """The journal is lost in a hold, and utility is back: a person would have to notice that training stands."""
    result = play(
        *LOST_IN_THE_HOLD,
        "61 trainer llm paused=true step=7 paused_for=on_battery",
        "61 trainer other paused=true step=7",
        "66 trainer llm paused=true step=7 paused_for=on_battery",
        "66 trainer other paused=true step=7",
        "71 trainer llm step=8",
        "71 trainer other paused=true step=7",
        "72..90 utility load=75 charge=70 runtime=200",
    )
    assert [each.trainer for each in result.ordered(ResumeTrainer)] == ["llm"], "of the other, nothing is known"
    (note,) = [note for note in result.notes if note.event == "pause_forgotten"]
    assert dict(note.numbers) == {"trainer": "llm"}
    assert [(each.name, each.stood) for each in result.state.trainers] == [("llm", False), ("other", True)]


@pytest.mark.parametrize("paused", ["paused_for=operator", "paused_for=drill", "held_by=gpu2 paused_for=on_battery"])
def test_without_history_another_pause_stands(paused: str) -> None:
    """Also one that another host of the job still wants."""
    result = play(
        *LOST_IN_THE_HOLD,
        f"61 trainer llm paused=true step=7 {paused}",
        f"66 trainer llm paused=true step=7 {paused}",
        "67..90 utility load=40 charge=70 runtime=200",
    )
    assert result.ordered(ResumeTrainer) == []


def test_a_pause_that_dry_run_left_standing_ends_in_the_next_mode() -> None:
    """The daemon is restarted in dry-run while it holds training, and as it was when utility is back."""
    player = Player()
    for line in (*PERSON, "10..40 battery load=75 charge=100-0.7 runtime=360-3"):
        player.line(line)
    for mode, lines in (
        (
            Mode.DRY_RUN,
            (
                "41 restart",
                "42..60 utility load=40 charge=70 runtime=200",
                "61 trainer llm paused=true step=7 paused_for=on_battery",
                "66 trainer llm paused=true step=7 paused_for=on_battery",
            ),
        ),
        (
            Mode.ARMED,
            ("67 restart", "68 utility load=40 charge=70", "71 trainer llm paused=true step=7 paused_for=on_battery"),
        ),
    ):
        player.policy = replace(player.policy, mode=mode)
        for line in lines:
            player.line(line)
    assert player.result is not None
    assert "pause_forgotten" in [note.event for note in player.result.notes], "no person has paused it"
    assert [each.trainer for each in player.result.ordered(ResumeTrainer)][-1:] == ["llm"]


def test_a_disk_that_the_settings_no_longer_name_is_forgotten() -> None:
    """Else its checkpoint counts as one of the same disk, and training pauses too early, until the next boot."""
    at = turn(A)
    at.policy = replace(POLICY, trainers=(replace(POLICY.trainers[0], disk=""),))
    lifecycle.handle(at, seen(step=6))
    assert only(at).disk == ""


def test_a_claim_in_flight_is_bounded_by_its_own_settings() -> None:
    at = turn(replace(A, in_flight=CheckpointInFlight(order="o-1")))
    at.policy = replace(POLICY, trainers=(replace(POLICY.trainers[0], max_checkpoint_s=90.0),))
    lifecycle.handle(at, CheckpointProgress(at_s=100.0, trainer="a", action_id="o-1", stage="writing", eta_s=1e9))
    assert only(at).in_flight == flight(190.0, copied=True)


def test_what_dry_run_has_only_recorded_is_not_durable() -> None:
    """After a reload from dry-run to armed, a checkpoint that never was must not count as one, nor as a measurement."""
    at = turn(FLYING)
    recorded = done((("dry_run", True),))
    lifecycle.handle(at, recorded)
    assert (only(at).durable_at_s, only(at).durable_step) == (FLYING.durable_at_s, FLYING.durable_step)
    assert at.state.learned == Learned()
    real = turn(FLYING)
    lifecycle.handle(real, replace(recorded, took_s=12.0, detail=(("step", 42), ("verified", True))))
    assert only(real).durable_at_s == 100.0
    assert {need.name: need.seconds for need in real.state.learned.needs} == {"a": (12.0,)}
