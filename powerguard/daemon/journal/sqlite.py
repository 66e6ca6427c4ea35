"""SQLite: how it is opened next to other readers, the texts of its errors, and how damage is recognised.

SQLite does not report damage in the write-ahead log: it ends the log at the first invalid frame. A crash does not leave
damage. A commit has returned only when its frames are on disk (synchronous=FULL), and only
then is the next begun: behind the last sound commit a crash leaves frames of one transaction, so one that was written
behind a further commit proves damage. Each frame's checksum goes on from the one before, so that those behind a damaged
one can be proven too. Format: https://sqlite.org/fileformat2.html, section 4.

SQLite locks the database and the index (`-shm`), whose descriptors no other code may close in its process; not the log.
"""

import contextlib
import errno
import os
import sqlite3
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

APPLICATION_ID = 0x70776764
"""PRAGMA application_id: "pwgd". A database with another one is not ours."""

BUSY_S = 0.2
"""How long to wait for a lock that another process holds."""
CHECK_S = 0.5
"""How long to look for damage at the start."""


class JournalError(Exception):
    """The journal cannot be read or written: what, where, and the fix."""


class NotOursError(Exception):
    """A database that must not be written. why: foreign or newer."""

    def __init__(self, message: str, *, why: str) -> None:
        super().__init__(message)
        self.why = why


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # some failures have rolled back already
            db.execute("ROLLBACK")
        raise


def pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def mend_versions(path: Path) -> bool:
    """Put the versions of the file's format right in a journal of ours that was changed there; say whether it was.

    SQLite writes no file whose byte 18 is above 2, and reads none whose byte 19 is (fileformat2.html, 1.3.3). A journal
    is always 2, 2: a write-ahead log.
    """
    with contextlib.suppress(OSError), path.open("r+b") as file:
        head = file.read(72)
        versions = head[18:20]
        ours = head[:16] == b"SQLite format 3\0" and head[68:72] == APPLICATION_ID.to_bytes(4, "big")
        if ours and max(versions) > 2:
            file.seek(18)
            file.write(b"\2\2")
            file.flush()
            os.fsync(file.fileno())
            return True
    return False


def quick_check(db: sqlite3.Connection) -> bool:
    """Say whether the file is consistent; if the disk is too slow to check in time, assume that it is.

    SQLite before 3.41 walks the whole file without calling a progress handler, so a second thread ends the check.
    """
    timer = threading.Timer(CHECK_S, db.interrupt)
    try:
        timer.start()
        return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except RuntimeError:  # no memory for a thread
        return True
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return True
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()  # or it could interrupt the next statement


_BROKEN_SCHEMA = ("no such", "table ", "index ", "duplicate column", "unsupported file format")
"""How SQLite's messages begin when the schema is not what its version says."""
UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Raised for damaged bytes, apart from sqlite3.Error: UnicodeDecodeError for a message of SQLite's own that
quotes a damaged schema."""


def is_corrupt(error: Exception) -> bool:
    """Say whether the file is damaged, and not only unavailable at the moment."""
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, UNREADABLE)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if "decode to UTF-8" in str(error):
        return True
    broken_schema = code == sqlite3.SQLITE_ERROR and str(error).startswith(_BROKEN_SCHEMA)
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or broken_schema


def is_full_or_busy(error: sqlite3.Error) -> bool:
    """Say whether space or a lock is missing, after which the connection is still usable."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)


def is_full(error: Exception) -> bool:
    """Say whether the disk has no room; for the log's index SQLite has an error of its own."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0)
        return code == sqlite3.SQLITE_IOERR_SHMSIZE or code & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


_LONGEST_TEXT = 160
_ADVICE = {
    sqlite3.SQLITE_FULL: "free some space there",
    sqlite3.SQLITE_BUSY: "another process holds it; only one daemon may run",
    sqlite3.SQLITE_IOERR: "look for disk errors in the kernel's log",
}


_OWN: Final = "the daemon's user must be able to write the file and its folder"
_ROOTS: Final = "run this as root: the journal belongs to the daemon; `powerguard status` asks the daemon, without root"


@contextlib.contextmanager
def translated(path: Path, *, reads: bool = False) -> Iterator[None]:
    """Turn an error of the file system or SQLite into a JournalError. reads: by a command, not by the daemon."""
    closed = _ROOTS if reads and os.geteuid() != 0 else _OWN
    try:
        yield
    except sqlite3.Error as error:
        code = sqlite3.SQLITE_FULL if is_full(error) else getattr(error, "sqlite_errorcode", 0) & 0xFF
        advice = closed if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) else _ADVICE.get(code, "")
        message = f"{path}: {brief(error)}" + (f" ({advice})" if advice else "")
        raise JournalError(message) from error
    except UNREADABLE as error:
        message = f"{path}: damaged ({brief(error)}): move it away, and the daemon starts a new journal"
        raise JournalError(message) from error
    except OSError as error:
        message = f"{path}: {error.strerror or error} ({closed})"
        raise JournalError(message) from error


def brief(error: Exception) -> str:
    """Return an error in a line: Python's own text for bytes that are not UTF-8 quotes all of them, a whole state."""
    if isinstance(error, UnicodeError):
        return "text that is not UTF-8"
    text = str(error)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def next_ending(why: str, path: Path) -> str:
    """Return the ending under which a file is kept: the first one that is free."""
    number = 1
    while path.with_name(f"{path.name}.{why}-{number}").exists():
        number += 1
    return f"{why}-{number}"


