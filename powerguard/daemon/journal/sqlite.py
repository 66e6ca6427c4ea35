"""SQLite's ways: how it is opened beside others, what its errors mean for a person, and when a file is damaged."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

APPLICATION_ID = 0x70776764
"""PRAGMA application_id: "pwgd". A database with another one is not ours."""

BUSY_S = 0.2
"""How long to wait for a lock that another process holds."""
CHECK_S = 0.5
"""How long to look for damage at the start."""


class JournalError(Exception):
    """The journal cannot be read or written: what, where, and what would be right."""


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
    """Tell whether the file holds together; on a disk too slow to tell in time, assume that it does."""
    until_s = time.clock_gettime(time.CLOCK_BOOTTIME) + CHECK_S
    db.set_progress_handler(lambda: int(time.clock_gettime(time.CLOCK_BOOTTIME) > until_s), 10_000)
    try:
        return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return True
    finally:
        db.set_progress_handler(None, 0)


_BROKEN_SCHEMA = ("no such", "table ", "index ", "duplicate column", "unsupported file format")
"""How SQLite's messages begin when the schema is not what its version says."""
UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What reading damaged bytes raises apart from sqlite3.Error: UnicodeDecodeError for a message of SQLite's own that
quotes a damaged schema."""


def is_corrupt(error: Exception) -> bool:
    """Tell a damaged file from one that cannot be had just now."""
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, UNREADABLE)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if "decode to UTF-8" in str(error):
        return True
    broken_schema = code == sqlite3.SQLITE_ERROR and str(error).startswith(_BROKEN_SCHEMA)
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or broken_schema


def is_full_or_busy(error: sqlite3.Error) -> bool:
    """Tell a want of space or of a lock, after which the connection is as good as before."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)


_LONGEST_TEXT = 160
_ADVICE = {
    sqlite3.SQLITE_FULL: "free some space there",
    sqlite3.SQLITE_BUSY: "another process holds it; only one daemon may run",
    sqlite3.SQLITE_IOERR: "look for disk errors in the kernel's log",
}


_OWN: Final = "the daemon's user must be able to write the file and its folder"
_ROOTS: Final = "be root: the journal is the daemon's own; `powerguard status --url` needs no root"


@contextlib.contextmanager
def translated(path: Path, *, reads: bool = False) -> Iterator[None]:
    """Turn what the file system and SQLite say into a JournalError. reads: by a command, not by the daemon."""
    closed = _ROOTS if reads and os.geteuid() != 0 else _OWN
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        advice = closed if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) else _ADVICE.get(code, "")
        message = f"{path}: {brief(error)}" + (f" ({advice})" if advice else "")
        raise JournalError(message) from error
    except UNREADABLE as error:
        message = f"{path}: damaged ({brief(error)}); move it away, and a new journal is started"
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


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the journal beside a daemon that may be writing it, or that is down. Raises JournalError."""
    with translated(path, reads=True):
        if not path.is_file():  # a pipe would be waited for
            what = "is not a file" if path.exists() else "no journal here (has the daemon run with this state folder?)"
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
