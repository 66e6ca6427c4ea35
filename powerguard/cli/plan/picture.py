"""The budget as a picture: a bar over time, for a terminal."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from powerguard.cli.render import Paint, columns, duration

WIDTH: Final = 78


class Stretch(NamedTuple):
    """One stretch of the outage. left, left_after: energy, shares of a full new battery; load: of the rating."""

    name: str
    begins_s: float
    lasts_s: float
    load: float
    left: float
    left_after: float


class Look(NamedTuple):
    """How one kind of stretch is drawn: its words, its cell with and without UTF-8, its colour."""

    words: str
    short: str
    cell: str
    letter: str
    colour: str


_LOOKS: Final = {
    "training": Look("training on battery", "training", "█", "T", "green"),
    "checkpoint": Look("emergency checkpoint", "checkpoint", "▓", "C", "cyan"),
    "holding": Look("holding: utility may return", "holding", "▒", "H", "blue"),
    "waiting": Look("training not started", "waiting", "▚", "W", "blue"),
    "stop": Look("the host stops", "stop", "▞", "S", "yellow"),
    "reserve": Look("reserve", "reserve", "░", "R", "magenta"),
    "margin": Look("margin, not planned with", "margin", "·", "m", "dim"),
}


def from_plan(plan: dict[str, Any]) -> tuple[Stretch, ...]:
    """Lay out the data of /api/v1/plan: from now until the battery would be empty. Empty if unknown."""
    terms = {term["name"]: term["value"] for term in plan["terms"]}
    left, tau_now_s, tau_paused_s = (terms.get(name) for name in ("left", "tau_now_s", "tau_paused_s"))
    if left is None or not tau_now_s or not tau_paused_s:
        return ()
    at = {step["action"]: step["in_s"] for step in plan["next"]}
    commit_s = at.get("shutdown")
    if commit_s is None:
        return ()
    commit_s = max(0.0, commit_s)
    waits = plan["phase"] == "recovery" and "emergency_checkpoint" not in at
    pause_s = commit_s if waits else min(max(0.0, at.get("emergency_checkpoint") or 0.0), commit_s)
    held_s = at.get("holding", pause_s if plan["phase"] == "holding" else commit_s)
    durable_s = min(max(pause_s, held_s or pause_s), commit_s)
    load_now, load_paused = terms.get("load_now") or 0.0, terms.get("load_paused") or 0.0
    reserve_s = terms.get("reserve_s") or 0.0
    stop_s = (terms.get("stop_s") or 0.0) - reserve_s
    return lay_out(
        left,
        (
            ("waiting" if waits else "training", pause_s, load_now, tau_now_s),
            ("checkpoint", durable_s - pause_s, load_paused, tau_paused_s),
            ("holding", commit_s - durable_s, load_paused, tau_paused_s),
            ("stop", stop_s, load_paused, tau_paused_s),
            ("reserve", reserve_s, load_paused, tau_paused_s),
            ("margin", left * tau_paused_s, load_paused, tau_paused_s),
        ),
    )


def lay_out(left: float, parts: Sequence[tuple[str, float, float, float]]) -> tuple[Stretch, ...]:
    """Lay (name, seconds, load, tau) end to end until the energy is gone; those of no length are left out."""
    found: list[Stretch] = []
    at_s = 0.0
    for name, wanted_s, load, tau_s in parts:
        lasts_s = min(wanted_s, left * tau_s)
        if lasts_s <= 1e-6:
            continue
        after = max(0.0, left - lasts_s / tau_s)
        found.append(Stretch(name, at_s, lasts_s, load, left, after))
        at_s, left = at_s + lasts_s, after
    return tuple(found)


def text(stretches: Sequence[Stretch], paint: Paint, *, utf8: bool, width: int = WIDTH) -> list[str]:
    """Draw the bar with its times and a legend, with as many figures as fit into `width` columns."""
    if not stretches:
        return []
    end_s = stretches[-1].begins_s + stretches[-1].lasts_s
    counts = shares([each.lasts_s for each in stretches], width - 1)
    bar = "".join(_painted(each.name, count, paint, utf8=utf8) for each, count in zip(stretches, counts, strict=True))
    lines = [f" {bar}", f" {_axis(stretches, counts, end_s, width - 1)}"]
    rows = [("what happens", "what", "for", "from", "load", "energy left")] + [
        (
            _LOOKS[each.name].words,
            _LOOKS[each.name].short,
            duration(each.lasts_s),
            _from(each.begins_s),
            f"{100 * each.load:.0f} %",
            f"{100 * each.left:.0f} -> {100 * each.left_after:.0f} %",
        )
        for each in stretches
    ]
    swatches = ["  ", *(_painted(each.name, 2, paint, utf8=utf8) for each in stretches)]
    for kept in _KEPT:
        widths = [max(len(row[column]) for row in rows) for column in kept]
        if 4 + sum(widths) + 2 * (len(kept) - 1) <= width:
            break
    for swatch, row in zip(swatches, rows, strict=True):
        cells = [f"{row[column]:>{wide}}" for column, wide in zip(kept, widths, strict=True)]
        lines.append("  ".join([f" {swatch} {row[kept[0]]:<{widths[0]}}", *cells[1:]]))
    return lines


def of_a_host(
    pause_s: float | None,
    durable_s: float | None,
    commit_s: float | None,
    off_s: float | None,
    *,
    end_s: float | None,
) -> tuple[Stretch, ...]:
    """Return what one host does end to end, until it is off or, if it never is, until end_s. None: never reached."""
    names = {"training": 0.0, "checkpoint": pause_s, "holding": durable_s, "stop": commit_s}
    begins = [(name, at_s) for name, at_s in names.items() if at_s is not None]
    last_s = end_s if off_s is None else off_s
    if last_s is None:
        return ()
    ends = [*(at_s for _, at_s in begins[1:]), last_s]
    return tuple(
        Stretch(name, at_s, until_s - at_s, 0.0, 0.0, 0.0)
        for (name, at_s), until_s in zip(begins, ends, strict=True)
        if until_s > at_s
    )


def together(
    rows: Sequence[tuple[str, Sequence[Stretch]]], paint: Paint, *, utf8: bool, width: int = WIDTH
) -> list[str]:
    """Draw several bars, each with its label, on one time axis; and a legend."""
    end_s = max((each.begins_s + each.lasts_s for _, parts in rows for each in parts), default=0.0)
    if end_s <= 0.0:
        return []
    wide = max(len(label) for label, _ in rows)
    cells = max(width - wide - 3, 10)

    def at(at_s: float) -> int:
        return round(cells * at_s / end_s)

    lines = []
    for label, parts in rows:
        bar = "".join(
            _painted(each.name, at(each.begins_s + each.lasts_s) - at(each.begins_s), paint, utf8=utf8)
            for each in parts
        )
        lines.append(f" {label:<{wide}}  {bar}")
    marks = {at(share * end_s): duration(share * end_s) for share in (0.25, 0.5, 0.75)}
    last = duration(end_s)
    axis = "0"
    for cell, mark in marks.items():
        if cell > len(axis) and cell + len(mark) + 2 <= cells - len(last):
            axis = f"{axis:<{cell}}{mark}"
    lines.append(f" {'':<{wide}}  {axis}{last:>{max(cells - len(axis), len(last) + 1)}}")
    names = [name for name in _LOOKS if any(each.name == name for _, parts in rows for each in parts)]
    legend = "  ".join(f"{_painted(name, 1, paint, utf8=utf8)} {_LOOKS[name].short}" for name in names)
    return [*lines, f" {'':<{wide}}  {legend}"]


_KEPT: Final = ((0, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 2, 3, 5), (1, 2, 5), (1, 2))
"""Columns of the table below the bar, for narrower and narrower terminals: the axis has the times, too."""


def room() -> int:
    """Return how many columns to draw: those of the terminal, or WIDTH if stdout is not one."""
    return max(columns() or WIDTH, _NARROWEST)


_NARROWEST: Final = 24


def shares(parts: Sequence[float], cells: int) -> list[int]:
    """Share out cells in proportion, one at least to each, so that they add up. Fewer cells than parts: one each."""
    whole = sum(parts)
    spare = max(0, cells - len(parts))
    exact = [spare * part / whole for part in parts]
    counts = [int(each) for each in exact]
    behind = sorted(range(len(parts)), key=lambda at: counts[at] - exact[at])
    for at in behind[: spare - sum(counts)]:
        counts[at] += 1
    return [1 + count for count in counts]


def _from(begins_s: float) -> str:
    return "0" if begins_s <= 0.0 else duration(begins_s)


def _painted(name: str, count: int, paint: Paint, *, utf8: bool) -> str:
    look = _LOOKS[name]
    return paint((look.cell if utf8 else look.letter) * count, look.colour)


def _axis(stretches: Sequence[Stretch], cells: Sequence[int], end_s: float, width: int) -> str:
    """Write the times under the borders; one that would run into its neighbour is left to the rows below."""
    last = duration(end_s)
    line = [" "] * width
    line[width - len(last) :] = last
    free, at = 0, 0
    for each, count in zip(stretches, cells, strict=True):
        label = _from(each.begins_s)
        if at >= free and at + len(label) + 1 < width - len(last):
            line[at : at + len(label)] = label
            free = at + len(label) + 1
        at += count
    return "".join(line).rstrip()
