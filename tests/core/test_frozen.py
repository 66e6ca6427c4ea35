"""A copy with other values is what dataclasses.replace makes of it, for every class of the core."""

import dataclasses
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core import events, learned, model
from powerguard.core.frozen import replace

CLASSES = sorted(
    {
        cls
        for module in (events, model, learned)
        for _, cls in inspect.getmembers(module, dataclasses.is_dataclass)
        if isinstance(cls, type)
    },
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_it_is_what_dataclasses_make_of_it(cls: type, data: st.DataObject) -> None:
    """Every class, any field: equal, of the same class, and the original is as it was."""
    names = [each.name for each in dataclasses.fields(cls)]
    original = cls(**{name: index for index, name in enumerate(names)})
    before = dataclasses.astuple(original)
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    changes = {name: f"new {name}" for name in chosen}
    copy = replace(original, **changes)
    assert copy == dataclasses.replace(original, **changes)
    assert type(copy) is cls
    assert dataclasses.astuple(original) == before


def test_a_field_that_is_not_there_is_refused() -> None:
    """A typing error must not become a state that silently stays what it was."""
    with pytest.raises(TypeError, match="Online has no field party"):
        replace(model.Online(), party=1)


def test_a_class_that_computes_is_refused() -> None:
    """A copy of slots would pass its __post_init__ by."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Computed:
        one: int

        def __post_init__(self) -> None:
            """Compute nothing."""

    with pytest.raises(TypeError, match="Computed has a __post_init__"):
        replace(Computed(1), one=2)
