"""`powerguard report [ID]`: the record of an outage: durations, prediction and fact, steps lost, advice.

The output is text, Markdown, or a page with the timeline. An unknown value is shown as unknown, never as 0.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from powerguard.cli.outages import advice as judged
from powerguard.cli.outages import facts
from powerguard.cli.outages.explain import SO_FAR, explained
from powerguard.cli.outages.facts import LATE_REBOOT, OutageFacts
from powerguard.cli.outages.history import Outage, UnknownOutageError, add_journal, cost_rows, journal_of, read
from powerguard.cli.outages.picture import PHASE_WORDS, Mark, style, timeline
from powerguard.cli.render import Paint, clean, columns, duration, fold, is_endless, mode_note, moment, table
from powerguard.cli.shared import EX_CANTCREAT, EX_NOINPUT, EX_USAGE, fail
from powerguard.cli.status import last_battery
from powerguard.cli.words import PHASES, durations_in, outcome_of
from powerguard.core.model.policy import Mode
from powerguard.daemon.journal import JournalError, read_only
from powerguard.daemon.observe import figures


class Section(NamedTuple):
    """A table of a page. numbers: which columns are numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()


UNKNOWN: Final = "unknown"
_ROWS: Final = 12
"""Most trainers that the text lists; the page has them all."""
_GOOD: Final = frozenset(("ridden_through", "resumed_in_place", "clean_shutdown", "rehearsed"))
_COLOURS: Final = {"warning": "yellow", "error": "red"}
_RECOVERY: Final = (
    ("stop_s", "commit to the host's last entry", "the host's"),
    ("firmware_s", "power-on to OS: firmware and loader", "the site's"),
    ("boot_s", "power-on to OS: kernel start to the daemon", "the site's"),
    ("gate_s", "OS to training's start: utility and charge", "ours"),
    ("check_s", "OS to training's start: GPUs, storage, checkpoint", "ours"),
    ("start_s", "the start itself", "ours"),
    ("resumed_s", "started to resumed: a trainer reports a step", "the trainer's"),
)
_MARKED: Final = {
    "checkpoint_durable": "checkpoint durable",
    "gate_forced": "training may start, forced",
    "gate_opened": "training may start",
    "host_checked": "host is complete",
    "host_incomplete_raised": "host is not complete",
    "host_returned": "host is back",
    "outage_ended": "outage over",
    "policy_verified": "BMC read back",
    "power_off_accepted": "power-off under way",
    "power_off_ordered": "power-off ordered",
    "battery_low": "battery low",
    "source_lost": "UPS silent",
    "source_recovered": "UPS answers again",
    "grade_lowered": "a shorter stop",
    "grade_raised": "a longer stop again",
    "gpu_power_capped": "GPU power lowered",
    "older_checkpoint_stands": "an older checkpoint counts",
    "load_not_fallen_raised": "load did not fall",
    "resume_failed": "training did not start",
    "outage_continued": "daemon restarted",
    "action_failed": "an order failed",
    "shutdown_aborted": "aborted by a person",
    "utility_failed_again": "on battery again",
}


def _s(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds)


def _plus(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds) if seconds < 0.0 else f"+{duration(seconds)}"


