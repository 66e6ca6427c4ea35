"""The timeline of an outage as SVG: one time axis over feeds, phases, runtime and needs. Stdlib only."""

import html
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from powerguard.cli.render import clean, duration, is_endless

_WIDE: Final = 960
_LEFT: Final = 118
_RIGHT: Final = 16
_LANE: Final = 22
_GAP: Final = 8
_CURVE: Final = 150
_FEEDS: Final = 16
"""Most feeds and trainers with their own lane; one line counts the rest."""
_TRAINERS: Final = 8
_LETTER: Final = 6.4
_MARK_ROWS: Final = 6

PHASE_WORDS: Final = {
    "on_battery": "training, on battery",
    "emergency_checkpoint": "emergency checkpoint",
    "holding": "hold",
    "shutdown": "power-off",
    "off": "down",
    "boot": "boot",
    "recovery": "return",
}
SOURCE_WORDS: Final = {"utility": "utility", "battery": "battery"}
_COLOURS: Final = {
    "on_battery": ("#2e8b57", "#3fae72"),
    "emergency_checkpoint": ("#1f78b4", "#4aa3dd"),
    "holding": ("#7b68ae", "#9c8ad4"),
    "shutdown": ("#d98c1f", "#e8a544"),
    "off": ("#55555c", "#85858e"),
    "boot": ("#a98b5f", "#c3a679"),
    "recovery": ("#3a8f93", "#55b4b8"),
    "utility": ("#bcd9c6", "#2f5a40"),
    "battery": ("#eab676", "#8a5a1a"),
    "other": ("#c9c9cf", "#4c4c54"),
    "bad": ("#c0605a", "#d98079"),
}


class Mark(NamedTuple):
    """One event at a moment."""

    at_s: float
    text: str


def colours() -> dict[str, tuple[str, str]]:
    """Return the picture's colours in light and dark, by the names that its shapes use."""
    return {f"t-{name}": look for name, look in _COLOURS.items()}


class _Scale:
    """Seconds to places. A long darkness is drawn short, so that the minutes around it can be read; it is marked."""

    def __init__(self, end_s: float, cut: tuple[float, float] | None) -> None:
        self.end_s = max(end_s, 1.0)
        self._cut = None
        if cut is not None and cut[1] - cut[0] > 0.4 * self.end_s:
            rest_s = self.end_s - (cut[1] - cut[0])
            self._cut = (*cut, max(0.15 * rest_s, 1.0))
        self._shown_s = self._shown(self.end_s)

    @property
    def cut(self) -> tuple[float, float] | None:
        """The stretch that is drawn short: from and to; None if there is none."""
        return None if self._cut is None else self._cut[:2]

    def _shown(self, at_s: float) -> float:
        if self._cut is None or at_s <= self._cut[0]:
            return at_s
        begun_s, to_s, shown_s = self._cut
        if at_s >= to_s:
            return at_s - (to_s - begun_s) + shown_s
        return begun_s + shown_s * (at_s - begun_s) / (to_s - begun_s)

    def __call__(self, at_s: float) -> float:
        at_s = min(max(at_s, 0.0), self.end_s)
        return _LEFT + (_WIDE - _LEFT - _RIGHT) * self._shown(at_s) / max(self._shown_s, 1e-9)

    def ticks(self) -> list[float]:
        """Return about eight round moments; none in the stretch that is drawn short."""
        shown_s = self._shown_s
        step = next((s for s in _STEPS if shown_s / s <= 9), _STEPS[-1] * (1 + int(shown_s / _STEPS[-1] / 9)))
        found: list[float] = []
        at_s = 0.0
        while at_s <= self.end_s and len(found) < 40:
            found.append(at_s)
            at_s += step
            if self._cut is not None and self._cut[0] < at_s < self._cut[1]:
                at_s = -(-self._cut[1] // step) * step
        return found


_STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)


def timeline(report: Mapping[str, Any], marks: Sequence[Mark]) -> str:
    """Draw an outage. It loads no other file, and every word is escaped."""
    off = next((p for p in report["phases"] if p["name"] == "off" and p["s"]), None)
    x = _Scale(report["last_s"], None if off is None else (off["from_s"], off["to_s"]))
    parts: list[str] = []
    y = 10.0
    for feed in report["feeds"][:_FEEDS]:
        parts += _feed(feed, x, y)
        y += _LANE + _GAP
    if len(report["feeds"]) > _FEEDS:
        parts.append(_soft(_LEFT, y + 12, f"and {len(report['feeds']) - _FEEDS} more feeds"))
        y += _LANE
    parts += _lane("phase", [(p["name"], PHASE_WORDS.get(p["name"], p["name"]), p) for p in report["phases"]], x, y)
    y += _LANE + _GAP
    drawn, y = _checkpoints(report["trainers"], x, y)
    parts += drawn
    curve, y = _curves(report, x, y + 14)
    parts += curve
    drawn, bottom = _marks(marks, x, y)
    parts += drawn
    parts = [*_axis(x, bottom), *parts]
    title = "Timeline of the outage: feeds, phases, checkpoints, runtime, needs and actions"
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDE} {bottom + 40:.0f}" role="img" aria-label="{title}">'
        f"<title>{title}</title>\n" + "\n".join(parts) + "\n</svg>"
    )


