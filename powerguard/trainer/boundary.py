"""What the training thread does where a step ends and somebody wants something: save, stand still, end.

All that touches the model happens here, in the training thread. It may be interrupted anywhere (Ctrl-C, an exception
from a signal's handler) by training that goes on afterwards: then it stands at no boundary any more, what it was
saving has come to nothing, and the next boundary finds all wishes that are left. So no generator and no Condition is
entered here by `with`: between what they take and the block an interrupt has room.
"""

from collections.abc import Callable
from functools import partial

from powerguard.trainer.desk import Desk
from powerguard.trainer.keeper import CLOSED, GivenUp, Keeper, Taken, attempted
from powerguard.trainer.operation import Operation
from powerguard.trainer.ranks import Ranks
from powerguard.trainer.ranks.machine import Generation
from powerguard.trainer.store import SavedCheckpoint
from powerguard.trainer.together import Collective, StandIn, Together
from powerguard.trainer.writer import FINAL, Writer
from powerguard.wire import Phase

NEVER_S = float("inf")
_LAST_WORDS_S = 2.0
_LOOK_S = 0.5
_FIRST_SAVE_S = 30.0


class StopTraining(SystemExit):
    """Not an error: the checkpoint is durable, and whoever asked for it said "exit".

    Ends the process from within `Guard.step`, unless the loop has something better to do with it.
    """


class CutOffError(Exception):
    """An interrupt cut the taking of a state off: none of it is worth anything, and the interrupt goes on its way."""

    def __init__(self, cut: BaseException) -> None:
        super().__init__(f"training was interrupted while it saved ({type(cut).__name__})")


