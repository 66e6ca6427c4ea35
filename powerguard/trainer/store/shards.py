"""A state is copied into host memory at a step boundary, written at the disk's own speed, and read back verified.

`Snapshot` is that memory: page-aligned, because O_DIRECT wants it; touched beforehand and used again and again, because
the first copy into fresh pages ran at 0.35 GB/s and the next ones at 20 GB/s where we measured: an emergency must never
be the first use. Digests are made while it is written.

Reading verifies in the same pass: what was verified is what is used. A folder may hold anything: a link out of it, a
pipe that blocks, a file that was cut, a bit that flipped. It is refused, with the file, the chunk and the offset. In
idle time checkpoints are read again from the disk itself, one chunk at a time: the page cache hides a disk that
forgets.
"""

import contextlib
import errno
import mmap
import operator
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final, Self

from powerguard.trainer.store.disk import FULL, Disk, DiskFile, FolderLock, is_there, refuses_direct, stop_direct
from powerguard.trainer.store.items import Copier, Flight, Item, Loaded, PlannedItems
from powerguard.trainer.store.manifest import (
    ALIGN,
    CHUNK_BYTES,
    MANIFEST,
    PAGE,
    Entry,
    Layout,
    Manifest,
    ManifestError,
    Packed,
    Shard,
    StoreError,
)
from powerguard.trainer.store.memory import physical_bytes

_PIECE: Final = 8 << 20
_HUGE: Final = 2 << 20
_LOOK_S: Final = 0.001  # a GPU's bus brings 50 MB in this time

Progress = Callable[[int, int | None], None]
"""Called with (bytes done, bytes in all; None: not known) during a long operation, from any thread."""


def laid_out(items: Iterable[Item]) -> Layout:
    """Say where each item would lie: one behind the other, each aligned to 16 bytes, all of it padded to 4 KiB.

    Raises StoreError for an item whose size or shape is none.
    """
    if isinstance(items, PlannedItems):
        return items.layout
    entries: list[Entry] = []
    end = 0
    for item in items:
        offset = _up(end, ALIGN)
        size_bytes, *shape = _wholes(item)
        entries.append(Entry(item.name, item.dtype, tuple(shape), offset, size_bytes))
        end = offset + size_bytes
    return Layout(tuple(entries), max(_up(end, PAGE), PAGE))


