"""Messages that nobody takes: they cost the host nothing, and arrive after the boot."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator

from aiohttp import web

from powerguard.daemon.journal.journal import WorkerThread
from powerguard.daemon.notify.composer import Message
from powerguard.daemon.notify.queue import Queue
from powerguard.sim.demo.story import numbers
from tests.e2e.rig import ROOMY, Rig, rig
from tests.e2e.test_return import reboot
from tests.peers.ports import free_port

WAITING = 200
STOP_S = 6.0


@contextlib.asynccontextmanager
async def receiver(port: int, bodies: list[dict[str, object]], *, hangs: bool) -> AsyncIterator[int]:
    """The other side of every target: it takes connections, and answers unless it hangs."""

    async def take(request: web.Request) -> web.Response:
        body = await request.json()
        if hangs:
            await asyncio.Event().wait()
        bodies.append(body)
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_post("/hook", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def wait_already(world: Rig) -> None:
    """Queue what an earlier life could not deliver."""
    queue = Queue(world.journal.with_name("messages.sqlite"), WorkerThread("earlier life"), time.time)
    await queue.load()
    for number in range(WAITING):
        made = Message(
            id=f"{number}",
            at=time.time(),
            key=f"event:{number}",
            status="event",
            event="overload_raised",
            level="error",
            host="gpu-01",
            title=f"message {number}",
            text="of an earlier life",
        )
        queue.add(made, ("hook", "mail", "own"))
    await queue.close(10.0)


def targets(world: Rig, port: int) -> dict[str, object]:
    """Three kinds, all at one port that hangs; afterwards the program of one's own works."""
    return {
        "hook": {"kind": "webhook", "url": world.secret("hook", f"http://127.0.0.1:{port}/hook"), "limit_s": 60},
        "mail": {
            "kind": "mail",
            "host": "127.0.0.1",
            "port": port,
            "tls": "none",
            "sender": "powerguard@example.org",
            "to": ["ops@example.org"],
            "limit_s": 60,
        },
        "own": {"kind": "command", "command": [str(world.folder / "own"), str(world.folder / "got")], "limit_s": 60},
    }


def own(world: Rig, *, hangs: bool) -> None:
    """Write the program of one's own. One that hangs outlives a daemon that is killed, and ends with the test."""
    path = world.folder / "own"
    does = 'while [ -e "$0" ]; do sleep 1; done' if hangs else 'cat >> "$1"'
    path.write_text(f"#!/bin/sh\n{does}\n", encoding="ascii")
    path.chmod(0o755)


def taken_by_own(world: Rig) -> list[str]:
    """Return what the program of one's own was given, a line each."""
    return (world.folder / "got").read_text(encoding="utf-8").splitlines()


async def notify_test(world: Rig) -> str:
    """Ask the daemon for a test message, as an operator does."""
    words = ("notify", "test", "--socket", str(world.socket))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "powerguard", *words, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out.decode()


async def test_targets_that_hang_cost_nothing_and_get_everything_after_the_boot() -> None:
    """200 messages wait and every target hangs: the power-off word comes in time. Then they arrive, in order."""
    bodies: list[dict[str, object]] = []
    async with rig(runtime=ROOMY) as world:
        world.settings["budget"] |= {"stop_q95_s": STOP_S, "reserve_s": 3}
        async with receiver(free_port(), bodies, hangs=True) as port:
            own(world, hangs=True)
            world.settings["notify"] = {"targets": targets(world, port)}
            await wait_already(world)
            await world.start()
            await world.metric_becomes('powerguard_messages_queued{target="hook"}', WAITING)
            world.ups.utility = False
            off = await world.off()
            await world.note("power_off_accepted")
            moved = [numbers(line)["new"] for line in world.notes("phase_changed")]
            assert moved == ["on_battery", "emergency_checkpoint", "holding", "shutdown"]
            (latched,) = world.notes("phase_changed", new="shutdown")
            (ordered,) = world.actions("PowerOff")
            # The word waits for the sync, which has 5 s, and its command has to start on a busy machine. A target that
            # hangs has 60 s.
            assert off.at_s - latched.at_s < 30.0
            assert off.deadline_s == int(float(str(ordered.payload["force_after_s"])))
            assert off.ordered
            lag_s = await world.metric("powerguard_event_loop_lag_seconds")
            assert lag_s is not None
            status = await world.status()
            assert status is not None
            assert [each["queued"] >= WAITING + 2 for each in status["messages"]["targets"]] == [True] * 3
            outage = world.one_outage()
            await world.kill()
        reboot(world)
        own(world, hangs=False)
        world.ups.utility = True
        world.trainers[0].paused = False
        world.settings["notify"]["targets"].pop("mail")
        async with receiver(port, bodies, hangs=False):
            await world.start()
            await world.note("outage_ended", outage=outage)
            for name in ("hook", "own"):
                await world.metric_becomes(f'powerguard_messages_queued{{target="{name}"}}', 0.0)
            asked = await notify_test(world)
            assert asked.splitlines() == ["hook: delivered: 200 ok", "own: delivered: exit status 0"]
        got = [json.loads(line) for line in taken_by_own(world)]
        for taken in (bodies, got):
            events = [str(each["event"]) for each in taken]
            assert [each["title"] for each in taken][:WAITING] == [f"message {number}" for number in range(WAITING)]
            story = ["outage_began", "emergency_checkpoint", "shutdown", "host_returned", "clean_shutdown"]
            assert [event for event in events[WAITING:] if event in story] == story
        assert world.logged("target_failed", target="hook") == []
        world.no_traceback()
