"""What powerguard knows of a simulated site beforehand: its settings, and what a drill has measured there."""

from powerguard.core import budget as sums
from powerguard.core.actions import Conduct
from powerguard.core.frozen import replace
from powerguard.core.learned import Drop, Health, Need
from powerguard.core.model import State
from powerguard.core.policy import FeedPolicy, Policy, TrainerPolicy
from powerguard.sim.world.beside import TWIN
from powerguard.sim.world.scene import Scene
from powerguard.sim.world.site import Site
from powerguard.sim.world.streams import stream
from powerguard.sim.world.world import UPS

TRAINER = "llm"
_OLD_MONTHS = 36
_DRILL_CHECKPOINTS = 5


def policy_of(scene: Scene, site: Site) -> Policy:
    """Return what the settings of such a site say: the data sheet's table, and the battery's date."""
    alone = Policy(
        boot_id="simboot1",
        ups=UPS,
        sources=1 if scene.second is None else 2,
        runtime_table=tuple((load / 100.0, float(seconds)) for load, seconds in sorted(site.ups.runtime_table.items())),
        health=0.6 if scene.age_months > _OLD_MONTHS else 0.75,
        recharge_s=site.ups.recharge_h * 3600.0,
        fsd_delay_s=site.faults.fsd_delay_s[0],
        cap_share=site.host.capped_load if site.drill.cap else None,
        signals=site.host.signals,
        trainers=(TrainerPolicy(name=TRAINER, conduct=Conduct.PAUSE, disk="local"),),
        ways=scene.returns.ways,
        outputs=(UPS,) if scene.returns.output else (),
        ups_off_s=sums.CUT_GUARD_S if scene.returns.output else 0.0,
        late_reboot=scene.returns.late,
    )
    if not scene.beside.twin:
        return alone
    feeds = tuple(FeedPolicy(policy=replace(alone, ups=name)) for name in (UPS, TWIN))
    return replace(alone, feeds=feeds, minimum_supplies=scene.beside.needed)


def drilled(scene: Scene, site: Site, state: State) -> State:
    """Return the state as a drill on this host would have left it; what it measures, the site file says."""
    host, at_s = site.host, state.battery.at_s
    if site.drill.done:
        health = Health(
            share=scene.measured_health, error=max(site.drill.health_error, 0.01), depth=0.5, at_s=at_s, how="drill"
        )
        chance = stream(scene.seed, "drill checkpoints")
        trainer = site.trainer
        took = tuple(
            trainer.checkpoint_median_s * chance.lognormvariate(0.0, trainer.checkpoint_spread)
            for _ in range(_DRILL_CHECKPOINTS)
        )
        pause = Drop(before=host.load, after=host.load * host.paused_load, at_s=at_s)
        learned = replace(
            state.learned, pauses=((TRAINER, pause),), needs=(Need(of="checkpoint", name=TRAINER, seconds=took),)
        )
        battery = replace(state.battery, model=replace(state.battery.model, health=health), health=health.share)
        state = replace(state, learned=learned, battery=battery)
    if site.drill.cap:
        cap = Drop(before=host.load, after=host.load * host.capped_load, at_s=at_s, speed=host.capped_speed)
        state = replace(state, learned=replace(state.learned, cap=cap))
    return state
