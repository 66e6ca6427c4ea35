"""The journal's file: SQLite, written by one thread, readable by other processes at the same time.

WAL with synchronous=FULL: a commit that returned survives kill -9 and a power cut (https://sqlite.org/pragma.html,
synchronous). Everything here blocks, and runs in the journal's own threads only.
"""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from powerguard.core.model.serialisation import to_plain
from powerguard.daemon.journal import sqlite
from powerguard.daemon.journal.queries import LOST_ALL, digest_of, read_all
from powerguard.daemon.journal.records import Line, Loaded, OutageRecord, Record, Recorded, Snapshot, dump, pack
from powerguard.daemon.journal.sqlite import (
    APPLICATION_ID,
    BUSY_S,
    CHECK_S,
    UNREADABLE,
    JournalError,
    NotOursError,
    brief,
    inode,
    is_corrupt,
    is_full,
    is_full_or_busy,
    next_ending,
    pragma,
    put_aside,
    quick_check,
    read_only,
    sync_folder,
    transaction,
    translated,
    with_index_in_memory,
)

Migration = tuple[str, ...]
MIGRATIONS: tuple[Migration, ...] = (
    (
        """CREATE TABLE entries (
            seq INTEGER PRIMARY KEY, boot_id TEXT NOT NULL, at_s REAL NOT NULL, wall REAL NOT NULL, outage TEXT,
            kind TEXT NOT NULL, event TEXT NOT NULL, because TEXT NOT NULL, action TEXT, payload TEXT NOT NULL)""",
        "CREATE INDEX entries_outage ON entries (outage, seq)",
        """CREATE TABLE actions (
            id TEXT PRIMARY KEY, seq INTEGER NOT NULL, boot_id TEXT NOT NULL, outage TEXT, payload TEXT NOT NULL)""",
        """CREATE TABLE snapshot (
            one INTEGER PRIMARY KEY CHECK (one = 1), boot_id TEXT NOT NULL, at_s REAL NOT NULL, wall REAL NOT NULL,
            state TEXT NOT NULL)""",
        """CREATE TABLE outages (
            id TEXT PRIMARY KEY, boot_id TEXT NOT NULL, started_at_s REAL NOT NULL, started_wall REAL NOT NULL,
            ended_at_s REAL, ended_wall REAL, outcome TEXT NOT NULL, figures TEXT NOT NULL)""",
        "CREATE TABLE counters (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
    ),
    (
        """CREATE TABLE recorded (
            seq INTEGER PRIMARY KEY, boot_id TEXT NOT NULL, at_s REAL NOT NULL, wall REAL NOT NULL,
            outage TEXT NOT NULL, payload TEXT NOT NULL)""",
        "CREATE INDEX recorded_outage ON recorded (outage, seq)",
    ),
    ("ALTER TABLE snapshot ADD COLUMN digest TEXT NOT NULL DEFAULT ''",),
)
"""Migration i brings a file from version i to i + 1; each is one transaction. Never change one that was released."""

