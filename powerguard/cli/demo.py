"""`powerguard demo`: an outage in a minute, without settings, root or hardware."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from selectors import SelectSelector

from powerguard.cli.render import fold, say
from powerguard.cli.shared import Subparsers
from powerguard.sim.demo import story
from powerguard.sim.demo.story import Report, Stage, StoryError


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="play three simulated outages in a minute; without settings, root or hardware",
        description="Play three outages on simulated hardware with the real daemon, in about a minute: no settings, no "
        "root, no real power-off. Exit 0: the host was saved each time; 1: it would have been lost.",
    )
    parser.add_argument("--fast", action="store_true", help="in virtual time, without sockets: in a few seconds")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the story")
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=Path,
        help="keep journal and reports there; without --fast also settings, logs and checkpoints",
    )
    parser.add_argument(
        "--ups",
        metavar="PORT",
        type=int,
        nargs="?",
        const=1161,
        help="serve only the simulated UPS, over SNMP on 127.0.0.1 (port 1161), for a daemon of your own; Enter pulls "
        "the plug",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play the story. Returns 0 when every claim of it is true, else 1."""
    try:
        if args.ups is not None:
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(SelectSelector())) as runner:
                return runner.run(_serve_ups(args.ups))
        return _fast(args) if args.fast else asyncio.run(_live(args))
    except StoryError as error:
        say(f"powerguard demo: {error}")
        return 1
    except KeyboardInterrupt:
        print("\npowerguard demo: stopped", file=sys.stderr)
        return 130


async def _serve_ups(port: int) -> int:
    from powerguard.sim.demo.live import serve

    try:
        await serve(port)
    except OSError as error:
        print(
            f"powerguard demo: 127.0.0.1 port {port}: {error.strerror}; name another with --ups PORT", file=sys.stderr
        )
        return 1
    return 0


async def _live(args: argparse.Namespace) -> int:
    from powerguard.sim.demo.live import live

    async with live(args.keep) as stage:
        return await _play(stage, args)


def _fast(args: argparse.Namespace) -> int:
    from powerguard.daemon.log import configure
    from powerguard.sim.demo.fast import fast
    from powerguard.sim.virtual import VirtualLoop

    configure(style="logfmt", level="error")

    async def virtual() -> int:
        async with fast(args.keep) as stage:
            return await _play(stage, args)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(virtual())


async def _play(stage: Stage, args: argparse.Namespace) -> int:
    def tell(text: str) -> None:
        if not args.json:
            _show(text)

    tell("powerguard demo")
    tell(f"  real:     {'; '.join(stage.real)}")
    tell(f"  replaced: {'; '.join(stage.replaced)}")
    report = await story.play(stage, tell)
    if args.json:
        print(json.dumps(report.as_json(stage), indent=2))
    else:
        _print_report(report)
    if args.keep is not None or not args.json:
        pages = _reports(stage.journal, args.keep)
        tell("\nReports with pictures, for a browser\n" + "\n".join(f"  {page}" for page in pages))
    return 0 if report.safe else 1


def _reports(journal: Path, keep: Path | None) -> Sequence[Path]:
    """Write the report of each outage as a page, and leave them in `keep`, else in a new folder."""
    from powerguard.cli.outages.history import read
    from powerguard.cli.outages.report import html_page, reported, write
    from powerguard.daemon.journal import history, read_only

    folder = Path(tempfile.mkdtemp(prefix="powerguard-demo-")) if keep is None else keep
    pages = []
    with read_only(journal) as db:
        for at, record in enumerate(reversed(history(db, 3)), 1):
            pages.append(folder / f"outage-{at}.html")
            trouble = write(str(pages[-1]), html_page(reported(read(db, record.id))))
            if trouble:
                raise StoryError(trouble)
    return pages


def _show(text: str) -> None:
    print("\n".join(fold(text.split("\n"))), flush=True)


def _print_report(report: Report) -> None:
    print("\nHow the seconds on battery were used (from the journal)")
    for act in report.acts:
        print(f"\n  {act.name}")
        for line in story.timeline(act):
            _show(line)
    print("\nChecks")
    for check in report.checks:
        _show(f"  {'yes' if check.holds else 'NO '}  {check.name}: {check.told}")
    verdict = "no training was lost" if report.safe else "THE HOST OR ITS TRAINING WOULD HAVE BEEN LOST"
    print(f"\n{verdict}, {report.seconds:.0f} s of story")
