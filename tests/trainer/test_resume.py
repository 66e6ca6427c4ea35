"""What a training starts from: the newest checkpoint that all ranks can read, whatever became of the tiers."""

import logging
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.trainer.loop.checkpointer import StoreCheckpointer
from powerguard.trainer.ranks.base import Alone, Memory, MemoryRanks
from powerguard.trainer.store.folders import Found, SavedCheckpoint, newest_in
from powerguard.trainer.store.items import Parts
from powerguard.trainer.store.manifest import MANIFEST, Manifest, Shard, StoreError
from powerguard.trainer.store.resume import Chosen, LocalTier, ResumeError, choose
from powerguard.trainer.store.shards import ShardReader, Snapshot
from powerguard.trainer.store.store import Store
from powerguard.trainer.tiers import PathTier, Remote
from powerguard.trainer.tiers.base import SET_ASIDE, Kind, Source, Tier, TierError
from powerguard.trainer.tiers.transfer import Gate, Progress, Transfer, UploadOrder
from tests.trainer.checkpoints import break_description
from tests.trainer.test_guard_interrupts import interrupted
from tests.trainer.tiers.rig import CHUNK, flip, save, state
from tests.trainer.toy import short_folder


def upload(saved: SavedCheckpoint, nas: Path, *, job: str = "llm", linger_s: float = 0.0, keep: int = 3) -> bool:
    """What the child does, without the child."""
    remote = Remote(url=str(nas), keep=keep)
    order = UploadOrder(remote=remote, job=job, path=saved.path, digest=saved.manifest_digest)
    return Transfer(order, PathTier(remote, job), Gate(), Progress(), linger_s=linger_s).run()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def nas(tmp_path: Path) -> Path:
    folder = tmp_path / "nas"
    folder.mkdir()
    return folder


def resumed(root: Path, *more: Tier, job: str = "llm") -> Chosen | None:
    """A job of one process starts."""
    with Store(root, job=job, slots=0) as store:
        return choose([LocalTier(store), *more], Alone(), job=job, patience_s=0.0)


def nas_tier(nas: Path, job: str = "llm") -> PathTier:
    return PathTier(Remote(url=str(nas)), job)


def all_ranks(roots: Sequence[Path], hosts: Sequence[str], *more: Callable[[], Tier], job: str = "llm") -> list[Chosen]:
    """All ranks of a job start, each in a thread of its own. roots, hosts: by rank."""
    memory = Memory()
    leaders = {root: min(rank for rank, each in enumerate(roots) if each == root) for root in roots}

    def start(rank: int) -> Chosen | None:
        ranks = MemoryRanks(memory, rank, len(roots), hosts)
        leader = leaders[roots[rank]] == rank
        with Store(roots[rank], job=job, rank=rank, ranks=len(roots), leader=leader, slots=0) as store:
            tiers = [LocalTier(store), *(make() for make in more)]
            return choose(tiers, ranks, job=job, patience_s=0.0, look_s=20.0, load_s=20.0)

    with ThreadPoolExecutor(len(roots)) as pool:
        chosen = list(pool.map(start, range(len(roots))))
    assert all(each is not None for each in chosen)
    return [each for each in chosen if each is not None]


