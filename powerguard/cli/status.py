"""`powerguard status`: phase, battery, slack and trainers, for people and for monitoring.

While the daemon answers, only the standard library is imported. When it does not, the journal says what it last knew.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from powerguard.cli.client import DownError, RefusedError, add_options, get
from powerguard.cli.render import (
    NOT_ARMED,
    OUTCOMES,
    Paint,
    clean,
    clock_of,
    duration,
    fold,
    is_endless,
    is_utf8,
    moment,
    number,
    table,
)
from powerguard.cli.shared import EX_DOWN, EX_INTERRUPTED

if TYPE_CHECKING:
    from powerguard.core.model.state import Battery, State
    from powerguard.daemon.journal import Loaded

JOURNAL: Final = "/var/lib/powerguard/journal.sqlite"


def last_known(path: str = JOURNAL) -> tuple[dict[str, Any] | None, str]:
    """Return phase, boot, moment and outage as last written, and "" or why they cannot be had."""
    from powerguard.core.model.state import Online, phase_name

    loaded, state, trouble = written(path)
    if loaded is None or state is None:
        return None, trouble
    outage = None if isinstance(state.phase, Online) else state.phase.outage.id
    return {"phase": phase_name(state.phase), "boot_id": loaded.boot_id, "at": loaded.wall, "outage": outage}, ""


def last_battery(path: str = JOURNAL) -> tuple[dict[str, Any] | None, str]:
    """Return what was learned of the battery as last written, and "" or why it cannot be had.

    ups: each of several UPSes by itself, else empty; the other keys are of them all together.
    """
    loaded, state, trouble = written(path)
    if loaded is None or state is None:
        return None, trouble
    boot_wall = loaded.wall - loaded.at_s
    each = [
        {"name": its.ups, **_learned(its.battery, boot_wall)} for its in sorted(state.upses, key=lambda its: its.ups)
    ]
    return {"at": loaded.wall, **_learned(state.battery, boot_wall), "ups": each}, ""


def _learned(battery: "Battery", boot_wall: float) -> dict[str, Any]:
    """Return what was learned of one battery. boot_wall: Unix seconds of the boot whose clock it has."""
    health = battery.model.health
    measured = health and {
        "share": health.share,
        "error": health.error,
        "depth": health.depth,
        "how": health.how,
        "at_least": health.least,
        "at": boot_wall + health.at_s,
    }
    return {
        "health": battery.health,
        "measured": measured,
        "points": [
            {"load_pct": round(100.0 * point.load, 3), "runtime_s": point.tau_s, "at": boot_wall + point.at_s}
            for point in battery.model.points
        ],
        "recharge_s": battery.model.recharge_s,
        "used": battery.used,
        "left": battery.left,
    }


def written(path: str) -> "tuple[Loaded | None, State | None, str]":
    """Return what the journal last knew, and "" or why it cannot be had."""
    from powerguard.daemon.journal import JournalError, read_all, read_only

    try:
        with read_only(Path(path)) as db:
            loaded, _ = read_all(db)
    except JournalError as error:
        return None, None, str(error)
    return loaded, loaded.state, "" if loaded.state is not None else loaded.trouble or f"{path}: the journal is empty"


_COLOURS: Final = {"online": "green", "on_battery": "yellow", "recovery": "yellow", "shutdown": "red"}
_STEPS: Final = {
    "emergency_checkpoint": {
        "pause": "pause training, checkpoint",
        "exit": "checkpoint, then training exits",
        "continue": "checkpoint, training continues",
        "mixed": "checkpoint, then each trainer pauses, exits or continues as set",
    },
    "holding": {
        "pause": "hold, training paused",
        "exit": "hold, training has exited",
        "continue": "hold, training continues",
        "mixed": "hold",
    },
}
"""Text of each phase, by the trainers' conduct after their checkpoint."""
BEGUN: Final = ("emergency_checkpoint", "holding")
"""Phases that begin when three quarters of the runtime are needed; a lower rest is normal in them."""
_QUARTERS: Final = 0.75
"""Share of the runtime with training paused that checkpoint and stop fit into (core/decide/conditions.py)."""
CALLED_OFF: Final = "no power-off, even when the battery runs empty: this outage's shutdown was aborted"
_BECAUSE: Final = {
    "budget": "only checkpoint and stop still fit",
    "runtime_short": "little runtime is left at this load",
    "low_battery": "the UPS reports a low battery",
    "blind": "runtime unknown",
    "blind: blind_s": "runtime unknown, and blind_s is over",
    "blind: charge_pct": "runtime unknown, and the charge is low",
    "blind: low_battery": "runtime unknown, and the UPS reports a low battery",
    "power_off_at": "the UPS has announced a cut of its output",
    "power_off_at permits no hold": "the checkpoint is durable then, and the UPS has announced a cut of its output",
}
_METHODS: Final = {
    "policy": "BMC power restore policy",
    "late_reboot": "late reboot (utility is back before the host is off)",
    "output": "UPS output, off and on again",
    "rtc": "wake alarm of the host's clock",
    "sentinel": "sentinel",
    "watchdog": "BMC watchdog",
}


