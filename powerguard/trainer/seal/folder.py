"""Seal a folder that another framework has written: after a power cut it is whole, or known not to be.

    seal(folder)     every file and folder flushed to the disk, every 8 MiB digested, SEAL.json written last
    verify(folder)   what is missing, extra, changed or cut short, by name, chunk and offset

torch.distributed.checkpoint, DeepSpeed, Megatron and others lose or tear acknowledged checkpoints at a power cut: of 23
cuts after a save of the first, 23 left nothing that loads; sealed, 15 of 15 were whole. A folder with a seal that
verifies is whole; one without a seal was never finished. Sealing again what is sealed and unchanged changes nothing.

A seal covers what lies in the folder. So a symbolic link that leads out of it is refused, as is what is no file, folder
or link; links that stay inside are recorded. While a folder is sealed no process may write into it: if one does, that
is noticed, and there is no seal.

xxhash (xxh3-128, 0.03 CPU s/GB) is needed here; `seal_manifest` and so the daemon do without.

`newest_whole` and `prune` look at sealed folders side by side: which is the newest whole one, which may go.
"""

import contextlib
import errno
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

from powerguard.trainer.log import log
from powerguard.trainer.seal.manifest import (
    CHUNK_BYTES,
    DIGEST_DIGITS,
    MAX_SEAL_BYTES,
    SEAL,
    UNBORN,
    Seal,
    SealedFile,
    SealError,
    UnjudgedError,
    read_seal,
    step_in,
)
from powerguard.trainer.store.disk import Disk, FolderLock, is_there
from powerguard.trainer.store.folders import BAD, OLD
from powerguard.trainer.store.manifest import MANIFEST, step_of
from powerguard.trainer.store.shards import in_threads
from powerguard.trainer.store.store import SavedCheckpoint, locked

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")
Progress = Callable[[int, int | None], None]
"""Called with (bytes read, bytes in all), now and then, from any thread."""

MAX_NAMED = 8  # names in one message
UNREADABLE = "unreadable"
"""A finding of this kind says nothing about the bytes: they could not be read."""
_WORKERS = 4  # flushes of several files share their cost; digests keep two cores busy


# --- What lies in the folder ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stamp:
    """By what a file is known to be the one that was listed. Bytes and nanoseconds."""

    size: int
    inode: int
    modified_ns: int
    changed_ns: int


@dataclass(slots=True)
class Tree:
    """Names are relative to the folder, sorted. odd: what is neither file, folder nor link."""

    files: dict[str, Stamp] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)


