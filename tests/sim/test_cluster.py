"""One job on several hosts under a Slurm with faults: the invariants hold, each of them can fail, and the report."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.main import main
from powerguard.cli.shared import EX_USAGE
from powerguard.sim.cluster.play import Plan, Play, draw_plan, play
from powerguard.sim.cluster.slurmctld import ClusterEvent, Fault
from powerguard.sim.world.site import Bin, ClusterSite, OutageSite, Site, UpsSite

ROOT = Path(__file__).parents[2]
LONG = OutageSite(bins=(Bin(from_s=900.0, to_s=1200.0, share=1.0),), restrike_share=0.0)
SITE = Site(outage=LONG, ups=UpsSite(bad_cell_share=0.0), cluster=ClusterSite(hosts=(3, 3), spare_share=0.0))


def plan(seed: int = 20, **changes: Any) -> Plan:  # noqa: ANN401 - fields of a Plan
    return replace(draw_plan(seed, SITE, faults=False), **changes)


def played(one: Plan) -> Play:
    result = Play(one, SITE)
    result.run()
    return result


# --- The invariants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outages", [4, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("faults", [True, False])
def test_every_invariant_holds(faults: bool, outages: int) -> None:
    for seed in range(700, 700 + outages):
        result = play(seed, Site(), faults=faults)
        assert result.violations == (), f"powerguard simulate --job --seed {seed} --outages 1"


def test_the_same_seed_is_the_same_outage() -> None:
    assert play(31, Site(), faults=True) == play(31, Site(), faults=True)


def test_an_outage_that_outlasts_every_battery() -> None:
    """Every host is off, the job is requeued once, and all of it is back without a person."""
    outcome = played(plan())
    assert outcome.violations == []
    result = outcome.played()
    assert (result.offs, result.restarts, result.failed, result.reported) == (3, 1, 0, 0)
    assert all(node.is_free for node in outcome.slurm.nodes)
    assert outcome.training.starts == 2


def test_a_host_that_keeps_its_power_stands_with_the_others_and_is_given_no_mark() -> None:
    two = plan()
    stays = replace(two.scenes[2], cuts=())
    result = played(replace(two, scenes=(*two.scenes[:2], stays)))
    assert result.violations == []
    assert result.places[2].offs == []
    assert result.idle_s > 0.0
    assert result.slurm.job.restarts == 1
    assert result.slurm.nodes[2].by_s == -math.inf


@pytest.mark.slow
def test_a_slurm_that_hangs_throughout_is_heard_of_and_costs_no_power_off_a_second() -> None:
    hung = plan(faults=(Fault("hangs", -10.0, 4000.0),))
    assert play_of(hung) == play_of(plan())
    result = played(hung)
    assert result.violations == []
    assert result.training.trains


def play_of(one: Plan) -> list[float]:
    """Return when each host was ordered off first, to the second."""
    return [round(place.offs[0].at_s) for place in played(one).places]


def test_a_person_who_drains_a_node_keeps_it() -> None:
    result = played(plan(deeds=(ClusterEvent(-5.0, "drain", 1), ClusterEvent(100.0, "drain", 2))))
    assert result.violations == []
    assert result.played().reported == 2


def test_a_job_whose_newest_checkpoint_is_lost_is_found() -> None:
    result = Play(plan(), SITE)
    result.training._disks = _Forgetful()
    result.run()
    assert "the newest checkpoint that all ranks have is never lost" in result.violations[0]


class _Forgetful(dict[int, list[float]]):
    """The disks of hosts that keep nothing."""

    def __setitem__(self, key: int, value: list[float]) -> None:
        pass


def test_a_job_that_is_requeued_twice_is_found() -> None:
    three = plan()
    stay = [replace(scene, cuts=()) for scene in three.scenes[1:]]
    result = Play(replace(three, scenes=(three.scenes[0], *stay)), SITE)
    result.slurm._ended = lambda **_: None  # type: ignore[method-assign] # Slurm leaves it running
    first = result.members[0]._ask_helper
    result.members[0]._ask_helper = lambda action: [first(action) for _ in range(2)] and None  # type: ignore[method-assign]
    result.run()
    assert "no job is requeued twice for one outage" in result.violations[0]


def test_a_job_that_does_not_train_again_is_found() -> None:
    result = Play(plan(), SITE)
    result.slurm._schedule = lambda: None  # type: ignore[method-assign]
    result.training.start((0, 1, 2))
    result.slurm.job.nodes = (0, 1, 2)
    result.run()
    assert "the job trains when utility is back for good" in result.violations[0]


# --- The report -------------------------------------------------------------------------------------------------------


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--job", "--outages", "2", "--seed", "5", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    assert "2 outages of one job on several hosts under Slurm, from seed 5, with faults" in text
    assert main(["simulate", "--job", "--outages", "2", "--seed", "5", "--jobs", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["object"], answer["schema_version"], answer["outages"], answer["seed"]) == ("simulate_job", 1, 2, 5)
    assert answer["invariant_violations"] == []
    page = (ROOT / "docs/reference/simulate.md").read_text(encoding="utf-8")
    for key in answer.keys() - {"schema_version", "object"}:
        assert f"`{key}`" in page, key


@pytest.mark.parametrize("words", [["--hosts", "1,2"], ["--policy", "nut"], ["--level", "loop"]])
def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    try:
        status = main(["simulate", "--job", *words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == EX_USAGE
    assert "--job" in capsys.readouterr().err
