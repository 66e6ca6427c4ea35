"""The drill as JSON: the one that runs and the last report (`drill_view`), and what one would do (`drill_plan`).

Pure over `Daemon`, as in `status`; seconds are relative (`*_s`), moments are Unix seconds (`*_at`), null is not known.
"""

from powerguard.core import drill_checks
from powerguard.core.learned import DrillReport
from powerguard.core.model import Drill
from powerguard.daemon.port import Daemon
from powerguard.daemon.status import SCHEMA_VERSION, Json, Times, rounded


def drill_view(daemon: Daemon) -> Json:
    """Return the drill that runs and the report of the last one; null where there is none."""
    times, state = Times(daemon), daemon.state
    running, last = state.drill, state.learned.drill
    load = state.battery.load
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "drill",
        "at": round(times.wall_s, 3),
        "load": rounded(load),
        "running": None if running is None else _running(running, times),
        "last": None if last is None else _report(last, times),
    }


def drill_plan(daemon: Daemon, scopes: tuple[str, ...], witness: str) -> Json:
    """Return what a drill would do, stage by stage, and why it may not begin now; `refused` is "" when it may."""
    policy, state = daemon.policy, daemon.state
    refused = drill_checks.refusal(policy, state, daemon.clock(), scopes, witness)
    words = drill_checks.outline(policy, state, scopes, witness) if witness in drill_checks.WITNESSES else ()
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "drill_plan",
        "mode": daemon.policy.mode.value,
        "scopes": list(scopes),
        "witness": witness,
        "refused": refused,
        "stages": [{"stage": stage, "what": what, "at_most_s": rounded(limit_s)} for stage, what, limit_s in words],
    }


def _running(drill: Drill, times: Times) -> Json:
    left_s = times.in_s(drill.stage_by_s or None)
    return {
        "id": drill.id,
        "who": drill.who,
        "scopes": list(drill.scopes),
        "witness": drill.witness,
        "stage": drill.stage,
        "stage_lasted_s": times.ago_s(drill.stage_at_s),
        "stage_ends_in_s": left_s if drill.stage not in ("undo", "outage", "handed_over") else None,
        "lasted_s": times.ago_s(drill.began_s),
        "coming": list(drill.stages),
        "waiting": [f"{each.what} {each.trainer}".strip() for each in drill.waiting],
        "paused": list(drill.paused),
        "result": drill.result,
        "because": drill.because,
        "figures": dict(drill.figures),
    }


def _report(report: DrillReport, times: Times) -> Json:
    return {
        "id": report.id,
        "ended_at": times.at(report.at_s),
        "age_s": times.ago_s(report.at_s),
        "lasted_s": rounded(report.lasted_s),
        "who": report.who,
        "scopes": list(report.scopes),
        "witness": report.witness,
        "result": report.result,
        "because": report.because,
        "figures": dict(report.figures),
    }
