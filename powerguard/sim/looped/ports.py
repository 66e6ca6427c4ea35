"""The daemon's ports in the looped world: its sources, its effectors, and the disk of its journal.

`effectors` replaces the effectors of the settings by kind of action. For a kind that is missing there, the real
effector runs in the simulation: give a new kind of action a simulated one.

Everything that leaves the daemon passes here, so it is witnessed here, and the daemon can be killed here: a killed life
does nothing more, even if tasks of it are left.

The power-on methods follow at the end. Their physics are in `world.back` and `world.World`. The order to cut an output
goes through the real effector with its notes on disk, because it promises that it gives the order once, at whichever
moment the daemon is killed.
"""

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import Random
from typing import Any, Final, Protocol, TypeVar

from powerguard.core.model.actions import (
    Action,
    ArmPowerOn,
    CapPower,
    CheckHost,
    CheckPowerOn,
    Conduct,
    ContinueTrainer,
    Detail,
    EnsurePolicy,
    LeaveJob,
    PauseTrainer,
    PowerOff,
    PowerOnMethod,
    Reboot,
    RestorePolicy,
    RestorePower,
    ResumeTrainer,
    ResumeTraining,
    StopTrainer,
    SyncFilesystems,
    TerminateTrainer,
    TriggerCheckpoint,
)
from powerguard.core.model.events import CheckpointProgress, Event, OutputSource, SourceFailed
from powerguard.daemon.attempt import rest
from powerguard.daemon.journal import JournalError
from powerguard.daemon.journal.store import Batch, Store
from powerguard.effectors.base import Effector, EffectorError
from powerguard.effectors.options import BmcOptions
from powerguard.effectors.ups_output.effector import Notes, OutputEffector
from powerguard.sim.looped.mischief import Manner, Mischief, Moment
from powerguard.sim.looped.witness import ALWAYS_ON, Hardware, PowerOnWitness
from powerguard.sim.world.host import HostAnswer, Power
from powerguard.sim.world.world import SOURCE, UPS, World
from powerguard.ups.base import Publish
from powerguard.ups.profiles.vocabulary import DeviceError

LATE_S = 3.0
_STRAY_S = 30.0


class DaemonLife(Protocol):
    """One process of the daemon, as its ports need it."""

    world: World
    mischief: Mischief
    offset_s: float
    calls: dict[str, int]
    hardware: Hardware
    checkpoints: dict[str, tuple[float, HostAnswer]]

    @property
    def dead(self) -> bool:
        """It does nothing any more."""
        ...

    def moment(self, moment: Moment) -> None:
        """Say that a moment has come in which it can be killed."""
        ...

    @property
    def methods(self) -> PowerOnWitness:
        """The observer of the power-on methods."""
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


async def never() -> None:
    """Wait for nothing, for ever."""
    await asyncio.Event().wait()


async def stray() -> None:
    """Hang, and ignore the cancellation, as a library may that catches everything."""
    with contextlib.suppress(asyncio.CancelledError):
        await never()
    await rest(_STRAY_S)


class SimPeer(ABC):
    """A peer that carries out orders in some manner."""

    def __init__(self, life: DaemonLife, word: str) -> None:
        """word: by which `Mischief` knows them."""
        self.life, self.word = life, word

    async def lives(self, moment: Moment = Moment.WAY) -> None:
        """Let the daemon be killed at this moment; a dead one does nothing any more."""
        self.life.moment(moment)
        if self.life.dead:
            await never()

    async def carry_out(self, action: Action) -> Detail:
        """Carry out an order as this peer does."""
        life = self.life
        await self.lives(Moment.ACTION_BEGINS)
        life.heard(action)
        word = self.word_of(action)
        call = life.calls.get(word, 0)
        life.calls[word] = call + 1
        try:
            return await self.in_its_manner(action, life.mischief.manner_of(word, call))
        finally:
            life.answered(action)

    def word_of(self, action: Action) -> str:
        """Return the word under which the manner of this order stands."""
        del action
        return self.word

    async def in_its_manner(self, action: Action, manner: Manner) -> Detail:
        """Do it, or not, as this peer does it this time."""
        life = self.life
        match manner:
            case Manner.REFUSE:
                msg = f"{self.word}: refused (simulated)"
                raise EffectorError(msg)
            case Manner.HANG:
                await never()
            case Manner.STRAY:
                await stray()
            case Manner.BREAK:
                msg = "a bug (simulated)"
                raise LookupError(msg)
            case Manner.LATE:
                await rest(LATE_S)
            case Manner.LIE:
                return self.lie()
            case Manner.LOST:
                await self.do(action)
                await never()
            case Manner.WELL:
                pass
        if life.dead:
            await never()
        return await self.do(action)

    def lie(self) -> Detail:
        """Say that it was done."""
        return ()

    @abstractmethod
    async def do(self, action: Action) -> Detail:
        """Do it."""

    async def answer(self, answer: HostAnswer) -> Detail:
        """Wait as long as the world takes, and pass on what it says."""
        if math.isinf(answer.after_s):
            await never()
        await rest(answer.after_s)
        if answer.failure:
            raise EffectorError(answer.failure)
        return answer.detail


