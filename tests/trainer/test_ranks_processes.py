"""Real processes with a barrier per step agree over a store in rank 0 or elsewhere; ranks die, hang or lose it."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from powerguard.trainer.ranks.socket_store import Server, listening
from powerguard.wire import After
from tests.trainer import ranks_worker

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["__main__", ranks_worker.__name__])


class Processes:
    """A job of real processes, and what they have said. answers: (generation, rank) to how it ended, as told there."""

    def __init__(self, store: str, folder: Path, size: int, *, step_s: float = 0.002) -> None:
        self.folder, self.size = folder, size
        self.server = Server(listening(folder / "s")) if store == "elsewhere" else None
        self.pipes: list[Connection] = []
        self.processes = []
        self.said: list[dict[str, Any]] = []
        self.answers: dict[tuple[int, int], dict[str, Any]] = {}
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=ranks_worker.work, args=(theirs, store, folder, rank, size, step_s), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def send(self, rank: int, **what: object) -> None:
        self.pipes[rank].send(what)

    def hear(self, timeout_s: float) -> None:
        """Take in what the ranks say; ends of pipes are no news."""
        for pipe in wait([pipe for pipe in self.pipes if not pipe.closed], timeout_s):
            assert isinstance(pipe, Connection)
            try:
                message: dict[str, Any] = pipe.recv()
            except (EOFError, ConnectionResetError):
                pipe.close()
                continue
            self.said.append(message)
            if "answer" in message:
                key = message["answer"], message["rank"]
                assert self.answers.get(key, message) == message, "a rank took its word back"
                self.answers[key] = message

    def until(self, true: Callable[[], object], timeout_s: float = 60.0) -> None:
        until_s = time.perf_counter() + timeout_s
        while not true():
            assert time.perf_counter() < until_s, self.said[-10:]
            self.hear(0.05)

    def until_ready(self) -> None:
        self.until(lambda: sum("ready" in each for each in self.said) == self.size)

    def resume(self, rank: int) -> None:
        """Let all go on, told by this rank; one that comes after a checkpoint was asked for would call it off."""
        before = sum("resumed" in each for each in self.said)
        self.send(rank, resume=1)
        self.until(lambda: sum("resumed" in each for each in self.said) > before)

    def answered(self, number: int, ranks: list[int]) -> list[dict[str, Any]]:
        """Wait for these ranks' answers on a generation."""
        for rank in ranks:
            self.send(rank, watch=number)
        self.until(lambda: all((number, rank) in self.answers for rank in ranks))
        return [self.answers[number, rank] for rank in ranks]

    def manifests(self) -> dict[int, Path]:
        """Return the manifests there are, by step; each must have all its shards, whole."""
        found = {}
        for manifest in self.folder.glob("step-*/manifest"):
            step = int(manifest.parent.name.split("-")[1])
            parts = json.loads(manifest.read_bytes())
            assert [part["rank"] for part in parts] == list(range(self.size))
            assert {part["step"] for part in parts} == {step}
            for rank in range(self.size):
                assert (manifest.parent / f"shard-{rank}").read_text(encoding="ascii") == f"{step}\n" * 1000
            found[step] = manifest
        return found

    def agreed(self, number: int, ranks: list[int]) -> dict[str, Any]:
        """Check that all these ranks say the same of a generation, and that it is true; return what they say."""
        answers = self.answered(number, ranks)
        known = [answer for answer in answers if not answer["lost"]]
        said = {(answer["ok"], answer["digest"], answer["step"]) for answer in known}
        assert len(said) <= 1, answers
        for answer in answers:
            if answer["ok"]:
                assert answer["step"] in self.manifests(), "acknowledged, and not there"
        return (known or answers)[0]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(60)
        for pipe in self.pipes:
            pipe.close()
        if self.server is not None:
            self.server.close()


@contextmanager
def processes(store: str, folder: Path, size: int, *, step_s: float = 0.002) -> Iterator[Processes]:
    it = Processes(store, folder, size, step_s=step_s)
    try:
        it.until_ready()
        yield it
    finally:
        it.end()


def request(name: str, **other: object) -> dict[str, object]:
    return {"id": name, "after": After.PAUSE, "deadline_s": 30.0, **other}


@pytest.mark.parametrize("store", ["rank 0", "elsewhere"])
def test_four_processes_agree_again_and_again(store: str, tmp_path: Path) -> None:
    """With a true barrier per step nobody passes the agreed step, nobody deadlocks, and all say the same."""
    with processes(store, tmp_path, 4) as it:
        for number in range(1, 9):
            it.send(number % 4, open=request(f"a{number}"))
            answer = it.agreed(number, [0, 1, 2, 3])
            assert answer["ok"], answer["error"]
            it.resume((number + 1) % 4)
        # One that is opened before anybody went on stands where the last one stood: another folder of the same step.
        assert len(list(it.folder.glob("step-*/manifest"))) == 8


