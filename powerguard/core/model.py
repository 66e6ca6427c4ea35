"""The border between watching, deciding and doing: plain data, nothing else.

What comes in is an `Event`; what goes out is an `Action` and a `Note`; what is kept between the two is a `State`.
All of it is frozen, free of behaviour, and made only of numbers, strings, enums and tuples, so that it can be
journalled, replayed and compared.

Time: every `at_s` is seconds of CLOCK_BOOTTIME, which runs on over suspend and starts anew at each boot.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class OutputSource(StrEnum):
    """Where the UPS takes its output from. RFC 1628 upsOutputSource, plus eco and unknown."""

    UTILITY = "utility"
    BATTERY = "battery"
    BYPASS = "bypass"
    """Load on raw utility power: present, but unprotected."""
    BOOST = "boost"
    TRIM = "trim"
    ECO = "eco"
    """High-efficiency mode: load on filtered utility power, unprotected for some milliseconds."""
    OFF = "off"
    UNKNOWN = "unknown"
    """Not told, or told in a way that we do not know. Never "fine"."""


class Conduct(StrEnum):
    """What a trainer does after its emergency checkpoint. A dumb endpoint continues."""

    PAUSE = "pause"
    EXIT = "exit"
    CONTINUE = "continue"


class Grade(StrEnum):
    """How much of an orderly stop there is time for (see `budget.stop_s`)."""

    FULL = "full"
    SHORT = "short"
    BARE = "bare"


class Level(StrEnum):
    """Who must know: error = a person must act; warning = protection is reduced; info = the story."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


# --- Events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One complete observation of one UPS by one source, already in our units.

    at_s: when the reading ended.
    ups: name of the UPS in the settings.
    source: name of the source that made it, such as "snmp" or "snmp:10.0.0.5".
    feed: the feed that it belongs to; one UPS is one feed.
    runtime_s: RFC 1628 upsEstimatedMinutesRemaining x 60; PowerNet upsAdvBatteryRunTimeRemaining / 100;
        NUT battery.runtime; apcupsd TIMELEFT x 60. None when not told or implausible; never 0 for "unknown".
    charge_pct: 0 to 100. RFC 1628 upsEstimatedChargeRemaining.
    load_pct: percent of the rating; on a three-phase UPS the worst live line.
    on_battery_s: seconds on battery as the UPS counts them. RFC 1628 upsSecondsOnBattery.
    input_present: utility at the input; None when not told. Derived by the decoder from input volts or alarms.
    low_battery: RFC 1628 upsBatteryStatus low or depleted; NUT LB.
    forced_shutdown: NUT FSD: the primary has ordered everybody down.
    output_off_in_s: a countdown of the UPS, whoever ordered it: seconds until it cuts its output.
    authenticated: the answer could not have been forged (SNMP v3 with authentication, TLS).
    alarms: names in lower_snake_case, such as "on_battery", "overload", "battery_missing".
    provenance: (field, object) pairs: which object of the protocol told each field.
    """

    at_s: float
    ups: str
    source: str
    output_source: OutputSource
    feed: str = ""
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
class Tick:
    """Time has passed. The loop sends one at least every second, and one when `Plan.next_at_s` is due."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSeen:
    """What a trainer says of itself (its `/api/v1/status`), or that it cannot be reached.

    alive: False when its socket is gone or refuses; a trainer that only hangs stays alive.
    conduct: as declared, already clamped by the settings.
    checkpoint_s: its own estimate of a checkpoint to durable; None when it has none.
    disk: trainers with the same word share a disk, so their checkpoints add up.
    step_s: q95 of a training step, 0 when not told.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointProgress:
    """How a checkpoint in flight goes on. eta_s: seconds until durable; None when not told."""

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

    For TriggerCheckpoint the machine reads `step` (int), `at_paused_step` (bool), `verified` (bool), `paused` (bool).
    For EnsurePolicy it reads `policy` (str) and `verified` (bool).
    """

    at_s: float
    action: "Action"
    took_s: float
    detail: "Detail" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An action failed, or ran into its limit. reason: what, where, what would be right."""

    at_s: float
    action: "Action"
    took_s: float
    reason: str
    timed_out: bool = False


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
    """The daemon was told to stop (SIGTERM): by a shutdown that is not ours, or by a person."""

    at_s: float
    host_stopping: bool


Outcome = Done | Failed
Event = (
    Reading
    | SourceFailed
    | Tick
    | TrainerSeen
    | CheckpointProgress
    | Outcome
    | Abort
    | SetMaintenance
    | CheckpointNow
    | ForeignStop
)

# --- Actions ----------------------------------------------------------------------------------------------------

Scalar = str | int | float | bool | None
Detail = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the core orders. id: unique in the journal and the same after a restart; by_s: its absolute deadline."""

    id: str
    by_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PollNow(Action):
    """Poll this UPS at once. The only action that an unconfirmed reading or a hint may cause."""

    ups: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerCheckpoint(Action):
    """Ask one trainer for a checkpoint and see it through to durable. `reason` as in `wire.Reason`."""

    trainer: str
    reason: str
    after: Conduct
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTrainer(Action):
    """Tell a paused trainer to go on."""

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsurePolicy(Action):
    """Make sure, by reading back, that the BMC powers the host on when AC returns."""

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFilesystems(Action):
    """syncfs() of every checkpoint filesystem, in a child that is killed at the deadline."""

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOff(Action):
    """Start the host's power-off; `force_after_s` seconds later it is powered off hard, whatever still runs."""

    outage: str
    grade: Grade
    force_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTraining(Action):
    """After a return from power-off: start what trains (a systemd target, a command)."""

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line of the story: a `noun_verbed` event, why (`because`), and the numbers, units in the names."""

    event: str
    because: str
    level: Level = Level.INFO
    numbers: Detail = ()


# --- Policy: the settings, as the core needs them ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPolicy:
    """What the settings say of one trainer. checkpoint_s: seed of its need until it gives a better estimate.

    max_checkpoint_s: what a trainer may claim at most; no trainer can force a shutdown by a claim.
    """

    name: str
    conduct: Conduct = Conduct.PAUSE
    checkpoint_s: float = 60.0
    max_checkpoint_s: float = 600.0
    disk: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that the settings decide, with DESIGN's defaults.

    runtime_table: (load share of the rating, seconds) of a full, healthy battery, ascending; empty when unknown.
    health: share of a new battery's energy that is left, until a discharge has measured it.
    stop_q95_s, stop_median_s: how long the host takes to stop; q95 is never more than force_after_s.
    ups_off_s: the part of a UPS countdown that runs after the forced power-off; 0 where the UPS output stays on.
    fsd_delay_s: from FSD seen to output off: HOSTSYNC + FINALDELAY + the UPS's own delay.
    paused_load_share: load when training is paused, as a share of the load now, until a drill has measured it.
    boot_id: of this boot; an outage's latch holds in its own boot only.
    powers_off: False in dry-run: the order is recorded, nobody dies, and a latch ends when utility is back.
    """

    boot_id: str
    ups: str
    rating_w: float | None = None
    runtime_table: tuple[tuple[float, float], ...] = ()
    health: float = 0.75
    health_replace: float = 0.6
    margin: float = 0.2
    floor: float = 0.10
    recharge_s: float = 8 * 3600.0
    low_battery_s: float = 120.0
    reserve_s: float = 60.0
    force_after_s: float = 110.0
    stop_q95_s: float = 110.0
    stop_median_s: float = 45.0
    bare_stop_s: float = 10.0
    ups_off_s: float = 0.0
    fsd_delay_s: float = 25.0
    blind_s: float = 120.0
    paused_load_share: float = 0.6
    pause_dwell_s: float = 4.0
    commit_dwell_s: float = 8.0
    utility_stable_s: float = 10.0
    stale_s: float = 3.0
    bmc_limit_s: float = 5.0
    resume_charge_share: float = 0.40
    unknown_hold_s: float = 600.0
    powers_off: bool = True
    trainers: tuple[TrainerPolicy, ...] = ()


