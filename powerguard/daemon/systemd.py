"""Messages between the daemon and the service manager. They never fail or wait: they are not important enough."""

import contextlib
import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from powerguard.effectors.child import Spawn

NOLOGIN = Path("/run/nologin")
"""Made by systemd-user-sessions.service when it stops, which is early in every shutdown."""


STATUS_CHARS = 200
"""`systemctl status` shows one line."""


def encode(fields: Mapping[str, str]) -> bytes:
    """Return one datagram of NAME=value lines; a newline in a value would begin a field and becomes a space."""
    return "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items()).encode(
        "utf-8", "backslashreplace"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manager:
    """The service manager, from the environment.

    address: of its socket, as `socket.sendto` takes it; None if there is none or its kind is unknown. watchdog_s: the
    service is killed when it is silent for this long; None without a watchdog.
    """

    address: str | bytes | None = None
    watchdog_s: float | None = None


def parse(environ: Mapping[str, str], pid: int) -> Manager:
    """Read NOTIFY_SOCKET (a path, or @name in the abstract namespace), WATCHDOG_USEC and WATCHDOG_PID."""
    value = environ.get("NOTIFY_SOCKET", "")
    address: str | bytes | None = None
    if value.startswith("@") and len(value) > 1:
        address = b"\0" + value[1:].encode("utf-8", "surrogateescape")
    elif value.startswith("/"):
        address = value
    return Manager(address=address, watchdog_s=_watchdog_s(environ, pid))


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None  # meant for another process of this service
    usec = environ.get("WATCHDOG_USEC", "")
    if not (usec.isascii() and usec.isdigit() and len(usec) < 20) or int(usec) == 0:
        return None
    return int(usec) / 1e6


def _status(text: str) -> dict[str, str]:
    return {"STATUS": text[:STATUS_CHARS]} if text else {}


class Notifier:
    """Reports the daemon's state to systemd. Every method returns at once and never raises, with or without systemd.

    A forced shutdown closes the socket under us (measured: ConnectionRefusedError), and a busy manager does not read:
    the datagram is then lost, and counted in `lost`. What systemd kills us for, if it never hears it, is sent again.
    """

    def __init__(self, manager: Manager) -> None:
        """Open the socket now: an outage should need no new resource."""
        self._address = manager.address
        self.watchdog_s = manager.watchdog_s
        self.lost = 0
        self._owes_ready = False
        self._socket: socket.socket | None = None
        if self._address is not None:
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)

    @classmethod
    def take(cls, environ: MutableMapping[str, str] | None = None, pid: int | None = None) -> Self:
        """Make one from the environment, and remove from it what no child may inherit."""
        environ = os.environ if environ is None else environ
        manager = parse(environ, os.getpid() if pid is None else pid)
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
            environ.pop(name, None)
        return cls(manager)

    @property
    def watchdog_every_s(self) -> float | None:
        """How often to call `watchdog`: half the limit, as sd_watchdog_enabled(3) advises; None without a watchdog."""
        return None if self.watchdog_s is None else self.watchdog_s / 2

    def ready(self, status: str = "") -> None:
        """Report that the daemon is up, or that the reload has ended."""
        self._owes_ready = not self._notify(READY="1", **_status(status))

    def status(self, text: str) -> None:
        """Report one line for `systemctl status`."""
        self._notify(STATUS=text[:STATUS_CHARS])

    def watchdog(self) -> bool:
        """Report that the poll loop and the state machine have made progress. Never call it from a bare timer.

        Returns False if it is lost: call it again soon. With it goes a `ready` that was lost.
        """
        ready = {"READY": "1"} if self._owes_ready else {}
        sent = self._notify(WATCHDOG="1", **ready)
        self._owes_ready &= not sent
        return sent

    def reloading(self) -> None:
        """Report that the settings are being read again; `ready` ends it. systemd >= 253 needs the time with it."""
        self._notify(RELOADING="1", MONOTONIC_USEC=str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000))

    def stopping(self, status: str = "") -> None:
        """Report that the daemon is stopping."""
        self._notify(STOPPING="1", **_status(status))

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _notify(self, **fields: str) -> bool:
        """Return False if it is lost; without a manager nothing is."""
        if self._socket is None or self._address is None:
            return True
        try:
            self._socket.sendto(encode(fields), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._address)
        except OSError:
            self.lost += 1
            return False
        return True


async def is_host_stopping(spawn: Spawn, *, nologin: Path = NOLOGIN) -> bool:
    """Say whether a shutdown or reboot of the host runs, or the SIGTERM was only for the daemon.

    D-Bus, through which an unprivileged systemctl asks, goes away about 50 ms after a shutdown begins (measured on
    Debian 12): then nologin(5) answers, which `shutdown +N` also makes in its last five minutes. No answer is "no".
    """
    try:
        ended = await spawn(("systemctl", "is-system-running"), limit_s=1.0)
    except OSError:
        pass
    else:
        if ended.stdout.strip() == b"stopping":
            return True
        if not ended.timed_out and ended.stdout.strip() in (b"running", b"degraded", b"starting", b"maintenance"):
            return False
    return os.access(nologin, os.F_OK)  # /run is memory: this does not wait
