"""What a training loop holds on to: one call per step, and the place where it saves, pauses, goes on or ends.

    guard = Guard(state, "/nvme/llm", job="llm")
    for step in range(guard.restore() + 1, last_step + 1):
        train(step)
        guard.step(step)

The training thread calls `step` at every step boundary; all that touches the model happens in it, there and nowhere
else. Without a request it takes no lock: a step costs a look at the clock and three stores. Arguments are checked when
the guard is made: an error days later, in a step, would end the training.
"""

import atexit
import operator
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Protocol, Self, TypeVar

from powerguard.trainer.log import log
from powerguard.trainer.loop.checkpointer import (
    Checkpointer,
    FunctionCheckpointer,
    Save,
    StoreCheckpointer,
    WriteAbandoned,
)
from powerguard.trainer.loop.endpoint import (
    SOCKETS,
    Endpoint,
    EndpointError,
    TakenError,
    no_folder,
    own_names,
    read_token,
    socket_for,
)
from powerguard.trainer.loop.requests import STEPS, RequestQueue
from powerguard.trainer.loop.step_hook import NEVER_S, StepHook, StopTraining
from powerguard.trainer.loop.writer import UploadSchedule, Writer
from powerguard.trainer.ranks import Ranks, RanksError, detect
from powerguard.trainer.ranks.base import boottime_s
from powerguard.trainer.ranks.coordinator import RankCoordinator
from powerguard.trainer.store.disk import Disk, is_there
from powerguard.trainer.store.items import State
from powerguard.trainer.store.manifest import MAX_TEXT
from powerguard.trainer.store.store import HERE, SavedCheckpoint, Store, StoreError, make_root
from powerguard.trainer.tiers.base import Remote, folder_of
from powerguard.trainer.tiers.upload import Uploader
from powerguard.wire import HOST_LEFT, MAX_STEP, After, LastSave, Loop, Phase

_Word = TypeVar("_Word", bound=StrEnum)
_KEPT_NAME = re.compile(r"(?!step-|bad-|old-)[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def check_options(
    *, job: object, conduct: str, every_s: object, remote_every_s: object, keep: object, snapshots: object
) -> None:
    """Refuse now what would fail at a step, days from now. Raises StoreError."""
    wrong = ""
    one_of(After, conduct, "conduct")
    if not isinstance(job, str) or not 0 < len(job) <= MAX_TEXT or not job.isprintable():
        wrong = f"job={job!r}: must be the training's name, 1 to {MAX_TEXT} printable characters"
    elif "/" in job:
        wrong = f"job={job!r}: must be a name without '/', which cannot stand in the name of a socket or folder"
    if not isinstance(keep, int):
        wrong = f"keep={keep!r}: must be how many checkpoints stay, 2 or more"
    if snapshots not in (None, 1, 2):
        wrong = f"snapshots={snapshots!r}: must be how many states host memory holds, 1 or 2, or None"
    for name, seconds in (("every_s", every_s), ("remote_every_s", remote_every_s)):
        never = seconds is None and name == "every_s"
        if not never and not (isinstance(seconds, (int, float)) and 0 < seconds < float("inf")):
            wrong = f"{name}={seconds!r}: must be seconds, more than 0"
    if wrong:
        raise StoreError(wrong)


def checked_wait(seconds: object) -> float:
    """Return how long the end of training waits. Raises StoreError."""
    if not (isinstance(seconds, (int, float)) and 0 <= seconds < float("inf")):
        msg = f"remote_end_s={seconds!r}: must be seconds, 0 or more"
        raise StoreError(msg)
    return seconds


def checked(ranks: Ranks) -> Ranks:
    """Return what was given as the way to the other ranks. Raises StoreError if it is something else."""
    if not hasattr(ranks, "rank"):
        msg = f"ranks={ranks!r}: must be a way to the others, as SocketRanks (leave it out under torchrun)"
        raise StoreError(msg)
    return ranks


