"""What the daemon says of itself: true in every phase, plain JSON, and honest about what would not hold."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.cli.plan.picture import from_plan
from powerguard.cli.plan.verb import describe
from powerguard.cli.render import Paint
from powerguard.cli.status import _next
from powerguard.core.comeback.methods import DOUBTFUL, STUCK
from powerguard.core.decide import conditions
from powerguard.core.energy import account, budget
from powerguard.core.model.actions import Grade, PollNow, SyncFilesystems
from powerguard.core.model.events import Done, Failed, Outcome, OutputSource
from powerguard.core.model.policy import Drop, Learned, Mode, Policy
from powerguard.core.model.state import (
    Activity,
    Battery,
    Feed,
    Maintenance,
    OnBattery,
    Supply,
)
from powerguard.daemon.observe.port import ActionFigures, BmcView, Daemon, SourceView
from powerguard.daemon.observe.readiness import WARNINGS, is_ready, readiness
from powerguard.daemon.observe.status import can_abort, messages_view, plan_view, required_steps, status
from tests.daemon.watched import NOW_S, PHASES, WALL_S, Watched, in_mode, outage, reading, scene, shared, taught

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def names(daemon: Daemon) -> list[str]:
    return [reason.name for reason in readiness(daemon)]


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_plain_json(phase: str) -> None:
    """No NaN, no enum, nothing that a program would stumble over; the same keys in every phase."""
    daemon = scene(phase)
    for body in (status(daemon), plan_view(daemon)):
        text = json.dumps(body, allow_nan=False)
        assert json.loads(text)["phase"] == phase
        assert json.loads(text)["schema_version"] == 1
    assert list(status(daemon)) == list(status(scene("online")))


def test_online_and_well_is_ready() -> None:
    """Nothing to complain of means nothing said."""
    body = status(scene())
    assert (body["ready"], body["degraded"], body["reasons"], body["outage"]) == (True, False, [], None)
    assert body["at"] == WALL_S


def test_moments_are_unix_seconds() -> None:
    """A moment of the boot's clock is told as wall time, so that another host can read it."""
    body = status(scene("shutdown"))
    outage = body["outage"]
    assert isinstance(outage, dict)
    assert outage["since_at"] == WALL_S - 60.0
    assert outage["power_off_by_at"] == WALL_S + 55.0
    assert outage["latched"] is True
    assert outage["can_abort"] is False


@pytest.mark.parametrize(("phase", "can"), [("emergency_checkpoint", True), ("holding", True), ("on_battery", False)])
def test_says_whether_it_can_be_aborted(phase: str, can: bool) -> None:
    outage = status(scene(phase))["outage"]
    assert isinstance(outage, dict)
    assert outage["can_abort"] is can


def test_a_power_off_that_is_forecast_in_a_recovery_is_not_denied() -> None:
    daemon = scene("recovery")
    assert can_abort(daemon) == "no shutdown to abort: the host is coming back"
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, supply=Supply.BATTERY))
    assert "maintenance on" in can_abort(daemon)
    stretches = [stretch.name for stretch in from_plan(plan_view(daemon))]
    assert stretches == ["waiting", "stop", "reserve", "margin"]


def test_undersized_names_the_numbers() -> None:
    """A full stop that does not fit a *full* battery is said beforehand, with how much is missing."""
    daemon = scene()
    daemon.policy = replace(daemon.policy, runtime_table=((0.5, 180.0), (1.0, 72.0)))
    (reason,) = readiness(daemon)
    numbers = dict(reason.numbers)
    assert reason.name == "undersized"
    assert numbers["need_s"] == 140.0
    assert float(numbers["missing_s"]) == pytest.approx(140.0 - float(numbers["available_s"]), abs=0.01)
    assert numbers["grade"] in {Grade.SHORT.value, Grade.BARE.value}
    assert not is_ready(readiness(daemon))


def test_a_battery_that_is_not_charged_is_no_protection() -> None:
    """ready means that the host would be saved if utility failed now, and not once the battery is full."""
    daemon = scene()
    for left, expected in ((0.74, []), (0.3, []), (0.105, ["too_little_left"])):
        daemon.state = replace(daemon.state, battery=replace(daemon.state.battery, left=left))
        assert names(daemon) == expected
        assert is_ready(readiness(daemon)) is not bool(expected)
    (reason,) = readiness(daemon)
    numbers = dict(reason.numbers)
    assert float(numbers["need_s"]) > float(numbers["available_s"])
    daemon.policy = replace(daemon.policy, runtime_table=((0.5, 30.0), (1.0, 10.0)))
    assert names(daemon) == ["undersized"], "a full one would not do either"


