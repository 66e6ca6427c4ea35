"""The exchange with a BMC inside one session: blocking, without a library, so that every step can be tested.

It runs in the worker's process. Time comes in through `Pace`, the session through `Send`.

Also the commands for its watchdog timer: look, arm, disarm; each read back. Another program's timer is never touched.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from powerguard.effectors.bmc.ipmi import (
    DISARM,
    GET_CHASSIS_STATUS,
    GET_DEVICE_ID,
    GET_POLICY_SUPPORT,
    GET_POWER,
    GET_RESTART_CAUSE,
    GET_WATCHDOG,
    RESET_WATCHDOG,
    ChassisStatus,
    Command,
    Failure,
    PowerRestorePolicy,
    ReplyError,
    Timer,
    arm_watchdog,
    completion,
    decode_power,
    decode_support,
    get_user_access,
    get_user_name,
    set_policy,
)

Send = Callable[[Command], tuple[int, bytes]]
"""Sends one command; returns completion code and data. Raises BmcFailure."""

READ_BACK_S = (0.0, 0.5, 2.0)
"""Seconds after the set at which it is read back: some firmware stores it late."""
BUSY_PAUSE_S = 0.3
MAX_USERS = 16
"""More are not looked through: each costs two questions."""


class BmcFailure(Exception):  # noqa: N818 - it is the failure's kind that callers ask for, as in `Failure`
    """The BMC did not do it. failure: which way; the text says what was seen, not where and not what to do."""

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure = failure


class Session(NamedTuple):
    """One login over LAN. close frees the BMC's slot for it, and may raise anything or hang."""

    send: Send
    close: Callable[[], object]


class Pace(NamedTuple):
    """Time as the exchange sees it. by_s: no pause may end later than this moment of `clock`."""

    clock: Callable[[], float]
    sleep: Callable[[float], None]
    by_s: float

    def pause(self, seconds: float) -> bool:
        """Wait, and say whether there was time for it."""
        if self.clock() + seconds >= self.by_s:
            return False
        self.sleep(seconds)
        return True


class EnsuredBytes(NamedTuple):
    """before, after: data of Get Chassis Status; changed: a set was sent and accepted."""

    before: bytes
    after: bytes
    changed: bool


class Probed(NamedTuple):
    """support, cause: data of the answers, None where the BMC refused the (optional) question."""

    status: bytes
    support: bytes | None
    cause: bytes | None


def refusal(command: Command, code: int) -> BmcFailure | None:
    """Return the meaning of a completion code for this command; None when it was carried out."""
    refused = completion(code)
    if refused is None:
        return None
    failure, meaning = refused
    text = f"{command.name} refused with completion code 0x{code:02X} ({meaning}; IPMI 2.0 table 5-2)"
    return BmcFailure(failure, text)


def silence(command: Command) -> BmcFailure:
    """A command in a session that got no answer."""
    return BmcFailure(Failure.TIMEOUT, f"answered the login, then fell silent during {command.name}")


class Exchange(NamedTuple):
    """One session's worth of questions and orders."""

    send: Send
    pace: Pace

    def ask(self, command: Command) -> bytes:
        """Send one command, again while the BMC says that it is busy. Raises BmcFailure on any other refusal."""
        while True:
            code, data = self.send(command)
            refused = refusal(command, code)
            if refused is None:
                return data
            if refused.failure is not Failure.BUSY or not self.pace.pause(BUSY_PAUSE_S):
                raise refused

    def status(self) -> bytes:
        """Return the data of Get Chassis Status, which is known to decode."""
        data = self.ask(GET_CHASSIS_STATUS)
        try:
            ChassisStatus.decode(data)
        except ReplyError as error:
            raise BmcFailure(Failure.PROTOCOL, str(error)) from error
        return data

    def ensure(self, wanted: PowerRestorePolicy, only_over: PowerRestorePolicy | None = None) -> EnsuredBytes:
        """Read; set only if it differs; read back until it is so. Raises BmcFailure.

        only_over: set only if this is read; any other policy was set by another program, and is left.
        """
        before = self.status()
        found = ChassisStatus.decode(before).policy
        if found is wanted or found is not (only_over or found):
            return EnsuredBytes(before=before, after=before, changed=False)
        supported = decode_support(self.ask(set_policy(wanted)))
        waited_s = 0.0
        for at_s in READ_BACK_S:
            if at_s and not self.pace.pause(at_s - waited_s):
                break
            waited_s = at_s
            after = self.status()
            found = ChassisStatus.decode(after).policy
            if found is wanted:
                return EnsuredBytes(before=before, after=after, changed=True)
        if supported is not None and wanted not in supported:
            known = ", ".join(sorted(supported)) or "none"
            raise BmcFailure(Failure.UNSUPPORTED, f"supports these power restore policies: {known}; not {wanted}")
        raise BmcFailure(Failure.MISMATCH, f"acknowledged {wanted} but still reads {found} {waited_s:g} s later")

    def probe(self, *, ask_support: bool) -> Probed:
        """Read what is worth knowing before an outage. A read; only the status is not optional.

        ask_support: also ask which policies there are, which is a form of the set command.
        """
        return Probed(
            status=self.status(),
            support=self.optional(GET_POLICY_SUPPORT) if ask_support else None,
            cause=self.optional(GET_RESTART_CAUSE),
        )

    def power_watts(self) -> float | None:
        """The host's power draw now; None if the BMC does not report it (DCMI is optional)."""
        data = self.optional(GET_POWER)
        return None if data is None else decode_power(data)

    def account_level(self, user: bytes) -> int | None:
        """Privilege limit of the account of this name on this channel; None where the BMC does not say. Only reads."""
        number = most = 1
        while number <= most:
            access, name = self.optional(get_user_access(number)), self.optional(get_user_name(number))
            if access is None or len(access) < 4:
                return None
            # A user without a name, mostly the first one, may report none.
            if name is not None and name.rstrip(b"\0") == user:
                return access[3] & 0x0F
            number, most = number + 1, min(access[0] & 0x3F, MAX_USERS)
        return None

    def optional(self, command: Command) -> bytes | None:
        """Ask; None where the BMC does not know the question, or does not answer it to us. Raises BmcFailure."""
        try:
            return self.ask(command)
        except BmcFailure as refused:
            if refused.failure in (Failure.UNSUPPORTED, Failure.PRIVILEGE, Failure.PROTOCOL):
                return None
            raise


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

    Returns what was read back. Raises BmcFailure: HELD if the timer runs for another program.
    """
    found = _timer(exchange.ask(GET_WATCHDOG))
    if found.is_foreign:
        raise BmcFailure(Failure.HELD, f"another program uses the watchdog timer ({found.words})")
    try:
        exchange.ask(arm_watchdog(in_s))
        exchange.ask(RESET_WATCHDOG)
        return _runs(exchange, in_s)
    except BmcFailure:
        with suppress(BmcFailure):  # a timer with an unknown end is worse than none
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
    """Read back: ours, with the countdown that was set, and running: it says so, or the countdown falls."""
    read = _timer(data := exchange.ask(GET_WATCHDOG))
    is_set = read.initial_s is not None and abs(read.initial_s - in_s) <= _ROUNDED_S
    counts = read.present_s is None or in_s - _ELAPSED_S <= read.present_s <= in_s + _ROUNDED_S
    if read.is_ours and is_set and counts and (read.running or _falls(exchange, read)):
        return data
    told = "no countdown" if read.initial_s is None else f"a countdown of {read.initial_s:g} s"
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
