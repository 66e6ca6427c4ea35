"""The journal of decisions, durable before they are carried out (docs/reference/journal.md)."""

from powerguard.daemon.journal.journal import Executor, Inline, Journal, JournalLimits, WorkerThread
from powerguard.daemon.journal.queries import (
    counters,
    following,
    history,
    next_boot,
    notes,
    outage,
    pairs,
    read_all,
    recent,
    recording,
)
from powerguard.daemon.journal.records import Entry, Line, Loaded, OutageRecord, Recorded, RecordedEvents, ReplayStart
from powerguard.daemon.journal.sqlite import JournalError, read_only
from powerguard.daemon.journal.store import Retention

__all__ = [
    "Entry",
    "Executor",
    "Inline",
    "Journal",
    "JournalError",
    "JournalLimits",
    "Line",
    "Loaded",
    "OutageRecord",
    "Recorded",
    "RecordedEvents",
    "ReplayStart",
    "Retention",
    "WorkerThread",
    "counters",
    "following",
    "history",
    "next_boot",
    "notes",
    "outage",
    "pairs",
    "read_all",
    "read_only",
    "recent",
    "recording",
]
