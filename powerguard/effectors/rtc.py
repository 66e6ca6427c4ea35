"""The effector `rtc`: the wake alarm of the host's own clock powers it on if neither BMC nor UPS nor another host does.

First the kernel's clock device, /dev/rtc0, with its time and its alarm (structures and numbers of Linux's
<linux/rtc.h>, on x86 and ARM); then the effector. All sums use the clock's own time: it may be UTC, local or wrong, as
long as it runs. A file keeps the alarm that was set, because another boot disarms it; an alarm that is not in the file
is another program's and is not changed. Standard library only.

A user who may open the device may set its alarm (the kernel asks for a capability only to set the time), and only one
process may have it open at a time.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from powerguard.clock import Clock, boottime_s
from powerguard.core.model.actions import Action, ArmPowerOn, CheckPowerOn, Detail, DisarmPowerOn, PowerOnMethod
from powerguard.durable import replace_file
from powerguard.effectors.base import EffectorError

if TYPE_CHECKING:
    from powerguard.effectors.options import RtcOptions

Ioctl = Callable[[int, int, bytearray], object]
"""ioctl(descriptor, number, what it fills or reads). Injected, so that a test can stand in for the driver."""

_TIME: Final = struct.Struct("=9i")
_ALARM: Final = struct.Struct("=BBxx9i")
_PARAMETER: Final = struct.Struct("=QQII")
_WRITE, _READ = 1 << 30, 2 << 30
RTC_RD_TIME: Final = _READ | _TIME.size << 16 | ord("p") << 8 | 0x09
RTC_WKALM_SET: Final = _WRITE | _ALARM.size << 16 | ord("p") << 8 | 0x0F
RTC_WKALM_RD: Final = _READ | _ALARM.size << 16 | ord("p") << 8 | 0x10
RTC_PARAM_GET: Final = _WRITE | _PARAMETER.size << 16 | ord("p") << 8 | 0x13
_FEATURE_ALARM: Final = 1
_BUSY_TRIES, _BUSY_S = 15, 0.1


class RtcError(Exception):
    """The clock does not do what was asked: what, where, and the fix."""


class Alarm(NamedTuple):
    """The wake alarm, in the clock's own time (UTC or local, it does not say which)."""

    at: datetime
    enabled: bool


def kernel_ioctl(descriptor: int, number: int, buffer: bytearray) -> object:
    """Ask the kernel."""
    return fcntl.ioctl(descriptor, number, buffer, True)


class Rtc:
    """The clock while it is open. Made by `opened`. Every method may hang with the driver, and raises RtcError."""

    def __init__(self, path: str, descriptor: int, ioctl: Ioctl) -> None:
        self._path = path
        self._descriptor = descriptor
        self._ioctl = ioctl

    def now(self) -> datetime:
        """Its time, in whole seconds that are over."""
        buffer = bytearray(_TIME.size)
        self._ask(RTC_RD_TIME, buffer, "does not know the time: set it (hwclock --systohc) and check its battery")
        return self._moment(_TIME.unpack(buffer))

    def alarm(self) -> Alarm | None:
        """The alarm that is set, and one that is past or switched off; None if it holds no date."""
        buffer = bytearray(_ALARM.size)
        self._ask(RTC_WKALM_RD, buffer, "has no readable alarm, so it cannot wake this host")
        enabled, _, *fields = _ALARM.unpack(buffer)
        try:
            return Alarm(self._moment(tuple(fields)), bool(enabled))
        except RtcError:
            if enabled:
                raise
            return None

    def set(self, at: datetime, *, enabled: bool) -> None:
        """Set the alarm, or switch it off."""
        fields = (at.second, at.minute, at.hour, at.day, at.month - 1, at.year - 1900, -1, -1, -1)
        right = f"does not accept an alarm at {at}: many clocks accept one day at most, and some have no alarm"
        self._ask(RTC_WKALM_SET, bytearray(_ALARM.pack(enabled, 0, *fields)), right)

    def has_alarm(self) -> bool:
        """Whether its driver has an alarm. Linux before 5.16 does not report it; then the answer is yes."""
        buffer = bytearray(_PARAMETER.pack(0, 0, 0, 0))
        try:
            self._ioctl(self._descriptor, RTC_PARAM_GET, buffer)
        except OSError:
            return True
        return bool(_PARAMETER.unpack(buffer)[1] & _FEATURE_ALARM)

    def _ask(self, number: int, buffer: bytearray, right: str) -> None:
        try:
            self._ioctl(self._descriptor, number, buffer)
        except OSError as error:
            msg = f"{self._path}: {right} ({error.strerror})"
            raise RtcError(msg) from None

    def _moment(self, fields: tuple[int, ...]) -> datetime:
        second, minute, hour, day, month, year = fields[:6]
        try:
            return datetime(year + 1900, month + 1, day, hour, minute, second)  # noqa: DTZ001 - the clock knows no zone
        except ValueError:
            msg = f"{self._path}: returned an invalid date: {year + 1900}-{month + 1}-{day} {hour}:{minute}:{second}"
            raise RtcError(msg) from None


