"""Many outages on all cores. Outage i of a run with seed s is that of seed s + i, so each can be played again alone."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from queue import SimpleQueue

from powerguard.sim.world.policies import one
from powerguard.sim.world.report import Options, Sample, sample
from powerguard.sim.world.site import Site
from powerguard.sim.world.worker import Worker

Play = Callable[[Site, Options, int], Sample]
Tell = Callable[[int], None]
"""Called with the number of outages that have been played."""
_CHUNK = 50
_MOST_CHUNK = 100
"""Some seconds of a busy machine: whoever watches the progress sees that it goes on, from the first seconds."""
_AHEAD = 3
"""Chunks for each process, so that it has the next one when it ends one."""


def play_many(site: Site, options: Options, *, jobs: int | None = None, tell: Tell = lambda _: None) -> list[Sample]:
    """Play all outages of a run. jobs: processes; None: one for each core. The samples come in no order."""
    jobs = min(jobs or cores(), max(1, options.outages // _CHUNK))
    size = min(_MOST_CHUNK, max(_CHUNK // 2, options.outages // (8 * jobs)))
    return spread(_played, site, options, jobs=jobs, size=size, tell=tell)


def _played(site: Site, options: Options, seed: int) -> Sample:
    return sample(*one(seed, site, options.policy, faults=options.faults))


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def _chunks(options: Options, size: int) -> Iterator[range]:
    end = options.seed + options.outages
    for begin in range(options.seed, end, size):
        yield range(begin, min(begin + size, end))


def spread(play: Play, site: Site, options: Options, *, jobs: int, size: int, tell: Tell) -> list[Sample]:
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
        ProcessPoolExecutor(jobs, mp_context=context, initializer=Worker.begin, initargs=(heard,)) as pool,
    ):
        try:
            return _gathered(
                pool,
                partial(Worker.play, pickle.dumps(partial(play, site, options))),
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
