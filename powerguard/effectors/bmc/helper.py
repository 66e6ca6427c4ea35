"""The root helper powerguard-ipmi: a closed list of words about the host's own BMC, through /dev/ipmi0.

The device is the whole BMC without a password (it can make users and switch power), so the daemon never has it. Words:
status, ensure (always-on, and no other policy), probe (also what can be set), look (a probe that only reads). Below
them is a second lock: `device.ALLOWED`. Only the standard library, so that a word costs a start of Python and no more.
"""

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from powerguard.clock import boottime_s
from powerguard.effectors.bmc.device import DEVICE, IpmiDevice
from powerguard.effectors.bmc.exchange import BmcFailure, Exchange, Pace
from powerguard.effectors.bmc.ipmi import Failure, PowerRestorePolicy
from powerguard.effectors.root_helper import EX_USAGE, Answer, RefusedError, say, serve, tell

WORDS: Final = ("status", "ensure", "probe", "look")
WITHIN_S: Final = 5.0
"""For one word, and the most that anybody may ask for."""


def carry_out(path: str, word: str, within_s: float) -> Answer:
    """Do what is asked. `ok`: the word was one of ours; `failure`: why the BMC did not do it, null where it did."""
    answer: dict[str, Any] = {"schema_version": 1, "word": word, "ok": True, "failure": None, "text": ""}
    by_s = boottime_s() + within_s
    try:
        _refuse_under_test(path)
        with IpmiDevice(path, by_s) as device:
            exchange = Exchange(device.send, Pace(clock=boottime_s, sleep=time.sleep, by_s=by_s))
            told = _ask(exchange, word)
    except BmcFailure as failed:
        tell(4, f"{word}: {failed}")
        return answer | {"failure": failed.failure, "text": str(failed)}
    if told.get("changed"):
        tell(5, f"power restore policy set to always-on (chassis status was {told['before']})")
    return answer | told


def _ask(exchange: Exchange, word: str) -> dict[str, Any]:
    if word == "status":
        told: dict[str, Any] = {"status": exchange.status()}
    elif word == "ensure":
        told = exchange.ensure(PowerRestorePolicy.ALWAYS_ON)._asdict()
    else:
        told = exchange.probe(ask_support=word == "probe")._asdict()
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in told.items()}


def checked(told: Mapping[str, object]) -> tuple[str, float]:
    """Return the word and its seconds, if it is a word. Raises RefusedError."""
    word, within_s = told.get("word"), told.get("within_s", WITHIN_S)
    if word not in WORDS or not isinstance(word, str):
        msg = f"unknown word; the words are {', '.join(WORDS)}"
        raise RefusedError(msg)
    if set(told) - {"word", "within_s"}:
        msg = f"{word} takes within_s and nothing else"
        raise RefusedError(msg)
    if isinstance(within_s, bool) or not isinstance(within_s, int | float) or not 0 < within_s <= WITHIN_S:
        msg = f"within_s must be a number above 0, at most {WITHIN_S:g}"
        raise RefusedError(msg)
    return word, float(within_s)


def _refuse_under_test(path: str) -> None:
    if os.environ.get("POWERGUARD_UNDER_TEST") and path == DEVICE:
        raise BmcFailure(Failure.PRIVILEGE, "refused under test: it is this machine's own BMC; give --device")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one word of the command line and return the exit status: 0 done, 1 not done, 64 usage."""
    if arguments == ["serve"]:
        return serve(lambda told: carry_out(DEVICE, *checked(told)))
    import argparse  # noqa: PLC0415 - 9 ms, and what the socket starts needs it not

    parser = argparse.ArgumentParser(prog="powerguard-ipmi", description="This host's own BMC, as root.")
    parser.add_argument("word", choices=[*WORDS, "serve"])
    parser.add_argument("--device", default=DEVICE, help="the kernel's IPMI device (%(default)s)")
    parser.add_argument("--within-s", default=WITHIN_S, type=float, help="how long the BMC may take (%(default)s)")
    try:
        args = parser.parse_args(arguments)
    except SystemExit as end:
        return EX_USAGE if end.code else 0
    if args.word == "serve":
        return serve(lambda told: carry_out(args.device, *checked(told)))
    if not (math.isfinite(args.within_s) and 0 < args.within_s <= WITHIN_S):
        sys.stderr.write(f"powerguard-ipmi: --within-s must be above 0, at most {WITHIN_S:g}\n")
        return EX_USAGE
    answer = carry_out(args.device, args.word, args.within_s)
    say(answer)
    return 1 if answer["failure"] else 0


def main() -> None:
    """Run, and end with its status."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
