"""What is read is verified to the last byte, wherever the damage is, and a folder cannot lead the reader astray."""

import contextlib
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from powerguard.trainer.store.folders import Found, Refused, look
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.manifest import MANIFEST
from powerguard.trainer.store.shards import CancelledError, CorruptError, Snapshot, held, read_shard
from powerguard.trainer.store.store import Store, StoreError
from tests.trainer.checkpoints import forked_worker, read, save

CHUNK = 4096
SHARD = "shard-00000"


def content(seed: int) -> bytes:
    return random.Random(seed).randbytes(5 * CHUNK - 700)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "check points", job="test", slots=0, chunk_bytes=CHUNK)


@pytest.fixture
def found(store: Store) -> Found:
    save(store, 1, [Buffer("a", content(1)), Buffer.json("b", [1, 2])])
    return store.found()[0]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_it_comes_back(store: Store, threads: int) -> None:
    """In a thousand chunks, by several threads."""
    large = random.Random(threads).randbytes(1000 * CHUNK - 100)
    save(store, 1, [Buffer("a", large), Buffer.json("b", [1, 2])])
    found = store.found()[0]
    listed: list[tuple[int, int | None]] = []
    items = read_shard(
        Path(found.path),
        found.shard(0),
        threads=threads,
        progress=lambda done, of: listed.append((done, of)),
    )
    assert items["a"].data == large
    assert items["b"].value() == [1, 2]
    assert max(listed) == (1000 * CHUNK, 1000 * CHUNK)
    assert len(listed) == 1000


def test_it_is_read_into_memory_that_is_there(found: Found, store: Store) -> None:
    with Snapshot(1 << 20) as snapshot:
        items = read(found, 0, snapshot)
        assert bytes(snapshot.buffer[:100]) == items["a"].data[:100] == content(1)[:100]
        items.clear()


@pytest.mark.parametrize("damages", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_damages_are_all_refused(found: Found, store: Store, damages: int) -> None:
    """Bits that flipped, holes, truncations, in data and manifest: no loader of torch sees the first two."""
    rng = random.Random(20260101)
    files = [Path(found.path, SHARD), Path(found.path, MANIFEST)]
    whole = {path: path.read_bytes() for path in files}
    json_end = len(whole[files[1]].rstrip(b"\n"))
    refused = {"flip": 0, "hole": 0, "truncation": 0}
    with Snapshot(1 << 20) as snapshot:
        while sum(refused.values()) < damages:
            path = rng.choice(files)
            content = whole[path]
            kind = rng.choice(list(refused))
            end = len(content) if path is files[0] else json_end
            at = rng.randrange(end)
            with path.open("r+b", buffering=0) as file:
                if kind == "flip":
                    at = rng.randrange(len(content))
                    os.pwrite(file.fileno(), bytes([content[at] ^ 1 << rng.randrange(8)]), at)
                elif kind == "hole":
                    at &= ~511
                    size = min(512 << rng.randrange(4), end - at)
                    if not any(content[at : at + size]):
                        continue  # nothing was there
                    os.pwrite(file.fileno(), bytes(size), at)
                else:
                    os.ftruncate(file.fileno(), at)
                assert is_refused(store, snapshot), (kind, path.name, at)
                refused[kind] += 1
                os.ftruncate(file.fileno(), len(content))
                os.pwrite(file.fileno(), content, 0)
    print(refused)
    assert read_shard(Path(found.path), found.shard(0))["b"].value() == [1, 2]


def is_refused(store: Store, snapshot: Snapshot) -> bool:
    (seen,) = look(store.root)
    if isinstance(seen, Refused):
        return seen.rotten
    try:
        read(seen, 0, snapshot)
    except CorruptError:
        return True
    return False


def test_the_error_names_file_chunk_and_offset(found: Found, store: Store) -> None:
    path = Path(found.path, SHARD)
    with path.open("r+b") as file:
        file.seek(3 * CHUNK + 5)
        file.write(bytes([content(1)[3 * CHUNK + 5] ^ 1]))
    with pytest.raises(CorruptError) as caught:
        read(found, 0)
    assert (caught.value.path, caught.value.chunk, caught.value.offset) == (path, 3, 3 * CHUNK)
    assert str(caught.value) == f"{path}: does not match its digest (chunk 3, from byte 12288)"


def test_a_file_that_is_cut_while_it_is_read(found: Found, store: Store) -> None:
    path = Path(found.path, SHARD)

    def cut(done: int, of: int | None) -> None:
        os.truncate(path, 4 * CHUNK)

    with pytest.raises(CorruptError, match=r"ends too early \(chunk 4, from byte 16384\)"):
        read_shard(Path(found.path), found.shard(0), threads=1, progress=cut)


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "folder", "socket"])
def test_a_folder_cannot_lead_astray(found: Found, store: Store, kind: str) -> None:
    """A link leads out of the folder, a pipe blocks for ever: neither is followed."""
    path = Path(found.path, SHARD)
    moved = path.rename(path.with_name("elsewhere"))
    match kind:
        case "link":
            path.symlink_to(moved)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            os.mknod(path, 0o140600)
    with pytest.raises(CorruptError, match="is missing" if kind == "missing" else "not a plain file|bytes"):
        read(found, 0)
    if kind != "link":
        assert store.found() == []


