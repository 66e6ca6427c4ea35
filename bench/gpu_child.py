"""Child process with torch: train, save or load one way, and print what that cost.

    python -m bench.gpu_child FOLDER WAY SHAPE BYTES ROUNDS

WAY: limits (what the bus and the disk can do), powerguard, one (with one snapshot in host memory), stager (DCP's
`async_save` with a stager that keeps its memory, pinned on a GPU), dcp (`async_save` as it comes), torch (`torch.save`
and fsync); load-powerguard, load-torch and load-dcp load what those left in FOLDER. SHAPE: large (on a GPU a
transformer with mixed precision, without one 60 tensors) or small (40,000 tensors). Where ROUNDS is more than 1, the
first save is not measured: it makes memory and files. Prints one JSON object of lists, in seconds unless named
otherwise: stood (the longest step boundary), lost (what all steps until the state was durable took more than others),
durable; memory is the host's, without what the job had, as a share of the state.
"""

import json
import logging
import mmap
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, socket
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from powerguard.trainer import Guard
from powerguard.trainer.torch import TorchState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP_S = 0.05
"""A step without a GPU, and of the small tensors."""
SETTLED_S = 300.0
MOST_RAW = 4_000_000_000
WIDTH = 2048
BATCH, TOKENS = 8, 1024

Figures = dict[str, list[float]]
Boundary = Callable[[], object]


