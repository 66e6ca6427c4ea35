"""The scrape: what Prometheus and its own linter make of it, and that unknown is absent rather than zero."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from powerguard.core.drill.rehearsal import RESULTS
from powerguard.core.model.actions import SyncFilesystems
from powerguard.core.model.events import Done
from powerguard.core.model.policy import FeedPolicy, Mode
from powerguard.core.model.state import Battery, Feed, GpuCap, Maintenance, Online, State, Supply
from powerguard.daemon.observe.metrics import LIFETIME, OPENMETRICS, SECTIONS, TEXT, DaemonCollector, reference, scrape
from powerguard.daemon.observe.port import BmcView, Daemon
from powerguard.ups.snmp.traps import TrapCounts
from tests.daemon.watched import (
    DAY_S,
    NOW_S,
    PHASES,
    WALL_S,
    committed,
    drilled,
    half_fed,
    in_mode,
    reading,
    running_drill,
    scene,
    shared,
    taught,
)
from tests.peers import require

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
Labels = frozenset[tuple[str, str]]


def scraped(daemon: Daemon) -> dict[tuple[str, Labels], float]:
    body, kind = scrape(DaemonCollector(daemon), "text/plain")
    assert kind == TEXT
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def value(daemon: Daemon, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    return scraped(daemon).get((f"powerguard_{name}", frozenset((labels or {}).items())))


@pytest.mark.parametrize("phase", PHASES)
def test_one_phase_holds(phase: str) -> None:
    """All six are always there, so that an alert on any of them has a series to look at."""
    found = {
        dict(labels)["phase"]: number
        for (name, labels), number in scraped(scene(phase)).items()
        if name == "powerguard_phase"
    }
    assert found == {name: float(name == phase) for name in PHASES}


@pytest.mark.parametrize("make", [scene, taught])
@pytest.mark.peer("promtool")
@pytest.mark.parametrize("phase", PHASES)
def test_promtool_has_nothing_to_say(phase: str, make: Callable[[str], Daemon]) -> None:
    """Prometheus' own linter, in every phase."""
    body, _ = scrape(DaemonCollector(make(phase)), "")
    ended = subprocess.run([require("promtool"), "check", "metrics"], input=body, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, b"")


@pytest.mark.parametrize("phase", PHASES)
def test_openmetrics_parses(phase: str) -> None:
    """The strict parser refuses interleaved families and counters without _total."""
    body, kind = scrape(DaemonCollector(scene(phase)), "application/openmetrics-text; version=1.0.0")
    assert kind == OPENMETRICS
    assert body.endswith(b"# EOF\n")
    assert len(list(parse_openmetrics(body.decode()))) > 40
    assert b"_created" not in body


def test_unknown_is_absent() -> None:
    """A UPS that is gone must not read as an empty battery."""
    daemon = scene()
    daemon.state = State(feed=Feed(), battery=Battery())
    daemon.bmc = None
    daemon.last_outage = None
    names = {name for name, _ in scraped(daemon)}
    for name in (
        "ups_battery_charge_ratio",
        "ups_load_ratio",
        "ups_battery_runtime_seconds",
        "ups_battery_runtime_effective_seconds",
        "ups_status",
        "ups_on_battery",
        "budget_slack_seconds",
        "bmc_up",
        "bmc_power_restore_policy_ok",
        "last_outage_outcome",
        "deadline_timestamp_seconds",
        "maintenance_until_timestamp_seconds",
    ):
        assert f"powerguard_{name}" not in names


def test_a_bmc_that_was_not_asked_yet_is_not_down() -> None:
    """Else an alert would fire at each start of the daemon."""
    daemon = scene()
    daemon.bmc = BmcView(kind="ipmi-lan")
    assert value(daemon, "bmc_up") is None
    daemon.bmc = BmcView(kind="ipmi-lan", error="no answer")
    assert value(daemon, "bmc_up") == 0.0
    daemon.bmc = BmcView(kind="ipmi-lan", policy="always-off", error="no answer", checked_at_s=NOW_S)
    assert value(daemon, "bmc_up") == 0.0
    daemon.bmc = BmcView(kind="ipmi-lan", policy="always-off", checked_at_s=NOW_S)
    assert value(daemon, "bmc_up") == 1.0


