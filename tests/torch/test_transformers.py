"""The callback for the Trainer of Transformers, against the real package: asked, sealed, torn, resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from powerguard.trainer import StopTraining
from powerguard.trainer.seal.folder import verify
from powerguard.trainer.seal.manifest import SEAL, SealError
from powerguard.trainer.store.store import StoreError, locked
from powerguard.trainer.transformers import PowerguardCallback, _sums, newest_checkpoint
from powerguard.wire import After, TriggerRequest
from tests.peers.ports import free_port
from tests.torch.wishes import Dip, wish
from tests.trainer.tiers.rig import small_disk
from tests.trainer.toy import ask

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(230, method="thread")]
STEPS = 30


class Net(nn.Module):
    """Dropout and noise; tells its losses to the bit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.losses: list[str] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        loss = (self.layers(x + 0.1 * torch.randn_like(x)).squeeze(1) - x.sum(1)).square().mean()
        self.losses.append(loss.item().hex())
        return {"loss": loss}


class At(TrainerCallback):
    """Does something when a step begins."""

    def __init__(self, step: int, does: Any) -> None:
        self._step, self._does = step, does

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if state.global_step == self._step:
            self._does()


class Evaluating(TrainerCallback):
    """Does something in the middle of the evaluation after a step, and counts batches of evaluations."""

    def __init__(self, step: int, does: Any) -> None:
        self._step, self._does = step, does
        self.batches: list[int] = []

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self.batches.append(state.global_step)
        if self.batches.count(self._step) == 2:
            self._does()


NEWEST = "newest"
LOCK = ".lock-transformers"


def listed(folder: Path) -> list[str]:
    """Return all names in the output folder, hidden ones too."""
    return sorted(path.name for path in (folder / "out").iterdir())


