"""What people use today: a script, upsmon and apcupsd as they come. None of them knows what a trainer is.

Their rules are the defaults of upsmon.conf (wait for low battery) and of apcupsd.conf (BATTERYLEVEL, MINUTES,
ONBATTERYDELAY).
"""

import math

from powerguard.core.actions import Conduct
from powerguard.sim.world.battery import Told
from powerguard.sim.world.world import World

_ALERT_S = 5.0
_FIXED_S = 50.0
_NUT_HALT_S = 10.0
_APC_BATTERY_PCT = 5.0
_APC_RUNTIME_S = 180.0
_APC_ON_BATTERY_S = 6.0
_KILLPOWER_S = 20.0
_NO_FORCE_S = 1e9
"""Nothing cuts their stop short: systemd's own limits are in how long a stuck stop takes."""


class Plain:
    """A policy of one rule, which reads the UPS every few seconds. Training starts by itself after a boot."""

    waits = False
    settled = True
    kills_power = True
    every_s = _ALERT_S

    def __init__(self, world: World) -> None:
        self.world = world
        self.next_s = world.now_s
        self._since_s: float | None = None
        self._halting = False

    def boot(self, *, was_off_s: float | None) -> None:
        """Start afresh: they keep nothing over a boot."""
        del was_off_s
        self._since_s, self._halting = None, False
        self.next_s = self.world.now_s

    def look(self) -> None:
        """Read the UPS, and apply the rule."""
        world = self.world
        self.next_s = world.now_s + self.every_s
        if world.utility:
            self._since_s = None
            # Nothing to be seen until utility goes: on to the first look after that.
            looks = max(0, math.floor(min(world.next_edge_s - world.now_s, 300.0) / self.every_s))
            self.next_s += looks * self.every_s
            return
        if self._halting or not world.answers():
            return
        told = world.told()
        if self._since_s is None:
            self._since_s = world.now_s
        wait_s = self.rule(told)
        if wait_s is not None:
            self._halting = True
            if world.live(world.now_s + wait_s):
                world.power_off(_NO_FORCE_S)

    def rule(self, told: Told) -> float | None:
        """Return after how many seconds the host is to be stopped, or None. This one never stops it.

        told: by the gauge, on battery.
        """
        del told
        return None

    def gone(self) -> None:
        """Off: a killpower at the end of the stop has the UPS cycle its output, whether utility is back or not."""
        if self.kills_power and self.world.output:
            self.world.cycle(_KILLPOWER_S)
        self.next_s = math.inf

    def end(self) -> None:
        """Nothing to object."""

    @property
    def _on_battery_s(self) -> float:
        return -1.0 if self._since_s is None else self.world.now_s - self._since_s


class Fixed(Plain):
    """A script: on battery, trigger a checkpoint, sleep 50, halt. The UPS is never told to cycle."""

    kills_power = False

    def rule(self, told: Told) -> float | None:
        """Fire at the first look on battery; nothing calls it back."""
        del told
        self.world.host.checkpoint(self.world.now_s, Conduct.CONTINUE)
        return _FIXED_S


class Nut(Plain):
    """upsmon as it comes: wait for low battery, then FSD, FINALDELAY and SHUTDOWNCMD; no checkpoint."""

    def rule(self, told: Told) -> float | None:
        """Low battery on battery, or FSD set by another."""
        return _NUT_HALT_S if told.low_battery or self.world.is_ordered_down else None


class Apcupsd(Plain):
    """apcupsd as it comes: BATTERYLEVEL 5, MINUTES 3, ONBATTERYDELAY 6, or the UPS's own low battery."""

    every_s = 2.0

    def rule(self, told: Told) -> float | None:
        """Whichever limit is reached first."""
        if self._on_battery_s < _APC_ON_BATTERY_S:
            return None
        low = told.low_battery
        low = low or (told.charge_pct is not None and told.charge_pct <= _APC_BATTERY_PCT)
        low = low or (told.runtime_s is not None and told.runtime_s <= _APC_RUNTIME_S)
        return 0.0 if low else None
