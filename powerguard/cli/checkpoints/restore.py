"""`powerguard checkpoints restore`: roll selected items or files back, verified while they are read.

Native: it writes a new checkpoint with the selected items of the old one and all others of the newest. No file is
overwritten, so training that resumes finds the new one or, after an undo, the earlier one. Files of a sealed folder go
into a new folder.
"""

import argparse
import contextlib
import json
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from powerguard.cli.checkpoints.found import (
    NEWER,
    PATIENCE_S,
    Entry,
    Patient,
    PlaceError,
    access_of,
    by_commit,
    entries_at,
    tier_at,
)
from powerguard.cli.render import Bar, agreed, amount, clean
from powerguard.cli.shared import fail
from powerguard.trainer.loop.checkpointer import commit_time
from powerguard.trainer.seal.folder import Progress, seal
from powerguard.trainer.seal.manifest import SEAL, Seal, SealedFile, SealError, read_seal
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.folders import BAD, Found, SavedCheckpoint
from powerguard.trainer.store.items import Buffer, Loaded
from powerguard.trainer.store.manifest import Manifest, Packed, StoreError, checkpoint_name, committed_ms, step_of
from powerguard.trainer.store.memory import available_bytes
from powerguard.trainer.store.shards import Snapshot, digest_of, held, read_shard
from powerguard.trainer.store.store import Store
from powerguard.trainer.tiers.base import SET_ASIDE, TierError
from powerguard.trainer.tiers.base import read_shard as read_stored
from powerguard.trainer.tiers.transfer import Gate


def _committed(found: Found) -> int:
    return committed_ms(found.manifest.created)


def _by_commit(store: Store) -> list[Found]:
    """A store's checkpoints, committed last first: a resume takes them in this order."""
    return sorted(store.found(), key=lambda each: (_committed(each), each.step), reverse=True)


def _newer(found: Found, at_ms: int, others: Sequence[Found]) -> list[Found]:
    """Return what a roll-back to this one, committed at at_ms, sets aside: of its step or above, or committed later.

    A resume takes what was committed last, which after an earlier roll-back may be of a lower step.
    """
    return [each for each in others if each.step >= found.step or _committed(each) >= at_ms]


class FilesError(Exception):
    """The restore failed: why, and the fix."""


def restore(source: Path, target: Path, only: Sequence[str], *, progress: Progress | None = None) -> list[str]:
    """Copy the chosen files of a sealed folder into a new one, verified, and seal that; return their names.

    Without `only` links and empty folders are copied, too. With it the new seal has no step: training cannot go on from
    a part. target: a new folder, or one that is empty: it is so again after a failure. Raises FilesError, SealError,
    OSError.
    """
    sealed = read_seal(source)
    if sealed is None:
        msg = f"{source}: not sealed"
        raise FilesError(msg)
    chosen = [file for file in sealed.files if not only or any(fnmatchcase(file.path, glob) for glob in only)]
    if not chosen:
        known = [file.path for file in sealed.files]
        more = f" and {len(known) - 8} more" if len(known) > 8 else ""
        msg = f"{source}: no file {', '.join(only)}; it has {', '.join(known[:8])}{more}"
        raise FilesError(msg)
    existed = target.exists()
    try:
        _Copy(source, sealed, progress).run(target, {file.path: file for file in chosen})
        if not only:
            for folder in sealed.folders:
                (target / folder).mkdir(parents=True, exist_ok=True)
            for path, to in sealed.links:
                (target / path).symlink_to(to)
        seal(target, step=sealed.step, part=bool(only))
    except BaseException:
        for left in list(target.iterdir()) if existed else [target]:
            shutil.rmtree(left, ignore_errors=True)
            with contextlib.suppress(OSError):  # it was no folder, but a file or a link
                left.unlink()
        raise
    return [file.path for file in chosen]


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copies files out of a sealed folder, each chunk compared before it is written."""

    source: Path
    sealed: Seal
    progress: Progress | None

    def run(self, target: Path, places: Mapping[str, SealedFile]) -> None:
        """Copy each file to its place in a folder that is made; all of it is flushed when this returns."""
        total, done = sum(file.size_bytes for file in places.values()), 0
        folders = {target}
        for place, file in places.items():
            path = target / place
            path.parent.mkdir(parents=True, exist_ok=True)
            folders.add(path.parent)
            done = self._file(file, path, done, total)
        for folder in folders:
            Disk().sync_folder(folder)

    def _file(self, file: SealedFile, path: Path, done: int, total: int) -> int:
        disk = Disk()
        reading = os.open(self.source / file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            writing = disk.open(path, create=True)
            try:
                for offset in range(0, file.size_bytes, self.sealed.chunk_bytes):
                    content = memoryview(self._chunk(reading, file, offset))
                    written = 0
                    while written < len(content):
                        written += disk.write(writing, content[written:], offset + written)
                    done += len(content)
                    if self.progress is not None:
                        self.progress(done, total)
                disk.sync(writing)
            finally:
                disk.close(writing)
        finally:
            os.close(reading)
        return done

    def _chunk(self, descriptor: int, file: SealedFile, offset: int) -> bytes:
        number, size = offset // self.sealed.chunk_bytes, min(self.sealed.chunk_bytes, file.size_bytes - offset)
        content = b""
        while len(content) < size and (piece := os.pread(descriptor, size - len(content), offset + len(content))):
            content += piece
        if len(content) != size or digest_of(memoryview(content)) != file.digest(number):
            msg = f"{self.source / file.path}: changed since it was sealed, at chunk {number}, offset {offset}"
            raise SealError(msg)
        return content


_VERB: Final = "checkpoints restore"
_REASON: Final = "restored from "
_MOST_NAMES: Final = 4


class RestoreError(Exception):
    """The restore failed without a change: why, and the fix."""


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        with _unheard("powerguard.trainer"):
            result = _undo(Path(args.undo)) if args.undo else _restore(args)
    except (RestoreError, PlaceError, StoreError, SealError, TierError, FilesError) as error:
        return fail(args, _VERB, str(error), 1)
    except OSError as error:
        where = error.filename or args.undo or args.into or args.to
        return fail(args, _VERB, f"{where}: {error.strerror or error}", 1)
    if args.json:
        print(json.dumps({"schema_version": 1, "object": "checkpoints_restore", **result}, indent=2))
    else:
        names = result["restored"] if isinstance(result["restored"], list) else []
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        what = f"{', '.join(names[:_MOST_NAMES])}{more} restored from {result['from']}" if result["from"] else "undone"
        print(f"{clean(result['path'])}: {clean(what)}{clean(result['note'])}")
    return 0


@contextmanager
def _unheard(name: str) -> Iterator[None]:
    """Keep the library's log off stderr: the verb reports the result itself."""
    handler = logging.NullHandler()
    logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(name).removeHandler(handler)


