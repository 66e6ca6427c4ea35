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

    def ends_s(self, now_s: float) -> float:
        """When it ends, if its load stays."""
        lasts_s = math.inf if math.isinf(self.left) else self.left * self.tau_s(self.load)
        return min(now_s + lasts_s, self.cut_at_s)


def stepped(lasts: list[float]) -> list[float]:
    """Lower the last endless one to the first that ends: between the two nobody knows where the rest is overloaded."""
    out = list(lasts)
    for place in range(len(out) - 1):
        if lasts[place] >= ENDLESS_S > lasts[place + 1]:
            out[place] = lasts[place + 1] * FACTORS[place + 1] / FACTORS[place]
    return out


def play(legs: list[Leg], minimum: int, now_s: float) -> float:
    """Let the legs end one after the other; return when fewer than `minimum` power supplies are left."""
    at_s = now_s
    while sum(leg.supplies for leg in legs) >= minimum:
        first = min(legs, key=lambda leg: leg.ends_s(at_s))
        ends_s = first.ends_s(at_s)
        if math.isinf(ends_s):
            return at_s + ENDLESS_S
        for leg in legs:
            if not math.isinf(leg.left):
                leg.left = max(0.0, leg.left - (ends_s - at_s) / leg.tau_s(leg.load))
        at_s = max(at_s, ends_s)
        legs = _without(legs, first)
        while any(leg.load > OVERLOADED for leg in legs):
            legs = _without(legs, next(leg for leg in legs if leg.load > OVERLOADED))
    return at_s


def _without(legs: list[Leg], dead: Leg) -> list[Leg]:
    """Move the load of a dead leg to the others, by their power supplies."""
    rest = [leg for leg in legs if leg is not dead]
    supplies = sum(leg.supplies for leg in rest)
    for leg in rest:
        leg.load += dead.load * leg.supplies / supplies
    return rest
