"""The demo's UPS alone: `powerguard demo --ups`, for a daemon that a newcomer has started and wants to try."""

import asyncio
import os
import sys

from powerguard.clock import boottime_s
from powerguard.sim.snmp_agent import SnmpAgent
from powerguard.sim.ups import SimUps, UpsBattery

LOAD = 0.60
RUNTIME = ((0.25, 420.0), (0.50, 200.0), (1.00, 90.0))
"""Share of the rating, and the seconds that a full battery lasts at it."""
_RECHARGE_S = 120.0


async def serve(port: int) -> None:
    """Answer SNMP v2c on 127.0.0.1 as an APC card does, until standard input ends; each line pulls or plugs.

    Raises OSError if the port is taken. The loop must select: epoll takes neither a regular file nor /dev/null.
    """
    battery = UpsBattery(runtime=RUNTIME, recharge_s=_RECHARGE_S)
    ups = SimUps(battery, clock=boottime_s, load=lambda: LOAD)
    loop, stdin, ended = asyncio.get_running_loop(), sys.stdin.fileno(), asyncio.Event()

    def entered() -> None:
        read = os.read(stdin, 4096)
        for _ in range(read.count(b"\n")):
            ups.utility = not ups.utility
            print(f"{'utility' if ups.utility else 'on battery'}: charge {100 * ups.charge:.0f} %", flush=True)
        if not read:
            ended.set()

    async with SnmpAgent(ups.apc_table, port=port) as agent:
        print(f"A simulated UPS answers SNMP v2c, community public, on 127.0.0.1 port {agent.port}.")
        print("Enter pulls the plug, and Enter again puts it back. Ctrl-D ends it.", flush=True)
        loop.add_reader(stdin, entered)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(stdin)
