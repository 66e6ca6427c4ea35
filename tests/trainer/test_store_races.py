"""Several ranks, and one of an earlier run, under one root: nobody takes a folder from under another's hands."""

import errno
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType

import pytest

from powerguard.trainer.loop.checkpointer import Order, SingleProcess, StoreCheckpointer, Taken
from powerguard.trainer.store.disk import Disk, DiskFile
from powerguard.trainer.store.folders import files_in, look
from powerguard.trainer.store.items import Buffer, Parts
from powerguard.trainer.store.manifest import Manifest, Shard
from powerguard.trainer.store.shards import Progress, Snapshot
from powerguard.trainer.store.store import Store
from tests.trainer.checkpoints import manifest, read, save

PAGE = 4096
SIZE = 8 * PAGE


def items(step: int) -> list[Buffer]:
    return [Buffer("a", bytes([step % 251]) * (SIZE - 64)), Buffer.json("step", step)]


def leading(root: Path, *, hosts: int = 1, disk: Disk | None = None) -> Store:
    return Store(root, job="test", ranks=2, hosts=hosts, chunk_bytes=PAGE, disk=disk)


def following(root: Path, *, hosts: int = 1) -> Store:
    return Store(root, job="test", rank=1, ranks=2, hosts=hosts, leader=False, chunk_bytes=PAGE)


def write(store: Store, name: str, step: int, progress: Progress | None = None, *, urgent: bool = False) -> Shard:
    with Snapshot() as snapshot:
        return store.write_shard(name, store.rank, snapshot, snapshot.take(items(step)), progress, urgent=urgent)


def both(leader: Store, other: Store, step: int, token: str) -> None:
    """Save as two ranks."""
    name = leader.name(step, token)
    shards = [write(store, name, step, urgent=True) for store in (leader, other)]
    leader.commit(name, manifest(step, shards))
    other.let_go()


def test_a_second_save_of_the_newest_step_is_not_pruned(tmp_path: Path) -> None:
    """At the end of training the last step is saved again: one rank begins while the leader still tidies up."""
    with leading(tmp_path) as leader, following(tmp_path) as other:
        both(leader, other, 5, "00000000")
        again = leader.name(5, "11111111")
        shard = write(other, again, 5)
        other.let_go()  # over NFS nobody sees what another host holds
        assert leader.prune() == []
        leader.commit(again, manifest(5, [write(leader, again, 5), shard]))


def test_what_the_leader_gives_up_stays_until_the_last_rank_lets_go(tmp_path: Path) -> None:
    """The last one gives the slot back: the next emergency finds as many as before."""
    with leading(tmp_path) as leader, following(tmp_path) as other:
        for store in (leader, other):
            assert store.prepare(SIZE)
        name = leader.name(1, "00000000")
        write(leader, name, 1, urgent=True)
        write(other, name, 1, lambda *_: leader.abandon(name), urgent=True)
        assert (tmp_path / name / "shard-00001").exists()
        assert leader.slots_ready(SIZE) == 1
        other.abandon(name)
        assert not (tmp_path / name).exists()
        assert leader.slots_ready(SIZE) == other.slots_ready(SIZE) == 2


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_that_comes_late_costs_no_slot(tmp_path: Path, hosts: int) -> None:
    """It begins when the leader has given the checkpoint up already, and takes a slot for it."""
    with leading(tmp_path, hosts=hosts) as leader, following(tmp_path, hosts=hosts) as other:
        for store in (leader, other):
            assert store.prepare(SIZE)
        name = leader.name(1, "00000000")
        leader.abandon(name)
        write(other, name, 1, urgent=True)
        other.abandon(name)
        leader.prune()
        assert not (tmp_path / name).exists()
        assert leader.slots_ready(SIZE) == 2


