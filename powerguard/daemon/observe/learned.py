"""Learned figures as one JSON object (`battery_view`): each figure with its origin, age and reliability.

Pure over `Daemon`, as `status` is, and by the same rules: null means not known; within one version keys are only ever
added.
"""

from powerguard.core.decide import conditions
from powerguard.core.energy import account, learning, needs
from powerguard.core.energy.budget import Budget, presumed_share
from powerguard.core.model.policy import Drop, Health, Policy
from powerguard.core.model.state import State, phase_name
from powerguard.core.supply.feeds import each_alone
from powerguard.daemon.observe.port import Daemon
from powerguard.daemon.observe.status import SCHEMA_VERSION, VERSION, Json, Times, rounded
from powerguard.daemon.observe.terms import HealthView, health_view, presumed_from, recharge_from


def battery_view(daemon: Daemon) -> Json:
    """Return all learned figures of the batteries, the loads and the needs."""
    times = Times(daemon)
    policy, state = daemon.policy, daemon.state
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "battery",
        "reachable": True,
        "version": VERSION,
        "at": round(times.wall_s, 3),
        "phase": phase_name(state.phase),
        "mode": daemon.policy.mode.value,
        "ups": [
            _ups(own_policy, alone, times, conditions.budget_now(own_policy, alone, times.now_s))
            for own_policy, alone in each_alone(policy, state)
        ],
        "load_drops": {
            "presumed_paused_share": presumed_share(policy, state.learned),
            "presumed_from": presumed_from(policy, state),
            "pauses": [{"trainer": name, **_drop(drop, times)} for name, drop in state.learned.pauses],
            "cap": None if state.learned.cap is None else _drop(state.learned.cap, times),
        },
        "needs": [
            {
                "need": need.of,
                "name": need.name,
                "samples": len(need.seconds),
                "q95_s": rounded(needs.q95(need.seconds)),
                "median_s": rounded(needs.median(need.seconds)),
            }
            for need in state.learned.needs
            if need.seconds
        ],
    }


def _ups(policy: Policy, state: State, times: Times, now: Budget) -> Json:
    battery, model = state.battery, state.battery.model
    return {
        "name": policy.ups,
        "health": _health(health_view(policy, state, times.now_s, times.at), model.health, times, now),
        "runtime": _runtime(policy, state, times),
        "recharge": {
            "full_s": rounded(learning.recharge_s(policy, model)),
            "origin": recharge_from(state),
        },
        "energy": {
            "used": rounded(now.used),
            "left": rounded(now.left),
            "left_by_account": rounded(max(0.0, now.health - now.used)),
            "left_by_charge": rounded(battery.charged),
            "left_by_runtime": rounded(battery.gauge),
        },
        "reported": _reported(state, now),
        "discharge": _discharge(state, times),
        "replaced_at": times.at(model.replaced_at_s),
    }


def _health(view: HealthView, measured: Health | None, times: Times, now: Budget) -> Json:
    measurement: Json | None = None
    if measured is not None:
        measurement = {
            "share": rounded(measured.share),
            "error": rounded(measured.error),
            "at_least": measured.least,
            "depth": rounded(measured.depth),
            "how": measured.how,
            "at": times.at(measured.at_s),
            "age_s": times.ago_s(measured.at_s),
            "share_now": rounded(view.aged),
            "expires_at": times.at(measured.at_s + learning.EXPIRES_S),
            "expired": view.aged is None,
        }
    deep_s = None if now.tau_now_s is None else learning.DEPTH * now.tau_now_s
    return {
        "share": rounded(view.share),
        "origin": view.origin,
        "because": view.because,
        "presumed": rounded(view.presumed),
        "measured": measurement,
        "to_measure": {"least_depth": learning.DEPTH, "at_load_now_s": rounded(deep_s)},
    }


def _runtime(policy: Policy, state: State, times: Times) -> Json:
    """Runtime of a full new battery, by load: the values that count, and the UPS's own reports."""
    points: list[Json] = []
    counts = account.table(policy, state.battery)
    by_settings = (policy.table_origin or "settings") if policy.runtime_table else ""
    learned_at = {point.load: point.at_s for point in state.battery.model.points}
    for load, tau_s in counts:
        origin = by_settings or ("learned" if load in learned_at else "reported now")
        at_s = None if by_settings else learned_at.get(load)
        points.append(_point(load, tau_s, origin, times.at(at_s), counts=True))
    if by_settings:
        points += [
            _point(point.load, point.tau_s, "learned", times.at(point.at_s), counts=False)
            for point in state.battery.model.points
        ]
    origin = by_settings or ("learned" if learned_at else "reported now" if counts else "unknown")
    return {"origin": origin, "points": points}


def _point(load: float, tau_s: float, origin: str, at: float | None, *, counts: bool) -> Json:
    return {
        "load_pct": rounded(100.0 * load),
        "runtime_s": rounded(tau_s),
        "origin": origin,
        "at": at,
        "counts": counts,
    }


def _reported(state: State, now: Budget) -> Json:
    """The UPS's figure against our account at the same moment and load; over_report: its surplus, as a share."""
    reading = state.feed.reading
    runtime_s = None if reading is None else reading.runtime_s
    own_s = None if now.tau_now_s is None else max(0.0, now.health - now.used) * now.tau_now_s
    over = runtime_s / own_s - 1.0 if runtime_s is not None and own_s else None
    return {
        "runtime_s": rounded(runtime_s),
        "account_s": rounded(own_s),
        "over_report": rounded(over),
        "counts_as": "upper bound",
    }


def _discharge(state: State, times: Times) -> Json | None:
    """The discharge that runs. slope: seconds of reported runtime that go by in one second; 1 is honest."""
    discharge = state.battery.model.discharge
    if discharge is None:
        return None
    return {
        "since_at": times.at(discharge.since_s),
        "depth": rounded(max(0.0, (state.battery.used or 0.0) - discharge.used)),
        "slope": rounded(discharge.slope),
        "steep": discharge.slope is not None and discharge.slope >= learning.STEEP,
        "whole": discharge.whole,
        "low": discharge.low,
    }


def _drop(drop: Drop, times: Times) -> Json:
    return {
        "before_pct": rounded(100.0 * drop.before),
        "after_pct": rounded(100.0 * drop.after),
        "speed": rounded(drop.speed),
        "watts": rounded(drop.watts),
        "at": times.at(drop.at_s),
    }
