"""Intents on disk: one small file, replaced as a whole and synced before the host gets an answer.

Times are kept in the clock of the boot that wrote them, and move to the clock of the boot that reads them: inside a
boot CLOCK_BOOTTIME has measured what went by, from one boot to the next the wall clock, as far as it has not gone back.

The table of intents in memory, and its way to the disk: one writer, and each caller waits for a limited time.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Container, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import structlog

from powerguard.core.model.serialisation import from_plain, to_plain
from powerguard.durable import replace_file
from powerguard.sentinel.decide import Intent

NAME: Final = "intents.json"
UNREAD: Final = f"{NAME}.unread"
"""An earlier file that could not be read yet (docs/decisions/0241)."""
MAX_BYTES: Final = 4_194_304
_SCHEMA_VERSION: Final = 1


class IntentFileError(ValueError):
    """A foreign or damaged file; the text is the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Now, by every clock there is. boottime_s counts inside the boot of that name; wall_s is never quite true."""

    boot_id: str
    boottime_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOrders:
    """Orders that were given for an outage whose intent has ended: the host asks for them once it is up again."""

    host: str
    outage: str
    orders: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntentTable:
    """The file. intents: by host. last_order_s: when any host was powered on last. given: by host, its last one."""

    intents: Mapping[str, Intent] = field(default_factory=dict)
    last_order_s: float | None = None
    given: Mapping[str, StoredOrders] = field(default_factory=dict)

    def put(self, intent: Intent) -> "IntentTable":
        """Return the table with this intent in place of the host's own older one."""
        return replace(self, intents={**self.intents, intent.host: intent})

    def drop(self, host: str) -> "IntentTable":
        """Return the table without the host's intent; what was ordered for it is remembered."""
        intent = self.intents.get(host)
        left = {name: each for name, each in self.intents.items() if name != host}
        if intent is None or not intent.tries:
            return replace(self, intents=left)
        given = StoredOrders(host=host, outage=intent.outage, orders=intent.tries)
        return replace(self, intents=left, given={**self.given, host: given})

    def hear(self, host: str) -> "IntentTable":
        """Return the table with a trace of the host: what an earlier file holds of it counts no more."""
        if host in self.given:
            return self
        return replace(self, given={**self.given, host: StoredOrders(host=host, outage="", orders=0)})

    def over(self, earlier: "IntentTable") -> "IntentTable":
        """Return the table with what an earlier file holds of hosts of which this one has no trace."""
        known = self.intents.keys() | self.given.keys()
        orders_s = [each for each in (self.last_order_s, earlier.last_order_s) if each is not None]
        return IntentTable(
            intents={**{name: each for name, each in earlier.intents.items() if name not in known}, **self.intents},
            last_order_s=max(orders_s, default=None),
            given={**earlier.given, **self.given},
        )

    def only(self, hosts: Container[str]) -> "IntentTable":
        """Return the table without orders to unknown hosts; intents end by `decide`."""
        return replace(self, given={host: each for host, each in self.given.items() if host in hosts})

    def orders(self, host: str, outage: str) -> int:
        """Return how many times the host was ordered powered on in that outage, as far as is remembered."""
        intent, given = self.intents.get(host), self.given.get(host)
        if intent is not None and intent.outage == outage:
            return intent.tries
        return given.orders if given is not None and given.outage == outage else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What stands in the file. Times are of the clock of this boot; clocks: when it was written."""

    schema_version: int
    clocks: Clocks
    last_order_s: float | None
    intents: tuple[Intent, ...]
    given: tuple[StoredOrders, ...]


def encode(table: IntentTable, now: Clocks) -> bytes:
    """Return the file: a digest, and what it is taken of."""
    written = _Written(
        schema_version=_SCHEMA_VERSION,
        clocks=now,
        last_order_s=table.last_order_s,
        intents=tuple(table.intents.values()),
        given=tuple(table.given.values()),
    )
    body = json.dumps(to_plain(written)).encode()
    return hashlib.sha256(body).hexdigest().encode() + b" " + body + b"\n"


def decode(raw: bytes, now: Clocks) -> IntentTable:
    """Read a file as of now. Raises IntentFileError where it is not what `encode` has written."""
    digest, _, body = raw.removesuffix(b"\n").partition(b" ")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        msg = "it is not as it was written: cut off, or changed"
        raise IntentFileError(msg)
    try:
        written = from_plain(json.loads(body), _Written)
    except (ValueError, RecursionError) as error:  # of which PlainError is one
        msg = f"it is not as it should be ({error}): written by another version?"
        raise IntentFileError(msg) from None
    if written.schema_version != _SCHEMA_VERSION:
        msg = f"schema_version {written.schema_version} is not {_SCHEMA_VERSION}: written by another version"
        raise IntentFileError(msg)
    then = written.clocks
    gone_s = now.boottime_s - then.boottime_s if then.boot_id == now.boot_id else now.wall_s - then.wall_s
    by_s = now.boottime_s - max(gone_s, 0.0) - then.boottime_s
    return IntentTable(
        intents={intent.host: _moved(intent, by_s) for intent in written.intents},
        last_order_s=_plus(written.last_order_s, by_s),
        given={given.host: given for given in written.given},
    )


def _moved(intent: Intent, by_s: float) -> Intent:
    """Return the intent in another clock."""
    return replace(
        intent,
        stored_s=intent.stored_s + by_s,
        not_before_s=intent.not_before_s + by_s,
        expires_s=intent.expires_s + by_s,
        tried_s=_plus(intent.tried_s, by_s),
        on_since_s=_plus(intent.on_since_s, by_s),
        on_at_s=_plus(intent.on_at_s, by_s),
    )


def _plus(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s


class IntentFile:
    """The file in its folder. Every call blocks, for as long as the disk does: call it in a thread.

    late: a file that could not be read yet; None: there is none. Until there is something to write it stays in place.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.late: Path | None = None
        self._unread = folder / UNREAD

    def load(self, now: Clocks) -> tuple[IntentTable, str]:
        """Return what is kept, and what was wrong with it: nothing of a damaged file counts, and it is set aside.

        An older file is never used: a host that has withdrawn its intent must not be powered on by it. One that could
        not be read for a time counts for hosts that were not heard meanwhile.
        """
        table, damage, is_late = _read(self.path, now)
        self.late = self.path if is_late else None
        if is_late:
            return table, damage
        if damage:  # with it is lost who was heard meanwhile
            with contextlib.suppress(OSError):
                self._unread.replace(self._unread.with_name(f"{self._unread.name}.damaged"))
            return table, damage
        earlier, damage, is_late = _read(self._unread, now)
        self.late = self._unread if is_late else None
        return table.over(earlier), damage

    def read_late(self, now: Clocks) -> tuple[IntentTable, str, bool]:
        """Read what could not be read before. Returns what `load` does, and whether it still cannot be read."""
        return _read(self.late or self._unread, now)

    def save(self, table: IntentTable, now: Clocks) -> None:
        """Replace the file; when this returns it is on disk. Raises OSError, and then the old one remains."""
        if self.late == self.path:
            with contextlib.suppress(FileNotFoundError):
                self.path.replace(self._unread)
            self.late = self._unread
        replace_file(self.path, encode(table, now), mode=0o600)
        if self.late is None:
            self._unread.unlink(missing_ok=True)


