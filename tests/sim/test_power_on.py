"""The power race, row by row: utility returns at each moment of a power-off, and each method is there or is not.

The real core decides, the real sentinel decides; the host, its clock, its BMC and the UPS's output are the simulated
world. Each row is played with the method and without it, so that a method that does nothing is seen.
"""

from dataclasses import replace

import pytest

from powerguard.core.model.actions import PowerOnMethod
from powerguard.sim.world.back import ArmedMethods, PowerState, ReturnFacts, Waker, draw_returns
from powerguard.sim.world.chance import Cut
from powerguard.sim.world.guarded import Guarded
from powerguard.sim.world.host import Power
from powerguard.sim.world.policies import one
from powerguard.sim.world.run import Result, play
from powerguard.sim.world.scene import Scene, draw
from powerguard.sim.world.site import ReturnSite, Site
from powerguard.sim.world.world import World

SITE = Site()
NOTHING = ReturnFacts()
HOURS_S = 4 * 3600.0


def scene(seed: int = 3) -> Scene:
    """A full battery, honest agents, and an outage that outlasts them."""
    drawn = draw(seed, SITE, faults=False)
    return replace(drawn, cuts=(Cut(begin_s=0.0, end_s=HOURS_S),), dies_at=0.0)


class Watched(Guarded):
    """powerguard, with a note of when its host was latched, told to end, and off."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.moments: dict[str, float] = {}

    def look(self) -> None:
        super().look()
        if self.world.host.power is Power.STOPPING:
            self.moments.setdefault("ordered", self.world.now_s)
            self.moments["off"] = self.world.host.stop_ends_s


def moments(facts: ReturnFacts) -> dict[str, float]:
    """When this host is ordered off, and off, if the outage goes on."""
    made: list[Watched] = []

    def make(world: World) -> Watched:
        made.append(Watched(world))
        return made[-1]

    play(replace(scene(), returns=facts), SITE, make)
    return made[0].moments


def back_at(end_s: float, facts: ReturnFacts, **changes: object) -> Result:
    """Play an outage that ends at end_s."""
    changed = replace(scene(), cuts=(Cut(begin_s=0.0, end_s=end_s),), returns=facts, **changes)  # type: ignore[arg-type]
    result = play(changed, SITE, Guarded)
    assert result.violations == []
    return result


OUTPUT = ReturnFacts(output="cycles", declared="cycles")
LATE = ReturnFacts(late=True)
COVERS = {
    "C": ReturnFacts(sentinel=True),
    "E": ReturnFacts(rtc=True),
    "D": ReturnFacts(watchdog=True),
}
WAKERS = {"C": Waker.SENTINEL, "E": Waker.RTC, "D": Waker.WATCHDOG}


def test_before_the_commit_nothing_is_lost() -> None:
    """Utility returns while the host holds: it resumes in place, and no power-on method has to act."""
    result = back_at(moments(NOTHING)["ordered"] - 30.0, NOTHING)
    assert (result.shutdowns, result.stranded) == (0, False)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_after_the_commit_while_units_stop(share: float) -> None:
    """With A readable: the daemon, last to go, sees stable utility and turns the power-off into a reboot."""
    at = moments(LATE)
    end_s = at["ordered"] + share * (at["off"] - at["ordered"])
    without, late = back_at(end_s, NOTHING), back_at(end_s, LATE)
    assert (without.shutdowns, without.stranded, without.wakers) == (1, True, [Waker.PERSON])
    assert (late.shutdowns, late.stranded, late.dirty, late.wakers) == (1, False, [], [Waker.REBOOT])


def test_after_the_commit_with_the_output_counting() -> None:
    """With B counting, A is excluded: no reboot races a cut that comes; the UPS cycles, and AC's return starts it."""
    at = moments(OUTPUT)
    end_s = at["ordered"] + 0.1 * (at["off"] - at["ordered"])
    result = back_at(end_s, replace(OUTPUT, late=True))
    assert (result.stranded, result.dirty, result.wakers) == (False, [], [Waker.OUTPUT])
    aborting = replace(OUTPUT, output="aborts", declared="aborts")
    assert back_at(end_s, aborting).stranded, "a UPS that aborts leaves AC on"
    assert not back_at(end_s, replace(aborting, late=True)).stranded, "which excludes no reboot"


def test_after_the_commit_with_a_silent_ups() -> None:
    """Nobody knows whether it is about to cut: A leaves the power-off one, and C brings the host back."""
    at = moments(LATE)
    end_s = at["ordered"] + 0.1 * (at["off"] - at["ordered"])
    silences = ((at["ordered"] + 1.0, HOURS_S),)
    assert back_at(end_s, LATE, silences=silences).stranded
    assert not back_at(end_s, replace(COVERS["C"], late=True), silences=silences).stranded


