"""What a checkpoint is made of: named buffers, and small plain values as JSON. Stdlib only.

A state is asked for its items in the training thread, at a step boundary; they are copied into a snapshot before
training goes on, so they may be views of live memory. What comes back was verified, and is a view too: copy what stays.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from powerguard.trainer.manifest import DTYPE_BYTES

HostBuffer = Any
"""Anything with the buffer protocol, C-contiguous. (Its type has a name only from Python 3.12 on.)"""

JSON: Final = "json"
_PIECE: Final = 32 << 20  # copied at a time: other threads get their turn in between
_FORMATS: Final = {
    "?": "bool",
    "b": "int8",
    "B": "uint8",
    "h": "int16",
    "H": "uint16",
    "i": "int32",
    "I": "uint32",
    "l": "int64",
    "L": "uint64",
    "q": "int64",
    "Q": "uint64",
    "e": "float16",
    "f": "float32",
    "d": "float64",
}
_CASTS: Final = {dtype: code for code, dtype in _FORMATS.items() if code not in "lL"}


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
        return memoryview(self.data).nbytes

    def copy_to(self, target: memoryview) -> None:
        source = memoryview(self.data)
        flat = source.cast("B") if source.nbytes else memoryview(b"")
        for start in range(0, len(flat), _PIECE):
            target[start : start + _PIECE] = flat[start : start + _PIECE]

    @classmethod
    def of(cls, name: str, data: HostBuffer) -> "Buffer":
        """Take dtype and shape from the buffer itself, where it tells them in a way that we know."""
        view = memoryview(data)
        dtype = _FORMATS.get(view.format)
        if dtype is None:
            return cls(name, data)
        return cls(name, data, dtype, tuple(view.shape or ()))

    @classmethod
    def json(cls, name: str, value: object) -> "Buffer":
        """Keep a small plain value: what JSON can say, and NaN and the infinities. Raises TypeError for all else."""
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
        """The data in its own shape, where memoryview knows the dtype; else its bytes."""
        code = _CASTS.get(self.dtype)
        if code is None or not math.prod(self.shape):
            return self.data
        return self.data.cast(code, self.shape)  # type: ignore[call-overload,no-any-return] # cast() takes these codes


class State(Protocol):
    """What is saved and brought back."""

    def items(self) -> Iterable[Item]:
        """Tell every item, in the training thread at a step boundary. The same names in the same order is fastest."""
        ...

    def load(self, items: Mapping[str, Loaded]) -> None:
        """Take over what was saved, before the first step. Copy: the memory behind it is used again."""
        ...


class Parts:
    """A state for jobs without torch.

    save: returns name -> buffer or plain value (what JSON can say). load: is given the same, buffers as memoryviews in
    their own shape, valid only during the call.
    """

    def __init__(self, save: Callable[[], Mapping[str, object]], load: Callable[[Mapping[str, Any]], None]) -> None:
        self._save = save
        self._load = load

    def items(self) -> Iterable[Item]:
        for name, value in self._save().items():
            yield Buffer.json(name, value) if _is_plain(value) else Buffer.of(name, value)

    def load(self, items: Mapping[str, Loaded]) -> None:
        self._load({name: item.value() if item.dtype == JSON else item.view() for name, item in items.items()})


def _is_plain(value: object) -> bool:
    try:
        memoryview(value)  # type: ignore[arg-type] # that is the question
    except TypeError:
        return True
    return False
