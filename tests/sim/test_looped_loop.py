"""The loop level: the real loop, bulkhead, journal and recovery, in a world that lies, in virtual time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.sim.looped import mischief, outage
from powerguard.sim.looped.mischief import Kill, Manner, Mischief, Moment
from powerguard.sim.looped.outage import LoopedOutage, LoopedResult, play_many, quick
from powerguard.sim.world.back import Waker
from powerguard.sim.world.chance import Cut
from powerguard.sim.world.report import SimulationOptions, report
from powerguard.sim.world.scene import draw
from powerguard.sim.world.site import Site

LONG_S = 900.0
"""Longer than any battery here holds a paused host."""


def result_of(folder: Path, *, seed: int = 3, length_s: float = LONG_S, **breaks: Any) -> LoopedResult:  # noqa: ANN401
    """Play one cut of that length on a sound battery, with nothing broken but what is named."""
    site = quick(Site())
    folder.mkdir(exist_ok=True)
    scene = replace(draw(seed, site, faults=False), cuts=(Cut(0.0, length_s),), dies_at=0.0, health=0.75, charge=1.0)
    return LoopedOutage(scene, Mischief(**breaks), site, folder).play()


@pytest.mark.slow
@pytest.mark.parametrize("first", [100, 110, 120, 130, 140])
def test_fifty_outages_break_no_invariant(first: int) -> None:
    """Whatever hangs, lies, refuses, steps, dies or is killed; and no power is lost that planning could have saved."""
    result = [outage.play(seed, Site(), faults=True) for seed in range(first, first + 10)]
    assert [(one.seed, one.violations) for one in result if one.violations] == []
    assert [one.seed for one in result if one.planning_dirty] == []
    assert {one.how for one in result} == {"finished"}


def test_same_seed_same_story() -> None:
    """A failing seed is a one-line reproduction only if it is the same every time."""
    first, again = (outage.play(23, Site(), faults=True) for _ in range(2))
    assert first == again


def test_short_cut_is_ridden_through(tmp_path: Path) -> None:
    result = result_of(tmp_path / "a", length_s=20.0)
    assert (result.how, result.latches, result.holds, result.lives, result.violations) == ("finished", 0, 0, 1, ())


def test_long_cut_ends_in_power_off_and_return(tmp_path: Path) -> None:
    """It holds, latches, powers off, comes back in another boot and trains again, without a step lost."""
    result = result_of(tmp_path / "a")
    assert (result.how, result.latches, result.boots, result.dirty, result.violations) == ("finished", 1, 2, 0, ())
    assert result.rollback_s == 0.0


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("count", [8, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2, 3, 5))])
def test_killed_daemon_goes_on(tmp_path: Path, moment: Moment, count: int) -> None:
    """kill -9 at each kind of moment, early and late: the same outage ends as it does without."""
    kills = tuple(Kill(moment, count * (97 if moment is Moment.TURN else 1), away_s) for away_s in (0.5, 2.0))
    result = result_of(tmp_path / "a", kills=kills)
    assert result.violations == ()
    assert (result.how, result.latches, result.dirty) == ("finished", 1, 0)
    assert result.lives >= 2


@pytest.mark.parametrize(
    ("peer", "manner"),
    [
        pytest.param(peer, manner, marks=() if manner is manners[-1] else pytest.mark.slow)
        for peer, manners in mischief.PEERS
        for manner in manners
    ],
)
def test_peer_that_misbehaves_holds_nothing_up(tmp_path: Path, peer: str, manner: Manner) -> None:
    """Each of them in each of its manners, twice in a row; at each commit, each of them in one."""
    result = result_of(tmp_path / "a", manners=((peer, (manner,) * 2),))
    assert result.violations == ()
    assert (result.how, result.dirty) == ("finished", 0)


@pytest.mark.parametrize("breaks", [{"hung": ((-5.0, 700.0),)}, {"full": ((-5.0, 700.0),)}], ids=["hung", "full"])
def test_disk_of_the_journal_holds_nothing_up(tmp_path: Path, breaks: dict[str, Any]) -> None:
    result = result_of(tmp_path / "a", **breaks)
    assert (result.violations, result.latches, result.dirty) == ((), 1, 0)


def test_host_that_crashes_comes_back_to_its_outage(tmp_path: Path) -> None:
    result = result_of(tmp_path / "a", length_s=60.0, crash_s=30.0)
    assert (result.how, result.boots, result.violations) == ("finished", 2, ())


def test_host_that_crashes_with_utility_there_has_waited_for_nobody(tmp_path: Path) -> None:
    """It was up until it crashed, and boots at once: the waiting is counted from there, not from utility's return."""
    result = result_of(tmp_path / "a", length_s=20.0, crash_s=45.0)
    assert (result.how, result.boots, result.dirty, result.violations) == ("finished", 2, 0, ())
    assert result.wakers == (Waker.ITSELF,)
    assert 0.0 <= result.waited_s < 5.0


def test_one_lying_reading_changes_nothing(tmp_path: Path) -> None:
    result = result_of(tmp_path / "a", length_s=2.0, lies=(-15.0,))
    assert (result.how, result.latches, result.holds, result.violations) == ("finished", 0, 0, ())


def test_report_is_the_one_of_every_level() -> None:
    """The samples fit the report, and a violation in it would name its seed and level."""
    options = SimulationOptions(seed=100, outages=3, level="loop")
    summary = report(play_many(Site(), options, jobs=1), options)
    assert (summary["level"], summary["outages"], summary["planning_dirty"], summary["invariant_violations"]) == (
        "loop",
        3,
        0,
        [],
    )
    assert options.reproduce(7) == "powerguard simulate --seed 7 --outages 1 --level loop"


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_five_thousand_outages_break_no_invariant() -> None:
    options = SimulationOptions(seed=10_000, outages=5000, level="loop")
    summary = report(play_many(Site(), options), options)
    assert summary["invariant_violations"] == []
    assert summary["planning_dirty_outages"] == []
