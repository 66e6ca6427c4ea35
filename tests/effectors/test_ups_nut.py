"""Layer B through NUT: the real upsd, and behind it a driver of our own that obeys, refuses, rounds or is silent."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from powerguard.clock import boottime_s
from powerguard.core.model.actions import ArmPowerOn, CheckPowerOn, DisarmPowerOn, PowerOnMethod
from powerguard.effectors.base import EffectorError
from powerguard.effectors.options import OutputOffOptions
from powerguard.effectors.ups_output import by_nut
from powerguard.effectors.ups_output.effector import Notes, OutputEffector
from powerguard.ups.nut.connection import opened
from powerguard.ups.nut.options import NutOptions
from tests.peers.machine import at_once, folder_in_memory, watched
from tests.peers.nut import USERS, Upsd, upsd
from tests.peers.nut_driver import FAILED, UNKNOWN, Driver, upsd_with
from tests.peers.ports import free_port
from tests.ups.nut.nut_helpers import FakeUpsd


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Where the order is written down, which may take half a second."""
    with folder_in_memory() as folder:
        yield folder


def effector(
    tmp_path: Path,
    port: int,
    *,
    user: str = "admin",
    least_s: float = 100.0,
    returns: str | None = None,
    boot: str = "b",
    **more: object,
) -> OutputEffector:
    """Return who tells the UPS behind this upsd. more: of the source's settings."""
    secret = tmp_path / f"password-{user}"
    if not secret.exists():
        secret.write_text(USERS.get(user, "wrong"), encoding="utf-8")
        secret.chmod(0o400)
    login = {"user": user, "password": {"file": str(secret)}}
    source = NutOptions.model_validate(
        {"kind": "nut", "host": "127.0.0.1", "port": port, "name": "dsim", "timeout_s": 5.0, **login, **more}
    )
    wanted = OutputOffOptions.model_validate({"by": "nut", "returns": returns})
    output = by_nut.opening(lambda: opened(source), wanted)
    notes = Notes(tmp_path, run=at_once)
    return OutputEffector({"a": output}, notes=notes, clock=boottime_s, boot=boot, least_s=least_s)


async def check(effector: OutputEffector) -> dict[str, object]:
    return dict(
        await effector.carry_out(CheckPowerOn(id="c", by_s=boottime_s() + 60, method=PowerOnMethod.OUTPUT, ups="a"))
    )


async def arm(effector: OutputEffector, in_s: float = 119.5, limit_s: float = 60.0) -> dict[str, object]:
    by_s = boottime_s() + limit_s
    return dict(
        await effector.carry_out(
            ArmPowerOn(id="a", by_s=by_s, method=PowerOnMethod.OUTPUT, outage="o1", in_s=in_s, ups="a")
        )
    )


async def disarm(effector: OutputEffector) -> dict[str, object]:
    return dict(
        await effector.carry_out(
            DisarmPowerOn(id="d", by_s=boottime_s() + 60, method=PowerOnMethod.OUTPUT, outage="o1", ups="a")
        )
    )


@asynccontextmanager
async def behind(driver: Driver) -> AsyncIterator[Upsd]:
    async with upsd_with(driver) as served:
        yield served


async def test_armed_known_after_a_restart_and_called_off(tmp_path: Path) -> None:
    """The delays first, the one to on the longer; the command once; the timer is read back."""
    driver = Driver()
    async with behind(driver) as served:
        there = effector(tmp_path, served.port)
        result = await check(there)
        assert (result["returns"], result["longest_s"], result["can_cancel"], result["shown"]) == (
            "unknown",
            7200,
            True,
            True,
        )
        assert driver.received == []
        result = await arm(there)
        assert driver.received == ["ups.delay.start 150", "ups.delay.shutdown 120", "shutdown.return"]
        assert isinstance(result["in_s"], float)
        assert 60 < result["in_s"] <= 121
        assert (await arm(effector(tmp_path, served.port)))["again"] is True
        assert driver.received.count("shutdown.return") == 1
        assert (await disarm(there))["disarmed"] is True
        assert driver.received[-1] == "shutdown.stop"
        assert driver.off_at_s is None


async def test_a_timer_at_its_end_is_no_countdown(tmp_path: Path) -> None:
    """Tripp Lite's read 65535 where none runs."""
    driver = Driver(idle=65535)
    driver.values |= {"ups.timer.shutdown": "65535", "ups.timer.reboot": "65535"}
    async with behind(driver) as served:
        there = effector(tmp_path, served.port)
        assert (await check(there))["shown"] is True
        assert (await arm(there))["again"] is False
        assert (await disarm(there))["disarmed"] is True


async def test_drivers_round_up_and_the_site_says_what_it_has_tried(tmp_path: Path) -> None:
    driver = Driver(step_s=50)
    async with behind(driver) as served:
        result = await arm(effector(tmp_path, served.port, returns="cycles"))
        assert isinstance(result["in_s"], float)
        assert 121 < result["in_s"] <= 151
        assert result["returns"] == "cycles"


