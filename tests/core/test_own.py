"""The part of a shared UPS's load that is this host's own: sources, doubts, predicted drops, tiers, drills."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.decide import conditions
from powerguard.core.decide.turn import Turn
from powerguard.core.energy import account, budget, needs, own
from powerguard.core.model.actions import Conduct, Grade, StopTrainer, TerminateTrainer
from powerguard.core.model.events import OutputSource, OwnLoad, OwnSource, Reading
from powerguard.core.model.policy import Drop, FeedPolicy, Learned, Policy, Shared, Shed
from powerguard.core.model.state import (
    Activity,
    Battery,
    EmergencyCheckpoint,
    Feed,
    GpuCap,
    Holding,
    Online,
    Outage,
    OwnLoadAtPause,
    OwnLoadReport,
    Signalled,
    State,
    Supply,
    Trainer,
)
from powerguard.core.trainers import escalation, lifecycle
from tests.core.play import Player, StoryResult, play

POLICY = Policy(boot_id="boot-one", ups="ups", rating_w=5000.0, shared=Shared(hosts=4))
STATE = State(battery=Battery(load=0.8))
PAUSING = (Trainer(name="llm", conduct=Conduct.PAUSE),)
SCENARIOS = Path(__file__).parent.parent / "scenarios"


def _heard(state: State, *readings: tuple[float, float], policy: Policy = POLICY, source: str = "bmc") -> State:
    for at_s, watts in readings:
        state = own.enter(policy, state, OwnLoad(at_s=at_s, source=OwnSource(source), watts=watts))
    return state


def _own(policy: Policy, state: State, now_s: float = 0.0) -> own.Own:
    found = own.own_load(policy, state, now_s)
    assert found is not None
    return found


def test_a_host_that_has_the_ups_to_itself_has_no_own_load() -> None:
    """Nothing that is measured changes its sums: they are the same to the digit."""
    alone = replace(POLICY, shared=None)
    state = _heard(STATE, (1.0, 900.0), policy=alone)
    assert own.own_load(alone, state, 1.0) is None
    assert conditions.outage_budget(alone, state, 1.0) == conditions.outage_budget(alone, STATE, 1.0)


def test_the_best_source_that_counts_is_used() -> None:
    """The BMC, then the outlets, then the GPUs with the rest of the host, then the settings, then the load by hosts."""
    state = replace(STATE, learned=Learned(rest_w=400.0))
    policy = replace(POLICY, shared=Shared(hosts=4, own_w=1400.0))
    result = _own(policy, state)
    assert (result.source, result.load, result.measured) == (OwnSource.SETTINGS, 0.28, False)
    assert result.watts == pytest.approx(1400.0)
    assert _own(POLICY, state).watts == pytest.approx(1000.0)
    assert _own(POLICY, state).source is OwnSource.HOSTS
    state = _heard(state, (1.0, 850.0), source="gpu")
    assert (_own(policy, state, 1.0).source, _own(policy, state, 1.0).watts) == (OwnSource.GPU, 1250.0)
    state = _heard(state, (1.0, 1290.0), source="pdu")
    assert (_own(policy, state, 1.0).source, _own(policy, state, 1.0).watts) == (OwnSource.PDU, 1290.0)
    assert own.rest_w(state, 1.0) == 440.0
    state = _heard(state, (1.0, 1320.0))
    result = _own(policy, state, 1.0)
    assert (result.source, result.watts, result.load, result.measured) == (OwnSource.BMC, 1320.0, 0.264, True)
    assert own.rest_w(state, 1.0) == 470.0


@pytest.mark.parametrize(
    ("readings", "now_s", "watts"),
    [
        ({"bmc": (1500.0, 0.0), "pdu": (1600.0, 0.0), "gpu": (1100.0, 0.0)}, 15.0, 400.0),
        ({"pdu": (1600.0, 0.0), "gpu": (1100.0, 0.0)}, 15.0, 500.0),
        ({"bmc": (1500.0, 0.0), "gpu": (1100.0, 1.0)}, 15.1, None),  # the BMC's is too old
        ({"bmc": (1500.0, 1.0), "gpu": (1100.0, 0.0)}, 15.1, None),
        ({"bmc": (1500.0, 0.0)}, 1.0, None),
        ({"gpu": (1100.0, 0.0)}, 1.0, None),
        ({"bmc": (1100.0, 0.0), "gpu": (1100.0, 0.0)}, 1.0, None),  # one of them is wrong
        ({"bmc": (1100.0, 0.0), "gpu": (0.0, 0.0)}, 1.0, None),
        ({"bmc": (1.5, 0.0), "gpu": (1.0, 0.0)}, 1.0, 0.5),
    ],
)
def test_what_the_host_draws_besides_its_gpus(
    readings: dict[str, tuple[float, float]], now_s: float, watts: float | None
) -> None:
    heard = tuple(
        OwnLoadReport(source=OwnSource(name), watts=each, at_s=at_s, since_s=at_s)
        for name, (each, at_s) in readings.items()
    )
    assert own.rest_w(replace(STATE, own=heard), now_s) == watts


BOTH = OwnLoadReport(source=OwnSource.BMC, watts=1000.0, at_s=9.0, since_s=9.0, ups_w=1500.0)


@pytest.mark.parametrize(
    ("heard", "why"),
    [
        ({}, ""),
        ({"ups_w": None}, ""),
        # 30 % for the losses of power supplies, and 5 % of the UPS's rating, which is 5000 W.
        ({"ups_w": 1550.0}, ""),
        ({"ups_w": 1551.0}, "the UPS carries 1551 W, and this host draws 1000 W (bmc)"),
        ({"ups_w": 1551.0, "source": OwnSource.GPU}, ""),
        ({"ups_w": 1551.0, "watts": 9.9}, ""),
        ({"ups_w": 264.0, "watts": 10.0}, "the UPS carries 264 W, and this host draws 10 W (bmc)"),
        ({"before_w": 900.0, "before_ups_w": 800.0}, ""),
        (
            {"before_w": 900.0, "before_ups_w": 799.0},
            "the UPS's load moved by +701 W to 1500 W, and this host draws 1000 W (bmc), which moved by +100 W",
        ),
        (
            {"before_w": 1100.0, "before_ups_w": 2201.0},
            "the UPS's load moved by -701 W to 1500 W, and this host draws 1000 W (bmc), which moved by -100 W",
        ),
        ({"before_w": 900.0}, ""),
        ({"before_ups_w": 100.0}, ""),
    ],
)
def test_by_what_other_hosts_on_the_ups_are_noticed(heard: dict[str, Any], why: str) -> None:
    """One that the settings do not name: without it the load of the UPS is taken for this host's alone."""
    alone = replace(POLICY, shared=None)
    state = replace(STATE, own=(replace(BOTH, **heard),))
    assert own.looks_shared(alone, state) == why
    assert own.looks_shared(POLICY, state) == ""
    assert own.looks_shared(replace(alone, rating_w=None), state) == ""
    useless = replace(BOTH, source=OwnSource.GPU)
    assert own.looks_shared(alone, replace(state, own=(useless, *state.own))) == why


