"""Power-on method B: orders a UPS to switch its output off after a time and on again, and reads back that it will.

The rules are the same for every UPS; its `Output` gives the orders (`by_snmp`, `by_nut`):

- A countdown that already runs is never touched. One that powerguard ordered in this outage counts as armed.
- What prepares an order is set first, each value read back; the one SET or command that acts comes last, and once.
- Armed is what was read back: a countdown that runs, or, where a bare stop leaves no time to see it run, one that shows
  what was set. The order is cancelled only if the UPS contradicts it.
- Sooner than asked is a failure, later is not: the host stops by its own deadline.

Orders to a UPS are kept in a file next to the journal: an order to cut power is given once for each outage.

The core orders the same again after a restart of the daemon if it never heard how it went. Most UPSes show the
countdown, and so whether it runs; the note says who ordered it, and is the only evidence for UPSes that show none.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from powerguard.clock import Clock
from powerguard.core.model.actions import Action, ArmPowerOn, CheckPowerOn, Detail, DisarmPowerOn, PowerOnMethod
from powerguard.durable import replace_file
from powerguard.effectors.base import EffectorError
from powerguard.ups.profiles.vocabulary import DeviceError

log = structlog.get_logger(__name__)

_LIMIT_S: Final = 0.5
"""Timeout for the file, so that a hung disk leaves time for the UPS."""
_MAX_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One order. at_s: CLOCK_BOOTTIME of that boot when it went out; in_s: from then until the output is off."""

    outage: str
    boot: str
    at_s: float
    in_s: float

    def left_s(self, now_s: float) -> float:
        """Return seconds until the output is off; below 0 once it ought to have been."""
        return self.at_s + self.in_s - now_s


class Notes:
    """One note for each UPS, in memory and in a file each. A file that cannot be had costs a line in the log."""

    def __init__(self, folder: Path, *, run: Callable[..., Awaitable[Any]] = asyncio.to_thread) -> None:
        """No access yet. run: calls functions that may hang on a disk, so that other tasks do not wait."""
        self._folder, self._run = folder, run
        self._known: dict[str, Sent | None] = {}

    async def read(self, ups: str) -> Sent | None:
        """Return the last order to this UPS that was not cancelled; None: none is known."""
        if ups not in self._known:
            try:
                async with asyncio.timeout(_LIMIT_S):
                    self._known[ups] = await self._run(_read, self._path(ups))
            except (OSError, ValueError, TypeError, TimeoutError, RecursionError) as error:
                self._doubt(ups, "note_unreadable", error)
                return None
        return self._known[ups]

    async def write(self, ups: str, sent: Sent | None) -> None:
        """Keep the note, or (None) drop it. Durable when this returns, else a warning is logged."""
        self._known[ups] = sent
        try:
            async with asyncio.timeout(_LIMIT_S):
                await self._run(_write, self._path(ups), sent)
        except (OSError, TimeoutError) as error:
            self._doubt(ups, "note_unwritten", error)

    def _path(self, ups: str) -> Path:
        return self._folder / f"output-{ups}.json"

    def _doubt(self, ups: str, event: str, error: Exception) -> None:
        because = f"no answer in {_LIMIT_S:g} s" if isinstance(error, TimeoutError) else str(error)[:200]
        log.warning(event, ups=ups, path=str(self._path(ups)), because=because)


def _read(path: Path) -> Sent | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)  # a pipe never waits
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(os.read(descriptor, _MAX_BYTES))
    finally:
        os.close(descriptor)
    sent = Sent(**fields)
    if not (isinstance(sent.outage, str) and isinstance(sent.boot, str)):
        msg = "outage and boot must be text"
        raise TypeError(msg)
    return Sent(outage=sent.outage, boot=sent.boot, at_s=float(sent.at_s), in_s=float(sent.in_s))


def _write(path: Path, sent: Sent | None) -> None:
    if sent is None:
        path.unlink(missing_ok=True)
        return
    replace_file(path, json.dumps(asdict(sent)).encode())


_MARGIN_S: Final = 0.3
"""Time before the action's deadline at which this ends: a cancelled order could not report what it did."""
_LOOK_S: Final = 0.4
"""Interval of the reads of a countdown; a card does not report its changes."""
_STILL_S: Final = 2.0
"""After this time, a countdown in whole seconds must have moved. A bare stop leaves less than that for looking."""
_EARLY_S: Final = 5.0
"""A countdown that is shorter than asked by more than this is too soon for the host: the card has shortened the delay.
If it is only shorter than the delay that was read back, the UPS still showed the delay from before."""
_LAG_S: Final = 10.0
"""Largest difference between a countdown and its note for it to count as ours."""