def test_a_drop_that_was_seen_counts_in_readiness_too() -> None:
    """A battery that is too small for the presumed pause, and large enough for the one that was measured."""
    daemon = scene()
    daemon.policy = replace(daemon.policy, runtime_table=((0.2, 540.0), (0.5, 216.0), (1.0, 72.0)))
    assert names(daemon) == ["undersized"]
    daemon.state = replace(daemon.state, learned=Learned(pauses=(("llm", Drop(before=0.62, after=0.2, at_s=1.0)),)))
    assert names(daemon) == []


def test_a_runtime_that_falls_too_fast_is_a_reason() -> None:
    daemon = scene("holding")
    daemon.state = replace(daemon.state, alarms=("runtime_steep",))
    assert "runtime_steep" in names(daemon)
    assert is_ready(readiness(daemon))


@pytest.mark.parametrize(("runtime_s", "expected"), [(60.0, ["undersized", "table_contradicted"]), (1500.0, [])])
def test_a_table_that_the_ups_contradicts_is_reported_and_counts_no_more(runtime_s: float, expected: list[str]) -> None:
    """A table ten times too long made a host look ready whose outage would have been a bare stop."""
    daemon = scene()
    reading = daemon.state.feed.reading
    assert reading is not None
    full = replace(reading, charge_pct=100.0, load_pct=50.0, runtime_s=runtime_s)
    tau_s = account.tau_s(daemon.policy.runtime_table, 0.5)
    battery = replace(daemon.state.battery, load=0.5, gauge=runtime_s / tau_s)
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, reading=full), battery=battery)
    assert [name for name in names(daemon) if name in ("undersized", "table_contradicted")] == sorted(
        expected, reverse=True
    )
    half = replace(full, charge_pct=50.0)
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, reading=half))
    assert "table_contradicted" not in names(daemon), "half full, nobody knows what full would be"


def test_undersized_is_about_a_full_battery() -> None:
    """In an outage a half-empty battery is no news about its size, nor is the load that fell with the pause."""
    assert "undersized" not in names(scene("holding"))
    daemon = scene("holding")
    daemon.policy = replace(daemon.policy, runtime_table=((0.5, 180.0), (1.0, 72.0)))
    assert "undersized" in names(daemon)


def test_not_protected_when_nobody_knows_the_runtime() -> None:
    """No table and no reported runtime: no number is invented."""
    daemon = scene()
    daemon.policy = replace(daemon.policy, runtime_table=())
    assert names(daemon) == ["not_protected"]
    body = plan_view(daemon)
    assert body["slack_s"] is None
    assert body["fits"] is False


def test_a_reported_runtime_is_enough() -> None:
    """Without a table the UPS's own runtime on utility stands in for it."""
    daemon = scene()
    daemon.policy = replace(daemon.policy, runtime_table=())
    daemon.state = replace(daemon.state, battery=replace(daemon.state.battery, tau_point=(0.62, 1260.0)))
    assert names(daemon) == []


def test_a_ups_that_was_asked_in_vain_is_not_waited_for() -> None:
    """The first fault of most installs: its remedy is in the error of the source, not in patience."""
    daemon = scene()
    empty = replace(daemon.state, feed=Feed(), battery=Battery())
    (fresh,) = [each for each in readiness(replace(daemon, state=empty)) if each.name == "no_reading"]
    assert fresh.fix.startswith("wait for the first poll")
    error = "credential snmp-auth: is missing: powerguard secret set snmp-auth"
    down = replace(daemon.sources[0], up=False, polls=8, failures=8, last_error=error, last_reading_at_s=None)
    found = {each.name: each for each in readiness(replace(daemon, state=empty, sources=[down]))}
    assert "8 polls failed" in found["no_reading"].text
    assert "the source's error" in found["no_reading"].fix
    assert error in found["source_down"].text
    assert found["source_down"].fix


