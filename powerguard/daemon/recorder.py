"""Remembers what the daemon hears, so that an outage can be replayed: the last minute always, an outage whole.

It costs a step nothing but a place in a list. What has gathered is written with an entry that is written anyway, and
the minute before the outage never with one that actions wait for.
"""

from collections import deque

from powerguard.core.events import Done, Event, Failed, Tick
from powerguard.core.machine import LATEST_S
from powerguard.core.model import Online, State
from powerguard.core.policy import Policy
from powerguard.daemon.journal.recording import Heard, Start

BEFORE_S = 60.0
"""So much of the time before an outage belongs to it: enough to see the load, the charge and the source at rest."""
BEFORE_EVENTS = 400
LIMIT_EVENTS = 2000
"""Of one outage in memory; where an entry has not been written for so long, the oldest go."""
QUICK_EVENTS = 16
"""An entry that actions wait for takes no more than this along."""


class Recorder:
    """One for each life of the daemon; fed by its loop. The outage's id comes with the phase."""

    def __init__(self) -> None:
        """Begin with nothing heard."""
        self._before: deque[tuple[Event, State]] = deque(maxlen=BEFORE_EVENTS)
        self._outage = ""
        self._start: Start | None = None
        self._events: deque[Event] = deque()
        self._dropped = 0
        self._closed: list[Heard] = []

    def hear(self, event: Event | None, at_s: float, before: State, after: State, policy: Policy) -> None:
        """Take one event, the state before it and the state it led to. None: the state was restored at a start."""
        if not -LATEST_S <= at_s <= LATEST_S:
            return  # No time at all: the machine has passed it over, too.
        phase = after.phase
        outage = "" if isinstance(phase, Online) else phase.outage.id
        counts = event is not None and not isinstance(event, Tick | Done | Failed)
        if event is not None and counts:
            if self._outage:
                self._add(event)
            else:
                self._before.append((event, before))
                while self._before[0][0].at_s < at_s - BEFORE_S:
                    self._before.popleft()
        if outage == self._outage:
            return
        self._close()
        if outage and event is None:
            self._start = Start(at_s=at_s, policy=policy, state=after, restored=True)
        elif outage:
            first_at_s, first = (self._before[0][0].at_s, self._before[0][1]) if self._before else (at_s, before)
            self._start = Start(at_s=first_at_s, policy=policy, state=first)
            self._events.extend(event for event, _ in self._before)
        self._before.clear()
        self._outage = outage

    def take(self, *, hurry: bool) -> tuple[Heard, ...]:
        """Hand over what has gathered, to be written. hurry: actions wait for this entry."""
        if hurry and len(self._events) + sum(len(heard.events) for heard in self._closed) > QUICK_EVENTS:
            return ()
        taken, self._closed = self._closed, []
        if self._events or self._start is not None:
            taken.append(self._drain())
        return tuple(taken)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) > LIMIT_EVENTS:
            self._events.popleft()
            self._dropped += 1

    def _close(self) -> None:
        """The outage ends, or another one takes its place: what was heard of it waits under its own name."""
        if self._outage and (self._events or self._start is not None):
            self._closed.append(self._drain())

    def _drain(self) -> Heard:
        heard = Heard(outage=self._outage, start=self._start, events=tuple(self._events), dropped=self._dropped)
        self._start, self._dropped = None, 0
        self._events.clear()
        return heard
