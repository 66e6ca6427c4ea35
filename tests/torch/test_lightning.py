"""The Lightning callback against the real package: asked over its socket, killed, resumed in the middle of an epoch."""

import json
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import nn

from powerguard.trainer import StopTraining
from powerguard.trainer.guard import Signals
from powerguard.trainer.lightning import PowerguardCallback
from powerguard.trainer.store.store import newest_in
from powerguard.trainer.torch.data import ResumableLoader
from powerguard.trainer.torch.state import StateError
from powerguard.wire import After
from tests.torch.wishes import Dip, wait_until_durable, wish
from tests.trainer.toy import ask

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's own, of which there are many
    pytest.mark.timeout(230, method="thread"),
]
STEPS = 40


class Net(lightning.LightningModule):
    """Dropout, noise from numpy, a schedule. At one step, or in the validation after it, it does what a test wants."""

    def __init__(self, *, at: int = -1, does: Any = None, in_validation: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["does"])
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.losses: dict[int, str] = {}
        self._at, self._does, self._in_validation = at, does, in_validation

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self._at and not self._in_validation:
            self._does()
        x = batch + 0.1 * torch.randn_like(batch) + float(np.random.rand())
        loss = (self.layers(x).squeeze(1) - batch.sum(1)).square().mean()
        self.losses[self.global_step] = loss.item().hex()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.global_step == self._at and self._in_validation and batch_idx == 0:
            self._does()
        self.log("val", self.layers(batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS), "interval": "step"}
        ]


def trained(
    folder: Path,
    net: Net,
    *callbacks: lightning.Callback,
    accumulate: int = 1,
    name: str = "ck",
    begin: Path | None = None,
    validate_every: int | None = None,
    is_first: bool = False,
    **options: Any,
) -> PowerguardCallback:
    """Train to the end.

    begin: a checkpoint of Lightning's own to begin at. validate_every: batches; None: an epoch. is_first: the guard's
    callback is given before the others. options: of the guard.
    """
    lightning.seed_everything(1, verbose=False)
    data = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    options = {"every_s": None} | options | {"conduct": "exit", "socket": folder / "net.sock"}
    callback = PowerguardCallback(folder / name, job="net", **options)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        val_check_interval=validate_every,
        callbacks=[callback, *callbacks] if is_first else [*callbacks, callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        default_root_dir=folder,
    )
    loader, validation = ResumableLoader(data, batch_size=8, seed=2), torch.utils.data.DataLoader(data, batch_size=50)
    trainer.fit(net, loader, validation, ckpt_path=begin, weights_only=False)
    return callback


class CutOffError(Exception):
    """Stands for the power cut."""


@pytest.mark.parametrize(
    ("at", "accumulate"),
    [(12, 1), (9, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, 1), (25, 1), (13, 2)))],
)
def test_it_goes_on_bit_for_bit(at: int, accumulate: int, folder: Path) -> None:
    """13 batches make an epoch: in its middle, at its end, after a validation; two micro-batches a step as well."""
    whole = Net()
    trained(folder, whole, accumulate=accumulate, name="whole")
    first = Net(at=at, does=lambda: wish(folder))
    with pytest.raises(StopTraining):
        trained(folder, first, accumulate=accumulate)
    saved = newest_in(folder / "ck")
    assert saved is not None
    assert saved.step == at + 1
    second = Net()
    trained(folder, second, accumulate=accumulate)
    assert min(second.losses) == at + 1
    assert first.losses | second.losses == whole.losses
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


class Momentum(torch.optim.Optimizer):
    """Momentum in float32, whatever the weights are; alone, and within a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for param in (each for group in self.param_groups for each in group["params"]):
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param, dtype=torch.float32)
                    state["means"] = [torch.zeros_like(param, dtype=torch.float32)]
                state["mean"].lerp_(param.grad.float(), 0.1)
                state["means"][0].lerp_(state["mean"], 0.1)
                param.sub_((0.1 * state["means"][0]).to(param.dtype))
        return loss


class HalfNet(Net):
    """Weights in bfloat16."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bfloat16()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch.bfloat16(), batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        super().validation_step(batch.bfloat16(), batch_idx)

    def configure_optimizers(self) -> Any:
        return Momentum(self.parameters())


def test_moments_keep_their_dtype(folder: Path) -> None:
    """Lightning lets torch cast those of bfloat16 weights, and training would go on with them."""
    whole, first, second = HalfNet(), HalfNet(at=12, does=lambda: wish(folder)), HalfNet()
    trained(folder, whole, name="whole")
    with pytest.raises(StopTraining):
        trained(folder, first)
    trained(folder, second)
    assert {each["mean"].dtype for each in second.trainer.optimizers[0].state.values()} == {torch.float32}
    assert first.losses | second.losses == whole.losses


