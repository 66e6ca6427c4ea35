"""`powerguard snmp probe HOST`: ask a card once; show its answers, and which of them are believed.

It can also save a walk without names, addresses and serial numbers, to share with others.
"""

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powerguard.cli.render import Paint, clean, duration, table
from powerguard.cli.shared import EX_NOTHING, EX_USAGE, fail, print_answer, snmp_options, snmp_secrets
from powerguard.core.model.events import OutputSource
from powerguard.options import SecretError
from powerguard.ups.profiles.decode import Decoded
from powerguard.ups.profiles.load import Profiles, load_profiles
from powerguard.ups.profiles.probe import identity
from powerguard.ups.profiles.schema import Profile
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid, below, parts
from powerguard.ups.profiles.walk import format_walk
from powerguard.ups.snmp.discovery import SYS_DESCR, SYS_OBJECT_ID
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.port import CardPort, SnmpError
from powerguard.ups.snmp.source import ProbeReport, probe

_LONGEST: Final = 200
_UNITS: Final = {
    "charge_pct": "%",
    "load_pct": "%",
    "watts": "W",
    "input_voltage": "V",
    "battery_temp_c": "C",
    "amps": "A",
}
_KEYS: Final = {"input_voltage": "input_v"}
"""Where a key has another name than the field of a reading that it is."""


def plain(value: float | None) -> float | int | None:
    """Return a number without an unnecessary fraction."""
    return int(value) if value is not None and value == int(value) else value


def raw_of(raw: Answer | str) -> int | str:
    """Return a device's answer for JSON: a number, text, hexadecimal digits, or why there is none."""
    match raw:
        case Missing():
            return raw.value
        case int():
            return raw
        case bytes():
            text = raw.decode("utf-8", "replace")
            return text[:_LONGEST] if text.isprintable() else f"0x{raw[: _LONGEST // 2].hex()}"
        case _:
            return str(raw)


