"""The real apcupsd calls its own apccontrol with our scripts beside it, or ours in its place; beside a real daemon.

Whoever is wrong, hung or gone: exactly one of the two shuts the host down, and the host is never left alone.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from powerguard.ups.apcupsd.protocol import Flag
from tests.e2e.rig import ENDLESS, LIMIT_S, LONG, ROOMY, Rig, rig
from tests.peers.apcupsd import Apcupsd, Scripts, apcupsd, scripts, stock_apccontrol
from tests.ups.apcupsd.apcupsd_helpers import apcupsd as fake_apcupsd

HOOKS: Final = Path(__file__).parents[2] / "config" / "apcupsd"
ORDERS: Final = ("failing", "timeout", "loadlimit", "runlimit", "emergency", "remotedown", "doshutdown")
HINTS: Final = ("powerout", "mainsback")
FAST: Final = {"TIMEOUT": 1, "ONBATTERYDELAY": 0, "MINUTES": 0, "BATTERYLEVEL": 0}
"""apcupsd orders a shutdown some 3 s after the cut, long before the battery is empty."""
KINDS: Final = ("stock", "ours")
slow = pytest.mark.slow
mainly_stock = pytest.mark.parametrize("kind", ["stock", pytest.param("ours", marks=slow)])
mainly_ours = pytest.mark.parametrize("kind", [pytest.param("stock", marks=slow), "ours"])
FAILURES: Final = ("dead", "stopped", "missing", "emptied", "dry-run")
QUICK: Final = {("dead", "ours"), ("stopped", "stock")}
"""The others take as long, and run in the long tests."""
failures = pytest.mark.parametrize(
    ("how", "kind"),
    [
        pytest.param(how, kind, marks=() if (how, kind) in QUICK else slow, id=f"{how}-{kind}")
        for how in FAILURES
        for kind in KINDS
    ],
)
peer = pytest.mark.peer("apcupsd")


def install(made: Scripts, kind: str) -> None:
    """Fill a SCRIPTDIR: apcupsd's own apccontrol with links to our script, or ours.

    The script is more patient here than the 5 s of a host: sixteen programs start at once on a busy machine.
    """
    limit, text = "\nlimit_s=5\n", (HOOKS / "powerguard-event").read_text(encoding="utf-8")
    assert limit in text
    hook = made.add("powerguard-event", text.replace(limit, f"\nlimit_s={LIMIT_S:.0f}\n"))
    if kind == "stock":
        made.add("apccontrol", made.tame(stock_apccontrol()))
        for event in (*HINTS, *ORDERS):
            (made.folder / event).symlink_to(hook)
    else:
        text = made.tame((HOOKS / "apccontrol").read_text(encoding="utf-8"))
        own = "HOOK=/usr/lib/powerguard/apcupsd/powerguard-event"
        assert own in text
        made.add("apccontrol", text.replace(own, f"HOOK={shlex.quote(str(hook))}"))


def environment(made: Scripts, world: Rig) -> dict[str, str]:
    """Return what leads the scripts to this test's daemon."""
    path = made.folder / "powerguard"
    if not path.exists():
        own = f'exec {shlex.quote(sys.executable)} -P -m powerguard --socket "{world.socket}" "$@"'
        made.add("powerguard", f"#!/bin/sh\n{own}\n")
    return {"POWERGUARD": str(path)}


@contextlib.asynccontextmanager
async def beside(world: Rig, kind: str) -> AsyncIterator[tuple[Apcupsd, Scripts]]:
    """Run apcupsd before the UPS that the daemon watches."""
    assert world.agent is not None
    device = f"127.0.0.1:{world.agent.port}:APC_NOTRAP:public"
    with scripts() as made:
        install(made, kind)
        async with apcupsd(
            "snmp", device, scripts_=made, settings=FAST, environment=environment(made, world)
        ) as running:
            await running.until(lambda status: bool(status.flags & Flag.ONLINE))
            yield running, made


