"""NUT's upsmon beside a upsd of `tests.peers.nut`, in a mount namespace of its own: its pid file is fixed under /run.

Its NOTIFYCMD and SHUTDOWNCMD are scripts that write a line with the time into a file (`Upsmon.notified`).
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.peers import require
from tests.peers.nut import LIMIT_S, USERS, Upsd, program

_TYPES: Final = ("ONLINE", "ONBATT", "LOWBATT", "FSD", "COMMOK", "COMMBAD", "SHUTDOWN", "REPLBATT", "NOCOMM")
_NOTIFY: Final = """\
#!/bin/sh
echo "$NOTIFYTYPE 0 $(date +%s.%N)" >>'{result}'
"""
_INSIDE: Final = "mount -t tmpfs tmpfs /run && mkdir -p /run/nut && exec "


@dataclass(frozen=True, slots=True)
class Upsmon:
    """A running upsmon. file: what its scripts have written."""

    file: Path

    def notified(self) -> list[tuple[str, float]]:
        """Every notice so far, with the wall time at which its program began."""
        if not self.file.exists():
            return []
        lines = [line.split() for line in self.file.read_text(encoding="utf-8").splitlines()]
        return [(line[0], float(line[2])) for line in lines if len(line) == 3]

    async def until(self, kind: str, after_s: float, limit_s: float = LIMIT_S) -> float:
        """Wait for a notice that began after a wall time, and return when it did."""
        async with asyncio.timeout(limit_s):
            while True:
                for each, at_s in self.notified():
                    if each == kind and at_s >= after_s:
                        return at_s
                await asyncio.sleep(0.01)


@asynccontextmanager
async def upsmon(
    peer: Upsd, name: str, *lines: str, user: str = "mon", role: str = "secondary"
) -> AsyncIterator[Upsmon]:
    """Run upsmon. name: of its files, so that several can watch one upsd. lines: further lines of upsmon.conf(5)."""
    folder = peer.folder / f"upsmon-{name}"
    folder.mkdir()
    result, notify, halt = folder / "result", folder / "notify", folder / "halt"
    notify.write_text(_NOTIFY.format(result=result), encoding="utf-8")
    halt.write_text(f"#!/bin/sh\necho \"SHUTDOWNCMD 0 $(date +%s.%N)\" >>'{result}'\n", encoding="utf-8")
    for script in (notify, halt):
        script.chmod(0o755)
    config = [
        "RUN_AS_USER root",
        f'MONITOR dsim@127.0.0.1:{peer.port} 1 {user} "{USERS[user]}" {role}',
        "MINSUPPLIES 1",
        f'SHUTDOWNCMD "{halt}"',
        f"NOTIFYCMD {notify}",
        f"POWERDOWNFLAG {folder / 'killpower'}",
        *(f"NOTIFYFLAG {kind} EXEC" for kind in _TYPES),
        *lines,
    ]
    (folder / "upsmon.conf").write_text("\n".join(config) + "\n", encoding="utf-8")
    (folder / "upsmon.conf").chmod(0o600)
    isolate = (require("unshare"), "-m") if os.geteuid() == 0 else (require("unshare"), "-r", "-m")
    before = await peer.logins()  # once it runs, it may be among them
    with (folder / "log").open("ab") as log:
        child = await asyncio.create_subprocess_exec(
            *(*isolate, "sh", "-c", f'{_INSIDE} "$0" -F', program("upsmon")),
            env={**peer.environment(), "NUT_CONFPATH": str(folder)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(LIMIT_S):
            while await peer.logins() <= before:
                assert child.returncode is None, (folder / "log").read_text(encoding="utf-8")
                await asyncio.sleep(0.05)
        yield Upsmon(result)
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)  # its parent half and its child half
        await child.wait()
