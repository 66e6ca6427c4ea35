"""The closed lists that a profile is written with: fields, units, states. Another word is an error at load time.

What one SNMP answer may be, in plain Python, so that the decoder needs no SNMP library.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Literal

INPUT_THERE_V = 80.0
INPUT_GONE_V = 25.0
"""A UPS on battery shows some volts of ghost at its input; 100 V grids sag to 80 V before it transfers."""


class State(StrEnum):
    """A yes-or-no value that a device may report. Any object that says yes is enough."""

    ON_BATTERY = "on_battery"
    LOW_BATTERY = "low_battery"
    BATTERY_DEPLETED = "battery_depleted"
    BATTERY_FAULT = "battery_fault"
    BATTERY_MISSING = "battery_missing"
    BATTERY_HOT = "battery_hot"
    REPLACE_BATTERY = "replace_battery"
    CHARGER_FAULT = "charger_fault"
    INPUT_BAD = "input_bad"
    OUTPUT_BAD = "output_bad"
    OVERLOAD = "overload"
    ON_BYPASS = "on_bypass"
    BYPASS_BAD = "bypass_bad"
    OUTPUT_OFF = "output_off"
    UPS_OFF = "ups_off"
    UPS_FAULT = "ups_fault"
    FAN_FAULT = "fan_fault"
    FUSE_FAULT = "fuse_fault"
    GENERAL_FAULT = "general_fault"
    AWAITING_POWER = "awaiting_power"
    SHUTDOWN_PENDING = "shutdown_pending"
    SHUTDOWN_IMMINENT = "shutdown_imminent"
    SELF_TEST = "self_test"
    CALIBRATION = "calibration"
    COMM_LOST = "comm_lost"
    """The card has lost the UPS behind it: every value it serves is frozen."""


LOW = frozenset(
    {
        State.LOW_BATTERY,
        State.BATTERY_DEPLETED,
        # A faulty or missing battery may end at any moment: NUT counts both as low battery, and so do we.
        State.BATTERY_FAULT,
        State.BATTERY_MISSING,
    }
)
REPLACE = frozenset({State.REPLACE_BATTERY, State.BATTERY_FAULT, State.BATTERY_MISSING})


class BatteryStatus(StrEnum):
    """The battery's status, as a device reports it. RFC 1628 upsBatteryStatus, and what vendors add."""

    NORMAL = "normal"
    CHARGING = "charging"
    DISCHARGING = "discharging"
    LOW = "low"
    DEPLETED = "depleted"
    FAULT = "fault"
    MISSING = "missing"
    UNKNOWN = "unknown"


STATE_OF_BATTERY = {
    BatteryStatus.LOW: State.LOW_BATTERY,
    BatteryStatus.DEPLETED: State.BATTERY_DEPLETED,
    BatteryStatus.FAULT: State.BATTERY_FAULT,
    BatteryStatus.MISSING: State.BATTERY_MISSING,
}
"""A battery status is a state as well: a profile need not say it twice. From the mild to the grave."""


class OutletState(StrEnum):
    """One outlet of a rack PDU."""

    ON = "on"
    OFF = "off"
    UNKNOWN = "unknown"


class TrapEvent(StrEnum):
    """The meaning of a trap that is not a state: something ended, or something happened."""

    UTILITY_RESTORED = "utility_restored"
    LOW_BATTERY_CLEARED = "low_battery_cleared"
    COMM_RESTORED = "comm_restored"
    OVERLOAD_CLEARED = "overload_cleared"
    BYPASS_LEFT = "bypass_left"
    OUTPUT_ON = "output_on"
    BATTERY_DISCHARGED = "battery_discharged"
    BATTERY_REPLACED = "battery_replaced"
    SHUTDOWN_CANCELLED = "shutdown_cancelled"
    TEST_COMPLETED = "test_completed"
    OUTLET_CHANGED = "outlet_changed"
    ALARM_ADDED = "alarm_added"
    ALARM_REMOVED = "alarm_removed"
    AGENT_RESTARTED = "agent_restarted"
    HEARTBEAT = "heartbeat"


class Combine(StrEnum):
    """How the rows of a table (the lines of a three-phase UPS) become one number."""

    MAX = "max"
    MIN = "min"
    SUM = "sum"
    FIRST = "first"


