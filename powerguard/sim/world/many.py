"""Many outages on all cores. Outage i of a run with seed s is that of seed s + i, so each can be played again alone."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.synchronize import Event
from queue import SimpleQueue
from typing import ClassVar

from powerguard.sim.world.policies import one
from powerguard.sim.world.report import Options, Sample, sample
from powerguard.sim.world.site import Site

Play = Callable[[Site, Options, int], Sample]
Tell = Callable[[int], None]
"""Called with the number of outages that have been played."""
_CHUNK = 50
_MOST_CHUNK = 500


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


class _Worker:
    """What a worker process knows: whether it is still wanted."""

    stop: ClassVar[Event | None] = None

    @classmethod
    def begin(cls, stop: Event) -> None:
        """Leave interrupts to the parent, which sets `stop`."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        cls.stop = stop

    @classmethod
    def play(cls, play: Play, site: Site, options: Options, seeds: range) -> list[Sample]:
        """Play a chunk, unless nobody waits for it any more: told so, or because whoever began it was killed."""
        samples = []
        parent = multiprocessing.parent_process()
        for seed in seeds:
            if (cls.stop is not None and cls.stop.is_set()) or (parent is not None and not parent.is_alive()):
                break
            samples.append(play(site, options, seed))
        return samples


def spread(play: Play, site: Site, options: Options, *, jobs: int, size: int, tell: Tell) -> list[Sample]:
    """Play all outages in chunks of size, in so many processes; with one job in this one.

    play: a function of a module, for the processes must find it again. An interrupt ends it after the outages that run.
    """
    samples: list[Sample] = []
    if jobs == 1:
        for seed in range(options.seed, options.seed + options.outages):
            samples.append(play(site, options, seed))
            tell(len(samples))
        return samples
    # A fresh interpreter for each: nothing of whoever calls us (threads, event loops) is copied into it.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    done: SimpleQueue[Future[list[Sample]]] = SimpleQueue()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_Worker.begin, initargs=(stop,)) as pool:
        try:
            with _uninterrupted():  # in this thread: another one of the caller's may take it all the same
                running = 0
                for seeds in _chunks(options, size):
                    pool.submit(_Worker.play, play, site, options, seeds).add_done_callback(done.put)
                    running += 1
            for _ in range(running):  # as_completed would take every future's lock, and an interrupt leave some taken
                samples += done.get().result()
                tell(len(samples))
        except BaseException:
            stop.set()
            # Waited for: a process that has only just begun would look in vain for what we take away when we go.
            pool.shutdown(wait=True, cancel_futures=True)
            raise
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
