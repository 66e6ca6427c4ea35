"""The input of `powerguard replay`: the journal's export (JSON lines), or a table of readings (CSV).

Each row of a table passes the same gates as what a UPS reports. A file that a user sent in may hold anything: every
mistake is reported with file, line and, where there is one, column, and nothing is read that is longer than it may be.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO, Final, cast

from powerguard.core.comeback.recovery import LONGEST_GAP_S, reloaded
from powerguard.core.model.actions import Action
from powerguard.core.model.events import (
    CheckpointProgress,
    Done,
    Event,
    Failed,
    OutputSource,
    Reading,
    SourceFailed,
    Tick,
    TrainerSeen,
)
from powerguard.core.model.policy import Policy, TrainerPolicy
from powerguard.core.model.serialisation import KIND, PlainError, from_plain
from powerguard.core.model.state import State
from powerguard.core.trainers.lifecycle import at_start
from powerguard.sim.replay.play import (
    DaemonRun,
    Mark,
    RecordedOrder,
    Recording,
    coarseness_s,
    mark_of,
    sources_of,
    with_losses,
)
from powerguard.ups.profiles.decode import Draft, cross_check
from powerguard.ups.profiles.text_values import take
from powerguard.ups.profiles.vocabulary import NUMBERS
from powerguard.ups.profiles.vocabulary import State as UpsState

MAX_SPAN_S: Final = 7 * 86400.0
MAX_T_S: Final = 4e9
"""Unix time is allowed as a clock."""
NEEDED: Final = ("t_s", "output_source")
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_BOOLS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class ReplayFileError(Exception):
    """The file cannot be replayed: file:line:column, what was found, and what would be right."""

    def __init__(self, path: str, message: str, line: int = 0, column: int = 0) -> None:
        place = path + (f":{line}" if line else "") + (f":{column}" if column else "")
        super().__init__(f"{place}: {message}")


def _decoders() -> dict[str, Callable[[str], object]]:
    """How each field of a Reading is read, by its type."""
    decoders: dict[str, Callable[[str], object]] = {}
    for each in fields(Reading):
        kind = str(each.type)
        if each.name in ("at_s", "provenance"):
            continue
        if "float" in kind:
            decoders[each.name] = _number
        elif "bool" in kind:
            decoders[each.name] = _bool
        elif "tuple" in kind:
            decoders[each.name] = _names
        elif "OutputSource" in kind:
            decoders[each.name] = _source
        else:
            decoders[each.name] = str
    return decoders


def _number(text: str) -> float:
    if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        message = f"expected a finite decimal number, found {text!r:.40} (empty: not reported)"
        raise ValueError(message)
    return float(text)


def _bool(text: str) -> bool:
    known = _BOOLS.get(text.lower())
    if known is None:
        message = f"expected true or false, found {text!r:.40} (empty: not reported)"
        raise ValueError(message)
    return known


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|") if part.strip())


def _source(text: str) -> OutputSource:
    try:
        return OutputSource(text.lower())
    except ValueError:
        near = get_close_matches(text.lower(), tuple(OutputSource), n=1)
        hint = f" (did you mean {near[0]}?)" if near else f" (one of {', '.join(OutputSource)})"
        message = f"unknown output_source {text!r:.40}{hint}"
        raise ValueError(message) from None


COLUMNS: Final = {"t_s": _number} | _decoders()


class Table:
    """Reads one CSV, line by line."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._names: list[str] = []
        self._last_s: float | None = None
        self._first_s = 0.0
        self._seen: dict[tuple[str, str], float] = {}
        self._refused: dict[str, list[str]] = {}
        self.shift_s = 0.0

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was not believed, one remark for each column."""
        return tuple(
            f"{each[0]}, so it counts as unknown" + (f"; {len(each) - 1} more of this column" if each[1:] else "")
            for each in self._refused.values()
        )

    def cells(self, number: int, line: str) -> list[str]:
        try:
            (row,) = csv.reader([line], strict=True)
        except (csv.Error, ValueError) as error:
            raise ReplayFileError(self._path, f"no CSV: {error}", number) from error
        return [cell.strip() for cell in row]

    def header(self, number: int, line: str) -> None:
        names = [name.lower() for name in self.cells(number, line)]
        if len(names) == 1 and (";" in line or "\t" in line):
            raise ReplayFileError(self._path, "the columns are separated by something else than ','", number)
        for column, name in enumerate(names, start=1):
            if name not in COLUMNS:
                near = get_close_matches(name, COLUMNS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COLUMNS)}"
                raise ReplayFileError(self._path, f"unknown column {name!r:.40} ({hint})", number, column)
            if name in names[: column - 1]:
                raise ReplayFileError(self._path, f"column {name} twice", number, column)
        missing = [name for name in NEEDED if name not in names]
        if missing:
            raise ReplayFileError(self._path, f"no column {missing[0]} (needed are {' and '.join(NEEDED)})", number)
        self._names = names

    def reading(self, number: int, line: str) -> Reading:
        cells = self.cells(number, line)
        if len(cells) != len(self._names):
            message = f"{len(cells)} columns, the header has {len(self._names)}"
            raise ReplayFileError(self._path, message, number)
        values: dict[str, object] = {"ups": "ups", "source": "csv"}
        for column, (name, cell) in enumerate(zip(self._names, cells, strict=True), start=1):
            if not cell:
                if name in NEEDED:
                    raise ReplayFileError(self._path, f"{name} is empty", number, column)
                continue
            try:
                values[name] = COLUMNS[name](cell)
            except ValueError as error:
                raise ReplayFileError(self._path, f"{name}: {error}", number, column) from error
        t_s = cast("float", values.pop("t_s"))
        self._check_time(number, t_s, (str(values["ups"]), str(values["source"])))
        self._believe(number, values)
        return Reading(at_s=t_s + self.shift_s, **values)  # type: ignore[arg-type]  # read by the type of each field

    def _believe(self, number: int, values: dict[str, object]) -> None:
        """Leave out what no source would have handed to the daemon: the windows and cross-checks of the decoders."""
        source = cast("OutputSource", values["output_source"])
        draft = Draft(output_source=source, input_present=cast("bool | None", values.get("input_present")))
        alarms = cast("tuple[str, ...]", values.get("alarms", ()))
        if alarms:
            draft.states = {state: "alarms" for state in UpsState if state.value in alarms}
        if values.get("low_battery"):
            draft.states[UpsState.LOW_BATTERY] = "low_battery"
        for name in NUMBERS.keys() & values.keys():
            take(draft, name, cast("float", values[name]), name)
        cross_check(draft)
        for each in draft.rejected:
            remark = f"line {number}: {each.field} {values[each.field]:g} is not believed ({each.why})"
            self._refused.setdefault(each.field, []).append(remark)
        for name in NUMBERS.keys() & values.keys() - draft.numbers.keys():
            del values[name]

    def _check_time(self, number: int, t_s: float, origin: tuple[str, str]) -> None:
        column = self._names.index("t_s") + 1
        if abs(t_s) > MAX_T_S:
            raise ReplayFileError(self._path, f"t_s: {t_s:g} is not a time in seconds", number, column)
        if self._last_s is None:
            self._first_s = t_s
            self.shift_s = max(0.0, -t_s)
        elif t_s < self._last_s:
            message = f"t_s runs backwards: {t_s:g} after {self._last_s:g}; sort the rows"
            raise ReplayFileError(self._path, message, number, column)
        if t_s - self._first_s > MAX_SPAN_S:
            message = f"t_s: more than {MAX_SPAN_S / 86400:g} days after the first row; cut the file to the outage"
            raise ReplayFileError(self._path, message, number, column)
        if self._seen.get(origin) == t_s:
            raise ReplayFileError(self._path, f"two readings of {origin[0]} by {origin[1]} at {t_s:g}", number, column)
        self._last_s = self._seen[origin] = t_s


MAX_LINE_BYTES: Final = 4 << 20
"""The longest line there is holds a state: some ten kilobytes."""
MAX_LINES: Final = 1_000_000
SCHEMA_VERSION: Final = 1
_FINE_S: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The caller's options. policy: of the settings; None: as recorded, else the default.

    table, trainers: take the place of the policy's own, whichever it is; None: they do not. ups: whose readings count;
    "": the only one there is.
    """

    policy: Policy | None
    default: Policy
    table: tuple[tuple[float, float], ...] | None = None
    trainers: tuple[TrainerPolicy, ...] | None = None
    ups: str = ""

    def change(self, policy: Policy) -> Policy:
        """Return the policy with what the options say in place."""
        if self.table is not None:
            policy = replace(policy, runtime_table=self.table)
        return policy if self.trainers is None else replace(policy, trainers=self.trainers)


