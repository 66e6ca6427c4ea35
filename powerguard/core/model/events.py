"""What comes in: a reading, an outcome, a tick, a command of an operator; and what an outcome says, by its action.

Frozen, free of behaviour, and made only of numbers, strings, enums and tuples, so that it can be journalled, replayed
and compared. Time: every `at_s` is seconds of CLOCK_BOOTTIME, which continues over suspend and starts at 0 at each
boot.
"""

from dataclasses import dataclass
from enum import StrEnum

from powerguard.core.model.actions import Action, Conduct, Detail, Scalar


class OutputSource(StrEnum):
    """Where the UPS takes its output from. RFC 1628 upsOutputSource, plus eco and unknown.

    Bypass: raw utility power, present but unprotected. Eco: filtered utility power, unprotected for some milliseconds.
    Unknown: not reported, or an unknown value; never "fine".
    """

    UTILITY = "utility"
    BATTERY = "battery"
    BYPASS = "bypass"
    BOOST = "boost"
    TRIM = "trim"
    ECO = "eco"
    OFF = "off"
    UNKNOWN = "unknown"


UNREPORTED = frozenset((OutputSource.OFF, OutputSource.UNKNOWN))
"""Where the UPS does not report what its output comes from: an outage would not be seen."""
UNPROTECTED = frozenset((OutputSource.BYPASS, OutputSource.ECO))
"""Where the output comes from the grid directly: in an outage it may drop before the battery takes over."""
ON_UTILITY = frozenset(OutputSource) - {OutputSource.BATTERY} - UNREPORTED
"""Where the output comes from the grid, one way or another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One complete observation of one UPS by one source, already in our units.

    at_s: when the reading ended. ups: name of the UPS in the settings.
    source: name of the source that made it, such as "snmp" or "snmp:10.0.0.5".
    runtime_s: RFC 1628 upsEstimatedMinutesRemaining x 60; PowerNet upsAdvBatteryRunTimeRemaining / 100;
        NUT battery.runtime; apcupsd TIMELEFT x 60. None when not reported or implausible; never 0 for "unknown".
    charge_pct: 0 to 100. RFC 1628 upsEstimatedChargeRemaining.
    load_pct: percent of the rating; on a three-phase UPS the worst live line.
    on_battery_s: seconds on battery as the UPS counts them. RFC 1628 upsSecondsOnBattery.
    input_present: utility at the input; None when not reported. Derived by the decoder from input volts or alarms.
    low_battery: RFC 1628 upsBatteryStatus low or depleted; NUT LB.
    forced_shutdown: NUT FSD: the primary has ordered every host down.
    output_off_in_s: a countdown of the UPS, of any origin: seconds until it cuts its output.
    authenticated: the answer could not have been forged (SNMP v3 with authentication, TLS).
    alarms: names in lower_snake_case, such as "on_battery", "overload", "battery_missing".
    provenance: (field, object) pairs: the object of the protocol that each field came from.
    """

    at_s: float
    ups: str
    source: str
    output_source: OutputSource
    runtime_s: float | None = None
    charge_pct: float | None = None
    load_pct: float | None = None
    watts: float | None = None
    on_battery_s: float | None = None
    input_present: bool | None = None
    input_v: float | None = None
    battery_temp_c: float | None = None
    low_battery: bool = False
    replace_battery: bool = False
    overload: bool = False
    testing: bool = False
    calibrating: bool = False
    forced_shutdown: bool = False
    output_off_in_s: float | None = None
    authenticated: bool = False
    alarms: tuple[str, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFailed:
    """A poll brought no reading: no answer, a refused one, or one that does not hold together.

    lost: the source counts as lost from now on (three misses in a row); one miss is not news.
    """

    at_s: float
    ups: str
    source: str
    reason: str
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSeen:
    """A part of this host's own network by which its sources answer went, or is there.

    part: such as "link enp1s0" or "gateway 10.0.0.1". up: False when it went down without an order on this host.
    heard_s: when it was last known to be there, where its end is noticed late; None: it went at at_s.
    """

    at_s: float
    part: str
    up: bool
    heard_s: float | None = None


class OwnSource(StrEnum):
    """What this host's own load rests on, best first. The first three measure it."""

    BMC = "bmc"
    PDU = "pdu"
    GPU = "gpu"
    SETTINGS = "settings"
    HOSTS = "hosts"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoad:
    """What this host alone draws, as one source measures it. source: bmc, pdu or gpu.

    bmc: IPMI DCMI Get Power Reading (current watts) or Redfish PowerConsumedWatts. pdu: the sum over the outlets that
    feed this host (NUT outlet.N.realpower). gpu: the sum over all GPUs, without the rest of the host.
    """

    at_s: float
    source: OwnSource
    watts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed. The loop sends one at least every second, and one when `Plan.next_at_s` is due."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSeen:
    """A trainer's status (its `/api/v1/status`), or that it cannot be reached.

    alive: False when its socket is gone or refuses; a trainer that only hangs stays alive.
    conduct: as declared, already clamped by the settings.
    checkpoint_s: its own estimate of a checkpoint to durable; None when it has none.
    disk: trainers with the same word share a disk, so their checkpoints add up.
    step_s: q95 of a training step, 0 when not reported.
    stall_s: how long a checkpoint during training delays training; None when not reported.
    hosts: of its job. held_by: names of the other ones that want training to stand; "" for none.
    ended_by: which of them has left the job and why, so that training ends here; "" for none.
    paused_for: the reason of the request by which this host has paused it; "" for none, or if it does not say.
    """

    at_s: float
    trainer: str
    alive: bool
    conduct: Conduct = Conduct.CONTINUE
    checkpoint_s: float | None = None
    disk: str = ""
    step: int | None = None
    step_s: float = 0.0
    paused: bool = False
    durable_step: int | None = None
    durable_age_s: float | None = None
    stall_s: float | None = None
    hosts: int = 1
    held_by: str = ""
    ended_by: str = ""
    paused_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointProgress:
    """Progress of a checkpoint in flight. eta_s: seconds until durable; None when not reported."""

    at_s: float
    trainer: str
    action_id: str
    stage: str
    eta_s: float | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    paused: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An action was carried out. detail: what it found or changed, for the journal and for people.

    What the core reads of it, and under which names, is below.
    """

    at_s: float
    action: Action
    took_s: float
    detail: Detail = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An action failed, or ran into its limit. reason: what, where, and the fix. harmless: it had no effect.

    detail: what is worth knowing all the same, as in `Done`.
    """

    at_s: float
    action: Action
    took_s: float
    reason: str
    timed_out: bool = False
    harmless: bool = False
    detail: Detail = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The operator calls this outage's shutdown off. Answered before the latch only."""

    at_s: float
    who: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMaintenance:
    """Suspend commits (not alarms) until `until_s`; until_s <= at_s ends it."""

    at_s: float
    until_s: float
    reason: str
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNow:
    """The operator wants a checkpoint of every trainer now, training going on."""

    at_s: float
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStop:
    """The daemon has to stop (SIGTERM): by another program's shutdown, or by a person."""

    at_s: float
    host_stopping: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryReplaced:
    """A person has put in a new battery: what was learned of the old one is forgotten. ups: ""; else one of several."""

    at_s: float
    who: str
    ups: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverNow:
    """The operator wants training started after a return, whatever the gate and the host's check wait for."""

    at_s: float
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The daemon has measured a need that no action of this boot shows: "stop", "boot" or "resume", in seconds."""

    at_s: float
    need: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoweredOn:
    """What brought this host back, asked for once.

    because: the source of the answer, or why there is none. cause: such as "policy-always-on" (IPMI 2.0 section 28.11),
    or "". firmware_s: from power-on to the kernel.
    """

    at_s: float
    because: str
    cause: str = ""
    ac_failed: bool | None = None
    firmware_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDrill:
    """The operator rehearses an outage. scopes: of `checks.SCOPES`; witness: of `checks.WITNESSES`."""

    at_s: float
    who: str
    scopes: tuple[str, ...]
    witness: str = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopDrill:
    """The operator ends the drill that runs; everything is put back."""

    at_s: float
    who: str
    reason: str = ""


Outcome = Done | Failed
Event = (
    Reading | SourceFailed | NetworkSeen | OwnLoad | Tick | TrainerSeen | CheckpointProgress | Outcome | Measured
    | PoweredOn | ForeignStop | Abort | SetMaintenance | CheckpointNow | BatteryReplaced | RecoverNow | StartDrill
    | StopDrill
)  # fmt: skip


# --- What an outcome says -------------------------------------------------------------------------------------
#
# Typed for each action: the one place where the core reads the names in `Done.detail`. An effector returns (name,
# value) pairs, and the journal and people see all of them. What the core decides on is in these classes. A value of
# another type counts as not reported.


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDone:
    """Of `TriggerCheckpoint`.

    step: that was saved; None: not reported. tier: where to; "" or "local": this host. recorded: in dry-run, the
    trainer was not asked. confirmed: False if the trainer has begun and its time is over without a sign of the end.
    older: an older checkpoint, not of the step at which the trainer stands. paused: training stands.
    """

    step: int | None
    tier: str
    recorded: bool
    confirmed: bool
    older: bool
    paused: bool
    verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEnsured:
    """Of `EnsurePolicy`. policy: as read back; None: not reported. restore: what to put back after the outage.

    power_watts: what the host draws, as its BMC says; None: not reported.
    A failure reports `restore`, too: the policy may have been set although it could not be read back.
    """

    policy: str | None
    verified: bool
    restore: str | None
    power_watts: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOnArmed:
    """Of `ArmPowerOn`, as read back. in_s: seconds until it acts; None: not reported. returns: as in `state.Armed`."""

    in_s: float | None
    returns: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOnDisarmed:
    """Of `DisarmPowerOn`. disarmed: False if powerguard had not armed it. because: the effector's words; "": none."""

    disarmed: bool
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged:
    """Of `DrainNode`, `LeaveNode` and `ReturnNode`.

    effect: as the effector reports it; not_ours: others have marked the node.
    jobs: ids of the jobs that were requeued, or started; of a drain: those that a commit would requeue.
    """

    effect: str
    jobs: tuple[str, ...]
    because: str


def is_recorded(outcome: Outcome) -> bool:
    """Say whether the action was only recorded, because this is a dry-run."""
    return isinstance(outcome, Done) and dict(outcome.detail).get("dry_run") is True


def checkpoint_done(done: Done) -> CheckpointDone:
    """Read the outcome of a checkpoint."""
    detail = dict(done.detail)
    step = detail.get("step")
    return CheckpointDone(
        step=step if isinstance(step, int) else None,
        tier=str(detail.get("tier") or ""),
        recorded=is_recorded(done),
        confirmed=detail.get("confirmed") is not False,
        older=detail.get("at_paused_step") is False,
        paused=detail.get("paused") is True,
        verified=detail.get("verified") is True,
    )


def policy_ensured(outcome: Outcome) -> PolicyEnsured:
    """Read what became of the BMC's policy."""
    detail = dict(outcome.detail)
    watts = detail.get("power_watts")
    return PolicyEnsured(
        policy=_text(detail.get("policy")),
        verified=detail.get("verified") is True,
        restore=_text(detail.get("restore")),
        power_watts=watts if isinstance(watts, float) else None,
    )


def power_on_armed(done: Done) -> PowerOnArmed:
    """Read what was armed."""
    detail = dict(done.detail)
    in_s = detail.get("in_s")
    return PowerOnArmed(
        in_s=in_s if isinstance(in_s, int | float) else None, returns=_text(detail.get("returns")) or ""
    )


def power_on_disarmed(outcome: Outcome) -> PowerOnDisarmed:
    """Read what was disarmed."""
    detail = dict(outcome.detail)
    return PowerOnDisarmed(disarmed=detail.get("disarmed") is not False, because=_text(detail.get("because")) or "")


def node_marked(done: Done) -> NodeChanged:
    """Read what became of the scheduler's node."""
    detail = dict(done.detail)
    jobs = _text(detail.get("jobs")) or ""
    return NodeChanged(
        effect=_text(detail.get("did")) or "",
        jobs=tuple(each for each in jobs.split(",") if each),
        because=_text(detail.get("because")) or "",
    )


def is_resumed(done: Done) -> bool:
    """Say whether a resumed trainer continues."""
    return dict(done.detail).get("resumed") is True


def _text(value: Scalar) -> str | None:
    return value if isinstance(value, str) else None