BROKEN = [
    ("no_reading", lambda d: replace(d, state=replace(d.state, feed=Feed(), battery=Battery()))),
    ("blind", lambda d: replace(d, state=replace(d.state, feed=replace(d.state.feed, lost_since_s=NOW_S - 9.0)))),
    ("dry_run", lambda d: in_mode(d, Mode.DRY_RUN)),
    ("rehearse", lambda d: in_mode(d, Mode.REHEARSE)),
    ("no_power_off", lambda d: replace(d, power_off_trouble="/run/powerguard-off/word: nothing listens")),
    ("hung", lambda d: replace(d, progressed_at_s=NOW_S - 30.0)),
    (
        "maintenance",
        lambda d: replace(
            d, state=replace(d.state, maintenance=Maintenance(until_s=NOW_S + 60.0, reason="fan", who="root"))
        ),
    ),
    (
        "aborted",
        lambda d: replace(d, state=replace(d.state, phase=OnBattery(outage=outage(aborted_by="root: diesel")))),
    ),
    ("policy_unverified", lambda d: replace(d, bmc=BmcView(kind="ipmi", policy="always-off"))),
    ("journal_in_memory", lambda d: replace(d, journal_trouble="disk full")),
    ("history_lost", lambda d: replace(d, history_lost="what was learned of the battery")),
    ("settings_rejected", lambda d: replace(d, settings_ok=False)),
    ("trainer_stranger", lambda d: replace(d, strangers=("unix:/run/x.sock: served by uid 65534",))),
    ("unproven_battery", lambda d: replace(d, state=replace(d.state, alarms=("unproven_battery",)))),
    ("power_on_stuck", lambda d: replace(d, state=replace(d.state, alarms=(STUCK,)))),
    ("power_on_doubtful", lambda d: replace(d, state=replace(d.state, alarms=(DOUBTFUL,)))),
    ("other", lambda d: replace(d, state=replace(d.state, alarms=("a_name_of_tomorrow",)))),
    (
        "training_paused",
        lambda d: replace(
            d, state=replace(d.state, trainers=(replace(d.state.trainers[0], activity=Activity.PAUSED),))
        ),
    ),
    ("low_charge", lambda d: replace(d, state=replace(d.state, guarded_since_s=NOW_S + 9.0))),
    (
        "unprotected",
        lambda d: replace(
            d, state=replace(d.state, feed=replace(d.state.feed, reading=reading(output_source=OutputSource.BYPASS)))
        ),
    ),
    (
        "overload",
        lambda d: replace(d, state=replace(d.state, feed=replace(d.state.feed, reading=reading(overload=True)))),
    ),
    (
        "battery_worn",
        lambda d: replace(d, state=replace(d.state, feed=replace(d.state.feed, reading=reading(replace_battery=True)))),
    ),
]


@pytest.mark.parametrize("phase", PHASES)
def test_paused_in_an_outage_is_no_fault(phase: str) -> None:
    daemon = scene(phase)
    state = replace(daemon.state, trainers=tuple(replace(t, activity=Activity.PAUSED) for t in daemon.state.trainers))
    assert ("training_paused" in names(replace(daemon, state=state))) is (phase == "online")


@pytest.mark.parametrize(("name", "breaks"), BROKEN, ids=[name for name, _ in BROKEN])
def test_each_fault_has_its_reason(name: str, breaks: object) -> None:
    """One fault, one reason; errors make it not ready, warnings only degraded."""
    assert callable(breaks)
    daemon: Watched = breaks(scene())
    assert name in names(daemon)
    assert is_ready(readiness(daemon)) is (name in WARNINGS)
    assert status(daemon)["degraded"] is True


def test_source_down_is_named_with_its_error() -> None:
    """One source of two down is less redundancy, not blindness."""
    daemon = scene()
    down = SourceView(ups="rack-a", source="nut:10.0.0.9", up=False, polls=9, failures=9, last_error="refused")
    daemon.sources = (*daemon.sources, down)
    (reason,) = readiness(daemon)
    assert (reason.name, reason.severity) == ("source_down", "warning")
    assert "nut:10.0.0.9: refused" in reason.text
    daemon.sources = (replace(down, up=True, last_error="", trouble="the login is refused"),)
    (reason,) = readiness(daemon)
    assert (reason.name, "nut:10.0.0.9: the login is refused" in reason.text) == ("source_troubled", True)


