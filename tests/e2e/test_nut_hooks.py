"""NUT's own upsmon and upssched call our scripts, beside a real daemon: hints arrive, and the host is never left alone.

upsmon keeps its pid file in /run/nut whatever it is told: each one here has a /run of its own.
"""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

import powerguard
from tests.e2e.rig import LIMIT_S, ROOMY, Rig, rig
from tests.peers import require
from tests.peers.ports import free_port

HOOKS: Final = Path(__file__).parents[2] / "config" / "nut"
UPS: Final = "dsim"
SPEEDY: Final = ("POLLFREQ 1", "POLLFREQALERT 1", "HOSTSYNC 1", "FINALDELAY 0", "MINSUPPLIES 1")
TYPES: Final = ("ONLINE", "ONBATT", "LOWBATT", "FSD", "COMMOK", "COMMBAD", "SHUTDOWN", "NOCOMM")
DEVICE: Final = "device.model: Sim\nups.status: OL\nups.load: 40\nbattery.charge: 100\nbattery.runtime: 1800\n"
HOOK_LIMIT_S: Final = 5.0
"""The time in which powerguard-shutdown answers, whatever happens."""
OPS_PASSWORD: Final = "ops-of-the-tests"
MON_PASSWORD: Final = "mon-of-the-tests"
pytestmark = [pytest.mark.peer("upsd", "dummy-ups", "upsmon", "upssched"), pytest.mark.root]


async def is_isolated() -> bool:
    """Say whether a program may be given a /run of its own here."""
    argv = ("unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run")
    try:
        child = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
    except OSError:
        return False
    return await child.wait() == 0


