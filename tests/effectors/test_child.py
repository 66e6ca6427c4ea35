"""What a program leaves behind holds nothing of the daemon's."""

import os
import signal
from pathlib import Path

from powerguard.effectors.child import run_child


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_program_that_leaves_a_child_with_its_pipes_leaves_none_of_them_here(tmp_path: Path) -> None:
    """It is repeated, as a message is, for weeks: each time would cost two descriptors."""
    script = f'sleep 60 & echo $! >>"{tmp_path}/left"; exit 0'
    counts = []
    try:
        for _ in range(4):
            ended = await run_child(["sh", "-c", script], limit_s=0.2)
            assert ended.timed_out
            counts.append(descriptors())
    finally:
        for pid in (tmp_path / "left").read_text(encoding="ascii").split():
            os.kill(int(pid), signal.SIGKILL)
    assert counts[1:] == [counts[0]] * 3
