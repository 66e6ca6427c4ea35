"""The real program with real peers: told, killed in between, started again, and the host is on."""

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs

from powerguard.daemon.systemd import Notifier
from powerguard.effectors.base import EffectorError
from powerguard.effectors.sentinel.effector import SentinelEffector
from powerguard.sentinel.main import SentinelInputs, _another
from tests.peers.ipmi import IpmiSim, keep_secret
from tests.peers.nut import free_port, upsd
from tests.sentinel.rig import KEYS, arm, carried_out, check, disarm, options_of, settings_of

SETTINGS = """\
mode: armed
port: {port}
state: {folder}/state
utility_stable_s: 5
log: {{format: logfmt}}
page_key: {{file: {folder}/page-key}}
ups:
  a: {{sources: [{{kind: nut, host: 127.0.0.1, port: {nut}, name: dsim}}]}}
hosts:
  n1:
    key: {{file: {folder}/key-n1}}
    bmc: {{kind: ipmi-lan, host: 127.0.0.1, port: {bmc}, user: powerguard, password: {{file: {folder}/bmc-password}}}}
    feeds: [a]
"""


PAGE_KEY = "p" * 64


class Program:
    """`powerguard sentinel` in a process of its own. log: all that it has said."""

    def __init__(self, folder: Path, *, nut: int, bmc: int, password: str) -> None:
        self.folder = folder
        self.port = free_port()
        (folder / "state").mkdir()
        keep_secret(folder / "bmc-password", password)
        keep_secret(folder / "page-key", PAGE_KEY)
        self.host = SentinelEffector(options_of(folder, "n1", (f"http://127.0.0.1:{self.port}",)), feeds=("a",))
        text = SETTINGS.format(port=self.port, folder=folder, nut=nut, bmc=bmc)
        (folder / "sentinel.yaml").write_text(text, encoding="utf-8")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")

    @contextlib.asynccontextmanager
    async def running(self, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
        argv = (sys.executable, "-m", "powerguard", "sentinel", "--config", str(self.folder / "sentinel.yaml"))
        with (self.folder / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, **environ},
            )
        try:
            await self._listens(process)
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _listens(self, process: asyncio.subprocess.Process) -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                assert process.returncode is None, self.log
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{self.port}/healthz") as answer:
                        assert answer.status == 200
                        return
                await asyncio.sleep(0.05)


async def test_it_starts_says_what_blocks_it_and_stops(tmp_path: Path) -> None:
    """With nothing there that it should watch. Secrets are nowhere to be seen."""
    program = Program(tmp_path, nut=1, bmc=1, password="the-password-of-the-bmc")
    async with program.running() as process:
        with pytest.raises(EffectorError, match="UPS a: not read"):
            await carried_out(program.host, check())
        assert (await carried_out(program.host, arm(in_s=600.0)))["in_s"] == 600.0
        for path, names_it in (("/", False), ("/names", True)):
            headers = {"Authorization": aiohttp.encode_basic_auth("me", PAGE_KEY)}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.get(f"http://127.0.0.1:{program.port}{path}") as answer,
            ):
                assert (answer.status, "n1" in await answer.text()) == (200, names_it)
        proc = Path(f"/proc/{process.pid}")
        seen = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes() + program.log.encode()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    seen += program.log.encode() + (tmp_path / "state" / "intents.json").read_bytes()
    assert not [secret for secret in (KEYS["n1"], b"the-password-of-the-bmc", PAGE_KEY.encode()) if secret in seen]
    for event in ("sentinel_started", "http_listening", "intent_stored", "supply_changed", "sentinel_stopped"):
        assert event in program.log
    assert "Traceback" not in program.log


async def test_a_second_one_with_the_same_folder_is_refused(tmp_path: Path) -> None:
    program = Program(tmp_path, nut=1, bmc=1, password="x")
    async with program.running():
        argv = (sys.executable, "-m", "powerguard", "sentinel", "--config", str(tmp_path / "sentinel.yaml"))
        second = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
        _, said = await second.communicate()
        assert (second.returncode, b"another sentinel uses" in said) == (69, True)


