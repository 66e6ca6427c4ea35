"""`dataclasses.replace` for the core's plain classes, in half the time: it is a quarter of what a decision costs.

The classes here are frozen, have slots, no `__post_init__` and no computed fields, so a copy of the slots is all that
there is to do; `dataclasses.replace` goes through `__init__`, which writes every field of a frozen class the slow way.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The type checker knows this one, and holds each change against the field's type.
    from dataclasses import replace as replace  # noqa: PLC0414 - exported on purpose
else:

    def replace(instance: Any, **changes: Any) -> Any:  # noqa: ANN401 - the shape of dataclasses.replace
        """Return a copy with other values in the named fields. Raises TypeError for a field that is not there."""
        cls = type(instance)
        shape = _SHAPES.get(cls)
        if shape is None:
            shape = _SHAPES[cls] = _shape(cls)
        copied, writers = shape
        copy = copied(instance)
        for name, value in changes.items():
            if name not in writers:
                message = f"{cls.__name__} has no field {name}"
                raise TypeError(message)
            writers[name](copy, value)
        return copy


_SHAPES: dict[type, tuple[Callable[[Any], Any], dict[str, Callable[[Any, Any], None]]]] = {}


def _shape(cls: type) -> tuple[Callable[[Any], Any], dict[str, Callable[[Any, Any], None]]]:
    """Return what copies an instance, and the writer of each field: the slots themselves know nothing of frozen."""
    if hasattr(cls, "__post_init__"):
        message = f"{cls.__name__} has a __post_init__, which a copy would pass by"
        raise TypeError(message)
    names = [each.name for each in fields(cls)]
    writers = {name: next(vars(base)[name] for base in cls.__mro__ if name in vars(base)).__set__ for name in names}
    # A line for each field, as dataclasses itself makes its methods: a loop over the fields takes twice as long.
    lines = [f"  write_{name}(copy, instance.{name})" for name in names]
    code = "\n".join(["def copied(instance):", "  copy = new(cls)", *lines, "  return copy"])
    known = {"new": cls.__new__, "cls": cls, **{f"write_{name}": write for name, write in writers.items()}}
    exec(code, known)  # noqa: S102 - of the names of our own fields
    return known["copied"], writers
