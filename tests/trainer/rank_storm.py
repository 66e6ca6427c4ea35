"""A job of real processes over one root, on a disk that dawdles at every call: one process of it, and what it saw.

    python -m tests.trainer.rank_storm SEED [SECONDS [HOST,HOST,...]]     one storm, reported in JSON

Everything at once: checkpoints by the clock and by askers, pauses that are taken back, evaluation, writes that fail,
readers beside, and the end of training. Who loses the folder, the slot or the file that he is at says so in his log.
"""

import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from powerguard.cli.checkpoints.found import entries_at, verified
from powerguard.cli.render import Bar
from powerguard.trainer import Buffer, Guard, Item, Loaded
from powerguard.trainer.ranks import SocketRanks
from powerguard.trainer.ranks.base import Place
from powerguard.trainer.store.disk import Disk
from powerguard.trainer.store.folders import newest_in
from powerguard.trainer.store.store import Store
from powerguard.wire import After, Phase, Reason, TriggerRequest
from tests.trainer.checkpoints import read

INJECTED: Final = "a storm's own error"
EXPECTED: Final = (
    INJECTED,
    "a newer state went first",
    "called off",
    "training has ended",
    "has died",
    "given up by",
    "an interrupted save",  # Said at the start, of a folder that a kill has left.
)
"""What may be the reason for a checkpoint that came to nothing."""


class Dawdling(Disk):
    """Sleeps at random around every call, and fails now and then to write into a checkpoint."""

    def __init__(self, chance: random.Random, failing: float) -> None:
        self._chance = chance
        self.failing = failing

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found
        chance, failing = self._chance, self.failing

        def late(*args: object, **options: object) -> object:
            time.sleep(chance.choice([0, 0, 0.0002, 0.002]))
            if name == "write" and chance.random() < failing:
                raise OSError(121, INJECTED)
            try:
                return found(*args, **options)
            finally:
                time.sleep(chance.choice([0, 0, 0.0002, 0.002]))

        return late


class State:
    """One rank's state: which rank and step it is of, and much of it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    def items(self) -> Iterator[Item]:
        """Tell rank and step, over a few pages."""
        yield Buffer.json("state", [self.rank, self.step])
        yield Buffer("bulk", bytes([self.step % 256]) * (20_000 + 5000 * (self.step // 50)))

    def load(self, items: Mapping[str, Loaded]) -> None:
        """Take what is this rank's, and of one step."""
        rank, self.step = items["state"].value()
        assert rank == self.rank
        assert set(bytes(items["bulk"].data)) == {self.step % 256}


class Heard(logging.Handler):
    """Keeps what the library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.lines.append(record.getMessage())


def work(pipe: Connection, folder: Path, rank: int, hosts: Sequence[str], seed: int, seconds: float) -> None:
    """Be one rank until rank 0 says that it is over; tell `{"committed": step}` and, last, what was seen."""
    sys.setswitchinterval(1e-6)
    chance = random.Random(f"{seed}/{rank}")
    heard = Heard()
    logging.getLogger("powerguard.trainer").addHandler(heard)
    ranks = SocketRanks(folder / "s", rank, len(hosts), join_s=60.0)
    Place.__init__(ranks, rank, len(hosts), hosts)
    disk = Dawdling(random.Random(f"{seed}/{rank}/disk"), 0.002)
    threading.excepthook = lambda ended: rank_of.odd.append(f"{ended.exc_type.__name__}: {ended.exc_value}")
    root = root_of(folder, hosts, rank, seed)
    root.mkdir(exist_ok=True)
    rank_of = Rank(pipe, chance, State(rank), root)
    with Guard(
        rank_of.state, rank_of.root, job="storm", conduct="pause", every_s=0.05, socket=None, disk=disk, ranks=ranks
    ) as guard:
        rank_of.guard = guard
        began = guard.restore()
        store = ranks.clone()
        threads = [threading.Thread(target=rank_of.look, daemon=True)]
        if ranks.local_rank == 0:
            threads += [threading.Thread(target=rank_of.ask, args=[who], daemon=True) for who in range(2)]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + seconds
        while True:
            step = rank_of.state.step + 1
            if store.add(f"b/{step}#", 1) == len(hosts):  # the last one to come decides for all, as an all-reduce would
                store.set(f"b/{step}", b"stop" if rank_of.is_enough(time.monotonic() - until_s) else b"go")
            if store.get(f"b/{step}", 60.0) == b"stop":
                break
            rank_of.train(step)
        rank_of.over.set()
        for thread in threads:
            thread.join(60)
        disk.failing = 0.0
        guard.requests.resume(wait_s=0, all_hosts=True)
        final = guard.save(rank_of.state.step).step
    results = {phase.value: count for phase, count in guard.requests.results.items()}
    pipe.send({"began": began, "final": final, "results": results, "warned": heard.lines, "odd": rank_of.odd})


def root_of(folder: Path, hosts: Sequence[str], rank: int, seed: int) -> Path:
    """Where this rank's checkpoints lie: with several hosts each has a root of its own, or all share one."""
    return folder / (f"ck-{hosts[rank]}" if len(set(hosts)) > 1 and seed % 2 else "ck")


