"""`powerguard plan --size`: is the battery large enough, by how much, and which changes help? Needs no daemon."""

import argparse
import json
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from powerguard.cli.plan import picture
from powerguard.cli.plan.amounts import AmountError
from powerguard.cli.plan.picture import Stretch
from powerguard.cli.plan.size_input import Question, alone, read_question
from powerguard.cli.render import Paint, clean, duration, fold, is_utf8, table
from powerguard.cli.shared import EX_CONFIG, EX_USAGE, fail
from powerguard.core.energy import account
from powerguard.core.model.actions import Grade
from powerguard.core.size.host import Fix, Lever, Size, Verdict, size
from powerguard.daemon.observe.status import VERSION
from powerguard.settings.load import SettingsError

SCHEMA_VERSION: Final = 1

_GRADES: Final = {
    Grade.FULL: "full: services stop in order, with the whole reserve",
    Grade.SHORT: "short: the usual duration of a stop, with at most 20 s of reserve",
    Grade.BARE: "bare: disks synced, power off by force",
}


def run(args: argparse.Namespace) -> int:
    """Carry out `plan --size`."""
    if args.host is not None:
        from powerguard.cli.plan.size_hosts import run as run_hosts

        return run_hosts(args)
    try:
        question = read_question(args)
    except AmountError as error:
        return fail(args, "plan --size", str(error), EX_USAGE)
    except SettingsError as error:
        return fail(args, "plan --size", str(error).replace("\n", "; "), EX_CONFIG)
    answer = size(question.site)
    result = view(question, answer)
    lines = fold(describe(result, Paint(), utf8=is_utf8(), width=picture.room()))
    print(json.dumps(result, indent=2) if args.json else "\n".join(lines))
    return 0 if answer.verdict is Verdict.FULL else 1


# --- The object -------------------------------------------------------------------------------------------------------