def _restore(args: argparse.Namespace) -> dict[str, object]:
    if args.place is None:
        msg = "name the checkpoint to restore from"
        raise RestoreError(msg)
    entry = source_of(args.place, args.step, **access_of(args))
    if args.into is not None and "://" in args.into:
        return _mark_newer(entry, args)
    target = Path(str(args.to or args.into)).absolute()
    if args.to is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        msg = f"{target}: already exists (name a new folder, or use --into)"
        raise RestoreError(msg)
    if args.into is not None:
        if entry.kind == "sealed":
            msg = f"{entry.path}: files of a sealed folder go into a new folder (--to DIR)"
            raise RestoreError(msg)
        if not target.is_dir():
            msg = f"{target}: no such folder (--to makes a new one)"
            raise RestoreError(msg)
        _ask(entry, str(target), args)
    with Bar("restoring", quiet=args.json) as bar:
        if entry.kind == "sealed":
            names = restore(Path(entry.path), target, args.only, progress=bar)
            return {"from": entry.path, "path": str(target), "restored": names, "note": ""}
        if entry.found is None:
            msg = f"{entry.path}: {entry.because}"
            raise RestoreError(msg)
        return Native(entry.found, target, args.only, is_new=args.to is not None, **access_of(args)).restore(bar)


def source_of(place: str, step: int | None, **access: str | None) -> Entry:
    """Return the selected checkpoint: the place itself, or of a place the one of this step, or the newest."""
    url, _, name = place.rstrip("/").rpartition("/")
    is_stored = "://" in place and step_of(name) is not None
    entries = [each for each in entries_at(url if is_stored else place, **access) if each.is_whole]
    if is_stored:
        entries = [each for each in entries if each.name == name]
    if step is not None:
        entries = [each for each in entries if each.step == step]
    if not entries:
        which = "" if step is None else f" of step {step}"
        msg = f"{place}: no checkpoint{which} there that is complete (`powerguard checkpoints list {place}`)"
        raise RestoreError(msg)
    jobs = sorted({each.job for each in entries if each.job is not None})
    if len(jobs) > 1:
        msg = f"{place}: has checkpoints of several jobs: {', '.join(jobs)} (name the folder of one)"
        raise RestoreError(msg)
    return max(entries, key=by_commit)


def _ask(entry: Entry, target: str, args: argparse.Namespace) -> None:
    """Ask, if stdin is a terminal. Raises RestoreError unless the answer is yes."""
    if args.yes:
        return
    if sys.stdin.isatty() and not args.json:
        what = ", ".join(args.only) or "everything"
        if agreed(f"restore {what} from {entry.path} into {target}?"):
            return
    msg = "cancelled: no change was made (add --yes to do it)"
    raise RestoreError(msg)


