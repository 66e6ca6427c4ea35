"""The battery of the simulated UPS: energy is neither made nor lost, and only what the card says of it may lie."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.model.events import OutputSource
from powerguard.sim.snmp_values import GAUGE32, INTEGER, OCTETS, TIMETICKS
from powerguard.sim.ups import APC, SimUps, UpsBattery
from powerguard.ups.profiles.decode import decode
from powerguard.ups.profiles.load import load_profiles
from powerguard.ups.profiles.vocabulary import Answer, Oid

PROFILES = load_profiles(None).ranked()

TABLE = ((0.25, 1200.0), (0.50, 540.0), (0.75, 360.0), (1.00, 240.0))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ups_at(
    clock: Clock,
    load: float = 0.5,
    *,
    battery: UpsBattery | None = None,
    gauge: float = 1.0,
    low_battery_s: float = 120.0,
) -> tuple[SimUps, dict[str, float]]:
    drawn = {"load": load}
    battery = UpsBattery(runtime=TABLE) if battery is None else battery
    ups = SimUps(battery, clock=clock, load=lambda: drawn["load"], gauge=gauge, low_battery_s=low_battery_s)
    return ups, drawn


def test_a_full_battery_lasts_as_its_table_says() -> None:
    for load, lasts_s in TABLE:
        clock = Clock()
        ups, _ = ups_at(clock, load)
        ups.utility = False
        clock.now_s += lasts_s - 0.5
        ups.look()
        assert ups.alive
        assert ups.left_s == pytest.approx(0.5, abs=1e-6)
        clock.now_s += 0.6
        ups.look()
        assert not ups.alive, f"empty at load {load}"


@given(st.floats(0.01, 2.0), st.floats(0.01, 2.0))
def test_more_load_never_lasts_longer(one: float, other: float) -> None:
    """Between the points of the table, below and above it: one falling curve."""
    battery = UpsBattery(runtime=TABLE)
    low, high = sorted((one, other))
    assert battery.tau_s(low) >= battery.tau_s(high) > 0.0


@pytest.mark.parametrize("runtime", [((0.6, 60.0),), ((0.36, 150.0), (0.6, 60.0)), TABLE])
def test_the_curve_goes_through_its_points(runtime: tuple[tuple[float, float], ...]) -> None:
    battery = UpsBattery(runtime=runtime)
    for load, lasts_s in runtime:
        assert battery.tau_s(load) == pytest.approx(lasts_s)
    assert battery.tau_s(0.0) == battery.tau_s(0.02), "an idle UPS still draws something"


@given(st.lists(st.tuples(st.floats(0.05, 1.2), st.floats(0.0, 60.0)), min_size=1, max_size=20))
def test_energy_is_conserved(steps: list[tuple[float, float]]) -> None:
    """Each second takes dt / tau(load), however often anybody looks."""
    clock, battery = Clock(), UpsBattery(runtime=TABLE)
    ups, drawn = ups_at(clock, steps[0][0], battery=battery)
    ups.utility = False
    taken = 0.0
    for load, lasts_s in steps:
        ups.look()
        drawn["load"] = load
        for _ in range(3):
            clock.now_s += lasts_s / 3
            assert 0.0 <= ups.charge <= 1.0
        taken += lasts_s / battery.tau_s(load)
    assert ups.charge == pytest.approx(max(0.0, 1.0 - taken), abs=1e-9)
    assert ups.alive == (taken < 1.0) or math.isclose(taken, 1.0, abs_tol=1e-9)


def test_it_charges_on_utility_and_is_never_more_than_full() -> None:
    clock = Clock()
    ups, _ = ups_at(clock, battery=UpsBattery(runtime=TABLE, health=0.6, recharge_s=1000.0))
    ups.utility = False
    clock.now_s += 162.0
    assert ups.charge == pytest.approx(0.5), "a worn one is half empty after 0.3 of a new one's 540 s"
    ups.utility = True
    clock.now_s += 250.0
    assert ups.charge == pytest.approx(0.75)
    assert ups.left_s == pytest.approx(0.45 * 540.0)
    clock.now_s += 1e6
    assert ups.charge == 1.0
    assert ups.left_s == pytest.approx(0.6 * 540.0)


def test_what_was_dead_stays_dead() -> None:
    clock = Clock()
    ups, _ = ups_at(clock)
    ups.utility = False
    clock.now_s += 600.0
    ups.look()
    ups.utility = True
    clock.now_s += 3600.0
    ups.look()
    assert not ups.alive


def test_a_gauge_may_lie_the_battery_does_not() -> None:
    """A quarter too much, as with a worn battery whose card believes it new."""
    clock = Clock()
    ups, _ = ups_at(clock, gauge=1.25)
    assert ups.left_s == pytest.approx(540.0)
    assert ups.runtime_s == pytest.approx(675.0)
    ups.utility = False
    clock.now_s += 540.1
    ups.look()
    assert not ups.alive


def test_low_battery_is_reported_on_battery_only_and_by_the_gauge() -> None:
    clock = Clock()
    ups, _ = ups_at(clock, gauge=2.0, low_battery_s=120.0)
    ups.utility = False
    clock.now_s += 540.0 - 61.0
    assert not ups.low_battery
    clock.now_s += 2.0
    assert ups.low_battery, "59 s left, 118 s told"
    ups.utility = True
    assert not ups.low_battery


def test_seconds_on_battery_count_from_the_plug() -> None:
    clock = Clock()
    ups, _ = ups_at(clock)
    assert ups.on_battery_s == 0.0
    ups.utility = False
    clock.now_s += 7.0
    ups.utility = False
    assert ups.on_battery_s == 7.0, "pulling a plug that is out changes nothing"
    ups.utility = True
    assert ups.on_battery_s == 0.0
    clock.now_s += 5.0
    ups.utility = False
    assert ups.on_battery_s == 0.0


def answers_of(ups: SimUps) -> dict[str, Answer]:
    """What our poller would have of it."""
    answers: dict[str, Answer] = {}
    for name, value in ups.apc_table().items():
        content = value.content
        assert content is not None
        answers[name] = Oid(content) if isinstance(content, str) else content
    return answers


def test_the_card_is_understood_by_our_own_profiles() -> None:
    """The types of PowerNet-MIB, and what the decoder makes of it: the physics, to the digit that the objects have."""
    clock = Clock()
    ups, _ = ups_at(clock)
    types = {name.removeprefix(APC): value.tag for name, value in ups.apc_table().items()}
    assert {types[f".{tail}.0"] for tail in ("2.1.2", "2.2.3")} == {TIMETICKS}
    assert {types[f".{tail}.0"] for tail in ("2.2.1", "2.3.1", "3.2.1", "4.2.3", "4.3.3")} == {GAUGE32}
    assert {types[f".{tail}.0"] for tail in ("2.1.1", "2.2.4", "4.1.1", "4.2.8")} == {INTEGER}
    assert {types[f".{tail}.0"] for tail in ("1.1.1", "11.1.1")} == {OCTETS}
    utility = decode(PROFILES, answers_of(ups))
    assert (utility.output_source, utility.input_present) == (OutputSource.UTILITY, True)
    assert (utility.charge_pct, utility.load_pct, utility.runtime_s) == (100.0, 50.0, 540.0)
    assert (utility.alarms, utility.witnesses, utility.rejected) == ((), (), ())

    ups.utility = False
    clock.now_s += 430.0
    battery = decode(PROFILES, answers_of(ups))
    assert (battery.output_source, battery.input_present) == (OutputSource.BATTERY, False)
    assert (battery.on_battery_s, battery.low_battery) == (430.0, True)
    assert battery.runtime_s == pytest.approx(110.0, abs=0.01)
    assert battery.charge_pct == pytest.approx(20.4, abs=0.05)
    assert battery.witnesses == ("on_battery_s", "input_present", "alarms")
