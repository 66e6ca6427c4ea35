"""Locks on a folder's file that go with the process that took them, and with it alone. Stdlib only.

flock(2) belongs to the open file, which a child of fork inherits: a data loader's worker would hold the lock of a
trainer that is long dead. So in a child every lock is closed, which leaves the parent's as it is.
"""

import contextlib
import errno
import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Final, Self

NO_LOCKS: Final = (
    "its file system has no locks: a second training here, or a process of an earlier run that still writes, is not"
    " noticed, and may spoil a checkpoint (mount it with locks: NFS without nolock; or use a local disk)"
)
_SAFELY: Final = os.O_CLOEXEC | os.O_NOFOLLOW
_GLANCE_S: Final = 0.001
_PATIENCE: Final = 5000  # glances: to remove what is large may take a second or two
_taken: Final["weakref.WeakSet[FolderLock]"] = weakref.WeakSet()


class FolderLock:
    """A lock on a folder or a file, for as long as this lives.

    Raises BlockingIOError when somebody holds one that excludes it; OSError when the path cannot be opened. Where the
    file system has no such locks, `is_held` is False and nobody is kept out. Over NFS the lock of a file is the
    server's and known to all hosts, that of a folder this host's alone.
    """

    _descriptor = -1

    def __init__(self, path: Path, *, shared: bool = False, create: bool = False) -> None:
        self._descriptor = _opened_file(path) if create else os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
        self.is_held = True
        _taken.add(self)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise
        except OSError:
            self.is_held = False

    def is_at(self, path: Path) -> bool:
        """Whether this path still leads to what is locked."""
        try:
            return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(self._descriptor))
        except OSError:  # it leads nowhere any more, or this was let go of meanwhile
            return False

    def close(self) -> None:
        """Let go. Of several threads that do, one closes: the number may be somebody else's file a moment later."""
        descriptor = vars(self).pop("_descriptor", -1)
        if descriptor >= 0:
            os.close(descriptor)
            self.is_held = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def shared_soon(folder: Path) -> FolderLock:
    """Share a folder that may have become a slot just now: whoever made it one holds it a moment longer.

    Raises OSError EBUSY when that does not end, and FileNotFoundError when it was removed.
    """
    for _ in range(_PATIENCE):
        with contextlib.suppress(BlockingIOError):
            return FolderLock(folder, shared=True)
        time.sleep(_GLANCE_S)  # flock(2) waits for ever or not at all
    raise OSError(errno.EBUSY, "is being removed, and that does not end", str(folder))


def _opened_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)  # for writing, because NFS wants it so
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        try:
            return os.open(path, os.O_RDONLY | _SAFELY)
        except FileNotFoundError:
            raise error from None  # that it is read-only is what keeps it from being there


def _let_go() -> None:
    for lock in list(_taken):
        lock.close()


os.register_at_fork(after_in_child=_let_go)
