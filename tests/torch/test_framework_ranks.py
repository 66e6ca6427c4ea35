"""The callbacks on two ranks under torchrun: all ranks save and end at the same step, and go on bit for bit."""

from pathlib import Path

import pytest

from tests.torch.processes import Launched

CHILD = Path(__file__).with_name("framework_child.py")


def run(kind: str, folder: Path, out: str, at: int = -1) -> Launched:
    (folder / out).mkdir(exist_ok=True)
    return Launched(2, CHILD, kind, folder, folder / out, str(at), log=folder / "log")


def losses(folder: Path, out: str, rank: int) -> list[str]:
    return (folder / out / f"loss-{rank}").read_text().splitlines()


@pytest.mark.slow  # six starts of two ranks each
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["lightning", "transformers"])
def test_two_ranks_end_and_go_on_as_one(kind: str, folder: Path) -> None:
    run(kind, folder, "first", at=7).end()
    done = len(losses(folder, "first", 0))
    assert 8 <= done < 20
    assert len(losses(folder, "first", 1)) == done
    run(kind, folder, "second").end()
    (folder / "ck").rename(folder / "ck-used")
    run(kind, folder, "whole").end()
    for rank in (0, 1):
        whole = losses(folder, "whole", rank)
        assert len(whole) == 20
        assert losses(folder, "first", rank) + losses(folder, "second", rank) == whole
