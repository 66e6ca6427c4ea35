"""Child process with torch: train, save one way, and print what that cost.

    python -m bench.gpu_child FOLDER WAY SHAPE BYTES ROUNDS

WAY: powerguard, dcp (`async_save` as it comes), stager (the same with a stager that keeps its memory, pinned on a GPU),
torch (`torch.save` and fsync). SHAPE: large (60 tensors and a few) or small (40,000 tensors). The first save of each is
not measured: it makes memory and files. Prints one JSON object: lists of seconds, and the host memory that it took
beside the job, as a share of the state.
"""

import json
import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict

from powerguard.trainer import Guard
from powerguard.trainer.torch import TorchState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP_S = 0.05
"""A step without a GPU; with one it is a step of the model's optimizer."""
SETTLED_S = 300.0


class Job:
    """A model with AdamW of so many bytes in all, and its steps."""

    def __init__(self, shape: str, size_bytes: int) -> None:
        count = 20 if shape == "large" else 13_333
        width = int((size_bytes / 4 / 3 / count) ** 0.5)
        params = [torch.nn.Parameter(torch.randn(width, width, device=DEVICE)) for _ in range(count)]
        self.model = torch.nn.ParameterList(params)
        self.optimizer = torch.optim.AdamW(params, foreach=True)
        for param in params:
            param.grad = torch.ones_like(param)
        self.done = 0
        self.step()
        self.bytes = 3 * count * width * width * 4

    def step(self) -> None:
        if DEVICE == "cuda" or not self.done:
            self.optimizer.step()
            synchronize()
        else:
            time.sleep(STEP_S)
        self.done += 1

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def flushed(folder: Path) -> None:
    """What torch leaves out: like is compared with like."""
    for path in [*folder.iterdir(), folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    synchronize()
    began_s = time.perf_counter()
    found = call()
    return time.perf_counter() - began_s, found


# --- powerguard ---------------------------------------------------------------------------------------------------


class Training:
    """Training with a Guard, and one who asks it as the daemon does."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.job = job
        state = TorchState(model=job.model, optimizer=job.optimizer)
        self._socket = folder / "trainer.sock"
        self.guard = Guard(state, folder / "powerguard", job="bench", socket=self._socket, every_s=3600.0)
        self.pace = self.guard.requests.pace

    def until(self, condition: Callable[[], bool]) -> float:
        """Train until it holds; return the longest time that a step stood for the guard."""
        longest_s, until_s = 0.0, time.monotonic() + SETTLED_S
        while not condition():
            if time.monotonic() > until_s:
                message = "nothing came of it"
                raise TimeoutError(message)
            self.job.step()
            longest_s = max(longest_s, timed(lambda: self.guard.step(self.job.done))[0])
        return longest_s

    def settle(self) -> None:
        """Until memory and files for the next save are ready."""
        self.until(lambda: self.pace.limit is not None and not self.guard._writer.busy)  # noqa: SLF001
        until_s = time.monotonic() + 1.0
        self.until(lambda: time.monotonic() > until_s)

    def periodic(self) -> tuple[float, float]:
        """Return seconds for which training stood, and until the state was durable."""
        before, began_s = self.guard.stats(), time.perf_counter()
        self.pace.due_s = 0.0
        stood_s = self.until(lambda: self.guard.stats() is not before)
        return stood_s, time.perf_counter() - began_s

    def emergency(self, number: int, *, beside: bool) -> float:
        """Return seconds from the order to durable. beside: a periodic write has just begun."""
        told: list[float] = []
        if beside:
            self.pace.due_s = 0.0
            self.until(lambda: self.guard._writer.busy)  # noqa: SLF001
        asking = threading.Thread(target=lambda: told.append(self._durable_s(number)))
        asking.start()
        self.until(lambda: bool(told))
        asking.join()
        return told[0]

    def _durable_s(self, number: int) -> float:
        began_s = time.perf_counter()
        told = self._call("POST", "/api/v1/trigger_checkpoint", {"id": f"bench-{number}", "deadline_s": 600.0})
        while told["phase"] not in ("committed", "failed", "aborted"):
            time.sleep(0.005)
            told = self._call("GET", f"/api/v1/checkpoints/bench-{number}")
        if told["phase"] != "committed":
            raise OSError(told["error"])
        return time.perf_counter() - began_s

    def _call(self, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        connection = HTTPConnection("trainer", timeout=60)
        connection.sock = socket(AF_UNIX)
        connection.sock.connect(str(self._socket))
        connection.request(method, path, None if body is None else json.dumps(body))
        told: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return told


def by_powerguard(folder: Path, job: Job, rounds: int) -> dict[str, list[float]]:
    training = Training(folder, job)
    told: dict[str, list[float]] = {"stood": [], "durable": [], "emergency": [], "beside": []}
    training.settle()
    for number in range(rounds + 1):
        stood_s, durable_s = training.periodic()
        training.settle()
        if not number:
            continue
        told["stood"].append(stood_s)
        told["durable"].append(durable_s)
        told["emergency"].append(training.emergency(2 * number, beside=False))
        training.settle()
        told["beside"].append(training.emergency(2 * number + 1, beside=True))
        training.settle()
    training.guard.close()
    return told


# --- Others -------------------------------------------------------------------------------------------------------


def by_dcp(folder: Path, job: Job, rounds: int, *, keeps: bool) -> dict[str, list[float]]:
    """keeps: its stager copies into the same memory each time."""

    def begin(writer: dcp.FileSystemWriter) -> object:
        return dcp.async_save(job.state(), storage_writer=writer, async_stager=stager)

    told: dict[str, list[float]] = {"stood": [], "durable": []}
    stager = None
    if keeps:
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        stager.state_dict_cache = _create_cpu_state_dict(job.state(), pin_memory=DEVICE == "cuda")
    for number in range(rounds + 1):
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        began_s = time.perf_counter()
        stood_s, future = timed(partial(begin, dcp.FileSystemWriter(folder / "dcp", thread_count=8)))
        future.result()
        flushed(folder / "dcp")
        if number:
            told["stood"].append(stood_s)
            told["durable"].append(time.perf_counter() - began_s)
    return told


def by_torch(folder: Path, job: Job, rounds: int) -> dict[str, list[float]]:
    told: dict[str, list[float]] = {"stood": [], "durable": []}
    (folder / "torch").mkdir()
    for number in range(rounds + 1):

        def save() -> None:
            torch.save(job.state(), folder / "torch" / "state.pt")
            flushed(folder / "torch")

        stood_s, _ = timed(save)
        if number:
            told["stood"].append(stood_s)
            told["durable"].append(stood_s)
    return told


def main(folder: Path, way: str, shape: str, size_bytes: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.manual_seed(1)
    job = Job(shape, size_bytes)
    if way in ("dcp", "stager"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak
    before = memory_bytes("VmRSS")
    ways = {
        "powerguard": by_powerguard,
        "dcp": partial(by_dcp, keeps=False),
        "stager": partial(by_dcp, keeps=True),
        "torch": by_torch,
    }
    told: dict[str, Any] = ways[way](folder, job, rounds)
    told |= {"memory": [(memory_bytes("VmHWM") - before) / job.bytes], "gb": job.bytes / 1e9, "device": device()}
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


def memory_bytes(word: str) -> int:
    """What this process holds now (VmRSS), or has held at most since its peak was forgotten (VmHWM); proc(5)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{word}:"))


def device() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU: the CPU's memory"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