class Row(NamedTuple):
    """One row of the screen. rank: a terminal with too few lines omits the highest first, 0 last.

    share: of a bar before the text; None: no bar. mark: a share that is marked on the bar.
    """

    rank: int
    label: str
    text: str
    share: float | None = None
    mark: float | None = None
    colour: str = ""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Show phase, battery, budget, trainers and all conditions that reduce protection. Exit 0: "
        "online; 1: in an outage or coming back; 2: shutting down; 3: online, but protection is reduced; 4: the "
        "daemon is down."
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="one JSON object on stdout")
    formats.add_argument("--short", action="store_true", help="one line")
    parser.add_argument("-w", "--watch", action="store_true", help="refresh every second, until interrupted")
    parser.add_argument("--journal", metavar="FILE", help=f"journal that is read if the daemon is down ({JOURNAL})")
    add_options(parser, reads=True)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if not args.watch:
        return _once(args, clear=False)
    clear = sys.stdout.isatty() and not args.json and os.environ.get("TERM") != "dumb"
    code, curves = EX_INTERRUPTED, Curves()  # until the first look has ended
    try:
        if clear:  # an empty screen, and no cursor until the end, however it comes
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            signal.signal(signal.SIGTSTP, _suspend)
            print(_BARE, end="")
        while True:
            code = _once(args, clear=clear, curves=curves)
            sys.stdout.flush()
            time.sleep(1.0)
    except KeyboardInterrupt:
        return code
    finally:
        if clear:
            print(_CURSOR, flush=True)


_BARE: Final = "\x1b[2J\x1b[?25l"
"""An empty screen without a cursor."""
_CURSOR: Final = "\x1b[?25h"


def _suspend(_number: int, _frame: object) -> None:
    """Ctrl-Z: give the shell its cursor back, stop, and after `fg` draw on an empty screen. The buffer is not used."""
    os.write(sys.stdout.fileno(), f"{_CURSOR}\n".encode())
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, _suspend)
    os.write(sys.stdout.fileno(), _BARE.encode())


def _once(args: argparse.Namespace, *, clear: bool, curves: "Curves | None" = None) -> int:
    try:
        status = get(args, "/api/v1/status")
    except (DownError, RefusedError) as error:
        return _down(args, str(error), clear=clear)
    if args.json:
        print(json.dumps(status, indent=2))
    elif args.short:
        _show([short(status)], clear=clear)
    elif clear:
        if curves is not None:
            curves.take(status)
        _draw(watched(status, Paint(), *_screen(), curves))
    else:
        print("\n".join(fold(describe(status, Paint()))))
    return exit_code(status)


def _show(lines: Sequence[str], *, clear: bool) -> None:
    if clear:
        _draw(fitted([(0, line) for line in lines], *_screen()))
    else:
        print("\n".join(fold(lines)))


def _screen() -> tuple[int, int]:
    """Return the terminal's columns and lines. A serial console has none: it is taken for 80 by 24."""
    size = os.get_terminal_size(sys.stdout.fileno())
    return size.columns or 80, size.lines or 24


