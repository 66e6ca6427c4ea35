"""The state of torch objects as named buffers and one small JSON text, and back bit for bit. No pickle.

A `state_dict()` is a tree of dicts, lists and plain values with tensors at its ends. `Packer` turns the tensors into
items (raw bytes with dtype and shape) and the rest into JSON; `Unpacker` turns both into an equal tree. What it does
not know it refuses by name: a checkpoint that silently left something out would be found wanting after the power cut.

Kept: None, bool, int, float, str, bytes, list, tuple, torch.Size, dict (any of these as keys), OrderedDict, Counter,
torch.dtype, torch.device, dense tensors of every whole-byte dtype on any device, DTensors (the local shard of each
rank), numpy arrays and numbers. Tensors that are one and the same (tied weights) are kept once.
"""

import base64
import json
import math
import os
import secrets
import sys
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from powerguard.trainer.store.items import Buffer, Item, Loaded
from powerguard.trainer.weights import TAG, read_weights

Json = Any
"""What json.dumps takes: None, bool, int, float, str, list and dict of these."""

Tensor = Any
"""A torch.Tensor; a name of our own, because torch's types are not known where torch is not installed."""

Value = Any
"""Whatever a state may hold."""

_DEEPEST: Final = 100
_MANY: Final = 64
_TOKEN: Final = secrets.token_hex(16)
_LONGEST_NAME: Final = 480  # a manifest takes 512
_DTYPE_NAMES: Final = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
DTYPES: Final[Mapping[str, Any]] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
_NAMES: Final[Mapping[Any, str]] = {dtype: name for name, dtype in DTYPES.items()}


