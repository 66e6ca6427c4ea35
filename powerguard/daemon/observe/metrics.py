"""Every metric family in one table: the scrape and the reference page are both made from it.

Base units, `_total` only on counters, moments as Unix seconds. What is not known is absent, never 0. Label values of a
closed set are always all there, so that `rate()` and `== 0` see the very first event. No label grows without bound,
and none holds an outage's id.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from powerguard.core.decide import conditions
from powerguard.core.decide.transitions import TABLE
from powerguard.core.drill.rehearsal import RESULTS
from powerguard.core.energy import learning, needs
from powerguard.core.energy.budget import Budget
from powerguard.core.energy.own import looks_shared
from powerguard.core.model.events import ON_UTILITY, OutputSource, Reading
from powerguard.core.model.policy import DrillReport, Health, Policy
from powerguard.core.model.state import Drill, Online, Shutdown, State, Supply, Trainer, phase_name
from powerguard.core.supply.feeds import each_alone
from powerguard.daemon.observe import figures
from powerguard.daemon.observe.port import ACTION_WORDS, BOUNDS_S, BmcView, Daemon, LastOutage, SourceView, TargetView
from powerguard.daemon.observe.readiness import ERRORS, WARNINGS, aborted_by, is_ready, readiness
from powerguard.daemon.observe.status import VERSION, Times, assumes_failure, covers, layers, required_steps, ups_name
from powerguard.daemon.observe.terms import health_view

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
        self.budget: Budget = conditions.budget_now(daemon.policy, daemon.state, self.times.now_s)
        self.reasons = readiness(daemon)
        self.ups = daemon.policy.ups
        self.each: list[View] = [self]
        if daemon.policy.feeds:
            self.each = [self._of(policy, state) for policy, state in each_alone(daemon.policy, daemon.state)]

    def _of(self, policy: Policy, state: State) -> "View":
        alone = copy(self)
        alone.ups, alone.policy, alone.state = policy.ups, policy, state
        alone.budget = conditions.budget_now(policy, state, self.times.now_s)
        return alone


Samples = Callable[[View], Iterable[Sample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric family. name: without the prefix; kind: gauge, counter or histogram.

    samples: label values and value of each series there is now; of a histogram, its sums.
    bounds, counts: of a histogram: upper bounds of its buckets, and how many fell into each and above, by label value.
    """

    name: str
    kind: str
    help: str
    samples: Samples
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    counts: Callable[[View, str], Iterable[float]] = lambda _view, _word: ()


# --- What samples are made of ---------------------------------------------------------------------------------------


def _known(series: Iterable[tuple[tuple[str, ...], Number]]) -> Iterator[Sample]:
    """Leave out what is not known."""
    return ((labels, float(value)) for labels, value in series if value is not None)


def plain(value: Callable[[View], Number]) -> Samples:
    """One series without labels."""
    return lambda view: _known([((), value(view))])


def of_ups(value: Callable[[View], Number]) -> Samples:
    """One series for each UPS."""
    return lambda view: _known(((each.ups,), value(each)) for each in view.each)


def of_feed(value: Callable[[View], Number]) -> Samples:
    """One series for the host, under the name of its UPS or the names of all of several."""
    return lambda view: _known([((ups_name(view.policy),), value(view))])


def of_reading(value: Callable[[Reading], Number]) -> Samples:
    return of_ups(lambda view: None if (reading := view.state.feed.reading) is None else value(reading))


def of_source(value: Callable[[View, SourceView], Number]) -> Samples:
    return lambda view: _known(((each.ups, each.source), value(view, each)) for each in view.daemon.sources)


def of_trainer(value: Callable[[View, Trainer], Number]) -> Samples:
    return lambda view: _known(((each.name,), value(view, each)) for each in view.daemon.state.trainers)


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


def _own_watts(view: View) -> Iterable[Sample]:
    own = view.budget.own
    return [] if own is None or own.watts is None else [((own.source.value,), own.watts)]


def share(percent: Number) -> Number:
    return None if percent is None else percent / 100.0


