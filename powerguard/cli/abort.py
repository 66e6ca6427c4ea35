"""`powerguard abort`: call this outage's shutdown off, before the commit point."""

import argparse

from powerguard.cli.client import add_options
from powerguard.cli.operate import Subparsers, ask


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "abort",
        help="call this outage's shutdown off",
        description="Call this outage's shutdown off and let training go on, at your own risk: the battery is not "
        "watched for you any more in this outage. Possible only before the commit point. "
        "Exit 0: called off; 1: refused, with the reason; 4: the daemon is down.",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the journal")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    return ask(args, "abort", {"reason": args.reason}, "asked to call this outage's shutdown off")
