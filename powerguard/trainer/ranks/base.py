"""What the ranks of one training job have in common: a small shared store of keys, and nothing else.

No collective is ever used: a rank that hangs in one could not be reached. All that ranks say to each other goes
through a store of short keys and small values that any of them may read at any time, from any thread with a
connection of its own. Three kinds of store do: memory (one process), a unix socket (one host), torch's own.

A store need not offer locks or transactions. Its one strong operation is `claim`, which writes a key only once: who
comes second reads what the first one wrote. All agreement is built on that (`powerguard.trainer.ranks.agreement`).

Calls to a store that may never answer: no thread of ours waits for one longer than it chose to.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, Generic, Protocol, Self, TypeVar

from powerguard.trainer.log import log

boottime_s = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""Seconds since boot, suspended or not: no step of the wall clock reaches it. Without a frame of Python's own."""

MAX_KEY: Final = 200
"""Characters of a key, of A-Z a-z 0-9 . _ - # and /."""
MAX_VALUE_BYTES: Final = 1 << 20
"""The largest value of a key: torch's store refuses 8 MiB, and our own server keeps them all in memory."""


class RanksError(Exception):
    """The store of the ranks cannot be had, or has gone: what, where, what would be right."""


class Ranks(Protocol):
    """One rank's connection to the store of its job. One thread at a time; another thread takes a `clone`.

    rank: 0 to size - 1. local_rank: 0 to the ranks of this host - 1, in the order of `rank`.
    host: 0 to hosts - 1, in the order of each host's first rank. names: of the hosts, in that order.
    farewell_s: how long `close` may wait for the other ranks. Every call but `close` may raise RanksError.
    """

    farewell_s: float

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def host(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def may_hang(self) -> bool:
        """A call may never return, whatever its timeout: see `calls`."""

    def set(self, key: str, value: bytes) -> None:
        """Write a key, whatever it was before. Each key has one writer."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the key's value as soon as there is one. Raises TimeoutError after timeout_s (0: look once)."""

    def check(self, key: str) -> bool:
        """Is there such a key?"""

    def claim(self, key: str, value: bytes) -> bytes:
        """Write a key that does not exist. Returns what it holds afterwards: `value`, or what another wrote first.

        The values are ASCII and not empty (torch's store takes them as text, and an empty one for none).
        """

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0; return the sum. Where an answer was lost, it may have counted twice."""

    def delete(self, key: str) -> None:
        """Forget a key; none is needed."""

    def clone(self) -> "Ranks":
        """Return a connection of its own for another thread: one that waits must not hold another up."""

    def close(self) -> None:
        """Let go of this connection."""


class Place:
    """Where a rank stands among the others; every kind of store has these."""

    may_hang = False
    farewell_s = 5.0

    def __init__(self, rank: int, size: int, hosts: Iterable[str] = ()) -> None:
        """hosts: the name of each rank's host, by rank, as `host_name` makes it. None: all on one host."""
        if not 0 <= rank < size:
            msg = f"rank {rank} of {size}: must be 0 to {size - 1}"
            raise RanksError(msg)
        names = list(hosts) or [""] * size
        distinct = list(dict.fromkeys(names))
        self.rank = rank
        self.size = size
        self.local_rank = names[:rank].count(names[rank])
        self.host = distinct.index(names[rank])
        self.hosts = len(distinct)
        self.names = tuple(name.partition("/")[0] for name in distinct)


class Memory:
    """A store in this process's memory, for as many ranks as share it: what one process needs, and simulations."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._awaited: dict[str, threading.Condition] = {}

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._store(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._lock:
            value = self._values.get(key)
            if value is None and timeout_s > 0:
                # One condition for each awaited key: a thousand waiters are not all woken for every key.
                arrival = self._awaited.setdefault(key, threading.Condition(self._lock))
                arrival.wait_for(lambda: key in self._values, timeout_s)
                value = self._values.get(key)
            if value is None:
                raise TimeoutError(key)
            return value

    def check(self, key: str) -> bool:
        return key in self._values

    def claim(self, key: str, value: bytes) -> bytes:
        with self._lock:
            if key not in self._values:
                self._store(key, value)
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._store(key, b"%d" % total)
            return total

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)

    def _store(self, key: str, value: bytes) -> None:
        self._values[key] = value
        arrival = self._awaited.pop(key, None)
        if arrival is not None:
            arrival.notify_all()


class MemoryRanks(Place):
    """Ranks that share a `Memory`: threads of one process."""

    def __init__(self, memory: Memory, rank: int, size: int, hosts: Iterable[str] = ()) -> None:
        super().__init__(rank, size, hosts)
        self._memory = memory
        self.set = memory.set
        self.get = memory.get
        self.check = memory.check
        self.claim = memory.claim
        self.add = memory.add
        self.delete = memory.delete

    def clone(self) -> Self:
        return self

    def close(self) -> None:
        pass


class Alone(MemoryRanks):
    """A job of one process."""

    def __init__(self) -> None:
        super().__init__(Memory(), 0, 1)


def host_name() -> str:
    """Name this host, unlike any other: its node name and this boot. Each container is a host of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown"
    return f"{os.uname().nodename}/{boot}"


def meet(ranks: Ranks, rank: int, size: int, timeout_s: float, *, word_s: float = 30.0) -> list[str]:
    """Return the host of every rank, by rank, once all have come. After word_s, the log says what is waited for.

    Raises RanksError that names who is missing.
    """
    text = "Guard has waited %.0f s for all %d ranks (does every rank make one, and not rank 0 alone?)"
    word = threading.Timer(word_s, log.warning, (text, word_s, size))
    word.daemon = True
    word.start()
    try:
        return _met(ranks, rank, size, timeout_s)
    finally:
        word.cancel()


def _met(ranks: Ranks, rank: int, size: int, timeout_s: float) -> list[str]:
    """Rank 0 collects, so that it costs each one look."""
    ranks.set(f"hello/{rank}", host_name().encode("ascii", "replace"))
    until_s = boottime_s() + timeout_s
    if rank == 0:
        names: list[str] = []
        for other in range(size):
            try:
                names.append(ranks.get(f"hello/{other}", max(0.0, until_s - boottime_s())).decode())
            except TimeoutError:
                missing = [other for other in range(size) if not ranks.check(f"hello/{other}")]
                raise RanksError(_missing(missing, timeout_s)) from None
        distinct = list(dict.fromkeys(names))
        ranks.set("hosts", ("\n".join(distinct) + "\n\n" + " ".join(str(distinct.index(n)) for n in names)).encode())
    try:
        listing = ranks.get("hosts", max(0.0, until_s - boottime_s()) + (5.0 if rank else 0.0)).decode()
    except TimeoutError:
        msg = f"rank 0 has not gathered the {size} ranks within {timeout_s:g} s (see what it says)"
        raise RanksError(msg) from None
    listed, _, places = listing.partition("\n\n")
    hosts = listed.split("\n")
    return [hosts[int(place)] for place in places.split()]


def farewell(ranks: Ranks) -> None:
    """Say that this rank asks no more; in rank 0, which may hold the store of all, wait until all others have said so.

    For `farewell_s` at most: a rank that was killed says nothing.
    """
    until_s = boottime_s() + ranks.farewell_s
    with contextlib.suppress(RanksError, TimeoutError):
        if ranks.rank:
            ranks.set(f"bye/{ranks.rank}", b"bye")
        else:
            for other in range(1, ranks.size):
                ranks.get(f"bye/{other}", max(0.0, until_s - boottime_s()))


def _missing(missing: list[int], timeout_s: float) -> str:
    shown = ", ".join(str(rank) for rank in missing[:8]) + (" ..." if len(missing) > 8 else "")
    late = f"{len(missing)} ranks have not come within {timeout_s:g} s: {shown}"
    return f"{late} (does every rank make a Guard, with this store?)"


class Flag(threading.Event):
    """As threading.Event, for the training thread: an interrupt while it is set or awaited leaves no lock behind.

    threading.Event enters a Condition by `with`, and a Ctrl-C between that one's lines keeps its lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self._plain = threading.Lock()
        self._news = threading.Condition(self._plain)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._plain:
            self._is_set = True
            self._news.notify_all()

    def clear(self) -> None:
        with self._plain:
            self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or timeout seconds have passed; return whether it is."""
        with self._plain:
            if not self._is_set:
                self._news.wait(timeout)
            return self._is_set


_T = TypeVar("_T")
CALL_S: Final = 10.0


class _Call(Generic[_T]):
    """One question, and what came of it."""

    def __init__(self, ask: Callable[[Ranks], _T]) -> None:
        self.ask = ask
        self.answered = Flag()
        self.dropped = False
        self.value: list[_T] = []
        self.error: Exception | None = None


class Calls:
    """Any thread asks a store by one connection, one at a time.

    Where the store bounds its own calls they are made in the asker's thread. Where a call may hang for ever (torch's
    client waits without end for a server that was stopped, or whose host has lost its power) a thread of its own makes
    them, and may be left hanging.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._lock = threading.RLock()  # which only its owner can release
        self._asked: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, ask: Callable[[Ranks], _T]) -> _T:
        """Ask. Raises RanksError, after 10 s without an answer too, and whatever `ask` raises."""
        if not self._ranks.may_hang:
            try:  # around its taking, too: an interrupt between the two would keep it
                if not self._lock.acquire(timeout=CALL_S):
                    raise RanksError(_SILENT)
                return ask(self._ranks)
            finally:
                with contextlib.suppress(RuntimeError):  # not ours: it was not had in time
                    self._lock.release()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="powerguard-ranks-calls", daemon=True)
                self._thread.start()
        call = _Call(ask)
        self._asked.put(call)  # type: ignore[arg-type] # its value goes back to us only
        if not call.answered.wait(CALL_S):
            call.dropped = True
            raise RanksError(_SILENT)
        if call.error is not None:
            raise call.error
        return call.value[0]

    def close(self) -> None:
        """End the thread, if it can."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._asked.put(None)
            thread.join(1.0)

    def _run(self) -> None:
        while (call := self._asked.get()) is not None:
            if call.dropped:
                continue
            try:
                call.value.append(call.ask(self._ranks))
            except (RanksError, TimeoutError, ValueError, OSError) as error:
                call.error = error
            call.answered.set()


_SILENT: Final = f"the store of the ranks has not answered for {CALL_S:g} s"