def _draw(lines: Sequence[str]) -> None:
    """Draw in place: home, and each line wiped before it is written: one that is full would lose its last letter.

    A terminal that knows synchronized output (mode 2026) shows the screen only when it is whole.
    """
    above = "".join(f"\x1b[2K{line}\n" for line in lines[:-1])
    print(f"\x1b[?2026h\x1b[H{above}\x1b[J{lines[-1]}\x1b[?2026l", end="")


def fitted(ranked: Sequence[tuple[int, str]], columns: int, lines: int) -> list[str]:
    """Fold (rank, line) into a screen of that size; the highest ranks are left out, with a line that says how many."""
    shown = [(rank, fold([line], columns, breaks_words=True)) for rank, line in ranked]
    left_out = 0
    while len(shown) > 1 and sum(len(folded) for _, folded in shown) + (left_out > 0) > lines:
        del shown[max(range(len(shown)), key=lambda at: (shown[at][0], at))]
        left_out += 1
    more = [f"  ... {left_out} more: a larger window, or `powerguard status`"[:columns]] if left_out else []
    return ([line for _, folded in shown for line in folded] + more)[:lines]


def exit_code(status: dict[str, Any]) -> int:
    """Return the exit status for a status object."""
    phase = status.get("phase")
    if phase == "shutdown":
        return 2
    if phase != "online":
        return 1
    return 3 if status.get("degraded") else 0


def _down(args: argparse.Namespace, why: str, *, clear: bool) -> int:
    known, trouble = (None, "") if args.url else last_known(args.journal or JOURNAL)
    if args.json:
        down = {"schema_version": 1, "object": "status", "reachable": False, "error": why, "last_known": known}
        print(json.dumps(down, indent=2))
        return EX_DOWN
    paint = Paint()
    lines = [f"powerguard: {paint('DOWN', 'red')}: {clean(why)}"]
    if not (args.short or args.url):  # Another host may be protected: only its address does not answer.
        lines.append("  This host is not protected while the daemon is down.")
        if known is None:
            lines.append(f"  Last known state: none ({clean(trouble)})")
        else:
            outage = f", outage {clean(known['outage'])}" if known["outage"] else ""
            lines.append(f"  Last known state: {known['phase']}{outage}, written {moment(known['at'])}")
    _show(lines, clear=clear)
    return EX_DOWN


def short(status: dict[str, Any]) -> str:
    """Return one line: phase, mode, readiness, slack."""
    budget = status.get("budget") or {}
    ready = "ready" if status.get("ready") else "not ready"
    names = ",".join(clean(reason["name"]) for reason in status.get("reasons", ()))
    slack = "endless" if is_endless(budget.get("slack_s")) else duration(budget.get("slack_s"))
    return f"{clean(status['phase'])} {clean(status['mode'])} {ready} slack {slack}" + (f" ({names})" if names else "")


def describe(status: dict[str, Any], paint: Paint) -> list[str]:
    """Return the whole status as lines."""
    lines = [_head(status, paint), *(line for _, line in _reasons(status, paint))]
    return [*lines, *table([(row.label, row.text) for row in _rows(status, has_bars=False)])]


def watched(
    status: dict[str, Any], paint: Paint, columns: int, lines: int, curves: "Curves | None" = None
) -> list[str]:
    """Return the status as a screen of that size, with bars, and the curves of the outage so far."""
    rows = [*_rows(status, has_bars=True), *([] if curves is None else curves.rows(columns))]
    longest = max((len(row.text) for row in rows if row.share is not None), default=0)
    cells = min(_MOST_CELLS, columns - 6 - max(len(row.label) for row in rows) - longest)
    drawn = table([(row.label, _bar(row, cells, paint)) for row in rows])
    ranked = [(0, _head(status, paint)), *_reasons(status, paint)]
    return fitted([*ranked, *((row.rank, line) for row, line in zip(rows, drawn, strict=True))], columns, lines)


