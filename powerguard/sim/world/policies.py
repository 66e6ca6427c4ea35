"""The deciders that are compared: powerguard, the usual tools, and the oracle. A seed is one world for all.

`Fixed`, `Nut` and `Apcupsd` are what people use today, by the defaults of upsmon.conf (wait for low battery) and of
apcupsd.conf (BATTERYLEVEL, MINUTES, ONBATTERYDELAY). None of them knows what a trainer is.

`Informed` is powerguard's rule with the truth: it knows the battery and what a pause brings, and acts at the very
moment. It keeps the rule's margins, because it does not know the outage. Its moments are computed, so it costs little
to play.

`best` is the oracle: in hindsight the best of all these. `bound` is what no policy can beat: a plan that knows
everything and keeps no margin. Training on battery costs energy, pausing little, off nothing. So each family of plans
(ride through, pause and hold, checkpoint and shut down) is a small linear programme, solved at its corners. What is
recharged between two cuts counts from the start, and a host that is off stays off until utility is back for good, so
the bound is never too strict.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Final, NamedTuple

from powerguard.core.model.actions import Conduct
from powerguard.daemon.observe.figures import USUAL_LOOK_S, USUAL_SLEEP_S
from powerguard.sim.world.battery import GaugeReading
from powerguard.sim.world.chance import stream, uniform
from powerguard.sim.world.guarded import Guarded
from powerguard.sim.world.report import Return, returned
from powerguard.sim.world.run import Decider, Result, play
from powerguard.sim.world.scene import Scene, draw
from powerguard.sim.world.site import Site
from powerguard.sim.world.world import World

_NUT_HALT_S = 10.0
_APC_BATTERY_PCT = 5.0
_APC_RUNTIME_S = 180.0
_APC_ON_BATTERY_S = 6.0
_KILLPOWER_S = 20.0
_NO_FORCE_S = 1e9
"""Nothing cuts their stop short: systemd's own limits are in how long a stuck stop takes."""


class Plain:
    """A policy of one rule, which reads the UPS every few seconds. Training starts by itself after a boot."""

    waits = False
    settled = True
    kills_power = True
    every_s = USUAL_LOOK_S

    def __init__(self, world: World) -> None:
        self.world = world
        self.next_s = world.now_s
        self._since_s: float | None = None
        self._halt_at_s = math.inf

    def boot(self, *, was_off_s: float | None) -> None:
        """Start afresh: they keep nothing over a boot."""
        del was_off_s
        self._since_s, self._halt_at_s = None, math.inf
        self.next_s = self.world.now_s

    def look(self) -> None:
        """Read the UPS, and apply the rule."""
        world = self.world
        if world.now_s >= self._halt_at_s:
            self.next_s = math.inf
            world.power_off(_NO_FORCE_S)
            return
        self.next_s = world.now_s + self.every_s
        if world.utility:
            self._since_s = None
            # Nothing to be seen until utility goes: on to the first look after that.
            looks = max(0, math.floor(min(world.next_edge_s - world.now_s, 300.0) / self.every_s))
            self.next_s += looks * self.every_s
            return
        if not world.answers():
            return
        reading = world.read_gauge()
        if self._since_s is None:
            self._since_s = world.now_s
        wait_s = self.rule(reading)
        if wait_s is not None:
            self.next_s = self._halt_at_s = world.now_s + wait_s

    def rule(self, reading: GaugeReading) -> float | None:
        """Return after how many seconds the host is to be stopped, or None. This one never stops it.

        reading: by the gauge, on battery.
        """
        del reading
        return None

    def gone(self) -> None:
        """Off: a killpower at the end of the stop has the UPS cycle its output, whether utility is back or not."""
        if self.kills_power and self.world.output:
            self.world.cycle(_KILLPOWER_S)
        self.next_s = math.inf

    def end(self) -> None:
        """Nothing to object."""

    @property
    def _on_battery_s(self) -> float:
        return -1.0 if self._since_s is None else self.world.now_s - self._since_s