def test_an_empty_root_means_begin(root: Path, nas: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A host that never had a checkpoint has lost none: no warning."""
    root.mkdir()
    assert resumed(root, nas_tier(nas)) is None
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_the_newest_local_one_is_taken_and_is_what_was_saved(root: Path) -> None:
    for step in (5, 6):
        save(root, step)
    chosen = resumed(root)
    assert chosen is not None
    assert (chosen.step, chosen.tiers, chosen.repaired, chosen.refused) == (6, ("local",), 0, ())
    assert chosen.local
    assert chosen.items["state"].data == state(6)
    assert chosen.items["step"].value() == 6


def test_what_was_just_read_whole_is_not_read_again(root: Path) -> None:
    """The scrub goes on to the one that nobody has read yet; retention need not read the newest once more."""
    older = save(root, 5)
    newest = save(root, 6)
    with Store(root, job="llm", slots=0) as store:
        stored = StoreCheckpointer(Parts(lambda: {"state": bytearray(1)}, lambda _: None), store)
        assert stored.restore(Alone(), None) == (newest, 0)
        scrubbed = store.scrub()
        assert scrubbed is not None
        assert scrubbed.path == older.path


def test_a_newer_one_on_the_nas_wins(root: Path, nas: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that was replaced, or another host: the local tier is behind. Or another training of this name: said."""
    upload(save(root, 9), nas)
    resumed(root, nas_tier(nas))
    shutil.rmtree(root)
    root.mkdir()
    caplog.clear()
    fresh = resumed(root, nas_tier(nas))
    assert fresh is not None
    assert (fresh.step, fresh.tiers) == (9, ("path",))
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warned == [], "a host that never had a checkpoint is behind no other training"
    save(root, 8)
    chosen = resumed(root, nas_tier(nas))
    assert chosen is not None
    assert (chosen.step, chosen.tiers, chosen.found.tier, chosen.local) == (9, ("path",), "path", False)
    assert chosen.items["state"].data == state(9)
    (said,) = [each.getMessage() for each in caplog.records if "committed later than" in each.getMessage()]
    assert said.startswith(f"{nas}/llm/step-000000000009-")
    assert "what this host has (step 8)" in said


def test_a_shard_whose_description_is_wrong_costs_that_checkpoint_and_not_the_older_one(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The manifest itself verifies, so each rank finds that out for itself, and all ranks take the next older one."""
    save(root, 6, ranks=2, mib=9)
    saved = save(root, 7, ranks=2, mib=9)
    break_description(Path(saved.path), 1)
    chosen = all_ranks([root, root], ["a", "a"])
    assert [each.step for each in chosen] == [6, 6]
    assert [each.items["state"].data == state(6, rank, 9) for rank, each in enumerate(chosen)] == [True, True]
    assert "shard-00001 of 9441280 bytes has 0 digests" in chosen[0].refused[0]
    assert "checkpoint_passed_over step 7: rank 1" in caplog.text
    assert [path.name for path in root.glob("bad-*")] == [f"bad-{Path(saved.path).name}"]


def test_a_scrub_sets_aside_what_has_a_wrong_description(root: Path) -> None:
    older = save(root, 6, ranks=2, mib=1)
    break_description(Path(save(root, 7, ranks=2, mib=1).path), 1)
    with Store(root, job="llm", ranks=2, slots=0) as store:
        scrubbed = store.scrub()
        assert scrubbed is not None
        assert (scrubbed.whole, str(scrubbed.corrupt).endswith("has 0 digests")) == (False, True)
        assert newest_in(store.root) == older


def test_an_upload_of_a_wrong_description_fails_and_commits_nothing(root: Path, nas: Path) -> None:
    saved = save(root, 7, ranks=2, mib=1)
    break_description(Path(saved.path), 1)
    digest = Manifest.parse(Path(saved.path, MANIFEST).read_bytes()).digest
    with pytest.raises(TierError, match=r"local checkpoint: .*has 0 digests") as failed:
        upload(replace(saved, manifest_digest=digest), nas)
    assert failed.value.kind is Kind.CORRUPT
    assert nas_tier(nas).found() == []


def test_a_job_of_too_many_ranks_learns_it_before_its_first_save(root: Path) -> None:
    """One manifest names every rank's items, so the size of one rank's part says whether all of them fit."""
    parts = {f"tensor-{number}": bytearray(1) for number in range(3_000)}
    with Store(root, job="llm", ranks=10_000, leader=False, slots=0) as store:
        stored = StoreCheckpointer(Parts(lambda: parts, lambda _: None), store)
        with pytest.raises(StoreError, match=r"10000 ranks with 3000 items each .* more than 67 MB.*\(save fewer"):
            stored.measure()


def test_one_rotten_chunk_comes_from_the_nas_and_is_mended(root: Path, nas: Path) -> None:
    """The rest is read at the disk's own speed; afterwards the local copy is whole again."""
    saved = save(root, 7)
    upload(saved, nas)
    flip(Path(saved.path, "shard-00000"), CHUNK + 77)
    chosen = resumed(root, nas_tier(nas))
    assert chosen is not None
    assert (chosen.tiers, chosen.repaired, chosen.local) == (("local", "path"), 1, False)
    assert chosen.items["state"].data == state(7)
    again = resumed(root)
    assert again is not None
    assert (again.tiers, again.items["state"].data == state(7)) == (("local",), True)


def test_a_local_shard_that_is_cut_is_replaced_by_the_same_step(root: Path, nas: Path) -> None:
    save(root, 6)
    saved = save(root, 7)
    upload(saved, nas)
    shard = Path(saved.path, "shard-00000")
    with shard.open("r+b") as file:
        file.truncate(CHUNK)
    chosen = resumed(root, nas_tier(nas))
    assert chosen is not None
    assert (chosen.step, chosen.tiers) == (7, ("path",))
    assert chosen.items["state"].data == state(7)
    assert any("shard-00000" in reason for reason in chosen.refused)
    assert [path.name for path in root.glob("bad-*")] == [f"bad-{Path(saved.path).name}"]


def test_a_rotten_one_without_another_copy_is_set_aside_and_the_older_taken(root: Path) -> None:
    save(root, 6)
    saved = save(root, 7)
    flip(Path(saved.path, "shard-00000"), 5)
    chosen = resumed(root)
    assert chosen is not None
    assert (chosen.step, chosen.items["state"].data == state(6)) == (6, True)
    assert "step 7: rank 0" in chosen.refused[0]
    assert "chunk 0" in chosen.refused[0]
    assert not Path(saved.path).exists()
    assert root.joinpath(f"bad-{Path(saved.path).name}", "shard-00000").exists()


def test_rotten_in_both_tiers_is_marked_there_and_never_deleted(root: Path, nas: Path) -> None:
    """The same chunk in both: only the older step is left. A marker is all that is written to the NAS."""
    for step in (6, 7):
        saved = save(root, step)
        upload(saved, nas)
    there = nas / "llm" / Path(saved.path).name
    flip(Path(saved.path, "shard-00000"), 5)
    flip(there / "shard-00000", 6)
    chosen = resumed(root, nas_tier(nas))
    assert chosen is not None
    assert chosen.step == 6
    assert "step 7" in (there / SET_ASIDE).read_text()
    assert {path.name for path in there.iterdir()} == {MANIFEST, "shard-00000", SET_ASIDE}
    assert [found.step for found in nas_tier(nas).found()] == [6]
    assert nas_tier(nas).aside() == [there.name]


def test_rotten_at_different_places_is_put_together_from_both(root: Path, nas: Path) -> None:
    saved = save(root, 7)
    upload(saved, nas)
    flip(Path(saved.path, "shard-00000"), 5)
    flip(nas / "llm" / Path(saved.path).name / "shard-00000", 2 * CHUNK + 5)
    chosen = resumed(root, nas_tier(nas))
    assert chosen is not None
    assert (chosen.repaired, chosen.items["state"].data == state(7)) == (1, True)


def test_a_local_disk_that_cannot_be_mended_still_resumes(root: Path, nas: Path) -> None:
    """The chunk is in memory already; that the file stays as it is, is only told."""
    saved = save(root, 7)
    upload(saved, nas)
    shard = Path(saved.path, "shard-00000")
    flip(shard, 5)
    rotten = shard.read_bytes()
    shard.unlink()
    shard.symlink_to(root / "elsewhere")  # what is not a regular file is neither read nor written
    (root / "elsewhere").write_bytes(rotten)
    chosen = resumed(root, nas_tier(nas))
    assert chosen is not None
    assert chosen.items["state"].data == state(7)
    assert (root / "elsewhere").read_bytes() == rotten


# --- Training never starts anew by accident ------------------------------------------------------------------------


def test_a_nas_that_is_not_mounted_is_no_empty_one(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"path: .*is it mounted\?.*leave out the tier"):
        resumed(root, nas_tier(tmp_path / "not-mounted"))


def test_a_nas_that_is_not_mounted_does_not_matter_where_there_is_a_local_one(root: Path, tmp_path: Path) -> None:
    save(root, 7)
    chosen = resumed(root, nas_tier(tmp_path / "not-mounted"))
    assert chosen is not None
    assert chosen.step == 7


def test_all_rotten_is_an_error_now_and_at_the_next_start(root: Path) -> None:
    """A service manager starts a failed training again: that must not begin at step 0 either."""
    saved = save(root, 7)
    flip(Path(saved.path, "shard-00000"), 5)
    with pytest.raises(ResumeError, match=r"chunk 0.*To start from step 0"):
        resumed(root)
    with pytest.raises(ResumeError, match="set aside as corrupt"):
        resumed(root)


def test_a_second_tier_of_rotten_manifests_alone_is_an_error(root: Path, tmp_path: Path) -> None:
    """The local disk is a new one."""
    saved = save(tmp_path / "nas" / "llm", 7)
    flip(Path(saved.path, MANIFEST), 100)
    with pytest.raises(ResumeError, match=rf"may be some: path: {saved.path}/{MANIFEST}: "):
        resumed(root, nas_tier(tmp_path / "nas"))


def test_a_rotten_manifest_alone_is_an_error(root: Path) -> None:
    saved = save(root, 7)
    flip(Path(saved.path, MANIFEST), 100)
    with pytest.raises(ResumeError, match=MANIFEST):
        resumed(root)


def test_one_of_another_version_is_left_where_it_is(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a way back to an older version it is no damage: as bad-... it would be removed one day."""
    save(root, 5)
    newest = Path(save(root, 6).path)
    manifest = newest / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"powerguard.checkpoint/v3", b"powerguard.checkpoint/v9"))
    chosen = resumed(root)
    assert chosen is not None
    assert (chosen.step, chosen.refused) == (5, ())
    assert newest.is_dir()
    assert "tier_unreadable local: " in caplog.text
    shutil.rmtree(chosen.found.path)
    with pytest.raises(ResumeError, match=r"may be some: local: .* schema is 'powerguard.checkpoint/v9'"):
        resumed(root)


def test_a_manifest_that_cannot_be_read_is_no_missing_one(
    root: Path, nas: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's, say, or on a bad sector: training must not begin at step 0; an older one is taken with a word."""
    saved = save(root, 7)
    upload(saved, nas)
    for folder in (Path(saved.path), nas / "llm" / Path(saved.path).name):
        (folder / MANIFEST).rename(folder / "elsewhere")
        (folder / MANIFEST).symlink_to("elsewhere")  # refused also for root, who may read everything
    with pytest.raises(ResumeError, match=rf"may be some: local: {saved.path}: .*symbolic links.*; path: .*symbolic"):
        resumed(root, nas_tier(nas))
    with pytest.raises(ResumeError, match=r"may be some: path: .*symbolic links"):
        resumed(root.with_name("lost"), nas_tier(nas))
    save(root, 5)
    caplog.clear()
    chosen = resumed(root)
    assert chosen is not None
    assert (chosen.step, chosen.refused) == (5, ())
    assert "tier_unreadable local: " in caplog.text


def test_a_root_that_cannot_be_listed_is_no_empty_one_on_any_rank(root: Path) -> None:
    """The rank that meets it says so to the others, which would wait for it for ten minutes."""
    with Store(root, job="llm", slots=0) as store:
        shutil.rmtree(root)
        root.touch()
        with pytest.raises(ResumeError, match=r"may be some: local: .*Not a directory"):
            choose([LocalTier(store)], Alone(), job="llm", patience_s=0.0)


def test_a_checkpoint_of_another_job_is_refused(root: Path) -> None:
    save(root, 7, job="vision")
    pattern = rf"^{root}/step-0+7-\w+: .*'vision', not to 'llm' \(.*a renamed job goes on under its old name"
    with pytest.raises(ResumeError, match=pattern):
        resumed(root)


def test_a_checkpoint_of_another_topology_is_refused(root: Path) -> None:
    """It is newer: to take an older one that fits would lose steps in silence."""
    save(root, 6)
    save(root, 7, ranks=2, mib=9)
    with pytest.raises(
        ResumeError, match=rf"^{root}/step-0+7-\w+: .*step 7 was made by 2 ranks, and this training has 1"
    ):
        resumed(root)


def test_an_older_one_of_another_topology_is_nobody_s_business(root: Path) -> None:
    save(root, 6, ranks=2, mib=9)
    save(root, 7)
    chosen = resumed(root)
    assert chosen is not None
    assert chosen.step == 7


# --- All ranks together --------------------------------------------------------------------------------------------


def test_all_ranks_go_on_to_the_next_when_one_cannot_read(root: Path) -> None:
    save(root, 6, ranks=3, mib=9)
    saved = save(root, 7, ranks=3, mib=9)
    flip(Path(saved.path, "shard-00002"), 5)
    result = all_ranks([root] * 3, ["a"] * 3)
    assert [each.step for each in result] == [6, 6, 6]
    assert [bytes(each.items["state"].data) for each in result] == [state(6, rank, 9) for rank in range(3)]
    assert all("step 7: rank 2" in each.refused[0] for each in result)
    assert len(list(root.glob("bad-*"))) == 1


def test_hosts_with_disks_of_their_own_take_what_both_have(tmp_path: Path) -> None:
    """The newest was committed on one host when the power went; the other has only the one before."""
    a, b = tmp_path / "a", tmp_path / "b"
    save({0: a, 1: b}, 6, ranks=2, mib=9)
    newest = save({0: a, 1: b}, 7, ranks=2, mib=9)
    shutil.rmtree(b / Path(newest.path).name)
    result = all_ranks([a, b], ["a", "b"])
    assert [(each.step, each.local) for each in result] == [(6, True), (6, True)]
    assert [bytes(each.items["state"].data) for each in result] == [state(6, 0, 9), state(6, 1, 9)]
    assert Path(newest.path).exists()  # nothing is wrong with it


def test_a_host_that_lost_its_disk_takes_its_shard_from_the_nas(tmp_path: Path, nas: Path) -> None:
    """Each uploads what it has; whoever finds all of it there puts the manifest."""
    a, b = tmp_path / "a", tmp_path / "b"
    saved = save({0: a, 1: b}, 7, ranks=2, mib=9)
    name = Path(saved.path).name
    assert not upload(saved, nas)
    assert nas_tier(nas).found() == []
    assert upload(SavedCheckpoint(**{**vars_of(saved), "path": str(b / name)}), nas)
    shutil.rmtree(b)
    result = all_ranks([a, b], ["a", "b"], lambda: nas_tier(nas))
    assert [(each.step, each.tiers) for each in result] == [(7, ("local",)), (7, ("path",))]
    assert not any(each.local for each in result), "what lies next to a rank's own shard was not all read"
    assert bytes(result[1].items["state"].data) == state(7, 1, 9)


def vars_of(saved: SavedCheckpoint) -> Mapping[str, object]:
    return {name: getattr(saved, name) for name in saved.__slots__}


def test_nothing_in_common_is_an_error_on_every_rank(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save({0: a, 1: b}, 7, ranks=2, mib=9)
    shutil.rmtree(b)
    with pytest.raises(ResumeError, match=r"rank 0 can \(up to step 7\), rank 1 cannot"):
        all_ranks([a, b], ["a", "b"])


def test_a_rank_that_never_comes_is_named(root: Path) -> None:
    save(root, 7, ranks=2, mib=9)
    with Store(root, job="llm", ranks=2, slots=0) as store, pytest.raises(ResumeError, match="rank 1 did not report"):
        choose([LocalTier(store)], MemoryRanks(Memory(), 0, 2), job="llm", look_s=0.2)


def test_what_a_disk_held_up_comes_into_no_memory_that_is_used_again(root: Path) -> None:
    """Ctrl-C in a restore whose disk hangs, and training goes on, as in a notebook."""
    save(root, 7, mib=9)
    hangs, let_go, ended = threading.Event(), threading.Event(), threading.Event()

    class Hanging(ShardReader):
        def read_chunk(self, index: int, target: memoryview) -> None:
            if threading.current_thread() is threading.main_thread():
                assert hangs.wait(60)
                super().read_chunk(index, target)
                return
            hangs.set()
            assert let_go.wait(60)
            target[:] = b"\xaa" * len(target)
            ended.set()

    class HangingTier(LocalTier):
        def open_shard(self, found: Found, shard: Shard) -> Source:
            return Hanging(Path(found.path), shard)

    def is_joining() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return hangs.is_set() and "join" in [each.name for each in traceback.extract_stack(frame)]

    # From Python 3.13 on, a thread is waited for also after Ctrl-C, as is right; before, join() returns at once then.
    free = threading.Timer(5.0, let_go.set)
    free.start()
    with Store(root, job="llm", slots=0) as store, Snapshot() as snapshot:
        with interrupted(is_joining):
            choose([HangingTier(store)], Alone(), job="llm", into=snapshot)
        snapshot.reserve(10 << 20)
        snapshot.buffer[:] = bytes(snapshot.size_bytes)
        let_go.set()
        free.cancel()
        assert ended.wait(60)
        assert snapshot.buffer == bytes(snapshot.size_bytes)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_runs_out_of_memory_keeps_nobody_waiting(root: Path, broken: int) -> None:
    """For hours: so long may a load take."""
    save(root, 7, ranks=2, mib=9)
    memory = Memory()

    class Full(LocalTier):
        def open_shard(self, found: Found, shard: Shard) -> Source:
            if shard.rank == broken:
                raise MemoryError
            return super().open_shard(found, shard)

    def start(rank: int) -> str:
        with Store(root, job="llm", rank=rank, ranks=2, leader=rank == 0, slots=0) as store:
            try:
                choose([Full(store)], MemoryRanks(memory, rank, 2), job="llm")
            except (ResumeError, MemoryError) as error:
                return repr(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        result = list(pool.map(start, range(2)))
    assert result[broken] == "MemoryError()"
    assert f"rank {broken} could not resume: MemoryError" in result[1 - broken]
    assert len(list(root.glob("step-*"))) == 1


@pytest.mark.root
def test_a_folder_of_another_user_on_the_nas_keeps_no_training_from_its_own() -> None:
    """A colleague's training of the same name, say: one that is closed, and one that can be read and not removed."""
    with short_folder() as folder:
        root, nas = folder / "root", folder / "nas"
        (nas / "llm").mkdir(parents=True)
        upload(save(folder / "theirs", 5, mib=1), nas)
        (nas / "llm" / "step-000000000099-0000abcd").mkdir(0o700)
        for path in (folder, nas, nas / "llm"):
            path.chmod(0o777)
        os.seteuid(65534)
        try:
            for step in (6, 7, 8):
                saved = save(root, step, mib=1)
                remote = Remote(url=str(nas), keep=1, keep_days=0)
                order = UploadOrder(remote=remote, job="llm", path=saved.path, digest=saved.manifest_digest)
                progress = Progress()
                with pytest.raises(TierError, match="must be writable"):
                    Transfer(order, PathTier(remote, "llm"), Gate(), progress).run()
                assert progress.committed
            chosen = resumed(folder / "new", nas_tier(nas))
        finally:
            os.seteuid(0)
        assert chosen is not None
        assert (chosen.step, chosen.tiers) == (8, ("path",))
        there = sorted(path.name[:17] for path in (nas / "llm").iterdir())
        assert there == ["step-000000000005", "step-000000000008", "step-000000000099"]
