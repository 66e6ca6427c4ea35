"""The outage's black box: what was decided, durable before it is done (docs/reference/journal.md)."""

from powerguard.daemon.journal.journal import Health, Journal, Limits
from powerguard.daemon.journal.queries import counters, following, history, outage, read_all, recent, recording
from powerguard.daemon.journal.recording import Heard, Recorded, Start
from powerguard.daemon.journal.records import Entry, Line, Loaded, OutageRecord
from powerguard.daemon.journal.sqlite import JournalError, read_only
from powerguard.daemon.journal.store import Retention
from powerguard.daemon.journal.worker import Executor, Inline, WorkerThread

__all__ = [
    "Entry",
    "Executor",
    "Health",
    "Heard",
    "Inline",
    "Journal",
    "JournalError",
    "Limits",
    "Line",
    "Loaded",
    "OutageRecord",
    "Recorded",
    "Retention",
    "Start",
    "WorkerThread",
    "counters",
    "following",
    "history",
    "outage",
    "read_all",
    "read_only",
    "recent",
    "recording",
]