def test_where_nothing_is_known_no_drop_is_counted_on() -> None:
    """A host without a number in the settings or a rating promises the battery nothing."""
    policy = replace(POLICY, rating_w=None, shared=Shared(own_w=1500.0))
    result = _own(policy, STATE)
    assert (result.source, result.load) == (OwnSource.UNKNOWN, 0.0)
    assert budget.paused_load(policy, PAUSING, 0.8, own=result) == 0.8


def test_a_rating_can_come_from_the_ups() -> None:
    """A UPS that reports both watts and percent reports its rating."""
    reading = Reading(at_s=0.0, ups="ups", source="snmp", output_source=OutputSource.UTILITY, load_pct=40.0, watts=2000)
    state = replace(STATE, feed=Feed(reading=reading))
    assert own.rating_w(replace(POLICY, rating_w=None), state) == 5000.0
    both = replace(POLICY, feeds=(FeedPolicy(policy=POLICY), FeedPolicy(policy=POLICY)))
    assert own.rating_w(both, state) == 10000.0


@pytest.mark.parametrize(
    ("readings", "now_s", "why"),
    [
        (((1.0, 900.0),), 160.0, "no reading for 159 s"),
        (((1.0, -5.0),), 1.0, "implausible: -5 W"),
        (((1.0, math.nan),), 1.0, "implausible: 0 W"),
        (((1.0, 2e6),), 1.0, "implausible: 2e+06 W"),
        (((1.0, 4600.0),), 1.0, "4600 W is more than the whole UPS carries, perhaps that of the whole chassis"),
        (((1.0, 900.0), (6.0, 1400.0), (11.0, 900.0)), 11.0, "it jumps up and down"),
        (((1.0, 900.0), (6.0, 1400.0), (11.0, 900.0)), 42.0, ""),
        (((1.0, 1400.0), (6.0, 500.0), (11.0, 510.0)), 11.0, ""),
    ],
)
def test_what_cannot_be_this_hosts_load_is_passed_over(
    readings: tuple[tuple[float, float], ...], now_s: float, why: str
) -> None:
    """Each doubt is said in words, and the next source counts."""
    result = _own(POLICY, _heard(STATE, *readings), now_s)
    assert [text for _, text in result.passed_over] == ([why] if why else [])
    assert result.source is (OwnSource.HOSTS if why else OwnSource.BMC)