POLL_S = 1.0
TIMEOUT_S = 1.0
MISSES = 3
_WRITE_S = 0.002
_WORD_S = 0.05


class SimSource:
    """The poller of the simulated UPS: once a second, or at once when asked; three misses are a loss."""

    def __init__(self, life: DaemonLife, chance: Random) -> None:
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
                answer = life.world.reading(life.offset_s)
                await rest(self._chance.choice((0.002, 0.02, 0.2)))
                if self._lies and life.world.now_s >= self._lies[0]:
                    # One answer that says battery and nothing else: a glitch of the card, or a forged answer.
                    self._lies.pop(0)
                    answer = replace(answer, output_source=OutputSource.BATTERY, on_battery_s=None, input_present=None)
                publish(replace(answer, at_s=loop.time()))
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


class SimOnlooker(SimPeer):
    """A peer that changes nothing in the world: it takes its time, and says what it found."""

    def __init__(self, life: DaemonLife, word: str, after_s: float, detail: Detail) -> None:
        """after_s: 0: at once."""
        super().__init__(life, word)
        self._after_s, self._detail = after_s, detail

    async def do(self, action: Action) -> Detail:
        """Say it."""
        del action
        if self._after_s:
            await rest(self._after_s)
        return self._detail


class SimTrainer(SimPeer):
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


class SimHost(SimPeer):
    """The host's own stop."""

    def word_of(self, action: Action) -> str:
        """Of a reboot it is asked in another word."""
        return "reboot" if isinstance(action, Reboot) else self.word

    async def do(self, action: Action) -> Detail:
        """Begin to go down; what still runs after force_after_s is cut off. Or come up again where it goes down."""
        world = self.life.world
        match action:
            case PowerOff():
                self.life.methods.powers_off(action.force_after_s)
                return await self.answer(world.power_off(action.force_after_s))
            case Reboot():
                await rest(_WORD_S)
                self.life.methods.reboots()
                world.host.reboots = world.host.power is Power.STOPPING
            case _:
                pass
        return ()


class SimStart(SimPeer):
    """What starts training."""

    async def do(self, action: Action) -> Detail:
        """Start it, where it does not run."""
        del action
        return await self.answer(self.life.world.host.start_training(self.life.world.now_s))


class SimGpus(SimPeer):
    """The helper that sets GPU power limits."""

    async def do(self, action: Action) -> Detail:
        """Cap, or put back."""
        return await self.answer(self.life.world.host.cap(self.life.world.now_s, on=isinstance(action, CapPower)))


class SimSignals(SimPeer):
    """The helper that signals a trainer's processes."""

    async def do(self, action: Action) -> Detail:
        """Stop, end, or let go on."""
        word = {StopTrainer: "stop", TerminateTrainer: "terminate"}.get(type(action), "continue")
        return await self.answer(self.life.world.host.signal(self.life.world.now_s, word))


def effectors(life: DaemonLife, *, acts: bool) -> dict[type[Action], Effector]:
    """Return who carries out what. acts: False in dry-run, where only those act that only look."""
    host, gpus, signals = SimHost(life, "host"), SimGpus(life, "gpu"), SimSignals(life, "signals")
    made: dict[type[Action], Effector] = {
        TriggerCheckpoint: SimTrainer(life, "checkpoint"),
        PauseTrainer: SimTrainer(life, "pause"),
        ResumeTrainer: SimTrainer(life, "resume"),
        LeaveJob: SimTrainer(life, "leave"),
        ResumeTraining: SimStart(life, "start"),
        SyncFilesystems: SimOnlooker(life, "disks", 0.1, (("filesystems", 1),)),
        PowerOff: host,
        Reboot: host,
        CapPower: gpus,
        RestorePower: gpus,
        StopTrainer: signals,
        TerminateTrainer: signals,
        ContinueTrainer: signals,
    }
    if not acts:
        made = dict.fromkeys(made, SimOnlooker(life, "recorder", 0.0, (("dry_run", True),)))
    return {**made, CheckHost: SimOnlooker(life, "check", 0.2, (("gpus", 8),))}


