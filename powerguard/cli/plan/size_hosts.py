"""`powerguard plan --size --host ... --host ...`: which tiers of a shared UPS does its battery carry, how long?"""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any, Final

from powerguard.cli.plan import picture
from powerguard.cli.plan.amounts import AmountError
from powerguard.cli.plan.picture import Stretch
from powerguard.cli.plan.size_input import HostsQuestion, alone, read_hosts_question
from powerguard.cli.render import Paint, clean, duration, fold, is_utf8, table
from powerguard.cli.shared import EX_CONFIG, EX_USAGE, fail
from powerguard.core.size.host import Verdict
from powerguard.core.size.rack import GroupCourse, RackCourse, course
from powerguard.daemon.observe.status import VERSION
from powerguard.settings.load import SettingsError

SCHEMA_VERSION: Final = 1


def run(args: argparse.Namespace) -> int:
    """Carry it out."""
    try:
        question = read_hosts_question(args)
    except AmountError as error:
        return fail(args, "plan --size", str(error), EX_USAGE)
    except SettingsError as error:
        return fail(args, "plan --size", str(error).replace("\n", "; "), EX_CONFIG)
    answer = course(question.policy, question.groups)
    result = view(question, answer)
    lines = fold(describe(result, Paint(), utf8=is_utf8(), width=picture.room()))
    print(json.dumps(result, indent=2) if args.json else "\n".join(lines))
    return 0 if answer.verdict is Verdict.FULL else 1


# --- The object -------------------------------------------------------------------------------------------------------


def view(question: HostsQuestion, answer: RackCourse) -> dict[str, Any]:
    """Return the answer as one JSON object. The hosts are listed by tier, the highest first."""
    policy, rating_w = question.policy, question.policy.rating_w or 0.0
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "size_hosts",
        "version": VERSION,
        "ups": question.title,
        "not_counted": list(question.not_counted),
        "verdict": answer.verdict.value,
        "fits": answer.verdict is Verdict.FULL,
        "load": _round(answer.load),
        "rating_w": rating_w,
        "health": policy.health,
        "reserve_s": policy.reserve_s,
        "empty_s": _round(answer.empty_s),
        "battery_times": _round(answer.battery_times),
        "hosts": [_host(each, rating_w) for each in sorted(answer.groups, key=lambda each: -each.group.tier)],
        "moments": [
            {
                "at_s": _round(each.at_s),
                "tier": each.group.tier,
                "stage": each.stage.value,
                "load": _round(each.load),
                "left": _round(each.left),
            }
            for each in answer.moments
        ],
        "sources": dict(question.sources),
    }


def _host(each: GroupCourse, rating_w: float) -> dict[str, Any]:
    group = each.group
    return {
        "tier": group.tier,
        "n": group.count,
        "w": _round(group.load * rating_w),
        "paused_w": _round(group.load_paused * rating_w),
        "checkpoint_s": _round(group.checkpoint_s),
        "shed_s": _round(each.shed_s),
        "verdict": each.verdict.value,
        "grade": each.grade.value,
        "pause_s": _round(each.pause_s),
        "durable_s": _round(each.durable_s),
        "commit_s": _round(each.commit_s),
        "off_s": _round(each.off_s),
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


# --- Text -------------------------------------------------------------------------------------------------------------


def _tiers(result: dict[str, Any], *verdicts: str) -> str:
    tiers = sorted({each["tier"] for each in result["hosts"] if each["verdict"] in verdicts})
    return f"tier{'s' if len(tiers) > 1 else ''} {', '.join(map(str, tiers))}" if tiers else ""


def headline(result: dict[str, Any]) -> tuple[str, str]:
    """Return the verdict as a sentence, and its mood: good, warn or bad."""
    if result["verdict"] == "overload":
        return f"The hosts draw {100 * result['load']:.0f} % of what the UPS can carry.", "bad"
    if lost := _tiers(result, "none"):
        return f"The battery does not carry {lost}.", "bad"
    if less := _tiers(result, "short", "bare"):
        return f"The battery carries every tier, but {less} without a full stop.", "warn"
    return "The battery carries every tier, each with a checkpoint and a full stop.", "good"


def describe(result: dict[str, Any], paint: Paint, *, utf8: bool, width: int = picture.WIDTH) -> list[str]:
    """Return the answer as lines."""
    sentence, mood = headline(result)
    lines = [paint(sentence, {"good": "green", "warn": "yellow", "bad": "red"}[mood])]
    if result["verdict"] == "overload":
        return [*lines, f"A UPS of at least {math.ceil(result['load'] * result['rating_w'])} W is needed."]
    if result["battery_times"] is not None:
        lines += [f"A battery {result['battery_times']:.2f} times as large carries every tier with a full stop."]
    elif result["verdict"] != "full":
        lines += ["No larger battery alone carries every tier with a full stop: change checkpoints, stops or loads."]
    rows = [(f"tier {each['tier']} x {each['n']}", _bar(each, result["empty_s"])) for each in result["hosts"]]
    lines += ["", *picture.together(rows, paint, utf8=utf8, width=width), ""]
    lines += table(
        [
            ("", "pauses", "durable", "powers off", "is off", "earlier", "stop"),
            *((_name(each), *_times(each), duration(each["shed_s"]), _stop(each)) for each in result["hosts"]),
        ]
    )
    lines += ["", "Seconds since utility failed. What the UPS carries after each step:"]
    lines += table([(duration(at_s), *_change(step, load, left)) for at_s, step, load, left in _steps(result)])
    if result["empty_s"] is not None:
        lines += [paint(f"  {duration(result['empty_s'])}  the battery is empty under load", "red")]
    health, reserve = f"{100 * result['health']:.0f} % of a new battery", f"{result['reserve_s']:g} s of reserve"
    lines += ["", f"For {clean(result['ups'])}: {result['rating_w']:g} W, {health}, {reserve}."]
    return lines + ([clean(alone(result))] if result["not_counted"] else [])


def _name(each: dict[str, Any]) -> str:
    hosts = "1 host" if each["n"] == 1 else f"{each['n']} hosts"
    return f"tier {each['tier']}, {hosts}"


def _times(each: dict[str, Any]) -> tuple[str, ...]:
    known = (each[name] for name in ("pause_s", "durable_s", "commit_s", "off_s"))
    return tuple("never" if at_s is None else duration(at_s) for at_s in known)


def _bar(each: dict[str, Any], empty_s: float | None) -> tuple[Stretch, ...]:
    return picture.of_a_host(
        each["pause_s"], each["durable_s"], each["commit_s"], each["off_s"], end_s=empty_s or each["commit_s"]
    )


def _stop(each: dict[str, Any]) -> str:
    return "not carried" if each["verdict"] == "none" else str(each["verdict"])


_STEPS: Final = {"checkpoint": "pauses", "stop": "powers off", "off": "is off"}


def _steps(result: dict[str, Any]) -> Sequence[tuple[float, str, float, float]]:
    return [
        (each["at_s"], f"tier {each['tier']} {_STEPS[each['stage']]}", each["load"], each["left"])
        for each in result["moments"]
        if each["stage"] in _STEPS
    ]


def _change(step: str, load: float, left: float) -> tuple[str, str, str]:
    return step, f"load {100 * load:.0f} %", f"energy {100 * left:.0f} %"
