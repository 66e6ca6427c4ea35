"""The daemon as one JSON object: what is so (`status`), and what will happen, with every term of it (`plan_view`).

Pure over `Daemon`: nothing is asked of the world, nothing changes. Both objects carry `schema_version`; within one
version keys are only ever added. null means not known, never zero. Durations are relative seconds (`*_s`); moments
are Unix seconds (`*_at`), so that a reader on another host needs no clock of ours.
"""

import math
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from powerguard.core import budget as sums
from powerguard.core import ladder, plan
from powerguard.core.budget import Budget
from powerguard.core.feeds import each_alone
from powerguard.core.model import Online, Recovery, Shutdown, State, Supply, Trainer
from powerguard.core.policy import Policy
from powerguard.core.readings import Reading
from powerguard.core.table import phase_name
from powerguard.daemon.layers import covers, layers
from powerguard.daemon.origins import health_view
from powerguard.daemon.port import Daemon, SourceView
from powerguard.daemon.readiness import Reason, aborted_by, is_ready, readiness
from powerguard.daemon.terms import terms

SCHEMA_VERSION: Final = 1

Json = dict[str, object]


def package_version() -> str:
    """Return the installed version of powerguard; "unknown" when run from an unpacked source."""
    try:
        return version("powerguard")
    except PackageNotFoundError:
        return "unknown"


VERSION: Final = package_version()


class Times:
    """Turns moments of this boot's clock into what people and programs can use."""

    def __init__(self, daemon: Daemon) -> None:
        """Take both clocks once, so that every moment of one object fits every other."""
        self.now_s = daemon.clock()
        self.wall_s = daemon.wall()

    def at(self, at_s: float | None) -> float | None:
        """Unix seconds of a moment; None stays None."""
        return None if at_s is None else round(self.wall_s + at_s - self.now_s, 3)

    def ago_s(self, at_s: float | None) -> float | None:
        """Seconds since a moment."""
        return None if at_s is None else round(self.now_s - at_s, 3)

    def in_s(self, at_s: float | None) -> float | None:
        """Seconds until a moment, negative when it has passed."""
        return None if at_s is None else round(at_s - self.now_s, 3)


