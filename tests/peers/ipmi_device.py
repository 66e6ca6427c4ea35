"""A /dev/ipmi0 that is a FIFO, and powerguard-ipmi in front of it. No real device, no real BMC: see ipmi_device.c."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from powerguard.clock import boottime_s
from tests.peers import folder_of_session, require
from tests.peers.ipmi import POLICIES

SOURCE: Final = Path(__file__).with_name("ipmi_device.c")
HELPER: Final = (sys.executable, "-I", "-m", "powerguard.effectors.bmc.helper")


@cache
def library() -> Path:
    """Return the library to preload, built once for this process."""
    compiler = require("cc")
    folder = folder_of_session("pg-ipmi-")
    argv = [compiler, "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run([*argv, "-o", str(folder / "ipmi.so"), str(SOURCE), "-ldl"], check=True, timeout=60)
    return folder / "ipmi.so"


class IpmiDevice:
    """A device and what is behind it: `device.path`, `device.policy`, `device.heard`; `say` starts a helper."""

    def __init__(self, folder: Path, policy: str = "last-state") -> None:
        self.folder = folder
        self.path = folder / "ipmi0"
        self.modules = folder / "modules"
        os.mkfifo(self.path)
        (folder / "policy").write_text(f"{POLICIES[policy]}\n")
        self.environment = {
            "PATH": os.environ["PATH"],
            "POWERGUARD_UNDER_TEST": "1",
            "LD_PRELOAD": str(library()),
            "FAKE_IPMI": str(folder),
        }
        self.set_board()

    @property
    def policy(self) -> str:
        number = int((self.folder / "policy").read_text())
        return next(name for name, value in POLICIES.items() if value == number)

    @property
    def heard(self) -> list[str]:
        path = self.folder / "heard"
        return path.read_text().split() if path.exists() else []

    def misbehave(
        self,
        *,
        lie: bool = False,
        code: int = 0,
        busy: int = 0,
        stale: int = 0,
        mute: bool = False,
        status_bytes: int = 0,
        number: int = 0,
    ) -> None:
        """Set the faults; without arguments it behaves. number: of the error with which every send fails."""
        line = f"{int(lie)} {code} {busy} {stale} {int(mute)} {status_bytes} {number}\n"
        (self.folder / "faults").write_text(line)

    def set_timer(self, use: int, action: int, *, expired: int = 0, tenths: int = 600, runs: bool = True) -> None:
        """Set the watchdog behind everybody's back; it was started just now."""
        started_ms = int(boottime_s() * 1000) if runs else 0
        (self.folder / "timer").write_text(f"{use} {action} {expired} {tenths} {started_ms}\n")

    @property
    def timer(self) -> tuple[int, int, int, int, bool]:
        """Use, action, expiry flags, countdown in 100 ms, running."""
        use, action, expired, tenths, started_ms = map(int, (self.folder / "timer").read_text().split())
        return use, action, expired, tenths, started_ms > 0

    def trick(self, *, answer_bytes: int = 8, is_firm: bool = False, start: str = "works", code: int = 0) -> None:
        """Let the watchdog misbehave. start: "untold" (it runs and does not say so) or "lost" (it does not)."""
        slow = ("works", "untold", "lost").index(start)
        (self.folder / "tricks").write_text(f"{answer_bytes} {int(is_firm)} {slow} {code}\n")

    def set_board(self, *, firmware: str = "0172", cause: int = 6, watts: int = -1) -> None:
        """Who the BMC is (manufacturer 674, product 256), why the host is on, and what it draws (-1: refused)."""
        (self.folder / "board").write_text(f"2001{firmware}02bfa202000001 {cause} {watts}\n")

    @property
    def where(self) -> list[str]:
        """What a helper is told of the machine."""
        return ["--device", str(self.path), "--modules", str(self.modules)]

    def say(self, *words: str, device: Path | None = None, line: bytes = b"") -> tuple[int, dict[str, Any]]:
        """Run one helper to its end; its exit status and what it answered."""
        argv = [*HELPER, *self.where, *(() if device is None else ("--device", str(device))), *words]
        ended = subprocess.run(argv, input=line, capture_output=True, env=self.environment, check=False, timeout=60)
        assert b"Traceback" not in ended.stderr, ended.stderr
        return ended.returncode, json.loads(ended.stdout) if ended.stdout else {}

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Path]:
        """A socket that starts the helper with the first connection, as systemd's does."""
        path = self.folder / "ipmi.sock"
        argv = [require("systemd-socket-activate"), f"--listen={path}"]
        argv += [f"--setenv={name}={value}" for name, value in self.environment.items()]
        process = await asyncio.create_subprocess_exec(
            *(*argv, *HELPER, *self.where, "serve"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(60):
                while b"Listening on" not in await process.stderr.readline():
                    pass
            yield path
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.communicate()
