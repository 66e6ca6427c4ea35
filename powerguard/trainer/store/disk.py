"""Every call that durability hangs on, in one place: the power-cut tests record them here, and forget some of them.

`FolderLock` is a lock that goes with the process that took it, and with it alone. flock(2) belongs to the open file,
which a child of fork inherits: a data loader's worker would hold the lock of a trainer that is long dead. So a child
closes every lock, which leaves the parent's as it is. Standard library only.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import time
import weakref
from collections.abc import Iterator
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

    Raises BlockingIOError when another holder excludes it; OSError when the path cannot be opened. Where the
    file system has no such locks, `is_held` is False and no process is kept out. Over NFS the lock of a file is the
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
        """Let go. Of several threads that do, one closes: the number may be another file a moment later."""
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
    """Share a folder that may have become a slot just now: the one that made it a slot holds it a moment longer.

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


_GET_FLAGS: Final = 0x80086601  # FS_IOC_GETFLAGS, linux/fs.h
_SET_FLAGS: Final = 0x40086602  # FS_IOC_SETFLAGS
_NOCOW: Final = 0x00800000  # FS_NOCOW_FL
_FIEMAP: Final = 0xC020660B  # FS_IOC_FIEMAP, linux/fiemap.h
_EXTENTS: Final = 64  # asked for at a time
_MAP: Final = struct.Struct("QQIIII")  # start, length, flags, extents found, extents wanted, reserved
_EXTENT: Final = struct.Struct("QQQ16xI12x")  # logical, physical, length, flags
_EXTENT_LAST: Final = 0x1
_EXTENT_SHARED: Final = 0x2000
_NO_DIRECT: Final = {errno.EINVAL, errno.EOPNOTSUPP}
_NO_ALLOCATE: Final = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
FULL: Final = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a full disk, or of a user whose quota is used up."""
_GONE: Final = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


class Disk:
    """A thin layer over the system's calls; raises OSError as they do."""

    def make_folder(self, path: Path) -> None:
        """Make a folder whose parent is there. Raises FileExistsError."""
        path.mkdir()

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """Open a file for writing, and leave what is in it. create: it must be new.

        direct: raises an OSError that `refuses_direct` knows where the file system has no O_DIRECT.
        """
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not hold us up
        flags |= (os.O_CREAT | os.O_EXCL) if create else 0
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Reserve blocks for a file of this size, where the file system can; raises OSError (`FULL`) when full."""
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
        """Flush the names in a folder, which a link may lead to, to the disk itself.

        Some file systems have nothing to flush there: 9p, shared folders of virtual machines, FUSE.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or a folder its new name, at once and never half."""
        old.rename(new)

    def link(self, file: Path, name: Path) -> None:
        """Give a file a second name. Raises OSError where the file system has no hard links."""
        name.hardlink_to(file)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


class DiskFile:
    """A file that is open for writing, new or not; past the page cache where that can be had.

    direct: whether it is. Every method raises OSError with the path.
    """

    def __init__(self, disk: Disk, path: Path, *, direct: bool = True) -> None:
        self.direct = direct
        self._disk = disk
        self._path = path
        with self._naming():
            self._descriptor = self._opened()

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def is_at(self, path: Path) -> bool:
        """Whether this path still leads to this file."""
        try:
            return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Hold this file for a moment against others that do so: whether none does just now. Never waits.

        True where the file system has no such locks.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            yield True
            return
        try:
            yield True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # not by closing: a child of fork may have it open, too

    def allocate(self, size_bytes: int) -> None:
        with self._naming():
            self._disk.allocate(self._descriptor, size_bytes)

    def write(self, content: memoryview, offset: int) -> None:
        """Write all of it. For direct writing it and the offset are in pages. Several threads may."""
        done = 0
        while done < len(content):
            direct = self.direct
            try:
                count = self._disk.write(self._descriptor, content[done:], offset + done)
            except OSError as error:
                # Refused only now, or after a short write that ended between two sectors: go on through the cache.
                if not direct or not refuses_direct(error):
                    raise OSError(error.errno, error.strerror, str(self._path)) from error
                stop_direct(self._descriptor)
                self.direct = False
                continue
            if count == 0:
                raise OSError(errno.EIO, "the disk accepts no data", str(self._path))
            done += count

    def sync(self) -> None:
        with self._naming():
            self._disk.sync(self._descriptor)

    def close(self) -> None:
        self._disk.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> int:
        try:
            return self._open(create=False)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                descriptor = self._open(create=True)
                _overwrite_in_place(descriptor)
                return descriptor
        # Another rank has given its slot the name of this folder meanwhile, and the file was in it.
        return self._open(create=False)

    def _open(self, *, create: bool) -> int:
        if self.direct:
            try:
                return self._disk.open(self._path, create=create, direct=True)
            except OSError as error:
                if not refuses_direct(error):
                    raise
                self.direct = False
                create = create and not is_there(self._path)  # open(2) may leave the file behind when it refuses
        return self._disk.open(self._path, create=create)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def refuses_direct(error: OSError) -> bool:
    """True when this error means that O_DIRECT cannot be had here (tmpfs before Linux 6.6, some FUSE and overlays)."""
    return error.errno in _NO_DIRECT


def is_gone(error: OSError) -> bool:
    """True when this error means that another process has removed or renamed what was there a moment ago.

    Over NFS that may be ESTALE: the client still had its handle, and the server has the file no more.
    """
    return error.errno in _GONE


def is_there(path: Path) -> bool:
    """Whether something lies there. Raises OSError where that cannot be known: what is not there may be removed.

    From Python 3.14 on `Path.exists` answers False to any error, such as EIO of a NAS that is away for a moment. ESTALE
    (`is_gone`) is one of those here: a server that exports its disk again has all that it had.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def shares_blocks(path: Path) -> bool:
    """Whether a file has blocks in common with a copy of it, so that writing over them needs new ones.

    `cp` makes such copies by itself on xfs and btrfs. False where the file system cannot say, having none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        start = 0
        while True:
            answer = bytearray(
                _MAP.pack(start, (1 << 63) - 1 - start, 0, 0, _EXTENTS, 0) + bytes(_EXTENTS * _EXTENT.size)
            )
            fcntl.ioctl(descriptor, _FIEMAP, answer)
            count = _MAP.unpack_from(answer)[3]
            extents = [_EXTENT.unpack_from(answer, _MAP.size + at * _EXTENT.size) for at in range(count)]
            if any(flags & _EXTENT_SHARED for *_, flags in extents):
                return True
            if not extents or extents[-1][-1] & _EXTENT_LAST:
                return False
            start = extents[-1][0] + extents[-1][2]
    except OSError:
        return False
    finally:
        os.close(descriptor)


def stop_direct(descriptor: int) -> None:
    """Go on through the page cache."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _overwrite_in_place(descriptor: int) -> None:
    """Ask a copy-on-write file system (btrfs) to write over old blocks, which a full one still can. Others refuse.

    Only for an empty file. Its checksums on btrfs go with it; the chunks have digests of their own.
    """
    with contextlib.suppress(OSError):
        flags = struct.unpack("l", fcntl.ioctl(descriptor, _GET_FLAGS, struct.pack("l", 0)))[0]
        fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("l", flags | _NOCOW))


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
# glibc's posix_fallocate writes into every block where the file system cannot reserve any: minutes over NFS.
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
