"""Power-on methods: for when each is armed, what is kept, what is disarmed, and when a power-off may become a reboot.

The stories are in tests/scenarios/ (methods-*, reboot-*, foreign-stop-*, outputs-*, back-too-early-*); here are edges.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from powerguard.core import obligations
from powerguard.core.comeback import methods
from powerguard.core.comeback.recovery import Stored, restore
from powerguard.core.decide.machine import step
from powerguard.core.decide.turn import Turn
from powerguard.core.model.actions import (
    Action,
    ArmPowerOn,
    CheckPowerOn,
    Detail,
    DisarmPowerOn,
    EnsurePolicy,
    Grade,
    Level,
    PowerOff,
    PowerOnMethod,
    Reboot,
    RestorePolicy,
    ResumeTraining,
)
from powerguard.core.model.events import Done, Failed, OutputSource, Reading
from powerguard.core.model.policy import FeedPolicy, Mode, Policy
from powerguard.core.model.state import (
    Armed,
    Battery,
    Feed,
    Holding,
    Obligation,
    OnBattery,
    Online,
    Outage,
    Phase,
    Recovery,
    Shutdown,
    State,
    Supplied,
    Supply,
    TemporaryPolicy,
)

POLICY = Policy(
    boot_id="boot",
    ups="ups",
    runtime_table=((0.5, 600.0), (1.0, 240.0)),
    methods=tuple(PowerOnMethod),
    outputs=("ups",),
    late_reboot=True,
)
OUTAGE = Outage(id="o", since_s=50.0, grade=Grade.FULL)
NOW_S = 100.0


def reading(source: OutputSource = OutputSource.UTILITY, at_s: float = NOW_S, ups: str = "ups") -> Reading:
    return Reading(at_s=at_s, ups=ups, source="snmp", output_source=source)


def feed(supply: Supply = Supply.BATTERY, since_s: float = 50.0, at_s: float = NOW_S, ups: str = "ups") -> Feed:
    source = OutputSource.UTILITY if supply is Supply.UTILITY else OutputSource.BATTERY
    return Feed(supply=supply, since_s=since_s, reading=reading(source, at_s, ups))


def turn(phase: Phase, *owed: Obligation, policy: Policy = POLICY, **state: Any) -> Turn:  # noqa: ANN401 - fields
    known = {"feed": feed(), "battery": Battery(at_s=NOW_S, left=0.5, load=0.5), **state}
    return Turn(policy, State(phase=phase, owed=owed, **known), NOW_S)


def shutdown(**fields: object) -> Shutdown:
    known = {"latched_s": 90.0, "because": "budget", "ordered": True, "force_at_s": 180.0, **fields}
    return Shutdown(outage=OUTAGE, boot_id="boot", **known)  # type: ignore[arg-type]


def armed(method: PowerOnMethod = PowerOnMethod.RTC, **fields: object) -> Armed:
    return Armed(**{"method": method, "outage": "o", "at_s": 90.0, "acts_at_s": 300.0, **fields})  # type: ignore[arg-type]


def done(action: Action, **detail: object) -> Done:
    return Done(at_s=NOW_S, action=action, took_s=0.1, detail=tuple(detail.items()))  # type: ignore[arg-type]


def failed(action: Action) -> Failed:
    return Failed(at_s=NOW_S, action=action, took_s=0.1, reason="no such device")


def times(at: Turn) -> dict[PowerOnMethod, float]:
    return {action.method: action.in_s for action in at.actions if isinstance(action, ArmPowerOn)}


def notes(at: Turn) -> list[str]:
    return [note.event for note in at.notes]


def story(at: Turn) -> list[tuple[str, str, Level, Detail]]:
    return [(note.event, note.because, note.level, note.numbers) for note in at.notes]


# --- When -------------------------------------------------------------------------------------------------------------


def test_each_way_for_its_own_time() -> None:
    """The cut comes 30 s after the host is off, the sentinel may look then; clock and watchdog wait for the battery."""
    at = turn(Holding(outage=OUTAGE, began_s=60.0))
    ids = methods.arm(at, OUTAGE, POLICY.methods, off_in_s=50.0, limit_s=5.0)
    assert times(at) == {
        PowerOnMethod.OUTPUT: 80.0,
        PowerOnMethod.RTC: 4110.0,
        PowerOnMethod.SENTINEL: 80.0,
        PowerOnMethod.WATCHDOG: 4170.0,
    }
    assert [each.order for each in at.state.armed] == list(ids) == [action.id for action in at.actions]
    assert [each.acts_at_s for each in at.state.armed] == [180.0, 4210.0, 180.0, 4270.0]
    assert {(each.ups, each.outage, each.at_s, each.confirmed) for each in at.state.armed} == {
        ("ups", "o", NOW_S, False),
        ("", "o", NOW_S, False),
    }
    orders = [action for action in at.actions if isinstance(action, ArmPowerOn)]
    assert [(action.by_s, action.outage, action.ups) for action in orders] == [
        (105.0, "o", ups) for ups in ("ups", "", "", "")
    ]


@pytest.mark.parametrize(
    ("known", "dark_in_s"),
    [
        ({"feed": replace(feed(), countdown_at_s=400.0)}, 300.0),
        ({"feed": replace(feed(), fsd_at_s=140.0)}, 50.0),
        ({}, 0.5 * 600.0 * 0.54 / 0.04),
        ({"battery": Battery(at_s=NOW_S, load=0.5)}, 3600.0),
    ],
    ids=["countdown", "fsd before the host is off", "the battery's end, the host being off", "nobody knows"],
)
def test_nothing_acts_before_the_power_may_be_cut(known: dict[str, object], dark_in_s: float) -> None:
    """Where no output is ordered off: the cut is somebody else's countdown, or the end of the battery."""
    at = turn(
        Holding(outage=OUTAGE, began_s=60.0),
        policy=replace(POLICY, methods=(PowerOnMethod.RTC, PowerOnMethod.WATCHDOG)),
        **known,
    )
    methods.arm(at, OUTAGE, tuple(PowerOnMethod), off_in_s=50.0, limit_s=5.0)
    wanted = {PowerOnMethod.RTC: dark_in_s + 60.0, PowerOnMethod.WATCHDOG: dark_in_s + 120.0}
    assert times(at) == pytest.approx(wanted, abs=0.06)


@pytest.mark.parametrize(("seconds", "orders"), [(964.0, 1), (965.0, 0)])
def test_a_watchdog_that_would_fire_on_battery_is_not_armed(seconds: float, orders: int) -> None:
    """It counts to 6553 s, and the battery may last longer: the host would be started in the dark."""
    long = replace(POLICY, runtime_table=((0.5, seconds),), methods=(PowerOnMethod.WATCHDOG,))
    at = turn(Holding(outage=OUTAGE, began_s=60.0), battery=Battery(at_s=NOW_S, left=0.4942, load=0.5), policy=long)
    methods.arm(at, OUTAGE, tuple(PowerOnMethod), off_in_s=50.0, limit_s=5.0)
    assert len(at.actions) == orders
    because = "the battery may last for 6438 s, and it counts to 6553 at most"
    assert story(at) == (
        [] if orders else [("power_on_blocked", because, Level.WARNING, (("method", PowerOnMethod.WATCHDOG),))]
    )


