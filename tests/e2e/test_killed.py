"""kill -9 of the daemon, anywhere in an outage: the next one goes on with the same outage and the same deadline."""

import random
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.state import Shutdown
from powerguard.daemon.journal import read_all, read_only
from powerguard.sim.demo.story import numbers
from tests.e2e.peers import Trainer
from tests.e2e.rig import BUSY_S, PAUSED, ROOMY, TRAINING, Rig, rig

SLOW_WRITE_S = 1.5
STOP_S = 9.0
KILLS = 12
LASTING: Final = ((PAUSED, 160.0), (TRAINING, 80.0))
"""Some 5 s until the emergency, and then so long that the order still stands when the next daemon is up."""
LASTING_CHECKPOINT_S: Final = 40.0
RESERVE_S: Final = 6
"""Left in the battery at the power-off, for a machine so busy that it waits for its disk as well."""


async def in_the_checkpoint(world: Rig) -> None:
    """The trainer has the order, and is writing."""
    await world.until(lambda: world.trainers[0].orders, "the trainer to be asked")


def latch(world: Rig) -> Shutdown | None:
    """The latch as the journal holds it."""
    with read_only(world.journal) as db:
        state = read_all(db)[0].state
    return state.phase if state is not None and isinstance(state.phase, Shutdown) else None


async def past_the_latch(world: Rig) -> None:
    """The latch is in the journal; a BMC that never answers keeps the power-off from being ordered for 5 s."""
    await world.phase("shutdown")
    assert world.offs() == []


async def after_the_power_off(world: Rig) -> None:
    await world.note("power_off_accepted")


Moment = Callable[[Rig], Awaitable[object]]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(lambda world: world.phase("on_battery"), id="on_battery", marks=pytest.mark.slow),
        pytest.param(in_the_checkpoint, id="checkpoint", marks=pytest.mark.slow),
        pytest.param(lambda world: world.phase("holding"), id="holding"),
    ],
)
async def test_killed_before_the_commit(moment: Moment) -> None:
    """One outage, one checkpoint, one power-off, whenever the daemon dies before the commit; a trainer joins."""
    async with rig(Trainer(write_s=SLOW_WRITE_S), runtime=LASTING) as world:
        world.settings["trainers"][0]["checkpoint_s"] = LASTING_CHECKPOINT_S
        world.settings["budget"]["reserve_s"] = RESERVE_S
        await world.start()
        world.ups.utility = False
        await moment(world)
        await world.kill()
        before = world.one_outage()
        phase_before = numbers(world.notes("phase_changed")[-1])["new"]
        await world.start(wait=False)
        await world.phase("holding")
        await world.note("outage_continued")
        world.wear(ROOMY)  # and now it has far less
        off = await world.off()
        assert world.one_outage() == before
        (continued,) = world.notes("outage_continued")
        assert numbers(continued)["phase"] == phase_before
        (trainer,) = world.trainers
        assert len(trainer.checkpoints) == 1
        assert {order.id for order in trainer.orders} == trainer.checkpoints
        assert world.was_journalled_first(trainer)
        moved = [numbers(line)["new"] for line in world.notes("phase_changed")]
        assert moved == ["on_battery", "emergency_checkpoint", "holding", "shutdown"]
        assert off.ordered
        assert world.ups.alive
        world.no_traceback()


async def test_killed_between_latch_and_power_off() -> None:
    """The latch holds in its boot, whatever the UPS says meanwhile: the next daemon powers off by the same deadline."""
    async with rig(runtime=ROOMY) as world:
        world.settings["budget"]["stop_q95_s"] = STOP_S
        world.settings["bmc"] = {
            "kind": "ipmi-lan",
            "host": "127.0.0.1",
            "port": 9,
            "user": "powerguard",
            "password": world.secret("bmc-password", "of-the-tests"),
        }
        await world.start()
        world.ups.utility = False
        await past_the_latch(world)
        await world.kill()
        outage, latched = world.one_outage(), latch(world)
        assert latched is not None
        assert not latched.force_at_s
        world.ups.utility = True
        await world.start(wait=False)
        off = await world.off()
        await world.note("power_off_accepted")
        after = latch(world)
        assert after is not None
        assert world.one_outage() == outage == after.outage.id
        assert (after.latched_s, after.boot_id) == (latched.latched_s, latched.boot_id)
        assert len(world.notes("phase_changed", new="shutdown")) == 1
        power_off = world.actions("PowerOff")[0]
        # Ready by the old limit of 5 s, and dark by the old deadline; less than 3 s are not given to anybody.
        waited_s = power_off.at_s - latched.latched_s
        assert waited_s < max(5.25, await restarted_at_s(world) - latched.latched_s) + BUSY_S
        dark_s = waited_s + float(str(power_off.payload["force_after_s"]))
        assert abs(dark_s - max(STOP_S, waited_s + 3.0)) < 0.01
        assert after.force_at_s - latched.latched_s < dark_s + 0.01, "never later; sooner where the battery is empty"
        assert off.at_s >= power_off.at_s
        world.no_traceback()


async def restarted_at_s(world: Rig) -> float:
    return (await world.note("outage_continued")).at_s


@pytest.mark.slow
async def test_killed_after_the_power_off() -> None:
    """The word was given: a daemon that starts while the host goes down gives no second deadline, and no new outage."""
    async with rig() as world:
        await world.start()
        world.ups.utility = False
        await after_the_power_off(world)
        await world.kill()
        before = latch(world)
        assert before is not None
        outage = world.one_outage()
        await world.start(wait=False)
        await restarted_at_s(world)
        await world.until(world.status, "the status")
        after = latch(world)
        assert after is not None
        assert after.force_at_s == before.force_at_s
        assert world.one_outage() == outage
        assert len(world.offs()) == 1
        world.no_traceback()


@pytest.mark.parametrize("seed", [20_240_501, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20))])
@pytest.mark.slow
async def test_killed_again_and_again(seed: int) -> None:
    """Twelve kills at any moments of one outage (seeded): still one outage, and the host is powered off in time."""
    dice = random.Random(seed)
    async with rig(Trainer(write_s=1.0), runtime=ROOMY) as world:
        world.settings["trainers"][0]["checkpoint_s"] = 12.0  # so that the order stands for some lives
        await world.start()
        cut_at_s = boottime_s()
        world.ups.utility = False
        await world.note("outage_began")
        for _ in range(KILLS):
            await world.until(lambda: world.process is not None, "a process")
            await pause(world, dice.uniform(0.05, 1.6))
            await world.kill()
            await world.start(wait=False)
        off = await world.off()
        world.one_outage()
        assert len(world.pids) == KILLS + 1
        assert len(world.notes("phase_changed", new="shutdown")) == 1
        assert cut_at_s < off.at_s
        assert world.ups.alive
        trainer = world.trainers[0]
        assert world.was_journalled_first(trainer)
        assert len(trainer.checkpoints) == 1
        world.no_traceback()


async def pause(world: Rig, seconds: float) -> None:
    """Let so much time pass: the moment of a kill is what is random here."""
    until_s = boottime_s() + seconds
    await world.until(lambda: boottime_s() >= until_s, "time to pass")
