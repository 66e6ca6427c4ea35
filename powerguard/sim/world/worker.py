"""A process that plays outages for another one, and ends in the middle of whatever it does when that one wants no more.

It imports next to nothing by itself: what is played comes as bytes, and is loaded where an interrupt can end it.
"""

import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, ClassVar


class Worker:
    """What such a process knows: whether it is still wanted, and whether it plays just now."""

    unwanted: ClassVar[bool] = False
    playing: ClassVar[bool] = False
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
        """End the outage that is played, wherever it is; its folders are taken away on the way out."""
        if cls.playing:
            raise KeyboardInterrupt

    @classmethod
    def play(cls, what: bytes, seeds: range) -> list[Any]:
        """Play a chunk, until nobody waits for it any more. what: a function of a seed, as `pickle` has it."""
        samples: list[Any] = []
        cls.playing = True
        try:
            if cls.loaded is None or cls.loaded[0] != what:
                cls.loaded = what, pickle.loads(what)  # noqa: S301 - from the process that has started this one
            for seed in seeds:
                if cls.unwanted:
                    break
                samples.append(cls.loaded[1](seed))
        except KeyboardInterrupt:
            return []
        finally:
            cls.playing = False
        return samples
