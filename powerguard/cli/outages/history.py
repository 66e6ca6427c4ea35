"""`powerguard history` lists the outages of the journal; `history export` writes one of them, for `replay`.

`history`, `explain` and `report` share the functions that choose the journal and the outage, and `Elapsed`.
"""

import argparse
import json
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from powerguard.cli.render import Paint, clean, duration, fold, moment, table
from powerguard.cli.shared import CONFIG, EX_NOINPUT, EX_USAGE, fail, whole
from powerguard.cli.status import JOURNAL
from powerguard.core.comeback.recovery import LONGEST_GAP_S
from powerguard.daemon.journal import (
    JournalError,
    Line,
    OutageRecord,
    Recorded,
    following,
    history,
    next_boot,
    notes,
    outage,
    pairs,
    read_only,
    recording,
)
from powerguard.daemon.journal.export import lines
from powerguard.daemon.observe import figures
from powerguard.daemon.observe.status import VERSION
from powerguard.effectors.bmc.ipmi import RestartCause

SHOWN: Final = 5
_ALL: Final = 1_000_000
BY_HAND: Final = frozenset((RestartCause.POWER_BUTTON.value, RestartCause.RESET_BUTTON.value))
"""A person powered the host on."""
_AFTER: Final = 500
_DOUBT_S: Final = 2.0
"""Within one boot, wall clock and boot clock may part by this much before the wall clock counts as set."""


class UnknownOutageError(Exception):
    """No outage of that name, or several: the message lists them."""


class Outage(NamedTuple):
    """One outage as the journal has it.

    rows: the events; empty in a journal that did not keep every reading. after: the following lines of the boot in
    which it ended, at most 500: they show whether training came back.
    """

    record: OutageRecord
    lines: tuple[Line, ...]
    rows: tuple[Recorded, ...]
    after: tuple[Line, ...] = ()


class Elapsed:
    """Seconds since an outage began, by each boot's own clock, independent of the wall clock.

    Between two boots only the wall clock counts: with its last value in each of them, because a clock that was wrong at
    boot is soon corrected. If the result is negative or more than a month, the time between is unknown, and later
    moments are counted from the end of the old boot.

    away_s: seconds between the last entry of the boot before and the first of this one, by boot; None: unknown.
    doubted: the boots whose start after the one before is unknown.
    ended_s: when the outage ended; None while it runs, or if it ended in a doubted boot.
    set_s: boot, and by how many seconds its wall clock was set.
    """

    def __init__(self, record: OutageRecord, lines: Sequence[Line], rows: Sequence[Recorded] = ()) -> None:
        """Look through all that has both clocks."""
        self.away_s: dict[str, float | None] = {}
        self.doubted: list[str] = []
        self.set_s: list[tuple[str, float]] = []
        seen: dict[str, list[tuple[float, float]]] = {record.boot_id: []}
        for line in lines:
            seen.setdefault(line.boot_id, []).append((line.at_s, line.wall))
        for row in rows:
            seen.setdefault(row.boot_id, []).append((row.at_s, row.wall))
        self._zero_s: dict[str, float] = {}
        last: tuple[float, float] | None = None
        for boot_id, both in seen.items():
            both.sort()
            if boot_id == record.boot_id:
                self._zero_s[boot_id] = self._before(record, both, lines)
            elif both:
                self._zero_s[boot_id] = self._after(last, both, boot_id) - both[0][0]
            if both:
                change_s = (both[-1][1] - both[-1][0]) - (both[0][1] - both[0][0])
                if abs(change_s) > _DOUBT_S:
                    self.set_s.append((boot_id, round(change_s, 1)))
                last = (self._zero_s[boot_id] + both[-1][0], both[-1][1])
        self.ended_s = None if self.doubted else self._ended_s(record, lines)

    def _before(self, record: OutageRecord, both: Sequence[tuple[float, float]], lines: Sequence[Line]) -> float:
        """Seconds since the outage began at the start of the boot that recorded it: negative, if it began in that boot.

        Of a host that went down before its outage was known, it began with the last entry of the boot before.
        """
        zero_s = -record.started_at_s
        if zero_s <= 0.0 or not both:
            return zero_s
        by_wall_s = both[-1][1] - both[-1][0] - record.started_wall
        if not 0.0 <= by_wall_s <= LONGEST_GAP_S:
            return zero_s
        back = next((line for line in lines if (line.event, line.boot_id) == ("host_returned", record.boot_id)), None)
        away_s = None if back is None else figures.number(pairs(back.payload.get("numbers")).get("away_s"))
        if away_s is not None:
            self.away_s[record.boot_id] = round(max(0.0, away_s + by_wall_s - zero_s), 3)
        return by_wall_s

    def _ended_s(self, record: OutageRecord, lines: Sequence[Line]) -> float | None:
        if record.ended_at_s is None or record.ended_wall is None:
            return None
        if lines and abs(lines[-1].at_s - record.ended_at_s) < 1.0:
            return self.at(lines[-1].boot_id, record.ended_at_s)
        return round(max(0.0, record.ended_wall - record.started_wall), 3)

    def _after(self, last: tuple[float, float] | None, both: Sequence[tuple[float, float]], boot_id: str) -> float:
        """Seconds since the outage began at the first entry of a later boot."""
        self.away_s[boot_id] = None
        if last is None:
            self.doubted.append(boot_id)
            return 0.0
        away_s = both[-1][1] - (both[-1][0] - both[0][0]) - last[1]
        if 0.0 <= away_s <= LONGEST_GAP_S:
            self.away_s[boot_id] = round(away_s, 3)
            return last[0] + away_s
        self.doubted.append(boot_id)
        return last[0]

    def at(self, boot_id: str, at_s: float) -> float | None:
        """Return the seconds since the outage began at a moment of a boot; None for an unknown boot."""
        zero_s = self._zero_s.get(boot_id)
        return None if zero_s is None else round(zero_s + at_s, 3)

    def of(self, line: Line) -> float:
        """Return the seconds since the outage began at one of its lines."""
        return round(self._zero_s.get(line.boot_id, -line.at_s) + line.at_s, 3)


