"""Would this host be saved if utility failed now? If not, or not as well as it could be: why, with the numbers.

Reported in advance, by the same calculation that would decide in the outage.
"""

from dataclasses import dataclass, replace
from typing import Final

from powerguard.core.comeback.unseen import NOT_STARTED
from powerguard.core.energy import account, budget, own
from powerguard.core.energy.learning import charge_of
from powerguard.core.model.actions import Grade
from powerguard.core.model.events import UNPROTECTED
from powerguard.core.model.policy import Policy
from powerguard.core.model.state import Online, Shutdown, State, Supply
from powerguard.daemon.observe.port import Daemon

HUNG_AFTER_S: Final = 5.0
"""The loop gets an event every second; this long without progress, it hangs."""

UNREACHED_S: Final = 300.0
"""A target of messages that fails for this long is worth a reason; a single failure is retried in seconds."""

_MOST_NAMED: Final = 3

ERRORS: Final = {
    "no_reading": "no UPS has been read yet",
    "blind": "no source of the UPS answers",
    "not_protected": "neither a runtime table nor a reported runtime: the runtime of the battery is unknown",
    "undersized": "checkpoint and full stop do not fit a full battery",
    "too_little_left": "the battery would not last for the checkpoint and a bare stop if utility failed now",
    "dry_run": "mode is dry-run: no action is taken",
    "rehearse": "mode is rehearse: the power-off is only recorded",
    "no_power_off": "the daemon cannot power this host off",
    "power_off_overdue": "the host still runs after its forced power-off was due",
    "maintenance": "maintenance suspends the power-off",
    "aborted": "this outage's shutdown was aborted: the host runs until the battery is empty",
    "unproven_battery": "the UPS has reported battery since the first reading, without a second witness: ignored",
    "output_unknown": "the UPS does not report its output source",
    "unprotected": "the UPS is on bypass or in eco mode",
    "overload": "the UPS is overloaded",
    "hung": "the daemon's loop makes no progress",
}
"""Reasons that make the host not ready: it would be lost, or might be."""

WARNINGS: Final = {
    "table_contradicted": "the UPS reports far less runtime than the runtime table says",
    "sources_disagree": "the sources of the UPS disagree: the more cautious value counts",
    "source_doubted": "a source reports battery without evidence and is ignored",
    "supply_contradicted": "the UPS reports another output source, but its input is gone: it counts as on battery",
    "battery_contradicted": "the UPS reports battery, with input voltage and a full charge",
    "low_on_utility": "the UPS reports a low battery on utility: an outage now would be short",
    "redundancy_lost": "a feed does not carry the host; the others do",
    "source_down": "a source does not answer",
    "source_troubled": "a source answers, but with a problem",
    "policy_unverified": "the BMC's power restore policy is not verified: the host may stay off when power returns",
    "no_bmc": "no BMC is configured: the host may stay off when power returns",
    "journal_in_memory": "the journal cannot be written: a restart of the daemon would forget an outage",
    "messages_at_risk": "messages that were not delivered are dropped, or would be lost at a power-off",
    "messages_failing": "a target of messages is not reached",
    "history_lost": "the journal could not give back all that earlier runs had written",
    "settings_rejected": "the newest settings were rejected; the old ones apply",
    "battery_worn": "the UPS asks for a new battery",
    "runtime_steep": "the reported runtime falls faster than time passes: the battery holds less than the UPS reports",
    "load_not_fallen": "training was paused and the load did not fall as expected",
    "own_load_doubted": "a measurement of this host's own load is not believed",
    "own_load_unmeasured": "nothing measures this host's own load: a pause that does not come would not be seen",
    "looks_shared": "other hosts seem to hang on this UPS, and the settings do not say so",
    "signal_failed": "a trainer that still draws power could not be signalled",
    "trainer_left_stopped": "a stopped trainer could not be continued; powerguard keeps trying",
    "power_on_stuck": "a power-on method of an earlier outage cannot be disarmed; powerguard keeps trying",
    "power_on_doubtful": "an earlier run may have armed a power-on method, which cannot be disarmed; it is retried",
    "fsd_at_first": "the UPS still reports a forced shutdown of earlier, which is ignored on utility",
    "low_charge": "the battery would not survive a second outage yet",
    "training_paused": "training is paused although there is no outage",
    "training_held": "another host of the job is on battery and holds training: the GPUs here are idle",
    "job_incomplete": "a job ended because another host left it, and does not train again",
    "training_not_started": "the host went down while it trained, outside an outage, and training is not started",
    "trainer_stranger": "another user serves a trainer's socket, or it cannot be read: its training may be unguarded",
    "other": "another alarm",
}
"""Reasons that reduce protection."""

