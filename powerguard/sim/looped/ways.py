"""The ways back in this world: who arms them for the daemon, and what there is of them below the ports.

The physics are `world.back`'s and `world.World`'s. The order to cut an output goes through the real effector, with its
notes on the disk: that it is given once, whoever is killed when, is what it promises.
"""

import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

from powerguard.core.actions import Action, ArmWay, CheckWay, Detail, EnsurePolicy, RestorePolicy, Way
from powerguard.daemon.attempt import rest
from powerguard.effectors.base import Effector, EffectorError
from powerguard.effectors.bmc.options import BmcOptions
from powerguard.effectors.ups.effector import OutputEffector
from powerguard.effectors.ups.sent import Notes
from powerguard.profiles.values import DeviceError
from powerguard.sim.looped.hardware import ALWAYS_ON
from powerguard.sim.looped.mischief import Manner, Moment
from powerguard.sim.looped.peer import LATE_S, Life, Peer, never, stray
from powerguard.sim.world.world import UPS

_ASK_S: Final = 0.1
_LEAST_S: Final = 30.0
_Value = TypeVar("_Value")


class SimBmc(Peer):
    """The BMC's policy: it powers on when AC returns, once it was told to; or it refuses for ever, or forgets."""

    def __init__(self, life: Life, options: BmcOptions) -> None:
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
        life.moment(Moment.WAY)
        if life.dead:
            await never()
        return detail

    def _ensured(self, action: Action) -> Detail:
        found, how = self.life.hardware.policy, self._options.policy
        if how == "observe" and found != ALWAYS_ON:
            msg = f"bmc: policy is {found} (simulated)"
            raise EffectorError(msg)
        outage = isinstance(action, EnsurePolicy) and action.outage
        if how == "bracket" and not outage:
            self.life.hardware.seen = found
        if how == "observe" or found == ALWAYS_ON or (how == "bracket" and not outage):
            # As the real effector: it may be set by a daemon that was killed after that.
            seen = self.life.hardware.seen if how == "bracket" and outage else ""
            restore: Detail = (("restore", seen),) if seen not in ("", ALWAYS_ON) else ()
            return (("policy", found), ("verified", True), ("changed", False), *restore)
        self._set(ALWAYS_ON)
        restore = (("restore", found),) if how == "bracket" else ()
        return (("policy", ALWAYS_ON), ("verified", True), ("changed", True), *restore)

    def _restored(self, action: RestorePolicy) -> Detail:
        if self._options.policy != "bracket":
            msg = "bmc: nothing is put back (simulated)"
            raise EffectorError(msg, harmless=True)
        if self.life.hardware.policy == ALWAYS_ON:
            self._set(action.policy)
        return (("policy", action.policy), ("verified", True))

    def _set(self, policy: str) -> None:
        life = self.life
        life.ways.changed("the BMC's policy")
        life.hardware.policy = policy
        life.world.always_on = policy == ALWAYS_ON and not life.world.scene.returns.lies

    def lie(self) -> Detail:
        """Say that the policy is set."""
        return (("policy", ALWAYS_ON), ("verified", True))


class SimWay(Peer):
    """Who arms a clock, a sentinel or a watchdog, once or twice. armed: False in dry-run: it arms nothing."""

    def __init__(self, life: Life, way: Way, *, armed: bool) -> None:
        super().__init__(life, way.value)
        self._way, self._armed = way, armed

    def word_of(self, action: Action) -> str:
        """Whoever is only asked does not fail in the place of who is told."""
        return "look" if isinstance(action, CheckWay) else self.word

    async def in_its_manner(self, action: Action, manner: Manner) -> Detail:
        """In dry-run nobody is told, so nobody can fail or lie."""
        told = self._armed or isinstance(action, CheckWay)
        return await super().in_its_manner(action, manner) if told else (("dry_run", True),)

    async def do(self, action: Action) -> Detail:
        """Look, arm or disarm."""
        life = self.life
        await rest(_ASK_S)  # Nobody is told in no time: who is cancelled at once has told nobody.
        if isinstance(action, CheckWay):
            return ()
        life.moment(Moment.WAY)
        if life.dead:
            await never()
        if isinstance(action, ArmWay):
            life.ways.changed(str(self._way))
            answer = life.world.arm(self._way, action.in_s)
        else:
            answer = life.world.disarm(self._way)
        life.moment(Moment.WAY)
        if life.dead:
            await never()
        return await self.answer(answer)


class SimOutput:
    """The UPS as it is told something: `effectors.ups.effector.Output`. manner: how this one order goes."""

    where = "the UPS (simulated)"
    can_cancel = False

    def __init__(self, life: Life, manner: Manner) -> None:
        self._life, self._manner = life, manner
        facts = life.world.scene.returns
        self.returns, self.shows = facts.told, facts.shows
        self._in_s = 0.0

    async def check(self, least_s: float) -> Detail:
        """Whoever can be told 30 s can be told any time."""
        await rest(_ASK_S)
        return (("least_s", max(least_s, _LEAST_S)),)

    async def standing_s(self) -> float | None:
        """A countdown of somebody else shows on every UPS."""
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
        life.ways.sent(self._in_s)
        if self._manner is not Manner.LIE:
            answer = world.arm(Way.OUTPUT, self._in_s)
            if answer.failure:
                life.ways.unsent()
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


class SimSender(Peer):
    """Who has the UPS cut its output: the real effector. What fails does so below it, at the UPS."""

    def __init__(self, life: Life, *, boot: str, clock: Callable[[], float], least_s: float, armed: bool) -> None:
        """least_s: as the real one's."""
        super().__init__(life, Way.OUTPUT.value)
        self._manner = Manner.WELL
        notes = Notes(life.hardware.folder, run=self._written)
        self._effector = OutputEffector(
            {UPS: self._opened}, notes=notes, clock=clock, boot=boot, least_s=least_s, armed=armed
        )

    async def in_its_manner(self, action: Action, manner: Manner) -> Detail:
        """Leave the manner to the UPS."""
        self._manner = Manner.WELL if isinstance(action, CheckWay) else manner
        if isinstance(action, ArmWay):
            self.life.ways.told_to_send(action)
        return await self.do(action)

    async def do(self, action: Action) -> Detail:
        """Carry it out in earnest."""
        return await self._effector.carry_out(action)

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[SimOutput]:
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
        yield SimOutput(self.life, manner)

    async def _written(self, call: Callable[..., _Value], *told: Any) -> _Value:  # noqa: ANN401 - as asyncio.to_thread
        """Call the disk, which may be the last thing that this process does, or the first that it does not."""
        self.life.moment(Moment.WAY)
        if self.life.dead:
            await never()
        result = call(*told)
        self.life.moment(Moment.WAY)
        if self.life.dead:
            await never()
        return result


def ways(life: Life, *, boot: str, clock: Callable[[], float], least_s: float, armed: bool) -> dict[Way, Effector]:
    """Return the effectors of the ways that there are, in place of `daemon.ways.ways_of`."""
    made: dict[Way, Effector] = {}
    for way in life.world.scene.returns.ways:
        if way is Way.OUTPUT:
            made[way] = SimSender(life, boot=boot, clock=clock, least_s=least_s, armed=armed)
        else:
            made[way] = SimWay(life, way, armed=armed)
    return made