async def test_a_driver_that_rounds_down_gets_the_next_minute(tmp_path: Path) -> None:
    """As nutdrv_qx, for which a delay of 170 s is one of 120 s: later is no failure, sooner is."""
    driver = Driver(step_s=60, down=True)
    async with behind(driver) as served:
        result = await arm(effector(tmp_path, served.port), in_s=170.0)
        assert isinstance(result["in_s"], float)
        assert 120 < result["in_s"] <= 181
        assert (driver.values["ups.delay.start"], driver.values["ups.delay.shutdown"]) == ("240", "180")


async def test_a_delay_that_upsd_still_shows_as_it_was_costs_no_order(tmp_path: Path) -> None:
    """upsd shows it until its driver reports: a longer offdelay of ups.conf, or that of the outage before."""
    driver = Driver(late_s=0.5)
    driver.values["ups.delay.shutdown"] = "600"
    async with behind(driver) as served:
        there = effector(tmp_path, served.port)
        result = await arm(there)
        assert isinstance(result["in_s"], float)
        assert 60 < result["in_s"] <= 121
        assert "shutdown.stop" not in driver.received
        assert (await arm(effector(tmp_path, served.port)))["again"] is True
        assert (await disarm(there))["disarmed"] is True
        assert driver.off_at_s is None


async def test_a_driver_without_timers_is_believed_when_upsd_reports_how_it_ended(tmp_path: Path) -> None:
    driver = Driver(timers=False)
    async with behind(driver) as served:
        there = effector(tmp_path, served.port)
        assert (await check(there))["shown"] is False
        with capture_logs() as logs:
            assert (await arm(there))["in_s"] == pytest.approx(120, abs=20)
        assert [each["because"] for each in logs] == ["accepted; the UPS shows no countdown"]
        with pytest.raises(EffectorError, match=r"already has the order of this boot"):
            await arm(effector(tmp_path, served.port))
        assert driver.received.count("shutdown.return") == 1


async def test_an_order_that_no_timer_shows_is_cancelled_by_a_host_that_is_back_before_the_cut(tmp_path: Path) -> None:
    driver = Driver(timers=False)
    async with behind(driver) as served:
        await arm(effector(tmp_path, served.port))
        back = effector(tmp_path, served.port, boot="b2")
        assert await disarm(back) == {"disarmed": True, "because": "cancelled"}
        assert driver.received[-1] == "shutdown.stop"
        assert (await disarm(back))["because"] == "no order was given in this outage"


@pytest.mark.parametrize(
    ("driver", "user", "because"),
    [
        (
            Driver(commands=("load.off", "test.battery.start")),
            "admin",
            r"lacks the command shutdown.return \(it has: load.off",
        ),
        (Driver(most_s=60), "admin", "waits at most 60 s, and the host needs 100 s"),
        (Driver(settable=()), "admin", r"is set to wait 20 s, and the host needs 100 s \(offdelay in ups.conf\)"),
        (Driver(values={"ups.status": "OB"}, settable=()), "admin", "does not report ups.delay.shutdown"),
        (Driver(), "sec", "user sec may not SET: check the password, and write"),
        (Driver(), "nobody", "user nobody may not SET: check the password"),
    ],
)
async def test_what_would_keep_it_from_working_is_reported_beforehand(
    tmp_path: Path, driver: Driver, user: str, because: str
) -> None:
    """As far as upsd lets one see: user and rights are looked at before it says that there is no such variable."""
    async with behind(driver) as served:
        with pytest.raises(EffectorError, match=because):
            await check(effector(tmp_path, served.port, user=user))
        assert driver.received == []


@pytest.mark.parametrize(
    ("driver", "user", "because", "left"),
    [
        (Driver(), "sec", "refuses ups.delay.start = 150 to sec .ACCESS-DENIED.: check", ""),
        (Driver(status=FAILED), "admin", "the order is refused: .*the driver refuses shutdown.return .FAILED", "20"),
        (Driver(status=UNKNOWN), "admin", "the driver refuses shutdown.return .UNKNOWN", "20"),
        (Driver(set_status=FAILED), "admin", "the driver refuses ups.delay.start = 150 .FAILED", "20"),
        (Driver(step_s=50, down=True), "admin", "ups.delay.shutdown was set to 120 s but reads 100 s", "0"),
        (Driver(ignores=True), "admin", "has accepted the order, but no countdown runs", "20"),
    ],
)
async def test_a_driver_that_does_not_do_it(tmp_path: Path, driver: Driver, user: str, because: str, left: str) -> None:
    """Told in words; nothing counts down, and the delays are as they were."""
    async with behind(driver) as served:
        with pytest.raises(EffectorError, match=because):
            await arm(effector(tmp_path, served.port, user=user), limit_s=12.0 if driver.ignores else 60.0)
        assert driver.off_at_s is None
        if left:
            await served.shows(left, "ups.delay.shutdown")


