"""The thread that writes: states that were taken at step boundaries become durable here, beside training.

An emergency is written here too: training stands still only because it is told to, and can go on in the middle of a
write. When a newer state comes while an older one is being written, the deadline decides which bytes go first.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from powerguard.trainer.desk import Desk
from powerguard.trainer.keeper import GivenUp, Keeper, Nobody, Order, Others, Taken, attempted
from powerguard.trainer.operation import Operation
from powerguard.trainer.store import SavedCheckpoint
from powerguard.wire import Phase

PERIODIC = "periodic"
_LOOK_S = 0.5  # how soon the thread sees what nobody can wake it for: a deadline that comes near
_IDLE_S = 60.0  # between two little pieces of work that can wait
_MARGIN = 1.25  # of the time that a write is expected to take: it must be over before the deadline
_COMMIT_S = 0.5  # manifest, rename and syncs

_Value = TypeVar("_Value")


@dataclass(slots=True, eq=False)
class Write:
    """One taken state on its way to the disk. operation: who asked for it; None: the schedule did.

    others: what the other ranks have to do with it. cancel: set when it is not wanted any more.
    began_s: None until its first byte. outcome: None until it has ended.
    """

    taken: Taken
    operation: Operation | None = None
    others: Others = field(default_factory=Nobody)
    cancel: threading.Event = field(default_factory=threading.Event)
    began_s: float | None = None
    bytes_done: int = 0
    phase: Phase = Phase.WRITING
    outcome: SavedCheckpoint | Exception | None = None

    @property
    def given_up(self) -> bool:
        """Not wanted any more."""
        return self.cancel.is_set()


class Writer:
    """Writes what it is given, one after the other, and knows which of the two snapshots may be taken anew.

    Every attribute is touched under the desk's lock.
    """

    def __init__(self, desk: Desk, keeper: Keeper) -> None:
        self._desk = desk
        self._keeper = keeper
        self._running: Write | None = None
        self._next: Write | None = None
        self._fresh: Taken | None = None
        self._prepare_bytes: int | None = None
        self._idle_at_s = desk.clock() + _IDLE_S
        self._over = False
        self._thread: threading.Thread | None = None

    # --- The training thread, with the lock held ---------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """A state is being written or waits for it."""
        return self._running is not None or self._next is not None

    def prepare(self, size_bytes: int) -> None:
        """Have room made for checkpoints of this size, in idle time."""
        self._prepare_bytes = size_bytes
        self._start()

    def slot(self) -> int:
        """Return the snapshot that may be overwritten: never the one that is being written.

        What it held and nobody has written is lost with it: the state that comes is newer.
        """
        slot = 1 - self._running.taken.slot if self._running is not None else 0
        if self._running is None and self._fresh is not None:
            slot = 1 - self._fresh.slot  # keep the newest whole state until the next one is whole
        if self._next is not None and self._next.taken.slot == slot:
            self._drop_next()
        if self._fresh is not None and self._fresh.slot == slot:
            self._fresh = None
        return slot

    def keep(self, taken: Taken) -> None:
        """Hold a state in memory, to be written when an emergency finds no newer one."""
        self._fresh = taken
        self._desk.snapshot_step = taken.step
        self._start()
        self._desk.changed.notify_all()

    def has(self, step: int) -> bool:
        """The state after this step is durable, being written, or held in memory."""
        last = self._desk.last
        known = [each.taken.step for each in (self._running, self._next) if each is not None and not each.given_up]
        return step in known or (last is not None and last.step == step) or self._is_fresh(step)

    def join(self, operation: Operation) -> bool:
        """Let an operation have a state that we have already. False: the state has to be taken."""
        desk, step = self._desk, operation.step
        if desk.last is not None and desk.last.step == step:
            desk.settle(operation, desk.last)  # asked again for the same state: there is nothing new to write
            return True
        for write in (self._running, self._next):
            if write is not None and not write.given_up and write.taken.step == step:
                if write.operation is not None:
                    desk.supersede(write.operation, operation)
                write.operation = operation
                desk.progress(operation, write.phase, write.bytes_done, write.taken.size_bytes)
                return True
        if self._fresh is not None and self._fresh.step == step:
            self.submit(self._fresh, operation)
            return True
        return False

    def submit(self, taken: Taken, operation: Operation | None) -> Write:
        """Have a state written: next, or instead of what is being written now."""
        write = Write(taken, operation)
        running = self._running
        if self._next is not None:
            self._drop(self._next, operation)
        if running is not None and operation is not None and not self._finish_first(running, write):
            running.cancel.set()
            self._drop(running, operation)
        self._next = write
        self._fresh = None
        self._desk.wanted.set()
        self._desk.snapshot_step = taken.step
        if operation is not None:
            self._desk.progress(operation, Phase.WRITING, 0, taken.size_bytes)
        self._start()
        self._desk.changed.notify_all()
        return write

    def _drop_next(self) -> None:
        """Give up what waits: its snapshot is needed for a newer state."""
        waiting, self._next = self._next, None
        if waiting is not None:
            self._drop(waiting, self._desk.begun[-1] if self._desk.begun else None)

    def _drop(self, write: Write, newer: Operation | None) -> None:
        """Hand those who asked for a state that is not written any more to a newer one's operation."""
        operation, write.operation = write.operation, None
        write.outcome = write.outcome or GivenUp("a newer state went first")
        if operation is not None and operation is not newer and operation in self._desk.begun:
            if newer is not None:
                self._desk.supersede(operation, newer)
            else:
                self._desk.settle(operation, write.outcome)

    def _finish_first(self, running: Write, write: Write) -> bool:
        """Whether the older state's last bytes go before the newer one's first.

        Both in time: the older one is durable sooner, should the battery lie. Only the newer one in time: it alone.
        The newer one not in time anyway: the older one, if that is nearer.
        """
        operation = write.operation
        if running.given_up:
            return False
        if operation is None or operation.deadline_at_s is None:
            return True
        need_s = self._need_s(write.taken.size_bytes)
        rest_s = self._need_s(running.taken.size_bytes - running.bytes_done)
        if need_s is None or rest_s is None:
            return False
        left_s = operation.deadline_at_s - self._desk.clock()
        return rest_s + need_s <= left_s or (need_s > left_s and rest_s < need_s / 2)

    def _need_s(self, size_bytes: int) -> float | None:
        write_s = self._desk.pace.write_s(size_bytes)
        return None if write_s is None else _MARGIN * write_s + _COMMIT_S

    def _is_fresh(self, step: int) -> bool:
        return self._fresh is not None and self._fresh.step == step

    # --- Its own thread -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None and not self._over:
            self._thread = threading.Thread(target=self._run, name="powerguard-writer", daemon=True)
            self._thread.start()

    def close(self, *, finish: bool) -> None:
        """End the thread; finish: once everything is written, else as soon as it can."""
        with self._desk.changed:
            self._over = True
            self._desk.wanted.set()
            if not finish:
                for write in (self._running, self._next):
                    if write is not None:
                        write.cancel.set()
            self._desk.changed.notify_all()
        if self._thread is not None:
            self._thread.join(None if finish else 5.0)

    def _run(self) -> None:
        desk = self._desk
        with desk.changed:
            while not (self._over and self._next is None):
                desk.take_signal()
                self._flush_if_pressed()
                if self._next is not None:
                    self._running, self._next = self._next, None
                    self._write(self._running)
                    self._running = None
                    desk.changed.notify_all()
                elif not self._work():
                    desk.changed.wait(self._look_s())

    def _write(self, write: Write) -> None:
        """Write one state, with the lock released meanwhile, and say how it went."""
        desk, taken = self._desk, write.taken
        write.began_s = desk.clock()
        operation = write.operation
        order = Order(
            reason=PERIODIC if operation is None else operation.reason.value,
            urgent=operation is not None,
            cancel=write.cancel,
            others=write.others,
        )
        outcome: SavedCheckpoint | Exception = GivenUp("training has ended")
        if not write.given_up:
            outcome = self._apart(
                lambda: self._keeper.write(taken, lambda *told: self._tell(write, *told), order),
                f"checkpoint of step {taken.step}",
            )
        write.outcome = outcome
        if isinstance(outcome, SavedCheckpoint):
            desk.pace.written(taken.size_bytes, desk.clock() - write.began_s)
            self._prepare_bytes = max(taken.size_bytes, self._prepare_bytes or 0)
            desk.committed(outcome)
        elif not write.given_up:
            desk.pace.totals.failed += write.operation is None
            if self._fresh is None and self._next is None:
                self._fresh = taken  # still whole, and in memory: an emergency may try again
        if write.operation is not None and write.operation in desk.begun:
            desk.settle(write.operation, outcome)

    def _tell(self, write: Write, phase: Phase, done: int | None, total: int | None) -> None:
        """Be told by the keeper how far it is."""
        with self._desk.changed:
            write.phase, write.bytes_done = phase, done or 0
            if write.operation is not None:
                self._desk.progress(write.operation, phase, done, total or write.taken.size_bytes)

    def _flush_if_pressed(self) -> None:
        """Write the newest state in memory for an operation whose step boundary does not come in time.

        Within a phase that has told its state, that state is what training stands on: no need to wait for anything.
        """
        desk, operation = self._desk, self._desk.waiting
        if operation is None or desk.serving:
            return
        if desk.phase_step is not None and self.has(desk.phase_step):
            desk.claim(desk.phase_step, Phase.WRITING)
            self.join(operation)
        elif operation.deadline_at_s is not None and self._fresh is not None and not self.busy:
            need_s = self._need_s(self._fresh.size_bytes)
            if need_s is not None and operation.deadline_at_s - desk.clock() <= need_s + 2 * _LOOK_S:
                self.flush()

    def flush(self) -> bool:
        """Write the newest state in memory for the operation that waits; False when a newer one is durable anyway."""
        desk, fresh, operation = self._desk, self._fresh, self._desk.waiting
        if operation is None or fresh is None or (desk.last is not None and fresh.step <= desk.last.step):
            return False
        desk.claim(fresh.step, Phase.WRITING)
        self.submit(fresh, operation)
        return True

    def _work(self) -> bool:
        """Do one piece of what can wait, with the lock released meanwhile. False: there is nothing to do."""
        desk = self._desk
        desk.wanted.clear()
        if self._over or self.busy or desk.waiting is not None or desk.begun or desk.held:
            return False
        if self._prepare_bytes is not None:
            size_bytes, self._prepare_bytes = self._prepare_bytes, None
            rate = self._apart(lambda: self._keeper.prepare(size_bytes, desk.wanted), "making room for checkpoints")
            if desk.wanted.is_set():
                self._prepare_bytes = size_bytes  # interrupted: again when there is time
            if isinstance(rate, float):
                desk.pace.probed(rate)
            return True
        if desk.clock() >= self._idle_at_s:
            corrupt = self._apart(lambda: self._keeper.idle(desk.wanted), "looking after old checkpoints")
            desk.pace.totals.corrupt += corrupt if isinstance(corrupt, int) else 0
            self._idle_at_s = desk.clock() + _IDLE_S
            return True
        return False

    def _apart(self, call: Callable[[], _Value], what: str) -> _Value | Exception:
        """Make a call with the lock released."""
        self._desk.changed.release()
        try:
            return attempted(call, what)
        finally:
            self._desk.changed.acquire()

    def _look_s(self) -> float:
        """Seconds until there may be something to do that nobody notifies us of."""
        desk = self._desk
        if desk.waiting is not None or desk.signals:
            return _LOOK_S
        return min(desk.lapse_uploads() or _IDLE_S, max(_LOOK_S, self._idle_at_s - desk.clock()))