async def committed(running: Apcupsd) -> None:
    """Wait until apcupsd has ordered its shutdown, and its apccontrol had time to do it."""
    await running.until(lambda status: bool(status.flags & Flag.SHUTDOWN))
    assert running.powerfail


def shut_down(made: Scripts) -> bool:
    return any(line.startswith("shutdown <-h> <now>") for line in made.called("shutdown"))


# --- Who shuts down ------------------------------------------------------------------------------------------------


@peer
@mainly_stock
async def test_a_daemon_that_owns_the_shutdown_is_left_to_it(kind: str) -> None:
    """apcupsd has run out of patience; powerguard still has time, uses it, and shuts down by itself."""
    async with rig(runtime=ENDLESS) as world:
        async with beside(world, kind) as (running, made):
            await world.start()
            world.ups.utility = False
            await committed(running)
            await world.until(lambda: world.logged("hint_received", hint="doshutdown"), "apcupsd to ask")
            assert world.offs() == []
            world.wear(LONG)
            off = await world.off()
            assert off.ordered
            assert not shut_down(made)
            assert not [line for line in made.called("wall") if "Doing shutdown" in line]
        hints = {line["hint"] for line in world.logged("hint_received")}
        assert {"powerout", "timeout", "doshutdown"} <= hints
        world.no_traceback()


@peer
@mainly_ours
async def test_a_return_in_time_is_no_shutdown_at_all(kind: str) -> None:
    """apcupsd has ordered one; utility comes back before powerguard had to: nobody shuts down, training goes on."""
    async with rig(runtime=ENDLESS) as world:
        async with beside(world, kind) as (running, made):
            await world.start()
            world.ups.utility = False
            await committed(running)
            # Asked after the return, the daemon owns nothing, and apcupsd's own shutdown goes on.
            await world.until(lambda: world.logged("hint_received", hint="doshutdown"), "apcupsd to ask")
            world.ups.utility = True
            await world.until(lambda: bool(world.notes("phase_changed", new="online")), "online")
            assert not shut_down(made)
        assert world.offs() == []
        await world.until(lambda: not world.trainers[0].paused, "the trainer to go on")
        world.no_traceback()


@peer
@failures
async def test_without_a_daemon_that_owns_it_the_default_goes_on(how: str, kind: str) -> None:
    async with rig(runtime=ROOMY) as world, beside(world, kind) as (running, made):
        if how == "dry-run":
            world.settings["mode"] = "dry-run"
        await world.start()
        program = made.folder / "powerguard"
        match how:
            case "dead":
                await world.kill()
            case "stopped":
                await world.signal(signal.SIGSTOP)
            case "missing":
                program.unlink()
            case "emptied":
                program.write_text("", encoding="utf-8")
            case _:
                pass
        world.ups.utility = False
        await committed(running)
        await world.until(lambda: shut_down(made), "apcupsd's own shutdown")
        if how == "stopped":
            await world.signal(signal.SIGCONT)


@peer
@mainly_stock
async def test_a_net_slave_goes_down_with_its_master(kind: str) -> None:
    """The master's halt may cut the power; who does not hear the master must not stand in the way."""
    async with rig(runtime=ROOMY) as world, fake_apcupsd() as master:
        with scripts() as made:
            install(made, kind)
            async with apcupsd(
                "net",
                f"127.0.0.1:{master.port}",
                scripts_=made,
                settings=FAST,
                environment=environment(made, world),
            ) as running:
                await running.until(lambda status: bool(status.flags & Flag.ONLINE))
                await world.start()
                world.ups.utility = False
                await world.phase("on_battery")
                master.set(0x05060250)
                await world.until(lambda: shut_down(made), "the slave's own shutdown")
        await world.until(lambda: world.logged("hint_received", hint="doshutdown-slave"), "hint_received")


# --- The scripts themselves ---------------------------------------------------------------------------------------


async def call(made: Scripts, world: Rig, name: str, *words: str) -> int:
    """Run a script of the SCRIPTDIR as apcupsd would; return its exit status."""
    child = await asyncio.create_subprocess_exec(
        str(made.folder / name),
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **environment(made, world)},
        cwd=made.folder,
    )
    async with asyncio.timeout(LIMIT_S):
        return await child.wait()


