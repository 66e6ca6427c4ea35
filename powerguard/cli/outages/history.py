"""`powerguard history` lists the outages of the journal; `history export` writes one of them, for `replay`.

`history`, `explain` and `report` share the functions that choose the journal and the outage, and `Elapsed`.
"""

import argparse
import json
import sqlite3
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from powerguard.cli.render import clean, duration, fold, moment, table
from powerguard.cli.shared import EX_NOINPUT, EX_USAGE, Subparsers, fail
from powerguard.cli.status import JOURNAL
from powerguard.core.comeback.recovery import LONGEST_GAP_S
from powerguard.daemon.journal import Line, OutageRecord, Recorded, following, history, outage, recording
from powerguard.effectors.bmc.ipmi import RestartCause

if TYPE_CHECKING:
    from powerguard.daemon.journal import OutageRecord


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

    doubted: the boots whose start after the one before is unknown.
    ended_s: when the outage ended; None while it runs, or if it ended in a doubted boot.
    set_s: boot, and by how many seconds its wall clock was set.
    """

    def __init__(self, record: OutageRecord, lines: Sequence[Line], rows: Sequence[Recorded] = ()) -> None:
        """Look through all that has both clocks."""
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
                self._zero_s[boot_id] = -record.started_at_s
            elif both:
                self._zero_s[boot_id] = self._after(last, both, boot_id) - both[0][0]
            if both:
                by_s = (both[-1][1] - both[-1][0]) - (both[0][1] - both[0][0])
                if abs(by_s) > _DOUBT_S:
                    self.set_s.append((boot_id, round(by_s, 1)))
                last = (self._zero_s[boot_id] + both[-1][0], both[-1][1])
        self.ended_s = None if self.doubted else self._ended_s(record, lines)

    def _ended_s(self, record: OutageRecord, lines: Sequence[Line]) -> float | None:
        if record.ended_at_s is None or record.ended_wall is None:
            return None
        if lines and abs(lines[-1].at_s - record.ended_at_s) < 1.0:
            return self.at(lines[-1].boot_id, record.ended_at_s)
        return round(max(0.0, record.ended_wall - record.started_wall), 3)

    def _after(self, last: tuple[float, float] | None, both: Sequence[tuple[float, float]], boot_id: str) -> float:
        """Seconds since the outage began at the first entry of a later boot."""
        if last is None:
            self.doubted.append(boot_id)
            return 0.0
        gone_s = both[-1][1] - (both[-1][0] - both[0][0]) - last[1]
        if 0.0 <= gone_s <= LONGEST_GAP_S:
            return last[0] + gone_s
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
        "--journal", metavar="FILE", default=None, help=f"journal to read (default: from the settings, else {JOURNAL})"
    )


def journal_of(args: argparse.Namespace) -> Path:
    """Return the journal's path: of the option, else of the settings, else the default."""
    if args.journal is not None:
        return Path(args.journal)
    try:
        if not Path(args.config).exists():
            return Path(JOURNAL)
    except OSError:  # not readable: as with invalid settings
        return Path(JOURNAL)
    from powerguard.settings.load import SettingsError, load

    try:
        return Path(load(Path(args.config)).journal.path)
    except SettingsError:
        return Path(JOURNAL)  # An old outage can be reported even if today's settings are invalid.


def find(db: sqlite3.Connection, name: str) -> OutageRecord:
    """Return the outage of that id, or the only one that begins so; `last`: the newest. Raises UnknownOutageError."""
    known = history(db, _ALL)
    if not known:
        message = "the journal has no outage"
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
    gone = [line for line in before if line.boot_id == before[-1].boot_id]
    orders = {line.action for line in gone if line.kind == "action" and line.event == "Reboot"}
    return bool(orders) and not any(line.action in orders and line.event == "Failed" for line in gone)


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "history",
        help="list the outages in the journal; export one",
        description="List the outages in the journal, the newest first. Works without the daemon. "
        "Exit 64: no such outage; 66: the journal cannot be read.",
    )
    parser.add_argument("--limit", type=int, metavar="N", default=20, help="how many (20)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_journal(parser)
    parser.set_defaults(run=run)
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
    from powerguard.daemon.journal import JournalError, read_only

    try:
        with read_only(journal_of(args)) as db:
            return _export(args, db) if args.history_verb == "export" else _list(args, db)
    except UnknownOutageError as error:
        return fail(args, "history", str(error), EX_USAGE)
    except JournalError as error:
        return fail(args, "history", str(error), EX_NOINPUT)


def _export(args: argparse.Namespace, db: Any) -> int:  # noqa: ANN401 - sqlite3 is imported only if needed
    from powerguard.daemon.journal import history
    from powerguard.daemon.journal.export import lines
    from powerguard.daemon.observe.status import VERSION

    everything = args.outage == "all"
    names = [each.id for each in reversed(history(db, 1_000_000))] if everything else [find(db, args.outage).id]
    for name in names:
        for line in lines(db, name, version=VERSION, anonymize=args.anonymize):
            print(json.dumps(line, separators=(",", ":")))
    return 0


def _list(args: argparse.Namespace, db: Any) -> int:  # noqa: ANN401 - as above
    from powerguard.daemon.journal import history

    records = history(db, min(max(1, args.limit), _MOST))
    told = [
        {
            "outage": each.id,
            "started_at": each.started_wall,
            "ended_at": each.ended_wall,
            "outcome": each.outcome or None,
            "lasted_s": _lasted_s(each),
            "on_battery_s": each.figures.get("on_battery_s"),
            "checkpoint_s": each.figures.get("checkpoint_s"),
            "commit_after_s": each.figures.get("commit_after_s"),
            "recovery_s": each.figures.get("recovery_s"),
        }
        for each in records
    ]
    if args.json:
        print(json.dumps({"schema_version": 1, "object": "history", "outages": told}, indent=2))
        return 0
    if not told:
        print("the journal has no outage")
        return 0
    rows = [
        (
            moment(record.started_wall),
            "runs" if record.ended_wall is None else _shown(each["lasted_s"]),
            *(_shown(each[name]) for name in ("on_battery_s", "checkpoint_s", "commit_after_s", "recovery_s")),
            clean(record.outcome or "-"),
            clean(record.id),
        )
        for record, each in zip(records, told, strict=True)
    ]
    print("\n".join(fold(table([_HEAD, *rows], indent=""))))
    return 0


_MOST: Final = 1_000_000
_HEAD: Final = ("began", "lasted", "on battery", "checkpoint", "commit after", "recovery", "outcome", "outage")


def _lasted_s(record: "OutageRecord") -> float | None:
    """Seconds that it lasted, by the boot's clock if known; None while it runs, or if unknown."""
    if record.ended_wall is None:
        return None
    told = record.figures.get("lasted_s")
    if isinstance(told, int | float):
        return float(told)
    seconds = record.ended_wall - record.started_wall
    return round(seconds, 3) if seconds >= 0.0 else None


def _shown(seconds: object) -> str:
    return duration(float(seconds)) if isinstance(seconds, int | float) else "-"
