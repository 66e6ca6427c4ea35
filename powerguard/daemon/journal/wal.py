"""Damage in the write-ahead log, which SQLite does not tell: it ends the log at the first frame that is not sound.

What a crash leaves is no damage. A commit has returned only when its frames are on disk (synchronous=FULL), and only
then is the next begun: behind the last sound commit a crash leaves frames of one transaction, so one that was written
behind a further commit proves damage. Each frame's checksum goes on from the one before, so that those behind a damaged
one can be proven too. Format: https://sqlite.org/fileformat2.html, section 4.

SQLite locks the database and the index (`-shm`), whose descriptors nobody else may close in its process; not the log.
"""

import contextlib
import os
import sqlite3
import stat
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from powerguard.daemon.journal.sqlite import BUSY_S, sync_folder

HEADER = struct.Struct(">8I")
"""Magic, version, page size, number of the checkpoint, two salts, two checksums."""
FRAME = struct.Struct(">6I")
"""Page, size of the database in pages (in the last frame of a transaction, else 0), two salts, two checksums."""
MAGIC, VERSION = 0x377F0682, 3_007_000
"""The lowest bit of the magic says that the checksums are big-endian."""
PAGE_SIZES = frozenset(512 << power for power in range(8))
PAGE_BYTES = 4096
"""What SQLite takes for a new file, as we do: to go by where the log's own header cannot be believed."""


@dataclass(slots=True, kw_only=True)
class Damage:
    """What a damaged log holds behind the last commit that SQLite finds.

    frames: page and place of each sound frame. whole: so many of them lead to a commit for which no page is missing;
    pages: the size of the database there. commits: transactions behind; mended: those of them that are whole.
    headless: the log's head is lost, so SQLite finds nothing in it at all, and neither do we.
    """

    page_bytes: int
    frames: list[tuple[int, int]] = field(default_factory=list)
    whole: int = 0
    pages: int = 0
    commits: int = 0
    mended: int = 0
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

    Damage is looked for within limit_s; once proven, to the end. What cannot be read, SQLite will tell.
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
        # Another header: somebody is writing, and what was read is of two logs.
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
    found = Damage(page_bytes=page_bytes)
    until_s = time.clock_gettime(time.CLOCK_BOOTTIME) + limit_s
    missing: set[int] = set()
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
        if good:
            missing.discard(page)
            found.frames.append((page, at))
        else:
            missing.add(page)
        if sound and pages:
            found.frames.clear()
        elif ours and pages:
            found.commits += 1
            if good and not missing:
                found.whole, found.pages, found.mended = len(found.frames), pages, found.commits
        ended = ours and pages > 0 and not sound
        last = (first, second)
        at += FRAME.size + page_bytes
    if not proven and not begins_well and os.fstat(fd).st_size > HEADER.size + FRAME.size:
        # SQLite writes the head and syncs it before the first frame (synchronous=FULL): a crash leaves no such log.
        return Damage(page_bytes=page_bytes, headless=True)
    return found if proven else None


def _sum(data: bytes, seed: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = seed
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for start in range(0, len(words), 32):  # so many sums still fit into a small integer: two thirds of the time
        for word in words[start : start + 32]:
            first, second = second, first + second + word
        first, second = first & 0xFFFFFFFF, second & 0xFFFFFFFF
    return first, second


def mend(path: Path, found: Damage, to: Path) -> None:
    """Write the journal with all that is whole of its log, as a file that needs no log. Raises OSError, sqlite3.Error.

    A page whose frame is damaged does not matter where the log holds a later one of the same page.
    """
    making = to.with_name(f"{to.name}-making")
    making.unlink(missing_ok=True)
    os.close(os.open(making, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o640))
    uri = f"{path.absolute().as_uri()}?mode=ro"  # one that may write would fold the log in and delete it
    with (
        contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S)) as db,
        contextlib.closing(sqlite3.connect(making)) as copy,
    ):
        copy.execute("PRAGMA journal_mode = OFF")  # a kill shall leave one file to be made anew
        db.backup(copy)
    with making.open("r+b") as file, log_of(path).open("rb") as log:
        for page, at in found.frames[: found.whole]:
            if page <= found.pages:
                log.seek(at + FRAME.size)
                file.seek((page - 1) * found.page_bytes)
                file.write(log.read(found.page_bytes))
        if found.whole:
            file.truncate(found.pages * found.page_bytes)
        file.flush()
        os.fsync(file.fileno())
    making.rename(to)
    sync_folder(to.parent)
