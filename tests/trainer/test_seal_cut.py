"""The power is cut before every write, flush and rename of a seal: sealed means whole, acknowledged means sealed.

The framework's own writes are never flushed by it, as we have measured. The disk keeps what was flushed; of the rest it
keeps nothing, names, lengths full of zeroes, or for each file and folder a different one of these.
"""

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from powerguard.trainer.seal.folder import seal, verify
from powerguard.trainer.seal.manifest import SealError
from powerguard.trainer.store.disk import Disk
from tests.trainer.cuts.recording import RecordingDisk
from tests.trainer.cuts.states import cuts, lay_down

WAYS: Final = ("nothing", "names", "zeroes", *(f"random {seed}" for seed in range(6)))
STEPS: Final = (10, 20, 30)


class CutDisk(Disk):
    """Keeps what a power cut before every call would leave. forgets: a kind of flush that does nothing."""

    def __init__(self, root: Path, cuts: Path, forgets: str) -> None:
        self.acknowledged = 0
        self.taken: list[tuple[Path, int]] = []
        self._root, self._cuts, self._forgets = root, cuts, forgets
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._lock = threading.RLock()

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        with self._lock:
            self.cut()
            return super().write(descriptor, content[:200], offset)

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            self.cut()
            super().rename(old, new)

    def sync(self, descriptor: int) -> None:
        with self._lock:
            self.cut()
            path = Path(f"/proc/self/fd/{descriptor}").resolve()
            if (path.suffix or "data") != self._forgets:
                self._contents[path.stat().st_ino] = path.read_bytes()

    def sync_folder(self, path: Path) -> None:
        with self._lock:
            self.cut()
            kind = "above" if path == self._root else "folder" if path.parent == self._root else "inner"
            if path.is_relative_to(self._root) and kind != self._forgets:
                self._names[path.stat().st_ino] = {entry.name: entry.lstat().st_ino for entry in path.iterdir()}

    def cut(self) -> None:
        where = {path.lstat().st_ino: path for path in self._root.rglob("*")}
        for way in WAYS:
            target = self._cuts / f"{len(self.taken)}-{way}"
            self._copy(self._root, target, way, where, random.Random(f"{len(self.taken)} {way}"))
            self.taken.append((target, self.acknowledged))

    def _copy(self, folder: Path, target: Path, way: str, where: dict[int, Path], rng: random.Random) -> None:
        target.mkdir()
        names = {entry.name: entry.lstat().st_ino for entry in folder.iterdir()}
        if self._of(way, rng) == "nothing":
            names = self._names.get(folder.stat().st_ino, {})
        for name, number in names.items():
            path = where.get(number)
            if path is None:
                continue
            if path.is_dir():
                self._copy(path, target / name, way, where, rng)
                continue
            flushed, now = self._contents.get(number, b""), path.read_bytes()
            lost = self._of(way, rng) == "zeroes" and flushed != now
            (target / name).write_bytes(bytes(len(now)) if lost else flushed)

    @staticmethod
    def _of(way: str, rng: random.Random) -> str:
        return way if not way.startswith("random") else rng.choice(("nothing", "names", "zeroes"))


def content(step: int) -> dict[str, bytes]:
    return {"model.bin": bytes([step]) * 3000, "inner/optimizer.bin": bytes([step + 1]) * 500, "inner/.meta": b"m"}


def broken_promises(tmp_path: Path, forgets: str = "") -> tuple[int, list[str]]:
    """Write and seal three checkpoints; return how many cuts were tried and what was wrong after them."""
    root, cuts = tmp_path / "root", tmp_path / "cuts"
    root.mkdir()
    cuts.mkdir()
    disk = CutDisk(root, cuts, forgets)
    for step in STEPS:
        folder = root / f"checkpoint-{step}"
        for name, data in content(step).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        seal(folder, disk=disk)
        disk.acknowledged = step
    disk.cut()
    wrong = []
    for target, acknowledged in disk.taken:
        for step in STEPS:
            folder = target / f"checkpoint-{step}"
            try:
                whole = verify(folder, direct=False).is_whole
            except (SealError, OSError):
                whole = False
            if whole and any((folder / name).read_bytes() != data for name, data in content(step).items()):
                wrong.append(f"{target.name}: a torn checkpoint of step {step} was taken for a good one")
            if not whole and step <= acknowledged:
                wrong.append(f"{target.name}: step {step} was acknowledged and is not whole")
    return len(disk.taken), wrong


