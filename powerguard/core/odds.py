"""How long does an outage last that has lasted for so long? The odds that a pause of training is weighed with.

The lengths are those of the EPRI survey as it is quoted for data centres (ASPLOS'14, "Underprovisioning backup power
infrastructure"), log-uniform inside each bin. A site's own outages differ, so these odds never decide alone: they are
asked only whether to pause early for a checkpoint that costs much, and never at the end of the battery.
"""

import math

_BINS = (
    (1.0, 60.0, 0.31),
    (60.0, 300.0, 0.27),
    (300.0, 1800.0, 0.14),
    (1800.0, 7200.0, 0.17),
    (7200.0, 14400.0, 0.06),
    (14400.0, 43200.0, 0.05),
)
"""Shortest and longest in seconds, and the share of all outages."""
_PARTS = 16


def _lasts(at_least_s: float) -> float:
    """Share of all outages that last at least so long."""
    share = 0.0
    for from_s, to_s, part in _BINS:
        if at_least_s <= from_s:
            share += part
        elif at_least_s < to_s:
            share += part * math.log(to_s / at_least_s) / math.log(to_s / from_s)
    return share


def goes_on(lasted_s: float, more_s: float) -> float:
    """Odds that an outage that has lasted for lasted_s goes on for more_s at least."""
    now = _lasts(lasted_s)
    return _lasts(lasted_s + more_s) / now if now > 0.0 else 1.0


def expected_s(lasted_s: float, at_most_s: float) -> float:
    """Mean of the seconds that such an outage still lasts, each counted as at_most_s at the most."""
    if at_most_s <= 0.0:
        return 0.0
    part_s = at_most_s / _PARTS
    return part_s * sum(goes_on(lasted_s, (at + 0.5) * part_s) for at in range(_PARTS))
