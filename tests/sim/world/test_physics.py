"""The world's physics against sums done by hand, and its chances against what they should be."""

import itertools
import math
from dataclasses import replace
from random import Random
from statistics import mean

import pytest

from powerguard.core.model.actions import Conduct
from powerguard.sim.world import chance
from powerguard.sim.world.battery import Curve, Gauge, GaugeFacts, GaugeKind, Pack
from powerguard.sim.world.chance import stream
from powerguard.sim.world.host import Host, Power
from powerguard.sim.world.scene import draw
from powerguard.sim.world.site import HostSite, OutageSite, Site, TrainerSite, UpsSite
from powerguard.sim.world.world import World

SRT = ((0.50, 540.0), (0.75, 360.0), (1.00, 240.0))
CALM = Site(
    ups=UpsSite(health=(1.0, 1.0), bad_cell_share=0.0, gauge_error=0.0, minutes_share=0.0, load_noise=0.0),
    outage=OutageSite(restrike_share=0.0),
    trainer=TrainerSite(hung_share=0.0, checkpoint_spread=0.0),
    host=HostSite(stop_spread=0.0, stop_stuck_share=0.0),
)


def pack(health: float = 1.0, left: float | None = None, dies_at: float = 0.0) -> Pack:
    return Pack(curve=Curve(points=SRT), health=health, left=health if left is None else left, dies_at=dies_at)


def test_runtime_meets_the_data_sheet() -> None:
    """At its points the table; between them a power law; below by the UPS's own draw; above the last slope goes on."""
    curve = Curve(points=SRT, loss=0.04)
    assert [curve.tau_s(load) for load in (0.5, 0.75, 1.0)] == pytest.approx([540.0, 360.0, 240.0])
    assert curve.tau_s(0.6) == pytest.approx(540.0 * 0.5 / 0.6)  # from 50 to 75 % the exponent is exactly 1
    assert curve.tau_s(0.2625) == pytest.approx(540.0 * 0.54 / 0.3025)
    exponent = math.log(360.0 / 240.0) / math.log(1.0 / 0.75)
    assert curve.tau_s(1.1) == pytest.approx(240.0 * 1.1**-exponent)
    assert Curve(points=((0.5, 540.0),)).tau_s(1.0) == pytest.approx(270.0)


def test_a_battery_gives_what_it_holds() -> None:
    """Worn to 80 %, at 75 % load: 0.8 x 360 s; half of that, and half is left; pausing makes the rest last longer."""
    worn = pack(health=0.8)
    assert worn.lasts_s(0.75) == pytest.approx(288.0)
    worn.drain(144.0, 0.75)
    assert worn.left == pytest.approx(0.4)
    assert worn.lasts_s(0.2625) == pytest.approx(0.4 * 540.0 * 0.54 / 0.3025)
    worn.drain(144.0, 0.75)
    assert worn.dead
    worn.charge(4 * 3600.0)
    assert worn.left == pytest.approx(0.4), "half of eight hours puts half of its own energy back"
    worn.charge(24 * 3600.0)
    assert worn.left == pytest.approx(0.8), "and never more than it holds"


def test_a_bad_cell_ends_it_at_once() -> None:
    sick = pack(dies_at=0.6)
    assert sick.lasts_s(0.75) == pytest.approx(144.0)
    sick.drain(144.0, 0.75)
    assert sick.dead
    assert sick.left == pytest.approx(0.6)


def gauge_reads(kind: GaugeKind, battery: Pack, **facts: object) -> tuple[float | None, float | None, bool]:
    gauge = Gauge(GaugeFacts(kind=kind, **facts), Random(2))  # type: ignore[arg-type]
    said = gauge.read(0.0, battery, 0.75, on_battery=True)
    return said.runtime_s, said.charge_pct, said.low_battery


def test_a_proportional_gauge_believes_the_battery_new() -> None:
    """Half of a 60 % battery: 30 % of a new one, told as 50 %, and 180 s told where 108 s are left."""
    worn = pack(health=0.6, left=0.3)
    runtime_s, charge_pct, low = gauge_reads(GaugeKind.PROPORTIONAL, worn)
    assert (runtime_s, charge_pct, low) == (pytest.approx(180.0), pytest.approx(50.0), False)
    assert worn.lasts_s(0.75) == pytest.approx(108.0)


