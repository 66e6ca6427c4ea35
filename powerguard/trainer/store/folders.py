"""The folders under a root: checkpoints that hold, by names, manifests and sizes alone; and slots held ready for one.

    <root>/.slot-0/shard-00000          as long as a shard and a little more; every block written once
                   MANIFEST.json.tmp    likewise
          .room-...                     an empty file whose name is longer than a checkpoint's

A save takes a slot by renaming its folder, and then only writes over blocks that it has. A checkpoint that is pruned
becomes a slot again, once its manifest is durably gone. So a full disk is asked for nothing: no inode, no block of
data, of a manifest or of a folder (`.room-` gives way where even the root's folder is full), no new extent. A full disk
cannot lose an emergency checkpoint. `RootSpace` says what a root takes, and what would be right where there is less.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Final

from powerguard.trainer.store.disk import FULL, Disk, DiskFile, FolderLock, is_gone, is_there, shares_blocks
from powerguard.trainer.store.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestError,
    Shard,
    StoreError,
    VersionError,
    digest_of,
    shard_file,
    step_of,
)
from powerguard.trainer.store.shards import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """One durable checkpoint. size_bytes: all shards, on all hosts.

    manifest_digest: "sha256:<hex>" of the manifest, and so of everything in it.
    """

    step: int
    path: str
    size_bytes: int
    manifest_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint whose manifest and sizes hold; the data is verified while it is read. tier: where it lies."""

    step: int
    name: str
    path: str
    manifest: Manifest
    digest: str
    tier: str = "local"

    def shard(self, rank: int) -> Shard:
        """The description of one rank's shard. Raises ManifestError if it does not hold together."""
        try:
            return self.manifest.shard(rank)
        except ManifestError as error:
            msg = f"{self.path}/{MANIFEST}: {error}"
            raise ManifestError(msg) from error

    def saved(self) -> SavedCheckpoint:
        """The same, in short."""
        return SavedCheckpoint(
            step=self.step, path=self.path, size_bytes=self.manifest.size_bytes, manifest_digest=self.digest
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """A folder that looks like a checkpoint and is none. rotten: it will be none tomorrow either."""

    name: str
    reason: str
    rotten: bool


def newest_in(root: Path, *, since_ns: int = 0) -> SavedCheckpoint | None:
    """The newest checkpoint under root whose manifest and sizes hold, and that was committed after `since_ns`.

    since_ns: wall time, as the file system stamps it. Reads no data and takes no lock: any process may ask.
    Raises OSError when root cannot be read.
    """
    for found in look(root):
        if isinstance(found, Found):
            with contextlib.suppress(OSError):
                if Path(found.path, MANIFEST).stat().st_mtime_ns >= since_ns:
                    return found.saved()
    return None


def look(root: Path, rank: int | None = None, *, among: Sequence[Path] | None = None) -> Iterator[Found | Refused]:
    """Look at every folder under root that has the name and the manifest of a checkpoint, highest step first.

    rank: whose shard must be here where several hosts have roots of their own; None: that of any rank. among: these
    folders only, in this order. Raises OSError when root cannot be read.
    """
    for folder in folders(root) if among is None else among:
        try:
            yield _looked_at(folder, rank)
        except OSError as error:
            if not is_gone(error):  # else no manifest, or pruned while we looked
                yield Refused(folder.name, f"{folder}: {error}", rotten=False)
        except StoreError as error:
            # Pruned between its manifest and its shards: the manifest is what goes first, and no name comes twice.
            if is_there(folder / MANIFEST):
                yield Refused(folder.name, str(error), rotten=not isinstance(error.__cause__, VersionError))
    for link in files_in(root) if among is None else ():
        if step_of(link.name) is not None and link.is_symlink():
            yield Refused(
                link.name, f"{link}: is a link, and not followed (move the checkpoint itself here)", rotten=False
            )


def _looked_at(folder: Path, rank: int | None) -> Found:
    descriptor = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        content = b""
        while len(content) <= MAX_MANIFEST_BYTES and (piece := file.read(MAX_MANIFEST_BYTES + 1 - len(content))):
            content += piece
    try:
        manifest = Manifest.parse(content)
    except ManifestError as error:
        msg = f"{folder / MANIFEST}: {error}"
        raise StoreError(msg) from error
    if step_of(folder.name) != manifest.step:
        msg = f"{folder / MANIFEST}: is of step {manifest.step}, which is not the folder's"
        raise StoreError(msg)
    present = 0
    for shard in manifest.shards:
        try:
            size = (folder / shard.file).stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            if manifest.hosts == 1 or shard.rank == rank:
                msg = f"{folder / shard.file}: is missing"
                raise StoreError(msg) from None
            continue
        present += 1
        if size < shard.size_bytes:
            size = size_of(folder / shard.file, least=shard.size_bytes)
        if size < shard.size_bytes:
            msg = f"{folder / shard.file}: has {size} bytes, not {shard.size_bytes}"
            raise StoreError(msg)
    if not present:
        msg = f"{folder}: none of its shards is here"
        raise StoreError(msg)
    return Found(step=manifest.step, name=folder.name, path=str(folder), manifest=manifest, digest=digest_of(content))


def folders(root: Path) -> Sequence[Path]:
    """All folders under root with the name of a checkpoint, highest step first; of one step, the last written first."""
    found: list[tuple[int, int, Path]] = []
    with os.scandir(root) as entries:
        for entry in entries:
            step = step_of(entry.name)
            if step is not None and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    found.append((step, entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    return [path for _, _, path in sorted(found, reverse=True)]


def has_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest, or may have one: it is another user's, and closed to this one."""
    try:
        return is_there(folder / MANIFEST)
    except PermissionError:
        return True


BAD: Final = "bad-"
OLD: Final = "old-"
"""What the name of a checkpoint begins with that did not verify, or before whose step training has gone back."""
_OURS: Final = ("step-*", ".slot-*", f"{BAD}*")


@dataclass(frozen=True, slots=True)
class RootSpace:
    """The room of one root. keep: how many checkpoints stay. slots: how many are held ready for an emergency."""

    root: Path
    keep: int
    slots: int

    def shortage(self, checkpoint_bytes: int, ready: int) -> str:
        """Say what is missing for all of them at this size; "" when nothing is. ready: how many slots hold one now."""
        wanted, free = (self.keep + self.slots) * checkpoint_bytes, free_bytes(self.root)
        available = free + self._held_bytes()
        if available >= wanted:
            return ""
        means = "an emergency checkpoint may find no room" if not ready else "an emergency has room, and fewer are kept"
        return (
            f"{self.root}: takes {amount(wanted)}, for {self._each()} of {amount(checkpoint_bytes)}; there are"
            f" {amount(available)}, {amount(free)} of it free: {means} ({self._right(wanted - available)})"
        )

    @contextmanager
    def explaining_full_disk(self, checkpoint_bytes: int) -> Iterator[None]:
        """Have the error of a full disk say what a checkpoint takes, and what would be right."""
        free = free_bytes(self.root)
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise self._refused(error, checkpoint_bytes, free) from error
            raise

    def _refused(self, error: OSError, checkpoint_bytes: int, free: int) -> OSError:
        wanted = (self.keep + self.slots) * checkpoint_bytes
        more = max(checkpoint_bytes - free, wanted - free - self._held_bytes(), 0)
        problem = f"{error.strerror}: a checkpoint takes {amount(checkpoint_bytes)}, {amount(free)} were free"
        return OSError(
            error.errno, f"{problem}; {self._each()} take {amount(wanted)} ({self._right(more)})", error.filename
        )

    def _each(self) -> str:
        return f"{self.keep} kept checkpoints and {self.slots} slots for emergencies"

    def _right(self, missing: int) -> str:
        fewer = f", keep fewer than {self.keep}" if self.keep > 2 else ""
        return f"free {amount(missing)} there{fewer}, or name a folder on a larger disk{self._besides()}"

    def _besides(self) -> str:
        """Name what is never pruned: checkpoints under a name of their own (`keep_as`), and those set aside as old-.

        A file with another name is one of a checkpoint that is counted already.
        """
        held: dict[str, int] = {}
        for pattern in ("*/step-*", f"{OLD}*"):
            for path in self.root.glob(pattern):
                name = path.relative_to(self.root).parts[0]
                with suppress(OSError):  # another user's, or gone meanwhile
                    alone = [status.st_size for file in files_in(path) if (status := file.lstat()).st_nlink == 1]
                    held[name] = held.get(name, 0) + sum(alone)
        return "".join(f"; {name} takes {amount(size)}" for name, size in sorted(held.items()) if size)

    def _held_bytes(self) -> int:
        """Bytes that its checkpoints and slots have already: as long as they are, for all is written."""
        held_bytes = 0
        for path in (path for pattern in _OURS for path in self.root.glob(pattern)):
            with suppress(PermissionError):  # another user's
                held_bytes += sum(size_of(file) for file in files_in(path))
        return held_bytes


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written there, without what is held back for root. Raises OSError.

    As good as no end where the file system does not report it (some FUSE): it then says so when it is full.
    """
    found = os.statvfs(folder)
    if not found.f_blocks:
        return 1 << 62
    return found.f_bavail * found.f_frsize


def files_in(folder: Path) -> list[Path]:
    """What lies in a folder; nothing where there is none, or none any more: another rank may rename it at any time.

    `Path.glob` looks first whether it is there, and raises where it has gone between the two.
    """
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries]
    except OSError as error:
        if not is_gone(error):
            raise
        return []


def size_of(path: Path, *, least: int = 0) -> int:
    """How long a file is; 0 where there is none.

    least: if it is shorter, ask once more by opening it. Over NFS what another host has just written may be some
    seconds old when looked at, but not when opened (close-to-open, nfs(5)).
    """
    try:
        size = path.stat(follow_symlinks=False).st_size
    except OSError as error:
        if not is_gone(error):
            raise
        return 0
    if size < least:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
    return size


def changed_ns(path: Path) -> int:
    """When it was last changed, by the clock of the file system; 0 where there is none any more."""
    try:
        return path.stat(follow_symlinks=False).st_mtime_ns
    except OSError as error:
        if not is_gone(error):
            raise
        return 0


def amount(size_bytes: int) -> str:
    """Bytes for people."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


UNBORN: Final = f"{MANIFEST}.tmp"
MANIFEST_ROOM: Final = 16 << 10
_ROOM: Final = ".room-" + "-" * 34
_PIECE: Final = 8 << 20
_FILLING: Final = b"powerguard slot\n" * 256  # 4 KiB
_SLACK_MIN: Final = 64 << 10
_THERE: Final = {errno.ENOTEMPTY, errno.EEXIST}


def roomy(size_bytes: int) -> int:
    """How long a slot's file is made: 1 % and 64 KiB more than was needed last, in whole pages."""
    return -(-(size_bytes + size_bytes // 100 + _SLACK_MIN) // 4096) * 4096


class Slots:
    """The slots of one root. Every rank prepares its own files in them; a lock keeps that out of a save's way.

    sharers: how many ranks write under this root, at least.
    """

    def __init__(self, root: Path, disk: Disk, count: int, *, sharers: int = 1) -> None:
        self._root = root
        self._disk = disk
        self._sharers = sharers
        self._paths = [root / f".slot-{index}" for index in range(count)]
        self._lock = Lock()

    def free(self) -> list[Path]:
        """The slots that are there."""
        return [path for path in self._paths if is_folder(path)]

    def room_bytes(self, size_bytes: int) -> int:
        """How long to make a new file of this size, so that it can be a slot's one day; 0 without slots."""
        return roomy(size_bytes) if self._paths else 0

    # --- Making them ------------------------------------------------------------------------------------------------

    def prepare(
        self, rank: int, size_bytes: int, manifest_bytes: int, *, rate: float | None = None, stop: Event | None = None
    ) -> bool:
        """Fill what is missing, as far as there is room: see `Store.prepare`.

        manifest_bytes: 0 where this rank commits nothing.
        """
        wanted = {shard_file(rank): roomy(size_bytes)}
        if manifest_bytes:
            wanted[UNBORN] = -(-manifest_bytes // MANIFEST_ROOM) * MANIFEST_ROOM
        for path in self._paths:
            if not self._fits(path, wanted):
                continue  # half a slot is of no use, and would fill the disk
            with contextlib.suppress(FileExistsError):
                self._disk.make_folder(path)
            for name, size in wanted.items():
                if size_of(path / name) < size and not self._filled(path / name, size, rate, stop):
                    return False
            try:
                self._disk.sync_folder(path)
            except FileNotFoundError:
                return False  # taken by a save
        if manifest_bytes and not is_there(self._root / _ROOM):
            DiskFile(self._disk, self._root / _ROOM, direct=False).close()
        self._disk.sync_folder(self._root)
        return True

    def ready(self, rank: int, size_bytes: int) -> int:
        """How many slots hold a shard of this rank and size."""
        return sum(size_of(path / shard_file(rank)) >= size_bytes for path in self._paths)

    def could_take(self, rank: int, size_bytes: int) -> bool:
        """Whether an emergency of this size finds a slot, or the room for one."""
        return any(self._fits(path, {shard_file(rank): size_bytes}) for path in self._paths)

    def _fits(self, path: Path, wanted: dict[str, int]) -> bool:
        """Whether there is room for what a slot lacks; the other ranks' shards count as long as this one's."""
        short = sum(max(size - size_of(path / name), 0) for name, size in wanted.items())
        shards = (file for file in files_in(path) if file.name.startswith("shard-"))
        theirs = sum(size_of(file) for file in shards if file.name not in wanted)
        short += max((self._sharers - 1) * max(wanted.values()) - theirs, 0)
        return short == 0 or short <= free_bytes(self._root)

    def _filled(self, path: Path, size_bytes: int, rate: float | None, stop: Event | None) -> bool:
        """As `_fill`; a file for which the disk has no room after all goes, and so gives back what it has taken."""
        try:
            return self._fill(path, size_bytes, rate, stop)
        except OSError as error:
            if error.errno in FULL:
                with contextlib.suppress(OSError):
                    self._disk.unlink(path)
                    self._disk.remove_folder(path.parent)  # unless other files lie in it
            raise

    def _fill(self, path: Path, size_bytes: int, rate: float | None, stop: Event | None) -> bool:
        """Lengthen a file to this size. False: stopped, or the slot was taken meanwhile.

        With bytes, not with fallocate: where blocks are only promised (thin volumes, images), a promise may not hold,
        and the first write to a promised extent needs room for the tree of extents. The file is held for each piece:
        we may be a rank of a run that is over, and the slot taken by the next run just as the piece goes out.
        """
        try:
            file = DiskFile(self._disk, path)
        except (FileNotFoundError, FileExistsError):
            return False  # gone, or gone and back
        with file, Snapshot(min(_PIECE, -(-size_bytes // 4096) * 4096)) as memory:
            for start in range(0, len(memory.buffer), len(_FILLING)):
                memory.buffer[start : start + len(_FILLING)] = _FILLING
            while (offset := file.size_bytes & ~4095) < size_bytes:
                piece = memory.buffer[: min(_PIECE, size_bytes - offset)]
                with self._lock, file.held() as is_held:
                    if not is_held or not file.is_at(path):
                        return False
                    file.write(piece, offset)
                if (stop or Event()).wait(len(piece) / rate if rate else 0):
                    return False
            file.sync()
        return True

    # --- Taking and giving back -------------------------------------------------------------------------------------

    def take(self, folder: Path, *, leave: int) -> bool:
        """Give a slot the name of a checkpoint, if more than `leave` are there. True: the folder is there now.

        Several ranks may try at once: the first one does it for all.
        """
        with self._lock:
            if is_folder(folder):
                return True
            free = self.free()
            for path in free[: len(free) - leave] if leave < len(free) else []:
                try:
                    self._rename(path, folder)
                except FileNotFoundError:
                    if is_folder(folder):
                        return True
                except OSError as error:
                    if error.errno not in _THERE:
                        raise
                    return True
                else:
                    return True
        return False

    def _rename(self, old: Path, new: Path) -> None:
        try:
            self._disk.rename(old, new)
        except OSError as error:
            if error.errno not in FULL:
                raise
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(self._root / _ROOM)
            self._disk.rename(old, new)

    def give_back(self, folder: Path, *, unborn: bool = False) -> bool:
        """Remove a checkpoint, or make it a slot if one is missing. False: a process reads or writes it, or it is gone.

        Its manifest goes first, alone and durably: a half-removed checkpoint must not look whole, and nothing may be
        written over while a manifest still says that it is good. unborn: only one that has none.
        """
        try:
            lock = FolderLock(folder)
        except (BlockingIOError, FileNotFoundError):
            return False
        with lock:
            is_whole = is_there(folder / MANIFEST)
            if not lock.is_at(folder) or (is_whole and unborn):
                return False
            if is_whole:
                self._disk.rename(folder / MANIFEST, folder / UNBORN)
                self._disk.sync_folder(folder)
            if not (_is_ours_alone(folder) and self._becomes_slot(folder)):
                remove(self._disk, folder)
            return True

    def _becomes_slot(self, folder: Path) -> bool:
        """Make a folder one of the missing slots, if one is missing; another rank may be making it at the same time."""
        for path in self._paths:
            if is_there(path):
                continue
            try:
                self._disk.rename(folder, path)
            except OSError as error:
                if error.errno not in _THERE:
                    raise
            else:
                self._disk.sync_folder(self._root)
                return True
        return False

    def tidy(self, shards: Collection[str]) -> None:
        """Put the slots in order: none too many, and in them only the files of these shards, and of no more ranks.

        A cut may have put a folder back under its slot's name that has a manifest already, of a save not acknowledged.
        """
        for path in self._root.glob(".slot-*"):
            if path not in self._paths and is_folder(path):
                remove(self._disk, path)
        for path in self.free():
            for file in files_in(path):
                unlink_linked(self._disk, file)
            if is_there(path / MANIFEST):
                self._disk.rename(path / MANIFEST, path / UNBORN)
                self._disk.sync_folder(path)
            for file in files_in(path):
                if file.name.startswith("shard-") and file.name not in shards:
                    self._disk.unlink(file)


def remove(disk: Disk, folder: Path) -> None:
    """Remove a folder and the files in it, whichever process does the same. Links are removed, not followed."""
    for path in files_in(folder):
        if is_folder(path):
            remove(disk, path)
        else:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(path)
    with contextlib.suppress(FileNotFoundError):
        disk.remove_folder(folder)


def is_folder(path: Path) -> bool:
    """Whether a folder is there, not a link to one."""
    try:
        return stat.S_ISDIR(path.stat(follow_symlinks=False).st_mode)
    except OSError as error:
        if not is_gone(error):
            raise
        return False


def unlink_linked(disk: Disk, file: Path) -> None:
    """Remove a file of ours that has a second name, as all have that `cp -al` copied: another root may need it.

    A slot is written over in its place, and the one of a copy is, by the copy's training, a checkpoint by now.
    """
    with contextlib.suppress(FileNotFoundError):
        found = file.stat(follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            disk.unlink(file)


def _is_ours_alone(folder: Path) -> bool:
    """False if a copy is kept by links, which writing in place would change, or by reference."""
    with os.scandir(folder) as entries:
        found = [(Path(entry.path), entry.stat(follow_symlinks=False)) for entry in entries]
    is_alone = all(stat.S_ISREG(each.st_mode) and each.st_nlink == 1 for _, each in found)
    return bool(found) and is_alone and not any(shares_blocks(path) for path, _ in found)
