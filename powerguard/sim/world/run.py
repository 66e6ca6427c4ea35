"""One outage, played by one policy: from utility, through the dark, until training runs again.

A policy decides; the world is as it is. `play` drives both and keeps the account: what was lost, and whose fault it
was. The loss is training time, in seconds at full speed, from the first cut until training runs with utility there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from powerguard.sim.world.back import Waker
from powerguard.sim.world.host import Power
from powerguard.sim.world.invariants import InvariantBroken
from powerguard.sim.world.scene import Scene
from powerguard.sim.world.site import Site
from powerguard.sim.world.world import World

WARM_S = 12.0
"""Utility before the first cut: a daemon that has been running knows its UPS."""
PATIENCE_S = 3600.0
"""Utility is back for good and training does not run: it will never be resumed."""
CALM_S = 600.0
"""A person presses the button of a stranded host when no outage follows for so long: not between two strikes."""
BARE_NEED_S = 15.0
"""Seen, decided, synced and forced off: no policy is quicker, so less than this could not be saved."""


class Decider(Protocol):
    """Decides for one host, boot by boot. It looks when it wants to and orders what it likes of `world`."""

    @property
    def next_s(self) -> float:
        """When it wants to look next, in the world's time."""
        ...

    @property
    def waits(self) -> bool:
        """After a boot it keeps training waiting, for charge or for utility; the others' training starts by itself."""
        ...

    @property
    def settled(self) -> bool:
        """Nothing that it began is still under way: as far as it is concerned, the outage is over."""
        ...

    def boot(self, *, was_off_s: float | None) -> None:
        """The host is up and the policy's daemon starts. was_off_s: None at the first start."""
        ...

    def look(self) -> None:
        """Its time has come."""
        ...

    def gone(self) -> None:
        """The host is off or dark: nothing of it runs any more."""
        ...

    def end(self) -> None:
        """Training runs again and utility is there: the last moment to object."""
        ...


@dataclass(slots=True, kw_only=True)
class Result:
    """The result of one outage.

    loss_s: training time lost. rollback_s: of that, work that had to be done again. shutdowns: orderly power-offs;
    needless: those after which utility came back while the battery would still have carried the paused host.
    dirty: moments at which power was lost under the host, and "planning" or "physics" for each.
    stranded: a person had to press the button. wakers: who switched the host on, each time; waited_s: it was off with
    utility there, until something did that by itself. lasted_s: until the end of the account.
    """

    seed: int
    loss_s: float = 0.0
    rollback_s: float = 0.0
    shutdowns: int = 0
    needless: int = 0
    dirty: list[tuple[float, str]] = field(default_factory=list)
    stranded: bool = False
    wakers: list[Waker] = field(default_factory=list)
    waited_s: float = 0.0
    lasted_s: float = 0.0
    violations: list[str] = field(default_factory=list)

    def dirty_by(self, cause: str) -> bool:
        """Say whether power was lost by "planning" or by "physics"."""
        return any(kind == cause for _, kind in self.dirty)


def play(scene: Scene, site: Site, make: Callable[[World], Decider], *, at_most_s: float = math.inf) -> Result:
    """Play one outage. make: the policy, given the world. at_most_s: who loses that much is not played to the end."""
    world = World(scene, site, began_s=-WARM_S)
    stage = Stage(world, make(world), at_most_s)
    try:
        stage.run()
    except InvariantBroken as violation:
        stage.result.violations.append(f"{violation} (at {world.now_s:.1f} s)")
    return stage.finish()


