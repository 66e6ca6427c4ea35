"""Intents on disk: one small file, replaced as a whole and synced before the host gets an answer.

Each record has a digest of its own: a disk that spoils one host's does not take the others' with it.

Times are kept as seconds before or after the moment of writing, so that they hold over a reboot: inside a boot
CLOCK_BOOTTIME has measured what went by, from one boot to the next the wall clock, as far as it has not gone back.

The table of intents in memory, and its way to the disk: one writer, and each caller waits for a limited time.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Container, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from powerguard.durable import replace_file
from powerguard.sentinel.decide import Intent

NAME: Final = "intents.json"
MAX_BYTES: Final = 4_194_304
MAX_RECORDS: Final = 4096
MAX_ASIDE: Final = 3
"""Number of damaged files that are kept for an inspection."""
_SCHEMA_VERSION: Final = 1
_T = TypeVar("_T")


class IntentFileError(ValueError):
    """A foreign or damaged file; the text is the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Now, by every clock there is. boottime_s counts inside the boot of that name; wall_s is never quite true."""

    boot_id: str
    boottime_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Orders that were given for an outage whose intent has ended: the host asks for them once it is up again."""

    outage: str
    orders: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntentTable:
    """The file. intents: by host. last_order_s: when any host was powered on last. given: by host, its last one."""

    intents: Mapping[str, Intent] = field(default_factory=dict)
    last_order_s: float | None = None
    given: Mapping[str, Given] = field(default_factory=dict)

    def put(self, intent: Intent) -> "IntentTable":
        """Return the table with this intent in place of the host's own older one."""
        return replace(self, intents={**self.intents, intent.host: intent})

    def drop(self, host: str) -> "IntentTable":
        """Return the table without the host's intent; what was ordered for it is remembered."""
        intent = self.intents.get(host)
        left = {name: each for name, each in self.intents.items() if name != host}
        if intent is None or not intent.tries:
            return replace(self, intents=left)
        return replace(self, intents=left, given={**self.given, host: Given(outage=intent.outage, orders=intent.tries)})

    def only(self, hosts: Container[str]) -> "IntentTable":
        """Return the table without orders to unknown hosts; intents end by `decide`."""
        return replace(self, given={host: each for host, each in self.given.items() if host in hosts})

    def orders(self, host: str, outage: str) -> int:
        """Return how many times the host was ordered powered on in that outage, as far as is remembered."""
        intent, given = self.intents.get(host), self.given.get(host)
        if intent is not None and intent.outage == outage:
            return intent.tries
        return given.orders if given is not None and given.outage == outage else 0


def encode(table: IntentTable, now: Clocks) -> bytes:
    """Return the file: a line that says what the times count from, then one for each record; before each its digest.

    A record's digest is taken with the first line's: one of another writing, with times of its own, is none of these.
    """
    at_s = now.boottime_s
    head = {
        "schema_version": _SCHEMA_VERSION,
        "boot_id": now.boot_id,
        "boottime_s": at_s,
        "wall_s": now.wall_s,
        "last_order_ago_s": None if table.last_order_s is None else at_s - table.last_order_s,
        "records": len(table.intents) + len(table.given),
    }
    records: list[dict[str, object]] = [
        {
            "host": intent.host,
            "outage": intent.outage,
            "boot_id": intent.boot_id,
            "feeds": list(intent.feeds),
            "stored_ago_s": at_s - intent.stored_s,
            "not_before_in_s": intent.not_before_s - at_s,
            "expires_in_s": intent.expires_s - at_s,
            "tries": intent.tries,
            "tried_ago_s": None if intent.tried_s is None else at_s - intent.tried_s,
            "was_off": intent.was_off,
            "on_since_ago_s": None if intent.on_since_s is None else at_s - intent.on_since_s,
            "on_ago_s": None if intent.on_at_s is None else at_s - intent.on_at_s,
        }
        for intent in table.intents.values()
    ]
    records += [{"host": host, "outage": told.outage, "orders": told.orders} for host, told in table.given.items()]
    first = _body(head)
    return b"".join((_line(b"", first), *(_line(first, _body(record)) for record in records)))


