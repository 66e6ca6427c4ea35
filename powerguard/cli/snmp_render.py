"""What `powerguard snmp` shows of a device: as one JSON object, and as lines for people."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from powerguard.cli.render import Paint, clean, duration, table
from powerguard.core.readings import OutputSource
from powerguard.profiles.decode import Decoded
from powerguard.profiles.probe import identity
from powerguard.profiles.schema import Profile
from powerguard.profiles.values import Answer, Missing

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
    """Return a number without a needless fraction."""
    return int(value) if value is not None and value == int(value) else value


def raw_of(raw: Answer | str) -> int | str:
    """Return what a device answered, as JSON can hold it: a number, text, hexadecimal digits, or why there is none."""
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
    replace = True if decoded.replace_battery else (False if decoded.replace_told else None)
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
        "provenance": {_key_of(field): told_by for field, told_by in decoded.provenance},
        "rejected": [
            {"field": _key_of(one.field), "object": str(one.oid), "raw": raw_of(one.raw), "why": one.why}
            for one in decoded.rejected
        ],
        "warnings": [*decoded.warnings, *notes],
    }


def _key_of(field: str) -> str:
    return next((key for key, name in _KEYS.items() if name == field), field)


def describe(told: Mapping[str, Any]) -> list[str]:
    """Return the object as lines for people."""
    paint = Paint(sys.stdout)
    where = told.get("host") or told.get("file") or ""
    lines = [f"{clean(where)}: {told['kind']}, {', '.join(told['profiles'])}"]
    device = told["device"]
    lines.append(
        f"  {clean(device['sys_descr'] or 'no sysDescr')} ({clean(device['sys_object_id'] or 'no sysObjectID')})"
    )
    if told["stale"]:
        lines.append(paint(f"  frozen: {clean(told['stale'])}", "red"))
    rows = [(key, *_row(told, key)) for key in _shown(told)]
    lines += table([(key, text, told_by) for key, text, told_by in rows])
    if told["outlets"]:
        by_state: dict[str, list[str]] = {}
        for number, state in told["outlets"].items():
            by_state.setdefault(state, []).append(number)
        lines += table([(f"outlets {state}", clean(", ".join(numbers))) for state, numbers in by_state.items()])
    if told["alarms"]:
        lines.append(f"  alarms: {', '.join(told['alarms'])}")
    if told["rejected"]:
        lines.append("not believed")
        lines += table(
            [
                (one["field"], clean(one["object"]), f"{clean(one['raw'])}: {clean(one['why'])}")
                for one in told["rejected"]
            ]
        )
    lines += [paint(f"warning: {clean(warning)}", "yellow") for warning in told["warnings"]]
    return lines


def _shown(told: Mapping[str, Any]) -> list[str]:
    ups = ["output_source", "on_battery", "battery_status", "runtime_s", "charge_pct", "load_pct", "watts"]
    ups += ["replace_battery", "input_voltage", "battery_temp_c", "on_battery_s", "output_off_in_s"]
    pdu = ["watts", "amps", "load_pct", "input_voltage"]
    return ups if told["kind"] == "ups" else pdu


def _row(told: Mapping[str, Any], key: str) -> tuple[str, str]:
    value = told[key]
    told_by = told["provenance"].get(key, "")
    if value is None:
        return "?", ""
    if isinstance(value, bool):
        return ("yes" if value else "no"), told_by
    if key.endswith("_s"):
        return f"{duration(value)} ({value} s)", told_by
    text = f"{value} {_UNITS[key]}" if key in _UNITS else str(value)
    if key == "load_pct" and told["load_lines"] is not None and len(told["load_lines"]) > 1:
        text += f" (lines {', '.join(map(str, told['load_lines']))})"
    return text, told_by