def test_a_watchdog_counts_to_its_last_second() -> None:
    only = replace(POLICY, methods=(PowerOnMethod.WATCHDOG,))
    at = turn(Holding(outage=OUTAGE, began_s=60.0), policy=only, feed=replace(feed(), countdown_at_s=NOW_S + 6433.0))
    methods.arm(at, OUTAGE, tuple(PowerOnMethod), off_in_s=50.0, limit_s=5.0)
    assert times(at) == {PowerOnMethod.WATCHDOG: 6553.0}


def test_only_what_the_settings_name_and_what_is_asked_for() -> None:
    at = turn(Holding(outage=OUTAGE, began_s=60.0), policy=replace(POLICY, methods=(PowerOnMethod.RTC,)))
    assert len(methods.arm(at, OUTAGE, tuple(PowerOnMethod), off_in_s=50.0, limit_s=5.0)) == 1
    assert methods.arm(at, OUTAGE, (PowerOnMethod.SENTINEL,), off_in_s=50.0, limit_s=5.0) == ()
    assert [each.method for each in at.state.armed] == [PowerOnMethod.RTC]


def test_armed_again_counts_and_an_output_is_never_sent_twice() -> None:
    was = (
        armed(PowerOnMethod.OUTPUT, ups="ups", confirmed=True),
        armed(PowerOnMethod.RTC, confirmed=True, order="old", leaving=True),
    )
    at = turn(Holding(outage=OUTAGE, began_s=60.0), *was)
    methods.arm(at, OUTAGE, (PowerOnMethod.OUTPUT, PowerOnMethod.RTC), off_in_s=50.0, limit_s=5.0)
    assert list(times(at)) == [PowerOnMethod.RTC]
    output, clock = at.state.armed
    assert output == was[0]
    assert (clock.order, clock.confirmed, clock.leaving) == (at.actions[0].id, False, False)


def several(*supplies: Supply, presumed: bool = False) -> tuple[Supplied, ...]:
    return tuple(
        Supplied(ups=name, feed=feed(supply, ups=name), battery=Battery(), presumed=presumed)
        for name, supply in zip("abc", supplies, strict=False)
    )


def fed_by(names: str) -> Policy:
    feeds = tuple(FeedPolicy(policy=replace(POLICY, ups=name)) for name in names)
    return replace(POLICY, methods=(PowerOnMethod.OUTPUT,), feeds=feeds)


TWO = fed_by("ab")
ON_BATTERY = several(Supply.BATTERY, Supply.BATTERY, Supply.BATTERY)
ELSE_S = "another feed is on utility, so AC would not drop at this host for long enough"


@pytest.mark.parametrize(
    ("made", "outputs", "upses", "known", "because"),
    [
        (TWO, ("a", "b"), ON_BATTERY[:2], {}, ""),
        (TWO, ("a",), ON_BATTERY[:2], {}, "b would stay on, so AC would never drop at this host"),
        (fed_by("abc"), ("a",), ON_BATTERY, {}, "b, c would stay on, so AC would never drop at this host"),
        (TWO, ("a", "b"), several(Supply.BATTERY, Supply.UTILITY), {}, ELSE_S),
        (TWO, ("a", "b"), several(Supply.BATTERY, Supply.UNKNOWN), {}, ELSE_S),
        (TWO, ("a", "b"), several(Supply.BATTERY, Supply.UTILITY, presumed=True), {}, ""),
        (
            TWO,
            ("a", "b"),
            ON_BATTERY[:2],
            {"feed": replace(feed(), countdown_at_s=900.0)},
            "another program has started a countdown at the UPS: powerguard leaves it alone",
        ),
    ],
    ids=["both", "one of two", "one of three", "one on utility", "one unknown", "one presumed dark", "a countdown"],
)
def test_feeds_that_do_not_go_off_together_are_not_cut(
    made: Policy, outputs: tuple[str, ...], upses: tuple[Supplied, ...], known: dict[str, object], because: str
) -> None:
    at = turn(Holding(outage=OUTAGE, began_s=60.0), policy=replace(made, outputs=outputs), upses=upses, **known)
    methods.arm(at, OUTAGE, (PowerOnMethod.OUTPUT,), off_in_s=50.0, limit_s=5.0)
    assert [action.ups for action in at.actions if isinstance(action, ArmPowerOn)] == ([] if because else list(outputs))
    found = [("power_on_blocked", because, Level.WARNING, (("method", PowerOnMethod.OUTPUT),))]
    assert story(at) == (found if because else []), "logged once"


# --- Too often --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("boots", "before_s", "after_s"),
    [
        ((), 0.0, 0.0),
        ((10.0, 50.0), 0.0, 0.0),
        ((-3500.0, 10.0, 50.0), 0.0, 3600.0),
        ((-3500.1, 10.0, 50.0), 0.0, 0.0),
        ((10.0, 50.0, 90.0), 3600.0, 7200.0),
        ((90.0,), 7200.0, 14400.0),
        ((90.0,), 14400.0, 14400.0),
    ],
)
def test_back_three_times_in_an_hour_waits_for_one_two_and_four(
    boots: tuple[float, ...], before_s: float, after_s: float
) -> None:
    at = turn(Recovery(outage=OUTAGE, began_s=90.0, clean=True))
    outage = replace(OUTAGE, boots=boots, back_off_s=before_s)
    assert methods.backed_off(at, outage) == replace(outage, back_off_s=after_s)
    because = f"back {len(boots)} times in this outage"
    found = [("return_put_off", because, Level.WARNING, (("back_off_s", after_s),))]
    assert story(at) == (found if after_s else [])


def test_who_was_asked_to_stay_away_is_not_woken_sooner() -> None:
    """The cut itself, and the watchdog, cannot wait so long; and neither brings a host back while the power is out."""
    at = turn(Holding(outage=OUTAGE, began_s=60.0))
    methods.arm(at, replace(OUTAGE, back_off_s=5000.0), tuple(PowerOnMethod), off_in_s=50.0, limit_s=5.0)
    assert times(at) == {
        PowerOnMethod.OUTPUT: 80.0,
        PowerOnMethod.RTC: 5000.0,
        PowerOnMethod.SENTINEL: 5000.0,
        PowerOnMethod.WATCHDOG: 4170.0,
    }


# --- How it ended -----------------------------------------------------------------------------------------------------


def order(method: PowerOnMethod = PowerOnMethod.RTC) -> ArmPowerOn:
    return ArmPowerOn(id="a-1", by_s=105.0, method=method, outage="o", in_s=210.0)


