"""net-snmp's snmpd as a UPS card: its own answers to our requests, v1, v2c and v3, on a free port of the loopback.

The objects are `override -rw` lines, so a test changes the card's mind with a SET (`Snmpd.set`, by snmpset).
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from powerguard.ups.profiles.vocabulary import Answer, Oid
from tests.peers import require
from tests.peers.ports import free_port

USER, AUTH, PRIV = "pg", "authpass-of-the-tests", "privpass-of-the-tests"
COMMUNITY, WRITE_COMMUNITY = "public-of-the-tests", "private-of-the-tests"
_TYPES = {int: "integer", bytes: "octet_str", Oid: "object_id"}


@dataclass(frozen=True, slots=True)
class Snmpd:
    """A running snmpd."""

    port: int

    async def set(self, oid: str, kind: str, value: str) -> None:
        """Change one object. kind: as snmpset writes it (i, t, u, s)."""
        argv = (require("snmpset"), "-v2c", "-c", WRITE_COMMUNITY, "-M", "", "-m", "", "-On", f"127.0.0.1:{self.port}")
        child = await asyncio.create_subprocess_exec(
            *argv, f".{oid}", kind, value, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        stdout, stderr = await child.communicate()
        assert child.returncode == 0, (stdout, stderr)


def _config(values: Mapping[str, Answer], ticks: frozenset[str], further: Sequence[str]) -> str:
    lines = [
        *further,
        f"rocommunity {COMMUNITY} 127.0.0.1",
        f"rwcommunity {WRITE_COMMUNITY} 127.0.0.1",
        f"createUser {USER} SHA {AUTH} AES {PRIV}",
        f"rwuser {USER} authpriv",
    ]
    for oid, value in values.items():
        kind = "timeticks" if oid in ticks else _TYPES[type(value)]
        if isinstance(value, int) and value >= 2**31:
            kind = "uinteger"
        match value:
            case bytes():
                written = f'"{value.decode()}"'
            case Oid():
                written = f".{value}"
            case _:
                written = str(value)
        lines.append(f"override -rw .{oid} {kind} {written}")
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def snmpd(
    values: Mapping[str, Answer], *, ticks: frozenset[str] = frozenset(), lines: Sequence[str] = ()
) -> AsyncIterator[Snmpd]:
    """Serve values; `ticks` are those that are TimeTicks. Ends the daemon and removes its folder.

    lines: further lines of snmpd.conf(5).
    """
    program = require("snmpd")
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg-snmpd-"))
    port = free_port()
    (folder / "snmpd.conf").write_text(_config(values, ticks, lines), encoding="utf-8")
    environment = {**os.environ, "MIBS": "", "MIBDIRS": str(folder), "SNMP_PERSISTENT_DIR": str(folder)}
    log = folder / "log"
    child = await asyncio.create_subprocess_exec(
        *(program, "-f", "-Lf", str(log), "-C", "-c", str(folder / "snmpd.conf"), "-p", str(folder / "pid")),
        f"udp:127.0.0.1:{port}",
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            while "NET-SNMP version" not in (log.read_text(encoding="utf-8") if log.exists() else ""):
                assert child.returncode is None, log.read_text(encoding="utf-8")
                await asyncio.sleep(0.02)
        yield Snmpd(port)
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
        shutil.rmtree(folder, ignore_errors=True)