def test_a_reading_above_the_load_of_the_ups_has_time_while_that_makes_a_step() -> None:
    """The UPS reports its load up to 10 s late: for so long the BMC may be ahead of it."""
    state = replace(STATE, battery=Battery(load=0.2, step_at_s=9.0))
    state = _heard(state, (10.0, 1500.0), (15.0, 1510.0))
    assert _own(POLICY, state, 15.0).source is OwnSource.BMC
    assert _own(POLICY, _heard(state, (20.0, 1505.0)), 20.0).source is OwnSource.HOSTS


def test_a_reading_that_does_not_follow_a_step_of_the_ups_is_frozen() -> None:
    """Training draws now more, now less: the same to the watt for minutes is no measurement."""
    state = replace(STATE, battery=Battery(load=0.5, step_at_s=20.0))
    state = _heard(state, *((float(at_s), 900.0) for at_s in range(1, 90, 5)))
    assert _own(POLICY, state, 86.0).source is OwnSource.HOSTS
    assert _own(POLICY, _heard(state, (91.0, 901.0)), 91.0).source is OwnSource.BMC


def test_what_is_frozen_is_reported_with_its_watts_and_for_how_long() -> None:
    stepped = _heard(replace(STATE, battery=Battery(load=0.5, step_at_s=20.0)), (1.0, 900.0), (79.9, 900.0))
    assert own.doubt(POLICY, stepped, stepped.own[0], 80.0) == ""
    stepped = _heard(stepped, (80.0, 900.0))
    because = "frozen: 900 W for 79 s, and the UPS's load made a step"
    assert own.doubt(POLICY, stepped, stepped.own[0], 80.0) == because
    fresh = _heard(replace(stepped, own=()), (20.0, 900.0), (80.0, 900.0))
    assert own.doubt(POLICY, fresh, fresh.own[0], 80.0) == "", "new with the step"


