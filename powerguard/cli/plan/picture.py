"""The budget as a picture: a bar over time for a terminal, and a page with the energy left over time."""

import html
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from powerguard.cli.page import Section, render
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


class Level(NamedTuple):
    """An energy at which a rule comes true."""

    left: float
    label: str


class Look(NamedTuple):
    """How one kind of stretch is drawn: its words, its cell with and without UTF-8, its colours."""

    words: str
    short: str
    cell: str
    letter: str
    colour: str
    light: str
    dark: str


_LOOKS: Final = {
    "training": Look("training on battery", "training", "█", "T", "green", "#2e8b57", "#3fae72"),
    "checkpoint": Look("emergency checkpoint", "checkpoint", "▓", "C", "cyan", "#1f78b4", "#4aa3dd"),
    "holding": Look("holding: utility may return", "holding", "▒", "H", "blue", "#7b68ae", "#9c8ad4"),
    "stop": Look("the host stops", "stop", "▞", "S", "yellow", "#d98c1f", "#e8a544"),
    "reserve": Look("reserve", "reserve", "░", "R", "magenta", "#c0605a", "#d98079"),
    "margin": Look("margin, not planned with", "margin", "·", "m", "dim", "#9a9a9a", "#6f6f6f"),
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


def levels_of(stretches: Sequence[Stretch]) -> tuple[Level, ...]:
    """Name the energies at which a rule comes true, highest first."""
    words = {
        "checkpoint": "pause and checkpoint",
        "stop": "power-off (commit)",
        "margin": "margin",
    }
    return tuple(
        Level(each.left, f"{words[each.name]}: {100 * each.left:.0f} %") for each in stretches if each.name in words
    )


# --- In a terminal ----------------------------------------------------------------------------------------------------


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


# --- As a page --------------------------------------------------------------------------------------------------------

_WIDE, _HIGH = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 30, 44


def svg(stretches: Sequence[Stretch], *, since: str = "utility failed") -> str:
    """Draw the energy that is left, over time, coloured by what happens, with the levels at which rules come true."""
    end_s = stretches[-1].begins_s + stretches[-1].lasts_s
    top = max(0.1, stretches[0].left)

    def x(at_s: float) -> float:
        return _LEFT + (_WIDE - _LEFT - _RIGHT) * at_s / end_s

    def y(left: float) -> float:
        return _TOP + (_HIGH - _TOP - _BOTTOM) * (1.0 - left / top)

    title = "Energy left in the battery over time, by phase"
    parts = [f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="{title}"><title>{title}</title>']
    parts += _grid(top, y)
    fall = [f"{x(0):.1f},{y(stretches[0].left):.1f}"]
    for each in stretches:
        x0, x1, y0, y1 = x(each.begins_s), x(each.begins_s + each.lasts_s), y(each.left), y(each.left_after)
        fill = f"fill: var(--{each.name})"
        parts.append(
            f'<polygon style="{fill}" opacity=".8" points="{x0:.1f},{y(0):.1f} {x0:.1f},{y0:.1f} '
            f'{x1:.1f},{y1:.1f} {x1:.1f},{y(0):.1f}"><title>{_tip(each)}</title></polygon>'
        )
        fall.append(f"{x1:.1f},{y1:.1f}")
    parts.append(f'<polyline class="fall" points="{" ".join(fall)}"/>')
    parts += _times(stretches, x, since)
    parts += _level_lines(levels_of(stretches), y)
    parts += _names(stretches, x)
    return "\n".join([*parts, "</svg>"])


def _tip(each: Stretch) -> str:
    return html.escape(f"{_LOOKS[each.name].words}: {duration(each.lasts_s)} from {duration(each.begins_s)}")


def _grid(top: float, y: Any) -> list[str]:  # noqa: ANN401 - a scale
    step = 0.25 if top > 0.5 else 0.1 if top > 0.2 else 0.05
    parts = []
    for count in range(int(top / step + 1e-9) + 1):
        at = y(count * step)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="soft" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{100 * count * step:.0f} %</text>'
        )
    parts.append(f'<text class="soft" x="{_LEFT}" y="14">energy left, of a new battery</text>')
    return parts


def _times(stretches: Sequence[Stretch], x: Any, since: str) -> list[str]:  # noqa: ANN401 - a scale
    end_s = stretches[-1].begins_s + stretches[-1].lasts_s
    base, last = _HIGH - _BOTTOM, _WIDE - _RIGHT
    parts = [
        f'<text class="soft" x="{last}" y="{base + 18}" text-anchor="end">{duration(end_s)}</text>',
        f'<text class="soft" x="{_LEFT}" y="{base + 36}">time since {since}</text>',
    ]
    free = float(_LEFT)
    for each in stretches:
        at, told = x(each.begins_s), _from(each.begins_s)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 5}"/>')
        wide = 7.0 * len(told) + 8
        if at >= free and at + wide < last - 7.0 * len(duration(end_s)):
            parts.append(f'<text class="soft" x="{at:.1f}" y="{base + 18}">{told}</text>')
            free = at + wide
    return parts


def _level_lines(levels: Sequence[Level], y: Any) -> list[str]:  # noqa: ANN401 - a scale
    parts: list[str] = []
    lowest = 0.0
    for level in levels:
        at = y(level.left)
        # Two levels close together: the lower one's words go further down.
        words_at = max(at - 5, lowest + 15)
        lowest = words_at
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="halo" x="{_WIDE - _RIGHT - 4}" y="{words_at:.1f}" text-anchor="end">'
            f"{html.escape(level.label)}</text>"
        )
    return parts


def is_room(words: str, wide: float) -> bool:
    """Say whether words fit into a width of the picture."""
    return wide > 7.0 * len(words) + 6


def _names(stretches: Sequence[Stretch], x: Any) -> list[str]:  # noqa: ANN401 - a scale
    parts: list[str] = []
    for each in stretches:
        name = _LOOKS[each.name].short
        x0, x1 = x(each.begins_s), x(each.begins_s + each.lasts_s)
        if is_room(name, x1 - x0):
            at = 0.5 * (x0 + x1)
            parts.append(
                f'<text class="halo" x="{at:.1f}" y="{_HIGH - _BOTTOM - 8}" text-anchor="middle">{name}</text>'
            )
    return parts


def page(
    *,
    title: str,
    verdict: str,
    mood: str,
    stretches: Sequence[Stretch],
    sections: Sequence[Section],
    notes: Sequence[str] = (),
    footer: str = "",
    since: str = "utility failed",
) -> str:
    """Return a complete page: the verdict, the picture with its legend, and tables. mood: good, warn or bad."""
    return render(
        "plan.html",
        title=title,
        verdict=verdict,
        mood=mood,
        drawing=svg(stretches, since=since) if stretches else "",
        legend=[
            (
                each.name,
                _LOOKS[each.name].words,
                _from(each.begins_s),
                duration(each.lasts_s),
                f"{100 * each.load:.0f} %",
                f"{100 * each.left:.1f} -> {100 * each.left_after:.1f} %",
            )
            for each in stretches
        ],
        colours={name: (look.light, look.dark) for name, look in _LOOKS.items()},
        notes=notes,
        sections=sections,
        footer=footer,
    )
