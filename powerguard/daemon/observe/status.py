"""The daemon as JSON objects: its state (`status`), its forecast (`plan_view`), its drills and its return.

Pure over `Daemon`: no input or output, no change. Every object carries `schema_version`; within one version keys are
only ever added. null means not known, never zero. Durations are relative seconds (`*_s`); moments are Unix seconds
(`*_at`), so that a reader on another host does not need this host's clock.

The power-on methods have one line each, armed, blocked or off, and whether the power race is covered. The race: utility
returns after the commit and before the UPS has cut its output, so AC never drops and the BMC's policy never acts
(docs/guides/return.md). The policy (P) and the late reboot (A) do not cover it: the first needs AC to drop, the second
leaves the seconds between the last unit's stop and the power-off open.

After a return, each gate is shown with its state and why. A gate that is closed keeps training from starting; with
`powerguard recover` a person starts it anyway (docs/decisions/0053).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple

from powerguard.core.comeback import methods, unseen
from powerguard.core.decide import conditions
from powerguard.core.drill import checks
from powerguard.core.energy import budget
from powerguard.core.energy.budget import Budget
from powerguard.core.model.actions import PowerOnMethod
from powerguard.core.model.events import Reading
from powerguard.core.model.policy import DrillReport, Mode, Policy
from powerguard.core.model.state import (
    Drill,
    DrillStage,
    OnBattery,
    Online,
    Recovery,
    Shutdown,
    State,
    Supply,
    Trainer,
    Undoing,
    phase_name,
)
from powerguard.core.supply import fusion
from powerguard.core.supply.feeds import each_alone
from powerguard.core.trainers import escalation, lifecycle
from powerguard.daemon.observe.port import BmcView, Daemon, PowerOnView, SourceView
from powerguard.daemon.observe.readiness import Reason, aborted_by, is_ready, readiness
from powerguard.daemon.observe.terms import health_view, own_from, terms

LETTERS: Final = {
    PowerOnMethod.OUTPUT: "B",
    PowerOnMethod.RTC: "E",
    PowerOnMethod.SENTINEL: "C",
    PowerOnMethod.WATCHDOG: "D",
}
COVERS: Final = frozenset("BCDE")
_OFF: Final = {
    PowerOnMethod.OUTPUT: "this host does not switch off the output of a UPS (ups.NAME.output_off)",
    PowerOnMethod.RTC: "rtc.kind is none",
    PowerOnMethod.SENTINEL: "sentinel.kind is none",
    PowerOnMethod.WATCHDOG: "bmc.watchdog is false",
}
UNCOVERED: Final = (
    "if power returns while this host shuts down, AC never drops and the BMC does not switch it on again; no method is "
    "armed for that case"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One power-on method. letter: A to E, or P; name: policy, late_reboot, or a `PowerOnMethod`.

    ups: of output, else "".
    stands: armed (checked, and it can be), blocked (why), off (not in the settings), unknown (not checked yet).
    checked_at_s: when it was checked, seconds of CLOCK_BOOTTIME; None: not checked, or without a device.
    """

    letter: str
    name: str
    stands: str
    why: str = ""
    ups: str = ""
    checked_at_s: float | None = None


def layers(policy: Policy, bmc: BmcView | None, methods: Iterable[PowerOnView]) -> tuple[Layer, ...]:
    """Return every method, P and A first, then B to E."""
    views = list(methods)
    found = [_policy(bmc), _late(policy)]
    for method, letter in sorted(LETTERS.items(), key=lambda pair: pair[1]):
        matching = [view for view in views if view.method is method]
        found += [_method(policy, view, letter) for view in matching]
        if not matching:
            found.append(Layer(letter=letter, name=method.value, stands="off", why=_OFF[method]))
    return tuple(found)


def _policy(bmc: BmcView | None) -> Layer:
    if bmc is None:
        return Layer(letter="P", name="policy", stands="off", why="bmc.kind is none")
    if bmc.verified:
        return Layer(letter="P", name="policy", stands="armed", checked_at_s=bmc.checked_at_s)
    if not bmc.error and bmc.checked_at_s is None:
        return Layer(letter="P", name="policy", stands="unknown", why="not checked yet")
    why = bmc.error or f"the policy is {bmc.policy or 'unknown'}"
    return Layer(letter="P", name="policy", stands="blocked", why=why, checked_at_s=bmc.checked_at_s)


