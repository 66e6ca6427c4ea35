"""Each policy against the same outage, with the sums done by hand; and the judges: the oracle and the bound.

The fixed case: a new battery, 75 % load (6 minutes), one hour without utility, a checkpoint of 20 s, a stop of 45 s.
"""

from dataclasses import replace

import pytest

from powerguard.core.model.actions import Action, PowerOff, ResumeTrainer
from powerguard.sim.world.back import Waker
from powerguard.sim.world.battery import GaugeKind
from powerguard.sim.world.chance import Cut, SurroundingFacts
from powerguard.sim.world.guarded import Guarded
from powerguard.sim.world.host import HostAnswer
from powerguard.sim.world.invariants import InvariantBroken, hold
from powerguard.sim.world.policies import MAKERS, ORACLE, best, bound, one
from powerguard.sim.world.run import Result, play
from powerguard.sim.world.scene import Scene, StopOrder, draw
from powerguard.sim.world.site import DrillSite, HostSite, OutageSite, Site, TrainerSite, UpsSite
from powerguard.sim.world.world import World

BACK_S = 3600.0 + 5.0 + 180.0
"""Utility, the UPS's output, and training again: what every policy that shuts down in order gets."""


def site(**drill: object) -> Site:
    return Site(
        ups=UpsSite(
            health=(1.0, 1.0),
            bad_cell_share=0.0,
            gauge_error=0.0,
            minutes_share=0.0,
            load_noise=0.0,
            knee_flag_share=0.0,
            below_table_loss=(0.04, 0.04),
        ),
        outage=OutageSite(restrike_share=0.0),
        trainer=TrainerSite(hung_share=0.0, checkpoint_spread=0.0),
        host=HostSite(stop_spread=0.0, stop_stuck_share=0.0),
        drill=DrillSite(health_error=0.0, **drill),  # type: ignore[arg-type]
    )


def scene(where: Site, *lengths_s: float, **changes: object) -> Scene:
    cuts, at_s = [], 0.0
    for length_s in lengths_s:
        cuts.append(Cut(at_s, at_s + length_s))
        at_s += length_s + 120.0
    return replace(draw(3, where, faults=False), cuts=tuple(cuts), age_months=12, **changes)  # type: ignore[arg-type]


def played(policy: str, where: Site, *lengths_s: float, **changes: object) -> Result:
    return play(scene(where, *lengths_s, **changes), where, MAKERS[policy])


def trained_s(result: Result, back_s: float = BACK_S) -> float:
    """Training on battery, before anything of it was lost again."""
    return back_s - result.loss_s + result.rollback_s


@pytest.mark.parametrize(
    ("policy", "drill", "seconds", "rollback_s"),
    [
        # Fires at the first look, sleeps 50 s; what was done after its checkpoint is lost.
        ("fixed", {}, 50.0, 50.0),
        # 360 s, low battery 120 s before the end, then 10 s until it halts, with no checkpoint at all.
        ("nut", {}, 250.0, None),
        # 180 s of runtime left are where its MINUTES 3 fires.
        ("apcupsd", {}, 180.0, None),
        # Pauses at e = 0.10 + (30 + 170) / 0.75 / tau(0.26): measured health 1, paused load a third.
        ("powerguard", {"done": True}, 227.0, 0.0),
        # The same with a power cap after 10 s: 4/5 of the speed, 1.5 times as long.
        ("powerguard", {"done": True, "cap": True}, 294.0, 0.0),
        # Without a drill: health 0.75 presumed, paused load 60 % presumed.
        ("powerguard", {}, 68.0, 0.0),
    ],
)
def test_an_hour_without_utility(policy: str, drill: dict[str, bool], seconds: float, rollback_s: float | None) -> None:
    """All of them stop in order; they differ in how long they train on battery, and what they keep of it."""
    result = played(policy, site(**drill), 3600.0)
    assert (result.shutdowns, result.dirty, result.violations) == (1, [], [])
    assert trained_s(result) == pytest.approx(seconds, abs=8.0)
    if rollback_s is None:
        assert result.rollback_s > 20.0
    else:
        assert result.rollback_s == pytest.approx(rollback_s, abs=4.0)


def test_the_bound_is_the_sum_done_by_hand() -> None:
    """Shut down: all energy but that of checkpoint and stop at the paused load, spent capped: 460 s at 4/5 speed."""
    where = site()
    result = bound(scene(where, 3600.0), where)
    per_paused_s, per_capped_s = 0.3025 / (540.0 * 0.54), 0.5025 / (540.0 * 0.5)
    energy = 1.0 - (20.0 + 45.0) * per_paused_s
    assert result.how == "shutdown"
    assert result.loss_s == pytest.approx(3600.0 + 180.0 - 0.8 * energy / per_capped_s, abs=5.0)


