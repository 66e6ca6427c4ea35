"""The kernel's clock device, /dev/rtc0: its time and its wake alarm. Standard library only.

Structures and numbers are those of Linux's <linux/rtc.h>, on x86 and ARM. Whoever may open the device may set its alarm
(the kernel asks for a capability only where the time itself is set), and only one may have it open at a time.
"""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final, NamedTuple

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
    """The clock does not do what was asked: what, where, and what would be right."""


class Alarm(NamedTuple):
    """The wake alarm, in the clock's own time (UTC or local, it does not say which)."""

    at: datetime
    enabled: bool


def kernel_ioctl(descriptor: int, number: int, told: bytearray) -> object:
    """Ask the kernel."""
    return fcntl.ioctl(descriptor, number, told, True)


class Rtc:
    """The clock while it is open. Made by `opened`. Every method may hang with the driver, and raises RtcError."""

    def __init__(self, path: str, descriptor: int, ioctl: Ioctl) -> None:
        self._path = path
        self._descriptor = descriptor
        self._ioctl = ioctl

    def now(self) -> datetime:
        """Its time, in whole seconds that are over."""
        told = bytearray(_TIME.size)
        self._ask(RTC_RD_TIME, told, "does not know the time: set it (hwclock --systohc); is its battery empty?")
        return self._moment(_TIME.unpack(told))

    def alarm(self) -> Alarm | None:
        """The alarm that is set, and one that is past or switched off; None where it holds no date at all."""
        told = bytearray(_ALARM.size)
        self._ask(RTC_WKALM_RD, told, "has no alarm that could be read: it cannot wake this host")
        enabled, _, *fields = _ALARM.unpack(told)
        try:
            return Alarm(self._moment(tuple(fields)), bool(enabled))
        except RtcError:
            if enabled:
                raise
            return None

    def set(self, at: datetime, *, enabled: bool) -> None:
        """Set the alarm, or switch it off."""
        fields = (at.second, at.minute, at.hour, at.day, at.month - 1, at.year - 1900, -1, -1, -1)
        right = f"does not take an alarm at {at}: many take none more than a day ahead, and some none at all"
        self._ask(RTC_WKALM_SET, bytearray(_ALARM.pack(enabled, 0, *fields)), right)

    def has_alarm(self) -> bool:
        """Whether its driver has an alarm. Linux before 5.16 does not tell; it is then taken to have one."""
        told = bytearray(_PARAMETER.pack(0, 0, 0, 0))
        try:
            self._ioctl(self._descriptor, RTC_PARAM_GET, told)
        except OSError:
            return True
        return bool(_PARAMETER.unpack(told)[1] & _FEATURE_ALARM)

    def _ask(self, number: int, told: bytearray, right: str) -> None:
        try:
            self._ioctl(self._descriptor, number, told)
        except OSError as error:
            msg = f"{self._path}: {right} ({error.strerror})"
            raise RtcError(msg) from None

    def _moment(self, fields: tuple[int, ...]) -> datetime:
        second, minute, hour, day, month, year = fields[:6]
        try:
            return datetime(year + 1900, month + 1, day, hour, minute, second)  # noqa: DTZ001 - the clock knows no zone
        except ValueError:
            msg = f"{self._path}: told no date: {year + 1900}-{month + 1}-{day} {hour}:{minute}:{second}"
            raise RtcError(msg) from None


@contextlib.contextmanager
def opened(path: str, ioctl: Ioctl, sleep: Callable[[float], None]) -> Iterator[Rtc]:
    """Have the clock open, for as short a time as possible: nobody else can meanwhile. Raises RtcError.

    Who else has it open (hwclock, for up to a second) is waited for.
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
            return f"{path}: not there: this host has no such clock, or the daemon's unit does not show it (rtc.device)"
        case errno.EACCES | errno.EPERM:
            return f"{path}: not permitted: the udev rule that gives it to group powerguard is not in force"
        case _:
            return f"{path}: {error.strerror}"
