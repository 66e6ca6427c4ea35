"""The effector `rtc`: the alarm of the host's own clock powers it on, where neither BMC nor UPS nor another host does.

Everything is counted on the clock's own time: whether that is UTC, local or wrong does not matter, only that it runs.
What was set is kept in a file, because the boot that takes it back is another one; an alarm that is not in there is
somebody else's, and is left alone.
"""

import asyncio
import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

from powerguard.clock import Clock, boottime_s
from powerguard.core.actions import Action, ArmWay, CheckWay, Detail, DisarmWay, Way
from powerguard.durable import replace_file
from powerguard.effectors.base import EffectorError
from powerguard.effectors.rtc_device import Alarm, Ioctl, Rtc, RtcError, kernel_ioctl, opened
from powerguard.effectors.rtc_options import RtcOptions

LIMIT_S: Final = 5.0
"""For one order; a driver answers in well under a millisecond."""
KEEP_LIMIT_S: Final = 1.0
"""For writing down what is set: a disk that hangs must not keep the alarm from being set."""
TICK_S: Final = 2.2
"""Within this every clock that runs shows another second."""
LOOK_S: Final = 0.1
FAR_OFF: Final = timedelta(days=1)
"""A clock that is further from the system's lost its time, and with it any alarm: its battery is empty."""
_MOST_KEPT: Final = 4
_NOTHING: Final[Detail] = (("disarmed", False), ("alarm", None))
_Value = TypeVar("_Value")


class RtcEffector:
    """Carries out `CheckWay`, `ArmWay` and `DisarmWay` of way RTC; twice is as good as once.

    kept: file in which alarms of ours are named; its folder is the daemon's. armed: False where nothing may be changed.
    """

    def __init__(
        self,
        options: RtcOptions,
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
        """Carry out one order. Raises EffectorError: what is wrong with the clock, and what would be right.

        Detail of ArmWay: `in_s` (float) as read back, `alarm` (str, in the clock's own time); of CheckWay: `clock` and
        `clock_off_s`, how far it is from the system's time (UTC or local, whichever is nearer); of DisarmWay:
        `disarmed`, `alarm`, what was taken back, and `left_alone`, what is somebody else's.
        """
        way = action.way if isinstance(action, CheckWay | ArmWay | DisarmWay) else None
        if way is not Way.RTC:
            msg = f"rtc: carries out CheckWay, ArmWay and DisarmWay of way rtc, not {type(action).__name__} {way or ''}"
            raise EffectorError(msg.rstrip())
        if isinstance(action, CheckWay):
            return await self._in_time(self._check, action.by_s)
        if not self._armed:
            return (("dry_run", True),)
        if self._ioctl is kernel_ioctl and os.environ.get("POWERGUARD_UNDER_TEST"):
            msg = "rtc: refused under test: it is this machine's own clock; inject ioctl"
            raise EffectorError(msg)
        if isinstance(action, ArmWay):
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
            if answer.done():  # nobody waits any more
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]  # there is one where there is no error

        def tell(value: _Value | None, error: EffectorError | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, value, error)

        def run() -> None:
            try:
                tell(job(), None)
            except (RtcError, OSError) as error:
                tell(None, EffectorError(str(error)))
            except BaseException as error:
                tell(None, EffectorError(f"rtc broke ({type(error).__name__}): see the log"))
                raise

        # A daemon thread, and not the loop's own: Python waits for those at its end, and this one may never end.
        threading.Thread(target=run, name="rtc", daemon=True).start()
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
                f"{self._path}: is {abs(off).days} days off (it says {now}): is its battery empty? (hwclock --systohc)"
            )
            raise RtcError(msg)
        told: Detail = (("clock", str(now)), ("clock_off_s", off.total_seconds()))
        return told if found is None else (*told, ("alarm", str(found.at)))

    def _arm(self, in_s: float) -> Detail:
        with opened(self._path, self._ioctl, self._sleep) as rtc:
            found = _pending(rtc)
            self._refuse_foreign(found)
            # The clock tells seconds that are over, so it may be up to one further than it says: never too early.
            at = rtc.now() + timedelta(seconds=math.ceil(max(in_s, 0.0)) + 1)
            # Written down before it is set; the one that is still set stays ours until then.
            held = [] if found is None else [str(found.at)]
            is_kept = self._keep([*held, str(at)])
            rtc.set(at, enabled=True)
            read = rtc.alarm()
            if read is None or not read.enabled or read.at != at:
                told = "no alarm" if read is None or not read.enabled else f"an alarm at {read.at}"
                rtc.set(at, enabled=False)
                msg = f"{self._path}: took an alarm at {at}, but reads {told}: this clock cannot be relied on"
                raise RtcError(msg)
            left_s = (read.at - rtc.now()).total_seconds()
        return (("in_s", left_s), ("alarm", str(at)), ("is_kept", is_kept))

    def _disarm(self) -> Detail:
        if not self._known():
            return _NOTHING  # a host that never armed one needs no clock for that
        with opened(self._path, self._ioctl, self._sleep) as rtc:
            found = _pending(rtc)
            told = _NOTHING
            if found is not None and str(found.at) not in self._known():
                told = (*told, ("left_alone", str(found.at)))
            elif found is not None:
                rtc.set(found.at, enabled=False)
                if _pending(rtc) is not None:
                    msg = f"{self._path}: switched the alarm at {found.at} off, but it still reads as set"
                    raise RtcError(msg)
                told = (("disarmed", True), ("alarm", str(found.at)))
        self._keep([])
        return told

    def _refuse_foreign(self, found: Alarm | None) -> None:
        if found is not None and str(found.at) not in self._known():
            msg = (
                f"{self._path}: an alarm that is not ours is set for {found.at} (its own time), and is left alone: "
                "take it back if nobody needs it (rtcwake -m disable)"
            )
            raise RtcError(msg)

    def _ticks(self, first: datetime) -> datetime:
        """Wait until the clock shows another second. It is closed in between: others may want it."""
        for _ in range(round(TICK_S / LOOK_S)):
            self._sleep(LOOK_S)
            with opened(self._path, self._ioctl, self._sleep) as rtc:
                if (now := rtc.now()) != first:
                    return now
        msg = f"{self._path}: stands still at {first}: an alarm would never come (hwclock --systohc may start it)"
        raise RtcError(msg)

    def _off(self, now: datetime) -> timedelta:
        """How far the clock is ahead of the system's time; it may run in UTC or in local time, and does not say."""
        utc = datetime.fromtimestamp(self._wall(), tz=UTC)
        apart = (now - utc.replace(tzinfo=None), now - utc.astimezone().replace(tzinfo=None))
        return min(apart, key=abs)

    # --- What is ours ------------------------------------------------------------------------------------------

    def _known(self) -> tuple[str, ...]:
        """Alarms that we may have set. What cannot be read, or is not ours to read, names none."""
        if self._ours is None:
            try:
                told = json.loads(self._file.read_bytes()[:4096])
                named = told["alarms"][:_MOST_KEPT]
                self._ours = tuple(each for each in named if isinstance(each, str))
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                self._ours = ()
        return self._ours

    def _keep(self, alarms: Sequence[str]) -> bool:
        """Remember alarms, in the file too.

        False where that took too long: they are ours until this daemon ends, and later somebody else's.
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