CHUNK_ROWS = 2000
RESERVE_BYTES = 8 * 1024 * 1024
"""Twice what the log of the file may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much is kept. The outage that runs is always kept whole but for the readings of its oldest part.

    outages: that many of the newest; quiet_lines: lines outside of any outage; size_bytes: of the whole file.
    """

    outages: int = 200
    quiet_lines: int = 20_000
    size_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Steps that are written in one transaction. counters: what to add to each."""

    records: tuple[Record, ...] = ()
    snapshot: Snapshot | None = None
    open_outage: str | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    dropped: int = 0


class Store:
    """The file as its one writer sees it. `notices` collects messages for a person (a file that was set aside)."""

    look_s = CHECK_S

    def __init__(
        self, path: Path, retention: Retention | None = None, migrations: tuple[Migration, ...] = MIGRATIONS
    ) -> None:
        """Do not open it yet: the constructor runs on the event loop."""
        self.path = path
        self.notices: list[str] = []
        self._retention = retention or Retention()
        self._migrations = migrations
        self._db: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._behind = 0
        self._headless = False
        self._in_use = Path(f"{path}-in-use")
        """From the first write to an orderly end, the digest of the newest state. A log that is missing meanwhile is
        lost, unless the file alone has that state: the sqlite3 tool folds the log of a killed daemon into it."""
        self._is_marked = False
        self._reserve = Path(f"{path}-reserve")
        """Room on the disk that is kept for an outage, and given back to write it when the disk has filled up."""

    # --- Opening -----------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        if self._db is not None:
            if self._inode == inode(self.path):
                return self._db
            # Commits would continue into a file without a name.
            self.close()
            self.notices.append(f"{self.path}: removed or replaced while in use; a journal was started in its place")
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._look_at_log()
        new = not self.path.exists()
        if new:
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640))
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._set_up(db)
            # What lies behind the end of the log, and was not looked at, must never be taken for what we write now.
            with contextlib.suppress(sqlite3.Error):
                db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        except BaseException:
            db.close()
            raise
        if new:
            sync_folder(self.path.parent)
        self._db = db
        self._inode = inode(self.path)
        return db

    def _look_at_log(self) -> None:
        """Report what a damaged log hides, and keep the log: SQLite would silently overwrite it."""
        if inode(self.path) is None or not self.path.stat().st_size:  # SQLite deletes the log of an empty file
            if self._in_use.exists():
                self._headless = True
                self._set_aside("corrupt", f"{self.path}: is empty or gone, and its log alone cannot be read")
            return
        if sqlite.mend_versions(self.path):
            self.notices.append(
                f"{self.path}: a byte of its header was damaged, and was put right; look for disk errors"
            )
        if self._in_use.exists() and not sqlite.has_frames(self.path) and not self._holds_newest():
            self._headless = True
            self.notices.append(
                f"{self.path}: its log is gone, and with it the newest transactions; what is older was read"
            )
        found = sqlite.look(self.path, self.look_s)
        if found is None:
            return
        self._headless |= found.headless
        self._behind = found.commits
        hidden = "the newest transactions" if found.headless else f"{found.commits} transactions"
        log = sqlite.log_of(self.path)
        kept = log.with_name(f"{log.name}.{next_ending('corrupt', log)}")
        if found.headless:
            log.rename(kept)
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}-shm").unlink()
        else:  # what lies before the damage is SQLite's to read
            making = log.with_name(f"{log.name}.keeping")  # a kill leaves one, which is started again
            shutil.copyfile(log, making)
            making.rename(kept)
        sync_folder(self.path.parent)
        self.notices.append(
            f"{self.path}: its log is damaged, which hides {hidden}; kept as {kept.name}, and what is older was read"
        )

    def _holds_newest(self) -> bool:
        with contextlib.suppress(OSError, JournalError), read_only(self.path) as db:
            newest = db.execute("SELECT digest FROM snapshot").fetchone()
            return newest is not None and newest[0] == self._in_use.read_text(encoding="ascii", errors="replace")
        return False

    def _set_up(self, db: sqlite3.Connection) -> None:
        version = pragma(db, "user_version")
        known = pragma(db, "application_id")
        tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if known != APPLICATION_ID and (known != 0 or version != 0 or tables):
            message = f"{self.path}: not a powerguard journal"
            raise NotOursError(message, why="foreign")
        if version > len(self._migrations):
            message = f"{self.path}: schema version {version}, written by a newer powerguard"
            raise NotOursError(message, why="newer")
        if not tables:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only before the first table
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA journal_size_limit = 4194304")
        if known != APPLICATION_ID:  # writes, and a disk that is full must not keep us from reading
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        for number in range(version, len(self._migrations)):
            with transaction(db):
                for statement in self._migrations[number]:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {number + 1}")

    def close(self) -> None:
        """Close the file; the write-ahead log is folded into it. Errors no longer matter."""
        if self._db is not None:
            db, self._db = self._db, None
            with contextlib.suppress(sqlite3.Error):
                db.close()
                self._unmark()

    def _mark(self, newest: str) -> None:
        """Note that there is a log from now on, and the digest of its newest state; "": it has no newer one."""
        if not self._is_marked:
            self._in_use.touch(mode=0o640)
            sync_folder(self.path.parent)
            self._is_marked = True
        if newest:
            # In place and not synced: a kill spares it, and after a power cut an older one says no more than none.
            with contextlib.suppress(OSError), self._in_use.open("r+b") as file:
                file.write(newest.encode())

    def _unmark(self) -> None:
        self._is_marked = False
        with contextlib.suppress(OSError):
            self._in_use.unlink()

    def _set_aside(self, why: str, reason: str) -> None:
        """Give a file that cannot be used another name, with its log, and never delete it."""
        self.close()
        self._unmark()
        self.notices.append(f"{reason}; kept as {put_aside(self.path, why)}, and a new journal was started")

    # --- Reading at start ------------------------------------------------------------------------------------------

    def load(self) -> tuple[Loaded, tuple[OutageRecord, ...]]:
        """Return what was known, and the newest outages. Raises JournalError when there can be no file at all.

        What cannot be written is read all the same, for a latch or the battery's account may stand in it: `durable` is
        False then, and trouble says why.
        """
        try:
            loaded, outages = self._load()
        except JournalError as error:
            for opened in (read_only, with_index_in_memory):
                with contextlib.suppress(JournalError), opened(self.path) as db:
                    loaded, outages = read_all(db)
                    return self._less(replace(loaded, durable=False, trouble=str(error))), outages
            raise
        return self._less(loaded), outages

    def _less(self, loaded: Loaded) -> Loaded:
        """Mark the loaded state as not the newest, if the log's end is lost."""
        if not (self._behind or self._headless) or loaded.lost == LOST_ALL:
            return loaded
        newest = "the newest transactions" if self._headless else f"the last {self._behind} transactions"
        lost = newest if loaded.state is not None else LOST_ALL
        trouble = loaded.trouble or f"{self.path}: its log is damaged"
        return replace(loaded, lost=" and ".join(filter(None, (lost, loaded.lost))), trouble=trouble)

    def _load(self) -> tuple[Loaded, tuple[OutageRecord, ...]]:
        with translated(self.path):
            try:
                db = self._open()
                loaded, outages = read_all(db)
                sound = quick_check(db)
            except NotOursError as error:
                self._set_aside(error.why, str(error))
            except (sqlite3.DatabaseError, *UNREADABLE) as error:
                if not is_corrupt(error):
                    raise
                self._set_aside("corrupt", f"{self.path}: damaged ({brief(error)})")
            else:
                if sound:
                    return loaded, outages
                # What could still be read is true; only the file can no longer be trusted.
                self._set_aside("corrupt", f"{self.path}: damaged (found by PRAGMA quick_check)")
                self._seed(self._open(), loaded, outages)
                return loaded, outages
            self._open()
            return Loaded(durable=True, trouble=self.notices[-1], lost=LOST_ALL), ()

    def _seed(self, db: sqlite3.Connection, loaded: Loaded, outages: Sequence[OutageRecord]) -> None:
        with transaction(db):
            if loaded.state is not None:
                state = dump(to_plain(loaded.state))
                _write_snapshot(db, Snapshot(boot_id=loaded.boot_id, at_s=loaded.at_s, wall=loaded.wall, state=state))
            for outage in reversed(outages):
                _write_outage(db, outage)
            for number, action in enumerate(loaded.in_flight, start=-len(loaded.in_flight)):
                name = None if loaded.outage is None else loaded.outage.id
                _run(db, _ACTION, action.id, number, loaded.boot_id, name, dump(to_plain(action)))
            for counter, value in loaded.counters.items():
                _run(db, _COUNT, counter, value)

    # --- Writing ---------------------------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        """Make a batch durable, all or nothing. Raises JournalError; the next write tries everything again."""
        with translated(self.path):
            try:
                self._write_or_set_aside(batch)
            except (sqlite3.Error, OSError) as error:
                if batch.open_outage is None or not is_full(error) or not self._reserve.exists():
                    raise
                self._reserve.unlink()
                self._write_or_set_aside(batch)

    def _write_or_set_aside(self, batch: Batch) -> None:
        try:
            self._write(batch)
        except NotOursError as error:
            self._set_aside(error.why, str(error))
            self._write(batch)
        except (sqlite3.Error, *UNREADABLE) as error:
            if isinstance(error, sqlite3.Error) and is_full_or_busy(error):
                raise  # rolled back and usable; readers need the log's index, which a full disk could not hold
            self.close()
            if not is_corrupt(error):
                raise
            self._set_aside("corrupt", f"{self.path}: damaged ({brief(error)})")
            self._write(batch)
        except OSError:
            self.close()
            raise

    def _write(self, batch: Batch) -> None:
        db = self._open()
        newest = ""
        with transaction(db):
            for record in batch.records:
                for outage in record.outages:
                    _write_outage(db, outage)
                for line in record.lines:
                    _write_line(db, line)
                for row in record.recorded:
                    _write_recorded(db, row)
            if batch.snapshot is not None:
                newest = _write_snapshot(db, batch.snapshot)
                if batch.dropped:
                    _write_line(db, _gap(batch.snapshot, batch.open_outage, batch.dropped))
            if batch.records:
                # This outage will not end any more: its end was never journalled.
                _run(db, _LOST, batch.open_outage)
            for name, amount in batch.counters.items():
                _run(db, _COUNT, name, amount)
        self._mark(newest)

    def prune(self, open_outage: str | None) -> bool:
        """Delete a chunk of what retention no longer covers; True when there may be more. Raises JournalError."""
        if open_outage is None:
            self._keep_reserve()
        with translated(self.path):
            db = self._open()
            keep = self._retention
            removed = 0
            with transaction(db):
                doomed = db.execute(
                    "SELECT id FROM outages WHERE id IS NOT ? ORDER BY rowid DESC LIMIT -1 OFFSET ?",
                    (open_outage, keep.outages),
                ).fetchall()
                for (outage,) in doomed[:20]:
                    removed += _forget(db, outage)
                first = "SELECT seq FROM entries WHERE outage IS NULL ORDER BY seq DESC LIMIT 1 OFFSET ?"
                edge = db.execute(first, (keep.quiet_lines,)).fetchone()
                if edge is not None:
                    removed += _delete(db, "outage IS NULL AND seq <= ?", edge[0])
                if not removed and _used_bytes(db) > keep.size_bytes:
                    removed += _shrink(db, open_outage)
            db.execute("PRAGMA incremental_vacuum(1000)").fetchall()
            return removed > 0

    def _keep_reserve(self) -> None:
        """Take room for an outage, if there is as much."""
        with contextlib.suppress(OSError):
            if self._reserve.exists() and self._reserve.stat().st_size == RESERVE_BYTES:
                return
            with self._reserve.open("wb") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
                except OSError:
                    self._reserve.unlink()


