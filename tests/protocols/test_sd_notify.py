"""sd_notify: the exact bytes, and what the environment may hold."""

import pytest

from powerguard.protocols import sd_notify
from powerguard.protocols.sd_notify import Manager


def test_messages() -> None:
    assert sd_notify.ready() == b"READY=1"
    assert sd_notify.ready("online") == b"READY=1\nSTATUS=online"
    assert sd_notify.watchdog() == b"WATCHDOG=1"
    assert sd_notify.reloading(1_234_567) == b"RELOADING=1\nMONOTONIC_USEC=1234567"
    assert sd_notify.stopping() == b"STOPPING=1"
    assert sd_notify.stopping("bye") == b"STOPPING=1\nSTATUS=bye"
    assert sd_notify.extend_timeout(1.5) == b"EXTEND_TIMEOUT_USEC=1500000"
    assert sd_notify.extend_timeout(-1) == b"EXTEND_TIMEOUT_USEC=0"


def test_a_status_cannot_smuggle_in_a_field() -> None:
    """The status names the UPS, and a UPS names itself."""
    assert sd_notify.status("ups x\nMAINPID=1\r\n") == b"STATUS=ups x MAINPID=1"
    assert len(sd_notify.status("x" * 1000)) == len("STATUS=") + sd_notify.STATUS_CHARS


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
    assert sd_notify.parse(environ, pid=42) == manager
