"""Metric families of the trap port; without one there are no series at all."""

from collections.abc import Iterator
from typing import Final

from powerguard.daemon.samples import Family, Sample, View, counter, gauge, plain


def _results(view: View) -> Iterator[Sample]:
    if view.daemon.traps is not None:
        for result, count in view.daemon.traps.results.items():
            yield (result,), float(count)


def _last(view: View) -> Iterator[Sample]:
    if view.daemon.traps is not None:
        for ups, at_s in view.daemon.traps.last_at_s.items():
            moment = view.times.at(at_s)
            if moment is not None:
                yield (ups,), moment


TRAPS: Final[tuple[Family, ...]] = (
    gauge(
        "traps_listening",
        "1 while the trap port is open; absent when the settings have none.",
        plain(lambda v: None if v.daemon.traps is None else v.daemon.traps.listening is not None),
    ),
    counter(
        "traps_total",
        "Datagrams at the trap port since the settings were read, by what they were worth; `hint` caused a poll.",
        _results,
        "result",
    ),
    counter(
        "traps_dropped_total",
        "Datagrams for which the kernel had no room.",
        plain(lambda v: None if v.daemon.traps is None else v.daemon.traps.dropped),
    ),
    counter(
        "traps_answered_total",
        "Answers sent: to informs, and to questions for our engine id.",
        plain(lambda v: None if v.daemon.traps is None else v.daemon.traps.answered),
    ),
    gauge(
        "trap_last_timestamp_seconds",
        "When a trap last made us poll this UPS; absent before the first.",
        _last,
        "ups",
    ),
)
