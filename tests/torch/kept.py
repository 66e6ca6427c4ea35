"""Takes a state through a snapshot and back, as the store does, without a disk."""

import json
from collections.abc import Collection, Iterable, Mapping
from ctypes import c_ubyte
from dataclasses import replace
from typing import Any

from powerguard.trainer.store.items import Item, Loaded, State
from powerguard.trainer.store.manifest import Layout
from powerguard.trainer.store.shards import Snapshot
from powerguard.trainer.torch.state import INDEX
from powerguard.trainer.torch.tree import TAG


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


def from_device(
    items: Mapping[str, Loaded], device: str, parts: Collection[str], *, generators: int
) -> tuple[Mapping[str, Loaded], int]:
    """Return the checkpoint as if all tensors of these parts had been on this device; how many they are.

    generators: how many GPUs had random numbers of their own; the states are those of the CPU's.
    """
    index, moved = json.loads(bytes(items[INDEX].data)), 0

    def move(node: Any) -> None:
        nonlocal moved
        if isinstance(node, dict) and node.get(TAG) == "tensor":
            node["device"] = device
            moved += 1
        for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            move(each)

    for name in parts:
        move(index["parts"][name])
    index["parts"]["random"]["cuda"] = [index["parts"]["random"]["torch"]] * generators
    return {**items, INDEX: replace(items[INDEX], data=memoryview(json.dumps(index).encode()))}, moved


def carried(old: State, new: State) -> None:
    """Load into one state what another one keeps."""
    new.load(kept(old.items()))


def bytes_of(tensor: Any) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, to be read or written."""
    array = (c_ubyte * int(tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    array.tensor = tensor  # which lives as long as this view of it
    return memoryview(array).cast("B")
