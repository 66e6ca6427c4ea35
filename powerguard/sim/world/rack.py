"""Several hosts on one UPS in one outage: each with its own training, its own core, and its own clock of decisions.

All hosts share one battery, and each has a `World` of its own: the same utility, the same gauge, the load of all. The
rack lets time pass for all of them together, from one change to the next. No host sees another one: what it learns is
the UPS's readings and its own draw.

After every outage the rack checks the invariants that concern several hosts (`_check`, and `Member` while it plays).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple

from powerguard.core.energy import budget
from powerguard.core.model.actions import Action, ContinueTrainer, ResumeTraining, StopTrainer, TerminateTrainer
from powerguard.core.model.events import OwnLoad, OwnSource
from powerguard.core.model.policy import Shared, Shed
from powerguard.core.model.state import EmergencyCheckpoint, Holding, OnBattery, Shutdown
from powerguard.sim.world.back import Waker
from powerguard.sim.world.battery import Pack
from powerguard.sim.world.chance import log_uniform, stream
from powerguard.sim.world.guarded import Guarded
from powerguard.sim.world.host import HostAnswer, Power
from powerguard.sim.world.invariants import InvariantBroken, hold
from powerguard.sim.world.policies import Nut, Plain, Spending, most_training
from powerguard.sim.world.report import MOST_SHOWN, SimulationOptions
from powerguard.sim.world.run import PATIENCE_S, WARM_S, Decider, Result, Stage
from powerguard.sim.world.scene import Scene, draw
from powerguard.sim.world.site import RackSite, Site
from powerguard.sim.world.world import World

RATING_W = 16000.0
INRUSH, INRUSH_S = 1.5, 5.0
"""Draw of a host after its power-on, as a multiple of its training load, and for how long."""
_CHECKPOINT_S, _STOP_S = (10.0, 90.0), (30.0, 60.0)
"""Medians of the hosts' checkpoints and stops: each host has its own."""
_ON_BATTERY_S, _ON_UTILITY_S = 5.0, 60.0
"""Intervals at which the daemon reads its host's own draw."""
_NOISE, _JITTER = 0.05, 0.01
"""Error of a noisy measurement and of an exact one, either way: no BMC repeats itself to the watt."""
_IDLE_SHARE, _NEVER_PAUSES_SHARE = 0.05, 0.02
_ORDERED_WITHIN_S = 15.0
"""Limit from the commit to the power-off order: BMC policy and sync, each with its own limit."""
_TOGETHER_S = 10.0
"""Two hosts that commit within this time have committed together: their looks and dwells differ by this much."""


CAUSES = ("held", "stopped", "boot", "rolled_back")
"""What training is lost by: paused; the stop, and off without utility; the way back; work that is done again."""
OBEYED = "training that obeyed is never stopped or terminated"


class Kind(StrEnum):
    """What runs on a host."""

    POWERGUARD = "powerguard"
    NUT = "nut"
    NONE = "none"
    """It draws until the battery ends."""


class Watts(StrEnum):
    """How the measurement of a host's own draw behaves."""

    EXACT = "exact"
    NOISY = "noisy"
    FROZEN = "frozen"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RackHost:
    """One host of the rack. idle: it never trains."""

    kind: Kind = Kind.POWERGUARD
    tier: int = 0
    watts: Watts = Watts.EXACT
    idle: bool = False
    never_pauses: bool = False
    checkpoint_s: float = 20.0
    stop_s: float = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RackPlan:
    """The hosts of a rack. tiers: one for each host. others: what runs on the hosts without powerguard, in turn.

    ordered: the daemons know their tiers; if not, all of them are equal. others_share: of the hosts.
    stagger_s: from one host's power-on to the next one's.
    """

    tiers: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2)
    kind: Kind = Kind.POWERGUARD
    ordered: bool = True
    others: tuple[Kind, ...] = (Kind.NUT, Kind.NONE)
    others_share: float = 0.0
    stagger_s: float = 5.0


