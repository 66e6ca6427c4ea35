"""What `abort`, `maintenance` and `checkpoint` share: ask, and say how it went."""

import argparse
import json
import sys
from typing import Any, Final, Protocol

from powerguard.cli.client import DownError, RefusedError, post
from powerguard.cli.render import Paint, clean, mode_note, say

EX_REFUSED: Final = 1
EX_DOWN: Final = 4


class Subparsers(Protocol):
    """What `add_subparsers` returns; argparse keeps its class private."""

    def add_parser(self, name: str, **keywords: Any) -> argparse.ArgumentParser:  # noqa: ANN401 - argparse's own
        """Add the parser of one verb."""
        ...


def ask(args: argparse.Namespace, verb: str, body: dict[str, object], done: str) -> int:
    """Ask the daemon for a change and tell the answer. done: what to say when it was taken."""
    try:
        answer = post(args, verb, body)
    except DownError as error:
        return fail(args, verb, str(error), EX_DOWN)
    except RefusedError as error:
        return fail(args, verb, f"refused: {error}", EX_REFUSED)
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        note = mode_note(answer.get("mode"), "nothing would be powered off anyway")
        print(f"{done}; phase {clean(answer.get('phase'))}{note}")
    return 0


def fail(args: argparse.Namespace, verb: str, why: str, code: int) -> int:
    """Say why not, to people on stderr and to programs as an object."""
    if args.json:
        print(json.dumps({"schema_version": 1, "object": "error", "error": why}, indent=2))
    else:
        paint = Paint(sys.stderr)
        say(f"powerguard {verb}: {paint('error', 'red')}: {clean(why)}")
    return code