class Rank:
    """What one rank does, and what it found odd."""

    guard: Guard

    def __init__(self, pipe: Connection, chance: random.Random, state: State, root: Path) -> None:
        self.pipe, self.chance, self.state, self.root = pipe, chance, state, root
        self.over = threading.Event()
        self.odd: list[str] = []
        self._reported = 0

    def train(self, step: int) -> None:
        """Do a step; at some, evaluate."""
        time.sleep(self.chance.choice([0, 0.0005, 0.002]))
        self.state.step = step
        self.guard.step(step)
        if step % 37 == 0:
            with self.guard.phase("eval", step=step if step % 2 else None):
                for _ in range(10):
                    time.sleep(0.001)
                    self.guard.poll()
        last = self.guard.requests.last
        if last is not None and last.step > self._reported:
            self._reported = last.step
            self.pipe.send({"committed": last.step})

    def is_enough(self, over_s: float) -> bool:
        """Whether to end, so long after the time: on a slow machine nothing may have been committed before it."""
        return over_s > (0.0 if self._reported else 20.0)

    def ask(self, who: int) -> None:
        """Want checkpoints, pauses, and all back again."""
        chance, requests = random.Random(f"{self.chance.random()}/{who}"), self.guard.requests
        names: list[str] = []
        while not self.over.is_set():
            time.sleep(chance.uniform(0, 0.03))
            wish = chance.random()
            if wish < 0.5:
                names.append(f"{self.state.rank}-{who}-{len(names)}")
                after = chance.choice([After.CONTINUE, After.PAUSE])
                reason = chance.choice([Reason.DRILL, Reason.ON_BATTERY])
                deadline_s = chance.choice([None, 20.0])
                request = TriggerRequest(id=names[-1], reason=reason, deadline_s=deadline_s, after=after, lease_s=0.2)
                requests.trigger(request, asker=str(who))
            elif wish < 0.6:
                requests.pause(lease_s=0.05, asker=str(who))
            elif wish < 0.8:
                requests.resume(wait_s=0)
            elif wish < 0.9 and names:
                requests.cancel(chance.choice(names[-5:]))
            elif names:
                status = requests.checkpoint(chance.choice(names[-5:]), wait_s=0.01)
                if status is not None and status.phase in {Phase.FAILED, Phase.ABORTED} and not known(status.error):
                    self.odd.append(status.error)

    def look(self) -> None:
        """Read beside, as the daemon and `powerguard checkpoints verify` do: nothing is ever rotten."""
        while not self.over.wait(0.02):
            newest_in(self.root)
            entries = entries_at(str(self.root))
            with Bar("", quiet=True) as bar:
                seen = [verified(entry, bar) for entry in entries[:2]]
            self.odd += [f"{each.name}: {each.because}" for each in (*entries, *seen) if each.state == "corrupt"]


