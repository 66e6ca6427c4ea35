"""What a training loop holds on to: one call per step, and the place where it saves, pauses, goes on or ends.

    guard = Guard(state, "/nvme/llm", job="llm")
    for step in range(guard.restore() + 1, last_step + 1):
        train(step)
        guard.step(step)

The training thread calls `step` at every step boundary; all that touches the model happens in it, there and nowhere
else. It takes no lock while nobody asks: a step then costs a look at the clock and three stores.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Self

from powerguard.trainer.desk import Desk
from powerguard.trainer.disk import Disk
from powerguard.trainer.endpoint import Endpoint
from powerguard.trainer.items import State
from powerguard.trainer.keeper import CLOSED, GivenUp, Save, Taken, attempted
from powerguard.trainer.opening import AUTO, Signals, endpoint_of, keeper_of, look_after
from powerguard.trainer.operation import Operation
from powerguard.trainer.options import check_options, one_of, whole
from powerguard.trainer.pace import STEPS
from powerguard.trainer.ranks import Ranks, detect
from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.ranks.machine import Generation
from powerguard.trainer.store import SavedCheckpoint
from powerguard.trainer.stored import Stored
from powerguard.trainer.tiers.base import Remote
from powerguard.trainer.tiers.upload import Uploader
from powerguard.trainer.together import StandIn, Together
from powerguard.trainer.uploads import Uploads
from powerguard.trainer.writer import FINAL, Writer
from powerguard.wire import After, Loop, Phase

_LAST_WORDS_S = 2.0
_LOOK_S = 0.5
_FIRST_SAVE_S = 30.0
_NEVER_S = float("inf")


class StopTraining(SystemExit):
    """Not an error: the checkpoint is durable, and whoever asked for it said "exit".

    Ends the process from within `Guard.step`, unless the loop has something better to do with it.
    """


class Guard:
    """Connects one training loop with those who may ask it for checkpoints, and saves by the clock meanwhile.

    state: what `items()` and `load()` make of the model (powerguard.trainer.items.State), or a function that saves by
    itself, given the step, and returns a SavedCheckpoint; such a function is called only when somebody asks.
    root: the folder for this job's checkpoints, on the fastest disk; None: `state` saves by itself.
    job: its name. conduct: the most that this training is willing to do after an emergency checkpoint.
    every_s: seconds from one periodic checkpoint to the next; None: only when asked. keep: how many stay, at least 2.
    socket: where to be asked; AUTO: `/run/powerguard-trainers/JOB.sock` where there is such a folder; None: nowhere.
    port: also on this port of 127.0.0.1 (0: any), for which `token_file` holds the bearer token.
    remote: a slower tier for every checkpoint in remote_every_s seconds: a mounted folder, or "s3://bucket/prefix".
    ranks: how this process reaches the other ranks of its job; None: found out (torch.distributed, torchrun, Slurm).
    signals: SIGTERM and SIGUSR1 ask for a checkpoint and the end. restored: what a saving function started from.

    With several ranks every rank has its Guard. All save at the same step or none does; the first rank of each host is
    the one that can be asked. Raises StoreError, EndpointError, RanksError or OSError: what, where, what is right.
    """

    def __init__(
        self,
        state: State | Save,
        root: Path | str | None = None,
        *,
        job: str,
        conduct: After | str = After.PAUSE,
        every_s: float | None = 300.0,
        remote: Remote | str | None = None,
        remote_every_s: float = 1800.0,
        keep: int = 2,
        socket: Path | str | None = AUTO,
        port: int | None = None,
        token_file: Path | str | None = None,
        ranks: Ranks | None = None,
        signals: bool = False,
        restored: SavedCheckpoint | None = None,
        disk: Disk | None = None,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        check_options(job=job, conduct=conduct, every_s=every_s, remote_every_s=remote_every_s, keep=keep)
        self._clock = clock
        self._ranks = ranks = detect(root) if ranks is None else ranks
        self._remote = None if remote is None else Remote.of(remote)
        self._keeper = keeper_of(state, root, job=job, keep=keep, disk=disk, ranks=ranks, remote=remote is not None)
        self._every_s = every_s if every_s is not None and self._keeper.beside else _NEVER_S
        self.desk = Desk(job=job, conduct=After(conduct), clock=clock, ranks=ranks.size, hosts=ranks.hosts)
        self._writer = Writer(self.desk, self._keeper)
        self._pace = self.desk.pace
        self._pace.beside = self._keeper.beside
        self._pace.processes = -(-ranks.size // ranks.hosts)
        self._pace.due_s = clock()
        self._measured = self._closed = False
        self._endpoint: Endpoint | None = None
        self._signals: Signals | None = None
        if restored is not None:
            self._begin_from(restored)
        self._uploads: Uploads | None = None
        self._together: Together | None = None
        self._stand_in: StandIn | None = None
        try:
            if ranks.size > 1:
                self._together = Together(self.desk, self._writer, ranks)
            if ranks.local_rank == 0:
                self._endpoint = endpoint_of(self.desk, socket, port, token_file)
                if self._remote is not None and isinstance(self._keeper, Stored) and self._keeper.leads:
                    self._uploads = Uploads(Uploader(self._remote, job=job), every_s=remote_every_s, clock=clock)
                    self.desk.uploads = self._uploads
        except BaseException:
            self.close(finish=False)
            raise
        self._agreement = None if self._together is None else self._together.agreement
        self._signals = Signals(self.desk) if signals else None
        if self._keeper.beside or signals or self._together is not None:
            self._writer.start()
        look_after(self)

    def restore(self) -> int:
        """Load the newest checkpoint that verifies to the last byte; return how many steps it has done, 0 for none.

        Before the first step, on every rank. From whichever tier has the newest; one that does not verify is set aside,
        and the same one from the next tier taken, or the one before. Raises StoreError when what lies there is another
        job's or cannot be read, and what `state.load` raises.
        """
        if isinstance(self._keeper, Stored):
            with closing(self._ranks.clone()) as ranks:
                restored = self._keeper.restore(ranks, self._remote)
            if restored is not None:
                self._begin_from(restored[0])
                self._pace.totals.corrupt += restored[1]
        if self._agreement is not None:
            self._agreement.step = self._pace.step or 0
        return self._pace.step or 0

    @property
    def port(self) -> int | None:
        """The TCP port that the endpoint listens on; None: none."""
        return None if self._endpoint is None else self._endpoint.port

    # --- The training loop -------------------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        """Say that this step has ended and its state is whole. Saves, pauses or ends here when that was asked.

        step: how many have been done. Raises StopTraining, a SystemExit, when asked to end; GivenUp once closed.
        """
        step = step if type(step) is int else whole(step)
        now_s = self._clock()
        pace = self._pace
        seen = pace.seen
        pace.times[seen & (STEPS - 1)] = now_s - pace.stepped_at_s
        pace.seen = seen + 1
        pace.stepped_at_s = now_s
        pace.step = step
        agreement = self._agreement
        if agreement is None:
            if pace.asked or now_s >= pace.due_s:
                self._attend(step)
            return
        agreement.step = step
        if step >= agreement.due or pace.asked or now_s >= pace.due_s:
            self._attend_together(step)

    def poll(self) -> None:
        """Call it where no step ends for long: training may then stand still, or end, in the middle of things.

        It never saves: only at a step boundary, or in a phase that was told its step, is the state known to be whole.
        """
        if self._stand_in is not None:
            self._stand_by_together(self._stand_in)
        elif self._pace.asked:
            self._stand_by()

    @contextmanager
    def phase(self, loop: Loop | str, *, step: int | None = None) -> Iterator[None]:
        """Say what the loop is busy with ("eval", "compile", "idle"): no step boundary comes soon.

        step: the state is whole, and is the one after this step. Then it is copied to memory as the phase begins, so
        that an emergency finds it; whatever happens to the model meanwhile (averaged weights swapped in, say) does not
        matter. Without it, the last durable checkpoint is what there is.
        """
        began_s, stepped_at_s, before = self._clock(), self._pace.stepped_at_s, self._pace.loop
        self._pace.loop = one_of(Loop, loop, "loop")
        if step is not None and self._keeper.beside:
            self._hold_state(step)
        try:
            yield
            self.poll()
        finally:
            while self._stand_in is not None and not self._stand_in.relieved(_LOOK_S):
                self._stand_by_together(self._stand_in)
            with self.desk.changed:
                self._stand_in = None
                self._pace.loop = before
                self.desk.phase_step = None
                self._pace.stepped_at_s = stepped_at_s + self._clock() - began_s  # none of it is step time

    def save(self, step: int) -> SavedCheckpoint:
        """Make the state after this step durable and only then return: at the end of training, or by one's own rule.

        Where there are several ranks, every one of them calls it for the same step. Raises what the state, the disk or
        the store raise, and NotCommittedError when another rank could not.
        """
        step = whole(step)
        began_s = self._clock()
        others = self._together.together() if self._together is not None and self._keeper.beside else None
        with self.desk.changed:
            self.desk.changed.wait_for(lambda: not self._writer.busy)
            outcome = self._take(step)
            if isinstance(outcome, Taken):
                write = self._writer.submit(outcome, None, others, FINAL)
                self.desk.changed.wait_for(lambda: write.outcome is not None)
                outcome = write.outcome or outcome
            elif isinstance(outcome, SavedCheckpoint):
                self.desk.committed(outcome)
            if isinstance(outcome, SavedCheckpoint) and self.desk.waiting is not None:
                self._serve(self.desk.waiting, step)  # nothing more to write: that is what was asked for
        self._pace.rested(self._clock() - began_s)
        if isinstance(outcome, SavedCheckpoint):
            return outcome
        raise outcome if isinstance(outcome, Exception) else GivenUp("training has ended")

    def report(self, phase: Phase, bytes_done: int | None = None, bytes_total: int | None = None) -> None:
        """Tell, from within a `save` of one's own, how far it is. phase: SNAPSHOT, WRITING or COMMITTING."""
        with self.desk.changed:
            if self.desk.saving and self.desk.begun:
                self.desk.progress(self.desk.begun[-1], phase, bytes_done, bytes_total)

    def close(self, *, finish: bool = True) -> None:
        """Say that training has ended. finish: what is being written becomes durable first; else it is given up."""
        if self._closed:
            return
        self._closed, self._pace.due_s = True, -_NEVER_S  # a step from now on is attended to, and refused
        if self._together is not None and not finish:
            self._together.close()  # nobody need wait for this rank any more
        self._writer.close(finish=finish)
        if self._together is not None:
            self._together.close()
        self.desk.close()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._uploads is not None:
            self._uploads.close()
        if self._signals is not None:
            self._signals.restore()
        self._keeper.close()
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finish=kind is None or issubclass(kind, StopTraining))

    # --- At a boundary -----------------------------------------------------------------------------------------------

    def _attend(self, step: int) -> None:
        """Do what is asked, and what is due by the clock; stand still for as long as somebody wants it."""
        desk = self.desk
        began_s = self._began()
        with desk.changed:
            desk.boundary, desk.serving = step, True
            while True:
                desk.take_signal()
                if desk.waiting is not None:
                    self._serve(desk.waiting, step)
                elif desk.ending is not None:
                    self._end(desk.ending)
                elif not self._stands():
                    break
            desk.boundary, desk.serving, desk.asked = None, False, False
            desk.changed.notify_all()
            if began_s >= self._pace.due_s and not self._closed:
                self._periodic(step, began_s)
        self._pace.rested(self._clock() - began_s)  # a pause is no step time

    def _attend_together(self, step: int) -> None:
        """As `_attend`, where all ranks decide at which step they save and stand."""
        desk, together = self.desk, self._together
        if together is None:
            return
        began_s = self._began()
        with desk.changed:
            desk.boundary, desk.serving = step, True
        while (known := together.agreement.wait(step)) is not None:
            if known.ended is None:
                self._take_part(known, step=step)
                continue
            with desk.changed:  # durable, and whoever asked for it said exit
                desk.ending = together.last_of(known)
                self._end(desk.ending)
        with desk.changed:
            desk.boundary, desk.serving, desk.asked = None, False, False
            if desk.signalled is not None:
                desk.wanted.set()  # the writer's thread passes it on: it is to leave what can wait
            desk.changed.notify_all()
            if desk.ending is not None:
                self._end(desk.ending)
            if began_s >= self._pace.due_s:
                self._periodic(step, began_s)
        self._pace.rested(self._clock() - began_s)

    def _began(self) -> float:
        if self._closed:
            raise GivenUp(CLOSED)
        return self._clock()

    def _take_part(self, known: Generation, *, step: int, from_memory: bool = False) -> None:
        """Take this rank's state for a checkpoint of all ranks, and have it written."""
        desk, together = self.desk, self._together
        if together is None:
            return
        part = together.part(known)
        with desk.changed:
            operation = together.claim(known, step)
            if known.already:
                outcome: Taken | SavedCheckpoint | Exception = together.already(known, step)
            elif from_memory:
                outcome = self._writer.taken(step) or GivenUp(f"the state of step {step} is not in memory any more")
            else:
                outcome = self._take(step)
            if isinstance(outcome, Taken):
                self._writer.submit(outcome, operation, part, known.reason)
                return
        # Saved here and now, or failed: the others are told without the lock.
        if isinstance(outcome, SavedCheckpoint):
            outcome = attempted(partial(part.conclude, outcome), f"checkpoint of step {step}")
        else:
            part.failed(outcome)
        with desk.changed:
            if isinstance(outcome, SavedCheckpoint):
                desk.committed(outcome)
            if operation is not None and operation in desk.begun:
                desk.settle(operation, outcome)

    def _stand_by(self) -> None:
        """As `_attend`, where the state is not known to be whole."""
        desk = self.desk
        began_s = self._clock()
        with desk.changed:
            desk.boundary = self._pace.step
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
        self._pace.rested(self._clock() - began_s)

    def _stand_by_together(self, stand_in: StandIn) -> None:
        """Stand still in a phase for as long as somebody stands in for this thread at its last boundary."""
        desk, together = self.desk, self._together
        if together is None or not (desk.held or stand_in.leaving):
            return
        began_s = self._clock()
        with desk.changed:
            desk.boundary = self._pace.step
            while desk.held and stand_in.leaving is None:
                desk.changed.notify_all()
                desk.changed.wait(_LOOK_S)
            if stand_in.leaving is not None:
                desk.ending = together.last_of(stand_in.leaving)
                self._end(desk.ending)
            desk.boundary = None
            desk.changed.notify_all()
        self._pace.rested(self._clock() - began_s)

    def _stands(self) -> bool:
        """Stand still until something changes, if somebody wants it. False: training may go on."""
        desk = self.desk
        left_s = desk.lapse()
        if not desk.held:
            return False
        desk.changed.notify_all()
        if desk.waiting is None or not desk.serving:
            look_s = _LOOK_S if desk.signals else None
            desk.changed.wait(look_s if left_s is None else min(left_s, look_s or left_s))
        return True

    def _serve(self, operation: Operation, step: int) -> None:
        """Take the state for whoever asked, and have it written; a failure is told to him, and to nobody else."""
        desk = self.desk
        desk.claim(step, Phase.SNAPSHOT)
        if self._writer.join(operation):
            return
        outcome = self._take(step)
        if isinstance(outcome, Taken):
            self._writer.submit(outcome, operation)
            return
        if isinstance(outcome, SavedCheckpoint):
            desk.pace.written(outcome.size_bytes, desk.clock() - (operation.began_s or desk.clock()))
            desk.pace.size_bytes = outcome.size_bytes
            desk.committed(outcome)
        desk.settle(operation, outcome)

    def _take(self, step: int) -> Taken | SavedCheckpoint | Exception:
        """Copy the state, with the lock released meanwhile; the time it takes is a stall, and counted as one."""
        desk = self.desk
        slot = self._writer.slot()
        began_s = self._clock()
        desk.saving = True
        desk.changed.release()
        try:
            return attempted(lambda: self._keeper.take(step, slot), f"checkpoint of step {step}")
        finally:
            desk.changed.acquire()
            desk.saving = False
            desk.pace.stalled(self._clock() - began_s)

    def _periodic(self, step: int, now_s: float) -> None:
        """Save by the clock. While an older state is still being written, the next one waits for its turn."""
        desk = self.desk
        if not self._measured:
            self._measured = True
            self._measure()
            self._pace.due_s = now_s + (min(self._every_s, _FIRST_SAVE_S) if self._every_s < _NEVER_S else _NEVER_S)
            return
        if self._together is not None and self._ranks.rank:
            self._pace.due_s = _NEVER_S  # rank 0's clock is everybody's
            return
        if self._writer.busy:
            desk.pace.totals.late += 1
            self._pace.due_s = now_s + min(1.0, self._every_s / 10)
            return
        self._pace.due_s = now_s + self._every_s
        if self._together is not None:
            self._together.due()
            return
        outcome = self._take(step)
        if isinstance(outcome, Taken):
            self._writer.submit(outcome, None)
        elif isinstance(outcome, SavedCheckpoint):
            desk.committed(outcome)
        else:
            desk.pace.totals.failed += 1

    def _hold_state(self, step: int) -> None:
        """Have the state of a phase in memory."""
        with self.desk.changed:
            if not self._writer.has(step) and not self._writer.is_full:
                outcome = self._take(step)
                if isinstance(outcome, Taken):
                    self._writer.keep(outcome)
            is_held = self._writer.has(step)
            self.desk.phase_step = step if is_held else None
            self.desk.changed.notify_all()
        if self._together is not None and is_held:
            self._stand_in = self._together.stand_in(step, partial(self._take_part, step=step, from_memory=True))

    def _end(self, ending: Operation) -> None:
        """Leave, once whoever asked has read that the checkpoint is durable (or has had his time)."""
        desk = self.desk
        if not ending.must_end and self._ranks.local_rank == 0:
            desk.changed.wait_for(lambda: ending.told or desk.ending is None, timeout=_LAST_WORDS_S)
        if desk.ending is not None:  # else utility is back, and nobody has gone yet
            raise StopTraining(0 if ending.phase is Phase.COMMITTED else 1)

    # --- Beginning ---------------------------------------------------------------------------------------------------

    def _begin_from(self, restored: SavedCheckpoint) -> None:
        """Know the age and the size of what training starts from, from the first second."""
        with self.desk.changed:
            self._pace.step = restored.step
            self._pace.size_bytes = restored.size_bytes // self._ranks.size  # until it is measured
            self.desk.committed(restored)

    def _measure(self) -> None:
        """At the first boundary: learn what a checkpoint will write, and have room made for it beside training."""
        if isinstance(size_bytes := attempted(self._keeper.size_bytes, "measuring the state"), int):
            self._pace.size_bytes = size_bytes
            self._writer.prepare(size_bytes)

    def leave(self) -> None:
        """At the end of the process: close what the training did not. Other ranks may have gone already."""
        self.close(finish=self._together is None)

    def forsake(self) -> None:
        """In a child of fork (a data loader's worker): be nobody's guard, and hold nothing that is the parent's."""
        self._closed, self.desk.asked = True, False
        self._pace.due_s = _NEVER_S
        if self._endpoint is not None:
            self._endpoint.forsake()
        if self._signals is not None:
            self._signals.restore()
        self._keeper.forsake()
