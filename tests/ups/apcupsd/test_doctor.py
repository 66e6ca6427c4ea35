"""What doctor says of an apcupsd, and that a host without one loads nothing of it."""

import subprocess
import sys

import pytest

from powerguard.cli.doctor.rivals import apcupsd_findings
from powerguard.core.model.events import OutputSource
from powerguard.effectors.host.findings import Finding
from tests.peers.hurried import now_s
from tests.peers.ports import free_port
from tests.ups.apcupsd.apcupsd_helpers import ONLINE, FakeApcupsd, apcupsd, options

pytestmark = pytest.mark.hurried


async def findings(peer: FakeApcupsd, **more: object) -> list[Finding]:
    _, found = await apcupsd_findings("ups.x", options(peer.port, **more), ups="rack-a")
    return found


def of(found: list[Finding], verdict: str) -> list[str]:
    return [finding.text for finding in found if finding.verdict == verdict]


async def test_a_good_one() -> None:
    async with apcupsd() as peer:
        reading, found = await apcupsd_findings("ups.x", options(peer.port), ups="rack-a")
    assert reading is not None
    assert reading.output_source is OutputSource.UTILITY
    assert len(found) == 1
    assert of(found, "PASS")[0].startswith("utility, charge 100 %, load 40 %, runtime 1800 s (apcupsd rack-a; ")


async def test_everything_that_is_doubtful() -> None:
    async with apcupsd(LOADPCT="") as peer:
        peer.every_s, peer.looked_s, peer.flags = None, now_s() - 42, ONLINE | 0x600
        warned = of(await findings(peer), "WARN")
    assert len(warned) == 4
    assert "POLLTIME" in warned[0]
    assert "net slave" in warned[1]
    assert "SHUTTING DOWN" in warned[2]
    assert "reports no load" in warned[3]


@pytest.mark.parametrize(
    ("retpct", "verdicts"),
    [
        ("0.0 Percent", ["PASS", "WARN"]),
        ("24.9 Percent", ["PASS", "WARN"]),
        ("25.0 Percent", ["PASS", "PASS"]),
        ("90.0 Percent", ["PASS", "WARN"]),
        ("", ["PASS"]),
        ("N/A", ["PASS"]),
        ("-15.0 Percent", ["PASS"]),
        ("nan", ["PASS"]),
    ],
)
async def test_charge_at_which_the_output_returns(retpct: str, verdicts: list[str]) -> None:
    """At an empty battery, hosts boot into the next outage; at a full one, they stay off for hours."""
    async with apcupsd(RETPCT=retpct) as peer:
        assert [finding.verdict for finding in await findings(peer)] == verdicts


async def test_neither_online_nor_on_battery() -> None:
    """In bypass and off, apcupsd sets neither bit: it takes that for utility, and an outage would not be seen."""
    async with apcupsd() as peer:
        peer.flags = ONLINE & ~0x8
        assert "an outage would not be seen" in of(await findings(peer), "FAIL")[0]


async def test_one_that_gives_no_reading() -> None:
    async with apcupsd(UPSNAME="rack-b") as peer:
        assert "another UPS, or another port" in of(await findings(peer, name="rack-a"), "FAIL")[0]
        peer.flags = ONLINE | 0x100
        assert "COMMLOST" in of(await findings(peer), "FAIL")[0]
    reading, found = await apcupsd_findings("ups.x", options(free_port()), ups="rack-a")
    assert reading is None
    assert "connection refused" in of(found, "FAIL")[0]


def test_nothing_is_loaded_without_one() -> None:
    """The daemon has 80 MB: what reads apcupsd is loaded where the settings name one."""
    code = (
        "import sys; import powerguard.daemon.wiring; "
        "print([name for name in sys.modules if name.endswith(('apcupsd.source', 'apcupsd.protocol'))])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
