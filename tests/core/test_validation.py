"""A stored state that says what cannot be true loses that, by name, and nothing else."""

import math
from dataclasses import replace
from typing import Any

import pytest

from powerguard.core.comeback.recovery import Stored, restore
from powerguard.core.comeback.validation import validated
from powerguard.core.energy import needs
from powerguard.core.model.actions import Grade, PowerOnMethod
from powerguard.core.model.events import OwnSource
from powerguard.core.model.policy import BatteryModel, Discharge, Drop, Health, Learned, Need, Recharge, TauPoint
from powerguard.core.model.state import (
    Armed,
    Battery,
    Feed,
    NodeMarked,
    OnBattery,
    Outage,
    OwnLoadReport,
    State,
    Supplied,
    TemporaryPolicy,
    Watch,
    Witness,
)
from tests.core.play import make_policy

AT_S = 1000.0
HEALTH = Health(share=0.8, error=0.05, depth=0.4, at_s=500.0, how="a discharge")
DROP = Drop(before=0.75, after=0.3, at_s=500.0, speed=0.8)
MODEL = BatteryModel(
    health=HEALTH,
    points=(TauPoint(load=0.5, tau_s=540.0, at_s=500.0),),
    recharge_s=8 * 3600.0,
    discharge=Discharge(since_s=900.0, used=0.1, charge=0.9),
    recharge=Recharge(since_s=900.0, charge=0.4),
    replaced_at_s=-5000.0,
)
BATTERY = Battery(
    at_s=AT_S, used=0.2, gauge=0.7, charged=0.6, left=0.5, load=0.75, health=0.8, model=MODEL, tau_point=(0.75, 360.0)
)
LEARNED = Learned(needs=(Need(of="stop", name="", seconds=(30.0, 40.0)),), pauses=(("llm", DROP),), cap=DROP)
STATE = State(battery=BATTERY, learned=LEARNED, upses=(Supplied(ups="a", feed=Feed(), battery=BATTERY),))


def test_a_true_state_stays_as_it_is() -> None:
    assert validated(STATE, AT_S) == (STATE, ())
    assert validated(State(), 0.0) == (State(), ())


@pytest.mark.parametrize(
    ("field", "value", "after"),
    [
        ("used", -0.1, None),
        ("used", 1.1, None),
        ("left", 2.0, None),
        ("gauge", -1.0, None),
        ("gauge", 10000.5, None),
        ("charged", 1.5, None),
        ("load", 2.1, None),
        ("load", -0.1, None),
        ("low_left", -0.1, None),
        ("suspect", -1.0, None),
        ("health", 50.0, 0.75),
        ("health", -1.0, 0.75),
        ("health", 1.01, 0.75),
        ("away_charge", -0.1, None),
        ("away_charge", 1.01, None),
        ("unflagged", 1.01, None),
        ("suspect", 1.01, None),
        ("tau_point", (0.5, 0.0), None),
        ("tau_point", (9.0, 500.0), None),
        ("composed", ((0.5, -1.0),), ()),
        ("composed", ((0.0, 100.0),), ()),
        ("composed", ((4.01, 100.0),), ()),
        ("composed", ((0.5, 0.0),), ()),
        ("higher_since_s", AT_S + 60.5, None),
    ],
)
def test_an_account_that_cannot_be(field: str, value: object, after: object) -> None:
    changes: dict[str, Any] = {field: value}
    kept, dropped = validated(replace(STATE, battery=replace(BATTERY, **changes)), AT_S)
    assert (getattr(kept.battery, field), dropped) == (after, (f"battery.{field}",))
    assert kept.learned == LEARNED


