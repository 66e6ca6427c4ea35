"""A UPS that gets its orders through its network card: the SETs of its family's command, each read back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol

from powerguard.clock import Clock
from powerguard.core.model.actions import Detail
from powerguard.effectors.base import EffectorError
from powerguard.effectors.options import OutputOffOptions
from powerguard.effectors.ups_output.effector import Output
from powerguard.ups.profiles.commands import DelayError, SetOrder, Switch
from powerguard.ups.profiles.schema import SetType, Verb
from powerguard.ups.profiles.vocabulary import Answer, DeviceError, Missing

_HEED_S: Final = 0.4
_KNOWN_S: Final = 7200.0
"""How long a card's identity is kept, because arming has no time to ask. Objects that are missing then are reported."""
_TRIES: Final = 4
"""Number of reads before a value counts as not accepted: cards answer a SET before their UPS does."""


class Card(Protocol):
    """A card with objects to read and set. Raises DeviceError."""

    where: str

    async def get(self, oids: Sequence[str]) -> dict[str, Answer]:
        """Return an answer for each OID, `Missing` where there is no value."""
        ...

    async def set(self, oid: str, kind: SetType, raw: int | str) -> None:
        """Set one object, once."""
        ...

    async def find(self, verb: Verb, outlet: str) -> Switch:
        """Return the command as this card has it."""
        ...


CardOpening = Callable[[], AbstractAsyncContextManager[Card]]