def trained(
    folder: Path,
    net: Net,
    *callbacks: TrainerCallback,
    at: int = -1,
    does: Any = None,
    out: str = "out",
    begin: str | None = NEWEST,
    later: TrainerCallback | None = None,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> None:
    """Train to the end. later: a callback that is added after the guard's. kind: of the Trainer."""
    set_seed(1)
    generator = torch.Generator().manual_seed(1)
    data = [{"x": row, "labels": row} for row in torch.randn(100, 8, generator=generator)]
    arguments = TrainingArguments(
        output_dir=str(folder / out),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        seed=3,
        **({"save_strategy": "no"} | options),
    )
    trainer = kind(net, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[At(at, does), *callbacks])
    PowerguardCallback(trainer, job="net", conduct="exit", socket=folder / "net.sock")
    if later is not None:
        trainer.add_callback(later)
    trainer.train(resume_from_checkpoint=newest_checkpoint(folder / out) if begin == NEWEST else begin)


@pytest.mark.parametrize("at", [12, *(pytest.param(at, marks=pytest.mark.slow) for at in (5, 20))])
def test_it_goes_on_bit_for_bit(at: int, folder: Path) -> None:
    """13 batches make an epoch: in its middle, at its end, in the second one."""
    whole, first, second = Net(), Net(), Net()
    trained(folder, whole, out="whole")
    with pytest.raises(StopTraining):
        trained(folder, first, at=at, does=lambda: wish(folder))
    checkpoint = folder / "out" / f"checkpoint-{at + 1}"
    assert verify(checkpoint).is_whole
    assert newest_checkpoint(folder / "out") == str(checkpoint)
    trained(folder, second)
    assert first.losses[: at + 1] + second.losses == whole.losses
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_pauses_and_goes_on_in_place(folder: Path) -> None:
    dip = Dip(folder)
    whole, net = Net(), Net()
    trained(folder, whole, out="whole")
    trained(folder, net, at=7, does=dip.begin)
    seen = dip.ended()
    assert (seen["phase"], seen["step"], seen["durable"]) == ("committed", 8, True)
    assert net.losses == whole.losses


OFTEN = {"eval_strategy": "steps", "eval_steps": 10, "per_device_eval_batch_size": 1}


def test_an_emergency_in_an_evaluation_has_the_step_before_it(folder: Path) -> None:
    """An evaluation of minutes outlasts a battery. Training goes on as after any checkpoint of that step."""
    quiet = Evaluating(-1, None)
    first, second, whole = Net(), Net(), Net()
    seen = Evaluating(10, lambda: wish(folder))
    with pytest.raises(StopTraining):
        trained(folder, first, seen, **OFTEN)
    assert seen.batches == [10, 10]
    checkpoint = folder / "out" / "checkpoint-10"
    assert newest_checkpoint(folder / "out") == str(checkpoint)
    trained(folder, second, quiet, **OFTEN)
    assert quiet.batches == [20] * 8 + [30] * 8
    trained(folder, whole, out="whole")
    assert first.losses[:10] == whole.losses[:10]


class Averaging(Trainer):
    """Evaluates other weights than it trains, as one that averages them does."""

    def evaluate(self, *args: Any, **options: Any) -> Any:
        trained_weights = [each.detach().clone() for each in self.model.parameters()]
        for each in self.model.parameters():
            each.data.mul_(0.5)
        try:
            return super().evaluate(*args, **options)
        finally:
            for each, weights in zip(self.model.parameters(), trained_weights, strict=True):
                each.data.copy_(weights)


@pytest.mark.parametrize(("strategy", "step"), [("steps", 10), ("epoch", 13)])
def test_an_emergency_in_an_evaluation_of_other_weights_waits_for_its_end(
    strategy: str, step: int, folder: Path
) -> None:
    """A checkpoint with the average in the place of the weights is one that training does not go on from."""
    net, seen = Net(), Evaluating(step, lambda: wish(folder))
    with pytest.raises(StopTraining):
        trained(folder, net, seen, kind=Averaging, **OFTEN | {"eval_strategy": strategy})
    assert seen.batches == [step] * 8
    checkpoint = folder / "out" / f"checkpoint-{step + 1}"
    assert newest_checkpoint(folder / "out") == str(checkpoint)
    saved = load_file(checkpoint / "model.safetensors")
    for name, weights in net.state_dict().items():
        assert torch.equal(saved[name], weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_a_change_of_one_bit_is_seen(dtype: torch.dtype) -> None:
    """Averaged weights are so close that the norm of each may be the same in half precision."""
    weights = nn.Module()
    weights.register_parameter("weight", nn.Parameter(torch.ones(3, 5).to(dtype).t(), requires_grad=False))
    before = _sums(weights)
    assert before == _sums(weights)
    assert before is not None
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    weights.weight.data.view(bits)[2, 1] ^= 1
    assert before != _sums(weights)


def test_weights_that_are_elsewhere_are_unknown() -> None:
    assert _sums(nn.Linear(2, 2, device="meta")) is None


def test_it_pauses_in_an_evaluation_and_goes_on_in_place(folder: Path) -> None:
    dip = Dip(folder)
    whole, net, seen = Net(), Net(), Evaluating(10, dip.begin)
    trained(folder, whole, out="whole", **OFTEN)
    trained(folder, net, seen, **OFTEN)
    status = dip.ended()
    assert (status["phase"], status["step"], status["paused"]) == ("committed", 10, True)
    assert seen.batches == [10] * 8 + [20] * 8 + [30] * 8
    assert net.losses == whole.losses


def test_what_it_saves_by_itself_is_sealed_and_two_stay(folder: Path) -> None:
    """And a wish at the very step of its own plan writes once."""
    trained(folder, Net(), at=19, does=lambda: wish(folder, After.CONTINUE), save_strategy="steps", save_steps=5)
    assert listed(folder) == [LOCK, "checkpoint-25", "checkpoint-30"]
    assert all(verify(path).is_whole for path in (folder / "out").glob("checkpoint-*"))


class Adding(TrainerCallback):
    """Clips the weights as a step ends, and puts a file of its own into what Transformers has saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: object) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)

    def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
        Path(args.output_dir, f"checkpoint-{state.global_step}", "adapter.txt").write_text("a", encoding="utf-8")


def test_what_another_callback_adds_is_part_of_the_checkpoint(folder: Path) -> None:
    """Also of one that is added later: a file that came after the seal would make the checkpoint a damaged one."""
    whole, first, second = Net(), Net(), Net()
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    trained(folder, whole, out="whole", later=Adding(), **options)
    with pytest.raises(StopTraining):
        trained(folder, first, at=11, does=lambda: wish(folder), later=Adding(), **options)
    assert [verify(folder / "out" / f"checkpoint-{step}").is_whole for step in (10, 12)] == [True, True]
    trained(folder, second, later=Adding(), **options)
    assert first.losses + second.losses == whole.losses


def test_what_is_added_to_an_emergency_checkpoint_is_sealed_too(folder: Path) -> None:
    """Transformers saves by its plan at the very step, and the other callback learns of that alone."""
    trained(
        folder,
        Net(),
        at=24,
        does=lambda: wish(folder, After.CONTINUE),
        later=Adding(),
        save_strategy="steps",
        save_steps=5,
    )
    for step in (25, 30):
        assert (folder / "out" / f"checkpoint-{step}" / "adapter.txt").exists()
        assert verify(folder / "out" / f"checkpoint-{step}").is_whole


@pytest.mark.parametrize("begin", [None, "checkpoint-20"])
def test_a_run_that_begins_earlier_sets_later_checkpoints_aside(folder: Path, begin: str | None) -> None:
    """A roll-back, or a forgotten resume: its checkpoints of lower steps were pruned as soon as they were sealed."""
    trained(folder, Net(), save_strategy="steps", save_steps=10)
    out = folder / "out"
    at = 22 if begin else 5
    with pytest.raises(StopTraining):
        trained(folder, Net(), at=at, does=lambda: wish(folder), begin=str(out / begin) if begin else None)
    assert newest_checkpoint(out) == str(out / f"checkpoint-{at + 1}")
    kept = ["checkpoint-20", "checkpoint-23"] if begin else ["checkpoint-6", "old-checkpoint-20"]
    assert listed(folder) == [LOCK, *kept, "old-checkpoint-30"]


def test_a_torn_one_is_passed_over(folder: Path) -> None:
    """Transformers' own search takes it, and so would a training that had lost its newest bytes to a power cut."""
    trained(folder, Net(), save_strategy="steps", save_steps=10)
    newest = folder / "out" / "checkpoint-30"
    (newest / "model.safetensors").write_bytes(bytes(500))
    assert get_last_checkpoint(str(folder / "out")) == str(newest)
    assert newest_checkpoint(folder / "out") == str(folder / "out" / "checkpoint-20")
    assert listed(folder) == [LOCK, "bad-checkpoint-30", "checkpoint-20"]
    (folder / "out" / "checkpoint-20" / SEAL).unlink()
    with pytest.raises(
        SealError, match=r"out: no checkpoint there is whole: bad-checkpoint-30 changed after being sea"
    ):
        newest_checkpoint(folder / "out")


def test_a_limit_that_removes_too_early_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="save_total_limit removes checkpoints before"):
        trained(folder, Net(), save_total_limit=1)


def test_half_a_checkpoint_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="save_only_model leaves the optimizer out"):
        trained(folder, Net(), save_strategy="steps", save_only_model=True)


