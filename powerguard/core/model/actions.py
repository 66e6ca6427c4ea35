"""What goes out: actions, which are the core's orders, and notes, which are the lines of its story.

Plain data as in `core/model/events.py`. "Adding an effector" in docs/ARCHITECTURE.md lists what a new kind needs.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final


class Conduct(StrEnum):
    """What a trainer does after its emergency checkpoint. A dumb endpoint continues."""

    PAUSE = "pause"
    EXIT = "exit"
    CONTINUE = "continue"


class PowerOnMethod(StrEnum):
    """A power-on method that is armed for one outage. The BMC's policy is permanent, so it is not one (`EnsurePolicy`).

    OUTPUT (layer B): the UPS `ups` cuts its output and gives it back. RTC (E): the host's clock powers it on.
    SENTINEL (C): another host does. WATCHDOG (D): the BMC's watchdog power-cycles it.
    """

    OUTPUT = "output"
    RTC = "rtc"
    SENTINEL = "sentinel"
    WATCHDOG = "watchdog"


class Grade(StrEnum):
    """How much of an orderly stop there is time for (see `budget.stop_s`)."""

    FULL = "full"
    SHORT = "short"
    BARE = "bare"


class Level(StrEnum):
    """Severity: error = a person must act; warning = protection is reduced; info = the story."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Scalar = str | int | float | bool | None
