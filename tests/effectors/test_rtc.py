"""The alarm of the host's clock: never too early, read back, taken back by the next boot, and nobody else's touched.

The driver is one of our own behind the port for ioctl(): it keeps the kernel's structures byte for byte. Its clock runs
while somebody sleeps.
"""

import asyncio
import errno
import json
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.core.model.actions import ArmPowerOn, CheckPowerOn, Detail, DisarmPowerOn, PowerOnMethod
from powerguard.effectors.base import EffectorError
from powerguard.effectors.options import RtcOptions
from powerguard.effectors.rtc import RTC_PARAM_GET, RTC_RD_TIME, RTC_WKALM_RD, RTC_WKALM_SET, RtcEffector
from tests.peers.machine import folder_in_memory

START = datetime(2026, 11, 21, 22, 0, 0)  # noqa: DTZ001 - the clock knows no zone
FIELDS = struct.Struct("=9i")


@dataclass
class Driver:
    """A clock with an alarm. `exact` is its time with fractions, which it never shows."""

    exact: datetime = START + timedelta(seconds=0.6)
    at: datetime | None = None
    enabled: bool = False
    stands_still: bool = False
    features: int | None = 1
    fails: dict[int, int] = field(default_factory=dict)
    lies: bool = False
    hangs: threading.Event | None = None
    asked: list[int] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        if not self.stands_still:
            self.exact += timedelta(seconds=seconds)

    def ioctl(self, descriptor: int, number: int, buffer: bytearray) -> object:
        assert os.fstat(descriptor)
        self.asked.append(number)
        if self.hangs is not None:
            self.hangs.wait(60)
        if number in self.fails:
            raise OSError(self.fails[number], os.strerror(self.fails[number]))
        if number == RTC_RD_TIME:
            buffer[:] = self._fields(self.exact)
        elif number == RTC_WKALM_RD:
            fields = FIELDS.pack(*[-1] * 9) if self.at is None else self._fields(self.at)
            buffer[:] = bytes((self.enabled, 0, 0, 0)) + fields
        elif number == RTC_WKALM_SET:
            second, minute, hour, day, month, year = FIELDS.unpack(buffer[4:])[:6]
            self.at = datetime(year + 1900, month + 1, day, hour, minute, second)  # noqa: DTZ001 - as above
            self.enabled = bool(buffer[0]) and not self.lies
        elif number == RTC_PARAM_GET and self.features is not None:
            buffer[8:16] = self.features.to_bytes(8, "little")
        else:
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")
        return 0

    def _fields(self, at: datetime) -> bytes:
        return FIELDS.pack(at.second, at.minute, at.hour, at.day, at.month - 1, at.year - 1900, 0, 0, 0)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Where the alarm is written down, which may take a second."""
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "rtc0"
    path.touch()
    return path


def effector(driver: Driver, device: Path, *, armed: bool = True, system: datetime = START) -> RtcEffector:
    """One boot's effector: the file of what it keeps outlives it."""
    return RtcEffector(
        RtcOptions(kind="device", device=str(device)),
        kept=device.with_name("rtc-alarm.json"),
        armed=armed,
        wall=lambda: system.astimezone().timestamp(),
        ioctl=driver.ioctl,
        sleep=driver.sleep,
    )


def by_s() -> float:
    return boottime_s() + 10


def check() -> CheckPowerOn:
    return CheckPowerOn(id="c", by_s=by_s(), method=PowerOnMethod.RTC)


def arm(in_s: float) -> ArmPowerOn:
    return ArmPowerOn(id="a", by_s=by_s(), method=PowerOnMethod.RTC, outage="o1", in_s=in_s)


def disarm() -> DisarmPowerOn:
    return DisarmPowerOn(id="d", by_s=by_s(), method=PowerOnMethod.RTC, outage="o1")


def detail_of(detail: Detail) -> dict[str, object]:
    return dict(detail)


@pytest.mark.parametrize("in_s", [0.0, 1.0, 599.2, 3600.0])
async def test_never_too_early_and_read_back(driver: Driver, device: Path, in_s: float) -> None:
    """The clock says 22:00:00 from 22:00:00.0 to .999: counted from what it says, an alarm may come a second early."""
    answer = detail_of(await effector(driver, device).carry_out(arm(in_s)))
    assert driver.at is not None
    assert driver.enabled
    assert 0 <= (driver.at - driver.exact).total_seconds() - in_s <= 2
    assert answer["in_s"] == (driver.at - START).total_seconds()
    assert answer["is_kept"]


