"""`powerguard run`: the daemon."""

import argparse

from powerguard.cli.operate import Subparsers


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run the daemon",
        description="Run the daemon in the foreground. SIGTERM stops it, SIGHUP reads the settings anew. "
        "Exit 0: stopped; 69: another one runs with these settings; 78: the settings are wrong.",
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings")
    parser.add_argument("--dry-run", action="store_true", help="record the power-off, do not do it, whatever mode says")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from pathlib import Path

    from powerguard.daemon import assemble

    return assemble.main(Path(args.config), dry_run=args.dry_run)
