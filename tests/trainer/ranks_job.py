"""A job of many ranks in one process: threads that train behind a barrier per step, over one store in memory."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from powerguard.trainer.ranks import Memory, MemoryRanks, Ranks
from powerguard.trainer.ranks.agreement import Agreement, GenerationOverError, Limits
from powerguard.trainer.ranks.machine import Generation

QUICK = Limits(dead_s=20.0, reach_s=20.0, write_s=20.0, late_s=0.3, lost_s=20.0, beat_s=0.02)


class Job:
    """Ranks with a training thread each. What a rank does for a checkpoint can be replaced, to fail or to hang.

    saved: (generation, rank, step) of every part that was taken. ended: how it ended, by (generation, rank).
    """

    def __init__(self, ranks: Iterable[Ranks], *, limits: Limits = QUICK, restored: int | None = 0) -> None:
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.memory = Memory()
        self.agreements = [Agreement(one, limits=limits) for one in self.ranks]
        self.save: Callable[[int, Generation], str] = self._digest
        self.beside: Callable[[int, Generation], object] | None = None
        self.between: Callable[[int], object] = lambda rank: None
        self.last_step = 10**9
        self.steps = [restored or 0] * self.size
        self.saved: set[tuple[int, int, int]] = set()
        self.ended: dict[tuple[int, int], Generation] = {}
        self.exited: set[int] = set()
        self.barrier = threading.Barrier(self.size)
        self.stop = threading.Event()
        for agreement in self.agreements:
            agreement.step = restored
        self._threads = [
            threading.Thread(target=self._train, args=[rank], name=f"rank-{rank}") for rank in range(self.size)
        ]

    def _digest(self, rank: int, generation: Generation) -> str:
        agreement = self.agreements[rank]
        parts = agreement.gather(generation.number, "shard", b"%d of %d" % (rank, generation.step or 0))
        assert parts == [b"%d of %d" % (other, generation.step or 0) for other in range(self.size)]
        return f"sha256:{generation.number:064x}" if self.ranks[rank].local_rank == 0 else ""

    def _train(self, rank: int) -> None:
        agreement = self.agreements[rank]
        while not self.stop.is_set() and self.steps[rank] < self.last_step:
            time.sleep(0.0005)
            self.between(rank)
            try:
                self.barrier.wait(60)
            except threading.BrokenBarrierError:
                return
            self.steps[rank] += 1
            step = agreement.step = self.steps[rank]
            if step >= agreement.due and not self._attend(rank, step):
                return

    def _attend(self, rank: int, step: int) -> bool:
        agreement = self.agreements[rank]
        while (generation := agreement.wait(step)) is not None:
            if generation.ended is not None:
                self.exited.add(rank)
                return False
            self.saved.add((generation.number, rank, step))
            if generation.beside and self.beside is not None:
                thread = threading.Thread(target=self._finish, args=[rank, generation])
                self._threads.append(thread)
                thread.start()
            else:
                self._finish(rank, generation)
        return True

    def _finish(self, rank: int, generation: Generation) -> None:
        agreement = self.agreements[rank]
        try:
            if generation.beside and self.beside is not None:
                self.beside(rank, generation)
            digest = self.save(rank, generation)
        except OSError as error:
            ended = agreement.conclude(generation.number, ok=False, error=str(error))
        except GenerationOverError as over:
            ended = over.generation
        else:
            ended = agreement.conclude(generation.number, ok=True, digest=digest)
        self.ended[generation.number, rank] = ended

    def until_ended(self, number: int, timeout_s: float = 60.0) -> Generation:
        """Wait until every rank has learnt how a generation ended; all say the same."""
        until_s = time.perf_counter() + timeout_s
        while True:
            known = [agreement.generation(number) for agreement in self.agreements]
            ends = [None if one is None else one.ended for one in known]
            if all(ends):
                assert len(set(ends)) == 1, ends
                assert known[0] is not None
                return known[0]
            assert time.perf_counter() < until_s, known
            time.sleep(0.001)

    def until(self, true: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait until something is true."""
        until_s = time.perf_counter() + timeout_s
        while not true():
            assert time.perf_counter() < until_s, [agreement.state for agreement in self.agreements]
            time.sleep(0.001)

    def until_standing(self, step: int | None) -> None:
        """Wait until all ranks stand at that step, or (None) all train."""
        self.until(lambda: all(one.standing == step for one in self.agreements))

    def until_moving(self) -> None:
        """Wait until training has gone on."""
        steps = list(self.steps)
        self.until(lambda: all(now > then for now, then in zip(self.steps, steps, strict=True)))

    def start(self) -> None:
        """Begin to train."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End training, whatever it is doing; no thread is left behind."""
        self.stop.set()
        self.barrier.abort()
        for agreement in self.agreements:
            agreement.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(60)
                assert not thread.is_alive(), thread


@contextmanager
def job(size: int = 3, *, hosts: int = 1, limits: Limits = QUICK, restored: int | None = 0) -> Iterator[Job]:
    """A job over memory that trains until the test is over."""
    memory = Memory()
    names = [f"host{rank * hosts // size}" for rank in range(size)]
    one = Job([MemoryRanks(memory, rank, size, names) for rank in range(size)], limits=limits, restored=restored)
    one.memory = memory
    one.start()
    try:
        yield one
    finally:
        one.end()