async def test_the_next_boot_takes_it_back_and_twice_is_as_good_as_once(driver: Driver, device: Path) -> None:
    await effector(driver, device).carry_out(arm(600))
    await effector(driver, device).carry_out(arm(900))
    assert driver.at == START + timedelta(seconds=901)
    after = effector(driver, device)
    assert detail_of(await after.carry_out(disarm())) == {
        "disarmed": True,
        "alarm": str(START + timedelta(seconds=901)),
    }
    assert not driver.enabled
    driver.asked.clear()
    assert detail_of(await after.carry_out(disarm())) == {"disarmed": False, "alarm": None}
    assert driver.asked == [], "a host that has armed none does not even need the device"


async def test_somebody_elses_alarm_is_reported_and_left_alone(driver: Driver, device: Path) -> None:
    """A person has called rtcwake: neither checked over, nor overwritten, nor taken back."""
    theirs = START + timedelta(hours=8)
    await effector(driver, device).carry_out(arm(600))
    driver.at = theirs
    for order in (check(), arm(60)):
        with pytest.raises(EffectorError, match=r"alarm is set for 2026-11-22 06:00:00 .*rtcwake -m disable"):
            await effector(driver, device).carry_out(order)
    assert detail_of(await effector(driver, device).carry_out(disarm()))["left_alone"] == str(theirs)
    assert (driver.at, driver.enabled) == (theirs, True)


async def test_an_alarm_that_has_passed_is_nobodys(driver: Driver, device: Path) -> None:
    driver.at, driver.enabled = START - timedelta(hours=1), True
    await effector(driver, device).carry_out(check())
    await effector(driver, device).carry_out(arm(60))
    assert driver.at > START


async def test_killed_between_writing_down_and_setting(driver: Driver, device: Path) -> None:
    """The file names the old alarm, which is still set, and the new one, which never was: both are ours."""
    await effector(driver, device).carry_out(arm(600))
    driver.fails[RTC_WKALM_SET] = errno.EINVAL
    with pytest.raises(EffectorError, match="does not accept an alarm"):
        await effector(driver, device).carry_out(arm(90_000))
    driver.fails.clear()
    assert detail_of(await effector(driver, device).carry_out(disarm()))["alarm"] == str(START + timedelta(seconds=601))


async def test_a_check_changes_nothing_and_shows_how_far_the_clock_is_off(driver: Driver, device: Path) -> None:
    answer = detail_of(await effector(driver, device, system=START - timedelta(seconds=40)).carry_out(check()))
    assert answer == {"clock": "2026-11-21 22:00:01", "clock_off_s": 41.0}
    assert RTC_WKALM_SET not in driver.asked
    assert not device.with_name("rtc-alarm.json").exists()


BLOCKED = [
    ({"stands_still": True}, "is stopped at"),
    ({"features": 0}, "no alarm interrupt"),
    ({"fails": {RTC_RD_TIME: errno.EINVAL}}, "does not know the time"),
    ({"fails": {RTC_WKALM_RD: errno.EINVAL}}, "no readable alarm"),
    ({"exact": datetime(2001, 1, 1, 0, 0, 0)}, r"days off "),  # noqa: DTZ001 - as above
]


@pytest.mark.parametrize(("is_so", "why"), BLOCKED)
async def test_what_blocks_it_is_reported_beforehand(device: Path, is_so: dict[str, object], why: str) -> None:
    with pytest.raises(EffectorError, match=why):
        await effector(Driver(**is_so), device).carry_out(check())  # type: ignore[arg-type]


async def test_an_older_kernel_reports_no_features(driver: Driver, device: Path) -> None:
    driver.features = None
    assert "clock" in detail_of(await effector(driver, device).carry_out(check()))


async def test_a_clock_that_acknowledges_and_does_nothing(driver: Driver, device: Path) -> None:
    driver.lies = True
    with pytest.raises(EffectorError, match="reads no alarm: this clock is not reliable"):
        await effector(driver, device).carry_out(arm(60))


@pytest.mark.parametrize("content", [b"", b"{", b'{"alarms": 3}', b'{"alarms": [7, null]}', b"[" * 5000])
async def test_a_file_that_is_no_file_of_ours_names_nothing(driver: Driver, device: Path, content: bytes) -> None:
    """Cut by the power, or written by somebody: what is set then is not ours, and is told."""
    device.with_name("rtc-alarm.json").write_bytes(content)
    driver.at, driver.enabled = START + timedelta(hours=1), True
    assert detail_of(await effector(driver, device).carry_out(disarm())) == {"disarmed": False, "alarm": None}
    with pytest.raises(EffectorError, match="another program's alarm"):
        await effector(driver, device).carry_out(arm(60))


async def test_a_file_that_could_not_be_read_is_read_again(driver: Driver, device: Path) -> None:
    """The alarm of an outage would stay set, and power on a host that a person has switched off."""
    await effector(driver, device).carry_out(arm(3600))
    kept, away = device.with_name("rtc-alarm.json"), device.with_name("away")
    kept.rename(away)
    kept.symlink_to(kept)
    next_boot = effector(driver, device)
    with pytest.raises(EffectorError, match=r"rtc-alarm\.json: cannot be read \(Too many levels of symbolic links\)"):
        await next_boot.carry_out(disarm())
    assert driver.enabled
    away.replace(kept)
    assert detail_of(await next_boot.carry_out(disarm()))["disarmed"]
    assert not driver.enabled


