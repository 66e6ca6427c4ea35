"""OpenIPMI's ipmi_sim as a BMC that shares no code with ours: as Debian ships it, or with our policy plug-in."""

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Template
from types import TracebackType
from typing import Final, Self

import pytest

from powerguard.core.model.actions import EnsurePolicy
from powerguard.effectors.bmc.effector import BmcEffector, BmcError
from powerguard.effectors.bmc.ipmi import Command, Failure
from powerguard.effectors.options import BmcOptions
from powerguard.options import Secret
from tests.peers import absent, require
from tests.peers.ports import free_port

HERE: Final = Path(__file__).parent / "ipmi_sim"
POLICIES: Final = {"always-off": 0, "last-state": 1, "always-on": 2}
_PING: Final = b"\x06\x00\xff\x06\x00\x00\x11\xbe\x80\x00\x00\x00"


ENSURE: Final = EnsurePolicy(id="ensure-1", by_s=1e9, outage="outage-1")


def options(folder: Path, port: int, user: str, password: str, *, observe: bool = False) -> BmcOptions:
    """Settings for a BMC on 127.0.0.1, with the password in a file of its own."""
    return BmcOptions(
        kind="ipmi-lan",
        host="127.0.0.1",
        port=port,
        user=user,
        password=Secret(file=str(keep_secret(folder / "bmc-password", password))),
        policy="observe" if observe else "ensure",
    )


def keep_secret(path: Path, secret: str) -> Path:
    """Write a file that nobody else can read."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(secret + "\n")
    return path


def until_heard(wanted: list[str]) -> Iterator[list[str]]:
    """Do it again until a BMC heard exactly this: `for heard in until_heard(["status"]): ...; heard.extend(bmc.heard)`.

    pyghmi sends a command again that a busy machine does not answer within half a second. What we send twice is heard
    twice every time.
    """
    for _ in range(4):
        heard: list[str] = []
        yield heard
        if heard == wanted:
            return
    msg = f"heard {heard}, and should have heard {wanted}"
    raise AssertionError(msg)


async def failing(make: Callable[[float], BmcEffector], failure: Failure) -> BmcError:
    """See it fail so: soon, or with more time where its worker took most of that to start."""
    for limit_s in (4.0, 20.0):
        with pytest.raises(BmcError) as caught:
            await make(limit_s).carry_out(ENSURE)
        if caught.value.failure is failure:
            break
    return caught.value


async def read_with_ipmitool(folder: Path, port: int, user: str, password: str) -> str:
    """What ipmitool calls the power restore policy; cipher suite 3, as neither simulated BMC has another."""
    secret = keep_secret(folder / "ipmitool-password", password)
    words = ["-I", "lanplus", "-C", "3", "-L", "OPERATOR", "-H", "127.0.0.1", "-p", str(port), "-U", user]
    ended = await run_tool(require("ipmitool"), *words, "-f", str(secret), "chassis", "status")
    return next(line.split(":")[1].strip() for line in ended.splitlines() if line.startswith("Power Restore Policy"))


class FreeIpmi:
    """FreeIPMI's tools against one BMC. opensesspriv: what ipmi_sim needs, or the tools refuse its open session."""

    def __init__(self, folder: Path, port: int, user: str, password: str) -> None:
        lines = {
            "username": user,
            "password": password,
            "driver-type": "LAN_2_0",
            "privilege-level": "OPERATOR",
            "workaround-flags": "opensesspriv",
        }
        config = keep_secret(folder / "freeipmi.conf", "\n".join(f"{name} {value}" for name, value in lines.items()))
        self._to = ["-h", f"127.0.0.1:{port}", f"--config-file={config}"]

    async def chassis_policy(self) -> str:
        """What ipmi-chassis calls the power restore policy."""
        ended = await run_tool(require("ipmi-chassis"), *self._to, "--get-chassis-status")
        return next(
            line.split(":")[1].strip() for line in ended.splitlines() if line.startswith("Power restore policy")
        )

    async def config_policy(self) -> str:
        """What ipmi-config calls it."""
        key = "Chassis_Power_Conf:Power_Restore_Policy"
        ended = await run_tool(
            require("ipmi-config"), *self._to, "--category=chassis", "--checkout", f"--key-pair={key}"
        )
        return next(line.split()[1] for line in ended.splitlines() if line.split()[:1] == ["Power_Restore_Policy"])

    async def set_policy(self, name: str) -> None:
        """Change it behind our back; names as ipmi-config has them."""
        key = f"Chassis_Power_Conf:Power_Restore_Policy={name}"
        await run_tool(require("ipmi-config"), *self._to, "--category=chassis", "--commit", f"--key-pair={key}")


