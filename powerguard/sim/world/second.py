"""A second source of the same UPS: another daemon's word of it, late, frozen, stuck, silent or forged.

It sees what the UPS says and tells it `lag_s` later, at every look, as upsd does with what its driver read last. From
`at_s` on it may be worse than late.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from powerguard.core.frozen import replace
from powerguard.core.readings import OutputSource, Reading, SourceFailed
from powerguard.sim.world.site import FaultSite
from powerguard.sim.world.streams import stream, uniform

NAME = "second"
_MISSES_S = 3.0
_FORGED_RUNTIME_S = 12.0


class Ill(StrEnum):
    """What is wrong with it, from its moment on."""

    NOTHING = "nothing"
    FROZEN = "frozen"
    """It repeats its last answer: a hung driver."""
    STUCK_BATTERY = "stuck_battery"
    """It says battery, with the gauges of before: a flag that nobody clears."""
    STUCK_UTILITY = "stuck_utility"
    SILENT = "silent"
    FORGED = "forged"
    """Somebody answers in its place that everything is over; the first source cannot be forged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondFacts:
    """lag_s: it is late by so much. ill, at_s, lasts_s: what is wrong with it, since when, for how long.

    reordered: of each two readings it tells the newer one first.
    """

    lag_s: float
    ill: Ill = Ill.NOTHING
    at_s: float = 0.0
    lasts_s: float = 0.0
    reordered: bool = False

    def hides_the_dark(self, at_s: float) -> bool:
        """Say whether it tells of utility that is not there: to whoever hears nothing else, that is the truth."""
        return self.ill in (Ill.STUCK_UTILITY, Ill.FROZEN) and 0.0 <= at_s - self.at_s < self.lasts_s


def draw_second(seed: int, faults: FaultSite) -> SecondFacts | None:
    """Draw whether there is one, and how it is."""
    chance = stream(seed, "second source")
    there, is_ill = chance.random(), chance.random()
    lag_s, ill = uniform(chance, faults.second_lag_s), chance.choice([each for each in Ill if each is not Ill.NOTHING])
    at_s, lasts_s = chance.uniform(-10.0, 400.0), uniform(chance, faults.second_ill_s)
    if there >= faults.second_share:
        return None
    reordered = stream(seed, "second order").random() < faults.second_reordered_share
    if is_ill >= faults.second_ill_share:
        return SecondFacts(lag_s=lag_s, reordered=reordered)
    return SecondFacts(lag_s=lag_s, ill=ill, at_s=at_s, lasts_s=lasts_s, reordered=reordered)


class Second:
    """It at work, for one boot of the host."""

    def __init__(self, facts: SecondFacts) -> None:
        """Nothing seen yet."""
        self._facts = facts
        self._seen: deque[Reading] = deque()
        self._newest: Reading | None = None
        self._kept: Reading | None = None
        self._turn = 0

    def tell(self, reading: Reading, now_s: float) -> Reading | SourceFailed | None:
        """Return what this source makes of what the UPS says now. None: it has nothing to tell now.

        reading: the UPS's answer, in the daemon's clock. now_s: the world's time.
        """
        told = self._tell(reading, now_s)
        if not self._facts.reordered or not isinstance(told, Reading):
            return told
        # Kept, told, then the kept one after it: of three looks one is told in vain.
        self._turn = (self._turn + 1) % 3
        if self._turn == 1:
            self._kept = told
            return None
        return told if self._turn == 2 else self._kept

    def _tell(self, reading: Reading, now_s: float) -> Reading | SourceFailed | None:
        facts = self._facts
        is_ill = facts.ill is not Ill.NOTHING and 0.0 <= now_s - facts.at_s < facts.lasts_s
        self._seen.append(reading)
        if is_ill and facts.ill is Ill.SILENT:
            lost = now_s - facts.at_s >= _MISSES_S
            return SourceFailed(at_s=reading.at_s, ups=reading.ups, source=NAME, reason="no answer", lost=lost)
        if not is_ill or facts.ill is Ill.FORGED:
            while self._seen and self._seen[0].at_s <= reading.at_s - facts.lag_s:
                self._newest = self._seen.popleft()
        told = self._newest
        if told is None:
            return None
        told = replace(told, at_s=reading.at_s, source=NAME, authenticated=False)
        match facts.ill if is_ill else Ill.NOTHING:
            case Ill.STUCK_BATTERY:
                return replace(told, output_source=OutputSource.BATTERY, on_battery_s=None, input_present=None)
            case Ill.STUCK_UTILITY:
                return replace(told, output_source=OutputSource.UTILITY, on_battery_s=None, input_present=None)
            case Ill.FORGED:
                return replace(
                    told,
                    output_source=OutputSource.BATTERY,
                    on_battery_s=now_s - facts.at_s,
                    runtime_s=_FORGED_RUNTIME_S,
                    charge_pct=3.0,
                    low_battery=True,
                )
            case _:
                return told
