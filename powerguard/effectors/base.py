"""What the daemon asks of an effector, and how one is told what to do."""

from typing import Protocol

from powerguard.core.actions import Action, Detail


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
