"""A checkpoint is whole and verified, or it is not there; what is kept, recycled and set aside; what disks may do."""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.trainer.store.disk import Disk, is_there
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.manifest import MANIFEST, ManifestError
from powerguard.trainer.store.shards import CancelledError, CorruptError, Snapshot
from powerguard.trainer.store.store import LOCK, SavedCheckpoint, Store, StoreError, newest_in
from tests.trainer.checkpoints import manifest, read, save
from tests.trainer.toy import short_folder

PAGE = 4096


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "check points"


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store(root, job="test", chunk_bytes=PAGE) as store:
        yield store


def items(step: int, pages: int = 3) -> list[Buffer]:
    return [Buffer("a", bytes([step % 251]) * (pages * PAGE - 64)), Buffer.json("step", step)]


def folders(root: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] or path.name for path in root.iterdir() if path.is_dir())


def is_whole(store: Store, step: int) -> bool:
    """Whether the newest checkpoint is this one, to the last byte."""
    found = store.found()[0]
    loaded = read(found, 0)
    return found.step == step and all(loaded[item.name].data == item.data for item in items(step))


def rot(saved: SavedCheckpoint) -> None:
    """Flip a bit in the data."""
    path = Path(saved.path, "shard-00000")
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


# --- Saving ----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_found(store: Store, root: Path) -> None:
    assert store.found() == []
    assert newest_in(root) is None
    saved = save(store, 7, items(7))
    assert newest_in(root) == saved
    assert (saved.step, saved.size_bytes) == (7, 3 * PAGE)
    assert store.found()[0].saved() == saved
    assert is_whole(store, 7)


def test_a_step_saved_twice_has_two_folders_and_the_later_counts(store: Store, root: Path) -> None:
    """A folder is never overwritten: a kill in mid-write would leave old and new mixed behind a valid manifest."""
    first = save(store, 5, items(5))
    second = save(store, 5, items(5))
    assert first.path != second.path
    assert newest_in(store.root) == second


def test_a_name_is_never_used_twice(store: Store) -> None:
    saved = save(store, 5, items(5))
    with Snapshot() as snapshot:
        layout = snapshot.take(items(5))
        with pytest.raises(StoreError, match="committed already, and a name is never used twice"):
            store.write_shard(Path(saved.path).name, 0, snapshot, layout)
        with pytest.raises(StoreError, match="is not a valid name for a checkpoint"):
            store.write_shard("../etc", 0, snapshot, layout)


def test_progress_is_reported_in_bytes_that_are_on_the_disk(store: Store) -> None:
    found: list[tuple[int, int | None]] = []
    with Snapshot() as snapshot:
        layout = snapshot.take(items(1))
        store.write_shard(store.name(1, "00000000"), 0, snapshot, layout, lambda done, of: found.append((done, of)))
    assert found == [(PAGE * n, 3 * PAGE) for n in (1, 2, 3)]


def test_two_ranks_share_a_root(root: Path) -> None:
    """Either may be first with the folder; only the leader commits, and it needs no more than what it was told."""
    with Store(root, job="test") as leader, Store(root, job="test", rank=1, ranks=2, leader=False) as other:
        for each in (leader, other):
            each.prepare(3 * PAGE)
        for step, order in ((1, (leader, other)), (2, (other, leader))):
            name = leader.name(step, f"{step:08x}")
            shards = {}
            with Snapshot() as snapshot:
                for each in order:
                    layout = snapshot.take(items(step + each.rank))
                    shards[each.rank] = each.write_shard(name, each.rank, snapshot, layout, urgent=True)
            leader.commit(name, manifest(step, [shards[0], shards[1]]))
        assert other.prune() == []
        found = other.found()[0]
        assert read(found, 1)["step"].value() == 3
        assert read(found, 0)["step"].value() == 2


