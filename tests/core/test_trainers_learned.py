"""How long a checkpoint takes, as told, as measured and as the settings bound it; and precautions beside training."""

from dataclasses import replace

import pytest

from powerguard.core.decide.turn import Turn
from powerguard.core.energy import needs
from powerguard.core.model.actions import Conduct, Grade, Scalar, TriggerCheckpoint
from powerguard.core.model.events import Done, TrainerSeen
from powerguard.core.model.policy import Drop, Learned
from powerguard.core.model.state import (
    Activity,
    Battery,
    CheckpointInFlight,
    Durable,
    Feed,
    GivenUp,
    Holding,
    NotDurable,
    OnBattery,
    Online,
    Outage,
    State,
    Supply,
    Trainer,
)
from powerguard.core.trainers import lifecycle
from tests.core.play import make_policy

POLICY = make_policy(["table=50:2000,100:1000", "trainer=a:pause:20:x:5", "trainer=b:continue:10:y"])
OUTAGE = Outage(id="o", since_s=0.0, grade=Grade.FULL)
EVERY_S = POLICY.precaution_every_s


def measured(name: str, *seconds: float) -> Learned:
    found = Learned()
    for each in seconds:
        found = needs.add(found, "checkpoint", each, name)
    return found


def turn(*known: Trainer, now_s: float = 1000.0, learned: Learned | None = None) -> Turn:
    state = State(
        phase=OnBattery(outage=OUTAGE),
        feed=Feed(supply=Supply.BATTERY, since_s=0.0),
        battery=Battery(at_s=now_s, used=0.0, left=0.75, load=1.0),
        trainers=known,
        learned=learned or Learned(),
    )
    return Turn(POLICY, state, now_s)


def only(at: Turn) -> Trainer:
    (trainer,) = at.state.trainers
    return trainer


def seen(at: Turn, **answer: object) -> Trainer:
    event = TrainerSeen(**{"at_s": at.now_s, "trainer": "a", "alive": True, "conduct": Conduct.PAUSE, **answer})  # type: ignore[arg-type]
    lifecycle.handle(at, event)
    return only(at)


def saved(at: Turn, took_s: float = 5.0, **detail: Scalar) -> Trainer:
    action = TriggerCheckpoint(id="o-1", by_s=2000.0, trainer="a", reason="x", after=Conduct.CONTINUE, outage="o")
    lifecycle.handle(at, Done(at_s=at.now_s, action=action, took_s=took_s, detail=tuple(detail.items())))
    return only(at)


A = Trainer(name="a", conduct=Conduct.PAUSE, checkpoint_s=20.0, disk="x", priority=5)


def test_at_start_the_settings_priority_and_the_history_of_each_count() -> None:
    """Three measured checkpoints of a say nothing of b's."""
    a, b = lifecycle.at_start(POLICY, measured("a", 12.0, 12.0, 12.0))
    assert (a.priority, b.priority) == (5, 0)
    assert (a.checkpoint_s, b.checkpoint_s) == (pytest.approx(14.0), 10.0)


def test_a_reload_renews_the_priority_of_who_is_there() -> None:
    """And of nobody else: a trainer that was only found has none."""
    new = make_policy(["trainer=a:pause:20:x:7", "trainer=b:continue:10:y"])
    stranger = Trainer(name="stranger", priority=3)
    kept = lifecycle.after_reload(POLICY, new, (A, stranger), Learned())
    assert {trainer.name: trainer.priority for trainer in kept} == {"a": 7, "stranger": 0, "b": 0}


def test_a_trainer_that_appears_has_the_priority_of_its_settings() -> None:
    """Taken out of the state while it was away, for example."""
    assert seen(turn()).priority == 5


def test_what_a_trainer_reported_once_stands_until_it_reports_again() -> None:
    at = turn(A)
    assert seen(at, checkpoint_s=7.0).checkpoint_s == 7.0
    later = seen(at)
    assert (later.reported_s, later.checkpoint_s) == (7.0, 7.0)


def test_what_was_measured_of_this_trainer_counts_when_it_is_seen() -> None:
    assert seen(turn(A, learned=measured("a", 12.0, 12.0, 12.0))).checkpoint_s == pytest.approx(14.0)
    assert seen(turn(A, learned=measured("b", 12.0, 12.0, 12.0))).checkpoint_s == 20.0


