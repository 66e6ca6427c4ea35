"""IPMI: the few raw commands that we need, as bytes <-> values, and their exchange with a BMC.

IPMI = Intelligent Platform Management Interface Specification, second generation, v2.0, revision 1.1. A request is
(network function, command, data); an answer is a completion code and data. All of ours ask for at most Operator
privilege (appendix G), so no account of ours is ever an administrator.
Answers are read leniently: boards and simulators cut bytes off and append some.
Named tuples and no dataclasses: those take 15 ms to import, a quarter of what a word to the root helper takes.
"""

from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Final, NamedTuple


class PowerRestorePolicy(StrEnum):
    """The chassis's behaviour when AC returns. IPMI 2.0 section 28.2, byte 2, bits 6:5."""

    ALWAYS_ON = "always-on"
    """The only one that brings a host back that was powered off in order."""
    ALWAYS_OFF = "always-off"
    LAST_STATE = "last-state"
    """After an orderly power-off the last state is "off", so the host stays off."""
    UNKNOWN = "unknown"


_POLICY_OF_BITS = {
    0: PowerRestorePolicy.ALWAYS_OFF,
    1: PowerRestorePolicy.LAST_STATE,
    2: PowerRestorePolicy.ALWAYS_ON,
    3: PowerRestorePolicy.UNKNOWN,
}
_BITS_OF_POLICY = {policy: bits for bits, policy in _POLICY_OF_BITS.items()}


class RestartCause(StrEnum):
    """Which layer powered the host on. IPMI 2.0 section 28.11, byte 2, bits 3:0."""

    UNKNOWN = "unknown"
    CHASSIS_CONTROL = "chassis-control"
    RESET_BUTTON = "reset-button"
    POWER_BUTTON = "power-button"
    WATCHDOG = "watchdog"
    OEM = "oem"
    POLICY_ALWAYS_ON = "policy-always-on"
    POLICY_LAST_STATE = "policy-last-state"
    PEF_RESET = "pef-reset"
    PEF_POWER_CYCLE = "pef-power-cycle"
    SOFT_RESET = "soft-reset"
    RTC_WAKE = "rtc-wake"


_CAUSES = tuple(RestartCause)  # the order above is the order of the code points 0h to Bh


class Failure(StrEnum):
    """Why a BMC did not do what was asked; each has its own fix."""

    UNREACHABLE = "unreachable"
    """No session: the login got no answer."""
    AUTH = "auth-failed"
    """User or password refused. Never repeated: BMCs lock accounts."""
    PRIVILEGE = "privilege"
    UNSUPPORTED = "unsupported"
    BUSY = "busy"
    TIMEOUT = "timeout"
    """There was a session, and then silence."""
    MISMATCH = "verify-mismatch"
    """Acknowledged, but it reads back as something else."""
    PROTOCOL = "protocol-error"
    """A reaction that is impossible for a correct BMC or library."""
    HELD = "held"
    """Another program uses the function."""
    SETTINGS = "settings"
    """The BMC is there, but the settings of its certificate or system are missing or wrong."""


class ReplyError(ValueError):
    """An answer too short to hold what was asked for."""


class Command(NamedTuple):
    """One request. name: as the specification calls it."""

    name: str
    netfn: int
    number: int
    data: bytes = b""


GET_CHASSIS_STATUS = Command("Get Chassis Status", 0x00, 0x01)
GET_RESTART_CAUSE = Command("Get System Restart Cause", 0x00, 0x07)
GET_POLICY_SUPPORT = Command("Set Power Restore Policy", 0x00, 0x06, b"\x03")
"""011b: no change, only report which policies are supported. IPMI 2.0 section 28.8."""

POWER_ON = Command("Chassis Control", 0x00, 0x02, b"\x01")
"""Power up, IPMI 2.0 section 28.3; the sentinel's alone (`power.py`), and no other value of it exists here."""

GET_POWER = Command("Get Power Reading", 0x2C, 0x02, b"\xdc\x01\x00\x00")
"""DCMI 1.5 section 6.6.1: group DCh, system power statistics. Optional."""

THIS_CHANNEL = 0x0E
"""The channel that the question comes in on (IPMI 2.0 section 6.3)."""

OPERATOR, ADMINISTRATOR = 0x03, 0x04
"""Privilege levels: 2 user, 3 operator, 4 administrator, 5 the vendor's own (IPMI 2.0 section 6.8). We ask for 3."""


def get_user_access(user_id: int) -> Command:
    """Get User Access, IPMI 2.0 section 22.27: byte 1 how many users there are, byte 4 the privilege limit."""
    return Command("Get User Access", 0x06, 0x44, bytes([THIS_CHANNEL, user_id]))


def get_user_name(user_id: int) -> Command:
    """Get User Name, IPMI 2.0 section 22.29: 16 bytes, padded with zeros."""
    return Command("Get User Name", 0x06, 0x46, bytes([user_id]))


def set_policy(policy: PowerRestorePolicy) -> Command:
    """Set Power Restore Policy, IPMI 2.0 section 28.8. Raises ValueError for UNKNOWN."""
    if policy is PowerRestorePolicy.UNKNOWN:
        msg = "unknown is not a power restore policy that can be set"
        raise ValueError(msg)
    return Command("Set Power Restore Policy", 0x00, 0x06, bytes([_BITS_OF_POLICY[policy]]))


class ChassisStatus(NamedTuple):
    """Get Chassis Status, IPMI 2.0 section 28.2, or the same from Redfish. None: not reported.

    ac_failed: the last power-down was a loss of AC; None also when the answer ends before it.
    raw: the answer's data, for the journal; empty for Redfish.
    """

    power_on: bool | None
    policy: PowerRestorePolicy
    ac_failed: bool | None = None
    raw: bytes = b""

    @classmethod
    def decode(cls, data: bytes) -> "ChassisStatus":
        """Read the data after the completion code. Raises ReplyError when there is none."""
        if not data:
            msg = "Get Chassis Status was answered without data (IPMI 2.0 section 28.2 wants 3 or 4 bytes)"
            raise ReplyError(msg)
        state = data[0]
        return cls(
            power_on=bool(state & 0x01),
            policy=_POLICY_OF_BITS[state >> 5 & 0x03],
            ac_failed=bool(data[1] & 0x01) if len(data) > 1 else None,
            raw=bytes(data),
        )


def decode_support(data: bytes) -> frozenset[PowerRestorePolicy] | None:
    """Return the policies that the answer to Set Power Restore Policy says are supported; None if it does not."""
    if not data:
        return None
    return frozenset(
        policy
        for bit, policy in _POLICY_OF_BITS.items()
        if policy is not PowerRestorePolicy.UNKNOWN and data[0] & 1 << bit
    )


def decode_restart_cause(data: bytes) -> RestartCause:
    """Return which layer powered the host on; UNKNOWN for an empty answer or a code point of the future."""
    code = data[0] & 0x0F if data else 0
    return _CAUSES[code] if code < len(_CAUSES) else RestartCause.UNKNOWN


def decode_power(data: bytes) -> float | None:
    """Watts now, of a DCMI power reading (section 6.6.1); None if there is none, or no measurement is active."""
    if len(data) < 3 or data[0] != 0xDC or (len(data) > 17 and not data[17] & 0x40):
        return None
    return float(int.from_bytes(data[1:3], "little")) or None


