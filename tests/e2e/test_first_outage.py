"""The whole path on real protocols: net-snmp says battery, training saves and pauses, the BMC is set, the host goes."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

import pytest

from powerguard.clock import boottime_s
from powerguard.sim.demo.story import numbers
from powerguard.sim.ups import APC
from tests.e2e.peers import RFC1628, Trainer, net_snmp_card, rfc1628_table
from tests.e2e.rig import BUSY_S, ROOMY, Off, Rig, rig
from tests.peers.ipmi import IpmiSim
from tests.peers.snmpd import AUTH, COMMUNITY, PRIV, USER

BMC_LIMIT_S = 5.0
STOP_S = 6.0
"""What a full stop of this host takes."""
RESERVE_S = 3
"""So that a busy machine may commit this late and still has time for a full stop."""
UNPAUSED: Final = ((0.3, 90.0), (0.6, 45.0))
"""What a trainer that does not pause needs for that."""
pytestmark = pytest.mark.peer("snmpd", "ipmi_sim", "cc")


@contextlib.asynccontextmanager
async def apc_card(world: Rig, *, version: int | str) -> AsyncIterator[None]:
    """An APC card behind net-snmp, which the settings name: v2c with its community, or v3 authPriv."""
    async with net_snmp_card(world.ups.apc_table, APC) as card:
        if version == 3:
            keys = {"auth": world.secret("snmp-auth", AUTH), "priv": world.secret("snmp-priv", PRIV)}
            world.add_snmp(card.port, version=3, user=USER, **keys)
        else:
            world.add_snmp(card.port, version=version, community=world.secret("community", COMMUNITY))
        yield


def use_bmc(world: Rig, bmc: IpmiSim) -> None:
    """Put a BMC into the settings."""
    password = world.secret("bmc-password", bmc.password)
    world.settings["bmc"] = {
        "kind": "ipmi-lan",
        "host": bmc.host,
        "port": bmc.port,
        "user": bmc.user,
        "password": password,
    }


async def cut_and_wait(world: Rig) -> Off:
    """Pull the plug, and wait for the power-off to be accepted."""
    world.ups.utility = False
    off = await world.off()
    await world.note("power_off_accepted")
    return off


def story_is_in_order(world: Rig, cut_at_s: float, off: Off, stop_s: float = STOP_S) -> None:
    """The journal tells every phase in turn, and each order stood in it before anybody could see its effect."""
    moved = [numbers(line)["new"] for line in world.notes("phase_changed")]
    assert moved == ["on_battery", "emergency_checkpoint", "holding", "shutdown"]
    found = [line.event for line in world.lines() if line.kind == "note"]
    wanted = ["outage_began", "checkpoint_ordered", "checkpoint_durable", "power_off_ordered", "power_off_accepted"]
    assert [event for event in found if event in wanted] == wanted
    stamps = [line.at_s for line in world.lines()]
    assert stamps == sorted(stamps)
    assert stamps[0] >= cut_at_s - 60.0
    for trainer in world.trainers:
        assert len(trainer.orders) == 1
        assert world.was_journalled_first(trainer)
    assert off.ordered
    (power_off,) = world.actions("PowerOff")
    assert power_off.at_s <= off.at_s
    force_after_s = float(str(power_off.payload["force_after_s"]))
    assert off.deadline_s == int(force_after_s)
    (latched,) = world.notes("phase_changed", new="shutdown")
    assert numbers(latched)["grade"] == "full", (latched, world.notes("grade_lowered"))
    # The deadline counts from the commit: what the BMC took is taken off it, down to the 3 s of a bare stop.
    assert abs(power_off.at_s + force_after_s - latched.at_s - max(stop_s, power_off.at_s - latched.at_s + 3.0)) < 0.01
    assert world.ups.alive


async def test_apc_over_v2c_with_a_native_trainer_and_a_willing_bmc() -> None:
    """Everything is as it should be: checkpoint at the paused step, always-on set and read back, one power-off."""
    async with rig(runtime=ROOMY, card=False) as world, apc_card(world, version="2c"), IpmiSim(plugin=True) as bmc:
        use_bmc(world, bmc)
        world.settings["budget"] |= {"stop_q95_s": STOP_S, "reserve_s": RESERVE_S}
        await world.start()
        await world.until(lambda: bmc.policy == "always-on", "the policy to be ensured at start")
        await world.metric_becomes("powerguard_ready", 1.0)
        assert (await world.get("/readyz"))[0] == 200
        cut_at_s = boottime_s()
        off = await cut_and_wait(world)
        story_is_in_order(world, cut_at_s, off)
        trainer = world.trainers[0]
        (order,) = trainer.orders
        assert order.event == world.one_outage()
        assert cut_at_s < order.at_s < off.at_s
        (durable,) = world.notes("checkpoint_durable")
        assert numbers(durable)["step"] == trainer.step
        assert numbers(durable)["verified"] is True
        assert trainer.paused
        assert bmc.policy == "always-on"
        verified = world.notes("policy_verified")
        assert {numbers(line)["policy"] for line in verified} == {"always-on"}
        latched = await world.phase("shutdown")
        assert latched.at_s <= verified[-1].at_s <= off.at_s
        world.no_traceback()


async def test_apc_over_v3_with_a_dumb_endpoint_and_a_bmc_that_refuses() -> None:
    """Neither costs the host: the endpoint gets its one request, the refusal is an alarm and holds nothing up."""
    async with (
        rig(Trainer(native=False), runtime=UNPAUSED, card=False) as world,
        apc_card(world, version=3),
        IpmiSim(plugin=False) as bmc,
    ):
        use_bmc(world, bmc)
        world.settings["budget"] |= {"stop_q95_s": 3.0, "reserve_s": RESERVE_S}
        await world.start()
        alarm = (await world.until(lambda: world.logged("policy_unverified"), "the alarm in the log"))[0]
        assert alarm["level"] == "error"
        assert f"port {bmc.port}" in alarm["because"]
        assert "firmware setup" in alarm["because"]
        await world.status_shows(lambda status: status["bmc"]["error"] == alarm["because"], "the alarm")
        await world.status_shows(lambda status: status["bmc"]["verified"] is False, "the policy as unverified")
        await world.status_shows(lambda status: status["sources"][0]["authenticated"] is True, "authenticated answers")
        await world.metric_becomes('powerguard_degraded_reason{reason="policy_unverified"}', 1.0)
        cut_at_s = boottime_s()
        off = await cut_and_wait(world)
        story_is_in_order(world, cut_at_s, off, stop_s=3.0)
        latched = await world.phase("shutdown")
        assert world.actions("PowerOff")[0].at_s - latched.at_s < BMC_LIMIT_S + BUSY_S
        assert world.notes("action_failed", action="EnsurePolicy")[-1].because == alarm["because"]
        assert not world.notes("policy_verified")
        assert not world.trainers[0].paused
        world.no_traceback()


@pytest.mark.slow
async def test_rfc_1628_whose_gauge_exaggerates_sixty_times() -> None:
    """A card that knows whole minutes only, and minutes where seconds are left: our own account saves the host."""
    async with (
        rig(runtime=ROOMY, gauge=60.0, card=False) as world,
        net_snmp_card(lambda: rfc1628_table(world.ups), RFC1628) as card,
    ):
        world.add_snmp(card.port, community=world.secret("community", COMMUNITY))
        world.settings["budget"] |= {"stop_q95_s": STOP_S, "reserve_s": RESERVE_S}
        await world.start()
        cut_at_s = boottime_s()
        off = await cut_and_wait(world)
        story_is_in_order(world, cut_at_s, off)
        await world.until(lambda: world.logged("source_found", profiles=["rfc1628"]), "source_found")
        (began,) = world.notes("outage_began")
        assert numbers(began)["runtime_s"] >= 60.0
        world.no_traceback()
