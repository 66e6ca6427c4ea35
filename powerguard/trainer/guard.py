"""What a training loop holds on to: one call per step, and the place where it saves, pauses, goes on or ends.

Two kinds of thread meet here. The training thread calls `step` at every step boundary; everything that touches the
model happens in it, there and nowhere else. Server threads ask (`trigger`, `pause`, `resume` ...) and wait. They meet
under one lock, which the training thread does not touch while nobody asks: then a step costs two stores and a look.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Condition
from typing import NoReturn

from powerguard.trainer.operation import Operation
from powerguard.trainer.store import SavedCheckpoint
from powerguard.wire import (
    After,
    CheckpointStatus,
    Estimate,
    LastCommitted,
    Loop,
    Phase,
    TrainerStatus,
    TriggerRequest,
    clean_text,
    escalated,
)

Save = Callable[[int], SavedCheckpoint]
"""Makes the state after this step durable and only then returns. Called in the training thread; may raise anything."""

_log = logging.getLogger("powerguard.trainer")
_KEPT_OPERATIONS = 64
_STEPS = 256  # step times that are remembered; a power of two
_LAST_WORDS_S = 2.0


class StopTraining(SystemExit):
    """Not an error: the checkpoint is durable, and whoever asked for it said "exit".

    Ends the process from within `Guard.step`, unless the loop has something better to do with it.
    """


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Guard:
    """Connects one training loop with those who may ask it for checkpoints.

    save: see `Save`. conduct: the most that this training is willing to do after an emergency checkpoint.
    restored: what the training started from, so that its age and size are known from the first second.
    """

    def __init__(
        self,
        save: Save,
        *,
        job: str,
        conduct: After = After.PAUSE,
        restored: SavedCheckpoint | None = None,
        clock: Callable[[], float] = _boottime_s,
    ) -> None:
        self._save = save
        self._job = job
        self._conduct = conduct
        self._clock = clock
        self._changed = Condition()
        self._asked = False
        self._held = False
        self._ending: Operation | None = None
        self._closed = False
        self._paused_step: int | None = None
        self._current: Operation | None = None
        self._operations: dict[str, Operation] = {}
        self._last_committed = restored
        self._committed_at_s = clock()
        self._rates: deque[float] = deque(maxlen=20)
        self._results = {Phase.COMMITTED: 0, Phase.FAILED: 0, Phase.ABORTED: 0}
        self._step: int | None = None if restored is None else restored.step
        self._stepped_at_s = clock()
        self._step_times: list[float] = [0.0] * _STEPS
        self._steps_seen = 0
        self.loop = Loop.TRAIN
        """What the loop is busy with. Set it to EVAL, COMPILE or IDLE where no step boundary comes soon."""

    # --- The training thread -------------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        """Say that this step has ended and its state is whole. Saves and pauses here when that was asked.

        Raises StopTraining, a SystemExit, when the asker wants the process to end after its checkpoint.
        """
        now_s = self._clock()
        self._step_times[self._steps_seen & (_STEPS - 1)] = now_s - self._stepped_at_s
        self._steps_seen += 1
        self._stepped_at_s = now_s
        self._step = step
        if self._asked:
            self._attend(step)

    def report(self, phase: Phase, bytes_done: int | None = None, bytes_total: int | None = None) -> None:
        """Tell, from within `save`, how far it is. phase: SNAPSHOT, WRITING or COMMITTING."""
        with self._changed:
            operation = self._current
            if operation is None:
                return
            operation.bytes_done = bytes_done
            operation.bytes_total = bytes_total
            if operation.phase is not phase:
                operation.phase = phase
                self._changed.notify_all()

    def close(self) -> None:
        """Say that training has ended, and with it the checkpoint in flight, if there is one."""
        with self._changed:
            self._closed = True
            self._abort("training has ended")
            self._changed.notify_all()

    def _attend(self, step: int) -> None:
        with self._changed:
            while True:
                operation = self._current
                if operation is not None:
                    self._carry_out(operation, step)
                elif self._ending is not None:
                    self._end(self._ending)
                elif self._held:
                    self._paused_step = step
                    self._changed.notify_all()
                    self._changed.wait()
                else:
                    break
            self._paused_step = None
            self._asked = False
            self._changed.notify_all()
        self._stepped_at_s = self._clock()  # a pause is no step time

    def _end(self, ending: Operation) -> NoReturn:
        """Leave, once whoever asked has read that the checkpoint is durable (or has had his time)."""
        self._changed.wait_for(lambda: ending.told, timeout=_LAST_WORDS_S)
        raise StopTraining(0)

    def _carry_out(self, operation: Operation, step: int) -> None:
        """Save, with the lock released meanwhile, and decide what comes after."""
        operation.step = step
        operation.phase = Phase.SNAPSHOT
        operation.began_s = self._clock()
        if operation.after is not After.CONTINUE:
            self._paused_step = step
        self._changed.notify_all()
        known = self._last_committed
        if known is not None and known.step == step and self._paused_step == step:
            self._committed(operation, known)  # asked again while standing still: there is nothing new to write
        else:
            self._changed.release()
            try:
                saved: SavedCheckpoint | Exception = self._save(step)
            except Exception as error:  # noqa: BLE001 - a failing disk must not end the training; the asker is told
                _log.exception("checkpoint of step %d failed", step)
                saved = error
            finally:
                self._changed.acquire()
            if isinstance(saved, Exception):
                operation.phase = Phase.FAILED
                operation.error = clean_text(f"{type(saved).__name__}: {saved}")
            else:
                self._rates.append(saved.size_bytes / max(self._clock() - operation.began_s, 1e-6))
                self._committed(operation, saved)
        self._results[operation.phase] += 1
        if operation.after is After.EXIT and operation.phase is Phase.COMMITTED:
            self._ending = operation
        elif operation.after is not After.CONTINUE:
            self._held = True  # also after a failure: standing still, a second try would lose nothing
        self._current = None
        self._changed.notify_all()

    def _committed(self, operation: Operation, saved: SavedCheckpoint) -> None:
        operation.phase = Phase.COMMITTED
        operation.path = saved.path
        operation.manifest_digest = saved.manifest_digest
        operation.bytes_done = operation.bytes_total = saved.size_bytes
        if self._last_committed is not saved:
            self._last_committed = saved
            self._committed_at_s = self._clock()

    # --- Those who ask --------------------------------------------------------------------------------------------

    def trigger(self, request: TriggerRequest) -> CheckpointStatus:
        """Ask for a checkpoint at the next step boundary. The same id, or one in flight, is the same checkpoint."""
        with self._changed:
            now_s = self._clock()
            after = request.after if escalated(request.after, self._conduct) is self._conduct else self._conduct
            operation = self._operations.get(request.id) or self._current
            if operation is None:
                operation = Operation(id=request.id, after=after)
                self._current = operation
            operation.join(request, after, now_s)
            self._operations[request.id] = operation
            while len(self._operations) > _KEPT_OPERATIONS:
                del self._operations[next(iter(self._operations))]
            if operation.step is not None and not operation.ended and operation.after is not After.CONTINUE:
                self._paused_step = operation.step  # joined in mid-write: training stands there already
            if self._closed:
                self._abort("training has ended")
            self._asked = True
            self._changed.notify_all()
            return self._status_of(operation)

    def checkpoint(self, name: str, *, wait_s: float = 0.0, seen: str = "") -> CheckpointStatus | None:
        """Return how a checkpoint goes on, after wait_s or as soon as there is news. None: never heard of.

        seen: the phase that the asker knows of; another one is news at once. "": a change from now on is.
        """
        with self._changed:
            operation = self._operations.get(name)
            if operation is None:
                return None
            known = seen or operation.phase.value
            if not operation.ended and wait_s > 0:
                self._changed.wait_for(lambda: operation.phase != known, timeout=wait_s)
            return self._status_of(operation)

    def tell(self, name: str) -> None:
        """Note that an asker has been sent this checkpoint's end: a training that is to exit may go now."""
        with self._changed:
            operation = self._operations.get(name)
            if operation is not None and operation.ended:
                operation.told = True
                self._changed.notify_all()

    def cancel(self, name: str) -> CheckpointStatus | None:
        """Call a checkpoint off: one not begun is aborted; one begun is finished, and training goes on after it."""
        with self._changed:
            operation = self._operations.get(name)
            if operation is None:
                return None
            if operation is self._current:
                operation.after = After.CONTINUE
                self._paused_step = None
                if operation.phase is Phase.WAITING_STEP:
                    self._abort("called off before it began")
                self._changed.notify_all()
            return self._status_of(operation)

    def pause(self) -> TrainerStatus:
        """Stand still at the next step boundary, without a checkpoint, if this training is willing to."""
        with self._changed:
            if self._conduct is not After.CONTINUE:
                self._held = True
                self._asked = True
                self._changed.notify_all()
        return self.status()

    def resume(self, *, wait_s: float = 1.0) -> TrainerStatus:
        """Go on in place; a write that has begun is finished first. Waits up to wait_s to see it happen."""
        with self._changed:
            self._held = False
            if self._current is not None:
                self._current.after = After.CONTINUE
                self._paused_step = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._paused_step is None, timeout=wait_s)
        return self.status()

    def status(self) -> TrainerStatus:
        """Return what the daemon budgets from."""
        with self._changed:
            now_s = self._clock()
            times = sorted(self._step_times[1 : min(self._steps_seen, _STEPS)])  # the first one is start-up
            last = self._last_committed
            return TrainerStatus(
                job=self._job,
                step=self._step,
                step_time_p50_s=times[len(times) // 2] if times else None,
                step_time_p95_s=times[len(times) * 95 // 100] if times else None,
                last_step_age_s=now_s - self._stepped_at_s,
                loop=self.loop,
                paused=self._paused_step is not None,
                conduct=self._conduct,
                checkpoint="" if self._current is None else self._current.id,
                last_committed=None
                if last is None
                else LastCommitted(
                    step=last.step,
                    age_s=now_s - self._committed_at_s,
                    manifest_digest=last.manifest_digest,
                    path=last.path,
                ),
                estimate=self._estimate(times[len(times) * 95 // 100] if times else 0.0),
            )

    def results(self) -> dict[str, int]:
        """Return how many checkpoints ended how, since the start."""
        with self._changed:
            return {phase.value: count for phase, count in self._results.items()}

    def _estimate(self, step_s: float) -> Estimate | None:
        if self._last_committed is None:
            return None
        size = self._last_committed.size_bytes
        if not self._rates:
            return Estimate(bytes=size)
        slow = sorted(self._rates)[(len(self._rates) - 1) // 10]
        return Estimate(bytes=size, write_bw_p10=slow, seconds=step_s + size / max(0.8 * slow, 1.0))

    def _status_of(self, operation: Operation) -> CheckpointStatus:
        estimate = self._estimate(0.0)
        usual_s = None if estimate is None else estimate.seconds
        return operation.status(self._clock(), paused_step=self._paused_step, usual_s=usual_s)

    def _abort(self, why: str) -> None:
        """End the checkpoint in flight, if there is one: aborted before it began, else failed."""
        operation = self._current
        if operation is None:
            return
        operation.phase = Phase.ABORTED if operation.phase is Phase.WAITING_STEP else Phase.FAILED
        operation.error = why
        self._results[operation.phase] += 1
        self._current = None
