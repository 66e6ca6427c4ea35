"""What an apcupsd source keeps after thousands of polls, and of answers that never came: nothing."""

import asyncio
import gc
import tracemalloc
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.events import Reading, SourceFailed
from powerguard.ups.apcupsd.source import ApcupsdSource
from tests.peers.ports import free_port
from tests.ups.apcupsd.apcupsd_helpers import apcupsd, options

pytestmark = pytest.mark.slow

POLLS, TIMEOUTS = 10_000, 1_000


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def kept() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def test_thousands_of_polls_and_of_timeouts_leave_nothing() -> None:
    """New readings, old ones, silence, and nobody there: each a poll, and then as if it had not been."""
    heard: list[Reading | SourceFailed] = []
    async with apcupsd() as peer:
        source = ApcupsdSource(options(peer.port, timeout_s=0.5), ups="a", clock=boottime_s)

        async def polls(times: int) -> None:
            for number in range(times):
                if number % 10 == 0:
                    peer.look()
                await source._poll(heard.append)
                heard[:-1] = []

        nobody = ApcupsdSource(options(free_port()), ups="a", clock=boottime_s)

        async def timeouts(times: int) -> None:
            for number in range(times):
                if number % 2:
                    await nobody._poll(heard.append)
                else:
                    peer.mute = True
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.002):
                            await source._poll(heard.append)
                    peer.mute = False
                heard[:-1] = []

        tracemalloc.start()
        try:
            await polls(500)
            await timeouts(100)
            before, open_before, tasks_before = kept(), descriptors(), len(asyncio.all_tasks())
            await polls(POLLS)
            assert isinstance(heard[-1], Reading)
            await timeouts(TIMEOUTS)
            assert isinstance(heard[-1], SourceFailed)
            await polls(1)
            await asyncio.sleep(0.2)
            assert kept() - before < 100_000
        finally:
            tracemalloc.stop()
        assert abs(descriptors() - open_before) <= 2
        assert len(asyncio.all_tasks()) <= tasks_before + 2
        source._client.close()
