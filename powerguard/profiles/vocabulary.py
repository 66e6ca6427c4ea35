"""The closed lists that a profile is written with: fields, units, states. Another word is an error at load time."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

INPUT_THERE_V = 80.0
INPUT_GONE_V = 25.0
"""A UPS on battery shows some volts of ghost at its input; 100 V grids sag to 80 V before it transfers."""


class State(StrEnum):
    """A yes-or-no thing that a device may tell. Any object that says yes is enough."""

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
    """What a device says of its battery. RFC 1628 upsBatteryStatus, and what vendors add."""

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
    """What a trap tells beside the states: that something ended, or only that something happened."""

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
    """One number of a reading. lowest, highest: outside of them no device tells the truth; combine: over lines."""

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
"""What is added up over the lines, or is the worst of them: less than all of them tell less than there is."""

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

Witness = Literal["on_battery_s", "input_present", "alarms"]
WITNESSES: tuple[Witness, ...] = ("on_battery_s", "input_present", "alarms")
"""What can support a bare "battery" from inside the same answer."""
