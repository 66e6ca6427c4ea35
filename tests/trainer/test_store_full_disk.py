"""A disk that is full to the last inode cannot lose an emergency: real file systems, filled by all means there are."""

import contextlib
import errno
import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from powerguard.trainer import Guard, Parts
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.store import Store, StoreError, newest_in
from powerguard.wire import After, Phase, Reason, TriggerRequest
from tests.trainer.checkpoints import read, save
from tests.trainer.cuts.loops import SMALLEST, make, mounted, needs_loop_devices, run
from tests.trainer.test_guard_process import until

SIZE = 3 << 20
FULL = {errno.ENOSPC, errno.EMLINK, errno.EDQUOT}


def items(step: int) -> list[Buffer]:
    """A state that is a little longer at every tenth step, as counters and lists in it are."""
    return [Buffer("weights", bytes([step]) * SIZE), Buffer.json("history", list(range(step * 20)))]


def until_full(make_one: Callable[[int], object]) -> int:
    """Do it again and again until there is no room; return how often it went."""
    for number in count():
        try:
            make_one(number)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return number
    raise AssertionError


def append(descriptor: int, size: int) -> None:
    with contextlib.suppress(BlockingIOError):
        if os.write(descriptor, bytes(size)) == 0:
            raise OSError(errno.ENOSPC, "full")


def fill(disk: Path, root: Path, *, names: bool) -> dict[str, int]:
    """Take all there is: blocks, inodes, and the room in the folder of the checkpoints itself. names: these too."""
    junk = disk / "junk"
    junk.mkdir()
    taken = {}
    descriptor = os.open(junk / "big", os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 4096, 512, 1):
        taken[f"blocks of {size}"] = until_full(lambda _, size=size: append(descriptor, size))
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    os.close(descriptor)
    if not names:
        return taken
    # Names in the checkpoints' folder, without an inode of their own, until its blocks are full and no more can be had.
    taken["names"] = until_full(lambda n: os.link(junk / "big", root / f"{n:06d}-{'x' * 28}"))
    taken["files"] = until_full(lambda n: (junk / f"{n}").write_bytes(b"x" * (n % 2)))
    taken["folders"] = until_full(lambda n: (junk / f"folder-{n}").mkdir())
    os.sync()
    taken["more names"] = until_full(lambda n: os.link(junk / "big", root / f"{n}"))
    return taken


@pytest.mark.parametrize("kind", ["ext4", "ext4-1k", "xfs", "btrfs"])
def test_a_full_disk_loses_no_emergency(tmp_path: Path, kind: str) -> None:
    """Ten in a row: each takes a slot, and the one before the last becomes a slot again.

    On btrfs only data can be full: every change of a name there needs new blocks for the trees, and gets none.
    """
    needs_loop_devices()
    image = tmp_path / "disk.img"
    make(kind, image, SMALLEST[kind])
    with mounted(image, tmp_path / "disk", kind) as disk:
        root = disk / "checkpoints"
        with Store(root, job="test", chunk_bytes=1 << 20) as store:
            store.prepare(SIZE + 8192)
            for step in range(1, 4):
                save(store, step, items(step))
            assert store.prepare(SIZE + 8192)
            print(kind, fill(disk, root, names=kind != "btrfs"))
            with pytest.raises(OSError, match="No space left"):
                (root / "one-more").write_bytes(bytes(100_000))
            for step in range(4, 14):
                save(store, step, items(step), urgent=True)
                assert [found.step for found in store.found()] == [step, step - 1]
            assert store.last_write is not None
            assert store.last_write.in_place
    with mounted(image, tmp_path / "disk", kind) as disk, Store(disk / "checkpoints", job="test") as store:
        for found in store.found():
            loaded = read(found, 0)
            assert all(loaded[item.name].data == item.data for item in items(found.step))
        assert [found.step for found in store.found()] == [13, 12]
        save(store, 14, items(14), urgent=True)
        assert store.found()[0].step == 14


def test_without_slots_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    needs_loop_devices()
    image = tmp_path / "disk.img"
    make("ext4", image, SMALLEST["ext4"])
    with mounted(image, tmp_path / "disk", "ext4") as disk, Store(disk / "checkpoints", job="test", slots=0) as store:
        save(store, 1, items(1))
        fill(disk, store.root, names=True)
        with pytest.raises(OSError, match="No space left on device"):
            save(store, 2, items(2), urgent=True)
        with pytest.raises(OSError, match="No space left on device"):
            save(store, 3, items(3), urgent=True)
        assert [found.step for found in store.found()] == [1]
        assert read(store.found()[0], 0)["weights"].data == items(1)[0].data


