"""The emergency write against fio on the same disk, in turns, and torch's own checkpoint beside them.

Both write past the page cache, in pieces of 8 MiB, eight at a time, over blocks that are there, and flush at the end;
ours also makes the digests, writes the manifest and flushes all names. A save is shown twice: with the copy of the
state into host memory, as a training sees it, and from the end of that copy, as the disk sees it. The ratio of a round
is that of two neighbours in time: a disk that others use too is not the same from one minute to the next. The folder is
build/bench.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench import dcp
from bench.figure import Figure
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.manifest import Manifest
from powerguard.trainer.store.shards import Snapshot
from powerguard.trainer.store.store import Store
from tests.peers import find

SIZE: Final = 2_400_000_000
LARGE: Final = 8_500_000_000
ROUNDS: Final = 7
LARGE_ROUNDS: Final = 3
WRITE_BAR: Final = ">= 0.9 of fio O_DIRECT"
CPU_BAR: Final = "<= 0.1 CPU s/GB"
_BLOCK: Final = 2400 << 20
"""Most memory for the state beside its snapshot: larger than any cache, so that the copy reads from memory."""

_FIO: Final = (
    *(
        "--name=emergency",
        "--rw=write",
        "--direct=1",
        "--bs=8M",
        "--numjobs=2",
        "--iodepth=4",
        "--end_fsync=1",
        "--overwrite=1",
    ),
    *("--randrepeat=0", "--refill_buffers=0", "--group_reporting", "--output-format=json"),
)


@dataclass
class Rounds:
    """What the rounds of one comparison came to, in GB/s, CPU seconds a GB, and seconds.

    save, save_ratio, save_cpu: with the copy; write, ratio, cpu: without it.
    """

    save: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)
    save_ratio: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    psync: list[float] = field(default_factory=list)
    save_cpu: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    snapshot: list[float] = field(default_factory=list)


class Ours:
    """A job whose state is a few large buffers."""

    def __init__(self, folder: Path, size: int) -> None:
        # A larger state is this block several times over, so that the machine need not have twice its memory.
        block = os.urandom(1 << 20) * min(_BLOCK >> 20, -(-size >> 20))
        starts = range(0, size, len(block))
        self._items = [Buffer(f"part-{at}", memoryview(block)[: size - at]) for at in starts]
        self._store = Store(folder, job="bench", slots=1)
        self._store.prepare(size + 4096)
        self._snapshot = Snapshot(size + 4096)
        self._step = 0

    def save(self, rounds: Rounds) -> None:
        """One emergency: snapshot, then all that must be on the disk before the answer."""
        self._step += 1
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        layout = self._snapshot.take([*self._items, Buffer.json("step", self._step)])
        taken_s, cpu_taken_s = time.perf_counter(), time.process_time()
        name = self._store.name(self._step, os.urandom(4).hex())
        shard = self._store.write_shard(name, 0, self._snapshot, layout, urgent=True)
        written_s = time.perf_counter()
        manifest = Manifest(
            job="bench", step=self._step, created="now", reason="bench", ranks=1, hosts=1, shards=(shard.packed(),)
        )
        self._store.commit(name, manifest)
        done_s, cpu_done_s = time.perf_counter(), time.process_time()
        if self._store.last_write is None or not (self._store.last_write.direct and self._store.last_write.in_place):
            print("    (this disk took it through the page cache, or into new blocks)")
        self._store.prune()
        gb = layout.size_bytes / 1e9
        rounds.snapshot.append(gb / (taken_s - began_s))
        rounds.save.append(gb / (done_s - began_s))
        rounds.write.append(gb / (done_s - taken_s))
        rounds.commit.append(done_s - written_s)
        rounds.save_cpu.append((cpu_done_s - cpu_began_s) / gb)
        rounds.cpu.append((cpu_done_s - cpu_taken_s) / gb)

    def close(self) -> None:
        self._snapshot.close()
        self._store.close()


def fio(program: str, folder: Path, size: int, engine: str = "io_uring") -> float:
    """Write as much with fio; return GB/s, with its flush. engine: psync has one piece under way in each job."""
    command = [program, *_FIO, f"--ioengine={engine}", f"--directory={folder}", f"--size={size // 2 & ~4095}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    report: Any = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    # fio's own rate counts the flush of each job; starting two processes does not belong to the disk.
    return float(report["write"]["io_bytes"]) / 1e6 / float(report["job_runtime"]) * 2


def compare(program: str, folder: Path, size: int, rounds: int) -> Rounds:
    """Take turns; the first turn of each only warms up."""
    found = Rounds()
    for name in ("ours", "fio"):
        (folder / name).mkdir()
    job = Ours(folder / "ours", size)
    try:
        for number in range(rounds + 3):  # both kept checkpoints and the slot were written once after three
            one = Rounds() if number < 3 else found
            order = (True, False) if number % 2 else (False, True)
            for is_ours in order:
                if is_ours:
                    job.save(one)
                else:
                    one.fio.append(fio(program, folder / "fio", size))
            one.psync.append(fio(program, folder / "fio", size, "psync"))
            one.save_ratio.append(one.save[-1] / one.fio[-1])
            one.ratio.append(one.write[-1] / one.fio[-1])
    finally:
        job.close()
        shutil.rmtree(folder / "ours")
        shutil.rmtree(folder / "fio")
    return found


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Something that wants every core for itself."""
    count = len(os.sched_getaffinity(0))
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def figures_of(what: str, rounds: Rounds) -> list[Figure]:
    return [
        Figure(name=f"emergency save with the copy, {what}", unit="GB/s", values=tuple(rounds.save)),
        Figure(name=f"emergency write without the copy, {what}", unit="GB/s", values=tuple(rounds.write)),
        Figure(name=f"fio io_uring, {what}", unit="GB/s", values=tuple(rounds.fio)),
        Figure(name=f"save with the copy / fio, paired, {what}", unit="", values=tuple(rounds.save_ratio)),
        Figure(
            name=f"write without the copy / fio, paired, {what}", unit="", values=tuple(rounds.ratio), bar=WRITE_BAR
        ),
        Figure(name=f"fio psync, {what}", unit="GB/s", values=tuple(rounds.psync)),
        Figure(name=f"CPU with the copy, {what}", unit="s/GB", values=tuple(rounds.save_cpu)),
        Figure(name=f"CPU without the copy, {what}", unit="s/GB", values=tuple(rounds.cpu), bar=CPU_BAR),
        Figure(name=f"commit, {what}", unit="s", values=tuple(rounds.commit)),
        Figure(name=f"snapshot in host memory, {what}", unit="GB/s", values=tuple(rounds.snapshot)),
    ]


