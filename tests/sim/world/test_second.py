"""The second source of the simulated world: late, frozen, stuck, silent, forged; and the core among such sources."""

import pytest

from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.sim.world.chance import NAME, SecondSource, SecondSourceFacts, SourceFault
from powerguard.sim.world.many import play_many
from powerguard.sim.world.report import SimulationOptions, report
from powerguard.sim.world.scene import draw
from powerguard.sim.world.site import FaultSite, Site

ALWAYS = Site(faults=FaultSite(second_share=1.0))


def says(at_s: float) -> Reading:
    """The UPS: utility until 100, then battery, with a charge that names the second."""
    source = OutputSource.BATTERY if at_s >= 100.0 else OutputSource.UTILITY
    return Reading(
        at_s=at_s,
        ups="sim",
        source="sim",
        output_source=source,
        charge_pct=at_s / 10.0,
        on_battery_s=max(0.0, at_s - 100.0),
    )


def events_of(facts: SecondSourceFacts, until_s: int = 130) -> dict[int, Reading | SourceFailed | None]:
    second = SecondSource(facts)
    return {at_s: second.report(says(float(at_s)), float(at_s)) for at_s in range(80, until_s)}


def word(answer: Reading | SourceFailed | None) -> tuple[str, float | None]:
    assert isinstance(answer, Reading)
    return answer.output_source.value, answer.charge_pct


def test_it_is_late_by_its_lag() -> None:
    answers = events_of(SecondSourceFacts(lag_s=5.0))
    assert answers[84] is None
    assert word(answers[85]) == ("utility", 8.0)
    assert word(answers[104]) == ("utility", 9.9)
    assert word(answers[105]) == ("battery", 10.0)
    at_s = answers[105]
    assert isinstance(at_s, Reading)
    assert (at_s.at_s, at_s.source, at_s.authenticated) == (105.0, NAME, False)


@pytest.mark.parametrize(
    ("ill", "at", "expected"),
    [
        (SourceFault.FROZEN, 110, ("utility", 9.0)),
        (SourceFault.FROZEN, 125, ("battery", 12.5)),
        (SourceFault.STUCK_BATTERY, 95, ("battery", 9.0)),
        (SourceFault.STUCK_UTILITY, 110, ("utility", 9.0)),
        (SourceFault.FORGED, 95, ("battery", 3.0)),
        (SourceFault.FORGED, 125, ("battery", 12.5)),
    ],
)
def test_it_is_ill_from_its_moment_on_and_for_its_time(ill: SourceFault, at: int, expected: tuple[str, float]) -> None:
    assert word(events_of(SecondSourceFacts(lag_s=0.0, ill=ill, at_s=90.5, lasts_s=30.0))[at]) == expected


def test_a_silent_one_counts_as_lost_after_three_seconds() -> None:
    answers = events_of(SecondSourceFacts(lag_s=0.0, ill=SourceFault.SILENT, at_s=90.0, lasts_s=30.0))
    failures = {at_s: each.lost for at_s, each in answers.items() if isinstance(each, SourceFailed)}
    assert failures == {at_s: at_s >= 93 for at_s in range(90, 120)}


def test_the_world_draws_every_kind_and_only_with_faults() -> None:
    kinds = {scene.second.ill for seed in range(200) if (scene := draw(seed, ALWAYS, faults=True)).second is not None}
    assert kinds == set(SourceFault)
    assert draw(1, ALWAYS, faults=False).second is None
    some = sum(draw(seed, Site(), faults=True).second is not None for seed in range(500))
    assert 60 < some < 140


@pytest.mark.parametrize("outages", [10, pytest.param(600, marks=pytest.mark.slow)])
def test_among_two_sources_nothing_is_violated(outages: int) -> None:
    """Every host has a second source, and three of five of those are ill: no host loses its power by planning."""
    options = SimulationOptions(seed=700_000, outages=outages)
    made = report(play_many(ALWAYS, options, jobs=1), options)
    assert made["invariant_violations"] == []
    assert made["planning_dirty_outages"] == []
