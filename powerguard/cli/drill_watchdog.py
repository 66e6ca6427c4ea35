"""`powerguard drill --scope bmc-watchdog`: does the BMC's own timer bring this host back? It powers the host off."""

import argparse
import json
import sys
from typing import Any, Final

from powerguard.cli.client import post
from powerguard.cli.main import EX_USAGE
from powerguard.cli.operate import EX_REFUSED, fail
from powerguard.cli.render import clean, duration, mode_note, moment, table
from powerguard.cli.words import because_of

LIMIT_S: Final = 20.0
"""The BMC is asked three times, 5 s each at most, and a file is written."""


def drill_watchdog(args: argparse.Namespace) -> int:
    """Say what will happen, ask for the host's name, and begin. Raises DownError, RefusedError."""
    plan = post(args, "watchdog-drill-plan", {}, LIMIT_S)
    dry = plan["mode"] != "armed"
    if args.json and (dry or plan["refused"] or not args.host):
        print(json.dumps(plan, indent=2))
    elif not args.json:
        print("\n".join(_outline(plan)))
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
        why = f"{clean(name)!r} is not this host's name ({clean(plan['host'])}): nothing was done"
        return fail(args, "drill", why, EX_REFUSED)
    answer = post(args, "watchdog-drill", {"host": name}, LIMIT_S)
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        print(
            f"Armed and read back: the BMC cycles the power in {duration(answer['in_s'])}; this host powers off now.\n"
            "The next boot judges it: `powerguard doctor` tells (bmc.watchdog). A host that is still off a quarter of "
            "an hour later\nwants its power button: its watchdog does nothing once it is off."
        )
    return 0


def _typed(args: argparse.Namespace, host: str) -> str | None:
    """What the operator types; None where nobody can be asked."""
    if args.json or not sys.stdin.isatty():
        fail(args, "drill", f"nobody can be asked here: repeat with --host {clean(host)}", EX_USAGE)
        return None
    print(f"Type this host's name ({clean(host)}) to power it off now: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def _outline(plan: dict[str, Any]) -> list[str]:
    off, fires = duration(plan["force_after_s"]), duration(plan["in_s"])
    note = mode_note(plan["mode"], "nothing is done")
    head = f"This drill powers {clean(plan['host'])} off, in this order:{note}"
    rows = [
        ("arm", f"let the BMC cycle the power in {fires}, and read it back"),
        ("power off", f"in order; whatever still runs after {off} is killed"),
        ("wait", "the host is off, on utility: only the BMC can bring it back"),
        ("judge", "the next boot asks the BMC what powered the host on, and writes it down"),
    ]
    tail = [
        "Training ends, and is not started again by this drill. Somebody must be able to press the power button:",
        "on a board that cannot do it this host stays off.",
    ]
    last = plan["last"]
    if last is not None:
        when = moment(last["judged_wall_s"] or last["armed_wall_s"])
        tail.append(f"The last one, {when}: {clean(last['state'])}: {clean(last['because'])}")
    return [head, *table(rows), *tail]
