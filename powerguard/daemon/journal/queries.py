"""Queries of the journal: by the daemon's start, by its HTTP interface, and by the command line."""

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, cast

from powerguard.core.model.actions import Action, Scalar
from powerguard.core.model.serialisation import PlainError, from_plain
from powerguard.core.model.state import State
from powerguard.daemon.journal.records import Line, Loaded, OutageRecord, Recorded, joined, unpack
from powerguard.daemon.journal.sqlite import pragma

_RECORDING_SINCE = 2
_DIGEST_SINCE = 3
"""Schema versions."""
IN_FLIGHT_ROWS = 200
"""The newest actions without an outcome that are looked at."""
LEARNED = "what was learned of checkpoints, stops, pauses and drills"
MODEL = "what was learned of the battery"
LOST_ALL = "everything: phase, battery account, and all that was learned"


def digest_of(boot_id: object, at_s: object, wall: object, state: object) -> str:
    """SHA-256 of the snapshot's row: a flipped bit in it may still be JSON, and a moment still a number."""
    return hashlib.sha256(repr((boot_id, at_s, wall, state)).encode("utf-8", "backslashreplace")).hexdigest()


def read_all(db: sqlite3.Connection) -> tuple[Loaded, tuple[OutageRecord, ...]]:
    """Return what the file knows, and its newest outages. A state that cannot be read is None, and trouble says why."""
    trouble: list[str] = []
    state = None
    lost = ""
    digest = "digest" if pragma(db, "user_version") >= _DIGEST_SINCE else "''"
    query = f"SELECT boot_id, at_s, wall, state, {digest} FROM snapshot"  # noqa: S608 - our own words
    row = db.execute(query).fetchone() or ("", 0.0, 0.0, "", "")
    boot_id, at_s, wall, text, digest = row
    if digest and digest != digest_of(boot_id, at_s, wall, text):
        at_s, wall, text, lost = 0.0, 0.0, "", LOST_ALL
        trouble.append("the last state is damaged: its digest does not match")
    elif not _are_numbers(at_s, wall):
        at_s, wall, text, lost = 0.0, 0.0, "", LOST_ALL
        trouble.append("the last state cannot be read: its time is not a number")
    if text:
        state, lost, why = state_of(text)
        if lost:
            trouble.append(f"of the last state, {lost} cannot be read: {why}")
    outages = history(db, 50)
    running = [each for each in outages if each.ended_wall is None]
    in_flight: list[Action] = []
    # What another boot has ordered is over with it: its deadlines are of another clock, and a power-off is of its boot.
    query = "SELECT payload FROM actions WHERE boot_id = ? ORDER BY seq DESC LIMIT ?"
    newest = db.execute(query, (boot_id, IN_FLIGHT_ROWS)).fetchall()
    for (payload,) in reversed(newest):
        try:
            in_flight.append(from_plain(json.loads(payload), Action))
        except (PlainError, ValueError, RecursionError) as error:
            trouble.append(f"an action in flight cannot be read: {error}")
    loaded = Loaded(
        state=state,
        boot_id=boot_id,
        at_s=at_s,
        wall=wall,
        outage=running[0] if running else None,
        in_flight=tuple(in_flight),
        counters=counters(db),
        durable=True,
        trouble="; ".join(trouble),
        lost=lost,
    )
    return loaded, outages


def state_of(text: str) -> tuple[State | None, str, str]:
    """Return a state as it was written, the parts that had to be left out ("" for none), and why.

    The phase with its latch and the account of the battery's energy decide about this host tonight; what was measured
    makes the decision better. So one bad number in the latter costs the latter alone. None: no part could be read.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        return None, LOST_ALL, "nested too deeply" if isinstance(error, RecursionError) else str(error)
    whys: dict[str, None] = {}
    for learned, model in ((False, False), (True, False), (False, True), (True, True)):
        try:
            state = from_plain(_without(plain, learned=learned, model=model), State)
        except (PlainError, ValueError) as error:
            whys[str(error)] = None
        else:
            lost = " and ".join(name for name, is_out in ((LEARNED, learned), (MODEL, model)) if is_out)
            return state, lost, "; ".join(whys)
    return None, LOST_ALL, "; ".join(whys)


def _without(plain: object, *, learned: bool, model: bool) -> object:
    """Return a state's JSON without the learned part; the decoder refuses a value that is not an object."""
    if not isinstance(plain, dict):
        return plain
    kept = {name: value for name, value in plain.items() if not (learned and name == "learned")}
    if model:
        kept = _without_model(kept)
        if isinstance(kept.get("upses"), list):
            kept["upses"] = [_without_model(each) for each in kept["upses"]]
    return kept