def test_what_was_read_back_is_armed() -> None:
    mine = (armed(PowerOnMethod.OUTPUT, ups="ups", order="a-1"), armed(order="other"))
    at = turn(shutdown(), *mine, policy=replace(POLICY, methods=(PowerOnMethod.OUTPUT,)))
    obligations.handle(at, done(order(PowerOnMethod.OUTPUT), in_s=240.04, returns="cycles"))
    first, second = at.state.armed
    assert first == armed(PowerOnMethod.OUTPUT, ups="ups", confirmed=True, returns="cycles", acts_at_s=90.0 + 240.04)
    assert second == armed(order="other")
    assert at.notes[0].numbers == (("method", PowerOnMethod.OUTPUT), ("in_s", 240.0), ("returns", "cycles"))


def test_once_the_cut_is_certain_nobody_waits_for_the_batterys_end() -> None:
    """All that act after it are ordered anew, by the time that was read back; with two outputs, when both are told."""
    two = replace(POLICY, outputs=("a", "b"))
    first = armed(PowerOnMethod.OUTPUT, ups="a", order="a-1")
    at = turn(shutdown(), first, armed(PowerOnMethod.OUTPUT, ups="b", order="b-1", at_s=NOW_S), armed(), policy=two)
    obligations.handle(at, done(order(PowerOnMethod.OUTPUT), in_s=100))
    assert at.actions == []
    obligations.handle(at, done(replace(order(PowerOnMethod.OUTPUT), id="b-1"), in_s=120))
    assert times(at) == {
        PowerOnMethod.RTC: 120.0 + 60.0,
        PowerOnMethod.SENTINEL: 120.0 + 30.0,
        PowerOnMethod.WATCHDOG: 120.0 + 120.0,
    }
    assert len(at.state.armed) == 5
    sooner = turn(
        shutdown(),
        armed(PowerOnMethod.OUTPUT, ups="ups", order="a-1"),
        policy=replace(POLICY, methods=(PowerOnMethod.OUTPUT, PowerOnMethod.RTC)),
    )
    obligations.handle(sooner, done(order(PowerOnMethod.OUTPUT), in_s=10.5))
    assert times(sooner) == {PowerOnMethod.RTC: 0.5 + 60.0}, "the cut comes at any moment"
    foreign = turn(OnBattery(outage=OUTAGE), armed(PowerOnMethod.OUTPUT, ups="ups", order="a-1"))
    obligations.handle(foreign, done(order(PowerOnMethod.OUTPUT), in_s=100))
    assert foreign.actions == [], "no cut of ours, no phase of ours"


@pytest.mark.parametrize(
    ("returns", "in_s"),
    [(("cycles", "cycles"), 4110.0), (("cycles", "aborts"), 180.0), (("cycles", "unknown"), 180.0), (("", ""), 180.0)],
)
@pytest.mark.parametrize("countdown_at_s", [None, NOW_S + 120.0])
def test_where_ac_drops_for_certain_the_clock_waits_for_the_batterys_end(
    returns: tuple[str, str], in_s: float, countdown_at_s: float | None
) -> None:
    """Then only a host whose BMC has lied needs it, and an alarm a minute after the cut rings in the dark.

    Where AC may stay, each second of waiting is one for nothing. The others look for themselves, or are forgotten.
    """
    two = replace(POLICY, outputs=("a", "b"))
    one = armed(PowerOnMethod.OUTPUT, ups="a", at_s=NOW_S, acts_at_s=NOW_S + 120.0, confirmed=True, returns=returns[0])
    other = armed(PowerOnMethod.OUTPUT, ups="b", order="a-1", at_s=NOW_S)
    at = turn(shutdown(), one, other, policy=two, feed=replace(feed(), countdown_at_s=countdown_at_s))
    obligations.handle(at, done(order(PowerOnMethod.OUTPUT), in_s=120, returns=returns[1]))
    assert times(at) == {PowerOnMethod.RTC: in_s, PowerOnMethod.SENTINEL: 150.0, PowerOnMethod.WATCHDOG: 240.0}


def test_the_clock_never_rings_before_the_cut() -> None:
    """A battery that is all but empty, and a UPS that waits for longer than that."""
    empty = {"battery": Battery(at_s=NOW_S, left=0.0, load=0.5)}
    one = armed(PowerOnMethod.OUTPUT, ups="ups", order="a-1", at_s=NOW_S)
    at = turn(shutdown(), one, policy=replace(POLICY, methods=(PowerOnMethod.OUTPUT, PowerOnMethod.RTC)), **empty)
    obligations.handle(at, done(order(PowerOnMethod.OUTPUT), in_s=300, returns="cycles"))
    assert times(at) == {PowerOnMethod.RTC: 360.0}


def test_an_answer_without_figures_is_one_all_the_same() -> None:
    at = turn(shutdown(), armed(order="a-1"))
    obligations.handle(at, done(order(), in_s="soon", returns=3))
    assert at.state.armed == (armed(confirmed=True),)


def test_what_failed_may_be_armed_for_all_that() -> None:
    """A read-back that timed out: it stands, unconfirmed, so that it is taken back at the next start."""
    at = turn(shutdown(), armed(order="a-1"))
    obligations.handle(at, failed(order()))
    assert at.state.armed == (armed(retry_at_s=NOW_S + methods.ARM_AGAIN_S),)
    assert story(at) == [
        ("power_on_blocked", "no such device", Level.WARNING, (("method", PowerOnMethod.RTC), ("took_s", 0.1)))
    ]


def test_what_was_certainly_not_done_stands_in_nobodys_way() -> None:
    """A card that lets nobody write: the late reboot is not excluded by a cut that never comes."""
    at = turn(shutdown(), armed(PowerOnMethod.OUTPUT, ups="ups", order="a-1"))
    obligations.handle(at, replace(failed(order(PowerOnMethod.OUTPUT)), harmless=True))
    assert at.state.armed == ()
    assert notes(at) == ["power_on_blocked"]


def test_an_order_that_is_not_known_changes_nothing() -> None:
    for outcome in (done(order(), in_s=1.0), failed(order())):
        at = turn(shutdown(), armed(order="other"))
        obligations.handle(at, outcome)
        assert at.state.armed == (armed(order="other"),)
    at = turn(Online(), armed(order="other"))
    obligations.handle(at, done(DisarmPowerOn(id="d-1", by_s=105.0, method=PowerOnMethod.RTC, outage="o")))
    assert at.state.armed == (armed(order="other"),)


def test_in_dry_run_nothing_is_armed() -> None:
    at = turn(shutdown(), policy=replace(POLICY, mode=Mode.DRY_RUN, methods=(PowerOnMethod.RTC,)))
    methods.arm(at, OUTAGE, (PowerOnMethod.RTC,), off_in_s=60.0, limit_s=5.0)
    obligations.handle(at, done(at.actions[0], dry_run=True))
    assert (at.state.armed, at.notes) == ((), [])


