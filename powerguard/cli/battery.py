"""`powerguard battery`: show what was learned of the battery and how reliable it is; record a new one."""

import argparse
import json
import re
import sys
import time
from functools import partial
from typing import Any, Final

from powerguard.cli.client import DownError, RefusedError, add_options, get, post
from powerguard.cli.render import Paint, agreed, clean, duration, fold, moment, number, table
from powerguard.cli.shared import EX_DOWN, EX_REFUSED, EX_USAGE, fail, print_answer
from powerguard.cli.status import JOURNAL, last_battery

_MONTH: Final = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])")
_percent: Final = partial(number, unit="%", times=100)
_NEEDS: Final = {
    "checkpoint": "a checkpoint to durable",
    "stop": "the host's stop",
    "boot": "kernel start to recovery",
    "resume": "recovery to training",
}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = "Show what was learned of the battery, or record a new one."
    verbs = parser.add_subparsers(dest="battery_verb", metavar="show|replaced", required=True)
    show = verbs.add_parser(
        "show",
        help="health, runtime by load, recharge, load drops and needs, each with its origin",
        description="Show health, runtime by load, recharge, load drops and needs, each with its origin and age. "
        "Exit 0: shown; 4: the daemon is down (then the journal's last values are shown).",
    )
    show.add_argument("--journal", metavar="FILE", help=f"journal that is read if the daemon is down ({JOURNAL})")
    add_options(show, reads=True)
    replaced = verbs.add_parser(
        "replaced",
        help="record a new battery and forget what was learned of the old one",
        description="Forget what was learned of the old battery. Asks first. Exit 0: done; 1: refused, or you answered "
        "no; 4: the daemon is down.",
    )
    replaced.add_argument("--ups", metavar="NAME", default="", help="the UPS (needed if several feed this host)")
    replaced.add_argument(
        "--installed", type=_month, metavar="YYYY-MM", help="when it was installed (default: this month)"
    )
    replaced.add_argument("--yes", action="store_true", help="do not ask")
    add_options(replaced)
    for each in (show, replaced):
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _month(text: str) -> str:
    if not _MONTH.fullmatch(text):
        msg = f"{text!r} is not a year and month (example: 2026-11)"
        raise argparse.ArgumentTypeError(msg)
    if text > _this_month():
        msg = f"{text} is in the future"
        raise argparse.ArgumentTypeError(msg)
    return text


def _this_month() -> str:
    return time.strftime("%Y-%m")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    return _show(args) if args.battery_verb == "show" else _replaced(args)


# --- show -------------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    try:
        battery = get(args, "/api/v1/battery")
    except DownError as error:
        return _down(args, str(error))
    except RefusedError as error:
        return fail(args, "battery show", str(error), EX_DOWN)
    print_answer(args, battery, lambda: fold(describe(battery, Paint())))
    return 0


def _down(args: argparse.Namespace, why: str) -> int:
    known, trouble = (None, "not available for another host") if args.url else last_battery(args.journal or JOURNAL)
    if args.json:
        down = {"schema_version": 1, "object": "battery", "reachable": False, "error": why, "last_known": known}
        print(json.dumps(down, indent=2))
        return EX_DOWN
    paint = Paint()
    lines = [f"powerguard: {paint('DOWN', 'red')}: {clean(why)}"]
    if known is None:
        print("\n".join(fold([*lines, f"  Last known battery: none ({clean(trouble)})"])))
        return EX_DOWN
    lines.append(f"  Last known battery, written {moment(known['at'])}:")
    for ups in known["ups"]:
        lines += [f"    {clean(ups['name'])}", *table(_last(ups), indent="      ")]
    lines += [] if known["ups"] else table(_last(known), indent="    ")
    print("\n".join(fold(lines)))
    return EX_DOWN