def _late(policy: Policy) -> Layer:
    if policy.late_reboot:
        return Layer(letter="A", name="late_reboot", stands="armed")
    why = "host.late_reboot is false, or host.kind is not systemd"
    return Layer(letter="A", name="late_reboot", stands="off", why=why)


def _method(policy: Policy, view: PowerOnView, letter: str) -> Layer:
    stands, why = "unknown" if view.ready is None else "armed" if view.ready else "blocked", view.why
    if view.method is PowerOnMethod.OUTPUT and view.ready:
        others = [each.policy.ups for each in policy.feeds if each.policy.ups not in policy.outputs]
        if others:
            stands, why = "blocked", f"{', '.join(others)} would stay on, so AC would never drop here"
        elif view.returns != "cycles":
            behaviour = {"aborts": "aborts the cut", "stays_off": "stays off"}.get(
                view.returns, "may not switch its output off and on"
            )
            stands, why = "blocked", f"when utility returns in its countdown, this UPS {behaviour}"
    why = "not checked yet" if stands == "unknown" else why
    return Layer(
        letter=letter, name=view.method.value, stands=stands, why=why, ups=view.ups, checked_at_s=view.checked_at_s
    )


def uncovered(known: Sequence[Layer]) -> str:
    """Return the error if no method covers the race, with what blocks each; "" if one does."""
    if covers(known):
        return ""
    blocked = "; ".join(
        f"{' '.join(word for word in (each.letter, each.name, each.ups) if word)}: {each.why}"
        for each in known
        if each.letter in COVERS and each.stands == "blocked"
    )
    return f"{UNCOVERED} ({blocked})" if blocked else UNCOVERED


def covers(known: Iterable[Layer]) -> bool:
    """Say whether a method that covers the race could be armed. Of several outputs each must be."""
    stands: dict[str, set[str]] = {}
    for each in known:
        stands.setdefault(each.letter, set()).add(each.stands)
    return any(stands.get(letter) == {"armed"} for letter in COVERS)


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
    """Turns moments of this boot's clock into relative and Unix seconds."""

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
    """Return the state for operators."""
    times = Times(daemon)
    state = daemon.state
    reasons = readiness(daemon)
    now = conditions.budget_now(daemon.policy, state, times.now_s)
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
        "alarms": list(state.alarms),
        "supply": state.feed.supply.value,
        "supply_since_at": times.at(state.feed.since_s) if state.feed.supply is not Supply.UNKNOWN else None,
        "assumes_utility_fails_now": assumes_failure(state),
        "ups": _ups(ups_name(daemon.policy), state.feed.reading, times, now),
        "feeds": _feeds(daemon, times),
        "battery": _battery(daemon, times),
        "own_load": _own_load(now, times),
        "budget": _budget(now),
        "outage": _outage(daemon, times),
        "next": _next(daemon, now, times),
        "maintenance": _maintenance(daemon, times),
        "drill": _drill(daemon, times),
        "trainers": [_trainer(trainer, state, times) for trainer in state.trainers],
        "sources": [_source(source, daemon, times) for source in daemon.sources],
        "traps": _traps(daemon, times),
        "bmc": _bmc(daemon, times),
        "power_on": _power_on(daemon, times),
        "messages": {
            "trouble": daemon.messages_trouble,
            "targets": [asdict(target) for target in daemon.message_targets],
        },
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
            "journal_ok": not daemon.journal_trouble,
        },
    }


def _own_load(now: Budget, times: Times) -> Json | None:
    """Return what this host draws of a shared UPS's load; null where it has the UPS to itself."""
    own = now.own
    if own is None:
        return None
    return {
        "source": own.source.value,
        "watts": rounded(own.watts),
        "share": rounded(own.load),
        "measured": own.measured,
        "at": times.at(own.at_s),
        "passed_over": [{"source": source.value, "because": why} for source, why in own.passed_over],
        "because": own_from(own, times.now_s),
    }


def plan_view(daemon: Daemon) -> Json:
    """Return the budget of this moment: every term with its source, and what happens next and when."""
    times = Times(daemon)
    now = conditions.budget_now(daemon.policy, daemon.state, times.now_s)
    reasons = readiness(daemon)
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
        "assumes_utility_fails_now": assumes_failure(daemon.state),
        "fits": now.fits,
        "grade": now.grade.value,
        "slack_s": rounded(now.slack_s),
        "terms": [asdict(term) for term in terms(daemon, now)],
        "next": _next(daemon, now, times),
        "tiers": _tiers(daemon, now, times),
    }


