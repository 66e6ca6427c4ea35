"""What a busy machine takes, so that nobody else is blamed for it."""

import asyncio
import os
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_TICK_S: Final = 0.01


@dataclass(slots=True)
class Seen:
    """late_s: by how much this loop came late, all in all. worst_s: for how long it stood still by its own doing."""

    late_s: float = 0.0
    worst_s: float = 0.0


def queued_s() -> float:
    """Seconds in which this thread could have run and had no processor (Linux, schedstat); 0 where nobody tells."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def unhindered_s() -> float:
    """Return a clock that stands while this thread waits for a busy processor."""
    return time.monotonic() - queued_s()


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """A disk with room for so much; as with a full one, write() fails (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@asynccontextmanager
async def watched() -> AsyncIterator[Seen]:
    """Watch this thread's loop meanwhile."""
    seen = Seen()
    watching = asyncio.get_running_loop().create_task(_watch(seen))
    try:
        yield seen
    finally:
        watching.cancel()
        await asyncio.wait([watching])


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Make a folder for what has a second or less to become durable: too little on a disk that others keep busy.

    Where there is no such place, in /tmp. Nothing can be executed there.
    """
    place = next(place for place in ("/dev/shm", "/tmp") if os.access(place, os.W_OK | os.X_OK))
    with tempfile.TemporaryDirectory(prefix="pg-", dir=place) as folder:
        yield Path(folder)


async def at_once(function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - as asyncio.to_thread
    """Run it here, and not in a thread: one that a busy machine starts late would end the patience of its caller."""
    return function(*args)


def quickly(limit_s: float, tries: int = 8) -> Iterator[None]:
    """Do it again until it took less than limit_s: `for _ in quickly(2.0): ...`. What hangs takes longer every time."""
    took_s = []
    for _ in range(tries):
        began_s = time.monotonic()
        yield
        took_s.append(time.monotonic() - began_s)
        if took_s[-1] < limit_s:
            return
    msg = f"never within {limit_s:g} s: {took_s}"
    raise AssertionError(msg)


async def _watch(seen: Seen) -> None:
    loop = asyncio.get_running_loop()
    while True:
        before_s, queued_before_s = loop.time(), queued_s()
        await asyncio.sleep(_TICK_S)
        late_s = loop.time() - before_s - _TICK_S
        seen.late_s += late_s
        seen.worst_s = max(seen.worst_s, late_s - (queued_s() - queued_before_s))