class Boundary:
    """One training thread's stops. every_s: seconds from one periodic checkpoint to the next.

    together: set where there are other ranks. closed: training has ended, and takes part in nothing any more.
    """

    def __init__(
        self, desk: Desk, writer: Writer, keeper: Keeper, *, ranks: Ranks, every_s: float, clock: Callable[[], float]
    ) -> None:
        self._desk = desk
        self._pace = desk.pace
        self._writer = writer
        self._keeper = keeper
        self._ranks = ranks
        self._every_s = every_s
        self._clock = clock
        self._measured = False
        self._stand_in: StandIn | None = None
        self._taking: Operation | None = None
        """Whose state is being taken; the writer does not know of it yet."""
        self._handed = 0
        """The last generation of all ranks of which the writer has this rank's part, or which is over for it."""
        self.together: Together | None = None
        self.closed = False

    # --- Where a step ends -------------------------------------------------------------------------------------------

    def attend(self, step: int) -> None:
        """Do what is asked, and what is due by the clock; stand still for as long as somebody wants it."""
        if self.closed:
            raise GivenUp(CLOSED)
        began_s = self._clock()
        self._here(step, partial(self._attend, step, began_s), whole=True)
        self._pace.rested(self._clock() - began_s)  # a pause is no step time

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
        with self._desk.lock:
            is_saved = self._writer.saves(step)
        if is_saved and self._measured and (self.together is None or not self._ranks.rank):
            self._pace.due_s = self._clock() + self._every_s

    def _here(self, step: int | None, attend: Callable[[], None], *, whole: bool = False) -> None:
        """Say that the training thread is with us, for as long as it is; one that ends for good (StopTraining) stays.

        whole: it stands at a step boundary, where its state can be taken.
        """
        desk = self._desk
        try:
            with desk.lock:
                desk.boundary, desk.serving = step, whole
            attend()
        except StopTraining:
            raise
        except BaseException as error:
            with desk.lock:
                desk.boundary, desk.serving, desk.asked = None, False, True
                self._cut_off(CutOffError(error))
                desk.changed.notify_all()
            if whole and self.together is not None:
                self.together.cut_off(CutOffError(error), beyond=self._handed)
            raise

    def _cut_off(self, cut: CutOffError) -> None:
        """End the wish whose state was being taken, unless it still waits for that. With the lock held."""
        desk, operation = self._desk, self._taking
        self._taking = None
        desk.saving = False
        if operation is not None and operation in desk.begun:
            if operation.ended or operation is desk.waiting:
                desk.begun.remove(operation)
            else:
                desk.settle(operation, cut)

    def _stop(self, step: int) -> None:
        desk = self._desk
        while True:
            with desk.lock:
                desk.take_signal()
                if desk.waiting is None:
                    if desk.ending is not None:
                        self._end(desk.ending)
                    elif not self._stands():
                        desk.boundary, desk.serving, desk.asked = None, False, False
                        desk.changed.notify_all()
                        return
            self._serve(step)

    def _stop_together(self, together: Together, step: int) -> None:
        """As `_stop`, where all ranks decide at which step they save and stand."""
        desk = self._desk
        while (known := together.agreement.wait(step)) is not None:
            if known.ended is None:
                self._take_part(known, step=step)
                continue
            with desk.lock:  # durable, and whoever asked for it said exit
                desk.ending = together.last_of(known)
                self._end(desk.ending)
        with desk.lock:
            desk.boundary, desk.serving, desk.asked = None, False, False
            if desk.signalled is not None:
                desk.wanted.set()  # the writer's thread passes it on: it is to leave what can wait
            desk.changed.notify_all()
            if desk.ending is not None:
                self._end(desk.ending)

    def _take_part(self, known: Generation, *, step: int, from_memory: bool = False) -> None:
        """Take this rank's state for a checkpoint of all ranks, and have it written."""
        desk, together = self._desk, self.together
        if together is None:
            return
        part = together.part(known)
        with desk.lock:
            operation = together.claim(known, step)
        outcome = None if known.already or from_memory else self._take(step)
        with desk.lock:
            if known.already:
                outcome = together.already(known, step)
            elif outcome is None:
                outcome = self._writer.taken(step) or GivenUp(f"the state of step {step} is not in memory any more")
            if isinstance(outcome, Taken):
                self._writer.submit(outcome, operation, part, known.reason)
                self._handed = known.number
                return
        # Saved here and now, or failed: the others are told without the lock.
        if isinstance(outcome, SavedCheckpoint):
            outcome = attempted(partial(part.conclude, outcome), f"checkpoint of step {step}")
        else:
            part.failed(outcome)
        with desk.lock:
            if isinstance(outcome, SavedCheckpoint):
                desk.committed(outcome)
            if operation is not None and operation in desk.begun:
                desk.settle(operation, outcome)
            self._handed = known.number

    def _serve(self, step: int) -> None:
        """Take the state for whoever waits, and have it written; a failure is told to him, and to nobody else."""
        desk = self._desk
        with desk.lock:
            self._taking = operation = desk.waiting
            if operation is None:
                return
            desk.claim(step, Phase.SNAPSHOT)
            if self._writer.join(operation):
                self._taking = None
                return
        outcome = self._take(step)
        with desk.lock:
            if isinstance(outcome, Taken):
                self._writer.submit(outcome, operation)
            else:
                if isinstance(outcome, SavedCheckpoint):
                    desk.pace.written(outcome.size_bytes, desk.clock() - (operation.began_s or desk.clock()))
                    desk.pace.size_bytes = outcome.size_bytes
                    desk.committed(outcome)
                if operation in desk.begun:
                    desk.settle(operation, outcome)
            self._taking = None

    def _take(self, step: int) -> Taken | SavedCheckpoint | Exception:
        """Copy the state; the time it takes is a stall, and counted as one."""
        desk, began_s = self._desk, self._clock()
        with desk.lock:
            slot = self._writer.slot()
            desk.saving = True
        try:
            return attempted(lambda: self._keeper.take(step, slot), f"checkpoint of step {step}")
        finally:
            with desk.lock:
                desk.saving = False
            desk.pace.stalled(self._clock() - began_s)

    def _stands(self) -> bool:
        """Stand still until something changes, if somebody wants it. False: training may go on."""
        desk = self._desk
        left_s = desk.lapse()
        if not desk.held:
            return False
        desk.changed.notify_all()
        if desk.waiting is None or not desk.serving:
            look_s = _LOOK_S if desk.signals else None
            desk.changed.wait(look_s if left_s is None else min(left_s, look_s or left_s))
        return True

    def _end(self, ending: Operation) -> None:
        """Leave, once whoever asked has read that the checkpoint is durable (or has had his time)."""
        desk = self._desk
        if not ending.must_end and self._ranks.local_rank == 0:
            desk.changed.wait_for(lambda: ending.told or desk.ending is None, timeout=_LAST_WORDS_S)
        if desk.ending is not None:  # else utility is back, and nobody has gone yet
            raise StopTraining(0 if ending.phase is Phase.COMMITTED else 1)

    def _periodic(self, step: int, now_s: float) -> None:
        """Save by the clock. While an older state is still being written, the next one waits for its turn."""
        desk = self._desk
        if not self._measured:
            self._measured = True
            self._measure()
            self._pace.due_s = now_s + (min(self._every_s, _FIRST_SAVE_S) if self._every_s < NEVER_S else NEVER_S)
            return
        if self.together is not None and self._ranks.rank:
            self._pace.due_s = NEVER_S  # rank 0's clock is everybody's
            return
        with desk.lock:
            is_busy = self._writer.busy
        if is_busy:
            desk.pace.totals.late += 1
            self._pace.due_s = now_s + min(1.0, self._every_s / 10)
            return
        self._pace.due_s = now_s + self._every_s
        if self.together is not None:
            self.together.due()
            return
        outcome = self._take(step)
        with desk.lock:
            if isinstance(outcome, Taken):
                self._writer.submit(outcome, None)
            elif isinstance(outcome, SavedCheckpoint):
                desk.committed(outcome)
            else:
                desk.pace.totals.failed += 1

    def save(self, step: int, others: Collective | None) -> SavedCheckpoint | Taken | Exception:
        """Save this state whatever is asked, and wait until it is durable; return how that ended.

        A wish that came meanwhile has this checkpoint, and training stands here for it, or ends (StopTraining). With
        several ranks, one that came when all were here is for this step, too, and has a checkpoint of its own.
        others: the other ranks, which all save at this step and wait for each other.
        """
        desk, waits = self._desk, others
        together = self.together if others is not None and self._stand_in is None else None
        try:
            if together is not None:
                together.agreement.stand_at(step)
            with desk.lock:
                desk.changed.wait_for(lambda: not self._writer.busy)
            outcome = self._take(step)
            with desk.lock:
                if isinstance(outcome, Taken):
                    write, waits = self._writer.submit(outcome, None, others, FINAL), None
                    desk.changed.wait_for(lambda: write.outcome is not None)
                    outcome = write.outcome or outcome
                elif isinstance(outcome, SavedCheckpoint):
                    desk.committed(outcome)
        except BaseException as error:
            with desk.lock:
                self._cut_off(CutOffError(error))
            if waits is not None:
                waits.failed(CutOffError(error))
            if together is not None:
                together.cut_off(CutOffError(error), beyond=self._handed)
            raise
        if waits is not None and isinstance(outcome, Exception):
            waits.failed(outcome)
        if together is not None:
            self._here(step, partial(self._stop_together, together, step), whole=True)
        elif self.together is None and isinstance(outcome, SavedCheckpoint):
            self._here(step, partial(self._stop, step), whole=True)  # nothing more to write: whoever waits has this one
        if isinstance(outcome, SavedCheckpoint):
            self._reset_clock(step)
        return outcome

    def _measure(self) -> None:
        """At the first boundary: learn what a checkpoint will write, and have room made for it beside training."""
        if isinstance(size_bytes := attempted(self._keeper.size_bytes, "measuring the state"), int):
            with self._desk.lock:
                self._pace.size_bytes = size_bytes
                self._writer.prepare(size_bytes)

    # --- Where no step ends ------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Stand still, or end, in the middle of things, where that is asked for."""
        if self._stand_in is not None:
            self._stand_by_together(self._stand_in)
        elif self._pace.asked:
            self._stand_by()

    def _stand_by(self) -> None:
        """As `attend`, where the state is not known to be whole."""
        began_s = self._clock()
        self._here(self._pace.step, self._stand)
        self._pace.rested(self._clock() - began_s)

    def _stand(self) -> None:
        desk = self._desk
        with desk.lock:
            while True:
                desk.take_signal()
                if desk.ending is not None:
                    self._end(desk.ending)
                if desk.held and desk.waiting and desk.phase_step is None and not self._writer.flush():
                    desk.fail_waiting("training stands in the middle of a step, and nothing newer is in memory")
                if not self._stands():
                    break
            desk.boundary = None
            desk.asked = desk.waiting is not None or desk.held
            desk.changed.notify_all()

    def _stand_by_together(self, stand_in: StandIn) -> None:
        """Stand still in a phase for as long as somebody stands in for this thread at its last boundary."""
        if self.together is None or not (self._desk.held or stand_in.leaving):
            return
        began_s = self._clock()
        self._here(self._pace.step, partial(self._stand_together, self.together, stand_in))
        self._pace.rested(self._clock() - began_s)

    def _stand_together(self, together: Together, stand_in: StandIn) -> None:
        desk = self._desk
        with desk.lock:
            while desk.held and stand_in.leaving is None:
                desk.changed.notify_all()
                desk.changed.wait(_LOOK_S)
            if stand_in.leaving is not None:
                desk.ending = together.last_of(stand_in.leaving)
                self._end(desk.ending)
            desk.boundary = None
            desk.changed.notify_all()

    def enter_phase(self, step: int) -> None:
        """Have the state of a phase in memory: it is whole, and the one after this step."""
        desk, outcome = self._desk, None
        with desk.lock:
            is_wanted = not self._writer.has(step) and not self._writer.is_full
        if is_wanted:
            outcome = self._take(step)
        with desk.lock:
            if isinstance(outcome, Taken):
                self._writer.keep(outcome)
            is_held = self._writer.has(step)
            desk.phase_step = step if is_held else None
            desk.changed.notify_all()
        if self.together is not None and is_held:
            self._stand_in = self.together.stand_in(step, partial(self._take_part, step=step, from_memory=True))

    def leave_phase(self) -> None:
        """Take the boundary over again from whoever stood in for this thread, once nobody wants it to stand."""
        while self._stand_in is not None and not self._stand_in.relieved(_LOOK_S):
            self._stand_by_together(self._stand_in)
        with self._desk.lock:
            self._stand_in = None
            self._desk.phase_step = None
