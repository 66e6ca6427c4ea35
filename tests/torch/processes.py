"""Starts training processes as torchrun does, and ends them: all in a process group of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Launched:
    """A training with so many ranks; one rank runs without torchrun."""

    def __init__(self, ranks: int, *argv: str | Path, log: Path) -> None:
        runner = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks > 1 else []
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *runner, *map(str, argv)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
                start_new_session=True,
            )

    def kill(self) -> None:
        """As a power cut: all ranks at once, without a word."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:  # torchrun's workers have sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=60)

    def end(self, *, within_s: float = 200.0) -> None:
        """Wait for its end, which must be a good one."""
        try:
            code = self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = None
        assert code == 0, f"ended with {code}:\n{self.output()}"

    def until(self, condition: Callable[[], bool], *, within_s: float = 100.0) -> None:
        """Wait for something to be seen, while it still runs."""
        until_s = time.monotonic() + within_s
        while True:
            code = self.process.poll()  # before the look: its last act may be what is waited for
            if condition():
                return
            assert code is None, f"ended with {code}:\n{self.output()}"
            assert time.monotonic() < until_s, f"not within {within_s} s:\n{self.output()}"
            time.sleep(0.01)

    def result(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(errors="replace")[-4000:]


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found, pending = [], [pid]
    while pending:
        parent = pending.pop()
        children = [child for child, of in parents.items() if of == parent]
        found += children
        pending += children
    return found
