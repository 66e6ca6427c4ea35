"""What the tests of the nut source share: options, a running source, and a upsd of our own that does what none does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from powerguard.clock import Clock
from powerguard.core.model.events import Reading, SourceFailed
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.nut.protocol import NutError, split
from powerguard.ups.nut.source import NutSource
from tests.peers.hurried import now_s
from tests.peers.ports import free_port

Heard = asyncio.Queue[Reading | SourceFailed]
Kind = TypeVar("Kind", Reading, SourceFailed)
VALUES = {
    "driver.name": "usbhid-ups",
    "ups.status": "OL",
    "ups.load": "40",
    "battery.charge": "100",
    "battery.runtime": "1800",
    "input.voltage": "230",
}


def options(port: int, **more: object) -> NutOptions:
    """Return settings with all the time that may be given, on utility: where nobody hangs, only the machine is slow."""
    given = {"kind": "nut", "host": "127.0.0.1", "port": port, "name": "dsim", "timeout_s": 5.0, **more}
    return NutOptions.model_validate(given)


@asynccontextmanager
async def listening(
    settings: NutOptions, *, limit_s: float = 40, clock: Clock = now_s
) -> AsyncIterator[tuple[NutSource, Heard]]:
    """Run a source and hand out what it publishes; it must still run at the end, and leave when told to."""
    heard: Heard = asyncio.Queue()
    source = NutSource(settings, ups="rack-a", clock=clock)
    task = asyncio.get_running_loop().create_task(source.run(heard.put_nowait))
    try:
        async with asyncio.timeout(limit_s):
            yield source, heard
    finally:
        assert not task.done(), task.exception()
        task.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([task])


class Later:
    """A clock that can be set forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return now_s() + self.ahead_s


async def until(heard: Heard, kind: type[Kind], fits: Callable[[Kind], bool] = lambda _: True) -> Kind:
    """Return the next event of a kind that fits."""
    while not (isinstance(event := await heard.get(), kind) and fits(event)):
        pass
    return event


async def fails(heard: Heard, says: str) -> SourceFailed:
    """Return the next failure that says so; on a busy machine somebody may be too slow before."""
    return await until(heard, SourceFailed, lambda failure: says in failure.reason)


async def until_lost(heard: Heard) -> SourceFailed:
    return await until(heard, SourceFailed, lambda failure: failure.lost)


def forget(heard: Heard) -> None:
    while not heard.empty():
        heard.get_nowait()


Answerer = Callable[["FakeUpsd", tuple[str, ...], asyncio.StreamWriter], bytes | None]


class FakeUpsd:
    """Speaks the protocol, as far as `answer` lets it. requests: every line it was sent, as words."""

    def __init__(self, values: Mapping[str, str] = VALUES, answer: Answerer | None = None) -> None:
        self.values = dict(values)
        self.answer = answer or (lambda upsd, words, _writer: upsd.honest(words))
        self.requests: list[tuple[str, ...]] = []
        self.connections = 0
        self.port = free_port()  # the same when it serves again, and nobody's when it does not
        self._tasks: set[asyncio.Task[None]] = set()

    def honest(self, words: tuple[str, ...]) -> bytes:
        match words:
            case ("GET", "VAR", ups, name):
                value = self.values.get(name)
                return b"ERR VAR-NOT-SUPPORTED\n" if value is None else f'VAR {ups} {name} "{value}"\n'.encode()
            case ("LIST", "VAR", ups):
                rows = "".join(f'VAR {ups} {name} "{value}"\n' for name, value in self.values.items())
                return f"BEGIN LIST VAR {ups}\n{rows}END LIST VAR {ups}\n".encode()
            case ("LIST", "CLIENT", ups):
                return f"BEGIN LIST CLIENT {ups}\nEND LIST CLIENT {ups}\n".encode()
            case ("STARTTLS",):
                return b"ERR FEATURE-NOT-CONFIGURED\n"
            case ("LOGOUT",):
                return b"OK Goodbye\n"
            case _:
                return b"OK\n"

    def said(self, word: str) -> int:
        return sum(words[0] == word for words in self.requests if words)

    async def hears(self, word: str, times: int = 1) -> None:
        """Wait until it has been told a word so many times."""
        async with asyncio.timeout(40):
            while self.said(word) < times:  # noqa: ASYNC110 - the fake tells nobody
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeUpsd"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                while line := await reader.readline():
                    try:
                        words = split(line.decode().rstrip("\n"))
                    except (UnicodeDecodeError, NutError):
                        continue
                    self.requests.append(words)
                    answer = self.answer(self, words, writer)
                    if answer is not None:
                        writer.write(answer)
                        await writer.drain()
                    if words == ("STARTTLS",) and answer is not None and answer.startswith(b"OK"):
                        # What follows is a handshake that is never answered. Its random bytes may look like a line.
                        while await reader.read(65536):
                            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()
