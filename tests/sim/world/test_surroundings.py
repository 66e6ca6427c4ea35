"""The simulated world beside the UPS: a network that goes with the power, another UPS, a source out of order."""

import pytest

from powerguard.core.model.events import Event, NetworkSeen, OutputSource, Reading, SourceFailed
from powerguard.sim.world.chance import LINK, TWIN, OtherUpses, SecondSource, SecondSourceFacts, SurroundingFacts
from powerguard.sim.world.many import play_many
from powerguard.sim.world.report import SimulationOptions, report
from powerguard.sim.world.scene import draw
from powerguard.sim.world.site import FaultSite, Site


def says(at_s: float) -> Reading:
    return Reading(at_s=at_s, ups="sim", source="sim", output_source=OutputSource.UTILITY)


def events_of(facts: SurroundingFacts, *, began_s: float = 0.0, until_s: int = 40) -> list[Event]:
    others = OtherUpses(facts, began_s)
    return [event for at_s in range(int(began_s), until_s) for event in others.report(says(float(at_s)), float(at_s))]


def test_a_network_that_goes_is_reported_once_each_way() -> None:
    assert events_of(SurroundingFacts(network=(10.0, 20.0))) == [
        NetworkSeen(at_s=10.0, part=LINK, up=False),
        NetworkSeen(at_s=20.0, part=LINK, up=True),
    ]
    assert events_of(SurroundingFacts()) == []


def test_a_link_that_was_down_when_the_daemon_began_did_not_go() -> None:
    """As the real watch has it: only what was seen there goes."""
    assert events_of(SurroundingFacts(network=(10.0, 20.0)), began_s=15.0) == [
        NetworkSeen(at_s=20.0, part=LINK, up=True)
    ]


def test_the_other_ups_says_the_same_and_falls_silent_for_its_time() -> None:
    events = events_of(SurroundingFacts(twin=True, silent=(5.0, 10.0)), until_s=12)
    assert [event.ups for event in events if isinstance(event, Reading | SourceFailed)] == [TWIN] * 12
    failed = {event.at_s: event.lost for event in events if isinstance(event, SourceFailed)}
    assert failed == {5.0: False, 6.0: False, 7.0: False, 8.0: True, 9.0: True}


def test_the_other_ups_goes_with_the_network() -> None:
    events = events_of(SurroundingFacts(twin=True, network=(10.0, 20.0)), until_s=25)
    assert {event.at_s for event in events if isinstance(event, SourceFailed)} == set(map(float, range(10, 20)))


def test_a_source_out_of_order_reports_the_newer_one_first() -> None:
    second = SecondSource(SecondSourceFacts(lag_s=0.0, reordered=True))
    answers = [second.report(says(float(at_s)), float(at_s)) for at_s in range(6)]
    assert [None if answer is None else answer.at_s for answer in answers] == [None, 1.0, 0.0, None, 4.0, 3.0]


def test_the_world_draws_all_of_it_and_only_with_faults() -> None:
    scenes = [draw(seed, Site(), faults=True) for seed in range(600)]
    assert any(scene.surroundings.twin and scene.surroundings.needed == 2 for scene in scenes)
    assert any(scene.surroundings.network is not None for scene in scenes)
    assert any(scene.second is not None and scene.second.reordered for scene in scenes)
    assert all(scene.second is None for scene in scenes if scene.surroundings.twin), "one complication at a time"
    assert all(draw(seed, Site(), faults=False).surroundings == SurroundingFacts() for seed in range(50))


@pytest.mark.parametrize(
    "faults",
    [
        FaultSite(second_share=0.0, network_lost_share=1.0),
        FaultSite(second_share=0.0, twin_share=1.0),
        FaultSite(second_share=0.0, twin_share=1.0, network_lost_share=1.0),
        FaultSite(second_share=1.0, second_reordered_share=1.0),
    ],
    ids=["network", "twin", "both", "reordered"],
)
@pytest.mark.parametrize("outages", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_nothing_is_violated_and_nobody_is_lost_by_planning(faults: FaultSite, outages: int) -> None:
    """Each of them in every outage, with all the other faults beside."""
    options = SimulationOptions(seed=500_000, outages=outages)
    made = report(play_many(Site(faults=faults), options, jobs=1), options)
    assert made["invariant_violations"] == []
    assert made["planning_dirty_outages"] == []


def test_what_was_presumed_in_a_silence_stays_when_the_answer_is_battery() -> None:
    """The network goes with the power, and the card answers again with the charge that it had: it lags by minutes."""
    options = SimulationOptions(seed=500_014, outages=1)
    site = Site(faults=FaultSite(second_share=0.0, network_lost_share=1.0))
    assert report(play_many(site, options, jobs=1), options)["invariant_violations"] == []
