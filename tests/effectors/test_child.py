"""What a program leaves behind holds nothing of the daemon's, and does not count as a failure."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerguard.effectors.child import run_child


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def leaving(folder: Path, status: int = 0) -> Iterator[list[str]]:
    """Yield a program that ends at once, and leaves a child with its output."""
    pids = folder / "left"
    pids.touch()
    try:
        yield ["sh", "-c", f'sleep 60 & echo $! >>"{pids}"; echo said; exit {status}']
    finally:
        for pid in pids.read_text(encoding="ascii").split():
            os.kill(int(pid), signal.SIGKILL)


async def test_a_program_that_leaves_a_child_with_its_pipes_leaves_none_of_them_here(tmp_path: Path) -> None:
    """It is repeated, as a message is, for weeks: each time would cost two descriptors."""
    counts = []
    with leaving(tmp_path) as argv:
        for _ in range(4):
            await run_child(argv, limit_s=0.2)
            counts.append(descriptors())
    assert counts[1:] == [counts[0]] * 3


@pytest.mark.parametrize("status", [0, 3])
async def test_a_program_that_leaves_a_child_with_its_pipes_has_ended_as_it_says(tmp_path: Path, status: int) -> None:
    """As if it had timed out, a message that it has sent would be sent again, and training started twice."""
    with leaving(tmp_path, status) as argv:
        ended = await run_child(argv, limit_s=5.0)
    assert (ended.returncode, ended.stdout, ended.timed_out, ended.left_open) == (status, b"said\n", False, True)


async def test_a_program_that_is_killed_at_its_limit_has_said_what_it_said() -> None:
    ended = await run_child(["sh", "-c", "echo at work >&2; exec sleep 60"], limit_s=5.0)
    assert (ended.returncode, ended.stderr, ended.timed_out) == (-signal.SIGKILL, b"at work\n", True)