def test_a_dry_run_that_arms_again_does_not_forget_what_may_be_armed_in_earnest() -> None:
    """The daemon was killed as it armed, and the settings have become a dry-run: what became of it is not known."""
    lost = (armed(order="gone-1"),)
    at = turn(shutdown(), *lost, policy=replace(POLICY, mode=Mode.DRY_RUN, methods=(PowerOnMethod.RTC,)))
    methods.after_restart(at, lost)
    obligations.handle(at, done(at.actions[0], dry_run=True))
    assert [(each.method, each.order, each.recorded) for each in at.state.armed] == [(PowerOnMethod.RTC, None, False)]


def test_a_dry_run_that_arms_what_only_lost_history_may_have_armed_has_recorded_it() -> None:
    """Else a method of which nothing is known would raise its alarm for as long as the host stays in dry-run."""
    at = turn(shutdown(), armed(outage=""), policy=replace(POLICY, mode=Mode.DRY_RUN, methods=(PowerOnMethod.RTC,)))
    methods.arm(at, OUTAGE, (PowerOnMethod.RTC,), off_in_s=60.0, limit_s=5.0)
    obligations.handle(at, done(at.actions[0], dry_run=True))
    assert at.state.armed == ()


def test_what_dry_run_has_recorded_is_taken_back_without_a_word() -> None:
    """Its outcome was lost with the daemon: no device has such an order, nor confirms that it has none."""
    at = turn(Online(), armed(recorded=True), armed(PowerOnMethod.SENTINEL, outage=""))
    methods.reconcile(at)
    for action in tuple(at.actions):
        obligations.handle(at, done(action, dry_run=True))
    assert (at.state.armed, at.notes) == ((), [])


def test_a_dry_run_does_not_forget_what_was_armed_in_earnest() -> None:
    """Settings that have become a dry-run: a BMC that counts on goes on counting, and somebody must be told."""
    was = (armed(PowerOnMethod.WATCHDOG, confirmed=True), armed(), armed(PowerOnMethod.SENTINEL, recorded=True))
    at = turn(Online(), *was, TemporaryPolicy(policy="last-state"), policy=replace(POLICY, mode=Mode.DRY_RUN))
    methods.reconcile(at)
    methods.reconcile_policy(at)
    for action in tuple(at.actions):
        obligations.handle(at, done(action, dry_run=True))
    kept = [(each.method, each.order, each.leaving) for each in at.state.armed]
    assert kept == [(PowerOnMethod.WATCHDOG, None, True), (PowerOnMethod.RTC, None, True)], (
        "one that is not confirmed may be armed, too"
    )
    assert at.state.temporary_policy == TemporaryPolicy(
        policy="last-state", at_s=NOW_S, retry_at_s=NOW_S + methods.RESTORE_AGAIN_S
    )
    assert notes(at)[0] == "power_on_stuck_raised"


def test_a_dry_run_that_is_back_on_battery_does_not_arm_without_end() -> None:
    """Whatever it records is not armed, and so would be ordered anew with each event."""
    at = turn(Recovery(outage=OUTAGE, began_s=90.0, clean=False), policy=replace(POLICY, mode=Mode.DRY_RUN))
    methods.reconcile(at)
    assert at.actions == []


def test_a_check_that_fails_says_what_is_blocked() -> None:
    at = turn(OnBattery(outage=OUTAGE))
    methods.check(at)
    assert [(type(action), getattr(action, "method", None)) for action in at.actions] == [
        (CheckPowerOn, method) for method in PowerOnMethod
    ]
    assert [action.ups for action in at.actions if isinstance(action, CheckPowerOn)] == ["ups", "", "", ""]
    obligations.handle(at, done(at.actions[0]))
    assert at.notes == []
    obligations.handle(at, failed(at.actions[1]))
    assert story(at) == [("power_on_blocked", "no such device", Level.WARNING, (("method", PowerOnMethod.RTC),))]


# --- Taken back -------------------------------------------------------------------------------------------------------


def test_what_has_no_outage_to_act_for_is_taken_back() -> None:
    """One order each; what fails is told once, and each end as it comes."""
    at = turn(Online(), armed(), armed(PowerOnMethod.WATCHDOG))
    methods.reconcile(at)
    assert [type(action) for action in at.actions] == [DisarmPowerOn, DisarmPowerOn]
    assert all(each.leaving and each.order and each.at_s == NOW_S for each in at.state.armed)
    methods.reconcile(at)
    assert len(at.actions) == 2, "they are in flight"
    first, second = at.actions
    obligations.handle(at, failed(first))
    obligations.handle(at, done(second, disarmed=True, because="stopped and read back"))
    assert [each.method for each in at.state.armed] == [PowerOnMethod.RTC]
    methods.reconcile(at)
    found = [(note.event, note.because, note.level) for note in at.notes]
    assert found == [
        ("power_on_stuck_raised", "rtc: no such device", Level.ERROR),
        ("power_on_disarmed", "stopped and read back", Level.INFO),
    ]
    at.now_s += methods.AGAIN_S
    methods.reconcile(at)
    obligations.handle(at, done(at.actions[2]))
    assert at.state.armed == ()
    methods.reconcile(at)
    assert [(note.event, note.because) for note in at.notes[2:]] == [
        ("power_on_disarmed", "confirmed by the device"),
        ("power_on_stuck_cleared", "every method is disarmed"),
    ]


def test_what_was_not_armed_any_more_is_not_reported_as_taken_back() -> None:
    """An alarm that has gone off, a countdown that somebody called off. Of no outage of ours it is no news at all."""
    at = turn(
        Online(),
        armed(order="d-1"),
        armed(PowerOnMethod.OUTPUT, ups="ups", outage="", order="d-2"),
        armed(PowerOnMethod.WATCHDOG),
    )
    for id_, method, outage in (("d-1", PowerOnMethod.RTC, "o"), ("d-2", PowerOnMethod.OUTPUT, "")):
        order = DisarmPowerOn(id=id_, by_s=105.0, method=method, outage=outage)
        obligations.handle(at, done(order, disarmed=False, **({"because": "it has gone off"} if outage else {})))
    assert [each.method for each in at.state.armed] == [PowerOnMethod.WATCHDOG]
    methods.reconcile(at)
    obligations.handle(at, done(at.actions[0], disarmed=False))
    assert story(at) == [
        ("power_on_found_disarmed", "it has gone off", Level.INFO, (("method", PowerOnMethod.RTC),)),
        (
            "power_on_found_disarmed",
            "the device had it disarmed already",
            Level.INFO,
            (("method", PowerOnMethod.WATCHDOG),),
        ),
    ]


def test_an_order_to_cut_the_output_whose_time_has_passed_is_found_disarmed() -> None:
    """The UPS never confirmed it, and the host still has power ten seconds after the cut was due."""
    for confirmed, late_s, found in ((False, 10.1, True), (False, 9.9, False), (True, 10.1, False)):
        cut = armed(PowerOnMethod.OUTPUT, ups="ups", acts_at_s=NOW_S - late_s, confirmed=confirmed)
        at = turn(Online(), cut, feed=feed(Supply.UTILITY))
        methods.reconcile(at)
        because = "the time of its order has passed, and the host has power"
        listed = [("power_on_found_disarmed", because, Level.INFO, (("method", PowerOnMethod.OUTPUT),))]
        assert story(at) == (listed if found else [])
        assert bool(at.state.armed) is not found


