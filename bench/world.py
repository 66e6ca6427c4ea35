"""Worlds to measure in: a UPS that is an SNMP agent, trainers that only tell when they were called, settings files."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from powerguard.clock import boottime_s
from tests.peers.snmp_agent import SimUser


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pg-bench-", dir="/tmp") as path:
        yield Path(path)


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def secret(path: Path, text: str) -> dict[str, str]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    return {"file": str(path)}


USER = SimUser(name="bench", auth=b"authpass-of-the-bench", priv=b"privpass-of-the-bench")
"""The user of a card that speaks version 3."""


def settings(
    at: Path,
    *,
    snmp_port: int,
    table: Mapping[int, float],
    user: SimUser | None = None,
    **more: Any,  # noqa: ANN401 - any setting
) -> Path:
    """Write settings with one card. user: of version 3, with privacy; None: version 2c."""
    source: dict[str, Any] = {"kind": "snmp", "host": "127.0.0.1", "port": snmp_port}
    if user is None or user.priv is None:
        source |= {"version": "2c", "community": secret(at / "community", "public")}
    else:
        source |= {"version": 3, "user": user.name, "auth": secret(at / "auth", user.auth.decode())}
        source["priv"] = secret(at / "priv", user.priv.decode())
    whole: dict[str, Any] = {
        "mode": "rehearse",
        "host": {"kind": "command", "command": ["true"]},
        "trainers": [{"name": "bench", "url": f"unix:{at / 'trainer.sock'}", "checkpoint_s": 60}],
        "trainer_sockets": None,
        "http": {"port": free_port()},
        "control": {"socket": str(at / "powerguard.sock")},
        "journal": {"path": str(at / "journal.sqlite")},
        **more,
    }
    ups = json.dumps({"sources": [source]})[:-1]
    points = ", ".join(f"{load}: {seconds}" for load, seconds in table.items())
    lines = [f"ups: {{bench: {ups}, runtime_table: {{{points}}}}}}}"]
    lines += [f"{key}: {json.dumps(value)}" for key, value in whole.items()]
    path = at / "powerguard.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class Trainer:
    """A trainer that remembers when it was asked for a checkpoint, to the first byte, and refuses at once.

    A refused checkpoint teaches the daemon no duration, and none is in flight when the next outage begins: each outage
    finds the same needs. hang: it does not answer instead.
    """

    def __init__(self, *, hang: bool = False) -> None:
        self.asked_at_s: list[float] = []
        self.hang = hang
        self.heard = asyncio.Event()
        self._released = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def serving(self, path: Path) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._answer, path)
        try:
            yield
        finally:
            server.close()
            self._released.set()
            for writer in self._writers:
                writer.close()
            await asyncio.sleep(0.1)  # for the handlers to see it

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                first = await reader.readexactly(1)
                at_s = boottime_s()
                head = first + await reader.readuntil(b"\r\n\r\n")
                asked = b"trigger_checkpoint" in head.split(b"\r\n")[0]
                if asked:
                    self.asked_at_s.append(at_s)
                    self.heard.set()
                    if self.hang:
                        await self._released.wait()
                        break
                length = [
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ]
                if length:
                    await reader.readexactly(length[0])
                body = b'{"job": "bench", "step": 1}' if b"/status" in head else b""
                line = b"403 Forbidden" if asked else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (line, len(body)) + body)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()


@contextlib.asynccontextmanager
async def process(at: Path, *argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with (at / "process.log").open("ab") as log:
        running = await asyncio.create_subprocess_exec(sys.executable, "-P", *argv, stdout=log, stderr=log)
    try:
        yield running
    finally:
        if running.returncode is None:
            running.terminate()
            try:
                async with asyncio.timeout(12):
                    await running.wait()
            except TimeoutError:
                running.kill()
                await running.wait()