@pytest.mark.parametrize(
    ("field", "value", "after"),
    [
        ("health", replace(HEALTH, share=50.0), None),
        ("health", replace(HEALTH, share=0.0), None),
        ("health", replace(HEALTH, share=1.01), None),
        ("health", replace(HEALTH, error=1.01), None),
        ("health", replace(HEALTH, error=-1.0), None),
        ("health", replace(HEALTH, depth=2.0), None),
        ("health", replace(HEALTH, at_s=AT_S + 61.0), None),
        ("points", (TauPoint(load=0.5, tau_s=-5.0, at_s=0.0), *MODEL.points), MODEL.points),
        ("points", (TauPoint(load=0.0, tau_s=50.0, at_s=0.0),), ()),
        ("recharge_s", 1.0, None),
        ("recharge_s", 1e12, None),
        ("discharge", Discharge(since_s=0.0, used=7.0, charge=None), None),
        ("discharge", Discharge(since_s=0.0, used=0.1, charge=7.0), None),
        ("discharge", Discharge(since_s=0.0, used=1.01, charge=None), None),
        ("discharge", Discharge(since_s=0.0, used=0.1, charge=1.01), None),
        ("discharge", Discharge(since_s=0.0, used=0.1, charge=0.9, charge_now=1.01), None),
        ("discharge", Discharge(since_s=AT_S + 61.0, used=0.1, charge=None), None),
        ("recharge", Recharge(since_s=0.0, charge=-1.0), None),
        ("recharge", Recharge(since_s=0.0, charge=1.01), None),
        ("recharge", Recharge(since_s=AT_S + 61.0, charge=0.5), None),
        ("replaced_at_s", 1e12, None),
        ("denied", TauPoint(load=0.0, tau_s=50.0, at_s=0.0), None),
        ("denied", TauPoint(load=2.01, tau_s=50.0, at_s=0.0), None),
        ("denied", TauPoint(load=0.5, tau_s=0.5, at_s=0.0), None),
        ("denied", TauPoint(load=0.5, tau_s=7 * 86400.0 + 1.0, at_s=0.0), None),
    ],
)
def test_a_model_that_cannot_be(field: str, value: object, after: object) -> None:
    """Of a UPS among several it is named with its UPS."""
    changes: dict[str, Any] = {field: value}
    odd = replace(BATTERY, model=replace(MODEL, **changes))
    kept, dropped = validated(replace(STATE, battery=odd, upses=(replace(STATE.upses[0], battery=odd),)), AT_S)
    assert (getattr(kept.battery.model, field), getattr(kept.upses[0].battery.model, field)) == (after, after)
    assert dropped == (f"battery.{field}", f"a.battery.{field}")


LATEST_S = AT_S + 60.0
"""A minute ahead is no lie: entries are a little late."""


@pytest.mark.parametrize(
    "changes",
    [
        {
            "used": 0.0,
            "gauge": 0.0,
            "charged": 0.0,
            "left": 0.0,
            "load": 0.0,
            "low_left": 0.0,
            "unflagged": 0.0,
            "suspect": 0.0,
        },
        {
            "used": 1.0,
            "gauge": 1e4,
            "charged": 1.0,
            "left": 1.0,
            "load": 2.0,
            "low_left": 1e4,
            "unflagged": 1.0,
            "suspect": 1.0,
        },
        {"health": 0.0, "away_charge": 0.0, "tau_point": (0.0, 1.0), "composed": ((0.01, 0.1),)},
        {"health": 1.0, "away_charge": 1.0, "tau_point": (2.0, 7 * 86400.0), "composed": ((4.0, 1e9),)},
        {"higher_since_s": LATEST_S},
    ],
)
def test_an_account_that_is_only_just_possible_stays(changes: dict[str, Any]) -> None:
    """A battery that is as good as empty is the one whose account must not be lost."""
    state = replace(STATE, battery=replace(BATTERY, **changes))
    assert validated(state, AT_S) == (state, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"health": replace(HEALTH, share=1.0, error=0.0, depth=0.0, at_s=LATEST_S)},
        {"health": replace(HEALTH, share=0.01, error=1.0, depth=1.0)},
        {"points": (TauPoint(load=2.0, tau_s=1.0, at_s=0.0), TauPoint(load=0.01, tau_s=7 * 86400.0, at_s=0.0))},
        {"recharge_s": 600.0},
        {"recharge_s": 30 * 86400.0},
        {"discharge": Discharge(since_s=LATEST_S, used=0.0, charge=0.0, charge_now=0.0)},
        {"discharge": Discharge(since_s=0.0, used=1.0, charge=1.0, charge_now=1.0)},
        {"recharge": Recharge(since_s=LATEST_S, charge=0.0)},
        {"recharge": Recharge(since_s=0.0, charge=1.0)},
        {"replaced_at_s": LATEST_S},
        {"denied": TauPoint(load=2.0, tau_s=1.0, at_s=0.0)},
        {"denied": TauPoint(load=0.01, tau_s=7 * 86400.0, at_s=0.0)},
    ],
)
def test_a_model_that_is_only_just_possible_stays(changes: dict[str, Any]) -> None:
    state = replace(STATE, battery=replace(BATTERY, model=replace(MODEL, **changes)))
    assert validated(state, AT_S) == (state, ())