def test_what_cannot_be_taken_back_is_tried_each_minute_until_it_ought_to_have_acted() -> None:
    """Then ever less often, down to once an hour: a sentinel that is switched off for a week is no news each minute."""
    at = turn(Online(), armed(at_s=NOW_S, acts_at_s=NOW_S + 150.0))
    tried = []
    while at.now_s < NOW_S + 30000.0:
        methods.reconcile(at)
        if at.actions:
            tried.append(at.now_s - NOW_S)
            obligations.handle(at, failed(at.actions.pop()))
        at.now_s += 10.0
    gaps = [later - before for before, later in pairwise(tried)]
    assert tried[:5] == [0.0, 60.0, 120.0, 180.0, 240.0]
    assert all(before <= later for before, later in pairwise(gaps))
    assert gaps[4:7] == [90.0, 180.0, 360.0]
    assert set(gaps[-3:]) == {3600.0}
    assert notes(at) == ["power_on_stuck_raised"]


def test_what_the_settings_name_no_more_is_kept_for_a_day_and_given_up() -> None:
    """Nobody is asked, as nobody is there. Named again within the day, it is taken back."""
    was = (armed(), armed(PowerOnMethod.OUTPUT, ups="b"))
    at = turn(Online(), *was, policy=replace(POLICY, methods=(PowerOnMethod.OUTPUT,)))
    methods.reconcile(at)
    at.now_s += methods.GIVE_UP_S - 1.0
    methods.reconcile(at)
    assert (at.actions, [each.leaving for each in at.state.armed]) == ([], [True, True])
    assert [(note.event, note.level) for note in at.notes] == [("power_on_doubtful_raised", Level.WARNING)]
    named = Turn(POLICY, at.state, at.now_s)
    methods.reconcile(named)
    assert [action.method for action in named.actions if isinstance(action, DisarmPowerOn)] == [PowerOnMethod.RTC]
    at.now_s += 1.0
    methods.reconcile(at)
    assert at.state.armed == ()
    assert [(note.event, note.because.partition(" may")[0], note.level) for note in at.notes[1:]] == [
        ("power_on_given_up", "rtc", Level.WARNING),
        ("power_on_given_up", "output of b", Level.WARNING),
        ("power_on_doubtful_cleared", "every method is disarmed", Level.INFO),
    ]


def test_without_history_each_way_may_be_armed_for_an_outage_of_which_nobody_knows() -> None:
    """To take back what is not armed does nothing. An output only with utility: a shutdown may be under way."""
    at = turn(OnBattery(outage=OUTAGE), *methods.unknown(POLICY, NOW_S))
    methods.reconcile(at)
    assert [(action.method, action.outage) for action in at.actions if isinstance(action, DisarmPowerOn)] == [
        (PowerOnMethod.RTC, ""),
        (PowerOnMethod.SENTINEL, ""),
        (PowerOnMethod.WATCHDOG, ""),
    ]
    for supply, orders in ((Supply.UNKNOWN, 3), (Supply.UTILITY, 4)):
        at.state = replace(at.state, feed=feed(supply))
        methods.reconcile(at)
        assert len(at.actions) == orders
    obligations.handle(at, failed(at.actions[3]))
    assert [(note.event, note.because, note.level) for note in at.notes] == [
        ("power_on_doubtful_raised", "output: no such device", Level.WARNING)
    ]
    obligations.handle(at, done(at.actions[2]))
    methods.reconcile(at)
    assert at.state.alarms == ("power_on_doubtful",)
    at.state = replace(at.state, owed=())
    methods.reconcile(at)
    assert notes(at)[-1] == "power_on_doubtful_cleared"
    known = turn(OnBattery(outage=OUTAGE), armed(PowerOnMethod.OUTPUT, ups="ups"))
    methods.reconcile(known)
    whose = [(action.ups, action.outage) for action in known.actions if isinstance(action, DisarmPowerOn)]
    assert whose == [("ups", "o")], "of an outage that is known, and was not ours to end: at once"


def test_an_output_of_which_nobody_knows_is_ordered_off_all_the_same() -> None:
    """Its UPS is asked whether a countdown stands before it is told; and until it is, no reboot is decided."""
    at = turn(Holding(outage=OUTAGE, began_s=60.0), *methods.unknown(POLICY, NOW_S))
    methods.arm(at, OUTAGE, (PowerOnMethod.OUTPUT,), off_in_s=50.0, limit_s=5.0)
    assert times(at) == {PowerOnMethod.OUTPUT: 80.0}
    assert [each.outage for each in at.state.armed if each.method is PowerOnMethod.OUTPUT] == ["o"]
    reboot = turn(shutdown(), *methods.unknown(POLICY, NOW_S), feed=feed(Supply.UTILITY))
    assert late(reboot) == []


def test_what_was_stuck_and_is_named_no_more_is_reported_as_that() -> None:
    """It had been tried in vain; nobody tries any more, and the end of the one alarm is not the end of the matter."""
    at = turn(Online(), armed())
    methods.reconcile(at)
    obligations.handle(at, failed(at.actions[0]))
    at.policy = replace(POLICY, methods=())
    methods.reconcile(at)
    assert notes(at) == ["power_on_stuck_raised", "power_on_doubtful_raised", "power_on_stuck_cleared"]


def test_a_doubt_hides_no_alarm() -> None:
    """Each is told for itself, and ends by itself."""
    at = turn(Online(), armed(), armed(PowerOnMethod.SENTINEL, outage=""))
    methods.reconcile(at)
    first, second = at.actions
    for order in (second, first):
        obligations.handle(at, failed(order))
    methods.reconcile(at)
    assert notes(at) == ["power_on_doubtful_raised", "power_on_stuck_raised"]
    at.state = replace(at.state, owed=at.state.owed[1:])
    methods.reconcile(at)
    assert notes(at)[2:] == ["power_on_stuck_cleared"]


def test_on_one_unconfirmed_reading_nothing_is_taken_back() -> None:
    at = turn(Online(), armed(), feed=replace(feed(Supply.UTILITY), suspect=True))
    methods.reconcile(at)
    assert at.actions == []


def test_past_the_commit_nothing_is_taken_back() -> None:
    at = turn(shutdown(), armed(confirmed=True), TemporaryPolicy(policy="always-off"))
    methods.reconcile(at)
    methods.reconcile_policy(at)
    assert at.actions == []