def between(first: float | None, then: float | None) -> float | None:
    """Return the seconds from one moment of an outage to another; None if one of them is unknown."""
    return None if first is None or then is None or then < first else round(then - first, 3)


def add_journal(parser: argparse.ArgumentParser) -> None:
    """Add the option of the journal's path."""
    parser.add_argument(
        "--journal", metavar="FILE", help=f"journal to read (default: from the settings, else {JOURNAL})"
    )


def journal_of(args: argparse.Namespace) -> Path:
    """Return the journal's path: of the option, else of the settings, even if they are invalid, else the default.

    Raises JournalError if the user has named settings that cannot be read: the default is another daemon's journal.
    """
    if args.journal is not None:
        return Path(args.journal)
    is_named = args.config != CONFIG
    try:
        if not is_named and not Path(args.config).exists():
            return Path(JOURNAL)
    except OSError:  # not readable: as with invalid settings
        return Path(JOURNAL)
    from powerguard.settings.load import SettingsError, check

    try:
        settings = check(Path(args.config)).settings
    except SettingsError as error:
        if is_named:
            msg = f"{'; '.join(error.problems)}, so the journal is unknown: correct that or give --journal FILE"
            raise JournalError(msg) from error
        settings = None
    return Path(JOURNAL if settings is None else settings.journal.path)


