"""`powerguard explain job`: the times at which training stood, or ended, here because of another host of its job.

The power of this host may never have failed, so they belong to no outage of the journal (docs/guides/many-hosts.md).
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

from powerguard.cli.render import Paint, clean, duration, moment
from powerguard.daemon.journal import Line, notes, pairs

NAME: Final = "job"
"""What stands for an outage's id."""
_BEGINS: Final = ("training_held", "job_ended")
_ENDS: Final = ("training_released", "job_restarted")


def holds(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return them, the oldest first; for each trainer one from the first reason to stand until it trains again."""
    found: list[dict[str, Any]] = []
    open_: dict[str, tuple[dict[str, Any], Line]] = {}
    for line in notes(db, (*_BEGINS, *_ENDS)):
        numbers = pairs(line.payload.get("numbers"))
        trainer = str(numbers.get("trainer"))
        known = open_.get(trainer)
        if known is None:
            if line.event not in _BEGINS:
                continue
            hold: dict[str, Any] = {
                "trainer": trainer,
                "began_at": line.wall,
                "ended_at": None,
                "idle_s": None,
                "step": numbers.get("step"),
                "held_by": [],
                "job_ended": None,
            }
            found.append(hold)
            known = open_[trainer] = (hold, line)
        hold, first = known
        if line.event == "training_held":
            hold["held_by"] = list(dict.fromkeys((*hold["held_by"], *str(numbers.get("hosts")).split(", "))))
        elif line.event == "job_ended":
            hold["job_ended"] = line.because
        else:
            hold["ended_at"] = line.wall
            # Within one boot its clock counts: a wall clock may be set.
            idle_s = line.at_s - first.at_s if line.boot_id == first.boot_id else line.wall - first.wall
            hold["idle_s"] = round(idle_s, 3) if idle_s >= 0.0 else None
            del open_[trainer]
    return found


def explained(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the object of --json."""
    return {"schema_version": 1, "object": "explanation_job", "holds": list(found)}


def describe(told: Mapping[str, Any], paint: Paint) -> list[str]:
    """Return them as lines."""
    found = told["holds"]
    if not found:
        return ["training here never stood or ended because of another host of its job"]
    lines: list[str] = []
    for hold in found:
        lines.append(paint(f"{moment(hold['began_at'])}, {clean(hold['trainer'])} at step {hold['step']}", "bold"))
        if hold["held_by"]:
            lines.append(f"  held by {clean(', '.join(hold['held_by']))}, on battery there")
        if hold["job_ended"] is not None:
            lines.append(f"  the job ended: {clean(hold['job_ended'])}")
        if hold["ended_at"] is None:
            lines.append("  it does not train yet")
        elif hold["idle_s"] is None:
            lines.append(f"  it trained again at {moment(hold['ended_at'])}; the GPUs here were idle until then")
        else:
            lines.append(f"  the GPUs here were idle for {duration(hold['idle_s'])}, then it trained again")
        lines.append("")
    return lines[:-1]


def within(db: sqlite3.Connection, began_at: float, ended_at: float | None) -> list[str]:
    """Return the lines of an explanation that point to those that overlap an outage."""
    found = [
        hold
        for hold in holds(db)
        if (ended_at is None or hold["began_at"] <= ended_at)
        and (hold["ended_at"] is None or hold["ended_at"] >= began_at)
    ]
    if not found:
        return []
    return ["", f"Training also stood, or ended, because of another host of its job: powerguard explain {NAME}"]


def hint(db: sqlite3.Connection) -> str:
    """Return where a reader finds them, for a journal that has no such outage; "" if there are none."""
    count = len(holds(db))
    times = "once" if count == 1 else f"{count} times"
    return f"; training stood {times} because of another host: powerguard explain {NAME}" if count else ""
