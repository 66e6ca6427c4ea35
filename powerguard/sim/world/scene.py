"""All that chance decides of one outage, drawn beforehand: the same seed gives every policy the same world."""

import math
from dataclasses import dataclass, field, replace
from random import Random

from powerguard.sim.world import chance
from powerguard.sim.world.back import ReturnFacts, draw_returns
from powerguard.sim.world.battery import Curve, Gauge, GaugeFacts, GaugeKind, Pack
from powerguard.sim.world.chance import (
    Cut,
    SecondSourceFacts,
    SurroundingFacts,
    draw_second,
    draw_surroundings,
    stream,
    uniform,
)
from powerguard.sim.world.site import Site

_TORN_TWICE_SHARE = 0.3
"""Share of torn checkpoints whose predecessor is torn, too."""
_SILENT_FIELDS = ("runtime", "charge", "load", "on_battery_s", "input_present")
_NOISE_S = 61
"""After so many seconds the noise of a load begins again."""
NEVER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """Another program orders the UPS's output off. kind: "countdown" or "fsd"; at_s: when; delay_s: until it is off."""

    kind: str
    at_s: float
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """How this trainer behaves. pause_late_s: beyond a step; dies: it does when asked. saved_ago_s: its last save.

    draws_on: it pauses when asked, and its GPUs draw on. mute: it does not answer, and trains on. spins: stopped
    by a signal, its GPUs draw on all the same, until it is ended.

    joins: asked while it writes, it answers with what it writes. disk_full: nothing new becomes durable. rank_lost_s:
    its checkpoints fail after so long, for want of a rank; inf: they do not. torn: how many of the newest acknowledged
    ones turn out torn when it resumes. copied_ago_s: from the last copy in the second tier to saved_ago_s.
    """

    estimate_s: float
    pause_late_s: float = 0.0
    never_pauses: bool = False
    draws_on: bool = False
    mute: bool = False
    spins: bool = False
    dies: bool = False
    saved_ago_s: float = 0.0
    joins: bool = False
    disk_full: bool = False
    rank_lost_s: float = math.inf
    torn: int = 0
    copied_ago_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One outage's facts. Times are seconds since utility failed first.

    health: true share of a new battery. charge: of that, at the start. dies_at: energy left where a bad cell ends it.
    measured_health: what a drill would have found. age_months: of the battery, as an operator would know it.
    silences: (from, to) in which the source says nothing. kills: (at, away) of the daemon. always_on: the BMC's policy.
    wall_error_s: by how much the wall clock is wrong after a boot. second: another source of the same UPS.
    surroundings: this host's network, and another UPS. returns: what brings the host back.
    """

    seed: int
    cuts: tuple[Cut, ...]
    curve: Curve
    health: float
    charge: float
    dies_at: float
    measured_health: float
    age_months: int
    gauge: GaugeFacts
    trainer: TrainerFacts
    silences: tuple[tuple[float, float], ...] = ()
    kills: tuple[tuple[float, float], ...] = ()
    order: StopOrder | None = None
    always_on: bool = True
    bmc_refuses: bool = False
    wall_error_s: float = 0.0
    second: SecondSourceFacts | None = None
    surroundings: SurroundingFacts = field(default_factory=SurroundingFacts)
    returns: ReturnFacts = field(default_factory=ReturnFacts)

    @property
    def end_s(self) -> float:
        """When utility is back for good; at the beginning if it was never gone."""
        return self.cuts[-1].end_s if self.cuts else 0.0

    def pack(self, site: Site) -> Pack:
        """Return the battery as it is when utility fails."""
        return Pack(
            curve=self.curve,
            health=self.health,
            left=self.health * self.charge,
            dies_at=self.dies_at,
            recharge_s=site.ups.recharge_h * 3600.0,
        )

    def new_gauge(self) -> Gauge:
        """Return the UPS's gauge."""
        return Gauge(self.gauge, stream(self.seed, "gauge glitches"))


def draw(seed: int, site: Site, *, faults: bool) -> Scene:
    """Draw one outage."""
    ups = site.ups
    battery = stream(seed, "battery")
    health = uniform(battery, ups.health)
    cell = stream(seed, "bad cell")
    charge = _charge(seed, site, faults=faults)
    bad, at = cell.random() < ups.bad_cell_share, cell.random()
    points = tuple((load / 100.0, float(seconds)) for load, seconds in sorted(ups.runtime_table.items()))
    measured = uniform(stream(seed, "drill"), (-site.drill.health_error, site.drill.health_error))
    trainer_chance = stream(seed, "trainer")
    dies_at = health * charge * at if bad else 0.0
    gauge, silent = _gauge(seed, site, faults=faults)
    if silent:
        gauge = replace(gauge, silent=frozenset((silent,)))
    cuts = chance.sample(seed, site.outage, faults=faults)
    second = draw_second(seed, site.faults) if faults else None
    surroundings = draw_surroundings(seed, site.faults, cuts) if faults else SurroundingFacts()
    if second is not None or site.drill.done:
        # One complication at a time.
        surroundings = SurroundingFacts(network=surroundings.network if second is None else None)
    return Scene(
        seed=seed,
        cuts=cuts,
        curve=Curve(points=points, loss=uniform(battery, ups.below_table_loss)),
        health=health,
        charge=charge,
        dies_at=dies_at,
        measured_health=min(1.0, max(0.05, (health + measured) * site.drill.health_factor)),
        # Ten points of health in a year is what the core assumes; a battery is no calendar.
        age_months=max(0, round((1.0 - health) * 120.0 + battery.uniform(-12.0, 12.0))),
        gauge=gauge,
        trainer=_trainer(trainer_chance, seed, site, faults=faults),
        silences=_silences(seed, site) if faults else (),
        kills=_kills(seed, site) if faults else (),
        order=_order(seed, site) if faults else None,
        always_on=stream(seed, "bmc policy").random() < site.host.always_on_share,
        bmc_refuses=faults and stream(seed, "bmc").random() < site.faults.bmc_refuses_share,
        wall_error_s=_wall_error_s(seed, site) if faults else 0.0,
        second=second,
        surroundings=surroundings,
        returns=draw_returns(seed, site.returns, faults=faults),
    )


