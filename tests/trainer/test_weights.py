"""The weights alone, out of checkpoints with an index as TorchState writes it; tests/torch has those of real models."""

import json
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.manifest import Manifest, StoreError
from powerguard.trainer.store.shards import CorruptError, Snapshot
from powerguard.trainer.store.store import Store
from powerguard.trainer.weights import INDEX, export, read_weights
from tests.cli.checkpoint_sites import flip, save

CHUNK = 4096


def saved(
    root: Path, ranks: Sequence[tuple[object, Sequence[Buffer]]], *, step: int = 7, hosts: int = 1, minute: int = 0
) -> Path:
    """Write a checkpoint: of each rank the index, and its items, in chunks of 4 KiB."""
    with Store(root, job="llm", ranks=len(ranks), chunk_bytes=CHUNK, slots=0) as store:
        name, shards = store.name(step, secrets.token_hex(4)), []
        for rank, (index, items) in enumerate(ranks):
            with Snapshot() as snapshot:
                layout = snapshot.take([Buffer.json(INDEX, index), *items])
                shards.append(store.write_shard(name, rank, snapshot, layout).packed())
        manifest = Manifest(
            job="llm",
            step=step,
            created=f"2026-11-21T04:{minute:02d}:00Z",
            reason="periodic",
            ranks=len(ranks),
            hosts=hosts,
            shards=tuple(shards),
        )
        return Path(store.commit(name, manifest).path)


def index_of(state: dict[str, Any], **more: object) -> dict[str, object]:
    parts = {"model": {"state": state, "buffers": {}}, "optimizer": {"state": {}}}
    return {"format": 1, "parts": parts, "kinds": {}, **more}


def tensor(item: str, **more: object) -> dict[str, object]:
    return {"$": "tensor", "item": item, **more}


def floats(name: str, count: int, *, first: int = 0, shape: tuple[int, ...] | None = None) -> Buffer:
    return Buffer(name, struct.pack(f"{count}f", *range(first, first + count)), "float32", shape or (count,))


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """Moments behind the weights may be rotten: no chunk of theirs is read. One of the weights is found."""
    items = [floats("w", 3000), floats("b", 0), floats("m", 9000)]
    path = saved(tmp_path, [(index_of({"w": tensor("w"), "tied": tensor("w"), "b": tensor("b")}), items)])
    flip(path / "shard-00000", offset=40_000)
    found = read_weights(tmp_path)
    assert (found.step, found.path, found.others) == (7, str(path), {})
    assert {name: (each.dtype, each.shape) for name, each in found.tensors.items()} == {
        "w": ("float32", (3000,)),
        "tied": ("float32", (3000,)),
        "b": ("float32", (0,)),
    }
    assert bytes(found.tensors["tied"].data) == bytes(items[0].data)
    flip(path / "shard-00000", offset=9000)
    with pytest.raises(CorruptError, match="does not match its digest"):
        read_weights(path)


def test_divided_among_ranks(tmp_path: Path) -> None:
    """DDP with divide=True: each tensor lies in the shard of its owner."""
    divided = {"ranks": 2, "items": [["w", 1, "float32", [5], 20], ["v", 0, "float32", [4], 16]]}
    index = index_of({"w": tensor("w"), "v": tensor("v")}, divided=divided)
    saved(tmp_path, [(index, [floats("v", 4)]), (index, [floats("w", 5, first=9)])])
    found = read_weights(tmp_path)
    assert {name: list(each.view()) for name, each in found.tensors.items()} == {
        "w": [9, 10, 11, 12, 13],
        "v": [0, 1, 2, 3],
    }


def sharded(
    placements: list[str], mesh: list[int], shape: list[int], rows: Sequence[int]
) -> list[tuple[object, list[Buffer]]]:
    """Two columns, and so many rows on each rank."""
    first, ranks = 0, []
    for count in rows:
        layout = {"shape": shape, "placements": placements, "mesh": mesh}
        state = {"w": tensor("w", sharded=layout)}
        ranks.append((index_of(state), [floats("w", 2 * count, first=2 * first, shape=(count, 2))]))
        first += count
    return ranks


