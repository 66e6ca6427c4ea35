"""Exit codes, default paths and error output of all verbs. Stdlib only."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from powerguard.cli.render import Paint, clean, say

if TYPE_CHECKING:
    from powerguard.ups.snmp.options import SnmpOptions

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
EX_INTERRUPTED: Final = 130
"""Ctrl-C ended it, as a shell reports it."""
SOCKET: Final = "/run/powerguard/powerguard.sock"
CONFIG: Final = "/etc/powerguard/powerguard.yaml"


class MissingKeyError(KeyError):
    """The daemon's answer lacks this key."""


def print_answer(args: argparse.Namespace, answer: Mapping[str, Any], lines: Callable[[], Iterable[str]]) -> None:
    """Print an answer: with --json the object, else the lines."""
    print(json.dumps(answer, indent=2) if args.json else "\n".join(lines()))


def fail(args: argparse.Namespace, verb: str, why: str, code: int) -> int:
    """Report an error, as text on stderr and with --json as an object."""
    if args.json:
        print(json.dumps({"schema_version": 1, "object": "error", "error": why}, indent=2))
    else:
        paint = Paint(sys.stderr)
        say(f"powerguard {verb}: {paint('error', 'red')}: {clean(why)}")
    return code


def whole(least: int = 0, most: int = 10**15 - 1, *, example: int) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 18 and least <= int(text) <= most):
            msg = f"must be a whole number, {least} to {most}, got {text!r:.40} (example: {example})"
            raise argparse.ArgumentTypeError(msg)
        return int(text)

    return read


def port(example: int, *, least: int = 1) -> Callable[[str], int]:
    """Return the type of an option that takes the number of a port. least: 0: any free one may be chosen."""
    return whole(least, 65535, example=example)


def add_snmp_secrets(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a verb reads SNMP cards; `snmp_secrets` returns what they say."""
    parser.add_argument("--community-file", metavar="FILE", help="SNMP community of v1 and v2c (public)")
    parser.add_argument("--user", help="user of SNMP v3")
    parser.add_argument("--auth-file", metavar="FILE", help="its authentication passphrase")
    parser.add_argument("--auth-protocol", help="MD5, SHA (default), SHA-224, SHA-256, SHA-384, SHA-512")
    parser.add_argument("--priv-file", metavar="FILE", help="its privacy passphrase")
    parser.add_argument("--priv-protocol", help="DES, AES (default), AES-192, AES-256")


def snmp_secrets(args: argparse.Namespace) -> dict[str, Any]:
    """Return the files and protocols that were given, as the settings of a source have them."""
    from pathlib import Path

    found: dict[str, Any] = {}
    for key in ("community", "auth", "priv"):
        if (file := getattr(args, f"{key}_file")) is not None:
            found[key] = {"file": str(Path(file).absolute())}
    for key in ("auth_protocol", "priv_protocol"):
        if (protocol := getattr(args, key)) is not None:
            found[key] = protocol
    return found


def snmp_options(given: Mapping[str, Any]) -> "SnmpOptions":
    """Return the settings of a source. Raises ValueError, whose text is for the operator."""
    from pydantic import ValidationError

    from powerguard.settings.explain import Explainer
    from powerguard.ups.snmp.options import SnmpOptions

    try:
        return SnmpOptions.model_validate({"kind": "snmp", **given})
    except ValidationError as error:
        explainer = Explainer(SnmpOptions.model_json_schema())
        msg = "; ".join(str(explainer.explain(each, given)) for each in error.errors(include_url=False))
        raise ValueError(msg) from None