def _mark_newer(entry: Entry, args: argparse.Namespace) -> dict[str, object]:
    """Roll an object store back to a checkpoint that it has: mark newer ones, so that no resume uses them."""
    tier = tier_at(args.into, **access_of(args))
    stored = tier.found(most=None)
    if args.only or entry.found is None or entry.found.digest not in {each.digest for each in stored}:
        msg = f"{args.into}: an object store can only be rolled back as a whole, to a checkpoint that it has"
        raise RestoreError(msg)
    _ask(entry, args.into, args)
    others = [each for each in stored if each.digest != entry.found.digest]
    newer = _newer(entry.found, _committed(entry.found), others)
    for each in newer:
        tier.set_aside(each, f"rolled back to {entry.name}")
    note = f"; {len(newer)} newer checkpoints are marked there (to undo, remove their {SET_ASIDE})"
    return {"from": entry.path, "path": args.into, "restored": [], "note": note}


# --- Native checkpoints -----------------------------------------------------------------------------------------------


class Native:
    """Restores items of one native checkpoint, into a new root or into an existing one.

    Needs memory for a shard three times over: the old one, the newest one, and what they make together.
    """

    def __init__(self, found: Found, target: Path, only: list[str], *, is_new: bool, **access: str | None) -> None:
        self._found = found
        self._target = target
        self._only = only
        self._is_new = is_new
        self._access = access

    def restore(self, bar: Bar) -> dict[str, object]:
        """Write and commit; return what was done. Raises RestoreError and what reading and writing raise."""
        found = self._found
        with Store(self._target, job=found.manifest.job, ranks=found.manifest.ranks, slots=0) as store:
            if self._is_new:
                return self._made(store, found, bar)
            base = next(iter(_by_commit(store)), None)
            if base is not None and base.manifest.job != found.manifest.job:
                msg = f"{base.path}: of job {base.manifest.job!r}, {found.name} of {found.manifest.job!r}"
                raise RestoreError(msg)
            if self._only and base is not None and base.digest != found.digest:
                self._check_alike(base)
                saved, names = self._write(store, base, base, bar)
                return self._result(saved.path, names, f" into a new checkpoint of step {base.step}")
            if self._only:
                msg = f"{self._target}: its newest checkpoint is the selected one (select an older one with --step N)"
                raise RestoreError(msg)
            return self._roll_back(store, bar)

    def _made(self, store: Store, found: Found, bar: Bar) -> dict[str, object]:
        """Fill a new folder; a failure removes it again."""
        try:
            saved, names = self._write(store, found, None, bar)
        except BaseException:
            shutil.rmtree(self._target, ignore_errors=True)
            raise
        return self._result(saved.path, names, "")

    def _roll_back(self, store: Store, bar: Bar) -> dict[str, object]:
        """Make this checkpoint the newest of the root: newer ones are set aside, and can be brought back."""
        found, path = self._found, self._found.path
        names: list[str] = []
        same = next((each for each in store.found() if each.digest == found.digest), None)
        if same is not None:
            path = same.path
        else:
            saved, names = self._write(store, found, None, bar)
            path = saved.path
        at_ms = next((_committed(each) for each in store.found() if each.path == path), 0)
        others = [each for each in store.found() if each.path != path]
        newer = _newer(found, at_ms, others)
        for each in newer:
            Path(each.path).rename(store.root / f"{NEWER}{each.name}")
        Disk().sync_folder(store.root)
        note = f"; {len(newer)} newer ones are set aside there (use --into on other copies, too)"
        return self._result(path, names or list(self._names()), note)

    def _result(self, path: str, names: list[str], note: str) -> dict[str, object]:
        return {"from": self._found.path, "path": path, "restored": names, "note": note}

    def _check_alike(self, base: Found) -> None:
        mine, theirs = self._found.manifest, base.manifest
        if mine.ranks != theirs.ranks or theirs.hosts != 1:
            msg = (
                f"{base.path}: of {theirs.ranks} ranks on {theirs.hosts} hosts, {self._found.name} of {mine.ranks}; "
                "items go in place only between the same ranks on one host (--to a new folder)"
            )
            raise RestoreError(msg)
        for rank in range(mine.ranks):
            old, new = self._found.shard(rank), base.shard(rank)
            shapes = {item.name: (item.dtype, item.shape) for item in new.items}
            for item in old.items:
                now = shapes.get(item.name, (item.dtype, item.shape))
                if self._is_chosen(item.name) and item.dtype != "json" and now != (item.dtype, item.shape):
                    msg = f"{item.name}: {item.dtype} {list(item.shape)} then, {now[0]} {list(now[1])} now"
                    raise RestoreError(msg)

    def _is_chosen(self, name: str) -> bool:
        return not self._only or any(fnmatchcase(name, glob) for glob in self._only)

    def _write(self, store: Store, model: Found, base: Found | None, bar: Bar) -> tuple[SavedCheckpoint, list[str]]:
        """Write a checkpoint of the model's step: the chosen items of the old one, all others of the base.

        What is read here is held: into a new root one may restore while the training prunes its own.
        """
        with contextlib.ExitStack() as stack:
            for path in {each.path for each in (self._found, base) if each is not None and "://" not in each.path}:
                stack.enter_context(held(Path(path)))
            return self._write_held(store, model, base, bar)

    def _write_held(
        self, store: Store, model: Found, base: Found | None, bar: Bar
    ) -> tuple[SavedCheckpoint, list[str]]:
        known = self._names()
        chosen = [name for name in known if self._is_chosen(name)]
        if not chosen:
            more = f" and {len(known) - 8} more" if len(known) > 8 else ""
            msg = f"{self._found.path}: no item {', '.join(self._only)}; it has {', '.join(known[:8])}{more}"
            raise RestoreError(msg)
        self._check_memory(base)
        name = checkpoint_name(model.step, secrets.token_hex(4))
        shards: list[Packed] = []
        try:
            for rank in range(self._found.manifest.ranks):
                bar.renamed(f"rank {rank}")
                old = self._read(self._found, rank)
                items = dict(self._read(base, rank)) if base is not None else {}
                items.update({key: item for key, item in old.items() if self._is_chosen(key)})
                with Snapshot() as snapshot:
                    layout = snapshot.take(Buffer(i.name, i.data, i.dtype, i.shape) for i in items.values())
                    shards.append(store.write_shard(name, rank, snapshot, layout, progress=bar).packed())
            what = "" if not self._only else f": {', '.join(self._only)}"
            manifest = Manifest(
                job=model.manifest.job,
                step=model.step,
                created=commit_time(max((_committed(each) for each in store.found()), default=0)),
                reason=f"{_REASON}{self._found.name}{what}"[:512],
                ranks=model.manifest.ranks,
                hosts=1,
                shards=tuple(shards),
            )
            return store.commit(name, manifest), chosen
        except BaseException:
            store.abandon(name)
            raise

    def _names(self) -> list[str]:
        ranks = range(self._found.manifest.ranks)
        return sorted({item.name for rank in ranks for item in self._found.shard(rank).items})

    def _check_memory(self, base: Found | None) -> None:
        """Check that the memory is enough: a host that swaps heavily cannot restore."""
        largest = max(shard.size_bytes for shard in self._found.manifest.shards)
        if base is not None:
            largest = max(largest, *(shard.size_bytes for shard in base.manifest.shards))
        free = available_bytes()
        if free is not None and 3 * largest > free:
            msg = f"needs {amount(3 * largest)} of memory, but {amount(free)} are available (use --to on another host)"
            raise RestoreError(msg)

    def _read(self, found: Found, rank: int) -> Mapping[str, Loaded]:
        if "://" in found.path:
            tier, gate = tier_at(found.path.rpartition("/")[0], **self._access), Gate(patience_s=PATIENCE_S)
            return read_stored(lambda found, shard: Patient(tier, found, shard, gate), found, rank)
        return read_shard(Path(found.path), found.shard(rank))


