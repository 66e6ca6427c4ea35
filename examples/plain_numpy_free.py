"""A training without torch and without numpy, to show that powerguard needs neither: a line fitted to noisy points.

    python examples/plain_numpy_free.py --dir /tmp/line

Anything that can tell its state as named buffers and plain values can be guarded. Here it is two numbers, their
momentum, and the random number generator.
"""

import argparse
import random
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powerguard.trainer import Guard, Parts


class Line:
    """y = a x + b, found by stochastic gradient descent with momentum."""

    def __init__(self) -> None:
        self.weights = array("d", [0.0, 0.0])
        self.momentum = array("d", [0.0, 0.0])
        self.random = random.Random(1)  # noqa: S311 - no secret

    def train(self) -> float:
        """One step; returns how far off it was."""
        x = self.random.uniform(-1, 1)
        error = self.weights[0] * x + self.weights[1] - (3 * x - 2 + self.random.gauss(0, 0.1))
        for at, slope in enumerate((x, 1.0)):
            self.momentum[at] = 0.9 * self.momentum[at] - 0.01 * error * slope
            self.weights[at] += self.momentum[at]
        return error

    def save(self) -> Mapping[str, object]:
        """Buffers, and what JSON can say."""
        return {"weights": self.weights, "momentum": self.momentum, "random": self.random.getstate()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Copy: the memory behind these buffers is used again."""
        self.weights = array("d", saved["weights"])
        self.momentum = array("d", saved["momentum"])
        version, numbers, gauss = saved["random"]
        self.random.setstate((version, tuple(numbers), gauss))


def main() -> None:
    parser = argparse.ArgumentParser(description="A training without torch that survives the power cut.")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/line"), help="where checkpoints and the socket go")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--step-s", type=float, default=0.01, help="how long a step takes")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one checkpoint to the next")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    line = Line()
    state = Parts(line.save, line.load)
    socket = args.dir / "line.sock"
    with Guard(state, args.dir / "checkpoints", job="line", every_s=args.every, socket=socket) as guard:
        step = guard.restore()
        print(f"step {step}: {'begin' if step == 0 else 'go on'}", flush=True)
        while step < args.steps:
            error = line.train()
            time.sleep(args.step_s)
            step += 1
            if step % 100 == 0:
                print(f"step {step}: off by {abs(error):.3f}", flush=True)
            guard.step(step)
        guard.save(step)  # what the last minutes brought, too
    print(f"step {step}: done, a={line.weights[0].hex()} b={line.weights[1].hex()}", flush=True)


if __name__ == "__main__":
    main()
