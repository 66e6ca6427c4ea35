"""A trap in the real daemon: utility fails between two polls, and the trap brings the next one at once."""

import contextlib
import socket
from pathlib import Path

from powerguard.clock import boottime_s
from tests.e2e.rig import rig
from tests.ups.snmp.trap_helpers import TRAP_V2, V2C, free_port, send, users, v3

POLL_S = 10.0


async def test_a_trap_brings_the_poll_and_the_poll_brings_the_truth(tmp_path: Path) -> None:
    """Polled every 10 s, the daemon would see the outage up to 10 s late; forged traps on utility change nothing."""
    port = free_port()
    async with rig() as world:
        world.settings["ups"]["rack-a"]["sources"][0]["poll_s"] = POLL_S
        world.settings["traps"] = {"listen": "127.0.0.1", "port": port, "users": users(tmp_path)}
        await world.start()
        await world.until(lambda: world.logged("traps_listening"), "the trap port")
        for _ in range(3):
            assert await send("snmptrap", port, V2C, TRAP_V2) == 0
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
            sender.sendto(b"\x30\x03garbage", ("127.0.0.1", port))
        await world.metric_becomes('powerguard_traps_total{result="hint"}', 3.0)
        await world.metric_becomes('powerguard_traps_total{result="garbled"}', 1.0)
        assert await world.metric('powerguard_phase{phase="online"}') == 1.0, "on battery says only the trap"
        assert world.agent is not None
        asked = world.agent.requests
        await world.until(lambda: world.agent and world.agent.requests > asked, "the last poll before the cut")
        polled_at_s = boottime_s()
        world.ups.utility = False
        assert await send("snmpinform", port, v3(), TRAP_V2) == 0
        assert await send("snmpinform", port, V2C, TRAP_V2) == 0
        began = await world.note("outage_began")
        assert began.at_s < polled_at_s + 0.95 * POLL_S, "before its own turn"
        await world.metric_becomes("powerguard_traps_answered_total", 3.0)  # two informs, and one engine id
        await world.until(lambda: world.logged("trap_received", name="on_battery", ups="rack-a"), "trap_received")
        world.no_traceback()
