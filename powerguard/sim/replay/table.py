"""A table of readings (CSV): each row through the same gates as what a UPS tells, and every mistake with its place."""

import csv
import math
import re
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Final, cast

from powerguard.core.model.events import OutputSource, Reading
from powerguard.ups.profiles.decode import Draft, cross_check
from powerguard.ups.profiles.text_values import take
from powerguard.ups.profiles.vocabulary import NUMBERS, State

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
    told: dict[str, Callable[[str], object]] = {}
    for each in fields(Reading):
        kind = str(each.type)
        if each.name in ("at_s", "provenance"):
            continue
        if "float" in kind:
            told[each.name] = _number
        elif "bool" in kind:
            told[each.name] = _bool
        elif "tuple" in kind:
            told[each.name] = _names
        elif "OutputSource" in kind:
            told[each.name] = _source
        else:
            told[each.name] = _text
    return told


def _number(text: str) -> float:
    if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        message = f"expected a finite decimal number, found {text!r:.40} (empty: unknown)"
        raise ValueError(message)
    return float(text)


def _bool(text: str) -> bool:
    known = _BOOLS.get(text.lower())
    if known is None:
        message = f"expected true or false, found {text!r:.40} (empty: unknown)"
        raise ValueError(message)
    return known


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|") if part.strip())


def _text(text: str) -> str:
    return text


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
    def told(self) -> tuple[str, ...]:
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
            draft.states = {state: "alarms" for state in State if state.value in alarms}
        if values.get("low_battery"):
            draft.states[State.LOW_BATTERY] = "low_battery"
        for name in NUMBERS.keys() & values.keys():
            take(draft, name, cast("float", values[name]), name)
        cross_check(draft)
        for each in draft.rejected:
            told = f"line {number}: {each.field} {values[each.field]:g} is not believed ({each.why})"
            self._refused.setdefault(each.field, []).append(told)
        for name in NUMBERS.keys() & values.keys() - draft.numbers.keys():
            del values[name]

    def _check_time(self, number: int, t_s: float, whose: tuple[str, str]) -> None:
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
        if self._seen.get(whose) == t_s:
            raise ReplayFileError(self._path, f"two readings of {whose[0]} by {whose[1]} at {t_s:g}", number, column)
        self._last_s = self._seen[whose] = t_s
