"""What a program leaves behind holds nothing of the daemon's, and does not count as a failure."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import time
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


@pytest.mark.parametrize("mode", [None, 0o644])
async def test_a_program_that_cannot_be_started_is_an_error(tmp_path: Path, mode: int | None) -> None:
    program = tmp_path / "save"
    if mode is not None:
        program.write_text("#!/bin/sh\n")
        program.chmod(mode)
    with pytest.raises(FileNotFoundError if mode is None else PermissionError) as error:
        await run_child([str(program)], limit_s=5.0)
    assert error.value.filename == str(program)
    ended = await run_child(["sh", "-c", "exit 127"], limit_s=5.0)
    assert ended.returncode == 127


@pytest.mark.parametrize("is_interpreter", [False, True])
async def test_a_program_on_a_disk_that_hangs_holds_nothing_up(tmp_path: Path, *, is_interpreter: bool) -> None:
    """A lease holds up each process that opens the file, as a file server without power does."""
    hung, program = tmp_path / "hung", tmp_path / "save"
    shutil.copy("/bin/true", hung)
    program.write_text(f"#!{hung}\n")
    program.chmod(0o755)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    held = os.open(hung, os.O_RDONLY)
    try:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        began_s, beats = time.perf_counter(), 0
        running = asyncio.create_task(run_child([str(program if is_interpreter else hung)], limit_s=0.5))
        while not running.done():
            await asyncio.sleep(0.05)
            beats += 1
        assert running.result().timed_out
        assert time.perf_counter() - began_s < 10.0  # the kernel ends a lease after 45 s
        assert beats > 3
    finally:
        os.close(held)
        signal.signal(signal.SIGIO, before)


async def test_a_program_that_is_killed_at_its_limit_has_said_what_it_said() -> None:
    ended = await run_child(["sh", "-c", "echo at work >&2; exec sleep 60"], limit_s=5.0)
    assert (ended.returncode, ended.stderr, ended.timed_out) == (-signal.SIGKILL, b"at work\n", True)