def test_it_pauses_and_goes_on_in_place(folder: Path) -> None:
    """Utility is back: no step lost, and the state was durable meanwhile."""
    dip = Dip(folder)
    whole, net = Net(), Net(at=7, does=dip.begin)
    trained(folder, whole, name="whole")
    trained(folder, net)
    seen = dip.ended()
    assert (seen["phase"], seen["step"]) == ("committed", 8)
    assert net.losses == whole.losses


class Swapped(lightning.Callback):
    """Averaged weights, here zeros, in place of the trained ones while a validation runs."""

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._kept = [parameter.detach().clone() for parameter in pl_module.parameters()]
        self._put(pl_module, [torch.zeros_like(kept) for kept in self._kept])

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._put(pl_module, self._kept)

    def _put(self, net: lightning.LightningModule, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), values, strict=True):
                parameter.copy_(value)


@pytest.mark.parametrize(("at", "accumulate", "every"), [(13, 1, None), (8, 1, 4), (4, 2, 8)])
def test_an_emergency_in_a_validation_has_the_step_before_it(
    at: int, accumulate: int, every: int | None, folder: Path
) -> None:
    """At the end of an epoch and in its middle; training pauses in the validation, and is ended there by the power."""
    options: dict[str, Any] = {"accumulate": accumulate, "validate_every": every}
    dip = Dip(folder)
    whole, paused = Net(), Net(at=at, does=dip.begin, in_validation=True)
    trained(folder, whole, Swapped(), name="whole", **options)
    trained(folder, paused, Swapped(), **options)
    seen = dip.ended()
    assert (seen["phase"], seen["step"], seen["paused"]) == ("committed", at, True)
    assert paused.losses == whole.losses

    first, second = Net(at=at, does=lambda: wish(folder), in_validation=True), Net()

    class Slow(lightning.Callback):
        """The next batch of the validation comes when the checkpoint is durable."""

        def on_validation_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
            if trainer.global_step == at:
                wait_until_durable(folder)

    with pytest.raises(StopTraining):
        trained(folder, first, Swapped(), Slow(), name="ended", **options)
    assert max(first.losses) == at - 1
    trained(folder, second, Swapped(), name="ended", **options)
    assert min(second.losses) == at
    assert first.losses | second.losses == whole.losses
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_validation_between_two_micro_batches_keeps_no_half_step(folder: Path) -> None:
    """Gradients are in no checkpoint: an emergency waits for the end of that step."""
    options: dict[str, Any] = {"accumulate": 2, "validate_every": 5}
    whole, first, second = Net(), Net(at=2, does=lambda: wish(folder), in_validation=True), Net()
    trained(folder, whole, name="whole", **options)
    with pytest.raises(StopTraining):
        trained(folder, first, **options)
    saved = newest_in(folder / "ck")
    assert saved is not None
    assert saved.step == 3
    trained(folder, second, **options)
    assert first.losses | second.losses == whole.losses


def end() -> None:
    """End this process, as systemd does, unless a test has ended already."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_it_at_a_step_and_not_between_two_micro_batches(folder: Path) -> None:
    """Lightning's own handler would end it after the batch, without a checkpoint."""
    net = Net(at=9, does=lambda: net.losses.get(9) is None and end())
    with pytest.raises(StopTraining):
        trained(folder, net, accumulate=2)
    saved = newest_in(folder / "ck")
    assert saved is not None
    assert saved.step == 10
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("options", "is_ours"), [({}, True), ({"signals": True}, True), ({"signals": False}, False)])
def test_who_takes_the_signal(folder: Path, options: dict[str, bool], *, is_ours: bool) -> None:
    found: list[object] = []
    trained(folder, Net(at=3, does=lambda: found.append(signal.getsignal(signal.SIGTERM))), **options)
    assert isinstance(getattr(found[0], "__self__", None), Signals) is is_ours


def test_a_signal_ends_it_while_it_pauses(folder: Path) -> None:
    """The shutdown of a host waits 90 s for a process that stays."""
    was_resumed = threading.Event()
    is_over = threading.Event()

    def stop() -> None:
        for _ in range(200):
            seen = json.loads(ask(folder / "net.sock", "GET", "/api/v1/checkpoints/w?wait=1")[2])
            if seen["phase"] == "committed" and seen["paused"]:
                break
            time.sleep(0.05)
        end()
        if not is_over.wait(60):
            was_resumed.set()
            ask(folder / "net.sock", "POST", "/api/v1/resume")

    stopping = threading.Thread(target=stop)

    def begin() -> None:
        wish(folder, After.PAUSE)
        stopping.start()

    with pytest.raises(SystemExit):
        trained(folder, Net(at=7, does=begin))
    is_over.set()
    stopping.join()
    assert not was_resumed.is_set()


