"""`powerguard plan`: does it fit, what happens next and when, with a picture; and every term of the budget."""

import argparse
from typing import Any, Final

from powerguard.cli.client import DownError, RefusedError, add_options, get
from powerguard.cli.plan import picture
from powerguard.cli.render import Paint, clean, clock_of, duration, fold, is_endless, is_utf8, table
from powerguard.cli.shared import EX_DOWN, EX_USAGE, fail, print_answer
from powerguard.cli.status import BEGUN, CALLED_OFF, steps

_SIZE_OPTIONS: Final = (
    ("--params", "N", "size of the model: 70B, 650M"),
    ("--bytes-per-param", "N", "bytes of each parameter in the checkpoint (16: Adam, mixed precision, all states)"),
    ("--hosts", "N", "hosts over which --params or --bytes are written (1)"),
    ("--bytes", "SIZE", "size of the checkpoint: 8.5GB"),
    ("--disk", "RATE", "write speed: 0.4GB/s (counted as half until it is measured)"),
    ("--checkpoint-s", "S", "seconds that a checkpoint was measured to take"),
    ("--load-w", "W", "load of the UPS while training runs: 4500W, 4.5kW"),
    ("--load-pct", "PCT", "the same, in percent of its rating (100)"),
    ("--paused-w", "W", "load of the UPS while training is paused"),
    ("--paused-pct", "PCT", "the same, in percent of its rating (0.6 of the load)"),
    ("--ups", "MODEL", "a known model, such as 'APC SRT 6000VA'"),
    ("--models", "FILE", "your own models (/etc/powerguard/ups-models.yaml)"),
    ("--table", "PCT:S,...", "runtime of a new battery by load, of the data sheet: 50:540,75:360,100:240"),
    ("--battery-wh", "WH", "instead of a table: energy printed on the battery (cautious)"),
    ("--rating-w", "W", "rated watts of the UPS (not VA)"),
    ("--health", "SHARE", "share of a new battery that this one holds (0.75)"),
    ("--margin", "SHARE", "share of the energy that is not planned with (0.2)"),
    ("--reserve-s", "S", "seconds in reserve after the power-off (60)"),
    ("--stop-s", "S", "seconds that the host needs to stop (110)"),
)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Show whether checkpoint and stop fit the battery, how long training continues, when it pauses and "
        "when the host powers off, with a picture, from the same calculation that decides. --terms shows every term. "
        "Exit 0: a full stop fits; 1: it does not; 4: the daemon is down."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, with every term")
    parser.add_argument("--picture", action="store_true", help="only the picture: the budget as a bar over time")
    parser.add_argument("--terms", action="store_true", help="show every term of the budget, with its origin")
    add_options(parser, reads=True)
    _add_size(parser)


