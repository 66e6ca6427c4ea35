"""Several hosts on one UPS in the simulated world: its physics, its invariants, and that each of these can fail."""

from dataclasses import replace

import pytest

from powerguard.core.model.actions import Action, PowerOff
from powerguard.core.model.policy import Shed
from powerguard.sim.world.back import Waker
from powerguard.sim.world.guarded import Guarded
from powerguard.sim.world.host import HostAnswer, Power
from powerguard.sim.world.rack import (
    INRUSH,
    OBEYED,
    Kind,
    Member,
    Rack,
    RackPlan,
    RackWorld,
    draw_tenants,
    least_loss_s,
)
from powerguard.sim.world.site import Bin, DrillSite, OutageSite, Site, UpsSite
from powerguard.sim.world.world import World

LONG = OutageSite(bins=(Bin(from_s=3000.0, to_s=4000.0, share=1.0),), restrike_share=0.0)
SITE = Site(drill=DrillSite(done=True), outage=LONG, ups=UpsSite(bad_cell_share=0.0))
THREE = RackPlan(tiers=(0, 1, 2))
SEEDS = range(20, 24)


def violations(make: type[Member], site: Site = SITE, plan: RackPlan = THREE) -> str:
    return "; ".join(violation for seed in SEEDS for violation in Rack(seed, site, plan, make=make).play().violations)


# --- Physics ----------------------------------------------------------------------------------------------------------


def test_the_battery_lasts_as_long_as_the_load_of_all_allows() -> None:
    plan = replace(THREE, kind=Kind.NONE)
    rack = Rack(20, SITE, plan)
    lasts_s = rack.scene_pack.lasts_s(rack.load)
    outcome = rack.play()
    assert rack.berths[0].scene.end_s > lasts_s
    for _, result in outcome.hosts:
        assert [at_s for at_s, _ in result.dirty] == [pytest.approx(lasts_s, abs=0.01)]
    assert len({result.dirty[0][0] for _, result in outcome.hosts}) == 1


def test_the_hosts_come_back_one_after_another_and_draw_more_at_first() -> None:
    rack = Rack(20, SITE, replace(THREE, kind=Kind.NONE, stagger_s=30.0))
    on: dict[int, float] = {}
    for seat in rack.seats:
        seat.boot()
    while not all(seat.ended for seat in rack.seats):
        rack._advance()
        for at, seat in enumerate(rack.seats):
            seat.act()
            if seat.world.host.dirty_at_s and seat.world.is_on and at not in on:
                on[at] = rack.now_s
                assert rack.berths[at].own_load == pytest.approx(INRUSH * seat.world.site.host.load)
    assert on[1] - on[0] == pytest.approx(30.0, abs=0.1)
    assert on[2] - on[1] == pytest.approx(30.0, abs=0.1)


def test_what_runs_on_a_host_does_not_change_what_it_is() -> None:
    plan = RackPlan()
    guarded, without = draw_tenants(5, plan), draw_tenants(5, replace(plan, others_share=0.5))
    assert [replace(each, kind=Kind.POWERGUARD) for each in without] == list(guarded)
    kinds = [each.kind for each in without]
    assert (kinds.count(Kind.POWERGUARD), kinds.count(Kind.NUT), kinds.count(Kind.NONE)) == (8, 4, 4)


def test_the_same_seed_is_the_same_outage() -> None:
    assert Rack(21, SITE, THREE).play() == Rack(21, SITE, THREE).play()


@pytest.mark.parametrize("kind", [Kind.POWERGUARD, Kind.NUT])
def test_nobody_loses_less_than_the_bound(kind: Kind) -> None:
    for seed in SEEDS:
        rack = Rack(seed, SITE, replace(THREE, kind=kind))
        least_s = least_loss_s(rack, lambda _: 1.0)
        outcome = rack.play()
        assert 0.0 < least_s <= sum(result.loss_s for _, result in outcome.hosts)


def test_a_killpower_waits_for_the_last_host() -> None:
    """A rack of nut alone is cycled by its UPS, so that all hosts come back without a person."""
    outcome = Rack(20, SITE, replace(THREE, kind=Kind.NUT)).play()
    assert [result.wakers for _, result in outcome.hosts] == [[Waker.POLICY]] * 3


# --- Invariants -------------------------------------------------------------------------------------------------------

USUAL = Site(drill=DrillSite(done=True))
FLEETS = [
    RackPlan(tiers=(0, 1, 2, 2)),
    RackPlan(tiers=(0, 1, 2, 2), ordered=False),
    RackPlan(tiers=(0, 1, 2, 2), others_share=0.5),
]


@pytest.mark.parametrize("plan", FLEETS, ids=["tiers", "no tiers", "half"])
@pytest.mark.parametrize("outages", [4, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("site", [USUAL, Site()], ids=["drill", "out of the box"])
def test_every_invariant_holds(site: Site, outages: int, plan: RackPlan) -> None:
    for seed in range(900, 900 + outages):
        result = Rack(seed, site, plan).play()
        assert result.violations == []


def test_the_higher_tier_runs_longer() -> None:
    """In an outage that outlasts the battery each tier goes on drawing after the one below it has gone."""
    rack = Rack(22, SITE, THREE)
    rack.play()
    low, middle, high = (berth.commits[0] for berth in rack.berths)
    assert low + 30.0 < middle
    assert middle + 30.0 < high


class Waits(Member):
    """It orders its power-off only when every neighbour is off."""

    held: PowerOff | None = None

    def _ordered(self, action: Action) -> HostAnswer:
        if isinstance(action, PowerOff) and self._neighbours_run():
            self.held = action
            return HostAnswer(after_s=0.1)
        return super()._ordered(action)

    def look(self) -> None:
        super().look()
        if self.held is not None and self.world.host.power is Power.UP and not self._neighbours_run():
            self.world.power_off(self.held.force_after_s)

    def _neighbours_run(self) -> bool:
        return any(each.is_on for each in self.berth.rack.berths if each is not self.berth)


class Reversed(Member):
    """The most important hosts make room for the others."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._policy = replace(self._policy, shed=Shed(tier=2 - self.berth.tenant.tier, highest=2))


class Undeclared(Member):
    """It takes the load of the UPS for its own."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._policy = replace(self._policy, shared=None)


class Sleeps(Waits):
    """The same, and it does not look how long ago it decided."""

    def look(self) -> None:
        Guarded.look(self)


def test_a_host_that_waits_for_its_neighbours_is_found() -> None:
    assert "no host waits for a neighbour" in violations(Waits)


def test_tiers_that_are_reversed_are_found() -> None:
    assert "a higher tier never commits first" in violations(Reversed)


def test_training_that_is_stopped_for_its_neighbours_is_found() -> None:
    plan = RackPlan(tiers=(0, 0, 0, 0), ordered=False, others_share=0.75, others=(Kind.NONE,))
    undrilled = SITE.model_copy(update={"drill": DrillSite()})
    assert OBEYED in violations(Undeclared, undrilled, plan)
    assert not violations(Member, undrilled, plan)


def test_a_host_that_is_lost_by_planning_is_found() -> None:
    plan = RackPlan(tiers=(0, 0), others_share=0.5, others=(Kind.NONE,))
    assert "no host is lost by planning" in violations(Sleeps, plan=plan)


def test_a_berth_is_a_world_with_the_load_of_all() -> None:
    rack = Rack(20, SITE, THREE)
    berth = rack.berths[0]
    assert isinstance(berth, RackWorld)
    assert berth.load == pytest.approx(sum(each.own_load for each in rack.berths))
    assert berth.own_load < berth.load
