"""The timeline of an outage as SVG: one time axis over feeds, phases, runtime, needs, charge and load. Stdlib only."""

import html
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final, NamedTuple

from powerguard.cli.render import clean, duration, is_endless

_WIDE: Final = 960
_LEFT: Final = 118
_RIGHT: Final = 16
_LANE: Final = 22
_GAP: Final = 8
_CURVE: Final = 150
_SHARES: Final = 110
"""Heights of the two charts."""
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
    "charge": ("#2563b8", "#7db2ff"),
    "load": ("#a2560a", "#f0a35a"),
}
_PAGE: Final = {
    "ink": ("#1d1d1f", "#ececf0"),
    "soft": ("#6b6b70", "#a0a0a8"),
    "line": ("#d0d0d4", "#3c3c42"),
    "page": ("#ffffff", "#17171a"),
    "good": ("#1c7a43", "#5fd38d"),
    "warn": ("#9a6200", "#f0b75a"),
    "bad": ("#b3261e", "#ff8a80"),
}
_RULES: Final = """\
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } svg .soft { fill: var(--soft); }
svg .grid { stroke: var(--line); } svg .mark { stroke: var(--ink); stroke-width: 1; opacity: .6; }
svg .halo { stroke: var(--page); stroke-width: 4px; paint-order: stroke; stroke-linejoin: round; }
svg polyline, svg .key { fill: none; stroke-width: 2; } svg .dot { fill: var(--ink); }
svg .reported { stroke: var(--soft); stroke-width: 1.5; } svg .effective { stroke: var(--ink); }
svg .needs { stroke: var(--bad); stroke-dasharray: 6 3; } svg .charge { stroke: var(--t-charge); }
svg .load { stroke: var(--t-load); } svg .predicted { stroke-width: 1.5; stroke-dasharray: 2 3; }
"""


class Mark(NamedTuple):
    """One event at a moment."""

    at_s: float
    text: str


def style() -> str:
    """Return the colours, in light and dark, and the rules of the drawing; the page around it uses the colours, too."""
    named = _PAGE | {f"t-{name}": look for name, look in _COLOURS.items()}
    light, dark = (" ".join(f"--{name}: {look[at]};" for name, look in named.items()) for at in (0, 1))
    fills = " ".join(f"svg .t-{name} {{ fill: var(--t-{name}); }}" for name in _COLOURS)
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{_RULES}{fills}\n"
    )


def standalone(drawing: str) -> str:
    """Return a drawing as a file of its own. An image has no page around it that gives it a background."""
    head, _, body = drawing.partition(">")
    own = f"<style>{style()}svg {{ background: var(--page); }}</style>"
    return f'{head} xmlns="http://www.w3.org/2000/svg">\n{own}{body}\n'


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
    for chart in (_runtime, _shares):
        drawn, y = chart(report, x, y + 18)
        parts += drawn
    drawn, bottom = _marks(marks, x, y)
    parts += drawn
    parts = [*_axis(x, bottom), *parts]
    title = "Timeline of the outage: feeds, phases, checkpoints, runtime, needs, charge, load and actions"
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDE} {bottom + 40:.0f}" role="img" aria-label="{title}">'
        f"<title>{title}</title>\n" + "\n".join(parts) + "\n</svg>"
    )


def _is_room(text: str, wide: float) -> bool:
    return wide > 7.0 * len(text) + 6


def _soft(at: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="soft" x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(clean(text))}</text>'


def _label(y: float, text: str) -> str:
    short = clean(text)
    short = short if len(short) <= 17 else short[:16] + "\u2026"
    return (
        f'<text x="{_LEFT - 8}" y="{y + _LANE - 7:.1f}" text-anchor="end">{html.escape(short)}'
        f"<title>{html.escape(clean(text))}</title></text>"
    )


