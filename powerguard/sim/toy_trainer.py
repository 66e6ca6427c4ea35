"""A trainer small enough to read: it really trains, serves the endpoint, checkpoints, pauses, resumes and restores.

    python -m powerguard.sim.toy_trainer --socket /run/powerguard-trainers/toy.sock --dir /tmp/toy

The model is a multi-layer perceptron of one hidden layer in pure Python that learns to tell two rings apart, by
gradient descent with momentum, on batches drawn from its own random numbers. All of that is in its checkpoint, so a
training that was killed and restored ends with the same bits as one that never was. `--mb` pads the checkpoint and
`--mb-per-s` holds the write back, so that it takes as long as a large one.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerguard.trainer.guard import Guard
from powerguard.trainer.loop.endpoint import EndpointError
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.items import Buffer, Item, Loaded
from powerguard.trainer.store.store import StoreError
from powerguard.wire import After

_HIDDEN = 12
_BATCH = 16
_RATE = 0.05
_MOMENTUM = 0.9
_SEED = 20_240_501
_PIECE = 256 << 10


class Model:
    """Two inputs, one hidden layer, one output: is the point on the inner ring or on the outer one?"""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # Per hidden unit two input weights and a bias, then one output weight each, then the output's bias.
        self._count = 4 * _HIDDEN + 1
        self._weights = [self._random.gauss(0.0, 0.7) for _ in range(self._count)]
        self._velocity = [0.0] * self._count
        self.step = 0
        self.loss = math.log(2.0)

    def train(self) -> None:
        """Learn from one batch."""
        gradient = [0.0] * self._count
        loss = 0.0
        for _ in range(_BATCH):
            inner = self._random.random() < 0.5
            angle = self._random.uniform(0.0, 2.0 * math.pi)
            radius = self._random.gauss(0.6 if inner else 1.4, 0.15)
            loss += self._learn(radius * math.cos(angle), radius * math.sin(angle), float(inner), gradient)
        for index in range(self._count):
            self._velocity[index] = _MOMENTUM * self._velocity[index] - _RATE * gradient[index] / _BATCH
            self._weights[index] += self._velocity[index]
        self.loss = loss / _BATCH
        self.step += 1

    def _learn(self, x: float, y: float, target: float, gradient: list[float]) -> float:
        """Add one point's gradient; return its loss (cross entropy)."""
        weights = self._weights
        out = 3 * _HIDDEN
        hidden = [
            math.tanh(weights[3 * unit] * x + weights[3 * unit + 1] * y + weights[3 * unit + 2])
            for unit in range(_HIDDEN)
        ]
        logit = weights[-1] + sum(weights[out + unit] * hidden[unit] for unit in range(_HIDDEN))
        guess = 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, logit))))
        error = guess - target
        gradient[-1] += error
        for unit in range(_HIDDEN):
            gradient[out + unit] += error * hidden[unit]
            back = error * weights[out + unit] * (1.0 - hidden[unit] ** 2)
            gradient[3 * unit] += back * x
            gradient[3 * unit + 1] += back * y
            gradient[3 * unit + 2] += back
        return -math.log(guess if target else 1.0 - guess)

    def to_json(self) -> bytes:
        """Return everything that the next step depends on; floats in hexadecimal, so that no bit is lost."""
        version, internal, gauss = self._random.getstate()
        state = {
            "step": self.step,
            "loss": self.loss.hex(),
            "weights": [value.hex() for value in self._weights],
            "velocity": [value.hex() for value in self._velocity],
            "random": [version, list(internal), None if gauss is None else gauss.hex()],
        }
        return json.dumps(state).encode()

    def load(self, content: bytes) -> None:
        """Take over a state as `to_json` gave it."""
        state: dict[str, Any] = json.loads(content)
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), None if gauss is None else float.fromhex(gauss)))
        self._weights = [float.fromhex(value) for value in state["weights"]]
        self._velocity = [float.fromhex(value) for value in state["velocity"]]
        self.loss = float.fromhex(state["loss"])
        self.step = state["step"]


@dataclass(frozen=True, slots=True)
class Padding:
    """An item of zeros: it makes the checkpoint as large as a real one."""

    size_bytes: int
    name: str = "padding"
    dtype: str = "uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size_bytes,)

    def copy_to(self, target: memoryview) -> None:
        """Fill the target, a piece at a time."""
        for start in range(0, len(target), _PIECE):
            target[start : start + _PIECE] = bytes(min(_PIECE, len(target) - start))


