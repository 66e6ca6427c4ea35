"""FSDP2: each rank keeps its own shards, and training goes on bit for bit on the same number of ranks."""

from pathlib import Path

from tests.torch.processes import Launched

CHILD = Path(__file__).with_name("fsdp_child.py")


def test_two_ranks_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Local shards as they are, uneven ones too; the moments become DTensors again."""
    Launched(2, CHILD, tmp_path, log=tmp_path / "log").end()
    assert sorted(path.name for path in tmp_path.glob("good-*")) == ["good-0", "good-1"]
