"""`powerguard demo`: an outage in a minute, without settings, root or hardware."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from selectors import SelectSelector

from powerguard.cli.render import fold
from powerguard.cli.shared import EX_INTERRUPTED, EX_REFUSED, EX_USAGE, fail, port
from powerguard.sim.demo import story
from powerguard.sim.demo.story import Report, Stage, StoryError


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Play three outages on simulated hardware with the real daemon, in about a minute: no settings, no "
        "root, no real power-off. Exit 0: the host was saved each time; 1: it would have been lost."
    )
    parser.add_argument(
        "--hosts",
        metavar="N",
        type=int,
        choices=(1, 3),
        default=1,
        help="3: three hosts on one UPS, in two tiers, each with its own daemon and trainer; two outages",
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
        type=port(1161, least=0),
        nargs="?",
        const=1161,
        help="serve only the simulated UPS, over SNMP on 127.0.0.1 (port 1161), for a daemon of your own; Enter pulls "
        "the plug",
    )


def run(args: argparse.Namespace) -> int:
    """Play the story. Returns 0 when every claim of it is true, else 1."""
    if args.hosts != 1 and (args.fast or args.ups is not None):
        other = "--fast" if args.fast else "--ups"
        return fail(args, "demo", f"--hosts and {other} contradict each other; keep one", EX_USAGE)
    try:
        if args.ups is not None:
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(SelectSelector())) as runner:
                return runner.run(_serve_ups(args.ups))
        return _fast(args) if args.fast else asyncio.run(_live(args))
    except StoryError as error:
        return fail(args, "demo", str(error), EX_REFUSED)
    except KeyboardInterrupt:
        print("\npowerguard demo: stopped", file=sys.stderr)
        return EX_INTERRUPTED


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
    if args.hosts == 1:
        from powerguard.sim.demo.live import live

        async with live(args.keep) as stage:
            status = await _play(stage, args)
            _leave_reports({"": stage.journal}, args)
            return status
    from powerguard.sim.demo import rack

    async with rack.rack(args.keep) as stages:
        status = await _play_story(rack.REAL, rack.REPLACED, partial(rack.play, stages), args)
        _leave_reports({host: stage.journal for host, stage in stages.items()}, args)
        return status


def _fast(args: argparse.Namespace) -> int:
    from powerguard.daemon.log import configure
    from powerguard.sim.demo.fast import fast
    from powerguard.sim.virtual import VirtualLoop

    configure(style="logfmt", level="error")

    async def virtual() -> int:
        async with fast(args.keep) as stage:
            status = await _play(stage, args)
            _leave_reports({"": stage.journal}, args)
            return status

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(virtual())


async def _play(stage: Stage, args: argparse.Namespace) -> int:
    return await _play_story(stage.real, stage.replaced, partial(story.play, stage), args)


async def _play_story(
    real: Sequence[str],
    replaced: Sequence[str],
    play: Callable[[Callable[[str], None]], Awaitable[Report]],
    args: argparse.Namespace,
) -> int:
    """Play a story and print it. Returns the exit status."""

    def print_text(text: str) -> None:
        if not args.json:
            _show(text)

    print_text("powerguard demo")
    print_text(f"  real:     {'; '.join(real)}")
    print_text(f"  replaced: {'; '.join(replaced)}")
    report = await play(print_text)
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _print_report(report)
    return 0 if report.safe else 1


def _leave_reports(journals: Mapping[str, Path], args: argparse.Namespace) -> None:
    """Write the report of each outage of each host as a page, in `--keep`, else in a new folder, and name the pages."""
    from powerguard.cli.outages.history import read
    from powerguard.cli.outages.report import html_page, reported, write
    from powerguard.daemon.journal import history, read_only

    if args.keep is None and args.json:
        return
    folder = Path(tempfile.mkdtemp(prefix="powerguard-demo-")) if args.keep is None else args.keep
    pages = []
    for host, journal in journals.items():
        with read_only(journal) as db:
            for at, record in enumerate(reversed(history(db, 3)), 1):
                pages.append(folder / f"{host and host + '-'}outage-{at}.html")
                trouble = write(str(pages[-1]), html_page(reported(read(db, record.id))))
                if trouble:
                    raise StoryError(trouble)
    if not args.json:
        _show("\nReports with pictures, for a browser\n" + "\n".join(f"  {page}" for page in pages))


def _show(text: str) -> None:
    print("\n".join(fold(text.split("\n"))), flush=True)


def _print_report(report: Report) -> None:
    print("\nHow the seconds on battery were used (from the journal)")
    for name in dict.fromkeys(act.name for act in report.acts):
        print(f"\n  {name}")
        acts = [act for act in report.acts if act.name == name]
        for line in story.together(acts) if acts[0].host else story.timeline(acts[0]):
            _show(line)
    print("\nChecks")
    for check in report.checks:
        _show(f"  {'yes' if check.holds else 'NO '}  {check.name}: {check.observed}")
    verdict = "no training was lost" if report.safe else "A HOST OR ITS TRAINING WOULD HAVE BEEN LOST"
    print(f"\n{verdict}, {report.seconds:.0f} s of story")
