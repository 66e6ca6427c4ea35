"""Layer B end to end: the real daemon orders the output off at the commit, by SETs, and once, whenever it is killed."""

from collections.abc import Mapping

import pytest

from powerguard.clock import boottime_s
from powerguard.sim.demo.story import numbers
from powerguard.sim.snmp_values import SimValue
from powerguard.sim.ups import APC
from tests.e2e.peers import rfc1628_table
from tests.e2e.rig import FORCE_AFTER_S, Rig, rig
from tests.peers.snmp_agent import SnmpAgent
from tests.peers.ups_output import XUPS, SimCard, U

SHUTDOWN = f"{U}.8.2.0"
GUARD_S = 30.0


def card_of(world: Rig) -> SimCard:
    return SimCard(
        world.ups.output, boottime_s, utility=lambda: world.ups.utility, lacks=frozenset({XUPS, APC, "1.3.6.1.2.1.1."})
    )


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_the_output_is_ordered_off_once_and_after_the_host(*, killed: bool) -> None:
    """Killed: the SET is carried out and nobody hears the answer; the next daemon sends nothing, and powers off."""
    async with rig(card=False) as world:
        card = card_of(world)
        deaths: list[float] = []

        def take(name: str, value: SimValue) -> bool | int:
            if killed and name == SHUTDOWN and not deaths and world.process is not None:
                deaths.append(boottime_s())
                world.process.kill()
            return card.take(name, value)

        def values() -> Mapping[str, SimValue]:
            return {**card.values(), **rfc1628_table(world.ups)}

        async with SnmpAgent(values, on_set=take) as agent:
            world.add_snmp(agent.port)
            world.settings["ups"]["rack-a"]["output_off"] = {
                "by": "snmp",
                "dedicated_network": True,
                "community": world.secret("write", "private"),
            }
            await world.start()
            await world.status_shows(lambda status: bool(status["phase"] == "online"), "utility")
            assert card.sets == []
            world.ups.utility = False
            if killed:
                await world.until(lambda: deaths, "the order to cut")
                await world.kill()
                await world.start(wait=False)
            await world.off()
            (ordered, *_) = world.actions("PowerOff")
            latched = world.notes("phase_changed", new="shutdown")[0]
            assert [name for name, _ in card.sets].count(SHUTDOWN) == 1
            assert card.sets[-1][0] == SHUTDOWN
            cut_at_s = world.ups.output.off_at_s
            assert cut_at_s is not None
            assert cut_at_s - latched.at_s <= FORCE_AFTER_S + GUARD_S + 20.0
            world.no_traceback()
            if killed:
                return  # the order ran out while nobody was there to hear of it: not repeated
            dark_s = ordered.at_s + float(str(ordered.payload["force_after_s"]))
            assert cut_at_s >= dark_s + GUARD_S - 2.0, "never before the host is off, and 30 s more"
            armed = numbers(await world.note("power_on_armed"))
            assert armed["returns"] == "cycles"
            assert abs(latched.at_s + float(str(armed["in_s"])) - cut_at_s) < 15.0
