"""`python -m powerguard.trainer.bench`: a user's own machine is measured with the library, and left as it was."""

import re
from pathlib import Path

import pytest

from powerguard.trainer import bench


def test_a_save_and_a_restore_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([str(tmp_path), "--gb", "0.02"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["state", "copy", "write", "durable", "restore", "GPU"]
    assert re.match(r"state +0\.02 GB in 64 tensors; the median of 3 saves$", lines[0])
    copied, written, durable = (float(re.findall(r"([\d.]+) s", line)[0]) for line in lines[1:4])
    assert durable == pytest.approx(copied + written, abs=0.02)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        ([str(tmp_path / "none")], "no such folder"),
        ([str(tmp_path), "--gb", "1e6"], "GB are needed"),
        ([str(tmp_path), "--gb", "-1"], "at least 0.001"),
    ):
        assert bench.main(words) == 2
        assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
