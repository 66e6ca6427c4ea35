"""What ten open pages cost the daemon, the same daemon before they are opened; how soon a page shows a change."""

import asyncio
import contextlib
import json

import aiohttp

from bench import world
from bench.daemon import AS_INSTALLED, cpu_s, rss_mb
from bench.figure import Figure, quantile
from powerguard.clock import boottime_s
from powerguard.sim.demo.story import numbers
from powerguard.sim.ups import SimUps, UpsBattery
from tests.e2e.rig import LONG, rig
from tests.e2e.test_page import pages
from tests.peers.snmp_agent import SnmpAgent

PAGES = 10
SPELL_S = 5.0
_PHASES = {
    "online": "Online",
    "on_battery": "On battery",
    "emergency_checkpoint": "Emergency checkpoint",
    "holding": "Holding",
    "shutdown": "Powering off",
}


def run(*, quick: bool) -> list[Figure]:
    return [*asyncio.run(_cost(2 if quick else 12)), asyncio.run(_shown(1 if quick else 5))]


async def _cost(spells: int) -> list[Figure]:
    with world.folder() as at:
        ups = SimUps(UpsBattery(runtime=((0.5, 540.0), (1.0, 240.0))), clock=boottime_s, load=lambda: 0.5)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(world.Trainer().serving(at / "trainer.sock"))
            agent = await stack.enter_async_context(SnmpAgent(ups.apc_table))
            config = world.settings(at, snmp_port=agent.port, table={50: 540, 100: 240})
            line = next(each for each in config.read_text(encoding="utf-8").splitlines() if each.startswith("http: "))
            port = json.loads(line.removeprefix("http: "))["port"]
            daemon = await stack.enter_async_context(
                world.process(at, "-c", AS_INSTALLED, "run", "--config", str(config))
            )
            await asyncio.sleep(6.0)
            alone = [await _share(daemon.pid) for _ in range(spells)]
            small = rss_mb(daemon.pid)
            counts = [0] * PAGES
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            reading = [tasks.create_task(_read(port, counts, number)) for number in range(PAGES)]
            await asyncio.sleep(2.0)  # the template is compiled for the first
            grown = rss_mb(daemon.pid) - small
            before = sum(counts)
            opened = [await _share(daemon.pid) for _ in range(spells)]
            updates = (sum(counts) - before) / PAGES / spells / SPELL_S
            for each in reading:
                each.cancel()
    added = tuple(each - quantile(alone, 0.5) for each in opened)
    return [
        Figure(name="daemon without a page, CPU", unit="% of a core", values=tuple(alone)),
        Figure(name=f"what {PAGES} open pages add, CPU", unit="% of a core", values=added, bar="<= 1"),
        Figure(name="resident memory that they take, the template engine included", unit="MB", values=(grown,)),
        Figure(name="updates of each page", unit="a second", values=(updates,)),
    ]


async def _shown(outages: int) -> Figure:
    """Time each change of the phase from the daemon's own note of it to the page that shows it."""
    taken_s: list[float] = []
    for _ in range(outages):
        async with rig(runtime=LONG) as world:
            await world.start()
            shown_s: dict[str, float] = {}
            async with contextlib.aclosing(pages(world.http_port)) as events:
                async for page in events:
                    name = next(name for name, label in _PHASES.items() if f'">{label}</p>' in page)
                    shown_s.setdefault(name, boottime_s())
                    world.ups.utility = False
                    if name == "shutdown":
                        break
            changes = {str(numbers(line)["new"]): line.at_s for line in world.notes("phase_changed")}
            taken_s += [at_s - changes[name] for name, at_s in shown_s.items() if name in changes]
    return Figure(name="the phase changes -> the page shows it", unit="s", values=tuple(taken_s), bar="<= 1")


async def _share(pid: int) -> float:
    before = cpu_s(pid)
    await asyncio.sleep(SPELL_S)
    return 100.0 * (cpu_s(pid) - before) / SPELL_S


async def _read(port: int, counts: list[int], number: int) -> None:
    """Load the page and follow its updates, as a browser does."""
    url = f"http://127.0.0.1:{port}"
    limit = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=limit, read_bufsize=2**18) as session:
        async with session.get(f"{url}/", headers={"Accept": "text/html"}) as answer:
            answer.raise_for_status()
            await answer.read()
        async with session.get(f"{url}/events") as answer:
            answer.raise_for_status()
            while line := await answer.content.readline():
                counts[number] += line.startswith(b"data: ")
