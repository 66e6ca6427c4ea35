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
    "stop": Look("the host stops", "stop", "▞", "S", "yellow"),
    "reserve": Look("reserve", "reserve", "░", "R", "magenta"),
    "margin": Look("margin, not planned with", "margin", "·", "m", "dim"),
}


def from_plan(told: dict[str, Any]) -> tuple[Stretch, ...]:
    """Lay out the data of /api/v1/plan: from now until the battery would be empty. Empty if unknown."""
    terms = {term["name"]: term["value"] for term in told["terms"]}
    left, tau_now_s, tau_paused_s = (terms.get(name) for name in ("left", "tau_now_s", "tau_paused_s"))
    if left is None or not tau_now_s or not tau_paused_s:
        return ()
    at = {step["action"]: step["in_s"] for step in told["next"]}
    commit_s = at.get("shutdown")
    if commit_s is None:
        return ()
    commit_s = max(0.0, commit_s)
    pause_s = min(max(0.0, at.get("emergency_checkpoint") or 0.0), commit_s)
    held_s = at.get("holding", pause_s if told["phase"] == "holding" else commit_s)
    durable_s = min(max(pause_s, held_s or pause_s), commit_s)
    load_now, load_paused = terms.get("load_now") or 0.0, terms.get("load_paused") or 0.0
    reserve_s = terms.get("reserve_s") or 0.0
    stop_s = (terms.get("stop_s") or 0.0) - reserve_s
    return lay_out(
        left,
        (
            ("training", pause_s, load_now, tau_now_s),
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
        told = _from(each.begins_s)
        if at >= free and at + len(told) + 1 < width - len(last):
            line[at : at + len(told)] = told
            free = at + len(told) + 1
        at += count
    return "".join(line).rstrip()
