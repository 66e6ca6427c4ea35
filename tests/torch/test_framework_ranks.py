"""The callbacks on several ranks under torchrun: all ranks save and end at the same step, and go on bit for bit."""

from pathlib import Path

import pytest

from tests.torch.processes import Launched

CHILD = Path(__file__).with_name("framework_child.py")


def run(kind: str, ranks: int, folder: Path, out: str, at: int = -1) -> Launched:
    (folder / out).mkdir(exist_ok=True)
    return Launched(ranks, CHILD, kind, folder, folder / out, str(at), log=folder / "log")


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