class Refusing(Disk):
    """A disk that takes no data."""

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Refuse."""
        raise OSError(errno.EREMOTEIO, os.strerror(errno.EREMOTEIO))


def test_who_fails_first_is_who_is_named(tmp_path: Path) -> None:
    """The others find its folder gone: they must not be the first to tell of a failure, for they know no reason."""
    found: list[bool] = []

    class OtherRanks(SingleProcess):
        """The other ranks, as they hear that one has failed."""

        def failed(self, error: Exception) -> None:
            """Look whether its folder is there still."""
            assert isinstance(error, OSError)
            found.append(any(tmp_path.glob("step-*")))

    state = Parts(lambda: {"a": b"x" * SIZE}, lambda _items: None)
    with closing(StoreCheckpointer(state, Store(tmp_path, job="test", disk=Refusing()))) as stored:
        taken = stored.take(1, 0)
        assert isinstance(taken, Taken)
        order = Order(reason="test", urgent=True, cancel=threading.Event(), others=OtherRanks())
        with pytest.raises(OSError, match="Remote I/O error"):
            stored.write(taken, lambda *_: None, order)
    assert found == [True]
    assert not any(tmp_path.glob("step-*"))


class Fresh(Disk):
    """A disk on which somebody takes the slot as soon as there is one: it is still held by who made it."""

    def __init__(self, root: Path, take: Callable[[], object]) -> None:
        self._slot, self._taking = root / ".slot-0", threading.Thread(target=take)

    def sync_folder(self, path: Path) -> None:
        """Have it taken first."""
        if path == self._slot.parent and self._slot.exists() and self._taking.ident is None:
            self._taking.start()
            while self._slot.exists():
                time.sleep(0.001)
            time.sleep(0.02)
        super().sync_folder(path)

    def ended(self) -> None:
        """Wait until it was written into."""
        self._taking.join(60)


def test_a_slot_is_taken_just_as_it_is_made(tmp_path: Path) -> None:
    """The leader prunes, and another rank begins the next checkpoint in the very folder."""
    with following(tmp_path) as other:
        name, written = other.name(2, "22222222"), []
        disk = Fresh(tmp_path, lambda: written.append(write(other, name, 2, urgent=True)))
        with leading(tmp_path, disk=disk) as leader:
            both(leader, other, 1, "11111111")
            leader.prune(keep=0)
            disk.ended()
            assert [shard.rank for shard in written] == [1]


def test_a_rank_of_an_earlier_run_writes_into_nobodys_checkpoint(tmp_path: Path) -> None:
    """Its launcher was killed, a new run has begun, and it still writes: into its own folder, which is no slot."""
    saved = []

    def a_new_run(done: int, _total: int | None) -> None:
        if done == PAGE:
            with leading(tmp_path) as leader, following(tmp_path) as other:
                name = leader.name(8, "22222222")
                shards = [write(store, name, 8, urgent=True) for store in (leader, other)]
                saved.append(leader.commit(name, manifest(8, shards)))

    with following(tmp_path) as orphan:
        (tmp_path / ".slot-0").mkdir()
        name = orphan.name(7, "11111111")
        write(orphan, name, 7, a_new_run, urgent=True)
    with leading(tmp_path) as leader:
        assert [found.saved() for found in leader.found()] == saved
        assert read(leader.found()[0], 1)["a"].data == items(8)[0].data
        assert not (tmp_path / name).exists(), "and what it has left goes when it has gone"


class Slow(Disk):
    """A disk on which a piece is on its way for a while: meanwhile somebody acts."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = [meanwhile]

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Have him act first, the first time."""
        while self._meanwhile:
            self._meanwhile.pop()()
        return super().write(descriptor, content, offset)


def test_a_rank_of_an_earlier_run_fills_nobodys_checkpoint(tmp_path: Path) -> None:
    """The new run's emergency takes the slot that it is filling, in the midst of a piece, and waits for nobody."""
    saved = []

    def a_new_run() -> None:
        with leading(tmp_path) as leader, following(tmp_path) as other:
            name = leader.name(8, "22222222")
            shards = [write(store, name, 8, urgent=True) for store in (leader, other)]
            saved.append(leader.commit(name, manifest(8, shards)))

    disk = Slow(a_new_run)
    with Store(tmp_path, job="test", rank=1, ranks=2, leader=False, chunk_bytes=PAGE, disk=disk) as orphan:
        assert not orphan.prepare(SIZE)
    with leading(tmp_path) as leader:
        assert [found.saved() for found in leader.found()] == saved
        assert read(leader.found()[0], 1)["a"].data == items(8)[0].data


def test_what_is_pruned_while_one_looks_is_not_rotten(tmp_path: Path) -> None:
    """Its manifest was read, and a moment later the folder was a slot: nothing is wrong with that."""
    with Store(tmp_path, job="test", chunk_bytes=PAGE) as store:
        for step in (1, 2):
            save(store, step, items(step))

        def prune(frame: FrameType, event: str, _arg: object) -> None:
            if event == "call" and frame.f_code is Manifest.parse.__func__.__code__:  # type: ignore[attr-defined]
                sys.setprofile(None)
                store.prune(keep=0)

        sys.setprofile(prune)
        try:
            assert list(look(tmp_path)) == []
        finally:
            sys.setprofile(None)


