"""What the tests of the apcupsd source share: an apcupsd of ours whose every word is the test's, and what is heard."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TypeVar

from powerguard.clock import Clock
from powerguard.core.model.events import Reading, SourceFailed
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.apcupsd.source import ApcupsdSource
from tests.peers.hurried import now_s
from tests.peers.ports import free_port

ONLINE, ONBATT, SHUTDOWN_ON_MAINS = 0x05000008, 0x05060010, 0x05000208
NOON_S = 1_795_262_400.0
Kind = TypeVar("Kind", Reading, SourceFailed)
Heard = asyncio.Queue[Reading | SourceFailed]


def date(wall_s: float) -> str:
    return datetime.fromtimestamp(int(wall_s), tz=UTC).strftime("%Y-%m-%d %H:%M:%S +0000  ")


class FakeApcupsd:
    """Answers `status` over TCP as apcupsd does.

    records: what it tells beside dates. every_s: how often it looks at its UPS, by its own clock; None: never again.
    ahead_s: its wall clock against ours. mute: it accepts, and says nothing. raw: it answers these bytes instead.
    """

    def __init__(self, **records: str) -> None:
        self.flags = ONLINE
        self.records = {"UPSNAME": "rack-a", "LINEV": "230.0 Volts", "LOADPCT": "40.0 Percent"}
        self.records |= {"BCHARGE": "100.0 Percent", "TIMELEFT": "30.0 Minutes", **records}
        self.every_s: float | None = 1.0
        self.ahead_s = NOON_S
        self.looked_s = now_s()
        self.mute = False
        self.raw: bytes | None = None
        self.questions = 0
        self.connections = 0
        self.port = free_port()  # the same when it is killed and started anew
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def set(self, flags: int | None = None, **records: str) -> None:
        """Let it look at the UPS, which now says this; "" takes a record away."""
        self.flags = self.flags if flags is None else flags
        self.records |= records
        self.look()

    def look(self) -> None:
        """Let it look at the UPS now, at another second than the last time."""
        at_s = now_s()
        if int(at_s + self.ahead_s) == int(self.looked_s + self.ahead_s):
            self.ahead_s += 1.0
        self.looked_s = at_s

    def status(self) -> bytes:
        at_s = now_s()
        while self.every_s is not None and at_s - self.looked_s >= self.every_s:
            self.looked_s += self.every_s
        lines = [f"{'DATE':9}: {date(self.looked_s + self.ahead_s)}\n"]
        lines += [f"{key:9}: {text}\n" for key, text in self.records.items() if text]
        lines += [f"{'STATFLAG':9}: 0x{self.flags:08X}\n", f"{'END APC':9}: {date(at_s + self.ahead_s)}\n"]
        frames = [line.encode() for line in lines]
        frames.insert(0, f"{'APC':9}: 001,{len(frames):03d},{sum(map(len, frames)):04d}\n".encode())
        return b"".join(len(frame).to_bytes(2, "big") + frame for frame in frames) + b"\0\0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(2), "big")
                assert await reader.readexactly(length) == b"status"
                self.questions += 1
                if not self.mute:
                    writer.write(self.status() if self.raw is None else self.raw)
                    await writer.drain()
        except (EOFError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def asked(self, times: int) -> None:
        """Wait until it has been asked so often from now on."""
        until = self.questions + times
        while self.questions < until:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.02)

    def hang_up(self) -> None:
        """Cut every connection, and go on listening."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """As a process that is killed: nobody listens, and every connection is gone."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self.hang_up()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def apcupsd(**records: str) -> AsyncIterator[FakeApcupsd]:
    peer = FakeApcupsd(**records)
    await peer.start()
    try:
        yield peer
    finally:
        await peer.stop()


def options(port: int, **more: object) -> ApcupsdOptions:
    return ApcupsdOptions.model_validate({"kind": "apcupsd", "port": port, "poll_s": 0.2, **more})


@asynccontextmanager
async def listening(
    port: int, *, clock: Clock = now_s, limit_s: float = 60.0, **more: object
) -> AsyncIterator[tuple[ApcupsdSource, Heard]]:
    """Run a source, and hand out what it publishes."""
    heard: Heard = asyncio.Queue()
    source = ApcupsdSource(options(port, **more), ups="rack-a", clock=clock, jitter=lambda: 0.5)
    task = asyncio.get_running_loop().create_task(source.run(heard.put_nowait))
    try:
        async with asyncio.timeout(limit_s):
            yield source, heard
    finally:
        assert not task.done(), task.exception()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(heard: Heard, kind: type[Kind]) -> Kind:
    while not isinstance(event := await heard.get(), kind):
        pass
    return event
