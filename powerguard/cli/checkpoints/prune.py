"""`powerguard checkpoints prune`: remove old checkpoints, and never the last one that verifies.

No checkpoint is removed before every byte of the ones to keep has been read. Newest means committed last: training that
was rolled back has smaller steps than the checkpoints that it left behind.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from powerguard.cli.checkpoints.found import (
    PATIENCE_S,
    Entry,
    PlaceError,
    access_of,
    by_commit,
    entries_at,
    now_s,
    tier_at,
    verified,
)
from powerguard.cli.render import Bar, agreed, amount, clean, duration, table
from powerguard.cli.shared import fail
from powerguard.trainer.seal.manifest import SEAL, series_of
from powerguard.trainer.store.disk import Disk, FolderLock
from powerguard.trainer.store.folders import remove
from powerguard.trainer.store.manifest import MANIFEST, StoreError
from powerguard.trainer.store.store import LOCK
from powerguard.trainer.tiers.base import TierError
from powerguard.trainer.tiers.transfer import Gate

_VERB: Final = "checkpoints prune"
_STALE_S: Final = 86400.0
"""An unfinished checkpoint is removed when it is a day older than a newer complete one; it may still be in use."""


class RefusedError(Exception):
    """The removal is refused: why, and the fix."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoints to keep, which were verified, and those to remove."""

    kept: list[Entry]
    going: list[Entry]


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        with Bar("", quiet=args.json) as bar:
            places = dict.fromkeys(each if "://" in each else str(Path(each).resolve()) for each in args.place)
            choices = [each for place in places for each in _choices(place, args, bar)]
        going = [entry for choice in choices for entry in choice.going]
        if not args.json:
            _print_choices(choices)
        if going and not args.yes and (args.json or not _confirmed(len(going))):
            return fail(args, _VERB, "no checkpoint was removed (add --yes to remove them)", 1)
        removed, left = _remove(choices, args)
    except (PlaceError, RefusedError, TierError, StoreError, OSError) as error:
        return fail(args, _VERB, _message(error), 1)
    if args.json:
        print(json.dumps(_object(choices, removed, left), indent=2))
    elif going:
        print(f"removed {len(removed)} of {len(going)}")
        for entry, because in left:
            print(f"  {clean(entry.path)}: {clean(because)}")
    return int(bool(left))


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _choices(place: str, args: argparse.Namespace, bar: Bar) -> Iterator[Choice]:
    """Choose for each group of checkpoints that can stand in for one another."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries_at(place, **access_of(args)):
        root, _, name = entry.path.rpartition("/")
        groups.setdefault((root, "" if entry.kind == "native" else series_of(name)), []).append(entry)
    if not groups:
        msg = f"{place}: no checkpoint there"
        raise RefusedError(msg)
    for (root, _), entries in groups.items():
        yield chosen(root, entries, args.keep, bar, set_aside=args.set_aside, **access_of(args))


def chosen(
    root: str, entries: list[Entry], keep: int, bar: Bar, *, set_aside: bool = False, **access: str | None
) -> Choice:
    """Choose the checkpoints of one root to keep and to remove. Raises RefusedError when none verifies."""
    whole = sorted((e for e in entries if e.is_whole), key=by_commit, reverse=True)
    # One without a step stands in for no other: a part that was restored, or a model that is done.
    whole = [e for e in whole if e.step is not None]
    kept: list[Entry] = []
    old: list[Entry] = []
    for entry in whole:
        if len(kept) == keep:
            old.append(entry)
        elif (read := verified(entry, bar, **access)).state == "verified":
            kept.append(read)
    rest = [e for e in entries if e.state == "unfinished" or (set_aside and e.state == "set_aside")]
    if not kept and (old or rest):
        msg = f"{root}: no checkpoint there verifies, so none is removed (`powerguard checkpoints verify {root}`)"
        raise RefusedError(msg)
    newest_s = max((e.created_s or 0.0 for e in kept), default=0.0)
    stale_s = min(newest_s, now_s()) - _STALE_S  # commits stay ahead of a clock that was ahead once
    old += [e for e in rest if e.state == "set_aside" or (e.created_s is not None and e.created_s < stale_s)]
    return Choice(kept, old)


def _print_choices(choices: list[Choice]) -> None:
    now = now_s()
    for word, entries in (
        ("keep, verified just now", [entry for choice in choices for entry in choice.kept]),
        ("goes", [entry for choice in choices for entry in choice.going]),
    ):
        if entries:
            print(f"{word}:")
            rows = [
                (
                    "?" if each.step is None else f"step {each.step}",
                    "?" if each.created_s is None else duration(max(0.0, now - each.created_s)),
                    amount(each.size_bytes),
                    each.state.replace("_", " ") if word == "goes" and not each.is_whole else "",
                    clean(each.path),
                )
                for each in entries
            ]
            print("\n".join(table(rows)))
    if not any(choice.going for choice in choices):
        print("no checkpoint to remove")


def _confirmed(count: int) -> bool:
    """Ask, if stdin is a terminal."""
    return sys.stdin.isatty() and agreed(f"remove {count} for good?")


# --- Removing ---------------------------------------------------------------------------------------------------------


def _remove(choices: list[Choice], args: argparse.Namespace) -> tuple[list[Entry], list[tuple[Entry, str]]]:
    """Remove the chosen checkpoints; return the removed ones, and those left with the reason. Raises RefusedError."""
    removed: list[Entry] = []
    left: list[tuple[Entry, str]] = []
    roots: dict[str, list[Entry]] = {}
    for entry in (each for choice in choices for each in choice.going):
        roots.setdefault(entry.path.rpartition("/")[0], []).append(entry)
    with contextlib.ExitStack() as stack:
        for root in (each for each in roots if "://" not in each):
            stack.enter_context(_alone(Path(root)))  # of all roots, before one is changed
        _check_kept([each for choice in choices if choice.going for each in choice.kept], args)
        for root, entries in roots.items():
            remove_it = _remover(root, args)
            for entry in entries:
                because = remove_it(entry)
                if because:
                    left.append((entry, because))
                else:
                    removed.append(entry)
    return removed, left


def _check_kept(kept: list[Entry], args: argparse.Namespace) -> None:
    """Raise RefusedError if one that was to stay does no longer count: reading all and asking may take long."""
    roots = {entry.path.rpartition("/")[0] for entry in kept}
    whole = {entry.path for root in roots for entry in entries_at(root, **access_of(args)) if entry.is_whole}
    for entry in kept:
        if entry.path not in whole:
            msg = f"{entry.path}: was to stay, but is gone or set aside by now, so none is removed (run it again)"
            raise RefusedError(msg)


def _remover(root: str, args: argparse.Namespace) -> Callable[[Entry], str]:
    """Return what removes one checkpoint of this root, and returns "", or why it could not."""
    if "://" not in root:
        return lambda entry: remove_one(Path(entry.path))
    tier, gate = tier_at(root, **access_of(args)), Gate(patience_s=PATIENCE_S)

    def attempt(call: Callable[[], object]) -> str:
        try:
            gate.call(call)
        except TierError as error:
            return str(error)
        return ""

    trouble = attempt(tier.remove_stale)
    # Each on its own: one that cannot be removed must not keep the others.
    return lambda entry: trouble or attempt(lambda: tier.remove(entry.name))


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the root's locks: training that writes there prunes by itself. Raises RefusedError."""
    with contextlib.ExitStack() as stack:
        for path in (*root.glob(LOCK), *root.glob(f"{LOCK}-*")):  # those with a word are of DCP and of Transformers
            try:
                stack.enter_context(FolderLock(path, create=True))
            except BlockingIOError as error:
                msg = f"{root}: training writes checkpoints there and prunes them itself (keep=)"
                raise RefusedError(msg) from error
        yield


def remove_one(path: Path) -> str:
    """Remove a checkpoint; return "" if it is removed, else why not.

    Its manifest or seal is removed first, durably: a half-removed checkpoint must not look complete.
    """
    disk = Disk()
    try:
        with FolderLock(path):
            for name in (MANIFEST, SEAL):
                with contextlib.suppress(FileNotFoundError):
                    disk.unlink(path / name)
            disk.sync_folder(path)
            remove(disk, path)
            disk.sync_folder(path.parent)
    except BlockingIOError:
        return "another process is reading it (an upload?): try again later"
    except FileNotFoundError:  # another process has removed it
        return ""
    except OSError as error:  # must not keep the others
        return _message(error)
    return ""


def _object(choices: list[Choice], removed: list[Entry], left: list[tuple[Entry, str]]) -> dict[str, object]:
    now = now_s()
    return {
        "schema_version": 1,
        "object": "checkpoints_prune",
        "kept": [entry.as_json(now) for choice in choices for entry in choice.kept],
        "removed": [entry.as_json(now) for entry in removed],
        "left": [{"path": entry.path, "because": because} for entry, because in left],
    }