@dataclass(frozen=True, slots=True)
class Field:
    """One number of a reading. lowest, highest: values outside of them are wrong; combine: over lines."""

    dimension: str
    lowest: float
    highest: float
    combine: Combine = Combine.MAX


NUMBERS = {
    # 5 days: a real inverter plant says 100 h at 25 % load; 9999 min (6.9 days) and 65535 min are saturated counters.
    "runtime_s": Field("time", 0, 5 * 86400, Combine.MIN),
    "charge_pct": Field("share", 0, 100, Combine.MIN),
    "load_pct": Field("share", 0, 250),
    "watts": Field("power", 0, 5e6, Combine.SUM),
    "on_battery_s": Field("time", 0, 5 * 86400),
    "input_v": Field("voltage", 0, 600, Combine.FIRST),
    "battery_temp_c": Field("temperature", -30, 90),
    "output_off_in_s": Field("time", 1, 86400),
    "amps": Field("current", 0, 10_000, Combine.SUM),
}

OF_ALL_LINES = frozenset({"load_pct", "watts", "amps"})
"""Numbers that are the sum or the worst of all lines: some lines alone would show too little."""

UNITS = {
    "s": ("time", 1.0),
    "min": ("time", 60.0),
    "min/10": ("time", 6.0),
    "h": ("time", 3600.0),
    "timeticks": ("time", 0.01),
    "%": ("share", 1.0),
    "%/10": ("share", 0.1),
    "W": ("power", 1.0),
    "W/10": ("power", 0.1),
    "kW": ("power", 1000.0),
    "kW/10": ("power", 100.0),
    "kW/100": ("power", 10.0),
    "V": ("voltage", 1.0),
    "V/10": ("voltage", 0.1),
    "V/100": ("voltage", 0.01),
    "mV": ("voltage", 0.001),
    "A": ("current", 1.0),
    "A/10": ("current", 0.1),
    "A/100": ("current", 0.01),
    "mA": ("current", 0.001),
    "C": ("temperature", 1.0),
    "C/10": ("temperature", 0.1),
}

CEILINGS = frozenset(range(65532, 65536)) | {2**31 - 1, 2**32 - 1}
"""Runtimes, as raw numbers, of counters that are full: the battery lasts for longer than they can count."""
CEILINGS_MIN = frozenset({546, 1092, 4095, 5999, 9999, 15300})
"""The same in minutes, as cards derive them: 32,767 s, 65,535 s, 12 bits, 100 hours less one, four nines, 255 hours."""
SATURATED = frozenset({-1, 32767, 65534, 65535, 2**31 - 1, 2**32 - 1, -(2**31), -32768})
"""-1, signed or not, or a counter at its end, whatever the quantity: no measurement."""

Witness = Literal["on_battery_s", "input_present", "alarms"]
WITNESSES: tuple[Witness, ...] = ("on_battery_s", "input_present", "alarms")
"""Fields that can confirm a bare "battery" within the same answer."""


class Oid(str):
    """An object identifier in dotted form without a leading dot: "1.3.6.1.2.1.33.1.4.1.0"."""

    __slots__ = ()


Value = int | bytes | Oid
"""INTEGER, Gauge32, Counter and TimeTicks are int; OCTET STRING and IpAddress are bytes; OBJECT IDENTIFIER is Oid."""


class Missing(Enum):
    """Why there is no value. None of these is ever a number, and none of them is ever 0."""

    NO_SUCH_OBJECT = "the device has no such object"
    NO_SUCH_INSTANCE = "noSuchInstance (this card does not fill it)"
    END_OF_MIB = "beyond the last object of the device"
    NULL = "NULL: the device knows the object and has no value for it"
    NO_ANSWER = "asked for, and left out of the answer"
    REFUSED = "refused with an error status"


Answer = Value | Missing


class DeviceError(Exception):
    """A device that cannot be read or ordered: one line for the operator.

    unanswered: no answer came in time. late: but after it, so address and credentials are right.
    """

    def __init__(self, reason: str, *, unanswered: bool = False, late: bool = False) -> None:
        """Keep the reason as the text of the exception."""
        super().__init__(reason)
        self.unanswered = unanswered
        self.late = late


def parts(oid: str) -> tuple[int, ...]:
    """Return the numbers of a dotted OID, for sorting and comparing."""
    return tuple(int(part) for part in oid.split("."))


def below(oid: str, root: str) -> bool:
    """Whether oid lies under root (and is not root itself)."""
    return oid.startswith(root + ".")
