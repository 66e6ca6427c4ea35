"""The effector for `CheckHost`: after a return, are GPUs, checkpoint storage and newest checkpoint there and good?

On good days the daemon remembers the state in one small file next to the journal. A child process does the check
(`look`): the daemon sends what counts, and receives what is missing.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.actions import Action, CheckHost, Detail
from powerguard.durable import replace_file
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn, run_child
from powerguard.effectors.options import GPU_SOCKET, ResumeOptions
from powerguard.fields import clean_text

log = structlog.get_logger()

MEMORY: Final = "host.json"
"""Name of the file, in the folder of the journal."""
LOOK_LIMIT_S: Final = 20.0
"""Timeout for a periodic check: on a good day, and while the daemon waits for the gate."""
LOOK_EVERY_S: Final = 600.0
WAIT_EVERY_S: Final = 15.0
FIRST_LOOK_S: Final = 20.0
FILE_LIMIT_S: Final = 2.0
_START_S: Final = 5.0
"""A child starts in a quarter of a second, and in a few where everything else of a boot starts, too."""
_MOST_REASON: Final = 2000


class HostSeen(NamedTuple):
    """One look at this host. at_s: when, CLOCK_BOOTTIME. problems: why training must not start.

    notes: what else a person should know. detail: for the journal. memory: the state to remember of a good day; None if
    unchanged.
    """

    at_s: float
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    gpus: int = 0
    folders: int = 0
    detail: Detail = ()
    memory: str | None = None


class HostCheckEffector:
    """Carries out `CheckHost`, and remembers what it compares with.

    folder: where `host.json` lies. dirs: folders of checkpoints that the settings name. reported_dirs: returns more
    of them, called each time: the folders that trainers report. gpu_socket: of powerguard-gpu. wall: for the file,
    across boots. last: the newest check.
    """

    def __init__(
        self,
        options: ResumeOptions,
        *,
        folder: Path,
        dirs: Sequence[str],
        wall: Clock,
        reported_dirs: Callable[[], Iterable[str]] = tuple,
        gpu_socket: str = GPU_SOCKET,
        spawn: Spawn = run_child,
        clock: Clock = boottime_s,
    ) -> None:
        self._options = options
        self._folder = folder
        self._dirs = tuple(dirs)
        self._wall = wall
        self._reported_dirs = reported_dirs
        self._gpu_socket = gpu_socket
        self._spawn = spawn
        self._clock = clock
        self.last: HostSeen | None = None
        self._looking: asyncio.Task[HostSeen] | None = None

    async def carry_out(self, action: Action) -> Detail:
        """Look and compare. Raises EffectorError: what is missing, where, and the fix.

        Detail: `gpus` (how many), `storage` (each folder, and on what it lies), `newest` (what training would resume
        from), `notes`: what was passed over, could not be judged, or is else worth a look.
        """
        if not isinstance(action, CheckHost):
            msg = f"the host check carries out CheckHost, not {type(action).__name__}"
            raise TypeError(msg)
        seen = await self.look(max(1.0, min(LOOK_LIMIT_S, action.by_s - self._clock() - _START_S - 1.0)))
        if seen.problems:
            raise EffectorError(clean_text("; ".join(seen.problems), _MOST_REASON))
        return seen.detail

    async def look(self, limit_s: float = LOOK_LIMIT_S, *, verify: str | None = None) -> HostSeen:
        """Check the host within limit_s and the start of a child; make no change. A failed check is a problem.

        One at a time: a call during a check gets its result. verify: in place of the settings' `resume.verify`.
        """
        if self._looking is None:
            verify = self._options.verify if verify is None else verify
            self._looking = asyncio.get_running_loop().create_task(self._look(limit_s, verify))
            self._looking.add_done_callback(self._looked)
        return await asyncio.shield(self._looking)

    def _looked(self, look: asyncio.Task[HostSeen]) -> None:
        self._looking = None
        if not look.cancelled() and look.exception() is None:
            self.last = look.result()

    async def _look(self, limit_s: float, verify: str) -> HostSeen:
        request = {
            "memory": str(self._folder / MEMORY),
            "dirs": [*self._dirs, *self._reported_dirs()],
            "gpu_socket": self._gpu_socket,
            "verify": verify,
            "any_gpus": self._options.gpus == "any",
            "limit_s": limit_s,
            "wall_s": self._wall(),
        }
        argv = [sys.executable, "-m", "powerguard.effectors.host.look"]
        try:
            ended = await self._spawn(argv, limit_s=limit_s + _START_S, stdin=json.dumps(request).encode())
        except OSError as error:
            return self._failed(f"no child can be started ({error.strerror})")
        if ended.timed_out:
            return self._failed(
                f"the check did not end within {limit_s + _START_S:.0f} s: the host is busy, or a disk hangs"
            )
        try:
            return self._seen(json.loads(ended.stdout))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
            return self._failed(
                f"the check failed: {clean_text(lines[-1], 200) if lines else f'status {ended.returncode}'}"
            )

    def _seen(self, answer: dict[str, Any]) -> HostSeen:
        return HostSeen(
            at_s=self._clock(),
            problems=tuple(map(str, answer["problems"])),
            notes=tuple(map(str, answer["notes"])),
            gpus=int(answer["gpus"]),
            folders=int(answer["folders"]),
            detail=tuple((str(name), value) for name, value in answer["detail"].items()),
            memory=answer["memory"] if isinstance(answer["memory"], str) else None,
        )

    def _failed(self, because: str) -> HostSeen:
        return HostSeen(at_s=self._clock(), problems=(f"this host cannot be checked: {because}",))

    async def keep(
        self,
        is_calm: Callable[[], bool],
        is_waiting: Callable[[], bool],
        rest: Callable[[float], Any],
        *,
        first_s: float = FIRST_LOOK_S,
    ) -> None:
        """Look every ten minutes on a good day, and remember it; while the gate waits, look more often; never returns.

        is_calm: utility, and no outage or drill. is_waiting: the host has returned, and training does not run yet.
        first_s: until the first look on a good day; a daemon's start has better to do.
        """
        logged: tuple[str, ...] = ()
        due_s = self._clock() + first_s
        while True:
            if is_calm() and self._clock() >= due_s:
                due_s = self._clock() + LOOK_EVERY_S
                seen = await self.look(verify="manifest")  # to read every byte would take the disk from training
                # Still calm: an outage may have begun meanwhile, and taken a switch with it.
                if is_calm() and seen.memory is not None:
                    await self._remember(seen.memory)
                for text in seen.problems:
                    if text not in logged:
                        log.warning("host_incomplete_beforehand", because=text)
                logged = seen.problems
            elif is_waiting():
                await self.look()
            await rest(WAIT_EVERY_S)

    async def _remember(self, memory: str) -> None:
        path = self._folder / MEMORY
        try:
            async with asyncio.timeout(FILE_LIMIT_S):
                await asyncio.to_thread(replace_file, path, memory.encode())
        except (OSError, TimeoutError) as error:
            log.warning("host_not_remembered", path=str(path), because=str(error) or "the disk hangs")
