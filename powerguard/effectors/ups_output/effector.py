"""Way B: tells a UPS to cut its output after a time and to give it back, and reads back that it will.

The rules are the same for every UPS; how one is told is its `Output` (`by_snmp`, `by_nut`):

- A countdown that stands already is never touched, whoever ordered it. One of ours, of this outage, is armed already.
- What prepares an order is set first, each value read back; the one SET or command that acts comes last, and once.
- Armed is what was read back: a countdown that runs, or, where a bare stop leaves no time to see it run, one that shows
  what was set. Only a UPS that contradicts the order has it called off.
- Sooner than asked is a failure, later is not: the host stops by its own deadline.

What was ordered of a UPS, kept in a file beside the journal: an order to cut power is given once for each outage.

The core orders the same again after a restart of the daemon if it never heard how it went. Most UPSes show the
countdown, and so whether it stands; the note tells whose it is, and stands alone for those that show none.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from powerguard.clock import Clock
from powerguard.core.model.actions import Action, ArmWay, CheckWay, Detail, DisarmWay, Way
from powerguard.durable import replace_file
from powerguard.effectors.base import EffectorError
from powerguard.ups.profiles.vocabulary import DeviceError

log = structlog.get_logger(__name__)

_LIMIT_S: Final = 0.5
"""A disk that hangs must not take the seconds in which the UPS can still be told."""
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
        """Read nothing yet. run: calls what may hang on a disk, so that nobody else waits for it."""
        self._folder, self._run = folder, run
        self._known: dict[str, Sent | None] = {}

    async def read(self, ups: str) -> Sent | None:
        """Return what was ordered of this UPS last and not taken back; None: nothing that is known."""
        if ups not in self._known:
            try:
                async with asyncio.timeout(_LIMIT_S):
                    self._known[ups] = await self._run(_read, self._path(ups))
            except (OSError, ValueError, TypeError, TimeoutError, RecursionError) as error:
                self._doubt(ups, "note_unreadable", error)
                return None
        return self._known[ups]

    async def write(self, ups: str, sent: Sent | None) -> None:
        """Keep the note, or (None) drop it. Durable when this returns, or told that it is not."""
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
        told = json.loads(os.read(descriptor, _MAX_BYTES))
    finally:
        os.close(descriptor)
    sent = Sent(**told)
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
"""We leave this long before the action's deadline: whoever is cut off in the middle cannot say what it has done."""
_LOOK_S: Final = 0.4
"""From one look at a countdown to the next; a card tells nobody when it has changed."""
_STILL_S: Final = 2.0
"""After this time, a countdown in whole seconds must have moved. A bare stop leaves less than that for looking."""
_EARLY_S: Final = 5.0
"""A countdown that is shorter by more than this is another one than was ordered: the card has cut the delay down."""
_LAG_S: Final = 10.0
"""By so much a countdown may differ from the note of it, and still be ours."""


class Output(Protocol):
    """One UPS while it is told something. Raises DeviceError or EffectorError, and nothing else.

    where: the UPS as the operator knows it. returns: as in `Done`. shows: it tells the countdown of our order.
    can_cancel: the order can be called off.
    """

    where: str
    returns: str
    shows: bool
    can_cancel: bool

    async def check(self, least_s: float) -> Detail:
        """See whether it could be told, and change nothing. least_s: the shortest time that would be asked for."""
        ...

    async def standing_s(self) -> float | None:
        """Return the seconds of the countdown to off that runs; None: none, or none that it tells."""
        ...

    async def prepare(self, in_s: float) -> float:
        """Set what comes before the order, read it back; return the seconds until off that the order will mean."""
        ...

    async def send(self) -> None:
        """Give the order, once. DeviceError with `unanswered`: it may have been obeyed."""
        ...

    async def undone(self) -> str:
        """Say what was prepared and does not stand any more since the order was given; "" where all does."""
        ...

    async def take_back(self) -> None:
        """Put back what `prepare` has changed."""
        ...

    async def cancel(self) -> None:
        """Call the order off."""
        ...


Opening = Callable[[], AbstractAsyncContextManager[Output]]


