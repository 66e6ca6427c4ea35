"""The power-on method `watchdog` (D): the BMC's own timer cycles the power, armed before the host goes off.

It depends on the firmware whether a timer that fires powers on a host that is off. So the method counts only on a
board, and with the firmware, on which a drill has shown it (docs/guides/bmc.md).

What is known of the BMC's watchdog on this board: whether a drill has shown that it powers the host on again.

One small file in the daemon's state folder, replaced as a whole. If the file is absent or damaged, the board counts as
never drilled, and the timer is not armed.
"""

import asyncio
import json
import math
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.actions import Action, ArmPowerOn, CheckPowerOn, Detail, DisarmPowerOn, PowerOnMethod
from powerguard.durable import replace_file
from powerguard.effectors.base import EffectorError
from powerguard.effectors.bmc.engine import BmcError, WatchdogStatus
from powerguard.effectors.bmc.inband import InbandEngine
from powerguard.effectors.bmc.ipmi import MAX_S, Device, Failure
from powerguard.effectors.options import BmcOptions

FILE: Final = "bmc-watchdog.json"
DMI: Final = Path("/sys/class/dmi/id")
_MAX_BYTES: Final = 16384

State = Literal["pending", "passed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The hardware that a drill is valid for: mainboard and BMC, with their firmware.

    manufacturer, product, firmware: Get Device ID (IPMI 2.0 section 20.1), auxiliary revision included. name, bios: of
    /sys/class/dmi/id (SMBIOS types 2 and 0); "" if the firmware does not report it.
    """

    manufacturer: int
    product: int
    firmware: str
    name: str
    bios: str

    @classmethod
    def read(cls, device: Device, dmi: Path = DMI) -> "Board":
        """Put together the BMC's answer and the kernel's files, which are in memory."""
        firmware = device.firmware + (f" ({device.auxiliary})" if device.auxiliary else "")
        name, bios = _words(dmi, "board_vendor", "board_name"), _words(dmi, "bios_vendor", "bios_version")
        return cls(manufacturer=device.manufacturer, product=device.product, firmware=firmware, name=name, bios=bios)

    def unlike(self, other: "Board") -> str:
        """Describe how another board differs from this one; "" if it is the same."""
        pairs = ((each.name, getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return ", ".join(f"{name} was {ours}, is {theirs}" for name, ours, theirs in pairs if ours != theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRecord:
    """The last drill. because: why it is what it is.

    boot_id: the boot that was powered off. armed_wall_s: Unix seconds when the timer was started, to fire in_s later.
    judged_wall_s: when it was seen how it went; None while pending.
    """

    state: State
    board: Board
    boot_id: str
    armed_wall_s: float
    in_s: float
    because: str = ""
    judged_wall_s: float | None = None

    def judged(self, *, passed: bool, because: str, wall_s: float) -> "DrillRecord":
        """Return it with its end."""
        return replace(self, state="passed" if passed else "failed", because=because, judged_wall_s=wall_s)


class DrillFileError(Exception):
    """The file cannot be read or written, or is damaged: what, where, and the fix."""


class DrillFile:
    """The file; what was read or written last is remembered, as a disk may hang when it counts. Calls block."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._known: DrillRecord | None = None

    def load(self) -> DrillRecord | None:
        """Return the last drill; None where there never was one. Raises DrillFileError."""
        if self._known is None:
            try:
                with self.path.open("rb") as file:
                    content = file.read(_MAX_BYTES)
            except FileNotFoundError:
                return None
            except OSError as error:
                msg = f"{self.path}: cannot be read: {error.strerror} (it is the daemon's own: ls -l {self.path})"
                raise DrillFileError(msg) from None
            self._known = self._decoded(content)
        return self._known

    def store(self, drill: DrillRecord) -> None:
        """Replace it, durably and whole. Raises DrillFileError."""
        text = json.dumps({"schema_version": 1, **asdict(drill)}, indent=2) + "\n"
        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            msg = f"{self.path}: cannot be written: {error.strerror} (df {self.path.parent})"
            raise DrillFileError(msg) from None
        self._known = drill

    def _decoded(self, content: bytes) -> DrillRecord:
        try:
            plain = json.loads(content)
            version, board = plain.pop("schema_version"), Board(**plain.pop("board"))
            drill = DrillRecord(board=board, **plain)
            _check(drill, version)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            msg = f"{self.path}: powerguard did not write this content, so no drill counts: remove it, and drill again"
            raise DrillFileError(msg) from None
        return drill


def _check(drill: DrillRecord, version: object) -> None:
    """Raise TypeError or ValueError for a value that could not be ours."""
    board, judged_wall_s = drill.board, drill.judged_wall_s
    texts: tuple[Any, ...] = (drill.boot_id, drill.because, board.firmware, board.name, board.bios)
    numbers: tuple[Any, ...] = (drill.armed_wall_s, drill.in_s, *(() if judged_wall_s is None else (judged_wall_s,)))
    if not all(isinstance(each, str) for each in texts) or type(board.manufacturer) is not int:
        raise TypeError(texts)
    if type(board.product) is not int or not all(type(each) in (int, float) for each in numbers):
        raise TypeError(numbers)
    is_state = version == 1 and drill.state in ("pending", "passed", "failed")
    if not is_state or not all(math.isfinite(each) for each in numbers):
        raise ValueError(numbers)


def _words(dmi: Path, *names: str) -> str:
    """The kernel's values under these names; unknown ones are left out."""
    found = []
    for name in names:
        try:
            found.append((dmi / name).read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            continue
    return " ".join(word for word in found if word)


DRILL: Final = "powerguard drill --scope bmc-watchdog"
_ANSWER_MARGIN_S: Final = 0.1
_READ_S: Final = 1.0
"""Timeout for the file, which is on the disk of a host that is going down."""
_T = TypeVar("_T")


class WatchdogEffector:
    """Carries out `CheckPowerOn`, `ArmPowerOn` and `DisarmPowerOn` of `Way.WATCHDOG`, in-band.

    armed: False if the settings say `mode: dry-run`: then it only looks. limit_s: of one
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

        Detail of CheckPowerOn: `board`, `drilled_wall_s` (Unix seconds). Of ArmPowerOn: `in_s`, what is left of the
        countdown as read back, and `board`. Of DisarmPowerOn: `disarmed` (bool: there was something to disarm).
        """
        by_s = boottime_s() + min(self._limit_s, action.by_s - self._clock() - _ANSWER_MARGIN_S)
        match action:
            case CheckPowerOn(method=PowerOnMethod.WATCHDOG):
                drill = await self._drilled(await self.look(by_s), by_s)
                return (("board", drill.board.name), ("drilled_wall_s", drill.judged_wall_s))
            case ArmPowerOn(method=PowerOnMethod.WATCHDOG) | DisarmPowerOn(method=PowerOnMethod.WATCHDOG) if (
                not self._armed
            ):
                return (("dry_run", True),)
            case ArmPowerOn(method=PowerOnMethod.WATCHDOG):
                drill = await self._drilled(await self.look(by_s), by_s)
                return (("in_s", await self.arm(action.in_s, by_s)), ("board", drill.board.name))
            case DisarmPowerOn(method=PowerOnMethod.WATCHDOG, outage=outage):
                # Without an outage it is unknown whether powerguard has armed it: the kernel's timer may look the same.
                is_the_kernels = not outage and (await self.read(by_s)).kernel_driver
                return (("disarmed", not is_the_kernels and await self.disarm(by_s)),)
            case _:
                msg = f"the watchdog effector carries out orders of the power-on method watchdog, not {action}"
                raise TypeError(msg)

    async def look(self, by_s: float) -> WatchdogStatus:
        """Read the timer, and see that it is free. Raises EffectorError where it could not be armed, drilled or not."""
        seen = await self.read(by_s)
        if seen.kernel_driver:
            msg = (
                "the kernel's ipmi_watchdog is loaded, and stops the BMC's timer at every power-off: rmmod "
                "ipmi_watchdog, and block it (/etc/modprobe.d: blacklist ipmi_watchdog; no RuntimeWatchdogSec=)"
            )
            raise EffectorError(msg)
        if seen.timer.is_foreign:
            msg = (
                f"another program uses the BMC's watchdog timer ({seen.timer.words}): stop the program that resets it "
                "(bmc-watchdog, a vendor's agent, the firmware setup's own watchdog)"
            )
            raise EffectorError(msg)
        return seen

    async def read(self, by_s: float) -> WatchdogStatus:
        """Read the timer, the BMC's identity, and why the host is on. Raises BmcError."""
        return await self._bmc.watchdog(by_s)

    async def arm(self, in_s: float, by_s: float) -> float:
        """Start the timer, and return what is left of it as read back. Raises EffectorError."""
        if not 0 < in_s <= MAX_S:
            msg = f"the BMC's watchdog can wait {MAX_S} s at most, and {in_s:.0f} s are needed: it cannot be used here"
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

    def board(self, seen: WatchdogStatus) -> Board:
        """Return which board this is. Raises EffectorError if the BMC does not identify itself."""
        if seen.device is None:
            msg = "the BMC does not identify itself (Get Device ID), so a drill would not count for it"
            raise EffectorError(msg)
        return Board.read(seen.device, self._dmi)

    async def last(self, limit_s: float = _READ_S) -> DrillRecord | None:
        """Return the last drill; None where there was none. Raises EffectorError."""
        return await self._of_file(asyncio.to_thread(self.drills.load), limit_s)

    async def store(self, drill: DrillRecord) -> None:
        """Write a drill down. Raises EffectorError."""
        await self._of_file(asyncio.to_thread(self.drills.store, drill), 2 * _READ_S)

    async def _drilled(self, seen: WatchdogStatus, by_s: float) -> DrillRecord:
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
        if difference := drill.board.unlike(self.board(seen)):
            msg = f"drilled on another board or firmware ({difference}): drill again ({DRILL})"
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
