"""What comes in and what goes out: events, actions and notes, as plain data.

An `Event` is a reading, an outcome, time that passed, a word of an operator; an `Action` is an order, a `Note` a line
of the story. All of it is frozen, free of behaviour, and made only of numbers, strings, enums and tuples, so that it
can be journalled, replayed and compared.

Time: every `at_s` is seconds of CLOCK_BOOTTIME, which runs on over suspend and starts anew at each boot.
"""

from dataclasses import dataclass
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


ON_UTILITY = frozenset(
    (OutputSource.UTILITY, OutputSource.BOOST, OutputSource.TRIM, OutputSource.ECO, OutputSource.BYPASS)
)
"""Where the output comes from the grid, one way or another."""


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
class NetworkSeen:
    """A part of this host's own network by which its sources answer went, or is there.

    part: such as "link enp1s0" or "gateway 10.0.0.1". up: False when it went without anybody on this host wanting it.
    heard_s: when it was last known to be there, where its end is noticed late; None: it went at at_s.
    """

    at_s: float
    part: str
    up: bool
    heard_s: float | None = None


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
    stall_s: for how long a checkpoint beside training holds training up; None when not told.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryReplaced:
    """A person has put in a new battery: what was learned of the old one is forgotten. ups: ""; else one of several."""

    at_s: float
    who: str
    ups: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The daemon has measured a need that no action of this boot shows: "stop", "boot" or "resume", in seconds."""

    at_s: float
    need: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDrill:
    """The operator rehearses an outage. scopes: of `drill.SCOPES`; witness: of `drill.WITNESSES`."""

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
    Reading
    | SourceFailed
    | NetworkSeen
    | Tick
    | TrainerSeen
    | CheckpointProgress
    | Outcome
    | Abort
    | SetMaintenance
    | CheckpointNow
    | ForeignStop
    | BatteryReplaced
    | Measured
    | StartDrill
    | StopDrill
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
    lease_s: float | None = None
    """Seconds after which a pause ends by itself, whoever asked for it; None: it stands until it is told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTrainer(Action):
    """Tell a paused trainer to go on."""

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseTrainer(Action):
    """Tell a trainer to stop at the next step boundary, without a checkpoint. lease_s: as in `TriggerCheckpoint`."""

    trainer: str
    outage: str
    lease_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTrainer(Action):
    """Stop a trainer's processes (SIGSTOP): it was told to pause, and the load has not fallen."""

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateTrainer(Action):
    """End a trainer's processes (SIGTERM, then SIGCONT): stopped, it still draws power."""

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueTrainer(Action):
    """Let a trainer's processes go on (SIGCONT), where we have stopped them; nothing where we have not."""

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapPower(Action):
    """Lower every GPU's power limit to `share` of the limit found, which is written down first; never raise one."""

    outage: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePower(Action):
    """Put every GPU's power limit back to what `CapPower` found; nothing where nothing was changed."""

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
