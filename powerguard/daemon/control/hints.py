"""The hint socket: hooks of other UPS daemons report events, as any user.

One datagram is one hint, and its sender is not checked: it can only bring the next poll forward, at most once a second.
Requests that make a change, and the question which daemon owns the shutdown, go to the admin socket.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import structlog

from powerguard.daemon.control.admin import bind_unix, unbind
from powerguard.daemon.observe.port import Daemon
from powerguard.fields import clean_text

log = structlog.get_logger()

NAME: Final = "hint.sock"
"""In the folder of the admin socket."""
MODE: Final = 0o666
POLL_EVERY_S: Final = 1.0
"""Hints closer together than this cause one poll more, at its end."""
MAX_BYTES: Final = 4096
AT_ONCE: Final = 16
"""Datagrams that are read in one go; then others have their turn, for PAUSE_S."""
PAUSE_S: Final = 0.1
_LOGGED: Final = 20
_LOGGED_EVERY_S: Final = 10.0
"""Number of hints logged in a row; one more is logged each ten seconds, so that a flood does not fill the log."""


def hint_path(admin: str) -> str:
    """Return where hooks reach the daemon with this admin socket."""
    return str(Path(admin).with_name(NAME))


class Hints:
    """Takes hints from one socket."""

    def __init__(self, daemon: Daemon, sock: socket.socket) -> None:
        """Read nothing yet."""
        self._daemon = daemon
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._polled_at_s = -POLL_EVERY_S
        self._timers: list[asyncio.TimerHandle] = []
        self._later = False
        self._allowed = float(_LOGGED)
        self._logged_at_s = 0.0

    def open(self) -> None:
        """Begin to listen."""
        self._loop.add_reader(self._sock, self._read)

    def close(self) -> None:
        """End it; what is still in the socket is lost, as hints may be."""
        self._loop.remove_reader(self._sock)
        for timer in self._timers:
            timer.cancel()

    def _read(self) -> None:
        for _ in range(AT_ONCE):
            try:
                raw = self._sock.recv(MAX_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("hint_unreadable", because=error.strerror)
                return
            self._take(raw)
        self._loop.remove_reader(self._sock)
        self._after(PAUSE_S, self.open)

    def _take(self, raw: bytes) -> None:
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError):
            message = None
        fields = message if isinstance(message, dict) else {}
        name, ups = (clean_text(str(fields.get(key, "")), 200) for key in ("name", "ups"))
        now_s = self._loop.time()
        self._allowed = min(float(_LOGGED), self._allowed + (now_s - self._logged_at_s) / _LOGGED_EVERY_S)
        self._logged_at_s = now_s
        if self._allowed >= 1.0:
            self._allowed -= 1.0
            log.info("hint_received", hint=name or "garbled", ups=ups)
        if self._later:
            return
        wait_s = self._polled_at_s + POLL_EVERY_S - now_s
        if wait_s <= 0.0:
            self._poll()
        else:
            self._later = True
            self._after(wait_s, self._poll)

    def _poll(self) -> None:
        self._later = False
        self._polled_at_s = self._loop.time()
        self._daemon.poll_now()

    def _after(self, wait_s: float, what: Callable[[], None]) -> None:
        self._timers = [timer for timer in self._timers if timer.when() > self._loop.time()]
        self._timers.append(self._loop.call_later(wait_s, what))


@contextlib.asynccontextmanager
async def hint_socket(daemon: Daemon, *, path: str) -> AsyncIterator[str]:
    """Take hints; yields the socket's path. Raises OSError when it cannot be made."""
    with bind_unix(Path(path), MODE, None, socket.SOCK_DGRAM) as sock:
        hints = Hints(daemon, sock)
        hints.open()
        log.info("hints_listening", path=path)
        try:
            yield path
        finally:
            hints.close()
            unbind(Path(path))