def _bar(row: Row, cells: int, paint: Paint) -> str:
    """Return the text of a row after its bar, if there is room for one."""
    if row.share is None or cells < _LEAST_CELLS:
        return row.text
    full, empty, mark = _cells()
    bar = [full if at < round(cells * row.share) else empty for at in range(cells)]
    if row.mark is not None:
        bar[round(cells * row.mark)] = mark
    return f"{paint(''.join(bar), row.colour)}  {row.text}"


def _cells() -> tuple[str, str, str]:
    """Return the characters of a bar: full, empty, and the mark."""
    return ("█", "░", "│") if is_utf8() else ("#", ".", "|")


_LEAST_CELLS, _MOST_CELLS = 8, 60
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_MOST_POINTS: Final = 600


class Curves:
    """Charge, load and effective runtime of an outage, for as long as it is watched."""

    def __init__(self) -> None:
        self._points: list[tuple[float | None, float | None, float | None]] = []
        self._outage = ""
        self._every = self._skipped = 1

    def take(self, status: dict[str, Any]) -> None:
        """Take the values of a status. When there are too many, every other one goes, and half as many are taken."""
        outage = (status.get("outage") or {}).get("id", "")
        if outage != self._outage:
            self._points, self._outage, self._every, self._skipped = [], outage, 1, 1
        ups, lasts_s = status.get("ups") or {}, status["budget"]["runtime_effective_paused_s"]
        self._skipped += 1
        if outage and self._skipped >= self._every:
            known = None if is_endless(lasts_s) else lasts_s
            self._points.append((ups.get("charge_pct"), ups.get("load_pct"), known))
            self._skipped = 0
        if len(self._points) >= _MOST_POINTS:
            del self._points[1::2]
            self._every *= 2

    def rows(self, columns: int) -> list[Row]:
        """Return a row for each curve; none where there is no room, no outage or no UTF-8."""
        cells = min(_MOST_CELLS, columns - _BESIDE_CURVES)
        if cells < _LEAST_CELLS or len(self._points) < _LEAST_CELLS or not is_utf8():
            return []
        found: list[Row] = []
        tops = (100.0, 100.0, None)
        for name, values, top in zip(("charge", "load", "lasts"), zip(*self._points, strict=True), tops, strict=True):
            known = [value for value in values if value is not None]
            if known:
                drawn = _curve(values, max(top or 0.0, *known), cells)
                ends = [duration(each) if top is None else number(each, "%") for each in (known[0], known[-1])]
                found.append(Row(7, "" if found else "so far", f"{name:<7} {drawn}  {ends[0]} to {ends[1]}"))
        return found


_BESIDE_CURVES: Final = 52
"""Columns for the labels before a curve, and its first and last value after it."""