def view(question: Question, answer: Size) -> dict[str, Any]:
    """Return the answer as one JSON object. Deficits are rounded up, spare amounts down."""
    course = answer.course
    return {
        "schema_version": SCHEMA_VERSION,
        "object": "size",
        "version": VERSION,
        "ups": question.title,
        "not_counted": list(question.not_counted),
        "verdict": answer.verdict.value,
        "fits": answer.verdict is Verdict.FULL,
        "grades": [
            {
                "grade": each.grade.value,
                "stop_s": _round(each.stop_s),
                "need_s": _round(each.need_s),
                "spare_s": math.floor(each.spare_s * 10.0 + 1e-6) / 10.0,
                "fits": each.fits,
            }
            for each in answer.grades
        ],
        "training_s": None if course is None else _round(course.training_s),
        "durable_s": None if course is None or not course.durable else _round(course.durable_s),
        "commit_s": None if course is None else _round(course.commit_s),
        "terms": [
            {"name": name, "value": value, "unit": unit, "source": source}
            for name, value, unit, source in _terms(question, answer)
        ],
        "stages": []
        if course is None
        else [
            {
                "name": each.name,
                "begins_s": _round(each.begins_s),
                "lasts_s": _round(each.lasts_s),
                "load": _round(each.load),
                "left": _round(each.left),
                "left_after": _round(each.left_after),
            }
            for each in course.stages
        ],
        "fixes": [_fix(question, fix) for fix in answer.fixes],
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _terms(question: Question, answer: Size) -> list[tuple[str, float | str | None, str, str]]:
    site, now, sources = answer.site, answer.budget, question.sources
    policy = site.policy
    grade = answer.grades[0]
    watts: list[tuple[str, float | str | None, str, str]] = []
    if policy.rating_w is not None:
        watts = [
            ("load_w", _round(site.load * policy.rating_w), "W", f"load_now x rating of {policy.rating_w:g} W"),
            ("paused_w", _round(site.load_paused * policy.rating_w), "W", "load_paused x rating"),
        ]
    written: list[tuple[str, float | str | None, str, str]] = []
    if question.size_bytes is not None:
        written = [("size_bytes", _round(question.size_bytes), "B", sources["size_bytes"])]
    stop_s = min(policy.stop_q95_s, policy.force_after_s)
    tau = sources["tau"]
    points = [load for load, _ in policy.runtime_table]
    return [
        ("load_now", _round(site.load), "share", sources["load"]),
        ("load_paused", _round(site.load_paused), "share", sources["paused"]),
        *watts,
        ("health", policy.health, "share", f"of a new battery, at full charge; {sources['health']}"),
        (
            "usable",
            _round(now.usable),
            "share",
            f"min({1 - policy.margin:g} health, health - {policy.floor:g}); margin: {sources['margin']}",
        ),
        ("tau_now_s", _round(now.tau_now_s), "s", f"new battery at load_now; {tau}{_beyond(site.load, points)}"),
        (
            "tau_paused_s",
            _round(now.tau_paused_s),
            "s",
            f"new battery at load_paused; {tau}{_beyond(site.load_paused, points)}",
        ),
        ("reff_now_s", _round(now.reff_now_s), "s", "usable x tau_now_s"),
        ("reff_paused_s", _round(now.reff_paused_s), "s", "usable x tau_paused_s"),
        *written,
        ("checkpoint_s", _round(site.checkpoint_s), "s", sources["checkpoint_s"]),
        ("host_stop_s", _round(stop_s), "s", f"{sources['stop']}, not measured here"),
        ("ups_off_s", policy.ups_off_s, "s", "the UPS's countdown after the forced power-off"),
        ("reserve_s", policy.reserve_s, "s", sources["reserve_s"]),
        ("need_s", _round(grade.need_s), "s", "checkpoint_s + host_stop_s + ups_off_s + reserve_s, for a full stop"),
        (
            "allowed_s",
            _round(None if now.reff_paused_s is None else 0.75 * now.reff_paused_s),
            "s",
            "0.75 reff_paused_s: need_s must not be more",
        ),
    ]


def _beyond(load: float, points: Sequence[float]) -> str:
    """Say that a table had to be stretched."""
    if not points or points[0] <= load <= points[-1]:
        return ""
    return (
        f" (above {100 * points[-1]:g} %: stretched)"
        if load > points[-1]
        else f" (below {100 * points[0]:g} %: stretched)"
    )


def _fix(question: Question, fix: Fix) -> dict[str, Any]:
    """Return one fix with its text, and further figures if they are known."""
    entry: dict[str, Any] = {"lever": fix.lever.value, "value": fix.value, "now": _round(fix.now)}
    policy, site = question.site.policy, question.site
    rating_w, size_bytes = policy.rating_w, question.size_bytes
    match fix.lever:
        case Lever.CHECKPOINT:
            entry["text"] = f"a checkpoint of at most {fix.value:.1f} s instead of {_up(fix.now)}"
            if size_bytes is not None:
                entry["times_faster"] = _ceil(fix.now / fix.value, 100)
                entry["at_most_bytes"] = math.floor(size_bytes * fix.value / fix.now)
                entry["bytes_per_s"] = math.ceil(size_bytes / fix.value)
                if question.promised_s is not None and question.promised_s <= fix.value:
                    entry["text"] += f" (the disk promises {_up(question.promised_s)}: measure it in a drill)"
                entry["text"] += (
                    f": a disk {entry['times_faster']:.2f} times as fast ({_bytes(size_bytes / fix.value, up=True)}/s "
                    f"really reached), or {_bytes(entry['at_most_bytes'])} instead of {_bytes(size_bytes)}"
                )
        case Lever.LOAD:
            paused = site.load_paused * fix.value / site.load
            entry["text"] = f"a load of at most {_load(fix.value, rating_w)}, paused {_load(paused, rating_w)}"
            entry["less_w"] = None if rating_w is None else math.ceil((fix.now - fix.value) * rating_w)
            if rating_w is not None:
                entry["text"] += f": {entry['less_w']} W less"
        case Lever.PAUSED_LOAD:
            entry["text"] = f"a load of at most {_load(fix.value, rating_w)} while paused (measure it with a drill)"
            entry["less_w"] = None if rating_w is None else math.ceil((fix.now - fix.value) * rating_w)
        case Lever.BATTERY:
            entry |= _battery(question, fix)
        case Lever.HEALTH:
            entry["text"] = (
                f"a battery that holds at least {100 * fix.value:.0f} % of a new one (counted: "
                f"{100 * fix.now:.0f} %): a drill measures it, or a new battery"
            )
        case Lever.RESERVE:
            entry["text"] = f"a reserve of at most {fix.value:.0f} s instead of {fix.now:g} s"
        case Lever.STOP:
            entry["text"] = f"a host that stops within {fix.value:.0f} s instead of {fix.now:g} s"
    return entry


def _battery(question: Question, fix: Fix) -> dict[str, Any]:
    """Express a larger battery in watt-hours: of the nameplate if known, else as delivered at this load."""
    policy, site = question.site.policy, question.site
    text = f"a battery {fix.value:.2f} times as large"
    if question.battery_wh is not None:
        more_wh = math.ceil((fix.value - 1.0) * question.battery_wh)
        return {"more_wh": more_wh, "text": f"{text}: {more_wh} Wh of external packs (nameplate)"}
    if policy.rating_w is None:
        return {"more_wh": None, "text": f"{text}, by external packs"}
    delivered_wh = account.tau_s(policy.runtime_table, site.load) * site.load * policy.rating_w / 3600.0
    more_wh = math.ceil((fix.value - 1.0) * delivered_wh)
    return {
        "more_wh": None,
        "more_delivered_wh": more_wh,
        "text": f"{text}: external packs that deliver {more_wh} Wh at this load (nameplates state far more)",
    }


def _ceil(value: float, grain: int) -> float:
    return math.ceil(value * grain - 1e-9) / grain


def _up(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _load(share: float, rating_w: float | None) -> str:
    percent = f"{math.floor(share * 1000 + 1e-6) / 10:g} %"
    return percent if rating_w is None else f"{math.floor(share * rating_w + 1e-6)} W ({percent})"


def _bytes(value: float, *, up: bool = False) -> str:
    """Return bytes in decimal units, three digits; rounded down, or up."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            scaled = value / factor * 100.0
            return f"{(math.ceil(scaled - 1e-6) if up else math.floor(scaled + 1e-6)) / 100.0:g} {unit}"
    return f"{value:.0f} B"


# --- Text -------------------------------------------------------------------------------------------------------------


def headline(result: dict[str, Any]) -> tuple[str, str]:
    """Return the verdict as a sentence, and its mood: good, warn or bad."""
    spare = {each["grade"]: each["spare_s"] for each in result["grades"]}
    short = f"{_safe(spare['full'])} short of a full stop"
    match result["verdict"]:
        case "full":
            return f"It fits in full, with {_safe(spare['full'])} to spare.", "good"
        case "short":
            return f"Only a short stop fits, with {_safe(spare['short'])} to spare: {short}.", "warn"
        case "bare":
            return f"Only a bare stop fits, with {_safe(spare['bare'])} to spare: {short}.", "warn"
        case "overload":
            return "The load is more than the UPS can carry.", "bad"
        case _:
            return f"It does not fit: {_safe(spare['bare'])} short of even a bare stop, {short}.", "bad"


def _stretches(result: dict[str, Any]) -> tuple[Stretch, ...]:
    return tuple(
        Stretch(each["name"], each["begins_s"], each["lasts_s"], each["load"], each["left"], each["left_after"])
        for each in result["stages"]
    )


def _course(result: dict[str, Any]) -> list[str]:
    """Return how a long outage would go, in sentences."""
    if result["verdict"] == "overload" or result["commit_s"] is None:
        return []
    commit = duration(result["commit_s"])
    if result["training_s"] > 0:
        first = f"Training continues for {duration(result['training_s'])} on battery"
    else:
        first = "Training pauses at once"
    if result["durable_s"] is None:
        return [
            f"{first}; the power-off comes after {commit}, before the checkpoint is durable, so the older one counts."
        ]
    held_s = result["commit_s"] - result["durable_s"]
    held = "" if held_s < 1 else f", then training is held for {duration(held_s)}"
    return [
        f"{first}; its checkpoint is durable after {duration(result['durable_s'])}{held}.",
        f"If utility returns before {commit}, training continues in place. After that the host powers off.",
    ]


def _value(value: float | str | None, unit: str) -> str:
    if not isinstance(value, int | float):
        return "?" if value is None else clean(value)
    match unit:
        case "share":
            return f"{100 * value:.1f} %"
        case "s":
            return f"{value:.1f} s"
        case "W":
            return f"{value:.0f} W"
        case _:
            return _bytes(value)


def _spare(each: dict[str, Any]) -> str:
    return f"{_safe(each['spare_s'])} {'to spare' if each['fits'] else 'short'}"


def _safe(spare_s: float) -> str:
    """Return how much is spare, rounded down, or short, rounded up."""
    return duration(abs(spare_s if abs(spare_s) < 10.0 else math.floor(spare_s)))


def _wrapped(line: str, width: int, first: str = "", then: str = "") -> list[str]:
    # A number and its unit stay together.
    bound = re.sub(r"(?<=[0-9]) (?=[a-zA-Z%])|(?<=\bm) (?=[0-9])", "\u00a0", clean(line))
    found = textwrap.wrap(bound, min(width, picture.WIDTH), initial_indent=first, subsequent_indent=then)
    return [each.replace("\u00a0", " ") for each in found]


def describe(result: dict[str, Any], paint: Paint, *, utf8: bool, width: int = picture.WIDTH) -> list[str]:
    """Return the answer as lines."""
    sentence, mood = headline(result)
    lines = [paint(sentence, {"good": "green", "warn": "yellow", "bad": "red"}[mood])]
    lines += _wrapped(alone(result), width)
    lines += _wrapped(" ".join(_course(result)), width)
    stretches = _stretches(result)
    if result["verdict"] != "overload":
        lines += ["", *picture.text(stretches, paint, utf8=utf8, width=width)]
    lines += ["", "The kinds of stop, each with the checkpoint before it:"]
    lines += table(
        [(f"{each['need_s']:.0f} s", _spare(each), _GRADES[Grade(each["grade"])]) for each in result["grades"]]
    )
    if result["fixes"]:
        lines += ["", "What would make a full stop fit, each alone:"]
        for fix in result["fixes"]:
            lines += _wrapped(fix["text"], width, "  - ", "    ")
    elif not result["fits"]:
        lines += ["", "No single change makes a full stop fit: change several, and run this again."]
    lines += ["", f"The terms, for {clean(result['ups'])}:"]
    lines += table(
        [(term["name"], _value(term["value"], term["unit"]), clean(term["source"])) for term in result["terms"]]
    )
    return lines
