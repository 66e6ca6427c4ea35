"""`powerguard drill`: rehearse an outage on this host, follow it, and report expected and measured values.

`powerguard drill --scope bmc-watchdog` tests whether the BMC's own timer brings this host back. It powers the host off.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from powerguard.cli.client import DownError, RefusedError, add_options, get, post
from powerguard.cli.render import Paint, agreed, clean, columns, duration, fold, mode_note, moment, number, table
from powerguard.cli.shared import EX_DOWN, EX_REFUSED, EX_USAGE, fail, print_answer
from powerguard.cli.words import because_of

_COLOURS: Final = {"passed": "green", "recorded": "yellow", "interrupted": "yellow", "failed": "red"}


def _seconds(value: object) -> str:
    return duration(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else "?"


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else clean(value)


_percent: Final = partial(number, unit="%")
_share: Final = partial(number, unit="%", digits=1, times=100)
_watts: Final = partial(number, unit="W")
_ROWS: Final[tuple[tuple[str, str, str, Callable[[object], str]], ...]] = (
    ("load before", "", "load_before", _share),
    ("charge before", "", "charge_before_pct", _percent),
    ("checkpoint, all durable", "checkpoint_expected_s", "checkpoint_s", _seconds),
    ("load paused", "load_paused_expected", "load_paused", _share),
    ("saved by pausing", "", "drop_paused", _share),
    ("saved by pausing", "", "drop_paused_w", _watts),
    ("until training continued", "", "resume_s", _seconds),
    ("load capped", "", "load_capped", _share),
    ("saved by capping", "", "drop_capped", _share),
    ("saved by capping", "", "drop_capped_w", _watts),
    ("training speed capped", "", "cap_speed", _share),
    ("training per charge, capped", "", "cap_gain", partial(number, unit="times", digits=2)),
    ("capping pays", "", "cap_pays", _word),
    ("BMC policy", "", "policy", _word),
    ("BMC policy verified", "", "policy_verified", _word),
    ("filesystems synced", "", "sync_s", _seconds),
    ("effective runtime, paused", "runtime_paused_expected_s", "runtime_paused_s", _seconds),
    ("stop needs", "", "stop_s", _seconds),
    ("checkpoint and stop fit", "", "fits", _word),
    ("power-off (not ordered): stop", "", "power_off_grade", _word),
    ("power-off (not ordered): forced after", "", "power_off_force_after_s", _seconds),
    ("self-test lasted", "", "test_s", _seconds),
    ("load in the self-test", "load_before", "load_test", _share),
    ("runtime in the self-test", "runtime_before_s", "runtime_test_s", _seconds),
    ("battery health", "health_before", "health", _share),
    ("as this discharge measured it", "", "health_measured", _share),
    ("battery health, at least", "", "health_at_least", _share),
    ("outage lasted", "", "outage_s", _seconds),
    ("powered off in order", "", "powered_off_clean", _word),
    ("charge after", "", "charge_after_pct", _percent),
)


def describe(report: dict[str, Any], paint: Paint) -> list[str]:
    """Return a report as lines."""
    figures: dict[str, object] = report["figures"]
    result = clean(report["result"])
    what = ", ".join(clean(scope) for scope in report["scopes"]) or clean(report["witness"])
    lasted, ended = duration(report["lasted_s"]), moment(report["ended_at"])
    short = ", but checkpoint and stop do not fit the battery" if figures.get("fits") is False else ""
    colour = "yellow" if short and result == "passed" else _COLOURS.get(result, "yellow")
    lines = [
        f"Drill {paint(result + short, colour)}: {clean(because_of(report['because']))}",
        f"  {what}, by {clean(report['who']) or '?'}, ended {ended} after {lasted}",
    ]
    rows = [("", "expected", "measured")]
    for label, expected, measured, text_of in _ROWS:
        if measured in figures:
            rows.append((label, text_of(figures[expected]) if expected in figures else "", text_of(figures[measured])))
            if measured == "checkpoint_s":
                rows += _trainers(figures)
    if len(rows) > 1:
        lines += table(rows)
    lines += [
        f"  left out: {clean(name.removeprefix('skipped_'))}: {clean(why)}"
        for name, why in figures.items()
        if name.startswith("skipped_")
    ]
    return lines + _doubts(figures, paint)


def _trainers(figures: dict[str, object]) -> list[tuple[str, str, str]]:
    rows = []
    for name, value in figures.items():
        head, dot, trainer = name.partition(".")
        if head == "checkpoint_s" and dot:
            verified = figures.get(f"checkpoint_verified.{trainer}") is True
            rows.append((f"  {clean(trainer)}", "", _seconds(value) + ("" if verified else ", unverified")))
    return rows


def _doubts(figures: dict[str, object], paint: Paint) -> list[str]:
    """What was not measured, and why."""
    doubts = {
        "load_reported": "the UPS reports no load, so the saving by a pause is unknown",
        "load_paused_settled": "the paused load did not settle, so it is not learned",
        "load_capped_settled": "the capped load did not settle, so it is not learned",
        "health_learned": "the discharge was not deep enough to measure the battery's health",
        "cap_speed_reported": "no trainer reported enough steps, so it is unknown whether a cap pays",
    }
    return [f"  {paint('!', 'yellow')} {text}" for name, text in doubts.items() if figures.get(name) is False]


LIMIT_S: Final = 20.0
"""The BMC is asked three times, 5 s each at most, and a file is written."""


def drill_watchdog(args: argparse.Namespace) -> int:
    """Say what will happen, ask for the host's name, and begin. Raises DownError, RefusedError."""
    plan = post(args, "watchdog-drill-plan", {}, LIMIT_S)
    dry = plan["mode"] != "armed"
    if args.json and (dry or plan["refused"] or not args.host):
        print(json.dumps(plan, indent=2))
    elif not args.json:
        print("\n".join(fold(_watchdog_outline(plan))))
    if plan["refused"]:
        return (
            fail(args, "drill", f"refused: {because_of(plan['refused'])}", EX_REFUSED) if not args.json else EX_REFUSED
        )
    if dry:
        return 0
    name = args.host or _typed(args, plan["host"])
    if name is None:
        return EX_USAGE
    if name != plan["host"]:
        why = f"{clean(name)!r} is not this host's name ({clean(plan['host'])}): the drill did not start"
        return fail(args, "drill", why, EX_REFUSED)
    answer = post(args, "watchdog-drill", {"host": name}, LIMIT_S)
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        print(
            f"Armed and read back: the BMC cycles the power in {duration(answer['in_s'])}; this host powers off now.\n"
            "The next boot judges it: see bmc.watchdog in `powerguard doctor`. If the host is still off after a "
            "quarter of an hour,\npress its power button: its watchdog does not work while it is off."
        )
    return 0