# --- Rows ----------------------------------------------------------------------------------------------------------


_ENTRY = """INSERT INTO entries (boot_id, at_s, wall, outage, kind, event, because, action, payload)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_ACTION = "INSERT OR REPLACE INTO actions (id, seq, boot_id, outage, payload) VALUES (?, ?, ?, ?, ?)"
_RECORDED = "INSERT INTO recorded (boot_id, at_s, wall, outage, payload) VALUES (?, ?, ?, ?, ?)"
_SNAPSHOT = "INSERT OR REPLACE INTO snapshot (one, boot_id, at_s, wall, state, digest) VALUES (1, ?, ?, ?, ?, ?)"
_OUTAGE = """INSERT INTO outages
    (id, boot_id, started_at_s, started_wall, ended_at_s, ended_wall, outcome, figures) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET ended_at_s = excluded.ended_at_s, ended_wall = excluded.ended_wall,
        outcome = excluded.outcome, figures = excluded.figures"""
_LOST = """UPDATE outages SET ended_wall = started_wall, outcome = 'lost'
    WHERE ended_wall IS NULL AND id IS NOT ?"""
_COUNT = """INSERT INTO counters (name, value) VALUES (?, ?)
    ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"""


def _run(db: sqlite3.Connection, statement: str, *values: object) -> sqlite3.Cursor:
    """Execute with strings made storable: a lone surrogate in a hostile peer's text is not UTF-8."""
    safe = [each.encode("utf-8", "backslashreplace").decode() if isinstance(each, str) else each for each in values]
    return db.execute(statement, safe)


