"""Ranks over torch's own store: a thread that waits holds nobody up, and a store that dies is an error in words."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (scripts/test-torch gets it)")
import torch.distributed as dist

from powerguard.trainer.ranks import RanksError
from powerguard.trainer.ranks.agreement import Agreement
from powerguard.trainer.ranks.torch_store import TorchRanks
from powerguard.wire import After, TriggerRequest
from tests.peers.ports import free_port
from tests.trainer.ranks_job import QUICK, Job


def made(stores: list[Any], prefix: str) -> list[TorchRanks]:
    """One rank for each client of a store, all at once, as processes would."""
    ranks: dict[int, TorchRanks] = {}

    def one(rank: int) -> None:
        ranks[rank] = TorchRanks(stores[rank], rank, len(stores), prefix=prefix, join_s=60.0)

    threads = [threading.Thread(target=one, args=[rank]) for rank in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [ranks[rank] for rank in range(len(stores))]


@pytest.fixture(params=["tcp", "hash", "prefix"])
def stores(request: pytest.FixtureRequest) -> list[Any]:
    """Three clients of each kind of store that torch hands out."""
    if request.param == "hash":
        return [dist.HashStore()] * 3
    server = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    clients = [server, *(dist.TCPStore("127.0.0.1", server.port, 3, is_master=False) for _ in range(2))]
    return [dist.PrefixStore("worker/attempt_0", one) for one in clients] if request.param == "prefix" else clients


def test_store_keeps_its_promises(stores: list[Any]) -> None:
    """As every other store of ranks does; and the store that torch uses is not touched."""
    one, two, _ = made(stores, "t")
    assert (one.rank, two.rank, two.local_rank, two.hosts) == (0, 1, 1, 1)
    one.set("a", b"\0\xff")
    assert two.get("a", 60.0) == b"\0\xff"
    assert one.claim("log/0", b"mine") == b"mine"
    assert two.claim("log/0", b"yours") == b"mine"
    assert [one.add("n#", 1), two.add("n#", 2)] == [1, 3]
    began_s = time.perf_counter()
    with pytest.raises(TimeoutError):
        two.get("b", 0.2)
    assert time.perf_counter() - began_s > 0.15
    two.delete("a")
    two.delete("a")
    assert not one.check("a")
    assert not stores[0].check(["a"])


def test_the_store_lives_as_long_as_its_ranks() -> None:
    """Given a store that nobody else holds, it must not end with the call."""
    ranks = TorchRanks(dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False), 0, 1, prefix="t")
    gc.collect()
    clone = ranks.clone()
    clone.set("a", b"b")
    assert ranks.get("a", 60.0) == b"b"


def test_a_long_wait_of_one_thread_holds_no_other_up(stores: list[Any]) -> None:
    """The watcher waits on a connection of its own: neither torch's own calls nor ours wait behind it."""
    one, two, _ = made(stores, "t")
    watcher = one.clone()
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(watcher.get("late", 100.0)))
    thread.start()
    time.sleep(0.05)
    for index in range(50):
        one.set("x", b"%d" % index)
        stores[0].set("torch", b"1")
    assert got == [], "its wait is not over, and nobody has waited for that"
    two.set("late", b"now")
    thread.join(60)
    assert got == [b"now"]
    watcher.close()
    with pytest.raises(RanksError, match="closed"):
        watcher.check("x")


def test_a_job_trains_over_it(stores: list[Any]) -> None:
    """Checkpoints with a pause and a resume, asked of any rank."""
    it = Job(made(stores, "t"), limits=QUICK)
    it.start()
    try:
        for number in range(1, 4):
            it.until_moving()
            request = TriggerRequest(id=f"a{number}", after=After.PAUSE, deadline_s=30.0)
            ended = it.until_ended(it.agreements[number % 3].open(request).number)
            assert ended.ended is not None
            assert ended.ended.ok, ended
            it.until_standing(ended.step)
            it.agreements[0].resume()
        it.until_moving()
    finally:
        it.end()


SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def elsewhere() -> Iterator[tuple["subprocess.Popen[str]", TorchRanks]]:
    """A store in another process, and the one rank of a job that uses it."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        client = dist.TCPStore("127.0.0.1", port, 1, is_master=False, timeout=timedelta(seconds=60))
        yield server, TorchRanks(client, 0, 1, prefix="t")
        server.kill()


def test_a_store_that_is_killed_is_an_error_in_words(elsewhere: tuple["subprocess.Popen[str]", TorchRanks]) -> None:
    """kill -9 of the process that holds it: whoever waits is told, and the agreement lets its rank go."""
    server, ranks = elsewhere
    agreement = Agreement(ranks.clone(), limits=replace(QUICK, lost_s=3.0))
    agreement.step = 0
    server.kill()
    server.communicate()
    with pytest.raises(RanksError, match="torch's store does not answer"):
        ranks.claim("a", b"b")
    until_s = time.perf_counter() + 60
    while not agreement.lost and time.perf_counter() < until_s:
        time.sleep(0.01)
    assert "lost the others" in agreement.lost
    with pytest.raises(RanksError):
        agreement.open(TriggerRequest(id="a"))
    agreement.close()


def test_a_store_that_hangs_holds_nobody_for_ever(elsewhere: tuple["subprocess.Popen[str]", TorchRanks]) -> None:
    """Its process is stopped, or its host has lost its power: torch's own calls never return, ours do."""
    server, ranks = elsewhere
    agreement = Agreement(ranks, limits=replace(QUICK, lost_s=6.0))
    agreement.step = 0
    agreement.open(TriggerRequest(id="a", after=After.PAUSE))
    while agreement.due > 1:
        time.sleep(0.001)
    generation = agreement.wait(1)
    assert generation is not None
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    os.waitpid(server.pid, os.WUNTRACED)  # A signal is on its way for a moment, in which the store still answers.
    began_s = time.perf_counter()
    ended = agreement.conclude(generation.number, ok=True, digest="sha256:00").ended
    assert time.perf_counter() - began_s < 100.0, "torch's own calls never return"
    assert ended is not None
    assert (ended.ok, ended.lost) == (False, True)
    assert agreement.wait(1) is None
    with pytest.raises(RanksError, match="lost the others"):
        agreement.open(TriggerRequest(id="b"))
    agreement.close()
    os.kill(server.pid, signal.SIGCONT)


CHILD = """
import torch.distributed as dist
dist.init_process_group("gloo")
import json, os, sys, time
from powerguard.trainer.ranks.agreement import Agreement
from powerguard.trainer.ranks import detect
from powerguard.wire import After, TriggerRequest
import torch
ranks = detect()
agreement = Agreement(ranks)
agreement.step = step = 0
said = []
while not said:
    dist.all_reduce(torch.ones(1))
    step += 1
    agreement.step = step
    if ranks.rank == 1 and step == 20:
        agreement.open(TriggerRequest(id="a", after=After.EXIT))
    if step >= agreement.due:
        while (generation := agreement.wait(step)) is not None:
            if generation.ended is not None:
                said.append([type(ranks).__name__, ranks.rank, ranks.size, generation.step])
                break
            agreement.gather(generation.number, "shard", b"x")
            agreement.conclude(generation.number, ok=True, digest="sha256:00" if ranks.rank == 0 else "")
os.write(1, (json.dumps(said[0]) + "\\n").encode())  # at once: both write into one pipe, and print ends its line later
agreement.close()
dist.destroy_process_group()
"""


def test_torchrun_with_a_collective_per_step(tmp_path: Path) -> None:
    """Two ranks of torchrun find torch's store by themselves, and agree while they all-reduce at every step."""
    child = tmp_path / "child.py"
    child.write_text(CHILD, encoding="utf-8")
    port = str(free_port())
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", str(child)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = sorted(line for line in ended.stdout.splitlines() if line.startswith("["))
    assert len(lines) == 2
    step = lines[0].rpartition(",")[2]
    assert lines == [f'["TorchRanks", 0, 2,{step}', f'["TorchRanks", 1, 2,{step}']
    assert "timed out" not in ended.stderr
