"""Checkpoints that survive a power cut, or are never taken for good: those of one job on one file system.

    <root>/step-000000001234-9f86d081/shard-00000     one rank's items, in chunks with digests
                                      MANIFEST.json   what there is, to the byte; written last
          .slot-0  .slot-1                            ready-made folders for the next ones (folders.py)
          bad-step-...                                what did not verify

The order is the promise: every rank writes its shard and flushes it, its folder and the root; when all have, one of
them writes the manifest under another name and flushes it, then the folder, renames it, and flushes the folder and the
root again. A folder without a manifest is garbage, whatever else it holds, and a name is never used twice.

No pickle: a user who can write into the folder must not be able to run code in the trainer. See
docs/reference/checkpoint-format.md.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final, Self, TypeVar

from powerguard.trainer.log import log
from powerguard.trainer.store.disk import FULL, NO_LOCKS, Disk, DiskFile, FolderLock, is_there, shared_soon
from powerguard.trainer.store.folders import (
    BAD,
    MANIFEST_ROOM,
    OLD,
    UNBORN,
    Found,
    Refused,
    RootSpace,
    SavedCheckpoint,
    Slots,
    changed_ns,
    files_in,
    folders,
    free_bytes,
    has_manifest,
    is_folder,
    look,
    newest_in,
    remove,
    roomy,
    size_of,
    unlink_linked,
)
from powerguard.trainer.store.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Layout,
    Manifest,
    ManifestError,
    Shard,
    StoreError,
    checkpoint_name,
    committed_ms,
    shard_file,
    step_of,
)
from powerguard.trainer.store.shards import (
    Progress,
    Scrubbed,
    Snapshot,
    Written,
    scrub,
    write_file,
)

__all__ = ["Found", "SavedCheckpoint", "Store", "StoreError", "newest_in"]

HERE: Final = ".here-"
"""Of a file by which the first rank is seen to share this root: gone a moment later, unless it was killed."""

LOCK: Final = ".lock"
"""Name of the file in the root that a training holds locked."""

_NEW: Final = ".new-"
_KEPT_BAD: Final = 2
_NO_TIME: Final = Event()
_NO_TIME.set()
_Result = TypeVar("_Result")


class Store:
    """The checkpoints of one job under one root.

    rank, ranks: who this is among how many; each has a Store of its own. leader: exactly one per root is; it holds the
    root's lock for as long as it lives, commits, prunes and sets aside. hosts: those of all ranks. keep: how many of
    the newest stay, at least 2, so that a rotten one does not cost the training; fewer only where an emergency would
    find no room. slots: how many ready-made folders (see folders.py); 0 for none.

    Methods raise StoreError or OSError, which say what and where. Threads: one save at a time; `prepare`, `scrub`,
    `found` and reading may run at the same time.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        job: str,
        rank: int = 0,
        ranks: int = 1,
        leader: bool = True,
        hosts: int = 1,
        keep: int = 2,
        slots: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
        disk: Disk | None = None,
    ) -> None:
        if keep < 2:
            msg = f"keep={keep}: keep at least 2 checkpoints, so that a rotten one can be passed over"
            raise StoreError(msg)
        make_root(Path(root).absolute())
        self.root = Path(root).resolve()  # a link that is turned while training runs would tear a checkpoint
        if step_of(self.root.name) is not None and has_manifest(self.root):
            msg = f"{self.root}: is one checkpoint (name the folder in which it lies: {self.root.parent})"
            raise StoreError(msg)
        self.job = job
        self.rank = rank
        self.ranks = ranks
        self.leader = leader
        self.last_write: Written | None = None
        """How the last `write_shard` of this rank went; None before it."""
        self.set_aside_count = 0
        """How many checkpoints this store has set aside since it was opened."""
        self._keep = keep
        self._chunk_bytes = chunk_bytes
        self._disk = disk or Disk()
        self._sharers = -(-ranks // hosts)
        self._slots = Slots(self.root, self._disk, slots, sharers=self._sharers)
        self._room = RootSpace(self.root, keep, slots)
        self._hosts = hosts
        self._held: FolderLock | None = None
        self._is_writing = False
        self._dead: set[str] = set()
        self._written: dict[str, int] = {}
        """Digests of what this process has committed, with their order."""
        self._read: set[str] = set()
        self._manifest_bytes = MANIFEST_ROOM
        self._lock: FolderLock | None = None
        self._root_stat = self.root.stat()
        self._left: list[str] = []
        """What an earlier run has left here besides checkpoints, as it was found at the start."""
        if leader:
            self._lock = locked(self.root)
            self._tidy()

    def close(self) -> None:
        """Let go of the root; of what is still being written here not before that has ended."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if not self._is_writing:
            self.let_go()

    def _check_place(self) -> None:
        """Raise StoreError if the root's path leads to another folder by now. Only the leader looks.

        A disk that was mounted or unmounted meanwhile: a checkpoint would lie where the next start does not look, and
        retention would remove what an earlier run has left there. Where the file of the lock was removed, it is locked
        again, unless another training has done so meanwhile: StoreError.
        """
        if self._lock is None or self._lock.is_at(self.root / LOCK):
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self.root.stat(), self._root_stat):
                with contextlib.suppress(OSError):  # a full disk has a slot for the save, and no room for the file
                    self._lock = locked(self.root)
                return
        msg = (
            f"{self.root}: is no longer the folder in which training began: it was moved or removed, or a disk was"
            " mounted or unmounted there (undo that, or start the training again: until then it saves no checkpoint)"
        )
        raise StoreError(msg)

    def _tidy(self) -> None:
        """Put in order what a kill or a cut has left: no rank has begun to save yet.

        But a rank of an earlier run may not have ended yet: what it writes is given back once it lets go.
        """
        try:
            self._left = [path.name for path in self._slots.free()]
            self._slots.tidy({shard_file(rank) for rank in range(self.ranks)})
            for path in files_in(self.root):
                if path.name.startswith(HERE):
                    self._disk.unlink(path)
            for path in folders(self.root):
                if not has_manifest(path):
                    self._left.append(path.name)
                    # A ready-made folder has room for a manifest until there is one: a kill cut the save off.
                    level = logging.INFO if is_there(path / UNBORN) else logging.WARNING
                    text = "%s: has no manifest, so it is not a checkpoint: an interrupted save, or a deleted manifest"
                    log.log(level, text, path)
                    if not self._slots.give_back(path, unborn=True):
                        self._dead.add(path.name)
        except OSError as error:
            log.warning("%s: what an earlier run has left stays for now: %s", self.root, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- Saving -----------------------------------------------------------------------------------------------------

    def prepare(self, size_bytes: int, *, rate: float | None = None, stop: Event | None = None) -> bool:
        """Have the slots ready for this rank's shard of this size, and a little more. Cheap where they are.

        Early and in idle time: it writes the slots once, at most `rate` bytes a second (None: at full speed), until
        `stop` is set. False: stopped, or a save took a slot meanwhile; call again. Where there is room for one slot, or
        for one when fewer checkpoints are kept, there is one. Raises StoreError afterwards, when the disk has no room
        for all checkpoints and slots.
        """
        self.leave_room(size_bytes, stop or Event())
        manifest_bytes = self._manifest_bytes if self.leader else 0
        is_done = self._slots.prepare(self.rank, size_bytes, manifest_bytes, rate=rate, stop=stop)
        if is_done and self.leader:  # one reports it for all
            short = self._room.shortage(roomy(size_bytes) * self._sharers, self.slots_ready(size_bytes))
            if short:
                raise StoreError(short)
        return is_done

    def leave_room(self, size_bytes: int, stop: Event = _NO_TIME) -> None:
        """Keep fewer old checkpoints, where the next emergency would find neither a slot nor the room for one.

        The newest good one stays, whatever comes. stop: as `prune` has it; without it nothing is read.
        """
        for keep in range(self._keep, 0, -1):
            if not self.leader or not self._room.slots or self._slots.could_take(self.rank, size_bytes):
                return
            self.prune(stop, keep=keep)

    def slots_ready(self, size_bytes: int) -> int:
        """How many slots could take this rank's shard of this size right now."""
        return self._slots.ready(self.rank, size_bytes)

    def name(self, step: int, token: str) -> str:
        """Name a new checkpoint. token: 8 random hex digits that all ranks agree on: no name is used twice."""
        return checkpoint_name(step, token)

    def write_shard(
        self,
        name: str,
        rank: int,
        snapshot: Snapshot,
        layout: Layout,
        progress: Progress | None = None,
        *,
        urgent: bool = False,
        cancel: Event | None = None,
    ) -> Shard:
        """Write one rank's shard; durable, data and name, when this returns. See `last_write` for how it went.

        No rank gives the folder back before this rank has let go of it: `commit`, `let_go` or `abandon`. urgent: may
        take the last slot. Raises CancelledError once `cancel` is set; after any error call `abandon`.
        """
        self._check_place()
        self._is_writing = True
        try:
            with self._room.explaining_full_disk(layout.size_bytes * self._sharers):
                folder = self._folder(name, layout.size_bytes, urgent=urgent)
                self._hold(folder)
                written = self._write(folder / shard_file(rank), snapshot, layout, progress, cancel)
                self._hold(folder)  # an empty folder may have been replaced by another rank's slot
                self._disk.sync_folder(folder)
                self._disk.sync_folder(self.root)
        finally:
            self._is_writing = False
        self.last_write = written
        return Shard(
            rank=rank,
            size_bytes=layout.size_bytes,
            chunk_bytes=self._chunk_bytes,
            digests=tuple(written.digests),
            items=layout.items,
        )

    def _write(
        self, path: Path, snapshot: Snapshot, layout: Layout, progress: Progress | None, cancel: Event | None
    ) -> Written:
        unlink_linked(self._disk, path)
        content, is_new = snapshot.buffer[: layout.size_bytes], not is_there(path)
        write = partial(
            write_file,
            self._disk,
            path,
            content,
            chunk_bytes=self._chunk_bytes,
            room_bytes=self._slots.room_bytes(layout.size_bytes),
            arrived=snapshot.wait_arrived,
            progress=progress,
            cancel=cancel,
        )
        try:
            return self._twice(path, write)
        except OSError as error:
            if is_new and error.errno in FULL:  # what was reserved of it would keep the disk full, for everybody
                with contextlib.suppress(OSError):
                    self._disk.unlink(path)
            raise

    def commit(self, name: str, manifest: Manifest) -> SavedCheckpoint:
        """Make it a checkpoint, once every rank's shard is durable. Only the leader; durable when this returns."""
        folder = self.root / name
        manifest.check()
        sizes = {shard.rank: size_of(folder / shard.file, least=shard.size_bytes) for shard in manifest.shards}
        here = [shard for shard in manifest.shards if sizes[shard.rank] >= shard.size_bytes]
        is_whole = len(here) == len(manifest.shards) or manifest.hosts > 1
        is_ours = self.leader and any(shard.rank == self.rank for shard in here)
        if step_of(name) != manifest.step or not is_whole or not is_ours:
            msg = (
                f"{folder}: a manifest of step {manifest.step} and {len(manifest.shards)} shards, {len(here)} of them "
                f"here, is not what this leader may commit"
            )
            raise StoreError(msg)
        content = manifest.to_json()
        if len(content) > MAX_MANIFEST_BYTES:
            msg = f"{folder}: its manifest has over {MAX_MANIFEST_BYTES} bytes: {len(content)} (save larger items)"
            raise StoreError(msg)
        try:
            Manifest.parse(content)
        except ManifestError as error:
            msg = f"{folder}: could not be read again: its manifest {error}"
            raise StoreError(msg) from error
        with self._room.explaining_full_disk(manifest.size_bytes):
            self._twice(folder / UNBORN, lambda: self._write_manifest(folder / UNBORN, content))
        self._disk.sync_folder(folder)
        self._disk.rename(folder / UNBORN, folder / MANIFEST)
        self._disk.sync_folder(folder)
        self._disk.sync_folder(self.root)
        self.let_go()
        self._manifest_bytes = len(content) + MANIFEST_ROOM
        self._written[manifest.digest] = len(self._written)
        return SavedCheckpoint(
            step=manifest.step, path=str(folder), size_bytes=manifest.size_bytes, manifest_digest=manifest.digest
        )

    def keep_as(self, saved: SavedCheckpoint, name: str) -> Path:
        """Keep a checkpoint under `<root>/<name>`, in place of the one that was kept there before; return its folder.

        Only the leader. By hard links, so it takes no time, and no room until the original is pruned. The folder is
        one of checkpoints like the root. A kill leaves the earlier one, both, or the new one. Raises StoreError and
        OSError.
        """
        original, root = Path(saved.path), self.root / name
        kept, unfinished = root / original.name, root / f"{_NEW}{original.name}"
        if not is_there(kept):
            root.mkdir(exist_ok=True)
            for left in root.glob(f"{_NEW}*"):
                remove(self._disk, left)
            self._disk.make_folder(unfinished)
            for file in files_in(original):
                self._link(file, unfinished / file.name)
            if not is_there(unfinished / MANIFEST):
                msg = f"{original}: is gone or set aside by now, so it is not kept as {name}; what was kept there stays"
                raise StoreError(msg)
            self._disk.sync_folder(unfinished)
            self._disk.rename(unfinished, kept)
            self._disk.sync_folder(root)
            self._disk.sync_folder(self.root)
        for older in folders(root):
            if older != kept:
                if is_there(older / MANIFEST):
                    self._disk.unlink(older / MANIFEST)  # first: what is half removed must not look whole
                remove(self._disk, older)
        return kept

    def _link(self, file: Path, name: Path) -> None:
        try:
            self._disk.link(file, name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            msg = f"{file}: cannot be kept: its file system has no hard links ({error.strerror}; use a local disk)"
            raise StoreError(msg) from error

    def abandon(self, name: str) -> None:
        """Give up a checkpoint that was begun and not committed: every rank does, and the last one gives it back.

        Only the leader where other hosts may share the root: they do not see who holds a folder here.
        """
        is_mine = self._held is not None and self._held.is_held and self._held.is_at(self.root / name)
        self.let_go()
        if self.leader:
            self._dead.add(name)
        if self.leader or (is_mine and self._hosts == 1):
            self._slots.give_back(self.root / name, unborn=True)

    def let_go(self) -> None:
        """Be done with the checkpoint that this rank has written last."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _hold(self, folder: Path) -> None:
        """Keep everybody from giving back what this rank writes, a leader of the next run among them."""
        if self._held is None or not self._held.is_at(folder):
            self.let_go()
            try:
                self._held = shared_soon(folder)
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, "was given up by another rank just now", str(folder)) from error

    def _folder(self, name: str, size_bytes: int, *, urgent: bool) -> Path:
        """The folder of a checkpoint that is being written: a slot's under its new name, or a new one.

        The last slot is for who is in a hurry, and for a disk that has no room for a new one: then the slot comes back
        with the next pruning, or when this save is given up. Where nothing could be pruned it is for emergencies alone.
        """
        if step_of(name) is None:
            msg = f"{name!r} is not a valid name for a checkpoint"
            raise StoreError(msg)
        folder = self.root / name
        if is_there(folder / MANIFEST):
            msg = f"{folder}: is committed already, and a name is never used twice"
            raise StoreError(msg)
        is_tight = free_bytes(self.root) < roomy(size_bytes) * self._sharers
        if urgent:
            self.leave_room(size_bytes)
        comes_back = any(has_manifest(path) for path in folders(self.root))
        if not self._slots.take(folder, leave=0 if urgent or (is_tight and comes_back) else 1):
            if is_tight and not urgent and self._slots.free() and not is_folder(folder):
                msg = "No space left on device outside of the emergency slot"
                raise OSError(errno.ENOSPC, msg, str(self.root))
            with contextlib.suppress(FileExistsError):
                self._disk.make_folder(folder)
        return folder

    def _twice(self, path: Path, write: Callable[[], _Result]) -> _Result:
        """Write a file, and once more into other blocks if one of its own is bad.

        The bad ones stay under another name, so that they are never loaded again.
        """
        try:
            return write()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._disk.rename(path, path.with_name(f"{BAD}{path.name}"))
            return write()

    def _write_manifest(self, path: Path, content: bytes) -> None:
        """Write it over what is there, filled up with line ends: it then needs no block that it does not have."""
        unlink_linked(self._disk, path)
        with DiskFile(self._disk, path, direct=False) as file:
            size = max(file.size_bytes, -(-len(content) // MANIFEST_ROOM) * MANIFEST_ROOM)
            file.write(memoryview(content + b"\n" * (size - len(content))), 0)
            file.sync()

    # --- Finding and reading ----------------------------------------------------------------------------------------

    def found(self) -> list[Found]:
        """The checkpoints whose manifest and sizes hold, newest first; of one step, the last written first."""
        return [found for found in look(self.root, self.rank) if isinstance(found, Found)]

    def _by_commit(self) -> list[Found]:
        """Return them in the order of a resume, committed last first: training stands on that, whatever its step."""

        def when(found: Found) -> tuple[int, int]:
            return self._written.get(found.digest, -1), committed_ms(found.manifest.created)

        return sorted(self.found(), key=when, reverse=True)

    def refused(self) -> list[Refused]:
        """The folders that look like checkpoints and are none, and why. Rotten ones are for `set_aside`."""
        return [found for found in look(self.root, self.rank) if isinstance(found, Refused)]

    def warn_of_none(self) -> None:
        """Say what lies here where training begins at step 0: an earlier run's leftovers, without a checkpoint."""
        found = [path for path in files_in(self.root) if is_folder(path)]
        left = self._left + [path.name for path in found if path.name.startswith((BAD, OLD)) or _holds_some(path)]
        if self.leader and left:
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            log.warning(
                "%s: training begins at step 0; an earlier run has left %s here, but no checkpoint. If there should be"
                " one, stop now: was it deleted, or does it lie in a folder within, or on a disk that is not mounted?",
                self.root,
                shown,
            )

    def leave_behind(self, above: int) -> None:
        """Set aside every checkpoint of a step above this one: training goes on from an earlier step, or from none.

        The next commits would prune them. Nothing is deleted: each stays as `old-NAME`. Only the leader.
        """
        for each in self.found() if self.leader else []:
            if each.step > above:
                new = self.root / f"{OLD}{each.name}"
                number = 1
                while is_folder(new):
                    number += 1
                    new = self.root / f"{OLD}{number}-{each.name}"
                log.warning("%s: kept as %s: training goes on from step %d", each.path, new.name, max(above, 0))
                self._disk.rename(self.root / each.name, new)
        if self.leader:
            self._disk.sync_folder(self.root)

    def trust(self, found: Found) -> None:
        """Note that every shard of a checkpoint that lies here was just read whole and verified, by whatever way."""
        self._read.add(found.digest)

    def set_aside(self, found: Found | Refused, reason: str) -> None:
        """Take a checkpoint that does not verify out of the way, for good: `bad-<name>`. Only the leader; counted."""
        log.error("%s: set aside as %s%s: %s", self.root, BAD, found.name, reason)
        self.set_aside_count += 1
        if isinstance(found, Found):
            self._written.pop(found.digest, None)
            self._read.discard(found.digest)
        old, new = self.root / found.name, self.root / f"{BAD}{found.name}"
        if self.leader and is_folder(old):
            if is_folder(new):
                remove(self._disk, new)  # the same one, put back by hand and rotten again
            self._disk.rename(old, new)
            self._disk.sync_folder(self.root)

    # --- Housekeeping -----------------------------------------------------------------------------------------------

    def prune(self, stop: Event | None = None, *, keep: int | None = None) -> list[str]:
        """Let go of what is older than the newest `keep` that are good, and of what was never committed.

        Only the leader, and while it saves nothing itself. Good: written or read whole by this process; what is not
        known to be is read now, before anything older goes, and set aside if it is rotten. What was given up is never
        good, and goes first where room is needed. stop: leave that reading, and everything where it is. keep: another
        number, because room is needed. Returns the names of what went; what is being read stays until the next time.
        """
        if not self.leader:
            return []
        self._check_place()
        good = 0
        old: list[str] = []
        dead: list[str] = []
        found = self._by_commit()
        for number, each in enumerate(found):
            if good >= (self._keep if keep is None else keep):
                old.append(each.name)
            elif each.name in self._dead:
                dead.append(each.name)  # committed here and given up: other hosts may not have it
            elif each.digest in self._written or each.digest in self._read or number + 1 == len(found):
                good += 1  # of the last one it does not matter: nothing is older
            else:
                good += self._is_good(each, stop)
        if keep is not None and good:  # room is needed
            old += dead
        removed = [name for name in old if self._went(self.root / name, self._slots.give_back)]
        # Another without a manifest may be on its way, of the newest step too: another rank is sometimes first.
        newest = max((each.step for each in found), default=-1)
        for path in folders(self.root):
            is_dead = path.name in self._dead or (step_of(path.name) or 0) < newest
            if is_dead and not has_manifest(path) and self._went(path, self._given_back):
                removed.append(path.name)
        bad = [path for path in files_in(self.root) if path.name.startswith(BAD) and is_folder(path)]
        rest = sorted(bad, key=changed_ns, reverse=True)[_KEPT_BAD:]
        return removed + [path.name for path in rest if self._went(path, self._removed)]

    def _went(self, path: Path, remove_it: Callable[[Path], bool]) -> bool:
        """Remove one of several; what cannot be removed must neither keep the others nor cost a new checkpoint."""
        try:
            return remove_it(path)
        except OSError as error:
            log.warning("%s: cannot be removed, and takes room: %s", path, error)
            return False

    def _given_back(self, path: Path) -> bool:
        return self._slots.give_back(path, unborn=True)

    def _removed(self, path: Path) -> bool:
        remove(self._disk, path)
        return True

    def scrub(self, *, rate: float | None = None, stop: Event | None = None) -> Scrubbed | None:
        """Read the newest checkpoint that this process has not read yet, else the newest, and verify it.

        Past the page cache, in idle time, and only the shards that lie here. rate: bytes a second at most; None: at
        full speed. One that does not verify is set aside and reported. None: there is none, or it was pruned meanwhile.
        """
        self._check_place()
        found = self._by_commit()
        unread = [each for each in found if each.digest not in self._read]
        return self._scrubbed((unread or found)[0], rate, stop) if found else None

    def _is_good(self, found: Found, stop: Event | None) -> bool:
        try:
            scrubbed = self._scrubbed(found, None, stop)
        except OSError as error:
            log.warning("%s: cannot be read just now: %s", found.path, error)
            return False
        return scrubbed is not None and scrubbed.whole

    def _scrubbed(self, found: Found, rate: float | None, stop: Event | None) -> Scrubbed | None:
        try:
            scrubbed = scrub(Path(found.path), found.manifest, rate=rate, stop=stop)
        except FileNotFoundError:
            return None
        if scrubbed.corrupt is not None:
            self.set_aside(found, str(scrubbed.corrupt))
        elif scrubbed.whole:
            self.trust(found)
        return scrubbed


def _holds_some(folder: Path) -> bool:
    """Whether checkpoints lie in a folder: `rsync -a BACKUP ROOT` without a slash at the end puts all into one."""
    with contextlib.suppress(OSError):
        return any(map(has_manifest, folders(folder)))
    return False


def make_root(root: Path) -> None:
    """Make the folder for checkpoints where it is not there, with a warning: a disk may not be mounted."""
    try:
        root.mkdir(parents=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and root.is_dir():
            return
        why = "is not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        right = "name a folder on a disk, or one to be made"
        if root.is_symlink():
            why, right = f"is a link to {root.readlink()}, which is not there", "mount its disk, or correct the link"
        msg = f"{root}: cannot be made, for checkpoints: {why} ({right})"
        raise StoreError(msg) from error
    else:
        log.warning(
            "%s: was not there and was made, on the file system mounted at %s: if checkpoints should lie there, stop"
            " now and mount their disk (must_exist=True refuses to begin so)",
            root,
            mount_of(root),
        )


def mount_of(path: Path) -> Path:
    """Return where the file system that a path lies on is mounted."""
    path = path.resolve()
    return next(each for each in (path, *path.parents) if each.is_mount())


def locked(root: Path, name: str = LOCK) -> FolderLock:
    """Hold the root's lock. It goes with the process, however that ends."""
    try:
        lock = FolderLock(root / name, create=True)
    except BlockingIOError as error:
        msg = (
            f"{root}: another process writes checkpoints here, or a Guard of this one that is not closed"
            " (end that one, or close() that Guard; each training needs a folder of its own)"
        )
        raise StoreError(msg) from error
    except PermissionError as error:
        msg = (
            f"{root}: this user may not write checkpoints here: {error.strerror}: {error.filename}"
            " (give each user a folder of its own, or change the owner of this one and of what lies in it)"
        )
        raise StoreError(msg) from error
    if not lock.is_held:
        log.warning("%s: %s", root, NO_LOCKS)
    return lock
