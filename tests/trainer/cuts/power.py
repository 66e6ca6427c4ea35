"""Cut the power of a real file system at random instants, while something saves into it, and see what is left.

    python -m tests.trainer.cuts [--fs ext4 xfs] [--cuts 20] PATTERN ...      (as root; prints a table)

The file system lies in a file on another one that can copy files by reference. Such a copy, made in an instant, is the
disk as a power cut would leave it: whatever was still in memory is lost. It is mounted (the journal is replayed), and a
judge opens what is there. What this does not show is a disk that loses its own cache.

A pattern is a program with two parts (see patterns.py). The writer saves for ever, one step after the other, and prints
a step's number once it believes it to be durable. The judge reads paths and answers each with one line of JSON:
{"verdict": "good", "none" or "torn", "step": N, "refused": N}.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tests.trainer.cuts.loops import make, mounted, run

DISK_BYTES: Final = {"ext4": 160 << 20, "xfs": 320 << 20}
BASE_BYTES: Final = 1500 << 20


@dataclass
class Tally:
    """What came of the cuts: good, none (nothing could be loaded), torn (wrong data taken for good).

    lost: what had been acknowledged before the cut was not there. refused: what was found, and seen to be bad.
    """

    pattern: str
    kind: str
    cuts: int = 0
    good: int = 0
    none: int = 0
    torn: int = 0
    lost: int = 0
    refused: int = 0

    def __str__(self) -> str:
        return (
            f"{self.pattern:28} {self.kind:6} {self.cuts:5} {self.good:6} {self.none:6} {self.torn:6} {self.lost:6} "
            f"{self.refused:8}"
        )


HEAD: Final = f"{'pattern':28} {'fs':6} {'cuts':>5} {'good':>6} {'none':>6} {'torn':>6} {'lost':>6} {'refused':>8}"


class Acknowledged:
    """The newest step that the writer has printed."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._descriptor = pipe.fileno()
        self._rest = b""
        self.step = 0
        os.set_blocking(self._descriptor, False)

    def look(self) -> int:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._descriptor, 65536):
                *lines, self._rest = (self._rest + piece).split(b"\n")
                self.step = max([self.step, *(int(line) for line in lines)])
        return self.step


class Judge:
    """Asks a pattern's judge about one path after the other."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, path: Path) -> tuple[str, int, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["verdict"], answer["step"], answer["refused"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def base(scratch: Path) -> Iterator[Path]:
    """A file system that copies files by reference, for as many disks as are wanted one after the other."""
    make("xfs", scratch / "base.img", BASE_BYTES)
    with mounted(scratch / "base.img", scratch / "base", "xfs") as folder:
        yield folder


PROGRAM: Final = (sys.executable, "-m", "tests.trainer.cuts.patterns")


def cut_power(
    base: Path,
    kind: str,
    pattern: str,
    *,
    cuts: int,
    seed: int,
    wait_s: tuple[float, float] = (0.0, 0.3),
    promised: bool = False,
    program: Sequence[str] = PROGRAM,
) -> Tally:
    """Run a pattern's writer on a new file system, and cut so many times. wait_s: from one cut to the next.

    promised: from the second cut on, only once a step was acknowledged: else a slow writer has nothing to lose.
    program: what plays writer and judge.
    """
    rng = random.Random(seed)
    tally = Tally(pattern, kind)
    disk, frozen = base / "disk.img", base / "frozen.img"
    make(kind, disk, DISK_BYTES[kind])
    judge = Judge([*program, "judge", pattern])
    try:
        with (
            mounted(disk, base / "disk", kind) as there,
            subprocess.Popen(
                [*program, "write", pattern, str(there / "run")],
                stdout=subprocess.PIPE,
            ) as writer,
        ):
            assert writer.stdout is not None
            acknowledged = Acknowledged(writer.stdout)
            try:
                while tally.cuts < cuts:
                    time.sleep(rng.uniform(*wait_s))
                    if writer.poll() is not None:
                        msg = f"{pattern}: the writer ended"
                        raise RuntimeError(msg)
                    if not (there / "run").exists():
                        continue
                    step = acknowledged.look()
                    if promised and tally.cuts and not step:
                        continue
                    run("cp", "--reflink=always", str(disk), str(frozen))
                    with mounted(frozen, base / "after", kind) as after:
                        count(tally, step, judge(after / "run"))
                    frozen.unlink()
            finally:
                writer.kill()
    finally:
        judge.close()
        disk.unlink()
    return tally


def count(tally: Tally, acknowledged: int, found: tuple[str, int, int]) -> None:
    """Add one cut."""
    verdict, step, refused = found
    tally.cuts += 1
    tally.good += verdict == "good"
    tally.none += verdict == "none"
    tally.torn += verdict == "torn"
    tally.lost += step < acknowledged
    tally.refused += refused
