"""The journal's records as values, and how one step becomes rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from powerguard.core.model.actions import Action, Detail, Note, Scalar
from powerguard.core.model.events import Done, Event, Failed
from powerguard.core.model.serialisation import PlainError, to_plain
from powerguard.core.model.state import Online, State
from powerguard.daemon.journal.recording import Recorded, RecordedEvents, dump


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
            # For an outage that began in another boot, since_s is meaningless here.
            since_s = running.since_s if 0 <= running.since_s <= entry.at_s else entry.at_s
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