def put_aside(path: Path, why: str) -> str:
    """Give a database that cannot be used another name, with its log; return the name."""
    other = path.with_name(f"{path.name}.{next_ending(why, path)}")
    for suffix in ("-wal", "-shm", ""):  # the database last: without it the log would be taken for the new file's
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").rename(f"{other}{suffix}")
    sync_folder(path.parent)
    return other.name


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the journal while the daemon may be writing it, or is down. Raises JournalError."""
    with translated(path, reads=True):
        if not path.is_file():  # a pipe would block
            what = (
                "is not a file"
                if path.exists()
                else "no journal here: check that the daemon has run with this state folder"
            )
            message = f"{path}: {what}"
            raise JournalError(message)
        uri = path.absolute().as_uri()
        db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)
        try:
            try:
                known = pragma(db, "application_id")
            except sqlite3.OperationalError:
                # After a clean stop there is no log, and who may not write the folder cannot make its index either:
                # without a log the file alone is the whole truth.
                if Path(f"{path}-wal").exists():
                    raise
                db.close()
                db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)
                known = pragma(db, "application_id")
            if known != APPLICATION_ID:
                message = f"{path}: not a powerguard journal"
                raise JournalError(message)
            yield db
        finally:
            db.close()


@contextlib.contextmanager
def with_index_in_memory(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the journal of a daemon that is gone. Raises JournalError.

    SQLite makes the index of the log (`-shm`) again at each first opening, and a full disk has no room for it. With
    exclusive locking it needs none (https://sqlite.org/wal.html, section 8).
    """
    with translated(path):
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)) as db:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            yield db


HEADER = struct.Struct(">8I")
"""Magic, version, page size, number of the checkpoint, two salts, two checksums."""
FRAME = struct.Struct(">6I")
"""Page, size of the database in pages (in the last frame of a transaction, else 0), two salts, two checksums."""
MAGIC, VERSION = 0x377F0682, 3_007_000
"""The lowest bit of the magic says that the checksums are big-endian."""
PAGE_SIZES = frozenset(512 << power for power in range(8))
PAGE_BYTES = 4096
"""Page size of a new file, for a log whose own header is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Damage of a write-ahead log: the transactions that SQLite does not see.

    commits: transactions behind the last one that SQLite finds. headless: the log's head is lost, so it cannot be read
    at all.
    """

    commits: int = 0
    headless: bool = False


def log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def has_frames(path: Path) -> bool:
    """Say whether a journal has a log that is long enough for a frame."""
    try:
        return log_of(path).stat().st_size > HEADER.size + FRAME.size
    except FileNotFoundError:
        return False


def look(path: Path, limit_s: float) -> Damage | None:
    """Return the damage of a journal's log, before SQLite opens it; None where none is proven.

    The search for damage takes at most limit_s; once it is proven, it goes to the end. SQLite reports read errors.
    """
    try:
        fd = os.open(log_of(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        head = os.pread(fd, HEADER.size, 0)
        found = _walk(fd, head, limit_s) if len(head) == HEADER.size else None
        # Another header: another process is writing, and the data is of two logs.
        return found if os.pread(fd, HEADER.size, 0) == head else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _walk(fd: int, head: bytes, limit_s: float) -> Damage | None:
    magic, version, page_bytes, _, *salts, first, second = HEADER.unpack(head)
    order = ">" if magic & 1 else "<"
    last = (first, second)
    known = magic & ~1 == MAGIC and version == VERSION and page_bytes in PAGE_SIZES
    sound = known and _sum(head[:24], (0, 0), order) == last
    begins_well = sound
    if not sound:
        order, page_bytes = "<>"[sys.byteorder == "big"], PAGE_BYTES
        salts = list(FRAME.unpack(os.pread(fd, FRAME.size, HEADER.size).ljust(FRAME.size, b"\0"))[2:4])
    until_s = time.clock_gettime(time.CLOCK_BOOTTIME) + limit_s
    commits = 0
    proven = ended = False
    at = HEADER.size
    while proven or time.clock_gettime(time.CLOCK_BOOTTIME) < until_s:
        frame = os.pread(fd, FRAME.size, at)
        if len(frame) < FRAME.size:
            break
        page, pages, *salt, first, second = FRAME.unpack(frame)
        ours = page > 0 and salt == salts
        data = os.pread(fd, page_bytes, at + FRAME.size) if ours else b""
        good = len(data) == page_bytes and _sum(frame[:8] + data, last, order) == (first, second)
        proven |= good and ended
        sound &= good
        ended = ours and pages > 0 and not sound
        commits += ended
        last = (first, second)
        at += FRAME.size + page_bytes
    if not proven and not begins_well and os.fstat(fd).st_size > HEADER.size + FRAME.size:
        # SQLite writes the head and syncs it before the first frame (synchronous=FULL): a crash leaves no such log.
        return Damage(headless=True)
    return Damage(commits=commits) if proven else None


def _sum(data: bytes, seed: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = seed
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for start in range(0, len(words), 32):  # so many sums still fit into a small integer: two thirds of the time
        for word in words[start : start + 32]:
            first, second = second, first + second + word
        first, second = first & 0xFFFFFFFF, second & 0xFFFFFFFF
    return first, second