def test_the_bound_rides_and_holds() -> None:
    """Six minutes are ridden through; ten bridged: capped for (1 - 600 / 964) / (1 / 537 - 1 / 964) s, then paused."""
    where = site()
    assert bound(scene(where, 359.0), where).how == "ride"
    assert bound(scene(where, 359.0), where).loss_s == 0.0
    held = bound(scene(where, 600.0), where)
    assert held.how == "hold"
    assert held.loss_s == pytest.approx(600.0 - 0.8 * 458.4, abs=1.0)


@pytest.mark.parametrize("policy", [*MAKERS])
def test_a_short_outage_costs_nobody_but_the_script_anything(policy: str) -> None:
    """Thirty seconds: the battery carries them. The script fires and cannot be called back: needless, and stranded."""
    result = played(policy, site(), 30.0)
    if policy == "fixed":
        assert (result.shutdowns, result.needless, result.stranded) == (1, 1, True)
        assert result.loss_s > 180.0
    else:
        assert result.loss_s == pytest.approx(0.0, abs=1.0)
        assert (result.shutdowns, result.needless, result.stranded) == (0, 0, False)


def test_a_hold_needs_no_reboot() -> None:
    """Five minutes: paused after 227 s, held, and resumed in place 10 s after utility. The others have long stopped."""
    result = played("powerguard", site(done=True), 300.0)
    assert (result.shutdowns, result.dirty) == (0, [])
    assert result.loss_s == pytest.approx(300.0 - 227.0 + 10.0, abs=12.0)
    for other in ("nut", "apcupsd"):
        assert played(other, site(), 300.0).loss_s > result.loss_s + 100.0


def test_waiting_for_low_battery_bets_on_the_gauge() -> None:
    """A worn battery, and a gauge that counts from the nameplate: never low until it is dead. A drill knows better."""
    counter = replace(scene(site(), 3600.0).gauge, kind=GaugeKind.COULOMB)
    worn = {"health": 0.6, "measured_health": 0.6, "gauge": counter}
    lost = played("nut", site(), 3600.0, **worn)
    assert lost.dirty_by("planning")
    assert not lost.dirty_by("physics")
    saved = played("powerguard", site(done=True), 3600.0, **worn)
    assert (saved.dirty, saved.shutdowns) == ([], 1)


def test_a_bad_cell_is_nobodys_fault() -> None:
    """It dies with half its energy: physics. The checkpoint beside training bounds what is done again."""
    result = played("powerguard", site(done=True), 3600.0, dies_at=0.5)
    assert [whose for _, whose in result.dirty] == ["physics"]
    assert result.rollback_s < 100.0


def test_an_output_off_that_was_announced_is_ours_to_survive() -> None:
    """Somebody orders the output off with two minutes' notice: powerguard is off by then, and comes back by itself."""
    order = StopOrder(kind="countdown", at_s=60.0, delay_s=150.0)
    result = played("powerguard", site(done=True), 3600.0, order=order)
    assert (result.dirty, result.shutdowns, result.stranded, result.violations) == ([], 1, False, [])


class Unheeded(Guarded):
    """A daemon whose word to power off is taken and forgotten."""

    def _ordered(self, action: Action) -> HostAnswer:
        return HostAnswer(after_s=0.1) if isinstance(action, PowerOff) else super()._ordered(action)


def test_what_nobody_could_hear_is_nobodys_fault_and_what_was_presumed_is_ours() -> None:
    """With this host's network down the battery is presumed, and counted. An order to its UPS cannot be heard."""
    where, cut_off = site(done=True), SurroundingFacts(network=(0.0, 3650.0))
    order = StopOrder(kind="fsd", at_s=30.0, delay_s=60.0)

    def blamed(**changes: object) -> list[str]:
        return [whose for _, whose in play(scene(where, 3600.0, **changes), where, Unheeded).dirty]

    assert blamed(order=order, surroundings=cut_off) == ["physics"]
    assert blamed(order=order) == ["planning"]
    assert blamed(order=order, surroundings=SurroundingFacts(network=(0.0, 40.0))) == ["planning"], "50 s are enough"
    assert blamed(surroundings=cut_off) == ["planning"]
    deaf = SurroundingFacts(twin=True, silent=(10.0, 95.0))
    assert blamed(order=order, surroundings=deaf) == ["physics"], "the other one is enough, and its order is not heard"
    assert blamed(order=order, surroundings=replace(deaf, needed=2)) == ["planning"]