def gauge(name: str, text: str, samples: Samples, *labels: str) -> Family:
    return Family(name=name, kind="gauge", labels=labels, help=text, samples=samples)


def counter(name: str, text: str, samples: Samples, *labels: str) -> Family:
    return Family(name=name, kind="counter", labels=labels, help=text, samples=samples)


def _last_drill(view: View) -> DrillReport | None:
    return view.daemon.state.learned.drill


def _running(view: View) -> Drill | None:
    return view.daemon.state.drill


DRILLS: Final[tuple[Family, ...]] = (
    gauge("drill_running", "1 while a drill runs.", plain(lambda v: _running(v) is not None)),
    gauge(
        "drill_last_timestamp_seconds",
        "When the last drill ended; absent before the first.",
        plain(lambda v: None if (last := _last_drill(v)) is None else v.times.at(last.at_s)),
    ),
    gauge(
        "drill_result",
        "1 for the result of the last drill; absent before the first. recorded: in dry-run, without measurements.",
        one_of(RESULTS, lambda v: None if (last := _last_drill(v)) is None else last.result),
        "result",
    ),
    gauge(
        "drill_duration_seconds",
        "How long the last drill took; absent before the first.",
        plain(lambda v: None if (last := _last_drill(v)) is None else last.lasted_s),
    ),
)


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
        "1 when the health in use was measured, 0 when it is assumed; absent before the first reading.",
        of_ups(_is_measured),
        "ups",
    ),
    gauge(
        "ups_battery_health_timestamp_seconds",
        "When the health was last measured; absent if it never was.",
        of_ups(lambda v: None if (health := _measured(v)) is None else v.times.at(health.at_s)),
        "ups",
    ),
    gauge(
        "ups_battery_health_error_ratio",
        "Uncertainty of that measurement: half the width of its interval.",
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
        "Fall of the reported runtime per second of the present discharge; 1 is right, more means a worn battery.",
        of_ups(_slope),
        "ups",
    ),
    gauge("need_seconds", "Seconds that this takes: 95th percentile of the measurements.", _needs, "need", "name"),
    gauge("need_samples", "Number of those measurements, at most 32.", _needs_counted, "need", "name"),
    gauge("gpu_cap_active", "1 while GPU power is capped.", plain(lambda v: v.daemon.state.cap is not None)),
    gauge(
        "trainers_signalled",
        "Trainers that were stopped or ended by a signal because they still drew power, and have not continued yet.",
        plain(lambda v: len(v.daemon.state.signalled)),
    ),
)


def _results(view: View) -> Iterator[Sample]:
    if view.daemon.traps is not None:
        for result, count in view.daemon.traps.results.items():
            yield (result,), float(count)


def _last_trap(view: View) -> Iterator[Sample]:
    last = {} if view.daemon.traps is None else view.daemon.traps.last_at_s
    return _known(((ups,), view.times.at(at_s)) for ups, at_s in last.items())


TRAPS: Final[tuple[Family, ...]] = (
    gauge(
        "traps_listening",
        "1 while the trap port is open; absent when the settings have none.",
        plain(lambda v: None if v.daemon.traps is None else v.daemon.traps.listening is not None),
    ),
    counter(
        "traps_total",
        "Datagrams at the trap port since the settings were read, by result; `hint` caused a poll.",
        _results,
        "result",
    ),
    counter(
        "traps_dropped_total",
        "Datagrams that the kernel dropped for lack of room.",
        plain(lambda v: None if v.daemon.traps is None else v.daemon.traps.dropped),
    ),
    counter(
        "traps_answered_total",
        "Answers sent: to informs, and to requests for the engine id.",
        plain(lambda v: None if v.daemon.traps is None else v.daemon.traps.answered),
    ),
    gauge(
        "trap_last_timestamp_seconds",
        "When a trap last caused a poll of this UPS; absent before the first.",
        _last_trap,
        "ups",
    ),
)