def find(db: sqlite3.Connection, name: str) -> OutageRecord:
    """Return the outage of that id, or the only one that begins so; `last`: the newest. Raises UnknownOutageError."""
    known = history(db, _ALL)
    if not known:
        message = f"the journal has no outage{holds_hint(db)}"
        raise UnknownOutageError(message)
    if name == "last":
        return known[0]
    found = [each for each in known if each.id == name] or [each for each in known if each.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    newest = "; the last ones: " + ", ".join(_shown_record(each) for each in known[:SHOWN])
    if found:
        message = (
            f"{name!r} is the beginning of {len(found)} outage ids: {', '.join(each.id for each in found[:SHOWN])}"
        )
        raise UnknownOutageError(message)
    near = get_close_matches(name, [*(each.id for each in known), "last"], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    message = f"unknown outage {name!r}{hint}{newest}"
    raise UnknownOutageError(message)


def read(db: sqlite3.Connection, name: str) -> Outage:
    """Return the outage of that name, whole, as far as the journal has it. Raises UnknownOutageError."""
    record = find(db, name)
    found = outage(db, record.id)
    lines = () if found is None else found[1]
    after: tuple[Line, ...] = ()
    if lines and record.ended_wall is not None:
        after = following(db, lines[-1], _AFTER)
    return Outage(record, lines, recording(db, record.id), after)


def _shown_record(record: OutageRecord) -> str:
    return f"{record.id} ({moment(record.started_wall)[:16]})"


def is_late_reboot(story: Sequence[Line], back: Line, numbers: Mapping[str, object]) -> bool:
    """Say whether our power-off became a reboot: it was the last order of the old boot, and did not fail.

    back: the first line of the next boot that counts. numbers: of its `host_powered_on`, as far as there is one; a loss
    of AC, or a button, is another reason to come back.
    """
    if numbers.get("ac_failed") is True or str(numbers.get("cause")) in BY_HAND:
        return False
    before = [line for line in story if line.seq < back.seq and line.boot_id != back.boot_id]
    last_boot = [line for line in before if line.boot_id == before[-1].boot_id]
    orders = {line.action for line in last_boot if line.kind == "action" and line.event == "Reboot"}
    return bool(orders) and not any(line.action in orders and line.event == "Failed" for line in last_boot)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "List the outages in the journal, the newest first. Works without the daemon. "
        "Exit 64: no such outage; 66: the journal cannot be read."
    )
    parser.add_argument("--limit", type=whole(1, example=20), metavar="N", default=20, help="how many (20)")
    parser.add_argument("--sum", action="store_true", help="what all outages cost together, instead of the list")
    parser.add_argument("--since", metavar="WHEN", help="only outages that began since 2026-11-01, or in 30d")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_journal(parser)
    verbs = parser.add_subparsers(dest="history_verb", metavar="VERB")
    export = verbs.add_parser(
        "export",
        help="an outage as JSON lines, for `powerguard replay`",
        description="Print an outage as JSON lines, with all data for a replay. It contains no secret and no "
        "URL; --anonymize also replaces names, network addresses and paths.",
    )
    export.add_argument("outage", metavar="OUTAGE", help="its id or the beginning of it, last, or all")
    export.add_argument("--anonymize", action="store_true", help="replace names, addresses and paths, consistently")
    export.add_argument("--journal", metavar="FILE", default=argparse.SUPPRESS, help="journal to read")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        with read_only(journal_of(args)) as db:
            if args.history_verb == "export":
                output = _export(args, db)
            else:
                output = _sum(args, db) if args.sum else _list(args, db)
    except (UnknownOutageError, SinceError) as error:
        return fail(args, "history", str(error), EX_USAGE)
    except JournalError as error:
        return fail(args, "history", str(error), EX_NOINPUT)
    for line in output:  # Not within `try`: an error of the output is not one of the journal.
        print(line)
    return 0


def _export(args: argparse.Namespace, db: sqlite3.Connection) -> list[str]:
    everything = args.outage == "all"
    names = [each.id for each in reversed(history(db, _ALL))] if everything else [find(db, args.outage).id]
    return [
        json.dumps(line, separators=(",", ":"))
        for name in names
        for line in lines(db, name, version=VERSION, anonymize=args.anonymize)
    ]


class SinceError(Exception):
    """--since is neither a day nor a number of days."""


def _since(text: str | None) -> float:
    """Return Unix seconds: of the beginning of a day, or so many days ago."""
    if text is None:
        return 0.0
    if re.fullmatch(r"\d{1,5}d", text):
        return time.time() - 86400.0 * int(text[:-1])  # noqa: TID251 - for people
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        message = f"--since: {text!r:.40} is neither a day nor a number of days (such as 2026-11-01, or 30d)"
        raise SinceError(message) from None


def _began_since(db: sqlite3.Connection, since_s: float) -> list[OutageRecord]:
    return [each for each in history(db, _ALL) if each.started_wall >= since_s]


def _sum(args: argparse.Namespace, db: sqlite3.Connection) -> list[str]:
    """Return what the outages cost together, as lines. The metrics count the same, since the journal began."""
    since_s = _since(args.since)
    records = _began_since(db, since_s)
    found = figures.total(figures.cost_of(each.figures) if each.ended_wall is not None else None for each in records)
    if args.json:
        head = {"schema_version": 1, "object": "history-sum", "since": None if args.since is None else since_s}
        whole = {**head, "outages": found.outages, "unknown": found.unknown, **figures.plain_cost(found)}
        return [json.dumps(whole, indent=2)]
    if not records:
        return [_no_outage(args.since, since_s)]
    more = f", and {found.unknown} whose cost is not known" if found.unknown else ""
    count = f"{found.outages} outage{'' if found.outages == 1 else 's'}{_since_words(args.since, since_s)}{more}"
    return [count, *(fold(table(cost_rows(figures.plain_cost(found)))) if found.outages else ())]


def _no_outage(since: str | None, since_s: float) -> str:
    return f"the journal has no outage{_since_words(since, since_s)}"


def _since_words(text: str | None, since_s: float) -> str:
    return "" if text is None else f" since {moment(since_s)[:16]}"


_RETURN_WORDS: Final = {
    "power_on_to_boot": "return: power-on to the daemon",
    "boot_to_ready": "return: until training may start",
    "ready_to_resumed": "return: until training runs",
    "total": "return: power-on to training",
}


def cost_rows(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what outages cost as rows of what and how much. cost: `figures.plain_cost`."""
    rows = [("training time lost", duration(cost["lost_s"]["all"]))]
    rows += [(f"- {cause.replace('_', ' ')}", duration(cost["lost_s"][cause])) for cause in figures.CAUSES]
    gpu_s = cost["lost_gpu_s"]
    rows.append(("GPU time lost", "not known without the GPU helper" if gpu_s is None else duration(gpu_s)))
    rows.append(("lost by the usual script, at least", duration(cost["usual_script_lost_s"])))
    checkpoints = cost["checkpoints"]
    late = f", {checkpoints['late']} of them late" if checkpoints["late"] else ""
    failed = f"; {checkpoints['failed']} failed" if checkpoints["failed"] else ""
    rows.append(("checkpoints", f"{checkpoints['asked']} asked for, {checkpoints['durable']} durable{late}{failed}"))
    for phase, label in _RETURN_WORDS.items():
        if (taken := cost["return_s"][phase])["count"]:
            longest = f" on average, {duration(taken['longest'])} at the longest" if taken["count"] > 1 else ""
            rows.append((label, duration(taken["mean"]) + longest))
    return rows


def _list(args: argparse.Namespace, db: sqlite3.Connection) -> list[str]:
    since_s = _since(args.since)
    records = _began_since(db, since_s)[: args.limit]
    outages = [
        {
            "outage": each.id,
            "started_at": each.started_wall,
            "ended_at": each.ended_wall,
            "outcome": each.outcome or None,
            "lasted_s": each.lasted_s,
            "on_battery_s": each.figures.get("on_battery_s"),
            "checkpoint_s": each.figures.get("checkpoint_s"),
            "commit_after_s": each.figures.get("commit_after_s"),
            "recovery_s": each.figures.get("recovery_s"),
        }
        for each in records
    ]
    if args.json:
        return [json.dumps({"schema_version": 1, "object": "history", "outages": outages}, indent=2)]
    if not outages:
        return [_no_outage(args.since, since_s)]
    rows = [
        (
            moment(record.started_wall),
            "runs" if record.ended_wall is None else _shown(each["lasted_s"]),
            *(_shown(each[name]) for name in ("on_battery_s", "checkpoint_s", "commit_after_s", "recovery_s")),
            clean(record.outcome or "-"),
            clean(record.id),
        )
        for record, each in zip(records, outages, strict=True)
    ]
    return fold(table([_HEAD, *rows], indent=""))


_HEAD: Final = ("began", "lasted", "on battery", "checkpoint", "commit after", "recovery", "outcome", "outage")


def _shown(seconds: object) -> str:
    return duration(float(seconds)) if isinstance(seconds, int | float) else "-"


# --- Times held by another host -------------------------------------------------------------------------------
#
# `powerguard explain job`: when training stood, or ended, here because of another host of its job. The power of this
# host may never have failed, so these times belong to no outage of the journal (docs/guides/many-hosts.md).

JOB: Final = "job"
"""What stands for an outage's id."""
_BEGINS: Final = ("training_held", "job_ended")
_ENDS: Final = ("training_released", "job_restarted")
_GONE: Final = "trainer_gone"
_THEN: Final = {
    "training": "it trained again",
    "gone": "its process ended",
    "reboot": "the host was back from a reboot",
}


def holds(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return them, the oldest first; for each trainer one from the first reason to stand until it trains again.

    One that does not train again is over with its process, or with the boot: neither leaves a note of its end.
    """
    found: list[dict[str, Any]] = []
    open_: dict[str, tuple[dict[str, Any], Line]] = {}
    for line in notes(db, (*_BEGINS, *_ENDS, _GONE)):
        numbers = pairs(line.payload.get("numbers"))
        trainer = str(numbers.get("trainer"))
        known = open_.get(trainer)
        if known is not None and line.boot_id != known[1].boot_id:
            _end_with_boot(db, *known)
            known = None
        if known is None:
            if line.event not in _BEGINS:
                open_.pop(trainer, None)
                continue
            hold: dict[str, Any] = {
                "trainer": trainer,
                "began_at": line.wall,
                "ended_at": None,
                "ended_by": None,
                "idle_s": None,
                "step": numbers.get("step"),
                "held_by": [],
                "job_ended": None,
            }
            found.append(hold)
            known = open_[trainer] = (hold, line)
        hold, first = known
        if line.event == "training_held":
            hold["held_by"] = list(dict.fromkeys((*hold["held_by"], *str(numbers.get("hosts")).split(", "))))
        elif line.event == "job_ended":
            hold["job_ended"] = line.because
        elif line.event in _ENDS or hold["job_ended"] is None:  # a process whose job has ended is to go
            hold["ended_at"], hold["ended_by"] = line.wall, "gone" if line.event == _GONE else "training"
            idle_s = line.at_s - first.at_s  # Of one boot, so by its clock: a wall clock may be set.
            hold["idle_s"] = round(idle_s, 3) if idle_s >= 0.0 else None
            del open_[trainer]
    for hold, first in open_.values():
        _end_with_boot(db, hold, first)
    return found


def _end_with_boot(db: sqlite3.Connection, hold: dict[str, Any], first: Line) -> None:
    """End one by the next boot, if there was one. How long it stood before that boot is not known."""
    back = next_boot(db, first)
    if back is not None:
        hold["ended_at"], hold["ended_by"] = back.wall, "reboot"


def explained_holds(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the object of --json."""
    return {"schema_version": 1, "object": "explanation_job", "holds": list(found)}


def describe_holds(answer: Mapping[str, Any], paint: Paint) -> list[str]:
    """Return them as lines."""
    found = answer["holds"]
    if not found:
        return ["training here never stood or ended because of another host of its job"]
    lines: list[str] = []
    for hold in found:
        lines.append(paint(f"{moment(hold['began_at'])}, {clean(hold['trainer'])} at step {hold['step']}", "bold"))
        if hold["held_by"]:
            lines.append(f"  held by {clean(', '.join(hold['held_by']))}, on battery there")
        if hold["job_ended"] is not None:
            lines.append(f"  the job ended: {clean(hold['job_ended'])}")
        if hold["ended_at"] is None:
            lines.append("  it does not train yet")
        elif hold["idle_s"] is None:
            lines.append(
                f"  {_THEN[hold['ended_by']]} at {moment(hold['ended_at'])}; the GPUs here were idle until then"
            )
        else:
            lines.append(f"  the GPUs here were idle for {duration(hold['idle_s'])}, then {_THEN[hold['ended_by']]}")
        lines.append("")
    return lines[:-1]


def holds_within(db: sqlite3.Connection, began_at: float, ended_at: float | None) -> list[str]:
    """Return the lines of an explanation that point to those that overlap an outage."""
    found = [
        hold
        for hold in holds(db)
        if (ended_at is None or hold["began_at"] <= ended_at)
        and (hold["ended_at"] is None or hold["ended_at"] >= began_at)
    ]
    if not found:
        return []
    return ["", f"Training also stood, or ended, because of another host of its job: powerguard explain {JOB}"]


def holds_hint(db: sqlite3.Connection) -> str:
    """Return where a reader finds them, for a journal that has no such outage; "" if there are none."""
    count = len(holds(db))
    times = "once" if count == 1 else f"{count} times"
    return f"; training stood {times} because of another host: powerguard explain {JOB}" if count else ""
