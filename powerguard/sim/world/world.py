"""One host behind one UPS in one outage: what is true, second by second, and what the UPS says of it.

Times are seconds since utility failed first. `advance` plays physics up to a moment; between two changes everything is
constant, so it is exact however long the step. Nothing here decides anything.
"""

import math

from powerguard.core.events import OutputSource, Reading
from powerguard.sim.world.host import Answer, Host, Power
from powerguard.sim.world.scene import Scene
from powerguard.sim.world.second import Ill
from powerguard.sim.world.site import Site

UPS = "sim"
SOURCE = "sim"


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
        self.always_on = scene.always_on
        # Never at once: whoever watches must see that it was off.
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
        self._planned, self._next_s = -1, began_s
        self._began_battery_s: float | None = None

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
        return not self.is_on and self.utility and self.output and self._off_at_s == math.inf

    @property
    def next_event_s(self) -> float:
        """When something next happens by itself; inf: never."""
        return min(self.next_edge_s, self.host.next_change_s, self.lost_at_s, self._on_at_s, self.next_order_s)

    def live(self, to_s: float) -> bool:
        """Play physics up to to_s, or until the host is off or dark; return whether it still runs."""
        if self.is_on:
            self._play(to_s, stops=True)
        return self.is_on

    @property
    def is_on(self) -> bool:
        """The host runs, or is still stopping."""
        return self.host.power is Power.UP or self.host.power is Power.STOPPING

    def advance(self, to_s: float) -> None:
        """Play physics up to to_s, whatever happens to the host."""
        self._play(to_s, stops=False)

    def _play(self, to_s: float, *, stops: bool) -> None:
        host = self.host
        while self.now_s < to_s:
            if self._planned != host.version:
                self._planned, self._next_s = host.version, self.next_event_s
            next_s = max(self.now_s, self._next_s) if self._next_s < to_s else to_s
            gone_s = next_s - self.now_s
            if self.utility:
                self.pack.charge(gone_s)
            elif self.output:
                self.pack.drain(gone_s, host.load)
            self.now_s = next_s
            host.advance(next_s)
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

    def _turn(self, *, utility: bool) -> None:
        self._edge += 1
        self.utility = utility
        self._began_battery_s = None if utility else self.now_s
        if not utility:
            self._on_at_s = math.inf
        elif not self.output:
            self._on_at_s = max(self.now_s, self._off_since_s) + self._restart_s

    def _lose_output(self) -> None:
        self.output = False
        self._off_at_s = self._fsd_since_s = math.inf
        self._off_since_s = self.now_s
        self.host.lose_power(self.now_s)
        if self.utility:
            self._on_at_s = self.now_s + self._restart_s

    def _output_back(self) -> None:
        self.output = True
        self._on_at_s = math.inf
        self.gauge = self.scene.new_gauge()
        if self.always_on:
            self.host.switch_on(self.now_s)

    # --- Others on this UPS ------------------------------------------------------------------------------------------

    @property
    def next_order_s(self) -> float:
        """When somebody else orders the output off; inf: nobody will."""
        return math.inf if self._ordered or self.scene.order is None else self.scene.order.at_s

    def _obey(self) -> None:
        order = self.scene.order
        self._ordered = True
        # Who orders an output off does so because of the outage; where there is none, or no host any more, nobody does.
        if order is not None and not self.utility and self.output and self.host.power is Power.UP:
            self._off_at_s = self.now_s + order.delay_s
            if order.kind == "fsd":
                self._fsd_since_s = self.now_s

    def cycle(self, after_s: float) -> None:
        """Order the output off after after_s, and on again when utility is there: what killpower does."""
        self._off_at_s = min(self._off_at_s, self.now_s + after_s)
        self._planned = -1

    def power_off(self, force_after_s: float) -> Answer:
        """Order the host off."""
        if self.host.power is Power.UP:
            self.ordered_off = (self.now_s, self.pack.left)
        return self.host.power_off(self.now_s, force_after_s)

    def press_button(self) -> None:
        """Switch on a stranded host by hand; its supply was never interrupted."""
        self.host.switch_on(self.now_s)

    # --- What the UPS says -------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """Say whether the source gets an answer now."""
        return all(not begin_s <= self.now_s < end_s for begin_s, end_s in self.scene.silences)

    def reading(self, offset_s: float = 0.0) -> Reading:
        """Return what the UPS answers now. offset_s: of the asking clock, seconds at the first cut."""
        on_battery = not self.utility
        told = self.gauge.tell(self.now_s, self.pack, self.load, on_battery=on_battery)
        silent, second = self.scene.gauge.silent, self.scene.second
        since_s = self._began_battery_s
        countdown = self._off_at_s < math.inf and self._fsd_since_s == math.inf
        return Reading(
            at_s=self.now_s + offset_s,
            ups=UPS,
            source=SOURCE,
            output_source=OutputSource.BATTERY if on_battery else OutputSource.UTILITY,
            runtime_s=told.runtime_s,
            charge_pct=told.charge_pct,
            load_pct=told.load_pct,
            on_battery_s=None if "on_battery_s" in silent else 0.0 if since_s is None else self.now_s - since_s,
            input_present=None if "input_present" in silent else self.utility,
            low_battery=told.low_battery,
            output_off_in_s=self._off_at_s - self.now_s if countdown else None,
            forced_shutdown=self._fsd_since_s < math.inf,
            authenticated=second is not None and second.ill is Ill.FORGED,
        )
