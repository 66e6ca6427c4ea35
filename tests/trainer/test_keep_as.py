"""`guard.save(step, keep_as="best")`: a checkpoint that stays until the next one of its name, whatever is pruned."""

import errno
import os
import re
import time
from pathlib import Path

import pytest

from powerguard.trainer import Guard, Parts, StoreError
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.folders import RootSpace, folders, look
from powerguard.trainer.store.manifest import MANIFEST
from powerguard.trainer.store.store import Store
from tests.cli.checkpoint_sites import save


def guarded(root: Path, content: dict[str, bytes]) -> Guard:
    return Guard(Parts(lambda: content, content.update), root, job="llm", socket=None, every_s=None)


def loaded(root: Path, step: int | None = None) -> tuple[int, dict[str, object]]:
    content: dict[str, object] = {}
    with Guard(Parts(dict, content.update), root, job="llm", socket=None, every_s=None) as guard:
        return guard.restore(step=step), {name: bytes(value) for name, value in content.items()}  # type: ignore[call-overload]


def test_best_outlives_what_is_pruned(tmp_path: Path) -> None:
    """Two are kept of nine, and the best of them is neither; its blocks are not written over."""
    root, content = tmp_path / "llm", {"w": b""}
    with guarded(root, content) as guard:
        for step in range(1, 10):
            content["w"] = f"step {step};".encode() * 5000
            guard.save(step, keep_as="best" if step in (2, 4) else None)
        until_pruned(guard, root)
    assert [each.step for each in Store(root, job="llm", slots=0).found()] == [9, 8]
    assert [path.name.split("-")[1] for path in folders(root / "best")] == ["000000000004"]
    assert loaded(root / "best") == (4, {"w": b"step 4;" * 5000})
    assert loaded(root)[0] == 9


def test_a_full_disk_names_what_is_kept_apart(tmp_path: Path) -> None:
    """Its blocks are its own once the original is pruned. Until then it takes nothing, and is not named."""

    def said() -> str:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights")
        match = "No space left on device: a checkpoint takes "
        with (
            pytest.raises(OSError, match=match) as caught,
            RootSpace(root, keep=2, slots=2).explaining_full_disk(1 << 60),
        ):
            raise full
        return str(caught.value)

    root, content = tmp_path / "llm", {"w": b"w" * 3_000_000}
    with guarded(root, content) as guard:
        guard.save(1, keep_as="best")
        assert "best" not in said()
        for step in (2, 3):
            guard.save(step)
        until_pruned(guard, root)
    assert " there, or name a folder on a larger disk; best takes 3.1 MB)" in said()
    newest = folders(root)[0]
    newest.rename(root / f"old-{newest.name}")
    assert re.search(r" disk; best takes 3\.1 MB; old-step-0+3-[\w-]+ takes 3\.1 MB\)", said())


def until_pruned(guard: Guard, root: Path) -> None:
    """Prune as the writer's thread does in idle time: with slots made of what goes; that thread may be at it, too."""
    store = guard._checkpointer._store  # type: ignore[attr-defined]
    until_s = time.perf_counter() + 60
    while len(folders(root)) > 2:
        assert time.perf_counter() < until_s, "it never came true"
        store.prune()
        store.prepare(40_000)
    assert len(folders(root)) == 2


def test_same_one_again_changes_nothing(tmp_path: Path) -> None:
    with guarded(tmp_path, {"w": b"x" * 5000}) as guard:
        saved = guard.save(3, keep_as="best")
        store = guard._checkpointer._store  # type: ignore[attr-defined]
        before = sorted(tmp_path.glob("best/*/*"))
        assert store.keep_as(saved, "best") == tmp_path / "best" / Path(saved.path).name
        assert sorted(tmp_path.glob("best/*/*")) == before


class Killed(BaseException):
    """As kill -9 does it: no handler cleans up."""


class KillingDisk(Disk):
    """Dies before the count-th change."""

    def __init__(self, count: int) -> None:
        self.left = count

    def _spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def make_folder(self, path: Path) -> None:
        self._spend()
        super().make_folder(path)

    def sync_folder(self, path: Path) -> None:
        self._spend()
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._spend()
        super().rename(old, new)

    def link(self, file: Path, name: Path) -> None:
        self._spend()
        super().link(file, name)

    def unlink(self, path: Path) -> None:
        self._spend()
        super().unlink(path)

    def remove_folder(self, path: Path) -> None:
        self._spend()
        super().remove_folder(path)


def test_killed_at_each_change(tmp_path: Path) -> None:
    """The earlier one, both, or the new one is whole; nothing half is taken for whole; the next try succeeds."""
    for count in range(16):
        root = tmp_path / str(count)
        first, second = (Path(save(root, step)) for step in (10, 20))
        with Store(root, job="llm", slots=0) as store:
            one, two = store.found()[::-1]
            store.keep_as(one.saved(), "best")
        with Store(root, job="llm", slots=0, disk=KillingDisk(count)) as store:
            try:
                store.keep_as(two.saved(), "best")
                is_killed = False
            except Killed:
                is_killed = True
        kept = [path for path in folders(root / "best") if (path / MANIFEST).exists()]
        assert {path.name for path in kept} & {first.name, second.name}
        assert all(hasattr(each, "manifest") for each in look(root / "best")), "nothing half"
        with Store(root, job="llm", slots=0) as store:
            store.keep_as(two.saved(), "best")
        assert [path.name for path in (root / "best").iterdir()] == [second.name]
    assert not is_killed, "the last count is larger than the number of changes"


@pytest.mark.parametrize("name", ["", "a/b", "../best", "step-000000000001-00000000", "bad-x", ".x", "x" * 65, 7])
def test_names_that_are_refused(tmp_path: Path, name: object) -> None:
    with guarded(tmp_path, {"w": b"x"}) as guard, pytest.raises(StoreError, match="keep_as="):
        guard.save(1, keep_as=name)  # type: ignore[arg-type]
    assert not folders(tmp_path), "refused before anything is saved"


def test_one_that_is_set_aside_meanwhile_costs_no_older_best(tmp_path: Path) -> None:
    """The scrub, or a person, has just renamed it: an empty folder must not take the place of the best one so far."""
    root, content = tmp_path / "llm", {"w": b"good" * 5000}
    with guarded(root, content) as guard:
        guard.save(1, keep_as="best")
        saved = guard.save(2)
        Path(saved.path).rename(root / f"bad-{Path(saved.path).name}")
        with pytest.raises(StoreError, match="what was kept there stays"):
            guard._keeper("best")(saved)
        assert [path.name.split("-")[1] for path in folders(root / "best")] == ["000000000001"]
    assert loaded(root / "best") == (1, {"w": b"good" * 5000})


class UnlinkingDisk(Disk):
    """A file system without hard links."""

    def link(self, file: Path, name: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(file), None, str(name))


def test_file_system_without_links(tmp_path: Path) -> None:
    """It is said what the file system lacks; the checkpoint itself is durable."""
    parts = Parts(lambda: {"w": b"x" * 5000}, dict)
    guard = Guard(parts, tmp_path, job="llm", socket=None, every_s=None, disk=UnlinkingDisk())
    with guard, pytest.raises(StoreError, match="has no hard links"):
        guard.save(1, keep_as="best")
    assert len(folders(tmp_path)) == 1


def test_function_keeps_its_own() -> None:
    guard = Guard(lambda step: None, job="llm", socket=None, every_s=None)  # type: ignore[arg-type, return-value]
    with guard, pytest.raises(StoreError, match="needs a state with items"):
        guard.save(1, keep_as="best")
