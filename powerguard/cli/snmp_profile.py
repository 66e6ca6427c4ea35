"""`powerguard snmp test-profile`: a profile file, a recorded walk, and whether the two say what they should."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from powerguard.cli.operate import fail
from powerguard.cli.render import Paint, clean
from powerguard.cli.snmp import EX_DATA, EX_NOTHING
from powerguard.cli.snmp_render import describe, shape
from powerguard.profiles.decode import decode
from powerguard.profiles.load import ProfileError, load_profiles, read_profile
from powerguard.profiles.probe import fits, identity, unmet
from powerguard.profiles.schema import Profile
from powerguard.profiles.values import Answer
from powerguard.profiles.walk import WalkError, read_walk

_MOST_BYTES: Final = 1 << 20
_NEAR: Final = 0.05


def run_test(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        profile = read_profile(Path(args.profile_file))
        answers = read_walk(Path(args.walk))
        expected = None if args.expected is None else _expected(Path(args.expected))
    except (ProfileError, WalkError, ValueError) as error:
        return fail(args, "snmp test-profile", str(error).replace("\n", "; "), EX_DATA)
    except OSError as error:
        return fail(args, "snmp test-profile", f"{error.filename}: {error.strerror}", EX_DATA)
    if not fits(profile, answers):
        wants = "; ".join(unmet(profile, answers))
        sys_object_id, sys_descr = identity(answers)
        device = f"{sys_descr or 'no sysDescr'}, {sys_object_id or 'no sysObjectID'}"
        why = f"{args.profile_file}: does not fit {args.walk} ({device}): {wants}"
        return fail(args, "snmp test-profile", why, EX_NOTHING)
    told = _told(args, profile, answers)
    wrong = [] if expected is None else compare(told, expected)
    told["expected"] = args.expected
    told["wrong"] = wrong
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        print("\n".join([*describe(told), *_verdict(wrong, args.expected)]))
    return EX_NOTHING if wrong else 0


def _expected(path: Path) -> dict[str, Any]:
    if not path.is_file():
        path.stat()
        msg = f"{path}: is not a file; name one of JSON"
        raise ValueError(msg)
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        msg = f"{path}: is no JSON: {error}"
        raise ValueError(msg) from error
    if not isinstance(told, dict):
        msg = f'{path}: is no JSON object, as in {{"profile": "acme", "runtime_s": 1740}}'
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not our code
    return told


def _told(args: argparse.Namespace, profile: Profile, answers: Mapping[str, Answer]) -> dict[str, Any]:
    """Decode with the profile, and with RFC 1628 for its gaps as the daemon has it."""
    standard = load_profiles(None).by_name["rfc1628"]
    profiles = [profile]
    if profile.kind == "ups" and profile.name != standard.name and fits(standard, answers):
        profiles.append(standard)
        profiles.sort(key=lambda one: -one.rank)
    decoded = decode(profiles, answers)
    return shape("snmp-test-profile", profiles, decoded, answers, from_={"file": args.walk})


def compare(told: Mapping[str, Any], expected: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is not as expected: key, what was told, what would be right.

    `profile` may hold several names with a bar between them; `accept` holds, for some keys, a list of other right
    answers. Numbers are equal within 0.05: devices differ in how they round. Keys that no decoder tells are left out.
    """
    accept = expected.get("accept", {})
    wrong = []
    for key, want in expected.items():
        if key not in told or key in {"accept", "schema_version", "object", "file"}:
            continue
        others = accept.get(key, []) if isinstance(accept, dict) else []
        right = want.split("|") if key == "profile" and isinstance(want, str) else [want]
        right += others if isinstance(others, list) else [others]
        if not any(_same(told[key], one) for one in right):
            wrong.append({"key": key, "told": told[key], "expected": right})
    return wrong


def _same(told: object, want: object) -> bool:
    if isinstance(told, bool) or isinstance(want, bool):
        return told is want
    if isinstance(told, int | float) and isinstance(want, int | float):
        return abs(told - want) <= _NEAR
    return told == want


def _verdict(wrong: list[dict[str, Any]], expected: str | None) -> list[str]:
    paint = Paint()
    if expected is None:
        return ["the profile fits; nothing was said of what is right"]
    if not wrong:
        return [paint(f"as {clean(expected)} says", "green")]
    return [
        paint(f"{clean(one['key'])}: told {clean(one['told'])}, expected {_or(one['expected'])}", "red")
        for one in wrong
    ]


def _or(right: list[object]) -> str:
    return " or ".join(clean(json.dumps(one)) for one in right)
