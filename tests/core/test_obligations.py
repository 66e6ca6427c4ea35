"""What is owed until it is confirmed: one row for each kind, and what a restart, a boot and a journal leave of it."""

import json

import pytest

from powerguard.core import obligations
from powerguard.core.comeback.validation import validated
from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import PowerOnMethod
from powerguard.core.model.serialisation import from_plain, to_plain
from powerguard.core.model.state import (
    Armed,
    GpuCap,
    JobEnded,
    NodeMarked,
    Obligation,
    Online,
    Resume,
    Signalled,
    Start,
    State,
    TemporaryPolicy,
)
from tests.core.play import make_policy

POLICY = make_policy(["trainer=a:pause:20", "methods=rtc"])
ONE_OF_EACH = (
    GpuCap(outage="o", order="c-1", at_s=90.0, lifting=True),
    Signalled(outage="o", order="s-1", at_s=90.0, trainer="a", word="continue", carried_out="stop"),
    Armed(outage="o", order="a-1", at_s=90.0, acts_at_s=300.0, method=PowerOnMethod.RTC, kept=True),
    TemporaryPolicy(order="p-1", at_s=90.0, retry_at_s=95.0, policy="always-off"),
    NodeMarked(outage="o", order="n-1", at_s=90.0, drained=True, leaving=True, jobs=("12", "13_2")),
    JobEnded(trainer="a", at_s=90.0, because="gpu2 has left the job", started=True),
    Resume(trainer="a", at_s=90.0, retry_at_s=101.0),
    Start(outage="o", at_s=90.0, retry_at_s=121.0, tries=1),
)


def turn(*owed: Obligation) -> Turn:
    return Turn(POLICY, State(phase=Online(), owed=owed), 100.0)


def test_every_kind_has_one_row_and_every_answer_one_owner() -> None:
    """A kind without a row would be owed for good; an outcome with two owners would be entered twice."""
    kinds = set(Obligation.__subclasses__())
    assert {kind.__name__ for kind in kinds} == {duty.kind.__name__ for duty in obligations.DUTIES}
    assert {type(each) for each in ONE_OF_EACH} == {duty.kind for duty in obligations.DUTIES}
    answers = [action for duty in obligations.DUTIES for action in duty.answers]
    assert len(answers) == len(set(answers))


def test_what_is_owed_is_entered_once_in_its_place_and_ends_when_it_is_confirmed() -> None:
    at = turn()
    first, second = (Armed(method=PowerOnMethod.OUTPUT, ups=ups, acts_at_s=1.0) for ups in ("a", "b"))
    for each in (first, second, Resume(trainer="a"), Resume(trainer="b")):
        at.owe(each)
    again = Armed(method=PowerOnMethod.OUTPUT, ups="a", acts_at_s=2.0, confirmed=True)
    at.owe(again)
    assert at.state.owed == (again, second, Resume(trainer="a"), Resume(trainer="b"))
    at.settle(first)
    at.settle(Resume(trainer="b"))
    at.settle(GpuCap())
    assert at.state.owed == (second, Resume(trainer="a"))


@pytest.mark.parametrize("given", [(), ("c-1",), ("c-1", "s-1", "a-1", "p-1")])
def test_after_a_restart_all_is_owed_as_before_and_no_lost_outcome_is_waited_for(given: tuple[str, ...]) -> None:
    """given: orders that are given again; a method that another shutdown needed is free to be disarmed."""
    at = turn(*ONE_OF_EACH)
    obligations.after_restart(at, given)
    assert [type(each) for each in at.state.owed] == [type(each) for each in ONE_OF_EACH]
    assert [each.order for each in at.state.owed if each.order] == list(given)
    assert not any(each.kept for each in at.state.armed)


def test_another_boot_leaves_what_the_hardware_keeps() -> None:
    """The clock's alarm and the BMC's policy outlive the host; its processes and its GPUs' limits do not."""
    owed = obligations.after_boot(POLICY, State(owed=ONE_OF_EACH), 20.0, whole=True)
    assert {type(each) for each in owed} == {Armed, NodeMarked, TemporaryPolicy}
    assert {(each.order, each.at_s) for each in owed} == {(None, 20.0)}


def test_the_journal_keeps_every_kind() -> None:
    state = State(owed=ONE_OF_EACH)
    assert from_plain(json.loads(json.dumps(to_plain(state))), State) == state
    assert validated(state, 100.0) == (state, ())
