"""What the page shows, from the objects of `/api/v1/status` and `/api/v1/recovery`, the curves and the last outages."""

import base64
import functools
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from powerguard.core.decide import conditions
from powerguard.core.model.state import Online
from powerguard.core.supply.feeds import reported_load
from powerguard.daemon.journal.records import OutageRecord
from powerguard.daemon.observe.page.words import WORDS
from powerguard.daemon.observe.port import Daemon

if TYPE_CHECKING:
    from jinja2 import Template

PACKAGE: Final = "powerguard.daemon.observe.page"
MOST_POINTS: Final = 240
"""Points of the curves that are kept. When they are full, every other is dropped and half as many are taken."""
MOST_OUTAGES: Final = 8
MOST_ROWS: Final = 64
ENDLESS_S: Final = 1e6
"""From here on a runtime is not a battery's: a UPS with utility carries the host."""
WIDTH, HEIGHT = 1000, 160
"""Size of the drawings, in their own units."""


class Point(NamedTuple):
    """One moment of the curves. None: not known."""

    at_s: float
    charge_pct: float | None
    load_pct: float | None
    runtime_s: float | None
    need_s: float | None


class Curves:
    """Battery, load and budget of this outage, in memory. Empty while there is no outage."""

    def __init__(self) -> None:
        """Begin empty."""
        self.points: list[Point] = []
        self.began_wall_s = 0.0
        self._outage = ""
        self._every_s = 1.0

    def take(self, daemon: Daemon) -> None:
        """Take one point, if there is an outage and the last point is old enough."""
        phase, now_s = daemon.state.phase, daemon.clock()
        outage = "" if isinstance(phase, Online) else phase.outage.id
        if outage != self._outage:
            self.points, self._outage, self._every_s = [], outage, 1.0
            self.began_wall_s = daemon.wall()
        if not outage or (self.points and now_s - self.points[-1].at_s < 0.9 * self._every_s):
            return
        budget = conditions.budget_now(daemon.policy, daemon.state, now_s)
        reading = daemon.state.feed.reading
        load = None if reading is None else reported_load(daemon.policy, daemon.state, reading)
        runtime_s = budget.reff_paused_s
        self.points.append(
            Point(
                at_s=now_s,
                charge_pct=None if reading is None else reading.charge_pct,
                load_pct=None if load is None else 100.0 * load,
                runtime_s=runtime_s if runtime_s is not None and runtime_s < ENDLESS_S else None,
                need_s=budget.pause_need_s,
            )
        )
        if len(self.points) >= MOST_POINTS:
            del self.points[-2::-2]
            self._every_s *= 2.0


class Line(NamedTuple):
    """One curve. points: of an SVG polyline; last: the newest value, for the legend."""

    name: str
    points: str
    last: str


class Chart(NamedTuple):
    """One drawing: its title, its curves, what the top of it means, and what a screen reader says of it."""

    title: str
    lines: Sequence[Line]
    top: str
    label: str


def duration(seconds: float | None, words: Mapping[str, str]) -> str:
    """Return seconds in words; "?" when not known."""
    if seconds is None:
        return "?"
    sign, whole = ("-" if seconds <= -0.5 else ""), round(abs(seconds))
    days, hours, minutes, left = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60, whole % 60
    if days:
        parts = [(days, "d"), (hours, "h")]
    elif hours:
        parts = [(hours, "h"), (minutes, "m")]
    else:
        parts = [(minutes, "m"), (left, "s")] if minutes else [(left, "s")]
    return sign + " ".join(f"{number} {words[f'unit.{unit}']}" for number, unit in parts)


