"""Every metric family in one table: the scrape and the reference page are both made from it.

Base units, `_total` only on counters, moments as Unix seconds. What is not known is absent, never 0. Label values of a
closed set are always all there, so that `rate()` and `== 0` see the very first event. No label grows without bound,
and none holds an outage's id.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Final

from powerguard.core import plan
from powerguard.core.model import Online, Supply
from powerguard.core.readings import OutputSource, Reading
from powerguard.core.table import TABLE, phase_name
from powerguard.daemon.drill_families import DRILLS
from powerguard.daemon.layers import covers, layers
from powerguard.daemon.learned_families import LEARNED
from powerguard.daemon.port import ACTION_WORDS
from powerguard.daemon.readiness import ERRORS, WARNINGS, aborted_by, is_ready
from powerguard.daemon.samples import (
    Family,
    Number,
    Sample,
    View,
    counter,
    gauge,
    kept,
    kept_of,
    of_bmc,
    of_feed,
    of_last,
    of_reading,
    of_source,
    of_trainer,
    of_ups,
    one_of,
    plain,
    share,
)
from powerguard.daemon.status import VERSION, required_steps
from powerguard.daemon.trap_families import TRAPS

PHASES: Final = tuple(dict.fromkeys(phase_name(old) for old, _ in TABLE))
OUTCOMES: Final = ("ridden_through", "resumed_in_place", "clean_shutdown", "dirty", "rehearsed", "lost")
"""rehearsed: in dry-run a power-off was recorded and utility came back. lost: the journal never saw the end."""

LIFETIME: Final = (*(f"outages_{outcome}" for outcome in OUTCOMES), "shutdowns", "ups_transfers", "on_battery_seconds")
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
        "OL": source not in (OutputSource.BATTERY, OutputSource.OFF, OutputSource.UNKNOWN),
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
    if now.reff_paused_s is None or now.need_s <= 0.0:
        return None
    return (now.reff_paused_s - now.need_s) / now.need_s


def _supply(view: View) -> Number:
    supply = view.state.feed.supply
    return None if supply is Supply.UNKNOWN else float(supply is Supply.BATTERY)


def _outage_start(view: View) -> Number:
    phase = view.daemon.state.phase
    return None if isinstance(phase, Online) else view.times.at(phase.outage.since_s)


def _deadline(view: View) -> Number:
    state = view.daemon.state
    if isinstance(state.phase, Online) or aborted_by(state):
        return None
    steps = plan.forecast(view.daemon.policy, state, view.budget)
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
    gauge("degraded", "1 when anything at all reduces protection.", plain(lambda v: bool(v.reasons))),
    gauge("degraded_reason", "1 for each thing that reduces protection now.", _reasons, "reason"),
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
        "0 while memory stands in for a journal that cannot be written.",
        plain(lambda v: v.daemon.journal_ok),
    ),
)

_UPS: Final = (
    gauge(
        "ups_up",
        "1 when the newest poll of this source brought a reading.",
        of_source(lambda _, s: s.up),
        "ups",
        "source",
    ),
    gauge(
        "ups_last_reading_timestamp_seconds",
        "When this source last brought a reading; absent before the first.",
        of_source(lambda v, s: v.times.at(s.last_reading_at_s)),
        "ups",
        "source",
    ),
    counter("ups_polls_total", "Polls since the daemon started.", _polls, "ups", "source", "result"),
    gauge("ups_status", "NUT's status words, 1 for each that holds.", _flags, "ups", "flag"),
    gauge(
        "ups_on_battery",
        "1 when two witnesses say that the feed is on battery; absent while that is unknown.",
        of_ups(_supply),
        "ups",
    ),
    gauge("ups_battery_charge_ratio", "Charge as reported.", of_reading(lambda r: share(r.charge_pct)), "ups"),
    gauge("ups_load_ratio", "Load as reported, a share of the rating.", of_reading(lambda r: share(r.load_pct)), "ups"),
    gauge("ups_battery_runtime_seconds", "Runtime as reported.", of_reading(lambda r: r.runtime_s), "ups"),
    gauge(
        "ups_battery_runtime_effective_seconds",
        "Runtime that powerguard trusts at the load of now, after health, energy account and margin.",
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
        "What a full charge holds, as a share of a new battery.",
        of_ups(lambda v: v.budget.health),
        "ups",
    ),
    gauge(
        "ups_capacity_margin_ratio",
        "Effective runtime when paused less the need, as a share of the need; below 0 it does not fit.",
        of_ups(_margin),
        "ups",
    ),
    gauge("ups_output_power_watts", "Output power as reported.", of_reading(lambda r: r.watts), "ups"),
    gauge("ups_input_volts", "Input voltage as reported.", of_reading(lambda r: r.input_v), "ups"),
    gauge(
        "ups_battery_temperature_celsius",
        "Battery temperature as reported.",
        of_reading(lambda r: r.battery_temp_c),
        "ups",
    ),
    gauge(
        "ups_output_off_seconds",
        "Seconds until the UPS cuts its output by a countdown of its own; absent without one.",
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
        "When the host would be powered off if nothing changes; absent outside an outage, and after an abort.",
        plain(_deadline),
    ),
    gauge(
        "budget_required_seconds",
        "What is still needed, by step.",
        lambda v: (((step,), value) for step, value in required_steps(v.daemon, v.budget).items()),
        "step",
    ),
    gauge(
        "budget_slack_seconds",
        "Effective runtime when paused less what is needed; below 0 it does not fit; absent when blind.",
        plain(lambda v: v.budget.slack_s),
    ),
    gauge(
        "budget_fits",
        "1 when checkpoint and stop fit three quarters of the effective runtime when paused.",
        plain(lambda v: v.budget.fits),
    ),
    gauge(
        "stop_grade",
        "1 for how orderly the stop would be.",
        one_of(("full", "short", "bare"), lambda v: v.budget.grade.value),
        "grade",
    ),
)

_TRAINERS: Final = (
    gauge("trainer_up", "1 when the trainer can be reached.", of_trainer(lambda _, t: t.alive), "trainer"),
    gauge("trainer_paused", "1 while its training stands still.", of_trainer(lambda _, t: t.paused), "trainer"),
    gauge("trainer_step", "Its step as last told.", of_trainer(lambda _, t: t.step), "trainer"),
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
        "1 when the BMC answered the last time; absent when the settings have none.",
        of_bmc(lambda _, b: b.policy is not None and not b.error),
    ),
    gauge(
        "bmc_power_restore_policy_ok",
        "1 when the power restore policy was read back as wanted; absent when the settings have no BMC.",
        of_bmc(lambda _, b: b.verified),
    ),
    gauge(
        "bmc_last_check_timestamp_seconds",
        "When the policy was last read back.",
        of_bmc(lambda v, b: v.times.at(b.checked_at_s)),
    ),
    gauge(
        "bmc_power_watts",
        "What the host drew at the last hourly check; absent where the BMC does not measure it.",
        of_bmc(lambda _, b: b.power_watts),
    ),
    gauge(
        "way_back_armed",
        "1 when this way back could be armed when it was last asked for; 0 when it is blocked, off or not asked yet.",
        lambda v: (
            ((each.letter, each.name, each.ups), float(each.stands == "armed"))
            for each in layers(v.daemon.policy, v.daemon.bmc, v.daemon.ways)
        ),
        "layer",
        "name",
        "ups",
    ),
    gauge(
        "race_covered",
        "1 when a way back is armed that covers utility returning between the commit and the UPS's cut.",
        lambda v: [((), float(covers(layers(v.daemon.policy, v.daemon.bmc, v.daemon.ways))))],
    ),
)

_ACTIONS: Final = (
    counter(
        "actions_total",
        "Actions since the daemon started, by how they went.",
        lambda v: ((key, float(count)) for key, count in v.daemon.actions.counts.items()),
        "action",
        "result",
    ),
    Family(
        name="action_duration_seconds",
        kind="histogram",
        labels=("action",),
        help="How long actions took, whatever came of them.",
        samples=lambda v: (((word,), v.daemon.actions.seconds[word]) for word in ACTION_WORDS.values()),
    ),
)

_PAST: Final = (
    counter("outages_total", f"Outages that have ended, by outcome. {_KEPT}", kept_of("outages", OUTCOMES), "outcome"),
    counter("shutdowns_total", f"Commits to power the host off. {_KEPT}", plain(kept("shutdowns"))),
    counter("ups_transfers_total", f"Transfers to battery. {_KEPT}", of_feed(kept("ups_transfers")), "ups"),
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
    "The past": _PAST,
}
