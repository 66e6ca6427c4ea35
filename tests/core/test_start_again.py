"""Training that could not be started after a return in place: tried again, a few times, and only while it may run."""

from dataclasses import replace

import pytest

from powerguard.core.decide.machine import step
from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import Grade, Level, Note, ResumeTraining
from powerguard.core.model.events import Done, Failed, Tick
from powerguard.core.model.policy import Learned
from powerguard.core.model.state import (
    Activity,
    Battery,
    Feed,
    OnBattery,
    Outage,
    Start,
    State,
    Supply,
)
from powerguard.core.trainers import lifecycle
from tests.core.play import make_policy

POLICY = make_policy(["table=50:2000,100:1000", "trainer=a:pause:20:x"])
OUTAGE = Outage(id="o", since_s=99.0, grade=Grade.FULL)
(A,) = lifecycle.at_start(POLICY, Learned())
UTILITY = Feed(supply=Supply.UTILITY, since_s=50.0)


def waiting(start: Start | None = None) -> State:
    return State(feed=UTILITY, battery=Battery(at_s=100.0), trainers=(A,), owed=() if start is None else (start,))


def failed(state: State, *, at_s: float) -> tuple[State, tuple[Note, ...]]:
    action = ResumeTraining(id="s", by_s=at_s + 1.0, outage="o")
    answer = step(POLICY, state, Failed(at_s=at_s, action=action, took_s=0.1, reason="no unit"))
    return answer.state, answer.notes


def test_a_start_that_fails_is_tried_again_and_given_up_at_the_third_time() -> None:
    once, _ = failed(waiting(), at_s=101.0)
    assert once.start == Start(outage="o", at_s=101.0, retry_at_s=131.0, tries=1)
    twice, _ = failed(once, at_s=132.0)
    assert twice.start == Start(outage="o", at_s=132.0, retry_at_s=162.0, tries=2)
    thrice, notes = failed(twice, at_s=163.0)
    assert thrice.start is None
    (found,) = [note for note in notes if note.event == "resume_failed"]
    assert (found.level, found.because, dict(found.numbers)) == (
        Level.ERROR,
        "training could not be started",
        {"tries": 3},
    )
    done = Done(at_s=132.0, action=ResumeTraining(id="s", by_s=140.0, outage="o"), took_s=0.1)
    assert step(POLICY, once, done).state.start is None


def test_it_is_tried_again_when_it_is_due_and_not_while_that_is_under_way() -> None:
    state = waiting(Start(outage="o", retry_at_s=101.0, tries=1))
    early = step(POLICY, state, Tick(at_s=100.9))
    assert (early.actions, early.state) == ((), state)
    (action,) = (due := step(POLICY, state, Tick(at_s=101.0))).actions
    assert (type(action), action.by_s, due.state.start) == (
        ResumeTraining,
        131.0,
        Start(outage="o", at_s=101.0, retry_at_s=132.0, tries=1),
    )


@pytest.mark.parametrize(("aborted_by", "orders"), [("", 0), ("root", 1)])
def test_on_battery_it_waits_unless_a_person_has_called_the_shutdown_off(aborted_by: str, orders: int) -> None:
    state = replace(
        waiting(Start(outage="x", retry_at_s=1.0, tries=2)),
        phase=OnBattery(outage=replace(OUTAGE, aborted_by=aborted_by)),
        feed=Feed(supply=Supply.BATTERY, since_s=99.0),
    )
    started = [each for each in step(POLICY, state, Tick(at_s=100.5)).actions if isinstance(each, ResumeTraining)]
    assert [each.outage for each in started] == ["x"] * orders


def test_one_odd_reading_starts_nothing() -> None:
    state = waiting(Start(outage="x", retry_at_s=1.0, tries=1))
    assert not step(POLICY, replace(state, feed=replace(UTILITY, suspect=True)), Tick(at_s=100.5)).actions


def test_the_next_return_counts_from_zero() -> None:
    gone = replace(A, activity=Activity.GONE, pause_ordered=True)
    at = Turn(POLICY, replace(waiting(Start(outage="x", retry_at_s=1.0, tries=2)), trainers=(gone,)), 100.0)
    lifecycle.resume_all(at)
    assert [type(action) for action in at.actions] == [ResumeTraining]
    assert at.state.start == Start(outage="", at_s=100.0, retry_at_s=131.0, tries=0), "owed until it is confirmed"


@pytest.mark.parametrize(("unseen", "orders"), [(True, 1), (False, 0)])
def test_a_trainer_that_may_have_ended_unseen_is_started_once_more(*, unseen: bool, orders: int) -> None:
    """Of kind `command`, it counts as alive whatever becomes of it: its start may have come before its end."""
    policy = replace(POLICY, trainers=(replace(POLICY.trainers[0], unseen=unseen),))
    state = waiting(Start(outage="o", tries=0, ending=("a",), until_s=200.0, confirmed=True))
    started = 0
    for at_s in (101.0, 150.0, 199.0, 200.0, 201.0, 300.0):
        answer = step(policy, state, Tick(at_s=at_s))
        for action in answer.actions:
            assert isinstance(action, ResumeTraining)
            assert at_s == 200.0
            started += 1
            answer = step(policy, answer.state, Done(at_s=at_s, action=action, took_s=0.1))
        state = answer.state
    assert started == orders
    assert state.start is None
