"""What training pays for its guard: per step, per periodic checkpoint, from trigger to durable, and to go on again."""

import contextlib
import json
import multiprocessing
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from bench.figure import Figure
from powerguard.trainer import Buffer, Guard, Item, Loaded, StopTraining
from powerguard.trainer.ranks import SocketRanks

_STEP_S = 0.005
_PERIOD_S = 300.0
_MB = 1_000_000


class _State:
    """So many bytes, and the step."""

    def __init__(self, size_bytes: int) -> None:
        self.step = 0
        self._bulk = bytearray(size_bytes)

    def items(self) -> Iterator[Item]:
        yield Buffer.json("step", self.step)
        yield Buffer("bulk", self._bulk)

    def load(self, items: Mapping[str, Loaded]) -> None:
        self.step = items["step"].value()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pg-bench-", dir="/var/tmp"))  # a disk: /tmp may be memory
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(*, quick: bool) -> list[Figure]:
    hot, cold = _steps(20_000 if quick else 300_000, 200 if quick else 2000)
    stalls = _stalls(100 if quick else 1000, 3 if quick else 15)
    share = tuple(s * 8.5 / _PERIOD_S * 100 for s in stalls)
    beyond, resumed = _asked(5 if quick else 30, 25 if quick else 100)
    return [
        Figure(name="guard.step, nothing asked, in a loop", unit="us", values=hot, bar="p99 <= 10"),
        Figure(
            name="guard.step, nothing asked, after 5 ms of copying memory (less an empty measurement's median)",
            unit="us",
            values=cold,
        ),
        Figure(name="stall of a periodic checkpoint (a copy in host memory)", unit="s/GB", values=stalls),
        Figure(name="the same, of training time, at 8.5 GB every 300 s", unit="%", values=share, bar="<= 1"),
        Figure(name="trigger to committed, beyond bytes and a step, 2 ranks", unit="ms", values=beyond, bar="<= 100"),
        Figure(name="resume to the next step, 2 ranks", unit="ms", values=resumed, bar="<= 1000"),
    ]


def _steps(hot: int, cold: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Time each call alone; the clock's own cost is in it."""
    now = time.perf_counter_ns
    with _folder() as folder, Guard(_State(1000), folder, job="bench", socket=None, every_s=None) as guard:
        for step in range(1000):
            guard.step(step)
        time.sleep(0.5)
        took = []
        for step in range(hot):
            began = now()
            guard.step(step)
            took.append((now() - began) / 1000)
        source, target = bytearray(32 * _MB), bytearray(32 * _MB)
        colds, empties = [], []
        for step in range(cold):
            target[:] = source
            began = now()
            guard.step(step)
            colds.append((now() - began) / 1000)
            target[:] = source
            began = now()
            empties.append((now() - began) / 1000)
    empty = statistics.median(empties)
    return tuple(took), tuple(max(0.0, each - empty) for each in colds)


def _stalls(mb: int, rounds: int) -> tuple[float, ...]:
    """Seconds per GB that training waits for its copy, by the guard's own count, in memory that was touched before."""
    state = _State(mb * _MB)
    took = []
    with _folder() as folder, Guard(state, folder, job="bench", socket=None, every_s=None) as guard:
        guard.step(1)
        guard.save(1)
        guard.save(1)
        totals = guard.requests.pace.totals
        for step in range(2, rounds + 2):
            before = totals.stall_s
            guard.save(step)
            took.append((totals.stall_s - before) / (mb / 1000))
    return tuple(took)


def _train(folder: Path, rank: int, size_bytes: int, over: Event) -> None:
    state = _State(size_bytes)
    where = folder / "t.sock" if rank == 0 else None
    with contextlib.suppress(StopTraining):
        ranks = SocketRanks(folder / "ranks.sock", rank, 2)
        with Guard(state, folder / "ck", job="bench", socket=where, every_s=None, ranks=ranks) as guard:
            guard.restore()
            while not over.is_set() or rank:  # rank 0 says when it is over
                time.sleep(_STEP_S)
                state.step += 1
                guard.step(state.step)


def _asked(rounds: int, mb: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Trigger, wait until committed, resume: less the bytes at the rate of these very writes, and less one step."""
    context = multiprocessing.get_context("spawn")
    with _folder() as folder:
        over = context.Event()
        children = [context.Process(target=_train, args=(folder, rank, mb * _MB, over)) for rank in (0, 1)]
        for child in children:
            child.start()
        try:
            while not (folder / "t.sock").exists() or not _ask(folder, "GET", "/api/v1/status").get("step"):
                time.sleep(0.05)
            time.sleep(2.0 if mb < 50 else 5.0)  # the slots are being made
            beyond, resumed = [], []
            for number in range(rounds):
                took_s, write_s = _once(folder, f"r{number}")
                beyond.append((took_s - write_s - _STEP_S) * 1000)
                stood = _ask(folder, "GET", "/api/v1/status")["step"]
                began_s = time.perf_counter()
                _ask(folder, "POST", "/api/v1/resume")
                while _ask(folder, "GET", "/api/v1/status")["step"] <= stood:
                    time.sleep(0.001)
                resumed.append((time.perf_counter() - began_s) * 1000)
        finally:
            for child in children:
                child.kill()
                child.join()
    return tuple(beyond), tuple(resumed)


def _once(folder: Path, name: str) -> tuple[float, float]:
    """Return seconds from the trigger until durable, and of these from the first byte to the last."""
    began_s = time.perf_counter()
    answer = _ask(folder, "POST", "/api/v1/trigger_checkpoint", {"id": name, "after": "pause", "deadline_s": 60})
    write_from_s = write_until_s = 0.0
    while answer["phase"] not in ("committed", "failed", "aborted"):
        answer = _ask(folder, "GET", f"/api/v1/checkpoints/{name}?wait=10&seen={answer['phase']}")
        now_s = time.perf_counter()
        if answer["phase"] == "writing" and not write_from_s:
            write_from_s = now_s
        elif answer["phase"] in ("committing", "committed") and not write_until_s:
            write_until_s = now_s
    if answer["phase"] != "committed":
        raise RuntimeError(answer)
    return time.perf_counter() - began_s, max(0.0, write_until_s - write_from_s) if write_from_s else 0.0


def _ask(folder: Path, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
    connection = HTTPConnection("trainer", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(folder / "t.sock"))
    try:
        connection.request(method, path, body=None if body is None else json.dumps(body))
        return dict(json.loads(connection.getresponse().read()))
    finally:
        connection.close()
