"""Whose word each term of the plan is: a default, a setting and a measurement must not read alike."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from powerguard.core.energy.needs import fold
from powerguard.core.model.actions import Conduct
from powerguard.core.model.policy import BatteryModel, FeedPolicy, Learned, Need, TrainerPolicy
from powerguard.core.model.state import Supplied, Supply
from powerguard.daemon.observe.status import plan_view
from powerguard.daemon.observe.terms import Term, terms
from tests.daemon.watched import DAY_S, HEALTH, NOW_S, POLICY, Watched, half_fed, reading, scene, taught


def term(daemon: Watched, name: str) -> Term:
    from powerguard.core.decide import conditions

    now = conditions.outage_budget(daemon.policy, daemon.state, daemon.clock())
    return next(each for each in terms(daemon, now) if each.name == name)


def with_health(daemon: Watched, **changes: object) -> Watched:
    daemon.policy = replace(daemon.policy, **changes)  # type: ignore[arg-type]
    return daemon


def worn(daemon: Watched) -> Watched:
    daemon.state = replace(daemon.state, feed=replace(daemon.state.feed, reading=reading(replace_battery=True)))
    return daemon


def later(daemon: Watched, days: float) -> Watched:
    daemon.now_s = NOW_S + days * DAY_S
    return daemon


HEALTHS: list[tuple[Callable[[], Watched], str]] = [
    (scene, "assumed, because no discharge has measured it"),
    (lambda: with_health(scene(), health=0.9, health_from="settings"), "budget.health of the settings"),
    (lambda: with_health(scene(), health=0.6, health_from="battery_old"), "older than 3 years"),
    (lambda: worn(scene()), "the UPS asks for a new battery"),
    (lambda: worn(with_health(scene(), health=0.5, health_replace=0.5, health_from="settings")), "budget.health"),
    (taught, "measured 2026-09-09: 82 % +-5 points, 1.9 points off since, 31 % deep, by the fall of the charge"),
    (lambda: worn(taught()), "measured 82 % on 2026-09-09 does not raise it"),
    (lambda: later(taught(), 400), "no discharge has measured it; the measurement of 2026-09-09 has expired"),
]


@pytest.mark.parametrize(("make", "words"), HEALTHS)
def test_health(make: Callable[[], Watched], words: str) -> None:
    assert words in term(make(), "health").source


def test_a_low_measurement_counts_even_where_the_ups_wants_a_new_battery() -> None:
    daemon = worn(taught())
    model = replace(daemon.state.battery.model, health=replace(HEALTH, share=0.4))
    daemon.state = replace(daemon.state, battery=replace(daemon.state.battery, model=model))
    assert "measured 2026-09-09: 40 %" in term(daemon, "health").source


def test_the_health_of_several_upses_is_that_of_each() -> None:
    """The mean was "assumed, because no discharge has measured it" although one of them was measured."""
    daemon = taught()
    feed, battery = daemon.state.feed, daemon.state.battery
    new = replace(battery, health=0.6, model=BatteryModel())
    other = replace(daemon.policy, ups="rack-b", health=0.6, health_from="settings")
    daemon.policy = replace(daemon.policy, feeds=(FeedPolicy(policy=daemon.policy), FeedPolicy(policy=other)))
    upses = tuple(Supplied(ups=ups, feed=feed, battery=of) for ups, of in (("rack-a", battery), ("rack-b", new)))
    daemon.state = replace(daemon.state, upses=upses, battery=replace(new, health=0.7))
    source = term(daemon, "health").source
    assert "rack-a 80 %, measured 2026-09-09: 82 %" in source
    assert source.endswith("; rack-b 60 %, budget.health of the settings")


def test_runtime_by_load() -> None:
    daemon = scene()
    assert term(daemon, "tau_now_s").source.endswith("runtime_table of the settings (3 points)")
    assert "learned, 2 points" in term(taught(), "tau_now_s").source
    daemon.policy = replace(daemon.policy, runtime_table=())
    assert "unknown" in term(daemon, "tau_now_s").source
    daemon.state = replace(daemon.state, battery=replace(daemon.state.battery, tau_point=(0.62, 1260.0)))
    assert term(daemon, "tau_now_s").source.endswith("reported runtime / charge on utility (no runtime_table)")


def test_paused_load() -> None:
    """The measured drop of each, or the settings' share for all as soon as one was never seen."""
    assert term(scene(), "load_paused").source == "load_now x 0.6 (default of budget.paused_load; llm pause)"
    daemon = taught()
    assert term(daemon, "load_paused").source == "measured drop of llm 62 % -> 26 % on 2026-10-19"
    other = replace(daemon.state.trainers[0], name="rl")
    daemon.state = replace(daemon.state, trainers=(*daemon.state.trainers, other))
    origin = "default of budget.paused_load"
    assert term(daemon, "load_paused").source == (
        f"load_now x 0.6 ({origin}; llm, rl pause; rl with no measured pause)"
    )
    daemon.state = replace(daemon.state, trainers=(replace(other, conduct=Conduct.CONTINUE),))
    assert term(daemon, "load_paused").source == "load_now: no living trainer pauses"
    assert term(taught("holding"), "load_paused").source == "load_now: training is paused already"
    daemon = taught()
    flat = replace(daemon.state.learned.pauses[0][1], after=0.62)
    daemon.state = replace(daemon.state, learned=replace(daemon.state.learned, pauses=(("llm", flat),)))
    assert term(daemon, "load_paused").source == "measured drop of llm 62 % -> 62 % on 2026-10-19", (
        "of a training that runs"
    )


