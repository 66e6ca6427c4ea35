"""Hugging Face Trainer: when asked, it writes its own `checkpoint-N` folder at once, sealed, and stands still.

    trainer = Trainer(model, args, train_dataset=data)
    PowerguardCallback(trainer, job="llm")
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

The folders stay Hugging Face's: written with its own code (through the page cache, so slower than `TorchState` in a
loop of one's own), read by its own resume. What `save_steps` writes is sealed, too. `get_last_checkpoint` of
Transformers takes any folder for whole; `newest_checkpoint` takes only what verifies.

`Trainer._save_checkpoint` is the one private name in use: only it writes a checkpoint within a callback.
"""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from powerguard.trainer.guard import Guard
from powerguard.trainer.loop.checkpointer import attempted
from powerguard.trainer.seal.folder import hold, leave_behind, let_go, newest_whole, prune, saved_in, seal, unseal
from powerguard.trainer.seal.manifest import SealError
from powerguard.trainer.store.store import SavedCheckpoint
from powerguard.trainer.torch.ddp import settle_buckets

_NAMES: Final = "checkpoint-[0-9]*"
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_BEGUN: Final = ".begun"
"""Marks a folder in which Transformers has begun to write and has not ended. One without is not ours to remove."""

_LOCK: Final = ".lock-transformers"

Trainer = Any
Arguments = Any
State = Any
Control = Any
"""Those of Transformers."""


def newest_checkpoint(output_dir: Path | str) -> str | None:
    """The newest checkpoint that verifies to the last byte, for `resume_from_checkpoint`; None: begin at step 0.

    One that does not verify is renamed to `bad-...`; SealError when none is left. Call it before ranks start to train,
    on a file system they share.
    """
    folder = newest_whole(output_dir, _NAMES)
    return None if folder is None else str(folder)


