"""`powerguard snmp probe HOST`: ask a card once; show what it says, what is believed, and what not and why."""

import argparse
import asyncio
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from powerguard.cli.operate import fail
from powerguard.cli.render import Paint, clean, table
from powerguard.cli.snmp import EX_NOTHING, EX_USAGE
from powerguard.cli.snmp_render import describe, raw_of, shape
from powerguard.cli.snmp_save import roots, walk_file
from powerguard.options import SecretError
from powerguard.profiles.load import Profiles, load_profiles
from powerguard.profiles.schema import Profile
from powerguard.profiles.values import Answer, Oid, parts
from powerguard.sources.snmp import ProbeReport, probe
from powerguard.sources.snmp_discovery import SYS_DESCR, SYS_OBJECT_ID
from powerguard.sources.snmp_options import SnmpOptions
from powerguard.sources.snmp_port import CardPort, SnmpError

MOST_OBJECTS: Final = 5000
_WITH_PORT: Final = re.compile(r"([^\[\]:]+|\[[^\[\]]*\]):([0-9]{1,5})")
"""host:port; a bare IPv6 address has more colons."""
WALK_S: Final = 180.0
"""A slow card answers 5 objects a second; whoever waits wants to know when it ends."""


def run_probe(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    verb = "snmp probe"
    if (with_port := _WITH_PORT.fullmatch(args.host)) is not None:
        return fail(args, verb, f"{args.host}: write {with_port[1]} --port {with_port[2]}", EX_USAGE)
    try:
        options = options_of(args)
    except ValidationError as error:
        why = "; ".join(_told(problem) for problem in error.errors())
        return fail(args, verb, why, EX_USAGE)
    if args.save is not None and Path(args.save).exists():
        return fail(args, verb, f"{args.save}: is there already; name a file that is not", EX_USAGE)
    try:
        look = asyncio.run(_look(options, args))
    except (SnmpError, SecretError) as error:
        return fail(args, verb, str(error), EX_NOTHING)
    if args.save is not None:
        try:
            with Path(args.save).open("x", encoding="utf-8") as file:
                file.write(walk_file(look.walked, look.profiles.every()))
        except OSError as error:
            return fail(args, verb, f"{args.save}: {error.strerror}", EX_NOTHING)
    if look.report is None:
        return fail(args, verb, f"{look.because}; what it says is saved as {args.save}", EX_NOTHING)
    told = _shape(look.report, [look.profiles.by_name[name] for name in look.report.profiles], args.host)
    told["saved"] = args.save
    print(json.dumps(told, indent=2) if args.json else "\n".join(_lines(told)))
    return 0


def options_of(args: argparse.Namespace) -> SnmpOptions:
    """Return what was asked for as the settings of a source. Raises ValidationError."""
    version = args.snmp_version or ("2c" if args.user is None else "3")
    given: dict[str, Any] = {
        "kind": "snmp",
        "host": args.host,
        "port": args.port,
        "version": int(version) if version.isdigit() else version,
        "timeout_s": args.timeout,
        "user": args.user,
        "profile": args.profile,
    }
    for key in ("community", "auth", "priv"):
        file = getattr(args, f"{key}_file")
        given[key] = None if file is None else {"file": str(Path(file).absolute())}
    for key in ("auth_protocol", "priv_protocol"):
        if getattr(args, key) is not None:
            given[key] = getattr(args, key)
    return SnmpOptions.model_validate(given)


def _told(problem: Any) -> str:  # noqa: ANN401 - pydantic's own
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where + ': ' if where else ''}{problem['msg'].removeprefix('Value error, ')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What was found. report None: no family fits, because; then there is only the walk."""

    report: ProbeReport | None
    because: str
    profiles: Profiles
    walked: dict[str, Answer]


async def _look(options: SnmpOptions, args: argparse.Namespace) -> _Look:
    profiles = await asyncio.to_thread(load_profiles, Path(args.site))
    report, because = None, ""
    walked: dict[str, Answer] = {}
    try:
        report = await probe(options, profiles=profiles, with_pdus=True)
    except SnmpError as error:
        if error.unanswered or args.save is None:
            raise
        because = str(error)  # A card of no family that is known is the one whose walk is wanted most.
    if args.save is not None:
        chosen = [] if report is None else [profiles.by_name[name] for name in report.profiles]
        walked = await _walk(options, chosen, quiet=args.json)
        walked |= {} if report is None else report.raw
    return _Look(report=report, because=because, profiles=profiles, walked=walked)


async def _walk(options: SnmpOptions, profiles: list[Profile], *, quiet: bool) -> dict[str, Answer]:
    """Walk all that is the power supply's, as far as MOST_OBJECTS and WALK_S reach."""
    port = CardPort(options)
    found: dict[str, Answer] = {}
    try:
        async with asyncio.timeout(WALK_S):
            told = (await port.get([SYS_OBJECT_ID]))[SYS_OBJECT_ID]
            for root in roots(profiles, told if isinstance(told, Oid) else ""):
                after: str | None = None
                while len(found) < MOST_OBJECTS:
                    rows = await port.walk(root, after)
                    found.update(rows)
                    if not rows:
                        break
                    after = max(rows, key=parts)
    except (TimeoutError, SnmpError) as error:
        if not quiet:
            why = str(error) or f"more than {WALK_S:g} s"
            print(f"powerguard snmp probe: the walk is not whole: {clean(why)}", file=sys.stderr)
    finally:
        await port.close()
    return found


def _shape(report: ProbeReport, chosen: list[Profile], host: str) -> dict[str, Any]:
    answers: dict[str, Answer] = {**report.raw, str(SYS_DESCR): report.identity.sys_descr.encode()}
    told = shape("snmp-probe", chosen, report.decoded, answers, from_={"host": host}, notes=report.profile_problems)
    told["device"]["sys_object_id"] = report.identity.sys_object_id or None
    told["authenticated"] = report.authenticated
    told["latency_s"] = round(report.latency_s, 4)
    told["raw"] = {oid: raw_of(answer) for oid, answer in sorted(report.raw.items(), key=lambda one: parts(one[0]))}
    told["saved"] = None
    return told


def _lines(told: dict[str, Any]) -> list[str]:
    paint = Paint()
    lines = describe(told)
    lines.append(f"raw ({len(told['raw'])} objects, one poll takes {told['latency_s'] * 1000:.0f} ms)")
    lines += table([(oid, clean(value)) for oid, value in told["raw"].items()])
    if not told["authenticated"]:
        lines.append(paint("not authenticated: anyone on the network between could have said this", "yellow"))
    if told["saved"] is not None:
        lines.append(f"saved as {clean(told['saved'])}, without names, addresses and serial numbers; look through it")
    return lines