def run(*, quick: bool) -> list[Figure]:
    """Measure; what this machine has no room or no program for is named and left out."""
    program = find("fio")
    if program is None:
        print("  no fio here (scripts/test-peers gets it): nothing to compare with")
        return []
    folder = Path("build/bench").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    size, rounds = (300_000_000, 3) if quick else (SIZE, ROUNDS)
    figures: list[Figure] = []
    try:
        figures += figures_of(f"{size / 1e9:.1f} GB", compare(program, folder, size, rounds))
        with busy_cores():
            figures += figures_of(f"{size / 1e9:.1f} GB, all cores busy", compare(program, folder, size, rounds))
        figures += dcp.saved(folder / "dcp", size, 2 if quick else 3)
        if not quick and has_room(folder):
            figures += figures_of(f"{LARGE / 1e9:.1f} GB", compare(program, folder, LARGE, LARGE_ROUNDS))
        seconds = LARGE / 1e9 / median(figures[0].values)
        print(f"  projected from the first row, with the copy: {LARGE / 1e9:.1f} GB in {seconds:.1f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def has_room(folder: Path) -> bool:
    """Three checkpoints and fio's file on the disk, and the snapshot in memory."""
    found = os.statvfs(folder)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if found.f_bavail * found.f_frsize < 5 * LARGE or free_kib * 1024 < 1.4 * LARGE:
        print(f"  {LARGE / 1e9:.1f} GB is left out: too little room on this disk, or in memory")
        return False
    return True