@mainly_ours
async def test_calls_out_of_order_twice_and_at_once_change_nothing(kind: str) -> None:
    """On utility every event is a hint at most, whatever it is called; the default of an order goes on."""
    if kind == "stock":
        stock_apccontrol()
    async with rig() as world:
        await world.start()
        events = (
            "doshutdown",
            "mainsback",
            "powerout",
            "onbattery",
            "offbattery",
            "failing",
            "powerout",
            "commfailure",
        )
        with scripts() as made:
            install(made, kind)
            async with asyncio.TaskGroup() as tasks:
                for event in events * 2:
                    tasks.create_task(call(made, world, "apccontrol", event, "rack-a", "1", "1"))
            await world.until(lambda: len(world.logged("hint_received")) >= 8, "hints to arrive")
            assert len([line for line in made.called("shutdown") if "<-h>" in line]) == 2
        status = await world.status()
        assert status is not None
        assert status["phase"] == "online"
        assert world.offs() == []
        assert world.notes("phase_changed", new="on_battery") == []
        world.no_traceback()


HOSTILE: Final = (
    "two words \"and\" 'quotes'",
    "$(touch pwned) `touch pwned` ; touch pwned",
    "--socket=/nowhere",
    "-h",
    "line\nfeed\x1b[2J",
    "*",
    "",
    "x" * 5000,
    "zażółć \N{SNOWMAN}",
)


@mainly_stock
async def test_a_ups_cannot_act_by_its_name(kind: str) -> None:
    """A UPS names itself over SNMP, and apcupsd's own apccontrol quotes nothing."""
    if kind == "stock":
        stock_apccontrol()
    async with rig() as world:
        await world.start()
        with scripts() as made:
            install(made, kind)
            for name in HOSTILE:
                assert await call(made, world, "apccontrol", "doshutdown", name, "1", "1") == 0
            assert len([line for line in made.called("shutdown") if "<-h>" in line]) == len(HOSTILE)
            assert not made.holds("pwned")
            if kind == "ours":
                assert "\x1b" not in made.calls.read_text(encoding="utf-8")
        hints = world.logged("hint_received", hint="doshutdown")
        assert len(hints) == len(HOSTILE)
        assert all(len(line["ups"]) <= 300 for line in hints)
        world.no_traceback()


async def test_our_apccontrol_keeps_what_a_site_has_added() -> None:
    """A script of the site's own runs first, with its arguments quoted, and 99 of it suppresses the default."""
    async with rig() as world:
        await world.start()
        with scripts() as made:
            install(made, "ours")
            made.add("onbattery", f'#!/bin/sh\nprintf "site <%s> <%s> <%s>\\n" "$1" "$2" "$3" >>{made.calls}\n')
            made.add("doshutdown", "#!/bin/sh\nexit 99\n")
            assert await call(made, world, "apccontrol", "onbattery", "rack a", "1", "0") == 0
            assert await call(made, world, "apccontrol", "doshutdown", "rack a", "1", "0") == 0
            assert await call(made, world, "apccontrol", "no-such-event", "rack a", "1", "0") == 1
            assert made.called("site") == ["site <rack a> <1> <0>"]
            assert made.called("shutdown") == []


async def test_killpower_is_nobodys_to_suppress() -> None:
    """The host is halting: the UPS is told to cut its output, and no daemon is asked."""
    async with rig() as world:
        with scripts() as made:
            install(made, "ours")
            assert await call(made, world, "apccontrol", "killpower", "", "", "") == 0
            assert made.called("apcupsd") == ["apcupsd <--killpower>"]
            assert await call(made, world, "apccontrol", "killpower") == 0


def test_the_scripts_are_plain_posix_sh() -> None:
    """They run as root while the power fails, on whatever /bin/sh is."""
    for path in (HOOKS / "apccontrol", HOOKS / "powerguard-event"):
        assert path.read_text(encoding="utf-8").startswith("#!/bin/sh\n")
        assert os.access(path, os.X_OK)
