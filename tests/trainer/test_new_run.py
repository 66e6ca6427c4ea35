"""Where a training begins: a forgotten `restore`, a new run, a roll-back. No acknowledged step is lost."""

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from powerguard.trainer import Guard, Parts, StoreError
from powerguard.trainer.store.manifest import MANIFEST, committed_ms
from powerguard.trainer.store.shards import Snapshot
from powerguard.trainer.store.store import SavedCheckpoint, Store, mount_of
from powerguard.trainer.tiers.base import NEWEST
from powerguard.wire import After, Loop, Phase, TriggerRequest
from tests.trainer.checkpoints import manifest
from tests.trainer.test_resume import upload


class Job:
    """A training whose whole state is its step."""

    def __init__(self, root: Path, **options: object) -> None:
        self.state = bytearray(8)
        self.guard = Guard(Parts(self.save, self.load), root, job="llm", socket=None, every_s=None, **options)  # type: ignore[arg-type]

    def save(self) -> dict[str, object]:
        return {"state": self.state}

    def load(self, saved: dict[str, object]) -> None:
        self.state[:] = bytes(saved["state"])  # type: ignore[arg-type]

    def train(self, *steps: int) -> None:
        for step in steps:
            self.state[:] = step.to_bytes(8, "little")
            self.guard.save(step)


def begun(root: Path, *steps: int) -> None:
    job = Job(root)
    job.guard.restore()
    job.train(*steps)
    job.guard.close()


def resumed_at(root: Path, **options: object) -> int:
    job = Job(root, **options)
    step = job.guard.restore()
    assert int.from_bytes(job.state, "little") == step
    job.guard.close()
    return step


def test_a_forgotten_restore_is_refused_at_the_first_save(tmp_path: Path) -> None:
    """Its checkpoints would be acknowledged, and the next start would begin at the old ones."""
    begun(tmp_path, 900, 1000)
    job = Job(tmp_path)
    with pytest.raises(StoreError, match=r"step 1000.*restore\(\).*new_run=True"):
        job.guard.save(1)
    with pytest.raises(StoreError, match="restore"):
        job.guard.step(1)
    job.guard.close()
    assert resumed_at(tmp_path) == 1000


def test_a_forgotten_restore_is_refused_in_a_phase_too(tmp_path: Path) -> None:
    """An emergency would write the state that a phase copies, beside the old checkpoints."""
    begun(tmp_path, 1000)
    job = Job(tmp_path)
    with pytest.raises(StoreError, match=r"step 1000.*restore\(\)"), job.guard.phase("eval", step=0):
        pass
    assert job.guard.requests.pace.loop is Loop.TRAIN
    job.guard.close()
    assert resumed_at(tmp_path) == 1000


def test_an_empty_folder_needs_no_restore(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(1, 2)
    job.guard.close()
    assert resumed_at(tmp_path) == 2


def test_a_roll_back_to_a_step_sets_the_later_ones_aside(tmp_path: Path) -> None:
    """Until the first save they stay; a step without a checkpoint is refused, with those that there are."""
    begun(tmp_path, 900, 1000)
    job = Job(tmp_path)
    with pytest.raises(StoreError, match=r"no checkpoint of step 950: there are those of 900, 1000"):
        job.guard.restore(step=950)
    job.guard.close()
    assert resumed_at(tmp_path) == 1000
    job = Job(tmp_path)
    assert job.guard.restore(step=900) == 900
    assert int.from_bytes(job.state, "little") == 900
    job.guard.close()
    assert resumed_at(tmp_path) == 1000, "it saved nothing"
    job = Job(tmp_path)
    job.guard.restore(step=900)
    job.train(901)
    job.guard.close()
    assert resumed_at(tmp_path) == 901
    job = Job(tmp_path / "empty")
    with pytest.raises(StoreError, match=r"no checkpoint of step 5: there is none at all"):
        job.guard.restore(step=5)
    job.guard.close()


def test_a_new_run_sets_the_old_one_aside(tmp_path: Path) -> None:
    """Nothing is deleted, and what is committed from now on is what the next start begins at."""
    begun(tmp_path, 900, 1000)
    job = Job(tmp_path, new_run=True)
    with pytest.raises(StoreError, match="new_run"):
        job.guard.restore()
    job.train(1, 2, 3, 4)
    job.guard.close()
    kept = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("old-"))
    assert len(kept) == 2
    assert resumed_at(tmp_path) == 4


def test_a_roll_back_sets_aside_what_it_went_back_behind(tmp_path: Path) -> None:
    """As Lightning's fit(ckpt_path=older): step 42 is acknowledged beside an old step 100, and stays."""
    begun(tmp_path, 40, 100)
    job = Job(tmp_path)
    job.guard.start_from(40)
    job.train(42, 43)
    job.guard.close()
    assert resumed_at(tmp_path) == 43


