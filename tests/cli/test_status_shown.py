"""What `powerguard status` makes of what the daemon tells: nothing that nobody knows, nothing twice, nothing cut."""

import contextlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.plan.verb import describe as describe_plan
from powerguard.cli.render import Paint
from powerguard.cli.status import Curves, _bar, _rows, describe, watched
from powerguard.core.model.policy import Mode
from powerguard.core.model.state import Supply
from powerguard.daemon.observe.status import plan_view, status
from tests.daemon.watched import committed, half_fed
from tests.golden import Golden

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SUMS = {"budget", "", "slack"}
WRONG = "the BMC at 10.0.0.7: power restore policy is last-state"


@pytest.mark.parametrize(
    ("bmc", "expected"),
    [
        (
            {"policy": "always-on", "verified": True, "age_s": 600.0, "power_watts": 2860.0},
            "policy always-on, verified 10 m 00 s ago; the host drew 2860 W",
        ),
        ({}, "policy not read yet"),
        ({"error": WRONG}, f"policy NOT verified: {WRONG}"),
        (
            {"policy": "last-state", "age_s": 3.0, "error": WRONG},
            f"policy last-state when it was read 3.0 s ago; NOT verified: {WRONG}",
        ),
        (
            {"policy": "always-on", "age_s": 3600.0, "error": "no answer"},
            "policy always-on when it was read 1 h 00 m ago; NOT verified: no answer",
        ),
    ],
)
def test_a_policy_is_reported_as_it_was_read(bmc: dict[str, Any], expected: str) -> None:
    """A policy that nobody has read is no "?" beside a message that knows it, and an old one is called old."""
    status = json.loads((REFERENCE / "status-online.json").read_text(encoding="utf-8"))
    silent = {"kind": "auto", "policy": None, "verified": False, "age_s": None, "error": "", "power_watts": None}
    status["bmc"] = {**silent, **bmc}
    (line,) = [line.strip() for line in describe(status, Paint()) if line.strip().startswith("bmc ")]
    assert line.removeprefix("bmc").strip() == f"auto: {expected}"


def status_with(*reasons: dict[str, Any]) -> dict[str, Any]:
    answer = json.loads((REFERENCE / "status-online.json").read_text(encoding="utf-8"))
    return {**answer, "ready": not reasons, "reasons": list(reasons)}


def reason(name: str, text: str, fix: str, severity: str = "warning") -> dict[str, Any]:
    return {"name": name, "severity": severity, "text": text, "fix": fix, "numbers": {}}


def test_a_load_that_is_reported_in_watts_only_is_shown_in_watts() -> None:
    """The budget is made with it, so "?" would be wrong, in lines and on the screen."""
    shown = status_with()
    shown["ups"] |= {"load_pct": None, "watts": 3240.0}
    assert "load 3240 W, " in "\n".join(describe(shown, Paint()))
    assert [row.text for row in _rows(shown, has_bars=True) if row.label == "load"] == ["3240 W"]
    shown["ups"]["watts"] = None
    assert "load ?, " in "\n".join(describe(shown, Paint()))


def test_one_fault_is_reported_once(golden: Golden) -> None:
    """The reason says what is wrong; the rows of the BMC, of the power-on methods and of the source point at it."""
    shown = status_with(
        reason("policy_unverified", f"not verified ({WRONG})", "see bmc in `powerguard status`"),
        reason("source_down", "a source does not answer (snmp:10.0.0.5: no answer)", "ask it"),
    )
    shown["bmc"] |= {"policy": "last-state", "verified": False, "error": WRONG}
    shown["power_on"]["layers"][0] |= {"stands": "blocked", "why": WRONG}
    shown["power_on"]["covers_race"] = False
    shown["sources"][0] |= {"up": False, "last_error": "no answer"}
    text = "\n".join(describe(shown, Paint()))
    assert (text.count(WRONG), text.count("no answer")) == (1, 1)
    golden("status", text)
    assert not re.search(r"\b[PA-E] (policy|output|sentinel|watchdog|rtc)\b|late_reboot", text), "no letters"


