"""The root helper powerguard-ipmi: a closed list of words about the host's own BMC, through /dev/ipmi0.

The device is the whole BMC without a password (it can make users and switch power), so the daemon never has it. Words:

    status; probe (also what can be set); look (a probe that only reads); power (watts)
    ensure    always-on, and no other policy
    restore   the policy that an outage found, but only where always-on is read: what else is there is somebody's
    watchdog  read the watchdog timer, who the BMC is, and what powered the host on
    arm       let the BMC cycle the power in in_s seconds: never over somebody else's timer, never where the kernel
              would stop it again; read back, and taken back where it does not read back
    disarm    stop that timer, and no other

Below them is a second lock: `device.ALLOWED`. Only the standard library.

systemd starts it with the first connection to its socket. It answers each connection in a child of its own, so that one
that hangs in the driver holds nobody else up, and ends when nobody has come for a while: a start costs more than a word
may take, and root's memory shall not wait for months either.
"""

import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from powerguard.clock import boottime_s
from powerguard.effectors.bmc.device import DEVICE, IpmiDevice
from powerguard.effectors.bmc.exchange import BmcFailure, Exchange, Pace
from powerguard.effectors.bmc.ipmi import Failure, PowerRestorePolicy
from powerguard.effectors.root_helper import EX_USAGE, Answer, RefusedError, say, serve, tell

WORDS: Final = ("status", "ensure", "probe", "look", "power", "restore", "watchdog", "arm", "disarm")
_TAKES: Final = {"restore": "policy", "arm": "in_s"}
_RESTORED: Final = (PowerRestorePolicy.ALWAYS_OFF, PowerRestorePolicy.LAST_STATE)
_MAX_S: Final = 6553
"""Seconds that a watchdog timer of the BMC can hold."""
_OF_TIMER: Final = ("watchdog", "arm", "disarm")
MODULES: Final = "/sys/module"
IDLE_S: Final = 600.0
"""Longer than from the first check of an outage to most commits."""
_CHILD_S: Final = 30
_LISTEN_FD: Final = 3
"""SD_LISTEN_FDS_START of sd_listen_fds(3)."""
WITHIN_S: Final = 5.0
"""For one word, and the most that anybody may ask for."""


class Word(NamedTuple):
    """What is asked. value: of `restore` a policy, of `arm` whole seconds, else None."""

    name: str
    within_s: float = WITHIN_S
    value: str | int | None = None


def carry_out(path: str, word: Word, modules: str = MODULES) -> Answer:
    """Do what is asked. `ok`: the word was one of ours; `failure`: why the BMC did not do it, null where it did."""
    answer: dict[str, Any] = {"schema_version": 1, "word": word.name, "ok": True, "failure": None, "text": ""}
    by_s = boottime_s() + word.within_s
    try:
        _refuse_under_test(path)
        with IpmiDevice(path, by_s) as device:
            exchange = Exchange(device.send, Pace(clock=boottime_s, sleep=time.sleep, by_s=by_s))
            told = _ask(exchange, word) if word.name not in _OF_TIMER else _ask_timer(exchange, word, modules)
    except BmcFailure as failed:
        tell(4, f"{word.name}: {failed}")
        return answer | {"failure": failed.failure, "text": str(failed)}
    if told.get("changed"):
        tell(5, _done(word, told))
    return answer | {key: value.hex() if isinstance(value, bytes) else value for key, value in told.items()}


def _done(word: Word, told: Mapping[str, Any]) -> str:
    """What was changed, for the log."""
    match word.name:
        case "arm":
            return f"watchdog armed: power cycle in {word.value} s (reads {told['timer'].hex()})"
        case "disarm":
            return "watchdog stopped"
        case _:
            return f"power restore policy set to {word.value or 'always-on'} (status was {told['before'].hex()})"


def _ask(exchange: Exchange, word: Word) -> dict[str, Any]:
    match word.name:
        case "status":
            return {"status": exchange.status()}
        case "ensure":
            return exchange.ensure(PowerRestorePolicy.ALWAYS_ON)._asdict()
        case "restore":
            return exchange.ensure(PowerRestorePolicy(str(word.value)), PowerRestorePolicy.ALWAYS_ON)._asdict()
        case "power":
            return {"power_watts": exchange.power_watts()}
        case _:
            return exchange.probe(ask_support=word.name == "probe")._asdict()


def _ask_timer(exchange: Exchange, word: Word, modules: str) -> dict[str, Any]:
    from powerguard.effectors.bmc import countdown  # noqa: PLC0415 - ensure, which counts most, needs none of it

    kernel_driver = os.path.isdir(f"{modules}/ipmi_watchdog")  # noqa: PTH112 - pathlib takes 4 ms
    match word.name:
        case "arm":
            if kernel_driver:
                raise BmcFailure(Failure.HELD, "the kernel's ipmi_watchdog is loaded, and stops it at every power-off")
            return {"timer": countdown.arm(exchange, int(word.value or 0)), "changed": True}
        case "disarm":
            timer, changed = countdown.disarm(exchange)
            return {"timer": timer, "changed": changed}
        case _:
            return {**countdown.look(exchange)._asdict(), "kernel_driver": kernel_driver}