def test_a_manifest_that_is_a_link_or_a_pipe(found: Found, store: Store) -> None:
    path = Path(found.path, MANIFEST)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    assert store.found() == []
    assert [each.rotten for each in store.refused()] == [False], "not ours to judge: left as it is"
    path.unlink()
    os.mkfifo(path)
    assert store.found() == []
    assert len(store.refused()) == 1


def test_a_folder_that_is_a_link_is_none(found: Found, store: Store) -> None:
    moved = shutil.move(found.path, store.root / "elsewhere")
    Path(found.path).symlink_to(moved)
    assert store.found() == []
    assert [each.rotten for each in store.refused()] == [False], "it is said, and left as it is"


def test_a_file_of_a_petabyte_of_nothing_takes_no_memory(found: Found, store: Store) -> None:
    """Holes cost the one who makes them nothing: what could not have been written here is not read."""
    shard = found.shard(0)
    huge = replace(shard, size_bytes=1 << 50, chunk_bytes=1 << 30, digests=("0" * 32,) * (1 << 20))
    os.truncate(Path(found.path, SHARD), 1 << 42)
    os.truncate(Path(found.path, SHARD), shard.size_bytes)
    with pytest.raises(CorruptError, match="has 20480 bytes, not 1125899906842624"):
        read_shard(Path(found.path), huge)
    sparse = replace(huge, size_bytes=1 << 42, digests=("0" * 32,) * (1 << 12))
    os.truncate(Path(found.path, SHARD), 1 << 42)
    with pytest.raises(StoreError, match="more than this host's memory"):
        read_shard(Path(found.path), sparse)


def test_reading_can_be_called_off(found: Found) -> None:
    cancel = Event()
    cancel.set()
    with pytest.raises(CancelledError):
        read_shard(Path(found.path), found.shard(0), cancel=cancel)


def test_held_is_not_pruned(store: Store, found: Found) -> None:
    """An upload takes longer than three saves: what it reads stays until it is done."""
    with held(Path(found.path)):
        for step in (2, 3, 4):
            save(store, step, [Buffer("a", content(step))])
        assert [each.step for each in store.found()] == [4, 3, 1]
        assert read(store.found()[2], 0)["a"].data == content(1)
    assert store.prune() == [found.name]
    with pytest.raises(FileNotFoundError), held(Path(found.path)):
        pass


def test_held_by_a_process_that_died_is_held_no_more(store: Store, found: Found) -> None:
    pid = os.fork()
    if pid == 0:
        with held(Path(found.path)):
            os._exit(0)
    os.waitpid(pid, 0)
    for step in (2, 3):
        save(store, step, [Buffer("a", content(step))])
    assert [each.step for each in store.found()] == [3, 2]


def test_a_worker_that_was_forked_holds_nothing(store: Store, found: Found) -> None:
    """A data loader's worker outlives its trainer, or just what its trainer held when it was forked."""
    with contextlib.ExitStack() as worker:
        with held(Path(found.path)):
            worker.enter_context(forked_worker())
        for step in (2, 3):
            save(store, step, [Buffer("a", content(step))])
        assert [each.step for each in store.found()] == [3, 2]
        store.close()
        Store(store.root, job="test").close()
