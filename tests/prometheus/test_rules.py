"""The alert rules, judged by Prometheus' own tools: each story, quiet years, and that no name in them is invented."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse_text

from powerguard.core.model.policy import Mode
from powerguard.daemon.observe.metrics import PREFIX, SECTIONS, DaemonCollector, scrape
from powerguard.daemon.observe.port import BmcView, Daemon
from powerguard.daemon.observe.readiness import ERRORS, WARNINGS
from powerguard.sentinel.main import COUNTERS, GAUGES
from powerguard.sentinel.main import PREFIX as SENTINEL
from tests.daemon.watched import POLICY, drilled, in_mode, scene
from tests.peers import require

ROOT = Path(__file__).parents[2]
RULES = ROOT / "config" / "prometheus" / "powerguard.rules.yml"
STORIES = sorted(Path(__file__).parent.glob("*.yml"))
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
ENTRIES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in ENTRIES if "alert" in rule]
HOST = 'job="powerguard", instance="a"'
READY = f"powerguard_ready{{{HOST}}}"
RECORDED = {rule["record"] for rule in ENTRIES if "record" in rule}
NOT_WORTH_AN_ALERT = {
    "maintenance": "a person set it, and it ends by itself",
    "aborted": "a person did it, in an outage that has an alert",
    "training_held": "the host that holds it is on battery, and has an alert",
}
"""Reasons of /readyz without a rule, and why."""
OF_TRAINERS = {"powerguard_trainer_upload_durable_age_seconds"}
"""Metrics of a trainer's own port; tests/trainer has them."""


def promtool(*words: str, text: bytes = b"") -> str:
    """Run promtool; return what it says, "" when all is well. It collects less garbage: a tenth of its time."""
    env = {**os.environ, "GOGC": "400"}
    run = subprocess.run([require("promtool"), *words], input=text, env=env, capture_output=True, check=False)
    return "" if run.returncode == 0 else (run.stdout + run.stderr).decode()


@pytest.mark.peer("promtool")
def test_the_rules_hold() -> None:
    assert promtool("check", "rules", str(RULES)) == ""


@pytest.mark.peer("promtool")
@pytest.mark.parametrize(
    "story", [pytest.param(each.name, marks=pytest.mark.slow if each.stem == "months" else ()) for each in STORIES]
)
@pytest.mark.timeout(240)
def test_each_story_ends_as_it_says(story: str) -> None:
    """Which alerts fire, with which words, and which do not."""
    assert promtool("test", "rules", str(Path(__file__).parent / story)) == ""


def test_every_alert_has_a_story_that_fires_it_and_one_that_does_not() -> None:
    found = [
        case
        for story in STORIES
        for test in yaml.safe_load(story.read_text(encoding="utf-8"))["tests"]
        for case in test.get("alert_rule_test", [])
    ]
    fired = {case["alertname"] for case in found if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in found if not case.get("exp_alerts")}
    names = {rule["alert"] for rule in ALERTS}
    assert (fired, quiet) == (names, names)


def series_of(daemon: Daemon, every_s: int, steps: int) -> list[dict[str, str]]:
    """Return what Prometheus would have scraped of this daemon, with its clocks and its training running on."""
    body, _ = scrape(DaemonCollector(daemon), "")
    found = [{"series": f"up{{{HOST}}}", "values": f"1x{steps}"}]
    for family in parse_text(body.decode()):
        for sample in family.samples:
            labels = "".join(f', {name}="{value}"' for name, value in sample.labels.items())
            moves = sample.name.endswith("timestamp_seconds") or sample.name == "powerguard_trainer_step"
            values = f"0+{every_s}x{steps}" if moves else f"{sample.value}x{steps}"
            found.append({"series": f"{sample.name}{{{HOST}{labels}}}", "values": values})
    return found


def played(folder: Path, series: list[dict[str, str]], every_s: int, expressions: list[dict[str, Any]]) -> str:
    """Let promtool play these series under the rules; return what is not as expected."""
    every = f"{every_s}s"
    test = {"interval": every, "input_series": series, "promql_expr_test": expressions}
    story = {"rule_files": [str(RULES)], "evaluation_interval": every, "tests": [test]}
    file = folder / "story.yml"
    file.write_text(yaml.safe_dump(story), encoding="utf-8")
    return promtool("test", "rules", str(file))