class SnmpOutput:
    """One card and the command that it is to be given."""

    def __init__(self, card: Card, switch: Switch, options: OutputOffOptions, clock: Clock) -> None:
        """No access yet."""
        self.where = card.where
        self.returns: str = options.returns or switch.returns
        self.shows = switch.shows
        self.can_cancel = switch.undo is not None
        self._card = card
        self._switch = switch
        self._options = options
        self._clock = clock
        self._acts: SetOrder | None = None
        self._changed: list[tuple[SetOrder, Answer, float]] = []

    async def check(self, least_s: float) -> Detail:
        """Read what the command needs and accepts. Raises EffectorError for what would prevent it."""
        switch = self._switch
        answers = await self._card.get(switch.reads())
        problems = self._against(answers, today=True)
        longest_s = switch.longest_s
        if longest_s is None:
            problems.append(
                f"{switch.name} acts at once, or at a time that cannot be set: the host needs {least_s:g} s"
            )
        elif longest_s < least_s:
            problems.append(f"{switch.name} waits at most {longest_s:g} s, and the host needs {least_s:g} s")
        if problems:
            msg = f"{self.where}: {'; '.join(problems)}"
            raise EffectorError(msg)
        returns_by = "settings" if self._options.returns else f"profile {switch.profile.name}"
        return (
            ("control", switch.name),
            ("returns_by", returns_by),
            ("longest_s", longest_s),
            ("shown", self.shows),
            ("can_cancel", self.can_cancel),
        )

    def _against(self, answers: Mapping[str, Answer], *, today: bool) -> list[str]:
        lacking = self._switch.lacks(answers)
        if lacking:
            return [f"{self._switch.name} lacks {', '.join(lacking)}"]
        return self._switch.unfit(answers, today=today)

    async def standing_s(self) -> float | None:
        """Return the seconds of the countdown that runs out first, whichever command of the family it is of."""
        countdowns = self._switch.countdowns()
        return self._switch.standing_s(await self._card.get(tuple(countdowns))) if countdowns else None

    async def prepare(self, in_s: float) -> float:
        """Make every SET but the last, each read back."""
        switch = self._switch
        answers = await self._card.get(switch.reads())
        problems = self._against(answers, today=False)
        if switch.longest_s is None:
            problems.append(f"{switch.name} acts at once")
        if problems:
            msg = f"{self.where}: {'; '.join(problems)}"
            raise EffectorError(msg)
        try:
            *before, acts = switch.orders(off_s=in_s, on_s=self._options.return_after_s)
        except DelayError as error:
            msg = f"{self.where}: {error}"
            raise EffectorError(msg) from error
        for order in before:
            before_it = answers.get(order.oid, Missing.NO_ANSWER)
            self._changed.append((order, before_it, self._clock()))
            try:
                await self._set(order, before_it)
            except DeviceError as error:
                if not error.unanswered:
                    self._changed.pop()
                raise
        self._acts = acts
        return await self._off_in_s((*before, acts), in_s)

    async def _off_in_s(self, orders: Sequence[SetOrder], in_s: float) -> float:
        """Return the seconds until off: of the command itself, or of the delay that it goes by, as read back."""
        delays = [order for order, step in zip(orders, self._switch.control.sets, strict=True) if step.delay == "off_s"]
        delay = delays[0]
        if delay is orders[-1]:
            return in_s if delay.seconds is None else delay.seconds
        raw = (await self._card.get([delay.oid])).get(delay.oid)
        return raw * delay.unit_s if isinstance(raw, int) else in_s

    async def _set(self, order: SetOrder, before: Answer = Missing.NO_ANSWER) -> None:
        """Set one object that does not act, and read it back, some times where it has not changed yet.

        A SET without an answer is repeated, unless its effect is seen: a SET that does not act may come twice.
        before: a longer delay that still reads so may be rounded up, or not have changed yet: it is read once more.
        """
        began_s = self._clock()
        lost: DeviceError | None = None
        unheeded = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_HEED_S)  # noqa: TID251 - a card does not report its changes
            if attempt == 0 or lost is not None:
                lost = await self._sent(order)
            if lost is not None and order.read_back == "none":
                continue
            answers = await self._card.get([order.oid])
            answer = answers.get(order.oid, Missing.NO_ANSWER)
            unheeded = order.unheeded(answer, since_s=self._clock() - began_s)
            is_old = order.read_back == "rounded" and answer == before != order.raw
            if not unheeded and (attempt or not is_old):
                return
        msg = f"{self.where}: {unheeded}" if lost is None else f"{order.object} cannot be set: {lost}"
        raise EffectorError(msg)

    async def _sent(self, order: SetOrder) -> DeviceError | None:
        """Make one SET; return the failure if no answer came. Raises DeviceError if it is refused."""
        try:
            await self._card.set(order.oid, order.kind, order.raw)
        except DeviceError as error:
            if error.unanswered:
                return error
            msg = f"{order.object} cannot be set: {error}"
            raise DeviceError(msg) from error
        return None

    async def send(self) -> None:
        """Make the SET that acts."""
        order = self._acts
        if order is None:
            msg = f"{self.where}: the order was not prepared"
            raise EffectorError(msg)
        await self._card.set(order.oid, order.kind, order.raw)

    async def undone(self) -> str:
        """Return the prepared values that no longer hold: on some cards one countdown ends the other."""
        answers = await self._card.get([order.oid for order, _, _ in self._changed]) if self._changed else {}
        differences = (
            order.unheeded(answers.get(order.oid, Missing.NO_ANSWER), since_s=self._clock() - at_s)
            for order, _, at_s in self._changed
        )
        return next(filter(None, differences), "")

    async def take_back(self) -> None:
        """Set the changed values back, the last first. Values that should stay, such as auto restart, are kept."""
        steps = {self._switch.place(step): step for step in self._switch.control.sets}
        while self._changed:
            order, before, _at_s = self._changed.pop()
            if steps[order.oid].standing or before == order.raw or isinstance(before, Missing):
                continue
            if isinstance(before, int) or order.kind != "integer":
                raw = before.decode("latin-1") if isinstance(before, bytes) else before
                await self._card.set(order.oid, order.kind, raw)

    async def cancel(self) -> None:
        """Give the command that cancels it, each SET read back."""
        undo = self._switch.undo
        if undo is None:
            msg = f"{self.where}: {self._switch.name} cannot be cancelled"
            raise EffectorError(msg)
        for order in undo.orders():
            await self._set(order)


def opening(
    card: CardOpening, options: OutputOffOptions, clock: Clock
) -> Callable[[], AbstractAsyncContextManager[Output]]:
    """Return how to reach this UPS. The command is looked for now and then: a card may have been replaced."""
    known: list[tuple[float, Switch]] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[Output]:
        async with card() as control:
            if not known or clock() - known[0][0] > _KNOWN_S:
                known[:] = [(clock(), await control.find(Verb(options.control), options.outlet or ""))]
            try:
                yield SnmpOutput(control, known[0][1], options, clock)
            except (DeviceError, EffectorError):
                known.clear()
                raise

    return opened