def _read(path: Path, now: Clocks) -> tuple[IntentTable, str, bool]:
    """Return what a file holds, what was wrong with it, and whether it may yet be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return decode(file.read(MAX_BYTES), now), "", False
    except FileNotFoundError:
        return IntentTable(), "", False
    except OSError as error:
        why = f"{path}: cannot be read ({error.strerror}); its intents do not count"
        if error.errno == errno.ELOOP:
            return IntentTable(), f"{why}; {_set_aside(path)}", False
        return IntentTable(), f"{why} until it can be: it is read again every {LATE_S:g} s", True
    except IntentFileError as error:
        return IntentTable(), f"{path}: {error}; its intents do not count; {_set_aside(path)}", False


def _set_aside(path: Path) -> str:
    """Keep the last damaged file for people; say where."""
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
    except OSError as error:
        return f"it cannot be set aside ({error.strerror})"
    return f"it was set aside as {aside.name}"


log = structlog.get_logger()

MAX_WAITING: Final = 512
"""Most requests that wait for the disk: two of each host."""
STAMP_S: Final = 60.0
"""How often a file with intents is written again: across a reboot the wall clock counts from the last time only. And
how often a write that failed is tried again."""
LATE_S: Final = 5.0
"""How often a file that could not be read is read again."""

Change = Callable[[IntentTable], IntentTable]


class IntentStore:
    """Holds the table. error: why the disk does not hold it as it is here; empty where it does.

    moment: now, by every clock. tasks: writes that continue although no caller waits for them.
    """

    def __init__(self, store: IntentFile, moment: Callable[[], Clocks], tasks: asyncio.TaskGroup) -> None:
        self.table = IntentTable()
        self.damage = ""
        self.error = ""
        self._store = store
        self._moment = moment
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._wanted: list[tuple[Change, asyncio.Future[str]]] = []
        self._waiting = 0
        self._stale = asyncio.Event()

    async def load(self) -> None:
        """Read what is kept, and find out whether it could be written."""
        self.table, self.damage = await asyncio.to_thread(self._store.load, self._moment())
        if self.damage:
            log.error("intents_damaged", because=self.damage)
        self._stale.set()

    def hear(self, host: str) -> None:
        """Enter that a host asks for something: what a file holds of it that could not be read yet is older."""
        if self._store.late is not None:
            self.apply(lambda table: table.hear(host))

    async def close(self, limit_s: float) -> None:
        """Write the table at the end, unless the file could not be read and nothing was asked for."""
        if not self._is_unread:
            await self.flush(limit_s)

    async def commit(self, change: Change, limit_s: float) -> str:
        """Make a change that counts only once it is on disk. Returns why it does not; empty where it does.

        What the disk takes later than limit_s counts then, although the caller got the answer that it does not.
        """

        async def write() -> str:
            written: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._wanted.append((change, written))
            async with self._lock:
                if not written.done():
                    await self._write_wanted()
            return written.result()

        return await self._within(write, limit_s)

    def apply(self, change: Change) -> None:
        """Make a change that counts at once, on disk or not."""
        self.table = change(self.table)
        self._stale.set()

    async def flush(self, limit_s: float) -> str:
        """Write the table as it is. Returns why it is not on disk; empty where it is."""
        return await self.commit(lambda table: table, limit_s)

    @property
    def is_behind(self) -> bool:
        """Whether the disk does not hold all that was asked for: a write runs, or has failed."""
        return self._waiting > 0 or bool(self.error) or self._store.late is not None

    @property
    def _is_unread(self) -> bool:
        return self._store.late == self._store.path

    async def run(self, every_s: float = STAMP_S) -> None:
        """Write what has changed, and again while the disk does not take it. Never returns."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s if self._store.late is None else min(LATE_S, every_s)):
                    await self._stale.wait()
            if self._store.late is not None:
                await self._read_late()
            if not (self._stale.is_set() or self.table.intents or self.error):
                continue
            self._stale.clear()
            if self._is_unread:
                continue
            earlier = self.error
            await self.flush(STAMP_S)
            if self.error and self.error != earlier:
                log.error("intents_unwritable", because=self.error)

    async def _read_late(self) -> None:
        async with self._lock:
            earlier, damage, is_late = await asyncio.to_thread(self._store.read_late, self._moment())
            if is_late:
                return
            self.table = self.table.over(earlier)
            self._store.late = None
        self.damage = damage
        self._stale.set()
        if damage:
            log.error("intents_damaged", because=damage)
        else:
            log.info("intents_read_late", intents=", ".join(sorted(self.table.intents)) or "none")

    async def _within(self, write: Callable[[], Coroutine[Any, Any, str]], limit_s: float) -> str:
        if self._waiting >= MAX_WAITING:
            return "the disk hangs, and too many wait for it"
        self._waiting += 1
        task = self._tasks.create_task(write())
        task.add_done_callback(lambda _: self._done())
        await asyncio.wait((task,), timeout=limit_s)
        if not task.done():
            self.error = f"{self._store.path}: the disk has not taken it within {limit_s:g} s"
            return self.error
        return task.result()

    def _done(self) -> None:
        self._waiting -= 1

    async def _write_wanted(self) -> None:
        """Make all changes that wait in one write: the hosts of one UPS ask in the same second, and wait for a few."""
        wanted, self._wanted = self._wanted, []
        table = self.table
        for change, _ in wanted:
            table = change(table)
        error = await self._save(table)
        for change, written in wanted:
            if not error:
                self.table = change(self.table)  # another task may have changed it meanwhile
            written.set_result(error)

    async def _save(self, table: IntentTable) -> str:
        try:
            await asyncio.to_thread(self._store.save, table, self._moment())
        except OSError as error:
            self.error = f"{self._store.path}: cannot be written ({error.strerror})"
        else:
            self.error = ""
        return self.error
