"""A job on four hosts, as process groups with gloo between them: one commits, and all four come back."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.dcp import torch_python
from bench.figure import Figure

_ROOT: Final = Path(__file__).parents[1]
_ROUNDS: Final = 6
_HOSTS: Final = 4


def run(*, quick: bool = False) -> list[Figure]:
    """Measure in a python that has torch, whichever that is."""
    python = torch_python()
    if python is None:
        print("  no torch here (scripts/test-torch --env gets it): jobs on several hosts are left out")
        return []
    done = subprocess.run(
        [python, "-m", "bench.hosts", str(2 if quick else _ROUNDS)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
    )
    measured_s = json.loads(done.stdout.splitlines()[-1])
    return [
        Figure(
            name="one of four hosts commits: the last other rank ended",
            unit="s",
            values=tuple(measured_s[0]),
            bar="2 s",
        ),
        Figure(name="all four hosts on: the ranks meet (processes, torch)", unit="s", values=tuple(measured_s[1])),
        Figure(name="from there to the first new step", unit="s", values=tuple(measured_s[2]), bar="30 s"),
    ]


def measured(rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Return how long, in each round, the ends, the start and the first step took. The host of rank 0 leaves, too."""
    from powerguard.wire import After  # noqa: PLC0415 - as above
    from tests.torch.hosts import Hosts  # noqa: PLC0415 - needs what the torch tests have

    ends, meets, firsts = [], [], []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir="/tmp", prefix="pg ") as folder, Hosts(Path(folder), _HOSTS) as hosts:
            hosts.start()
            hosts.until_training()
            leaver = hosts.all[number % _HOSTS]
            leaver.trigger("e", after=After.PAUSE, deadline_s=60.0)
            step = leaver.durable("e").step or 0
            hosts.until(lambda: all(one is not None and one.paused for one in [host.status() for host in hosts.all]))
            began_s = time.monotonic()
            leaver.leave()
            others = [host for host in hosts.all if host is not leaver]
            assert {host.end() for host in others} == {75}
            ends.append(max(host.ended_s for host in others) - began_s)
            began_s = time.monotonic()
            hosts.start()
            hosts.until_training(step)
            said = [host.said() for host in hosts.all]
            met_s = max(at_s for one in said for word, _, at_s in one if word == "start")
            meets.append(met_s - began_s)
            steps = [min(at_s for word, s, at_s in one if (word, s) == ("step", step + 1)) for one in said]
            firsts.append(max(steps) - met_s)
    return ends, meets, firsts


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]))))
