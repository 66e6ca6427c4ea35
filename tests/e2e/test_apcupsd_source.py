"""Outages that the daemon knows of through a real apcupsd alone."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from powerguard.ups.apcupsd.protocol import Flag
from tests.e2e.rig import ENDLESS, LONG, Rig, rig
from tests.peers.apcupsd import Apcupsd, apcupsd, scripts

pytestmark = pytest.mark.peer("apcupsd")


@contextlib.asynccontextmanager
async def through_apcupsd(world: Rig, **options: object) -> AsyncIterator[Apcupsd]:
    """Put an apcupsd between the UPS and the daemon. It shuts nothing down: its apccontrol does nothing."""
    assert world.agent is not None
    device = f"127.0.0.1:{world.agent.port}:APC_NOTRAP:public"
    with scripts() as made:
        made.add("apccontrol", "#!/bin/sh\nexit 0\n")
        async with apcupsd("snmp", device, scripts_=made, settings={"MINUTES": 0, "BATTERYLEVEL": 0}) as running:
            world.between.append(running.process.pid)
            await running.until(lambda status: bool(status.flags & Flag.ONLINE))
            source = {"kind": "apcupsd", "port": running.port, "poll_s": 0.25, **options}
            world.settings["ups"]["rack-a"]["sources"] = [source]
            yield running


async def test_an_outage_to_the_end() -> None:
    """Battery, checkpoint, power-off: before the battery is empty, and in that order."""
    async with rig(runtime=LONG) as world, through_apcupsd(world):
        await world.start()
        world.ups.utility = False
        await world.phase("on_battery")
        off = await world.off()
        assert off.ordered
        assert world.ups.alive
        assert world.trainers[0].committed()
        world.one_outage()
        world.no_traceback()


async def test_utility_back_in_time() -> None:
    async with rig(runtime=ENDLESS) as world, through_apcupsd(world):
        await world.start()
        world.ups.utility = False
        await world.phase("on_battery")
        world.ups.utility = True
        await world.until(lambda: bool(world.notes("phase_changed", new="online")), "online")
        assert world.offs() == []
        world.no_traceback()


@pytest.mark.slow
async def test_story_9_an_apcupsd_that_dies_on_battery_ends_in_dead_reckoning() -> None:
    """The last word was battery: no reset, no hope; the host is off while the battery still lasts."""
    async with rig(runtime=LONG) as world, through_apcupsd(world) as running:
        await world.start()
        world.ups.utility = False
        await world.phase("on_battery")
        running.process.kill()
        off = await world.off()
        assert off.ordered
        assert world.ups.alive
        world.one_outage()
        world.no_traceback()


async def test_beside_the_card_it_is_a_second_source() -> None:
    """Two sources of one UPS: apcupsd dies in the outage, and nothing is lost but a witness.

    If its last word was "battery", that counts for a minute: the battery lasts longer.
    """
    async with rig(runtime=ENDLESS) as world:
        assert world.agent is not None
        async with through_apcupsd(world) as running:
            world.add_snmp(world.agent.port)
            await world.start()
            world.ups.utility = False
            await world.phase("on_battery")
            running.process.kill()
            world.ups.utility = True
            await world.until(lambda: bool(world.notes("phase_changed", new="online")), "online")
        assert world.offs() == []
        world.no_traceback()