def test_each_host_has_a_root_of_its_own(tmp_path: Path) -> None:
    """Every root gets the full manifest and holds its own shards; what is not here must not be missed."""
    stores = [Store(tmp_path / f"host-{rank}", job="test", rank=rank, ranks=2) for rank in range(2)]
    with Snapshot() as snapshot:
        layout = snapshot.take(items(9))
        shards = [store.write_shard(store.name(9, "00000000"), store.rank, snapshot, layout) for store in stores]
    for store in stores:
        saved = store.commit(store.name(9, "00000000"), manifest(9, shards, hosts=2))
        assert newest_in(store.root) == saved
        assert read(store.found()[0], store.rank)["step"].value() == 9
        scrubbed = store.scrub()
        assert scrubbed is not None
        assert scrubbed.whole
    with pytest.raises(CorruptError, match="is missing"):
        read(stores[0].found()[0], 1)
    (stores[0].root / store.name(9, "00000000") / "shard-00000").unlink()
    assert "none of its shards" in stores[0].refused()[0].reason or "is missing" in stores[0].refused()[0].reason
    for store in stores:
        store.close()


def test_only_what_is_whole_can_be_committed(store: Store) -> None:
    with Snapshot() as snapshot:
        layout = snapshot.take(items(1))
        name = store.name(1, "00000000")
        shard = store.write_shard(name, 0, snapshot, layout)
        with pytest.raises(StoreError, match="a manifest of step 2"):
            store.commit(name, manifest(2, [shard]))
        with pytest.raises(StoreError, match="1 shards, 0 of them here, is not what this leader may commit"):
            store.commit(store.name(1, "11111111"), manifest(1, [shard]))
        with pytest.raises(ManifestError, match="shards of 2 ranks"):
            store.commit(name, manifest(1, [shard, shard]))
    assert store.found() == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "item '' of 1 bytes"),
        ("two\nlines", r"an item's name is 'two\\nlines', not a short text"),
        ("x" * 600, "an item's name is 'x.*, not a short text"),
        ("again", "shard-00000 has two items of one name"),
    ],
)
def test_what_could_not_be_read_again_is_not_committed(store: Store, name: str, expected: str) -> None:
    """A name that the reader refuses is found at the first save, not after the outage."""
    with pytest.raises(ManifestError, match=expected):
        save(store, 1, [Buffer("again", b"1"), Buffer(name, b"2")])
    assert store.found() == store.refused() == []


def test_two_writers_are_one_too_many(root: Path) -> None:
    with Store(root, job="a"), pytest.raises(StoreError, match="another process writes checkpoints here"):
        Store(root, job="b")
    Store(root, job="b").close()
    with pytest.raises(StoreError, match="keep at least 2"):
        Store(root, job="a", keep=1)


# --- Keeping ---------------------------------------------------------------------------------------------------------


def test_the_newest_two_are_kept(store: Store, root: Path) -> None:
    for step in (5, 90, 1000):
        save(store, step, items(step))
    assert [found.step for found in store.found()] == [1000, 90]
    assert is_whole(store, 1000)


@pytest.mark.parametrize("is_rotten", [False, True])
def test_nothing_goes_before_two_are_known_to_be_good(root: Path, is_rotten: bool) -> None:
    """After a restart nobody has read what lies there: it is read before anything older goes."""
    with Store(root, job="test") as store:
        save(store, 1, items(1))
        second = save(store, 2, items(2))
    if is_rotten:
        rot(second)
    with Store(root, job="test") as store:
        stop = threading.Event()
        stop.set()
        with Snapshot() as snapshot:
            name = store.name(3, "00000000")
            shard = store.write_shard(name, 0, snapshot, snapshot.take(items(3)))
            store.commit(name, manifest(3, [shard]))
        assert store.prune(stop) == []
        assert [found.step for found in store.found()] == [3, 2, 1], "without reading nothing goes"
        store.prune()
        assert [found.step for found in store.found()] == ([3, 1] if is_rotten else [3, 2])
        assert store.set_aside_count == is_rotten