def rounded(value: float | None) -> float | None:
    """Three decimals, and None for what JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else round(value, 3)


def status(daemon: Daemon) -> Json:
    """Return the state of everything that an operator asks about."""
    times = Times(daemon)
    state = daemon.state
    reasons = readiness(daemon)
    now = plan.foretold(daemon.policy, state, times.now_s)
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "status",
        "reachable": True,
        "version": VERSION,
        "at": round(times.wall_s, 3),
        "phase": phase_name(state.phase),
        "mode": daemon.policy.mode.value,
        "ready": is_ready(reasons),
        "degraded": bool(reasons),
        "reasons": [_reason(reason) for reason in reasons],
        "alarms": list(state.told),
        "supply": state.feed.supply.value,
        "supply_since_at": times.at(state.feed.since_s) if state.feed.supply is not Supply.UNKNOWN else None,
        "ups": _ups(_name(daemon.policy), state.feed.reading, times, now),
        "feeds": _feeds(daemon, times),
        "battery": _battery(daemon, times),
        "budget": _budget(now),
        "outage": _outage(daemon, times),
        "next": _next(daemon, now, times),
        "maintenance": _maintenance(daemon, times),
        "drill": _drill(daemon, times),
        "trainers": [_trainer(trainer, state, times) for trainer in state.trainers],
        "sources": [_source(source, daemon, times) for source in daemon.sources],
        "traps": _traps(daemon, times),
        "bmc": _bmc(daemon, times),
        "way_back": _way_back(daemon, times),
        "host": _host(daemon),
        "last_outage": None if daemon.last_outage is None else asdict(daemon.last_outage),
        "daemon": {
            "boot_id": daemon.boot_id,
            "uptime_s": times.ago_s(daemon.started_at_s),
            "progress_age_s": times.ago_s(daemon.progressed_at_s),
            "loop_lag_s": rounded(daemon.loop_lag_s),
            "config_path": daemon.config_path,
            "settings_ok": daemon.settings_ok,
            "settings_at": times.at(daemon.settings_at_s),
            "journal_ok": daemon.journal_ok,
        },
    }


def plan_view(daemon: Daemon) -> Json:
    """Return the budget of this moment: every term with its source, and what happens next and when."""
    times = Times(daemon)
    now = plan.foretold(daemon.policy, daemon.state, times.now_s)
    reasons = readiness(daemon)
    on_battery = daemon.state.feed.supply is Supply.BATTERY or not isinstance(daemon.state.phase, Online | Recovery)
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "plan",
        "version": VERSION,
        "at": round(times.wall_s, 3),
        "phase": phase_name(daemon.state.phase),
        "mode": daemon.policy.mode.value,
        "host": _host(daemon),
        "ready": is_ready(reasons),
        "reasons": [_reason(reason) for reason in reasons],
        "assumes_utility_fails_now": not on_battery,
        "fits": now.fits,
        "grade": now.grade.value,
        "slack_s": rounded(now.slack_s),
        "terms": [asdict(term) for term in terms(daemon, now)],
        "next": _next(daemon, now, times),
    }


def _host(daemon: Daemon) -> Json:
    return {"kind": daemon.host_kind, "name": daemon.host_name or None}


def _reason(reason: Reason) -> Json:
    return {
        "name": reason.name,
        "severity": reason.severity,
        "text": reason.text,
        "fix": reason.fix,
        "numbers": dict(reason.numbers),
    }


def _ups(name: str, reading: Reading | None, times: Times, now: Budget) -> Json | None:
    if reading is None:
        return None
    return {
        "name": name,
        "source": reading.source,
        "age_s": times.ago_s(reading.at_s),
        "output_source": reading.output_source.value,
        "charge_pct": rounded(reading.charge_pct),
        "load_pct": rounded(reading.load_pct),
        "watts": rounded(reading.watts),
        "runtime_s": rounded(reading.runtime_s),
        "runtime_effective_s": rounded(now.reff_now_s),
        "on_battery_s": rounded(reading.on_battery_s),
        "input_present": reading.input_present,
        "input_v": rounded(reading.input_v),
        "battery_temp_c": rounded(reading.battery_temp_c),
        "low_battery": reading.low_battery,
        "replace_battery": reading.replace_battery,
        "overload": reading.overload,
        "testing": reading.testing,
        "calibrating": reading.calibrating,
        "forced_shutdown": reading.forced_shutdown,
        "output_off_in_s": rounded(reading.output_off_in_s),
        "alarms": list(reading.alarms),
    }


def _traps(daemon: Daemon, times: Times) -> Json | None:
    """Whether the trap port is open, and what came there; None where the settings have none."""
    counts = daemon.traps
    if counts is None:
        return None
    listening = counts.listening is not None
    return {
        "listen": counts.where,
        "listening": listening,
        "because": "" if listening else counts.closed_because,
        "results": dict(counts.results),
        "dropped": counts.dropped,
        "last_at": {ups: times.at(at_s) for ups, at_s in counts.last_at_s.items()},
    }


def _name(policy: Policy) -> str:
    """Name of the UPS, or of all of several: what they are together."""
    return " + ".join(mine.policy.ups for mine in policy.feeds) or policy.ups


def _feeds(daemon: Daemon, times: Times) -> list[Json]:
    """Each of several UPSes by itself; empty for one."""
    supplies = {mine.policy.ups: mine.supplies for mine in daemon.policy.feeds}
    return [
        {
            "name": policy.ups,
            "supplies": supplies[policy.ups],
            "supply": state.feed.supply.value,
            "supply_since_at": times.at(state.feed.since_s) if state.feed.supply is not Supply.UNKNOWN else None,
            "lost_since_at": None if state.feed.lost_since_s is None else times.at(state.feed.lost_since_s),
            "ups": _ups(policy.ups, state.feed.reading, times, plan.foretold(policy, state, times.now_s)),
        }
        for policy, state in (each_alone(daemon.policy, daemon.state) if supplies else ())
    ]


def _battery(daemon: Daemon, times: Times) -> Json:
    """How healthy the battery counts as, and who says so; `battery_view` has the rest."""
    health = health_view(daemon.policy, daemon.state, times.now_s, times.at)
    measured = daemon.state.battery.model.health
    return {
        "health": rounded(health.share),
        "origin": health.origin,
        "because": health.because,
        "measured_at": None if measured is None else times.at(measured.at_s),
    }


def _budget(now: Budget) -> Json:
    return {
        "grade": now.grade.value,
        "fits": now.fits,
        "runtime_effective_s": rounded(now.reff_now_s),
        "runtime_effective_paused_s": rounded(now.reff_paused_s),
        "checkpoint_s": rounded(now.checkpoint_s),
        "stop_s": rounded(now.stop_s),
        "need_s": rounded(now.need_s),
        "slack_s": rounded(now.slack_s),
        "cut_in_s": rounded(now.cut_in_s),
    }


def _outage(daemon: Daemon, times: Times) -> Json | None:
    phase = daemon.state.phase
    if isinstance(phase, Online):
        return None
    outage = phase.outage
    latch = phase if isinstance(phase, Shutdown) else None
    return {
        "id": outage.id,
        "since_at": times.at(outage.since_s),
        "lasted_s": times.ago_s(outage.since_s),
        "grade": outage.grade.value,
        "because": getattr(phase, "because", ""),
        "policy_verified": outage.policy_verified,
        "aborted_by": outage.aborted_by,
        "latched": latch is not None,
        "latched_at": None if latch is None else times.at(latch.latched_s),
        "power_off_by_at": None if latch is None else times.at(latch.force_at_s or None),
        "can_abort": can_abort(daemon) == "",
    }


def can_abort(daemon: Daemon) -> str:
    """Return "" when there is a shutdown that can still be called off, else why not."""
    name = phase_name(daemon.state.phase)
    if name in ("emergency_checkpoint", "holding"):
        return ""
    if name == "shutdown":
        return "past the commit point: nothing in this boot undoes the power-off"
    if aborted_by(daemon.state):
        return "nothing to abort: this outage's shutdown was called off already"
    if name == "on_battery":
        return "nothing to abort yet: training goes on; `powerguard maintenance on` keeps the host from powering off"
    if name == "recovery":
        return "nothing to abort: the host is coming back"
    return "nothing to abort: there is no outage"


def _next(daemon: Daemon, now: Budget, times: Times) -> list[Json]:
    """What the machine will do; nothing, where the shutdown was called off: it only waits for utility."""
    if aborted_by(daemon.state):
        return []
    told = plan.forecast(daemon.policy, daemon.state, now)
    # Where the checkpoint does not fit, the power-off comes before it is durable: there is no hold then.
    ends_s = next((step.at_s for step in told if step.action == "shutdown" and step.at_s is not None), math.inf)
    return [
        {
            "action": step.action,
            "at": times.at(step.at_s),
            "in_s": times.in_s(step.at_s),
            "because": step.because,
        }
        for step in told
        if step.at_s is None or (math.isfinite(step.at_s) and not (step.action == "holding" and step.at_s > ends_s))
    ]


def _drill(daemon: Daemon, times: Times) -> Json | None:
    drill = daemon.state.drill
    if drill is None:
        return None
    return {"id": drill.id, "who": drill.who, "stage": drill.stage, "lasted_s": times.ago_s(drill.began_s)}


def _maintenance(daemon: Daemon, times: Times) -> Json | None:
    maintenance = daemon.state.maintenance
    if maintenance is None:
        return None
    return {
        "ends_at": times.at(maintenance.until_s),
        "ends_in_s": times.in_s(maintenance.until_s),
        "reason": maintenance.reason,
        "who": maintenance.who,
    }


def _trainer(trainer: Trainer, state: State, times: Times) -> Json:
    signalled = ladder.of(state, trainer.name)
    return {
        "name": trainer.name,
        "alive": trainer.alive,
        "conduct": trainer.conduct.value,
        "paused": trainer.paused,
        "step": trainer.step,
        "step_s": rounded(trainer.step_s or None),
        "checkpoint_s": rounded(trainer.checkpoint_s),
        "disk": trainer.disk,
        "checkpoint_in_flight": trainer.order is not None,
        "checkpoint_eta_s": times.in_s(trainer.eta_at_s) if trainer.order is not None else None,
        "durable": trainer.durable,
        "durable_step": trainer.durable_step,
        "durable_age_s": times.ago_s(trainer.durable_at_s),
        "failed": trainer.failed,
        "signalled": "" if signalled is None else signalled.word,
    }


def _source(source: SourceView, daemon: Daemon, times: Times) -> Json:
    """What one source is worth. says: its own word of the output, where several tell about one UPS."""
    feed = next((each.feed for each in daemon.state.upses if each.ups == source.ups), daemon.state.feed)
    heard = next((each for each in feed.heard if each.source == source.source), None)
    return {
        "ups": source.ups,
        "source": source.source,
        "up": source.up,
        "age_s": times.ago_s(source.last_reading_at_s),
        "polls": source.polls,
        "failures": source.failures,
        "last_error": source.last_error,
        "authenticated": source.authenticated,
        "trouble": source.trouble,
        "says": None if heard is None or heard.reading is None else heard.reading.output_source.value,
        "doubted": heard is not None and heard.doubted,
    }


def _bmc(daemon: Daemon, times: Times) -> Json | None:
    bmc = daemon.bmc
    if bmc is None:
        return None
    return {
        "kind": bmc.kind,
        "policy": bmc.policy,
        "verified": bmc.verified,
        "age_s": times.ago_s(bmc.checked_at_s),
        "error": bmc.error,
        "power_watts": bmc.power_watts,
    }


def _way_back(daemon: Daemon, times: Times) -> Json:
    known = layers(daemon.policy, daemon.bmc, daemon.ways)
    return {
        "covers_race": covers(known),
        "layers": [
            {
                "layer": each.letter,
                "name": each.name,
                "ups": each.ups,
                "stands": each.stands,
                "why": each.why,
                "age_s": times.ago_s(each.checked_at_s),
            }
            for each in known
        ],
        "armed": [
            {"name": each.way.value, "ups": each.ups, "confirmed": each.confirmed, "acts_at": times.at(each.acts_at_s)}
            for each in daemon.state.armed
        ],
    }


def required_steps(daemon: Daemon, now: Budget) -> dict[str, float]:
    """Split what is still needed into the steps that a person thinks in; the sum is `need_s`."""
    policy = daemon.policy
    bare_s = sums.stop_s(policy, now.grade, reserve_s=0.0)
    ups_off_s = 0.0 if now.grade.value == "bare" else min(policy.ups_off_s, bare_s)
    return {
        "checkpoint": now.checkpoint_s,
        "host_stop": bare_s - ups_off_s,
        "ups_off": ups_off_s,
        "reserve": now.stop_s - bare_s,
    }