def test_a_report_on_the_own_load_that_cannot_be_is_dropped_alone() -> None:
    """It is from the future, or it has said the same for longer than it has said anything."""
    just = OwnLoadReport(source=OwnSource.BMC, watts=900.0, at_s=LATEST_S, since_s=LATEST_S)
    assert validated(replace(STATE, own=(just,)), AT_S) == (replace(STATE, own=(just,)), ())
    for odd in (replace(just, at_s=LATEST_S + 0.5), replace(just, at_s=900.0, since_s=900.5)):
        kept, dropped = validated(replace(STATE, own=(odd, just)), AT_S)
        assert (kept.own, dropped) == ((just,), ("own",))


def test_what_was_learned_stays_to_its_edges() -> None:
    """A pause may bring all of a load or nothing of it."""
    all_of_it = Drop(before=2.0, after=0.0, at_s=LATEST_S, speed=2.0)
    nothing = Drop(before=0.5, after=0.5, at_s=0.0, speed=0.0)
    longest = Need(of="stop", name="", seconds=(0.5, needs.LONGEST_S))
    state = replace(
        STATE, learned=Learned(needs=(longest,), pauses=(("llm", all_of_it), ("vit", nothing)), cap=nothing)
    )
    assert validated(state, AT_S) == (state, ())


@pytest.mark.parametrize(
    ("changes", "after", "name"),
    [
        ({"needs": (Need(of="stop", name="", seconds=(-1e9, 30.0)),)}, (30.0,), "learned.needs.stop"),
        ({"needs": (Need(of="stop", name="", seconds=(0.0, 30.0)),)}, (30.0,), "learned.needs.stop"),
        ({"needs": (Need(of="stop", name="", seconds=(1e300, 30.0)),)}, (30.0,), "learned.needs.stop"),
        ({"needs": (Need(of="stop", name="", seconds=(-1.0,)),)}, (), "learned.needs.stop"),
        ({"needs": (Need(of="magic", name="", seconds=(1.0,)),)}, (), "learned.needs.magic"),
    ],
)
def test_a_need_that_cannot_be(changes: dict[str, Any], after: tuple[float, ...], name: str) -> None:
    kept, dropped = validated(replace(STATE, learned=replace(LEARNED, **changes)), AT_S)
    assert (needs.samples(kept.learned, "stop"), dropped) == (after, (name,))
    assert {need.of for need in kept.learned.needs} <= set(needs.NEEDS)


@pytest.mark.parametrize(
    "drop",
    [
        replace(DROP, after=0.9),
        replace(DROP, after=-0.9),
        replace(DROP, before=9.0),
        replace(DROP, speed=1e9),
        replace(DROP, speed=-1.0),
        replace(DROP, at_s=AT_S + 61.0),
    ],
)
def test_a_drop_that_cannot_be(drop: Drop) -> None:
    odd = replace(LEARNED, pauses=(("llm", drop), ("vit", DROP)), cap=drop)
    kept, dropped = validated(replace(STATE, learned=odd), AT_S)
    assert (kept.learned.pauses, kept.learned.cap) == ((("vit", DROP),), None)
    assert dropped == ("learned.pauses", "learned.cap")


def test_a_way_back_with_impossible_times_is_taken_back_all_the_same() -> None:
    """A time that never comes would leave a watchdog counting, and the BMC's policy as the outage has set it."""
    good = Armed(method=PowerOnMethod.RTC, outage="o", at_s=900.0, acts_at_s=4000.0)
    odd = Armed(method=PowerOnMethod.WATCHDOG, outage="o", at_s=math.nan, acts_at_s=1e300, leaving=True)
    late = TemporaryPolicy(policy="last-state", retry_at_s=math.inf)
    node = NodeMarked(outage="o", drained=True, retry_at_s=math.inf)
    outage = Outage(id="o", since_s=800.0, grade=Grade.FULL, boots=(math.nan, 900.0, 1e9), back_off_s=1e300)
    state = replace(STATE, phase=OnBattery(outage=outage), owed=(odd, good, odd, late, node))
    kept, dropped = validated(state, AT_S)
    assert kept.armed == (replace(odd, at_s=AT_S, acts_at_s=AT_S), good)
    assert kept.temporary_policy == replace(late, retry_at_s=0.0)
    assert kept.node == replace(node, retry_at_s=0.0)
    assert kept.phase == OnBattery(outage=replace(outage, boots=(900.0,), back_off_s=0.0))
    names = ("outage.boots", "outage.back_off_s", "armed.watchdog", "armed.watchdog", "temporary_policy.retry_at_s")
    assert dropped == (*names, "node_marked.retry_at_s")
    assert validated(kept, AT_S) == (kept, ())


MONTH_S = 30 * 86400.0