@pytest.mark.peer("promtool")
@pytest.mark.parametrize(("every_s", "steps"), [(15, 240), pytest.param(24 * 3600, 365, marks=pytest.mark.slow)])
@pytest.mark.timeout(240)
def test_a_quiet_hour_and_a_quiet_year_fire_nothing(tmp_path: Path, every_s: int, steps: int) -> None:
    """A host in order: at no time is an alert even pending."""
    daemon = replace(drilled("passed"), last_outage=None)
    ends = f"{every_s * steps}s"
    expected = [
        {"expr": f"count(count_over_time(ALERTS[{ends}]))", "eval_time": ends, "exp_samples": []},
        {"expr": "powerguard_ready", "eval_time": ends, "exp_samples": [{"labels": READY, "value": 1}]},
    ]
    assert played(tmp_path, series_of(daemon, every_s, steps), every_s, expected) == ""


@pytest.mark.peer("promtool")
@pytest.mark.parametrize(
    ("alert", "daemon"),
    [
        ("PowerguardNotArmed", in_mode(scene(), Mode.DRY_RUN)),
        ("PowerguardBudgetDoesNotFit", replace(scene(), policy=replace(POLICY, stop_q95_s=3000.0, force_after_s=3e3))),
        ("PowerguardBmcPolicyWrong", replace(scene(), bmc=BmcView(kind="ipmi", policy="always-off"))),
        ("PowerguardSettingsRefused", replace(scene(), settings_ok=False)),
    ],
)
def test_what_is_wrong_is_seen_in_the_real_exposition(tmp_path: Path, alert: str, daemon: Daemon) -> None:
    """The counterpart of the quiet years."""
    expr = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    expected = [{"expr": expr, "eval_time": "204h", "exp_samples": [{"labels": "{}", "value": 1}]}]
    assert played(tmp_path, series_of(daemon, 6 * 3600, 40), 6 * 3600, expected) == ""


def series_of_the_product() -> set[str]:
    """Return the names of all series that daemon and sentinel publish."""
    known = {"up"}
    for family in (each for section in SECTIONS.values() for each in section):
        ends = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        known |= {f"{PREFIX}{family.name}{end}" for end in ends}
    return known | {SENTINEL + name for name in GAUGES} | {f"{SENTINEL}{name}_total" for name in COUNTERS}


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule.get("alert") or rule["record"]) for rule in ENTRIES])
def test_every_metric_in_a_rule_exists(rule: dict[str, Any]) -> None:
    named = set(re.findall(r"\bpowerguard[:_][a-z0-9_:]+|\bup\b", rule["expr"]))
    assert named
    assert named - series_of_the_product() - RECORDED - OF_TRAINERS == set()


def test_every_reason_has_a_rule_or_is_not_worth_one() -> None:
    """A reason counts where an expression names it, or a comment beside the alert that stands for it."""
    named: set[str] = set()
    for rule in ALERTS:
        for reasons in re.findall(r'reason=~?"([^"]+)"', rule["expr"]):
            named |= set(reasons.split("|"))
    comments = re.findall(r"- alert: \w+ # reasons? (.*)", RULES.read_text(encoding="utf-8"))
    named |= {reason for comment in comments for reason in comment.split(", ")}
    assert named.isdisjoint(NOT_WORTH_AN_ALERT)
    assert named | set(NOT_WORTH_AN_ALERT) == {*ERRORS, *WARNINGS}


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in ALERTS])
def test_every_alert_has_a_severity_and_a_runbook(rule: dict[str, Any]) -> None:
    """The runbook is a section of the same name, with its two parts."""
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert (ROOT / page, anchor) == (TROUBLESHOOTING, rule["alert"].lower())
    pattern = rf"^### {rule['alert']}\n(.*?)(?=^##|\Z)"
    section = re.search(pattern, TROUBLESHOOTING.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert section is not None
    assert [word for word in ("**Look at**", "**Do**") if word not in section[1]] == []
