"""The model as JSON-able data and back: what the journal keeps, and what a replay reads.

Every dataclass becomes an object with its class name under `kind`, so that the members of a union can be told apart;
enums become their values, tuples become lists. A journal outlives the daemon that wrote it: keys that are not known are
ignored, and keys that are missing take the field's default. Decoders are built once for each class.
"""

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar, overload

KIND = "kind"
"""The key that names the class of an object."""

T = TypeVar("T")
_Decode = Callable[[Any], object]


class PlainError(ValueError):
    """Data that cannot be written or read: where in the value, what was found, and what would be right."""

    def __init__(self, message: str, path: str = "") -> None:
        """Keep message and path apart, so that each level can put its own name in front."""
        super().__init__(f"{path}: {message}" if path else message)
        self.message = message
        self.path = path

    def under(self, name: str | int) -> "PlainError":
        """Return the same error as seen from one level further out: from a field, or from a place in a tuple."""
        step = f"[{name}]" if isinstance(name, int) else name
        dot = "." if self.path and not self.path.startswith("[") else ""
        return PlainError(self.message, f"{step}{dot}{self.path}")


# --- Writing ------------------------------------------------------------------------------------------------------


def to_plain(value: object) -> object:
    """Return value as None, bool, int, float, str, list and dict only.

    Raises PlainError for what JSON cannot hold (infinity, NaN) and for everything that is not plain data.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if not math.isfinite(value):
            message = f"cannot keep {value} (finite numbers only; None for unknown)"
            raise PlainError(message)
        return value
    if type(value) is tuple:
        return [_part(index, item) for index, item in enumerate(value)]
    kind = type(value).__name__
    if not dataclasses.is_dataclass(value):
        message = f"cannot keep a {kind} (numbers, strings, enums, tuples and dataclasses only)"
        raise PlainError(message)
    plain = {each.name: _part(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)}
    if KIND in plain:
        message = f"{kind} has a field named {KIND!r}, which names the class (call it something else)"
        raise PlainError(message)
    return {KIND: kind, **plain}


def _part(name: str | int, value: object) -> object:
    """Return a field, or an item of a tuple, as plain data."""
    try:
        return to_plain(value)
    except PlainError as error:
        raise error.under(name) from None


# --- Reading ------------------------------------------------------------------------------------------------------


@overload
def from_plain(data: object, cls: type[T]) -> T: ...
@overload
def from_plain(data: object, cls: object) -> object: ...
def from_plain(data: object, cls: object) -> object:
    """Return the value that data stands for; cls is a class of the model or a union of them, such as `Event`.

    A class with subclasses (`Action`) stands for any of them. Raises PlainError.
    """
    try:
        return _decoder(cls)(data)
    except PlainError as error:
        raise error.under(getattr(cls, "__name__", "value")) from None


def _decoder(cls: object) -> _Decode:
    known = _DECODERS.get(cls)
    if known is None:
        known = _DECODERS[cls] = _build(cls)
    return known


def _build(cls: object) -> _Decode:
    origin = typing.get_origin(cls)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(typing.get_args(cls))
    if origin is tuple:
        return _tuple_decoder(typing.get_args(cls))
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        return _enum_decoder(cls)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        return _tagged_decoder(_family(cls))
    message = f"cannot read a {cls} (numbers, strings, enums, tuples and dataclasses only)"
    raise PlainError(message)


def _wrong(data: object, expected: str) -> PlainError:
    return PlainError(f"expected {expected}, found {type(data).__name__} {data!r:.60}")


def _decode_bool(data: object) -> object:
    if not isinstance(data, bool):
        raise _wrong(data, "true or false")
    return data


def _decode_int(data: object) -> object:
    if isinstance(data, bool) or not isinstance(data, int):
        raise _wrong(data, "a whole number")
    return data


def _decode_float(data: object) -> object:
    if isinstance(data, float) and math.isfinite(data):
        return data
    if isinstance(data, bool) or not isinstance(data, int):
        raise _wrong(data, "a finite number")
    try:
        return float(data)
    except OverflowError:
        raise _wrong(data, "a finite number") from None


def _decode_str(data: object) -> object:
    if not isinstance(data, str):
        raise _wrong(data, "a string")
    return data


def _decode_none(data: object) -> object:
    if data is not None:
        raise _wrong(data, "null")
    return data


_DECODERS: dict[object, _Decode] = {
    bool: _decode_bool,
    int: _decode_int,
    float: _decode_float,
    str: _decode_str,
    type(None): _decode_none,
}
_SCALARS: tuple[type, ...] = (bool, int, float, str)


def _enum_decoder(cls: type[enum.Enum]) -> _Decode:
    members = {member.value: member for member in cls}

    def decode(data: object) -> object:
        try:
            return members[data]
        except (KeyError, TypeError):
            raise _wrong(data, "one of " + ", ".join(str(value) for value in members)) from None

    return decode


def _tuple_decoder(args: tuple[object, ...]) -> _Decode:
    repeated = len(args) == 2 and args[1] is Ellipsis  # tuple[X, ...]
    decoders = (_decoder(args[0]),) if repeated else tuple(_decoder(arg) for arg in args)

    def decode(data: object) -> object:
        if not isinstance(data, list):
            raise _wrong(data, "a list")
        if not repeated and len(data) != len(decoders):
            raise _wrong(data, f"a list of {len(decoders)}")
        found: list[object] = []
        each = decoders * len(data) if repeated else decoders
        try:
            for decode_item, item in zip(each, data, strict=True):
                found.append(decode_item(item))
        except PlainError as error:
            raise error.under(len(found)) from None
        return tuple(found)

    return decode


def _union_decoder(args: tuple[object, ...]) -> _Decode:
    """Return a decoder for a union: scalars by JSON type, classes by kind, at most one member of another type."""
    scalars = {arg: _decoder(arg) for arg in args if arg in _SCALARS}
    if float in scalars:  # A whole number may stand where a float is meant, unless the union tells the two apart.
        scalars.setdefault(int, scalars[float])
    classes = tuple(arg for arg in args if isinstance(arg, type) and dataclasses.is_dataclass(arg))
    tagged = _tagged_decoder(tuple(member for cls in classes for member in _family(cls))) if classes else None
    rest = [_decoder(arg) for arg in args if arg not in _SCALARS and arg not in classes and arg is not type(None)]
    if len(rest) > 1:
        message = f"the members of {args} cannot be distinguished (scalars and dataclasses, and one of anything else)"
        raise PlainError(message)
    names = ", ".join("null" if arg is type(None) else getattr(arg, "__name__", str(arg)) for arg in args)

    def decode(data: object) -> object:
        if data is None and type(None) in args:
            return None
        known = scalars.get(type(data))
        if known is not None:
            return known(data)
        if tagged is not None and isinstance(data, dict):
            return tagged(data)
        if rest:
            return rest[0](data)
        raise _wrong(data, names)

    return decode


def _family(cls: type) -> tuple[type, ...]:
    """Return cls and all its subclasses, each once.

    `dataclass(slots=True)` makes a second class and leaves the first one in `__subclasses__()` until it is collected:
    of two with one name, the one with slots is meant.
    """
    found = {cls.__name__: cls}
    children: list[type] = cls.__subclasses__()
    for child in children:
        for member in _family(child):
            if member.__name__ not in found or "__slots__" in vars(member):
                found[member.__name__] = member
    return tuple(found.values())


def _tagged_decoder(classes: tuple[type, ...]) -> _Decode:
    """Return a decoder for an object that is one of classes; without a kind it must be the only one there is."""
    # Built at the first use of each: a class may hold itself, and most journals hold few of the kinds.
    built: dict[str, _Decode] = {}
    by_name = {cls.__name__: cls for cls in classes}
    only = classes[0].__name__ if len(classes) == 1 else None

    def decode(data: object) -> object:
        if not isinstance(data, dict):
            raise _wrong(data, f"an object with {KIND} " + ", ".join(by_name))
        kind = data.get(KIND, only)
        if not isinstance(kind, str) or kind not in by_name:
            message = f"unknown {KIND} {kind!r:.60} (one of {', '.join(by_name)})"
            raise PlainError(message)
        decode_fields = built.get(kind)
        if decode_fields is None:
            decode_fields = built[kind] = _fields_decoder(by_name[kind])
        return decode_fields(data)

    return decode


def _fields_decoder(cls: type) -> _Decode:
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    decoders = tuple((each.name, _decoder(hints[each.name])) for each in fields)
    needed = frozenset(
        each.name
        for each in fields
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    )

    def decode(given: dict[str, object]) -> object:
        values: dict[str, object] = {}
        for name, decode_field in decoders:
            if name in given:
                try:
                    values[name] = decode_field(given[name])
                except PlainError as error:
                    raise error.under(name) from None
            elif name in needed:
                message = "missing, and it has no default"
                raise PlainError(message, name)
        return cls(**values)

    return decode
