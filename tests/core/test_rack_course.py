"""The course of a long outage for all hosts of a UPS: each pauses and powers off as its own forecast says."""

from dataclasses import replace

import pytest

from powerguard.core.decide import conditions
from powerguard.core.energy import account, budget
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.policy import Policy, Shared
from powerguard.core.model.state import Battery, Feed, OnBattery, Outage, State, Supply, Trainer
from powerguard.core.size.host import Verdict
from powerguard.core.size.rack import Group, RackCourse, Stage, course

TABLE = ((0.25, 3600.0), (0.50, 1500.0), (1.00, 600.0))
POLICY = Policy(boot_id="b", ups="rack", runtime_table=TABLE, rating_w=20000.0, health=0.75, paused_load_share=0.6)
HIGH = Group(tier=2, count=2, load=0.15, load_paused=0.09, checkpoint_s=20.0)
MIDDLE = Group(tier=1, count=2, load=0.15, load_paused=0.09, checkpoint_s=60.0)
LOW = Group(tier=0, count=1, load=0.125, load_paused=0.075, checkpoint_s=60.0)


def _with_battery(times: float) -> Policy:
    """Return the policy with a battery of this many times the runtime."""
    return replace(POLICY, runtime_table=tuple((load, tau_s * times) for load, tau_s in TABLE))


def test_a_host_alone_gets_the_forecast_of_its_own_daemon() -> None:
    """To a second: the daemon foretells by the load that a pause brings, and here the load does just that."""
    one = Group(tier=0, count=1, load=0.6, load_paused=0.3, checkpoint_s=20.0)
    (found,) = course(POLICY, [one]).groups
    policy = replace(POLICY, paused_load_share=0.5)
    feed = Feed(supply=Supply.BATTERY, since_s=0.0)
    battery = Battery(at_s=0.0, used=0.0, left=0.75, load=0.6, health=0.75)
    trainer = Trainer(name="llm", conduct=Conduct.PAUSE, checkpoint_s=20.0)
    state = State(
        phase=OnBattery(outage=Outage(id="o", since_s=0.0, grade=Grade.FULL)),
        feed=feed,
        battery=battery,
        trainers=(trainer,),
    )
    now = conditions.outage_budget(policy, state, 0.0)
    predicted = {step.action: step.at_s for step in conditions.forecast(policy, state, now)}
    assert found.pause_s == pytest.approx(predicted["emergency_checkpoint"], abs=1.0)
    assert found.durable_s == pytest.approx(predicted["holding"], abs=1.0)
    assert found.commit_s == pytest.approx(predicted["shutdown"], abs=1.0)


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
        return course(_with_battery(factor), [HIGH, MIDDLE, LOW])

    found = by(times)
    if found.battery_times is None:
        assert found.verdict is Verdict.FULL
        return
    assert found.verdict is not Verdict.FULL
    assert by(times * found.battery_times).verdict is Verdict.FULL
    assert by(times * (found.battery_times - 0.02)).verdict is not Verdict.FULL


def test_a_checkpoint_that_takes_longer_than_the_battery_is_not_carried() -> None:
    never = replace(LOW, checkpoint_s=7200.0)
    found = course(POLICY, [HIGH, MIDDLE, never])
    *_, low = found.groups
    assert (low.verdict, low.durable_s, found.verdict) == (Verdict.NONE, None, Verdict.NONE)


def test_room_for_the_higher_tier_waits_for_a_checkpoint_that_fits() -> None:
    """The high hosts need the low one off after some 160 s; its checkpoint takes longer, and the battery lasts."""
    low = replace(LOW, load=0.3, load_paused=0.1, checkpoint_s=370.0)
    whole = course(_with_battery(0.3), [HIGH, low])
    high, found = whole.groups
    assert (found.verdict, found.durable_s, found.commit_s) == (Verdict.BARE, 370.0, pytest.approx(370.0))
    assert (high.verdict, whole.verdict) == (Verdict.SHORT, Verdict.BARE), "the least orderly stop is the rack's"


