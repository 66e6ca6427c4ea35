"""One host behind one UPS in one outage: what is true, second by second, and what the UPS says of it.

Times are seconds since utility failed first. `advance` plays physics up to a moment; between two changes everything is
constant, so it is exact however long the step. Nothing here decides anything.
"""

import math
from dataclasses import replace

from powerguard.core.model.actions import PowerOnMethod
from powerguard.core.model.events import OutputSource, Reading
from powerguard.sim.world.back import ArmedMethods, PowerState, Waker
from powerguard.sim.world.battery import GaugeReading
from powerguard.sim.world.chance import SourceFault
from powerguard.sim.world.host import STOPPING, UP, Host, HostAnswer, Power
from powerguard.sim.world.scene import Scene
from powerguard.sim.world.site import Site

UPS = "sim"
SOURCE = "sim"
_BATTERY, _UTILITY = OutputSource.BATTERY, OutputSource.UTILITY


class World:
    """The truth of one scene, from before the cut until the host trains again.

    host, pack: as in their modules. utility: power at the UPS's input. output: power at its output.
    """

    def __init__(self, scene: Scene, site: Site, *, began_s: float) -> None:
        """Begin at began_s (before 0) in training, on utility."""
        self.scene, self.site = scene, site
        self.now_s = began_s
        self.host = Host(scene, site, began_s)
        self.pack = scene.pack(site)
        self.gauge = scene.new_gauge()
        self.utility = self.output = True
        self.always_on = scene.always_on and not scene.returns.lies
        self.foreign = False
        """Another program is stopping the host."""
        self.back = ArmedMethods(scene.returns)
        # Never at once: an observer must see that it was off.
        self._restart_s = max(site.ups.restart_s, 0.01)
        self.ordered_off = (-math.inf, 0.0)
        """When the host was last ordered off, and what was left in the battery then."""
        self._edges = [edge for cut in scene.cuts for edge in ((cut.begin_s, False), (cut.end_s, True))]
        self._edge = 0
        self._off_at_s = math.inf
        self._on_at_s = math.inf
        self._fsd_since_s = math.inf
        self._ordered = scene.order is None
        self._off_since_s = -math.inf
        self._utility_since_s: float | None = began_s
        self._cuts_for_us = False
        """The countdown that runs was ordered by this host."""
        self._went_for_us = False
        """The output has gone by such an order."""
        self.waited_s = 0.0
        """Off with utility there, until something switched the host on by itself."""
        self._planned, self._next_s = -1, began_s
        self._began_battery_s: float | None = None
        self._blank = Reading(
            at_s=0.0,
            ups=UPS,
            source=SOURCE,
            output_source=OutputSource.UNKNOWN,
            authenticated=scene.second is not None and scene.second.ill is SourceFault.FORGED,
        )

    @property
    def next_edge_s(self) -> float:
        """When utility next comes or goes; inf: never again."""
        return self._edges[self._edge][0] if self._edge < len(self._edges) else math.inf

    @property
    def load(self) -> float:
        """Share of the rating that is drawn from the UPS."""
        return self.host.load if self.output else 0.0

    @property
    def lost_at_s(self) -> float:
        """When the output dies if nothing changes: an empty battery, or a countdown."""
        if not self.output:
            return math.inf
        empty_s = math.inf if self.utility else self.now_s + self.pack.lasts_s(self.load)
        return min(empty_s, self._off_at_s)

    @property
    def stranded(self) -> bool:
        """The host is off with power at its supply, which was never interrupted: no BMC has noticed, and none will."""
        if self.is_on or not self.utility:
            return False
        if not self.output:
            return self._on_at_s == math.inf
        return self._off_at_s == math.inf and self._back_s == math.inf

    @property
    def next_event_s(self) -> float:
        """When something next happens by itself; inf: never."""
        return min(
            self.next_edge_s, self.host.next_change_s, self.lost_at_s, self._on_at_s, self.next_order_s, self._back_s
        )

    @property
    def due_s(self) -> float:
        """The same, from memory while nothing has changed it."""
        if self._planned != self.host.version:
            self._planned, self._next_s = self.host.version, self.next_event_s
        return self._next_s

    @property
    def _back_s(self) -> float:
        """When the next power-on method acts; inf: none does."""
        return math.inf if self.back.idle else self.back.next_s(**self._standing)

    @property
    def _standing(self) -> PowerState:
        off_at_s = self.host.off_at_s
        return {
            "is_on": self.is_on,
            "utility_since_s": self._utility_since_s if self.output else None,
            "off_since_s": self._off_since_s if off_at_s is None else off_at_s,
        }

    def live(self, to_s: float) -> bool:
        """Play physics up to to_s, or until the host is off or dark; return whether it still runs."""
        if self.is_on:
            self._play(to_s, stops=True)
        return self.is_on

    @property
    def is_on(self) -> bool:
        """The host runs, or is still stopping."""
        return self.host.power is UP or self.host.power is STOPPING

    def advance(self, to_s: float) -> None:
        """Play physics up to to_s, whatever happens to the host."""
        self._play(to_s, stops=False)

    def _play(self, to_s: float, *, stops: bool) -> None:
        host = self.host
        while self.now_s < to_s:
            due_s = self.due_s
            next_s = max(self.now_s, due_s) if due_s < to_s else to_s
            elapsed_s = next_s - self.now_s
            if self.utility:
                self.pack.charge(elapsed_s)
            elif self.output:
                self.pack.drain(elapsed_s, host.load)
            self.now_s = next_s
            host.advance(next_s)
            if host.reboots and host.power is Power.OFF:
                host.reboots, self._planned = False, -1
                self.back.reboot(next_s)
            if next_s >= self._next_s:
                self._happen()
                self._planned = -1
                if stops and not self.is_on:
                    return

    def _happen(self) -> None:
        """Everything that is due at this moment."""
        now_s = self.now_s
        while now_s >= self.next_edge_s:
            self._turn(utility=self._edges[self._edge][1])
        if now_s >= self.next_order_s:
            self._obey()
        if self.output and (now_s >= self._off_at_s or (not self.utility and self.pack.dead)):
            self._lose_output()
        if not self.output and now_s >= self._on_at_s:
            self._output_back()
        if now_s >= self._back_s:
            waker = self.back.acts(now_s, powered=self.output, **self._standing)
            if waker is not None:
                self._power_on(waker)

    def _power_on(self, waker: Waker) -> None:
        """Something powers the host on without AC having dropped; one that is up is reset by it."""
        if self.is_on:
            self.host.lose_power(self.now_s)
            self.back.reboot(self.now_s, waker)
            return
        self._switch_on(waker)

    def _turn(self, *, utility: bool) -> None:
        self._edge += 1
        self.utility = utility
        self._began_battery_s = None if utility else self.now_s
        self._utility_since_s = self.now_s if utility else None
        if not utility:
            self._on_at_s = math.inf
        elif self._cuts_for_us and self.output and self.back.facts.output == "aborts":
            self._off_at_s, self._cuts_for_us = math.inf, False
        elif not self.output:
            self._on_at_s = max(self.now_s, self._off_since_s) + self._restart_s

    def _lose_output(self) -> None:
        self.output = False
        self._off_at_s = self._fsd_since_s = math.inf
        self._off_since_s = self.now_s
        self.host.lose_power(self.now_s)
        self.back.lose_power()
        stays = self._cuts_for_us and self.back.facts.output == "stays_off"
        self._went_for_us, self._cuts_for_us = self._cuts_for_us, False
        if self.utility and not stays:
            self._on_at_s = self.now_s + self._restart_s

    def _output_back(self) -> None:
        self.output = True
        self._on_at_s = math.inf
        self.gauge = self.scene.new_gauge()
        if self.always_on:
            self._switch_on(Waker.OUTPUT if self._went_for_us else Waker.POLICY)

    def _switch_on(self, waker: Waker) -> None:
        utility_s = self._utility_since_s
        if utility_s is not None and waker is not Waker.PERSON:
            self.waited_s += self.now_s - max(self.host.gone_at_s, utility_s)
        self.host.switch_on(self.now_s)
        self.back.boots(self.now_s, waker)

    # --- Others on this UPS ------------------------------------------------------------------------------------------

    @property
    def next_order_s(self) -> float:
        """When another program orders the output off; inf: never."""
        return math.inf if self._ordered or self.scene.order is None else self.scene.order.at_s

    def _obey(self) -> None:
        order = self.scene.order
        self._ordered = True
        # An output is ordered off because of the outage: not without one, and not when no host is left.
        if order is not None and not self.utility and self.output and self.host.power is Power.UP:
            self._off_at_s = self.now_s + order.delay_s
            if order.kind == "fsd":
                self._fsd_since_s = self.now_s

    def cycle(self, after_s: float) -> None:
        """Order the output off after after_s, and on again when utility is there: what killpower does."""
        self._off_at_s = min(self._off_at_s, self.now_s + after_s)
        self._planned = -1

    def arm(self, method: PowerOnMethod, in_s: float) -> HostAnswer:
        """Arm a power-on method, or order the output off."""
        self._planned = -1
        if method is not PowerOnMethod.OUTPUT:
            self.back.arm(method, self.now_s, in_s)
            return HostAnswer(after_s=0.3, detail=(("in_s", in_s),))
        if self.utility:
            return HostAnswer(after_s=0.3, failure="the UPS refuses it on utility")
        if self.back.facts.declared == "stays_off":
            return HostAnswer(after_s=0.3, failure="the profile says that this UPS would stay off")
        if self._off_at_s < math.inf:
            return HostAnswer(after_s=0.3, failure="a countdown stands that this host has not ordered")
        self._off_at_s, self._cuts_for_us = self.now_s + in_s, True
        return HostAnswer(after_s=0.5, detail=(("in_s", in_s), ("returns", self.back.facts.declared)))

    def disarm(self, method: PowerOnMethod) -> HostAnswer:
        """Disarm a power-on method."""
        self._planned = -1
        self.back.disarm(method)
        return HostAnswer(after_s=0.3)

    def power_off(self, force_after_s: float) -> HostAnswer:
        """Order the host off."""
        if self.host.power is Power.UP:
            self.ordered_off = (self.now_s, self.pack.left)
        return self.host.power_off(self.now_s, force_after_s)

    @property
    def is_counting(self) -> bool:
        """The UPS counts down to the end of its output."""
        return self._off_at_s < math.inf

    def press_button(self, waker: Waker = Waker.PERSON) -> None:
        """Switch on a stranded host by hand, and its UPS where that has stayed off."""
        self.output = True
        self._switch_on(waker)

    # --- What the UPS says -------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """Say whether the source gets an answer now."""
        silences = self.scene.silences
        return not silences or all(not begin_s <= self.now_s < end_s for begin_s, end_s in silences)

    def read_gauge(self) -> GaugeReading:
        """Return what its gauge says now."""
        return self.gauge.read(self.now_s, self.pack, self.load, on_battery=not self.utility)

    @property
    def is_ordered_down(self) -> bool:
        """Another host has set FSD, and the UPS's daemon reports it to all."""
        return self._fsd_since_s < math.inf

    def reading(self, offset_s: float = 0.0) -> Reading:
        """Return what the UPS answers now. offset_s: of the asking clock, seconds at the first cut."""
        on_battery = not self.utility
        gauge = self.read_gauge()
        silent = self.scene.gauge.silent
        since_s = self._began_battery_s
        countdown = self._off_at_s < math.inf and self._fsd_since_s == math.inf
        if countdown and self._cuts_for_us:
            countdown = self.back.facts.shows
        return replace(
            self._blank,
            at_s=self.now_s + offset_s,
            output_source=_BATTERY if on_battery else _UTILITY,
            runtime_s=gauge.runtime_s,
            charge_pct=gauge.charge_pct,
            load_pct=gauge.load_pct,
            on_battery_s=None if "on_battery_s" in silent else 0.0 if since_s is None else self.now_s - since_s,
            input_present=None if "input_present" in silent else self.utility,
            low_battery=gauge.low_battery,
            output_off_in_s=self._off_at_s - self.now_s if countdown else None,
            forced_shutdown=self.is_ordered_down,
        )
