"""PyTorch Lightning: `Trainer(callbacks=[PowerguardCallback("/nvme/llm", job="llm")])`, and nothing else.

Saves, pauses, ends and resumes at the step; see `powerguard.trainer.guard`. What is kept is all that Lightning's own
checkpoint has (less hyper-parameters, which are for export) and every random state, which Lightning's has not. To go on
in the middle of an epoch Lightning needs a loader that can: `powerguard.trainer.torch.data.ResumableLoader`.

Lightning has no public way to hand over a state that is not a file of its own. Two private names of its checkpoint
connector are used, in this file alone; tests run them against the real package.
"""

import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch.callbacks import Callback

from powerguard.trainer.guard import Guard
from powerguard.trainer.loop.step_hook import StopTraining
from powerguard.trainer.store.items import Buffer, Item, Loaded
from powerguard.trainer.torch.copier import Copier
from powerguard.trainer.torch.ddp import settle_buckets
from powerguard.trainer.torch.device import CudaDevice
from powerguard.trainer.torch.state import RandomStates
from powerguard.trainer.torch.tree import Packer, StateError, Unpacker

INDEX: Final = "lightning"
_FORMAT: Final = 1
_EXPORT_ONLY: Final = ("hparams_name", "hyper_parameters", "hparams_type", "datamodule_hyper_parameters")

Trainer = Any
Module = Any
"""Those of Lightning."""


class _TrainerState:
    """The state of a Lightning Trainer. A `powerguard.trainer.store.items.State`."""

    def __init__(self, trainer: Trainer) -> None:
        self._connector = trainer._checkpoint_connector  # noqa: SLF001 - see above
        self._random = RandomStates()
        self._random_state: Any = None
        self.copier = Copier(CudaDevice())
        self.checkpoint: dict[str, Any] | None = None
        """What was loaded, as Lightning's own checkpoints are; None before."""

    def items(self) -> Iterable[Item]:
        checkpoint = self._connector.dump_checkpoint(weights_only=False)
        kept = {key: value for key, value in checkpoint.items() if key not in _EXPORT_ONLY}
        packer = Packer()
        index = {
            "format": _FORMAT,
            "checkpoint": packer.pack("checkpoint", kept),
            "random": packer.pack("random", self._random.tree()),
        }
        return self.copier.arranged([Buffer.json(INDEX, index), *packer.items])

    def load(self, items: Mapping[str, Loaded]) -> None:
        index = items[INDEX].value() if INDEX in items else None
        if not isinstance(index, dict) or index.get("format") != _FORMAT:
            msg = "the checkpoint was not written by PowerguardCallback for Lightning, or by a newer one"
            raise StateError(msg)
        # Its tensors name the GPU of the rank that wrote them, and each rank has another. Lightning moves them.
        source = Unpacker(items, on_cpu=True)
        slips = self._random.check("random", index["random"], source)
        if slips:
            raise StateError(slips[0])
        self.checkpoint = source.unpack("checkpoint", index["checkpoint"])
        self._random_state = source.unpack("random", index["random"])

    def restore_random(self) -> None:
        """Let the random numbers go on from the checkpoint, too."""
        if self.checkpoint is not None:
            self._random.put_back(self._random_state)

    def restore_moments(self, optimizers: Iterable[Any]) -> None:
        """Give moments their own dtype back: torch has cast all that it loaded to that of the parameter."""
        kept = [] if self.checkpoint is None else self.checkpoint.get("optimizer_states", [])
        for optimizer, state in zip(optimizers, kept, strict=False):
            params = (param for group in optimizer.param_groups for param in group["params"])
            numbers = (number for group in state["param_groups"] for number in group["params"])
            for param, number in zip(params, numbers, strict=False):
                mine, parts = optimizer.state.get(param, {}), state["state"].get(number, {})
                mine.update({key: _uncast(mine[key], part) for key, part in parts.items() if key in mine})


def _uncast(mine: Any, kept: Any) -> Any:  # noqa: ANN401 - whatever an optimizer has for a parameter
    if isinstance(kept, torch.Tensor):
        return mine if mine.dtype == kept.dtype else kept.to(mine.device)
    if isinstance(kept, dict):
        return {key: _uncast(mine[key], part) for key, part in kept.items()}
    if type(kept) in (list, tuple):
        return type(kept)(_uncast(one, part) for one, part in zip(mine, kept, strict=True))
    return kept