@pytest.mark.parametrize(("stall_s", "counts"), [(-3.0, 0.0), (0.25, 0.25), (None, 0.5)])
def test_a_stall_is_reported_in_seconds_and_never_negative(stall_s: float | None, counts: float) -> None:
    """Half a second is a stall; what is not told stays what it was."""
    assert seen(turn(replace(A, stall_s=0.5)), stall_s=stall_s).stall_s == counts


def test_a_measured_checkpoint_counts_from_the_third_on() -> None:
    """Before, the larger of what was told and measured."""
    at = turn(A)
    assert [saved(at, took_s=12.0).checkpoint_s for _ in range(3)] == [20.0, 20.0, pytest.approx(14.0)]
    assert needs.samples(at.state.learned, "checkpoint", "a") == (12.0, 12.0, 12.0)


@pytest.mark.parametrize(("tier", "name"), [("local", "a"), ("", "a"), ("remote", "a/remote")])
def test_another_tier_is_measured_apart(tier: str, name: str) -> None:
    """Nobody waits for a copy to the other end of the network, and its minutes are no checkpoint's."""
    at = turn(A)
    for _ in range(3):
        saved(at, took_s=5.0, tier=tier)
    assert needs.samples(at.state.learned, "checkpoint", name) == (5.0, 5.0, 5.0)
    assert len(at.state.learned.needs) == 1


def test_a_checkpoint_that_was_joined_measures_nothing() -> None:
    """It had begun before it was ordered, so its time says nothing of the next one."""
    at = turn(A)
    saved(at, at_paused_step=False)
    assert at.state.learned == Learned()
    saved(at, at_paused_step=True)
    assert needs.samples(at.state.learned, "checkpoint", "a") == (5.0,)


# --- Precautions ------------------------------------------------------------------------------------------------------

CHEAP = replace(A, stall_s=0.0, checkpoint_s=1.0)


def test_a_precaution_is_no_try_and_has_twice_its_time() -> None:
    """It must not use up the tries that an emergency has."""
    for checkpoint_s, limit_s in ((1.0, EVERY_S), (EVERY_S, 2 * EVERY_S)):
        at = turn(replace(CHEAP, checkpoint_s=checkpoint_s))
        lifecycle.take_precautions(at, since_s=0.0)
        (order,) = at.actions
        assert isinstance(order, TriggerCheckpoint)
        assert (order.reason, order.after, order.by_s) == ("on_battery", Conduct.CONTINUE, 1000.0 + limit_s)
        assert only(at).checkpoint == NotDurable()


def test_a_precaution_passes_over_the_dead_the_busy_and_the_recent_but_not_those_behind_them() -> None:
    """Each by itself is a reason."""
    dead = replace(CHEAP, name="dead", activity=Activity.GONE)
    busy = replace(CHEAP, name="busy", in_flight=CheckpointInFlight(order="o-7"), ordered_at_s=0.0)
    recent = replace(CHEAP, name="recent", ordered_at_s=1000.0 - EVERY_S + 0.1)
    due = replace(CHEAP, name="due", ordered_at_s=1000.0 - EVERY_S)
    at = turn(dead, busy, recent, due)
    lifecycle.take_precautions(at, since_s=0.0)
    assert [getattr(order, "trainer", "") for order in at.actions] == ["due"]


def test_work_that_has_just_been_saved_is_at_no_risk() -> None:
    """Whatever is told of it: a saved step, or a hold in which training stood still."""
    for known, stood_until_s in ((replace(CHEAP, durable_at_s=1000.0 - EVERY_S), 0.0), (CHEAP, 1000.0 - EVERY_S)):
        at = turn(known)
        lifecycle.take_precautions(at, since_s=0.0, stood_until_s=stood_until_s)
        assert at.actions == []


def test_online_a_trainer_of_nobody_s_settings_is_forgotten_when_it_goes() -> None:
    at = turn(replace(A, name="job-1"))
    at.set_phase(Online())
    event = TrainerSeen(at_s=1000.0, trainer="job-1", alive=False, conduct=Conduct.PAUSE)
    lifecycle.handle(at, event)
    assert at.state.trainers == ()


# --- One disk ---------------------------------------------------------------------------------------------------------

