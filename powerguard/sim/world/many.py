"""Many outages on all cores. Outage i of a run with seed s is that of seed s + i, so each can be played again alone.

A process that plays outages for another one, and ends in the middle of one when nobody wants them any more.

It imports next to nothing by itself: what is played comes as bytes, and is loaded where an interrupt can end it. While
it plays it is not interrupted, for that would leave things behind: who plays for long asks in between (`check`).
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, ClassVar

from powerguard.sim.world.policies import one
from powerguard.sim.world.report import Sample, SimulationOptions, sample
from powerguard.sim.world.site import Site


class UnwantedError(BaseException):
    """The result of this outage is no longer wanted."""


class WorkerProcess:
    """The state of a worker process: whether it is still wanted, and whether it is loading."""

    unwanted: ClassVar[bool] = False
    loading: ClassVar[bool] = False
    loaded: ClassVar[tuple[bytes, Callable[[int], Any]] | None] = None

    @classmethod
    def begin(cls, wanted: Connection) -> None:
        """Leave interrupts to the parent. wanted: ends when the parent closes it, or dies."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, cls._leave)
        threading.Thread(target=cls._listen, args=(wanted,), daemon=True).start()

    @classmethod
    def _listen(cls, wanted: Connection) -> None:
        with suppress(EOFError, OSError):
            wanted.recv_bytes()
        cls.unwanted = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    @classmethod
    def _leave(cls, *_: object) -> None:
        if cls.loading:
            raise UnwantedError

    @classmethod
    def check(cls) -> None:
        """Raise UnwantedError where nobody waits any more."""
        if cls.unwanted:
            raise UnwantedError

    @classmethod
    def play(cls, what: bytes, seeds: range) -> list[Any]:
        """Play a chunk, until nobody waits for it any more. what: a function of a seed, as `pickle` has it."""
        samples: list[Any] = []
        try:
            if cls.loaded is None or cls.loaded[0] != what:
                cls.loading = True
                cls.loaded = what, pickle.loads(what)  # noqa: S301 - from the process that has started this one
                cls.loading = False
            for seed in seeds:
                cls.check()
                samples.append(cls.loaded[1](seed))
        except UnwantedError:
            return []
        finally:
            cls.loading = False
        return samples


Play = Callable[[Site, SimulationOptions, int], Sample]
Tell = Callable[[int], None]
"""Called with the number of outages that have been played."""
_CHUNK = 50
_MOST_CHUNK = 100
"""Some seconds of a busy machine: whoever watches the progress sees that it goes on, from the first seconds."""
_AHEAD = 3
"""Chunks for each process, so that it has the next one when it ends one."""


def play_many(
    site: Site, options: SimulationOptions, *, jobs: int | None = None, tell: Tell = lambda _: None
) -> list[Sample]:
    """Play all outages of a run. jobs: processes; None: one for each core. The samples come in no order."""
    jobs = min(jobs or cores(), max(1, options.outages // _CHUNK))
    size = min(_MOST_CHUNK, max(_CHUNK // 2, options.outages // (8 * jobs)))
    return spread(_played, site, options, jobs=jobs, size=size, tell=tell)


def _played(site: Site, options: SimulationOptions, seed: int) -> Sample:
    return sample(*one(seed, site, options.policy, faults=options.faults))


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def _chunks(options: SimulationOptions, size: int) -> Iterator[range]:
    end = options.seed + options.outages
    for begin in range(options.seed, end, size):
        yield range(begin, min(begin + size, end))


def spread(play: Play, site: Site, options: SimulationOptions, *, jobs: int, size: int, tell: Tell) -> list[Sample]:
    """Play all outages in chunks of size, in so many processes; with one job in this one.

    play: a function of a module, for the processes must find it again. An interrupt ends it in the middle of whatever
    the processes are doing.
    """
    if jobs == 1:
        samples: list[Sample] = []
        for seed in range(options.seed, options.seed + options.outages):
            samples.append(play(site, options, seed))
            tell(len(samples))
        return samples
    # A fresh interpreter for each: nothing of whoever calls us (threads, event loops) is copied into it.
    context = multiprocessing.get_context("spawn")
    heard, wanted = context.Pipe(duplex=False)
    with (
        heard,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=WorkerProcess.begin, initargs=(heard,)) as pool,
    ):
        try:
            return _gathered(
                pool,
                partial(WorkerProcess.play, pickle.dumps(partial(play, site, options))),
                _chunks(options, size),
                jobs,
                tell,
            )
        except BaseException:
            wanted.close()
            # Waited for: a process that has only just begun would look in vain for what we take away when we go.
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            wanted.close()


def _gathered(
    pool: ProcessPoolExecutor,
    play: Callable[[range], list[Sample]],
    chunks: Iterator[range],
    jobs: int,
    tell: Tell,
) -> list[Sample]:
    """Keep all processes busy until the chunks are played: a few ahead, for those are what an interrupt waits for."""
    samples: list[Sample] = []
    done: SimpleQueue[Future[list[Sample]]] = SimpleQueue()

    def submit(count: int) -> int:
        ahead = list(islice(chunks, count))
        if ahead:
            with _uninterrupted():  # in this thread: another one of the caller's may take it all the same
                for seeds in ahead:
                    pool.submit(play, seeds).add_done_callback(done.put)
        return len(ahead)

    running = submit(_AHEAD * jobs)
    while running:  # as_completed would take every future's lock, and an interrupt leave some taken
        samples += done.get().result()
        running += submit(1) - 1
        tell(len(samples))
    return samples


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C while processes are started, and let them inherit that; it is raised behind the block.

    Their first second goes by with imports, before any code of ours could tell them to leave interrupts to us. The mask
    alone would not do: another thread of this process may take the signal, and Python raises it in this one.
    """
    resource_tracker.ensure_running()  # it would lift the block again when it is started
    held: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    catches = callable(handler) and threading.current_thread() is threading.main_thread()
    if catches:
        signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
        if catches:
            signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt
