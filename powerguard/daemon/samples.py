"""What metric families are made of: one moment of the daemon, and the ways to make series of it."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass

from powerguard.core import plan
from powerguard.core.budget import Budget
from powerguard.core.feeds import each_alone
from powerguard.core.model import State, Trainer
from powerguard.core.policy import Policy
from powerguard.core.readings import Reading
from powerguard.daemon.port import BmcView, Daemon, LastOutage, SourceView
from powerguard.daemon.readiness import readiness
from powerguard.daemon.status import Times

Sample = tuple[tuple[str, ...], float]
Number = float | None


class View:
    """One moment of the daemon, with the sums made once for all families.

    each: the same moment of every UPS by itself; where there is one, of that one. ups, policy, state, budget: of the
    host, or in `each` of that UPS.
    """

    def __init__(self, daemon: Daemon) -> None:
        """Take the moment."""
        self.daemon = daemon
        self.policy = daemon.policy
        self.state = daemon.state
        self.times = Times(daemon)
        self.budget: Budget = plan.foretold(daemon.policy, daemon.state, self.times.now_s)
        self.reasons = readiness(daemon)
        self.ups = daemon.policy.ups
        self.each: list[View] = [self]
        if daemon.policy.feeds:
            self.each = [self._of(policy, state) for policy, state in each_alone(daemon.policy, daemon.state)]

    def _of(self, policy: Policy, state: State) -> "View":
        alone = copy(self)
        alone.ups, alone.policy, alone.state = policy.ups, policy, state
        alone.budget = plan.foretold(policy, state, self.times.now_s)
        return alone


Samples = Callable[[View], Iterable[Sample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric family. name: without the prefix; kind: gauge, counter or histogram.

    samples: label values and value of each series there is now; of a histogram, its sums.
    """

    name: str
    kind: str
    help: str
    samples: Samples
    labels: tuple[str, ...] = ()


# --- What samples are made of ---------------------------------------------------------------------------------------


def plain(value: Callable[[View], Number]) -> Samples:
    """One series without labels, or none when not known."""

    def samples(view: View) -> Iterator[Sample]:
        told = value(view)
        if told is not None:
            yield (), float(told)

    return samples


def of_ups(value: Callable[[View], Number]) -> Samples:
    """One series for each UPS."""

    def samples(view: View) -> Iterator[Sample]:
        for each in view.each:
            told = value(each)
            if told is not None:
                yield (each.ups,), float(told)

    return samples


def of_feed(value: Callable[[View], Number]) -> Samples:
    """One series for the host, under the name of its UPS or of the first of several."""
    return lambda view: [] if (told := value(view)) is None else [((view.ups,), float(told))]


def of_reading(value: Callable[[Reading], Number]) -> Samples:
    return of_ups(lambda view: None if (reading := view.state.feed.reading) is None else value(reading))


def of_source(value: Callable[[View, SourceView], Number]) -> Samples:
    def samples(view: View) -> Iterator[Sample]:
        for source in view.daemon.sources:
            told = value(view, source)
            if told is not None:
                yield (source.ups, source.source), float(told)

    return samples


def of_trainer(value: Callable[[View, Trainer], Number]) -> Samples:
    def samples(view: View) -> Iterator[Sample]:
        for trainer in view.daemon.state.trainers:
            told = value(view, trainer)
            if told is not None:
                yield (trainer.name,), float(told)

    return samples


def of_bmc(value: Callable[[View, BmcView], Number]) -> Samples:
    return plain(lambda view: None if (bmc := view.daemon.bmc) is None else value(view, bmc))


def of_last(value: Callable[[LastOutage], Number]) -> Samples:
    return plain(lambda view: None if (outage := view.daemon.last_outage) is None else value(outage))


def one_of(words: Iterable[str], value: Callable[[View], str | None]) -> Samples:
    """A closed set of words of which one holds; no series at all when it is not known which."""
    known = tuple(words)

    def samples(view: View) -> Iterator[Sample]:
        holds = value(view)
        if holds is not None:
            for word in known:
                yield (word,), float(word == holds)

    return samples


def kept_of(prefix: str, words: Iterable[str]) -> Samples:
    known = tuple(words)
    return lambda view: (((word,), float(view.daemon.journal_counters.get(f"{prefix}_{word}", 0.0))) for word in known)


def kept(key: str) -> Callable[[View], Number]:
    return lambda view: view.daemon.journal_counters.get(key, 0.0)


def share(percent: Number) -> Number:
    return None if percent is None else percent / 100.0


def gauge(name: str, text: str, samples: Samples, *labels: str) -> Family:
    return Family(name=name, kind="gauge", labels=labels, help=text, samples=samples)


def counter(name: str, text: str, samples: Samples, *labels: str) -> Family:
    return Family(name=name, kind="counter", labels=labels, help=text, samples=samples)