def _charge(seed: int, site: Site, *, faults: bool) -> float:
    chance = stream(seed, "charge")
    charge, low, how_low = uniform(chance, site.ups.charge), chance.random(), uniform(chance, site.faults.low_charge)
    return min(charge, how_low) if faults and low < site.faults.low_charge_share else charge


def _gauge(seed: int, site: Site, *, faults: bool) -> tuple[GaugeFacts, str]:
    ups, chance, noise = site.ups, stream(seed, "gauge"), stream(seed, "gauge noise")
    kind = GaugeKind.COULOMB if chance.random() < ups.coulomb_share else GaugeKind.PROPORTIONAL
    facts = GaugeFacts(
        kind=kind,
        error=1.0 + chance.uniform(-ups.gauge_error, ups.gauge_error),
        minutes=chance.random() < ups.minutes_share,
        lag_s=uniform(chance, ups.smoothing_s),
        knee=uniform(chance, ups.knee),
        by_voltage=chance.random() < ups.knee_flag_share,
        low_battery_s=ups.low_battery_s,
        noise=tuple(noise.uniform(-ups.load_noise, ups.load_noise) for _ in range(_NOISE_S)),
        glitch_rate=site.faults.glitch_rate if faults or site.faults.glitches_always else 0.0,
    )
    silence = stream(seed, "silent field")
    mute, which = silence.random() < site.faults.silent_field_share, silence.choice(_SILENT_FIELDS)
    return facts, which if faults and mute else ""


def _trainer(chance: Random, seed: int, site: Site, *, faults: bool) -> TrainerFacts:
    trainer = site.trainer
    saved_ago_s = chance.random() * trainer.local_every_s
    never = chance.random() < trainer.never_pauses_share
    late_s = trainer.pause_late_s
    broken = stream(seed, "trainer faults")
    dies, late, stuck = (broken.random() for _ in range(3))
    how_late_s = uniform(broken, site.faults.late_pause_s)
    ladder = stream(seed, "trainer ladder")
    draws, mute, draws_broken, mute_broken, spins = (ladder.random() for _ in range(5))
    protocol = stream(seed, "trainer protocol")
    joins, full, lost, torn = (protocol.random() for _ in range(4))
    lost_s, how_torn = uniform(protocol, site.faults.rank_lost_s), 1 + (protocol.random() < _TORN_TWICE_SHARE)
    copied_ago_s = protocol.random() * trainer.remote_every_s
    if faults:
        late_s = max(late_s, how_late_s if late < site.faults.late_pause_share else 0.0)
        never = never or stuck < site.faults.never_pauses_share
    return TrainerFacts(
        estimate_s=trainer.estimate * trainer.checkpoint_median_s,
        pause_late_s=late_s,
        never_pauses=never,
        draws_on=draws < trainer.draws_on_share or (faults and draws_broken < site.faults.draws_on_share),
        mute=mute < trainer.mute_share or (faults and mute_broken < site.faults.mute_share),
        spins=spins < trainer.spins_share,
        dies=faults and dies < site.faults.trainer_dies_share,
        saved_ago_s=saved_ago_s,
        joins=faults and joins < site.faults.joins_share,
        disk_full=faults and full < site.faults.disk_full_share,
        rank_lost_s=lost_s if faults and lost < site.faults.rank_lost_share else math.inf,
        torn=how_torn if faults and torn < site.faults.torn_share else 0,
        copied_ago_s=copied_ago_s,
    )


def _silences(seed: int, site: Site) -> tuple[tuple[float, float], ...]:
    chance = stream(seed, "source")
    if chance.random() >= site.faults.source_lost_share:
        return ()
    begin_s = chance.uniform(-5.0, 600.0)
    for_ever = chance.random() < site.faults.source_gone_share
    return ((begin_s, NEVER_S if for_ever else begin_s + uniform(chance, site.faults.source_lost_s)),)


def _kills(seed: int, site: Site) -> tuple[tuple[float, float], ...]:
    chance = stream(seed, "daemon")
    if chance.random() >= site.faults.daemon_killed_share:
        return ()
    kills, at_s = [], 0.0
    for _ in range(chance.randint(1, 3)):
        at_s += chance.expovariate(1.0 / 150.0)
        away_s = uniform(chance, site.faults.daemon_away_s)
        kills.append((at_s, away_s))
        at_s += away_s
    return tuple(kills)


def _order(seed: int, site: Site) -> StopOrder | None:
    chance = stream(seed, "other daemons")
    which, at_s = chance.random(), chance.uniform(2.0, 600.0)
    faults = site.faults
    if which < faults.countdown_share:
        return StopOrder(kind="countdown", at_s=at_s, delay_s=uniform(chance, faults.countdown_s))
    if which < faults.countdown_share + faults.fsd_share:
        return StopOrder(kind="fsd", at_s=at_s, delay_s=uniform(chance, faults.fsd_delay_s))
    return None


def _wall_error_s(seed: int, site: Site) -> float:
    chance = stream(seed, "wall clock")
    if chance.random() >= site.faults.clock_step_share:
        return 0.0
    return float(chance.choice((-1e9, -86400.0, -300.0, 300.0, 86400.0, 1e9)))