def test_which_runtime_is_which(golden: Golden) -> None:
    """Beside each runtime stands the load that it is of, and beside the UPS's own that it is the UPS's."""
    text = "\n".join(describe(status_with(), Paint()))
    assert text.count("20 m 57 s") == text.count("21 m 00 s") == 1
    golden("status", text)
    assert text.count("12 m 53 s") == 1


FIXES = [f"do the right thing number {n}, which takes more words than a line has on many a terminal" for n in range(9)]


def _plain(lines: Sequence[str]) -> str:
    """Return lines as one text without spaces: however they were broken, and with bars of any length."""
    return re.sub(r"\s|[█░│]", "", " ".join(lines))


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (100, 30), (200, 50), (60, 18), (40, 25), (21, 7), (3, 2)])
@pytest.mark.parametrize("faults", [0, 2, 9])
def test_a_screen_holds_what_it_shows(columns: int, lines: int, faults: int) -> None:
    """Nothing runs over an edge. What finds no room is left out whole, is counted, and matters least."""
    status_shown = status_with(
        *(reason(f"fault_{n}", f"fault {n}", FIXES[n], "error" if n == 8 else "warning") for n in range(faults))
    )
    status_shown["sources"][0]["last_error"] = "/a/path/" + "x" * 90
    shown = watched(status_shown, Paint(), columns, lines)
    assert len(shown) <= lines
    assert max(len(line) for line in shown) <= columns
    everything = watched(status_shown, Paint(), 10_000, 10_000)
    text = _plain(shown)
    missing = [line.split()[0] for line in everything if _plain([line]) not in text]
    count = re.search(r"\.\.\. (\d+) more", shown[-1])
    assert (int(count[1]) if count else 0) == len(missing) or columns < 21
    if (columns, lines) == (200, 50):
        assert missing == []
    if columns >= 60:
        assert text.startswith("powerguard")
        assert not {"slack", "supply", "budget"} & set(missing)
        assert missing.count("!") <= 8, "an error goes after the warnings"
    if missing:
        assert "last" in missing, "the last outage matters least"


def test_the_curves_of_an_outage(golden: Golden) -> None:
    """Drawn from its first seconds on, over its whole length; they begin anew with the next outage."""
    curves = Curves()
    shown = status_with()
    shown |= {"phase": "on_battery", "outage": {"id": "o1"}}
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
        for second in range(5_000):
            shown["ups"] |= {"charge_pct": 100.0 - second / 100.0, "load_pct": 75.0 if second < 2_500 else None}
            shown["budget"]["runtime_effective_paused_s"] = 5_000.0 - second
            curves.take(shown)
        rows = curves.rows(120)
        assert [row.label for row in rows] == ["so far", "", ""]
        assert curves.rows(59) == []
        golden("status", "\n".join(row.text for row in rows))
        shown["outage"]["id"] = "o2"
        curves.take(shown)
        assert curves.rows(120) == []
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "ascii")):
        for _ in range(20):
            curves.take(shown)
        assert curves.rows(120) == [], "letters that the terminal has not"


@pytest.mark.parametrize(("need_s", "bar"), [(10.0, "#####..........|...."), (50.0, "###############|####")])
def test_the_budget_is_a_bar(need_s: float, bar: str, golden: Golden) -> None:
    """What is needed of what the battery gives, up to which it fits; without UTF-8 as well."""
    status_shown = status_with()
    status_shown["budget"] |= {"need_s": need_s, "runtime_effective_paused_s": 40.0, "slack_s": 40.0 - need_s}
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "ascii")):
        (row,) = [row for row in _rows(status_shown, has_bars=True) if row.label == "budget"]
        shown = _bar(row, 20, Paint())
    assert shown.startswith(f"{bar}  ")
    golden("status", shown)


