"""What a source tells the log of: each oddity once, and each trouble once until it was right again."""

from typing import Final

import structlog

log = structlog.get_logger(__name__)

_MOST_ODDITIES: Final = 100
_MOST_OF_A_TROUBLE: Final = 8


class Notices:
    """One source's notices. A peer that makes up new ones every second is not told on for ever."""

    def __init__(self, ups: str, source: str) -> None:
        """Tell of this source of this UPS."""
        self._keyed = {"ups": ups, "source": source}
        self._told: set[str] = set()
        self._standing: dict[str, set[str]] = {}
        self._troubles: dict[str, str] = {}

    @property
    def trouble(self) -> str:
        """What a person must put right now; "" while nothing."""
        return "; ".join(self._troubles.values())

    def once(self, event: str, because: str, *, key: str = "", **keyed: object) -> None:
        """Tell an oddity that stays. key: what makes it the same one, where its words change."""
        key = key or because
        if key not in self._told and len(self._told) < _MOST_ODDITIES:
            self._told.add(key)
            log.warning(event, because=because, **self._keyed, **keyed)

    def forget(self, key: str) -> None:
        """Tell this oddity again when it comes again."""
        self._told.discard(key)

    def stands(self, event: str, because: str) -> None:
        """Tell what somebody must put right: it stands until `is_right`, and may be broken anew months later."""
        self._troubles[event] = because
        told = self._standing.setdefault(event, set())
        if because not in told and len(told) < _MOST_OF_A_TROUBLE:
            told.add(because)
            log.error(event, because=because, **self._keyed)

    def is_right(self, *events: str) -> None:
        """Note that these do not stand any more."""
        for event in events:
            self._standing.pop(event, None)
            self._troubles.pop(event, None)
