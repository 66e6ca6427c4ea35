"""The dashboard: it is what its script makes, and each expression finds something in a played outage."""

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from powerguard.core.model.events import Reading, TrainerSeen
from powerguard.core.model.state import Holding, Online, Shutdown
from powerguard.daemon.attempt import rest
from powerguard.daemon.loop import Loop
from powerguard.daemon.observe.metrics import DaemonCollector, scrape
from tests.daemon.looped import Card, World, in_virtual_time, now_s, until
from tests.daemon.watched import drilled
from tests.peers import require
from tests.peers.ports import free_port
from tests.prometheus.served import prometheus
from tests.prometheus.test_rules import series_of_the_product

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "config" / "grafana" / "powerguard.json"
EVERY_S = 15
PANELS = [panel for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"] if panel["type"] != "row"]
EXPRESSIONS = {f"{panel['title']}, {query['refId']}": query["expr"] for panel in PANELS for query in panel["targets"]}


def test_the_file_is_what_the_script_makes() -> None:
    made = subprocess.run([sys.executable, str(ROOT / "scripts" / "dashboard")], check=True, capture_output=True)
    assert made.stdout.decode() == BOARD.read_text(encoding="utf-8"), (
        "scripts/dashboard > config/grafana/powerguard.json"
    )


@pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_every_metric_in_a_panel_exists(expr: str) -> None:
    named = set(re.findall(r"\bpowerguard[:_][a-z0-9_:]+", expr))
    assert named
    assert named - series_of_the_product() == set()


class Measuring(Card):
    """A card that also tells power and temperature."""

    def reading(self) -> Reading:
        return replace(super().reading(), watts=2900.0, battery_temp_c=24.0, input_v=230.0)


class Scraped:
    """What Prometheus would have scraped: samples with their moments, as OpenMetrics."""

    def __init__(self, zero_s: float) -> None:
        self.lines: list[str] = []
        self._zero_s = zero_s

    async def watch(self, daemon: Loop) -> None:
        """Scrape it for as long as it lives; its trainer tells a step each time."""
        collector = DaemonCollector(daemon)
        while True:
            trainer = daemon.state.trainers[0]
            if not trainer.paused:
                step = int(now_s())
                seen = TrainerSeen(at_s=daemon.clock(), trainer="llm", alive=True, step=step, durable_age_s=60.0)
                daemon.submit(seen)
            await rest(0.5)
            at_s = self._zero_s + now_s()
            for family in parse_text(scrape(collector, "")[0].decode()):
                for sample in family.samples:
                    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    both = f'job="powerguard",instance="gpu-01"{"," if labels else ""}{labels}'
                    self.lines.append(f"{sample.name}{{{both}}} {sample.value} {at_s:.3f}")
            await rest(EVERY_S - 0.5)


async def followed(
    world: World, scraped: Scraped, story: Callable[[Loop], Awaitable[None]], *, kill: bool = False
) -> None:
    parts = world.parts()
    world.cards = [Measuring(world.ups, world.clock)]
    parts = replace(parts, sources=[("rack-a", card.name, card) for card in world.cards])
    async with world.running(parts, kill=kill) as daemon:
        daemon.state = replace(daemon.state, learned=replace(daemon.state.learned, drill=drilled().state.learned.drill))
        watching = asyncio.create_task(scraped.watch(daemon))
        await story(daemon)
        watching.cancel()


@in_virtual_time
async def play(path: Path, scraped: Scraped) -> None:
    """An hour of training; a hold; a power-off, and the return."""
    world = World(path)

    async def leaves(daemon: Loop) -> None:
        await rest(600.0)
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Holding))
        world.ups.utility = True
        await until(lambda: isinstance(daemon.state.phase, Online))
        await rest(2400.0)
        world.ups.utility = False
        await until(lambda: isinstance(daemon.state.phase, Shutdown))
        await until(lambda: world.host.done)

    async def returns(daemon: Loop) -> None:
        await until(lambda: isinstance(daemon.state.phase, Online), 3600.0)
        await rest(600.0)

    await followed(world, scraped, leaves, kill=True)
    await rest(900.0)
    world.next_boot()
    world.ups.utility = True
    await followed(world, scraped, returns)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float, float]]:
    """A played outage in Prometheus: its address, and from when to when, Unix seconds."""
    promtool = require("promtool")
    folder = tmp_path_factory.mktemp("played")
    zero_s = float(int(time.time()) - 3 * 3600)
    scraped = Scraped(zero_s)
    play(folder / "journal.sqlite", scraped)
    text = folder / "played.txt"
    text.write_text("\n".join([*scraped.lines, "# EOF", ""]), encoding="utf-8")
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(text), str(folder / "data")]
    subprocess.run(command, check=True, capture_output=True)
    moments = [float(line.rsplit(" ", 1)[1]) for line in (scraped.lines[0], scraped.lines[-1])]
    config = folder / "prometheus.yml"
    config.write_text("scrape_configs: []\n", encoding="utf-8")
    with prometheus(config, folder / "data", free_port()) as address:
        yield address, *moments


@pytest.mark.peer("promtool", "prometheus")
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("prometheus")
def test_each_expression_finds_something(served: tuple[str, float, float]) -> None:
    """As Grafana asks: over the range, with the variables in place."""
    address, since_s, until_s = served
    range_s = int(until_s - since_s)
    empty = []
    for title, expr in EXPRESSIONS.items():
        asked = expr.replace("$instance", ".+").replace("$__rate_interval", "1m")
        asked = asked.replace("$__range_s", str(range_s)).replace("$__range", f"{range_s}s")
        query = urllib.parse.urlencode({"query": asked, "start": since_s, "end": until_s, "step": EVERY_S})
        with urllib.request.urlopen(f"{address}/api/v1/query_range?{query}", timeout=60) as answer:
            shown = json.load(answer)
        if not shown["data"]["result"]:
            empty.append(title)
    assert empty == []
