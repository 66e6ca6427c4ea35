"""Whether the host's own network is watched: where a source is on another host, and somebody asked for it."""

from pathlib import Path

import pytest

from powerguard.clock import boottime_s
from powerguard.daemon.wiring import Ports, build, network_watch
from powerguard.settings.load import load
from powerguard.settings.schema import Settings

WITNESS = "network_witness: true\n"


def settings(folder: Path, *hosts: str, more: str = "") -> Settings:
    sources = ", ".join(f"{{kind: snmp, host: '{host}'}}" for host in hosts)
    path = folder / "powerguard.yaml"
    path.write_text(f"mode: dry-run\nups:\n  rack-a: {{sources: [{sources}]}}\n{more}", encoding="utf-8")
    return load(path)


@pytest.mark.parametrize(
    ("hosts", "more", "watched"),
    [
        (("10.0.0.5",), WITNESS, True),
        (("ups.example", "127.0.0.1"), WITNESS, True),
        (("127.0.0.1",), WITNESS, False),
        (("::1",), WITNESS, False),
        (("localhost",), WITNESS, False),
        (("10.0.0.5",), "", False),
    ],
)
def test_the_way_to_others_is_watched(hosts: tuple[str, ...], more: str, watched: bool, tmp_path: Path) -> None:
    asked = settings(tmp_path, *hosts, more=more)
    assert (network_watch(asked, publish=lambda _: None, clock=boottime_s) is not None) is watched
    assert ("network" in build(asked, Ports(), lambda _: None).watchers) is watched


def test_the_simulator_brings_its_own_world(tmp_path: Path) -> None:
    """Whose sources are not on this machine's network at all."""
    parts = build(settings(tmp_path, "10.0.0.5", more=WITNESS), Ports(sources=lambda *_: []), lambda _: None)
    assert "network" not in parts.watchers
