"""A limit for calls into the system that may never return: a mount whose server has gone."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, TypeVar

from powerguard.trainer.manifest import StoreError
from powerguard.trainer.tiers.base import Kind, TierError

_T = TypeVar("_T")

LIMIT_S: Final = 60.0
"""NFS repeats a request after 60 s (timeo=600): what answers within one period is slow, not gone."""


def within(limit_s: float, what: Callable[[], _T], where: str) -> _T:
    """Do it in a thread of its own, and leave that behind when it hangs: TierError (stalled).

    Raises what it raises: OSError, StoreError, TierError. What hangs may go on much later: it must not write into
    memory that somebody else uses.
    """
    answers: SimpleQueue[tuple[_T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((what(), None))
        except (OSError, StoreError, TierError) as error:
            answers.put((None, error))

    Thread(target=run, name="powerguard-mount", daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit_s)
    except Empty:
        msg = f"{where}: no answer within {limit_s:g} s (is its server there?)"
        raise TierError(Kind.STALLED, msg) from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value] # there was no error, so it is what came back