async def test_a_file_that_cannot_be_written_keeps_no_alarm_from_being_set(driver: Driver, device: Path) -> None:
    device.with_name("rtc-alarm.json").mkdir()
    mine = effector(driver, device)
    assert detail_of(await mine.carry_out(arm(60)))["is_kept"] is False
    assert driver.enabled
    assert detail_of(await mine.carry_out(disarm()))["alarm"] is not None, "this daemon still knows"


async def test_a_driver_that_hangs_costs_one_thread_and_each_order_its_own_time(driver: Driver, device: Path) -> None:
    driver.hangs = threading.Event()
    mine = effector(driver, device)
    for _ in range(3):
        order = ArmPowerOn(id="a", by_s=boottime_s() + 0.5, method=PowerOnMethod.RTC, outage="o1", in_s=60)
        with pytest.raises(EffectorError, match=r"no answer within 0\.\d s: the driver of the clock hangs"):
            await mine.carry_out(order)
    async with asyncio.timeout(60):
        while not driver.asked:  # noqa: ASYNC110 - a thread that starts late
            await asyncio.sleep(0.01)
    assert len(driver.asked) == 1
    driver.hangs.set()
    assert "clock" not in detail_of(await mine.carry_out(arm(60))), "it came back, and so does the effector"
    assert driver.enabled


async def test_an_order_without_a_thread_does_not_hold_up_the_next(driver: Driver, device: Path) -> None:
    """Threads fail to start when memory is short, and the alarm must not be lost until the daemon's next start."""
    mine = effector(driver, device)
    before = threading.stack_size(1 << 46)  # more than there can be
    try:
        with pytest.raises(EffectorError, match="no thread"):
            await mine.carry_out(arm(60))
    finally:
        threading.stack_size(before)
    await mine.carry_out(arm(60))
    assert driver.enabled


async def test_an_order_that_comes_during_a_check_waits_for_it(driver: Driver, device: Path) -> None:
    """The check watches the clock for a second or two; an outage may begin right then."""
    driver.hangs = threading.Event()
    mine = effector(driver, device)
    async with asyncio.TaskGroup() as tasks:
        looked = tasks.create_task(mine.carry_out(check()))
        armed = tasks.create_task(mine.carry_out(arm(60)))
        asyncio.get_running_loop().call_later(0.05, driver.hangs.set)
    assert "clock" in detail_of(looked.result())
    assert "alarm" in detail_of(armed.result())
    assert driver.enabled


async def test_no_clock_no_permission_and_wrong_orders(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(EffectorError, match="not there: this host has no such clock"):
        await effector(driver, tmp_path / "rtc7").carry_out(check())
    with pytest.raises(EffectorError, match="not CheckPowerOn watchdog"):
        await effector(driver, tmp_path / "rtc7").carry_out(
            CheckPowerOn(id="c", by_s=by_s(), method=PowerOnMethod.WATCHDOG)
        )


async def test_dry_run_looks_and_changes_nothing(driver: Driver, device: Path) -> None:
    mine = effector(driver, device, armed=False)
    assert "clock" in detail_of(await mine.carry_out(check()))
    assert await mine.carry_out(arm(60)) == (("dry_run", True),)
    assert await mine.carry_out(disarm()) == (("dry_run", True),)
    assert RTC_WKALM_SET not in driver.asked


async def test_no_test_sets_the_clock_of_this_machine(device: Path) -> None:
    real = RtcEffector(RtcOptions(kind="device"), kept=device.with_name("kept"))
    for order in (arm(60), disarm()):
        with pytest.raises(EffectorError, match="refused under test"):
            await real.carry_out(order)


async def test_the_clock_of_this_machine_can_be_read(device: Path) -> None:
    """The real driver, where there is one: what we take for its structures is what it fills in."""
    if not os.access("/dev/rtc0", os.R_OK):
        pytest.skip("this machine has no /dev/rtc0 that we may read")
    try:
        answer = detail_of(await RtcEffector(RtcOptions(kind="device"), kept=device).carry_out(check()))
    except EffectorError as error:
        assert str(error).startswith("/dev/rtc0: ")  # noqa: PT017 - an alarm of somebody's is an answer as well
    else:
        assert abs(float(str(answer["clock_off_s"]))) < 86400


async def test_what_is_kept_is_one_small_object(driver: Driver, device: Path) -> None:
    await effector(driver, device).carry_out(arm(60))
    kept = json.loads(device.with_name("rtc-alarm.json").read_bytes())
    assert kept == {"schema_version": 1, "alarms": [str(START + timedelta(seconds=61))]}
