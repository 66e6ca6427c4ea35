"""Which sources of a UPS a recording has heard, how often each told, and where one of them would have been lost."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from powerguard.core.events import Event
from powerguard.core.readings import Reading, SourceFailed

MISSES: Final = 3


def sources_of(events: Sequence[Event], ups: str) -> tuple[str, ...]:
    """Return the sources of one UPS, those that were only ever lost among them, in the order of their first word."""
    told = (event for event in events if isinstance(event, Reading | SourceFailed) and event.ups == ups)
    return tuple(dict.fromkeys(event.source for event in told))


def coarseness_s(events: Sequence[Event], ups: str) -> float:
    """Median time between the readings of one source, of several the slowest; 1 where there are too few to tell."""
    every_s = [_every_s(events, ups, source) for source in sources_of(events, ups)]
    return max((each for each in every_s if each is not None), default=1.0)


def _every_s(events: Sequence[Event], ups: str, source: str) -> float | None:
    at_s = [event.at_s for event in events if _is_of(event, ups, source)]
    gaps = [later - earlier for earlier, later in pairwise(at_s) if later > earlier]
    return median(gaps) if gaps else None


def _is_of(event: Event, ups: str, source: str) -> bool:
    return isinstance(event, Reading) and event.ups == ups and event.source == source


def with_losses(events: Sequence[Event], *, ups: str, every_s: float) -> tuple[Event, ...]:
    """Add where a source is silent for longer than three of its polls: there the daemon would have lost it.

    every_s: how often it is polled at least, seconds; a source that tells less often is polled as often as it tells.
    """
    lost: list[Event] = []
    for source in sources_of(events, ups):
        polled_s = max(every_s, _every_s(events, ups, source) or every_s)
        silent_s = MISSES * polled_s
        for last, event in pairwise([event for event in events if _is_of(event, ups, source)]):
            if event.at_s - last.at_s > silent_s + 0.5 * polled_s:
                reason = f"the recording has no reading for {event.at_s - last.at_s:.0f} s"
                lost_s = last.at_s + silent_s
                lost.append(SourceFailed(at_s=lost_s, ups=ups, source=source, reason=reason, lost=True))
    return tuple(sorted((*events, *lost), key=lambda event: event.at_s))
