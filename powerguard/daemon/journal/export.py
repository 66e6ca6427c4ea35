"""An outage as JSON lines: the input of a replay and the actions, to keep, compare, or send.

URLs are never exported: of a trainer or a BMC only its name. With `anonymize`, names, network addresses, paths
and boot ids are replaced too, each always by the same word, so that the story stays consistent.
"""

import re
import sqlite3
from collections.abc import Iterator
from typing import Final, cast

from powerguard.core.model.events import Done, Event, Failed, Reading, Tick
from powerguard.core.model.serialisation import KIND, PlainError, from_plain, to_plain
from powerguard.daemon.journal.queries import outage as query_outage
from powerguard.daemon.journal.queries import recording
from powerguard.daemon.journal.records import Line, OutageRecord, Recorded, plain_of

SCHEMA_VERSION: Final = 1
OBJECT: Final = "outage_export"

_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]{1,15}:(?://|(?=/))[^\s\"'<>,;)\]]*")
_PATH = re.compile(r"(?<![\w/.:-])/[\w.@%+-]+(?:/[\w.@%+-]*)*")
_V4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_V6 = re.compile(r"(?<![\w:-])(?=[0-9a-fA-F:]*:[0-9a-fA-F:]*:)[0-9a-fA-F:]{2,39}(?![\w:])")
_HOST = re.compile(r"(?:snmp|apcupsd|nut):(?:.*@)?([\w.-]+)(?::\d+)?")
"""The host in the name of a source, by which errors name it."""
_PEER = re.compile(r"\bBMC ([\w.-]+) port \d|\bupsd at ([\w.-]+):\d")
"""The host in an error of the BMC, or of the upsd of a PDU."""
_NAMING: Final = {
    "ups": "ups",
    "source": "source",
    "host": "host",
    "held_by": "host",
    "trainer": "trainer",
    "disk": "disk",
    "who": "person",
    "aborted_by": "person",
    "boot_id": "boot",
    "outage": "outage",
    "tier": "tier",
}
_KEPT: Final = frozenset({"", "snmp", "nut", "apcupsd", "sim", "local", "unknown"})
_SHAPE: Final = frozenset(
    {"kind", "event", "level", "output_source", "conduct", "after", "supply", "grade", "need", "object", "version"}
)
"""Keys whose words are ours: a trainer that is called "pause" must not change what an order means."""
_NAMED: Final = ("Trainer", "TrainerPolicy", "Need")
_SHORTEST: Final = 2


def lines(db: sqlite3.Connection, name: str, *, version: str, anonymize: bool = False) -> Iterator[dict[str, object]]:
    """Return one outage line by line, `meta` first and `end` last; empty if there is none of this name."""
    found = query_outage(db, name)
    if found is None:
        return
    record, story = found
    rows = recording(db, name)
    exported = list(_exported(record, story, rows, version=version, anonymized=anonymize))
    exported.append({"kind": "end", "lines": len(exported)})
    scrub = Scrub(exported) if anonymize else Scrub(())
    for line in exported:
        yield cast("dict[str, object]", scrub(line))


def _exported(
    record: OutageRecord, story: tuple[Line, ...], rows: tuple[Recorded, ...], *, version: str, anonymized: bool
) -> Iterator[dict[str, object]]:
    boots = list(dict.fromkeys([*(row.boot_id for row in rows), *(line.boot_id for line in story)])) or [record.boot_id]
    dropped = sum(row.heard.dropped for row in rows)
    yield {
        "kind": "meta",
        "schema_version": SCHEMA_VERSION,
        "object": OBJECT,
        "version": version,
        "outage": record.id,
        "boots": boots,
        "started_at_s": record.started_at_s,
        "started_at": record.started_wall,
        "ended_at": record.ended_wall,
        "outcome": record.outcome,
        "figures": dict(record.figures),
        # A life that does not begin with its settings has lost its first inputs: those of a long outage are removed.
        "complete": bool(rows) and not dropped and all(row.heard.start is not None for row in rows),
        "dropped": dropped,
        "anonymized": anonymized,
    }
    for row in rows:
        yield from _heard(row, boots.index(row.boot_id))
    for line in story:
        boot = boots.index(line.boot_id)
        at = {"boot": boot, "at_s": line.at_s, "at": line.wall}
        if line.kind == "event":
            if not rows:  # Kept since the journal's first version: one reading in five seconds.
                yield from _old_event(line, boot)
        elif line.kind == "note":
            shown = ("event", "because", "level")
            numbers = dict(cast("list[tuple[str, object]]", line.payload.get("numbers") or []))
            yield {"kind": "note", **at, **{name: line.payload.get(name, "") for name in shown}, "numbers": numbers}
        else:
            yield {"kind": line.kind, **at, line.kind: dict(line.payload)}


def _heard(row: Recorded, boot: int) -> Iterator[dict[str, object]]:
    start = row.heard.start
    if start is not None:
        yield {
            "kind": "start",
            "boot": boot,
            "at_s": start.at_s,
            "at": row.wall - (row.at_s - start.at_s),
            "restored": start.restored,
            "policy": to_plain(start.policy),
            "state": to_plain(start.state),
        }
    for event in row.heard.events:
        yield _event(event, boot)


def _event(event: Event, boot: int) -> dict[str, object]:
    plain = plain_of(event)
    if isinstance(event, Reading):
        blank = plain_of(Reading(at_s=0.0, ups="", source="", output_source=event.output_source))
        shown = {n: v for n, v in plain.items() if n in ("at_s", "ups", "source", "output_source") or v != blank[n]}
        shown.pop(KIND, None)
        return {"kind": "reading", "boot": boot, **shown}
    if isinstance(event, Tick):
        return {"kind": "tick", "boot": boot, "at_s": event.at_s}
    return {"kind": "event", "boot": boot, "at_s": event.at_s, "event": plain}


def _old_event(line: Line, boot: int) -> Iterator[dict[str, object]]:
    try:
        event = cast("Event", from_plain(dict(line.payload), Event))
    except PlainError:
        return
    if not isinstance(event, Done | Failed):
        yield _event(event, boot)


class Scrub:
    """Removes names and addresses from any JSON value. Each name becomes a word of its own, always the same."""

    def __init__(self, content: object) -> None:
        """Gather the names of everything that is going to be shown; of an empty value: addresses only."""
        self._words: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._anonymize = bool(content)
        self._gather(content)
        names = sorted((name for name in self._words if len(name) >= _SHORTEST), key=len, reverse=True)
        self._named = re.compile("|".join(rf"(?<!\w){re.escape(n)}(?!\w)" for n in names)) if names else None

    def __call__(self, value: object, key: str = "") -> object:
        """Return value without names and addresses."""
        if isinstance(value, dict):
            # A figure of a drill is named by its trainer, behind a dot.
            return {self._text(n, "") if "." in n else n: self(item, n) for n, item in value.items()}
        if isinstance(value, list):
            return [self(item, key) for item in value]
        return self._text(value, key) if isinstance(value, str) else value

    def _text(self, text: str, key: str) -> str:
        if key in _SHAPE:
            return text
        if self._anonymize and text in self._words and (key in _NAMING or len(text) >= _SHORTEST):
            return self._words[text]
        text = _URL.sub("[url]", text)
        if not self._anonymize:
            return text
        if self._named is not None:
            text = self._named.sub(lambda found: self._words[found[0]], text)
        for pattern, word in ((_PATH, "[path]"), (_V4, "[address]"), (_V6, "[address]")):
            text = pattern.sub(word, text)
        return text

    def _gather(self, value: object, key: str = "") -> None:
        if isinstance(value, dict):
            trainer = value.get(KIND) in _NAMED
            for name, item in value.items():
                self._gather(item, "trainer" if trainer and name == "name" else str(name))
        elif isinstance(value, list):
            for item in value:
                self._gather(item, "boot_id" if key == "boots" else key)
        elif isinstance(value, str):
            if key in _NAMING and value not in _KEPT:
                for name in value.split(", ") if key == "held_by" else (value,):
                    self._name(name, _NAMING[key])
            host = _HOST.fullmatch(value) if key == "source" else None
            for found in (*([] if host is None else [host]), *_PEER.finditer(value)):
                name = str(found[found.lastindex or 0])
                if name != "localhost" and not _V4.fullmatch(name):
                    self._name(name, "host")

    def _name(self, text: str, what: str) -> None:
        if text in self._words:
            return
        self._counts[what] = self._counts.get(what, 0) + 1
        self._words[text] = f"{what}-{self._counts[what]}"
        if what == "boot" and len(text) > 8:
            self._words.setdefault(text[:8], self._words[text])  # As ids of actions and outages begin.
