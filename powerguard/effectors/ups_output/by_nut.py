"""A UPS that gets its orders through NUT's upsd: ups.delay.* first, if they can be set, then shutdown.return.

Drivers differ in what they do then, and NUT's names do not show it. So an order is sent only if it can be confirmed:
upsd must report how the order ended, or the driver must show a timer.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import ceil
from typing import Final, Protocol

from powerguard.core.model.actions import Detail
from powerguard.effectors.base import EffectorError
from powerguard.effectors.options import OutputOffOptions
from powerguard.effectors.ups_output.effector import Output
from powerguard.ups.nut.variables import is_running

COMMAND: Final = "shutdown.return"
CANCEL: Final = "shutdown.stop"
OFF_DELAY: Final = "ups.delay.shutdown"
ON_DELAY: Final = "ups.delay.start"
TIMERS: Final = ("ups.timer.shutdown", "ups.timer.reboot")
_HEED_S: Final = 0.25
_TRIES: Final = 8
"""Number of reads before a variable counts as not accepted: drivers renew it with their next poll (2 s)."""


class Upsd(Protocol):
    """upsd, of one UPS. Raises DeviceError. tracks: it reports how an order ended."""

    where: str
    tracks: bool

    async def variables(self) -> dict[str, str]:
        """Return every variable of the UPS."""
        ...

    async def settable(self) -> frozenset[str]:
        """Return the variables that can be set."""
        ...

    async def commands(self) -> frozenset[str]:
        """Return the instant commands that its driver has."""
        ...

    async def longest(self, name: str) -> float | None:
        """Return the largest value that a variable takes; None if its driver does not report it."""
        ...

    async def get(self, name: str) -> str | None:
        """Return one variable; None if the UPS does not have it."""
        ...

    async def why_not_set(self) -> str:
        """Return why this user may not set variables, "" if it may."""
        ...

    async def set(self, name: str, value: str) -> None:
        """Set one variable."""
        ...

    async def do(self, command: str) -> None:
        """Give one instant command, once."""
        ...


UpsdOpening = Callable[[], AbstractAsyncContextManager[Upsd]]


class NutOutput:
    """One UPS behind upsd. commands, settable, variables: as upsd lists them."""

    def __init__(
        self,
        upsd: Upsd,
        options: OutputOffOptions,
        *,
        commands: frozenset[str],
        settable: frozenset[str],
        variables: dict[str, str],
    ) -> None:
        """No order yet."""
        self.where = upsd.where
        self.returns: str = options.returns or "unknown"
        self.shows = any(name in variables for name in TIMERS)
        self.can_cancel = CANCEL in commands
        self._upsd = upsd
        self._options = options
        self._commands = commands
        self._settable = settable
        self._variables = variables
        self._changed: list[tuple[str, str]] = []

    async def check(self, least_s: float) -> Detail:
        """Check the variables, and whether the user may set them.

        Raises EffectorError for what would prevent the order.
        """
        problems = self._problems()
        longest_s = await self._upsd.longest(OFF_DELAY) if OFF_DELAY in self._settable else _seconds(self._delay)
        if OFF_DELAY in self._settable:
            problems += [why for why in [await self._upsd.why_not_set()] if why]
        if longest_s is not None and longest_s < least_s:
            verb = "waits at most" if OFF_DELAY in self._settable else "is set to wait"
            problems.append(f"it {verb} {longest_s:g} s, and the host needs {least_s:g} s (offdelay in ups.conf)")
        if problems:
            msg = f"{self.where}: {'; '.join(problems)}"
            raise EffectorError(msg)
        return (
            ("control", COMMAND),
            ("returns_by", "settings" if self._options.returns else "unknown: drivers differ"),
            ("longest_s", longest_s),
            ("shown", self.shows),
            ("can_cancel", self.can_cancel),
        )

    @property
    def _delay(self) -> str:
        return self._variables.get(OFF_DELAY, "")

    def _problems(self) -> list[str]:
        problems = []
        if COMMAND not in self._commands:
            known = ", ".join(sorted(self._commands)[:10]) or "none"
            problems.append(f"its driver lacks the command {COMMAND} (it has: {known})")
        if _seconds(self._delay) is None:
            problems.append(f"its driver does not report {OFF_DELAY}, so the time of output off is unknown")
        if not self._upsd.tracks and not self.shows:
            problems.append("upsd does not report how an order ends (NUT 2.8 does), and the driver shows no timer")
        if self._variables.get("ups.start.auto", "yes").lower() in {"no", "off", "disabled"}:
            problems.append("ups.start.auto is no, so the output would never come back: set it to yes")
        return problems

    async def standing_s(self) -> float | None:
        """Return the seconds of the timer that runs out first; None: none runs, or none is shown."""
        texts = [await self._upsd.get(name) or "" for name in TIMERS if name in self._variables]
        running = [_seconds(text) for text in texts if is_running(text)]
        return min((seconds for seconds in running if seconds is not None), default=None)

    async def prepare(self, in_s: float) -> float:
        """Set the delays where they can be set, the one to on first: drivers want it to be the longer one."""
        problems = self._problems()
        if problems:
            msg = f"{self.where}: {'; '.join(problems)}"
            raise EffectorError(msg)
        if OFF_DELAY not in self._settable:
            return _seconds(self._delay) or 0.0
        off_s = ceil(in_s)
        if ON_DELAY in self._settable:
            await self._set(ON_DELAY, off_s + ceil(self._options.return_after_s))
        return await self._set(OFF_DELAY, off_s)

    async def _set(self, name: str, seconds: int) -> float:
        """Set a delay, and return what is read back: drivers take the next one that the UPS knows.

        Those of Megatec's protocol (nutdrv_qx) count in minutes and round down: they get the next whole minute.
        """
        self._changed.append((name, self._variables.get(name, "")))
        await self._upsd.set(name, str(seconds))
        read_s: float | None = None
        for attempt in range(_TRIES):
            read_s = _seconds(await self._upsd.get(name) or "")
            if read_s is not None and read_s >= seconds:
                return read_s
            if read_s == seconds // 60 * 60:
                seconds = int(read_s) + 60
                await self._upsd.set(name, str(seconds))
            if attempt < _TRIES - 1:
                await asyncio.sleep(_HEED_S)  # noqa: TID251 - a driver does not report when it has polled its UPS
        msg = (
            f"{self.where}: {name} was set to {seconds} s but reads {'no value' if read_s is None else f'{read_s:g} s'}"
        )
        raise EffectorError(msg)

    async def send(self) -> None:
        """Give the command."""
        await self._upsd.do(COMMAND)

    async def undone(self) -> str:
        """Return "": a driver's delays stay until they are set again."""
        return ""

    async def take_back(self) -> None:
        """Set the delays back, the last one first."""
        while self._changed:
            name, before = self._changed.pop()
            if _seconds(before) is not None and await self._upsd.get(name) != before:
                await self._upsd.set(name, before)

    async def cancel(self) -> None:
        """Give the command that cancels it, and wait until no timer runs."""
        if not self.can_cancel:
            msg = f"{self.where}: its driver lacks the command {CANCEL}"
            raise EffectorError(msg)
        await self._upsd.do(CANCEL)
        for _ in range(_TRIES):
            if await self.standing_s() is None:
                return
            await asyncio.sleep(_HEED_S)  # noqa: TID251 - as above


def opening(upsd: UpsdOpening, options: OutputOffOptions) -> Callable[[], AbstractAsyncContextManager[Output]]:
    """Return how to reach this UPS."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Output]:
        async with upsd() as control:
            commands, settable = await control.commands(), await control.settable()
            variables = await control.variables()
            yield NutOutput(control, options, commands=commands, settable=settable, variables=variables)

    return opened


def _seconds(text: str) -> float | None:
    """Return a delay as drivers write it ("20", "20.0", "-1"); None if it is not a delay."""
    plain = text.strip().removeprefix("-")
    if not plain.replace(".", "", 1).isdecimal() or not plain.isascii() or len(plain) > 9:
        return None
    return float(text)
