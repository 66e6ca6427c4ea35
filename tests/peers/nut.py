"""NUT's upsd with dummy-ups drivers, in a folder of their own on a free port of the loopback, plain or with TLS.

A test flips the UPS by writing its .dev file (`Upsd.change`); the driver looks at it every second, so a change is
awaited where it counts (`Upsd.shows`). Debian's sbin/upsd is a script that insists on /etc/nut: /lib/nut comes first.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.peers import ports, require

UTILITY = {
    "device.mfr": "Sim",
    "device.model": "SMT3000",
    "ups.status": "OL",
    "ups.load": "40",
    "ups.realpower": "1080",
    "battery.charge": "100",
    "battery.runtime": "1800",
    "input.voltage": "230",
    "ups.timer.shutdown": "-1",
}
BATTERY = {"ups.status": "OB DISCHRG", "input.voltage": "0", "battery.charge": "97", "battery.runtime": "1700"}
# upsmon sends its password without quotes, so that its own has no spaces.
USERS = {
    "admin": "admin-of-the-tests",
    "prim": "primary-of-the-tests",
    "sec": "secondary of the \\ tests",
    "mon": "upsmon-of-the-tests",
}
LIMIT_S: Final = 60.0
"""For a peer to start, or to show what it was given: a machine may be busy."""
_USERS_FILE = """\
[admin]
  password = "{admin}"
  actions = SET
  actions = FSD
  instcmds = ALL
[prim]
  password = "{prim}"
  upsmon primary
[sec]
  password = "{sec}"
  upsmon secondary
[mon]
  password = "{mon}"
  upsmon secondary
"""


def program(name: str) -> str:
    """Return the path of one of NUT's programs; skip (or fail) the test without it."""
    installed = Path("/lib/nut") / name
    return str(installed) if installed.exists() else require(name)


free_port = ports.free_port


@dataclass(slots=True)
class Upsd:
    """A running upsd with its drivers. folder: its configuration, state and log."""

    folder: Path
    port: int
    values: dict[str, dict[str, str]]
    server: asyncio.subprocess.Process | None = None
    drivers: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    changes: int = 1_000_000_000

    def change(self, values: Mapping[str, str], ups: str = "dsim") -> None:
        """Change what the driver will read at its next look, in one piece."""
        self.values[ups].update(values)
        text = "".join(f"{name}: {value}\n" for name, value in self.values[ups].items())
        draft = self.folder / f"{ups}.draft"
        draft.write_text(text, encoding="utf-8")
        # The driver compares whole seconds of the file's time: two changes in one second would be one.
        self.changes += 1
        os.utime(draft, (self.changes, self.changes))
        draft.replace(self.folder / f"{ups}.dev")

    async def talk(self, *lines: str) -> list[str]:
        """Say lines on a connection of their own and return what is answered to each."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        found = []
        try:
            async with asyncio.timeout(LIMIT_S):
                for line in lines:
                    writer.write(line.encode() + b"\n")
                    found.append((await reader.readline()).decode().rstrip("\n"))
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        return found

    async def as_admin(self, *lines: str) -> list[str]:
        """Say lines as the user who may do everything."""
        return (await self.talk("USERNAME admin", f"PASSWORD {USERS['admin']}", *lines))[2:]

    async def shows(self, text: str, name: str = "ups.status", ups: str = "dsim") -> None:
        """Wait until upsd itself shows a value."""
        async with asyncio.timeout(LIMIT_S):
            wanted = [f'VAR {ups} {name} "{text}"']
            while await self.talk(f"GET VAR {ups} {name}") != wanted:  # noqa: ASYNC110 - upsd tells no changes
                await asyncio.sleep(0.05)

    async def logins(self, ups: str = "dsim") -> int:
        return int((await self.talk(f"GET NUMLOGINS {ups}"))[0].split()[-1])

    async def counts(self, logins: int, ups: str = "dsim") -> None:
        """Wait until upsd counts so many logins: one that was sent, or given back, may not have been read yet."""
        async with asyncio.timeout(LIMIT_S):
            while await self.logins(ups) != logins:  # noqa: ASYNC110 - upsd tells nobody
                await asyncio.sleep(0.05)

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **dict.fromkeys(("NUT_CONFPATH", "NUT_STATEPATH", "NUT_ALTPIDPATH"), str(self.folder)),
        }

    async def start_driver(self, ups: str = "dsim") -> None:
        self.drivers[ups] = await self._start("dummy-ups", "-F", "-a", ups, "-u", "root")
        async with asyncio.timeout(LIMIT_S):
            while not (self.folder / f"dummy-ups-{ups}").exists():
                assert self.drivers[ups].returncode is None, self.log()
                await asyncio.sleep(0.02)

    async def start(self) -> None:
        """Start upsd itself and wait until it answers."""
        self.server = await self._start("upsd", "-F", "-u", "root")
        async with asyncio.timeout(LIMIT_S):
            while True:
                assert self.server.returncode is None, self.log()
                with contextlib.suppress(OSError):
                    if (await self.talk("VER"))[0]:
                        return
                await asyncio.sleep(0.02)

    async def _start(self, name: str, *arguments: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(program(name), *arguments),
                env=self.environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in self.folder.glob("*.log"))

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End upsd, or send it another signal."""
        assert self.server is not None
        await _signal(self.server, number)

    async def kill_driver(self, number: signal.Signals = signal.SIGKILL, ups: str = "dsim") -> None:
        await _signal(self.drivers[ups], number)
        if number is signal.SIGKILL:
            (self.folder / f"dummy-ups-{ups}").unlink(missing_ok=True)


