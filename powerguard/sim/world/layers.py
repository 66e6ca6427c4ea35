"""Which ways back there were in an outage, and which of them brought the host back: `stranded` is told for each set.

The letters are those of docs/guides/return.md.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

from powerguard.core.actions import Way
from powerguard.sim.world.back import Waker
from powerguard.sim.world.scene import Scene

LETTERS: Final = {
    Waker.REBOOT: "A",
    Waker.OUTPUT: "B",
    Waker.SENTINEL: "C",
    Waker.WATCHDOG: "D",
    Waker.RTC: "E",
    Waker.POLICY: "P",
}
"""Every way back, in the order in which they are told."""
ALWAYS_ON: Final = "always-on"
LIES: Final = "lies"
OFF: Final = "off"


class Layers(NamedTuple):
    """A set of ways back, as the operator of this host would name it.

    output: what its UPS is said to do when utility returns in the countdown: cycles, aborts, stays_off or unknown; "":
    this host switches none. policy: the BMC's in the outage: ALWAYS_ON; LIES: taken, and not kept; OFF.
    """

    reboot: bool
    output: str
    sentinel: bool
    watchdog: bool
    rtc: bool
    policy: str

    @property
    def ways(self) -> list[str]:
        """The names of those that are there, but for the policy."""
        return [waker.value for waker in LETTERS if waker is not Waker.POLICY and getattr(self, waker.value)]

    def __str__(self) -> str:
        letters = [LETTERS[Waker(way)] + (f" {self.output}" if way == Waker.OUTPUT else "") for way in self.ways]
        policy = {ALWAYS_ON: ["P"], LIES: ["P lies"], OFF: []}[self.policy]
        return ", ".join(letters + policy) or "nothing"


class Return(NamedTuple):
    """How the host of one outage came back.

    broken: a clock, sentinel or watchdog of it does not do what it promises. by: who switched it on, each once; empty:
    it was never off, or only a person did. wait_s: from utility's return, or the power-off if that was later, until it
    was on, in all, without the time of a person.
    """

    layers: Layers
    broken: bool
    by: tuple[str, ...]
    wait_s: float


def returned(scene: Scene, wakers: Collection[Waker], wait_s: float, *, arms: bool, brackets: bool = False) -> Return:
    """Tell it of an outage that is over.

    wakers: who switched the host on. arms: whoever decided there arms what there is, and ensures the BMC's policy;
    brackets: the policy is another but for that.
    """
    facts = scene.returns
    is_on = (scene.always_on and not brackets) or (arms and not scene.bmc_refuses)
    ways = facts.ways if arms else ()
    layers = Layers(
        reboot=arms and facts.late,
        output=facts.told if Way.OUTPUT in ways else "",
        sentinel=Way.SENTINEL in ways,
        watchdog=Way.WATCHDOG in ways,
        rtc=Way.RTC in ways,
        policy=LIES if facts.lies else ALWAYS_ON if is_on else OFF,
    )
    by = tuple(waker.value for waker in LETTERS if waker in wakers)
    return Return(layers=layers, broken=arms and facts.broken, by=by, wait_s=wait_s)
