"""`powerguard version`."""

import argparse
import json

from powerguard.cli.operate import Subparsers


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser("version", help="print the version", description="Print the version.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("powerguard")
    except PackageNotFoundError:
        own = "unknown"
    if args.json:
        told = {"schema_version": 1, "object": "version", "version": own, "python": platform.python_version()}
        print(json.dumps(told, indent=2))
    else:
        print(f"powerguard {own} (Python {platform.python_version()})")
    return 0
