"""The weights of a model alone, out of a checkpoint of `TorchState`; and as a safetensors file. Without torch.

Only the chunks in which the weights lie are read, and each is verified. The training may run meanwhile: the checkpoint
is held while it is read. What the ranks have divided among them is put together: the whole tensors that DDP divides,
and the rows of FSDP2's shards. Shards that lie on other hosts cannot be read here.

safetensors: eight bytes with the length of the header, the header in JSON, and the bytes of the tensors, without gaps.
https://huggingface.co/docs/safetensors
"""

import errno
import json
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powerguard.trainer.store.disk import Disk, is_there
from powerguard.trainer.store.folders import Found, Refused, look
from powerguard.trainer.store.items import Loaded
from powerguard.trainer.store.manifest import Shard, StoreError, committed_ms, step_of
from powerguard.trainer.store.shards import ShardReader, Snapshot, held

FORMAT: Final = 1
INDEX: Final = "torch"
"""Name of the JSON item that says how all others belong together."""

TAG: Final = "$"
"""Key of a node in the index that is more than plain JSON: its kind."""

Node = Any
"""A value of the index, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one model. path: of the checkpoint. tensors: by their names in the model's `state_dict()`.

    others: what that has besides tensors (`get_extra_state`), as nodes of the index; items: the tensors in these, by
    the names in the nodes.
    """

    step: int
    path: str
    tensors: Mapping[str, Loaded]
    others: Mapping[str, Node]
    items: Mapping[str, Loaded]


def read_weights(place: str | os.PathLike[str], *, step: int | None = None, part: str = "model") -> Weights:
    """Read the weights of the newest checkpoint in a folder, of the one of a step, or of the checkpoint that it is.

    Newest means committed last, as for a resume. part: the name in TorchState: "model", "model.NAME" where there are
    several, "ema". Raises StoreError: there is no such checkpoint, it is not one of TorchState, or its tensors are not
    all here; CorruptError; OSError.
    """
    found = _chosen(Path(place).expanduser().absolute(), step)
    with held(Path(found.path)):
        try:
            return _Reader(found, part).read()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            msg = f"{found.path}: does not hold together ({type(error).__name__}: {error})"
            raise StoreError(msg) from error


def _chosen(place: Path, step: int | None) -> Found:
    is_one = step_of(place.name) is not None
    try:
        candidates = list(look(place.parent, among=[place])) if is_one else list(look(place))
    except OSError as error:
        msg = f"{place}: {error.strerror} (name a checkpoint, or the folder of a job's checkpoints)"
        raise StoreError(msg) from error
    found = [each for each in candidates if isinstance(each, Found) and step in (None, each.step)]
    if found:  # a training that was rolled back commits lower steps later
        return max(found, key=lambda each: (committed_ms(each.manifest.created), each.step))
    because = next((f": {each.reason}" for each in candidates if isinstance(each, Refused)), "")
    msg = f"{place}: no complete checkpoint{'' if step is None else f' of step {step}'} there{because}"
    raise StoreError(msg)


def _index(folder: Path, shard: Shard) -> Mapping[str, Node]:
    """Return the index of a rank. Raises StoreError if TorchState did not write it."""
    items = read_items(folder, shard, {INDEX})
    try:
        index = items[INDEX].value() if INDEX in items else None
    except (ValueError, RecursionError):
        index = None
    if not isinstance(index, dict) or index.get("format") != FORMAT or not isinstance(index.get("parts"), dict):
        msg = f"{folder}: was not written by TorchState, or by a newer one"
        raise StoreError(msg)
    return index


def _kept(index: Mapping[str, Node], part: str, folder: Path) -> Mapping[str, Node]:
    """Return a module's state_dict, as nodes."""
    parts = index["parts"]
    modules = [name for name, node in parts.items() if isinstance(node, dict) and node.keys() >= {"state", "buffers"}]
    if part not in modules:
        msg = f"{folder}: has no module {part!r} (part is one of: {', '.join(modules) or 'none, it has no module'})"
        raise StoreError(msg)
    state = parts[part]["state"]
    if not isinstance(state, dict) or TAG in state:
        msg = f"{folder}: the names in {part} are not plain text"
        raise StoreError(msg)
    return state