def test_a_reading_that_does_not_follow_a_pause_is_frozen() -> None:
    """The same to the watt as before training was asked to pause, a quarter of a minute after that."""
    before = (OwnLoadAtPause(source=OwnSource.BMC, watts=900.0, drop_w=300.0),)
    outage = Outage(id="one", since_s=50.0, grade=Grade.FULL)
    phase = Holding(outage=outage, began_s=110.0, paused_at_s=100.0, own=before)
    state = replace(STATE, phase=phase, trainers=(PAUSED,))
    frozen = _heard(state, (99.0, 900.0), (115.0, 900.0))
    because = "frozen: 900 W since before training was asked to pause"
    assert own.doubt(POLICY, frozen, frozen.own[0], 115.0) == because
    assert _own(POLICY, frozen, 115.0).passed_over == ((OwnSource.BMC, because),)
    for calm in (
        _heard(state, (99.0, 900.0), (114.9, 900.0)),
        _heard(state, (100.0, 900.0), (115.0, 900.0)),
        replace(frozen, trainers=PAUSING),
        replace(frozen, trainers=(replace(PAUSED, activity=Activity.GONE),)),
        replace(frozen, phase=replace(phase, own=())),
    ):
        assert own.doubt(POLICY, calm, calm.own[0], 115.0) == ""


def test_twice_own_w_is_a_chassis() -> None:
    """Two hosts of a chassis draw less than the UPS carries: only the settings can show it."""
    policy = replace(POLICY, shared=Shared(own_w=900.0))
    assert _own(policy, _heard(STATE, (1.0, 1900.0)), 1.0).source is OwnSource.SETTINGS


def test_an_older_reading_does_not_replace_a_newer_one() -> None:
    """A BMC that answers late is overtaken by the next question."""
    state = _heard(STATE, (10.0, 900.0), (5.0, 1400.0))
    assert state.own == (OwnLoadReport(source=OwnSource.BMC, watts=900.0, at_s=10.0, since_s=10.0, ups_w=4000.0),)


def test_only_this_hosts_part_of_the_load_falls() -> None:
    """Own 28 % of 80 %: 40 % of it go, and with ten hosts no pause brings the load to 60 %."""
    result = _own(replace(POLICY, shared=Shared(own_w=1400.0)), STATE)
    assert budget.paused_load(POLICY, PAUSING, 0.8, own=result) == pytest.approx(0.8 - 0.4 * 0.28)
    assert budget.paused_load(POLICY, PAUSING, 0.8) == pytest.approx(0.48)


def test_a_drop_in_watts_is_used_in_watts() -> None:
    """1000 W are 20 points of 5000 W, whatever the neighbours draw; never more than the part that this host has."""
    drop = Drop(before=0.3, after=0.1, at_s=0.0, watts=1000.0)
    learned = Learned(pauses=(("llm", drop),))
    result = _own(replace(POLICY, shared=Shared(own_w=1500.0)), STATE)
    assert budget.paused_load(POLICY, PAUSING, 0.8, learned, own=result) == pytest.approx(0.6)
    small = replace(result, load=0.15)
    assert budget.paused_load(POLICY, PAUSING, 0.8, learned, own=small) == pytest.approx(0.8 - 0.15 * 2 / 3)


def test_the_extra_reserve_of_a_tier() -> None:
    """One stop for each tier above, or what the settings say; the most important tier has none."""
    assert budget.shed_s(POLICY) == 0.0
    low = replace(POLICY, shed=Shed(tier=0, highest=2))
    assert budget.shed_s(low) == 220.0
    assert budget.shed_s(replace(low, shared=Shared(hosts=3, longest_stop_s=60.0), ups_off_s=30.0)) == 180.0
    assert budget.shed_s(replace(POLICY, shed=Shed(tier=2, highest=2))) == 0.0
    assert budget.shed_s(replace(POLICY, shed=Shed(tier=5, highest=2))) == 0.0
    assert budget.shed_s(replace(POLICY, shed=Shed(tier=2, highest=2, extra_s=45.0))) == 45.0


def _played(name: str) -> StoryResult:
    return Player().play((SCENARIOS / f"{name}.txt").read_text(encoding="utf-8").partition("\n----\n")[0])


def _phase_s(result: StoryResult, new: str) -> float:
    line = next(line for line in result.lines if "phase_changed" in line and f"-> {new} " in line)
    return float(line.split()[0])


