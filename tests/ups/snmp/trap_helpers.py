"""What the tests of the trap port share: a listener on a free port, and net-snmp's own senders."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powerguard.clock import Clock, boottime_s
from powerguard.ups.snmp.options import TrapOptions
from powerguard.ups.snmp.traps import Card, TrapListener
from tests.peers import ports, require

ON_BATTERY = "1.3.6.1.2.1.33.2.0.1"
ENGINE = "80001f8805706f776572"
AUTH, PRIV = "authpass-of-the-traps", "privpass-of-the-traps"
LIMIT_S = 60.0
CARD = (Card(ups="rack-a", hosts=("127.0.0.1",)),)


@dataclass
class Port:
    """A running listener, and which UPSes it has had polled."""

    listener: TrapListener
    polled: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    @property
    def results(self) -> dict[str, int]:
        """What has come, without the noughts."""
        return {result: count for result, count in self.listener.counts.results.items() if count}

    async def until(self, count: int) -> dict[str, int]:
        """Wait until so many datagrams have been judged."""
        async with asyncio.timeout(LIMIT_S):
            while sum(self.results.values()) < count:  # noqa: ASYNC110 - the listener tells nobody but its counters
                await asyncio.sleep(0.005)
        return self.results

    async def next_poll(self) -> str:
        async with asyncio.timeout(LIMIT_S):
            return await self.polled.get()


@asynccontextmanager
async def listening(
    *, cards: Sequence[Card] = CARD, clock: Clock = boottime_s, listen: str = "127.0.0.1", **more: object
) -> AsyncIterator[Port]:
    """Listen on a free port."""
    names = {"1.3.6.1.2.1.33.2.1": "on_battery"}
    options = TrapOptions.model_validate({"listen": listen, "port": ports.free_port(), **more})
    polled: asyncio.Queue[str] = asyncio.Queue()
    listener = TrapListener(
        options, cards=cards, poll=polled.put_nowait, clock=clock, wall=lambda: 1_795_000_000.0, names=lambda: names
    )
    task = asyncio.get_running_loop().create_task(listener.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            while listener.port == 0:
                assert not task.done(), task.exception()
                await asyncio.sleep(0.005)
        yield Port(listener, polled)
    finally:
        task.cancel()
        await asyncio.wait([task])
        with contextlib.suppress(asyncio.CancelledError):
            task.result()


free_port = ports.free_port


V2C = ("-v2c", "-c", "public")
TRAP_V1 = ("1.3.6.1.2.1.33.2", "10.9.8.7", "6", "1", "55")
TRAP_V2 = ("55", ON_BATTERY)


def v3(*, auth: str = AUTH, priv: str = PRIV, user: str = "pgtrap", level: str = "authPriv") -> tuple[str, ...]:
    words = ("-v3", "-u", user, "-l", level, "-a", "SHA", "-A", auth)
    return (*words, "-x", "AES", "-X", priv) if level == "authPriv" else words


async def send(program: str, port: int, words: Sequence[str], trap: Sequence[str], host: str = "127.0.0.1") -> int:
    """Send with snmptrap or snmpinform; returns its exit status: 0 of an inform that was answered."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pg-trap-") as folder:
        environment = {
            **os.environ,
            "MIBS": "",
            "MIBDIRS": folder,
            "SNMP_PERSISTENT_DIR": folder,
            "SNMPCONFPATH": folder,
        }
        argv = (require(program), "-M", "", "-m", "", "-r", "2", "-t", "5", *words, f"udp:{host}:{port}", *trap)
        child = await asyncio.create_subprocess_exec(
            *argv, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(LIMIT_S):
            stdout, _ = await child.communicate()
    print(stdout.decode())
    assert child.returncode is not None
    return child.returncode


def secret_file(folder: Path, name: str, text: str) -> dict[str, str]:
    """Return a secret as settings name it."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o400)
    return {"file": str(path)}


def users(folder: Path, **more: object) -> list[dict[str, Any]]:
    """Return `traps.users` with one user, whose card is rack-a."""
    auth, priv = secret_file(folder, "trap-auth", AUTH), secret_file(folder, "trap-priv", PRIV)
    return [{"user": "pgtrap", "auth": auth, "priv": priv, "engines": {"rack-a": ENGINE}, **more}]
