"""The outage's black box: what was decided, durable before it is done (docs/reference/journal.md)."""

from powerguard.daemon.journal.journal import Health, Journal, Limits
from powerguard.daemon.journal.queries import counters, history, outage, read_all, recent
from powerguard.daemon.journal.records import Entry, Line, Loaded, OutageRecord
from powerguard.daemon.journal.sqlite import JournalError, read_only
from powerguard.daemon.journal.store import Retention
from powerguard.daemon.journal.worker import Executor, Inline, WorkerThread

__all__ = [
    "Entry",
    "Executor",
    "Health",
    "Inline",
    "Journal",
    "JournalError",
    "Limits",
    "Line",
    "Loaded",
    "OutageRecord",
    "Retention",
    "WorkerThread",
    "counters",
    "history",
    "outage",
    "read_all",
    "read_only",
    "recent",
]
