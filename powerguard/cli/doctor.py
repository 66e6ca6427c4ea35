"""`powerguard doctor`: look at everything beforehand, and say what to do about each finding."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from powerguard.cli.client import add_options
from powerguard.cli.operate import Subparsers
from powerguard.cli.render import Paint, clean, fold

if TYPE_CHECKING:
    from powerguard.effectors.host_findings import Finding

_COLOURS: Final = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check everything beforehand",
        description="Check settings, secrets, UPS, trainers, BMC, host, budget, journal and the daemon itself. Changes "
        "nothing, and takes some seconds. Exit 0: all pass; 1: warnings; 2: failures.",
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="leave out what passes")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from powerguard.cli.checks import examine

    if sys.stderr.isatty() and not args.json:
        print("looking at settings, UPS, trainers, BMC and host ...", end="\r", file=sys.stderr, flush=True)
    found = examine(args)
    code = _code(found)
    shown = [finding for finding in found if not (args.quiet and finding.verdict == "PASS")]
    if args.json:
        checks = [finding._asdict() for finding in shown]
        print(json.dumps({"schema_version": 1, "object": "doctor", "exit": code, "checks": checks}, indent=2))
        return code
    if sys.stderr.isatty():
        print("\x1b[K", end="", file=sys.stderr, flush=True)
    paint = Paint()
    width = max((len(finding.name) for finding in shown), default=0)
    lines: list[str] = []
    for finding in shown:
        verdict = paint(finding.verdict, _COLOURS[finding.verdict])
        lines.append(f"{verdict}  {clean(finding.name):<{width}}  {clean(finding.text)}")
        if finding.fix:
            lines.append(f"      {'':<{width}}  -> {clean(finding.fix)}")
    print("\n".join([*fold(lines), _summary(found)]))
    return code


def _code(found: "Sequence[Finding]") -> int:
    verdicts = {finding.verdict for finding in found}
    return 2 if "FAIL" in verdicts else 1 if "WARN" in verdicts else 0


def _summary(found: "Sequence[Finding]") -> str:
    counts = [sum(finding.verdict == verdict for finding in found) for verdict in ("PASS", "WARN", "FAIL")]
    return f"{len(found)} checks: {counts[0]} pass, {counts[1]} warn, {counts[2]} fail"
