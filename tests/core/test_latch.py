"""The stop that is chosen at the commit: for the load that is there, not for a pause that nobody has confirmed."""

import pytest

from powerguard.core.decide.transitions import Cause, Decision, move
from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.state import (
    Activity,
    Battery,
    Durable,
    EmergencyCheckpoint,
    Feed,
    Outage,
    Shutdown,
    State,
    Supply,
    Trainer,
)
from tests.core.play import make_policy

POLICY = make_policy(["table=50:540,75:360,100:240", "trainer=llm:pause:20"])


@pytest.mark.parametrize(("paused", "grade"), [(True, Grade.FULL), (False, Grade.SHORT)])
def test_a_pause_that_nobody_has_confirmed_does_not_lengthen_the_stop(grade: Grade, *, paused: bool) -> None:
    """A quarter of a battery is 150 s at 45 % and a full stop in 110 s; at 75 % it is 90 s, and only a short one."""
    trainer = Trainer(
        name="llm",
        conduct=Conduct.PAUSE,
        pause_ordered=True,
        activity=Activity.PAUSED if paused else Activity.TRAINING,
        checkpoint=Durable(),
    )
    outage = Outage(id="o", since_s=0.0, grade=Grade.FULL, load_at_start=0.75)
    state = State(
        phase=EmergencyCheckpoint(outage=outage, began_s=90.0, because="budget", paused_load=0.45, settle_by_s=135.0),
        feed=Feed(supply=Supply.BATTERY, since_s=0.0),
        battery=Battery(at_s=100.0, used=0.0, left=0.352, load=0.75),
        trainers=(trainer,),
    )
    turn = Turn(POLICY, state, 100.0)
    move(turn, Decision(Cause.COMMIT, "budget", turn.budget()))
    phase = turn.state.phase
    assert isinstance(phase, Shutdown)
    assert phase.outage.grade is grade