def assumes_failure(state: State) -> bool:
    """Say whether the forecast is of a failure of utility: as things are, no power-off comes."""
    return not isinstance(state.phase, Shutdown) and not conditions.may_commit(state)


def _tiers(daemon: Daemon, now: Budget, times: Times) -> list[Json]:
    """Return when a host like this one would pause and power off in each tier of its UPS, if no load changed.

    Empty without tiers, where an extra reserve is set by hand, and once training is paused: the other hosts' phases are
    not known.
    """
    policy, shed = daemon.policy, daemon.policy.shed
    calm = isinstance(daemon.state.phase, Online | OnBattery)
    if shed is None or shed.extra_s is not None or not calm or aborted_by(daemon.state):
        return []
    found: list[Json] = []
    for tier in range(shed.highest + 1):
        tier_policy = replace(policy, shed=replace(shed, tier=tier))
        steps = conditions.forecast(tier_policy, daemon.state, replace(now, shed_s=budget.shed_s(tier_policy)))
        in_s = {step.action: times.in_s(step.at_s) for step in steps}
        commit_s = in_s.get("shutdown")
        found.append(
            {
                "tier": tier,
                "own": tier == shed.tier,
                "pause_s": in_s.get("emergency_checkpoint"),
                "durable_s": in_s.get("holding"),
                "commit_s": commit_s,
                "off_s": None if commit_s is None else rounded(commit_s + budget.force_after_s(tier_policy, now.grade)),
            }
        )
    return found


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
    """Whether the trap port is open, and its counts; None if the settings have none."""
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


def ups_name(policy: Policy) -> str:
    """Name of the UPS; of several, all names."""
    return " + ".join(feed_policy.policy.ups for feed_policy in policy.feeds) or policy.ups


def _feeds(daemon: Daemon, times: Times) -> list[Json]:
    """Each of several UPSes by itself; empty for one."""
    supplies = {feed_policy.policy.ups: feed_policy.supplies for feed_policy in daemon.policy.feeds}
    return [
        {
            "name": policy.ups,
            "supplies": supplies[policy.ups],
            "supply": state.feed.supply.value,
            "supply_since_at": times.at(state.feed.since_s) if state.feed.supply is not Supply.UNKNOWN else None,
            "lost_since_at": None if state.feed.lost_since_s is None else times.at(state.feed.lost_since_s),
            "ups": _ups(policy.ups, state.feed.reading, times, conditions.budget_now(policy, state, times.now_s)),
        }
        for policy, state in (each_alone(daemon.policy, daemon.state) if supplies else ())
    ]


def _battery(daemon: Daemon, times: Times) -> Json:
    """The battery's health with its origin; `battery_view` has the rest."""
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
        "shed_s": rounded(now.shed_s),
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
    """Return "" if there is a shutdown that can still be aborted, else why not."""
    phase = daemon.state.phase
    name = phase_name(phase)
    if name in ("emergency_checkpoint", "holding"):
        return ""
    if isinstance(phase, Shutdown) and phase.outage.mode is not Mode.ARMED:
        recorded = f"in mode {phase.outage.mode} the power-off is only recorded, and the host stays on"
        return f"no shutdown to abort: {recorded}; the outage ends when utility is back"
    if name == "shutdown":
        return "past the commit point: the power-off cannot be undone in this boot"
    if aborted_by(daemon.state):
        return "this outage's shutdown is already aborted"
    if name == "on_battery":
        return "no shutdown to abort yet: training continues; use `powerguard maintenance on` to suspend the power-off"
    if name == "recovery" and daemon.state.feed.supply is Supply.BATTERY:
        return "no shutdown to abort yet; use `powerguard maintenance on` to suspend the power-off"
    if name == "recovery":
        return "no shutdown to abort: the host is coming back"
    return "no shutdown to abort: there is no outage"


