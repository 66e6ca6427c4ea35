"""What a training loop holds on to: one call per step, and the place where it saves, pauses, goes on or ends.

    guard = Guard(state, "/nvme/llm", job="llm")
    for step in range(guard.restore() + 1, last_step + 1):
        train(step)
        guard.step(step)

The training thread calls `step` at every step boundary; everything that touches the model happens in it, there and
nowhere else. It takes no lock while nobody asks: then a step costs a look at the clock and three stores.
"""

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

from powerguard.trainer.desk import Desk, boottime_s
from powerguard.trainer.disk import Disk
from powerguard.trainer.endpoint import Endpoint, EndpointError, read_token, socket_for
from powerguard.trainer.items import State
from powerguard.trainer.keeper import GivenUp, Keeper, Save, Saving, Taken, attempted
from powerguard.trainer.operation import Operation
from powerguard.trainer.store import SavedCheckpoint, Store, StoreError
from powerguard.trainer.stored import Stored
from powerguard.trainer.writer import Writer
from powerguard.wire import After, Loop, Phase

_log = logging.getLogger("powerguard.trainer")
AUTO = "auto"
"""The socket that the daemon finds by itself."""

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
    signals: SIGTERM and SIGUSR1 ask for a checkpoint and the end. restored: what a saving function started from.

    Raises StoreError, EndpointError or OSError: what, where, what would be right.
    """

    def __init__(
        self,
        state: State | Save,
        root: Path | str | None = None,
        *,
        job: str,
        conduct: After | str = After.PAUSE,
        every_s: float | None = 300.0,
        keep: int = 2,
        socket: Path | str | None = AUTO,
        port: int | None = None,
        token_file: Path | str | None = None,
        signals: bool = False,
        restored: SavedCheckpoint | None = None,
        disk: Disk | None = None,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self._clock = clock
        self._keeper = _keeper(state, root, job=job, keep=keep, disk=disk)
        self._every_s = every_s if every_s is not None and self._keeper.beside else _NEVER_S
        self.desk = Desk(job=job, conduct=After(conduct), clock=clock)
        self._writer = Writer(self.desk, self._keeper)
        self._pace = self.desk.pace
        self._pace.beside = self._keeper.beside
        self._due_s = clock()
        self._measured = False
        self._closed = False
        self._handlers: dict[int, object] = {}
        self._endpoint: Endpoint | None = None
        if restored is not None:
            self._begin_from(restored)
        try:
            self._endpoint = _endpoint(self.desk, socket, port, token_file)
        except BaseException:
            self._keeper.close()
            raise
        if signals:
            self._listen()
        _guards.add(self)

    def restore(self) -> int:
        """Load the newest checkpoint that verifies to the last byte; return how many steps it has done, 0 for none.

        Before the first step. One that does not verify is set aside, and the next one taken. Raises StoreError when
        what lies there is another job's, OSError when it cannot be read, and what `state.load` raises.
        """
        if isinstance(self._keeper, Stored) and (restored := self._keeper.restore()) is not None:
            self._begin_from(restored)
        return self._pace.step or 0

    @property
    def port(self) -> int | None:
        """The TCP port that the endpoint listens on; None: none."""
        return None if self._endpoint is None else self._endpoint.port

    # --- The training loop -------------------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        """Say that this step has ended and its state is whole. Saves, pauses or ends here when that was asked.

        step: how many steps have been done. Raises StopTraining, a SystemExit, when the asker wants the process to end
        after its checkpoint.
        """
        now_s = self._clock()
        self._pace.beat(step, now_s)
        if now_s >= self._due_s or self.desk.asked:
            self._attend(step)

    def poll(self) -> None:
        """Call it where no step ends for long: training may then stand still, or end, in the middle of things.

        It never saves: only at a step boundary, or in a phase that was told its step, is the state known to be whole.
        """
        if self.desk.asked:
            self._stand_by()

    @contextmanager
    def phase(self, loop: Loop | str, *, step: int | None = None) -> Iterator[None]:
        """Say what the loop is busy with ("eval", "compile", "idle"): no step boundary comes soon.

        step: the state is whole, and is the one after this step. Then it is copied to memory as the phase begins, so
        that an emergency finds it; whatever happens to the model meanwhile (averaged weights swapped in, say) does not
        matter. Without it, the last durable checkpoint is what there is.
        """
        before, self._pace.loop = self._pace.loop, Loop(loop)
        began_s = self._clock()
        if step is not None:
            self._hold_state(step)
        try:
            yield
            self.poll()
        finally:
            with self.desk.changed:
                self._pace.loop = before
                self.desk.phase_step = None
                self._pace.rested(self._clock() - began_s)

    def save(self, step: int) -> SavedCheckpoint:
        """Make the state after this step durable and only then return: at the end of training, or by one's own rule.

        Raises what the state, the disk or the store raise.
        """
        began_s = self._clock()
        with self.desk.changed:
            self.desk.changed.wait_for(lambda: not self._writer.busy)
            outcome = self._take(step)
            if isinstance(outcome, Taken):
                write = self._writer.submit(outcome, None)
                self.desk.changed.wait_for(lambda: write.outcome is not None)
                outcome = write.outcome or outcome
            elif isinstance(outcome, SavedCheckpoint):
                self.desk.committed(outcome)
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
        self._closed = True
        self._writer.close(finish=finish)
        self.desk.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._unlisten()
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finish=kind is None or issubclass(kind, StopTraining))

    # --- At a boundary -----------------------------------------------------------------------------------------------

    def _attend(self, step: int) -> None:
        """Do what is asked, and what is due by the clock; stand still for as long as somebody wants it."""
        desk = self.desk
        began_s = self._clock()
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
            desk.boundary, desk.serving = None, False
            desk.asked = False
            desk.changed.notify_all()
            if began_s >= self._due_s and not self._closed:
                self._periodic(step, began_s)
        self._pace.rested(self._clock() - began_s)  # a pause is no step time

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
            self._due_s = now_s + (self._every_s if self._every_s == _NEVER_S else min(self._every_s, _FIRST_SAVE_S))
            return
        if self._writer.busy:
            desk.pace.totals.late += 1
            self._due_s = now_s + min(1.0, self._every_s / 10)
            return
        self._due_s = now_s + self._every_s
        outcome = self._take(step)
        if isinstance(outcome, Taken):
            self._pace.size_bytes = outcome.size_bytes
            self._writer.submit(outcome, None)
        elif isinstance(outcome, SavedCheckpoint):
            desk.committed(outcome)
        else:
            desk.pace.totals.failed += 1

    def _hold_state(self, step: int) -> None:
        """Have the state of a phase in memory."""
        with self.desk.changed:
            if not self._writer.has(step):
                outcome = self._take(step)
                if isinstance(outcome, Taken):
                    self._writer.keep(outcome)
            self.desk.phase_step = step if self._writer.has(step) else None
            self.desk.changed.notify_all()

    def _end(self, ending: Operation) -> None:
        """Leave, once whoever asked has read that the checkpoint is durable (or has had his time)."""
        desk = self.desk
        if not ending.must_end:
            desk.changed.wait_for(lambda: ending.told or desk.ending is None, timeout=_LAST_WORDS_S)
        if desk.ending is not None:  # else utility is back, and nobody has gone yet
            raise StopTraining(0 if ending.phase is Phase.COMMITTED else 1)

    # --- Beginning ---------------------------------------------------------------------------------------------------

    def _begin_from(self, restored: SavedCheckpoint) -> None:
        """Know the age and the size of what training starts from, from the first second."""
        with self.desk.changed:
            self._pace.step = restored.step
            self._pace.size_bytes = restored.size_bytes
            self.desk.committed(restored)

    def _measure(self) -> None:
        """At the first boundary: learn what a checkpoint will write, and have room made for it beside training."""
        if isinstance(size_bytes := attempted(self._keeper.size_bytes, "measuring the state"), int):
            self._pace.size_bytes = size_bytes
            self._writer.prepare(size_bytes)

    def _listen(self) -> None:
        """Take SIGTERM and SIGUSR1 (Slurm's warning) for a wish: a checkpoint at the next boundary, then the end."""

        def heard(number: int, _frame: FrameType | None) -> None:
            if self.desk.signals_heard:  # asked twice: now
                signal.signal(number, self._handlers[number])  # type: ignore[arg-type] # what getsignal() gave
                signal.raise_signal(number)
            self.desk.signals_heard = True
            self.desk.signalled = number
            self.desk.asked = True

        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals=True outside the main thread: signals are not listened to")
            return
        self.desk.signals = True
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._handlers[number] = signal.getsignal(number)
            signal.signal(number, heard)

    def _unlisten(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type] # what getsignal() gave
        self._handlers.clear()

    def forsake(self) -> None:
        """In a child of fork (a data loader's worker): be nobody's guard, and hold nothing that is the parent's."""
        self._closed = True
        self.desk.asked = False
        self._due_s = _NEVER_S
        if self._endpoint is not None:
            self._endpoint.forsake()
        self._unlisten()
        self._keeper.forsake()


_guards: "weakref.WeakSet[Guard]" = weakref.WeakSet()


def _forked() -> None:
    for guard in list(_guards):
        guard.forsake()


os.register_at_fork(after_in_child=_forked)


def _keeper(state: State | Save, root: Path | str | None, *, job: str, keep: int, disk: Disk | None) -> Keeper:
    if not callable(state):
        if root is None:
            msg = "a state with items() needs a root: the folder for its checkpoints"
            raise StoreError(msg)
        return Stored(state, Store(root, job=job, keep=keep, disk=disk))
    if root is not None:
        msg = f"{root}: a root needs a state with items() and load(); a function that saves by itself has its own"
        raise StoreError(msg)
    return Saving(state)


def _endpoint(
    desk: Desk, socket: Path | str | None, port: int | None, token_file: Path | str | None
) -> Endpoint | None:
    path = socket_for(desk.job) if socket == AUTO else socket
    if path is None:
        if port is not None:
            msg = f"port {port}: needs a socket too (its folder may be any)"
            raise EndpointError(msg)
        return None
    token = None if token_file is None else read_token(Path(token_file))
    try:
        return Endpoint(desk, path, port=port, token=token)
    except EndpointError as error:
        if socket != AUTO:
            raise
        _log.warning("nobody can ask this training for a checkpoint: %s", error)
        return None
