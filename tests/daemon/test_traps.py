"""The trap port in the daemon: whose sources a hint polls, what metrics say of it, and a port that cannot be had."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from powerguard.cli.doctor.rivals import trap_findings
from powerguard.cli.render import Paint
from powerguard.cli.status import describe
from powerguard.clock import boottime_s
from powerguard.daemon.observe.metrics import DaemonCollector, scrape
from powerguard.daemon.observe.port import Daemon
from powerguard.daemon.observe.status import status
from powerguard.daemon.wiring import Ports, build, trap_listener, trap_names
from powerguard.settings.load import SettingsError, load
from powerguard.settings.schema import Settings
from powerguard.ups.base import Publish
from powerguard.ups.snmp.traps import RESULTS, TrapCounts
from tests.daemon.watched import NOW_S, WALL_S, scene
from tests.ups.snmp.trap_helpers import free_port

SETTINGS = """\
mode: dry-run
ups:
  rack-a: {sources: [{kind: snmp, host: 127.0.0.1}]}
  rack-b: {sources: [{kind: snmp, host: 10.9.8.7}]}
feeds: {supplies: [rack-a]}
"""


class Poller:
    """A source that only counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def run(self, publish: Publish) -> None:
        await asyncio.Event().wait()

    def poll_now(self) -> None:
        self.asked += 1


def settings(folder: Path, traps: str) -> Settings:
    path = folder / "powerguard.yaml"
    path.write_text(SETTINGS + traps, encoding="utf-8")
    return load(path)


def families(daemon: Daemon) -> dict[str, list[tuple[dict[str, str], float]]]:
    body, _ = scrape(DaemonCollector(daemon), "text/plain")
    return {
        family.name.removeprefix("powerguard_"): [(sample.labels, sample.value) for sample in family.samples]
        for family in parse_text(body.decode())
        if "trap" in family.name
    }


def test_without_a_port_there_are_no_series() -> None:
    """Absent, not nought: nobody counts what nobody listens for."""
    result = families(scene())
    assert len(result) == 5
    assert all(samples == [] for samples in result.values())


def test_every_result_has_a_series_from_the_start() -> None:
    """So that a rate sees the very first forged trap."""
    counts = TrapCounts(last_at_s={"rack-a": NOW_S - 60}, answered=2)
    counts.results["unknown_sender"] = 3
    outcome = families(replace(scene(), traps=counts))
    assert {labels["result"]: value for labels, value in outcome["traps"]} == {
        **dict.fromkeys(RESULTS, 0.0),
        "unknown_sender": 3.0,
    }
    assert outcome["traps_listening"] == [({}, 0.0)]
    assert (outcome["traps_dropped"], outcome["traps_answered"]) == ([({}, 0.0)], [({}, 2.0)])
    assert outcome["trap_last_timestamp_seconds"] == [({"ups": "rack-a"}, WALL_S - 60)]


def test_a_hint_polls_every_source_of_the_ups_that_it_names(tmp_path: Path) -> None:
    mine, second, other = Poller(), Poller(), Poller()
    sources = [("rack-a", "card", mine), ("rack-a", "upsd", second), ("rack-b", "card", other)]
    listener = trap_listener(settings(tmp_path, "traps: {}\n"), sources, clock=boottime_s, wall=lambda: 1.0)
    assert listener is not None
    listener._poll("rack-a")
    assert (mine.asked, second.asked, other.asked) == (1, 1, 0)
    assert {card.ups: card.hosts for card in listener._cards} == {"rack-a": ("127.0.0.1",), "rack-b": ("10.9.8.7",)}


def test_no_port_unless_it_is_set(tmp_path: Path) -> None:
    parts = build(settings(tmp_path, ""), Ports(sources=lambda *_: []), lambda _: None)
    assert ("traps" in parts.watchers, parts.traps) == (False, None)
    parts = build(settings(tmp_path, "traps: {port: 1999}\n"), Ports(sources=lambda *_: []), lambda _: None)
    assert "traps" in parts.watchers
    assert parts.traps == TrapCounts(where="0.0.0.0 port 1999")


