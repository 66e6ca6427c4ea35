"""Many outages on all cores. Outage i of a run with seed s is that of seed s + i, so each can be played again alone."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.pool import Pool
from typing import TypeVar

from powerguard.sim.world import rack
from powerguard.sim.world.policies import one
from powerguard.sim.world.rack import RackSample
from powerguard.sim.world.report import Sample, SimulationOptions, sample
from powerguard.sim.world.site import Site

Played = TypeVar("Played")
Play = Callable[[Site, SimulationOptions, int], Played]
Progress = Callable[[int], None]
"""Called with the number of outages that have been played."""
_CHUNK = 50
_RACKS = 4


def play_many(
    site: Site, options: SimulationOptions, *, jobs: int | None = None, progress: Progress = lambda _: None
) -> list[Sample]:
    """Play all outages of a run. jobs: processes; None: one for each core. The samples come in no order."""
    return spread(_played, site, options, jobs=jobs, chunk=_CHUNK, progress=progress)


def play_racks(site: Site, options: SimulationOptions, *, jobs: int | None, progress: Progress) -> list[RackSample]:
    """Play all outages of a rack."""
    return spread(rack.played, site, options, jobs=jobs, chunk=_RACKS, progress=progress)


def _played(site: Site, options: SimulationOptions, seed: int) -> Sample:
    return sample(*one(seed, site, options.policy, faults=options.faults))


def spread(
    play: Play[Played], site: Site, options: SimulationOptions, *, jobs: int | None, chunk: int, progress: Progress
) -> list[Played]:
    """Play all outages, `chunk` of them at a time in each process. An interrupt ends all processes at once.

    play: can be pickled. jobs: processes; None: one for each core; one that would not fill a chunk is not started.
    """
    seeds = range(options.seed, options.seed + options.outages)
    jobs = min(jobs or cores(), max(1, len(seeds) // chunk))
    played = partial(play, site, options)
    if jobs == 1:
        return _counted(map(played, seeds), progress)
    with _processes(jobs) as pool:
        return _counted(pool.imap_unordered(played, seeds, chunksize=chunk), progress)


def _counted(samples: Iterable[Played], progress: Progress) -> list[Played]:
    found: list[Played] = []
    for each in samples:
        found.append(each)
        progress(len(found))
    return found


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def _processes(count: int) -> Pool:
    """Start fresh interpreters. They never receive Ctrl-C: the pool ends them."""
    resource_tracker.ensure_running()  # It would lift the block when it is started.
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return multiprocessing.get_context("spawn").Pool(count)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
