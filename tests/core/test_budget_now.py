"""What `plan` and `status` foretell for "power fails now" is what the machine then does, with random hosts."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from powerguard.core.decide import conditions
from powerguard.core.model.actions import Grade
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Online, Shutdown, State
from powerguard.daemon.observe.readiness import is_ready, of_battery
from tests.core.play import Player

TABLE = ((50, 540.0), (75, 360.0), (100, 240.0))
WITNESSES_S = 4.0
"""Two witnesses, a reading a second, and the second look at the commit."""
PAUSED = 0.6


def host(*, load: int, charge: int, checkpoint_s: int, scale: float, stop_s: int, health: float) -> Player:
    """Return a host on utility, with a battery that is partly charged."""
    player = Player()
    table = ",".join(f"{at}:{scale * seconds:g}" for at, seconds in TABLE)
    words = f"stop_q95_s={stop_s} stop_median_s={min(45, stop_s)} force_after_s={stop_s} health={health:g}"
    player.line(f"policy table={table} trainer=llm:pause:{checkpoint_s} {words}")
    player.line(f"auto policy sync poweroff checkpoint={checkpoint_s}")
    player.line("0 trainer llm")
    player.line(f"1..3 utility load={load} charge={charge}")
    return player


hosts = st.fixed_dictionaries(
    {
        "load": st.integers(20, 100),
        "charge": st.integers(5, 100),
        "checkpoint_s": st.integers(1, 300),
        "scale": st.floats(0.3, 3.0),
        "stop_s": st.integers(10, 300),
        "health": st.sampled_from((0.5, 0.75, 1.0)),
    }
)


def state_of(player: Player) -> tuple[Policy, State]:
    assert player.result is not None
    return player.policy, player.result.state


def _grade_after(policy: Policy, state: State, tau_now_s: float) -> Grade:
    """Return the grade of an outage that is seen so late as witnesses permit."""
    left = (state.battery.left or 0.0) - WITNESSES_S / tau_now_s
    return conditions.budget_now(policy, replace(state, battery=replace(state.battery, left=left)), 4.0).grade


@settings(max_examples=100, deadline=None)
@given(hosts)
def test_what_is_forecast_is_done(given_host: dict[str, float]) -> None:
    """Each step within the seconds that witnesses take, with the grade that was shown."""
    player = host(**given_host)  # type: ignore[arg-type]
    policy, state = state_of(player)
    result = conditions.budget_now(policy, state, 4.0)
    steps = {step.action: step.at_s for step in conditions.forecast(policy, state, result)}
    assert isinstance(state.phase, Online)
    assume((steps["shutdown"] or 0.0) < 1200.0)
    assume(_grade_after(policy, state, result.tau_now_s or 1.0) is result.grade)  # At its edge a second decides.
    began: dict[str, float] = {}
    load, grade = given_host["load"], None
    for second in range(4, 1400):
        _, state = state_of(player)
        paused = player.result is not None and player.result.phase in {"emergency_checkpoint", "holding"}
        player.line(f"{second} battery load={PAUSED * load if paused else load}")
        _, state = state_of(player)
        assert player.result is not None
        began.setdefault(player.result.phase, second)
        if isinstance(state.phase, Shutdown):
            grade = state.phase.outage.grade
            break
    # When a pause begins to pay is looked for in so many parts of the time; what is drawn until then moves the rest.
    parts_s = (steps["shutdown"] or 0.0) / conditions._FORECAST_PARTS
    assert began["emergency_checkpoint"] == pytest.approx(steps["emergency_checkpoint"], abs=WITNESSES_S + parts_s)
    assert began["shutdown"] == pytest.approx(steps["shutdown"], abs=WITNESSES_S + parts_s)
    assert grade is not None
    ranks = list(Grade)
    assert ranks.index(grade) >= ranks.index(result.grade), "never a more orderly stop than was shown"
    if result.fits and (result.reff_paused_s or 0.0) * 0.75 > result.need_s + WITNESSES_S:
        assert grade is result.grade


@settings(max_examples=200, deadline=None)
@given(hosts)
def test_a_host_is_not_ready_where_the_plan_does_not_fit(given_host: dict[str, float]) -> None:
    player = host(**given_host)  # type: ignore[arg-type]
    policy, state = state_of(player)
    if not conditions.budget_now(policy, state, 4.0).fits:
        assert not is_ready(of_battery(policy, state, 4.0))
