"""Host memory that a state is copied into at a step boundary, and that the disk then reads from. Stdlib only.

Page-aligned, because O_DIRECT wants it; touched beforehand and used again and again, because the first copy into fresh
pages ran at 0.35 GB/s and the next ones at 20 GB/s where we measured: an emergency must never be the first use.
"""

import contextlib
import mmap
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from threading import Event
from typing import Final, Self

from powerguard.trainer.items import Item
from powerguard.trainer.manifest import ALIGN, PAGE, Entry, Layout, StoreError

_PIECE: Final = 8 << 20
_HUGE: Final = 2 << 20

Progress = Callable[[int, int | None], None]
"""Told (bytes done, bytes in all; None: not known) as something long goes on, from any thread."""


def laid_out(items: Iterable[Item]) -> Layout:
    """Say where each item would lie: one behind the other, each aligned to 64 bytes, all of it padded to 4 KiB.

    Raises StoreError for an item whose size or shape is none.
    """
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
    """

    def __init__(self, size_bytes: int = 0) -> None:
        self._memory: mmap.mmap | None = None
        self._buffer = memoryview(b"")
        self._touched = 0
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

        stop: leave the rest for the next time once it is set: somebody waits for this memory, or for this thread.
        """
        if size_bytes > len(self._buffer):
            self.close()
            memory = mmap.mmap(-1, _up(size_bytes, _HUGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory = memory
            self._buffer = memoryview(memory)
            self._touched = 0 if touch else len(self._buffer)  # whoever wants it as it is, fills it
        if self._touched < len(self._buffer):
            self._touch(stop or Event())

    def _touch(self, stop: Event) -> None:
        # Read from /dev/zero, each page is touched while other threads go on; a loop of our own would stop training.
        zero = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        try:
            while self._touched < len(self._buffer) and not stop.is_set():
                self._touched += os.readv(zero, [self._buffer[self._touched : self._touched + _PIECE]])
        finally:
            os.close(zero)

    def take(self, items: Iterable[Item], progress: Progress | None = None) -> Layout:
        """Copy the items and say where they lie. Raises what an item raises; the snapshot then holds nothing."""
        taken: Sequence[Item] = tuple(items)
        layout = laid_out(taken)
        self.reserve(layout.size_bytes)
        end = 0
        for item, entry in zip(taken, layout.items, strict=True):
            self._buffer[end : entry.offset] = bytes(entry.offset - end)
            end = entry.offset + entry.size_bytes
            item.copy_to(self._buffer[entry.offset : end])
            if progress is not None:
                progress(end, layout.size_bytes)
        self._buffer[end : layout.size_bytes] = bytes(layout.size_bytes - end)
        return layout

    def close(self) -> None:
        """Give the memory back; where views of it still live, as soon as they are gone."""
        self._buffer = memoryview(b"")
        if self._memory is not None:
            memory, self._memory = self._memory, None
            with contextlib.suppress(BufferError):
                memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wholes(item: Item) -> list[int]:
    """Its size and its shape as plain numbers, whatever a framework has them as. Raises StoreError."""
    with contextlib.suppress(TypeError):
        found = [int(operator.index(number)) for number in (item.size_bytes, *item.shape)]
        if found[0] >= 0:
            return found
    msg = f"{item.name}: {item.size_bytes!r} bytes in the shape {item.shape!r} is no buffer (whole numbers from 0)"
    raise StoreError(msg)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