PHASES: Final = tuple(dict.fromkeys(phase_name(old) for old, _ in TABLE))
OUTCOMES: Final = ("ridden_through", "resumed_in_place", "clean_shutdown", "dirty", "rehearsed", "lost")
"""rehearsed: in dry-run a power-off was recorded and utility came back. lost: the journal never saw the end."""

LIFETIME: Final = (
    *(f"outages_{outcome}" for outcome in OUTCOMES),
    "shutdowns",
    "ups_transfers",
    "on_battery_seconds",
    *figures.LIFETIME,
)
"""Names of `Daemon.journal_counters`. A plain counter would be lost at the power-off: exactly when it was counting."""


def _flags(view: View) -> Iterator[Sample]:
    """NUT's status words, so that rules written for a NUT exporter port by renaming."""
    for each in view.each:
        reading = each.state.feed.reading
        if reading is not None:
            for flag, value in _words(reading).items():
                yield (each.ups, flag), float(value)


def _words(reading: Reading) -> dict[str, bool]:
    source = reading.output_source
    return {
        "OL": source in ON_UTILITY,
        "OB": source is OutputSource.BATTERY,
        "LB": reading.low_battery,
        "RB": reading.replace_battery,
        "BYPASS": source is OutputSource.BYPASS,
        "CAL": reading.calibrating,
        "OFF": source is OutputSource.OFF,
        "OVER": reading.overload,
        "TRIM": source is OutputSource.TRIM,
        "BOOST": source is OutputSource.BOOST,
        "FSD": reading.forced_shutdown,
        "ALARM": bool(reading.alarms),
    }


def _polls(view: View) -> Iterator[Sample]:
    for source in view.daemon.sources:
        yield (source.ups, source.source, "ok"), float(source.polls - source.failures)
        yield (source.ups, source.source, "failed"), float(source.failures)


def _reasons(view: View) -> Iterator[Sample]:
    standing = {reason.name for reason in view.reasons}
    for name in (*ERRORS, *WARNINGS):
        yield (name,), float(name in standing)


def _margin(view: View) -> Number:
    now = view.budget
    return None if now.slack_s is None or now.pause_need_s <= 0.0 else now.slack_s / now.pause_need_s


def _supply(view: View) -> Number:
    supply = view.state.feed.supply
    return None if supply is Supply.UNKNOWN else float(supply is Supply.BATTERY)


def _outage_start(view: View) -> Number:
    phase = view.daemon.state.phase
    return None if isinstance(phase, Online) else view.times.at(phase.outage.since_s)


def _deadline(view: View) -> Number:
    state = view.daemon.state
    is_suspended = state.maintenance is not None and not isinstance(state.phase, Shutdown)
    if isinstance(state.phase, Online) or aborted_by(state) or is_suspended:
        return None
    if assumes_failure(state):
        return None
    if not isinstance(state.phase, Shutdown) and conditions.is_spared(view.daemon.policy, state, view.budget):
        return None
    steps = conditions.forecast(view.daemon.policy, state, view.budget)
    ends = [step.at_s for step in steps if step.action in ("shutdown", "forced power-off")]
    return view.times.at(ends[0]) if ends else None


def _maintenance(view: View) -> Number:
    maintenance = view.daemon.state.maintenance
    return None if maintenance is None else view.times.at(maintenance.until_s)


def _version(_: View) -> Iterator[Sample]:
    yield (VERSION, ".".join(str(part) for part in sys.version_info[:3])), 1.0


# --- The table ------------------------------------------------------------------------------------------------------


_KEPT = "Survives power-off."

