"""What lies in a folder, and what the files hold, chunk by chunk: the reading half of `seal`. Changes nothing."""

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from powerguard.trainer.seal_manifest import SEAL, UNBORN, SealError

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")
Progress = Callable[[int, int | None], None]
"""Told (bytes read, bytes in all), now and then, from any thread."""

TOLD = 8  # names in one message
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
        msg = f"{root}: {named(sorted(names))} changed while it was sealed: seal it once nobody writes there any more"
        raise SealError(msg)


def named(names: list[str]) -> str:
    more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return ", ".join(names[:TOLD]) + more


# --- Reading ----------------------------------------------------------------------------------------------------------


class Told:
    """Counts bytes for whoever shows progress."""

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
    with ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="seal") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


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
        raise SealError(msg) from error
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
                os.close(descriptor)  # opened, but cannot: the ordinary way tells what is wrong, if anything is
            else:
                return descriptor
    return os.open(path, flags)
