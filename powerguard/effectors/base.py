"""The interface between the daemon and an effector, and the effector that passes orders on by power-on method."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from powerguard.core.model.actions import Action, ArmWay, CheckWay, Detail, DisarmWay, Way


class Effector(Protocol):
    """Carries out the kinds of action that it is registered for; twice is as good as once.

    It may raise anything: `daemon.attempt` turns every failure into an `Outcome`. An expected failure is an
    `EffectorError` whose text says what, where and what would be right; its traceback is not logged.
    """

    async def carry_out(self, action: Action) -> Detail:
        """Carry out one action. The caller cancels it at the action's deadline."""
        ...


class EffectorError(Exception):
    """An expected failure of the world outside, in one line that an operator understands.

    harmless: it is certain that nothing was done, so nothing has to be taken back. detail: as in `events.Failed`.
    """

    def __init__(self, text: str, *, harmless: bool = False, detail: Detail = ()) -> None:
        super().__init__(text)
        self.harmless = harmless
        self.detail = detail


Turns = dict[tuple[Way, str], asyncio.Lock]
"""Whose turn it is, by way and UPS."""


class WaysEffector:
    """Carries out `CheckWay`, `ArmWay` and `DisarmWay` by the effector of their way. ways: those of the settings.

    Orders of one way and one UPS run one at a time, in the order in which they were given: a slow one that disarms must
    not undo a later one that arms. turns: shared with the effector that this one replaces, because after a reload its
    orders may still run.
    """

    def __init__(self, ways: Mapping[Way, Effector], turns: Turns | None = None) -> None:
        self._ways = ways
        self._turns: Turns = {} if turns is None else turns

    async def carry_out(self, action: Action) -> Detail:
        """Pass the order on. Raises EffectorError where the settings name nobody for this way, else what they raise."""
        if not isinstance(action, CheckWay | ArmWay | DisarmWay):
            msg = f"the ways effector carries out CheckWay, ArmWay and DisarmWay, not {type(action).__name__}"
            raise TypeError(msg)
        effector = self._ways.get(action.way)
        if effector is None:
            msg = (
                f"the settings name no way back {action.way} any more, so nobody can take it back (better: put it back "
                "into the settings until it is)"
                if isinstance(action, DisarmWay)
                else f"the settings name no way back {action.way}"
            )
            raise EffectorError(msg)
        async with self._turns.setdefault((action.way, action.ups), asyncio.Lock()):
            return await effector.carry_out(action)

    def of(self, way: Way) -> Effector | None:
        """Return who carries out this way; None where the settings name nobody."""
        return self._ways.get(way)
