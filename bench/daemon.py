"""What the daemon costs at one poll a second, and whether waiting for the dead delays the living."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import structlog

from bench import world
from bench.figure import Figure
from powerguard.clock import boottime_s
from powerguard.daemon.wiring import assemble
from powerguard.settings.load import load
from powerguard.sim.ups import SimUps, UpsBattery
from tests.peers.snmp_agent import SimUser, SnmpAgent

_PROBE_S = 0.01
AS_INSTALLED = "import sys; sys.modules['rich'] = None; from powerguard.cli.main import main; sys.exit(main())"
"""The daemon as it is installed. structlog loads rich where it finds it (2.9 MB); here a test tool has brought it."""


def run(*, quick: bool) -> list[Figure]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    return [
        *asyncio.run(cost("", None, 5.0 if quick else 60.0)),
        *asyncio.run(cost(", SNMP v3 with privacy", world.USER, 5.0 if quick else 60.0)),
        *asyncio.run(_lag(3.0 if quick else 20.0)),
    ]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


async def cost(name: str, user: SimUser | None, seconds: float, **more: object) -> list[Figure]:
    rss: list[float] = []
    cpu: list[float] = []
    with world.folder() as at:
        ups = SimUps(UpsBattery(runtime=((0.5, 540.0), (1.0, 240.0))), clock=boottime_s, load=lambda: 0.5)
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(world.Trainer().serving(at / "trainer.sock"))
        async with SnmpAgent(ups.apc_table, user=user) as agent:
            config = world.settings(at, snmp_port=agent.port, table={50: 540, 100: 240}, user=user, **more)
            async with world.process(at, "-c", AS_INSTALLED, "run", "--config", str(config)) as daemon:
                await asyncio.sleep(6.0)
                for _ in range(max(1, int(seconds / 5))):
                    before = cpu_s(daemon.pid)
                    await asyncio.sleep(5.0)
                    cpu.append(100.0 * (cpu_s(daemon.pid) - before) / 5.0)
                    rss.append(rss_mb(daemon.pid))
        await stack.aclose()
    return [
        Figure(name=f"daemon at 1 Hz{name}, resident memory", unit="MB", values=tuple(rss), bar="<= 95"),
        Figure(name=f"daemon at 1 Hz{name}, CPU", unit="% of a core", values=tuple(cpu), bar="<= 1"),
    ]


async def _lag(seconds: float) -> list[Figure]:
    """Measure the loop's own timer, idle and while a dead BMC and a hung trainer are waited for, in one process."""
    table = {50: 90, 100: 40}
    with world.folder() as at, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as blackhole:
        blackhole.bind(("127.0.0.1", 0))
        ups = SimUps(
            UpsBattery(runtime=tuple((load_ / 100, float(s)) for load_, s in table.items())),
            clock=boottime_s,
            load=lambda: 0.5,
            low_battery_s=5.0,
        )
        trainer = world.Trainer(hang=True)
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(trainer.serving(at / "trainer.sock"))
        async with SnmpAgent(ups.apc_table) as agent:
            password = world.secret(at / "password", "bench-password")
            bmc = {"kind": "ipmi-lan", "host": "127.0.0.1", "port": blackhole.getsockname()[1], "user": "bench"}
            config = world.settings(
                at, snmp_port=agent.port, table=table, bmc={**bmc, "password": password}, budget={"low_battery_s": 20}
            )
            daemon = assemble(load(config), config=config)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(daemon.run())
                await asyncio.sleep(14.0)  # the policy check at start has found its BMC dead by now
                idle = await _probe(seconds)
                ups.utility = False
                async with asyncio.timeout(10):
                    await trainer.heard.wait()
                busy = await _probe(seconds)
                daemon.stop()
                await running
        await stack.aclose()
    return [
        Figure(name="event loop lag, idle", unit="ms", values=tuple(idle)),
        Figure(
            name="event loop lag, dead BMC and hung trainer waited for",
            unit="ms",
            values=tuple(busy),
            bar="p99 within 20 of idle",
        ),
    ]


async def _probe(seconds: float) -> list[float]:
    lags: list[float] = []
    until_s = boottime_s() + seconds
    while boottime_s() < until_s:
        due_s = boottime_s() + _PROBE_S
        await asyncio.sleep(_PROBE_S)
        lags.append(1000.0 * (boottime_s() - due_s))
    return lags