Detail = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the core orders. id: unique in the journal and the same after a restart; by_s: its absolute deadline.

    word: the kind's name in metrics and in the tests' scenarios. does: what it does, for operators.
    """

    word: ClassVar[str]
    does: ClassVar[str]
    id: str
    by_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PollNow(Action):
    """Poll this UPS at once. The only action that an unconfirmed reading or a hint may cause."""

    word: ClassVar = "poll"
    does: ClassVar = "poll the UPS"

    ups: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerCheckpoint(Action):
    """Ask one trainer for a checkpoint and see it through to durable. `reason` as in `wire.Reason`."""

    word: ClassVar = "checkpoint"
    does: ClassVar = "checkpoint"

    trainer: str
    reason: str
    after: Conduct
    outage: str
    lease_s: float | None = None
    """Seconds after which a pause ends by itself; None: it lasts until a resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTrainer(Action):
    """Resume a paused trainer."""

    word: ClassVar = "resume_trainer"
    does: ClassVar = "resume"

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseTrainer(Action):
    """Pause a trainer at the next step boundary, without a checkpoint. lease_s: as in `TriggerCheckpoint`."""

    word: ClassVar = "pause_trainer"
    does: ClassVar = "pause"

    trainer: str
    outage: str
    lease_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveJob(Action):
    """Let the other hosts of a trainer's job know that this host powers off: every rank stops at one step and ends."""

    word: ClassVar = "leave_job"
    does: ClassVar = "let the job's other hosts know that this one leaves"

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTrainer(Action):
    """Stop a trainer's processes (SIGSTOP): it was asked to pause, and the load has not fallen."""

    word: ClassVar = "stop_trainer"
    does: ClassVar = "stop its processes"

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateTrainer(Action):
    """End a trainer's processes (SIGTERM, then SIGCONT): stopped, it still draws power."""

    word: ClassVar = "terminate_trainer"
    does: ClassVar = "end its processes"

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueTrainer(Action):
    """Continue a trainer's processes (SIGCONT) if powerguard has stopped them; else no effect."""

    word: ClassVar = "continue_trainer"
    does: ClassVar = "continue its processes"

    trainer: str
    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapPower(Action):
    """Lower every GPU's power limit to `share` of the limit found, which is written down first; never raise one."""

    word: ClassVar = "cap_power"
    does: ClassVar = "lower GPU power"

    outage: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePower(Action):
    """Put every GPU's power limit back to what `CapPower` found; no effect if none was changed."""

    word: ClassVar = "restore_power"
    does: ClassVar = "restore GPU power"

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNode(Action):
    """Let the scheduler start no further job on this host, and mark its node with the outage. Others' marks stay."""

    word: ClassVar = "drain_node"
    does: ClassVar = "drain the scheduler's node"

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalJobs(Action):
    """Send the scheduler's jobs on this host the signal that they asked for at a pause; no signal to the others."""

    word: ClassVar = "signal_jobs"
    does: ClassVar = "signal the scheduler's jobs"

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveNode(Action):
    """Requeue the jobs that this host leads, once, and set its node down: the host powers off."""

    word: ClassVar = "leave_node"
    does: ClassVar = "requeue jobs and set the node down"

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnNode(Action):
    """Give the node back if it has this outage's mark, and let `jobs`, which `LeaveNode` requeued, start at once.

    outage: "" for the mark of any outage: the daemon has no history of it. rebooted: the host has booted since, and the
    scheduler may not have expected that: give the node back also if it keeps it out for this reason.
    """

    word: ClassVar = "return_node"
    does: ClassVar = "give the node back to the scheduler"

    outage: str
    jobs: tuple[str, ...] = ()
    rebooted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsurePolicy(Action):
    """Make sure, by reading back, that the BMC powers the host on when AC returns."""

    word: ClassVar = "bmc_policy"
    does: ClassVar = "BMC: power on when AC returns"

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePolicy(Action):
    """Put the BMC's policy back to what an outage found (bmc.policy: bracket). policy: from `EnsurePolicy`."""

    word: ClassVar = "restore_policy"
    does: ClassVar = "BMC: put the policy back"

    outage: str
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPowerOn(Action):
    """Check whether a power-on method could be armed; change nothing. ups: of method OUTPUT, else ""."""

    word: ClassVar = "check_power_on"
    does: ClassVar = "check whether a power-on method can be armed"

    method: PowerOnMethod
    ups: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPowerOn(Action):
    """Arm a power-on method and read it back. in_s: from the order until it acts, not sooner.

    OUTPUT is never sent twice.
    """

    word: ClassVar = "arm_power_on"
    does: ClassVar = "arm a power-on method"

    method: PowerOnMethod
    outage: str
    in_s: float
    ups: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisarmPowerOn(Action):
    """Disarm what `ArmPowerOn` has armed, for this outage, or "": for any; no effect if none is armed."""

    word: ClassVar = "disarm_power_on"
    does: ClassVar = "disarm a power-on method"

    method: PowerOnMethod
    outage: str
    ups: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reboot(Action):
    """Let the power-off that is under way end in a reboot: utility came back. force_after_s: as for `PowerOff`."""

    word: ClassVar = "reboot"
    does: ClassVar = "let the power-off end in a reboot"

    outage: str
    force_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHost(Action):
    """After a return: are GPUs, checkpoint storage and newest checkpoint there and good? Failed: what is missing."""

    word: ClassVar = "check_host"
    does: ClassVar = "check GPUs, storage and checkpoint"

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFilesystems(Action):
    """syncfs() of every checkpoint filesystem, in a child that is killed at the deadline."""

    word: ClassVar = "sync"
    does: ClassVar = "sync the checkpoint filesystems"

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOff(Action):
    """Start the host's power-off; `force_after_s` seconds later it is powered off hard, whatever still runs."""

    word: ClassVar = "power_off"
    does: ClassVar = "power the host off"

    outage: str
    grade: Grade
    force_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTraining(Action):
    """After a return from power-off: start what trains (a systemd target, a command)."""

    word: ClassVar = "resume_training"
    does: ClassVar = "start training"

    outage: str


KINDS: Final[tuple[type[Action], ...]] = tuple(
    each for each in vars().values() if isinstance(each, type) and issubclass(each, Action) and each is not Action
)
"""Every kind of action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line of the story: a `noun_verbed` event, why (`because`), and the numbers, units in the names."""

    event: str
    because: str
    level: Level = Level.INFO
    numbers: Detail = ()
