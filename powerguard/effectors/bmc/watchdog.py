"""The way back `watchdog` (layer D): the BMC's own timer cycles the power, armed before the host goes off.

Whether a timer that fires does anything to a host that is off is left to whoever wrote the firmware. So it counts only
on a board, and with the firmware, on which a drill has shown it (docs/guides/bmc.md).
"""

import asyncio
import math
from collections.abc import Awaitable
from pathlib import Path
from typing import Final, TypeVar

from powerguard.clock import Clock, boottime_s
from powerguard.core.actions import Action, ArmWay, CheckWay, Detail, DisarmWay, Way
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.drilled import DMI, Board, Drill, DrillFile, DrillFileError
from powerguard.effectors.bmc.engine import BmcError, Watch
from powerguard.effectors.bmc.inband import InbandEngine
from powerguard.effectors.bmc.ipmi import Failure
from powerguard.effectors.bmc.options import BmcOptions
from powerguard.effectors.bmc.timer import MAX_S

DRILL: Final = "powerguard drill --scope bmc-watchdog"
_ANSWER_MARGIN_S: Final = 0.1
_READ_S: Final = 1.0
"""For the file: it is on the disk of a host that is going down."""
_T = TypeVar("_T")


class WatchdogEffector:
    """Carries out `CheckWay`, `ArmWay` and `DisarmWay` of `Way.WATCHDOG`, in-band.

    armed: False where the settings say `mode: dry-run`: then it looks, and arms and disarms nothing. limit_s: of one
    operation; a caller that cancels earlier ends it. dmi: where the kernel names the board.
    """

    def __init__(
        self,
        options: BmcOptions,
        drills: DrillFile,
        *,
        armed: bool = True,
        clock: Clock = boottime_s,
        limit_s: float = 5.0,
        dmi: Path = DMI,
    ) -> None:
        self.drills = drills
        self._armed = armed
        self._bmc = InbandEngine(options.socket)
        self._clock = clock
        self._limit_s = limit_s
        self._dmi = dmi

    async def carry_out(self, action: Action) -> Detail:
        """Check, arm or disarm. Raises EffectorError: blocked, and why.

        Detail of CheckWay: `board`, `drilled_wall_s` (Unix seconds). Of ArmWay: `in_s`, what is left of the countdown
        as read back, and `board`. Of DisarmWay: `disarmed` (bool: there was something to disarm).
        """
        by_s = boottime_s() + min(self._limit_s, action.by_s - self._clock() - _ANSWER_MARGIN_S)
        match action:
            case CheckWay(way=Way.WATCHDOG):
                drill = await self._drilled(await self.look(by_s), by_s)
                return (("board", drill.board.name), ("drilled_wall_s", drill.judged_wall_s))
            case ArmWay(way=Way.WATCHDOG) | DisarmWay(way=Way.WATCHDOG) if not self._armed:
                return (("dry_run", True),)
            case ArmWay(way=Way.WATCHDOG):
                drill = await self._drilled(await self.look(by_s), by_s)
                return (("in_s", await self.arm(action.in_s, by_s)), ("board", drill.board.name))
            case DisarmWay(way=Way.WATCHDOG):
                return (("disarmed", await self.disarm(by_s)),)
            case _:
                msg = f"the watchdog effector carries out CheckWay, ArmWay and DisarmWay of its way, not {action}"
                raise TypeError(msg)

    async def look(self, by_s: float) -> Watch:
        """Read the timer, and see that it is free. Raises EffectorError where it could not be armed, drilled or not."""
        seen = await self.read(by_s)
        if seen.kernel_driver:
            msg = (
                "the kernel's ipmi_watchdog is loaded, and stops the BMC's timer at every power-off: rmmod "
                "ipmi_watchdog, and keep it out (/etc/modprobe.d: blacklist ipmi_watchdog; no RuntimeWatchdogSec=)"
            )
            raise EffectorError(msg)
        if seen.timer.is_foreign:
            msg = (
                f"the BMC's watchdog timer is somebody else's ({seen.timer.words}): stop who resets it "
                "(bmc-watchdog, a vendor's agent, the firmware setup's own watchdog)"
            )
            raise EffectorError(msg)
        return seen

    async def read(self, by_s: float) -> Watch:
        """Read the timer, who the BMC is, and why the host is on. Raises BmcError."""
        return await self._bmc.watchdog(by_s)

    async def arm(self, in_s: float, by_s: float) -> float:
        """Start the timer, and return what is left of it as read back. Raises EffectorError."""
        if not 0 < in_s <= MAX_S:
            msg = f"the BMC's watchdog can wait {MAX_S} s at most, and {in_s:.0f} s are asked for: it is of no use here"
            raise EffectorError(msg)
        timer = await self._bmc.arm(math.ceil(in_s), by_s)
        left_s = timer.initial_s if timer.present_s is None else timer.present_s
        if not timer.is_ours or left_s is None:
            msg = f"the BMC's watchdog does not read back as armed ({timer.words})"
            raise BmcError(msg, Failure.MISMATCH)
        return left_s

    async def disarm(self, by_s: float) -> bool:
        """Stop the timer, if it is ours; whether it was. Raises BmcError."""
        return (await self._bmc.disarm(by_s))[1]

    def board(self, seen: Watch) -> Board:
        """Return which board this is. Raises EffectorError where the BMC does not say who it is."""
        if seen.device is None:
            msg = "the BMC does not say which one it is (Get Device ID), so no drill could count for it"
            raise EffectorError(msg)
        return Board.read(seen.device, self._dmi)

    async def last(self, limit_s: float = _READ_S) -> Drill | None:
        """Return the last drill; None where there was none. Raises EffectorError."""
        return await self._of_file(asyncio.to_thread(self.drills.load), limit_s)

    async def store(self, drill: Drill, limit_s: float = 2 * _READ_S) -> None:
        """Write a drill down. Raises EffectorError."""
        await self._of_file(asyncio.to_thread(self.drills.store, drill), limit_s)

    async def _drilled(self, seen: Watch, by_s: float) -> Drill:
        """Return the drill that has shown that it works here. Raises EffectorError where none has."""
        drill = await self.last(min(_READ_S, by_s - boottime_s()))
        if drill is None:
            msg = f"not drilled on this board ({DRILL})"
            raise EffectorError(msg)
        if drill.state == "pending":
            msg = f"its drill is not judged yet; the daemon does so when the host is back ({DRILL})"
            raise EffectorError(msg)
        if drill.state == "failed":
            msg = f"its drill failed: {drill.because}"
            raise EffectorError(msg)
        if told := drill.board.unlike(self.board(seen)):
            msg = f"drilled on another board or firmware ({told}): drill again ({DRILL})"
            raise EffectorError(msg)
        return drill

    async def _of_file(self, doing: Awaitable[_T], limit_s: float) -> _T:
        try:
            async with asyncio.timeout(limit_s):
                return await doing
        except DrillFileError as error:
            raise EffectorError(str(error)) from None
        except TimeoutError:
            msg = f"{self.drills.path}: no answer within {limit_s:.1f} s: its disk hangs"
            raise EffectorError(msg) from None
