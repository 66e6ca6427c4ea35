"""How long does a battery last of which only the nameplate is known?"""

from powerguard.core.energy.account import OWN_LOAD

_PEUKERT = 1.35
"""Exponent from the 20-hour rate, at which nameplates state energy, down to minutes. Cautious: `nameplate_table`."""
_EFFICIENCY = 0.9
_RATED_H = 20.0
_LOADS = (0.25, 0.5, 0.75, 1.0)
_LONGEST_S = 172800.0


def nameplate_table(battery_wh: float, rating_w: float) -> tuple[tuple[float, float], ...]:
    """Return a cautious (load share, seconds) table from the nameplate alone: battery energy and rating.

    battery_wh: volts x ampere-hours of all batteries, as printed (20-hour rate); rating_w: watts, not VA; both > 0.
    Peukert's law from the 20-hour rate, 90 % inverter efficiency, and 4 % of the rating for the UPS itself.

    Held against the makers' figures (runtime by VA in the manual of the APC Smart-UPS 420, 650, 1000 and 1400, section
    13; nameplates 84, 144, 288 and 408 Wh) it is 10 to 52 % short, and never long; exponent 1.30 is 7 % long at one of
    them. Given the energy that meets its 240 s at full load, it says 348 s and 581 s where an SRT 6000VA has 360 s and
    540 s, at 75 % and 50 %. A data sheet's table is always worth more.
    """
    rate_w = battery_wh * _EFFICIENCY / _RATED_H
    return tuple(
        (load, min(_LONGEST_S, _RATED_H * 3600.0 * (rate_w / ((load + OWN_LOAD) * rating_w)) ** _PEUKERT))
        for load in _LOADS
    )