class _Reader:
    """Reads a module of one checkpoint, from the shards of all ranks that have parts of it."""

    def __init__(self, found: Found, part: str) -> None:
        self._found, self._folder, self._part = found, Path(found.path), part
        self._states: dict[int, Mapping[str, Node]] = {}
        index = _index(self._folder, found.shard(0))
        self._states[0] = _kept(index, part, self._folder)
        self._owners: dict[str, int] = {name: owner for name, owner, *_ in index.get("divided", {"items": []})["items"]}

    def read(self) -> Weights:
        """Read it. Tensors that the checkpoint has once (tied ones) share their memory."""
        nodes = self._states[0]
        tensors = {key: node for key, node in nodes.items() if isinstance(node, dict) and node.get(TAG) == "tensor"}
        others = {key: node for key, node in nodes.items() if key not in tensors}
        places = {key: self._places(key, node) for key, node in tensors.items()}
        wanted: dict[int, set[str]] = {0: set(_items_in(others))}
        for rank, name in (place for each in places.values() for place in each):
            wanted.setdefault(rank, set()).add(name)
        read = {rank: read_items(self._folder, self._found.shard(rank), names) for rank, names in wanted.items()}
        pieces = {key: [self._item(read[rank], rank, name) for rank, name in each] for key, each in places.items()}
        return Weights(
            step=self._found.step,
            path=self._found.path,
            tensors={key: self._joined(key, pieces[key], node.get("sharded")) for key, node in tensors.items()},
            others=others,
            items={name: self._item(read[0], 0, name) for name in _items_in(others)},
        )

    def _places(self, key: str, node: Node) -> list[tuple[int, str]]:
        """Say which items of which ranks make a tensor, in the order of its rows."""
        if "sharded" in node:
            return [(rank, self._state_of(rank)[key]["item"]) for rank in self._ranks_of(key, node["sharded"])]
        return [(self._owners.get(node["item"], 0), node["item"])]

    def _state_of(self, rank: int) -> Mapping[str, Node]:
        """Return the same module as another rank has it."""
        if rank not in self._states:
            self._states[rank] = _kept(_index(self._folder, self._found.shard(rank)), self._part, self._folder)
        return self._states[rank]

    def _item(self, items: Mapping[str, Loaded], rank: int, name: str) -> Loaded:
        if name not in items:
            msg = f"{self._folder}: does not hold together: {name} of rank {rank} is missing"
            raise StoreError(msg)
        return items[name]

    def _ranks_of(self, key: str, layout: Mapping[str, Node]) -> list[int]:
        """Return the ranks whose shards of a DTensor make the whole, in the order of its rows.

        The mesh counts the ranks in C order. Raises StoreError for a tensor that is not spread by rows alone.
        """
        mesh, placements = layout["mesh"], layout["placements"]
        rows = [at for at, placement in enumerate(placements) if placement in ("S(0)", "Shard(dim=0)")]
        rest = [each for each in placements if each in ("R", "Replicate()")]
        if len(rows) > 1 or len(rows) + len(rest) != len(placements) or math.prod(mesh) != self._found.manifest.ranks:
            msg = (
                f"{self._folder}: {key} is spread as {', '.join(placements)} over a mesh of {mesh}; only shards by rows"
                " over one dimension can be put together (save it with powerguard.trainer.dcp)"
            )
            raise StoreError(msg)
        if not rows:
            return [0]
        apart = math.prod(mesh[rows[0] + 1 :])
        return [at * apart for at in range(mesh[rows[0]])]

    def _joined(self, key: str, pieces: list[Loaded], layout: Mapping[str, Node] | None) -> Loaded:
        if layout is None:
            return pieces[0]
        data = b"".join(piece.data for piece in pieces)
        rows, *columns = layout["shape"] or [1]
        is_even = {piece.shape[1:] for piece in pieces} == {tuple(columns)} or not layout["shape"]
        if not is_even or len({piece.dtype for piece in pieces}) != 1 or sum(_rows(piece) for piece in pieces) != rows:
            msg = f"{self._folder}: does not hold together: the shards of {key} do not make {layout['shape']}"
            raise StoreError(msg)
        return Loaded(key, pieces[0].dtype, tuple(layout["shape"]), memoryview(bytearray(data)))


def _items_in(node: Node) -> Iterator[str]:
    """Yield the names of all items in a node."""
    if isinstance(node, dict):
        if TAG in node and "item" in node:
            yield node["item"]
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from _items_in(each)


def _rows(piece: Loaded) -> int:
    return piece.shape[0] if piece.shape else 1


def read_items(folder: Path, shard: Shard, names: Collection[str]) -> dict[str, Loaded]:
    """Read the named items that a shard has, each in memory of its own: only the chunks in which they lie, verified.

    Raises CorruptError, OSError; StoreError where the shard lies on another host.
    """
    if not is_there(folder / shard.file):
        msg = f"{folder / shard.file}: is not here, but on another host (read the checkpoint from a shared folder)"
        raise StoreError(msg)
    wanted = [entry for entry in shard.items if entry.name in names]
    memory = {entry.name: memoryview(bytearray(entry.size_bytes)) for entry in wanted}
    with ShardReader(folder, shard) as file, Snapshot(shard.chunk_bytes) as chunk:
        held_index, size = -1, shard.chunk_bytes
        for entry in wanted:  # in the order in which they lie
            end = entry.offset + entry.size_bytes
            for index in range(entry.offset // size, -(-end // size)):
                begin = index * size
                if index != held_index:
                    file.read_chunk(index, chunk.buffer[: min(size, shard.size_bytes - begin)])
                    held_index = index
                low, high = max(entry.offset, begin), min(end, begin + size)
                memory[entry.name][low - entry.offset : high - entry.offset] = chunk.buffer[low - begin : high - begin]
    return {entry.name: Loaded(entry.name, entry.dtype, entry.shape, memory[entry.name]) for entry in wanted}


# --- safetensors --------------------------------------------------------------------------------------------------

_DTYPES: Final = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}


def export(weights: Weights, target: Path) -> int:
    """Write the tensors as a new safetensors file, durable when this returns; return its size in bytes.

    Tied tensors are written once for each name: the format allows no overlap. Raises StoreError for a dtype that the
    format has not; FileExistsError, OSError.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(weights.step)}}
    end = 0
    for name, tensor in weights.tensors.items():
        if tensor.dtype not in _DTYPES or name in entries:
            what = tensor.dtype if name not in entries else "tensor of this name"
            msg = f"{name}: safetensors has no {what}"
            raise StoreError(msg)
        begin, end = end, end + tensor.data.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(target.parent))
    if is_there(target):
        raise FileExistsError(errno.EEXIST, "is there already (name a new file)", str(target))
    unfinished = target.with_name(f".{target.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for tensor in weights.tensors.values():
                file.write(tensor.data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    Disk().sync_folder(target.parent)
    return 8 + len(header) + end