def test_a_disk_with_room_for_three_goes_on(tmp_path: Path) -> None:
    """Two kept and one slot: an ordinary save takes it, and pruning brings it back; also after a restart."""
    needs_loop_devices()
    image = tmp_path / "disk.img"
    make("ext4", image, SMALLEST["ext4"])
    big = [Buffer("weights", bytes(14 << 20))]
    with mounted(image, tmp_path / "disk", "ext4") as disk:
        for start in (0, 10):
            with Store(disk / "checkpoints", job="test") as store:
                with contextlib.suppress(StoreError):
                    store.prepare(14 << 20)
                for step in range(start, start + 6):
                    save(store, step, big, urgent=step % 4 == 3)
                assert [found.step for found in store.found()] == [start + 5, start + 4]


def test_a_copy_by_reference_is_no_slot(tmp_path: Path) -> None:
    """Its blocks are two files' now: writing over them would need new ones, which a full disk does not have."""
    needs_loop_devices()
    image = tmp_path / "disk.img"
    make("xfs", image, SMALLEST["xfs"])
    with mounted(image, tmp_path / "disk", "xfs") as disk, Store(disk / "checkpoints", job="test") as store:
        for step in (1, 2, 3):
            save(store, step, items(step))
        assert store.slots_ready(SIZE) == 1
        run("cp", "-r", "--reflink=always", store.found()[-1].path, str(disk / "mine"))
        save(store, 4, items(4), urgent=True)
        assert store.slots_ready(SIZE) == 0, "the one that was copied was removed, and nothing was made of it"
        save(store, 5, items(5))
        assert store.slots_ready(SIZE) == 1
        assert items(2)[0].data in (disk / "mine" / "shard-00000").read_bytes()


def test_a_disk_that_is_read_only(tmp_path: Path) -> None:
    """As ext4 makes it after an error: what is there can be read, also after a restart; a save says why not."""
    needs_loop_devices()
    image = tmp_path / "disk.img"
    make("ext4", image, SMALLEST["ext4"])
    with mounted(image, tmp_path / "disk", "ext4") as disk:
        with Store(disk / "checkpoints", job="test") as store:
            saved = save(store, 1, items(1))
            store.prepare(SIZE + 8192)
        run("mount", "-o", "remount,ro", str(disk))
        with Store(disk / "checkpoints", job="test") as store:
            assert newest_in(disk / "checkpoints") == saved
            assert read(store.found()[0], 0)["weights"].data == items(1)[0].data
            with pytest.raises(OSError, match="Read-only file system"):
                save(store, 2, items(2), urgent=True)


def test_a_disk_that_becomes_read_only_in_mid_run(tmp_path: Path) -> None:
    """As ext4 is told to be at an error: the emergency fails with the path, training goes on, the last one stays."""
    needs_loop_devices()
    image = tmp_path / "disk.img"
    make("ext4", image, SMALLEST["ext4"])
    loaded: list[bytes] = []
    parts = Parts(lambda: {"weights": bytes(SIZE)}, lambda saved: loaded.append(bytes(saved["weights"])))
    with mounted(image, tmp_path / "disk", "ext4") as disk:
        run("mount", "-o", "remount,errors=remount-ro", str(disk))
        device = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {disk} " in line)
        with Guard(parts, disk / "ck", job="job", every_s=None, socket=None) as guard:
            good = guard.save(1)
            Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error").write_text("of a test")
            guard.requests.trigger(TriggerRequest(id="e", reason=Reason.ON_BATTERY, after=After.CONTINUE))
            guard.step(2)
            until(lambda: guard.requests.results[Phase.FAILED])
            answer = guard.requests.checkpoint("e")
            assert answer is not None
            assert answer.error.startswith("OSError: [Errno 30] Read-only file system: '")
            assert str(disk / "ck") in answer.error
            guard.step(3)
            assert guard.restore() == 1
        assert newest_in(disk / "ck") == good
        assert loaded == [bytes(SIZE)]


