"""`powerguard event`: called by the hooks of apcupsd and NUT, while the power fails. A hint, and a question.

It tells the daemon to poll at once, and never fails: a hook that fails stops other people's scripts. Nothing is kept
for later: an event that is delivered after the next boot would be a lie.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
from typing import Final, NoReturn

from powerguard.cli.client import DownError, RefusedError, add_options, post
from powerguard.cli.render import clean, say
from powerguard.cli.shared import SOCKET, Subparsers

OWNED: Final = 99
"""apccontrol(8): exit 99 of a hook suppresses what apcupsd would do by default."""
LIMIT_S: Final = 2.0
MAX_TEXT: Final = 200
"""Of a name, which somebody else has chosen; the daemon keeps no more of it."""
HINT_NAME: Final = "hint.sock"
"""Where hints go, in the folder of the admin socket (daemon/control/hints.py): anybody may give one."""
NUT_SHUTDOWN: Final = "nut-shutdown"
"""What the event is called when upsmon is about to shut the host down."""


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "event",
        help="request a poll (for the hooks of apcupsd and NUT)",
        usage="powerguard event [--] NAME [UPS]\n"
        "       powerguard event --for apcupsd|nut [--] NAME [UPS]\n"
        "       powerguard event --for nut-shutdown -- COMMAND...",
        description="Tell the daemon that something happened: it polls at once and decides by what it reads. "
        "Always exits 0. --for apcupsd and --for nut: 99 when the daemon is alive and owns the shutdown, so that the "
        "other one leaves it alone; else 0. --for nut-shutdown: runs COMMAND (what SHUTDOWNCMD was) unless the daemon "
        "owns the shutdown. Hooks write -- before NAME: what a UPS calls itself can then never be read as an option.",
    )
    parser.add_argument("name", nargs="?", default="", help="what happened, such as onbattery")
    parser.add_argument("ups", nargs="?", default="", help="which UPS")
    parser.add_argument(
        "--for", dest="caller", choices=("apcupsd", "nut", "nut-shutdown"), default=None, help="who asks"
    )
    add_options(parser)
    # A hook must not fail over its own options either; only a shutdown that would be lost is worth a failure.
    if "nut-shutdown" not in sys.argv:
        parser.error = _shrug  # type: ignore[method-assign]
    parser.set_defaults(run=run)


def _shrug(message: str) -> NoReturn:
    say(f"powerguard event: {message} (ignored: hooks never fail)")
    raise SystemExit(0)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if args.caller == "nut-shutdown":
        if not args.command:
            say("powerguard event: --for nut-shutdown needs -- COMMAND, what SHUTDOWNCMD was")
            return 64
        return _shutdown(args)
    # What stands after -- was never looked at as options: names come from other people's files, and from UPSes.
    after: list[str] = args.command
    name, ups, *_ = [*(str(word) for word in (args.name, args.ups) if word), *after, "", ""]
    if args.caller is None and not args.nowhere and _hint(args.socket or SOCKET, name or "unnamed", ups):
        return 0
    owned = _tell(args, name or "unnamed", ups)
    return OWNED if args.caller is not None and owned else 0


def _hint(admin: str, name: str, ups: str) -> bool:
    """Leave a hint at the hint socket, which waits for nobody; return whether there is one that took it."""
    folder, slash, _ = admin.rpartition("/")
    body = json.dumps({"name": name[:MAX_TEXT], "ups": ups[:MAX_TEXT]}).encode()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(body, f"{folder}{slash}{HINT_NAME}")
        return True
    return False


def _tell(args: argparse.Namespace, name: str, ups: str) -> bool:
    """Tell the daemon; return whether it owns the shutdown. A daemon that cannot be reached owns nothing."""
    try:
        if args.nowhere:
            raise DownError(args.nowhere)  # noqa: TRY301 - told and answered as any other that cannot be reached
        answer = post(args, "event", {"name": name[:MAX_TEXT], "ups": ups[:MAX_TEXT]}, limit_s=LIMIT_S)
    except (DownError, RefusedError, OSError) as error:  # even without a socket left: what comes after must be done
        say(f"powerguard event: {clean(error)} (hint not delivered)")
        return False
    return answer.get("owned") is True


def _shutdown(args: argparse.Namespace) -> int:
    if _tell(args, NUT_SHUTDOWN, args.ups):
        say("powerguard event: the daemon owns the shutdown of this host")
        return 0
    try:
        os.execvp(args.command[0], args.command)  # noqa: S606 - the operator's own command takes our place
    except OSError as error:
        say(f"powerguard event: {clean(args.command[0])}: {error.strerror}")
        return 127
