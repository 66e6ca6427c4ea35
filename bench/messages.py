"""What messages cost: the loop's part, a durable write of the queue's thread, and the daemon's memory with targets."""

import asyncio
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from bench import daemon
from bench.figure import Figure
from powerguard.core.model.actions import Level, Note
from powerguard.core.model.state import State
from powerguard.daemon.journal.journal import WorkerThread, in_thread
from powerguard.daemon.notify.hearing import Heard, Hearing
from powerguard.daemon.notify.messenger import Messenger
from powerguard.daemon.notify.queue import Queue
from powerguard.effectors.child import run_child
from powerguard.settings.notify import NotifyOptions

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
    memory = asyncio.run(
        daemon.cost(", four targets of messages", None, 5.0 if quick else 60.0, notify={"targets": _TARGETS})
    )
    return [*figures, memory[0]]


async def _writes(folder: Path, times: int) -> list[Figure]:
    options = NotifyOptions.model_validate({"targets": _TARGETS})
    messenger = Messenger(options, folder / "unused.sqlite", host="gpu-01", spawn=run_child, wall=time.time)
    hearing = Hearing("gpu-01")
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
        messages = hearing.of_step(Heard((_OUTAGE,), State(), "o", "armed", time.time() + 100.0 * len(worded_us)))
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