def _write_line(db: sqlite3.Connection, line: Line) -> None:
    payload = dump(line.payload)
    row = (line.boot_id, line.at_s, line.wall, line.outage, line.kind, line.event, line.because, line.action, payload)
    seq = _run(db, _ENTRY, *row).lastrowid
    if line.kind == "action":
        _run(db, _ACTION, line.action, seq, line.boot_id, line.outage, payload)
    elif line.kind == "outcome":
        _run(db, "DELETE FROM actions WHERE id = ?", line.action)


def _write_recorded(db: sqlite3.Connection, row: Recorded) -> None:
    _run(db, _RECORDED, row.boot_id, row.at_s, row.wall, row.heard.outage, pack(row.heard))


def _gap(snapshot: Snapshot, outage: str | None, dropped: int) -> Line:
    return Line(
        seq=0,
        boot_id=snapshot.boot_id,
        at_s=snapshot.at_s,
        wall=snapshot.wall,
        outage=outage,
        kind="gap",
        event="steps_lost",
        because="the journal could not be written, and memory holds a limited number of steps",
        payload={"steps": dropped},
    )


def _write_snapshot(db: sqlite3.Connection, snapshot: Snapshot) -> str:
    """Return its digest."""
    row = (snapshot.boot_id, float(snapshot.at_s), float(snapshot.wall), snapshot.state)
    digest = digest_of(*row)
    _run(db, _SNAPSHOT, *row, digest)
    return digest


