"""The common part of every way to a checkpoint: its time, its progress, the folder where it appears."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from powerguard.clock import Clock
from powerguard.core.model.actions import Conduct, Detail, TriggerCheckpoint
from powerguard.core.model.events import CheckpointProgress
from powerguard.effectors.base import EffectorError
from powerguard.effectors.child import Spawn
from powerguard.effectors.host import syncfs_child
from powerguard.effectors.trainer.options import Common
from powerguard.fields import clean_text

STAMP_S: Final = 2.0
QUIET_S: Final = 6.0
"""Time without a change in the folder: longer than a busy disk pauses within one write."""
SETTLED_S: Final = 1.0
"""The same, once the trainer's processes have ended: only the file system may still lag."""
_GROWING: Final = 3
"""newest_child's exit code for "still growing"; the daemon does not import that module."""
_TICK_NS: Final = 20_000_000  # the file system's stamps lag by up to a tick of the kernel
_NEWEST: Final = (sys.executable, "-m", "powerguard.effectors.trainer.newest_child")
LAST_WORDS_S = 0.25
"""Time before the deadline at which a run ends, to report why; the bulkhead would only report "timed out"."""


@dataclass(kw_only=True, slots=True)
class Run:
    """Carries out one TriggerCheckpoint. publish: takes CheckpointProgress. where: what failures name, an address.

    ends_training: this way of saving ends training, so it is not used if training is to continue.
    since_ns: newest stamp in the folder before the request. unseen: why the folder could not be read.
    growing: new files in it were still changing when the last look ended.
    """

    common: Common
    where: str
    action: TriggerCheckpoint
    clock: Clock
    publish: Callable[[CheckpointProgress], None]
    spawn: Spawn
    ends_training: bool = False
    began_s: float = 0.0
    since_ns: int = 0
    unseen: str = ""
    growing: bool = False
    stage: str = "asking"

    async def run(self) -> Detail:
        """Return what `Done.detail` promises; raises EffectorError."""
        if self.ends_training and self.action.after is Conduct.CONTINUE:
            self.fail("saves only when it ends, but training is to continue: not asked")
        self.began_s = self.clock()
        try:
            async with asyncio.timeout(self.left_s()):
                self.since_ns = await self.stamp()
                return await self.checkpoint()
        except TimeoutError:
            self.fail(self._late())

    async def checkpoint(self) -> Detail:
        """Carry it out. Cancelled at the deadline."""
        raise EffectorError(self.where)  # pragma: no cover - each way has its own

    # --- What appears ----------------------------------------------------------------------------------------------

    async def stamp(self) -> int:
        """Return the newest stamp in the configured folder, before we ask: its clock need not be ours.

        A folder that does not answer soon must not delay the request: then the daemon's clock counts.
        """
        folder = self.common.checkpoint_dir
        if folder is not None:
            with contextlib.suppress(OSError, ValueError):
                ended = await self.spawn([*_NEWEST, folder], limit_s=min(STAMP_S, self.left_s()))
                return int(ended.stdout)
        return time.time_ns() - _TICK_NS

    async def appeared(self, most_s: float) -> Detail | None:
        """Return what appeared in the folder within most_s of the request; None: no checkpoint did."""
        while (left_s := most_s - self.took_s()) > 0:
            found = await self.newest(limit_s=left_s)
            if found is not None:
                return found
            await self.rest(min(1.0, most_s - self.took_s()))
        return None

    async def newest(self, *, limit_s: float, quiet_s: float = QUIET_S) -> Detail | None:
        """Return the checkpoint that appeared in the configured folder since we asked; None when there is none."""
        folder = self.common.checkpoint_dir
        if folder is None:
            return None
        left_s = self.left_s()
        look_s = max(0.0, min(limit_s, left_s - 1.0))
        argv = [*_NEWEST, folder, str(self.since_ns), f"{look_s:.3f}", f"{quiet_s:.3f}"]
        try:
            ended = await self.spawn(argv, limit_s=min(look_s + 5.0, left_s))
        except OSError as error:
            self.unseen = f" (no child can be started to read the folder: {error.strerror or error})"
            return None
        self.unseen = ""
        self.growing = ended.returncode == _GROWING
        if ended.timed_out or ended.returncode not in (0, 1, _GROWING):
            why = "does not answer" if ended.timed_out else clean_text(ended.stderr.decode("utf-8", "replace"), 200)
            self.unseen = f" (the folder cannot be read: {why})"
        try:
            found = json.loads(ended.stdout) if ended.returncode == 0 else None
        except ValueError:
            found = None
        if found is None:
            return None
        return self.dumb(
            step=found["step"], verified=found["verified"], path=found["path"], size_bytes=found["size_bytes"]
        )

    async def flushed(self, detail: Detail) -> Detail:
        """Flush the file system of an unsealed checkpoint: most frameworks leave it to the page cache.

        Returns how it went (`flushed`); a checkpoint that could not be flushed still counts.
        """
        told = dict(detail)
        path = str(told.get("path") or self.common.checkpoint_dir or "")
        if told["native"] or told["verified"] or not path.startswith("/"):
            return detail
        limit_s = self.action.by_s - 2 * LAST_WORDS_S - self.clock()
        if limit_s <= 0:
            return (*detail, ("flushed", False))
        self.progress("flushing")
        argv = [sys.executable, "-I", "-S", str(syncfs_child.__file__), path]
        try:
            ended = await self.spawn(argv, limit_s=limit_s)
        except OSError:
            return (*detail, ("flushed", False))
        return (*detail, ("flushed", ended.returncode == 0 and not ended.timed_out))

    def dumb(
        self,
        *,
        step: int | None = None,
        verified: bool = False,
        paused: bool = False,
        path: str = "",
        size_bytes: int | None = None,
        confirmed: bool = True,
    ) -> Detail:
        """Return the result of a peer that cannot say at which step training stands.

        confirmed: the trainer, or its folder, has shown that the checkpoint ended; else it has only started.
        """
        return (
            ("native", False),
            ("step", step),
            ("at_paused_step", False),
            ("verified", verified),
            ("confirmed", confirmed),
            ("paused", paused),
            ("bytes", size_bytes),
            ("path", path),
            ("took_s", round(self.took_s(), 3)),
        )

    # --- Time ------------------------------------------------------------------------------------------------------

    def left_s(self) -> float:
        """Seconds that are left; raises EffectorError if there are none."""
        left_s = self.action.by_s - LAST_WORDS_S - self.clock()
        if left_s <= 0:
            self.fail(self._late())
        return left_s

    def took_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.began_s

    def _late(self) -> str:
        return f"out of time: its checkpoint is still {self.stage}, {self.took_s():.1f} s after we asked"

    async def rest(self, seconds: float) -> None:
        """Wait before the next question, but not beyond the deadline."""
        left_s = self.left_s()
        if seconds > 0:
            # The next answer is the peer's only news: there is no event to await here.
            await asyncio.sleep(min(seconds, left_s))  # noqa: TID251

    def progress(self, stage: str) -> None:
        """Report its progress."""
        self.stage = stage
        self.publish(
            CheckpointProgress(at_s=self.clock(), trainer=self.action.trainer, action_id=self.action.id, stage=stage)
        )

    def fail(self, what: str) -> NoReturn:
        """Raise EffectorError with the address in front."""
        msg = f"{self.where}: {what}"
        raise EffectorError(msg)
