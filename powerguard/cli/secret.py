"""`powerguard secret`: store a secret where systemd gives it to the daemon, and list those of the settings."""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from getpass import getpass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from powerguard.cli.client import UNIT_FOLDERS
from powerguard.cli.install.pieces import CREDENTIALS, DAEMON
from powerguard.cli.render import clean, table
from powerguard.cli.shared import EX_REFUSED, EX_USAGE, fail, print_answer
from powerguard.durable import replace_file
from powerguard.options import CREDENTIAL_NAME, MAX_SECRET_BYTES, SECRETS
from powerguard.settings.cautions import secrets_in
from powerguard.settings.explain import dotted
from powerguard.settings.load import SettingsError, load
from powerguard.settings.schema import Settings

_PASSES: Final = re.compile(r"^(?:Load|Set)Credential(?:Encrypted)?=([^:\s]+)", re.MULTILINE)


HANDED: Final = "/run/credentials/powerguard.service"
"""Where systemd keeps the credentials of the running daemon; root can read it."""


class Named(NamedTuple):
    """One credential that the settings name. used_by: where.

    passed_by: a unit file that gives it to the daemon, other than the one that install writes; "" for none.
    """

    name: str
    used_by: tuple[str, ...]
    stands: Literal["set", "missing", "passed"]
    passed_by: str = ""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "The settings never contain a secret: {credential: NAME} names one. Its file is in "
        f"{SECRETS}, readable by root only, and systemd gives it to the daemon. Exit 0: done, none is missing; "
        "1: refused, or one is missing."
    )
    verbs = parser.add_subparsers(dest="what", metavar="set|list", required=True)
    put = verbs.add_parser(
        "set",
        help="ask for a secret, or read it from stdin",
        description="Ask for a secret without showing it, or read it from stdin, and store it.",
    )
    put.add_argument("name", type=_name, metavar="NAME", help="as in {credential: NAME}")
    listed = verbs.add_parser(
        "list",
        help="list the secrets of the settings, and which are missing",
        description="List the secrets of the settings, their use, and which are missing. Shows no secret.",
    )
    for each in (put, listed):
        each.add_argument("--root", metavar="DIR", default="/", help="root of an image, instead of this system")
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _name(text: str) -> str:
    if not re.fullmatch(CREDENTIAL_NAME, text):
        msg = f"{text!r} is not the name of a secret: use letters, digits, dots and dashes (example: snmp-auth)"
        raise argparse.ArgumentTypeError(msg)
    return text


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    root = Path(args.root).resolve()
    if root == Path("/") and os.environ.get("POWERGUARD_UNDER_TEST"):
        return fail(
            args, "secret", "refused under test: it would read this machine's secrets; give --root DIR", EX_REFUSED
        )
    if root == Path("/") and os.geteuid() != 0:
        return fail(args, "secret", f"only root may open {SECRETS}: run this as root", EX_REFUSED)
    try:
        config = Path(args.config) if root == Path("/") else root / args.config.lstrip("/")
        known = named(root, load(config))
    except SettingsError as error:
        if args.what == "list":
            return fail(args, "secret", "; ".join(error.problems), EX_REFUSED)
        known = None
    return _set(args, root, known) if known is None or args.what == "set" else _list(args, root, known)


def _set(args: argparse.Namespace, root: Path, known: list[Named] | None) -> int:
    try:
        secret = asked_for(args.name) if sys.stdin.isatty() else sys.stdin.buffer.read(MAX_SECRET_BYTES + 1)
        path = put(root, args.name, secret)
    except ValueError as error:
        return fail(args, "secret", f"{args.name}: {error}", EX_USAGE)
    except OSError as error:
        return fail(args, "secret", f"{error.filename or SECRETS}: {error.strerror}", EX_REFUSED)
    then = _next(root, args.name, known)
    result = {"schema_version": 1, "object": "secret", "path": str(path), "next": then}
    print_answer(args, result, lambda: [f"{path}: written, readable by root only", *(f"next: {line}" for line in then)])
    return 0


def asked_for(name: str) -> bytes:
    """Ask for a secret twice, without showing it. Raises ValueError if the two differ, or at Ctrl-D."""
    try:
        first, again = getpass(f"{name} (not shown): "), getpass(f"{name} again: ")
    except EOFError:
        msg = "no answer: the secret was not written"
        raise ValueError(msg) from None
    if first != again:
        msg = "the two are different: the secret was not written"
        raise ValueError(msg)
    return first.encode()