class Fixed(Plain):
    """A script: on battery, trigger a checkpoint, sleep 50, halt. The UPS never gets the order to cycle."""

    kills_power = False

    def rule(self, reading: GaugeReading) -> float | None:
        """Fire at the first look on battery; nothing calls it back."""
        del reading
        self.world.host.checkpoint(self.world.now_s, Conduct.CONTINUE)
        return USUAL_SLEEP_S


class Nut(Plain):
    """upsmon as it comes: wait for low battery, then FSD, FINALDELAY and SHUTDOWNCMD; no checkpoint."""

    def rule(self, reading: GaugeReading) -> float | None:
        """Low battery on battery, or FSD set by another."""
        return _NUT_HALT_S if reading.low_battery or self.world.is_ordered_down else None


class Apcupsd(Plain):
    """apcupsd as it comes: BATTERYLEVEL 5, MINUTES 3, ONBATTERYDELAY 6, or the UPS's own low battery."""

    every_s = 2.0

    def rule(self, reading: GaugeReading) -> float | None:
        """Whichever limit is reached first."""
        if self._on_battery_s < _APC_ON_BATTERY_S:
            return None
        low = reading.low_battery
        low = low or (reading.charge_pct is not None and reading.charge_pct <= _APC_BATTERY_PCT)
        low = low or (reading.runtime_s is not None and reading.runtime_s <= _APC_RUNTIME_S)
        return 0.0 if low else None


_CAP_DWELL_S = 10.0
_RESUME_S = 10.0
_LIFT_S = 30.0
_STOP_S = 110.0
_RESERVE_S = 60.0
_MARGIN, _FLOOR, _SLACK = 0.2, 0.1, 0.75
_LOOK_S = 5.0


class Informed:
    """A `Decider` that needs no gauge. caps: it may slow training down on battery."""

    def __init__(self, world: World, *, caps: bool) -> None:
        self.world = world
        self.next_s = world.now_s
        self._caps = caps
        self._turned_s = -math.inf
        self._utility = True
        self._durable_s: float | None = None
        self._going = False
        tau_paused_s = world.pack.curve.tau_s(world.site.host.load * world.site.host.paused_load)
        need_s = world.scene.trainer.estimate_s + _STOP_S + _RESERVE_S
        self._pause_at = _energy_for(need_s / _SLACK / tau_paused_s)
        self._stop_at = _energy_for((_STOP_S + _RESERVE_S) / tau_paused_s)

    @property
    def waits(self) -> bool:
        """It starts training itself, once utility is stable."""
        return self._durable_s is None and not self._going

    @property
    def settled(self) -> bool:
        """Nothing is paused any more."""
        return self._durable_s is None

    def boot(self, *, was_off_s: float | None) -> None:
        """Start again."""
        del was_off_s
        self._durable_s, self._going = None, False
        self._utility = True
        self._turned_s = -math.inf
        self.next_s = self.world.now_s

    def look(self) -> None:
        """Do what is due, and compute when the next thing is."""
        world = self.world
        if world.utility is not self._utility:
            self._utility, self._turned_s = world.utility, world.now_s
        due_s = math.inf
        if not self._going:
            due_s = self._on_utility() if world.utility else self._on_battery()
        self.next_s = max(world.now_s + 0.05, min(due_s, world.next_edge_s, world.now_s + 600.0))

    def gone(self) -> None:
        """Off."""
        self.next_s = math.inf

    def end(self) -> None:
        """Nothing to object."""

    def _on_utility(self) -> float:
        """Go on in place once utility is stable; lift the cap later."""
        world, due_s = self.world, math.inf
        if self._durable_s is not None:
            due_s = max(self._turned_s + _RESUME_S, min(self._durable_s, self._turned_s + 60.0))
            if world.now_s >= due_s:
                world.host.resume(world.now_s)
                self._durable_s, due_s = None, world.now_s + 1.0
        if not world.host.training and self._durable_s is None:
            start_s = self._turned_s + _RESUME_S
            if world.now_s >= start_s:
                world.host.start_training(world.now_s)
                start_s = world.now_s + _LOOK_S
            due_s = min(due_s, start_s)
        if world.host.capped:
            lift_s = self._turned_s + _LIFT_S
            if world.now_s >= lift_s:
                world.host.cap(world.now_s, on=False)
                lift_s = world.now_s + 1.0
            due_s = min(due_s, lift_s)
        return min(due_s, world.now_s + _LOOK_S)

    def _on_battery(self) -> float:
        """Cap, then pause and checkpoint, then hold, then stop: each at its share of the battery."""
        world, now_s = self.world, self.world.now_s
        host, left = world.host, world.pack.left
        if left <= self._stop_at + 1e-9:
            self._going = True
            world.power_off(_STOP_S)
            return math.inf
        tau_s = world.pack.curve.tau_s(world.load)
        if not host.training or self._durable_s is not None:
            return now_s + min((left - self._stop_at) * tau_s, _LOOK_S)
        if left <= self._pause_at + 1e-9:
            answer = host.checkpoint(now_s, Conduct.PAUSE)
            self._durable_s = now_s + answer.after_s
            return now_s + 1.0
        pause_s = now_s + (left - self._pause_at) * tau_s
        if self._caps and not host.capped:
            cap_s = self._turned_s + _CAP_DWELL_S
            if now_s >= cap_s:
                host.cap(now_s, on=True)
                return now_s + 1.0
            pause_s = min(pause_s, cap_s)
        return pause_s


