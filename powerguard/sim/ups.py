"""A UPS with a battery that really empties: the load makes it empty faster, pausing the load makes it last.

The physics is one line: at load x a full battery lasts tau(x) seconds, so in dt seconds it gives dt / tau(x) of itself.
What the card *says* of it is another matter, and may lag or lie.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Final

from powerguard.clock import Clock
from powerguard.sim.snmp_values import SimValue, gauge, integer, octets, oid, timeticks

APC: Final = "1.3.6.1.4.1.318.1.1.1"
_SYSTEM = "1.3.6.1.2.1.1"
_ON_BATTERY_FLAG, _LOW_FLAG = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UpsBattery:
    """A battery: runtime by load, when it is new and full.

    runtime: (load share of the rating, seconds), ascending. health: share of that energy which it still holds.
    recharge_s: from empty to full, on utility.
    """

    runtime: tuple[tuple[float, float], ...]
    health: float = 1.0
    recharge_s: float = 8 * 3600.0

    def tau_s(self, load: float) -> float:
        """Seconds that a new, full one lasts at `load`; straight lines in logs, and on beyond both ends."""
        x = max(load, 0.02)
        if len(self.runtime) == 1:
            return self.runtime[0][1] * self.runtime[0][0] / x
        at = min(max(bisect_right(self.runtime, (x, 0.0)), 1), len(self.runtime) - 1)
        (x0, s0), (x1, s1) = self.runtime[at - 1], self.runtime[at]
        share = (log(x) - log(x0)) / (log(x1) - log(x0))
        return exp(log(s0) + share * (log(s1) - log(s0)))


class SimUps:
    """One UPS, brought up to date whenever it is read.

    load: the share of the rating that is drawn now. gauge: by how much the reported runtime exaggerates. utility: is
    there power at the input; set it to pull the plug. alive: False once the battery was empty.
    """

    def __init__(
        self,
        battery: UpsBattery,
        *,
        clock: Clock,
        load: Callable[[], float],
        low_battery_s: float = 120.0,
        gauge: float = 1.0,
        rating_w: float = 5400.0,
    ) -> None:
        self.battery = battery
        self.alive = True
        self.flipped_at_s: float | None = None
        self._clock = clock
        self._load = load
        self._low_battery_s = low_battery_s
        self._gauge = gauge
        self._rating_w = rating_w
        self._left = battery.health
        self._utility = True
        self._at_s = clock()

    @property
    def utility(self) -> bool:
        """Is there power at the input?"""
        return self._utility

    @utility.setter
    def utility(self, present: bool) -> None:
        self.look()
        if present != self._utility:
            self._utility = present
            self.flipped_at_s = self._clock()
            self.look()

    @property
    def left_s(self) -> float:
        """Seconds that the battery really lasts at the load of now."""
        self.look()
        return self._left * self.battery.tau_s(self.load)

    @property
    def charge(self) -> float:
        """Share of what this battery can hold."""
        self.look()
        return self._left / self.battery.health

    @property
    def load(self) -> float:
        """Share of the rating that is drawn now."""
        return self._load()

    @property
    def on_battery_s(self) -> float:
        """Seconds since the input was lost; 0 on utility."""
        return 0.0 if self._utility or self.flipped_at_s is None else self._clock() - self.flipped_at_s

    @property
    def low_battery(self) -> bool:
        """What the UPS calls low: the runtime that it reports is below its setting."""
        return not self._utility and self.runtime_s < self._low_battery_s

    @property
    def runtime_s(self) -> float:
        """What the UPS reports, which is not what is left."""
        return self.left_s * self._gauge

    def look(self) -> None:
        """Let physics catch up."""
        self._look(self._clock())

    def _look(self, now_s: float) -> None:
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        if self._utility:
            gained = elapsed_s / self.battery.recharge_s * self.battery.health
            self._left = min(self.battery.health, self._left + gained)
            return
        self._left = max(0.0, self._left - elapsed_s / self.battery.tau_s(self.load))
        if self._left == 0.0:
            self.alive = False

    def apc_table(self) -> Mapping[str, SimValue]:
        """Return what an APC network card would answer: PowerNet-MIB, and the system group."""
        self.look()
        on_battery = not self._utility
        flags = ["0"] * 64
        flags[5] = "1"  # flag 6: the card reaches its UPS
        if on_battery:
            flags[_ON_BATTERY_FLAG - 1] = "1"
        if self.low_battery:
            flags[_LOW_FLAG - 1] = "1"
        return {
            f"{_SYSTEM}.1.0": octets("APC Web/SNMP Management Card (simulated by powerguard)"),
            f"{_SYSTEM}.2.0": oid("1.3.6.1.4.1.318.1.3.27"),
            f"{_SYSTEM}.3.0": timeticks(int(self._clock() * 100) % 2**32),
            f"{_SYSTEM}.5.0": octets("sim-ups"),
            f"{APC}.1.1.1.0": octets("Simulated Smart-UPS"),
            f"{APC}.2.1.1.0": integer(3 if self.low_battery else 2),
            f"{APC}.2.1.2.0": timeticks(int(self.on_battery_s * 100)),
            f"{APC}.2.2.1.0": gauge(round(100 * self.charge)),
            f"{APC}.2.2.2.0": gauge(26),
            f"{APC}.2.2.3.0": timeticks(int(self.runtime_s * 100)),
            f"{APC}.2.2.4.0": integer(1),
            f"{APC}.2.3.1.0": gauge(round(1000 * self.charge)),
            f"{APC}.3.2.1.0": gauge(0 if on_battery else 230),
            f"{APC}.4.1.1.0": integer(3 if on_battery else 2),
            f"{APC}.4.2.3.0": gauge(round(100 * self.load)),
            f"{APC}.4.2.8.0": integer(round(self._rating_w * self.load)),
            f"{APC}.4.3.3.0": gauge(round(1000 * self.load)),
            f"{APC}.8.1.0": integer(1),
            f"{APC}.11.1.1.0": octets("".join(flags)),
        }