async def test_settings_are_read_again_and_what_stands_stays(tmp_path: Path) -> None:
    """SIGHUP: a mistake and what only a start reads are refused, and nothing changes; what holds counts at once."""
    program = Program(tmp_path, nut=1, bmc=1, password="x")
    path = tmp_path / "sentinel.yaml"
    good = path.read_text(encoding="utf-8")
    async with program.running() as process:
        await carried_out(program.host, arm(in_s=600.0))

        async def reads(text: str, says: str) -> None:
            path.write_text(text, encoding="utf-8")
            process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(60):
                while says not in program.log:  # noqa: ASYNC110 - a log file tells nobody
                    await asyncio.sleep(0.02)

        await reads(good.replace("feeds: [a]", "feeds: [b]"), "unknown UPS (known: a)")
        await reads(good.replace(f"{tmp_path}/state", str(tmp_path)), "only read at the start")
        await reads(good.replace(f"{tmp_path}/key-n1", "/nowhere"), "hosts.n1.key: /nowhere: No such file")
        assert (await carried_out(program.host, arm(in_s=500.0)))["in_s"] == 500.0
        await reads(good.replace("mode: armed", "mode: dry-run"), "settings_reloaded mode=dry-run hosts=1")
        with pytest.raises(EffectorError, match="runs in dry-run"):
            await carried_out(program.host, arm(in_s=400.0))
        assert (await carried_out(program.host, disarm()))["sentinels"], "it was there, and is taken back"
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    assert "intents=n1" in program.log
    assert "Traceback" not in program.log


async def test_a_reload_on_a_disk_that_fails_ends_no_sentinel(tmp_path: Path) -> None:
    """Its intents are carried out from memory; the next start would not have them."""

    def reread() -> SentinelInputs:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))

    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signals.put_nowait(number)
    taken = SentinelInputs(settings_of(tmp_path / "state"), {}, b"", None)
    with capture_logs() as lines:
        assert await _another(taken, signals, reread, Notifier.take()) is None
    assert [line["event"] for line in lines] == ["settings_refused"]
    assert "Input/output error" in lines[0]["because"]


async def test_systemd_hears_of_progress_after_each_reload(tmp_path: Path) -> None:
    """Two reloads in one interval of the watchdog must not end in a kill."""
    program = Program(tmp_path, nut=1, bmc=1, password="x")
    name = f"pg-{os.getpid()}-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.settimeout(60.0)

        def hears(*words: bytes) -> None:
            assert [manager.recv(4096).partition(b"\n")[0] for _ in words] == list(words)

        async with program.running(NOTIFY_SOCKET=f"@{name}", WATCHDOG_USEC="3600000000") as process:
            await asyncio.to_thread(hears, b"READY=1", b"WATCHDOG=1")
            for _ in range(2):
                process.send_signal(signal.SIGHUP)
                await asyncio.to_thread(hears, b"RELOADING=1", b"READY=1", b"WATCHDOG=1")


async def test_systemd_that_is_busy_hears_soon_after(tmp_path: Path) -> None:
    """It reads nothing while the sentinel starts: what is lost of READY and WATCHDOG is sent again."""
    program = Program(tmp_path, nut=1, bmc=1, password="x")
    name = f"pg-{os.getpid()}-{secrets.token_hex(4)}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        manager.bind(f"\0{name}")
        with contextlib.suppress(BlockingIOError):
            while True:
                other.sendto(b"busy", socket.MSG_DONTWAIT, f"\0{name}")
        async with program.running(NOTIFY_SOCKET=f"@{name}", WATCHDOG_USEC="3600000000"):
            manager.settimeout(60.0)

            def next_word() -> bytes:
                while (word := manager.recv(4096)) == b"busy":
                    pass
                return word

            assert await asyncio.to_thread(next_word) == b"WATCHDOG=1\nREADY=1"


@pytest.mark.slow
@pytest.mark.peer("ipmi_sim", "upsd")
async def test_killed_with_a_word_in_its_keeping(tmp_path: Path) -> None:
    """kill -9 right after "stored"; started again, it powers the host on; what was taken back it forgets for good."""
    async with IpmiSim(plugin=False) as bmc, upsd() as nut:
        program = Program(tmp_path, nut=nut.port, bmc=bmc.port, password=bmc.password)
        async with program.running() as process:
            await carried_out(program.host, arm(in_s=1.0))
            process.kill()
            await process.wait()
        bmc.switch(on=False)
        async with program.running() as process:
            async with asyncio.timeout(60):
                while not bmc.orders:  # noqa: ASYNC110 - ipmi_sim tells nobody
                    await asyncio.sleep(0.1)
            await carried_out(program.host, disarm())
            process.kill()
            await process.wait()
        bmc.switch(on=False)
        ordered = len(bmc.orders)
        async with program.running():
            await asyncio.sleep(12.0)
        assert (set(bmc.orders), len(bmc.orders)) == ({"power 1"}, ordered)
        assert "Traceback" not in program.log