def test_a_pause_that_frees_nothing_by_the_settings_is_no_pause_that_has_come() -> None:
    """budget.paused_load: 1, as for a load that is not training's."""
    daemon = scene()
    daemon.policy = replace(daemon.policy, paused_load_share=1.0, paused_is_set=True)
    assert term(daemon, "load_paused").source == "load_now x 1 (settings; llm pause)"


def test_paused_load_from_the_gpus() -> None:
    daemon = scene()
    daemon.state = replace(daemon.state, learned=replace(daemon.state.learned, gpu_share=0.5))
    result = term(daemon, "load_paused")
    assert result.source == (
        "load_now x 0.65 (GPUs draw 50 % of this host's load, a pause frees 70 % of that; llm pause)"
    )
    assert result.value == pytest.approx(0.62 * 0.65)
    daemon.policy = replace(daemon.policy, paused_is_set=True)
    assert term(daemon, "load_paused").source == "load_now x 0.6 (settings; llm pause)"


def test_the_source_belongs_to_the_number() -> None:
    """The predicted load is the one that the named drop makes."""
    assert term(taught(), "load_paused").value == pytest.approx(0.26)
    assert term(scene(), "load_paused").value == pytest.approx(0.62 * 0.6)
    assert term(taught(), "host_stop_s").value == 42.0
    assert term(taught(), "checkpoint_s.llm").value == 21.375
    assert term(taught(), "recharge_s").value == 22000.0


def test_checkpoint() -> None:
    daemon = scene()
    assert term(daemon, "checkpoint_s.llm").source == "reported by the trainer"
    assert term(taught(), "checkpoint_s.llm").source == "q95 of 4 measured"
    trainer = replace(daemon.state.trainers[0], reported_s=None)
    daemon.state = replace(daemon.state, trainers=(trainer,))
    assert term(daemon, "checkpoint_s.llm").source.startswith("settings: checkpoint_s, else twice size")
    daemon.state = replace(daemon.state, trainers=(replace(trainer, name="found"),))
    assert term(daemon, "checkpoint_s.found").source.startswith("default: neither")
    once = Learned(needs=(Need(of="checkpoint", name="llm", seconds=(12.0,)),))
    daemon.state = replace(daemon.state, trainers=(replace(trainer, reported_s=20.0),), learned=once)
    assert term(daemon, "checkpoint_s.llm").source == "reported by the trainer, more than 1 measured"


def test_stop() -> None:
    assert term(scene(), "host_stop_s").source == "host.force_after_s (0 of the 3 stops measured that it takes)"
    assert term(taught(), "host_stop_s").source == "q95 of 3 measured stops, at most force_after_s"
    daemon = scene()
    daemon.policy = replace(daemon.policy, stop_is_set=True)
    assert term(daemon, "host_stop_s").source == "settings: budget.stop_q95_s"


def test_a_short_stop_counts_with_the_median() -> None:
    daemon = scene()
    daemon.policy = replace(daemon.policy, runtime_table=((0.5, 180.0), (1.0, 72.0)))
    assert plan_view(daemon)["grade"] == "short"
    assert term(daemon, "host_stop_s").source == "default (0 of the 3 stops measured that it takes)"
    stops = Learned(needs=(Need(of="stop", name="", seconds=(45.0, 45.5, 59.0)),))
    daemon.state = replace(daemon.state, learned=stops)
    daemon.policy = fold(daemon.policy, stops)
    assert term(daemon, "host_stop_s").source == "median of 3 measured stops, at most force_after_s"


def test_recharge() -> None:
    assert term(scene(), "recharge_s").source == "from empty to full; settings"
    assert term(taught(), "recharge_s").source == "from empty to full; learned from a recharge"


def test_trainers_of_the_settings_are_those_of_the_policy() -> None:
    """What `scene` is made of: else the words above would be about nobody."""
    assert POLICY.trainers == (TrainerPolicy(name="llm"),)
    assert scene().state.battery.model == BatteryModel()


def test_the_load_and_the_energy_of_several_upses_are_named_as_means() -> None:
    """They had the source of the reading that came last, and the smallest of three terms that two UPSes do not have."""
    daemon = half_fed(Supply.BATTERY, "on_battery")
    means = "mean by power supplies: rack-a {0} %, rack-b {0} %"
    assert term(daemon, "load_now").source == means.format(62)
    assert term(daemon, "left").source == f"{means.format(53)}; on battery it never rises"
    for name in ("left_by_charge", "left_by_runtime"):
        assert term(daemon, name).source.endswith(": each UPS has its own")
    assert "all together" in term(daemon, "tau_now_s").source
