"""Takes a state through a snapshot and back, as the store does, without a disk."""

from collections.abc import Iterable, Mapping
from ctypes import c_ubyte
from typing import Any

from powerguard.trainer.store.items import Item, Loaded, State
from powerguard.trainer.store.manifest import Layout
from powerguard.trainer.store.shards import Snapshot


def kept(items: Iterable[Item]) -> Mapping[str, Loaded]:
    """What comes back of these items; read-only, as from a reader that maps the file."""
    with Snapshot() as snapshot:
        return held(snapshot, snapshot.take(items))


def held(snapshot: Snapshot, layout: Layout) -> Mapping[str, Loaded]:
    """What a snapshot holds."""
    found = {}
    for entry in layout.items:
        data = bytes(snapshot.buffer[entry.offset : entry.offset + entry.size_bytes])
        found[entry.name] = Loaded(entry.name, entry.dtype, entry.shape, memoryview(data))
    return found


def carried(old: State, new: State) -> None:
    """Load into one state what another one keeps."""
    new.load(kept(old.items()))


def bytes_of(tensor: Any) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, to be read or written. The tensor must outlive it."""
    size = int(tensor.numel() * tensor.element_size())
    return memoryview((c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
