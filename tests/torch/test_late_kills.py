"""Killed at random instants while its copies come late, a training ends with the same bits as one that never was."""

import subprocess
import sys
from pathlib import Path

import pytest


def ran(folder: Path, steps: int, kills: int, where: str = "cpu") -> tuple[list[int], dict[int, str], str]:
    """Run it; return the steps at which it was started, the loss of each step, and the digest of its end."""
    folder.mkdir()
    words = [sys.executable, "-m", "tests.torch.late_job", str(folder), str(steps), str(kills), "11", where]
    subprocess.run(words, check=True, timeout=1500)
    starts: list[int] = []
    losses: dict[int, str] = {}
    for line in (folder / "loss").read_text().splitlines(keepends=True):
        first, _, second = line.strip().partition(" ")
        if first == "start":
            starts.append(int(second))
        elif line.endswith("\n") and second.isascii() and first.isdecimal():
            assert losses.setdefault(int(first), second) == second, f"step {first} was another one after {starts}"
    return starts, losses, (folder / "final").read_text()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_while_copies_are_late_change_no_bit(kills: int, tmp_path: Path) -> None:
    killed(tmp_path, kills, 1500)


def killed(folder: Path, kills: int, steps: int, where: str = "cpu") -> None:
    starts, losses, final = ran(folder / "pieces", steps, kills, where)
    _, expected, end = ran(folder / "whole", len(losses), 0, where)
    assert losses == expected
    assert final == end
    assert len(starts) <= kills + (kills < 100), "of many kills, some came in a restore"
    assert sum(start > 0 for start in starts) > len(starts) // 3, "few checkpoints were ever used"
    assert (folder / "pieces" / "late").exists(), "no copy was ever late"
