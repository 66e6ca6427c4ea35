"""Killed at random instants, a training ends with the same bits as one that never was: every loss, every parameter."""

import random
import time
from pathlib import Path

import pytest

from tests.torch.processes import Launched

JOB = Path(__file__).with_name("job.py")
STEPS = 1500
START_S = 240.0  # torchrun and two ranks that load torch: on a machine that is very busy a minute


def starts_and_losses(out: Path, rank: int) -> tuple[list[int], dict[int, str]]:
    """The steps at which it was started, and the loss of each step. A step that was done twice must tell the same."""
    starts, losses = [], {}
    for line in (out / f"loss-{rank}").read_text().splitlines(keepends=True):
        first, _, second = line.strip().partition(" ")
        if first == "start":
            starts.append(int(second))
        elif line.endswith("\n"):  # the last line before a kill may be cut off
            assert losses.setdefault(int(first), second) == second, f"step {first} of rank {rank} was another one"
    return starts, losses


def lines(out: Path) -> int:
    path = out / "loss-0"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def reference(folder: Path, ranks: int, steps: int) -> Path:
    folder.mkdir()
    Launched(ranks, JOB, folder / "ck", folder, str(steps), log=folder / "log").end(within_s=2 * START_S)
    return folder


def killed(folder: Path, ranks: int, steps: int, kills: int, seed: int, *how: str) -> tuple[Path, int]:
    """Run, with so many kills. Also returns how many of them it did not go back to the beginning for."""
    chance = random.Random(seed)
    folder.mkdir()
    final = folder / "final-0"
    for _ in range(kills):
        if final.exists():  # this process was late, and training has ended before it was killed
            break
        before = lines(folder)
        job = Launched(ranks, JOB, folder / "ck", folder, str(steps), *how, log=folder / "log")
        wanted = before + chance.randrange(30, max(31, steps // (kills + 1)))
        try:
            job.until(lambda wanted=wanted: lines(folder) >= wanted or final.exists(), within_s=START_S)
            time.sleep(chance.random() * 0.2)
        finally:
            job.kill()
    Launched(ranks, JOB, folder / "ck", folder, str(steps), *how, log=folder / "log").end(within_s=2 * START_S)
    return folder, sum(start > 0 for start in starts_and_losses(folder, 0)[0])


def compare(whole: Path, pieces: Path, ranks: int, steps: int) -> None:
    for rank in range(ranks):
        expected, seen = starts_and_losses(whole, rank)[1], starts_and_losses(pieces, rank)[1]
        assert len(expected) == steps
        assert seen == expected
        assert (pieces / f"final-{rank}").read_text() == (whole / f"final-{rank}").read_text()
    starts = [starts_and_losses(pieces, rank)[0] for rank in range(ranks)]
    assert starts.count(starts[0]) == ranks, "all ranks went on at the same step, each time"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("ranks", "kills"), [(2, 2), *(pytest.param(ranks, 3, marks=pytest.mark.slow) for ranks in (1, 2, 3, 4))]
)
def test_kills_change_no_bit(ranks: int, kills: int, tmp_path: Path) -> None:
    """Under torchrun with gloo, and alone.

    From three ranks on, the sum depends on the buckets of DDP: test_torch_ddp.py looks at these at each commit.
    """
    steps = 400
    whole = reference(tmp_path / "whole", ranks, steps)
    pieces, resumed = killed(tmp_path / "pieces", ranks, steps, kills, ranks, *(["one snapshot"] * (ranks == 2)))
    compare(whole, pieces, ranks, steps)
    assert resumed > 0, "no checkpoint was ever used"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two ranks that nobody killed."""
    return reference(tmp_path_factory.mktemp("alone") / "whole", 2, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("turn", range(10))
def test_ten_of_a_hundred_kills_change_no_bit(whole: Path, tmp_path: Path, turn: int) -> None:
    """Two ranks; every second time with what is alike divided among them, every third with one snapshot."""
    how = ["divide"] * (turn % 2) + ["one snapshot"] * (turn % 3 == 0)
    pieces, resumed = killed(tmp_path / "pieces", 2, STEPS, 10, turn, *how)
    compare(whole, pieces, 2, STEPS)
    assert resumed > 5, "of ten: the others went back to the beginning"