def test_what_other_hosts_could_not_commit_takes_no_place_of_a_good_one(tmp_path: Path) -> None:
    """It is whole here, and no resume can take it. What all hosts have stays; it goes first where room is needed."""
    with Store(tmp_path, job="test", ranks=2, hosts=2, chunk_bytes=PAGE) as store:

        def commit(step: int) -> str:
            name = store.name(step, "00000000")
            with Snapshot() as snapshot:
                shard = store.write_shard(name, 0, snapshot, snapshot.take(items(step)))
            store.commit(name, manifest(step, [shard, replace(shard, rank=1)], hosts=2))
            return name

        for step in (1, 2):
            commit(step)
        for step in (3, 4):
            store.abandon(commit(step))
        store.prune()
        assert [found.step for found in store.found()] == [4, 3, 2, 1]
        store.prune(keep=2)
        assert [found.step for found in store.found()] == [2, 1]
        store.abandon(commit(5))
        for step in (6, 7):
            commit(step)
        store.prune()
        assert [found.step for found in store.found()] == [7, 6]


def test_what_was_never_committed_goes_at_the_next_prune(store: Store, root: Path) -> None:
    with Snapshot() as snapshot:
        store.write_shard(store.name(1, "00000000"), 0, snapshot, snapshot.take(items(1)))
    assert folders(root) == ["step-000000000001"]
    save(store, 2, items(2))
    assert folders(root) == [".slot", "step-000000000002"], "and its blocks are kept, as a slot"
    with Snapshot() as snapshot:
        store.write_shard(store.name(3, "00000000"), 0, snapshot, snapshot.take(items(3)), urgent=True)
        store.abandon(store.name(3, "00000000"))
        store.abandon(store.name(4, "00000000"))
    assert folders(root) == [".slot", "step-000000000002"]


def test_a_rank_that_is_first_is_not_pruned_under_its_hands(root: Path) -> None:
    """The leader prunes in idle time; another rank may have begun the next save already."""
    with Store(root, job="test") as leader, Store(root, job="test", rank=1, ranks=2, leader=False) as other:
        save(leader, 1, items(1))
        name = other.name(2, "00000000")
        with Snapshot() as snapshot:
            other.write_shard(name, 1, snapshot, snapshot.take(items(2)))
        assert leader.prune() == []
        assert (root / name / "shard-00001").exists()
        save(leader, 3, items(3))
        assert (root / name / "shard-00001").exists(), "not even if a newer one is there"
        other.let_go()
        leader.prune()
        assert not (root / name).exists(), "nobody is at this one any more"


def test_what_a_kill_has_left_is_put_in_order_at_the_next_start(root: Path) -> None:
    with Store(root, job="test") as store:
        save(store, 1, items(1))
        store.prepare(3 * PAGE)
        with Snapshot() as snapshot:
            store.write_shard(store.name(2, "00000000"), 0, snapshot, snapshot.take(items(2)), urgent=True)
        assert store.slots_ready(3 * PAGE) == 1
    with Store(root, job="test") as store:
        assert store.slots_ready(3 * PAGE) == 2
        assert folders(root) == [".slot", ".slot", "step-000000000001"]
    with Store(root, job="test", slots=1) as store:
        assert folders(root) == [".slot", "step-000000000001"], "slots that nobody uses any more are not kept"


def test_a_slot_with_a_manifest_in_it_is_only_a_slot(root: Path) -> None:
    """As a disk leaves it that keeps a file's name and forgets its folder's."""
    with Store(root, job="test") as store:
        store.prepare(3 * PAGE)
        saved = save(store, 1, items(1), urgent=True)
    Path(saved.path).rename(root / ".slot-0")
    with Store(root, job="test") as store:
        assert store.found() == []
        assert not (root / ".slot-0" / MANIFEST).exists()
        save(store, 2, items(2), urgent=True)
        assert is_whole(store, 2)


def test_a_smaller_world_does_not_keep_the_room_of_a_larger_one(root: Path) -> None:
    with Store(root, job="test", ranks=2) as leader, Store(root, job="test", rank=1, ranks=2, leader=False) as other:
        for each in (leader, other):
            each.prepare(3 * PAGE)
    assert len(list(root.glob(".slot-*/shard-00001"))) == 2
    with Store(root, job="test") as store:
        assert list(root.glob(".slot-*/shard-00001")) == []
        assert store.slots_ready(3 * PAGE) == 2


