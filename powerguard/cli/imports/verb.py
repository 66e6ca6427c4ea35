"""`powerguard import nut|apcupsd`: convert an existing configuration to settings. Read-only."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any, Final

from powerguard.cli.render import Paint, clean, parse_seconds
from powerguard.cli.shared import EX_DATA, EX_NOINPUT, EX_USAGE, fail

EX_PROBLEMS: Final = 1
SCHEMA_VERSION: Final = 1
MAX_FILES: Final = 32


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Read an existing configuration and print equivalent settings, in mode dry-run, with "
        "warnings and notes on stderr. It changes nothing and never prints a secret: it names the file to "
        "keep each in. Exit 1: the settings are printed, but are not valid yet; 65: no settings can be made from the "
        "files; 66: they cannot be read."
    )
    parser.add_argument("program", choices=("nut", "apcupsd"), help="whose configuration")
    parser.add_argument(
        "paths",
        nargs="*",
        default=[],  # else argparse treats it as required
        metavar="FOLDER or FILE",
        help="default: /etc/nut or /etc/ups; /etc/apcupsd",
    )
    parser.add_argument("--checkpoint", metavar="SECONDS", help="duration of a checkpoint (60s), to compare times with")
    parser.add_argument(
        "--secrets-in", metavar="FOLDER", help="write secrets as {file: FOLDER/...}, not as credentials"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    from powerguard.cli.imports.draft import CHECKPOINT_S, Draft, ReadError
    from powerguard.options import SECRETS
    from powerguard.settings.cautions import is_roots

    checkpoint_s = CHECKPOINT_S if args.checkpoint is None else parse_seconds(args.checkpoint)
    if checkpoint_s is None or not 0 < checkpoint_s <= 86400:
        return fail(args, "import", "--checkpoint: write seconds, such as 90 or 2m", EX_USAGE)
    if args.secrets_in is not None and not args.secrets_in.startswith("/"):
        return fail(args, "import", "--secrets-in: must be an absolute path", EX_USAGE)
    if args.secrets_in is not None and is_roots(f"{args.secrets_in}/x"):
        return fail(args, "import", f"--secrets-in: only root may enter {SECRETS}: leave it out", EX_USAGE)
    if len(args.paths) > MAX_FILES:
        return fail(args, "import", f"more than {MAX_FILES} files; name the folder", EX_USAGE)
    draft = Draft(checkpoint_s, args.secrets_in)
    try:
        (_import_nut if args.program == "nut" else _import_apcupsd)([Path(path) for path in args.paths], draft)
    except ReadError as error:
        return fail(args, "import", str(error).replace("\n", "; "), EX_NOINPUT)
    if not draft.upses:
        if not args.json:
            _print_findings(args, draft, [])
        wanted = (
            "no MONITOR line, and no driver" if args.program == "nut" else "no UPSTYPE with a DEVICE that can be used"
        )
        return fail(args, "import", f"no UPS in {', '.join(draft.files)}: {wanted}", EX_DATA)
    return _print_result(args, draft)


def _import_nut(paths: list[Path], draft: Any) -> None:  # noqa: ANN401 - a Draft, whose module is imported late
    from powerguard.cli.imports import nut as import_nut

    import_nut.make(import_nut.load(import_nut.gather(paths or [import_nut.folder()]), draft), draft)


def _import_apcupsd(paths: list[Path], draft: Any) -> None:  # noqa: ANN401 - likewise
    from powerguard.cli.imports import apcupsd

    for path in apcupsd.gather(paths or [Path(apcupsd.FOLDER)]):
        apcupsd.make(apcupsd.load(path, draft), draft)
    draft.presume_feeds()


def _problems(text: str) -> list[str]:
    """Return the errors of our own loader for the settings; none if they are valid."""
    from powerguard.settings.load import SettingsError, load_text

    try:
        load_text(text, "powerguard.yaml")
    except SettingsError as error:
        return list(error.problems)
    return []


def _print_result(args: argparse.Namespace, draft: Any) -> int:  # noqa: ANN401 - likewise
    from powerguard.cli.imports.draft import as_yaml

    text = as_yaml(draft, args.program)
    problems = _problems(text)
    folder = draft.folder()
    if args.json:
        result = {
            "schema_version": SCHEMA_VERSION,
            "object": "import",
            "from": args.program,
            "files": draft.files,
            "settings": draft.settings(),
            "yaml": text,
            "problems": problems,
            "secrets": [
                {"name": one.name, "file": f"{folder}/{one.name}", "what": one.what, "found": one.found}
                for one in draft.kept
            ],
            "warnings": [
                {"name": one.name, "where": one.where, "what": one.what, "right": one.right}
                for one in draft.findings
                if not one.is_note
            ],
            "notes": [
                {"name": one.name, "where": one.where, "what": one.what} for one in draft.findings if one.is_note
            ],
        }
        print(json.dumps(result, indent=2))
        return EX_PROBLEMS if problems else 0
    print(text, end="")
    sys.stdout.flush()
    _print_findings(args, draft, problems)
    return EX_PROBLEMS if problems else 0


def _print_findings(args: argparse.Namespace, draft: Any, problems: list[str]) -> None:  # noqa: ANN401 - likewise
    paint = Paint(sys.stderr)

    def say(kind: str, colour: str, text: str) -> None:
        print(f"{paint(kind, colour)}: {clean(text)}", file=sys.stderr)

    for one in draft.findings:
        if not one.is_note:
            say("warning", "yellow", f"{one.where}: {one.what} (right: {one.right})")
    for one in draft.findings:
        if one.is_note:
            say("note", "blue", f"{one.where}: {one.what}")
    for one in draft.kept:
        path = f"{draft.folder()}/{one.name}"
        command = f"powerguard secret set {one.name}; powerguard install"
        if args.secrets_in is not None:
            command = f"systemd-ask-password | install -m 0400 -o powerguard /dev/stdin {shlex.quote(path)}"
        say("secret", "magenta", f"{one.name}: the {one.what}, now in {one.found}: {command}")
    for problem in problems:
        say("error", "red", f"these settings are not valid yet: {problem}")