class Nut:
    """upsd with a UPS of our making, and upsmon to watch it. All of it lies in one folder."""

    def __init__(self, folder: Path, world: Rig) -> None:
        """folder: without a space in its name, which NUT 2.8.0 cannot have in a NOTIFYCMD."""
        self.folder = folder
        self.hooks = folder / "hooks"
        self.hooks.symlink_to(HOOKS)  # which may lie in a folder whose name has a space
        self.world = world
        self.port = free_port()
        self.marker = folder / "shut"
        self.children: list[asyncio.subprocess.Process] = []
        self.env = {
            **os.environ,
            "NUT_CONFPATH": str(folder),
            "NUT_STATEPATH": str(folder),
            "NUT_ALTPIDPATH": str(folder),
            "POWERGUARD": str(folder / "powerguard"),
        }
        own = f'exec {shlex.quote(sys.executable)} -P -m powerguard --socket "{world.socket}"'
        self.write("powerguard", f'#!/bin/sh\n{own} "$@"\n')
        self.write("shut.sh", f'#!/bin/sh\necho "$@" >>{self.marker}\n')
        self.write("nut.conf", "MODE=standalone\n")
        self.write(
            "ups.conf", f"pollinterval = 1\n[{UPS}]\n driver = dummy-ups\n mode = dummy-once\n port = {UPS}.dev\n"
        )
        self.write(f"{UPS}.dev", DEVICE)
        self.write("upsd.conf", f"LISTEN 127.0.0.1 {self.port}\n")
        self.write(
            "upsd.users",
            f"[ops]\n password = {OPS_PASSWORD}\n actions = SET\n actions = FSD\n"
            f"[mon]\n password = {MON_PASSWORD}\n upsmon primary\n",
        )

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if text.startswith("#!") else 0o644)

    @property
    def name(self) -> str:
        return f"{UPS}@127.0.0.1:{self.port}"

    async def spawn(self, *argv: str, log: Path) -> None:
        with log.open("ab") as out:
            child = await asyncio.create_subprocess_exec(
                *argv, env=self.env, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.children.append(child)

    async def start(self) -> None:
        """Start driver and server, and wait until the server tells what the driver says."""
        await self.spawn(require("dummy-ups"), "-F", "-a", UPS, "-u", "root", log=self.folder / "driver.log")
        await self.world.until((self.folder / f"dummy-ups-{UPS}").exists, "the driver's socket")
        await self.spawn(require("upsd"), "-F", "-u", "root", log=self.folder / "upsd.log")
        await self.world.until(self.reports("OL"), "upsd to serve")

    async def ask(self, *lines: str) -> list[str]:
        """Say these lines to upsd; return its answers."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            answers = []
            for line in lines:
                writer.write(f"{line}\n".encode())
                answers.append((await reader.readline()).decode().strip())
            return answers
        finally:
            writer.close()
            await writer.wait_closed()

    def reports(self, status: str) -> Callable[[], Awaitable[bool]]:
        """Return what asks upsd whether the UPS says just this, be it with an upsmon's FSD before it; for Rig.until."""

        async def is_reported() -> bool:
            with contextlib.suppress(OSError):
                said = (await self.ask(f"GET VAR {UPS} ups.status"))[0].partition('"')[2]
                return said.removeprefix("FSD ") == f'{status}"'
            return False

        return is_reported

    async def is_watched(self) -> bool:
        return (await self.ask(f"GET NUMLOGINS {UPS}"))[0] == f"NUMLOGINS {UPS} 1"

    async def becomes(self, status: str) -> None:
        """Let the UPS say this, and wait until upsd tells it."""
        login = ("USERNAME ops", f"PASSWORD {OPS_PASSWORD}")
        assert (await self.ask(*login, f'SET VAR {UPS} ups.status "{status}"'))[-1].startswith("OK")
        await self.world.until(self.reports(status), f"upsd to report {status}")

    async def upsmon(self, *lines: str, user: str = "root", shutdown: str = "") -> None:
        """Start upsmon with these lines beside the usual ones. shutdown: SHUTDOWNCMD; ours by default."""
        ours = f"{self.hooks}/powerguard-shutdown {self.folder}/shut.sh the default"
        flags = [f"NOTIFYFLAG {kind} SYSLOG+EXEC" for kind in TYPES]
        found = [
            f"RUN_AS_USER {user}",
            f"MONITOR {self.name} 1 mon {MON_PASSWORD} primary",
            f'SHUTDOWNCMD "{shutdown or ours}"',
            *SPEEDY,
            *flags,
            *lines,
        ]
        self.write("upsmon.conf", "\n".join(found) + "\n")
        isolated = "mount -t tmpfs tmpfs /run && mkdir /run/nut && exec " + shlex.join([require("upsmon"), "-F"])
        await self.spawn("unshare", "-m", "sh", "-c", isolated, log=self.folder / "upsmon.log")

    def shut(self) -> list[str]:
        """What the default action was called with, once for each call."""
        return self.marker.read_text(encoding="utf-8").splitlines() if self.marker.exists() else []

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def log(self, name: str) -> str:
        return self.read(f"{name}.log")

    def hints(self) -> list[tuple[str, str]]:
        return [(line["hint"], line["ups"]) for line in self.world.logged("hint_received")]

    async def end(self) -> None:
        """End everything that was started here, upsmon's other half included."""
        for child in reversed(self.children):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


@contextlib.asynccontextmanager
async def beside(*, card: bool = True) -> AsyncIterator[tuple[Rig, Nut]]:
    """A host with our daemon, not started yet, and NUT on a UPS of its own.

    card: the daemon reads a card of its own; else that upsd is its only source.
    """
    if not await is_isolated():
        pytest.skip("no mount namespace here: upsmon would use this machine's /run/nut")
    with tempfile.TemporaryDirectory(prefix="pg-nut-", dir="/tmp", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)  # noqa: PTH101 - upsmon's lesser half looks into it
        async with rig(runtime=ROOMY, card=card) as world:
            nut = Nut(Path(name), world)
            if not card:
                source = {"kind": "nut", "host": "127.0.0.1", "port": nut.port, "name": UPS}
                world.settings["ups"]["rack-a"]["sources"].append(source)
            try:
                await nut.start()
                yield world, nut
            finally:
                await nut.end()


def untouched(world: Rig) -> None:
    """Whatever was said to it: no outage, no order, no power-off, no bug."""
    assert world.outages() == ()
    assert [line for line in world.lines() if line.kind == "action"] == []
    assert [trainer.orders for trainer in world.trainers] == [[]]
    assert world.offs() == []
    world.no_traceback()


# --- NOTIFYCMD and CMDSCRIPT -----------------------------------------------------------------------------------------


async def test_upsmon_and_upssched_give_their_hints() -> None:
    """NOTIFYCMD and CMDSCRIPT: type, timer and UPS arrive, and are hints and no more: our own card says utility."""
    async with beside() as (world, nut):
        await world.start()
        nut.write(
            "upssched.conf",
            f"CMDSCRIPT {nut.hooks}/powerguard-notify\nPIPEFN {nut.folder}/pipe\nLOCKFN {nut.folder}/lock\n"
            "AT ONBATT * START-TIMER on-for-a-second 1\nAT ONLINE * CANCEL-TIMER on-for-a-second\n"
            "AT ONLINE * EXECUTE back\n",
        )
        nut.write(
            "both.sh", f'#!/bin/sh\n{nut.hooks}/powerguard-notify "$@" && {shlex.quote(require("upssched"))} "$@"\n'
        )
        await nut.upsmon(f"NOTIFYCMD {nut.folder}/both.sh")
        await world.until(nut.is_watched, "upsmon to log in")
        await nut.becomes("OB")
        await world.until(lambda: nut.hints()[1:], "the hint and the timer")
        await nut.becomes("OL")
        await world.until(lambda: nut.hints()[3:], "utility's return")
        assert [hint for hint, _ in nut.hints()] == ["ONBATT", "ONBATT/on-for-a-second", "ONLINE", "ONLINE/back"]
        assert {ups for _, ups in nut.hints()} == {nut.name}
        untouched(world)


@pytest.mark.slow
async def test_upsmons_own_user_may_hint_and_do_nothing_else() -> None:
    """The hint socket takes what an unprivileged upsmon says; the admin socket does not let that user in."""
    async with beside() as (world, nut):
        await world.start()
        assert world.socket.stat().st_mode & 0o777 == 0o660
        world.folder.chmod(0o755)
        shutil.copytree(Path(powerguard.__file__).parent, nut.folder / "lib" / "powerguard")  # which that user can read
        python = await python_of_anybody()
        own = f'PYTHONPATH="{nut.folder}/lib" {shlex.quote(python)} -P -m powerguard --socket "{world.socket}"'
        nut.write("powerguard", f'#!/bin/sh\n{own} "$@"\n')
        nut.write(
            "seen.sh", f'#!/bin/sh\n{nut.hooks}/powerguard-notify "$@"\necho "$? $NOTIFYTYPE" >>{nut.folder}/seen\n'
        )
        nut.write("seen", "")
        (nut.folder / "seen").chmod(0o666)
        await nut.upsmon(f"NOTIFYCMD {nut.folder}/seen.sh", user="nobody")
        await world.until(nut.is_watched, "upsmon to log in")
        await nut.becomes("OB")
        await world.until(lambda: "ONBATT" in nut.read("seen"), "the first hook to end")
        await nut.becomes("OL")
        await world.until(lambda: "ONLINE" in nut.read("seen"), "the second hook to end")
        assert nut.read("seen").splitlines() == ["0 ONBATT", "0 ONLINE"]
        assert "permission denied" not in nut.log("upsmon")
        assert [hint for hint, _ in nut.hints()] == ["ONBATT", "ONLINE"]
        argv = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(nut.folder / "powerguard"), "abort")
        child = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
        _, said = await child.communicate()
        assert (child.returncode, b"permission denied" in said) == (1, True), said
        untouched(world)


