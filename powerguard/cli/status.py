"""`powerguard status`: what is so, for people and for monitoring. Works when the daemon does not."""

import argparse
import json
import sys
import time
from typing import Any, Final

from powerguard.cli.client import DownError, RefusedError, add_options, get
from powerguard.cli.last_known import JOURNAL, last_known
from powerguard.cli.operate import Subparsers
from powerguard.cli.render import Paint, clean, clock_of, duration, fold, is_endless, moment, number, table

EX_DOWN: Final = 4
_COLOURS: Final = {"online": "green", "on_battery": "yellow", "recovery": "yellow", "shutdown": "red"}
_WORDS: Final = {"shutdown": "power-off", "emergency_checkpoint": "emergency checkpoint", "holding": "hold"}
BEGUN: Final = ("emergency_checkpoint", "holding")
"""These begin when three quarters of the runtime come down to what is needed: that less fits then is nothing wrong."""
_ENDLESS: Final = "endless while a feed that has utility carries the host"
CALLED_OFF: Final = "nothing, even when the battery runs empty: this outage's shutdown was called off"
_BECAUSE: Final = {
    "budget": "no more than what is needed is left",
    "runtime_short": "little runtime is left at this load",
    "blind": "nobody knows the runtime",
    "blind: blind_s": "nobody knows the runtime, and blind_s is over",
    "power_off_at": "the UPS is going to cut its output",
    "power_off_at permits no hold": "the checkpoint is durable then, and the UPS is going to cut its output",
}


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "status",
        help="what is so",
        description="Show phase, battery, budget, trainers and whatever reduces protection. Exit 0: online; 1: in an "
        "outage or coming back; 2: shutting down; 3: online, but protection is reduced; 4: the daemon is down.",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON object on stdout")
    how.add_argument("--short", action="store_true", help="one line")
    parser.add_argument("-w", "--watch", action="store_true", help="again every second, until interrupted")
    parser.add_argument("--journal", metavar="FILE", default=None, help=f"read when the daemon is down ({JOURNAL})")
    add_options(parser, reads=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if not args.watch:
        return _once(args, clear=False)
    clear = sys.stdout.isatty() and not args.json
    code = 0
    try:
        if clear:  # an empty screen, no cursor, and long lines cut instead of wrapped
            print("\x1b[2J\x1b[?25l\x1b[?7l", end="")
        while True:
            code = _once(args, clear=clear)
            sys.stdout.flush()
            time.sleep(1.0)
    except KeyboardInterrupt:
        return code
    finally:
        if clear:
            print("\x1b[?7h\x1b[?25h", end="", flush=True)


def _once(args: argparse.Namespace, *, clear: bool) -> int:
    try:
        told = get(args, "/api/v1/status")
    except (DownError, RefusedError) as error:
        return _down(args, str(error), clear=clear)
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        paint = Paint()
        lines = [short(told)] if args.short else describe(told, paint)
        _show(lines, clear=clear)
    return exit_code(told)


def _show(lines: list[str], *, clear: bool) -> None:
    """Print; when clear, in place: home, each line wiped to its end, then all below."""
    if clear:
        print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="")
    else:
        print("\n".join(fold(lines)))


def exit_code(told: dict[str, Any]) -> int:
    """Return the exit status for a status object."""
    phase = told.get("phase")
    if phase == "shutdown":
        return 2
    if phase != "online":
        return 1
    return 3 if told.get("degraded") else 0


def _down(args: argparse.Namespace, why: str, *, clear: bool) -> int:
    known, trouble = (None, "not asked: another host's") if args.url else last_known(args.journal or JOURNAL)
    if args.json:
        down = {"schema_version": 1, "object": "status", "reachable": False, "error": why, "last_known": known}
        print(json.dumps(down, indent=2))
        return EX_DOWN
    paint = Paint()
    lines = [f"powerguard: {paint('DOWN', 'red')}: {clean(why)}"]
    if not args.short:
        lines.append("  This host is not protected while the daemon is down.")
        if known is None:
            lines.append(f"  Last known state: none ({clean(trouble)})")
        else:
            outage = f", outage {clean(known['outage'])}" if known["outage"] else ""
            lines.append(f"  Last known state: {known['phase']}{outage}, written {moment(known['at'])}")
    _show(lines, clear=clear)
    return EX_DOWN


