"""Which journal, and which outage of it: what `history` and `explain` share."""

import argparse
import sqlite3
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from powerguard.cli.last_known import JOURNAL
from powerguard.cli.render import moment
from powerguard.daemon.journal import OutageRecord, history

EX_NOINPUT: Final = 66
"""sysexits.h: the journal cannot be read."""
SHOWN: Final = 5
_ALL: Final = 1_000_000


class UnknownOutageError(Exception):
    """No outage of that name, or several: which ones there are."""


def add_journal(parser: argparse.ArgumentParser) -> None:
    """Add what says where the journal lies."""
    parser.add_argument(
        "--journal", metavar="FILE", default=None, help=f"journal to read (default: of the settings, else {JOURNAL})"
    )


def journal_of(args: argparse.Namespace) -> Path:
    """Return the journal's path: as asked for, else of the settings, else where it lies by default."""
    if args.journal is not None:
        return Path(args.journal)
    if not Path(args.config).exists():
        return Path(JOURNAL)
    from powerguard.settings.load import SettingsError, load

    try:
        return Path(load(Path(args.config)).journal.path)
    except SettingsError:
        return Path(JOURNAL)  # What an outage was like can be told with settings that are wrong today.


def find(db: sqlite3.Connection, name: str) -> OutageRecord:
    """Return the outage of that id, or the only one that begins so; `last`: the newest. Raises UnknownOutageError."""
    known = history(db, _ALL)
    if not known:
        message = "the journal knows no outage"
        raise UnknownOutageError(message)
    if name == "last":
        return known[0]
    found = [each for each in known if each.id == name] or [each for each in known if each.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    newest = "; the last ones: " + ", ".join(_shown(each) for each in known[:SHOWN])
    if found:
        message = f"{name!r} begins {len(found)} outages: {', '.join(each.id for each in found[:SHOWN])}"
        raise UnknownOutageError(message)
    near = get_close_matches(name, [*(each.id for each in known), "last"], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    message = f"no outage {name!r}{hint}{newest}"
    raise UnknownOutageError(message)


def _shown(record: OutageRecord) -> str:
    return f"{record.id} ({moment(record.started_wall)[:16]})"