async def python_of_anybody() -> str:
    """Return a Python that every user may run; skip without one (a tool may have put ours into its owner's home)."""
    for python in (sys.executable, "/usr/bin/python3"):
        # By way of a shell: setpriv itself still has root's capabilities when it looks the program up.
        ask = f"exec {shlex.quote(python)} -c 'import sys; assert sys.version_info >= (3, 11)'"
        argv = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", ask)
        child = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
        if await child.wait() == 0:
            return python
    pytest.skip("no Python that another user can run")


EVIL: Final = Path("/tmp/pg-hostile")
HOSTILE: Final = (
    ("--help", "--socket=/tmp/theirs.sock"),
    ("ONBATT", f"$(touch {EVIL})"),
    ("ONBATT; reboot", "a\nb\x1b[2J"),
    ("", "\udcff\udcfe"),
    ("X" * 5000, "Y" * 100_000),
    ("ONLINE", ""),
)


async def test_hints_in_a_crowd_and_with_hostile_words() -> None:
    """Many at once, in any order, with words made to hurt: the scripts end with 0, the daemon polls and that is all.

    No more at once than the socket holds for a daemon that is busy: what does not fit is lost, as hints may be.
    """
    async with rig() as world:
        await world.start()
        wrapper = world.folder / "powerguard"
        own = f'exec {shlex.quote(sys.executable)} -P -m powerguard --socket "{world.socket}"'
        wrapper.write_text(f'#!/bin/sh\n{own} "$@"\n')
        wrapper.chmod(0o755)

        crowd = asyncio.Semaphore(5)

        async def call(kind: str, ups: str, message: str) -> int:
            env = {**os.environ, "POWERGUARD": str(wrapper), "NOTIFYTYPE": kind, "UPSNAME": ups}
            argv = (str(HOOKS / "powerguard-notify"), message)
            async with crowd:
                child = await asyncio.create_subprocess_exec(*argv, env=env, stderr=asyncio.subprocess.DEVNULL)
                return await child.wait()

        async with asyncio.TaskGroup() as group:
            messages = ("UPS x on battery", "-h", "$(reboot)")
            calls = [group.create_task(call(*words, said)) for words in HOSTILE for said in messages]
        assert [task.result() for task in calls] == [0] * len(calls)
        await world.until(lambda: len(world.logged("hint_received")) == len(calls), "every hint to arrive")
        hints = [(line["hint"], line["ups"]) for line in world.logged("hint_received")]
        assert ("ONBATT", f"$(touch {EVIL})") in hints
        assert ("--help", "--socket=/tmp/theirs.sock") in hints
        assert all(len(hint) <= 200 and len(ups) <= 200 for hint, ups in hints)
        assert all(word.isprintable() for pair in hints for word in pair)
        assert not EVIL.exists()
        assert (await world.get("/healthz"))[0] == 200
        untouched(world)


