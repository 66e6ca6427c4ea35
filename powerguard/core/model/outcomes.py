"""What an outcome says, typed for each action: the one place where the core reads the names in `Done.detail`.

An effector returns (name, value) pairs, and the journal and people see all of them. What the core decides on is in
these classes. A value of another type counts as not reported.
"""

from dataclasses import dataclass

from powerguard.core.model.actions import Scalar
from powerguard.core.model.events import Done, Outcome


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
class WayArmed:
    """Of `ArmWay`, as read back. in_s: seconds until it acts; None: not reported. returns: as in `state.Armed`."""

    in_s: float | None
    returns: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WayDisarmed:
    """Of `DisarmWay`. disarmed: False if powerguard had not armed it. because: in the effector's words; "": none."""

    disarmed: bool
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTold:
    """Of `DrainNode`, `LeaveNode` and `ReturnNode`. did: in the effector's word; not_ours: others have marked the node.

    jobs: ids of the jobs that were requeued, or started; of a drain: those that a commit would requeue.
    """

    did: str
    jobs: tuple[str, ...]
    because: str


def is_recorded(outcome: Outcome) -> bool:
    """Say whether the action was only recorded, because this is a dry-run."""
    return isinstance(outcome, Done) and dict(outcome.detail).get("dry_run") is True


def checkpoint_done(done: Done) -> CheckpointDone:
    """Read the outcome of a checkpoint."""
    told = dict(done.detail)
    step = told.get("step")
    return CheckpointDone(
        step=step if isinstance(step, int) else None,
        tier=str(told.get("tier") or ""),
        recorded=is_recorded(done),
        confirmed=told.get("confirmed") is not False,
        older=told.get("at_paused_step") is False,
        paused=told.get("paused") is True,
        verified=told.get("verified") is True,
    )


def policy_ensured(outcome: Outcome) -> PolicyEnsured:
    """Read what became of the BMC's policy."""
    told = dict(outcome.detail)
    watts = told.get("power_watts")
    return PolicyEnsured(
        policy=_text(told.get("policy")),
        verified=told.get("verified") is True,
        restore=_text(told.get("restore")),
        power_watts=watts if isinstance(watts, float) else None,
    )


def way_armed(done: Done) -> WayArmed:
    """Read what was armed."""
    told = dict(done.detail)
    in_s = told.get("in_s")
    return WayArmed(in_s=in_s if isinstance(in_s, int | float) else None, returns=_text(told.get("returns")) or "")


def way_disarmed(outcome: Outcome) -> WayDisarmed:
    """Read what was disarmed."""
    told = dict(outcome.detail)
    return WayDisarmed(disarmed=told.get("disarmed") is not False, because=_text(told.get("because")) or "")


def node_marked(done: Done) -> NodeTold:
    """Read what became of the scheduler's node."""
    told = dict(done.detail)
    jobs = _text(told.get("jobs")) or ""
    return NodeTold(
        did=_text(told.get("did")) or "",
        jobs=tuple(each for each in jobs.split(",") if each),
        because=_text(told.get("because")) or "",
    )


def is_resumed(done: Done) -> bool:
    """Say whether a resumed trainer continues."""
    return dict(done.detail).get("resumed") is True


def _text(value: Scalar) -> str | None:
    return value if isinstance(value, str) else None
