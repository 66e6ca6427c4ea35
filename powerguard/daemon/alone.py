"""One daemon for each admin socket: two of them would write over each other's outage, and both would act on it.

A POSIX record lock on a file beside the socket: the kernel gives it back however its holder ends, names the holder, and
children do not inherit it. Not beside the journal: opening a file on a hung disk takes for ever. And nothing here may
keep a host unprotected: where no lock can be had, or where the holder was killed and one thread of it hangs in the
disk, the daemon runs all the same.
"""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()

_FLOCK: Final = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""


class TakenError(Exception):
    """Another daemon is at work: who, and what would be right."""


@contextlib.contextmanager
def alone(admin_socket: Path) -> Iterator[None]:
    """Hold the lock of this admin socket. Raises TakenError while another living daemon has it."""
    path = admin_socket.with_name(f"{admin_socket.name}.lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        log.warning("lock_unavailable", because=f"{path}: {error.strerror}: a second daemon would not be noticed")
        yield
        return
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            log.warning("lock_unavailable", because=f"{path}: {error.strerror}: a second daemon would not be noticed")
            return
        holder = _holder(descriptor)
        if _is_ending(holder):
            log.warning("lock_held_by_the_dead", because="it was killed, and a disk holds it fast", pid=holder)
            return
        msg = (
            f"another powerguard runs with these settings (pid {holder} holds {path}); two of them would get into each "
            "other's way (stop that one, or give this one a control.socket and a journal.path of its own)"
        )
        raise TakenError(msg) from error


def _holder(descriptor: int) -> int:
    """Pid of the process that holds the lock; 0 when it has just been given back, or is in another pid namespace."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[4])


def _is_ending(pid: int) -> bool:
    """Say whether a process has been killed and only waits for the kernel: proc(5), its main thread is Z or X."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] in (["Z"], ["X"])
