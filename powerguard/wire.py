"""The JSON shapes that daemon and trainer share: `powerguard.trainer/v1`. Stdlib only, no I/O.

Either side may be hostile, broken or newer than the other. So a parser never raises: it returns the value, or a
`WireError` that says what was wrong; keys that it does not know are ignored; every number has a range, every text a
length, and no character that disturbs a terminal or a log passes.

Durations are relative seconds: the two sides need not agree on the time of day.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import sha256
from typing import TypeVar

from powerguard.fields import IDENTIFIER, MAX_TEXT, FieldError, Fields, clean_text

SCHEMA = "powerguard.trainer/v1"
TRIGGER_PATH = "/api/v1/trigger_checkpoint"
CHECKPOINTS_PATH = "/api/v1/checkpoints"
STATUS_PATH = "/api/v1/status"
PAUSE_PATH = "/api/v1/pause"
RESUME_PATH = "/api/v1/resume"
HOLD_UPLOADS_PATH = "/api/v1/hold_uploads"
LEAVE_PATH = "/api/v1/leave"
HEALTH_PATH = "/api/v1/healthz"
METRICS_PATH = "/metrics"

HOST_LEFT = 75
"""Exit status of every rank of a job that another host has left: EX_TEMPFAIL of sysexits.h, "try again later"."""

MAX_BODY_BYTES = 64 * 1024
MAX_STEP = 2**62
MAX_BYTES = 2**60
MAX_SECONDS = 10 * 365 * 86400.0
MAX_RANKS = 10_000_000
MAX_PATH = 4096

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class WireError:
    """What is wrong with a message, in words for a person. A value, not an exception."""

    reason: str


class Reason(StrEnum):
    """Why a checkpoint is asked for. OTHER: a word that this version does not know; never a ground to refuse."""

    ON_BATTERY = "on_battery"
    DRILL = "drill"
    OPERATOR = "operator"
    MAINTENANCE = "maintenance"
    PERIODIC = "periodic"
    OTHER = "other"


class After(StrEnum):
    """What training does once the checkpoint is durable. It only ever escalates, in this order."""

    CONTINUE = "continue"
    PAUSE = "pause"
    EXIT = "exit"


class Phase(StrEnum):
    """How far a checkpoint has come. AGREEING: the ranks agree on the step. COMMITTING: manifest, rename, syncs."""

    WAITING_STEP = "waiting_step"
    AGREEING = "agreeing"
    SNAPSHOT = "snapshot"
    WRITING = "writing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    FAILED = "failed"
    ABORTED = "aborted"


ENDED = frozenset({Phase.COMMITTED, Phase.FAILED, Phase.ABORTED})


class Loop(StrEnum):
    """What the training loop is busy with. Only TRAIN and EVAL reach a step boundary soon."""

    TRAIN = "train"
    EVAL = "eval"
    COMPILE = "compile"
    IDLE = "idle"


def escalated(one: After, other: After) -> After:
    """Return the stronger of two: continue < pause < exit."""
    order = list(After)
    return max(one, other, key=order.index)


def wire_id(text: str) -> str:
    """Return text if it can stand as an id in a URL and a log line, else a digest of it. Same text, same id."""
    return text if IDENTIFIER.fullmatch(text) else "x" + sha256(text.encode("utf-8", "replace")).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerRequest:
    """Ask for a checkpoint.

    id: the asker's; the same id again is the same checkpoint. deadline_s: seconds from now; None: no hurry.
    event: the outage or drill that it belongs to, for people; "" for none.
    lease_s: a paused training continues by itself when the requester was silent for this many seconds; None: it stays
        paused until a resume, which an outage needs.
    """

    id: str
    reason: Reason = Reason.OPERATOR
    deadline_s: float | None = None
    after: After = After.CONTINUE
    event: str = ""
    lease_s: float | None = None

    def to_json(self) -> bytes:
        """Return the message as it goes over the wire."""
        return _dump(self)

    @classmethod
    def parse(cls, body: bytes) -> "TriggerRequest | WireError":
        """Read a request. `id` is required; all else has a default."""
        return _parsed(body, cls._from)

    @classmethod
    def _from(cls, obj: Fields) -> "TriggerRequest":
        return cls(
            id=obj.identifier("id"),
            reason=obj.word("reason", Reason, Reason.OPERATOR, unknown=Reason.OTHER),
            deadline_s=obj.number("deadline_s", MAX_SECONDS),
            after=obj.word("after", After, After.CONTINUE),
            event=obj.text("event", 128),
            lease_s=obj.number("lease_s", MAX_SECONDS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """The body of `pause` and of `hold_uploads`: how long the wish stands when the asker is not heard any more.

    lease_s: seconds; None: a pause lasts until a resume, held uploads as long as the trainer decides.
    """

    lease_s: float | None = None

    def to_json(self) -> bytes:
        """Return the message as it goes over the wire."""
        return _dump(self)

    @classmethod
    def parse(cls, body: bytes) -> "LeaseRequest | WireError":
        """Read a request; an empty body is one without a lease."""
        return _parsed(body.strip() or b"{}", lambda obj: cls(lease_s=obj.number("lease_s", MAX_SECONDS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    """The body of `leave`: this host powers off, so every rank of the job stops at one step and ends.

    because: why, for the people at the other hosts.
    """

    because: str = ""

    def to_json(self) -> bytes:
        """Return the message as it goes over the wire."""
        return _dump(self)

    @classmethod
    def parse(cls, body: bytes) -> "LeaveRequest | WireError":
        """Read a request; an empty body is one without a reason."""
        return _parsed(body.strip() or b"{}", lambda obj: cls(because=obj.text("because", MAX_TEXT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """How one checkpoint goes on.

    step: the step that is being saved; None until it is agreed on.
    paused: training stands still, now. paused_step: the step at which it stands, or at which it ended for good.
    deadline_s: seconds left until the tightest deadline of all who asked; None: none was set.
    eta_s: seconds until durable; None when not known.
    path: where it lies, on the trainer's host. manifest_digest: "sha256:<hex>" of the manifest.
    durable: data, manifest and directory entries are flushed to the disk. It has no other meaning.
    error: why it failed or was aborted; "" otherwise.
    note: why `after` is less than what was asked for; "" otherwise.
    hosts_on_battery: how many of the job's hosts have asked for it because their utility power failed; None: one host.
    """

    id: str
    phase: Phase
    after: After = After.CONTINUE
    step: int | None = None
    paused: bool = False
    paused_step: int | None = None
    deadline_s: float | None = None
    eta_s: float | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    path: str = ""
    manifest_digest: str = ""
    durable: bool = False
    error: str = ""
    note: str = ""
    hosts_on_battery: int | None = None

    @property
    def at_paused_step(self) -> bool:
        """The checkpoint holds exactly the paused step: no work would be lost."""
        return self.durable and self.step is not None and self.step == self.paused_step

    def to_json(self) -> bytes:
        """Return the message as it goes over the wire."""
        return _dump(self)

    @classmethod
    def parse(cls, body: bytes) -> "CheckpointStatus | WireError":
        """Read a status. `id` and `phase` are required; one that calls itself durable must be committed."""
        return _parsed(body, cls._from)

    @classmethod
    def _from(cls, obj: Fields) -> "CheckpointStatus":
        phase = obj.word("phase", Phase, None)
        durable = obj.flag("durable")
        if durable and phase is not Phase.COMMITTED:
            msg = f"durable: true in phase {phase.value} (only a committed checkpoint is durable)"
            raise FieldError(msg)
        return cls(
            id=obj.identifier("id"),
            phase=phase,
            after=obj.word("after", After, After.CONTINUE),
            step=obj.whole("step", MAX_STEP),
            paused=obj.flag("paused"),
            paused_step=obj.whole("paused_step", MAX_STEP),
            deadline_s=obj.number("deadline_s", MAX_SECONDS),
            eta_s=obj.at_most("eta_s", MAX_SECONDS),
            bytes_done=obj.whole("bytes_done", MAX_BYTES),
            bytes_total=obj.whole("bytes_total", MAX_BYTES),
            path=obj.text("path", MAX_PATH),
            manifest_digest=obj.digest("manifest_digest"),
            durable=durable,
            error=obj.text("error", MAX_TEXT),
            note=obj.text("note", MAX_TEXT),
            hosts_on_battery=obj.whole("hosts_on_battery", MAX_RANKS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCommitted:
    """The newest durable checkpoint. age_s: since it became durable. tier: "local", "remote"."""

    step: int
    age_s: float
    tier: str = "local"
    manifest_digest: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a checkpoint would take. write_bw_p10: bytes a second in the worst tenth of the writes seen.

    seconds: from the order to durable. stall_s: how long training is held up by that, if it continues during the write.
    """

    bytes: int | None = None
    write_bw_p10: float | None = None
    seconds: float | None = None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSave:
    """What the newest save of this process cost. bytes: of this process. stall_s: training waited for the copy.

    write_s: from its first byte on the disk to durable. copy_bw, write_bw: bytes a second. write_share: write_bw as a
    share of what the disk took when room was made for checkpoints at the start; None: that was not measured.
    copy: how a state on a GPU came into host memory, and why not faster; "" for one that has no GPU.
    snapshots: how many states host memory holds at a time, 1 or 2; None: not known.
    """

    step: int
    bytes: int
    stall_s: float
    write_s: float
    copy_bw: float | None = None
    write_bw: float | None = None
    write_share: float | None = None
    copy: str = ""
    snapshots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """A trainer's status: the daemon budgets from this before any outage.

    job: its name. step: the last one that ended; None before the first. last_step_age_s: since then.
    conduct: what it is able and willing to do after an emergency checkpoint.
    checkpoint: id of the checkpoint in flight; "" when there is none.
    last_save: what the newest one cost; None before the first, and for a state that is written by the user's function.
    snapshot_step: step of the newest whole state that lies in host memory, written or not; None: there is none.
    lease_s: seconds until training that stands still goes on by itself; None: it waits for a resume, or is not paused.
    uploads_held: copies to slower storage wait until the outage is over. uploads_step: the newest that is whole there.
    uploads_error, uploads_failing_s: what went wrong there last, and for how long; "" and None since the last success.
    paused_for: the `Reason` why this host has paused training, of the request that did; "" for none, or for a person's.
    hosts_holding: of several hosts, how many want training to stand. held_by: the names of those among them that are
        not the trainer's own. ended_by: which host of the job has left and why, so that training ends; "" for none.
    trouble: what is wrong between ranks, in words.
    """

    job: str
    step: int | None = None
    ranks: int = 1
    hosts: int = 1
    step_time_p50_s: float | None = None
    step_time_p95_s: float | None = None
    last_step_age_s: float | None = None
    loop: Loop = Loop.TRAIN
    paused: bool = False
    conduct: After = After.CONTINUE
    checkpoint: str = ""
    last_committed: LastCommitted | None = None
    estimate: Estimate | None = None
    last_save: LastSave | None = None
    snapshot_step: int | None = None
    lease_s: float | None = None
    uploads_held: bool = False
    uploads_step: int | None = None
    uploads_error: str = ""
    uploads_failing_s: float | None = None
    paused_for: str = ""
    hosts_holding: int | None = None
    held_by: str = ""
    ended_by: str = ""
    trouble: str = ""

    def to_json(self) -> bytes:
        """Return the message as it goes over the wire."""
        return _dump(self)

    @classmethod
    def parse(cls, body: bytes) -> "TrainerStatus | WireError":
        """Read a status. `job` is required: without it, this is another program's `/api/v1/status`."""
        return _parsed(body, cls._from)

    @classmethod
    def _from(cls, obj: Fields) -> "TrainerStatus":
        return cls(
            job=obj.required_text("job", 128),
            step=obj.whole("step", MAX_STEP),
            ranks=obj.whole("ranks", MAX_RANKS) or 1,
            hosts=obj.whole("hosts", MAX_RANKS) or 1,
            step_time_p50_s=obj.number("step_time_p50_s", MAX_SECONDS),
            step_time_p95_s=obj.number("step_time_p95_s", MAX_SECONDS),
            last_step_age_s=obj.number("last_step_age_s", MAX_SECONDS),
            loop=obj.word("loop", Loop, Loop.TRAIN, unknown=Loop.IDLE),
            paused=obj.flag("paused"),
            conduct=obj.word("conduct", After, After.CONTINUE, unknown=After.CONTINUE),
            checkpoint="" if obj.raw("checkpoint") in (None, "") else obj.identifier("checkpoint"),
            last_committed=cls._last_committed(obj.inner("last_committed")),
            estimate=cls._estimate(obj.inner("estimate")),
            last_save=cls._last_save(obj.inner("last_save")),
            snapshot_step=obj.whole("snapshot_step", MAX_STEP),
            lease_s=obj.number("lease_s", MAX_SECONDS),
            uploads_held=obj.flag("uploads_held"),
            uploads_step=obj.whole("uploads_step", MAX_STEP),
            uploads_error=obj.text("uploads_error", MAX_TEXT),
            uploads_failing_s=obj.number("uploads_failing_s", MAX_SECONDS),
            paused_for=obj.text("paused_for", 32),
            hosts_holding=obj.whole("hosts_holding", MAX_RANKS),
            held_by=obj.text("held_by", MAX_TEXT),
            ended_by=obj.text("ended_by", MAX_TEXT),
            trouble=obj.text("trouble", MAX_TEXT),
        )

    @staticmethod
    def _last_committed(obj: Fields | None) -> LastCommitted | None:
        if obj is None:
            return None
        step, age_s = obj.whole("step", MAX_STEP), obj.number("age_s", MAX_SECONDS)
        if step is None or age_s is None:
            msg = "last_committed: needs both step and age_s"
            raise FieldError(msg)
        return LastCommitted(
            step=step,
            age_s=age_s,
            tier=obj.text("tier", 32) or "local",
            manifest_digest=obj.digest("manifest_digest"),
            path=obj.text("path", MAX_PATH),
        )

    @staticmethod
    def _estimate(obj: Fields | None) -> Estimate | None:
        if obj is None:
            return None
        return Estimate(
            bytes=obj.whole("bytes", MAX_BYTES),
            write_bw_p10=obj.number("write_bw_p10", float(MAX_BYTES)),
            seconds=obj.at_most("seconds", MAX_SECONDS),
            stall_s=obj.number("stall_s", MAX_SECONDS),
        )

    @staticmethod
    def _last_save(obj: Fields | None) -> LastSave | None:
        if obj is None:
            return None
        step, size_bytes = obj.whole("step", MAX_STEP), obj.whole("bytes", MAX_BYTES)
        stall_s, write_s = obj.number("stall_s", MAX_SECONDS), obj.number("write_s", MAX_SECONDS)
        if step is None or size_bytes is None or stall_s is None or write_s is None:
            msg = "last_save: needs step, bytes, stall_s and write_s"
            raise FieldError(msg)
        return LastSave(
            step=step,
            bytes=size_bytes,
            stall_s=stall_s,
            write_s=write_s,
            copy_bw=obj.number("copy_bw", float(MAX_BYTES)),
            write_bw=obj.number("write_bw", float(MAX_BYTES)),
            write_share=obj.number("write_share", MAX_SECONDS),
            copy=obj.text("copy", MAX_TEXT),
            snapshots=obj.whole("snapshots", 2),
        )


def error_json(reason: str) -> bytes:
    """Return the body of a refusal, with the reason."""
    return json.dumps({"error": clean_text(reason)}).encode()


def _parsed(body: bytes, build: Callable[[Fields], _Message]) -> _Message | WireError:
    try:
        return build(Fields.of(body, MAX_BODY_BYTES))
    except FieldError as error:
        return WireError(str(error))


def _pruned(value: object) -> object:
    """Return plain data less what is None or not finite: an absent key says "not known"."""
    if isinstance(value, dict):
        pairs = ((key, _pruned(inner)) for key, inner in value.items())
        return {key: inner for key, inner in pairs if inner is not None}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _dump(message: TriggerRequest | LeaseRequest | LeaveRequest | CheckpointStatus | TrainerStatus) -> bytes:
    return json.dumps(_pruned({"schema": SCHEMA, **asdict(message)}), allow_nan=False).encode()
