"""A /dev/ipmi0 that is a FIFO, and powerguard-ipmi in front of it. No real device, no real BMC: see ipmi_device.c."""

import asyncio
import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.peers import require
from tests.peers.ipmi import POLICIES

SOURCE: Final = Path(__file__).with_name("ipmi_device.c")
HELPER: Final = (sys.executable, "-I", "-m", "powerguard.effectors.bmc.helper")


@cache
def library() -> Path:
    """Return the library to preload, built once for this process."""
    folder = Path(tempfile.mkdtemp(prefix="pg-ipmi-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    argv = [require("cc"), "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run([*argv, "-o", str(folder / "ipmi.so"), str(SOURCE), "-ldl"], check=True, timeout=60)
    return folder / "ipmi.so"


class IpmiDevice:
    """A device and what is behind it: `device.path`, `device.policy`, `device.heard`; `say` starts a helper."""

    def __init__(self, folder: Path, policy: str = "last-state") -> None:
        self.folder = folder
        self.path = folder / "ipmi0"
        os.mkfifo(self.path)
        (folder / "policy").write_text(f"{POLICIES[policy]}\n")
        self.environment = {
            "PATH": os.environ["PATH"],
            "POWERGUARD_UNDER_TEST": "1",
            "LD_PRELOAD": str(library()),
            "FAKE_IPMI": str(folder),
        }

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

    def say(self, *words: str, device: Path | None = None, line: bytes = b"") -> tuple[int, dict[str, Any]]:
        """Run one helper to its end; its exit status and what it answered."""
        argv = [*HELPER, "--device", str(device or self.path), *words]
        ended = subprocess.run(argv, input=line, capture_output=True, env=self.environment, check=False, timeout=20)
        assert b"Traceback" not in ended.stderr, ended.stderr
        return ended.returncode, json.loads(ended.stdout) if ended.stdout else {}

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Path]:
        """A socket that starts a helper for each connection, as systemd's does with Accept=yes."""
        path = self.folder / "ipmi.sock"
        argv = [require("systemd-socket-activate"), "--accept", "--inetd", f"--listen={path}"]
        argv += [f"--setenv={name}={value}" for name, value in self.environment.items()]
        process = await asyncio.create_subprocess_exec(
            *(*argv, *HELPER, "--device", str(self.path), "serve"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(10):
                while b"Listening on" not in await process.stderr.readline():
                    pass
            yield path
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.communicate()
