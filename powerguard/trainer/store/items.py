"""What a checkpoint is made of: named buffers, and small plain values as JSON. Stdlib only.

A state is asked for its items in the training thread, at a step boundary; they are copied into a snapshot before
training goes on, so they may be views of live memory. What comes back was verified, and is a view too: copy what stays.
"""

import ctypes
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from powerguard.trainer.store.manifest import DTYPE_BYTES, Layout

HostBuffer = Any
"""Anything with the buffer protocol, C-contiguous. (Its type has a name only from Python 3.12 on.)"""

JSON: Final = "json"
_PIECE: Final = 32 << 20  # copied at a time: other threads get their turn in between
_CODES: Final = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float32": "f",
    "float64": "d",
}
"""The dtypes that memoryview.cast() can make, and its code for each."""

_KINDS: Final = {
    "?": "bool",
    **dict.fromkeys("bhilq", "int"),
    **dict.fromkeys("cBHILQ", "uint"),
    **dict.fromkeys("fd", "float"),
}
_C_TYPES: Final = {
    "bool": ctypes.c_bool,
    **{f"int{bits}": getattr(ctypes, f"c_int{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": getattr(ctypes, f"c_uint{bits}") for bits in (8, 16, 32, 64)},
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}
"""The dtypes in which a buffer without elements keeps a shape of several dimensions."""


class Flight(Protocol):
    """Bytes on their way from a device into a snapshot. Asked by any thread."""

    @property
    def is_over(self) -> bool:
        """All have arrived, as far as `arrived` has seen."""
        ...

    def arrived(self) -> int:
        """Return up to which byte all are there. Raises what makes them worthless; never waits."""
        ...


class Copier(Protocol):
    """How a state with a device copies its items; a state without one has its items copied one after the other.

    A state offers it as its attribute `copier`. how: in words, how the newest state was copied.
    """

    how: str

    def begin(
        self, items: "PlannedItems", memory: memoryview, arrived: Callable[[int], None], *, late: bool
    ) -> Flight | None:
        """Copy what the state's `items()` returned, in the training thread.

        arrived: called with how many bytes, from the beginning, are there. late: training may go on before all are;
        those that are not are on the flight that is returned. Raises what an item or the device raises.
        """
        ...

    def land(self) -> None:
        """Wait until nothing is on its way any more, also of a copy that was interrupted. Any thread."""
        ...

    @property
    def may_register(self) -> bool:
        """Whether there is a GPU to register memory with."""
        ...

    def register(self, memory: memoryview, *, whole: bool = False) -> bool:
        """Make the next piece of a snapshot's memory known to the device. False: there is none, or it cannot be."""
        ...

    def unregister(self, memory: memoryview) -> None:
        """Take all of that back."""
        ...

    def before_update(self) -> None:
        """Let what training changes next come after the copies that are under way."""
        ...

    def forsake(self) -> None:
        """In a child of fork: what is registered is the parent's."""
        ...


class Item(Protocol):
    """One named buffer of the state, as it is now.

    dtype: "float32", "bfloat16", "uint8" ...; "json" for a plain value. shape: () for a scalar or a plain value.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size_bytes(self) -> int: ...

    def copy_to(self, target: memoryview) -> None:
        """Fill the target, which has exactly `size_bytes`; a tensor on a GPU copies straight into the snapshot."""
        ...


class PlannedItems(list[Any]):
    """Items in the order of a copier's plan: where they lie in a snapshot, and in which runs they are copied."""

    def __init__(self, items: Iterable[Item], layout: Layout, runs: list[Any]) -> None:
        super().__init__(items)
        self.layout = layout
        self.runs = runs


@dataclass(frozen=True, slots=True)
class Buffer:
    """An item over host memory: anything with the buffer protocol that is C-contiguous.

    data: read when the snapshot is taken, not before; its size must not change until then.
    shape: (-1,) for one dimension of as many elements as there are.
    """

    name: str
    data: HostBuffer
    dtype: str = "uint8"
    shape: tuple[int, ...] = (-1,)

    def __post_init__(self) -> None:
        if self.shape == (-1,):
            object.__setattr__(self, "shape", (self.size_bytes // DTYPE_BYTES.get(self.dtype, 1),))

    @property
    def size_bytes(self) -> int:
        return _memory(self.name, self.data).nbytes

    def copy_to(self, target: memoryview) -> None:
        source = _memory(self.name, self.data)
        flat = source.cast("B") if source.nbytes else memoryview(b"")
        for start in range(0, len(flat), _PIECE):
            target[start : start + _PIECE] = flat[start : start + _PIECE]

    @classmethod
    def of(cls, name: str, data: HostBuffer) -> "Buffer":
        """Take dtype and shape from the buffer itself.

        Raises TypeError for a buffer that `Loaded.view` could not return in the same dtype and shape.
        """
        view = _memory(name, data)
        shape = tuple(view.shape or ())
        dtype = _dtype_of(view)
        if dtype is None or tuple(getattr(data, "shape", shape)) != shape:
            msg = (
                f"{name}: an array of {getattr(data, 'dtype', view.format)} cannot be restored: {_remedy(view.format)}"
            )
            raise TypeError(msg)
        if hasattr(data, "mask") and hasattr(data, "fill_value"):  # numpy.ma: the buffer holds the values alone
            msg = f"{name}: a masked array would lose its mask: save x.data and x.mask as two items"
            raise TypeError(msg)
        return cls(name, data, dtype, shape)

    @classmethod
    def json(cls, name: str, value: object) -> "Buffer":
        """Keep a small plain value: what JSON can say, and NaN and the infinities. Raises TypeError for all else."""
        _check_keys(name, value)
        try:
            text = json.dumps(value, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            msg = f"{name}: is neither a buffer nor a plain value (leave it out, or give it as such): {error}"
            raise TypeError(msg) from error
        return cls(name, text.encode(), JSON, ())


@dataclass(frozen=True, slots=True)
class Loaded:
    """One item that came back, verified. data: its bytes, in memory that the reader was given or took."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def value(self) -> Any:  # noqa: ANN401 - whatever the state put in
        """The plain value of a "json" item. Raises ValueError when it is none."""
        if self.dtype != JSON:
            msg = f"{self.name}: is {self.dtype}, not a plain value"
            raise ValueError(msg)
        return json.loads(bytes(self.data))

    def view(self) -> memoryview:
        """The data in its own dtype and shape, where memoryview knows the dtype; else its bytes."""
        code = _CODES.get(self.dtype)
        if code is None:
            return self.data[:]
        if not math.prod(self.shape):
            return _empty(self.dtype, self.shape)
        return self.data.cast(code, self.shape)  # type: ignore[call-overload,no-any-return] # cast() takes these codes


class State(Protocol):
    """What is saved and brought back."""

    def items(self) -> Iterable[Item]:
        """Yield every item, in the training thread at a step boundary. The same names in the same order is fastest."""
        ...

    def load(self, items: Mapping[str, Loaded]) -> None:
        """Take over what was saved, before the first step. Copy: the memory behind it is used again."""
        ...


class Parts:
    """A state for jobs without torch.

    save: returns name -> buffer or plain value (what JSON can say). A buffer is C-contiguous and little-endian, of
    bool, int, uint, float32 or float64. A dict has text as its keys, a tuple comes back as a list, and a scalar of
    numpy as a Python number. Anything else is a TypeError that names the item, at the first step.
    load: is given the same, buffers as memoryviews in their own dtype and shape. They are copies, which it may keep.
    """

    def __init__(self, save: Callable[[], Mapping[str, object]], load: Callable[[Mapping[str, Any]], None]) -> None:
        self._save = save
        self._load = load

    def items(self) -> Iterable[Item]:
        kept: object = self._save()
        if not isinstance(kept, Mapping):
            msg = f"save() of Parts returned {kept!r:.80}: must return a dict, name -> buffer or plain value"
            raise TypeError(msg)
        for name, value in kept.items():
            yield _item(name, value)

    def load(self, items: Mapping[str, Loaded]) -> None:
        self._load({name: item.value() if item.dtype == JSON else _copied(item).view() for name, item in items.items()})


def _copied(item: Loaded) -> Loaded:
    """Return an item in memory of its own: arrays over it may be kept, while the next save reuses the snapshot."""
    return replace(item, data=memoryview(bytearray(item.data)))


def _item(name: str, value: object) -> Item:
    """Return a buffer as it is, and anything else as a plain value."""
    if isinstance(value, (str, int, float, list, tuple, dict)):
        return Buffer.json(name, value)
    try:
        memoryview(value)  # type: ignore[arg-type] # that is the question
    except TypeError:
        return Buffer.json(name, value)
    except (ValueError, BufferError):  # a buffer of a kind that memoryview does not know: the next line names it
        return Buffer.of(name, value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return Buffer.json(name, value.item())
    return Buffer.of(name, value)


def _memory(name: str, data: HostBuffer) -> memoryview:
    try:
        view = memoryview(data)
    except (TypeError, ValueError, BufferError) as error:
        msg = f"{name}: its memory cannot be read ({error}): {_remedy('')}"
        raise TypeError(msg) from error
    if not view.c_contiguous:
        msg = f"{name}: is not C-contiguous: give a copy that is (numpy.ascontiguousarray(x))"
        raise TypeError(msg)
    return view


def _dtype_of(view: memoryview) -> str | None:
    """Return the dtype of a buffer; None when no memoryview of it can be made again."""
    kind = _KINDS.get(view.format.lstrip("@=<"), "")  # ctypes puts "<" before its codes
    dtype = kind if kind == "bool" else f"{kind}{view.itemsize * 8}"
    return dtype if dtype in _CODES else None


def _remedy(code: str) -> str:
    if code[:1] in {">", "!"}:
        return "it is big-endian; give x.astype(x.dtype.newbyteorder('<'))"
    if "Z" in code:
        return "it is complex; give x.view(x.real.dtype), and take .view(...) of the array that it is loaded into"
    return (
        "give its bits as whole numbers (float16, bfloat16: x.view('uint16'), dates: x.view('int64')), text as a list"
    )


def _check_keys(name: str, value: object) -> None:
    """Raise TypeError for a key that JSON would turn into text."""
    if isinstance(value, dict):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None or None in value:
            msg = f"{name}: the key {wrong!r} of a dict would come back as text: give str(key), or a list of pairs"
            raise TypeError(msg)
    if isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            _check_keys(name, each)


def _empty(dtype: str, shape: tuple[int, ...]) -> memoryview:
    """Return a view without elements: memoryview.cast() refuses a 0 in a shape."""
    if len(shape) == 1:
        return memoryview(bytes(8)).cast(_CODES[dtype])[:0]  # type: ignore[call-overload,no-any-return]
    kind: Any = _C_TYPES[dtype]
    for length in reversed(shape):
        kind = kind * length
    return memoryview(kind())
