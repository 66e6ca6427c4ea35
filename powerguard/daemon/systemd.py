"""What the daemon and the service manager tell each other. Nothing here may fail or wait: it never matters enough."""

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Self

from powerguard.effectors.child import Spawn
from powerguard.protocols import sd_notify

NOLOGIN = Path("/run/nologin")
"""Made by systemd-user-sessions.service when it stops, which is early in every shutdown."""


class Notifier:
    """Tells systemd how we are. Every method returns at once and raises nothing, with or without a systemd.

    A forced shutdown closes the socket under us (measured: ConnectionRefusedError), and a busy manager does not read:
    the datagram is then lost, and counted in `lost`.
    """

    def __init__(self, manager: sd_notify.Manager) -> None:
        """Open the socket now: in the outage nothing new should be needed."""
        self._address = manager.address
        self.watchdog_s = manager.watchdog_s
        self.lost = 0
        self._socket: socket.socket | None = None
        if self._address is not None:
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)

    @classmethod
    def take(cls, environ: MutableMapping[str, str] | None = None, pid: int | None = None) -> Self:
        """Make one from the environment, and remove from it what no child may inherit."""
        environ = os.environ if environ is None else environ
        manager = sd_notify.parse(environ, os.getpid() if pid is None else pid)
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
            environ.pop(name, None)
        return cls(manager)

    @property
    def enabled(self) -> bool:
        """True where a manager listens."""
        return self._socket is not None

    @property
    def watchdog_every_s(self) -> float | None:
        """How often to call `watchdog`: half the limit, as sd_watchdog_enabled(3) advises; None when nobody watches."""
        return None if self.watchdog_s is None else self.watchdog_s / 2

    def ready(self, status: str = "") -> None:
        """Tell that we are up, or that the reload has ended."""
        self._tell(sd_notify.ready(status))

    def status(self, text: str) -> None:
        """Tell one line for `systemctl status`."""
        self._tell(sd_notify.status(text))

    def watchdog(self) -> None:
        """Tell that the poll loop and the state machine have made progress. Never call it from a bare timer."""
        self._tell(sd_notify.watchdog())

    def reloading(self) -> None:
        """Tell that the settings are being read anew."""
        self._tell(sd_notify.reloading(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000))

    def stopping(self, status: str = "") -> None:
        """Tell that we are going down."""
        self._tell(sd_notify.stopping(status))

    def extend_timeout(self, seconds: float) -> None:
        """Ask for more time to start or stop."""
        self._tell(sd_notify.extend_timeout(seconds))

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, datagram: bytes) -> None:
        if self._socket is None or self._address is None:
            return
        try:
            self._socket.sendto(datagram, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._address)
        except OSError:
            self.lost += 1


async def is_host_stopping(spawn: Spawn, *, limit_s: float = 1.0, nologin: Path = NOLOGIN) -> bool:
    """Tell whether a shutdown or reboot of the host runs, or our SIGTERM was meant for us alone.

    D-Bus, through which an unprivileged systemctl asks, goes away about 50 ms after a shutdown begins (measured on
    Debian 12): then nologin(5) answers, which `shutdown +N` also makes in its last five minutes. No answer is "no".
    """
    try:
        ended = await spawn(("systemctl", "is-system-running"), limit_s=limit_s)
    except OSError:
        pass
    else:
        if ended.stdout.strip() == b"stopping":
            return True
        if not ended.timed_out and ended.stdout.strip() in (b"running", b"degraded", b"starting", b"maintenance"):
            return False
    return os.access(nologin, os.F_OK)  # /run is memory: this does not wait
