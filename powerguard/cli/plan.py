"""`powerguard plan`: the budget term by term with the source of each, and what happens next and when."""

import argparse
import json
from typing import Any, Final

from powerguard.cli.client import DownError, RefusedError, add_options, get
from powerguard.cli.operate import EX_DOWN, Subparsers, fail
from powerguard.cli.render import Paint, clean, duration, fold, is_endless, moment, table
from powerguard.cli.status import BEGUN, CALLED_OFF, describe_step

EX_USAGE: Final = 64
_SIZE_OPTIONS: Final = (
    ("--params", "N", "size of the model: 70B, 650M"),
    ("--bytes-per-param", "N", "bytes of each parameter in the checkpoint (16: Adam, mixed precision, all states)"),
    ("--hosts", "N", "hosts over which --params or --bytes are written (1)"),
    ("--bytes", "SIZE", "size of the checkpoint: 8.5GB"),
    ("--disk", "RATE", "how fast it is written: 0.4GB/s (counted twice as long until it was measured)"),
    ("--checkpoint-s", "S", "seconds that a checkpoint was measured to take"),
    ("--load-w", "W", "what the UPS carries while training: 4500W, 4.5kW"),
    ("--load-pct", "PCT", "the same, in percent of its rating (100)"),
    ("--paused-w", "W", "what it carries while training is paused"),
    ("--paused-pct", "PCT", "the same, in percent of its rating (0.6 of the load)"),
    ("--ups", "MODEL", "a model that is known, such as 'APC SRT 6000VA'"),
    ("--models", "FILE", "your own models (/etc/powerguard/ups-models.yaml)"),
    ("--table", "PCT:S,...", "runtime of a new battery by load, of the data sheet: 50:540,75:360,100:240"),
    ("--battery-wh", "WH", "instead, cautiously: energy of the battery as printed on it"),
    ("--rating-w", "W", "rated watts of the UPS (not VA)"),
    ("--health", "SHARE", "share of a new battery that this one holds (0.75)"),
    ("--margin", "SHARE", "share of the energy that is not planned with (0.2)"),
    ("--reserve-s", "S", "seconds in reserve after the power-off (60)"),
    ("--stop-s", "S", "seconds that the host needs to stop (110)"),
)


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="the budget term by term",
        description="Show every term of the budget with its source, and what happens next and when: by the very sums "
        "that decide. Exit 0: a full stop fits; 1: it does not; 4: the daemon is down.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--picture", action="store_true", help="draw the budget as a bar over time")
    parser.add_argument(
        "--html", metavar="FILE", default=None, help="write a page with the energy left over time; - for stdout"
    )
    add_options(parser, reads=True)
    _add_size(parser)
    parser.set_defaults(run=run)


def _add_size(parser: argparse.ArgumentParser) -> None:
    size = parser.add_argument_group(
        "is the battery large enough?",
        "--size answers without a daemon, from the settings where there are some and from these options over them. "
        "Exit 0: a full stop fits; 1: it does not.",
    )
    size.add_argument("--size", action="store_true", help="check the capacity of a site, and tell what would fix it")
    size.add_argument("--no-settings", action="store_true", help="pass the settings over: another site than this host")
    size.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings")
    for option, metavar, text in _SIZE_OPTIONS:
        size.add_argument(option, metavar=metavar, default=None, help=text)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if args.size:
        from powerguard.cli.size import run as run_size

        return run_size(args)
    alone = [option for option, _, _ in _SIZE_OPTIONS if getattr(args, option[2:].replace("-", "_")) is not None]
    if alone:
        return fail(args, "plan", f"{', '.join(alone)} only with --size", EX_USAGE)
    try:
        told = get(args, "/api/v1/plan")
    except (DownError, RefusedError) as error:
        return fail(args, "plan", str(error), EX_DOWN)
    if args.html is not None and (trouble := _write(told, args.html)):
        return fail(args, "plan", trouble, EX_USAGE)
    if args.json:
        print(json.dumps(told, indent=2))
    elif args.html != "-":
        print("\n".join(_picture(told) if args.picture else fold(describe(told, Paint()))))
    return (
        0
        if told["fits"] and not {"undersized", "not_protected"} & {reason["name"] for reason in told["reasons"]}
        else 1
    )


