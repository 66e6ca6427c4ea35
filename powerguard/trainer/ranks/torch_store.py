"""Ranks over the store that torch.distributed has already: nothing to set up, nothing more to listen on.

A client of torch's TCPStore is one socket under one lock: a thread that waits holds up every other call of that client
(measured: 28 us for a `check`, seconds behind a `wait`). So each thread works on a clone, and never on the store that
torch itself uses. A wait that times out prints two warnings, so short waits look again and again instead.
"""

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Self, TypeVar

from powerguard.trainer.ranks.base import Place, RanksError, boottime_s, farewell, meet

_T = TypeVar("_T")
_CALL: Final = timedelta(seconds=10)
_SHORT_S: Final = 5.0  # up to here a wait looks again and again
_LOOK_S: Final = (0.0003, 0.02)  # from often to seldom
_made = itertools.count()


class TorchRanks(Place):
    """One rank's connection through a clone of torch's store.

    store: a torch.distributed.Store that is shared by all ranks and can be cloned (TCPStore, FileStore, HashStore, or
    one of these behind a PrefixStore); None: the one of the initialised process group. prefix: stands before all keys;
    None: counted, as all ranks make these objects in the same order. join_s: how long to wait for all ranks to come.
    """

    may_hang = True

    def __init__(
        self,
        store: Any = None,  # noqa: ANN401 - torch's Store, which cannot be named where torch is not
        rank: int | None = None,
        size: int | None = None,
        *,
        prefix: str | None = None,
        join_s: float = 300.0,
    ) -> None:
        import torch.distributed as dist

        if store is None:
            if not dist.is_initialized():
                msg = "torch.distributed is not initialised: call init_process_group first, or give a store"
                raise RanksError(msg)
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
        rank = dist.get_rank() if rank is None else rank
        size = dist.get_world_size() if size is None else size
        self._prefix = prefix or f"powerguard/{next(_made)}"
        self._errors = (dist.DistError, RuntimeError, OSError)
        self._given = store  # in rank 0 it may be the server, which ends with its last reference
        self._take(store, dist)
        super().__init__(rank, size)
        super().__init__(rank, size, meet(self, rank, size, join_s))
        self._met = True  # and not a clone

    def _take(self, store: Any, dist: Any) -> None:  # noqa: ANN401 - as above
        try:
            self._base = store.clone()
            self._store = dist.PrefixStore(self._prefix, self._base)
            self._store.set_timeout(_CALL)
        except self._errors as error:
            msg = f"torch's store cannot be used by a second thread: {_first_line(error)} (use a TCPStore)"
            raise RanksError(msg) from error

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        until_s = boottime_s() + timeout_s
        if timeout_s > _SHORT_S:
            try:
                self._store.wait([key], timedelta(seconds=timeout_s))
            except self._errors as error:
                if boottime_s() < until_s - 1.0:
                    raise RanksError(_lost(error)) from error
        look_s, most_s = _LOOK_S
        while not self.check(key):
            left_s = until_s - boottime_s()
            if left_s <= 0:
                raise TimeoutError(key)
            time.sleep(min(look_s, left_s))
            look_s = min(1.5 * look_s, most_s)
        return bytes(self._ask(lambda: self._store.get(key)))

    def check(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def claim(self, key: str, value: bytes) -> bytes:
        return bytes(self._ask(lambda: self._store.compare_set(key, "", value.decode("ascii"))))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda: self._store.add(key, amount)))

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def clone(self) -> Self:
        import torch.distributed as dist

        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._met = False
        twin._take(self._base, dist)
        return twin

    def close(self) -> None:
        if self._met:
            farewell(self)
            self._met = False
        self._store = self._base = self._given = _Closed()

    def _ask(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except self._errors as error:
            raise RanksError(_lost(error)) from error


class _Closed:
    """What is left of a connection that was closed; the last reference to torch's is gone, and with it its socket."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - stands in for every call
        msg = "this connection was closed"
        raise RanksError(msg)


def _lost(error: Exception) -> str:
    return f"torch's store does not answer: {_first_line(error)} (is the process that holds it, usually rank 0, alive?)"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