def _energy_for(needed: float) -> float:
    """The energy left at which what may be planned with is just `needed` (as the core's budget has it)."""
    return max(needed / (1.0 - _MARGIN), needed + _FLOOR)


@dataclass(frozen=True, slots=True)
class Bound:
    """The least training time that could be lost, and how: "ride", "hold", "shutdown", or "dark" (power lost)."""

    loss_s: float
    how: str


@dataclass(frozen=True, slots=True)
class Spending:
    """A way to spend a second on battery: the energy it takes and the training it yields."""

    energy: float
    yields: float


def bound(scene: Scene, site: Site) -> Bound:
    """Return the bound of one scene."""
    host, curve = site.host, scene.curve
    per_s = 1.0 / curve.tau_s(host.load)
    train = Spending(per_s, 1.0)
    cap = Spending(1.0 / curve.tau_s(host.load * host.capped_load), host.capped_speed)
    idle_energy = 1.0 / curve.tau_s(host.load * host.paused_load)
    pause = train if scene.trainer.never_pauses else Spending(idle_energy, 0.0)
    off = Spending(0.0, 0.0)
    energy = max(0.0, scene.health * scene.charge - scene.dies_at)
    checkpoint_s, stop_s = _durations(scene, site)
    plans: list[Bound] = []
    lasted_s, gained = 0.0, 0.0
    for at, cut in enumerate(scene.cuts):
        if at:
            gap_s = cut.begin_s - scene.cuts[at - 1].end_s
            gained += scene.health * gap_s / (site.ups.recharge_h * 3600.0)
        length_s, cut_off = cut.end_s - cut.begin_s, False
        order = scene.order
        if order is not None and cut.begin_s <= order.at_s < cut.end_s:
            length_s, cut_off = min(length_s, max(0.0, order.at_s + order.delay_s - cut.begin_s)), True
        whole_s = lasted_s + length_s
        # From the end of this plan's training on battery to the end of the last cut nothing is done any more.
        missed_s = scene.end_s - cut.begin_s - length_s
        stopping = (checkpoint_s + stop_s) * idle_energy
        if (spare := energy + gained - stopping) >= 0.0:
            trained_s = most_training(whole_s, spare, (train, cap, off))
            plans.append(Bound(missed_s + whole_s - trained_s + host.resumed_s, "shutdown"))
        trained_s = most_training(whole_s, energy + gained, (train, cap, off))
        plans.append(Bound(missed_s + whole_s - trained_s + host.dirty_s, "dark"))
        if cut_off:
            return min(plans, key=lambda plan: plan.loss_s)
        lasted_s = whole_s
    held_s = most_training(lasted_s, energy + gained, (train, cap, pause))
    if held_s >= 0.0:
        plans.append(Bound(lasted_s - held_s, "ride" if held_s >= lasted_s else "hold"))
    return min(plans, key=lambda plan: plan.loss_s)