def _next(daemon: Daemon, now: Budget, times: Times) -> list[Json]:
    """The forecast of what the machine will do; empty if the shutdown was aborted, since it then waits for utility."""
    if aborted_by(daemon.state):
        return []
    steps = conditions.forecast(daemon.policy, daemon.state, now)
    is_spared = conditions.is_spared(daemon.policy, daemon.state, now)
    # Where the checkpoint does not fit, the power-off comes before it is durable: there is no hold then.
    ends_s = next((step.at_s for step in steps if step.action == "shutdown" and step.at_s is not None), math.inf)
    return [
        {
            "action": step.action,
            "at": times.at(step.at_s),
            "in_s": times.in_s(step.at_s),
            "because": step.because,
            "training": _training(daemon.state) if step.action in ("emergency_checkpoint", "holding") else None,
            "suspended": step.action == "shutdown" and (is_spared or _is_maintained(daemon.state, step.at_s)),
            "spared": step.action == "shutdown" and is_spared,
        }
        for step in steps
        if step.at_s is None or (math.isfinite(step.at_s) and not (step.action == "holding" and step.at_s > ends_s))
    ]


def _is_maintained(state: State, at_s: float | None) -> bool:
    """Say whether maintenance lasts until after a moment, so that the host is not powered off then. None: unknown."""
    return state.maintenance is not None and (at_s is None or at_s < state.maintenance.until_s)


def _training(state: State) -> str | None:
    """Return what training does once its checkpoint is written: pause, exit, continue or mixed; None: no trainer."""
    trainers = [trainer for trainer in state.trainers if trainer.alive] or state.trainers
    conducts = {trainer.conduct.value for trainer in trainers}
    return None if not conducts else "mixed" if len(conducts) > 1 else conducts.pop()


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
    signalled = escalation.of(state, trainer.name)
    return {
        "name": trainer.name,
        "alive": trainer.alive,
        "conduct": trainer.conduct.value,
        "paused": trainer.paused,
        "step": trainer.step,
        "step_s": rounded(trainer.step_s or None),
        "checkpoint_s": rounded(trainer.checkpoint_s),
        "disk": trainer.disk,
        "checkpoint_in_flight": trainer.in_flight is not None,
        "checkpoint_eta_s": None if trainer.in_flight is None else times.in_s(trainer.in_flight.eta_at_s),
        "durable": trainer.durable,
        "durable_step": trainer.durable_step,
        "durable_age_s": times.ago_s(trainer.durable_at_s),
        "failed": "" if trainer.given_up is None else trainer.given_up.because,
        "hosts": trainer.hosts,
        "held_by": trainer.held_by,
        "ended_by": "" if (ended := lifecycle.ended_job(state, trainer.name)) is None else ended.because,
        "signalled": "" if signalled is None else signalled.word,
    }


def _source(source: SourceView, daemon: Daemon, times: Times) -> Json:
    """State of one source. says: its own output source, if the UPS has several sources."""
    feed = next((each.feed for each in daemon.state.upses if each.ups == source.ups), daemon.state.feed)
    known = next((each for each in feed.heard if each.source == source.source), None)
    return {
        "ups": source.ups,
        "source": source.source,
        "up": source.up,
        "age_s": times.ago_s(source.last_reading_at_s),
        "polls": source.polls,
        "failures": source.failures,
        "last_error": source.last_error,
        "authenticated": source.authenticated,
        "forgeable": source.forgeable,
        "trouble": source.trouble,
        "says": None if known is None or known.reading is None else known.reading.output_source.value,
        "doubted": known is not None and known.doubted,
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


def _power_on(daemon: Daemon, times: Times) -> Json:
    known = layers(daemon.policy, daemon.bmc, daemon.methods)
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
            {
                "name": each.method.value,
                "ups": each.ups,
                "confirmed": each.confirmed,
                "acts_at": times.at(each.acts_at_s),
            }
            for each in daemon.state.armed
        ],
    }


def required_steps(daemon: Daemon, now: Budget) -> dict[str, float]:
    """Split the needs into steps for display; the sum is `pause_need_s`."""
    policy = daemon.policy
    bare_s = budget.stop_s(policy, now.grade, reserve_s=0.0)
    ups_off_s = 0.0 if now.grade.value == "bare" else min(policy.ups_off_s, bare_s)
    return {
        "checkpoint": now.checkpoint_s,
        "host_stop": bare_s - ups_off_s,
        "ups_off": ups_off_s,
        "reserve": now.stop_s - bare_s,
        "higher_tiers": now.shed_s,
    }


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
    refused = checks.refusal(policy, state, daemon.clock(), scopes, witness)
    stages = checks.outline(policy, state, scopes, witness) if witness in checks.WITNESSES else ()
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "drill_plan",
        "mode": daemon.policy.mode.value,
        "scopes": list(scopes),
        "witness": witness,
        "refused": refused,
        "stages": [{"stage": stage, "what": what, "at_most_s": rounded(limit_s)} for stage, what, limit_s in stages],
    }


