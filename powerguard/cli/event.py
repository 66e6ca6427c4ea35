"""`powerguard event`: called by the hooks of apcupsd and NUT, while the power fails. A hint, and a question.

It asks the daemon to poll at once, and never fails: a hook that fails would stop other scripts. An event is not kept
for later: after the next boot it would be wrong.
"""

import argparse
import contextlib
import os
import socket
import sys
from typing import Final, NoReturn

from powerguard.cli.client import DownError, RefusedError, add_options, encoded, post
from powerguard.cli.render import clean, say
from powerguard.cli.shared import SOCKET

OWNED: Final = 99
"""apccontrol(8): exit 99 of a hook suppresses what apcupsd would do by default."""
LIMIT_S: Final = 2.0
HINT_NAME: Final = "hint.sock"
"""Socket for hints, in the folder of the admin socket (daemon/control/hints.py): every user may send one."""
NUT_SHUTDOWN: Final = "nut-shutdown"
"""Name of the event when upsmon is about to shut the host down."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.usage = (
        "powerguard event [--] NAME [UPS]\n"
        "       powerguard event --for apcupsd|nut [--] NAME [UPS]\n"
        "       powerguard event --for nut-shutdown -- COMMAND..."
    )
    parser.description = (
        "Report an event to the daemon: it polls at once and decides by the reading. "
        "Always exits 0. --for apcupsd and --for nut: 99 if the daemon is alive and owns the shutdown, so that the "
        "other program does not shut down; else 0. --for nut-shutdown: runs COMMAND (the old SHUTDOWNCMD) unless the "
        "daemon owns the shutdown. Hooks write -- before NAME, so that the name of a UPS is never read as an option."
    )
    parser.add_argument("name", nargs="?", default="", help="the event, such as onbattery")
    parser.add_argument("ups", nargs="?", default="", help="which UPS")
    parser.add_argument("--for", dest="caller", choices=("apcupsd", "nut", "nut-shutdown"), help="who asks")
    add_options(parser)
    # A hook must not fail over its own options either, unless a shutdown would be lost.
    if not any(word in {"nut-shutdown", "--for=nut-shutdown"} for word in sys.argv):
        parser.error = _shrug  # type: ignore[method-assign]


def _shrug(message: str) -> NoReturn:
    say(f"powerguard event: {message} (ignored: hooks never fail)")
    raise SystemExit(0)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if args.caller == "nut-shutdown":
        if not args.command:
            say("powerguard event: --for nut-shutdown needs -- COMMAND, the old SHUTDOWNCMD")
            return 64
        return _shutdown(args)
    # Words after -- are never options: names come from other programs' files, and from UPSes.
    after: list[str] = args.command
    name, ups, *_ = [*(str(word) for word in (args.name, args.ups) if word), *after, "", ""]
    if args.caller is None and not args.nowhere and _hint(args.socket or SOCKET, name or "unnamed", ups):
        return 0
    owned = _report_event(args, name or "unnamed", ups)
    return OWNED if args.caller is not None and owned else 0


def _hint(admin: str, name: str, ups: str) -> bool:
    """Send a hint to the hint socket, without waiting; return whether a socket accepted it."""
    folder, slash, _ = admin.rpartition("/")
    body = encoded({"name": name, "ups": ups})
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(body, f"{folder}{slash}{HINT_NAME}")
        return True
    return False


def _report_event(args: argparse.Namespace, name: str, ups: str) -> bool:
    """Report it to the daemon; return whether it owns the shutdown. An unreachable daemon does not."""
    try:
        if args.nowhere:
            raise DownError(args.nowhere)  # noqa: TRY301 - handled as any other daemon that cannot be reached
        answer = post(args, "event", {"name": name, "ups": ups}, limit_s=LIMIT_S)
    except (DownError, RefusedError, OSError) as error:  # even without a free socket: the next steps must run
        say(f"powerguard event: {clean(error)} (hint not delivered)")
        return False
    return answer.get("owned") is True


def _shutdown(args: argparse.Namespace) -> int:
    if _report_event(args, NUT_SHUTDOWN, args.ups):
        say("powerguard event: the daemon owns the shutdown of this host")
        return 0
    try:
        os.execvp(args.command[0], args.command)  # noqa: S606 - the operator's own command takes our place
    except OSError as error:
        say(f"powerguard event: {clean(args.command[0])}: {error.strerror}")
        return 127