# --- Undoing ----------------------------------------------------------------------------------------------------------


def _undo(target: Path) -> dict[str, object]:
    target = target.absolute()
    result: dict[str, object] = {"from": "", "path": str(target), "restored": [], "note": ""}
    if not target.is_dir() or (target / SEAL).exists():
        msg = f"{target}: has no restore to undo"
        raise RestoreError(msg)
    with Store(target, job="", slots=0) as store:
        made = next((found for found in _by_commit(store) if found.manifest.reason.startswith(_REASON)), None)
        newer = sorted(path for path in target.iterdir() if path.name.startswith(NEWER))
        back = [path.rename(target / path.name.removeprefix(NEWER)) for path in newer]
        Disk().sync_folder(target)
        notes = [f"{len(back)} checkpoints are back"] if back else []
        last_ms = next((_committed(each) for each in _by_commit(store) if Path(each.path) in back), 0)
        if made is not None and _committed(made) > last_ms:  # else an earlier restore, from which training went on
            store.set_aside(made, "its restore was undone")
            notes.append(f"{made.name} is set aside as {BAD}{made.name}")
        if not notes:
            msg = f"{target}: has no restore to undo"
            raise RestoreError(msg)
        newest = next(iter(_by_commit(store)), None)
        notes.append("no checkpoint is left" if newest is None else f"a resume takes {newest.name}")
        return {**result, "note": f": {'; '.join(notes)}"}
