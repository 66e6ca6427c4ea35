"""The daemon's hands in this world: what it reads, whom it orders, and the disk of its journal.

Its ways back are in `looped.ways`.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

from powerguard.core.actions import (
    Action,
    CapPower,
    CheckHost,
    Conduct,
    ContinueTrainer,
    Detail,
    PauseTrainer,
    PowerOff,
    Reboot,
    RestorePower,
    ResumeTrainer,
    ResumeTraining,
    StopTrainer,
    SyncFilesystems,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.events import CheckpointProgress
from powerguard.core.readings import OutputSource, SourceFailed
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import JournalError
from powerguard.daemon.journal.store import Batch, Store
from powerguard.effectors.base import Effector
from powerguard.sim.looped.mischief import Moment
from powerguard.sim.looped.peer import Life, Peer
from powerguard.sim.world.host import Power
from powerguard.sim.world.world import SOURCE, UPS
from powerguard.sources.base import Publish

POLL_S = 1.0
TIMEOUT_S = 1.0
MISSES = 3
_WRITE_S = 0.002
_WORD_S = 0.05


class SimSource:
    """The poller of the simulated UPS: once a second, or at once when asked; three misses are a loss."""

    def __init__(self, life: Life, chance: Random) -> None:
        """chance: of the time that an answer takes."""
        self._life, self._chance = life, chance
        self._asked = asyncio.Event()
        self._missed = 0
        self._lies = list(life.mischief.lies)

    def poll_now(self) -> None:
        """Read at once."""
        self._asked.set()

    async def run(self, publish: Publish) -> None:
        """Read for ever."""
        life, loop = self._life, asyncio.get_running_loop()
        while not life.dead:
            self._asked.clear()
            if life.world.answers():
                told = life.world.reading(life.offset_s)
                await rest(self._chance.choice((0.002, 0.02, 0.2)))
                if self._lies and life.world.now_s >= self._lies[0]:
                    # One answer that says battery and nothing else: a glitch of the card, or somebody who forges.
                    self._lies.pop(0)
                    told = replace(told, output_source=OutputSource.BATTERY, on_battery_s=None, input_present=None)
                publish(replace(told, at_s=loop.time()))
                self._missed = 0
            else:
                await rest(TIMEOUT_S)
                self._missed += 1
                publish(
                    SourceFailed(
                        at_s=loop.time(), ups=UPS, source=SOURCE, reason="no answer", lost=self._missed >= MISSES
                    )
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._asked.wait()


class SimDisks(Peer):
    """The filesystems with checkpoints."""

    async def do(self, action: Action) -> Detail:
        """Sync."""
        del action
        await rest(0.1)
        return (("filesystems", 1),)


class SimTrainer(Peer):
    """The trainer, who remembers a checkpoint by its id, so that one who asks again joins it."""

    async def do(self, action: Action) -> Detail:
        """Checkpoint, pause or go on."""
        life, host = self.life, self.life.world.host
        now_s = life.world.now_s
        match action:
            case ResumeTrainer():
                return await self.answer(host.resume(now_s))
            case PauseTrainer():
                return await self.answer(host.pause(now_s))
            case TriggerCheckpoint():
                known = life.checkpoints.get(action.id)
                if known is None:
                    answer = host.checkpoint(now_s, action.after)
                    known = life.checkpoints[action.id] = (now_s + answer.after_s, answer)
                ends_s, answer = known
                self._progress(action, ends_s - now_s)
                return await self.answer(replace(answer, after_s=max(0.01, ends_s - now_s)))
            case _:
                return ()

    def _progress(self, action: TriggerCheckpoint, rest_s: float) -> None:
        life = self.life
        if life.world.host.is_deaf:
            return
        eta_s = life.world.scene.trainer.estimate_s if math.isinf(rest_s) else rest_s
        life.submit(
            CheckpointProgress(
                at_s=asyncio.get_running_loop().time(),
                trainer=action.trainer,
                action_id=action.id,
                stage="writing",
                eta_s=eta_s,
                paused=life.world.host.paused and action.after is not Conduct.CONTINUE,
                step=life.world.host.step,
            )
        )


class SimHost(Peer):
    """The host's own stop."""

    def word_of(self, action: Action) -> str:
        """Of a reboot it is asked in another word."""
        return "reboot" if isinstance(action, Reboot) else self.word

    async def do(self, action: Action) -> Detail:
        """Begin to go down; what still runs after force_after_s is cut off. Or come up again where it goes down."""
        world = self.life.world
        match action:
            case PowerOff():
                self.life.ways.powers_off(action.force_after_s)
                return await self.answer(world.power_off(action.force_after_s))
            case Reboot():
                await rest(_WORD_S)
                self.life.ways.reboots()
                world.host.reboots = world.host.power is Power.STOPPING
            case _:
                pass
        return ()


