"""A daemon that reads its UPS through a real upsd: it sees an outage and its end, and loads no SNMP library for it."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerguard.cli.doctor.rivals import nut_findings
from powerguard.core.model.state import OnBattery, Online, Phase
from powerguard.daemon.loop import Loop
from powerguard.daemon.wiring import assemble
from powerguard.settings.load import load
from tests.peers.nut import BATTERY, UTILITY, upsd
from tests.ups.nut.nut_helpers import FakeUpsd, options
from tests.ups.snmp.snmp_helpers import secret

SETTINGS = """\
mode: dry-run
ups:
  rack-a:
    sources:
      - {{kind: nut, host: 127.0.0.1, port: {port}, name: dsim}}
    runtime_table: {{50: 5400, 100: 2400}}
bmc: {{kind: none}}
trainer_sockets: null
control: {{socket: {folder}/powerguard.sock}}
journal: {{path: {folder}/journal.sqlite}}
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pg nut-", dir="/tmp") as name:
        yield Path(name)


def write(folder: Path, port: int) -> Path:
    path = folder / "powerguard.yaml"
    path.write_text(SETTINGS.format(port=port, folder=folder), encoding="utf-8")
    return path


async def phase(daemon: Loop, kind: type[Phase]) -> None:
    async with asyncio.timeout(60):
        while not isinstance(daemon.state.phase, kind):  # noqa: ASYNC110 - the loop tells nobody
            await asyncio.sleep(0.02)


@pytest.mark.peer("upsd", "dummy-ups")
async def test_an_outage_is_seen_through_upsd(folder: Path) -> None:
    async with upsd() as peer:
        config = write(folder, peer.port)
        daemon = assemble(load(config), config=config)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(daemon.run())
            async with asyncio.timeout(60):
                while daemon.state.feed.reading is None:  # noqa: ASYNC110 - likewise
                    await asyncio.sleep(0.02)
            assert isinstance(daemon.state.phase, Online)
            peer.change(BATTERY)
            await phase(daemon, OnBattery)
            reading = daemon.state.feed.reading
            assert reading is not None
            assert (reading.source, reading.runtime_s) == (f"nut:dsim@127.0.0.1:{peer.port}", 1700)
            peer.change(UTILITY)
            await phase(daemon, Online)
            daemon.stop()
            await running


