"""Every family's own walk, served by net-snmp's snmpd over real UDP: probing finds it and decodes as the walk does."""

from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.snmp.verb import choose_for
from powerguard.ups.profiles.decode import decode
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.vocabulary import Missing
from powerguard.ups.profiles.walk import read_walk
from powerguard.ups.snmp.source import probe
from tests.peers.snmpd import AUTH, COMMUNITY, PRIV, USER, snmpd
from tests.ups.snmp.snmp_helpers import options, secret

pytestmark = pytest.mark.peer("snmpd")

PROFILES = load_profiles(None)
WALKS = sorted((Path(__file__).parents[1] / "ups" / "profiles" / "walks").rglob("*.walk"))
QUICK = {"apc-rpdu2", "xups", "rfc1628"}
"""One version each in the short run; all of them in all versions in the long one."""


def settings(version: int | str, folder: Path) -> dict[str, Any]:
    if version == 3:
        return {"version": 3, "user": USER, "auth": secret(folder, "a", AUTH), "priv": secret(folder, "p", PRIV)}
    return {"version": version, "community": secret(folder, "c", COMMUNITY)}


async def compared(path: Path, version: int | str, folder: Path) -> None:
    answers = read_walk(path)
    # snmpd keeps the system group for itself, and serves no NULL.
    served = {
        oid: raw
        for oid, raw in answers.items()
        if not isinstance(raw, Missing) and not oid.startswith("1.3.6.1.2.1.1.") and raw != b""
    }
    chosen, _notes = choose_for(PROFILES, served, None)
    want = decode(chosen, served)
    async with snmpd(served) as peer:
        report = await probe(
            options(peer.port, timeout_s=5.0, **settings(version, folder)), profiles=PROFILES, with_pdus=True
        )
    got = report.decoded
    assert report.profiles == tuple(profile.name for profile in chosen)
    assert (got.numbers, got.output_source, got.battery_status) == (
        want.numbers,
        want.output_source,
        want.battery_status,
    )
    assert (got.outlets, got.alarms, got.load_lines) == (want.outlets, want.alarms, want.load_lines)


@pytest.mark.parametrize(
    ("path", "version"),
    [
        (path, version)
        for path, version in zip((one for one in WALKS if one.stem in QUICK), (1, "2c", 3, 1), strict=False)
    ],
    ids=str,
)
async def test_a_family_over_the_wire(path: Path, version: int | str, tmp_path: Path) -> None:
    await compared(path, version, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, "2c", 3])
@pytest.mark.parametrize("path", WALKS, ids=[path.stem for path in WALKS])
async def test_every_family_over_the_wire(path: Path, version: int | str, tmp_path: Path) -> None:
    await compared(path, version, tmp_path)