def load(path: str, wanted: Wanted) -> tuple[Recording, ...]:
    """Read a file; several outages, one after the other, are several recordings. Raises ReplayFileError."""
    try:
        with Path(path).open("rb") as file:
            if file.seekable():  # What is no recording at all is refused within seconds, before a row of it is read.
                for _ in _lines(path, file):
                    pass
                file.seek(0)
            lines = _lines(path, file)
            first = next(lines, None)
            if first is None:
                raise ReplayFileError(path, "empty (expected the journal's export, or CSV with a header)")
            both = chain([first], lines)
            return _load_export(path, both, wanted) if first[1].startswith("{") else _load_table(path, both, wanted)
    except OSError as error:
        raise ReplayFileError(path, error.strerror or str(error)) from error


def _lines(path: str, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the lines that are neither blank nor comments, with their numbers."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise ReplayFileError(path, f"longer than {MAX_LINE_BYTES >> 20} MiB: no line of a recording is", number)
        if number > MAX_LINES:
            raise ReplayFileError(path, f"more than {MAX_LINES} lines; cut it to the outage", number)
        if (at := raw.find(b"\0")) >= 0:
            raise ReplayFileError(path, "a NUL byte: this is not a text file", number, at + 1)
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ReplayFileError(path, "not UTF-8: this is not a text file", number, error.start + 1) from error
        line = line.rstrip("\r\n")
        if line.strip() and not line.startswith("#"):
            yield number, line


# --- CSV --------------------------------------------------------------------------------------------------------------


def _load_table(path: str, lines: Iterator[tuple[int, str]], wanted: Wanted) -> tuple[Recording, ...]:
    table = Table(path)
    number, line = next(lines)
    table.header(number, line)
    events = tuple(table.reading(number, line) for number, line in lines)
    if not events:
        raise ReplayFileError(path, "a header and no readings", number)
    remarks = list(table.remarks)
    policy = wanted.change(wanted.default if wanted.policy is None else wanted.policy)
    policy, kept = _for_upses(path, policy, events, wanted.ups, remarks)
    first_s = events[0].at_s
    leg = DaemonRun(at_s=first_s, policy=policy, events=kept)
    return (Recording(name=Path(path).name, legs=(leg,), zero_s=table.shift_s, remarks=tuple(remarks)),)


def _for_upses(
    path: str, policy: Policy, events: tuple[Reading, ...], ups: str, remarks: list[str]
) -> tuple[Policy, tuple[Event, ...]]:
    """Return the policy for the UPSes in a table, and its events with where sources would have been lost.

    All of them, where the settings know them all as feeds of the host and no single one is asked for.
    """
    names = {event.ups for event in events}
    if ups or not policy.feeds or not names <= {feed.policy.ups for feed in policy.feeds}:
        alone = replace(policy, feeds=(), ups=_chosen_ups(path, events, ups or policy.ups, remarks))
        return _coarse(alone, events, remarks)
    kept: tuple[Event, ...] = events
    feeds = []
    for feed in policy.feeds:
        own, kept = _coarse(feed.policy, kept, remarks, lose=feed.policy.ups in names)
        feeds.append(replace(feed, policy=own))
    return replace(policy, feeds=tuple(feeds), stale_s=max(feed.policy.stale_s for feed in feeds)), kept


def _chosen_ups(path: str, events: tuple[Reading, ...], wanted: str, remarks: list[str]) -> str:
    names = list(dict.fromkeys(event.ups for event in events))
    if wanted in names:
        if len(names) > 1:
            remarks.append(
                f"readings of {', '.join(n for n in names if n != wanted)} are left aside: the feed is {wanted}"
            )
        return wanted
    if len(names) == 1:
        return names[0]
    found = f"readings of {', '.join(names[:8])}"
    raise ReplayFileError(path, f"{found}, and none of {wanted!r}; say --ups NAME" if wanted else f"{found}; say --ups")


def _coarse(
    policy: Policy, events: tuple[Event, ...], remarks: list[str], *, lose: bool | None = None
) -> tuple[Policy, tuple[Event, ...]]:
    """A recording that is slower than a daemon polls: a reading stays fresh for three of its own steps.

    lose: add where a source would have been lost; None: where the recording itself has no loss.
    """
    every_s = coarseness_s(events, policy.ups)
    if every_s > _FINE_S:
        remarks.append(f"a reading every {every_s:g} s: what happens between them is not known to that second")
    stale_s = max(policy.stale_s, 3 * every_s)
    if lose if lose is not None else not any(isinstance(event, SourceFailed) for event in events):
        events = with_losses(events, ups=policy.ups, every_s=policy.stale_s / 3)
    return replace(policy, stale_s=stale_s, sources=max(1, len(sources_of(events, policy.ups)))), events


# --- The journal's export ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Life:
    """One life of the daemon, while it is being read."""

    boot: int
    at_s: float | None = None
    policy: Policy | None = None
    state: State | None = None
    events: list[Event] | None = None


class _Outage:
    """Gathers one outage's lines. Raises ValueError with what is wrong in the first one (meta)."""

    def __init__(self, path: str, meta: dict[str, object]) -> None:
        self._path = path
        self.meta = meta
        self._began_s = None if meta.get("started_at_s") is None else _seconds(meta, "started_at_s")
        self.lives: list[_Life] = []
        self._walls: dict[int, float] = {}
        self._orders: dict[str, RecordedOrder] = {}
        self._where: dict[str, int] = {}
        self._marks: list[tuple[int, Mark]] = []
        self._entries_s: list[tuple[int, float]] = []
        self.remarks: list[str] = []
        self.ended = False

    def take(self, number: int, line: dict[str, object]) -> None:
        """Enter one line. Raises PlainError, ValueError with what is wrong in it."""
        kind = line.get("kind")
        if kind == "end":
            self.ended = True
            return
        if kind == "gap":
            self.remarks.append("the journal could not keep every step of it")
            return
        if kind not in ("start", "reading", "tick", "event", "note", "action", "outcome"):
            return  # A newer version's: it says more, not something else.
        boot, at_s = _whole(line, "boot"), _seconds(line, "at_s")
        if kind not in ("reading", "tick", "event"):
            self._walls[boot] = _seconds(line, "at") - at_s
        if kind == "start":
            policy = from_plain(line.get("policy"), Policy)
            state = from_plain(line.get("state"), State)
            self.lives.append(_Life(boot, at_s=at_s, policy=policy, state=state, events=[]))
        elif kind == "reading":
            plain = {name: value for name, value in line.items() if name not in ("kind", "boot")}
            self._hear(boot, from_plain(plain | {KIND: "Reading"}, Reading), number)
        elif kind == "tick":
            self._hear(boot, Tick(at_s=at_s), number)
        elif kind == "event":
            self._hear(boot, cast("Event", from_plain(line.get("event"), Event)), number)
        else:
            self._entries_s.append((boot, at_s))
            self._done(kind, boot, at_s, line)

    def _hear(self, boot: int, event: Event, number: int) -> None:
        if not self.lives or self.lives[-1].boot != boot:
            self.lives.append(_Life(boot, at_s=event.at_s, events=[]))
        life = self.lives[-1]
        life.events = [] if life.events is None else life.events
        if life.events and event.at_s < life.events[-1].at_s - 1.0:
            raise ReplayFileError(
                self._path, f"time runs backwards: {event.at_s:g} after {life.events[-1].at_s:g}", number
            )
        if life.events and event.at_s - life.events[0].at_s > MAX_SPAN_S:
            raise ReplayFileError(self._path, f"longer than {MAX_SPAN_S / 86400:g} days", number)
        life.events.append(event)

    def _done(self, kind: str, boot: int, at_s: float, line: dict[str, object]) -> None:
        if kind == "note":
            numbers = line.get("numbers")
            new = numbers.get("new") if isinstance(numbers, dict) else None
            if line.get("event") == "phase_changed" and isinstance(new, str):
                because = str(line.get("because", ""))
                self._marks.append((boot, Mark(t_s=at_s, kind="phase", what=new, because=because)))
        elif kind == "action":
            action = from_plain(line.get("action"), Action)
            mark = mark_of(at_s, action)
            if mark is not None and action.id not in self._orders:
                self._marks.append((boot, mark))
                self._orders[action.id] = RecordedOrder(action=action, at_s=at_s)
                self._where[action.id] = boot
        else:
            outcome = from_plain(line.get("outcome"), Done | Failed)
            if isinstance(outcome, Done | Failed) and (deed := self._orders.get(outcome.action.id)) is not None:
                same_boot = self._where[outcome.action.id] == boot
                self._orders[outcome.action.id] = replace(deed, outcome=outcome if same_boot else None)

    def recording(self, wanted: Wanted) -> Recording:
        """Return what was gathered. Raises ReplayFileError."""
        lives = [life for life in self.lives if life.events or life.state is not None]
        if not any(isinstance(event, Reading) for life in lives for event in life.events or ()):
            raise ReplayFileError(self._path, f"outage {self.meta.get('outage')}: no readings in it")
        shifts = self._shifts(lives)
        ends = (*(life.at_s if life.boot == before.boot else None for before, life in pairwise(lives)), None)
        legs = tuple(self._leg(life, shifts, wanted, end_s) for life, end_s in zip(lives, ends, strict=True))
        zero = self._walls.get(lives[0].boot, 0.0)
        known = [(boot, mark) for boot, mark in self._marks if boot in shifts or boot in self._walls]
        marks = [
            replace(mark, t_s=mark.t_s + shifts.get(boot, self._walls.get(boot, zero) - zero)) for boot, mark in known
        ]
        if wanted.trainers is not None:
            self.remarks.append(
                "what the recording's own trainers said and did is left aside: others stand in for them"
            )
        if not self.ended:
            self.remarks.append("the file ends before the export did: it has been cut off")
        if self.meta.get("complete") is not True:
            self.remarks.append(
                "the journal did not keep every reading of this outage: times may differ by some seconds"
            )
        return Recording(
            name=str(self.meta.get("outage", "?")),
            legs=legs,
            deeds=tuple(_with_progress(deed, lives) for deed in self._orders.values() if _knows(wanted, deed)),
            marks=tuple(marks),
            began_s=self._began_s,
            complete=self.meta.get("complete") is True,
            cut_off=not self.ended,
            remarks=tuple(self.remarks),
        )

    def _shifts(self, lives: Sequence[_Life]) -> dict[int, float]:
        """Seconds from each boot's clock to that of the first one, by boot.

        Between two boots only the wall clock counts, with its last value in each, because one that was wrong at boot is
        soon corrected. If it leaves no believable time between them, the later boot follows at once.
        """
        zero = self._walls.get(lives[0].boot, 0.0)
        shifts: dict[int, float] = {}
        ended_s: float | None = None
        for life in lives:
            known_s = [*([] if life.at_s is None else [life.at_s]), *(event.at_s for event in life.events or ())]
            if life.boot not in shifts:
                shifts[life.boot] = self._walls.get(life.boot, zero) - zero
                away_s = 0.0 if ended_s is None else known_s[0] + shifts[life.boot] - ended_s
                if not 0.0 <= away_s <= LONGEST_GAP_S:
                    shifts[life.boot] -= away_s
                    self.remarks.append("the wall clock was wrong: how long the host was off is not known")
            ended_s = known_s[-1] + shifts[life.boot]
        return shifts

    def _leg(self, life: _Life, shifts: Mapping[int, float], wanted: Wanted, next_s: float | None) -> DaemonRun:
        events = tuple(life.events or ())
        policy = wanted.policy or life.policy
        if policy is None:
            policy = wanted.default
            self.remarks.append("the settings of then are not in the file: defaults and options stand in")
        policy = wanted.change(policy)
        readings = tuple(event for event in events if isinstance(event, Reading))
        if readings and not policy.feeds:
            names = {reading.ups for reading in readings}
            known = (
                life.policy.ups if life.policy is not None and life.policy.ups in names else wanted.ups or policy.ups
            )
            policy = replace(policy, ups=_chosen_ups(self._path, readings, known, []))
        boots = self.meta.get("boots")
        listed = boots if isinstance(boots, list) else []
        boot_id = str(listed[life.boot]) if 0 <= life.boot < len(listed) else f"boot-{life.boot}"
        state = life.state
        if life.policy is not None and state is not None and policy is not life.policy:
            state = reloaded(life.policy, policy, state, life.at_s or 0.0)
        policy = replace(policy, boot_id=policy.boot_id if life.policy is policy else boot_id)
        if life.policy is None:
            policy, events = _coarse(policy, events, self.remarks)
        else:
            # Settings of today may name fewer, or more, than were heard then; a journal of old names none.
            source_count = len(sources_of(events, policy.ups))
            policy = replace(policy, sources=max(1, source_count, life.policy.sources if wanted.policy is None else 1))
        if wanted.trainers is not None:
            events = tuple(event for event in events if not _is_of_trainer(event))
            state = None if state is None else _with_trainers(policy, state)
        first_s = events[0].at_s if events else 0.0
        return DaemonRun(
            at_s=first_s if life.at_s is None else life.at_s,
            policy=policy,
            state=state,
            shift_s=shifts[life.boot],
            events=events,
            end_s=max(
                (at_s for boot, at_s in self._entries_s if boot == life.boot and (next_s is None or at_s < next_s)),
                default=None,
            ),
        )


def _with_trainers(policy: Policy, state: State) -> State:
    """Put the policy's trainers in the place of those that were there, and of how long their checkpoints took."""
    needs = tuple(need for need in state.learned.needs if need.of != "checkpoint")
    learned = replace(state.learned, needs=needs)
    return replace(state, trainers=at_start(policy, learned), learned=learned)


def _is_of_trainer(event: Event) -> bool:
    if isinstance(event, Done | Failed):
        return hasattr(event.action, "trainer")
    return isinstance(event, TrainerSeen | CheckpointProgress)


def _knows(wanted: Wanted, deed: RecordedOrder) -> bool:
    """Say whether the recording's answer to an order counts: not where another trainer stands in."""
    return wanted.trainers is None or not hasattr(deed.action, "trainer")


def _with_progress(deed: RecordedOrder, lives: list[_Life]) -> RecordedOrder:
    progress = tuple(
        event
        for life in lives
        for event in life.events or ()
        if isinstance(event, CheckpointProgress) and event.action_id == deed.action.id
    )
    return replace(deed, progress=progress)


def _whole(line: dict[str, object], name: str) -> int:
    value = line.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1000:
        message = f"{name}: expected a small whole number, found {value!r:.40}"
        raise ValueError(message)
    return value


def _seconds(line: dict[str, object], name: str) -> float:
    value = line.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not -MAX_T_S <= value <= MAX_T_S:
        message = f"{name}: expected a time in seconds, found {value!r:.40}"
        raise ValueError(message)
    return float(value)


def _refuse(text: str) -> object:
    message = f"{text} is not a number"
    raise ValueError(message)


def _load_export(path: str, lines: Iterator[tuple[int, str]], wanted: Wanted) -> tuple[Recording, ...]:
    outages: list[_Outage] = []
    for number, text in lines:
        try:
            line = json.loads(text, parse_constant=_refuse)
        except json.JSONDecodeError as error:
            raise ReplayFileError(path, f"no JSON: {error.msg}", number, error.colno) from error
        except ValueError as error:
            raise ReplayFileError(path, f"no JSON: {error}", number) from error
        except RecursionError as error:
            message = "nested far too deeply for an export (expected one JSON object a line)"
            raise ReplayFileError(path, message, number) from error
        if not isinstance(line, dict):
            raise ReplayFileError(path, "expected one JSON object a line", number)
        if line.get("kind") == "meta":
            version = line.get("schema_version")
            if not isinstance(version, int) or version > SCHEMA_VERSION:
                what = "no schema_version" if version is None else f"schema_version {version!r:.20}"
                hint = "upgrade it" if isinstance(version, int) else "is this `powerguard history export`?"
                message = f"{what}: this powerguard reads {SCHEMA_VERSION}; {hint}"
                raise ReplayFileError(path, message, number)
            try:
                outages.append(_Outage(path, line))
            except ValueError as error:
                raise ReplayFileError(path, str(error), number) from error
            continue
        if not outages:
            message = "expected a line with kind meta first (is this `powerguard history export`?)"
            raise ReplayFileError(path, message, number)
        try:
            outages[-1].take(number, line)
        except (PlainError, ValueError) as error:
            raise ReplayFileError(path, str(error), number) from error
    return tuple(outage.recording(wanted) for outage in outages)