def short(told: dict[str, Any]) -> str:
    """Return one line: phase, mode, readiness, slack."""
    budget = told.get("budget") or {}
    ready = "ready" if told.get("ready") else "not ready"
    names = ",".join(clean(reason["name"]) for reason in told.get("reasons", ()))
    slack = "endless" if is_endless(budget.get("slack_s")) else duration(budget.get("slack_s"))
    return f"{clean(told['phase'])} {clean(told['mode'])} {ready} slack {slack}" + (f" ({names})" if names else "")


def describe(told: dict[str, Any], paint: Paint) -> list[str]:
    """Return the whole status as lines."""
    phase = clean(told["phase"])
    mode = clean(told["mode"])
    ready = "" if told["ready"] else ", " + paint("NOT READY", "red")
    if told["ready"] and phase == "online":  # in an outage readiness is no news any more
        ready = ", " + paint("ready", "green")
    head = paint(phase, _COLOURS.get(phase, "yellow"))
    lines = [f"powerguard {clean(told['version'])}: {head}, {paint(mode, '' if mode == 'armed' else 'yellow')}{ready}"]
    for reason in told["reasons"]:
        error = reason["severity"] == "error"
        fix = f" -> {clean(reason['fix'])}" if reason["fix"] else ""
        lines.append(f"  {paint('!', 'red' if error else 'yellow')} {clean(reason['text'])}{fix}")
    return [*lines, *table(_rows(told))]


def _way_back(told: dict[str, Any] | None) -> list[tuple[str, str]]:
    if told is None:  # a daemon of before
        return []
    rows = []
    for each in told["layers"]:
        if each["stands"] != "off":
            name = clean(f"{each['layer']} {each['name']} {each['ups']}".strip())
            why = f": {clean(each['why'])}" if each["why"] else ""
            rows.append(("way back", f"{name}: {clean(each['stands'])}{why}"))
    if not told["covers_race"]:
        rows.append(("way back", "none covers utility that returns while the host is going down (powerguard doctor)"))
    return rows


def _policy(bmc: dict[str, Any]) -> str:
    """The BMC's policy as it was last read, and why that does not do. What was never read is not guessed at."""
    when = "" if bmc["age_s"] is None else f" {duration(bmc['age_s'])} ago"
    error = f": {clean(bmc['error'])}" if bmc["error"] else ""
    draws = "" if bmc.get("power_watts") is None else f"; the host drew {bmc['power_watts']:.0f} W"
    if bmc["verified"]:
        return f"policy {clean(bmc['policy'] or 'not told')}, verified{when}{draws}"
    if bmc["policy"]:
        return f"policy {clean(bmc['policy'])} when it was read{when}{draws}; NOT verified{error}"
    return f"policy NOT verified{error}" if bmc["error"] or when else "policy not asked for yet"


def _rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [*_outage(told), *_supply(told), *_budget(told)]
    rows += [("trainer", _trainer(trainer)) for trainer in told["trainers"]] or [("trainer", "none known")]
    rows += [("source", _source(source)) for source in told["sources"]]
    if told.get("traps") is not None:
        rows.append(("traps", _traps(told["traps"], told["at"])))
    bmc = told["bmc"]
    if bmc is None:
        rows.append(("bmc", "none in the settings: nothing makes sure that the host comes back"))
    else:
        rows.append(("bmc", f"{clean(bmc['kind'])}: {_policy(bmc)}"))
    rows += _way_back(told.get("way_back"))
    host = clean(told["host"]["kind"])
    rows.append(("host", "never powered off (host.kind: dry-run)" if host == "dry-run" else f"powered off by {host}"))
    last = told["last_outage"]
    if last is not None:
        text = f"{clean(last['outcome'])}, on battery {duration(last['on_battery_s'])}"
        rows.append(("last outage", f"{moment(last['began_wall_s'])}: {text}"))
    return rows