FLAT = make_policy(["table=50:1000,100:1000"])
"""1000 s at any load, 600 s of them effective: 470 s are left beside a stop in 110 s and its small reserve of 20 s."""


def asked(*known: Trainer, left: float | None = 0.75) -> dict[str, str]:
    """Who is asked for what when the emergency begins."""
    at = turn(*known)
    at.policy = FLAT if left is not None else make_policy([])
    at.update(battery=replace(at.state.battery, left=left))
    lifecycle.order_emergency(at, by_s=1200.0)
    return {getattr(order, "trainer", ""): type(order).__name__ for order in at.actions}


def test_those_on_one_disk_come_together_while_there_is_time_for_all() -> None:
    """To the second: 469.6 s are enough for both, 470.4 s are not, and then the smaller one comes first."""
    a, c = replace(A, priority=0), replace(A, name="c", checkpoint_s=235.0, priority=0)
    both = {"a": "TriggerCheckpoint", "c": "TriggerCheckpoint"}
    assert asked(replace(a, checkpoint_s=234.6), c) == both
    assert asked(replace(a, checkpoint_s=235.4), c) == {"a": "PauseTrainer", "c": "TriggerCheckpoint"}
    assert asked(replace(a, checkpoint_s=235.4, disk="other"), c) == both
    assert asked(replace(a, checkpoint_s=900.0), c, left=None) == both, "nobody knows how much time there is"


def test_who_has_a_checkpoint_or_has_given_up_holds_nobody_up() -> None:
    """Neither is asked again, and neither takes the other's time, whatever its priority."""
    for settled in ({"checkpoint": Durable()}, {"checkpoint": GivenUp(because="disk full", tries=1)}):
        first = replace(A, name="first", priority=9, checkpoint_s=300.0, **settled)  # type: ignore[arg-type]
        assert asked(first, replace(A, checkpoint_s=300.0)) == {"a": "TriggerCheckpoint"}


# --- What a hold shows ------------------------------------------------------------------------------------------------

HOLD = Holding(
    outage=Outage(id="o", since_s=900.0, grade=Grade.FULL, load_at_start=0.75), began_s=950.0, settle_by_s=980.0
)
PAUSED = replace(A, pause_ordered=True, activity=Activity.PAUSED)
DROP = Drop(before=0.75, after=0.4, at_s=1000.0)


def shown(*known: Trainer, now_s: float = 1000.0, load: float = 0.4, before: Drop | None = None) -> Drop | None:
    """What is known of the drop of `a` after a look at this hold."""
    learned = Learned() if before is None else needs.with_drop(Learned(), "a", before)
    at = turn(*known, now_s=now_s, learned=learned)
    at.update(battery=replace(at.state.battery, load=load))
    lifecycle.learn_drop(at, HOLD)
    return needs.drop_of(at.state.learned, "a")


def test_a_hold_shows_what_a_pause_brings() -> None:
    """Of the one that paused, once the load has settled; an older outage's drop is replaced by it."""
    training_on = replace(A, name="b", conduct=Conduct.CONTINUE)
    dead = replace(PAUSED, name="dead", activity=Activity.GONE)
    assert shown(PAUSED) == shown(PAUSED, training_on) == shown(PAUSED, dead) == DROP
    assert shown(PAUSED, before=replace(DROP, at_s=899.0)) == DROP
    assert shown(PAUSED, now_s=980.0) == replace(DROP, at_s=980.0)


def test_a_hold_shows_nothing_of_a_load_that_may_have_other_reasons() -> None:
    """Not settled, not paused, two at once, no fall at all, or a gauge that is silent."""
    assert shown(PAUSED, now_s=979.9) is None
    assert shown(replace(PAUSED, activity=Activity.TRAINING)) is None
    assert shown(PAUSED, replace(PAUSED, name="c")) is None
    assert shown(PAUSED, load=0.75) is None
    assert shown(PAUSED, load=0.0) is None


@pytest.mark.parametrize("at_s", [900.0, 990.0])
def test_an_outage_shows_a_drop_once(at_s: float) -> None:
    """What was learned in it stands, be the load what it may afterwards."""
    known = Drop(before=0.7, after=0.3, at_s=at_s)
    assert shown(PAUSED, before=known) == known