def draw_tenants(seed: int, plan: RackPlan) -> tuple[RackHost, ...]:
    """Draw the hosts of one outage. What runs on them does not change what they are."""
    tenants, without = [], 0
    for at, tier in enumerate(plan.tiers):
        chance = stream(seed, f"tenant {at}")
        idle, never, watts = chance.random(), chance.random(), chance.random()
        known = next(kind for kind, most in zip(Watts, (0.7, 0.85, 0.9, 1.0), strict=True) if watts <= most)
        kind = plan.kind
        if math.floor((at + 1) * plan.others_share) > math.floor(at * plan.others_share):
            kind, without = plan.others[without % len(plan.others)], without + 1
        tenants.append(
            RackHost(
                kind=kind,
                tier=tier,
                watts=known,
                idle=idle < _IDLE_SHARE,
                never_pauses=never < _NEVER_PAUSES_SHARE,
                checkpoint_s=log_uniform(chance, *_CHECKPOINT_S),
                stop_s=log_uniform(chance, *_STOP_S),
            )
        )
    return tuple(tenants)


class SharedPack(Pack):
    """The battery of the rack. It is the rack that drains it, once for all hosts: a host alone changes nothing."""

    def drain(self, seconds: float, load: float) -> None:
        """Leave it to the rack."""

    def charge(self, seconds: float) -> None:
        """Leave it to the rack."""

    def pass_time(self, seconds: float, load: float, *, utility: bool) -> None:
        """Charge on utility, else give power to all."""
        if utility:
            Pack.charge(self, seconds)
        else:
            Pack.drain(self, seconds, load)


class RackWorld(World):
    """What one host of the rack sees: its own host, and the UPS with the load of all."""

    def __init__(self, scene: Scene, site: Site, *, tenant: RackHost, rack: "Rack", delay_s: float) -> None:
        """delay_s: from the moment at which it might be powered on until it is: the hosts start one after another."""
        super().__init__(scene, site, began_s=-WARM_S)
        self.tenant, self.rack = tenant, rack
        self.pack = rack.pack
        self.commits: list[float] = []
        """When it ordered its own power-off."""
        self.stop_s, self.goes_on = math.inf, False
        """What its stop takes by the grade of this outage; and that it trains or holds with no checkpoint in flight."""
        self.passed: list[tuple[float, RackWorld]] = []
        """When it committed, and which hosts of a lower tier went on at that moment."""
        self._delay_s = delay_s
        self._starts: tuple[float, Waker] | None = None
        self._inrush_ends_s = -math.inf
        if tenant.idle:
            self.host.training = self.host.trainer_alive = False

    @property
    def load(self) -> float:
        """Share of the rating that all hosts draw from the UPS."""
        return self.rack.load

    @property
    def own_load(self) -> float:
        """Share of the rating that this host draws."""
        if not self.output:
            return 0.0
        if self.is_on and self.now_s < self._inrush_ends_s:
            return INRUSH * self.site.host.load
        return self.host.load

    @property
    def lost_at_s(self) -> float:
        """Return the end of a countdown. The rack knows when the battery is empty, and has `run_out` called."""
        return self._off_at_s if self.output else math.inf

    def run_out(self, at_s: float) -> None:
        """Expect the battery to be empty at at_s."""
        self._planned, self._next_s = self.host.version, at_s

    @property
    def stranded(self) -> bool:
        """It is off with power at its supply, and is not about to start."""
        return self._starts is None and super().stranded

    @property
    def next_event_s(self) -> float:
        """When something next happens by itself."""
        starts_s = math.inf if self._starts is None else self._starts[0]
        inrush_s = self._inrush_ends_s if self._inrush_ends_s > self.now_s else math.inf
        return min(super().next_event_s, starts_s, inrush_s)

    def _happen(self) -> None:
        super()._happen()
        if self._starts is not None and self.now_s >= self._starts[0]:
            waker, self._starts = self._starts[1], None
            self._inrush_ends_s = self.now_s + INRUSH_S
            super()._switch_on(waker)

    def _switch_on(self, waker: Waker) -> None:
        if self._starts is None:
            self._starts, self._planned = (self.now_s + self._delay_s, waker), -1

    def _lose_output(self) -> None:
        self._starts = None
        super()._lose_output()

    def cycle(self, after_s: float) -> None:
        """Kill the UPS's power after the last host only, as a primary does that waits for its secondaries."""
        if not any(each.is_on for each in self.rack.berths):
            for each in self.rack.berths:
                World.cycle(each, after_s)

    def power_off(self, force_after_s: float) -> HostAnswer:
        """Order the host off."""
        if self.host.power is Power.UP:
            self.commits.append(self.now_s)
            self.passed += [
                (self.now_s, other)
                for other in self.rack.berths
                if other.goes_on and other.is_on and other.is_below(self)
            ]
        return super().power_off(force_after_s)

    def is_below(self, other: "RackWorld") -> bool:
        """Say whether its tier is lower, all else equal: both train, and its stop takes no less time by its grade."""
        idle = self.tenant.idle or other.tenant.idle
        return self.tenant.tier < other.tenant.tier and not idle and self.stop_s >= other.stop_s


