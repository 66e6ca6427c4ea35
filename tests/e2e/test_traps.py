"""A trap in the real daemon: utility fails between two polls, and the trap brings the next one at once."""

import asyncio
import contextlib
import socket
from pathlib import Path

import aiohttp

from powerguard.clock import boottime_s
from tests.e2e.rig import Rig, rig
from tests.sources.trap_helpers import TRAP_V2, V2C, free_port, send, users, v3


async def metrics(world: Rig) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{world.http_port}/metrics") as told:
        lines = (await told.text()).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


async def test_a_trap_brings_the_poll_and_the_poll_brings_the_truth(tmp_path: Path) -> None:
    """Polled every 10 s, the daemon would see the outage up to 10 s late; forged traps on utility change nothing."""
    port = free_port()
    async with rig() as world:
        world.settings["ups"]["rack-a"]["sources"][0]["poll_s"] = 10.0
        world.settings["traps"] = {"listen": "127.0.0.1", "port": port, "users": users(tmp_path)}
        await world.start()
        await world.until(lambda: world.logged("traps_listening"), "the trap port")
        for _ in range(3):
            assert await send("snmptrap", port, V2C, TRAP_V2) == 0
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
            sender.sendto(b"\x30\x03garbage", ("127.0.0.1", port))
        await asyncio.sleep(0.5)
        told = await metrics(world)
        assert told['powerguard_phase{phase="online"}'] == 1, "on battery says only the trap"
        assert told['powerguard_traps_total{result="hint"}'] == 3
        assert told['powerguard_traps_total{result="garbled"}'] == 1
        world.ups.utility = False
        cut_s = boottime_s()
        assert await send("snmpinform", port, v3(), TRAP_V2) == 0
        assert await send("snmpinform", port, V2C, TRAP_V2) == 0
        await world.note("outage_began")
        took_s = boottime_s() - cut_s
        assert took_s < 5.0, "and not the 10 s of its own turn"
        await asyncio.sleep(0.5)  # /metrics is made anew four times a second
        assert (await metrics(world))["powerguard_traps_answered_total"] == 3, "two informs, and one engine id"
        assert world.logged("trap_received", name="on_battery", ups="rack-a")
        world.no_traceback()
