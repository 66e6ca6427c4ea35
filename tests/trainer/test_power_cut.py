"""The power is cut before every single write, flush and rename of a checkpoint: what was acknowledged is there, whole.

The disk keeps what was flushed and may lose all else, in three ways: it keeps nothing that was not flushed; it keeps
names but not contents (empty files); it keeps names and lengths but not contents (zeroes, as ext4 leaves them). And a
disk that forgets a kind of flush must be caught, else this test would prove nothing.
"""

import os
import stat
from pathlib import Path
from typing import Final

import pytest

from powerguard.trainer.store import Disk, FolderStore

WAYS: Final = ("nothing", "names", "zeroes")


class CutDisk(Disk):
    """Copies what a power cut would leave, before every call; `forgets` names a kind of flush that does nothing."""

    def __init__(self, root: Path, cuts: Path, forgets: str = "") -> None:
        self.acknowledged = 0
        self.taken: list[tuple[Path, int]] = []
        self._root = root
        self._cuts = cuts
        self._forgets = forgets
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}

    def write(self, descriptor: int, content: memoryview) -> int:
        self.cut()
        return super().write(descriptor, content)

    def rename(self, old: Path, new: Path) -> None:
        self.cut()
        super().rename(old, new)

    def sync(self, descriptor: int) -> None:
        self.cut()
        found = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        kind = ("root" if path == self._root else "folder") if stat.S_ISDIR(found.st_mode) else path.suffix or "data"
        if kind == self._forgets:
            return
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self._contents[found.st_ino] = path.read_bytes()

    def cut(self) -> None:
        where = {path.stat().st_ino: path for path in self._root.rglob("*")}
        for way in WAYS:
            target = self._cuts / f"{len(self.taken)}-{way}"
            self._copy(self._root, target, way, where)
            self.taken.append((target, self.acknowledged))

    def _copy(self, folder: Path, target: Path, way: str, where: dict[int, Path]) -> None:
        target.mkdir()
        names = {entry.name: entry.stat().st_ino for entry in folder.iterdir()}
        if way == "nothing":
            names = self._names.get(folder.stat().st_ino, {})
        for name, number in names.items():
            path = where.get(number)
            if path is None:
                continue  # removed since: an old checkpoint that was not to be kept
            if path.is_dir():
                self._copy(path, target / name, way, where)
                continue
            flushed, now = self._contents.get(number, b""), path.read_bytes()
            (target / name).write_bytes(bytes(len(now)) if way == "zeroes" and flushed != now else flushed)


def parts(step: int) -> dict[str, list[bytes]]:
    return {"a.bin": [bytes([step]) * 1000, bytes([step + 100]) * 500], "b.bin": [b"b" * step]}


def whole(step: int) -> dict[str, bytes]:
    return {name: b"".join(chunks) for name, chunks in parts(step).items()}


def broken_promises(tmp_path: Path, forgets: str = "") -> tuple[int, list[str]]:
    """Save five checkpoints; return how many cuts were tried and what was wrong after them."""
    root, cuts = tmp_path / "root", tmp_path / "cuts"
    cuts.mkdir()
    disk = CutDisk(root, cuts, forgets)
    with FolderStore(root, disk=disk) as store:
        for step in range(1, 6):
            store.save(step, parts(step))
            disk.acknowledged = step
        disk.cut()
    wrong = []
    for target, acknowledged in disk.taken:
        with FolderStore(target) as store:
            restored = store.restore()
        step = 0 if restored is None else restored.saved.step
        if step < acknowledged:
            wrong.append(f"{target.name}: step {acknowledged} was acknowledged, {step} is there")
        if restored is not None and restored.parts != whole(step):
            wrong.append(f"{target.name}: a torn checkpoint of step {step} was taken for a good one")
    return len(disk.taken), wrong


def test_no_cut_costs_an_acknowledged_checkpoint(tmp_path: Path) -> None:
    tried, wrong = broken_promises(tmp_path)
    print(f"power cuts tried: {tried}")
    assert wrong == []
    assert tried > 150


@pytest.mark.parametrize("forgets", [".bin", ".tmp", "folder", "root"])
def test_a_disk_that_forgets_a_flush_is_caught(tmp_path: Path, forgets: str) -> None:
    """Every flush that we do is needed: of the parts, of the manifest, of the folder, and of the folder above."""
    _, wrong = broken_promises(tmp_path, forgets)
    assert any("was acknowledged" in what for what in wrong)
    assert not any("torn" in what for what in wrong), "even then the digests refuse it"
