"""`powerguard replay FILE`: a recorded outage through today's decisions."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from powerguard.cli.plan import amounts
from powerguard.cli.render import Paint, after_start, clean, duration, fold, table
from powerguard.cli.shared import CONFIG, EX_CONFIG, EX_DATA, EX_USAGE, fail
from powerguard.cli.words import PHASES, mark, ordered, sentence

if TYPE_CHECKING:
    from powerguard.core.model.policy import Policy, TrainerPolicy
    from powerguard.sim.replay.play import Difference, Mark, Recording, Replayed
    from powerguard.sim.replay.recording import Wanted

SEED_S: Final = 60.0
_COLOURS: Final = {"warning": "yellow", "error": "red"}
_NOT_KNOWN: Final = "not known"
"""Result for decisions after the recording's end: unknown whether it was done."""
_ROUNDING_S: Final = 0.01
_SHOWN_BY_NOTES: Final = frozenset(
    {"TriggerCheckpoint", "PowerOff", "CapPower", "PollNow", "StopTrainer", "TerminateTrainer"}
)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Feed a recorded outage to today's decisions, and show when each phase would have begun and why. "
        "FILE is what `powerguard history export` printed, or CSV with the columns t_s,ups,source,output_source,"
        "runtime_s,charge_pct,load_pct and any further field of a reading (empty: unknown). Exit 0: shown, and with "
        "--diff the same as recorded; 1: with --diff, not the same; 65: the file cannot be replayed."
    )
    parser.add_argument("file", metavar="FILE", help="export of the journal, or CSV")
    parser.add_argument("--config", dest="settings_file", metavar="FILE", help="use these settings")
    parser.add_argument("--table", metavar="LOAD:S,...", help="runtime table, such as 50:540,75:360,100:240")
    parser.add_argument(
        "--trainer",
        action="append",
        metavar="NAME:CONDUCT:S",
        help="a trainer: pause, exit or continue, and how long a checkpoint takes; may be repeated",
    )
    parser.add_argument(
        "--ups", metavar="NAME", default="", help="one of several UPSes; else all feeds of the settings"
    )
    parser.add_argument("--outage", metavar="ID", help="only this one of the file's outages")
    parser.add_argument("--obedient", action="store_true", help="let every order succeed, regardless of the recording")
    parser.add_argument("--diff", action="store_true", help="compare with what the daemon did")
    parser.add_argument(
        "--tolerance",
        metavar="S",
        type=float,
        default=1.5,
        help="treat events this many seconds apart as simultaneous (1.5: one poll)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from powerguard.settings.load import SettingsError
    from powerguard.sim.replay.play import replay
    from powerguard.sim.replay.recording import ReplayFileError, load

    try:
        wanted, assumed, origin = _wanted(args)
        recordings = _chosen(args, load(args.file, wanted))
    except SettingsError as error:
        return fail(args, "replay", "; ".join(error.problems), EX_CONFIG)
    except ReplayFileError as error:
        return fail(args, "replay", str(error), EX_DATA)
    except ValueError as error:
        return fail(args, "replay", str(error), EX_USAGE)
    replays = [replay(each, obedient=args.obedient) for each in recordings]
    diffs = [_compared(each, args.tolerance) if args.diff else None for each in replays]
    same = not any(_differs(difference) for diff in diffs for difference in diff or ())
    origin = origin or ("as recorded" if all(each.legs[0].state is not None for each in recordings) else "defaults")
    shown = assumed if origin != "as recorded" else []
    if args.json:
        outages = [_object(each, diff) for each, diff in zip(replays, diffs, strict=True)]
        head = {"schema_version": 1, "object": "replay", "file": args.file, "settings": origin, "assumed": shown}
        print(json.dumps({**head, "same": same if args.diff else None, "outages": outages}, indent=2))
    else:
        paint = Paint(sys.stdout)
        but = "" if shown else _but_for(args)
        print(f"{clean(args.file)}, decided by today's rules; settings: {clean(origin)}{but}")
        print("".join(f"  {line}\n" for line in shown), end="")
        for each, diff in zip(replays, diffs, strict=True):
            print("\n" + "\n".join(fold(_story(each, paint))))
            if diff is not None:
                print("\n" + "\n".join(_side_by_side(each, diff, paint)))
    return 0 if same else 1


# --- Options ----------------------------------------------------------------------------------------------------------


def _wanted(args: argparse.Namespace) -> "tuple[Wanted, list[str], str]":
    """Return the settings, the assumptions, and the origin of the settings ("": see the file)."""
    from powerguard.core.model.policy import Policy, TrainerPolicy
    from powerguard.sim.replay.recording import Wanted

    if not 0.0 <= args.tolerance < math.inf:
        message = f"--tolerance: {args.tolerance:g} is not a time in seconds (example: 1.5, one poll)"
        raise ValueError(message)
    table_ = None if args.table is None else amounts.table("--table", args.table)
    trainers = None if args.trainer is None else _trainers(args.trainer)
    path = args.settings_file or (args.config if args.config != CONFIG else None)
    policy = None if path is None else _settings(Path(path))
    default = Policy(boot_id="replay", ups="", trainers=(TrainerPolicy(name="trainer", checkpoint_s=SEED_S),))
    wanted = Wanted(policy=policy, default=default, table=table_, trainers=trainers, ups=args.ups)
    return wanted, _assumed(wanted.change(policy or default)), path or ""


def _chosen(args: argparse.Namespace, recordings: "tuple[Recording, ...]") -> "tuple[Recording, ...]":
    """Return the selected ones. Raises ValueError if the file does not have the selection."""
    events = (event for each in recordings for leg in each.legs for event in leg.events)
    names = dict.fromkeys(str(event.ups) for event in events if hasattr(event, "ups"))
    if args.ups and args.ups not in names:
        message = f"--ups: {args.file} has no reading of {args.ups!r:.40}, only of {', '.join(names)}"
        raise ValueError(message)
    if args.outage is not None:
        recordings = tuple(each for each in recordings if each.name.startswith(args.outage))
        if not recordings:
            message = f"{args.file}: has no outage {args.outage!r:.40}"
            raise ValueError(message)
    if args.diff and not all(each.marks for each in recordings):
        cut = any(each.cut_off for each in recordings)
        why = "it has been cut off, so export it again" if cut else "--diff needs an export of the journal"
        message = f"{args.file}: has no record of actions; {why}"
        raise ValueError(message)
    return recordings


def _but_for(args: argparse.Namespace) -> str:
    """Say which options took the place of some of the recorded settings."""
    given = [option for option in ("table", "trainer") if getattr(args, option) is not None]
    return ", but for " + " and ".join(f"--{option}" for option in given) if given else ""


def _settings(path: Path) -> "Policy":
    from datetime import UTC, datetime

    from powerguard.settings.load import load
    from powerguard.settings.policy import policy

    return policy(load(path), boot_id="replay", today=datetime.now(UTC).date())


def _assumed(policy: "Policy") -> list[str]:
    points = ", ".join(f"{100 * load:g} %: {seconds:g} s" for load, seconds in policy.runtime_table)
    trainers = ", ".join(
        f"{each.name} ({each.conduct}, checkpoint {each.checkpoint_s:g} s)" for each in policy.trainers
    )
    battery = f"health {policy.health:g}, margin {policy.margin:g}"
    return [
        f"runtime table: {points or 'none: the reports of the UPS on utility count'}",
        f"battery: {battery}; stop {policy.stop_q95_s:g} s, reserve {policy.reserve_s:g} s",
        f"trainers: {clean(trainers) or 'none'}",
    ]


def _trainers(texts: Sequence[str]) -> "tuple[TrainerPolicy, ...]":
    trainers = tuple(_trainer(text) for text in texts)
    names = [each.name for each in trainers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        message = f"--trainer: {clean(twice)} occurs twice; give each trainer its own name"
        raise ValueError(message)
    return trainers


def _trainer(text: str) -> "TrainerPolicy":
    from powerguard.core.model.actions import Conduct
    from powerguard.core.model.policy import TrainerPolicy

    name, _, rest = text.partition(":")
    conduct, _, seconds = rest.partition(":")
    try:
        checkpoint_s = float(seconds)
    except ValueError:
        checkpoint_s = 0.0
    if not name or conduct not in tuple(Conduct) or not 0.0 < checkpoint_s <= 1e5:
        message = f"--trainer: {text!r} is not NAME:CONDUCT:SECONDS (example: llm:pause:20; or exit, continue)"
        raise ValueError(message)
    most_s = max(600.0, checkpoint_s)
    return TrainerPolicy(name=name, conduct=Conduct(conduct), checkpoint_s=checkpoint_s, max_checkpoint_s=most_s)


# --- Comparing --------------------------------------------------------------------------------------------------------


def _compared(replayed: "Replayed", tolerance_s: float) -> "tuple[Difference, ...]":
    """Compare today's decisions with the recorded ones, as far as the recording goes: it may end with its commit."""
    from powerguard.sim.replay.play import compare

    until_s = _known_until_s(replayed.recording, tolerance_s)
    found = compare(replayed, tolerance_s=tolerance_s)
    return tuple(replace(each, verdict=_NOT_KNOWN) if _is_new_after(each, until_s) else each for each in found)


def _is_new_after(difference: "Difference", until_s: float) -> bool:
    return difference.was is None and difference.now is not None and difference.now.t_s > until_s


def _known_until_s(recording: "Recording", tolerance_s: float) -> float:
    """Return the end of the recorded actions, in the recording's clock.

    An export lists first the events and then the actions, so of a truncated file the last action counts, and that
    moment may be incomplete.
    """
    done_s = [leg.end_s + leg.shift_s for leg in recording.legs if leg.end_s is not None]
    if recording.cut_off:
        return max(done_s, default=-math.inf) - max(tolerance_s, _ROUNDING_S)
    last = recording.legs[-1]
    last_event_s = last.events[-1].at_s if last.events else last.at_s
    return max(last_event_s + last.shift_s, *done_s, -math.inf) + _ROUNDING_S


def _differs(difference: "Difference") -> bool:
    return difference.verdict not in ("same", _NOT_KNOWN)


# --- Output -----------------------------------------------------------------------------------------------------------


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _story(replayed: "Replayed", paint: Paint) -> list[str]:
    recording, zero_s = replayed.recording, replayed.recording.zero_s
    head = f"{recording.name}: {_count(replayed.readings, 'reading')}; +0 s is t_s {replayed.began_s - zero_s:g}"
    if replayed.repeated:
        were = "was" if replayed.repeated == 1 else "were"
        head += f"; {_count(replayed.repeated, 'poll')} between them {were} answered by what lies between"
    lines = [paint(clean(head), "bold"), *(f"{paint('!', 'yellow')} {clean(text)}" for text in replayed.remarks)]
    rows = []
    for each in replayed.lines:
        when = after_start(each.t_s - replayed.began_s)
        if each.note is not None:
            text = sentence(each.note.event, each.note.because, dict(each.note.numbers), each.mode)
            rows.append((when, paint(clean(text), _COLOURS.get(each.note.level, ""))))
        elif type(each.action).__name__ not in _SHOWN_BY_NOTES:
            whom = str(getattr(each.action, "trainer", ""))
            rows.append((when, clean(ordered(type(each.action).__name__, whom, each.mode))))
    lines += table(rows)
    if _is_unproven(replayed):
        lines.append(
            f"{paint('!', 'yellow')} battery was read, but no second witness confirmed it, so there was no outage"
        )
    end = f"It ends at {after_start(replayed.ended_s - replayed.began_s)}: {PHASES[replayed.phase]}"
    if replayed.before_deadline_s is not None:
        end += f"; the recording ends {duration(replayed.before_deadline_s)} before its deadline: the rest is unknown"
    lines.append(end + ".")
    for step in replayed.forecast:
        when = "at an unknown time" if step.at_s is None else f"at {after_start(step.at_s - replayed.began_s)}"
        lines.append(f"  next, without further changes: {PHASES.get(step.action, step.action)} {when} ({step.because})")
    return lines


def _is_unproven(replayed: "Replayed") -> bool:
    """Whether there was a reading of battery, but no outage."""
    events = (event for leg in replayed.recording.legs for event in leg.events)
    has_battery_reading = any(getattr(event, "output_source", "") == "battery" for event in events)
    return has_battery_reading and all(mark_.kind != "phase" for mark_ in replayed.marks)


def _side_by_side(replayed: "Replayed", diff: "tuple[Difference, ...]", paint: Paint) -> list[str]:
    def at(mark_: "Mark | None") -> str:
        return "-" if mark_ is None else f"{mark_.t_s - replayed.began_s:+.1f} s"

    rows = [("what", "was", "is now", "")]
    for each in diff:
        what = each.was or each.now
        verdict = each.verdict
        if each.by_s is not None and verdict != "same":
            verdict = f"{verdict} by {abs(each.by_s):.1f} s"
        shown = paint(verdict, "yellow" if _differs(each) else "")
        rows.append(
            ("?" if what is None else clean(mark(what.kind, what.what, what.whom)), at(each.was), at(each.now), shown)
        )
    changed = sum(_differs(each) for each in diff)
    lines = table(rows)
    if not changed:
        is_whole = all(each.verdict != _NOT_KNOWN for each in diff)
        return [*lines, f"Today's decisions are the same{'' if is_whole else ', as far as the recording goes'}."]
    lines.append(
        f"{changed} of {len(diff)} are not the same. The readings are as recorded: they do not show what another"
    )
    lines.append("decision would have done to the battery.")
    return lines


def _object(replayed: "Replayed", diff: "tuple[Difference, ...] | None") -> dict[str, Any]:
    zero_s = replayed.recording.zero_s

    def at(t_s: float) -> dict[str, float]:
        return {"t_s": round(t_s - zero_s, 3), "after_s": round(t_s - replayed.began_s, 3)}

    def mark_of(mark_: "Mark") -> dict[str, Any]:
        return {"kind": mark_.kind, "what": mark_.what, "whom": mark_.whom}

    return {
        "name": replayed.recording.name,
        "complete": replayed.recording.complete,
        "readings": replayed.readings,
        "repeated_polls": replayed.repeated,
        "began_t_s": round(replayed.began_s - zero_s, 3),
        "ended": {
            **at(replayed.ended_s),
            "phase": replayed.phase,
            "before_deadline_s": None if replayed.before_deadline_s is None else round(replayed.before_deadline_s, 3),
        },
        "remarks": list(replayed.remarks),
        "marks": [{**at(each.t_s), **mark_of(each), "because": each.because} for each in replayed.marks],
        "notes": [
            {
                **at(each.t_s),
                "event": each.note.event,
                "level": each.note.level,
                "because": each.note.because,
                "text": sentence(each.note.event, each.note.because, dict(each.note.numbers), each.mode),
                "numbers": dict(each.note.numbers),
            }
            for each in replayed.lines
            if each.note is not None
        ],
        "forecast": [
            {
                "action": each.action,
                "after_s": None if each.at_s is None else round(each.at_s - replayed.began_s, 3),
                "because": each.because,
            }
            for each in replayed.forecast
        ],
        "diff": None
        if diff is None
        else [
            {
                "verdict": each.verdict,
                **mark_of(each.was or each.now),  # type: ignore[arg-type]  # one of the two is there
                "was_after_s": None if each.was is None else round(each.was.t_s - replayed.began_s, 3),
                "now_after_s": None if each.now is None else round(each.now.t_s - replayed.began_s, 3),
                "by_s": None if each.by_s is None else round(each.by_s, 3),
            }
            for each in diff
        ],
    }