# IPMI 2.0 table 5-2: code -> (what it asks of us, what it says). Codes that no chassis command should ever answer are
# listed too: an odd BMC must get a sentence, not a number.
_COMPLETION_CODES: dict[int, tuple[Failure, str]] = {
    0xC0: (Failure.BUSY, "node busy"),
    0xC1: (Failure.UNSUPPORTED, "invalid command"),
    0xC2: (Failure.UNSUPPORTED, "command invalid for this LUN"),
    0xC3: (Failure.BUSY, "timed out inside the BMC"),
    0xC4: (Failure.BUSY, "out of space"),
    0xC5: (Failure.PROTOCOL, "reservation cancelled or invalid"),
    0xC6: (Failure.PROTOCOL, "request data truncated"),
    0xC7: (Failure.PROTOCOL, "request data length invalid"),
    0xC8: (Failure.PROTOCOL, "request data field too long"),
    0xC9: (Failure.UNSUPPORTED, "parameter out of range"),
    0xCA: (Failure.PROTOCOL, "cannot return that many bytes"),
    0xCB: (Failure.UNSUPPORTED, "requested record not present"),
    0xCC: (Failure.UNSUPPORTED, "invalid data field in request"),
    0xCD: (Failure.UNSUPPORTED, "command illegal for this record type"),
    0xCE: (Failure.BUSY, "answer could not be provided"),
    0xCF: (Failure.BUSY, "duplicated request"),
    0xD0: (Failure.BUSY, "sensor data repository in update mode"),
    0xD1: (Failure.BUSY, "device in firmware update mode"),
    0xD2: (Failure.BUSY, "BMC initialisation in progress"),
    0xD3: (Failure.BUSY, "destination unavailable"),
    0xD4: (Failure.PRIVILEGE, "insufficient privilege or firmware firewall"),
    0xD5: (Failure.UNSUPPORTED, "not supported in the present state"),
    0xD6: (Failure.UNSUPPORTED, "sub-function disabled or unavailable"),
    0xFF: (Failure.PROTOCOL, "unspecified error"),
}


def completion(code: int) -> tuple[Failure, str] | None:
    """Say what a completion code means: None for success, else what it asks of us and its text (table 5-2)."""
    if code == 0:
        return None
    if code in _COMPLETION_CODES:
        return _COMPLETION_CODES[code]
    if 0x01 <= code <= 0x7E:
        return Failure.PROTOCOL, "device-specific code of the vendor"
    if 0x80 <= code <= 0xBE:
        return Failure.PROTOCOL, "command-specific code"
    return Failure.PROTOCOL, "reserved code"


GET_WATCHDOG = Command("Get Watchdog Timer", 0x06, 0x25)
RESET_WATCHDOG = Command("Reset Watchdog Timer", 0x06, 0x22)
"""Loads the countdown and starts it (section 27.5); the set alone does not."""
GET_DEVICE_ID = Command("Get Device ID", 0x06, 0x01)

MAX_S = 6553
"""Seconds that fit into two bytes of 100 ms."""

_SMS_OS = 0x04
_CYCLE = 0x03
_DONT_STOP = 0x40
_SMS_OS_FLAG = 0x10

DISARM = Command("Set Watchdog Timer", 0x06, 0x24, bytes((_SMS_OS, 0x00, 0x00, 0x00, 0x64, 0x00)))
"""Section 27.6: use SMS/OS, stopped by this very command, action none, 10 s.

It clears no expiry flag: after the return, the flag shows that the timer has fired.
"""


def arm_watchdog(in_s: int) -> Command:
    """Set Watchdog Timer (section 27.6): use SMS/OS, action power cycle, logged, its own expiry flag cleared.

    Bit 6, "don't stop", leaves no moment without a timer where one of ours runs already. Raises ValueError for what
    does not fit: less than 1 s or more than MAX_S.
    """
    if not 1 <= in_s <= MAX_S:
        msg = f"a watchdog timer takes 1 to {MAX_S} s, not {in_s}"
        raise ValueError(msg)
    head = bytes((_SMS_OS | _DONT_STOP, _CYCLE, 0x00, _SMS_OS_FLAG))
    return Command("Set Watchdog Timer", 0x06, 0x24, head + (10 * in_s).to_bytes(2, "little"))