def test_a_save_whose_folder_is_taken_away_is_an_error(store: Store, root: Path) -> None:
    """However that came about: what is not where it should be is not durable."""
    folder = root / store.name(1, "00000000")

    def take_away(done: int, of: int | None) -> None:
        if folder.exists():
            folder.rename(root / "elsewhere")

    with Snapshot() as snapshot, pytest.raises(FileNotFoundError, match="was taken away while it was written"):
        store.write_shard(folder.name, 0, snapshot, snapshot.take(items(1)), take_away)


def test_no_checkpoint_is_saved_or_removed_in_a_folder_that_was_put_in_the_place_of_the_root(root: Path) -> None:
    """As a disk that is mounted late: its checkpoints are those of the run before, and the next start looks there."""
    with Store(root, job="test", slots=0) as before:
        for step in (12, 13):
            save(before, step, items(step))
    disk, below = root.with_name("disk"), root.with_name("below")
    root.rename(disk)
    with Store(root, job="test", slots=0) as store:
        save(store, 1, items(1))
        root.rename(below)
        for place in ("nothing is there", "the disk is"):
            with pytest.raises(StoreError, match=rf"^{root}: is no longer the folder"):
                save(store, 2, items(2))
            for call in (store.prune, store.scrub):
                with pytest.raises(StoreError, match=r"\(undo that, or start the training again"):
                    call()
            if place == "nothing is there":
                disk.rename(root)
        assert [each.step for each in store.found()] == [13, 12]
        root.rename(disk)
        below.rename(root)
        save(store, 2, items(2))
        assert is_whole(store, 2)


def test_a_lock_whose_file_was_removed_is_taken_again(store: Store, root: Path) -> None:
    """By an operator who takes it for a stale one. Of two trainings, the one that locks the new file goes on."""
    (root / LOCK).unlink()
    save(store, 1, items(1))
    with pytest.raises(StoreError, match="another process writes checkpoints here"):
        Store(root, job="test")
    (root / LOCK).unlink()
    with Store(root, job="test", slots=0) as second:
        save(second, 2, items(2))
        with pytest.raises(StoreError, match="another process writes checkpoints here"):
            save(store, 3, items(3))
        assert is_whole(second, 2)
    (root / LOCK).unlink()
    (root / LOCK).mkdir()  # in the place of a disk that is too full for it
    save(store, 4, items(4))
    assert is_whole(store, 4)


def test_what_is_set_aside_is_counted_and_not_kept_for_ever(store: Store, root: Path) -> None:
    for step in range(1, 5):
        rot(save(store, step, items(step)))
        with pytest.raises(CorruptError):
            read(store.found()[0], 0)
        store.set_aside(store.found()[0], "a flipped bit")
    assert store.found() == []
    assert store.set_aside_count == 4
    store.prune()
    assert [name for name in folders(root) if name.startswith("bad-")] == [
        "bad-step-000000000003",
        "bad-step-000000000004",
    ]


def test_an_old_format_is_reported_and_left(store: Store, root: Path) -> None:
    folder = root / "step-000000000009-00000000"
    folder.mkdir()
    (folder / MANIFEST).write_text('{"schema": "powerguard.checkpoint/v1", "step": 9, "parts": []}')
    save(store, 1, items(1))
    assert store.found()[0].step == 1
    assert [refused.name for refused in store.refused()] == [folder.name]
    assert "schema is 'powerguard.checkpoint/v1'" in store.refused()[0].reason
    assert folder.is_dir()


@pytest.mark.parametrize("damage", ["truncate", "remove", "no manifest", "renamed"])
def test_damage_that_shows_without_reading_is_found(store: Store, damage: str) -> None:
    save(store, 1, items(1))
    folder = Path(save(store, 2, items(2)).path)
    match damage:
        case "truncate":
            os.truncate(folder / "shard-00000", PAGE)
        case "remove":
            (folder / "shard-00000").unlink()
        case "no manifest":
            (folder / MANIFEST).unlink()
        case "renamed":
            folder.rename(folder.with_name("step-000000000003-00000000"))
    assert [found.step for found in store.found()] == [1]
    refused = store.refused()
    assert [each.rotten for each in refused] == ([] if damage == "no manifest" else [True])
    for each in refused:
        store.set_aside(each, each.reason)
    assert store.refused() == []


