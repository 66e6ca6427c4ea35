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
from pathlib import Path
from typing import Self

from powerguard.trainer.boundary import NEVER_S, Boundary, StopTraining
from powerguard.trainer.desk import Desk
from powerguard.trainer.disk import Disk
from powerguard.trainer.endpoint import Endpoint
from powerguard.trainer.items import State
from powerguard.trainer.keeper import GivenUp, Save
from powerguard.trainer.opening import AUTO, Place, Signals, endpoint_of, keeper_of, look_after
from powerguard.trainer.options import check_options, one_of, whole
from powerguard.trainer.pace import STEPS
from powerguard.trainer.ranks import Ranks, detect
from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.store import SavedCheckpoint, StoreError
from powerguard.trainer.stored import Stored
from powerguard.trainer.tiers.base import Remote
from powerguard.trainer.tiers.upload import Uploader
from powerguard.trainer.together import Together
from powerguard.trainer.uploads import Uploads
from powerguard.trainer.writer import Writer
from powerguard.wire import MAX_STEP, After, Loop, Phase


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
    signals: SIGTERM and SIGUSR1 ask for a checkpoint and the end. restored: what training started from, where something
    else than `restore` loaded it. new_run: begin at step 0 although checkpoints lie there; they are set aside.
    must_exist: refuse to begin where root is not there, as when its disk is not mounted; without it, it is made.

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
        new_run: bool = False,
        must_exist: bool = False,
        disk: Disk | None = None,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        check_options(job=job, conduct=conduct, every_s=every_s, remote_every_s=remote_every_s, keep=keep)
        self._clock = clock
        if ranks is not None and not hasattr(ranks, "rank"):
            msg = f"ranks={ranks!r}: must be a way to the others, as SocketRanks (leave it out under torchrun)"
            raise StoreError(msg)
        self._ranks = ranks = detect(root) if ranks is None else ranks
        self._remote = None if remote is None else Remote.of(remote)
        place = Place(job=job, keep=keep, disk=disk, must_exist=must_exist)
        self._keeper = keeper_of(state, root, place, ranks=ranks, remote=remote is not None)
        self.desk = Desk(job=job, conduct=After(conduct), clock=clock, ranks=ranks.size, hosts=ranks.hosts)
        self._writer = Writer(self.desk, self._keeper)
        self._pace = self.desk.pace
        self._pace.beside = self._keeper.beside
        self._pace.processes = -(-ranks.size // ranks.hosts)
        self._pace.due_s = clock()
        every_s = every_s if every_s is not None and self._keeper.beside else NEVER_S
        self._boundary = Boundary(self.desk, self._writer, self._keeper, ranks=ranks, every_s=every_s, clock=clock)
        self._endpoint: Endpoint | None = None
        self._signals: Signals | None = None
        self._began_at: int | None = -1 if new_run else None
        """The step that training goes on from, -1 for none; None: not told yet."""
        self._is_new_or_rolled_back = new_run or restored is not None
        self._has_begun = not isinstance(self._keeper, Stored)
        if restored is not None:
            self._began_at = restored.step
            self._begin_from(restored)
        self._uploads: Uploads | None = None
        self._together: Together | None = None
        try:
            if ranks.size > 1:
                self._together = self._boundary.together = Together(self.desk, self._writer, ranks)
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
        if self._is_new_or_rolled_back:
            msg = "restore(): training was said to begin elsewhere (leave out new_run, restored and start_from)"
            raise StoreError(msg)
        self._has_begun = True
        if isinstance(self._keeper, Stored):
            with closing(self._ranks.clone()) as ranks:
                restored = self._keeper.restore(ranks, self._remote)
            if restored is not None:
                self._begin_from(restored[0])
                self._pace.totals.corrupt += restored[1]
        if self._agreement is not None:
            self._agreement.step = self._pace.step or 0
        return self._pace.step or 0

    def start_from(self, step: int) -> None:
        """Say, in place of `restore`, that something else has loaded the state of this many steps.

        Before the first step, on every rank. Checkpoints of higher steps are set aside at the first save: training was
        rolled back behind them.
        """
        self._began_at, self._is_new_or_rolled_back = whole(step), True
        self._pace.step = self._began_at
        if self._agreement is not None:
            self._agreement.step = self._began_at

    @property
    def port(self) -> int | None:
        """The TCP port that the endpoint listens on; None: none."""
        return None if self._endpoint is None else self._endpoint.port

    # --- The training loop -------------------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        """Say that this step has ended and its state is whole. Saves, pauses or ends here when that was asked.

        step: how many have been done. Raises StopTraining, a SystemExit, when asked to end; GivenUp once closed.
        """
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            step = whole(step)
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
                self._begin()
                self._boundary.attend(step)
            return
        agreement.step = step
        if step >= agreement.due or pace.asked or now_s >= pace.due_s:
            self._begin()
            self._boundary.attend(step)

    def poll(self) -> None:
        """Call it where no step ends for long: training may then stand still, or end, in the middle of things.

        It never saves: only at a step boundary, or in a phase that was told its step, is the state known to be whole.
        """
        self._boundary.poll()

    @contextmanager
    def phase(self, loop: Loop | str, *, step: int | None = None) -> Iterator[None]:
        """Say what the loop is busy with ("eval", "compile", "idle"): no step boundary comes soon.

        step: the state is whole, and is the one after this step. Then it is copied to memory as the phase begins, so
        that an emergency finds it; whatever happens to the model meanwhile (averaged weights swapped in, say) does not
        matter. Without it, the last durable checkpoint is what there is.
        """
        step = None if step is None else whole(step)
        began_s, stepped_at_s, before = self._clock(), self._pace.stepped_at_s, self._pace.loop
        self._pace.loop = one_of(Loop, loop, "loop")
        if step is not None and self._keeper.beside:
            self._boundary.enter_phase(step)
        try:
            yield
            self.poll()
        finally:
            self._boundary.leave_phase()
            with self.desk.lock:
                self._pace.loop = before
                self._pace.stepped_at_s = stepped_at_s + self._clock() - began_s  # none of it is step time

    def save(self, step: int) -> SavedCheckpoint:
        """Make the state after this step durable and only then return: at the end of training, or by one's own rule.

        A checkpoint that was asked for meanwhile is this one: training stands still here until it may go on.
        With several ranks every rank calls it for the same step, and a checkpoint that was asked for is another one of
        this step. Raises what the state, the disk or the store raise, NotCommittedError when another rank could not,
        and StopTraining when asked to end.
        """
        step = whole(step)
        self._begin()
        began_s = self._clock()
        others = self._together.together() if self._together is not None and self._keeper.beside else None
        outcome = self._boundary.save(step, others)
        self._pace.rested(self._clock() - began_s)
        if isinstance(outcome, SavedCheckpoint):
            return outcome
        raise outcome if isinstance(outcome, Exception) else GivenUp("training has ended")

    def report(self, phase: Phase, bytes_done: int | None = None, bytes_total: int | None = None) -> None:
        """Tell, from within a `save` of one's own, how far it is. phase: SNAPSHOT, WRITING or COMMITTING."""
        with self.desk.lock:
            if self.desk.saving and self.desk.begun:
                self.desk.progress(self.desk.begun[-1], phase, bytes_done, bytes_total)

    def close(self, *, finish: bool = True) -> None:
        """Say that training has ended. finish: what is being written becomes durable first; else it is given up."""
        if self._boundary.closed:
            return
        self._boundary.closed, self._pace.due_s = True, -NEVER_S  # a step from now on is attended to, and refused
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

    # --- Beginning ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Before the first save: what lies there must not count as newer than what is saved from now on.

        Raises StoreError where checkpoints lie there and training has not said that it goes on from them: its own would
        be acknowledged, and the next start would begin at the old ones.
        """
        if self._has_begun or not isinstance(self._keeper, Stored):
            return
        newest = self._keeper.newest_step()
        if newest is not None and self._began_at is None:
            msg = (
                f"{self._keeper.root}: checkpoints up to step {newest} lie there, and restore() was not called: the"
                " next start would begin at them (call guard.restore() before the first step, or give Guard"
                " new_run=True, which sets them aside)"
            )
            raise StoreError(msg)
        if newest is not None and self._began_at is not None and newest > self._began_at:
            self._keeper.leave_behind(self._began_at)
        self._has_begun = True

    def _begin_from(self, restored: SavedCheckpoint) -> None:
        """Know the age and the size of what training starts from, from the first second."""
        with self.desk.lock:
            self._pace.step = restored.step
            self._pace.size_bytes = restored.size_bytes // self._ranks.size  # until it is measured
            self.desk.committed(restored)

    def leave(self) -> None:
        """At the end of the process: close what the training did not. Other ranks may have gone already."""
        self.close(finish=self._together is None)

    def forsake(self) -> None:
        """In a child of fork (a data loader's worker): be nobody's guard, and hold nothing that is the parent's."""
        self._boundary.closed, self.desk.asked = True, False
        self._pace.due_s = NEVER_S
        if self._endpoint is not None:
            self._endpoint.forsake()
        if self._signals is not None:
            self._signals.restore()
        self._keeper.forsake()