class _First(Callback):
    """The first callback, where another one may swap averaged weights in: as a validation begins, and as training ends.

    begin: called at the start of a validation. end: called at the end of training.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end

    def on_validation_start(self, *_: object) -> None:
        self._begin()

    def on_train_end(self, *_: object) -> None:
        self._end()


class PowerguardCallback(Callback):
    """Guards a Lightning training: `Trainer.fit` begins where the newest checkpoint stands.

    root: folder of the checkpoints. job: its name for the daemon. options: as `Guard` has them. A checkpoint that is
    given to `fit(ckpt_path=...)` is used instead, and ours of higher steps are set aside. The last step is saved, too,
    unless `every_s` is None.
    SIGTERM is a wish for a checkpoint and the end, unless the program has a handler of its own or `signals=False` is
    given; SIGUSR1 with `signals=True`. Lightning's own handler ends training in the middle of a step, and does not end
    one that pauses.
    In Slurm, switch Lightning's own requeue off: `plugins=[SLURMEnvironment(auto_requeue=False)]`.
    """

    def __init__(self, root: Path | str, *, job: str, **options: Any) -> None:  # noqa: ANN401 - see Guard
        self._root = root
        self._job = job
        self._options = options
        self._signals: Collection[int] = ()
        self._state: _TrainerState | None = None
        self._step = -1
        self._has_trained = False
        self._is_whole = False
        """A step has just ended, and no gradients of the next one are gathered."""
        self._phase = ExitStack()
        self._first = _First(self._enter_validation, self._save_last)
        self.guard: Guard | None = None
        """While it trains; None before and after."""

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        if stage != "fit":
            return
        # Last: at the end of a batch, what another callback changes (averaged weights, say) is part of the step.
        others = [each for each in trainer.callbacks if each not in (self._first, self)]
        trainer.callbacks = [self._first, *others, self]
        self._signals = self._listened_to()
        self._state = _TrainerState(trainer)
        self.guard = Guard(self._state, self._root, job=self._job, **{**self._options, "signals": False})
        self.guard.restore()
        if self._state.checkpoint is not None:  # Lightning replaces it by the one of ckpt_path, which it reads later
            trainer._checkpoint_connector._loaded_checkpoint = self._state.checkpoint  # noqa: SLF001 - see above

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:  # noqa: ARG002 - Lightning's signature
        self._step, self._has_trained, self._is_whole = trainer.global_step, False, False
        settle_buckets([trainer.strategy.model])
        if self.guard is None or self._state is None:
            return
        if trainer.ckpt_path:
            self.guard.start_from(self._step)
        else:
            self._state.restore_moments(trainer.optimizers)
            self._state.restore_random()
        self._state.checkpoint = None
        if self._signals:
            self.guard.listen(self._signals)  # not before: Lightning would set its own handler in this one's place

    def _listened_to(self) -> Collection[int]:
        if "signals" in self._options:
            return (signal.SIGTERM, signal.SIGUSR1) if self._options["signals"] else ()
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return (signal.SIGTERM,) if is_free and threading.current_thread() is threading.main_thread() else ()

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if self.guard is None:
            return
        self._is_whole = trainer.global_step != self._step  # else gradients are still being gathered
        if self._is_whole:
            self._step, self._has_trained = trainer.global_step, True
            self.guard.step(self._step)

    def _enter_validation(self) -> None:
        """Copy the state as a validation begins, so that an emergency writes it without waiting for the end."""
        if self.guard is not None:
            self._phase.enter_context(self.guard.phase("eval", step=self._step if self._is_whole else None))

    def on_validation_batch_end(self, *_: object) -> None:
        if self.guard is not None:
            self.guard.poll()

    def on_validation_end(self, *_: object) -> None:
        self._phase.close()

    def _save_last(self) -> None:
        """Save what the last minutes brought: what comes later, another fit too, begins there."""
        if self.guard is not None and self._has_trained and self._options.get("every_s", 0.0) is not None:
            self.guard.save(self._step)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:  # noqa: ARG002
        # Not close(): a phase that ends in order polls, and would stand still or end here once more.
        self._phase.__exit__(type(exception), exception, exception.__traceback__)
        if self.guard is not None and not isinstance(exception, StopTraining):
            self.guard.leave()
        self._close()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:  # noqa: ARG002 - as above
        self._close()

    def _close(self) -> None:
        if self.guard is not None:
            self.guard.close()
            self.guard = None
