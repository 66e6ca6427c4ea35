"""Real power cuts while torch.distributed.checkpoint saves, sealed: nothing torn is taken, nothing told is lost."""

import sys
from pathlib import Path

import pytest

from tests.trainer.cuts.loops import needs_loop_devices
from tests.trainer.cuts.power import base, cut_power

PROGRAM = (sys.executable, "-m", "tests.torch.cut_patterns")


def cut(folder: Path, kind: str, pattern: str, cuts: int) -> tuple[int, int, int]:
    tally = cut_power(folder, kind, pattern, cuts=cuts, seed=7, program=PROGRAM)
    print(tally)
    return tally.torn, tally.lost, tally.good


def test_a_few_cuts(tmp_path: Path) -> None:
    needs_loop_devices()
    with base(tmp_path) as folder:
        torn, lost, _ = cut(folder, "ext4", "torch DCP, sealed", 4)
    assert (torn, lost) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_hundred_cuts(kind: str, tmp_path: Path) -> None:
    needs_loop_devices()
    with base(tmp_path) as folder:
        torn, lost, good = cut(folder, kind, "torch DCP, sealed", 100)
    assert (torn, lost) == (0, 0)
    assert good > 50
