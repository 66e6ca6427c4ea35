"""The write-ahead log of SQLite as we read it: any page size and byte order, and files that are none."""

import contextlib
import os
import random
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from powerguard.daemon.journal import sqlite
from tests.daemon.journal.test_log import FRAME, LONG_S, Copy, frames, transactions

X = b"x" * 200


def database(folder: Path, fill: Callable[[sqlite3.Connection], object], page_bytes: int = 4096) -> Path:
    """Return a database with a log, as a kill leaves it: copied while it is open."""
    folder.mkdir(exist_ok=True)
    live = folder / "live.db"
    path = folder / "x.db"
    if path.exists():
        for suffix in ("", "-wal"):
            Path(f"{path}{suffix}").rename(f"{live}{suffix}")
    with contextlib.closing(sqlite3.connect(live, isolation_level=None)) as db:
        db.execute(f"PRAGMA page_size = {page_bytes}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY, x BLOB)")
        fill(db)
        for suffix in ("", "-wal", "-shm"):
            shutil.copyfile(f"{live}{suffix}", f"{path}{suffix}")
    live.unlink()
    return path


def ten(db: sqlite3.Connection) -> None:
    for number in range(10):
        db.execute("INSERT INTO t VALUES (?, ?)", (number, X))


def summed(data: bytes | bytearray, seed: tuple[int, int], order: str) -> tuple[int, int]:
    """Return the checksum, as SQLite's documentation has it."""
    s0, s1 = seed
    for x0, x1 in struct.iter_unpack(f"{order}II", data):
        s0 = (s0 + x0 + s1) % 2**32
        s1 = (s1 + x1 + s0) % 2**32
    return s0, s1


def in_order(log: bytes, order: str) -> bytes:
    """Return the log as a machine of this byte order writes it."""
    size = struct.unpack_from(">I", log, 8)[0]
    out = bytearray(log)
    struct.pack_into(">I", out, 0, 0x377F0682 | (order == ">"))
    seed = summed(out[:24], (0, 0), order)
    struct.pack_into(">2I", out, 24, *seed)
    for frame in frames(log):
        seed = summed(out[frame.at : frame.at + 8] + out[frame.at + FRAME : frame.at + FRAME + size], seed, order)
        struct.pack_into(">2I", out, frame.at + 16, *seed)
    return bytes(out)


def test_a_commit_that_failed_and_was_written_over_is_no_damage(tmp_path: Path) -> None:
    """A commit whose sync failed leaves its end behind the shorter one that came in its place."""
    database(tmp_path / "before", ten)
    logs = []
    for name, blob_bytes in (("failed", 80_000), ("instead", 8_000)):
        shutil.copytree(tmp_path / "before", tmp_path / name)
        insert = f"INSERT INTO t VALUES (99, zeroblob({blob_bytes}))"
        path = database(tmp_path / name, lambda db, sql=insert: db.execute(sql))  # type: ignore[misc]  # its default
        logs.append(sqlite.log_of(path).read_bytes())
    failed, instead = logs
    both = instead + failed[len(instead) :]
    assert sum(frame.commits for frame in frames(both)) == sum(frame.commits for frame in frames(failed)) + 1
    sqlite.log_of(path).write_bytes(both)
    assert sqlite.look(path, LONG_S) is None


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("page_bytes", [512, 4096, 65536])
def test_any_page_size_and_byte_order(tmp_path: Path, page_bytes: int, order: str) -> None:
    """Sound to us whenever SQLite reads it to its end, and not when a bit is flipped."""
    path = database(tmp_path, ten, page_bytes)
    log = in_order(sqlite.log_of(path).read_bytes(), order)
    assert struct.unpack_from(">I", log, 8)[0] == page_bytes
    sqlite.log_of(path).write_bytes(log)
    assert sqlite.look(path, LONG_S) is None
    Copy(path, log, 0).flip(transactions(log)[3][0].at + FRAME + page_bytes - 30)
    found = sqlite.look(path, LONG_S)
    assert found is not None
    assert found.commits == len(transactions(log)) - 3
    sqlite.log_of(path).write_bytes(log)
    Path(f"{path}-shm").unlink()
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert [row[0] for row in db.execute("SELECT n FROM t WHERE x = ? ORDER BY n", (X,))] == list(range(10))


def header(page_bytes: int) -> bytes:
    head = struct.pack(">6I", 0x377F0682, 3_007_000, page_bytes, 0, 1, 2)
    return head + struct.pack(">2I", *summed(head, (0, 0), "<"))


@pytest.mark.parametrize(
    "log",
    [
        b"",
        b"\x37" * 31,
        bytes(100_000),
        header(4096),
        header(4096) + bytes(100_000),
        header(0) + struct.pack(">6I", 1, 1, 1, 2, 3, 4) * 400,
        header(4094) + struct.pack(">6I", 1, 1, 1, 2, 3, 4) * 400,
        header(2**31) + struct.pack(">6I", 1, 1, 1, 2, 3, 4) * 400,
        random.Random(1).randbytes(100_000),
        header(512) + random.Random(2).randbytes(100_000),
    ],
    ids=range(10),
)
def test_a_log_of_nothing_holds_no_commit(tmp_path: Path, log: bytes) -> None:
    """At most its head is lost: SQLite syncs that before the first frame, so no crash leaves such a log."""
    sqlite.log_of(tmp_path / "x.db").write_bytes(log)
    found = sqlite.look(tmp_path / "x.db", LONG_S)
    assert found is None or (found.headless and found.commits == 0)
    assert (found is None) is (len(log) <= 56 or log.startswith((header(4096), header(512))))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda _: None])
def test_a_log_that_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(sqlite.log_of(tmp_path / "x.db"))
    assert sqlite.look(tmp_path / "x.db", LONG_S) is None


def test_a_huge_log_costs_a_bounded_time(tmp_path: Path) -> None:
    path = database(tmp_path, ten)
    os.truncate(sqlite.log_of(path), 512 * 2**30)
    began_s = time.thread_time()
    assert sqlite.look(path, 0.3) is None
    assert time.thread_time() - began_s < 5