def put(root: Path, name: str, secret: bytes) -> Path:
    """Store a secret, completely; return its path. Raises ValueError for an invalid one, OSError."""
    if len(secret) > MAX_SECRET_BYTES:
        msg = f"larger than {MAX_SECRET_BYTES} bytes, so it is not a password or token"
        raise ValueError(msg)
    if not secret.strip(b"\r\n"):
        msg = "empty: the secret was not written"
        raise ValueError(msg)
    folder = root / SECRETS[1:]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(folder / name, secret, mode=0o400)
    return folder / name


def set_command(root: Path, name: str) -> str:
    """Return the command that sets a secret of this system, or of an image."""
    return f"powerguard secret set {name}{_option(root)}"


def _option(root: Path) -> str:
    return "" if root == Path("/") else f" --root {shlex.quote(str(root))}"


def _next(root: Path, name: str, known: list[Named] | None) -> list[str]:
    if known is not None and name not in {each.name for each in known}:
        return [f"write {{credential: {name}}} into the settings: they do not use it yet"]
    unit = passed(root).get(name)
    if unit is None:
        return [f"powerguard install{_option(root)}, to give it to the daemon"]
    if unit != CREDENTIALS and f"LoadCredential={name}:{SECRETS}/{name}" not in dict(_unit_files(root))[unit]:
        return [f"{unit} gives the daemon another secret of this name: change that one, or remove it and install again"]
    return [f"systemctl restart {DAEMON}, unless power is out: the running daemon has the old one"]


def _state_text(one: Named) -> str:
    return f"passed by {one.passed_by}" if one.passed_by else one.stands


def _list(args: argparse.Namespace, root: Path, known: list[Named]) -> int:
    if args.json:
        secrets = [each._asdict() for each in known]
        print(json.dumps({"schema_version": 1, "object": "secrets", "secrets": secrets}, indent=2))
    elif known:
        rows = [(clean(one.name), clean(_state_text(one)), clean(", ".join(one.used_by))) for one in known]
        print("\n".join(table(rows, indent="")))
    else:
        print("the settings name no credential")
    missing = [each.name for each in known if each.stands == "missing"]
    if missing and not args.json:
        print(*(f"next: {clean(set_command(root, name))}" for name in missing), sep="\n")
    return EX_REFUSED if missing else 0


def named(root: Path, settings: Settings) -> list[Named]:
    """Return the credentials of the settings, with their states."""
    uses: dict[str, list[str]] = {}
    for path, secret in secrets_in(settings):
        if secret.credential is not None:
            uses.setdefault(secret.credential, []).append(dotted(path))
    elsewhere = {name: where for name, where in passed(root).items() if where != CREDENTIALS}
    return [_named(root, name, tuple(paths), elsewhere.get(name, "")) for name, paths in uses.items()]


def _named(root: Path, name: str, used_by: tuple[str, ...], passed_by: str) -> Named:
    stands: Literal["set", "missing"] = "set" if _has_secret(root / SECRETS[1:] / name) else "missing"
    return Named(name, used_by, "passed" if passed_by else stands, passed_by)


def is_set(name: str) -> bool:
    """Return whether the file of a credential on this host has a secret. Only root can read it: others get False."""
    return _has_secret(Path(SECRETS, name))


def _has_secret(path: Path) -> bool:
    """As `Secret.read`: a file with newlines only is empty."""
    return bool(_bytes(path).strip(b"\r\n"))


def not_handed(settings: Settings) -> list[str]:
    """Return the credentials that are set on this host, but that the running daemon started without."""
    if not Path(HANDED).is_dir():
        return []
    return [
        each.name
        for each in named(Path("/"), settings)
        if each.stands == "set" and _bytes(Path(SECRETS, each.name)) != _bytes(Path(HANDED, each.name))
    ]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def passed(root: Path) -> dict[str, str]:
    """Return the credentials that unit files give to the daemon, each with its file: the site's own before ours."""
    files = sorted(_unit_files(root), key=lambda each: each[0] != CREDENTIALS)
    return {name: path for path, text in files for name in _PASSES.findall(text)}


def _unit_files(root: Path) -> Iterator[tuple[str, str]]:
    for folder in UNIT_FOLDERS:
        for pattern in (DAEMON, f"{DAEMON}.d/*.conf"):
            for path in sorted((root / folder / "systemd/system").glob(pattern)):
                yield f"/{path.relative_to(root)}", path.read_text(encoding="utf-8", errors="replace")
