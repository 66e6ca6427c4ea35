"""The thread that writes: states that were taken at step boundaries become durable here, while training continues.

An emergency is written here too: training stands still only on request, and can go on in the middle of a
write. When a newer state comes while an older one is being written, the deadline, and who asked, decide which bytes
go first.

When checkpoints are copied to slower storage: now and then, and never while an emergency needs the disk.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from powerguard.trainer.log import log
from powerguard.trainer.loop.checkpointer import (
    CLOSED,
    Checkpointer,
    Order,
    OtherRanks,
    SingleProcess,
    Taken,
    WriteAbandoned,
    attempted,
)
from powerguard.trainer.loop.requests import Operation, RequestQueue, UploadsSeen
from powerguard.trainer.ranks.base import Flag, boottime_s
from powerguard.trainer.store.disk import is_there
from powerguard.trainer.store.store import SavedCheckpoint, StoreError
from powerguard.trainer.tiers.base import period_of
from powerguard.trainer.tiers.upload import Uploader
from powerguard.wire import Phase


class UploadSchedule:
    """Offers the uploader one checkpoint in every_s seconds, and each that was asked for; see `requests.Uploads`."""

    def __init__(self, uploader: Uploader, *, every_s: float, clock: Callable[[], float] = boottime_s) -> None:
        self._uploader = uploader
        self._every_s = every_s
        self._clock = clock
        self._period: int | None = None
        self._late_s = 0.0
        """When one is due though the period is the same: after a clock that was ahead, commits are 1 ms apart."""

    def offer(self, saved: SavedCheckpoint, *, requested: bool) -> None:
        """Copy this one next, if it is time for one. What was offered and is not begun is forgotten."""
        period, now_s = period_of(saved, self._every_s), self._clock()
        if period is not None and (requested or period != self._period or now_s >= self._late_s):
            self._period, self._late_s = period, now_s + 2 * self._every_s
            self._uploader.offer(saved)

    def hold(self) -> None:
        """Stop at once."""
        self._uploader.hold()

    def release(self) -> None:
        """Go on."""
        self._uploader.release()

    def finish(self, saved: SavedCheckpoint, limit_s: float) -> None:
        """Copy the newest one, training having ended; wait for limit_s at most."""
        if period_of(saved, self._every_s) is None:
            return
        if limit_s > 0:
            log.info(
                "step %d is copied to slower storage, for %g s at most; a signal ends the wait", saved.step, limit_s
            )
            has_brought = self._uploader.finish(saved, limit_s)
        else:
            has_brought = self._uploader.has_brought(saved)
        if not has_brought:
            status = self._uploader.status()
            held = "uploads are held, as in an outage" if status.state == "held" else ""
            because = status.error or held or f"not copied within {limit_s:g} s"
            log.warning("copy_unfinished step=%d path=%s reason=%s", saved.step, saved.path, because)

    def close(self) -> None:
        """Stop for good."""
        self._uploader.close()

    def seen(self) -> UploadsSeen:
        """Return how they go, for people."""
        status = self._uploader.status()
        return UploadsSeen(status.committed_step, status.error, self._since_s(status.error_since_s))

    def _since_s(self, at_s: float | None) -> float | None:
        return None if at_s is None else max(0.0, self._clock() - at_s)

    def figures(self) -> Mapping[str, tuple[str, str, float]]:
        """Return metrics: name -> (type, help, value)."""
        status = self._uploader.status()
        found: dict[str, tuple[str, str, float]] = {
            "commits_total": ("counter", "Checkpoints that became whole in the slower tier.", status.commits),
            "sent_bytes_total": ("counter", "Bytes that were sent there.", status.bytes_sent),
            "retries_total": ("counter", "Requests that had to be repeated.", sum(status.retries.values())),
            "failures_total": ("counter", "Uploads that failed and are tried again.", sum(status.failures.values())),
            "active": ("gauge", "An upload is running (1) or not (0).", int(status.state == "uploading")),
        }
        if status.committed_step is not None:
            found["durable_step"] = ("gauge", "Step of the newest checkpoint there.", status.committed_step)
        if (age_s := self._since_s(status.committed_at_s)) is not None:
            found["durable_age_seconds"] = ("gauge", "Age of the newest checkpoint there.", age_s)
        failing_s = self._since_s(status.error_since_s) or 0.0
        found["failing_seconds"] = (
            "gauge",
            "For how long uploads have met errors; 0: the last one did not.",
            failing_s,
        )
        return found


PERIODIC = "periodic"
FINAL = "final"
_NEWER = "a newer state went first"
_LOOK_S = 0.5  # how soon the thread sees what no thread wakes it for: a deadline that comes near
_IDLE_S = 60.0  # between two little pieces of work that can wait
_NEARLY = 0.1  # of a checkpoint: what is left of one that is nearly done
_MARGIN = 1.25  # of the time that a write is expected to take: it must be over before the deadline
_PATIENT_S = 5.0  # with the end of training, before the log says what that waits for
_COMMIT_S = 0.5  # manifest, rename and syncs
_STUCK_S = 60.0  # how long training waits for a write that makes no progress
_OTHERS_S = 600.0  # and for the commit behind it: other ranks may still write

_Value = TypeVar("_Value")


@dataclass(slots=True, eq=False)
class Write:
    """One taken state on its way to the disk. operation: who asked for it; None: the schedule did.

    others: what the other ranks have to do with it. reason: why, for people.
    cancel: set when it is not wanted any more.
    began_s: None until its first byte. outcome: None until it has ended.
    counts: its step is one that training has come to; False once training counts from a lower step again.
    """

    taken: Taken
    operation: Operation | None
    others: OtherRanks
    reason: str
    cancel: threading.Event = field(default_factory=Flag)
    began_s: float | None = None
    bytes_done: int = 0
    phase: Phase = Phase.WRITING
    counts: bool = True
    outcome: SavedCheckpoint | Exception | None = None

    @property
    def given_up(self) -> bool:
        """Not wanted any more."""
        return self.cancel.is_set()

    @property
    def needs_snapshot(self) -> bool:
        """It is read, or will be. One that is given up in its middle still reads until it has ended."""
        return self.began_s is not None or not self.given_up


class Writer:
    """Writes what it is given, one after the other, and knows which snapshot may be taken again.

    Every attribute is touched under the lock of the requests.
    """

    def __init__(self, requests: RequestQueue, checkpointer: Checkpointer) -> None:
        self._requests = requests
        self._checkpointer = checkpointer
        self._queue: list[Write] = []
        """Oldest first: the one that is being written, if one is, and at most two that have not begun."""
        self._fresh: Taken | None = None
        self._prepare_bytes: int | None = None
        self._idle_at_s = requests.clock() + _IDLE_S
        self._over = False
        self._thread: threading.Thread | None = None

    # --- The training thread, with the lock held ---------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """A state is being written or waits for it."""
        return bool(self._queue)

    def prepare(self, size_bytes: int) -> None:
        """Have room made for checkpoints of this size, in idle time."""
        self._prepare_bytes = size_bytes
        self.start()
        self._requests.changed.notify_all()

    def slot(self, operation: Operation | None = None) -> int:
        """Return the snapshot that may be overwritten, for a state that was asked for: never one that is being written.

        The newest state that is not written yet stays in memory if it can, until the next one is whole. Where there is
        one snapshot, and it is being written, this waits. Raises WriteAbandoned; StoreError if the disk does not go on.
        """
        if self._checkpointer.snapshots == 1:
            self._await(operation)
        free = self._free()
        if not free:
            last = next(write for write in reversed(self._queue) if write.began_s is None)
            self._give_up(last, self._requests.begun[-1] if self._requests.begun else None)
            return last.taken.slot
        slot = next((each for each in free if self._fresh is None or self._fresh.slot != each), free[0])
        if self._fresh is not None and self._fresh.slot == slot:
            self._fresh = None
        return slot

    def _await(self, operation: Operation | None) -> None:
        """Wait until no snapshot is being written: it gives way to an operation's state, or goes first.

        Raises WriteAbandoned; StoreError if the disk does not go on.
        """
        requests = self._requests
        seen, until_s = -1, 0.0
        while older := next((write for write in self._queue if write.needs_snapshot), None):
            if operation is not None:
                if operation.ended:
                    msg = "called off before its state was taken"
                    raise WriteAbandoned(msg)
                self._make_way(older, operation, older.taken.size_bytes)
            if older.bytes_done != seen:
                seen, until_s = older.bytes_done, requests.clock() + _STUCK_S
            elif requests.clock() >= until_s:
                msg = (
                    f"a state in memory is still being written: the disk has taken nothing of step {older.taken.step} "
                    f"for {_STUCK_S:g} s"
                )
                raise StoreError(msg)
            if older.needs_snapshot:
                requests.changed.wait(_LOOK_S)

    @property
    def is_full(self) -> bool:
        """Each snapshot holds a state that is being written, or waits for it."""
        return not self._free()

    def _free(self) -> list[int]:
        taken = {write.taken.slot for write in self._queue if write.needs_snapshot}
        return [slot for slot in range(self._checkpointer.snapshots) if slot not in taken]

    def clear(self) -> None:
        """Wait until all is written, and forget what is in memory: training is rolled back, and reads into it.

        What is durable counts no more: training comes to that step again, with another state. Raises StoreError if the
        disk, or a rank that has not written its part, does not go on.
        """
        self._await(None)
        if not self._requests.changed.wait_for(lambda: not self.busy, _OTHERS_S):
            msg = f"a checkpoint was written and is not committed after {_OTHERS_S:g} s (does its disk or a rank hang?)"
            raise StoreError(msg)
        self.overrule()

    def overrule(self) -> None:
        """Forget what is durable, in memory or being written: training comes to these steps with other states."""
        for write in self._queue:
            write.counts = False
        self._fresh = self._requests.snapshot_step = self._requests.last = None

    def keep(self, taken: Taken) -> None:
        """Hold a state in memory, to be written when an emergency finds no newer one."""
        self._fresh = taken
        self._requests.snapshot_step = taken.step
        self.start()
        self._requests.changed.notify_all()

    def has(self, step: int) -> bool:
        """The state after this step is durable, being written, or held in memory."""
        return self.saves(step) or (self._fresh is not None and self._fresh.step == step)

    def saves(self, step: int) -> bool:
        """The state after this step is durable, or being written."""
        last = self._requests.last
        return (last is not None and last.step == step) or self._writing(step) is not None

    def taken(self, step: int) -> Taken | None:
        """Return the copy of the state after this step, if it is in memory."""
        write = self._writing(step)
        fresh = self._fresh if self._fresh is not None and self._fresh.step == step else None
        return fresh if write is None else write.taken

    def finishes(self, step: int) -> bool:
        """The state after this step is being written because training itself has it saved."""
        write = self._writing(step)
        return write is not None and write.reason == FINAL

    def join(self, operation: Operation) -> bool:
        """Let an operation have a state that we have already. False: the state has to be taken."""
        requests, step = self._requests, operation.step
        if requests.last is not None and requests.last.step == step:
            requests.settle(operation, requests.last)  # asked again for the same state: there is nothing new to write
            return True
        if step is not None and (write := self._writing(step)) is not None:
            self.attach(write, operation)
            return True
        if self._fresh is not None and self._fresh.step == step:
            self.submit(self._fresh, operation)
            return True
        return False

    def attach(self, write: Write, operation: Operation) -> None:
        """Let an operation have a state that is being written already."""
        if write.operation is not None and write.operation is not operation:
            self._requests.supersede(write.operation, operation)
        write.operation = operation
        self._requests.progress(operation, write.phase, write.bytes_done, write.taken.size_bytes)

    def submit(
        self, taken: Taken, operation: Operation | None, others: OtherRanks | None = None, reason: str = ""
    ) -> Write:
        """Have a state written: next, or instead of what is being written now. reason: "": the operation's."""
        reason = reason or (PERIODIC if operation is None else operation.reason.value)
        write = Write(taken, operation, others or SingleProcess(), reason)
        if self._over:  # the writer has ended, and a waiting thread would never be woken
            write.outcome = WriteAbandoned(CLOSED)
            write.others.failed(write.outcome)
            return write
        for older in self._queue:
            if operation is not None:
                self._make_way(older, operation, taken.size_bytes)
        self._queue.append(write)
        self._fresh = None
        self._requests.wanted.set()
        self._requests.snapshot_step = taken.step
        self._requests.pace.size_bytes = taken.size_bytes
        if operation is not None:
            self._requests.progress(operation, Phase.WRITING, 0, taken.size_bytes)
        self.start()
        self._requests.changed.notify_all()
        return write

    def call_off(self, number: int) -> None:
        """Write no more for a generation that has ended. The newest copy stays in memory, as after a failed write.

        A write that was given up before is left out: its snapshot may be that of a newer state by now.
        """
        for write in self._queue:
            if write.others.number == number and not write.given_up:
                write.cancel.set()
                if write is self._queue[-1] and self._fresh is None and write.counts:
                    self._fresh = write.taken

    def _writing(self, step: int) -> Write | None:
        mine = (write for write in self._queue if write.taken.step == step and write.counts)
        return next((write for write in mine if not write.given_up), None)

    def _give_up(self, write: Write, newer: Operation | None) -> None:
        """Write this state no more, and hand those who asked for it to a newer one's operation."""
        write.cancel.set()
        operation, write.operation = write.operation, None
        if operation is not None and operation in self._requests.begun:
            if newer is not None and newer is not operation:
                self._requests.supersede(operation, newer)
            else:
                self._requests.settle(operation, WriteAbandoned(_NEWER))

    def _make_way(self, older: Write, operation: Operation, size_bytes: int) -> None:
        """Give an older state up for the operation's, which has so many bytes, unless the older one is to go first."""
        if not older.given_up and not self._goes_first(older, operation, size_bytes):
            self._give_up(older, operation)

    def _goes_first(self, older: Write, operation: Operation, size_bytes: int) -> bool:
        """Whether the older state's last bytes go before the newer one's first.

        Both in time: an older one that was asked for is durable sooner, should the battery lie; one of the schedule
        gives way, unless it is nearly done, because an emergency is waited for. Only the newer one in time: it alone.
        The newer one not in time anyway: the older one, if that is nearer. No deadline: the older one; if training
        would stand for it, because there is one snapshot, only where it was asked for or is nearly done.
        """
        rest_bytes = older.taken.size_bytes - older.bytes_done
        is_near = older.operation is not None or rest_bytes <= _NEARLY * size_bytes
        if operation.deadline_at_s is None:
            return is_near or self._checkpointer.snapshots > 1
        need_s, rest_s = self._need_s(size_bytes), self._need_s(rest_bytes)
        if need_s is None or rest_s is None:
            return False
        left_s = operation.deadline_at_s - self._requests.clock()
        if need_s > left_s:
            return rest_s < need_s / 2
        return is_near and rest_s + need_s <= left_s

    def _need_s(self, size_bytes: int) -> float | None:
        write_s = self._requests.pace.write_s(size_bytes)
        return None if write_s is None else _MARGIN * write_s + _COMMIT_S

    # --- Its own thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, unless it has: nothing that is asked for before the first write must wait for one."""
        if self._thread is None and not self._over:
            self._thread = threading.Thread(target=self._run, name="powerguard-writer", daemon=True)
            self._thread.start()

    def close(self, *, finish: bool) -> None:
        """End the thread; finish: once everything is written, else as soon as it can."""
        with self._requests.changed:
            self._over = True
            self._requests.wanted.set()
            if not finish:
                for write in self._queue:
                    write.cancel.set()
            self._requests.changed.notify_all()
        if self._thread is not None:
            self._thread.join(_PATIENT_S)
            if finish and self._thread.is_alive():
                log.warning("what is being written becomes durable first; a signal (Ctrl-C) ends the wait")
                self._thread.join()

    def _run(self) -> None:
        requests = self._requests
        with requests.changed:
            while self._queue or not self._over:
                requests.wanted.clear()
                if requests.others is None:
                    requests.take_signal()
                    self._flush_if_pressed()
                if self._queue:
                    self._write(self._queue[0])
                    self._queue.pop(0)
                    requests.changed.notify_all()
                elif not self._work() and not requests.wanted.is_set():  # else it was while the lock was released
                    requests.changed.wait(self._look_s())

    def _write(self, write: Write) -> None:
        """Write one state, with the lock released meanwhile, and say how it went."""
        requests, taken = self._requests, write.taken
        write.began_s = requests.clock()
        order = Order(
            reason=write.reason,
            urgent=write.operation is not None or write.reason == FINAL,
            cancel=write.cancel,
            others=write.others,
        )
        outcome: SavedCheckpoint | Exception = self._apart(
            lambda: self._checkpointer.write(taken, lambda *progress: self._note_progress(write, *progress), order),
            f"checkpoint of step {taken.step}",
        )
        if write.given_up and isinstance(outcome, WriteAbandoned):
            outcome = WriteAbandoned("training has ended" if self._over else _NEWER)
        write.outcome = outcome
        self._prepare_bytes = max(taken.size_bytes, self._prepare_bytes or 0)  # a failed one may have cost a slot, too
        if isinstance(outcome, SavedCheckpoint):
            write_s = requests.clock() - write.began_s
            copy_s, how = self._checkpointer.copied(taken)
            requests.pace.saved(taken, write_s=write_s, copy_s=copy_s, how=how, snapshots=self._checkpointer.snapshots)
            if write.counts:
                requests.committed(outcome)
        elif not write.given_up:
            requests.pace.totals.failed += write.operation is None
            if self._fresh is None and len(self._queue) == 1 and write.counts:
                self._fresh = taken  # still whole, and in memory: an emergency may try again
        if write.operation is not None and write.operation in requests.begun:
            requests.settle(write.operation, outcome)
        if isinstance(outcome, SavedCheckpoint) and (uploads := requests.uploads) is not None:
            # Not by who asked here: of a request that joins the schedule's, one host alone may know.
            saved, is_asked = outcome, write.others.is_asked
            is_asked = write.operation is not None if is_asked is None else is_asked
            self._apart(
                lambda: uploads.offer(saved, requested=is_asked), f"offering step {taken.step} to slower storage"
            )

    def _note_progress(self, write: Write, phase: Phase, done: int | None, total: int | None) -> None:
        """Take in how far the checkpointer is."""
        with self._requests.changed:
            write.phase, write.bytes_done = phase, done or 0
            if write.operation is not None:
                self._requests.progress(write.operation, phase, done, total or write.taken.size_bytes)

    def _flush_if_pressed(self) -> None:
        """Write the newest state in memory for an operation whose step boundary does not come in time.

        Within a phase with a state, that state is what training stands on: no need to wait for anything.
        """
        requests, operation = self._requests, self._requests.waiting
        if operation is None or requests.serving:
            return
        if requests.phase_step is not None and self.has(requests.phase_step):
            requests.claim(requests.phase_step, Phase.WRITING)
            self.join(operation)
        elif operation.deadline_at_s is not None and self._fresh is not None and not self.busy:
            need_s = self._need_s(self._fresh.size_bytes)
            if need_s is not None and operation.deadline_at_s - requests.clock() <= need_s + 2 * _LOOK_S:
                self.flush()

    def flush(self) -> bool:
        """Write the newest state in memory for the operation that waits; False when a newer one is durable anyway."""
        requests, fresh, operation = self._requests, self._fresh, self._requests.waiting
        if operation is None or fresh is None or (requests.last is not None and fresh.step <= requests.last.step):
            return False
        requests.claim(fresh.step, Phase.WRITING)
        self.submit(fresh, operation)
        return True

    def _work(self) -> bool:
        """Do one piece of what can wait, with the lock released meanwhile. False: there is nothing to do."""
        requests = self._requests
        if self._over or self.busy or requests.waiting is not None or requests.begun or requests.held:
            return False
        if self._prepare_bytes is not None:
            size_bytes, self._prepare_bytes = self._prepare_bytes, None
            rate = self._apart(
                lambda: self._checkpointer.prepare(size_bytes, requests.wanted), "making room for checkpoints"
            )
            self._note_corrupt()
            if requests.wanted.is_set():
                self._prepare_bytes = size_bytes  # interrupted: again when there is time
            if isinstance(rate, float):
                requests.pace.probed(rate)
                requests.pace.limit = rate
            return True
        if requests.clock() >= self._idle_at_s:
            self._apart(lambda: self._checkpointer.idle(requests.wanted), "looking after old checkpoints")
            self._note_corrupt()
            self._idle_at_s = requests.clock() + _IDLE_S
            return True
        return False

    def _note_corrupt(self) -> None:
        """Count the checkpoints that were set aside. If the newest is one of them, its step is not durable any more."""
        requests, count = self._requests, self._checkpointer.corrupt()
        requests.pace.totals.corrupt += count
        last = requests.last
        if count and last is not None and last.path.startswith("/"):  # one that came from S3 lies elsewhere
            lies_there = self._apart(lambda: is_there(Path(last.path)), "looking for the newest checkpoint")
            if lies_there is False and requests.last is last:
                requests.last = None
                if (others := requests.others) is not None:
                    self._apart(
                        lambda: others.rotted(last.manifest_digest), "reporting a rotten checkpoint to the other ranks"
                    )

    def _apart(self, call: Callable[[], _Value], what: str) -> _Value | Exception:
        """Make a call with the lock released."""
        self._requests.changed.release()
        try:
            return attempted(call, what)
        finally:
            self._requests.changed.acquire()

    def _look_s(self) -> float:
        """Seconds until there may be something to do without a notification."""
        requests = self._requests
        if requests.waiting is not None or requests.signals or requests.lease is not None:
            return _LOOK_S
        return min(requests.lapse_uploads() or _IDLE_S, max(_LOOK_S, self._idle_at_s - requests.clock()))
