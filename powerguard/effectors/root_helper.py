"""What the small root helpers share: a line in, a line out, and a folder that outlives whoever is killed.

systemd starts one process of a helper for each connection to its socket. It reads one JSON line, answers with one, and
ends. What it has changed stands in a file that is written before anything is touched. Only the standard library.
"""

import json
import math
import os
import select
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from powerguard.clock import boottime_s

MAX_LINE_BYTES: Final = 4096
LINE_S: Final = 2.0
"""For the line to come: whoever connects says his word at once."""

EX_USAGE: Final = 64

Answer = dict[str, Any]


class RefusedError(Exception):
    """Not a word of ours, or nothing that may be done: what was wrong, and what would be right."""


def told_object(line: bytes) -> Mapping[str, object]:
    """Return the JSON object of a line. Raises RefusedError."""
    try:
        told = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        msg = 'not a word: one JSON object on one line is expected, such as {"word": "list"}'
        raise RefusedError(msg)
    return told


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def read_line(descriptor: int, by_s: float) -> bytes | None:
    """Read one line of at most MAX_LINE_BYTES by by_s. None when nothing was said at all. Raises RefusedError."""
    line = b""
    while b"\n" not in line:
        ready, _, _ = select.select([descriptor], [], [], max(by_s - boottime_s(), 0.0))
        if not ready:
            msg = f"no whole line within {LINE_S:g} s"
            raise RefusedError(msg)
        more = os.read(descriptor, MAX_LINE_BYTES + 1 - len(line))
        if not more:
            if line:
                msg = "the line has no end"
                raise RefusedError(msg)
            return None
        line += more
        if len(line) > MAX_LINE_BYTES:
            msg = f"the line is longer than {MAX_LINE_BYTES} bytes"
            raise RefusedError(msg)
    return line.partition(b"\n")[0]


def serve(carry_out: Callable[[Mapping[str, object]], Answer]) -> int:
    """Answer the one line that comes in on standard input. carry_out may raise RefusedError."""
    try:
        line = read_line(sys.stdin.fileno(), boottime_s() + LINE_S)
        if line is None:
            return 0
        answer = carry_out(told_object(line))
    except RefusedError as error:
        answer = {"schema_version": 1, "word": "", "ok": False, "error": str(error)}
        tell(3, f"refused: {error}")
    say(answer)
    return 0


def seconds(text: str) -> float:
    """Seconds of a command line. Raises ValueError, of which argparse makes words."""
    told = float(text)
    if not (math.isfinite(told) and told >= 0):
        raise ValueError(text)
    return told


def tell(severity: int, text: str) -> None:
    """Write a line to the log (severity as in syslog(3))."""
    try:
        sys.stderr.write(f"<{severity}>{text}\n")
        sys.stderr.flush()
    except OSError:
        return  # a log that is gone must not keep anything from being put back


def say(answer: Answer) -> None:
    """Write an answer."""
    try:
        sys.stdout.write(json.dumps(answer, separators=(",", ":")) + "\n")
        sys.stdout.flush()
    except OSError:
        # Whoever asked has gone; what was asked is done all the same. Nor shall the interpreter try again at its end,
        # complain, and end with a status of its own.
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
