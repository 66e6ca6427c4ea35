"""A checkpoint is whole and verified, or it is not there: torn, rotten and foreign ones are never taken for good."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerguard.trainer.store import MANIFEST, FolderStore, Manifest, Part, StoreError, newest_in

PARTS = {"state.json": [b"one", b"two"], "padding.bin": [bytes(100_000)] * 3}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "check points"


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_what_is_saved_comes_back(root: Path) -> None:
    told: list[tuple[int, int | None]] = []
    with FolderStore(root) as store:
        assert store.restore() is None
        saved = store.save(7, PARTS, lambda done, of: told.append((done, of)))
        restored = store.restore()
    assert restored is not None
    assert restored.saved == saved == newest_in(root)
    assert (saved.step, saved.size_bytes) == (7, 300_006)
    assert restored.parts == {"state.json": b"onetwo", "padding.bin": bytes(300_000)}
    assert [done for done, _ in told] == [3, 6, 100_006, 200_006, 300_006, 300_006]
    assert told[-1] == (300_006, 300_006)


def test_the_newest_step_wins_and_two_are_kept(root: Path) -> None:
    with FolderStore(root) as store:
        for step in (5, 90, 1000):
            store.save(step, {"a": [str(step).encode()]})
        restored = store.restore()
    assert restored is not None
    assert restored.saved.step == 1000
    assert len(folders(root)) == 2


def test_a_step_saved_twice_has_two_folders_and_the_later_counts(root: Path) -> None:
    """A folder is never overwritten: a kill in mid-write would leave old and new mixed behind a valid manifest."""
    with FolderStore(root) as store:
        store.save(5, {"a": [b"first"]})
        store.save(5, {"a": [b"second"]})
        restored = store.restore()
    assert restored is not None
    assert restored.parts == {"a": b"second"}
    assert len(folders(root)) == 2


def rot(path: Path, seed: int) -> None:
    """Flip one bit somewhere."""
    content = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["state.json", "padding.bin", MANIFEST])
@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_is_found_and_the_older_one_is_taken(root: Path, name: str, seed: int) -> None:
    """No loader of torch notices one: 200 of 200 flips went unseen when we measured."""
    with FolderStore(root) as store:
        store.save(1, PARTS)
        rot(Path(store.save(2, PARTS).path) / name, seed)
        restored = store.restore()
    assert restored is not None
    assert restored.saved.step == 1
    assert len(restored.refused) == 1
    assert [folder[:4] for folder in folders(root)] == ["bad-", "step"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "hole", "no manifest", "renamed", "foreign schema", "escape"])
def test_damage_is_found(root: Path, damage: str) -> None:
    with FolderStore(root) as store:
        store.save(1, PARTS)
        folder = Path(store.save(2, PARTS).path)
        match damage:
            case "truncate":
                os.truncate(folder / "padding.bin", 1000)
            case "remove":
                (folder / "state.json").unlink()
            case "hole":
                (folder / "state.json").write_bytes(bytes(6))
            case "no manifest":
                (folder / MANIFEST).unlink()
            case "renamed":
                folder.rename(folder.with_name("step-000000000003-00000000"))
            case "foreign schema":
                (folder / MANIFEST).write_text('{"schema": "x"}')
            case "escape":
                evil = Manifest(step=2, job="x", parts=(Part(name="../../etc/passwd", size_bytes=1, digest="0"),))
                (folder / MANIFEST).write_bytes(evil.to_json())
        restored = store.restore()
    assert restored is not None
    assert restored.saved.step == 1


def test_one_that_cannot_be_read_just_now_is_passed_over_and_left(root: Path) -> None:
    """An I/O error (here: ELOOP) may be gone tomorrow; what does not verify will not."""
    with FolderStore(root) as store:
        store.save(1, PARTS)
        part = Path(store.save(2, PARTS).path, "state.json")
        part.unlink()
        part.symlink_to(part)
        restored = store.restore()
    assert restored is not None
    assert restored.saved.step == 1
    assert len(restored.refused) == 1
    assert [folder[:4] for folder in folders(root)] == ["step", "step"]


def test_nothing_good_is_nothing(root: Path) -> None:
    with FolderStore(root) as store:
        rot(Path(store.save(2, PARTS).path) / "padding.bin", 1)
        assert store.restore() is None
        assert store.newest() is None


def test_a_failed_save_leaves_nothing_behind(root: Path) -> None:
    """The disk is full, the state cannot be read: the older checkpoint stands and no garbage grows."""

    def breaks() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with FolderStore(root) as store:
        store.save(1, PARTS)
        with pytest.raises(OSError, match="No space left"):
            store.save(2, {"a": breaks()})
        restored = store.restore()
    assert restored is not None
    assert restored.saved.step == 1
    assert len(folders(root)) == 1


def test_two_writers_are_one_too_many(root: Path) -> None:
    with FolderStore(root), pytest.raises(StoreError, match="another process writes checkpoints here"):
        FolderStore(root)
    FolderStore(root).close()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", MANIFEST])
def test_odd_part_names_are_refused(root: Path, name: str) -> None:
    with FolderStore(root) as store, pytest.raises(StoreError, match="part names"):
        store.save(1, {name: [b""]})
    with pytest.raises(StoreError, match="keep at least 2"):
        FolderStore(root, keep=1)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"[" * 100_000, b'{"schema": "powerguard.checkpoint/v1", "step": true, "job": "", "parts": []}']
    + [
        json.dumps({"schema": "powerguard.checkpoint/v1", "step": 1, "job": "", "parts": parts}).encode()
        for parts in (
            1,
            [1],
            [{"name": 1, "size_bytes": 1, "sha256": ""}],
            [{"name": "a", "size_bytes": -1, "sha256": ""}],
        )
    ],
)
def test_a_bad_manifest_is_a_store_error(content: bytes) -> None:
    with pytest.raises(StoreError):
        Manifest.parse(content)


def test_newest_since_a_moment(root: Path) -> None:
    """The daemon asks for what appeared after its request."""
    with FolderStore(root) as store:
        saved = store.save(1, PARTS)
        stamp = (Path(saved.path) / MANIFEST).stat().st_mtime_ns
    assert newest_in(root, since_ns=stamp) == saved
    assert newest_in(root, since_ns=stamp + 1) is None


WRITER = """
import sys
from pathlib import Path
from powerguard.trainer.store import FolderStore
with FolderStore(Path(sys.argv[1])) as store:
    step = 1 + (store.newest().step if store.newest() else 0)
    while True:
        saved = store.save(step, {"a": [bytes([step % 251]) * 200_000] * 20, "b": [str(step).encode()]})
        print(step, flush=True)
        step += 1
"""


def test_a_killed_writer_never_costs_what_it_acknowledged(root: Path) -> None:
    """kill -9 at ten instants: the newest verified checkpoint is at least the last acknowledged one, and whole."""
    for trial in range(10):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(1 + trial % 3):
                acknowledged = int(writer.stdout.readline())
            try:
                writer.wait(timeout=0.003 * (trial + 1))
            except subprocess.TimeoutExpired:
                writer.kill()
            rest = writer.stdout.read().split()
        acknowledged = int(rest[-1]) if rest else acknowledged
        with FolderStore(root) as store:
            restored = store.restore()
        assert restored is not None
        assert restored.refused == ()
        step = restored.saved.step
        assert step >= acknowledged
        assert restored.parts == {"a": bytes([step % 251]) * 4_000_000, "b": str(step).encode()}
