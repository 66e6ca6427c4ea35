"""Power-on methods at the loop level: the real loop, bulkhead, journal and notes, killed and lied to at each step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.model.actions import PowerOnMethod
from powerguard.sim.looped import mischief
from powerguard.sim.looped.mischief import Kill, Manner, Mischief, Moment
from powerguard.sim.looped.outage import LoopedOutage, LoopedResult, play, play_many, quick
from powerguard.sim.world.back import ReturnFacts
from powerguard.sim.world.chance import Cut
from powerguard.sim.world.report import SimulationOptions, report
from powerguard.sim.world.scene import draw
from powerguard.sim.world.site import ReturnSite, Site

LONG_S = 900.0
ALL = ReturnFacts(output="cycles", declared="cycles", rtc=True, sentinel=True, watchdog=True, late=True)
MIXED = ReturnSite(
    output_share=0.5,
    aborts_share=0.2,
    stays_off_share=0.1,
    unknown_share=0.2,
    hidden_share=0.4,
    rtc_share=0.5,
    sentinel_share=0.5,
    watchdog_share=0.3,
    late_share=0.6,
    bracket_share=0.4,
    dry_run_share=0.05,
    fails_share=0.15,
    foreign_share=0.2,
    called_off_share=0.3,
)


def outage_of(folder: Path, facts: ReturnFacts, *, length_s: float = LONG_S, **breaks: Any) -> LoopedOutage:  # noqa: ANN401
    """One cut of that length on a sound battery, with nothing broken but what is named."""
    site = quick(Site())
    folder.mkdir(exist_ok=True)
    drawn = draw(3, site, faults=False)
    scene = replace(drawn, cuts=(Cut(0.0, length_s),), dies_at=0.0, health=0.75, charge=1.0, returns=facts)
    return LoopedOutage(scene, Mischief(**breaks), site, folder)


def result_of(folder: Path, facts: ReturnFacts, *, length_s: float = LONG_S, **breaks: Any) -> LoopedResult:  # noqa: ANN401
    result = outage_of(folder, facts, length_s=length_s, **breaks).play()
    assert result.violations == ()
    return result


@pytest.fixture(scope="module")
def ordered_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """When this host is ordered off, if the outage goes on."""
    outage = outage_of(tmp_path_factory.mktemp("long"), ReturnFacts())
    outage.play()
    return outage.world.ordered_off[0]


RACE: dict[str, tuple[ReturnFacts, bool, int, int]] = {
    "P alone": (ReturnFacts(), True, 0, 0),
    "A": (ReturnFacts(late=True), False, 0, 1),
    "B": (ReturnFacts(output="cycles", declared="cycles"), False, 1, 0),
    "B that shows nothing, and A": (
        ReturnFacts(output="cycles", declared="unknown", shows=False, late=True), False, 1, 0
    ),
    "B that aborts": (ReturnFacts(output="aborts", declared="aborts"), True, 1, 0),
    "B that aborts, and A": (ReturnFacts(output="aborts", declared="aborts", late=True), False, 1, 1),
    "B that would stay off, and C": (ReturnFacts(output="stays_off", declared="stays_off", sentinel=True), False, 0, 0),
    "C": (ReturnFacts(sentinel=True), False, 0, 0),
    "D": (ReturnFacts(watchdog=True), False, 0, 0),
    "E": (ReturnFacts(rtc=True), False, 0, 0),
    "all": (ALL, False, 1, 0),
    "all, in dry-run": (replace(ALL, dry_run=True), False, 0, 0),
}  # fmt: skip


QUICK = {"P alone", "B", "B that would stay off, and C", "all", "all, in dry-run"}
"""What the core makes of each set of methods is in test_power_on; here these show that the loop carries it out."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RACE])
def test_utility_is_back_while_units_stop(tmp_path: Path, ordered_s: float, name: str) -> None:
    """The race, method by method: which hosts stay off, how often an output is ordered off, which hosts come up."""
    facts, stranded, sent, rebooted = RACE[name]
    result = result_of(tmp_path / "a", facts, length_s=ordered_s + 3.0)
    assert (result.how, result.stranded, result.sent, result.rebooted) == ("finished", stranded, sent, rebooted)
    assert (result.dirty, result.boots) == ((1, 2) if facts.dry_run else (0, 2)), "in dry-run the battery dies under it"


@pytest.mark.parametrize("shows", [True, False], ids=["shown", "hidden"])
@pytest.mark.parametrize("count", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5, 6, 7, 8, 10))])
def test_killed_at_each_step_of_a_way(tmp_path: Path, ordered_s: float, count: int, *, shows: bool) -> None:
    """kill -9 before and after each order, note and answer: nothing is sent twice, and the host comes back."""
    kills = tuple(Kill(Moment.WAY, 2 + count, away_s) for away_s in (0.5, 2.0))
    result = result_of(tmp_path / "a", replace(ALL, shows=shows), length_s=ordered_s + 20.0, kills=kills)
    assert (result.how, result.stranded, result.dirty) == ("finished", False, 0)
    assert result.sent <= 1
    assert result.lives > result.boots


