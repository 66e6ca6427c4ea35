"""`step` never raises and nothing a peer says can poison the account or the journal: any number, in any phase."""

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given, settings

from powerguard.core.decide import conditions
from powerguard.core.decide.machine import step
from powerguard.core.model.actions import Conduct, PowerOff, TriggerCheckpoint
from powerguard.core.model.events import (
    Abort,
    CheckpointNow,
    CheckpointProgress,
    Done,
    Failed,
    ForeignStop,
    OutputSource,
    OwnLoad,
    OwnSource,
    Reading,
    SetMaintenance,
    SourceFailed,
    Tick,
    TrainerSeen,
)
from powerguard.core.model.state import State
from tests.core.invariants import check_step, kept
from tests.core.play import Player

TO_HOLDING = """
0..2 utility load=75 charge=100 runtime=360
3..80 battery load=75 charge=100-0.27 runtime=350-1 on_battery=1+1
"""
TO_SHUTDOWN = TO_HOLDING + "81..180 battery load=45 charge=70-0.3 runtime=300-1 on_battery=79+1\n"
STORIES = {
    "online": "0..2 utility load=75 charge=100 runtime=360",
    "on_battery": "0..2 utility load=75 charge=100 runtime=360\n3..9 battery load=75 charge=100 on_battery=1+1",
    "emergency_checkpoint": TO_HOLDING,
    "holding": TO_HOLDING + "81..82 battery load=45 charge=78 runtime=500\n82 durable llm\n",
    "shutdown": TO_SHUTDOWN,
    "recovery": TO_SHUTDOWN + "20 reboot gap=60\n21 utility load=10 charge=20\n",
}
POLICIES = ("table=50:540,75:360,100:240 trainer=llm:pause:25", "trainer=llm:pause:20")


def _state(words: str, phase: str) -> tuple[Player, State]:
    player = Player()
    story = STORIES[phase] + ("81..90 battery\n82 durable llm\n" if "table" not in words and phase == "holding" else "")
    result = player.play(f"policy {words}\nauto policy\n" + story)
    return player, result.state


STATES = [_state(POLICIES[0], phase) for phase in STORIES]
numbers = st.one_of(
    st.none(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, -1.0, 1e-320, 1e308, -1e308, math.inf, -math.inf, math.nan, 50.0, 100.0]),
)
readings = st.builds(
    dict,
    output_source=st.sampled_from(OutputSource),
    runtime_s=numbers,
    charge_pct=numbers,
    load_pct=numbers,
    watts=numbers,
    on_battery_s=numbers,
    input_present=st.sampled_from([None, True, False]),
    input_v=numbers,
    battery_temp_c=numbers,
    low_battery=st.booleans(),
    replace_battery=st.booleans(),
    testing=st.booleans(),
    calibrating=st.booleans(),
    forced_shutdown=st.booleans(),
    output_off_in_s=numbers,
)


@pytest.mark.parametrize("phase", STORIES)
def test_the_stories_lead_where_they_say(phase: str) -> None:
    """The fuzzing below would be worth little if every story stayed online."""
    player, _ = STATES[list(STORIES).index(phase)]
    assert player.result is not None
    assert player.result.phase == phase


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    begin=st.sampled_from(STATES),
    each_fields=st.lists(readings, min_size=1, max_size=5),
    rating_w=st.sampled_from([None, 5400.0]),
    after_s=st.sampled_from([0.01, 1.0, 1.0, 8.0, 4000.0]),
)
@example(  # The first news of battery after a long silence once sent training on.
    begin=STATES[0],
    each_fields=[
        {"output_source": OutputSource.UTILITY},
        {"output_source": OutputSource.UTILITY, "output_off_in_s": 1.0},
        {"output_source": OutputSource.OFF, "output_off_in_s": 0.0},
        {"output_source": OutputSource.BATTERY},
    ],
    rating_w=None,
    after_s=4000.0,
)
def test_no_reading_raises_or_poisons(
    begin: tuple[Player, State], each_fields: list[dict[str, Any]], rating_w: float | None, after_s: float
) -> None:
    player, state = begin
    policy = replace(player.policy, rating_w=rating_w)
    at_s = player.last_s
    for fields in each_fields:
        at_s += after_s
        reading = Reading(at_s=at_s, ups="ups", source="snmp", **fields)
        answer = step(policy, state, reading)
        check_step(policy, state, reading, answer)
        state = kept(answer.state)
        for action in answer.actions:
            assert math.isfinite(action.by_s)
        now = conditions.outage_budget(policy, state, at_s)
        sums = (now.load, now.tau_now_s, now.left, now.reff_s, now.reff_paused_s, now.cut_in_s, now.need_s)
        assert all(value is None or (math.isfinite(value) and value >= 0.0) for value in sums)
        assert all(f.at_s is None or math.isfinite(f.at_s) for f in conditions.forecast(policy, state, now))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(begin=st.sampled_from(STATES), value=numbers, other=numbers, data=st.data())