def test_newest_since_a_moment(store: Store, root: Path) -> None:
    """The daemon asks for what appeared after its request."""
    saved = save(store, 1, items(1))
    stamp = Path(saved.path, MANIFEST).stat().st_mtime_ns
    assert newest_in(root, since_ns=stamp) == saved
    assert newest_in(root, since_ns=stamp + 1) is None


# --- Slots -----------------------------------------------------------------------------------------------------------


def test_slots_are_made_taken_and_come_back(store: Store, root: Path) -> None:
    size = 3 * PAGE
    assert store.slots_ready(size) == 0
    assert store.prepare(size)
    assert store.slots_ready(size) == 2
    nodes = {path.stat().st_ino for path in root.glob(".slot-*/shard-00000")}
    for step in range(1, 9):
        saved = save(store, step, items(step), urgent=step > 4)
        assert is_whole(store, step)
        assert store.last_write is not None
        assert store.last_write.in_place == (step not in {2, 3}), "two kept and two slots: then nothing is new any more"
        nodes.add(Path(saved.path, "shard-00000").stat().st_ino)
    assert len(nodes) == 4
    assert store.slots_ready(size) == 2
    assert store.prepare(size)


def test_only_in_a_hurry_the_last_slot_is_taken(store: Store, root: Path) -> None:
    store.prepare(3 * PAGE)
    save(store, 1, items(1))
    save(store, 2, items(2))
    assert store.slots_ready(3 * PAGE) == 1, "an emergency may come at any time"
    save(store, 3, items(3), urgent=True)
    assert is_whole(store, 3)
    assert store.slots_ready(3 * PAGE) == 1, "the oldest checkpoint has become one"


def test_slots_grow_with_the_state(store: Store) -> None:
    store.prepare(3 * PAGE)
    assert store.slots_ready(40 * PAGE) == 0
    assert store.prepare(40 * PAGE)
    assert store.slots_ready(40 * PAGE) == 2
    save(store, 1, items(1, pages=39), urgent=True)
    assert store.last_write is not None
    assert store.last_write.in_place


def test_what_was_new_has_room_to_grow_as_a_slot(store: Store) -> None:
    """A list in the state gets longer from step to step: not by a block that a full disk does not have."""
    for step in range(1, 4):
        save(store, step, items(step))
    assert store.slots_ready(3 * PAGE) == 1
    save(store, 4, items(4, pages=9), urgent=True)
    assert store.last_write is not None
    assert store.last_write.in_place


def test_a_state_that_grew_past_its_slot_is_saved_all_the_same(store: Store) -> None:
    store.prepare(3 * PAGE)
    save(store, 1, items(1, pages=100), urgent=True)
    assert read(store.found()[0], 0)["step"].value() == 1
    assert store.last_write is not None
    assert not store.last_write.in_place


def test_preparing_can_be_stopped_and_goes_on_later(store: Store) -> None:
    stop = threading.Event()
    stop.set()
    assert not store.prepare(30 << 20, rate=1e12, stop=stop)
    assert store.slots_ready(30 << 20) == 0
    stop.clear()
    assert store.prepare(30 << 20, stop=stop)
    assert store.slots_ready(30 << 20) == 2


def test_a_save_does_not_wait_for_the_slots(store: Store) -> None:
    """An emergency in the middle of preparing takes the slot as far as it is; nothing is written into it afterwards."""
    stop = threading.Event()
    result: list[bool] = []
    preparing = threading.Thread(target=lambda: result.append(store.prepare(64 << 20, rate=10e6, stop=stop)))
    preparing.start()
    while not (store.root / ".slot-0" / "shard-00000").exists():
        stop.wait(0.001)
    save(store, 1, items(1, pages=3000), urgent=True)
    preparing.join()
    assert result == [False], "the slot was taken meanwhile"
    assert read(store.found()[0], 0)["a"].data == items(1, pages=3000)[0].data
    assert store.prepare(8 << 20)