def _running(drill: Drill, times: Times) -> Json:
    stage = drill.part if isinstance(drill.part, DrillStage) else None
    undoing = drill.part if isinstance(drill.part, Undoing) else None
    return {
        "id": drill.id,
        "who": drill.who,
        "scopes": list(drill.scopes),
        "witness": drill.witness,
        "stage": drill.stage,
        "stage_lasted_s": times.ago_s(drill.part.at_s),
        "stage_ends_in_s": None if stage is None else times.in_s(stage.by_s or None),
        "lasted_s": times.ago_s(drill.began_s),
        "coming": [] if stage is None else list(stage.coming),
        "waiting": [f"{each.what} {each.trainer}".strip() for each in drill.waiting],
        "paused": list(drill.paused),
        "result": "" if undoing is None else undoing.result,
        "because": "" if undoing is None else undoing.because,
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


def messages_view(daemon: Daemon) -> Json:
    """Return the object of `/api/v1/notify`: the targets of messages, and the first of those that wait."""
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "notify",
        "at": round(daemon.wall(), 3),
        "trouble": daemon.messages_trouble,
        "targets": [asdict(target) for target in daemon.message_targets],
        "pending": list(daemon.pending_messages(MOST_PENDING)),
    }


MOST_PENDING: Final = 200
FRESH_S: Final = 60.0
"""A check of the host that is older than this is shown with its age."""


_CHARGED: Final = {
    "charge_pct": "enough",
    "budget": "a second outage would leave time for the checkpoint and a stop",
    "bare stop fits": "a second outage would leave time for the checkpoint and a bare stop",
    "charge not reported": "not waited for",
}
"""Why training may start at this charge (core/decide/conditions.py), in words."""


class TrainingGate(NamedTuple):
    """One gate of training. open: None if unknown. text: its state, and the condition to open it."""

    name: str
    open: bool | None
    text: str


def returning(daemon: Daemon) -> Json:
    """Return the object of `/api/v1/recovery`."""
    times, phase = Times(daemon), daemon.state.phase
    recovery = phase if isinstance(phase, Recovery) else None
    view = daemon.returning
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "recovery",
        "at": round(times.wall_s, 3),
        "phase": phase_name(phase),
        "mode": daemon.policy.mode.value,
        "outage": None if recovery is None else recovery.outage.id,
        "back_since_at": None if recovery is None else times.at(recovery.began_s),
        "stage": stage(daemon),
        "forced_by": None if recovery is None else recovery.forced_by or None,
        "gates": [gate._asdict() for gate in gates(daemon)],
        "starts": {"target": view.target, "command": list(view.command)},
        "refused": refusal(daemon) or None,
        "refused_unchecked": refusal(daemon, unchecked=True) or None,
    }


def stage(daemon: Daemon) -> str:
    """Return how far a recovery is: none, unseen, gate, check, start, first_step.

    unseen: the host went down outside an outage, and training is not started (yet).
    """
    phase = daemon.state.phase
    if not isinstance(phase, Recovery):
        return "unseen" if unseen.is_open(daemon.state) else "none"
    if phase.started_at_s is not None:
        return "first_step"
    if phase.tries:
        return "start"
    return "gate" if any(gate.open is False for gate in gates(daemon)[:3]) else "check"


def gates(daemon: Daemon) -> list[TrainingGate]:
    """Return utility, countdown, charge and host, in the order in which they are waited for.

    Where the host went down outside an outage and it is not decided that training is started: that, too.
    """
    return [_utility(daemon), _countdown(daemon), _charge(daemon), _host_check(daemon), *_unseen_stop(daemon)]


def _unseen_stop(daemon: Daemon) -> list[TrainingGate]:
    stop = daemon.state.unseen
    if stop is None or not (unseen.is_open(daemon.state) or stop.left_because):
        return []
    text = stop.left_because or "the BMC is asked whether AC was gone"
    return [TrainingGate("loss of power", open=False, text=text)]


