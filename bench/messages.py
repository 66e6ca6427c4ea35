"""What messages cost: the loop's part, a durable write of the queue's thread, memory, and a queue that waited."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
from aiohttp import web

from bench import daemon
from bench.figure import Figure, quantile
from powerguard.core.model.actions import Level, Note
from powerguard.core.model.state import State
from powerguard.daemon.journal.journal import WorkerThread, in_thread
from powerguard.daemon.notify.composer import MessageComposer, StepNotes
from powerguard.daemon.notify.messenger import Messenger
from powerguard.daemon.notify.queue import Queue
from powerguard.effectors.child import run_child
from powerguard.settings.notify import NotifyOptions
from tests.daemon.watched import scene
from tests.e2e.rig import ROOMY, rig
from tests.e2e.test_messages import STOP_S, own, receiver, targets, wait_already

_OUTAGE = Note(
    event="outage_began",
    because="second_reading",
    level=Level.WARNING,
    numbers=(("outage", "2026-11-26T0412Z-a3"), ("charge_pct", 97.0), ("load_pct", 40.0), ("runtime_s", 900.0)),
)
_TARGETS = {
    "chat": {"kind": "apprise", "url": {"file": "/nowhere/url"}},
    "hook": {"kind": "webhook", "url": {"file": "/nowhere/url"}},
    "mail": {"kind": "mail", "host": "127.0.0.1", "sender": "a@example.org", "to": ["b@example.org"]},
    "alerts": {"kind": "alertmanager", "url": "http://127.0.0.1:9"},
}


def run(*, quick: bool) -> list[Figure]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    # Not in /tmp, which is often memory: the fsync is what is measured.
    with TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        figures = asyncio.run(_writes(Path(folder), 50 if quick else 1000))
        figures.append(asyncio.run(_waited(Path(folder), 1 if quick else 5)))
    spell_s = 5.0 if quick else 60.0
    memory = asyncio.run(daemon.cost(", four targets of messages", None, spell_s, notify={"targets": _TARGETS}))[0]
    without = quantile(asyncio.run(daemon.cost("", None, spell_s))[0].values, 0.5)
    added = replace(
        memory,
        name="memory that the four targets add to the daemon",
        values=tuple(each - without for each in memory.values),
        bar="<= 3",
    )
    offs = [asyncio.run(_power_off(1 if quick else 3, waiting=waiting)) for waiting in (False, True)]
    return [*figures, memory, added, *offs, _apprise()]


async def _writes(folder: Path, times: int) -> list[Figure]:
    options = NotifyOptions.model_validate({"targets": _TARGETS})
    messenger = Messenger(options, folder / "unused.sqlite", host="gpu-01", spawn=run_child, wall=time.time)
    composer = MessageComposer("gpu-01")
    thread = WorkerThread("bench")
    queue = Queue(folder / "messages.sqlite", thread, time.time)
    await queue.load()
    bare_ms: list[float] = []
    heard_us: list[float] = []
    worded_us: list[float] = []
    written_ms: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        messenger.hear((_OUTAGE,), State(), "o", "armed")
        heard_us.append(1e6 * (time.perf_counter() - began))
        began = time.perf_counter()
        messages = composer.of_step(StepNotes((_OUTAGE,), State(), "o", "armed", time.time() + 100.0 * len(worded_us)))
        worded_us.append(1e6 * (time.perf_counter() - began))
        for message in messages:
            queue.add(message, _TARGETS)
        began = time.perf_counter()
        await in_thread(thread, lambda: None)  # the write is before it in the thread's line
        written_ms.append(1000.0 * (time.perf_counter() - began))
        await asyncio.sleep(0)
        bare_ms.append(_bare_ms(folder / "bare", len(bare_ms)))
    await queue.close(5.0)
    await messenger.close()
    return [
        Figure(name="a bare write of 12 kB with fdatasync, beside it", unit="ms", values=tuple(bare_ms)),
        Figure(name="notes handed over by the loop", unit="us", values=tuple(heard_us)),
        Figure(name="text of a message", unit="us", values=tuple(worded_us)),
        Figure(
            name="durable write of a message for four targets", unit="ms", values=tuple(written_ms), bar="median <= 5"
        ),
    ]


WAITING = 200


async def _waited(folder: Path, times: int) -> Figure:
    """Queue 200 messages as an earlier life did, and deliver them to a webhook and to a program of one's own."""
    taken: list[str] = []

    async def take(request: web.Request) -> web.Response:
        taken.append((await request.json())["title"])
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_post("/", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = folder / "url"
    url.touch(mode=0o600)
    url.write_text(f"http://127.0.0.1:{runner.addresses[0][1]}/", encoding="ascii")
    targets = {
        "hook": {"kind": "webhook", "url": {"file": str(url)}},
        "own": {"kind": "command", "command": ["/bin/cat"]},
    }
    options = NotifyOptions.model_validate({"targets": targets})
    taken_s: list[float] = []
    for number in range(times):
        path = folder / f"waited-{number}.sqlite"
        queue = Queue(path, WorkerThread("earlier life"), time.time)
        await queue.load()
        (message,) = MessageComposer("gpu-01").of_step(StepNotes((_OUTAGE,), State(), "o", "armed", time.time()))
        for at in range(WAITING):
            queue.add(replace(message, id=f"{at}", key=f"event:{at}", title=f"message {at}"), targets)
        await queue.close(30.0)
        taken.clear()
        messenger = Messenger(options, path, host="gpu-01", spawn=run_child, wall=time.time)
        began = time.perf_counter()
        task = asyncio.create_task(messenger.run(scene()))
        while any(view.queued for view in messenger.views()) or not messenger.views()[0].delivered:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        taken_s.append(time.perf_counter() - began)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await messenger.close()
        if taken != [f"message {at}" for at in range(WAITING)]:
            error = "messages are missing, or came in another order"
            raise RuntimeError(error)
    await runner.cleanup()
    return Figure(
        name=f"{WAITING} messages that waited, delivered in order to a webhook and a program",
        unit="s",
        values=tuple(taken_s),
        bar="<= 60",
    )


async def _power_off(times: int, *, waiting: bool) -> Figure:
    """Time the order to power off after the commit, without messages or with 200 that wait for targets that hang."""
    taken_s: list[float] = []
    for _ in range(times):
        async with rig(runtime=ROOMY) as world, receiver(0, [], hangs=True) as port:
            world.settings["budget"] |= {"stop_q95_s": STOP_S, "reserve_s": 3}
            if waiting:
                own(world, hangs=True)
                world.settings["notify"] = {"targets": targets(world, port)}
                await wait_already(world)
            await world.start()
            if waiting:
                await world.metric_becomes('powerguard_messages_queued{target="hook"}', WAITING)
            world.ups.utility = False
            off = await world.off()
            await world.note("power_off_accepted")
            (latched,) = world.notes("phase_changed", new="shutdown")
            taken_s.append(off.at_s - latched.at_s)
    queued = f"{WAITING} messages and three targets that hang" if waiting else "no message"
    return Figure(name=f"commit -> order to power off, {queued}", unit="s", values=tuple(taken_s), bar="<= 1")


def _apprise() -> Figure:
    """Run Apprise's child with a target that refuses the connection; it ends with the message."""
    program = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-P', '-m', 'powerguard.daemon.notify.child'], input=sys.argv[1].encode(), "
        "check=True, capture_output=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)"
    )
    (message,) = MessageComposer("gpu-01").of_step(StepNotes((_OUTAGE,), State(), "o", "armed", time.time()))
    target = {"kind": "apprise", "url": {"file": "/nowhere"}}
    (options,) = NotifyOptions.model_validate({"targets": {"chat": target}}).targets.values()
    request = {
        "kind": "apprise",
        "message": message.plain(),
        "limit_s": 10.0,
        "options": options.model_dump(mode="json"),
        "secret": "json://127.0.0.1:9/",
    }
    ended = subprocess.run([sys.executable, "-c", program, json.dumps(request)], check=True, capture_output=True)
    return Figure(name="memory of Apprise's child, at most", unit="MB", values=(float(ended.stdout),), bar="<= 60")


def _bare_ms(path: Path, number: int) -> float:
    """Write what the disk alone takes: nothing durable is faster."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        os.pwrite(descriptor, bytes(12_288), 12_288 * number)
        began = time.perf_counter()
        os.fdatasync(descriptor)
        return 1000.0 * (time.perf_counter() - began)
    finally:
        os.close(descriptor)