def test_a_coulomb_counter_falls_off_a_cliff() -> None:
    """It counts what was taken from a new battery: 45 % told when a 60 % battery has 5 % left, and then nothing."""
    runtime_s, charge_pct, _ = gauge_reads(GaugeKind.COULOMB, pack(health=0.6, left=0.05))
    assert (runtime_s, charge_pct) == (pytest.approx(162.0), pytest.approx(45.0))
    runtime_s, charge_pct, _ = gauge_reads(GaugeKind.COULOMB, pack(health=0.6, left=0.01))
    assert (runtime_s, charge_pct) == (pytest.approx(3.6), pytest.approx(1.0))


@pytest.mark.parametrize(("left", "by_voltage", "low"), [(0.07, True, False), (0.05, True, True), (0.32, False, True)])
def test_low_battery_is_called_by_voltage_or_by_runtime(left: float, by_voltage: bool, low: bool) -> None:
    """The knee at 10 % of a 60 % battery is 0.06; 115 s told are below 120."""
    kind = GaugeKind.COULOMB if by_voltage else GaugeKind.PROPORTIONAL
    battery = pack(health=0.6 if by_voltage else 1.0, left=left)
    assert gauge_reads(kind, battery, by_voltage=by_voltage, knee=0.1)[2] is low


def test_a_gauge_rounds_and_lags() -> None:
    """Whole minutes; and after a load step the runtime follows within its lag, the load at once."""
    assert gauge_reads(GaugeKind.PROPORTIONAL, pack(left=0.99), minutes=True)[0] == 300.0
    gauge = Gauge(GaugeFacts(lag_s=15.0), Random(2))
    full = pack()
    assert gauge.read(0.0, full, 0.75, on_battery=True).runtime_s == pytest.approx(360.0)
    after = gauge.read(1.0, full, 0.25, on_battery=True)
    assert after.load_pct == 25.0
    assert after.runtime_s is not None
    assert 360.0 < after.runtime_s < 0.6 * full.curve.tau_s(0.25)
    for second in range(2, 30):
        last = gauge.read(float(second), full, 0.25, on_battery=True)
    assert last.runtime_s == pytest.approx(full.curve.tau_s(0.25))


def test_glitches_lie_in_time_whoever_asks() -> None:
    """About one reading in ten is nonsense, and asking twice as often moves none of them."""
    facts = GaugeFacts(glitch_rate=0.1)

    def glitches(step_s: float) -> list[float]:
        gauge, found = Gauge(facts, Random(2)), []
        for at in range(int(1000 / step_s)):
            said = gauge.read(at * step_s, pack(), 0.75, on_battery=True)
            if said.runtime_s != pytest.approx(360.0):
                found.append(at * step_s)
        return found

    often, seldom = glitches(0.5), glitches(1.0)
    assert 60 < len(seldom) < 140
    assert {at for at in often if at.is_integer()} == set(seldom)


def test_silent_fields_are_not_reported() -> None:
    gauge = Gauge(GaugeFacts(silent=frozenset(("runtime", "charge", "load"))), Random(2))
    said = gauge.read(0.0, pack(), 0.75, on_battery=True)
    assert (said.runtime_s, said.charge_pct, said.load_pct) == (None, None, None)


# --- Outages -------------------------------------------------------------------------------------------------------


