"""The line to systemd: real sockets of both kinds, and every way in which nobody listens."""

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from powerguard.daemon.systemd import STATUS_CHARS, Manager, Notifier, encode, is_host_stopping, parse
from powerguard.effectors.child import Ended, run_child
from tests.peers.machine import unhindered_s


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(address)
    listener.settimeout(5)
    return listener


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_systemd_hears_us(folder: Path, kind: str) -> None:
    """READY, STATUS, WATCHDOG, RELOADING and STOPPING arrive, and no child inherits the socket."""
    address = str(folder / "notify") if kind == "path" else f"@powerguard-test-{os.getpid()}"
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "7", "HOME": "/"}
    with listening(address.replace("@", "\0")) as listener:
        notifier = Notifier.take(environ, pid=7)
        assert environ == {"HOME": "/"}
        assert (notifier.watchdog_s, notifier.watchdog_every_s) == (20.0, 10.0)
        notifier.ready("online")
        notifier.status("on battery, 9m40s left")
        notifier.watchdog()
        notifier.stopping()
        notifier.stopping("bye")
        notifier.ready()
        notifier.status("x" * 1000)
        assert [listener.recv(500) for _ in range(7)] == [
            b"READY=1\nSTATUS=online",
            b"STATUS=on battery, 9m40s left",
            b"WATCHDOG=1",
            b"STOPPING=1",
            b"STOPPING=1\nSTATUS=bye",
            b"READY=1",
            b"STATUS=" + b"x" * STATUS_CHARS,
        ]
        before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        notifier.reloading()
        after_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        name, _, value = listener.recv(500).decode().partition("\nMONOTONIC_USEC=")
        assert name == "RELOADING=1"
        assert before_us <= int(value) <= after_us
        assert notifier.lost == 0
        notifier.close()


def test_a_status_cannot_smuggle_in_a_field() -> None:
    """The status names the UPS, and a UPS names itself."""
    assert encode({"STATUS": "ups x\nMAINPID=1\r\n"}) == b"STATUS=ups x MAINPID=1"


@pytest.mark.parametrize(
    ("environ", "manager"),
    [
        ({}, Manager()),
        ({"NOTIFY_SOCKET": "/run/systemd/notify"}, Manager(address="/run/systemd/notify")),
        ({"NOTIFY_SOCKET": "@/org/x"}, Manager(address=b"\0/org/x")),
        ({"NOTIFY_SOCKET": "vsock:2:9999"}, Manager()),
        ({"NOTIFY_SOCKET": "@"}, Manager()),
        ({"WATCHDOG_USEC": "20000000"}, Manager(watchdog_s=20.0)),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "42"}, Manager(watchdog_s=20.0)),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "43"}, Manager()),
        ({"WATCHDOG_USEC": "0"}, Manager()),
        ({"WATCHDOG_USEC": "soon"}, Manager()),
        ({"WATCHDOG_USEC": "9" * 30}, Manager()),
    ],
)
def test_the_environment(environ: dict[str, str], manager: Manager) -> None:
    assert parse(environ, pid=42) == manager


def everything(notifier: Notifier) -> None:
    notifier.ready()
    notifier.status("x")
    notifier.watchdog()
    notifier.reloading()
    notifier.stopping()


def test_without_systemd_nothing_happens() -> None:
    notifier = Notifier.take({})
    everything(notifier)
    notifier.close()
    assert (notifier.watchdog_every_s, notifier.lost) == (None, 0)


def test_nobody_listens(folder: Path) -> None:
    """A forced shutdown: the socket refuses, or is gone. Both killed a daemon that had not expected it."""
    path = str(folder / "notify")
    notifier = Notifier.take({"NOTIFY_SOCKET": path})
    everything(notifier)
    listening(path).close()
    everything(notifier)
    notifier.close()
    everything(notifier)
    assert notifier.lost == 10


def test_a_manager_that_does_not_read_holds_nobody_up(folder: Path) -> None:
    """PID 1 is busy and its queue is full: the rest is lost, at once."""
    path = str(folder / "notify")
    with listening(path):
        notifier = Notifier.take({"NOTIFY_SOCKET": path})
        began_s = unhindered_s()
        for _ in range(3000):
            notifier.watchdog()
        assert unhindered_s() - began_s < 2
        assert notifier.lost > 0
        notifier.close()


class Systemctl:
    """Answers as systemctl does, at the port through which programs are started."""

    def __init__(self, stdout: bytes, *, returncode: int = 1, timed_out: bool = False, missing: bool = False) -> None:
        self.ended = Ended(returncode=returncode, stdout=stdout, stderr=b"", timed_out=timed_out)
        self.missing = missing

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        assert argv == ("systemctl", "is-system-running")
        assert limit_s <= 1
        if self.missing:
            raise FileNotFoundError(2, "systemctl")
        return self.ended


@pytest.mark.parametrize(
    ("systemctl", "nologin", "stopping"),
    [
        (Systemctl(b"stopping\n"), False, True),
        (Systemctl(b"running\n", returncode=0), False, False),
        (Systemctl(b"degraded\n"), True, False),
        (Systemctl(b""), True, True),
        (Systemctl(b""), False, False),
        (Systemctl(b"", timed_out=True), True, True),
        (Systemctl(b"running\n", timed_out=True), True, True),
        (Systemctl(b"offline\n"), False, False),
        (Systemctl(b"", missing=True), False, False),
        (Systemctl(b"", missing=True), True, True),
    ],
)
async def test_is_the_host_stopping(folder: Path, systemctl: Systemctl, *, nologin: bool, stopping: bool) -> None:
    """Systemctl while D-Bus lives, then /run/nologin; `shutdown +5` makes that file too, so systemctl goes first."""
    marker = folder / "nologin"
    if nologin:
        marker.touch()
    assert await is_host_stopping(systemctl, nologin=marker) is stopping


async def test_the_real_systemctl_says_that_this_machine_stays(folder: Path) -> None:
    """Whatever runs here, with systemd or without: it is not shutting down."""
    assert not await is_host_stopping(run_child, nologin=folder / "nologin")
