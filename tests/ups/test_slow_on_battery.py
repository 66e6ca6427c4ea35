"""A daemon of a UPS that answers slowly: on battery it is given up soon, and must be heard all the same."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from powerguard.core.model.events import Reading, SourceFailed
from tests.ups.apcupsd import apcupsd_helpers
from tests.ups.nut import nut_helpers

pytestmark = pytest.mark.hurried

SLOW_S = 1.2
"""Longer than a source waits on battery (0.8 s), within the `timeout_s` of these tests."""


class Lane:
    """A connection's way to a port of this host, on which what is answered takes delay_s."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._lead, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        answers, questions = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, questions, late=False))
                group.create_task(self._carry(answers, writer, late=True))
        except* ConnectionError:
            pass
        finally:
            writer.transport.abort()
            questions.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, late: bool) -> None:
        while data := await reader.read(65536):
            if late and self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


async def test_a_upsd_that_is_slow_on_battery_shows_utility() -> None:
    """It is lost first, for nobody waits for it on battery; then it has its whole timeout again."""
    async with nut_helpers.FakeUpsd().serving() as upsd:
        lane = Lane(upsd.port)
        async with lane.open() as port:
            settings = nut_helpers.options(port, timeout_s=5.0)
            async with nut_helpers.listening(settings, limit_s=100.0) as (_, heard):
                await nut_helpers.until(heard, Reading)
                upsd.values["ups.status"] = "OB"
                await nut_helpers.until(heard, Reading, lambda reading: reading.output_source == "battery")
                lane.delay_s = SLOW_S
                await nut_helpers.until_lost(heard)
                upsd.values["ups.status"] = "OL"
                await nut_helpers.until(heard, Reading, lambda reading: reading.output_source == "utility")


async def test_an_apcupsd_that_is_slow_on_battery_shows_utility() -> None:
    async with apcupsd_helpers.apcupsd() as peer:
        lane = Lane(peer.port)
        async with lane.open() as port, apcupsd_helpers.listening(port, timeout_s=5.0, limit_s=100.0) as (_, heard):
            peer.set(apcupsd_helpers.ONBATT, LINEV="0.0 Volts")
            while (await apcupsd_helpers.until(heard, Reading)).output_source != "battery":
                pass
            lane.delay_s = SLOW_S
            while not (await apcupsd_helpers.until(heard, SourceFailed)).lost:
                pass
            peer.set(apcupsd_helpers.ONLINE, LINEV="230.0 Volts")
            while (await apcupsd_helpers.until(heard, Reading)).output_source != "utility":
                pass
