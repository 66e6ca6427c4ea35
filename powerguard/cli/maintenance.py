"""`powerguard maintenance`: suspend the power-off for a while, with an end and a reason."""

import argparse

from powerguard.cli.client import add_options
from powerguard.cli.operate import Subparsers, ask
from powerguard.cli.render import duration, told_seconds


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "maintenance",
        help="suspend the power-off for a while",
        description="Suspend the power-off for a while; alarms and checkpoints go on. It ends by itself. "
        "Exit 0: taken; 1: refused, with the reason; 4: the daemon is down.",
    )
    verbs = parser.add_subparsers(dest="maintenance_verb", metavar="on|off", required=True)
    on = verbs.add_parser("on", help="suspend", description="Suspend the power-off.")
    on.add_argument(
        "--for", dest="for_s", type=_seconds, required=True, metavar="TIME", help="such as 90s, 15m, 2h, 1d"
    )
    on.add_argument("--reason", required=True, metavar="TEXT", help="why, for the journal and for whoever looks")
    off = verbs.add_parser("off", help="protect again", description="End maintenance now.")
    for each in (on, off):
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")
        add_options(each)
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    seconds = told_seconds(text)
    if seconds is None or not 0 < seconds <= 7 * 86400:
        msg = f"{text!r} is no time up to 7 days (write 90s, 15m, 2h or 1d)"
        raise argparse.ArgumentTypeError(msg)
    return seconds


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if args.maintenance_verb == "off":
        return ask(args, "maintenance", {"for_s": 0}, "maintenance off: the power-off is no longer suspended")
    done = f"maintenance on for {duration(args.for_s)}: this host is NOT powered off when the battery runs low"
    return ask(args, "maintenance", {"for_s": args.for_s, "reason": args.reason}, done)
