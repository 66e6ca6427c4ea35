"""The BMC's watchdog timer, and who the BMC is, as bytes <-> values. No input, no output.

Sections are of IPMI 2.0, revision 1.1. Apart from `ipmi` because the word that counts most, ensure, needs none of it.
"""

from typing import NamedTuple

from powerguard.effectors.bmc.ipmi import Command, ReplyError

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
"""Section 27.6: use SMS/OS, stopped by this very command, action none, 10 s. It clears no expiry flag: that is what
tells, after the return, that the timer has fired."""


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
        """Read the data after the completion code: 8 bytes, but some tell 6, and some more. Raises ReplyError."""
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
        """Whether it runs for somebody else."""
        return self.running and not self.is_ours

    @property
    def words(self) -> str:
        """What it is set to, for people."""
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