_DAEMON: Final = (
    gauge("build_info", "Always 1; the version is in the labels.", _version, "version", "python"),
    gauge(
        "phase",
        "1 for the phase that powerguard is in, 0 for the others.",
        one_of(PHASES, lambda v: phase_name(v.daemon.state.phase)),
        "phase",
    ),
    gauge(
        "armed",
        "1 when a power-off would be done; 0 in mode rehearse and dry-run.",
        plain(lambda v: v.daemon.policy.powers_off),
    ),
    gauge("ready", "1 when the host would be saved if utility failed now.", plain(lambda v: is_ready(v.reasons))),
    gauge("degraded", "1 when protection is reduced for any reason.", plain(lambda v: bool(v.reasons))),
    gauge("degraded_reason", "1 for each reason for which protection is reduced now.", _reasons, "reason"),
    gauge(
        "maintenance_until_timestamp_seconds",
        "When maintenance ends; absent without maintenance.",
        plain(_maintenance),
    ),
    gauge(
        "start_timestamp_seconds",
        "When the daemon started.",
        plain(lambda v: v.times.at(v.daemon.started_at_s)),
    ),
    gauge(
        "event_loop_lag_seconds",
        "Longest delay of the event loop in the last minute.",
        plain(lambda v: v.daemon.loop_lag_s),
    ),
    gauge(
        "config_last_reload_successful",
        "1 when the newest settings were accepted.",
        plain(lambda v: v.daemon.settings_ok),
    ),
    gauge(
        "config_last_reload_success_timestamp_seconds",
        "When settings were last accepted.",
        plain(lambda v: v.times.at(v.daemon.settings_at_s)),
    ),
    gauge(
        "journal_writable",
        "0 while the journal cannot be written and is kept in memory.",
        plain(lambda v: not v.daemon.journal_trouble),
    ),
)

_UPS: Final = (
    gauge(
        "ups_up",
        "1 when the newest poll of this source delivered a reading.",
        of_source(lambda _, s: s.up),
        "ups",
        "source",
    ),
    gauge(
        "ups_last_reading_timestamp_seconds",
        "When this source last delivered a reading; absent before the first.",
        of_source(lambda v, s: v.times.at(s.last_reading_at_s)),
        "ups",
        "source",
    ),
    counter("ups_polls_total", "Polls since the daemon started.", _polls, "ups", "source", "result"),
    gauge("ups_status", "1 for each of NUT's status words that applies.", _flags, "ups", "flag"),
    gauge(
        "ups_on_battery",
        "1 when two witnesses agree that the feed is on battery; absent while that is unknown.",
        of_ups(_supply),
        "ups",
    ),
    gauge("ups_battery_charge_ratio", "Charge as reported.", of_reading(lambda r: share(r.charge_pct)), "ups"),
    gauge("ups_load_ratio", "Load as reported, a share of the rating.", of_reading(lambda r: share(r.load_pct)), "ups"),
    gauge("ups_battery_runtime_seconds", "Runtime as reported.", of_reading(lambda r: r.runtime_s), "ups"),
    gauge(
        "ups_battery_runtime_effective_seconds",
        "Runtime that powerguard trusts at the present load, after health, energy account and margin.",
        of_ups(lambda v: v.budget.reff_now_s),
        "ups",
    ),
    gauge(
        "ups_battery_runtime_effective_paused_seconds",
        "The same once training is paused.",
        of_ups(lambda v: v.budget.reff_paused_s),
        "ups",
    ),
    gauge(
        "ups_battery_energy_left_ratio",
        "Energy left by the most cautious of three accounts, as a share of a full new battery.",
        of_ups(lambda v: v.budget.left),
        "ups",
    ),
    gauge(
        "ups_battery_health_ratio",
        "Energy of a full charge, as a share of a new battery.",
        of_ups(lambda v: v.budget.health),
        "ups",
    ),
    gauge(
        "ups_capacity_margin_ratio",
        "Slack by this UPS alone, as a share of all that is needed; below 0 it does not fit.",
        of_ups(_margin),
        "ups",
    ),
    gauge("ups_output_power_watts", "Output power as reported.", of_reading(lambda r: r.watts), "ups"),
    gauge(
        "own_load_watts",
        "What this host alone draws of a shared UPS's load; absent where the UPS is not shared.",
        _own_watts,
        "source",
    ),
    gauge(
        "own_load_age_seconds",
        "Age of the measurement behind it; absent if it is not measured.",
        plain(lambda v: None if (own := v.budget.own) is None or own.at_s is None else v.budget.now_s - own.at_s),
    ),
    gauge(
        "ups_looks_shared",
        "1 where other hosts seem to hang on the UPS and the settings do not say so.",
        plain(lambda v: bool(looks_shared(v.daemon.policy, v.daemon.state))),
    ),
    gauge("ups_input_volts", "Input voltage as reported.", of_reading(lambda r: r.input_v), "ups"),
    gauge(
        "ups_battery_temperature_celsius",
        "Battery temperature as reported.",
        of_reading(lambda r: r.battery_temp_c),
        "ups",
    ),
    gauge(
        "ups_output_off_seconds",
        "Seconds until the UPS cuts its output by its own countdown; absent without one.",
        of_reading(lambda r: r.output_off_in_s),
        "ups",
    ),
)

