"""The lines that README and the trainers' guide ask people to paste: they run, save, and can be asked to save."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powerguard.trainer import Guard
from powerguard.trainer.store.store import SavedCheckpoint, newest_in
from powerguard.wire import TriggerRequest
from tests.trainer.toy import ask, short_folder

ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/guides/trainers.md"])
def test_the_pasted_lines_run(page: str, folder: Path) -> None:
    """They once gave the endpoint a text where it took a Path alone, and the training died at its start."""
    lines = next(block for block in blocks(page) if "guard.restore()" in block)
    lines = lines.replace('"/nvme/llm"', f'"{folder}/ck"').replace(
        'job="llm"', f'job="llm", socket="{folder}/llm.sock"'
    )
    trained: list[int] = []
    weights = bytearray(b"weights")

    def train(step: int) -> None:
        trained.append(step)
        if len(trained) == 1:
            request = TriggerRequest(id="x").to_json()
            assert ask(folder / "llm.sock", "POST", "/api/v1/trigger_checkpoint", request)[0] == 202

    names: dict[str, Any] = {
        "train": train,
        "last_step": STEPS,
        "step": 0,
        "weights": weights,
        "momentum": bytearray(7),
    }
    names |= {"version": 3, "numbers": (1, 2), "gauss": None}
    names |= {"save": lambda: {"weights": weights}, "load": lambda _: None}
    exec(lines, names)
    assert trained == [1, 2, 3]
    saved = newest_in(folder / "ck")
    assert saved is not None
    assert saved.step in (1, STEPS)
    trained.clear()
    exec(lines.replace("last_step + 1", "last_step + 2"), {**names, "last_step": saved.step})
    assert trained == [saved.step + 1], "restored, it goes on after the step that was saved"


def test_the_pasted_phase_runs(folder: Path) -> None:
    """An evaluation in a phase, with a poll in it."""
    lines = next(block for block in blocks("docs/guides/trainers.md") if "guard.phase" in block)
    seen: list[int] = []
    saved = SavedCheckpoint(step=4, path=str(folder), size_bytes=1, manifest_digest="")
    with Guard(lambda _: saved, job="x", socket=None) as guard:
        exec(lines, {"guard": guard, "step": 4, "validation": [1, 2], "evaluate": seen.append})
    assert seen == [1, 2]


def test_the_pasted_writer_runs(folder: Path) -> None:
    """A job with a writer of its own: what it imports is there, and what it returns is what the guard has saved."""
    lines = next(block for block in blocks("docs/guides/trainers.md") if "guard.report" in block)
    names: dict[str, Any] = {"size": 7, "write": lambda step: f"{folder}/{step}"}
    exec(lines.replace('job="llm"', f'job="llm", socket="{folder}/llm.sock"'), names)
    with names["guard"] as guard:
        assert guard.save(4) == SavedCheckpoint(step=4, path=f"{folder}/4", size_bytes=7, manifest_digest="")