def _utility(daemon: Daemon) -> TrainingGate:
    policy, feed, now_s = daemon.policy, daemon.state.feed, daemon.clock()
    if feed.supply is Supply.BATTERY:
        return TrainingGate("utility", open=False, text="on battery")
    if feed.supply is Supply.UNKNOWN or not fusion.is_fresh(policy, feed, now_s):
        if fusion.is_unknown_on_battery(feed.reading):
            return TrainingGate("utility", open=False, text="unknown, with the UPS's input gone: waited for")
        hold = f"training starts blind after {policy.unknown_hold_s:.0f} s of that"
        return TrainingGate("utility", open=False, text=f"unknown: no source reports; {hold}")
    for_s = now_s - feed.since_s
    if not fusion.is_stable(policy, feed, now_s, stable_s=policy.utility_stable_s):
        return TrainingGate("utility", open=False, text=f"for {for_s:.0f} s; must hold {policy.utility_stable_s:.0f} s")
    return TrainingGate("utility", open=True, text=f"for {for_s:.0f} s")


def _countdown(daemon: Daemon) -> TrainingGate:
    off_at_s = budget.power_off_at_s(daemon.state.feed)
    off_at_s = methods.cut_at_s(daemon.state, daemon.clock()) if off_at_s is None else off_at_s
    if off_at_s is None:
        return TrainingGate("countdown", open=True, text="none runs")
    left_s = max(0.0, off_at_s - daemon.clock())
    return TrainingGate("countdown", open=False, text=f"a UPS cuts its output in {left_s:.0f} s")


def _charge(daemon: Daemon) -> TrainingGate:
    policy, state, now_s = daemon.policy, daemon.state, daemon.clock()
    reading = state.feed.reading
    charge = "not reported" if reading is None or reading.charge_pct is None else f"{reading.charge_pct:.0f} %"
    if because := conditions.may_start(policy, state, now_s):
        return TrainingGate("charge", open=True, text=f"{charge}: {_CHARGED.get(because, because)}")
    began_s = state.phase.began_s if isinstance(state.phase, Recovery) else state.feed.since_s
    left_s = policy.charge_hold_s - (now_s - max(began_s, state.feed.since_s))
    if state.feed.supply is Supply.UTILITY and left_s <= 0.0:
        return TrainingGate(
            "charge", open=True, text=f"{charge}: utility has been back for long, and waiting would cost more"
        )
    text = (
        f"{charge}: a second outage would cost the checkpoint; waited for at most {max(0.0, left_s):.0f} s of utility"
    )
    return TrainingGate("charge", open=False, text=text)


def _host_check(daemon: Daemon) -> TrainingGate:
    seen = daemon.returning.seen
    if seen is None:
        return TrainingGate("host", open=None, text="not checked yet")
    age_s = daemon.clock() - seen.at_s
    when = "" if age_s < FRESH_S else f" ({age_s / 60:.0f} min ago)"
    if seen.problems:
        return TrainingGate("host", open=False, text="; ".join(seen.problems) + when)
    found = [f"{seen.gpus} GPUs" if seen.gpus else "no GPU that can be queried", f"{seen.folders} folders"]
    return TrainingGate("host", open=True, text="; ".join((*found, *seen.notes)) + when)


def refusal(daemon: Daemon, *, unchecked: bool = False) -> str:
    """Return why an order to start training now is refused; "" if it is accepted.

    unchecked: the person trains in spite of the failed check of the host. On battery, and before a cut, it is refused:
    training would be stopped again at once, or use the energy that the next stop needs.
    """
    phase = daemon.state.phase
    if stage(daemon) == "none":
        return f"there was no power-off to recover from: the phase is {phase_name(phase)}"
    if isinstance(phase, Recovery) and phase.started_at_s is not None:
        return "training was started already: powerguard waits for its first step"
    countdown = _countdown(daemon)
    if not countdown.open:
        return f"{countdown.text}: training does not start before that"
    if daemon.state.feed.supply is Supply.BATTERY:
        return "on battery: training starts by itself once utility is back"
    if unchecked:
        return ""
    host = _host_check(daemon)
    if host.open is None:
        return "the host was not checked yet: try again in 15 s, or use --unchecked"
    return host.text if host.open is False else ""
