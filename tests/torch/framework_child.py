"""The ranks of a framework on CPUs: framework_child.py lightning|transformers FOLDER OUT AT train|eval

At step AT, or in the validation after it, rank 0 is asked to save and end (-1: never). Each rank tells its losses in
OUT/loss-RANK.
"""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from powerguard.wire import After, TriggerRequest
from tests.trainer.toy import ask

STEPS = 20
KIND, FOLDER, OUT, AT = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
IN_EVALUATION = sys.argv[5] == "eval"
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SOCKET = FOLDER / "job.sock"
DATA = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))


def begin(step: int, loss: torch.Tensor) -> None:
    """Tell a loss, and ask when it is time."""
    with (OUT / f"loss-{RANK}").open("a") as file:
        print(step, loss.item().hex(), file=file)
    if step == AT and not IN_EVALUATION:
        asked()


def asked() -> None:
    """Have rank 0 asked."""
    if RANK == 0:
        code, _, _ = ask(
            SOCKET, "POST", "/api/v1/trigger_checkpoint", TriggerRequest(id="w", after=After.EXIT).to_json()
        )
        assert code == 202


def layers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.3), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def in_lightning() -> None:
    import lightning

    from powerguard.trainer.lightning import PowerguardCallback
    from powerguard.trainer.torch.data import ResumableLoader

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = (self.layers(batch + 0.1 * torch.randn_like(batch)).squeeze(1) - batch.sum(1)).square().mean()
            begin(self.global_step, loss)
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val", self.layers(batch).mean(), sync_dist=True)
            if self.global_step == AT and IN_EVALUATION:
                if batch_idx == 0:
                    asked()
                time.sleep(0.1)  # for as long as the checkpoint takes

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(RANK)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=RANKS,
        val_check_interval=5,
        strategy="ddp",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[PowerguardCallback(FOLDER / "ck", job="job", conduct="exit", every_s=None, socket=SOCKET)],
    )
    net = Net()
    torch.manual_seed(RANK)
    loader = ResumableLoader(DATA, batch_size=8, seed=2, rank=RANK, ranks=RANKS)
    trainer.fit(net, loader, torch.utils.data.DataLoader(DATA, batch_size=8))


def in_transformers() -> None:
    from transformers import Trainer, TrainingArguments

    from powerguard.trainer.transformers import PowerguardCallback, newest_checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()
            self.trainer: Any = None

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = (self.layers(x + 0.1 * torch.randn_like(x)).squeeze(1) - x.sum(1)).square().mean()
            begin(self.trainer.state.global_step, loss)
            return {"loss": loss}

    net = Net()
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "ck"),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        ddp_find_unused_parameters=False,  # as with gradient checkpointing: buckets are rebuilt
    )
    net.trainer = Trainer(net, arguments, train_dataset=[{"x": row} for row in DATA])
    torch.manual_seed(RANK)
    PowerguardCallback(net.trainer, job="job", conduct="exit", socket=SOCKET)
    net.trainer.train(resume_from_checkpoint=newest_checkpoint(FOLDER / "ck"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    in_lightning() if KIND == "lightning" else in_transformers()
