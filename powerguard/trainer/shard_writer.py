"""Write memory into a file at the disk's own speed, and make the digests on the way."""

import errno
import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Final

from powerguard.trainer.chunks import THREADS, digest_of, over_chunks
from powerguard.trainer.disk import Disk, overwrite_in_place, refuses_direct
from powerguard.trainer.manifest import CHUNK_BYTES
from powerguard.trainer.snapshot import Progress

_WINDOW_BYTES: Final = 64 << 20  # dirty pages that may pile up where O_DIRECT cannot be had


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How a write went. direct: past the page cache. in_place: over blocks that were there already."""

    digests: Sequence[str]
    direct: bool
    in_place: bool
    took_s: float


class ShardWriter:
    """One file, written once from its beginning to its end; durable (its data, not its name) when `write` returns."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._direct = True
        self._lock = Lock()
        self._dirty = 0

    def write(
        self,
        content: memoryview,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        threads: int = THREADS,
        progress: Progress | None = None,
        cancel: Event | None = None,
    ) -> Written:
        """Write it all. content: page-aligned, a multiple of 4096 bytes. Raises OSError with the path; CancelledError.

        A file that is there already is written over in its place: only for one that no checkpoint needs.
        """
        began_s = time.perf_counter()
        digests = [""] * -(-len(content) // chunk_bytes)
        done = 0
        try:
            descriptor, in_place = self._open(len(content))
            try:

                def work(index: int, start: int, end: int) -> None:
                    nonlocal done
                    digests[index] = digest_of(content[start:end])
                    self._write_all(descriptor, content[start:end], start)
                    with self._lock:
                        done += end - start
                        if progress is not None:
                            progress(done, len(content))

                over_chunks(len(content), chunk_bytes, work, threads=threads, cancel=cancel)
                self._disk.sync(descriptor)
            finally:
                self._disk.close(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        took_s = time.perf_counter() - began_s
        return Written(digests=digests, direct=self._direct, in_place=in_place, took_s=took_s)

    def _open(self, size_bytes: int) -> tuple[int, bool]:
        """Open the file, new or not; say whether its blocks were there already."""
        try:
            descriptor = self._open_as(create=False)
        except FileNotFoundError:
            descriptor = self._open_as(create=True)
        there = os.fstat(descriptor).st_size
        if there >= size_bytes:
            return descriptor, True
        try:
            if there == 0:
                overwrite_in_place(descriptor)
            self._disk.allocate(descriptor, size_bytes)
        except OSError:
            self._disk.close(descriptor)
            raise
        return descriptor, False

    def _open_as(self, *, create: bool) -> int:
        if self._direct:
            try:
                return self._disk.open(self._path, create=create, direct=True)
            except OSError as error:
                if not refuses_direct(error):
                    raise
                self._direct = False
                create = create and not self._path.exists()  # open(2) may leave the file behind when it refuses
        return self._disk.open(self._path, create=create)

    def _write_all(self, descriptor: int, content: memoryview, offset: int) -> None:
        done = 0
        while done < len(content):
            direct = self._direct
            try:
                count = self._disk.write(descriptor, content[done:], offset + done)
            except OSError as error:
                # Refused only now, or after a short write that ended between two sectors: go on through the cache.
                if not direct or not refuses_direct(error):
                    raise
                self._direct = False
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                continue
            if count == 0:
                raise OSError(errno.EIO, "the disk takes nothing")
            done += count
        if not self._direct:
            self._bound_the_cache(descriptor, len(content))

    def _bound_the_cache(self, descriptor: int, size_bytes: int) -> None:
        """Flush now and then, so that the last flush is short and others keep their memory."""
        with self._lock:
            self._dirty += size_bytes
            due = self._dirty >= _WINDOW_BYTES
            self._dirty = 0 if due else self._dirty
        if due:
            self._disk.sync(descriptor)
