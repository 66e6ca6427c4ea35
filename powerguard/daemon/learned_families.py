"""The metric families of what was learned: battery, needs, and the GPU cap that rests on them."""

from collections.abc import Iterator
from typing import Final

from powerguard.core import battery as learning
from powerguard.core import needs
from powerguard.core.learned import Health
from powerguard.daemon.origins import health_view
from powerguard.daemon.samples import Family, Number, Sample, View, gauge, of_ups, plain


def _measured(view: View) -> Health | None:
    return view.state.battery.model.health


def _is_measured(view: View) -> Number:
    state, times = view.state, view.times
    if state.feed.reading is None:
        return None
    return health_view(view.policy, state, times.now_s, times.at).origin == "measured"


def _slope(view: View) -> Number:
    discharge = view.state.battery.model.discharge
    return None if discharge is None else discharge.slope


def _needs(view: View) -> Iterator[Sample]:
    for need in view.daemon.state.learned.needs:
        if need.seconds:
            yield (need.of, need.name), needs.q95(need.seconds)


def _needs_counted(view: View) -> Iterator[Sample]:
    for need in view.daemon.state.learned.needs:
        yield (need.of, need.name), float(len(need.seconds))


LEARNED: Final[tuple[Family, ...]] = (
    gauge(
        "ups_battery_health_measured",
        "1 when the health that counts was measured, 0 when it is presumed; absent before the first reading.",
        of_ups(_is_measured),
        "ups",
    ),
    gauge(
        "ups_battery_health_timestamp_seconds",
        "When the health was last measured; absent when it never was.",
        of_ups(lambda v: None if (health := _measured(v)) is None else v.times.at(health.at_s)),
        "ups",
    ),
    gauge(
        "ups_battery_health_error_ratio",
        "Half the width of what that measurement allows.",
        of_ups(lambda v: None if (health := _measured(v)) is None else health.error),
        "ups",
    ),
    gauge(
        "ups_battery_recharge_seconds",
        "From empty to full, as measured or as the settings say.",
        of_ups(lambda v: learning.recharge_s(v.policy, v.state.battery.model)),
        "ups",
    ),
    gauge(
        "ups_battery_runtime_slope_ratio",
        "Seconds of reported runtime that go by in a second of the discharge that runs; 1 is honest.",
        of_ups(_slope),
        "ups",
    ),
    gauge("need_seconds", "How long this takes: q95 of what was measured.", _needs, "need", "name"),
    gauge("need_samples", "How many measurements that rests on, at most 32.", _needs_counted, "need", "name"),
    gauge("gpu_cap_active", "1 while GPU power is capped.", plain(lambda v: v.daemon.state.cap is not None)),
    gauge(
        "trainers_signalled",
        "Trainers that were stopped or ended by a signal because they drew on, and do not go on yet.",
        plain(lambda v: len(v.daemon.state.signalled)),
    ),
)
