"""What a guard is put together from: its keeper, its endpoint, its signals; and who tells it of forks and the end."""

import atexit
import logging
import os
import secrets
import signal
import threading
import weakref
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from powerguard.trainer.desk import Desk
from powerguard.trainer.disk import Disk
from powerguard.trainer.endpoint import (
    SOCKETS,
    Endpoint,
    EndpointError,
    TakenError,
    no_folder,
    own_names,
    read_token,
    socket_for,
)
from powerguard.trainer.items import State
from powerguard.trainer.keeper import Keeper, Save, Saving
from powerguard.trainer.ranks import Ranks, RanksError
from powerguard.trainer.store import HERE, Store, StoreError, make_root
from powerguard.trainer.stored import Stored

AUTO = "auto"
"""The socket that the daemon finds by itself."""

_MEET_S = 60.0
_log = logging.getLogger("powerguard.trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How checkpoints are kept under a root; see `guard.Guard`."""

    job: str
    keep: int
    disk: Disk | None
    must_exist: bool


def keeper_of(state: State | Save, root: Path | str | None, place: Place, *, ranks: Ranks, remote: bool) -> Keeper:
    if not callable(state):
        if not callable(getattr(state, "items", None)) or not callable(getattr(state, "load", None)):
            msg = f"state {state!r:.80}: must have items() and load(), as Parts(save, load) and TorchState have"
            raise StoreError(msg)
        if root is None or not str(root):
            msg = "a state with items() needs a root: the folder for its checkpoints"
            raise StoreError(msg)
        if place.must_exist and not Path(root).is_dir():
            msg = f"{root}: is not there, and must_exist=True (is its disk mounted? else make the folder once)"
            raise StoreError(msg)
        store = Store(
            root,
            job=place.job,
            rank=ranks.rank,
            ranks=ranks.size,
            leader=_leads(Path(root), ranks),
            hosts=ranks.hosts,
            keep=place.keep,
            disk=place.disk,
        )
        return Stored(state, store, hosts=ranks.hosts)
    if remote:
        msg = "remote: only a state with items() can be copied to a slower tier"
        raise StoreError(msg)
    if root is not None:
        msg = f"{root}: a root needs a state with items() and load(); a function that saves by itself has its own"
        raise StoreError(msg)
    return Saving(state)


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
                msg = f"rank 0 has not told within {_MEET_S:g} s whether {root} is shared (see what it says)"
                raise RanksError(msg) from error
            is_shared = (root / name).exists()
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
    desk: Desk,
    socket: Path | str | None,
    port: int | None,
    token_file: Path | str | None,
    *,
    folder: Path = SOCKETS,
) -> Endpoint | None:
    """Open the endpoint; None: there is none. folder: where the daemon finds sockets by itself."""
    path = socket_for(desk.job, folder) if socket == AUTO else socket
    if path is None:
        if port is not None:
            msg = f"port {port}: needs a socket too (its folder may be any)"
            raise EndpointError(msg)
        if socket == AUTO:
            why = f"{folder}: may not be written to" if folder.is_dir() else no_folder(folder)
            _log.warning("nobody can ask this training for a checkpoint: %s; socket=None if that is meant", why)
        return None
    token = None if token_file is None else read_token(Path(token_file))
    if socket != AUTO:
        return Endpoint(desk, path, port=port, token=token)
    trouble = None
    for each in (Path(path), *own_names(Path(path))):
        try:
            endpoint = Endpoint(desk, each, port=port, token=token)
        except EndpointError as error:
            trouble = trouble or error
            if isinstance(error, TakenError):
                continue
            break
        if trouble is not None:
            _log.warning("this training is asked at %s, because its own name is taken: %s", each, trouble)
        return endpoint
    _log.warning("nobody can ask this training for a checkpoint: %s", trouble)
    return None


class Signals:
    """Takes SIGTERM and SIGUSR1 (Slurm's warning) for a wish: a checkpoint at the next boundary, then the end.

    Asked twice, it is the end at once, as without us.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._before: dict[int, object] = {}
        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals=True outside the main thread: signals are not listened to")
            return
        desk.signals = True
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._heard)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        """Take no lock here: the thread that is interrupted may hold it."""
        if self._desk.signals_heard:
            self._put_back(number)
            signal.raise_signal(number)
        self._desk.signals_heard = True
        self._desk.signalled = number
        self._desk.asked = True

    def restore(self) -> None:
        """Listen no more."""
        for number in list(self._before):
            self._put_back(number)

    def _put_back(self, number: int) -> None:
        signal.signal(number, self._before.pop(number))  # type: ignore[arg-type] # what getsignal() gave


class Guarding(Protocol):
    """What wants to know of forks and of the end of the process."""

    def forsake(self) -> None:
        """Be in a child of fork: hold nothing that is the parent's."""
        ...

    def leave(self) -> None:
        """The process ends: nobody is asked at a socket where nobody answers."""
        ...


_guards: "weakref.WeakSet[Guarding]" = weakref.WeakSet()


def look_after(guard: Guarding) -> None:
    """Tell this guard of forks and of the end, for as long as it lives."""
    _guards.add(guard)


def _forked() -> None:
    for guard in list(_guards):
        guard.forsake()


def _exiting() -> None:
    for guard in list(_guards):
        guard.leave()


os.register_at_fork(after_in_child=_forked)
atexit.register(_exiting)
