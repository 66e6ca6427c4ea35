"""`powerguard demo`: an outage in a minute, without settings, root or hardware."""

import argparse
import asyncio
import json
import sys

from powerguard.cli.render import fold, say
from powerguard.sim import story
from powerguard.sim.story import Report, Stage, StoryError


def run(args: argparse.Namespace) -> int:
    """Play the story. Returns 0 when every claim of it is true, else 1."""
    try:
        return _fast(args) if args.fast else asyncio.run(_live(args))
    except StoryError as error:
        say(f"powerguard demo: {error}")
        return 1
    except KeyboardInterrupt:
        print("\npowerguard demo: stopped", file=sys.stderr)
        return 130


async def _live(args: argparse.Namespace) -> int:
    from powerguard.sim.demo import live

    async with live(args.keep) as stage:
        return await _play(stage, args)


def _fast(args: argparse.Namespace) -> int:
    from powerguard.daemon.log import configure
    from powerguard.sim.fast import fast
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
    return 0 if report.safe else 1


def _show(text: str) -> None:
    print("\n".join(fold(text.split("\n"))), flush=True)


def _print_report(report: Report) -> None:
    print("\nWhat the seconds on battery were spent on (from the journal)")
    for act in report.acts:
        print(f"\n  {act.name}")
        for line in story.timeline(act):
            _show(line)
    print("\nIs it true?")
    for check in report.checks:
        _show(f"  {'yes' if check.holds else 'NO '}  {check.name}: {check.told}")
    verdict = "nothing was lost" if report.safe else "THE HOST OR ITS TRAINING WOULD HAVE BEEN LOST"
    print(f"\n{verdict}, {report.seconds:.0f} s of story")