class PowerguardCallback(TrainerCallback):
    """Guards one Trainer, to which it adds itself.

    job: its name for the daemon. keep: how many sealed checkpoints stay, at least 2; older ones go when a newer one is
    durable. options: as `Guard` has them. Raises ValueError where `save_total_limit` is set (Transformers then removes
    the old checkpoint before the new one is on the disk), or `save_only_model`. The best checkpoint, which
    `load_best_model_at_end` needs, stays in addition to `keep`. While it trains, output_dir is locked: StoreError from
    `train()` if another process trains there.
    """

    def __init__(self, trainer: Trainer, *, job: str, keep: int = 2, **options: Any) -> None:  # noqa: ANN401 - see Guard
        if trainer.args.save_total_limit is not None:
            msg = "save_total_limit removes checkpoints before the next one is durable: leave it out, and say keep=..."
            raise ValueError(msg)
        if trainer.args.save_only_model:
            msg = "save_only_model leaves the optimizer out, so that no training goes on as it was: leave it out"
            raise ValueError(msg)
        self._trainer = trainer
        self._job = job
        self._keep = max(keep, 2)
        self._options = options
        self._written = self._sealed = -1
        self._evaluation: AbstractContextManager[None] | None = None
        self._weights: tuple[int, ...] | None = None
        """Sums of the weights where an evaluation follows; None: unknown."""
        self._may_save = False
        """The weights of the evaluation that runs are those of training."""
        self._write_now = trainer._save_checkpoint  # noqa: SLF001 - see above
        trainer._save_checkpoint = self._write_once  # noqa: SLF001 - likewise
        self.guard: Guard | None = None
        """While it trains; None before and after."""
        trainer.add_callback(self)

    def _write_once(self, model: Any, trial: Any = None) -> None:  # noqa: ANN401 - as Transformers has them
        """Have Transformers write this step, by its own plan or for a best metric, unless the step is sealed."""
        state = self._trainer.state
        if self._sealed != state.global_step:
            if self.guard is not None and trial is None and self._trainer.is_world_process_zero():
                folder = self._folder(state.global_step)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / _BEGUN).touch()
            self._write_now(model, trial)
        elif state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(self._folder(state.global_step))

    def on_train_begin(self, args: Arguments, state: State, control: Control, **_: object) -> None:  # noqa: ARG002
        self._close()  # a training that failed before
        # Last: what other callbacks make of a step, and put into a checkpoint that is saved, is part of it.
        handler = self._trainer.callback_handler
        handler.callbacks = [*(each for each in handler.callbacks if each is not self), self]
        if state.is_world_process_zero:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            hold(args.output_dir, _LOCK)
        self._written = self._sealed = -1
        settle_buckets([self._trainer.model_wrapped])
        restored = None
        folder = self._folder(state.global_step)
        if state.global_step and folder.is_dir():
            restored = saved_in(folder, state.global_step)
        self.guard = Guard(self._save, job=self._job, restored=restored, **self._options)

    def on_step_end(self, args: Arguments, state: State, control: Control, **_: object) -> Control:
        if self.guard is not None:
            self._attend(partial(self.guard.step, state.global_step))
        self._remember_weights(args, control)
        return control

    def on_epoch_end(self, args: Arguments, state: State, control: Control, **_: object) -> None:  # noqa: ARG002
        self._remember_weights(args, control)

    def _remember_weights(self, args: Arguments, control: Control) -> None:
        """Sum the weights up before an evaluation: another callback, or the Trainer's class, may swap others in for it.

        In a job of one process: several ranks save in no evaluation.
        """
        is_needed = self.guard is not None and control.should_evaluate and args.world_size == 1
        self._weights = _sums(self._trainer.model) if is_needed else None

    def _attend(self, attend: Callable[[], None]) -> None:
        try:
            attend()
        except SystemExit:  # Transformers does not inform its callbacks of such an end
            self._close()
            raise

    def on_save(self, args: Arguments, state: State, control: Control, **_: object) -> None:  # noqa: ARG002
        """Seal what Transformers has saved by its own plan."""
        step = state.global_step
        if self.guard is not None and self._sealed == step:  # on request; other callbacks have added to it only now
            self._seal_on_all(self._folder(step), step, again=True)
        elif self.guard is not None:
            self._written = step
            self.guard.save(step)

    def on_prediction_step(self, args: Arguments, state: State, control: Control, **_: object) -> None:  # noqa: ARG002
        """Save here, too, unless other weights are in the model: the end of an evaluation may be minutes away."""
        if self.guard is None:
            return
        if self._evaluation is None:
            self._evaluation = self.guard.phase("eval")
            self._evaluation.__enter__()
            self._may_save = self._weights is not None and self._weights == _sums(self._trainer.model)
        self._attend(partial(self.guard.poll, step=(state.global_step or None) if self._may_save else None))

    def on_evaluate(self, args: Arguments, state: State, control: Control, **_: object) -> None:  # noqa: ARG002
        self._leave_evaluation()

    def on_predict(self, args: Arguments, state: State, control: Control, *_: object, **__: object) -> None:  # noqa: ARG002
        self._leave_evaluation()

    def _leave_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.__exit__(None, None, None)

    def on_train_end(self, args: Arguments, state: State, control: Control, **_: object) -> None:  # noqa: ARG002
        self._close()

    def _close(self) -> None:
        self._leave_evaluation()
        if self.guard is not None:
            self.guard.close()
            self.guard = None
            let_go(self._trainer.args.output_dir, _LOCK)

    def _folder(self, step: int) -> Path:
        return Path(self._trainer.args.output_dir) / f"checkpoint-{step}"

    def _save(self, step: int) -> SavedCheckpoint:
        """Write unless it is written, and seal. On every rank; durable on all when it returns."""
        folder = self._folder(step)
        _on_all(partial(self._make_room, folder, step))
        _on_all(partial(self._write, folder, step))
        self._seal_on_all(folder, step)
        return saved_in(folder, step)

    def _make_room(self, folder: Path, step: int) -> None:
        if self._trainer.is_world_process_zero():
            leave_behind(folder.parent, step, _NAMES)
            for left in folder.parent.glob(f"{_NAMES}/{_BEGUN}"):  # of a kill or a full disk: it takes room for good
                if left.parent != folder:
                    shutil.rmtree(left.parent, ignore_errors=True)
            if folder.is_dir():
                unseal(folder)

    def _write(self, folder: Path, step: int) -> None:
        if self._written != step or not folder.is_dir():
            self._trainer._save_checkpoint(self._trainer.model, trial=None)  # noqa: SLF001 - see above
            self._written = step

    def _seal_on_all(self, folder: Path, step: int, *, again: bool = False) -> None:
        """Seal it. Else it is written again: the kernel reports a failed flush once, and the bytes are lost."""
        try:
            _on_all(partial(self._seal, folder, step, again=again))
        except Exception:
            self._written = self._sealed = -1
            raise
        self._sealed = step

    def _seal(self, folder: Path, step: int, *, again: bool) -> None:
        if self._trainer.is_world_process_zero():  # the other ranks' files are in the folder, too
            (folder / _BEGUN).unlink(missing_ok=True)
            seal(folder, step=step, again=again)
            best = self._trainer.state.best_model_checkpoint
            prune(folder.parent, self._keep, _NAMES, "" if best is None else Path(best).name)


def _sums(model: Any) -> tuple[int, ...] | None:  # noqa: ANN401 - a module, or what Transformers has for one
    """Return the sum of each parameter's bits as integers; None where they cannot be read."""
    try:
        sums = [each.detach().view(_BITS[each.element_size()]).sum(dtype=torch.int64) for each in model.parameters()]
        return tuple(int(each) for each in sums)
    except (RuntimeError, KeyError):  # not here, sparse, or of another size
        return None


def _on_all(does: Callable[[], None]) -> None:
    """Do this on every rank, and fail on all where it failed on one: the others would wait for it in a collective."""
    outcome = attempted(does, "the checkpoint")
    failed = outcome if isinstance(outcome, Exception) else None
    failures: list[Any] = [""]
    if dist.is_available() and dist.is_initialized():
        failures *= dist.get_world_size()
        dist.all_gather_object(failures, "" if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    for rank, why in enumerate(failures):
        if why:
            msg = f"rank {rank} could not save: {why}"
            raise SealError(msg)
