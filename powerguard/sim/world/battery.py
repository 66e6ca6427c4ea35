"""A battery, and the UPS's gauge of it: two different things.

`Pack` is the truth: at load x a new, full battery lasts tau(x) seconds, so dt seconds cost dt / tau(x) of it.
`Gauge` is what a UPS makes of it: it over-reports what an aged battery holds, or counts against the nameplate until
it falls off a cliff; it lags, rounds to minutes, glitches and leaves things out.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import NamedTuple

_LEAST_LOAD = 0.01
_NOTHING = 1e-9
_GLITCHES = ("zero", "tenth", "tenfold", "silent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Runtime of a new, full battery by load.

    points: (load share of the rating, seconds), ascending. loss: what the UPS itself draws, as a share of the rating;
    it bounds the runtime at loads below the first point. Above the last one the last slope goes on.
    """

    points: tuple[tuple[float, float], ...]
    loss: float = 0.04
    _known: dict[float, float] = field(default_factory=dict, repr=False, compare=False)

    def tau_s(self, load: float) -> float:
        """Seconds at `load`, a share of the rating; straight lines in logs (Peukert) between the points."""
        known = self._known.get(load)
        if known is None:
            known = self._known[load] = self._tau_s(max(load, _LEAST_LOAD))
        return known

    def _tau_s(self, x: float) -> float:
        low_x, low_s = self.points[0]
        if x <= low_x:
            return low_s * (low_x + self.loss) / (x + self.loss)
        if len(self.points) == 1:
            return low_s * low_x / x
        at = 1
        while at < len(self.points) - 1 and x > self.points[at][0]:
            at += 1
        (x0, s0), (x1, s1) = self.points[at - 1], self.points[at]
        slope = math.log(s1 / s0) / math.log(x1 / x0)
        return float(s1 * (x / x1) ** slope)


@dataclass(slots=True, kw_only=True)
class Pack:
    """The battery itself. Energy in shares of a new, full one.

    health: what it holds when full. left: what is in it now. dies_at: a bad cell ends it when so much is left; 0: none.
    recharge_s: from empty to full.
    """

    curve: Curve
    health: float
    left: float
    dies_at: float = 0.0
    recharge_s: float = 8 * 3600.0

    @property
    def dead(self) -> bool:
        """It gives nothing more."""
        return self.left <= self.dies_at

    def lasts_s(self, load: float) -> float:
        """Seconds until it is dead, at this load."""
        return max(0.0, self.left - self.dies_at) * self.curve.tau_s(load)

    def drain(self, seconds: float, load: float) -> None:
        """Give power. Dead means empty: what a bad cell keeps is of no use."""
        self.left -= seconds / self.curve.tau_s(load)
        if self.left <= self.dies_at + _NOTHING:
            self.left = self.dies_at

    def charge(self, seconds: float) -> None:
        """Take power."""
        if self.left < self.health:
            self.left = min(self.health, self.left + self.health * seconds / self.recharge_s)


class GaugeKind(StrEnum):
    """How a gauge counts charge."""

    PROPORTIONAL = "proportional"
    """Against what the battery holds, and believes that to be what a new one holds."""
    COULOMB = "coulomb"
    """What was taken, against the nameplate: an aged battery ends while it still promises much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeFacts:
    """The kind of gauge that a UPS has.

    error: its runtime is this many times what its own sums should say. minutes: it reports whole minutes. lag_s: until
    the runtime follows a step of the load. knee: share of the battery that is left when its voltage falls.
    by_voltage: low battery is called at the knee, else when the reported runtime is below low_battery_s.
    silent: which figures it never reports ("runtime", "charge", "load"). noise: of the load, as a share of the rating,
    second by second, over and over. glitch_rate: share of readings that hold nonsense.
    """

    kind: GaugeKind = GaugeKind.PROPORTIONAL
    error: float = 1.0
    minutes: bool = False
    lag_s: float = 15.0
    knee: float = 0.05
    by_voltage: bool = False
    low_battery_s: float = 120.0
    silent: frozenset[str] = frozenset()
    noise: tuple[float, ...] = (0.0,)
    glitch_rate: float = 0.0


class GaugeReading(NamedTuple):
    """The gauge's values at one moment: seconds, percent, percent; None: it says nothing of it."""

    runtime_s: float | None
    charge_pct: float | None
    load_pct: float | None
    low_battery: bool


