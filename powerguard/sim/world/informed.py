"""The rule of powerguard, told the truth: it knows the battery, and what a pause brings, and acts at the very moment.

It keeps the margins of the rule, for it does not know the outage. No reading is made and no core is stepped: all its
moments are computed, so it costs next to nothing to play. It is one of those whom the oracle compares.
"""

import math

from powerguard.core.actions import Conduct
from powerguard.sim.world.world import World

_CAP_DWELL_S = 10.0
_RESUME_S = 10.0
_LIFT_S = 30.0
_STOP_S = 110.0
_RESERVE_S = 60.0
_MARGIN, _FLOOR, _SLACK = 0.2, 0.1, 0.75
_LOOK_S = 5.0


class Informed:
    """A `Decider` that needs no gauge. caps: it may slow training down on battery."""

    def __init__(self, world: World, *, caps: bool) -> None:
        self.world = world
        self.next_s = world.now_s
        self._caps = caps
        self._turned_s = -math.inf
        self._utility = True
        self._durable_s: float | None = None
        self._going = False
        tau_paused_s = world.pack.curve.tau_s(world.site.host.load * world.site.host.paused_load)
        need_s = world.scene.trainer.estimate_s + _STOP_S + _RESERVE_S
        self._pause_at = _energy_for(need_s / _SLACK / tau_paused_s)
        self._stop_at = _energy_for((_STOP_S + _RESERVE_S) / tau_paused_s)

    @property
    def waits(self) -> bool:
        """It starts training itself, once utility is stable."""
        return self._durable_s is None and not self._going

    @property
    def settled(self) -> bool:
        """Nothing is paused any more."""
        return self._durable_s is None

    def boot(self, *, was_off_s: float | None) -> None:
        """Start again."""
        del was_off_s
        self._durable_s, self._going = None, False
        self._utility = True
        self._turned_s = -math.inf
        self.next_s = self.world.now_s

    def look(self) -> None:
        """Do what is due, and compute when the next thing is."""
        world = self.world
        if world.utility is not self._utility:
            self._utility, self._turned_s = world.utility, world.now_s
        due_s = math.inf
        if not self._going:
            due_s = self._on_utility() if world.utility else self._on_battery()
        self.next_s = max(world.now_s + 0.05, min(due_s, world.next_edge_s, world.now_s + 600.0))

    def gone(self) -> None:
        """Off."""
        self.next_s = math.inf

    def end(self) -> None:
        """Nothing to object."""

    def _on_utility(self) -> float:
        """Go on in place once utility is stable; lift the cap later."""
        world, due_s = self.world, math.inf
        if self._durable_s is not None:
            due_s = max(self._turned_s + _RESUME_S, min(self._durable_s, self._turned_s + 60.0))
            if world.now_s >= due_s:
                world.host.resume(world.now_s)
                self._durable_s, due_s = None, world.now_s + 1.0
        if not world.host.training and self._durable_s is None:
            start_s = self._turned_s + _RESUME_S
            if world.now_s >= start_s:
                world.host.start_training(world.now_s)
                start_s = world.now_s + _LOOK_S
            due_s = min(due_s, start_s)
        if world.host.capped:
            lift_s = self._turned_s + _LIFT_S
            if world.now_s >= lift_s:
                world.host.cap(world.now_s, on=False)
                lift_s = world.now_s + 1.0
            due_s = min(due_s, lift_s)
        return min(due_s, world.now_s + _LOOK_S)

    def _on_battery(self) -> float:
        """Cap, then pause and checkpoint, then hold, then stop: each at its share of the battery."""
        world, now_s = self.world, self.world.now_s
        host, left = world.host, world.pack.left
        if left <= self._stop_at + 1e-9:
            self._going = True
            world.power_off(_STOP_S)
            return math.inf
        tau_s = world.pack.curve.tau_s(world.load)
        if not host.training or self._durable_s is not None:
            return now_s + min((left - self._stop_at) * tau_s, _LOOK_S)
        if left <= self._pause_at + 1e-9:
            answer = host.checkpoint(now_s, Conduct.PAUSE)
            self._durable_s = now_s + answer.after_s
            return now_s + 1.0
        pause_s = now_s + (left - self._pause_at) * tau_s
        if self._caps and not host.capped:
            cap_s = self._turned_s + _CAP_DWELL_S
            if now_s >= cap_s:
                host.cap(now_s, on=True)
                return now_s + 1.0
            pause_s = min(pause_s, cap_s)
        return pause_s


def capped(world: World) -> Informed:
    """Return one that caps."""
    return Informed(world, caps=True)


def uncapped(world: World) -> Informed:
    """Return one that does not."""
    return Informed(world, caps=False)


def _energy_for(needed: float) -> float:
    """The energy left at which what may be planned with is just `needed` (as the core's budget has it)."""
    return max(needed / (1.0 - _MARGIN), needed + _FLOOR)
