"""What the scheduler hears of an outage, where a scenario does not show it."""

import pytest

from powerguard.core.model.actions import DrainNode, ReturnNode
from tests.core.play import play


@pytest.mark.parametrize("answer", ["29.5 failed drain slurmctld hangs", "29.5 done drain"])
def test_the_mark_of_an_outage_before_is_taken_off_where_the_next_one_could_not_replace_it(answer: str) -> None:
    """The helper returns a node only with the mark that the order names, and else leaves it drained for good."""
    result = play(
        "policy table=50:540,75:360,100:240 scheduler=1 trainer=llm:pause:20",
        "auto policy give_back",
        "0..5 utility load=75 charge=100 runtime=360",
        "6..14 battery load=75 charge=99 runtime=350",
        "14.5 done drain",
        "15..19 utility load=75 charge=99 runtime=350",
        "20..29 battery load=75 charge=99 runtime=350",
        answer,
        "30..100 utility load=75 charge=99 runtime=350",
    )
    _, second = result.ordered(DrainNode)
    (order,) = result.ordered(ReturnNode)
    assert isinstance(second, DrainNode)
    assert isinstance(order, ReturnNode)
    assert order.outage == ("" if "failed" in answer else second.outage)
    assert result.state.node is None
