"""What Prometheus reads of a sentinel. What is not known is absent, never 0; outage ids are in no label."""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from powerguard.sentinel.decide import Ending
from powerguard.sentinel.run import Sentinel
from powerguard.sentinel.server import ANSWERS, Door

PREFIX: Final = "powerguard_sentinel_"

GAUGES: Final = {
    "armed": ((), "1: hosts are powered on; 0: dry-run."),
    "store_writable": ((), "1: intents are on disk as they are here; 0: they are not, and new ones are refused."),
    "store_damaged": ((), "1: what was kept was not whole at the start, and was set aside."),
    "intent": (("host",), "1: the host has said at its power-off that it may be powered on again; 0: it has not."),
    "intent_tries": (("host",), "Orders given for the intent that stands."),
    "host_on": (("host",), "1: its BMC says that it is on; 0: that it is off. Absent: it does not say."),
    "bmc_up": (("host",), "1: the last look at its BMC told whether it is on; 0: it failed."),
    "ups_good": (
        ("ups",),
        "1: utility holds, no countdown runs, charge is enough; 0: hosts are not powered on from it.",
    ),
}
COUNTERS: Final = {
    "orders": (("host", "result"), "Orders to power on: ordered, failed, recorded (dry-run)."),
    "intents_ended": (("host", "how"), f"Intents that have ended: {', '.join(Ending)}."),
    "requests": (("answer",), f"Requests by how they were answered: {', '.join(ANSWERS)}."),
}


class SentinelCollector(Collector):
    """Reads the sentinel at the moment of the scrape; keeps nothing."""

    def __init__(self, sentinel: Sentinel, door: Door) -> None:
        self._sentinel = sentinel
        self._door = door

    def describe(self) -> Iterator[Metric]:
        """Name no families beforehand."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every family, those without a series too."""
        gauges = dict(self._gauges())
        for name, (labels, text) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for values, value in gauges[name].items():
                gauge.add_metric(values, value)
            yield gauge
        counters = dict(self._counters())
        for name, (labels, text) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for values, count in counters[name].items():
                counter.add_metric(values, count)
            yield counter

    def _gauges(self) -> Iterator[tuple[str, dict[tuple[str, ...], float]]]:
        sentinel = self._sentinel
        keeper, world = sentinel.keeper, sentinel.world()
        yield "armed", {(): float(sentinel.settings.mode == "armed")}
        yield "store_writable", {(): float(not keeper.error)}
        yield "store_damaged", {(): float(bool(keeper.damage))}
        yield "intent", {(name,): float(name in world.intents) for name in world.hosts}
        yield "intent_tries", {(name,): float(intent.tries) for name, intent in world.intents.items()}
        told = {name: seen.power_on for name, seen in world.seen.items()}
        yield "host_on", {(name,): float(power_on) for name, power_on in told.items() if power_on is not None}
        yield "bmc_up", {(name,): float(power_on is not None) for name, power_on in told.items()}
        yield "ups_good", {(name,): float(each.good) for name, each in world.supplies.items()}

    def _counters(self) -> Iterator[tuple[str, Mapping[tuple[str, ...], int]]]:
        yield "orders", {(host, result): count for (host, result), count in self._sentinel.orders.items()}
        yield "intents_ended", {(host, how): count for (host, how), count in self._sentinel.ends.items()}
        yield "requests", {(word,): self._door.counts[word] for word in ANSWERS}


def registry(sentinel: Sentinel, door: Door) -> CollectorRegistry:
    """Return a registry with nothing but this sentinel."""
    own = CollectorRegistry(auto_describe=False)
    own.register(SentinelCollector(sentinel, door))
    return own
