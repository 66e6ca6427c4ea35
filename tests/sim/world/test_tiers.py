"""The trainer's protocol in the simulated world: joins, full disks, lost ranks, torn tiers, and what a resume finds."""

import math
from dataclasses import replace

import pytest

from powerguard.core.model.actions import Conduct
from powerguard.sim.world.host import Host, Tiers
from powerguard.sim.world.policies import one as play_one
from powerguard.sim.world.scene import TrainerFacts, draw
from powerguard.sim.world.site import FaultSite, HostSite, Site, TrainerSite

CALM = Site(
    trainer=TrainerSite(checkpoint_median_s=20.0, checkpoint_spread=0.0, hung_share=0.0, stall_s=0.0),
    host=HostSite(stop_spread=0.0, stop_stuck_share=0.0),
)
FACTS = TrainerFacts(estimate_s=30.0, copied_ago_s=1000.0)


def host(**facts: object) -> Host:
    scene = draw(3, CALM, faults=False)
    trainer = replace(scene.trainer, saved_ago_s=0.0, copied_ago_s=1000.0, **facts)
    return Host(replace(scene, trainer=trainer), CALM, 0.0)


def run(one: Host, to_s: float) -> None:
    """Let time pass, with every change at its moment."""
    while one.next_change_s < to_s:
        one.advance(one.next_change_s)
    one.advance(to_s)


# --- Tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torn", "progress_s", "from_s"),
    [
        (0, 1000.0, 900.0),  # every 300 s, and 20 s until it is durable
        (0, 915.0, 600.0),
        (1, 1000.0, 600.0),
        (2, 1000.0, -1000.0),  # two are kept: the copy is all there is
        (1, 10.0, 0.0),
        (1, 2200.0, 1800.0),  # the same step from the second tier, before an older one
        (2, 2200.0, 1800.0),
        (0, 100.0, 0.0),
    ],
)
def test_a_resume_takes_the_newest_that_is_whole(torn: int, progress_s: float, from_s: float) -> None:
    tiers = Tiers(replace(FACTS, torn=torn), CALM.trainer)
    if progress_s == 10.0:
        tiers.keep(5.0)
    assert tiers.resume(progress_s) == from_s
    assert tiers.passed_over == torn


def test_what_was_ordered_is_the_newest_until_it_is_torn() -> None:
    for torn, from_s in ((0, 950.0), (1, 900.0), (2, -1000.0)):
        tiers = Tiers(replace(FACTS, torn=torn), CALM.trainer)
        tiers.keep(950.0)
        assert tiers.durable_s(1000.0) == 950.0
        assert tiers.resume(1000.0) == from_s


def test_after_a_resume_all_starts_over() -> None:
    """What was passed over is not found again, and the second tier does not know the future."""
    tiers = Tiers(replace(FACTS, torn=1), CALM.trainer)
    assert tiers.resume(2200.0) == 1800.0
    assert tiers.durable_s(1800.0) == 1800.0
    assert tiers.durable_s(2200.0) == 2100.0


def test_a_full_disk_takes_nothing_new() -> None:
    tiers = Tiers(replace(FACTS, disk_full=True), CALM.trainer)
    assert tiers.durable_s(5000.0) == 0.0
    assert tiers.resume(5000.0) == 0.0


# --- What it answers --------------------------------------------------------------------------------------------------


def test_one_that_joins_answers_with_an_older_step() -> None:
    """A precaution is on its way, and the emergency joins it: training stands, at another step than it saves."""
    one = host(joins=True)
    first = one.checkpoint(0.0, Conduct.CONTINUE)
    run(one, 10.0)
    second = one.checkpoint(10.0, Conduct.PAUSE)
    assert second.after_s == pytest.approx(first.after_s - 10.0)
    result = dict(second.detail)
    assert (result["at_paused_step"], result["paused"], result["step"]) == (False, True, dict(first.detail)["step"])
    run(one, 30.0)
    assert one.paused
    third = dict(one.checkpoint(30.0, Conduct.PAUSE).detail)
    assert third["at_paused_step"] is True


@pytest.mark.parametrize(
    ("facts", "failure"), [({"disk_full": True}, "No space left"), ({"rank_lost_s": 12.0}, "rank 3 has fallen silent")]
)
def test_what_fails_says_so_and_stands_all_the_same(facts: dict[str, object], failure: str) -> None:
    """A second try then loses nothing."""
    one = host(**facts)
    answer = one.checkpoint(0.0, Conduct.PAUSE)
    assert failure in answer.failure
    assert answer.after_s < math.inf
    run(one, 40.0)
    assert (one.paused, one.durable_s) == (True, 0.0)
    one.resume(40.0)
    run(one, 60.0)
    assert one.training


def test_a_torn_checkpoint_costs_what_lies_behind_it() -> None:
    whole, torn = host(), host(torn=1)
    for one in (whole, torn):
        run(one, 400.0)
        one.checkpoint(400.0, Conduct.PAUSE)
        run(one, 450.0)
        one.lose_power(450.0)
    assert whole.rollback_s == 0.0
    assert torn.rollback_s == pytest.approx(100.0, abs=2.0)
    assert (whole.tiers.passed_over, torn.tiers.passed_over) == (0, 1)


# --- In the whole world -----------------------------------------------------------------------------------------------


def test_these_faults_come_with_faults_only_and_move_nothing_else() -> None:
    site = Site(faults=FaultSite(joins_share=1.0, disk_full_share=1.0, rank_lost_share=1.0, torn_share=1.0))
    for seed in range(20):
        calm, ill, usual = (
            draw(seed, site, faults=False),
            draw(seed, site, faults=True),
            draw(seed, Site(), faults=True),
        )
        facts = calm.trainer
        assert (facts.joins, facts.disk_full, facts.torn, facts.rank_lost_s) == (False, False, 0, math.inf)
        assert ill.trainer.joins
        assert ill.trainer.disk_full
        assert ill.trainer.torn in (1, 2)
        assert 5.0 <= ill.trainer.rank_lost_s <= 60.0
        same = {"joins": False, "disk_full": False, "torn": 0, "rank_lost_s": math.inf}
        assert replace(ill, trainer=replace(ill.trainer, **same)) == replace(
            usual, trainer=replace(usual.trainer, **same)
        )


@pytest.mark.parametrize("share", ["joins_share", "disk_full_share", "rank_lost_share", "torn_share"])
def test_powerguard_keeps_its_promises_where_each_is_the_rule(share: str) -> None:
    site = Site(faults=FaultSite.model_validate({share: 1.0}))
    for seed in range(700, 706):
        outcome = play_one(seed, site, "powerguard", faults=True)
        assert outcome.result.violations == []
        assert not outcome.result.dirty_by("planning")
