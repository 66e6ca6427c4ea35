"""The nut source against the real upsd with dummy-ups: flips, logins, orders, and all of it that can die or hang."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from powerguard.clock import boottime_s
from powerguard.core.model.events import OutputSource, Reading, SourceFailed
from powerguard.options import Secret
from powerguard.sim.ups import SimUps, UpsBattery
from powerguard.ups.nut.connection import LinkError
from powerguard.ups.nut.source import NutSource
from tests.peers.machine import watched
from tests.peers.nut import BATTERY, LIMIT_S, UTILITY, program, upsd
from tests.peers.nut_tls import Authority
from tests.peers.snmp_agent import SnmpAgent
from tests.ups.nut.nut_helpers import Later, fails, forget, listening, options, until, until_lost
from tests.ups.snmp.snmp_helpers import secret

pytestmark = [pytest.mark.peer("upsd", "dummy-ups")]


def on_battery(reading: Reading) -> bool:
    return reading.output_source is OutputSource.BATTERY


def on_utility(reading: Reading) -> bool:
    return reading.output_source is OutputSource.UTILITY


def password(folder: Path, user: str) -> Secret:
    from tests.peers.nut import USERS

    path = folder / user
    return Secret(file=str(path)) if path.exists() else secret(folder, user, USERS[user])


async def test_an_outage_as_upsd_reports_it() -> None:
    async with upsd() as peer, listening(options(peer.port)) as (source, heard):
        first = await until(heard, Reading)
        assert (first.ups, first.source) == ("rack-a", f"nut:dsim@127.0.0.1:{peer.port}")
        assert source.name == first.source
        assert (first.output_source, first.runtime_s, first.charge_pct) == (OutputSource.UTILITY, 1800, 100)
        assert (first.load_pct, first.watts, first.input_present) == (40, 1080, True)
        assert (first.output_off_in_s, first.authenticated, first.low_battery) == (None, False, False)
        peer.change(BATTERY)
        reading = await until(heard, Reading, on_battery)
        assert (reading.runtime_s, reading.charge_pct, reading.input_present) == (1700, 97, False)
        again = await until(heard, Reading)
        assert on_battery(again)
        assert again.at_s - reading.at_s >= 0.2
        peer.change({"ups.status": "OB DISCHRG LB RB", "ups.timer.shutdown": "60", "battery.runtime": "90"})
        reading = await until(heard, Reading, lambda reading: reading.low_battery)
        assert (reading.replace_battery, reading.runtime_s, reading.output_off_in_s) == (True, 90, 60)
        peer.change({"ups.status": "WAIT"})
        reading = await until(heard, Reading, lambda reading: not on_battery(reading))
        assert (reading.output_source, "status_unreported" in reading.alarms) == (OutputSource.UNKNOWN, True)
        peer.change(UTILITY)
        assert (await until(heard, Reading, on_utility)).low_battery is False


async def test_a_secondary_is_counted_until_it_leaves_and_hears_a_forced_shutdown(tmp_path: Path) -> None:
    """A primary waits for as long as NUMLOGINS counts us: FSD does not end the login, only our own end does."""
    async with upsd() as peer:
        more = {"user": "sec", "password": password(tmp_path, "sec")}
        async with listening(options(peer.port, **more)) as (_, heard):
            await until(heard, Reading)
            await peer.counts(1)
            assert await peer.as_admin("FSD dsim") == ["OK FSD-SET"]
            reading = await until(heard, Reading, lambda reading: reading.forced_shutdown)
            assert reading.output_source is OutputSource.UTILITY  # "FSD OL": the core decides what that means
            peer.change(BATTERY)
            reading = await until(heard, Reading, on_battery)
            assert reading.forced_shutdown
            assert await peer.logins() == 1
        await peer.counts(0)


async def test_a_wrong_password_costs_the_login_and_not_the_readings(tmp_path: Path) -> None:
    more = {"user": "sec", "password": secret(tmp_path, "wrong", "guess")}
    with capture_logs() as logs:
        async with upsd() as peer, listening(options(peer.port, **more)) as (_, heard):
            for _ in range(2):
                await until(heard, Reading)
            assert await peer.logins() == 0
            peer.change(BATTERY)
            await until(heard, Reading, on_battery)
            while not any(entry["log_level"] == "error" for entry in logs):  # noqa: ASYNC110 - the log tells nobody
                await asyncio.sleep(0.02)
    logged = [entry for entry in logs if entry["log_level"] == "error"]
    assert [entry["event"] for entry in logged] == ["login_refused"]
    assert "login as sec is refused (ACCESS-DENIED)" in logged[0]["because"]
    assert "guess" not in str(logs)


async def test_a_primary_only_where_upsd_lets_it(tmp_path: Path) -> None:
    """The user decides: a secondary that asks for more stays logged in, and the operator is told."""
    async with upsd() as peer:
        for user, refused in (("prim", False), ("sec", True)):
            more = {"user": user, "password": password(tmp_path, user), "role": "primary"}
            report = await NutSource(options(peer.port, **more), ups="a", clock=boottime_s).look()
            assert report.is_logged_in
            assert report.clients == {"127.0.0.1"}, "upsd lists who is logged in by address"
            assert ("may not be primary (ACCESS-DENIED)" in " ".join(report.warnings)) is refused


async def test_a_upsd_that_dies_on_battery_is_lost_within_3_s_and_used_when_it_is_back(tmp_path: Path) -> None:
    more = {"user": "sec", "password": password(tmp_path, "sec")}
    async with (
        upsd(values={**UTILITY, **BATTERY}) as peer,
        listening(options(peer.port, **more)) as (_, heard),
        watched() as machine,
    ):
        await until(heard, Reading)
        last = await until(heard, Reading)
        await peer.kill()
        failure = await heard.get()
        while isinstance(failure, Reading):
            last, failure = failure, await heard.get()
        assert not failure.lost
        lost = await until_lost(heard)
        assert lost.at_s - last.at_s < 6 + machine.late_s  # 1.9 s, and what a busy machine adds
        assert "connection refused" in lost.reason
        await peer.start()
        await until(heard, Reading, on_battery)
        await peer.counts(1)


async def test_story_3_a_blip_on_battery_costs_a_poll_and_not_the_login(tmp_path: Path) -> None:
    """A hiccup costs a poll. The login must not fall with it: a primary would take it for "done"."""
    more = {"user": "sec", "password": password(tmp_path, "sec")}
    async with upsd(values={**UTILITY, **BATTERY}) as peer, listening(options(peer.port, **more)) as (source, heard):
        for _ in range(5):  # a busy machine may keep upsd from answering for so long that it is lost
            await until(heard, Reading)
            await peer.counts(1)
            link = source._link
            forget(heard)
            await peer.kill(signal.SIGSTOP)
            failure = await until(heard, SourceFailed)
            await peer.kill(signal.SIGCONT)
            await until(heard, Reading)
            if source._link is link:
                break
        assert not failure.lost
        assert "no whole answer in 0.8 s" in failure.reason
        assert source._link is link
        assert await peer.logins() == 1


async def test_story_9_a_driver_that_dies_or_hangs_is_never_an_old_value() -> None:
    """upsd would serve the last values for MAXAGE; what it then says ages the reading until the source is lost."""
    async with upsd(max_age_s=2) as peer, listening(options(peer.port)) as (_, heard):
        await until(heard, Reading)
        await peer.kill_driver()
        lost = await until_lost(heard)
        assert peer.server is not None
        assert peer.server.returncode is None, peer.log()
        assert "the driver of this UPS is not running" in lost.reason
        peer.change(BATTERY)
        await peer.start_driver()
        await until(heard, Reading, on_battery)
        await peer.kill_driver(signal.SIGSTOP)
        lost = await until_lost(heard)
        assert "DATA-STALE: its driver gets no data" in lost.reason
        forget(heard)
        await peer.kill_driver(signal.SIGCONT)
        await until(heard, Reading, on_battery)


async def test_a_ups_that_upsd_does_not_have_is_reported_with_those_that_it_has() -> None:
    async with upsd("one", "two") as peer:
        with pytest.raises(LinkError) as caught:
            await NutSource(options(peer.port, name="three"), ups="a", clock=boottime_s).look()
        assert str(caught.value) == f"upsd at 127.0.0.1:{peer.port} has no UPS 'three' (it has: one, two)"
        async with listening(options(peer.port, name="two")) as (_, heard):
            await until(heard, Reading)
            peer.change(BATTERY, "one")
            await peer.shows("OB DISCHRG", ups="one")
            assert on_utility(await until(heard, Reading))


@pytest.mark.peer("certutil", "pk12util")
async def test_tls_is_verified_and_makes_a_reading_authenticated(tmp_path: Path) -> None:
    ours, foreign = Authority(tmp_path), Authority(tmp_path, "somebody else")
    more = {"user": "sec", "password": password(tmp_path, "sec"), "tls": "required"}
    async with upsd(certificate=ours.nss("localhost", "127.0.0.1")) as peer:
        for host in ("localhost", "127.0.0.1"):
            async with listening(options(peer.port, host=host, ca=str(ours.pem), **more)) as (source, heard):
                assert (await until(heard, Reading)).authenticated
                await peer.counts(1)
                assert source._link is not None
                assert source._link.is_verified
        async with listening(options(peer.port, ca=str(foreign.pem), **more)) as (_, heard):
            await fails(heard, "its certificate is not believed: ")
            assert await peer.logins() == 0
        async with listening(options(peer.port, tls="off")) as (_, heard):
            assert not (await until(heard, Reading)).authenticated
        with pytest.raises(LinkError, match=r"ca /nowhere\.pem: No such file or directory"):
            await NutSource(options(peer.port, ca="/nowhere.pem", **more), ups="a", clock=boottime_s).look()


@pytest.mark.peer("certutil", "pk12util")
async def test_authorities_that_are_renewed_serve_without_a_restart(tmp_path: Path) -> None:
    ours, foreign = Authority(tmp_path), Authority(tmp_path, "somebody else")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(foreign.pem.read_bytes())
    async with (
        upsd(certificate=ours.nss("127.0.0.1")) as peer,
        listening(options(peer.port, ca=str(ca), tls="required")) as (_, heard),
    ):
        await fails(heard, "its certificate is not believed: ")
        ca.write_bytes(ours.pem.read_bytes())
        assert (await until(heard, Reading)).authenticated


@pytest.mark.peer("certutil", "pk12util")
@pytest.mark.parametrize(
    ("names", "days", "says"),
    [
        (["ups.example.org"], 7, "IP address mismatch, certificate is not valid for '127.0.0.1'"),
        pytest.param(["127.0.0.1"], -7, "certificate has expired", marks=pytest.mark.slow),
    ],
    ids=["another name", "expired"],
)
async def test_a_certificate_that_is_not_believed(tmp_path: Path, names: list[str], days: int, says: str) -> None:
    """Required: no reading. If offered: an alarm, readings without trust, and the password stays here."""
    ours = Authority(tmp_path)
    more = {"user": "sec", "password": password(tmp_path, "sec"), "ca": str(ours.pem)}
    async with upsd(certificate=ours.nss(*names, days=days)) as peer:
        async with listening(options(peer.port, tls="required", **more)) as (_, heard):
            await fails(heard, says)
            await asyncio.sleep(0.5)
            assert all(isinstance(heard.get_nowait(), SourceFailed) for _ in range(heard.qsize()))
        clock = Later()
        with capture_logs() as logs:
            async with listening(options(peer.port, tls="if-offered", **more), clock=clock) as (_, heard):
                assert not (await until(heard, Reading)).authenticated
                peer.change(BATTERY)
                await until(heard, Reading, on_battery)
                clock.ahead_s = 301.0  # on battery nobody connects anew, and what was not believed stays so
                for _ in range(3):
                    await until(heard, Reading)
                assert await peer.logins() == 0
        assert [(entry["event"], entry["log_level"]) for entry in logs] == [("tls_not_believed", "error")]
        assert says in logs[0]["because"]


@pytest.mark.peer("certutil", "pk12util")
@pytest.mark.slow
async def test_a_upsd_that_comes_back_with_other_tls_is_reported_and_a_right_one_used_at_once(tmp_path: Path) -> None:
    """Clear text after TLS was verified is told. A certificate that was put right serves from the restart on."""
    ours = Authority(tmp_path)
    good, wrong = ours.nss("127.0.0.1"), ours.nss("ups.example.org")
    more = {"user": "sec", "password": password(tmp_path, "sec"), "ca": str(ours.pem)}

    with capture_logs() as logs:
        async with upsd(certificate=good) as peer, listening(options(peer.port, **more)) as (_, heard):
            config = (peer.folder / "upsd.conf").read_text(encoding="utf-8")

            async def comes_back(text: str, logins: int, *, authenticated: bool) -> None:
                await peer.kill()
                (peer.folder / "upsd.conf").write_text(text, encoding="utf-8")
                forget(heard)
                await peer.start()
                await until(heard, Reading, lambda reading: reading.authenticated is authenticated)
                await peer.counts(logins)

            assert (await until(heard, Reading)).authenticated
            await comes_back(config.partition("CERTPATH")[0], 1, authenticated=False)
            await comes_back(config.replace(str(good[0]), str(wrong[0])), 0, authenticated=False)
            await comes_back(config, 1, authenticated=True)
    logged = [entry["event"] for entry in logs if entry["log_level"] == "error"]
    assert logged == ["tls_gone", "tls_not_believed"]


@pytest.mark.peer("upsd", "snmp-ups")
async def test_a_card_behind_nuts_own_snmp_driver() -> None:
    """An outage is seen through snmp-ups as it comes; who can forge the card's answers can forge these."""
    ups = SimUps(UpsBattery(runtime=((0.5, 900.0), (1.0, 400.0))), clock=boottime_s, load=lambda: 0.5)
    drivers: list[asyncio.subprocess.Process] = []

    async def bring(folder: Path) -> None:
        text = (
            f"port = 127.0.0.1:{agent.port}\n  community = public\n  snmp_version = v2c\n  mibs = apcc\n  pollfreq = 1"
        )
        (folder / "ups.conf").write_text(f"maxretry = 1\n[dsim]\n  driver = snmp-ups\n  {text}\n", encoding="utf-8")
        places = dict.fromkeys(("NUT_CONFPATH", "NUT_STATEPATH", "NUT_ALTPIDPATH"), str(folder))
        with (folder / "snmp-ups.log").open("ab") as log:
            argv = (program("snmp-ups"), "-F", "-a", "dsim", "-u", "root")
            child = await asyncio.create_subprocess_exec(*argv, env={**os.environ, **places}, stdout=log, stderr=log)
        drivers.append(child)
        async with asyncio.timeout(LIMIT_S):
            while not (folder / "snmp-ups-dsim").exists():
                assert child.returncode is None, (folder / "snmp-ups.log").read_text(encoding="utf-8")
                await asyncio.sleep(0.05)

    try:
        async with (
            SnmpAgent(ups.apc_table) as agent,
            upsd(bring=bring) as peer,
            listening(options(peer.port)) as (source, heard),
        ):
            reading = await until(heard, Reading)
            assert (reading.output_source, reading.charge_pct) == (OutputSource.UTILITY, 100)
            assert "SNMP v2c" in source._forgeable
            ups.utility = False
            reading = await until(heard, Reading, on_battery)
            assert reading.runtime_s is not None
            ups.utility = True
            await until(heard, Reading, on_utility)
    finally:
        for child in drivers:
            if child.returncode is None:
                child.kill()
            await child.wait()
