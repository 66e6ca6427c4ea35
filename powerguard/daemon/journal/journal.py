"""The journal as the loop sees it: durable within half a second, or in memory with an alarm; never in the way.

Its blocking calls run in a thread that may hang in a dead disk without delaying other tasks.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from powerguard.daemon.journal import queries
from powerguard.daemon.journal.records import Entry, Line, Loaded, OutageRecord, Record, Snapshot, prepare
from powerguard.daemon.journal.sqlite import JournalError, read_only
from powerguard.daemon.journal.store import Batch, Retention, Store
from powerguard.daemon.log import describe


class Executor(Protocol):
    """Runs calls one after the other, in order. The calls do not raise."""

    def submit(self, call: Callable[[], None]) -> None:
        """Have call run; returns at once."""
        ...

    def close(self, limit_s: float) -> None:
        """Wait for the submitted calls, for at most limit_s; no call may be submitted afterwards."""
        ...


class WorkerThread:
    """A daemon thread, started at once: threads may fail to start when memory is short, which is when it matters.

    Not a ThreadPoolExecutor: the interpreter waits at its exit for the threads of one, and so for a hung disk.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def close(self, limit_s: float) -> None:
        self._calls.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            # Only a loop that was closed meanwhile ends up here: no caller is left.
            with contextlib.suppress(RuntimeError):
                call()


class Inline:
    """Runs each call where it is submitted: for virtual time, where a thread would live in another time."""

    def submit(self, call: Callable[[], None]) -> None:
        call()

    def close(self, limit_s: float) -> None:
        del limit_s  # there is never a call to wait for


log = structlog.get_logger()

T = TypeVar("T")


