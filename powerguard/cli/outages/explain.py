"""`powerguard explain [ID]`: why each step of an outage happened when it did, from the journal."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from powerguard.cli.outages import history
from powerguard.cli.outages.facts import OutageFacts, away_s, gather, phases
from powerguard.cli.outages.history import (
    Elapsed,
    UnknownOutageError,
    add_journal,
    between,
    is_late_reboot,
    journal_of,
    read,
)
from powerguard.cli.render import Paint, after_start, clean, clock_of, duration, fold, mode_note, moment, table
from powerguard.cli.shared import EX_NOINPUT, EX_USAGE, fail, print_answer
from powerguard.cli.words import NEED_SHARE, PHASES, durations_in, ordered, outcome_of, sentence, short_since_s
from powerguard.core.decide.transitions import Cause
from powerguard.core.energy import budget
from powerguard.core.model.actions import Grade
from powerguard.core.model.policy import Policy
from powerguard.daemon.journal import JournalError, Line, OutageRecord, pairs, read_only
from powerguard.daemon.observe.figures import number

_COLOURS: Final = {"warning": "yellow", "error": "red"}
_SHORT_S: Final = 45.0
"""At this runtime at the present load, training is paused in any case (`core.decide.conditions`)."""
SO_FAR: Final = "on battery so far, as written"
_SILENT: Final = frozenset(
    {"TriggerCheckpoint", "PowerOff", "CapPower", "PollNow", "EnsurePolicy", "StopTrainer", "TerminateTrainer"}
)
"""Orders that have a note of their own."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Explain an outage from the journal: each step with the numbers that decided, what would have "
        "changed the outcome, and how it ended. Works without the daemon and during the outage. Exit 0: explained; "
        "64: no such outage; 66: the journal cannot be read."
    )
    parser.add_argument(
        "outage",
        metavar="ID",
        nargs="?",
        default="last",
        help="its id, the beginning of it, or last (default); job: when training stood because of another host of its "
        "job",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_journal(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    show: Callable[[Mapping[str, Any], Paint], list[str]] = describe
    more: list[str] = []
    try:
        with read_only(journal_of(args)) as db:
            if args.outage == history.JOB:
                answer, show = history.explained_holds(history.holds(db)), history.describe_holds
            else:
                answer = explained(gather(read(db, args.outage)))
                more = history.holds_within(db, answer["started_at"], answer["ended_at"])
    except UnknownOutageError as error:
        return fail(args, "explain", str(error), EX_USAGE)
    except JournalError as error:
        return fail(args, "explain", str(error), EX_NOINPUT)
    print_answer(args, answer, lambda: fold([*show(answer, Paint(sys.stdout)), *more]))
    return 0


# --- Gathering --------------------------------------------------------------------------------------------------------


def explained(facts: OutageFacts) -> dict[str, Any]:
    """Return the outage as one object, for the text and for --json."""
    record, story, elapsed, policy = facts.outage.record, facts.outage.lines, facts.elapsed, facts.policy
    mode = None if policy is None else policy.mode.value
    requests = [line for line in story if line.kind == "action" and line.event == "TriggerCheckpoint"]
    steps = [
        _ordered(elapsed, line, mode) if line.kind == "action" else _step(elapsed, line, story, mode, requests)
        for line in story
        if line.kind in ("note", "gap") or (line.kind == "action" and line.event not in _SILENT)
    ]
    _add_wait(steps, policy)
    readings = host_readings(facts)
    return {
        "schema_version": 1,
        "object": "explanation",
        "outage": record.id,
        "mode": mode,
        "started_at": record.started_wall,
        "ended_at": record.ended_wall,
        "outcome": record.outcome or None,
        "phase": _phase(record, steps),
        "steps": steps,
        "what_if": what_if(record, steps, readings, policy),
        "durations": _durations(facts, steps, readings),
    }


def host_readings(facts: OutageFacts) -> list[tuple[float, str]]:
    """Return the output source of the host's UPS by each reading; of several, whether too few supplies had utility."""
    policy = facts.policy
    if not facts.events:
        return []
    if policy is None or not policy.feeds:
        own_ups = None if policy is None else policy.ups
        return [(at_s, each.output_source.value) for at_s, each in facts.readings if own_ups in (None, each.ups)]
    supplies = {each.policy.ups: each.supplies for each in policy.feeds}
    spare = sum(supplies.values()) - policy.minimum_supplies
    newest: dict[str, str] = {}
    found: list[tuple[float, str]] = []
    for at_s, each in facts.readings:
        newest[each.ups] = each.output_source.value
        lost = sum(supplies.get(ups, 0) for ups, source in newest.items() if source == "battery")
        source = "utility" if "utility" in newest.values() else newest[each.ups]
        found.append((at_s, "battery" if lost > spare else source))
    return found


def _trains_on(requests: Sequence[Line], until: Line) -> str:
    """Name the trainers whose last checkpoint request let them train on. requests: all checkpoint requests."""
    after = {str(line.payload.get("trainer")): line.payload.get("after") for line in requests if line.seq < until.seq}
    return ", ".join(name for name, then in after.items() if then == "continue")


def _add_wait(steps: Sequence[dict[str, Any]], policy: Policy | None) -> None:
    """Explain at the commit why it did not come as soon as the stop no longer fitted."""
    latched = next((step for step in steps if step["numbers"].get("new") == "shutdown"), None)
    if latched is None or policy is None or latched["because"] != "budget":
        return
    before = [step for step in steps if step["event"] == "phase_changed" and step["after_s"] < latched["after_s"]]
    moments = [
        (step["after_s"], number(step["numbers"].get("reff_s")), number(step["numbers"].get("stop_s")))
        for step in before
        if step["numbers"].get("new") != "online"
    ]
    since_s = short_since_s(moments, latched["after_s"], policy.commit_dwell_s)
    if since_s is not None:
        latched["text"] += (
            f". The stop did not fit from {after_start(since_s)} on: powerguard waited for "
            f"{policy.commit_dwell_s:.0f} s on battery and one more reading, because a shorter dip needs no power-off"
        )


def _step(
    elapsed: Elapsed, line: Line, story: Sequence[Line], mode: str | None, requests: Sequence[Line]
) -> dict[str, Any]:
    numbers = pairs(line.payload.get("numbers"))
    context: dict[str, object] = {"trains_on": _trains_on(requests, line)}
    if line.event == "host_returned" and line.boot_id in elapsed.away_s:
        # Its own figure is by the clock at boot, which may have been wrong.
        context["away_s"] = elapsed.away_s[line.boot_id]
    if line.event == "outage_ended" and elapsed.away_s:
        context["lasted_s"] = elapsed.ended_s
    if line.event == "host_powered_on":
        context["late_reboot"] = is_late_reboot(story, line, numbers)
    gap = line.kind == "gap"
    text = f"{line.payload.get('steps')} steps are missing: {line.because}" if gap else ""
    if not gap and "kind" not in line.payload:  # A damaged row: only its name and its reason are left.
        text = f"{line.event.replace('_', ' ')}: {line.because}"
    return {
        "at": line.wall,
        "after_s": elapsed.of(line),
        "event": line.event,
        "level": "warning" if gap else str(line.payload.get("level", "info")),
        "because": line.because,
        "text": text or sentence(line.event, line.because, numbers | context, mode),
        "numbers": numbers,
    }


def _ordered(elapsed: Elapsed, line: Line, mode: str | None) -> dict[str, Any]:
    whom = str(line.payload.get("trainer") or "")
    text = ordered(line.event, whom, mode)
    if line.event == "ResumeTrainer" and mode != "dry-run":
        text = f"asked {whom} to resume"
    return {
        "at": line.wall,
        "after_s": elapsed.of(line),
        "event": "ordered",
        "level": "info",
        "because": line.event,
        "text": text,
        "numbers": {"trainer": whom} if whom else {},
    }


def _phase(record: OutageRecord, steps: Sequence[Mapping[str, Any]]) -> str:
    if record.ended_wall is not None:
        return "online"
    news = [str(step["numbers"].get("new")) for step in steps if step["event"] == "phase_changed"]
    if any(step["event"] == "host_returned" for step in steps) and news[-1:] == ["shutdown"]:
        return "recovery"
    return news[-1] if news else "on_battery"


def _moment_of(steps: Sequence[Mapping[str, Any]], new: str) -> Mapping[str, Any] | None:
    """Return the step that began a phase."""
    return next((s for s in steps if s["event"] == "phase_changed" and s["numbers"].get("new") == new), None)


def _returned_s(readings: Sequence[tuple[float, str]], since_s: float) -> float | None:
    """When utility became stable after `since_s`, by the readings: the first of those that end it."""
    came_s: float | None = None
    for after_s, source in readings:
        if after_s < since_s:
            continue
        if source == "battery":
            came_s = None
        elif source == "utility" and came_s is None:
            came_s = after_s
    return came_s


def what_if(
    record: OutageRecord,
    steps: Sequence[Mapping[str, Any]],
    readings: Sequence[tuple[float, str]],
    policy: Policy | None,
) -> list[str]:
    """Return what would have changed the outcome, by the readings and budgets of that time.

    Computed with each boot's own clock, so a change of the wall clock has no effect.
    """
    paused, held, latched = (_moment_of(steps, name) for name in ("emergency_checkpoint", "holding", "shutdown"))
    sentences: list[str] = []
    stable_s = None if policy is None else policy.utility_stable_s
    if latched is not None and stable_s is not None and not latched["because"].startswith("power_off_at"):
        at_s = latched["after_s"]
        text = f"Utility back before {clock_of(latched['at'])} ({after_start(at_s)}) would have spared the power-off: "
        text += f"one reading of it holds the commit back, and {stable_s:.0f} s of it end the outage."
        came_s = _returned_s(readings, paused["after_s"] if paused is not None else 0.0)
        if came_s is not None and at_s <= came_s < at_s + 600.0:
            text += f" It came {duration(came_s - at_s)} too late."
        sentences.append(text)
    elif paused is not None and record.outcome == "resumed_in_place":
        came_s = _returned_s(readings, paused["after_s"])
        if came_s is not None:
            early = duration(came_s - paused["after_s"])
            sentences.append(f"Utility {early} earlier, and no emergency checkpoint would have been due.")
        last = held or paused
        reff_s, stop_s = (number(last["numbers"].get(name)) for name in ("reff_paused_s", "stop_s"))
        spare_s = 0.0 if reff_s is None or stop_s is None else reff_s - stop_s - _room_s(last["numbers"])
        is_aborted = any(step["numbers"].get("cause") == Cause.ABORTED for step in steps)
        if came_s is not None and held is not None and spare_s > 0.0 and not is_aborted:
            sentences.append(
                f"When the hold began, at least {duration(spare_s)} were left until the power-off, at the load "
                f"that was expected; utility came after {duration(came_s - held['after_s'])} of it."
            )
    elif paused is None and record.outcome == "ridden_through":
        sentences += _spare(_moment_of(steps, "online"))
    if latched is not None:
        ordered = next((step for step in reversed(steps) if step["event"] == "power_off_ordered"), latched)
        sentences += _grades(latched, ordered["numbers"].get("grade"), policy)
    if paused is not None and paused["because"] == "blind":
        sentences.append(
            "With a runtime table in the settings (runtime_table), training could have continued for longer."
        )
    return sentences


def _room_s(numbers: Mapping[str, Any]) -> float:
    """Seconds by which the host makes room for more important ones on its UPS."""
    return number(numbers.get("shed_s")) or 0.0


def _spare(ended: Mapping[str, Any] | None) -> list[str]:
    """Say how long training could have continued: the runtime falls by at most one second per second."""
    numbers = {} if ended is None else ended["numbers"]
    names = ("reff_now_s", "reff_paused_s", "checkpoint_s", "stop_s")
    reff_now_s, reff_paused_s, checkpoint_s, stop_s = (number(numbers.get(name)) for name in names)
    if not reff_now_s or not reff_paused_s or checkpoint_s is None or stop_s is None:
        return []
    need_s = checkpoint_s + stop_s + _room_s(numbers)
    spare_s = (reff_paused_s - need_s / NEED_SHARE) * reff_now_s / reff_paused_s
    spare_s = min(spare_s, reff_now_s - _SHORT_S)
    if spare_s <= 0.0:
        return []
    return [
        f"By the budget at its end, training could have continued for at least {duration(spare_s)} more on battery."
    ]


def _grades(latched: Mapping[str, Any], grade: object, policy: Policy | None) -> list[str]:
    """Say what a more orderly stop would have needed. grade: of the ordered stop."""
    numbers = latched["numbers"]
    reff_s = number(numbers.get("reff_now_s"))
    if policy is None or reff_s is None or grade not in (Grade.SHORT, Grade.BARE):
        return []
    full_s = budget.stop_s(policy, Grade.FULL, reserve_s=0.0)
    if full_s <= reff_s:
        return []
    had = f"A full stop needs {duration(full_s)} without its reserve; there were {duration(reff_s)}"
    more = f"{duration(full_s - reff_s)} more of the battery would have allowed the full one"
    return [f"{had}, so it was a {grade} one: {more}."]


def _on_battery_s(
    record: OutageRecord, steps: Sequence[Mapping[str, Any]], readings: Sequence[tuple[float, str]]
) -> float | None:
    """Seconds on battery; of an outage that runs so far, for its figures are written only now and then."""
    known = number(record.figures.get("on_battery_s"))
    if record.ended_wall is not None or any(step["event"] == "host_returned" for step in steps):
        return known
    since = [(after_s, source) for after_s, source in readings if after_s >= 0.0]
    if any(source == "utility" for _, source in since):
        return known
    newest_s = max((*(step["after_s"] for step in steps), *(after_s for after_s, _ in since)), default=0.0)
    return round(max(known or 0.0, newest_s), 3)


def _durations(
    facts: OutageFacts, steps: Sequence[Mapping[str, Any]], readings: Sequence[tuple[float, str]]
) -> dict[str, float | None]:
    """Return how long each part took, in seconds; None if it did not happen or is unknown."""
    record, elapsed = facts.outage.record, facts.elapsed
    at = {name: None if (s := _moment_of(steps, name)) is None else float(s["after_s"]) for name in PHASES}
    away = [away_s(facts, step) for step in facts.notes("host_returned")]
    known = [s for s in away if s is not None]
    return {
        "trained_on_s": between(0.0, at["emergency_checkpoint"]),
        "checkpoint_s": number(record.figures.get("checkpoint_s")),
        "held_s": _held_s(facts),
        "on_battery_s": _on_battery_s(record, steps, readings),
        "away_s": round(sum(known), 3) if known and len(known) == len(away) else None,
        "recovery_s": number(record.figures.get("recovery_s")),
        "lasted_s": between(0.0, elapsed.ended_s),
    }


def _held_s(facts: OutageFacts) -> float | None:
    """Seconds of hold: until the commit, an abort, the host's end or that of the outage; None while it runs."""
    over = phases(facts) if facts.outage.record.ended_wall is not None else phases(facts)[:-1]
    held = [stretch["s"] for stretch in over if stretch["name"] == "holding"]
    return round(sum(held), 3) if held and None not in held else None


# --- Output -----------------------------------------------------------------------------------------------------------


def describe(answer: Mapping[str, Any], paint: Paint) -> list[str]:
    """Return the explanation as lines."""
    outcome = clean(outcome_of(answer["outcome"] or "", answer["mode"]))
    running = answer["ended_at"] is None
    lines = [
        paint(f"outage {clean(answer['outage'])}, {moment(answer['started_at'])}{mode_note(answer['mode'])}", "bold"),
        f"it still runs; phase: {PHASES.get(answer['phase'], answer['phase'])}" if running else outcome,
        "",
    ]
    rows = [
        (
            clock_of(step["at"]),
            after_start(step["after_s"]),
            paint(clean(step["text"]), _COLOURS.get(str(step["level"]), "")),
        )
        for step in answer["steps"]
    ]
    lines += table(rows, indent="") or ["the journal has no step of it left"]
    if answer["what_if"]:
        lines += ["", "What would have changed it"]
        lines += [f"  {clean(text)}" for text in answer["what_if"]]
    names = durations_in(answer["mode"]) | ({"on_battery_s": SO_FAR} if running else {})
    known = [(text, duration(answer["durations"][name])) for name, text in names.items()]
    known = [row for row in known if row[1] != "?"]
    if known:
        lines += ["", "How long it took", *table(known)]
    return lines