async def run_tool(*argv: str) -> str:
    """Run a program to its end, at most 60 s, and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, stderr.decode()
    return stdout.decode()


free_udp_port = free_tcp_port = free_port


def build_plugin(folder: Path) -> Path:
    """Compile the plug-in; without its compiler or headers the test is skipped, or fails where peers are required."""
    compiler = require("cc")
    plugin = folder / "policy.so"
    unpacked = HERE.parents[2] / "build" / "peers"
    includes = [f"-I{found.parent}" for found in unpacked.glob("**/include/OpenIPMI")]
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", *includes, "-o", plugin, HERE / "policy.c"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "OpenIPMI" in built.stderr and "No such file" in built.stderr:
        absent("libopenipmi-dev")
    assert built.returncode == 0, built.stderr
    assert "warning" not in built.stderr, built.stderr
    return plugin


class Inside:
    """The host's side of ipmi_sim: commands go in, and what the BMC does to the power comes out in `orders`.

    OpenIPMI's protocol for virtual machines (its README.vm): A0h ends a message, A1h an order, AAh escapes.
    """

    POWER_OFF: Final = 0x03
    _MESSAGE, _ORDER, _ESCAPE = 0xA0, 0xA1, 0xAA

    def __init__(self, connection: socket.socket) -> None:
        self.orders: list[int] = []
        self._connection = connection
        self._asked = 0
        self._say(b"\xff\x01", self._ORDER)  # the protocol's version
        self._say(b"\x08\x3f", self._ORDER)  # what may be done to us

    def send(self, command: Command) -> tuple[int, bytes]:
        """Send one command; completion code and data. As `exchange.Send`."""
        self._asked += 1
        body = bytes([self._asked, command.netfn << 2, command.number]) + command.data
        self._say(body + bytes([-sum(body) & 0xFF]), self._MESSAGE)
        while True:
            kind, message = self._hear()
            if kind == self._MESSAGE and message[0] == self._asked:
                assert sum(message) & 0xFF == 0
                return message[3], message[4:-1]

    def wait_for(self, order: int) -> None:
        """Wait, 30 s at most, until the BMC has given an order."""
        while order not in self.orders:
            self._hear()

    def _say(self, message: bytes, end: int) -> None:
        escaped = b"".join(
            bytes([self._ESCAPE, each | 0x10]) if each in (self._MESSAGE, self._ORDER, self._ESCAPE) else bytes([each])
            for each in message
        )
        self._connection.sendall(escaped + bytes([end]))

    def _hear(self) -> tuple[int, bytes]:
        frame, escaped = bytearray(), False
        while byte := self._connection.recv(1):
            if byte[0] in (self._MESSAGE, self._ORDER):
                if byte[0] == self._ORDER:
                    self.orders.append(frame[0])
                return byte[0], bytes(frame)
            if byte[0] == self._ESCAPE:
                escaped = True
                continue
            frame.append(byte[0] & ~0x10 if escaped else byte[0])
            escaped = False
        raise ConnectionResetError


class IpmiSim:
    """`async with IpmiSim(plugin=True) as bmc`: bmc.host, bmc.port, bmc.user, bmc.password; restart() = AC cycle of it.

    plugin: with the power restore policy; without it every Set Power Restore Policy is refused with 0xC1. level: of the
    account, as ipmi_lan(5) calls it.
    """

    host: Final = "127.0.0.1"
    user: Final = "powerguard"

    def __init__(self, *, plugin: bool, policy: str = "always-off", level: str = "operator") -> None:
        self.program = require("ipmi_sim")
        # No spaces: ipmi_sim splits the command lines of its configuration at them.
        self.folder = Path(tempfile.mkdtemp(prefix="pg-ipmi-", dir="/tmp"))
        self.password = secrets.token_hex(8)
        self.port = free_udp_port()
        self.host_side = free_tcp_port()
        self._with_plugin = plugin
        self._level = level
        self._process: asyncio.subprocess.Process | None = None
        (self.folder / "policy").write_text(f"{POLICIES[policy]}\n")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def policy(self) -> str:
        """What the plug-in holds."""
        number = int((self.folder / "policy").read_text())
        return next(name for name, value in POLICIES.items() if value == number)

    @property
    def orders(self) -> list[str]:
        """What the chassis was told, such as "power 1"."""
        path = self.folder / "orders"
        return path.read_text().splitlines() if path.exists() else []

    def switch(self, *, on: bool) -> None:
        """Somebody presses the button."""
        (self.folder / "power").write_text(f"{int(on)}\n")

    @property
    def heard(self) -> list[str]:
        path = self.folder / "heard"
        return path.read_text().split() if path.exists() else []

    def misbehave(
        self, *, lie: bool = False, code: int = 0, busy: int = 0, delay_ms: int = 0, status_bytes: int = 0
    ) -> None:
        """Set the plug-in's faults; without arguments it behaves."""
        fresh = self.folder / "faults.new"
        fresh.write_text(f"{int(lie)} {code} {busy} {delay_ms} {status_bytes}\n")
        fresh.replace(self.folder / "faults")

    def draw(self, watts: float) -> None:
        """Let the plug-in measure so many watts; before the first call it has no DCMI."""
        fresh = self.folder / "watts.new"
        fresh.write_text(f"{round(watts)}\n")
        fresh.replace(self.folder / "watts")

    @contextmanager
    def inside(self) -> Iterator["Inside"]:
        """Be the host that this BMC is in."""
        with socket.create_connection((self.host, self.host_side), timeout=30.0) as connection:
            yield Inside(connection)

    async def __aenter__(self) -> Self:
        try:
            self._configure()
            await self.start()
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        return self

    def _configure(self) -> None:
        loadlib = ""
        if self._with_plugin:
            loadlib = f'loadlib "{build_plugin(self.folder)}" "{self.folder}"'
        chassis = shutil.copy2(HERE / "chassis.sh", self.folder)
        template = Template((HERE / "lan.conf.template").read_text())
        config = self.folder / "lan.conf"
        config.touch(mode=0o600)
        known = {"port": self.port, "user": self.user, "password": self.password, "level": self._level}
        known["host_side"] = self.host_side
        config.write_text(template.substitute(known, chassis=chassis, plugin=loadlib))
        (self.folder / "state").mkdir()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        shutil.rmtree(self.folder)

    async def start(self) -> None:
        """Start it and wait until it answers an ASF presence ping."""
        with (self.folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                self.program,
                *("-n", "-c", str(self.folder / "lan.conf"), "-f", str(HERE / "sim.emu")),
                *("-s", str(self.folder / "state")),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | ({"LD_PRELOAD": str(self.folder / "policy.so")} if self._with_plugin else {}),
            )
        try:
            async with asyncio.timeout(60):
                await self._answers()
        except TimeoutError:
            await self.stop()
            pytest.fail(f"ipmi_sim does not answer: {(self.folder / 'log').read_text()}", pytrace=False)

    async def stop(self) -> None:
        """Take its power away."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, 9)
        await self._process.wait()
        self._process = None

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def _answers(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setblocking(False)
            probe.connect((self.host, self.port))
            while True:
                with suppress(ConnectionRefusedError, TimeoutError):
                    await loop.sock_sendall(probe, _PING)
                    async with asyncio.timeout(0.5):
                        await loop.sock_recv(probe, 64)
                    return
                await asyncio.sleep(0.05)
