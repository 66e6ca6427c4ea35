"""What is needed, as measured: a few samples are no distribution, and nothing that is told may shrink what was seen."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.energy import needs
from powerguard.core.model.policy import DrillReport, Drop, Learned, Need, Policy

POLICY = Policy(boot_id="b", ups="u")
SECONDS = st.lists(st.floats(0.1, 5000.0), min_size=1, max_size=needs.KEPT).map(tuple)


def learned(of: str, *seconds: float, name: str = "") -> Learned:
    found = Learned()
    for each in seconds:
        found = needs.add(found, of, each, name)
    return found


def test_one_sample_counts_half_as_much_again() -> None:
    """One checkpoint of 20 s says little of the next one."""
    assert needs.q95((20.0,)) == 30.0
    assert needs.q95((20.0, 10.0)) == 25.0
    assert needs.q95((10.0,) * 9 + (20.0,)) == 21.0


def test_twenty_samples_are_a_distribution() -> None:
    """Nearest rank: of 20 the 19th, of 32 the 31st."""
    assert needs.q95(tuple(float(n) for n in range(1, 21))) == 19.0
    assert needs.q95(tuple(float(n) for n in range(32, 0, -1))) == 31.0
    assert needs.q95(tuple(float(n) for n in range(1, 20))) == pytest.approx(19.0 * (1 + 0.5 / 19))


@given(SECONDS)
def test_q95_is_never_less_than_the_middle(seconds: tuple[float, ...]) -> None:
    """Whatever was measured, the cautious figure is the larger one."""
    assert needs.q95(seconds) >= needs.median(seconds)
    assert needs.median(seconds) in seconds


def test_the_middle_of_two_is_the_upper_one() -> None:
    """The cautious side."""
    assert needs.median((3.0, 1.0)) == 3.0
    assert needs.median((3.0, 1.0, 2.0)) == 2.0


def test_only_the_newest_are_kept_each_need_by_itself() -> None:
    """A host that has been rebuilt is measured anew within as many outages as are kept."""
    found = learned("checkpoint", *(float(n) for n in range(1, 41)), name="llm")
    found = needs.add(found, "checkpoint", 5.0, "other")
    found = needs.add(found, "stop", 7.0)
    assert needs.samples(found, "checkpoint", "llm") == tuple(float(n) for n in range(9, 41))
    assert needs.samples(found, "checkpoint", "other") == (5.0,)
    assert needs.samples(found, "stop") == (7.0,)
    assert needs.samples(found, "stop", "llm") == ()
    assert needs.samples(found, "boot") == ()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 86400.1])
def test_what_is_no_duration_is_passed_over(seconds: float) -> None:
    """A clock that jumped must not become a need."""
    assert needs.add(Learned(), "stop", seconds) == Learned()


def test_a_day_is_still_a_duration_and_strange_needs_are_not() -> None:
    """The bounds themselves."""
    assert needs.samples(needs.add(Learned(), "boot", 86400.0), "boot") == (86400.0,)
    assert needs.add(Learned(), "lunch", 10.0) == Learned()


def test_trainers_that_come_and_go_do_not_fill_the_state() -> None:
    """Job names may be new each time; only the last 64 needs are kept."""
    found = Learned()
    for number in range(100):
        found = needs.add(found, "checkpoint", 1.0, f"job-{number}")
    assert [need.name for need in found.needs] == [f"job-{number}" for number in range(36, 100)]


def test_three_stops_replace_what_was_presumed() -> None:
    """Two are not enough; the operator's own number stays; the force deadline bounds what is counted with."""
    assert needs.fold(POLICY, Learned()) is POLICY
    assert needs.fold(POLICY, learned("stop", 20.0, 30.0)) is POLICY
    folded = needs.fold(POLICY, learned("stop", 20.0, 30.0, 24.0))
    assert folded.stop_q95_s == pytest.approx(30.0 * (1 + 0.5 / 3))
    assert folded.stop_median_s == 24.0
    assert replace(folded, stop_q95_s=POLICY.stop_q95_s, stop_median_s=POLICY.stop_median_s) == POLICY
    set_by_hand = replace(POLICY, stop_is_set=True)
    assert needs.fold(set_by_hand, learned("stop", 20.0, 30.0, 24.0)) is set_by_hand


def test_a_stop_is_never_waited_for_longer_than_it_is_forced() -> None:
    """powerguard-off forces it at force_after_s, whatever the past says."""
    folded = needs.fold(POLICY, learned("stop", 200.0, 300.0, 240.0))
    assert folded.stop_q95_s == folded.stop_median_s == POLICY.force_after_s == 110.0


@pytest.mark.parametrize(
    ("measured", "reported_s", "wanted_s"),
    [
        ((), 42.0, 42.0),
        ((20.0,), 42.0, 42.0),
        ((20.0,), 10.0, 30.0),
        ((20.0, 20.0, 20.0), 10.0, 20.0 * (1 + 0.5 / 3)),
        ((20.0, 20.0, 20.0), 46.0, 20.0 * (1 + 0.5 / 3)),
        ((20.0, 20.0, 20.0), 47.0, 47.0),
        ((20.0, 20.0), 24.0, 25.0),
    ],
)
def test_history_counts_once_there_is_one(measured: tuple[float, ...], reported_s: float, wanted_s: float) -> None:
    """Before three, the larger of both; after, the history, unless it is told that the job is another one."""
    found = learned("checkpoint", *measured, name="llm")
    assert needs.checkpoint_s(found, "llm", reported_s) == pytest.approx(wanted_s)
    assert needs.checkpoint_s(found, "other", reported_s) == reported_s


def test_the_newest_drop_of_a_trainer_counts() -> None:
    """A drop is kept for each trainer, and replaced by the next one."""
    first, second = Drop(before=0.75, after=0.3, at_s=1.0), Drop(before=0.7, after=0.4, at_s=2.0)
    found = needs.with_drop(needs.with_drop(Learned(), "a", first), "b", second)
    assert needs.drop_of(found, "a") == first
    again = needs.with_drop(found, "a", second)
    assert needs.drop_of(again, "a") == second
    assert len(again.pauses) == 2
    assert needs.drop_of(found, "c") is None
    for number in range(100):
        found = needs.with_drop(found, f"job-{number}", first)
    assert len(found.pauses) == 64
    assert needs.drop_of(found, "job-99") == first


def test_times_move_into_the_clock_of_the_next_boot() -> None:
    """Ages stay what they are over a reboot; durations do not move."""
    drop = Drop(before=0.75, after=0.3, at_s=100.0)
    report = DrillReport(id="d", at_s=50.0, scopes=("pause",), result="passed", because="")
    found = Learned(needs=(Need(of="stop", name="", seconds=(5.0,)),), pauses=(("a", drop),), cap=drop, drill=report)
    moved = needs.shifted(found, -1000.0)
    assert moved.needs == found.needs
    assert moved.pauses == (("a", replace(drop, at_s=-900.0)),)
    assert moved.cap == replace(drop, at_s=-900.0)
    assert moved.drill == replace(report, at_s=-950.0)
    assert needs.shifted(Learned(), 5.0) == Learned()