def _typed(args: argparse.Namespace, host: str) -> str | None:
    """The operator's input; None if stdin is not a terminal."""
    if args.json or not sys.stdin.isatty():
        fail(
            args,
            "drill",
            f"stdin is not a terminal, so powerguard cannot ask: repeat with --host {clean(host)}",
            EX_USAGE,
        )
        return None
    print(f"Type this host's name ({clean(host)}) to power it off now: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def _watchdog_outline(plan: dict[str, Any]) -> list[str]:
    off, fires = duration(plan["force_after_s"]), duration(plan["in_s"])
    note = mode_note(plan["mode"], "only shown")
    head = f"This drill powers {clean(plan['host'])} off, in this order:{note}"
    rows = [
        ("arm", f"let the BMC cycle the power in {fires}, and read it back"),
        ("power off", f"in order; units that still run after {off} are killed"),
        ("wait", "the host is off, on utility: only the BMC can bring it back"),
        ("judge", "the next boot asks the BMC what powered the host on, and records it"),
    ]
    tail = [
        "Training ends, and this drill does not start it again. Be able to press the power button:",
        "on a board that cannot do it, this host stays off.",
    ]
    last = plan["last"]
    if last is not None:
        when = moment(last["judged_wall_s"] or last["armed_wall_s"])
        tail.append(f"The last one, {when}: {clean(last['state'])}: {clean(last['because'])}")
    return [head, *table(rows), *tail]


SCOPES: Final = ("checkpoint", "pause", "cap", "policy", "full")
WATCHDOG: Final = "bmc-watchdog"
"""The one scope that ends in a power-off, so it stands alone and has a file of its own (`drill_watchdog`)."""
WITNESSES: Final = ("simulated", "self_test", "plug")
_LOOK_S: Final = 0.5
_BEGIN_S: Final = 5.0
_DOWN_S: Final = 60.0
"""Longest wait for a daemon that restarts during a drill; it then puts everything back."""
_GOOD: Final = ("passed", "recorded")
_PATH: Final = "/api/v1/drill"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Rehearse an outage on this host: checkpoint, pause, GPU power cap, BMC policy, or all of it; "
        "the power-off is only recorded. It shows the steps first, measures, and always ends with "
        "everything as it was; Ctrl-C, or `drill stop`, puts everything back at once. A real outage ends the drill "
        "and comes first. `drill report` shows the last one. Scope bmc-watchdog is different: it arms the BMC's "
        "watchdog and powers this host off, and the next boot checks what brought it back. Exit 0: passed, or only "
        "recorded (dry-run); 1: failed, interrupted or refused; 4: the daemon is down."
    )
    parser.add_argument(
        "action", nargs="?", choices=("report", "stop"), help="show the report of the last drill; stop the running one"
    )
    parser.add_argument(
        "--scope",
        action="append",
        type=_scopes,
        metavar="SCOPE",
        help=f"{', '.join(SCOPES)}; several with commas, or more than once (default: full); or {WATCHDOG} alone",
    )
    parser.add_argument("--host", default="", help=f"for {WATCHDOG}: this host's name, instead of a question")
    parser.add_argument(
        "--witness",
        choices=WITNESSES,
        default="simulated",
        help="what acts as the outage: simulated (utility stays), a self-test of the UPS, or the pulled plug",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--no-wait", action="store_true", help="start it and return; it ends by itself")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_options(parser)


def _scopes(text: str) -> list[str]:
    scopes = [word.strip() for word in text.split(",")]
    for word in scopes:
        if word not in (*SCOPES, WATCHDOG):
            msg = f"{word!r} is not a scope (choose from {', '.join(SCOPES)}, {WATCHDOG})"
            raise argparse.ArgumentTypeError(msg)
    return scopes


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
    answer = get(args, _PATH)
    none = ["There was no drill yet: run `powerguard drill` to rehearse an outage."]
    print_answer(args, answer, lambda: fold(none if answer["last"] is None else describe(answer["last"], Paint())))
    return 0


def _stop(args: argparse.Namespace) -> int:
    """Stop the running drill, and wait until everything is put back."""
    before = _last_id(get(args, _PATH))
    post(args, "drill-stop", {"reason": "asked for"})
    return _print_report(args, _watch(args, before), good=("interrupted", *_GOOD))


def _drill(args: argparse.Namespace) -> int:
    given = [word for words in args.scope or [] for word in words]
    if WATCHDOG in given:
        if given != [WATCHDOG] or args.witness != "simulated" or args.no_wait:
            return fail(args, "drill", f"{WATCHDOG} powers this host off: use it without another scope", EX_USAGE)
        return drill_watchdog(args)
    scopes = given or (["full"] if args.witness == "simulated" else [])
    request: dict[str, object] = {"scopes": scopes, "witness": args.witness}
    plan = post(args, "drill-plan", request)
    if plan["refused"]:
        return fail(args, "drill", f"refused: {because_of(plan['refused'])}", EX_REFUSED)
    if not args.json:
        print("\n".join(fold(_outline(plan))), flush=True)  # before the output on stderr: both may be one pipe
    if not args.yes:
        if not sys.stdin.isatty():
            return fail(args, "drill", "stdin is not a terminal, so powerguard cannot ask: repeat with --yes", EX_USAGE)
        if not agreed("Begin?"):
            print("Cancelled: the drill did not start.", file=sys.stderr)
            return EX_REFUSED
    before = _last_id(get(args, _PATH))
    begin = partial(post, args, "drill", request)
    if args.no_wait:
        print_answer(args, begin(), lambda: ["started; `powerguard drill report` shows the result"])
        return 0
    return _print_report(args, _watch(args, before, begin), good=_GOOD)


def _print_report(args: argparse.Namespace, answer: dict[str, Any], *, good: tuple[str, ...]) -> int:
    print_answer(args, answer, lambda: fold(describe(answer["last"], Paint())))
    return 0 if answer["last"]["result"] in good else EX_REFUSED


def _outline(plan: dict[str, Any]) -> list[str]:
    head = "This drill, in this order:" + (
        " (dry-run: no trainer is asked, it is only recorded)" if plan["mode"] == "dry-run" else ""
    )
    rows = [
        (clean(each["stage"]), clean(each["what"]) + _at_most(each["at_most_s"])) for each in plan["stages"]
    ]  # fmt: skip
    return [head, *table(rows), "At its end, for whatever reason, everything is put back."]


def _at_most(seconds: float | None) -> str:
    return f" (at most {duration(seconds)})" if seconds else ""


def _last_id(answer: dict[str, Any]) -> str | None:
    return None if answer["last"] is None else str(answer["last"]["id"])


def _watch(args: argparse.Namespace, before: str | None, begin: Callable[[], object] | None = None) -> dict[str, Any]:
    """Show the drill's progress until its report is there. Ctrl-C stops it, and waits until all is put back.

    begin: starts the drill first; Ctrl-C stops it also while the daemon's answer is on its way.
    """
    shown = _Progress(quiet=args.json)
    stopping = False
    began_s = down_s = time.perf_counter()
    while True:
        try:
            if begin is not None:
                asks, begin = begin, None
                asks()
            try:
                answer = get(args, _PATH)
                down_s = time.perf_counter()
            except DownError:
                if time.perf_counter() - down_s > _DOWN_S:
                    shown.line(shown.left_behind())
                    raise
                shown.line("the daemon does not answer; it puts everything back when it runs again")
                time.sleep(_LOOK_S)
                continue
            running = answer["running"]
            if running is None or running["stage"] == "handed_over":
                if _last_id(answer) != before:
                    shown.end(done=answer["last"]["result"] in _GOOD)
                    return answer
                if time.perf_counter() - began_s > _BEGIN_S:
                    msg = "the daemon did not start it; its log has the reason (drill_refused)"
                    if stopping:
                        msg = "interrupted before the daemon began it"
                    raise RefusedError(msg)
            else:
                shown.stage(running, answer["load"])
            time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            if stopping:
                raise
            stopping = True
            _interrupt(args, shown)


def _interrupt(args: argparse.Namespace, shown: "_Progress") -> None:
    """Ask the daemon to stop the drill, and show what it answers."""
    try:
        post(args, "drill-stop", {"reason": "interrupted"})
    except DownError as error:
        shown.line(f"not stopped, and not put back yet: {error}")
        shown.line(shown.left_behind())
    except RefusedError as error:
        shown.line(f"not stopped: {error}")
    else:
        shown.line("stopping: the daemon puts everything back (Ctrl-C again leaves; the daemon continues)")


class _Progress:
    """Shows the progress on stderr: on a terminal one line that changes, else one line for each stage."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._printed = ""
        self._last: dict[str, Any] = {}

    def stage(self, running: dict[str, Any], load: float | None) -> None:
        """Show the running stage, its time, and the load."""
        before, self._last = self._last, running
        if self._quiet:
            return
        stage = clean(running["stage"])
        if not self._live:
            coming = before.get("coming", [])
            self._passed(coming[: coming.index(running["stage"])] if running["stage"] in coming else [])
            self.line(f"{stage}: started {duration(running['lasted_s'])} into the drill", key=stage)
            return
        load_text = "?" if load is None else f"{100 * load:.0f} %"
        ends = running["stage_ends_in_s"]
        most = "" if ends is None else f", ends in {duration(max(0.0, ends))} at the latest"
        waits = ", ".join(clean(each) for each in running["waiting"])
        text = f"  {stage}: {duration(running['stage_lasted_s'])}{most}; load {load_text}" + (
            f"; waiting for {waits}" if waits else ""
        )
        later = ", ".join(clean(each) for each in running.get("coming", []))
        text += f"; then {later}" if later else ""
        print(f"\r{text[: (columns(sys.stderr) or 80) - 1]}\x1b[K", end="", file=sys.stderr, flush=True)

    def _passed(self, stages: Sequence[str]) -> None:
        """Show the stages that ended between two polls."""
        for stage in stages:
            self.line(f"{clean(stage)}: done", key=clean(stage))

    def left_behind(self) -> str:
        """Return what the drill has left changed while the daemon is down."""
        paused = ", ".join(str(name) for name in self._last.get("paused") or ())
        capped = self._last.get("stage") in ("cap", "restore")
        known = [f"training of {paused} is paused"] if paused else []
        known += ["GPU power may be capped"] if capped else []
        what = " and ".join(known) if known else f"it was at {self._last.get('stage', 'its begin')}"
        again = "the daemon puts everything back as soon as it runs again (systemctl start powerguard)"
        alone = "; without it training continues by itself, a minute after the daemon's last request"
        resume = f"{alone} (for a trainer without leases: POST /api/v1/resume to its socket)" if paused else ""
        return f"{what}: {again}{resume}"

    def line(self, text: str, key: str = "") -> None:
        """Print one line, once."""
        if self._quiet or self._printed == (key or text):
            return
        self._printed = key or text
        print(f"\r\x1b[K  {clean(text)}" if self._live else f"  {clean(text)}", file=sys.stderr, flush=True)

    def end(self, *, done: bool) -> None:
        """Clear the line that changes. done: every stage was carried out."""
        if done and not self._live and not self._quiet:
            self._passed(self._last.get("coming", []))
        if self._live and not self._quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
