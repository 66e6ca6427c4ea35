"""What a nut source costs in the long run: processor time of a poll, and nothing kept after thousands of them."""

import asyncio
import contextlib
import gc
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.events import Reading, SourceFailed
from powerguard.ups.nut.connection import LateError, Link, LinkError
from powerguard.ups.nut.protocol import encode
from powerguard.ups.nut.source import NutSource
from tests.peers.nut import upsd
from tests.peers.ports import free_port
from tests.ups.nut.nut_helpers import FakeUpsd, options

pytestmark = pytest.mark.slow


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def kept() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.peer("upsd", "dummy-ups")
async def test_ten_thousand_polls_cost_a_millisecond_each_and_leave_nothing() -> None:
    """Of a real upsd, which runs elsewhere: what is counted is ours."""
    heard: list[Reading | SourceFailed] = []
    async with upsd() as peer:
        source = NutSource(options(peer.port), ups="a", clock=boottime_s)
        for _ in range(500):
            await source._poll_and_publish(heard.append, whole=True)
        heard.clear()
        began_s = time.process_time()
        for _ in range(2000):
            await source._poll_and_publish(heard.append, whole=True)
        cpu_ms = (time.process_time() - began_s) / 2000 * 1000
        assert len(heard) == 2000
        assert all(isinstance(event, Reading) for event in heard)
        heard.clear()
        tracemalloc.start()
        try:
            await source._poll_and_publish(heard.append, whole=True)
            before, open_before = kept(), descriptors()
            for _ in range(10_000):
                await source._poll_and_publish(lambda _: None, whole=True)
            assert kept() - before < 50_000
        finally:
            tracemalloc.stop()
        assert descriptors() == open_before
        await source._drop()
    print(f"{cpu_ms:.2f} ms of processor time for a whole poll, {os.cpu_count()} cores")
    assert cpu_ms < 2.0  # 0.5 measured on a machine at rest; the bar of 1 ms is the benchmark's to hold


async def test_a_thousand_timeouts_leave_nothing() -> None:
    """Late answers, dead connections, refused ones: no task, no descriptor, no memory stays."""

    def silent(_upsd: FakeUpsd, _words: tuple[str, ...], _writer: asyncio.StreamWriter) -> bytes | None:
        return None

    async with FakeUpsd(answer=silent).serving() as peer:
        tasks_before = 0
        tracemalloc.start()
        try:
            before = open_before = 0
            for number in range(1100):
                link = await Link.open(["127.0.0.1"], peer.port, "there", limit_s=1.0, on_lost=lambda: None)
                with contextlib.suppress(LateError):
                    await link.ask(encode("GET", "VAR", "dsim", "ups.status"), limit_s=0.001)
                await link.close()
                with contextlib.suppress(LinkError):
                    await Link.open(["127.0.0.1"], free_port(), "nobody", limit_s=1.0, on_lost=lambda: None)
                peer.requests.clear()
                if number == 100:
                    await asyncio.sleep(0.2)
                    before, open_before, tasks_before = kept(), descriptors(), len(asyncio.all_tasks())
            await asyncio.sleep(0.2)
            assert kept() - before < 100_000
        finally:
            tracemalloc.stop()
        assert abs(descriptors() - open_before) <= 2
        assert len(asyncio.all_tasks()) <= tasks_before + 2
