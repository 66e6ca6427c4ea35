"""Where a training begins: a forgotten `restore`, a new run, a roll-back. No acknowledged step is lost."""

from pathlib import Path

import pytest

from powerguard.trainer import Guard, Parts, StoreError


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


def resumed_at(root: Path) -> int:
    job = Job(root)
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


def test_an_empty_folder_needs_no_restore(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(1, 2)
    job.guard.close()
    assert resumed_at(tmp_path) == 2


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