def test_a_slot_that_another_rank_takes_is_no_error(store: Store, root: Path) -> None:
    """Ranks of one host take and make the same slots with no word to each other: all may be gone between two looks."""
    assert store.prepare(PAGE)
    over = threading.Event()

    def take_and_give() -> None:
        while not over.is_set():
            for path in (root / ".slot-0", root / ".slot-1"):
                with contextlib.suppress(OSError):
                    path.rename(root / "elsewhere")
                    (root / "elsewhere").rename(path)
                shutil.rmtree(root / "elsewhere", ignore_errors=True)  # the slot was made anew meanwhile

    other = threading.Thread(target=take_and_give)
    other.start()
    try:
        for _ in range(300):
            store.leave_room(PAGE)
            store.prepare(PAGE)
    finally:
        over.set()
        other.join()


def test_a_slot_that_another_rank_makes_is_not_made_twice(root: Path) -> None:
    """It fills a slot that is missing, just when a checkpoint that goes would have become it."""

    class Crowded(Disk):
        def rename(self, old: Path, new: Path) -> None:
            if new.name == ".slot-0":
                new.mkdir()  # once: then it is there
                (new / "shard-00001").touch()
            super().rename(old, new)

    with Store(root, job="j", disk=Crowded()) as store:
        for step in range(1, 4):
            save(store, step, items(step))
        assert store.prune() == []
        assert sorted(path.name for path in root.glob(".slot-*")) == [".slot-0", ".slot-1"]


def test_a_copy_by_hard_links_is_not_written_over(store: Store, root: Path) -> None:
    """`cp -al` is how people keep a checkpoint: then its blocks are not ours alone, and it is no slot."""
    saved = save(store, 1, items(1))
    kept = root / "mine"
    kept.mkdir()
    os.link(Path(saved.path, "shard-00000"), kept / "shard-00000")
    before = (kept / "shard-00000").read_bytes()
    for step in range(2, 8):
        save(store, step, items(step), urgent=True)
    assert (kept / "shard-00000").read_bytes() == before


def test_two_trainings_of_roots_that_share_files_by_links_keep_their_own(root: Path) -> None:
    """`cp -al` is how people branch a training: a slot of the copy is, in the other root, the newest checkpoint."""
    other = root.with_name("branch")
    with Store(root, job="j") as store:
        save(store, 1, items(1))
        store.prepare(store.found()[0].manifest.size_bytes)
        shutil.copytree(root, other, copy_function=os.link)
        save(store, 2, items(2), urgent=True)
    turns: list[tuple[Path, list[int]]] = [(root, [3]), (other, [4, 5]), (root, []), (other, [6]), (root, [7, 8])]
    for each, steps in [*turns, (other, [])]:
        with Store(each, job="j") as store:
            for step in steps:
                save(store, step, items(step), urgent=True)
            assert [found.step for found in store.found()][: len(steps)] == steps[::-1]
            assert len(store.found()) == 2
            assert all(read(found, 0)["a"].data == items(found.step)[0].data for found in store.found())