@pytest.mark.parametrize("method", list(COVERS))
def test_between_the_last_look_and_the_power_off(method: str) -> None:
    """Too late for A: with B, or with any of C, D, E alone, the host comes back; with P only it does not."""
    end_s = moments(LATE)["off"] - 0.2
    assert back_at(end_s, LATE).stranded
    covered = back_at(end_s, replace(COVERS[method], late=True))
    assert (covered.stranded, covered.wakers) == (False, [WAKERS[method]])
    assert covered.waited_s > 0.0, "each of them acts some time after utility is back, and that is told"


def test_between_the_last_look_and_the_power_off_with_the_output() -> None:
    end_s = moments(OUTPUT)["off"] - 0.2
    result = back_at(end_s, replace(OUTPUT, late=True))
    assert (result.stranded, result.dirty) == (False, [])


@pytest.mark.parametrize("declared", ["cycles", "stays_off"])
def test_off_before_the_cut_and_the_ups_stays_off(declared: str) -> None:
    """A profile that says so is never told to cut, and C covers; one that lies leaves a room without power."""
    end_s = moments(OUTPUT)["off"] + 5.0
    lies = ReturnFacts(output="stays_off", declared=declared, sentinel=True)
    assert back_at(end_s, lies).stranded is (declared == "cycles")


@pytest.mark.parametrize(
    ("facts", "waker"),
    [
        (NOTHING, Waker.POLICY),
        (ReturnFacts(lies=True), Waker.PERSON),
        (ReturnFacts(lies=True, sentinel=True), Waker.SENTINEL),
        (OUTPUT, Waker.OUTPUT),
        (replace(OUTPUT, lies=True), Waker.PERSON),
        (replace(OUTPUT, lies=True, sentinel=True), Waker.SENTINEL),
    ],
    ids=["P", "P lies", "P lies, C", "P, B", "P lies, B", "P lies, B and C"],
)
def test_after_hours(facts: ReturnFacts, waker: Waker) -> None:
    """The battery, or the cut, has taken AC away: P brings it back, and where P is not what it says, C."""
    result = back_at(HOURS_S, facts)
    assert (result.wakers, result.stranded) == ([waker], waker is Waker.PERSON)


def test_a_clock_that_wakes_the_host_on_battery_ends_in_no_loop() -> None:
    """The gate holds, the host goes down again, and each time it will stay off for longer."""
    changed = replace(scene(), cuts=(Cut(begin_s=0.0, end_s=3 * 86400.0),), returns=ReturnFacts(rtc=True))
    large = SITE.model_copy(update={"host": SITE.host.model_copy(update={"load": 0.1})})
    result = play(changed, large, Guarded)
    assert result.violations == []
    assert result.shutdowns + len(result.dirty) <= 8


def test_strikes_that_hit_boot_after_boot() -> None:
    """Each boot meets the next cut on a battery that is all but empty: it goes down again in order or goes dark, and
    comes back each time, by whoever acts first."""
    again = {"bins": [{"from_s": 300, "to_s": 600, "share": 1}], "restrike_share": 1, "most_restrikes": 8}
    site = Site.model_validate(
        {"outage": {**again, "restrike_after_s": 160}, "returns": {"sentinel_share": 1, "rtc_share": 1}}, strict=False
    )
    drawn = draw(4, site, faults=False)
    result = play(drawn, site, Guarded)
    assert len(drawn.cuts) == 9
    assert (result.violations, result.stranded) == ([], False)
    assert result.shutdowns >= 3
    assert len(result.wakers) == result.shutdowns + len(result.dirty) >= 6


def test_somebody_else_stops_the_host() -> None:
    """On battery, before us: every way but the UPS's output is armed, and utility that returns finds the host."""
    stopped = ReturnFacts(foreign_s=20.0)
    assert back_at(40.0, stopped).stranded
    for facts in COVERS.values():
        assert not back_at(40.0, replace(facts, foreign_s=20.0)).stranded
    assert back_at(40.0, replace(OUTPUT, foreign_s=20.0)).stranded, "the output is not ours to cut then"


SETS = {
    "none": ({}, True),
    "A": ({"late_share": 1.0}, True),
    "C": ({"sentinel_share": 1.0}, False),
    "E": ({"rtc_share": 1.0}, False),
    "D": ({"watchdog_share": 1.0}, False),
    "A, B, C": ({"late_share": 1.0, "output_share": 1.0, "sentinel_share": 1.0, "unknown_share": 0.2}, False),
}