async def _signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if child.returncode is None:
        child.send_signal(number)
        if number in {signal.SIGKILL, signal.SIGTERM}:
            await child.wait()


@asynccontextmanager
async def upsd(
    *names: str,
    values: Mapping[str, str] = UTILITY,
    certificate: tuple[Path, str] | None = None,
    max_age_s: int = 15,
    driver_lines: str = "",
    bring: Callable[[Path], Awaitable[None]] | None = None,
    address: str = "127.0.0.1",
) -> AsyncIterator[Upsd]:
    """Serve UPSes (of the name "dsim", unless told). certificate: an NSS folder, and a nickname in it.

    max_age_s: upsd's MAXAGE. driver_lines: further lines of each section of ups.conf(5). bring: puts drivers of the
    test's own into the folder of sockets (`nut_driver`), in place of dummy-ups. address: where upsd listens.
    """
    program("upsd"), program("dummy-ups")
    names = names or ("dsim",)
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg-nut-"))
    served = Upsd(folder, ports.free_port(), {name: {} for name in names})
    sections = "".join(
        f"[{name}]\n  driver = dummy-ups\n  mode = dummy-once\n  port = {name}.dev\n{driver_lines}" for name in names
    )
    lines = [f"LISTEN {address} {served.port}", f"MAXAGE {max_age_s}", f"STATEPATH {folder}"]
    if certificate is not None:
        lines += [f'CERTPATH "{certificate[0]}"', f'CERTIDENT "{certificate[1]}" ""']
    for name, text in {
        "nut.conf": "MODE=standalone\n",
        "ups.conf": f"maxretry = 1\npollinterval = 1\n{sections}",
        "upsd.conf": "\n".join(lines) + "\n",
        "upsd.users": _USERS_FILE.format(**{name: word.replace("\\", "\\\\") for name, word in USERS.items()}),
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o600)
    try:
        for name in names:
            served.change(values, name)
            await (served.start_driver(name) if bring is None else bring(folder))
        await served.start()
        for name in names:
            await served.shows(served.values[name]["ups.status"], ups=name)
        yield served
    finally:
        for child in (served.server, *served.drivers.values()):
            if child is not None:
                await _signal(child, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