def test_utility_between_commit_and_cut_strands_a_host() -> None:
    """Without a UPS that cycles its output, nobody tells the BMC that power is back: counted, and told."""
    result = played("powerguard", site(done=True), 620.0)
    assert (result.shutdowns, result.stranded) == (1, True)
    assert not played("nut", site(), 620.0).stranded


@pytest.mark.parametrize("policy", [pytest.param("powerguard", marks=pytest.mark.slow), "fixed"])
def test_the_button_is_pressed_after_every_strike(policy: str) -> None:
    """Two strikes ten hours apart, each of which strands the host: it trains between them, and loses twice as much."""
    where, apart_s = site(done=True), 36000.0
    once = played(policy, where, 620.0)
    cuts = (Cut(0.0, 620.0), Cut(620.0 + apart_s, 1240.0 + apart_s))
    twice = play(replace(scene(where, 620.0), cuts=cuts), where, MAKERS[policy])
    assert (once.wakers, twice.wakers) == ([Waker.PERSON], 2 * [Waker.PERSON])
    assert (twice.shutdowns, twice.stranded, twice.violations) == (2, True, [])
    assert twice.loss_s == pytest.approx(2.0 * once.loss_s, abs=60.0)


def test_the_oracle_loses_least() -> None:
    """Judged by the oracle, nobody is better than the best; who is beaten on the way need not be played to its end."""
    where = site()
    for length_s in (20.0, 200.0, 400.0, 3600.0):
        at = scene(where, length_s)
        least_s = best(at, where).loss_s
        assert least_s >= bound(at, where).loss_s - 1e-6
        losses_s = [play(at, where, MAKERS[name]).loss_s for name in ("fixed", "nut", "apcupsd")]
        assert least_s <= min(losses_s)
        assert all(best(at, where, at_most_s=max(loss_s, 1.0)).loss_s == least_s for loss_s in losses_s)
        assert best(at, where, at_most_s=least_s / 2.0).loss_s >= least_s / 2.0
        beaten = play(at, where, MAKERS["fixed"], at_most_s=10.0)
        assert 10.0 <= beaten.loss_s <= losses_s[0]
        assert beaten.lasted_s < 100.0


@pytest.mark.parametrize("policy", [*MAKERS, ORACLE])
def test_the_same_seed_gives_the_same_result(policy: str) -> None:
    """To the last digit, with all faults: else a failing seed would be no reproduction."""
    for seed in range(3):
        assert one(seed, Site(), policy, faults=True) == one(seed, Site(), policy, faults=True)


def test_excess_is_never_negative() -> None:
    for policy in (*MAKERS, ORACLE):
        judged = [one(seed, Site(), policy, faults=False) for seed in range(15)]
        assert all(0.0 <= one_.excess_s <= one_.beyond_bound_s + 1e-6 for one_ in judged if policy != ORACLE)
        assert sum(one_.excess_s for one_ in judged) > 0.0 or policy == ORACLE


class Deaf(Guarded):
    """A daemon whose word to power off never arrives."""

    def _ordered(self, action: Action) -> HostAnswer:
        hold(not isinstance(action, PowerOff), "planted")
        return super()._ordered(action)


def test_a_violation_is_reported_with_its_moment() -> None:
    """Planted where the host is ordered off: the play ends there, and says when."""
    where = site(done=True)
    result = play(scene(where, 3600.0), where, Deaf)
    assert len(result.violations) == 1
    assert result.violations[0].startswith("planted (at ")
    assert 300.0 < result.lasted_s < 600.0


class Mute(Guarded):
    """A daemon whose word to go on never arrives, though it is told that it did."""

    def _ordered(self, action: Action) -> HostAnswer:
        return HostAnswer(after_s=0.1) if isinstance(action, ResumeTrainer) else super()._ordered(action)


def test_training_that_stands_for_ever_is_a_violation() -> None:
    where = site(done=True)
    result = play(scene(where, 300.0), where, Mute)
    assert result.violations
    assert "training goes on" in result.violations[0]


def test_a_sentence_that_holds_is_no_violation() -> None:
    hold(1, "fine")
    with pytest.raises(InvariantBroken, match="not fine"):
        hold(0, "not fine")


def test_a_world_begins_before_the_cut() -> None:
    where = site()
    world = World(scene(where, 30.0), where, began_s=-10.0)
    assert (world.utility, world.host.training, world.next_edge_s) == (True, True, 0.0)