def test_numbers_are_in_base_units() -> None:
    """Percent becomes a ratio, moments become Unix seconds."""
    daemon = scene("on_battery")
    assert value(daemon, "ups_battery_charge_ratio", {"ups": "rack-a"}) == 0.71
    assert value(daemon, "ups_load_ratio", {"ups": "rack-a"}) == 0.62
    assert value(daemon, "outage_start_timestamp_seconds") == WALL_S - 6.0
    assert value(daemon, "ups_last_reading_timestamp_seconds", {"ups": "rack-a", "source": "snmp:10.0.0.5"}) == (
        WALL_S - 0.5
    )
    deadline = value(daemon, "deadline_timestamp_seconds")
    assert deadline is not None
    assert deadline > WALL_S


@pytest.mark.parametrize("phase", ["on_battery", "recovery"])
def test_no_deadline_is_forecast_of_what_was_called_off(phase: str) -> None:
    daemon = scene(phase)
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, supply=Supply.BATTERY))
    assert value(daemon, "deadline_timestamp_seconds") is not None
    assert not isinstance(daemon.state.phase, Online)
    outage = replace(daemon.state.phase.outage, aborted_by="root: diesel")
    daemon.state = replace(daemon.state, phase=replace(daemon.state.phase, outage=outage))
    assert value(daemon, "deadline_timestamp_seconds") is None


@pytest.mark.parametrize("phase", ["recovery", "holding"])
@pytest.mark.parametrize(("supply", "has"), [(Supply.UTILITY, False), (Supply.UNKNOWN, False), (Supply.BATTERY, True)])
def test_a_host_that_is_back_or_holds_has_a_deadline_only_on_battery(phase: str, supply: Supply, *, has: bool) -> None:
    """With utility and a battery that is still empty, its crash would count as a power-off in order."""
    daemon = scene(phase)
    feed, battery = replace(daemon.state.feed, supply=supply), replace(daemon.state.battery, left=0.05)
    daemon.state = replace(daemon.state, feed=feed, battery=battery)
    assert (value(daemon, "deadline_timestamp_seconds") is not None) is has


@pytest.mark.parametrize(
    ("phase", "other", "has"),
    [("holding", Supply.UTILITY, False), ("holding", Supply.BATTERY, True), ("shutdown", Supply.UTILITY, True)],
)
def test_while_another_ups_feeds_the_host_it_has_a_deadline_only_after_the_commit(
    phase: str, other: Supply, *, has: bool
) -> None:
    assert (value(half_fed(other, phase), "deadline_timestamp_seconds") is not None) is has


@pytest.mark.parametrize(("phase", "has"), [("on_battery", False), ("holding", False), ("shutdown", True)])
def test_maintenance_has_a_deadline_only_after_the_commit(phase: str, *, has: bool) -> None:
    """Else a host that loses its power in maintenance would count as powered off in order."""
    daemon = scene(phase)
    assert value(daemon, "deadline_timestamp_seconds") is not None
    maintenance = Maintenance(until_s=daemon.now_s + 900.0, reason="fan", who="a")
    daemon.state = replace(daemon.state, maintenance=maintenance)
    assert (value(daemon, "deadline_timestamp_seconds") is not None) is has


@pytest.mark.parametrize("mode", [Mode.DRY_RUN, Mode.REHEARSE])
def test_a_power_off_that_was_only_recorded_has_no_deadline(mode: Mode) -> None:
    """Else a rehearsal's countdown goes on below zero until utility is back, on a host that stays on."""
    assert value(committed(mode), "deadline_timestamp_seconds") is None


