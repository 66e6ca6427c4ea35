"""The power of real file systems is cut at random instants: nothing torn is accepted, nothing acknowledged is lost.

Ten cuts here, a thousand in `make test-long`; `python -m tests.trainer.cuts` prints the table beside other patterns.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers import require
from tests.trainer.cuts.loops import needs_loop_devices
from tests.trainer.cuts.power import HEAD, Tally, base, cut_power


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where images can be frozen."""
    needs_loop_devices()
    require("mkfs.xfs")
    require("mkfs.ext4")
    with base(tmp_path) as folder:
        yield folder


def check(tally: Tally, cuts: int) -> None:
    print(f"{HEAD}\n{tally}")
    assert (tally.cuts, tally.torn, tally.lost, tally.refused) == (cuts, 0, 0, 0)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_five_cuts(folder: Path, kind: str) -> None:
    tally = cut_power(folder, kind, "powerguard", cuts=5, seed=1, wait_s=(0.1, 0.5), promised=True)
    check(tally, 5)
    assert tally.good >= 2, "else nothing was tried"


def test_the_cuts_are_cuts(folder: Path) -> None:
    """What is renamed without a flush is lost: else the test above would prove nothing."""
    tally = cut_power(folder, "xfs", "write + rename", cuts=2, seed=1, wait_s=(0.3, 0.5), promised=True)
    print(f"{HEAD}\n{tally}")
    assert tally.lost > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pattern", ["powerguard", "powerguard, no slots"])
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_thousand_cuts(folder: Path, kind: str, pattern: str, seed: int) -> None:
    """In twenty parts, each short enough for a busy machine."""
    check(cut_power(folder, kind, pattern, cuts=50, seed=seed), 50)
