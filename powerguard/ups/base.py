"""The interface between the daemon and a source, and what sources share: names, and a warning once for each oddity."""

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

import structlog

from powerguard.clock import Clock
from powerguard.core.model.events import Reading, SourceFailed

log = structlog.get_logger(__name__)

_MOST_ODDITIES: Final = 100
_MOST_OF_A_TROUBLE: Final = 8
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


class Notices:
    """One source's notices. A peer that invents new ones every second is not logged without limit."""

    def __init__(self, ups: str, source: str) -> None:
        """Log for this source of this UPS."""
        self._keyed = {"ups": ups, "source": source}
        self._logged: set[str] = set()
        self._standing: dict[str, set[str]] = {}
        self._troubles: dict[str, str] = {}

    @property
    def trouble(self) -> str:
        """The error that a person must correct now; "" if none."""
        return "; ".join(self._troubles.values())

    def once(self, event: str, because: str, *, key: str = "", **keyed: object) -> None:
        """Log a lasting oddity. key: identifies it if its text changes by more than its numbers."""
        key = key or _NUMBER.sub("", because)
        if key not in self._logged and len(self._logged) < _MOST_ODDITIES:
            self._logged.add(key)
            log.warning(event, because=because, **self._keyed, **keyed)

    def forget(self, key: str) -> None:
        """Log this oddity again when it comes again."""
        self._logged.discard(key)

    def stands(self, event: str, because: str) -> None:
        """Log an error to correct: it lasts until `is_right`, and may occur again months later."""
        self._troubles[event] = because
        reasons = self._standing.setdefault(event, set())
        if because not in reasons and len(reasons) < _MOST_OF_A_TROUBLE:
            reasons.add(because)
            log.error(event, because=because, **self._keyed)

    def is_right(self, *events: str) -> None:
        """Note that these do not stand any more."""
        for event in events:
            self._standing.pop(event, None)
            self._troubles.pop(event, None)


Publish = Callable[[Reading | SourceFailed], None]


class PollTrigger:
    """Wakes a poller before its turn: each call is followed by a poll."""

    def __init__(self, clock: Clock) -> None:
        """Begin without a call."""
        self._clock = clock
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Poll at once; during a poll: once more after it, for the one in flight may have been asked too early."""
        self._rung.set()

    async def rest(self, *, until_s: float, earliest_s: float) -> None:
        """Wait until then, or until a call, but at least to earliest_s (times of the clock)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - self._clock())):
                await self._rung.wait()
        too_early_s = earliest_s - self._clock()
        if too_early_s > 0:
            await asyncio.sleep(too_early_s)  # noqa: TID251 - the gap itself; a call during it gets the poll after it
        self._rung.clear()


class Source(Protocol):
    """Yields readings of one UPS for as long as it runs.

    `run` never returns and raises only when cancelled: every fault of the peer is published as `SourceFailed`.
    """

    async def run(self, publish: Publish) -> None:
        """Poll until cancelled; hand every reading or failure to `publish`, which never blocks."""
        ...

    def poll_now(self) -> None:
        """Poll at once instead of at the next turn. Safe to call at any time, from the loop's own thread."""
        ...


class NamedSource(Source, Protocol):
    """A source of the settings. name: in readings, metrics and logs, such as "nut:rack-a@10.0.0.9"."""

    name: str


@runtime_checkable
class ReportsTrouble(Protocol):
    """A source that may bring readings while something is wrong all the same."""

    @property
    def trouble(self) -> str:
        """The error that a person must correct, in one line; "" if none."""
        ...


LOOPBACK: Final = frozenset(("127.0.0.1", "::1", "localhost"))


@runtime_checkable
class Local(Protocol):
    """A source that may read a UPS on a cable of this host, by a program of this host."""

    @property
    def is_local(self) -> bool:
        """No other host can forge its answers, although nothing authenticates them."""
        ...


_RESOLVE_S: Final = 2.0
_KNOWN_S: Final = 0.3
"""The same where an address is known: on battery an answer has 0.8 s, and the wait for the name is part of it."""

LOOK_UPS_AT_ONCE: Final = min(32, (os.cpu_count() or 1) + 4) // 2
"""Half of the threads that asyncio has for blocking work: look-ups that hang leave the others to files and secrets."""

_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
_found: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, list[str]]] = weakref.WeakKeyDictionary()
"""The addresses found last, by name: an order looks the name up by itself, in an outage that has taken the service."""


class Resolver:
    """Looks one name up without ever waiting long: on an outage the name service is often the first to go.

    A look-up cannot be stopped, so there is never more than one of them, and of all names LOOK_UPS_AT_ONCE: each holds
    one of the few threads that other work waits for. While it hangs the old addresses serve.
    """

    def __init__(self, host: str, error: Callable[[str], Exception]) -> None:
        """Do not look it up yet. error: what is raised, of one line for the operator."""
        self._host, self._error = host, error
        self._known: list[str] = []
        self._running: asyncio.Future[list[str]] | None = None
        with contextlib.suppress(ValueError):
            self._known = [str(ipaddress.ip_address(host))]
        self._is_address = bool(self._known)

    async def addresses(self, limit_s: float = _RESOLVE_S) -> Sequence[str]:
        """Return what to connect to, IPv4 first. Raises the error when no address is known."""
        if self._is_address:
            return self._known
        found_before = _found.setdefault(asyncio.get_running_loop(), {})
        self._known = self._known or found_before.get(self._host, [])
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._look_up())
            self._running.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(min(limit_s, _KNOWN_S) if self._known else limit_s):
                found = await asyncio.shield(self._running)
        except (OSError, TimeoutError, UnicodeError) as error:
            if not isinstance(error, TimeoutError):
                self._running = None
            if self._known:
                return self._known
            because = why_not_found(error)
            msg = f"cannot look up {self._host}: {because} (an address in the settings needs no name service)"
            raise self._error(msg) from error
        self._running = None
        self._known = found_before[self._host] = found
        return found

    async def _look_up(self) -> list[str]:
        loop = asyncio.get_running_loop()
        async with _gates.setdefault(loop, asyncio.Semaphore(LOOK_UPS_AT_ONCE)):
            found = await loop.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        found.sort(key=lambda one: one[0] is not socket.AF_INET)
        return list(dict.fromkeys(_with_zone(*one[4]) for one in found))

    def close(self) -> None:
        """Wait for no look-up any more."""
        if self._running is not None:
            self._running.cancel()
            self._running = None


def _with_zone(address: str, _port: int, *more: int) -> str:
    """Return an address of the socket module, with the number of its interface where it is good on one link only."""
    return f"{address}%{more[1]}" if any(more[1:]) and "%" not in address else address


def why_not_found(error: Exception) -> str:
    """Return why a name could not be looked up. Python refuses some without a request (UnicodeError)."""
    if isinstance(error, UnicodeError):
        return "not a valid name: use 1 to 63 characters between two dots"
    return getattr(error, "strerror", None) or "no answer from the name service"
