"""The lines that README and the trainers' guide ask people to paste: they run, and can be asked for a checkpoint."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powerguard.trainer.store import FolderStore, newest_in
from powerguard.wire import TriggerRequest
from tests.trainer.toy import ask, short_folder

ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.mark.parametrize("page", ["README.md", "docs/guides/trainers.md"])
def test_the_pasted_lines_run(page: str, folder: Path) -> None:
    """They once gave the endpoint a text where it took a Path alone, and the training died at its start."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Endpoint" in block)
    lines = lines.replace("/run/powerguard-trainers", str(folder)).replace("/nvme/llm", f"{folder}/ck")
    trained: list[int] = []

    def train(step: int) -> None:
        trained.append(step)
        if len(trained) == 1:
            code, _, _ = ask(
                folder / "llm.sock", "POST", "/api/v1/trigger_checkpoint", TriggerRequest(id="x").to_json()
            )
            assert code == 202

    names: dict[str, Any] = {"train": train, "start": 0, "steps": STEPS, "last_step": STEPS}
    if "FolderStore" not in lines:
        with FolderStore(folder / "ck", job="llm") as store:
            names["save"] = lambda step: store.save(step, {"model.bin": [b"weights"]})
            exec(lines, names)
    else:
        names["state_in_chunks"] = lambda: [b"weights"]
        exec(lines, names)
        names["store"].close()
    assert len(trained) == STEPS
    saved = newest_in(folder / "ck")
    assert saved is not None
    assert saved.step == trained[0]