def test_what_failed_at_the_commit_is_armed_again_while_the_host_stops() -> None:
    """A sentinel's switch that was just restarting: the next try is 10 s later, with the time that is left then."""
    at = turn(shutdown(), armed(PowerOnMethod.SENTINEL, order="a-1"))
    obligations.handle(at, replace(failed(order(PowerOnMethod.SENTINEL)), harmless=True))
    methods.reconcile(at)
    assert at.actions == []
    later = Turn(POLICY, at.state, NOW_S + methods.ARM_AGAIN_S)
    methods.reconcile(later)
    assert times(later) == {PowerOnMethod.SENTINEL: 180.0 - NOW_S - 10.0 + 30.0}
    methods.reconcile(later)
    assert len(later.actions) == 1, "one try at a time"


@pytest.mark.parametrize(
    ("phase", "one"),
    [
        (shutdown(), armed(PowerOnMethod.OUTPUT, ups="ups")),
        (shutdown(), armed(confirmed=True)),
        (shutdown(), armed(order="a-9")),
        (shutdown(), armed(outage="older")),
        (shutdown(force_at_s=NOW_S + 5.0), armed()),
        (shutdown(force_at_s=0.0), armed()),
    ],
)
def test_what_is_armed_or_under_way_or_too_late_is_not_armed_again(phase: Shutdown, one: Armed) -> None:
    at = turn(phase, one)
    methods.reconcile(at)
    assert at.actions == []


def test_kept_for_a_shutdown_that_is_not_ours() -> None:
    """Until the daemon starts again, in the same boot: then it was called off."""
    at = turn(OnBattery(outage=OUTAGE), armed(confirmed=True))
    methods.foreign_stop(at)
    assert set(times(at)) == {PowerOnMethod.RTC, PowerOnMethod.SENTINEL, PowerOnMethod.WATCHDOG}
    assert times(at)[PowerOnMethod.SENTINEL] == 110.0 + 5.0 + 30.0
    assert all(each.kept for each in at.state.armed)
    count = len(at.actions)
    methods.reconcile(at)
    assert len(at.actions) == count
    obligations.after_restart(at, {action.id for action in at.actions[1:]})
    assert [each.kept for each in at.state.armed] == [False] * 3
    assert [each.order is None for each in at.state.armed] == [True, False, False]
    methods.reconcile(at)
    assert [type(action) for action in at.actions[count:]] == [DisarmPowerOn], "the others have an answer to come yet"


@pytest.mark.parametrize(
    ("force_at_s", "off_in_s"), [(180.0, 80.0), (0.0, 65.0), (101.0, 3.0)], ids=["ordered", "not yet", "any moment"]
)
def test_killed_at_the_commit_what_was_being_armed_is_armed_again(force_at_s: float, off_in_s: float) -> None:
    """An output too, once: its effector knows whether it was told. What is given again has its answer to come."""
    mine = (
        armed(PowerOnMethod.OUTPUT, ups="ups", order="a-1"),
        armed(PowerOnMethod.RTC, order="a-2"),
        armed(PowerOnMethod.SENTINEL, confirmed=True),
        armed(PowerOnMethod.WATCHDOG, order="a-3", leaving=True),
    )
    at = turn(shutdown(force_at_s=force_at_s), *mine, policy=replace(POLICY, force_after_s=75.0))
    obligations.after_restart(at, ("a-2",))
    assert times(at) == {PowerOnMethod.OUTPUT: off_in_s + 30.0}
    assert [each.order for each in at.state.armed] == [at.actions[0].id, "a-2", None, None]
    obligations.after_restart(at, ())
    assert set(times(at)) == {PowerOnMethod.OUTPUT, PowerOnMethod.RTC}
    elsewhere = turn(Holding(outage=OUTAGE, began_s=60.0), *mine)
    obligations.after_restart(elsewhere, ())
    assert elsewhere.actions == [], "no shutdown of ours: it is taken back"
    sent = turn(shutdown(), replace(mine[0], order=None, confirmed=True))
    methods.arm(sent, OUTAGE, (PowerOnMethod.OUTPUT,), off_in_s=50.0, limit_s=5.0)
    assert sent.actions == []


@pytest.mark.parametrize("phase", [Online(), shutdown()])
def test_a_foreign_stop_concerns_an_open_outage(phase: Phase) -> None:
    at = turn(phase)
    methods.foreign_stop(at)
    assert at.actions == []


def test_another_boot_has_an_output_less() -> None:
    """The UPS that has cut its output has nothing left to take back."""
    cut, aborted = (
        armed(PowerOnMethod.OUTPUT, ups="ups", acts_at_s=9.0),
        armed(PowerOnMethod.OUTPUT, ups="b", returns="aborts"),
    )
    was = (cut, aborted, armed(order="a-1", kept=True, leaving=True, confirmed=True))
    before = State(phase=Online(), owed=was)
    policy = replace(POLICY, outputs=("ups", "b"))
    assert methods.after_boot(policy, before, 20.0, whole=True) == (armed(at_s=20.0, acts_at_s=20.0, confirmed=True),)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_host_that_is_back_before_the_cut_cancels_it_or_waits_for_it(*, cancelled: bool) -> None:
    """A person pressed the button. The UPS shows no countdown, so that only the order of the old boot tells of it."""
    was = armed(PowerOnMethod.OUTPUT, ups="ups", at_s=0.0, acts_at_s=150.0, confirmed=True, returns="cycles")
    stored = Stored(state=State(phase=shutdown(), owed=(was,)), boot_id="boot-zero", at_s=100.0, gap_s=20.0)
    policy = replace(POLICY, methods=(PowerOnMethod.OUTPUT,))
    assert restore(policy, replace(stored, gap_s=None), 15.0).state.armed == (), "no clock: it has cut, most likely"
    state = restore(policy, stored, 15.0).state
    assert [each.acts_at_s for each in state.armed] == [45.0]
    orders: list[Action] = []
    for at_s in range(16, 80):
        fields = reading(at_s=float(at_s))
        answer = step(policy, state, replace(fields, charge_pct=100.0, load_pct=20.0))
        state = answer.state
        for order in answer.actions:
            if isinstance(order, EnsurePolicy | DisarmPowerOn | ResumeTraining):
                orders.append(order)
                well = cancelled or not isinstance(order, DisarmPowerOn)
                event = done(order) if well else failed(order)
                state = step(policy, state, replace(event, at_s=float(at_s))).state
    assert [type(order) for order in orders] == [DisarmPowerOn, ResumeTraining]
    assert [int(order.by_s) for order in orders] == ([21, 56] if cancelled else [21, 86])
    assert state.armed == ()
    assert state.alarms == ()


def test_an_order_of_an_earlier_boot_that_is_being_cancelled_does_not_stand_in_the_way_of_the_next() -> None:
    """Back on battery, the host commits again at once: without the cut it would stay off."""
    at = turn(
        Recovery(outage=OUTAGE, began_s=90.0, clean=True),
        armed(PowerOnMethod.OUTPUT, ups="ups", order="d-1", leaving=True),
    )
    methods.arm(at, OUTAGE, (PowerOnMethod.OUTPUT,), off_in_s=50.0, limit_s=5.0)
    assert times(at) == {PowerOnMethod.OUTPUT: 80.0}


