"""`powerguard checkpoint`: ask every trainer for a checkpoint now, training going on."""

import argparse

from powerguard.cli.client import add_options
from powerguard.cli.operate import Subparsers, ask


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="ask every trainer for a checkpoint now",
        description="Ask every trainer for a checkpoint now; training goes on. `powerguard status` shows how it goes. "
        "Exit 0: asked; 1: refused, with the reason; 4: the daemon is down.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    return ask(args, "checkpoint", {}, "asked every trainer for a checkpoint")