class Job:
    """A model with AdamW of about so many bytes in all, and its steps. fresh: as a restarted process makes it."""

    def __init__(self, shape: str, size_bytes: int, *, fresh: bool = False) -> None:
        self.is_real = DEVICE == "cuda" and shape == "large"
        if self.is_real:
            layer = partial(torch.nn.TransformerEncoderLayer, WIDTH, 16, 4 * WIDTH, dropout=0.0, activation="gelu")
            count = max(1, round(size_bytes / 12 / (12 * WIDTH * WIDTH)))
            layers = (layer(batch_first=True, norm_first=True, device=DEVICE) for _ in range(count))
            self.model = torch.nn.Sequential(*layers)
            self._batch = torch.randn(BATCH, TOKENS, WIDTH, device=DEVICE)
        else:
            count = 20 if shape == "large" else 13_333
            width = int((size_bytes / 4 / 3 / count) ** 0.5)
            params = [torch.nn.Parameter(torch.randn(width, width, device=DEVICE)) for _ in range(count)]
            self.model = torch.nn.ParameterList(params)
        params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(params, fused=DEVICE == "cuda", foreach=DEVICE == "cpu")
        self.bytes = 12 * sum(param.numel() for param in params)
        self.done = 0
        if not fresh:
            self._train() if self.is_real else self._update()

    def step(self) -> None:
        if self.is_real:
            self._train()
        else:
            time.sleep(STEP_S)
        self.done += 1

    def _train(self) -> None:
        """Forward, backward and update; the loss is read, as most loops do, so that the GPU has nothing left to do."""
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.model(self._batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        torch.cuda.current_stream().synchronize()

    def _update(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize()

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def ends(self) -> list[float]:
        """By which a load is seen to have been done."""
        params = list(self.model.parameters())
        return [float(param.detach().double().sum()) for param in (params[0], params[-1])]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def usual_s(job: Job, boundary: Boundary) -> float:
    """A step while nothing is saved."""
    return median(timed(job.step) + timed(boundary) for _ in range(10))


def measured(
    job: Job, base_s: float, save: Boundary, boundary: Boundary, is_over: Callable[[], bool]
) -> dict[str, float]:
    """Save at one boundary, and train on until it is durable; return stood, lost and durable."""
    ended: list[float] = []

    def watch() -> None:
        while not is_over():
            time.sleep(0.002)
        ended.append(time.perf_counter())

    watching = threading.Thread(target=watch, daemon=True)
    began_s = time.perf_counter()
    watching.start()
    stood = [timed(save)]
    steps: list[float] = []
    while not ended:
        if time.perf_counter() > began_s + SETTLED_S:
            message = f"not durable in {SETTLED_S} s"
            raise TimeoutError(message)
        steps.append(timed(job.step))
        stood.append(timed(boundary))
    lost_s = sum(stood) + sum(steps) - len(steps) * base_s
    return {"stood": max(stood), "lost": lost_s, "durable": ended[0] - began_s}


def add(figures: Figures, values: dict[str, float], name: str = "") -> None:
    """Add each to the list of this name."""
    for row, value in values.items():
        figures.setdefault(name + row, []).append(value)


# --- What the machine can do --------------------------------------------------------------------------------------


def limits(folder: Path, size_bytes: int, rounds: int) -> Figures:
    """GB/s: from the GPU into pinned memory, and of the disk past the page cache."""
    figures: Figures = {"write new": [], "write": [], "read": []}
    if DEVICE == "cuda":
        on_gpu = torch.empty(2 * 10**9, dtype=torch.uint8, device=DEVICE)
        pinned = torch.empty(2 * 10**9, dtype=torch.uint8, pin_memory=True)
        figures["bus"] = []
        for _ in range(5):
            synchronize()
            figures["bus"].append(2 / timed(lambda: (pinned.copy_(on_gpu), synchronize())))
        figures["bus"] = figures["bus"][1:]
    path, gb = folder / "raw", min(size_bytes, MOST_RAW) / 1e9
    for number in range(rounds + 1):
        figures["write" if number else "write new"].append(gb / timed(partial(raw, path, int(gb * 1e9), 8)))
    for _ in range(rounds):
        figures["read"].append(gb / timed(partial(raw, path, int(gb * 1e9), 16, reads=True)))
    path.unlink()
    return figures


def raw(path: Path, size_bytes: int, threads: int, *, reads: bool = False) -> None:
    """Read or write a file past the page cache, in pieces of 8 MiB; what was written is flushed."""
    piece = 8 << 20
    descriptor = os.open(path, os.O_DIRECT | (os.O_RDONLY if reads else os.O_RDWR | os.O_CREAT), 0o600)

    def work(number: int) -> None:
        memory = mmap.mmap(-1, piece)
        memory[:] = os.urandom(1 << 16) * (piece >> 16)
        for start in range(number * piece, size_bytes, threads * piece):
            if reads:
                os.preadv(descriptor, [memory], start)
            else:
                os.pwritev(descriptor, [memory], start)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    if not reads:
        os.fsync(descriptor)
    os.close(descriptor)


# --- powerguard ---------------------------------------------------------------------------------------------------


class Training:
    """Training with a Guard, and one who asks it as the daemon does."""

    def __init__(self, folder: Path, job: Job, snapshots: int) -> None:
        self.job = job
        self.state = TorchState(model=job.model, optimizer=job.optimizer, overlap="optimizer")
        self.overlap("")
        self._socket = folder / "trainer.sock"
        self.guard = Guard(
            self.state, folder / "powerguard", job="bench", socket=self._socket, every_s=3600.0, snapshots=snapshots
        )
        self.pace = self.guard.requests.pace

    def overlap(self, how: str) -> None:
        """As `TorchState(overlap=how)` has it, without making and registering all memory anew."""
        self.state.copier._overlap = how  # noqa: SLF001

    def boundary(self) -> None:
        self.guard.step(self.job.done)

    def until(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + SETTLED_S
        while not condition():
            if time.monotonic() > until_s:
                message = "nothing came of it"
                raise TimeoutError(message)
            self.job.step()
            self.boundary()

    def settle(self) -> None:
        """Until memory and files for the next save are ready."""
        self.until(lambda: self.pace.limit is not None and not self.guard._writer.busy)  # noqa: SLF001
        until_s = time.monotonic() + 1.0
        self.until(lambda: time.monotonic() > until_s)

    def periodic(self) -> dict[str, float]:
        base_s, before = usual_s(self.job, self.boundary), self.guard.stats()

        def save() -> None:
            self.pace.due_s = 0.0
            self.boundary()

        figures = measured(self.job, base_s, save, self.boundary, lambda: self.guard.stats() is not before)
        if (stats := self.guard.stats()) is not None:
            figures |= {"copied": (stats.copy_bw or 0.0) / 1e9, "written": (stats.write_bw or 0.0) / 1e9}
        self.settle()
        return figures

    def emergency(self, number: int, *, beside: bool) -> float:
        """Return seconds from the order to durable. beside: a periodic write has just begun."""
        taken_s: list[float] = []
        if beside:
            self.pace.due_s = 0.0
            self.until(lambda: self.guard._writer.busy)  # noqa: SLF001
        asking = threading.Thread(target=lambda: taken_s.append(self._durable_s(number)))
        asking.start()
        self.until(lambda: bool(taken_s) or not asking.is_alive())
        asking.join()
        self.settle()
        return taken_s[0]

    def _durable_s(self, number: int) -> float:
        began_s = time.perf_counter()
        status = self._call("POST", "/api/v1/trigger_checkpoint", {"id": f"bench-{number}", "deadline_s": 600.0})
        while status["phase"] not in ("committed", "failed", "aborted"):
            time.sleep(0.005)
            status = self._call("GET", f"/api/v1/checkpoints/bench-{number}")
        if status["phase"] != "committed":
            raise OSError(status["error"])
        return time.perf_counter() - began_s

    def _call(self, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        connection = HTTPConnection("trainer", timeout=60)
        connection.sock = socket(AF_UNIX)
        connection.sock.connect(str(self._socket))
        connection.request(method, path, None if body is None else json.dumps(body))
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return answer


def by_powerguard(folder: Path, job: Job, rounds: int, *, snapshots: int = 2) -> dict[str, Any]:
    training = Training(folder, job, snapshots)
    figures: Figures = {"emergency": [], "during": []}
    ready_s = timed(training.settle)
    if rounds > 1:
        training.periodic()
    for number in range(rounds):
        add(figures, training.periodic())
        figures["emergency"].append(training.emergency(2 * number, beside=False))
        figures["during"].append(training.emergency(2 * number + 1, beside=True))
    figures["ready"] = [ready_s]
    methods: list[str] = []
    if job.is_real and snapshots == 2:
        for overlap in ("optimizer", "clone"):
            training.overlap(overlap)
            for _ in range(rounds):
                add(figures, training.periodic(), f"{overlap} ")
                methods.append(training.state.copier.how)
        training.overlap("")
        torch.set_num_threads(1)
        add(figures, training.periodic(), "thread ")
    training.guard.save(job.done)
    (folder / "ends").write_text(json.dumps(job.ends()))
    training.guard.close()
    return {**figures, "how": methods}


# --- Others -------------------------------------------------------------------------------------------------------


def flushed(folder: Path) -> None:
    """What torch leaves out: like is compared with like."""
    for path in [*folder.iterdir(), folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def by_others(folder: Path, job: Job, rounds: int, begin: Callable[[], Callable[[], object]], name: str) -> Figures:
    """begin: saves into the folder of this name; what it returns waits for what is still being written."""
    figures: Figures = {}
    pool = ThreadPoolExecutor(1)
    for number in range(rounds + (rounds > 1)):
        shutil.rmtree(folder / name, ignore_errors=True)
        base_s = usual_s(job, lambda: None)
        (folder / "ends").write_text(json.dumps(job.ends()))
        writing: list[Any] = []

        def save(writing: list[Any] = writing) -> None:
            rest = begin()
            writing.append(pool.submit(lambda: (rest(), flushed(folder / name))))

        def is_over(writing: list[Any] = writing) -> bool:
            return bool(writing) and writing[0].done()

        values = measured(job, base_s, save, lambda: None, is_over)
        writing[0].result()
        if number or rounds == 1:
            add(figures, values)
    return figures


def by_dcp(folder: Path, job: Job, rounds: int, *, keeps: bool) -> Figures:
    """keeps: its stager copies into the same memory each time."""
    stager = None
    if keeps:
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        stager.state_dict_cache = _create_cpu_state_dict(job.state(), pin_memory=DEVICE == "cuda")

    def begin() -> Callable[[], object]:
        writer = dcp.FileSystemWriter(folder / "dcp", thread_count=8)
        result: Callable[[], object] = dcp.async_save(job.state(), storage_writer=writer, async_stager=stager).result
        return result

    return by_others(folder, job, rounds, begin, "dcp")


def by_torch(folder: Path, job: Job, rounds: int) -> Figures:
    def begin() -> Callable[[], object]:
        (folder / "torch").mkdir()
        torch.save(job.state(), folder / "torch" / "state.pt")
        flushed(folder / "torch")
        return lambda: None

    return by_others(folder, job, rounds, begin, "torch")


# --- Loading ------------------------------------------------------------------------------------------------------


def load(folder: Path, job: Job, method: str) -> Figures:
    """In a new process, whose optimizer has no moments yet."""

    def call() -> None:
        if method == "powerguard":
            state = TorchState(model=job.model, optimizer=job.optimizer)
            Guard(state, folder / "powerguard", job="bench", socket=None).restore()
        elif method == "torch":
            kept = torch.load(folder / "torch" / "state.pt")
            set_state_dict(job.model, job.optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        else:
            kept = job.state()
            dcp.load(kept, checkpoint_id=folder / "dcp")
            set_state_dict(job.model, job.optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        synchronize()

    taken_s = timed(call)
    if job.ends() != json.loads((folder / "ends").read_text()):
        message = f"{method} did not load what was saved"
        raise RuntimeError(message)
    return {"loaded": [taken_s]}


def main(folder: Path, method: str, shape: str, size_bytes: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    is_load = method.startswith("load-")
    if method == "limits":
        print(json.dumps({**limits(folder, size_bytes, rounds), "gb": size_bytes / 1e9, "device": device()}))
        return
    torch.manual_seed(2 if is_load else 1)
    job = Job(shape, size_bytes, fresh=is_load)
    if "dcp" in method or method == "stager":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak
    methods: dict[str, Callable[[], dict[str, Any]]] = {
        "powerguard": partial(by_powerguard, folder, job, rounds),
        "one": partial(by_powerguard, folder, job, rounds, snapshots=1),
        "dcp": partial(by_dcp, folder, job, rounds, keeps=False),
        "stager": partial(by_dcp, folder, job, rounds, keeps=True),
        "torch": partial(by_torch, folder, job, rounds),
        **{f"load-{each}": partial(load, folder, job, each) for each in ("powerguard", "torch", "dcp")},
    }
    figures = methods[method]()
    figures |= {"memory": [(memory_bytes("VmHWM") - before) / job.bytes], "gb": job.bytes / 1e9, "device": device()}
    figures["tensors"] = 3 * len(list(job.model.parameters()))
    print(json.dumps(figures))
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
