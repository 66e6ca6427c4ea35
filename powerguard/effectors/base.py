"""The interface between the daemon and an effector, and the effector that passes orders on by power-on method."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from powerguard.core.model.actions import Action, ArmPowerOn, CheckPowerOn, Detail, DisarmPowerOn, PowerOnMethod


class Effector(Protocol):
    """Carries out the kinds of action that it is registered for; twice is as good as once.

    It may raise anything: `daemon.attempt` turns every failure into an `Outcome`. An expected failure is an
    `EffectorError` whose text says what, where and the fix; its traceback is not logged.
    """

    async def carry_out(self, action: Action) -> Detail:
        """Carry out one action. The caller cancels it at the action's deadline."""
        ...


class EffectorError(Exception):
    """An expected failure of the world outside, in one line that an operator understands.

    harmless: the action certainly had no effect, so no undo is needed. timed_out: the effector ended it at its
    deadline. detail: as in `events.Failed`.
    """

    def __init__(self, text: str, *, harmless: bool = False, timed_out: bool = False, detail: Detail = ()) -> None:
        super().__init__(text)
        self.harmless = harmless
        self.timed_out = timed_out
        self.detail = detail


Turns = dict[tuple[PowerOnMethod, str], asyncio.Lock]
"""One lock for each method and UPS."""


class PowerOnEffector:
    """Passes `CheckPowerOn`, `ArmPowerOn` and `DisarmPowerOn` on to the effector of their method.

    methods: those of the settings.

    Orders of one method and one UPS run one at a time, in the order in which they were given: a slow one that disarms
    must not undo a later one that arms. turns: shared with the effector that this one replaces, because after a reload
    its orders may still run.
    """

    def __init__(self, methods: Mapping[PowerOnMethod, Effector], turns: Turns | None = None) -> None:
        self._methods = methods
        self._turns: Turns = {} if turns is None else turns

    async def carry_out(self, action: Action) -> Detail:
        """Pass the order on.

        Raises EffectorError if the settings name no such method, else what its effector raises.
        """
        if not isinstance(action, CheckPowerOn | ArmPowerOn | DisarmPowerOn):
            msg = (
                f"the ways effector carries out CheckPowerOn, ArmPowerOn and DisarmPowerOn, not {type(action).__name__}"
            )
            raise TypeError(msg)
        effector = self._methods.get(action.method)
        if effector is None:
            msg = (
                f"the settings no longer name power-on method {action.method}, so it cannot be disarmed: put it back "
                "into the settings until it is disarmed"
                if isinstance(action, DisarmPowerOn)
                else f"the settings name no power-on method {action.method}"
            )
            raise EffectorError(msg)
        async with self._turns.setdefault((action.method, action.ups), asyncio.Lock()):
            return await effector.carry_out(action)

    def of(self, method: PowerOnMethod) -> Effector | None:
        """Return the effector of this method; None if the settings do not name it."""
        return self._methods.get(method)
