"""What was last heard of each source: whether it answers, why not, and what a person must put right meanwhile."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import structlog

from powerguard.clock import Clock
from powerguard.core.readings import Reading, SourceFailed
from powerguard.daemon.port import SourceView
from powerguard.sources.base import Source, Troubled

log = structlog.get_logger()

_MOST_REASONS: Final = 8
"""Told of one loss: a peer that fails in a new way each second is not told on for ever."""


class SourceViews:
    """One view for each source of the settings, by UPS and name."""

    def __init__(self, clock: Clock) -> None:
        """Know of none yet."""
        self._clock = clock
        self._sources: dict[str, Source] = {}
        self._views: dict[str, SourceView] = {}
        self._told_at_s: dict[str, float] = {}
        self._reasons: dict[str, set[str]] = {}

    def begin(self, sources: Sequence[tuple[str, str, Source]]) -> None:
        """Know of these, (UPS, name, poller), and of no others; what was heard of those that stay is kept."""
        self._sources = {f"{ups}/{name}": source for ups, name, source in sources}
        self._views = {
            f"{ups}/{name}": self._views.get(f"{ups}/{name}") or SourceView(ups=ups, source=name, up=False)
            for ups, name, _ in sources
        }
        self._told_at_s = dict.fromkeys(self._views, self._clock())

    def take(self, event: Reading | SourceFailed) -> None:
        """Enter what a source tells."""
        key = f"{event.ups}/{event.source}"
        view = self._views.get(key) or SourceView(ups=event.ups, source=event.source, up=False)
        self._told_at_s[key] = self._clock()
        if isinstance(event, Reading):
            self._reasons.pop(key, None)
            self._views[key] = replace(
                view,
                up=True,
                last_reading_at_s=event.at_s,
                polls=view.polls + 1,
                last_error="",
                authenticated=event.authenticated,
            )
            return
        if event.lost:
            self._tell_of_another(key, event)
        self._views[key] = replace(
            view, up=False, polls=view.polls + 1, failures=view.failures + 1, last_error=event.reason
        )

    def _tell_of_another(self, key: str, event: SourceFailed) -> None:
        """Tell when a lost source fails for another reason: the first one is in the story, and may be put right."""
        reasons = self._reasons.setdefault(key, set())
        if event.reason in reasons or len(reasons) >= _MOST_REASONS:
            return
        if reasons:
            log.warning("failure_changed", ups=event.ups, source=event.source, because=event.reason)
        reasons.add(event.reason)

    def all(self) -> Sequence[SourceView]:
        """Return every source, as last heard of."""
        return tuple(replace(view, trouble=self._trouble(key)) for key, view in self._views.items())

    def _trouble(self, key: str) -> str:
        source = self._sources.get(key)
        return source.trouble if isinstance(source, Troubled) else ""

    def silent(self, longer_s: float) -> str:
        """Return one that has told nothing at all, not even a failure, for so long; "" when there is none."""
        now_s = self._clock()
        return next((key for key, at_s in self._told_at_s.items() if now_s - at_s > longer_s), "")
