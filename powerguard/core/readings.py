"""What sources tell: readings of a UPS, polls that brought none, and what becomes of the way to it.

Frozen, free of behaviour, and made only of numbers, strings, enums and tuples, so that it can be journalled, replayed
and compared. Time: every `at_s` is seconds of CLOCK_BOOTTIME, which runs on over suspend and starts anew at each boot.
"""

from dataclasses import dataclass
from enum import StrEnum


class OutputSource(StrEnum):
    """Where the UPS takes its output from. RFC 1628 upsOutputSource, plus eco and unknown.

    Bypass: raw utility power, present but unprotected. Eco: filtered utility power, unprotected for some milliseconds.
    Unknown: not told, or told in a way that we do not know; never "fine".
    """

    UTILITY = "utility"
    BATTERY = "battery"
    BYPASS = "bypass"
    BOOST = "boost"
    TRIM = "trim"
    ECO = "eco"
    OFF = "off"
    UNKNOWN = "unknown"


ON_UTILITY = frozenset(OutputSource) - {OutputSource.BATTERY, OutputSource.OFF, OutputSource.UNKNOWN}
"""Where the output comes from the grid, one way or another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One complete observation of one UPS by one source, already in our units.

    at_s: when the reading ended. ups: name of the UPS in the settings.
    source: name of the source that made it, such as "snmp" or "snmp:10.0.0.5".
    feed: the feed that it belongs to; one UPS is one feed.
    runtime_s: RFC 1628 upsEstimatedMinutesRemaining x 60; PowerNet upsAdvBatteryRunTimeRemaining / 100;
        NUT battery.runtime; apcupsd TIMELEFT x 60. None when not told or implausible; never 0 for "unknown".
    charge_pct: 0 to 100. RFC 1628 upsEstimatedChargeRemaining.
    load_pct: percent of the rating; on a three-phase UPS the worst live line.
    on_battery_s: seconds on battery as the UPS counts them. RFC 1628 upsSecondsOnBattery.
    input_present: utility at the input; None when not told. Derived by the decoder from input volts or alarms.
    low_battery: RFC 1628 upsBatteryStatus low or depleted; NUT LB.
    forced_shutdown: NUT FSD: the primary has ordered everybody down.
    output_off_in_s: a countdown of the UPS, whoever ordered it: seconds until it cuts its output.
    authenticated: the answer could not have been forged (SNMP v3 with authentication, TLS).
    alarms: names in lower_snake_case, such as "on_battery", "overload", "battery_missing".
    provenance: (field, object) pairs: which object of the protocol told each field.
    """

    at_s: float
    ups: str
    source: str
    output_source: OutputSource
    feed: str = ""
    runtime_s: float | None = None
    charge_pct: float | None = None
    load_pct: float | None = None
    watts: float | None = None
    on_battery_s: float | None = None
    input_present: bool | None = None
    input_v: float | None = None
    battery_temp_c: float | None = None
    low_battery: bool = False
    replace_battery: bool = False
    overload: bool = False
    testing: bool = False
    calibrating: bool = False
    forced_shutdown: bool = False
    output_off_in_s: float | None = None
    authenticated: bool = False
    alarms: tuple[str, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFailed:
    """A poll brought no reading: no answer, a refused one, or one that does not hold together.

    lost: the source counts as lost from now on (three misses in a row); one miss is not news.
    """

    at_s: float
    ups: str
    source: str
    reason: str
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSeen:
    """A part of this host's own network by which its sources answer went, or is there.

    part: such as "link enp1s0" or "gateway 10.0.0.1". up: False when it went without anybody on this host wanting it.
    heard_s: when it was last known to be there, where its end is noticed late; None: it went at at_s.
    """

    at_s: float
    part: str
    up: bool
    heard_s: float | None = None
