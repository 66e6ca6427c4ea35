"""The daemon's hands in this world: what it reads, whom it orders, and the disk of its journal.

Everything that leaves the daemon passes here, so here it is witnessed, and here it can be killed: a dead life does
nothing any more, whatever of its tasks still lies around.
"""

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Protocol

from powerguard.core.events import (
    Action,
    CapPower,
    CheckpointProgress,
    Conduct,
    ContinueTrainer,
    Detail,
    EnsurePolicy,
    Event,
    OutputSource,
    PauseTrainer,
    PowerOff,
    RestorePower,
    ResumeTrainer,
    ResumeTraining,
    SourceFailed,
    StopTrainer,
    SyncFilesystems,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import JournalError
from powerguard.daemon.journal.store import Batch, Store
from powerguard.effectors.base import Effector, EffectorError
from powerguard.sim.looped.mischief import Manner, Mischief, Moment
from powerguard.sim.world.host import Answer
from powerguard.sim.world.world import SOURCE, UPS, World
from powerguard.sources.base import Publish

POLL_S = 1.0
TIMEOUT_S = 1.0
MISSES = 3
_LATE_S = 3.0
_STRAY_S = 30.0
_WRITE_S = 0.002


class Life(Protocol):
    """One process of the daemon, as its hands need it."""

    world: World
    mischief: Mischief
    offset_s: float
    calls: dict[str, int]
    checkpoints: dict[str, tuple[float, Answer]]

    @property
    def dead(self) -> bool:
        """It does nothing any more."""
        ...

    def moment(self, moment: Moment) -> None:
        """Say that a moment has come in which it can be killed."""
        ...

    def heard(self, action: Action) -> None:
        """Witness that an effector was given this order."""
        ...

    def answered(self, action: Action) -> None:
        """Witness that an effector has ended, in whatever way."""
        ...

    def submit(self, event: Event) -> None:
        """Hand the daemon an event."""
        ...


async def _never() -> None:
    await asyncio.Event().wait()


async def _stray() -> None:
    """Hang, and do not listen when told to stop, as a library may that catches everything."""
    with contextlib.suppress(asyncio.CancelledError):
        await _never()
    await rest(_STRAY_S)


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


class _Peer(ABC):
    """Somebody who carries out orders in some manner."""

    def __init__(self, life: Life, word: str) -> None:
        """word: by which `Mischief` knows them."""
        self.life, self.word = life, word

    async def carry_out(self, action: Action) -> Detail:
        """Carry out an order as this peer does; a dead daemon orders nothing."""
        life = self.life
        life.moment(Moment.ACTION_BEGINS)
        if life.dead:
            await _never()
        life.heard(action)
        try:
            return await self._in_its_manner(action)
        finally:
            life.answered(action)

    async def _in_its_manner(self, action: Action) -> Detail:
        life = self.life
        call = life.calls.get(self.word, 0)
        life.calls[self.word] = call + 1
        match life.mischief.manner_of(self.word, call):
            case Manner.REFUSE:
                msg = f"{self.word}: refused (simulated)"
                raise EffectorError(msg)
            case Manner.HANG:
                await _never()
            case Manner.STRAY:
                await _stray()
            case Manner.BREAK:
                msg = "a bug (simulated)"
                raise LookupError(msg)
            case Manner.LATE:
                await rest(_LATE_S)
            case Manner.LIE:
                return self.lie()
            case Manner.WELL:
                pass
        if life.dead:
            await _never()
        return await self.do(action)

    def lie(self) -> Detail:
        """Say that it was done."""
        return ()

    @abstractmethod
    async def do(self, action: Action) -> Detail:
        """Do it."""

    async def answer(self, answer: Answer) -> Detail:
        """Wait as long as the world takes, and pass on what it says."""
        if math.isinf(answer.after_s):
            await _never()
        await rest(answer.after_s)
        if answer.failure:
            raise EffectorError(answer.failure)
        return answer.detail


class SimBmc(_Peer):
    """The BMC: it powers on when AC returns, once it was told to, or it refuses for ever."""

    async def do(self, action: Action) -> Detail:
        """Set the policy, and read it back."""
        del action
        world = self.life.world
        await rest(0.05)
        if world.scene.bmc_refuses:
            msg = "bmc: invalid command (simulated)"
            raise EffectorError(msg)
        world.always_on = True
        return (("policy", "always-on"), ("verified", True))

    def lie(self) -> Detail:
        """Say that the policy is set."""
        return (("policy", "always-on"), ("verified", True))


class SimDisks(_Peer):
    """The filesystems with checkpoints."""

    async def do(self, action: Action) -> Detail:
        """Sync."""
        del action
        await rest(0.1)
        return (("filesystems", 1),)


class SimTrainer(_Peer):
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


class SimHost(_Peer):
    """The host's own stop."""

    async def do(self, action: Action) -> Detail:
        """Begin to go down; what still runs after force_after_s is cut off."""
        if not isinstance(action, PowerOff):
            return ()
        return await self.answer(self.life.world.power_off(action.force_after_s))


class SimStart(_Peer):
    """What starts training."""

    async def do(self, action: Action) -> Detail:
        """Start it, where it does not run."""
        del action
        return await self.answer(self.life.world.host.start_training(self.life.world.now_s))


class SimGpus(_Peer):
    """The helper that sets GPU power limits."""

    async def do(self, action: Action) -> Detail:
        """Cap, or put back."""
        return await self.answer(self.life.world.host.cap(self.life.world.now_s, on=isinstance(action, CapPower)))


class SimSignals(_Peer):
    """The helper that signals a trainer's processes."""

    async def do(self, action: Action) -> Detail:
        """Stop, end, or let go on."""
        word = {StopTrainer: "stop", TerminateTrainer: "terminate"}.get(type(action), "continue")
        return await self.answer(self.life.world.host.signal(self.life.world.now_s, word))


def effectors(life: Life) -> dict[type[Action], Effector]:
    """Return who carries out what."""
    gpus = SimGpus(life, "gpu")
    signals = SimSignals(life, "signals")
    return {
        TriggerCheckpoint: SimTrainer(life, "checkpoint"),
        PauseTrainer: SimTrainer(life, "pause"),
        ResumeTrainer: SimTrainer(life, "resume"),
        ResumeTraining: SimStart(life, "start"),
        EnsurePolicy: SimBmc(life, "bmc"),
        SyncFilesystems: SimDisks(life, "disks"),
        PowerOff: SimHost(life, "host"),
        CapPower: gpus,
        RestorePower: gpus,
        StopTrainer: signals,
        TerminateTrainer: signals,
        ContinueTrainer: signals,
    }


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
