"""How long several batteries last together: played forward, one end after the other (docs/decisions/0055)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

OVERLOADED = 1.0
"""A UPS that takes over another's load and then has more than this share of its rating switches off."""
ENDLESS_S = 1e7
"""Enough of them have utility: it lasts as long as that."""
FACTORS = (0.3, 0.45, 0.6, 0.8, 1.0, 1.25)
"""Loads, as shares of the one of now, at which the runtime of all together is played."""


@dataclass(slots=True)
class Leg:
    """One feed while its end is played. left: usable energy; inf: utility. cut_at_s: its UPS cuts its output then."""

    supplies: int
    left: float
    load: float
    tau_s: Callable[[float], float]
    cut_at_s: float

    def at(self, factor: float) -> "Leg":
        """Return it at so many times its load."""
        return Leg(self.supplies, self.left, factor * self.load, self.tau_s, self.cut_at_s)


def stepped(lasts: list[float]) -> list[float]:
    """Lower the last endless one to the first that ends: between the two it is unknown if the rest is overloaded."""
    out = list(lasts)
    for place in range(len(out) - 1):
        if lasts[place] >= ENDLESS_S > lasts[place + 1]:
            out[place] = lasts[place + 1] * FACTORS[place + 1] / FACTORS[place]
    return out


def play(legs: list[Leg], minimum: int, now_s: float) -> float:
    """Let the legs end one after the other; return when fewer than `minimum` power supplies are left."""
    at_s = now_s
    while sum([leg.supplies for leg in legs]) >= minimum:
        # A look at a table costs more than all else here, and this runs at every reading on battery: one look a leg.
        taus_s = [leg.tau_s(leg.load) for leg in legs]
        ends = [min(at_s + leg.left * tau_s, leg.cut_at_s) for leg, tau_s in zip(legs, taus_s, strict=True)]
        ends_s = min(ends)
        if math.isinf(ends_s):
            return at_s + ENDLESS_S
        if len(legs) > 1:  # The energy of the last one is not needed.
            for leg, tau_s in zip(legs, taus_s, strict=True):
                leg.left = max(0.0, leg.left - (ends_s - at_s) / tau_s)
        at_s = max(at_s, ends_s)
        legs = _without(legs, legs[ends.index(ends_s)])
        while overloaded := [leg for leg in legs if leg.load > OVERLOADED]:
            legs = _without(legs, overloaded[0])
    return at_s


def _without(legs: list[Leg], dead: Leg) -> list[Leg]:
    """Move the load of a dead leg to the others, by their power supplies."""
    rest = [leg for leg in legs if leg is not dead]
    supplies = sum(leg.supplies for leg in rest)
    for leg in rest:
        leg.load += dead.load * leg.supplies / supplies
    return rest
