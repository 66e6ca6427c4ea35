"""The journal's records as values, how one step becomes rows, and the recording that a replay needs.

The recording holds every input of `step` in the order in which `step` saw it, from a minute before the outage to its
end. It is packed small: a reading a second for hours must not fill the journal. Several inputs are one row, and each
holds only what differs from the one before of its kind (of the same UPS and source, of the same trainer); a tick is
only its time. A step pays with a place in a list. What has gathered is written with an entry that is written anyway,
and the minute before the outage never with one that actions wait for.
"""

import dataclasses
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from powerguard.core.decide.machine import LATEST_S
from powerguard.core.model.actions import Action, Detail, Note, Scalar
from powerguard.core.model.events import Done, Event, Failed, Reading, Tick
from powerguard.core.model.policy import Policy
from powerguard.core.model.serialisation import KIND, PlainError, from_plain, to_plain
from powerguard.core.model.state import Online, State
from powerguard.core.supply.fusion import plausible

SKIPPED = frozenset({"provenance"})
"""Decisions do not depend on it, it never changes, and it is the longest; readings among the `entries` have it."""
_WHOSE = ("ups", "source", "trainer", "action_id")
_DEFAULTS: dict[str, dict[str, object]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStart:
    """Where a replay begins: state and policy (as the settings say) before the first event. at_s: that moment.

    restored: a daemon that had been restarted, or a host that had come back, went on from here.
    """

    at_s: float
    policy: Policy
    state: State
    restored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvents:
    """Events of one outage in the order in which `step` saw them. dropped: how many there was no room for."""

    outage: str
    start: ReplayStart | None = None
    events: tuple[Event, ...] = ()
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One row: what was heard, in which boot, and both clocks when it was written."""

    boot_id: str
    at_s: float
    wall: float
    heard: RecordedEvents


def dump(value: object) -> str:
    """Return JSON text, ASCII only: a lone surrogate of a hostile peer must not make the row unwritable."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def pack(heard: RecordedEvents) -> str:
    """Return the text of a row. Never raises: an event that cannot be written counts as dropped."""
    dropped = heard.dropped
    events: list[dict[str, object] | float] = []
    known: dict[tuple[object, ...], dict[str, object]] = {}
    last: tuple[object, ...] = ()
    for event in heard.events:
        if isinstance(event, Tick) and math.isfinite(event.at_s):
            events.append(event.at_s)
            continue
        try:
            plain = plain_of(event)
        except PlainError:
            dropped += 1
            continue
        whose = _whose(plain)
        before = known.get(whose) or _defaults(event)
        known[whose] = plain
        kept = () if whose == last else (KIND, *_WHOSE)
        last = whose
        same = {name for name, value in plain.items() if name in before and before[name] == value}
        events.append({name: value for name, value in plain.items() if name not in same or name in kept})
    row: dict[str, object] = {"events": events}
    if heard.start is not None:
        try:
            row["start"] = to_plain(heard.start)
        except PlainError:
            dropped += 1
    if dropped:
        row["dropped"] = dropped
    return dump(row)


def plain_of(event: Event) -> dict[str, object]:
    """Return an event as JSON-able data, without fields that decisions do not use. Raises PlainError."""
    if isinstance(event, Reading):
        event = plausible(event)  # As the machine takes it: one invalid number must not cost the whole reading.
    plain = cast("dict[str, object]", to_plain(event))
    return {name: value for name, value in plain.items() if name not in SKIPPED}


def unpack(outage: str, text: str) -> RecordedEvents:
    """Return the events of a row. Unreadable ones (of a newer version, damaged) count as dropped."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        return RecordedEvents(outage=outage, dropped=1)
    found = row.get("dropped")
    dropped = found if type(found) is int and found > 0 else 0
    events: list[Event] = []
    known: dict[tuple[str, ...], dict[str, object]] = {}
    whose: tuple[str, ...] = ()
    packed = row.get("events")
    for each in packed if isinstance(packed, list) else ():
        if type(each) in (float, int) and math.isfinite(each):
            events.append(Tick(at_s=each))
            continue
        if not isinstance(each, dict):
            dropped += 1
            continue
        whose = _whose(each) if KIND in each else whose
        plain = known.get(whose, {}) | each
        known[whose] = plain
        try:
            events.append(cast("Event", from_plain(plain, Event)))
        except PlainError:
            dropped += 1
    start = None
    if "start" in row:
        try:
            start = from_plain(row["start"], ReplayStart)
        except PlainError:
            dropped += 1
    return RecordedEvents(outage=outage, start=start, events=tuple(events), dropped=dropped)


def _whose(plain: dict[str, object]) -> tuple[str, ...]:
    """Return the key by which events follow one another. A value that is not text is damaged, and dropped."""
    values = (plain.get(name) for name in (KIND, *_WHOSE))
    return tuple(word if isinstance(word, str) else "" for word in values)


def _defaults(event: Event) -> dict[str, object]:
    """Values that a reader fills in by itself."""
    kind = type(event).__name__
    if kind not in _DEFAULTS:
        fields = [each for each in dataclasses.fields(event) if each.default is not dataclasses.MISSING]
        _DEFAULTS[kind] = {each.name: to_plain(each.default) for each in fields}
    return _DEFAULTS[kind]


def joined(rows: Sequence[Recorded]) -> tuple[Recorded, ...]:
    """Return the rows of an outage with those that follow each other in one life of the daemon made one."""
    out: list[Recorded] = []
    for row in rows:
        last = out[-1] if out else None
        if last is None or row.heard.start is not None or row.boot_id != last.boot_id:
            out.append(row)
            continue
        heard = dataclasses.replace(
            last.heard,
            events=last.heard.events + row.heard.events,
            dropped=last.heard.dropped + row.heard.dropped,
        )
        out[-1] = dataclasses.replace(last, heard=heard)
    return tuple(out)


BEFORE_S = 60.0
"""Time before an outage that belongs to its recording: enough to see the load, the charge and the source at rest."""
BEFORE_EVENTS = 400
LIMIT_EVENTS = 10_000
"""Most events of one outage in memory. If no entry is written for that long, the oldest are dropped."""
QUICK_EVENTS = 32
"""An entry that actions wait for takes no more than this along."""


class Recorder:
    """One for each life of the daemon; fed by its loop. The outage's id comes with the phase."""

    def __init__(self) -> None:
        """Begin without events."""
        self._before: deque[tuple[Event, State]] = deque(maxlen=BEFORE_EVENTS)
        self._outage = ""
        self._start: ReplayStart | None = None
        self._events: deque[Event] = deque()
        self._dropped = 0
        self._closed: list[RecordedEvents] = []

    def hear(self, event: Event | None, at_s: float, before: State, after: State, policy: Policy) -> None:
        """Take one event, the state before it and the state it led to. None: the state was restored at a start."""
        if not -LATEST_S <= at_s <= LATEST_S:
            return  # Not a time: the machine has ignored it, too.
        phase = after.phase
        outage = "" if isinstance(phase, Online) else phase.outage.id
        if event is not None:
            if self._outage:
                self._add(event)
            else:
                self._before.append((event, before))
                while self._before[0][0].at_s < at_s - BEFORE_S:
                    self._before.popleft()
        if outage == self._outage:
            if after.learned != before.learned:
                self._before.clear()  # A recording begins with the measurements that its outage was decided with.
            return
        self._close()
        if outage and event is None:
            self._start = ReplayStart(at_s=at_s, policy=policy, state=after, restored=True)
        elif outage:
            first_at_s, first = (self._before[0][0].at_s, self._before[0][1]) if self._before else (at_s, before)
            self._start = ReplayStart(at_s=first_at_s, policy=policy, state=first)
            self._events.extend(event for event, _ in self._before)
        self._before.clear()
        self._outage = outage

    def take(self, *, hurry: bool) -> tuple[RecordedEvents, ...]:
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
        """The outage ends, or another one takes its place: its events wait under its own name."""
        if self._outage and (self._events or self._start is not None):
            self._closed.append(self._drain())

    def _drain(self) -> RecordedEvents:
        heard = RecordedEvents(
            outage=self._outage, start=self._start, events=tuple(self._events), dropped=self._dropped
        )
        self._start, self._dropped = None, 0
        self._events.clear()
        return heard


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One step of the machine, to be durable before its first action starts.

    event: what was answered; None where it is not worth a line (a tick, the hundredth equal reading on utility).
    state: after the step. outcome, figures: of the outage that runs, or ends, with this step; figures add up.
    heard: what an outage's replay needs, as far as it has not been written yet.
    """

    at_s: float
    state: State
    event: Event | None = None
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
    outcome: str = ""
    figures: Detail = ()
    heard: tuple[RecordedEvents, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageRecord:
    """One outage. at_s are of the boot in which they were taken; wall is Unix time; ended_* are None while it runs.

    outcome: of the step that ended it ("" if it has none); "lost" if the journal does not have the end.
    """

    id: str
    boot_id: str
    started_at_s: float
    started_wall: float
    ended_at_s: float | None = None
    ended_wall: float | None = None
    outcome: str = ""
    figures: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def lasted_s(self) -> float | None:
        """Seconds that it lasted, by the boot's clock if known; None while it runs, or if unknown.

        Over a return, by the wall clock at its end: the daemon's own sum has the clock at boot, which may have been
        wrong.
        """
        if self.ended_wall is None:
            return None
        counted = self.figures.get("lasted_s")
        seconds = self.ended_wall - self.started_wall
        if isinstance(counted, int | float) and (seconds < 0.0 or not self.figures.get("returned")):
            return float(counted)
        return round(seconds, 3) if seconds >= 0.0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the story. kind: event, action, outcome, note, or gap (lines that memory could not hold).

    event: class name or, for a note, its event. action: id of the action that it orders or answers.
    """

    seq: int
    boot_id: str
    at_s: float
    wall: float
    outage: str | None
    kind: str
    event: str
    because: str
    payload: Mapping[str, object]
    action: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The journal's content when it was opened.

    state: None when there is none or it cannot be read (trouble says why). boot_id, at_s, wall: of that state.
    in_flight: actions that were ordered and have no outcome; the oldest first.
    durable: the journal is on disk and can be written; else it lives in memory until the disk is back.
    lost: records of earlier runs that could not be read, in words; "" if none.
    """

    state: State | None = None
    boot_id: str = ""
    at_s: float = 0.0
    wall: float = 0.0
    outage: OutageRecord | None = None
    in_flight: tuple[Action, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    durable: bool = False
    trouble: str = ""
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The newest state, as text."""

    boot_id: str
    at_s: float
    wall: float
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One step as rows."""

    lines: tuple[Line, ...] = ()
    outages: tuple[OutageRecord, ...] = ()
    snapshot: Snapshot | None = None
    recorded: tuple[Recorded, ...] = ()
    problem: str = ""


def advance(open_outage: OutageRecord | None, entry: Entry, boot_id: str, wall: float) -> tuple[OutageRecord, ...]:
    """Return the outages that this step touches as they are after it; the last one is open, if any is."""
    phase = entry.state.phase
    running = None if isinstance(phase, Online) else phase.outage
    touched: list[OutageRecord] = []
    if open_outage is not None and (running is None or running.id != open_outage.id):
        figures = {**open_outage.figures, **dict(entry.figures)} if running is None else open_outage.figures
        touched.append(
            replace(open_outage, ended_at_s=entry.at_s, ended_wall=wall, outcome=entry.outcome, figures=figures)
        )
    if running is not None:
        record = open_outage
        if record is None or record.id != running.id:
            # Negative: the host went down with it, in the boot before.
            since_s = min(running.since_s, entry.at_s)
            began_wall = wall - (entry.at_s - since_s)
            record = OutageRecord(id=running.id, boot_id=boot_id, started_at_s=since_s, started_wall=began_wall)
        figures = {**record.figures, **dict(entry.figures)}
        touched.append(replace(record, figures=figures, outcome=entry.outcome or record.outcome))
    return tuple(touched)


def _without_infinities(entry: Entry, problems: list[str]) -> Entry:
    """Return entry with its own numbers fit for a row: one that is not would keep every later step off the disk."""
    figures = tuple(each for each in entry.figures if not isinstance(each[1], float) or math.isfinite(each[1]))
    if figures == entry.figures and math.isfinite(entry.at_s):
        return entry
    problems.append("Entry: at_s and figures must be finite numbers")
    return replace(entry, figures=figures, at_s=entry.at_s if math.isfinite(entry.at_s) else 0.0)


def prepare(entry: Entry, open_outage: OutageRecord | None, boot_id: str, wall: float) -> Record:
    """Return one step as rows. Never raises: what cannot be written is left out, and `problem` names it."""
    problems: list[str] = []
    entry = _without_infinities(entry, problems)
    outages = advance(open_outage, entry, boot_id, wall)
    name = outages[-1].id if outages else None
    lines: list[Line] = []

    def add(kind: str, value: Event | Action | Note, event: str, because: str = "", action: str | None = None) -> None:
        try:
            payload = cast("dict[str, object]", to_plain(value))
        except PlainError as error:
            problems.append(f"{type(value).__name__}.{error}")
            payload = {}
        lines.append(
            Line(
                seq=0,
                boot_id=boot_id,
                at_s=entry.at_s,
                wall=wall,
                outage=name,
                kind=kind,
                event=event,
                because=because,
                payload=payload,
                action=action,
            )
        )

    if isinstance(entry.event, Done | Failed):
        reason = entry.event.reason if isinstance(entry.event, Failed) else ""
        add("outcome", entry.event, type(entry.event).__name__, reason, entry.event.action.id)
    elif entry.event is not None:
        add("event", entry.event, type(entry.event).__name__)
    for note in entry.notes:
        add("note", note, note.event, note.because)
    for action in entry.actions:
        add("action", action, type(action).__name__, action=action.id)
    snapshot = None
    try:
        snapshot = Snapshot(boot_id=boot_id, at_s=entry.at_s, wall=wall, state=dump(to_plain(entry.state)))
    except PlainError as error:
        problems.append(f"State.{error}")
    recorded = tuple(Recorded(boot_id=boot_id, at_s=entry.at_s, wall=wall, heard=heard) for heard in entry.heard)
    return Record(
        lines=tuple(lines), outages=outages, snapshot=snapshot, recorded=recorded, problem="; ".join(problems)
    )
