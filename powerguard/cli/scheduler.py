"""`powerguard scheduler topology`: which Slurm nodes share a feed, as node features and as a topology file."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from powerguard.cli.shared import EX_CONFIG, fail, print_answer
from powerguard.settings.load import SettingsError, load

_ROOT: Final = "power"
"""The switch above those of the feeds, so that one job may have nodes of several feeds."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Print which nodes share a UPS, so that Slurm places a job on one feed, or spreads it over two."
    )
    verbs = parser.add_subparsers(dest="what", metavar="topology", required=True)
    topology = verbs.add_parser(
        "topology",
        help="print lines for slurm.conf and topology.conf",
        description="Print a feature for each UPS of each node (ups=NAME), and a switch for each set of feeds. "
        "Exit 0: printed; 78: a file is wrong.",
    )
    topology.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="the sentinel's settings, or the settings of each host"
    )
    topology.add_argument("--json", action="store_true", help="one JSON object: the feeds of each node")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    feeds: dict[str, tuple[str, ...]] = {}
    for path in args.files:
        try:
            found = _feeds(path)
        except SettingsError as error:
            return fail(args, "scheduler", "; ".join(error.problems), EX_CONFIG)
        twice = sorted(found.keys() & feeds.keys())
        if twice:
            return fail(args, "scheduler", f"{path}: node {twice[0]} is in an earlier file, too", EX_CONFIG)
        feeds |= found
    print_answer(args, {"schema_version": 1, "object": "topology", "nodes": feeds}, lambda: _lines(feeds))
    return 0


def _feeds(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the UPSes of each node that a file names. Raises SettingsError with what is wrong for either kind."""
    from powerguard.sentinel import options as sentinel

    try:
        hosts = sentinel.load(path).hosts
        return {name: tuple(dict.fromkeys(host.feeds)) for name, host in hosts.items()}
    except SettingsError as error:
        as_sentinel = error
    try:
        settings = load(path)
    except SettingsError as error:
        text = ""
        with suppress(OSError):  # it cannot be read, as the error says
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        raise (as_sentinel if "hosts" in text else error) from None
    if not settings.scheduler.node:
        msg = f"{path}: set scheduler.node: the file does not say which node it is of"
        raise SettingsError([msg])
    return {settings.scheduler.node: tuple(settings.feeding)}


def _lines(feeds: Mapping[str, Sequence[str]]) -> list[str]:
    """Return lines for both files. Nodes with the same feeds share a switch: a node may be at one only."""
    switches: dict[tuple[str, ...], list[str]] = {}
    for node, upses in feeds.items():
        switches.setdefault(tuple(sorted(upses)), []).append(node)
    lines = ["# slurm.conf: add the feature to the line of each node. A job asks for --constraint=ups=NAME."]
    lines += [f"NodeName={node} Features={','.join(f'ups={ups}' for ups in upses)}" for node, upses in feeds.items()]
    lines += ["", "# topology.conf, with TopologyPlugin=topology/tree in slurm.conf. A job on one feed: --switches=1"]
    named = {f"ups-{'+'.join(upses)}": nodes for upses, nodes in switches.items()}
    lines += [f"SwitchName={name} Nodes={','.join(nodes)}" for name, nodes in named.items()]
    if len(named) > 1:
        lines.append(f"SwitchName={_ROOT} Switches={','.join(named)}")
    return lines
