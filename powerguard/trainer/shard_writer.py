"""Write memory into a file at the disk's own speed, and make the digests on the way."""

import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Final

from powerguard.trainer.chunks import THREADS, digest_of, over_chunks
from powerguard.trainer.disk import Disk, DiskFile
from powerguard.trainer.manifest import CHUNK_BYTES
from powerguard.trainer.snapshot import Progress

_WINDOW_BYTES: Final = 64 << 20
"""Dirty pages that may pile up without O_DIRECT: so the last flush is short, and others keep their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How a write went. direct: past the page cache. in_place: over blocks that were there already."""

    digests: Sequence[str]
    direct: bool
    in_place: bool
    took_s: float


def write_file(
    disk: Disk,
    path: Path,
    content: memoryview,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    room_bytes: int = 0,
    threads: int = THREADS,
    progress: Progress | None = None,
    cancel: Event | None = None,
) -> Written:
    """Write a file from its beginning; its data (not its name) is durable when this returns.

    content: page-aligned, a multiple of 4096 bytes. A file that is there already is written over in its place: only for
    one that no checkpoint needs. room_bytes: make a new one so long, where it can be had. Raises OSError with the path;
    CancelledError; what `progress` raises.
    """
    began_s = time.perf_counter()
    digests = [""] * -(-len(content) // chunk_bytes)
    lock = Lock()
    done = dirty = 0
    with _opened(disk, path) as file:
        in_place = file.size_bytes >= len(content)
        if not in_place:
            _allocate(file, len(content), room_bytes)

        def work(index: int, start: int, end: int) -> None:
            nonlocal done, dirty
            digests[index] = digest_of(content[start:end])
            file.write(content[start:end], start)
            with lock:
                done += end - start
                dirty += 0 if file.direct else end - start
                is_due = dirty >= _WINDOW_BYTES
                dirty = 0 if is_due else dirty
                if progress is not None:
                    progress(done, len(content))
            if is_due:
                file.sync()

        over_chunks(len(content), chunk_bytes, work, threads=threads, cancel=cancel)
        file.sync()
        if not file.is_at(path):
            raise FileNotFoundError(errno.ENOENT, "was taken away while it was written", str(path))
    took_s = time.perf_counter() - began_s
    return Written(digests=digests, direct=file.direct, in_place=in_place, took_s=took_s)


def _opened(disk: Disk, path: Path) -> DiskFile:
    """Open it: another file of this name, where a rank of an earlier run fills the one that is there just now.

    That rank took it for a slot's, and will know better before its next piece; this one must go nowhere that counts.
    """
    file = DiskFile(disk, path)
    with file.held() as is_held:
        if is_held:
            return file
    file.close()
    disk.unlink(path)
    return DiskFile(disk, path)


def _allocate(file: DiskFile, size_bytes: int, room_bytes: int) -> None:
    try:
        file.allocate(max(room_bytes, size_bytes))
    except OSError as error:
        if error.errno != errno.ENOSPC or room_bytes <= size_bytes:
            raise
        file.allocate(size_bytes)  # room to grow would be good, and is not needed
