"""A messenger with real targets, and notes to send through it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powerguard.core.model.actions import Level, Note, Scalar
from powerguard.core.model.state import State
from powerguard.daemon.journal.journal import Executor
from powerguard.daemon.notify.messenger import CLOSE_S, Messenger
from powerguard.daemon.observe.port import TargetView
from powerguard.effectors.child import run_child
from powerguard.settings.notify import NotifyOptions
from tests.daemon.watched import scene

LIMIT_S = 60.0


def note(event: str, level: Level = Level.WARNING, because: str = "for a test", **numbers: Scalar) -> Note:
    return Note(event=event, because=because, level=level, numbers=tuple(numbers.items()))


def began(outage: str = "o1") -> tuple[Note, ...]:
    sums = {"reff_now_s": 700.0, "reff_paused_s": 1500.0, "checkpoint_s": 20.0, "stop_s": 100.0}
    return (
        note("outage_began", outage=outage, charge_pct=97.0, load_pct=40.0, runtime_s=900.0),
        note("phase_changed", old="online", new="on_battery", **sums),
    )


def ended(outage: str = "o1", outcome: str = "ridden_through") -> tuple[Note, ...]:
    return (note("outage_ended", Level.INFO, outage=outage, outcome=outcome, lasted_s=30.0),)


def secret(folder: Path, name: str, text: str) -> dict[str, str]:
    path = folder / name
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return {"file": str(path)}


def options(language: str = "en", **targets: dict[str, Any]) -> NotifyOptions:
    return NotifyOptions.model_validate({"language": language, "targets": targets})


async def settled(reached: Callable[[], object]) -> None:
    """Wait until it is true. Raises TimeoutError."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if reached():
                return
            await asyncio.sleep(0.01)


@dataclass
class Clock:
    """Wall time, which a test may set. passed_s: time that passes for a test by both clocks."""

    ahead_s: float = 0.0
    passed_s: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s + self.passed_s

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s


@dataclass
class Post:
    """What a test talks to."""

    messenger: Messenger
    clock: Clock
    task: asyncio.Task[None] = field(repr=False)

    def hear(self, *notes: Note, outage: str = "o1", mode: str = "armed", state: State | None = None) -> None:
        self.messenger.hear(notes, State() if state is None else state, outage, mode)

    async def until(self, reached: Callable[[], object], what: str = "it") -> None:
        try:
            await settled(reached)
        except TimeoutError:
            msg = f"waited for {what}; {self.messenger.views()}"
            raise AssertionError(msg) from None

    def view(self, name: str) -> TargetView:
        return next(each for each in self.messenger.views() if each.name == name)


@contextlib.asynccontextmanager
async def post(
    made: NotifyOptions, folder: Path, clock: Clock | None = None, writer: Executor | None = None
) -> AsyncIterator[Post]:
    """Run a messenger until the end of the block; then it is closed, as the daemon closes it."""
    clock = clock or Clock()
    path = folder / "messages.sqlite"
    messenger = Messenger(
        made, path, host="gpu-01.example", spawn=run_child, wall=clock, clock=clock.monotonic, writer=writer
    )
    task = asyncio.get_running_loop().create_task(messenger.run(scene()))
    try:
        await settled(lambda: not made.targets or messenger._loaded)
        if writer is None:  # a slow disk costs the daemon no message; a test begins once the file has been read
            await settled(lambda: not messenger.queue._unread or messenger.queue._busy is None)
        yield Post(messenger, clock, task)
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await messenger.close(LIMIT_S if writer is None else CLOSE_S)