async def test_settings_that_are_refused_cost_no_login(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A primary that saw us leave would not wait for this host: a mistake in the file must not look like that."""
    async with FakeUpsd().serving() as peer:
        config = write(folder, peer.port)
        word = secret(folder, "password", "word of the tests")
        login = f"name: dsim, timeout_s: 5, user: pg, password: {{file: '{word.file}'}}"
        config.write_text(config.read_text().replace("name: dsim", login), encoding="utf-8")
        daemon = assemble(load(config), config=config)
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            running = tasks.create_task(daemon.run())
            while not peer.said("LOGIN"):  # noqa: ASYNC110 - the peer tells nobody
                await asyncio.sleep(0.02)
            config.write_text(config.read_text() + "bugdet: {reserve_s: 1}\n", encoding="utf-8")
            daemon.reload()
            while daemon.settings_ok:  # noqa: ASYNC110 - nor does the loop
                await asyncio.sleep(0.02)
            heard = len(peer.requests)
            while len(peer.requests) < heard + 5:  # noqa: ASYNC110 - polls that came after it, by whatever connection
                await asyncio.sleep(0.02)
            assert (peer.connections, peer.said("LOGIN"), peer.said("LOGOUT")) == (1, 1, 0)
            assert "settings_refused" in capsys.readouterr().out
            daemon.stop()
            await running
        await peer.hears("LOGOUT")
        assert peer.said("LOGOUT") == 1


def test_a_host_without_snmp_does_not_load_it(folder: Path) -> None:
    """pysnmp and its ciphers take 20 MB of resident memory."""
    code = (
        "import sys; from pathlib import Path; from powerguard.daemon.wiring import Ports, build;"
        "from powerguard.settings.load import load;"
        "parts = build(load(Path(sys.argv[1])), Ports(), lambda _: None);"
        "print([type(source).__name__ for _, _, source in parts.sources], 'pysnmp' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, str(write(folder, 3493))]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ended.stdout.strip(), ended.returncode) == ("['NutSource'] False", 0), ended.stderr


async def test_doctor_says_what_a_upsd_is_good_for(tmp_path: Path) -> None:
    """Readings that could be forged, no login, a driver that polls too slowly, nobody there: each a finding."""
    values = {"driver.name": "snmp-ups", "ups.status": "OL", "battery.charge": "100", "battery.runtime": "1800"}
    async with FakeUpsd(values).serving() as peer:
        reading, found = await nut_findings("ups.a", options(peer.port), ups="a", is_shared=False, cuts=False)
        assert reading is not None
        listed = [(finding.verdict, finding.text) for finding in found]
        assert listed[0] == ("PASS", listed[0][1])
        assert "utility, charge 100 %, no load, runtime 1800 s (nut; " in listed[0][1]
        assert [verdict for verdict, _ in listed[1:]] == ["WARN"] * 4
        texts = " | ".join(text for _, text in listed)
        for part in ("could be forged: snmp-ups reads", "no login, so a NUT primary", "no load", "every 30 s only"):
            assert part in texts
        more = {"user": "pg", "password": secret(tmp_path, "password", "word of the tests")}
        _, found = await nut_findings("ups.a", options(peer.port, **more), ups="a", is_shared=False, cuts=False)
        assert "no TLS; logs in as pg" in found[0].text
        assert "version 3" in next(each.fix for each in found if "forged" in each.text)
    async with FakeUpsd({**values, "driver.name": "usbhid-ups"}).serving() as cable:
        _, found = await nut_findings("ups.a", options(cable.port), ups="a", is_shared=False, cuts=False)
        assert not any("forged" in each.text for each in found), "a cable, and an upsd on this host: no network"
    for listed, verdict in (("10", "WARN"), ("30", "PASS")):
        async with FakeUpsd({**values, "battery.charge.restart": listed}).serving() as other:
            _, found = await nut_findings("ups.a", options(other.port), ups="a", is_shared=False, cuts=False)
            about = [finding for finding in found if "switches its output on again" in finding.text]
            assert [finding.verdict for finding in about] == [verdict]
            assert ("upsrw -s battery.charge.restart=25" in about[0].fix) is (verdict == "WARN")
    reading, found = await nut_findings("ups.a", options(peer.port), ups="a", is_shared=False, cuts=False)
    assert (reading, [finding.verdict for finding in found]) == (None, ["FAIL"])
    assert "cannot connect to upsd" in found[0].text
    assert "is upsd running?" in found[0].fix


async def test_a_refusal_of_upsd_has_its_fix_in_its_words() -> None:
    """The address is right when upsd itself answers: no other remedy stands next to that of the driver."""
    async with FakeUpsd().serving() as peer:
        peer.answer = lambda _upsd, _words, _writer: b"ERR DRIVER-NOT-CONNECTED\n"
        _, (found,) = await nut_findings("ups.a", options(peer.port), ups="a", is_shared=False, cuts=False)
    assert "upsdrvctl start" in found.text
    assert (found.verdict, found.fix) == ("FAIL", "")


@pytest.mark.parametrize(
    ("status", "verdict", "part"),
    [
        ("OL CHRG", "PASS", ""),
        ("OB DISCHRG", "PASS", ""),
        ("", "FAIL", "does not report its output source, so an outage would not be seen"),
        ("CHRG LB", "FAIL", "does not report its output source, so an outage would not be seen"),
        ("OFF", "FAIL", "does not report its output source, so an outage would not be seen"),
        ("OL BYPASS", "FAIL", "on bypass or in eco mode"),
    ],
)
async def test_doctor_does_not_pass_a_ups_whose_outage_would_not_be_seen(status: str, verdict: str, part: str) -> None:
    """ups.status is empty with some drivers and cards, in an outage as well."""
    values = {"driver.name": "usbhid-ups", "ups.status": status, "battery.charge": "100", "ups.load": "0"}
    async with FakeUpsd(values).serving() as peer:
        _, found = await nut_findings("ups.a", options(peer.port), ups="a", is_shared=False, cuts=False)
    assert (found[0].verdict, part in found[0].text) == (verdict, True)
    assert bool(found[0].fix) is (verdict == "FAIL")