class StateError(Exception):
    """What cannot be kept, or does not fit what is there: which key, why, what would be right."""


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A dense tensor under its name, live until it is copied. dtype: its torch name without "torch.".

    whole: the DTensor of which it is this rank's part, and which counts the changes; None: it does so itself.
    """

    name: str
    tensor: Tensor
    whole: Tensor | None = None

    @property
    def dtype(self) -> str:
        return _NAMES[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def size_bytes(self) -> int:
        return int(self.tensor.numel() * self.tensor.element_size())

    def copy_to(self, target: memoryview) -> None:
        """Fill `target` with the elements in C order, whatever the strides and the device; `Copier` copies many."""
        tensor = self.tensor.detach().resolve_conj().resolve_neg()
        if tensor.numel() == 0:
            return
        torch.frombuffer(target, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)


@dataclass(frozen=True, slots=True)
class Sharded:
    """The part of a DTensor that this rank has, and of what: global shape, placements and mesh, in words."""

    local: Tensor
    layout: Mapping[str, Json]


# --- Out ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """A dict of many tensors, or of small dicts of tensors, as it was packed. ends: where and what each tensor is.

    firsts, names: which of the tensors became items, tied ones once, and under which names. text: the node, as JSON.
    """

    keys: list[Any]
    ends: tuple[list[Any], ...]
    firsts: list[int]
    names: list[str]
    text: str


class Packer:
    """Gathers the items of one state; `pack` returns the JSON that stands for a value.

    known: rows by place, from the state before. While they stay the same, nothing of them is made again; a node is then
    a key of `texts`, to be replaced in the JSON. structure: equal for two states whose items differ in content alone.
    """

    def __init__(self, known: dict[str, Rows] | None = None) -> None:
        self.items: list[Item] = []
        self.texts: dict[str, str] = {}
        self.structure: list[Any] = []
        self._known = known
        self._names: set[str] = set()
        self._seen: dict[Hashable, str] = {}
        self._pointers: set[int] = set()
        self._again: list[Rows] = []
        """Those that were packed as the last time, and whose tensors are not in `_seen`."""

    def pack(self, where: str, value: object, *, depth: int = 0) -> Json:
        """Return JSON for the value; its tensors become items named after `where`. Raises StateError."""
        if depth > _DEEPEST:
            msg = f"{where}: more than {_DEEPEST} levels deep (does it contain itself?)"
            raise StateError(msg)
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "is": repr(value)}  # type: ignore[arg-type]
        if kind is list:
            if _is_flat(value):  # type: ignore[arg-type]
                return value
            return [self.pack(f"{where}/{at}", part, depth=depth + 1) for at, part in enumerate(value)]  # type: ignore[var-annotated, arg-type]
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(where, value)
        if isinstance(value, Mapping):
            is_large = self._known is not None and kind is dict and len(value) >= _MANY
            return (self._pack_rows if is_large else self._pack_mapping)(where, value, depth)
        return self._pack_rest(where, value, depth)

    def stand_in(self, text: str) -> str:
        """Return what stands in a node for this JSON text, until `text` puts that in its place."""
        key = f"{_TOKEN}/{len(self.texts)}"
        self.texts[key] = text
        return key

    def text(self, node: Json) -> str:
        """Return a node as JSON text."""
        text: str = json.dumps(node, separators=(",", ":"))
        for key, rows in self.texts.items():
            text = text.replace(json.dumps(key), rows, 1)
        return text

    def _pack_rows(self, where: str, value: Mapping[Any, Any], depth: int) -> Json | None:
        """Pack a dict of many tensors as the last time, if they are the same; None: it is another kind of dict."""
        keys: list[Any] = []
        kinds = {type(key) for key in value}
        tensors: list[Tensor] = []
        for key, part in value.items():
            if type(part) is dict:
                keys.append((key, *part))
                kinds.update(map(type, part))
                tensors += part.values()
            else:
                keys.append(key)
                tensors.append(part)
        known, self._known = self._known, None
        try:
            # Of other keys two may be equal and not the same: 1, 1.0 and True; a tuple, and the keys of a dict.
            if known is None or not kinds <= {int, str} or not all(map(_is_plain, tensors)):
                return self._pack_mapping(where, value, depth)
            rows = known.get(where)
            ends = _ends(tensors)
            if rows is None or rows.keys != keys or rows.ends != ends or self._meets(rows):
                begun, structure = len(self.items), self.structure[:]
                node = self._pack_mapping(where, value, depth)
                first_at: dict[Hashable, int] = {}
                for at, one in enumerate(zip(*ends, strict=True)):
                    first_at.setdefault(one, at)
                names = [item.name for item in self.items[begun:]]
                if len(names) != len(first_at) or not all(each.numel() for each in tensors):
                    return node  # tied to what came before, or empty: it is packed one by one each time
                text = json.dumps(node, separators=(",", ":"))
                rows = known[where] = Rows(keys, ends, list(first_at.values()), names, text)
                self.structure = structure
            else:
                self.items += [TensorItem(name, tensors[at]) for name, at in zip(rows.names, rows.firsts, strict=True)]
                self._names.update(rows.names)
                self._pointers.update(rows.ends[0])
                self._again.append(rows)
            self.structure.append(rows)
            return self.stand_in(rows.text)
        finally:
            self._known = known

    def _meets(self, rows: Rows) -> bool:
        """Something that was packed before has a name or memory of these, so that they are packed one by one."""
        return not (self._pointers.isdisjoint(rows.ends[0]) and self._names.isdisjoint(rows.names))

    def _pack_mapping(self, where: str, value: Mapping[Any, object], depth: int) -> Json:
        kinds = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
        word = kinds.get(type(value))
        if word is None:
            msg = f"{where}: a {_kind(value)} cannot be kept (dict, OrderedDict and Counter can)"
            raise StateError(msg)
        pairs = []
        for key, part in value.items():
            inner = f"{where}/{key}"
            pairs.append(
                (self.pack(f"{inner} (the key)", key, depth=depth + 1), self.pack(inner, part, depth=depth + 1))
            )
        if word == "dict" and all(type(key) is str for key in value) and TAG not in value:
            return dict(pairs)
        return {TAG: word, "of": [list(pair) for pair in pairs]}

    def _pack_rest(self, where: str, value: object, depth: int) -> Json:
        match value:
            case torch.Size():
                return {TAG: "size", "of": list(value)}
            case tuple() if type(value) is tuple:
                return {
                    TAG: "tuple",
                    "of": [self.pack(f"{where}/{at}", p, depth=depth + 1) for at, p in enumerate(value)],
                }
            case bytes() if type(value) is bytes:
                return {TAG: "bytes", "is": base64.b64encode(value).decode()}
            case torch.dtype() if value in _NAMES:
                return {TAG: "dtype", "is": _NAMES[value]}
            case torch.device():
                return {TAG: "device", "is": str(value)}
            case _:
                pass
        numpy = sys.modules.get("numpy")
        if numpy is not None and (isinstance(value, numpy.generic) or type(value) in (numpy.ndarray, numpy.memmap)):
            return self._pack_numpy(where, value, number=isinstance(value, numpy.generic))
        msg = (
            f"{where}: a {_kind(value)} cannot be kept: a checkpoint holds tensors and plain values only"
            " (leave it out, or give it as plain values)"
        )
        raise StateError(msg)

    def _pack_numpy(self, where: str, value: Value, *, number: bool) -> Json:
        if value.dtype.kind not in "biufc" or not value.dtype.isnative:
            msg = f"{where}: a numpy array of {value.dtype} cannot be kept (plain numbers in native order can)"
            raise StateError(msg)
        name = self._name(where)
        self.items.append(Buffer(name, value.tobytes(), value.dtype.name, tuple(value.shape)))
        self.structure.append((name, value.dtype.name, value.shape))
        return {TAG: "numpy", "item": name, "number": number}

    def _pack_tensor(self, where: str, value: Tensor) -> Json:
        if value.is_nested:
            msg = f"{where}: a nested tensor cannot be kept (keep its parts in a list)"
            raise StateError(msg)
        layout = layout_of(value)
        tensor = value.detach() if layout is None else value.detach().to_local()
        plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or layout is not None
        if not plain or tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
            what = f"{_kind(value)} ({tensor.layout}, {tensor.dtype})"
            msg = f"{where}: a {what} cannot be kept (dense tensors of whole bytes, and DTensors of these, can)"
            raise StateError(msg)
        if tensor.is_meta:
            msg = f"{where}: a tensor on the meta device has no data to keep (materialise the model first)"
            raise StateError(msg)
        if is_freed(tensor):
            msg = f"{where}: the memory of this tensor has been freed (gather it before guard.step, or leave it out)"
            raise StateError(msg)
        if self._again and tensor.data_ptr() in self._pointers:
            for rows in self._again:
                ones = list(zip(*rows.ends, strict=True))
                self._seen.update((ones[at], name) for at, name in zip(rows.firsts, rows.names, strict=True))
            self._again.clear()
        one = place_of(tensor)
        name = self._seen.get(one) if tensor.numel() else None
        if name is None:
            name = self._name(where)
            self._seen[one] = name
            self._pointers.add(tensor.data_ptr())
            self.items.append(TensorItem(name, tensor, None if layout is None else value))
            self.structure.append((name, *one[1:4]))
        node: Json = {TAG: "tensor", "item": name}
        if tensor.device.type != "cpu":
            node["device"] = str(tensor.device)
        if not tensor.is_contiguous():
            node["strides"] = list(torch.empty_like(tensor, device="meta").stride())
        if layout is not None:
            node["sharded"] = layout
        return node

    def _name(self, where: str) -> str:
        """Return a name of its own for an item: two keys may read the same ("a/b" of one dict, "b" of "a")."""
        where = where[:_LONGEST_NAME]
        if not where.isprintable():  # the key itself is in the index
            where = "".join(each if each.isprintable() else "?" for each in where)
        name, more = where, 2
        while name in self._names:
            name, more = f"{where}~{more}", more + 1
        self._names.add(name)
        return name


def _ends(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Where each tensor lies, and as what: two that are alike in all of it are one and the same."""
    return (
        [each.data_ptr() for each in tensors],
        [each.device for each in tensors],
        [each.dtype for each in tensors],
        [each.shape for each in tensors],
        [each.stride() for each in tensors],
        [each.is_conj() for each in tensors],
        [each.is_neg() for each in tensors],
    )


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies, and as what."""
    return next(zip(*_ends([tensor]), strict=True))


def _is_flat(values: list[Any]) -> bool:
    """Return whether a list is its own JSON. A sampler may keep millions of numbers, and one by one takes seconds."""
    kinds = set(map(type, values))
    if not kinds <= {type(None), bool, int, str, float}:
        return False
    return float not in kinds or all(math.isfinite(each) for each in values if type(each) is float)


def _is_plain(value: object) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]


def layout_of(value: Tensor) -> dict[str, Json] | None:
    """How a DTensor is spread over its ranks, comparable across runs; None for any other tensor."""
    sharding = sys.modules.get("torch.distributed.tensor")  # a job without it has no DTensor, and need not load it
    if sharding is None or not isinstance(value, sharding.DTensor):
        return None
    return {
        "shape": list(value.shape),
        "placements": [str(placement) for placement in value.placements],
        "mesh": list(value.device_mesh.shape),
    }


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank has, sharing its memory; any other tensor itself."""
    return tensor if layout_of(tensor) is None else tensor.detach().to_local()


