"""`powerguard demo`: its options; what it does is in `demo`, which imports a whole world."""

import argparse
from pathlib import Path

from powerguard.cli.operate import Subparsers


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="an outage in a minute, simulated",
        description="Play three outages on simulated hardware with the real daemon: no settings, no root, nothing is "
        "powered off. Exit 0: the host was saved each time; 1: it would have been lost.",
    )
    parser.add_argument(
        "--fast", action="store_true", help="in virtual time, without sockets: seconds instead of a minute"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the story")
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=Path,
        help="leave the journal there; without --fast also settings, logs and checkpoints",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from powerguard.cli import demo

    return demo.run(args)