class SlowDisk(Disk):
    """A disk that takes no more than so many bytes a second, by all writers together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Write a piece of it when its turn has come."""
        piece = content[:_PIECE]
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.perf_counter()) + len(piece) / self._bytes_per_s
            wait_s = self._free_at_s - time.perf_counter()
        time.sleep(max(0.0, wait_s))
        return super().write(descriptor, piece, offset)


class ToyState:
    """Everything that the next step depends on, and the padding."""

    def __init__(self, model: Model, padding_bytes: int) -> None:
        self._model = model
        self._padding = [Padding(padding_bytes)] if padding_bytes else []

    def items(self) -> Iterator[Item]:
        """Model, optimizer and random numbers in one."""
        yield Buffer("state", self._model.to_json())
        yield from self._padding

    def load(self, items: Mapping[str, Loaded]) -> None:
        """Take over what was saved."""
        self._model.load(bytes(items["state"].data))


class Training:
    """The loop and its guard."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._model = Model(_SEED)
        options.dir.mkdir(parents=True, exist_ok=True)
        self.guard = Guard(
            ToyState(self._model, options.mb * 1_000_000),
            options.dir,
            job=options.job,
            conduct=options.conduct,
            every_s=options.every_s,
            socket=options.socket,
            disk=None if options.mb_per_s is None else SlowDisk(options.mb_per_s * 1e6),
        )

    def run(self) -> None:
        """Train until the last step, if there is one; then save."""
        options = self._options
        with self.guard:
            self.guard.restore()
            print(f"ready {options.socket}", flush=True)
            while options.steps is None or self._model.step < options.steps:
                began_s = time.perf_counter()
                self._model.train()
                time.sleep(max(0.0, began_s + options.step_ms / 1000.0 - time.perf_counter()))
                self.guard.step(self._model.step)
                if options.every and self._model.step % options.every == 0:
                    self.guard.save(self._model.step)
            self.guard.save(self._model.step)


class _Ender(threading.Thread):
    """Ends the process at SIGTERM, without another save.

    It waits for the signal in a thread of its own. An exception out of a signal handler may meet the training between
    taking a lock and using it; the close that follows would wait for that lock for ever.
    """

    def __init__(self, guard: Guard) -> None:
        super().__init__(daemon=True)
        self._guard = guard
        self._has_begun = threading.Event()

    def run(self) -> None:
        """Wait for the signal, which every thread here must block."""
        signal.sigwait({signal.SIGTERM})
        self._has_begun.set()
        try:
            self._guard.close(finish=False)
        finally:
            os._exit(0)

    def give_way(self) -> None:
        """Return only where this thread does not end the process: whatever stopped the training was its doing."""
        if self._has_begun.is_set():
            self.join()


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    described = argparse.ArgumentParser(prog="powerguard.sim.toy_trainer", description="A trainer for demos and tests.")
    described.add_argument("--socket", type=Path, required=True, help="unix socket to serve the endpoint on")
    described.add_argument("--dir", type=Path, required=True, help="folder for the checkpoints")
    described.add_argument("--mb", type=int, default=0, help="pad the checkpoint by so many megabytes")
    described.add_argument("--mb-per-s", type=float, help="write the padding no faster than this")
    described.add_argument("--step-ms", type=float, default=20.0, help="a step takes at least this long")
    described.add_argument("--steps", type=int, help="end after this step (default: train for ever)")
    described.add_argument("--every", type=int, default=0, help="also save every so many steps (default: never)")
    described.add_argument("--every-s", type=float, help="interval of periodic checkpoints, in seconds")
    described.add_argument("--job", default="toy", help="name of the job")
    described.add_argument("--conduct", choices=[*After], default="pause", help="what it is willing to do at most")
    return described


def main(argv: list[str] | None = None) -> int:
    """Train; print one line when the endpoint is open, and an error if there is one."""
    options = parser().parse_args(argv)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        training = Training(options)
        ender = _Ender(training.guard)
        ender.start()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                training.run()
        finally:
            ender.give_way()
    except (StoreError, EndpointError, OSError) as error:
        print(f"toy_trainer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