def shape(
    name: str,
    profiles: Sequence[Profile],
    decoded: Decoded,
    answers: Mapping[str, Answer],
    *,
    from_: Mapping[str, object],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the JSON object. name: of its `object`; from_: where the values come from; notes: further warnings."""
    sys_object_id, sys_descr = identity(answers)
    is_ups = decoded.kind == "ups"
    replace = True if decoded.replace_battery else (False if decoded.replace_reported else None)
    return {
        "schema_version": 1,
        "object": name,
        **from_,
        "kind": decoded.kind,
        "profile": profiles[0].name,
        "profiles": [profile.name for profile in profiles],
        "output_source": (decoded.output_source or OutputSource.UNKNOWN).value if is_ups else None,
        "on_battery": decoded.on_battery if is_ups else None,
        "battery_status": decoded.battery_status.value if decoded.battery_status else None,
        "runtime_s": plain(decoded.runtime_s),
        "charge_pct": plain(decoded.charge_pct),
        "load_pct": plain(decoded.load_pct),
        "load_lines": [plain(line) for line in decoded.load_lines] or None,
        "watts": plain(decoded.watts),
        "replace_battery": replace if is_ups else None,
        "input_voltage": plain(decoded.input_v),
        "battery_temp_c": plain(decoded.battery_temp_c),
        "amps": plain(decoded.amps),
        "outlets": {number: state.value for number, state in decoded.outlets} or None,
        "on_battery_s": plain(decoded.on_battery_s),
        "output_off_in_s": plain(decoded.output_off_in_s),
        "low_battery": decoded.low_battery if is_ups else None,
        "alarms": list(decoded.alarms),
        "witnesses": list(decoded.witnesses),
        "stale": decoded.stale,
        "device": {"sys_descr": sys_descr or None, "sys_object_id": sys_object_id or None},
        "provenance": {_key_of(field): origin for field, origin in decoded.provenance},
        "rejected": [
            {"field": _key_of(one.field), "object": str(one.oid), "raw": raw_of(one.raw), "why": one.why}
            for one in decoded.rejected
        ],
        "warnings": [*decoded.warnings, *notes],
    }


def _key_of(field: str) -> str:
    return next((key for key, name in _KEYS.items() if name == field), field)


def describe(result: Mapping[str, Any]) -> list[str]:
    """Return the object as lines of text."""
    paint = Paint(sys.stdout)
    where = result.get("host") or result.get("file") or ""
    lines = [f"{clean(where)}: {result['kind']}, {', '.join(result['profiles'])}"]
    device = result["device"]
    lines.append(
        f"  {clean(device['sys_descr'] or 'no sysDescr')} ({clean(device['sys_object_id'] or 'no sysObjectID')})"
    )
    if result["stale"]:
        lines.append(paint(f"  frozen: {clean(result['stale'])}", "red"))
    rows = [(key, *_row(result, key)) for key in _shown(result)]
    lines += table([(key, text, origin) for key, text, origin in rows])
    if result["outlets"]:
        by_state: dict[str, list[str]] = {}
        for number, state in result["outlets"].items():
            by_state.setdefault(state, []).append(number)
        lines += table([(f"outlets {state}", clean(", ".join(numbers))) for state, numbers in by_state.items()])
    if result["alarms"]:
        lines.append(f"  alarms: {', '.join(result['alarms'])}")
    if result["rejected"]:
        lines.append("not believed")
        lines += table(
            [
                (one["field"], clean(one["object"]), f"{clean(one['raw'])}: {clean(one['why'])}")
                for one in result["rejected"]
            ]
        )
    lines += [paint(f"warning: {clean(warning)}", "yellow") for warning in result["warnings"]]
    return lines


def _shown(result: Mapping[str, Any]) -> list[str]:
    ups = ["output_source", "on_battery", "battery_status", "runtime_s", "charge_pct", "load_pct", "watts"]
    ups += ["replace_battery", "input_voltage", "battery_temp_c", "on_battery_s", "output_off_in_s"]
    pdu = ["watts", "amps", "load_pct", "input_voltage"]
    return ups if result["kind"] == "ups" else pdu


def _row(result: Mapping[str, Any], key: str) -> tuple[str, str]:
    value = result[key]
    origin = result["provenance"].get(key, "")
    if value is None:
        return "?", ""
    if isinstance(value, bool):
        return ("yes" if value else "no"), origin
    if key.endswith("_s"):
        return f"{duration(value)} ({value} s)", origin
    text = f"{value} {_UNITS[key]}" if key in _UNITS else str(value)
    if key == "load_pct" and result["load_lines"] is not None and len(result["load_lines"]) > 1:
        text += f" (lines {', '.join(map(str, result['load_lines']))})"
    return text, origin


REMOVED: Final = b"<removed>"
_SYS_DESCR: Final = "1.3.6.1.2.1.1.1.0"
_UPS_MODEL: Final = (
    "1.3.6.1.2.1.33.1.1.1.0",
    "1.3.6.1.2.1.33.1.1.2.0",
    "1.3.6.1.2.1.33.1.1.3.0",
    "1.3.6.1.2.1.33.1.1.4.0",
)
"""RFC 1628 upsIdentManufacturer, Model, UPSSoftwareVersion, AgentSoftwareVersion."""
_KEPT: Final = frozenset({_SYS_DESCR, "1.3.6.1.2.1.1.2.0", "1.3.6.1.2.1.1.3.0", *_UPS_MODEL})
_SYSTEM: Final = "1.3.6.1.2.1.1"
_SERIAL: Final = re.compile(r"(?i)\b(s/?n|serial(?:\s*(?:number|no\.?|num))?)\s*[:=#]?\s*[A-Z0-9-]{4,}")
_ADDRESS: Final = re.compile(
    r"\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b|\b[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}\b|[^\s@]+@[^\s@]+"
)
_READING: Final = re.compile(rb"\s*[+-]?[0-9]{1,6}(\.[0-9]{1,3})?\s*|[01]{8,128}")
"""A number that a device sends as text, or a string of flags; a serial number of digits alone has more of them."""

HEADER: Final = """\
# A walk of a power supply, written by `powerguard snmp probe --save`; OID|tag|value.
# Text that no profile reads ({removed} objects) is replaced by {mark}: most of it is names, places, serial numbers and
# addresses. Numbers are unchanged. Read it before you share it.
"""


def enterprise(oid: str) -> str | None:
    """Return the node of the maker that an OID is below: 1.3.6.1.4.1.318. None for any other OID."""
    found = re.match(r"1\.3\.6\.1\.4\.1\.[0-9]+(?=\.|$)", oid)
    return found[0] if found else None


def roots(profiles: Iterable[Profile], sys_object_id: str) -> list[str]:
    """Return the subtrees to walk: identification, RFC 1628, and those of the makers that profiles and device name.

    If neither names one, those of all makers.
    """
    named = [profile.base for profile in profiles if profile.base is not None]
    makers = [maker for oid in (*named, sys_object_id) if (maker := enterprise(oid)) is not None]
    # net-snmp's own node holds the agent's statistics, not a power supply.
    makers = [one for one in dict.fromkeys(makers) if one != "1.3.6.1.4.1.8072"]
    return [_SYSTEM, "1.3.6.1.2.1.33", *(makers or ["1.3.6.1.4.1"])]


def anonymous(answers: Mapping[str, Answer], profiles: Iterable[Profile]) -> tuple[dict[str, Answer], int]:
    """Return the answers without texts that could identify a site, and the number of removed ones."""
    read: set[str] = set()
    columns: list[str] = []
    for profile in profiles:
        read.update(profile.scalars())
        columns.extend(profile.columns())
    kept: dict[str, Answer] = {}
    removed = 0
    for oid, answer in answers.items():
        if below(oid, _SYSTEM) and oid not in _KEPT:
            removed += 1
            continue
        if not isinstance(answer, bytes):
            kept[oid] = answer
            continue
        known = oid in read or oid in _KEPT or any(below(oid, column) for column in columns)
        kept[oid] = _without_names(answer) if known or _READING.fullmatch(answer) else REMOVED
        removed += kept[oid] != answer
    return kept, removed


def _without_names(text: bytes) -> bytes:
    shown = text.decode("utf-8", "replace")
    mark = REMOVED.decode()
    cleaned = _ADDRESS.sub(mark, _SERIAL.sub(lambda found: f"{found[1]}: {mark}", shown))
    return text if cleaned == shown else cleaned.encode()


def walk_file(answers: Mapping[str, Answer], profiles: Iterable[Profile]) -> str:
    """Return the text of the file."""
    kept, removed = anonymous(answers, profiles)
    return HEADER.format(removed=removed, mark=REMOVED.decode()) + format_walk(kept)


MOST_OBJECTS: Final = 5000
_WITH_PORT: Final = re.compile(r"([^\[\]:]+|\[[^\[\]]*\]):([0-9]{1,5})")
"""host:port; a bare IPv6 address has more colons."""
WALK_S: Final = 180.0
"""Show a progress line: a slow card answers 5 objects per second."""


def run_probe(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    verb = "snmp probe"
    if (with_port := _WITH_PORT.fullmatch(args.host)) is not None:
        return fail(args, verb, f"{args.host}: write {with_port[1]} --port {with_port[2]}", EX_USAGE)
    try:
        options = options_of(args)
    except ValueError as error:
        return fail(args, verb, str(error), EX_USAGE)
    if args.save is not None and Path(args.save).exists():
        return fail(args, verb, f"{args.save}: already exists; name a new file", EX_USAGE)
    if args.save is not None and not os.access(Path(args.save).absolute().parent, os.W_OK | os.X_OK):
        # Before the walk, which takes minutes.
        return fail(args, verb, f"{args.save}: its folder is not there, or you may not write to it", EX_USAGE)
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
        return fail(args, verb, f"{look.because}; its answers are saved as {args.save}", EX_NOTHING)
    result = _shape(look.report, [look.profiles.by_name[name] for name in look.report.profiles], args.host)
    result["saved"] = args.save
    print_answer(args, result, lambda: _lines(result))
    return 0


def options_of(args: argparse.Namespace) -> SnmpOptions:
    """Return the options as the settings of a source. Raises ValueError, whose text is for the operator."""
    version = args.snmp_version or ("2c" if args.user is None else "3")
    given: dict[str, Any] = {
        "host": args.host,
        "port": args.port,
        "version": int(version) if version.isdigit() else version,
        "timeout_s": args.timeout,
        "user": args.user,
        "profile": args.profile,
    }
    return snmp_options(given | snmp_secrets(args))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The result. report None: no family fits, because; then there is only the walk."""

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
        because = str(error)  # The walk of a card of an unknown family is the most valuable one.
    if args.save is not None:
        chosen = [] if report is None else [profiles.by_name[name] for name in report.profiles]
        walked = await _walk(options, chosen, quiet=args.json)
        walked |= {} if report is None else report.raw
    return _Look(report=report, because=because, profiles=profiles, walked=walked)


async def _walk(options: SnmpOptions, profiles: list[Profile], *, quiet: bool) -> dict[str, Answer]:
    """Walk all subtrees of the power supply, within MOST_OBJECTS and WALK_S."""
    port = CardPort(options)
    found: dict[str, Answer] = {}
    try:
        async with asyncio.timeout(WALK_S):
            object_id = (await port.get([SYS_OBJECT_ID]))[SYS_OBJECT_ID]
            for root in roots(profiles, object_id if isinstance(object_id, Oid) else ""):
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
            print(f"powerguard snmp probe: the walk is incomplete: {clean(why)}", file=sys.stderr)
    finally:
        await port.close()
    return found


def _shape(report: ProbeReport, chosen: list[Profile], host: str) -> dict[str, Any]:
    answers: dict[str, Answer] = {**report.raw, str(SYS_DESCR): report.identity.sys_descr.encode()}
    result = shape("snmp-probe", chosen, report.decoded, answers, from_={"host": host}, notes=report.profile_problems)
    result["device"]["sys_object_id"] = report.identity.sys_object_id or None
    result["authenticated"] = report.authenticated
    result["latency_s"] = round(report.latency_s, 4)
    result["raw"] = {oid: raw_of(answer) for oid, answer in sorted(report.raw.items(), key=lambda one: parts(one[0]))}
    result["saved"] = None
    return result


def _lines(card: dict[str, Any]) -> list[str]:
    paint = Paint()
    lines = describe(card)
    lines.append(f"raw ({len(card['raw'])} objects, one poll takes {card['latency_s'] * 1000:.0f} ms)")
    lines += table([(oid, clean(value)) for oid, value in card["raw"].items()])
    if not card["authenticated"]:
        lines.append(paint("not authenticated: any host on the network in between could have forged this", "yellow"))
    if card["saved"] is not None:
        lines.append(
            f"saved as {clean(card['saved'])}, without names, addresses and serial numbers; read it before you share it"
        )
    return lines