class Stubborn(Disk):
    """A disk on which one folder cannot be removed, as over NFS while somebody has a file of it open."""

    def __init__(self) -> None:
        self.name = ""

    def remove_folder(self, path: Path) -> None:
        """Refuse for one."""
        if path.name == self.name:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        super().remove_folder(path)


def test_what_cannot_be_removed_costs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told, the others go, and an emergency for which room is made is written."""
    disk = Stubborn()
    with Store(tmp_path, job="test", chunk_bytes=PAGE, slots=0, disk=disk) as store:
        for step in (1, 2):
            save(store, step, items(step))
        disk.name = store.found()[1].name
        for step in (3, 4, 5):
            save(store, step, items(step))
        assert [found.step for found in store.found()] == [5, 4]
        assert f"{disk.name}: cannot be removed, and takes room: [Errno 16]" in caplog.text
        disk.name = ""
        assert len(store.prune()) == 1


class Crowded(Disk):
    """A disk on which another rank gives its slot the name of our empty folder, when we look for our file in it."""

    def __init__(self, root: Path) -> None:
        self._slot = root / ".slot-0"

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """Rename first, the first time."""
        if create and self._slot.exists():
            self._slot.rename(path.parent)
        return super().open(path, create=create, direct=direct)


def test_a_slot_in_the_place_of_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / ".slot-0").mkdir()
    (tmp_path / ".slot-0" / "shard-00000").write_bytes(bytes(PAGE))
    (tmp_path / "step").mkdir()
    with DiskFile(Crowded(tmp_path), tmp_path / "step" / "shard-00000") as file:
        assert file.size_bytes == PAGE


def test_a_rotten_one_that_was_put_back_by_hand_is_set_aside_again(tmp_path: Path) -> None:
    with Store(tmp_path, job="test", chunk_bytes=PAGE) as store:
        for _ in range(2):
            save(store, 1, items(1))
            found = store.found()[0]
            store.set_aside(found, "a test")
            (tmp_path / f"bad-{found.name}").rename(tmp_path / found.name)
            (tmp_path / f"bad-{found.name}").mkdir()
            (tmp_path / f"bad-{found.name}" / "shard-00000").touch()
            store.set_aside(found, "a test")
        assert store.found() == []
        assert len(list(tmp_path.glob("bad-*"))) == 2


def test_what_a_first_rank_has_left_that_was_killed_at_once(tmp_path: Path) -> None:
    """By a file of this name the hosts see whether they share a root."""
    (tmp_path / ".here-0123456789abcdef").touch()
    with Store(tmp_path, job="test"):
        assert [path.name for path in files_in(tmp_path)] == [".lock"]


def test_a_store_that_is_closed_in_mid_write_holds_what_it_writes(tmp_path: Path) -> None:
    """A guard that is closed does not wait for ever for a disk; the next one must not be given that folder."""
    seen: list[bool] = []

    def close(done: int, _total: int | None) -> None:
        if done == PAGE:
            store.close()
            with Store(tmp_path, job="test"):
                seen.append((tmp_path / name).exists())

    with Store(tmp_path, job="test", chunk_bytes=PAGE) as store:
        name = store.name(1, "00000000")
        write(store, name, 1, close, urgent=True)
        assert seen == [True]
        store.abandon(name)
        assert not (tmp_path / name).exists()


FLOCK = {"x86_64": 73, "aarch64": 32}  # the system call's number
WITHOUT_LOCKS = """
import ctypes, errno, pathlib, struct, sys
flock = int(sys.argv[2])
words = (0x20, 0, 0, 0), (0x15, 0, 1, flock), (0x06, 0, 0, 0x50000 | errno.ENOLCK), (0x06, 0, 0, 0x7FFF0000)
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *word) for word in words))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(words), ctypes.addressof(program)), 0, 0) == 0  # PR_SET_SECCOMP
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.store import Store
from tests.trainer.checkpoints import save
with Store(pathlib.Path(sys.argv[1]), job="test") as store:
    assert store.prepare(4096)
    for step in (1, 2, 3):
        save(store, step, [Buffer.json("step", step)])
    print([found.step for found in store.found()], store.slots_ready(4096))
"""


@pytest.mark.skipif(platform.machine() not in FLOCK, reason="the number of flock(2) is not known for this processor")
def test_where_there_are_no_locks_it_is_said_and_saved(tmp_path: Path) -> None:
    """As on NFS whose server has none: the kernel answers every flock(2) of a process of its own with ENOLCK."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_LOCKS, str(tmp_path), str(FLOCK[platform.machine()])],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.stdout, ended.returncode) == ("[3, 2] 2\n", 0), ended.stderr
    assert ended.stderr.count(f"{tmp_path}: its file system has no locks") == 1