_BUDGET: Final = (
    gauge(
        "outage_active",
        "1 from the first reading on battery until training runs again.",
        plain(lambda v: not isinstance(v.daemon.state.phase, Online)),
    ),
    gauge("outage_start_timestamp_seconds", "When the outage began; absent outside an outage.", plain(_outage_start)),
    gauge(
        "deadline_timestamp_seconds",
        "When the host would be powered off without further changes; absent outside an outage, with utility, "
        "after an abort, in maintenance, while enough other UPSes have utility, and once the power-off "
        "has only been recorded.",
        plain(_deadline),
    ),
    gauge(
        "budget_required_seconds",
        "What is still needed, by step; higher_tiers: by how much earlier this host makes room on a shared UPS.",
        lambda v: (((step,), value) for step, value in required_steps(v.daemon, v.budget).items()),
        "step",
    ),
    gauge(
        "budget_slack_seconds",
        "Effective runtime when paused minus the needs; below 0 they do not fit; absent while the runtime is unknown.",
        plain(lambda v: v.budget.slack_s),
    ),
    gauge(
        "budget_fits",
        "1 when checkpoint and stop fit three quarters of the effective runtime when paused.",
        plain(lambda v: v.budget.fits),
    ),
    gauge(
        "stop_grade",
        "1 for the most orderly stop that fits now.",
        one_of(("full", "short", "bare"), lambda v: v.budget.grade.value),
        "grade",
    ),
)

_TRAINERS: Final = (
    gauge("trainer_up", "1 when the trainer can be reached.", of_trainer(lambda _, t: t.alive), "trainer"),
    gauge("trainer_paused", "1 while its training is paused.", of_trainer(lambda _, t: t.paused), "trainer"),
    gauge(
        "trainer_held",
        "1 while another host of its job holds its training.",
        of_trainer(lambda _, t: bool(t.held_by)),
        "trainer",
    ),
    gauge("trainer_step", "Its step as last reported.", of_trainer(lambda _, t: t.step), "trainer"),
    gauge(
        "checkpoint_expected_seconds",
        "How long a checkpoint is expected to take until durable.",
        of_trainer(lambda _, t: t.checkpoint_s),
        "trainer",
    ),
    gauge(
        "checkpoint_last_success_timestamp_seconds",
        "When its newest known checkpoint became durable.",
        of_trainer(lambda v, t: v.times.at(t.durable_at_s)),
        "trainer",
    ),
    gauge(
        "checkpoint_last_step",
        "Step of its newest known checkpoint.",
        of_trainer(lambda _, t: t.durable_step),
        "trainer",
    ),
)

