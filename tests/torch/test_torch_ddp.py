"""DDP on three ranks and four: see ddp_child.py, which is what runs on them."""

from pathlib import Path

import pytest

from tests.torch.processes import Launched

CHILD = Path(__file__).with_name("ddp_child.py")


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_buckets_are_settled_before_the_first_step(ranks: int, tmp_path: Path) -> None:
    """Every bit after a resume is that of a run without one, and what DDP cannot do is said."""
    Launched(ranks, CHILD, tmp_path, log=tmp_path / "log").end()
    assert sorted(path.name for path in tmp_path.glob("good-*")) == [f"good-{rank}" for rank in range(ranks)]
