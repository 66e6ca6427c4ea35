"""From the UPS flipping to battery to the trainer's HTTP request, when the budget leaves no time to wait.

flip: the whole way, over real SNMP and HTTP, with the daemon as a process and the flip at a random moment of the poll.
own: the daemon's own part, from a reading published to the first byte at the trainer, with a journal that syncs.
"""

import asyncio
import contextlib
import random
from pathlib import Path

import structlog

from bench import world
from bench.figure import Figure
from powerguard.clock import boottime_s
from powerguard.core.model.events import OutputSource, Reading
from powerguard.daemon.journal import read_only, recent
from powerguard.daemon.wiring import Ports, assemble
from powerguard.settings.load import load
from powerguard.sim.ups import SimUps, UpsBattery
from powerguard.ups.base import Publish
from tests.peers.snmp_agent import SnmpAgent

# No grade of stop fits beside a checkpoint of 60 s: the first confirmed reading on battery is already late.
_TABLE = {50: 90, 100: 40}


def run(*, quick: bool) -> list[Figure]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    flips = asyncio.run(_flips(2 if quick else 12))
    own = asyncio.run(_own(3 if quick else 60))
    return [
        Figure(name="UPS flips to battery -> first byte at the trainer", unit="s", values=flips, bar="<= 1.5"),
        Figure(name="reading published -> request on the wire", unit="ms", values=own, bar="p99 <= 50"),
    ]


async def _flips(runs: int) -> tuple[float, ...]:
    took: list[float] = []
    dice = random.Random(7)
    with world.folder() as at:
        battery = UpsBattery(runtime=tuple((load / 100, float(s)) for load, s in _TABLE.items()), recharge_s=2.0)
        ups = SimUps(battery, clock=boottime_s, load=lambda: 0.5, low_battery_s=5.0)
        trainer = world.Trainer()
        async with SnmpAgent(ups.apc_table) as agent:
            budget = {"utility_stable_s": 2, "recharge_h": 0.01, "low_battery_s": 20}
            config = world.settings(at, snmp_port=agent.port, table=_TABLE, budget=budget)
            stack = contextlib.AsyncExitStack()
            await stack.enter_async_context(trainer.serving(at / "trainer.sock"))
            async with world.process(at, "-m", "powerguard", "run", "--config", str(config)):
                await _phase(at, None, 20.0)
                await asyncio.sleep(3.0)
                for _ in range(runs):
                    await asyncio.sleep(dice.uniform(0.0, 1.0))
                    trainer.heard.clear()
                    began_s = boottime_s()
                    ups.utility = False
                    async with asyncio.timeout(20):
                        await trainer.heard.wait()
                    took.append(trainer.asked_at_s[-1] - began_s)
                    ups.utility = True
                    # Three transfers in five minutes make utility prove itself for three times as long.
                    await asyncio.sleep(0.5)
                    await _phase(at, "online", 30.0)
            await stack.aclose()
    return tuple(took)


async def _phase(at: Path, wanted: str | None, limit_s: float) -> None:
    """Wait until the journal's newest change of phase is `wanted`; None: until there is a journal."""
    async with asyncio.timeout(limit_s):
        while True:
            if (at / "journal.sqlite").exists():
                if wanted is None:
                    return
                with read_only(at / "journal.sqlite") as db:
                    changes = [line for line in recent(db, 200) if line.event == "phase_changed"]
                if changes and dict(changes[-1].payload["numbers"]).get("new") == wanted:  # type: ignore[call-overload]
                    return
            await asyncio.sleep(0.1)


class _Feed:
    """A source that publishes what the bench says, when it says it."""

    def __init__(self) -> None:
        self.publish: Publish | None = None
        self.ready = asyncio.Event()

    def poll_now(self) -> None:
        pass

    async def run(self, publish: Publish) -> None:
        self.publish = publish
        self.ready.set()
        await asyncio.Event().wait()


async def _own(runs: int) -> tuple[float, ...]:
    took: list[float] = []
    offset_s = 0.0

    def clock() -> float:
        return boottime_s() + offset_s

    with world.folder() as at:
        config = world.settings(at, snmp_port=1, table=_TABLE, budget={"recharge_h": 0.01, "low_battery_s": 20})
        trainer = world.Trainer()
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(trainer.serving(at / "trainer.sock"))
        feed = _Feed()
        ports = Ports(clock=clock, sources=lambda _settings, _clock: [("bench", "feed", feed)])
        daemon = assemble(load(config), config=config, ports=ports)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(daemon.run())
            await feed.ready.wait()
            assert feed.publish is not None
            await asyncio.sleep(1.0)
            for _ in range(runs):
                for _ in range(40):
                    # Hours of utility in a moment: only the clock is moved, so that every outage is a new one.
                    offset_s += 1.0
                    feed.publish(_reading(clock(), OutputSource.UTILITY))
                    await asyncio.sleep(0.002)
                await asyncio.sleep(0.2)
                trainer.heard.clear()
                offset_s += 1.0
                began_s = boottime_s()
                feed.publish(_reading(clock(), OutputSource.BATTERY))
                async with asyncio.timeout(10):
                    await trainer.heard.wait()
                took.append(1000.0 * (trainer.asked_at_s[-1] - began_s))
            daemon.stop()
            await running
        await stack.aclose()
    return tuple(took)


def _reading(at_s: float, source: OutputSource) -> Reading:
    battery = source is OutputSource.BATTERY
    return Reading(
        at_s=at_s,
        ups="bench",
        source="feed",
        output_source=source,
        charge_pct=100.0,
        load_pct=50.0,
        runtime_s=90.0,
        on_battery_s=1.0 if battery else 0.0,
        input_present=not battery,
    )