@pytest.mark.parametrize(
    ("phase", "whole", "doubted"),
    [
        (OnBattery(outage=OUTAGE), True, True),
        (Holding(outage=OUTAGE, began_s=1.0), True, True),
        (shutdown(), True, False),
        (Online(), True, False),
        (shutdown(), False, True),
        (Online(), False, True),
    ],
)
def test_a_boot_after_an_outage_whose_commit_nobody_knows(phase: Phase, *, whole: bool, doubted: bool) -> None:
    """With a disk that hung, or a journal whose end is lost, what was armed then stands nowhere."""
    known = armed(PowerOnMethod.RTC, at_s=1.0, acts_at_s=2.0)
    stored = Stored(state=State(phase=phase, owed=(known,)), boot_id="boot-zero", at_s=10.0, gap_s=10.0, whole=whole)
    found = restore(POLICY, stored, 20.0).state.armed
    others = {method for method in POLICY.methods if method not in (PowerOnMethod.OUTPUT, PowerOnMethod.RTC)}
    assert others
    assert {each.method for each in found} == ({PowerOnMethod.RTC, *others} if doubted else {PowerOnMethod.RTC})
    (kept,) = (each for each in found if each.method is PowerOnMethod.RTC)
    assert (kept.outage, kept.at_s) == (known.outage, 20.0)


def test_back_on_battery_is_armed_again() -> None:
    """Before the host can say so, the battery may end: the clock and the sentinel know of it; nothing that cuts."""
    at = turn(Recovery(outage=OUTAGE, began_s=90.0, clean=True), armed(leaving=True, order="d-1"))
    methods.reconcile(at)
    assert set(times(at)) == {PowerOnMethod.RTC, PowerOnMethod.SENTINEL}
    methods.reconcile(at)
    assert len(at.actions) == 2
    at.state = replace(at.state, feed=feed(Supply.UTILITY))
    obligations.handle(at, done(at.actions[0], in_s=100.0))
    methods.reconcile(at)
    assert [action.method for action in at.actions if isinstance(action, DisarmPowerOn)] == [PowerOnMethod.RTC]


def test_what_keeps_a_host_away_stands_while_it_is_back_on_battery() -> None:
    """What would cycle it does not: it is there."""
    at = turn(
        Recovery(outage=OUTAGE, began_s=90.0, clean=True),
        armed(),
        armed(PowerOnMethod.SENTINEL),
        armed(PowerOnMethod.WATCHDOG),
    )
    methods.reconcile(at)
    assert [action.method for action in at.actions if isinstance(action, DisarmPowerOn)] == [PowerOnMethod.WATCHDOG]


def test_training_that_was_started_is_not_put_to_sleep_again() -> None:
    at = turn(Recovery(outage=OUTAGE, began_s=90.0, clean=True, started_at_s=95.0), armed())
    methods.reconcile(at)
    assert [type(action) for action in at.actions] == [DisarmPowerOn]


# --- The BMC's policy -------------------------------------------------------------------------------------------------


def ensured(outage: str = "o", **detail: object) -> Done:
    return done(EnsurePolicy(id="p", by_s=105.0, outage=outage), verified=True, **detail)


def test_the_first_policy_that_an_outage_finds_is_the_one_to_put_back() -> None:
    at = turn(OnBattery(outage=OUTAGE))
    obligations.handle(at, ensured())
    obligations.handle(at, ensured(outage="", restore="always-off"))
    obligations.handle(at, failed(EnsurePolicy(id="p", by_s=105.0, outage="o")))
    obligations.handle(at, ensured(restore=7))
    assert at.state.temporary_policy is None
    obligations.handle(at, ensured(restore="last-state"))
    obligations.handle(at, ensured(restore="always-on"))
    assert at.state.temporary_policy == TemporaryPolicy(policy="last-state")
    unread = turn(OnBattery(outage=OUTAGE))
    event = failed(EnsurePolicy(id="p", by_s=105.0, outage="o"))
    obligations.handle(unread, replace(event, detail=(("restore", "always-off"),)))
    assert unread.state.temporary_policy == TemporaryPolicy(policy="always-off"), "it may have been set"


def test_it_is_put_back_when_training_runs_and_tried_again_each_hour() -> None:
    at = turn(OnBattery(outage=OUTAGE), TemporaryPolicy(policy="last-state"))
    methods.reconcile_policy(at)
    assert at.actions == []
    at.state = replace(at.state, phase=Online(), feed=replace(at.state.feed, suspect=True))
    methods.reconcile_policy(at)
    assert at.actions == [], "a reading on battery is not confirmed yet"
    at.state = replace(at.state, feed=replace(at.state.feed, suspect=False))
    methods.reconcile_policy(at)
    methods.reconcile_policy(at)
    (action,) = at.actions
    assert isinstance(action, RestorePolicy)
    assert (action.policy, action.by_s, action.outage) == ("last-state", 105.0, "")
    obligations.handle(at, done(replace(action, id="another")))
    assert at.state.temporary_policy == TemporaryPolicy(policy="last-state", order=action.id, at_s=NOW_S)
    obligations.handle(at, failed(action))
    assert at.state.temporary_policy == TemporaryPolicy(policy="last-state", at_s=NOW_S, retry_at_s=NOW_S + 3600.0)
    for now_s, orders in ((NOW_S + 3599.0, 1), (NOW_S + 3600.0, 2)):
        at.now_s = now_s
        methods.reconcile_policy(at)
        assert len(at.actions) == orders
    obligations.handle(at, done(at.actions[1], policy="last-state"))
    assert at.state.temporary_policy is None
    numbers = (("policy", "last-state"),)
    assert story(at) == [("policy_restored", "as the outage found it", Level.INFO, numbers)]
    obligations.handle(at, done(at.actions[1]))
    assert notes(at) == ["policy_restored"]


def test_a_policy_that_is_never_put_back_is_not_tried_each_hour() -> None:
    """The settings leave the policy alone by now, which the failure tells."""
    at = turn(Online(), TemporaryPolicy(policy="last-state", order="r"))
    order = RestorePolicy(id="r", by_s=105.0, outage="", policy="last-state")
    obligations.handle(at, replace(failed(order), harmless=True))
    assert (at.state.temporary_policy, at.actions, at.notes) == (None, [], [])


@pytest.mark.parametrize("outcome", [done, failed])
def test_a_policy_that_was_put_back_into_the_next_outage_is_ensured_again(outcome: Callable[[Action], Any]) -> None:
    """Put back after that outage had read always-on: the host would stay off."""
    at = turn(shutdown(), TemporaryPolicy(policy="always-off", order="r"))
    obligations.handle(at, outcome(RestorePolicy(id="r", by_s=105.0, outage="", policy="always-off")))
    assert [(type(action), action.outage) for action in at.actions] == [(EnsurePolicy, "o")]  # type: ignore[attr-defined]


