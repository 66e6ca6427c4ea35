"""What the journal last knew, read beside a daemon that is down. Stdlib only; `daemon.journal` costs ten times as much.

A test writes a journal with the daemon's own code and reads it here.
"""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any, Final

JOURNAL: Final = "/var/lib/powerguard/journal.sqlite"

_PHASES: Final = {
    "Online": "online",
    "OnBattery": "on_battery",
    "EmergencyCheckpoint": "emergency_checkpoint",
    "Holding": "holding",
    "Shutdown": "shutdown",
    "Recovery": "recovery",
}


def last_known(path: str = JOURNAL) -> tuple[dict[str, Any] | None, str]:
    """Return phase, boot, moment and outage as last written, and "" or why they cannot be had. Never raises."""
    try:
        if not Path(path).exists():
            return None, f"{path}: no journal here"
        with contextlib.closing(_open(path)) as db:
            row = db.execute("SELECT boot_id, wall, state FROM snapshot").fetchone()
    except (sqlite3.Error, OSError) as error:
        return None, f"{path}: {error}"
    if row is None:
        return None, f"{path}: the journal is empty"
    try:
        phase = json.loads(row[2])["phase"]
        name = _PHASES[phase["kind"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, f"{path}: the last state cannot be read"
    outage = phase.get("outage")
    return {
        "phase": name,
        "boot_id": str(row[0]),
        "at": row[1],
        "outage": str(outage["id"]) if isinstance(outage, dict) and "id" in outage else None,
    }, ""


def _open(path: str) -> sqlite3.Connection:
    """Open read-only. Who may not write the folder can still read a journal that was closed in order."""
    uri = Path(path).absolute().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=1.0)
    try:
        db.execute("SELECT 1 FROM snapshot")
    except sqlite3.OperationalError:
        db.close()
        if Path(f"{path}-wal").exists():
            raise
        db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)
    return db
