"""How many states host memory holds: what is available is asked of the host and of every limit around the process."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from powerguard.trainer import Buffer, Parts
from powerguard.trainer.loop.checkpointer import Order, SingleProcess, StoreCheckpointer, Taken
from powerguard.trainer.store.memory import available_bytes, physical_bytes
from powerguard.trainer.store.store import Store

GB = 10**9
V2 = "0::/slurm/job_7"
V1 = "11:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"meminfo": "MemFree: 1 kB\nMemAvailable:    2048 kB\n"}, 2048 * 1024),
        ({"meminfo": "MemAvailable: lots\n"}, None),
        ({"meminfo": "MemAvailable: 9 kB\n", "self/cgroup": V2}, 9 * 1024),
        ({"self/cgroup": V2, "v2/memory.max": "max\n", "v2/memory.current": "5\n"}, None),
        ({"self/cgroup": V2, "v2/memory.max": "900\n", "v2/memory.current": "500\n"}, 400),
        (
            {
                "self/cgroup": V2,
                "v2/memory.max": "900",
                "v2/memory.current": "500",
                "v2/memory.stat": "inactive_file 70",
            },
            470,
        ),
        ({"self/cgroup": V2, "v2/memory.max": "900", "v2/memory.current": "950"}, 0),
        (
            {
                "meminfo": "MemAvailable: 1 kB",
                "self/cgroup": V2,
                "v2/slurm/memory.max": "600",
                "v2/slurm/memory.current": "500",
                "v2/slurm/job_7/memory.max": "300",
                "v2/slurm/job_7/memory.current": "50",
            },
            100,
        ),
        (
            {
                "self/cgroup": V1,
                "v2/memory/memory.limit_in_bytes": "900",
                "v2/memory/memory.usage_in_bytes": "500",
                "v2/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 70",
            },
            470,
        ),
        ({"meminfo": "MemAvailable: 1 kB", "self/cgroup": "odd\n\n::\n7:\n"}, 1024),
    ],
    ids=["none", "host", "odd", "no group", "no limit", "v2", "v2 cache", "v2 over", "v2 outer", "v1", "odd groups"],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_bytes(tmp_path, tmp_path / "v2") == expected


def test_this_host_answers() -> None:
    free = available_bytes()
    assert free is not None
    assert 0 < free < physical_bytes()


class Sized:
    """A state of so many bytes, of which none is touched."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def items(self) -> list[Buffer]:
        """One buffer."""
        return [Buffer("w", memoryview(bytearray(self.size_bytes)))]

    def load(self, items: object) -> None:
        """Not asked for."""


@pytest.mark.parametrize(
    ("available", "processes", "wanted", "snapshots"),
    [
        (27 << 20, 1, None, 2),
        (26 << 20, 1, None, 1),
        (27 << 20, 2, None, 1),
        (54 << 20, 2, None, 2),
        (None, 1, None, 2),
        (1 << 20, 1, 2, 2),
        (1 << 40, 1, 1, 1),
    ],
    ids=["fits", "short", "shared and short", "shared", "not known", "wanted two", "wanted one"],
)
def test_two_snapshots_leave_a_quarter_or_there_is_one(
    tmp_path: Path,
    available: int | None,
    processes: int,
    wanted: int | None,
    snapshots: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store(tmp_path, job="job", slots=0)
    kept = StoreCheckpointer(
        Sized((10 << 20) - 4096), store, snapshots=wanted, processes=processes, available=lambda: available
    )
    assert kept.snapshots == 1, "until the state is measured"
    assert kept.measure() == (10 << 20) - 4096
    assert kept.snapshots == snapshots
    is_short = wanted is None and snapshots == 1
    assert ("one snapshot of the state, not two" in caplog.text) == is_short
    kept.close()


PEAK = """
import sys, time
from pathlib import Path
from powerguard.trainer import Guard, Parts
size, snapshots, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
state = bytearray(b"x") * size
def load(saved):
    state[:] = saved["w"]
def peak():  # of this program alone: getrusage() also tells that of the one that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
with Guard(Parts(lambda: {"w": state}, load), root, job="job", socket=None, every_s=None, snapshots=snapshots) as guard:
    done = guard.restore()
    before = peak()
    for step in range(done + 1, done + 4):
        guard.step(step)
        guard.save(step)
        while guard.requests.pace.limit is None:
            time.sleep(0.1)  # until all memory is touched, and room is made
    assert guard.stats().snapshots == snapshots
print(before, peak())
"""


@pytest.mark.parametrize("snapshots", [1, 2])
def test_host_memory_holds_as_many_states_as_are_set(tmp_path: Path, snapshots: int) -> None:
    """Peak of resident memory over three saves, in a process of its own."""
    size = 200 << 20
    ended = subprocess.run(
        [sys.executable, "-c", PEAK, str(size), str(snapshots), tmp_path],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    before, peak = map(int, ended.stdout.split())
    assert snapshots - 0.1 <= (peak - before) / size <= snapshots + 0.1


def test_where_no_memory_can_be_had_old_checkpoints_go_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As under a limit of address space, or without overcommit: else they would fill the disk."""
    with Store(tmp_path, job="llm") as store:
        kept = StoreCheckpointer(Parts(lambda: {"w": bytes(10)}, lambda _: None), store)
        for step in (1, 2, 3):
            taken = kept.take(step, 0)
            assert isinstance(taken, Taken)
            order = Order(reason="test", urgent=False, cancel=Event(), others=SingleProcess())
            kept.write(taken, lambda *_: None, order)
        with closing(StoreCheckpointer(Parts(dict, lambda _: None), store)) as empty:
            empty.prepare(1 << 47, Event())  # more than there are addresses
        assert [each.step for each in store.found()] == [3]
    assert "host memory for a snapshot cannot be had: " in caplog.text