class Member(Guarded):
    """powerguard on one host of the rack."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        assert isinstance(world, RackWorld)  # noqa: S101 - for mypy; the rack makes no other
        self.berth, tenant, plan = world, world.tenant, world.rack.plan
        hosts = len(plan.tiers)
        self._policy = replace(
            self._policy,
            rating_w=RATING_W,
            shared=Shared(hosts=hosts, longest_stop_s=self._policy.force_after_s),
            shed=Shed(tier=tenant.tier, highest=max(plan.tiers)) if plan.ordered else None,
        )
        self._noise = stream(world.scene.seed, "own watts")
        self._watts: float | None = None
        self._watts_s = -math.inf
        self._committed_s = math.inf

    def look(self) -> None:
        """Do what is due, and see whether a power-off that was decided has been ordered."""
        super().look()
        world, phase = self.world, self._state.phase
        if isinstance(phase, OnBattery | EmergencyCheckpoint | Holding):
            self.berth.stop_s = budget.stop_s(self._policy, phase.outage.grade)
        elif not isinstance(phase, Shutdown):
            self.berth.stop_s = math.inf
        self.berth.goes_on = isinstance(phase, OnBattery | Holding)
        if not isinstance(phase, Shutdown) or world.host.power is not Power.UP:
            self._committed_s = math.inf
            return
        self._committed_s = min(self._committed_s, world.now_s)
        hold(world.now_s - self._committed_s <= _ORDERED_WITHIN_S, "no host waits for a neighbour")

    def _read(self) -> None:
        self._measure()
        super()._read()

    def _measure(self) -> None:
        """Read this host's own draw, as its BMC reports it."""
        world, watts_kind = self.world, self.berth.tenant.watts
        every_s = _ON_UTILITY_S if world.utility else _ON_BATTERY_S
        if watts_kind is Watts.NONE or isinstance(self._state.phase, Shutdown) or world.now_s - self._watts_s < every_s:
            return
        self._watts_s = world.now_s
        if watts_kind is not Watts.FROZEN or self._watts is None:
            spread = _NOISE if watts_kind is Watts.NOISY else _JITTER
            self._watts = float(round(RATING_W * self.berth.own_load * (1.0 + self._noise.uniform(-spread, spread))))
        watts = self._watts
        self._send(OwnLoad(at_s=world.now_s + self._offset_s, source=OwnSource.BMC, watts=watts))

    def _ordered(self, action: Action) -> HostAnswer:
        if isinstance(action, ResumeTraining) and self.berth.tenant.idle:
            return HostAnswer(after_s=0.5)
        return super()._ordered(action)

    def _signalled(self, action: StopTrainer | TerminateTrainer | ContinueTrainer) -> HostAnswer:
        host = self.world.host
        obeyed = host.paused and not self.world.scene.trainer.draws_on
        hold(not (obeyed and isinstance(action, StopTrainer | TerminateTrainer)), OBEYED)
        return super()._signalled(action)


