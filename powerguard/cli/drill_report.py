"""How a drill went, for people: what was expected beside what was measured."""

from collections.abc import Callable
from typing import Any, Final

from powerguard.cli.render import Paint, clean, duration, moment, table
from powerguard.cli.words import because_of

_COLOURS: Final = {"passed": "green", "recorded": "yellow", "interrupted": "yellow", "failed": "red"}


def _seconds(value: object) -> str:
    return duration(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else "?"


def _share(value: object) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, int | float) and not isinstance(value, bool) else "?"


def _percent(value: object) -> str:
    return f"{value:.0f} %" if isinstance(value, int | float) and not isinstance(value, bool) else "?"


def _watts(value: object) -> str:
    return f"{value:.0f} W" if isinstance(value, int | float) and not isinstance(value, bool) else "?"


def _times(value: object) -> str:
    return f"{value:.2f} times" if isinstance(value, int | float) and not isinstance(value, bool) else "?"


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else clean(value)


_ROWS: Final[tuple[tuple[str, str, str, Callable[[object], str]], ...]] = (
    ("load before", "", "load_before", _share),
    ("charge before", "", "charge_before_pct", _percent),
    ("checkpoint, all durable", "checkpoint_expected_s", "checkpoint_s", _seconds),
    ("load paused", "load_paused_expected", "load_paused", _share),
    ("saved by pausing", "", "drop_paused", _share),
    ("saved by pausing", "", "drop_paused_w", _watts),
    ("until training went on", "", "resume_s", _seconds),
    ("load capped", "", "load_capped", _share),
    ("saved by capping", "", "drop_capped", _share),
    ("saved by capping", "", "drop_capped_w", _watts),
    ("training speed capped", "", "cap_speed", _share),
    ("training per charge, capped", "", "cap_gain", _times),
    ("capping pays", "", "cap_pays", _word),
    ("BMC policy", "", "policy", _word),
    ("BMC policy verified", "", "policy_verified", _word),
    ("filesystems synced", "", "sync_s", _seconds),
    ("effective runtime, paused", "runtime_paused_expected_s", "runtime_paused_s", _seconds),
    ("stop needs", "", "stop_s", _seconds),
    ("checkpoint and stop fit", "", "fits", _word),
    ("power-off (not ordered): grade", "", "power_off_grade", _word),
    ("power-off (not ordered): hard after", "", "power_off_force_after_s", _seconds),
    ("self-test lasted", "", "test_s", _seconds),
    ("load in the self-test", "load_before", "load_test", _share),
    ("runtime in the self-test", "runtime_before_s", "runtime_test_s", _seconds),
    ("battery health", "health_before", "health", _share),
    ("as this discharge measured it", "", "health_measured", _share),
    ("battery health, at least", "", "health_at_least", _share),
    ("outage lasted", "", "outage_s", _seconds),
    ("powered off in order", "", "powered_off_clean", _word),
    ("charge after", "", "charge_after_pct", _percent),
)


def describe(report: dict[str, Any], paint: Paint) -> list[str]:
    """Return a report as lines."""
    figures: dict[str, object] = report["figures"]
    result = clean(report["result"])
    what = ", ".join(clean(scope) for scope in report["scopes"]) or clean(report["witness"])
    lasted, ended = duration(report["lasted_s"]), moment(report["ended_at"])
    short = ", but checkpoint and stop do not fit the battery" if figures.get("fits") is False else ""
    colour = "yellow" if short and result == "passed" else _COLOURS.get(result, "yellow")
    lines = [
        f"Drill {paint(result + short, colour)}: {clean(because_of(report['because']))}",
        f"  {what}, by {clean(report['who']) or '?'}, ended {ended} after {lasted}",
    ]
    rows = [("", "expected", "measured")]
    for label, expected, measured, words in _ROWS:
        if measured in figures:
            rows.append((label, words(figures[expected]) if expected in figures else "", words(figures[measured])))
            if measured == "checkpoint_s":
                rows += _trainers(figures)
    if len(rows) > 1:
        lines += table(rows)
    lines += [
        f"  left out: {clean(name.removeprefix('skipped_'))}: {clean(why)}"
        for name, why in figures.items()
        if name.startswith("skipped_")
    ]
    return lines + _doubts(figures, paint)


def _trainers(figures: dict[str, object]) -> list[tuple[str, str, str]]:
    rows = []
    for name, value in figures.items():
        head, dot, trainer = name.partition(".")
        if head == "checkpoint_s" and dot:
            verified = figures.get(f"checkpoint_verified.{trainer}") is True
            rows.append((f"  {clean(trainer)}", "", _seconds(value) + ("" if verified else ", unverified")))
    return rows


def _doubts(figures: dict[str, object], paint: Paint) -> list[str]:
    """What was not measured, and why."""
    doubts = {
        "load_told": "the UPS tells no load: what pausing saves is not known",
        "load_paused_settled": "the paused load did not settle: it is not learned",
        "load_capped_settled": "the capped load did not settle: it is not learned",
        "health_learned": "the discharge was not deep enough to measure the battery's health",
        "cap_speed_told": "no trainer told enough steps: nobody knows whether capping pays",
    }
    return [f"  {paint('!', 'yellow')} {text}" for name, text in doubts.items() if figures.get(name) is False]
