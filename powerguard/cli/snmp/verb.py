"""`powerguard snmp decode|probe|test-profile`: read a UPS or rack PDU over SNMP and decode it as the daemon does."""

import argparse
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from powerguard.cli.render import Paint, clean
from powerguard.cli.shared import EX_DATA, EX_NOTHING, add_snmp_secrets, fail, port, print_answer
from powerguard.cli.snmp.probe import describe, run_probe, shape
from powerguard.ups.profiles.decode import decode
from powerguard.ups.profiles.load import ProfileError, Profiles, load_profiles, read_profile
from powerguard.ups.profiles.probe import choose, fits, identity, partly, unmet
from powerguard.ups.profiles.schema import Profile
from powerguard.ups.profiles.vocabulary import Answer
from powerguard.ups.profiles.walk import WalkError, read_walk

SITE: Final = "/etc/powerguard/profiles.d"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = "Read a card, or a recorded walk of one, and decode it as the daemon does."
    verbs = parser.add_subparsers(dest="snmp_verb", metavar="decode|probe|test-profile", required=True)
    _register_decode(verbs.add_parser("decode", help="decode a recorded walk"))
    _register_probe(verbs.add_parser("probe", help="ask a card, and show raw and decoded values"))
    _register_test(verbs.add_parser("test-profile", help="check a profile file with a recorded walk"))


def _register_decode(decode: argparse.ArgumentParser) -> None:
    decode.description = (
        "Decode a recorded walk (one OID|tag|value per line) as the daemon would decode the device. Exit "
        "0: decoded; 1: no known family of UPSes or PDUs; 65: the file is not a walk."
    )
    decode.add_argument("file", metavar="FILE", help="the walk")
    decode.add_argument("--profile", metavar="NAME", help="use this family, not the one found by probing")
    _common(decode)


def _register_probe(probe: argparse.ArgumentParser) -> None:
    probe.description = (
        "Ask a card once and show its identity, its answers, and which of them are believed, and why. "
        "Secrets are read from files that only you can read. Exit 0: shown; 1: no answer, or no family fits."
    )
    probe.add_argument("host", metavar="HOST", help="address or name of the card")
    probe.add_argument("--port", type=port(161), default=161, help="UDP port (161)")
    probe.add_argument("--version", dest="snmp_version", choices=("1", "2c", "3"), help="default: 2c, or 3")
    add_snmp_secrets(probe)
    probe.add_argument("--timeout", metavar="S", type=float, default=2.0, help="seconds for an answer, asked twice (2)")
    probe.add_argument("--profile", metavar="NAME", help="use this family, not the one found by probing")
    probe.add_argument("--save", metavar="FILE", help="also walk the whole device, and write the walk without names")
    _common(probe)


def _register_test(test: argparse.ArgumentParser) -> None:
    test.description = (
        "Check a profile file, whether it fits a walk, and the decoded values; with EXPECTED, whether "
        "they are right: a JSON object with the keys of `decode --json`, and `accept` for other right answers. "
        "Exit 0: good; 1: it does not fit, or a value is not as expected; 65: a file that cannot be read."
    )
    test.add_argument("profile_file", metavar="PROFILE.yaml")
    test.add_argument("walk", metavar="WALK")
    test.add_argument("expected", metavar="EXPECTED.json", nargs="?")
    _common(test)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--site", metavar="FOLDER", default=SITE, help=f"profiles of this site ({SITE})")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    if args.snmp_verb == "decode":
        return _decode(args)
    if args.snmp_verb == "probe":
        return run_probe(args)
    return run_test(args)


def _decode(args: argparse.Namespace) -> int:
    try:
        answers = read_walk(Path(args.file))
    except WalkError as error:
        return fail(args, "snmp decode", str(error), EX_DATA)
    profiles = load_profiles(Path(args.site))
    try:
        chosen, notes = choose_for(profiles, answers, args.profile)
    except LookupError as error:
        return fail(args, "snmp decode", f"{args.file}: {error.args[0]}", EX_NOTHING)
    decoded = decode(chosen, answers)
    result = shape(
        "snmp-decode", chosen, decoded, answers, from_={"file": args.file}, notes=[*notes, *profiles.problems]
    )
    print_answer(args, result, lambda: describe(result))
    return 0