def test_what_this_process_has_committed_is_never_pruned_for_older_steps(tmp_path: Path) -> None:
    """A loop that counts its steps anew: retention goes by what training stands on, not by the number alone."""
    job = Job(tmp_path, keep=2)
    job.guard.restore()
    job.train(10, 20, 30, 5)
    newest = job.guard.save(6)
    job.guard.close()
    assert Path(newest.path).exists()


# --- What is not as it should be -------------------------------------------------------------------------------------


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return [text for text in found if "nobody can ask" not in text]


def test_a_folder_that_is_not_there_is_made_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a power cut a disk may not be mounted: training would begin at 0 on the system disk without a word."""
    root = tmp_path / "nvme" / "llm"
    begun(root, 1)
    (text,) = warned(caplog)
    assert f"{root}: was not there and was made, on the file system mounted at {mount_of(tmp_path)}" in text
    assert resumed_at(root) == 1
    assert warned(caplog) == [], "it is there now"


def test_a_folder_that_must_exist_is_not_made(tmp_path: Path) -> None:
    root = tmp_path / "nvme" / "llm"
    with pytest.raises(StoreError, match=r"llm: is not there, and must_exist=True \(is its disk mounted"):
        Job(root, must_exist=True)
    assert not root.parent.exists()
    root.mkdir(parents=True)
    Job(root, must_exist=True).guard.close()


def test_the_disk_that_a_folder_lies_on_is_named(tmp_path: Path) -> None:
    assert mount_of(Path("/proc/self/task")) == Path("/proc")
    (tmp_path / "link").symlink_to("/proc/self")
    assert mount_of(tmp_path / "link" / "task") == Path("/proc")


def test_what_an_earlier_run_has_left_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Deleted manifests: the shards are there, and training begins at 0."""
    begun(tmp_path, 1, 2)
    warned(caplog)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    (tmp_path / names[1] / "MANIFEST.json").unlink()
    assert resumed_at(tmp_path) == 1
    (text,) = warned(caplog)
    assert f"{names[1]}: has no manifest, so it is not a checkpoint" in text
    (tmp_path / names[0] / "MANIFEST.json").unlink()
    assert resumed_at(tmp_path) == 0
    first, second = warned(caplog)
    assert f"{names[0]}: has no manifest" in first
    assert "training begins at step 0; an earlier run has left" in second
    assert names[0] in second
    assert ".slot-" in second


def test_a_folder_set_aside_is_reported_where_nothing_else_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun(tmp_path, 1)
    (found,) = tmp_path.glob("step-*")
    found.rename(tmp_path / f"old-{found.name}")
    warned(caplog)
    assert resumed_at(tmp_path) == 0
    (text,) = warned(caplog)
    assert f"old-{found.name} here, but no checkpoint" in text


def test_a_checkpoint_behind_a_link_is_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Moved to another disk, with a link in its place: links are not followed, and training must not begin again."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    begun(root, 1, 2)
    elsewhere.mkdir()
    older, newest = sorted(root.glob("step-*"))

    def move(path: Path) -> None:
        shutil.move(path, elsewhere)
        path.symlink_to(elsewhere / path.name)

    move(newest)
    warned(caplog)
    assert resumed_at(root) == 1
    (text,) = warned(caplog)
    assert f"{newest}: is a link, and not followed (move" in text
    move(older)
    job = Job(root)
    with job.guard, pytest.raises(StoreError, match=rf"there may be some.*{newest}: is a link"):
        job.guard.restore()


def test_a_checkpoint_itself_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    """As other libraries take it: training would begin at step 0, and save within that checkpoint."""
    begun(tmp_path, 1)
    (one,) = tmp_path.glob("step-*")
    with pytest.raises(StoreError, match=rf"{one}: is one checkpoint \(name the folder in which it lies: {tmp_path}\)"):
        resumed_at(one)


