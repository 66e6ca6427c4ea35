"""What comes in: a reading, an outcome, time that passed, a word of an operator.

Frozen, free of behaviour, and made only of numbers, strings, enums and tuples, so that it can be journalled, replayed
and compared. Time: every `at_s` is seconds of CLOCK_BOOTTIME, which runs on over suspend and starts anew at each boot.
"""

from dataclasses import dataclass

from powerguard.core.actions import Action, Conduct, Detail
from powerguard.core.readings import NetworkSeen, Reading, SourceFailed


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

    For TriggerCheckpoint the machine reads `step` (int), `at_paused_step` (bool), `verified` (bool), `paused` (bool)
    and `confirmed` (bool; False: the trainer has begun, and its time is over without a sign of the end).
    For EnsurePolicy it reads `policy` (str), `verified` (bool) and `restore` (str: what to put back after the outage).
    For ArmWay it reads `in_s` (float), as read back, and with way OUTPUT `returns` (as in `armed.Armed`).
    For DisarmWay it reads `disarmed` (bool; False: nothing of ours was armed) and `because` (str).
    """

    at_s: float
    action: Action
    took_s: float
    detail: Detail = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An action failed, or ran into its limit. reason: what, where, what would be right. harmless: nothing was done.

    detail: what is worth knowing all the same. For EnsurePolicy the machine reads `restore`, as in `Done`: the policy
    may have been set although it could not be read back.
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
    """What brought this host back, asked for once. because: who tells it, or why nobody does; None: not told.

    cause: such as "policy-always-on" (IPMI 2.0 section 28.11), or "". firmware_s: from power-on to the kernel.
    """

    at_s: float
    because: str
    cause: str = ""
    ac_failed: bool | None = None
    firmware_s: float | None = None


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
    Reading | SourceFailed | NetworkSeen | Tick | TrainerSeen | CheckpointProgress | Outcome | Measured | PoweredOn
    | ForeignStop | Abort | SetMaintenance | CheckpointNow | BatteryReplaced | RecoverNow | StartDrill | StopDrill
)  # fmt: skip
