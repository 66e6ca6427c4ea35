"""`powerguard history`: the outages that the journal knows; `history export`: one of them, to be replayed."""

import argparse
import json
from typing import TYPE_CHECKING, Any, Final

from powerguard.cli.operate import Subparsers, fail
from powerguard.cli.outages import EX_NOINPUT, UnknownOutageError, add_journal, find, journal_of
from powerguard.cli.render import clean, duration, fold, moment, table

if TYPE_CHECKING:
    from powerguard.daemon.journal import OutageRecord

EX_USAGE: Final = 64


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "history",
        help="the outages that the journal knows",
        description="List the outages that the journal knows, the newest first; with the daemon down, too. "
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
        description="Print an outage as JSON lines, everything in it that a replay needs. No secret is in it and no "
        "address of the web; --anonymize replaces names, network addresses and paths as well.",
    )
    export.add_argument("outage", metavar="OUTAGE", help="its id or how it begins, last, or all")
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


def _export(args: argparse.Namespace, db: Any) -> int:  # noqa: ANN401 - sqlite3 is imported by who needs it
    from powerguard.daemon.journal import history
    from powerguard.daemon.journal.export import lines
    from powerguard.daemon.status import VERSION

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
        print("the journal knows no outage")
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
    """Seconds that it lasted, by the boot's clock where that is known; None while it runs, or where no clock says."""
    if record.ended_wall is None:
        return None
    told = record.figures.get("lasted_s")
    if isinstance(told, int | float):
        return float(told)
    seconds = record.ended_wall - record.started_wall
    return round(seconds, 3) if seconds >= 0.0 else None


def _shown(seconds: object) -> str:
    return duration(float(seconds)) if isinstance(seconds, int | float) else "-"
