"""A host as its plug sees it: AC, a BMC that has it whenever AC is there, and a machine that the BMC switches.

The BMC is OpenIPMI's ipmi_sim with our plug-in for the policy; the machine is QEMU without hardware acceleration.
What a BMC's firmware does by its policy when AC returns is not in ipmi_sim, so it is done here: `restore`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from tests.peers import require
from tests.peers.ipmi import IpmiSim, free_tcp_port, keep_secret, run_tool
from tests.vm.guest import initrd, kernel, starter

HERE: Final = Path(__file__).parent
BOOT_S: Final = 400.0
"""For a boot; it takes 8 to 40 s here, and much longer where everybody else is at work too."""
HELPER: Final = "python3 -I -m powerguard.effectors.bmc.helper"
_LOOK_S: Final = 0.05


class Chassis:
    """`async with Chassis() as chassis`: AC is there, and the machine is off.

    disk: what is copied onto the machine's own (tests/vm/debian.py); without one it has a small system in its memory.
    """

    def __init__(self, *, policy: str = "always-off", disk: Path | None = None) -> None:
        require("qemu-system-x86_64")
        kernel()
        self.bmc = IpmiSim(plugin=True, policy=policy, level="admin")
        self.folder = self.bmc.folder
        self.port = free_tcp_port()  # through which the daemon's is reached
        self._disk = disk
        self._said = itertools.count(1)

    async def __aenter__(self) -> Self:
        """Give it AC for the first time."""
        (self.folder / "vmlinux").symlink_to(kernel())
        if self._disk is None:
            initrd(self.folder / "initrd")
        else:
            starter(self.folder / "initrd")
            copying = ["cp", "--sparse=always", str(self._disk), str(self.folder / "disk")]
            await asyncio.to_thread(subprocess.run, copying, check=True, timeout=120)
            (self.folder / "forward").write_text(f"{self.port}\n")
        shutil.copy2(HERE / "machine", self.folder)
        (self.folder / "host_side").write_text(f"{self.bmc.host_side}\n")
        await self.bmc.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything: the BMC first, which might give the order to start."""
        await self.bmc.stop()
        self._kill()
        await self.bmc.__aexit__(kind, error, trace)

    @property
    def pid(self) -> int | None:
        """The machine's process; None while it is off."""
        try:
            pid = int((self.folder / "pid").read_text())
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(") ")
        except (OSError, ValueError):
            return None
        # The number may be another's by now; and one that was killed is there until somebody has asked for its status.
        return pid if "(qemu-system" in name and rest[0] not in "ZX" else None

    @property
    def console(self) -> str:
        path = self.folder / "console"
        return path.read_text(errors="replace") if path.exists() else ""

    def press(self) -> None:
        """Somebody presses the power button."""
        self.bmc.switch(on=True)
        os.spawnl(os.P_WAIT, self.folder / "machine", "machine", "1")

    async def cut(self) -> None:
        """Take AC away: from the machine and from the BMC, with all that it does not keep (its watchdog timer)."""
        await self.bmc.stop()
        self._kill()
        await self.is_off()

    async def restore(self) -> None:
        """Give AC back; the BMC does as its policy says."""
        await self.bmc.start()
        if self.bmc.policy == "always-on":
            self.press()

    async def ipmitool(self, *words: str) -> str:
        """Ask the BMC over the network, with somebody else's program."""
        secret = keep_secret(self.folder / "ipmitool-password", self.bmc.password)
        to = ["-I", "lanplus", "-C", "3", "-H", self.bmc.host, "-p", f"{self.bmc.port}", "-U", self.bmc.user]
        return await run_tool(require("ipmitool"), *to, "-f", str(secret), *words)

    def _kill(self) -> None:
        if (pid := self.pid) is not None:
            os.kill(pid, signal.SIGKILL)

    async def is_on(self, limit_s: float) -> int:
        """Wait until the machine has power, and return its process."""
        return int(await self._until(lambda: self.pid, limit_s, "it has no power"))

    async def is_off(self, limit_s: float = BOOT_S) -> None:
        """Wait until the machine has no power any more."""
        await self._until(lambda: self.pid is None, limit_s, "it still has power")
        self.bmc.switch(on=False)  # as a board tells its BMC: a BMC that thinks it is on leaves it off

    async def stays_off(self, for_s: float) -> None:
        """See that it does not get power in so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await self.is_on(BOOT_S)
                pytest.fail(f"it has power; its BMC said {self.bmc.orders}", pytrace=False)

    async def is_up(self, boots: int = 1) -> None:
        """Wait until the guest listens to us. boots: since it had power, where it reboots by itself."""
        await self._until(
            lambda: self.pid and self.console.count("guest: up") >= boots, BOOT_S, "the guest does not come up"
        )

    async def run(self, command: str, limit_s: float = 60.0) -> tuple[int, str]:
        """Run a shell command in the guest; its exit status, and what it said."""
        name = f"{next(self._said)}"
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_unix_connection(self.folder / "agent.sock")
            try:
                writer.write(f"{name} {command}\n".encode())
                said = (await reader.readuntil(f"\n={name} ".encode())).decode()
                status = int(await reader.readline())
            finally:
                writer.close()
        return status, said.rpartition(f"\n={name} ")[0]

    async def says(self, command: str) -> str:
        """Run a shell command in the guest that must succeed; what it said."""
        status, said = await self.run(command)
        assert status == 0, f"{command}: {status}: {said}"
        return said.strip()

    async def helper(self, words: str) -> dict[str, Any]:
        """Say one word to powerguard-ipmi in the guest; its answer."""
        _, said = await self.run(f"{HELPER} {words}")
        answers = [line for line in said.splitlines() if line.startswith("{")]
        assert len(answers) == 1, said
        return dict(json.loads(answers[0]))

    async def power_off(self) -> None:
        """Let the guest power itself off, as systemd does in the end; returns when it has."""
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self.run("poweroff -f", limit_s=2.0)
        await self.is_off()
        assert "reboot: Power down" in self.console, "it lost its power before it had gone off"

    async def qmp(self) -> AsyncIterator[dict[str, Any]]:
        """What QEMU tells of the machine from now on."""
        reader, writer = await asyncio.open_unix_connection(self.folder / "qmp.sock")
        try:
            writer.write(b'{"execute": "qmp_capabilities"}\n')
            while line := await reader.readline():
                yield json.loads(line)
        finally:
            writer.close()

    async def _until(self, holds: Any, limit_s: float, otherwise: str) -> Any:  # noqa: ANN401 - whatever holds
        end_s = time.monotonic() + limit_s
        while not (value := holds()):
            assert time.monotonic() < end_s, f"{otherwise} after {limit_s:g} s:\n{self.console[-3000:]}"
            await asyncio.sleep(_LOOK_S)
        return value
