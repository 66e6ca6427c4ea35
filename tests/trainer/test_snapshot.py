"""A snapshot holds what the state was at one step boundary, laid out as the disk wants it, in memory that is reused."""

import array
import ctypes
import math
import resource
from typing import Any

import pytest

from powerguard.trainer.store.items import Buffer, Loaded, Parts
from powerguard.trainer.store.shards import Snapshot, laid_out
from tests.trainer.checkpoints import forked_worker


def loaded(snapshot: Snapshot, items: list[Any]) -> dict[str, Loaded]:
    layout = snapshot.take(items)
    return {
        entry.name: Loaded(
            entry.name, entry.dtype, entry.shape, snapshot.buffer[entry.offset : entry.offset + entry.size_bytes]
        )
        for entry in layout.items
    }


def test_items_are_copied_aligned_and_padded() -> None:
    with Snapshot() as snapshot:
        layout = snapshot.take([Buffer("a", b"x" * 100), Buffer("b", b""), Buffer("c", b"y" * 64), Buffer("d", b"z")])
        assert [(item.name, item.offset, item.size_bytes) for item in layout.items] == [
            ("a", 0, 100),
            ("b", 112, 0),
            ("c", 112, 64),
            ("d", 176, 1),
        ]
        assert layout.size_bytes == 4096
        assert bytes(snapshot.buffer[:177]) == b"x" * 100 + bytes(12) + b"y" * 64 + b"z"


def test_what_lies_between_items_is_nobodys_old_data() -> None:
    """The same state makes the same bytes, whatever was in the memory before; and nothing old leaks into a file."""
    with Snapshot() as snapshot:
        snapshot.take([Buffer("a", b"\xff" * 8192)])
        layout = snapshot.take([Buffer("a", b"x"), Buffer("b", b"y")])
        assert bytes(snapshot.buffer[: layout.size_bytes]) == b"x" + bytes(15) + b"y" + bytes(4096 - 17)


def test_the_memory_is_reused_and_grows() -> None:
    with Snapshot(5000) as snapshot:
        first = snapshot.size_bytes
        assert first >= 5000
        kept = snapshot.buffer
        snapshot.take([Buffer("a", bytes(first))])
        assert snapshot.buffer is kept, "memory that fits is not taken anew"
        snapshot.take([Buffer("a", bytes(first + 1))])
        assert snapshot.size_bytes > first


def test_it_can_be_closed_while_somebody_still_looks() -> None:
    snapshot = Snapshot(4096)
    view = snapshot.buffer[:10]
    snapshot.close()
    assert bytes(view) == bytes(10)
    assert snapshot.size_bytes == 0


def test_a_child_of_fork_takes_no_part_of_it() -> None:
    """A data loader's workers would share it: the next save would copy each page first, and take the memory again."""
    size_bytes = 64 << 20
    with Snapshot(size_bytes) as snapshot:
        item = Buffer("x", bytearray(size_bytes - 4096))
        snapshot.take([item])
        with forked_worker():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            snapshot.take([item])
            assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < size_bytes / 4096 / 16


def test_the_layout_is_known_before_it_is_taken() -> None:
    """The slots are prepared before the first save."""
    items = [Buffer("a", bytes(10_000)), Buffer.json("b", {"x": 1})]
    with Snapshot() as snapshot:
        assert snapshot.take(items) == laid_out(items)


def test_progress_is_reported() -> None:
    found: list[tuple[int, int | None]] = []
    with Snapshot() as snapshot:
        snapshot.take([Buffer("a", bytes(100)), Buffer("b", bytes(100))], lambda done, of: found.append((done, of)))
    assert found == [(100, 4096), (212, 4096)]


@pytest.mark.parametrize(
    ("code", "dtype"),
    [("b", "int8"), ("H", "uint16"), ("i", "int32"), ("q", "int64"), ("f", "float32"), ("d", "float64")],
)
def test_buffers_have_their_dtype_and_shape_and_come_back(code: str, dtype: str) -> None:
    grid = memoryview(array.array(code, range(6))).cast("B").cast(code, (2, 3))
    item = Buffer.of("grid", grid)
    assert (item.dtype, item.shape) == (dtype, (2, 3))
    with Snapshot() as snapshot:
        view = loaded(snapshot, [item])["grid"].view()
        assert view.tolist() == grid.tolist() == [[0, 1, 2], [3, 4, 5]]
        view.release()


