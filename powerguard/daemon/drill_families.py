"""The metric families of drills. The moment of the last one is told, not its age: Prometheus has its own clock."""

from typing import Final

from powerguard.core.drill import RESULTS
from powerguard.core.learned import DrillReport
from powerguard.core.model import Drill
from powerguard.daemon.samples import Family, View, gauge, one_of, plain


def _last(view: View) -> DrillReport | None:
    return view.daemon.state.learned.drill


def _running(view: View) -> Drill | None:
    return view.daemon.state.drill


DRILLS: Final[tuple[Family, ...]] = (
    gauge("drill_running", "1 while a drill runs.", plain(lambda v: _running(v) is not None)),
    gauge(
        "drill_last_timestamp_seconds",
        "When the last drill ended; absent before the first.",
        plain(lambda v: None if (last := _last(v)) is None else v.times.at(last.at_s)),
    ),
    gauge(
        "drill_result",
        "1 for how the last drill ended; absent before the first. recorded: in dry-run, so nothing was measured.",
        one_of(RESULTS, lambda v: None if (last := _last(v)) is None else last.result),
        "result",
    ),
    gauge(
        "drill_duration_seconds",
        "How long the last drill took; absent before the first.",
        plain(lambda v: None if (last := _last(v)) is None else last.lasted_s),
    ),
)