def _bar(name: str, text: str, span: tuple[float, float], x: _Scale, y: float) -> str:
    begun_s, to_s = span
    x0, x1 = x(begun_s), max(x(to_s), x(begun_s) + 1.5)
    colour = name if name in _COLOURS else "other"
    title = f"{text}: {duration(to_s - begun_s)} from {'' if begun_s < 0.0 else '+'}{duration(begun_s)}"
    drawn = (
        f'<rect class="t-{colour}" x="{x0:.1f}" y="{y:.1f}" width="{x1 - x0:.1f}" height="{_LANE}" rx="2">'
        f"<title>{html.escape(clean(title))}</title></rect>"
    )
    if _is_room(text, x1 - x0):
        at = 0.5 * (x0 + x1)
        drawn += (
            f'<text class="halo" x="{at:.1f}" y="{y + _LANE - 7:.1f}" text-anchor="middle">{html.escape(text)}</text>'
        )
    return drawn


def _lane(label: str, bars: Sequence[tuple[str, str, Mapping[str, Any]]], x: _Scale, y: float) -> list[str]:
    return [_label(y, label), *(_bar(name, text, (p["from_s"], p["to_s"]), x, y) for name, text, p in bars)]


def _feed(feed: Mapping[str, Any], x: _Scale, y: float) -> list[str]:
    seen = [s for s in feed["stretches"] if s["to_s"] > 0.0]
    return _lane(feed["ups"], [(s["source"], SOURCE_WORDS.get(s["source"], s["source"]), s) for s in seen], x, y)


def _checkpoints(trainers: Sequence[Mapping[str, Any]], x: _Scale, y: float) -> tuple[list[str], float]:
    parts: list[str] = []
    if len(trainers) > _TRAINERS:
        durable = [t["durable_s"] for t in trainers if t["durable_s"] is not None]
        parts.append(_label(y, "checkpoints"))
        text = f"{len(durable)} of {len(trainers)} trainers durable"
        name = "emergency_checkpoint" if len(durable) == len(trainers) else "bad"
        begun_s = min(t["asked_s"] for t in trainers)
        parts.append(_bar(name, text, (begun_s, max(durable, default=begun_s)), x, y))
        parts += _beside(text, x(begun_s), x(max(durable, default=begun_s)), y)
        return parts, y + _LANE + _GAP
    for each in trainers:
        parts.append(_label(y, each["trainer"]))
        done_s = each["durable_s"]
        end_s = done_s if done_s is not None else min(x.end_s, each["asked_s"] + (each["expected_s"] or 0.0))
        step = f" of step {each['step']}" if each["step"] is not None else ""
        text = f"checkpoint{step} durable" if done_s is not None else "no checkpoint"
        parts.append(
            _bar("emergency_checkpoint" if done_s is not None else "bad", text, (each["asked_s"], end_s), x, y)
        )
        parts += _beside(text, x(each["asked_s"]), x(end_s), y)
        y += _LANE + _GAP
    return parts, y


def _beside(text: str, x0: float, x1: float, y: float) -> list[str]:
    """Return the words of a bar that is too short for them: behind it, or before it at the end of the drawing."""
    if _is_room(text, x1 - x0):
        return []
    if x1 + 6 + _LETTER * len(text) > _WIDE:
        return [_soft(x0 - 6, y + _LANE - 7, text, "end")]
    return [_soft(x1 + 6, y + _LANE - 7, text)]


class _Stretch(NamedTuple):
    """From one decision to the next one: the effective runtime at its load, and what it was at the end of it.

    predicted_s, predicted_share: runtime, and share of the energy, that were to be left at its end. None: unknown.
    """

    from_s: float
    to_s: float
    runtime_s: float
    then_s: float | None
    predicted_s: float | None
    predicted_share: float | None


def _stops_s(report: Mapping[str, Any]) -> float:
    """Return when the host went off, else the last moment."""
    return float(next((p["from_s"] for p in report["phases"] if p["name"] == "off"), report["last_s"]))