class Output(Protocol):
    """One UPS while it gets an order. Raises DeviceError or EffectorError only.

    where: the UPS as the operator knows it. returns: as in `Done`. shows: it reports the countdown of our order.
    can_cancel: the order can be cancelled.
    """

    where: str
    returns: str
    shows: bool
    can_cancel: bool

    async def check(self, least_s: float) -> Detail:
        """Check whether it could get the order; make no change. least_s: the shortest time that would be asked for."""
        ...

    async def standing_s(self) -> float | None:
        """Return the seconds of the running countdown to off; None: none, or none that it reports."""
        ...

    async def prepare(self, in_s: float) -> float:
        """Set what comes before the order, read it back; return the seconds until off that the order will mean."""
        ...

    async def send(self) -> None:
        """Give the order, once. DeviceError with `unanswered`: it may have been obeyed."""
        ...

    async def undone(self) -> str:
        """Return the prepared values that no longer hold since the order was given; "" if all do."""
        ...

    async def take_back(self) -> None:
        """Put back what `prepare` has changed."""
        ...

    async def cancel(self) -> None:
        """Cancel the order."""
        ...


Opening = Callable[[], AbstractAsyncContextManager[Output]]


@contextlib.contextmanager
def _harmless(ups: str) -> Iterator[None]:
    """Mark a failure in here as without an order."""
    try:
        yield
    except (DeviceError, EffectorError) as error:
        msg = f"{ups}: {error}" if isinstance(error, DeviceError) else str(error)
        raise EffectorError(msg, harmless=True) from error


