"""A process that plays outages for another one, and ends in the middle of one when nobody wants them any more.

It imports next to nothing by itself: what is played comes as bytes, and is loaded where an interrupt can end it. While
it plays it is not interrupted, for that would leave things behind: who plays for long asks in between (`check`).
"""

import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, ClassVar


class UnwantedError(BaseException):
    """Nobody waits for this outage any more."""


class Worker:
    """What such a process knows: whether it is still wanted, and whether it loads just now."""

    unwanted: ClassVar[bool] = False
    loading: ClassVar[bool] = False
    loaded: ClassVar[tuple[bytes, Callable[[int], Any]] | None] = None

    @classmethod
    def begin(cls, wanted: Connection) -> None:
        """Leave interrupts to the parent. wanted: ends when the parent closes it, or dies."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, cls._leave)
        threading.Thread(target=cls._listen, args=(wanted,), daemon=True).start()

    @classmethod
    def _listen(cls, wanted: Connection) -> None:
        with suppress(EOFError, OSError):
            wanted.recv_bytes()
        cls.unwanted = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    @classmethod
    def _leave(cls, *_: object) -> None:
        if cls.loading:
            raise UnwantedError

    @classmethod
    def check(cls) -> None:
        """Raise UnwantedError where nobody waits any more."""
        if cls.unwanted:
            raise UnwantedError

    @classmethod
    def play(cls, what: bytes, seeds: range) -> list[Any]:
        """Play a chunk, until nobody waits for it any more. what: a function of a seed, as `pickle` has it."""
        samples: list[Any] = []
        try:
            if cls.loaded is None or cls.loaded[0] != what:
                cls.loading = True
                cls.loaded = what, pickle.loads(what)  # noqa: S301 - from the process that has started this one
                cls.loading = False
            for seed in seeds:
                cls.check()
                samples.append(cls.loaded[1](seed))
        except UnwantedError:
            return []
        finally:
            cls.loading = False
        return samples
