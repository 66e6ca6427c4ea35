"""Whoever carries out orders of the daemon in this world, in some manner.

Everything that leaves the daemon passes here, so here it is witnessed, and here it can be killed: a dead life does
nothing any more, whatever of its tasks still lies around.
"""

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from typing import Protocol

from powerguard.core.actions import Action, Detail
from powerguard.core.events import Event
from powerguard.daemon.attempt import rest
from powerguard.effectors.base import EffectorError
from powerguard.sim.looped.hardware import Hardware
from powerguard.sim.looped.mischief import Manner, Mischief, Moment
from powerguard.sim.looped.way_witness import WayWitness
from powerguard.sim.world.host import Answer
from powerguard.sim.world.world import World

LATE_S = 3.0
_STRAY_S = 30.0


class Life(Protocol):
    """One process of the daemon, as its hands need it."""

    world: World
    mischief: Mischief
    offset_s: float
    calls: dict[str, int]
    hardware: Hardware
    checkpoints: dict[str, tuple[float, Answer]]

    @property
    def dead(self) -> bool:
        """It does nothing any more."""
        ...

    def moment(self, moment: Moment) -> None:
        """Say that a moment has come in which it can be killed."""
        ...

    @property
    def ways(self) -> WayWitness:
        """Who watches the ways back."""
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
    """Hang, and do not listen when told to stop, as a library may that catches everything."""
    with contextlib.suppress(asyncio.CancelledError):
        await never()
    await rest(_STRAY_S)


class Peer(ABC):
    """Somebody who carries out orders in some manner."""

    def __init__(self, life: Life, word: str) -> None:
        """word: by which `Mischief` knows them."""
        self.life, self.word = life, word

    async def carry_out(self, action: Action) -> Detail:
        """Carry out an order as this peer does; a dead daemon orders nothing."""
        life = self.life
        life.moment(Moment.ACTION_BEGINS)
        if life.dead:
            await never()
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

    async def answer(self, answer: Answer) -> Detail:
        """Wait as long as the world takes, and pass on what it says."""
        if math.isinf(answer.after_s):
            await never()
        await rest(answer.after_s)
        if answer.failure:
            raise EffectorError(answer.failure)
        return answer.detail