def _last(known: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the journal last knew of one battery as rows."""
    measured = known["measured"]
    health = "presumed" if measured is None else _measurement(measured)
    rows = [("health", f"{_percent(known['health'])}: {health}"), ("energy", _energy(known))]
    rows += [("runtime", f"{duration(p['runtime_s'])} at {number(p['load_pct'], '%')}") for p in known["points"]]
    if known["recharge_s"] is not None:
        rows.append(("recharge", f"{duration(known['recharge_s'])} from empty to full, learned"))
    return rows


def describe(battery: dict[str, Any], paint: Paint) -> list[str]:
    """Return what was learned as lines."""
    lines: list[str] = []
    for ups in battery["ups"]:
        lines += [clean(ups["name"]), *table(_ups(ups, paint))]
    lines += ["load drops", *table(_drops(battery["load_drops"]))]
    lines += ["needs", *table(_needs(battery["needs"]))]
    return lines


def _ups(ups: dict[str, Any], paint: Paint) -> list[tuple[str, str]]:
    health, recharge, reported = ups["health"], ups["recharge"], ups["reported"]
    is_measured = health["origin"] == "measured"
    share = paint(_percent(health["share"]), "green" if is_measured else "yellow")
    rows = [("health", f"{share}: {clean(health['because'])}")]
    measured = health["measured"]
    if measured is not None and not measured["expired"]:
        rows.append(("", f"measured {duration(measured['age_s'])} ago, expires {_day(measured['expires_at'])}"))
    at_now = health["to_measure"]["at_load_now_s"]
    lasts = "" if at_now is None else f" (about {duration(at_now)} at the present load)"
    least = _percent(health["to_measure"]["least_depth"])
    shown = f"a discharge of {least} of a new battery{lasts} shows a worn one, two thirds or low battery a good one"
    rows.append(("", shown))
    rows += _points(ups["runtime"])
    origin = {"learned": "learned", "settings": "settings"}.get(recharge["origin"], clean(recharge["origin"]))
    rows.append(("recharge", f"{duration(recharge['full_s'])} from empty to full ({origin})"))
    rows.append(("energy", _energy(ups["energy"])))
    rows.append(("reported", _reported(reported)))
    rows += _discharge(ups["discharge"], paint)
    when = "not recorded" if ups["replaced_at"] is None else _day(ups["replaced_at"])
    rows.append(("replaced", when))
    return rows


def _points(runtime: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for point in runtime["points"]:
        when = "" if point["at"] is None else f" {_day(point['at'])}"
        aside = "" if point["counts"] else ", reported as well: does not count"
        origin = f"{clean(point['origin'])}{when}{aside}"
        text = f"{duration(point['runtime_s'])} at {number(point['load_pct'], '%')} ({origin})"
        rows.append(("" if rows else "runtime", text))
    return rows or [("runtime", "unknown: no runtime_table, and the UPS has reported none")]


def _energy(energy: dict[str, Any]) -> str:
    return f"{_percent(energy['used'])} used, {_percent(energy['left'])} of a new battery left"


def _reported(reported: dict[str, Any]) -> str:
    runtime_s, over = reported["runtime_s"], reported["over_report"]
    if runtime_s is None:
        return "the UPS reports no runtime"
    if over is None:
        return f"{duration(runtime_s)}; the runtime by powerguard's own energy account is unknown"
    return f"the UPS reports {duration(runtime_s)}, powerguard's energy account gives {duration(reported['account_s'])}"


def _discharge(discharge: dict[str, Any] | None, paint: Paint) -> list[tuple[str, str]]:
    if discharge is None:
        return []
    text = f"since {moment(discharge['since_at'])}, {_percent(discharge['depth'])} deep so far"
    if discharge["slope"] is not None:
        text += f"; the reported runtime falls by {discharge['slope']:.1f} s a second"
    return [("discharge", paint(text, "red" if discharge["steep"] else ""))]


def _drops(drops: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (clean(drop["trainer"]), f"pauses: load {_fall(drop)}, seen {_day(drop['at'])}") for drop in drops["pauses"]
    ]
    if not rows:
        share = _percent(drops["presumed_paused_share"])
        rows.append(("pause", f"never measured: {share} of the load is presumed to remain ({drops['presumed_from']})"))
    cap = drops["cap"]
    if cap is None:
        rows.append(("GPU cap", "never measured: run a drill"))
    else:
        text = f"load {_fall(cap)}, training at {_percent(cap['speed'])} of its speed, seen {_day(cap['at'])}"
        rows.append(("GPU cap", text))
    return rows


def _fall(drop: dict[str, Any]) -> str:
    watts = "" if drop.get("watts") is None else f" ({drop['watts']:.0f} W of this host)"
    return f"{number(drop['before_pct'], '%')} -> {number(drop['after_pct'], '%')}{watts}"


def _needs(needs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    rows = []
    for need in needs:
        of = clean(need["need"])
        name = f"{of} {clean(need['name'])}".rstrip()
        count = f"{need['samples']} measured" if need["samples"] != 1 else "measured once"
        text = f"q95 {duration(need['q95_s'])}, median {duration(need['median_s'])}, {count}"
        rows.append((name, f"{text} ({_NEEDS.get(of, of)})"))
    return rows or [("none", "not measured yet: the settings and the trainers' own estimates count")]


def _measurement(measured: dict[str, Any]) -> str:
    error = f"+-{100 * measured['error']:.0f} points" if isinstance(measured["error"], int | float) else "+-?"
    share, depth = _percent(measured["share"]), _percent(measured["depth"])
    value = f"at least {share}" if measured.get("at_least") is True else f"{share} {error}"
    return f"measured {_day(measured['at'])}: {value}, {depth} deep, by the {clean(measured['how'])}"


def _day(unix_s: float | None) -> str:
    return moment(unix_s)[:10]


# --- replaced ---------------------------------------------------------------------------------------------------------


def _replaced(args: argparse.Namespace) -> int:
    verb = "battery replaced"
    try:
        battery = get(args, "/api/v1/battery")
        found = [ups for ups in battery["ups"] if args.ups in ("", ups["name"])]
        if not found:
            names = ", ".join(clean(ups["name"]) for ups in battery["ups"])
            return fail(args, verb, f"refused: unknown UPS {clean(args.ups)}: {names} feeds this host", EX_REFUSED)
        if len(found) > 1:
            names = " or ".join(f"--ups {clean(ups['name'])}" for ups in found)
            return fail(args, verb, f"{len(found)} UPSes feed this host: name one of them, {names}", EX_USAGE)
        ups = found[0]
        installed = args.installed or _this_month()
        if not args.yes and not sys.stdin.isatty():
            return fail(args, verb, "stdin is not a terminal, so powerguard cannot ask: add --yes", EX_USAGE)
        when = installed if args.installed else f"{installed} (this month; --installed sets another)"
        print("\n".join(fold(_what_goes(ups, when), stream=sys.stderr)), file=sys.stderr)
        if not args.yes and not agreed("Forget it?"):
            return fail(args, verb, "cancelled: no change was made", EX_REFUSED)
        answer = post(args, "battery-replaced", {"ups": ups["name"], "installed": installed})
    except DownError as error:
        return fail(args, verb, str(error), EX_DOWN)
    except RefusedError as error:
        return fail(args, verb, f"refused: {error}", EX_REFUSED)
    print_answer(args, answer, lambda: fold(_taken(answer, installed)))
    return 0


def _what_goes(ups: dict[str, Any], when: str) -> list[str]:
    """List what is forgotten, so that an operator on the wrong host or UPS can still cancel."""
    name, health = clean(ups["name"]), ups["health"]
    learned = [point for point in ups["runtime"]["points"] if point["origin"] == "learned"]
    lines = [f"{name}: a new battery, installed {when}. powerguard forgets what it learned of the old one:"]
    rows = []
    if health["measured"] is not None:
        rows.append(("health", _measurement(health["measured"])))
    if learned:
        loads = ", ".join(number(point["load_pct"], "%") for point in learned)
        rows.append(("runtime", f"learned at a load of {loads}"))
    if ups["discharge"] is not None:
        rows.append(("discharge", "the present one"))
    rows.append(("account", "the energy taken from the old one; the account restarts at the reported charge"))
    lines += table(rows)
    return [*lines, "Measurements of loads, checkpoints, stops and the recharge time are kept."]


def _taken(answer: dict[str, Any], installed: str) -> list[str]:
    presumed = answer["presumed"]
    lines = [f"recorded: its health counts as {_percent(presumed['health'])} until a discharge measures it"]
    setting = f'ups.{clean(answer["ups"])}.battery_installed: "{installed}"'
    old = presumed["origin"] == "battery_old"
    why = "it still has the date of the old battery" if old else "so that its age is known"
    return [*lines, f"now set {setting} in the settings ({why}), and `systemctl reload powerguard`"]
