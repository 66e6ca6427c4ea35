"""Values that a UPS daemon reports as text (NUT's upsd, apcupsd), checked like the numbers of a card.

A value is taken into a `Draft` or rejected into it; `reading` then checks the fields against each other.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from powerguard.core.model.events import Reading
from powerguard.ups.profiles.decode import Draft, cross_check, finish
from powerguard.ups.profiles.vocabulary import (
    CEILINGS,
    CEILINGS_MIN,
    INPUT_GONE_V,
    INPUT_THERE_V,
    NUMBERS,
)

_DECIMAL: Final = re.compile(r"[-+]?[0-9]{1,18}(?:\.[0-9]{1,9})?")
_SATURATED_S: Final = frozenset(float(each) for each in CEILINGS) | {60.0 * each for each in CEILINGS_MIN}
"""A 16-bit RunTimeToEmpty that is full: USB UPSes at a small load, in seconds; and cards that count in minutes."""


def enter(draft: Draft, field: str, text: str, reported_by: str, *, times: float = 1.0) -> float | None:
    """Take one number, in `times` our unit. Return it; None, with the reason in the draft, when it is not believed."""
    text = text.strip()
    if not _DECIMAL.fullmatch(text):
        draft.reject(field, reported_by, text[:64].encode(), "no decimal number")
        return None
    return take(draft, field, round(float(text) * times, 6), reported_by, raw=text.encode())


def share_of_charge(text: str) -> float | None:
    """Return a setting that is a share of the charge, in percent; None where the text is none."""
    if not _DECIMAL.fullmatch(text.strip()):
        return None
    share = float(text)
    return share if 0.0 <= share <= 100.0 else None


def rating(text: str) -> float | None:
    """Return a rating in watts, as `ups.realpower.nominal` and NOMPOWER have it; None where the text is none."""
    number = text.strip().partition(" ")[0]
    return float(number) if _DECIMAL.fullmatch(number) and float(number) > 0 else None


def take(draft: Draft, field: str, value: float, reported_by: str, *, raw: bytes = b"") -> float | None:
    """Take one number in our unit; raw: as it was sent. None, with the reason in the draft, when it is not believed."""
    window = NUMBERS[field]
    if not window.lowest <= value <= window.highest:
        why = f"{value:g} is outside of what is believable ({window.lowest:g} to {window.highest:g})"
        draft.reject(field, reported_by, raw, why)
        return None
    if field == "runtime_s" and value in _SATURATED_S:
        draft.reject(field, reported_by, raw, "means: more than it can count")
        return None
    draft.candidates.setdefault(field, []).append((value, reported_by))
    if field not in draft.numbers:
        draft.numbers[field], draft.provenance[field] = value, reported_by
    return value


def is_input_there(volts: Sequence[float]) -> bool | None:
    """Whether utility is at the input by its volts, all lines alike; None if they show neither."""
    if not volts:
        return None
    if all(volt >= INPUT_THERE_V for volt in volts):
        return True
    return False if all(volt < INPUT_GONE_V for volt in volts) else None


def reading(
    draft: Draft,
    *,
    at_s: float,
    ups: str,
    source: str,
    forced_shutdown: bool = False,
    authenticated: bool = False,
    further_alarms: tuple[str, ...] = (),
) -> Reading:
    """Check the fields against each other and return the reading. A missing output source is `unknown`."""
    cross_check(draft)
    result = finish(draft).reading(at_s=at_s, ups=ups, source=source, authenticated=authenticated)
    return replace(result, forced_shutdown=forced_shutdown, alarms=tuple(sorted((*result.alarms, *further_alarms))))
