"""What a user hands to a guard, looked at where he does it: days later, in a step, it would end his training."""

import operator
from enum import StrEnum
from typing import TypeVar

from powerguard.trainer.manifest import MAX_TEXT, StoreError
from powerguard.wire import MAX_STEP, After

_Word = TypeVar("_Word", bound=StrEnum)


def check_options(*, job: object, conduct: str, every_s: object, remote_every_s: object, keep: object) -> None:
    """Refuse now what would fail at a step, days from now. Raises StoreError."""
    wrong = ""
    one_of(After, conduct, "conduct")
    if not isinstance(job, str) or not 0 < len(job) <= MAX_TEXT or not job.isprintable():
        wrong = f"job={job!r}: must be the training's name, 1 to {MAX_TEXT} printable characters"
    elif "/" in job:
        wrong = f"job={job!r}: must be a name without '/', which cannot stand in the name of a socket or folder"
    if not isinstance(keep, int):
        wrong = f"keep={keep!r}: must be how many checkpoints stay, 2 or more"
    for name, seconds in (("every_s", every_s), ("remote_every_s", remote_every_s)):
        never = seconds is None and name == "every_s"
        if not never and not (isinstance(seconds, (int, float)) and 0 < seconds < float("inf")):
            wrong = f"{name}={seconds!r}: must be seconds, more than 0"
    if wrong:
        raise StoreError(wrong)


def whole(step: object) -> int:
    """Return a step as a plain number, also of a numpy scalar or a tensor.

    Raises TypeError if it is no number, and ValueError if no checkpoint can have this step.
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