def walk(root: Path, *, refuse: bool = True) -> Tree:
    """List a folder to its ground, following no link. refuse: raise SealError for what cannot be sealed."""
    tree = Tree()
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(root / prefix) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                name = f"{prefix}{entry.name}"
                if name in (SEAL, UNBORN):
                    continue
                if entry.is_symlink():
                    tree.links[name] = str(Path(entry.path).readlink())
                elif entry.is_dir(follow_symlinks=False):
                    tree.folders.append(name)
                    pending.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    tree.files[name] = Stamp(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
                else:
                    tree.odd.append(name)
    tree.files = dict(sorted(tree.files.items()))
    tree.links = dict(sorted(tree.links.items()))
    tree.folders.sort()
    if refuse:
        _refuse_odd(root, tree)
    return tree


def _refuse_odd(root: Path, tree: Tree) -> None:
    if tree.odd:
        msg = f"{root}: {named(tree.odd)}: neither file, folder nor link; move it out of the checkpoint"
        raise SealError(msg)
    inside = os.path.realpath(root)
    leads_out = [name for name in tree.links if os.path.commonpath([inside, os.path.realpath(root / name)]) != inside]
    if leads_out:
        msg = (
            f"{root}: {named(leads_out)}: a link that leads out of the folder; what it points to would not be "
            "covered (put a copy in its place)"
        )
        raise SealError(msg)


def check_still(root: Path, tree: Tree) -> None:
    now = walk(root)
    if now != tree:
        names = {*tree.files, *tree.links, *tree.folders} ^ {*now.files, *now.links, *now.folders}
        names |= {name for name in tree.files if tree.files[name] != now.files.get(name)}
        msg = f"{root}: {named(sorted(names))} changed while it was sealed: seal it when no process writes there"
        raise SealError(msg)


def named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


# --- Reading ----------------------------------------------------------------------------------------------------------


class BytesDone:
    """Counts bytes for a display of progress."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done = 0
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size
            if self._progress is not None:
                self._progress(self.done, self._total)


def each_of(work: Callable[[_Item], _Made], items: Sequence[_Item]) -> list[_Made]:
    """Do one work for each item, a few at a time; the first error ends it and is raised."""
    made: dict[int, _Made] = {}

    def one(index: int) -> None:
        made[index] = work(items[index])

    in_threads(len(items), one, threads=_WORKERS)
    return [made[index] for index in range(len(items))]


_own = threading.local()


def _buffer(size: int) -> memoryview:
    """Return page-aligned memory of this thread, used again and again: fresh pages cost more than the reading."""
    held: mmap.mmap | None = getattr(_own, "buffer", None)
    if held is None or len(held) < size:
        held = _own.buffer = mmap.mmap(-1, max(size, mmap.PAGESIZE))
    return memoryview(held)


def _chunks(descriptor: int, size: int, chunk_bytes: int) -> Iterator[memoryview]:
    """Yield what a file holds, chunk by chunk; each is good until the next is asked for."""
    page = mmap.PAGESIZE
    buffer = _buffer(min(chunk_bytes, -(-size // page) * page))[:chunk_bytes]
    offset = 0
    while offset < size:
        filled = 0
        while filled < len(buffer) and offset + filled < size:
            at = filled - filled % page  # after a short read: only whole pages can be asked for past the cache
            reached = at + os.preadv(descriptor, [buffer[at:]], offset + at)
            if reached <= filled:
                break  # cut short since it was listed
            filled = reached
        if not filled:
            return
        yield buffer[:filled]
        offset += filled


def digests(descriptor: int, size: int, chunk_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield (xxh3-128 in hexadecimal, bytes) of each chunk."""
    hashed = hasher()
    for chunk in _chunks(descriptor, size, chunk_bytes):
        yield hashed(chunk), len(chunk)


def hasher() -> Callable[[memoryview], str]:
    try:
        from xxhash import xxh3_128_hexdigest
    except ImportError as error:
        msg = f"sealing needs xxhash, which is not installed ({sys.executable} -m pip install xxhash)"
        raise UnjudgedError(msg) from error
    return xxh3_128_hexdigest


def open_to_read(path: Path, *, direct: bool) -> int:
    """Open to read, past the page cache if asked and if the file system can: it hides what the disk really holds."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    if direct:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, flags | os.O_DIRECT)
            try:
                os.preadv(descriptor, [_buffer(mmap.PAGESIZE)[: mmap.PAGESIZE]], 0)
            except OSError:
                os.close(descriptor)  # opened, but cannot: the ordinary way reports what is wrong, if anything is
            else:
                return descriptor
    return os.open(path, flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A folder that is sealed and durable. is_new: this call wrote the seal; else it was there, and holds."""

    path: str
    seal: Seal
    digest: str
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it was sealed.

    kind: missing, extra, changed, truncated, grown, unreadable. chunk: the first one that differs, None where that has
    no meaning; offset_bytes: where in the file it begins. chunks: how many differ.
    """

    kind: str
    path: str
    chunk: int | None = None
    offset_bytes: int | None = None
    chunks: int = 0
    because: str = ""

    def __str__(self) -> str:
        """In words, for people."""
        where = "" if self.chunk is None else f" at chunk {self.chunk}, offset {self.offset_bytes}"
        more = f" ({self.chunks} chunks in all)" if self.chunks > 1 else ""
        return f"{self.path}: {self.kind}{where}{more}{self.because and ': ' + self.because}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `verify` found; no findings: whole. read_bytes: how much was read for it."""

    path: str
    seal: Seal
    findings: tuple[Finding, ...]
    read_bytes: int

    @property
    def is_whole(self) -> bool:
        """Every byte is as it was sealed, and nothing else is there."""
        return not self.findings

    @property
    def is_unread(self) -> bool:
        """Nothing differs in what could be read, and some could not be."""
        return bool(self.findings) and all(each.kind == UNREADABLE for each in self.findings)


def seal(
    folder: Path | str,
    *,
    again: bool = False,
    step: int | None = None,
    part: bool = False,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> Sealed:
    """Make a folder durable and seal it. Returns only when a power cut could do no harm any more.

    again: put a new seal in the place of one that does not hold (any more); without it that is refused. step: training
    step; None: as the folder's name has it (checkpoint-1200). part: the seal has no step, since training cannot go on
    from what is there. Raises SealError, also while another process seals it, OSError; then there is no new seal.
    """
    root = Path(folder).resolve()
    _check_foreign(root)
    _check_alone(root)
    try:
        lock = FolderLock(root)
    except BlockingIOError as error:
        msg = f"{root}: another process is sealing it, or removing it (seal it once: of several ranks, on one)"
        raise SealError(msg) from error
    with lock:
        return _seal(root, again=again, step=step, part=part, disk=disk or Disk(), progress=progress)


def _seal(root: Path, *, again: bool, step: int | None, part: bool, disk: Disk, progress: Progress | None) -> Sealed:
    """Seal a folder, which no other process of this host seals meanwhile."""
    before = _read_old(root, again=again)
    tree = walk(root)
    if not tree.files:
        msg = f"{root}: has no file to seal"
        raise SealError(msg)
    if before is not None and not again:
        _refuse_changes(root, _listed(before, tree) + _sized(before, tree))
    chunk_bytes = CHUNK_BYTES if before is None or again else before.chunk_bytes
    found = _flush_and_digest(root, tree, chunk_bytes, disk, progress)
    for name in reversed(["", *tree.folders]):
        disk.sync_folder(root / name)
    check_still(root, tree)
    made = Seal(
        files=tuple(SealedFile(path=name, size_bytes=tree.files[name].size, digests=found[name]) for name in found),
        links=tuple(tree.links.items()),
        folders=tuple(tree.folders),
        step=_step_of(root, before, step) if not part else None,
        sealed_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        chunk_bytes=chunk_bytes,
    )
    if before is not None and not again:
        _refuse_changes(root, _differing(before, made))
    is_new = before is None or not before.same_content(made) or before.step != made.step
    kept = made if before is None or is_new else before
    if is_new:
        _write(root, made, disk)
    disk.sync_folder(root)
    _sync_above(root, disk)
    return Sealed(path=str(root), seal=kept, digest=kept.digest, is_new=is_new)


def verify(folder: Path | str, *, progress: Progress | None = None, direct: bool = True) -> Verdict:
    """Read a sealed folder to the last byte and compare.

    direct: past the page cache where the file system can, so that the disk itself is asked. Raises SealError when there
    is no seal or it does not hold, OSError when the folder cannot be listed.
    """
    root = Path(folder).resolve()
    sealed = read_seal(root)
    if sealed is None:
        msg = f"{root}: not sealed, or not finished (`powerguard seal {root}` seals it as it is)"
        raise SealError(msg)
    tree = walk(root, refuse=False)
    findings = _listed(sealed, tree)
    total = sum(min(f.size_bytes, tree.files[f.path].size) for f in sealed.files if f.path in tree.files)
    bytes_done = BytesDone(total, progress)

    def compare(file: SealedFile) -> list[Finding]:
        return _compare(root, file, sealed.chunk_bytes, bytes_done, direct=direct)

    present = [file for file in sealed.files if file.path in tree.files]
    for found in each_of(compare, present):
        findings += found
    return Verdict(path=str(root), seal=sealed, findings=tuple(findings), read_bytes=bytes_done.done)


def _check_foreign(root: Path) -> None:
    """Refuse what is no folder, and what needs no seal: a store of ours (it goes on being written) or a part of it."""
    if not root.is_dir():
        msg = f"{root}: {'is not a folder (seal its parent folder)' if is_there(root) else 'no such folder'}"
        raise SealError(msg)
    ours = root if _is_ours(root) else None
    with os.scandir(root) as entries:
        ours = ours or next((root / each.name for each in entries if _is_ours(root / each.name)), None)
    if ours is not None:
        msg = (
            f"{ours}: a checkpoint of powerguard's own, which needs no seal: its manifest holds the digests "
            f"(`powerguard checkpoints verify {root}` reads it to the last byte)"
        )
        raise SealError(msg)


def _check_alone(root: Path) -> None:
    """Refuse a seal within a seal: sealing one again breaks the other."""
    inner = next((path.parent for path in root.glob(f"*/{SEAL}")), None)
    if inner is not None:
        msg = f"{root}: {inner.name} in it is sealed by itself (seal each checkpoint's own folder, not the one above)"
        raise SealError(msg)
    if is_there(root.parent / SEAL):
        msg = f"{root}: {root.parent} is sealed as a whole (seal that --again, or remove its {SEAL} first)"
        raise SealError(msg)


def _is_ours(path: Path) -> bool:
    return step_of(path.name) is not None and (path / MANIFEST).is_file()


def _flush_and_digest(
    root: Path, tree: Tree, chunk_bytes: int, disk: Disk, progress: Progress | None
) -> dict[str, str]:
    """Return the digests of every file, each flushed before it is read."""
    hasher()
    bytes_done = BytesDone(sum(stamp.size for stamp in tree.files.values()), progress)

    def work(name: str) -> str:
        size = tree.files[name].size
        descriptor = os.open(root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            disk.sync(descriptor)
            found = []
            for digest, length in digests(descriptor, size, chunk_bytes):
                found.append(digest)
                bytes_done.add(length)
            return "".join(found)
        finally:
            os.close(descriptor)

    names = list(tree.files)
    return dict(zip(names, each_of(work, names), strict=True))


def glance(folder: Path | str) -> Verdict | None:
    """Compare names and sizes alone, which needs no xxhash; None: not sealed. Raises SealError, OSError."""
    root = Path(folder).resolve()
    sealed = read_seal(root)
    if sealed is None:
        return None
    tree = walk(root, refuse=False)
    return Verdict(path=str(root), seal=sealed, findings=(*_listed(sealed, tree), *_sized(sealed, tree)), read_bytes=0)


# --- Comparing --------------------------------------------------------------------------------------------------------


def _listed(sealed: Seal, tree: Tree) -> list[Finding]:
    """Return the differences that show in the names."""
    files, links, folders = {file.path for file in sealed.files}, dict(sealed.links), set(sealed.folders)
    here = {*tree.files, *tree.links, *tree.folders, *tree.odd}
    found = [Finding(kind="missing", path=name) for name in sorted({*files, *links, *folders} - here)]
    found += [Finding(kind="extra", path=name) for name in sorted(here - {*files, *links, *folders})]
    for name in sorted(here & {*files, *links, *folders}):
        was = "a file" if name in files else "a link" if name in links else "a folder"
        now = "a file" if name in tree.files else "a link" if name in tree.links else "a folder"
        if name in tree.odd or was != now:
            because = f"it was {was} when it was sealed, and is none now"
            found.append(Finding(kind="changed", path=name, because=because))
        elif name in links and links[name] != tree.links[name]:
            found.append(Finding(kind="changed", path=name, because=f"the link led to {links[name]}"))
    return found


def _sized(sealed: Seal, tree: Tree) -> list[Finding]:
    """Return the files whose length shows that they changed."""
    pairs = [(file, tree.files[file.path].size) for file in sealed.files if file.path in tree.files]
    return [found for file, size in pairs if (found := _resized(file, size, sealed.chunk_bytes))]


def _resized(file: SealedFile, size: int, chunk_bytes: int) -> Finding | None:
    if size == file.size_bytes:
        return None
    kind, where = ("truncated", size) if size < file.size_bytes else ("grown", file.size_bytes)
    because = f"{size} bytes instead of {file.size_bytes}"
    return Finding(kind=kind, path=file.path, chunk=where // chunk_bytes, offset_bytes=where, because=because)


def _differing(before: Seal, made: Seal) -> list[Finding]:
    """Return the files whose bytes changed, and a step that is given again."""
    found = []
    old_files = {file.path: file for file in before.files}
    for file in made.files:
        old, count = old_files[file.path], len(file.digests) // DIGEST_DIGITS
        chunks = [chunk for chunk in range(count) if old.digest(chunk) != file.digest(chunk)]
        if chunks:
            first = chunks[0]
            offset = first * made.chunk_bytes
            found.append(Finding(kind="changed", path=file.path, chunk=first, offset_bytes=offset, chunks=len(chunks)))
    if before.step != made.step:
        found.append(Finding(kind="changed", path="step", because=f"sealed with {before.step}, now {made.step}"))
    return found


def _compare(root: Path, file: SealedFile, chunk_bytes: int, bytes_done: BytesDone, *, direct: bool) -> list[Finding]:
    """Read one file and return what differs. The bytes that are compared are those that the disk gives now."""
    found: list[Finding] = []
    differ: list[int] = []
    try:
        descriptor = open_to_read(root / file.path, direct=direct)
        try:
            size, read = os.fstat(descriptor).st_size, 0
            whole = min(size, file.size_bytes) // chunk_bytes + (size == file.size_bytes)
            for chunk, (digest, length) in enumerate(digests(descriptor, size, chunk_bytes)):
                if chunk >= whole or chunk * chunk_bytes >= file.size_bytes:
                    break
                if digest != file.digest(chunk):
                    differ.append(chunk)
                bytes_done.add(length)
                read += length
        finally:
            os.close(descriptor)
        if size == file.size_bytes and not differ:
            size = read  # it was cut while it was read
        if resized := _resized(file, size, chunk_bytes):
            found.append(resized)
    except OSError as error:
        found.append(Finding(kind=UNREADABLE, path=file.path, because=error.strerror or str(error)))
    if differ:
        first = differ[0]
        found.append(
            Finding(kind="changed", path=file.path, chunk=first, offset_bytes=first * chunk_bytes, chunks=len(differ))
        )
    return found


def _refuse_changes(root: Path, findings: Sequence[Finding]) -> None:
    if findings:
        more = f" and {len(findings) - MAX_NAMED} more" if len(findings) > MAX_NAMED else ""
        changes = "; ".join(map(str, findings[:MAX_NAMED]))
        msg = f"{root}: changed since it was sealed: {changes}{more} (--again seals it as it is now)"
        raise SealError(msg)


def _step_of(root: Path, before: Seal | None, step: int | None) -> int | None:
    if step is not None:
        return step
    return step_in(root.name) if before is None else before.step


def _read_old(root: Path, *, again: bool) -> Seal | None:
    """Return the seal that is there. One that does not hold counts as none where a new one is wanted."""
    try:
        return read_seal(root)
    except SealError as error:
        if again:
            return None
        msg = f"{root}: {error} (--again seals it as it is now)"
        raise SealError(msg) from error


# --- Making it durable ------------------------------------------------------------------------------------------------


def _write(root: Path, made: Seal, disk: Disk) -> None:
    """Write the seal next to its place, flush it and its name, and put it into its place; then flush that."""
    content, unborn = made.to_json(), root / UNBORN
    if len(content) > MAX_SEAL_BYTES:
        msg = f"{root}: its seal would be larger than {MAX_SEAL_BYTES >> 20} MiB (seal its folders one by one)"
        raise SealError(msg)
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(unborn)  # of a sealing that was killed
    try:
        descriptor = disk.open(unborn, create=True)
        try:
            done = 0
            while done < len(content):
                done += disk.write(descriptor, memoryview(content)[done:], done)
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
        disk.sync_folder(root)
        disk.rename(unborn, root / SEAL)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(unborn)
        raise


def _sync_above(root: Path, disk: Disk) -> None:
    """Flush the folders above, up to the file system's own: a framework may have made several of them just now."""
    device = root.stat().st_dev
    for above in root.parents:
        if above.stat().st_dev != device:
            return
        with contextlib.suppress(PermissionError):  # one that we may not read was not made by this training
            disk.sync_folder(above)


def sealed_in(root: Path, names: str = "*") -> list[Path]:
    """The folders under root that have a seal, newest step first; of one step, the last sealed first.

    names: a pattern of theirs, where one writer looks for its own. A link to a folder is none: it would count twice.
    One that this user may not enter, and that is named for a step, may be sealed.
    """
    found = []
    for folder in root.glob(names):
        if folder.name.startswith((BAD, OLD)) or folder.is_symlink():
            continue
        try:
            found.append((_step(folder, by_name=True), (folder / SEAL).stat().st_mtime_ns, folder))
        except (FileNotFoundError, NotADirectoryError):
            pass  # also one that another rank removes, or sets aside
        except PermissionError:
            if (step := step_in(folder.name)) is not None:  # another user's, and closed to this one
                found.append((step, 0, folder))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def _step(folder: Path, *, by_name: bool = False) -> int:
    """The step of a seal; -1 without one, or of a damaged one. by_name: a seal that cannot be judged has its name's."""
    try:
        seal = read_seal(folder)
    except (UnjudgedError, OSError):
        step = step_in(folder.name) if by_name else None
        return -1 if step is None else step
    except SealError:
        return -1
    return -1 if seal is None or seal.step is None else seal.step


def newest_whole(root: str | os.PathLike[str], names: str = "*") -> Path | None:
    """The newest sealed checkpoint that verifies to the last byte; None: there was never one.

    One that does not is renamed to `bad-...`: never looked at again, never lost. Every rank may look at once. names: as
    for `sealed_in`. Raises SealError where xxhash is missing. If none is whole, training must not begin at step 0 by
    accident: raises OSError where one cannot be read (by the disk, or for a seal of a newer powerguard), which may be
    good, and SealError where all are `bad-...`.
    """
    hasher()
    with contextlib.suppress(FileNotFoundError):
        os.scandir(root).close()  # glob finds nothing in one that may not be read
    unread = ""
    for folder in sealed_in(Path(root), names):
        try:
            findings = verify(folder).findings
        except FileNotFoundError:
            continue  # another rank has set it aside
        except UnjudgedError as error:
            findings = (Finding(kind=UNREADABLE, path=SEAL, because=str(error)),)
        except OSError as error:
            findings = (Finding(kind=UNREADABLE, path=str(error.filename), because=error.strerror or str(error)),)
        except SealError as error:
            findings = (Finding(kind="changed", path=SEAL, because=str(error)),)
        if not findings:
            return folder
        why = "; ".join(map(str, findings[:MAX_NAMED]))
        if any(each.kind == UNREADABLE for each in findings):
            log.warning("%s: left where it is, and an older checkpoint is taken: %s", folder, why)
            unread = unread or f"{folder}: {why}"
        else:
            log.warning("%s: kept as %s%s: %s", folder, BAD, folder.name, why)
            _set_aside(folder, BAD)
    if unread:
        msg = f"cannot be read, and no older checkpoint is whole (move it away to go on without): {unread}"
        raise OSError(errno.EIO, msg)
    if bad := sorted(path.parent.name for path in Path(root).glob(f"{BAD}{names}/{SEAL}")):
        msg = (
            f"{root}: no checkpoint there is whole: {named(bad)} changed after being sealed (`powerguard seal` names"
            " what changed; move them away to begin at step 0)"
        )
        raise SealError(msg)
    unsealed = sorted(path.name for path in Path(root).glob(names) if step_in(path.name) is not None and path.is_dir())
    if unsealed := [name for name in unsealed if not name.startswith((BAD, OLD))]:
        log.warning(
            "%s: training begins at step 0; checkpoints without a seal are passed over: %s (never finished, or written"
            " without powerguard: if one is whole, stop now, and seal it with `powerguard seal`)",
            root,
            named(unsealed),
        )
    return None


_held: Final[dict[Path, FolderLock]] = {}
"""By file: the locks of the roots into which this process saves."""


def hold(root: str | os.PathLike[str], name: str) -> None:
    """Lock the file `name` in this root, if this process does not hold it: a second training would destroy the first.

    It would set aside or remove its checkpoints. Raises StoreError: another process holds it.
    """
    root = Path(root).resolve()
    if root / name not in _held:
        _held[root / name] = locked(root, name)


def let_go(root: str | os.PathLike[str], name: str) -> None:
    """Unlock it, where this process holds it; it goes in any case with the process."""
    lock = _held.pop(Path(root).resolve() / name, None)
    if lock is not None:
        lock.close()


def leave_behind(root: Path, above: int, names: str = "*") -> None:
    """Rename the sealed checkpoints of steps above this one, which is about to be saved, to `old-...`.

    Training was rolled back behind them, or has begun again. `newest_whole` would choose them, and `prune` keep them,
    before what is saved from now on.
    """
    later = [folder for folder in sealed_in(root, names) if _step(folder) > above]
    for folder in later:
        log.warning("%s: kept as %s%s: training has gone back to step %d", folder, OLD, folder.name, above)
        _set_aside(folder, OLD)
    if later:
        Disk().sync_folder(root)


def _set_aside(folder: Path, word: str) -> None:
    """Rename it, unless another rank has. Frameworks use a name again: the one before may be lying there as well."""
    for number in count(1):
        aside = f"{word}{folder.name}" if number == 1 else f"{word}{folder.name}.{number}"
        try:
            folder.rename(folder.with_name(aside))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
        else:
            return


def saved_in(folder: Path | str, step: int) -> SavedCheckpoint:
    """A sealed folder as a Guard knows checkpoints. Raises SealError without a seal."""
    seal = read_seal(folder)
    if seal is None:
        msg = f"{folder}: not sealed: never finished, or written without powerguard (`powerguard seal` if it is whole)"
        raise SealError(msg)
    return SavedCheckpoint(step=step, path=str(folder), size_bytes=seal.size_bytes, manifest_digest=seal.digest)


def unseal(folder: Path) -> None:
    """Take the seal away, durably, before anything in the folder changes: half of a checkpoint must not look whole."""
    (folder / SEAL).unlink(missing_ok=True)
    Disk().sync_folder(folder)


def prune(root: Path, keep: int, names: str = "*", spare: str = "") -> None:
    """Remove all but the newest `keep` of these names. Call it when the newest is durable, and never before.

    spare: the name of one that stays in any case. One whose seal has no step, or cannot be read, stays as well.
    """
    for folder in [each for each in sealed_in(root, names) if _step(each) >= 0][keep:]:
        if folder.name == spare:
            continue
        try:
            unseal(folder)
        except OSError as error:
            log.warning("%s: cannot be removed, and takes room: %s", folder, error)
        else:
            shutil.rmtree(folder, ignore_errors=True)
