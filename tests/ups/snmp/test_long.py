"""What an snmp source costs in the long run: processor time of a poll, and nothing kept after thousands of them."""

import asyncio
import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.events import Reading, SourceFailed
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.snmp.port import CardPort
from powerguard.ups.snmp.source import SnmpSource
from tests.peers.snmp_agent import Fault, SimUser, SnmpAgent
from tests.ups.snmp.snmp_helpers import card, options, secret, table

pytestmark = pytest.mark.slow

WARM, POLLS, TIMEOUTS, AT_ONCE = 2_000, 10_000, 1_000, 10
FORGOTTEN_S = 15.0
"""Until no late answer is waited for any more."""
COME_AND_GO = 160
"""Objects of a poll, a timer or a context that are just there or not when they are counted: 20 to 110 were seen."""


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def objects() -> int:
    """How many there are: tracing where they were made would take ten times as long."""
    gc.collect()
    return len(gc.get_objects())


def resident_kb() -> int:
    """Memory of this process now, in KiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def source_of(agent: SnmpAgent, **more: object) -> SnmpSource:
    settings = options(agent.port, **more)
    port = CardPort(settings, retries=0)
    return SnmpSource(settings, ups="a", clock=boottime_s, port=port, profiles=load_profiles(None))


def credentials(version: int | str, folder: Path) -> tuple[SimUser | None, dict[str, Any]]:
    """Return the card's user, and the settings that reach it."""
    if version != 3:
        return None, {"version": version}
    user = SimUser(name="pg", auth=b"authpass-of-the-tests", priv=b"privpass-of-the-tests")
    auth = secret(folder, "auth", "authpass-of-the-tests")
    priv = secret(folder, "priv", "privpass-of-the-tests")
    return user, {"version": 3, "user": "pg", "auth": auth, "priv": priv}


@pytest.mark.parametrize("version", ["2c", 3])
async def test_ten_thousand_polls_leave_nothing(version: int | str, tmp_path: Path) -> None:
    """Of a card with two families, at its whole and its brief polls; card and source are in this process."""
    heard: list[Reading | SourceFailed] = []
    user, more = credentials(version, tmp_path)
    async with card(table("families/xups"), user=user) as agent:
        source = source_of(agent, **more)
        for _ in range(500):
            await source._poll_and_publish(heard.append)
        heard.clear()
        began_s = time.process_time()
        for _ in range(500):
            await source._poll_and_publish(heard.append)
        cpu_ms = (time.process_time() - began_s) / 500 * 1000
        assert all(isinstance(event, Reading) for event in heard)
        heard.clear()
        for _ in range(WARM):
            await source._poll_and_publish(lambda _: None)
        before, open_before, resident_before_kb = objects(), descriptors(), resident_kb()
        for _ in range(POLLS - WARM):
            await source._poll_and_publish(lambda _: None)
        grown, grown_kb = objects() - before, resident_kb() - resident_before_kb
        await source._port.close()
        assert descriptors() <= open_before
    print(f"{cpu_ms:.2f} ms a poll with its card; {POLLS - WARM} polls: {grown} objects and {grown_kb} KiB more")
    assert grown < COME_AND_GO, "one object in 50 polls would be seen"
    assert grown_kb < 4096


@pytest.mark.parametrize("version", ["2c", 3])
async def test_a_thousand_timeouts_leave_nothing(version: int | str, tmp_path: Path) -> None:
    """Ten cards that die at once: no request, no timer, no descriptor stays, and they are found again."""
    user, more = credentials(version, tmp_path)
    async with card(table("apc"), user=user) as agent:
        sources = [source_of(agent, timeout_s=1.0, **more) for _ in range(AT_ONCE)]

        async def poll(times: int) -> list[Reading | SourceFailed]:
            heard: list[Reading | SourceFailed] = []
            for _ in range(times):
                await asyncio.gather(*(source._poll_and_publish(heard.append) for source in sources))
            return heard

        async def are_read() -> bool:
            """Whether all are read within some polls: on a busy machine an answer may take longer than a second."""
            for _ in range(5):
                if all(isinstance(event, Reading) for event in await poll(1)):
                    return True
            return False

        assert await are_read()
        agent.fault = Fault.DROP
        await poll(2)
        await asyncio.sleep(FORGOTTEN_S)
        before, open_before, resident_before_kb = objects(), descriptors(), resident_kb()
        heard = await poll(TIMEOUTS // AT_ONCE)
        assert len(heard) == TIMEOUTS
        assert all(isinstance(event, SourceFailed) for event in heard)
        heard.clear()
        await asyncio.sleep(FORGOTTEN_S)
        grown, grown_kb = objects() - before, resident_kb() - resident_before_kb
        print(f"{TIMEOUTS} timeouts: {grown} objects and {grown_kb} KiB more")
        assert grown < 2 * COME_AND_GO, "one object in 3 timeouts would be seen"
        assert grown_kb < 8192  # 28 KiB for 400 timeouts of ports alone; the rest is the allocator's
        assert descriptors() <= open_before
        agent.fault = Fault.NONE
        assert await are_read()
        for source in sources:
            await source._port.close()
