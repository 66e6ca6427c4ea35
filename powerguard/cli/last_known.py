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
    row, trouble = _snapshot(path)
    if row is None:
        return None, trouble
    try:
        phase = json.loads(row[3])["phase"]
        name, at = _PHASES[phase["kind"]], float(row[2])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, f"{path}: the last state cannot be read"
    outage = phase.get("outage")
    return {
        "phase": name,
        "boot_id": str(row[0]),
        "at": at,
        "outage": str(outage["id"]) if isinstance(outage, dict) and "id" in outage else None,
    }, ""


def last_battery(path: str = JOURNAL) -> tuple[dict[str, Any] | None, str]:
    """Return what was learned of the battery as last written, and "" or why it cannot be had. Never raises."""
    row, trouble = _snapshot(path)
    if row is None:
        return None, trouble
    try:
        at_s, wall = float(row[1]), float(row[2])
        battery = json.loads(row[3])["battery"]
        model = battery.get("model") or {}
        health = model.get("health")
        return {
            "at": wall,
            "health": battery.get("health"),
            "measured": None if health is None else _measured(health, wall - at_s),
            "points": [
                {
                    "load_pct": round(100.0 * point["load"], 3),
                    "runtime_s": point["tau_s"],
                    "at": wall - at_s + point["at_s"],
                }
                for point in model.get("points") or ()
            ],
            "recharge_s": model.get("recharge_s"),
            "used": battery.get("used"),
            "left": battery.get("left"),
        }, ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, f"{path}: the last state cannot be read"


def _measured(health: dict[str, Any], shift_s: float) -> dict[str, Any]:
    kept = {name: health[name] for name in ("share", "error", "depth", "how")}
    return {**kept, "at_least": health.get("least") is True, "at": shift_s + health["at_s"]}


def _snapshot(path: str) -> tuple[tuple[Any, ...] | None, str]:
    """Return boot, its clock, wall time and state as last written, and "" or why they cannot be had."""
    try:
        if not Path(path).is_file():  # a pipe would be waited for
            return None, f"{path}: {'is not a file' if Path(path).exists() else 'no journal here'}"
        with contextlib.closing(_open(path)) as db:
            row = db.execute("SELECT boot_id, at_s, wall, state FROM snapshot").fetchone()
    except OSError as error:
        return None, f"{path}: {error.strerror or error}"
    except sqlite3.Error as error:
        return None, f"{path}: {error}"
    return (tuple(row), "") if row is not None else (None, f"{path}: the journal is empty")


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