def test_outages_are_as_long_as_they_are_said_to_be() -> None:
    """4,000 of them: the bins within two points, and the second strike in a quarter, after about two minutes."""
    site = OutageSite()
    drawn = [chance.sample(seed, site, faults=False) for seed in range(4000)]
    lengths = [cuts[0].end_s for cuts in drawn]
    for wanted in site.bins:
        share = mean(wanted.from_s <= length < wanted.to_s for length in lengths)
        assert share == pytest.approx(wanted.share, abs=0.025)
    again = [cuts for cuts in drawn if len(cuts) == 2]
    assert len(again) / len(drawn) == pytest.approx(0.25, abs=0.025)
    gaps = sorted(cuts[1].begin_s - cuts[0].end_s for cuts in again)
    assert gaps[len(gaps) // 2] == pytest.approx(120.0, rel=0.08)


def test_utility_flaps_only_with_faults() -> None:
    """Dips come before the outage, in order, and move it as a whole."""
    site = OutageSite(flapping_share=1.0, restrike_share=0.0)
    calm, flapping = (chance.sample(3, site, faults=faults) for faults in (False, True))
    assert len(calm) == 1
    assert 3 <= len(flapping) <= 7
    assert all(a.end_s < b.begin_s for a, b in itertools.pairwise(flapping))
    assert flapping[-1].end_s - flapping[-1].begin_s == pytest.approx(calm[0].end_s)
    sags = [chance.sample(seed, OutageSite(sag_share=1.0), faults=False)[0].end_s for seed in range(50)]
    assert all(0.5 <= length <= 10.0 for length in sags)


def test_the_same_seed_is_the_same_world() -> None:
    assert draw(11, Site(), faults=True) == draw(11, Site(), faults=True)
    assert draw(11, Site(), faults=True) != draw(12, Site(), faults=True)


def test_switching_faults_off_moves_nothing_else() -> None:
    """Each concern draws from its own stream: the battery, the gauge and the length stay what they were."""
    for seed in range(40):
        with_faults, without = (draw(seed, Site(), faults=faults) for faults in (True, False))
        assert with_faults.health == without.health
        assert with_faults.dies_at == pytest.approx(without.dies_at * with_faults.charge / without.charge)
        assert with_faults.gauge.kind is without.gauge.kind
        assert with_faults.cuts[-1].end_s - with_faults.cuts[-1].begin_s == pytest.approx(
            without.cuts[-1].end_s - without.cuts[-1].begin_s
        )


def test_streams_are_apart() -> None:
    first = [stream(1, "a").random(), stream(2, "a").random(), stream(1, "b").random()]
    assert len(set(first)) == 3
    assert stream(1, "a").random() == first[0]


# --- The host ------------------------------------------------------------------------------------------------------


def host(site: Site = CALM) -> Host:
    return Host(draw(1, site, faults=False), site, 0.0)


def run_to(one: Host, to_s: float) -> None:
    while one.next_change_s <= to_s:
        one.advance(one.next_change_s)
    one.advance(to_s)


def test_a_checkpoint_of_the_paused_step_loses_nothing() -> None:
    """20 s to durable, training stands meanwhile, the load is a third; and power lost later costs no work."""
    one = host()
    run_to(one, 100.0)
    answer = one.checkpoint(100.0, Conduct.PAUSE)
    assert answer.after_s == pytest.approx(20.0, abs=1.0)
    assert dict(answer.detail)["at_paused_step"] is True
    run_to(one, 130.0)
    assert (one.training, one.paused) == (False, True)
    assert one.load == pytest.approx(0.75 * 0.35)
    assert one.durable_s == pytest.approx(one.progress_s)
    assert one.progress_s == pytest.approx(100.35)
    assert one.lose_power(130.0)
    assert (one.rollback_s, one.power) == (0.0, Power.DARK)


def test_without_one_the_last_local_save_stands() -> None:
    """It saves every 300 s by itself; what came after that is done again."""
    one = host()
    run_to(one, 290.0)
    durable_s, progress_s = one.durable_s, one.progress_s
    assert progress_s - 320.0 <= durable_s <= progress_s - 20.0
    one.lose_power(290.0)
    assert one.rollback_s == pytest.approx(progress_s - durable_s)


def test_a_cap_slows_training_and_lowers_the_load() -> None:
    one = host()
    one.cap(0.0, on=True)
    run_to(one, 0.5)
    assert one.load == pytest.approx(0.75 * 0.67)
    run_to(one, 100.5)
    assert one.progress_s == pytest.approx(0.5 + 80.0)


def test_resume_overtakes_a_pause_that_is_late() -> None:
    """The later word counts: a trainer told to go on does not stand still because it was slow to hear the first."""
    site = CALM.model_copy(update={"trainer": TrainerSite(pause_late_s=30.0)})
    one = host(site)
    one.pause(10.0)
    one.resume(12.0)
    run_to(one, 100.0)
    assert one.training


def test_a_stop_takes_its_time_and_no_longer_than_it_is_given() -> None:
    """45 s by itself; 5 s where it is cut short, and a second to dark."""
    for force_s, off_s in ((110.0, 45.0), (5.0, 6.0)):
        one = host()
        one.power_off(10.0, force_s)
        run_to(one, 10.0 + off_s - 0.1)
        assert one.power is Power.STOPPING
        run_to(one, 10.0 + off_s)
        assert one.power is Power.OFF
        assert not one.lose_power(100.0), "what is off cannot lose power"


def test_a_trainer_that_dies_is_started_again() -> None:
    scene = draw(1, CALM, faults=False)
    dying = Host(replace(scene, trainer=replace(scene.trainer, dies=True)), CALM, 0.0)
    run_to(dying, 50.0)
    assert "reset" in dying.checkpoint(50.0, Conduct.PAUSE).failure
    assert (dying.trainer_alive, dying.training) == (False, False)
    assert "refused" in dying.checkpoint(51.0, Conduct.PAUSE).failure
    run_to(dying, 111.0)
    assert (dying.trainer_alive, dying.training) == (True, True)
    assert not dying.checkpoint(112.0, Conduct.PAUSE).failure, "once is enough"


# --- The whole -----------------------------------------------------------------------------------------------------


def one_hour(lasts_s: float = 3600.0) -> World:
    return World(replace(draw(3, CALM, faults=False), cuts=(chance.Cut(0.0, lasts_s),)), CALM, began_s=-10.0)


def test_a_host_that_nobody_saves_dies_when_the_battery_does() -> None:
    """A new battery at 75 % load: 360 s, to the second; then dark, until utility and the UPS are back."""
    world = one_hour()
    world.advance(359.9)
    assert world.host.power is Power.UP
    world.advance(360.1)
    assert world.host.power is Power.DARK
    assert world.host.dirty_at_s == pytest.approx([360.0])
    assert not world.output
    world.advance(3604.9)
    assert world.host.power is Power.DARK
    world.advance(3605.1)
    assert world.host.power is Power.UP, "always-on: AC has come back"
    assert not world.host.training


def test_a_host_that_is_off_while_its_supply_never_drops_is_stranded() -> None:
    """Off after 60 s, standby draws next to nothing, utility returns first: no BMC has seen AC come back."""
    world = one_hour(1000.0)
    world.advance(60.0)
    world.power_off(110.0)
    world.advance(300.0)
    assert (world.host.power, world.stranded) == (Power.OFF, False)
    assert world.ordered_off == (60.0, pytest.approx(1.0 - 60.0 / 360.0))
    world.advance(1001.0)
    assert (world.host.power, world.stranded, world.output) == (Power.OFF, True, True)
    world.press_button()
    assert (world.host.power, world.stranded) == (Power.UP, False)


def test_a_battery_that_empties_under_a_host_that_is_off_brings_it_back() -> None:
    """The outage outlasts the standby load: AC drops after all, and always-on does its work when it returns."""
    world = one_hour(3 * 3600.0)
    world.advance(60.0)
    world.power_off(110.0)
    world.advance(3 * 3600.0 - 1.0)
    assert not world.output
    world.advance(3 * 3600.0 + 6.0)
    assert world.host.power is Power.UP
    assert not world.host.dirty_at_s


def test_a_cycled_output_brings_it_back() -> None:
    world = one_hour()
    world.advance(60.0)
    world.power_off(110.0)
    world.advance(300.0)
    world.cycle(20.0)
    world.advance(330.0)
    assert not world.output
    world.advance(3610.0)
    assert world.host.power is Power.UP


def test_the_ups_reports_what_happens() -> None:
    world = one_hour()
    world.advance(-1.0)
    before = world.reading()
    assert (before.output_source, before.on_battery_s, before.input_present) == ("utility", 0.0, True)
    world.advance(30.0)
    after = world.reading(1000.0)
    assert (after.at_s, after.output_source, after.on_battery_s) == (1030.0, "battery", 30.0)
    assert after.charge_pct == pytest.approx(100.0 * (1.0 - 30.0 / 360.0), abs=0.06)
    assert after.load_pct == pytest.approx(75.0)
    assert after.runtime_s == pytest.approx(330.0)