def checked(told: Mapping[str, object]) -> Word:
    """Return the word, if it is one. Raises RefusedError."""
    word, within_s = told.get("word"), told.get("within_s", WITHIN_S)
    if word not in WORDS or not isinstance(word, str):
        msg = f"unknown word; the words are {', '.join(WORDS)}"
        raise RefusedError(msg)
    takes = _TAKES.get(word)
    if set(told) - {"word", "within_s", takes}:
        msg = f"{word} takes {f'{takes}, ' if takes else ''}within_s and nothing else"
        raise RefusedError(msg)
    if isinstance(within_s, bool) or not isinstance(within_s, int | float) or not 0 < within_s <= WITHIN_S:
        msg = f"within_s must be a number above 0, at most {WITHIN_S:g}"
        raise RefusedError(msg)
    value = None if takes is None else told.get(takes)
    if takes == "policy" and value not in _RESTORED:
        msg = f"policy must be {' or '.join(_RESTORED)}, as an outage found it"
        raise RefusedError(msg)
    if takes == "in_s" and (type(value) is not int or not 1 <= value <= _MAX_S):
        msg = f"in_s must be a whole number of 1 to {_MAX_S}"
        raise RefusedError(msg)
    return Word(word, float(within_s), value if isinstance(value, str | int) else None)


def _refuse_under_test(path: str) -> None:
    if os.environ.get("POWERGUARD_UNDER_TEST") and path == DEVICE:
        raise BmcFailure(Failure.PRIVILEGE, "refused under test: it is this machine's own BMC; give --device")


def listen(server: int, answer: Callable[[Mapping[str, object]], Answer], idle_s: float = IDLE_S) -> int:
    """Answer each connection to a listening socket in a child, until nobody has come for idle_s."""
    import signal  # noqa: PLC0415 - a word by hand needs neither
    import socket  # noqa: PLC0415 - likewise

    from powerguard.effectors.bmc import countdown as _  # noqa: PLC0415 - once, and not in each child

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    with socket.socket(fileno=server) as listening:
        listening.setblocking(False)
        while select.select([listening], [], [], idle_s)[0]:
            try:
                connection, _ = listening.accept()
            except OSError:  # gone again
                continue
            with connection:
                try:
                    child = os.fork()
                except OSError as error:  # whoever asks hears nothing, and says so
                    tell(4, f"no process for one more word: {error.strerror}")
                    continue
                if child == 0:
                    os.dup2(connection.fileno(), 0)
                    os.dup2(connection.fileno(), 1)
                    break
        else:
            return 0
    signal.alarm(_CHILD_S)
    return serve(answer)


def _serve(answer: Callable[[Mapping[str, object]], Answer]) -> int:
    """Answer on the socket that systemd hands over; without one, the one line of standard input."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        return listen(_LISTEN_FD, answer)
    return serve(answer)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one word of the command line and return the exit status: 0 done, 1 not done, 64 usage."""
    if arguments == ["serve"]:
        return _serve(lambda told: carry_out(DEVICE, checked(told)))
    import argparse  # noqa: PLC0415 - 9 ms, and what the socket starts needs it not

    parser = argparse.ArgumentParser(prog="powerguard-ipmi", description="This host's own BMC, as root.")
    parser.add_argument("word", choices=[*WORDS, "serve"])
    parser.add_argument("--device", default=DEVICE, help="the kernel's IPMI device (%(default)s)")
    parser.add_argument("--within-s", default=WITHIN_S, type=float, help="how long the BMC may take (%(default)s)")
    parser.add_argument("--policy", help="for restore: what was there before the outage")
    parser.add_argument("--in-s", type=int, help="for arm: when the BMC cycles the power, in seconds")
    parser.add_argument("--modules", default=MODULES, help="where the kernel lists its modules (%(default)s)")
    try:
        args = parser.parse_args(arguments)
    except SystemExit as end:
        return EX_USAGE if end.code else 0
    if args.word == "serve":
        return _serve(lambda told: carry_out(args.device, checked(told), args.modules))
    given = {"policy": args.policy, "in_s": args.in_s}
    told = {"word": args.word, "within_s": args.within_s, **{key: it for key, it in given.items() if it is not None}}
    try:
        word = checked(told)
    except RefusedError as error:
        sys.stderr.write(f"powerguard-ipmi: {error}\n")
        return EX_USAGE
    answer = carry_out(args.device, word, args.modules)
    say(answer)
    return 1 if answer["failure"] else 0


def main() -> None:
    """Run, and end with its status."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
