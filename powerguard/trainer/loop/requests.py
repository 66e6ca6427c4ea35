"""Checkpoint and pause requests, shared by the HTTP, training and writer threads; and the figures of the loop.

Three kinds of thread come here. Server threads ask (`trigger`, `pause`, `resume` ...) and wait. The training thread
looks at `asked` after every step, without a lock, and attends to what it finds at a step boundary. The writer's thread
says how far it has come. They meet under one lock, `changed`. `Operation` is one checkpoint that was asked for, from
the first request to its end. `Pace` says how fast steps and writes are: the daemon budgets from it before any outage.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from threading import Condition, RLock
from typing import NamedTuple, Protocol

from powerguard.fields import MAX_TEXT, clean_text
from powerguard.trainer.log import log
from powerguard.trainer.loop.checkpointer import Taken, WriteAbandoned
from powerguard.trainer.ranks.base import Flag, RanksError, boottime_s
from powerguard.trainer.store.store import SavedCheckpoint
from powerguard.wire import (
    ENDED,
    After,
    CheckpointStatus,
    Estimate,
    LastCommitted,
    LastSave,
    Loop,
    Phase,
    Reason,
    TrainerStatus,
    TriggerRequest,
    escalated,
)

STEPS = 256  # step times that are remembered; a power of two
_SAFETY = 0.8  # of the slowest tenth of the writes seen: disks are slower in an emergency than on a good day


@dataclass(slots=True)
class Totals:
    """Counters since the start, for the metrics.

    failed: periodic checkpoints that came to nothing. late: those that were due while an older one was being written.
    stall_s: for how long training stood still to be copied. corrupt: checkpoints that were refused at restore or scrub.
    """

    writes: int = 0
    bytes: int = 0
    write_s: float = 0.0
    stalls: int = 0
    stall_s: float = 0.0
    failed: int = 0
    late: int = 0
    corrupt: int = 0


@dataclass(slots=True)
class Pace:
    """One loop's figures, and all that the training thread looks at after a step: few objects, few cache misses.

    asked: there is something to attend to at the next boundary. due_s: when the next periodic checkpoint is due, on the
    guard's clock. times, seen: the last step times, and how many there were. These four and `step` take no lock.
    stepped_at_s: when the last step ended, on the guard's clock. loop: what the loop is busy with.
    size_bytes: what a checkpoint of this process would write; None when not known yet.
    processes: how many of the job write on this host at a time, each so much.
    beside: training continues while a state is written, and stops only for the copy.
    limit: bytes a second that the disk took when room was made for checkpoints; None: not measured.
    """

    stepped_at_s: float
    due_s: float = 0.0
    asked: bool = False
    step: int | None = None
    times: list[float] = field(default_factory=lambda: [0.0] * STEPS)
    seen: int = 0
    loop: Loop = Loop.TRAIN
    size_bytes: int | None = None
    beside: bool = True
    processes: int = 1
    totals: Totals = field(default_factory=Totals)
    limit: float | None = None
    last_save: LastSave | None = None
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    _stalls: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def rested(self, seconds: float) -> None:
        """Standing still, saving and evaluating are no step time."""
        self.stepped_at_s += seconds

    def step_time_s(self, share: float) -> float | None:
        """The step time below which `share` of the last 255 steps lay; None before the second step."""
        times = sorted(self.times[1 : min(self.seen, STEPS)])  # the first one is start-up
        return times[int(len(times) * share)] if times else None

    def stalled(self, seconds: float) -> None:
        """Training was held up this long by the copy (or by the write, if it cannot continue meanwhile)."""
        self.totals.stalls += 1
        self.totals.stall_s += seconds
        self._stalls.append(seconds)

    def written(self, size_bytes: int, seconds: float) -> None:
        """A checkpoint of this process's bytes became durable, so long after its first byte."""
        self.totals.writes += 1
        self.totals.bytes += size_bytes
        self.totals.write_s += seconds
        self.probed(size_bytes / max(seconds, 1e-6))

    def saved(self, taken: Taken, *, write_s: float, copy_s: float, how: str, snapshots: int) -> None:
        """A state has become durable, so long after its first byte. copy_s, how: its copy, with all that came late.

        snapshots: how many states host memory holds at a time.
        """
        size_bytes = taken.size_bytes
        self.written(size_bytes, write_s)
        write_bw = size_bytes / max(write_s, 1e-6)
        self.last_save = LastSave(
            step=taken.step,
            bytes=size_bytes,
            stall_s=taken.stall_s,
            write_s=write_s,
            copy_bw=size_bytes / max(copy_s, 1e-6),
            copy=clean_text(how, MAX_TEXT),
            snapshots=snapshots,
            write_bw=write_bw,
            write_share=None if self.limit is None else write_bw / self.limit,
        )

    def probed(self, rate: float) -> None:
        """The disk took so many bytes a second."""
        self._rates.append(rate)

    def write_s(self, size_bytes: int) -> float | None:
        """What writing so many bytes would take; None when no rate is known."""
        slow = self._slow()
        return None if slow is None else size_bytes / max(_SAFETY * slow, 1.0)

    def estimate(self) -> Estimate | None:
        """What a checkpoint would take from the order on; None when not even its size is known."""
        if self.size_bytes is None:
            return None
        write_s = self.write_s(self.size_bytes)
        stall_s = max(self._stalls) if self._stalls else None
        size_bytes, slow = self.size_bytes * self.processes, self._slow()
        if write_s is None or slow is None:
            return Estimate(bytes=size_bytes, stall_s=stall_s)
        seconds = (self.step_time_s(0.95) or 0.0) + write_s + ((stall_s or 0.0) if self.beside else 0.0)
        return Estimate(bytes=size_bytes, write_bw_p10=slow * self.processes, seconds=seconds, stall_s=stall_s)

    def _slow(self) -> float | None:
        """The rate that nine tenths of the writes reached."""
        return sorted(self._rates)[(len(self._rates) - 1) // 10] if self._rates else None


class UploadsSeen(NamedTuple):
    """How copying goes. step: of the newest checkpoint that is whole in slower storage; None: none yet.

    error, failing_s: what went wrong last, for a person, and for how long; "" and None since the last success.
    """

    step: int | None = None
    error: str = ""
    failing_s: float | None = None


class Uploads(Protocol):
    """What copies checkpoints to slower storage, in the background."""

    def offer(self, saved: SavedCheckpoint, *, requested: bool) -> None:
        """A checkpoint is durable on this host. requested: by a request; else by the schedule.

        Never called with the lock of the requests held: it reads the manifest.
        """
        ...

    def hold(self) -> None:
        """Stop at once, and begin nothing. Never called with the lock of the requests held."""
        ...

    def release(self) -> None:
        """Go on."""
        ...

    def seen(self) -> UploadsSeen:
        """Return how they go, for people. Never called with the lock of the requests held."""
        ...

    def figures(self) -> Mapping[str, tuple[str, str, float]]:
        """Return metrics: name -> (type, help, value)."""
        ...


class RankRequests(Protocol):
    """The other ranks of the job, where there are any. Never called with the lock held; may raise RanksError."""

    @property
    def holds(self) -> bool:
        """Training is to stand for this host, as all ranks know."""
        ...

    @property
    def hosts_holding(self) -> int | None:
        """How many hosts want that; None where there is one."""
        ...

    @property
    def held_by(self) -> tuple[str, ...]:
        """The names of the other hosts that want that."""
        ...

    @property
    def calls_the_roll(self) -> bool:
        """No host wants training to stand any more, and all ranks are asked whether they are there."""
        ...

    @property
    def trouble(self) -> str:
        """What is wrong between the ranks, for a person; "" while nothing is."""
        ...

    def departs(self, because: str) -> None:
        """Have all ranks stop at one step and end: this host leaves the job."""
        ...

    def news(self) -> None:
        """Bring the requests up to date with what they have agreed on."""
        ...

    def opened(self, request: TriggerRequest) -> int:
        """Have all ranks save; return the number of the generation that this wish is part of."""
        ...

    def cancelled(self, number: int) -> None:
        """Call a generation off, for all ranks."""
        ...

    def rotted(self, digest: str) -> None:
        """Have no request answered with what all ranks have saved last: it is not durable any more, at any host."""
        ...

    def paused(self) -> None:
        """Have all ranks stand still, for this host."""
        ...

    def resumed(self, *, all_hosts: bool = False) -> None:
        """Take back what this host wanted, or what all of them did; all ranks go on, if no host holds them any more."""
        ...


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
    """A checkpoint in the making. Owned by a RequestQueue and touched under its lock only.

    deadline_at_s: the tightest deadline of all requests, on the guard's clock; None for none.
    lease: how long training pauses for it without a renewal; None: until `resume`.
    began_s: when its bytes began. was_held: training stood still before it, too.
    note: as in the answer.
    generation: its number among all ranks; None where there is one rank. hosts_on_battery: as in the answer.
    end_sent: an asker has read how it ended. must_end: the process is to end even when it fails (a signal said so).
    """

    id: str
    after: After
    reason: Reason = Reason.OPERATOR
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
    end_sent: bool = False
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
            self.reason = self.reason if self.stands else request.reason
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
        """Return the answer to a caller."""
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


_KEPT_OPERATIONS = 64
UPLOADS_HELD_S = 900.0  # without a lease and without a pause: a daemon that died must not stop uploads for ever


class RequestQueue:
    """One training process's wishes. Every attribute but `asked` and `pace` is touched under `changed` only.

    job: its name. conduct: the most that it is willing to do after an emergency checkpoint. ranks, hosts: of the job.
    """

    def __init__(
        self,
        *,
        job: str,
        conduct: After,
        clock: Callable[[], float] = boottime_s,
        ranks: int = 1,
        hosts: int = 1,
        uploads: Uploads | None = None,
    ) -> None:
        self.job = job
        self.conduct = conduct
        self.clock = clock
        self.ranks, self.hosts = ranks, hosts
        self.uploads = uploads
        self.pace = Pace(clock())
        self.lock = RLock()  # entered by the training thread: a Condition's `with` is Python, and room for a Ctrl-C
        self.changed = Condition(self.lock)
        self.others: RankRequests | None = None
        """Set where there are other ranks: then they decide together where training stands."""
        self.wanted = Flag()
        """Set when the disk is needed at once: tidying up ends at once."""
        self.waiting: Operation | None = None
        """Asked for; its state is not taken yet."""
        self.begun: list[Operation] = []
        """Its state is being taken or written, oldest first."""
        self.held = self.holds = False
        """With several ranks: this host wants training to stand, for as long as `lease` says."""
        self.lease: Lease | None = None
        self.held_for: Reason | None = None
        """Why training stands for this host, by the first request without a lease; None for one without a reason."""
        self.ending: Operation | None = None
        self.departed = ""
        """Which host has left the job, and why, so that training ends; "" while none has."""
        self.departure_sent = False
        """An asker has read that."""
        self.listened_at_s: float | None = None
        """When an asker last waited for it, as the daemon does."""
        self.closed = False
        self.boundary: int | None = None
        """The step after which the training thread is with us just now; None while it trains."""
        self.serving = False
        """The training thread is at a step boundary and serves waiting requests."""
        self.phase_step: int | None = None
        """Within a phase with a state: the step of this state."""
        self.signals = self.signals_heard = False
        """Signals that mean the end are listened to; one has come."""
        self.signalled: int | None = None
        """The one that has come and is not attended to yet. Set by its handler, which can take no lock."""
        self.saving = False
        """The training thread is busy with the state: it cannot go on before that is done."""
        self.last: SavedCheckpoint | None = None
        self.last_at_s = clock()
        self.snapshot_step: int | None = None
        self.results = {Phase.COMMITTED: 0, Phase.FAILED: 0, Phase.ABORTED: 0}
        self._operations: dict[str, Operation] = {}
        self._uploads_lease: Lease | None = None

    # --- Those who ask --------------------------------------------------------------------------------------------

    def heard(self, asker: str) -> None:
        """A caller has sent a request, of any kind: renew its leases."""
        with self.changed:
            now_s = self.clock()
            for lease in (
                self.lease,
                self._uploads_lease,
                *(each.lease for each in (self.waiting, *self.begun) if each),
            ):
                if lease is not None and lease.asker == asker:
                    lease.heard_s = now_s

    def trigger(self, request: TriggerRequest, *, asker: str = "") -> CheckpointStatus:
        """Ask for a checkpoint at the next step boundary. The same id, or one in flight, is the same checkpoint."""
        after = request.after if escalated(request.after, self.conduct) is self.conduct else self.conduct
        number, error = self._opened_elsewhere(replace(request, after=after))
        with self.changed:
            operation = self.open(request, after, asker, number)
            if after is not request.after:
                self._note_conduct(operation, request.after)
            if error is not None and not operation.ended:
                self.settle(operation, error)
            if after is not After.CONTINUE and self.others is not None:
                self._stand_for(request.lease_s, asker, request.reason)
            is_pressing = after is not After.CONTINUE or request.reason is Reason.ON_BATTERY
            if is_pressing and not operation.ended:
                self._note_uploads(request.lease_s, asker)
        self._ask(lambda others: others.news())  # it may have ended before it was known here
        self._stop_uploads(now=is_pressing)
        with self.changed:
            return self.status_of(operation)

    def _note_conduct(self, operation: Operation, requested: After) -> None:
        """Report, once for each checkpoint, that this training does less than it was asked for."""
        note = f"asked for {requested}, but this training allows no more than {self.conduct} (Guard's conduct)"
        if operation.note != note:
            operation.note = note
            log.warning("checkpoint %s: %s", operation.id, note)

    def _opened_elsewhere(self, request: TriggerRequest) -> tuple[int | None, Exception | None]:
        """Have the other ranks save too: the number of the generation, or why it cannot be."""
        if self.others is None:
            return None, None
        try:
            return self.others.opened(request), None
        except RanksError as error:
            return None, error

    def open(self, request: TriggerRequest, after: After, asker: str, number: int | None = None) -> Operation:
        """Find or make the operation of a request, let it join, and have it attended to. With the lock held.

        number: of its generation, where there are other ranks.
        """
        now_s = self.clock()
        operation = self._operations.get(request.id)
        if operation is None:
            operation = self._joinable(after) if self.others is None else self.of_generation(number)
        if operation is None:
            lease = leased(request.lease_s, asker, now_s) if after is not After.CONTINUE else None
            operation = Operation(id=request.id, after=after, reason=request.reason, lease=lease)
            operation.generation = number
            if self.others is None:
                self.waiting = operation
            else:
                self.begun.append(operation)
        stood = operation.stands
        operation.join(request, after, now_s, asker)
        self._operations[request.id] = operation
        while len(self._operations) > _KEPT_OPERATIONS:
            del self._operations[self._forgettable()]
        if operation in self.begun and operation.stands and self.others is None:
            if not stood:
                self.hold(operation)  # joined in mid-write by one who wants it to stand
            elif self.held:
                self.lease = self.lease and operation.lease
        if self.closed:
            self._abort_all("training has ended")
        self.asked = self.asked or self.others is None
        self.wanted.set()
        self.changed.notify_all()
        return operation

    def of_generation(self, number: int | None) -> Operation | None:
        """Return the operation of a generation, if one is known that has not ended. With the lock held."""
        matching = (each for each in self.begun if number is not None and each.generation == number)
        return next(matching, None)

    def known_as(self, names: Iterable[str]) -> Operation | None:
        """Return the operation that was asked for under one of these names. With the lock held."""
        return next((self._operations[name] for name in names if name in self._operations), None)

    def checkpoint(self, name: str, *, wait_s: float = 0.0, seen: str = "") -> CheckpointStatus | None:
        """Return how a checkpoint goes on, after wait_s or as soon as there is news. None: never heard of.

        seen: the phase that the asker knows of; another one is news at once. "": a change from now on is.
        """
        with self.changed:
            operation = self._operations.get(name)
            if operation is None:
                return None
            known = seen or operation.phase.value
            if not operation.ended and wait_s > 0:
                # Looked up again each time: one that a newer one supersedes goes on under its name.
                self.changed.wait_for(lambda: self._operations.get(name, operation).phase != known, timeout=wait_s)
            return self.status_of(self._operations.get(name, operation))

    def mark_end_sent(self, name: str) -> None:
        """Note that an asker has been sent this checkpoint's end: a training that is to exit may go now."""
        with self.changed:
            operation = self._operations.get(name)
            if operation is not None and operation.ended:
                operation.end_sent = True
                self.changed.notify_all()

    def cancel(self, name: str) -> CheckpointStatus | None:
        """Call a checkpoint off: one not begun is aborted; one begun is finished, and training goes on meanwhile."""
        with self.changed:
            operation = self._operations.get(name)
            if operation is None:
                return None
            if self.others is not None:
                pass
            elif operation is self.waiting:
                self._abort(operation, "called off before it began")
            elif operation in self.begun and operation.stands:
                operation.after = After.CONTINUE
                self.held = operation.was_held
            self.changed.notify_all()
        if self.others is not None and operation.generation is not None and not operation.ended:
            self._ask(lambda others: others.cancelled(operation.generation or 0))
        with self.changed:
            return self.status_of(operation)

    def pause(self, *, lease_s: float | None = None, asker: str = "") -> TrainerStatus:
        """Stand still at the next step boundary, without a checkpoint, if this training is willing to."""
        if self.conduct is After.CONTINUE:
            return self.status()
        self._ask(lambda others: others.paused())
        with self.changed:
            self._stand_for(lease_s, asker)
            self.held = self.held or self.others is None
            self.asked = self.asked or self.others is None
            self.wanted.set()
            self.changed.notify_all()
        return self.status()

    def _stand_for(self, lease_s: float | None, asker: str, reason: Reason | None = None) -> None:
        """Note for how long this wish has training stand: no lease beats one. Of several ranks, once all know it."""
        if self.others is None or self.others.holds:
            lease = leased(lease_s, asker, self.clock())
            stood, self.holds = (self.held, False) if self.others is None else (self.holds, True)
            self.held_for = self.held_for if stood and self.lease is None else reason
            self.lease = self.lease and lease if stood else lease

    def resume(self, *, wait_s: float = 1.0, all_hosts: bool = False) -> TrainerStatus:
        """Go on in place, unless another host holds it. Waits up to wait_s to see it; what is written is finished."""
        self._ask(lambda others: others.resumed(all_hosts=all_hosts))
        with self.changed:
            if self.others is None:
                self.held = False
                self.lease = None
                for operation in (*self.begun, *filter(None, [self.waiting])):
                    operation.after = After.CONTINUE
                if self.ending is not None and not (self.ending.end_sent or self.ending.must_end):
                    self.ending = None
            self._release_uploads()
            self.changed.notify_all()
            self.changed.wait_for(self._has_resumed, timeout=wait_s)
        return self.status()

    def _has_resumed(self) -> bool:
        """Say whether training goes on, or will not because of this resume."""
        if self.others is not None and self.others.calls_the_roll:
            return False
        return self.boundary is None or self.saving or self.held

    def leave(self, because: str) -> TrainerStatus:
        """Have every rank of the job stop and end: this host powers off. A job of one process has no others to ask."""
        self._ask(lambda others: others.departs(because))
        return self.status()

    def _ask(self, wish: Callable[[RankRequests], None]) -> None:
        """Inform the other ranks, if there are any; where they cannot be reached, the status shows what came of it."""
        if self.others is not None:
            try:
                wish(self.others)
            except RanksError as error:
                log.warning("the other ranks cannot be asked: %s", error)

    def hold_uploads(self, *, lease_s: float | None = None, asker: str = "") -> TrainerStatus:
        """Copy nothing to slower storage until `resume`, or until no request came for lease_s (15 minutes if None).

        0: go on, as soon as training does not stand still and no checkpoint is in flight.
        """
        with self.changed:
            self._note_uploads(lease_s, asker)
            if lease_s == 0:
                self.lapse_uploads()
            else:
                self.wanted.set()
            self.changed.notify_all()
        self._stop_uploads(now=lease_s != 0)
        return self.status()

    def departure(self, wait_s: float) -> None:
        """Wait until a host has left the job, for wait_s at most."""
        with self.changed:
            self.listened_at_s = self.clock()
            self.changed.wait_for(lambda: self.departed or self.closed, timeout=wait_s)
            self.listened_at_s = self.clock()

    def mark_departure_sent(self) -> None:
        """Note that an asker has been sent why training ends: it may go now."""
        with self.changed:
            self.departure_sent = True
            self.changed.notify_all()

    def status(self) -> TrainerStatus:
        """Return what the daemon budgets from."""
        uploads = UploadsSeen() if self.uploads is None else self.uploads.seen()
        with self.changed:
            now_s = self.clock()
            last, pace = self.last, self.pace
            in_flight = self.waiting or (self.begun[-1] if self.begun else None)
            is_ours = self.paused_step is not None and (self.held if self.others is None else self.holds)
            return TrainerStatus(
                job=self.job,
                step=pace.step,
                ranks=self.ranks,
                hosts=self.hosts,
                step_time_p50_s=pace.step_time_s(0.5),
                step_time_p95_s=pace.step_time_s(0.95),
                last_step_age_s=max(0.0, now_s - pace.stepped_at_s),
                loop=pace.loop,
                paused=self.paused_step is not None,
                conduct=self.conduct,
                checkpoint="" if in_flight is None else in_flight.id,
                last_committed=None
                if last is None
                else LastCommitted(
                    step=last.step,
                    age_s=now_s - self.last_at_s,
                    manifest_digest=last.manifest_digest,
                    path=last.path,
                ),
                estimate=pace.estimate(),
                last_save=pace.last_save,
                snapshot_step=self.snapshot_step,
                lease_s=self.lease.left_s(now_s) if self.held and self.lease is not None else None,
                uploads_held=self._uploads_lease is not None,
                uploads_step=uploads.step,
                uploads_error=uploads.error,
                uploads_failing_s=uploads.failing_s,
                paused_for=self.held_for.value if is_ours and self.held_for is not None else "",
                hosts_holding=None if self.others is None else self.others.hosts_holding,
                held_by="" if self.others is None else clean_text(", ".join(self.others.held_by)),
                ended_by=clean_text(self.departed),
                trouble="" if self.others is None else self.others.trouble,
            )

    # --- The training thread and the writer's, with the lock held ---------------------------------------------------

    @property
    def asked(self) -> bool:
        """There is something to attend to at the next step boundary. The training thread reads it without the lock."""
        return self.pace.asked

    @asked.setter
    def asked(self, asked: bool) -> None:
        self.pace.asked = asked

    @property
    def paused_step(self) -> int | None:
        """The step at which training stands still, or at which it ended for good; None while it trains."""
        return self.boundary if self.held or self.ending is not None else None

    def take_signal(self) -> None:
        """Make the wish of a signal one like any other: a checkpoint, and then the end."""
        if (request := self.signal_request()) is not None:
            self.open(request, After.EXIT, asker="").must_end = True

    def signal_request(self) -> TriggerRequest | None:
        """Return the wish of a signal that has come, once."""
        number, self.signalled = self.signalled, None
        if number is None:
            return None
        return TriggerRequest(id=f"signal-{number}-{secrets.token_hex(4)}", after=After.EXIT)

    def claim(self, step: int, phase: Phase) -> Operation | None:
        """Take the operation that waits, if one does, for the state after this step."""
        operation = self.waiting
        if operation is not None:
            self.begun.append(operation)
            self.waiting = None
            operation.step = step
            operation.phase = phase
            operation.began_s = self.clock()
            if operation.stands:
                self.hold(operation)
            self.changed.notify_all()
        return operation

    def hold(self, operation: Operation) -> None:
        """Have training stand still for this operation, from the beginning of its write and after it, come what may."""
        operation.was_held = self.held
        self.held_for = self.held_for if self.held and self.lease is None else operation.reason
        self.lease = self.lease and operation.lease if self.held else operation.lease
        self.held = self.asked = True

    def lapse(self) -> float | None:
        """Let a pause go whose lease is over; return the seconds until that comes, None when it never does."""
        if not self.held or self.lease is None:
            return None
        left_s = self.lease.left_s(self.clock())
        if left_s <= 0:
            self.held = False
            self.lease = None
            for operation in self.begun:
                operation.after = After.CONTINUE
            self._release_uploads()
        return left_s

    def lapse_uploads(self) -> float | None:
        """Let held uploads go when no caller holds them any more; return the seconds until it is worth a look again."""
        if self._uploads_lease is None:
            return None
        left_s = self._uploads_lease.left_s(self.clock())
        if left_s <= 0 and not (self.held or self.waiting or self.begun):
            self._release_uploads()
        return max(1.0, left_s)

    def progress(self, operation: Operation, phase: Phase, done: int | None, total: int | None) -> None:
        """Note how far a write has come, unless another rank has ended it meanwhile."""
        if operation.ended:
            return
        operation.bytes_done, operation.bytes_total = done, total
        if operation.phase is not phase:
            operation.phase = phase
            self.changed.notify_all()

    def committed(self, saved: SavedCheckpoint) -> None:
        """A checkpoint is durable, from a request or the schedule. One older than the newest does not count.

        Nor is another of the same step of which this rank does not know where it lies.
        """
        if self.last is None or saved.step > self.last.step or (saved.step == self.last.step and saved.path):
            self.last = saved
            self.last_at_s = self.clock()
            self.changed.notify_all()

    def settle(self, operation: Operation, outcome: SavedCheckpoint | Exception) -> None:
        """End an operation that was claimed."""
        if isinstance(outcome, WriteAbandoned):
            operation.phase = Phase.ABORTED
            operation.error = clean_text(str(outcome))
        elif isinstance(outcome, Exception):
            operation.phase = Phase.FAILED
            operation.error = clean_text(f"{type(outcome).__name__}: {outcome}")
        else:
            operation.phase = Phase.COMMITTED
            operation.path = outcome.path
            operation.manifest_digest = outcome.manifest_digest
            operation.bytes_done = operation.bytes_total = outcome.size_bytes
        leaves = operation.after is After.EXIT and operation.phase is Phase.COMMITTED and self.others is None
        if operation.must_end or leaves:
            self.ending = operation
            self.asked = True
        self.results[operation.phase] += 1
        self.begun.remove(operation)
        self.changed.notify_all()

    def supersede(self, old: Operation, new: Operation) -> None:
        """Let those who asked for an older state have the newer one, whose bytes go first."""
        self.begun.remove(old)
        for name, operation in self._operations.items():
            if operation is old:
                self._operations[name] = new
        new.after = escalated(old.after, new.after)
        new.must_end = new.must_end or old.must_end
        if old.deadline_at_s is not None:
            new.deadline_at_s = min(old.deadline_at_s, new.deadline_at_s or old.deadline_at_s)
        self.changed.notify_all()

    def fail_waiting(self, why: str) -> None:
        """Abort the operation that waits: there is no way in which it could begin."""
        if self.waiting is not None:
            self._abort(self.waiting, why)
            self.changed.notify_all()

    def close(self) -> None:
        """Training has ended, and with it what is in flight."""
        with self.changed:
            self.closed = True
            self._abort_all("training has ended")
            self.changed.notify_all()

    def status_of(self, operation: Operation) -> CheckpointStatus:
        """Return the answer to a caller about an operation."""
        estimate = self.pace.estimate()
        usual_s = None if estimate is None else estimate.seconds
        return operation.status(self.clock(), paused_step=self.paused_step, usual_s=usual_s)

    def _joinable(self, after: After) -> Operation | None:
        """Return the operation that a new wish is part of.

        One whose state is older than where training stands is not: who wants that wants the checkpoint of that step.
        """
        if self.waiting is not None:
            return self.waiting
        newest = self.begun[-1] if self.begun else None
        if newest is None or after is After.CONTINUE or newest.step == self.boundary:
            return newest
        return None

    def _forgettable(self) -> str:
        """Return the oldest name that is ended or only joined: a storm of wishes must not drown the first one's."""
        old = (name for name, operation in self._operations.items() if operation.ended or operation.id != name)
        return next(old, next(iter(self._operations)))

    def _abort(self, operation: Operation, why: str) -> None:
        not_begun = operation.phase in {Phase.WAITING_STEP, Phase.AGREEING}
        operation.phase = Phase.ABORTED if not_begun else Phase.FAILED
        operation.error = why
        self.results[operation.phase] += 1
        if operation is self.waiting:
            self.waiting = None
        else:
            self.begun.remove(operation)

    def _abort_all(self, why: str) -> None:
        for operation in (*self.begun, *filter(None, [self.waiting])):
            self._abort(operation, why)

    def _note_uploads(self, lease_s: float | None, asker: str) -> None:
        if self.uploads is not None:
            self._uploads_lease = Lease(UPLOADS_HELD_S if lease_s is None else lease_s, asker, self.clock())

    def _stop_uploads(self, *, now: bool) -> None:
        """Stop them without the lock: it may take a moment until the process that uploads has gone."""
        if now and self.uploads is not None:
            self.uploads.hold()
            with self.changed:
                # Without a lease (it ended meanwhile, or with its checkpoint) nothing later lets them go.
                if self._uploads_lease is None:
                    self.uploads.release()

    def _release_uploads(self) -> None:
        if self._uploads_lease is not None and self.uploads is not None:
            self._uploads_lease = None
            self.uploads.release()