class Alone(Plain):
    """A host on which nothing looks at the UPS."""

    kills_power = False


Make = Callable[[World], Decider]
_MAKERS: dict[Kind, Make] = {Kind.POWERGUARD: Member, Kind.NUT: Nut, Kind.NONE: Alone}


class RackHostPlay(Stage):
    """The play of one host, as `Stage` has it for a host alone, in pieces: the rack calls `act` at every change."""

    def __init__(self, world: World, decider: Decider, *, idle: bool = False) -> None:
        """idle: no training ever runs there."""
        super().__init__(world, decider, math.inf)
        self.ended = False
        self._idle = idle
        self._went_s: float | None = None
        self._daemon_s = self._resumed_s = math.inf
        self._off_s = 0.0
        self._began_progress_s = WARM_S
        self.lost_s = dict.fromkeys(CAUSES[:-1], 0.0)
        """Seconds without training, by cause."""

    @property
    def next_s(self) -> float:
        """When it wants to act next, unless something happens before."""
        if self.ended or self._went_s is not None:
            return math.inf
        decides_s = self.decider.next_s if self._daemon_s == math.inf else math.inf
        return min(decides_s, self._daemon_s, self._resumed_s)

    def count(self, seconds: float) -> None:
        """Enter that so much time passes as things are now."""
        host = self.world.host
        if self.ended or (host.running and host.power is Power.UP):
            return
        if host.power is Power.UP:
            self.lost_s["boot" if self.world.back.starts else "held"] += seconds
        else:
            self.lost_s["boot" if self.world.utility and host.power is not Power.STOPPING else "stopped"] += seconds

    def boot(self) -> None:
        """Start the daemon before the outage."""
        self.decider.boot(was_off_s=None)

    def act(self) -> None:
        """Do what is due now."""
        if self.ended:
            return
        world, now_s = self.world, self.world.now_s
        try:
            if not world.is_on:
                self._while_off()
            elif self._went_s is not None:
                self._power_is_there()
            if world.is_on:
                self._while_on(now_s)
        except InvariantBroken as violation:
            self.result.violations.append(f"{violation} (at {now_s:.1f} s)")
            self.ended = True

    def _while_off(self) -> None:
        world = self.world
        if self._went_s is None:
            self._went_s = world.now_s
            self._daemon_s = self._resumed_s = math.inf
            self.decider.gone()
            self._account()
        if world.stranded and self._is_calm():
            self.result.stranded = True
            world.press_button()

    def _power_is_there(self) -> None:
        world, site = self.world, self.world.site.host
        resumed_s = site.dirty_s if self._dirty else site.resumed_s
        self._daemon_s = world.now_s + max(0.0, resumed_s - (site.resumed_s - site.boot_s))
        self._resumed_s = world.host.trains_from_s = world.now_s + resumed_s
        self._watched_since_s = math.inf
        self._off_s, self._went_s = self._daemon_s - (self._went_s or 0.0), None

    def _while_on(self, now_s: float) -> None:
        world, host, decider, idle = self.world, self.world.host, self.decider, self._idle
        if now_s >= self._daemon_s:
            self._daemon_s, self._watched_since_s = math.inf, now_s
            decider.boot(was_off_s=self._off_s)
        if now_s >= self._resumed_s:
            self._resumed_s = math.inf
            if not host.training and not decider.waits and not idle:
                host.start_training(now_s)
        while self._daemon_s == math.inf and decider.next_s <= now_s and world.is_on:
            decider.look()
        runs = host.power is Power.UP and self._daemon_s == self._resumed_s == math.inf
        if now_s < world.scene.end_s or not world.utility or not runs:
            return
        if (host.training or idle) and not host.capped and decider.settled and not decider.waits:
            self.ended = True
            decider.end()
        since_s = max(world.scene.end_s, self._watched_since_s)
        hold(now_s - since_s <= PATIENCE_S, "training goes on when utility is back for good")

    @property
    def _loss_s(self) -> float:
        return 0.0 if self._idle else super()._loss_s