def is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor's memory was freed (`storage().resize_(0)`): to touch it would end the process."""
    return bool(tensor.numel() and not tensor.untyped_storage().nbytes())


def flat(tensor: Tensor) -> Tensor:
    """The elements in C order, in one dimension: a view where they lie so."""
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    tensor = tensor.resolve_neg().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))  # view(-1) would leave a single element any stride


def mark_of(name: str, tensor: Tensor) -> bytes:
    """Return a line for a digest of several tensors: the name, what it is, and the sum of its bytes."""
    part = local(tensor.detach())
    total = int(flat(part).view(torch.uint8).sum(dtype=torch.int64)) if part.numel() else 0
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {total}\n".encode()


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# --- In -----------------------------------------------------------------------------------------------------------


class Unpacker:
    """Makes the values again from verified items.

    Tensors come as copies in memory of their own, one object for each that was kept.
    Each lies where the parameters of its device lie now: a resume may find other GPUs, or another number of them.

    on_cpu: all of them on the CPU; the caller moves them to where they belong.
    """

    def __init__(self, items: Mapping[str, Loaded], *, on_cpu: bool = False) -> None:
        self._items = items
        self._on_cpu = on_cpu
        self._made: dict[tuple[str, str], Any] = {}
        self._filled: dict[Hashable, tuple[str, str]] = {}
        self._places: dict[str, torch.device] = {}

    def unpack(self, where: str, node: Json) -> Value:
        """Return the value that a node stands for. Raises StateError when the checkpoint does not hold together."""
        if isinstance(node, list):
            if _is_flat(node):
                return node[:]
            return [self.unpack(f"{where}/{at}", part) for at, part in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if TAG not in node:
            return {key: self.unpack(f"{where}/{key}", part) for key, part in node.items()}
        try:
            return self._unpack_tagged(where, node)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            msg = f"{where}: the checkpoint does not hold together here ({type(error).__name__}: {error})"
            raise StateError(msg) from error

    def _unpack_tagged(self, where: str, node: Mapping[str, Json]) -> Value:
        kind = node[TAG]
        if kind == "tensor":
            return self._tensor(node)
        if kind == "numpy":
            return self._numpy(node)
        simple = {
            "float": float,
            "bytes": base64.b64decode,
            "dtype": lambda name: DTYPES[name],
            "device": torch.device,
        }
        if kind in simple:
            return simple[kind](node["is"])
        if kind == "size":
            return torch.Size(node["of"])
        if kind == "tuple":
            return tuple(self.unpack(where, node["of"]))
        kinds: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
        pairs = {self.unpack(where, key): self.unpack(f"{where}/{key}", part) for key, part in node["of"]}
        return kinds[kind](pairs)

    def _tensor(self, node: Mapping[str, Json]) -> Value:
        key = (node["item"], node.get("device", "cpu"))
        tensor = self._made.get(key)
        if tensor is None:
            place = self._place(node.get("device", "cpu"))
            tensor = self._made[key] = _copied(self._items[node["item"]], place, node.get("strides"))
        return tensor if "sharded" not in node else Sharded(tensor, node["sharded"])

    def _numpy(self, node: Mapping[str, Json]) -> Value:
        import numpy as np

        loaded = self._items[node["item"]]
        array = np.frombuffer(bytes(loaded.data), dtype=loaded.dtype).reshape(loaded.shape).copy()
        return array[()] if node["number"] else array

    def _place(self, device: str) -> torch.device:
        """Return the device for a tensor that was kept from `device`.

        That is where parameters from there have been put; else the same device, if it is here; else this process's GPU,
        or the CPU where there is none.
        """
        if self._on_cpu:
            return torch.device("cpu")
        place = self._places.get(device)
        if place is None:
            place = torch.device(device)
            if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
                place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return place

    def put(self, node: Mapping[str, Json], tensor: Tensor) -> None:
        """Copy a node's bytes into a tensor of its dtype and shape; what was kept from the same device follows it."""
        fill(tensor, self.loaded(node))
        if tensor.numel():
            self._filled.setdefault(place_of(tensor), (node["item"], node.get("device", "cpu")))
        device = node.get("device")  # what was on the CPU stays there: a step counter, the state of a generator
        if device is not None and (device not in self._places or str(tensor.device) == device):
            self._places[device] = tensor.device

    def fill(self, node: Mapping[str, Json], tensor: Tensor) -> None:
        """Copy a node's bytes into a tensor of its dtype and shape; `unpack` then returns it, and no new one.

        A tensor that has another node's bytes already, which was one with it only here, is left as it is.
        """
        key = node["item"], node.get("device", "cpu")
        if self._filled.setdefault(place_of(tensor), key) == key:
            self.put(node, tensor)
            self._made[key] = tensor

    def are_same(self, one: Mapping[str, Json], other: Mapping[str, Json]) -> bool:
        """Whether two tensors' nodes have the same bytes."""
        return one["item"] == other["item"] or self.loaded(one).data == self.loaded(other).data

    def inside(self, node: Json) -> Mapping[Any, Json]:
        """Return the node of each value in that of a dict, list or tuple, by key or number; {}: it is another value."""
        if isinstance(node, dict) and node.get(TAG) == "tuple":
            node = node["of"]
        if isinstance(node, list):
            return dict(enumerate(node))
        is_dict = isinstance(node, dict) and node.get(TAG, "dict") in ("dict", "ordered", "counter")
        return self.pairs(node) if is_dict else {}

    def loaded(self, node: Mapping[str, Json]) -> Loaded:
        """The bytes of a tensor's node, as they lie in the checkpoint."""
        try:
            return self._items[node["item"]]
        except KeyError as error:
            msg = f"the checkpoint does not hold together: {node.get('item')} is missing"
            raise StateError(msg) from error

    def pairs(self, node: Json) -> dict[Any, Json]:
        """The keys of a dict's node, each with the node of its value."""
        if not isinstance(node, dict):
            msg = f"the checkpoint does not hold together: {str(node)[:40]} instead of a dict"
            raise StateError(msg)
        return {self.unpack("a key", key): part for key, part in node["of"]} if TAG in node else node


def load_weights(place: str | os.PathLike[str], *, step: int | None = None, part: str = "model") -> dict[str, Value]:
    """Return the weights alone: what `model.load_state_dict` takes, on the CPU. See `weights.read_weights`."""
    found = read_weights(place, step=step, part=part)
    others = {key: Unpacker(found.items, on_cpu=True).unpack(key, node) for key, node in found.others.items()}
    return {key: _on_cpu(tensor) for key, tensor in found.tensors.items()} | others


def _on_cpu(loaded: Loaded) -> Tensor:
    """Return a tensor over the loaded bytes."""
    if not loaded.data.nbytes:
        return torch.empty(loaded.shape, dtype=DTYPES[loaded.dtype])
    return torch.frombuffer(loaded.data, dtype=DTYPES[loaded.dtype]).view(loaded.shape)


def _copied(loaded: Loaded, device: torch.device, strides: Sequence[int] | None) -> Tensor:
    """Return a new tensor with the loaded bytes. Raises KeyError, ValueError, RuntimeError.

    strides: None: C order. A fused optimizer needs moments that lie as their parameter does (channels_last, say).
    """
    dtype = DTYPES[loaded.dtype]
    if strides is None:
        tensor = torch.empty(loaded.shape, dtype=dtype, device=device)
    else:
        tensor = torch.empty_strided(loaded.shape, strides, dtype=dtype, device=device)
    fill(tensor, loaded)
    return tensor


def fill(tensor: Tensor, loaded: Loaded) -> None:
    """Copy the loaded bytes into a tensor of their dtype and shape, wherever and however it lies.

    torch copies with all its threads, and to a GPU straight from the memory that the disk was read into.
    """
    if tensor.numel():
        kept = _kept(loaded)
        for dim in _repeated(tensor):
            tensor, kept = tensor.narrow(dim, 0, 1), kept.narrow(dim, 0, 1)
        tensor.detach().copy_(kept)


def holds(tensor: Tensor, loaded: Loaded) -> bool:
    """Return whether a tensor of their dtype and shape has the loaded bytes, bit for bit."""
    kept = flat(_kept(loaded)).view(torch.uint8) if tensor.numel() else None
    return kept is None or torch.equal(flat(tensor.detach()).view(torch.uint8), kept.to(tensor.device))


def has_other_rows(tensor: Tensor, loaded: Loaded) -> bool:
    """Return whether the loaded bytes differ along a dimension in which `tensor` is one row many times (expand)."""
    dims = _repeated(tensor)
    if not dims:
        return False
    kept = _kept(loaded).unsqueeze(-1).view(torch.uint8)  # bit for bit: a NaN is its own equal
    return not all(torch.equal(kept, kept.narrow(dim, 0, 1).expand_as(kept)) for dim in dims)


def _repeated(tensor: Tensor) -> list[int]:
    return [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]


def _kept(loaded: Loaded) -> Tensor:
    data = bytearray(loaded.data) if loaded.data.readonly else loaded.data  # torch warns of what is read-only
    return torch.frombuffer(data, dtype=DTYPES[loaded.dtype]).view(loaded.shape)
