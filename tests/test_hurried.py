"""The loop that does not wait: an hour in a blink, what was sent comes first, and the time of others is not skipped."""

import asyncio
import sys
import time
from typing import Any

import pytest

from powerguard.clock import boottime_s
from tests.peers.hurried import HurriedLoop, now_s

pytestmark = pytest.mark.hurried


async def test_an_hour_is_skipped() -> None:
    began_s, began_here_s = now_s(), time.process_time()
    await asyncio.sleep(3.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5.0):
            await asyncio.Event().wait()
    assert 8.0 <= now_s() - began_s < 8.1
    assert time.process_time() - began_here_s < 1.0
    assert now_s() - boottime_s() > 1.0


async def test_what_was_sent_comes_before_patience_ends() -> None:
    """A hundred questions and answers over the loopback, each with its patience; none of it passes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    began_s = now_s()
    for _ in range(100):
        writer.write(b"?\n")
        async with asyncio.timeout(10.0):
            assert await reader.readline() == b"?\n"
    assert now_s() - began_s < 5.0
    writer.close()
    await writer.wait_closed()
    server.close()


async def test_a_processor_that_is_busy_takes_no_time() -> None:
    async with asyncio.timeout(0.05):
        time.sleep(0.2)  # noqa: ASYNC251 - that is the point
        await asyncio.sleep(0)


class Late:
    """The kernel's epoll on a machine that takes 0.1 s to return from each look."""

    def __init__(self, epoll: Any) -> None:  # noqa: ANN401 - select.epoll, which has no type of its own here
        self.epoll = epoll
        self.looks = 0

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        """Look, and be late."""
        self.looks += 1
        time.sleep(0.1)
        return list(self.epoll.poll(timeout, most))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Leave all else to epoll."""
        return getattr(self.epoll, name)


async def test_a_look_at_what_is_ready_takes_no_time_of_a_busy_machine() -> None:
    """Another process may have the processor in the middle of it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HurriedLoop)
    selector = loop._selector  # type: ignore[attr-defined]
    selector._selector = Late(selector._selector)
    async with asyncio.timeout(0.05):
        for _ in range(3):
            await asyncio.sleep(0)
    assert selector._selector.looks >= 2


@pytest.mark.parametrize("by", ["thread", "child"])
async def test_a_thread_or_a_child_has_the_time_of_the_machine(by: str) -> None:
    async with asyncio.timeout(60):
        began_s = boottime_s()
        if by == "thread":
            await asyncio.to_thread(time.sleep, 0.3)
        else:
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(0.3)")
            assert await child.wait() == 0
    assert boottime_s() - began_s >= 0.3