def test_a_roll_back_to_a_checkpoint_of_lightnings_own(folder: Path) -> None:
    """fit(ckpt_path=...) rules: later checkpoints of ours are set aside, and none of their state is used."""
    older = folder / "older.ckpt"
    net = Net(at=10, does=lambda: net.trainer.save_checkpoint(older))
    trained(folder, net, name="none")
    with pytest.raises(StopTraining):
        trained(folder, Net(at=30, does=lambda: wish(folder)))
    left = newest_in(folder / "ck")
    assert left is not None
    alone, beside = Net(), Net(at=20, does=lambda: wish(folder))
    trained(folder, alone, name="empty", begin=older)
    with pytest.raises(StopTraining):
        trained(folder, beside, begin=older)
    assert min(beside.losses) == 10
    assert beside.losses.items() <= alone.losses.items()
    assert (folder / "ck" / f"old-{Path(left.path).name}").is_dir()
    newest = newest_in(folder / "ck")
    assert newest is not None
    assert newest.step == 21


def test_the_end_of_a_training_is_saved(folder: Path) -> None:
    """A second fit, of more steps or with other data, goes on from there, and not from minutes before."""
    net, again = Net(), Net()
    trained(folder, net, every_s=3600.0)
    saved = newest_in(folder / "ck")
    assert saved is not None
    assert saved.step == STEPS
    trained(folder, again, every_s=3600.0)
    assert again.losses == {}
    assert newest_in(folder / "ck") == saved, "nothing was trained, so nothing is saved again"
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


class Averaged(lightning.Callback):
    """An average of the weights, which the model has at the end, as Lightning's WeightAveraging has it."""

    def __init__(self) -> None:
        self.mean: list[torch.Tensor] = []
        self.last: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, net: lightning.LightningModule, *_: object) -> None:
        self.mean = self.mean or [torch.zeros_like(each) for each in net.parameters()]
        for mean, parameter in zip(self.mean, net.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    def on_train_end(self, trainer: lightning.Trainer, net: lightning.LightningModule) -> None:
        self.last = [each.detach().clone() for each in net.parameters()]
        with torch.no_grad():
            for mean, parameter in zip(self.mean, net.parameters(), strict=True):
                parameter.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


@pytest.mark.parametrize("is_first", [True, False])
def test_what_another_callback_makes_of_a_step_is_kept(folder: Path, *, is_first: bool) -> None:
    """Whichever is given first: else the average of a resumed run would lack one step."""
    whole, first, second = Averaged(), Averaged(), Averaged()
    trained(folder, Net(), whole, name="whole", is_first=is_first)
    with pytest.raises(StopTraining):
        trained(folder, Net(at=12, does=lambda: wish(folder)), first, is_first=is_first)
    trained(folder, Net(), second, is_first=is_first)
    for one, other in zip(whole.mean, second.mean, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_end_of_a_training_is_saved_without_averaged_weights(folder: Path, *, is_first: bool) -> None:
    """Whichever is given first: a second fit, of more steps, goes on from the weights that were trained."""
    averaged, again = Averaged(), Net()
    trained(folder, Net(), averaged, every_s=3600.0, is_first=is_first)
    trained(folder, again, every_s=3600.0)
    assert again.losses == {}
    for one, other in zip(averaged.last, again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_crash_leaves_the_last_checkpoint(folder: Path) -> None:
    """And its endpoint closed."""

    def crash() -> None:
        raise CutOffError

    net = Net(at=9, does=crash)
    with pytest.raises(CutOffError):
        trained(folder, net)
    assert not (folder / "net.sock").exists()
    assert newest_in(folder / "ck") is None


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_who_ends_a_training_in_its_midst_waits_for_no_copy(
    folder: Path, caplog: pytest.LogCaptureFixture, end: BaseException
) -> None:
    """Not for five minutes, in which Lightning does not hear a second Ctrl-C."""
    nas = folder / "nas"
    nas.mkdir()

    def crash() -> None:
        nas.rmdir()
        (guard,) = (each.guard for each in net.trainer.callbacks if isinstance(each, PowerguardCallback))
        guard.save(9)
        raise end

    net = Net(at=9, does=crash)
    with pytest.raises(SystemExit):
        trained(folder, net, remote=str(nas))
    assert "copy_unfinished" not in caplog.text


def test_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(StopTraining):
        trained(folder, Net(at=3, does=lambda: wish(folder)))
    other = Net()
    other.layers = nn.Sequential(nn.Linear(8, 1))
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="layers"):
        trained(folder, other)


def test_what_is_kept_by_others_is_refused_by_name(folder: Path) -> None:
    """A callback whose state is an object of its own would be lost without a word."""

    class Odd(lightning.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

    from powerguard.trainer.lightning import _TrainerState

    trainer = lightning.Trainer(
        max_steps=0, logger=False, accelerator="cpu", callbacks=[Odd()], enable_checkpointing=False
    )
    trainer.strategy.connect(Net())
    with pytest.raises(StateError, match=r"checkpoint/callbacks/.*Odd.*/thing: a object cannot be kept"):
        list(_TrainerState(trainer).items())