class Timer(NamedTuple):
    """Get Watchdog Timer (section 27.7). None: the answer ends before it.

    running: as the BMC says, which OpenIPMI's simulated one does not know. use, action: as in the section's table.
    expired: it has fired with use SMS/OS since that flag was last cleared; outlives resets and power cycles of the
    host. initial_s: of the countdown; present_s: what is left of it.
    """

    running: bool
    use: int
    action: int
    expired: bool | None = None
    initial_s: float | None = None
    present_s: float | None = None

    @classmethod
    def decode(cls, data: bytes) -> "Timer":
        """Read the data after the completion code: 8 bytes, but some send 6, and some more. Raises ReplyError."""
        if len(data) < 2:
            msg = f"Get Watchdog Timer was answered with {len(data)} bytes (IPMI 2.0 section 27.7 wants 8)"
            raise ReplyError(msg)
        return cls(
            running=bool(data[0] & 0x40),
            use=data[0] & 0x07,
            action=data[1] & 0x07,
            expired=bool(data[3] & _SMS_OS_FLAG) if len(data) > 3 else None,
            initial_s=int.from_bytes(data[4:6], "little") / 10 if len(data) > 5 else None,
            present_s=int.from_bytes(data[6:8], "little") / 10 if len(data) > 7 else None,
        )

    @property
    def is_ours(self) -> bool:
        """Whether it is set as we set it: use SMS/OS, power cycle. Watchdog daemons choose a reset, or other uses."""
        return (self.use, self.action) == (_SMS_OS, _CYCLE)

    @property
    def is_foreign(self) -> bool:
        """Whether it runs for another program."""
        return self.running and not self.is_ours

    @property
    def words(self) -> str:
        """The setting, in words."""
        uses = ("reserved", "BIOS FRB2", "BIOS POST", "OS load", "SMS/OS", "OEM")
        actions = ("none", "hard reset", "power down", "power cycle")
        use = uses[self.use] if self.use < len(uses) else str(self.use)
        action = actions[self.action] if self.action < len(actions) else str(self.action)
        left = "" if self.present_s is None else f", {self.present_s:g} s left"
        return f"use {use}, action {action}, {'running' if self.running else 'stopped'}{left}"


class Device(NamedTuple):
    """Get Device ID (section 20.1): which BMC, with which firmware. auxiliary: of the vendor's own, in hex, or ""."""

    manufacturer: int
    product: int
    firmware: str
    auxiliary: str = ""

    @classmethod
    def decode(cls, data: bytes) -> "Device":
        """Read the data after the completion code. Raises ReplyError."""
        if len(data) < 11:
            msg = f"Get Device ID was answered with {len(data)} bytes (IPMI 2.0 section 20.1 wants 11 or 15)"
            raise ReplyError(msg)
        return cls(
            manufacturer=int.from_bytes(data[6:9], "little") & 0x0FFFFF,
            product=int.from_bytes(data[9:11], "little"),
            firmware=f"{data[2] & 0x7F}.{data[3]:02x}",
            auxiliary=data[11:15].hex(),
        )


# --- The exchange ---------------------------------------------------------------------------------------------
#
# With a BMC inside one session: blocking, without a library, so that every step can be tested. It runs in the worker's
# process, or in the root helper's. Time comes in through `Pace`, the session through `Send`. The commands for the
# watchdog timer are read back; another program's timer is never touched.

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


class TimerRead(NamedTuple):
    """Data of the answers; device, cause: None where the BMC refused the question."""

    timer: bytes
    device: bytes | None
    cause: bytes | None


def look(exchange: Exchange) -> TimerRead:
    """Read the timer, who the BMC is, and what powered the host on last. Raises BmcFailure."""
    _timer(data := exchange.ask(GET_WATCHDOG))
    return TimerRead(data, exchange.optional(GET_DEVICE_ID), exchange.optional(GET_RESTART_CAUSE))


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
    countdown = "no countdown" if read.initial_s is None else f"a countdown of {read.initial_s:g} s"
    raise BmcFailure(
        Failure.MISMATCH, f"acknowledged a power cycle in {in_s} s, but reads {read.words}, and {countdown}"
    )


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