def _without_model(whose: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a state's, or one UPS's, JSON without what was learned of its battery."""
    if not isinstance(whose, dict) or not isinstance(whose.get("battery"), dict):
        return whose
    return whose | {"battery": {name: value for name, value in whose["battery"].items() if name != "model"}}


def history(db: sqlite3.Connection, limit: int) -> tuple[OutageRecord, ...]:
    """Return the newest outages, the newest first."""
    # By row, not by wall time: the clock of a host that was off may step.
    rows = db.execute(f"SELECT {_OUTAGE} FROM outages ORDER BY rowid DESC LIMIT ?", (limit,))  # noqa: S608 - our words
    return tuple(_outage(row) for row in rows if _is_outage(row))


def outage(db: sqlite3.Connection, name: str) -> tuple[OutageRecord, tuple[Line, ...]] | None:
    """Return one outage with its story, or None when there is none of this name."""
    row = db.execute(f"SELECT {_OUTAGE} FROM outages WHERE id = ?", (name,)).fetchone()  # noqa: S608 - our words
    if row is None or not _is_outage(row):
        return None
    lines = db.execute(f"SELECT {_COLUMNS} FROM entries WHERE outage = ? ORDER BY seq", (name,))  # noqa: S608
    return _outage(row), _lines(lines)


def recent(db: sqlite3.Connection, limit: int) -> tuple[Line, ...]:
    """Return the newest lines, the oldest of them first."""
    rows = db.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()  # noqa: S608
    return _lines(reversed(rows))


def next_boot(db: sqlite3.Connection, line: Line) -> Line | None:
    """Return the first line of the boot after a line's; None if there was none."""
    query = f"SELECT {_COLUMNS} FROM entries WHERE seq > ? AND boot_id != ? ORDER BY seq LIMIT 1"  # noqa: S608
    return next(iter(_lines(db.execute(query, (line.seq, line.boot_id)))), None)


def notes(db: sqlite3.Connection, events: Iterable[str]) -> tuple[Line, ...]:
    """Return the notes of these names, in an outage or outside of one, the oldest first."""
    names = tuple(events)
    query = (
        f"SELECT {_COLUMNS} FROM entries WHERE kind = 'note' AND event IN ({','.join('?' * len(names))}) ORDER BY seq"  # noqa: S608 - our own words
    )
    return _lines(db.execute(query, names))


def pairs(value: object) -> dict[str, Any]:
    """Return the pairs of the journal; empty if there are none."""
    found = value if isinstance(value, list) else []
    return {str(pair[0]): pair[1] for pair in found if isinstance(pair, list) and len(pair) == 2}


def following(db: sqlite3.Connection, last: Line, limit: int) -> tuple[Line, ...]:
    """Return the lines after a line in its boot outside of any outage, the oldest first."""
    query = f"SELECT {_COLUMNS} FROM entries WHERE seq > ? AND boot_id = ? AND outage IS NULL ORDER BY seq LIMIT ?"  # noqa: S608
    return _lines(db.execute(query, (last.seq, last.boot_id, limit)))


def recording(db: sqlite3.Connection, name: str) -> tuple[Recorded, ...]:
    """Return the events of one outage, one recording for each run of the daemon in it; empty if not kept yet."""
    if pragma(db, "user_version") < _RECORDING_SINCE:
        return ()
    rows = db.execute("SELECT boot_id, at_s, wall, payload FROM recorded WHERE outage = ? ORDER BY seq", (name,))
    return joined(
        [
            Recorded(boot_id=str(boot_id), at_s=at_s, wall=wall, heard=unpack(name, str(payload)))
            for boot_id, at_s, wall, payload in rows
            if _are_numbers(at_s, wall)
        ]
    )


def counters(db: sqlite3.Connection) -> dict[str, float]:
    """Return the lifetime counters."""
    return {name: value for name, value in db.execute("SELECT name, value FROM counters") if _are_numbers(value)}


_OUTAGE = "id, boot_id, started_at_s, started_wall, ended_at_s, ended_wall, outcome, figures"
_COLUMNS = "seq, boot_id, at_s, wall, outage, kind, event, because, payload, action"


def _are_numbers(*values: object) -> bool:
    """Say whether these are finite numbers. SQLite keeps text in a column of numbers as well."""
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _is_outage(row: tuple[object, ...]) -> bool:
    """Say whether an outage has its moments; of one that runs the last two are NULL. A damaged one is left out."""
    return _are_numbers(*row[2:4], *(each for each in row[4:6] if each is not None))


def _lines(rows: Iterable[tuple[object, ...]]) -> tuple[Line, ...]:
    """Return the rows as lines. One without its moment or its name is damaged, and left out."""
    names = _COLUMNS.split(", ")
    found = (dict(zip(names, row, strict=True)) for row in rows)
    return tuple(
        Line(**{**each, "payload": _object(each["payload"])})  # type: ignore[arg-type]  # columns are typed above
        for each in found
        if _are_numbers(each["at_s"], each["wall"])
        and all(isinstance(each[name], str) for name in ("boot_id", "kind", "event", "because"))
    )


def _outage(row: tuple[object, ...]) -> OutageRecord:
    """Return one outage. A figure that is not a finite number is damaged, and left out."""
    figures = {
        name: value for name, value in _object(row[7]).items() if not isinstance(value, float) or math.isfinite(value)
    }
    return OutageRecord(
        id=str(row[0]),
        boot_id=str(row[1]),
        started_at_s=cast("float", row[2]),
        started_wall=cast("float", row[3]),
        ended_at_s=cast("float | None", row[4]),
        ended_wall=cast("float | None", row[5]),
        outcome=str(row[6]),
        figures=cast("Mapping[str, Scalar]", figures),
    )


def _object(text: object) -> dict[str, object]:
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
