"""Frozen dataclasses in a third of the time that dataclasses take: a decision is little else than making and copying.

A frozen class writes its fields past its own lock, with a call for each. Here an object begins as one of the class's
*open twin*, which has the same slots and no lock, so that fields are plainly assigned; then it is given its own class,
and is frozen. A class with slots, no base, no `__post_init__` and no computed fields is no more than that.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    # The type checker knows this one, and holds each change against the field's type.
    from dataclasses import replace as replace  # noqa: PLC0414 - exported on purpose
else:

    def replace(instance: Any, **changes: Any) -> Any:  # noqa: ANN401 - the shape of dataclasses.replace
        """Return a copy with other values in the named fields. Raises TypeError for a field that is not there."""
        shape = (type(instance), *changes)
        copied = _COPIED.get(shape)
        if copied is None:
            if shape[0].__base__ is not object:
                return dataclasses.replace(instance, **changes)  # Its twin would be one more kind of that base.
            copied = _COPIED[shape] = _copied(*shape)
        return copied(instance, changes)


T = TypeVar("T")
_TWINS: dict[type, type] = {}
_COPIED: dict[tuple[Any, ...], Callable[[Any, dict[str, Any]], Any]] = {}
"""What copies an object, by its class and the names of the fields that change: one for each place that copies."""


def swift(cls: type[T]) -> type[T]:
    """Make the `__init__` of a frozen class swift as well: for those that are made several times in a step."""
    shape: Any = cls
    each = fields(shape)
    known: dict[str, Any] = {"write": object.__setattr__, "twin": _twin(cls), "cls": cls, "MISSING": MISSING}
    lines = ["write(self, '__class__', twin)"]
    for one in each:
        known[f"default_{one.name}"], known[f"make_{one.name}"] = one.default, one.default_factory
        made = "" if one.default_factory is MISSING else f"make_{one.name}() if {one.name} is MISSING else "
        lines.append(f"self.{one.name} = {made}{one.name}")
    by_place = [_parameter(one) for one in each if not one.kw_only]
    by_name = [_parameter(one) for one in each if one.kw_only]
    given = ", ".join(["self", *by_place, *(["*", *by_name] if by_name else [])])
    init = _function("__init__", given, [*lines, "self.__class__ = cls"], known)
    init.__annotations__, init.__qualname__ = shape.__init__.__annotations__, shape.__init__.__qualname__
    shape.__init__ = init
    return cls


def _parameter(one: "Field[Any]") -> str:
    """Return a parameter of `__init__`. A default that has a factory is made anew for each object."""
    if one.default_factory is not MISSING:
        return f"{one.name}=MISSING"
    return one.name if one.default is MISSING else f"{one.name}=default_{one.name}"


def _copied(cls: type, *names: str) -> Callable[[Any, dict[str, Any]], Any]:
    each = [one.name for one in fields(cls)]
    for name in names:
        if name not in each:
            message = f"{cls.__name__} has no field {name}"
            raise TypeError(message)
    taken = [f"changes['{name}']" if name in names else f"instance.{name}" for name in each]
    lines = [f"copy.{name} = {value}" for name, value in zip(each, taken, strict=True)]
    known = {"new": object.__new__, "twin": _twin(cls), "cls": cls}
    copied: Callable[[Any, dict[str, Any]], Any] = _function(
        "copied", "instance, changes", ["copy = new(twin)", *lines, "copy.__class__ = cls", "return copy"], known
    )
    return copied


def _twin(cls: Any) -> type:  # noqa: ANN401 - a class with slots, which no type tells
    """Return a class whose objects can be written, and then be given the class `cls`."""
    if hasattr(cls, "__post_init__"):
        message = f"{cls.__name__} has a __post_init__, which would be passed by"
        raise TypeError(message)
    if cls not in _TWINS:
        _TWINS[cls] = type(cls.__name__, (), {"__slots__": cls.__slots__, "__setattr__": object.__setattr__})
    return _TWINS[cls]


def _function(name: str, given: str, lines: list[str], known: dict[str, Any]) -> Any:  # noqa: ANN401
    """Write a function, one line for each field, as dataclasses do: a loop over the fields takes twice as long."""
    exec(f"def {name}({given}):\n  " + "\n  ".join(lines), known)  # noqa: S102 - of the names of our own fields
    return known[name]