def test_terms_add_up() -> None:
    """Whoever does the sums with the printed terms gets the printed results."""
    for phase in ("online", "on_battery", "emergency_checkpoint", "holding"):
        body = plan_view(scene(phase))
        terms = {term["name"]: term["value"] for term in body["terms"]}  # type: ignore[attr-defined]
        assert terms["host_stop_s"] + terms["ups_off_s"] + terms["reserve_s"] == pytest.approx(terms["stop_s"])
        assert terms["checkpoint_s"] + terms["stop_s"] == pytest.approx(terms["need_s"])
        assert terms["usable"] * terms["tau_paused_s"] == pytest.approx(terms["reff_paused_s"], rel=1e-3)
        assert terms["reff_paused_s"] - terms["need_s"] == pytest.approx(terms["slack_s"], rel=1e-3)
        assert all(term["source"] and term["unit"] for term in body["terms"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("grade", Grade)
def test_required_steps_add_up(grade: Grade) -> None:
    """The stacked panel must reach exactly the need, also on a host that makes room for others on its UPS."""
    daemon = scene("on_battery")
    now = replace(conditions.outage_budget(daemon.policy, daemon.state, NOW_S), grade=grade)

    now = replace(now, stop_s=budget.stop_s(daemon.policy, grade))
    assert math.fsum(required_steps(daemon, now).values()) == pytest.approx(now.checkpoint_s + now.stop_s)
    now = replace(now, need_s=now.checkpoint_s + now.stop_s, shed_s=220.0)
    assert math.fsum(required_steps(daemon, now).values()) == pytest.approx(now.pause_need_s)


def test_next_is_in_order_of_time() -> None:
    """What comes next comes first, and the last of it is the power-off."""
    for phase in ("online", "on_battery", "emergency_checkpoint", "holding"):
        steps = plan_view(scene(phase))["next"]
        assert isinstance(steps, list)
        times = [step["in_s"] for step in steps]
        assert times == sorted(times)
        assert steps[-1]["action"] == "shutdown"


@pytest.mark.parametrize(("phase", "left"), [("online", 0.105), ("on_battery", 0.16), ("emergency_checkpoint", 0.16)])
def test_no_hold_is_forecast_where_the_power_off_comes_first(phase: str, left: float) -> None:
    """A checkpoint that does not fit is not durable by then. An outage that begins now has the stop that fits now."""
    daemon = scene(phase)
    daemon.state = replace(daemon.state, battery=replace(daemon.state.battery, left=left, used=0.75 - left))
    for body in (status(daemon), plan_view(daemon)):
        steps = body["next"]
        assert isinstance(steps, list)
        assert [step["action"] for step in steps if step["action"] != "emergency_checkpoint"] == ["shutdown"]
        stretches = [stretch.name for stretch in from_plan({**plan_view(daemon), "next": steps})]
        assert "holding" not in stretches


@pytest.mark.parametrize("phase", PHASES)
def test_it_is_fast(phase: str) -> None:
    """Both objects are made on the loop that guards the host: they may not hold it up."""
    daemon = scene(phase)
    took = []
    for _ in range(20):
        began = time.thread_time()
        status(daemon)
        plan_view(daemon)
        took.append(time.thread_time() - began)
    assert min(took) < 0.005


def outcomes() -> Iterator[tuple[Outcome, str]]:
    action = SyncFilesystems(id="a", by_s=1.0, outage="o")
    yield Done(at_s=1.0, action=action, took_s=0.7), "done"
    yield Failed(at_s=1.0, action=action, took_s=700.0, reason="no"), "failed"
    yield Failed(at_s=1.0, action=action, took_s=5.0, reason="late", timed_out=True), "timed_out"


def test_actions_are_counted_by_result() -> None:
    """Counts, buckets (a bound belongs to its own bucket) and sums; polls are not actions here."""
    figures = ActionFigures()
    for outcome, result in outcomes():
        figures.count(outcome)
        assert figures.counts["sync", result] == 1
    assert sum(figures.buckets["sync"]) == 3
    assert figures.buckets["sync"][1] == 1
    assert figures.buckets["sync"][3] == 1
    assert figures.buckets["sync"][-1] == 1
    assert figures.seconds["sync"] == pytest.approx(705.7)
    figures.count(Done(at_s=1.0, action=PollNow(id="p", by_s=1.0, ups="u"), took_s=1.0))
    assert sum(figures.counts.values()) == 3


@pytest.mark.parametrize("phase", PHASES)
def test_the_plan_says_whether_it_assumes_an_outage(phase: str) -> None:
    """On utility, before and after one, the times count from a failure now: nothing of it comes by itself."""
    assert plan_view(scene(phase))["assumes_utility_fails_now"] is (phase in ("online", "recovery"))


@pytest.mark.parametrize("phase", ["on_battery", "emergency_checkpoint", "holding", "recovery"])
@pytest.mark.parametrize(
    ("supply", "cut_at_s", "assumes"),
    [(Supply.UTILITY, None, True), (Supply.UTILITY, NOW_S + 300.0, False), (Supply.BATTERY, None, False)],
)
def test_with_utility_back_the_plan_is_of_a_failure_of_it(
    phase: str, supply: Supply, cut_at_s: float | None, *, assumes: bool
) -> None:
    """In a hold no power-off comes once utility is there, unless the UPS is going to cut its output."""
    daemon = scene(phase)
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, supply=supply, countdown_at_s=cut_at_s))
    assert plan_view(daemon)["assumes_utility_fails_now"] is assumes
    rows = [row for row in _next(status(daemon)) if row.label]
    assert [row.label for row in rows] == (
        ["next", "if power fails"] if assumes else ["next"] * (2 if phase == "recovery" else 1)
    )


