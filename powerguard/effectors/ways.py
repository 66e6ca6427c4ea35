"""Hands each order about a way back to who carries it out: one effector for each way that the settings name."""

import asyncio
from collections.abc import Mapping

from powerguard.core.actions import Action, ArmWay, CheckWay, Detail, DisarmWay, Way
from powerguard.effectors.base import Effector, EffectorError

Turns = dict[tuple[Way, str], asyncio.Lock]
"""Whose turn it is, by way and UPS."""


class WaysEffector:
    """Carries out `CheckWay`, `ArmWay` and `DisarmWay` by the effector of their way. ways: those that there are.

    One order of a way at a time, and of one UPS, as they were given: a slow one that disarms must not undo a later one
    that arms. turns: shared with the effector that this one replaces, as after a reload its orders may be under way.
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