async def test_an_order_that_never_ends_is_left_in_time(tmp_path: Path) -> None:
    driver = Driver(status=None)
    async with behind(driver) as served, watched() as machine:
        began_s = boottime_s()
        with pytest.raises(EffectorError, match="answers too slowly"):
            await arm(effector(tmp_path, served.port), limit_s=2.0)
        assert boottime_s() - began_s < 2.0 + machine.late_s


async def test_a_upsd_that_is_away_has_ordered_nothing(tmp_path: Path) -> None:
    """So that a late reboot is not excluded by a cut that never comes."""
    with pytest.raises(EffectorError, match="cannot connect to upsd") as caught:
        await arm(effector(tmp_path, free_port()))
    assert caught.value.harmless


async def test_a_timer_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    driver = Driver()
    async with behind(driver) as served:
        driver.off_at_s = boottime_s() + 400
        while (await served.talk("GET VAR dsim ups.timer.shutdown"))[0].endswith('"-1"'):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.05)
        for order in (check, arm):
            with pytest.raises(EffectorError, match="a countdown to output off is"):
                await order(effector(tmp_path, served.port))
        assert driver.received == []


async def test_dummy_ups_takes_no_command(tmp_path: Path) -> None:
    """NUT's own: it lists none of this name, or refuses it."""
    async with upsd() as served:
        with pytest.raises(EffectorError, match=r"its driver lacks the command shutdown.return"):
            await check(effector(tmp_path, served.port))


async def test_an_old_upsd_that_could_not_confirm_it_is_sent_nothing(tmp_path: Path) -> None:
    """Before 2.8 upsd told only that it had handed the order on; without a timer nobody would ever know more."""

    def old(peer: FakeUpsd, words: tuple[str, ...], _writer: object) -> bytes:
        match words:
            case ("SET", "TRACKING", *_):
                return b"ERR FEATURE-NOT-SUPPORTED\n"
            case ("LIST", "CMD", ups):
                return f"BEGIN LIST CMD {ups}\nCMD {ups} shutdown.return\nEND LIST CMD {ups}\n".encode()
            case ("LIST", "RW", ups):
                return f"BEGIN LIST RW {ups}\nEND LIST RW {ups}\n".encode()
            case _:
                return peer.honest(words)

    values = {"ups.status": "OB", "ups.delay.shutdown": "180"}
    async with FakeUpsd(values, old).serving() as peer:
        for order in (check, arm):
            with pytest.raises(EffectorError, match=r"does not report how an order ends .*shows no timer"):
                await order(effector(tmp_path, peer.port, tls="off"))
        assert peer.said("INSTCMD") == 0
        peer.values["ups.timer.shutdown"] = "-1"
        with pytest.raises(EffectorError, match="has accepted the order, but no countdown runs"):
            await arm(effector(tmp_path, peer.port, tls="off"), limit_s=3.0)
        assert peer.said("INSTCMD") == 1


@pytest.mark.parametrize("answer", [b"\n", b"OK\nOK\n", b"BEGIN LIST CMD x\n", b"\xff" * 5000, b"ERR DATA-STALE\n"])
async def test_a_upsd_that_answers_rubbish_is_sent_nothing(tmp_path: Path, answer: bytes) -> None:
    def rubbish(peer: FakeUpsd, words: tuple[str, ...], _writer: object) -> bytes:
        return answer if words[0] == "LIST" else peer.honest(words)

    async with FakeUpsd(answer=rubbish).serving() as peer:
        with pytest.raises(EffectorError, match=r"^a: upsd at 127"):
            await arm(effector(tmp_path, peer.port, tls="off", timeout_s=0.5), limit_s=3.0)
        assert peer.said("INSTCMD") == 0


async def test_a_certificate_that_is_not_believed_gets_no_password(tmp_path: Path) -> None:
    """Also where readings go on without TLS: somebody may stand between."""

    def half(peer: FakeUpsd, words: tuple[str, ...], _writer: object) -> bytes:
        return b"OK STARTTLS\n" if words[0] == "STARTTLS" else peer.honest(words)

    async with FakeUpsd(answer=half).serving() as peer:
        with pytest.raises(EffectorError, match=r"STARTTLS failed|closed|broke"):
            await check(effector(tmp_path, peer.port, timeout_s=1.5))
        assert peer.said("PASSWORD") == 0
        peer.answer = lambda upsd, words, _: upsd.honest(words)
        with pytest.raises(EffectorError, match="offers no TLS"):
            await check(effector(tmp_path, peer.port, tls="required"))
        assert peer.said("PASSWORD") == 0