def _write_outage(db: sqlite3.Connection, outage: OutageRecord) -> None:
    began = (outage.started_at_s, outage.started_wall)
    ended = (outage.ended_at_s, outage.ended_wall)
    _run(db, _OUTAGE, outage.id, outage.boot_id, *began, *ended, outage.outcome, dump(dict(outage.figures)))


def _delete(db: sqlite3.Connection, where: str, *values: object) -> int:
    oldest = f"SELECT seq FROM entries WHERE {where} ORDER BY seq LIMIT {CHUNK_ROWS}"  # noqa: S608 - our own words
    return db.execute(f"DELETE FROM entries WHERE seq IN ({oldest})", values).rowcount  # noqa: S608 - as above


def _delete_recorded(db: sqlite3.Connection, outage: str) -> int:
    oldest = "SELECT seq FROM recorded WHERE outage = ? ORDER BY seq LIMIT ?"
    return db.execute(f"DELETE FROM recorded WHERE seq IN ({oldest})", (outage, CHUNK_ROWS // 10)).rowcount  # noqa: S608


def _forget(db: sqlite3.Connection, outage: str) -> int:
    removed = _delete(db, "outage = ?", outage) + _delete_recorded(db, outage)
    db.execute("DELETE FROM actions WHERE outage = ?", (outage,))
    # Rows of an outage that is no longer listed would never go.
    return removed or db.execute("DELETE FROM outages WHERE id = ?", (outage,)).rowcount


def _shrink(db: sqlite3.Connection, open_outage: str | None) -> int:
    """Delete the oldest chunk: quiet lines first, then whole outages, then the oldest inputs of the one that runs."""
    removed = _delete(db, "outage IS NULL")
    if removed:
        return removed
    oldest = "SELECT id FROM outages WHERE id IS NOT ? ORDER BY rowid LIMIT 1"
    found = db.execute(oldest, (open_outage,)).fetchone()
    if found is not None:
        return _forget(db, found[0])
    return _delete(db, "kind = 'event'") or _delete_recorded(db, open_outage or "")


def _used_bytes(db: sqlite3.Connection) -> int:
    return (pragma(db, "page_count") - pragma(db, "freelist_count")) * pragma(db, "page_size")