class Gauge:
    """A gauge at work. Its noise and its glitches lie in the world's time, whichever reader asks, and however often."""

    def __init__(self, facts: GaugeFacts, glitches: Random) -> None:
        """glitches: their stream."""
        self.facts = facts
        self._is_proportional = facts.kind is GaugeKind.PROPORTIONAL
        self._glitches = glitches
        self._glitch_at_s = math.inf
        self._glitch = ""
        self._load: float | None = None
        self._at_s = 0.0
        self._known = -1.0, 0.0
        """A load, and the runtime of a full battery at it: both stay as they are for minutes."""
        if facts.glitch_rate:
            self._glitch_at_s = 0.0
            self._next_glitch()

    def read(self, at_s: float, pack: Pack, load: float, *, on_battery: bool) -> GaugeReading:
        """Say how it looks at at_s, which never runs backwards. load: what is drawn, a share of the rating."""
        facts = self.facts
        seen = self._seen(at_s, load)
        charge = self._charge(pack)
        drawn = load + facts.noise[int(at_s) % len(facts.noise)]
        if seen != self._known[0]:
            self._known = seen, pack.curve.tau_s(round(seen, 3))
        runtime_s = charge * self._known[1] * facts.error
        load_pct: float | None = round(100.0 * drawn, 1) if drawn > 0.0 else 0.0
        if facts.minutes:
            runtime_s = 60.0 * math.floor(runtime_s / 60.0)
        low = on_battery and (
            pack.left <= facts.knee * pack.health if facts.by_voltage else runtime_s < facts.low_battery_s
        )
        reported_s: float | None = runtime_s
        charge_pct: float | None = round(100.0 * charge, 1)
        while at_s >= self._glitch_at_s:
            hit = at_s < self._glitch_at_s + 1.0
            if hit and self._glitch == "silent":
                reported_s = charge_pct = load_pct = None
            elif hit:
                reported_s = runtime_s * {"zero": 0.0, "tenth": 0.1, "tenfold": 10.0}[self._glitch]
            if hit:
                break
            self._next_glitch()
        if facts.silent:
            reported_s = None if "runtime" in facts.silent else reported_s
            charge_pct = None if "charge" in facts.silent else charge_pct
            load_pct = None if "load" in facts.silent else load_pct
        return GaugeReading(reported_s, charge_pct, load_pct, low)

    def _seen(self, at_s: float, load: float) -> float:
        """The load that the runtime is computed for: it follows the true one late."""
        if self._load is None:
            self._load = load
        elif self._load != load:
            share = 1.0 - math.exp(-3.0 * (at_s - self._at_s) / max(self.facts.lag_s, 0.1))
            self._load += share * (load - self._load)
            if abs(self._load - load) < 0.005:
                self._load = load
        self._at_s = at_s
        return self._load

    def _charge(self, pack: Pack) -> float:
        """Charge as a share, as this gauge counts it."""
        if self._is_proportional:
            return pack.left / pack.health
        counted = 1.0 - (pack.health - pack.left)
        # At the knee the voltage shows it the truth, too late: the cliff.
        return min(counted, pack.left) if pack.left <= 0.5 * self.facts.knee * pack.health else counted

    def _next_glitch(self) -> None:
        self._glitch_at_s += 1.0 + self._glitches.expovariate(self.facts.glitch_rate)
        self._glitch = self._glitches.choice(_GLITCHES)
