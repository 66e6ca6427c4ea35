"""Who watches the ways back: what is armed and when it acts, what is left of it, and who should have come back.

A way that does not work, or that broke its word in this outage, is expected to bring nobody back; of those that are
left the weakest promise counts.
"""

import math
from collections.abc import Callable

from powerguard.core import account
from powerguard.core import ways as core
from powerguard.core.actions import ArmWay, Way
from powerguard.core.model import Shutdown, State
from powerguard.core.policy import Policy
from powerguard.sim.looped.hardware import Hardware
from powerguard.sim.looped.mischief import Manner, Mischief
from powerguard.sim.world.host import Power
from powerguard.sim.world.world import World

_NEWS_S = 4.0
_GUARD_S = 30.0
_HAIR_S = 1.0
_ORDER_S = 5.5
"""An order to cut goes out at the commit; should utility come back sooner, a UPS may refuse it."""
_FLAPS = 3.0
"""Utility that comes and goes must be stable so many times as long."""


class WayWitness:
    """Watches over all lives and boots. broke: takes the name of an invariant, and what was seen."""

    def __init__(self, world: World, mischief: Mischief, hardware: Hardware, broke: Callable[[str, str], None]) -> None:
        """Nothing seen yet."""
        self.rebooted = 0
        self._world, self._mischief, self._hardware, self._broke = world, mischief, hardware, broke
        self._policy: Policy | None = None
        self._boot = self._outage = ""
        self._offset_s = 0.0
        self._sent: set[tuple[str, str]] = set()
        self._dirty = len(world.host.dirty_at_s)
        self._losses = world.back.losses
        self._losses_off = 0
        self._latched_s: float | None = None
        self._heard_foreign = self._late_due = self._died_armed = False

    # --- What the daemon does ---------------------------------------------------------------------------------------

    def began(self, policy: Policy, *, boot: str, offset_s: float) -> None:
        """A life begins."""
        if boot != self._boot:
            self._latched_s, self._heard_foreign, self._late_due, self._died_armed = None, False, False, False
        self._policy, self._boot, self._offset_s = policy, boot, offset_s

    def changed(self, what: str) -> None:
        """Something is armed or set that was not."""
        if self._policy is not None and not self._policy.powers_off:
            self._broke("armed_in_dry_run", f"{what} was changed")

    def told_to_send(self, action: ArmWay) -> None:
        """The effector has been told to cut an output in this outage."""
        self._outage = action.outage

    def sent(self, in_s: float) -> None:
        """The order that cuts an output goes out to the UPS: once in an outage of a boot, whoever is killed when."""
        self.changed("the UPS's output")
        self._hardware.sent += 1
        key = (self._boot, self._outage)
        if key in self._sent:
            self._broke("output_sent_twice", f"{self._outage}: off in {in_s:.0f} s")
        self._sent.add(key)

    def unsent(self) -> None:
        """The UPS has refused it."""
        self._hardware.sent -= 1
        self._sent.discard((self._boot, self._outage))

    def powers_off(self, force_after_s: float) -> None:
        """The host is told to go off."""
        now_s, cut_s = self._world.now_s, self._hardware.cut_at_s
        soonest_s = now_s + force_after_s + _GUARD_S - _HAIR_S
        if cut_s < soonest_s and not self._is_hindered("host", "bmc", "disks"):
            self._broke("cut_too_early", f"cut at {cut_s:.1f} s, forced off at {now_s + force_after_s:.1f} s")

    def reboots(self) -> None:
        """Its power-off is to end in a reboot."""
        self.rebooted += 1
        self._late_due = False
        order, now_s = self._world.scene.order, self._world.now_s
        unheard = order is not None and (not self._was_told() or now_s - order.at_s < _NEWS_S)
        if self._world.is_counting and not unheard:
            self._broke("reboot_races_cut", "the UPS counts down, and the host is to come up again")

    def turn(self, state: State) -> None:
        """Look at the daemon between two turns of its loop."""
        phase = state.phase
        if isinstance(phase, Shutdown) and self._latched_s is None:
            self._latched_s = phase.latched_s - self._offset_s

    def died(self, state: State, *, killed: bool) -> None:
        """The process is dead. Whoever was killed while the host goes down is not started again in this boot."""
        unanswered = any(each.order is not None for each in state.armed)
        self._died_armed |= killed and unanswered and self._world.host.power is Power.STOPPING

    def told_to_end(self, state: State, *, foreign: bool) -> None:
        """The daemon gets its SIGTERM, and the host goes down."""
        self._heard_foreign |= foreign
        world, facts, phase = self._world, self._world.scene.returns, state.phase
        policy = self._policy
        is_ours = isinstance(phase, Shutdown) and phase.ordered and world.host.power is Power.STOPPING
        if policy is None or not is_ours or foreign or not policy.late_reboot or self._spoiled("reboot"):
            return
        factor = 1.0 if len(world.scene.cuts) == 1 else _FLAPS
        since_s = self._utility_s()
        stable = since_s is not None and since_s > factor * policy.utility_stable_s + _NEWS_S and self._was_told()
        cuts = world.scene.order is not None or (self._hardware.sent and facts.told != "aborts")
        output = self._spoiled("output") or (facts.output and facts.told != "aborts")
        hung = self._mischief.hung or self._mischief.full or self._mischief.kills
        self._late_due = stable and not cuts and not output and not hung

    # --- What happens -----------------------------------------------------------------------------------------------

    def passed(self) -> None:
        """Time has passed."""
        world, hardware = self._world, self._hardware
        dirty, losses = len(world.host.dirty_at_s), world.back.losses
        if dirty > self._dirty:
            if losses == self._losses:
                if not self._spoiled("watchdog"):
                    self._broke("reset_while_up", "the BMC's watchdog has reset a host that was up")
            elif world.now_s >= hardware.cut_at_s - _HAIR_S and not world.pack.dead and not self._is_hindered("host"):
                self._broke("cut_under_host", "the output was cut by our order, and the host was up")
        self._dirty, self._losses = dirty, losses
        if not world.is_counting:
            hardware.cut_at_s = math.inf

    def off(self) -> None:
        """The host is off, or dark."""
        world, hardware = self._world, self._hardware
        self._losses_off = world.back.losses
        if hardware.is_ours(world) and not self._is_hindered("output", "rtc", "watchdog"):
            soonest_s = min(world.back.rtc_s, world.back.watchdog_s)
            if soonest_s < hardware.cut_at_s:
                self._broke("woken_into_cut", f"woken at {soonest_s:.1f} s, cut at {hardware.cut_at_s:.1f} s")

    def stranded(self) -> None:
        """A person must press the button: was there nothing that should have?"""
        is_armed = self._policy is not None and self._policy.powers_off
        is_told = is_armed and (self._latched_s is not None or self._heard_foreign)
        if self._world.host.power is not Power.OFF or not is_told or self._died_armed:
            return
        if not self._world.output and self._world.scene.returns.told == "unknown":
            return  # It was told that nobody knows, and it keeps its output off: no way switches on without AC.
        expected = self._expected()
        if expected:
            self._broke("stranded", f"the host stays off, and there is {', '.join(expected)}")

    def _expected(self) -> list[str]:
        world, facts = self._world, self._world.scene.returns
        dropped = world.back.losses > self._losses_off
        well = {
            Way.SENTINEL: facts.sentinel and facts.sentinel_works,
            Way.RTC: facts.rtc and facts.rtc_works and not dropped,
            Way.WATCHDOG: facts.watchdog and facts.watchdog_works and not dropped and self._counts_that_far(),
            Way.OUTPUT: facts.output == "cycles" and not dropped and self._was_cut_possible(),
        }
        expected = [str(way) for way, is_well in well.items() if is_well and not self._spoiled(way.value)]
        if dropped and not facts.lies and not world.scene.bmc_refuses and not self._spoiled("bmc"):
            expected.append("the BMC's policy")
        if self._late_due and not dropped:
            expected.append("the late reboot")
        return expected

    def _counts_that_far(self) -> bool:
        """Say whether no battery of this host lasts longer than a watchdog counts."""
        if self._policy is None or not self._policy.runtime_table:
            return False
        load, seconds = self._policy.runtime_table[0]
        return seconds * (load + account.OWN_LOAD) / account.OWN_LOAD + core.WATCHDOG_AFTER_S < core.MOST_WATCHDOG_S

    def _was_cut_possible(self) -> bool:
        """Say whether the UPS could be told: there was a commit of ours, on battery, and nobody else's countdown.

        Of a UPS that shows none, a daemon that was killed cannot know whether it was told, and does not tell it twice.
        """
        scene, latched_s = self._world.scene, self._latched_s
        if not scene.returns.shows and self._mischief.kills:
            return False
        if latched_s is None or self._heard_foreign or scene.order is not None or scene.returns.told == "stays_off":
            return False
        return any(cut.begin_s <= latched_s and latched_s + _ORDER_S < cut.end_s for cut in scene.cuts)

    # --- How it ends ------------------------------------------------------------------------------------------------

    def ended(self, state: State | None) -> None:
        """Everything is over. state: as the journal has it."""
        world, hardware = self._world, self._hardware
        left = [str(way) for way in world.back.armed if not self._lied(way.value)]
        if left:
            self._broke("left_armed", f"training runs, and armed is still {', '.join(left)}")
        if state is not None and state.armed:
            self._broke("armed_remembered", f"{', '.join(str(each.way) for each in state.armed)}")
        if hardware.policy != hardware.found and world.scene.returns.bracket and not self._spoiled("bmc"):
            self._broke("policy_left", f"the BMC's policy was {hardware.found}, and is {hardware.policy}")

    # --- The truth --------------------------------------------------------------------------------------------------

    def _spoiled(self, *words: str) -> bool:
        return any(name in words for name, _ in self._mischief.manners)

    def _lied(self, word: str) -> bool:
        return any(name == word and Manner.LIE in manners for name, manners in self._mischief.manners)

    def _is_hindered(self, *words: str) -> bool:
        """Somebody who counts here misbehaves, or the daemon was away."""
        return self._spoiled(*words) or bool(self._mischief.kills)

    def _utility_s(self) -> float | None:
        now_s, since_s = self._world.now_s, math.inf
        for cut in self._world.scene.cuts:
            if cut.begin_s <= now_s < cut.end_s:
                return None
            if cut.end_s <= now_s:
                since_s = now_s - cut.end_s
        return since_s

    def _was_told(self) -> bool:
        now_s = self._world.now_s
        return all(end_s < now_s - 2 * _GUARD_S or begin_s > now_s for begin_s, end_s in self._world.scene.silences)
