"""What the training thread does at the end of a step with a request: save, pause, end.

All that touches the model happens here, in the training thread. It may be interrupted anywhere (Ctrl-C, an exception
from a signal's handler) by training that goes on afterwards: then it stands at no boundary any more, what it was
saving has come to nothing, and the next boundary finds all wishes that are left. So no generator and no Condition is
entered here by `with`: between what they take and the block an interrupt has room.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from powerguard.trainer.log import log
from powerguard.trainer.loop.checkpointer import CLOSED, FORKED, Checkpointer, Taken, WriteAbandoned, attempted
from powerguard.trainer.loop.requests import Operation, RequestQueue
from powerguard.trainer.loop.writer import FINAL, PERIODIC, Writer
from powerguard.trainer.ranks import Ranks
from powerguard.trainer.ranks.agreement import Agreement
from powerguard.trainer.ranks.coordinator import Collective, RankCoordinator, StandIn
from powerguard.trainer.ranks.machine import Generation
from powerguard.trainer.store.store import SavedCheckpoint
from powerguard.wire import HOST_LEFT, Phase

NEVER_S = float("inf")
_LAST_WORDS_S = 2.0
_POWER_OFF_S = 20.0
"""How long the ranks of a host that leaves wait for its power-off."""
_HEARD_S = 0.5
"""Time for the daemon, which waits for such news, to read why training ends."""
_LOOK_S = 0.5
_FIRST_SAVE_S = 30.0


class StopTraining(SystemExit):
    """Not an error: the checkpoint is durable, and its request said "exit"; or another host has left the job.

    Then its code is 75 (wire.HOST_LEFT), and no collective may follow: its partner has gone.

    Ends the process from within `Guard.step`, unless the loop has something better to do with it.
    """


class CutOffError(Exception):
    """An interrupt cut the taking of a state off: none of it is worth anything, and the interrupt goes on its way."""

    def __init__(self, cut: BaseException) -> None:
        super().__init__(f"training was interrupted while it saved ({type(cut).__name__})")


class StepHook:
    """One training thread's stops. every_s: seconds from one periodic checkpoint to the next.

    together: set where there are other ranks. closed: training has ended, and takes part in nothing any more.
    forked: this is a child of fork, in which nothing is saved.
    """

    def __init__(
        self,
        requests: RequestQueue,
        writer: Writer,
        checkpointer: Checkpointer,
        *,
        ranks: Ranks,
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._pace = requests.pace
        self._writer = writer
        self._checkpointer = checkpointer
        self._ranks = ranks
        self._every_s = every_s
        self._clock = clock
        self._measured = self._has_counted_again = False
        self._stand_in: StandIn | None = None
        self._taking: Operation | None = None
        """Whose state is being taken; the writer does not know of it yet."""
        self._handed = 0
        """The last generation of all ranks of which the writer has this rank's part, or which is over for it."""
        self.together: RankCoordinator | None = None
        self.closed = False
        self.forked = False

    # --- Where a step ends -------------------------------------------------------------------------------------------

    def attend(self, step: int) -> None:
        """Do what is asked, and what is due by the clock; pause for as long as a caller holds training."""
        if self.forked:
            self._pace.due_s = NEVER_S
            log.warning("%s; its steps are not saved", FORKED)
            return
        if self.closed:
            raise WriteAbandoned(CLOSED)
        began_s = self._clock()
        self._here(step, partial(self._attend, step, began_s), whole=True)
        self._pace.rested(self._clock() - began_s)  # a pause is no step time

    def count_again(self, step: int) -> None:
        """Forget what was saved before training counts from a lower step again: its steps come with other states."""
        if self.closed:  # in a child of fork, too, where a lock may never be free
            return
        if not self._has_counted_again:
            self._has_counted_again = True
            log.warning(
                "step %d follows step %d without a restore(): a resume may begin in an earlier epoch (call guard.step"
                " and guard.save with the number of all steps done, not with that of an epoch)",
                step,
                self._pace.step,
            )
        if self.together is not None and not self._ranks.rank:
            attempted(self.together.agreement.go_back, "forgetting what all ranks have saved")
        with self._requests.lock:
            attempted(self._writer.clear, "forgetting what was saved")
            self._writer.overrule()  # also if the disk hangs in the midst of a write

    def refuse_forked(self) -> None:
        """Raise WriteAbandoned in a child of fork: the thread that writes is the parent's."""
        if self.forked:
            raise WriteAbandoned(FORKED)

    def _attend(self, step: int, began_s: float) -> None:
        if self.together is None:
            self._stop(step)
        else:
            self._stop_together(self.together, step)
        self._reset_clock(step)
        if began_s >= self._pace.due_s and not self.closed:
            self._periodic(step, began_s)

    def _reset_clock(self, step: int) -> None:
        """Wait a whole interval again when this very state is durable, or being written: a pause is none of it."""
        with self._requests.lock:
            is_saved = self._writer.saves(step)
        if is_saved and self._measured and (self.together is None or not self._ranks.rank):
            self._pace.due_s = self._clock() + self._every_s

    def _here(self, step: int | None, attend: Callable[[], None], *, whole: bool = False) -> None:
        """Say that the training thread is with us, for as long as it is; one that ends for good (StopTraining) stays.

        whole: it stands at a step boundary, where its state can be taken.
        """
        requests = self._requests
        try:
            with requests.lock:
                requests.boundary, requests.serving = step, whole
            attend()
        except StopTraining:
            raise
        except BaseException as error:
            with requests.lock:
                requests.boundary, requests.serving, requests.asked = None, False, True
                self._cut_off(CutOffError(error))
                requests.changed.notify_all()
            if whole and self.together is not None:
                self.together.cut_off(CutOffError(error), beyond=self._handed)
            raise

    def _cut_off(self, cut: CutOffError) -> None:
        """End the wish whose state was being taken, unless it still waits for that. With the lock held."""
        requests, operation = self._requests, self._taking
        self._taking = None
        requests.saving = False
        if operation is not None and operation in requests.begun:
            if operation.ended or operation is requests.waiting:
                requests.begun.remove(operation)
            else:
                requests.settle(operation, cut)

    def _stop(self, step: int) -> None:
        requests = self._requests
        while True:
            with requests.lock:
                requests.take_signal()
                if requests.waiting is None:
                    if requests.ending is not None:
                        self._end(requests.ending)
                    elif not self._stands():
                        requests.boundary, requests.serving, requests.asked = None, False, False
                        requests.changed.notify_all()
                        return
            self._serve(step)

    def _stop_together(self, together: RankCoordinator, step: int) -> None:
        """As `_stop`, where all ranks decide at which step they save and stand."""
        requests = self._requests
        while (known := together.agreement.wait(step)) is not None:
            if known.ended is None:
                self._take_part(known, step=step)
                continue
            self._leave(together, known)
        with requests.lock:
            requests.boundary, requests.serving, requests.asked = None, False, False
            requests.changed.notify_all()  # a signal, too, is passed on
            if requests.ending is not None:
                self._end(requests.ending)

    def _leave(self, together: RankCoordinator, known: Generation) -> None:
        """End with all other ranks: the checkpoint is durable and an asker said exit, or a host has left the job."""
        requests = self._requests
        with requests.lock:
            if together.agreement.departed:
                together.ends()
                requests.departed = together.agreement.departed
                requests.changed.notify_all()
                if self._ranks.local_rank == 0 and requests.listened_at_s is not None:
                    requests.changed.wait_for(lambda: requests.departure_sent, timeout=_HEARD_S)
                if together.agreement.state.departing == self._ranks.host:
                    self._await_power_off()
                raise StopTraining(HOST_LEFT)
            requests.ending = together.last_of(known)
            self._end(requests.ending)

    def _await_power_off(self) -> None:
        """Stand until the power-off of this host ends the process. With the lock held.

        A launcher would start a rank that ends here again, and the others would meet it, and lose it once more.
        """
        requests, until_s = self._requests, self._clock() + _POWER_OFF_S
        while self._clock() < until_s and not requests.signals_heard:
            requests.changed.wait(_LOOK_S)

    def _take_part(self, known: Generation, *, step: int, from_memory: bool = False) -> None:
        """Take this rank's state for a checkpoint of all ranks, and have it written."""
        requests, together = self._requests, self.together
        if together is None:
            return
        part = together.part(known)
        with requests.lock:
            operation = together.claim(known, step)
        known = together.agreement.settled(known)
        is_late = known.reason == PERIODIC
        outcome = None if known.already or from_memory else self._take(step, operation, late=is_late)
        if outcome is None and not known.already:
            outcome = self._await_save(step, together.agreement, known.number)
        with requests.lock:
            if known.already:
                outcome = together.already(known, step)
            elif outcome is None:
                outcome = self._of_phase(step)
            if isinstance(outcome, Taken):
                self._writer.submit(outcome, operation, part, known.reason)
                self._handed = known.number
                return
        # Saved here and now, or failed: the others are informed without the lock.
        if isinstance(outcome, SavedCheckpoint):
            outcome = attempted(partial(part.conclude, outcome), f"checkpoint of step {step}")
        else:
            part.failed(outcome)
        with requests.lock:
            if isinstance(outcome, SavedCheckpoint):
                requests.committed(outcome)
            if operation is not None and operation in requests.begun:
                requests.settle(operation, outcome)
            self._handed = known.number

    def _await_save(self, step: int, agreement: Agreement, number: int) -> WriteAbandoned | None:
        """Wait for what `save` writes of this step; return why this rank gives way to it, if it does.

        So that no rank takes the copy of its phase where another one has the checkpoint. A rank that still copies for
        the same `save` may have handed in the copy of its phase: then each would wait for the other without end.
        """
        requests, writer = self._requests, self._writer
        while True:
            with requests.lock:
                if writer.finishes(step):
                    requests.changed.wait(_LOOK_S)
                if not writer.finishes(step):
                    return None
            if agreement.is_handed_in(number, "shard"):
                return WriteAbandoned(f"step {step} is being saved by training itself: ask again")

    def _of_phase(self, step: int) -> SavedCheckpoint | Taken | Exception:
        """Return the state of a phase: its checkpoint, where `save` has made one, else its copy. With the lock held."""
        requests, writer = self._requests, self._writer
        if requests.last is not None and requests.last.step == step:
            return requests.last
        return writer.taken(step) or WriteAbandoned(f"the state of step {step} is not in memory any more")

    def _serve(self, step: int) -> None:
        """Copy the state for a waiting request, and have it written; a failure goes into its answer only."""
        requests = self._requests
        with requests.lock:
            self._taking = operation = requests.waiting
            if operation is None:
                return
            requests.claim(step, Phase.SNAPSHOT)
            if self._writer.join(operation):
                self._taking = None
                return
        outcome = self._take(step, operation)
        with requests.lock:
            if isinstance(outcome, Taken):
                self._writer.submit(outcome, operation)
            else:
                if isinstance(outcome, SavedCheckpoint):
                    requests.pace.written(
                        outcome.size_bytes, requests.clock() - (operation.began_s or requests.clock())
                    )
                    requests.pace.size_bytes = outcome.size_bytes
                    requests.committed(outcome)
                if operation in requests.begun:
                    requests.settle(operation, outcome)
            self._taking = None

    def _take(
        self, step: int, operation: Operation | None = None, *, late: bool = False
    ) -> Taken | SavedCheckpoint | Exception:
        """Copy the state; the time it takes is a stall, and counted as one. late: see `Checkpointer.take`."""
        requests, began_s, what = self._requests, self._clock(), f"checkpoint of step {step}"
        try:
            with requests.lock:
                requests.saving = True
                slot = attempted(lambda: self._writer.slot(operation), what)
            if isinstance(slot, Exception):
                return slot
            taken = attempted(lambda: self._checkpointer.take(step, slot, late=late), what)
        finally:
            with requests.lock:
                requests.saving = False
            stall_s = self._clock() - began_s
            requests.pace.stalled(stall_s)
        return replace(taken, stall_s=stall_s) if isinstance(taken, Taken) else taken

    def _stands(self) -> bool:
        """Stand still until something changes, if a caller holds training. False: training may continue."""
        requests = self._requests
        left_s = requests.lapse()
        if not requests.held:
            return False
        requests.changed.notify_all()
        if requests.waiting is None or not requests.serving:
            look_s = _LOOK_S if requests.signals else None
            requests.changed.wait(look_s if left_s is None else min(left_s, look_s or left_s))
        return True

    def _end(self, ending: Operation) -> None:
        """Leave, once the caller has read that the checkpoint is durable (or its time is over)."""
        requests = self._requests
        if not ending.must_end and self._ranks.local_rank == 0:
            requests.changed.wait_for(lambda: ending.end_sent or requests.ending is None, timeout=_LAST_WORDS_S)
        if requests.ending is not None:  # else utility is back, and no rank has gone yet
            raise StopTraining(0 if ending.phase is Phase.COMMITTED else 1)

    def _periodic(self, step: int, now_s: float) -> None:
        """Save by the clock. While an older state is still being written, the next one waits for its turn."""
        requests = self._requests
        if not self._measured:
            self._measured = True
            self._measure()
            self._pace.due_s = now_s + (min(self._every_s, _FIRST_SAVE_S) if self._every_s < NEVER_S else NEVER_S)
            return
        if self.together is not None and self._ranks.rank:
            self._pace.due_s = NEVER_S  # rank 0's clock is everybody's
            return
        with requests.lock:
            is_busy = self._writer.busy
        if is_busy:
            requests.pace.totals.late += 1
            self._pace.due_s = now_s + min(1.0, self._every_s / 10)
            return
        self._pace.due_s = now_s + self._every_s
        if self.together is not None:
            self.together.due()
            return
        outcome = self._take(step, late=True)
        with requests.lock:
            if isinstance(outcome, Taken):
                self._writer.submit(outcome, None)
            elif isinstance(outcome, SavedCheckpoint):
                requests.committed(outcome)
            else:
                requests.pace.totals.failed += 1

    def save(
        self, step: int, others: Collective | None, keep_as: Callable[[SavedCheckpoint], None] | None = None
    ) -> SavedCheckpoint | Taken | Exception:
        """Save this state whatever is asked, and wait until it is durable; return how that ended.

        A wish that came meanwhile has this checkpoint, and training stands here for it, or ends (StopTraining). With
        several ranks, one that came when all were here is for this step, too, and has a checkpoint of its own.
        others: the other ranks, which all save at this step and wait for each other. keep_as: called before training
        stands or ends here, because power may go meanwhile.
        """
        requests, waits, kept = self._requests, others, None
        together = self.together if others is not None and self._stand_in is None else None
        try:
            if together is not None:
                together.agreement.stand_at(step)
            with requests.lock:
                requests.changed.wait_for(lambda: not self._writer.busy)
            outcome = self._take(step)
            with requests.lock:
                if isinstance(outcome, Taken):
                    write, waits = self._writer.submit(outcome, None, others, FINAL), None
                    requests.changed.wait_for(lambda: write.outcome is not None)
                    outcome = write.outcome or outcome
                elif isinstance(outcome, SavedCheckpoint):
                    requests.committed(outcome)
        except BaseException as error:
            with requests.lock:
                self._cut_off(CutOffError(error))
            if waits is not None:
                waits.failed(CutOffError(error))
            if together is not None:
                together.cut_off(CutOffError(error), beyond=self._handed)
            raise
        if waits is not None and isinstance(outcome, Exception):
            waits.failed(outcome)
        if keep_as is not None and isinstance(outcome, SavedCheckpoint):
            kept = attempted(partial(keep_as, outcome), f"keep_as at step {step}")
        if together is not None:
            self._here(step, partial(self._stop_together, together, step), whole=True)
        elif self.together is None and isinstance(outcome, SavedCheckpoint):
            self._here(step, partial(self._stop, step), whole=True)  # not written again: waiting requests get this one
        if isinstance(outcome, SavedCheckpoint):
            self._reset_clock(step)
        return outcome if kept is None else kept

    def _measure(self) -> None:
        """At the first boundary: learn what a checkpoint will write, and have room made for it meanwhile."""
        if isinstance(size_bytes := attempted(self._checkpointer.measure, "measuring the state"), int):
            with self._requests.lock:
                self._pace.size_bytes = size_bytes
                self._writer.prepare(size_bytes)

    # --- Where no step ends ------------------------------------------------------------------------------------------

    def poll(self, step: int | None = None) -> None:
        """Stand still, or end, in the middle of things, where that is asked for. step: as in `Guard.poll`.

        Of several ranks only in a phase with a state: else they stand and end at the next boundary that all agree on.
        """
        if self._stand_in is not None:
            self._stand_by_together(self._stand_in)
        elif not self._pace.asked or self.together is not None:
            return
        elif step is None:
            self._stand_by()
        else:
            self.attend(step)

    def _stand_by(self) -> None:
        """As `attend`, where the state is not known to be whole."""
        began_s = self._clock()
        self._here(self._pace.step, self._stand)
        self._pace.rested(self._clock() - began_s)

    def _stand(self) -> None:
        requests = self._requests
        with requests.lock:
            while True:
                requests.take_signal()
                if requests.ending is not None:
                    self._end(requests.ending)
                if requests.held and requests.waiting and requests.phase_step is None and not self._writer.flush():
                    requests.fail_waiting("training is in the middle of a step, and there is no newer state in memory")
                if not self._stands():
                    break
            requests.boundary = None
            requests.asked = requests.waiting is not None or requests.held
            requests.changed.notify_all()

    def _stand_by_together(self, stand_in: StandIn) -> None:
        """Stand still in a phase for as long as a stand-in for this thread waits at its last boundary."""
        if self.together is None or not (self._requests.held or stand_in.leaving):
            return
        began_s = self._clock()
        self._here(self._pace.step, partial(self._stand_together, self.together, stand_in))
        self._pace.rested(self._clock() - began_s)

    def _stand_together(self, together: RankCoordinator, stand_in: StandIn) -> None:
        requests = self._requests
        with requests.lock:
            while requests.held and stand_in.leaving is None:
                requests.changed.notify_all()
                requests.changed.wait(_LOOK_S)
            if stand_in.leaving is not None:
                self._leave(together, stand_in.leaving)
            requests.boundary = None
            requests.changed.notify_all()

    def enter_phase(self, step: int) -> None:
        """Have the state of a phase in memory: it is whole, and the one after this step."""
        requests, outcome = self._requests, None
        with requests.lock:
            is_wanted = not self._writer.has(step) and not self._writer.is_full
        if is_wanted:
            outcome = self._take(step)
        with requests.lock:
            if isinstance(outcome, Taken):
                self._writer.keep(outcome)
            is_held = self._writer.has(step)
            requests.phase_step = step if is_held else None
            requests.changed.notify_all()
        if self.together is not None and is_held:
            self._stand_in = self.together.stand_in(step, partial(self._take_part, step=step, from_memory=True))

    def leave_phase(self) -> None:
        """Take the boundary over again from the stand-in for this thread, once no caller holds training."""
        while self._stand_in is not None and not self._stand_in.relieved(_LOOK_S):
            self._stand_by_together(self._stand_in)
        with self._requests.lock:
            self._stand_in = None
            self._requests.phase_step = None