def test_no_other_event_raises_or_poisons(
    begin: tuple[Player, State], value: float | None, other: float | None, data: st.DataObject
) -> None:
    player, state = begin
    at_s = data.draw(st.sampled_from([player.last_s + 1.0, other if other is not None else 0.0]))
    number = 0.0 if value is None else value
    order = TriggerCheckpoint(
        id=state.trainers[0].order or "gone",
        by_s=at_s,
        trainer="llm",
        reason="on_battery",
        after=Conduct.PAUSE,
        outage="o",
    )
    event = data.draw(
        st.sampled_from(
            [
                Tick(at_s=at_s),
                TrainerSeen(
                    at_s=at_s, trainer="llm", alive=True, checkpoint_s=value, step_s=number, durable_age_s=other
                ),
                TrainerSeen(
                    at_s=at_s, trainer="new", alive=True, checkpoint_s=value, step_s=number, durable_age_s=other
                ),
                CheckpointProgress(at_s=at_s, trainer="llm", action_id=order.id, stage="writing", eta_s=value),
                OwnLoad(at_s=at_s, source=OwnSource.BMC, watts=number),
                SetMaintenance(at_s=at_s, until_s=number, reason="r", who="w"),
                SourceFailed(at_s=at_s, ups="ups", source="snmp", reason="r", lost=True),
                Done(at_s=at_s, action=order, took_s=number, detail=(("step", "x"), ("at_paused_step", None))),
                Failed(at_s=at_s, action=order, took_s=number, reason="r", timed_out=bool(number)),
                Done(
                    at_s=at_s,
                    action=PowerOff(id="p", by_s=at_s, outage="o", grade="full", force_after_s=1.0),
                    took_s=0.0,
                ),
                Abort(at_s=at_s, who="w"),
                CheckpointNow(at_s=at_s, who="w"),
                ForeignStop(at_s=at_s, host_stopping=True),
            ]
        )
    )
    answer = step(player.policy, state, event)
    state = kept(answer.state)
    after = Tick(at_s=player.last_s + 5.0)
    follow = step(player.policy, state, after)
    check_step(player.policy, state, after, follow)
    kept(follow.state)


@pytest.mark.parametrize("at_s", [math.nan, math.inf, -math.inf, 1e300])
def test_an_event_without_a_time_changes_nothing(at_s: float) -> None:
    """A clock that says no time is no clock: what it came with is dropped."""
    player, state = STATES[0]
    reading = Reading(at_s=at_s, ups="ups", source="snmp", output_source=OutputSource.BATTERY, input_present=False)
    for event in (reading, Tick(at_s=at_s)):
        assert step(player.policy, state, event).state is state


def test_the_edges_of_what_is_plausible() -> None:
    """A number at the edge is kept, one beyond it was not told."""
    from powerguard.core.supply.fusion import plausible

    edges = {
        "runtime_s": (0.0, 1e7),
        "charge_pct": (0.0, 100.0),
        "load_pct": (0.0, 1000.0),
        "on_battery_s": (0.0, 1e7),
        "output_off_in_s": (0.0, 1e7),
        "watts": (0.0, 1e9),
        "input_v": (-1e6, 1e6),
        "battery_temp_c": (-300.0, 1000.0),
    }
    plain = Reading(at_s=1.0, ups="ups", source="snmp", output_source=OutputSource.UTILITY)
    full = replace(plain, **{name: most for name, (_, most) in edges.items()})
    for name, (least, most) in edges.items():
        for value in (least, most):
            assert getattr(plausible(replace(plain, **{name: value})), name) == value
            one_reading = replace(full, **{name: value})
            assert plausible(one_reading) is one_reading, "the short way, which runs for every reading"
            other = "watts" if name == "input_v" else "input_v"
            assert plausible(replace(one_reading, **{other: math.nan})) == replace(one_reading, **{other: None})
        for value in (least - 1e-3 * max(1.0, abs(least)), most + 1e-3 * abs(most), math.nan, math.inf, -math.inf):
            assert plausible(replace(full, **{name: value})) == replace(full, **{name: None})