def test_what_memory_cannot_say_comes_back_as_bytes() -> None:
    with Snapshot() as snapshot:
        item = loaded(snapshot, [Buffer("a", b"12345678", "bfloat16", (2, 2))])["a"]
        assert (item.dtype, item.shape, bytes(item.view())) == ("bfloat16", (2, 2), b"12345678")
        item = loaded(snapshot, [Buffer("a", b"", "float32", (0, 3))])["a"]
        assert bytes(item.view()) == b""
        assert Buffer("a", b"12345678", "bfloat16").shape == (4,)


def test_parts_come_back_as_they_went() -> None:
    """A job without torch: buffers and plain values, also a random state's tuples and numbers that are none."""
    state = {
        "weights": array.array("f", [1.5, 2.5]),
        "raw": b"\x00\x01",
        "step": 7,
        "losses": [1.0, math.inf],
        "none": None,
    }
    got: dict[str, Any] = {}

    def load(values: Any) -> None:  # noqa: ANN401 - whatever was saved
        got.update({name: bytes(each) if name == "raw" else each for name, each in values.items() if name != "weights"})
        got["weights"] = values["weights"].tolist()

    parts = Parts(lambda: state, load)
    with Snapshot() as snapshot:
        items = loaded(snapshot, list(parts.items()))
        assert items["weights"].shape == (2,)
        parts.load(items)
    assert got == {**state, "weights": [1.5, 2.5]}


def test_a_value_that_json_cannot_say_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        Buffer.json("a", object())
    with pytest.raises(ValueError, match="not a plain value"):
        Loaded("a", "uint8", (1,), memoryview(b"x")).value()
    with pytest.raises(TypeError, match=r"^a: the key 3 of a dict would come back as text"):
        Buffer.json("a", {"x": [{3: 1}]})
    with pytest.raises(TypeError, match=r"^a: the key None of a dict"):
        Buffer.json("a", {None: 1})


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_float), ("b", ctypes.c_int)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (memoryview(bytes(8))[::2], "x: is not C-contiguous"),
        ((ctypes.c_float.__ctype_be__ * 2)(), "x: an array of >f cannot be restored: it is big-endian"),
        ((Pair * 2)(), "x: an array of T{"),
        ((ctypes.c_wchar * 2)(), "x: an array of <u cannot be restored"),
        ((ctypes.c_longdouble * 2)(), "x: an array of <g cannot be restored"),
    ],
    ids=["strided", "big-endian", "records", "text", "long double"],
)
def test_a_buffer_that_could_not_be_restored_is_named_when_it_is_measured(data: object, expected: str) -> None:
    """At the first step, not at the first resume after an outage."""
    with pytest.raises(TypeError) as caught:
        laid_out(Parts(lambda: {"x": data}, lambda _: None).items())
    assert str(caught.value).startswith(expected)


def test_a_strided_buffer_of_one_s_own_is_named() -> None:
    with pytest.raises(TypeError, match=r"^x: is not C-contiguous"):
        laid_out([Buffer("x", memoryview(bytes(8))[::2], "uint8", (4,))])


@pytest.mark.parametrize("kind", [ctypes.c_float, ctypes.c_double, ctypes.c_bool, ctypes.c_long, ctypes.c_uint16])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2), (2, 3), ()])
def test_every_shape_comes_back(kind: Any, shape: tuple[int, ...]) -> None:  # noqa: ANN401 - a type of ctypes
    """Also those without elements, which memoryview.cast() refuses."""
    made = kind
    for length in reversed(shape):
        made = made * length
    data, seen = made(), []
    ctypes.memset(ctypes.byref(data), 1, ctypes.sizeof(data))
    parts = Parts(lambda: {"x": data}, lambda got: seen.append((got["x"].shape, got["x"].itemsize, bytes(got["x"]))))
    with Snapshot() as snapshot:
        parts.load(loaded(snapshot, list(parts.items())))
    source = memoryview(data)
    assert seen == [(source.shape, source.itemsize, bytes(source))]


def test_what_load_keeps_does_not_change_with_the_next_save() -> None:
    """The next save is copied into the memory that the checkpoint was read into."""
    kept: list[Any] = []
    data = array.array("f", [1.0, 2.0])
    parts = Parts(lambda: {"w": data}, lambda got: kept.append(got["w"]))
    with Snapshot() as snapshot:
        parts.load(loaded(snapshot, list(parts.items())))
        data[0] = 9.0
        snapshot.take(parts.items())
        assert kept[0].tolist() == [1.0, 2.0]