@pytest.mark.parametrize(
    ("mib", "periodic", "kept"), [(14, [2, 3, 4, 5], 2), (20, [2, 3, 4, 5], 1), (33, [], 1)], ids=["3", "2", "1"]
)
def test_a_small_disk_has_room_for_the_emergency_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mib: int, periodic: list[int], kept: int
) -> None:
    """Room for three, two, one: told as soon as the size is known; older checkpoints and periodic ones stand back."""
    needs_loop_devices()
    image = tmp_path / "disk.img"
    make("ext4", image, SMALLEST["ext4"])
    now = [0.0]
    parts = Parts(lambda: {"weights": bytes(mib << 20)}, lambda _: None)
    with (
        mounted(image, tmp_path / "disk", "ext4") as disk,
        Guard(parts, disk / "ck", job="job", every_s=300, socket=None, clock=lambda: now[0]) as guard,
    ):
        totals, requests = guard.requests.pace.totals, guard.requests
        guard.step(1)
        until(lambda: requests.pace.write_s(1) is not None)
        until(lambda: any("kept checkpoints and 2 slots for emergencies" in each.message for each in caplog.records))
        for step in range(2, 6):
            now[0] += 400
            tried = totals.writes + totals.failed
            guard.step(step)
            until(partial(lambda tried: totals.writes + totals.failed > tried, tried))
            assert requests.last is None or requests.last.step == step
        assert totals.writes == len(periodic)
        requests.trigger(TriggerRequest(id="e", reason=Reason.ON_BATTERY, after=After.CONTINUE))
        guard.step(6)
        until(lambda: requests.results[Phase.COMMITTED])
        assert requests.last is not None
        assert requests.last.step == 6
        with Store(disk / "ck", job="job", leader=False) as store:
            until(lambda: len(store.found()) == kept)
            assert read(store.found()[0], 0)["weights"].data == bytes(mib << 20)
        if not periodic:  # nothing is left for another one, and that is said
            with pytest.raises(OSError, match=r"No space left on device: a checkpoint takes .* larger disk\)"):
                guard.save(7)
            assert newest_in(disk / "ck") == requests.last


def test_slots_that_do_not_fit_take_nothing(tmp_path: Path) -> None:
    """Half a slot helps nobody, and would fill the disk."""
    needs_loop_devices()
    image = tmp_path / "disk.img"
    make("ext4", image, SMALLEST["ext4"])
    with mounted(image, tmp_path / "disk", "ext4") as disk, Store(disk / "checkpoints", job="test") as store:
        free = os.statvfs(disk).f_bavail
        with pytest.raises(StoreError, match="an emergency checkpoint may find no room"):
            store.prepare(80 << 20)
        with pytest.raises(OSError, match=r"No space left on device: .*\(free .* there, or name a folder on a larger"):
            save(store, 1, [Buffer("weights", bytes(80 << 20))], urgent=True)
        store.abandon(next(store.root.glob("step-*")).name)
        assert os.statvfs(disk).f_bavail == free


class FillingDisk(Disk):
    """A disk that another process fills while a slot is made."""

    left = 10 << 20

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Take data until there is no room."""
        self.left -= len(content)
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, content, offset)


class Quota(Disk):
    """A user whose quota has room for the state, and for nothing besides."""

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        if size_bytes > SIZE + 4096:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        super().allocate(descriptor, size_bytes)

    def rename(self, old: Path, new: Path) -> None:
        if old.name.startswith(".slot-") and any(old.parent.glob(".room-*")):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        super().rename(old, new)


def test_a_quota_that_is_nearly_used_up_is_as_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    """The room in which a file could grow, and that of a longer name, are not needed."""
    with Store(tmp_path / "ck", job="test", disk=Quota()) as store:
        save(store, 1, [Buffer("weights", bytes(SIZE))])
        store.prepare(SIZE)
        save(store, 2, [Buffer("weights", bytes(SIZE))], urgent=True)
        assert [found.step for found in store.found()] == [2, 1]


def test_a_slot_that_the_disk_has_no_room_for_gives_back_what_it_took(tmp_path: Path) -> None:
    """The rest of the disk is for the next emergency, not for half a slot."""
    with Store(tmp_path / "ck", job="test", disk=FillingDisk()) as store:
        with pytest.raises(OSError, match="No space left"):
            store.prepare(30 << 20)
        assert not list(store.root.glob(".slot-*/*"))
