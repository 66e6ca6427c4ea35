"""The verbs `abort`, `maintenance` and `checkpoint`, and their common request to the daemon.

`powerguard abort`: abort this outage's shutdown, before the commit point.

`powerguard maintenance`: suspend the power-off for a while, with an end and a reason.

`powerguard checkpoint`: ask every trainer for a checkpoint now, while training continues.
"""

import argparse

from powerguard.cli.client import DownError, RefusedError, add_options, post
from powerguard.cli.render import clean, duration, fold, mode_note, parse_seconds
from powerguard.cli.shared import EX_DOWN, EX_REFUSED, fail, print_answer


def ask(args: argparse.Namespace, verb: str, body: dict[str, object], done: str, late: str = "") -> int:
    """Ask the daemon for a change and print the answer. done: the text if it was accepted.

    late: the text if it was accepted after the commit point of an armed daemon, if another one.
    """
    try:
        answer = post(args, verb, body)
    except DownError as error:
        return fail(args, verb, str(error), EX_DOWN)
    except RefusedError as error:
        return fail(args, verb, f"refused: {error}", EX_REFUSED)
    note = mode_note(answer.get("mode"), "the host would not be powered off anyway")
    text = late if late and answer.get("phase") == "shutdown" and not note else done
    print_answer(args, answer, lambda: fold([f"{text}; phase {clean(answer.get('phase'))}{note}"]))
    return 0


def register_abort(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Abort this outage's shutdown and continue training, at your own risk: powerguard no longer "
        "powers the host off in this outage. Possible only before the commit point. "
        "Exit 0: aborted; 1: refused, with the reason; 4: the daemon is down."
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the journal")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_options(parser)


def run_abort(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    return ask(args, "abort", {"reason": args.reason}, "asked the daemon to abort this outage's shutdown")


def register_maintenance(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Suspend the power-off for a while; alarms and checkpoints continue. It ends by itself. "
        "Exit 0: done; 1: refused, with the reason; 4: the daemon is down."
    )
    verbs = parser.add_subparsers(dest="maintenance_verb", metavar="on|off", required=True)
    on = verbs.add_parser("on", help="suspend", description="Suspend the power-off.")
    on.add_argument(
        "--for", dest="for_s", type=_seconds, required=True, metavar="TIME", help="such as 90s, 15m, 2h, 1d"
    )
    on.add_argument("--reason", required=True, metavar="TEXT", help="the reason, for the journal and for status")
    off = verbs.add_parser("off", help="end it now", description="End maintenance now.")
    for each in (on, off):
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")
        add_options(each)


def _seconds(text: str) -> float:
    seconds = parse_seconds(text)
    if seconds is None or not 0 < seconds <= 7 * 86400:
        msg = f"{text!r} is not a time up to 7 days (examples: 90s, 15m, 2h, 1d)"
        raise argparse.ArgumentTypeError(msg)
    return seconds


def run_maintenance(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if args.maintenance_verb == "off":
        return ask(args, "maintenance", {"for_s": 0}, "maintenance off: the power-off is no longer suspended")
    on = f"maintenance on for {duration(args.for_s)}"
    done = f"{on}: this host is NOT powered off when the battery runs low"
    late = f"{on}, but too late for this outage: its power-off is decided and cannot be undone in this boot"
    return ask(args, "maintenance", {"for_s": args.for_s, "reason": args.reason}, done, late)


def register_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Ask every trainer for a checkpoint now; training continues. `powerguard status` shows the "
        "progress. Exit 0: asked; 1: refused, with the reason; 4: the daemon is down."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_options(parser)


def run_checkpoint(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    return ask(args, "checkpoint", {}, "asked every trainer for a checkpoint")