def test_a_restart_asks_again_for_what_had_no_answer() -> None:
    at = turn(Online(), TemporaryPolicy(policy="x", order="r"))
    obligations.after_restart(at, {"other", "r"})
    assert at.state.temporary_policy == TemporaryPolicy(policy="x", order="r")
    obligations.after_restart(at, {"other"})
    assert at.state.temporary_policy == TemporaryPolicy(policy="x")


# --- The late decision ------------------------------------------------------------------------------------------------


def late(at: Turn, *, stable: bool = True) -> list[tuple[float, float]]:
    phase = at.state.phase
    assert isinstance(phase, Shutdown)
    methods.decide_late(at, phase, stable=stable)
    assert all(action.outage == "o" for action in at.actions if isinstance(action, Reboot))
    return [(action.force_after_s, action.by_s) for action in at.actions if isinstance(action, Reboot)]


def test_utility_that_is_back_for_good_makes_it_a_reboot() -> None:
    assert late(turn(shutdown(), feed=feed(Supply.UTILITY))) == [(80.0, 102.0)]
    assert late(turn(shutdown(force_at_s=90.0), feed=feed(Supply.UTILITY))) == [(0.0, 102.0)]
    just = tuple(replace(each, feed=replace(each.feed, since_s=NOW_S)) for each in several(*[Supply.UTILITY] * 2))
    both = turn(shutdown(), feed=feed(Supply.UTILITY), upses=just)
    assert late(both) == [(80.0, 102.0)], "how long is good, all of them together say"


@pytest.mark.parametrize(
    ("phase", "policy"),
    [
        (shutdown(ordered=False), POLICY),
        (shutdown(), replace(POLICY, late_reboot=False)),
        (shutdown(), replace(POLICY, boot_id="another")),
    ],
    ids=["not ordered", "not wanted", "another boot"],
)
def test_where_it_is_no_question(phase: Shutdown, policy: Policy) -> None:
    at = turn(phase, policy=policy, feed=feed(Supply.UTILITY))
    assert late(at) == []
    assert at.notes == []


def test_a_power_off_that_was_taken_once_is_under_way_whatever_becomes_of_a_later_order() -> None:
    """As one by which it comes sooner, on a host that is too busy stopping to answer in time."""
    order = PowerOff(id="p", by_s=NOW_S + 5.0, outage="o", grade=Grade.FULL, force_after_s=60.0)
    failed = Failed(at_s=NOW_S, action=order, took_s=4.0, reason="has not answered within 4 s", timed_out=True)
    after = step(POLICY, turn(shutdown(), feed=feed(Supply.UTILITY)).state, failed).state
    assert isinstance(after.phase, Shutdown)
    assert late(turn(after.phase, feed=feed(Supply.UTILITY))) == [(80.0, 102.0)]


@pytest.mark.parametrize(
    ("known", "because"),
    [
        (
            {"feed": replace(feed(Supply.UTILITY), countdown_at_s=500.0)},
            "a countdown runs: the UPS cuts its output",
        ),
        ({"feed": replace(feed(Supply.UTILITY), fsd_at_s=500.0)}, "a countdown runs"),
    ],
)
def test_a_ups_that_may_be_about_to_cut_excludes_a_reboot(known: dict[str, Any], because: str) -> None:
    at = turn(shutdown(), **{"feed": feed(Supply.UTILITY), **known})
    assert late(at) == []
    assert [note.event for note in at.notes] == ["reboot_left"]
    assert at.notes[0].because.startswith(because)


ONE_SILENT = (*several(Supply.UTILITY), Supplied(ups="b", feed=feed(Supply.UTILITY, at_s=80.0), battery=Battery()))
COUNTED_DOWN = replace(feed(Supply.UTILITY, ups="b"), countdown_at_s=400.0)
ONE_COUNTS_DOWN = (*several(Supply.UTILITY), Supplied(ups="b", feed=COUNTED_DOWN, battery=Battery()))
BOTH_BACK = several(Supply.UTILITY, Supply.UTILITY)


@pytest.mark.parametrize(
    ("upses", "orders", "because"),
    [
        (several(Supply.UTILITY, Supply.BATTERY), "", "b is not on utility, or cannot be read"),
        (ONE_SILENT, "", "b is not on utility, or cannot be read"),
        (ONE_COUNTS_DOWN, "", "b may drop: a countdown runs: the UPS cuts its output"),
        (BOTH_BACK, "b", "b may drop: the UPS has the order to switch its output off and on"),
    ],
)
def test_the_upses_that_keep_on_must_feed_the_host_by_themselves(
    upses: tuple[Supplied, ...], orders: str, because: str
) -> None:
    """A host that one UPS can feed is not without AC for the other's sake: powered off, it would stay off."""
    ordered = [armed(PowerOnMethod.OUTPUT, ups=ups, confirmed=True, returns="cycles") for ups in orders]
    known = {"feed": feed(Supply.UTILITY), "upses": upses}
    at = turn(shutdown(), *ordered, policy=replace(TWO, late_reboot=True, minimum_supplies=2), **known)
    assert late(at) == []
    assert [(note.event, note.because) for note in at.notes] == [("reboot_left", because)]
    at = turn(shutdown(), *ordered, policy=replace(TWO, late_reboot=True, minimum_supplies=1), **known)
    assert late(at) == [(80.0, 102.0)]


@pytest.mark.parametrize(
    ("upses", "orders"), [(several(Supply.UTILITY, Supply.UTILITY, presumed=True), ""), (BOTH_BACK, "ab")]
)
def test_no_ups_that_keeps_on_is_no_reboot(upses: tuple[Supplied, ...], orders: str) -> None:
    ordered = [armed(PowerOnMethod.OUTPUT, ups=ups, confirmed=True, returns="cycles") for ups in orders]
    at = turn(shutdown(), *ordered, policy=TWO, feed=feed(Supply.UTILITY), upses=upses)
    assert late(at) == []
    assert [note.event for note in at.notes] == ["reboot_left"]


@pytest.mark.parametrize(
    ("returns", "confirmed"), [("cycles", True), ("unknown", True), ("stays_off", True), ("", False)]
)
def test_an_output_that_was_ordered_off_needs_no_reboot(returns: str, *, confirmed: bool) -> None:
    output = armed(PowerOnMethod.OUTPUT, ups="ups", confirmed=confirmed, returns=returns)
    at = turn(shutdown(), output, feed=feed(Supply.UTILITY))
    assert late(at) == []
    assert [note.event for note in at.notes] == ["reboot_left"]


def test_not_before_utility_is_back_for_good() -> None:
    at = turn(shutdown(), feed=feed(Supply.UTILITY))
    assert late(at, stable=False) == []
    assert [note.event for note in at.notes] == ["reboot_left"]


def test_a_cut_that_the_ups_has_aborted_excludes_nothing() -> None:
    output = armed(PowerOnMethod.OUTPUT, ups="ups", confirmed=True, returns="aborts")
    assert late(turn(shutdown(), output, armed(), feed=feed(Supply.UTILITY))) == [(80.0, 102.0)]