class Snapshot:
    """One such memory. One thread at a time may take into it; it must not be written to while it is saved.

    size_bytes: how much to hold ready from the start; it grows when a state needs more, which is slow.
    copier: copies in place of the items, where a device is involved. copy_s: how long the newest copy took.
    """

    def __init__(self, size_bytes: int = 0, copier: Copier | None = None) -> None:
        self._memory: mmap.mmap | None = None
        self._buffer = memoryview(b"")
        self._touched = 0
        self._copier = copier
        self._lock = Lock()
        self._flight: Flight | None = None
        self._failed: Exception | None = None
        self._arrived = 0
        self._began_s = 0.0
        self.copy_s = 0.0
        self.reserve(size_bytes)

    @property
    def buffer(self) -> memoryview:
        """All of the memory. Views of it end when the snapshot grows or is closed."""
        return self._buffer

    @property
    def size_bytes(self) -> int:
        return len(self._buffer)

    def reserve(self, size_bytes: int, *, touch: bool = True, stop: Event | None = None) -> None:
        """Hold at least so much memory, touched beforehand or not. What it held before is gone when it grows.

        stop: leave the rest for the next time once it is set: another thread waits for this memory, or for this thread.
        """
        self._land()
        if size_bytes > len(self._buffer):
            self.close()
            memory = mmap.mmap(-1, _up(size_bytes, _HUGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory = memory
            self._buffer = memoryview(memory)
            self._touched = 0 if touch else len(self._buffer)  # a caller that takes it untouched fills it
        if self._touched < len(self._buffer):
            self._touch(stop or Event())
        if touch:  # else what was read into it is still to be loaded, by a child, too
            self._keep_from_children()

    def _keep_from_children(self) -> None:
        """Leave it out of children of fork, as data loaders are: a page that they share is copied before it is written.

        A save would be slow, and the children would keep the old pages, this memory once more, while they live.
        """
        if self._memory is not None:
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_DONTFORK)

    def _touch(self, stop: Event) -> None:
        # Read from /dev/zero, each page is touched while other threads go on; a loop of our own would stop training.
        zero = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        try:
            while self._touched < len(self._buffer) and not stop.is_set():
                self._touched += os.readv(zero, [self._buffer[self._touched : self._touched + _PIECE]])
        finally:
            os.close(zero)

    def register(self, *, whole: bool = False) -> bool:
        """Make the next piece of the memory known to the device; what it holds stays. False: nothing is left to do.

        whole: all of it as one piece, which a load needs.
        """
        if self._copier is None or not self._copier.may_register:
            return False
        if self._memory is None or self._touched < len(self._buffer):
            return False
        self._keep_from_children()  # one that wrote to it would take it from the device
        return self._copier.register(self._buffer, whole=whole)

    def take(self, items: Iterable[Item], progress: Progress | None = None, *, late: bool = False) -> Layout:
        """Copy the items and say where they lie. Raises what an item raises; the snapshot then holds nothing.

        late: return when all is copied that training may change before it says so; see `wait_arrived` for the rest.
        """
        taken = items if isinstance(items, PlannedItems) else tuple(items)
        layout = laid_out(taken)
        self.reserve(layout.size_bytes)
        self._failed, self._arrived, self._began_s = None, 0, time.perf_counter()

        def report_copied(end: int) -> None:
            self._arrived = end
            if progress is not None:
                progress(end, layout.size_bytes)

        end = max((entry.offset + entry.size_bytes for entry in layout.items), default=0)
        self._buffer[end : layout.size_bytes] = bytes(layout.size_bytes - end)
        try:
            if self._copier is not None and isinstance(taken, PlannedItems):
                self._flight = self._copier.begin(taken, self._buffer, report_copied, late=late)
            else:
                _copy_each(taken, layout, self._buffer, report_copied)
        except Exception as error:
            self._failed = error
            raise
        if self._flight is None:
            self._end_copy(layout.size_bytes)
        else:
            self._look()
        return layout

    def wait_arrived(self, end: int, cancel: Event | None = None) -> None:
        """Wait until all bytes before `end` are there. Any thread, also while they are taken.

        Raises CancelledError, and what makes the copy worthless: the device's error, or that the state was changed.
        """
        while self._look() < end:
            _check(cancel)
            time.sleep(_LOOK_S)

    def _look(self) -> int:
        """How many bytes from the beginning have arrived."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if self._flight is not None:
                try:
                    self._arrived = max(self._arrived, self._flight.arrived())
                except Exception as error:
                    self._failed = error
                    raise
                if self._flight.is_over:
                    self._flight = None
                    self._end_copy(self._arrived)
            return self._arrived

    def _end_copy(self, size_bytes: int) -> None:
        self._arrived = size_bytes
        self.copy_s = time.perf_counter() - self._began_s

    def _land(self) -> None:
        """Wait for what is still on its way into this memory, whatever becomes of it."""
        with self._lock:
            self._flight = None
        if self._copier is not None:
            self._copier.land()

    def close(self) -> None:
        """Give the memory back; where views of it still live, as soon as they are gone."""
        self._land()
        if self._copier is not None and self._memory is not None:
            self._copier.unregister(self._buffer)
        self._buffer = memoryview(b"")
        if self._memory is not None:
            memory, self._memory = self._memory, None
            with contextlib.suppress(BufferError):
                memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy_each(items: Iterable[Item], layout: Layout, memory: memoryview, report_copied: Callable[[int], None]) -> None:
    """Copy items into their places, one after the other, and clear the gaps between them."""
    end = 0
    for item, entry in zip(items, layout.items, strict=True):
        memory[end : entry.offset] = bytes(entry.offset - end)
        end = entry.offset + entry.size_bytes
        item.copy_to(memory[entry.offset : end])
        report_copied(end)


def _wholes(item: Item) -> list[int]:
    """Its size and its shape as plain numbers, whatever a framework has them as. Raises StoreError."""
    with contextlib.suppress(TypeError):
        found = [int(operator.index(number)) for number in (item.size_bytes, *item.shape)]
        if found[0] >= 0:
            return found
    msg = (
        f"{item.name}: {item.size_bytes!r} bytes in the shape {item.shape!r} do not describe a buffer "
        "(whole numbers from 0)"
    )
    raise StoreError(msg)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


THREADS: Final = 8
"""How many chunks are under way at once. Each waits for the disk, so eight cost no more than two; where others want
every core, a disk that has more to do waits less for us (docs/decisions/0101)."""

READERS: Final = 16
"""The same for reading (docs/decisions/0234)."""

_WORTH_A_THREAD: Final = 1 << 20  # bytes that take longer than starting one


class CancelledError(StoreError):
    """The reader is no longer needed."""


def digest_of(chunk: memoryview) -> str:
    """Return the xxh3-128 of a chunk, in hex: 7.6 to 12.5 GB/s on one core, several times as fast as the disk."""
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(chunk)


def over_chunks(
    size_bytes: int,
    chunk_bytes: int,
    work: Callable[[int, int, int], None],
    *,
    threads: int = THREADS,
    cancel: Event | None = None,
) -> None:
    """Call work(index, start, end) for each chunk, each once, in any order.

    The first error ends it and is raised here, after every thread has ended. Raises CancelledError when cancelled.
    """

    def one(index: int) -> None:
        start = index * chunk_bytes
        work(index, start, min(start + chunk_bytes, size_bytes))

    threads = min(threads, 1 + size_bytes // _WORTH_A_THREAD)
    in_threads(-(-size_bytes // chunk_bytes), one, threads=threads, cancel=cancel)


def in_threads(count: int, work: Callable[[int], None], *, threads: int, cancel: Event | None = None) -> None:
    """Call work(index) for each of so many, in this thread and others. Raises as `over_chunks` does.

    Not by a ThreadPoolExecutor, which takes no work once the main thread has ended: training may go on in another one.
    """
    errors: list[BaseException] = []
    lock = Lock()
    indices = iter(range(count))

    def run() -> None:
        while not errors:
            with lock:
                index = next(indices, None)
            if index is None:
                return
            try:
                _check(cancel)
                work(index)
            except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits, and raised there
                errors.append(error)

    helpers: list[Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # this user's threads are at their limit, or Python ends: fewer will do
            for _ in range(min(threads, count) - 1):
                helper = Thread(target=run, name="powerguard-chunks", daemon=True)
                helper.start()
                helpers.append(helper)
        run()
        for helper in helpers:
            helper.join()
    except BaseException as error:  # noqa: BLE001 - raised below, when no thread writes to the caller's file any more
        errors.append(error)
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def _check(cancel: Event | None) -> None:
    if cancel is not None and cancel.is_set():
        msg = "called off"
        raise CancelledError(msg)


_WINDOW_BYTES: Final = 64 << 20
"""Dirty pages that may pile up without O_DIRECT: so the last flush is short, and others keep their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How a write went. direct: past the page cache. in_place: over blocks that were there already."""

    digests: Sequence[str]
    direct: bool
    in_place: bool


def write_file(
    disk: Disk,
    path: Path,
    content: memoryview,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    room_bytes: int = 0,
    threads: int = THREADS,
    arrived: Callable[[int, Event | None], None] | None = None,
    progress: Progress | None = None,
    cancel: Event | None = None,
) -> Written:
    """Write a file from its beginning; its data (not its name) is durable when this returns.

    content: page-aligned, a multiple of 4096 bytes. A file that is there already is written over in its place: only for
    one that no checkpoint needs. room_bytes: make a new one so long, where it can be had. arrived: waits for all bytes
    before this one; see `Snapshot.wait_arrived`. Raises OSError with the path; CancelledError; what `arrived` and
    `progress` raise.
    """
    digests = [""] * -(-len(content) // chunk_bytes)
    lock = Lock()
    done = dirty = 0
    with _opened(disk, path) as file:
        in_place = file.size_bytes >= len(content)
        if not in_place:
            _allocate(file, len(content), room_bytes)

        def work(index: int, start: int, end: int) -> None:
            nonlocal done, dirty
            if arrived is not None:
                arrived(end, cancel)
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
    return Written(digests=digests, direct=file.direct, in_place=in_place)


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
        if error.errno not in FULL or room_bytes <= size_bytes:
            raise
        file.allocate(size_bytes)  # room to grow would be good, and is not needed


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


def read_shard(
    folder: Path,
    shard: Shard,
    into: Snapshot | None = None,
    *,
    threads: int = READERS,
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
        if not lock.is_at(folder) or not is_there(folder / MANIFEST):
            raise FileNotFoundError(errno.ENOENT, "is being removed", str(folder))
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """What a scrub saw. whole: all that lies here was read. corrupt: what it stumbled over; None: nothing."""

    path: str
    whole: bool
    corrupt: CorruptError | None


def scrub(folder: Path, manifest: Manifest, *, rate: float | None = None, stop: Event | None = None) -> Scrubbed:
    """Verify every shard of a checkpoint that lies in this folder. Keeps it from being pruned meanwhile.

    rate: bytes a second at most; None: at full speed. Raises FileNotFoundError when it is gone, OSError when the disk
    does not answer (which does not prove rot).
    """
    stop = stop or Event()
    began_s = time.perf_counter()
    done = 0
    corrupt = None
    whole = True
    shards = [packed for packed in manifest.shards if manifest.hosts == 1 or is_there(folder / packed.file)]
    with held(folder), Snapshot(max((packed.chunk_bytes for packed in shards), default=0)) as memory:
        try:
            for packed in shards:
                shard = _unpacked(folder, packed)
                with ShardReader(folder, shard) as file:
                    for index, start in enumerate(range(0, shard.size_bytes, shard.chunk_bytes)):
                        due_s = 0.0 if rate is None else began_s + done / rate - time.perf_counter()
                        if stop.is_set() or (due_s > 0 and stop.wait(due_s)):
                            whole = False
                            break
                        size = min(shard.chunk_bytes, shard.size_bytes - start)
                        file.read_chunk(index, memory.buffer[:size])
                        done += size
        except CorruptError as error:
            corrupt = error
            whole = False
    return Scrubbed(path=str(folder), whole=whole, corrupt=corrupt)


def _unpacked(folder: Path, packed: Packed) -> Shard:
    try:
        return packed.unpacked()
    except ManifestError as error:
        raise CorruptError(folder / MANIFEST, str(error)) from error
