"""`powerguard report [ID]`: the record of an outage: durations, prediction against fact, steps lost, advice."""

import argparse
import json
import sys
from typing import Any, Final

from powerguard.cli.last_known import last_battery
from powerguard.cli.operate import Subparsers, fail
from powerguard.cli.outages import EX_NOINPUT, UnknownOutageError, add_journal, journal_of
from powerguard.cli.render import Paint, fold

EX_USAGE: Final = 64
EX_CANTCREAT: Final = 73
"""sysexits.h: the page cannot be written."""


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="the record of an outage, in numbers",
        description="Report an outage from the journal: how long each part took, prediction against fact, steps lost, "
        "the way back, and what to improve. With the daemon down, too, and while the outage runs. Exit 0: told; 64: no "
        "such outage; 66: the journal cannot be read; 73: the page cannot be written.",
    )
    parser.add_argument("outage", metavar="ID", nargs="?", default="last", help="its id, how it begins, or last (last)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object on stdout")
    shape.add_argument("--markdown", action="store_true", help="Markdown on stdout, for a ticket")
    shape.add_argument("--html", metavar="FILE", help="write a page of its own, with the timeline; - for stdout")
    add_journal(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from powerguard.cli import report_render as shown
    from powerguard.cli.outages import read
    from powerguard.daemon.journal import JournalError, read_only

    try:
        path = journal_of(args)
        with read_only(path) as db:
            outage = read(db, args.outage)
        battery, _ = last_battery(str(path))
        told = reported(outage, measured=battery is not None and battery["measured"] is not None)
    except UnknownOutageError as error:
        return fail(args, "report", str(error), EX_USAGE)
    except JournalError as error:
        return fail(args, "report", str(error), EX_NOINPUT)
    if args.html is not None:
        return _write(args, shown.page(told))
    if args.json:
        print(json.dumps(told, indent=2))
    elif args.markdown:
        print("\n".join(shown.markdown(told)))
    else:
        print("\n".join(fold(shown.describe(told, Paint(sys.stdout)))))
    return 0


def _write(args: argparse.Namespace, page: str) -> int:
    from powerguard.cli import picture

    trouble = picture.write(args.html, page)
    if trouble:
        return fail(args, "report", f"{trouble} (say --html FILE in a folder of yours)", EX_CANTCREAT)
    if args.html != "-":
        print(f"written: {args.html}", file=sys.stderr)
    return 0


def reported(outage: Any, *, measured: bool = False) -> dict[str, Any]:  # noqa: ANN401 - `outages.Outage`, which imports what a verb's help needs not
    """Return the outage as one object: what is printed and drawn, and what --json shows.

    measured: the battery's health has been measured by now.
    """
    from powerguard.cli import report_advice as judged
    from powerguard.cli import report_facts as facts
    from powerguard.cli.explain import explained
    from powerguard.core.policy import Mode

    story = explained(outage.record, outage.lines, outage.rows)
    told = facts.gather(outage)
    record = outage.record
    budget, trainers = facts.budget(told), facts.trainers(told)
    policy = told.policy
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
        "last_s": told.last_s,
        "boots": 1 + len(told.notes("host_returned")),
        "steps_lost": facts.steps_lost(told, trainers),
        "detection": facts.detection(told),
        "durations": story["durations"],
        "recovery": facts.recovery(told),
        "feeds": facts.feeds(told),
        "phases": facts.phases(told),
        "trainers": [] if policy is not None and policy.mode is Mode.DRY_RUN else trainers,  # else they were asked
        "budget": budget,
        "predictions": judged.predictions(told, budget),
        "runtime": facts.runtime(told),
        "marks": [
            {"at_s": step["after_s"], "level": step["level"], "event": step["event"], "text": step["text"]}
            for step in story["steps"]
        ],
        "doubts": doubts(told),
    }
    return report | {"advice": judged.advice(told, report, measured=measured), "what_if": story["what_if"]}


def doubts(told: Any) -> list[str]:  # noqa: ANN401 - `report_facts.Told`, as above
    """Say what of this report the journal cannot vouch for."""
    found = []
    dropped = sum(row.heard.dropped for row in told.outage.rows)
    if not told.outage.rows:
        found.append("this journal did not keep every reading: moments are known to 5 s, and settings are not told")
    elif dropped:
        found.append(f"{dropped} readings are missing")
    missing = sum(int(step.line.payload.get("steps") or 0) for step in told.steps if step.line.kind == "gap")
    if missing:
        found.append(f"{missing} steps are missing")
    if not told.steps:
        found.append("not a single step of it is left in the journal")
    found += [
        f"the wall clock was set by {by_s:+.0f} s while the outage ran: times of day before it are of another clock"
        for _, by_s in told.elapsed.set_s
    ]
    if told.elapsed.doubted:
        found.append(
            "the wall clock cannot be believed over the reboot: how long the host was off is not told, and the rest "
            "is counted from the end of the boot that went"
        )
    return found
