"""`powerguard checkpoints prune`: nothing goes before what stays was read to the last byte."""

import errno
import json
import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from powerguard.cli.checkpoints.found import entries_at
from powerguard.cli.checkpoints.prune import _print_choices, remove_one
from powerguard.cli.main import main
from powerguard.trainer.seal.folder import hold, let_go, newest_whole, seal
from powerguard.trainer.store.disk import FolderLock
from powerguard.trainer.store.manifest import MANIFEST
from powerguard.trainer.store.store import Store
from tests.cli.checkpoint_sites import IDS, flip, save
from tests.golden import FIGURES, Golden
from tests.trainer.tiers.rig import small_disk

ROOT = Path(__file__).parents[3]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40):
        save(tmp_path / "llm", step)
    return tmp_path / "llm"


def steps(root: Path) -> list[int | None]:
    return [each.step for each in entries_at(str(root))]


def prune(root: Path, *words: str) -> int:
    return main(["checkpoints", "prune", str(root), *words])


def at(root: Path, step: int) -> Path:
    return Path(next(each.path for each in entries_at(str(root)) if each.step == step))


def test_shows_first_and_asks(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody at a terminal: shown, not done."""
    assert prune(job) == 1
    captured = capsys.readouterr()
    stays, _, goes = captured.out.partition("goes:")
    assert (stays.count("step "), goes.count("step ")) == (2, 2)
    assert "--yes" in captured.err
    assert steps(job) == [40, 30, 20, 10]


def test_keeps_the_newest(job: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert prune(job, "--yes") == 0
    assert steps(job) == [40, 30]
    golden("checkpoints", capsys.readouterr().out, varies={job: "JOB", **IDS, **FIGURES})
    assert prune(job, "--keep", "1", "--yes") == 0
    assert steps(job) == [40]
    capsys.readouterr()
    assert prune(job, "--keep", "1", "--yes") == 0
    golden("checkpoints", capsys.readouterr().out, "nothing", varies={job: "JOB", **IDS, **FIGURES})
    for keep in ("-1", "0"):
        with pytest.raises(SystemExit, match="64"):
            prune(job, "--keep", keep)


def test_what_does_not_verify_does_not_count(job: Path) -> None:
    """Two rotten ones at the top: the two below them are what a resume would use."""
    for step in (40, 30):
        flip(at(job, step) / "shard-00000")
    assert prune(job, "--yes") == 0
    assert steps(job) == [40, 30, 20, 10]
    assert prune(job, "--keep", "1", "--yes") == 0
    assert steps(job) == [40, 30, 20]


def test_never_the_last_one_that_verifies(job: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    for step in (40, 30, 20, 10):
        flip(at(job, step) / "shard-00000")
    unfinished = job / "step-000000000005-0123abcd"
    unfinished.mkdir()
    os.utime(unfinished, (0, 0))
    assert prune(job, "--keep", "1", "--yes") == 1
    golden("checkpoints", capsys.readouterr().err, varies={job: "JOB"})
    assert steps(job) == [40, 30, 20, 10, 5]


def test_newest_is_what_was_committed_last(tmp_path: Path) -> None:
    """A training that was rolled back has smaller steps than what it left behind."""
    for minute, step in enumerate((900, 1000, 500), start=1):
        save(tmp_path / "llm", step, minute=minute)
    assert prune(tmp_path / "llm", "--keep", "2", "--yes") == 0
    assert steps(tmp_path / "llm") == [1000, 500]


def test_what_was_never_finished_goes_when_it_is_old(job: Path) -> None:
    """Until it is a day older than a whole one, somebody may be writing it."""
    old, young = job / "step-000000000005-0123abcd", job / "step-000000000050-0123abcd"
    for path in (old, young):
        path.mkdir()
        (path / "shard-00000").write_bytes(b"half")
    os.utime(old, (0, 0))
    (job / "bad-step-000000000003-0123abcd").mkdir()
    assert prune(job, "--keep", "4", "--yes") == 0
    assert (old.exists(), young.exists()) == (False, True)
    assert (job / "bad-step-000000000003-0123abcd").exists()
    assert prune(job, "--keep", "4", "--set-aside", "--yes") == 0
    assert not (job / "bad-step-000000000003-0123abcd").exists()


def test_what_is_being_written_stays_where_commits_are_of_the_future(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer's clock was ahead once, and no commit goes back behind the one before: an upload has just begun."""
    save(tmp_path, 10, year=2096)
    upload = tmp_path / "step-000000000020-0123abcd"
    upload.mkdir()
    (upload / "shard-00000.part").write_bytes(b"half")
    assert prune(tmp_path, "--yes") == 0
    assert upload.exists()
    assert "step 10  0.0 s " in capsys.readouterr().out


def test_sealed_folders_are_pruned_and_others_left_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "a.bin").write_bytes(b"a")
        if step != 2:
            seal(folder)
            os.utime(folder / "SEAL.json", (time.time(), 1_000_000 + step))
    (tmp_path / "link").symlink_to(tmp_path)
    assert prune(tmp_path, str(tmp_path / "link"), "--keep", "1", "--yes") == 0
    assert steps(tmp_path) == [4, 2]


def test_different_models_in_one_folder_do_not_stand_in_for_one_another(tmp_path: Path) -> None:
    names = ["llama", "mistral", "qwen", "qwen2-step-500", "qwen3-epoch=1-step=600", "qwen3-epoch=2-step=700"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_bytes(b"m")
        seal(tmp_path / name)
    assert prune(tmp_path, "--keep", "1", "--yes") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(set(names) - {"qwen3-epoch=1-step=600"})


def test_folders_of_dcp_are_one_series_whatever_their_tokens(tmp_path: Path) -> None:
    """As `dcp.save_sealed` names them; a model that ends in eight digits of its own is another one."""
    names = ["dcp-step-1-9f86d081", "dcp-step-20-00000000", "dcp-step-300-abcdef01", "llm-step-1-9f86d081"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"d")
        seal(tmp_path / name)
    assert prune(tmp_path, "--keep", "2", "--yes") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:]


