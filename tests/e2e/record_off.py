"""Stands where the power-off would be: `record_off.py JOURNAL LOG DEADLINE_S` appends one line of JSON to LOG.

It says when it was called, with which deadline, and whether the journal on the disk already held the order: journal
before action, as seen by the one who carries the action out.
"""

import json
import sqlite3
import sys
import time
from pathlib import Path


def ordered(journal: Path) -> bool:
    """Say whether the journal, read from another process, holds a power-off order."""
    try:
        db = sqlite3.connect(f"{journal.as_uri()}?mode=ro", uri=True)
    except sqlite3.Error:
        return False
    try:
        found = db.execute("SELECT count(*) FROM entries WHERE kind = 'action' AND event = 'PowerOff'").fetchone()
    except sqlite3.Error:
        return False
    finally:
        db.close()
    return bool(found[0])


def main() -> None:
    at_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    journal, log, deadline_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    line = json.dumps({"at_s": at_s, "deadline_s": deadline_s, "ordered": ordered(journal)})
    with log.open("a", encoding="ascii") as file:
        file.write(line + "\n")


main()