@pytest.mark.parametrize("manner", [manner for manner in Manner if manner is not Manner.WELL])
def test_all_ways_that_misbehave_hold_nothing_up(tmp_path: Path, manner: Manner) -> None:
    """All of them at once, twice in a row: the power-off comes in time, and what can be taken back is."""
    words = [word for word, manners in (*mischief.METHODS, *mischief.PEERS) if manner in manners]
    spoilt = tuple(
        (word, (manner,) * 2) for word in words if word in {*PowerOnMethod, "look", "reboot", "check", "bmc"}
    )
    assert spoilt
    result = result_of(tmp_path / "a", ALL, manners=spoilt)
    assert (result.how, result.latches, result.dirty) == ("finished", 1, 0)
    assert result.sent <= 1


@pytest.mark.parametrize("method", [PowerOnMethod.SENTINEL, PowerOnMethod.RTC, PowerOnMethod.WATCHDOG])
def test_somebody_else_stops_the_host(tmp_path: Path, method: PowerOnMethod) -> None:
    """On battery and before us: armed, and the output is not ours to cut. Called off: taken back."""
    facts = ReturnFacts(output="cycles", declared="cycles", foreign_s=20.0, **{method.value: True})
    result = result_of(tmp_path / "a", facts, length_s=40.0)
    assert (result.stranded, result.sent, result.boots) == (False, 0, 2)
    result = result_of(tmp_path / "b", replace(facts, called_off=True), length_s=40.0)
    assert (result.stranded, result.sent, result.boots, result.lives) == (False, 0, 1, 2)


def test_policy_is_put_back_as_it_was(tmp_path: Path) -> None:
    """bmc.policy: bracket. In between it is always-on, or the host would have stayed off after hours."""
    outage = outage_of(tmp_path / "a", ReturnFacts(bracket=True, output="cycles", declared="cycles"))
    result = outage.play()
    assert (result.violations, result.stranded, result.boots) == ((), False, 2)
    assert (outage.hardware.policy, outage.world.always_on) == ("always-off", False)
    kept = outage_of(tmp_path / "b", ReturnFacts(bracket=True, dry_run=True))
    result = kept.play()
    assert (result.violations, result.stranded, kept.hardware.policy) == ((), True, "always-off"), (
        "in dry-run nobody sets it"
    )


def test_nothing_is_left_armed_and_something_was(tmp_path: Path) -> None:
    outage = outage_of(tmp_path / "a", ALL)
    armed: set[PowerOnMethod] = set()
    take_back = outage.world.back.disarm

    def seen(method: PowerOnMethod) -> None:
        armed.update(outage.world.back.armed)
        take_back(method)

    outage.world.back.disarm = seen  # type: ignore[method-assign]
    assert outage.play().violations == ()
    assert PowerOnMethod.SENTINEL in armed, "the others have acted, or were forgotten when the output went"
    assert outage.world.back.idle


def test_a_host_that_is_not_whole_waits(tmp_path: Path) -> None:
    """The check of the host fails for longer than the gate is shut: training starts when it does not any more."""
    result = result_of(tmp_path / "a", ReturnFacts(), manners=(("check", (Manner.REFUSE,) * 20),))
    assert result.lost_s > result_of(tmp_path / "b", ReturnFacts()).lost_s + 10.0


@pytest.mark.slow
def test_mixed_ways_break_no_invariant() -> None:
    """Whatever is named, works or fails, while peers and daemon fail as well; `stranded` is told."""
    options = SimulationOptions(seed=40, outages=6, level="loop")
    summary = report(play_many(Site(returns=MIXED), options, jobs=1), options)
    assert summary["invariant_violations"] == []
    assert summary["planning_dirty"] == 0


SETS: dict[str, tuple[dict[str, float], bool]] = {
    "none": ({}, True),
    "A": ({"late_share": 1.0}, True),
    "B": ({"output_share": 1.0}, False),
    "C": ({"sentinel_share": 1.0}, False),
    "D": ({"watchdog_share": 1.0}, False),
    "E": ({"rtc_share": 1.0}, False),
    "A, B, C": ({"late_share": 1.0, "output_share": 1.0, "sentinel_share": 1.0, "unknown_share": 0.2}, False),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(SETS))
def test_stranded_over_layer_sets(name: str) -> None:
    """Short outages and long ones, with nothing else broken: those that one way leaves behind, another does not."""
    shares, strands = SETS[name]
    returns = ReturnSite.model_validate({"fails_share": 0.0, "foreign_share": 0.0, **shares})
    outages = Site().outage.model_copy(update={"restrike_share": 0.0})
    found = [play(seed, Site(returns=returns, outage=outages), faults=False) for seed in range(1, 61)]
    assert [one.violations for one in found if one.violations] == []
    assert any(one.stranded for one in found) is strands


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_thousand_outages_break_no_invariant() -> None:
    site = Site.model_validate(
        {"returns": MIXED.model_dump(), "outage": {"bins": ({"from_s": 150.0, "to_s": 500.0, "share": 1.0},)}}
    )
    options = SimulationOptions(seed=20_000, outages=1000, level="loop")
    summary = report(play_many(site, options), options)
    assert summary["invariant_violations"] == []
