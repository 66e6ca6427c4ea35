"""From the flip to "we are on battery", side by side with apcupsd on one simulated UPS card.

Ours: the reading with which the core holds battery to be true, of the source `snmp` and of the source `apcupsd` (which
asks the tuned apcupsd). Theirs: when the program of the event begins, `powerout` at the first sight of it, `onbattery`
after ONBATTERYDELAY. Default: POLLTIME 60 and a delay of 6 s; tuned: 1 s and none. Nobody gets traps. Our pollers start
anew for each flip, so that nobody's clock is ahead of the others' by chance for all of them.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from bench.figure import Figure
from powerguard.clock import boottime_s
from powerguard.core.model.events import Reading, SourceFailed
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Feed, Supply
from powerguard.core.supply import fusion
from powerguard.sim.ups import SimUps, UpsBattery
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.apcupsd.protocol import Flag
from powerguard.ups.apcupsd.source import ApcupsdSource
from powerguard.ups.base import Source
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.source import SnmpSource
from tests.peers import find
from tests.peers.apcupsd import Apcupsd, Scripts, apcupsd, scripts
from tests.peers.snmp_agent import SnmpAgent

_TUNED: Final = {"POLLTIME": 1, "ONBATTERYDELAY": 0, "MINUTES": 0, "BATTERYLEVEL": 0}
_DEFAULT: Final = {"POLLTIME": 60, "ONBATTERYDELAY": 6, "MINUTES": 0, "BATTERYLEVEL": 0}
_DEFAULT_LASTS_S: Final = 300.0
_HOOK: Final = '#!/bin/sh\nread -r up idle </proc/uptime\necho "$1 $up $idle" >>{calls}\n'
_OURS: Final = ("snmp", "apcupsd")


@dataclass
class Watch:
    """One source of ours with the fusion of the core behind it. battery_at_s: when battery was held to be true."""

    name: str
    feed: Feed = field(default_factory=Feed)
    battery_at_s: float | None = None

    def publish(self, event: Reading | SourceFailed) -> None:
        if isinstance(event, SourceFailed):
            return
        was = self.feed.supply
        self.feed = fusion.observe(Policy(boot_id="bench", ups="bench"), self.feed, event)
        if self.feed.supply is Supply.BATTERY and was is not Supply.BATTERY:
            self.battery_at_s = boottime_s()


@dataclass(frozen=True, slots=True)
class Rival:
    """One apcupsd. begun: when its programs began, by event."""

    running: Apcupsd
    made: Scripts

    def begun(self, event: str, after_s: float) -> float | None:
        for line in self.made.called(event):
            at_s = float(line.split()[1])
            if at_s >= after_s - 0.02:  # /proc/uptime is cut to hundredths
                return at_s
        return None


@contextlib.asynccontextmanager
async def _rival(agent: SnmpAgent, settings: Mapping[str, object]) -> AsyncIterator[Rival]:
    with scripts() as made:
        made.add("apccontrol", _HOOK.format(calls=made.calls))
        device = f"127.0.0.1:{agent.port}:APC_NOTRAP:public"
        async with apcupsd("snmp", device, scripts_=made, settings=settings) as running:
            await running.until(lambda status: bool(status.flags & Flag.ONLINE))
            yield Rival(running, made)


async def _until(reached: Callable[[], bool], limit_s: float) -> bool:
    end_s = boottime_s() + limit_s
    while not reached():
        if boottime_s() >= end_s:
            return False
        await asyncio.sleep(0.02)
    return True


class _Bench:
    """The UPS, its card, both sources of ours, and the times of each flip."""

    def __init__(self, ups: SimUps, agent: SnmpAgent, tuned: Rival) -> None:
        self.ups = ups
        self.agent = agent
        self.tuned = tuned
        self.dice = random.Random(11)
        self.watches = {name: Watch(name) for name in _OURS}
        self.times: dict[str, list[float]] = {}

    def sources(self) -> dict[str, Source]:
        snmp = SnmpOptions(kind="snmp", host="127.0.0.1", port=self.agent.port)
        asked = ApcupsdOptions(kind="apcupsd", port=self.tuned.running.port)
        return {
            "snmp": SnmpSource(snmp, ups="bench", clock=boottime_s),
            "apcupsd": ApcupsdSource(asked, ups="bench", clock=boottime_s),
        }

    async def is_calm(self) -> None:
        """Wait until everybody has seen utility again."""

        def calm() -> bool:
            return all(watch.feed.supply is Supply.UTILITY for watch in self.watches.values())

        if not await _until(calm, 20.0):
            msg = "a source of ours has not seen utility in 20 s"
            raise RuntimeError(msg)

    async def flip(self, rivals: Mapping[str, Rival], limit_s: float) -> None:
        """Cut utility at a random moment; wait until all have noticed; give it back."""
        self.watches = {name: Watch(name) for name in _OURS}
        async with asyncio.TaskGroup() as tasks:
            await asyncio.sleep(self.dice.uniform(0.0, 1.0))
            polling = [
                tasks.create_task(source.run(self.watches[name].publish)) for name, source in self.sources().items()
            ]
            await self.is_calm()
            await asyncio.sleep(1.0 + self.dice.uniform(0.0, 1.0))
            await self.cut(rivals, limit_s)
            await self.is_calm()
            for task in polling:
                task.cancel()

    async def cut(self, rivals: Mapping[str, Rival], limit_s: float) -> None:
        began_s = boottime_s()
        self.ups.utility = False

        def times() -> dict[str, float | None]:
            found = {f"powerguard, source {name}": watch.battery_at_s for name, watch in self.watches.items()}
            for how, rival in rivals.items():
                for event in ("powerout", "onbattery"):
                    found[f"apcupsd, {how}, {event}"] = rival.begun(event, began_s)
            return found

        await _until(lambda: None not in times().values(), limit_s)
        for name, at_s in times().items():
            self.times.setdefault(name, []).append(float("inf") if at_s is None else at_s - began_s)
        first = self.tuned.begun("powerout", began_s)
        ours = self.watches["apcupsd"].battery_at_s
        if first is not None and ours is not None:
            self.times.setdefault("lag", []).append(ours - first)
        self.ups.utility = True


def _figures(times: Mapping[str, Sequence[float]], note: str) -> list[Figure]:
    figures = [
        Figure(name=f"{name}: flip to known{note}", unit="s", values=tuple(values))
        for name, values in times.items()
        if name != "lag" and values
    ]
    rivals = [name for name in times if name.startswith("apcupsd, ")]
    for ours in (name for name in times if name.startswith("powerguard")):
        for rival in rivals:
            wins = [100.0 * (mine < its) for mine, its in zip(times[ours], times[rival], strict=True)]
            share = (sum(wins) / len(wins),)
            figures.append(Figure(name=f"{ours} is first before {rival}{note}", unit="% of flips", values=share))
    return figures


async def _measure(*, flips: int, default_s: float) -> list[Figure]:
    figures: list[Figure] = []
    ups = SimUps(UpsBattery(runtime=((0.5, 36_000.0),)), clock=boottime_s, load=lambda: 0.5)
    async with SnmpAgent(ups.apc_table) as agent, _rival(agent, _TUNED) as tuned:
        bench = _Bench(ups, agent, tuned)

        for _ in range(flips):
            await bench.flip({"POLLTIME 1": tuned}, 15.0)
        figures += _figures(bench.times, "")
        lag = tuple(bench.times["lag"])
        figures.append(Figure(name="apcupsd's own powerout -> known through it", unit="s", values=lag, bar="<= 0.5"))
        bench.times = {}
        async with _rival(agent, _DEFAULT) as default:
            end_s = boottime_s() + default_s
            while boottime_s() < end_s or not bench.times:
                await bench.flip({"POLLTIME 60": default}, 90.0)
                await asyncio.sleep(bench.dice.uniform(0.0, 20.0))
        figures += _figures(bench.times, " (beside the default)")
    return figures


def run(*, quick: bool) -> list[Figure]:
    if find("apcupsd") is None:
        print("  left out: apcupsd is not here (scripts/test-peers gets it)", flush=True)
        return []
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    return asyncio.run(_measure(flips=3 if quick else 30, default_s=1.0 if quick else _DEFAULT_LASTS_S))
