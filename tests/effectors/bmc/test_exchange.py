"""What is said inside one session, with a BMC made of a list of answers and a clock that only pauses move."""

import json
import socket
import sys
from collections.abc import Callable

import pytest

from powerguard.effectors.bmc.ipmi import BmcFailure, Command, EnsuredBytes, Exchange, Failure, Pace, PowerRestorePolicy
from powerguard.effectors.child import run_child

ON, OFF, LAST, UNKNOWN = b"\x41\x00\x00", b"\x01\x00\x00", b"\x21\x00\x00", b"\x61\x00\x00"
ALWAYS_ON = PowerRestorePolicy.ALWAYS_ON
Reply = tuple[int, bytes]


class Scripted:
    """A session at our own port `Send`: answers in order, and remembers what it was sent and when."""

    def __init__(self, *replies: Reply, by_s: float = 4.7) -> None:
        self.replies = list(replies)
        self.sent: list[tuple[int, bytes]] = []
        self.now_s = 0.0
        self.exchange = Exchange(self.send, Pace(clock=lambda: self.now_s, sleep=self.sleep, by_s=by_s))

    def send(self, command: Command) -> Reply:
        self.sent.append((command.number, command.data))
        return self.replies.pop(0)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def refusal(ask: Callable[[], object]) -> tuple[Failure, str]:
    with pytest.raises(BmcFailure) as caught:
        ask()
    return caught.value.failure, str(caught.value)


def test_what_is_already_so_is_not_written() -> None:
    """Twice is as good as once, and a BMC's flash is spared."""
    bmc = Scripted((0, ON))
    assert bmc.exchange.ensure(ALWAYS_ON) == EnsuredBytes(before=ON, after=ON, changed=False)
    assert bmc.sent == [(1, b"")]


@pytest.mark.parametrize("before", [OFF, LAST, UNKNOWN])
def test_anything_else_is_set_and_read_back(before: bytes) -> None:
    """Last state is wrong, too: after an orderly power-off the last state is off."""
    bmc = Scripted((0, before), (0, b"\x07"), (0, ON))
    assert bmc.exchange.ensure(ALWAYS_ON) == EnsuredBytes(before=before, after=ON, changed=True)
    assert bmc.sent == [(1, b""), (6, b"\x02"), (1, b"")]
    assert bmc.now_s == 0.0


def test_a_slow_memory_is_waited_for() -> None:
    """Some firmware stores late: it is read again after 0.5 and 2 s."""
    bmc = Scripted((0, OFF), (0, b""), (0, OFF), (0, OFF), (0, ON))
    assert bmc.exchange.ensure(ALWAYS_ON).after == ON
    assert bmc.now_s == 2.0


def test_an_acknowledged_lie_is_found_out() -> None:
    """A set that is answered with success and does not stick is an alarm, not a success."""
    bmc = Scripted((0, OFF), (0, b"\x07"), (0, OFF), (0, OFF), (0, OFF))
    failure, text = refusal(lambda: bmc.exchange.ensure(ALWAYS_ON))
    assert failure is Failure.MISMATCH
    assert text == "acknowledged always-on but still reads always-off 2 s later"


def test_the_budget_ends_the_waiting() -> None:
    """With 1 s left there is no third read; the answer is what was read last."""
    bmc = Scripted((0, OFF), (0, b"\x07"), (0, OFF), (0, OFF), by_s=1.0)
    failure, text = refusal(lambda: bmc.exchange.ensure(ALWAYS_ON))
    assert (failure, bmc.now_s) == (Failure.MISMATCH, 0.5)
    assert "0.5 s later" in text


def test_a_policy_that_the_board_does_not_list_is_unsupported() -> None:
    """The support mask of the set explains why it did not stick."""
    bmc = Scripted((0, OFF), (0, b"\x03"), (0, OFF), (0, OFF), (0, OFF))
    failure, text = refusal(lambda: bmc.exchange.ensure(ALWAYS_ON))
    assert failure is Failure.UNSUPPORTED
    assert text == "supports these power restore policies: always-off, last-state; not always-on"