_RETURN: Final = (
    gauge(
        "bmc_up",
        "1 when the BMC answered the last request; absent before the first one, and if the settings have none.",
        of_bmc(lambda _, b: None if b.checked_at_s is None and not b.error else b.policy is not None and not b.error),
    ),
    gauge(
        "bmc_power_restore_policy_ok",
        "1 when the power restore policy was read back as configured; absent if the settings have no BMC.",
        of_bmc(lambda _, b: b.verified),
    ),
    gauge(
        "bmc_last_check_timestamp_seconds",
        "When the policy was last read back.",
        of_bmc(lambda v, b: v.times.at(b.checked_at_s)),
    ),
    gauge(
        "bmc_power_watts",
        "Power of the host at the last hourly check; absent if the BMC does not measure it.",
        of_bmc(lambda _, b: b.power_watts),
    ),
    gauge(
        "power_on_armed",
        "1 when this power-on method could be armed at the last check; 0 when it is blocked, off or not checked yet.",
        lambda v: (
            ((each.letter, each.name, each.ups), float(each.stands == "armed"))
            for each in layers(v.daemon.policy, v.daemon.bmc, v.daemon.methods)
        ),
        "layer",
        "name",
        "ups",
    ),
    gauge(
        "race_covered",
        "1 when a power-on method is armed that covers utility returning between the commit and the UPS's cut.",
        lambda v: [((), float(covers(layers(v.daemon.policy, v.daemon.bmc, v.daemon.methods))))],
    ),
)

_ACTIONS: Final = (
    counter(
        "actions_total",
        "Actions since the daemon started, by result.",
        lambda v: ((key, float(count)) for key, count in v.daemon.actions.counts.items()),
        "action",
        "result",
    ),
    Family(
        name="action_duration_seconds",
        kind="histogram",
        labels=("action",),
        help="How long actions took, done or failed.",
        samples=lambda v: (((word,), v.daemon.actions.seconds[word]) for word in ACTION_WORDS.values()),
        bounds=BOUNDS_S,
        counts=lambda v, word: v.daemon.actions.buckets[word],
    ),
)

_PAST: Final = (
    counter("outages_total", f"Outages that have ended, by outcome. {_KEPT}", kept_of("outages", OUTCOMES), "outcome"),
    counter("shutdowns_total", f"Commits to power the host off. {_KEPT}", plain(kept("shutdowns"))),
    counter(
        "ups_transfers_total",
        f"Transfers of this host to battery, of several UPSes under all their names. {_KEPT}",
        of_feed(kept("ups_transfers")),
        "ups",
    ),
    counter("on_battery_seconds_total", f"Seconds on battery. {_KEPT}", plain(kept("on_battery_seconds"))),
    gauge(
        "last_outage_outcome",
        "1 for how the last outage ended; absent when there was none.",
        one_of(OUTCOMES, lambda v: None if (o := v.daemon.last_outage) is None else o.outcome),
        "outcome",
    ),
    gauge("last_outage_start_timestamp_seconds", "When the last outage began.", of_last(lambda o: o.began_wall_s)),
    gauge("last_outage_end_timestamp_seconds", "When the last outage ended.", of_last(lambda o: o.ended_wall_s)),
    gauge(
        "last_outage_on_battery_duration_seconds",
        "How long the last outage was on battery.",
        of_last(lambda o: o.on_battery_s),
    ),
    gauge(
        "last_outage_checkpoint_duration_seconds",
        "How long its emergency checkpoint took.",
        of_last(lambda o: o.checkpoint_s),
    ),
    gauge(
        "last_outage_recovery_duration_seconds",
        "From start-up to training again.",
        of_last(lambda o: o.recovery_s),
    ),
)


def _of_target(value: Callable[[TargetView], Number]) -> Samples:
    return lambda view: _known(((each.name,), value(each)) for each in view.daemon.message_targets)


_MESSAGES: Final = (
    counter(
        "messages_delivered_total",
        f"Deliveries that the target took. {_KEPT}",
        _of_target(lambda t: t.delivered),
        "target",
    ),
    counter("messages_failed_total", f"Deliveries that failed. {_KEPT}", _of_target(lambda t: t.failed), "target"),
    counter(
        "messages_dropped_total",
        f"Messages that the target refused for good. {_KEPT}",
        _of_target(lambda t: t.dropped),
        "target",
    ),
    gauge("messages_queued", "Messages that wait for the target.", _of_target(lambda t: t.queued), "target"),
    gauge(
        "messages_oldest_age_seconds",
        "Age of the oldest message that waits; absent without any.",
        _of_target(lambda t: t.oldest_age_s),
        "target",
    ),
)


