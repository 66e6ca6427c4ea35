"""The capacity check says what the machine does: its verdicts, times and fixes, held against the real rules."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.core.decide import conditions
from powerguard.core.energy import account
from powerguard.core.model.actions import Conduct, Grade
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import (
    Activity,
    CheckpointInFlight,
    Durable,
    EmergencyCheckpoint,
    NotDurable,
    Outage,
)
from powerguard.core.size.host import (
    LEAST_RESERVE_S,
    MOST_BATTERY,
    Lever,
    Site,
    Verdict,
    changed,
    policy_of,
    size,
    state_at,
    works,
)
from tests.core.play import Player

SRT = ((0.5, 540.0), (0.75, 360.0), (1.0, 240.0))
"""APC SRT 6000VA: 9, 6 and 4 minutes at 50, 75 and 100 % load."""


def site(load: float = 0.75, paused: float = 0.6, checkpoint_s: float = 20.0, **fields: object) -> Site:
    """A site with an SRT 6000VA. paused: as a share of the load."""
    made = Policy(**{"boot_id": "b", "ups": "u", "runtime_table": SRT, "rating_w": 6000.0, **fields})  # type: ignore[arg-type]
    return Site(policy=made, load=load, load_paused=load * paused, checkpoint_s=checkpoint_s)


def sites() -> st.SearchStrategy[Site]:
    """Sites of all kinds: far too small, just so, far too large."""

    def make(base_s: float, k: float, load: float, paused: float, checkpoint_s: float, policy: Policy) -> Site:
        table = tuple((x, base_s * float(x**-k)) for x in (0.25, 0.5, 1.0))
        return Site(
            policy=replace(policy, runtime_table=table),
            load=load,
            load_paused=load * paused,
            checkpoint_s=checkpoint_s,
        )

    policies = st.builds(
        lambda health, margin, reserve_s, stop_s, off_s: Policy(
            boot_id="b",
            ups="u",
            health=health,
            margin=margin,
            reserve_s=reserve_s,
            stop_q95_s=stop_s,
            stop_median_s=min(45.0, stop_s),
            ups_off_s=off_s,
        ),
        st.floats(0.2, 1.0),
        st.floats(0.0, 0.5),
        st.floats(0.0, 120.0),
        st.floats(5.0, 110.0),
        st.sampled_from((0.0, 30.0)),
    )
    return st.builds(
        make,
        st.floats(30.0, 1500.0),
        st.floats(1.0, 1.46),
        st.floats(0.1, 1.0),
        st.floats(0.2, 1.0),
        st.floats(1.0, 400.0),
        policies,
    )


# --- By hand ----------------------------------------------------------------------------------------------------------


def test_the_example_by_hand() -> None:
    """SRT 6000VA, 20 % margin, 60 s reserve, 8.5 GB in 20 s, 75 % load, health and paused load as presumed.

    Paused: 45 % load, below the table: 540 x 0.54 / 0.49 = 595.10 s. Usable: min(0.8 x 0.75, 0.75 - 0.1) = 0.6.
    Allowed: 0.75 x 0.6 x 595.10 = 267.80 s. Needed: 20 + 110 + 60 = 190 s. The emergency comes at
    190 / 0.75 / 595.10 / 0.8 = 53.21 %, after (0.75 - 0.5321) x 360 = 78.44 s; the commit at
    170 / 595.10 + 0.1 = 38.57 %, (0.5321 - 0.3857) x 595.10 = 87.16 s later.
    """
    answer = size(site())
    assert answer.verdict is Verdict.FULL
    assert answer.fixes == ()
    assert (answer.site, answer.budget.grade) == (site(), Grade.FULL)
    full, short, bare = answer.grades
    assert (full.stop_s, short.stop_s, bare.stop_s) == (170.0, 65.0, 10.0)
    assert (full.need_s, short.need_s, bare.need_s) == (190.0, 85.0, 30.0)
    assert full.spare_s == pytest.approx(77.80, abs=0.01)
    assert answer.course is not None
    assert answer.course.training_s == pytest.approx(78.44, abs=0.01)
    assert answer.course.durable_s == pytest.approx(98.44, abs=0.01)
    assert answer.course.commit_s == pytest.approx(165.59, abs=0.01)
    # The rest after the stop and its reserve is what was never counted with: a tenth, 59.51 s of it when paused.
    assert [(stage.name, round(stage.begins_s, 1), round(stage.lasts_s, 1)) for stage in answer.course.stages] == [
        ("training", 0.0, 78.4),
        ("checkpoint", 78.4, 20.0),
        ("holding", 98.4, 67.2),
        ("stop", 165.6, 110.0),
        ("reserve", 275.6, 60.0),
        ("margin", 335.6, 59.5),
    ]
    assert [round(stage.load, 2) for stage in answer.course.stages] == [0.75] + 5 * [0.45]
    lefts = [round(stage.left, 4) for stage in answer.course.stages]
    assert lefts == [0.75, 0.5321, 0.4985, 0.3857, 0.2008, 0.1]
    assert [round(stage.left_after, 4) for stage in answer.course.stages] == [*lefts[1:], 0.0]


def test_a_checkpoint_that_the_commit_overtakes_leaves_nothing_to_hold() -> None:
    """300 s are too long: the stop begins in the middle of it, and the stages say so."""
    course = size(site(load=1.0, checkpoint_s=300.0)).course
    assert course is not None
    assert not course.durable
    assert [stage.name for stage in course.stages] == ["checkpoint", "stop", "margin"]
    assert course.stages[0].lasts_s == pytest.approx(course.commit_s)


def test_an_outage_begins_with_a_full_battery_and_one_trainer_that_pauses() -> None:
    """A battery of the presumed health, of which nothing is used; a paused load is never more than the load."""
    begun = state_at(site(health=0.6, paused=1.2), 0.0)
    assert (begun.battery.left, begun.battery.used, begun.battery.health) == (0.6, 0.0, 0.6)
    assert (begun.battery.at_s, begun.feed.since_s) == (0.0, 0.0)
    (trainer,) = begun.trainers
    assert (trainer.name, trainer.conduct, trainer.checkpoint_s) == ("training", Conduct.PAUSE, 20.0)
    assert policy_of(site(paused=1.2)).paused_load_share == 1.0


def test_a_lever_is_changed_in_its_own_unit() -> None:
    """Half the load pauses at half the load; a faster stop cannot have a slower median."""
    assert changed(site(load=0.5), Lever.LOAD, 0.25).load_paused == pytest.approx(0.15)
    faster = changed(site(), Lever.STOP, 30.0).policy
    assert (faster.stop_q95_s, faster.stop_median_s) == (30.0, 30.0)
    assert changed(site(), Lever.STOP, 90.0).policy.stop_median_s == site().policy.stop_median_s


def test_seconds_are_shown_to_the_second() -> None:
    """Short by 8.5 s: a reserve of 51 s or a stop in 101 s is enough, and 52 s or 102 s is not."""
    fixes = {fix.lever: fix.value for fix in size(site(load=1.0, checkpoint_s=41.0)).fixes}
    assert (fixes[Lever.RESERVE], fixes[Lever.STOP]) == (51.0, 101.0)


def test_short_by_seven_seconds_and_a_half() -> None:
    """Full load, 40 s: 0.75 x 0.6 x 450 = 202.5 s for 210 s. Every fix is the hand-computed one, on the safe side."""
    answer = size(site(load=1.0, checkpoint_s=40.0))
    assert answer.verdict is Verdict.SHORT
    assert answer.grades[0].spare_s == pytest.approx(-7.5)
    fixes = {fix.lever: fix.value for fix in answer.fixes}
    # 210 / 0.45 = 466.67 s are needed at the paused load, which the table has at 0.6 x 450 / 466.67 = 0.5786.
    assert fixes == {
        Lever.CHECKPOINT: 32.5,
        Lever.LOAD: 0.964,
        Lever.PAUSED_LOAD: 0.578,
        Lever.BATTERY: 1.04,
        Lever.HEALTH: 0.78,
        Lever.RESERVE: 52.0,
        Lever.STOP: 102.0,
    }


def test_a_battery_more_than_twice_as_large() -> None:
    """300 s at full load: 470 s are needed, 202.5 s allowed, so 2.321 times the battery."""
    answer = size(site(load=1.0, checkpoint_s=300.0))
    assert answer.verdict is Verdict.NONE
    assert {fix.lever: fix.value for fix in answer.fixes} == {
        Lever.CHECKPOINT: 32.5,
        # 470 / 0.45 = 1044.4 s, at 540 x 0.54 / 1044.4 - 0.04 = 0.2392 of the rating.
        Lever.LOAD: 0.398,
        Lever.PAUSED_LOAD: 0.239,
        Lever.BATTERY: 2.33,
    }


def test_an_overloaded_ups_is_no_question_of_seconds() -> None:
    """10.2 kW on 6 kW: whatever the battery, only a smaller load helps."""
    answer = size(site(load=1.7, paused=0.1, checkpoint_s=1.0))
    assert answer.verdict is Verdict.OVERLOAD
    assert [fix.lever for fix in answer.fixes] == [Lever.LOAD]
    assert answer.fixes[0].value <= 1.0


def test_nobody_knows_the_battery() -> None:
    """No table: no verdict in its favour, no course, no fix."""
    answer = size(site(runtime_table=()))
    assert (answer.verdict, answer.course, answer.fixes) == (Verdict.NONE, None, ())
    assert [grade.spare_s for grade in answer.grades] == [-190.0, -85.0, -30.0]


# --- What it says is what the rules do --------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(sites())
def test_the_verdict_is_the_grade_that_an_outage_begins_with(given_site: Site) -> None:
    """One judgement, whoever asks: the verdict, the spare seconds, and the grade of `budget` for the same state."""
    answer = size(given_site)
    state = state_at(given_site, 0.0)
    now = conditions.outage_budget(policy_of(given_site), state, 0.0)
    best = next((each.grade for each in answer.grades if each.fits), None)
    assert now.grade is (best or Grade.BARE)
    assert now.fits is (best is not None)
    assert answer.verdict.value == ("none" if best is None else best.value)
    for each in answer.grades:
        assert each.fits is (each.spare_s >= 0.0) or abs(each.spare_s) < 1e-6
    assert works(given_site) is (answer.verdict is Verdict.FULL)


def _first(rule: Callable[[float], bool], begin_s: float, end_s: float) -> tuple[float, float]:
    """When a rule first comes true, and how finely that was looked at; infinite where it does not."""
    step_s = max(0.25, (end_s - begin_s) / 250)
    count = math.ceil((end_s - begin_s) / step_s) + 1
    return next((begin_s + at * step_s for at in range(count) if rule(begin_s + at * step_s)), math.inf), step_s


@settings(max_examples=40, deadline=None)
@given(sites())
def test_training_ends_when_the_rule_says_so(given_site: Site) -> None:
    """Step by step through `plan.checkpoint_due`: the emergency comes within one step of what was told."""
    _pauses_when_due(given_site)


def test_training_pauses_within_the_dwell_where_waiting_would_lose_it() -> None:
    """Two seconds in, 14.5 s are needed; two more at full load and they would not be there when paused."""
    tiny = site(
        load=1.0,
        paused=0.35,
        checkpoint_s=0.5,
        runtime_table=((0.35, 41.3), (1.0, 12.15)),
        stop_q95_s=2.0,
        stop_median_s=2.0,
        reserve_s=12.0,
    )
    course = size(tiny).course
    assert course is not None
    # Reff paused falls by 0.8 x 41.3 / 12.15 = 2.72 s a second, from 24.78 s to 14.5 / 0.75 = 19.33 s.
    assert course.training_s == pytest.approx(2.003, abs=0.01)
    _pauses_when_due(tiny)


def _pauses_when_due(given_site: Site) -> None:
    policy = policy_of(given_site)
    course = size(given_site).course
    assert course is not None

    def due(at_s: float) -> bool:
        state = state_at(given_site, at_s)
        return bool(conditions.checkpoint_due(policy, state, conditions.outage_budget(policy, state, at_s), at_s))

    found_s, step_s = _first(due, 0.0, course.training_s + 10.0)
    assert course.training_s - 1e-6 <= found_s <= course.training_s + step_s + 1e-6


@settings(max_examples=40, deadline=None)
@given(sites())
def test_the_commit_is_when_the_rule_says_so(given_site: Site) -> None:
    """Step by step through `plan.commit_due` from the pause on, with the load that a pause leaves."""
    _commits_when_due(given_site)


def test_the_commit_keeps_its_dwell() -> None:
    """A host that stops in 2 s, with 12 s of reserve, on a battery of half a minute: there are 8 s to wait."""
    tiny = site(
        load=1.0,
        paused=1.0,
        checkpoint_s=0.5,
        runtime_table=((1.0, 32.5),),
        stop_q95_s=2.0,
        stop_median_s=2.0,
        reserve_s=12.0,
    )
    course = size(tiny).course
    assert course is not None
    assert (course.training_s, course.commit_s) == (4.0, 8.0)
    _commits_when_due(tiny)


def test_a_dwell_that_would_cost_the_last_stop_is_not_kept() -> None:
    """A battery of 20 s, 12 of them effective: a bare stop in 10 s fits until 2.5 s, and 5.6 are left at 8 s."""
    tiny = site(
        load=1.0,
        paused=1.0,
        checkpoint_s=0.5,
        runtime_table=((1.0, 20.0),),
        stop_q95_s=10.0,
        stop_median_s=10.0,
        reserve_s=12.0,
    )
    course = size(tiny).course
    assert course is not None
    assert (course.training_s, course.commit_s) == (0.0, pytest.approx(2.5))
    _commits_when_due(tiny)


def _commits_when_due(given_site: Site) -> None:
    policy = policy_of(given_site)
    course = size(given_site).course
    assert course is not None
    began = state_at(given_site, course.training_s)
    outage = Outage(
        id="o",
        since_s=0.0,
        grade=conditions.outage_budget(policy, began, course.training_s).grade,
        load_at_start=given_site.load,
    )

    def due(at_s: float) -> bool:
        battery = replace(began.battery, load=given_site.load_paused)
        trainer = replace(
            began.trainers[0],
            activity=Activity.PAUSED,
            checkpoint=Durable() if at_s >= course.durable_s else NotDurable(),
            pause_ordered=True,
            in_flight=CheckpointInFlight(order="1", eta_at_s=course.durable_s),
            ordered_at_s=course.training_s,
        )
        state = replace(
            began,
            phase=EmergencyCheckpoint(outage=outage, began_s=course.training_s, because="budget"),
            battery=account.advance(policy, battery, at_s, draining=True),
            trainers=(trainer,),
        )
        return bool(conditions.commit_due(policy, state, conditions.outage_budget(policy, state, at_s), at_s))

    found_s, step_s = _first(due, course.training_s, course.commit_s + 10.0)
    # Within the dwell the rule asks anew at each look, and a stop of lower grade may turn out to be worth the wait.
    latest_s = max(course.commit_s, policy.commit_dwell_s) + step_s
    assert course.commit_s - 1e-6 <= found_s <= latest_s + 1e-6
    assert course.durable is (course.durable_s <= course.commit_s)


@settings(max_examples=100, deadline=None)
@given(sites())
def test_the_stages_are_the_battery_from_full_to_empty(given_site: Site) -> None:
    """End to end, each as long as its energy lasts at its load: nothing is planned with twice, nothing is lost."""
    course = size(given_site).course
    assert course is not None
    at_s, left = 0.0, given_site.policy.health
    for stage in course.stages:
        assert (stage.begins_s, stage.left) == (pytest.approx(at_s), pytest.approx(left))
        tau_s = account.tau_s(given_site.policy.runtime_table, stage.load)
        assert stage.left - stage.left_after == pytest.approx(stage.lasts_s / tau_s, rel=1e-6, abs=1e-9)
        at_s, left = at_s + stage.lasts_s, stage.left_after
    assert left == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(sites())
def test_every_fix_is_enough_and_none_is_much_too_large(given_site: Site) -> None:
    """What is told really makes a full stop fit, and a little less of it does not."""
    grain = {Lever.CHECKPOINT: 0.2, Lever.LOAD: 0.002, Lever.PAUSED_LOAD: 0.002, Lever.BATTERY: 0.02}
    grain |= {Lever.HEALTH: 0.02, Lever.RESERVE: 2.0, Lever.STOP: 2.0}
    answer = size(given_site)
    assert (answer.fixes == ()) or answer.verdict is not Verdict.FULL
    for fix in answer.fixes:
        assert works(changed(given_site, fix.lever, fix.value))
        back = fix.value + math.copysign(grain[fix.lever], fix.now - fix.value)
        if abs(fix.now - fix.value) > grain[fix.lever]:
            assert not works(changed(given_site, fix.lever, back))
        assert not (fix.lever is Lever.RESERVE and fix.value < LEAST_RESERVE_S)
        assert not (fix.lever is Lever.BATTERY and fix.value > MOST_BATTERY)


@settings(max_examples=40, deadline=None)
@given(sites(), st.sampled_from(tuple(Lever)))
def test_a_lever_that_is_not_reported_does_not_help(given_site: Site, lever: Lever) -> None:
    """As far as a lever may go, it is not enough: what is missing from the list is missing for a reason."""
    answer = size(given_site)
    if answer.verdict is Verdict.FULL or lever in {fix.lever for fix in answer.fixes}:
        return
    limits = {Lever.CHECKPOINT: 1.0, Lever.LOAD: 0.05, Lever.PAUSED_LOAD: 0.05, Lever.BATTERY: MOST_BATTERY}
    limits |= {Lever.HEALTH: 1.0, Lever.RESERVE: LEAST_RESERVE_S, Lever.STOP: 5.0}
    policy = given_site.policy
    now = {Lever.CHECKPOINT: given_site.checkpoint_s, Lever.RESERVE: policy.reserve_s, Lever.STOP: policy.stop_q95_s}
    if lever in now and now[lever] <= limits[lever]:
        return
    assert not works(changed(given_site, lever, limits[lever]))


# --- The whole machine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "checkpoint_s"), [(75, 20), (50, 60), (100, 20), (100, 40), (100, 120), (75, 300), (100, 400)]
)
def test_the_machine_does_what_was_ordered(load: int, checkpoint_s: int) -> None:
    """A whole outage through `step`, a reading a second: each phase begins within 3 s of the forecast.

    Two witnesses, one poll a second and the second look at the commit cost up to that much.
    """
    course = size(site(load=load / 100, checkpoint_s=checkpoint_s)).course
    assert course is not None
    player = Player()
    table = ",".join(f"{100 * x:g}:{s:g}" for x, s in SRT)
    player.line(f"policy table={table} trainer=llm:pause:{checkpoint_s}")
    player.line(f"auto policy sync poweroff checkpoint={checkpoint_s}")
    player.line("0 trainer llm")
    player.line(f"1..3 utility load={load} charge=100")
    began: dict[str, float] = {}
    for second in range(4, 900):
        paused = player.result is not None and player.result.phase in {"emergency_checkpoint", "holding"}
        player.line(f"{second} battery load={0.6 * load if paused else load}")
        assert player.result is not None
        began.setdefault(player.result.phase, second - 4.0)
        if player.result.phase == "shutdown":
            break
    assert began["emergency_checkpoint"] == pytest.approx(course.training_s, abs=3.0)
    assert began["shutdown"] == pytest.approx(course.commit_s, abs=3.5)
    assert ("holding" in began) is (course.durable and course.commit_s - course.durable_s > 3.5)
    if "holding" in began:
        assert began["holding"] == pytest.approx(course.durable_s, abs=3.0)