def whole(step: object) -> int:
    """Return a step as a plain number, also of a numpy scalar or a tensor.

    Raises TypeError if it is not a number, and ValueError if no checkpoint can have this step.
    """
    try:
        number = int(operator.index(step))  # type: ignore[arg-type] # that is the question
    except TypeError:
        msg = f"step is {step!r}: must be a whole number, how many steps have been done"
        raise TypeError(msg) from None
    if not 0 <= number <= MAX_STEP:
        msg = f"step is {number}: must be from 0 to 2**62, how many steps have been done"
        raise ValueError(msg)
    return number


def one_of(kind: type[_Word], word: str, name: str) -> _Word:
    """Return the word of this kind. Raises StoreError, with those that there are."""
    try:
        return kind(word)
    except ValueError:
        msg = f"{name}={word!r}: must be one of {', '.join(kind)}"
        raise StoreError(msg) from None


AUTO = "auto"
"""The socket that the daemon finds by itself."""

_MEET_S = 60.0
_SAME_SIGNAL_S = 5.0
"""How long a second signal is the same wish: systemd signals all processes of a unit, and torchrun passes it on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How checkpoints are kept under a root; see `guard.Guard`."""

    job: str
    keep: int
    snapshots: int | None
    disk: Disk | None
    must_exist: bool