def test_slots_lead_nowhere_else(store: Store, root: Path, tmp_path: Path) -> None:
    """A link in place of a slot, or of a file in it, is not written through; a pipe does not hold us up."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "shard-00000").write_bytes(b"mine" * 4096)
    (root / ".slot-0").symlink_to(elsewhere)
    save(store, 1, items(1), urgent=True)
    assert (elsewhere / "shard-00000").read_bytes() == b"mine" * 4096
    (root / ".slot-0").unlink()
    for make_one in (lambda path: path.symlink_to(elsewhere / "shard-00000"), os.mkfifo):
        (root / ".slot-0").mkdir()
        make_one(root / ".slot-0" / "shard-00000")
        with pytest.raises(OSError, match="shard-00000"):
            save(store, 2, items(2), urgent=True)
        store.prune()
    assert (elsewhere / "shard-00000").read_bytes() == b"mine" * 4096
    save(store, 3, items(3), urgent=True)
    assert is_whole(store, 3)


def test_a_disk_too_full_for_slots_says_so(store: Store) -> None:
    pattern = r"takes 45486\d\d\.\d GB, for 2 kept .* and 2 slots .* of 11371\d\d\.\d GB; there are .*no room \(free "
    with pytest.raises(StoreError, match=rf"^{store.root}: {pattern}"):
        store.prepare(1 << 50)


# --- Disks that do not do what they are told --------------------------------------------------------------------


class Failing(Disk):
    """Raises an error at the write that starts at a given offset, so many times."""

    def __init__(self, number: int, *, at: int = PAGE, times: int = 10**9) -> None:
        self.number = number
        self.at = at
        self.left = times

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        if offset == self.at and self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return super().write(descriptor, content, offset)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_failed_save_names_the_path_and_leaves_the_older_one(root: Path, number: int) -> None:
    disk = Failing(number, times=0)
    with Store(root, job="test", chunk_bytes=PAGE, disk=disk) as store:
        save(store, 1, items(1))
        disk.left = 10**9
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            save(store, 2, items(2))
        assert caught.value.errno == number
        assert str(root) in str(caught.value)
        assert str(caught.value).endswith("shard-00000'")
        assert is_whole(store, 1)
        disk.left = 0
        save(store, 3, items(3))
        assert is_whole(store, 3)


def test_a_bad_block_under_a_slot_costs_one_more_try(root: Path) -> None:
    """The file with the bad block stays, under another name: else the next one is given that block again."""
    disk = Failing(errno.EIO, times=0)
    with Store(root, job="test", chunk_bytes=PAGE, disk=disk) as store:
        store.prepare(3 * PAGE)
        disk.left = 1
        saved = save(store, 1, items(1), urgent=True)
        assert is_whole(store, 1)
        assert Path(saved.path, "bad-shard-00000").exists()


def test_a_bad_block_under_the_manifest_too(root: Path) -> None:
    disk = Failing(errno.EIO, at=0, times=0)
    with Store(root, job="test", chunk_bytes=PAGE, disk=disk) as store:
        store.prepare(3 * PAGE)
        name = store.name(1, "00000000")
        with Snapshot() as snapshot:
            shard = store.write_shard(name, 0, snapshot, snapshot.take(items(1)), urgent=True)
        disk.left = 1
        store.commit(name, manifest(1, [shard]))
        assert is_whole(store, 1)


class Odd(Disk):
    """Writes a little at a time, and refuses O_DIRECT: at once, or only when it comes to writing."""

    def __init__(self, *, refuses: str = "", piece: int = 1 << 30) -> None:
        self.refuses = refuses
        self.piece = piece

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        if direct and self.refuses == "open":
            if create:
                path.touch()  # as Linux does it: the file is there, and the call has failed
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, create=create, direct=direct)

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        if self.refuses == "write" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write(descriptor, content[: self.piece], offset)


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_a_file_system_without_direct_writes_is_reported(root: Path, refuses: str) -> None:
    with Store(root, job="test", chunk_bytes=PAGE, disk=Odd(refuses=refuses)) as store:
        store.prepare(3 * PAGE)
        save(store, 1, items(1))
        assert is_whole(store, 1)
        assert store.last_write is not None
        assert not store.last_write.direct


@pytest.mark.parametrize("piece", [1000, 4096, 5000])
def test_short_writes_are_gone_on_with(root: Path, piece: int) -> None:
    with Store(root, job="test", disk=Odd(piece=piece)) as store:
        store.prepare(3 * PAGE)
        save(store, 1, items(1))
        save(store, 2, items(2))
        assert is_whole(store, 2)


class Taking(Disk):
    """Takes nothing, without an error."""

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        return 0


def test_a_disk_that_takes_nothing_is_an_error(root: Path) -> None:
    with Store(root, job="test", disk=Taking()) as store:
        with pytest.raises(OSError, match="the disk accepts no data"):
            save(store, 1, items(1))
        assert store.found() == []


def test_a_save_can_be_called_off(store: Store, root: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    save(store, 1, items(1))
    with pytest.raises(CancelledError):
        save(store, 2, items(2), cancel=cancel)
    save(store, 3, items(3))
    assert [found.step for found in store.found()] == [3, 1]


WRITER = """
import os, sys
from pathlib import Path
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.store import Store, newest_in
from tests.trainer.checkpoints import save
with Store(Path(sys.argv[1]), job="test", chunk_bytes=1 << 18) as store:
    newest = newest_in(store.root)
    step = 1 + (newest.step if newest else 0)
    store.prepare(4_100_000)
    while True:
        save(store, step, [Buffer("a", bytes([step % 251]) * 4_000_000), Buffer.json("step", step)])
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
        with Store(root, job="test") as store:
            assert store.refused() == []
            found = store.found()[0]
            loaded = read(found, 0)
        assert found.step >= acknowledged
        assert loaded["a"].data == bytes([found.step % 251]) * 4_000_000
        assert loaded["step"].value() == found.step


