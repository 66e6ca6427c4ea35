"""What the folder of a job's checkpoints takes, what there is for it, and what would be right where that is less."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from powerguard.trainer.disk import is_gone

FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_OURS: Final = ("step-*", ".slot-*", "bad-*")


@dataclass(frozen=True, slots=True)
class Room:
    """The room of one root. keep: how many checkpoints stay. slots: how many are held ready for an emergency."""

    root: Path
    keep: int
    slots: int

    def shortage(self, checkpoint_bytes: int, ready: int) -> str:
        """Say what is missing for all of them at this size; "" when nothing is. ready: how many slots hold one now."""
        wanted, free = (self.keep + self.slots) * checkpoint_bytes, free_bytes(self.root)
        there = free + self._held_bytes()
        if there >= wanted:
            return ""
        means = "an emergency checkpoint may find no room" if not ready else "an emergency has room, and fewer are kept"
        return (
            f"{self.root}: takes {amount(wanted)}, for {self._each()} of {amount(checkpoint_bytes)}; there are"
            f" {amount(there)}, {amount(free)} of it free: {means} ({self._right(wanted - there)})"
        )

    @contextmanager
    def told(self, checkpoint_bytes: int) -> Iterator[None]:
        """Have the error of a full disk say what a checkpoint takes, and what would be right."""
        free = free_bytes(self.root)
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise self._refused(error, checkpoint_bytes, free) from error
            raise

    def _refused(self, error: OSError, checkpoint_bytes: int, free: int) -> OSError:
        wanted = (self.keep + self.slots) * checkpoint_bytes
        more = max(checkpoint_bytes - free, wanted - free - self._held_bytes(), 0)
        told = f"{error.strerror}: a checkpoint takes {amount(checkpoint_bytes)}, {amount(free)} were free"
        return OSError(
            error.errno, f"{told}; {self._each()} take {amount(wanted)} ({self._right(more)})", error.filename
        )

    def _each(self) -> str:
        return f"{self.keep} kept checkpoints and {self.slots} slots for emergencies"

    def _right(self, missing: int) -> str:
        fewer = f", keep fewer than {self.keep}" if self.keep > 2 else ""
        return f"free {amount(missing)} there{fewer}, or name a folder on a larger disk"

    def _held_bytes(self) -> int:
        """Bytes that its checkpoints and slots have already: as long as they are, for all is written."""
        files = (file for pattern in _OURS for path in self.root.glob(pattern) for file in files_in(path))
        return sum(size_of(file) for file in files)


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written there, without what is held back for root. Raises OSError.

    As good as no end where the file system does not tell (some FUSE): it then says so when it is full.
    """
    found = os.statvfs(folder)
    if not found.f_blocks:
        return 1 << 62
    return found.f_bavail * found.f_frsize


def files_in(folder: Path) -> list[Path]:
    """What lies in a folder; nothing where there is none, or none any more: another rank may rename it at any time.

    `Path.glob` looks first whether it is there, and raises where it has gone between the two.
    """
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries]
    except OSError as error:
        if not is_gone(error):
            raise
        return []


def size_of(path: Path, *, least: int = 0) -> int:
    """How long a file is; 0 where there is none.

    least: if it is shorter, ask once more by opening it. Over NFS what another host has just written may be some
    seconds old when looked at, but not when opened (close-to-open, nfs(5)).
    """
    try:
        size = path.stat(follow_symlinks=False).st_size
    except OSError as error:
        if not is_gone(error):
            raise
        return 0
    if size < least:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
    return size


def changed_ns(path: Path) -> int:
    """When it was last changed, by the clock of the file system; 0 where there is none any more."""
    try:
        return path.stat(follow_symlinks=False).st_mtime_ns
    except OSError as error:
        if not is_gone(error):
            raise
        return 0


def amount(size_bytes: int) -> str:
    """Bytes for people."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