def test_a_ups_that_the_settings_do_not_have(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no UPS rack-x under ups \(known: rack-a, rack-b\)"):
        settings(tmp_path, "traps: {addresses: {rack-x: [10.0.0.1]}}\n")


async def test_a_port_that_another_program_has_is_reported_and_tried_again(tmp_path: Path) -> None:
    """It protects the host all the same: polling goes on."""
    port = free_port()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", port))
        result = settings(tmp_path, f"traps: {{listen: 127.0.0.1, port: {port}}}\n")
        parts = build(result, Ports(sources=lambda *_: []), lambda _: None)
        task = asyncio.get_running_loop().create_task(parts.watchers["traps"]())  # type: ignore[arg-type]
        assert parts.traps is not None
        async with asyncio.timeout(60):
            while "in use" not in parts.traps.closed_because:  # noqa: ASYNC110 - the listener tells nobody but its counters
                await asyncio.sleep(0.05)
        assert not task.done()
        assert parts.traps.listening is None
    async with asyncio.timeout(60):
        while parts.traps.listening is None:  # noqa: ASYNC110 - the listener tells nobody but its counters
            await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    assert parts.traps.listening is None


def test_our_profiles_name_the_traps_of_their_families() -> None:
    """RFC 1628's and APC's onBattery, to begin with."""
    names = trap_names()
    assert names["1.3.6.1.2.1.33.2.1"] == names["1.3.6.1.4.1.318.0.5"] == "on_battery"


def test_status_has_the_port() -> None:
    """Open or not, and why not; what came there; when each UPS's card last spoke."""
    assert traps_of(scene()) is None
    counts = TrapCounts(where="10.0.0.20 port 1162", closed_because="Address already in use")
    result = traps_of(replace(scene(), traps=counts))
    assert (result["listening"], result["because"]) == (False, "Address already in use")
    assert describe_traps(result) == "NOT listening at 10.0.0.20 port 1162: Address already in use"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        counts.listening = port
        counts.results["hint"] = 3
        counts.results["repeated"] = 9
        counts.results["unknown_sender"] = 2
        counts.last_at_s["rack-a"] = NOW_S - 5.0
        result = traps_of(replace(scene(), traps=counts))
        assert (result["listening"], result["because"], result["last_at"]) == (True, "", {"rack-a": WALL_S - 5.0})
        assert describe_traps(result) == (
            "listening at 10.0.0.20 port 1162; 3 triggered a poll (last: rack-a 5.0 s ago); 2 unknown sender"
        )


def traps_of(daemon: Daemon) -> Any:  # noqa: ANN401 - JSON
    return status(daemon)["traps"]


def describe_traps(answer: dict[str, Any]) -> str:
    shown = {**status(scene()), "traps": answer}
    line = next(line for line in describe(shown, Paint()) if line.lstrip().startswith("traps"))
    return line.partition("traps")[2].strip()


async def test_a_port_that_cannot_be_had_says_why(tmp_path: Path) -> None:
    """Status and doctor have the kernel's own word."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        asked = settings(tmp_path, f"traps: {{listen: 127.0.0.1, port: {port}}}\n")
        listener = trap_listener(asked, [("rack-a", "snmp", Poller())], clock=boottime_s, wall=lambda: WALL_S)
        assert listener is not None
        with pytest.raises(OSError, match="in use"):
            await listener.run()
    assert listener.counts.closed_because == "Address already in use"
    assert listener.counts.where == f"127.0.0.1 port {port}"


@pytest.mark.parametrize(
    ("results", "verdict", "words"),
    [
        ({}, "PASS", "no trap of a UPS has arrived yet"),
        ({"hint": 4, "unknown_sender": 2}, "PASS", "4 traps triggered a poll"),
        ({"unknown_sender": 2}, "WARN", "2 datagrams came from unknown addresses"),
        ({"wrong_community": 1}, "WARN", "another community"),
        ({"unknown_engine": 1}, "WARN", "engine ids that are not in the settings"),
    ],
)
def test_doctor_says_what_is_wrong_with_the_traps(results: dict[str, int], verdict: str, words: str) -> None:
    """Traps that come and are worth nothing are a mistake in the settings or the card; none at all may be calm."""
    given = {"listen": "0.0.0.0 port 1162", "listening": True, "because": "", "results": TrapCounts().results | results}
    (finding,) = trap_findings(given)
    assert (finding.verdict, words in finding.text) == (verdict, True)


def test_doctor_warns_of_a_port_that_is_not_open_and_is_silent_where_none_is_wanted() -> None:
    assert trap_findings(None) == []
    given = {"listen": "0.0.0.0 port 162", "listening": False, "because": "Permission denied", "results": {}}
    (finding,) = trap_findings(given)
    assert finding.verdict == "WARN"
    assert "0.0.0.0 port 162: Permission denied" in finding.text
    assert "traps.port" in finding.fix