def _picture(told: dict[str, Any]) -> list[str]:
    from powerguard.cli import picture

    lines = picture.text(picture.from_plan(told), Paint(), utf8=picture.is_utf8())
    if not lines:
        return ["Nothing to draw: nobody knows how long the battery lasts, or the host is shutting down."]
    return [_when(told), *lines]


def _when(told: dict[str, Any]) -> str:
    return "If utility failed now:" if told["assumes_utility_fails_now"] else "From now, if nothing changes:"


def _write(told: dict[str, Any], path: str) -> str:
    """Write the page; return why not, or ""."""
    from powerguard.cli import picture

    rows = _terms(told)
    text = picture.page(
        title=f"powerguard: the budget, {_when(told).rstrip(':').lower()}",
        verdict=_verdict(told)[0],
        mood={"green": "good", "yellow": "warn", "red": "bad"}[_verdict(told)[1]],
        stretches=picture.from_plan(told),
        notes=[clean(reason["text"]) for reason in told["reasons"]] + _steps(told),
        sections=(picture.Section("The terms", ("term", "value", "where it comes from"), rows, numbers=(1,)),),
        since="now",
        footer=f"powerguard {clean(told['version'])}, plan of {moment(told['at'])}; phase {clean(told['phase'])}, "
        f"{clean(told['mode'])}.",
    )
    return picture.write(path, text)


def _verdict(told: dict[str, Any]) -> tuple[str, str]:
    """Return the verdict as a sentence, and its colour."""
    slack = duration(told["slack_s"])
    if told["phase"] == "shutdown":
        return "The power-off is decided; nothing in this boot undoes it.", "red"
    if told["slack_s"] is None:
        return "Nobody knows how long the battery lasts.", "red"
    if is_endless(told["slack_s"]):
        return "It fits: with training paused, a feed that has utility carries the host.", "green"
    if told["slack_s"] < 0.0:
        return f"It does not fit: {duration(-told['slack_s'])} less is left than is needed.", "red"
    if told["fits"] and told["grade"] != "full":
        return f"Only a {clean(told['grade'])} stop fits, with {slack} of slack.", "yellow"
    if told["fits"]:
        return f"It fits, with {slack} of slack.", "green"
    if told["phase"] in BEGUN:
        need = "The stop fits" if told["phase"] == "holding" else "Checkpoint and stop fit"
        return f"{need}, with {slack} of slack.", "yellow"
    return f"It does not fit three quarters of the runtime: slack {slack}.", "red"


def describe(told: dict[str, Any], paint: Paint) -> list[str]:
    """Return the plan as lines."""
    lines = [f"phase {clean(told['phase'])}, {clean(told['mode'])}", ""]
    lines += table(_terms(told), indent="")
    lines.append("")
    lines.append(paint(*_verdict(told)))
    for reason in told["reasons"]:
        lines.append(f"{paint('!', 'yellow')} {clean(reason['text'])}")
    lines.append("If utility failed now:" if told["assumes_utility_fails_now"] else "Next, if nothing changes:")
    lines += [f"  {step}" for step in _steps(told)]
    return lines


def _steps(told: dict[str, Any]) -> list[str]:
    names = {reason["name"] for reason in told["reasons"]}
    if "aborted" in names:
        return [CALLED_OFF]
    is_suspended = "maintenance" in names
    return [describe_step(step, is_suspended=is_suspended) for step in told["next"]]


def _terms(told: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the terms as rows. Once training was paused, three quarters are no verdict on what fits the whole."""
    misleads = told["phase"] in BEGUN and not told["fits"] and (told["slack_s"] is not None and told["slack_s"] >= 0.0)
    terms = [term for term in told["terms"] if not (misleads and term["name"] == "fits")]
    return [(clean(term["name"]), _value(term), clean(term["source"])) for term in terms]


def _value(term: dict[str, Any]) -> str:
    value = term["value"]
    if value is None:
        return "?"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if term["unit"] == "share" and isinstance(value, int | float):
        return f"{100 * value:.1f} %"
    if term["unit"] == "s" and isinstance(value, int | float):
        return "endless" if is_endless(value) else f"{value:.1f} s"
    return clean(value)
