"""The real apcupsd: its SNMP driver before a simulated card, or a net slave of another NIS; and its real apccontrol.

Everything that it would do to this machine is replaced by text substitution in a private copy of apccontrol: `shutdown`
and `wall` write down how they were called. Nothing runs as a service, nothing is read from /etc/apcupsd by it.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from powerguard.clock import boottime_s
from powerguard.ups.apcupsd.options import ApcupsdOptions
from powerguard.ups.apcupsd.protocol import NisError, Status
from powerguard.ups.apcupsd.source import NisClient
from tests.peers import UNPACKED, absent, require
from tests.peers.ports import free_port

_RECORD = """#!/bin/sh
arguments=$(printf ' <%s>' "$@")
printf '%s%s\\n' {word} "$arguments" >>{log}
"""
"""One write for each line: wall is called in the background, and writes at the same time as shutdown."""


def stock_apccontrol() -> str:
    """The text of apcupsd's own apccontrol; skips the test without it."""
    paths = (UNPACKED / "apcupsd/etc/apcupsd/apccontrol", Path("/etc/apcupsd/apccontrol"))
    found = next((path for path in paths if path.exists()), None)
    return absent("apccontrol") if found is None else found.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripts:
    """A private SCRIPTDIR.

    calls: every line is a call of shutdown, wall or killpower, as `word <argument> <argument>`.
    """

    folder: Path
    calls: Path

    def called(self, word: str = "") -> list[str]:
        """Every call so far, of that word only when one is given."""
        lines = self.calls.read_text(encoding="utf-8", errors="replace").splitlines() if self.calls.exists() else []
        return [line for line in lines if not word or line.split(" ", 1)[0] == word]

    def holds(self, name: str) -> bool:
        """Whether there is such a file anywhere in it."""
        return any(self.folder.rglob(name))

    def add(self, name: str, text: str) -> Path:
        """Put an executable file beside apccontrol."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def tame(self, text: str) -> str:
        """Return an apccontrol (theirs or ours) that does all it does, but to stand-ins in this folder."""
        for word in ("shutdown", "wall", "apcupsd"):
            stand_in = self.folder / f"recorded-{word}"
            stand_in.write_text(_RECORD.format(word=word, log=self.calls), encoding="utf-8")
            stand_in.chmod(0o755)
        lines = []
        places = {"SHUTDOWN": "shutdown", "WALL": "wall", "APCUPSD": "apcupsd"}
        for line in text.splitlines():
            name, equals, _ = line.partition("=")
            if equals and name in places:
                lines.append(f"{name}={self.folder}/recorded-{places[name]}")
            elif equals and name == "SCRIPTDIR":
                lines.append(f"SCRIPTDIR={self.folder}")
            else:
                lines.append(line.replace("/etc/apcupsd", str(self.folder)).replace("sleep 10", "sleep 0"))
        tamed = "\n".join(lines) + "\n"
        assert "/sbin/" not in tamed.replace(str(self.folder), ""), "something of the machine is still within reach"
        return tamed


@contextlib.contextmanager
def scripts() -> Iterator[Scripts]:
    """Make a private SCRIPTDIR. Its path has no space: apccontrol quotes nothing."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg-apc-"))
    try:
        made = folder / "scripts"
        made.mkdir()
        yield Scripts(folder=made, calls=folder / "calls")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(kw_only=True)
class Apcupsd:
    """A running apcupsd. port: of its NIS."""

    port: int
    folder: Path
    process: asyncio.subprocess.Process

    async def status(self) -> Status:
        """Ask it once."""
        client = NisClient(ApcupsdOptions(kind="apcupsd", port=self.port))
        try:
            return await client.status(10.0)
        finally:
            client.close()

    async def until(self, holds: Callable[[Status], bool], limit_s: float = 60.0) -> Status:
        """Wait for a status that shows it."""
        end_s = boottime_s() + limit_s
        result: object = None
        while boottime_s() < end_s:
            assert self.process.returncode is None, "apcupsd is gone"
            with contextlib.suppress(NisError):
                result = status = await self.status()
                if holds(status):
                    return status
            await asyncio.sleep(0.1)
        msg = f"waited {limit_s:g} s; the last status: {result}"
        raise AssertionError(msg)

    @property
    def powerfail(self) -> bool:
        """Whether it has written the flag that makes a halt end in killpower."""
        return (self.folder / "powerfail").exists()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def apcupsd(
    driver: str,
    device: str,
    *,
    scripts_: Scripts,
    upsname: str = "rack-a",
    settings: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Apcupsd]:
    """Run the real apcupsd with a SCRIPTDIR of ours. driver and device: UPSTYPE and DEVICE; settings: more lines."""
    program = require("apcupsd")
    folder = scripts_.folder.parent
    port = free_port()
    lines = {
        "UPSNAME": upsname,
        "UPSCABLE": "ether",
        "UPSTYPE": driver,
        "DEVICE": device,
        "POLLTIME": 1,
        "ONBATTERYDELAY": 1,
        "BATTERYLEVEL": 5,
        "MINUTES": 3,
        "TIMEOUT": 0,
        "KILLDELAY": 0,
        "LOCKFILE": folder,
        "SCRIPTDIR": scripts_.folder,
        "PWRFAILDIR": folder,
        "NOLOGINDIR": folder,
        "EVENTSFILE": folder / "events",
        "NETSERVER": "on",
        "NISIP": "127.0.0.1",
        "NISPORT": port,
        "UPSCLASS": "standalone",
        "UPSMODE": "disable",
        **(settings or {}),
    }
    config = folder / "apcupsd.conf"
    text = "".join(f"{key} {value}\n" for key, value in lines.items())
    config.write_text(f"## apcupsd.conf v1.1 ##\n{text}", encoding="utf-8")
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(program, "-b", "-f", str(config), "-P", str(folder / "pid")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
        )
    made = Apcupsd(port=port, folder=folder, process=process)
    try:
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