def _add_size(parser: argparse.ArgumentParser) -> None:
    size = parser.add_argument_group(
        "is the battery large enough?",
        "--size works without a daemon, from these options, else from the settings. "
        "Exit 0: a full stop fits; 1: it does not.",
    )
    size.add_argument("--size", action="store_true", help="check the capacity of a site and show fixes")
    size.add_argument("--no-settings", action="store_true", help="ignore the settings, for another site than this host")
    size.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings")
    for option, metavar, text in _SIZE_OPTIONS:
        size.add_argument(option, metavar=metavar, help=text)
    size.add_argument(
        "--host",
        metavar="tier=T,w=W,...",
        action="append",
        help="a host of a shared UPS, several times: its shed tier, its watts in training; also paused=W, "
        "checkpoint=20s, stop=S, and n=6 for six that are alike",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if args.size:
        from powerguard.cli.plan.size import run as run_size

        return run_size(args)
    options = [*(option for option, _, _ in _SIZE_OPTIONS), "--host"]
    alone = [option for option in options if getattr(args, option[2:].replace("-", "_")) is not None]
    if alone:
        return fail(args, "plan", f"{', '.join(alone)} needs --size", EX_USAGE)
    try:
        plan = get(args, "/api/v1/plan")
    except (DownError, RefusedError) as error:
        return fail(args, "plan", str(error), EX_DOWN)
    print_answer(
        args, plan, lambda: _picture(plan) if args.picture else fold(describe(plan, Paint(), has_terms=args.terms))
    )
    reasons = {reason["name"] for reason in plan["reasons"]}
    fits = plan["fits"] and plan["grade"] == "full" and not {"undersized", "not_protected"} & reasons
    return 0 if fits else 1


def _picture(plan: dict[str, Any]) -> list[str]:
    lines = _drawn(plan, Paint())
    if not lines:
        return ["No picture: the runtime is unknown, or the host is shutting down."]
    return [f"{_when(plan)}:", *lines]


def _drawn(plan: dict[str, Any], paint: Paint) -> list[str]:
    return picture.text(picture.from_plan(plan), paint, utf8=is_utf8(), width=picture.room())


def _drawn_tiers(tiers: list[dict[str, Any]], paint: Paint) -> list[str]:
    rows = [
        (
            f"tier {each['tier']}{' (this host)' if each['own'] else ''}",
            picture.of_a_host(*(each[name] for name in ("pause_s", "durable_s", "commit_s", "off_s")), end_s=None),
        )
        for each in reversed(tiers)
    ]
    return picture.together(rows, paint, utf8=is_utf8(), width=picture.room())


def _when(plan: dict[str, Any]) -> str:
    return "If utility failed now" if plan["assumes_utility_fails_now"] else "From now, without further changes"


def _host(plan: dict[str, Any]) -> str:
    """Return the host's name; "this host" if the daemon does not report it."""
    return clean((plan.get("host") or {}).get("name") or "this host")


def _has_begun(plan: dict[str, Any]) -> bool:
    """Say whether all of the runtime counts, and not three quarters of it."""
    return plan["phase"] in BEGUN or (plan["phase"] == "recovery" and not plan["assumes_utility_fails_now"])


def _verdict(plan: dict[str, Any]) -> tuple[str, str]:
    """Return the verdict as a sentence, and its colour."""
    slack_s = plan["slack_s"]
    if plan["phase"] == "shutdown":
        if plan["mode"] != "armed":
            return f"The power-off is only recorded in mode {clean(plan['mode'])}: the host stays on.", "yellow"
        return "The power-off is decided and cannot be undone in this boot.", "red"
    if slack_s is None:
        return "The battery's runtime is unknown.", "red"
    if is_endless(slack_s):
        return "It fits: with training paused, a feed that has utility carries the host.", "green"
    terms = {term["name"]: term["value"] for term in plan["terms"]}
    stop = f"{clean(plan['grade'])} stop"
    waits = plan["phase"] == "recovery" and not terms.get("checkpoint_s")
    needs = f"the {stop} needs" if waits or plan["phase"] == "holding" else f"checkpoint and {stop} need"
    gives = f"the battery gives {duration(terms.get('reff_paused_s'))}{'' if waits else ' with training paused'}"
    room = f", higher tiers {duration(terms['shed_s'])}" if terms.get("shed_s") else ""
    sums = f"{needs} {duration(terms.get('need_s'))}{room}, {gives}"
    if slack_s < 0.0:
        return f"It does not fit: {sums}. {duration(-slack_s)} are missing.", "red"
    slack = f"{sums}. Slack {duration(slack_s)}."
    if plan["fits"] and plan["grade"] != "full":
        return f"Only a {clean(plan['grade'])} stop fits: {slack}", "yellow"
    if plan["fits"]:
        return f"It fits: {slack}", "green"
    if _has_begun(plan):
        return f"It still fits: {slack}", "yellow"
    return f"It does not fit three quarters of the runtime: {slack}", "red"


def describe(plan: dict[str, Any], paint: Paint, *, has_terms: bool = False) -> list[str]:
    """Return the plan as lines: the answer, the forecast, the picture; the terms only on request."""
    phase = clean(plan["phase"]).replace("_", " ")
    lines = [f"{_host(plan)}: {phase}, {clean(plan['mode'])}", paint(*_verdict(plan)), "", f"{_when(plan)}:"]
    lines += [f"  {step}" for step in _steps(plan)]
    drawn = _drawn(plan, paint)
    if drawn:
        lines += ["", *drawn]
    if plan.get("tiers"):
        lines += ["", "The tiers of this UPS, if each host were like this one and no load changed:"]
        lines += _drawn_tiers(plan["tiers"], Paint())
    if plan["reasons"]:
        lines += ["", *(f"{paint('!', 'yellow')} {clean(reason['text'])}" for reason in plan["reasons"])]
    if has_terms:
        return [*lines, "", *table(_terms(plan), indent="")]
    return [*lines, "", "Every term of this budget: powerguard plan --terms"]


def _steps(plan: dict[str, Any]) -> list[str]:
    names = {reason["name"] for reason in plan["reasons"]}
    if "aborted" in names:
        return [CALLED_OFF]
    lines = steps(plan)
    pause = next((step for step in plan["next"] if step["action"] == "emergency_checkpoint" and step["at"]), None)
    if pause is not None and pause["in_s"] > 0.0:
        lines.insert(0, f"training continues for {duration(pause['in_s'])}, until {clock_of(pause['at'])}")
    return lines


_WORDS: Final = {
    "load_now": "load",
    "load_own": "load of this host alone",
    "load_paused": "load with training paused",
    "health": "battery health",
    "recharge_s": "recharge",
    "used": "energy used",
    "left_by_account": "energy left, by the energy account",
    "left_by_charge": "energy left, by the charge",
    "left_by_runtime": "energy left, by the runtime",
    "left": "energy left",
    "usable": "energy that counts",
    "tau_now_s": "new battery lasts",
    "tau_paused_s": "new battery lasts, paused",
    "cut_in_s": "UPS cuts its output in",
    "reff_now_s": "battery gives",
    "reff_paused_s": "battery gives, paused",
    "checkpoint_s": "checkpoint",
    "grade": "kind of stop",
    "host_stop_s": "host stops in",
    "ups_off_s": "UPS switches off in",
    "reserve_s": "reserve",
    "stop_s": "stop, in all",
    "need_s": "needed, in all",
    "shed_s": "earlier, for higher tiers",
    "slack_s": "slack",
    "fits": "fits",
}


def _terms(plan: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the terms as rows: in words, symbol, value, source.

    Once training is paused, the whole runtime counts and not three quarters of it.
    """
    misleads = _has_begun(plan) and not plan["fits"] and (plan["slack_s"] is not None and plan["slack_s"] >= 0.0)
    rows = []
    for term in plan["terms"]:
        if misleads and term["name"] == "fits":
            continue
        name, _, whose = term["name"].partition(".")
        label = _WORDS.get(name, "") + (f" of {whose}" if whose else "")
        rows.append((clean(label), clean(term["name"]), _value(term), clean(term["source"])))
    return rows


def _value(term: dict[str, Any]) -> str:
    value = term["value"]
    if value is None:
        return "?"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if term["unit"] == "share" and isinstance(value, int | float):
        return f"{100 * value:.1f} %"
    if term["unit"] == "s" and isinstance(value, int | float):
        return "endless" if is_endless(value) else duration(value)
    return clean(value)