def test_a_host_at_its_limit_of_threads_writes_and_reads_all_the_same(store: Store) -> None:
    """No helper can be started: the thread that asked does it all."""
    before = threading.stack_size(1 << 46)  # more than there is
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=print).start()
        saved = save(store, 1, items(1, pages=1000))
    finally:
        threading.stack_size(before)
    assert newest_in(store.root) == saved


def test_a_root_of_another_user_is_refused_in_words() -> None:
    """As a folder that a group shares, in which a colleague has trained."""
    user = os.geteuid()
    with short_folder() as folder:
        Store(folder, job="llm").close()
        (folder / ".lock").chmod(0)
        folder.chmod(0o777)
        os.seteuid(user or 65534)
        try:
            with pytest.raises(StoreError, match=f"^{folder}: this user may not write checkpoints here: Permission"):
                Store(folder, job="llm")
        finally:
            os.seteuid(user)


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    """As from a home folder to a larger disk. Turned during training, it moves nothing; one to nothing is refused."""
    (tmp_path / "disk").mkdir()
    link = tmp_path / "checkpoints"
    link.symlink_to(tmp_path / "disk")
    with Store(link, job="llm") as store:
        first = save(store, 1, items(1))
        link.unlink()
        link.symlink_to(tmp_path / "elsewhere")
        second = save(store, 2, items(2))
        assert [Path(each).parent for each in (first.path, second.path)] == [tmp_path / "disk"] * 2
    with pytest.raises(
        StoreError,
        match=r"cannot be made, .*is a link to .*elsewhere, which is not there \(mount its disk",
    ):
        Store(link, job="llm")
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_without_anything_to_flush_in_a_folder_is_no_error() -> None:
    """As a shared folder of a virtual machine. /proc answers the same, EINVAL."""
    Disk().sync_folder(Path("/proc/self"))
    with pytest.raises(FileNotFoundError):
        Disk().sync_folder(Path("/proc/self/elsewhere"))


@pytest.mark.root
def test_a_folder_of_another_user_that_is_closed_costs_no_save(caplog: pytest.LogCaptureFixture) -> None:
    """As root leaves it, with a strict umask, after `powerguard checkpoints restore`: all goes on beside it."""
    with short_folder() as folder:
        other = folder / "step-000000000009-0000abcd"
        other.mkdir(0o700)
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
        try:
            with Store(folder, job="test", chunk_bytes=PAGE) as store:
                for step in (12, 13):
                    saved = save(store, step, items(step))
                assert store.prepare(3 * PAGE)
                assert [found.step for found in store.found()] == [13, 12]
                assert newest_in(folder) == saved
        finally:
            os.seteuid(0)
        assert other.is_dir()
    assert "cannot be removed" not in caplog.text


def test_what_cannot_be_looked_at_is_not_taken_for_gone(tmp_path: Path) -> None:
    """A folder without a manifest may be removed, so an error that only hides it must be one."""
    file = tmp_path / "file"
    assert (is_there(file), is_there(file / "below")) == (False, False)
    file.touch()
    assert (is_there(file), is_there(file / "below"), is_there(tmp_path)) == (True, False, True)
    with pytest.raises(OSError, match="too long"):
        is_there(tmp_path / ("a" * 300))
