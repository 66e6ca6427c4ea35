"""Every call that durability hangs on, in one place: the power-cut tests record them here, and forget some of them."""

import contextlib
import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Final

PAGE: Final = 4096
"""What O_DIRECT needs addresses, lengths and offsets to be multiples of, on every disk that we know."""

_GET_FLAGS: Final = 0x80086601  # FS_IOC_GETFLAGS, linux/fs.h
_SET_FLAGS: Final = 0x40086602  # FS_IOC_SETFLAGS
_NOCOW: Final = 0x00800000  # FS_NOCOW_FL
_NO_DIRECT: Final = {errno.EINVAL, errno.EOPNOTSUPP}
_NO_ALLOCATE: Final = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class Disk:
    """A thin layer over the system's calls; raises OSError as they do."""

    def make_folder(self, path: Path) -> None:
        """Make a folder whose parent is there. Raises FileExistsError."""
        path.mkdir()

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """Open a file for writing, and leave what is in it. create: it must be new.

        direct: raises an OSError that `refuses_direct` knows where the file system has no O_DIRECT.
        """
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= (os.O_CREAT | os.O_EXCL) if create else 0
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Reserve blocks for a file of this size, where the file system can; raises OSError ENOSPC when full."""
        if size_bytes and _fallocate(descriptor, 0, 0, size_bytes):
            number = ctypes.get_errno()
            if number not in _NO_ALLOCATE:
                raise OSError(number, os.strerror(number))

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Write some or all of it; return how many bytes."""
        return os.pwrite(descriptor, content, offset)

    def sync(self, descriptor: int) -> None:
        """Flush a file to the disk itself, past its cache."""
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Flush the names in a folder to the disk itself."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or a folder its new name, at once and never half."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


def refuses_direct(error: OSError) -> bool:
    """True when this error means that O_DIRECT cannot be had here (tmpfs before Linux 6.6, some FUSE and overlays)."""
    return error.errno in _NO_DIRECT


def overwrite_in_place(descriptor: int) -> None:
    """Ask a copy-on-write file system (btrfs) to write over old blocks, which a full one still can. Others refuse.

    Only for an empty file. Its checksums on btrfs go with it; the chunks have digests of their own.
    """
    import fcntl

    with contextlib.suppress(OSError):
        flags = struct.unpack("l", fcntl.ioctl(descriptor, _GET_FLAGS, struct.pack("l", 0)))[0]
        fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("l", flags | _NOCOW))


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
# glibc's posix_fallocate writes into every block where the file system cannot reserve any: minutes over NFS.
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