def _is_room(words: str, wide: float) -> bool:
    return wide > 7.0 * len(words) + 6


def _soft(at: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text class="soft" x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(clean(words))}</text>'


def _label(y: float, words: str) -> str:
    short = clean(words)
    short = short if len(short) <= 17 else short[:16] + "\u2026"
    return (
        f'<text x="{_LEFT - 8}" y="{y + _LANE - 7:.1f}" text-anchor="end">{html.escape(short)}'
        f"<title>{html.escape(clean(words))}</title></text>"
    )


def _bar(name: str, words: str, span: tuple[float, float], x: _Scale, y: float) -> str:
    begun_s, to_s = span
    x0, x1 = x(begun_s), max(x(to_s), x(begun_s) + 1.5)
    colour = name if name in _COLOURS else "other"
    told = f"{words}: {duration(to_s - begun_s)} from {'' if begun_s < 0.0 else '+'}{duration(begun_s)}"
    drawn = (
        f'<rect style="fill: var(--t-{colour})" x="{x0:.1f}" y="{y:.1f}" width="{x1 - x0:.1f}" height="{_LANE}" rx="2">'
        f"<title>{html.escape(clean(told))}</title></rect>"
    )
    if _is_room(words, x1 - x0):
        at = 0.5 * (x0 + x1)
        drawn += (
            f'<text class="halo" x="{at:.1f}" y="{y + _LANE - 7:.1f}" text-anchor="middle">{html.escape(words)}</text>'
        )
    return drawn


def _lane(label: str, bars: Sequence[tuple[str, str, Mapping[str, Any]]], x: _Scale, y: float) -> list[str]:
    return [_label(y, label), *(_bar(name, words, (p["from_s"], p["to_s"]), x, y) for name, words, p in bars)]


def _feed(feed: Mapping[str, Any], x: _Scale, y: float) -> list[str]:
    seen = [s for s in feed["stretches"] if s["to_s"] > 0.0]
    return _lane(feed["ups"], [(s["source"], SOURCE_WORDS.get(s["source"], s["source"]), s) for s in seen], x, y)


def _checkpoints(trainers: Sequence[Mapping[str, Any]], x: _Scale, y: float) -> tuple[list[str], float]:
    parts: list[str] = []
    if len(trainers) > _TRAINERS:
        durable = [t["durable_s"] for t in trainers if t["durable_s"] is not None]
        parts.append(_label(y, "checkpoints"))
        words = f"{len(durable)} of {len(trainers)} trainers durable"
        name = "emergency_checkpoint" if len(durable) == len(trainers) else "bad"
        begun_s = min(t["asked_s"] for t in trainers)
        parts.append(_bar(name, words, (begun_s, max(durable, default=begun_s)), x, y))
        if not _is_room(words, x(max(durable, default=begun_s)) - x(begun_s)):
            parts.append(_soft(x(max(durable, default=begun_s)) + 6, y + _LANE - 7, words))
        return parts, y + _LANE + _GAP
    for each in trainers:
        parts.append(_label(y, each["trainer"]))
        done_s = each["durable_s"]
        end_s = done_s if done_s is not None else min(x.end_s, each["asked_s"] + (each["expected_s"] or 0.0))
        step = f" of step {each['step']}" if each["step"] is not None else ""
        words = f"checkpoint{step} durable" if done_s is not None else "no checkpoint"
        parts.append(
            _bar("emergency_checkpoint" if done_s is not None else "bad", words, (each["asked_s"], end_s), x, y)
        )
        if not _is_room(words, x(end_s) - x(each["asked_s"])):
            parts.append(_soft(x(end_s) + 6, y + _LANE - 7, words))
        y += _LANE + _GAP
    return parts, y


