"""What a trainer's first answer means: the whole table in one pure function.

| answer | meaning |
| --- | --- |
| 2xx with our Location | native: follow the checkpoint there |
| 202 without | dumb and asynchronous: begun, no more is told |
| other 2xx | dumb and synchronous: done, says a peer that cannot prove it |
| 409, 423 | one is running: adopt it |
| 404, 405, 501 | no such route: try the alias, once |
| 401, 403 | our token is refused: no use in repeating it |
| 429; 503 with Retry-After | busy: come back when it says, but soon |
| other 5xx | failed: three more tries with the same id |
| anything else | it understands us and says no, or redirects: no use in repeating it |
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from powerguard.wire import CHECKPOINTS_PATH

BACKOFF_S = (0.2, 0.5, 1.0)
"""Pauses before the second, third and fourth try of a failing trainer."""

_NAME = re.compile(re.escape(CHECKPOINTS_PATH) + r"/[A-Za-z0-9._:@+%-]{1,400}")
_SECONDS = re.compile(r"\d{1,9}")


class Meaning(StrEnum):
    NATIVE = "native"
    DUMB_ASYNC = "dumb_async"
    DUMB_SYNC = "dumb_sync"
    ADOPT = "adopt"
    NO_ROUTE = "no_route"
    BAD_TOKEN = "bad_token"  # noqa: S105 - a meaning, not a password
    BUSY = "busy"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """location: path of the checkpoint to follow, never another host. retry_after_s: as told, 1 s if unreadable."""

    meaning: Meaning
    location: str | None = None
    retry_after_s: float = 1.0


def classify(status: int, *, location: str | None, retry_after: str | None) -> Verdict:
    """Say what a trainer's answer to a trigger means. Total: every status has a meaning."""
    path = _path(location)
    seconds = float(retry_after) if retry_after is not None and _SECONDS.fullmatch(retry_after) else 1.0
    match status:
        case _ if 200 <= status < 300 and path is not None:
            return Verdict(meaning=Meaning.NATIVE, location=path)
        case 202:
            return Verdict(meaning=Meaning.DUMB_ASYNC)
        case _ if 200 <= status < 300:
            return Verdict(meaning=Meaning.DUMB_SYNC)
        case 409 | 423:
            return Verdict(meaning=Meaning.ADOPT, location=path)
        case 404 | 405 | 501:
            return Verdict(meaning=Meaning.NO_ROUTE)
        case 401 | 403:
            return Verdict(meaning=Meaning.BAD_TOKEN)
        case 429:
            return Verdict(meaning=Meaning.BUSY, retry_after_s=seconds)
        case 503 if retry_after is not None:
            return Verdict(meaning=Meaning.BUSY, retry_after_s=seconds)
        case _ if status >= 500:
            return Verdict(meaning=Meaning.FAILED)
        case _:
            return Verdict(meaning=Meaning.REFUSED)


def _path(location: str | None) -> str | None:
    """Return the path of a Location that is one of ours. Its host, if it names one, is never followed."""
    if location is None or len(location) > 2000:
        return None
    try:
        path = urlsplit(location).path
    except ValueError:
        return None
    return path if _NAME.fullmatch(path) else None