def test_status_flags_are_nuts() -> None:
    """Rules for a NUT exporter port by renaming."""
    daemon = scene("on_battery")
    assert value(daemon, "ups_status", {"ups": "rack-a", "flag": "OB"}) == 1
    assert value(daemon, "ups_status", {"ups": "rack-a", "flag": "OL"}) == 0


def test_a_reason_is_a_series() -> None:
    """Every reason stands at 0 beforehand; the one that holds is 1."""
    daemon = scene()
    assert value(daemon, "degraded") == 0
    assert value(daemon, "degraded_reason", {"reason": "undersized"}) == 0
    daemon = in_mode(daemon, Mode.DRY_RUN)
    assert value(daemon, "armed") == 0
    assert value(in_mode(daemon, Mode.REHEARSE), "armed") == 0, "everything else is done, and not the power-off"
    assert value(daemon, "degraded_reason", {"reason": "dry_run"}) == 1


def test_lifetime_counters_come_from_the_journal() -> None:
    """They survive the power-off; what the journal has not counted yet is 0, not absent."""
    daemon = scene()
    assert value(daemon, "outages_total", {"outcome": "ridden_through"}) == 3
    assert value(daemon, "outages_total", {"outcome": "dirty"}) == 0
    assert value(daemon, "on_battery_seconds_total") == 321.5
    daemon = replace(daemon, journal_counters={})
    assert value(daemon, "shutdowns_total") == 0
    assert value(daemon, "ups_transfers_total", {"ups": "rack-a"}) == 0
    known = {"outages_dirty", "shutdowns", "ups_transfers", "on_battery_seconds"}
    assert known <= set(LIFETIME)


def test_a_transfer_of_the_host_is_counted_for_no_single_one_of_several_upses() -> None:
    """What the journal counts are outages of the host: the first UPS may not have transferred at all."""
    daemon = scene()
    feeds = tuple(FeedPolicy(policy=replace(daemon.policy, ups=name)) for name in ("rack-a", "rack-b"))
    daemon.policy = replace(daemon.policy, feeds=feeds)
    assert value(daemon, "ups_transfers_total", {"ups": "rack-a"}) is None
    assert value(daemon, "ups_transfers_total", {"ups": "rack-a + rack-b"}) == 4


def test_what_was_learned() -> None:
    """Presumed or measured is a number of its own: a default of 0.75 must not look like a measurement of 0.75."""
    assert value(scene(), "ups_battery_health_measured", {"ups": "rack-a"}) == 0
    assert value(scene(), "ups_battery_health_timestamp_seconds", {"ups": "rack-a"}) is None
    assert value(scene(), "need_seconds", {"need": "stop", "name": ""}) is None
    assert value(scene(), "ups_battery_recharge_seconds", {"ups": "rack-a"}) == 8 * 3600.0
    daemon = taught()
    assert value(daemon, "ups_battery_health_ratio", {"ups": "rack-a"}) == 0.8008
    assert value(daemon, "ups_battery_health_measured", {"ups": "rack-a"}) == 1
    assert value(daemon, "ups_battery_health_timestamp_seconds", {"ups": "rack-a"}) == WALL_S - 70 * DAY_S
    assert value(daemon, "ups_battery_health_error_ratio", {"ups": "rack-a"}) == 0.05
    assert value(daemon, "ups_battery_recharge_seconds", {"ups": "rack-a"}) == 22000.0
    assert value(daemon, "need_seconds", {"need": "stop", "name": ""}) == 42.0
    assert value(daemon, "need_seconds", {"need": "checkpoint", "name": "llm"}) == 21.375
    assert value(daemon, "need_samples", {"need": "checkpoint", "name": "llm"}) == 4
    assert value(taught("holding"), "ups_battery_runtime_slope_ratio", {"ups": "rack-a"}) == 1.8