def headline(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return the outage in one sentence, and its mood: good, warn or bad."""
    if report["ended_at"] is None:
        return f"it still runs; phase: {PHASES.get(report['phase'], clean(report['phase']))}", "warn"
    outcome = report["outcome"] or ""
    text = clean(outcome_of(outcome, report["mode"])) if outcome else "its end is unknown"
    grades = [row["grade"] for row in report["budget"] if row["phase"] == "shutdown"]
    if outcome == "clean_shutdown" and grades[-1:] == ["bare"]:
        text = "powered off with a bare stop, because no other fitted, and back"
    lost = report["steps_lost"]
    steps = "steps lost: unknown" if lost is None else f"{lost} steps lost"
    sent = ", ".join(dict.fromkeys(each["signal"] for t in report["trainers"] for each in t["signals"]))
    steps += f"; signals were sent: {sent}" if sent else ""
    return f"{text}; {steps}", "good" if outcome in _GOOD and not lost else "bad" if outcome == "dirty" else "warn"


def _section_durations(report: Mapping[str, Any]) -> Section:
    found = report["detection"]
    late_s = None
    if found["confirmed_s"] is not None and found["power_lost_s"] is not None:
        late_s = found["confirmed_s"] - found["power_lost_s"]
    seen = found["confirmed_s"] is not None or any(p["name"] == "on_battery" for p in report["phases"])
    rows = [("power lost to outage confirmed", _s(late_s))] if seen else []
    happened = {
        "held_s": any(p["name"] == "holding" for p in report["phases"]) and report["phase"] != "holding",
        "checkpoint_s": bool(report["trainers"]),
        "trained_on_s": bool(report["trainers"]),
        "away_s": report["boots"] > 1,
        "recovery_s": report["boots"] > 1 and report["ended_at"] is not None,
        "lasted_s": report["ended_at"] is not None,
    }
    counted = {"on_battery_s": "on battery, as counted"} if report["boots"] > 1 else {}
    counted = {"on_battery_s": SO_FAR} if report["ended_at"] is None else counted
    names = durations_in(report["mode"]) | counted
    rows += [(label, _s(report["durations"][name])) for name, label in names.items() if happened.get(name, True)]
    return Section("How long it took", ("part", "time"), rows, numbers=(1,))


def _section_cost(report: Mapping[str, Any]) -> Section:
    rows = [] if report["cost"]["lost_s"]["all"] is None else cost_rows(report["cost"])
    return Section("What it cost", ("what", "how much"), rows, numbers=(1,))


def _section_phases(report: Mapping[str, Any]) -> Section:
    so_far = "" if report["ended_at"] is not None else " so far"
    last = len(report["phases"]) - 1
    rows = [
        (PHASE_WORDS.get(p["name"], clean(p["name"])), _plus(p["from_s"]), _s(p["s"]) + (so_far if at == last else ""))
        for at, p in enumerate(report["phases"])
    ]
    return Section("Phases", ("phase", "from", "for"), rows, numbers=(1, 2))


def _powered_on(back: Mapping[str, Any]) -> str:
    cause = clean(str(back["powered_on_by"] or "unknown").replace("-", " "))
    cause = "a late reboot, ordered by powerguard" if back["powered_on_by"] == LATE_REBOOT else cause
    return f"{cause}, AC {({True: 'was gone', False: 'never gone', None: 'loss unknown'})[back['ac_gone']]}"


def _section_recovery(report: Mapping[str, Any]) -> Section:
    rows: list[tuple[str, str, str]] = []
    if report["boots"] > 1:
        back = report["recovery"]
        stopped = any(p["name"] == "shutdown" for p in report["phases"])
        happened = {"stop_s": stopped, "check_s": back["check_s"] is not None}
        rows = [("powered on by", "the site's", _powered_on(back))]
        rows += [(label, whose, _s(back[name])) for name, label, whose in _RECOVERY if happened.get(name, True)]
        rows.append(("from the daemon's start to training, in all", "ours", _s(back["ours_s"])))
    return Section("The return", ("part", "whose", "time"), rows, numbers=(2,))


def _section_predictions(report: Mapping[str, Any]) -> Section:
    def value(number: float, unit: str) -> str:
        return duration(number) if unit == "s" else f"{100 * number:.0f} %"

    def off(each: Mapping[str, Any]) -> str:
        error = each["measured"] - each["predicted"]
        if each["unit"] == "s":
            return "as predicted" if abs(error) < 0.5 else f"{'+' if error > 0 else ''}{duration(error)}"
        return "as predicted" if abs(error) < 0.005 else f"{100 * error:+.0f} points"

    rows = [
        (p["what"], value(p["predicted"], p["unit"]), value(p["measured"], p["unit"]), off(p))
        for p in report["predictions"]
    ]
    return Section("Prediction and fact", ("what", "predicted", "measured", "off by"), rows, numbers=(1, 2, 3))


def _section_budget(report: Mapping[str, Any]) -> Section:
    rows = [
        (
            PHASES.get(b["phase"], clean(b["phase"])),
            _plus(b["at_s"]),
            *(
                "endless" if is_endless(lasts) else _s(lasts)
                for lasts in (b["effective_now_s"], b["effective_paused_s"])
            ),
            _s(b["needs_s"]),
            UNKNOWN if b["load"] is None else f"{100 * b['load']:.0f} %",
            clean(b["grade"] or UNKNOWN),
        )
        for b in report["budget"]
    ]
    head = ("decision", "at", "lasts at this load", "lasts when paused", "still needed", "load", "stop")
    return Section("The budget at each decision", head, rows, numbers=(1, 2, 3, 4, 5))


def _section_trainers(report: Mapping[str, Any], limit: int | None) -> Section:
    slowest = sorted(
        report["trainers"], key=lambda t: (t["durable_s"] is not None, -(t["took_s"] or 0.0), t["trainer"])
    )
    shown = slowest if limit is None else slowest[:limit]
    rows = [
        (
            clean(t["trainer"]),
            _plus(t["asked_s"]),
            _s(t["expected_s"]),
            _s(t["took_s"]) if t["durable_s"] is not None else f"none: {clean(t['failure'] or 'no answer yet')}",
            str(t["step"]) if t["step"] is not None else UNKNOWN,
            {True: "yes", False: "no", None: "-"}[t["verified"]],
            str(t["tries"]),
            UNKNOWN if t["steps_lost"] is None else str(t["steps_lost"]),
            _afterwards(t),
        )
        for t in shown
    ]
    more = len(report["trainers"]) - len(shown)
    title = f"Checkpoints (the slowest {len(shown)} of {len(report['trainers'])})" if more > 0 else "Checkpoints"
    head = ("trainer", "asked", "planned", "took", "step", "verified", "tries", "steps lost", "afterwards")
    return Section(title, head, rows, numbers=(1, 2, 3, 4, 6, 7))


def _afterwards(trainer: Mapping[str, Any]) -> str:
    """Return what a trainer did after its checkpoint, and the signals that it got."""
    then = {"pause": "to pause", "exit": "to exit", "continue": "trained on"}.get(str(trainer["after"]), UNKNOWN)
    lost_s = trainer["at_risk_s"]
    risk = [f"for {duration(lost_s)} more"] if lost_s else []
    signals = [f"{each['signal']} {_plus(each['at_s'])}{_effect(each)}" for each in trainer["signals"]]
    ended = [f"ended {_plus(trainer['ended_s'])}"] if trainer["ended_s"] is not None else []
    return ", ".join([" ".join([then, *risk]), *signals, *ended])


def _effect(signal: Mapping[str, Any]) -> str:
    """Say what a signal did to the load, by this host's own draw if that was measured."""
    for unit, before, after in (("W", "own_before_w", "own_after_w"), ("%", "load_before_pct", "load_after_pct")):
        if signal[before] is not None and signal[after] is not None:
            return f" ({signal[before]:.0f} to {signal[after]:.0f} {unit})"
    return ""


def _section_feeds(report: Mapping[str, Any]) -> Section:
    rows = [
        (clean(feed["ups"]), clean(s["source"]), _plus(s["from_s"]), _s(s["to_s"] - s["from_s"]))
        for feed in report["feeds"]
        for s in feed["stretches"]
        if s["to_s"] >= 0.0
    ]
    return Section("Feeds, by their readings", ("UPS", "output from", "from", "for"), rows, numbers=(2, 3))


def _advice(report: Mapping[str, Any]) -> list[str]:
    return [f"{a['text']}" + (f" [{a['setting']}]" if a["setting"] else "") for a in report["advice"]]


def _sections(report: Mapping[str, Any], limit: int | None) -> list[Section]:
    return [
        _section_durations(report),
        _section_cost(report),
        _section_recovery(report),
        _section_predictions(report),
        _section_trainers(report, limit),
        _section_phases(report),
        _section_budget(report),
        _section_feeds(report),
    ]


def _title(report: Mapping[str, Any]) -> str:
    host = f"{clean(report['host'])}: " if report["host"] else ""
    return f"{host}outage {clean(report['outage'])}, {moment(report['started_at'])}{mode_note(report['mode'])}"


def describe(report: Mapping[str, Any], paint: Paint) -> list[str]:
    """Return the report as lines for a terminal."""
    sentence, mood = headline(report)
    lines = [paint(_title(report), "bold"), paint(sentence, {"warn": "yellow", "bad": "red"}.get(mood, ""))]
    lines += [paint(f"! {clean(doubt)}", "yellow") for doubt in report["doubts"]]
    for section in _sections(report, _ROWS):
        if section.rows:
            shown = table([tuple(section.head), *section.rows], width=columns(), whole=section.numbers)
            lines += ["", paint(section.title, "bold"), *shown]
    lines += ["", paint("What to improve", "bold")]
    lines += [
        "  " + paint(f"- {clean(text)}", _COLOURS.get(str(each["level"]), ""))
        for each, text in zip(report["advice"], _advice(report), strict=True)
    ] or ["  no advice"]
    if report["what_if"]:
        lines += [
            "",
            paint("What would have changed it", "bold"),
            *(f"  - {clean(text)}" for text in report["what_if"]),
        ]
    return [*lines, "", f"Step by step: powerguard explain {clean(report['outage'])}"]


# --- Markdown ---------------------------------------------------------------------------------------------------------

_MARKUP: Final = re.compile(r"([\\`*_{}\[\]<>|#~!&])")


def _md(text: object) -> str:
    """Return text that Markdown shows literally: a name must not become a link, a tag or a column."""
    return _MARKUP.sub(r"\\\1", clean(text))


def markdown(report: Mapping[str, Any]) -> list[str]:
    """Return the report as Markdown, for a ticket."""
    lines = [f"# {_md(_title(report))}", "", f"**{_md(headline(report)[0])}**"]
    lines += ["", *(f"> {_md(doubt)}" for doubt in report["doubts"])] if report["doubts"] else []
    lines += ["", "## What to improve", "", *([f"- {_md(text)}" for text in _advice(report)] or ["no advice"])]
    for section in _sections(report, _ROWS):
        if section.rows:
            bars = " | ".join("---:" if at in section.numbers else "---" for at in range(len(section.head)))
            lines += ["", f"## {_md(section.title)}", "", f"| {' | '.join(section.head)} |", f"| {bars} |"]
            lines += [f"| {' | '.join(_md(cell) for cell in row)} |" for row in section.rows]
    if report["what_if"]:
        lines += ["", "## What would have changed it", "", *(f"- {_md(text)}" for text in report["what_if"])]
    return lines


# --- As a page --------------------------------------------------------------------------------------------------------


def marks(report: Mapping[str, Any]) -> list[Mark]:
    """Return the labels under the timeline: the important events, and of several at once only the number."""
    found: list[Mark] = []
    counted: dict[tuple[str, float], int] = {}
    for each in report["marks"]:
        label = _MARKED.get(each["event"])
        if report["mode"] not in {None, "armed"} and each["event"].startswith("power_off"):
            label = "power-off recorded" if each["event"] == "power_off_accepted" else None
        if report["mode"] == "dry-run" and each["event"] == "checkpoint_durable":
            label = None
        if label is not None:
            counted[label, round(each["at_s"])] = counted.get((label, round(each["at_s"])), 0) + 1
    for (label, at_s), times in counted.items():
        found.append(Mark(at_s, label if times == 1 else f"{label} ({times})"))
    return found


def render(**values: object) -> str:
    """Return the page. Every word is escaped; a name that the template uses and that is not given is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("powerguard.cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return pages.get_template("report.html").render(values)


def write(where: str, text: str) -> str:
    """Write a page, completely or not at all. "-": stdout. Return why not, or ""."""
    if where == "-":
        sys.stdout.write(text)
        return ""
    path = beside = Path(where)
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # A device or a pipe cannot be replaced as a whole.
            return ""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        if beside != path:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        return f"--html: {path}: {error.strerror or error}"
    return ""


def html_page(report: Mapping[str, Any]) -> str:
    """Return the report as a page of its own."""
    sentence, mood = headline(report)
    story = Section(
        "What happened",
        ("after", "what"),
        [(_plus(each["at_s"]), clean(each["text"])) for each in report["marks"][:_STORY]],
        numbers=(0,),
    )
    more = len(report["marks"]) - _STORY
    made = moment(time.time())  # noqa: TID251 - for display
    return render(
        title=_title(report),
        verdict=sentence,
        mood=mood,
        drawing=timeline(report, marks(report)),
        style=style(),
        notes=[*(f"Doubt: {clean(doubt)}" for doubt in report["doubts"])],
        sections=(
            Section("What to improve", ("advice", "setting"), _advice_rows(report)),
            Section("What would have changed it", ("what",), [(text,) for text in report["what_if"]]),
            *_sections(report, None),
            story,
        ),
        footer=f"Made {made} from the journal, by powerguard report."
        + (f" {more} more steps: powerguard explain {clean(report['outage'])}." if more > 0 else ""),
    )


_STORY: Final = 1000


def _advice_rows(report: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    # A page shows a backtick as it is.
    found = [(clean(each["text"]).replace("`", ""), clean(each["setting"] or "")) for each in report["advice"]]
    return found or [("no advice", "")]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Report an outage from the journal: how long each part took, prediction and fact, steps lost, "
        "the return, and advice. Works without the daemon and during the outage. Exit 0: reported; 64: no "
        "such outage; 66: the journal cannot be read; 73: the page cannot be written."
    )
    parser.add_argument(
        "outage", metavar="ID", nargs="?", default="last", help="its id, the beginning of it, or last (default)"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object on stdout")
    shape.add_argument("--markdown", action="store_true", help="Markdown on stdout, for a ticket")
    shape.add_argument("--html", metavar="FILE", help="write a web page with the timeline; - for stdout")
    add_journal(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        path = journal_of(args)
        with read_only(path) as db:
            outage = read(db, args.outage)
        battery, _ = last_battery(str(path))
        report = reported(outage, measured=battery is not None and battery["measured"] is not None)
    except UnknownOutageError as error:
        return fail(args, "report", str(error), EX_USAGE)
    except JournalError as error:
        return fail(args, "report", str(error), EX_NOINPUT)
    if args.html is not None:
        return _write(args, html_page(report))
    if args.json:
        print(json.dumps(report, indent=2))
    elif args.markdown:
        print("\n".join(markdown(report)))
    else:
        print("\n".join(fold(describe(report, Paint(sys.stdout)))))
    return 0


def _write(args: argparse.Namespace, page: str) -> int:
    trouble = write(args.html, page)
    if trouble:
        return fail(args, "report", f"{trouble} (choose a --html FILE in a folder that you can write)", EX_CANTCREAT)
    if args.html != "-":
        print(f"written: {args.html}", file=sys.stderr)
    return 0


def reported(outage: Outage, *, measured: bool = False) -> dict[str, Any]:
    """Return the outage as one object, for text, page and --json.

    measured: the battery's health has been measured by now.
    """
    gathered = facts.gather(outage)
    story = explained(gathered)
    record = outage.record
    budget, trainers = facts.budget(gathered), facts.trainers(gathered)
    policy = gathered.policy
    report: dict[str, Any] = {
        "schema_version": 1,
        "object": "report",
        "outage": record.id,
        "host": record.figures.get("host"),
        "mode": None if policy is None else policy.mode.value,
        "started_at": record.started_wall,
        "ended_at": record.ended_wall,
        "outcome": record.outcome or None,
        "phase": story["phase"],
        "last_s": gathered.last_s,
        "boots": 1 + len(gathered.notes("host_returned")),
        "steps_lost": facts.steps_lost(gathered, trainers),
        "detection": facts.detection(gathered),
        "durations": story["durations"],
        "cost": figures.plain_cost(None if record.ended_wall is None else figures.cost_of(record.figures)),
        "recovery": facts.recovery(gathered),
        "feeds": facts.feeds(gathered),
        "phases": facts.phases(gathered),
        "trainers": [] if policy is not None and policy.mode is Mode.DRY_RUN else trainers,  # else they were asked
        "budget": budget,
        "predictions": judged.predictions(gathered, budget),
        "runtime": facts.runtime(gathered),
        "marks": [
            {"at_s": step["after_s"], "level": step["level"], "event": step["event"], "text": step["text"]}
            for step in story["steps"]
        ],
        "doubts": doubts(gathered),
    }
    return report | {"advice": judged.advice(gathered, report, measured=measured), "what_if": story["what_if"]}


def doubts(gathered: OutageFacts) -> list[str]:
    """Return the parts of this report that the journal does not prove."""
    found = []
    dropped = sum(row.heard.dropped for row in gathered.outage.rows)
    if not gathered.outage.rows:
        found.append("this journal did not keep every reading: times are exact to 5 s, and the settings are unknown")
    elif dropped:
        found.append(f"{dropped} readings are missing")
    missing = sum(
        int(figures.number(step.line.payload.get("steps")) or 0) for step in gathered.steps if step.line.kind == "gap"
    )
    if missing:
        found.append(f"{missing} steps are missing")
    if not gathered.steps:
        found.append("the journal has no step of it left")
    found += [
        f"the wall clock was set by {change_s:+.0f} s during the outage: earlier times of day are of the old clock"
        for _, change_s in gathered.elapsed.set_s
    ]
    if gathered.elapsed.doubted:
        found.append(
            "the wall clock is not reliable over the reboot: the time off is unknown, and the rest "
            "is counted from the end of the old boot"
        )
    return found
