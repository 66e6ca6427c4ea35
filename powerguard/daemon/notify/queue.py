"""Messages that wait for their targets: in memory, and on disk so that they survive a power-off.

Memory is what the daemon works with; a thread writes every change to a SQLite file behind it. If the disk does not take
a change, messages go on from memory, and the next write that succeeds brings the file up to date as a whole. The file
holds names of targets and texts, no URL.
"""

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import structlog

from powerguard.clock import Clock, boottime_s
from powerguard.daemon.journal.journal import Executor, WorkerThread, in_thread
from powerguard.daemon.journal.sqlite import (
    BUSY_S,
    UNREADABLE,
    JournalError,
    brief,
    is_corrupt,
    pragma,
    put_aside,
    quick_check,
    transaction,
    translated,
)
from powerguard.daemon.notify.composer import Message, message_of

log = structlog.get_logger()

APPLICATION_ID: Final = 0x70676D71
"""PRAGMA application_id: "pgmq"."""
VERSION: Final = 1
MOST: Final = 1000
KEEP_S: Final = 30 * 86400.0
WRONG_CLOCK_S: Final = 3650 * 86400.0
"""A message that seems older than this was made while the host's clock was not set yet, and is kept."""
CLOCK_SET_S: Final = 30.0
"""A step of the wall clock from which on it was set, rather than drifted."""
RETRY_S: Final = 30.0
LOAD_S: Final = 2.0
_TABLES: Final = (
    "CREATE TABLE messages (seq INTEGER PRIMARY KEY, payload TEXT NOT NULL)",
    "CREATE TABLE pending (target TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (target, seq)) WITHOUT ROWID",
    "CREATE TABLE kept (name TEXT PRIMARY KEY, payload TEXT NOT NULL) WITHOUT ROWID",
)
_ADD: Final = "INSERT OR REPLACE INTO messages VALUES (?, ?)"
_OWE: Final = "INSERT OR REPLACE INTO pending VALUES (?, ?)"
_KEEP: Final = "INSERT OR REPLACE INTO kept VALUES (?, ?)"
Op = tuple[str, tuple[object, ...]]