def made(folder: Path, **options: Any) -> Trainer:
    """Return a trainer of its own data and callback, to be trained more than once."""
    data = [{"x": row, "labels": row} for row in torch.randn(40, 8)]
    steps = {"save_strategy": "steps", "per_device_train_batch_size": 8, "use_cpu": True}
    arguments = TrainingArguments(str(folder / "out"), report_to=[], disable_tqdm=True, **steps, **options)
    trainer = Trainer(Net(), arguments, train_dataset=data, eval_dataset=data)
    PowerguardCallback(trainer, job="net", socket=None)
    return trainer


class Worse(TrainerCallback):
    """Has each evaluation come out worse than the one before."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: object) -> None:
        metrics["eval_loss"] = float(state.global_step)


def test_a_second_training_writes_its_own_checkpoints(folder: Path) -> None:
    """Another fold with the same trainer: at a step that the first one saved, its own weights are saved."""
    trainer = made(folder, max_steps=4, save_steps=4)
    trainer.train()
    first = (folder / "out" / "checkpoint-4" / "model.safetensors").read_bytes()
    trainer.train()
    assert (folder / "out" / "checkpoint-4" / "model.safetensors").read_bytes() != first
    assert verify(folder / "out" / "checkpoint-4").is_whole


def test_the_best_checkpoint_stays_with_the_newest_ones(folder: Path) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 10}
    trainer = made(folder, load_best_model_at_end=True, **often)
    trainer.add_callback(Worse())
    trainer.train()
    assert listed(folder) == [LOCK, "checkpoint-10", "checkpoint-2", "checkpoint-8"]


RANK = """
import os, torch.distributed as dist
from powerguard.trainer.transformers import _on_all
dist.init_process_group("gloo")
def stage():
    if dist.get_rank() == 0:
        raise OSError(28, "No space left on device")