def _body(told: Mapping[str, object]) -> bytes:
    return json.dumps(told, allow_nan=False).encode()


def _line(first: bytes, body: bytes) -> bytes:
    return hashlib.sha256(first + b"\n" + body).hexdigest().encode() + b" " + body + b"\n"


def decode(raw: bytes, now: Clocks) -> tuple[IntentTable, int]:
    """Read a file as of now: what is whole of it, and how many records are not, or are missing.

    Raises StoreError where not even the first line is what `encode` has written: then no time means anything.
    """
    head_line, *lines = raw.split(b"\n", MAX_RECORDS + 1)
    first = head_line.partition(b" ")[2]
    if _line(b"", first) != head_line + b"\n":
        msg = "its first line is not as it was written: cut off, or changed"
        raise IntentFileError(msg)
    try:
        head = json.loads(first)
        if head["schema_version"] != _SCHEMA_VERSION:
            msg = f"schema_version {head['schema_version']!r} is not {_SCHEMA_VERSION}: written by another version"
            raise IntentFileError(msg)
        at_s = now.boottime_s - _gone_s(head, now)
        last_ago_s = head["last_order_ago_s"]
        table = IntentTable(last_order_s=None if last_ago_s is None else at_s - _number(last_ago_s))
        missing = _typed(head["records"], int)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, IntentFileError):
            raise
        msg = f"its first line is not as it should be ({type(error).__name__})"
        raise IntentFileError(msg) from None
    extra = 0
    for line in filter(None, lines):
        read = _read(first, line, at_s, table)
        missing, extra = missing - (read is not None), extra + (read is None)
        table = read or table
    return table, max(missing, extra)


def _read(first: bytes, line: bytes, at_s: float, table: IntentTable) -> IntentTable | None:
    """Return the table with one more record; None where the line is not whole, or not of this file."""
    body = line.partition(b" ")[2]
    if _line(first, body) != line + b"\n":
        return None
    try:
        told = json.loads(body)
        if "orders" not in told:
            return table.put(_intent(told, at_s))
        given = Given(outage=_typed(told["outage"], str), orders=_typed(told["orders"], int))
        return replace(table, given={**table.given, _typed(told["host"], str): given})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _gone_s(told: Mapping[str, Any], now: Clocks) -> float:
    """Seconds since the file was written, at least 0."""
    if told["boot_id"] == now.boot_id:
        return max(now.boottime_s - _number(told["boottime_s"]), 0.0)
    return max(now.wall_s - _number(told["wall_s"]), 0.0)


def _intent(told: Mapping[str, Any], at_s: float) -> Intent:
    return Intent(
        host=_typed(told["host"], str),
        outage=_typed(told["outage"], str),
        boot_id=_typed(told["boot_id"], str),
        feeds=tuple(_typed(feed, str) for feed in told["feeds"]),
        stored_s=at_s - _number(told["stored_ago_s"]),
        not_before_s=at_s + _number(told["not_before_in_s"]),
        expires_s=at_s + _number(told["expires_in_s"]),
        tries=_typed(told["tries"], int),
        tried_s=_before(told["tried_ago_s"], at_s),
        was_off=_typed(told["was_off"], bool),
        # Files of versions before these were kept have none.
        on_since_s=_before(told.get("on_since_ago_s"), at_s),
        on_at_s=_before(told.get("on_ago_s"), at_s),
    )


def _before(ago_s: object, at_s: float) -> float | None:
    return None if ago_s is None else at_s - _number(ago_s)