def _durations(scene: Scene, site: Site) -> tuple[float, float]:
    """The durations of the first checkpoint and the first stop of this host."""
    checkpoints, stops = stream(scene.seed, "checkpoints"), stream(scene.seed, "stops")
    trainer, host = site.trainer, site.host
    checkpoint_s = trainer.checkpoint_median_s * checkpoints.lognormvariate(0.0, trainer.checkpoint_spread)
    takes_s = host.stop_median_s * stops.lognormvariate(0.0, host.stop_spread)
    stuck = stops.random() < host.stop_stuck_share
    stop_s = uniform(stops, host.stop_stuck_s) if stuck else min(takes_s, host.stop_stuck_s[0])
    return checkpoint_s, stop_s


def most_training(seconds: float, energy: float, ways: tuple[Spending, ...]) -> float:
    """Return the most training that so many seconds can yield with so much energy; -1 where nothing lasts so long."""
    found = -1.0
    for way in ways:
        if way.energy * seconds <= energy:
            found = max(found, way.yields * seconds)
    for one, other in combinations(ways, 2):
        if one.energy == other.energy:
            continue
        # Both bounds are tight at a corner: all the seconds, and all the energy.
        of_one = (energy - other.energy * seconds) / (one.energy - other.energy)
        if 0.0 <= of_one <= seconds:
            found = max(found, one.yields * of_one + other.yields * (seconds - of_one))
    return found


_LISTED: Final[Mapping[str, Callable[[World], Decider]]] = {
    "informed, capped": partial(Informed, caps=True),
    "informed": partial(Informed, caps=False),
    "nut": Nut,
    "apcupsd": Apcupsd,
    "fixed": Fixed,
}
"""What the oracle compares; the judged policy is always one of them, too."""


def best(scene: Scene, site: Site, *, but: str = "", at_most_s: float = math.inf) -> Result:
    """Return the result of the listed policy that lost least. but: one that need not be played again.

    at_most_s: a policy that loses that much is not played to the end; the returned one may be one of them, if all did.
    """
    results: list[Result] = []
    for name, make in _LISTED.items():
        if name != but:
            results.append(play(scene, site, make, at_most_s=at_most_s))
            at_most_s = min(at_most_s, results[-1].loss_s)
    return min(results, key=lambda result: result.loss_s)


MAKERS: Final[Mapping[str, Callable[[World], Decider]]] = {
    "powerguard": Guarded,
    "fixed": Fixed,
    "nut": Nut,
    "apcupsd": Apcupsd,
}
ORACLE: Final = "oracle"


class Judged(NamedTuple):
    """A result, and the training time lost beyond the oracle's, and beyond the bound; and the way back."""

    result: Result
    excess_s: float
    beyond_bound_s: float
    back: Return


def one(seed: int, site: Site, policy: str, *, faults: bool) -> Judged:
    """Play one outage."""
    scene = draw(seed, site, faults=faults)
    least_s = bound(scene, site).loss_s
    result = best(scene, site) if policy == ORACLE else play(scene, site, MAKERS[policy])
    excess_s = 0.0
    if policy != ORACLE and result.loss_s > least_s:
        excess_s = max(0.0, result.loss_s - best(scene, site, but=policy, at_most_s=result.loss_s).loss_s)
    back = returned(scene, result.wakers, result.waited_s, arms=policy == "powerguard")
    return Judged(result, excess_s, max(0.0, result.loss_s - least_s), back)
