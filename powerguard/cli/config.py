"""`powerguard config validate|show|schema`: check the settings, show those in force, print the schema."""

import argparse
import json
import os
from pathlib import Path
from typing import Any, Final

from powerguard.cli.render import fold, say
from powerguard.cli.shared import CONFIG, EX_CONFIG

SCHEMA_VERSION: Final = 1
"""Of the JSON objects that this verb prints."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = "Check or show the settings, or print their schema."
    verbs = parser.add_subparsers(dest="config_verb", metavar="VERB", required=True)

    validate = verbs.add_parser(
        "validate",
        help="report every mistake with line and column",
        description="Check the settings and report every mistake with file, line and column. Exit 0: valid; 78: not.",
    )
    validate.add_argument("file", nargs="?", metavar="FILE", help="file to check (default: the one in force)")
    _add_common(validate)

    show = verbs.add_parser(
        "show",
        help="print the settings in force, defaults included",
        description="Print the settings in force, defaults included. A secret is shown as the place where it is kept.",
    )
    show.add_argument("file", nargs="?", metavar="FILE", help="file to show (default: the one in force)")
    show.add_argument("--origin", action="store_true", help="one line for each value, with its file and line")
    _add_common(show)

    schema = verbs.add_parser(
        "schema", help="print the JSON Schema", description="Print the JSON Schema of the settings, for editors."
    )
    schema.add_argument("--json", action="store_true", help="the same: the schema is JSON")


def _add_common(parser: argparse.ArgumentParser) -> None:
    # SUPPRESS: a --config before the verb is not overwritten by this one's default.
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=f"settings ({CONFIG})")
    parser.add_argument("--conf-d", metavar="DIR", help="additions (default: conf.d next to the file)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb and return the exit code."""
    match args.config_verb:
        case "validate":
            return _validate(args)
        case "show":
            return _show(args)
        case _:
            return _schema()


def _path(args: argparse.Namespace) -> Path:
    given = getattr(args, "file", None) or getattr(args, "config", None) or os.environ.get("POWERGUARD_CONFIG")
    return Path(given or CONFIG)


def _conf_d(args: argparse.Namespace) -> Path | None:
    return None if args.conf_d is None else Path(args.conf_d)


def _print_json(name: str, value: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, "object": name, **value}, indent=2, ensure_ascii=False))


def _fail(args: argparse.Namespace, problems: tuple[str, ...]) -> int:
    if args.json:
        bad = {"valid": False, "file": str(_path(args)), "problems": list(problems), "warnings": []}
        _print_json(f"config_{args.config_verb}", bad)
    else:
        for problem in problems:
            say(f"error: {problem}")
    return EX_CONFIG


def _is_a_sentinels(data: dict[str, Any]) -> bool:
    """Return whether a file has the hosts of a sentinel: every key of it would be a mistake here."""
    hosts = data.get("hosts")
    return isinstance(hosts, dict) and any(isinstance(host, dict) and "feeds" in host for host in hosts.values())


def _validate(args: argparse.Namespace) -> int:
    from dataclasses import replace
    from datetime import UTC, datetime

    from powerguard.settings.cautions import missing, warnings
    from powerguard.settings.explain import Mistake
    from powerguard.settings.load import SettingsError, check

    try:
        checked = check(_path(args), _conf_d(args))
    except SettingsError as error:
        return _fail(args, error.problems)
    if _is_a_sentinels(checked.files.data):
        command = f"powerguard sentinel --config {_path(args)} --check"
        return _fail(args, (f"{_path(args)}: these are the settings of a sentinel, not of a host ({command})",))
    settings, mistakes = checked.settings, checked.mistakes
    doubts: list[Mistake] = []
    if settings is not None:
        absent, doubts = missing(settings)
        mistakes = [*mistakes, *(replace(one, path=checked.original(one.path)) for one in absent)]
    problems = checked.problems(mistakes)
    if problems or settings is None:
        return _fail(args, tuple(problems))
    today = datetime.now(UTC).date()
    texts = [f"{checked.files.where(one.path)}: {one}" for one in [*warnings(settings, today=today), *doubts]]
    if args.json:
        _print_json("config_validate", {"valid": True, "file": str(_path(args)), "problems": [], "warnings": texts})
        return 0
    for warning in texts:
        say(f"warning: {warning}")
    fed_by = " and ".join(settings.feeding)
    line = f"{_path(args)}: valid; mode {settings.mode}, fed by {fed_by}, {_count(len(settings.trainers))}"
    print("\n".join(fold([line])))
    return 0


def _count(trainers: int) -> str:
    return "1 trainer" if trainers == 1 else f"{trainers} trainers"


def _show(args: argparse.Namespace) -> int:
    from powerguard.settings.load import SettingsError, load_with_origins
    from powerguard.settings.show import as_json, as_yaml, origins

    try:
        loaded = load_with_origins(_path(args), _conf_d(args))
    except SettingsError as error:
        return _fail(args, error.problems)
    rows = origins(loaded.settings, loaded.files)
    if args.json:
        shown: dict[str, Any] = {"settings": as_json(loaded.settings)}
        if args.origin:
            shown["origins"] = {key: origin for key, _, origin in rows}
        _print_json("config_show", shown)
    elif args.origin:
        lines = [
            (f"{key}: {json.dumps(value, ensure_ascii=False)}", origin or "default") for key, value, origin in rows
        ]
        width = min(72, max(len(line) for line, _ in lines))
        for line, origin in lines:
            print(f"{line:<{width}}  # {origin}")
    else:
        print(as_yaml(loaded.settings), end="")
    return 0


def _schema() -> int:
    from powerguard.settings.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