def _lost_gpu(view: View) -> Number:
    seen, lost = view.daemon.returning.seen, view.daemon.journal_counters.get("lost_gpu", 0.0)
    return None if not lost and (seen is None or not seen.gpus) else lost


_COST: Final = (
    counter(
        "training_lost_seconds_total",
        f"Training time lost in outages, over all trainers: {'; '.join(map(': '.join, figures.CAUSES.items()))}. "
        f"{_KEPT}",
        kept_of("lost", figures.CAUSES),
        "cause",
    ),
    counter(
        "training_lost_gpu_seconds_total",
        f"The same in GPU seconds; absent while the number of GPUs is not known. {_KEPT}",
        plain(_lost_gpu),
    ),
    counter(
        "usual_script_lost_seconds_total",
        "Training time that a script (checkpoint, sleep 50 s, halt) would have lost in the same outages, without the "
        f"time until a person powers a stranded host on. {_KEPT}",
        plain(kept("lost_by_usual_script")),
    ),
    counter(
        "checkpoints_total",
        "Checkpoints of outages: asked for, durable, durable later than expected (also counted as durable), failed. "
        f"{_KEPT}",
        kept_of("checkpoints", figures.CHECKPOINTS),
        "result",
    ),
    Family(
        name="return_duration_seconds",
        kind="histogram",
        labels=("phase",),
        help=f"How long returns from a power-off took, from power-on to training, by phase and in total. {_KEPT}",
        samples=lambda v: (((phase,), kept(f"return_{phase}_sum")(v) or 0.0) for phase in figures.PHASES),
        bounds=figures.BOUNDS_S,
        counts=lambda v, phase: (
            v.daemon.journal_counters.get(f"return_{phase}_le_{bound:g}", 0.0)
            for bound in (*figures.BOUNDS_S, float("inf"))
        ),
    ),
)

SECTIONS: Final[Mapping[str, tuple[Family, ...]]] = {
    "The daemon": _DAEMON,
    "The UPS": _UPS,
    "Traps": TRAPS,
    "The budget": _BUDGET,
    "What was learned": LEARNED,
    "Drills": DRILLS,
    "Trainers": _TRAINERS,
    "Coming back": _RETURN,
    "Actions": _ACTIONS,
    "Messages": _MESSAGES,
    "The past": _PAST,
    "What outages cost": _COST,
}


PREFIX: Final = "powerguard_"
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class DaemonCollector(Collector):
    """Reads the daemon at the moment of the scrape; keeps nothing."""

    def __init__(self, daemon: Daemon) -> None:
        """Watch this daemon."""
        self._daemon = daemon

    def collect(self) -> Iterator[Metric]:
        """Yield every family, also those without a series: a query for them then finds a type."""
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
    bounds = [*(f"{bound:g}" for bound in family.bounds), "+Inf"]
    for values, seconds in family.samples(view):
        total = 0.0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(bounds, family.counts(view, values[0]), strict=True):
            total += count
            buckets.append((bound, total))
        metric.add_metric(values, buckets, seconds)
    return metric


# Neither has types that mypy accepts for a call.
_classic: Callable[[Collector], bytes] = generate_latest
_openmetrics: Callable[[Collector], bytes] = openmetrics.generate_latest


def scrape(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Return body and content type for an Accept header: OpenMetrics where it is named, else the classic text."""
    if "application/openmetrics-text" in accept:
        return _openmetrics(collector), OPENMETRICS
    return _classic(collector), TEXT


def reference() -> str:
    """Return docs/reference/metrics.md; a test holds that the page is this."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m powerguard.daemon.observe.metrics`. A metric is a gauge unless its line says",
        "otherwise. A value that is not known is absent, never 0. All label values of a closed set are always",
        "present. No label has the host (Prometheus adds `instance`) or an outage id.",
    ]
    for title, families in SECTIONS.items():
        lines += ["", f"## {title}", ""]
        for family in families:
            labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
            kind = "" if family.kind == "gauge" else f" ({family.kind})"
            lines.append(f"- `{PREFIX}{family.name}{labels}`{kind}: {family.help}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 - this is what it is called for
