"""Locks on a folder's file that go with the process that took them, and with it alone. Stdlib only.

flock(2) belongs to the open file, which a child of fork inherits: a data loader's worker would hold the lock of a
trainer that is long dead. So in a child every lock is closed, which leaves the parent's as it is.
"""

import errno
import fcntl
import os
import weakref
from pathlib import Path
from typing import Final, Self

_SAFELY: Final = os.O_CLOEXEC | os.O_NOFOLLOW
_taken: Final["weakref.WeakSet[FolderLock]"] = weakref.WeakSet()


class FolderLock:
    """A lock on a folder or a file, for as long as this lives.

    Raises BlockingIOError when somebody holds one that excludes it; OSError when the path cannot be opened. Where the
    file system has no such locks, `is_held` is False and nobody is kept out.
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
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.is_held = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


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
