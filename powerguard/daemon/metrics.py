"""The scrape: the table of families, turned into what Prometheus reads. A registry of its own, no global state."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector, CollectorRegistry

from powerguard.daemon.families import SECTIONS
from powerguard.daemon.port import BOUNDS_S, Daemon
from powerguard.daemon.samples import Family, View

PREFIX: Final = "powerguard_"
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class DaemonCollector(Collector):
    """Reads the daemon at the moment of the scrape; keeps nothing."""

    def __init__(self, daemon: Daemon) -> None:
        """Watch this daemon."""
        self._daemon = daemon

    def describe(self) -> Iterator[Metric]:
        """Name no families beforehand: registering must not already read a daemon that is still starting."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every family, those without a series too: a query for them then finds a type, and nothing false."""
        view = View(self._daemon)
        for families in SECTIONS.values():
            for family in families:
                yield _metric(family, view)


def _metric(family: Family, view: View) -> Metric:
    name = PREFIX + family.name
    if family.kind == "histogram":
        return _histogram(name, family, view)
    metric: GaugeMetricFamily | CounterMetricFamily
    if family.kind == "counter":
        metric = CounterMetricFamily(name, family.help, labels=family.labels)
    else:
        metric = GaugeMetricFamily(name, family.help, labels=family.labels)
    for values, value in family.samples(view):
        metric.add_metric(values, value)
    return metric


def _histogram(name: str, family: Family, view: View) -> HistogramMetricFamily:
    metric = HistogramMetricFamily(name, family.help, labels=family.labels)
    bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    for values, seconds in family.samples(view):
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(bounds, view.daemon.actions.buckets[values[0]], strict=True):
            total += count
            buckets.append((bound, float(total)))
        metric.add_metric(values, buckets, seconds)
    return metric


# Neither has types that mypy accepts for a call.
_classic: Callable[[Collector], bytes] = generate_latest
_openmetrics: Callable[[Collector], bytes] = openmetrics.generate_latest


def registry(daemon: Daemon) -> CollectorRegistry:
    """Return a registry with nothing but this daemon."""
    own = CollectorRegistry(auto_describe=False)
    own.register(DaemonCollector(daemon))
    return own


def scrape(own: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return body and content type for an Accept header: OpenMetrics where it is named, else the classic text."""
    if "application/openmetrics-text" in accept:
        return _openmetrics(own), OPENMETRICS
    return _classic(own), TEXT


def reference() -> str:
    """Return docs/reference/metrics.md; a test holds that the page is this."""
    lines = [
        "# Metrics",
        "",
        "Made from `powerguard/daemon/families.py` (`python -m powerguard.daemon.metrics`); a test compares them.",
        "",
        "All names begin with `powerguard_`. What is not known is absent, never 0. Label values of a closed set are",
        "always all there. There is no host label (Prometheus adds `instance`) and no outage id in any label.",
    ]
    for title, families in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | type | labels | meaning |", "| --- | --- | --- | --- |"]
        for family in families:
            labels = ", ".join(f"`{label}`" for label in family.labels)
            lines.append(f"| `{PREFIX}{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 - this is what it is called for
