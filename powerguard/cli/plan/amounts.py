"""Amounts with units on the command line: 8.5GB, 0.4GB/s, 4.5kW, 70B, 75 %. Stdlib only.

Strict: plain decimal numbers, a known unit, within bounds that have a reason. An error names the fix.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Final

_AMOUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)[ ]?([A-Za-z%/]*)")
_BYTES: Final = {
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
_WATTS: Final = {"": 1.0, "W": 1.0, "kW": 1e3}
_WATT_HOURS: Final = {"": 1.0, "Wh": 1.0, "kWh": 1e3}
_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PARAMETERS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class AmountError(ValueError):
    """An invalid amount: what is wrong, and the fix."""


def _amount(option: str, text: str, units: Mapping[str, float], wanted: str) -> float:
    match = _AMOUNT.fullmatch(text.strip()) if len(text) <= 40 else None
    factor = None if match is None else units.get(match[2]) or {k.lower(): v for k, v in units.items()}.get(match[2])
    if match is None or factor is None:
        shown = text if len(text) <= 40 else text[:37] + "..."
        msg = f"{option}: {shown!r} is not {'an' if wanted[0] in 'aeiou' else 'a'} {wanted}"
        raise AmountError(msg)
    return float(match[1]) * factor


def _within(option: str, value: float, least: float, most: float, unit: str) -> float:
    if not least <= value <= most:
        msg = f"{option}: must be {least:g} to {most:g}{unit and ' ' + unit}, got {value:g}"
        raise AmountError(msg)
    return value


def size_bytes(option: str, text: str) -> float:
    """Return bytes. The unit is needed: 8.5GB (10^9), 8GiB (2^30)."""
    value = _amount(option, text, _BYTES, "size with a unit (example: 8.5GB)")
    return _within(option, value, 1.0, 1e16, "bytes")


def rate_bytes(option: str, text: str) -> float:
    """Return bytes a second: 0.4GB/s."""
    per_second = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    value = _amount(option, text, per_second, "bandwidth with a unit (example: 0.4GB/s)")
    return _within(option, value, 1e3, 1e13, "bytes a second")


def watts(option: str, text: str) -> float:
    """Return watts: 4500, 4500W, 4.5kW."""
    value = _amount(option, text, _WATTS, "power in watts, not VA (examples: 4500W, 4.5kW)")
    return _within(option, value, 1.0, 2e6, "W")


def watt_hours(option: str, text: str) -> float:
    """Return watt-hours: 2000, 2000Wh, 2kWh."""
    value = _amount(option, text, _WATT_HOURS, "energy (examples: 2000Wh, 2kWh)")
    return _within(option, value, 10.0, 2e7, "Wh")


def seconds(option: str, text: str, least: float, most: float) -> float:
    """Return seconds: 20, 20s, 4m, 1h."""
    value = _amount(option, text, _SECONDS, "duration (examples: 20, 20s, 4m, 1h)")
    return _within(option, value, least, most, "s")


def parameters(option: str, text: str) -> float:
    """Return a number of parameters: 70B (10^9), 650M."""
    value = _amount(option, text, _PARAMETERS, "number of parameters (examples: 70B, 650M)")
    return _within(option, value, 1.0, 1e14, "")


def number(option: str, text: str, least: float, most: float) -> float:
    """Return a plain number."""
    value = _amount(option, text, {"": 1.0}, "number")
    return _within(option, value, least, most, "")


def whole(option: str, text: str, least: float, most: float) -> float:
    """Return a plain whole number."""
    value = number(option, text, least, most)
    if value % 1.0:
        msg = f"{option}: {text!r} is not a whole number"
        raise AmountError(msg)
    return value


def percent(option: str, text: str, least: float, most: float) -> float:
    """Return percent: 75, 75%."""
    value = _amount(option, text, {"": 1.0, "%": 1.0}, "percentage (example: 75)")
    return _within(option, value, least, most, "%")


def share(option: str, text: str, least: float, most: float) -> float:
    """Return a share: 0.2, or 20%. A number above 1 without % is refused: it may mean percent."""
    value = _amount(option, text, {"": 1.0, "%": 0.01}, "share (examples: 0.2, 20%)")
    if value > 1.0:
        msg = f"{option}: {text!r} is more than 100 % (examples: 0.2, 20%)"
        raise AmountError(msg)
    return _within(option, value, least, most, "")


def table(option: str, text: str) -> tuple[tuple[float, float], ...]:
    """Return (load share, seconds), ascending by load, of "50:540,75:360,100:240" (percent:seconds, or 50:9m)."""
    points: dict[float, float] = {}
    for pair in text.split(","):
        load, colon, lasts = pair.partition(":")
        if not colon:
            msg = f"{option}: {pair[:40]!r} is not a point: write load in percent and seconds (50:540,75:360,100:240)"
            raise AmountError(msg)
        place = percent(option, load, 1.0, 150.0) / 100.0
        if place in points:
            msg = f"{option}: {100 * place:g} % occurs twice"
            raise AmountError(msg)
        points[place] = seconds(option, lasts, 10.0, 172800.0)
    if len(points) > 32:
        msg = f"{option}: {len(points)} points are more than 32"
        raise AmountError(msg)
    found = sorted(points.items())
    for (low, long_s), (high, short_s) in itertools.pairwise(found):
        if short_s >= long_s:
            msg = (
                f"{option}: must fall as the load rises, got {long_s:g} s at {100 * low:g} % and {short_s:g} s at "
                f"{100 * high:g} % (write load in percent: seconds)"
            )
            raise AmountError(msg)
    return tuple(found)