def test_a_lower_tier_makes_room_first() -> None:
    """Tier 1 pauses before tier 2 does and is off before it, by the same readings of the same UPS."""
    low, high = _played("shed-tier-1"), _played("shed-tier-2")
    assert _phase_s(low, "emergency_checkpoint") < _phase_s(high, "emergency_checkpoint")
    assert _phase_s(low, "shutdown") + 110.0 < _phase_s(high, "shutdown")


def test_a_neighbour_that_pauses_makes_us_hold_longer() -> None:
    """The same outage, and nothing but the neighbour's draw differs."""
    assert _phase_s(_played("shared-neighbour-pauses"), "shutdown") > 2 * _phase_s(
        _played("shared-neighbour-draws-on"), "shutdown"
    )


@pytest.mark.parametrize(
    "name",
    [
        "shared-neighbour-draws-on",
        "shared-neighbour-draws-on-not-measured",
        "shared-neighbour-pauses",
        "shared-neighbour-appears",
        "shared-watts-frozen",
        "shared-watts-negative",
        "shared-watts-of-the-chassis",
        "shared-hosts-wrong-by-three",
        "shared-bmc-answers-late",
    ],
)
def test_training_that_obeyed_is_neither_stopped_nor_ended(name: str) -> None:
    """Whatever the neighbours draw and whatever measures us: before this host knew its own load, it was."""
    result = _played(name)
    assert result.ordered(StopTrainer) == []
    assert result.ordered(TerminateTrainer) == []


def test_the_same_outage_as_if_the_host_were_alone_stops_and_ends_it() -> None:
    """Shows that the test above can fail: without `shared` the neighbour's load is taken for ours."""
    result = play(
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20 rating_w=5400 signals=1",
        "auto policy sync poweroff resume trainer_resume checkpoint=15 cap restore stop terminate continue",
        "0..5 utility load=72.2 charge=100 runtime=360",
        "6..97 battery load=72.2 charge=100-0.23 runtime=380-1",
        "98 trainer llm paused=true",
        "99..150 battery load=53.7 charge=79-0.15 runtime=450-1",
    )
    assert result.ordered(StopTrainer)
    assert result.ordered(TerminateTrainer)


def test_a_hold_teaches_the_drop_in_watts() -> None:
    """Measured by the BMC before the pause and in the hold: 1000 W, of this host alone."""
    result = _played("shared-neighbour-pauses")
    ((_, drop),) = result.state.learned.pauses
    assert drop.watts == pytest.approx(1000.0, abs=15.0)
    assert drop.before == pytest.approx(1512.0 / 5400.0)


def _drill(*own_loads: str, scope: str = "pause") -> StoryResult:
    before, after = own_loads
    return play(
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20 rating_w=5400 shared=hosts:2",
        "auto policy sync poweroff resume trainer_resume=0.1 pause=0.1 checkpoint=15",
        f"0..20 utility load=72.2 charge=100 runtime=360 {before}",
        "20.2 trainer llm step=100 durable_age_s=60",
        f"20.5 drill scope={scope}",
        f"21..34 utility load=72.2 charge=100 runtime=360 {before}",
        "35 trainer llm paused=true",
        f"36..75 utility load=53.7 charge=100 runtime=500 {after}",
        "76 trainer llm paused=false",
        f"77..90 utility load=72.2 charge=100 runtime=360 {before}",
    )


@pytest.mark.parametrize(
    ("loads", "watts", "of", "before"),
    [(("| own bmc 1500~6", "| own bmc 500~6"), 1000.0, "bmc", 0.279), (("", ""), 999.0, "ups", 0.2685)],
)
def test_a_drill_learns_watts(loads: tuple[str, str], watts: float, of: str, before: float) -> None:
    """By the BMC where there is one, else by how much the UPS's load fell while this host alone paused.

    It fell from what this host drew: its half of the UPS's load where nothing measures it.
    """
    result = _drill(*loads)
    ((_, drop),) = result.state.learned.pauses
    assert drop.watts == pytest.approx(watts, abs=15.0)
    assert drop.before == pytest.approx(before, abs=0.001)
    assert drop.before - drop.after == pytest.approx(watts / 5400.0, abs=0.003)
    report = result.state.learned.drill
    assert report is not None
    assert dict(report.figures)["load_of"] == of


