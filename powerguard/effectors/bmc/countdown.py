"""What is said to a BMC about its watchdog timer: look, arm, disarm; each read back, nobody else's ever touched."""

from contextlib import suppress
from typing import Final, NamedTuple

from powerguard.effectors.bmc.exchange import BmcFailure, Exchange
from powerguard.effectors.bmc.ipmi import GET_RESTART_CAUSE, Failure, ReplyError
from powerguard.effectors.bmc.timer import DISARM, GET_DEVICE_ID, GET_WATCHDOG, RESET_WATCHDOG, Timer, arm_watchdog

_FALLS_S: Final = 0.3
"""Long enough to see a countdown of 100 ms fall."""
_ROUNDED_S: Final = 1.0
"""Some BMCs count in whole seconds."""
_ELAPSED_S: Final = 5.0
"""No conversation takes longer, so a countdown that is more than this below what was set is another one."""


class Looked(NamedTuple):
    """Data of the answers; device, cause: None where the BMC refused the question."""

    timer: bytes
    device: bytes | None
    cause: bytes | None


def look(exchange: Exchange) -> Looked:
    """Read the timer, who the BMC is, and what powered the host on last. Raises BmcFailure."""
    _timer(data := exchange.ask(GET_WATCHDOG))
    return Looked(data, exchange.optional(GET_DEVICE_ID), exchange.optional(GET_RESTART_CAUSE))


def arm(exchange: Exchange, in_s: int) -> bytes:
    """Set it to cycle the power in in_s, start it, see that it runs; what does not read back is taken back.

    Returns what was read back. Raises BmcFailure: HELD where the timer runs for somebody else.
    """
    found = _timer(exchange.ask(GET_WATCHDOG))
    if found.is_foreign:
        raise BmcFailure(Failure.HELD, f"the watchdog timer is somebody else's ({found.words})")
    try:
        exchange.ask(arm_watchdog(in_s))
        exchange.ask(RESET_WATCHDOG)
        return _runs(exchange, in_s)
    except BmcFailure:
        with suppress(BmcFailure):  # a timer of which nobody knows when it fires is worse than none
            exchange.ask(DISARM)
        raise


def disarm(exchange: Exchange) -> tuple[bytes, bool]:
    """Stop it, if it is set as we set it; what was read last, and whether anything was changed. Raises BmcFailure."""
    data = exchange.ask(GET_WATCHDOG)
    if not _timer(data).is_ours:
        return data, False
    exchange.ask(DISARM)
    data = exchange.ask(GET_WATCHDOG)
    if (left := _timer(data)).is_ours:
        raise BmcFailure(Failure.MISMATCH, f"acknowledged to stop the watchdog timer, but it still reads {left.words}")
    return data, True


def _runs(exchange: Exchange, in_s: int) -> bytes:
    """Read back: ours, its countdown what was set, and running, by its own word or because the countdown falls."""
    read = _timer(data := exchange.ask(GET_WATCHDOG))
    is_set = read.initial_s is not None and abs(read.initial_s - in_s) <= _ROUNDED_S
    counts = read.present_s is None or in_s - _ELAPSED_S <= read.present_s <= in_s + _ROUNDED_S
    if read.is_ours and is_set and counts and (read.running or _falls(exchange, read)):
        return data
    told = "nothing of the countdown" if read.initial_s is None else f"a countdown of {read.initial_s:g} s"
    raise BmcFailure(Failure.MISMATCH, f"acknowledged a power cycle in {in_s} s, but reads {read.words}, and {told}")


def _falls(exchange: Exchange, first: Timer) -> bool:
    if first.present_s is None or not exchange.pace.pause(_FALLS_S):
        return False
    second = _timer(exchange.ask(GET_WATCHDOG)).present_s
    return second is not None and second < first.present_s


def _timer(data: bytes) -> Timer:
    try:
        return Timer.decode(data)
    except ReplyError as error:
        raise BmcFailure(Failure.PROTOCOL, str(error)) from error