# --- SHUTDOWNCMD -----------------------------------------------------------------------------------------------------

BROKEN: Final = {
    "missing": None,
    "cut to nothing": "",
    "ends with 0": "#!/bin/sh\nexit 0\n",
    "crashes": "#!/bin/sh\nkill -s SEGV $$\n",
    "hangs, and heeds no SIGTERM": "#!/bin/sh\ntrap '' TERM USR1 USR2\nexec >/dev/null sleep 600\n",
}


@pytest.mark.parametrize("program", BROKEN.values(), ids=BROKEN)
async def test_the_default_runs_whatever_our_program_does(program: str | None, tmp_path: Path) -> None:
    """Only 99 stops it. What hangs is given 5 s and leaves nothing behind that could disturb the command."""
    broken = tmp_path / "powerguard"
    if program is not None:
        broken.write_text(program, encoding="ascii")
        broken.chmod(0o755)
    child = await asyncio.create_subprocess_exec(
        *(str(HOOKS / "powerguard-shutdown"), "sh", "-c", 'echo "$@"; sleep 0.2; exit 7', "sh", "two words", "*"),
        env={**os.environ, "POWERGUARD": str(broken)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert child.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        assert await child.stdout.readline() == b"two words *\n"
        assert await child.wait() == 7


IGNORED: Final = tuple(number for number in range(1, 65) if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33))
"""Every signal that a parent can ignore; the C library keeps 32 and 33 for itself."""


def started_badly(closed: tuple[int, ...]) -> Callable[[], None]:
    """Return what a child does before it becomes the hook: it ignores every signal and closes these files."""

    def prepare() -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        for number in closed:
            os.close(number)

    return prepare


@pytest.mark.parametrize(
    "closed", [(), (0, 1, 2), *(pytest.param((one,), marks=pytest.mark.slow) for one in range(3))], ids=str
)
@pytest.mark.parametrize(
    ("hook", "status", "then"),
    [
        ("nut/powerguard-shutdown", 99, 0),
        ("nut/powerguard-shutdown", 0, 7),
        ("nut/powerguard-shutdown", 1, 7),
        ("apcupsd/powerguard-event", 99, 99),
        ("apcupsd/powerguard-event", 0, 0),
    ],
)
async def test_hook_answers_with_every_signal_ignored_and_files_closed(
    hook: str, status: int, then: int, closed: tuple[int, ...], tmp_path: Path
) -> None:
    """upsmon starts SHUTDOWNCMD with SIGUSR1 and SIGUSR2 ignored: the answer must not need a signal."""
    program = tmp_path / "powerguard"
    program.write_text(f"#!/bin/sh\nexit {status}\n", encoding="ascii")
    program.chmod(0o755)
    words = ("sh", "-c", "exit 7") if hook.startswith("nut/") else ("doshutdown", "rack-a", "1", "1")
    began_s = time.monotonic()
    child = await asyncio.create_subprocess_exec(
        *(str(HOOKS.parent / hook), *words),
        env={**os.environ, "POWERGUARD": str(program)},
        preexec_fn=started_badly(closed),
        stderr=None if 2 in closed else asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(LIMIT_S):
        assert await child.wait() == then
    assert time.monotonic() - began_s < HOOK_LIMIT_S, "it waited for its own limit instead of for the answer"


async def test_upsmon_leaves_the_shutdown_to_a_daemon_that_owns_it() -> None:
    """The same UPS, at its end, told by upsd: upsmon asks, is told to stand back, and the host is powered off by us."""
    async with beside(card=False) as (world, nut):
        await world.start()
        await nut.upsmon()
        await world.until(nut.is_watched, "upsmon to log in")
        await nut.becomes("OB DISCHRG")
        await world.phase("on_battery")
        await nut.becomes("OB DISCHRG LB")
        await world.until(lambda: ("nut-shutdown", "") in nut.hints(), "upsmon to ask")
        await world.off()
        await asyncio.sleep(HOOK_LIMIT_S + 1.0)  # The hook that upsmon has started answers within its limit.
        assert nut.shut() == []
        assert await asks(nut, times=5) == [0] * 5
        assert len(world.offs()) == 1
        assert [order.event for order in world.trainers[0].orders] == [world.one_outage()]
        world.no_traceback()


async def asks(nut: Nut, *, times: int) -> list[int]:
    """Ask as SHUTDOWNCMD does, many at once; 1 for each whose default would have run."""
    argv = (str(HOOKS / "powerguard-shutdown"), "false")

    async def ask() -> int:
        child = await asyncio.create_subprocess_exec(*argv, env=nut.env)
        return await child.wait()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(times)]
    return [task.result() for task in tasks]


@pytest.mark.slow
async def test_the_default_runs_while_the_daemon_is_stopped_killed_or_gone() -> None:
    """The real upsmon on a UPS that is at its end: the command that SHUTDOWNCMD was is run, once each time."""
    async with beside() as (world, nut):
        await nut.becomes("OB LB")
        await nut.upsmon()
        await world.until(nut.shut, "the default without a daemon")
        await world.start()
        world.ups.utility = False
        await world.phase("on_battery")
        await world.signal(signal.SIGSTOP)
        await nut.upsmon()
        await world.until(lambda: nut.shut()[1:], "the default beside a daemon that is stopped")
        await world.kill()
        await nut.upsmon()
        await world.until(lambda: nut.shut()[2:], "the default beside a socket that nobody serves")
        assert nut.shut() == ["the default"] * 3
        world.no_traceback()


@pytest.mark.slow
async def test_the_default_runs_for_a_forced_shutdown_on_utility() -> None:
    """Somebody else ordered it, and our own card knows nothing of it: upsmon's order stands."""
    async with beside() as (world, nut):
        await world.start()
        await nut.upsmon()
        await world.until(nut.is_watched, "upsmon to log in")
        assert (await nut.ask("USERNAME ops", f"PASSWORD {OPS_PASSWORD}", f"FSD {UPS}"))[-1] == "OK FSD-SET"
        await world.until(nut.shut, "the default on utility")
        assert nut.hints() == [("nut-shutdown", "")]
        untouched(world)


@pytest.mark.slow
async def test_the_default_runs_beside_a_daemon_that_does_not_hear_upsd() -> None:
    """On battery, and at it; but a forced shutdown, after which the UPS cuts its output, is told by upsd alone."""
    async with beside() as (world, nut):
        await world.start()
        world.ups.utility = False
        await world.phase("on_battery")
        await nut.becomes("OB LB")
        await nut.upsmon()
        await world.until(nut.shut, "the default")
        assert nut.hints() == [("nut-shutdown", "")]
        world.no_traceback()