@dataclass(slots=True, kw_only=True)
class RackResult:
    """The result of one outage of a rack. hosts: tenants, and how each of them fared."""

    seed: int
    hosts: list[tuple[RackHost, Result]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def judged(self) -> list[Result]:
        """How the hosts with powerguard fared; all hosts, if it is on none."""
        guarded = [result for tenant, result in self.hosts if tenant.kind is Kind.POWERGUARD]
        return guarded or [result for _, result in self.hosts]


class Rack:
    """The hosts of one outage, their battery, and their common time."""

    def __init__(self, seed: int, site: Site, plan: RackPlan, *, make: Make = Member) -> None:
        """Set the scene. make: powerguard, or one with a fault."""
        self.plan, self.seed = plan, seed
        self.now_s = -WARM_S
        scene = draw(seed, site, faults=False)
        pack = self.scene_pack = scene.pack(site)
        self.pack = SharedPack(
            curve=pack.curve, health=pack.health, left=pack.left, dies_at=pack.dies_at, recharge_s=pack.recharge_s
        )
        self.load = 0.0
        self.berths: list[RackWorld] = []
        tenants = draw_tenants(seed, plan)
        for at, tenant in enumerate(tenants):
            own_site = _site_of(site, tenant, len(tenants))
            facts = draw(seed * 1000 + at, own_site, faults=False).trainer
            facts = replace(facts, never_pauses=tenant.never_pauses or facts.never_pauses)
            # All see the same UPS and the same cuts; what their trainers, stops and checkpoints do is their own.
            own = replace(scene, seed=seed * 1000 + at, trainer=facts)
            self.berths.append(RackWorld(own, own_site, tenant=tenant, rack=self, delay_s=at * plan.stagger_s))
        self._weigh()
        makers = {**_MAKERS, Kind.POWERGUARD: make}
        self.seats = [
            RackHostPlay(berth, makers[berth.tenant.kind](berth), idle=berth.tenant.idle) for berth in self.berths
        ]

    def play(self) -> RackResult:
        """Play the outage, until every host trains again."""
        for seat in self.seats:
            seat.boot()
        self._weigh()
        while not all(seat.ended for seat in self.seats):
            self._advance()
            for seat in self.seats:
                seat.act()
            self._weigh()
        result = RackResult(seed=self.seed)
        for berth, seat in zip(self.berths, self.seats, strict=True):
            host_result = seat.finish()
            result.hosts.append((berth.tenant, host_result))
            result.violations += host_result.violations
        result.violations += [*_lost(result), *_out_of_order(self)]
        return result

    def _weigh(self) -> None:
        self.load = sum(berth.own_load for berth in self.berths)

    def _advance(self) -> None:
        """Let time pass for all hosts, to the next moment at which anything changes or a host looks."""
        world = self.berths[0]
        empty_s = math.inf
        if world.output and not world.utility:
            empty_s = self.now_s + self.pack.lasts_s(self.load)
        to_s = min(min(seat.next_s, seat.world.due_s) for seat in self.seats)
        to_s = min(to_s, empty_s)
        # What became due at this very moment comes a hair later.
        to_s = max(to_s, self.now_s + 1e-6) if to_s < math.inf else self.now_s + 1.0
        self.pack.pass_time(to_s - self.now_s, self.load, utility=world.utility)
        for berth, seat in zip(self.berths, self.seats, strict=True):
            seat.count(to_s - self.now_s)
            if to_s >= empty_s:
                berth.run_out(to_s)
            berth.advance(to_s)
        self.now_s = to_s


def _site_of(site: Site, tenant: RackHost, hosts: int) -> Site:
    """Return the site of one host: its share of the load, and its own checkpoint and stop."""
    host = site.host.model_copy(update={"load": site.host.load / hosts, "stop_median_s": tenant.stop_s})
    trainer = site.trainer.model_copy(update={"checkpoint_median_s": tenant.checkpoint_s})
    ups = site.ups.model_copy(update={"standby_load": site.ups.standby_load / hosts})
    return site.model_copy(update={"host": host, "trainer": trainer, "ups": ups})


def _lost(result: RackResult) -> list[str]:
    return [
        f"no host is lost by planning (host {at}, tier {tenant.tier}, at {at_s:.1f} s)"
        for at, (tenant, host_result) in enumerate(result.hosts)
        for at_s, whose in host_result.dirty
        if tenant.kind is Kind.POWERGUARD and whose == "planning"
    ]


def _out_of_order(rack: Rack) -> list[str]:
    """Name every host that committed although one of a lower tier, all else equal, went on drawing."""
    found = []
    for berth in rack.berths if rack.plan.ordered else ():
        for at_s, other in berth.passed:
            until_s = at_s + _TOGETHER_S
            together = any(at_s <= went_s <= until_s for went_s in other.commits)
            if not together and any(each.begin_s <= at_s and until_s < each.end_s for each in berth.scene.cuts):
                tiers = f"tier {berth.tenant.tier} before tier {other.tenant.tier}, at {at_s:.1f} s"
                found.append(f"a higher tier never commits first ({tiers})")
    return found


def least_loss_s(rack: Rack, weight: Callable[[RackHost], float]) -> float:
    """Return the weighted training that no policy can save in this outage, whatever is known beforehand.

    Hosts are kept up or given up, and trained or not, in the order of their weight. What is given up at last loses a
    boot, whose energy, and that of checkpoints, stops and idle hosts, is not counted: so the bound is never too strict.
    """
    site, curve, pack = rack.berths[0].site, rack.pack.curve, rack.scene_pack
    cuts = rack.berths[0].scene.cuts
    weights = sorted((weight(berth.tenant) for berth in rack.berths if not berth.tenant.idle), reverse=True)
    lasts_s = sum(cut.end_s - cut.begin_s for cut in cuts)
    gaps_s = sum(later.begin_s - cut.end_s for cut, later in pairwise(cuts))
    energy = max(0.0, pack.left - pack.dies_at) + pack.health * gaps_s / pack.recharge_s
    sums_of = [sum(weights[:count]) for count in range(len(weights) + 1)]
    losses = []
    for kept in range(len(weights) + 1):
        methods = tuple(
            Spending(1.0 / curve.tau_s(site.host.load * (on + max(0, kept - on) * site.host.paused_load)), sums_of[on])
            for on in range(len(weights) + 1)
        )
        methods = (Spending(0.0, 0.0), *methods) if not kept else methods
        trained_s = most_training(lasts_s, energy, methods)
        if trained_s >= 0.0:
            losses.append(sums_of[-1] * lasts_s - trained_s + (sums_of[-1] - sums_of[kept]) * site.host.resumed_s)
    return max(0.0, min(losses))


# --- Many racks -----------------------------------------------------------------------------------------------
#
# A tier weighs three times as much as the one below it (WORTH). `excess` is the weighted training lost beyond what a
# plan loses that knows the outage beforehand (`least_loss_s`).

WORTH: Final = 3.0
KINDS: Final = {"powerguard": Kind.POWERGUARD, "nut": Kind.NUT}
"""Policies that can run on every host of a rack."""


class TierSample(NamedTuple):
    """How the hosts of one tier fared on average. loss_s: training lost; by_cause: of that, by `CAUSES`."""

    tier: int
    loss_s: float
    by_cause: tuple[float, ...]


class RackSample(NamedTuple):
    """The result of one outage. Seconds of one host's training; loss and excess as the weighted mean over the hosts.

    lost: hosts with powerguard (or all, if it is on none) that lost power by planning, of so many.
    """

    seed: int
    excess_s: float
    loss_s: float
    tiers: tuple[TierSample, ...]
    lost: int
    hosts: int
    violations: tuple[str, ...]


def plan_of(rack: RackSite, policy: str) -> RackPlan:
    """Return the hosts of a site file's rack."""
    tiers = tuple(tier for tier, hosts in enumerate(rack.hosts) for _ in range(hosts))
    return RackPlan(
        tiers=tiers,
        kind=KINDS[policy],
        ordered=len(set(tiers)) > 1,
        others_share=rack.others_share,
        stagger_s=rack.stagger_s,
    )


def weight(tenant: RackHost) -> float:
    """Return what a second of this host's training is worth."""
    return WORTH**tenant.tier


def sample(seed: int, site: Site, plan: RackPlan) -> RackSample:
    """Play one outage."""
    rack = Rack(seed, site, plan)
    least_s = least_loss_s(rack, weight)
    result = rack.play()
    busy = [
        (tenant, host_result.loss_s, (*seat.lost_s.values(), host_result.rollback_s))
        for seat, (tenant, host_result) in zip(rack.seats, result.hosts, strict=True)
        if not tenant.idle
    ]
    whole = sum(weight(tenant) for tenant, _, _ in busy) or 1.0
    loss_s = sum(weight(tenant) * lost_s for tenant, lost_s, _ in busy)
    tiers = []
    for tier in sorted(set(plan.tiers)):
        rows = [(lost_s, by_cause) for tenant, lost_s, by_cause in busy if tenant.tier == tier]
        count = max(1, len(rows))
        by_cause = tuple(sum(each[at] for _, each in rows) / count for at in range(len(CAUSES)))
        tiers.append(TierSample(tier, sum(lost_s for lost_s, _ in rows) / count, by_cause))
    return RackSample(
        seed=seed,
        excess_s=(loss_s - least_s) / whole,
        loss_s=loss_s / whole,
        tiers=tuple(tiers),
        lost=sum(host_result.dirty_by("planning") for host_result in result.judged),
        hosts=len(result.judged),
        violations=tuple(result.violations),
    )


def played(site: Site, options: SimulationOptions, seed: int) -> RackSample:
    """Play one outage of a run of `powerguard simulate --hosts`."""
    return sample(seed, site, plan_of(site.rack, options.policy))


def with_hosts(site: Site, hosts: Sequence[int]) -> Site:
    """Return the site with so many hosts of each tier."""
    return site.model_copy(update={"rack": RackSite.model_validate({**site.rack.model_dump(), "hosts": hosts})})


def report(samples: Sequence[RackSample], site: Site, options: SimulationOptions) -> dict[str, Any]:
    """Return the object that `powerguard simulate --hosts --json` prints."""
    ordered, count = sorted(samples), max(1, len(samples))
    excess = sorted(one.excess_s for one in ordered)
    hosts = ",".join(map(str, site.rack.hosts))

    def again(seed: int) -> str:
        return f"{replace(options, faults=True).reproduce(seed)} --hosts {hosts}"

    def of_tier(at: int) -> dict[str, Any]:
        tiers = [one.tiers[at] for one in ordered]
        causes = {cause: round(sum(each.by_cause[of] for each in tiers) / count, 3) for of, cause in enumerate(CAUSES)}
        tier = tiers[0].tier
        mean_s = round(sum(each.loss_s for each in tiers) / count, 3)
        return {"tier": tier, "hosts": site.rack.hosts[tier], "loss_s_mean": mean_s, **causes}

    return {
        "schema_version": 1,
        "object": "simulate_rack",
        "policy": options.policy,
        "seed": options.seed,
        "site": options.site,
        "hosts": list(site.rack.hosts),
        "outages": len(ordered),
        "excess_s_mean": round(sum(excess) / count, 3),
        "excess_s_p95": round(excess[min(len(excess) - 1, int(0.95 * count))], 3) if excess else 0.0,
        "loss_s_mean": round(sum(one.loss_s for one in ordered) / count, 3),
        "tiers": [of_tier(at) for at in range(len(ordered[0].tiers))] if ordered else [],
        "hosts_judged": sum(one.hosts for one in ordered),
        "planning_dirty_hosts": sum(one.lost for one in ordered),
        "planning_dirty_outages": [{"seed": one.seed, "reproduce": again(one.seed)} for one in ordered if one.lost][
            :MOST_SHOWN
        ],
        "invariant_violations": [
            {"seed": one.seed, "violation": violation, "reproduce": again(one.seed)}
            for one in ordered
            for violation in one.violations
        ],
    }