@pytest.mark.parametrize("trial", [0, *(pytest.param(trial, marks=pytest.mark.slow) for trial in range(1, 20))])
def test_a_rank_killed_at_any_instant(trial: int, tmp_path: Path) -> None:
    """kill -9 of one rank around a generation, ten times: never two answers, never a commit without all, never late."""
    dice = random.Random(trial)
    ends = {True: 0, False: 0}
    for turn in range(10):
        folder = tmp_path / str(turn)
        folder.mkdir()
        with processes("elsewhere" if turn % 2 else "rank 0", folder, 3) as it:
            it.send(0, open=request("a"))
            assert it.agreed(1, [0, 1, 2])["ok"]
            it.resume(0)
            victim = dice.choice([1, 2] if turn % 2 == 0 else [0, 1, 2])
            asker = (victim + 1) % 3
            time.sleep(dice.uniform(0.0, 0.004))
            it.send(asker, open=request("b"))
            time.sleep(dice.uniform(0.0, 0.03))
            it.processes[victim].kill()
            began_s = time.perf_counter()
            others = [rank for rank in range(3) if rank != victim]
            answer = it.agreed(2, others)
            assert time.perf_counter() - began_s < 30.0, "before its deadline"
            if not answer["ok"]:
                assert f"rank {victim}" in answer["error"], answer
            assert 1 <= len(it.manifests()) <= 2
            ends[answer["ok"]] += 1
    print(f"committed before the kill: {ends[True]}, given up: {ends[False]}")


@pytest.mark.parametrize("store", ["rank 0", "elsewhere"])
def test_a_rank_that_is_stopped_is_given_up_on_and_learns_it(store: str, tmp_path: Path) -> None:
    """SIGSTOP of a whole rank: the others fail it in bounded time; it wakes, says the same, and takes part again."""
    with processes(store, tmp_path, 3) as it:
        pid = it.processes[2].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        it.send(0, open=request("a"))
        answer = it.agreed(1, [0, 1])
        assert not answer["ok"]
        assert "rank 2" in answer["error"]
        assert it.manifests() == {}
        os.kill(pid, signal.SIGCONT)
        assert it.agreed(1, [0, 1, 2])["error"] == answer["error"]
        it.resume(1)
        it.send(2, open=request("b"))
        answer = it.agreed(2, [0, 1, 2])
        assert answer["ok"], answer["error"]


def test_the_store_killed_with_rank_0(tmp_path: Path) -> None:
    """The process that holds the store dies: the others are let go, claim nothing, and open nothing."""
    with processes("rank 0", tmp_path, 3) as it:
        it.send(1, open=request("a"))
        assert it.agreed(1, [0, 1, 2])["ok"]
        it.resume(1)
        it.send(2, open=request("b"))
        it.processes[0].kill()
        it.until(lambda: any("opened" in each or "refused" in each for each in it.said if each["rank"] == 2))
        if any(each.get("opened") == 2 for each in it.said):
            assert not any(answer["ok"] and answer["step"] not in it.manifests() for answer in it.answered(2, [1, 2]))
        until_s = time.perf_counter() + 60
        while not any("lost the others" in str(each.get("refused")) for each in it.said):
            assert time.perf_counter() < until_s, it.said[-5:]
            it.send(1, open=request("c"))
            time.sleep(0.2)
            it.hear(0.0)


FORKS = """
import os, sys
from powerguard.trainer.ranks.agreement import Agreement
from powerguard.trainer.ranks import SocketRanks
from powerguard.wire import TriggerRequest
ranks = SocketRanks(f"{sys.argv[1]}/s", 0, 1)
agreement = Agreement(ranks)
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(agreement.open(TriggerRequest(id="a")).number, agreement.state.left)
"""


def test_a_child_of_fork_says_nothing_when_it_ends(tmp_path: Path) -> None:
    """A data loader's worker inherits the connection; its end is not the training's. The parent closes at its exit."""
    quiet = "ignore:This process:DeprecationWarning"  # of fork beside threads, from Python 3.12 on
    run = [sys.executable, "-W", quiet, "-c", FORKS, str(tmp_path)]
    ended = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1 False\n", "")


def test_nothing_of_the_agreement_loads_torch(tmp_path: Path) -> None:
    """What every rank imports is the standard library."""
    code = (
        "import sys; import powerguard.trainer.ranks.agreement, powerguard.trainer.ranks;"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in {'torch', 'numpy', 'xxhash', 'aiohttp'}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