class SimDisk:
    """The journal's disk, as an executor of its calls: a little slow, at times hung, and killed with the process."""

    def __init__(self, life: DaemonLife) -> None:
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
        # Not at once: a caller that does not wait for it must be seen to run ahead of it.
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

    life: DaemonLife | None = None

    def write(self, batch: Batch) -> None:
        """Write, if there is room."""
        life = self.life
        if life is not None and any(begin <= life.world.now_s < end for begin, end in life.mischief.full):
            msg = f"{self.path}: database or disk is full (simulated)"
            raise JournalError(msg)
        super().write(batch)


_ASK_S: Final = 0.1
_LEAST_S: Final = 30.0
_Value = TypeVar("_Value")


class SimPolicy(SimPeer):
    """The BMC's policy: it powers on when AC returns, once it was ordered to; or it refuses for ever, or forgets."""

    def __init__(self, life: DaemonLife, options: BmcOptions) -> None:
        super().__init__(life, "bmc")
        self._options = options

    async def do(self, action: Action) -> Detail:
        """Set the policy, and read it back."""
        life = self.life
        life.moment(Moment.WAY)
        await rest(0.05)
        if life.world.scene.bmc_refuses:
            msg = "bmc: invalid command (simulated)"
            raise EffectorError(msg)
        if life.dead:
            await never()
        detail = self._restored(action) if isinstance(action, RestorePolicy) else self._ensured(action)
        await self.lives()
        return detail

    def _ensured(self, action: Action) -> Detail:
        found, mode = self.life.hardware.policy, self._options.policy
        if mode == "observe" and found != ALWAYS_ON:
            msg = f"bmc: policy is {found} (simulated)"
            raise EffectorError(msg)
        outage = isinstance(action, EnsurePolicy) and action.outage
        if mode == "bracket" and not outage:
            self.life.hardware.seen = found
        if mode == "observe" or found == ALWAYS_ON or (mode == "bracket" and not outage):
            # As the real effector: it may be set by a daemon that was killed after that.
            seen = self.life.hardware.seen if mode == "bracket" and outage else ""
            restore: Detail = (("restore", seen),) if seen not in ("", ALWAYS_ON) else ()
            return (("policy", found), ("verified", True), ("changed", False), *restore)
        self._set(ALWAYS_ON)
        restore = (("restore", found),) if mode == "bracket" else ()
        return (("policy", ALWAYS_ON), ("verified", True), ("changed", True), *restore)

    def _restored(self, action: RestorePolicy) -> Detail:
        if self._options.policy != "bracket":
            msg = "bmc: the policy is not put back (simulated)"
            raise EffectorError(msg, harmless=True)
        if self.life.hardware.policy == ALWAYS_ON:
            self._set(action.policy)
        return (("policy", action.policy), ("verified", True))

    def _set(self, policy: str) -> None:
        life = self.life
        life.methods.changed("the BMC's policy")
        life.hardware.policy = policy
        life.world.always_on = policy == ALWAYS_ON and not life.world.scene.returns.lies

    def lie(self) -> Detail:
        """Say that the policy is set."""
        return (("policy", ALWAYS_ON), ("verified", True))


class SimPowerOn(SimPeer):
    """Who arms a clock, a sentinel or a watchdog, once or twice. armed: False in dry-run: it arms nothing."""

    def __init__(self, life: DaemonLife, method: PowerOnMethod, *, armed: bool) -> None:
        super().__init__(life, method.value)
        self._method, self._armed = method, armed

    def word_of(self, action: Action) -> str:
        """A peer that is only asked does not fail in place of one that gets an order."""
        return "look" if isinstance(action, CheckPowerOn) else self.word

    async def in_its_manner(self, action: Action, manner: Manner) -> Detail:
        """In dry-run no order is sent, so no peer can fail or lie."""
        is_sent = self._armed or isinstance(action, CheckPowerOn)
        return await super().in_its_manner(action, manner) if is_sent else (("dry_run", True),)

    async def do(self, action: Action) -> Detail:
        """Look, arm or disarm."""
        life = self.life
        await rest(_ASK_S)  # An order takes time: one that is cancelled at once was not sent.
        if isinstance(action, CheckPowerOn):
            return ()
        await self.lives()
        if isinstance(action, ArmPowerOn):
            life.methods.changed(str(self._method))
            answer = life.world.arm(self._method, action.in_s)
        else:
            answer = life.world.disarm(self._method)
        await self.lives()
        return await self.answer(answer)


