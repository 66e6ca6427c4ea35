"""The course of a long outage for all hosts of a UPS: each pauses and powers off as its own forecast says."""

from dataclasses import replace

import pytest

from powerguard.core.decide import conditions
from powerguard.core.energy import account
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Battery, Feed, OnBattery, Outage, State, Supply, Trainer
from powerguard.core.size.host import Verdict
from powerguard.core.size.rack import Group, RackCourse, Stage, course

TABLE = ((0.25, 3600.0), (0.50, 1500.0), (1.00, 600.0))
POLICY = Policy(boot_id="b", ups="rack", runtime_table=TABLE, rating_w=20000.0, health=0.75, paused_load_share=0.6)
HIGH = Group(tier=2, count=2, load=0.15, load_paused=0.09, checkpoint_s=20.0)
MIDDLE = Group(tier=1, count=2, load=0.15, load_paused=0.09, checkpoint_s=60.0)
LOW = Group(tier=0, count=1, load=0.125, load_paused=0.075, checkpoint_s=60.0)


def test_a_host_alone_gets_the_forecast_of_its_own_daemon() -> None:
    """To a second: the daemon foretells by the load that a pause brings, and here the load does just that."""
    one = Group(tier=0, count=1, load=0.6, load_paused=0.36, checkpoint_s=20.0)
    (found,) = course(POLICY, [one]).groups
    feed = Feed(supply=Supply.BATTERY, since_s=0.0)
    battery = Battery(at_s=0.0, used=0.0, left=0.75, load=0.6, health=0.75)
    trainer = Trainer(name="llm", conduct=Conduct.PAUSE, checkpoint_s=20.0)
    state = State(
        phase=OnBattery(outage=Outage(id="o", since_s=0.0, grade=Grade.FULL)),
        feed=feed,
        battery=battery,
        trainers=(trainer,),
    )
    now = conditions.outage_budget(POLICY, state, 0.0)
    told = {step.action: step.at_s for step in conditions.forecast(POLICY, state, now)}
    assert found.pause_s == pytest.approx(told["emergency_checkpoint"], abs=1.0)
    assert found.durable_s == pytest.approx(told["holding"], abs=1.0)
    assert found.commit_s == pytest.approx(told["shutdown"], abs=1.0)


def test_tiers_go_in_order_and_each_change_of_the_load_is_listed() -> None:
    found = course(POLICY, [HIGH, MIDDLE, LOW])
    high, middle, low = found.groups
    assert found.verdict is Verdict.FULL
    for earlier, later in ((low, middle), (middle, high)):
        assert earlier.pause_s is not None
        assert later.pause_s is not None
        assert earlier.commit_s is not None
        assert later.commit_s is not None
        assert earlier.pause_s < later.pause_s
        assert earlier.commit_s < later.commit_s
    loads = [moment.load for moment in found.moments]
    assert loads == sorted(loads, reverse=True)
    assert loads[-1] == 0.0
    left = [moment.left for moment in found.moments]
    assert left == sorted(left, reverse=True)
    assert left[-1] > 0.0


def test_no_energy_is_made_or_lost() -> None:
    """The energy that is left at each moment is what the loads before have left of it."""
    found = course(POLICY, [HIGH, MIDDLE, LOW])
    battery = Battery(at_s=0.0, used=0.0, left=0.75, load=found.load, health=0.75)
    for moment in found.moments:
        battery = account.advance(POLICY, battery, moment.at_s, draining=True)
        assert battery.left == pytest.approx(moment.left, abs=1e-9)
        battery = replace(battery, load=moment.load)


@pytest.mark.parametrize("times", [0.1, 0.2, 0.5, 1.0, 2.0])
def test_the_battery_that_it_names_is_the_smallest_that_carries_all(times: float) -> None:
    def by(factor: float) -> RackCourse:
        table = tuple((load, tau_s * factor) for load, tau_s in TABLE)
        return course(replace(POLICY, runtime_table=table), [HIGH, MIDDLE, LOW])

    found = by(times)
    if found.battery_times is None:
        assert found.verdict is Verdict.FULL
        return
    assert found.verdict is not Verdict.FULL
    assert by(times * found.battery_times).verdict is Verdict.FULL
    assert by(times * (found.battery_times - 0.02)).verdict is not Verdict.FULL


def test_a_checkpoint_that_takes_longer_than_the_battery_is_not_carried() -> None:
    never = replace(LOW, checkpoint_s=7200.0)
    *_, low = course(POLICY, [HIGH, MIDDLE, never]).groups
    assert (low.verdict, low.durable_s) == (Verdict.NONE, None)


def test_hosts_that_draw_more_than_the_ups_carries() -> None:
    found = course(POLICY, [replace(HIGH, count=9)])
    assert (found.verdict, found.moments, found.battery_times) == (Verdict.OVERLOAD, (), None)


def test_alike_hosts_of_one_tier_decide_together() -> None:
    """Two groups that differ in name only go at the same moments: by one reading, before any load has fallen."""
    one, other = course(POLICY, [replace(HIGH, count=1), replace(HIGH, count=1)]).groups
    assert (one.pause_s, one.durable_s, one.commit_s) == (other.pause_s, other.durable_s, other.commit_s)
    assert {moment.stage for moment in course(POLICY, [HIGH]).moments} == set(Stage) - {Stage.TRAINING}
