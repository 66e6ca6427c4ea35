"""From the moment in which upsd shows OB to "we are on battery", side by side with upsmon on one upsd.

Ours: the reading with which the core holds battery to be true. Only ups.status flips, so that it takes two readings.
Theirs: the moment in which NOTIFYCMD begins with ONBATT; default: POLLFREQ 5; tuned: POLLFREQ and POLLFREQALERT 1.
The driver's own second is in nobody's figure. All three begin anew for each flip, at moments that are drawn.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import structlog

from bench.figure import Figure
from powerguard.clock import boottime_s
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Feed, Supply
from powerguard.core.supply import fusion
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.nut.source import NutSource
from tests.peers.nut import Upsd, upsd
from tests.peers.upsmon import Upsmon, upsmon

_POLICY = Policy(boot_id="bench", ups="bench")
_STEP_S = 0.004


@dataclass
class _Watch:
    """Our source with the core's fusion behind it. seen, held: when OB was read, and when it was held to be true."""

    feed: Feed = field(default_factory=Feed)
    seen_at_s: float | None = None
    held_at_s: float | None = None

    def publish(self, event: Reading | SourceFailed) -> None:
        if isinstance(event, SourceFailed):
            return
        self.feed = fusion.observe(_POLICY, self.feed, event)
        if self.seen_at_s is None and event.output_source is OutputSource.BATTERY:
            self.seen_at_s = boottime_s()
        if self.held_at_s is None and self.feed.supply is Supply.BATTERY:
            self.held_at_s = boottime_s()


def run(*, quick: bool) -> list[Figure]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    seen, held, tuned, default = asyncio.run(_flips(2 if quick else 30))
    wins = sum(ours < min(theirs) for ours, *theirs in zip(held, tuned, default, strict=True))
    return [
        Figure(name="upsd shows OB -> our first reading says so", unit="s", values=seen),
        Figure(name="upsd shows OB -> held to be true (second reading)", unit="s", values=held, bar="<= 0.5"),
        Figure(name="upsd shows OB -> upsmon's NOTIFYCMD, POLLFREQ 1", unit="s", values=tuned),
        Figure(name="upsd shows OB -> upsmon's NOTIFYCMD, default", unit="s", values=default),
        Figure(name=f"flips that we held true before either upsmon, of {len(held)}", unit="flips", values=(wins,)),
    ]


async def _flips(runs: int) -> tuple[tuple[float, ...], ...]:
    dice = random.Random(11)
    rows: list[tuple[float, float, float, float]] = []
    async with upsd() as peer:
        for number in range(runs):
            # The driver looks each second, and so does the tuned upsmon: begun once, they would keep step for ever.
            await asyncio.sleep(dice.uniform(0.0, 1.0))
            async with contextlib.AsyncExitStack() as stack:
                lines = ("POLLFREQ 1", "POLLFREQALERT 1")
                tuned = await stack.enter_async_context(upsmon(peer, f"tuned-{number}", *lines))
                await asyncio.sleep(dice.uniform(0.0, 1.0))
                default = await stack.enter_async_context(upsmon(peer, f"default-{number}"))
                watch = await stack.enter_async_context(_watching(peer))
                await asyncio.sleep(dice.uniform(1.0, 6.0))
                rows.append(await _flip(peer, watch, tuned, default))
            peer.change({"ups.status": "OL"})
            await _shown(peer, '"OL"')
    return tuple(zip(*rows, strict=True))


@contextlib.asynccontextmanager
async def _watching(peer: Upsd) -> AsyncIterator[_Watch]:
    options = NutOptions(kind="nut", host="127.0.0.1", port=peer.port, name="dsim")
    watch = _Watch()
    source = NutSource(options, ups="bench", clock=boottime_s)
    polling = asyncio.get_running_loop().create_task(source.run(watch.publish))
    try:
        yield watch
    finally:
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling


async def _flip(peer: Upsd, watch: _Watch, tuned: Upsmon, default: Upsmon) -> tuple[float, float, float, float]:
    wall_s = time.time()
    peer.change({"ups.status": "OB DISCHRG"})
    shown_s = await _shown(peer, '"OB DISCHRG"')
    offset_s = boottime_s() - time.time()
    theirs = [await rival.until("ONBATT", wall_s) + offset_s - shown_s for rival in (tuned, default)]
    async with asyncio.timeout(10):
        while watch.seen_at_s is None or watch.held_at_s is None:  # noqa: ASYNC110 - a bench may look
            await asyncio.sleep(_STEP_S)
    return watch.seen_at_s - shown_s, watch.held_at_s - shown_s, theirs[0], theirs[1]


async def _shown(peer: Upsd, text: str) -> float:
    """Ask upsd on a connection of our own until it shows a status; return when it did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
    try:
        async with asyncio.timeout(10):
            while True:
                writer.write(b"GET VAR dsim ups.status\n")
                if text in (await reader.readline()).decode():
                    return boottime_s()
                await asyncio.sleep(_STEP_S)
    finally:
        writer.close()
        await writer.wait_closed()