def _outage(told: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    outage = told["outage"]
    if outage is not None:
        because = f", because {clean(outage['because'])}" if outage["because"] else ""
        text = f"{clean(outage['id'])} for {duration(outage['lasted_s'])}{because}; {clean(outage['grade'])} stop"
        rows.append(("outage", text))
        if outage["latched"]:
            rows.append(("committed", f"at {clock_of(outage['latched_at'])}: nothing in this boot undoes it"))
        elif outage["can_abort"]:
            rows.append(("", "`powerguard abort` calls the shutdown off"))
    maintenance = told["maintenance"]
    if maintenance is not None:
        text = f"for {duration(maintenance['ends_in_s'])} more, by {clean(maintenance['who'])}: "
        rows.append(("maintenance", text + clean(maintenance["reason"])))
    drill = told.get("drill")
    if drill is not None:
        text = f"{clean(drill['stage'])}, for {duration(drill['lasted_s'])}, by {clean(drill['who'])}"
        rows.append(("drill", f"{text}: it puts everything back (`powerguard drill report`)"))
    return rows


def _feed(feed: dict[str, Any]) -> str:
    """One of several UPSes."""
    count = feed["supplies"]
    carries = f"{count} power suppl{'y' if count == 1 else 'ies'}, {clean(feed['supply'])}"
    silent = feed["lost_since_at"] is not None
    told = "" if feed["ups"] is None else f": {_reading(feed['ups'])}"
    return f"{carries}{', silent' if silent else ''}{told}"


def _reading(ups: dict[str, Any]) -> str:
    parts = [
        clean(ups["output_source"]),
        f"charge {number(ups['charge_pct'], '%')}",
        f"load {number(ups['load_pct'], '%')}",
        f"runtime {duration(ups['runtime_s'])} (effective {duration(ups['runtime_effective_s'])})",
        f"{duration(ups['age_s'])} ago",
    ]
    words = ("low_battery", "overload", "testing", "calibrating", "forced_shutdown")
    flags = [word for word in words if ups[word]]
    if ups["output_off_in_s"] is not None:
        flags.append(f"output off in {duration(ups['output_off_in_s'])}")
    return ", ".join(parts) + ("; " + ", ".join(flags) if flags else "")


def _supply(told: dict[str, Any]) -> list[tuple[str, str]]:
    since = told["supply_since_at"]
    lasted = f" for {duration(told['at'] - since)}" if since is not None else ""
    rows = [("supply", f"{clean(told['supply'])}{lasted}")]
    ups = told["ups"]
    if ups is not None:
        feeds = told.get("feeds") or []
        rows += [(clean(feed["name"]), _feed(feed)) for feed in feeds] or [(clean(ups["name"]), _reading(ups))]
        battery = told.get("battery")
        if battery is not None:
            rows.append(("", f"health {number(100 * battery['health'], '%')}: {clean(battery['because'])}"))
    return rows


def _budget(told: dict[str, Any]) -> list[tuple[str, str]]:
    budget = told["budget"]
    paused_s = budget["runtime_effective_paused_s"]
    need = (
        f"checkpoint {duration(budget['checkpoint_s'])} + {clean(budget['grade'])} stop {duration(budget['stop_s'])} = "
        f"{duration(budget['need_s'])}{'' if is_endless(paused_s) else f' of {duration(paused_s)}'}"
    )
    slack = _ENDLESS if is_endless(budget["slack_s"]) else duration(budget["slack_s"])
    if budget["slack_s"] is None:
        slack += " (nobody knows how long the battery lasts)"
    elif told["phase"] == "shutdown":
        slack += " (the power-off is decided)"
    elif budget["slack_s"] < 0.0:
        slack += " (less is left than is needed)"
    elif not budget["fits"] and told["phase"] not in BEGUN:
        slack += " (does NOT fit three quarters of the runtime)"
    rows = [("budget", need), ("slack", slack)]
    if told["phase"] == "recovery":
        rows.append(("next", "training starts; `powerguard recover --dry-run` tells what it waits for"))
    if told["outage"] is not None and told["outage"]["aborted_by"]:
        rows.append(("next", CALLED_OFF))
    is_fine = told["outage"] is None or (told["phase"] == "recovery" and told["supply"] == "utility")
    for place, step in enumerate(told["next"]):
        label = ("if power fails" if is_fine else "next") if place == 0 else ""
        rows.append((label, describe_step(step, is_suspended=told["maintenance"] is not None)))
    return rows


def describe_step(step: dict[str, Any], *, is_suspended: bool = False) -> str:
    """Return one forecast as a line: when, what, why. is_suspended: maintenance keeps the host on."""
    in_s = step["in_s"]
    when = "at a time not known" if in_s is None else "now" if in_s <= 0 else f"in {duration(in_s)}"
    at = "" if step["at"] is None else f" ({clock_of(step['at'])})"
    action = clean(step["action"])
    because = clean(step["because"])
    what = _WORDS.get(action, action)
    if is_suspended and action == "shutdown":
        what += ", if maintenance did not suspend it"
    return f"{when}{at}: {what}: {_BECAUSE.get(because, because)}"


def _trainer(trainer: dict[str, Any]) -> str:
    name = clean(trainer["name"])
    if not trainer["alive"]:
        return f"{name}: not there"
    doing = "paused" if trainer["paused"] else "training"
    doing = {"stop": "stopped by a signal", "terminate": "ended by a signal"}.get(trainer.get("signalled", ""), doing)
    at = f" at step {trainer['step']}" if trainer["step"] is not None else ""
    parts = [f"{name}: {doing}{at}"]
    if trainer["checkpoint_in_flight"]:
        eta = trainer["checkpoint_eta_s"]
        parts.append("checkpoint in flight" + (f", durable in {duration(eta)}" if eta is not None else ""))
    elif trainer["durable"]:
        step = f"step {trainer['durable_step']} " if trainer["durable_step"] is not None else ""
        parts.append(f"{step}durable {duration(trainer['durable_age_s'])} ago")
    else:
        parts.append(f"checkpoint takes {duration(trainer['checkpoint_s'])}")
    if trainer["failed"]:
        parts.append(f"checkpoint failed: {clean(trainer['failed'])}")
    parts.append({"pause": "pauses", "exit": "exits", "continue": "does not pause"}[trainer["conduct"]])
    return ", ".join(parts)


def _traps(traps: dict[str, Any], now: float) -> str:
    """The trap port: open or not, and what came there."""
    if not traps["listening"]:
        return f"NOT listening at {clean(traps['listen'])}: {clean(traps['because'])}"
    results = traps["results"]
    last = [f"{clean(ups)} {duration(now - at)} ago" for ups, at in traps["last_at"].items() if at is not None]
    refused = {
        word: count for word, count in results.items() if count and word not in ("hint", "repeated", "discovery")
    }
    hints = f"{results['hint']} made us poll" + (f" (last: {', '.join(last)})" if last else "")
    others = ", ".join(f"{count} {clean(word).replace('_', ' ')}" for word, count in refused.items())
    return f"listening at {clean(traps['listen'])}; {hints}" + (f"; {others}" if others else "")


def _source(source: dict[str, Any]) -> str:
    state = "up" if source["up"] else "DOWN"
    age = f", read {duration(source['age_s'])} ago" if source["age_s"] is not None else ", never read"
    trust = "" if source["authenticated"] or not source["up"] else ", answers could be forged"
    error = "".join(f", {clean(source[key])}" for key in ("last_error", "trouble") if source.get(key))
    return (
        f"{clean(source['source'])}: {state}{age}, {source['failures']} of {source['polls']} polls failed{trust}{error}"
    )
