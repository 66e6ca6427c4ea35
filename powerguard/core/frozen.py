"""`dataclasses.replace` for the core's plain classes, in half the time: it is a quarter of what a decision costs.

The classes here are frozen, have slots, no `__post_init__` and no computed fields, so a copy of the slots is all that
there is to do; `dataclasses.replace` goes through `__init__`, which writes every field of a frozen class the slow way.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The type checker knows this one, and holds each change against the field's type.
    from dataclasses import replace as replace  # noqa: PLC0414 - exported on purpose
else:

    def replace(instance: Any, **changes: Any) -> Any:  # noqa: ANN401 - the shape of dataclasses.replace
        """Return a copy with other values in the named fields. Raises TypeError for a field that is not there."""
        cls = type(instance)
        slots = _SLOTS.get(cls)
        if slots is None:
            slots = _SLOTS[cls] = _slots(cls)
        copy = cls.__new__(cls)
        for name, read, write in slots:
            write(copy, changes.pop(name) if name in changes else read(instance))
        if changes:
            message = f"{cls.__name__} has no field {', '.join(changes)}"
            raise TypeError(message)
        return copy


_SLOTS: dict[type, tuple[tuple[str, Any, Any], ...]] = {}


def _slots(cls: type) -> tuple[tuple[str, Any, Any], ...]:
    """Return name, reader and writer of each field: the slot descriptors themselves know nothing of frozen."""
    if hasattr(cls, "__post_init__"):
        message = f"{cls.__name__} has a __post_init__, which a copy would pass by"
        raise TypeError(message)
    found = []
    for each in fields(cls):
        slot = next(vars(base)[each.name] for base in cls.__mro__ if each.name in vars(base))
        found.append((each.name, slot.__get__, slot.__set__))
    return tuple(found)