@pytest.mark.parametrize(
    ("at_s", "acts_at_s", "is_time"),
    [
        (LATEST_S, LATEST_S + MONTH_S, True),
        (LATEST_S, LATEST_S - 12.0 * MONTH_S, True),  # since then each order to disarm was in vain
        (900.0, -math.inf, False),
        (900.0, 900.0 + MONTH_S + 1.0, False),
        (LATEST_S + 0.5, LATEST_S + 1.0, False),
    ],
)
def test_a_way_back_of_which_the_times_are_only_just_possible(at_s: float, acts_at_s: float, *, is_time: bool) -> None:
    one = Armed(method=PowerOnMethod.RTC, outage="o", at_s=at_s, acts_at_s=acts_at_s)
    kept, dropped = validated(replace(STATE, owed=(one,)), AT_S)
    assert kept.armed == ((one,) if is_time else (replace(one, at_s=AT_S, acts_at_s=AT_S),))
    assert dropped == (() if is_time else ("armed.rtc",))


@pytest.mark.parametrize(
    ("share", "least", "load", "counted_s", "is_one"),
    [
        (1e9, 2.0, 2.0, LATEST_S, True),
        (0.1, 0.01, 0.01, None, True),
        (math.inf, 0.5, 0.5, None, False),
        (1.0, 0.0, 0.5, None, False),
        (1.0, 2.01, 0.5, None, False),
        (1.0, 0.5, 2.01, None, False),
        (1.0, 0.5, 0.5, LATEST_S + 1.0, False),
    ],
)
def test_what_was_seen_of_a_silent_ups_and_is_only_just_possible(
    share: float, least: float, load: float, counted_s: float | None, *, is_one: bool
) -> None:
    seen = Watch(load=load, others=(Witness(ups="b", share=share, least=least),), counted_s=counted_s)
    kept, dropped = validated(replace(STATE, upses=(replace(STATE.upses[0], watch=seen),)), AT_S)
    assert (kept.upses[0].watch, dropped) == ((seen, ()) if is_one else (None, ("a.watch",)))


def test_an_outage_that_is_only_just_possible() -> None:
    outage = Outage(id="o", since_s=800.0, grade=Grade.FULL, boots=(-5e4, LATEST_S), back_off_s=0.5)
    true = replace(
        STATE, phase=OnBattery(outage=outage), owed=(TemporaryPolicy(policy="x", retry_at_s=LATEST_S + 3600.0),)
    )
    assert validated(true, AT_S) == (true, ())
    odd = replace(outage, boots=(-math.inf, *outage.boots))
    assert validated(replace(true, phase=OnBattery(outage=odd)), AT_S) == (true, ("outage.boots",))


@pytest.mark.parametrize(("count", "kept", "names"), [(32, 32, ()), (33, 32, ("armed",)), (100_000, 32, ("armed",))])
def test_no_host_has_so_many_ways_back(count: int, kept: int, names: tuple[str, ...]) -> None:
    """Each would be ordered away in the first step, and kept in every entry of the journal for ever."""
    many = tuple(
        Armed(method=PowerOnMethod.OUTPUT, ups=f"u{n}", outage="o", at_s=900.0, acts_at_s=4000.0) for n in range(count)
    )
    state, dropped = validated(replace(STATE, owed=many), AT_S)
    assert (len(state.armed), dropped) == (kept, names)


def test_it_is_reported_at_the_start_in_this_boot_and_in_the_next() -> None:
    policy = make_policy([])
    odd = replace(STATE, upses=(), learned=replace(LEARNED, needs=(Need(of="stop", name="", seconds=(-1e9,) * 3),)))
    for boot_id in (policy.boot_id, "another"):
        step = restore(policy, Stored(state=odd, boot_id=boot_id, at_s=AT_S), AT_S + 5.0)
        note = step.notes[0]
        assert (note.event, note.because) == (
            "history_dropped",
            "the journal held impossible values, which are dropped: learned.needs.stop",
        )
        assert needs.samples(step.state.learned, "stop") == ()
    quiet = restore(policy, Stored(state=replace(STATE, upses=()), boot_id=policy.boot_id, at_s=AT_S), AT_S + 5.0)
    assert not quiet.notes


def test_no_host_stops_quicker_than_one_that_is_forced_off() -> None:
    """Four stops of a tenth of a second were none."""
    policy = make_policy([])
    quick = replace(LEARNED, needs=(Need(of="stop", name="", seconds=(0.1,) * 4),))
    folded = needs.fold(policy, quick)
    assert (folded.stop_q95_s, folded.stop_median_s) == (policy.bare_stop_s, 0.1)
    assert not math.isnan(folded.stop_q95_s)
