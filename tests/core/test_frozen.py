"""A copy with other values, and a swift class, are what dataclasses make of them, for every class of the core."""

import dataclasses
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core import actions, events, learned, model, readings
from powerguard.core.frozen import replace, swift

CLASSES = sorted(
    {
        cls
        for module in (actions, events, readings, model, learned)
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
    with pytest.raises(TypeError, match="Computed has a __post_init__"):
        swift(Computed)


def test_a_copy_is_no_new_kind_of_its_base() -> None:
    """The journal knows an action's class by its name among the subclasses of the base: there must be one of it."""
    before = actions.Action.__subclasses__()
    assert replace(actions.PollNow(id="a", by_s=1.0, ups="x"), ups="y") == actions.PollNow(id="a", by_s=1.0, ups="y")
    assert actions.Action.__subclasses__() == before


def test_a_swift_class_is_made_like_any_other() -> None:
    """By place and by name, with defaults, each with its own of what is made anew; and it is as frozen."""

    @swift
    @dataclasses.dataclass(frozen=True, slots=True)
    class Swift:
        one: int
        two: list[int] = dataclasses.field(default_factory=list)
        three: str = dataclasses.field(default="3", kw_only=True)

    first = Swift(1)
    assert (first.one, first.two, first.three) == (1, [], "3")
    assert first.two is not Swift(1).two
    assert Swift(1, [2], three="4") == Swift(one=1, two=[2], three="4") != first
    assert type(first) is Swift
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.one = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="'one'"):
        Swift()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Swift(1, [2], "4")  # type: ignore[call-arg]