def test_a_second_outage_in_a_recovery_still_fits_while_it_lasts() -> None:
    daemon = scene("recovery")
    feed = replace(daemon.state.feed, supply=Supply.BATTERY)
    daemon.state = replace(daemon.state, feed=feed, battery=replace(daemon.state.battery, left=0.22))
    plan = plan_view(daemon)
    assert (plan["fits"], describe(plan, Paint())[1].partition(":")[0]) == (False, "It still fits")


def example(name: str) -> dict[str, object]:
    return dict(json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8")))


EXAMPLES = ("status-online", "status-holding", "notify-online", "plan-online", "plan-holding", "plan-learned")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_the_reference_are_true(name: str) -> None:
    """The documented objects are what the code makes; `tests/daemon/watched.py` is their world."""
    kind, _, phase = name.partition("-")
    make = {"status": status, "notify": messages_view, "plan": plan_view}[kind]
    made = make(taught() if phase == "learned" else scene(phase))
    assert example(name) == json.loads(json.dumps(made))


def test_policy_of_the_scenes_is_a_policy() -> None:
    """The scenes stand on the real model."""
    assert isinstance(scene().policy, Policy)


def test_the_own_load_on_a_shared_ups_is_shown_with_its_source_and_age() -> None:
    """In status and in the plan: what it rests on, how old that is, and what was passed over."""
    answer = dict(json.loads(json.dumps(status(shared()))))["own_load"]
    assert (answer["source"], answer["watts"], answer["measured"]) == ("gpu", 1100.0, True)
    assert answer["share"] == pytest.approx(1100.0 / 5400.0, abs=0.001)
    assert answer["passed_over"] == [{"source": "bmc", "because": "no reading for 400 s"}]
    terms = {term["name"]: term for term in dict(json.loads(json.dumps(plan_view(shared()))))["terms"]}
    assert terms["load_own"]["source"].startswith("1100 W, the GPUs' power and the rest of the host, 3 s ago; bmc")
    assert terms["load_paused"]["value"] == pytest.approx(0.62 - 0.4 * 1100.0 / 5400.0, abs=0.001)
    assert terms["shed_s"]["source"] == "tier 0: 1 tier above, each one stop of 60 s"
    assert "load_own" not in {term["name"] for term in dict(json.loads(json.dumps(plan_view(scene()))))["terms"]}


def test_a_ups_that_looks_shared_is_a_reason() -> None:
    """The UPS carries far more than this host draws by its BMC, and the settings do not say why."""
    calm = shared()
    own = (replace(calm.state.own[0], ups_w=3348.0),)
    alone = replace(calm, policy=replace(calm.policy, shared=None, shed=None), state=replace(calm.state, own=own))
    reasons = {reason.name: reason.text for reason in readiness(alone)}
    assert "the UPS carries 3348 W, and this host draws 1480 W (bmc)" in reasons["looks_shared"]
    assert "looks_shared" not in {reason.name for reason in readiness(calm)}