def test_a_drill_learns_what_the_host_draws_besides_its_gpus() -> None:
    result = _drill("| own bmc 1500~6 | own gpu 1100~6", "| own bmc 500~6 | own gpu 100~6")
    assert result.state.learned.rest_w == 400.0


def test_a_drill_on_a_shared_ups_records_the_power_off_by_the_load_of_the_whole_ups() -> None:
    """The battery carries all hosts of the UPS, also where a BMC measures this one: both drills report alike."""
    for loads in (("| own bmc 1500~6", "| own bmc 500~6"), ("", "")):
        outcome = _drill(*loads, scope="full")
        report = outcome.state.learned.drill
        assert report is not None
        figures = dict(report.figures)
        assert (report.result, figures["power_off_grade"], figures["stop_s"]) == ("passed", "full", 170.0)
        assert figures["runtime_paused_s"] == pytest.approx(301.7, abs=5.0)


def test_an_outage_in_a_drill_on_a_shared_ups_begins_with_the_load_of_the_whole_ups() -> None:
    """The drill has paused this host: 72.2 % of the UPS before, 53.7 % now."""
    result = play(
        "policy table=50:540,75:360,100:240 trainer=llm:pause:20 rating_w=5400 shared=hosts:2",
        "auto policy sync poweroff pause=0.1 checkpoint=15",
        "0..20 utility load=72.2 charge=100 runtime=360 | own bmc 1500~6",
        "20.2 trainer llm step=100 durable_age_s=60",
        "20.5 drill scope=pause",
        "21..34 utility load=72.2 charge=100 runtime=360 | own bmc 1500~6",
        "35 trainer llm paused=true",
        "36..40 utility load=53.7 charge=100 runtime=500 | own bmc 500~6",
        "41..43 battery load=53.7 charge=99 runtime=500 | own bmc 500~6",
    )
    assert not isinstance(result.state.phase, Online)
    assert result.state.phase.outage.load_at_start == pytest.approx(0.722, abs=0.005)


def test_a_gpu_cap_pays_less_where_others_draw_on() -> None:
    """10 points off 80 % of the UPS, and not off this host's 30 %: the battery lasts longer by that much only."""
    points = ((0.5, 540.0), (0.75, 360.0), (1.0, 240.0))
    cap = Drop(before=0.3, after=0.2, at_s=0.0, speed=0.9)
    state = replace(STATE, learned=Learned(cap=cap))
    policy = replace(POLICY, runtime_table=points)
    alone = escalation.cap_gain(replace(policy, shared=None), state)
    among_others = escalation.cap_gain(policy, state)
    assert alone == pytest.approx(0.9 * account.tau_s(points, 0.2) / account.tau_s(points, 0.3))
    assert among_others == pytest.approx(0.9 * account.tau_s(points, 0.7) / account.tau_s(points, 0.8))


def test_while_a_pause_settles_what_others_add_is_counted() -> None:
    """A neighbour that appears just then: the load less our own drop, and not the forecast of before."""
    phase = EmergencyCheckpoint(
        outage=Outage(id="one", since_s=0.0, grade=Grade.FULL),
        began_s=100.0,
        because="budget",
        paused_load=0.6,
        settle_by_s=145.0,
        own_drop=0.2,
    )
    policy = replace(POLICY, runtime_table=((0.5, 540.0), (1.0, 240.0)))

    def counted(load: float) -> float:
        state = State(phase=phase, battery=Battery(load=load, left=0.5, at_s=110.0), trainers=PAUSING)
        return conditions.outage_budget(policy, state, 110.0).load

    assert counted(0.8) == pytest.approx(0.6)
    assert counted(1.1) == pytest.approx(0.9)
    assert counted(0.62) == pytest.approx(0.62), "it has arrived: what is measured counts"


