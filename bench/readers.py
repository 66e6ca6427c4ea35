"""A thousand hosts on one upsd: how fast it answers, how old readings get, and how all come back after its restart.

Each reader is powerguard's own source, as of a host that shares the UPS; all run in this process, and upsd next to it.
An answer is timed by a process of its own, as one more host would see it. A upsd that was restarted has no values until
its driver is connected again (5 s): it counts as up from then on.
"""

import asyncio
import contextlib
import json
import math
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import structlog

from bench.figure import Figure
from powerguard.clock import boottime_s
from powerguard.core.model.events import Reading, SourceFailed
from powerguard.ups.nut.options import NutOptions
from powerguard.ups.nut.source import SPREAD_S, NutSource
from tests.peers.nut import Upsd, upsd

_WATCHED_S, _QUICK_S = 30.0, 5.0
_STARTED_WITHIN_S = 60.0
_BACK_WITHIN_S = 60.0
_PACE_S = 0.02


@dataclass
class _Reader:
    """What one host has read. ages_s: of the reading before, each time that a new one came."""

    at_s: float = -math.inf
    ages_s: list[float] = field(default_factory=list)
    failures: int = 0

    def publish(self, event: Reading | SourceFailed) -> None:
        if isinstance(event, SourceFailed):
            self.failures += 1
            return
        self.ages_s.append(event.at_s - self.at_s)
        self.at_s = event.at_s


def run(*, quick: bool) -> list[Figure]:
    """Measure all four."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # upsd inherits it: a descriptor for each host
    return asyncio.run(_measured(50 if quick else 1000, _QUICK_S if quick else _WATCHED_S))


async def _measured(hosts: int, watched_s: float) -> list[Figure]:
    async with upsd() as served, _reading(served, hosts) as readers:
        for each in readers:
            each.ages_s.clear()
        answers = await _answers(served, watched_s)
        ages = [age_s for each in readers for age_s in each.ages_s]
        await served.kill()
        await served.start()
        await served.shows("OL")
        up_s = boottime_s()
        with contextlib.suppress(TimeoutError):
            await _until_read(readers, up_s, _BACK_WITHIN_S)
        back = [each.at_s - up_s for each in readers if each.at_s >= up_s]
    return [
        Figure(name=f"upsd with {hosts} hosts: answer to one more", unit="ms", values=answers, bar="p99 <= 10"),
        Figure(
            name=f"upsd with {hosts} hosts: age of a reading when the next comes",
            unit="s",
            values=tuple(ages),
            bar="<= 3",
        ),
        Figure(name="upsd is up again -> a host reads it", unit="s", values=tuple(back), bar="<= 10"),
        Figure(name=f"hosts of {hosts} that did not come back", unit="hosts", values=(hosts - len(back),), bar="0"),
    ]


@contextlib.asynccontextmanager
async def _reading(served: Upsd, hosts: int) -> AsyncIterator[list[_Reader]]:
    """Let so many hosts read; return when each has a reading."""
    options = NutOptions.model_validate({"kind": "nut", "host": "127.0.0.1", "port": served.port, "name": "dsim"})
    readers = [_Reader() for _ in range(hosts)]
    loop, tasks = asyncio.get_running_loop(), []
    try:
        for each in readers:
            source = NutSource(options, ups="rack", clock=boottime_s, spread_s=SPREAD_S)
            tasks.append(loop.create_task(source.run(each.publish)))
            await asyncio.sleep(options.poll_s / hosts)  # hosts are not started in one moment
        await _until_read(readers, 0.0, _STARTED_WITHIN_S)
        yield readers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _until_read(readers: list[_Reader], since_s: float, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not all(each.at_s >= since_s for each in readers):  # noqa: ASYNC110 - each reader only writes a time
            await asyncio.sleep(_PACE_S)


async def _answers(served: Upsd, watched_s: float) -> tuple[float, ...]:
    """Return how many milliseconds each answer took."""
    argv = (sys.executable, "-m", "bench.readers", str(served.port), str(watched_s))
    child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    return tuple(json.loads(out))


def _asked(port: int, watched_s: float) -> list[float]:
    """Ask for the status again and again, on one connection. Returns milliseconds.

    A list of all variables takes 44 ms more: upsd sends it line by line, and the kernel delays the acknowledgement.
    """
    found: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as link, link.makefile("rb") as answers:
        end_s = time.monotonic() + watched_s
        while (asked_s := time.monotonic()) < end_s:
            link.sendall(b"GET VAR dsim ups.status\n")
            answers.readline()
            found.append(1000.0 * (time.monotonic() - asked_s))
            time.sleep(_PACE_S)
    return found


if __name__ == "__main__":
    print(json.dumps(_asked(int(sys.argv[1]), float(sys.argv[2]))))