class SimCheck(Peer):
    """Who looks at a host that is back: its GPUs, its storage, its newest checkpoint."""

    async def do(self, action: Action) -> Detail:
        """Find everything there."""
        del action
        await rest(0.2)
        return (("gpus", 8),)


class SimRecorder(Peer):
    """In dry-run nobody does anything."""

    async def do(self, action: Action) -> Detail:
        """Record it."""
        del action
        return (("dry_run", True),)


class SimStart(Peer):
    """What starts training."""

    async def do(self, action: Action) -> Detail:
        """Start it, where it does not run."""
        del action
        return await self.answer(self.life.world.host.start_training(self.life.world.now_s))


class SimGpus(Peer):
    """The helper that sets GPU power limits."""

    async def do(self, action: Action) -> Detail:
        """Cap, or put back."""
        return await self.answer(self.life.world.host.cap(self.life.world.now_s, on=isinstance(action, CapPower)))


class SimSignals(Peer):
    """The helper that signals a trainer's processes."""

    async def do(self, action: Action) -> Detail:
        """Stop, end, or let go on."""
        word = {StopTrainer: "stop", TerminateTrainer: "terminate"}.get(type(action), "continue")
        return await self.answer(self.life.world.host.signal(self.life.world.now_s, word))


def effectors(life: Life, *, acts: bool) -> dict[type[Action], Effector]:
    """Return who carries out what. acts: False in dry-run, where nobody does but who only looks."""
    host, gpus, signals = SimHost(life, "host"), SimGpus(life, "gpu"), SimSignals(life, "signals")
    made: dict[type[Action], Effector] = {
        TriggerCheckpoint: SimTrainer(life, "checkpoint"),
        PauseTrainer: SimTrainer(life, "pause"),
        ResumeTrainer: SimTrainer(life, "resume"),
        ResumeTraining: SimStart(life, "start"),
        SyncFilesystems: SimDisks(life, "disks"),
        PowerOff: host,
        Reboot: host,
        CapPower: gpus,
        RestorePower: gpus,
        StopTrainer: signals,
        TerminateTrainer: signals,
        ContinueTrainer: signals,
    }
    if not acts:
        made = dict.fromkeys(made, SimRecorder(life, "recorder"))
    return {**made, CheckHost: SimCheck(life, "check")}


class SimDisk:
    """The journal's disk, as an executor of its calls: a little slow, at times hung, and killed beside the process."""

    def __init__(self, life: Life) -> None:
        """Everything has been written so far."""
        self._life = life
        self._waiting: list[Callable[[], None]] = []

    def submit(self, call: Callable[[], None]) -> None:
        """Do it soon, after what was there before."""
        self._waiting.append(call)
        if len(self._waiting) == 1:
            self._next()

    def _next(self) -> None:
        now_s = self._life.world.now_s
        until_s = max((end for begin, end in self._life.mischief.hung if begin <= now_s < end), default=now_s)
        # Not at once: whoever does not wait for it must be seen to run ahead of it.
        asyncio.get_running_loop().call_later(max(_WRITE_S, until_s - now_s), self._work)

    def _work(self) -> None:
        life = self._life
        life.moment(Moment.WRITE_BEGINS)
        if life.dead:
            return
        self._waiting[0]()
        life.moment(Moment.WRITE_ENDED)
        self._waiting.pop(0)
        if self._waiting and not life.dead:
            self._next()

    def close(self, limit_s: float) -> None:
        """Nothing to wait for: what hangs, hangs."""
        del limit_s


class SimStore(Store):
    """The journal's file on a disk that may be full for a while."""

    life: Life | None = None

    def write(self, batch: Batch) -> None:
        """Write, if there is room."""
        life = self.life
        if life is not None and any(begin <= life.world.now_s < end for begin, end in life.mischief.full):
            msg = f"{self.path}: database or disk is full (simulated)"
            raise JournalError(msg)
        super().write(batch)