def test_a_part_that_was_restored_is_no_checkpoint_that_stays_for_another(tmp_path: Path) -> None:
    """It is sealed last, has a step in its name, and no optimizer. Nor does the time of a seal make a step newer."""
    for step in (8, 9):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.bin").write_bytes(b"m")
        (folder / "optimizer.bin").write_bytes(b"o")
        seal(folder)
        os.utime(folder / "SEAL.json", (time.time(), 2_000_000 - step))
    source, part = str(tmp_path / "checkpoint-9"), tmp_path / "model-9"
    assert main(["checkpoints", "restore", source, "--only", "model*", "--to", str(part)]) == 0
    assert prune(tmp_path, "--keep", "1", "--yes") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-9", "model-9"]
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-9"


def test_each_root_is_judged_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What verifies in one job's folder saves nothing of another's."""
    for job in ("a", "b"):
        for step in (1, 2, 3):
            save(tmp_path / job, step)
    for step in (1, 2, 3):
        flip(at(tmp_path / "b", step) / "shard-00000")
    (tmp_path / "b" / "bad-step-000000000003-0123abcd").mkdir()
    assert prune(tmp_path, "--keep", "1", "--set-aside", "--yes") == 1
    assert f"{tmp_path / 'b'}: " in capsys.readouterr().err
    assert len(steps(tmp_path)) == 7


def test_not_beside_a_training(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(job, job="llm"):
        assert prune(job, "--yes") == 1
    assert "keep=" in capsys.readouterr().err
    assert len(steps(job)) == 4


@pytest.mark.parametrize("name", [".lock-dcp", ".lock-transformers"])
def test_not_beside_a_training_that_saves_sealed_folders(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of Transformers keeps the best checkpoint besides the newest ones, and loads it at its end."""
    for step in (1, 2, 3):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.bin").write_bytes(b"m")
        seal(folder)
    hold(tmp_path, name)
    try:
        assert prune(tmp_path, "--yes") == 1
        assert "keep=" in capsys.readouterr().err
        assert steps(tmp_path) == [3, 2, 1]
    finally:
        let_go(tmp_path, name)
    assert prune(tmp_path, "--yes") == 0
    assert steps(tmp_path) == [3, 2]


def test_not_after_a_roll_back_while_it_asks(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two operators: one looks at the list, the other rolls back to a step that is to go."""
    wanted = at(job, 20)

    def roll_back(frame: FrameType, event: str, _found: object) -> None:
        if event == "return" and frame.f_code is _print_choices.__code__:
            sys.setprofile(None)
            assert main(["checkpoints", "restore", str(wanted), "--into", str(job), "--yes"]) == 0

    sys.setprofile(roll_back)
    try:
        assert prune(job, "--yes") == 1
    finally:
        sys.setprofile(None)
    assert "was to stay, but is gone or set aside" in capsys.readouterr().err
    assert wanted.is_dir()
    assert prune(job, "--yes") == 0
    assert wanted.is_dir()


def test_of_several_roots_none_is_changed_beside_a_training(job: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "other", step)
    with Store(job, job="llm"):
        assert main(["checkpoints", "prune", str(tmp_path / "other"), str(job), "--yes"]) == 1
    assert (steps(tmp_path / "other"), len(steps(job))) == ([3, 2, 1], 4)


def test_one_that_cannot_be_removed_does_not_keep_the_others(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As over NFS, where a folder with a file that another host has open cannot be removed."""
    busy = at(job, 20) / "busy"
    busy.mkdir()
    with small_disk(busy, 1):
        assert prune(job, "--yes") == 1
    stdout = capsys.readouterr().out
    assert "removed 1 of 2" in stdout
    assert f"{busy}: {os.strerror(errno.EBUSY)}" in stdout
    assert [each.state for each in entries_at(str(job))] == ["complete", "complete", "unfinished"]


def test_one_that_another_prune_has_removed_is_no_error(tmp_path: Path) -> None:
    assert remove_one(tmp_path / "gone") == ""


def test_what_somebody_reads_stays(job: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    with FolderLock(at(job, 10), shared=True):
        assert prune(job, "--yes") == 1
    assert steps(job) == [40, 30, 10]
    golden("checkpoints", capsys.readouterr().out, varies={job: "JOB", **IDS, **FIGURES})


def test_half_removed_is_no_checkpoint(job: Path) -> None:
    """The manifest goes first: cut off after it, what is left is never taken for good."""
    path = at(job, 10)
    (path / "kept").mkdir()
    (path / MANIFEST).unlink()
    assert next(each.state for each in entries_at(str(job)) if each.step == 10) == "unfinished"
    assert remove_one(path) == ""
    assert not path.exists()


def test_object_of_prune(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(job, "--json") == 1
    assert json.loads(capsys.readouterr().out)["object"] == "error"
    assert prune(job, "--json", "--yes") == 0
    got: dict[str, Any] = json.loads(capsys.readouterr().out)
    example = json.loads((ROOT / "docs/reference/checkpoints-prune.json").read_text(encoding="utf-8"))
    assert list(got) == list(example)
    assert [list(each) for each in got["kept"]] == 2 * [list(example["kept"][0])]
    assert (len(got["removed"]), got["left"]) == (2, [])