class OutputEffector:
    """Carries out `CheckPowerOn`, `ArmPowerOn` and `DisarmPowerOn` of way OUTPUT. outputs: how each UPS is reached.

    least_s: from the order to the host being off at the latest. armed: False: only check.
    """

    def __init__(
        self,
        outputs: Mapping[str, Opening],
        *,
        notes: Notes,
        clock: Clock,
        boot: str,
        least_s: float,
        armed: bool = True,
    ) -> None:
        """No connection yet."""
        self._outputs = outputs
        self._notes = notes
        self._clock = clock
        self._boot = boot
        self._least_s = least_s
        self._armed = armed

    async def carry_out(self, action: Action) -> Detail:
        """Check, arm or disarm. Raises EffectorError in time for the action's deadline."""
        if (
            not isinstance(action, CheckPowerOn | ArmPowerOn | DisarmPowerOn)
            or action.method is not PowerOnMethod.OUTPUT
        ):
            msg = f"the output effector carries out orders of way output, not {type(action).__name__}"
            raise TypeError(msg)
        if not self._armed and not isinstance(action, CheckPowerOn):
            log.info("dry_run_recorded", action=type(action).__name__, action_id=action.id, ups=action.ups)
            return (("dry_run", True),)
        opening = self._outputs.get(action.ups)
        if opening is None:
            msg = f"ups.{action.ups}.output_off is not set: this host does not switch that UPS"
            raise EffectorError(msg)
        limit_s = max(0.0, action.by_s - self._clock() - _MARGIN_S)
        try:
            async with asyncio.timeout(limit_s), opening() as output:
                match action:
                    case CheckPowerOn():
                        return await self._check(output)
                    case ArmPowerOn():
                        return await self._arm(output, action)
                    case DisarmPowerOn():
                        return await self._disarm(output, action)
        except TimeoutError as error:
            msg = f"{action.ups}: the UPS answers too slowly: the order did not end within {limit_s:.1f} s"
            raise EffectorError(msg, harmless=await self._is_unsent(action)) from error
        except DeviceError as error:
            msg = f"{action.ups}: {error}"
            raise EffectorError(msg, harmless=await self._is_unsent(action)) from error

    async def _is_unsent(self, action: Action) -> bool:
        """Say whether arming has ordered nothing, by the notes: an order is noted before it goes out."""
        return isinstance(action, ArmPowerOn) and await self._of_this_boot(action.ups) is None

    async def _of_this_boot(self, ups: str) -> Sent | None:
        sent = await self._notes.read(ups)
        return sent if sent is not None and sent.boot == self._boot else None

    async def _check(self, output: Output) -> Detail:
        standing_s = await output.standing_s()
        if standing_s is not None:
            msg = f"{output.where}: a countdown to output off is already running: {standing_s:.0f} s left"
            raise EffectorError(msg)
        return (("returns", output.returns), *await output.check(self._least_s))

    # --- Arming -------------------------------------------------------------------------------------------------

    async def _arm(self, output: Output, action: ArmPowerOn) -> Detail:
        came_s = self._clock()
        if output.returns == "stays_off":
            msg = f"{output.where} would stay off if utility returned in its countdown: it gets no order"
            raise EffectorError(msg, harmless=True)
        sent = await self._of_this_boot(action.ups)
        standing_s = await output.standing_s()
        if standing_s is not None:
            return self._standing(output, standing_s, sent if sent and sent.outage == action.outage else None)
        if sent is not None and not output.shows and sent.left_s(came_s) > 0:
            msg = (
                f"{output.where}: already has the order of this boot, and shows no countdown: it may be off in "
                f"{sent.left_s(came_s):.0f} s; the order is not repeated"
            )
            raise EffectorError(msg)
        with _harmless(action.ups):
            prepared_s = await self._prepare(output, action.in_s)
        sent_s = self._clock()
        sent = Sent(outage=action.outage, boot=self._boot, at_s=sent_s, in_s=prepared_s)
        await self._notes.write(action.ups, sent)
        left_s = await self._send(output, action, prepared_s)
        in_s = self._clock() - came_s + left_s
        if sent.left_s(self._clock()) - left_s > _EARLY_S:  # else it would not be known as ours by its countdown
            await self._notes.write(action.ups, replace(sent, in_s=self._clock() - sent_s + left_s))
        because = "read back" if output.shows else "accepted; the UPS shows no countdown"
        log.info("output_ordered", ups=action.ups, in_s=round(in_s, 1), returns=output.returns, because=because)
        return self._detail(output, in_s, again=False)

    def _standing(self, output: Output, standing_s: float, sent: Sent | None) -> Detail:
        """Report it as armed if the running countdown is our own; else refuse."""
        if sent is not None and abs(sent.left_s(self._clock()) - standing_s) <= _LAG_S:
            return self._detail(output, standing_s, again=True)
        msg = (
            f"{output.where}: a countdown to output off is running, {standing_s:.0f} s left, that this host has not "
            "ordered in this outage: it is left alone (only one host may have ups.NAME.output_off)"
        )
        raise EffectorError(msg, harmless=True)

    def _detail(self, output: Output, in_s: float, *, again: bool) -> Detail:
        return (("in_s", round(in_s, 1)), ("returns", output.returns), ("shown", output.shows), ("again", again))

    async def _prepare(self, output: Output, in_s: float) -> float:
        """Return the seconds that the order will mean. What was changed before a failure is put back."""
        try:
            prepared_s = await output.prepare(in_s)
        except (DeviceError, EffectorError):
            await self._put_back(output)
            raise
        if prepared_s < in_s:
            await self._put_back(output)
            msg = f"{output.where} would be off after {prepared_s:g} s, sooner than the host ({in_s:g} s)"
            raise EffectorError(msg)
        return prepared_s

    async def _send(self, output: Output, action: ArmPowerOn, prepared_s: float) -> float:
        """Give the order and return the seconds that are left of it, as read back if the UPS reports them."""
        unanswered = ""
        began_s = self._clock()
        try:
            await output.send()
        except DeviceError as error:
            if not error.unanswered:
                await self._notes.write(action.ups, None)
                await self._put_back(output)
                msg = f"the order is refused: {error}"
                raise EffectorError(msg, harmless=True) from error
            unanswered = str(error)
        if output.shows:
            left_s = await self._seen(output, action, prepared_s, unanswered)
        elif unanswered:
            msg = f"{unanswered}; it may count down without showing it"
            raise EffectorError(msg)
        else:
            left_s = prepared_s - (self._clock() - began_s)
        undone = await output.undone()
        if undone:
            msg = f"{output.where} has accepted the order, but {undone}"
            raise EffectorError(msg, harmless=await self._give_up(output, action.ups))
        return left_s

    async def _seen(self, output: Output, action: ArmPowerOn, prepared_s: float, unanswered: str) -> float:
        """Return the seconds that are left, once the countdown runs or, in a short stop, reads back as it was set.

        Raises EffectorError if no countdown runs, and after calling the order off if the card contradicts it: the
        countdown shows a shorter time, or has not moved for `_STILL_S`.
        """
        first_s: float | None = None
        sent_s = self._clock()
        end_s = action.by_s - _MARGIN_S - 4 * _LOOK_S
        what = ""
        while not what:
            left_s = await output.standing_s()
            looked_s = self._clock() - sent_s
            if left_s is not None and left_s < action.in_s - looked_s - _EARLY_S:
                what = (
                    f"{output.where} has accepted the order, but would be off in {left_s:.0f} s: too soon for the host"
                )
            elif left_s is not None and (left_s < prepared_s or (first_s is not None and left_s < first_s)):
                return left_s
            elif self._clock() + _LOOK_S <= end_s:
                first_s = left_s if first_s is None else first_s
                await asyncio.sleep(_LOOK_S)  # noqa: TID251 - a card does not report its changes
            elif left_s is not None and looked_s < _STILL_S:
                return left_s
            else:
                stands = "no countdown runs" if left_s is None else f"its countdown stays at {left_s:.0f} s"
                what = f"{unanswered or f'{output.where} has accepted the order'}, but {stands}"
                if looked_s < _STILL_S:  # The card may show it later: then it brings the host back.
                    msg = f"{what} yet"
                    raise EffectorError(msg)
        raise EffectorError(what, harmless=await self._give_up(output, action.ups))

    async def _give_up(self, output: Output, ups: str) -> bool:
        """Cancel an order that may still count down, and put the prepared values back.

        Return whether the UPS shows that nothing counts down any more.
        """
        is_cancelled = False
        try:
            if output.can_cancel:
                await output.cancel()
                is_cancelled = output.shows and await output.standing_s() is None
                if is_cancelled or not output.shows:
                    await self._notes.write(ups, None)
        except (DeviceError, EffectorError) as error:
            log.warning("output_not_called_off", ups=ups, because=str(error))
        await self._put_back(output)
        return is_cancelled

    async def _put_back(self, output: Output) -> None:
        """Put back what was prepared. It is harmless by itself, so a failure here only adds a line to the log."""
        try:
            await output.take_back()
        except (DeviceError, EffectorError) as error:
            log.warning("output_left_prepared", where=output.where, because=str(error))

    # --- Disarming ----------------------------------------------------------------------------------------------

    async def _disarm(self, output: Output, action: DisarmPowerOn) -> Detail:
        """Detail: `disarmed`, and `because`. Raises EffectorError while an order of ours is active."""
        sent = await self._notes.read(action.ups)
        if sent is None or action.outage not in ("", sent.outage):
            return (("disarmed", False), ("because", "no order was given in this outage"))
        standing_s = await output.standing_s()
        # The core orders this for an outage in another boot only if its host may be back before the cut.
        is_past = sent.left_s(self._clock()) < -_LAG_S if sent.boot == self._boot else not action.outage
        is_over = output.shows or is_past
        if standing_s is None and is_over:
            await self._notes.write(action.ups, None)
            return (("disarmed", True), ("because", "no countdown runs"))
        # A note of another boot has no time of this one, so the origin of the countdown is unknown.
        is_strange = standing_s is not None and (
            sent.boot != self._boot or abs(sent.left_s(self._clock()) - standing_s) > _LAG_S
        )
        if is_strange:
            return (("disarmed", False), ("because", f"another program's countdown runs, {standing_s:.0f} s left"))
        if not output.can_cancel:
            left_s = sent.left_s(self._clock()) if standing_s is None else standing_s
            when = f"in {left_s:.0f} s" if sent.boot == self._boot else f"{sent.in_s:.0f} s after the order"
            msg = f"{output.where}: its command cannot be cancelled: its output goes off {when}"
            raise EffectorError(msg)
        await output.cancel()
        after_s = await output.standing_s()
        if after_s is not None:
            msg = f"{output.where} got the order to cancel, but its countdown continues: {after_s:.0f} s left"
            raise EffectorError(msg)
        await self._notes.write(action.ups, None)
        return (("disarmed", True), ("because", "cancelled and read back" if output.shows else "cancelled"))