def test_rows_of_all_ranks_make_the_whole(tmp_path: Path) -> None:
    """FSDP2, with uneven and empty shards; and two replicas of it (HSDP), of which the first is read."""
    saved(tmp_path / "fsdp", sharded(["S(0)"], [4], [5, 2], [2, 2, 1, 0]))
    found = read_weights(tmp_path / "fsdp").tensors["w"]
    assert (found.shape, found.view().tolist()) == ((5, 2), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]])
    saved(tmp_path / "hsdp", sharded(["R", "S(0)"], [2, 2], [3, 2], [2, 1, 2, 1]))
    found = read_weights(tmp_path / "hsdp").tensors["w"]
    assert found.view().tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("placements", "mesh", "rows", "because"),
    [
        (["S(1)"], [2], [3, 3], "only shards by rows"),
        (["S(0)", "S(0)"], [2, 1], [2, 1], "only shards by rows"),
        (["S(0)"], [3], [2, 1], "over a mesh of"),
        (["S(0)"], [2], [2, 2], "do not make"),
        (["S(0)"], [2], [1, 1], "do not make"),
        (7, [2], [2, 1], "does not hold together"),
        (["S(0)"], None, [2, 1], "does not hold together"),
    ],
)
def test_shards_that_do_not_make_one(tmp_path: Path, placements: Any, mesh: Any, rows: list[int], because: str) -> None:  # noqa: ANN401
    saved(tmp_path, sharded(placements, mesh, [3, 2], rows))
    with pytest.raises(StoreError, match=because):
        read_weights(tmp_path)


def test_shards_on_another_host(tmp_path: Path) -> None:
    path = saved(tmp_path, sharded(["S(0)"], [2], [3, 2], [2, 1]), hosts=2)
    (path / "shard-00001").unlink()
    with pytest.raises(StoreError, match=r"shard-00001: is not here, .*read the checkpoint from a shared folder"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("index", "because"),
    [
        ("text", "was not written by TorchState"),
        ({"format": 2, "parts": {}}, "or by a newer one"),
        (
            index_of({}) | {"parts": {"optimizer": {}}},
            r"has no module 'model' \(part is one of: none, it has no module\)",
        ),
        (index_of({"w": tensor("gone")}), "gone of rank 0 is missing"),
        (index_of({"w": {"$": "tensor"}}), "does not hold together"),
        (index_of({"w": tensor("w")}, divided={"items": [["w"]]}), "does not hold together"),
        (index_of({"w": tensor("w")}, divided={"items": [["w", 9]]}), "does not hold together"),
    ],
)
def test_index_that_does_not_hold_together(tmp_path: Path, index: object, because: str) -> None:
    saved(tmp_path, [(index, [floats("w", 3)])])
    with pytest.raises(StoreError, match=because):
        read_weights(tmp_path)


def test_no_such_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "plain", 3)
    for place, step, because in [
        (tmp_path / "gone", None, "No such file or directory"),
        (tmp_path, None, "no complete checkpoint there"),
        (tmp_path / "plain", 4, "no complete checkpoint of step 4 there"),
        (tmp_path / "plain", None, "was not written by TorchState"),
    ]:
        with pytest.raises(StoreError, match=because):
            read_weights(place, step=step)


def test_newest_is_what_was_committed_last(tmp_path: Path) -> None:
    """As for a resume: a training that was rolled back has smaller steps than what it left behind."""
    for minute, step in enumerate((900, 1000, 500)):
        saved(tmp_path, [(index_of({"w": tensor("w")}), [floats("w", 10, first=step)])], step=step, minute=minute)
    assert read_weights(tmp_path).step == 500
    assert read_weights(tmp_path, step=1000).step == 1000


def test_safetensors(tmp_path: Path) -> None:
    """The format, byte by byte: the length of the header, the header, no gap, no overlap."""
    items = [floats("w", 6, shape=(3, 2)), Buffer("h", b"\x01\x02" * 5, "bfloat16", (5,))]
    state = {"w": tensor("w"), "h": tensor("h"), "note": "kept by get_extra_state"}
    saved(tmp_path, [(index_of(state), items)])
    found = read_weights(tmp_path)
    assert found.others == {"note": "kept by get_extra_state"}
    target = tmp_path / "model.safetensors"
    assert export(found, target) == target.stat().st_size
    content = target.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    assert size % 8 == 0
    assert json.loads(content[8 : 8 + size]) == {
        "__metadata__": {"format": "pt", "step": "7"},
        "w": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]},
        "h": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
    }
    assert content[8 + size :] == bytes(items[0].data) + bytes(items[1].data)
    with pytest.raises(FileExistsError):
        export(found, target)
    assert sorted(path.name for path in tmp_path.iterdir() if "safetensors" in path.name) == [target.name]


def test_name_that_safetensors_keeps_for_itself(tmp_path: Path) -> None:
    saved(tmp_path, [(index_of({"__metadata__": tensor("w")}), [floats("w", 3)])])
    with pytest.raises(StoreError, match="__metadata__: safetensors has no tensor of this name"):
        export(read_weights(tmp_path), tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_dtype_that_safetensors_has_not(tmp_path: Path) -> None:
    saved(tmp_path, [(index_of({"w": tensor("w")}), [Buffer("w", b"\0" * 16, "complex128", (1,))])])
    with pytest.raises(StoreError, match="safetensors has no complex128"):
        export(read_weights(tmp_path), tmp_path / "model.safetensors")