def test_no_cut_costs_a_sealed_checkpoint(tmp_path: Path) -> None:
    tried, wrong = broken_promises(tmp_path)
    print(f"power cuts tried: {tried}")
    assert wrong == []
    assert tried > 200


@pytest.mark.parametrize("forgets", [".bin", ".tmp", "inner", "folder", "above"])
def test_a_disk_that_forgets_a_flush_is_caught(tmp_path: Path, forgets: str) -> None:
    """Every flush that sealing does is needed; and whatever is forgotten, nothing torn is taken for good."""
    _, wrong = broken_promises(tmp_path, forgets)
    assert any("was acknowledged" in what for what in wrong)
    assert not any("torn" in what for what in wrong)


# --- In every way that a file system may lose what was not flushed ----------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be had: what is cut here is simulated, and thousands of files are laid down."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="pg-seal-") as name:
        yield Path(name)


class SealingDisk(RecordingDisk):
    """Records a framework that flushes nothing and the sealing after it, which also flushes files that it only read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._at = root

    def sync(self, descriptor: int) -> None:
        with self._lock:
            path = Path(f"/proc/self/fd/{descriptor}").resolve()
            self._flush(self._node(path), "file")

    def sync_folder(self, path: Path) -> None:
        if path.is_relative_to(self._at):
            super().sync_folder(path)


def flat(step: int) -> dict[str, bytes]:
    shards = {f"rank{rank}.bin": bytes([step + rank]) * 9000 for rank in range(4)}
    return {**shards, ".metadata": bytes([step + 1]) * 700, "empty": b""}


def recorded(root: Path) -> SealingDisk:
    """Three checkpoints are written, and each is sealed."""
    root.mkdir()
    disk = SealingDisk(root)

    def write(folder: Path, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            descriptor = disk.open(folder / name, create=True)
            if data:
                disk.write(descriptor, memoryview(data), 0)
            disk.close(descriptor)

    for step in STEPS:
        folder = root / f"checkpoint-{step}"
        disk.make_folder(folder)
        write(folder, flat(step))
        seal(folder, disk=disk)
        disk.promise(step, 0)
    return disk


@pytest.mark.parametrize("ordered", [True, False], ids=["ext4", "weakest"])
@pytest.mark.parametrize(("samples", "least"), [(15, 300), pytest.param(1000, 10_000, marks=pytest.mark.slow)])
def test_every_state_holds_the_promise(scratch: Path, samples: int, least: int, *, ordered: bool) -> None:
    """Each page, name and length there or not, in any combination that the file system may leave."""
    disk = recorded(scratch / "root")
    tried, wrong = 0, []
    for instant, promised, tree in cuts(disk.changes, ordered=ordered, seed=5, samples=samples):
        tried += 1
        target = scratch / "cut"
        lay_down(tree, target)
        for step in STEPS:
            folder = target / f"checkpoint-{step}"
            try:
                whole = verify(folder, direct=False).is_whole
            except (SealError, OSError):
                whole = False
            if whole and any((folder / name).read_bytes() != data for name, data in flat(step).items()):
                wrong.append(f"{instant}: torn step {step} was taken for good")
            if not whole and step <= promised.step:
                wrong.append(f"{instant}: step {step} was promised and is not whole")
        shutil.rmtree(target)
    print(f"states that a cut may leave: {tried}")
    assert wrong[:5] == []
    assert tried > least
