"""One checkpoint that somebody asked for, from the first request to its end; and how long a pause lasts."""

from dataclasses import dataclass

from powerguard.wire import ENDED, After, CheckpointStatus, Phase, Reason, TriggerRequest, escalated


@dataclass(slots=True)
class Lease:
    """A wish that lapses when its asker is not heard any more.

    lease_s: seconds without a word of the asker. asker: who it is, as the endpoint tells askers apart.
    heard_s: when he was last heard, on the guard's clock.
    """

    lease_s: float
    asker: str
    heard_s: float

    def left_s(self, now_s: float) -> float:
        """Seconds until it lapses; 0 when it has."""
        return max(0.0, self.heard_s + self.lease_s - now_s)


def leased(lease_s: float | None, asker: str, now_s: float) -> Lease | None:
    """Return the lease of a request; None for one that stands until it is taken back."""
    return None if lease_s is None else Lease(lease_s, asker, now_s)


@dataclass(slots=True, kw_only=True)
class Operation:
    """A checkpoint in the making. Owned by a Desk and touched under its lock only.

    deadline_at_s: the tightest deadline of all who asked, on the guard's clock; None when nobody set one.
    lease: how long training stands still for it unheard; None: until it is told to go on.
    began_s: when its bytes began. was_held: training stood still before it, too.
    note: as in the answer.
    generation: its number among all ranks; None where there is one rank. hosts_on_battery: as in the answer.
    told: an asker has read how it ended. must_end: the process is to end even when it fails (a signal said so).
    """

    id: str
    after: After
    reason: Reason = Reason.OPERATOR
    event: str = ""
    deadline_at_s: float | None = None
    lease: Lease | None = None
    phase: Phase = Phase.WAITING_STEP
    step: int | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    path: str = ""
    manifest_digest: str = ""
    error: str = ""
    note: str = ""
    began_s: float | None = None
    was_held: bool = False
    generation: int | None = None
    hosts_on_battery: int | None = None
    told: bool = False
    must_end: bool = False

    @property
    def ended(self) -> bool:
        """Nothing will change any more."""
        return self.phase in ENDED

    @property
    def stands(self) -> bool:
        """Training is to stand still for it."""
        return self.after is not After.CONTINUE

    def join(self, request: TriggerRequest, after: After, now_s: float, asker: str = "") -> None:
        """Let one more asker in: the tighter deadline wins, what comes after it only escalates, no lease beats one."""
        if self.ended:
            return
        if after is not After.CONTINUE:
            lease = leased(request.lease_s, asker, now_s)
            self.lease = lease if not self.stands else self.lease and lease
        self.after = escalated(self.after, after)
        if request.deadline_s is not None:
            deadline_at_s = now_s + request.deadline_s
            self.deadline_at_s = deadline_at_s if self.deadline_at_s is None else min(self.deadline_at_s, deadline_at_s)

    def eta_s(self, now_s: float, usual_s: float | None) -> float | None:
        """Seconds until durable: from the pace of this write, else from `usual_s`, what a checkpoint usually takes."""
        if self.ended:
            return None
        if self.began_s is None:
            return usual_s
        spent_s = now_s - self.began_s
        if self.bytes_done and self.bytes_total and spent_s > 0:
            return max(0.0, spent_s * (self.bytes_total - self.bytes_done) / self.bytes_done)
        return None if usual_s is None else max(0.0, usual_s - spent_s)

    def status(self, now_s: float, *, paused_step: int | None, usual_s: float | None) -> CheckpointStatus:
        """Return what an asker is told."""
        return CheckpointStatus(
            id=self.id,
            phase=self.phase,
            after=self.after,
            step=self.step,
            paused=paused_step is not None,
            paused_step=paused_step,
            deadline_s=None if self.deadline_at_s is None else max(0.0, self.deadline_at_s - now_s),
            eta_s=self.eta_s(now_s, usual_s),
            bytes_done=self.bytes_done,
            bytes_total=self.bytes_total,
            path=self.path,
            manifest_digest=self.manifest_digest,
            durable=self.phase is Phase.COMMITTED,
            error=self.error,
            note=self.note,
            hosts_on_battery=self.hosts_on_battery,
        )