def _decisions(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the budget of each decision until the host went off."""
    return [b for b in report["budget"] if b["phase"] != "online" and b["at_s"] <= _stops_s(report)]


def _stretches(report: Mapping[str, Any]) -> list[_Stretch]:
    """Return the stretches between the decisions. Until the pause its load counts, then the paused one."""
    stops_s, decided, found = _stops_s(report), _decisions(report), []
    for at, each in enumerate(decided):
        later = decided[at + 1] if at + 1 < len(decided) else None
        lasts_s = each["effective_now_s" if each["phase"] == "on_battery" else "effective_paused_s"]
        then_s = None if later is None else later["effective_now_s"]
        if lasts_s is not None and not is_endless(lasts_s):
            to_s = stops_s if later is None else later["at_s"]
            share = each["predicted_left"] / each["left"] if each["predicted_left"] is not None else None
            then_s = None if is_endless(then_s) else then_s
            found.append(_Stretch(each["at_s"], to_s, lasts_s, then_s, each["predicted_s"], share))
    return found


class _Chart:
    """The axis of a chart and its legend. keys: classes of its lines, with their words; top: the highest value."""

    def __init__(self, label: str, keys: Mapping[str, str], y: float, height: float, x: _Scale) -> None:
        self.parts = [_label(y - 23, label)]
        self._y, self._height, self._x, self._top = y, height, x, 1.0
        left = float(_LEFT)
        for name, text in keys.items():
            at = f'x1="{left:.1f}" x2="{left + 24:.1f}" y1="{y - 12:.1f}" y2="{y - 12:.1f}"'
            self.parts += [f'<line class="key {name}" {at}/>', _soft(left + 30, y - 8, text)]
            left += 48 + _LETTER * len(text)

    def scale(self, top: float, as_text: Callable[[float], str]) -> None:
        """Draw the levels. as_text: a value in words."""
        self._top = top
        for share in (0.0, 0.5, 1.0):
            level = self._at(share * top)
            self.parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>'
            )
            if share:
                self.parts.append(_soft(_LEFT - 8, level + 4, as_text(share * top), "end"))

    def _at(self, value: float) -> float:
        return self._y + self._height - (self._height - 6) * min(max(value, 0.0), self._top) / self._top

    def line(self, name: str, points: Sequence[tuple[float, float]]) -> None:
        """Draw a line."""
        places = " ".join(f"{self._x(at_s):.1f},{self._at(value):.1f}" for at_s, value in points)
        self.parts.append(f'<polyline class="{name}" points="{places}"/>')

    def dot(self, at_s: float, value: float) -> None:
        """Draw a runtime at one moment."""
        place = f'cx="{self._x(at_s):.1f}" cy="{self._at(value):.1f}"'
        self.parts.append(f'<circle class="dot" {place} r="3"><title>{html.escape(duration(value))}</title></circle>')

    def readings(self, name: str, points: Sequence[tuple[float, float]]) -> None:
        """Draw a line that stops at a long gap. A report of a long outage has few of its readings."""
        gaps = [later[0] - point[0] for point, later in pairwise(points)]
        silent_s = max(30.0, 3.0 * median(gaps)) if gaps else 0.0
        runs: list[list[tuple[float, float]]] = []
        for point in points:
            if runs and point[0] - runs[-1][-1][0] <= silent_s:
                runs[-1].append(point)
            else:
                runs.append([point])
        for run in runs:
            self.line(name, run)

    def stairs(self, name: str, points: Sequence[tuple[float, float]], end_s: float) -> None:
        """Draw values that hold until the next one."""
        if points:
            ends = [*(at_s for at_s, _ in points[1:]), max(end_s, points[-1][0])]
            steps = [
                (at_s, value) for (from_s, value), to_s in zip(points, ends, strict=True) for at_s in (from_s, to_s)
            ]
            self.line(name, steps)


def _runtime(report: Mapping[str, Any], x: _Scale, y: float) -> tuple[list[str], float]:
    """Draw the reported runtime, the effective one from decision to decision, predicted and measured, and the needs."""
    # An idle UPS on utility reports hours: that would flatten the minutes that decided.
    spans = [
        (s["from_s"], s["to_s"]) for feed in report["feeds"] for s in feed["stretches"] if s["source"] == "battery"
    ]
    known = [(p["at_s"], p["reported_s"]) for p in report["runtime"] if p["reported_s"] is not None]
    on_battery = [point for point in known if any(since_s <= point[0] <= to_s for since_s, to_s in spans)]
    stretches = _stretches(report)
    stops_s = _stops_s(report)
    needs = [(b["at_s"], b["needs_s"]) for b in _decisions(report) if b["needs_s"] is not None]
    values = [value for _, value in (*(on_battery or known), *needs)]
    values += [value for s in stretches for value in (s.runtime_s, s.then_s) if value is not None]
    if not values:
        return [_label(y, "runtime"), _soft(_LEFT, y + 15, "unknown")], y + _LANE + _GAP
    keys = {
        "reported": "reported by the UPS",
        "effective": "effective, at the load",
        "effective predicted": "as predicted",
        "needs": "still needed",
    }
    chart = _Chart("runtime, needs", keys, y, _CURVE, x)
    chart.scale(max(*values, 1.0), duration)
    chart.readings("reported", known)
    chart.stairs("needs", needs, stops_s)
    for s in stretches:
        if s.predicted_s is not None:
            chart.line("effective predicted", [(s.from_s, s.runtime_s), (s.to_s, s.predicted_s)])
        chart.dot(s.from_s, s.runtime_s)
        if s.then_s is not None:
            chart.line("effective", [(s.from_s, s.runtime_s), (s.to_s, s.then_s)])
            chart.dot(s.to_s, s.then_s)
    return chart.parts, y + _CURVE + _GAP


def _shares(report: Mapping[str, Any], x: _Scale, y: float) -> tuple[list[str], float]:
    """Draw charge and load as the UPS reported them, and as they were predicted at the decisions."""
    charges, loads = (
        [(p["at_s"], p[name]) for p in report["runtime"] if p[name] is not None] for name in ("charge_pct", "load_pct")
    )
    if not charges and not loads:
        return [_label(y, "charge, load"), _soft(_LEFT, y + 15, "unknown")], y + _LANE + _GAP
    keys = {"charge": "charge", "charge predicted": "as predicted", "load": "load", "load predicted": "as predicted"}
    chart = _Chart("charge, load", keys, y, _SHARES, x)
    chart.scale(max([100.0, *(value for _, value in loads)]), lambda value: f"{value:.0f} %")
    chart.readings("charge", charges)
    chart.readings("load", loads)
    stretches = _stretches(report)
    for s in stretches:
        before = [value for at_s, value in charges if at_s <= s.from_s]
        if before and s.predicted_share is not None:
            chart.line("charge predicted", [(s.from_s, before[-1]), (s.to_s, before[-1] * s.predicted_share)])
    paused_s = next((b["at_s"] for b in report["budget"] if b["phase"] == "emergency_checkpoint"), None)
    for each in report["predictions"]:
        if each["unit"] == "share" and paused_s is not None and stretches:
            value = 100.0 * each["predicted"]
            chart.line("load predicted", [(paused_s, value), (max(paused_s, stretches[-1].to_s), value)])
    return chart.parts, y + _SHARES + _GAP


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
        anchor, text_at = ("end", place - 4) if is_left else ("start", place + 4)
        parts.append(f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{y:.1f}" y2="{at + 2:.1f}"/>')
        parts.append(f'<text x="{text_at:.1f}" y="{at:.1f}" text-anchor="{anchor}">{html.escape(mark.text)}</text>')
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