@pytest.mark.parametrize("has_bars", [False, True])
def test_the_room_for_higher_tiers_is_part_of_the_needs(has_bars: bool, golden: Golden) -> None:
    """Needs, runtime and slack add up on a shared UPS as well."""
    status_shown = status_with()
    status_shown["budget"] |= {"need_s": 140.0, "shed_s": 110.0, "runtime_effective_paused_s": 430.0, "slack_s": 180.0}
    status_shown["next"] = []
    shown = "\n".join(f"{row.label}: {row.text}" for row in _rows(status_shown, has_bars=has_bars) if row.label in SUMS)
    assert "needs 4 m 10 s" in shown
    assert "+ 1 m 50 s for higher tiers" in shown
    golden("status", shown)


@pytest.mark.parametrize(("mode", "is_done"), [("armed", True), ("rehearse", False), ("dry-run", False)])
def test_a_recorded_power_off_is_not_shown_as_one_that_comes(mode: str, is_done: bool) -> None:
    """An operator who rehearses reads this with the plug in the hand."""
    answer = json.loads(json.dumps(status(committed(Mode(mode)))))
    plan = json.loads(json.dumps(plan_view(committed(Mode(mode)))))
    assert bool(answer["next"]) is bool(plan["next"]) is is_done
    for shown in (describe(answer, Paint()), describe_plan(plan, Paint())):
        text = " ".join(shown)
        assert ("cannot be undone in this boot" in text) is is_done
        assert ("forced power-off" in text) is is_done
        assert ("the host stays on" in text) is not is_done
        assert (f"only recorded in mode {mode}" in text) is not is_done


@pytest.mark.parametrize(
    ("training", "pause", "hold"),
    [
        ("pause", "pause training, checkpoint: ", "hold, training paused: "),
        ("continue", "checkpoint, training continues: ", "hold, training continues: "),
        ("exit", "checkpoint, then training exits: ", "hold, training has exited: "),
        ("mixed", "checkpoint, then each trainer pauses, exits or continues as set: ", "hold: "),
        (None, "pause training, checkpoint: ", "hold, training paused: "),
    ],
)
def test_the_forecast_names_what_training_does(training: str | None, pause: str, hold: str) -> None:
    """A trainer with `after: continue` is never paused, and the forecast does not claim it."""
    answer = json.loads((REFERENCE / "status-online.json").read_text(encoding="utf-8"))
    for step in answer["next"]:
        step["training"] = training if step["action"] != "shutdown" else None
    shown = "\n".join(describe(answer, Paint()))
    assert pause in shown
    assert hold in shown
    assert "power-off: " in shown


@pytest.mark.parametrize("forgeable", [False, True])
def test_only_a_source_that_another_host_could_forge_is_marked(*, forgeable: bool) -> None:
    shown = status_with()
    shown["sources"][0] |= {"authenticated": False, "forgeable": forgeable}
    text = "\n".join(describe(shown, Paint()))
    assert ("could be forged" in text) is forgeable


@pytest.mark.parametrize(
    ("step", "age_s", "shown"),
    [
        (48000, 12.0, "step 48000 durable 12 s ago, "),
        (48000, None, "step 48000 durable, "),
        (None, 12.0, "durable 12 s ago, "),
    ],
)
def test_while_training_runs_it_shows_what_is_durable(step: int | None, age_s: float | None, shown: str) -> None:
    """A person who asked for a checkpoint before a power-off by hand waits for it; some trainers report no step."""
    status_shown = status_with()
    status_shown["trainers"][0] |= {"durable": False, "durable_step": step, "durable_age_s": age_s}
    text = "\n".join(describe(status_shown, Paint()))
    assert f"training at step 48211, {shown}checkpoint takes 20 s" in text


@pytest.mark.parametrize(("other", "is_spared"), [(Supply.UTILITY, True), (Supply.BATTERY, False)])
def test_no_power_off_is_announced_while_another_ups_feeds_the_host(other: Supply, *, is_spared: bool) -> None:
    """It would be overloaded, so training is paused; "power-off: now" for hours would make a person act."""
    daemon = half_fed(other)
    answer, plan = json.loads(json.dumps(status(daemon))), json.loads(json.dumps(plan_view(daemon)))
    for shown in (describe(answer, Paint()), describe_plan(plan, Paint())):
        assert ("power-off, if the other UPSes had no utility: " in " ".join(shown)) is is_spared