class File:
    """The file, as its one thread sees it. Everything here blocks."""

    def __init__(self, path: Path) -> None:
        """Open nothing yet."""
        self.path = path
        self.notices: list[str] = []
        self._db: sqlite3.Connection | None = None

    def load(self) -> tuple[dict[int, str], list[tuple[str, int]], dict[str, str]]:
        """Return messages, what is owed to whom, and what else is kept. Raises JournalError."""
        with translated(self.path):
            try:
                return self._read()
            except (sqlite3.Error, *UNREADABLE) as error:
                if not is_corrupt(error):
                    raise
                self._set_aside("corrupt", f"damaged ({brief(error)})")
                return self._read()

    def write(self, ops: Iterable[Op]) -> None:
        """Make changes durable, all or none. Raises JournalError."""
        with translated(self.path):
            try:
                db = self._open()
                with transaction(db):
                    for statement, values in ops:
                        db.execute(statement, values)
            except (sqlite3.Error, OSError) as error:
                self.close()
                if isinstance(error, sqlite3.Error) and is_corrupt(error):
                    self._set_aside("corrupt", f"damaged ({brief(error)})")
                raise

    def close(self) -> None:
        """Close the file. Errors no longer matter."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _read(self) -> tuple[dict[int, str], list[tuple[str, int]], dict[str, str]]:
        db = self._open()
        if not quick_check(db):
            self._set_aside("corrupt", "damaged (found by PRAGMA quick_check)")
            db = self._open()
        messages = dict(db.execute("SELECT seq, payload FROM messages ORDER BY seq LIMIT ?", (2 * MOST,)))
        pending = list(db.execute("SELECT target, seq FROM pending ORDER BY seq"))
        return messages, pending, dict(db.execute("SELECT name, payload FROM kept"))

    def _open(self) -> sqlite3.Connection:
        if self._db is not None:
            if self.path.exists():
                return self._db
            self.close()
            msg = f"{self.path}: removed while in use; all messages are written into a new one"
            raise JournalError(msg)
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640))
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            known, version = pragma(db, "application_id"), pragma(db, "user_version")
            tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            foreign = (known != APPLICATION_ID and bool(known or version or tables)) or version > VERSION
            if not foreign:
                self._set_up(db, new=not tables)
        except BaseException:
            db.close()
            raise
        if foreign:
            db.close()
            newer = known == APPLICATION_ID
            what = f"version {version}, written by a newer powerguard" if newer else "not a queue of powerguard"
            self._set_aside("newer" if newer else "foreign", what)
            return self._open()
        self._db = db
        return db

    def _set_up(self, db: sqlite3.Connection, *, new: bool) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA journal_size_limit = 1048576")
        if new:
            with transaction(db):
                for statement in (
                    *_TABLES,
                    f"PRAGMA application_id = {APPLICATION_ID}",
                    f"PRAGMA user_version = {VERSION}",
                ):
                    db.execute(statement)

    def _set_aside(self, why: str, what: str) -> None:
        self.close()
        self.notices.append(f"{self.path}: {what}; kept as {put_aside(self.path, why)}, and a new one was started")


class Queue:
    """All methods belong to the event loop's thread; none blocks it, none raises."""

    def __init__(
        self,
        path: Path,
        writer: Executor | None,
        wall: Callable[[], float],
        take: Callable[[Mapping[str, Any]], None] = lambda _: None,
        clock: Clock = boottime_s,
    ) -> None:
        """Touch nothing yet. writer: None: a thread that `load` starts. take: gets what `keep` has kept, once read.

        wall: for the times of messages; clock: one that is never set.
        """
        self.file = File(path)
        self.lost = 0
        self.full = ""
        """That messages were dropped because too many wait; "" again once fewer do."""
        self.trouble = ""
        """Why messages are in memory only; "" while they are on disk."""
        self._writer = writer
        self._wall = wall
        self._clock = clock
        self._apart_s = wall() - clock()
        self._take = take
        self._messages: dict[int, Message] = {}
        self._pending: dict[str, dict[int, None]] = {}
        self._found: frozenset[int] = frozenset()
        """Numbers of the messages that the file held at the start."""
        self._kept: dict[str, str] = {}
        self._seq = 0
        self._ops: list[Op] = []
        self._whole = False
        self._unread = True
        self._busy: asyncio.Future[Any] | None = None
        self._retry: asyncio.TimerHandle | None = None

    async def load(self, limit_s: float = LOAD_S) -> None:
        """Take in what the file holds. After limit_s messages go on; what the file holds is then taken in later."""
        self._writer = self._writer or WorkerThread("powerguard-messages")
        self._busy = reading = self._read()
        await asyncio.wait((reading,), timeout=limit_s)
        if self._unread:
            # Above the numbers in the file: those of its messages are not known yet.
            self._seq = int(1000 * self._wall())
            if not reading.done():
                self._failed(f"{self.file.path}: no answer from the disk in {limit_s:g} s")

    def _read(self) -> asyncio.Future[tuple[dict[int, str], list[tuple[str, int]], dict[str, str]]]:
        reading = in_thread(cast("Executor", self._writer), self.file.load)
        reading.add_done_callback(self._taken)
        return reading

    def _taken(self, ended: asyncio.Future[tuple[dict[int, str], list[tuple[str, int]], dict[str, str]]]) -> None:
        """Put what the file holds before what has come since."""
        self._busy = None
        self._log_notices()
        error = ended.exception()
        if error is not None:
            self._failed(str(error) if isinstance(error, JournalError) else f"{self.file.path}: {type(error).__name__}")
            return
        messages, pending, kept = ended.result()
        found: dict[int, Message] = {}
        for seq, payload in messages.items():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                found[seq] = message_of(json.loads(payload))
        owed: dict[str, dict[int, None]] = {}
        for target, seq in pending:
            if seq in found:
                owed.setdefault(target, {})[seq] = None
        self._seq = max(self._seq, max(messages, default=0))
        self._found = frozenset(found)
        self._messages = found | self._messages
        self._pending = {name: owed.get(name, {}) | self._pending.get(name, {}) for name in owed | self._pending}
        self._kept = kept | self._kept
        self._unread = False
        values: dict[str, Any] = {}
        for name, payload in kept.items():
            with contextlib.suppress(ValueError, RecursionError):
                values[name] = json.loads(payload)
        self._take(values)
        self._cancel_retry()
        self.prune()

    # --- Changes ------------------------------------------------------------------------------------------------------

    def add(self, message: Message, targets: Iterable[str]) -> None:
        """Owe a message to these targets."""
        names = tuple(targets)
        if not names:
            return
        self._date_again()
        self._seq += 1
        self._messages[self._seq] = message
        self._ops.append((_ADD, (self._seq, _dump(message.plain()))))
        for name in names:
            self._pending.setdefault(name, {})[self._seq] = None
            self._ops.append((_OWE, (name, self._seq)))
        while len(self._messages) > MOST:
            if not self.full:
                log.error("messages_dropped", because=f"{MOST} messages wait, which is all that is kept")
            self.lost += 1
            self.full = f"{MOST} messages wait, and {self.lost} older ones were dropped"
            self._forget(next(iter(self._messages)))
        self._write()

    def waiting(self, target: str) -> list[tuple[int, Message]]:
        """Return what a target is owed, in order."""
        self._date_again()
        return [(seq, self._messages[seq]) for seq in self._pending.get(target, ())]

    def count(self, target: str) -> int:
        """Return how many messages a target is owed."""
        return len(self._pending.get(target, ()))

    def oldest(self, target: str) -> float | None:
        """Return when the oldest message that a target is owed was made, Unix seconds."""
        self._date_again()
        first = next(iter(self._pending.get(target, ())), None)
        return None if first is None else self._messages[first].at

    def done(self, target: str, seqs: Iterable[int]) -> None:
        """A target has these, or they are given up for it."""
        for seq in seqs:
            self._pending.get(target, {}).pop(seq, None)
            self._ops.append(("DELETE FROM pending WHERE target = ? AND seq = ?", (target, seq)))
            if not any(seq in owed for owed in self._pending.values()):
                self._forget(seq)
        self.full = self.full if len(self._messages) >= MOST else ""
        self._write()

    def keep(self, name: str, value: object) -> None:
        """Keep a small value with the messages."""
        payload = _dump(value)
        if self._kept.get(name) != payload:
            self._kept[name] = payload
            self._ops.append((_KEEP, (name, payload)))
            self._write()

    def retain(self, targets: Iterable[str]) -> None:
        """Forget what is owed to others than these: the settings name them no more."""
        known = set(targets)
        for name in [each for each in self._pending if each not in known]:
            self.done(name, list(self._pending[name]))
            del self._pending[name]

    def _date_again(self) -> None:
        """Correct the times of this daemon's messages if the wall clock was set since they were made."""
        apart_s = self._wall() - self._clock()
        step_s = apart_s - self._apart_s
        if abs(step_s) < CLOCK_SET_S:
            return
        self._apart_s = apart_s
        for seq, message in self._messages.items():
            if seq not in self._found:
                dated = replace(message, at=round(max(0.0, message.at + step_s), 3))
                self._messages[seq] = dated
                self._ops.append((_ADD, (seq, _dump(dated.plain()))))
        self._write()

    def prune(self) -> None:
        """Forget what is too old to be of use, of an earlier daemon: since this one made its own, the clock may be set.

        With an empty battery, it begins after a power failure in the year in which systemd was built.
        """
        self._date_again()
        for seq, message in list(self._messages.items()):
            owed = any(seq in each for each in self._pending.values())
            is_old = seq in self._found and KEEP_S < self._wall() - message.at < WRONG_CLOCK_S
            if not owed or is_old:
                self.lost += owed
                self._forget(seq)
        self._write()

    def _forget(self, seq: int) -> None:
        self._messages.pop(seq, None)
        for owed in self._pending.values():
            owed.pop(seq, None)
        self._ops.append(("DELETE FROM messages WHERE seq = ?", (seq,)))
        self._ops.append(("DELETE FROM pending WHERE seq = ?", (seq,)))

    # --- Writing ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        if self._writer is None or self._busy is not None or self._retry is not None:
            return
        if self._unread:
            self._busy = self._read()
            return
        if not (self._ops or self._whole):
            return
        ops, self._ops = (self._all() if self._whole else self._ops), []
        self._whole = False
        self._busy = writing = in_thread(self._writer, lambda: self.file.write(ops))
        writing.add_done_callback(self._written)

    def _written(self, ended: asyncio.Future[None]) -> None:
        self._busy = None
        error = ended.exception()
        self._log_notices()
        if error is not None:
            self._failed(str(error) if isinstance(error, JournalError) else f"{self.file.path}: {type(error).__name__}")
            return
        if self.trouble:
            log.info("messages_durable", path=str(self.file.path))
            self.trouble = ""
        self._write()

    def _failed(self, why: str) -> None:
        if not self.trouble:
            log.error("messages_not_durable", because=why, going_on="in memory")
        self.trouble, self._whole = why, True
        self._ops.clear()
        self._cancel_retry()
        self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._again)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _again(self) -> None:
        self._retry = None
        self._write()

    def _log_notices(self) -> None:
        notices, self.file.notices = self.file.notices, []
        for text in notices:
            log.error("messages_set_aside", because=text)

    def _all(self) -> list[Op]:
        """Return what makes the file say the same as memory."""
        ops: list[Op] = [("DELETE FROM pending", ()), ("DELETE FROM messages", ()), ("DELETE FROM kept", ())]
        ops += [(_ADD, (seq, _dump(message.plain()))) for seq, message in self._messages.items()]
        ops += [(_OWE, (name, seq)) for name, owed in self._pending.items() for seq in owed]
        return [*ops, *((_KEEP, pair) for pair in self._kept.items())]

    async def close(self, limit_s: float) -> None:
        """Bring out what was not written yet, for at most limit_s."""
        if self._writer is None:
            return
        self._cancel_retry()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._busy is not None or ((self._ops or self._whole) and not self.trouble):
                    self._write()
                    if self._busy is not None:
                        await asyncio.wait((self._busy,))
                await in_thread(self._writer, self.file.close)
        self._cancel_retry()
        self._writer.close(0.0)


def _dump(value: object) -> str:
    """Return compact JSON; a lone surrogate in a stranger's text is escaped, since SQLite stores UTF-8."""
    return json.dumps(value, separators=(",", ":"), default=str)
