"""Many outages on all cores. Outage i of a run with seed s is that of seed s + i, so each can be played again alone."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing.synchronize import Event
from typing import ClassVar

from powerguard.sim.world.policies import one
from powerguard.sim.world.report import Options, Sample, sample
from powerguard.sim.world.site import Site

Tell = Callable[[int], None]
"""Called with the number of outages that have been played."""
_CHUNK = 50
_MOST_CHUNK = 500


def play_many(site: Site, options: Options, *, jobs: int | None = None, tell: Tell = lambda _: None) -> list[Sample]:
    """Play all outages of a run. jobs: processes; None: one for each core. The samples come in no order."""
    jobs = min(jobs or len(os.sched_getaffinity(0)), max(1, options.outages // _CHUNK))
    if jobs == 1:
        samples = []
        for seed in range(options.seed, options.seed + options.outages):
            samples.append(_played(site, options, seed))
            tell(len(samples))
        return samples
    return _spread(site, options, jobs, tell)


def _played(site: Site, options: Options, seed: int) -> Sample:
    return sample(*one(seed, site, options.policy, faults=options.faults))


def _chunks(options: Options, jobs: int) -> Iterator[range]:
    size = min(_MOST_CHUNK, max(_CHUNK // 2, options.outages // (8 * jobs)))
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
    def play(cls, site: Site, options: Options, seeds: range) -> list[Sample]:
        """Play a chunk, unless nobody waits for it any more."""
        samples = []
        for seed in seeds:
            if cls.stop is not None and cls.stop.is_set():
                break
            samples.append(_played(site, options, seed))
        return samples


def _spread(site: Site, options: Options, jobs: int, tell: Tell) -> list[Sample]:
    # A fresh interpreter for each: nothing of whoever calls us (threads, event loops) is copied into it.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    samples: list[Sample] = []
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_Worker.begin, initargs=(stop,)) as pool:
        running: list[Future[list[Sample]]] = [
            pool.submit(_Worker.play, site, options, seeds) for seeds in _chunks(options, jobs)
        ]
        try:
            for done in as_completed(running):
                samples += done.result()
                tell(len(samples))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return samples
