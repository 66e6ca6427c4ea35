"""`powerguard drill`: rehearse an outage on this host, watch it, and see that everything is put back."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from powerguard.cli.client import DownError, RefusedError, add_options, get, post
from powerguard.cli.drill_report import describe
from powerguard.cli.main import EX_USAGE
from powerguard.cli.operate import EX_DOWN, EX_REFUSED, Subparsers, fail
from powerguard.cli.render import Paint, clean, duration, table
from powerguard.cli.words import because_of

SCOPES: Final = ("checkpoint", "pause", "cap", "policy", "full")
WATCHDOG: Final = "bmc-watchdog"
"""The one scope that ends in a power-off, so it stands alone and has a file of its own (`drill_watchdog`)."""
WITNESSES: Final = ("simulated", "self_test", "plug")
_LOOK_S: Final = 0.5
_BEGIN_S: Final = 5.0
_DOWN_S: Final = 60.0
"""A daemon that is restarted in the middle of a drill puts everything back; so long we wait for it."""
_GOOD: Final = ("passed", "recorded")
_PATH: Final = "/api/v1/drill"


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "drill",
        help="rehearse an outage, and measure it",
        description="Rehearse an outage on this host: checkpoint, pause, GPU power cap, BMC policy, or all of it; only "
        "the power-off is written down instead. It says first what will happen, measures, and always ends with "
        "everything as it was; Ctrl-C, or `drill stop`, puts everything back at once. A real outage ends it and comes "
        "first. `drill report` shows the last one. Scope bmc-watchdog is another matter: it arms the BMC's watchdog "
        "and powers this host off, and the next boot judges what brought it back. Exit 0: passed, or only recorded "
        "(dry-run); 1: failed, interrupted or refused; 4: the daemon is down.",
    )
    parser.add_argument(
        "action", nargs="?", choices=("report", "stop"), help="show how the last one went; stop this one"
    )
    parser.add_argument(
        "--scope",
        action="append",
        type=_scopes,
        metavar="SCOPE",
        help=f"{', '.join(SCOPES)}; several with commas, or more than once (default: full); or {WATCHDOG} alone",
    )
    parser.add_argument("--host", default="", help=f"for {WATCHDOG}: this host's name, which is asked for otherwise")
    parser.add_argument(
        "--witness",
        choices=WITNESSES,
        default="simulated",
        help="what stands for the outage: nothing (utility stays), a self-test of the UPS, or you pulling the plug",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--no-wait", action="store_true", help="begin it and return; it ends by itself")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_options(parser)
    parser.set_defaults(run=run)


def _scopes(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in (*SCOPES, WATCHDOG):
            msg = f"{word!r} is no scope (of {', '.join(SCOPES)}, {WATCHDOG})"
            raise argparse.ArgumentTypeError(msg)
    return words


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        if args.action == "report":
            return _report(args)
        if args.action == "stop":
            return _stop(args)
        return _drill(args)
    except DownError as error:
        return fail(args, "drill", str(error), EX_DOWN)
    except RefusedError as error:
        return fail(args, "drill", f"refused: {because_of(str(error))}", EX_REFUSED)


def _report(args: argparse.Namespace) -> int:
    told = get(args, _PATH)
    if args.json:
        print(json.dumps(told, indent=2))
    elif told["last"] is None:
        print("There was no drill yet: nothing here has been rehearsed (powerguard drill).")
    else:
        print("\n".join(describe(told["last"], Paint())))
    return 0


def _stop(args: argparse.Namespace) -> int:
    """Stop the drill that runs, whoever began it, and wait until everything is put back."""
    before = _last_id(get(args, _PATH))
    post(args, "drill-stop", {"reason": "asked for"})
    return _tell(args, _watch(args, before), good=("interrupted", *_GOOD))


def _drill(args: argparse.Namespace) -> int:
    given = [word for words in args.scope or [] for word in words]
    if WATCHDOG in given:
        from powerguard.cli.drill_watchdog import drill_watchdog

        if given != [WATCHDOG] or args.witness != "simulated" or args.no_wait:
            return fail(args, "drill", f"{WATCHDOG} powers this host off: it goes with no other scope", EX_USAGE)
        return drill_watchdog(args)
    scopes = given or (["full"] if args.witness == "simulated" else [])
    asked: dict[str, object] = {"scopes": scopes, "witness": args.witness}
    plan = post(args, "drill-plan", asked)
    if plan["refused"]:
        return fail(args, "drill", f"refused: {because_of(plan['refused'])}", EX_REFUSED)
    if not args.json:
        print("\n".join(_outline(plan)), flush=True)  # before what is said on stderr: both may be one pipe
    if not args.yes:
        if not sys.stdin.isatty():
            return fail(args, "drill", "nobody can be asked here: repeat with --yes", EX_USAGE)
        print("Begin? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("Nothing was done.", file=sys.stderr)
            return EX_REFUSED
    before = _last_id(get(args, _PATH))
    answer = post(args, "drill", asked)
    if args.no_wait:
        print(json.dumps(answer, indent=2) if args.json else "begun; `powerguard drill report` tells how it went")
        return 0
    return _tell(args, _watch(args, before), good=_GOOD)


def _tell(args: argparse.Namespace, told: dict[str, Any], *, good: tuple[str, ...]) -> int:
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(describe(told["last"], Paint())))
    return 0 if told["last"]["result"] in good else EX_REFUSED


def _outline(plan: dict[str, Any]) -> list[str]:
    head = "This drill, in this order:" + (
        " (dry-run: nobody is asked, it is only recorded)" if plan["mode"] == "dry-run" else ""
    )
    rows = [
        (clean(each["stage"]), clean(each["what"]) + _at_most(each["at_most_s"])) for each in plan["stages"]
    ]  # fmt: skip
    return [head, *table(rows), "At its end, and whatever ends it, everything is put back."]


def _at_most(seconds: float | None) -> str:
    return f" (at most {duration(seconds)})" if seconds else ""


def _last_id(told: dict[str, Any]) -> str | None:
    return None if told["last"] is None else str(told["last"]["id"])


def _watch(args: argparse.Namespace, before: str | None) -> dict[str, Any]:
    """Show how the drill goes on until its report is there. Ctrl-C stops it, and waits until all is put back."""
    shown = _Progress(quiet=args.json)
    stopping = False
    began_s = down_s = time.perf_counter()
    while True:
        try:
            try:
                told = get(args, _PATH)
                down_s = time.perf_counter()
            except DownError:
                if time.perf_counter() - down_s > _DOWN_S:
                    shown.line(shown.left_behind())
                    raise
                shown.line("the daemon does not answer; when it is back it puts everything back")
                time.sleep(_LOOK_S)
                continue
            running = told["running"]
            if running is None or running["stage"] == "handed_over":
                if _last_id(told) != before:
                    shown.end(done=told["last"]["result"] in _GOOD)
                    return told
                if time.perf_counter() - began_s > _BEGIN_S:
                    msg = "the daemon did not begin it; its log says why (drill_refused)"
                    raise RefusedError(msg)
            else:
                shown.stage(running, told["load"])
            time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            if stopping:
                raise
            stopping = True
            try:
                post(args, "drill-stop", {"reason": "interrupted"})
            except DownError as error:
                shown.line(f"not stopped, and nothing is put back now: {error}")
                shown.line(shown.left_behind())
            except RefusedError as error:
                shown.line(f"not stopped: {error}")
            else:
                shown.line("stopping: everything is put back (Ctrl-C again leaves; the daemon goes on putting it back)")


class _Progress:
    """Tells on stderr how it goes: on a terminal one line that changes, else one line for each stage."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._told = ""
        self._last: dict[str, Any] = {}

    def stage(self, running: dict[str, Any], load: float | None) -> None:
        """Tell the stage that runs, for how long, and the load."""
        before, self._last = self._last, running
        if self._quiet:
            return
        stage = clean(running["stage"])
        if not self._live:
            coming = before.get("coming", [])
            self._passed(coming[: coming.index(running["stage"])] if running["stage"] in coming else [])
            self.line(f"{stage}: begun {duration(running['lasted_s'])} into the drill", key=stage)
            return
        told = "?" if load is None else f"{100 * load:.0f} %"
        ends = running["stage_ends_in_s"]
        most = "" if ends is None else f", ends in {duration(max(0.0, ends))} at the latest"
        waits = ", ".join(clean(each) for each in running["waiting"])
        text = f"  {stage}: {duration(running['stage_lasted_s'])}{most}; load {told}" + (
            f"; waiting for {waits}" if waits else ""
        )
        print(f"\r{text[:160]}\x1b[K", end="", file=sys.stderr, flush=True)

    def _passed(self, stages: Sequence[str]) -> None:
        """Tell the stages that were over before anybody could look."""
        for stage in stages:
            self.line(f"{clean(stage)}: done", key=clean(stage))

    def left_behind(self) -> str:
        """Say what is known to stand as the drill left it while the daemon is not there."""
        paused = ", ".join(str(name) for name in self._last.get("paused") or ())
        capped = self._last.get("stage") in ("cap", "restore")
        known = [f"training of {paused} stands still"] if paused else []
        known += ["GPU power may be capped"] if capped else []
        what = " and ".join(known) if known else f"it was at {self._last.get('stage', 'its begin')}"
        again = "the daemon puts everything back as soon as it runs again (systemctl start powerguard)"
        alone = "; without it training goes on by itself, a minute after the daemon was last heard"
        resume = f"{alone} (a trainer that knows no lease: POST /api/v1/resume to its socket)" if paused else ""
        return f"{what}: {again}{resume}"

    def line(self, text: str, key: str = "") -> None:
        """Tell one line, once."""
        if self._quiet or self._told == (key or text):
            return
        self._told = key or text
        print(f"\r\x1b[K  {clean(text)}" if self._live else f"  {clean(text)}", file=sys.stderr, flush=True)

    def end(self, *, done: bool) -> None:
        """Clear the line that changes. done: every stage was carried out."""
        if done and not self._live and not self._quiet:
            self._passed(self._last.get("coming", []))
        if self._live and not self._quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