def checkpointer_of(
    state: State | Save, root: Path | str | None, options: StoreOptions, *, ranks: Ranks, remote: bool
) -> Checkpointer:
    if not callable(state):
        if not callable(getattr(state, "items", None)) or not callable(getattr(state, "load", None)):
            msg = f"state {state!r:.80}: must have items() and load(), as Parts(save, load) and TorchState have"
            raise StoreError(msg)
        if root is None or not str(root):
            msg = "a state with items() needs a root: the folder for its checkpoints"
            raise StoreError(msg)
        root = Path(root).expanduser()
        if options.must_exist and not root.is_dir():
            msg = f"{root}: is not there, and must_exist=True (is its disk mounted? else make the folder once)"
            raise StoreError(msg)
        store = Store(
            root,
            job=options.job,
            rank=ranks.rank,
            ranks=ranks.size,
            leader=_leads(root, ranks),
            hosts=ranks.hosts,
            keep=options.keep,
            disk=options.disk,
        )
        processes = -(-ranks.size // ranks.hosts)
        return StoreCheckpointer(state, store, hosts=ranks.hosts, snapshots=options.snapshots, processes=processes)
    if remote:
        msg = "remote: only a state with items() can be copied to a slower tier"
        raise StoreError(msg)
    if root is not None:
        msg = f"{root}: a root needs a state with items() and load(); a function that saves by itself has its own"
        raise StoreError(msg)
    return FunctionCheckpointer(state)


def second_tier(remote: Remote | Path | str, job: str, root: Path | str | None) -> Remote:
    """Return where the second copy goes. Raises StoreError if that is where the first one is."""
    tier = Remote.of(remote)
    # By name alone: a mount whose server has gone would hang here.
    if tier.is_folder and root is not None and Path(root).expanduser().absolute() == Path(tier.url, folder_of(job)):
        msg = f"remote={tier.url!r}: its folder for this job is the root itself, {root} (name a folder on another disk)"
        raise StoreError(msg)
    return tier


def _leads(root: Path, ranks: Ranks) -> bool:
    """Whether this rank is the one that commits under this root: rank 0, and the first of each host with its own root.

    Rank 0 puts a file there, and who finds it shares the root. Raises RanksError, OSError.
    """
    if ranks.hosts == 1 or ranks.local_rank:
        return ranks.local_rank == 0
    with closing(ranks.clone()) as store:
        if ranks.rank:
            try:
                name = store.get("root/file", _MEET_S).decode()
            except TimeoutError as error:
                msg = f"rank 0 did not report within {_MEET_S:g} s whether {root} is shared (see what it says)"
                raise RanksError(msg) from error
            is_shared = is_there(root / name)
            store.set(f"root/seen/{ranks.host}", b"1")
            return not is_shared
        name = f"{HERE}{secrets.token_hex(8)}"
        make_root(root)
        (root / name).touch()
        try:
            store.set("root/file", name.encode())
            for host in range(1, ranks.hosts):
                store.get(f"root/seen/{host}", _MEET_S)
        except TimeoutError as error:
            msg = f"not all of the {ranks.hosts} hosts have looked at {root} within {_MEET_S:g} s (see what they say)"
            raise RanksError(msg) from error
        finally:
            (root / name).unlink(missing_ok=True)
    return True


def endpoint_of(
    requests: RequestQueue,
    socket: Path | str | None,
    port: int | None,
    token_file: Path | str | None,
    *,
    folder: Path = SOCKETS,
) -> Endpoint | None:
    """Open the endpoint; None: there is none. folder: where the daemon finds sockets by itself."""
    path = socket_for(requests.job, folder) if socket == AUTO else socket
    if path is None:
        if port is not None:
            msg = f"port {port}: needs a socket too (its folder may be any)"
            raise EndpointError(msg)
        if socket == AUTO:
            why = f"{folder}: may not be written to" if folder.is_dir() else no_folder(folder)
            log.warning(
                "this training cannot receive checkpoint requests: %s; pass socket=None if you intend this", why
            )
        return None
    token = None if token_file is None else read_token(Path(token_file).expanduser())
    if socket != AUTO:
        return Endpoint(requests, Path(path).expanduser(), port=port, token=token)
    trouble = None
    for each in (Path(path), *own_names(Path(path))):
        try:
            endpoint = Endpoint(requests, each, port=port, token=token)
        except EndpointError as error:
            trouble = trouble or error
            if isinstance(error, TakenError):
                continue
            break
        if trouble is not None:
            log.warning("this training is asked at %s, because its own name is taken: %s", each, trouble)
        return endpoint
    log.warning("this training cannot receive checkpoint requests: %s", trouble)
    return None


class Signals:
    """Takes signals for a wish: a checkpoint at the next boundary, then the end. SIGUSR1 is Slurm's warning.

    Asked again after a while, it is the end at once, as without us.
    """

    def __init__(self, requests: RequestQueue, numbers: Collection[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._requests = requests
        self._before: dict[int, object] = {}
        self._heard_at_s = -NEVER_S
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals=True outside the main thread: signals are not listened to")
            return
        requests.signals = True
        for number in numbers:
            self._before[number] = signal.getsignal(number)
            if self._before[number] is signal.SIG_DFL and _is_caught(number):
                log.warning(
                    "signals=True: a handler of %s that Python does not know is replaced (if it is faulthandler's: call"
                    " faulthandler.register after Guard instead, with chain=True)",
                    signal.Signals(number).name,
                )
            signal.signal(number, self._heard)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        """Take no lock here: the thread that is interrupted may hold it."""
        requests, now_s = self._requests, self._requests.clock()
        if not requests.closed and now_s < self._heard_at_s + _SAME_SIGNAL_S:
            return
        if requests.signals_heard or requests.closed:
            self._set_back(number)  # also in place of a handler that was set since, and calls this one
            signal.raise_signal(number)
        self._heard_at_s = now_s
        requests.signals_heard = True
        requests.signalled = number
        requests.asked = True

    def restore(self) -> None:
        """Listen no more. Only the main thread may say so to Python; from another one, the handlers stay."""
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                if signal.getsignal(number) == self._heard:  # else training has put its own in our place meanwhile
                    self._set_back(number)

    def _set_back(self, number: int) -> None:
        before = self._before[number]
        # None: one that Python has not set, as of a program that embeds it. It cannot be put back.
        signal.signal(number, signal.SIG_DFL if before is None else before)  # type: ignore[arg-type]


def _is_caught(number: int) -> bool:
    """Whether this process has a handler of a signal, also one that was set in C: proc(5), SigCgt."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
            name, _, mask = line.partition(":")
            if name == "SigCgt":
                return bool(int(mask, 16) >> (number - 1) & 1)
    return False


class Guarding(Protocol):
    """What wants to know of forks and of the end of the process."""

    def forsake(self) -> None:
        """Be in a child of fork: hold nothing that is the parent's."""
        ...

    def leave(self) -> None:
        """Close the endpoint at the end of the process, so that no request waits at a dead socket."""
        ...


_guards: set[Guarding] = set()
"""Held here, because a guard that its training lets go of still has a write under way and the lock of its folder."""


def look_after(guard: Guarding) -> None:
    """Register this guard for forks and for the end of the process, until it is closed."""
    _guards.add(guard)


def _forked() -> None:
    for guard in list(_guards):
        guard.forsake()


def _exiting() -> None:
    for guard in list(_guards):
        guard.leave()


os.register_at_fork(after_in_child=_forked)
atexit.register(_exiting)


class Guard:
    """Connects one training loop with those who may ask it for checkpoints, and saves by the clock meanwhile.

    state: what `items()` and `load()` make of the model (powerguard.trainer.State), or a function that saves by
    itself, given the step, and returns a SavedCheckpoint; such a function is called only on request.
    root: the folder for this job's checkpoints, on the fastest disk; None: `state` saves by itself.
    job: its name. conduct: the most that this training is willing to do after an emergency checkpoint.
    every_s: seconds from one periodic checkpoint to the next; None: only when asked. keep: how many stay, at least 2.
    snapshots: how many states host memory holds, 1 or 2; None: 1 where memory is short. With 1, a request that comes
    during a write waits for its end, or the write gives way.
    socket: where to be asked; AUTO: `/run/powerguard-trainers/JOB.sock` where there is such a folder; None: nowhere.
    port: also on this port of 127.0.0.1 (0: any), for which `token_file` holds the bearer token.
    remote: a slower tier for every checkpoint in remote_every_s seconds: a mounted folder, or "s3://bucket/prefix".
    remote_end_s: how long a training that is over waits for its newest checkpoint to be copied there; 0: not at all.
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
        remote: Remote | Path | str | None = None,
        remote_every_s: float = 1800.0,
        remote_end_s: float = 300.0,
        keep: int = 2,
        snapshots: int | None = None,
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
        check_options(
            job=job, conduct=conduct, every_s=every_s, remote_every_s=remote_every_s, keep=keep, snapshots=snapshots
        )
        self._clock = clock
        self._ranks = ranks = detect() if ranks is None else checked(ranks)
        self._remote = None if remote is None else second_tier(remote, job, root)
        self._remote_end_s = checked_wait(remote_end_s)
        options = StoreOptions(job=job, keep=keep, snapshots=snapshots, disk=disk, must_exist=must_exist)
        self._checkpointer = checkpointer_of(state, root, options, ranks=ranks, remote=remote is not None)
        requests = RequestQueue(job=job, conduct=After(conduct), clock=clock, ranks=ranks.size, hosts=ranks.hosts)
        self.requests, self._pace = requests, requests.pace
        self._writer = Writer(requests, self._checkpointer)
        self._pace.beside = self._checkpointer.beside
        self._pace.processes = -(-ranks.size // ranks.hosts)
        self._pace.due_s = clock()
        every_s = every_s if every_s is not None and self._checkpointer.beside else NEVER_S
        self._hook = StepHook(requests, self._writer, self._checkpointer, ranks=ranks, every_s=every_s, clock=clock)
        self._endpoint: Endpoint | None = None
        self._uploads: UploadSchedule | None = None
        self._signals: Signals | None = None
        self._began_at: int | None = -1 if new_run else None
        """The step that training goes on from, -1 for none; None: not known yet."""
        self._is_new_or_rolled_back = new_run or restored is not None
        self._has_begun = not isinstance(self._checkpointer, StoreCheckpointer)
        if restored is not None:
            self._began_at = restored.step
            self._begin_from(restored)
        self._together: RankCoordinator | None = None
        try:
            if ranks.size > 1:
                self._together = self._hook.together = RankCoordinator(self.requests, self._writer, ranks)
            if ranks.local_rank == 0:
                self._endpoint = endpoint_of(self.requests, socket, port, token_file)
                self._uploads = requests.uploads = self._uploads_of(job, remote_every_s)
        except BaseException:
            self.close(finish=False)
            raise
        self._signals = Signals(self.requests) if signals else None
        self._agreement = None if self._together is None else self._together.start()
        if self._checkpointer.beside or signals:
            self._writer.start()
        look_after(self)

    def _uploads_of(self, job: str, every_s: float) -> UploadSchedule | None:
        leads = isinstance(self._checkpointer, StoreCheckpointer) and self._checkpointer.leads
        if self._remote is None or not leads:
            return None
        return UploadSchedule(Uploader(self._remote, job=job), every_s=every_s, clock=self._clock)

    def listen(self, numbers: Collection[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        """Listen to signals as with `signals=True`, but from now on: after a framework has set handlers of its own."""
        self._signals = Signals(self.requests, numbers)

    def restore(self, *, step: int | None = None) -> int:
        """Load the newest checkpoint that verifies to the last byte; return how many steps it has done, 0 for none.

        Before the first step, on every rank. From whichever tier has the newest; one that does not verify is set aside,
        and the same one from the next tier taken, or the one before. step: roll back to this step: no other will do,
        and checkpoints of higher steps are set aside at the first save. A training that is rolled back in its run waits
        for what is being written. Raises StoreError when what lies there is another job's or cannot be read, step has
        no checkpoint, or the disk does not go on with that write, and what `state.load` raises.
        """
        step = None if step is None else whole(step)
        self._hook.refuse_forked()
        if self._is_new_or_rolled_back:
            msg = "restore(): training was said to begin elsewhere (leave out new_run, restored and start_from)"
            raise StoreError(msg)
        self._has_begun = True
        with self.requests.lock:
            self._writer.clear()
        if self._agreement is not None and not self._ranks.rank:  # the others wait for it below
            self._agreement.go_back()
        if isinstance(self._checkpointer, StoreCheckpointer):
            with closing(self._ranks.clone()) as ranks:
                restored = self._checkpointer.restore(ranks, self._remote, step)
            if restored is not None:
                self._begin_from(restored[0])
                # A later one may be committed on this host alone, or lie behind a roll-back, and is set aside.
                if self._ranks.hosts > 1 or step is not None:
                    self._began_at, self._has_begun = restored[0].step, False
                self._pace.totals.corrupt += restored[1]
        if self._agreement is not None:
            self._agreement.step = self._pace.step or 0
        return self._pace.step or 0

    def start_from(self, step: int) -> None:
        """Say, in place of `restore`, that something else has loaded the state of this many steps.

        Before the first step, on every rank, also after a `restore` that was overruled. Checkpoints of higher steps are
        set aside at the first save: training was rolled back behind them.
        """
        self._began_at, self._is_new_or_rolled_back = whole(step), True
        self._has_begun = False
        with self.requests.lock:
            self.requests.last = None
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

        step: how many have been done, in all epochs. Raises StopTraining, a SystemExit, when asked to end, or when
        another host of the job has left (code 75); WriteAbandoned once closed.
        """
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            step = whole(step)
        now_s = self._clock()
        pace = self._pace
        if step < (pace.step or 0):
            self._hook.count_again(step)
        seen = pace.seen
        pace.times[seen & (STEPS - 1)] = now_s - pace.stepped_at_s
        pace.seen = seen + 1
        pace.stepped_at_s = now_s
        pace.step = step
        agreement = self._agreement
        if agreement is None:
            if pace.asked or now_s >= pace.due_s:
                self._begin()
                self._hook.attend(step)
            return
        agreement.step = step
        if step >= agreement.due or pace.asked or now_s >= pace.due_s:
            self._begin()
            self._hook.attend(step)

    def poll(self, *, step: int | None = None) -> None:
        """Call it where no step ends for long: training may then stand still, or end, in the middle of things.

        step: the state is whole here, and is the one after this step: it is saved if that is asked for. Without it
        nothing is saved: the state is known to be whole only at a step boundary, or as a phase with a step begins.
        Several ranks save and stand here only in a phase with a step: else they do so at the next boundary.
        """
        step = None if step is None else whole(step)
        if step is not None and self._pace.asked:
            self._begin()
        self._hook.poll(step)

    @contextmanager
    def phase(self, loop: Loop | str, *, step: int | None = None) -> Iterator[None]:
        """Say what the loop is busy with ("eval", "compile", "idle"): no step boundary comes soon.

        step: the state is whole, and is the one after this step. Then it is copied to memory as the phase begins, so
        that an emergency finds it; whatever happens to the model meanwhile (averaged weights swapped in, say) does not
        matter. Without it, the last durable checkpoint is what there is; so it is, too, if host memory holds one
        snapshot and an older state is just being written from it.
        """
        step = None if step is None else whole(step)
        began_s, stepped_at_s, before = self._clock(), self._pace.stepped_at_s, self._pace.loop
        loop = one_of(Loop, loop, "loop")
        held = self.requests.phase_step
        is_within = held is not None and step in (None, held)  # of another phase, whose state it is, too
        if step is not None:
            self._begin()
        self._pace.loop = loop
        if step is not None and self._checkpointer.beside and not is_within:
            self._hook.enter_phase(step)
        try:
            yield
            if step is not None:  # without a state, training stands at the next boundary, where it can save
                self._hook.poll()
        finally:
            if not is_within:
                self._hook.leave_phase()
            with self.requests.lock:
                self._pace.loop = before
                self._pace.stepped_at_s = stepped_at_s + self._clock() - began_s  # none of it is step time

    def save(self, step: int, *, keep_as: str | None = None) -> SavedCheckpoint:
        """Make the state after this step durable and only then return: at the end of training, or by one's own rule.

        keep_as: keep it under `<root>/<keep_as>` as well, until the next one of that name ("best"). All ranks give the
        same. A checkpoint that was asked for meanwhile is this one: training stands still here until it may go on.
        With several ranks every rank calls it for the same step, and a checkpoint that was asked for is another one of
        this step. Raises what the state, the disk or the store raise, NotCommittedError when another rank could not,
        and StopTraining when asked to end.
        """
        step = whole(step)
        self._hook.refuse_forked()
        keep = None if keep_as is None else self._keeper(keep_as)
        self._begin()
        if step < (self._pace.step or 0):
            self._hook.count_again(step)
        began_s = self._clock()
        others = self._together.together(step) if self._together is not None and self._checkpointer.beside else None
        outcome = self._hook.save(step, others, keep)
        self._pace.rested(self._clock() - began_s)
        if isinstance(outcome, SavedCheckpoint):
            return outcome
        raise outcome if isinstance(outcome, Exception) else WriteAbandoned("training has ended")

    def _keeper(self, name: str) -> Callable[[SavedCheckpoint], None]:
        """Return what keeps a checkpoint under this name. Raises StoreError if it is none."""
        if not isinstance(self._checkpointer, StoreCheckpointer):
            msg = "keep_as: a function that saves by itself keeps its own checkpoints (needs a state with items())"
            raise StoreError(msg)
        if not isinstance(name, str) or not _KEPT_NAME.fullmatch(name):
            rule = "letters, digits, '-' and '_', at most 64, and begins with none of step-, bad-, old- (example: best)"
            msg = f"keep_as={name!r}: a name is {rule}"
            raise StoreError(msg)
        return partial(self._checkpointer.keep_as, name=name)

    def before_update(self) -> None:
        """Say that parameters or moments are changed next, and not by an optimizer that `TorchState` was given.

        Only where copies overlap with training (`TorchState(overlap="optimizer")`): the change is then ordered behind
        the copy that is under way, on the GPU. It costs a look at the copies, and waits for none.
        """
        self._checkpointer.before_update()

    def stats(self) -> LastSave | None:
        """Return what the newest save of this process cost, as in the endpoint's status; None before the first."""
        return self._pace.last_save

    def report(self, phase: Phase, bytes_done: int | None = None, bytes_total: int | None = None) -> None:
        """Report progress from within a `save` function. phase: SNAPSHOT, WRITING or COMMITTING."""
        with self.requests.lock:
            if self.requests.saving and self.requests.begun:
                self.requests.progress(self.requests.begun[-1], phase, bytes_done, bytes_total)

    def close(self, *, finish: bool = True) -> None:
        """Say that training has ended. finish: what is being written becomes durable first; else it is given up."""
        self._close(finish=finish, copies=finish)

    def _close(self, *, finish: bool, copies: bool) -> None:
        """copies: the newest checkpoint is copied to slower storage, too, if training has not been asked to end."""
        if self._hook.closed:
            return
        self._hook.closed, self._pace.due_s = True, -NEVER_S  # a step from now on is attended to, and refused
        finish = finish and not self.requests.departed  # a host has left: what is not durable yet will not be
        if self._together is not None and not finish:
            self._together.close()  # the other ranks need not wait for this one any more
        with ExitStack() as last:  # whatever fails or is interrupted here, all of it is closed
            last.callback(_guards.discard, self)
            if self._uploads is not None:
                last.callback(self._uploads.close)
            with ExitStack() as rest:
                rest.callback(self._ranks.close)
                rest.callback(self._checkpointer.close)
                if self._endpoint is not None:
                    rest.callback(self._endpoint.close)
                if self._signals is not None:
                    rest.callback(self._signals.restore)
                rest.callback(self.requests.close)
                if self._together is not None:
                    rest.callback(self._together.close)
                try:
                    self._writer.close(finish=finish)
                except BaseException:
                    self._writer.close(finish=False)
                    raise
            newest, is_asked = self._newest_here(), self.requests.ending is not None or self.requests.signals_heard
            if copies and finish and not is_asked and self._uploads is not None and newest is not None:
                self._uploads.finish(newest, self._remote_end_s)  # with nothing left that could be asked, or signalled

    def _newest_here(self) -> SavedCheckpoint | None:
        """Return the newest checkpoint, if it lies in the root. By its name: a mount that it came from may hang."""
        newest, checkpointer = self.requests.last, self._checkpointer
        if newest is None or not isinstance(checkpointer, StoreCheckpointer):
            return None
        return newest if Path(newest.path).parent == checkpointer.root else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        departed = self.requests.departed
        if kind is None or issubclass(kind, StopTraining):
            self.close()
        else:
            self.leave()
        if departed and isinstance(error, Exception):  # such as a collective whose partner has gone
            raise StopTraining(HOST_LEFT) from error

    # --- Beginning ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Before the first save: what lies there must not count as newer than what is saved from now on.

        Raises StoreError where checkpoints lie there and training has not said that it goes on from them: its own would
        be acknowledged, and the next start would begin at the old ones.
        """
        if self._has_begun or not isinstance(self._checkpointer, StoreCheckpointer):
            return
        newest = self._checkpointer.newest_step()
        if newest is not None and self._began_at is None:
            msg = (
                f"{self._checkpointer.root}: checkpoints up to step {newest} lie there, and restore() was not called:"
                " the next start would begin at them (call guard.restore() before the first step, or give Guard"
                " new_run=True, which sets them aside)"
            )
            raise StoreError(msg)
        if newest is not None and self._began_at is not None and newest > self._began_at:
            self._checkpointer.leave_behind(self._began_at)
        self._has_begun = True

    def _begin_from(self, restored: SavedCheckpoint) -> None:
        """Know the age and the size of what training starts from, from the first second."""
        with self.requests.lock:
            self._pace.step = restored.step
            self._pace.size_bytes = restored.size_bytes // self._ranks.size  # until it is measured
            self.requests.committed(restored)

    def leave(self) -> None:
        """Close after an error, or at the end of the process.

        What is being written becomes durable, except with several ranks: the others may have gone already. Who looks
        at an error, or starts training again after it, does not wait for a copy.
        """
        is_error = sys.exc_info()[0] is not None or hasattr(sys, "last_type")  # the last: what Python ends with
        self._close(finish=self._together is None, copies=not is_error)

    def forsake(self) -> None:
        """In a child of fork (a data loader's worker): disable this guard, release the parent's sockets and locks."""
        self._hook.closed = self._hook.forked = self._has_begun = True
        self.requests.asked, self._pace.due_s = False, -NEVER_S  # the first step here, if there is one, says so
        if self._endpoint is not None:
            self._endpoint.forsake()
        if self._signals is not None:
            self._signals.restore()
        self._checkpointer.forsake()