@contextlib.contextmanager
def opened(path: str, ioctl: Ioctl, sleep: Callable[[float], None]) -> Iterator[Rtc]:
    """Hold the clock open, for as short a time as possible: it excludes other programs. Raises RtcError.

    Another program that has it open (hwclock, for up to a second) is waited for.
    """
    for _ in range(_BUSY_TRIES):
        try:
            # Reading is enough to set an alarm: ProtectClock= of the unit, which leaves no right to write, may stay.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            break
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise RtcError(_cannot(path, error)) from None
            sleep(_BUSY_S)
    else:
        msg = f"{path}: busy: another program holds it (fuser -v {path})"
        raise RtcError(msg)
    try:
        yield Rtc(path, descriptor, ioctl)
    finally:
        os.close(descriptor)


def _cannot(path: str, error: OSError) -> str:
    match error.errno:
        case errno.ENOENT | errno.ENODEV | errno.ENXIO:
            return f"{path}: not there: this host has no such clock, or the daemon's unit hides it (rtc.device)"
        case errno.EACCES | errno.EPERM:
            return f"{path}: not permitted: the udev rule for group powerguard is not in force (powerguard install)"
        case _:
            return f"{path}: {error.strerror}"


LIMIT_S: Final = 5.0
"""Timeout for one order; a driver answers in well under a millisecond."""
KEEP_LIMIT_S: Final = 1.0
"""Timeout for the file: a disk that hangs must not keep the alarm from being set."""
TICK_S: Final = 2.2
"""Time within which a running clock shows another second."""
LOOK_S: Final = 0.1
FAR_OFF: Final = timedelta(days=1)
"""A clock that is further from the system's lost its time, and with it any alarm: its battery is empty."""
_MOST_KEPT: Final = 4
_NOTHING: Final[Detail] = (("disarmed", False), ("alarm", None))
_Value = TypeVar("_Value")