def test_a_reading_from_just_after_the_order_accuses_nobody() -> None:
    """The trainer had not heard it yet; on a BMC that answers late, that reading is still the newest one at 15 s."""
    before = (OwnLoadAtPause(source=OwnSource.BMC, watts=1500.0, drop_w=600.0),)
    outage = Outage(id="one", since_s=0.0, grade=Grade.FULL)
    phase = EmergencyCheckpoint(outage=outage, began_s=100.0, because="budget", own_drop=0.1, own=before)
    state = _heard(replace(STATE, phase=phase, trainers=PAUSING), (101.0, 1490.0))
    early = own.fall(POLICY, state, 115.0)
    assert early is not None
    assert not early.stays_high
    late = own.fall(POLICY, _heard(state, (112.0, 1493.0)), 115.0)
    assert late is not None
    assert late.stays_high


ALONE = replace(POLICY, shared=None, rating_w=12500.0)  # of which the UPS carries 80 %
TRAINING = replace(STATE, feed=Feed(supply=Supply.UTILITY), trainers=PAUSING)


def _gpu_share(state: State, *readings: tuple[float, float, str], policy: Policy = ALONE) -> float | None:
    for at_s, watts, source in readings:
        event = OwnLoad(at_s=at_s, source=OwnSource(source), watts=watts)
        state = own.with_gpu_share(policy, own.enter(policy, state, event), at_s)
    return state.learned.gpu_share


def test_a_pause_that_was_never_seen_is_presumed_from_the_gpus() -> None:
    """Eight GPUs of 690 W in a host of 9 kW give more than the default, one of 350 W in 800 W less; settings win."""
    for gpus_w, host_w, share in [(5520.0, 9000.0, 0.571), (350.0, 800.0, 0.694)]:
        part = _gpu_share(TRAINING, (1.0, gpus_w, "gpu"), policy=replace(ALONE, rating_w=host_w / 0.8))
        learned = Learned(gpu_share=part)
        assert budget.paused_load(ALONE, PAUSING, 0.8, learned) == pytest.approx(0.8 * share, abs=0.001)
        policy = replace(ALONE, paused_load_share=0.5, paused_is_set=True)
        assert budget.paused_load(policy, PAUSING, 0.8, learned) == pytest.approx(0.4)
        seen = replace(learned, pauses=(("llm", Drop(before=0.8, after=0.3, at_s=0.0)),))
        assert budget.paused_load(ALONE, PAUSING, 0.8, seen) == pytest.approx(0.3), "what was seen counts"
    assert budget.paused_load(ALONE, PAUSING, 0.8, Learned()) == pytest.approx(0.48)


def test_which_readings_give_the_gpus_part() -> None:
    """A UPS of this host's own is its whole; on a shared one only the BMC or the outlets are."""
    assert _gpu_share(TRAINING, (1.0, 5000.0, "gpu")) == 0.5
    assert _gpu_share(TRAINING, (1.0, 2000.0, "gpu"), policy=POLICY) is None
    assert _gpu_share(TRAINING, (1.0, 2500.0, "pdu"), (2.0, 2000.0, "gpu"), policy=POLICY) == 0.8
    assert _gpu_share(TRAINING, (1.0, 2500.0, "pdu"), (200.0, 2000.0, "gpu"), policy=POLICY) is None, "not one moment"
    assert _gpu_share(TRAINING, (1.0, 1000.0, "bmc"), (2.0, 2000.0, "gpu"), policy=POLICY) is None, "more than the host"
    assert _gpu_share(TRAINING, (1.0, 2000.0, "bmc"), (2.0, 2000.0, "gpu"), policy=POLICY) is None, "the whole host"
    assert _gpu_share(TRAINING, (1.0, 2500.0, "bmc"), (61.0, 2000.0, "gpu"), policy=POLICY) == 0.8, "within a minute"
    assert _gpu_share(TRAINING, (1.0, 2100.0, "bmc"), (2.0, 2000.0, "gpu")) == 0.2, "a BMC that reads too low"
    assert _gpu_share(TRAINING, (1.0, math.nan, "gpu")) is None
    for state in (
        replace(TRAINING, trainers=()),
        replace(TRAINING, trainers=(replace(PAUSING[0], activity=Activity.PAUSED),)),
        replace(TRAINING, trainers=(replace(PAUSING[0], activity=Activity.GONE),)),
        replace(TRAINING, trainers=(replace(PAUSING[0], pause_ordered=True),)),
        replace(TRAINING, trainers=(replace(PAUSING[0], conduct=Conduct.CONTINUE),)),
        replace(TRAINING, feed=Feed(supply=Supply.BATTERY)),
        replace(TRAINING, owed=(GpuCap(),)),
    ):
        assert _gpu_share(state, (1.0, 2000.0, "gpu")) is None, "no training on utility at full power"


