"""`powerguard plan`: the budget term by term with the source of each, and what happens next and when."""

import argparse
import json
from typing import Any

from powerguard.cli.client import DownError, RefusedError, add_options, get
from powerguard.cli.operate import EX_DOWN, Subparsers, fail
from powerguard.cli.render import Paint, clean, duration, table
from powerguard.cli.status import describe_step


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="the budget term by term",
        description="Show every term of the budget with its source, and what happens next and when: by the very sums "
        "that decide. Exit 0: a full stop fits; 1: it does not; 4: the daemon is down.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_options(parser, reads=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        told = get(args, "/api/v1/plan")
    except (DownError, RefusedError) as error:
        return fail(args, "plan", str(error), EX_DOWN)
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(describe(told, Paint())))
    return (
        0
        if told["fits"] and not {"undersized", "not_protected"} & {reason["name"] for reason in told["reasons"]}
        else 1
    )


def describe(told: dict[str, Any], paint: Paint) -> list[str]:
    """Return the plan as lines."""
    lines = [f"phase {clean(told['phase'])}, {clean(told['mode'])}", ""]
    lines += table([(clean(term["name"]), _value(term), clean(term["source"])) for term in told["terms"]], indent="")
    lines.append("")
    slack = duration(told["slack_s"])
    if told["slack_s"] is None:
        lines.append(paint("Nobody knows how long the battery lasts.", "red"))
    elif told["fits"] and told["grade"] != "full":
        lines.append(paint(f"Only a {clean(told['grade'])} stop fits, with {slack} of slack.", "yellow"))
    elif told["fits"]:
        lines.append(paint(f"It fits, with {slack} of slack.", "green"))
    else:
        lines.append(paint(f"It does not fit three quarters of the runtime: slack {slack}.", "red"))
    for reason in told["reasons"]:
        lines.append(f"{paint('!', 'yellow')} {clean(reason['text'])}")
    lines.append("If utility failed now:" if told["assumes_utility_fails_now"] else "Next, if nothing changes:")
    lines += [f"  {describe_step(step)}" for step in told["next"]]
    return lines


def _value(term: dict[str, Any]) -> str:
    value = term["value"]
    if value is None:
        return "?"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if term["unit"] == "share" and isinstance(value, int | float):
        return f"{100 * value:.1f} %"
    if term["unit"] == "s" and isinstance(value, int | float):
        return f"{value:.1f} s"
    return clean(value)
