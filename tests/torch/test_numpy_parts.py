"""`Parts` returns arrays and scalars of numpy as they were, or refuses them by the name of the item."""

from typing import Any

import pytest

from powerguard.trainer.store.items import Loaded, Parts
from powerguard.trainer.store.shards import Snapshot

np = pytest.importorskip("numpy", reason="numpy is not installed (scripts/test-torch gets it)")


def kept(value: object) -> Any:
    """Save a value, and load it."""
    got: dict[str, Any] = {}
    parts = Parts(lambda: {"x": value}, got.update)
    with Snapshot() as snapshot:
        layout = snapshot.take(parts.items())
        items = {
            each.name: Loaded(
                each.name, each.dtype, each.shape, snapshot.buffer[each.offset : each.offset + each.size_bytes]
            )
            for each in layout.items
        }
        parts.load(items)
    return got["x"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "uint16", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (0, 4), (3, 0, 2)])
def test_an_array_comes_back_in_its_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    value = np.ones(shape, dtype)
    again = np.asarray(kept(value))
    assert (again.dtype, again.shape) == (value.dtype, value.shape)
    assert np.array_equal(again, value)


@pytest.mark.parametrize("dtype", ["float32", "uint32", "bool"])
def test_a_read_only_array_without_dimensions_keeps_its_dtype(dtype: str) -> None:
    """What `numpy.asarray` makes of a step counter of JAX."""
    value = np.ones((), dtype)
    value.setflags(write=False)
    again = np.asarray(kept(value))
    assert (again.dtype, again.shape, again) == (value.dtype, (), value)


@pytest.mark.parametrize(("dtype", "number"), [("float32", 0.1), ("int64", 7), ("bool", True)])
def test_a_scalar_comes_back_as_a_number(dtype: str, number: object) -> None:
    value = np.dtype(dtype).type(number)
    again = kept(value)
    assert type(again) is type(number)
    assert again == value


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, "complex64"),
        np.zeros(2, "float16"),
        np.zeros(2, "<U3"),
        np.zeros(2, "S3"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, ">f4"),
        np.zeros(2, "datetime64[s]"),
        np.datetime64("2026-01-01"),
        np.zeros(2, object),
        np.zeros((4, 3))[:, ::2],
        np.complex64(1),
        np.ma.masked_array([1.0, 2.0], [False, True]),
        [np.float32(1)],
    ],
    ids=repr,
)
def test_what_could_not_be_restored_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"^x: "):
        kept(value)