def in_thread(executor: Executor, work: Callable[[], T]) -> asyncio.Future[T]:
    """Run work in the executor's thread; its result or failure comes back as a future of this loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # None only where T is None
        else:
            future.set_exception(error)

    def call() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - carried over to the loop, where it is answered
            loop.call_soon_threadsafe(finish, None, error)
        else:
            loop.call_soon_threadsafe(finish, result, None)

    executor.submit(call)
    return future


OUTAGES_IN_MEMORY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHealth:
    """Whether what the journal was given is on disk.

    reason: why not, and the fix; "" when durable. waiting: steps that are in memory only.
    dropped: steps that memory could not hold either, since start.
    """

    durable: bool = True
    reason: str = ""
    waiting: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLimits:
    """How long and how much. Times in seconds.

    append_s: an append that takes longer goes on in memory. load_s, read_s: the same for the start and for queries.
    retry_s: how often a journal that failed is tried again. memory_steps: how many steps memory holds.
    read_tries: how often one that could not be read at the start is read again before it is written to all the same.
    """

    append_s: float = 0.5
    load_s: float = 2.0
    read_s: float = 2.0
    retry_s: float = 5.0
    read_tries: int = 12
    counters_s: float = 30.0
    memory_steps: int = 5000
    prune_every: int = 500


class Journal:
    """One per daemon. All methods belong to the event loop's thread; none blocks it, none raises.

    Steps wait in memory, in order, until a batch that holds them has been committed; so a journal that comes back
    brings everything with it, and the order of the story is never broken.
    """

    def __init__(
        self,
        path: Path,
        *,
        boot_id: str,
        wall: Callable[[], float] = time.time,  # noqa: TID251 - the journal is where wall time belongs
        writer: Executor | None = None,
        reader: Executor | None = None,
        limits: JournalLimits | None = None,
        retention: Retention | None = None,
        store: Store | None = None,
    ) -> None:
        """Start the threads; the disk is first touched by `load`."""
        self.path = path
        self._boot_id = boot_id
        self._wall = wall
        self._limits = limits or JournalLimits()
        self._store = store or Store(path, retention)
        self._writer = writer or WorkerThread("powerguard-journal")
        self._reader = reader or WorkerThread("powerguard-journal-reader")
        self._reads_stuck = 0
        self._durable = True
        self._reason = ""
        self._dropped = self._dropped_unreported = 0
        self._lost = ""
        self._late: Callable[[Loaded], None] | None = None
        self._read_tries: int | None = None
        """How often the journal could not be read since the start; None once it was read, or written all the same."""
        self._pending: deque[tuple[int, Record]] = deque()
        self._snapshot: Snapshot | None = None
        self._number = 0
        self._waiters: dict[int, asyncio.Future[bool]] = {}
        self._busy = False
        self._turn = asyncio.Event()
        self._since_prune = self._limits.prune_every  # the first step of a run clears up
        self._open: OutageRecord | None = None
        self._outages: dict[str, OutageRecord] = {}
        self._lines: deque[Line] = deque(maxlen=500)
        self._counters: dict[str, float] = {}
        self._uncounted: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # --- What the loop asks ------------------------------------------------------------------------------------------

    async def load(self, late: Callable[[Loaded], None] | None = None) -> Loaded:
        """Open the journal and return its content. After load_s without an answer, or with an error: empty, and memory.

        late: called with the content if it can be read after that. The next step is the first that is written: a step
        of a daemon that knows nothing would replace the outage and what was learned.
        """
        self._busy = True
        future = in_thread(self._writer, self._store.load)
        future.add_done_callback(self._load_ended)
        # Not asyncio.timeout: a process that stood still finds the limit passed and the answer there, and that counts.
        await asyncio.wait((future,), timeout=self._limits.load_s)
        if not future.done():
            self._set_health(durable=False, reason=_no_answer(self.path, self._limits.load_s))
            self._late = late
            return self._nothing(self._reason)
        try:
            loaded, _ = future.result()
        except Exception as error:  # noqa: BLE001 - a bug in the store must not keep the daemon from starting
            self._late = late
            return self._nothing(self._words(error))
        self.take(loaded)
        return loaded

    def take(self, loaded: Loaded) -> None:
        """Continue the outage that the content names, and report what is lost of it."""
        self._open = loaded.outage
        self._lost = loaded.lost
        if loaded.lost:
            log.error("history_lost", path=str(self.path), lost=loaded.lost, because=loaded.trouble)
        elif loaded.trouble and loaded.durable:  # else its health has reported it
            log.error("journal_unreadable", path=str(self.path), because=loaded.trouble)

    def _nothing(self, trouble: str) -> Loaded:
        """Begin without what the journal may know."""
        self._lost = queries.LOST_ALL
        log.error("history_lost", path=str(self.path), lost=self._lost, because=trouble)
        return Loaded(trouble=trouble, lost=self._lost)

    async def append(self, entry: Entry) -> bool:
        """Write one step; True once it is durable. False after append_s, or at once while the journal is in trouble.

        Whatever the answer, the step is kept and will be written as soon as the disk takes it.
        """
        record = prepare(entry, self._open, self._boot_id, self._wall())
        self._take(record)
        if not self._durable:
            self._kick()
            return False
        number = self._number
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters[number] = waiter
        self._kick()
        try:
            await asyncio.wait((waiter,), timeout=self._limits.append_s)  # as in `load`
            if waiter.done():
                return waiter.result() and not record.problem
            self._set_health(durable=False, reason=_no_answer(self.path, self._limits.append_s))
            return False
        finally:
            self._waiters.pop(number, None)

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a lifetime counter. It is written with the next step, or within counters_s."""
        self._counters[name] = self._counters.get(name, 0.0) + amount
        self._uncounted[name] = self._uncounted.get(name, 0.0) + amount
        if self._durable:  # else the timer is that of the next try
            self._later(self._limits.counters_s)

    @property
    def health(self) -> JournalHealth:
        """How the journal is, right now."""
        return JournalHealth(
            durable=self._durable,
            reason=self._reason,
            waiting=len(self._pending),
            dropped=self._dropped,
        )

    @property
    def lost(self) -> str:
        """Records of earlier runs that could not be read, in words; "" when there are none."""
        return self._lost

    @property
    def counters(self) -> Mapping[str, float]:
        """The lifetime counters, over restarts and boots."""
        return self._counters

    @property
    def open_outage(self) -> OutageRecord | None:
        """The outage that runs, as far as it is known."""
        return self._open

    @property
    def outages(self) -> tuple[OutageRecord, ...]:
        """The newest outages, the newest first, from memory alone."""
        return tuple(reversed(self._outages.values()))

    async def history(self, limit: int = 20) -> tuple[OutageRecord, ...]:
        """Return the newest outages, the newest first; from memory when the disk does not answer."""
        found = await self._read(lambda: self._query_history(limit))
        # Memory is the newer of the two: what it holds may still wait for the disk.
        merged = {each.id: each for each in reversed(found or ())} | self._outages
        return tuple(reversed(merged.values()))[:limit]

    async def outage(self, name: str) -> tuple[OutageRecord, tuple[Line, ...]] | None:
        """Return one outage with its story; from memory, and then perhaps only its end, where the disk is silent."""
        found = await self._read(lambda: self._query_outage(name))
        record = self._outages.get(name)
        if found is not None:
            return (found[0] if record is None else record), found[1]
        return None if record is None else (record, tuple(line for line in self._lines if line.outage == name))

    async def close(self, limit_s: float = 2.0) -> bool:
        """Write what still waits and close the file, within limit_s; True when everything is durable."""
        self._closed = True
        try:
            async with asyncio.timeout(limit_s / 2):
                await self._idle()
                self._submit()
                await self._idle()
        except TimeoutError:
            log.warning("journal_incomplete", path=str(self.path), steps=len(self._pending))
        self._cancel_timer()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s / 2):
                await in_thread(self._writer, self._store.close)
        self._writer.close(0.0)
        self._reader.close(0.0)
        return not self._pending and not self._uncounted

    # --- Memory ------------------------------------------------------------------------------------------------------

    def _take(self, record: Record) -> None:
        self._number += 1
        self._snapshot = record.snapshot or self._snapshot
        self._pending.append((self._number, replace(record, snapshot=None)))  # only the newest state is of use
        self._lines.extend(record.lines)
        for outage in record.outages:
            self._outages.pop(outage.id, None)
            self._outages[outage.id] = outage
            self._open = outage if outage.ended_wall is None else None
        while len(self._outages) > OUTAGES_IN_MEMORY:
            del self._outages[next(iter(self._outages))]
        while len(self._pending) > self._limits.memory_steps:
            self._pending.popleft()
            self._dropped += 1
            self._dropped_unreported += 1
        if record.problem:
            log.error("journal_step_unwritable", because=record.problem)

    # --- Writing -----------------------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Write what waits, unless a batch is on its way, or one failed and the next try is not due yet."""
        if not self._busy and not self._closed and (self._durable or self._timer is None):
            self._submit()

    def _submit(self) -> None:
        self._cancel_timer()
        if self._read_tries is not None:
            self._busy = True
            future = in_thread(self._writer, self._store.load)
            future.add_done_callback(self._load_ended)
            return
        self._write()

    def _write(self) -> None:
        if not self._pending and not self._uncounted:
            return
        last = self._pending[-1][0] if self._pending else self._number
        batch = Batch(
            records=tuple(record for _, record in self._pending),
            snapshot=self._snapshot,
            open_outage=None if self._open is None else self._open.id,
            counters=self._uncounted,
            dropped=self._dropped_unreported,
        )
        self._uncounted = {}
        self._busy = True
        future = in_thread(self._writer, lambda: self._store.write(batch))
        future.add_done_callback(lambda ended: self._write_ended(ended, last, batch))

    def _write_ended(self, ended: asyncio.Future[None], last: int, batch: Batch) -> None:
        error = self._ended(ended)
        if error is not None:
            for name, amount in batch.counters.items():
                self._uncounted[name] = self._uncounted.get(name, 0.0) + amount
            self._failed(error)
            return
        self._read_tries = None
        while self._pending and self._pending[0][0] <= last:
            self._pending.popleft()
        self._dropped_unreported -= batch.dropped
        self._since_prune += len(batch.records)
        for number in [each for each in self._waiters if each <= last]:
            self._answer(number, durable=True)
        if self._pending:
            self._submit()
            if not self._durable:
                return
        self._set_health(durable=True, reason="")
        if not self._busy and not self._closed and self._since_prune >= self._limits.prune_every:
            self._prune()

    def _load_ended(self, ended: asyncio.Future[tuple[Loaded, tuple[OutageRecord, ...]]]) -> None:
        error = self._ended(ended)
        if error is not None and self._read_tries is not None and self._read_tries >= self._limits.read_tries:
            self._write()  # A page that stays unreadable must not keep the next outage off the disk.
            return
        if error is not None:
            self._read_tries = (self._read_tries or 0) + 1
            self._failed(error)
            return
        self._read_tries = None
        loaded, outages = ended.result()
        self._outages = {each.id: each for each in reversed(outages)} | self._outages
        for name, value in loaded.counters.items():
            self._counters[name] = self._counters.get(name, 0.0) + value
        if self._late is not None:
            self._cancel_timer()  # so that the step that takes the content is written at once
            self._late(loaded)
        elif not loaded.durable:
            self._failed(JournalError(loaded.trouble))
        elif self._pending:
            self._submit()
        else:
            self._set_health(durable=True, reason="")

    def _prune(self) -> None:
        name = None if self._open is None else self._open.id
        self._since_prune = 0
        self._busy = True
        future = in_thread(self._writer, lambda: self._store.prune(name))
        future.add_done_callback(self._prune_ended)

    def _prune_ended(self, ended: asyncio.Future[bool]) -> None:
        error = self._ended(ended)
        if error is not None:
            # Keeping too much is no danger yet; if the disk is really in trouble, the next step finds out.
            log.warning("journal_prune_failed", because=describe(error))
        elif ended.result():
            self._since_prune = self._limits.prune_every  # more to delete: go on after the next step
        if self._pending:
            self._submit()

    def _ended(self, ended: asyncio.Future[T]) -> BaseException | None:
        """Note that the writer is free, and log its messages."""
        self._busy = False
        self._turn.set()
        notices, self._store.notices = self._store.notices, []
        for text in notices:
            log.error("journal_set_aside", because=text)
        return ended.exception()

    def _words(self, error: BaseException) -> str:
        return str(error) if isinstance(error, JournalError) else f"{self.path}: {describe(error)}"

    def _failed(self, error: BaseException) -> None:
        self._set_health(durable=False, reason=self._words(error))
        for number in list(self._waiters):
            self._answer(number, durable=False)
        self._cancel_timer()  # of counters, which may wait for longer
        self._later(self._limits.retry_s)

    def _answer(self, number: int, *, durable: bool) -> None:
        waiter = self._waiters.pop(number)
        if not waiter.done():
            waiter.set_result(durable)

    async def _idle(self) -> None:
        while self._busy:
            self._turn.clear()
            await self._turn.wait()

    # --- Health and timers -----------------------------------------------------------------------------------------

    def _set_health(self, *, durable: bool, reason: str) -> None:
        was_durable, self._durable, self._reason = self._durable, durable, reason
        if was_durable == durable:
            return
        if durable:
            log.info("journal_recovered", path=str(self.path))
        else:
            log.error("journal_not_durable", because=reason, going_on="in memory")

    def _later(self, delay_s: float) -> None:
        if self._timer is None and not self._closed:
            with contextlib.suppress(RuntimeError):  # counted before the loop runs: the first step writes it
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._kick()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _read(self, query: Callable[[], T]) -> T | None:
        """Run a query; None when the disk is silent or says no, at once while an earlier query still hangs."""
        if self._reads_stuck:
            return None
        future = in_thread(self._reader, query)
        try:
            async with asyncio.timeout(self._limits.read_s):
                return await asyncio.shield(future)
        except TimeoutError:
            self._reads_stuck += 1
            future.add_done_callback(self._read_unstuck)
            log.warning("journal_read_failed", because=_no_answer(self.path, self._limits.read_s))
        except JournalError as error:
            log.warning("journal_read_failed", because=str(error))
        except Exception as error:  # noqa: BLE001 - what is read here is for people: no start and no decision waits for it
            log.warning("journal_read_failed", because=f"{self.path}: {describe(error)}")
        return None

    def _read_unstuck(self, ended: asyncio.Future[T]) -> None:
        self._reads_stuck -= 1
        ended.exception()  # too late to matter; taken, so that asyncio does not report it

    def _query_history(self, limit: int) -> tuple[OutageRecord, ...]:
        with read_only(self.path) as db:
            return queries.history(db, limit)

    def _query_outage(self, name: str) -> tuple[OutageRecord, tuple[Line, ...]] | None:
        with read_only(self.path) as db:
            return queries.outage(db, name)


def _no_answer(path: Path, limit_s: float) -> str:
    return f"{path}: no answer from the disk in {limit_s:g} s (look for disk errors in the kernel's log)"
