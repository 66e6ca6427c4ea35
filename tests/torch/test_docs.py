"""The lines that the guides ask people to paste: they run."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from powerguard.trainer.seal.folder import verify

GUIDES = Path(__file__).parents[2] / "docs" / "guides"

pytestmark = pytest.mark.filterwarnings("ignore")


def blocks(page: str) -> list[str]:
    text = (GUIDES / page).read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return found


def run(page: str, word: str, folder: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Run the one block of a page that has a word in it."""
    (block,) = [block for block in blocks(page) if word in block]
    exec(block.replace("/nvme/llm", str(folder)), names)
    return names


class Plain:
    """A model, what trains it, and one step."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.data = torch.randn(100, 4)

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def names(self, **more: object) -> dict[str, Any]:
        return {**vars(self), "train": self.train, "rank": 0, "ranks": 1, **more}


def test_the_lines_for_a_loop_of_ones_own(tmp_path: Path) -> None:
    names = run("torch.md", "with Guard(state", tmp_path, Plain().names(last_step=7))
    assert names["step"] == 7
    assert names["loader"].epoch == 1


def test_the_lines_for_dcp(tmp_path: Path) -> None:
    run("torch.md", "SealedFileSystemWriter(", tmp_path, {"state": {"a": torch.ones(3)}})
    assert verify(tmp_path / "step-1200").seal.step == 1200


def test_the_lines_for_dcp_under_a_guard(tmp_path: Path) -> None:
    plain, again = Plain(), Plain()
    names = run("torch.md", "load_newest_sealed(", tmp_path, plain.names())
    assert names["restored"] is None
    with names["guard"] as guard:
        plain.train(plain.data)
        assert verify(guard.save(1).path).is_whole
    assert run("torch.md", "load_newest_sealed(", tmp_path, again.names())["restored"] == 1
    plain.train(plain.data)
    again.train(plain.data)
    assert torch.equal(again.model.weight, plain.model.weight)


def test_the_lines_for_lightning(tmp_path: Path) -> None:
    import lightning

    from powerguard.trainer.torch.data import ResumableLoader

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer(**options: Any) -> Any:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        return lightning.Trainer(**quiet, **options)

    model = Net()
    loader = ResumableLoader(torch.randn(100, 4), batch_size=8)
    names = run(
        "trainers.md",
        "callbacks=[P",
        tmp_path,
        {"Trainer": trainer, "model": model, "loader": loader, "last_step": 5},
    )
    assert names["trainer"].global_step == 5


def test_the_lines_for_transformers(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    names = {"Trainer": Trainer, "args": args, "model": Net(), "data": [{"x": torch.randn(4)} for _ in range(20)]}
    run("trainers.md", "newest_checkpoint(", tmp_path, names)
    assert verify(tmp_path / "checkpoint-4").is_whole


@pytest.mark.parametrize("page", ["torch.md", "trainers.md"])
def test_every_block_can_be_read(page: str) -> None:
    """Also those of frameworks that are not here."""
    assert len(blocks(page)) >= 3
    for block in blocks(page):
        ast.parse(block)
