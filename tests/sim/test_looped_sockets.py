"""The socket level: the daemon as a process, killed with SIGKILL, and every wire for real."""

import pytest

from powerguard.sim.looped import wired
from powerguard.sim.looped.run import play_many
from powerguard.sim.world.report import Options, report
from powerguard.sim.world.site import ReturnSite, Site

WAYS = ReturnSite(output_share=0.8, bracket_share=0.8, dry_run_share=0.3)


def test_three_outages_break_no_invariant() -> None:
    """A dip, a hold and a power-off, with a daemon that is killed, a card that spoils its answers, and full disks."""
    options = Options(seed=35, outages=3, level="sockets")
    told = report(play_many(Site(), options), options)
    assert told["invariant_violations"] == []
    assert (told["outages"], told["planning_dirty"], told["shutdowns"] > 0) == (3, 0, True)


def test_script_breaks_everything_sooner_or_later() -> None:
    """A hundred seeds hold every kind of cut and of fault, and without faults there is none."""
    scripts = [wired.draw(seed, faults=True) for seed in range(100)]
    lengths = {round(end_s - begin_s) for script in scripts for begin_s, end_s in script.cuts}
    assert (min(lengths) <= 3, max(lengths) >= 15) == (True, True)
    assert any(script.kills for script in scripts)
    assert any(script.spoiled for script in scripts)
    assert any(script.bmc.dead for script in scripts)
    assert {word for script in scripts for word in script.disk} == {"--mb-per-s", "8", "2.5", "--full"}
    assert not any(wired.draw(seed, faults=False).kills for seed in range(100))
    assert len({wired.draw(seed, faults=False).disk for seed in range(100)}) == 1


def test_script_names_the_ways_of_the_site() -> None:
    """A host that goes off in earnest is not there for a second cut; without a section `returns` there is no way."""
    scripts = [wired.draw(seed, faults=True, returns=WAYS) for seed in range(100)]
    kinds = {(script.armed, script.output, script.bracket) for script in scripts}
    assert len(kinds) == 8
    assert {len(script.cuts) for script in scripts if script.armed} == {1}
    plain = [wired.draw(seed, faults=True) for seed in range(100)]
    assert plain == [wired.draw(seed, faults=True, returns=ReturnSite()) for seed in range(100)]
    assert not any(script.armed or script.output or script.bracket for script in plain)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forty_outages_with_ways_back_break_no_invariant() -> None:
    """SETs over UDP and the policy over RMCP+: once, late enough, never in dry-run, and put back."""
    options = Options(seed=2000, outages=40, level="sockets")
    told = report(play_many(Site(returns=WAYS), options, jobs=6), options)
    assert told["invariant_violations"] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_outages_break_no_invariant() -> None:
    options = Options(seed=1000, outages=100, level="sockets")
    told = report(play_many(Site(), options, jobs=6), options)
    assert told["invariant_violations"] == []
    assert told["planning_dirty"] == 0
