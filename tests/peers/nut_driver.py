"""A driver of our own behind the real upsd: a UPS that takes instant commands, which dummy-ups does not.

It speaks what drivers speak to upsd on their socket (NUT developer guide, "Driver/server socket protocol"): SETINFO,
ADDCMD and their like go out, PING, SET and INSTCMD come in, and TRACKING tells how an order ended.
"""

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from powerguard.clock import boottime_s
from tests.peers.nut import UTILITY, Upsd, upsd

HANDLED, UNKNOWN, INVALID, FAILED = range(4)
_TICK_S: Final = 0.1


@dataclass
class Driver:
    """What the driver tells and how it obeys.

    commands, settable: what it offers; most_s: what it takes for a delay, as it tells upsd. status: how it says that a
    command ended; None: it never does. ignores: commands are taken and do nothing. step_s: delays are rounded up to it.
    down: they are rounded down. late_s: how long upsd still shows the value before. timers: whether it shows its
    countdown; idle: as which where none runs.
    received: every SET and INSTCMD that came.
    """

    commands: tuple[str, ...] = ("shutdown.return", "shutdown.stop", "test.battery.start")
    settable: tuple[str, ...] = ("ups.delay.shutdown", "ups.delay.start")
    values: dict[str, str] = field(
        default_factory=lambda: {
            **UTILITY,
            "ups.status": "OB DISCHRG",
            "ups.delay.shutdown": "20",
            "ups.delay.start": "30",
            "ups.timer.shutdown": "-1",
            "ups.start.auto": "yes",
        }
    )
    most_s: int | None = 7200
    status: int | None = HANDLED
    set_status: int | None = HANDLED
    ignores: bool = False
    step_s: int = 1
    down: bool = False
    late_s: float = 0.0
    timers: bool = True
    idle: int = -1
    received: list[str] = field(default_factory=list)
    off_at_s: float | None = None
    _set: dict[str, int] = field(default_factory=dict)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _ticking: asyncio.Task[None] | None = None

    async def listen(self, folder: Path) -> None:
        """Listen where upsd looks for the driver of the UPS "dsim"."""
        self._server = await asyncio.start_unix_server(self._serve, folder / "dummy-ups-dsim")
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """Leave."""
        if self._ticking is not None:
            self._ticking.cancel()
        for writer in self._writers:
            writer.close()
        if self._server is not None:
            self._server.close()

    async def _tick(self) -> None:
        """Let the timer run, and tell it."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self.timers:
                left_s = self.idle if self.off_at_s is None else max(0, int(self.off_at_s - boottime_s()))
                self._tell("ups.timer.shutdown", str(left_s))

    def _tell(self, name: str, value: str) -> None:
        if self.values.get(name) != value:
            self.values[name] = value
            self._send(f'SETINFO {name} "{value}"')

    def _send(self, *lines: str) -> None:
        for writer in self._writers:
            writer.write("".join(f"{line}\n" for line in lines).encode())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while line := await reader.readline():
                self._hear(shlex.split(line.decode()))

    def _hear(self, words: list[str]) -> None:
        match words:
            case ["PING"]:
                self._send("PONG")
            case ["DUMPALL"]:
                self._dump()
            case ["SET", name, value, *tracking]:
                self.received.append(f"{name} {value}")
                if self.set_status == HANDLED:
                    step_s = self.step_s
                    taken = int(value) // step_s * step_s if self.down else -(-int(value) // step_s) * step_s
                    self._set[name] = taken
                    if self.late_s:
                        asyncio.get_running_loop().call_later(self.late_s, self._tell, name, str(taken))
                    else:
                        self._tell(name, str(taken))
                self._end(tracking, self.set_status)
            case ["INSTCMD", command, *tracking]:
                self.received.append(command)
                if self.status == HANDLED and not self.ignores:
                    delay_s = self._set.get("ups.delay.shutdown", int(self.values["ups.delay.shutdown"]))
                    self.off_at_s = boottime_s() + delay_s if command == "shutdown.return" else None
                self._end(tracking, self.status)
            case _:
                pass

    def _end(self, tracking: list[str], status: int | None) -> None:
        if tracking[-2:-1] == ["TRACKING"] and status is not None:
            self._send(f"TRACKING {tracking[-1]} {status}")

    def _dump(self) -> None:
        shown = {name: value for name, value in self.values.items() if self.timers or "timer" not in name}
        self._send(*(f'SETINFO {name} "{value}"' for name, value in shown.items()))
        for name in self.settable:
            self._send(f"SETFLAGS {name} RW NUMBER")
            if self.most_s is not None:
                self._send(f"ADDRANGE {name} 0 {self.most_s}")
        self._send(*(f"ADDCMD {command}" for command in self.commands), "DATAOK", "DUMPDONE")


@asynccontextmanager
async def upsd_with(driver: Driver) -> AsyncIterator[Upsd]:
    """Run upsd with this driver behind it."""
    try:
        async with upsd(values={"ups.status": driver.values["ups.status"]}, bring=driver.listen) as served:
            yield served
    finally:
        await driver.close()
