"""`powerguard checkpoints restore`: what was chosen is rolled back, all else stays, and it can be undone."""

import errno
import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.checkpoints.found import entries_at
from powerguard.cli.checkpoints.restore import restore
from powerguard.cli.main import main
from powerguard.trainer.seal.folder import seal, verify
from powerguard.trainer.seal.manifest import SEAL, SealError
from powerguard.trainer.store.folders import Found
from powerguard.trainer.store.manifest import MANIFEST, Manifest, committed_ms
from powerguard.trainer.store.store import Store
from tests.cli.checkpoint_sites import IDS, content, flip, items_of, save
from tests.golden import FIGURES, Golden
from tests.trainer.tiers.rig import small_disk

ROOT = Path(__file__).parents[3]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job's root with three checkpoints of two ranks."""
    for step in (10, 20, 30):
        save(tmp_path / "llm", step, ranks=2)
    return tmp_path / "llm"


def at(root: Path, step: int) -> Path:
    return Path(next(each.path for each in entries_at(str(root)) if each.step == step and each.is_whole))


def newest(root: Path) -> Path:
    """What a resume takes: the checkpoint that was committed last."""
    with Store(root, job="") as store:
        return Path(max(store.found(), key=lambda each: committed_ms(each.manifest.created)).path)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


# --- Native -----------------------------------------------------------------------------------------------------------


def test_items_go_into_a_new_root(job: Path, tmp_path: Path) -> None:
    """A root of its own, that a training can resume from and that verifies. No log handler stays behind."""
    handlers = list(logging.getLogger("powerguard.trainer").handlers)
    assert main(["checkpoints", "restore", str(at(job, 20)), "--to", str(tmp_path / "new"), "--only", "model.*"]) == 0
    path = newest(tmp_path / "new")
    for rank in range(2):
        assert items_of(path, rank) == {"model.w": content(20, "model.w", rank)}
    assert main(["checkpoints", "verify", str(tmp_path / "new")]) == 0
    assert logging.getLogger("powerguard.trainer").handlers == handlers


