"""`powerguard checkpoints export`: the weights alone, as a safetensors file."""

import json
from pathlib import Path

import pytest

from powerguard.cli.main import main
from tests.cli.checkpoint_sites import IDS, flip, save
from tests.golden import FIGURES, Golden
from tests.trainer.test_weights import floats, index_of, saved, tensor

ROOT = Path(__file__).parents[3]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    state = {"w": tensor("w"), "_extra_state": 1}
    for step in (10, 20):
        saved(tmp_path / "llm", [(index_of(state), [floats("w", 2000, first=step)])], step=step)
    return tmp_path / "llm"


def test_export(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    """The newest, one of a step, and the errors with their reasons."""
    target = tmp_path / "model.safetensors"
    assert main(["checkpoints", "export", str(job), "--to", str(target)]) == 0
    assert main(["checkpoints", "export", str(job), "--to", str(target)]) == 1
    for more in (["--step", "11"], ["--part", "ema"]):
        assert main(["checkpoints", "export", str(job), *more, "--to", str(tmp_path / "other")]) == 1
    save(tmp_path / "plain", 3)
    assert main(["checkpoints", "export", str(tmp_path / "plain"), "--to", str(tmp_path / "other")]) == 1
    assert main(["checkpoints", "export", str(job), "--to", str(tmp_path / "gone" / "other")]) == 1
    flip(next(job.glob("step-000000000020*")) / "shard-00000")
    assert main(["checkpoints", "export", str(job), "--to", str(tmp_path / "other")]) == 1
    assert not (tmp_path / "other").exists()
    captured = capsys.readouterr()
    golden("checkpoints", captured.out + captured.err, varies={tmp_path: "HERE", **IDS, **FIGURES})


def test_object_of_export(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["checkpoints", "export", str(job), "--step", "10", "--to", str(target), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    example = json.loads((ROOT / "docs/reference/checkpoints-export.json").read_text(encoding="utf-8"))
    assert list(got) == list(example)
    assert (got["step"], got["tensors"], got["left_out"]) == (10, 1, ["_extra_state"])
    assert got["size_bytes"] == target.stat().st_size