def _curve(values: Sequence[float | None], top: float, cells: int) -> str:
    """Return values as letters of different height; of many the last of each stretch. An unknown one is a gap."""
    cells = min(cells, len(values))
    ends = [(at + 1) * len(values) // cells - 1 for at in range(cells)]
    shown = [values[end] for end in ends]
    levels = [None if value is None else round((len(_LEVELS) - 1) * value / max(top, 1e-9)) for value in shown]
    return "".join(" " if level is None else _LEVELS[max(0, level)] for level in levels)


def _host(status: dict[str, Any]) -> str:
    """Return " on NAME"; "" if the daemon does not report it."""
    name = (status.get("host") or {}).get("name")
    return f" on {clean(name)}" if name else ""


def _head(status: dict[str, Any], paint: Paint) -> str:
    phase, mode = clean(status["phase"]), clean(status["mode"])
    errors = {reason["name"] for reason in status["reasons"] if reason["severity"] == "error"}
    ready = ""
    if not status["ready"] and not errors <= NOT_ARMED:  # the mode says so itself
        ready = ", " + paint("NOT READY", "red")
    elif status["ready"] and phase == "online":  # in an outage readiness is not news
        ready = ", " + paint("ready", "green")
    shown = paint(phase.replace("_", " "), _COLOURS.get(phase, "yellow"))
    mode = paint(mode, "" if mode == "armed" else "yellow")
    return f"powerguard {clean(status['version'])}{_host(status)}: {shown}, {mode}{ready}"


def _reasons(status: dict[str, Any], paint: Paint) -> list[tuple[int, str]]:
    """Return the conditions that reduce protection, each with its remedy; rank and line."""
    found = []
    for reason in status["reasons"]:
        error = reason["severity"] == "error"
        fix = clean(reason["fix"]).replace(" in `powerguard status`", " below")
        colour = "red" if error and reason["name"] not in NOT_ARMED else "yellow"
        line = f"  {paint('!', colour)} {clean(reason['text'])}" + (f" -> {fix}" if fix else "")
        found.append((1 if error else 4, line))
    return found


def _unless_listed(status: dict[str, Any], text: str) -> str:
    """Return a text of the daemon, or a reference if one of the reasons has it already."""
    is_listed = text and any(clean(text) in clean(reason["text"]) for reason in status["reasons"])
    return "see above" if is_listed else clean(text)


def _power_on(status: dict[str, Any]) -> list[Row]:
    """The power-on methods in words, the armed ones first."""
    methods = status.get("power_on")
    if methods is None:  # a daemon of before
        return []
    names: dict[str, list[str]] = {}
    blocked = []
    for each in methods["layers"]:
        name = _METHODS.get(each["name"], clean(each["name"])) + (f" ({clean(each['ups'])})" if each["ups"] else "")
        if each["stands"] != "blocked":
            names.setdefault(each["stands"], []).append(name)
        else:
            why = "see bmc" if each["name"] == "policy" and status["bmc"] else _unless_listed(status, each["why"])
            blocked.append(f"blocked: {name}: {why}")
    texts = [f"armed: {', '.join(names['armed'])}"] if "armed" in names else []
    texts += [f"not checked yet: {', '.join(names['unknown'])}"] if "unknown" in names else []
    texts += blocked
    if not methods["covers_race"]:
        texts.append(
            "none if utility returns while the host shuts down: it would stay off -> `powerguard doctor`, power_on"
        )
    return [Row(7, "" if at else "power-on", text) for at, text in enumerate(texts)]


def _policy(status: dict[str, Any], bmc: dict[str, Any]) -> str:
    """The BMC's policy as last read, and why that is not enough. A policy that was never read is not guessed."""
    when = "" if bmc["age_s"] is None else f" {duration(bmc['age_s'])} ago"
    error = f": {_unless_listed(status, bmc['error'])}" if bmc["error"] else ""
    draws = "" if bmc.get("power_watts") is None else f"; the host drew {bmc['power_watts']:.0f} W"
    if bmc["verified"]:
        return f"policy {clean(bmc['policy'] or 'unknown')}, verified{when}{draws}"
    if bmc["policy"]:
        return f"policy {clean(bmc['policy'])} when it was read{when}{draws}; NOT verified{error}"
    return f"policy NOT verified{error}" if bmc["error"] or when else "policy not read yet"


def _rows(status: dict[str, Any], *, has_bars: bool) -> list[Row]:
    rows = [*_outage(status), *_supply(status, has_bars=has_bars), *_budget(status, has_bars=has_bars), *_next(status)]
    rows += [Row(3, "trainer", _trainer(trainer)) for trainer in status["trainers"]] or [
        Row(3, "trainer", "none known")
    ]
    rows += [Row(5, "source", _source(status, source)) for source in status["sources"]]
    if status.get("traps") is not None:
        rows.append(Row(8, "traps", _traps(status["traps"], status["at"])))
    bmc = status["bmc"]
    if bmc is None:
        rows.append(Row(6, "bmc", "none in the settings, so the host may stay off after a power-off"))
    else:
        rows.append(Row(6, "bmc", f"{clean(bmc['kind'])}: {_policy(status, bmc)}"))
    rows += _power_on(status)
    for target in (status.get("messages") or {}).get("targets", ()):
        if target["since"] is not None:
            failing = f"{clean(target['name'])} fails for {duration(status['at'] - target['since'])}"
            rows.append(Row(4, "messages", f"{failing}, {target['queued']} wait: {clean(target['answer'])}"))
    off = "powered off by" if status["mode"] == "armed" else f"not powered off in mode {clean(status['mode'])}; else by"
    rows.append(Row(8, "host", f"{off} {clean(status['host']['kind'])}"))
    last = status["last_outage"]
    if last is not None:
        outcome = OUTCOMES.get(last["outcome"], last["outcome"])
        text = f"{clean(outcome)}; on battery {duration(last['on_battery_s'])}"
        rows.append(Row(8, "last outage", f"{moment(last['began_wall_s'])}: {text}"))
    return rows


def _outage(status: dict[str, Any]) -> list[Row]:
    rows = []
    outage = status["outage"]
    if outage is not None:
        because = f", because {_why(outage['because'], status['phase'])}" if outage["because"] else ""
        text = f"{clean(outage['id'])} for {duration(outage['lasted_s'])}{because}; {clean(outage['grade'])} stop"
        rows.append(Row(0, "outage", text))
        if outage["latched"]:
            is_real = status["mode"] == "armed"
            done = "cannot be undone in this boot" if is_real else f"only recorded in mode {clean(status['mode'])}"
            rows.append(Row(0, "committed", f"at {clock_of(outage['latched_at'])}: {done}"))
        elif outage["can_abort"]:
            rows.append(Row(0, "", "`powerguard abort` aborts the shutdown"))
    maintenance = status["maintenance"]
    if maintenance is not None:
        text = f"for {duration(maintenance['ends_in_s'])} more, by {clean(maintenance['who'])}: "
        rows.append(Row(2, "maintenance", text + clean(maintenance["reason"])))
    drill = status.get("drill")
    if drill is not None:
        text = f"{clean(drill['stage'])}, for {duration(drill['lasted_s'])}, by {clean(drill['who'])}"
        rows.append(Row(2, "drill", f"{text}: it puts everything back (`powerguard drill report`)"))
    return rows


def _feed(feed: dict[str, Any]) -> str:
    """One of several UPSes."""
    count = feed["supplies"]
    carries = f"{count} power suppl{'y' if count == 1 else 'ies'}, {clean(feed['supply'])}"
    silent = feed["lost_since_at"] is not None
    reading = "" if feed["ups"] is None else f": {_reading(feed['ups'], feed['supply'])}"
    return f"{carries}{', silent' if silent else ''}{reading}"


def _reading(ups: dict[str, Any], supply: str, *, has_bars: bool = False) -> str:
    """One reading, without the values that the supply or the bars show already."""
    parts = [] if ups["output_source"] == supply else [f"output from {clean(ups['output_source'])}"]
    if not has_bars:
        parts += [f"charge {number(ups['charge_pct'], '%')}", f"load {_load(ups)}"]
    parts += [f"reports {duration(ups['runtime_s'])} of runtime", f"read {duration(ups['age_s'])} ago"]
    words = ("low_battery", "overload", "testing", "calibrating", "forced_shutdown")
    flags = [word.replace("_", " ") for word in words if ups[word]]
    if ups["output_off_in_s"] is not None:
        flags.append(f"output off in {duration(ups['output_off_in_s'])}")
    return ", ".join(parts) + ("; " + ", ".join(flags) if flags else "")


def _load(ups: dict[str, Any]) -> str:
    """The load in percent of the rating, or in watts if the UPS reports no percentage."""
    return number(ups["watts"], "W") if ups["load_pct"] is None else number(ups["load_pct"], "%")


def _supply(status: dict[str, Any], *, has_bars: bool) -> list[Row]:
    since = status["supply_since_at"]
    lasted = f" for {duration(status['at'] - since)}" if since is not None else ""
    rows = [Row(0, "supply", f"{clean(status['supply'])}{lasted}")]
    ups = status["ups"]
    if ups is not None:
        feeds = status.get("feeds") or []
        rows += [Row(2, clean(feed["name"]), _feed(feed)) for feed in feeds] or [
            Row(2, clean(ups["name"]), _reading(ups, status["supply"], has_bars=has_bars))
        ]
        for label, key, colour in (("charge", "charge_pct", "green"), ("load", "load_pct", "cyan")) if has_bars else ():
            share = None if ups[key] is None else min(1.0, ups[key] / 100.0)
            text = _load(ups) if key == "load_pct" else number(ups[key], "%")
            rows.append(Row(0, label, text, share, colour=colour))
        own = status.get("own_load")
        if own is not None:
            rows.append(Row(2, "own load", clean(own["because"])))
        battery = status.get("battery")
        if battery is not None:
            text = f"health {number(100 * battery['health'], '%')}: {clean(battery['because'])}"
            rows.append(Row(8, "battery", text))
    return rows


def _budget(status: dict[str, Any], *, has_bars: bool) -> list[Row]:
    """The needs and the runtime: as a bar, with the numbers, and the slack."""
    budget = status["budget"]
    paused_s, slack_s, shed_s = (budget.get(key) for key in ("runtime_effective_paused_s", "slack_s", "shed_s"))
    need_s = budget["need_s"] + (shed_s or 0.0)
    # Three quarters are asked for once: before the outage. On battery, all that is left counts.
    begun = status["phase"] in (*BEGUN, "shutdown") or (status["phase"] == "recovery" and status["supply"] == "battery")
    needs = f"{clean(budget['grade'])} stop {duration(budget['stop_s'])}"
    if budget["checkpoint_s"]:
        needs = f"checkpoint {duration(budget['checkpoint_s'])} + {needs}"
    if shed_s:
        needs += f" + {duration(shed_s)} for higher tiers"
    rows = []
    if has_bars and paused_s is not None and not is_endless(paused_s):
        share = 1.0 if need_s >= paused_s else need_s / paused_s
        colour = "red" if need_s > paused_s else "green" if budget["fits"] else "yellow"
        text = f"needs {duration(need_s)} of {duration(paused_s)}"
        rows.append(Row(0, "budget", text, share, None if begun else _QUARTERS, colour))
        fits = "" if begun else f", fits up to {_cells()[2]}"
        rows.append(Row(1, "", f"{needs}{fits}; {_gives(budget)}"))
    else:
        rows.append(Row(0, "budget", f"needs {duration(need_s)}: {needs}; {_gives(budget)}"))
    slack = "endless" if is_endless(slack_s) else duration(slack_s)
    if slack_s is None:
        return rows
    if status["phase"] == "shutdown":
        slack += " (the power-off is decided)"
    elif slack_s < 0.0:
        slack += " (the battery does not last for the needs)"
    elif not budget["fits"] and not begun:
        slack += " (does NOT fit three quarters of the runtime)"
    return [*rows, Row(0, "slack", slack)]


def _gives(budget: dict[str, Any]) -> str:
    """The runtime, with its load."""
    now_s, paused_s = budget["runtime_effective_s"], budget["runtime_effective_paused_s"]
    if paused_s is None:
        return "the runtime is unknown"
    if is_endless(paused_s):
        return "with training paused, a feed that has utility carries the host"
    if now_s is not None and abs(now_s - paused_s) < 1.0:  # training is paused
        return f"the battery gives {duration(paused_s)}"
    return f"the battery gives {duration(paused_s)} paused, {duration(now_s)} at this load"


def _next(status: dict[str, Any]) -> list[Row]:
    rows = []
    phase = status["phase"]
    assumes = status["assumes_utility_fails_now"]
    if phase == "recovery":
        what = "training starts" if assumes else "training starts once utility is back"
        rows.append(Row(0, "next", f"{what}; `powerguard recover --dry-run` shows what it waits for"))
    elif assumes and phase != "online" and status["supply"] == "utility":
        rows.append(Row(0, "next", "training goes on once utility is stable"))
    if status["outage"] is not None and status["outage"]["aborted_by"]:
        rows.append(Row(0, "next", CALLED_OFF))
    for place, step in enumerate(steps(status)):
        label = ("if power fails" if assumes else "next") if place == 0 else ""
        rows.append(Row(0, label, step))
    return rows


def steps(status: dict[str, Any]) -> list[str]:
    """Return the forecast as lines: when, what, why. After a recorded power-off there is none."""
    if status["phase"] == "shutdown" and not status["next"]:
        return ["the outage ends when utility is back: the host stays on"]
    return [_describe_step(step) for step in status["next"]]


def _describe_step(step: dict[str, Any]) -> str:
    in_s = step["in_s"]
    when = "at an unknown time" if in_s is None else "now" if in_s <= 0 else f"in {duration(in_s)}"
    at = "" if step["at"] is None else f" ({clock_of(step['at'])})"
    action = step["action"]
    if action == "forced power-off":
        return f"{when}{at}: {action}, even if units still run"
    texts = _STEPS.get(action, {"pause": "power-off" if action == "shutdown" else clean(action)})
    what = texts.get(step.get("training") or "pause", texts["pause"])
    if step["suspended"]:
        spared = step.get("spared")
        what += ", if the other UPSes had no utility" if spared else ", if maintenance did not suspend it"
    return f"{when}{at}: {what}: {_why(step['because'], action)}"


def _why(because: str, what: str) -> str:
    """Return why a phase begins, in words. The power-off does not wait for a checkpoint."""
    if because == "budget" and what == "shutdown":
        return "only the stop still fits"
    return _BECAUSE.get(because, clean(because))


def _trainer(trainer: dict[str, Any]) -> str:
    name = clean(trainer["name"])
    if not trainer["alive"]:
        ended = trainer.get("ended_by")
        return f"{name}: not there" + (f": {clean(ended)}" if ended else "")
    doing = "paused" if trainer["paused"] else "training"
    doing = {"stop": "stopped by a signal", "terminate": "ended by a signal"}.get(trainer.get("signalled", ""), doing)
    if trainer.get("held_by") and trainer["paused"]:
        doing = f"held by {clean(trainer['held_by'])}"
    at = f" at step {trainer['step']}" if trainer["step"] is not None else ""
    parts = [f"{name}: {doing}{at}"]
    if trainer["checkpoint_in_flight"]:
        eta = trainer["checkpoint_eta_s"]
        parts.append("checkpoint in flight" + (f", durable in {duration(eta)}" if eta is not None else ""))
    elif (age_s := trainer["durable_age_s"]) is not None or trainer["durable_step"] is not None:
        step = f"step {trainer['durable_step']} " if trainer["durable_step"] is not None else ""
        parts.append(f"{step}durable" + (f" {duration(age_s)} ago" if age_s is not None else ""))
    if not trainer["checkpoint_in_flight"] and not trainer["durable"]:
        parts.append(f"checkpoint takes {duration(trainer['checkpoint_s'])}")
    if trainer["failed"]:
        parts.append(f"checkpoint failed: {clean(trainer['failed'])}")
    parts.append({"pause": "pauses", "exit": "exits", "continue": "does not pause"}[trainer["conduct"]])
    return ", ".join(parts)


def _traps(traps: dict[str, Any], now: float) -> str:
    """The trap port: open or not, and the received traps."""
    if not traps["listening"]:
        return f"NOT listening at {clean(traps['listen'])}: {clean(traps['because'])}"
    results = traps["results"]
    last = [f"{clean(ups)} {duration(now - at)} ago" for ups, at in traps["last_at"].items() if at is not None]
    refused = {
        word: count for word, count in results.items() if count and word not in ("hint", "repeated", "discovery")
    }
    hints = f"{results['hint']} triggered a poll" + (f" (last: {', '.join(last)})" if last else "")
    others = ", ".join(f"{count} {clean(word).replace('_', ' ')}" for word, count in refused.items())
    return f"listening at {clean(traps['listen'])}; {hints}" + (f"; {others}" if others else "")


def _source(status: dict[str, Any], source: dict[str, Any]) -> str:
    state = "up" if source["up"] else "DOWN"
    age = f", read {duration(source['age_s'])} ago" if source["age_s"] is not None else ", never read"
    trust = ", answers could be forged" if source["up"] and source["forgeable"] else ""
    error = "".join(f", {_unless_listed(status, source[key])}" for key in ("last_error", "trouble") if source.get(key))
    return (
        f"{clean(source['source'])}: {state}{age}, {source['failures']} of {source['polls']} polls failed{trust}{error}"
    )
