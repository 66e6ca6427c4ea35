"""Exit codes, default paths and error output of all verbs. Stdlib only."""

import argparse
import json
import sys
from typing import Any, Final, Protocol

from powerguard.cli.render import Paint, clean, say

EX_REFUSED: Final = 1
"""The request is refused, or did not succeed."""
EX_NOTHING: Final = 1
"""No result was found."""
EX_DOWN: Final = 4
"""The daemon does not answer."""
EX_USAGE: Final = 64
"""sysexits.h: wrong options."""
EX_DATA: Final = 65
"""sysexits.h: the file has invalid content."""
EX_NOINPUT: Final = 66
"""sysexits.h: the file cannot be read."""
EX_CANTCREAT: Final = 73
"""sysexits.h: the file cannot be written."""
EX_IOERR: Final = 74
"""sysexits.h: the output could not be written."""
EX_CONFIG: Final = 78
"""sysexits.h: the settings are wrong."""
SOCKET: Final = "/run/powerguard/powerguard.sock"
CONFIG: Final = "/etc/powerguard/powerguard.yaml"


class UntoldError(KeyError):
    """The daemon's answer lacks this key."""


class Subparsers(Protocol):
    """What `add_subparsers` returns; argparse keeps its class private."""

    def add_parser(self, name: str, **keywords: Any) -> argparse.ArgumentParser:  # noqa: ANN401 - argparse's own
        """Add the parser of one verb."""
        ...


def fail(args: argparse.Namespace, verb: str, why: str, code: int) -> int:
    """Report an error, as text on stderr and with --json as an object."""
    if args.json:
        print(json.dumps({"schema_version": 1, "object": "error", "error": why}, indent=2))
    else:
        paint = Paint(sys.stderr)
        say(f"powerguard {verb}: {paint('error', 'red')}: {clean(why)}")
    return code
