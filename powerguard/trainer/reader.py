"""Read a shard into memory and verify it in the same pass: what was verified is what is used.

A folder may hold anything: a link out of it, a pipe that blocks, a file that was cut, a bit that flipped. It is
refused, with the file, the chunk and the offset.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Lock
from typing import Self

from powerguard.trainer.chunks import THREADS, digest_of, over_chunks
from powerguard.trainer.disk import refuses_direct, stop_direct
from powerguard.trainer.items import Loaded
from powerguard.trainer.locks import FolderLock
from powerguard.trainer.manifest import MANIFEST, Shard, StoreError
from powerguard.trainer.snapshot import Progress, Snapshot


class CorruptError(StoreError):
    """Bytes that are not those that were written. chunk, offset: where in the file; None: the file as such."""

    def __init__(self, path: Path, what: str, *, chunk: int | None = None, offset: int | None = None) -> None:
        where = "" if chunk is None else f" (chunk {chunk}, from byte {offset})"
        super().__init__(f"{path}: {what}{where}")
        self.path = path
        self.chunk = chunk
        self.offset = offset


class ShardReader:
    """One shard's file, open for reading past the page cache where that can be had. One pass or chunk by chunk.

    Raises CorruptError when the file is not there, not a plain file, or too short; OSError when it cannot be read.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.path = folder / shard.file
        self._shard = shard
        self.direct = True
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not hold us up
        try:
            try:
                self._descriptor = os.open(self.path, flags | os.O_DIRECT)
            except OSError as error:
                if not refuses_direct(error):
                    raise
                self.direct = False
                self._descriptor = os.open(self.path, flags)
        except FileNotFoundError as error:
            raise CorruptError(self.path, "is missing") from error
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO}:
                raise CorruptError(self.path, "is a link or a socket, not a plain file") from error
            raise
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size < shard.size_bytes:
            self.close()
            what = f"has {found.st_size} bytes, not {shard.size_bytes}"
            raise CorruptError(self.path, what if stat.S_ISREG(found.st_mode) else "is not a plain file")

    def read_chunk(self, index: int, target: memoryview) -> None:
        """Read one chunk into page-aligned memory of its size, and verify it."""
        offset = index * self._shard.chunk_bytes
        done = 0
        while done < len(target):
            direct = self.direct
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                if direct and refuses_direct(error):
                    stop_direct(self._descriptor)
                    self.direct = False
                    continue
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            if count == 0:
                raise CorruptError(self.path, "ends too early", chunk=index, offset=offset + done)
            done += count
        if digest_of(target) != self._shard.digests[index]:
            raise CorruptError(self.path, "does not match its digest", chunk=index, offset=offset)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def physical_bytes() -> int:
    """The memory of this host: no shard that was written here is larger."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_shard(
    folder: Path,
    shard: Shard,
    into: Snapshot | None = None,
    *,
    threads: int = THREADS,
    progress: Progress | None = None,
    cancel: Event | None = None,
) -> dict[str, Loaded]:
    """Read and verify a whole shard; return its items by name, as views of `into` or of memory of their own.

    Raises CorruptError, StoreError when it cannot fit into memory, OSError, CancelledError; what is in `into` is then
    nothing to be used.
    """
    memory = Snapshot() if into is None else into
    with ShardReader(folder, shard) as file:  # before the memory: its size was checked against a real file
        if shard.size_bytes > physical_bytes():
            msg = f"{file.path}: has {shard.size_bytes} bytes, more than this host's memory ({physical_bytes()})"
            raise StoreError(msg)
        memory.reserve(shard.size_bytes, touch=False)
        buffer = memory.buffer
        lock = Lock()
        done = 0

        def read(index: int, start: int, end: int) -> None:
            nonlocal done
            file.read_chunk(index, buffer[start:end])
            with lock:
                done += end - start
                if progress is not None:
                    progress(done, shard.size_bytes)

        over_chunks(shard.size_bytes, shard.chunk_bytes, read, threads=threads, cancel=cancel)
    return {
        item.name: Loaded(item.name, item.dtype, item.shape, buffer[item.offset : item.offset + item.size_bytes])
        for item in shard.items
    }


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a checkpoint from being pruned or recycled while it is read (by an upload, say). Any process may.

    Raises FileNotFoundError when it is going or gone. Where the file system has no locks, nothing is held.
    """
    try:
        lock = FolderLock(folder, shared=True)
    except BlockingIOError as error:
        raise FileNotFoundError(errno.ENOENT, "is being removed", str(folder)) from error
    with lock:
        if not lock.is_at(folder) or not (folder / MANIFEST).exists():
            raise FileNotFoundError(errno.ENOENT, "is being removed", str(folder))
        yield