class RtcEffector:
    """Carries out `CheckPowerOn`, `ArmPowerOn` and `DisarmPowerOn` of method RTC; repetition is harmless.

    kept: file in which alarms of ours are named; its folder is the daemon's. armed: False if no change is permitted.
    """

    def __init__(
        self,
        options: "RtcOptions",
        *,
        kept: Path,
        armed: bool = True,
        clock: Clock = boottime_s,
        wall: Callable[[], float] = time.time,  # noqa: TID251 - to say how far off the hardware's clock is
        ioctl: Ioctl = kernel_ioctl,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Set up, without touching anything."""
        self._path = options.device
        self._file = kept
        self._armed = armed
        self._clock = clock
        self._wall = wall
        self._ioctl = ioctl
        self._sleep = sleep
        self._ours: tuple[str, ...] | None = None
        self._turn = asyncio.Lock()
        self._free = asyncio.Event()
        """Set while no thread is in the driver."""
        self._free.set()

    async def carry_out(self, action: Action) -> Detail:
        """Carry out one order. Raises EffectorError: what is wrong with the clock, and the fix.

        Detail of ArmPowerOn: `in_s` (float) as read back, `alarm` (str, in the clock's own time); of CheckPowerOn:
        `clock` and `clock_off_s`, how far it is from the system's time (UTC or local, whichever is nearer); of
        DisarmPowerOn: `disarmed`, `alarm`, the disarmed one, and `left_alone`, that of another program.
        """
        method = action.method if isinstance(action, CheckPowerOn | ArmPowerOn | DisarmPowerOn) else None
        if method is not PowerOnMethod.RTC:
            msg = f"rtc: carries out orders of the power-on method rtc, not {type(action).__name__} {method or ''}"
            raise EffectorError(msg.rstrip())
        if isinstance(action, CheckPowerOn):
            return await self._in_time(self._check, action.by_s)
        if not self._armed:
            return (("dry_run", True),)
        if self._ioctl is kernel_ioctl and os.environ.get("POWERGUARD_UNDER_TEST"):
            msg = "rtc: refused under test: it is this machine's own clock; inject ioctl"
            raise EffectorError(msg)
        if isinstance(action, ArmPowerOn):
            in_s = action.in_s
            return await self._in_time(lambda: self._arm(in_s), action.by_s)
        return await self._in_time(self._disarm, action.by_s)

    async def _in_time(self, job: Callable[[], _Value], by_s: float) -> _Value:
        """Run a job that may hang in the kernel in a thread of its own, and wait no longer than is allowed.

        One at a time: an order that comes while another is at work waits for it, and so for a driver that hangs.
        """
        limit_s = min(max(by_s - self._clock(), 0.0), LIMIT_S)
        try:
            async with asyncio.timeout(limit_s), self._turn:
                await self._free.wait()
                self._free.clear()
                return await self._started(job)
        except TimeoutError:
            msg = f"{self._path}: no answer within {limit_s:.1f} s: the driver of the clock hangs (dmesg may say why)"
            raise EffectorError(msg) from None

    def _started(self, job: Callable[[], _Value]) -> "asyncio.Future[_Value]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Value] = loop.create_future()

        def settle(value: _Value | None, error: EffectorError | None) -> None:
            self._free.set()
            if answer.done():  # the caller has given up
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]  # there is one where there is no error

        def report(value: _Value | None, error: EffectorError | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, value, error)

        def run() -> None:
            try:
                report(job(), None)
            except (RtcError, OSError) as error:
                report(None, EffectorError(str(error)))
            except BaseException as error:
                report(None, EffectorError(f"rtc failed ({type(error).__name__}): see the log"))
                raise

        # A daemon thread, and not the loop's own: Python waits for those at its end, and this one may never end.
        try:
            threading.Thread(target=run, name="rtc", daemon=True).start()
        except RuntimeError:  # of Python, when memory or the unit's tasks are used up
            self._free.set()
            msg = "rtc: no thread can be started: this host is short of memory, or the daemon of tasks (TasksMax=)"
            raise EffectorError(msg) from None
        return answer

    # --- What runs in the thread -------------------------------------------------------------------------------

    def _check(self) -> Detail:
        with opened(self._path, self._ioctl, self._sleep) as rtc:
            found = _pending(rtc)
            if not rtc.has_alarm():
                msg = f"{self._path}: its driver has no alarm interrupt: it cannot wake this host"
                raise RtcError(msg)
            first = rtc.now()
        self._refuse_foreign(found)
        now = self._ticks(first)
        off = self._off(now)
        if abs(off) > FAR_OFF:
            msg = (
                f"{self._path}: is {abs(off).days} days off (it shows {now}): check its battery, then hwclock --systohc"
            )
            raise RtcError(msg)
        detail: Detail = (("clock", str(now)), ("clock_off_s", off.total_seconds()))
        return detail if found is None else (*detail, ("alarm", str(found.at)))

    def _arm(self, in_s: float) -> Detail:
        with opened(self._path, self._ioctl, self._sleep) as rtc:
            found = _pending(rtc)
            self._refuse_foreign(found)
            # The clock shows completed seconds, so it may be up to one further: never too early.
            at = rtc.now() + timedelta(seconds=math.ceil(max(in_s, 0.0)) + 1)
            # Written down before it is set; the one that is still set stays ours until then.
            held = [] if found is None else [str(found.at)]
            is_kept = self._keep([*held, str(at)])
            rtc.set(at, enabled=True)
            read = rtc.alarm()
            if read is None or not read.enabled or read.at != at:
                reading = "no alarm" if read is None or not read.enabled else f"an alarm at {read.at}"
                rtc.set(at, enabled=False)
                msg = f"{self._path}: took an alarm at {at}, but reads {reading}: this clock is not reliable"
                raise RtcError(msg)
            left_s = (read.at - rtc.now()).total_seconds()
        return (("in_s", left_s), ("alarm", str(at)), ("is_kept", is_kept))

    def _disarm(self) -> Detail:
        if not self._known():
            return _NOTHING  # a host that never armed one needs no clock for that
        with opened(self._path, self._ioctl, self._sleep) as rtc:
            found = _pending(rtc)
            detail = _NOTHING
            if found is not None and str(found.at) not in self._known():
                detail = (*detail, ("left_alone", str(found.at)))
            elif found is not None:
                rtc.set(found.at, enabled=False)
                if _pending(rtc) is not None:
                    msg = f"{self._path}: switched the alarm at {found.at} off, but it still reads as set"
                    raise RtcError(msg)
                detail = (("disarmed", True), ("alarm", str(found.at)))
        self._keep([])
        return detail

    def _refuse_foreign(self, found: Alarm | None) -> None:
        if found is not None and str(found.at) not in self._known():
            msg = (
                f"{self._path}: another program's alarm is set for {found.at} (its own time), and is left alone: "
                "disable it if it is not needed (rtcwake -m disable)"
            )
            raise RtcError(msg)

    def _ticks(self, first: datetime) -> datetime:
        """Wait until the clock shows another second. It is closed in between, for other programs."""
        for _ in range(round(TICK_S / LOOK_S)):
            self._sleep(LOOK_S)
            with opened(self._path, self._ioctl, self._sleep) as rtc:
                if (now := rtc.now()) != first:
                    return now
        msg = f"{self._path}: is stopped at {first}, so an alarm would never come: start it with hwclock --systohc"
        raise RtcError(msg)

    def _off(self, now: datetime) -> timedelta:
        """How far the clock is ahead of the system's time; it may run in UTC or in local time."""
        utc = datetime.fromtimestamp(self._wall(), tz=UTC)
        apart = (now - utc.replace(tzinfo=None), now - utc.astimezone().replace(tzinfo=None))
        return min(apart, key=abs)

    # --- What is ours ------------------------------------------------------------------------------------------

    def _known(self) -> tuple[str, ...]:
        """Alarms that powerguard may have set. A damaged file names none. Raises RtcError if it cannot be read."""
        if self._ours is None:
            try:
                content = json.loads(self._file.read_bytes()[:4096])
                named = content["alarms"][:_MOST_KEPT]
                self._ours = tuple(each for each in named if isinstance(each, str))
            except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
                self._ours = ()
            except OSError as error:  # read again at the next order: it may name the alarm that is set
                msg = f"{self._file}: cannot be read ({error.strerror}), so the owner of the clock's alarm is not known"
                raise RtcError(msg) from None
        return self._ours

    def _keep(self, alarms: Sequence[str]) -> bool:
        """Remember alarms, in the file too.

        False if that took too long: they are ours until this daemon ends, and later count as another program's.
        """
        self._ours = tuple(alarms)
        done: list[bool] = []

        def write() -> None:
            with contextlib.suppress(OSError):
                replace_file(self._file, json.dumps({"schema_version": 1, "alarms": list(alarms)}).encode() + b"\n")
                done.append(True)

        writer = threading.Thread(target=write, name="rtc-kept", daemon=True)
        writer.start()
        writer.join(KEEP_LIMIT_S)
        return bool(done)


def _pending(rtc: Rtc) -> Alarm | None:
    """The alarm that would still come; None where none is set, or the one that is set has passed."""
    found = rtc.alarm()
    return None if found is None or not found.enabled or found.at <= rtc.now() else found