def choose_for(profiles: Profiles, answers: dict[str, Any], wanted: str | None) -> tuple[tuple[Any, ...], list[str]]:
    """Return the families of a walk, and notes on the choice. Raises LookupError when there is none.

    A walk without the output source, such as a truncated one, is decoded as far as it goes.
    """
    sys_object_id, sys_descr = identity(answers)
    if wanted is not None:
        if wanted not in profiles.by_name:
            near = get_close_matches(wanted, profiles.by_name, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(profiles.by_name))}"
            msg = f"unknown profile {wanted!r} ({hint})"
            raise LookupError(msg)
        named = profiles.by_name[wanted]
        standard = [profiles.by_name["rfc1628"]] if named.kind == "ups" and wanted != "rfc1628" else []
        fitting = choose([named, *standard], answers, sys_object_id=sys_object_id, sys_descr=sys_descr)
        notes = [] if named in fitting else [f"profile {wanted} does not fit: {sys_descr or 'no sysDescr'}"]
        return (named, *(one for one in fitting if one is not named)), notes
    chosen = choose(profiles.every(), answers, sys_object_id=sys_object_id, sys_descr=sys_descr)
    if chosen:
        return chosen, []
    chosen = partly(profiles.every(), answers, sys_object_id=sys_object_id, sys_descr=sys_descr)
    if chosen:
        return chosen, [
            "no family fits as a whole: these are the values of single objects, and the daemon would not use them"
        ]
    msg = (
        f"no family of UPSes or PDUs is in these {len(answers)} objects ({sys_descr or 'no sysDescr'},"
        f" {sys_object_id or 'no sysObjectID'}); it may need a profile in {SITE}"
    )
    raise LookupError(msg)


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
    result = _decode_by_profile(args, profile, answers)
    wrong = [] if expected is None else compare(result, expected)
    result["expected"] = args.expected
    result["wrong"] = wrong
    print_answer(args, result, lambda: [*describe(result), *_verdict(wrong, args.expected)])
    return EX_NOTHING if wrong else 0


def _expected(path: Path) -> dict[str, Any]:
    if not path.is_file():
        path.stat()
        msg = f"{path}: is not a file; name a JSON file"
        raise ValueError(msg)
    try:
        with path.open("rb") as file:
            expected = json.loads(file.read(_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        msg = f"{path}: is not JSON: {error}"
        raise ValueError(msg) from error
    if not isinstance(expected, dict):
        msg = f'{path}: is not a JSON object (example: {{"profile": "acme", "runtime_s": 1740}})'
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not our code
    return expected


def _decode_by_profile(args: argparse.Namespace, profile: Profile, answers: Mapping[str, Answer]) -> dict[str, Any]:
    """Decode with the profile, and with RFC 1628 for its gaps as the daemon has it."""
    standard = load_profiles(None).by_name["rfc1628"]
    profiles = [profile]
    if profile.kind == "ups" and profile.name != standard.name and fits(standard, answers):
        profiles.append(standard)
        profiles.sort(key=lambda one: -one.rank)
    decoded = decode(profiles, answers)
    return shape("snmp-test-profile", profiles, decoded, answers, from_={"file": args.walk})


def compare(decoded: Mapping[str, Any], expected: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the differences: key, decoded value, expected value.

    `profile` may hold several names with a bar between them; `accept` holds, for some keys, a list of other right
    answers. Numbers are equal within 0.05: devices differ in how they round. Keys that no decoder returns are left out.
    """
    accept = expected.get("accept", {})
    wrong = []
    for key, want in expected.items():
        if key not in decoded or key in {"accept", "schema_version", "object", "file"}:
            continue
        others = accept.get(key, []) if isinstance(accept, dict) else []
        right = want.split("|") if key == "profile" and isinstance(want, str) else [want]
        right += others if isinstance(others, list) else [others]
        if not any(_same(decoded[key], one) for one in right):
            wrong.append({"key": key, "decoded": decoded[key], "expected": right})
    return wrong


def _same(value: object, want: object) -> bool:
    if isinstance(value, bool) or isinstance(want, bool):
        return value is want
    if isinstance(value, int | float) and isinstance(want, int | float):
        return abs(value - want) <= _NEAR
    return value == want


def _verdict(wrong: list[dict[str, Any]], expected: str | None) -> list[str]:
    paint = Paint()
    if expected is None:
        return ["the profile fits; there is no EXPECTED to compare with"]
    if not wrong:
        return [paint(f"as in {clean(expected)}", "green")]
    return [
        paint(f"{clean(one['key'])}: decoded {clean(one['decoded'])}, expected {_or(one['expected'])}", "red")
        for one in wrong
    ]


def _or(right: list[object]) -> str:
    return " or ".join(clean(json.dumps(one)) for one in right)
