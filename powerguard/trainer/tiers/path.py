"""A tier in a mounted folder, as a NAS: the local format, made for file systems that may lack O_DIRECT and may vanish.

    <folder>/<job>/step-000000001234-9f86d081/shard-00000.part   while it is written
                                              shard-00000        flushed, read back and verified
                                              MANIFEST.json      linked into place last, unless one is there: the commit
                                              SET-ASIDE          a marker: never load this again

What is written here runs in the upload's child, which is killed when the mount hangs.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from powerguard.trainer.store.disk import is_there, refuses_direct
from powerguard.trainer.store.folders import Found, Refused, look
from powerguard.trainer.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, Shard, step_of
from powerguard.trainer.store.shards import ShardReader, Snapshot
from powerguard.trainer.tiers.base import (
    LIMIT_S,
    MAX_REASON_BYTES,
    NEWEST,
    SET_ASIDE,
    Kind,
    Listed,
    Part,
    Remote,
    Seen,
    Source,
    TierError,
    conflict,
    digest_there,
    folder_of,
    newest_first,
    outdated,
    parts_of,
    unfinished,
    within,
)

_T = TypeVar("_T")

_PART: Final = ".part"
_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_BY_NUMBER: Final = {
    errno.ENOSPC: (Kind.FULL, "the file system is full"),
    errno.EDQUOT: (Kind.FULL, "the quota is used up"),
    errno.EROFS: (Kind.DENIED, "is mounted read-only"),
    errno.EACCES: (Kind.DENIED, "must be writable for the training's user"),
    errno.EPERM: (Kind.DENIED, "must be writable for the training's user"),
    errno.ENOENT: (Kind.ABSENT, "is not there (is it mounted?)"),
    errno.ENOTDIR: (Kind.ABSENT, "is not a folder (check that it is mounted)"),
    errno.ESTALE: (Kind.NETWORK, "the server has forgotten us (ESTALE)"),
    errno.EIO: (Kind.NETWORK, "the server or its disk failed (EIO)"),
    errno.ETIMEDOUT: (Kind.NETWORK, "no answer from the server"),
    errno.EHOSTDOWN: (Kind.NETWORK, "no answer from the server"),
    errno.EHOSTUNREACH: (Kind.NETWORK, "no way to the server"),
    errno.ENOTCONN: (Kind.NETWORK, "the mount has lost its server"),
    errno.EREMOTEIO: (Kind.NETWORK, "the server failed"),
}


class PathTier:
    """One job's checkpoints below a mounted folder.

    The folder itself must be there: it is not made, or an unmounted NAS would fill the disk below its mount point.
    """

    word = "path"

    def __init__(self, remote: Remote, job: str, *, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._folder = Path(remote.url)
        self._root = self._folder / folder_of(job)
        self.url = str(self._root)
        self._part_bytes = remote.part_bytes

    # --- Writing ---------------------------------------------------------------------------------------------------

    def committed(self, name: str) -> str | None:
        with self._worded(name):
            return digest_there(_content(self._root / name / MANIFEST))

    def missing(self, name: str, shard: Shard, seen: Seen) -> list[Part]:
        """What has been written before counts only when it reads back as it must: a kill may have torn it."""
        parts = parts_of(shard, self._part_bytes)
        with self._worded(name):
            if _has(self._root / name / shard.file, shard.size_bytes):
                return []
            try:
                file = _File(self._root / name / f"{shard.file}{_PART}", os.O_RDONLY)
            except FileNotFoundError:
                return parts
            with closing(file):
                return [part for part, wrong in file.looked_through(parts, seen) if wrong is not None]

    def put(self, name: str, part: Part, content: memoryview) -> None:
        with self._worded(f"{name}/{part.file}"):
            self._make(self._root / name)
            # Over NFS it may be the closing that fails, when the server is full.
            with closing(_File(self._root / name / f"{part.file}{_PART}", os.O_WRONLY | os.O_CREAT)) as file:
                file.write(content, part.offset)

    def finish(self, name: str, shard: Shard, seen: Seen) -> None:
        with self._worded(f"{name}/{shard.file}"):
            final = self._root / name / shard.file
            written = self._root / name / f"{shard.file}{_PART}"
            if _has(final, shard.size_bytes):
                return
            with written.open("r+b", buffering=0) as file:
                os.ftruncate(file.fileno(), shard.size_bytes)
                os.fsync(file.fileno())
            with closing(_File(written, os.O_RDONLY)) as file:  # a new open asks the server, not our cache
                for _, wrong in file.looked_through(parts_of(shard), seen):
                    if wrong is not None:
                        written.unlink(missing_ok=True)
                        msg = (
                            f"{final}: chunk {wrong} reads back other than it was written (is the NAS, its memory or"
                            " the network rotten?); written again next time"
                        )
                        raise TierError(Kind.UNUSABLE, msg)  # what is here is good
            try:
                written.rename(final)
            except FileNotFoundError:  # another process of this job finished the same bytes
                if not _has(final, shard.size_bytes):
                    raise
            _sync(final.parent)

    def absent(self, name: str, manifest: Manifest) -> list[int]:
        with self._worded(name):
            folder = self._root / name
            return [shard.rank for shard in manifest.shards if not _has(folder / shard.file, shard.size_bytes)]

    def commit(self, name: str, manifest: Manifest) -> bool:
        folder = self._root / name
        unborn = folder / f".{MANIFEST}-{secrets.token_hex(4)}"
        with self._worded(name):
            self._make(folder)
            _write(unborn, manifest.to_json())
            try:
                created = _link(unborn, folder / MANIFEST)
            finally:
                with contextlib.suppress(OSError):
                    unborn.unlink()
            if not created:
                found = self.committed(name)
                if found != manifest.digest:
                    raise conflict(self.url, name, found, manifest.digest)
            _sync(folder)
            _sync(self._root)
        return created

    def prune(self, keep: int, keep_days: int, spare: str) -> list[str]:
        with self._worded("prune"):
            names = outdated(self._listed(), keep, keep_days, spare)
            denied: OSError | None = None
            for name in names:
                try:
                    _remove(self._root / name)
                except PermissionError as error:  # another user's, which must not keep ours
                    denied = denied or error
            if denied is not None:
                raise denied
        return names

    def clear(self, spare: str) -> bool:
        with self._worded("clear"):
            names = unfinished(self._listed(), spare)
            for name in names:
                _remove(self._root / name)
        return bool(names)

    # --- Reading: in the training's own process, so each call has a limit ------------------------------------------

    def found(self) -> list[Found]:
        return self._limited(self._found)

    def open_shard(self, found: Found, shard: Shard) -> Source:
        file = self._limited(lambda: ShardReader(self._root / found.name, shard))
        return _PathShard(file, shard.chunk_bytes, self._limit_s)

    def set_aside(self, found: Found, reason: str) -> None:
        def mark() -> None:
            with contextlib.suppress(FileExistsError):
                _write(self._root / found.name / SET_ASIDE, reason.encode()[:MAX_REASON_BYTES])

        self._limited(mark)

    def aside(self) -> list[str]:
        return self._limited(lambda: [name for name in self._names()[:NEWEST] if self._is_aside(name)])

    def _found(self) -> list[Found]:
        found: list[Found] = []
        refused = ""
        if names := self._names():
            by_commit = sorted(names, key=lambda name: _committed_ns(self._root / name), reverse=True)
            for each in look(self._root, among=[self._root / name for name in newest_first(by_commit)]):
                if isinstance(each, Found) and not self._is_aside(each.name):
                    found.append(replace(each, tier=self.word))
                elif isinstance(each, Refused):
                    refused = refused or each.reason
                if len(found) == NEWEST:
                    break
        if refused and not found:  # else training would begin at step 0
            raise TierError(Kind.UNUSABLE, refused)
        return found

    def _is_aside(self, name: str) -> bool:
        try:
            return is_there(self._root / name / SET_ASIDE)
        except PermissionError:  # another user's folder
            return False

    def _limited(self, what: Callable[[], _T]) -> _T:
        with self._worded("read"):
            return within(self._limit_s, what, self.url)

    # --- What both sides need --------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """All checkpoints' names, highest step first."""
        try:
            with os.scandir(self._root) as entries:
                return sorted((each.name for each in entries if step_of(each.name) is not None), reverse=True)
        except FileNotFoundError:
            self._folder.stat()  # no job's folder yet is nothing wrong; no mount is
            return []

    def _listed(self) -> list[Listed]:
        listed = []
        for name in self._names():
            try:
                with os.scandir(self._root / name) as entries:
                    stored = {each.name: each.stat(follow_symlinks=False).st_mtime for each in entries}
            except (FileNotFoundError, PermissionError):  # another host prunes, too; another user's folder
                continue
            listed.append(Listed.of(name, stored))
        return listed

    def _make(self, folder: Path) -> None:
        if folder.is_dir():
            return
        if not self._root.is_dir():
            self._root.mkdir(exist_ok=True)  # its parent is the mount: not there is an error
            _sync(self._folder)
        folder.mkdir(exist_ok=True)

    @contextmanager
    def _worded(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind, meaning = _BY_NUMBER.get(error.errno or 0, (Kind.UNUSABLE, error.strerror or "failed"))
            raise TierError(kind, f"{self.url}: {what}: {meaning}") from None


class _PathShard:
    """A shard's file on a mount that may hang while it is read: then this source is given up for good."""

    def __init__(self, file: ShardReader, chunk_bytes: int, limit_s: float) -> None:
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._limit_s = limit_s
        self._gone: TierError | None = None
        self._spare: list[Snapshot] = []

    def read_chunk(self, index: int, target: memoryview) -> None:
        if self._gone is not None:
            raise self._gone
        # A read that hangs may end much later: not in the caller's memory.
        memory = self._spare.pop() if self._spare else Snapshot(self._chunk_bytes)
        content = memory.buffer[: len(target)]
        try:
            within(self._limit_s, lambda: self._file.read_chunk(index, content), str(self._file.path))
        except TierError as error:
            self._gone = error
            raise
        target[:] = content
        self._spare.append(memory)

    def close(self) -> None:
        if self._gone is None:
            self._file.close()


def _has(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat(follow_symlinks=False).st_size == size_bytes
    except FileNotFoundError:
        return False


class _File:
    """A file on the mount, past the page cache where that can be had: it stays training's, and reading asks the server.

    Offsets, sizes and addresses are multiples of 4 KiB. Raises OSError.
    """

    def __init__(self, path: Path, flags: int) -> None:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._direct = True
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if not refuses_direct(error):
                raise
            self._direct = False
            self._descriptor = os.open(path, flags, 0o644)

    def write(self, content: memoryview, offset: int) -> None:
        while content:
            count = self._tried(lambda: os.pwrite(self._descriptor, content, offset))  # noqa: B023 - called at once
            content, offset = content[count:], offset + count

    def looked_through(self, parts: Sequence[Part], seen: Seen) -> Iterator[tuple[Part, int | None]]:
        """Each part, and the first chunk in it that is not in the file as it must be; None: all are."""
        memory = Snapshot(max(part.size_bytes for part in parts))
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for part in parts:
            content = memory.buffer[: part.size_bytes]
            done = 0
            while done < part.size_bytes:
                at = part.offset + done
                count = self._tried(lambda: os.preadv(self._descriptor, [content[done:]], at))  # noqa: B023 - likewise
                if not count:
                    break
                done += count
                seen(count)
            whole = content[: done // part.chunk_bytes * part.chunk_bytes] if done < part.size_bytes else content
            yield part, part.wrong(whole)
            if not self._direct:
                os.posix_fadvise(self._descriptor, part.offset, part.size_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)

    def _tried(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except OSError as error:
            if not self._direct or not refuses_direct(error):
                raise
            self._direct = False
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return call()


def _content(path: Path) -> bytes | None:
    """A manifest's bytes; None: there is none. One that is too long is cut, and so does not verify."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        return None


def _write(path: Path, content: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[os.write(file.fileno(), view) :]
        os.fsync(file.fileno())


def _link(unborn: Path, born: Path) -> bool:
    """Give a file its name unless that is taken: False. A link is the one call that does both, on NFS too."""
    try:
        os.link(unborn, born)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A mount without links (SMB, some FUSE): what could slip in between is the same manifest, of the same name.
        if is_there(born):
            return False
        unborn.rename(born)
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some FUSE and SMB mounts: folders have nothing to sync there
            raise
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a checkpoint. Its manifest goes first and alone: a half-removed checkpoint must not look whole."""
    with contextlib.suppress(FileNotFoundError):  # another host prunes, too
        (folder / MANIFEST).unlink(missing_ok=True)
        _sync(folder)
        for entry in list(folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink():  # a NAS's own: @eaDir
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # NFS keeps a file that is still open, under another name
        folder.rmdir()


def _committed_ns(folder: Path) -> int:
    """When its manifest was stored; 0 where there is none, none any more, or another user's that is closed to us."""
    try:
        return (folder / MANIFEST).stat(follow_symlinks=False).st_mtime_ns
    except (FileNotFoundError, PermissionError):
        return 0
