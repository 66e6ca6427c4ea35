"""A job on several hosts as process groups of this machine: each has a host name, a disk and a socket of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from powerguard.wire import HOST_LEFT, CheckpointStatus, LeaveRequest, TrainerStatus, TriggerRequest
from tests.peers.ports import free_port
from tests.torch.processes import ROOT, descendants
from tests.trainer.toy import LIMIT_S, ask

CHILD = ROOT / "tests" / "torch" / "hosts_child.py"


def own_names() -> list[str]:
    """Return the command before one that has a host name of its own. Skips the test where there is none."""
    argv = [shutil.which("unshare") or "unshare", *(() if os.geteuid() == 0 else ("-r",)), "-u"]
    if subprocess.run([*argv, "hostname", "elsewhere"], capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(argv)}: this machine gives no process a host name of its own")
    return argv


class Host:
    """One host of a job: what it runs, and what its daemon asks. Its processes end with `lose_power`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        self.process: subprocess.Popen[bytes] | None = None
        self.ended_s = 0.0

    def run(self, before: list[str], argv: list[str], **environment: object) -> None:
        """Start its part of the job, with its host name."""
        script = f'hostname {self.name} && exec "$@"'
        given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        given |= {name: str(value) for name, value in environment.items()}
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [*before, "sh", "-c", script, "sh", *argv],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | given | {"HOST_FOLDER": str(self.folder)},
                start_new_session=True,
            )

    def lose_power(self) -> None:
        """Kill all that runs here, at once."""
        if self.process is not None and self.process.poll() is None:
            for pid in [self.process.pid, *descendants(self.process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(LIMIT_S)

    def end(self) -> int:
        """Wait for its end; return the exit status. `ended_s`: when, by time.monotonic."""
        assert self.process is not None
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} never ended:\n{self.output()}")
        finally:
            self.ended_s = time.monotonic()

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-4000:]

    def said(self) -> list[tuple[str, int, float]]:
        """Return what its ranks have said: start or step, which, and when."""
        lines = [line.split() for log in self.folder.glob("log-*") for line in log.read_text().splitlines()]
        return sorted(((line[0], int(line[1]), float(line[2])) for line in lines if len(line) == 3), key=lambda x: x[2])

    def status(self) -> TrainerStatus | None:
        try:
            status = TrainerStatus.parse(ask(self.folder / "s", "GET", "/api/v1/status")[2])
        except OSError:
            return None
        assert isinstance(status, TrainerStatus)
        return status

    def trigger(self, name: str, **request: Any) -> None:
        body = TriggerRequest(id=name, **request).to_json()
        assert ask(self.folder / "s", "POST", "/api/v1/trigger_checkpoint", body)[0] in (200, 202)

    def durable(self, name: str) -> CheckpointStatus:
        """Wait for a checkpoint's end, which must be a good one."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            status = self.ended(name)
            if status.durable:
                return status
            assert not status.error, status
        pytest.fail(f"{self.name}: {name} is not durable")

    def ended(self, name: str) -> CheckpointStatus:
        """Wait for a checkpoint's end, for 5 s at most."""
        status = CheckpointStatus.parse(ask(self.folder / "s", "GET", f"/api/v1/checkpoints/{name}?wait=5")[2])
        assert isinstance(status, CheckpointStatus)
        return status

    def has_lost_the_others(self, name: str) -> bool:
        """Return whether a checkpoint failed for a missing rank. The rank that says so ends a moment later."""
        try:
            return "rank" in self.ended(name).error
        except OSError:
            return self.end() == HOST_LEFT

    def leave(self) -> None:
        """Commit: the daemon says that this host leaves; then the host goes dark."""
        code, _, body = ask(
            self.folder / "s", "POST", "/api/v1/leave", LeaveRequest(because="its power fails").to_json()
        )
        assert code == 200, body
        self.lose_power()


class Hosts:
    """A job with one rank on each of so many hosts, over loopback. Ends with the test."""

    def __init__(self, folder: Path, count: int, *, step_s: float = 0.01) -> None:
        self.all = [Host(folder, f"gpu{number}") for number in range(count)]
        self._before, self._step_s = own_names(), step_s

    def start(self, **environment: object) -> None:
        """Start all ranks. environment: for each of them, besides what a launcher sets."""
        port = free_port()
        for rank, host in enumerate(self.all):
            host.run(
                self._before,
                [sys.executable, str(CHILD), str(self._step_s)],
                RANK=rank,
                WORLD_SIZE=len(self.all),
                LOCAL_RANK=0,
                LOCAL_WORLD_SIZE=1,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                GLOO_SOCKET_IFNAME="lo",
                **environment,
            )

    def until(self, true: Callable[[], object]) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < until_s, [host.output() for host in self.all]
            time.sleep(0.01)

    def until_training(self, past: int = 0) -> None:
        """Wait until every host has ended a step after that one."""
        self.until(lambda: all(any(w == "step" and s > past for w, s, _ in host.said()) for host in self.all))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.all:
            host.lose_power()