try:
    _on_all(stage)
except Exception as error:
    os.write(1, f"{dist.get_rank()} {type(error).__name__}: {error}\\n".encode())
_on_all(lambda: None)
dist.destroy_process_group()
"""


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """The others would stand in a barrier until torch gives up, after half an hour."""
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    ended = subprocess.run([*launch, tmp_path / "rank.py"], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert sorted(line for line in ended.stdout.splitlines() if line[:1] in "01") == [
        "0 OSError: [Errno 28] No space left on device",
        "1 SealError: rank 0 could not save: OSError: [Errno 28] No space left on device",
    ]


def test_a_second_training_in_the_same_folder_is_refused(folder: Path) -> None:
    """Each would set aside or remove what the other saves. In one process, a later training may follow."""
    (folder / "out").mkdir()
    with locked(folder / "out", LOCK), pytest.raises(StoreError, match="another process writes"):
        trained(folder, Net())
    trained(folder, Net(), save_strategy="steps", save_steps=10)
    with locked(folder / "out", LOCK):
        pass


def test_what_a_failed_save_has_left_goes_with_the_next_one(folder: Path) -> None:
    """Each of a kill or a full disk would take room for good. What was never ours stays."""
    out = folder / "out"
    out.mkdir()
    with small_disk(out, 1):
        (out / "checkpoint-2").mkdir()
        (out / "full").write_bytes(bytes(1012 << 10))
        free = At(7, (out / "full").unlink)
        trained(
            folder, Net(), free, at=5, does=lambda: wish(folder, After.CONTINUE), save_strategy="steps", save_steps=10
        )
        assert listed(folder) == [LOCK, "checkpoint-2", "checkpoint-20", "checkpoint-30"]
        assert not list(out.glob("*/.begun"))


def test_what_could_not_be_sealed_is_written_again(folder: Path) -> None:
    """The daemon asks once more while training stands: a disk that failed a flush has lost bytes, and says so once."""
    model = folder / "out" / "checkpoint-6" / "model.safetensors"
    seen: list[tuple[str, int]] = []

    def save(name: str) -> None:
        ask(folder / "net.sock", "POST", "/api/v1/trigger_checkpoint", TriggerRequest(id=name).to_json())
        phase = ""
        while phase not in ("committed", "failed"):
            phase = json.loads(ask(folder / "net.sock", "GET", f"/api/v1/checkpoints/{name}?wait=1")[2])["phase"]
        seen.append((phase, model.stat().st_mtime_ns))

    def save_twice() -> None:
        try:
            save("first")
            (model.parent / "odd").unlink()
            save("second")
        finally:
            ask(folder / "net.sock", "POST", "/api/v1/resume")

    saving = Thread(target=save_twice)

    def begin() -> None:
        model.parent.mkdir(parents=True)
        os.mkfifo(model.parent / "odd")  # cannot be sealed
        ask(folder / "net.sock", "POST", "/api/v1/pause")
        saving.start()

    trained(folder, Net(), at=5, does=begin)
    saving.join()
    (first, first_ns), (second, second_ns) = seen
    assert (first, second) == ("failed", "committed")
    assert first_ns < second_ns


class Judge(TrainerCallback):
    """Finds each evaluation better than the one before.

    seen: at each, the files of checkpoint-10 and the best checkpoint so far.
    """

    def __init__(self, folder: Path) -> None:
        self.seen: list[tuple[dict[str, int], str]] = []
        self._folder = folder / "out" / "checkpoint-10"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: object) -> None:
        files = {path.name: path.stat().st_mtime_ns for path in self._folder.iterdir()}
        self.seen.append((files, Path(state.best_model_checkpoint or "").name))
        metrics["eval_loss"] = -float(state.global_step)


def test_a_best_metric_writes_over_no_emergency_checkpoint(folder: Path) -> None:
    """It is found after that step, and Transformers would write into the sealed folder: half of it, at a power cut."""
    judge = Judge(folder)
    trained(
        folder,
        Net(),
        judge,
        at=9,
        does=lambda: wish(folder, After.CONTINUE),
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="best",
        metric_for_best_model="loss",
        greater_is_better=False,
    )
    (first, _), (second, best), _ = judge.seen
    assert SEAL in first
    assert (second, best) == (first, "checkpoint-10")
    assert listed(folder) == [LOCK, "checkpoint-20", "checkpoint-30"]