def test_a_busy_bmc_is_asked_again() -> None:
    """0xC0 twice, then it works."""
    bmc = Scripted((0xC0, b""), (0, OFF), (0xC0, b""), (0, b"\x07"), (0, ON))
    assert bmc.exchange.ensure(ALWAYS_ON).changed
    assert bmc.now_s == pytest.approx(0.6)


def test_a_bmc_that_stays_busy_is_given_up_in_time() -> None:
    """The last pause ends inside the budget."""
    bmc = Scripted(*[(0xC3, b"")] * 20, by_s=1.0)
    failure, text = refusal(bmc.exchange.status)
    assert failure is Failure.BUSY
    assert "0xC3" in text
    assert bmc.now_s < 1.0


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (0xC1, Failure.UNSUPPORTED),
        (0xCC, Failure.UNSUPPORTED),
        (0xD5, Failure.UNSUPPORTED),
        (0xD4, Failure.PRIVILEGE),
        (0xC7, Failure.PROTOCOL),
        (0xFF, Failure.PROTOCOL),
        (0x81, Failure.PROTOCOL),
        (0x13, Failure.PROTOCOL),
    ],
)
def test_a_refused_set_is_not_repeated(code: int, failure: Failure) -> None:
    """Once, and then it is told with command, code and table."""
    bmc = Scripted((0, OFF), (code, b""))
    kind, text = refusal(lambda: bmc.exchange.ensure(ALWAYS_ON))
    assert kind is failure
    assert text.startswith(f"Set Power Restore Policy refused with completion code 0x{code:02X} (")
    assert len(bmc.sent) == 2


def test_an_empty_status_is_a_protocol_error() -> None:
    """Success without data is no status."""
    assert refusal(Scripted((0, b"")).exchange.status)[0] is Failure.PROTOCOL


def test_a_probe_takes_no_for_an_answer() -> None:
    """Support and restart cause are optional; a look sends nothing but reads."""
    result = Scripted((0, ON), (0xC1, b""), (0xC1, b"")).exchange.probe(ask_support=True)
    assert (result.status, result.support, result.cause) == (ON, None, None)
    bmc = Scripted((0, ON), (0, b"\x06\x00"))
    result = bmc.exchange.probe(ask_support=False)
    assert (result.support, result.cause) == (None, b"\x06\x00")
    assert bmc.sent == [(1, b""), (7, b"")]


def test_a_probe_does_not_hide_a_busy_bmc() -> None:
    """Busy to the end is a failure of the probe, not a missing feature."""
    bmc = Scripted((0, ON), *[(0xC0, b"")] * 20, by_s=1.0)
    assert refusal(lambda: bmc.exchange.probe(ask_support=True))[0] is Failure.BUSY


_FALLS_SILENT = """
import os, sys, time
from powerguard.clock import boottime_s
from powerguard.effectors.bmc import worker
from powerguard.effectors.bmc.ipmi import Session

class Silent(worker.Worker):
    def _log_in(self, request):
        self._in_session = True
        return Session(self.send, lambda: None)

    def send(self, command):
        if command.number == 0x07:
            time.sleep(60)
        return (0xC1, b"") if command.number == 0x06 else (0, b"\\x41\\x00\\x00")

by_s, port = boottime_s() + 3.0, int(sys.argv[1])
request = worker.WorkerRequest(operation="probe", host="127.0.0.1", port=port, by_s=by_s, user=b"u", password=b"p")
Silent(os.dup(1)).run(request)
"""


async def test_silence_after_a_refusal_is_silence() -> None:
    """The optional question before it was refused: that is no reason to look into the firmware setup."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bmc:
        bmc.bind(("127.0.0.1", 0))
        argv = (sys.executable, "-c", _FALLS_SILENT, str(bmc.getsockname()[1]))
        answer = json.loads((await run_child(argv, limit_s=60.0)).stdout)
    assert (answer["ok"], answer["failure"]) == (False, Failure.TIMEOUT)
    assert answer["text"] == "answered the login, then fell silent during Get System Restart Cause"
