"""The table of intents in memory, and its way to the disk: one writer, and nobody waits for it longer than he says."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from powerguard.sentinel.store import Moment, Store, Table

log = structlog.get_logger()

MAX_WAITING: Final = 64
STAMP_S: Final = 60.0
"""How often a file with intents is written anew: across a reboot the wall clock counts from the last time only."""

Change = Callable[[Table], Table]


class Keeper:
    """Holds the table. error: why the disk does not hold it as it is here; empty where it does.

    moment: now, by every clock. tasks: where a write goes on for which nobody waits any more.
    """

    def __init__(self, store: Store, moment: Callable[[], Moment], tasks: asyncio.TaskGroup) -> None:
        self.table = Table()
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

        What the disk takes later than limit_s counts then, though the caller has been told that it does not.
        """

        async def write() -> str:
            async with self._lock:
                error = await self._save(change(self.table))
                if not error:
                    self.table = change(self.table)  # meanwhile somebody may have changed it, too
                return error

        return await self._within(write, limit_s)

    def apply(self, change: Change) -> None:
        """Make a change that counts at once, whatever the disk says."""
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

    async def _save(self, table: Table) -> str:
        try:
            await asyncio.to_thread(self._store.save, table, self._moment())
        except OSError as error:
            self.error = f"{self._store.path}: cannot be written ({error.strerror})"
        else:
            self.error = ""
        return self.error
