"""The apcupsd source before the real apcupsd: its SNMP driver, a net slave, and what apcaccess shows beside us."""

import asyncio
import signal

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.sim.ups import SimUps, UpsBattery
from powerguard.ups.apcupsd.protocol import Flag
from powerguard.ups.apcupsd.source import probe
from tests.peers import require
from tests.peers.apcupsd import apcupsd, scripts
from tests.peers.snmp_agent import Fault, SnmpAgent
from tests.ups.apcupsd.apcupsd_helpers import Heard, listening, options, until
from tests.ups.apcupsd.apcupsd_helpers import apcupsd as fake

pytestmark = pytest.mark.peer("apcupsd")


def sim_ups() -> SimUps:
    return SimUps(UpsBattery(runtime=((0.5, 1200.0),)), clock=boottime_s, load=lambda: 0.5)


def device(agent: SnmpAgent) -> str:
    return f"127.0.0.1:{agent.port}:APC_NOTRAP:public"


async def reads(heard: Heard, source: OutputSource) -> Reading:
    while (reading := await until(heard, Reading)).output_source is not source:
        pass
    return reading


async def test_an_outage_through_its_snmp_driver_and_back() -> None:
    """Battery within a second of apcupsd's own look, the values whole; utility again; then the card dies on battery.

    The best of several outages counts: a busy machine may keep apcupsd itself from its look.
    """
    ups = sim_ups()
    async with SnmpAgent(ups.apc_table) as agent:
        with scripts() as folder:
            async with apcupsd("snmp", device(agent), scripts_=folder) as peer:
                await peer.until(lambda status: bool(status.flags & Flag.ONLINE))
                async with listening(peer.port, limit_s=250.0) as (_, heard):
                    reading = await reads(heard, OutputSource.UTILITY)
                    assert (reading.charge_pct, reading.load_pct, reading.runtime_s) == (100.0, 50.0, 1200.0)
                    assert (reading.input_v, reading.input_present, reading.alarms) == (230.0, True, ())
                    for _ in range(4):
                        ups.utility, began_s = False, boottime_s()
                        reading = await reads(heard, OutputSource.BATTERY)
                        seen_s, age_s = boottime_s() - began_s, boottime_s() - reading.at_s
                        assert (reading.input_present, reading.testing) == (False, False)
                        ups.utility = True
                        await reads(heard, OutputSource.UTILITY)
                        if seen_s < 6.0 and age_s < 2.5:
                            break
                    assert seen_s < 6.0
                    assert age_s < 2.5
                    ups.utility = False
                    reading = await reads(heard, OutputSource.BATTERY)
                    agent.fault = Fault.DROP
                    while not (failed := await until(heard, SourceFailed)).lost:
                        pass
                    assert failed.at_s - reading.at_s < 30.0
                    agent.fault = Fault.NONE
                    await reads(heard, OutputSource.BATTERY)


async def test_apcaccess_and_we_read_the_same() -> None:
    ups = sim_ups()
    async with SnmpAgent(ups.apc_table) as agent:
        with scripts() as folder:
            async with apcupsd("snmp", device(agent), scripts_=folder, upsname="rack a") as peer:
                status = await peer.until(lambda status: bool(status.flags & Flag.ONLINE))
                child = await asyncio.create_subprocess_exec(
                    require("apcaccess"), "-h", f"127.0.0.1:{peer.port}", stdout=asyncio.subprocess.PIPE
                )
                shown, _ = await child.communicate()
    printed = {
        key.strip(): text.strip() for key, _, text in (line.partition(":") for line in shown.decode().splitlines())
    }
    for key in ("LOADPCT", "BCHARGE", "TIMELEFT", "LINEV", "MODEL", "UPSNAME"):
        assert status.values[key] == printed[key]
    assert int(printed["STATFLAG"], 16) == status.flags


async def test_it_is_stopped_hung_and_started_again() -> None:
    """SIGSTOP: the kernel accepts, nobody answers. SIGCONT: the same connection or a new one, and readings again."""
    ups = sim_ups()
    async with SnmpAgent(ups.apc_table) as agent:
        with scripts() as folder:
            async with apcupsd("snmp", device(agent), scripts_=folder) as peer:
                await peer.until(lambda status: bool(status.flags & Flag.ONLINE))
                async with listening(peer.port, limit_s=60.0) as (_, heard):
                    await until(heard, Reading)
                    peer.signal(signal.SIGSTOP)
                    failed = await until(heard, SourceFailed)
                    assert "apcupsd hangs, or waits for its UPS" in failed.reason
                    peer.signal(signal.SIGCONT)
                    await until(heard, Reading)


async def test_a_net_slave_reports_its_masters_battery_and_is_named_as_one() -> None:
    async with fake() as master:
        with scripts() as folder:
            async with apcupsd("net", f"127.0.0.1:{master.port}", scripts_=folder) as peer:
                await peer.until(lambda status: bool(status.flags & Flag.ONLINE))
                report = await probe(options(peer.port), ups="rack-a")
                assert report.slave
                async with listening(peer.port, limit_s=60.0) as (_, heard):
                    await reads(heard, OutputSource.UTILITY)
                    master.set(0x05060010, LINEV="000.0 Volts")
                    reading = await reads(heard, OutputSource.BATTERY)
                    assert reading.charge_pct == 100.0
                    await master.stop()
                    while not (failed := await until(heard, SourceFailed)).lost:
                        pass
                    assert "COMMLOST" in failed.reason


async def test_an_apcupsd_that_has_never_met_its_ups() -> None:
    """Its DATE is then the second of the first question, and its flags say nothing: no reading says utility."""
    async with SnmpAgent(sim_ups().apc_table) as agent:
        agent.fault = Fault.DROP
        with scripts() as folder:
            async with (
                apcupsd("snmp", device(agent), scripts_=folder) as peer,
                listening(peer.port, limit_s=60.0) as (_, heard),
            ):
                for _ in range(5):
                    event = await heard.get()
                    assert isinstance(event, SourceFailed) or event.output_source is OutputSource.UNKNOWN
                agent.fault = Fault.NONE
                await reads(heard, OutputSource.UTILITY)
