"""Trainers without powerguard's library: they save at a signal, or a program makes them save.

There is no answer, so the files in `checkpoint_dir` count: a manifest, a seal, or a file that was written since and no
longer changes. A checkpoint without a seal is unverified, and its file system is flushed before it is reported as done.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from powerguard.clock import Clock
from powerguard.core.model.actions import Detail, TriggerCheckpoint
from powerguard.core.model.events import CheckpointProgress
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, clean_environment
from powerguard.effectors.trainer.checkpoint import LAST_WORDS_S, SETTLED_S, Run, tried
from powerguard.effectors.trainer.options import (
    CommandOptions,
    CommandTrainerOptions,
    Common,
    SignalOptions,
    SignalTrainerOptions,
)
from powerguard.fields import clean_text

CGROUPS: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"))
_LAST_LOOK_S: Final = 2.0
"""In the folder of a trainer that has ended."""
_PACE_S: Final = 1.0
_DEPTH: Final = 5


class Helper(Protocol):
    """The helper that may signal: powerguard-signal."""

    async def checkpoint(self, unit: str, signal: Literal["USR1", "USR2", "TERM"]) -> dict[str, Any]:
        """Have a unit sent a signal that root has listed for it. Raises EffectorError."""
        ...


Alive = Callable[[str], bool | None]
"""Whether a unit has processes; None: unknown."""


def is_there(unit: str, roots: tuple[Path, ...] = CGROUPS) -> bool | None:
    """Say whether a unit of the system's manager has processes, by its control group; None: unknown here."""
    known = False
    for root in roots:
        pending = [(root, 0)]
        while pending:
            folder, depth = pending.pop()
            known = known or depth > 0
            with suppress(OSError):  # slices come and go, and one that has just gone does not hide others
                if (folder / unit).is_dir():
                    return _is_populated(folder / unit)
                if depth < _DEPTH:
                    pending += [
                        (Path(entry.path), depth + 1)
                        for entry in os.scandir(folder)
                        if entry.name.endswith(".slice") and entry.name != "user.slice" and entry.is_dir()
                    ]
    return False if known else None


def _is_populated(group: Path) -> bool:
    """Version 2 reports it for the group and all below; version 1 only lists the processes of each."""
    with suppress(OSError):
        return "populated 1" in (group / "cgroup.events").read_text(encoding="ascii")
    return any(_has_processes(Path(folder)) for folder, _, _ in os.walk(group))


def _has_processes(group: Path) -> bool:
    with suppress(OSError):  # it may vanish meanwhile
        return bool((group / "cgroup.procs").read_text(encoding="ascii").strip())
    return False


@dataclass(kw_only=True, slots=True)
class SignalRun(Run):
    """A checkpoint by a signal. alive: whether the unit has processes; None: unknown."""

    options: SignalOptions
    helper: Helper
    alive: Callable[[], bool | None]

    async def checkpoint(self) -> Detail:
        """Send the signal, and wait for its checkpoint."""
        if self.alive() is False:
            self.fail("has no process, so there is no training to save")
        self.progress("signalling")
        await self.helper.checkpoint(self.options.unit, self.options.signal)
        most_s = self.common.max_checkpoint_s
        folder = self.common.checkpoint_dir
        self.progress("waiting" if folder is None else "waiting_folder")
        if folder is not None:
            return await self._appears(folder)
        while (left_s := most_s - self.took_s()) > 0 and self.alive() is not False:
            await self.rest(min(_PACE_S, left_s))
        return await self.flushed(self.dumb(confirmed=False))

    async def _appears(self, folder: str) -> Detail:
        """Wait for a file in the folder that no longer changes, or for the end of the processes."""
        most_s = self.common.max_checkpoint_s
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(tried(lambda: self.appeared(most_s)))
            while not looking.done() and self.alive() is not False:
                await asyncio.wait({looking}, timeout=_PACE_S)
            ended = not looking.done()
            looking.cancel()
        found = await self.newest(limit_s=_LAST_LOOK_S, quiet_s=SETTLED_S) if ended else looking.result()
        if isinstance(found, EffectorError):
            raise found
        if found is None:
            signal = f"SIG{self.options.signal}"
            what = f"no newer checkpoint in {folder} within {most_s:.0f} s of {signal}"
            what = f"ended at {signal}, without a newer checkpoint in {folder}" if ended else what
            self.fail(f"{what}{self.unseen}")
        return await self.flushed(found)


@dataclass(kw_only=True, slots=True)
class CommandRun(Run):
    """A checkpoint by a program, which is killed at the deadline."""

    options: CommandOptions

    async def checkpoint(self) -> Detail:
        """Run the program to its end."""
        program = self.options.command[0]
        limit_s = max(0.0, min(self.common.max_checkpoint_s, self.left_s() - LAST_WORDS_S))
        variables = {
            "POWERGUARD_ID": self.action.id,
            "POWERGUARD_REASON": self.action.reason,
            "POWERGUARD_EVENT": self.action.outage,
            "POWERGUARD_DEADLINE_S": f"{limit_s:.0f}",
        }
        self.progress("running_command")
        try:
            ended = await self.spawn(self.options.command, limit_s=limit_s, env={**clean_environment(), **variables})
        except OSError as error:
            self.fail(f"{program} cannot be started: {error.strerror or error}")
        last = _last_line(ended.stderr) or _last_line(ended.stdout)
        if ended.timed_out:
            what = f"{program} did not end within {limit_s:.0f} s, and was killed{last and ': ' + last}"
            self.fail(what, timed_out=limit_s < self.common.max_checkpoint_s)
        if ended.returncode != 0:
            ending = f"signal {-ended.returncode}" if ended.returncode < 0 else f"status {ended.returncode}"
            self.fail(f"{program} ended with {ending}{last and ': ' + last}")
        found = await self.newest(limit_s=0.0)
        # What it has left behind may be what saves.
        return await self.flushed(self.dumb(confirmed=not ended.left_open) if found is None else found)


def _last_line(output: bytes) -> str:
    lines = output[-4096:].decode("utf-8", "replace").strip().splitlines()
    return clean_text(lines[-1], 200) if lines else ""


def address(options: SignalOptions | CommandOptions) -> str:
    """Return how a trainer is reached, as failures name it."""
    return options.unit if isinstance(options, SignalOptions) else options.command[0]


def unmodified_run(
    options: SignalOptions | CommandOptions,
    *,
    common: Common,
    action: TriggerCheckpoint,
    clock: Clock,
    publish: Callable[[CheckpointProgress], None],
    spawn: Spawn,
    helper: Helper,
    alive: Alive,
) -> SignalRun | CommandRun:
    """Make the run of a trainer, or of a fallback, without our library. A fallback that sends TERM ends training."""
    where = address(options)
    if isinstance(options, SignalTrainerOptions | CommandTrainerOptions):
        ends = options.after == "exit"
    else:
        ends = isinstance(options, SignalOptions) and options.signal == "TERM"
    if isinstance(options, CommandOptions):
        return CommandRun(
            common=common,
            where=where,
            action=action,
            clock=clock,
            publish=publish,
            spawn=spawn,
            ends_training=ends,
            options=options,
        )
    return SignalRun(
        common=common,
        where=where,
        action=action,
        clock=clock,
        publish=publish,
        spawn=spawn,
        ends_training=ends,
        options=options,
        helper=helper,
        alive=lambda: alive(options.unit),
    )