@pytest.mark.parametrize("count", [10, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(SETS))
def test_stranded_over_layer_sets(name: str, count: int) -> None:
    """Outages of every kind, with faults elsewhere: those that one way leaves behind, another does not."""
    shares, strands = SETS[name]
    site = Site(returns=ReturnSite.model_validate({"fails_share": 0.0, "foreign_share": 0.0, **shares}))
    results = [one(seed, site, "powerguard", faults=True).result for seed in range(1, count + 1)]
    assert [result.violations for result in results] == [[]] * count
    assert any(result.stranded for result in results) is strands


def test_a_host_that_crashed_has_waited_since_then() -> None:
    """Nothing took its power, so it was not off: it was up until it crashed, whenever utility came back."""
    world = World(replace(scene(), cuts=(Cut(begin_s=0.0, end_s=20.0),)), SITE, began_s=-30.0)
    world.advance(50.0)
    world.host.lose_power(50.0)
    world.host.dirty_at_s.clear()
    world.advance(57.0)
    world.press_button(Waker.ITSELF)
    assert (world.host.power, world.waited_s) == (Power.UP, 7.0)


# --- The parts ------------------------------------------------------------------------------------------------------


def test_a_site_that_has_nothing_draws_nothing() -> None:
    assert draw_returns(1, ReturnSite(), faults=True) == NOTHING
    everything = ReturnSite(output_share=1.0, rtc_share=1.0, sentinel_share=1.0, watchdog_share=1.0, late_share=1.0)
    drawn = draw_returns(1, everything, faults=False)
    assert drawn.methods == tuple(PowerOnMethod)
    assert drawn.late
    assert (drawn.rtc_works, drawn.lies, drawn.foreign_s) == (True, False, float("inf"))
    assert draw_returns(1, ReturnSite(lies_share=1.0), faults=False).lies
    broken = draw_returns(1, everything.model_copy(update={"fails_share": 1.0, "foreign_share": 1.0}), faults=True)
    assert (broken.rtc_works, broken.sentinel_works, broken.watchdog_works, broken.lies) == (False, False, False, True)
    assert 5.0 <= broken.foreign_s <= 300.0
    shares = dict.fromkeys(("cycles", "aborts", "stays_off"), 0)
    site = everything.model_copy(update={"aborts_share": 0.3, "stays_off_share": 0.2})
    for seed in range(300):
        shares[draw_returns(seed, site, faults=True).output] += 1
    assert 110 < shares["cycles"] < 190
    assert 60 < shares["aborts"] < 120
    assert 35 < shares["stays_off"] < 85


def standing(*, is_on: bool = False, utility_since_s: float | None = 0.0, off_since_s: float = 5.0) -> PowerState:
    return {"is_on": is_on, "utility_since_s": utility_since_s, "off_since_s": off_since_s}


def test_what_is_armed_acts_in_its_time_and_once() -> None:
    back = ArmedMethods(ReturnFacts(rtc=True, watchdog=True))
    assert back.idle
    back.arm(PowerOnMethod.RTC, 0.0, 100.0)
    back.arm(PowerOnMethod.WATCHDOG, 0.0, 200.0)
    assert back.next_s(**standing()) == 100.0
    assert not back.acts(99.0, powered=True, **standing())
    assert back.acts(100.0, powered=True, **standing()) is Waker.RTC
    assert back.next_s(**standing()) == 200.0
    assert back.next_s(**standing(is_on=True)) == 200.0, "it would reset a host that is up"
    back.lose_power()
    assert back.idle, "a BMC without power has forgotten it"
    back.arm(PowerOnMethod.RTC, 0.0, 100.0)
    back.disarm(PowerOnMethod.RTC)
    assert back.idle


@pytest.mark.parametrize(
    ("powered", "works", "wakes"), [(True, True, Waker.RTC), (False, True, None), (True, False, None)]
)
def test_a_clock_wakes_a_board_that_has_power_and_obeys(*, powered: bool, works: bool, wakes: Waker | None) -> None:
    back = ArmedMethods(ReturnFacts(rtc=True, rtc_works=works))
    back.arm(PowerOnMethod.RTC, 0.0, 100.0)
    assert back.acts(100.0, powered=powered, **standing()) is wakes


def test_a_sentinel_wants_stable_utility_and_its_time() -> None:
    back = ArmedMethods(ReturnFacts(sentinel=True))
    back.arm(PowerOnMethod.SENTINEL, 0.0, 50.0)
    assert back.next_s(**standing(utility_since_s=None)) == float("inf")
    assert back.next_s(**standing(utility_since_s=60.0)) > 70.0
    for now_s, by in ((49.0, None), (68.0, None), (77.0, Waker.SENTINEL), (78.0, None)):
        assert back.acts(now_s, powered=True, **standing(utility_since_s=60.0)) is by
