"""`powerguard sentinel`: the daemon of a management node that powers other hosts on again."""

import argparse

from powerguard.cli.operate import Subparsers


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "sentinel",
        help="on a management node: power hosts on again that have asked for it",
        description="Run a sentinel in the foreground: hosts tell it at their power-off that it may power them on, and "
        "it does so once utility holds and their BMC says that they are off. SIGTERM stops it. It has settings of its "
        "own (config/sentinel.yaml is the sample). Exit 0: stopped; 69: another one keeps its intents there; 78: the "
        "settings are wrong.",
    )
    # Not the daemon's settings, which stand for it wherever none are named.
    parser.add_argument("--config", metavar="FILE", dest="file", required=True, help="the sentinel's own settings")
    parser.add_argument("--dry-run", action="store_true", help="write down what it would do, whatever mode says")
    parser.add_argument("--check", action="store_true", help="say whether the settings hold, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from pathlib import Path

    from powerguard.sentinel import main

    return main.main(Path(args.file), dry_run=args.dry_run, check=args.check)
