"""What it costs to be asked: the look at every step, and the time in which ranks agree on a step, over each store.

And whether the ranks of one host, which write at the same time, hinder each other at its disk (in build/bench).
"""

import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

from bench.figure import Figure
from powerguard.trainer import Guard, Parts
from powerguard.trainer.ranks import Memory, MemoryRanks, Ranks, SocketRanks, TorchRanks
from powerguard.trainer.ranks.agreement import Agreement, Limits
from powerguard.wire import After, Phase, TriggerRequest

_STEP_S = 0.001
_GB = 1_000_000_000
_BLOCK = 50_000_000
_MANY = 1000
_LIMIT_S = 600.0


def run(*, quick: bool) -> list[Figure]:
    rounds = 5 if quick else 40
    figures = [
        Figure(name="look at a step, nothing asked", unit="ns", values=_look(3 if quick else 15), bar="<= 100"),
    ]
    stores = ["unix", *(["torch"] if _has_torch() else [])]
    for store in stores:
        for size in (2, 4):
            agreed, durable = _processes(store, size, rounds)
            name = f"{size} processes over {store}, steps of 1 ms"
            figures.append(Figure(name=f"trigger to agreed step, {name}", unit="ms", values=agreed))
            figures.append(Figure(name=f"trigger to all concluded, {name}", unit="ms", values=durable, bar="<= 100"))
    for size in (2, 4):
        for ranks in (size, 1):
            name = f"trigger to durable, {size} GB of {ranks} rank{'s' * (ranks > 1)} of one host"
            figures.append(Figure(name=name, unit="s", values=_written(ranks, size * _GB // ranks, 3 if quick else 7)))
    many = tuple(_simulated(100 if quick else _MANY) for _ in range(2 if quick else 5))
    figures.append(
        Figure(name=f"{100 if quick else _MANY} simulated ranks, asked to concluded", unit="s", values=many, bar="<= 1")
    )
    return figures


def _look(runs: int) -> tuple[float, ...]:
    """What a training loop pays per step: the look less the loop itself."""
    agreement = Agreement(MemoryRanks(Memory(), 0, 1))
    n = 200_000
    took = []
    for _ in range(runs):
        began = time.perf_counter_ns()
        for step in range(n):
            agreement.step = step
            if step >= agreement.due:
                raise AssertionError
        looked = time.perf_counter_ns()
        for _step in range(n):
            pass
        took.append((looked - began - (time.perf_counter_ns() - looked)) / n)
    agreement.close()
    return tuple(took)


# --- Processes -------------------------------------------------------------------------------------------------------


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _processes(store: str, size: int, rounds: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Ask rank 0 again and again; return when its step was agreed on and when all had concluded, in ms."""
    context = multiprocessing.get_context("spawn")
    folder = Path(tempfile.mkdtemp(prefix="pg-ranks-"))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    ours, theirs = context.Pipe()
    try:
        started = [
            context.Process(target=_work, args=(theirs, rounds, (store, folder, port, rank, size)))
            for rank in range(size)
        ]
        for process in started:
            process.start()
        theirs.close()
        agreed, durable = ours.recv()
        for process in started:
            process.join(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(agreed), tuple(durable)


def _connect(store: str, folder: Path, port: int, rank: int, size: int) -> Ranks:
    if store == "torch":
        import torch.distributed as dist  # noqa: PLC0415 - only where it is asked for

        return TorchRanks(dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0), rank, size)
    return SocketRanks(folder / "s", rank, size)


def _work(pipe: Connection, rounds: int, where: tuple[str, Path, int, int, int]) -> None:
    ranks = _connect(*where)
    rank = ranks.rank
    agreement = Agreement(ranks)
    agreement.step = step = 0
    if rank == 0:
        threading.Thread(target=_ask, args=(agreement, pipe, rounds), daemon=True).start()
    while True:
        time.sleep(_STEP_S)
        step += 1
        agreement.step = step
        if step < agreement.due:
            continue
        while (generation := agreement.wait(step)) is not None:
            if generation.ended is not None:
                if rank == 0:
                    time.sleep(1.0)  # it holds the store of the others
                agreement.close()
                ranks.close()
                return
            _save(agreement, generation.number, commits=rank == 0)


def _save(agreement: Agreement, number: int, *, commits: bool) -> None:
    """Everything but the bytes: hand in a shard's description, read them all where one commits, conclude."""
    agreement.gather(number, "shard", b"x" * 2000, read=commits)
    agreement.conclude(number, ok=True, digest="sha256:00" if commits else "")


def _ask(agreement: Agreement, pipe: Connection, rounds: int) -> None:
    agreed, durable = [], []
    for index in range(rounds):
        time.sleep(0.05)
        began = time.perf_counter()
        number = agreement.open(TriggerRequest(id=f"a{index}", after=After.PAUSE)).number
        agreed.append(1e3 * (_until(agreement, number, lambda known: known.step is not None) - began))
        durable.append(1e3 * (_until(agreement, number, lambda known: known.ended is not None) - began))
        agreement.resume()
    pipe.send((agreed, durable))
    agreement.open(TriggerRequest(id="over", after=After.EXIT))


def _until(agreement: Agreement, number: int, true: Callable[..., bool]) -> float:
    while (known := agreement.generation(number)) is None or not true(known):
        time.sleep(0.0001)
    return time.perf_counter()


# --- Written ---------------------------------------------------------------------------------------------------------


def _written(size: int, size_bytes: int, rounds: int) -> tuple[float, ...]:
    """From the wish of one rank to durable, in seconds. size: how many ranks. size_bytes: of the state of each."""
    context = multiprocessing.get_context("spawn")
    root, folder = Path("build/bench/ranks").absolute(), Path(tempfile.mkdtemp(prefix="pg-ranks-"))
    ours, theirs = context.Pipe()
    gates = context.Barrier(size), context.Event()
    started = [
        context.Process(target=_train, args=(theirs, gates, (root, folder, rank, size), size_bytes, rounds))
        for rank in range(size)
    ]
    try:
        for process in started:
            process.start()
        theirs.close()
        if not ours.poll(_LIMIT_S):
            message = f"{size} ranks: not durable within {_LIMIT_S:g} s"
            raise TimeoutError(message)
        took: tuple[float, ...] = ours.recv()
    finally:
        for process in started:
            process.kill()
            process.join(30)
        for each in (root, folder):
            shutil.rmtree(each, ignore_errors=True)
    return took


def _train(
    pipe: Connection, gates: tuple[Barrier, Event], where: tuple[Path, Path, int, int], size_bytes: int, rounds: int
) -> None:
    (ready, over), (root, folder, rank, size) = gates, where
    block = os.urandom(_BLOCK)
    state = Parts(lambda: {str(number): block for number in range(size_bytes // _BLOCK)}, lambda _: None)
    ranks = SocketRanks(folder / "s", rank, size) if size > 1 else None
    guard = Guard(state, root, job="bench", every_s=None, snapshots=1, socket=None, ranks=ranks)
    requests, step = guard.requests, 0

    def ask() -> None:
        took = []
        for number in range(rounds):
            time.sleep(2.0)  # the slots are ready again
            began = time.perf_counter()
            name = f"e{number}"
            requests.trigger(TriggerRequest(id=name, after=After.CONTINUE))
            while (status := requests.checkpoint(name, wait_s=10.0)) is None or status.phase is not Phase.COMMITTED:
                pass
            took.append(time.perf_counter() - began)
        pipe.send(tuple(took))
        over.set()

    guard.step(0)
    while requests.pace.limit is None:
        time.sleep(0.1)  # until the slots are made
    ready.wait(600)
    if rank == 0:
        threading.Thread(target=ask, daemon=True).start()
    while not over.is_set():
        step += 1
        guard.step(step)
        time.sleep(_STEP_S)
    os._exit(0)  # no rank waits for the goodbyes of the others


# --- Many, in one process --------------------------------------------------------------------------------------------


def _simulated(size: int) -> float:
    """So many ranks, each with its watcher and its training thread, in one process: seconds from asked to concluded."""
    memory = Memory()
    stack, interval_s = threading.stack_size(256 * 1024), sys.getswitchinterval()
    sys.setswitchinterval(0.05)  # one interpreter plays a thousand: let it not spend its time on handing its lock round
    hosts = [f"host{rank // 8}" for rank in range(size)]
    agreements = [Agreement(MemoryRanks(memory, rank, size, hosts), limits=Limits(beat_s=5.0)) for rank in range(size)]

    def train(agreement: Agreement) -> None:
        agreement.step = step = 0
        while agreement.due > step + 1:
            with agreement._replica.lock:  # noqa: SLF001 - a thousand busy loops would measure each other
                agreement._replica._news.wait(0.5)  # noqa: SLF001 - as above
        step += 1
        agreement.step = step
        while (generation := agreement.wait(step)) is not None:
            _save(agreement, generation.number, commits=agreement.ranks.rank == 0)

    threads = [threading.Thread(target=train, args=[agreement]) for agreement in agreements]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    began = time.perf_counter()
    agreements[0].open(TriggerRequest(id="a"))
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    for agreement in agreements:
        agreement._closing.set()  # noqa: SLF001 - a thousand goodbyes are not what is measured
        agreement._replica.end("over")  # noqa: SLF001 - as above
        atexit.unregister(agreement._at_exit)  # noqa: SLF001 - nor at the end, one after the other
    threading.stack_size(stack)
    sys.setswitchinterval(interval_s)
    return took


if __name__ == "__main__":
    for figure in run(quick="--quick" in sys.argv):
        print(figure)