def test_gpus_at_rest_between_two_epochs_hide_no_load() -> None:
    busy = [(1.0, 5000.0, "gpu"), (601.0, 6000.0, "gpu")]
    assert _gpu_share(TRAINING, *busy) == 0.6
    assert _gpu_share(TRAINING, *busy, (1201.0, 1000.0, "gpu")) == 0.55


# --- What a hold shows of this host -----------------------------------------------------------------------------------

PAUSED = Trainer(name="llm", conduct=Conduct.PAUSE, activity=Activity.PAUSED, pause_ordered=True)
SHOWN = Drop(before=0.3, after=0.18, at_s=160.0, watts=600.0)
"""1500 W of 5000 W before, 900 W in the pause."""


def _shown(*trainers: Trainer, now_s: float = 160.0, now_w: float = 900.0, **changes: object) -> Drop | None:
    """What is known of the drop of `llm` after a look at this hold, 60 s after the pause."""
    before = (OwnLoadAtPause(source=OwnSource.BMC, watts=1500.0, drop_w=600.0),)
    outage = Outage(id="one", since_s=50.0, grade=Grade.FULL, load_at_start=0.8)
    phase = Holding(outage=outage, began_s=110.0, paused_at_s=100.0, settle_by_s=145.0, own=before, own_drop=0.12)
    state = replace(STATE, phase=phase, trainers=trainers or (PAUSED,), **changes)  # type: ignore[arg-type]
    turn = Turn(POLICY, _heard(state, (now_s - 1.0, now_w)), now_s)
    lifecycle.learn_drop(turn, phase)
    return needs.drop_of(turn.state.learned, "llm")


def test_a_hold_shows_what_a_pause_brings_in_watts() -> None:
    """Of the one that paused, whatever the neighbours draw; an older outage's drop is replaced by it."""
    training_on = Trainer(name="b", conduct=Conduct.CONTINUE)
    dead = replace(PAUSED, name="dead", activity=Activity.GONE)
    assert _shown() == _shown(PAUSED, training_on) == _shown(PAUSED, dead) == SHOWN
    assert _shown(learned=Learned(pauses=(("llm", replace(SHOWN, at_s=49.0)),))) == SHOWN
    assert _shown(now_s=145.0) == replace(SHOWN, at_s=145.0)


def test_a_hold_shows_nothing_of_a_draw_that_may_have_other_reasons() -> None:
    """Not settled, not paused, two at once, a cap, a signal, or no fall that a pause explains."""
    assert _shown(now_s=144.9) is None
    assert _shown(replace(PAUSED, activity=Activity.TRAINING)) is None
    assert _shown(PAUSED, replace(PAUSED, name="c")) is None
    assert _shown(owed=(GpuCap(),)) is None
    assert _shown(owed=(Signalled(trainer="llm", word="stop"),)) is None
    assert _shown(now_w=1500.0) is None
    for at_s in (50.0, 150.0):
        known = replace(SHOWN, after=0.25, at_s=at_s)
        assert _shown(learned=Learned(pauses=(("llm", known),))) == known, "an outage shows a drop once"