def moment(unix_s: float | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a moment in the host's local time; "?" when not known."""
    try:
        return "?" if unix_s is None else time.strftime(form, time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return "?"


def word(words: Mapping[str, str], kind: str, name: str) -> str:
    """Return what a word of the status is called here; itself if this page does not know it."""
    return words.get(f"{kind}.{name}", name.replace("_", " "))


def countdown(status: Mapping[str, Any], words: Mapping[str, str]) -> tuple[str, str]:
    """Return what is counted down, and how much is left of it ("" for nothing)."""
    phase, outage, budget = status["phase"], status["outage"], status["budget"]
    if phase == "online":
        slack_s = budget["slack_s"]
        if slack_s is None or slack_s < 0.0 or slack_s >= ENDLESS_S:
            return "", ""
        return words["count.online"], duration(slack_s, words)
    if phase == "recovery" and status["assumes_utility_fails_now"]:
        return words["count.recovery"], ""
    if phase == "shutdown" and status["next"]:  # Else the power-off is only recorded, and utility ends the outage.
        by_s = outage["power_off_by_at"]
        return words["count.forced"], words["now"] if by_s is None else _left(by_s - status["at"], words)
    if phase == "emergency_checkpoint":
        etas = [each["checkpoint_eta_s"] for each in status["trainers"] if each["checkpoint_eta_s"] is not None]
        if etas:
            return words["count.holding"], _left(max(etas), words)
    if status["assumes_utility_fails_now"]:
        return words["count.back" if status["supply"] == "utility" else "count.none"], ""
    coming = next((each for each in status["next"] if each["in_s"] is not None and not each["suspended"]), None)
    if coming is None:
        return words["count.none"], ""
    return word(words, "count", coming["action"]), _left(coming["in_s"], words)


def _left(seconds: float, words: Mapping[str, str]) -> str:
    return f"{words['in']} {duration(seconds, words)}" if seconds > 0.5 else words["now"]


class Bar(NamedTuple):
    """One stretch of the budget's bar, in units of the drawing."""

    kind: str
    x: float
    width: float


def bars(budget: Mapping[str, Any]) -> tuple[list[Bar], float]:
    """Return the budget as a bar over time, and where the battery is empty: slack, checkpoint, stop, and higher tiers.

    What is needed and does not fit lies behind the battery's end.
    """
    runtime_s = budget["runtime_effective_paused_s"]
    if runtime_s is None or runtime_s >= ENDLESS_S:
        return [], 0.0
    needs = [(kind, budget[f"{kind}_s"]) for kind in ("checkpoint", "stop", "shed")]
    need_s = sum(seconds for _, seconds in needs)
    whole_s = max(runtime_s, need_s, 1.0)
    found, x = [], 0.0
    for kind, seconds in (("slack", max(0.0, runtime_s - need_s)), *needs):
        width = WIDTH * seconds / whole_s
        if width > 0.0:
            found.append(Bar(kind, round(x, 1), round(width, 1)))
        x += width
    return found, round(WIDTH * max(0.0, runtime_s) / whole_s, 1)


def charts(points: Sequence[Point], words: Mapping[str, str]) -> list[Chart]:
    """Return the curves of this outage as drawings; none of fewer than two points."""
    if len(points) < 2:
        return []
    times = [value for point in points for value in (point.runtime_s, point.need_s) if value is not None]
    loads = [point.load_pct for point in points if point.load_pct is not None]
    most_s, most_pct = max([*times, 1.0]), max([*loads, 100.0])

    def in_time(value: float) -> str:
        return duration(value, words)

    def in_percent(value: float) -> str:
        return f"{value:.0f} %"

    made = []
    for title, top, text, fields in (
        ("curve_time", most_s, in_time, (("runtime", "runtime_s"), ("needed", "need_s"))),
        ("curve_share", most_pct, in_percent, (("charge", "charge_pct"), ("load", "load_pct"))),
    ):
        lines = []
        for name, field in fields:
            values = [(point.at_s, getattr(point, field)) for point in points]
            known = [(at_s, value) for at_s, value in values if value is not None]
            if known:
                lines.append(Line(name, _polyline(points, known, top), text(known[-1][1])))
        label = "; ".join(f"{words[line.name]}: {line.last}" for line in lines)
        made.append(Chart(words[title], lines, text(top), f"{words[title]}. {label}"))
    return made


def _polyline(points: Sequence[Point], known: Sequence[tuple[float, float]], top: float) -> str:
    began_s, whole_s = points[0].at_s, max(points[-1].at_s - points[0].at_s, 1e-3)
    return " ".join(
        f"{WIDTH * (at_s - began_s) / whole_s:.0f},{HEIGHT * (1.0 - max(0.0, value) / top):.0f}"
        for at_s, value in known
    )


class Row(NamedTuple):
    """One row of a table. mood: good, warn, bad or plain. details: one text each."""

    name: str
    state: str
    mood: str
    details: Sequence[str]


_URGENT: Final = {"bad": 0, "warn": 1}


def shortened(rows: Sequence[Row], words: Mapping[str, str]) -> list[Row]:
    """Return at most MOST_ROWS rows, so that the page stays small: of more the most urgent, in their order."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    urgent = sorted(range(len(rows)), key=lambda at: _URGENT.get(rows[at].mood, len(_URGENT)))[: MOST_ROWS - 1]
    more = Row("...", words["more"].format(len(rows) - len(urgent)), "plain", [])
    return [*(rows[at] for at in sorted(urgent)), more]


def trainer_rows(status: Mapping[str, Any], words: Mapping[str, str]) -> list[Row]:
    """Return one row for each trainer."""
    found = []
    for each in status["trainers"]:
        name, mood = ("training", "plain") if each["alive"] else ("gone", "bad")
        if each["alive"] and each["checkpoint_in_flight"]:
            name, mood = "writing", "warn"
        elif each["alive"] and each["paused"]:
            name = "paused"
        details = [f"{words['step']} {each['step']}"] if each["step"] is not None else []
        if each["durable"]:
            mood = "good" if mood == "plain" else mood
            details.append(f"{words['durable']}: {words['step']} {each['durable_step']}")
        elif each["durable_age_s"] is not None:
            details.append(f"{words['saved']}: {_ago(each['durable_age_s'], words)}")
        if each["checkpoint_eta_s"] is not None:
            details.append(_left(each["checkpoint_eta_s"], words))
        details += [text for text in (each["failed"], each["signalled"]) if text]
        found.append(Row(each["name"], words[name], "bad" if each["failed"] else mood, details))
    return found


def source_rows(status: Mapping[str, Any], words: Mapping[str, str]) -> list[Row]:
    """Return one row for each source."""
    found = []
    for each in status["sources"]:
        details = [] if each["age_s"] is None else [f"{words['reading']}: {_ago(each['age_s'], words)}"]
        details += [words["unauthenticated"]] if each["forgeable"] else []
        details += [words["doubted"]] if each["doubted"] else []
        details += [text for text in (each["last_error"], each["trouble"]) if text]
        mood = "bad" if not each["up"] else "warn" if each["doubted"] or each["trouble"] else "good"
        state = words["up" if each["up"] else "down"]
        found.append(Row(f"{each['ups']} / {each['source']}", state, mood, details))
    return found


def _ago(seconds: float, words: Mapping[str, str]) -> str:
    return words["ago"].format(duration(seconds, words))


_ORDER: Final = {"armed": 0, "blocked": 1, "unknown": 2, "off": 3}
_MOODS: Final = {"armed": "good", "blocked": "bad", "off": "plain", "unknown": "warn"}


def method_rows(status: Mapping[str, Any], words: Mapping[str, str]) -> list[Row]:
    """Return one row for each power-on method, the armed first."""
    layers = sorted(status["power_on"]["layers"], key=lambda each: _ORDER.get(each["stands"], len(_ORDER)))
    return [
        Row(
            word(words, "method", each["name"]) + (f" ({each['ups']})" if each["ups"] else ""),
            word(words, "stands", each["stands"]),
            _MOODS.get(each["stands"], "plain"),
            [each["why"]] if each["why"] else [],
        )
        for each in layers
    ]


def gate_rows(returning: Mapping[str, Any], words: Mapping[str, str]) -> list[Row]:
    """Return what a returned host waits for."""
    names = {True: ("open", "good"), False: ("closed", "warn"), None: ("unknown", "plain")}
    return [
        Row(word(words, "gate", each["name"]), words[f"gate.{names[each['open']][0]}"], names[each["open"]][1],
            [each["text"]])
        for each in returning["gates"]
    ]  # fmt: skip


_FLAGS: Final = ("low_battery", "replace_battery", "overload")


def ups_rows(status: Mapping[str, Any], words: Mapping[str, str]) -> list[Row]:
    """Return one row for each UPS; with several, what they are together comes first."""
    shown = [("", status["supply"], status["ups"]), *((f["name"], f["supply"], f["ups"]) for f in status["feeds"])]
    moods = {"utility": "good", "battery": "warn", "unknown": "bad"}
    found = []
    for name, supply, ups in shown:
        details = [words["no_reading"]] if ups is None else _ups_details(ups, words)
        if not name:
            share = status["battery"]["health"]
            details += [] if share is None else [f"{words['health']} {100.0 * share:.0f} %"]
        urgent = ups is not None and (ups["low_battery"] or ups["overload"])
        mood = "bad" if urgent else moods.get(supply, "plain")
        found.append(Row(name or (ups or {}).get("name") or "UPS", word(words, "supply", supply), mood, details))
    return found


def _ups_details(ups: Mapping[str, Any], words: Mapping[str, str]) -> list[str]:
    details = [f"{words[key]} {ups[f'{key}_pct']:.0f} %" for key in ("charge", "load") if ups[f"{key}_pct"] is not None]
    if ups["watts"] is not None:
        details.append(f"{ups['watts']:.0f} W")
    if ups["runtime_s"] is not None:
        details.append(f"{words['reported']} {duration(ups['runtime_s'], words)}")
    if ups["input_v"] is not None:
        details.append(f"{words['input']} {ups['input_v']:.0f} V")
    details += [words[flag] for flag in _FLAGS if ups[flag]]
    return [*details, *(alarm for alarm in ups["alarms"] if alarm not in (*_FLAGS, "on_battery"))]


def outage_rows(outages: Sequence[OutageRecord], words: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return id, begin, duration and outcome of the newest outages that the journal holds."""
    return [
        (
            each.id,
            moment(each.started_wall, "%Y-%m-%d %H:%M"),
            "" if each.ended_wall is None else duration(each.lasted_s, words),
            word(words, "outcome", "" if each.ended_wall is None else each.outcome),
        )
        for each in outages[:MOST_OUTAGES]
    ]


_PHASE_MOODS: Final = {"online": "good", "shutdown": "bad"}


def context(
    status: Mapping[str, Any],
    returning: Mapping[str, Any],
    outages: Sequence[OutageRecord],
    curves: Curves,
    language: str,
) -> dict[str, object]:
    """Return everything that the template names."""
    words = WORDS[language]
    phase = status["phase"]
    budget = status["budget"]
    stretches, empty_x = bars(budget)
    what, left = countdown(status, words)
    if returning["stage"] in {"start", "first_step"} and not left:
        what = words["count.started"]
    runtime_s, slack_s = budget["runtime_effective_paused_s"], budget["slack_s"]
    return {
        "w": words,
        "status": status,
        "host": status["host"]["name"] or "",
        "phase": word(words, "phase", phase),
        "mood": "warn" if phase == "online" and not status["ready"] else _PHASE_MOODS.get(phase, "warn"),
        "count": what,
        "left": left,
        "bars": stretches,
        "empty_x": empty_x,
        "endless": runtime_s is not None and runtime_s >= ENDLESS_S,
        "runtime": duration(runtime_s, words),
        "need": duration(budget["need_s"] + budget["shed_s"], words),
        "slack": duration(None if slack_s is None else abs(slack_s), words),
        "fits": slack_s is None or slack_s >= 0.0,
        "checkpoint": duration(budget["checkpoint_s"], words),
        "stop": duration(budget["stop_s"], words),
        "shed": duration(budget["shed_s"], words) if budget["shed_s"] else "",
        "charts": charts(curves.points, words),
        "began": moment(curves.began_wall_s, "%H:%M:%S"),
        "at": moment(status["at"]),
        "clock": moment(status["at"], "%H:%M:%S"),
        "ups": ups_rows(status, words),
        "assumes": status["assumes_utility_fails_now"],
        "steps": [
            (word(words, "action", each["action"]), "" if each["in_s"] is None else _left(each["in_s"], words))
            for each in status["next"]
            if not each["suspended"]
        ],
        "gates": gate_rows(returning, words) if phase == "recovery" else [],
        "trainers": shortened(trainer_rows(status, words), words),
        "sources": shortened(source_rows(status, words), words),
        "methods": method_rows(status, words),
        "outages": outage_rows(outages, words),
        "size": (WIDTH, HEIGHT),
    }


@functools.cache
def template(package: str) -> "Template":
    """Return a page's template. Jinja is imported for its first reader: a host without one does without it."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - see above

    pages = Environment(
        loader=ChoiceLoader([PackageLoader(package, ""), PackageLoader(PACKAGE, "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return pages.get_template("page.html")


def render(values: Mapping[str, object], package: str = PACKAGE) -> str:
    """Return the page of a package. Every value is escaped, and what is no Unicode text is shown as a question mark."""
    return template(package).render(values).encode("utf-8", "replace").decode()


def policy(page: str) -> str:
    """Return the Content-Security-Policy of a page: its own style and script by their hash, and nothing else."""
    allowed = []
    for tag in ("style", "script"):
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        hashes = " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts[:1]
        )
        allowed.append(f"{tag}-src {hashes}")
    return "; ".join(
        ["default-src 'none'", *allowed, "connect-src 'self'", "base-uri 'none'", "form-action 'none'",
         "frame-ancestors 'none'"]
    )  # fmt: skip
