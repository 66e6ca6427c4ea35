"""What doctor says of a UPS that other hosts hang on."""

from datetime import date
from typing import Any

import pytest

from powerguard.cli.doctor.rivals import clients_findings, shared_findings
from powerguard.core.model.events import OutputSource, OwnLoad, OwnSource, Reading
from powerguard.core.model.state import Battery, Feed, OwnLoadReport, State
from powerguard.settings.policy import policy as make_policy
from powerguard.settings.schema import Settings

SNMP: dict[str, Any] = {
    "kind": "snmp",
    "host": "10.0.0.5",
    "version": 3,
    "user": "pg",
    "auth": {"file": "/auth"},
    "priv": {"file": "/priv"},
}
READING = Reading(at_s=10.0, ups="rack-a", source="snmp", output_source=OutputSource.UTILITY, load_pct=60.0)


def _found(ups: dict[str, Any], *, watts: float | None = None, **more: Any) -> list[tuple[str, str]]:  # noqa: ANN401
    given = {"mode": "armed", "ups": {"rack-a": {"sources": [SNMP], "rating_w": 5000, **ups}}, **more}
    settings = Settings.model_validate(given)
    policy = make_policy(settings, boot_id="boot-one", today=date(2026, 11, 26))
    state = State(feed=Feed(reading=READING), battery=Battery(load=0.6))
    loads = () if watts is None else (OwnLoad(at_s=10.0, source=OwnSource.BMC, watts=watts),)
    return [(each.verdict, each.text) for each in shared_findings(settings, policy, state, loads, 10.0)]


def test_a_ups_that_carries_more_than_this_host_draws() -> None:
    """3000 W against 900 W of this host: a warning; 3000 W against 2900 W: nothing to say."""
    ((verdict, text),) = _found({}, watts=900.0)
    assert verdict == "WARN"
    assert text == "the UPS carries 3000 W, and this host draws 900 W (bmc)"
    assert _found({}, watts=2900.0) == []
    assert _found({}) == []


@pytest.mark.parametrize(
    ("watts", "more", "verdict", "text"),
    [
        (900.0, {}, "PASS", "this host draws 900 W of the UPS's load, by its bmc"),
        (None, {}, "WARN", "nothing measures what this host draws"),
        (None, {"gpu": {"kind": "nvml"}}, "PASS", "the GPUs' power measures"),
        (-3.0, {}, "WARN", "bmc: implausible: -3 W"),
    ],
)
def test_what_measures_this_host(watts: float | None, more: dict[str, Any], verdict: str, text: str) -> None:
    """Without a measurement the escalation does not climb, and doctor says so beforehand."""
    found = _found({"shared": {"hosts": 3}}, watts=watts, **more)
    assert [(each, text in words) for each, words in found] == [(verdict, True)]


def test_more_hosts_than_a_card_answers() -> None:
    """Ten readers are as many as a network card answers; upsd has no such limit."""
    found = [text for _, text in _found({"shared": {"hosts": 11}}, watts=900.0)]
    assert found[1] == "ups.rack-a: this host reads the card itself, and so may all 11 hosts"
    assert len(_found({"shared": {"hosts": 10}}, watts=900.0)) == 1
    upsd = {"kind": "nut", "host": "10.0.0.9", "name": "rack-a"}
    assert len(_found({"shared": {"hosts": 11}, "sources": [upsd]}, watts=900.0)) == 1


def test_only_one_host_orders_the_output_off_and_not_too_early() -> None:
    """A warning always; a FAIL if nothing says how long the others take, or if a lower tier would cut higher ones."""
    cuts = {"output_off": {"by": "snmp"}, "shared": {"hosts": 3}}
    found = _found(cuts, watts=900.0)
    assert [verdict for verdict, _ in found] == ["PASS", "WARN", "FAIL"]
    assert "nothing says how long the other hosts take to stop" in found[2][1]
    found = _found({**cuts, "shared": {"hosts": 3, "longest_stop_s": 110}}, watts=900.0)
    assert [verdict for verdict, _ in found] == ["PASS", "WARN"]
    found = _found({**cuts, "shared": {"hosts": 3, "longest_stop_s": 110}}, watts=900.0, shed={"tier": 1})
    assert [verdict for verdict, _ in found] == ["PASS", "WARN", "FAIL", "PASS"]
    assert "would cut their power" in found[2][1]
    assert found[3][1] == "tier 1 of 0 to 2: pauses and powers off 140 s earlier"  # 110 s of a stop, 30 s of the UPS


def test_a_host_that_takes_longer_than_the_ups_waits_for() -> None:
    """The host that orders the output off waits for longest_stop_s: a FAIL on each host that takes longer."""
    shared = {"shared": {"hosts": 3, "longest_stop_s": 60}}
    found = _found(shared, watts=900.0, host={"kind": "systemd", "force_after_s": 90})
    assert [verdict for verdict, _ in found] == ["PASS", "FAIL"]
    assert "60 s after a commit, and this host may take 90 s" in found[1][1]
    found = _found(shared, watts=900.0, host={"kind": "systemd", "force_after_s": 60})
    assert [verdict for verdict, _ in found] == ["PASS"]


def test_a_tier_without_a_shared_ups() -> None:
    """It only wastes battery."""
    assert [verdict for verdict, _ in _found({}, shed={"tier": 0})] == ["WARN"]


def test_other_clients_of_upsd() -> None:
    """LIST CLIENT shows other hosts on the UPS, whatever the settings say."""
    (result,) = clients_findings("ups", 2, is_shared=False, cuts=False)
    assert (result.verdict, "shared: {hosts: 3}" in result.fix) == ("WARN", True)
    assert clients_findings("ups", 2, is_shared=True, cuts=False) == []
    (result,) = clients_findings("ups", 1, is_shared=True, cuts=True)
    assert result.text.startswith("1 other host is logged in")


def test_an_older_pair_shows_a_load_that_moves_without_us() -> None:
    """The UPS's load rose by 1200 W between two readings and ours did not move."""
    heard = OwnLoadReport(
        source=OwnSource.BMC, watts=2600.0, at_s=9.0, since_s=9.0, before_w=2590.0, ups_w=3000.0, before_ups_w=1800.0
    )
    settings = Settings.model_validate(
        {"mode": "armed", "ups": {"rack-a": {"sources": [SNMP], "rating_w": 5000}}},
    )
    policy = make_policy(settings, boot_id="boot-one", today=date(2026, 11, 26))
    state = State(feed=Feed(reading=READING), battery=Battery(load=0.6), own=(heard,))
    ((finding),) = shared_findings(settings, policy, state, (), 10.0)
    assert finding.text.startswith("the UPS's load moved by +1200 W")