def test_a_folder_of_checkpoints_within_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`rsync -a /backup/llm /nvme/llm` has made /nvme/llm/llm."""
    begun(tmp_path / "llm", 1)
    warned(caplog)
    assert resumed_at(tmp_path) == 0
    (text,) = warned(caplog)
    assert "an earlier run has left llm here, but no checkpoint" in text


# --- With a second tier ----------------------------------------------------------------------------------------------


def committed(root: Path, step: int, created: str) -> SavedCheckpoint:
    """Commit a checkpoint by a clock that is wrong."""
    parts = Parts(lambda: {"state": bytearray(step.to_bytes(8, "little"))}, lambda _: None)
    with Store(root, job="llm", slots=0) as store, Snapshot() as snapshot:
        layout = snapshot.take(parts.items())
        name = store.name(step, "00000001")
        shard = store.write_shard(name, 0, snapshot, layout)
        return store.commit(name, replace(manifest(step, [shard], job="llm"), created=created))


def copied(root: Path, nas: Path, *steps: int, keep: int = 3) -> None:
    """Copy checkpoints of a root to the second tier, in this order. keep: how many stay there."""
    nas.mkdir(exist_ok=True)
    with Store(root, job="llm", slots=0) as store:
        known = {found.step: found.saved() for found in store.found()}
    for step in steps:
        assert upload(known[step], nas, keep=keep)


def rolled_back(root: Path, to: int, *steps: int) -> None:
    job = Job(root)
    job.guard.start_from(to)
    job.train(*steps)
    job.guard.close()


@pytest.mark.parametrize("disk_is_lost", [False, True])
def test_a_rolled_back_run_goes_on_from_what_it_committed_last(tmp_path: Path, disk_is_lost: bool) -> None:
    """The second tier still has the higher step that training went back behind."""
    root, nas = tmp_path / "root", tmp_path / "nas"
    begun(root, 40, 100)
    copied(root, nas, 40, 100)
    rolled_back(root, 40, 42)
    if disk_is_lost:
        copied(root, nas, 42)
        shutil.rmtree(root)
    assert resumed_at(root, remote=str(nas)) == 42


def test_an_emergency_at_a_step_that_was_overruled_is_written(tmp_path: Path) -> None:
    """As Lightning's fit(ckpt_path=older), which comes to the step of the newer checkpoint again."""
    begun(tmp_path, 40, 42)
    job = Job(tmp_path)
    job.guard.restore()
    job.guard.start_from(40)
    job.guard.requests.trigger(TriggerRequest(id="e", after=After.CONTINUE))
    job.state[:] = (42).to_bytes(8, "little")
    job.guard.step(42)
    job.guard.close()
    answer = job.guard.requests.checkpoint("e")
    assert answer is not None
    assert answer.phase is Phase.COMMITTED
    assert Path(answer.path).is_dir()
    assert resumed_at(tmp_path) == 42


def test_what_a_resume_takes_is_never_pruned_for_higher_steps_of_before(tmp_path: Path) -> None:
    """A loop that counts its steps anew, and a power-off before anything was pruned: 10 is the newest of three."""
    for step, minute in ((90, 1), (100, 2), (10, 3)):
        committed(tmp_path, step, f"2026-01-01T00:0{minute}:00.000+00:00")
    assert resumed_at(tmp_path) == 10
    with Store(tmp_path, job="llm") as store:
        assert [name[:17] for name in store.prune()] == ["step-000000000090"]
        scrubbed = store.scrub()
        assert scrubbed is not None
        assert "step-000000000010" in scrubbed.path
    assert resumed_at(tmp_path) == 10


def test_many_higher_steps_of_the_second_tier_do_not_hide_the_last_commit(tmp_path: Path) -> None:
    root, nas = tmp_path / "root", tmp_path / "nas"
    for step in range(100, 100 + NEWEST + 1):
        begun(root, step)
        copied(root, nas, step, keep=NEWEST + 2)
    rolled_back(root, 40, 42)
    copied(root, nas, 42, keep=NEWEST + 2)
    shutil.rmtree(root)
    assert resumed_at(root, remote=str(nas)) == 42


def test_a_second_tier_that_was_copied_elsewhere_does_not_hide_its_highest_step(tmp_path: Path) -> None:
    """`cp -r` to a new NAS gives each file the time of the copy, in any order; some programs go from Z to A."""
    root, nas = tmp_path / "root", tmp_path / "nas"
    steps = range(100, 100 + NEWEST + 1)
    for step in steps:
        begun(root, step)
        copied(root, nas, step, keep=NEWEST + 2)
    shutil.rmtree(root)
    for at_s, file in enumerate(sorted(nas.rglob(MANIFEST), reverse=True)):
        os.utime(file, (at_s, at_s))
    assert resumed_at(root, remote=str(nas)) == steps[-1]


def test_a_clock_that_was_set_back_does_not_make_a_commit_older(tmp_path: Path) -> None:
    """The old run's clock was wrong by 70 years: what is committed after it is later all the same."""
    root, nas = tmp_path / "root", tmp_path / "nas"
    begun(root, 40)
    committed(root, 100, "2096-01-01T00:00:00.000+00:00")
    copied(root, nas, 100)
    rolled_back(root, 40, 42)
    assert resumed_at(root, remote=str(nas)) == 42


def test_what_follows_a_restore_from_the_second_tier_is_later(tmp_path: Path) -> None:
    root, nas = tmp_path / "root", tmp_path / "nas"
    committed(root, 100, "2096-01-01T00:00:00.000+00:00")
    copied(root, nas, 100)
    shutil.rmtree(root)
    job = Job(root, remote=str(nas))
    assert job.guard.restore() == 100
    job.train(101)
    job.guard.close()
    assert resumed_at(root, remote=str(nas)) == 101


def test_a_time_that_is_none_is_the_oldest(tmp_path: Path) -> None:
    """A manifest of another program, or a hostile one: it decides nothing."""
    assert [committed_ms(text) for text in ("", "soon", "0001-01-01", "1969-12-31T00:00:00+00:00")] == [0, 0, 0, 0]
    assert committed_ms("2026-01-01T00:00:00.001+00:00") == 1767225600001
    committed(tmp_path, 100, "soon")
    rolled_back(tmp_path, 100, 101)
    assert resumed_at(tmp_path) == 101