class Stage:
    """The state of one play: one host, its policy, and the account."""

    def __init__(self, world: World, decider: Decider, at_most_s: float) -> None:
        self.world = world
        self.decider = decider
        self.result = Result(seed=world.scene.seed)
        self._at_most_s = at_most_s
        self._began_progress_s = 0.0
        self._dirty = False
        self._watched_since_s = -math.inf

    def run(self) -> None:
        world = self.world
        self.decider.boot(was_off_s=None)
        self._until(0.0)
        self._began_progress_s = world.host.progress_s
        while not self._boot_to_end():
            if self._is_beaten:
                return
            went_s = world.now_s
            self.decider.gone()
            self._wait_for_power()
            self._start_up(world.now_s - went_s)
        self.decider.end()

    # --- While it is up ----------------------------------------------------------------------------------------------

    def _until(self, to_s: float) -> None:
        """Let the policy look as often as it likes until to_s."""
        world, decider = self.world, self.decider
        while decider.next_s <= to_s:
            if not world.live(decider.next_s):
                return
            decider.look()
        world.live(to_s)

    def _boot_to_end(self) -> bool:
        """Play until training runs with utility there for good (True), or it is off, dark or beaten (False)."""
        world, decider, host = self.world, self.decider, self.world.host
        last_s = world.scene.end_s
        while not self._is_beaten and world.live(decider.next_s):
            decider.look()
            back = world.now_s >= last_s and world.utility and host.power is Power.UP
            if back and host.training and not host.capped and decider.settled:
                return True
            now_s = world.now_s - PATIENCE_S
            if now_s > last_s and now_s > self._watched_since_s and host.power is Power.UP:
                sentence = "training goes on when utility is back for good"
                raise InvariantBroken(sentence)
        return False

    # --- While it is off ---------------------------------------------------------------------------------------------

    def _wait_for_power(self) -> None:
        """Wait until something switches the host on; a person does, at once where no outage follows within CALM_S."""
        world = self.world
        self._account()
        while not world.is_on:
            if world.stranded and self._is_calm():
                self.result.stranded = True
                world.press_button()
            else:
                next_s = world.next_event_s
                if next_s == math.inf:
                    next_s = world.scene.end_s
                # A hair later: what was planned for a moment is due then, whatever the last digit of the sum is.
                world.advance(max(next_s, world.now_s) + 1e-6)

    def _is_calm(self) -> bool:
        now_s = self.world.now_s
        return all(not now_s < cut.begin_s < now_s + CALM_S for cut in self.world.scene.cuts)

    def _account(self) -> None:
        """Return whose fault it was, while the world still shows it."""
        world, host = self.world, self.world.host
        self._dirty = host.power is Power.DARK
        if self._dirty:
            at_s = host.dirty_at_s[-1]
            self.result.dirty.append((at_s, self._whose(at_s)))
            return
        self.result.shutdowns += 1
        ordered_s, left = world.ordered_off
        back_s = next((cut.end_s for cut in world.scene.cuts if cut.end_s > ordered_s), ordered_s)
        began_s = next((cut.begin_s for cut in reversed(world.scene.cuts) if cut.begin_s <= ordered_s), ordered_s)
        in_cut = any(cut.begin_s <= ordered_s < cut.end_s for cut in world.scene.cuts)
        paused = world.site.host.load * world.site.host.paused_load
        carried_s = max(0.0, left - world.pack.dies_at) * world.pack.curve.tau_s(paused)
        foreign = world.scene.order is not None and began_s <= world.scene.order.at_s <= ordered_s
        if not foreign and not world.foreign and (not in_cut or carried_s >= back_s - ordered_s):
            self.result.needless += 1

    def _whose(self, at_s: float) -> str:
        """Was there a plan that would have had the host off in time, with what could be known?

        A bad cell cannot be known; nor what happens before the daemon runs, or while it gets no answer, or only the
        answers of a source that says utility in the dark, or of a trainer that says that it stands. A host whose own
        network is down presumes battery, and counts it; orders of others to the UPS meanwhile it cannot hear.
        """
        world = self.world
        silent = any(begin_s <= at_s < end_s for begin_s, end_s in world.scene.silences)
        if silent and world.scene.second is not None and world.scene.second.hides_the_dark(at_s):
            return "physics"
        if silent and world.scene.second is None and world.scene.trainer.draws_on:
            return "physics"  # It says that it stands, and no source reports the load.
        if not world.utility and world.pack.dead and world.pack.dies_at > 0.0:
            return "physics"
        began_s = max((cut.begin_s for cut in world.scene.cuts if cut.begin_s <= at_s), default=at_s)
        order = world.scene.order
        ordered = order is not None and abs(order.at_s + order.delay_s - at_s) < 1.0
        if order is not None and ordered:
            began_s = order.at_s
        known_s = max(began_s, self._watched_since_s)
        surroundings, unheard = world.scene.surroundings, list(world.scene.silences)
        if ordered and surroundings.network is not None:
            unheard.append(surroundings.network)
        if ordered and surroundings.twin and surroundings.needed == 1:
            unheard.append(surroundings.silent)  # It is ordered off as well: until that is heard, it carries the host.
        for begin_s, end_s in unheard:
            if begin_s <= known_s < end_s and (ordered or begin_s <= began_s):
                known_s = min(end_s, at_s)
        return "planning" if at_s - known_s >= BARE_NEED_S else "physics"

    def _start_up(self, was_off_s: float) -> None:
        """Power is there: firmware, system, daemon; then training, unless the policy holds it."""
        world, site, host = self.world, self.world.site.host, self.world.host
        resumed_s = site.dirty_s if self._dirty else site.resumed_s
        daemon_s = max(0.0, resumed_s - (site.resumed_s - site.boot_s))
        on_s = world.now_s
        world.foreign = False
        host.trains_from_s = on_s + resumed_s
        self._watched_since_s = math.inf
        if not world.live(on_s + daemon_s):
            return
        self._watched_since_s = world.now_s
        self.decider.boot(was_off_s=was_off_s + daemon_s)
        resume_at_s = on_s + resumed_s
        self._until(resume_at_s)
        if not world.is_on:
            return
        if not host.training and not self.decider.waits:
            host.start_training(world.now_s)
            world.live(world.now_s + 1e-3)

    # --- The sum -----------------------------------------------------------------------------------------------------

    def finish(self) -> Result:
        world, result = self.world, self.result
        result.lasted_s = world.now_s
        result.wakers, result.waited_s = world.back.wakers, world.waited_s
        result.rollback_s = world.host.rollback_s
        result.loss_s = self._loss_s
        return result

    @property
    def _loss_s(self) -> float:
        """What is lost so far: it only ever grows, because full speed is the fastest."""
        return self.world.now_s - (self.world.host.progress_s - self._began_progress_s)

    @property
    def _is_beaten(self) -> bool:
        return self._loss_s >= self._at_most_s