# --- State ------------------------------------------------------------------------------------------------------


class Supply(StrEnum):
    """What we hold to be true of the feed, after both witnesses."""

    UNKNOWN = "unknown"
    UTILITY = "utility"
    BATTERY = "battery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One feed as confirmed by fusion.

    since_s: since when `supply` holds, by the best clock there is (the UPS's own seconds on battery count).
    suspect: the newest reading says battery and waits for its second witness.
    unproven_battery: the source has said battery ever since first contact and nothing else supports it.
    utility_seen: the source has said utility since first contact, so a battery that repeats itself is news.
    first_charge_pct: charge at first contact; its fall is a witness where nothing else speaks.
    test_since_s: since when a self-test runs; one of more than 60 s is an outage.
    lost_since_s: since when no source has answered; None while one does.
    low_battery_at_s: since when low battery has been told by two readings on battery.
    countdown_at_s: when the UPS cuts its output by a countdown of its own, told by two readings.
    fsd_at_s: when it does so after a forced shutdown that we saw rise.
    fsd_at_first: FSD stood at first contact: history on utility, an order on battery.
    """

    supply: Supply = Supply.UNKNOWN
    since_s: float = 0.0
    reading: Reading | None = None
    previous: Reading | None = None
    suspect: bool = False
    unproven_battery: bool = False
    utility_seen: bool = False
    first_charge_pct: float | None = None
    test_since_s: float | None = None
    lost_since_s: float | None = None
    low_battery_at_s: float | None = None
    countdown_at_s: float | None = None
    fsd_at_s: float | None = None
    fsd_at_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Battery:
    """Our own account of the battery's energy, in shares of a full new battery (DESIGN 4.2).

    used: taken out and not yet put back; survives restarts and boots.
    gauge, charged: what reported runtime and charge say is left; None until told. Dead-reckoned when silent.
    left: the smallest of the three; never rises on battery. None: neither runtime nor a table is known.
    load: share of the rating, averaged over steps of the load; None until told.
    step_at_s: when the load last made a step of more than 5 %: the UPS's own runtime lags for 20 s after.
    suspect: a fall faster than physics that waits for a second reading.
    health: share of a new battery's energy that a full charge holds.
    tau_point: (load, seconds) of a full battery derived from a reading on utility, where there is no table.
    low_load: load when low battery rose: its seconds count at that load.
    away_s: wall seconds for which the host was off; they may have recharged it, if the charge says so too.
    """

    at_s: float = 0.0
    used: float | None = None
    gauge: float | None = None
    charged: float | None = None
    left: float | None = None
    load: float | None = None
    load_at_s: float = 0.0
    step_at_s: float | None = None
    suspect: float | None = None
    health: float = 0.75
    tau_point: tuple[float, float] | None = None
    low_load: float | None = None
    away_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One trainer as last seen.

    checkpoint_s: seconds from order to durable, the best estimate there is.
    order: id of the checkpoint in flight; ordered_at_s: since when; eta_at_s: when it expects to be durable.
    told_pause: it has been told to pause or exit in this outage and has not been resumed.
    durable: this outage's checkpoint is durable (for a trainer that pauses: at the step where it stands).
    durable_at_s: when the newest known checkpoint became durable.
    tries: checkpoints ordered in this outage.
    failed: why the checkpoint of this outage failed for good; "" when it did not.
    """

    name: str
    alive: bool = True
    conduct: Conduct = Conduct.CONTINUE
    checkpoint_s: float = 60.0
    disk: str = ""
    step: int | None = None
    step_s: float = 0.0
    paused: bool = False
    order: str | None = None
    told_pause: bool = False
    ordered_at_s: float = 0.0
    eta_at_s: float | None = None
    durable: bool = False
    durable_at_s: float | None = None
    durable_step: int | None = None
    tries: int = 0
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    until_s: float
    reason: str
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """Utility, or nothing known that would say otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What is true in every phase of an outage. One id, from the first reading on battery until training runs."""

    id: str
    since_s: float
    grade: Grade
    load_at_start: float | None = None
    charge_at_start_pct: float | None = None
    policy_asked: bool = False
    policy_verified: bool = False
    aborted_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnBattery:
    """Training goes on; the budget is watched."""

    outage: Outage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmergencyCheckpoint:
    """Trainers were told to pause and to checkpoint.

    paused_load: predicted load once paused; None where nobody pauses. settle_by_s: until then it counts.
    due_at_s: the commit test came true then and waits for one more poll.
    """

    outage: Outage
    began_s: float
    because: str
    paused_load: float | None = None
    settle_by_s: float = 0.0
    due_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Everything is durable; training is paused and the battery lasts longer. Same fields as the checkpoint phase."""

    outage: Outage
    began_s: float
    paused_load: float | None = None
    settle_by_s: float = 0.0
    due_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Past the commit point, in the boot that is named. From here only "finish and come back".

    waiting: ids of the actions that the power-off waits for, until prepare_by_s.
    force_at_s: when powerguard-off powers off hard; again_at_s: when we order it again if still alive.
    """

    outage: Outage
    boot_id: str
    latched_s: float
    because: str
    waiting: tuple[str, ...] = ()
    prepare_by_s: float = 0.0
    ordered: bool = False
    force_at_s: float = 0.0
    again_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The host is back from an outage that ended in power-off (or in darkness). Training waits for the gate.

    clean: the power-off was ours and was ordered. asked: id of the order to start training; tries: how many so far.
    retry_at_s: not before. due_at_s: as in `EmergencyCheckpoint`, should the power fail again.
    """

    outage: Outage
    began_s: float
    clean: bool
    due_at_s: float | None = None
    asked: str | None = None
    tries: int = 0
    retry_at_s: float = 0.0


Phase = Online | OnBattery | EmergencyCheckpoint | Holding | Shutdown | Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that the core remembers. transfers: when the feed went to battery lately (three in 5 minutes = flapping).

    serial: numbers the actions, so that ids stay unique over restarts.
    rearm_checkpoint_at_s: after a return in place below the charge gate, when the next guarding checkpoint is due.
    told: names of standing alarms that have been told, so that each is told once.
    """

    phase: Phase = field(default_factory=Online)
    feed: Feed = field(default_factory=Feed)
    battery: Battery = field(default_factory=Battery)
    trainers: tuple[Trainer, ...] = ()
    maintenance: Maintenance | None = None
    transfers: tuple[float, ...] = ()
    serial: int = 0
    rearm_checkpoint_at_s: float | None = None
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to one event. `actions` start only after state and actions are in the journal."""

    state: State
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