def _curves(report: Mapping[str, Any], x: _Scale, y: float) -> tuple[list[str], float]:
    """Draw the reported runtime, the effective one at each decision, and the needs."""
    budget = [b for b in report["budget"] if b["phase"] != "online"]
    # An idle UPS on utility reports hours: that would flatten the minutes that decided.
    spans = [
        (s["from_s"], s["to_s"]) for feed in report["feeds"] for s in feed["stretches"] if s["source"] == "battery"
    ]
    points = [p for p in report["runtime"] if any(since_s <= p["at_s"] <= to_s for since_s, to_s in spans)]
    values = [p["reported_s"] for p in points or report["runtime"]]
    values += [
        v
        for b in budget
        for v in (b["effective_paused_s"], b["effective_now_s"], b["needs_s"])
        if v is not None and not is_endless(v)
    ]
    if not values:
        return [_label(y, "runtime"), _soft(_LEFT, y + 15, "unknown")], y + _LANE + _GAP
    top: float = max(*values, 1.0)
    base = y + _CURVE

    def at(seconds: float) -> float:
        return base - (_CURVE - 6) * min(seconds, top) / top

    parts = [_label(y - 19, "runtime, needs")]
    for share in (0.0, 0.5, 1.0):
        level = at(share * top)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        if share:
            parts.append(_soft(_LEFT - 8, at(share * top) + 4, duration(share * top), "end"))
    parts += _broken("reported", [(p["at_s"], p["reported_s"]) for p in report["runtime"]], x, at)
    stops_s = next((p["from_s"] for p in report["phases"] if p["name"] == "off"), report["last_s"])
    needed = [b for b in budget if b["needs_s"] is not None and b["at_s"] <= stops_s]
    parts += _stairs("needs", [(b["at_s"], b["needs_s"]) for b in needed], min(stops_s, report["last_s"]), x, at)
    told = [(b["at_s"], b["effective_paused_s"]) for b in needed if b["effective_paused_s"] is not None]
    parts += _broken("effective", told, x, at, silent_s=float("inf"))
    parts += [
        f'<circle class="dot" cx="{x(s):.1f}" cy="{at(v):.1f}" r="3"><title>{html.escape(duration(v))}</title></circle>'
        for s, v in told
    ]
    legend = y - 4
    for place, (name, words) in enumerate(
        (("reported", "reported by the UPS"), ("effective", "effective, training paused"), ("needs", "still needed"))
    ):
        left = _LEFT + place * 220
        parts.append(f'<line class="{name}" x1="{left}" x2="{left + 24}" y1="{legend}" y2="{legend}"/>')
        parts.append(_soft(left + 30, legend + 4, words))
    return parts, base + _GAP


def _broken(name: str, points: Sequence[tuple[float, float]], x: _Scale, at: Any, silent_s: float = 30.0) -> list[str]:  # noqa: ANN401 - a scale
    """Draw a line that stops at a long gap of the readings."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= silent_s:
            runs[-1].append(point)
        else:
            runs.append([point])
    return [
        f'<polyline class="{name}" points="{" ".join(f"{x(s):.1f},{at(v):.1f}" for s, v in run)}"/>' for run in runs
    ]


def _stairs(name: str, points: Sequence[tuple[float, float]], end_s: float, x: _Scale, at: Any) -> list[str]:  # noqa: ANN401 - a scale
    """Draw values that hold until the next one."""
    if not points:
        return []
    drawn = []
    for place, (s, value) in enumerate(points):
        to_s = points[place + 1][0] if place + 1 < len(points) else max(end_s, s)
        drawn += [f"{x(s):.1f},{at(value):.1f}", f"{x(to_s):.1f},{at(value):.1f}"]
    return [f'<polyline class="{name}" points="{" ".join(drawn)}"/>']


def _marks(marks: Sequence[Mark], x: _Scale, y: float) -> tuple[list[str], float]:
    """Write the actions under their moments, in as many rows as needed; the rest is in the table below."""
    parts, rows, left_out = [_label(y, "actions")], [float(_LEFT)] * _MARK_ROWS, 0
    used = 0
    for mark in marks:
        place, wide = x(mark.at_s), _LETTER * len(mark.text) + 10
        is_left = place + wide > _WIDE - _RIGHT
        begun = place - wide if is_left else place
        row = next((r for r, free in enumerate(rows) if begun >= free), None)
        if row is None:
            left_out += 1
            continue
        used = max(used, row + 1)
        rows[row] = begun + wide
        at = y + 15 + row * 17
        anchor, words_at = ("end", place - 4) if is_left else ("start", place + 4)
        parts.append(f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{y:.1f}" y2="{at + 2:.1f}"/>')
        parts.append(f'<text x="{words_at:.1f}" y="{at:.1f}" text-anchor="{anchor}">{html.escape(mark.text)}</text>')
    bottom = y + 17 * max(used, 1) + _GAP
    if left_out:
        parts.append(_soft(_WIDE - _RIGHT, bottom + 6, f"and {left_out} more, in the table", "end"))
        bottom += 14
    return parts, bottom


def _axis(x: _Scale, bottom: float) -> list[str]:
    parts = []
    for at_s in x.ticks():
        place = x(at_s)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="4" y2="{bottom:.1f}"/>')
        if place < _WIDE - _RIGHT - 40:
            parts.append(_soft(place, bottom + 15, "0" if at_s == 0 else f"+{duration(at_s)}", "middle"))
    short = "" if x.cut is None else f"; {duration(x.cut[1] - x.cut[0])} down are drawn short"
    parts.append(_soft(_LEFT, bottom + 33, f"time since the outage began{short}"))
    return parts
