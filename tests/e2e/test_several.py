"""Two UPSes that feed one host, and two sources of one UPS: the real daemon, on real protocols."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from powerguard.clock import boottime_s
from powerguard.sim.ups import SimUps, UpsBattery
from tests.e2e.peers import Trainer
from tests.e2e.rig import ENDLESS, ROOMY, TRAINING, Rig, rig
from tests.peers.snmp_agent import Fault, SnmpAgent

pytestmark = pytest.mark.xdist_group("several")


@contextlib.asynccontextmanager
async def second_feed(world: Rig, runtime: tuple[tuple[float, float], ...], *, needed: int) -> AsyncIterator[SimUps]:
    """Another UPS of the same size, with a power supply of the host on it, and room for what the first one carries."""
    battery = UpsBattery(runtime=runtime, health=0.5, recharge_s=36.0)
    ups = SimUps(battery, clock=boottime_s, load=lambda: 0.5 * world.load, low_battery_s=0.1)
    async with SnmpAgent(ups.apc_table) as agent:
        source = {"kind": "snmp", "host": "127.0.0.1", "port": agent.port, "poll_s": 0.5, "timeout_s": 0.5}
        table = world.settings["ups"]["rack-a"]["runtime_table"]
        world.settings["ups"]["rack-b"] = {"sources": [source], "runtime_table": table}
        world.settings["feeds"] = {"supplies": ["rack-a", "rack-b"], "minimum_supplies": needed}
        yield ups


async def test_one_feed_of_two_is_no_outage_and_both_are() -> None:
    """The first cut is an alarm. The second one is the outage, and the trainer is saved before the host goes."""
    async with rig(Trainer(), runtime=ROOMY) as world, second_feed(world, ROOMY, needed=1) as other:
        await world.start()
        world.ups.utility = False
        await world.note("redundancy_lost_raised")
        feeds = [("rack-a", "battery"), ("rack-b", "utility")]
        await world.status_shows(
            lambda status: [(feed["name"], feed["supply"]) for feed in status["feeds"]] == feeds, "one feed on battery"
        )
        status = await world.status()
        assert status is not None
        assert (status["phase"], status["supply"]) == ("online", "utility")
        await world.metric_becomes('powerguard_ups_on_battery{ups="rack-a"}', 1.0)
        await world.metric_becomes('powerguard_ups_on_battery{ups="rack-b"}', 0.0)
        assert not world.notes("outage_began")
        other.utility = False
        await world.note("outage_began")
        await world.note("checkpoint_durable")
        await world.off()
        assert world.notes("checkpoint_durable")[0].at_s < world.actions("PowerOff")[0].at_s
        world.one_outage()
        world.no_traceback()


async def test_one_feed_is_an_outage_where_both_are_needed_and_its_return_ends_it() -> None:
    async with rig(Trainer(), runtime=ENDLESS) as world, second_feed(world, ENDLESS, needed=2) as other:
        await world.start()
        other.utility = False
        await world.note("outage_began")
        other.utility = True
        await world.note("outage_ended")
        assert not world.offs()
        world.no_traceback()


async def test_a_second_source_goes_on_where_the_first_falls_silent() -> None:
    """The card dies in the outage; the other one sees the end of it, and nothing is powered off."""
    async with rig(Trainer(), runtime=ENDLESS) as world, SnmpAgent(world.ups.apc_table) as agent:
        world.add_snmp(agent.port)
        await world.start()
        world.ups.utility = False
        began = await world.note("outage_began")
        assert began.because in ("second_reading", "second_source", "on_battery_s", "input_present", "alarms")
        assert world.agent is not None
        world.agent.fault = Fault.DROP
        await world.note("source_lost")
        world.ups.utility = True
        await world.note("outage_ended")
        assert not world.offs()
        await world.status_shows(
            lambda status: [source["says"] for source in status["sources"]][1] == "utility",
            "what the second source says",
        )
        assert world.load == TRAINING
        world.no_traceback()
