"""The callbacks on several ranks under torchrun: all ranks save and end at the same step, and go on bit for bit."""

from pathlib import Path

import pytest

from tests.torch.processes import Launched

CHILD = Path(__file__).with_name("framework_child.py")


def run(kind: str, ranks: int, folder: Path, out: str, at: int = -1, where: str = "train") -> Launched:
    (folder / out).mkdir(exist_ok=True)
    return Launched(ranks, CHILD, kind, folder, folder / out, str(at), where, log=folder / "log")


def losses(folder: Path, out: str, rank: int) -> list[str]:
    return (folder / out / f"loss-{rank}").read_text().splitlines()


@pytest.mark.slow  # three starts of two or four ranks each
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["lightning", "transformers"])
def test_ranks_end_and_go_on_as_one(kind: str, ranks: int, folder: Path) -> None:
    """With four ranks the sum of the gradients depends on the buckets of DDP."""
    run(kind, ranks, folder, "first", at=7).end(within_s=200)
    done = len(losses(folder, "first", 0))
    assert 8 <= done < 20
    assert {len(losses(folder, "first", rank)) for rank in range(ranks)} == {done}
    run(kind, ranks, folder, "second").end(within_s=200)
    (folder / "ck").rename(folder / "ck-used")
    run(kind, ranks, folder, "whole").end(within_s=200)
    for rank in range(ranks):
        whole = losses(folder, "whole", rank)
        assert len(whole) == 20
        assert losses(folder, "first", rank) + losses(folder, "second", rank) == whole


@pytest.mark.slow  # three starts of two ranks
@pytest.mark.timeout(600)
def test_ranks_end_in_a_validation_of_lightning(folder: Path) -> None:
    """It takes five seconds more, and may take minutes: all ranks end in it, with the step before it."""
    run("lightning", 2, folder, "first", at=10, where="eval").end(within_s=200)
    run("lightning", 2, folder, "second").end(within_s=200)
    (folder / "ck").rename(folder / "ck-used")
    run("lightning", 2, folder, "whole").end(within_s=200)
    for rank in range(2):
        first, whole = losses(folder, "first", rank), losses(folder, "whole", rank)
        assert len(first) == 10
        assert first + losses(folder, "second", rank) == whole