def test_a_rotten_checkpoint_leaves_no_new_root_behind(job: Path, tmp_path: Path) -> None:
    """Refused, nothing was changed: the next try, from a good one, finds the place free."""
    flip(at(job, 20) / "shard-00001")
    assert main(["checkpoints", "restore", str(at(job, 20)), "--to", str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()
    assert main(["checkpoints", "restore", str(at(job, 10)), "--to", str(tmp_path / "new")]) == 0


def test_a_roll_back_counts_whatever_steps_and_clocks_say(tmp_path: Path) -> None:
    """Training went back to 25 once, which was committed after 30; then the clock was set back by a year."""
    root = tmp_path / "llm"
    for step, minute in ((10, 10), (30, 30), (25, 40)):
        save(root, step, minute=minute)
    assert last_committed(root).step == 25
    assert main(["checkpoints", "restore", str(at(root, 30)), "--into", str(root), "--yes"]) == 0
    assert last_committed(root).step == 30
    later = Manifest.parse((at(root, 30) / MANIFEST).read_bytes())
    (at(root, 30) / MANIFEST).write_bytes(replace(later, created="2999-01-01T00:00:00Z").to_json())
    words = ["checkpoints", "restore", str(root), "--step", "10", "--into", str(root), "--only", "model.*", "--yes"]
    assert main(words) == 0
    assert items_of(Path(last_committed(root).path))["model.w"] == content(10, "model.w")


def test_newest_is_what_was_committed_last(tmp_path: Path) -> None:
    """As for a resume: a second tier still has the higher steps that a rolled-back training left behind."""
    nas, root = tmp_path / "nas" / "llm", tmp_path / "llm"
    for minute, step in enumerate((900, 1000, 500), start=1):
        save(nas, step, minute=minute)
    assert main(["checkpoints", "restore", str(nas), "--to", str(root)]) == 0
    assert last_committed(root).step == 500


def test_no_checkpoint_of_another_job_is_taken(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A NAS has a folder for each job: neither the newest of all of them, nor one that training would refuse."""
    nas = tmp_path / "nas"
    save(nas / "llm", 5, ranks=2)
    other = save(nas / "vision", 50, ranks=2, job="vision")
    before = tree(job)
    for words in ([str(nas), "--to", str(tmp_path / "new")], [str(other), "--into", str(job), "--yes"]):
        assert main(["checkpoints", "restore", *words]) == 1
        assert "vision" in said(capsys)
    assert not (tmp_path / "new").exists()
    assert tree(job) == before
    assert main(["checkpoints", "restore", str(nas), "--step", "5", "--into", str(job), "--yes"]) == 0


def last_committed(root: Path) -> Found:
    """Return what a resume takes."""
    with Store(root, job="") as store:
        return max(store.found(), key=lambda found: committed_ms(found.manifest.created))


def test_items_are_rolled_back_and_the_rest_stays(
    job: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    before = tree(job)
    words = ["checkpoints", "restore", str(job), "--step", "10", "--into", str(job), "--only", "optim.*", "--yes"]
    assert main(words) == 0
    golden("checkpoints", capsys.readouterr().out, varies={job: "JOB", **IDS, **FIGURES})
    path = newest(job)
    for rank in range(2):
        assert items_of(path, rank) == {
            "model.w": content(30, "model.w", rank),
            "optim.m": content(10, "optim.m", rank),
            "step": b"30",
        }
    assert {name: data for name, data in tree(job).items() if path.name not in name} == before
    assert main(["checkpoints", "restore", "--undo", str(job)]) == 0
    assert items_of(newest(job))["optim.m"] == content(30, "optim.m")
    assert main(["checkpoints", "restore", "--undo", str(job)]) == 1
    golden("checkpoints", said(capsys), "undone", varies={job: "JOB"})


def test_everything_is_rolled_back_and_comes_back(job: Path) -> None:
    """The newest is then the one that was named; what is newer is set aside, not removed."""
    assert main(["checkpoints", "restore", str(at(job, 10)), "--into", str(job), "--yes"]) == 0
    assert newest(job).name.startswith("step-000000000010")
    assert sorted(each.state for each in entries_at(str(job))) == ["complete", "set_aside", "set_aside"]
    assert main(["checkpoints", "restore", "--undo", str(job)]) == 0
    assert [each.step for each in entries_at(str(job))] == [30, 20, 10]
    assert newest(job).name.startswith("step-000000000030")


def test_everything_is_rolled_back_to_another_places_copy(job: Path, tmp_path: Path) -> None:
    """As from a NAS that still has what the local disk has pruned."""
    nas = tmp_path / "nas"
    save(nas / "llm", 5, ranks=2)
    assert main(["checkpoints", "restore", str(nas), "--into", str(job), "--yes"]) == 0
    assert items_of(newest(job), 1)["model.w"] == content(5, "model.w", 1)
    assert main(["checkpoints", "restore", "--undo", str(job)]) == 0
    assert items_of(newest(job), 1)["model.w"] == content(30, "model.w", 1)


def test_an_undone_roll_back_leaves_an_earlier_restore_alone(job: Path) -> None:
    """Training has gone on from it; only the roll-back is undone."""
    words = ["checkpoints", "restore", str(job), "--step", "10", "--into", str(job), "--only", "optim.*", "--yes"]
    assert main(words) == 0
    made = newest(job)
    save(job, 40, ranks=2, year=2099)
    assert main(["checkpoints", "restore", str(made), "--into", str(job), "--yes"]) == 0
    assert newest(job) == made
    assert main(["checkpoints", "restore", "--undo", str(job)]) == 0
    assert newest(job) == at(job, 40)
    assert made.is_dir()


def test_a_second_tier_is_rolled_back_to_the_same_checkpoint(job: Path, tmp_path: Path) -> None:
    """Or the next resume would take the newer copy from there. What is there already is not copied again."""
    nas = tmp_path / "nas"
    shutil.copytree(job, nas)
    assert main(["checkpoints", "restore", str(at(job, 20)), "--into", str(nas), "--yes"]) == 0
    assert sorted(each.state for each in entries_at(str(nas))) == ["complete", "complete", "set_aside"]
    assert newest(nas).name == at(job, 20).name
    assert main(["checkpoints", "restore", "--undo", str(nas)]) == 0
    assert [each.step for each in entries_at(str(nas))] == [30, 20, 10]


def test_it_is_asked_before_anything_changes(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody at a terminal: refused without --yes."""
    before = tree(job)
    words = ["checkpoints", "restore", str(at(job, 10)), "--into", str(job)]
    assert main(words) == 1
    assert "add --yes to do it" in said(capsys)
    assert main([*words, "--json"]) == 1
    assert tree(job) == before


def test_object_of_restore(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoints", "restore", str(job), "--to", str(tmp_path / "new"), "--json"]
    assert main(words) == 0
    got: dict[str, Any] = json.loads(capsys.readouterr().out)
    example = json.loads((ROOT / "docs/reference/checkpoints-restore.json").read_text(encoding="utf-8"))
    assert list(got) == list(example)
    assert got["restored"] == ["model.w", "optim.m", "step"]


def test_what_does_not_fit_is_refused(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another number of ranks, another job, other shapes, no such item, no such step, nowhere to put it."""
    save(tmp_path / "one", 40, ranks=1)
    save(tmp_path / "other", 40, ranks=2, job="other")
    before = tree(job)
    into = ["--into", str(job), "--only", "model.*", "--yes"]
    for words, expected in [
        ([str(tmp_path / "one"), *into], "of 2 ranks on 1 hosts"),
        ([str(tmp_path / "other"), *into], "of job 'llm'"),
        ([str(job), "--step", "30", *into], "its newest checkpoint is the selected one"),
        ([str(job), "--step", "10", "--into", str(job), "--only", "nope", "--yes"], "it has model.w, optim.m, step"),
        ([str(job), "--step", "11", *into], "no checkpoint of step 11 there"),
        ([str(job), "--step", "10", "--into", str(tmp_path / "gone"), "--yes"], "no such folder"),
        ([str(job), "--to", str(job)], "already exists"),
        (["--to", str(tmp_path / "new")], "name the checkpoint"),
    ]:
        assert main(["checkpoints", "restore", *words]) == 1
        assert expected in said(capsys)
    assert tree(job) == before


def test_a_rotten_source_changes_nothing(job: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    flip(at(job, 10) / "shard-00001")
    before = tree(job)
    assert main(["checkpoints", "restore", str(at(job, 10)), "--into", str(job), "--only", "*.m", "--yes"]) == 1
    golden("checkpoints", said(capsys), varies={job: "JOB", **IDS})
    assert tree(job) == before


def test_a_training_that_writes_there_is_not_disturbed(
    job: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    with Store(job, job="llm", ranks=2):
        assert main(["checkpoints", "restore", str(at(job, 10)), "--into", str(job), "--only", "*", "--yes"]) == 1
    golden("checkpoints", said(capsys), varies={job: "JOB", **IDS})


# --- Sealed folders ---------------------------------------------------------------------------------------------------

OLD = {"config.json": b"old", "model/a.bin": b"old a" * 1000, "model/b.bin": b"old b" * 1000, "gone.txt": b"was here"}
NEW = {"config.json": b"new", "model/a.bin": b"new a" * 900, "model/b.bin": b"new b" * 900, "late.txt": b"since then"}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = write(tmp_path / "checkpoint-10", OLD)
    (folder / "latest").symlink_to("model")
    (folder / "empty").mkdir()
    (folder / "links").mkdir()
    (folder / "links" / "a.bin").symlink_to("../model/a.bin")
    seal(folder)
    return folder


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint-20", NEW)


def without_seal(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(folder).items() if name != SEAL}


def test_files_go_into_a_new_folder(old: Path, tmp_path: Path) -> None:
    """Sealed again, so that what was restored is as safe as what it came from."""
    target = tmp_path / "out"
    assert main(["checkpoints", "restore", str(old), "--to", str(target), "--only", "model/*"]) == 0
    assert without_seal(target) == {name: data for name, data in OLD.items() if name.startswith("model/")}
    assert verify(target).is_whole
    whole = tmp_path / "whole"
    assert main(["checkpoints", "restore", str(old), "--to", str(whole)]) == 0
    assert verify(whole).seal.same_content(verify(old).seal)


def test_a_file_that_does_not_verify_is_not_restored(old: Path, tmp_path: Path) -> None:
    flip(old / "model/b.bin", 7)
    with pytest.raises(SealError, match=r"model/b.bin: changed since it was sealed, at chunk 0"):
        restore(old, tmp_path / "out", [])
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(SealError):
        restore(old, tmp_path / "out", [])
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_is_named(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small").mkdir()
    with small_disk(tmp_path / "small", 1):
        filling = tmp_path / "small" / "filling"
        filling.write_bytes(bytes((1 << 20) - 8192))
        assert main(["checkpoints", "restore", str(old), "--to", str(tmp_path / "small/out")]) == 1
        assert list(filling.parent.iterdir()) == [filling]
    assert f"{tmp_path}/small/out: {os.strerror(errno.ENOSPC)}" in said(capsys)


def test_files_do_not_go_into_a_folder_that_is_there(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(new)
    assert main(["checkpoints", "restore", str(old), "--into", str(new), "--yes"]) == 1
    assert "--to DIR" in said(capsys)
    assert tree(new) == before
