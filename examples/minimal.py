"""A whole guarded training, as short as it can be: python examples/minimal.py FOLDER."""

import argparse
import random
from array import array

from powerguard.trainer import Guard, Parts

parser = argparse.ArgumentParser(description="A guarded training.")
parser.add_argument("folder", help="where checkpoints go")
folder, last_step = parser.parse_args().folder, 2000
weights = array("d", [0.0, 0.0])


def train() -> None:
    x = random.uniform(-1, 1)
    error = weights[0] * x + weights[1] - (3 * x - 2)
    weights[0] -= 0.05 * error * x
    weights[1] -= 0.05 * error


def save():  # all that the next step depends on
    return {"weights": weights, "random": random.getstate()}


def load(saved):
    weights[:] = array("d", saved["weights"])
    version, numbers, gauss = saved["random"]  # tuples come back as lists
    random.setstate((version, tuple(numbers), gauss))


random.seed(1)
with Guard(Parts(save, load), folder, job="llm", every_s=60, signals=True) as guard:
    first = guard.restore() + 1  # 1, or one more than the step of the newest checkpoint
    print(f"begin at step {first}", flush=True)
    for step in range(first, last_step + 1):
        train()
        guard.step(step)
    guard.save(last_step)
print(f"a={weights[0].hex()} b={weights[1].hex()}")