@pytest.mark.parametrize(("times", "grade"), [(1.0, Grade.FULL), (0.12, Grade.SHORT)])
def test_a_host_is_off_when_its_stop_takes_as_long_as_its_grade_allows(times: float, grade: Grade) -> None:
    one = Group(tier=0, count=1, load=0.6, load_paused=0.3, checkpoint_s=20.0)
    policy = _with_battery(times)
    found = course(policy, [one])
    (host,) = found.groups
    assert (host.grade, host.verdict, found.empty_s) == (grade, Verdict(grade.value), None)
    assert host.commit_s is not None
    assert host.off_s == pytest.approx(host.commit_s + budget.force_after_s(policy, grade))


def test_a_battery_that_ends_before_the_host_is_off() -> None:
    """It lasts for 2 s at the load of the pause, which begins at once; even a bare stop takes 3 s."""
    policy = _with_battery(0.001)
    found = course(policy, [Group(tier=0, count=1, load=0.6, load_paused=0.3, checkpoint_s=0.0)])
    assert (found.verdict, found.groups[0].off_s) == (Verdict.NONE, None)
    assert found.empty_s == pytest.approx(0.75 * account.tau_s(policy.runtime_table, 0.3))


def test_a_group_stops_in_its_own_time_and_makes_room_by_the_slowest() -> None:
    """Each tier begins earlier by one stop of the slowest group for each tier above it."""
    found = course(POLICY, [replace(HIGH, stop_s=30.0), MIDDLE, replace(LOW, stop_s=300.0)]).groups
    assert [each.shed_s for each in found] == [0.0, 300.0, 600.0]
    stops_s = [each.off_s - each.commit_s for each in found if each.off_s is not None and each.commit_s is not None]
    assert stops_s == pytest.approx([30.0, 110.0, 300.0])
    forced = course(replace(POLICY, force_after_s=100.0), [HIGH, MIDDLE]).groups[1]
    assert forced.shed_s == 100.0, "a host without its own time is forced off by then"


def test_a_stop_that_the_settings_set_for_the_ups_makes_the_room() -> None:
    """As the daemons reckon: each knows longest_stop_s of its settings, and no other host."""
    shared = Shared(hosts=3, longest_stop_s=200.0)
    found = course(replace(POLICY, shared=shared), [HIGH, MIDDLE, LOW]).groups
    assert [each.shed_s for each in found] == [0.0, 200.0, 400.0]
    assert [each.shed_s for each in course(replace(POLICY, shared=Shared(hosts=3)), [HIGH, MIDDLE]).groups] == [
        0.0,
        110.0,
    ]


def test_hosts_that_draw_more_than_the_ups_carries() -> None:
    found = course(POLICY, [replace(HIGH, count=9)])
    assert (found.verdict, found.moments, found.battery_times) == (Verdict.OVERLOAD, (), None)
    assert course(POLICY, [replace(HIGH, count=2, load=0.5)]).verdict is Verdict.FULL, "all of it is not too much"


def test_alike_hosts_of_one_tier_decide_together() -> None:
    """Two groups that differ in name only go at the same moments: by one reading, before any load has fallen."""
    one, other = course(POLICY, [replace(HIGH, count=1), replace(HIGH, count=1)]).groups
    assert (one.pause_s, one.durable_s, one.commit_s) == (other.pause_s, other.durable_s, other.commit_s)
    (both,) = course(POLICY, [HIGH]).groups
    assert (both.pause_s, both.commit_s) == pytest.approx((one.pause_s, one.commit_s)), "each counts on its own pause"
    assert {moment.stage for moment in course(POLICY, [HIGH]).moments} == set(Stage) - {Stage.TRAINING}


def test_hosts_that_are_nearly_alike_decide_by_the_same_reading() -> None:
    """They pause at one poll and stop at another; each is durable, and off, after its own time."""
    quick = Group(tier=0, count=1, load=0.2, load_paused=0.1, checkpoint_s=20.0, stop_s=60.0)
    slow = replace(quick, checkpoint_s=20.25, stop_s=60.25)
    one, other = course(POLICY, [quick, slow]).groups
    assert (one.pause_s, one.commit_s) == (other.pause_s, other.commit_s)
    assert one.durable_s is not None
    assert one.off_s is not None
    assert (other.durable_s, other.off_s) == (pytest.approx(one.durable_s + 0.25), pytest.approx(one.off_s + 0.25))
    one, other = course(POLICY, [quick, replace(slow, checkpoint_s=30.0)]).groups
    assert one.pause_s != other.pause_s, "more than a poll apart"