def test_a_health_that_expired_or_does_not_count_is_not_measured() -> None:
    daemon = taught()
    daemon.now_s += 400 * DAY_S
    assert value(daemon, "ups_battery_health_measured", {"ups": "rack-a"}) == 0
    daemon = taught()
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, reading=reading(replace_battery=True)))
    assert value(daemon, "ups_battery_health_measured", {"ups": "rack-a"}) == 0


def test_a_cap_that_stands_is_seen() -> None:
    daemon = scene()
    assert value(daemon, "gpu_cap_active") == 0
    daemon.state = replace(daemon.state, owed=(GpuCap(outage="o", at_s=NOW_S),))
    assert value(daemon, "gpu_cap_active") == 1


def test_a_drill_is_reported_by_its_moment_and_its_result() -> None:
    """Nothing before the first; then when it ended and how, and whether one runs."""
    assert value(scene(), "drill_last_timestamp_seconds") is None
    assert value(scene(), "drill_result", {"result": "passed"}) is None
    assert value(scene(), "drill_running") == 0
    daemon = drilled("failed", age_s=3 * DAY_S)
    assert value(daemon, "drill_last_timestamp_seconds") == WALL_S - 3 * DAY_S
    assert value(daemon, "drill_duration_seconds") == 87.3
    counts = {result: value(daemon, "drill_result", {"result": result}) for result in RESULTS}
    assert counts == {"passed": 0, "failed": 1, "interrupted": 0, "recorded": 0}
    assert value(running_drill(), "drill_running") == 1


def test_histogram_is_cumulative() -> None:
    """Every bucket holds all that took no longer; count and sum agree with it."""
    daemon = scene()
    for took_s in (0.4, 3.0, 700.0):
        action = SyncFilesystems(id="a", by_s=NOW_S, outage="o")
        daemon.actions.count(Done(at_s=NOW_S, action=action, took_s=took_s))
    name = "action_duration_seconds"
    assert value(daemon, f"{name}_bucket", {"action": "sync", "le": "0.5"}) == 1
    assert value(daemon, f"{name}_bucket", {"action": "sync", "le": "5"}) == 2
    assert value(daemon, f"{name}_bucket", {"action": "sync", "le": "+Inf"}) == 3
    assert value(daemon, f"{name}_count", {"action": "sync"}) == 3
    assert value(daemon, f"{name}_sum", {"action": "sync"}) == pytest.approx(703.4)
    assert value(daemon, "actions_total", {"action": "sync", "result": "done"}) == 3


def test_no_label_holds_an_outage() -> None:
    """An id in a label is a new series for each outage, for ever."""
    for phase in PHASES:
        body, _ = scrape(DaemonCollector(scene(phase)), "")
        assert b"6f1d2c3b" not in body


def test_reference_is_made_from_the_table() -> None:
    """python -m powerguard.daemon.observe.metrics > docs/reference/metrics.md"""
    assert PAGE.read_text(encoding="utf-8") == reference()


def test_every_family_is_there() -> None:
    """A family that no scene ever shows would be a promise that nobody kept."""
    seen = {name for phase in PHASES for make in (scene, taught) for name, _ in scraped(make(phase))}
    seen |= {name for name, _ in scraped(drilled())}
    seen |= {name for name, _ in scraped(replace(scene(), journal_counters={"lost_gpu": 8.0}))}
    seen |= {name for name, _ in scraped(replace(scene(), traps=TrapCounts(last_at_s={"rack-a": NOW_S})))}
    seen |= {name for name, _ in scraped(shared())}
    absent_here = {"maintenance_until_timestamp_seconds", "ups_output_off_seconds"}
    absent_here |= {
        "ups_output_power_watts",
        "ups_battery_temperature_celsius",
        "last_outage_recovery_duration_seconds",
    }
    absent_here |= {"checkpoint_last_success_timestamp_seconds"} - {n.removeprefix("powerguard_") for n in seen}
    for families in SECTIONS.values():
        for family in families:
            if family.name not in absent_here:
                name = f"powerguard_{family.name}" + ("_count" if family.kind == "histogram" else "")
                assert name in seen