def known(error: str) -> bool:
    """Whether a checkpoint may come to nothing for this reason."""
    return any(each in error for each in EXPECTED)


def storm(folder: Path, seed: int, seconds: float, hosts: Sequence[str], *, kill: bool = False) -> dict[str, Any]:
    """Run one job; return what its ranks saw. kill: a rank dies by SIGKILL, and then all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer.rank_storm"])
    chance = random.Random(seed)
    pipes, processes = [], []
    for rank in range(len(hosts)):
        pipe, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, folder, rank, hosts, seed, seconds))
        process.start()
        theirs.close()
        pipes.append(pipe)
        processes.append(process)
    result: dict[str, Any] = {"committed": 0, "ranks": []}
    until_s = time.monotonic() + seconds + 100.0
    kill_at_s = time.monotonic() + chance.uniform(0.5, seconds) if kill else until_s
    open_pipes = list(pipes)
    while open_pipes and time.monotonic() < until_s:
        ready: Sequence[object] = wait(open_pipes, 0.05)
        for pipe in [each for each in open_pipes if each in ready]:
            try:
                said = pipe.recv()
            except (EOFError, ConnectionResetError):
                open_pipes.remove(pipe)
                continue
            if "committed" in said:
                result["committed"] = max(result["committed"], said["committed"])
                kill_at_s = min(kill_at_s, time.monotonic() + chance.uniform(0, seconds)) if kill else kill_at_s
            else:
                result["ranks"].append(said)
        if kill and time.monotonic() > kill_at_s:
            os.kill(processes[chance.randrange(len(hosts))].pid or 0, signal.SIGKILL)
            time.sleep(chance.uniform(0, 0.2))
            for process in processes:
                process.kill()
            kill = False
    for process in processes:
        process.join(30.0)
        if process.is_alive():
            result["hung"] = True
            process.kill()
        process.join()
    return result


def judged(folder: Path, answer: Mapping[str, Any], hosts: Sequence[str], seed: int) -> list[str]:
    """Return what is wrong after a storm: what nobody should have been told, or what does not lie there as it must."""
    wrong = ["some rank hung"] if answer.get("hung") else []
    for rank, each in enumerate(answer["ranks"]):
        wrong += [f"rank {rank} found: {odd}" for odd in each["odd"]]
        wrong += [f"rank {rank} warned: {line}" for line in each["warned"] if not known(line)]
    for rank in range(len(hosts)):
        root = root_of(folder, hosts, rank, seed)
        with Store(root, job="storm", rank=rank, ranks=len(hosts), hosts=len(set(hosts)), leader=False) as store:
            found = store.found()
            wrong += [f"{each.name}: {each.reason}" for each in store.refused()]
            wrong += [f"{path.name}: set aside" for path in root.glob("bad-step-*")]
            if answer["committed"] and (not found or found[0].step < answer["committed"]):
                wrong.append(
                    f"step {answer['committed']} was reported as durable: there are {[one.step for one in found]}"
                )
            for each in found:
                if read(each, rank)["state"].value() != [rank, each.step]:
                    wrong.append(f"{each.name}: is of another step or rank")
    return wrong


def main() -> int:
    """Run one storm, and tell of it."""
    seed = int(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    hosts = sys.argv[3].split(",") if len(sys.argv) > 3 else ["a", "a", "a"]
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pg-storm-") as name:
        result = storm(Path(name), seed, seconds, hosts)
        wrong = judged(Path(name), result, hosts, seed)
    print(json.dumps({"seed": seed, "hosts": hosts, "wrong": wrong, **result}, indent=1))
    return int(bool(wrong) or len(result["ranks"]) < len(hosts))


if __name__ == "__main__":
    sys.exit(main())