@contextlib.contextmanager
def _harmless(ups: str, *, certain: bool = True) -> Iterator[None]:
    """Say of a failure in here that nothing was ordered. certain: False where an earlier try may have ordered it."""
    try:
        yield
    except (DeviceError, EffectorError) as error:
        msg = f"{ups}: {error}" if isinstance(error, DeviceError) else str(error)
        raise EffectorError(msg, harmless=certain) from error


class OutputEffector:
    """Carries out `CheckWay`, `ArmWay` and `DisarmWay` of way OUTPUT. outputs: how each UPS is reached.

    least_s: from the order to the host being off at the latest. armed: False: look, and order nothing.
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
        """Reach nobody yet."""
        self._outputs = outputs
        self._notes = notes
        self._clock = clock
        self._boot = boot
        self._least_s = least_s
        self._armed = armed

    async def carry_out(self, action: Action) -> Detail:
        """Check, arm or disarm. Raises EffectorError in time for the action's deadline."""
        if not isinstance(action, CheckWay | ArmWay | DisarmWay) or action.way is not Way.OUTPUT:
            msg = f"the output effector carries out orders of way output, not {type(action).__name__}"
            raise TypeError(msg)
        if not self._armed and not isinstance(action, CheckWay):
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
                    case CheckWay():
                        return await self._check(output)
                    case ArmWay():
                        return await self._arm(output, action)
                    case DisarmWay():
                        return await self._disarm(output, action)
        except TimeoutError as error:
            msg = f"{action.ups}: the UPS answers too slowly: not done in {limit_s:.1f} s"
            raise EffectorError(msg) from error
        except DeviceError as error:
            msg = f"{action.ups}: {error}"
            raise EffectorError(msg) from error

    async def _check(self, output: Output) -> Detail:
        standing_s = await output.standing_s()
        if standing_s is not None:
            msg = f"{output.where}: a countdown to output off runs already: {standing_s:.0f} s left"
            raise EffectorError(msg)
        return (("returns", output.returns), *await output.check(self._least_s))

    # --- Arming -------------------------------------------------------------------------------------------------

    async def _arm(self, output: Output, action: ArmWay) -> Detail:
        came_s = self._clock()
        if output.returns == "stays_off":
            msg = f"{output.where} would stay off when utility returns in its countdown: it is not told to cut"
            raise EffectorError(msg, harmless=True)
        sent = await self._notes.read(action.ups)
        if sent is not None and sent.boot != self._boot:
            sent = None
        with _harmless(action.ups, certain=sent is None):
            standing_s = await output.standing_s()
        if standing_s is not None:
            return self._standing(output, standing_s, sent if sent and sent.outage == action.outage else None)
        if sent is not None and not output.shows and sent.left_s(came_s) > 0:
            msg = (
                f"{output.where}: was told already in this boot, and does not show its countdown: it may be off in "
                f"{sent.left_s(came_s):.0f} s; it is not told twice"
            )
            raise EffectorError(msg)
        with _harmless(action.ups):
            prepared_s = await self._prepare(output, action.in_s)
        sent_s = self._clock()
        sent = Sent(outage=action.outage, boot=self._boot, at_s=sent_s, in_s=prepared_s)
        await self._notes.write(action.ups, sent)
        left_s = await self._send(output, action, prepared_s)
        in_s = self._clock() - came_s + left_s
        log.info("output_ordered", ups=action.ups, in_s=round(in_s, 1), returns=output.returns, because="read back")
        return self._told(output, in_s, again=False)

    def _standing(self, output: Output, standing_s: float, sent: Sent | None) -> Detail:
        """Say that it is armed, where the countdown that stands is our own; else refuse."""
        if sent is not None and abs(sent.left_s(self._clock()) - standing_s) <= _LAG_S:
            return self._told(output, standing_s, again=True)
        msg = (
            f"{output.where}: a countdown to output off runs already, {standing_s:.0f} s left, that this host has not "
            "ordered in this outage: it is left alone (one host may be the sender of a UPS: ups.NAME.output_off)"
        )
        raise EffectorError(msg, harmless=True)

    def _told(self, output: Output, in_s: float, *, again: bool) -> Detail:
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

    async def _send(self, output: Output, action: ArmWay, prepared_s: float) -> float:
        """Give the order and return the seconds that are left of it, as read back where the UPS tells them."""
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
            msg = f"{unanswered}; it may count down all the same, and does not tell"
            raise EffectorError(msg)
        else:
            left_s = prepared_s - (self._clock() - began_s)
        undone = await output.undone()
        if undone:
            await self._give_up(output, action.ups)
            msg = f"{output.where} has taken the order, and {undone}"
            raise EffectorError(msg)
        return left_s

    async def _seen(self, output: Output, action: ArmWay, prepared_s: float, unanswered: str) -> float:
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
            if left_s is not None and left_s < prepared_s - looked_s - _EARLY_S:
                what = f"{output.where} has taken the order, and would be off in {left_s:.0f} s: too soon for the host"
            elif left_s is not None and (left_s < prepared_s or (first_s is not None and left_s < first_s)):
                return left_s
            elif self._clock() + _LOOK_S <= end_s:
                first_s = left_s if first_s is None else first_s
                await asyncio.sleep(_LOOK_S)  # noqa: TID251 - a card tells nobody when it has changed
            elif left_s is not None and looked_s < _STILL_S:
                return left_s
            else:
                stands = "no countdown runs" if left_s is None else f"its countdown stands still at {left_s:.0f} s"
                what = f"{unanswered or f'{output.where} has taken the order'}, and {stands}"
                if looked_s < _STILL_S:  # The card may show it later: then it brings the host back.
                    msg = f"{what} yet"
                    raise EffectorError(msg)
        await self._give_up(output, action.ups)
        raise EffectorError(what)

    async def _give_up(self, output: Output, ups: str) -> None:
        """Call off what may count down after all, and put back what was prepared."""
        try:
            if output.can_cancel:
                await output.cancel()
                await self._notes.write(ups, None)
        except (DeviceError, EffectorError) as error:
            log.warning("output_not_called_off", ups=ups, because=str(error))
        await self._put_back(output)

    async def _put_back(self, output: Output) -> None:
        """Put back what was prepared. It is harmless by itself, so a failure here only adds a line to the log."""
        try:
            await output.take_back()
        except (DeviceError, EffectorError) as error:
            log.warning("output_left_prepared", where=output.where, because=str(error))

    # --- Disarming ----------------------------------------------------------------------------------------------

    async def _disarm(self, output: Output, action: DisarmWay) -> Detail:
        """Detail: `disarmed`, and `because`. Raises EffectorError while an order of ours stands."""
        sent = await self._notes.read(action.ups)
        if sent is None or action.outage not in ("", sent.outage):
            return (("disarmed", False), ("because", "nothing was ordered in this outage"))
        standing_s = await output.standing_s()
        is_over = output.shows or sent.boot != self._boot or sent.left_s(self._clock()) < -_LAG_S
        if standing_s is None and is_over:
            await self._notes.write(action.ups, None)
            return (("disarmed", True), ("because", "no countdown runs"))
        # A note of another boot tells no time of this one: whose countdown it is, nobody can say.
        is_strange = standing_s is not None and (
            sent.boot != self._boot or abs(sent.left_s(self._clock()) - standing_s) > _LAG_S
        )
        if is_strange:
            return (("disarmed", False), ("because", f"a countdown of another runs, {standing_s:.0f} s left"))
        if not output.can_cancel:
            left_s = sent.left_s(self._clock()) if standing_s is None else standing_s
            msg = f"{output.where}: its command cannot be called off: its output goes off in {left_s:.0f} s"
            raise EffectorError(msg)
        await output.cancel()
        after_s = await output.standing_s()
        if after_s is not None:
            msg = f"{output.where} was told to call it off, and its countdown goes on: {after_s:.0f} s left"
            raise EffectorError(msg)
        await self._notes.write(action.ups, None)
        return (("disarmed", True), ("because", "called off and read back" if output.shows else "called off"))