def _typed(value: object, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return float(value)


class IntentFile:
    """The file in its folder. Every call blocks, for as long as the disk does: call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def load(self, now: Clocks) -> tuple[IntentTable, str]:
        """Return what is kept, and what was wrong with it: a damaged file is set aside, and what is whole of it counts.

        It is never filled up from an older one: a host that has withdrawn its intent must not be powered on by it.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return IntentTable(), ""
        except OSError as error:
            return IntentTable(), f"{self.path}: cannot be read ({error.strerror})"
        table, raw = IntentTable(), b""
        try:
            with os.fdopen(descriptor, "rb") as file:
                raw = file.read(MAX_BYTES + 1)
            table, lost = decode(raw[:MAX_BYTES], now)
            if not lost and len(raw) <= MAX_BYTES:
                return table, ""
            why = f"{lost} records are cut off or changed; {len(table.intents)} intents are whole and count"
        except (OSError, IntentFileError) as error:
            why = f"{error.strerror if isinstance(error, OSError) else error}; its intents do not count"
        return table, f"{self.path}: {why}; {self._set_aside(table, raw, now)}"

    def _set_aside(self, table: IntentTable, raw: bytes, now: Clocks) -> str:
        """Keep a damaged file for people, at most MAX_ASIDE of them; say where."""
        aside = self.path.with_name(f"{NAME}.damaged-{now.wall_s:.0f}")
        try:
            if table.intents:
                replace_file(aside, raw, mode=0o600)  # This one stays in its place until the next one is written.
            else:
                self.path.replace(aside)
            kept = sorted(self.path.parent.glob(f"{NAME}.damaged-*"), key=lambda path: path.stat().st_mtime)
            for old in kept[:-MAX_ASIDE]:
                old.unlink()
        except OSError as error:
            return f"it cannot be set aside ({error.strerror})"
        return f"it was set aside as {aside.name}"

    def save(self, table: IntentTable, now: Clocks) -> None:
        """Replace the file; when this returns it is on disk. Raises OSError, and then the old one stands."""
        replace_file(self.path, encode(table, now), mode=0o600)


log = structlog.get_logger()

MAX_WAITING: Final = 64
STAMP_S: Final = 60.0
"""How often a file with intents is written again: across a reboot the wall clock counts from the last time only."""

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
        self._waiting = 0
        self._stale = asyncio.Event()

    async def load(self) -> None:
        """Read what is kept, and find out whether it could be written."""
        self.table, self.damage = await asyncio.to_thread(self._store.load, self._moment())
        if self.damage:
            log.error("intents_damaged", because=self.damage)
        self._stale.set()

    async def commit(self, change: Change, limit_s: float) -> str:
        """Make a change that counts only once it is on disk. Returns why it does not; empty where it does.

        What the disk takes later than limit_s counts then, although the caller got the answer that it does not.
        """

        async def write() -> str:
            async with self._lock:
                error = await self._save(change(self.table))
                if not error:
                    self.table = change(self.table)  # another task may have changed it meanwhile
                return error

        return await self._within(write, limit_s)

    def apply(self, change: Change) -> None:
        """Make a change that counts at once, on disk or not."""
        self.table = change(self.table)
        self._stale.set()

    async def flush(self, limit_s: float) -> str:
        """Write the table as it is. Returns why it is not on disk; empty where it is."""

        async def write() -> str:
            async with self._lock:
                return await self._save(self.table)

        return await self._within(write, limit_s)

    async def run(self) -> None:
        """Write what has changed, and again while the disk does not take it. Never returns."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STAMP_S):
                    await self._stale.wait()
            if not self._stale.is_set() and not self.table.intents:
                continue
            self._stale.clear()
            was = self.error
            await self.flush(STAMP_S)
            if self.error and self.error != was:
                log.error("intents_unwritable", because=self.error)

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

    async def _save(self, table: IntentTable) -> str:
        try:
            await asyncio.to_thread(self._store.save, table, self._moment())
        except OSError as error:
            self.error = f"{self._store.path}: cannot be written ({error.strerror})"
        else:
            self.error = ""
        return self.error