class LoopedOutput:
    """The UPS as it gets an order: `effectors.ups.effector.Output`. manner: how this one order goes."""

    where = "the UPS (simulated)"
    can_cancel = False

    def __init__(self, life: DaemonLife, manner: Manner) -> None:
        self._life, self._manner = life, manner
        facts = life.world.scene.returns
        self.returns, self.shows = facts.declared, facts.shows
        self._in_s = 0.0

    async def check(self, least_s: float) -> Detail:
        """A UPS that takes 30 s takes any time."""
        await rest(_ASK_S)
        return (("least_s", max(least_s, _LEAST_S)),)

    async def standing_s(self) -> float | None:
        """A countdown of another program shows on every UPS."""
        await self._asked()
        world, hardware = self._life.world, self._life.hardware
        if not world.is_counting:
            return None
        if hardware.is_ours(world):
            return hardware.cut_at_s - world.now_s if self.shows else None
        order = world.scene.order
        return None if order is None else max(0.0, order.at_s + order.delay_s - world.now_s)

    async def prepare(self, in_s: float) -> float:
        """It counts whole seconds."""
        await self._asked()
        self._in_s = float(math.ceil(in_s))
        return self._in_s

    async def send(self) -> None:
        """Obey, refuse, do nothing, or obey and say nothing."""
        life, world = self._life, self._life.world
        life.moment(Moment.WAY)
        await self._asked()
        if self._manner is Manner.REFUSE:
            msg = "notWritable (simulated)"
            raise DeviceError(msg)
        life.methods.sent(self._in_s)
        if self._manner is not Manner.LIE:
            answer = world.arm(PowerOnMethod.OUTPUT, self._in_s)
            if answer.failure:
                life.methods.unsent()
                raise DeviceError(answer.failure)
            life.hardware.cut_at_s = world.now_s + self._in_s
        life.moment(Moment.WAY)
        await self._asked()
        if self._manner is Manner.LOST:
            msg = "no answer (simulated)"
            raise DeviceError(msg, unanswered=True)

    async def undone(self) -> str:
        """Nothing comes undone by itself."""
        return ""

    async def take_back(self) -> None:
        """Nothing was set that would have to be."""

    async def cancel(self) -> None:
        """It cannot be called off."""

    async def _asked(self) -> None:
        await rest(_ASK_S)
        if self._life.dead:
            await never()


class SimSender(SimPeer):
    """Who has the UPS cut its output: the real effector. What fails does so below it, at the UPS."""

    def __init__(self, life: DaemonLife, *, boot: str, clock: Callable[[], float], least_s: float, armed: bool) -> None:
        """least_s: as the real one's."""
        super().__init__(life, PowerOnMethod.OUTPUT.value)
        self._manner = Manner.WELL
        notes = Notes(life.hardware.folder, run=self._written)
        self._effector = OutputEffector(
            {UPS: self._opened}, notes=notes, clock=clock, boot=boot, least_s=least_s, armed=armed
        )

    async def in_its_manner(self, action: Action, manner: Manner) -> Detail:
        """Leave the manner to the UPS."""
        self._manner = Manner.WELL if isinstance(action, CheckPowerOn) else manner
        if isinstance(action, ArmPowerOn):
            self.life.methods.cut_ordered(action)
        return await self.do(action)

    async def do(self, action: Action) -> Detail:
        """Carry it out in earnest."""
        return await self._effector.carry_out(action)

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[LoopedOutput]:
        manner = self._manner
        match manner:
            case Manner.HANG:
                await never()
            case Manner.STRAY:
                await stray()
            case Manner.BREAK:
                msg = "a bug (simulated)"
                raise LookupError(msg)
            case Manner.LATE:
                await rest(LATE_S)
            case _:
                pass
        yield LoopedOutput(self.life, manner)

    async def _written(self, call: Callable[..., _Value], *args: Any) -> _Value:  # noqa: ANN401 - as asyncio.to_thread
        """Call the disk, which may be the last thing that this process does, or the first that it does not."""
        await self.lives()
        result = call(*args)
        await self.lives()
        return result


def ways(
    life: DaemonLife, *, boot: str, clock: Callable[[], float], least_s: float, armed: bool
) -> dict[PowerOnMethod, Effector]:
    """Return the effectors of the power-on methods in the settings, in place of `daemon.wiring.methods_of`."""
    made: dict[PowerOnMethod, Effector] = {}
    for method in life.world.scene.returns.methods:
        if method is PowerOnMethod.OUTPUT:
            made[method] = SimSender(life, boot=boot, clock=clock, least_s=least_s, armed=armed)
        else:
            made[method] = SimPowerOn(life, method, armed=armed)
    return made