FIXES: Final = {
    "no_reading": "wait for the first poll; then see the sources in `powerguard status`",
    "blind": "check the UPS card's network, address and credentials (`powerguard doctor`)",
    "not_protected": "give the UPS a runtime_table from its data sheet",
    "undersized": "a larger UPS, less load, faster checkpoints, or a shorter host.force_after_s",
    "too_little_left": "let the battery charge; `powerguard plan` has the numbers",
    "table_contradicted": "correct runtime_table, or replace the battery; until then the UPS's value counts",
    "source_down": "correct the cause in its error; `powerguard doctor` checks it again and shows more",
    "sources_disagree": "see the sources in `powerguard status`: one of them lags, is frozen, or is forged",
    "source_doubted": "restart its driver or card, or remove it from the settings",
    "supply_contradicted": "check the UPS; its card or its profile maps the output source wrongly",
    "battery_contradicted": "check the UPS: its inverter, or its card; if training is held, powerguard abort",
    "low_on_utility": "let it charge; if it stays low, check for a loose or worn battery",
    "redundancy_lost": "see the feeds in `powerguard status`",
    "dry_run": "set mode: rehearse when `powerguard doctor` has no FAIL",
    "rehearse": "set mode: armed when the drill has passed and `powerguard doctor` has no FAIL",
    "no_power_off": "see host.power_off and host.helper in `powerguard doctor`",
    "power_off_overdue": "journalctl -u powerguard-off; systemctl reboot (utility is back), or systemctl poweroff",
    "maintenance": "powerguard maintenance off",
    "aborted": "if utility stays away, `systemctl poweroff` in time; with utility back this ends by itself",
    "policy_unverified": "see bmc in `powerguard status`, and `powerguard doctor`",
    "no_bmc": "set bmc (kind: auto); on a host without one: always-on in the BIOS, and bmc: {kind: none}",
    "journal_in_memory": "remove the cause; it is tried again every 5 s",
    "messages_at_risk": "free the disk of messages.sqlite, or repair the target that takes no message",
    "messages_failing": "powerguard notify test",
    "history_lost": "repeat the drill (`powerguard drill`); this message ends with the daemon's next start",
    "settings_rejected": "powerguard config validate; then systemctl reload powerguard.service",
    "battery_worn": "replace the battery",
    "runtime_steep": "replace the battery; until then only the energy account counts",
    "fsd_at_first": "clear it at the UPS's primary",
    "load_not_fallen": "see the trainers in `powerguard status`; set signals.kind: helper to stop them",
    "own_load_doubted": "see own_load in `powerguard status`; compare with `ipmitool dcmi power reading`",
    "own_load_unmeasured": "give this host its BMC (bmc) or its PDU (shared.outlets), or set gpu.kind: nvml",
    "looks_shared": "set ups.NAME.shared (docs/guides/several-ups.md)",
    "signal_failed": "see signals in `powerguard doctor`",
    "trainer_left_stopped": "as root: powerguard-signal continue",
    "power_on_stuck": "see power_on in `powerguard doctor`: make the method's device or sentinel reachable",
    "power_on_doubtful": "see power_on in `powerguard doctor`: make the method's device or sentinel reachable",
    "trainer_stranger": "allow its user (trainer_uids, uids), or remove the socket",
    "training_not_started": "find out why the host went down, then `powerguard recover` (docs/guides/return.md)",
    "training_paused": "POST /api/v1/resume to its socket, unless a person paused it",
    "training_held": "see that host; if it has gone, POST /api/v1/resume?all_hosts=1 to the trainer's socket",
    "job_incomplete": "bring its hosts back; fewer hosts need a sealed DCP checkpoint (docs/guides/many-hosts.md)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One condition that reduces protection. severity: error = not ready, warning = ready, but with less."""

    name: str
    severity: str
    text: str
    fix: str = ""
    numbers: tuple[tuple[str, float | str], ...] = ()


def is_ready(reasons: tuple[Reason, ...]) -> bool:
    """Say whether the host would be saved; warnings do not count."""
    return not any(reason.severity == "error" for reason in reasons)


def readiness(daemon: Daemon) -> tuple[Reason, ...]:
    """Return all conditions that reduce protection now, errors first; empty if there are none."""
    found = [
        *_of_supply(daemon),
        *of_battery(daemon.policy, daemon.state, daemon.clock()),
        *_of_daemon(daemon),
        *_of_messages(daemon),
        *_of_alarms(daemon.state),
        *_of_trainers(daemon.state),
    ]
    if why := own.looks_shared(daemon.policy, daemon.state):
        found.append(_reason("looks_shared", why))
    unique = {reason.name + reason.text: reason for reason in found}
    return tuple(sorted(unique.values(), key=lambda reason: reason.severity != "error"))


def aborted_by(state: State) -> str:
    """Return the person who aborted this outage's shutdown, and why; "" if it was not aborted."""
    return "" if isinstance(state.phase, Online) else state.phase.outage.aborted_by


def _reason(name: str, detail: str = "", **numbers: float | str | None) -> Reason:
    severity = "error" if name in ERRORS else "warning"
    text = (ERRORS | WARNINGS)[name]
    return Reason(
        name=name,
        severity=severity,
        text=f"{text} ({detail})" if detail else text,
        fix=FIXES.get(name, ""),
        numbers=tuple(
            (key, round(value, 3) if isinstance(value, float) else value)
            for key, value in numbers.items()
            if value is not None
        ),
    )


def _of_supply(daemon: Daemon) -> list[Reason]:
    found: list[Reason] = []
    now_s = daemon.clock()
    if daemon.state.feed.reading is None:
        found.append(_unread(daemon))
    elif daemon.state.feed.lost_since_s is not None or not any(source.up for source in daemon.sources):
        found.append(_reason("blind", age_s=now_s - daemon.state.feed.reading.at_s))
    for source in daemon.sources:
        if not source.up and source.polls:
            age_s = None if source.last_reading_at_s is None else now_s - source.last_reading_at_s
            detail = f"{source.source}: {source.last_error}" if source.last_error else source.source
            found.append(_reason("source_down", detail, ups=source.ups, age_s=age_s))
        elif source.trouble:
            detail = f"{source.source}: {source.trouble}"
            found.append(_reason("source_troubled", detail, ups=source.ups, source=source.source))
    return found


def _unread(daemon: Daemon) -> Reason:
    """Return that no UPS has been read; once polls have failed, the reason source_down has the error."""
    waited_s = daemon.clock() - daemon.started_at_s
    failed = sum(source.failures for source in daemon.sources if not source.up)
    if not failed:
        return _reason("no_reading", waited_s=waited_s)
    reason = _reason("no_reading", f"{failed} polls failed", waited_s=waited_s)
    return replace(reason, fix="correct the cause in the source's error")


_CHARGED = 0.9
"""Above this charge a reported runtime shows the energy of the full battery."""
_CONTRADICTED = 0.75
"""Share of the table's runtime below which a reported runtime contradicts the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullBattery:
    """The budget of a full battery with the present load, as if no outage had begun. Seconds; load_paused: a share.

    available_s: three quarters of the effective runtime when paused. grade: the most orderly stop that fits.
    """

    checkpoint_s: float
    stop_s: float
    available_s: float
    load_paused: float
    grade: Grade

    @property
    def need_s(self) -> float:
        """Checkpoint and full stop."""
        return self.checkpoint_s + self.stop_s

    @property
    def fits(self) -> bool:
        """The full stop fits."""
        return self.grade is Grade.FULL


def reported_share(policy: Policy, state: State) -> float:
    """Energy of a full battery by the UPS's reports on utility, a share of the table's; 1 without a report."""
    charge = charge_of(state.feed.reading)
    gauge = state.battery.gauge
    if state.feed.supply is not Supply.UTILITY or not policy.runtime_table or gauge is None or not charge:
        return 1.0
    return min(1.0, gauge / charge) if charge >= _CHARGED else 1.0


def full_battery(policy: Policy, state: State, now_s: float) -> FullBattery | None:
    """Compute the budget of a full battery; None if its runtime is unknown."""
    points = account.table(policy, state.battery)
    if not points:
        return None
    fresh = tuple(replace(trainer.without_outage().found(paused=False), in_flight=None) for trainer in state.trainers)
    load = account.load_of(state.battery)
    if not isinstance(state.phase, Online):
        load = max(load, state.phase.outage.load_at_start or load)
    host_load = own.own_load(policy, state, now_s)
    paused = budget.paused_load(policy, fresh, load, state.learned, own=host_load)
    tau_paused_s = account.tau_s(points, paused)
    checkpoint_s = budget.checkpoint_s(fresh, now_s)
    health = min(state.battery.health, reported_share(policy, state))
    return FullBattery(
        checkpoint_s=checkpoint_s,
        stop_s=budget.stop_s(policy, Grade.FULL),
        available_s=0.75 * budget.usable(policy, health) * tau_paused_s,
        load_paused=paused,
        grade=budget.choose_grade(policy, left=health, tau_paused_s=tau_paused_s, checkpoint=checkpoint_s),
    )


def of_battery(policy: Policy, state: State, now_s: float) -> list[Reason]:
    """Return what a full battery would not be enough for, by the newest reading; empty before the first."""
    if state.feed.reading is None:
        return []
    full = full_battery(policy, state, now_s)
    if full is None:
        return [_reason("not_protected", blind_s=policy.blind_s)]
    found = []
    share = reported_share(policy, state)
    if share < _CONTRADICTED * state.battery.health:
        detail = f"{100 * share:.0f} % of it at the present load"
        found.append(_reason("table_contradicted", detail, reported_share=share, health=state.battery.health))
    found += _of_what_is_left(policy, state, full)
    if full.fits:
        return found
    return [
        *found,
        _reason(
            "undersized",
            f"needs {full.need_s:.0f} s, has {full.available_s:.0f} s; the stop would be {full.grade}",
            need_s=full.need_s,
            available_s=full.available_s,
            missing_s=full.need_s - full.available_s,
            checkpoint_s=full.checkpoint_s,
            stop_s=full.stop_s,
            load_paused=full.load_paused,
            grade=full.grade.value,
        ),
    ]


def _of_what_is_left(policy: Policy, state: State, full: FullBattery) -> list[Reason]:
    """Say whether the host would be lost if utility failed now, although a full battery would save it."""
    left, health = state.battery.left, state.battery.health
    if not isinstance(state.phase, Online) or left is None or left >= health:
        return []
    tau_s = account.tau_s(account.table(policy, state.battery), full.load_paused)
    need_s = full.checkpoint_s + budget.stop_s(policy, Grade.BARE)
    available_s = 0.75 * budget.usable(policy, left) * tau_s
    if need_s <= available_s or need_s > 0.75 * budget.usable(policy, health) * tau_s:
        return []
    detail = f"needs {need_s:.0f} s, has {available_s:.0f} s"
    return [_reason("too_little_left", detail, need_s=need_s, available_s=available_s, left=left)]


def _of_daemon(daemon: Daemon) -> list[Reason]:
    found: list[Reason] = []
    now_s = daemon.clock()
    if not daemon.policy.powers_off:
        found.append(_reason(daemon.policy.mode.replace("-", "_")))
    if daemon.power_off_trouble:
        found.append(_reason("no_power_off", daemon.power_off_trouble))
    maintenance = daemon.state.maintenance
    if maintenance is not None and not isinstance(daemon.state.phase, Shutdown):  # the commit cannot be undone
        found.append(_reason("maintenance", maintenance.reason, ends_in_s=maintenance.until_s - now_s))
    if who := aborted_by(daemon.state):
        found.append(_reason("aborted", who))
    if now_s - daemon.progressed_at_s > HUNG_AFTER_S:
        found.append(_reason("hung", since_s=now_s - daemon.progressed_at_s))
    if daemon.bmc is None:
        found += [] if daemon.has_no_bmc else [_reason("no_bmc")]
    elif not daemon.bmc.verified:
        detail = daemon.bmc.error or f"policy is {daemon.bmc.policy or 'not read yet'}"
        found.append(_reason("policy_unverified", detail))
    if daemon.journal_trouble:
        found.append(_reason("journal_in_memory", daemon.journal_trouble))
    if daemon.history_lost:
        found.append(_reason("history_lost", daemon.history_lost))
    if strangers := daemon.strangers:
        more = f"; and {len(strangers) - _MOST_NAMED} more" if len(strangers) > _MOST_NAMED else ""
        found.append(_reason("trainer_stranger", "; ".join(strangers[:_MOST_NAMED]) + more, count=len(strangers)))
    if not daemon.settings_ok:
        found.append(_reason("settings_rejected", daemon.config_path))
    return found


def _of_messages(daemon: Daemon) -> list[Reason]:
    """Messages that do not arrive, or would not survive a power-off."""
    found: list[Reason] = []
    if daemon.messages_trouble:
        found.append(_reason("messages_at_risk", daemon.messages_trouble))
    for target in daemon.message_targets:
        if target.since is not None and daemon.wall() - target.since > UNREACHED_S:
            detail = f"{target.name}: {target.answer}"
            found.append(
                _reason("messages_failing", detail, queued=target.queued, since_s=daemon.wall() - target.since)
            )
    return found


def _of_alarms(state: State) -> list[Reason]:
    """Faults that the core has found, and those that the newest reading reports."""
    names = list(state.alarms)
    reading = state.feed.reading
    if reading is not None:
        if reading.output_source in UNPROTECTED:
            names.append("unprotected")
        if reading.replace_battery:
            names.append("battery_worn")
        if reading.overload:
            names.append("overload")
    if state.guarded_since_s is not None:
        names.append("low_charge")
    found = []
    for name in dict.fromkeys(names):
        known = name in ERRORS or name in WARNINGS
        detail = state.unseen.left_because if name == NOT_STARTED and state.unseen is not None else ""
        found.append(_reason(name, detail) if known else _reason("other", name))
    return found


def _of_trainers(state: State) -> list[Reason]:
    """Trainers that stay paused because no order resumes them: a resume failed, or an outage was forgotten."""
    if not isinstance(state.phase, Online) or state.drill is not None:
        return []
    paused = [trainer for trainer in state.trainers if trainer.alive and trainer.paused]
    return [
        _reason("training_held", f"{trainer.name}, by {trainer.held_by}")
        if trainer.held_by
        else _reason("training_paused", trainer.name)
        for trainer in paused
    ]
