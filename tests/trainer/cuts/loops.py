"""Real file systems in files: made, mounted, frozen as a power cut leaves them, mounted again. Needs root."""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.peers import require

MAKERS: Final = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096"],  # nothing held back for root: full is full
    "ext4-1k": ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "1024"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}
SMALLEST: Final = {"ext4": 64 << 20, "ext4-1k": 32 << 20, "xfs": 300 << 20, "btrfs": 512 << 20}


_CLONE_NEWNS: Final = 0x00020000  # linux/sched.h


def needs_loop_devices() -> None:
    """Skip where no file system can be mounted from a file. From here on this process's mounts are its own."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists() or not has_mounts_of_its_own():
        pytest.skip("needs root and loop devices, to mount file systems of its own")


@cache
def has_mounts_of_its_own() -> bool:
    """Leave the mounts of the machine alone: what is mounted here goes with this process, also when it is killed."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        return False  # a container's root may not
    run("mount", "--make-rprivate", "/")
    return True


def make(kind: str, image: Path, size_bytes: int) -> None:
    """Make an image file with an empty file system in it."""
    program, *options = MAKERS[kind]
    with image.open("wb") as file:
        file.truncate(size_bytes)
    run(require(program), *options, str(image))


@contextlib.contextmanager
def mounted(image: Path, where: Path, kind: str) -> Iterator[Path]:
    """Mount an image, as after a boot: the journal is replayed."""
    where.mkdir(exist_ok=True)
    options = "loop,nouuid" if kind.startswith("xfs") else "loop"
    run("mount", "-o", options, str(image), str(where))
    try:
        yield where
    finally:
        run("umount", str(where))


def run(*command: str) -> None:
    """Run a program; what it says goes into the error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        msg = f"{' '.join(command)}: {done.stderr.strip()}"
        raise RuntimeError(msg)
